//! Whose turn it is, of those that wait.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use domain::WorkloadId;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use sea_orm::ConnectionTrait;
use testing::databases::TestDatabase;

use crate::explain::{explain, explain_spec};
use crate::leases::{granted, grouped, place_many, task, with_slots};
use crate::places::{place, so_many_wait, waiting};
use crate::support::{Gateway, Running, config, finish, hello, spec, until};

async fn with_one_slot(scheduler: &Running) -> Gateway {
    let mut hello = hello("one");
    hello.capacity =
        Some(pb::Capacity { max_tasks: 1, memory_bytes: 100, cpu_millis: 2000, ..pb::Capacity::default() });
    Gateway::connect(scheduler, hello).await.expect("welcome")
}

/// Submits while the only slot is taken, then frees it again and again, and answers in which order they ran: their numbers.
async fn order(scheduler: &Running, specs: Vec<pb::WorkloadSpec>) -> Vec<usize> {
    let mut gateway = with_one_slot(scheduler).await;
    let first = scheduler.submit(spec()).await.expect("accepted");
    let (_, mut run) = gateway.run(first).await;
    let mut numbers = HashMap::new();
    for (number, spec) in specs.into_iter().enumerate() {
        let id = scheduler.submit(spec).await.expect("accepted");
        numbers.insert(id.to_string(), number);
    }
    let (mut seen, mut order) = (HashSet::from([run.workload_id.clone()]), Vec::new());
    while order.len() < numbers.len() {
        finish(scheduler, &run.lease_token, 0).await.expect("finished");
        run = gateway.run_other_than(&seen).await;
        seen.insert(run.workload_id.clone());
        order.push(numbers[&run.workload_id]);
    }
    order
}

pub(crate) async fn a_higher_priority_is_placed_first(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let with = |priority: i32| pb::WorkloadSpec { priority, ..spec() };
    let order = order(&scheduler, vec![with(0), with(-5), with(7), with(0), with(7)]).await;
    assert_eq!(order, [2, 4, 0, 3, 1]);
    let refused = scheduler.submit(with(101)).await.expect_err("refused");
    assert!(refused.is(Reason::InvalidField) && refused.message.contains("spec.priority"));
    scheduler.stop().await;
}

/// With one slot nobody holds one when it is free: who came first is first, and no team is passed over.
pub(crate) async fn a_team_with_more_that_waits_is_not_before_others(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let of = |team: &str| pb::WorkloadSpec { team: team.to_owned(), ..spec() };
    // Two slots: both are taken by one team, which has more that waits than the other, and had it before.
    let mut runs = Vec::new();
    for _ in 0..2 {
        let id = scheduler.submit(of("many")).await.expect("accepted");
        runs.push(gateway.run(id).await.1);
    }
    for _ in 0..5 {
        scheduler.submit(of("many")).await.expect("accepted");
    }
    let few = scheduler.submit(of("few")).await.expect("accepted");
    let freed = runs.pop().expect("two run");
    finish(&scheduler, &freed.lease_token, 0).await.expect("finished");
    let (_, run) = gateway.run(few).await;
    assert_eq!(run.workload_id, few.to_string());
    scheduler.stop().await;
}

pub(crate) async fn teams_share_slots_by_their_weights(database: TestDatabase) {
    let team_weights = HashMap::from([("heavy".to_owned(), 3)]);
    let scheduler = Running::start(scheduler::Config { team_weights, ..config(&database) }).await;
    let mut gateway = with_slots(&scheduler, "one", 12).await;
    // While another team has all slots, each of two comes to have more that waits than there are; the one with less weight is first.
    let mut held = Vec::new();
    for _ in 0..12 {
        held.push(place(&scheduler, task()).await.expect("granted").lease_token);
    }
    let mut teams = HashMap::new();
    for team in ["light", "heavy"] {
        for _ in 0..13 {
            let spec = pb::WorkloadSpec { team: team.to_owned(), ..spec() };
            teams.insert(scheduler.submit(spec).await.expect("accepted").to_string(), team);
        }
    }
    // Slots come free one by one, and some at once.
    let (mut seen, mut heavy) = (HashSet::new(), 0);
    for freed in [1, 1, 1, 1, 4, 4] {
        let lease_tokens = held.split_off(held.len() - freed);
        let release = pb::ReleaseManyRequest { lease_tokens };
        scheduler.placements().release_many(release).await.expect("released");
        for _ in 0..freed {
            let run = gateway.run_other_than(&seen).await;
            heavy += usize::from(teams[&run.workload_id] == "heavy");
            seen.insert(run.workload_id);
        }
        if seen.len() % 4 == 0 {
            assert_eq!(heavy, seen.len() / 4 * 3, "of {} slots", seen.len());
        }
    }
    assert_eq!(held, [""; 0]);
    scheduler.stop().await;
}

