//! Explanations, and restoring of deleted artifacts.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, ClaimId, Timestamp, TransferId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun, InventoryState, ObjectKind};
use testing::databases::TestDatabase;

use crate::{
    Answer, Gateway, PATIENCE, Suite, TEAM, assert_refused, digest, input, on_both_databases, output,
};

on_both_databases! {
    artifact_explanation_names_keepers_and_ends,
    deletion_is_explained_until_tombstone_expires,
    attempt_items_are_deleted_when_explained,
    replica_explanation_names_its_keepers,
    build_explanation_says_when_it_lets_go,
    cache_explanation_names_users_and_ends,
    nothing_is_explained_to_another_team,
    long_lists_of_explanations_have_totals,
    deleted_artifact_is_restored_while_bytes_exist,
    handed_out_replica_is_not_restored,
    unconfirmed_marked_replica_is_not_restored,
    build_owns_restored_artifact,
    restored_artifact_is_whole_during_hand_out,
    watcher_receives_collected_items,
}

mod ends;
mod replicas;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

async fn suite(database: TestDatabase) -> Suite {
    Suite::start_with(database, |config| config.tombstone = HOUR).await
}

impl Suite {
    pub(crate) async fn explain(&self, id: impl ToString) -> Answer<pb::ExplainResponse> {
        self.explain_to(TEAM, id).await
    }

    async fn explain_to(&self, team: &str, id: impl ToString) -> Answer<pb::ExplainResponse> {
        let request = pb::ExplainRequest { team: team.to_owned(), id: id.to_string() };
        Ok(self.artifacts().explain(request).await?.into_inner())
    }

    async fn undelete(
        &self,
        artifact: ArtifactId,
        kept_by: Option<pb::undelete_request::KeptBy>,
    ) -> Answer<pb::Artifact> {
        let request =
            pb::UndeleteRequest { team: TEAM.to_owned(), artifact_id: artifact.to_string(), kept_by };
        Ok(self.artifacts().undelete(request).await?.into_inner().artifact.expect("the artifact"))
    }

    /// Creates an artifact and a replica that are marked because their build has let go.
    async fn deleted(&self, gateway: &Gateway, content: u64) -> (ArtifactId, String) {
        let (build, workload) = (BuildId::new(), WorkloadId::new());
        self.put_build(build, workload, None).await.expect("put");
        let (artifact, replica) = self.upload(gateway, Some(build), content).await.expect("uploaded");
        self.delete_build(build).await.expect("deleted");
        let went = self.collect(DryRun::Off).await;
        assert_eq!(went.len(), 2, "the artifact and its replica: {went:?}");
        (artifact, replica)
    }

    fn after(&self, duration: Duration) -> Option<Timestamp> {
        Some(self.clock.now() + duration)
    }
}

/// Times of an explanation.
trait When {
    fn marked(&self) -> Option<Timestamp>;
    fn gone(&self) -> Option<Timestamp>;
    fn goes(&self) -> Option<Timestamp>;
    fn forgotten(&self) -> Option<Timestamp>;
}

impl When for pb::ExplainResponse {
    fn marked(&self) -> Option<Timestamp> {
        self.marked_at.as_ref().map(rpc::from_timestamp)
    }

    fn gone(&self) -> Option<Timestamp> {
        self.gone_at.as_ref().map(rpc::from_timestamp)
    }

    fn goes(&self) -> Option<Timestamp> {
        self.expires_at.as_ref().map(rpc::from_timestamp)
    }

    fn forgotten(&self) -> Option<Timestamp> {
        self.remembered_until.as_ref().map(rpc::from_timestamp)
    }
}

fn kept_by(explained: &pb::ExplainResponse) -> Vec<(ObjectKind, &str, Option<Timestamp>)> {
    let keepers = explained.kept_by.iter();
    keepers
        .map(|keeper| (keeper.kind(), keeper.id.as_str(), keeper.until.as_ref().map(rpc::from_timestamp)))
        .collect()
}

fn related(explained: &pb::ExplainResponse, relation: &str) -> Vec<String> {
    let relation = explained.relations.iter().find(|known| known.relation == relation);
    relation.map(|relation| relation.ids.clone()).unwrap_or_default()
}

