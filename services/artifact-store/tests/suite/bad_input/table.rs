//! The table of all RPCs of the store, with invalid requests.

mod caches;
mod disposal;
mod imports;
mod orphans;
mod pins;
mod trees;

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, VolumeHandle, WorkerId, WorkloadId};
use prost_reflect::{DynamicMessage, Value};
use rpc::Reason::{self, *};
use rpc::pb::artifacts as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected, set};

use super::wrong::*;
use crate::{Gateway, Suite, TEAM, digest, input, output};

/// Another team, with an artifact, a build and a workload.
const OTHER: &str = "other";

/// State of the store before the invalid requests.
struct World<'a> {
    suite: &'a Suite,
    /// Incarnation and session of its worker are both 2.
    here: Gateway,
    there: Gateway,
    build: BuildId,
    builder: WorkloadId,
    doomed_build: BuildId,
    /// Sealed, with a replica on the worker of `here`.
    sealed: ArtifactId,
    open: ArtifactId,
    /// Open, with all of its bytes.
    arrived: ArtifactId,
    transfer: TransferId,
    arrived_handle: String,
    /// Volume of an active transfer.
    planned_handle: String,
    /// Workload whose attempt has completed its output.
    workload: WorkloadId,
    attempt: AttemptId,
    prepared: pb::PrepareResponse,
    /// Workload on the same worker whose volumes are not created yet.
    other_workload: WorkloadId,
    other_attempt: AttemptId,
    other_prepared: pb::PrepareResponse,
    attempt_there: AttemptId,
    settled: WorkloadId,
    foreign_artifact: ArtifactId,
    foreign_build: BuildId,
    foreign_workload: WorkloadId,
    /// Created from a tree, for the build.
    of_tree: ArtifactId,
}

impl<'a> World<'a> {
    async fn new(suite: &'a Suite) -> Self {
        let here = suite.silent_gateway(WorkerId::new(), 2, 2);
        here.begin_report().await.expect("a new worker may speak");
        let there = suite.gateway().await;
        let (build, builder, doomed_build) = (BuildId::new(), WorkloadId::new(), BuildId::new());
        suite.put_build(build, builder, None).await.expect("put");
        suite.put_build(doomed_build, WorkloadId::new(), None).await.expect("put");
        let (sealed, _) = suite.upload(&here, Some(build), 1).await.expect("uploaded");
        suite.upload(&here, Some(build), 2).await.expect("uploaded");
        let (open, arrived, transfer) = (ArtifactId::new(), ArtifactId::new(), TransferId::new());
        suite.create(open, None).await.expect("created");
        suite.create(arrived, None).await.expect("created");
        let handle = suite.plan(arrived, here.worker, transfer).await.expect("planned");
        here.complete(&handle, digest(3)).await.expect("complete");
        let planned = suite.plan(open, here.worker, TransferId::new()).await.expect("planned");

        let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
        let needs = [output("out", workload.output_artifact("out")), input("in", sealed)];
        let prepared = here.prepare(workload, attempt, &needs).await.expect("prepared");
        here.prepared(attempt).await.expect("recorded");
        here.complete(&prepared.volumes[0].volume_handle, digest(4)).await.expect("complete");
        let (other_workload, other_attempt) = (WorkloadId::new(), AttemptId::new());
        let needs = [output("out", other_workload.output_artifact("out"))];
        let other_prepared = here.prepare(other_workload, other_attempt, &needs).await.expect("prepared");
        let (workload_there, attempt_there) = (WorkloadId::new(), AttemptId::new());
        there.prepare(workload_there, attempt_there, &[]).await.expect("prepared");
        let settled = WorkloadId::new();
        suite.settle(settled, None, &[], None).await.expect("settled");

        let (foreign_artifact, foreign_build) = (ArtifactId::new(), BuildId::new());
        let foreign_workload = WorkloadId::new();
        let create = pb::CreateArtifactRequest {
            artifact_id: foreign_artifact.to_string(),
            team: OTHER.to_owned(),
            ..Default::default()
        };
        suite.artifacts().create_artifact(create).await.expect("created");
        let put = pb::PutBuildRequest {
            build_id: foreign_build.to_string(),
            team: OTHER.to_owned(),
            ends_with_workload_id: foreign_workload.to_string(),
            ..Default::default()
        };
        pb::owners_client::OwnersClient::new(suite.peer.clone()).put_build(put).await.expect("put");
        let pin = pb::PinRequest {
            holder_id: foreign_workload.to_string(),
            team: OTHER.to_owned(),
            artifact_ids: Vec::new(),
            build_id: foreign_build.to_string(),
            task_cache_ids: Vec::new(),
        };
        suite.pins().pin(pin).await.expect("bound");
        let of_tree = ArtifactId::new();
        let create = pb::CreateArtifactRequest {
            artifact_id: of_tree.to_string(),
            team: TEAM.to_owned(),
            build_id: build.to_string(),
            label: String::new(),
            tree: Some(trees::tree()),
        };
        suite.artifacts().create_artifact(create).await.expect("created");
        Self {
            suite,
            here,
            there,
            build,
            builder,
            doomed_build,
            sealed,
            open,
            arrived,
            transfer,
            arrived_handle: handle,
            planned_handle: planned,
            workload,
            attempt,
            prepared,
            other_workload,
            other_attempt,
            other_prepared,
            attempt_there,
            settled,
            foreign_artifact,
            foreign_build,
            foreign_workload,
            of_tree,
        }
    }
}

