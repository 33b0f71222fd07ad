//! Two replicas beside each other on one PostgreSQL.

use std::time::Duration;

use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::support::{Gateway, Running, config, finish, hello, spec};

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