async fn artifact_explanation_names_keepers_and_ends(database: TestDatabase) {
    let suite = suite(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let made_at = suite.clock.now();
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Artifact, pb::ExplainedState::Sealed));
    assert_eq!(related(&explained, "replicas"), std::slice::from_ref(&replica));
    let old = made_at + 12 * HOUR;
    assert_eq!(kept_by(&explained), [(ObjectKind::Unspecified, "", Some(old))]);
    assert_eq!(explained.goes(), Some(old));
    assert_eq!(explained.reason, "it never had an owner, and it is old");

    // All kinds of references at once.
    let (build, of_build, user, attempt) =
        (BuildId::new(), WorkloadId::new(), WorkloadId::new(), AttemptId::new());
    suite.put_build(build, of_build, Some(MINUTE)).await.expect("put");
    let own = pb::AddOwnerRequest {
        team: TEAM.to_owned(),
        artifact_id: artifact.to_string(),
        build_id: build.to_string(),
    };
    suite.artifacts().add_owner(own).await.expect("owned");
    suite.pin(of_build, &[artifact], Some(build)).await.expect("pinned");
    let planned = gateway.prepare(user, attempt, &[input("in", artifact)]).await.expect("prepared");
    let transfer = TransferId::new();
    suite.plan(artifact, other.worker, transfer).await.expect("planned");
    let explained = suite.explain(artifact).await.expect("explained");
    let (build_id, workload, transfer) = (build.to_string(), of_build.to_string(), transfer.to_string());
    assert_eq!(
        kept_by(&explained),
        [
            (ObjectKind::Build, build_id.as_str(), None),
            (ObjectKind::Workload, workload.as_str(), None),
            (ObjectKind::Transfer, transfer.as_str(), Some(made_at + MINUTE)),
            (ObjectKind::Volume, planned.volumes[0].volume_handle.as_str(), None),
        ]
    );
    assert_eq!(explained.kept_by_total, 4);
    assert_eq!((explained.goes(), explained.reason.as_str()), (None, ""), "not before something happens");
    assert!(explained.kept_by[0].text.ends_with("which is open"), "{:?}", explained.kept_by[0]);

    // When only the build is left, the artifact is deleted at the predicted time.
    suite.settle(user, None, &[], None).await.expect("settled");
    suite.abandon(transfer.parse().expect("an id")).await.expect("abandoned");
    suite.settle(of_build, None, &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!(
        kept_by(&explained),
        [(ObjectKind::Build, build_id.as_str(), Some(suite.clock.now() + MINUTE))]
    );
    assert_eq!(explained.goes(), suite.after(MINUTE));
    assert_eq!(explained.reason, "every owner of it has let go");
    suite.clock.advance(MINUTE - Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await[0].id, artifact.to_string());
    suite.stop().await;
}

async fn deletion_is_explained_until_tombstone_expires(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.deleted(&gateway, 1).await;
    let marked_at = suite.after(Duration::ZERO);
    let shown = suite.get(artifact).await.expect("its tombstone");
    assert_eq!(
        (shown.marked_at.as_ref().map(rpc::from_timestamp), shown.mark_reason.as_str()),
        (marked_at, "every owner of it has let go")
    );

    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!(explained.state(), pb::ExplainedState::Deleting);
    assert_eq!((explained.marked(), explained.goes()), (marked_at, None));
    assert_eq!(explained.reason, "every owner of it has let go");
    assert_eq!(explained.forgotten(), suite.after(HOUR));
    assert!(explained.can_be_undeleted);
    let explained = suite.explain(&replica).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Volume, pb::ExplainedState::Destroying));
    assert_eq!((explained.marked(), explained.reason.as_str()), (marked_at, "its artifact is deleted"));

    gateway.swept(&[], &[&replica]).await;
    assert_eq!(suite.explain(&replica).await.expect("explained").state(), pb::ExplainedState::Sweeping);
    assert!(!suite.explain(artifact).await.expect("explained").can_be_undeleted);
    suite.clock.advance(MINUTE);
    assert_eq!(gateway.report(&[], &[]).await.expect("reported").forgotten, 1);
    let explained = suite.explain(&replica).await.expect("its grave");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Volume, pb::ExplainedState::Gone));
    assert_eq!((explained.marked(), explained.gone()), (marked_at, suite.after(Duration::ZERO)));
    assert_eq!(explained.reason, "its artifact is deleted");
    assert_eq!(explained.forgotten(), suite.after(HOUR));

    suite.clock.advance(HOUR - Duration::from_micros(1));
    suite.collect(DryRun::Off).await;
    assert_refused(suite.explain(artifact).await, Reason::UnknownId);
    suite.explain(&replica).await.expect("it went later");
    suite.clock.advance(Duration::from_micros(1));
    suite.collect(DryRun::Off).await;
    assert_refused(suite.explain(&replica).await, Reason::UnknownId);
    suite.stop().await;
}

