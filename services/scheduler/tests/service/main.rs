//! The scheduler over real gRPC, on both databases, with gateways that say what each test wants said.

mod again;
mod bad_input;
mod chains;
mod connected;
mod demand;
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
mod store;
mod support;
mod terms;
mod turns;
mod watches;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use again::{
    a_worker_that_is_full_is_not_at_fault_and_is_asked_again,
    an_input_that_is_damaged_on_one_worker_is_used_on_another, what_an_attempt_used_is_told_and_kept,
    what_does_not_start_in_time_is_stopped_and_may_begin_again_elsewhere,
    what_has_started_in_time_may_run_on, what_was_lost_begins_again_as_often_as_its_spec_allows,
    who_must_start_in_time_is_looked_for_in_time,
};
use bad_input::bad_input_gets_its_error_and_changes_nothing;
use chains::checks_have_a_chain_and_what_has_inputs_has_another_however_it_is_asked_for;
use connected::each_of_many_workers_hears_what_it_shall_do;
use demand::{
    large_shapes_are_left_out, what_would_be_lost_with_a_worker_is_told_where_the_store_says_so,
    whoever_adds_and_removes_workers_is_told_what_waits_and_what_there_is,
};
use domain::worker::TicketClaims;
use domain::{MarkerId, VolumeHandle, WorkloadId};
use explain::{
    a_limit_that_is_stated_is_asked_for_and_no_other,
    a_queued_workload_is_told_its_place_and_what_it_waits_for, a_spec_is_explained_and_nothing_comes_of_it,
    how_long_it_may_take_is_judged_by_what_came_free,
    many_workers_are_told_together_and_as_many_one_by_one_as_are_asked_for,
};
use gateways::{
    a_gateway_whose_call_is_dropped_has_left, a_silent_gateway_is_superseded_and_told_so,
    large_specs_are_told_in_several_messages, one_gateway_speaks_for_a_worker_at_a_time,
    only_what_was_heard_is_echoed,
};
use inputs::{progress_of_inputs_is_bounded, watchers_see_inputs_come_in_steps};
use leases::{
    a_driven_lease_takes_no_slot_and_ends_once, a_driven_lease_that_is_not_renewed_ends,
    a_group_is_granted_whole_or_not_at_all, a_lease_says_for_whom_it_is_until_when_and_why_it_ended,
    a_repeat_that_asks_for_another_process_is_another_request, a_token_that_another_signed_proves_nothing,
    leases_are_near_to_each_other_or_apart, many_are_spread_and_never_more_than_there_are_slots,
    two_groups_never_wait_for_each_other, what_cannot_be_asked_for_is_refused,
    what_was_asked_for_is_kept_free,
};
use limits::what_a_worker_says_of_its_limits_holds_and_else_what_holds_for_all;
use lists::{
    large_spec_is_abridged_once_its_workload_has_finished, leases_are_listed_until_they_end,
    lists_come_in_pages, pages_of_large_workloads_are_short, workloads_are_listed_by_how_they_ended,
};
use lost::{
    a_worker_that_was_lost_long_ago_is_not_waited_for, a_worker_that_was_pruned_long_ago_is_not_waited_for,
    what_a_lost_worker_may_run_still_keeps_its_slot, what_only_a_lost_worker_could_do_waits_for_it,
    what_only_a_pruned_worker_could_do_waits_for_it, whoever_asks_is_told_which_workers_are_lost_or_gone,
};
use places::{
    a_group_of_one_owner_goes_where_there_is_room_for_all,
    a_group_of_one_owner_waits_for_the_worker_that_can_have_all, a_lease_holds_what_it_uses_until_it_ends,
    an_id_that_waits_is_nobody_elses, each_of_many_leases_hears_of_what_it_uses,
    groups_that_wait_get_all_at_once, of_many_the_higher_priority_is_granted_and_then_the_first,
    pins_of_leases_outlive_neither_them_nor_a_store_that_is_away,
    the_containers_of_an_owner_keep_to_their_worker, who_has_waited_long_enough_or_has_gone_waits_no_more,
    who_waited_at_a_replica_that_is_stopped_is_behind_nothing,
    who_waits_for_a_lease_has_a_place_in_the_queue, who_waits_in_vain_hears_so,
};
use registry::{
    a_landing_waits_for_what_may_not_be_interrupted_and_no_reconnect_undoes_it,
    a_process_that_starts_ends_the_probation,
    a_retired_worker_goes_once_nothing_would_be_lost_and_stays_away, a_worker_cannot_change_its_team,
    a_worker_that_fails_again_and_again_is_set_aside_and_tried_again,
    a_worker_that_is_out_of_contact_is_pruned_with_what_it_ran,
    a_worker_with_which_nobody_can_speak_is_listed_and_never_chosen,
    an_ephemeral_worker_goes_once_it_is_lost, at_its_time_the_rest_of_a_landing_worker_is_interrupted,
    what_comes_to_be_on_a_retiring_worker_holds_it_up, what_one_worker_cannot_start_another_does,
    whoever_watches_workers_misses_nothing, worker_is_set_aside_for_the_team_whose_attempts_fail,
};
use rpc::Reason;
use rpc::pb::scheduler as pb;
use rpc::token::Keys;
use store::{
    Place, a_build_ends_with_its_workload, a_store_that_is_away_delays_the_end_and_nothing_else,
    an_output_goes_to_the_caches_that_its_spec_names, inputs_that_cannot_be_pinned_are_refused,
    outputs_that_the_store_lacks_are_no_success, pins_of_workloads_that_nobody_knows_are_released,
    settling_belongs_to_the_trace_of_the_workload,
    what_is_cancelled_before_its_inputs_are_pinned_never_runs_and_keeps_nothing,
    what_is_left_in_a_cache_is_its_next_version, what_the_cluster_has_of_a_type_is_the_image_of_all_workers,
};
use support::{Gateway, Running, config, finish, hello, spec, start, until};
use terms::{
    a_driven_lease_has_a_full_term_after_a_restart, a_restart_does_not_forget_how_long_a_worker_was_silent,
    after_a_restart_work_goes_to_those_that_came_back,
};
use testing::databases::TestDatabase;
use turns::{
    a_higher_priority_is_placed_first, a_team_with_more_that_waits_is_not_before_others,
    a_worker_is_kept_free_for_a_group_that_waits_long,
    a_worker_is_kept_free_for_one_that_waits_long_for_much,
    nothing_is_kept_free_for_one_that_no_worker_could_take_any_more,
    one_that_cannot_be_read_keeps_nobody_from_a_worker,
    team_with_a_full_queue_is_refused_until_something_is_placed, teams_share_slots_by_their_weights,
    what_a_workload_asks_for_is_kept_free, whoever_is_before_another_takes_what_is_kept_free_for_it,
};
use watches::a_watch_that_goes_on_elsewhere_misses_nothing_and_hears_nothing_twice;

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

