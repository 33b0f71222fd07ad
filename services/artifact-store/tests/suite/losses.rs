//! Losses: notices, remaining replicas, artifacts at risk, and forgotten workers.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkerId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{DryRun, InventoryState, PlanOutcome};
use rpc::{Reason, Refusal};
use sea_orm::{ConnectionTrait, Statement};
use testing::databases::TestDatabase;
use tonic::Streaming;

use crate::{
    Answer, Gateway, PATIENCE, Suite, TEAM, Tables, assert_refused, digest, input, on_both_databases, output,
};

on_both_databases! {
    loss_is_reported_once_with_its_dependents,
    damaged_replica_is_lost_at_once_with_the_reason,
    item_found_within_grace_is_no_loss,
    loss_of_garbage_is_reported_after_restore,
    watcher_resumes_or_is_rejected_as_compacted,
    lost_replica_is_read_from_another_worker,
    artifacts_at_risk_with_workers_are_listed,
    worker_with_last_replica_is_not_forgotten,
    forgetting_worker_reports_losses_and_deletes_rows,
    ended_attempt_is_forgotten_with_its_worker,
    concurrent_losses_are_reported_in_order,
}

const GRACE: Duration = Duration::from_secs(60);

struct Watcher(Streaming<pb::WatchLostResponse>);

impl Watcher {
    async fn after(suite: &Suite, after_revision: u64) -> Self {
        let request = pb::WatchLostRequest { after_revision };
        Self(suite.inventory().watch_lost(request).await.expect("a stream").into_inner())
    }

    async fn message(&mut self) -> Answer<Option<pb::WatchLostResponse>> {
        let message = tokio::time::timeout(PATIENCE, self.0.message()).await.expect("in time");
        message.map_err(Refusal::from)
    }

    async fn next(&mut self) -> pb::WatchLostResponse {
        self.message().await.expect("no error").expect("the stream is open")
    }
}

/// Waits for the grace period, and lets the store record losses.
async fn record_losses(suite: &Suite) {
    suite.clock.advance(GRACE);
    suite.collect(DryRun::Off).await;
}

async fn copy(suite: &Suite, gateway: &Gateway, artifact: ArtifactId, content: u64) -> String {
    let handle = suite.plan(artifact, gateway.worker, TransferId::new()).await.expect("planned");
    gateway.complete(&handle, digest(content)).await.expect("complete");
    handle
}

async fn forget(suite: &Suite, worker: WorkerId, force: bool) -> Answer<pb::ForgetWorkerResponse> {
    let request = pb::ForgetWorkerRequest { worker_id: worker.to_string(), force, dry_run: false };
    Ok(suite.inventory().forget_worker(request).await?.into_inner())
}

/// Checks whether the worker could be forgotten without force.
async fn check(suite: &Suite, worker: WorkerId) -> Answer<pb::ForgetWorkerResponse> {
    let request = pb::ForgetWorkerRequest { worker_id: worker.to_string(), force: false, dry_run: true };
    Ok(suite.inventory().forget_worker(request).await?.into_inner())
}

async fn at_risk(suite: &Suite, without: &[WorkerId]) -> Vec<String> {
    let mut ids = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = pb::ListAtRiskRequest {
            team: TEAM.to_owned(),
            worker_ids: without.iter().map(ToString::to_string).collect(),
            page_size: 1,
            page_token,
            all_teams: false,
        };
        let page = suite.inventory().list_at_risk(request).await.expect("listed").into_inner();
        ids.extend(page.artifacts.into_iter().map(|artifact| artifact.artifact_id));
        if page.next_page_token.is_empty() {
            ids.reverse();
            return ids;
        }
        page_token = page.next_page_token;
    }
}

