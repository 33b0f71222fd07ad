//! Deletions that gateways and operators request.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{DryRun, InventoryState};
use testing::databases::TestDatabase;

use crate::{Answer, Gateway, Suite, TEAM, assert_refused, digest, input, on_both_databases, output};

on_both_databases! {
    failed_container_and_volumes_are_marked_at_once,
    touched_container_outlives_its_attempt,
    operator_marks_container_before_its_volumes,
    gateway_cannot_mark_items_of_another_worker,
    last_replica_of_kept_artifact_is_not_dropped,
    dropped_replica_is_swept_after_its_children,
    one_of_two_concurrently_dropped_replicas_stays,
}

async fn failed(
    suite: &Suite,
    gateway: &Gateway,
    planned: &pb::PrepareResponse,
    replicas: &[&str],
) -> Answer<()> {
    let volumes = planned.volumes.iter().map(|volume| volume.volume_handle.clone());
    let request = pb::FailPrepareRequest {
        session_credential: gateway.credential.clone(),
        container_handle: planned.container_handle.clone(),
        volume_handles: volumes.chain(replicas.iter().map(ToString::to_string)).collect(),
        reason: "the disk is full".to_owned(),
    };
    suite.inventory().fail_prepare(request).await?;
    Ok(())
}

async fn touch(suite: &Suite, gateway: &Gateway, attempt: AttemptId) -> Answer<()> {
    let request =
        pb::TouchRequest { session_credential: gateway.credential.clone(), attempt_id: attempt.to_string() };
    suite.inventory().touch(request).await?;
    Ok(())
}

async fn mark_volume(suite: &Suite, gateway: Option<&Gateway>, handle: &str) -> Answer<()> {
    let request = pb::MarkVolumeRequest {
        session_credential: gateway.map(|gateway| gateway.credential.clone()).unwrap_or_default(),
        volume_handle: handle.to_owned(),
        reason: "I say so".to_owned(),
    };
    suite.inventory().mark_volume(request).await?;
    Ok(())
}

async fn mark_container(suite: &Suite, gateway: Option<&Gateway>, handle: &str) -> Answer<()> {
    let request = pb::MarkContainerRequest {
        session_credential: gateway.map(|gateway| gateway.credential.clone()).unwrap_or_default(),
        container_handle: handle.to_owned(),
        reason: "I say so".to_owned(),
    };
    suite.inventory().mark_container(request).await?;
    Ok(())
}

fn dropping(artifact: ArtifactId, worker: WorkerId) -> pb::DropReplicaRequest {
    pb::DropReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: worker.to_string(),
        reason: "the disk is needed".to_owned(),
        force: false,
    }
}

async fn drop_replica(suite: &Suite, request: pb::DropReplicaRequest) -> Answer<()> {
    suite.replicas().drop_replica(request).await?;
    Ok(())
}

/// Returns a volume by its handle.
async fn volume(suite: &Suite, handle: &str) -> Answer<pb::Volume> {
    let request = pb::GetVolumeRequest { volume_handle: handle.to_owned() };
    Ok(suite.inventory().get_volume(request).await?.into_inner().volume.expect("the volume"))
}

async fn container(suite: &Suite, handle: &str) -> Answer<pb::Container> {
    let request = pb::GetContainerRequest { container_handle: handle.to_owned() };
    Ok(suite.inventory().get_container(request).await?.into_inner().container.expect("the container"))
}

/// Makes another replica, on the worker of `gateway`.
async fn copy(suite: &Suite, gateway: &Gateway, artifact: ArtifactId, content: u64) -> String {
    let handle = suite.plan(artifact, gateway.worker, TransferId::new()).await.expect("planned");
    gateway.complete(&handle, digest(content)).await.expect("complete");
    handle
}

