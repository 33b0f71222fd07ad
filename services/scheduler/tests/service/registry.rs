//! Tests of cordoning, retirement, pruning, registration, quarantine and watches of workers.

use std::time::Duration;

use domain::{GatewayInstance, LeaseId, MarkerId, WorkloadId};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::watch_workers_response::Change;
use rpc::{Reason, Refusal};
use scheduler::Config;
use testing::databases::TestDatabase;
use tonic::Streaming;

use crate::leases::of_kind;
use crate::store::Place;
use crate::support::{Gateway, Running, config, finish, registration, spec, start, until, within};

impl Running {
    pub(crate) async fn cordon(
        &self,
        worker: &str,
        interrupt_after: Option<Duration>,
    ) -> Result<pb::Worker, Refusal> {
        let interrupt_after = interrupt_after.map(rpc::duration);
        let request = pb::CordonWorkerRequest { worker: worker.to_owned(), interrupt_after };
        Ok(self.workers().cordon_worker(request).await?.into_inner().worker.expect("a worker"))
    }

    pub(crate) async fn retire(&self, worker: &str, force: bool) -> Result<Option<pb::Worker>, Refusal> {
        let request = pb::RetireWorkerRequest { worker: worker.to_owned(), interrupt_after: None, force };
        Ok(self.workers().retire_worker(request).await?.into_inner().worker)
    }

    pub(crate) async fn prune(&self, worker: &str, force: bool) -> Result<pb::PruneWorkerResponse, Refusal> {
        let request = pb::PruneWorkerRequest { worker: worker.to_owned(), force };
        Ok(self.workers().prune_worker(request).await?.into_inner())
    }

    async fn uncordon_worker(&self, worker: &str) -> Result<Option<pb::Worker>, Refusal> {
        let request = pb::UncordonWorkerRequest { worker: worker.to_owned() };
        Ok(self.workers().uncordon_worker(request).await?.into_inner().worker)
    }

    pub(crate) async fn find_worker(&self, worker: &str) -> Option<pb::Worker> {
        let request = pb::GetWorkerRequest { worker: worker.to_owned() };
        match self.workers().get_worker(request).await {
            Ok(answer) => answer.into_inner().worker,
            Err(status) => {
                assert!(Refusal::from(status).is(Reason::WorkerNotFound));
                None
            }
        }
    }

    pub(crate) async fn wait_until_removed(&self, worker: &str) {
        until(&format!("{worker} has been removed"), async || {
            self.find_worker(worker).await.is_none().then_some(())
        })
        .await;
    }
}

fn interruptible() -> pb::WorkloadSpec {
    pb::WorkloadSpec { interruptible: true, ..spec() }
}

/// Reports that a process was stopped because its worker is cordoned.
async fn finish_interrupted(scheduler: &Running, token: &str) {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Signal(15)) }),
        failure: Some(pb::Failure { reason: "INTERRUPTED".to_owned(), message: "stopped".to_owned() }),
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("accepted");
}

fn reasons(worker: &pb::Worker) -> Vec<&str> {
    worker.refusals.iter().map(|refusal| refusal.reason.as_str()).collect()
}

