//! Workers that were lost or removed: a moment ago, and may come back; and what they may run still.

use std::future::Future;
use std::time::Duration;

use domain::GatewayInstance;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use testing::databases::TestDatabase;

use crate::demand::demand;
use crate::explain::explain_spec;
use crate::leases::{refused, task, with_slots};
use crate::patient_config;
use crate::places::{place, so_many_wait, waiting};
use crate::support::{Gateway, Running, config, finish, hello, spec, start, until};

/// How a worker went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Lost,
    Pruned,
}

fn remembering(database: &TestDatabase, how: How, remember_lost: Duration) -> Config {
    let hour = Duration::from_secs(3600);
    let (stop_after, lost_after) = match how {
        How::Lost => (Duration::from_millis(350), Duration::from_millis(400)),
        How::Pruned => (hour, 2 * hour),
    };
    Config {
        worker_ttl: Duration::from_millis(300),
        stop_after,
        lost_after,
        remember_lost,
        ..config(database)
    }
}

async fn becomes(scheduler: &Running, worker: &str, state: pb::WorkerState) {
    until("its state", async || (scheduler.worker(worker).await.state() == state).then_some(())).await;
}

async fn goes(scheduler: &Running, gateway: Gateway, how: How) {
    drop(gateway);
    match how {
        How::Lost => becomes(scheduler, "one", pb::WorkerState::Lost).await,
        How::Pruned => {
            becomes(scheduler, "one", pb::WorkerState::Stalled).await;
            scheduler.prune("one", true).await.expect("it is out of contact");
        }
    }
}

/// What `future` resolves to, while the gateway says all the time that it is there.
async fn in_contact<T>(gateway: &Gateway, future: impl Future<Output = T>) -> T {
    let says_so = async {
        loop {
            gateway.observe_nothing().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        never = says_so => never,
        answer = future => answer,
    }
}

/// One that cannot do what is asked for, so that some worker is always known.
async fn of_no_use(scheduler: &Running) -> Gateway {
    let mut other = hello("other");
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

async fn waits_for_it(database: TestDatabase, how: How) {
    let scheduler = Running::start(remembering(&database, how, Duration::from_secs(3600))).await;
    let _other = of_no_use(&scheduler).await;
    let gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    goes(&scheduler, gateway, how).await;
    let (reason, says) = match how {
        How::Lost => ("JUST_LOST", "was lost minutes ago"),
        How::Pruned => ("GONE", "went away minutes ago"),
    };
    let expected = (pb::Verdict::NotNow, vec![(reason.to_owned(), pb::RefusalDuration::Passing)]);
    until("it may come back", async || (reasons(&scheduler).await == expected).then_some(())).await;

    let busy = refused(&scheduler, task()).await;
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about.get("one").map(String::as_str), Some(says), "{busy:?}");
    let id = scheduler.submit(spec()).await.expect("queued");
    let queued = until("it is told what it waits for", async || {
        let said =
            |queued: &pb::Workload| queued.waiting_for.iter().any(|why| *why == format!("one: {says}"));
        Some(scheduler.get(id).await).filter(said)
    })
    .await;
    assert_eq!(queued.state(), pb::WorkloadState::Pending);
    let back = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let placed = until("it is placed", async || scheduler.get(id).await.whereabouts);
    assert_eq!(in_contact(&back, placed).await.worker_name, "one");
    scheduler.stop().await;
}

async fn waits_no_longer(database: TestDatabase, how: How) {
    let scheduler = Running::start(remembering(&database, how, Duration::from_millis(500))).await;
    let _other = of_no_use(&scheduler).await;
    let gateway = with_slots(&scheduler, "one", 1).await;
    let taken = until("its only slot is taken", async || place(&scheduler, task()).await.ok());
    in_contact(&gateway, taken).await;
    let call = async { place(&scheduler, waiting(task())).await.expect_err("its worker has gone") };
    let then = async {
        in_contact(&gateway, so_many_wait(&scheduler, 1)).await;
        goes(&scheduler, gateway, how).await;
    };
    let (refusal, ()) = futures::join!(call, then);
    assert!(refusal.is(Reason::NoCompatibleWorker), "{refusal}");

    let of_one = match how {
        How::Lost => vec![("LOST".to_owned(), pb::RefusalDuration::Lasting)],
        How::Pruned => vec![],
    };
    assert_eq!(reasons(&scheduler).await, (pb::Verdict::Never, of_one));
    assert!(refused(&scheduler, task()).await.is(Reason::NoCompatibleWorker));
    let refusal = scheduler.submit(spec()).await.expect_err("nobody could take it");
    assert!(refusal.is(Reason::NoCompatibleWorker), "{refusal}");
    scheduler.stop().await;
}

pub(crate) async fn what_only_a_lost_worker_could_do_waits_for_it(database: TestDatabase) {
    waits_for_it(database, How::Lost).await;
}

pub(crate) async fn what_only_a_pruned_worker_could_do_waits_for_it(database: TestDatabase) {
    waits_for_it(database, How::Pruned).await;
}

pub(crate) async fn a_worker_that_was_lost_long_ago_is_not_waited_for(database: TestDatabase) {
    waits_no_longer(database, How::Lost).await;
}

pub(crate) async fn a_worker_that_was_pruned_long_ago_is_not_waited_for(database: TestDatabase) {
    waits_no_longer(database, How::Pruned).await;
}

pub(crate) async fn whoever_asks_is_told_which_workers_are_lost_or_gone(database: TestDatabase) {
    let scheduler = Running::start(remembering(&database, How::Lost, Duration::from_secs(3600))).await;
    let plain = hello("ephemeral");
    let labels = plain.labels.map(|labels| pb::WorkerLabels { ephemeral: true, ..labels });
    let ephemeral = pb::Hello { labels, ..plain };
    for hello in [ephemeral, hello("pruned"), hello("retired"), hello("lost")] {
        let gateway = Gateway::connect(&scheduler, hello.clone()).await.expect("welcome");
        if hello.worker_name == "retired" {
            scheduler.retire("retired", true).await.expect("told");
        }
        drop(gateway);
    }
    scheduler.gone("ephemeral").await;
    scheduler.gone("retired").await;
    becomes(&scheduler, "pruned", pb::WorkerState::Lost).await;
    scheduler.prune("pruned", true).await.expect("it is out of contact");
    becomes(&scheduler, "lost", pb::WorkerState::Lost).await;

    // Nobody is there that could, but one may be again.
    let explained = explain_spec(&scheduler, spec()).await;
    assert_eq!((explained.workers_known, explained.workers_gone), (1, 3));
    assert_eq!(
        explained.summary,
        "the only worker that could take it, lost, was lost minutes ago; 3 others went away minutes ago"
    );
    let told = demand(&scheduler).await;
    assert_eq!((told.supply, told.removable), (vec![], vec![]), "nothing could run there");
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
        let gone = explained.groups.iter().find(|group| group.refusals[0].reason == "GONE").expect("told");
        assert_eq!((gone.refusals.len(), gone.names.join(" ")), (1, "ephemeral pruned retired".to_owned()));
        assert_eq!(gone.refusals[0].ended_by, "another worker takes its place");
        let told = demand(&scheduler).await;
        let [one] = told.supply.as_slice() else { panic!("{told:?}") };
        assert_eq!((one.workers, one.workers_in_service, one.slots_in_use, one.slots_free), (1, 1, 1, 0));
    };
    in_contact(&gateway, all).await;
    scheduler.stop().await;
}