async fn attempt_items_are_deleted_when_explained(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| {
        config.tombstone = HOUR;
        config.gc_grace = 5 * MINUTE;
    });
    let suite = suite.await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let needs = [input("src", artifact), output("out", workload.output_artifact("out"))];
    let planned = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    let container = planned.container_handle.as_str();
    let (source, out) =
        (planned.volumes[0].volume_handle.as_str(), planned.volumes[1].volume_handle.as_str());

    let attempt_id = attempt.to_string();
    for handle in [container, source, out] {
        let explained = suite.explain(handle).await.expect("explained");
        assert_eq!(kept_by(&explained), [(ObjectKind::Attempt, attempt_id.as_str(), None)], "{explained:?}");
        assert_eq!((explained.goes(), explained.state()), (None, pb::ExplainedState::Created));
        assert_eq!(related(&explained, "workload"), [workload.to_string()]);
        assert_eq!(related(&explained, "worker"), [gateway.worker.to_string()]);
    }
    let explained = suite.explain(source).await.expect("explained");
    assert_eq!(explained.label, "input src");
    assert_eq!(related(&explained, "parent"), [replica]);
    assert_eq!(related(&explained, "made from"), [artifact.to_string()]);
    let explained = suite.explain(attempt).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Attempt, pb::ExplainedState::Running));
    assert_eq!(related(&explained, "containers"), [container]);
    assert_eq!(related(&explained, "volumes").len(), 2);
    let explained = suite.explain(workload).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Workload, pb::ExplainedState::Running));
    assert_eq!(related(&explained, "attempts"), [attempt_id]);

    suite.settle(workload, None, &[], None).await.expect("settled");
    assert_eq!(suite.explain(workload).await.expect("explained").state(), pb::ExplainedState::Settled);
    assert_eq!(suite.explain(attempt).await.expect("explained").state(), pb::ExplainedState::Ended);
    for handle in [container, source, out] {
        let explained = suite.explain(handle).await.expect("explained");
        assert_eq!(explained.goes(), suite.after(5 * MINUTE), "{explained:?}");
        assert_eq!(explained.reason, "its attempt has ended");
        assert_eq!(explained.kept_by.len(), 1);
    }
    suite.clock.advance(5 * MINUTE - Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 3);
    for handle in [container, source, out] {
        let explained = suite.explain(handle).await.expect("explained");
        assert_eq!(explained.marked(), suite.after(Duration::ZERO));
        assert_eq!(
            (explained.reason.as_str(), explained.state()),
            ("its attempt has ended", pb::ExplainedState::Destroying)
        );
    }
    gateway.swept(&[container], &[source, out]).await;
    gateway.report(&[], &[]).await.expect("reported");
    let explained = suite.explain(container).await.expect("its grave");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Container, pb::ExplainedState::Gone));
    suite.stop().await;
}

