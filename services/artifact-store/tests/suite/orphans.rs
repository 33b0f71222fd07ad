//! Orphans of restored stores, until they are adopted or purged.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, StoreLife, TransferId, VolumeHandle, WorkerId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts::{self as pb, InventoryState, adopt_request::KeptBy};
use testing::databases::TestDatabase;

use crate::{Answer, Gateway, Suite, TEAM, assert_refused, digest, input, on_both_databases, output};

on_both_databases! {
    unknown_items_of_restored_store_become_orphans,
    worker_with_newer_receipt_begins_store_life,
    worker_begins_no_life_without_a_receipt,
    newer_receipt_counts_after_sequence_has_caught_up,
    items_of_worker_without_life_become_orphans,
    new_incarnation_describes_orphans_again,
    copy_for_another_team_is_adopted_by_owner,
    adopted_orphan_is_replica_of_its_artifact,
    volume_is_adopted_for_artifact_with_its_bytes,
    orphan_is_explained,
    purged_orphan_is_swept,
    known_item_is_neither_adopted_nor_purged,
    orphan_adopted_during_reports_is_never_garbage,
    missing_orphan_is_forgotten,
}

/// A worker of a restored store, with items from after the backup.
struct Restored {
    suite: Suite,
    gateway: Gateway,
    /// Made before the backup.
    known: (ArtifactId, String),
    /// Uploaded after the backup.
    newer: (ArtifactId, String),
    /// Prepared after the backup: a child of the older artifact's replica, and an output.
    prepared: pb::PrepareResponse,
    /// Artifact of the output.
    output: ArtifactId,
    /// Token of the worker's last judged report, and its receipt.
    last: pb::ReportToken,
    receipt: Vec<u8>,
}

impl Restored {
    /// Returns all volumes on the worker.
    fn volumes(&self) -> Vec<String> {
        let prepared = self.prepared.volumes.iter().map(|volume| volume.volume_handle.clone());
        prepared.chain([self.known.1.clone(), self.newer.1.clone()]).collect()
    }

    fn containers(&self) -> Vec<String> {
        vec![self.prepared.container_handle.clone()]
    }

    async fn report(&self) -> pb::ReportResponse {
        self.gateway.report(&self.volumes(), &self.containers()).await.expect("reported")
    }

    /// Reports the contents of the worker with the ended life, and learns the new one.
    async fn learn(&mut self) -> pb::ReportResponse {
        self.gateway.life = Some(self.last.store_life.clone());
        let reported = self.report().await;
        self.gateway.life = None;
        reported
    }

    /// Learns the new life, and describes each volume.
    async fn describe(&mut self) {
        let reported = self.learn().await;
        assert_eq!(reported.undescribed_volume_handles.len(), 3);
        let volumes = vec![
            pb::VolumeDescription {
                volume_handle: self.newer.1.clone(),
                team: TEAM.to_owned(),
                artifact_id: self.newer.0.to_string(),
                digest: digest(2).as_bytes().to_vec().into(),
                size_bytes: 10,
                ..Default::default()
            },
            pb::VolumeDescription {
                volume_handle: self.input().to_owned(),
                parent_handle: self.known.1.clone(),
                ..Default::default()
            },
            pb::VolumeDescription {
                volume_handle: self.output_volume().to_owned(),
                team: TEAM.to_owned(),
                artifact_id: self.output.to_string(),
                digest: digest(3).as_bytes().to_vec().into(),
                size_bytes: 10,
                ..Default::default()
            },
        ];
        self.describe_as(volumes).await;
        assert_eq!(self.report().await.undescribed_volume_handles, [] as [String; 0]);
    }

    async fn describe_as(&self, volumes: Vec<pb::VolumeDescription>) {
        let session_credential = self.gateway.credential.clone();
        let request = pb::DescribeOrphansRequest { session_credential, volumes };
        self.suite.inventory().describe_orphans(request).await.expect("described");
    }

    fn input(&self) -> &str {
        &self.prepared.volumes[0].volume_handle
    }