pub(super) async fn table(suite: &Suite) -> Vec<Call> {
    let world = World::new(suite).await;
    let caches = caches::Caches::new(&world).await;
    let mut calls = Vec::new();
    calls.extend(artifacts(&world));
    calls.extend(owners(&world));
    calls.extend(replicas(&world));
    calls.extend(inventory(&world).await);
    calls.extend(lists(&world).await);
    calls.extend(caches::calls(&world, &caches));
    calls.extend(pins::pins(&world).await);
    let short_worker_ids = vec![world.here.worker.to_string()];
    let collect = pb::CollectRequest { dry_run: pb::DryRun::Only.into(), short_worker_ids };
    let many_workers = Value::List((0..10_001).map(|_| text(world.here.worker)).collect());
    let many_workers = invalid("short_worker_ids", "10001 of them", many_workers, "short_worker_ids");
    let wrong = [choice("dry_run"), id("short_worker_ids"), many_workers];
    calls.push(Call::new("Collector.Collect", [collect], wrong));
    calls.extend(orphans::calls(&world).await);
    calls.extend(imports::calls(&world).await);
    // Last, because some of these calls end items of the other calls.
    calls.extend(disposal::calls(&world).await);
    calls
}

/// Returns invalid requests to change the owners of an artifact. `of_another_team`: the first error
/// for another team.
fn owned(
    world: &World<'_>,
    of_another_team: Reason,
    artifact: &str,
    malformed: fn(&str) -> Vec<Bad>,
) -> [Vec<Bad>; 8] {
    let no_build = |what: &str, build: BuildId| match of_another_team {
        OwnerEnded => but("build_id", what, build, OwnerEnded),
        // A build that does not own it.
        _ => nothing("build_id", what, text(build)),
    };
    [
        team("team"),
        but("team", "that does not have them", OTHER, of_another_team),
        malformed(artifact),
        but(artifact, "unknown", ArtifactId::new(), ArtifactNotFound),
        but(artifact, "of another team", world.foreign_artifact, ArtifactNotFound),
        id("build_id"),
        no_build("unknown", BuildId::new()),
        no_build("of another team", world.foreign_build),
    ]
}