async fn replica_explanation_names_its_keepers(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let artifact_id = artifact.to_string();
    let explained = suite.explain(&replica).await.expect("explained");
    let old = suite.clock.now() + 12 * HOUR;
    assert_eq!(kept_by(&explained), [(ObjectKind::Artifact, artifact_id.as_str(), Some(old))]);
    assert_eq!(explained.goes(), Some(old), "with its artifact");
    assert_eq!(explained.reason, "its artifact is deleted");

    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let planned = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    let child = planned.volumes[0].volume_handle.as_str();
    let explained = suite.explain(&replica).await.expect("explained");
    assert_eq!(
        kept_by(&explained),
        [(ObjectKind::Volume, child, None), (ObjectKind::Artifact, artifact_id.as_str(), None)]
    );
    assert_eq!(related(&explained, "children"), [child]);
    assert_eq!(explained.goes(), None);

    let (open, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(open, None).await.expect("created");
    let filled = suite.plan(open, gateway.worker, transfer).await.expect("planned");
    let explained = suite.explain(&filled).await.expect("explained");
    let (transfer, until) = (transfer.to_string(), suite.clock.now() + MINUTE);
    assert_eq!(kept_by(&explained), [(ObjectKind::Transfer, transfer.as_str(), Some(until))]);
    assert_eq!(explained.goes(), Some(until));
    assert_eq!(explained.reason, "the claim of its transfer expired");
    suite.clock.advance(MINUTE);
    suite.collect(DryRun::Off).await;
    let explained = suite.explain(&filled).await.expect("explained");
    assert_eq!(explained.marked(), suite.after(Duration::ZERO));
    suite.stop().await;
}

async fn build_explanation_says_when_it_lets_go(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, Some(MINUTE)).await.expect("put");
    let (artifact, _) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let explained = suite.explain(build).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (ObjectKind::Build, pb::ExplainedState::Running));
    let term = suite.clock.now() + 10 * MINUTE;
    assert_eq!(kept_by(&explained), [(ObjectKind::Unspecified, "", Some(term))]);
    assert_eq!(related(&explained, "owns"), [artifact.to_string()]);
    assert_eq!(related(&explained, "ends with"), [workload.to_string()]);
    assert_eq!(explained.goes(), None);

    suite.pin(workload, &[], Some(build)).await.expect("bound");
    let explained = suite.explain(build).await.expect("explained");
    let workload_id = workload.to_string();
    assert_eq!(kept_by(&explained), [(ObjectKind::Workload, workload_id.as_str(), None)]);
    suite.settle(workload, None, &[], None).await.expect("settled");
    let explained = suite.explain(build).await.expect("explained");
    assert_eq!((explained.state(), explained.goes()), (pb::ExplainedState::Succeeded, suite.after(MINUTE)));
    suite.delete_build(build).await.expect("deleted");
    let explained = suite.explain(build).await.expect("explained");
    assert_eq!((explained.goes(), explained.kept_by_total), (suite.after(Duration::ZERO), 0));
    suite.stop().await;
}