    fn output_volume(&self) -> &str {
        &self.prepared.volumes[1].volume_handle
    }
}

/// Takes a backup, creates more items, and restores the backup. `tell`: whether an operator reports
/// the restore.
async fn restored(database: TestDatabase, tell: bool) -> Restored {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let build = BuildId::new();
    suite.put_build(build, WorkloadId::new(), None).await.expect("put");
    let known = suite.upload(&gateway, None, 1).await.expect("uploaded");
    gateway.report(std::slice::from_ref(&known.1), &[]).await.expect("reported");
    let database = suite.stop().await;
    let backup = database.copy().await;

    let suite = Suite::start(database).await;
    let gateway = suite.silent_gateway(gateway.worker, 1, 1);
    let newer = suite.upload(&gateway, None, 2).await.expect("uploaded");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let output_artifact = workload.output_artifact("out");
    let needs = [input("in", known.0), output("out", output_artifact)];
    let prepared = gateway.prepare(workload, attempt, &needs).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    gateway.complete(&prepared.volumes[1].volume_handle, digest(3)).await.expect("complete");
    let mut last = gateway.begin_report().await.expect("begun");
    for _ in 0..10 {
        last = gateway.begin_report().await.expect("begun");
    }
    let volumes: Vec<_> = prepared.volumes.iter().map(|volume| volume.volume_handle.clone()).collect();
    let volumes = [volumes, vec![known.1.clone(), newer.1.clone()]].concat();
    let containers = [prepared.container_handle.clone()];
    let reported = gateway.report_with(last.clone(), &volumes, &containers).await.expect("reported");
    let receipt = reported.receipt.to_vec();
    suite.stop().await;

    if tell {
        let life = artifact_store::restored(&backup.url.as_str().into()).await.expect("restored");
        assert_ne!(life.to_string(), last.store_life);
    }
    let adjust = |config: &mut artifact_store::Config| config.tombstone = Duration::from_secs(3600);
    let suite = Suite::start_with(backup, adjust).await;
    let gateway = suite.silent_gateway(gateway.worker, 1, 1);
    Restored { suite, gateway, known, newer, prepared, output: output_artifact, last, receipt }
}

async fn list(suite: &Suite, worker: Option<WorkerId>, page_size: u32) -> Vec<pb::Orphan> {
    let worker_id = worker.map(|worker| worker.to_string()).unwrap_or_default();
    let mut request = pb::ListOrphansRequest { worker_id, page_size, page_token: String::new() };
    let mut all = Vec::new();
    loop {
        let page = suite.inventory().list_orphans(request.clone()).await.expect("listed").into_inner();
        all.extend(page.orphans);
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            return all;
        }
    }
}

fn adoption(volume: &str) -> pb::AdoptRequest {
    pb::AdoptRequest { team: TEAM.to_owned(), volume_handle: volume.to_owned(), ..Default::default() }
}

async fn adopt(suite: &Suite, request: pb::AdoptRequest) -> Answer<pb::Artifact> {
    let answer = suite.inventory().adopt(request).await?.into_inner();
    Ok(answer.artifact.expect("the artifact"))
}

async fn purge(suite: &Suite, handles: &[&str]) -> Answer<(u64, u64)> {
    let handles = handles.iter().map(|handle| (*handle).to_owned()).collect();
    let request = pb::PurgeRequest { handles, worker_id: String::new() };
    let purged = suite.inventory().purge(request).await?.into_inner();
    Ok((purged.volumes, purged.containers))
}

async fn explain(suite: &Suite, id: &str) -> Answer<pb::ExplainResponse> {
    let request = pb::ExplainRequest { team: TEAM.to_owned(), id: id.to_owned() };
    Ok(suite.artifacts().explain(request).await?.into_inner())
}

fn assert_nothing_unknown(reported: &pb::ReportResponse) {
    assert_eq!(
        (&reported.unknown_volume_handles[..], &reported.unknown_container_handles[..]),
        (&[][..], &[][..])
    );
}