fn artifacts(world: &World<'_>) -> Vec<Call> {
    let build = world.build.to_string();
    let create = pb::CreateArtifactRequest {
        artifact_id: ArtifactId::new().to_string(),
        team: TEAM.to_owned(),
        build_id: build.clone(),
        label: "x".repeat(1024),
        tree: Some(trees::tree()),
    };
    let read = pb::ReadTreeRequest { team: TEAM.to_owned(), artifact_id: world.of_tree.to_string() };
    let own = pb::AddOwnerRequest {
        team: TEAM.to_owned(),
        artifact_id: world.sealed.to_string(),
        build_id: build.clone(),
    };
    let disown = pb::RemoveOwnerRequest {
        team: TEAM.to_owned(),
        artifact_id: world.sealed.to_string(),
        build_id: build.clone(),
    };
    let new = |label: usize| pb::NewArtifact {
        artifact_id: ArtifactId::new().to_string(),
        label: "x".repeat(label),
    };
    let batch_create = pb::BatchCreateArtifactsRequest {
        team: TEAM.to_owned(),
        build_id: build.clone(),
        artifacts: vec![new(1024), new(0)],
    };
    let batch_own = pb::BatchAddOwnerRequest {
        team: TEAM.to_owned(),
        artifact_ids: vec![world.sealed.to_string(), world.open.to_string()],
        build_id: build.clone(),
    };
    let batch_disown = pb::BatchRemoveOwnerRequest {
        team: TEAM.to_owned(),
        artifact_ids: vec![world.sealed.to_string(), world.open.to_string()],
        build_id: build.clone(),
    };
    let delete = pb::DeleteArtifactsRequest {
        team: TEAM.to_owned(),
        artifact_ids: vec![world.sealed.to_string(), world.open.to_string()],
    };
    let adopt = pb::AdoptByDigestRequest {
        team: TEAM.to_owned(),
        digest: digest(1).as_bytes().to_vec().into(),
        build_id: build,
        without_worker_ids: Vec::new(),
    };
    let get = pb::GetArtifactRequest { team: TEAM.to_owned(), artifact_id: world.sealed.to_string() };
    let locate = pb::LocateRequest { team: TEAM.to_owned(), artifact_ids: vec![world.sealed.to_string()] };
    vec![
        Call::new(
            "Artifacts.CreateArtifact",
            [create],
            [
                id("artifact_id"),
                but("artifact_id", "of another owner", world.open, ArtifactExists),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactExists),
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                optional_id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                label("label"),
                trees::bad(world),
            ],
        ),
        Call::new(
            "Artifacts.ReadTree",
            [read],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
            ],
        ),
        Call::new(
            "Artifacts.AdoptByDigest",
            [adopt],
            [
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                digests("digest"),
                nothing("digest", "unknown", Value::Bytes(digest(99).as_bytes().to_vec().into())),
                optional_id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                ids("without_worker_ids"),
                nothing("without_worker_ids", "that are all there are", text(world.here.worker)),
            ],
        ),
        Call::new(
            "Artifacts.GetArtifact",
            [get],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
            ],
        ),
        Call::new("Artifacts.AddOwner", [own], owned(world, OwnerEnded, "artifact_id", id)),
        Call::new("Artifacts.RemoveOwner", [disown], owned(world, ArtifactNotFound, "artifact_id", id)),
        Call::new(
            "Artifacts.BatchCreateArtifacts",
            [batch_create],
            [
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                optional_id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                many("artifacts", 1001),
                twice("artifacts", "artifacts.artifact_id"),
                id("artifacts.artifact_id"),
                but("artifacts.artifact_id", "of another owner", world.open, ArtifactExists),
                but("artifacts.artifact_id", "of another team", world.foreign_artifact, ArtifactExists),
                label("artifacts.label"),
            ],
        ),
        Call::new("Artifacts.BatchAddOwner", [batch_own], owned(world, OwnerEnded, "artifact_ids", ids)),
        Call::new(
            "Artifacts.BatchRemoveOwner",
            [batch_disown],
            owned(world, ArtifactNotFound, "artifact_ids", ids),
        ),
        Call::new(
            "Artifacts.DeleteArtifacts",
            [delete],
            [
                team("team"),
                but("team", "that does not have them", OTHER, ArtifactNotFound),
                ids("artifact_ids"),
                but("artifact_ids", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_ids", "of another team", world.foreign_artifact, ArtifactNotFound),
            ],
        ),
        Call::new(
            "Artifacts.Locate",
            [locate],
            [
                team("team"),
                nothing("team", "that does not have them", text(OTHER)),
                ids("artifact_ids"),
                nothing("artifact_ids", "unknown", text(ArtifactId::new())),
                nothing("artifact_ids", "of another team", text(world.foreign_artifact)),
            ],
        ),
    ]
}

/// Returns requests with the end of a build but no status.
fn ended_at(seconds: i64, named: &str) -> Vec<Bad> {
    vec![time("ended_at", seconds, 0, refused(named))]
}