async fn cache_explanation_names_users_and_ends(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| {
        config.resource_cache_ttl = HOUR;
        config.tombstone = HOUR;
    });
    let suite = suite.await;
    let gateway = suite.gateway().await;
    let (artifact, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let claim = ClaimId::new();
    let ask = pb::FindOrCreateResourceCacheRequest {
        team: TEAM.to_owned(),
        key_digest: digest(1).as_bytes().to_vec().into(),
        claim_id: claim.to_string(),
        r#type: "git".to_owned(),
        version: "v1".to_owned(),
        ..Default::default()
    };
    let asked = suite.caches().find_or_create_resource_cache(ask).await.expect("asked").into_inner();
    let cache = asked.cache_id;
    let explained = suite.explain(&cache).await.expect("explained");
    assert_eq!(
        (explained.kind(), explained.state(), explained.label.as_str()),
        (ObjectKind::ResourceCache, pb::ExplainedState::Populating, "git v1")
    );
    assert_eq!(kept_by(&explained), [(ObjectKind::Unspecified, "", suite.after(MINUTE))]);
    assert_eq!(explained.goes(), suite.after(MINUTE), "unless its maker renews");

    let put = pb::PutResourceCacheRequest {
        team: TEAM.to_owned(),
        claim_id: claim.to_string(),
        artifact_id: artifact.to_string(),
    };
    suite.caches().put_resource_cache(put).await.expect("put");
    let explained = suite.explain(&cache).await.expect("explained");
    assert_eq!((explained.state(), explained.goes()), (pb::ExplainedState::Ready, suite.after(HOUR)));
    assert_eq!(related(&explained, "owns"), [artifact.to_string()]);
    // The explanation of the artifact names the cache.
    let keeper = suite.explain(artifact).await.expect("explained");
    assert_eq!(kept_by(&keeper), [(ObjectKind::ResourceCache, cache.as_str(), suite.after(HOUR))]);
    assert_eq!((keeper.goes(), keeper.kept_by_total), (suite.after(HOUR), 1), "it has had an owner");

    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    for user in [
        pb::cache_user::User::BuildId(build.to_string()),
        pb::cache_user::User::WorkloadId(workload.to_string()),
    ] {
        let user = Some(pb::CacheUser { user: Some(user) });
        let request = pb::UseResourceCacheRequest { team: TEAM.to_owned(), cache_id: cache.clone(), user };
        suite.caches().use_resource_cache(request).await.expect("used");
    }
    let explained = suite.explain(&cache).await.expect("explained");
    let users =
        [(ObjectKind::Build, build.to_string(), None), (ObjectKind::Workload, workload.to_string(), None)];
    let said: Vec<_> =
        kept_by(&explained).into_iter().map(|(thing, id, at)| (thing, id.to_owned(), at)).collect();
    assert_eq!((said, explained.kept_by_total), (users.to_vec(), 2));
    assert_eq!((explained.goes(), explained.reason.as_str()), (None, ""));
    assert_eq!(suite.explain(artifact).await.expect("explained").goes(), None);
    assert_refused(suite.explain_to("other", &cache).await, Reason::UnknownId);
    // After the uses have ended, it is deleted at the predicted time.
    suite.delete_build(build).await.expect("deleted");
    suite.settle(workload, None, &[], None).await.expect("settled");
    let goes = suite.explain(&cache).await.expect("explained").goes();
    assert_eq!(goes, suite.after(HOUR));
    suite.clock.advance(HOUR - Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    suite.explain(&cache).await.expect("it is there");
    suite.clock.advance(Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.explain(&cache).await.expect("its grave").state(), pb::ExplainedState::Gone);

    let ask = pb::FindOrCreateTaskCacheRequest {
        team: TEAM.to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "path".to_owned(),
        ttl: Some(rpc::duration(MINUTE)),
    };
    let asked = suite.caches().find_or_create_task_cache(ask).await.expect("asked").into_inner();
    let explained = suite.explain(&asked.cache_id).await.expect("explained");
    assert_eq!(
        (explained.kind(), explained.state(), explained.label.as_str(), explained.goes()),
        (ObjectKind::TaskCache, pb::ExplainedState::Empty, "job step path", suite.after(MINUTE))
    );
    assert_refused(suite.explain_to("other", &asked.cache_id).await, Reason::UnknownId);

    let (image, _) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let put = pb::PutBaseResourceTypeRequest {
        team: TEAM.to_owned(),
        r#type: "git".to_owned(),
        version: "v2".to_owned(),
        worker_id: gateway.worker.to_string(),
        artifact_id: image.to_string(),
    };
    suite.caches().put_base_resource_type(put).await.expect("put");
    let keeper = suite.explain(image).await.expect("explained");
    let [(ObjectKind::BaseResourceType, id, None)] = kept_by(&keeper)[..] else { panic!("{keeper:?}") };
    let explained = suite.explain_to("other", id).await.expect("it is every team's");
    assert_eq!(
        (explained.kind(), explained.label.as_str(), explained.goes()),
        (ObjectKind::BaseResourceType, "git v2", None)
    );
    assert_eq!(related(&explained, "worker"), [gateway.worker.to_string()]);
    suite.stop().await;
}

async fn nothing_is_explained_to_another_team(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (build, workload, attempt) = (BuildId::new(), WorkloadId::new(), AttemptId::new());
    suite.put_build(build, workload, None).await.expect("put");
    let (artifact, replica) = suite.upload(&gateway, Some(build), 1).await.expect("uploaded");
    let planned = gateway.prepare(workload, attempt, &[input("in", artifact)]).await.expect("prepared");
    let ids = [
        artifact.to_string(),
        replica,
        build.to_string(),
        workload.to_string(),
        attempt.to_string(),
        planned.container_handle,
        planned.volumes[0].volume_handle.clone(),
    ];
    for id in ids {
        suite.explain(&id).await.expect("to its own team");
        assert_refused(suite.explain_to("other", &id).await, Reason::UnknownId);
    }
    assert_refused(suite.explain(BuildId::new()).await, Reason::UnknownId);
    assert_refused(suite.explain("no id").await, Reason::InvalidField);
    let (deleted, _) = suite.deleted(&gateway, 2).await;
    let request =
        pb::UndeleteRequest { team: "other".to_owned(), artifact_id: deleted.to_string(), kept_by: None };
    let refused = suite.artifacts().undelete(request).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::ArtifactNotFound);
    assert_eq!(suite.get(deleted).await.expect("its tombstone").state(), ArtifactState::Deleting);
    suite.stop().await;
}