pub(crate) async fn cordon_waits_for_uninterruptible_work(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let first = registration("one");
    let mut gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    assert_eq!(gateway.desired.directive(), pb::Directive::Run);
    let (uninterruptible, interrupted) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(interruptible()).await.expect("accepted"),
    );
    let (_, staying) = gateway.run(uninterruptible).await;
    let (_, going) = gateway.run(interrupted).await;
    for run in [&staying, &going] {
        start(&scheduler, &run.lease_token).await.expect("started");
    }

    let cordoned = scheduler.cordon("one", None).await.expect("accepted");
    assert_eq!(cordoned.desired(), pb::DesiredWorkerState::Cordon);
    assert_eq!((cordoned.leases, cordoned.uninterruptible_leases), (2, 1));
    within("the gateway receives the change", async {
        while gateway.desired.directive() != pb::Directive::Cordon {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
    let waiting = scheduler.submit(spec()).await.expect("queued");
    until("the workload waits for the end of the cordon", async || {
        (scheduler.get(waiting).await.waiting_for == ["one: is cordoned"]).then_some(())
    })
    .await;

    // Neither a reconnection, nor another gateway, nor a new incarnation ends the cordon.
    drop(gateway);
    let mut gateway = Gateway::connect(&scheduler, first.clone()).await.expect("a reconnection");
    assert_eq!(gateway.desired.directive(), pb::Directive::Cordon);
    assert_eq!(gateway.desired.leases.len(), 2);
    scheduler.cordon(&cordoned.worker_id, None).await.expect("a repeat, by its id");
    let worker = scheduler.worker("one").await;
    assert_eq!((worker.desired(), worker.drained_at), (pb::DesiredWorkerState::Cordon, None));
    assert_eq!(reasons(&worker), ["CORDONED", "FULL"]);

    finish(&scheduler, &staying.lease_token, 0).await.expect("finished");
    let (_, stop) = gateway.stop(interrupted).await;
    assert_eq!((stop.reason(), &stop.attempt_id), (pb::StopReason::Interrupted, &going.attempt_id));
    let drained = until("the worker is drained", async || {
        Some(scheduler.worker("one").await).filter(|worker| worker.drained_at.is_some())
    })
    .await;
    assert_eq!((drained.leases, drained.uninterruptible_leases), (1, 0));
    finish_interrupted(&scheduler, &going.lease_token).await;
    scheduler.wait_for(interrupted, pb::WorkloadState::Pending).await;
    gateway.leave().await;
    let new_incarnation = pb::Registration {
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "other".to_owned() }),
        gateway_instance: GatewayInstance::new().to_string(),
        ..first
    };
    let mut gateway = Gateway::connect(&scheduler, new_incarnation).await.expect("welcome");
    assert_eq!(gateway.desired.directive(), pb::Directive::Cordon);
    assert_eq!(scheduler.worker("one").await.drained_at, drained.drained_at);

    for _ in 0..2 {
        let running = scheduler.uncordon_worker("one").await.expect("accepted").expect("a worker");
        assert_eq!((running.desired(), running.drained_at), (pb::DesiredWorkerState::Run, None));
    }
    let (_, again) = gateway.run(interrupted).await;
    assert_ne!(again.attempt_id, going.attempt_id);
    for (id, run) in [(interrupted, again), (waiting, gateway.run(waiting).await.1)] {
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    }
    let unknown = scheduler.cordon("unknown", None).await.expect_err("an unknown worker");
    assert!(unknown.is(Reason::WorkerNotFound));
    scheduler.stop().await;
}

pub(crate) async fn cordon_interrupts_work_at_deadline(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (started, unstarted) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(spec()).await.expect("accepted"),
    );
    let (_, run) = gateway.run(started).await;
    let (_, other) = gateway.run(unstarted).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let place = pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Transfer.into(),
        ..pb::PlaceRequest::default()
    };
    let transfer = scheduler.placements().place(place).await.expect("granted").into_inner();

    let hour = Duration::from_secs(3600);
    let cordoned = scheduler.cordon("one", Some(hour)).await.expect("accepted");
    assert!(cordoned.interrupt_at.is_some());
    assert_eq!((cordoned.leases, cordoned.uninterruptible_leases), (3, 3), "a transfer is also a lease");
    let again = scheduler.cordon("one", None).await.expect("a repeat");
    assert_eq!(again.interrupt_at, cordoned.interrupt_at, "the deadline is unchanged");
    scheduler.cordon("one", Some(Duration::ZERO)).await.expect("accepted");
    let (_, stop) = gateway.stop(started).await;
    assert_eq!(stop.reason(), pb::StopReason::Interrupted);
    gateway.stop(unstarted).await;
    let renew = pb::RenewRequest { lease_token: transfer.lease_token };
    until("the transfer has lost its lease", async || {
        let lost = scheduler.placements().renew(renew.clone()).await.err()?;
        Refusal::from(lost).is(Reason::LeaseLost).then_some(())
    })
    .await;

    let refused = start(&scheduler, &other.lease_token).await.expect_err("the attempt must stop");
    assert!(refused.is(Reason::LeaseLost));
    fail(&scheduler, &other.lease_token, "STOPPED_BEFORE_START").await;
    assert_eq!(scheduler.get(unstarted).await.state(), pb::WorkloadState::Pending, "the process did not run");
    assert_eq!(scheduler.worker("one").await.drained_at, None);
    finish_interrupted(&scheduler, &run.lease_token).await;
    let finished = scheduler.finished(started).await;
    assert_eq!(finished.outcome(), pb::Outcome::Errored);
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("INTERRUPTED".to_owned()));
    let drained = until("the worker is drained", async || {
        Some(scheduler.worker("one").await).filter(|worker| worker.drained_at.is_some())
    })
    .await;
    assert_eq!((drained.leases, drained.interrupt_at), (0, None));
    scheduler.stop().await;
}