async fn failed_container_and_volumes_are_marked_at_once(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.gc_grace = Duration::from_secs(300)).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [input("in", artifact), output("out", workload.output_artifact("out"))];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    let [of_input, of_output] = [0, 1].map(|index: usize| planned.volumes[index].volume_handle.as_str());

    assert_refused(failed(&suite, &gateway, &planned, &[&replica]).await, Reason::InvalidField);
    failed(&suite, &other, &planned, &[]).await.expect("none of these are its own");
    for handle in [of_input, of_output] {
        assert_eq!(volume(&suite, handle).await.expect("there").state(), InventoryState::Creating);
    }
    let stranger = WorkerId::new().to_string();
    for _ in 0..2 {
        failed(&suite, &gateway, &planned, &[&stranger]).await.expect("marked, though the attempt goes on");
    }
    let marked = container(&suite, &planned.container_handle).await.expect("there");
    assert_eq!(
        (marked.state(), marked.mark_reason.as_str()),
        (InventoryState::Destroying, "the disk is full")
    );
    assert_eq!(volume(&suite, of_output).await.expect("there").mark_reason, "the disk is full");
    assert_eq!(volume(&suite, &replica).await.expect("there").state(), InventoryState::Created);
    gateway.swept(&[&planned.container_handle], &[of_input, of_output]).await;
    gateway.report(std::slice::from_ref(&replica), &[]).await.expect("reported");
    assert_refused(volume(&suite, of_input).await, Reason::VolumeNotFound);
    assert_refused(container(&suite, &planned.container_handle).await, Reason::ContainerNotFound);

    // The attempt may be prepared again with new handles, but not by an older session.
    let again = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_ne!(again.container_handle, planned.container_handle);
    assert_ne!(again.volumes[1].volume_handle, of_output);
    suite.silent_gateway(gateway.worker, 1, 2).begin_report().await.expect("it may speak");
    assert_refused(failed(&suite, &gateway, &again, &[]).await, Reason::StaleSession);
    suite.stop().await;
}

async fn touched_container_outlives_its_attempt(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.gc_grace = Duration::from_secs(300)).await;
    let gateway = suite.gateway().await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [output("out", workload.output_artifact("out"))];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    assert_eq!(container(&suite, &planned.container_handle).await.expect("there").touched_at, None);
    suite.settle(workload, None, &[], None).await.expect("settled");
    assert_eq!(suite.collect(DryRun::Off).await, []);

    for _ in 0..3 {
        suite.clock.advance(Duration::from_secs(299));
        touch(&suite, &gateway, attempt).await.expect("noted");
        assert_eq!(suite.collect(DryRun::Off).await, [], "it is in use");
    }
    let touched = container(&suite, &planned.container_handle).await.expect("there").touched_at;
    assert_eq!(touched, Some(rpc::timestamp(suite.clock.now())));
    suite.clock.advance(Duration::from_secs(299));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_secs(1));
    let collected = suite.collect(DryRun::Off).await;
    assert_eq!(collected.len(), 2, "it, and with it its volume: {collected:?}");

    assert_refused(touch(&suite, &gateway, attempt).await, Reason::ContainerNotFound);
    let elsewhere = suite.gateway().await;
    assert_refused(touch(&suite, &elsewhere, attempt).await, Reason::ContainerNotFound);
    suite.silent_gateway(gateway.worker, 1, 2).begin_report().await.expect("it may speak");
    assert_refused(touch(&suite, &gateway, attempt).await, Reason::StaleSession);
    suite.stop().await;
}

async fn operator_marks_container_before_its_volumes(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let of_input = planned.volumes[0].volume_handle.as_str();

    assert_refused(mark_volume(&suite, None, of_input).await, Reason::VolumeInUse);
    assert_refused(mark_volume(&suite, None, &replica).await, Reason::InvalidField);
    let stranger = WorkerId::new().to_string();
    assert_refused(mark_volume(&suite, None, &stranger).await, Reason::VolumeNotFound);
    assert_refused(mark_container(&suite, None, &stranger).await, Reason::ContainerNotFound);
    let silent = pb::MarkContainerRequest {
        container_handle: planned.container_handle.clone(),
        ..pb::MarkContainerRequest::default()
    };
    let silent = suite.inventory().mark_container(silent).await.map_err(rpc::Refusal::from);
    assert_refused(silent, Reason::InvalidField);
    assert_eq!(
        container(&suite, &planned.container_handle).await.expect("there").state(),
        InventoryState::Created
    );

    for _ in 0..2 {
        mark_container(&suite, None, &planned.container_handle).await.expect("marked");
    }
    assert_eq!(container(&suite, &planned.container_handle).await.expect("there").mark_reason, "I say so");
    for _ in 0..2 {
        mark_volume(&suite, None, of_input).await.expect("marked");
    }
    gateway.swept(&[&planned.container_handle], &[of_input]).await;
    assert_eq!(volume(&suite, &replica).await.expect("there").state(), InventoryState::Created);
    suite.stop().await;
}

