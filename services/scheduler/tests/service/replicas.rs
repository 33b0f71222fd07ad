//! Tests of two replicas on one PostgreSQL database.

use std::time::Duration;

use domain::WorkloadId;
use rpc::pb::scheduler as pb;
use sea_orm::ConnectionTrait;
use testing::databases::TestDatabase;

use crate::demand::demand;
use crate::explain::explain_spec;
use crate::leases::{task, with_slots};
use crate::places::{place, release, wait_for_waiting_requests, waiting};
use crate::support::{Gateway, Running, config, finish, registration, spec, until, within};

/// Configuration in which no periodic read happens during a test.
fn only_hints(database: &TestDatabase) -> scheduler::Config {
    let hour = Duration::from_secs(3600);
    scheduler::Config {
        poll: hour,
        heartbeat: hour,
        worker_ttl: 2 * hour,
        stop_after: 3 * hour,
        lost_after: 4 * hour,
        ..config(database)
    }
}

/// The gateway of a worker with one slot uses one replica. The callers use the other replica.
async fn check_changes_reach_other_replica(config: scheduler::Config) {
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let mut slot = registration("one");
    slot.capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&one, slot).await.expect("welcome");
    let mut waiting = Vec::new();
    for _ in 0..5 {
        waiting.push(other.submit(spec()).await.expect("accepted"));
    }
    for id in waiting {
        let (lease, run) = gateway.run(id).await;
        let start = pb::StartAttemptRequest { lease_token: run.lease_token.clone() };
        one.workloads().start_attempt(start).await.expect("started");
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        other.wait_for(id, pb::WorkloadState::Running).await;
        finish(&one, &run.lease_token, 0).await.expect("finished");
        assert_eq!(other.finished(id).await.outcome(), pb::Outcome::Succeeded);
    }
    one.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_reach_other_replica_by_hints() {
    let database = testing::databases::postgres().await;
    check_changes_reach_other_replica(only_hints(&database)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_reach_other_replica_without_hints() {
    let database = testing::databases::postgres().await;
    let config = scheduler::Config { share_notifications: false, ..config(&database) };
    check_changes_reach_other_replica(config).await;
}

/// A lease is released at one replica. A call, a workload and a cordon wait for the release at the
/// other replica.
async fn check_release_reaches_other_replica(config: scheduler::Config) {
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let mut slot = registration("one");
    slot.capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&one, slot).await.expect("welcome");
    let mut held = place(&one, task()).await.expect("granted");
    for (here, there) in [(&one, &other), (&other, &one), (&one, &other)] {
        let waiting_call = async { place(there, waiting(task())).await.expect("granted") };
        let release_held = async {
            wait_for_waiting_requests(there, 1).await;
            release(here, &held.lease_token).await;
        };
        held = futures::join!(waiting_call, release_held).0;
    }
    let workload = other.submit(spec()).await.expect("accepted");
    one.placements()
        .release_many(pb::ReleaseManyRequest { lease_tokens: vec![held.lease_token] })
        .await
        .expect("released");
    let (_, run) = gateway.run(workload).await;
    finish(&one, &run.lease_token, 0).await.expect("finished");

    let held = within("a grant", place(&one, waiting(task()))).await.expect("granted");
    let cordon = pb::CordonWorkerRequest { worker: "one".to_owned(), ..pb::CordonWorkerRequest::default() };
    other.workers().cordon_worker(cordon).await.expect("cordoned");
    assert_eq!(one.worker("one").await.drained_at, None, "the lease delays the drain");
    release(&one, &held.lease_token).await;
    until("the worker is drained", async || other.worker("one").await.drained_at).await;
    one.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn release_reaches_other_replica_by_hints() {
    let database = testing::databases::postgres().await;
    check_release_reaches_other_replica(only_hints(&database)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn release_reaches_other_replica_without_hints() {
    let database = testing::databases::postgres().await;
    let config = scheduler::Config { share_notifications: false, ..config(&database) };
    check_release_reaches_other_replica(config).await;
}

/// Configuration without periodic reads and without hints of the other replica.
fn no_hints_or_reads(database: &TestDatabase) -> scheduler::Config {
    scheduler::Config { share_notifications: false, ..only_hints(database) }
}

/// Lets a replica read the changes of other replicas once, as it does after each `poll`.
async fn read_changes(replica: &Running) {
    explain_spec(replica, spec()).await;
}

/// A change without a hint is found by the next read of the other replica.
#[tokio::test(flavor = "multi_thread")]
async fn lost_hint_is_recovered_by_next_read() {
    let database = testing::databases::postgres().await;
    let config = no_hints_or_reads(&database);
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let check_state = async |id, state| assert_eq!(other.get(id).await.state(), state);
    read_changes(&other).await;

    // A worker registers.
    let first = other.submit(spec()).await.expect("queued");
    let _gateway = with_slots(&one, "one", 1).await;
    check_state(first, pb::WorkloadState::Pending).await;
    read_changes(&other).await;
    check_state(first, pb::WorkloadState::Assigned).await;

    // The cordon of a worker ends.
    let _second = with_slots(&one, "second", 1).await;
    let cordon =
        pb::CordonWorkerRequest { worker: "second".to_owned(), ..pb::CordonWorkerRequest::default() };
    one.workers().cordon_worker(cordon).await.expect("cordoned");
    let second = other.submit(spec()).await.expect("queued");
    let runs = pb::UncordonWorkerRequest { worker: "second".to_owned() };
    one.workers().uncordon_worker(runs).await.expect("uncordoned");
    check_state(second, pb::WorkloadState::Pending).await;
    read_changes(&other).await;
    check_state(second, pb::WorkloadState::Assigned).await;

    // A slot is released: for a workload at the same replica, for a workload at another replica,
    // and for a call.
    let _third = with_slots(&one, "third", 1).await;
    let held = place(&one, task()).await.expect("granted");
    let third = other.submit(spec()).await.expect("queued");
    release(&one, &held.lease_token).await;
    check_state(third, pb::WorkloadState::Pending).await;
    read_changes(&other).await;
    check_state(third, pb::WorkloadState::Assigned).await;

    let _fourth = with_slots(&other, "fourth", 1).await;
    let held = place(&other, task()).await.expect("granted");
    read_changes(&one).await;
    let fourth = one.submit(spec()).await.expect("queued");
    release(&other, &held.lease_token).await;
    check_state(fourth, pb::WorkloadState::Pending).await;
    read_changes(&other).await;
    check_state(fourth, pb::WorkloadState::Assigned).await;

    let _fifth = with_slots(&one, "fifth", 1).await;
    let held = place(&one, task()).await.expect("granted");
    let waiting_call = async { place(&other, waiting(task())).await.expect("granted") };
    let release_held = async {
        wait_for_waiting_requests(&other, 1).await;
        release(&one, &held.lease_token).await;
        read_changes(&other).await;
    };
    let (granted, ()) = futures::join!(waiting_call, release_held);
    assert_eq!(granted.worker_name, "fifth");
    one.stop().await;
    other.stop().await;
}

/// Waits until both replicas report this number of waiting requests.
async fn wait_for_demand(replicas: &[Running; 2], waiting: u64) {
    for replica in replicas {
        until("the number of waiting requests", async || {
            (demand(replica).await.waiting == waiting).then_some(())
        })
        .await;
    }
}

/// Two calls wait, one at each replica. The slot is released at the replica of the later call.
async fn check_earlier_is_granted_first(
    replicas: &[Running; 2],
    earlier: pb::PlaceRequest,
    later: pb::PlaceRequest,
) {
    let [one, other] = replicas;
    let held = place(other, task()).await.expect("granted");
    let earlier = async {
        let lease = place(one, waiting(earlier)).await.expect("granted");
        // The later call must still wait after the other replica knows that the earlier one was
        // granted.
        wait_for_demand(replicas, 1).await;
        release(other, &lease.lease_token).await;
    };
    let later = async {
        wait_for_demand(replicas, 1).await;
        place(other, waiting(later)).await.expect("granted")
    };
    let release_held = async {
        wait_for_demand(replicas, 2).await;
        wait_for_waiting_requests(other, 2).await;
        release(other, &held.lease_token).await;
    };
    let ((), later, ()) = futures::join!(earlier, later, release_held);
    wait_for_demand(replicas, 0).await;
    release(one, &later.lease_token).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_replica_respects_waiting_requests() {
    let database = testing::databases::postgres().await;
    // The other replica reserves released slots for this time.
    let config = scheduler::Config { poll: Duration::from_secs(1), ..config(&database) };
    let replicas = [Running::start(config.clone()).await, Running::start(config).await];
    let _gateway = with_slots(&replicas[0], "one", 1).await;
    check_earlier_is_granted_first(&replicas, task(), task()).await;
    let urgent = pb::PlaceRequest { priority: 1, ..task() };
    check_earlier_is_granted_first(&replicas, urgent, task()).await;
    // The requests are in different lines of the queue.
    let check = pb::PlaceRequest { kind: pb::PlacementKind::Check.into(), ..task() };
    check_earlier_is_granted_first(&replicas, check, task()).await;
    for replica in replicas {
        replica.stop().await;
    }
}

/// Waiting requests of a stopped replica block the other replica only for a short time.
#[tokio::test(flavor = "multi_thread")]
async fn requests_of_stopped_replica_release_their_slots() {
    let database = testing::databases::postgres().await;
    let [one, other] = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let _gateway = with_slots(&other, "one", 1).await;
    let held = place(&other, task()).await.expect("granted");
    let mut placements = one.placements();
    let lost = async { placements.place(waiting(task())).await };
    let ends = async {
        wait_for_waiting_requests(&other, 1).await;
        let next = place(&other, waiting(task()));
        let release_held = async {
            wait_for_waiting_requests(&other, 2).await;
            one.stop().await;
            release(&other, &held.lease_token).await;
        };
        futures::join!(next, release_held).0.expect("granted")
    };
    let (lost, _) = futures::join!(lost, ends);
    lost.expect_err("the replica has stopped");
    until("the queue is empty", async || (demand(&other).await.waiting == 0).then_some(())).await;
    other.stop().await;
}

/// A call at one replica requests much memory. Workloads at the other replica request little.
#[tokio::test(flavor = "multi_thread")]
async fn reservation_is_respected_by_other_replica() {
    let database = testing::databases::postgres().await;
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let (one, other) = (Running::start(aging.clone()).await, Running::start(aging).await);
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { memory_bytes: 100, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&other, registration).await.expect("welcome");
    let requesting = |memory_bytes: u64| Some(pb::ResourceRequests { memory_bytes, ..Default::default() });
    let first =
        other.submit(pb::WorkloadSpec { requests: requesting(60), ..spec() }).await.expect("accepted");
    let (_, run) = gateway.run(first).await;
    let large = async {
        let large = pb::PlaceRequest { requests: requesting(100), ..waiting(task()) };
        place(&one, large).await.expect("granted")
    };
    let small = async {
        wait_for_waiting_requests(&one, 1).await;
        until("the other replica knows the reservation", async || {
            let explained =
                explain_spec(&other, pb::WorkloadSpec { requests: requesting(1), ..spec() }).await;
            (explained.verdict() == pb::Verdict::NotNow).then_some(())
        })
        .await;
        let small =
            other.submit(pb::WorkloadSpec { requests: requesting(1), ..spec() }).await.expect("accepted");
        assert_eq!(other.get(small).await.state(), pb::WorkloadState::Pending);
        finish(&other, &run.lease_token, 0).await.expect("finished");
        small
    };
    let (large, small) = futures::join!(large, small);
    release(&one, &large.lease_token).await;
    gateway.run(small).await;
    one.stop().await;
    other.stop().await;
}

/// At one replica a released slot is granted in the same moment, so the other replica never reads a
/// free slot.
#[tokio::test(flavor = "multi_thread")]
async fn slot_durations_are_known_at_each_replica() {
    let database = testing::databases::postgres().await;
    let [one, other] = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let _gateway = with_slots(&one, "one", 1).await;
    let mut held = place(&one, task()).await.expect("granted");
    let explained = explain_spec(&other, spec()).await;
    assert_eq!(explained.expected_wait, None, "{explained:?}");
    for _ in 0..3 {
        let waiting_call = async { place(&one, waiting(task())).await.expect("granted") };
        let release_held = async {
            wait_for_waiting_requests(&one, 1).await;
            release(&one, &held.lease_token).await;
        };
        held = futures::join!(waiting_call, release_held).0;
    }
    until("the expected wait is known", async || explain_spec(&other, spec()).await.expected_wait).await;
    one.stop().await;
    other.stop().await;
}

/// Each replica receives half of the submissions and learns of the other's grants later.
#[tokio::test(flavor = "multi_thread")]
async fn burst_is_spread_over_all_workers() {
    let database = testing::databases::postgres().await;
    let hour = Duration::from_secs(3600);
    // The gateways send no heartbeats. If a worker stalled, its workloads would move.
    let config = scheduler::Config {
        worker_ttl: hour,
        stop_after: 2 * hour,
        lost_after: 3 * hour,
        ..config(&database)
    };
    let replicas = [Running::start(config.clone()).await, Running::start(config).await];
    let mut gateways = Vec::new();
    for number in 0..20 {
        let mut roomy = registration(&format!("worker-{number}"));
        roomy.capacity = Some(pb::Capacity { max_tasks: 100, ..pb::Capacity::default() });
        gateways.push(Gateway::connect(&replicas[number % 2], roomy).await.expect("welcome"));
    }
    for replica in &replicas {
        until("the replica knows all workers", async || {
            let subject = Some(pb::explain_request::Subject::Spec(spec()));
            let request = pb::ExplainRequest { subject, ..pb::ExplainRequest::default() };
            let explained = replica.placements().explain(request).await.expect("explained").into_inner();
            (explained.workers.len() == 20).then_some(())
        })
        .await;
    }
    // One connection for each replica, because the number of new connections is limited.
    let clients = replicas.each_ref().map(Running::workloads);
    let submitted = (0..1000).map(|number| {
        let request = pb::SubmitRequest { workload_id: WorkloadId::new().to_string(), spec: Some(spec()) };
        let mut client = clients[number % 2].clone();
        async move { client.submit(request).await }
    });
    for submitted in futures::future::join_all(submitted).await {
        submitted.expect("accepted");
    }
    // Decisions of both replicas may conflict, so a workload may wait in the queue at first.
    let load = until("all workloads are placed", async || {
        let workers = replicas[0].workers().list_workers(pb::ListWorkersRequest::default()).await;
        let workers = workers.expect("listed").into_inner().workers;
        let load: Vec<_> = workers.iter().map(|worker| worker.active_tasks).collect();
        (load.iter().sum::<u32>() == 1000).then_some(load)
    })
    .await;
    assert_eq!(load.len(), 20);
    let (least, most) = (load.iter().min().expect("some"), load.iter().max().expect("some"));
    assert!(*most * 10 <= *least * 15, "{load:?}");
    assert!(connections(&database).await <= 8, "each replica has the default number of connections at most");
    for replica in replicas {
        replica.stop().await;
    }
}

/// Returns the number of connections to a database on PostgreSQL.
async fn connections(database: &TestDatabase) -> i64 {
    let own = sea_orm::Database::connect(&database.url).await.expect("connected");
    let count = "SELECT count(*) AS n FROM pg_stat_activity
                 WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let count = sea_orm::Statement::from_string(sea_orm::DbBackend::Postgres, count);
    let row = own.query_one_raw(count).await.expect("counted").expect("a row");
    row.try_get("", "n").expect("a number")
}