/// A worker that does not stop by itself what it cannot answer for, as Garden does not, may run it when it is given up for lost.
pub(crate) async fn what_a_lost_worker_may_run_still_keeps_its_slot(database: TestDatabase) {
    let (ttl, lost_after) = (Duration::from_millis(500), Duration::from_millis(1200));
    let scheduler = Running::start(patient_config(&database, ttl, lost_after)).await;
    let tagged =
        |spec: pb::WorkloadSpec, name: &str| pb::WorkloadSpec { tags: vec![name.to_owned()], ..spec };
    let mut lost = Vec::new();
    // Of one worker it is seen that it stopped, one begins anew, and one is pruned.
    for name in ["back", "reborn", "pruned"] {
        let plain = hello(name);
        let labels = pb::WorkerLabels {
            capabilities: vec!["network-private".to_owned()],
            tags: vec![name.to_owned()],
            ephemeral: true,
            ..plain.labels.expect("labels")
        };
        let capacity = Some(pb::Capacity { max_tasks: 1, ..plain.capacity.expect("capacity") });
        let hello = pb::Hello { labels: Some(labels), capacity, ..plain };
        let mut gateway = Gateway::connect(&scheduler, hello.clone()).await.expect("welcome");
        let again = pb::WorkloadSpec { interruptible: true, retries: 3, ..tagged(spec(), name) };
        let id = scheduler.submit(again).await.expect("accepted");
        let (lease, run) = gateway.run_speaking(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        lost.push((name, hello, gateway, id, lease, run.lease_token));
    }
    for (name, _, _, id, ..) in &lost {
        let finished = scheduler.finished(*id).await;
        assert_eq!(finished.failure.expect("a failure").reason, "WORKER_LOST");
        let worker = scheduler.worker(name).await;
        assert_eq!(worker.state(), pb::WorkerState::Lost);
        assert_eq!(worker.active_tasks, 1, "{name}: its slot is taken, and it has not gone");
    }

    let [back, reborn, pruned] = <[_; 3]>::try_from(lost).unwrap_or_else(|_| panic!("three"));
    let (_, _, mut gateway, id, lease, token) = back;
    until("it is back", async || {
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        (scheduler.worker("back").await.state() == pb::WorkerState::Running).then_some(())
    })
    .await;
    let (_, stop) = gateway.stop(id).await;
    assert_eq!(stop.reason(), pb::StopReason::WorkerLost);
    let waits = scheduler.submit(tagged(spec(), "back")).await.expect("queued");
    assert_eq!(scheduler.get(waits).await.state(), pb::WorkloadState::Pending);
    assert_eq!(scheduler.worker("back").await.active_tasks, 1, "until it has stopped");
    finish(&scheduler, &token, 0).await.expect("acknowledged");
    finish(&scheduler, &token, 0).await.expect("again");
    gateway.run_speaking(waits).await;
    assert_eq!(scheduler.get(id).await.outcome(), pb::Outcome::Errored, "it has ended before");

    let (_, mut hello, gateway, ..) = reborn;
    drop(gateway);
    hello.gateway_instance = GatewayInstance::new().to_string();
    hello.marker = Some(pb::Marker { boot_id: "another".to_owned(), ..hello.marker.expect("a marker") });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let next = scheduler.submit(tagged(spec(), "reborn")).await.expect("accepted");

    // Whoever sees workers off has been there.
    let other = scheduler.submit(tagged(spec(), "reborn")).await.expect("queued");
    let (_, run) = gateway.run_speaking(next).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run_speaking(other).await;
    assert_eq!(scheduler.worker("pruned").await.active_tasks, 1, "it has not gone");
    drop(pruned.2);
    scheduler.prune("pruned", true).await.expect("pruned");
    scheduler.gone("pruned").await;
    scheduler.stop().await;
}
