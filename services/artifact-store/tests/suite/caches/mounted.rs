//! Mounted task caches: the version that a workload finds, its lifetime, and the version that the
//! workload publishes.

use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, AttemptId, BuildId, CacheId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use super::{Caller, HOUR, OTHER};
use crate::{Answer, Gateway, Suite, TEAM, assert_refused, digest, on_both_databases};

on_both_databases! {
    workload_finds_version_latest_when_prepared,
    unreachable_version_is_found_empty,
    used_cache_is_not_deleted,
    published_version_is_owned_by_cache_only,
    last_settled_version_wins_among_concurrent_workloads,
    ended_attempt_publishes_no_version,
    deleted_cache_gets_no_version,
    caches_of_other_teams_are_not_mounted,
    concurrent_workloads_and_deletions_do_not_deadlock,
}

/// A workload with a mounted task cache.
#[derive(Clone, Copy)]
struct User<'a> {
    suite: &'a Suite,
    gateway: &'a Gateway,
    cache: CacheId,
    workload: WorkloadId,
    attempt: AttemptId,
}

impl<'a> User<'a> {
    fn of(suite: &'a Suite, gateway: &'a Gateway, cache: CacheId) -> Self {
        Self { suite, gateway, cache, workload: WorkloadId::new(), attempt: AttemptId::new() }
    }

    /// Pins the workload. Returns the locations of the versions.
    async fn pin(&self) -> Answer<Vec<pb::Location>> {
        let request = pb::PinRequest {
            holder_id: self.workload.to_string(),
            team: TEAM.to_owned(),
            task_cache_ids: vec![self.cache.to_string()],
            ..Default::default()
        };
        Ok(self.suite.pins().pin(request).await?.into_inner().task_cache_locations)
    }

    fn artifact(&self) -> ArtifactId {
        self.workload.cache_artifact(self.cache)
    }

    fn mount(&self) -> pb::PrepareVolume {
        pb::PrepareVolume {
            name: "cache".to_owned(),
            purpose: pb::VolumePurpose::Output.into(),
            output_artifact_id: self.artifact().to_string(),
            from_task_cache_id: self.cache.to_string(),
            ..Default::default()
        }
    }

    /// Prepares the attempt. Returns the volume of the cache.
    async fn prepare(&self, unreachable: &[ArtifactId]) -> pb::PreparedVolume {
        self.prepare_volume(self.mount(), unreachable).await
    }

    async fn prepare_volume(
        &self,
        volume: pb::PrepareVolume,
        unreachable: &[ArtifactId],
    ) -> pb::PreparedVolume {
        let request = pb::PrepareRequest {
            session_credential: self.gateway.credential.clone(),
            holder_id: self.workload.to_string(),
            attempt_id: self.attempt.to_string(),
            team: TEAM.to_owned(),
            volumes: vec![volume],
            unreachable_artifact_ids: unreachable.iter().map(ToString::to_string).collect(),
        };
        let prepared = self.suite.inventory().prepare(request).await.expect("prepared").into_inner();
        prepared.volumes.into_iter().next().expect("a volume")
    }

    async fn begin(&self) -> pb::PreparedVolume {
        self.pin().await.expect("pinned");
        let volume = self.prepare(&[]).await;
        self.gateway.prepared(self.attempt).await.expect("recorded");
        volume
    }

    /// Completes the output. It is in a separate volume if the attempt started with a version.
    async fn leave(&self, found: &pb::PreparedVolume, content: u64) {
        let handle = if found.parent_handle.is_empty() {
            found.volume_handle.clone()
        } else {
            let copy = pb::PrepareVolume {
                name: "copy".to_owned(),
                from_task_cache_id: String::new(),
                ..self.mount()
            };
            let copy = self.prepare_volume(copy, &[]).await;
            assert_eq!((&*copy.parent_handle, &*copy.missing_artifact_id), ("", ""));
            copy.volume_handle
        };
        self.gateway.complete(&handle, digest(content)).await.expect("complete");
    }