async fn loss_is_reported_once_with_its_dependents(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (build, owner) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, owner, None).await.expect("a build");
    let (artifact, replica) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let other = copy(&suite, &elsewhere, artifact, 1).await;
    let (reader, attempt) = (WorkloadId::new(), AttemptId::new());
    suite.pin(reader, &[artifact], Some(build)).await.expect("pinned");
    let planned = gateway.prepare(reader, attempt, &[]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let mut watcher = Watcher::after(&suite, 0).await;

    let lost_at = Some(rpc::timestamp(suite.clock.now()));
    let reported = gateway.report(&[], &[]).await.expect("reported");
    assert_eq!(reported.lost, 2);
    suite.clock.advance(GRACE - Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    gateway.report(&[], &[]).await.expect("reported");
    suite.clock.advance(Duration::from_secs(1));
    suite.collect(DryRun::Only).await;
    for _ in 0..2 {
        suite.collect(DryRun::Off).await;
    }
    let (of_container, of_replica) = (watcher.next().await, watcher.next().await);
    assert_eq!((of_container.revision, of_replica.revision), (1, 2));
    assert_eq!(of_container.container_handle, planned.container_handle);
    assert_eq!(of_container.workload_ids, [reader.to_string()]);
    assert_eq!((of_replica.volume_handle.as_str(), of_replica.lost_at), (replica.as_str(), lost_at));
    assert_eq!(of_replica.worker_id, gateway.worker.to_string());
    assert_eq!(of_replica.artifact_id, artifact.to_string());
    assert_eq!(of_replica.workload_ids, [reader.to_string()]);
    assert_eq!(of_replica.build_ids, [build.to_string()]);
    assert_eq!(of_replica.kept_by.len(), 2, "{:?}", of_replica.kept_by);
    let left: Vec<_> = of_replica.replicas.iter().map(|replica| replica.volume_handle.as_str()).collect();
    assert_eq!(left, [other.as_str()]);

    // The next notice has the next revision, so that none was sent twice.
    elsewhere.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    let next = watcher.next().await;
    assert_eq!((next.revision, next.volume_handle.as_str(), next.replicas.len()), (3, other.as_str(), 0));
    // A lost replica that was found is reported again when it is lost again.
    gateway.report(std::slice::from_ref(&replica), &[]).await.expect("reported");
    gateway.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    assert_eq!(watcher.next().await.volume_handle, replica);
    suite.stop().await;
}

async fn damaged_replica_is_lost_at_once_with_the_reason(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    copy(&suite, &elsewhere, artifact, 1).await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    suite.pin(workload, &[artifact], None).await.expect("pinned");
    let needs = [input("in", artifact)];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(planned.volumes[0].parent_handle, replica);
    let loss_reason = async |id: &str| {
        let request = pb::ExplainRequest { team: TEAM.to_owned(), id: id.to_owned() };
        suite.artifacts().explain(request).await.expect("explained").into_inner().loss_reason
    };
    // Another worker has no say, and a listing of an earlier time still names the replica.
    elsewhere.lose(&replica, "is not mine").await.expect("ignored");
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
    let (container, inputs) =
        (planned.container_handle, [planned.volumes[0].volume_handle.clone(), replica.clone()]);
    let older = gateway.begin_report().await.expect("begun");
    for _ in 0..2 {
        gateway.lose(&replica, "is damaged: a file has changed").await.expect("recorded");
    }
    gateway.report_with(older, &inputs, std::slice::from_ref(&container)).await.expect("reported");
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Lost));
    for id in [artifact.to_string(), replica.clone()] {
        assert_eq!(loss_reason(&id).await, "is damaged: a file has changed");
    }
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(planned.volumes[0].missing_artifact_id, artifact.to_string(), "it is copied again");

    gateway.report(&inputs, std::slice::from_ref(&container)).await.expect("reported");
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
    assert_eq!((loss_reason(&replica).await, loss_reason(&artifact.to_string()).await), Default::default());
    suite.stop().await;
}