fn owners(world: &World<'_>) -> Vec<Call> {
    let put = pb::PutBuildRequest {
        build_id: world.build.to_string(),
        team: TEAM.to_owned(),
        ends_with_workload_id: world.builder.to_string(),
        keep: Some(rpc::duration(Duration::from_secs(60))),
        term: Some(rpc::duration(Duration::from_secs(600))),
        ..Default::default()
    };
    let delete = pb::DeleteBuildRequest { team: TEAM.to_owned(), build_id: world.doomed_build.to_string() };
    vec![
        Call::new(
            "Owners.PutBuild",
            [put],
            [
                id("build_id"),
                but("build_id", "of another team", world.foreign_build, BuildExists),
                but("build_id", "that another workload ends", world.doomed_build, BuildExists),
                team("team"),
                but("team", "that does not have it", OTHER, BuildExists),
                optional_id("ends_with_workload_id"),
                but("ends_with_workload_id", "missing", "", BuildExists),
                but("ends_with_workload_id", "that does not end it", WorkloadId::new(), BuildExists),
                seconds("keep", 10 * 366 * 24 * 3600),
                seconds("term", 24 * 3600),
                label("job"),
                invalid("job", "without a number", text("job"), "number"),
                invalid("number", "without a job", Value::U64(1), "number"),
                filter("status"),
                ended_at(-1, "ended_at"),
                ended_at(i64::MIN, "ended_at"),
                ended_at(1, "ended_at"),
            ],
        ),
        Call::new(
            "Owners.DeleteBuild",
            [delete],
            [
                team("team"),
                but("team", "that does not have it", OTHER, BuildNotFound),
                id("build_id"),
                but("build_id", "unknown", BuildId::new(), BuildNotFound),
                but("build_id", "of another team", world.foreign_build, BuildNotFound),
            ],
        ),
    ]
}

fn replicas(world: &World<'_>) -> Vec<Call> {
    let plan = pb::PlanReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: world.sealed.to_string(),
        worker_id: world.there.worker.to_string(),
        transfer_id: TransferId::new().to_string(),
    };
    let authorize = pb::AuthorizeTransferRequest {
        team: TEAM.to_owned(),
        worker_id: world.here.worker.to_string(),
        volume_handle: world.planned_handle.clone(),
        direction: pb::TransferDirection::Write.into(),
    };
    let progress = pb::ProgressRequest { transfer_id: world.transfer.to_string(), team: TEAM.to_owned() };
    let seal = pb::SealUploadRequest {
        team: TEAM.to_owned(),
        artifact_id: world.arrived.to_string(),
        digest: digest(3).as_bytes().to_vec().into(),
    };
    let abandon = pb::AbandonUploadRequest { transfer_id: world.transfer.to_string(), team: TEAM.to_owned() };
    vec![
        Call::new(
            "Replicas.PlanReplica",
            [plan],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
                id("worker_id"),
                but("worker_id", "unknown", WorkerId::new(), NotAttended),
                id("transfer_id"),
                invalid("transfer_id", "of another artifact", text(world.transfer), "transfer_id"),
            ],
        ),
        Call::new(
            "Replicas.AuthorizeTransfer",
            [authorize],
            [
                team("team"),
                but("team", "that does not have it", OTHER, TransferNotPlanned),
                id("worker_id"),
                but("worker_id", "unknown", WorkerId::new(), TransferNotPlanned),
                but("worker_id", "that does not have it", world.there.worker, TransferNotPlanned),
                id("volume_handle"),
                but("volume_handle", "unknown", VolumeHandle::new(), TransferNotPlanned),
                but(
                    "volume_handle",
                    "of a container",
                    &world.prepared.volumes[1].volume_handle,
                    TransferNotPlanned,
                ),
                but(
                    "volume_handle",
                    "of an output",
                    &world.prepared.volumes[0].volume_handle,
                    TransferNotPlanned,
                ),
                but("volume_handle", "that is complete", &world.arrived_handle, TransferNotPlanned),
                choice("direction"),
            ],
        ),
        Call::new(
            "Replicas.Progress",
            [progress],
            [
                id("transfer_id"),
                but("transfer_id", "unknown", TransferId::new(), ClaimLost),
                team("team"),
                but("team", "that does not have it", OTHER, ClaimLost),
            ],
        ),
        Call::new(
            "Replicas.SealUpload",
            [seal],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
                digests("digest"),
                change(
                    "digest",
                    "that no volume has",
                    Value::Bytes(digest(99).as_bytes().to_vec().into()),
                    Expected::Refused(CandidateMissing, String::new()),
                ),
            ],
        ),
        Call::new(
            "Replicas.AbandonUpload",
            [abandon],
            [
                id("transfer_id"),
                nothing("transfer_id", "unknown", text(TransferId::new())),
                team("team"),
                nothing("team", "that does not have it", text(OTHER)),
            ],
        ),
    ]
}

