//! Tests of driven leases: kinds, groups, affinity and expiry.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use domain::LeaseId;
use domain::worker::LeaseClaims;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::place_result::Result as Placed;
use rpc::token::Keys;
use testing::databases::TestDatabase;

use crate::places::place;
use crate::support::{Gateway, Running, config, finish, registration, spec, start, until};

pub(crate) fn of_kind(kind: pb::PlacementKind) -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: kind.into(),
        ..pb::PlaceRequest::default()
    }
}

pub(crate) fn task() -> pb::PlaceRequest {
    of_kind(pb::PlacementKind::Task)
}

pub(crate) fn grouped(
    requests: impl IntoIterator<Item = pb::PlaceRequest>,
    group: u32,
) -> Vec<pb::PlaceItem> {
    requests.into_iter().map(|request| pb::PlaceItem { request: Some(request), group }).collect()
}

pub(crate) async fn place_many(scheduler: &Running, items: Vec<pb::PlaceItem>) -> Vec<Placed> {
    let answer = scheduler.placements().place_many(pb::PlaceManyRequest { items }).await.expect("answered");
    answer.into_inner().results.into_iter().map(|result| result.result.expect("a result")).collect()
}

pub(crate) fn granted(results: &[Placed]) -> Vec<pb::PlaceResponse> {
    let granted = results.iter().filter_map(|result| match result {
        Placed::Placed(placed) => Some(placed.clone()),
        Placed::Failure(_) => None,
    });
    granted.collect()
}

fn failures(results: &[Placed]) -> BTreeMap<String, usize> {
    let mut failures = BTreeMap::new();
    for result in results {
        if let Placed::Failure(failure) = result {
            assert!(failure.code > 0 && !failure.message.is_empty(), "{failure:?}");
            *failures.entry(failure.reason.clone()).or_default() += 1;
        }
    }
    failures
}

pub(crate) async fn with_slots(scheduler: &Running, name: &str, max_tasks: u32) -> Gateway {
    let mut registration = registration(name);
    registration.capacity = Some(pb::Capacity { max_tasks, ..pb::Capacity::default() });
    Gateway::connect(scheduler, registration).await.expect("welcome")
}

pub(crate) async fn lease(scheduler: &Running, team: &str, id: &str) -> Result<pb::Lease, rpc::Refusal> {
    let request = pb::GetLeaseRequest { team: team.to_owned(), lease_id: id.to_owned() };
    let answer = scheduler.placements().get_lease(request).await?.into_inner();
    Ok(answer.lease.expect("a lease"))
}

pub(crate) async fn refused(scheduler: &Running, request: pb::PlaceRequest) -> rpc::Refusal {
    scheduler.placements().place(request).await.expect_err("refused").into()
}

pub(crate) async fn leases_are_spread_within_slot_limits(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateways = Vec::new();
    for name in ["a", "b", "c", "d"] {
        gateways.push(with_slots(&scheduler, name, 5).await);
    }
    let results = place_many(&scheduler, grouped((0..24).map(|_| task()), 0)).await;
    let placed = granted(&results);
    let mut by_worker = BTreeMap::<_, u32>::new();
    placed.iter().for_each(|placed| *by_worker.entry(placed.worker_name.clone()).or_default() += 1);
    assert_eq!(by_worker.into_values().collect::<Vec<_>>(), [5; 4]);
    assert_eq!(failures(&results), BTreeMap::from([(Reason::AllWorkersBusy.to_string(), 4)]));
    assert_eq!(scheduler.worker("a").await.active_tasks, 5);

    // A transfer uses no slot.
    scheduler.placements().place(of_kind(pb::PlacementKind::Transfer)).await.expect("granted");
    assert!(refused(&scheduler, of_kind(pb::PlacementKind::Check)).await.is(Reason::AllWorkersBusy));

    // Released slots can be granted again immediately. A repeated release has no effect.
    let tokens: Vec<_> = placed.iter().take(7).map(|placed| placed.lease_token.clone()).collect();
    let release = pb::ReleaseManyRequest { lease_tokens: tokens };
    scheduler.placements().release_many(release.clone()).await.expect("released");
    scheduler.placements().release_many(release).await.expect("a repeat");
    let again = place_many(&scheduler, grouped((0..10).map(|_| task()), 0)).await;
    assert_eq!((granted(&again).len(), failures(&again).len()), (7, 1));
    scheduler.stop().await;
}

