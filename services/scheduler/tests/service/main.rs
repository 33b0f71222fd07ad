//! Tests of the scheduler over gRPC on both databases, with simulated gateways.

mod again;
mod bad_input;
mod chains;
mod connected;
mod demand;
mod driven;
mod explain;
mod gateways;
mod groups;
mod inputs;
mod leases;
mod limits;
mod lists;
mod lost;
mod metrics;
mod places;
mod registry;
mod replicas;
mod results;
mod store;
mod support;
mod terms;
mod turns;
mod watches;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use again::{
    damaged_input_moves_workload_to_another_worker, full_worker_is_tried_again_without_failure,
    lost_workload_is_retried_within_its_limit, start_timeouts_are_checked_between_polls,
    started_workload_outlives_its_start_timeout, usage_of_attempt_is_stored,
    workload_is_retried_after_start_timeout,
};
use bad_input::bad_input_is_rejected_without_changes;
use chains::strategy_chain_depends_on_kind_and_inputs;
use connected::desired_state_reaches_every_worker;
use demand::{
    demand_reports_queue_and_workers, demand_reports_replicas_lost_with_worker, large_shapes_are_omitted,
};
use domain::worker::TicketClaims;
use domain::{MarkerId, VolumeHandle, WorkloadId};
use driven::{
    containers_of_lease_are_settled_when_it_ends, cordon_stops_leases_in_use_at_deadline,
    lease_in_use_ends_when_its_gateway_reports_the_end, lease_in_use_is_stopped_when_not_renewed,
    lease_with_id_of_workload_cannot_be_used, lost_worker_keeps_slot_of_lease_in_use,
    release_seals_candidates_of_all_containers, workload_with_id_of_lease_is_rejected,
};
use explain::{
    expected_wait_follows_released_slots, explanation_groups_workers_and_limits_details,
    explanation_shows_queue_position_and_reasons, only_stated_limits_require_capabilities,
    spec_is_explained_without_side_effects,
};
use gateways::{
    dropped_call_releases_worker, gateway_that_has_ended_is_not_waited_for,
    large_specs_are_sent_in_several_messages, only_received_reports_are_acknowledged,
    silent_gateway_is_superseded, worker_has_one_gateway_at_a_time,
};
use inputs::{progress_of_inputs_is_bounded, watchers_see_progress_of_inputs};
use leases::{
    concurrent_groups_never_deadlock, driven_lease_expires_when_not_renewed, driven_lease_uses_no_slot,
    group_is_granted_as_a_whole, invalid_lease_requests_are_rejected, lease_shows_owner_expiry_and_end,
    leases_are_spread_within_slot_limits, leases_respect_preferred_and_avoided_workers,
    repeat_with_another_process_is_rejected, resources_of_leases_are_reserved,
    token_with_foreign_signature_is_rejected,
};
use limits::{reported_limits_override_defaults, worker_with_full_disk_takes_no_work};
use lists::{
    large_spec_is_abridged_once_its_workload_has_finished, leases_are_listed_until_they_end,
    lists_are_paginated, pages_of_large_workloads_are_short, workloads_are_found_by_name_and_id,
    workloads_are_listed_by_outcome,
};
use lost::{
    explanation_names_lost_and_removed_workers, lost_worker_keeps_slots_of_running_attempts,
    request_ignores_worker_lost_long_ago, request_ignores_worker_pruned_long_ago,
    request_waits_for_lost_worker, request_waits_for_pruned_worker,
};
use places::{
    artifacts_of_many_leases_are_checked, lease_pins_artifacts_until_it_ends, leases_of_owner_share_worker,
    owner_group_is_placed_on_one_worker, owner_group_waits_for_fitting_worker,
    pins_of_ended_leases_are_released_after_outage, request_waits_for_worker_that_it_names,
    requests_are_granted_by_priority_then_order, stopped_replica_leaves_no_waiting_request,
    wait_ends_by_timeout_or_dropped_call, wait_ends_when_no_worker_is_compatible,
    waiting_group_is_granted_as_a_whole, waiting_lease_id_cannot_be_reused,
    waiting_lease_request_has_queue_position,
};
use registry::{
    cordon_interrupts_work_at_deadline, cordon_waits_for_uninterruptible_work,
    ephemeral_worker_is_removed_when_lost, failing_worker_is_quarantined_and_tried_again,
    new_replica_blocks_retirement, prune_removes_unreachable_worker_with_its_attempts,
    retired_worker_is_removed_when_safe, started_process_ends_probation,
    unstartable_workload_moves_to_another_worker, watch_of_workers_misses_no_change,
    worker_cannot_change_its_team, worker_is_quarantined_for_failing_team,
    worker_with_unsupported_protocol_is_never_chosen,
};
use results::kept_result_is_returned_with_outcome;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use rpc::token::Keys;
use store::{
    Place, base_resource_type_provides_image_on_all_workers, build_ends_with_its_workload,
    cache_content_becomes_next_version, missing_outputs_fail_workload, output_is_stored_in_named_caches,
    pins_of_unknown_workloads_are_released, settlement_continues_trace_of_workload,
    unavailable_store_delays_only_the_end, unpinnable_inputs_are_rejected,
    workload_cancelled_before_pinning_never_runs,
};
use support::{Gateway, Running, config, finish, registration, spec, start, until};
use terms::{
    driven_lease_has_full_term_after_restart, restart_keeps_time_of_last_contact,
    restart_places_work_on_reconnected_workers,
};
use testing::databases::TestDatabase;
use turns::{
    earlier_request_uses_reserved_worker, higher_priority_is_placed_first,
    longer_queue_gives_team_no_precedence, requested_resources_are_reserved,
    team_with_full_queue_is_rejected, teams_share_slots_by_their_weights,
    unplaceable_workload_reserves_no_worker, unreadable_workload_does_not_block_queue,
    worker_is_reserved_for_long_waiting_group, worker_is_reserved_for_long_waiting_workload,
};
use watches::resumed_watch_neither_misses_nor_repeats_events;