async fn item_found_within_grace_is_no_loss(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (_, found) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (_, lost) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let volume = async |handle: &str| {
        let request = pb::GetVolumeRequest { volume_handle: handle.to_owned() };
        suite.inventory().get_volume(request).await.expect("there").into_inner().volume.expect("the volume")
    };
    gateway.report(&[], &[]).await.expect("reported");
    assert_eq!(volume(&found).await.lost_at, Some(rpc::timestamp(suite.clock.now())));
    suite.clock.advance(GRACE - Duration::from_secs(1));
    gateway.report(std::slice::from_ref(&found), &[]).await.expect("reported");
    assert_eq!(volume(&found).await.lost_at, None);
    record_losses(&suite).await;
    let mut watcher = Watcher::after(&suite, 0).await;
    assert_eq!(watcher.next().await.volume_handle, lost);
    // The grace period restarts.
    gateway.report(&[], &[]).await.expect("reported");
    suite.clock.advance(GRACE - Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    gateway.report(&[found, lost], &[]).await.expect("reported");
    let (_, third) = suite.upload(&gateway, None, 3).await.expect("uploaded");
    gateway.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    let loss = [watcher.next().await, watcher.next().await, watcher.next().await];
    assert_eq!(loss.map(|loss| loss.revision), [2, 3, 4], "each of the three, once, and none before");
    assert_eq!(Watcher::after(&suite, 3).await.next().await.volume_handle, third);
    suite.stop().await;
}

/// Returns the number of lost volumes without a recorded loss, garbage or not.
async fn unnoticed(suite: &Suite) -> i64 {
    let connection = sea_orm::Database::connect(suite.url()).await.expect("the database");
    let sql = "SELECT COUNT(*) AS n FROM volumes WHERE lost_at IS NOT NULL AND loss_noticed = FALSE";
    let asked = Statement::from_string(connection.get_database_backend(), sql);
    let row = connection.query_one_raw(asked).await.expect("asked").expect("a row");
    connection.close().await.expect("closed");
    row.try_get("", "n").expect("a number")
}

async fn loss_of_garbage_is_reported_after_restore(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.tombstone = 10 * GRACE).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("a build");
    let (artifact, lost) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let left = copy(&suite, &elsewhere, artifact, 1).await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [output("out", workload.output_artifact("out"))];
    gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    assert_eq!(gateway.report(&[], &[]).await.expect("reported").lost, 3);
    // One is deleted with its artifact, the other for a reason of its own.
    suite.delete_build(build).await.expect("deleted");
    suite.end_attempt(workload, attempt).await.expect("ended");
    suite.collect(DryRun::Off).await;
    for volume in suite.volumes().await {
        assert_eq!(volume.state(), InventoryState::Destroying, "{volume:?}");
    }
    assert_eq!(unnoticed(&suite).await, 2);
    record_losses(&suite).await;
    assert_eq!(unnoticed(&suite).await, 0);

    let request = pb::UndeleteRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        ..pb::UndeleteRequest::default()
    };
    suite.artifacts().undelete(request).await.expect("there is another replica");
    assert_eq!(suite.volume_state(&lost).await, Some(InventoryState::Lost));
    for _ in 0..2 {
        suite.collect(DryRun::Off).await;
    }
    let mut watcher = Watcher::after(&suite, 0).await;
    let loss = watcher.next().await;
    assert_eq!((loss.revision, &loss.volume_handle), (1, &lost), "losses of garbage are not reported");
    assert_eq!(unnoticed(&suite).await, 0);
    // The next notice has the next revision, so that none was sent twice.
    elsewhere.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    let next = watcher.next().await;
    assert_eq!((next.revision, next.volume_handle), (2, left));
    suite.stop().await;
}

async fn watcher_resumes_or_is_rejected_as_compacted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    for content in 0..3 {
        suite.upload(&gateway, None, content).await.expect("uploaded");
    }
    gateway.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    let mut watcher = Watcher::after(&suite, 1).await;
    assert_eq!([watcher.next().await.revision, watcher.next().await.revision], [2, 3]);
    assert_refused(Watcher::after(&suite, 4).await.message().await, Reason::Compacted);

    // After a day they are forgotten. A watcher that received them all can continue.
    suite.clock.advance(Duration::from_secs(25 * 3600));
    suite.collect(DryRun::Off).await;
    for revision in [1, 2] {
        assert_refused(Watcher::after(&suite, revision).await.message().await, Reason::Compacted);
    }
    let (_, lost) = suite.upload(&gateway, None, 9).await.expect("uploaded");
    gateway.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;
    for revision in [0, 3] {
        let loss = Watcher::after(&suite, revision).await.next().await;
        assert_eq!((loss.revision, &loss.volume_handle), (4, &lost));
    }
    assert_eq!(watcher.next().await.revision, 4);
    suite.stop().await;
    assert_eq!(watcher.message().await.expect("no error"), None, "the stream ends with the store");
}

async fn lost_replica_is_read_from_another_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let (artifact, lost) = suite.upload(&here, None, 1).await.expect("uploaded");
    let left = copy(&suite, &there, artifact, 1).await;
    here.report(&[], &[]).await.expect("reported");
    record_losses(&suite).await;

    let (workload, attempt, transfer) = (WorkloadId::new(), AttemptId::new(), TransferId::new());
    let located = suite.pin(workload, &[artifact], None).await.expect("there is a replica");
    let replicas: Vec<_> = located[0].replicas.iter().map(|replica| &replica.volume_handle).collect();
    assert_eq!(replicas, [&left]);
    let needs = [input("in", artifact)];
    let missing = here.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(missing.volumes[0].missing_artifact_id, artifact.to_string());
    let request = pb::PlanReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: here.worker.to_string(),
        transfer_id: transfer.to_string(),
    };
    let planned = suite.replicas().plan_replica(request).await.expect("planned").into_inner();
    assert_eq!(planned.outcome(), PlanOutcome::Created, "what is lost is no copy");
    here.complete(&planned.volume_handle, digest(1)).await.expect("complete");
    let prepared = here.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(prepared.volumes[0].parent_handle, planned.volume_handle);
    assert_eq!(suite.volume_state(&lost).await, Some(InventoryState::Lost));
    suite.stop().await;
}