async fn inventory(world: &World<'_>) -> Vec<Call> {
    use pb::report_request::Message;
    let session_credential = world.here.credential.clone();
    let needed = pb::PrepareVolume {
        name: "x".repeat(512),
        purpose: pb::VolumePurpose::Output.into(),
        from_artifact_id: world.sealed.to_string(),
        output_artifact_id: ArtifactId::new().to_string(),
        from_task_cache_id: String::new(),
    };
    let prepare = pb::PrepareRequest {
        session_credential: session_credential.clone(),
        holder_id: world.other_workload.to_string(),
        attempt_id: AttemptId::new().to_string(),
        team: TEAM.to_owned(),
        volumes: vec![needed],
        unreachable_artifact_ids: vec![ArtifactId::new().to_string()],
    };
    let prepared = pb::CompletePrepareRequest {
        session_credential: session_credential.clone(),
        attempt_id: world.other_attempt.to_string(),
    };
    let complete = pb::CompleteVolumeRequest {
        session_credential: session_credential.clone(),
        volume_handle: world.other_prepared.volumes[0].volume_handle.clone(),
        size_bytes: (1 << 63) - 1,
        digest: digest(5).as_bytes().to_vec().into(),
        verification: pb::Verification::Verified.into(),
    };
    // A worker without known volumes: everything that it reports is unknown.
    let reporter = world.suite.silent_gateway(WorkerId::new(), 2, 2);
    let token = reporter.begin_report().await.expect("a new worker may speak");
    let whole = [
        Message::Open(pb::ReportOpen {
            session_credential: reporter.credential.clone(),
            token: Some(token.clone()),
            worker_life: token.store_life.clone(),
        }),
        Message::Holdings(pb::Holdings {
            volume_handles: vec![WorkloadId::new().to_string()],
            container_handles: vec![WorkloadId::new().to_string()],
        }),
        Message::Commit(pb::ReportCommit { count: 2 }),
    ];
    let report = whole.map(|message| pb::ReportRequest { message: Some(message) });
    let last = Some(pb::ReportToken { sequence: 1, ..token.clone() });
    let begin = pb::BeginReportRequest {
        session_credential: session_credential.clone(),
        last,
        receipt: digest(1).as_bytes().to_vec().into(),
    };
    let watch = pb::WatchDestroyingRequest { session_credential };
    vec![
        Call::new(
            "Inventory.Prepare",
            [prepare],
            [
                credential("session_credential", world.suite, &world.here),
                id("holder_id"),
                invalid("holder_id", "of another team", text(world.foreign_workload), "team"),
                but("holder_id", "settled", world.settled, AttemptEnded),
                id("attempt_id"),
                but("attempt_id", "of another workload", world.attempt, AttemptEnded),
                but("attempt_id", "of another worker", world.attempt_there, AttemptEnded),
                team("team"),
                invalid("team", "that does not have the workload", text(OTHER), "team"),
                many("volumes", 1001),
                twice("volumes", "volumes.name"),
                invalid("volumes.name", "missing", text(""), "volumes.name"),
                invalid("volumes.name", "overlong", text("x".repeat(513)), "volumes.name"),
                invalid("volumes.name", "with NUL", text("a\0b"), "volumes.name"),
                choice("volumes.purpose"),
                invalid("volumes.purpose", "of a transfer", Value::EnumNumber(1), "volumes.purpose"),
                invalid(
                    "volumes.purpose",
                    "of no output",
                    Value::EnumNumber(4),
                    "volumes.output_artifact_id",
                ),
                optional_id("volumes.from_artifact_id"),
                malformed("volumes.from_task_cache_id"),
                invalid(
                    "volumes.from_task_cache_id",
                    "beside an artifact",
                    text(WorkloadId::new()),
                    "volumes.from_task_cache_id",
                ),
                malformed("unreachable_artifact_ids"),
                many("unreachable_artifact_ids", 101),
                but("volumes.from_artifact_id", "unknown", ArtifactId::new(), InputUnavailable),
                but("volumes.from_artifact_id", "of another team", world.foreign_artifact, InputUnavailable),
                but("volumes.from_artifact_id", "not sealed", world.open, InputUnavailable),
                id("volumes.output_artifact_id"),
            ],
        ),
        Call::new(
            "Inventory.CompletePrepare",
            [prepared],
            [
                credential("session_credential", world.suite, &world.here),
                id("attempt_id"),
                but("attempt_id", "unknown", AttemptId::new(), AttemptEnded),
                but("attempt_id", "of another worker", world.attempt_there, AttemptEnded),
            ],
        ),
        Call::new(
            "Inventory.CompleteVolume",
            [complete],
            [
                credential("session_credential", world.suite, &world.here),
                but("session_credential", "of another worker", &world.there.credential, VolumeNotFound),
                id("volume_handle"),
                but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound),
                invalid(
                    "volume_handle",
                    "of an input",
                    text(&world.prepared.volumes[1].volume_handle),
                    "volume_handle",
                ),
                invalid("size_bytes", "beyond 2^63", Value::U64(1 << 63), "size_bytes"),
                invalid("size_bytes", "absurd", Value::U64(u64::MAX), "size_bytes"),
                digests("digest"),
                invalid(
                    "volume_handle",
                    "that was completed with another digest",
                    text(&world.prepared.volumes[0].volume_handle),
                    "digest",
                ),
                choice("verification"),
            ],
        ),
        Call::new(
            "Inventory.BeginReport",
            [begin],
            [
                credential("session_credential", world.suite, &world.here),
                invalid("last.sequence", "absurd", Value::U64(u64::MAX), "last.sequence"),
                id("last.store_life"),
                invalid("receipt", "short", Value::Bytes(vec![7; 31].into()), "receipt"),
            ],
        ),
        Call::new(
            "Inventory.WatchDestroying",
            [watch],
            [credential("session_credential", world.suite, &world.here)],
        )
        .silent(),
        Call::new(
            "Inventory.Report",
            report,
            [
                credential("open.session_credential", world.suite, &reporter),
                vec![cleared("open.token", "open.token")],
                invalid("open.token.sequence", "absurd", Value::U64(u64::MAX), "open.token.sequence"),
                change(
                    "open.token.sequence",
                    "that was not minted yet",
                    Value::U64(token.sequence + 1),
                    Expected::Refused(StaleReport, String::new()),
                ),
                id("open.token.store_life"),
                but("open.token.store_life", "of another store", WorkloadId::new(), StaleReport),
                malformed("open.worker_life"),
                malformed("holdings.volume_handles"),
                malformed("holdings.container_handles"),
                change(
                    "commit.count",
                    "absurd",
                    Value::U64(u64::MAX),
                    Expected::Refused(ReportTruncated, String::new()),
                ),
                messages("without an end", Expected::Refused(ReportTruncated, String::new()), |sent| {
                    sent.truncate(2)
                }),
                messages("without a beginning", refused_message(), |sent| {
                    sent.remove(0);
                }),
                messages("opened twice", refused_message(), |sent| {
                    sent.insert(1, sent[0].clone());
                }),
                messages("of nothing", refused_message(), Vec::clear),
            ],
        ),
    ]
}