pub(crate) async fn group_is_granted_as_a_whole(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 3).await;
    let (one, other) = (grouped([task(), task()], 1), grouped([task(), task()], 2));
    let alone = grouped([task()], 0);
    let results = place_many(&scheduler, [one, alone, other].concat()).await;
    let of = |range: std::ops::Range<usize>| granted(&results[range]).len();
    // One of the groups is granted, and the single request is granted.
    assert_eq!(BTreeSet::from([of(0..2), of(3..5)]), BTreeSet::from([0, 2]));
    assert_eq!(of(2..3), 1);
    assert_eq!(scheduler.worker("one").await.active_tasks, 3);

    // A member that no worker could ever take prevents the grant of the other members.
    let transfer = of_kind(pb::PlacementKind::Transfer);
    let elsewhere = pb::PlaceRequest { platform: "darwin".to_owned(), ..task() };
    let results = place_many(&scheduler, grouped([transfer, elsewhere], 7)).await;
    assert_eq!(failures(&results), BTreeMap::from([(Reason::NoCompatibleWorker.to_string(), 2)]));
    scheduler.stop().await;
}

/// Each group needs both slots of the only worker. Exactly one of two concurrent groups is granted.
pub(crate) async fn concurrent_groups_never_deadlock(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 2).await;
    for _ in 0..20 {
        let group = || place_many(&scheduler, grouped([task(), task()], 1));
        let (one, other) = futures::join!(group(), group());
        let (one, other) = (granted(&one), granted(&other));
        assert_eq!(BTreeSet::from([one.len(), other.len()]), BTreeSet::from([0, 2]));
        let lease_tokens = one.into_iter().chain(other).map(|placed| placed.lease_token).collect();
        scheduler.placements().release_many(pb::ReleaseManyRequest { lease_tokens }).await.expect("released");
    }
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

pub(crate) async fn leases_respect_preferred_and_avoided_workers(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let (one, other) = (with_slots(&scheduler, "one", 3).await, with_slots(&scheduler, "other", 9).await);
    let (one, other) = (one.welcome.worker_id.clone(), other.welcome.worker_id.clone());
    let place = async |request: pb::PlaceRequest| {
        scheduler.placements().place(request).await.expect("granted").into_inner().worker_name
    };
    let avoiding = pb::PlaceRequest { avoid_workers: vec![other.clone()], ..task() };
    let first = avoiding.lease_id.clone();
    assert_eq!(place(avoiding).await, "one");
    let near = || pb::PlaceRequest { same_worker_as_lease_id: first.clone(), ..task() };
    assert_eq!(place(near()).await, "one", "the other worker has more free slots");
    let preferring = || pb::PlaceRequest { prefer_workers: vec![one.clone()], ..task() };
    assert_eq!(place(preferring()).await, "one");
    assert_eq!(place(preferring()).await, "other", "the preferred worker is full");
    assert!(refused(&scheduler, near()).await.is(Reason::AllWorkersBusy));
    let nowhere = pb::PlaceRequest { avoid_workers: vec![one, other], ..task() };
    let nowhere = refused(&scheduler, nowhere).await;
    assert!(nowhere.is(Reason::NoCompatibleWorker));
    assert_eq!(nowhere.about.get("other").map(String::as_str), Some("is avoided by the request"));
    let gone = pb::PlaceRequest { same_worker_as_lease_id: LeaseId::new().to_string(), ..task() };
    assert!(refused(&scheduler, gone).await.is(Reason::LeaseLost));
    scheduler.stop().await;
}

pub(crate) async fn resources_of_leases_are_reserved(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut small = registration("small");
    small.capacity = Some(pb::Capacity {
        memory_bytes: 100,
        cpu_millis: 2000,
        max_containers: 3,
        ..pb::Capacity::default()
    });
    let _gateway = Gateway::connect(&scheduler, small).await.expect("welcome");
    let requesting = |memory_bytes: u64, cpu_millis: u64| {
        let requests = pb::ResourceRequests { memory_bytes, cpu_millis, disk_bytes: 0 };
        pb::PlaceRequest { requests: Some(requests), ..task() }
    };
    let first = scheduler.placements().place(requesting(60, 500)).await.expect("granted").into_inner();
    let busy = refused(&scheduler, requesting(60, 0)).await;
    assert!(busy.is(Reason::AllWorkersBusy));
    let small = busy.about.get("small").map(String::as_str);
    assert_eq!(small, Some("has 40 bytes of memory left, but 60 bytes of memory is requested"));
    assert!(refused(&scheduler, requesting(0, 2001)).await.is(Reason::NoCompatibleWorker));
    scheduler.placements().place(requesting(40, 1500)).await.expect("the request fits exactly");
    let release = pb::ReleaseRequest { lease_token: first.lease_token, settlement: None };
    scheduler.placements().release(release).await.expect("released");
    scheduler.placements().place(requesting(60, 500)).await.expect("the memory is free again");
    scheduler.placements().place(requesting(0, 0)).await.expect("a request without resources fits");
    let full = refused(&scheduler, requesting(0, 0)).await;
    assert_eq!(full.about.get("small").map(String::as_str), Some("has 3 of 3 containers"));
    scheduler.stop().await;
}