async fn a_workload_goes_from_its_submission_to_its_end(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    assert_eq!(gateway.welcome.protocol_version, 1);

    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    assert_eq!(run.spec.as_ref().map(|spec| spec.command.clone()), Some(spec().command));
    gateway.observe(&[(&lease, pb::LeasePhase::Preparing)]).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    start(&scheduler, &run.lease_token).await.expect("a repeat");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    let running = scheduler.wait_for(id, pb::WorkloadState::Running).await;
    let whereabouts = running.whereabouts.expect("it is somewhere");
    assert_eq!(whereabouts.worker_name, "one");
    assert_eq!(whereabouts.attempt_id, run.attempt_id);
    assert_eq!(scheduler.worker("one").await.active_tasks, 1);

    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    finish(&scheduler, &run.lease_token, 1).await.expect("the first report counts");
    let refused = start(&scheduler, &run.lease_token).await.expect_err("it has ended");
    assert!(refused.is(Reason::LeaseLost));
    let events = scheduler.watch(id, 0).await;
    assert_eq!(names(&events), ["placed", "preparing", "running", "finished"]);
    let revisions: Vec<_> = events.iter().map(|event| event.revision).collect();
    assert_eq!(revisions, [1, 2, 3, 4]);
    assert_eq!(names(&scheduler.watch(id, 2).await), ["running", "finished"]);
    assert_eq!(names(&scheduler.watch(id, 4).await), [""; 0]);
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    gateway.holds_nothing().await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn a_repeated_submission_is_one_workload(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = WorkloadId::new();
    let submissions = (0..8).map(|_| scheduler.submit_as(id, spec()));
    for submitted in futures::future::join_all(submissions).await {
        submitted.expect("each is answered as the first");
    }
    let (_, run) = gateway.run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    scheduler.submit_as(id, spec()).await.expect("even once it has finished");

    let other = pb::WorkloadSpec { command: vec![b"false".as_slice().into()], ..spec() };
    let refused = scheduler.submit_as(id, other).await.expect_err("another spec");
    assert!(refused.is(Reason::WorkloadExists), "{refused}");
    assert_eq!(names(&scheduler.watch(id, 0).await), ["placed", "finished"]);
    scheduler.stop().await;
}

async fn a_workload_waits_for_the_first_worker_and_says_so(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let id = scheduler.submit(spec()).await.expect("queued");
    let waiting = scheduler.wait_for(id, pb::WorkloadState::Pending).await;
    assert_eq!(waiting.waiting_for, ["no worker has registered yet"]);

    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let (_, run) = gateway.run(id).await;
    finish(&scheduler, &run.lease_token, 3).await.expect("finished");
    let events = scheduler.watch(id, 0).await;
    let mut said = names(&events);
    // Why it waits may be another thing for a moment: that a worker was let in, and not heard yet.
    said.dedup();
    assert_eq!(said, ["queued", "placed", "finished"]);
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Failed);
    assert_eq!(finished.exit.and_then(|exit| exit.how), Some(pb::exit::How::Code(3)));
    scheduler.stop().await;
}

