//! Imports of worker-provided images and certificates.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, Digest, TransferId, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun, ImportState, InventoryState, ObjectKind};
use testing::databases::TestDatabase;

use crate::{Answer, Gateway, Suite, TEAM, assert_refused, digest, input, on_both_databases};

on_both_databases! {
    provided_image_becomes_base_type_of_worker,
    provided_certs_become_certs_of_worker,
    repeated_prepare_import_imports_nothing_twice,
    newer_version_replaces_imported_version,
    ended_session_seals_no_import,
    lost_import_is_imported_again,
    import_loses_claim_when_not_renewed,
    failed_import_is_shown_and_keeps_previous_artifact,
    only_its_gateway_fills_or_seals_import,
    concurrent_prepares_import_once,
    every_team_uses_an_imported_artifact,
    imports_are_deleted_with_forgotten_worker,
    artifacts_of_others_outlive_forgotten_worker,
    explanation_of_import_names_its_keeper,
}

const MINUTE: Duration = Duration::from_secs(60);

fn git(version: &str) -> pb::WorkerProvided {
    let resource_type = "git".to_owned();
    pb::WorkerProvided { resource_type, version: version.to_owned(), path: format!("/opt/git/{version}.tgz") }
}

fn certs(path: &str) -> pb::WorkerProvided {
    pb::WorkerProvided { path: path.to_owned(), ..Default::default() }
}

impl Gateway {
    async fn prepare_import(
        &self,
        suite: &Suite,
        provided: pb::WorkerProvided,
    ) -> Answer<pb::PrepareImportResponse> {
        let request = pb::PrepareImportRequest {
            session_credential: self.credential.clone(),
            provided: Some(provided),
        };
        Ok(suite.inventory().prepare_import(request).await?.into_inner())
    }

    async fn complete_import(&self, suite: &Suite, volume: &str, digest: Digest) -> Answer<String> {
        let request = pb::CompleteImportRequest {
            session_credential: self.credential.clone(),
            volume_handle: volume.to_owned(),
            size_bytes: 7,
            digest: digest.as_bytes().to_vec().into(),
        };
        Ok(suite.inventory().complete_import(request).await?.into_inner().artifact_id)
    }

    async fn fail_import(&self, suite: &Suite, volume: &str, why: &str) -> Answer<()> {
        let request = pb::FailImportRequest {
            session_credential: self.credential.clone(),
            volume_handle: volume.to_owned(),
            reason: why.to_owned(),
        };
        suite.inventory().fail_import(request).await?;
        Ok(())
    }

    /// Imports an item completely. Returns the artifact and its replica.
    async fn import(
        &self,
        suite: &Suite,
        provided: pb::WorkerProvided,
        content: u64,
    ) -> (ArtifactId, String) {
        let begun = self.prepare_import(suite, provided).await.expect("prepared");
        assert!(begun.term.is_some(), "it is to be imported: {begun:?}");
        let sealed = self.complete_import(suite, &begun.volume_handle, digest(content)).await;
        assert_eq!(sealed.expect("complete"), begun.artifact_id);
        (begun.artifact_id.parse().expect("an id"), begun.volume_handle)
    }
}

impl Suite {
    async fn imports(&self) -> Vec<pb::Import> {
        let request = pb::ListImportsRequest::default();
        self.inventory().list_imports(request).await.expect("listed").into_inner().imports
    }

    /// Returns the only listed import.
    async fn listed(&self) -> pb::Import {
        let [only] = &self.imports().await[..] else { panic!("there is one") };
        only.clone()
    }

    async fn base_types(&self) -> Vec<pb::BaseResourceType> {
        let request = pb::ListBaseResourceTypesRequest::default();
        self.caches().list_base_resource_types(request).await.expect("listed").into_inner().types
    }

    async fn certs(&self) -> Vec<pb::ResourceCerts> {
        let request = pb::ListResourceCertsRequest::default();
        self.caches().list_resource_certs(request).await.expect("listed").into_inner().certs
    }

    async fn state_of(&self, artifact: ArtifactId) -> Option<ArtifactState> {
        self.get(artifact).await.ok().map(|artifact| artifact.state())
    }

    async fn forget(&self, worker: WorkerId, force: bool) -> Answer<()> {
        let request = pb::ForgetWorkerRequest { worker_id: worker.to_string(), force, dry_run: false };
        self.inventory().forget_worker(request).await?;
        Ok(())
    }
}