pub(crate) async fn invalid_lease_requests_are_rejected(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = with_slots(&scheduler, "one", 3).await;
    let twice = task();
    let cases: [(Vec<pb::PlaceItem>, &str); 5] = [
        (vec![], "items"),
        (grouped((0..1001).map(|_| task()), 0), "items"),
        (vec![pb::PlaceItem { request: None, group: 0 }], "items[0].request"),
        (grouped([twice.clone(), twice], 0), "items[1].request.lease_id"),
        (
            grouped([task(), pb::PlaceRequest { avoid_workers: vec!["x".to_owned()], ..task() }], 0),
            "items[1].request.avoid_workers",
        ),
    ];
    for (items, field) in cases {
        let refused = scheduler.placements().place_many(pb::PlaceManyRequest { items }).await;
        let refused = rpc::Refusal::from(refused.expect_err(field));
        assert!(refused.is(Reason::InvalidField), "{refused:?}");
        assert!(refused.message.contains(field), "{field}: {refused:?}");
    }
    let processes: [(pb::PlaceRequest, &str); 3] = [
        (
            pb::PlaceRequest {
                process: Some(pb::ProcessRequirements { image_kind: "x".to_owned(), ..Default::default() }),
                ..task()
            },
            "process.image_kind",
        ),
        (
            pb::PlaceRequest {
                process: Some(pb::ProcessRequirements {
                    resource_type: "git".to_owned(),
                    ..Default::default()
                }),
                ..task()
            },
            "process.resource_type",
        ),
        (
            pb::PlaceRequest {
                requests: Some(pb::ResourceRequests { cpu_millis: u64::MAX, ..Default::default() }),
                ..task()
            },
            "requests",
        ),
    ];
    for (request, field) in processes {
        let refused = refused(&scheduler, request).await;
        assert!(refused.is(Reason::InvalidField) && refused.message.contains(field), "{field}: {refused:?}");
    }
    let forged = pb::ReleaseManyRequest { lease_tokens: vec!["forged".to_owned()] };
    let forged = scheduler.placements().release_many(forged).await.expect_err("forged");
    assert!(rpc::Refusal::from(forged).is(Reason::InvalidToken));
    assert_eq!(scheduler.worker("one").await.active_tasks, 0, "no lease was granted");
    scheduler.stop().await;
}

/// Only a valid token proves that the caller holds the lease.
pub(crate) async fn token_with_foreign_signature_is_rejected(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 3).await;
    let driven = place(&scheduler, task()).await.expect("granted").lease_token;
    let (_, run) = gateway.run(scheduler.submit(spec()).await.expect("accepted")).await;
    let keys = Keys::new(scheduler.peer());
    for token in [&driven, &run.lease_token] {
        let claims = keys.verify::<LeaseClaims>(token).await.expect("a token of this cluster");
        let forged = rpc::token::TokenSigner::from_seed(&[8; 32]).sign(&claims);
        for forged in [forged, token[..token.len() - 1].to_owned(), String::new()] {
            let (mut placements, lease_token) = (scheduler.placements(), forged.clone());
            let renew = placements.renew(pb::RenewRequest { lease_token: lease_token.clone() }).await;
            let release = placements
                .release(pb::ReleaseRequest { lease_token: lease_token.clone(), settlement: None })
                .await;
            let many = pb::ReleaseManyRequest { lease_tokens: vec![driven.clone(), lease_token] };
            let refused = [
                start(&scheduler, &forged).await.expect_err("a forged token"),
                finish(&scheduler, &forged, 0).await.expect_err("a forged token"),
                renew.expect_err("a forged token").into(),
                release.expect_err("a forged token").into(),
                placements.release_many(many).await.expect_err("a list with a forged token").into(),
            ];
            assert!(refused.iter().all(|refused| refused.is(Reason::InvalidToken)), "{refused:?}");
        }
    }
    assert_eq!(scheduler.worker("one").await.active_tasks, 2, "both leases are live");
    start(&scheduler, &run.lease_token).await.expect("a valid token");
    finish(&scheduler, &run.lease_token, 0).await.expect("a valid token");
    scheduler.stop().await;
}