async fn what_no_worker_could_ever_run_is_refused_and_nothing_is_queued(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let _gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
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

async fn who_finds_every_slot_taken_waits_for_his_turn(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(scheduler.submit(spec()).await.expect("accepted"));
    }
    let (_, first) = gateway.run(ids[0]).await;
    let (_, second) = gateway.run(ids[1]).await;
    for waiting in &ids[2..] {
        until("it waits for a slot", async || {
            (scheduler.get(*waiting).await.waiting_for == ["one: is full (2 of 2 tasks)"]).then_some(())
        })
        .await;
    }
    assert_eq!(gateway.desired.leases.len(), 2);

    finish(&scheduler, &second.lease_token, 0).await.expect("finished");
    let (_, third) = gateway.run(ids[2]).await;
    assert_eq!(scheduler.get(ids[3]).await.state(), pb::WorkloadState::Pending, "first come, first served");
    finish(&scheduler, &first.lease_token, 0).await.expect("finished");
    finish(&scheduler, &third.lease_token, 0).await.expect("finished");
    gateway.run(ids[3]).await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 1);
    scheduler.stop().await;
}

async fn a_waiting_workload_is_cancelled_at_once(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let id = scheduler.submit(spec()).await.expect("queued");
    scheduler.cancel(id, Duration::from_secs(5)).await;
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Aborted);
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("CANCELLED".to_owned()));
    scheduler.cancel(id, Duration::from_secs(5)).await;
    scheduler.stop().await;
}

async fn a_placed_workload_is_asked_to_stop_and_may_not_start(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = gateway.run(id).await;
    scheduler.cancel(id, Duration::from_secs(5)).await;
    let (_, stop) = gateway.stop(id).await;
    assert_eq!((stop.reason(), &stop.attempt_id), (pb::StopReason::Cancelled, &run.attempt_id));
    scheduler.cancel(id, Duration::from_secs(9)).await;
    scheduler.cancel(id, Duration::from_secs(1)).await;
    gateway
        .desires("a shorter grace", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Stop(stop)) => {
                let grace = stop.grace.as_ref().map_or(0, |grace| grace.seconds);
                assert_ne!(grace, 9, "a later call only shortens");
                (grace == 1).then_some(())
            }
            _ => None,
        })
        .await;
    let refused = start(&scheduler, &run.lease_token).await.expect_err("it shall stop");
    assert!(refused.is(Reason::LeaseLost), "{refused}");
    assert_eq!(scheduler.worker("one").await.active_tasks, 1, "until it has stopped, its slot is taken");

    finish(&scheduler, &stop.lease_token, 0).await.expect("finished");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Aborted);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn what_was_refused_to_start_ends_without_a_report(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, _) = gateway.run(id).await;
    scheduler.cancel(id, Duration::ZERO).await;
    gateway.stop(id).await;
    gateway.observe(&[(&lease, pb::LeasePhase::Ended)]).await;
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Aborted);
    scheduler.stop().await;
}

