//! Explanations of automatic deletions, of losses and of deleted items.

use super::*;

on_both_databases! {
    items_of_ended_attempt_say_until_when,
    explanation_reports_lost_bytes,
    deleted_cache_is_explained,
    transfer_and_worker_are_explained,
}

/// Records an interactive use of the container of an attempt.
async fn touch(suite: &Suite, gateway: &Gateway, attempt: AttemptId) {
    let request =
        pb::TouchRequest { session_credential: gateway.credential.clone(), attempt_id: attempt.to_string() };
    suite.inventory().touch(request).await.expect("touched");
}

async fn items_of_ended_attempt_say_until_when(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| {
        config.tombstone = HOUR;
        config.gc_grace = 5 * MINUTE;
    });
    let suite = suite.await;
    let gateway = suite.gateway().await;
    let (build, workload, attempt) = (BuildId::new(), WorkloadId::new(), AttemptId::new());
    suite.put_build(build, workload, Some(2 * MINUTE)).await.expect("put");
    let (artifact, replica) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    suite.pin(workload, &[artifact], Some(build)).await.expect("pinned");
    let planned = gateway.prepare(workload, attempt, &[input("src", artifact)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let (container, source) = (planned.container_handle.as_str(), planned.volumes[0].volume_handle.as_str());
    suite.settle(workload, None, &[], None).await.expect("settled");

    let (build_id, artifact_id) = (build.to_string(), artifact.to_string());
    let (kept, grace) = (suite.after(2 * MINUTE), suite.after(5 * MINUTE));
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!(
        kept_by(&explained),
        [(ObjectKind::Build, build_id.as_str(), kept), (ObjectKind::Volume, source, grace)]
    );
    assert_eq!((explained.goes(), explained.reason.as_str()), (grace, "every owner of it has let go"));
    let explained = suite.explain(&replica).await.expect("explained");
    assert_eq!(
        kept_by(&explained),
        [(ObjectKind::Volume, source, grace), (ObjectKind::Artifact, artifact_id.as_str(), grace)]
    );
    assert_eq!(explained.goes(), grace);

    // An interactive use keeps the attempt's items for longer.
    suite.clock.advance(MINUTE);
    touch(&suite, &gateway, attempt).await;
    let grace = suite.after(5 * MINUTE);
    for id in [artifact_id.as_str(), &replica, container, source] {
        let explained = suite.explain(id).await.expect("explained");
        assert_eq!(explained.goes(), grace, "{explained:?}");
    }
    suite.clock.advance(5 * MINUTE - Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_micros(1));
    let went = suite.collect(DryRun::Off).await;
    assert!([container, source].iter().all(|id| went.iter().any(|marked| marked.id == *id)), "{went:?}");
    suite.clock.advance(MINUTE);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.explain(artifact).await.expect("explained").state(), pb::ExplainedState::Deleting);

    // While the attempt is active, the time is unknown.
    let (artifact, replica) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let (ended, ended_attempt) = (WorkloadId::new(), AttemptId::new());
    gateway.prepare(ended, ended_attempt, &[input("in", artifact)]).await.expect("prepared");
    let needs = [input("in", artifact)];
    gateway.prepare(WorkloadId::new(), AttemptId::new(), &needs).await.expect("prepared");
    suite.settle(ended, None, &[], None).await.expect("settled");
    for id in [artifact.to_string(), replica] {
        assert_eq!(suite.explain(id).await.expect("explained").goes(), None);
    }
    suite.stop().await;
}