async fn gateway_cannot_mark_items_of_another_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [output("out", workload.output_artifact("out"))];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    let of_output = planned.volumes[0].volume_handle.as_str();

    let refused = mark_container(&suite, Some(&other), &planned.container_handle).await;
    assert_refused(refused, Reason::ContainerNotFound);
    assert_refused(mark_volume(&suite, Some(&other), of_output).await, Reason::VolumeNotFound);
    mark_container(&suite, Some(&gateway), &planned.container_handle).await.expect("its own");
    let newer = suite.silent_gateway(gateway.worker, 1, 2);
    newer.begin_report().await.expect("it may speak");
    assert_refused(mark_volume(&suite, Some(&gateway), of_output).await, Reason::StaleSession);
    mark_volume(&suite, Some(&newer), of_output).await.expect("its own");
    newer.swept(&[&planned.container_handle], &[of_output]).await;
    suite.stop().await;
}

async fn last_replica_of_kept_artifact_is_not_dropped(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, first) = suite.upload(&there, None, 1).await.expect("uploaded");
    let refused = drop_replica(&suite, dropping(artifact, there.worker)).await;
    assert_refused(refused, Reason::LastReplica);
    let foreign = pb::DropReplicaRequest { team: "other".to_owned(), ..dropping(artifact, there.worker) };
    assert_refused(drop_replica(&suite, foreign).await, Reason::ArtifactNotFound);

    // A lost or unconfirmed replica does not count.
    let second = copy(&suite, &here, artifact, 1).await;
    here.report(&[], &[]).await.expect("reported");
    assert_refused(drop_replica(&suite, dropping(artifact, there.worker)).await, Reason::LastReplica);
    here.report(std::slice::from_ref(&second), &[]).await.expect("reported");
    for _ in 0..2 {
        drop_replica(&suite, dropping(artifact, there.worker)).await.expect("there is another");
    }
    there.swept(&[], &[&first]).await;
    let left = suite.get(artifact).await.expect("there").replicas;
    assert_eq!(left.iter().map(|replica| &replica.volume_handle).collect::<Vec<_>>(), [&second]);

    assert_refused(drop_replica(&suite, dropping(artifact, here.worker)).await, Reason::LastReplica);
    let forced = pb::DropReplicaRequest { force: true, ..dropping(artifact, here.worker) };
    drop_replica(&suite, forced).await.expect("forced");
    here.swept(&[], &[&second]).await;

    // An artifact without references is garbage anyway.
    let (unkept, replica) = suite.upload(&there, None, 2).await.expect("uploaded");
    suite.clock.advance(Duration::from_secs(13 * 3600));
    drop_replica(&suite, dropping(unkept, there.worker)).await.expect("it is not needed");
    there.swept(&[], &[&replica]).await;
    suite.stop().await;
}

async fn dropped_replica_is_swept_after_its_children(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&there, None, 1).await.expect("uploaded");
    copy(&suite, &here, artifact, 1).await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [input("in", artifact)];
    let planned = there.prepare(workload, attempt, &needs).await.expect("prepared");
    there.prepared(attempt).await.expect("recorded");
    let child = planned.volumes[0].volume_handle.as_str();
    drop_replica(&suite, dropping(artifact, there.worker)).await.expect("there is another");

    let late = there.prepare(WorkloadId::new(), AttemptId::new(), &needs).await.expect("prepared");
    assert_eq!(late.volumes[0].missing_artifact_id, artifact.to_string(), "nothing is made from it any more");
    // An item that is marked later is handed out, and the replica is not.
    let (other_workload, other_attempt) = (WorkloadId::new(), AttemptId::new());
    let other = there.prepare(other_workload, other_attempt, &[]).await.expect("prepared");
    mark_container(&suite, None, &other.container_handle).await.expect("marked");
    assert_eq!(there.swept(&[&other.container_handle], &[]).await, [] as [String; 0]);
    assert_eq!(volume(&suite, &replica).await.expect("there").state(), InventoryState::Destroying);

    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    let order = there.swept(&[&planned.container_handle], &[child, &replica]).await;
    assert_eq!(order, [child, replica.as_str()]);
    suite.stop().await;
}

async fn one_of_two_concurrently_dropped_replicas_stays(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    for content in 0..10 {
        let (artifact, _) = suite.upload(&one, None, content).await.expect("uploaded");
        copy(&suite, &two, artifact, content).await;
        let dropped = tokio::join!(
            drop_replica(&suite, dropping(artifact, one.worker)),
            drop_replica(&suite, dropping(artifact, two.worker)),
        );
        let refused = [&dropped.0, &dropped.1].iter().filter(|answer| answer.is_err()).count();
        assert_eq!(refused, 1, "{dropped:?}");
        assert_eq!(suite.get(artifact).await.expect("there").replicas.len(), 1);
    }
    suite.stop().await;
}
