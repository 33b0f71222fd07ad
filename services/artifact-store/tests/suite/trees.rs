//! Artifacts made from small trees: contents, locations and lifetimes.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, Digest, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::small_tree_entry::Content;
use rpc::pb::artifacts::{ArtifactState, DryRun, PlanOutcome};
use testing::databases::TestDatabase;

use crate::{Answer, Suite, TEAM, Tables, assert_refused, digest, input, on_both_databases};

on_both_databases! {
    tree_makes_sealed_artifact_without_worker,
    stored_tree_counts_as_bytes,
    lost_replica_of_tree_is_made_again,
    tree_stays_until_its_tombstone_expires,
}

const HOUR: Duration = Duration::from_secs(3600);

fn entry(path: &str, what: Content) -> pb::SmallTreeEntry {
    pb::SmallTreeEntry { path: path.as_bytes().to_vec().into(), content: Some(what), ..Default::default() }
}

fn file(path: &str, content: impl Into<Vec<u8>>) -> pb::SmallTreeEntry {
    entry(path, Content::File(content.into().into()))
}

fn tree(content: u8) -> pb::SmallTree {
    let link = entry("bin/link", Content::Symlink("tool".into()));
    let tool = pb::SmallTreeEntry { mode: Some(0o755), ..file("bin/tool", [content]) };
    pb::SmallTree { entries: vec![tool, link, file("empty", "")] }
}

fn digest_of(tree: &pb::SmallTree) -> Digest {
    rpc::small_tree::parse("tree", tree).expect("it is fine").digest()
}

impl Suite {
    async fn create_from(
        &self,
        artifact: ArtifactId,
        build: Option<BuildId>,
        tree: Option<pb::SmallTree>,
    ) -> Answer<pb::CreateArtifactResponse> {
        let request = pb::CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: TEAM.to_owned(),
            build_id: build.map(|build| build.to_string()).unwrap_or_default(),
            label: "handed over".to_owned(),
            tree,
        };
        Ok(self.artifacts().create_artifact(request).await?.into_inner())
    }

    /// Creates an artifact from a tree. Returns it with its digest.
    async fn handed_over(&self, build: Option<BuildId>, content: u8) -> (ArtifactId, Digest) {
        let (artifact, tree) = (ArtifactId::new(), tree(content));
        self.create_from(artifact, build, Some(tree.clone())).await.expect("created");
        (artifact, digest_of(&tree))
    }

    /// Creates a build that stays open until it is deleted.
    async fn build(&self) -> BuildId {
        let build = BuildId::new();
        let request =
            pb::PutBuildRequest { build_id: build.to_string(), team: TEAM.to_owned(), ..Default::default() };
        self.owners().put_build(request).await.expect("put");
        build
    }

    async fn read_tree(&self, team: &str, artifact: ArtifactId) -> Answer<Option<pb::SmallTree>> {
        let request = pb::ReadTreeRequest { team: team.to_owned(), artifact_id: artifact.to_string() };
        Ok(self.artifacts().read_tree(request).await?.into_inner().tree)
    }

    async fn planned(&self, artifact: ArtifactId, worker: WorkerId) -> pb::PlanReplicaResponse {
        let request = pb::PlanReplicaRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: TransferId::new().to_string(),
        };
        self.replicas().plan_replica(request).await.expect("planned").into_inner()
    }

    async fn why(&self, artifact: ArtifactId) -> Answer<pb::ExplainResponse> {
        let request = pb::ExplainRequest { team: TEAM.to_owned(), id: artifact.to_string() };
        Ok(self.artifacts().explain(request).await?.into_inner())
    }

    async fn bring_back(&self, artifact: ArtifactId) -> Answer<pb::Artifact> {
        let keep = pb::undelete_request::KeptBy::Keep(rpc::duration(HOUR));
        let request = pb::UndeleteRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact.to_string(),
            kept_by: Some(keep),
        };
        Ok(self.artifacts().undelete(request).await?.into_inner().artifact.expect("the artifact"))
    }

    async fn at_risk(&self) -> Vec<String> {
        let request = pb::ListAtRiskRequest { team: TEAM.to_owned(), ..Default::default() };
        let listed = self.inventory().list_at_risk(request).await.expect("listed").into_inner();
        listed.artifacts.into_iter().map(|artifact| artifact.artifact_id).collect()
    }

    /// Returns the number of trees in the database.
    async fn trees(&self) -> usize {
        let rows = Tables::open(&self.url()).await.rows().await;
        rows.iter().filter(|row| row.starts_with("trees: ")).count()
    }
}

