//! Access to caches: for one team, or shared with all teams.

use std::time::Duration;

use domain::{AttemptId, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::DryRun;
use testing::databases::TestDatabase;

use super::{Caller, OTHER, by_workload};
use crate::{Suite, TEAM, assert_refused, digest, input, on_both_databases};

on_both_databases! {
    team_sees_no_cache_of_another_team,
    shared_cache_is_available_to_every_team,
    copy_of_shared_cache_continues_while_renewed,
    base_type_and_certs_stay_until_replaced,
}

async fn team_sees_no_cache_of_another_team(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (main, other) = (Caller::of(&suite, TEAM), Caller::of(&suite, OTHER));
    let artifact = suite.uploaded(&gateway, 1).await;
    let cache = main.make(1, artifact).await;
    let (task, _) = main.task("job", "/cache", None).await.expect("asked");
    main.publish(&task, artifact).await.expect("published");
    let both = [format!("resource cache {cache}"), format!("task cache {task}")];
    assert_eq!(suite.kept_by(artifact).await, both);
    assert_eq!(main.located(&[&task, &cache]).await.len(), 2);

    assert_eq!(other.located(&[&cache, &task]).await, []);
    assert_eq!(other.listed().await, []);
    assert_refused(other.use_it(&cache, by_workload(WorkloadId::new())).await, Reason::CacheNotFound);
    assert_refused(other.delete(&cache).await, Reason::CacheNotFound);
    assert_refused(other.publish(&task, artifact).await, Reason::CacheNotFound);
    let by_id = pb::DeleteTaskCachesRequest { cache_id: task.clone(), ..Default::default() };
    assert_eq!(other.delete_tasks(by_id).await.expect("asked"), 0);
    let workload = WorkloadId::new();
    main.use_it(&cache, by_workload(workload)).await.expect("used");
    other.release(&cache, by_workload(workload)).await.expect("nothing is said of it");
    assert_refused(main.delete(&cache).await, Reason::CacheInUse);
    assert_refused(other.use_it(&cache, by_workload(workload)).await, Reason::InvalidField);

    assert_eq!(other.locates(artifact).await, 0);
    assert_refused(other.pin(WorkloadId::new(), artifact).await, Reason::InputUnavailable);
    assert_refused(other.plan(artifact, elsewhere.worker).await, Reason::ArtifactNotFound);
    for content in [1, 2] {
        // A cache with the same key in another scope is a different cache.
        assert!(other.ready(content, None).await.is_none());
    }
    assert_eq!(other.task("job", "/cache", None).await.expect("asked").1, None);
    assert_eq!(other.listed().await.len(), 2);
    assert!(main.ready(1, None).await.is_some());
    assert!(main.sharing().ready(1, None).await.is_none(), "one that is shared is another one, too");
    suite.stop().await;
}

async fn shared_cache_is_available_to_every_team(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (main, other) = (Caller::of(&suite, TEAM).sharing(), Caller::of(&suite, OTHER).sharing());
    let artifact = suite.uploaded(&gateway, 1).await;
    let cache = main.make(1, artifact).await;
    let (pins, uses) = (WorkloadId::new(), WorkloadId::new());
    let found = other.ready(1, None).await.expect("it is for all");
    assert_eq!(found.artifact_id, artifact.to_string());
    assert_eq!(other.located(&[&cache]).await, [(cache.clone(), artifact.to_string())]);
    assert_eq!(other.listed().await.len(), 1);
    assert_eq!(other.locates(artifact).await, 1);
    other.use_it(&cache, by_workload(uses)).await.expect("used");
    other.pin(pins, artifact).await.expect("pinned");
    other.plan(artifact, elsewhere.worker).await.expect("planned");
    let of_other = pb::GetArtifactRequest { team: OTHER.to_owned(), artifact_id: artifact.to_string() };
    let of_other = suite.artifacts().get_artifact(of_other).await.map_err(rpc::Refusal::from);
    assert_refused(of_other, Reason::ArtifactNotFound);
    assert_refused(other.delete(&cache).await, Reason::CacheNotFound);
    assert_refused(main.delete(&cache).await, Reason::CacheInUse);
    let theirs = Caller::of(&suite, OTHER);
    assert!(theirs.ready(1, None).await.is_none(), "their own is another cache");

    // The cache is deleted. A pinned artifact stays usable.
    other.release(&cache, by_workload(uses)).await.expect("released");
    main.delete(&cache).await.expect("deleted");
    suite.collect(DryRun::Off).await;
    assert_eq!(other.locates(artifact).await, 1);
    let third = Caller::of(&suite, "third");
    assert_eq!(third.locates(artifact).await, 0);
    assert_refused(third.pin(WorkloadId::new(), artifact).await, Reason::InputUnavailable);
    let needs = pb::PrepareRequest {
        session_credential: gateway.credential.clone(),
        holder_id: pins.to_string(),
        attempt_id: AttemptId::new().to_string(),
        team: OTHER.to_owned(),
        volumes: vec![input("in", artifact)],
        unreachable_artifact_ids: Vec::new(),
    };
    let prepared = suite.inventory().prepare(needs).await.expect("prepared").into_inner();
    assert_eq!(prepared.volumes[0].missing_artifact_id, "");
    let settle = pb::SettleRequest {
        holder_id: pins.to_string(),
        team: OTHER.to_owned(),
        status: pb::BuildStatus::Succeeded.into(),
        ..Default::default()
    };
    suite.pins().settle(settle).await.expect("settled");
    assert_eq!(other.locates(artifact).await, 0);
    suite.stop().await;
}

async fn copy_of_shared_cache_continues_while_renewed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, elsewhere) = (suite.gateway().await, suite.gateway().await);
    let (main, other) = (Caller::of(&suite, TEAM).sharing(), Caller::of(&suite, OTHER).sharing());
    let artifact = suite.uploaded(&gateway, 1).await;
    main.make(1, artifact).await;
    let plan = async |transfer: TransferId| {
        let request = pb::PlanReplicaRequest {
            team: OTHER.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: elsewhere.worker.to_string(),
            transfer_id: transfer.to_string(),
        };
        suite.replicas().plan_replica(request).await.expect("planned").into_inner()
    };
    let progress = async |transfer: TransferId, team: &str| {
        let request = pb::ProgressRequest { transfer_id: transfer.to_string(), team: team.to_owned() };
        suite.replicas().progress(request).await.map_err(rpc::Refusal::from)
    };
    let given_up = TransferId::new();
    let first = plan(given_up).await;
    progress(given_up, OTHER).await.expect("it is active");
    let abandon = pb::AbandonUploadRequest { transfer_id: given_up.to_string(), team: OTHER.to_owned() };
    suite.replicas().abandon_upload(abandon).await.expect("abandoned");
    assert_refused(progress(given_up, OTHER).await, Reason::ClaimLost);
    assert!(other.ready(1, None).await.is_some(), "what it was a copy of is there");

    // Another copy starts and takes longer than a term.
    let transfer = TransferId::new();
    let second = plan(transfer).await;
    assert_eq!(second.outcome(), pb::PlanOutcome::Created);
    assert_ne!(second.volume_handle, first.volume_handle);
    for _ in 0..5 {
        suite.clock.advance(Duration::from_secs(15));
        suite.collect(DryRun::Off).await;
        progress(transfer, OTHER).await.expect("it is active");
    }
    elsewhere.complete(&second.volume_handle, digest(1)).await.expect("complete");
    assert_eq!(main.ready(1, None).await.expect("ready").replicas.len(), 2);
    suite.stop().await;
}

