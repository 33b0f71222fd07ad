//! Task caches: versions, TTLs and deletion.

use std::time::Duration;

use domain::ArtifactId;
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use super::{Caller, HOUR};
use crate::{Suite, TEAM, assert_refused, on_both_databases};

on_both_databases! {
    latest_version_of_task_cache_wins,
    task_cache_is_deleted_after_its_ttl,
    task_caches_of_a_job_are_deleted_together,
}

async fn latest_version_of_task_cache_wins(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (cache, nothing) = main.task("job", "/cache", None).await.expect("asked");
    assert_eq!(nothing, None);
    let (one, two) = (suite.uploaded(&gateway, 1).await, suite.uploaded(&gateway, 2).await);
    let mut before = None;
    for artifact in [one, two] {
        for _ in 0..2 {
            main.publish(&cache, artifact).await.expect("published");
        }
        let (same, found) = main.task("job", "/cache", None).await.expect("asked");
        assert_eq!((&same, found.expect("published").artifact_id), (&cache, artifact.to_string()));
        assert_eq!(suite.kept_by(artifact).await, [format!("task cache {cache}")]);
        assert_eq!(suite.collect(DryRun::Off).await.len(), 2 * before.iter().count());
        if let Some(before) = before.replace(artifact) {
            assert_eq!(suite.state(before).await, ArtifactState::Deleting);
        }
    }
    assert_refused(main.publish(&cache, one).await, Reason::ArtifactNotFound);
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    assert_refused(main.publish(&cache, open).await, Reason::ArtifactNotFound);

    let (another, _) = main.task("job", "/cache/", None).await.expect("asked");
    let (of_another_step, nothing) = main.task_of_step("job", "test", "/cache", None).await.expect("asked");
    assert!(another != cache && of_another_step != cache && nothing.is_none());
    let three = suite.uploaded(&gateway, 3).await;
    main.publish(&of_another_step, three).await.expect("published");
    let located = main.located(&[&another, &cache, &of_another_step]).await;
    assert_eq!(located, [(cache.clone(), two.to_string()), (of_another_step, three.to_string())]);
    // A lost version is not located.
    gateway.report(&[], &[]).await.expect("reported");
    assert_eq!(main.task("job", "/cache", None).await.expect("asked"), (cache, None));
    suite.stop().await;
}

async fn task_cache_is_deleted_after_its_ttl(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (long, short) = (suite.uploaded(&gateway, 1).await, suite.uploaded(&gateway, 2).await);
    let (of_long, _) = main.task("long", "/cache", None).await.expect("asked");
    let (of_short, _) = main.task("short", "/cache", Some(HOUR)).await.expect("asked");
    main.publish(&of_long, long).await.expect("published");
    main.publish(&of_short, short).await.expect("published");
    for _ in 0..3 {
        suite.clock.advance(HOUR / 2);
        assert_eq!(suite.collect(DryRun::Off).await, []);
        main.task("short", "/cache", Some(HOUR)).await.expect("asked");
    }
    suite.clock.advance(HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    assert_eq!(suite.state(short).await, ArtifactState::Deleting);
    assert_refused(main.publish(&of_short, long).await, Reason::CacheNotFound);
    suite.clock.advance(Duration::from_secs(7 * 24 * 3600) - 3 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await, []);

    // The last call sets the TTL.
    main.task("long", "/cache", Some(HOUR)).await.expect("asked");
    suite.clock.advance(HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    assert_eq!(main.located(&[&of_long]).await, []);
    for ttl in [Duration::ZERO, Duration::from_secs(11 * 366 * 24 * 3600)] {
        assert_refused(main.task("long", "/cache", Some(ttl)).await, Reason::InvalidField);
    }
    suite.stop().await;
}

async fn task_caches_of_a_job_are_deleted_together(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let mut caches = Vec::new();
    for (content, (job, path)) in (0..).zip([("a", "/1"), ("a", "/2"), ("a", "/3"), ("b", "/1")]) {
        let (cache, _) = main.task(job, path, None).await.expect("asked");
        let artifact = suite.uploaded(&gateway, content).await;
        main.publish(&cache, artifact).await.expect("published");
        caches.push((cache, artifact));
    }
    let mut listed = Vec::new();
    let mut page_token = String::new();
    loop {
        let request =
            pb::ListTaskCachesRequest { team: TEAM.to_owned(), job: String::new(), page_size: 2, page_token };
        let page = suite.caches().list_task_caches(request).await.expect("listed").into_inner();
        listed.extend(page.caches.into_iter().map(|cache| (cache.cache_id, cache.artifact_id)));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let expected: Vec<_> =
        caches.iter().map(|(cache, artifact)| (cache.clone(), artifact.to_string())).collect();
    assert_eq!(listed, expected);

    let which = |cache: &str, job: &str, path: &str| pb::DeleteTaskCachesRequest {
        cache_id: cache.to_owned(),
        job: job.to_owned(),
        path: path.to_owned(),
        ..Default::default()
    };
    assert_eq!(main.delete_tasks(which("", "b", "/2")).await.expect("deleted"), 0);
    assert_eq!(main.delete_tasks(which(&caches[0].0, "", "")).await.expect("deleted"), 1);
    assert_eq!(main.delete_tasks(which("", "a", "/2")).await.expect("deleted"), 1);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 4, "two artifacts and their replicas");
    for (deleted, left) in [(1, 0), (0, 0)] {
        assert_eq!(main.delete_tasks(which("", "a", "")).await.expect("deleted"), deleted);
        assert_eq!(main.delete_tasks(which("", "a", "/3")).await.expect("deleted"), left);
    }
    suite.collect(DryRun::Off).await;
    for (cache, artifact) in &caches[..3] {
        assert_eq!(suite.state(*artifact).await, ArtifactState::Deleting);
        assert_refused(main.publish(cache, caches[3].1).await, Reason::CacheNotFound);
    }
    assert_eq!(suite.kept_by(caches[3].1).await, [format!("task cache {}", caches[3].0)]);
    assert_refused(main.delete_tasks(which("", "", "/1")).await, Reason::InvalidField);
    suite.stop().await;
}