pub(crate) async fn repeat_with_another_process_is_rejected(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _one = with_slots(&scheduler, "one", 3).await;
    let needs = |names: &[&str]| {
        let capabilities = names.iter().map(ToString::to_string).collect();
        Some(pb::ProcessRequirements { capabilities, ..Default::default() })
    };
    let (plain, with_capability) = (task(), pb::PlaceRequest { process: needs(&["stop-after"]), ..task() });
    for request in [&plain, &with_capability] {
        let granted = place(&scheduler, request.clone()).await.expect("granted");
        assert_eq!(place(&scheduler, request.clone()).await.expect("a repeat"), granted);
    }
    // Defaults and explicit values of a request are equivalent.
    let host = Some(pb::ProcessRequirements { image_kind: "host".to_owned(), ..Default::default() });
    place(&scheduler, pb::PlaceRequest { process: host, ..plain.clone() }).await.expect("a repeat");
    let others = [
        pb::PlaceRequest { process: needs(&["stop-after"]), ..plain },
        pb::PlaceRequest { process: None, ..with_capability },
    ];
    for other in others {
        let refused = place(&scheduler, other).await.expect_err("another request");
        assert!(refused.is(Reason::LeaseExists), "{refused}");
    }
    scheduler.stop().await;
}

pub(crate) async fn driven_lease_uses_no_slot(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let place = |id: LeaseId, team: &str| pb::PlaceRequest {
        lease_id: id.to_string(),
        team: team.to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        ..pb::PlaceRequest::default()
    };
    let refusal = |status: tonic::Status| rpc::Refusal::from(status);
    let id = LeaseId::new();
    let busy = scheduler.placements().place(place(id, "main")).await.map_err(refusal);
    assert!(busy.expect_err("no worker is registered").is(Reason::AllWorkersBusy));

    let mut one = registration("one");
    one.capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, one).await.expect("welcome");
    let busy = scheduler.submit(spec()).await.expect("accepted");
    gateway.run(busy).await;
    let granted = scheduler.placements().place(place(id, "main")).await.expect("granted").into_inner();
    let again = scheduler.placements().place(place(id, "main")).await.expect("a repeat").into_inner();
    assert_eq!(granted, again);
    assert_eq!(granted.worker_name, "one");
    assert_eq!(scheduler.worker("one").await.active_tasks, 1);
    let claims: LeaseClaims =
        Keys::new(scheduler.peer()).verify(&granted.lease_token).await.expect("a token of this cluster");
    assert_eq!((claims.lease, claims.team.as_str(), claims.attempt), (id, "main", None));
    let other = scheduler.placements().place(place(id, "other")).await.map_err(refusal);
    assert!(other.expect_err("another request").is(Reason::LeaseExists));

    let renew = pb::RenewRequest { lease_token: granted.lease_token.clone() };
    scheduler.placements().renew(renew.clone()).await.expect("kept");
    let release = pb::ReleaseRequest { lease_token: granted.lease_token.clone(), settlement: None };
    scheduler.placements().release(release.clone()).await.expect("released");
    scheduler.placements().release(release).await.expect("a repeat");
    let lost = scheduler.placements().renew(renew).await.map_err(refusal);
    assert!(lost.expect_err("the lease has ended").is(Reason::LeaseLost));
    let ended = scheduler.placements().place(place(id, "main")).await.map_err(refusal);
    assert!(ended.expect_err("the lease has ended").is(Reason::LeaseExists));
    let forged = pb::RenewRequest { lease_token: "forged".to_owned() };
    let forged = scheduler.placements().renew(forged).await.map_err(refusal);
    assert!(forged.expect_err("forged").is(Reason::InvalidToken));
    scheduler.stop().await;
}