    /// Settles the workload with or without a new version. Returns the number of missing owners.
    async fn settle(&self, left: Option<u64>, build: Option<BuildId>) -> Answer<usize> {
        let output = |content| pb::SettledOutput {
            artifact_id: self.artifact().to_string(),
            digest: digest(content).as_bytes().to_vec().into(),
            owners: vec![rpc::owner::settled(OutputOwner::TaskCache(self.cache))],
            for_owners_only: true,
            ..Default::default()
        };
        let request = pb::SettleRequest {
            holder_id: self.workload.to_string(),
            team: TEAM.to_owned(),
            attempt_id: self.attempt.to_string(),
            outputs: left.into_iter().map(output).collect(),
            build_id: build.map(|build| build.to_string()).unwrap_or_default(),
            status: pb::BuildStatus::Failed.into(),
        };
        Ok(self.suite.pins().settle(request).await?.into_inner().missing.len())
    }
}

impl Caller<'_> {
    /// Creates a task cache with a TTL of one hour.
    async fn short(&self, path: &str) -> CacheId {
        self.task("job", path, Some(HOUR)).await.expect("asked").0.parse().expect("an id")
    }

    async fn has(&self, path: &str) -> Option<String> {
        let found = self.task("job", path, Some(HOUR)).await.expect("asked").1;
        found.map(|location| location.artifact_id)
    }
}

async fn workload_finds_version_latest_when_prepared(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let first = User::of(&suite, &gateway, cache);
    assert_eq!(first.pin().await.expect("pinned"), [], "there is none");
    let found = first.begin().await;
    assert_eq!((&*found.parent_handle, &*found.missing_artifact_id), ("", ""));
    first.leave(&found, 1).await;
    assert_eq!(first.settle(Some(1), None).await.expect("settled"), 0);
    assert_eq!(main.has("/cache").await, Some(first.artifact().to_string()));

    // One workload is pinned before and prepared after the publication of another version.
    let (early, late) = (User::of(&suite, &gateway, cache), User::of(&suite, &gateway, cache));
    let located = early.pin().await.expect("pinned");
    assert_eq!(
        located.iter().map(|found| &*found.artifact_id).collect::<Vec<_>>(),
        [first.artifact().to_string()]
    );
    assert_eq!(located[0].replicas.len(), 1);
    let found = early.begin().await;
    assert_eq!(found.parent_handle, suite.replica_of(first.artifact()).await);
    let two = suite.uploaded(&gateway, 2).await;
    late.pin().await.expect("pinned");
    main.publish(&cache.to_string(), two).await.expect("published");
    let of_late = late.begin().await;
    assert_eq!(of_late.parent_handle, suite.replica_of(two).await);

    // A replaced version stays for the workloads that found it, however often they ask, and is
    // deleted afterwards.
    assert_eq!(
        suite.collect(DryRun::Off).await.iter().filter(|one| one.kind() == pb::ObjectKind::Artifact).count(),
        0
    );
    assert_eq!(early.prepare(&[]).await.parent_handle, found.parent_handle);
    assert_eq!(early.prepare(&[first.artifact()]).await.parent_handle, found.parent_handle, "it was made");
    early.leave(&found, 3).await;
    assert_eq!(early.settle(Some(3), None).await.expect("settled"), 0);
    late.settle(None, None).await.expect("settled");
    assert_eq!(
        main.has("/cache").await,
        Some(early.artifact().to_string()),
        "who changed nothing wins nothing"
    );
    suite.settle_down(&gateway).await;
    for superseded in [first.artifact(), two] {
        assert_eq!(suite.state(superseded).await, ArtifactState::Deleting);
    }
    // Only the latest version is left, which does not depend on earlier ones.
    let volumes = suite.volumes().await;
    let live: Vec<_> =
        volumes.iter().filter(|volume| volume.state() == pb::InventoryState::Created).collect();
    let [only] = live[..] else { panic!("{live:?}") };
    assert_eq!((&*only.artifact_id, &*only.parent_handle), (&*early.artifact().to_string(), ""));
    suite.stop().await;
}

