//! Late, repeated, overtaken and very long reports.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::{ArtifactId, AttemptId, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts::{DryRun, InventoryState, PrepareVolume, ReportResponse, WatchDestroyingResponse};
use sea_orm::{ConnectionTrait, Statement, TransactionTrait};
use testing::databases::TestDatabase;
use tonic::Streaming;

use crate::{Gateway, PATIENCE, Suite, assert_refused, input, on_both_databases, output};

on_both_databases! {
    newest_of_concurrent_reports_wins,
    report_ignores_changes_during_its_stream,
    report_of_former_session_judges_no_later_items,
    older_report_is_rejected_after_newer_commit,
    duplicated_report_counts_once,
    each_stream_sends_every_item_once,
    #[ignore = "slow: make full"]
    report_accepts_hundred_thousand_handles,
}

/// Prepares attempts on the worker of `gateway`, each with two volumes. Returns their containers
/// and volumes.
async fn prepared(gateway: &Gateway, attempts: usize) -> (Vec<String>, Vec<String>) {
    let (mut containers, mut volumes) = (Vec::new(), Vec::new());
    for _ in 0..attempts {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let needs = ["a", "b"].map(|name| output(name, workload.output_artifact(name)));
        let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        containers.push(planned.container_handle);
        volumes.extend(planned.volumes.into_iter().map(|volume| volume.volume_handle));
    }
    (containers, volumes)
}

/// Returns the items that the store believes to exist.
async fn believed(suite: &Suite) -> BTreeSet<String> {
    let volumes = suite.volumes().await.into_iter().map(|volume| (volume.state(), volume.volume_handle));
    let containers = suite.containers().await;
    let containers = containers.into_iter().map(|container| (container.state(), container.container_handle));
    let there = volumes.chain(containers).filter(|(state, _)| *state == InventoryState::Created);
    there.map(|(_, handle)| handle).collect()
}

/// Returns some of `handles`, different for each `round` and `reporter`.
fn some(handles: &[String], round: usize, reporter: usize) -> Vec<String> {
    let picked = handles.iter().enumerate().filter(|(place, _)| (place + round) % 3 != reporter % 3);
    picked.map(|(_, handle)| handle.clone()).collect()
}

async fn newest_of_concurrent_reports_wins(database: TestDatabase) {
    const ROUNDS: usize = 40;
    const REPORTERS: usize = 4;
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (containers, volumes) = prepared(&gateway, 6).await;
    let mut refused = 0;
    for round in 0..ROUNDS {
        let mut reports = Vec::new();
        for reporter in 0..REPORTERS {
            let token = gateway.begin_report().await.expect("begun");
            let held = (some(&containers, round, reporter), some(&volumes, round, reporter));
            reports.push((token, held));
        }
        let (_, newest) = reports.last().cloned().expect("several");
        let mut answers = tokio::task::JoinSet::new();
        for (token, (containers, volumes)) in reports {
            let gateway = gateway.clone();
            answers.spawn(async move { gateway.report_with(token, &volumes, &containers).await });
        }
        while let Some(answer) = answers.join_next().await {
            let answer = answer.expect("no panic");
            if answer.is_err() {
                refused += 1;
                assert_refused(answer, Reason::StaleReport);
            }
        }
        let expected: BTreeSet<_> = newest.0.into_iter().chain(newest.1).collect();
        assert_eq!(believed(&suite).await, expected, "round {round}");
    }
    eprintln!("{refused} of {} reports were overtaken", ROUNDS * REPORTERS);
    suite.stop().await;
}

