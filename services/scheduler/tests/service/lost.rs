//! Tests of workers that were lost or removed recently and may return, and of the attempts that
//! they may still run.

use std::future::Future;
use std::time::Duration;

use domain::GatewayInstance;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use testing::databases::TestDatabase;

use crate::config_with_limits;
use crate::demand::demand;
use crate::explain::explain_spec;
use crate::leases::{refused, task, with_slots};
use crate::places::{place, wait_for_waiting_requests, waiting};
use crate::support::{Gateway, Running, config, finish, registration, spec, start, until};

/// Way in which a worker becomes unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Removal {
    Lost,
    Pruned,
}

fn config_remembering(database: &TestDatabase, removal: Removal, remember_lost: Duration) -> Config {
    let hour = Duration::from_secs(3600);
    let (stop_after, lost_after) = match removal {
        Removal::Lost => (Duration::from_millis(350), Duration::from_millis(400)),
        Removal::Pruned => (hour, 2 * hour),
    };
    Config {
        worker_ttl: Duration::from_millis(300),
        stop_after,
        lost_after,
        remember_lost,
        ..config(database)
    }
}

async fn wait_for_state(scheduler: &Running, worker: &str, state: pb::WorkerState) {
    until("the state of the worker", async || {
        (scheduler.worker(worker).await.state() == state).then_some(())
    })
    .await;
}

async fn remove(scheduler: &Running, gateway: Gateway, removal: Removal) {
    drop(gateway);
    match removal {
        Removal::Lost => wait_for_state(scheduler, "one", pb::WorkerState::Lost).await,
        Removal::Pruned => {
            wait_for_state(scheduler, "one", pb::WorkerState::Stalled).await;
            scheduler.prune("one", true).await.expect("the worker is out of contact");
        }
    }
}

/// Awaits `future` while the gateway reports regularly.
async fn in_contact<T>(gateway: &Gateway, future: impl Future<Output = T>) -> T {
    let reports = async {
        loop {
            gateway.observe_nothing().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = reports => never,
        answer = future => answer,
    }
}

/// Connects a worker that cannot take the request, so that at least one worker is always known.
async fn connect_incompatible(scheduler: &Running) -> Gateway {
    let mut other = registration("other");
    other.labels.as_mut().expect("labels").platform = "darwin".to_owned();
    Gateway::connect(scheduler, other).await.expect("welcome")
}

async fn reasons(scheduler: &Running) -> (pb::Verdict, Vec<(String, pb::RefusalDuration)>) {
    let explained = explain_spec(scheduler, spec()).await;
    let one = explained.workers.iter().filter(|worker| worker.worker_name == "one");
    let reasons = one.flat_map(|one| &one.refusals);
    let reasons = reasons.map(|refusal| (refusal.reason.clone(), refusal.duration())).collect();
    (explained.verdict(), reasons)
}

async fn check_request_waits(database: TestDatabase, removal: Removal) {
    let scheduler = Running::start(config_remembering(&database, removal, Duration::from_secs(3600))).await;
    let _other = connect_incompatible(&scheduler).await;
    let gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    remove(&scheduler, gateway, removal).await;
    let (reason, message) = match removal {
        Removal::Lost => ("JUST_LOST", "was lost minutes ago"),
        Removal::Pruned => ("GONE", "went away minutes ago"),
    };
    let expected = (pb::Verdict::NotNow, vec![(reason.to_owned(), pb::RefusalDuration::Passing)]);
    until("the worker may return", async || (reasons(&scheduler).await == expected).then_some(())).await;

    let busy = refused(&scheduler, task()).await;
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about.get("one").map(String::as_str), Some(message), "{busy:?}");
    let id = scheduler.submit(spec()).await.expect("queued");
    let queued = until("the reason of the wait", async || {
        let waits_for_one =
            |queued: &pb::Workload| queued.waiting_for.iter().any(|why| *why == format!("one: {message}"));
        Some(scheduler.get(id).await).filter(waits_for_one)
    })
    .await;
    assert_eq!(queued.state(), pb::WorkloadState::Pending);
    let back = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let placed = until("the workload is placed", async || scheduler.get(id).await.location);
    assert_eq!(in_contact(&back, placed).await.worker_name, "one");
    scheduler.stop().await;
}