async fn provided_image_becomes_base_type_of_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let begun = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    let artifact: ArtifactId = begun.artifact_id.parse().expect("an id");
    assert_eq!(suite.state_of(artifact).await, Some(ArtifactState::Open));
    assert_eq!(suite.listed().await.state(), ImportState::Importing);
    assert_eq!(suite.base_types().await, [], "not before it was sealed");

    gateway.complete_import(&suite, &begun.volume_handle, digest(1)).await.expect("complete");
    let made = suite.get(artifact).await.expect("it is there");
    assert_eq!((made.state(), made.size_bytes, &*made.team), (ArtifactState::Sealed, 7, ""));
    assert_eq!((made.digest.to_vec(), &*made.label), (digest(1).as_bytes().to_vec(), "git 1"));
    let [replica] = &made.replicas[..] else { panic!("{made:?}") };
    assert_eq!(replica.volume_handle, begun.volume_handle);
    assert_eq!(replica.worker_id, gateway.worker.to_string());
    assert_eq!(replica.verification(), pb::Verification::Verified);
    let [git] = &suite.base_types().await[..] else { panic!("one type") };
    assert_eq!((&*git.r#type, &*git.version, &git.artifact_id), ("git", "1", &begun.artifact_id));
    assert_eq!(git.worker_id, gateway.worker.to_string());
    let listed = suite.listed().await;
    assert_eq!((listed.state(), &listed.artifact_id), (ImportState::Imported, &begun.artifact_id));
    assert_eq!((listed.worker_id, listed.provided), (gateway.worker.to_string(), Some(self::git("1"))));

    // The base type never lets go.
    suite.clock.advance(1000 * 24 * 60 * MINUTE);
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.stop().await;
}

async fn provided_certs_become_certs_of_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (first, _) = gateway.import(&suite, certs("/etc/ssl/certs"), 1).await;
    let (of_other, _) = other.import(&suite, certs("/etc/ssl/certs"), 1).await;
    assert_ne!(first, of_other, "each worker has its own");
    let mut owners: Vec<_> =
        suite.certs().await.into_iter().map(|certs| (certs.worker_id, certs.artifact_id)).collect();
    owners.sort();
    let mut expected = [(gateway.worker, first), (other.worker, of_other)]
        .map(|(worker, artifact)| (worker.to_string(), artifact.to_string()));
    expected.sort();
    assert_eq!(owners, expected);
    assert_eq!(suite.base_types().await, []);

    let (second, _) = gateway.import(&suite, certs("/elsewhere"), 2).await;
    let collected: Vec<_> =
        suite.collect(DryRun::Off).await.into_iter().map(|collected| collected.id).collect();
    assert!(collected.contains(&first.to_string()), "{collected:?}");
    for kept in [second, of_other] {
        assert!(!collected.contains(&kept.to_string()), "{collected:?}");
    }
    suite.stop().await;
}

async fn repeated_prepare_import_imports_nothing_twice(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let gateway = suite.silent_gateway(worker, 1, 1);
    gateway.begin_report().await.expect("begun");
    let begun = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    assert_eq!(gateway.prepare_import(&suite, git("1")).await.expect("again"), begun);
    let complete = async || gateway.complete_import(&suite, &begun.volume_handle, digest(1)).await;
    assert_eq!(complete().await.expect("complete"), begun.artifact_id);
    assert_eq!(complete().await.expect("again"), begun.artifact_id);
    let other = gateway.complete_import(&suite, &begun.volume_handle, digest(2)).await;
    assert_refused(other, Reason::InvalidField);

    // A restarted gateway, and a standby that takes over.
    for session in [2, 3] {
        let next = suite.silent_gateway(worker, 1, session);
        let found = next.prepare_import(&suite, git("1")).await.expect("found");
        assert_eq!((found.term, &found.artifact_id), (None, &begun.artifact_id));
        assert_eq!(found.volume_handle, begun.volume_handle);
    }
    // A new incarnation must report first.
    let reborn = suite.silent_gateway(worker, 2, 4);
    assert_refused(reborn.prepare_import(&suite, git("1")).await, Reason::Unavailable);
    reborn.report(std::slice::from_ref(&begun.volume_handle), &[]).await.expect("reported");
    let found = reborn.prepare_import(&suite, git("1")).await.expect("found");
    assert_eq!((found.term, found.volume_handle), (None, begun.volume_handle));
    assert_eq!(suite.volumes().await.len(), 1);
    assert_eq!(suite.base_types().await.len(), 1);
    suite.stop().await;
}