/// Only on PostgreSQL, where locks can stop a report: a row lock in the middle of its rows, and a
/// table lock between two tables.
#[tokio::test(flavor = "multi_thread")]
async fn overtaken_report_stops_in_the_middle() {
    let suite = Suite::start(testing::databases::postgres().await).await;
    let gateway = suite.gateway().await;
    let (containers, volumes) = prepared(&gateway, 1).await;
    let (older, newer) =
        (gateway.begin_report().await.expect("begun"), gateway.begin_report().await.expect("begun"));
    // A listing of an earlier time has the volumes, and a later one does not.
    gateway.report_with(older.clone(), &[], &containers).await.expect("the volumes are lost");

    let database = sea_orm::Database::connect(suite.url()).await.expect("connected");
    let number = async |sql: &str| {
        let row = database.query_one_raw(Statement::from_string(database.get_database_backend(), sql)).await;
        row.expect("asked").expect("a row").try_get::<i64>("", "n").expect("a number")
    };
    let waiting = async || {
        let sql = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        number(sql).await
    };
    let taken_over = "SELECT reported AS n FROM workers";
    let before = number(taken_over).await;
    let of_volumes = database.begin().await.expect("begun");
    of_volumes.execute_unprepared("LOCK TABLE volumes IN ACCESS EXCLUSIVE MODE").await.expect("locked");
    let of_containers = database.begin().await.expect("begun");
    of_containers.execute_unprepared("SELECT handle FROM containers FOR UPDATE").await.expect("locked");
    let mut reports = tokio::task::JoinSet::new();
    // The older report marks the container as lost first, and waits for its lock.
    let (old, old_volumes) = (gateway.clone(), volumes.clone());
    reports.spawn(async move { (old.report_with(older, &old_volumes, &[]).await, "older") });
    until("a report that waits for a row", async || waiting().await > 0).await;
    let new = gateway.clone();
    reports.spawn(async move { (new.report_with(newer, &[], &containers).await, "newer") });
    until("a newer report that waits for the older one", async || waiting().await > 1).await;
    // The older report has lost the container, and must not judge the volumes before the newer one
    // has taken over.
    of_containers.rollback().await.expect("released");
    until("a newer report that has taken over", async || number(taken_over).await > before).await;
    of_volumes.rollback().await.expect("released");
    let mut answers = Vec::new();
    while let Some(answer) = reports.join_next().await {
        answers.push(answer);
    }
    for answer in answers {
        match answer.expect("no panic") {
            (answer, "older") => assert_refused(answer, Reason::StaleReport),
            (answer, _) => assert_eq!(answer.expect("it is the newest").forgotten, 0),
        }
    }
    for volume in &volumes {
        assert_eq!(suite.volume_state(volume).await, Some(InventoryState::Lost));
    }
    suite.stop().await;
}

/// Waits until `condition` holds.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let met = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, met).await.unwrap_or_else(|_| panic!("{what} did not come"));
}