async fn artifacts_at_risk_with_workers_are_listed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("a build");
    let (on_one, _) = suite.upload(&one, None, 1).await.expect("uploaded");
    let (on_both, _) = suite.upload(&one, None, 2).await.expect("uploaded");
    let second = copy(&suite, &two, on_both, 2).await;
    let (on_two, of_two) = suite.upload(&two, None, 3).await.expect("uploaded");
    suite.upload(&one, Some(build), 4).await.expect("uploaded");
    suite.delete_build(build).await.expect("deleted: it is not kept any more");
    suite.create(ArtifactId::new(), None).await.expect("open, and without a replica");
    let ids = [on_one, on_both, on_two].map(|id| id.to_string());
    let [on_one, on_both, on_two] = ids.each_ref().map(String::as_str);

    assert_eq!(at_risk(&suite, &[]).await, [] as [String; 0]);
    assert_eq!(at_risk(&suite, &[one.worker]).await, [on_one]);
    assert_eq!(at_risk(&suite, &[two.worker]).await, [on_two]);
    assert_eq!(at_risk(&suite, &[one.worker, two.worker]).await, [on_one, on_both, on_two]);
    two.report(&[second], &[]).await.expect("reported");
    assert_eq!(at_risk(&suite, &[]).await, [on_two], "it has none left at all");
    two.report(std::slice::from_ref(&of_two), &[]).await.expect("reported");
    assert_eq!(at_risk(&suite, &[one.worker]).await, [on_one, on_both], "its other replica is lost");
    // A restarted machine has not reported its volumes.
    let two = suite.silent_gateway(two.worker, 2, 1);
    two.begin_report().await.expect("it may speak");
    assert_eq!(at_risk(&suite, &[]).await, [on_two]);
    assert_eq!(at_risk(&suite, &[one.worker]).await, [on_one, on_both, on_two]);
    two.report(&[of_two], &[]).await.expect("reported");
    assert_eq!(at_risk(&suite, &[]).await, [] as [String; 0]);
    // The replica is lost and recorded, or its worker is forgotten.
    two.report(&[], &[]).await.expect("reported");
    suite.clock.advance(GRACE);
    suite.collect(DryRun::Off).await;
    assert_eq!(at_risk(&suite, &[]).await, [on_two]);
    forget(&suite, one.worker, true).await.expect("forced");
    assert_eq!(at_risk(&suite, &[]).await, [on_one, on_both, on_two]);
    let foreign = pb::ListAtRiskRequest { team: "other".to_owned(), ..pb::ListAtRiskRequest::default() };
    let all = pb::ListAtRiskRequest { all_teams: true, ..foreign.clone() };
    assert_eq!(suite.inventory().list_at_risk(foreign).await.expect("listed").into_inner().artifacts, []);
    assert_eq!(suite.inventory().list_at_risk(all).await.expect("listed").into_inner().artifacts.len(), 3);
    suite.stop().await;
}

async fn worker_with_last_replica_is_not_forgotten(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gone, stays) = (suite.gateway().await, suite.gateway().await);
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("a build");
    suite.upload(&gone, Some(build), 1).await.expect("uploaded");
    suite.delete_build(build).await.expect("deleted: it is not kept any more");
    let (artifact, replica) = suite.upload(&gone, None, 2).await.expect("uploaded");
    let before = suite.volumes().await;
    let refused = forget(&suite, gone.worker, false).await.expect_err("it is kept");
    assert_eq!(refused.about.get("artifact_id"), Some(&artifact.to_string()));
    assert_eq!(refused.about.get("artifacts").map(String::as_str), Some("1"));
    assert_refused::<()>(Err(refused), Reason::LastReplica);
    assert_eq!(suite.volumes().await, before, "nothing was changed");
    assert_refused(check(&suite, gone.worker).await, Reason::LastReplica);
    gone.begin_report().await.expect("it may speak");

    // An unconfirmed replica does not count.
    let second = copy(&suite, &stays, artifact, 2).await;
    let reborn = suite.silent_gateway(stays.worker, 2, 1);
    reborn.begin_report().await.expect("it may speak");
    assert_refused(forget(&suite, gone.worker, false).await, Reason::LastReplica);
    reborn.report(std::slice::from_ref(&second), &[]).await.expect("reported");
    let before = suite.volumes().await;
    check(&suite, gone.worker).await.expect("there is another");
    assert_eq!(suite.volumes().await, before, "nothing was changed");
    let forgotten = forget(&suite, gone.worker, false).await.expect("there is another");
    assert_eq!((forgotten.volumes, forgotten.containers), (2, 0));
    assert_eq!(suite.volume_state(&replica).await, None);
    assert_refused(forget(&suite, stays.worker, false).await, Reason::LastReplica);
    forget(&suite, stays.worker, true).await.expect("forced");
    assert_eq!(suite.get(artifact).await.expect("its name is there").replicas, []);
    suite.stop().await;
}