async fn newer_version_replaces_imported_version(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (first, first_volume) = gateway.import(&suite, git("1"), 1).await;
    let id = suite.base_types().await[0].base_type_id.clone();
    // An active attempt.
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let prepared = gateway.prepare(workload, attempt, &[input("image", first)]).await.expect("prepared");
    assert_eq!(prepared.volumes[0].parent_handle, first_volume);

    // An unfinished import of an old version is garbage. The existing artifact stays until the next
    // one is complete.
    let begun = gateway.prepare_import(&suite, git("2")).await.expect("prepared");
    assert!(begun.term.is_some());
    assert_eq!(suite.base_types().await[0].artifact_id, first.to_string());
    let (third, volume) = gateway.import(&suite, git("3"), 3).await;
    let refused = gateway.complete_import(&suite, &begun.volume_handle, digest(2)).await;
    assert_refused(refused, Reason::ClaimLost);
    assert_eq!(suite.volume_state(&begun.volume_handle).await, Some(InventoryState::Destroying));
    let [now] = &suite.base_types().await[..] else { panic!("one type") };
    assert_eq!((&now.base_type_id, &*now.version, &now.artifact_id), (&id, "3", &third.to_string()));

    // The path counts as well as the version.
    let elsewhere = pb::WorkerProvided { path: "/elsewhere".to_owned(), ..git("3") };
    let (fourth, _) = gateway.import(&suite, elsewhere, 3).await;
    let collected = async || {
        let collected = suite.collect(DryRun::Off).await.into_iter();
        collected.filter(|one| one.kind() == pb::ObjectKind::Artifact).map(|one| one.id).collect::<Vec<_>>()
    };
    assert_eq!(collected().await, [third.to_string()], "the first is in use");
    assert_eq!(suite.volume_state(&volume).await, Some(InventoryState::Destroying));
    suite.settle(workload, Some(attempt), &[], None).await.expect("settled");
    suite.collect(DryRun::Off).await;
    suite.clock.advance(2 * MINUTE);
    suite.collect(DryRun::Off).await;
    assert_ne!(suite.state_of(first).await, Some(ArtifactState::Sealed), "nothing uses it any more");
    assert_eq!(suite.state_of(fourth).await, Some(ArtifactState::Sealed));
    suite.stop().await;
}

async fn ended_session_seals_no_import(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    for (incarnation, session, reason) in [(1, 2, Reason::StaleSession), (2, 3, Reason::StaleIncarnation)] {
        let old = suite.silent_gateway(worker, incarnation, session - 1);
        let version = format!("{session}");
        let begun = old.prepare_import(&suite, git(&version)).await.expect("prepared");
        let new =
            if reason == Reason::StaleSession { (incarnation, session) } else { (incarnation + 1, session) };
        let new = suite.silent_gateway(worker, new.0, new.1);
        new.begin_report().await.expect("it may speak");
        let late = old.complete_import(&suite, &begun.volume_handle, digest(1)).await;
        assert_refused(late, reason);
        assert_refused(old.prepare_import(&suite, git(&version)).await, reason);
        assert_refused(old.fail_import(&suite, &begun.volume_handle, "late").await, reason);

        // The new session does not complete a volume of the old one, which may still be written to.
        assert_eq!(suite.volume_state(&begun.volume_handle).await, Some(InventoryState::Destroying));
        let not_its = new.complete_import(&suite, &begun.volume_handle, digest(1)).await;
        assert_refused(not_its, Reason::ClaimLost);
        assert_ne!(suite.listed().await.state(), ImportState::Imported);
        let again = new.prepare_import(&suite, git(&version)).await.expect("prepared");
        assert!(again.term.is_some());
        assert_ne!(again.volume_handle, begun.volume_handle);
        assert_eq!(again.artifact_id, begun.artifact_id, "it is open still");
        new.complete_import(&suite, &again.volume_handle, digest(1)).await.expect("complete");
        assert_refused(new.complete_import(&suite, &begun.volume_handle, digest(1)).await, Reason::ClaimLost);
    }
    // The gateway of another worker cannot complete it.
    let begun = suite.silent_gateway(worker, 3, 3).prepare_import(&suite, git("9")).await.expect("prepared");
    let other = suite.gateway().await;
    let refused = other.complete_import(&suite, &begun.volume_handle, digest(1)).await;
    assert_refused(refused, Reason::VolumeNotFound);
    assert_refused(other.fail_import(&suite, &begun.volume_handle, "no").await, Reason::VolumeNotFound);
    suite.stop().await;
}