async fn check_request_ends(database: TestDatabase, removal: Removal) {
    let scheduler = Running::start(config_remembering(&database, removal, Duration::from_millis(500))).await;
    let _other = connect_incompatible(&scheduler).await;
    let gateway = with_slots(&scheduler, "one", 1).await;
    let taken = until("the only slot is used", async || place(&scheduler, task()).await.ok());
    in_contact(&gateway, taken).await;
    let call = async { place(&scheduler, waiting(task())).await.expect_err("the worker has been removed") };
    let then = async {
        in_contact(&gateway, wait_for_waiting_requests(&scheduler, 1)).await;
        remove(&scheduler, gateway, removal).await;
    };
    let (refusal, ()) = futures::join!(call, then);
    assert!(refusal.is(Reason::NoCompatibleWorker), "{refusal}");

    let of_one = match removal {
        Removal::Lost => vec![("LOST".to_owned(), pb::RefusalDuration::Lasting)],
        Removal::Pruned => vec![],
    };
    assert_eq!(reasons(&scheduler).await, (pb::Verdict::Never, of_one));
    assert!(refused(&scheduler, task()).await.is(Reason::NoCompatibleWorker));
    let refusal = scheduler.submit(spec()).await.expect_err("no worker could take the workload");
    assert!(refusal.is(Reason::NoCompatibleWorker), "{refusal}");
    scheduler.stop().await;
}

pub(crate) async fn request_waits_for_lost_worker(database: TestDatabase) {
    check_request_waits(database, Removal::Lost).await;
}

pub(crate) async fn request_waits_for_pruned_worker(database: TestDatabase) {
    check_request_waits(database, Removal::Pruned).await;
}

pub(crate) async fn request_ignores_worker_lost_long_ago(database: TestDatabase) {
    check_request_ends(database, Removal::Lost).await;
}

pub(crate) async fn request_ignores_worker_pruned_long_ago(database: TestDatabase) {
    check_request_ends(database, Removal::Pruned).await;
}

pub(crate) async fn explanation_names_lost_and_removed_workers(database: TestDatabase) {
    let scheduler =
        Running::start(config_remembering(&database, Removal::Lost, Duration::from_secs(3600))).await;
    let plain = registration("ephemeral");
    let labels = plain.labels.map(|labels| pb::WorkerLabels { ephemeral: true, ..labels });
    let ephemeral = pb::Registration { labels, ..plain };
    for registration in [ephemeral, registration("pruned"), registration("retired"), registration("lost")] {
        let gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
        if registration.worker_name == "retired" {
            scheduler.retire("retired", true).await.expect("accepted");
        }
        drop(gateway);
    }
    scheduler.wait_until_removed("ephemeral").await;
    scheduler.wait_until_removed("retired").await;
    wait_for_state(&scheduler, "pruned", pb::WorkerState::Lost).await;
    scheduler.prune("pruned", true).await.expect("the worker is out of contact");
    wait_for_state(&scheduler, "lost", pb::WorkerState::Lost).await;

    // No connected worker could take the workload, but a lost worker may return.
    let explained = explain_spec(&scheduler, spec()).await;
    assert_eq!((explained.workers_known, explained.workers_gone), (1, 3));
    assert_eq!(
        explained.summary,
        "the only worker that could take it, lost, was lost minutes ago; 3 others went away minutes ago"
    );
    let answer = demand(&scheduler).await;
    assert_eq!((answer.supply, answer.removable), (vec![], vec![]), "a lost worker is no supply");
    let registers = "a worker registers that can do it (platform linux, capabilities network-private)";
    assert_eq!(explained.unblocked_by, ["lost: its gateway is in contact again", registers]);

    let gateway = with_slots(&scheduler, "one", 1).await;
    let all = async {
        let explained = explain_spec(&scheduler, spec()).await;
        assert_eq!(explained.summary, "1 of 2 workers would take it now");
        let id = scheduler.submit(spec()).await.expect("placed");
        let events = scheduler.watch_some(id, 0, 1).await;
        let placed = events.into_iter().find_map(|event| match event.event {
            Some(pb::watch_response::Event::Placed(placed)) => Some(placed),
            _ => None,
        });
        let why = placed.expect("placed").reason;
        assert_eq!(why, "the only one of 2 workers that can take it now: 0 active tasks");
        let explained = explain_spec(&scheduler, spec()).await;
        assert_eq!(
            explained.summary,
            "of 2 workers that could take it one is full (1 of 1 tasks), lost was lost minutes ago; \
             3 others went away minutes ago"
        );
        let expected = ["lost: its gateway is in contact again", "one: one of its tasks ends", registers];
        assert_eq!(explained.unblocked_by, expected);
        let gone = explained.groups.iter().find(|group| group.refusals[0].reason == "GONE").expect("a group");
        assert_eq!((gone.refusals.len(), gone.names.join(" ")), (1, "ephemeral pruned retired".to_owned()));
        assert_eq!(gone.refusals[0].ended_by, "another worker takes its place");
        let answer = demand(&scheduler).await;
        let [one] = answer.supply.as_slice() else { panic!("{answer:?}") };
        assert_eq!((one.workers, one.workers_in_service, one.slots_in_use, one.slots_free), (1, 1, 1, 0));
    };
    in_contact(&gateway, all).await;
    scheduler.stop().await;
}

