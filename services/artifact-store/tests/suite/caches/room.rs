//! Deletions from workers that need disk space.

use std::time::Duration;

use domain::{AttemptId, BuildId, TransferId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun, InventoryState};
use testing::databases::TestDatabase;

use super::{Caller, by_workload};
use crate::{Answer, Gateway, Suite, TEAM, digest, on_both_databases, output};

on_both_databases! {
    unused_copies_and_caches_make_room,
    ended_attempts_make_room_first
}

/// Requests space on the worker of `gateway`. Returns the number of deleted replicas.
/// Replicas on `reliable` count as copies.
async fn make_room(suite: &Suite, gateway: &Gateway, size_bytes: u64, reliable: &[&Gateway]) -> Answer<u64> {
    let session_credential = gateway.credential.clone();
    let reliable_worker_ids = reliable.iter().map(|gateway| gateway.worker.to_string()).collect();
    let only_ended = false;
    let request = pb::MakeRoomRequest { session_credential, size_bytes, reliable_worker_ids, only_ended };
    Ok(suite.inventory().make_room(request).await?.into_inner().replicas)
}

async fn unused_copies_and_caches_make_room(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let main = Caller::of(&suite, TEAM);
    // Without a copy and without a cache, it cannot be made again.
    suite.uploaded(&here, 1).await;
    let mut copies = Vec::new();
    for content in [2, 3] {
        let (artifact, replica) = suite.upload(&here, None, content).await.expect("uploaded");
        let copy = suite.plan(artifact, there.worker, TransferId::new()).await.expect("planned");
        there.complete(&copy, digest(content)).await.expect("complete");
        copies.push((artifact, replica));
    }
    suite.pin(WorkloadId::new(), &[copies[0].0], None).await.expect("pinned");

    let cached = suite.uploaded(&here, 4).await;
    main.make(4, cached).await;
    let used = suite.uploaded(&here, 5).await;
    let cache = main.make(5, used).await;
    main.use_it(&cache, by_workload(WorkloadId::new())).await.expect("used");
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let (built, _) = suite.upload(&here, Some(build), 6).await.expect("uploaded");
    main.make(6, built).await;
    let (task_cache, _) = main.task("job", "/cache", None).await.expect("asked");
    let version = suite.uploaded(&here, 7).await;
    main.publish(&task_cache, version).await.expect("published");

    // Without a reliable worker, nothing is a copy. Otherwise copies come first, and no more is
    // deleted than necessary.
    let made = async |gateway: &Gateway, size_bytes, reliable: &[&Gateway]| {
        make_room(&suite, gateway, size_bytes, reliable).await.expect("made")
    };
    assert_eq!(made(&there, u64::MAX, &[]).await, 0);
    assert_eq!(made(&here, 1, &[&there]).await, 1);
    let state = suite.volume_state(&copies[1].1).await;
    assert_eq!(state, Some(InventoryState::Destroying));
    assert_eq!(made(&here, 1, &[&there]).await, 0, "as much is deleted already");
    assert_eq!(
        made(&there, u64::MAX, &[&here]).await,
        0,
        "one copy is pinned, and the other is the last one"
    );
    assert_eq!(made(&here, u64::MAX, &[&there]).await, 2);
    assert_eq!(made(&here, u64::MAX, &[&there]).await, 0);
    suite.collect(DryRun::Off).await;
    for (artifact, state) in [
        (copies[0].0, ArtifactState::Sealed),
        (copies[1].0, ArtifactState::Sealed),
        (cached, ArtifactState::Deleting),
        (used, ArtifactState::Sealed),
        (built, ArtifactState::Sealed),
        (version, ArtifactState::Deleting),
    ] {
        assert_eq!(suite.state(artifact).await, state);
    }
    suite.stop().await;
}

async fn ended_attempts_make_room_first(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.gc_grace = Duration::from_secs(300)).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let (artifact, copy) = suite.upload(&here, None, 1).await.expect("uploaded");
    let other = suite.plan(artifact, there.worker, TransferId::new()).await.expect("planned");
    there.complete(&other, digest(1)).await.expect("complete");
    // One attempt has ended, one has ended and is in use, and one goes on.
    let attempts = [(true, false), (true, true), (false, false)];
    let mut planned = Vec::new();
    for (has_ended, is_used) in attempts {
        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let needs = [output("out", workload.output_artifact("out"))];
        planned.push(here.prepare(workload, attempt, &needs).await.expect("prepared"));
        here.prepared(attempt).await.expect("recorded");
        if has_ended {
            suite.settle(workload, None, &[], None).await.expect("settled");
        }
        if is_used {
            here.touch(attempt).await.expect("noted");
        }
    }
    let request = pb::MakeRoomRequest {
        session_credential: here.credential.clone(),
        size_bytes: u64::MAX,
        reliable_worker_ids: vec![there.worker.to_string()],
        only_ended: true,
    };
    let dry = suite.collect_short(DryRun::Only, &[&here]).await;
    assert_eq!(dry.collected.len(), 2, "a container and its volume: {dry:?}");
    assert_eq!(suite.collect_short(DryRun::Off, &[&there]).await.collected, [], "another worker");
    let made = suite.inventory().make_room(request.clone()).await.expect("made").into_inner();
    assert_eq!((made.of_ended, made.replicas), (2, 0));
    let marked = suite.explain(&planned[0].container_handle).await.expect("explained");
    assert_eq!(marked.reason, "its attempt has ended, and its worker needed disk space");
    let again = suite.inventory().make_room(request.clone()).await.expect("made").into_inner();
    assert_eq!(again.of_ended, 0);
    assert_eq!(suite.volume_state(&copy).await, Some(InventoryState::Created));

    let kept = suite.collect_short(DryRun::Off, &[]).await.kept_containers;
    let until = Some(rpc::timestamp(suite.clock.now() + Duration::from_secs(300)));
    assert_eq!(kept, Some(pb::KeptContainers { containers: 1, until }), "it is in use");
    suite.clock.advance(Duration::from_secs(180));
    let collected = suite.collect_short(DryRun::Off, &[&here]).await;
    assert_eq!(
        (collected.collected.len(), collected.kept_containers),
        (2, None),
        "it is not in use any more"
    );

    let everything = pb::MakeRoomRequest { only_ended: false, ..request };
    let made = suite.inventory().make_room(everything).await.expect("made").into_inner();
    assert_eq!((made.of_ended, made.replicas), (0, 1));
    let going_on = suite.explain(&planned[2].container_handle).await.expect("explained");
    assert_eq!(going_on.state(), pb::ExplainedState::Created);
    suite.stop().await;
}