async fn unknown_items_of_restored_store_become_orphans(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    let stale = restored.gateway.report_with(restored.last.clone(), &restored.volumes(), &[]).await;
    assert_refused(stale, Reason::StaleReport);
    let reported = restored.learn().await;
    assert_nothing_unknown(&reported);
    assert_eq!((reported.orphans, reported.lost, reported.forgotten), (4, 0, 0));
    let mut undescribed = reported.undescribed_volume_handles;
    let mut expected = restored.volumes();
    expected.retain(|volume| *volume != restored.known.1);
    undescribed.sort();
    expected.sort();
    assert_eq!(undescribed, expected);

    restored.describe().await;
    let suite = &restored.suite;
    let listed = list(suite, Some(restored.gateway.worker), 1).await;
    assert_eq!(list(suite, Some(WorkerId::new()), 0).await, []);
    assert_eq!(listed, list(suite, None, 0).await);
    let worker = restored.gateway.worker.to_string();
    assert!(listed.iter().all(|one| one.worker_id == worker && one.first_seen_at.is_some()), "{listed:?}");
    let containers: Vec<_> = listed.iter().filter(|one| !one.container_handle.is_empty()).collect();
    assert_eq!(containers[0].container_handle, restored.prepared.container_handle);
    let of = |volume: &str| listed.iter().find(|one| one.volume_handle == volume).expect("listed").clone();
    let newer = of(&restored.newer.1).description.expect("described");
    assert_eq!((newer.artifact_id, newer.size_bytes), (restored.newer.0.to_string(), 10));
    assert_eq!((newer.team.as_str(), &newer.digest[..]), (TEAM, digest(2).as_bytes()));
    assert_eq!(of(restored.input()).description.expect("described").parent_handle, restored.known.1);
    let explained = explain(suite, &restored.newer.1).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (pb::ObjectKind::Volume, pb::ExplainedState::Orphaned));
    assert_eq!((explained.kept_by_total, explained.expires_at), (1, None));

    // The older artifact is garbage by now, but its child is not.
    suite.clock.advance(Duration::from_secs(13 * 3600));
    for round in 0..4 {
        suite.collect(pb::DryRun::Off).await;
        let reported = restored.report().await;
        assert_nothing_unknown(&reported);
        assert_eq!(reported.orphans, 4, "in round {round}");
        assert_eq!(suite.volume_state(&restored.known.1).await, Some(InventoryState::Destroying));
    }
    // Unknown items are garbage again from now on.
    let stray = VolumeHandle::new().to_string();
    let volumes = [&restored.volumes()[..], std::slice::from_ref(&stray)].concat();
    let reported = restored.gateway.report(&volumes, &restored.containers()).await.expect("reported");
    assert_eq!((reported.unknown_volume_handles, reported.orphans), (vec![stray], 4));

    let suite = restored.suite;
    let decided = [restored.prepared.container_handle.as_str(), &restored.prepared.volumes[0].volume_handle];
    assert_eq!(purge(&suite, &decided).await.expect("purged"), (1, 1));
    let order = restored.gateway.swept(&decided[..1], &[decided[1], &restored.known.1]).await;
    assert_eq!(order, [decided[1], &restored.known.1], "children before their parents");
    suite.stop().await;
}

async fn worker_with_newer_receipt_begins_store_life(database: TestDatabase) {
    let mut restored = restored(database, false).await;
    let (last, receipt) = (restored.last.clone(), restored.receipt.clone());
    // A report from before the backup proves nothing.
    let life = last.store_life.clone();
    let earlier = pb::ReportToken { sequence: 1, ..last.clone() };
    let token = restored.gateway.begin_report_after(Some(earlier), &receipt).await.expect("begun");
    assert_eq!(token.store_life, life, "nothing shows that it came out of a backup");
    let other = pb::ReportToken { store_life: StoreLife::new().to_string(), ..last.clone() };
    let token = restored.gateway.begin_report_after(Some(other), &receipt).await.expect("begun");
    assert_eq!(token.store_life, life, "of another store it says nothing");

    let token = restored.gateway.begin_report_after(Some(last.clone()), &receipt).await.expect("begun");
    assert_ne!(token.store_life, life);
    let again = restored.gateway.begin_report_after(Some(last), &receipt).await.expect("begun");
    assert_eq!(again.store_life, token.store_life, "of all that show it the first begins the new life");
    let reported = restored.learn().await;
    assert_nothing_unknown(&reported);
    assert_eq!(reported.orphans, 4);
    let suite = Suite::start(restored.suite.stop().await).await;
    let gateway = suite.silent_gateway(restored.gateway.worker, 1, 1);
    assert_eq!(gateway.begin_report().await.expect("begun").store_life, token.store_life);
    suite.stop().await;
}