/// Reports that an attempt ended before its process started.
pub(crate) async fn fail(scheduler: &Running, token: &str, reason: &str) {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        failure: Some(pb::Failure { reason: reason.to_owned(), message: "it does not work".to_owned() }),
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("accepted");
}

pub(crate) async fn retired_worker_is_removed_when_safe(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let config = Config { artifact_store: place.endpoint(), ..config(&database) };
    let scheduler = Running::start(config).await;
    let registration = registration("one");
    let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    let id = gateway.welcome.worker_id.clone();
    let busy = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(busy).await;
    start(&scheduler, &run.lease_token).await.expect("started");

    let artifact =
        until("the store takes an upload", async || place.upload_to(id.parse().expect("an id")).await.ok())
            .await;
    for refused in
        [scheduler.retire("one", false).await.map(|_| ()), scheduler.prune("one", false).await.map(|_| ())]
    {
        let refused = refused.expect_err("the worker has the last replica");
        if refused.is(Reason::WorkerInContact) {
            continue;
        }
        assert!(refused.is(Reason::LastReplica), "{refused}");
        assert_eq!(refused.about.get("artifact_id"), Some(&artifact.to_string()));
        assert_eq!(refused.about.get("artifacts").map(String::as_str), Some("1"));
    }
    assert_eq!(
        scheduler.worker("one").await.desired(),
        pb::DesiredWorkerState::Run,
        "the worker is unchanged"
    );

    // A forced retirement can be undone until it is complete.
    let retiring = scheduler.retire("one", true).await.expect("accepted").expect("the worker still exists");
    assert_eq!(retiring.desired(), pb::DesiredWorkerState::Retire);
    assert_eq!(reasons(&retiring), ["RETIRING"]);
    scheduler.uncordon_worker("one").await.expect("accepted");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.wait_until_idle().await;
    assert!(scheduler.find_worker("one").await.is_some());

    scheduler.retire("one", true).await.expect("accepted");
    scheduler.wait_until_removed("one").await;
    assert!(scheduler.retire("one", true).await.expect("a repeat").is_none());
    assert!(scheduler.retire(&id, false).await.expect("a repeat, by its id").is_none());
    let end = within("the gateway receives the change", async {
        loop {
            match gateway.next().await {
                Ok(()) => {}
                Err(refusal) => break refusal,
            }
        }
    });
    assert!(end.await.is(Reason::WorkerRetired));
    until("the store has removed the replica", async || {
        let replicas = place.replicas(artifact).await.ok()?;
        replicas.is_empty().then_some(())
    })
    .await;

    let again = |registration: &pb::Registration| pb::Registration {
        gateway_instance: GatewayInstance::new().to_string(),
        ..registration.clone()
    };
    let refused =
        Gateway::connect(&scheduler, again(&registration)).await.err().expect("the worker was retired");
    assert!(refused.is(Reason::WorkerRetired), "{refused}");
    assert!(scheduler.uncordon_worker("one").await.expect("accepted").is_none());
    let back = Gateway::connect(&scheduler, again(&registration)).await.expect("a new registration");
    assert_ne!(back.welcome.worker_id, id);
    scheduler.retire("one", true).await.expect("accepted");
    scheduler.wait_until_removed("one").await;
    // An empty worker may take the name of a removed worker.
    let empty = pb::Registration {
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() }),
        ..again(&registration)
    };
    Gateway::connect(&scheduler, empty).await.expect("another worker");
    store.stop().await;
    scheduler.stop().await;
}

pub(crate) async fn new_replica_blocks_retirement(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let config = Config { artifact_store: place.endpoint(), ..config(&database) };
    let scheduler = Running::start(config).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let busy = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(busy).await;
    until("the store answers", async || scheduler.retire("one", false).await.ok()).await;
    let worker = gateway.welcome.worker_id.parse().expect("an id");
    until("the store takes an upload", async || place.upload_to(worker).await.ok()).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");

    let held_up = until("the retirement is blocked", async || {
        Some(scheduler.worker("one").await).filter(|worker| !worker.blocked_by.is_empty())
    })
    .await;
    assert!(held_up.blocked_by.contains("last replica of a kept artifact"), "{}", held_up.blocked_by);
    assert!(held_up.drained_at.is_some());
    let again = scheduler.retire("one", false).await.expect("a repeat").expect("the worker still exists");
    assert_eq!(again.desired(), pb::DesiredWorkerState::Retire);
    scheduler.retire("one", true).await.expect("forced");
    scheduler.wait_until_removed("one").await;
    store.stop().await;
    scheduler.stop().await;
}