/// Runs each test on both databases.
macro_rules! on_both {
    ($($test:ident,)+) => {
        mod sqlite {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(testing::databases::sqlite()).await;
            }
        )+}

        mod postgres {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(testing::databases::postgres().await).await;
            }
        )+}
    };
}

fn names(events: &[pb::WatchResponse]) -> Vec<&'static str> {
    use pb::watch_response::Event;
    events
        .iter()
        .map(|event| match event.event {
            Some(Event::Queued(_)) => "queued",
            Some(Event::Placed(_)) => "placed",
            Some(Event::Preparing(_)) => "preparing",
            Some(Event::Materializing(_)) => "materializing",
            Some(Event::Running(_)) => "running",
            Some(Event::Publishing(_)) => "publishing",
            Some(Event::Finished(_)) => "finished",
            None => "nothing",
        })
        .collect()
}

async fn workload_runs_from_submission_to_end(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    assert_eq!(gateway.welcome.protocol_version, 1);

    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    assert_eq!(run.spec.as_ref().map(|spec| spec.command.clone()), Some(spec().command));
    gateway.observe(&[(&lease, pb::LeasePhase::Preparing)]).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    start(&scheduler, &run.lease_token).await.expect("a repeat");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    let running = scheduler.wait_for(id, pb::WorkloadState::Running).await;
    let location = running.location.expect("a worker");
    assert_eq!(location.worker_name, "one");
    assert_eq!(location.attempt_id, run.attempt_id);
    assert_eq!(scheduler.worker("one").await.active_tasks, 1);

    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    finish(&scheduler, &run.lease_token, 1).await.expect("the first report counts");
    let refused = start(&scheduler, &run.lease_token).await.expect_err("the attempt has ended");
    assert!(refused.is(Reason::LeaseLost));
    let events = scheduler.watch(id, 0).await;
    assert_eq!(names(&events), ["placed", "preparing", "running", "finished"]);
    let revisions: Vec<_> = events.iter().map(|event| event.revision).collect();
    assert_eq!(revisions, [1, 2, 3, 4]);
    assert_eq!(names(&scheduler.watch(id, 2).await), ["running", "finished"]);
    assert_eq!(names(&scheduler.watch(id, 4).await), [""; 0]);
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    gateway.wait_until_idle().await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn repeated_submission_creates_one_workload(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = WorkloadId::new();
    let submissions = (0..8).map(|_| scheduler.submit_as(id, spec()));
    for submitted in futures::future::join_all(submissions).await {
        submitted.expect("a repeat gets the answer of the first call");
    }
    let (_, run) = gateway.run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    scheduler.submit_as(id, spec()).await.expect("accepted after the end of the workload");

    let other = pb::WorkloadSpec { command: vec![b"false".as_slice().into()], ..spec() };
    let refused = scheduler.submit_as(id, other).await.expect_err("another spec");
    assert!(refused.is(Reason::WorkloadExists), "{refused}");
    assert_eq!(names(&scheduler.watch(id, 0).await), ["placed", "finished"]);
    scheduler.stop().await;
}

async fn workload_waits_for_first_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let id = scheduler.submit(spec()).await.expect("queued");
    let waiting = scheduler.wait_for(id, pb::WorkloadState::Pending).await;
    assert_eq!(waiting.waiting_for, ["no worker has registered yet"]);

    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (_, run) = gateway.run(id).await;
    finish(&scheduler, &run.lease_token, 3).await.expect("finished");
    let events = scheduler.watch(id, 0).await;
    let mut names = names(&events);
    // The reasons may briefly include the worker that has connected and has not reported yet.
    names.dedup();
    assert_eq!(names, ["queued", "placed", "finished"]);
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Failed);
    assert_eq!(finished.exit.and_then(|exit| exit.status), Some(pb::exit::Status::Code(3)));
    scheduler.stop().await;
}

