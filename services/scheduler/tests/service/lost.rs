//! Workers that were lost or removed a moment ago, and may come back.

use std::future::Future;
use std::time::Duration;

use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use testing::databases::TestDatabase;

use crate::explain::explain_spec;
use crate::leases::{refused, task, with_slots};
use crate::places::{place, so_many_wait, waiting};
use crate::support::{Gateway, Running, config, hello, spec, until};

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
    let expected = (pb::Verdict::NotNow, vec![("JUST_LOST".to_owned(), pb::RefusalDuration::Passing)]);
    until("it may come back", async || (reasons(&scheduler).await == expected).then_some(())).await;

    let busy = refused(&scheduler, task()).await;
    assert!(busy.is(Reason::AllWorkersBusy), "{busy}");
    assert_eq!(busy.about.get("one").map(String::as_str), Some("was there minutes ago"), "{busy:?}");
    let id = scheduler.submit(spec()).await.expect("queued");
    let queued = until("it is told what it waits for", async || {
        let said =
            |queued: &pb::Workload| queued.waiting_for.iter().any(|why| why == "one: was there minutes ago");
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
