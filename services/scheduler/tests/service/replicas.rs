//! Two replicas beside each other on one PostgreSQL.

use std::time::Duration;

use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::demand::demand;
use crate::explain::explain_spec;
use crate::leases::{task, with_slots};
use crate::places::{place, release, so_many_wait, waiting};
use crate::support::{Gateway, Running, config, finish, hello, spec, until, within};

/// Settings under which nobody looks by himself while a test lasts.
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

/// A worker with one slot speaks with one replica; whoever submits and waits and watches, with the other.
async fn what_one_changes_the_other_hears_of(config: scheduler::Config) {
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let mut slot = hello("one");
    slot.capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&one, slot).await.expect("welcome");
    let mut waiting = Vec::new();
    for _ in 0..5 {
        waiting.push(other.submit(spec()).await.expect("accepted"));
    }
    for id in waiting {
        let (lease, run) = gateway.run(id).await;
        let start = pb::StartAttemptRequest { lease_token: run.lease_token.clone() };
        one.workloads().start_attempt(start).await.expect("it may start");
        gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
        other.wait_for(id, pb::WorkloadState::Running).await;
        finish(&one, &run.lease_token, 0).await.expect("finished");
        assert_eq!(other.finished(id).await.outcome(), pb::Outcome::Succeeded);
    }
    one.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_one_replica_changes_the_other_hears_of_at_once() {
    let database = testing::databases::postgres().await;
    what_one_changes_the_other_hears_of(only_hints(&database)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_hint_each_finds_out_by_looking() {
    let database = testing::databases::postgres().await;
    let config = scheduler::Config { share_hints: false, ..config(&database) };
    what_one_changes_the_other_hears_of(config).await;
}

/// A lease is given back at one replica, while a caller, a workload and a landing wait for that at the other.
async fn what_is_given_back_at_one_helps_who_waits_at_the_other(config: scheduler::Config) {
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let mut slot = hello("one");
    slot.capacity = Some(pb::Capacity { max_tasks: 1, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&one, slot).await.expect("welcome");
    let mut held = place(&one, task()).await.expect("granted");
    for (here, there) in [(&one, &other), (&other, &one), (&one, &other)] {
        let waits = async { place(there, waiting(task())).await.expect("granted") };
        let gives_back = async {
            so_many_wait(there, 1).await;
            release(here, &held.lease_token).await;
        };
        held = futures::join!(waits, gives_back).0;
    }
    let waits = other.submit(spec()).await.expect("accepted");
    one.placements()
        .release_many(pb::ReleaseManyRequest { lease_tokens: vec![held.lease_token] })
        .await
        .expect("released");
    let (_, run) = gateway.run(waits).await;
    finish(&one, &run.lease_token, 0).await.expect("finished");

    let held = within("it is granted", place(&one, waiting(task()))).await.expect("granted");
    let landing = pb::CordonWorkerRequest { worker: "one".to_owned(), ..pb::CordonWorkerRequest::default() };
    other.workers().cordon_worker(landing).await.expect("it is cordoned");
    assert_eq!(one.worker("one").await.drained_at, None, "the lease holds it up");
    release(&one, &held.lease_token).await;
    until("it has landed", async || other.worker("one").await.drained_at).await;
    one.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_given_back_at_one_replica_helps_who_waits_at_the_other_at_once() {
    let database = testing::databases::postgres().await;
    what_is_given_back_at_one_helps_who_waits_at_the_other(only_hints(&database)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_hint_what_is_given_back_is_found_by_looking() {
    let database = testing::databases::postgres().await;
    let config = scheduler::Config { share_hints: false, ..config(&database) };
    what_is_given_back_at_one_helps_who_waits_at_the_other(config).await;
}

/// Settings under which nobody looks by himself while a test lasts, nor hears of what the other replica changes.
fn neither_hints_nor_looks(database: &TestDatabase) -> scheduler::Config {
    scheduler::Config { share_hints: false, ..only_hints(database) }
}

/// Has a replica look once at what others have changed, as it does by itself after each `poll`.
async fn look(replica: &Running) {
    explain_spec(replica, spec()).await;
}

/// Whatever lets one be placed that waits, and of which nobody hears, is found by the first look after that.
#[tokio::test(flavor = "multi_thread")]
async fn a_hint_that_is_lost_costs_one_look() {
    let database = testing::databases::postgres().await;
    let config = neither_hints_nor_looks(&database);
    let (one, other) = (Running::start(config.clone()).await, Running::start(config).await);
    let is = async |id, state| assert_eq!(other.get(id).await.state(), state);
    look(&other).await;

    // A worker comes.
    let first = other.submit(spec()).await.expect("queued");
    let _gateway = with_slots(&one, "one", 1).await;
    is(first, pb::WorkloadState::Pending).await;
    look(&other).await;
    is(first, pb::WorkloadState::Assigned).await;

    // One that is landing shall run again.
    let _second = with_slots(&one, "second", 1).await;
    let landing =
        pb::CordonWorkerRequest { worker: "second".to_owned(), ..pb::CordonWorkerRequest::default() };
    one.workers().cordon_worker(landing).await.expect("it is cordoned");
    let second = other.submit(spec()).await.expect("queued");
    let runs = pb::RunWorkerRequest { worker: "second".to_owned() };
    one.workers().run_worker(runs).await.expect("it shall run");
    is(second, pb::WorkloadState::Pending).await;
    look(&other).await;
    is(second, pb::WorkloadState::Assigned).await;

    // A slot comes free: for a workload that waits there, for one that waits elsewhere, and for a call.
    let _third = with_slots(&one, "third", 1).await;
    let held = place(&one, task()).await.expect("granted");
    let third = other.submit(spec()).await.expect("queued");
    release(&one, &held.lease_token).await;
    is(third, pb::WorkloadState::Pending).await;
    look(&other).await;
    is(third, pb::WorkloadState::Assigned).await;

    let _fourth = with_slots(&other, "fourth", 1).await;
    let held = place(&other, task()).await.expect("granted");
    look(&one).await;
    let fourth = one.submit(spec()).await.expect("queued");
    release(&other, &held.lease_token).await;
    is(fourth, pb::WorkloadState::Pending).await;
    look(&other).await;
    is(fourth, pb::WorkloadState::Assigned).await;

    let _fifth = with_slots(&one, "fifth", 1).await;
    let held = place(&one, task()).await.expect("granted");
    let calls = async { place(&other, waiting(task())).await.expect("granted") };
    let gives_back = async {
        so_many_wait(&other, 1).await;
        release(&one, &held.lease_token).await;
        look(&other).await;
    };
    let (granted, ()) = futures::join!(calls, gives_back);
    assert_eq!(granted.worker_name, "fifth");
    one.stop().await;
    other.stop().await;
}

/// Both replicas tell that so many leases are waited for.
async fn both_tell(replicas: &[Running; 2], waiting: u64) {
    for replica in replicas {
        until("it is told", async || (demand(replica).await.waiting == waiting).then_some(())).await;
    }
}

/// Of two calls one waits at each replica, and the slot comes free at the one where the later waits.
async fn the_earlier_is_granted_first(
    replicas: &[Running; 2],
    earlier: pb::PlaceRequest,
    later: pb::PlaceRequest,
) {
    let [one, other] = replicas;
    let held = place(other, task()).await.expect("granted");
    let earlier = async {
        let lease = place(one, waiting(earlier)).await.expect("granted");
        // The later waits still, which is seen once the other has heard that the earlier does not.
        both_tell(replicas, 1).await;
        release(other, &lease.lease_token).await;
    };
    let later = async {
        both_tell(replicas, 1).await;
        place(other, waiting(later)).await.expect("granted")
    };
    let gives_back = async {
        both_tell(replicas, 2).await;
        so_many_wait(other, 2).await;
        release(other, &held.lease_token).await;
    };
    let ((), later, ()) = futures::join!(earlier, later, gives_back);
    both_tell(replicas, 0).await;
    release(one, &later.lease_token).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_leases_at_one_replica_is_counted_and_not_passed_over_at_the_other() {
    let database = testing::databases::postgres().await;
    // For that long the other leaves alone what came free for the one.
    let config = scheduler::Config { poll: Duration::from_secs(1), ..config(&database) };
    let replicas = [Running::start(config.clone()).await, Running::start(config).await];
    let _gateway = with_slots(&replicas[0], "one", 1).await;
    the_earlier_is_granted_first(&replicas, task(), task()).await;
    let urgent = pb::PlaceRequest { priority: 1, ..task() };
    the_earlier_is_granted_first(&replicas, urgent, task()).await;
    // They wait in lines of their own.
    let check = pb::PlaceRequest { kind: pb::PlacementKind::Check.into(), ..task() };
    the_earlier_is_granted_first(&replicas, check, task()).await;
    for replica in replicas {
        replica.stop().await;
    }
}

/// What a replica that has ended said of its calls holds nobody up for long.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_to_a_replica_that_has_ended_goes_to_who_is_next() {
    let database = testing::databases::postgres().await;
    let [one, other] = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let _gateway = with_slots(&other, "one", 1).await;
    let held = place(&other, task()).await.expect("granted");
    let mut placements = one.placements();
    let lost = async { placements.place(waiting(task())).await };
    let ends = async {
        so_many_wait(&other, 1).await;
        let next = place(&other, waiting(task()));
        let gives_back = async {
            so_many_wait(&other, 2).await;
            one.stop().await;
            release(&other, &held.lease_token).await;
        };
        futures::join!(next, gives_back).0.expect("granted")
    };
    let (lost, _) = futures::join!(lost, ends);
    lost.expect_err("nobody answers it");
    until("nobody waits", async || (demand(&other).await.waiting == 0).then_some(())).await;
    other.stop().await;
}

/// One asks for much at one replica, by a call; others for little at the other.
#[tokio::test(flavor = "multi_thread")]
async fn what_one_replica_keeps_free_the_other_gives_to_nobody() {
    let database = testing::databases::postgres().await;
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let (one, other) = (Running::start(aging.clone()).await, Running::start(aging).await);
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { memory_bytes: 100, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&other, hello).await.expect("welcome");
    let asking = |memory_bytes: u64| Some(pb::ResourceRequests { memory_bytes, ..Default::default() });
    let first = other.submit(pb::WorkloadSpec { requests: asking(60), ..spec() }).await.expect("accepted");
    let (_, run) = gateway.run(first).await;
    let large = async {
        let large = pb::PlaceRequest { requests: asking(100), ..waiting(task()) };
        place(&one, large).await.expect("granted")
    };
    let small = async {
        so_many_wait(&one, 1).await;
        until("the other knows", async || {
            let explained = explain_spec(&other, pb::WorkloadSpec { requests: asking(1), ..spec() }).await;
            (explained.verdict() == pb::Verdict::NotNow).then_some(())
        })
        .await;
        let small = other.submit(pb::WorkloadSpec { requests: asking(1), ..spec() }).await.expect("accepted");
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

/// At one replica slots go on to who waits in the moment in which they are given back, so no look of the other finds one free.
#[tokio::test(flavor = "multi_thread")]
async fn how_long_slots_are_held_is_seen_at_each_replica() {
    let database = testing::databases::postgres().await;
    let [one, other] = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let _gateway = with_slots(&one, "one", 1).await;
    let mut held = place(&one, task()).await.expect("granted");
    let explained = explain_spec(&other, spec()).await;
    assert_eq!(explained.expected_wait, None, "{explained:?}");
    for _ in 0..3 {
        let waits = async { place(&one, waiting(task())).await.expect("granted") };
        let gives_back = async {
            so_many_wait(&one, 1).await;
            release(&one, &held.lease_token).await;
        };
        held = futures::join!(waits, gives_back).0;
    }
    until("it is known", async || explain_spec(&other, spec()).await.expected_wait).await;
    one.stop().await;
    other.stop().await;
}

/// Each replica is told half of them, and hears of what the other grants only afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_is_spread_over_all_workers() {
    let database = testing::databases::postgres().await;
    let replicas = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    let mut gateways = Vec::new();
    for number in 0..20 {
        let mut roomy = hello(&format!("worker-{number}"));
        roomy.capacity = Some(pb::Capacity { max_tasks: 100, ..pb::Capacity::default() });
        gateways.push(Gateway::connect(&replicas[number % 2], roomy).await.expect("welcome"));
    }
    for replica in &replicas {
        until("it knows all of them", async || {
            let subject = Some(pb::explain_request::Subject::Spec(spec()));
            let request = pb::ExplainRequest { subject, ..pb::ExplainRequest::default() };
            let explained = replica.placements().explain(request).await.expect("explained").into_inner();
            (explained.workers.len() == 20).then_some(())
        })
        .await;
    }
    let submitted = (0..1000).map(|number| replicas[number % 2].submit(spec()));
    for submitted in futures::future::join_all(submitted).await {
        submitted.expect("accepted");
    }
    let mut load = Vec::new();
    for number in 0..20 {
        load.push(replicas[0].worker(&format!("worker-{number}")).await.active_tasks);
    }
    assert_eq!(load.iter().sum::<u32>(), 1000, "there is room for all: {load:?}");
    let (least, most) = (load.iter().min().expect("some"), load.iter().max().expect("some"));
    assert!(*most * 10 <= *least * 15, "{load:?}");
    for replica in replicas {
        replica.stop().await;
    }
}