async fn workload_without_compatible_worker_is_rejected(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = WorkloadId::new();
    let tagged = pb::WorkloadSpec { tags: vec!["gpu".to_owned()], ..spec() };
    let refused = scheduler.submit_as(id, tagged).await.expect_err("refused");
    assert!(refused.is(Reason::NoCompatibleWorker), "{refused}");
    assert_eq!(refused.about.get("one").map(String::as_str), Some("lacks the tag gpu"));
    let request = pb::GetRequest { team: "main".to_owned(), workload_id: id.to_string() };
    let unknown = rpc::Refusal::from(scheduler.workloads().get(request).await.expect_err("unknown"));
    assert!(unknown.is(Reason::WorkloadNotFound));
    scheduler.stop().await;
}

async fn workloads_wait_when_all_slots_are_used(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    let (_, first) = gateway.run(ids[0]).await;
    let (_, second) = gateway.run(ids[1]).await;
    for waiting in &ids[2..] {
        until("the workload waits for a slot", async || {
            (scheduler.get(*waiting).await.waiting_for == ["one: is full (2 of 2 tasks)"]).then_some(())
        })
        .await;
    }
    assert_eq!(gateway.desired.leases.len(), 2);

    finish(&scheduler, &second.lease_token, 0).await.expect("finished");
    let (_, third) = gateway.run(ids[2]).await;
    assert_eq!(scheduler.get(ids[3]).await.state(), pb::WorkloadState::Pending, "the queue keeps its order");
    finish(&scheduler, &first.lease_token, 0).await.expect("finished");
    finish(&scheduler, &third.lease_token, 0).await.expect("finished");
    gateway.run(ids[3]).await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 1);
    scheduler.stop().await;
}