async fn explanation_reports_lost_bytes(database: TestDatabase) {
    let suite = suite(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let copy = suite.plan(artifact, other.worker, TransferId::new()).await.expect("planned");
    other.complete(&copy, digest(1)).await.expect("complete");
    suite.clock.advance(MINUTE);
    let lost_at = suite.after(Duration::ZERO);
    assert_eq!(gateway.report(&[], &[]).await.expect("reported").lost, 1);
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!((explained.bytes_lost, explained.lost_at), (false, None), "there is another");
    assert_eq!(related(&explained, "replicas"), std::slice::from_ref(&copy));
    assert_eq!(related(&explained, "lost replicas"), std::slice::from_ref(&replica));
    let explained = suite.explain(&replica).await.expect("explained");
    assert_eq!(explained.lost_at.as_ref().map(rpc::from_timestamp), lost_at);

    // A worker that has not reported may have it.
    let other = suite.silent_gateway(other.worker, 2, 2);
    other.begin_report().await.expect("begun");
    assert!(!suite.explain(artifact).await.expect("explained").bytes_lost);
    suite.clock.advance(MINUTE);
    let lost_at = suite.after(Duration::ZERO);
    assert_eq!(other.report(&[], &[]).await.expect("reported").lost, 1);
    let explained = suite.explain(artifact).await.expect("explained");
    assert!(explained.bytes_lost, "{explained:?}");
    assert_eq!(explained.lost_at.as_ref().map(rpc::from_timestamp), lost_at);
    assert_eq!(related(&explained, "replicas"), [] as [String; 0]);
    assert_eq!(explained.state(), pb::ExplainedState::Sealed);
    suite.stop().await;
}

async fn deleted_cache_is_explained(database: TestDatabase) {
    let suite = suite(database).await;
    let find = |path: &str| pb::FindOrCreateTaskCacheRequest {
        team: TEAM.to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: path.to_owned(),
        ttl: Some(rpc::duration(MINUTE)),
    };
    let mut caches = Vec::new();
    for path in ["deleted", "unused"] {
        let found = suite.caches().find_or_create_task_cache(find(path)).await.expect("asked").into_inner();
        caches.push(found.cache_id);
    }
    let delete = pb::DeleteTaskCachesRequest {
        team: TEAM.to_owned(),
        cache_id: caches[0].clone(),
        ..Default::default()
    };
    suite.caches().delete_task_caches(delete).await.expect("deleted");
    let deleted_at = suite.after(Duration::ZERO);
    suite.clock.advance(MINUTE);
    suite.collect(DryRun::Off).await;
    let unused_at = suite.after(Duration::ZERO);
    let went = [
        ("deleted", "a caller deleted it", deleted_at),
        ("unused", "it was not used for its TTL", unused_at),
    ];
    for (cache, (path, why, at)) in caches.iter().zip(went) {
        let explained = suite.explain(cache).await.expect("its grave");
        assert_eq!((explained.kind(), explained.state()), (ObjectKind::TaskCache, pb::ExplainedState::Gone));
        assert_eq!(
            (explained.label.as_str(), explained.reason.as_str()),
            (&*format!("job step {path}"), why)
        );
        assert_eq!((explained.gone(), explained.forgotten()), (at, at.map(|at| at + HOUR)));
        assert_refused(suite.explain_to("other", cache).await, Reason::UnknownId);
    }

    // A shared cache is explained to every team, also after its deletion.
    for (sharing, other_knows) in [(pb::Sharing::Unspecified, false), (pb::Sharing::AllTeams, true)] {
        let ask = pb::FindOrCreateResourceCacheRequest {
            team: TEAM.to_owned(),
            key_digest: digest(1).as_bytes().to_vec().into(),
            claim_id: ClaimId::new().to_string(),
            r#type: "git".to_owned(),
            version: "v1".to_owned(),
            sharing: sharing.into(),
            ..Default::default()
        };
        let cache = suite.caches().find_or_create_resource_cache(ask).await.expect("asked").into_inner();
        let cache = cache.cache_id;
        let delete = pb::DeleteResourceCacheRequest { team: TEAM.to_owned(), cache_id: cache.clone() };
        suite.caches().delete_resource_cache(delete).await.expect("deleted");
        let explained = suite.explain(&cache).await.expect("its grave");
        assert_eq!((explained.kind(), explained.label.as_str()), (ObjectKind::ResourceCache, "git v1"));
        assert_eq!(
            (explained.state(), explained.reason.as_str()),
            (pb::ExplainedState::Gone, "a caller deleted it")
        );
        assert_eq!(suite.explain_to("other", &cache).await.is_ok(), other_knows);
    }
    suite.clock.advance(HOUR);
    suite.collect(DryRun::Off).await;
    assert_refused(suite.explain(&caches[0]).await, Reason::UnknownId);
    suite.stop().await;
}

async fn transfer_and_worker_are_explained(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (open, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(open, None).await.expect("created");
    let filled = suite.plan(open, gateway.worker, transfer).await.expect("planned");
    let explained = suite.explain(transfer).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Transfer, pb::ExplainedState::Running));
    assert_eq!(related(&explained, "brings"), [open.to_string()]);
    assert_eq!(related(&explained, "into"), std::slice::from_ref(&filled));
    assert_eq!(related(&explained, "worker"), [gateway.worker.to_string()]);
    assert_eq!((explained.goes(), kept_by(&explained).len()), (suite.after(MINUTE), 1));
    assert_refused(suite.explain_to("other", transfer).await, Reason::UnknownId);
    gateway.complete(&filled, digest(1)).await.expect("complete");
    let explained = suite.explain(transfer).await.expect("explained");
    assert_eq!((explained.state(), explained.goes()), (pb::ExplainedState::Ended, None));

    let explained = suite.explain(gateway.worker).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Worker, pb::ExplainedState::Registered));
    assert_eq!(explained.label, "1 volume and 0 containers");
    assert_eq!(explained.size_bytes, 10);
    suite.stop().await;
}