async fn unreachable_version_is_found_empty(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let main = Caller::of(&suite, TEAM);
    let cache = main.short("/cache").await;
    let version = suite.uploaded(&there, 1).await;
    main.publish(&cache.to_string(), version).await.expect("published");
    let user = User::of(&suite, &here, cache);
    user.pin().await.expect("pinned");
    let found = user.prepare(&[]).await;
    assert_eq!((&*found.parent_handle, found.missing_artifact_id), ("", version.to_string()));
    let found = user.prepare(&[version]).await;
    assert_eq!((&*found.parent_handle, &*found.missing_artifact_id), ("", ""));
    assert_eq!(user.prepare(&[]).await.missing_artifact_id, "", "it has been decided");
    // A lost version is not located at all.
    there.report(&[], &[]).await.expect("reported");
    let other = User::of(&suite, &here, cache);
    assert_eq!(other.pin().await.expect("pinned"), []);
    assert_eq!(other.prepare(&[]).await.missing_artifact_id, "");
    suite.stop().await;
}

async fn used_cache_is_not_deleted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let version = suite.uploaded(&gateway, 1).await;
    main.publish(&cache.to_string(), version).await.expect("published");
    let user = User::of(&suite, &gateway, cache);
    user.pin().await.expect("pinned");
    for _ in 0..5 {
        suite.clock.advance(HOUR);
        suite.collect(DryRun::Off).await;
    }
    assert_eq!(suite.state(version).await, ArtifactState::Sealed);
    let explained = suite.explain_cache(cache).await;
    assert_eq!(explained.kept_by.len(), 1, "{explained:?}");
    assert!(explained.kept_by[0].text.contains(&user.workload.to_string()), "{explained:?}");
    assert_eq!(explained.expires_at, None);
    // It is unused from the end of the use on.
    user.settle(None, None).await.expect("settled");
    suite.clock.advance(HOUR - Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.state(version).await, ArtifactState::Sealed);
    suite.clock.advance(HOUR);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.state(version).await, ArtifactState::Deleting);
    assert_eq!(main.located(&[&cache.to_string()]).await, []);
    assert_refused(user.pin().await, Reason::HolderSettled);
    assert_refused(User::of(&suite, &gateway, cache).pin().await, Reason::InputUnavailable);
    suite.stop().await;
}

async fn published_version_is_owned_by_cache_only(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let user = User::of(&suite, &gateway, cache);
    let found = user.begin().await;
    user.leave(&found, 1).await;
    for _ in 0..2 {
        assert_eq!(user.settle(Some(1), Some(build)).await.expect("settled"), 0);
    }
    assert_eq!(suite.kept_by(user.artifact()).await, [format!("task cache {cache}")]);
    suite.stop().await;
}

async fn last_settled_version_wins_among_concurrent_workloads(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let users = [User::of(&suite, &gateway, cache), User::of(&suite, &gateway, cache)];
    let mut found = Vec::new();
    for user in &users {
        found.push(user.begin().await);
    }
    for (content, (user, found)) in (1..).zip(users.iter().zip(&found)) {
        user.leave(found, content).await;
        assert_eq!(user.settle(Some(content), None).await.expect("settled"), 0);
        assert_eq!(main.has("/cache").await, Some(user.artifact().to_string()));
    }
    suite.settle_down(&gateway).await;
    assert_eq!(suite.state(users[0].artifact()).await, ArtifactState::Deleting);
    assert_eq!(suite.state(users[1].artifact()).await, ArtifactState::Sealed);
    suite.stop().await;
}

async fn ended_attempt_publishes_no_version(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let user = User::of(&suite, &gateway, cache);
    let found = user.begin().await;
    user.leave(&found, 1).await;
    suite.end_attempt(user.workload, user.attempt).await.expect("ended");
    // The next attempt finds the same version.
    let again = User { attempt: AttemptId::new(), ..user };
    assert_eq!(again.begin().await.parent_handle, "");
    assert_eq!(again.settle(Some(1), None).await.expect("settled"), 1, "it has no such candidate");
    assert_eq!(main.has("/cache").await, None);
    assert_refused(suite.get(user.artifact()).await, Reason::ArtifactNotFound);
    suite.stop().await;
}

