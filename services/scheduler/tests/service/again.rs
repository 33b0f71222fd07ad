//! Tests of start timeouts, retries and the reported usage of attempts.

use std::collections::HashSet;
use std::time::Duration;

use domain::MarkerId;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::watch_response::Event;
use rpc::{Reason, Refusal};
use scheduler::Config;
use testing::databases::TestDatabase;

use crate::support::{Gateway, Running, config, finish, registration, spec, start};

const SHORT: Duration = Duration::from_millis(50);

/// Reports that an attempt ended without a process.
async fn fail(scheduler: &Running, token: &str, reason: &str) {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        failure: Some(pb::Failure { reason: reason.to_owned(), message: "no".to_owned() }),
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await.expect("accepted");
}

fn reason(failure: Option<pb::Failure>) -> String {
    failure.map(|failure| failure.reason).unwrap_or_default()
}

/// Reconnects the worker with a new incarnation.
async fn reincarnate(
    scheduler: &Running,
    gateway: Gateway,
    mut registration: pb::Registration,
) -> (Gateway, pb::Registration) {
    registration.session_credential = gateway.welcome.session_credential.clone();
    registration.marker =
        Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() });
    gateway.leave().await;
    let gateway = Gateway::connect(scheduler, registration.clone()).await.expect("welcome");
    (gateway, registration)
}

pub(crate) async fn workload_is_retried_after_start_timeout(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let late = |retries| pb::WorkloadSpec { start_timeout: Some(rpc::duration(SHORT)), retries, ..spec() };
    let mut first = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");

    let id = scheduler.submit(late(0)).await.expect("accepted");
    let (_, stop) = first.stop(id).await;
    assert_eq!(stop.reason(), pb::StopReason::StartTimeout);
    let refused = start(&scheduler, &stop.lease_token).await.expect_err("the start timeout has expired");
    assert!(refused.is(Reason::LeaseLost), "{refused}");
    assert_eq!(
        scheduler.worker("one").await.active_tasks,
        1,
        "the attempt uses its slot until its gateway reports the end"
    );
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    let finished = scheduler.finished(id).await;
    assert_eq!((finished.outcome(), &*reason(finished.failure)), (pb::Outcome::Errored, "START_TIMEOUT"));
    let usage = finished.usage.expect("the workload was placed");
    assert!(usage.queued.is_some() && usage.preparing.is_none() && usage.running.is_none(), "{usage:?}");

    // The same worker is used when no other worker exists.
    let id = scheduler.submit(late(1)).await.expect("accepted");
    let (before, stop) = first.stop(id).await;
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    first
        .desires("another attempt to end", |lease| {
            (lease.lease_id != before && matches!(lease.action, Some(pb::desired_lease::Action::Stop(_))))
                .then_some(())
        })
        .await;
    let (_, stop) = first.stop(id).await;
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    let finished = scheduler.finished(id).await;
    assert_eq!(reason(finished.failure), "START_TIMEOUT");
    assert_eq!(scheduler.get(id).await.retried, 1);

    // Another worker is preferred when one exists.
    let id = scheduler.submit(late(1)).await.expect("accepted");
    let (_, stop) = first.stop(id).await;
    let mut second = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    let (_, stop) = second.stop(id).await;
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    assert_eq!(reason(scheduler.finished(id).await.failure), "START_TIMEOUT");
    scheduler.stop().await;
}