async fn long_lists_of_explanations_have_totals(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let needs: Vec<_> = (0..70).map(|number| input(&format!("in{number}"), artifact)).collect();
    gateway.prepare(WorkloadId::new(), AttemptId::new(), &needs).await.expect("prepared");
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!((explained.kept_by.len(), explained.kept_by_total), (51, 71), "and the rule about the young");
    let explained = suite.explain(replica).await.expect("explained");
    assert_eq!((explained.kept_by.len(), explained.kept_by_total), (51, 71), "and its artifact");
    let children = explained.relations.iter().find(|known| known.relation == "children").expect("children");
    assert_eq!((children.ids.len(), children.total), (50, 70));
    suite.stop().await;
}

async fn deleted_artifact_is_restored_while_bytes_exist(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (artifact, replica) = suite.deleted(&gateway, 1).await;
    // A report that begins before the restore and is judged after it has no effect on the replica.
    let early = gateway.begin_report().await.expect("begun");
    for _ in 0..2 {
        let back = suite.undelete(artifact, None).await.expect("it is back");
        assert_eq!((back.state(), back.replicas.len()), (ArtifactState::Sealed, 1));
        assert_eq!((back.marked_at, back.mark_reason.as_str()), (None, ""));
        assert_eq!(back.kept_by, ["no owner: kept for a limited time"]);
    }
    assert_eq!(gateway.report_with(early, &[], &[]).await.expect("reported").lost, 0);
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
    let explained = suite.explain(artifact).await.expect("explained");
    assert_eq!(explained.goes(), suite.after(HOUR));

    // It is usable again.
    let workload = WorkloadId::new();
    suite.pin(workload, &[artifact], None).await.expect("pinned");
    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.clock.advance(HOUR - Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(Duration::from_micros(1));
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "its reprieve is over");

    // It is kept for the requested time.
    let keep = |keep| Some(pb::undelete_request::KeptBy::Keep(rpc::duration(keep)));
    suite.undelete(artifact, keep(MINUTE)).await.expect("it is back");
    suite.undelete(artifact, keep(2 * MINUTE)).await.expect("kept for longer");
    suite.undelete(artifact, keep(MINUTE)).await.expect("and not for less");
    assert_eq!(suite.explain(artifact).await.expect("explained").goes(), suite.after(2 * MINUTE));
    assert_refused(suite.undelete(artifact, keep(100_000 * HOUR)).await, Reason::InvalidField);
    assert_refused(suite.undelete(ArtifactId::new(), None).await, Reason::ArtifactNotFound);
    suite.stop().await;
}