async fn lost_import_is_imported_again(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let worker = WorkerId::new();
    let gateway = suite.silent_gateway(worker, 1, 1);
    gateway.begin_report().await.expect("begun");
    let (first, volume) = gateway.import(&suite, git("1"), 1).await;
    gateway.report(&[], &[]).await.expect("reported");
    assert_eq!(suite.volume_state(&volume).await, Some(InventoryState::Lost));
    let (second, _) = gateway.import(&suite, git("1"), 1).await;
    assert_ne!(first, second);
    assert_eq!(suite.base_types().await[0].artifact_id, second.to_string());

    // The worker has returned without volumes.
    let reborn = suite.silent_gateway(worker, 2, 2);
    reborn.begin_report().await.expect("begun");
    assert_refused(reborn.prepare_import(&suite, git("1")).await, Reason::Unavailable);
    reborn.report(&[], &[]).await.expect("reported");
    let (third, _) = reborn.import(&suite, git("1"), 1).await;

    // Another artifact replaces the owner's. The next import restores the worker's own.
    let (own, _) = suite.upload(&reborn, None, 5).await.expect("uploaded");
    let put = pb::PutBaseResourceTypeRequest {
        team: TEAM.to_owned(),
        r#type: "git".to_owned(),
        version: "own".to_owned(),
        worker_id: worker.to_string(),
        artifact_id: own.to_string(),
    };
    suite.caches().put_base_resource_type(put).await.expect("put");
    assert_eq!(suite.listed().await.state(), ImportState::Importing, "it is not in its place");
    let (fourth, _) = reborn.import(&suite, git("1"), 1).await;
    let mut gone: Vec<_> =
        suite.collect(DryRun::Off).await.into_iter().map(|collected| collected.id).collect();
    gone.retain(|id| [first, second, third, fourth, own].iter().any(|artifact| *id == artifact.to_string()));
    gone.sort();
    let mut expected = [first, second, third, own].map(|artifact| artifact.to_string());
    expected.sort();
    assert_eq!(gone, expected);
    suite.stop().await;
}

async fn import_loses_claim_when_not_renewed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let begun = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    assert_eq!(rpc::parse_duration("term", begun.term).expect("a term"), Some(MINUTE));
    // An active import renews its claim.
    for _ in 0..3 {
        suite.clock.advance(MINUTE * 2 / 3);
        assert_eq!(suite.collect(DryRun::Off).await, []);
        gateway.prepare_import(&suite, git("1")).await.expect("renewed");
    }
    suite.clock.advance(MINUTE);
    let late = gateway.complete_import(&suite, &begun.volume_handle, digest(1)).await;
    assert_refused(late, Reason::ClaimLost);
    let collected = suite.collect(DryRun::Off).await;
    assert_eq!(collected.iter().map(|one| &*one.id).collect::<Vec<_>>(), [&*begun.volume_handle]);
    let again = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    assert_ne!(again.volume_handle, begun.volume_handle);
    gateway.complete_import(&suite, &again.volume_handle, digest(1)).await.expect("complete");

    // An import without renewal is deleted completely.
    let begun = gateway.prepare_import(&suite, git("2")).await.expect("prepared");
    suite.clock.advance(365 * 24 * 60 * MINUTE);
    let mut gone = Vec::new();
    for _ in 0..3 {
        gone.extend(suite.collect(DryRun::Off).await.into_iter().map(|one| one.id));
        suite.clock.advance(MINUTE);
    }
    assert!(gone.contains(&begun.artifact_id) && gone.contains(&begun.volume_handle), "{gone:?}");
    assert!(!gone.contains(&again.artifact_id));
    let (_, _) = gateway.import(&suite, git("2"), 2).await;
    suite.stop().await;
}

