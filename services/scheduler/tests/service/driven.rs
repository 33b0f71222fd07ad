//! Tests of driven leases in use: their gateways stop what runs under them before they end.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, WorkloadId};
use rpc::pb::artifacts as store;
use rpc::pb::artifacts::pins_client::PinsClient;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::desired_lease::Action;
use rpc::{Reason, Refusal};
use testing::databases::TestDatabase;

use crate::leases::{lease, refused, task, with_slots};
use crate::store::Place;
use crate::support::{Gateway, Running, config, registration, spec, until};

async fn place(scheduler: &Running, request: &pb::PlaceRequest) -> pb::PlaceResponse {
    scheduler.placements().place(request.clone()).await.expect("granted").into_inner()
}

async fn use_lease(scheduler: &Running, token: &str) -> Result<(), Refusal> {
    let request = pb::UseLeaseRequest { lease_token: token.to_owned() };
    scheduler.placements().use_lease(request).await?;
    Ok(())
}

async fn release(
    scheduler: &Running,
    token: &str,
    settlement: Option<pb::Settlement>,
) -> Result<Vec<pb::OwnerMissing>, Refusal> {
    let request = pb::ReleaseRequest { lease_token: token.to_owned(), settlement };
    Ok(scheduler.placements().release(request).await?.into_inner().missing)
}

/// Waits until the gateway must stop this lease.
async fn stop(gateway: &mut Gateway, id: &str) -> pb::StopAttempt {
    let stop = |lease: &pb::DesiredLease| match &lease.action {
        Some(Action::Stop(stop)) if lease.lease_id == id => Some(stop.clone()),
        _ => None,
    };
    gateway.desires("a stop of the lease", stop).await
}

/// Waits until the gateway must hold this lease.
async fn hold(gateway: &mut Gateway, id: &str) -> pb::HoldLease {
    let hold = |lease: &pb::DesiredLease| match &lease.action {
        Some(Action::Hold(hold)) if lease.lease_id == id => Some(hold.clone()),
        _ => None,
    };
    gateway.desires("the lease in use", hold).await
}

/// Waits until a lease has ended, and returns it.
async fn ended(scheduler: &Running, id: &str) -> pb::Lease {
    until("the lease has ended", async || {
        let lease = lease(scheduler, "main", id).await.expect("known");
        (lease.state() == pb::LeaseState::Ended).then_some(lease)
    })
    .await
}

pub(crate) async fn lease_in_use_ends_when_its_gateway_reports_the_end(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 1).await;
    let request = task();
    let id = &request.lease_id;
    let granted = place(&scheduler, &request).await;
    let generation = gateway.desired.generation;
    gateway.next().await.expect("the stream is open");
    assert_eq!((gateway.desired.generation, gateway.desired.leases.len()), (generation, 0), "not in use");

    for _ in 0..2 {
        use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    }
    let held = hold(&mut gateway, id).await;
    assert_eq!((held.lease_token.as_str(), held.team.as_str()), (granted.lease_token.as_str(), "main"));
    gateway.observe(&[(id, pb::LeasePhase::Preparing)]).await;

    release(&scheduler, &granted.lease_token, None).await.expect("answered at once");
    let stop = stop(&mut gateway, id).await;
    assert_eq!((stop.reason(), stop.lease_token), (pb::StopReason::Released, granted.lease_token.clone()));
    assert_eq!((stop.workload_id.as_str(), stop.attempt_id.as_str()), ("", ""));
    assert_eq!(stop.grace.expect("a grace period").seconds, 10);
    let ending = lease(&scheduler, "main", id).await.expect("known");
    assert_eq!((ending.state(), ending.stop_reason()), (pb::LeaseState::Ending, pb::StopReason::Released));
    let lost = use_lease(&scheduler, &granted.lease_token).await.expect_err("it is ending");
    assert!(lost.is(Reason::LeaseLost), "{lost}");
    let renew = pb::RenewRequest { lease_token: granted.lease_token.clone() };
    let lost = Refusal::from(scheduler.placements().renew(renew).await.expect_err("it is ending"));
    assert!(lost.is(Reason::LeaseLost), "{lost}");
    assert!(refused(&scheduler, task()).await.is(Reason::AllWorkersBusy), "the slot is in use");

    gateway.observe(&[(id, pb::LeasePhase::Running)]).await;
    gateway.observe(&[(id, pb::LeasePhase::Ended)]).await;
    assert_eq!(ended(&scheduler, id).await.end(), pb::LeaseEnd::Released);
    gateway.wait_until_idle().await;
    place(&scheduler, &task()).await;
    release(&scheduler, &granted.lease_token, None).await.expect("a repeat");
    let lost = use_lease(&scheduler, &granted.lease_token).await.expect_err("it has ended");
    assert!(lost.is(Reason::LeaseLost), "{lost}");
    scheduler.stop().await;
}

