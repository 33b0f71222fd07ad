//! Tests of the queue: order, team shares, reservations and queue limits.

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
use crate::places::{place, wait_for_waiting_requests, waiting};
use crate::support::{Gateway, Running, config, finish, registration, spec, until};

async fn with_one_slot(scheduler: &Running) -> Gateway {
    let mut registration = registration("one");
    registration.capacity =
        Some(pb::Capacity { max_tasks: 1, memory_bytes: 100, cpu_millis: 2000, ..pb::Capacity::default() });
    Gateway::connect(scheduler, registration).await.expect("welcome")
}

/// Submits the specs while the only slot is used. Then the slot is released repeatedly. Returns the
/// indexes of the specs in the order of their runs.
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

pub(crate) async fn higher_priority_is_placed_first(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let with = |priority: i32| pb::WorkloadSpec { priority, ..spec() };
    let order = order(&scheduler, vec![with(0), with(-5), with(7), with(0), with(7)]).await;
    assert_eq!(order, [2, 4, 0, 3, 1]);
    let refused = scheduler.submit(with(101)).await.expect_err("refused");
    assert!(refused.is(Reason::InvalidField) && refused.message.contains("spec.priority"));
    scheduler.stop().await;
}

/// With one slot, no team uses a slot when the slot becomes free. The queue order then decides.
pub(crate) async fn longer_queue_gives_team_no_precedence(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let of = |team: &str| pb::WorkloadSpec { team: team.to_owned(), ..spec() };
    // One team uses both slots. The same team has more waiting workloads, which are also older.
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
    // Another team uses all slots. Two teams queue more workloads than there are slots. The team
    // with the lower weight submits first.
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
    // Slots are released one by one and in batches.
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

pub(crate) async fn requested_resources_are_reserved(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { memory_bytes: 100, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let requesting = |memory_bytes: u64| {
        let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
        pb::WorkloadSpec { requests, ..spec() }
    };
    let never = scheduler.submit(requesting(101)).await.expect_err("refused");
    assert!(never.is(Reason::NoCompatibleWorker), "{never:?}");
    let first = scheduler.submit(requesting(60)).await.expect("accepted");
    let (_, run) = gateway.run(first).await;
    let second = scheduler.submit(requesting(60)).await.expect("accepted");
    let waiting = scheduler.get(second).await;
    assert_eq!(waiting.state(), pb::WorkloadState::Pending);
    assert_eq!(
        waiting.waiting_for,
        ["one: has 40 bytes of memory left, but 60 bytes of memory is requested"]
    );
    // A smaller request is placed while the larger one waits.
    let small = scheduler.submit(requesting(40)).await.expect("accepted");
    gateway.run(small).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run(second).await;
    scheduler.stop().await;
}

fn of_memory(memory_bytes: u64) -> pb::WorkloadSpec {
    let requests = Some(pb::ResourceRequests { memory_bytes, ..pb::ResourceRequests::default() });
    pb::WorkloadSpec { requests, ..spec() }
}

/// Waits until `id` reports that a worker is reserved.
async fn wait_for_reservation(scheduler: &Running, id: WorkloadId) {
    until("the reason of the wait", async || {
        let reasons = scheduler.get(id).await.waiting_for;
        reasons.iter().any(|line| line.contains("is reserved for a large request")).then_some(())
    })
    .await;
}

/// Returns whether the worker `one` is reported as reserved.
async fn is_reserved(scheduler: &Running) -> bool {
    scheduler.worker("one").await.refusals.iter().any(|refusal| refusal.reason == "RESERVED")
}

pub(crate) async fn worker_is_reserved_for_long_waiting_workload(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let mut seen = HashSet::new();
    let mut runs = Vec::new();
    for _ in 0..2 {
        let small = scheduler.submit(of_memory(50)).await.expect("accepted");
        seen.insert(small.to_string());
        runs.push(gateway.run(small).await.1);
    }
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    // Smaller workloads would otherwise take each half as soon as the half is free.
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    wait_for_reservation(&scheduler, small).await;
    let explained = explain(&scheduler, crate::explain::waiting("main", large)).await.expect("explained");
    assert!(
        explained.summary.ends_with("; one is reserved until it has room for the request"),
        "{explained:?}"
    );
    let explained = explain_spec(&scheduler, of_memory(1)).await;
    assert_eq!(explained.verdict(), pb::Verdict::NotNow);
    assert!(
        explained.unblocked_by[0].contains("the request that it is reserved for is placed"),
        "{:?}",
        explained.unblocked_by
    );
    until("the reservation is reported", async || is_reserved(&scheduler).await.then_some(())).await;
    let demand =
        scheduler.placements().get_demand(pb::GetDemandRequest::default()).await.expect("a response");
    let demand = demand.into_inner();
    assert!(demand.removable.is_empty() && demand.supply[0].slots_free == 0, "{demand:?}");
    assert!(demand.demand.iter().any(|shape| shape.waits_for == "RESERVED"), "{demand:?}");

    for run in runs {
        finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    }
    let run = gateway.run_other_than(&seen).await;
    assert_eq!(run.workload_id, large.to_string(), "the large request was placed first");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    gateway.run(small).await;
    until("the reservation has ended", async || (!is_reserved(&scheduler).await).then_some(())).await;
    scheduler.stop().await;
}

pub(crate) async fn earlier_request_uses_reserved_worker(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let first = scheduler.submit(of_memory(60)).await.expect("accepted");
    gateway.run(first).await;
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    wait_for_reservation(&scheduler, small).await;
    let urgent =
        scheduler.submit(pb::WorkloadSpec { priority: 100, ..of_memory(10) }).await.expect("accepted");
    gateway.run(urgent).await;
    // Neither the urgent workload nor the large one waits any longer, so the reservation ends.
    scheduler.cancel(large, Duration::ZERO).await;
    scheduler.cancel(small, Duration::ZERO).await;
    let other = scheduler.submit(of_memory(30)).await.expect("accepted");
    gateway.run(other).await;
    scheduler.stop().await;
}

pub(crate) async fn unplaceable_workload_reserves_no_worker(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { memory_bytes: 100, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    let first = scheduler.submit(of_memory(60)).await.expect("accepted");
    gateway.run(first).await;
    let large = scheduler.submit(of_memory(100)).await.expect("accepted");
    let small = scheduler.submit(of_memory(50)).await.expect("accepted");
    wait_for_reservation(&scheduler, small).await;
    // The worker returns with less memory than requested and with the same number of slots.
    registration.session_credential = gateway.welcome.session_credential.clone();
    registration.capacity = Some(pb::Capacity { memory_bytes: 90, max_tasks: 3, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let other = scheduler.submit(of_memory(30)).await.expect("accepted");
    gateway.run(other).await;
    until("the reservation has ended", async || (!is_reserved(&scheduler).await).then_some(())).await;
    assert_eq!(scheduler.get(large).await.state(), pb::WorkloadState::Pending);
    scheduler.stop().await;
}

pub(crate) async fn worker_is_reserved_for_long_waiting_group(database: TestDatabase) {
    let aging = scheduler::Config { queue_aging: Duration::from_millis(400), ..config(&database) };
    let scheduler = Running::start(aging).await;
    let mut registration = registration("one");
    registration.capacity = Some(pb::Capacity { max_tasks: 2, ..pb::Capacity::default() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    let mut runs = Vec::new();
    for _ in 0..2 {
        let id = scheduler.submit(spec()).await.expect("accepted");
        runs.push(gateway.run(id).await.1);
    }
    let both = [waiting(task()), waiting(task())];
    let group = async { granted(&place_many(&scheduler, grouped(both, 1)).await) };
    let others = async {
        wait_for_waiting_requests(&scheduler, 1).await;
        let other = scheduler.submit(spec()).await.expect("accepted");
        wait_for_reservation(&scheduler, other).await;
        for run in runs {
            finish(&scheduler, &run.lease_token, 0).await.expect("finished");
        }
        other
    };
    let (granted, other) = futures::join!(group, others);
    assert_eq!(granted.len(), 2, "the large request was placed first");
    assert_eq!(scheduler.get(other).await.state(), pb::WorkloadState::Pending);
    let lease_tokens = granted.into_iter().map(|placed| placed.lease_token).collect();
    scheduler.placements().release_many(pb::ReleaseManyRequest { lease_tokens }).await.expect("released");
    gateway.run(other).await;
    scheduler.stop().await;
}

pub(crate) async fn unreadable_workload_does_not_block_queue(database: TestDatabase) {
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
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (_, run) = gateway.run(other).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(other).await.outcome(), pb::Outcome::Succeeded);
    let cancelled =
        pb::CancelRequest { team: "main".to_owned(), workload_id: broken.to_string(), grace: None };
    scheduler.workloads().cancel(cancelled).await.expect("cancelled");
    scheduler.stop().await;
}

pub(crate) async fn team_with_full_queue_is_rejected(database: TestDatabase) {
    let limits = Config { max_waiting_per_team: 3, max_waiting_bytes_per_team: 2000, ..config(&database) };
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
    until("the workload has left the queue", async || scheduler.submit(spec()).await.ok()).await;
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

    // A replica reads the queue when it starts.
    let other = Running::start(limits).await;
    until("the replica has read the queue", async || {
        let refused = other.submit(spec()).await.err()?;
        refused.is(Reason::TeamQueueFull).then_some(())
    })
    .await;
    let before = count_admitted(&other).await;
    assert_eq!(before, 0, "none is admitted");
    other.stop().await;

    scheduler.stop().await;
}

/// Returns how many of several concurrent submissions are accepted.
async fn count_admitted(scheduler: &Running) -> usize {
    let submitted = futures::future::join_all((0..8).map(|_| scheduler.submit(spec()))).await;
    submitted.into_iter().filter(Result::is_ok).count()
}