async fn waiting_workload_is_cancelled_immediately(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let id = scheduler.submit(spec()).await.expect("queued");
    scheduler.cancel(id, Duration::from_secs(5)).await;
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Aborted);
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("CANCELLED".to_owned()));
    scheduler.cancel(id, Duration::from_secs(5)).await;
    scheduler.stop().await;
}

async fn placed_workload_cannot_start_after_cancellation(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    scheduler.cancel(id, Duration::from_secs(5)).await;
    let (_, stop) = gateway.stop(id).await;
    assert_eq!((stop.reason(), &stop.attempt_id), (pb::StopReason::Cancelled, &run.attempt_id));
    scheduler.cancel(id, Duration::from_secs(9)).await;
    scheduler.cancel(id, Duration::from_secs(1)).await;
    gateway
        .desires("a shorter grace", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Stop(stop)) => {
                let grace = stop.grace.as_ref().map_or(0, |grace| grace.seconds);
                assert_ne!(grace, 9, "a later call cannot extend the grace period");
                (grace == 1).then_some(())
            }
            _ => None,
        })
        .await;
    let refused = start(&scheduler, &run.lease_token).await.expect_err("the attempt must stop");
    assert!(refused.is(Reason::LeaseLost), "{refused}");
    assert_eq!(
        scheduler.worker("one").await.active_tasks,
        1,
        "the attempt uses its slot until it has stopped"
    );

    finish(&scheduler, &stop.lease_token, 0).await.expect("finished");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Aborted);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn attempt_ends_without_report_if_not_started(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, _) = gateway.run(id).await;
    scheduler.cancel(id, Duration::ZERO).await;
    gateway.stop(id).await;
    gateway.observe(&[(&lease, pb::LeasePhase::Ended)]).await;
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Aborted);
    scheduler.stop().await;
}

async fn workload_ends_when_its_timeouts_expire(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let short = Some(rpc::duration(Duration::from_millis(50)));
    let queued = pb::WorkloadSpec { queue_timeout: short, ..spec() };
    let id = scheduler.submit(queued).await.expect("queued");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Errored);
    let failure = finished.failure.expect("a failure");
    assert_eq!(failure.reason, "QUEUE_TIMEOUT");
    assert_eq!(
        failure.message,
        "no worker took the workload in time; the workload waited for: no worker has registered yet"
    );

    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let running = pb::WorkloadSpec { run_timeout: short, ..spec() };
    let id = scheduler.submit(running).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let (_, stop) = gateway.stop(id).await;
    assert_eq!(stop.reason(), pb::StopReason::RunTimeout);
    finish(&scheduler, &stop.lease_token, 0).await.expect("finished");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Errored);
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("RUN_TIMEOUT".to_owned()));
    scheduler.stop().await;
}