async fn base_type_and_certs_stay_until_replaced(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (main, other) = (Caller::of(&suite, TEAM), Caller::of(&suite, OTHER));
    let worker = Some(gateway.worker);
    let mut artifacts = Vec::new();
    for content in 0..6 {
        artifacts.push(suite.uploaded(&gateway, content).await);
    }
    let [one, two, cluster_wide, of_other, certs, new_certs] = artifacts[..] else { panic!("six") };
    assert_eq!(other.locates(one).await, 0);
    for _ in 0..2 {
        main.put_type("1", worker, one).await.expect("put");
    }
    main.put_type("1", None, cluster_wide).await.expect("put");
    main.put_type("1", Some(WorkerId::new()), of_other).await.expect("put");
    main.put_certs(gateway.worker, certs).await.expect("put");
    assert_refused(other.put_type("2", worker, two).await, Reason::ArtifactNotFound);
    assert_refused(other.put_certs(gateway.worker, two).await, Reason::ArtifactNotFound);

    // Years later.
    suite.pin(WorkloadId::new(), &[two, new_certs], None).await.expect("pinned");
    suite.clock.advance(Duration::from_secs(3 * 365 * 24 * 3600));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    let types = async || {
        let request = pb::ListBaseResourceTypesRequest::default();
        suite.caches().list_base_resource_types(request).await.expect("listed").into_inner().types
    };
    let before = types().await;
    assert_eq!(before.len(), 3);
    let some = async |r#type: &str, cluster_wide| {
        let request = pb::ListBaseResourceTypesRequest {
            r#type: r#type.to_owned(),
            cluster_wide,
            ..Default::default()
        };
        suite.caches().list_base_resource_types(request).await.expect("listed").into_inner().types
    };
    assert_eq!(some(&before[0].r#type, true).await, before[1..2]);
    assert_eq!(some("", true).await, before[1..2]);
    assert_eq!(some(&before[0].r#type, false).await, before);
    assert_eq!(some("another", false).await, []);
    assert_eq!(suite.kept_by(one).await, [format!("base resource type {}", before[0].base_type_id)]);
    let of_worker = format!("resource certs of worker {}", gateway.worker);
    assert_eq!(suite.kept_by(certs).await, [of_worker]);
    for artifact in [one, cluster_wide, certs] {
        assert_eq!(other.locates(artifact).await, 1);
        other.pin(WorkloadId::new(), artifact).await.expect("pinned");
    }
    assert_refused(other.pin(WorkloadId::new(), two).await, Reason::InputUnavailable);

    main.put_type("2", worker, two).await.expect("put");
    main.put_certs(gateway.worker, new_certs).await.expect("put");
    let after = types().await;
    assert_eq!((after.len(), &after[1..]), (3, &before[1..]));
    assert_eq!((&*after[0].version, &after[0].artifact_id), ("2", &two.to_string()));
    let listed = suite.caches().list_resource_certs(pb::ListResourceCertsRequest::default()).await;
    let listed = listed.expect("listed").into_inner().certs;
    assert_eq!((listed.len(), &listed[0].artifact_id), (1, &new_certs.to_string()));
    for artifact in [one, certs] {
        let kept_by = suite.kept_by(artifact).await;
        assert!(kept_by.len() == 1 && kept_by[0].starts_with("pinned by"), "{kept_by:?}");
    }
    suite.stop().await;
}