async fn report_ignores_changes_during_its_stream(database: TestDatabase) {
    let adjust = |config: &mut artifact_store::Config| config.tombstone = Duration::from_secs(3600);
    let suite = Suite::start_with(database, adjust).await;
    let gateway = suite.gateway().await;
    let (kept, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (doomed, attempt) = (WorkloadId::new(), AttemptId::new());
    let old = gateway.prepare(doomed, attempt, &[input("in", kept)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let before: Vec<_> = [&replica, &old.volumes[0].volume_handle].map(Clone::clone).into();

    // The report is sent in two halves, and its end is delayed.
    let token = gateway.begin_report().await.expect("begun");
    let late = gateway.open_report(token.clone()).await;
    late.send(&before, &[]).await;

    let (workload, of_new) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, of_new, &[input("in", kept)]).await.expect("prepared");
    let (making, of_making) = (WorkloadId::new(), AttemptId::new());
    gateway.prepare(making, of_making, &[]).await.expect("prepared");
    suite.clock.advance(Duration::from_secs(120));
    gateway.prepared(of_new).await.expect("recorded");
    let (_, uploaded) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    suite.plan(open, gateway.worker, TransferId::new()).await.expect("planned");
    // Some reported and some unreported items are marked and handed out meanwhile.
    let (passing, of_passing) = (WorkloadId::new(), AttemptId::new());
    let passed = gateway.prepare(passing, of_passing, &[]).await.expect("prepared");
    gateway.prepared(of_passing).await.expect("recorded");
    suite.settle(doomed, None, &[], None).await.expect("settled");
    suite.settle(passing, None, &[], None).await.expect("settled");
    suite.clock.advance(Duration::from_secs(240));
    suite.collect(DryRun::Off).await;
    gateway.swept(&[&old.container_handle, &passed.container_handle], &[&old.volumes[0].volume_handle]).await;

    let (volumes, containers) = (suite.volumes().await, suite.containers().await);
    assert_eq!((volumes.len(), containers.len()), (5, 4), "nothing is gone");
    let reported = late.commit(2).await.expect("it counts for what it has seen");
    assert_eq!(reported, ReportResponse { receipt: reported.receipt.clone(), ..Default::default() });
    assert_eq!((suite.volumes().await, suite.containers().await), (volumes.clone(), containers.clone()));
    // Neither does a repeated report, or one without these items.
    suite.clock.advance(Duration::from_secs(240));
    assert_eq!(gateway.report_with(token.clone(), &before, &[]).await.expect("judged"), reported);
    gateway.report_with(token, std::slice::from_ref(&replica), &[]).await.expect("judged");
    assert_eq!((suite.volumes().await, suite.containers().await), (volumes, containers));

    let holds = [replica, planned.volumes[0].volume_handle.clone(), uploaded];
    let reported = gateway.report(&holds, &[planned.container_handle]).await.expect("reported");
    let gone = "what was handed out, and what was being brought and lost its claim";
    assert_eq!((reported.forgotten, reported.lost), (4, 0), "{gone}");
    suite.stop().await;
}

async fn report_of_former_session_judges_no_later_items(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let first = suite.silent_gateway(worker, 1, 1);
    let token = first.begin_report().await.expect("begun");
    let (_, kept) = suite.upload(&first, None, 1).await.expect("uploaded");
    let (making, attempt) = (WorkloadId::new(), AttemptId::new());
    let of_first = first.prepare(making, attempt, &[]).await.expect("prepared");
    let late = first.open_report(token.clone()).await;
    let too_late = first.open_report(first.begin_report().await.expect("begun")).await;

    // A new session marks items that are being created, and creates them again.
    let second = suite.silent_gateway(worker, 1, 2);
    let of_second = second.begin_report().await.expect("it may speak");
    let again = second.prepare(making, attempt, &[]).await.expect("prepared");
    second.prepared(attempt).await.expect("recorded");
    suite.clock.advance(Duration::from_secs(300));
    assert_refused(late.commit(0).await, Reason::StaleSession);
    // A report of the new session with the token of the first one judges nothing of this.
    let reported = second.report_with(token.clone(), &[], &[]).await.expect("judged");
    assert_eq!(reported, ReportResponse { receipt: reported.receipt.clone(), ..Default::default() });
    let reported = second.report_with(of_second.clone(), &[], &[]).await.expect("judged");
    assert_eq!((reported.forgotten, reported.lost), (1, 1), "what was there when it began");
    assert_eq!(suite.volume_state(&kept).await, Some(InventoryState::Lost));
    let live: Vec<_> = suite.containers().await.into_iter().map(|row| row.container_handle).collect();
    assert_eq!(live, [again.container_handle.as_str()], "{} was forgotten", of_first.container_handle);
    second
        .report(std::slice::from_ref(&kept), std::slice::from_ref(&again.container_handle))
        .await
        .expect("reported");

    // After a new incarnation, no earlier report confirms, loses or forgets a volume.
    let third = suite.silent_gateway(worker, 2, 1);
    let late = third.begin_report().await.expect("it may speak");
    suite.clock.advance(Duration::from_secs(300));
    // Either reason: the store may have read the first message before or after the new incarnation.
    let refusal = too_late.commit(0).await.expect_err("it is of the first session");
    assert!(refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation), "{refusal:?}");
    let (state, containers) = (suite.volume_state(&kept).await, suite.containers().await);
    assert_eq!((state, containers.len()), (Some(InventoryState::Unconfirmed), 1));
    for old in [token, of_second] {
        assert_refused(third.report_with(old, &[], &[]).await, Reason::StaleReport);
    }
    assert_eq!((suite.volume_state(&kept).await, suite.containers().await), (state, containers));
    let reported = third.report_with(late, std::slice::from_ref(&kept), &[]).await.expect("judged");
    assert_eq!((reported.forgotten, reported.lost), (1, 0));
    assert_eq!(suite.volume_state(&kept).await, Some(InventoryState::Created));
    suite.stop().await;
}

async fn older_report_is_rejected_after_newer_commit(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (_, volume) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let named = std::slice::from_ref(&volume);
    let opened = async || gateway.open_report(gateway.begin_report().await.expect("begun")).await;

    for newer_names_it in [false, true] {
        let (older, cut, newer) = (opened().await, opened().await, opened().await);
        // Both are complete except for their commits when the newer one ends.
        older.send(if newer_names_it { &[] } else { named }, &[]).await;
        newer.send(if newer_names_it { named } else { &[] }, &[]).await;
        newer.commit(u64::from(newer_names_it)).await.expect("judged");
        assert_refused(older.commit(u64::from(!newer_names_it)).await, Reason::StaleReport);
        // Either reason: the store may not have begun to read it when the newer one was committed.
        let refusal = cut.cut().await.expect_err("it is cut, and older");
        assert!(refusal.is(Reason::ReportTruncated) || refusal.is(Reason::StaleReport), "{refusal:?}");
        let expected = if newer_names_it { InventoryState::Created } else { InventoryState::Lost };
        assert_eq!(suite.volume_state(&volume).await, Some(expected));
    }
    // In order, both count.
    let (older, newer) = (opened().await, opened().await);
    assert_eq!(older.commit(0).await.expect("judged").lost, 1);
    newer.send(named, &[]).await;
    newer.commit(1).await.expect("judged");
    assert_eq!(suite.volume_state(&volume).await, Some(InventoryState::Created));
    suite.stop().await;
}

async fn duplicated_report_counts_once(database: TestDatabase) {
    const COPIES: usize = 4;
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    for round in 0..10 {
        let (artifact, replica) = suite.upload(&gateway, None, round).await.expect("uploaded");
        let (_, lost) = suite.upload(&gateway, None, 100 + round).await.expect("uploaded");
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let gone = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        suite.settle(workload, None, &[], None).await.expect("settled");
        suite.collect(DryRun::Off).await;
        gateway.swept(&[&gone.container_handle], &[&gone.volumes[0].volume_handle]).await;
        let others = suite.volumes().await.into_iter().filter(|row| row.state() == InventoryState::Created);
        let named: Vec<_> = others.map(|row| row.volume_handle).filter(|handle| *handle != lost).collect();
        assert!(named.contains(&replica));

        let token = gateway.begin_report().await.expect("begun");
        let mut answers = tokio::task::JoinSet::new();
        for _ in 0..COPIES {
            let (gateway, token, named) = (gateway.clone(), token.clone(), named.clone());
            answers.spawn(async move { gateway.report_with(token, &named, &[]).await });
        }
        let (mut forgotten, mut lost_now) = (0, 0);
        while let Some(answer) = answers.join_next().await {
            let answer = answer.expect("no panic").expect("all of them are the newest");
            assert_eq!(answer.unknown_volume_handles, [] as [String; 0]);
            forgotten += answer.forgotten;
            lost_now += answer.lost;
        }
        assert_eq!((forgotten, lost_now), (2, 1), "each thing once");
        assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
        assert_eq!(suite.volume_state(&lost).await, Some(InventoryState::Lost));
    }
    suite.stop().await;
}

async fn each_stream_sends_every_item_once(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let mut streams =
        [gateway.watch().await.expect("a stream"), gateway.watch().await.expect("another stream")];
    let mut all = Vec::new();
    for _ in 0..3 {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let planned = gateway.prepare(workload, attempt, &[]).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        suite.settle(workload, None, &[], None).await.expect("settled");
        suite.collect(DryRun::Off).await;
        for stream in &mut streams {
            assert_eq!(containers_of(stream).await, [planned.container_handle.as_str()]);
        }
        all.push(planned.container_handle);
        // Items that exist although they were handed out are sent again, on each stream.
        gateway.report(&[], &all).await.expect("reported");
        for stream in &mut streams {
            let again: BTreeSet<_> = containers_of(stream).await.into_iter().collect();
            assert_eq!(again, all.iter().cloned().collect());
        }
    }
    suite.stop().await;
}

/// Returns the next message of a stream.
async fn containers_of(stream: &mut Streaming<WatchDestroyingResponse>) -> Vec<String> {
    let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("in time");
    message.expect("no error").expect("the stream is open").container_handles
}

async fn report_accepts_hundred_thousand_handles(database: TestDatabase) {
    const ATTEMPTS: usize = 100;
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (mut volumes, mut containers) = (Vec::new(), Vec::new());
    let workload = WorkloadId::new();
    let needs: Vec<PrepareVolume> = (0..1000)
        .map(|number| output(&number.to_string(), workload.output_artifact(&number.to_string())))
        .collect();
    for _ in 0..ATTEMPTS {
        let attempt = AttemptId::new();
        let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        volumes.extend(planned.volumes.into_iter().map(|volume| volume.volume_handle));
        containers.push(planned.container_handle);
    }
    let reported = gateway.report(&volumes, &containers).await.expect("reported");
    assert_eq!(reported, ReportResponse { receipt: reported.receipt.clone(), ..Default::default() });
    let missing = volumes.pop().expect("many");
    let reported = gateway.report(&volumes, &containers).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (0, 1));
    assert_eq!(suite.volume_state(&missing).await, Some(InventoryState::Lost));

    // A new incarnation: each volume must be confirmed.
    let gateway = suite.silent_gateway(gateway.worker, 2, 1);
    let reported = gateway.report(&volumes, &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (u64::try_from(ATTEMPTS).expect("a number"), 0));
    assert_eq!(believed(&suite).await.len(), 999, "all of a page but the one that is lost");

    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!(reported.forgotten, u64::try_from(ATTEMPTS * 1000).expect("a number"));
    assert_eq!(suite.volumes().await, []);
    let reported = gateway.report(&volumes, &[]).await.expect("reported");
    assert_eq!(reported.unknown_volume_handles.len(), 40_000, "as many as fit into an answer");
    suite.stop().await;
}