pub(crate) async fn started_workload_outlives_its_start_timeout(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let in_time = pb::WorkloadSpec { start_timeout: Some(rpc::duration(Duration::from_secs(2))), ..spec() };
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let started = scheduler.submit(in_time.clone()).await.expect("accepted");
    let (_, run) = gateway.run(started).await;
    start(&scheduler, &run.lease_token).await.expect("in time");
    // The start timeout of a later workload expires.
    let late = scheduler.submit(in_time).await.expect("accepted");
    let (_, stop) = gateway.stop(late).await;
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    assert_eq!(reason(scheduler.finished(late).await.failure), "START_TIMEOUT");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(started).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

/// The test covers a workload that is placed immediately and a workload that has waited.
pub(crate) async fn start_timeouts_are_checked_between_polls(database: TestDatabase) {
    let rarely = Config { poll: Duration::from_secs(600), ..config(&database) };
    let scheduler = Running::start(rarely).await;
    let late = pb::WorkloadSpec { start_timeout: Some(rpc::duration(SHORT)), ..spec() };
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(late.clone()).await.expect("placed");
    let (_, stop) = gateway.stop(id).await;
    let other = scheduler.submit(spec()).await.expect("placed");
    let (_, run) = gateway.run(other).await;
    let waiting = scheduler.submit(late).await.expect("queued");
    assert_eq!(scheduler.get(waiting).await.state(), pb::WorkloadState::Pending);
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(gateway.stop(waiting).await.1.reason(), pb::StopReason::StartTimeout);
    fail(&scheduler, &stop.lease_token, "START_TIMEOUT").await;
    scheduler.stop().await;
}

pub(crate) async fn lost_workload_is_retried_within_its_limit(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let registration = registration("one");
    let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    let queue_timeout = Duration::from_secs(4);
    let again = pb::WorkloadSpec { retries: 1, queue_timeout: Some(rpc::duration(queue_timeout)), ..spec() };
    let (once, twice) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(again.clone()).await.expect("accepted"),
    );
    for id in [once, twice] {
        let (_, run) = gateway.run(id).await;
        start(&scheduler, &run.lease_token).await.expect("started");
    }
    let (mut gateway, registration) = reincarnate(&scheduler, gateway, registration).await;
    assert_eq!(reason(scheduler.finished(once).await.failure), "WORKER_LOST");
    let (_, run) = gateway.run(twice).await;
    assert_eq!(scheduler.get(twice).await.retried, 1);
    start(&scheduler, &run.lease_token).await.expect("started once more");
    let (mut gateway, registration) = reincarnate(&scheduler, gateway, registration).await;
    let finished = scheduler.finished(twice).await;
    assert_eq!((finished.outcome(), &*reason(finished.failure)), (pb::Outcome::Errored, "WORKER_LOST"));

    // A process that exits with an error is not retried. A cancelled workload is not retried
    // either.
    let fails = scheduler.submit(again.clone()).await.expect("accepted");
    let (_, run) = gateway.run(fails).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    finish(&scheduler, &run.lease_token, 3).await.expect("finished");
    assert_eq!(scheduler.finished(fails).await.outcome(), pb::Outcome::Failed);
    let cancelled = scheduler.submit(again.clone()).await.expect("accepted");
    let (_, run) = gateway.run(cancelled).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    scheduler.cancel(cancelled, Duration::ZERO).await;

    // The queue timeout of a retry starts again, regardless of how long the first attempt ran.
    let ran = scheduler.submit(again.clone()).await.expect("accepted");
    let (_, run) = gateway.run(ran).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    scheduler.cordon("one", None).await.expect("cordoned");
    let waiting = scheduler.submit(again).await.expect("queued");
    assert_eq!(reason(scheduler.finished(waiting).await.failure), "QUEUE_TIMEOUT");
    let (_gateway, _) = reincarnate(&scheduler, gateway, registration).await;
    assert_eq!(scheduler.finished(cancelled).await.outcome(), pb::Outcome::Aborted);
    let events = scheduler.watch(ran, 0).await;
    let at = |event: &pb::WatchResponse| rpc::from_timestamp(&event.at.expect("an instant"));
    let queued = events.iter().find(|event| matches!(event.event, Some(Event::Queued(_)))).expect("queued");
    let ended = events.last().expect("an end");
    let Some(Event::Finished(finished)) = &ended.event else { panic!("{ended:?}") };
    assert_eq!(reason(finished.failure.clone()), "QUEUE_TIMEOUT");
    assert!(at(ended).since(at(queued)) >= queue_timeout, "{events:?}");
    assert_eq!(finished.usage, None, "the workload ended while it waited");
    scheduler.stop().await;
}

