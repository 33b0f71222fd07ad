//! Copies of sealed artifacts between workers: makers, claims and remains.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{DryRun, InventoryState, PlanOutcome};
use testing::databases::TestDatabase;

use crate::{Answer, Suite, TEAM, assert_refused, digest, input, on_both_databases};

on_both_databases! {
    copied_artifact_is_found_on_its_worker,
    locate_reports_verification_of_replicas,
    one_of_concurrent_callers_makes_the_copy,
    copy_is_made_again_after_claim_expires,
    abandoned_copy_leaves_nothing_and_keeps_artifact,
    unconfirmed_replica_is_not_copied_again,
    disk_usage_of_own_volumes_is_recorded,
}

async fn plan(
    suite: &Suite,
    artifact: ArtifactId,
    worker: WorkerId,
    transfer: TransferId,
) -> Answer<pb::PlanReplicaResponse> {
    let request = pb::PlanReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: worker.to_string(),
        transfer_id: transfer.to_string(),
    };
    Ok(suite.replicas().plan_replica(request).await?.into_inner())
}

async fn progress(suite: &Suite, transfer: TransferId) -> Answer<()> {
    let request = pb::ProgressRequest { transfer_id: transfer.to_string(), team: TEAM.to_owned() };
    suite.replicas().progress(request).await?;
    Ok(())
}

async fn copied_artifact_is_found_on_its_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, source) = suite.upload(&there, None, 1).await.expect("uploaded");
    let (workload, attempt, transfer) = (WorkloadId::new(), AttemptId::new(), TransferId::new());
    suite.pin(workload, &[artifact], None).await.expect("pinned");
    let needs = [input("in", artifact)];
    let missing = here.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(missing.volumes[0].missing_artifact_id, artifact.to_string());

    let planned = plan(&suite, artifact, here.worker, transfer).await.expect("planned");
    assert_eq!(planned.outcome(), PlanOutcome::Created);
    assert_eq!((planned.digest.as_ref(), planned.size_bytes), (digest(1).as_bytes() as &[u8], 10));
    assert_eq!(planned.transfer_id, transfer.to_string());
    assert_ne!(planned.volume_handle, source);
    let again = plan(&suite, artifact, here.worker, transfer).await.expect("planned again");
    assert_eq!(again, planned);

    // An unfinished copy is neither a replica nor an input.
    let on_its_way = here.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(on_its_way.volumes[0].missing_artifact_id, artifact.to_string());
    assert_eq!(suite.get(artifact).await.expect("it is there").replicas.len(), 1);
    assert_refused(here.complete(&planned.volume_handle, digest(2)).await, Reason::ClaimLost);
    assert_refused(there.complete(&planned.volume_handle, digest(1)).await, Reason::VolumeNotFound);

    here.complete(&planned.volume_handle, digest(1)).await.expect("complete");
    let located = suite.pin(workload, &[artifact], None).await.expect("pinned");
    let replicas: Vec<_> = located[0].replicas.iter().map(|replica| replica.worker_id.as_str()).collect();
    assert_eq!(replicas, [there.worker.to_string(), here.worker.to_string()]);
    assert_eq!(located[0].replicas[1].verification(), pb::Verification::Verified);
    let local = here.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(local.volumes[0].parent_handle, planned.volume_handle);
    assert_eq!(local.volumes[0].missing_artifact_id, "");
    for transfer in [transfer, TransferId::new()] {
        let done = plan(&suite, artifact, here.worker, transfer).await.expect("asked");
        assert_eq!((done.outcome(), &done.volume_handle), (PlanOutcome::Complete, &planned.volume_handle));
        assert_eq!(done.transfer_id, "");
    }
    let at_the_source = plan(&suite, artifact, there.worker, TransferId::new()).await.expect("asked");
    assert_eq!((at_the_source.outcome(), at_the_source.volume_handle), (PlanOutcome::Complete, source));
    let taken = plan(&suite, artifact, there.worker, transfer).await;
    assert_refused(taken, Reason::InvalidField);
    suite.stop().await;
}

async fn locate_reports_verification_of_replicas(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateways = [(); 3].map(|()| WorkerId::new()).map(|worker| suite.silent_gateway(worker, 1, 1));
    let verifications = [pb::Verification::Reported, pb::Verification::Verified, pb::Verification::Reported];
    let artifact = ArtifactId::new();
    suite.create(artifact, None).await.expect("created");
    for (index, (gateway, verifications)) in gateways.iter().zip(verifications).enumerate() {
        gateway.report(&[], &[]).await.expect("reported");
        let planned = plan(&suite, artifact, gateway.worker, TransferId::new()).await.expect("planned");
        gateway.complete_as(&planned.volume_handle, digest(1), verifications).await.expect("complete");
        if index == 0 {
            suite.seal(artifact, digest(1)).await.expect("sealed");
        }
    }
    let request = pb::LocateRequest { team: TEAM.to_owned(), artifact_ids: vec![artifact.to_string()] };
    let located = suite.artifacts().locate(request).await.expect("located").into_inner().locations;
    let listed: Vec<_> = located[0]
        .replicas
        .iter()
        .map(|replica| (replica.worker_id.clone(), replica.verification()))
        .collect();
    let expected = gateways.iter().map(|gateway| gateway.worker.to_string()).zip(verifications);
    assert_eq!(listed, expected.collect::<Vec<_>>());
    suite.stop().await;
}