async fn handed_out_replica_is_not_restored(database: TestDatabase) {
    let suite = suite(database).await;
    let (one, two) = (suite.gateway().await, suite.gateway().await);
    let (artifact, replica) = suite.upload(&one, None, 1).await.expect("uploaded");
    let copy = suite.plan(artifact, two.worker, TransferId::new()).await.expect("planned");
    two.complete(&copy, digest(1)).await.expect("complete");
    suite.clock.advance(13 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 3);
    one.swept(&[], &[&replica]).await;

    // The other replica is enough.
    let back = suite.undelete(artifact, None).await.expect("it is back");
    assert_eq!(back.replicas.iter().map(|replica| &replica.volume_handle).collect::<Vec<_>>(), [&copy]);
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Sweeping));
    suite.clock.advance(2 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    two.swept(&[], &[&copy]).await;
    assert_refused(suite.undelete(artifact, None).await, Reason::BytesGone);
    assert_eq!(suite.get(artifact).await.expect("its tombstone").state(), ArtifactState::Deleting);

    // An artifact with lost bytes is not restored.
    let (lost, _) = suite.upload(&one, None, 3).await.expect("uploaded");
    one.report(&[], &[]).await.expect("reported");
    assert_refused(suite.undelete(lost, None).await, Reason::BytesGone);

    // An artifact without final bytes has nothing to restore.
    let (open, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(open, None).await.expect("created");
    assert_refused(suite.undelete(open, None).await, Reason::ArtifactNotFound);
    let handle = suite.plan(open, one.worker, transfer).await.expect("planned");
    one.complete(&handle, digest(2)).await.expect("complete");
    suite.abandon(transfer).await.expect("abandoned");
    assert_refused(suite.undelete(open, None).await, Reason::BytesGone);
    suite.stop().await;
}

async fn unconfirmed_marked_replica_is_not_restored(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (lost, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    assert_eq!(gateway.report(&[], &[]).await.expect("reported").lost, 1);
    let (kept, replica) = suite.upload(&gateway, None, 2).await.expect("uploaded");
    suite.clock.advance(13 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 4);
    assert_refused(suite.undelete(lost, None).await, Reason::BytesGone);

    // After the mark its worker has begun a new incarnation, and has not reported.
    let gateway = suite.silent_gateway(gateway.worker, 2, 2);
    gateway.begin_report().await.expect("begun");
    suite.undelete(kept, None).await.expect("it may be there");
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Unconfirmed));
    gateway.report(std::slice::from_ref(&replica), &[]).await.expect("reported");
    assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
    suite.stop().await;
}

async fn build_owns_restored_artifact(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let (artifact, _) = suite.deleted(&gateway, 1).await;
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    let by_build = || Some(pb::undelete_request::KeptBy::BuildId(build.to_string()));
    assert_refused(suite.undelete(artifact, by_build()).await, Reason::OwnerEnded);
    assert_eq!(suite.get(artifact).await.expect("its tombstone").state(), ArtifactState::Deleting);
    suite.put_build(build, workload, None).await.expect("put");
    let back = suite.undelete(artifact, by_build()).await.expect("it is back");
    assert_eq!(back.kept_by, [format!("build {build}")]);
    suite.pin(workload, &[], Some(build)).await.expect("bound");
    suite.clock.advance(24 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.settle(workload, None, &[], None).await.expect("settled");
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    suite.stop().await;
}

async fn restored_artifact_is_whole_during_hand_out(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    for content in 0..15 {
        let (artifact, replica) = suite.deleted(&gateway, content).await;
        let watch = async {
            for _ in 0..content % 5 {
                suite.get(artifact).await.expect("its tombstone, or it");
            }
            gateway.watch().await.expect("a stream")
        };
        let (undeleted, stream) = tokio::join!(suite.undelete(artifact, None), watch);
        match undeleted {
            Ok(_) => {
                drop(stream);
                assert_eq!(suite.volume_state(&replica).await, Some(InventoryState::Created));
                suite.clock.advance(2 * HOUR);
                suite.collect(DryRun::Off).await;
            }
            refused => assert_refused(refused, Reason::BytesGone),
        }
        // In both cases it is finally deleted.
        gateway.swept(&[], &[&replica]).await;
        gateway.report(&[], &[]).await.expect("reported");
    }
    suite.stop().await;
}

async fn watcher_receives_collected_items(database: TestDatabase) {
    let suite = suite(database).await;
    let gateway = suite.gateway().await;
    let mut collector = pb::collector_client::CollectorClient::new(suite.peer.clone());
    let mut stream =
        collector.watch_collections(pb::WatchCollectionsRequest {}).await.expect("a stream").into_inner();
    let (artifact, replica) = suite.deleted(&gateway, 1).await;
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let message = tokio::time::timeout(PATIENCE, stream.message()).await.expect("in time");
        let message = message.expect("no error").expect("the stream is open");
        assert_eq!(message.missed, 0);
        seen.extend(message.collected);
    }
    assert_eq!(
        seen.iter().map(|marked| marked.id.as_str()).collect::<Vec<_>>(),
        [&artifact.to_string(), &replica]
    );
    assert_eq!(
        (seen[1].kind(), seen[1].reason.as_str()),
        (pb::ObjectKind::Volume, "its artifact is deleted")
    );
    suite.stop().await;
    assert_eq!(stream.message().await.expect("no error"), None, "the stream ends with the store");
}