/// Waits until `gateway` has to run an attempt that is not in `attempts`.
async fn another(gateway: &mut Gateway, attempts: &HashSet<String>) -> pb::RunAttempt {
    gateway
        .desires("another attempt", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Run(run)) if !attempts.contains(&run.attempt_id) => {
                Some(run.clone())
            }
            _ => None,
        })
        .await
}

pub(crate) async fn full_worker_is_tried_again_without_failure(database: TestDatabase) {
    // One failure of the worker would suffice for a quarantine.
    let scheduler = Running::start(Config { quarantine_after: 1, ..config(&database) }).await;
    let mut first = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let mut attempts = HashSet::new();
    // No other worker exists. The worker reports that it is full more often than a failure is
    // tolerated.
    for _ in 0..12 {
        let run = another(&mut first, &attempts).await;
        attempts.insert(run.attempt_id.clone());
        fail(&scheduler, &run.lease_token, "WORKER_FULL").await;
    }
    let worker = scheduler.worker("one").await;
    assert_eq!((worker.failures, worker.quarantined_until), (0, None));

    // Another worker is tried before the first one is tried again.
    let run = another(&mut first, &attempts).await;
    attempts.insert(run.attempt_id.clone());
    let mut second = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    fail(&scheduler, &run.lease_token, "WORKER_FULL").await;
    let (_, run) = second.run(id).await;
    fail(&scheduler, &run.lease_token, "WORKER_FULL").await;
    attempts.insert(run.attempt_id);
    // After a failure of one worker, the other worker remains. The other worker may have room
    // again.
    let (found, by_first) = tokio::select! {
        run = another(&mut first, &attempts) => (run, true),
        run = another(&mut second, &attempts) => (run, false),
    };
    attempts.insert(found.attempt_id.clone());
    fail(&scheduler, &found.lease_token, "START_FAILED").await;
    let other = if by_first { &mut second } else { &mut first };
    let run = another(other, &attempts).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

pub(crate) async fn usage_of_attempt_is_stored(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let used = pb::Usage {
        running: Some(rpc::duration(Duration::from_millis(1500))),
        cpu_time: Some(rpc::duration(Duration::from_micros(7))),
        peak_memory_bytes: Some(1 << 20),
        bytes_in: Some(0),
        ..pb::Usage::default()
    };
    let mut negative = rpc::duration(Duration::ZERO);
    negative.seconds = -1;
    let mut request = pb::FinishAttemptRequest {
        lease_token: run.lease_token,
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(0)) }),
        usage: Some(pb::Usage { cpu_time: Some(negative), ..used }),
        ..pb::FinishAttemptRequest::default()
    };
    let refused = scheduler.workloads().finish_attempt(request.clone()).await.map_err(Refusal::from);
    let refused = refused.expect_err("a negative duration");
    assert!(refused.is(Reason::InvalidField) && refused.message.contains("usage.cpu_time"), "{refused}");
    request.usage = Some(used);
    scheduler.workloads().finish_attempt(request).await.expect("finished");

    let finished = scheduler.finished(id).await;
    let reported = finished.usage.expect("the usage of the attempt");
    assert!(reported.queued.is_some() && reported.preparing.is_some(), "{reported:?}");
    assert_eq!(pb::Usage { queued: None, preparing: None, ..reported }, used);
    assert_eq!(scheduler.get(id).await.usage, Some(reported));
    scheduler.stop().await;
}

pub(crate) async fn damaged_input_moves_workload_to_another_worker(database: TestDatabase) {
    let scheduler = Running::start(Config { quarantine_after: 1, ..config(&database) }).await;
    let mut first = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = first.run(id).await;
    let mut second = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    fail(&scheduler, &run.lease_token, "INPUT_DAMAGED").await;
    let worker = scheduler.worker("one").await;
    assert_eq!(
        (worker.failures, worker.quarantined_until),
        (0, None),
        "other data of the worker may be undamaged"
    );
    let (_, run) = second.run(id).await;
    // No other worker is left.
    fail(&scheduler, &run.lease_token, "INPUT_DAMAGED").await;
    assert_eq!(reason(scheduler.finished(id).await.failure), "INPUT_DAMAGED");
    scheduler.stop().await;
}