async fn worker_begins_no_life_without_a_receipt(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let first = gateway.begin_report().await.expect("begun");
    let receipt = gateway.report_with(first.clone(), &[], &[]).await.expect("reported").receipt;
    let other = suite.silent_gateway(WorkerId::new(), 1, 1);
    let others = other.report(&[], &[]).await.expect("reported").receipt;
    assert_ne!(receipt, others);
    let opened = gateway.begin_report().await.expect("begun");
    let later = pb::ReportToken { sequence: i64::MAX.unsigned_abs(), ..first.clone() };
    // An invented sequence, an issued one that was not judged, and a judged one.
    for last in [&later, &opened, &first] {
        for receipt in [&[][..], &[7; 32], &receipt, &others] {
            let begun = gateway.begin_report_after(Some(last.clone()), receipt).await.expect("begun");
            assert_eq!(begun.store_life, first.store_life, "{last:?}");
        }
    }
    let short = gateway.begin_report_after(Some(later), &[7; 31]).await;
    assert_refused(short, Reason::InvalidField);
    suite.stop().await;
}

async fn newer_receipt_counts_after_sequence_has_caught_up(database: TestDatabase) {
    let mut restored = restored(database, false).await;
    let (last, life) = (restored.last.clone(), restored.last.store_life.clone());
    let receipt = restored.receipt.clone();
    // Other tokens are issued and marks handed out, until the sequence reaches the worker's.
    restored.gateway = restored.suite.silent_gateway(restored.gateway.worker, 1, 2);
    let mut sequence = 0;
    while sequence <= last.sequence {
        let token = restored.gateway.begin_report().await.expect("begun");
        assert_eq!(token.store_life, life);
        sequence = token.sequence;
    }
    let token = restored.gateway.begin_report_after(Some(last), &receipt).await.expect("begun");
    assert_ne!(token.store_life, life, "no such report was ever judged");
    restored.suite.stop().await;
}

async fn items_of_worker_without_life_become_orphans(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let mut gateway = suite.gateway().await;
    let stray = VolumeHandle::new().to_string();
    gateway.life = Some(String::new());
    let reported = gateway.report(std::slice::from_ref(&stray), &[]).await.expect("reported");
    assert_nothing_unknown(&reported);
    assert_eq!(reported.orphans, 1);
    gateway.life = None;
    let reported = gateway.report(std::slice::from_ref(&stray), &[]).await.expect("reported");
    assert_nothing_unknown(&reported);
    let forget =
        |force| pb::ForgetWorkerRequest { worker_id: gateway.worker.to_string(), force, dry_run: false };
    let refused = suite.inventory().forget_worker(forget(false)).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::HoldsOrphans);
    assert_eq!(list(&suite, None, 0).await.len(), 1, "nothing was decided");
    suite.inventory().forget_worker(forget(true)).await.expect("forgotten");
    assert_eq!(list(&suite, None, 0).await, []);
    suite.stop().await;
}

async fn new_incarnation_describes_orphans_again(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let volume = restored.newer.1.clone();
    restored.gateway = restored.suite.silent_gateway(restored.gateway.worker, 2, 1);
    restored.gateway.begin_report().await.expect("begun");
    let refused = adopt(&restored.suite, adoption(&volume)).await;
    assert_refused(refused, Reason::NotAdoptable);
    let reported = restored.report().await;
    assert!(reported.undescribed_volume_handles.contains(&volume), "what is left of it is not known");
    restored.suite.stop().await;
}

