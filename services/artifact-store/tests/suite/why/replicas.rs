//! Replicas that are deleted with their artifacts, and whose own rows do not show it.

use super::*;

on_both_databases! {
    replica_is_marked_with_its_artifact,
    replica_gone_before_hand_out_leaves_its_reason,
    restored_lost_replica_may_be_found,
    dropped_replica_is_restored_only_as_last,
}

const WHY: &str = "its artifact is deleted";

/// Returns the listed volumes in a state.
async fn listed(suite: &Suite, state: InventoryState) -> Vec<String> {
    let request = pb::ListVolumesRequest { state: state.into(), ..Default::default() };
    let page = suite.inventory().list_volumes(request).await.expect("listed").into_inner();
    page.volumes.into_iter().map(|volume| volume.volume_handle).collect()
}

async fn replica_is_marked_with_its_artifact(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (kept, other) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let (artifact, replica) = suite.deleted(&gateway, 1).await;
    let marked = Some(suite.clock.now());

    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Destroying));
    assert_eq!(listed(&suite, InventoryState::Destroying).await, std::slice::from_ref(&replica));
    assert_eq!(listed(&suite, InventoryState::Created).await, [other]);
    assert_eq!(listed(&suite, InventoryState::Sweeping).await, Vec::<String>::new());
    assert_eq!(suite.get(artifact).await.expect("its tombstone").replicas, []);
    assert_eq!(suite.get(kept).await.expect("there").replicas.len(), 1);
    // A late repeat is rejected.
    assert_refused(gateway.complete(&replica, digest(1)).await, Reason::ClaimLost);
    // It still exists, and a report does not make it new.
    let all = [listed(&suite, InventoryState::Created).await, vec![replica.clone()]].concat();
    gateway.report(&all, &[]).await.expect("reported");
    suite.clock.advance(MINUTE);
    for state in [pb::ExplainedState::Destroying, pb::ExplainedState::Sweeping] {
        let explained = suite.explain(&replica).await.expect("explained");
        assert_eq!((explained.state(), explained.reason.as_str()), (state, WHY));
        assert_eq!((explained.marked(), explained.kept_by.len()), (marked, 0), "{state:?}");
        gateway.swept(&[], &[&replica]).await;
    }
    assert_eq!(listed(&suite, InventoryState::Sweeping).await, [replica]);
    suite.stop().await;
}

async fn replica_gone_before_hand_out_leaves_its_reason(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    // The report begins before the mark, and its list is taken after it.
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, None).await.expect("put");
    let (_, replica) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let early = gateway.begin_report().await.expect("begun");
    suite.delete_build(build).await.expect("deleted");
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    let marked = Some(suite.clock.now());
    suite.clock.advance(MINUTE);

    let reported = gateway.report_with(early, &[], &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.lost), (1, 0));
    let explained = suite.explain(&replica).await.expect("explained");
    assert_eq!((explained.state(), explained.reason.as_str()), (pb::ExplainedState::Gone, WHY));
    assert_eq!((explained.marked(), explained.gone()), (marked, suite.after(Duration::ZERO)));
    suite.stop().await;
}

async fn restored_lost_replica_may_be_found(database: TestDatabase) {
    let suite = suite(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&one, None, 1).await.expect("uploaded");
    let copy = suite.plan(artifact, two.worker, TransferId::new()).await.expect("planned");
    two.complete(&copy, digest(1)).await.expect("complete");
    assert_eq!(two.report(&[], &[]).await.expect("reported").lost, 1);
    suite.clock.advance(13 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 3, "the artifact, its replica, and the lost one");
    assert_eq!(suite.volume_state(&copy).await, Some(InventoryState::Destroying));

    let back = suite.undelete(artifact, None).await.expect("it is back");
    assert_eq!(back.replicas.iter().map(|replica| &replica.volume_handle).collect::<Vec<_>>(), [&replica]);
    assert_eq!(suite.volume_state(&copy).await, Some(InventoryState::Lost));
    two.report(std::slice::from_ref(&copy), &[]).await.expect("reported");
    assert_eq!(suite.volume_state(&copy).await, Some(InventoryState::Created));
    assert_eq!(suite.get(artifact).await.expect("there").replicas.len(), 2);
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.stop().await;
}

async fn dropped_replica_is_restored_only_as_last(database: TestDatabase) {
    let suite = suite(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&one, None, 1).await.expect("uploaded");
    let copy = suite.plan(artifact, two.worker, TransferId::new()).await.expect("planned");
    two.complete(&copy, digest(1)).await.expect("complete");
    let drop = async |gateway: &Gateway| {
        let request = pb::DropReplicaRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: gateway.worker.to_string(),
            reason: "it is in the way".to_owned(),
            force: true,
        };
        suite.replicas().drop_replica(request).await.expect("dropped");
    };
    let found = |back: pb::Artifact| {
        back.replicas.into_iter().map(|replica| replica.volume_handle).collect::<Vec<_>>()
    };

    drop(&two).await;
    for deleted in [false, true] {
        if deleted {
            suite.clock.advance(13 * HOUR);
            assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "the artifact, and what was not dropped");
        }
        let back = suite.undelete(artifact, None).await.expect("it is there");
        assert_eq!(found(back), std::slice::from_ref(&replica));
        assert_eq!(suite.volume_state(&copy).await, Some(InventoryState::Destroying));
    }
    drop(&one).await;
    assert!(!suite.explain(artifact).await.expect("explained").bytes_lost, "they are there still");
    let back = suite.undelete(artifact, None).await.expect("both are there still");
    assert_eq!(found(back).len(), 2);

    // An unconfirmed replica does not count.
    drop(&one).await;
    let two = suite.silent_gateway(two.worker, 2, 2);
    two.begin_report().await.expect("begun");
    assert_eq!(found(suite.undelete(artifact, None).await.expect("one may be there")).len(), 2);
    two.report(std::slice::from_ref(&copy), &[]).await.expect("reported");

    for (gateway, handle) in [(&one, &replica), (&two, &copy)] {
        drop(gateway).await;
        gateway.swept(&[], &[handle]).await;
    }
    assert_refused(suite.undelete(artifact, None).await, Reason::BytesGone);
    suite.stop().await;
}