async fn forgetting_worker_reports_losses_and_deletes_rows(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let child = planned.volumes[0].volume_handle.clone();
    let late = gateway.begin_report().await.expect("begun");
    let forgotten = forget(&suite, gateway.worker, true).await.expect("forced");
    assert_eq!((forgotten.volumes, forgotten.containers), (2, 1));
    assert_eq!((suite.volumes().await, suite.containers().await), (vec![], vec![]));
    assert_eq!(
        forget(&suite, gateway.worker, false).await.expect("unknown now"),
        pb::ForgetWorkerResponse::default()
    );
    let mut watcher = Watcher::after(&suite, 0).await;
    let loss = [watcher.next().await, watcher.next().await, watcher.next().await];
    assert_eq!(loss[0].container_handle, planned.container_handle);
    assert_eq!(loss[1].artifact_id, artifact.to_string());
    assert_eq!([&loss[1].volume_handle, &loss[2].volume_handle], [&replica, &child]);

    // The worker returns. Its old volumes are unknown, and a report of the earlier time has no
    // effect.
    let (_, fresh) = loop {
        match suite.upload(&gateway, None, 2).await {
            Ok(uploaded) => break uploaded,
            // The store must record the session again.
            Err(refusal) => {
                assert!(refusal.is(Reason::NotAttended), "{refusal}");
                gateway.begin_report().await.ok();
            }
        }
    };
    assert_refused(gateway.report_with(late, &[], &[]).await, Reason::StaleReport);
    assert_eq!(suite.volume_state(&fresh).await, Some(InventoryState::Created));
    let reported =
        gateway.report(&[replica.clone(), fresh], std::slice::from_ref(&planned.container_handle)).await;
    let reported = reported.expect("reported");
    assert_eq!(reported.unknown_volume_handles, [replica]);
    assert_eq!(reported.unknown_container_handles, [planned.container_handle]);
    suite.stop().await;
}

async fn ended_attempt_is_forgotten_with_its_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    for gateway in [&gateway, &other] {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let needs = [output("out", workload.output_artifact("out"))];
        gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        gateway.prepared(attempt).await.expect("recorded");
        suite.settle(workload, None, &[], None).await.expect("settled");
    }
    let remembered = async || {
        let rows = Tables::open(&suite.url()).await.rows().await;
        rows.iter().filter(|row| row.starts_with("attempts: ")).count()
    };
    // All of their remains wait for deletion.
    suite.clock.advance(Duration::from_secs(25 * 3600));
    for _ in 0..2 {
        suite.collect(DryRun::Off).await;
        assert_eq!(remembered().await, 2);
    }
    forget(&suite, gateway.worker, false).await.expect("nothing there is kept");
    suite.collect(DryRun::Off).await;
    assert_eq!(remembered().await, 1, "the one on the other worker waits");
    suite.stop().await;
}

async fn concurrent_losses_are_reported_in_order(database: TestDatabase) {
    const WORKERS: usize = 8;
    const EACH: u64 = 20;
    let suite = Suite::start(database).await;
    let mut workers = Vec::new();
    for worker in 0..WORKERS {
        let gateway = suite.gateway().await;
        for content in 0..EACH {
            suite.upload(&gateway, None, content).await.expect("uploaded");
        }
        if worker % 2 == 0 {
            gateway.report(&[], &[]).await.expect("reported");
        }
        workers.push(gateway.worker);
    }
    suite.clock.advance(GRACE);
    let mut watcher = Watcher::after(&suite, 0).await;
    let last = u64::try_from(WORKERS).expect("few") * EACH;
    let watching = async {
        for revision in 1..=last {
            assert_eq!(watcher.next().await.revision, revision);
        }
    };
    let forgetting = futures::future::join_all(workers.iter().map(|worker| forget(&suite, *worker, true)));
    let (forgotten, ..) =
        tokio::join!(forgetting, suite.collect(DryRun::Off), suite.collect(DryRun::Off), watching);
    assert!(forgotten.iter().all(Result::is_ok), "{forgotten:?}");
    assert_refused(Watcher::after(&suite, last + 1).await.message().await, Reason::Compacted);
    suite.stop().await;
}