async fn time_that_is_up_is_noticed(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let short = Some(rpc::duration(Duration::from_millis(50)));
    let queued = pb::WorkloadSpec { queue_timeout: short, ..spec() };
    let id = scheduler.submit(queued).await.expect("queued");
    let finished = scheduler.finished(id).await;
    assert_eq!(finished.outcome(), pb::Outcome::Errored);
    let failure = finished.failure.expect("a failure");
    assert_eq!(failure.reason, "QUEUE_TIMEOUT");
    assert_eq!(failure.message, "no worker took it in time; it waited for: no worker has registered yet");

    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
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

async fn a_new_incarnation_ends_what_ran_in_the_old_one(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut hello = hello("one");
    let mut gateway = Gateway::connect(&scheduler, hello.clone()).await.expect("welcome");
    let (prepared, started) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(spec()).await.expect("accepted"),
    );
    let (_, first) = gateway.run(prepared).await;
    let (_, second) = gateway.run(started).await;
    start(&scheduler, &second.lease_token).await.expect("started");
    let before = gateway.welcome.clone();
    gateway.leave().await;

    hello.session_credential = before.session_credential;
    hello.marker = Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() });
    let mut gateway = Gateway::connect(&scheduler, hello).await.expect("welcome");
    assert_eq!(gateway.welcome.worker_id, before.worker_id);
    assert_eq!(gateway.welcome.session, before.session, "the same instance speaks");
    assert!(gateway.welcome.incarnation > before.incarnation);

    let lost = scheduler.finished(started).await;
    assert_eq!(lost.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    let (_, again) = gateway.run(prepared).await;
    assert_ne!(again.attempt_id, first.attempt_id);
    for stale in [&first, &second] {
        let refused = finish(&scheduler, &stale.lease_token, 0).await.expect_err("its lease is lost");
        assert!(refused.is(Reason::LeaseLost), "{refused}");
    }
    finish(&scheduler, &again.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(prepared).await.outcome(), pb::Outcome::Succeeded);
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn what_a_gateway_does_not_know_is_not_running(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let (prepared, started) = (
        scheduler.submit(spec()).await.expect("accepted"),
        scheduler.submit(spec()).await.expect("accepted"),
    );
    let generation = gateway.desired.generation;
    let (_, first) = gateway.run(prepared).await;
    let (_, second) = gateway.run(started).await;
    start(&scheduler, &second.lease_token).await.expect("started");

    // As of a generation that did not name them yet, it says nothing.
    let now = std::mem::replace(&mut gateway.desired.generation, generation);
    until("it was heard", async || {
        gateway.observe(&[]).await;
        (scheduler.worker("one").await.containers == 3).then_some(())
    })
    .await;
    assert_eq!(scheduler.get(prepared).await.state(), pb::WorkloadState::Assigned);

    // A message may name a lease that is one generation younger than it says; the next message says that one.
    gateway.desired.generation = now + 1;
    gateway.observe(&[]).await;
    let unknown = scheduler.finished(started).await;
    assert_eq!(unknown.failure.map(|failure| failure.reason), Some("START_UNKNOWN".to_owned()));
    let again = gateway
        .desires("to run it again", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Run(run)) => (run.attempt_id != first.attempt_id
                && run.workload_id == prepared.to_string())
            .then(|| run.clone()),
            _ => None,
        })
        .await;
    finish(&scheduler, &again.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(prepared).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

pub(crate) fn patient_config(
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

async fn a_worker_that_is_silent_for_too_long_is_lost(database: TestDatabase) {
    let (ttl, lost_after) = (Duration::from_millis(300), Duration::from_millis(800));
    let scheduler = Running::start(patient_config(&database, ttl, lost_after)).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;

    until("it is stalled", async || {
        (scheduler.worker("one").await.state() == pb::WorkerState::Stalled).then_some(())
    })
    .await;
    let waits = scheduler.submit(spec()).await.expect("queued");
    assert_eq!(scheduler.get(waits).await.waiting_for, ["one: is out of contact"]);
    let lost = scheduler.finished(id).await;
    assert_eq!(lost.failure.map(|failure| failure.reason), Some("WORKER_LOST".to_owned()));
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Lost);

    // It was only asleep: it is told that nothing of it is wanted, and gets work again.
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    gateway.run(waits).await;
    assert_eq!(gateway.desired.leases.len(), 1);
    scheduler.stop().await;
}

async fn an_end_that_is_never_told_is_not_waited_for(database: TestDatabase) {
    let ttl = Duration::from_millis(500);
    let scheduler = Running::start(patient_config(&database, ttl, Duration::from_secs(60))).await;
    let mut gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    let said = AtomicU64::new(0);
    let finished = until("it is given up", async || {
        gateway.observe(&[(&lease, pb::LeasePhase::Ended)]).await;
        said.fetch_add(1, Ordering::Relaxed);
        let workload = scheduler.get(id).await;
        (workload.state() == pb::WorkloadState::Finished).then_some(workload)
    })
    .await;
    assert!(said.into_inner() > 1, "its FinishAttempt may be on its way");
    assert_eq!(finished.failure.map(|failure| failure.reason), Some("START_UNKNOWN".to_owned()));
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    scheduler.stop().await;
}

async fn what_a_silent_worker_has_not_started_goes_to_another(database: TestDatabase) {
    let ttl = Duration::from_millis(300);
    let scheduler = Running::start(patient_config(&database, ttl, Duration::from_secs(60))).await;
    let mut silent = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (_, run) = silent.run(id).await;
    until("it waits again", async || {
        (scheduler.get(id).await.state() == pb::WorkloadState::Pending).then_some(())
    })
    .await;
    assert_eq!(scheduler.worker("one").await.active_tasks, 0);
    let refused = start(&scheduler, &run.lease_token).await.expect_err("it is somebody else's");
    assert!(refused.is(Reason::LeaseLost), "{refused}");

    let mut other = Gateway::connect(&scheduler, hello("two")).await.expect("welcome");
    let (_, run) = other.run(id).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

async fn work_survives_the_scheduler(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut first = hello("one");
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
    finish(&scheduler, &run.lease_token, 0).await.expect("the old token is good");
    assert_eq!(scheduler.finished(id).await.outcome(), pb::Outcome::Succeeded);
    scheduler.stop().await;
}

async fn a_ticket_is_good_for_a_worker_that_can_be_reached(database: TestDatabase) {
    let place = Place::new();
    let artifact_store = place.start().await;
    let scheduler = Running::start(place.config(&database)).await;
    let gateway = Gateway::connect(&scheduler, hello("one")).await.expect("welcome");
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
        let refused = scheduler.workers().issue_ticket(other.clone()).await.expect_err("it is not planned");
        assert!(rpc::Refusal::from(refused).is(Reason::TransferNotPlanned), "{other:?}");
    }
    let issued = scheduler.workers().issue_ticket(request.clone()).await.expect("issued").into_inner();
    assert_eq!(issued.gateway_endpoint, "http://127.0.0.1:1");
    let claims: TicketClaims = Keys::new(scheduler.peer()).verify(&issued.ticket).await.expect("ours");
    assert_eq!((claims.volume.to_string(), claims.team.as_str()), (replica.volume_handle, "main"));
    assert_eq!(claims.endpoint, issued.gateway_endpoint);

    gateway.leave().await;
    until("it is out of contact", async || {
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
    let id =
        scheduler.submit(pb::WorkloadSpec { environment: vec![variable], ..spec() }).await.expect("accepted");
    let shown = scheduler.get(id).await.spec.expect("a spec");
    assert_eq!(shown.environment[0].name.as_ref(), b"TOKEN");
    assert!(shown.environment[0].value.is_empty());
    scheduler.stop().await;
}

async fn without_the_artifact_store_nothing_with_inputs_is_queued(database: TestDatabase) {
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
        let refused = scheduler.submit_as(id, spec.clone()).await.expect_err("the store is away");
        assert!(refused.is(Reason::Unavailable), "{refused}");
        assert_eq!(scheduler.get(id).await.state(), pb::WorkloadState::Accepted);
    }
    scheduler.stop().await;
}

on_both! {
    bad_input_gets_its_error_and_changes_nothing,
    each_of_many_workers_hears_what_it_shall_do,
    a_workload_goes_from_its_submission_to_its_end,
    watchers_see_inputs_come_in_steps,
    progress_of_inputs_is_bounded,
    a_repeated_submission_is_one_workload,
    a_workload_waits_for_the_first_worker_and_says_so,
    what_no_worker_could_ever_run_is_refused_and_nothing_is_queued,
    who_finds_every_slot_taken_waits_for_his_turn,
    a_waiting_workload_is_cancelled_at_once,
    a_placed_workload_is_asked_to_stop_and_may_not_start,
    what_was_refused_to_start_ends_without_a_report,
    time_that_is_up_is_noticed,
    what_does_not_start_in_time_is_stopped_and_may_begin_again_elsewhere,
    what_has_started_in_time_may_run_on,
    what_was_lost_begins_again_as_often_as_its_spec_allows,
    a_worker_that_is_full_is_not_at_fault_and_is_asked_again,
    an_input_that_is_damaged_on_one_worker_is_used_on_another,
    what_an_attempt_used_is_told_and_kept,
    a_new_incarnation_ends_what_ran_in_the_old_one,
    what_a_gateway_does_not_know_is_not_running,
    one_gateway_speaks_for_a_worker_at_a_time,
    a_gateway_whose_call_is_dropped_has_left,
    a_silent_gateway_is_superseded_and_told_so,
    a_worker_that_is_silent_for_too_long_is_lost,
    what_a_lost_worker_may_run_still_keeps_its_slot,
    what_a_silent_worker_has_not_started_goes_to_another,
    only_what_was_heard_is_echoed,
    an_end_that_is_never_told_is_not_waited_for,
    work_survives_the_scheduler,
    a_token_that_another_signed_proves_nothing,
    a_driven_lease_takes_no_slot_and_ends_once,
    a_driven_lease_that_is_not_renewed_ends,
    a_lease_says_for_whom_it_is_until_when_and_why_it_ended,
    a_higher_priority_is_placed_first,
    a_team_with_more_that_waits_is_not_before_others,
    teams_share_slots_by_their_weights,
    team_with_a_full_queue_is_refused_until_something_is_placed,
    one_that_cannot_be_read_keeps_nobody_from_a_worker,
    what_a_workload_asks_for_is_kept_free,
    a_worker_is_kept_free_for_one_that_waits_long_for_much,
    whoever_is_before_another_takes_what_is_kept_free_for_it,
    nothing_is_kept_free_for_one_that_no_worker_could_take_any_more,
    a_worker_is_kept_free_for_a_group_that_waits_long,
    many_are_spread_and_never_more_than_there_are_slots,
    a_repeat_that_asks_for_another_process_is_another_request,
    a_group_is_granted_whole_or_not_at_all,
    two_groups_never_wait_for_each_other,
    leases_are_near_to_each_other_or_apart,
    checks_have_a_chain_and_what_has_inputs_has_another_however_it_is_asked_for,
    what_was_asked_for_is_kept_free,
    what_a_worker_says_of_its_limits_holds_and_else_what_holds_for_all,
    large_specs_are_told_in_several_messages,
    what_cannot_be_asked_for_is_refused,
    a_driven_lease_has_a_full_term_after_a_restart,
    a_restart_does_not_forget_how_long_a_worker_was_silent,
    after_a_restart_work_goes_to_those_that_came_back,
    a_ticket_is_good_for_a_worker_that_can_be_reached,
    leases_are_listed_until_they_end,
    lists_come_in_pages,
    pages_of_large_workloads_are_short,
    large_spec_is_abridged_once_its_workload_has_finished,
    workloads_are_listed_by_how_they_ended,
    secrets_are_not_shown,
    without_the_artifact_store_nothing_with_inputs_is_queued,
    a_build_ends_with_its_workload,
    inputs_that_cannot_be_pinned_are_refused,
    pins_of_workloads_that_nobody_knows_are_released,
    outputs_that_the_store_lacks_are_no_success,
    an_output_goes_to_the_caches_that_its_spec_names,
    what_is_left_in_a_cache_is_its_next_version,
    what_is_cancelled_before_its_inputs_are_pinned_never_runs_and_keeps_nothing,
    what_the_cluster_has_of_a_type_is_the_image_of_all_workers,
    settling_belongs_to_the_trace_of_the_workload,
    a_store_that_is_away_delays_the_end_and_nothing_else,
    a_limit_that_is_stated_is_asked_for_and_no_other,
    a_spec_is_explained_and_nothing_comes_of_it,
    what_would_be_lost_with_a_worker_is_told_where_the_store_says_so,
    large_shapes_are_left_out,
    whoever_adds_and_removes_workers_is_told_what_waits_and_what_there_is,
    how_long_it_may_take_is_judged_by_what_came_free,
    many_workers_are_told_together_and_as_many_one_by_one_as_are_asked_for,
    a_queued_workload_is_told_its_place_and_what_it_waits_for,
    a_landing_waits_for_what_may_not_be_interrupted_and_no_reconnect_undoes_it,
    at_its_time_the_rest_of_a_landing_worker_is_interrupted,
    a_retired_worker_goes_once_nothing_would_be_lost_and_stays_away,
    what_comes_to_be_on_a_retiring_worker_holds_it_up,
    a_worker_that_is_out_of_contact_is_pruned_with_what_it_ran,
    an_ephemeral_worker_goes_once_it_is_lost,
    a_worker_cannot_change_its_team,
    a_worker_with_which_nobody_can_speak_is_listed_and_never_chosen,
    whoever_watches_workers_misses_nothing,
    what_one_worker_cannot_start_another_does,
    a_worker_that_fails_again_and_again_is_set_aside_and_tried_again,
    a_process_that_starts_ends_the_probation,
    worker_is_set_aside_for_the_team_whose_attempts_fail,
    who_waits_for_a_lease_has_a_place_in_the_queue,
    each_of_many_leases_hears_of_what_it_uses,
    who_waited_at_a_replica_that_is_stopped_is_behind_nothing,
    who_waits_in_vain_hears_so,
    what_only_a_lost_worker_could_do_waits_for_it,
    what_only_a_pruned_worker_could_do_waits_for_it,
    whoever_asks_is_told_which_workers_are_lost_or_gone,
    a_worker_that_was_lost_long_ago_is_not_waited_for,
    a_worker_that_was_pruned_long_ago_is_not_waited_for,
    who_must_start_in_time_is_looked_for_in_time,
    who_has_waited_long_enough_or_has_gone_waits_no_more,
    groups_that_wait_get_all_at_once,
    of_many_the_higher_priority_is_granted_and_then_the_first,
    an_id_that_waits_is_nobody_elses,
    a_group_of_one_owner_goes_where_there_is_room_for_all,
    a_group_of_one_owner_waits_for_the_worker_that_can_have_all,
    the_containers_of_an_owner_keep_to_their_worker,
    a_lease_holds_what_it_uses_until_it_ends,
    pins_of_leases_outlive_neither_them_nor_a_store_that_is_away,
    a_watch_that_goes_on_elsewhere_misses_nothing_and_hears_nothing_twice,
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_of_workers_see_what_another_replica_changes() {
    registry::watchers_see_changes_that_another_replica_makes().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_the_work_of_one_database() {
    let database = testing::databases::postgres().await;
    let replicas = [Running::start(config(&database)).await, Running::start(config(&database)).await];
    // The gateway is attended by one replica, the callers talk to the other.
    let mut gateway = Gateway::connect(&replicas[0], hello("one")).await.expect("welcome");
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