async fn tree_makes_sealed_artifact_without_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = suite.build().await;
    let large = pb::SmallTree { entries: vec![file("large", vec![0xa5; (1 << 20) - 5])] };
    for tree in [tree(1), large] {
        let artifact = ArtifactId::new();
        let made = suite.create_from(artifact, Some(build), Some(tree.clone())).await.expect("created");
        let digest = digest_of(&tree);
        assert_eq!(made.digest, digest.as_bytes().to_vec());
        let seen = suite.get(artifact).await.expect("it is there");
        assert_eq!((seen.state(), seen.in_store, &*seen.replicas), (ArtifactState::Sealed, true, &[][..]));
        assert_eq!((&seen.digest, seen.size_bytes), (&made.digest, made.size_bytes));
        assert_eq!((&*seen.label, seen.kept_by), ("handed over", vec![format!("build {build}")]));
        assert_eq!(suite.read_tree(TEAM, artifact).await.expect("it is kept"), Some(tree.clone()));
        assert_refused(suite.read_tree("other", artifact).await, Reason::ArtifactNotFound);

        // An equal tree is accepted in any order. A different tree is not.
        let mut turned = tree.clone();
        turned.entries.reverse();
        assert_eq!(suite.create_from(artifact, Some(build), Some(turned)).await.expect("the same"), made);
        for other in [None, Some(pb::SmallTree::default())] {
            let refused = suite.create_from(artifact, Some(build), other).await;
            assert_refused(refused, Reason::ArtifactExists);
        }
        let unowned = suite.create_from(artifact, None, Some(tree)).await;
        assert_refused(unowned, Reason::ArtifactExists);
        assert_refused(suite.seal(artifact, crate::digest(1)).await, Reason::ArtifactSealed);
    }
    let open = ArtifactId::new();
    suite.create_from(open, None, None).await.expect("created");
    assert_eq!(suite.read_tree(TEAM, open).await.expect("asked"), None);
    assert_refused(suite.create_from(open, None, Some(tree(1))).await, Reason::ArtifactExists);
    suite.stop().await;
}

async fn stored_tree_counts_as_bytes(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = suite.build().await;
    let (artifact, digest) = suite.handed_over(Some(build), 1).await;
    assert_eq!(suite.at_risk().await, [""; 0], "no worker can take it along");
    let pinned = suite.pin(WorkloadId::new(), &[artifact], None).await.expect("no replica is needed");
    assert!(pinned[0].in_store && pinned[0].replicas.is_empty(), "{pinned:?}");
    let adopted = suite.adopt(digest, Some(build)).await.expect("asked").expect("found");
    assert_eq!((adopted.artifact_id, adopted.in_store), (artifact.to_string(), true));
    let task = pb::FindOrCreateTaskCacheRequest {
        team: TEAM.to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "/cache".to_owned(),
        ttl: None,
    };
    let cache = suite.caches().find_or_create_task_cache(task.clone()).await.expect("asked").into_inner();
    let publish = pb::PublishTaskCacheRequest {
        team: TEAM.to_owned(),
        cache_id: cache.cache_id.clone(),
        artifact_id: artifact.to_string(),
    };
    suite.caches().publish_task_cache(publish).await.expect("published");
    let found = suite.caches().find_or_create_task_cache(task).await.expect("asked").into_inner();
    assert_eq!(found.location.expect("its bytes are there").artifact_id, artifact.to_string());
    let locate = pb::LocateCachesRequest { team: TEAM.to_owned(), cache_ids: vec![cache.cache_id] };
    let located = suite.caches().locate_caches(locate).await.expect("located").into_inner();
    assert_eq!(located.locations.len(), 1);
    suite.stop().await;
}