/// Returns the calls that list. Each accepts its own page token, and rejects those of the others.
async fn lists(world: &World<'_>) -> Vec<Call> {
    let suite = world.suite;
    let artifacts = pb::ListArtifactsRequest { team: TEAM.to_owned(), page_size: 1, ..Default::default() };
    let sealed = pb::ListArtifactsRequest { state: pb::ArtifactState::Sealed.into(), ..artifacts.clone() };
    let of_other = pb::ListArtifactsRequest { team: OTHER.to_owned(), ..artifacts.clone() };
    let mut tokens = Vec::new();
    for request in [&artifacts, &sealed, &of_other] {
        let answer = suite.artifacts().list_artifacts(request.clone()).await.expect("a page");
        tokens.push(answer.into_inner().next_page_token);
    }
    let volumes = pb::ListVolumesRequest { page_size: 1, ..Default::default() };
    let created = pb::ListVolumesRequest { state: pb::InventoryState::Created.into(), ..volumes.clone() };
    let here = pb::ListVolumesRequest { worker_id: world.here.worker.to_string(), ..volumes.clone() };
    for request in [&volumes, &created, &here] {
        let answer = suite.inventory().list_volumes(request.clone()).await.expect("a page");
        tokens.push(answer.into_inner().next_page_token);
    }
    let containers = pb::ListContainersRequest { page_size: 1, ..Default::default() };
    let answer = suite.inventory().list_containers(containers.clone()).await.expect("a page");
    tokens.push(answer.into_inner().next_page_token);
    let pins = pb::ListPinsRequest { page_size: 1, ..Default::default() };
    let answer = suite.pins().list_pins(pins.clone()).await.expect("a page");
    tokens.push(answer.into_inner().next_page_token);
    tokens.extend(caches::first_pages(suite).await);
    assert!(tokens.iter().all(|token| !token.is_empty()), "each list has several pages: {tokens:?}");

    let page = |own: usize| {
        let mut bad: Vec<_> = [1001, u32::MAX]
            .into_iter()
            .flat_map(|size| invalid("page_size", "absurd", Value::U32(size), "page_size"))
            .collect();
        bad.extend(but("page_token", "malformed", "?", InvalidPageToken));
        bad.extend(but("page_token", "overlong", "A".repeat(100_000), InvalidPageToken));
        for (index, token) in tokens.iter().enumerate().filter(|(index, _)| *index != own) {
            bad.extend(but("page_token", &format!("of list {index}"), token, InvalidPageToken));
        }
        bad
    };
    let listed = |what, handle: &str, count| {
        let handles = Value::List(vec![Value::String(handle.to_owned()); count]);
        invalid("volume_handles", what, handles, "volume_handles")
    };
    let prefix = || {
        let bad = |what, prefix| invalid("id_prefix", what, text(prefix), "id_prefix");
        let mut all = bad("too short", "abc".to_owned());
        all.extend(bad("malformed", "name".to_owned()));
        all.extend(bad("overlong", "a".repeat(100_000)));
        all.extend(but("id_prefix", "that the token is not of", "abcd", InvalidPageToken));
        all
    };
    let mut handles = listed("malformed", "x", 1);
    handles.extend(listed("too many", &world.here.worker.to_string(), 1001));
    let token = |own: usize| tokens[own].clone();
    let mut calls = caches::lists(&tokens, 8, page);
    calls.extend([
        Call::new(
            "Artifacts.ListArtifacts",
            [pb::ListArtifactsRequest { page_token: token(0), ..artifacts }],
            [
                team("team"),
                but("team", "that the token is not of", OTHER, InvalidPageToken),
                filter("state"),
                prefix(),
                page(0),
            ],
        ),
        Call::new(
            "Inventory.ListVolumes",
            [pb::ListVolumesRequest { page_token: token(3), ..volumes }],
            [malformed("worker_id"), filter("state"), handles, prefix(), page(3)],
        ),
        Call::new(
            "Inventory.ListContainers",
            [pb::ListContainersRequest { page_token: token(6), ..containers }],
            [malformed("worker_id"), filter("state"), prefix(), page(6)],
        ),
        Call::new("Pins.ListPins", [pb::ListPinsRequest { page_token: token(7), ..pins }], [page(7)]),
    ]);
    calls
}

/// Returns a page token of a list that is not in the table.
async fn token_of_volumes(suite: &Suite) -> String {
    let volumes = pb::ListVolumesRequest { page_size: 1, ..Default::default() };
    let page = suite.inventory().list_volumes(volumes).await.expect("a page").into_inner();
    assert_ne!(page.next_page_token, "", "the list has several pages");
    page.next_page_token
}