pub(crate) async fn lease_in_use_is_stopped_when_not_renewed(database: TestDatabase) {
    let term = Duration::from_millis(200);
    let scheduler = Running::start(scheduler::Config { lease_term: term, ..config(&database) }).await;
    let mut gateway = with_slots(&scheduler, "one", 1).await;
    let request = task();
    let granted = place(&scheduler, &request).await;
    use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    let stop = stop(&mut gateway, &request.lease_id).await;
    assert_eq!(stop.reason(), pb::StopReason::Expired);
    assert_eq!(scheduler.worker("one").await.active_tasks, 1, "the slot is in use");

    // The gateway has received the lease, and does not know it.
    gateway.observe(&[]).await;
    assert_eq!(ended(&scheduler, &request.lease_id).await.end(), pb::LeaseEnd::Expired);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

pub(crate) async fn cordon_stops_leases_in_use_at_deadline(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 2).await;
    let (used, unused) = (task(), task());
    let granted = place(&scheduler, &used).await;
    place(&scheduler, &unused).await;
    use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    scheduler.cordon("one", Some(Duration::ZERO)).await.expect("accepted");
    assert_eq!(stop(&mut gateway, &used.lease_id).await.reason(), pb::StopReason::Interrupted);
    assert_eq!(ended(&scheduler, &unused.lease_id).await.end(), pb::LeaseEnd::Lost);
    gateway.observe(&[(&used.lease_id, pb::LeasePhase::Ended)]).await;
    assert_eq!(ended(&scheduler, &used.lease_id).await.end(), pb::LeaseEnd::Stopped);
    scheduler.stop().await;
}

pub(crate) async fn lost_worker_keeps_slot_of_lease_in_use(database: TestDatabase) {
    let silent = Duration::from_secs(1);
    let quickly = scheduler::Config {
        worker_ttl: silent,
        stop_after: 2 * silent,
        lost_after: 3 * silent,
        ..config(&database)
    };
    let scheduler = Running::start(quickly).await;
    let mut one = registration("one");
    // The worker does not stop its processes when it has no contact.
    one.labels.as_mut().expect("labels").capabilities.retain(|name| name != "stop-after");
    let mut gateway = Gateway::connect(&scheduler, one).await.expect("welcome");
    let (used, unused) = (task(), task());
    let granted = place(&scheduler, &used).await;
    place(&scheduler, &unused).await;
    use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    assert_eq!(ended(&scheduler, &unused.lease_id).await.end(), pb::LeaseEnd::Lost);
    assert_eq!(stop(&mut gateway, &used.lease_id).await.reason(), pb::StopReason::WorkerLost);
    assert_eq!(scheduler.worker("one").await.active_tasks, 1, "something may still run");
    gateway.observe(&[(&used.lease_id, pb::LeasePhase::Ended)]).await;
    assert_eq!(ended(&scheduler, &used.lease_id).await.end(), pb::LeaseEnd::Lost);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

pub(crate) async fn lease_with_id_of_workload_cannot_be_used(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    let workload = scheduler.submit(spec()).await.expect("accepted");
    let granted = place(&scheduler, &pb::PlaceRequest { lease_id: workload.to_string(), ..task() }).await;
    let taken = use_lease(&scheduler, &granted.lease_token).await.expect_err("a workload has the id");
    assert!(taken.is(Reason::LeaseExists), "{taken}");
    scheduler.stop().await;
}

pub(crate) async fn workload_with_id_of_lease_is_rejected(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 2).await;
    let request = task();
    let granted = place(&scheduler, &request).await;
    use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    let id = request.lease_id.parse().expect("an id");
    let is_rejected = async || {
        // A workload with pins is accepted in another transaction than one without.
        for build_id in [String::new(), BuildId::new().to_string()] {
            let spec = pb::WorkloadSpec { build_id, ..spec() };
            let taken = scheduler.submit_as(id, spec).await.expect_err("a lease has the id");
            assert!(
                taken.is(Reason::WorkloadExists) && taken.message.contains("a lease has its id"),
                "{taken}"
            );
        }
    };
    is_rejected().await;
    release(&scheduler, &granted.lease_token, None).await.expect("released");
    stop(&mut gateway, &request.lease_id).await;
    gateway.observe(&[(&request.lease_id, pb::LeasePhase::Ended)]).await;
    ended(&scheduler, &request.lease_id).await;
    is_rejected().await;
    scheduler.stop().await;
}