async fn lost_replica_of_tree_is_made_again(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let build = suite.build().await;
    let (artifact, tree_digest) = suite.handed_over(Some(build), 1).await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [input("in", artifact)];
    let missing = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    assert_eq!(missing.volumes[0].missing_artifact_id, artifact.to_string());

    let mut before = String::new();
    for _ in 0..2 {
        let planned = suite.planned(artifact, gateway.worker).await;
        assert_eq!(planned.outcome(), PlanOutcome::Created);
        assert_eq!(planned.digest, tree_digest.as_bytes().to_vec());
        assert_ne!(planned.volume_handle, before);
        assert_refused(gateway.complete(&planned.volume_handle, digest(1)).await, Reason::ClaimLost);
        gateway.complete(&planned.volume_handle, tree_digest).await.expect("complete");
        let again = suite.planned(artifact, gateway.worker).await;
        assert_eq!((again.outcome(), &again.volume_handle), (PlanOutcome::Complete, &planned.volume_handle));
        let prepared = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
        assert_eq!(prepared.volumes[0].parent_handle, planned.volume_handle);
        // The replica is lost, and the tree is left.
        gateway.report(&[], &[]).await.expect("reported");
        let seen = suite.get(artifact).await.expect("it is there");
        assert_eq!((seen.state(), seen.in_store, seen.replicas.len()), (ArtifactState::Sealed, true, 0));
        assert_eq!(suite.at_risk().await, [""; 0]);
        suite.pin(WorkloadId::new(), &[artifact], None).await.expect("it is not lost");
        before = planned.volume_handle;
    }

    // The last replica of a kept artifact may be dropped, and its worker forgotten.
    let planned = suite.planned(artifact, gateway.worker).await;
    gateway.complete(&planned.volume_handle, tree_digest).await.expect("complete");
    let drop = pb::DropReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: gateway.worker.to_string(),
        reason: "the disk is full".to_owned(),
        force: false,
    };
    suite.replicas().drop_replica(drop).await.expect("the store has the bytes");
    let other = suite.gateway().await;
    let planned = suite.planned(artifact, other.worker).await;
    other.complete(&planned.volume_handle, tree_digest).await.expect("complete");
    let forget =
        pb::ForgetWorkerRequest { worker_id: other.worker.to_string(), force: false, dry_run: false };
    suite.inventory().forget_worker(forget).await.expect("the store has the bytes");
    let watched = suite.inventory().watch_lost(pb::WatchLostRequest::default()).await.expect("watched");
    let notice = watched.into_inner().message().await.expect("no error").expect("a loss");
    assert_eq!((notice.artifact_id, notice.in_store), (artifact.to_string(), true));
    suite.stop().await;
}

async fn tree_stays_until_its_tombstone_expires(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.tombstone = HOUR).await;
    let build = suite.build().await;
    let (owned, _) = suite.handed_over(Some(build), 1).await;
    let (unowned, _) = suite.handed_over(None, 2).await;
    let kept = suite.why(unowned).await.expect("explained");
    assert!(kept.in_store && kept.relations.is_empty() && kept.expires_at.is_some(), "{kept:?}");
    suite.clock.advance(12 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 1);
    let deleted = suite.why(unowned).await.expect("explained");
    assert!(deleted.in_store && deleted.can_be_undeleted && deleted.marked_at.is_some(), "{deleted:?}");
    assert_refused(suite.read_tree(TEAM, unowned).await, Reason::ArtifactNotFound);
    assert_refused(suite.pin(WorkloadId::new(), &[unowned], None).await, Reason::InputUnavailable);

    // It is restored although no worker has it.
    suite.clock.advance(HOUR / 2);
    suite.collect(DryRun::Off).await;
    let back = suite.bring_back(unowned).await.expect("its bytes are there");
    assert_eq!((back.state(), back.in_store), (ArtifactState::Sealed, true));
    assert_eq!(suite.read_tree(TEAM, unowned).await.expect("it is kept"), Some(tree(2)));
    suite.clock.advance(HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 1);
    assert_eq!(suite.trees().await, 2);
    suite.clock.advance(HOUR);
    suite.collect(DryRun::Off).await;
    assert_refused(suite.why(unowned).await, Reason::UnknownId);
    assert_refused(suite.bring_back(unowned).await, Reason::ArtifactNotFound);
    assert_eq!(suite.trees().await, 1, "that of the other, which is kept");
    assert_eq!(suite.read_tree(TEAM, owned).await.expect("it is kept"), Some(tree(1)));

    suite.delete_build(build).await.expect("deleted");
    suite.collect(DryRun::Off).await;
    suite.clock.advance(HOUR);
    suite.collect(DryRun::Off).await;
    assert_eq!((suite.trees().await, suite.all_artifacts().await), (0, Vec::new()));
    suite.stop().await;
}