async fn copy_for_another_team_is_adopted_by_owner(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.learn().await;
    let copy = pb::VolumeDescription {
        volume_handle: restored.newer.1.clone(),
        team: "other".to_owned(),
        artifact_id: restored.known.0.to_string(),
        digest: digest(1).as_bytes().to_vec().into(),
        size_bytes: 10,
        ..Default::default()
    };
    restored.describe_as(vec![copy]).await;
    let of_other = pb::AdoptRequest { team: "other".to_owned(), ..adoption(&restored.newer.1) };
    assert_refused(adopt(&restored.suite, of_other).await, Reason::ArtifactNotFound);
    let of_third = pb::AdoptRequest { team: "third".to_owned(), ..adoption(&restored.newer.1) };
    assert_refused(adopt(&restored.suite, of_third).await, Reason::VolumeNotFound);
    let adopted = adopt(&restored.suite, adoption(&restored.newer.1)).await.expect("adopted");
    assert_eq!((adopted.artifact_id, adopted.replicas.len()), (restored.known.0.to_string(), 2));
    restored.suite.stop().await;
}

async fn adopted_orphan_is_replica_of_its_artifact(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let suite = &restored.suite;
    let (id, volume) = restored.newer.clone();
    assert_refused(suite.get(id).await, Reason::ArtifactNotFound);
    let build = BuildId::new();
    let build_id = || Some(KeptBy::BuildId(build.to_string()));
    let refused = adopt(suite, pb::AdoptRequest { kept_by: build_id(), ..adoption(&volume) }).await;
    assert_refused(refused, Reason::OwnerEnded);
    assert_eq!(list(suite, None, 0).await.len(), 4, "nothing was decided");
    let builder = WorkloadId::new();
    suite.put_build(build, builder, None).await.expect("put");
    suite.pin(builder, &[], Some(build)).await.expect("bound");
    let adopted =
        adopt(suite, pb::AdoptRequest { kept_by: build_id(), ..adoption(&volume) }).await.expect("adopted");
    assert_eq!((adopted.artifact_id.clone(), adopted.state()), (id.to_string(), pb::ArtifactState::Sealed));
    assert_eq!((adopted.size_bytes, &adopted.digest[..]), (10, digest(2).as_bytes()));
    assert_eq!(adopted.replicas[0].volume_handle, volume);

    // The output of an unknown attempt, kept without an owner for a while.
    let keep = Some(KeptBy::Keep(rpc::duration(Duration::from_secs(48 * 3600))));
    let output = || pb::AdoptRequest { kept_by: keep.clone(), ..adoption(restored.output_volume()) };
    for _ in 0..2 {
        let adopted = adopt(suite, output()).await.expect("adopted");
        assert_eq!(adopted.artifact_id, restored.output.to_string(), "again and again");
    }
    assert_eq!(list(suite, None, 0).await.len(), 2);
    let explained = explain(suite, restored.output_volume()).await.expect("explained");
    assert_eq!(
        (explained.state(), explained.label.as_str()),
        (pb::ExplainedState::Created, "replica, adopted as an orphan")
    );

    suite.clock.advance(Duration::from_secs(24 * 3600));
    suite.collect(pb::DryRun::Off).await;
    assert_nothing_unknown(&restored.report().await);
    for (id, volume) in [(id, volume.as_str()), (restored.output, restored.output_volume())] {
        assert_eq!(suite.get(id).await.expect("kept").replicas[0].volume_handle, volume);
        assert_eq!(suite.volume_state(volume).await, Some(InventoryState::Created));
    }
    // Adopted replicas become parents like any other.
    let needs = [input("in", id)];
    let attempt = AttemptId::new();
    let prepared = restored.gateway.prepare(WorkloadId::new(), attempt, &needs).await.expect("prepared");
    assert_eq!(prepared.volumes[0].parent_handle, volume);
    // They are deleted like any other.
    suite.clock.advance(Duration::from_secs(25 * 3600));
    suite.collect(pb::DryRun::Off).await;
    let gone = suite.volume_state(restored.output_volume()).await;
    assert_eq!(gone, Some(InventoryState::Destroying), "its time is over");
    restored.suite.stop().await;
}