/// Returns the holders for which the store keeps something.
async fn holders(at: &Place) -> Vec<String> {
    let listed = PinsClient::new(at.peer()).list_pins(store::ListPinsRequest::default()).await;
    let holders = listed.expect("listed").into_inner().holders;
    holders.into_iter().map(|holder| holder.holder_id).collect()
}

pub(crate) async fn containers_of_lease_are_settled_when_it_ends(database: TestDatabase) {
    let at = Place::new();
    let store = at.start().await;
    let scheduler = Running::start(at.config(&database)).await;
    let gateway = with_slots(&scheduler, "one", 1).await;
    let request = task();
    let granted = place(&scheduler, &request).await;
    use_lease(&scheduler, &granted.lease_token).await.expect("granted");
    let holder = request.lease_id.parse().expect("an id");
    let attempt = AttemptId::new().to_string();
    at.candidate(holder, &attempt, ArtifactId::new()).await.expect("a container");
    release(&scheduler, &granted.lease_token, None).await.expect("released");
    assert_eq!(holders(&at).await, std::slice::from_ref(&request.lease_id), "the lease is ending");
    gateway.observe(&[(&request.lease_id, pb::LeasePhase::Ended)]).await;
    until("the lease is settled", async || holders(&at).await.is_empty().then_some(())).await;
    scheduler.stop().await;
    store.stop().await;
}

pub(crate) async fn release_seals_candidates_of_all_containers(database: TestDatabase) {
    let at = Place::new();
    let mut store = at.start().await;
    let scheduler = Running::start(at.config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    let request = task();
    let token = place(&scheduler, &request).await.lease_token;
    use_lease(&scheduler, &token).await.expect("granted");
    let holder = request.lease_id.parse().expect("an id");
    let (build, gone) = (BuildId::new(), BuildId::new());
    at.put_build(build, WorkloadId::new()).await.expect("a build");
    let mut artifacts = Vec::new();
    for _ in 0..2 {
        let (artifact, attempt) = (ArtifactId::new(), AttemptId::new().to_string());
        let digest = at.candidate(holder, &attempt, artifact).await.expect("a candidate");
        let owner = pb::OutputOwner { owner: Some(pb::output_owner::Owner::BuildId(gone.to_string())) };
        artifacts.push(pb::SettledArtifact {
            artifact_id: artifact.to_string(),
            digest: digest.into(),
            label: "out".to_owned(),
            owners: vec![owner],
            for_owners_only: false,
        });
    }
    let status = pb::Outcome::Succeeded.into();
    let settlement = pb::Settlement { artifacts, build_id: build.to_string(), status };

    // A rejected settlement changes nothing.
    let mut unknown = settlement.clone();
    unknown.artifacts[1].artifact_id = ArtifactId::new().to_string();
    let missing = release(&scheduler, &token, Some(unknown.clone())).await.expect_err("no candidate");
    assert!(missing.is(Reason::CandidateMissing), "{missing}");
    assert_eq!(missing.about.get("artifact_id"), Some(&unknown.artifacts[1].artifact_id));
    store.stop().await;
    let unavailable = release(&scheduler, &token, Some(settlement.clone())).await.expect_err("no store");
    assert!(unavailable.is(Reason::Unavailable), "{unavailable}");
    let stays = lease(&scheduler, "main", &request.lease_id).await.expect("known");
    assert_eq!(stays.state(), pb::LeaseState::Granted);
    at.remove_socket();
    store = at.start().await;

    let missing = release(&scheduler, &token, Some(settlement.clone())).await.expect("settled");
    assert_eq!(missing.len(), 2, "{missing:?}");
    for artifact in &settlement.artifacts {
        let id = artifact.artifact_id.parse().expect("an id");
        assert_eq!(at.kept_by(id).await.len(), 1, "the build keeps it");
    }
    let ending = lease(&scheduler, "main", &request.lease_id).await.expect("known");
    assert_eq!((ending.state(), ending.stop_reason()), (pb::LeaseState::Ending, pb::StopReason::Released));
    let repeat = release(&scheduler, &token, Some(settlement.clone())).await.expect("a repeat");
    assert!(repeat.is_empty(), "{repeat:?}");
    let mut other = settlement.clone();
    other.artifacts.pop();
    let lost = release(&scheduler, &token, Some(other)).await.expect_err("another settlement");
    assert!(lost.is(Reason::LeaseLost), "{lost}");
    scheduler.stop().await;
    store.stop().await;
}