async fn failed_import_is_shown_and_keeps_previous_artifact(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (first, first_volume) = gateway.import(&suite, git("1"), 1).await;
    assert_refused(gateway.fail_import(&suite, &first_volume, "never").await, Reason::InvalidField);
    let begun = gateway.prepare_import(&suite, git("2")).await.expect("prepared");
    for _ in 0..2 {
        gateway.fail_import(&suite, &begun.volume_handle, "no such path").await.expect("recorded");
    }
    let listed = suite.listed().await;
    assert_eq!((listed.state(), &*listed.failure_reason), (ImportState::Failed, "no such path"));
    assert!(listed.failed_at.is_some());
    assert_eq!(suite.volume_state(&begun.volume_handle).await, Some(InventoryState::Destroying));
    assert_eq!(suite.base_types().await[0].artifact_id, first.to_string(), "it is there still");
    assert_eq!(suite.state_of(first).await, Some(ArtifactState::Sealed));

    // A retry uses another volume of the same artifact. The failure is shown until it succeeds.
    let again = gateway.prepare_import(&suite, git("2")).await.expect("prepared");
    assert_eq!(again.artifact_id, begun.artifact_id);
    assert_ne!(again.volume_handle, begun.volume_handle);
    assert_eq!(suite.listed().await.state(), ImportState::Failed);
    gateway.complete_import(&suite, &again.volume_handle, digest(2)).await.expect("complete");
    let listed = suite.listed().await;
    assert_eq!(
        (listed.state(), &*listed.failure_reason, listed.failed_at),
        (ImportState::Imported, "", None)
    );

    // The failure of another version is not shown.
    let begun = gateway.prepare_import(&suite, git("3")).await.expect("prepared");
    gateway.fail_import(&suite, &begun.volume_handle, "no such path").await.expect("recorded");
    gateway.prepare_import(&suite, git("4")).await.expect("prepared");
    assert_eq!(suite.listed().await.state(), ImportState::Importing);
    suite.stop().await;
}

async fn only_its_gateway_fills_or_seals_import(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let begun = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    let artifact: ArtifactId = begun.artifact_id.parse().expect("an id");
    assert_refused(gateway.complete(&begun.volume_handle, digest(1)).await, Reason::InvalidField);
    let planned = suite.plan(artifact, gateway.worker, TransferId::new()).await;
    assert_refused(planned, Reason::ArtifactNotFound);
    assert_refused(suite.seal(artifact, digest(1)).await, Reason::ArtifactNotFound);
    assert_refused(suite.create(artifact, None).await, Reason::ArtifactExists);
    assert_refused(suite.pin(WorkloadId::new(), &[artifact], None).await, Reason::InputUnavailable);
    let prepared = gateway.prepare(WorkloadId::new(), AttemptId::new(), &[input("in", artifact)]).await;
    assert_refused(prepared, Reason::InputUnavailable);
    // An upload cannot be completed as an import.
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    let upload = suite.plan(open, gateway.worker, TransferId::new()).await.expect("planned");
    assert_refused(gateway.complete_import(&suite, &upload, digest(1)).await, Reason::InvalidField);
    assert_refused(gateway.fail_import(&suite, &upload, "no").await, Reason::InvalidField);
    assert_eq!(suite.state_of(artifact).await, Some(ArtifactState::Open));
    suite.stop().await;
}

async fn concurrent_prepares_import_once(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let prepare = || gateway.prepare_import(&suite, git("1"));
    let begun = futures::future::try_join_all((0..8).map(|_| prepare())).await.expect("prepared");
    assert!(begun.iter().all(|one| *one == begun[0]), "{begun:?}");
    let complete = || gateway.complete_import(&suite, &begun[0].volume_handle, digest(1));
    futures::future::try_join_all((0..8).map(|_| complete())).await.expect("complete");
    assert_eq!((suite.imports().await.len(), suite.base_types().await.len()), (1, 1));
    assert_eq!(suite.volumes().await.len(), 1);
    suite.stop().await;
}

async fn every_team_uses_an_imported_artifact(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (artifact, volume) = gateway.import(&suite, git("1"), 1).await;
    let needs = [input("image", artifact)];
    let prepared = gateway.prepare(WorkloadId::new(), AttemptId::new(), &needs).await.expect("prepared");
    assert_eq!(prepared.volumes[0].parent_handle, volume);
    assert_eq!(prepared.volumes[0].parent_digest, digest(1).as_bytes()[..]);
    // It is copied to other workers like any artifact.
    suite.plan(artifact, other.worker, TransferId::new()).await.expect("planned");
    suite.pin(WorkloadId::new(), &[artifact], None).await.expect("pinned");
    assert_eq!(suite.all_artifacts().await, [], "it is no team's");
    suite.stop().await;
}