async fn volume_is_adopted_for_artifact_with_its_bytes(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let suite = &restored.suite;
    let volume = restored.newer.1.as_str();
    let naming =
        |artifact: ArtifactId| pb::AdoptRequest { artifact_id: artifact.to_string(), ..adoption(volume) };
    let there = suite.gateway().await;

    // An artifact of another team, and one with other bytes.
    let foreign = ArtifactId::new();
    let create = pb::CreateArtifactRequest {
        artifact_id: foreign.to_string(),
        team: "other".to_owned(),
        ..Default::default()
    };
    suite.artifacts().create_artifact(create).await.expect("created");
    assert_refused(adopt(suite, naming(foreign)).await, Reason::ArtifactNotFound);
    assert_refused(adopt(suite, naming(restored.known.0)).await, Reason::ArtifactSealed);
    let (deleted, _) = suite.upload(&there, None, 9).await.expect("uploaded");
    suite.clock.advance(Duration::from_secs(13 * 3600));
    suite.collect(pb::DryRun::Off).await;
    assert_refused(adopt(suite, naming(deleted)).await, Reason::BytesGone);
    assert_eq!(list(suite, None, 0).await.len(), 4);
    assert_eq!(suite.volume_state(volume).await, None, "nothing of that was carried out");

    // A deleted artifact with these bytes.
    let (deleted, replica) = suite.upload(&there, None, 2).await.expect("uploaded");
    suite.clock.advance(Duration::from_secs(13 * 3600));
    suite.collect(pb::DryRun::Off).await;
    assert_eq!(suite.get(deleted).await.expect("its tombstone").state(), pb::ArtifactState::Deleting);
    there.swept(&[], &[&replica]).await;
    let adopted = adopt(suite, naming(deleted)).await.expect("adopted");
    assert_eq!((adopted.state(), adopted.replicas.len()), (pb::ArtifactState::Sealed, 1));
    assert_refused(adopt(suite, naming(ArtifactId::new())).await, Reason::NotOrphaned);

    // An open artifact, an upload whose bytes are not in the backup.
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    let candidate = suite.plan(open, there.worker, TransferId::new()).await.expect("planned");
    there.complete(&candidate, digest(8)).await.expect("complete");
    let output = restored.output_volume();
    let adopted = adopt(suite, pb::AdoptRequest { artifact_id: open.to_string(), ..adoption(output) }).await;
    let adopted = adopted.expect("adopted");
    assert_eq!((adopted.state(), &adopted.digest[..]), (pb::ArtifactState::Sealed, digest(3).as_bytes()));
    assert_eq!(suite.volume_state(&candidate).await, Some(InventoryState::Destroying), "it has other bytes");
    restored.suite.stop().await;
}

async fn orphan_is_explained(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let (suite, (artifact, volume)) = (&restored.suite, &restored.newer);
    let explained = explain(suite, volume).await.expect("explained");
    assert_eq!((explained.kind(), explained.state()), (pb::ObjectKind::Volume, pb::ExplainedState::Orphaned));
    assert_eq!((explained.team.as_str(), explained.can_be_adopted, explained.size_bytes), (TEAM, true, 10));
    let explained = explain(suite, restored.input()).await.expect("explained");
    assert_eq!((explained.team.as_str(), explained.can_be_adopted), ("", false));
    let explained = explain(suite, &restored.prepared.container_handle).await.expect("explained");
    assert_eq!((explained.kind(), explained.can_be_adopted), (pb::ObjectKind::Container, false));

    // Its artifact is unknown as well, and its explanation names the volume until it is adopted.
    let id = artifact.to_string();
    let explained = explain(suite, &id).await.expect("explained");
    assert_eq!(
        (explained.kind(), explained.state()),
        (pb::ObjectKind::Artifact, pb::ExplainedState::Orphaned)
    );
    assert_eq!((explained.can_be_adopted, explained.size_bytes), (true, 10));
    assert_eq!(
        (&explained.relations[0].relation, &explained.relations[0].ids[..]),
        (&"volumes".to_owned(), &[volume.clone()][..])
    );
    let request = pb::ExplainRequest { team: "other".to_owned(), id: id.clone() };
    let refused = suite.artifacts().explain(request).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::UnknownId);
    adopt(suite, adoption(volume)).await.expect("adopted");
    assert_eq!(explain(suite, &id).await.expect("explained").state(), pb::ExplainedState::Sealed);
    restored.suite.stop().await;
}