async fn deleted_cache_gets_no_version(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    let cache = main.short("/cache").await;
    let version = suite.uploaded(&gateway, 1).await;
    main.publish(&cache.to_string(), version).await.expect("published");
    let user = User::of(&suite, &gateway, cache);
    let found = user.begin().await;
    let which = pb::DeleteTaskCachesRequest { cache_id: cache.to_string(), ..Default::default() };
    assert_eq!(main.delete_tasks(which).await.expect("deleted"), 1);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.state(version).await, ArtifactState::Sealed, "it is used");
    assert_eq!(user.prepare(&[]).await.parent_handle, found.parent_handle);
    user.leave(&found, 2).await;
    assert_eq!(user.settle(Some(2), None).await.expect("settled"), 1);
    suite.settle_down(&gateway).await;
    for artifact in [version, user.artifact()] {
        assert_eq!(suite.state(artifact).await, ArtifactState::Deleting, "it has no owner");
    }
    assert_eq!(main.has("/cache").await, None);
    suite.stop().await;
}

async fn caches_of_other_teams_are_not_mounted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (main, other) = (Caller::of(&suite, TEAM), Caller::of(&suite, OTHER));
    let foreign: CacheId = other.task("job", "/cache", None).await.expect("asked").0.parse().expect("an id");
    let theirs = Caller { team: OTHER, ..main };
    let user = User::of(&suite, &gateway, foreign);
    assert_refused(user.pin().await, Reason::InputUnavailable);
    assert_refused(User { cache: CacheId::new(), ..user }.pin().await, Reason::InputUnavailable);
    assert_eq!(
        suite.pins().list_pins(pb::ListPinsRequest::default()).await.expect("listed").into_inner().holders,
        []
    );
    // A workload that requests it finds it empty, and publishes nothing.
    let found = user.prepare(&[]).await;
    assert_eq!((&*found.parent_handle, &*found.missing_artifact_id), ("", ""));
    gateway.prepared(user.attempt).await.expect("recorded");
    user.leave(&found, 1).await;
    assert_eq!(user.settle(Some(1), None).await.expect("settled"), 1);
    assert_eq!(theirs.task("job", "/cache", None).await.expect("asked").1, None);
    suite.stop().await;
}

async fn concurrent_workloads_and_deletions_do_not_deadlock(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, main) = (suite.gateway().await, Caller::of(&suite, TEAM));
    for round in 0..10_u64 {
        let cache = main.short("/cache").await;
        let users: Vec<_> = (0..4).map(|_| User::of(&suite, &gateway, cache)).collect();
        let work = users.iter().zip(round * 10..).map(async |(user, content)| {
            // The cache may be deleted by now.
            if let Err(refusal) = user.pin().await {
                assert!(refusal.is(Reason::InputUnavailable), "{refusal}");
                return;
            }
            let found = user.prepare(&[]).await;
            gateway.prepared(user.attempt).await.expect("recorded");
            user.leave(&found, content).await;
            user.settle(Some(content), None).await.expect("settled");
        });
        let which = || pb::DeleteTaskCachesRequest { cache_id: cache.to_string(), ..Default::default() };
        let delete = async { main.delete_tasks(which()).await.expect("deleted") };
        let collect = async { suite.collect_beside_others().await };
        tokio::join!(futures::future::join_all(work), delete, collect);
        main.delete_tasks(which()).await.expect("deleted");
    }
    suite.settle_down(&gateway).await;
    let live = suite.all_artifacts().await.into_iter().filter(|one| one.state() == ArtifactState::Sealed);
    assert_eq!(live.count(), 0, "all of them were let go");
    suite.stop().await;
}

impl Suite {
    /// Returns the replica of an artifact.
    async fn replica_of(&self, artifact: ArtifactId) -> String {
        let replicas = self.get(artifact).await.expect("it is there").replicas;
        replicas.first().expect("a replica").volume_handle.clone()
    }

    async fn explain_cache(&self, cache: CacheId) -> pb::ExplainResponse {
        let request = pb::ExplainRequest { team: TEAM.to_owned(), id: cache.to_string() };
        self.artifacts().explain(request).await.expect("explained").into_inner()
    }

    /// Collects and sweeps until nothing more is deleted.
    async fn settle_down(&self, _gateway: &Gateway) {
        while !self.collect(DryRun::Off).await.is_empty() {}
    }
}