async fn imports_are_deleted_with_forgotten_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (gateway, other) = (suite.gateway().await, suite.gateway().await);
    let (image, _) = gateway.import(&suite, git("1"), 1).await;
    let (of_certs, _) = gateway.import(&suite, certs("/certs"), 2).await;
    let (kept, _) = other.import(&suite, git("1"), 1).await;
    suite.forget(gateway.worker, false).await.expect("an import is no last replica of a kept artifact");
    assert_eq!(suite.base_types().await.len(), 1);
    assert_eq!(suite.base_types().await[0].artifact_id, kept.to_string());
    assert_eq!(suite.certs().await, []);
    assert_eq!(suite.listed().await.worker_id, other.worker.to_string());
    let mut gone: Vec<_> = suite.collect(DryRun::Off).await.into_iter().map(|one| one.id).collect();
    gone.sort();
    let mut expected = [image, of_certs].map(|artifact| artifact.to_string());
    expected.sort();
    assert_eq!(gone, expected);

    // The worker may return and provide the same image.
    let back = suite.silent_gateway(gateway.worker, 2, 2);
    back.begin_report().await.expect("begun");
    let (again, _) = back.import(&suite, git("1"), 1).await;
    assert_ne!(again, image);
    suite.stop().await;
}

async fn artifacts_of_others_outlive_forgotten_worker(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (own, _) = suite.upload(&gateway, None, 1).await.expect("uploaded");
    let put = |worker_id: String| pb::PutBaseResourceTypeRequest {
        team: TEAM.to_owned(),
        r#type: "git".to_owned(),
        version: "1".to_owned(),
        worker_id,
        artifact_id: own.to_string(),
    };
    suite.caches().put_base_resource_type(put(gateway.worker.to_string())).await.expect("put");
    suite.caches().put_base_resource_type(put(String::new())).await.expect("put");
    assert_refused(suite.forget(gateway.worker, false).await, Reason::LastReplica);
    assert_eq!(suite.base_types().await.len(), 2, "nothing was changed");
    suite.forget(gateway.worker, true).await.expect("forced");
    let [cluster_wide] = &suite.base_types().await[..] else { panic!("that for the whole cluster") };
    assert_eq!((&*cluster_wide.worker_id, &cluster_wide.artifact_id), ("", &own.to_string()));
    suite.stop().await;
}

async fn explanation_of_import_names_its_keeper(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let explain = async |id: &str| {
        let request = pb::ExplainRequest { team: TEAM.to_owned(), id: id.to_owned() };
        suite.artifacts().explain(request).await.expect("explained").into_inner()
    };
    let begun = gateway.prepare_import(&suite, git("1")).await.expect("prepared");
    let explained = explain(&begun.artifact_id).await;
    let by = explained.kept_by.iter().find(|by| by.kind() == ObjectKind::Volume).expect("the import");
    assert_eq!(by.id, begun.volume_handle);
    assert!(by.text.contains("imported") && by.until.is_some(), "{by:?}");
    assert!(
        suite
            .get(begun.artifact_id.parse().expect("an id"))
            .await
            .expect("it")
            .kept_by
            .iter()
            .any(|by| by.contains("imported"))
    );
    let of_volume = explain(&begun.volume_handle).await;
    assert!(of_volume.kept_by.iter().any(|by| by.text.contains("imports it")), "{of_volume:?}");

    gateway.complete_import(&suite, &begun.volume_handle, digest(1)).await.expect("complete");
    let explained = explain(&begun.artifact_id).await;
    let [by] = &explained.kept_by[..] else { panic!("{explained:?}") };
    let worker = gateway.worker.to_string();
    assert_eq!((by.kind(), by.until), (ObjectKind::BaseResourceType, None));
    assert!(by.text.contains("git 1") && by.text.contains(&worker), "{}", by.text);
    assert_eq!(explained.label, "git 1");
    let of_type = explain(&by.id).await;
    assert_eq!((of_type.kind(), &*of_type.label), (ObjectKind::BaseResourceType, "git 1"));
    let of_volume = explain(&begun.volume_handle).await;
    assert!(of_volume.kept_by.iter().any(|by| by.id == begun.artifact_id), "{of_volume:?}");

    let (of_certs, _) = gateway.import(&suite, certs("/certs"), 2).await;
    let explained = explain(&of_certs.to_string()).await;
    let [by] = &explained.kept_by[..] else { panic!("{explained:?}") };
    assert_eq!((by.kind(), &by.id), (ObjectKind::Worker, &worker));
    suite.stop().await;
}