async fn purged_orphan_is_swept(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let suite = &restored.suite;
    let (container, input) = (restored.prepared.container_handle.as_str(), restored.input());
    let on = |worker: WorkerId| pb::PurgeRequest {
        handles: vec![container.to_owned()],
        worker_id: worker.to_string(),
    };
    let refused = suite.inventory().purge(on(WorkerId::new())).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::UnknownId);
    // All or nothing.
    assert_refused(purge(suite, &[container, &VolumeHandle::new().to_string()]).await, Reason::UnknownId);
    assert_refused(purge(suite, &[container, &restored.known.1]).await, Reason::NotOrphaned);
    assert_eq!(list(suite, None, 0).await.len(), 4);

    suite.inventory().purge(on(restored.gateway.worker)).await.expect("purged");
    assert_eq!(purge(suite, &[container, input]).await.expect("purged"), (1, 0), "the container was");
    assert_refused(adopt(suite, adoption(input)).await, Reason::NotOrphaned);
    let explained = explain(suite, container).await.expect("explained");
    assert!(explained.reason.contains("purged"), "{explained:?}");
    assert_eq!(explained.relations.len(), 1, "its worker, and no attempt");
    restored.gateway.swept(&[container], &[input]).await;
    let left: Vec<_> = restored.volumes().into_iter().filter(|volume| volume != input).collect();
    let reported = restored.gateway.report(&left, &[]).await.expect("reported");
    assert_eq!((reported.forgotten, reported.orphans), (2, 2));
    let explained = explain(suite, input).await.expect("explained");
    assert_eq!((explained.state(), explained.reason.contains("purged")), (pb::ExplainedState::Gone, true));
    assert_eq!(purge(suite, &[container, input]).await.expect("again"), (0, 0));
    restored.suite.stop().await;
}

async fn known_item_is_neither_adopted_nor_purged(database: TestDatabase) {
    let mut restored = restored(database, true).await;
    restored.describe().await;
    let suite = &restored.suite;
    let volume = restored.newer.1.as_str();
    let unknown = VolumeHandle::new().to_string();
    assert_refused(adopt(suite, adoption(&unknown)).await, Reason::VolumeNotFound);
    assert_refused(adopt(suite, adoption(&restored.known.1)).await, Reason::NotOrphaned);
    assert_refused(adopt(suite, adoption(restored.input())).await, Reason::NotAdoptable);
    let container = adoption(&restored.prepared.container_handle);
    assert_refused(adopt(suite, container).await, Reason::NotAdoptable);
    let elsewhere = pb::AdoptRequest { worker_id: WorkerId::new().to_string(), ..adoption(volume) };
    assert_refused(adopt(suite, elsewhere).await, Reason::VolumeNotFound);
    let others = pb::AdoptRequest { team: "other".to_owned(), ..adoption(volume) };
    assert_refused(adopt(suite, others).await, Reason::VolumeNotFound);
    let request = pb::ExplainRequest { team: "other".to_owned(), id: volume.to_owned() };
    let explained = suite.artifacts().explain(request).await.map_err(rpc::Refusal::from);
    assert_refused(explained, Reason::UnknownId);

    // A gateway's description of another worker's volumes has no effect.
    let stranger = suite.gateway().await;
    let lie = pb::VolumeDescription {
        volume_handle: restored.input().to_owned(),
        digest: digest(7).as_bytes().to_vec().into(),
        ..Default::default()
    };
    let request =
        pb::DescribeOrphansRequest { session_credential: stranger.credential.clone(), volumes: vec![lie] };
    suite.inventory().describe_orphans(request).await.expect("passed over");
    assert_refused(adopt(suite, adoption(restored.input())).await, Reason::NotAdoptable);
    let older = suite.silent_gateway(restored.gateway.worker, 1, 0);
    let request = pb::DescribeOrphansRequest { session_credential: older.credential, volumes: Vec::new() };
    let refused = suite.inventory().describe_orphans(request).await.map_err(rpc::Refusal::from);
    assert_refused(refused, Reason::StaleSession);

    adopt(suite, adoption(volume)).await.expect("adopted");
    assert_refused(purge(suite, &[volume]).await, Reason::NotOrphaned);
    assert_eq!(suite.volume_state(volume).await, Some(InventoryState::Created));
    restored.suite.stop().await;
}

