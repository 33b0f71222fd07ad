//! Dry runs of collections: they report what a round would mark, and change nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::{ArtifactId, BuildId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::DryRun;
use testing::databases::TestDatabase;

use crate::{Suite, TEAM, Tables, on_both_databases};

on_both_databases! {
    dry_run_changes_no_row,
    dry_run_lists_artifacts_of_overdue_builds,
    truncated_answer_says_that_it_is_truncated,
}

/// Creates `count` artifacts, in several calls if necessary.
async fn create(suite: &Suite, owner: Option<BuildId>, count: usize) -> Vec<ArtifactId> {
    let ids: Vec<_> = (0..count).map(|_| ArtifactId::new()).collect();
    for some in ids.chunks(1000) {
        let artifacts = some.iter().map(|artifact| pb::NewArtifact {
            artifact_id: artifact.to_string(),
            ..pb::NewArtifact::default()
        });
        let request = pb::BatchCreateArtifactsRequest {
            team: TEAM.to_owned(),
            build_id: owner.map(|build| build.to_string()).unwrap_or_default(),
            artifacts: artifacts.collect(),
        };
        suite.artifacts().batch_create_artifacts(request).await.expect("created");
    }
    ids
}

/// Returns all rows of a suite's database.
async fn rows(suite: &Suite) -> BTreeSet<String> {
    Tables::open(&suite.url()).await.rows().await
}

async fn dry_run_changes_no_row(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.unowned_ttl = Duration::ZERO).await;
    let made = create(&suite, None, 2500).await;
    let build = BuildId::new();
    let request = pb::PutBuildRequest {
        build_id: build.to_string(),
        team: TEAM.to_owned(),
        term: Some(rpc::duration(Duration::from_secs(60))),
        ..pb::PutBuildRequest::default()
    };
    suite.owners().put_build(request).await.expect("put");
    let owned = create(&suite, Some(build), 5).await;
    suite.clock.advance(Duration::from_secs(61));

    let before = rows(&suite).await;
    assert_eq!(suite.collect(DryRun::Only).await.len(), made.len() + owned.len());
    Tables::assert_unchanged(&before, &rows(&suite).await, "a dry run");
    assert_eq!(suite.collect(DryRun::Off).await.len(), made.len() + owned.len());
    assert_ne!(rows(&suite).await, before);
    suite.stop().await;
}

async fn dry_run_lists_artifacts_of_overdue_builds(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = BuildId::new();
    let request = pb::PutBuildRequest {
        build_id: build.to_string(),
        team: TEAM.to_owned(),
        term: Some(rpc::duration(Duration::from_secs(60))),
        ..pb::PutBuildRequest::default()
    };
    suite.owners().put_build(request).await.expect("put");
    let made = create(&suite, Some(build), 2500).await;
    assert_eq!(suite.collect(DryRun::Off).await, []);
    // The build is not renewed. It ends and lets go, and its artifacts are marked.
    suite.clock.advance(Duration::from_secs(61));
    assert_eq!(suite.collect(DryRun::Off).await.len(), made.len());
    suite.stop().await;
}

async fn truncated_answer_says_that_it_is_truncated(database: TestDatabase) {
    const NAMED: usize = 10_000;
    let suite = Suite::start_with(database, |config| config.unowned_ttl = Duration::ZERO).await;
    let collect = async |dry_run: DryRun| {
        let mut collector = pb::collector_client::CollectorClient::new(suite.peer.clone());
        let request = pb::CollectRequest { dry_run: dry_run.into(), ..pb::CollectRequest::default() };
        let answer = collector.collect(request).await.expect("collected").into_inner();
        (answer.collected.len(), answer.truncated)
    };
    create(&suite, None, NAMED).await;
    assert_eq!(collect(DryRun::Only).await, (NAMED, false));
    create(&suite, None, 1).await;
    assert_eq!(collect(DryRun::Only).await, (NAMED, true));
    assert_eq!(collect(DryRun::Off).await, (NAMED, true));
    assert_eq!(collect(DryRun::Off).await, (0, false), "what was not named went, too");
    suite.stop().await;
}