async fn one_of_concurrent_callers_makes_the_copy(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    for content in 0..10 {
        let (artifact, _) = suite.upload(&there, None, content).await.expect("uploaded");
        let ask = || async {
            let transfer = TransferId::new();
            (transfer, plan(&suite, artifact, here.worker, transfer).await.expect("planned"))
        };
        let (a, b, c, d) = tokio::join!(ask(), ask(), ask(), ask());
        let answers = [a, b, c, d];
        let (maker, made) = answers
            .iter()
            .find(|(_, planned)| planned.outcome() == PlanOutcome::Created)
            .expect("one caller makes it");
        for (transfer, planned) in &answers {
            assert_eq!(planned.outcome() == PlanOutcome::Created, transfer == maker);
            assert_eq!(planned.volume_handle, made.volume_handle);
            assert_eq!(planned.transfer_id, maker.to_string());
        }
        assert_eq!(suite.volumes().await.len(), usize::try_from(content + 1).expect("few") * 2);
        here.complete(&made.volume_handle, digest(content)).await.expect("complete");
    }
    suite.stop().await;
}

async fn copy_is_made_again_after_claim_expires(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, _) = suite.upload(&there, None, 1).await.expect("uploaded");
    let (first, second) = (TransferId::new(), TransferId::new());
    let old = plan(&suite, artifact, here.worker, first).await.expect("planned").volume_handle;
    let ask = async || plan(&suite, artifact, here.worker, second).await.expect("asked");

    suite.clock.advance(Duration::from_secs(50));
    progress(&suite, first).await.expect("renewed");
    suite.clock.advance(Duration::from_secs(50));
    assert_eq!(ask().await.outcome(), PlanOutcome::InProgress);
    suite.clock.advance(Duration::from_secs(10));
    let again = ask().await;
    assert_eq!(again.outcome(), PlanOutcome::Created);
    assert_ne!(again.volume_handle, old, "a handle is never used twice");

    assert_refused(progress(&suite, first).await, Reason::ClaimLost);
    assert_refused(here.complete(&old, digest(1)).await, Reason::ClaimLost);
    suite.abandon(first).await.expect("the late one says so");
    here.swept(&[], &[&old]).await;
    here.complete(&again.volume_handle, digest(1)).await.expect("complete");
    assert_eq!(suite.get(artifact).await.expect("it is there").replicas.len(), 2);

    // No caller asks again, and the collector marks the copy.
    let elsewhere = suite.gateway().await;
    let left = plan(&suite, artifact, elsewhere.worker, TransferId::new()).await.expect("planned");
    suite.clock.advance(Duration::from_secs(60));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 1);
    elsewhere.swept(&[], &[&left.volume_handle]).await;
    suite.stop().await;
}

async fn abandoned_copy_leaves_nothing_and_keeps_artifact(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, source) = suite.upload(&there, None, 1).await.expect("uploaded");
    let transfer = TransferId::new();
    let planned = plan(&suite, artifact, here.worker, transfer).await.expect("planned");
    for _ in 0..2 {
        suite.abandon(transfer).await.expect("abandoned");
    }
    assert_refused(here.complete(&planned.volume_handle, digest(1)).await, Reason::ClaimLost);
    here.swept(&[], &[&planned.volume_handle]).await;
    let left = suite.get(artifact).await.expect("it is there");
    assert_eq!(left.replicas.iter().map(|replica| &replica.volume_handle).collect::<Vec<_>>(), [&source]);

    // A complete copy stays.
    let transfer = TransferId::new();
    let planned = plan(&suite, artifact, here.worker, transfer).await.expect("planned");
    here.complete(&planned.volume_handle, digest(1)).await.expect("complete");
    suite.abandon(transfer).await.expect("too late");
    assert_eq!(suite.get(artifact).await.expect("it is there").replicas.len(), 2);
    suite.stop().await;
}

async fn unconfirmed_replica_is_not_copied_again(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let (artifact, _) = suite.upload(&there, None, 1).await.expect("uploaded");
    let made = plan(&suite, artifact, here.worker, TransferId::new()).await.expect("planned").volume_handle;
    here.complete(&made, digest(1)).await.expect("complete");

    let reborn = suite.silent_gateway(here.worker, 2, 2);
    reborn.begin_report().await.expect("it may speak");
    assert_eq!(suite.volume_state(&made).await, Some(InventoryState::Unconfirmed));
    let asked = plan(&suite, artifact, here.worker, TransferId::new()).await;
    assert_refused(asked, Reason::Unavailable);
    reborn.report(&[], &[]).await.expect("reported");
    let again = plan(&suite, artifact, here.worker, TransferId::new()).await.expect("planned");
    assert_eq!(again.outcome(), PlanOutcome::Created);
    assert_ne!(again.volume_handle, made);
    suite.stop().await;
}

async fn disk_usage_of_own_volumes_is_recorded(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (_, first) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (_, second) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let usage = async |handle: &str| {
        let volumes = suite.volumes().await;
        let volume = volumes.iter().find(|volume| volume.volume_handle == handle).expect("a volume");
        (volume.exclusive_bytes, volume.disk_bytes)
    };
    assert_eq!(usage(&first).await, (None, None));
    gateway.record_disk_usage(&[(&first, 1, 2), (&second, 0, 3)]).await.expect("recorded");
    elsewhere.record_disk_usage(&[(&first, 7, 7)]).await.expect("ignored");
    assert_eq!(usage(&first).await, (Some(1), Some(2)));
    gateway.record_disk_usage(&[(&second, 4, 4)]).await.expect("recorded");
    assert_eq!((usage(&first).await, usage(&second).await), ((Some(1), Some(2)), (Some(4), Some(4))));
    suite.stop().await;
}