pub(crate) async fn what_a_workload_asks_for_is_kept_free(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { memory_bytes: 100, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let asking = |memory_bytes: u64| {
        let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
        pb::WorkloadSpec { requests, ..spec() }
    };
    let never = scheduler.submit(asking(101)).await.expect_err("refused");
    assert!(never.is(Reason::NoCompatibleWorker), "{never:?}");
    let first = scheduler.submit(asking(60)).await.expect("accepted");
    let (_, run) = gateway.run(first).await;
    let second = scheduler.submit(asking(60)).await.expect("accepted");
    let waiting = scheduler.get(second).await;
    assert_eq!(waiting.state(), pb::WorkloadState::Pending);
    assert_eq!(
        waiting.waiting_for,
        ["one: has 40 bytes of memory left, and 60 bytes of memory is asked for"]
    );
    // Less is there, and who asks for less is not held up.
    let small = scheduler.submit(asking(40)).await.expect("accepted");
    gateway.run(small).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run(second).await;
    scheduler.stop().await;
}

fn of_memory(memory_bytes: u64) -> pb::WorkloadSpec {
    let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
    pb::WorkloadSpec { requests, ..spec() }
}

/// Waits until `id` is told that a worker is reserved for another.
async fn is_told_that_it_is_kept_free(scheduler: &Running, id: WorkloadId) {
    until("it is told why it waits", async || {
        let told = scheduler.get(id).await.waiting_for;
        told.iter().any(|line| line.contains("is reserved for another")).then_some(())
    })
    .await;
}

/// Whether all are told that the worker `one` is reserved.
async fn is_reserved(scheduler: &Running) -> bool {
    scheduler.worker("one").await.refusals.iter().any(|refusal| refusal.reason == "RESERVED")
}

pub(crate) async fn a_worker_is_kept_free_for_one_that_waits_long_for_much(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let mut seen = HashSet::new();
    let mut runs = Vec::new();
    for _ in 0..2 {
        let small = scheduler.submit(of_memory(50)).await.expect("accepted");
        seen.insert(small.to_string());
        runs.push(gateway.run(small).await.1);
    }
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    // Others would take each half as it comes free.
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    is_told_that_it_is_kept_free(&scheduler, small).await;
    let explained = explain(&scheduler, crate::explain::waiting("main", large)).await.expect("explained");
    assert!(
        explained.summary.ends_with("; one takes nothing else until it has room for it"),
        "{explained:?}"
    );
    let explained = explain_spec(&scheduler, of_memory(1)).await;
    assert_eq!(explained.verdict(), pb::Verdict::NotNow);
    assert!(
        explained.unblocked_by[0].contains("the one that it is reserved for is placed"),
        "{:?}",
        explained.unblocked_by
    );
    until("everyone is told", async || is_reserved(&scheduler).await.then_some(())).await;
    let demand = scheduler.placements().get_demand(pb::GetDemandRequest::default()).await.expect("told");
    let demand = demand.into_inner();
    assert!(demand.removable.is_empty() && demand.supply[0].slots_free == 0, "{demand:?}");
    assert!(demand.demand.iter().any(|shape| shape.waits_for == "RESERVED"), "{demand:?}");

    for run in runs {
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    }
    let run = gateway.run_other_than(&seen).await;
    assert_eq!(run.workload_id, large.to_string(), "it was not passed over");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run(small).await;
    until("it is reserved no more", async || (!is_reserved(&scheduler).await).then_some(())).await;
    scheduler.stop().await;
}

pub(crate) async fn whoever_is_before_another_takes_what_is_kept_free_for_it(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let first = scheduler.submit(of_memory(60)).await.expect("accepted");
    gateway.run(first).await;
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    is_told_that_it_is_kept_free(&scheduler, small).await;
    let urgent =
        scheduler.submit(pb::WorkloadSpec { priority: 100, ..of_memory(10) }).await.expect("accepted");
    gateway.run(urgent).await;
    // Nobody waits for it any more: neither who was before the other, nor the other, for which it is reserved then.
    scheduler.cancel(large, Duration::ZERO).await;
    scheduler.cancel(small, Duration::ZERO).await;
    let other = scheduler.submit(of_memory(30)).await.expect("accepted");
    gateway.run(other).await;
    scheduler.stop().await;
}

pub(crate) async fn nothing_is_kept_free_for_one_that_no_worker_could_take_any_more(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello.clone()).await.expect("welcome");
    let first = scheduler.submit(of_memory(60)).await.expect("accepted");
    gateway.run(first).await;
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    is_told_that_it_is_kept_free(&scheduler, small).await;
    // The worker comes back with less than is asked for, and as much room for others as before.
    hello.session_credential = gateway.welcome.session_credential.clone();
    hello.capacity = Some(pb::Capacity { memory_bytes: 90, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let other = scheduler.submit(of_memory(30)).await.expect("accepted");
    gateway.run(other).await;
    until("it is reserved no more", async || (!is_reserved(&scheduler).await).then_some(())).await;
    assert_eq!(scheduler.get(large).await.state(), pb::WorkloadState::Pending);
    scheduler.stop().await;
}

pub(crate) async fn a_worker_is_kept_free_for_a_group_that_waits_long(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut hello = hello("one");
    hello.capacity = Some(pb::Capacity { max_tasks: 2, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    let mut runs = Vec::new();
    for _ in 0..2 {
        let id = scheduler.submit(spec()).await.expect("accepted");
        runs.push(gateway.run(id).await.1);
    }
    let both = [waiting(task()), waiting(task())];
    let group = async { granted(&place_many(&scheduler, grouped(both, 1)).await) };
    let others = async {
        so_many_wait(&scheduler, 1).await;
        let other = scheduler.submit(spec()).await.expect("accepted");
        is_told_that_it_is_kept_free(&scheduler, other).await;
        for run in runs {
            finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        }
        other
    };
    let (granted, other) = futures::join!(group, others);
    assert_eq!(granted.len(), 2, "it was not passed over");
    assert_eq!(scheduler.get(other).await.state(), pb::WorkloadState::Pending);
    let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
    scheduler.placements().release_many(pb::ReleaseManyRequest { lease_tokens }).await.expect("released");
    gateway.run(other).await;
    scheduler.stop().await;
}

pub(crate) async fn one_that_cannot_be_read_keeps_nobody_from_a_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let broken = scheduler.submit(spec()).await.expect("queued");
    let other = scheduler.submit(spec()).await.expect("queued");
    scheduler.stop().await;
    let connection = sea_orm::Database::connect(&database.url).await.expect("the database");
    let damaged = "UPDATE workloads SET locations = 'no JSON' WHERE sequence = (SELECT sequence FROM workloads ORDER BY sequence LIMIT 1)";
    let damaged = connection.execute_unprepared(damaged).await.expect("damaged");
    assert_eq!(damaged.rows_affected(), 1);
    connection.close().await.expect("closed");

    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let (_, run) = gateway.run(other).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(other).await.outcome(), pb::Outcome::Succeeded);
    let cancelled =
        pb::CancelRequest { team: "main".to_owned(), workload_id: broken.to_string(), grace: None };
    scheduler.workloads().cancel(cancelled).await.expect("it can be ended");
    scheduler.stop().await;
}

pub(crate) async fn team_with_a_full_queue_is_refused_until_something_is_placed(database: TestDatabase) {
    let limits = Config { most_waiting: 3, most_waiting_bytes: 2000, ..config(&database) };
    let scheduler = Running::start(limits.clone()).await;
    let mut gateway = with_one_slot(&scheduler).await;
    let first = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(first).await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(scheduler.submit(spec()).await.expect("there is room"));
    }
    let full = scheduler.submit(spec()).await.expect_err("three wait");
    assert!(full.is(Reason::TeamQueueFull), "{full}");
    assert_eq!(full.about.get("team").map(String::as_str), Some("main"));
    scheduler.submit_as(waiting[0], spec()).await.expect("a repeat");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run_other_than(&HashSet::from([run.workload_id.clone()])).await;
    until("it has left the queue", async || scheduler.submit(spec()).await.ok()).await;
    let full = scheduler.submit(spec()).await.expect_err("three wait again");
    assert!(full.is(Reason::TeamQueueFull), "{full}");

    let of_other = |bytes: usize| pb::WorkloadSpec {
        team: "other".to_owned(),
        command: vec!["true".into(), vec![b'x'; bytes].into()],
        ..spec()
    };
    scheduler.submit(of_other(1500)).await.expect("another team");
    let full = scheduler.submit(of_other(1000)).await.expect_err("too many bytes");
    assert!(full.is(Reason::TeamQueueFull), "{full}");

    // A replica that starts knows what waits.
    let other = Running::start(limits).await;
    until("it has read the queue", async || {
        let refused = other.submit(spec()).await.err()?;
        refused.is(Reason::TeamQueueFull).then_some(())
    })
    .await;
    let before = many_at_once(&other).await;
    assert_eq!(before, 0, "none is admitted");
    other.stop().await;

    scheduler.stop().await;
}

/// How many of some submissions at once are accepted.
async fn many_at_once(scheduler: &Running) -> usize {
    let submitted = futures::future::join_all((0..8).map(|_| scheduler.submit(spec()))).await;
    submitted.into_iter().filter(Result::is_ok).count()
}