/// A worker without the capability `stop-after`, such as Garden, may still run an attempt after the
/// worker is lost.
pub(crate) async fn lost_worker_keeps_slots_of_running_attempts(database: TestDatabase) {
    let (ttl, lost_after) = (Duration::from_millis(500), Duration::from_millis(1200));
    let scheduler = Running::start(config_with_limits(&database, ttl, lost_after)).await;
    let tagged =
        |spec: pb::WorkloadSpec, name: &str| pb::WorkloadSpec { tags: vec![name.to_owned()], ..spec };
    let mut lost = Vec::new();
    // One worker reconnects and stops the attempt, one starts a new incarnation, and one is pruned.
    for name in ["back", "restarted", "pruned"] {
        let plain = registration(name);
        let labels = pb::WorkerLabels {
            capabilities: vec!["network-private".to_owned()],
            tags: vec![name.to_owned()],
            ephemeral: true,
            ..plain.labels.expect("labels")
        };
        let capacity = Some(pb::Capacity { max_tasks: 1, ..plain.capacity.expect("capacity") });
        let registration = pb::Registration { labels: Some(labels), capacity, ..plain };
        let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
        let retried = pb::WorkloadSpec { interruptible: true, retries: 3, ..tagged(spec(), name) };
        let id = scheduler.submit(retried).await.expect("accepted");
        let (lease, run) = gateway.run_while_reporting(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        lost.push((name, registration, gateway, id, lease, run.lease_token));
    }
    for (name, _, _, id, ..) in &lost {
        let finished = scheduler.finished(*id).await;
        assert_eq!(finished.failure.expect("a failure").reason, "WORKER_LOST");
        let worker = scheduler.worker(name).await;
        assert_eq!(worker.state(), pb::WorkerState::Lost);
        assert_eq!(worker.active_tasks, 1, "{name}: the slot is used, and the worker is not removed");
    }

    let [back, restarted, pruned] = <[_; 3]>::try_from(lost).unwrap_or_else(|_| panic!("three"));
    let (_, _, mut gateway, id, lease, token) = back;
    until("the worker is running", async || {
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        (scheduler.worker("back").await.state() == pb::WorkerState::Running).then_some(())
    })
    .await;
    let (_, stop) = gateway.stop(id).await;
    assert_eq!(stop.reason(), pb::StopReason::WorkerLost);
    let waiting = scheduler.submit(tagged(spec(), "back")).await.expect("queued");
    assert_eq!(scheduler.get(waiting).await.state(), pb::WorkloadState::Pending);
    assert_eq!(
        scheduler.worker("back").await.active_tasks,
        1,
        "the slot is used until the attempt has stopped"
    );
    finish(&scheduler, &token, 0).await.expect("acknowledged");
    finish(&scheduler, &token, 0).await.expect("a repeat");
    gateway.run_while_reporting(waiting).await;
    assert_eq!(scheduler.get(id).await.outcome(), pb::Outcome::Errored, "the workload has already ended");

    let (_, mut registration, gateway, ..) = restarted;
    drop(gateway);
    registration.gateway_instance = GatewayInstance::new().to_string();
    registration.marker =
        Some(pb::Marker { boot_id: "another".to_owned(), ..registration.marker.expect("a marker") });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let next = scheduler.submit(tagged(spec(), "restarted")).await.expect("accepted");

    // By now the scheduler has checked the departing workers.
    let other = scheduler.submit(tagged(spec(), "restarted")).await.expect("queued");
    let (_, run) = gateway.run_while_reporting(next).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run_while_reporting(other).await;
    assert_eq!(scheduler.worker("pruned").await.active_tasks, 1, "the worker has not been removed");
    drop(pruned.2);
    scheduler.prune("pruned", true).await.expect("pruned");
    scheduler.wait_until_removed("pruned").await;
    scheduler.stop().await;
}