pub(crate) async fn prune_removes_unreachable_worker_with_its_attempts(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let ttl = Duration::from_millis(400);
    let config = Config { artifact_store: place.endpoint(), worker_ttl: ttl, ..config(&database) };
    let scheduler = Running::start(config).await;
    let registration = registration("one");
    let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    let id = gateway.welcome.worker_id.clone();
    let started = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(started).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let transfer = of_kind(pb::PlacementKind::Transfer);
    scheduler.placements().place(transfer).await.expect("placed");
    let refused = loop {
        // The timing of the test determines whether the worker is already stalled.
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        match scheduler.prune("one", true).await {
            Err(refused) if refused.is(Reason::WorkerInContact) => break refused,
            other => other.expect_err("the worker stalled before the test could check"),
        };
    };
    assert!(refused.message.contains("one"), "{refused}");

    until("the worker is stalled", async || {
        (scheduler.worker("one").await.state() == pb::WorkerState::Stalled).then_some(())
    })
    .await;
    let artifact =
        until("the store takes an upload", async || place.upload_to(id.parse().expect("an id")).await.ok())
            .await;
    let refused = scheduler.prune("one", false).await.expect_err("the worker has the last replica");
    assert!(refused.is(Reason::LastReplica), "{refused}");
    assert_eq!(refused.about.get("artifact_id"), Some(&artifact.to_string()));
    let pruned = scheduler.prune("one", true).await.expect("forced");
    let workload = pb::PrunedWorkload { team: "main".to_owned(), workload_id: started.to_string() };
    assert_eq!((pruned.leases, pruned.workloads), (2, vec![workload]), "the transfer is included");
    assert!(scheduler.find_worker("one").await.is_none(), "the worker is removed before the answer");
    let again = scheduler.prune("one", true).await.expect("a repeat");
    assert_eq!(again, pb::PruneWorkerResponse::default());
    scheduler.prune(&id, false).await.expect("a repeat, by its id");
    let unknown = scheduler.prune("unknown", false).await.expect_err("an unknown worker");
    assert!(unknown.is(Reason::WorkerNotFound));
    let finished = scheduler.finished(started).await;
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));

    // The gateway is not superseded. The gateway must register again and becomes another worker.
    within("the gateway receives the change", async {
        while gateway.desired.directive() != pb::Directive::RegisterAgain {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
    assert_eq!(gateway.desired.leases, []);
    let again = Gateway::connect(&scheduler, registration).await.expect("welcome");
    assert_ne!(again.welcome.worker_id, id);
    store.stop().await;
    scheduler.stop().await;
}

pub(crate) async fn ephemeral_worker_is_removed_when_lost(database: TestDatabase) {
    let config = Config {
        worker_ttl: Duration::from_millis(300),
        stop_after: Duration::from_millis(500),
        lost_after: Duration::from_millis(800),
        ..config(&database)
    };
    let scheduler = Running::start(config).await;
    let ephemeral = |name: &str, ephemeral| {
        let registration = registration(name);
        pb::Registration {
            labels: registration.labels.map(|labels| pb::WorkerLabels { ephemeral, ..labels }),
            ..registration
        }
    };
    let mut gateway = Gateway::connect(&scheduler, ephemeral("brief", true)).await.expect("welcome");
    assert!(scheduler.worker("brief").await.labels.expect("labels").ephemeral);
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let other = Gateway::connect(&scheduler, ephemeral("lasting", false)).await.expect("welcome");
    gateway.leave().await;
    other.leave().await;
    scheduler.wait_until_removed("brief").await;
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    until("the other worker is lost", async || {
        (scheduler.worker("lasting").await.state() == pb::WorkerState::Lost).then_some(())
    })
    .await;
    scheduler.stop().await;
}

pub(crate) async fn worker_cannot_change_its_team(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let of = |name: &str, team: &str| {
        let (registration, team) = (registration(name), team.to_owned());
        pb::Registration {
            labels: registration.labels.map(|labels| pb::WorkerLabels { team, ..labels }),
            ..registration
        }
    };
    for (first, second) in [("main", "other"), ("main", ""), ("", "main")] {
        let name = format!("{first}-{second}");
        let gateway = Gateway::connect(&scheduler, of(&name, first)).await.expect("welcome");
        gateway.leave().await;
        let refused =
            Gateway::connect(&scheduler, of(&name, second)).await.err().expect("a worker of another team");
        assert!(refused.is(Reason::WorkerOfAnotherTeam), "{refused}");
        assert_eq!(scheduler.worker(&name).await.labels.expect("labels").team, first);
        Gateway::connect(&scheduler, of(&name, first)).await.expect("the same team");
    }
    scheduler.stop().await;
}

pub(crate) async fn worker_with_unsupported_protocol_is_never_chosen(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let newer = pb::Registration { protocol_versions: vec![2, 3], ..registration("newer") };
    for _ in 0..2 {
        let refused = Gateway::connect(&scheduler, newer.clone()).await.err().expect("no version in common");
        assert!(refused.is(Reason::UnsupportedProtocol), "{refused}");
    }
    let listed = scheduler.worker("newer").await;
    assert_eq!(listed.unsupported_versions, [2, 3]);
    assert_eq!(reasons(&listed), ["INCOMPATIBLE", "STALLED"]);
    assert!(
        listed.refusals[0].message.contains("supports only other protocol versions (2, 3)"),
        "{listed:?}"
    );
    let refused = scheduler.submit(spec()).await.expect_err("no worker is compatible");
    assert!(refused.is(Reason::NoCompatibleWorker), "{refused}");

    // While a gateway is connected, an incompatible second gateway changes nothing.
    let one = registration("one");
    let gateway = Gateway::connect(&scheduler, one.clone()).await.expect("welcome");
    let other = pb::Registration {
        gateway_instance: GatewayInstance::new().to_string(),
        protocol_versions: vec![2],
        ..one.clone()
    };
    let refused = Gateway::connect(&scheduler, other.clone()).await.err().expect("the worker has a gateway");
    assert!(refused.is(Reason::AlreadyAttended), "{refused}");
    assert_eq!(reasons(&scheduler.worker("one").await), [""; 0]);
    gateway.leave().await;
    let of_no_version = pb::Registration { protocol_versions: vec![], ..other.clone() };
    let refused = Gateway::connect(&scheduler, of_no_version).await.err().expect("no protocol version");
    assert!(refused.is(Reason::InvalidField), "{refused}");
    assert_eq!(reasons(&scheduler.worker("one").await), ["STALLED"], "the versions are unknown");
    Gateway::connect(&scheduler, other).await.err().expect("no version in common");
    assert_eq!(reasons(&scheduler.worker("one").await), ["INCOMPATIBLE", "STALLED"]);

    // A worker with a supported version is accepted like any other worker.
    let mut gateway =
        Gateway::connect(&scheduler, pb::Registration { protocol_versions: vec![3, 1], ..newer })
            .await
            .expect("a version in common");
    assert_eq!(scheduler.worker("newer").await.unsupported_versions, [0; 0]);
    let id = scheduler.submit(spec()).await.expect("accepted");
    gateway.run(id).await;
    scheduler.stop().await;
}

/// Watch of workers.
struct Watcher(Streaming<pb::WatchWorkersResponse>);

impl Watcher {
    async fn after(scheduler: &Running, after_revision: u64) -> Self {
        let request = pb::WatchWorkersRequest { after_revision };
        Self(scheduler.workers().watch_workers(request).await.expect("a stream").into_inner())
    }

    async fn next(&mut self) -> Result<(u64, Change), Refusal> {
        let message = within("the next change", self.0.message()).await?.expect("an open stream");
        Ok((message.revision, message.change.expect("a change")))
    }

    /// Returns the initial workers and the revision of that state.
    async fn synced(&mut self) -> (u64, Vec<Change>) {
        let mut changes = Vec::new();
        loop {
            match self.next().await.expect("a change") {
                (revision, Change::Synced(_)) => return (revision, changes),
                (_, change) => changes.push(change),
            }
        }
    }

    /// Waits for a change that `pick` accepts. Returns its revision and the picked value.
    async fn until<T>(&mut self, pick: impl Fn(&Change) -> Option<T>) -> (u64, T) {
        loop {
            let (revision, change) = self.next().await.expect("a change");
            if let Some(found) = pick(&change) {
                return (revision, found);
            }
        }
    }
}

fn names(changes: &[Change]) -> Vec<&str> {
    changes
        .iter()
        .map(|change| match change {
            Change::Worker(worker) => worker.name.as_str(),
            Change::Removed(gone) => gone.name.as_str(),
            Change::Synced(_) => "synced",
        })
        .collect()
}

pub(crate) async fn watch_of_workers_misses_no_change(database: TestDatabase) {
    let keep = Config { keep_finished: Duration::from_secs(3600), ..config(&database) };
    let scheduler = Running::start(keep).await;
    let mut watcher = Watcher::after(&scheduler, 0).await;
    assert_eq!(watcher.synced().await.1, []);
    let _one = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let two = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    let (seen_two, _) = watcher
        .until(|change| matches!(change, Change::Worker(worker) if worker.name == "two").then_some(()))
        .await;

    // A later watch receives the same workers, each once.
    let mut late = Watcher::after(&scheduler, 0).await;
    let (revision, there) = late.synced().await;
    assert_eq!(names(&there), ["one", "two"]);
    scheduler.cordon("one", None).await.expect("accepted");
    for watcher in [&mut watcher, &mut late] {
        let cordoned = |change: &Change| match change {
            Change::Worker(worker) if worker.desired() == pb::DesiredWorkerState::Cordon => {
                Some(worker.name.clone())
            }
            _ => None,
        };
        let (at, name) = watcher.until(cordoned).await;
        assert_eq!(name, "one");
        assert!(at > revision && at > seen_two);
    }
    two.leave().await;
    until("the worker is stalled", async || {
        (scheduler.worker("two").await.state() == pb::WorkerState::Stalled).then_some(())
    })
    .await;
    scheduler.prune("two", true).await.expect("pruned");
    let (last, gone) = watcher
        .until(|change| match change {
            Change::Removed(gone) => Some(gone.clone()),
            _ => None,
        })
        .await;
    assert_eq!((gone.name.as_str(), gone.end()), ("two", pb::WorkerEnd::Pruned));

    // A resumed watch receives all later changes and all removed workers. A new watch receives no
    // removed worker.
    let (_, since) = Watcher::after(&scheduler, revision).await.synced().await;
    assert_eq!(names(&since), ["one", "two"]);
    assert!(matches!(since.last(), Some(Change::Removed(_))));
    let (_, there) = Watcher::after(&scheduler, 0).await.synced().await;
    assert_eq!(names(&there), ["one"]);
    let (_, nothing) = Watcher::after(&scheduler, last).await.synced().await;
    assert_eq!(nothing, []);
    let refused = Watcher::after(&scheduler, u64::MAX).await.next().await.expect_err("never reached");
    assert!(refused.is(Reason::Compacted), "{refused}");
    scheduler.stop().await;

    // After removed workers are deleted, a watch with an older revision is rejected.
    let place = Place::new();
    let store = place.start().await;
    let short_retention = Config {
        keep_finished: Duration::ZERO,
        reconcile_every: Duration::from_millis(50),
        artifact_store: place.endpoint(),
        ..config(&database)
    };
    let scheduler = Running::start(short_retention).await;
    until("the removed worker has been deleted", async || {
        let refused = Watcher::after(&scheduler, revision).await.next().await.err()?;
        refused.is(Reason::Compacted).then_some(())
    })
    .await;
    Watcher::after(&scheduler, last).await.synced().await;
    store.stop().await;
    scheduler.stop().await;
}

pub(crate) async fn check_watchers_see_changes_of_another_replica() {
    let database = testing::databases::postgres().await;
    let replicas = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let mut watchers = [Watcher::after(&replicas[0], 0).await, Watcher::after(&replicas[1], 0).await];
    let mut gateways = Vec::new();
    for number in 0..12 {
        let name = format!("worker-{number}");
        gateways.push(Gateway::connect(&replicas[number % 2], registration(&name)).await.expect("welcome"));
    }
    for number in 0..12 {
        replicas[(number + 1) % 2].cordon(&format!("worker-{number}"), None).await.expect("accepted");
    }
    for watcher in &mut watchers {
        let (mut landed, mut before) = (std::collections::HashSet::new(), 0);
        while landed.len() < 12 {
            let (revision, change) = watcher.next().await.expect("a change");
            assert!(revision >= before, "revisions fall");
            before = revision;
            if let Change::Worker(worker) = change
                && worker.drained_at.is_some()
            {
                landed.insert(worker.name);
            }
        }
    }
    for replica in replicas {
        replica.stop().await;
    }
}

/// Fails an attempt of `id` on the worker of `gateway`.
async fn fail_on(scheduler: &Running, gateway: &mut Gateway, id: WorkloadId) {
    let (_, run) = gateway.run(id).await;
    fail(scheduler, &run.lease_token, "START_FAILED").await;
}

pub(crate) async fn unstartable_workload_moves_to_another_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut bad = Gateway::connect(&scheduler, registration("bad")).await.expect("welcome");
    let alone = scheduler.submit(spec()).await.expect("accepted");
    fail_on(&scheduler, &mut bad, alone).await;
    let finished = scheduler.finished(alone).await;
    let failure = finished.failure.expect("no other worker is compatible");
    assert_eq!((failure.reason.as_str(), failure.message.as_str()), ("START_FAILED", "it does not work"));

    // A full worker could take the workload later.
    let small = pb::Capacity { max_tasks: 1, ..pb::Capacity::default() };
    let mut good =
        Gateway::connect(&scheduler, pb::Registration { capacity: Some(small), ..registration("good") })
            .await
            .expect("welcome");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    let busy = within("one is on the good worker", async {
        loop {
            for id in &ids {
                let run = good.desired.leases.iter().find_map(|lease| match &lease.action {
                    Some(pb::desired_lease::Action::Run(run)) if run.workload_id == id.to_string() => {
                        Some(run)
                    }
                    _ => None,
                });
                if let Some(run) = run {
                    return (*id, run.clone());
                }
            }
            good.next().await.expect("the stream is open");
        }
    })
    .await;
    ids.retain(|id| *id != busy.0);
    for id in &ids {
        fail_on(&scheduler, &mut bad, *id).await;
        let expected = [
            "bad: could not start the workload: it does not work (START_FAILED)",
            "good: is full (1 of 1 tasks)",
        ];
        until("the workload waits for the good worker", async || {
            (scheduler.get(*id).await.waiting_for == expected).then_some(())
        })
        .await;
    }
    finish(&scheduler, &busy.1.lease_token, 0).await.expect("finished");
    for id in &ids {
        let (_, run) = good.run(*id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        assert_eq!(scheduler.finished(*id).await.outcome(), pb::Outcome::Succeeded);
    }

    // If the only other compatible worker is removed, the workload ends with the last failure.
    let last = scheduler.submit(spec()).await.expect("accepted");
    let blocker = scheduler.submit(spec()).await.expect("accepted");
    let (mut on_bad, mut on_good) = (None, None);
    within("both are placed", async {
        while on_bad.is_none() || on_good.is_none() {
            for id in [last, blocker] {
                if let Some(there) = scheduler.get(id).await.location {
                    match there.worker_name.as_str() {
                        "bad" => on_bad = Some(id),
                        _ => on_good = Some(id),
                    }
                }
            }
        }
    })
    .await;
    let (failing, blocking) = (on_bad.expect("one"), on_good.expect("the other"));
    let (_, blocked) = good.run(blocking).await;
    fail_on(&scheduler, &mut bad, failing).await;
    scheduler.wait_for(failing, pb::WorkloadState::Pending).await;
    scheduler.retire("good", true).await.expect("accepted");
    let finished = scheduler.finished(failing).await;
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("START_FAILED".to_owned()));
    finish(&scheduler, &blocked.lease_token, 0).await.expect("finished");
    scheduler.stop().await;
}

pub(crate) async fn failing_worker_is_quarantined_and_tried_again(database: TestDatabase) {
    let config = Config {
        quarantine_after: 2,
        quarantine_for: Duration::from_millis(300),
        quarantine_for_at_most: Duration::from_secs(3600),
        ..config(&database)
    };
    let scheduler = Running::start(config).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    for _ in 0..2 {
        let id = scheduler.submit(spec()).await.expect("accepted");
        fail_on(&scheduler, &mut gateway, id).await;
        gateway.wait_until_idle().await;
    }
    // The first quarantine may already be over. The test checks that quarantines grow.
    let mut waiting = Vec::new();
    for _ in 0..2 {
        waiting.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    let mut failures = 2;
    let quarantined = within("a long quarantine", async {
        loop {
            let worker = scheduler.worker("one").await;
            assert_eq!(worker.failures, failures);
            if let Some(until) = &worker.quarantined_until
                && rpc::from_timestamp(until).since(domain::Timestamp::now()) > Duration::from_secs(3)
            {
                return worker;
            }
            // During the probation, the worker gets one workload at a time.
            let Some(run) = gateway.desired.leases.iter().find_map(|lease| match &lease.action {
                Some(pb::desired_lease::Action::Run(run)) => Some(run.clone()),
                _ => None,
            }) else {
                gateway.next().await.expect("the stream is open");
                continue;
            };
            assert_eq!(gateway.desired.leases.len(), 1, "one at a time");
            fail(&scheduler, &run.lease_token, "START_FAILED").await;
            failures += 1;
            waiting.push(scheduler.submit(spec()).await.expect("accepted"));
            gateway.wait_until_idle().await;
        }
    })
    .await;
    assert_eq!((quarantined.failed_team.as_str(), reasons(&quarantined)), ("main", vec![]));
    assert_eq!(quarantined.last_failure, "it does not work (START_FAILED)");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let expected = "one: is quarantined after repeated failures: it does not work (START_FAILED)";
    until("the reason of the wait", async || {
        let reasons = scheduler.get(id).await.waiting_for;
        assert_ne!(reasons, ["no worker has registered yet"]);
        (reasons == [expected]).then_some(())
    })
    .await;

    // `UncordonWorker` resets the failures. The next attempt succeeds.
    scheduler.uncordon_worker("one").await.expect("accepted");
    let worker = scheduler.worker("one").await;
    assert_eq!((worker.failures, worker.quarantined_until), (0, None));
    let (_, run) = gateway.run_any().await;
    start(&scheduler, &run.lease_token).await.expect("started");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.worker("one").await.failures, 0);
    scheduler.stop().await;
}

pub(crate) async fn started_process_ends_probation(database: TestDatabase) {
    let config = Config {
        quarantine_after: 1,
        quarantine_for: Duration::from_millis(50),
        quarantine_for_at_most: Duration::from_millis(50),
        ..config(&database)
    };
    let scheduler = Running::start(config).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    fail_on(&scheduler, &mut gateway, id).await;
    let ids =
        [scheduler.submit(spec()).await.expect("queued"), scheduler.submit(spec()).await.expect("queued")];
    let (lease, run) = gateway.run(ids[0]).await;
    let worker = scheduler.worker("one").await;
    assert_eq!((worker.failures, worker.quarantined_until.is_none()), (1, true));
    let waits = scheduler.get(ids[1]).await;
    assert_eq!(waits.state(), pb::WorkloadState::Pending, "the probation permits one task");
    assert_eq!(
        waits.waiting_for,
        ["one: is quarantined after repeated failures: it does not work (START_FAILED)"]
    );
    start(&scheduler, &run.lease_token).await.expect("started");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    gateway.run(ids[1]).await;
    assert_eq!(scheduler.worker("one").await.failures, 0);
    scheduler.stop().await;
}

pub(crate) async fn worker_is_quarantined_for_failing_team(database: TestDatabase) {
    let config = Config {
        quarantine_after: 2,
        quarantine_for: Duration::from_secs(3600),
        quarantine_for_at_most: Duration::from_secs(3600),
        ..config(&database)
    };
    let scheduler = Running::start(config).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let of = |team: &str| pb::WorkloadSpec { team: team.to_owned(), ..spec() };
    let quarantined = async || {
        let worker = scheduler.worker("one").await;
        let refusals = worker.refusals.iter().map(|refusal| refusal.reason.clone()).collect::<Vec<_>>();
        (worker.quarantined_until.is_some(), worker.failed_team, refusals)
    };
    for _ in 0..2 {
        let id = scheduler.submit(of("main")).await.expect("accepted");
        fail_on(&scheduler, &mut gateway, id).await;
        gateway.wait_until_idle().await;
    }
    assert_eq!(quarantined().await, (true, "main".to_owned(), vec![]));
    let waits = scheduler.submit(of("main")).await.expect("accepted");

    // The other team uses the worker. A failure of the other team restarts the count for all teams.
    let other = scheduler.submit(of("other")).await.expect("accepted");
    fail_on(&scheduler, &mut gateway, other).await;
    gateway.wait_until_idle().await;
    assert_eq!(quarantined().await, (false, String::new(), vec![]));
    assert_eq!(scheduler.worker("one").await.failures, 1);
    fail_on(&scheduler, &mut gateway, waits).await;
    gateway.wait_until_idle().await;
    assert_eq!(quarantined().await, (true, String::new(), vec!["QUARANTINED".to_owned()]));
    let waits = scheduler.submit(of("main")).await.expect("accepted");

    // A running process resets the failures. `StartAttempt` alone does not.
    scheduler.uncordon_worker("one").await.expect("accepted");
    let (_, run) = gateway.run(waits).await;
    fail(&scheduler, &run.lease_token, "START_FAILED").await;
    let next = scheduler.submit(of("main")).await.expect("accepted");
    let (lease, run) = gateway.run(next).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    assert_eq!(scheduler.worker("one").await.failures, 1);
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    until("the failures are reset", async || {
        (quarantined().await == (false, String::new(), vec![])).then_some(())
    })
    .await;
    assert_eq!(scheduler.worker("one").await.failures, 0);
    scheduler.stop().await;
}