async fn orphan_adopted_during_reports_is_never_garbage(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let mut gateway = suite.gateway().await;
    let volumes: Vec<_> = (0..40).map(|_| VolumeHandle::new().to_string()).collect();
    gateway.life = Some(String::new());
    gateway.report(&volumes, &[]).await.expect("reported");
    gateway.life = None;
    let describe = |volume: &String| pb::VolumeDescription {
        volume_handle: volume.clone(),
        digest: digest(5).as_bytes().to_vec().into(),
        ..Default::default()
    };
    let request = pb::DescribeOrphansRequest {
        session_credential: gateway.credential.clone(),
        volumes: volumes.iter().map(describe).collect(),
    };
    suite.inventory().describe_orphans(request).await.expect("described");

    let deciding = async {
        for (number, volume) in volumes.iter().enumerate() {
            if number % 4 == 0 {
                purge(&suite, &[volume]).await.expect("purged");
            } else {
                adopt(&suite, adoption(volume)).await.expect("adopted");
            }
        }
    };
    let reporting = async {
        loop {
            let reported = gateway.report(&volumes, &[]).await.expect("reported");
            assert_nothing_unknown(&reported);
            assert_eq!((reported.lost, reported.forgotten), (0, 0));
        }
    };
    tokio::select! {
        () = deciding => {}
        () = reporting => {}
    }
    assert_eq!(list(&suite, None, 0).await, []);
    let states = suite.volumes().await;
    let number = |state| states.iter().filter(|volume| volume.state() == state).count();
    assert_eq!((number(InventoryState::Created), number(InventoryState::Destroying)), (30, 10));
    suite.stop().await;
}

async fn missing_orphan_is_forgotten(database: TestDatabase) {
    let adjust = |config: &mut artifact_store::Config| config.tombstone = Duration::from_secs(3600);
    let suite = Suite::start_with(database, adjust).await;
    let mut gateway = suite.gateway().await;
    let [first, second] = [(); 2].map(|()| VolumeHandle::new().to_string());
    let early = gateway.begin_report().await.expect("begun");
    gateway.life = Some(String::new());
    let late = gateway.begin_report().await.expect("begun");
    let both = [first.clone(), second.clone()];
    let reported = gateway.report_with(late, &both, &[]).await.expect("reported");
    assert_eq!(reported.orphans, 2);
    gateway.life = None;
    assert_refused(gateway.report_with(early, &[], &[]).await, Reason::StaleReport);
    let reported = gateway.report(std::slice::from_ref(&first), &[]).await.expect("reported");
    assert_eq!((reported.orphans, reported.lost), (1, 0));
    assert_eq!(list(&suite, None, 0).await.len(), 1);
    let explained = explain(&suite, &second).await.expect("explained");
    assert_eq!(explained.state(), pb::ExplainedState::Gone);
    assert!(explained.reason.contains("orphan"), "{explained:?}");
    suite.stop().await;
}