async fn new_incarnation_ends_attempts_of_old_one(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut registration = registration("one");
    let mut gateway = Gateway::connect(&scheduler, registration.clone()).await.expect("welcome");
    let (prepared, started) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(spec()).await.expect("accepted"),
    );
    let (_, first) = gateway.run(prepared).await;
    let (_, second) = gateway.run(started).await;
    start(&scheduler, &second.lease_token).await.expect("started");
    let before = gateway.welcome.clone();
    gateway.leave().await;

    registration.session_credential = before.session_credential;
    registration.marker =
        Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() });
    let mut gateway = Gateway::connect(&scheduler, registration).await.expect("welcome");
    assert_eq!(gateway.welcome.worker_id, before.worker_id);
    assert_eq!(gateway.welcome.session, before.session, "the gateway instance is unchanged");
    assert!(gateway.welcome.incarnation > before.incarnation);

    let lost = scheduler.finished(started).await;
    assert_eq!(lost.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    let (_, again) = gateway.run(prepared).await;
    assert_ne!(again.attempt_id, first.attempt_id);
    for stale in [&first, &second] {
        let refused = finish(&scheduler, &stale.lease_token, 0).await.expect_err("the lease is lost");
        assert!(refused.is(Reason::LeaseLost), "{refused}");
    }
    finish(&scheduler, &again.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(prepared).await.outcome(), pb::Outcome::Succeeded);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn attempt_unknown_to_gateway_is_not_running(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let (prepared, started) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(spec()).await.expect("accepted"),
    );
    let generation = gateway.desired.generation;
    let (_, first) = gateway.run(prepared).await;
    let (_, second) = gateway.run(started).await;
    start(&scheduler, &second.lease_token).await.expect("started");

    // The generation precedes both leases, so their absence from the report means nothing.
    let now = std::mem::replace(&mut gateway.desired.generation, generation);
    until("the report has been stored", async || {
        gateway.observe(&[]).await;
        (scheduler.worker("one").await.containers == 3).then_some(())
    })
    .await;
    assert_eq!(scheduler.get(prepared).await.state(), pb::WorkloadState::Assigned);

    // A message may contain a lease that is one generation newer than its number. The next message
    // contains that number.
    gateway.desired.generation = now + 1;
    gateway.observe(&[]).await;
    let unknown = scheduler.finished(started).await;
    assert_eq!(unknown.failure.map(|failure| failure.reason), Some("START_UNKNOWN".to_owned()));
    let again = gateway
        .desires("a new attempt", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Run(run)) => (run.attempt_id != first.attempt_id
                && run.workload_id == prepared.to_string())
            .then(|| run.clone()),
            _ => None,
        })
        .await;
    finish(&scheduler, &again.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(prepared).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

pub(crate) fn config_with_limits(
    database: &TestDatabase,
    ttl: Duration,
    lost_after: Duration,
) -> scheduler::Config {
    scheduler::Config {
        worker_ttl: ttl,
        stop_after: ttl + Duration::from_millis(50),
        lost_after,
        ..config(database)
    }
}

async fn silent_worker_becomes_lost(database: TestDatabase) {
    let (ttl, lost_after) = (Duration::from_millis(300), Duration::from_millis(800));
    let scheduler = Running::start(config_with_limits(&database, ttl, lost_after)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;

    until("the worker is stalled", async || {
        (scheduler.worker("one").await.state() == pb::WorkerState::Stalled).then_some(())
    })
    .await;
    let waiting = scheduler.submit(spec()).await.expect("queued");
    assert_eq!(scheduler.get(waiting).await.waiting_for, ["one: is out of contact"]);
    let lost = scheduler.finished(id).await;
    assert_eq!(lost.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Lost);

    // The worker was only asleep. It receives an empty desired state and then gets new work.
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    gateway.run(waiting).await;
    assert_eq!(gateway.desired.leases.len(), 1);
    scheduler.stop().await;
}

async fn attempt_ends_when_finish_is_never_reported(database: TestDatabase) {
    let ttl = Duration::from_millis(500);
    let scheduler = Running::start(config_with_limits(&database, ttl, Duration::from_secs(60))).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let reports = AtomicU64::new(0);
    let finished = until("the attempt has ended", async || {
        gateway.observe(&[(&lease, pb::LeasePhase::Ended)]).await;
        reports.fetch_add(1, Ordering::Relaxed);
        let workload = scheduler.get(id).await;
        (workload.state() == pb::WorkloadState::Finished).then_some(workload)
    })
    .await;
    assert!(reports.into_inner() > 1, "the scheduler must first wait for FinishAttempt");
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("START_UNKNOWN".to_owned()));
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn unstarted_attempt_leaves_silent_worker(database: TestDatabase) {
    let ttl = Duration::from_millis(300);
    let scheduler = Running::start(config_with_limits(&database, ttl, Duration::from_secs(60))).await;
    let mut silent = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = silent.run(id).await;
    until("the workload is queued again", async || {
        (scheduler.get(id).await.state() == pb::WorkloadState::Pending).then_some(())
    })
    .await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    let refused =
        start(&scheduler, &run.lease_token).await.expect_err("the lease belongs to another attempt");
    assert!(refused.is(Reason::LeaseLost), "{refused}");

    let mut other = Gateway::connect(&scheduler, registration("two")).await.expect("welcome");
    let (_, run) = other.run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

async fn attempts_survive_restart_of_scheduler(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut first = registration("one");
    let mut gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    scheduler.stop().await;

    let scheduler = Running::start(config(&database)).await;
    first.session_credential = gateway.welcome.session_credential.clone();
    let session = gateway.welcome.session;
    let mut gateway = Gateway::connect(&scheduler, first).await.expect("welcome");
    assert_eq!(gateway.welcome.session, session);
    gateway.run(id).await;
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    scheduler.wait_for(id, pb::WorkloadState::Running).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("the old token remains valid");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

async fn ticket_is_issued_for_reachable_worker(database: TestDatabase) {
    let place = Place::new();
    let artifact_store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let worker = gateway.welcome.worker_id.parse().expect("an id");
    let artifact = place.upload_to(worker).await.expect("uploaded");
    let replica = place.replicas(artifact).await.expect("located").remove(0);
    let request = pb::IssueTicketRequest {
        team: "main".to_owned(),
        worker_id: gateway.welcome.worker_id.clone(),
        volume_handle: replica.volume_handle.clone(),
        operation: pb::TicketOperation::Read.into(),
    };
    let others = [
        pb::IssueTicketRequest { operation: pb::TicketOperation::Write.into(), ..request.clone() },
        pb::IssueTicketRequest { volume_handle: VolumeHandle::new().to_string(), ..request.clone() },
        pb::IssueTicketRequest { team: "other".to_owned(), ..request.clone() },
    ];
    for other in others {
        let refused =
            scheduler.workers().issue_ticket(other.clone()).await.expect_err("the transfer is not planned");
        assert!(rpc::Refusal::from(refused).is(Reason::TransferNotPlanned), "{other:?}");
    }
    let issued = scheduler.workers().issue_ticket(request.clone()).await.expect("issued").into_inner();
    assert_eq!(issued.gateway_endpoint, "http://127.0.0.1:1");
    let claims: TicketClaims =
        Keys::new(scheduler.peer()).verify(&issued.ticket).await.expect("a token of this cluster");
    assert_eq!((claims.volume.to_string(), claims.team.as_str()), (replica.volume_handle, "main"));
    assert_eq!(claims.endpoint, issued.gateway_endpoint);

    gateway.leave().await;
    until("the worker is out of contact", async || {
        let refused = scheduler.workers().issue_ticket(request.clone()).await.err()?;
        rpc::Refusal::from(refused).is(Reason::WorkerUnreachable).then_some(())
    })
    .await;
    scheduler.stop().await;
    artifact_store.stop().await;
}

async fn secrets_are_not_shown(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let variable =
        pb::EnvironmentVariable { name: b"TOKEN".as_slice().into(), value: b"secret".as_slice().into() };
    let spec = pb::WorkloadSpec {
        environment: vec![variable],
        stdin: pb::StdinMode::Inline.into(),
        inline_stdin: b"secret".as_slice().into(),
        ..spec()
    };
    let id = scheduler.submit(spec).await.expect("accepted");
    let shown = scheduler.get(id).await.spec.expect("a spec");
    assert_eq!((shown.stdin(), shown.inline_stdin.len()), (pb::StdinMode::Inline, 0));
    assert_eq!(shown.environment[0].name.as_ref(), b"TOKEN");
    assert!(shown.environment[0].value.is_empty());
    scheduler.stop().await;
}

async fn workload_with_inputs_needs_artifact_store(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let input = pb::Input {
        name: "src".to_owned(),
        artifact_id: domain::ArtifactId::new().to_string(),
        path: bytes::Bytes::new(),
        access: pb::Access::ReadOnly.into(),
    };
    let spec = pb::WorkloadSpec { inputs: vec![input], ..spec() };
    let id = WorkloadId::new();
    for _ in 0..2 {
        let refused =
            scheduler.submit_as(id, spec.clone()).await.expect_err("the artifact store is unavailable");
        assert!(refused.is(Reason::Unavailable), "{refused}");
        assert_eq!(scheduler.get(id).await.state(), pb::WorkloadState::Accepted);
    }
    scheduler.stop().await;
}

on_both! {
    bad_input_is_rejected_without_changes,
    desired_state_reaches_every_worker,
    workload_runs_from_submission_to_end,
    watchers_see_progress_of_inputs,
    progress_of_inputs_is_bounded,
    repeated_submission_creates_one_workload,
    workload_waits_for_first_worker,
    workload_without_compatible_worker_is_rejected,
    workloads_wait_when_all_slots_are_used,
    waiting_workload_is_cancelled_immediately,
    placed_workload_cannot_start_after_cancellation,
    attempt_ends_without_report_if_not_started,
    workload_ends_when_its_timeouts_expire,
    workload_is_retried_after_start_timeout,
    started_workload_outlives_its_start_timeout,
    lost_workload_is_retried_within_its_limit,
    full_worker_is_tried_again_without_failure,
    damaged_input_moves_workload_to_another_worker,
    usage_of_attempt_is_stored,
    new_incarnation_ends_attempts_of_old_one,
    attempt_unknown_to_gateway_is_not_running,
    worker_has_one_gateway_at_a_time,
    dropped_call_releases_worker,
    gateway_that_has_ended_is_not_waited_for,
    silent_gateway_is_superseded,
    silent_worker_becomes_lost,
    lost_worker_keeps_slots_of_running_attempts,
    unstarted_attempt_leaves_silent_worker,
    only_received_reports_are_acknowledged,
    attempt_ends_when_finish_is_never_reported,
    attempts_survive_restart_of_scheduler,
    token_with_foreign_signature_is_rejected,
    driven_lease_uses_no_slot,
    driven_lease_expires_when_not_renewed,
    lease_shows_owner_expiry_and_end,
    lease_in_use_ends_when_its_gateway_reports_the_end,
    lease_in_use_is_stopped_when_not_renewed,
    cordon_stops_leases_in_use_at_deadline,
    lost_worker_keeps_slot_of_lease_in_use,
    lease_with_id_of_workload_cannot_be_used,
    workload_with_id_of_lease_is_rejected,
    containers_of_lease_are_settled_when_it_ends,
    release_seals_candidates_of_all_containers,
    higher_priority_is_placed_first,
    longer_queue_gives_team_no_precedence,
    teams_share_slots_by_their_weights,
    team_with_full_queue_is_rejected,
    unreadable_workload_does_not_block_queue,
    requested_resources_are_reserved,
    worker_is_reserved_for_long_waiting_workload,
    earlier_request_uses_reserved_worker,
    unplaceable_workload_reserves_no_worker,
    worker_is_reserved_for_long_waiting_group,
    leases_are_spread_within_slot_limits,
    repeat_with_another_process_is_rejected,
    group_is_granted_as_a_whole,
    concurrent_groups_never_deadlock,
    leases_respect_preferred_and_avoided_workers,
    strategy_chain_depends_on_kind_and_inputs,
    resources_of_leases_are_reserved,
    reported_limits_override_defaults,
    worker_with_full_disk_takes_no_work,
    large_specs_are_sent_in_several_messages,
    invalid_lease_requests_are_rejected,
    driven_lease_has_full_term_after_restart,
    restart_keeps_time_of_last_contact,
    restart_places_work_on_reconnected_workers,
    ticket_is_issued_for_reachable_worker,
    leases_are_listed_until_they_end,
    lists_are_paginated,
    workloads_are_found_by_name_and_id,
    pages_of_large_workloads_are_short,
    large_spec_is_abridged_once_its_workload_has_finished,
    workloads_are_listed_by_outcome,
    secrets_are_not_shown,
    kept_result_is_returned_with_outcome,
    workload_with_inputs_needs_artifact_store,
    build_ends_with_its_workload,
    unpinnable_inputs_are_rejected,
    pins_of_unknown_workloads_are_released,
    missing_outputs_fail_workload,
    output_is_stored_in_named_caches,
    cache_content_becomes_next_version,
    workload_cancelled_before_pinning_never_runs,
    base_resource_type_provides_image_on_all_workers,
    settlement_continues_trace_of_workload,
    unavailable_store_delays_only_the_end,
    only_stated_limits_require_capabilities,
    spec_is_explained_without_side_effects,
    demand_reports_replicas_lost_with_worker,
    large_shapes_are_omitted,
    demand_reports_queue_and_workers,
    expected_wait_follows_released_slots,
    explanation_groups_workers_and_limits_details,
    explanation_shows_queue_position_and_reasons,
    cordon_waits_for_uninterruptible_work,
    cordon_interrupts_work_at_deadline,
    retired_worker_is_removed_when_safe,
    new_replica_blocks_retirement,
    prune_removes_unreachable_worker_with_its_attempts,
    ephemeral_worker_is_removed_when_lost,
    worker_cannot_change_its_team,
    worker_with_unsupported_protocol_is_never_chosen,
    watch_of_workers_misses_no_change,
    unstartable_workload_moves_to_another_worker,
    failing_worker_is_quarantined_and_tried_again,
    started_process_ends_probation,
    worker_is_quarantined_for_failing_team,
    waiting_lease_request_has_queue_position,
    artifacts_of_many_leases_are_checked,
    stopped_replica_leaves_no_waiting_request,
    wait_ends_when_no_worker_is_compatible,
    request_waits_for_lost_worker,
    request_waits_for_pruned_worker,
    explanation_names_lost_and_removed_workers,
    request_ignores_worker_lost_long_ago,
    request_ignores_worker_pruned_long_ago,
    start_timeouts_are_checked_between_polls,
    wait_ends_by_timeout_or_dropped_call,
    waiting_group_is_granted_as_a_whole,
    requests_are_granted_by_priority_then_order,
    waiting_lease_id_cannot_be_reused,
    owner_group_is_placed_on_one_worker,
    owner_group_waits_for_fitting_worker,
    leases_of_owner_share_worker,
    lease_pins_artifacts_until_it_ends,
    request_waits_for_worker_that_it_names,
    pins_of_ended_leases_are_released_after_outage,
    resumed_watch_neither_misses_nor_repeats_events,
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_watch_sees_changes_of_another_replica() {
    registry::check_watchers_see_changes_of_another_replica().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_one_database() {
    let database = testing::databases::postgres().await;
    let replicas = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    // The gateway is connected to one replica. The callers use the other one.
    let mut gateway = Gateway::connect(&replicas[0], registration("one")).await.expect("welcome");
    let mut ids = Vec::new();
    for turn in 0..6 {
        ids.push(replicas[turn % 2].submit(spec()).await.expect("accepted"));
    }
    let mut run_once = std::collections::HashSet::new();
    while run_once.len() < ids.len() {
        // Two replicas that place at the same moment may swap neighbours in the queue.
        let run = gateway.run_other_than(&run_once).await;
        assert!(gateway.desired.leases.len() <= 2, "the limit holds");
        run_once.insert(run.workload_id.clone());
        start(&replicas[1], &run.lease_token).await.expect("started");
        finish(&replicas[1], &run.lease_token, 0).await.expect("finished");
    }
    for id in ids {
        let events = names(&replicas[0].watch(id, 0).await);
        assert_eq!(events.iter().filter(|event| **event == "placed").count(), 1, "{events:?}");
        assert_eq!(events.last(), Some(&"finished"));
    }
    for replica in replicas {
        replica.stop().await;
    }
}