pub(crate) async fn driven_lease_expires_when_not_renewed(database: TestDatabase) {
    let term = Duration::from_millis(50);
    let scheduler = Running::start(scheduler::Config { lease_term: term, ..config(&database) }).await;
    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let request = pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        ..pb::PlaceRequest::default()
    };
    scheduler.placements().place(request.clone()).await.expect("granted");
    until("the lease has ended", async || {
        let placed = scheduler.placements().place(request.clone()).await;
        placed.err().map(|status| assert!(rpc::Refusal::from(status).is(Reason::LeaseExists)))
    })
    .await;
    let ended = lease(&scheduler, "main", &request.lease_id).await.expect("known");
    assert_eq!((ended.state(), ended.end()), (pb::LeaseState::Ended, pb::LeaseEnd::Expired));
    scheduler.stop().await;
}

pub(crate) async fn lease_shows_owner_expiry_and_end(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = with_slots(&scheduler, "one", 3).await;
    let requests = Some(pb::ResourceRequests { memory_bytes: 5, ..Default::default() });
    let mut request = of_kind(pb::PlacementKind::Get);
    request.requests = requests;
    request.owner = "check 7".to_owned();
    let token =
        scheduler.placements().place(request.clone()).await.expect("granted").into_inner().lease_token;
    let granted = lease(&scheduler, "main", &request.lease_id).await.expect("known");
    let instant = |at: Option<_>| at.map(|at| rpc::from_timestamp(&at)).expect("an instant");
    assert!(instant(granted.expires_at) > instant(granted.granted_at), "{granted:?}");
    let expected = pb::Lease {
        lease_id: request.lease_id.clone(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Get.into(),
        state: pb::LeaseState::Granted.into(),
        worker_id: gateway.welcome.worker_id.clone(),
        worker_name: "one".to_owned(),
        incarnation: granted.incarnation,
        owner: "check 7".to_owned(),
        requests,
        granted_at: granted.granted_at,
        expires_at: granted.expires_at,
        ..pb::Lease::default()
    };
    assert_eq!(granted, expected);
    scheduler
        .placements()
        .release(pb::ReleaseRequest { lease_token: token, settlement: None })
        .await
        .expect("released");
    let released = lease(&scheduler, "main", &request.lease_id).await.expect("still known");
    assert_eq!((released.state(), released.end()), (pb::LeaseState::Ended, pb::LeaseEnd::Released));
    assert!(instant(released.ended_at) >= instant(released.granted_at), "{released:?}");

    // The lease of a workload ends when its gateway reports the end.
    let put = pb::WorkloadSpec { kind: pb::WorkloadKind::Put.into(), ..spec() };
    let workload = scheduler.submit(put).await.expect("accepted");
    let (id, run) = gateway.run(workload).await;
    let granted = lease(&scheduler, "main", &id).await.expect("known");
    assert_eq!((granted.kind(), granted.expires_at), (pb::PlacementKind::Put, None));
    assert_eq!((granted.workload_id, granted.attempt_id), (workload.to_string(), run.attempt_id));
    start(&scheduler, &run.lease_token).await.expect("started");
    scheduler.cancel(workload, Duration::from_secs(1)).await;
    let ending = lease(&scheduler, "main", &id).await.expect("known");
    assert_eq!((ending.state(), ending.stop_reason()), (pb::LeaseState::Ending, pb::StopReason::Cancelled));
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    let ended = lease(&scheduler, "main", &id).await.expect("known");
    assert_eq!((ended.state(), ended.end()), (pb::LeaseState::Ended, pb::LeaseEnd::Reported));

    // The worker of the lease starts a new incarnation.
    let request = task();
    scheduler.placements().place(request.clone()).await.expect("granted");
    gateway.leave().await;
    let _again = with_slots(&scheduler, "one", 3).await;
    until("the lease has ended", async || {
        let lost = lease(&scheduler, "main", &request.lease_id).await.expect("known");
        (lost.state() == pb::LeaseState::Ended).then(|| assert_eq!(lost.end(), pb::LeaseEnd::Lost))
    })
    .await;

    for (team, id) in [("other", request.lease_id), ("main", LeaseId::new().to_string())] {
        let unknown = lease(&scheduler, team, &id).await.expect_err("unknown");
        assert!(unknown.is(Reason::LeaseNotFound), "{unknown:?}");
        assert_eq!(unknown.about.get("lease_id"), Some(&id));
    }
    for (team, id) in [("", LeaseId::new().to_string()), ("main", "x".to_owned())] {
        let malformed = lease(&scheduler, team, &id).await.expect_err("malformed");
        assert!(malformed.is(Reason::InvalidField), "{malformed:?}");
    }
    scheduler.stop().await;
}
