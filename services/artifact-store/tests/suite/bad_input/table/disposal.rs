//! Invalid requests to explain, find, watch and delete.

use super::*;

pub(super) async fn calls(world: &World<'_>) -> Vec<Call> {
    let mut calls = looks(world, token_of_volumes(world.suite).await);
    calls.extend(ends(world));
    calls
}

fn looks(world: &World<'_>, of_volumes: String) -> Vec<Call> {
    let explain = pb::ExplainRequest { team: TEAM.to_owned(), id: world.sealed.to_string() };
    let volume_handle = world.prepared.volumes[0].volume_handle.clone();
    let container_handle = world.prepared.container_handle.clone();
    let at_risk = pb::ListAtRiskRequest {
        team: TEAM.to_owned(),
        worker_ids: vec![world.here.worker.to_string()],
        ..Default::default()
    };
    let many_workers = Value::List((0..10_001).map(|_| text(world.here.worker)).collect());
    vec![
        Call::new(
            "Artifacts.Explain",
            [explain],
            [
                team("team"),
                but("team", "that does not have it", OTHER, UnknownId),
                id("id"),
                but("id", "unknown", ArtifactId::new(), UnknownId),
                but("id", "of another team", world.foreign_artifact, UnknownId),
                but("id", "of another team's build", world.foreign_build, UnknownId),
                but("id", "of another team's workload", world.foreign_workload, UnknownId),
            ],
        ),
        Call::new(
            "Inventory.GetVolume",
            [pb::GetVolumeRequest { volume_handle }],
            [id("volume_handle"), but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound)],
        ),
        Call::new(
            "Inventory.GetContainer",
            [pb::GetContainerRequest { container_handle }],
            [
                id("container_handle"),
                but("container_handle", "unknown", WorkloadId::new(), ContainerNotFound),
            ],
        ),
        Call::new(
            "Inventory.WatchLost",
            [pb::WatchLostRequest::default()],
            [change(
                "after_revision",
                "absurd",
                Value::U64(u64::MAX),
                Expected::Refused(Compacted, String::new()),
            )],
        )
        .silent(),
        Call::new("Collector.WatchCollections", [pb::WatchCollectionsRequest {}], []).silent(),
        Call::new(
            "Inventory.ListAtRisk",
            [at_risk],
            [
                team("team"),
                nothing("team", "that has nothing there", text(OTHER)),
                nothing("all_teams", "asked for", Value::Bool(true)),
                id("worker_ids"),
                nothing("worker_ids", "unknown", text(WorkerId::new())),
                invalid("worker_ids", "10001 of them", many_workers, "worker_ids"),
                invalid("page_size", "absurd", Value::U32(1001), "page_size"),
                invalid("page_size", "absurd", Value::U32(u32::MAX), "page_size"),
                but("page_token", "malformed", "?", InvalidPageToken),
                but("page_token", "overlong", "A".repeat(100_000), InvalidPageToken),
                but("page_token", "of another list", of_volumes, InvalidPageToken),
            ],
        ),
    ]
}

fn ends(world: &World<'_>) -> Vec<Call> {
    let session_credential = world.here.credential.clone();
    let container_handle = world.other_prepared.container_handle.clone();
    let volume_handle = world.other_prepared.volumes[0].volume_handle.clone();
    let why = "x".repeat(1000);
    let undelete = pb::UndeleteRequest {
        team: TEAM.to_owned(),
        artifact_id: world.sealed.to_string(),
        kept_by: Some(pb::undelete_request::KeptBy::BuildId(world.build.to_string())),
    };
    let touch = pb::TouchRequest {
        session_credential: session_credential.clone(),
        attempt_id: world.other_attempt.to_string(),
    };
    let mark_container = pb::MarkContainerRequest {
        session_credential: session_credential.clone(),
        container_handle: container_handle.clone(),
        reason: why.clone(),
    };
    let mark_volume = pb::MarkVolumeRequest {
        session_credential: session_credential.clone(),
        volume_handle: volume_handle.clone(),
        reason: why.clone(),
    };
    let make_room = pb::MakeRoomRequest {
        session_credential: session_credential.clone(),
        size_bytes: 1,
        reliable_worker_ids: vec![world.there.worker.to_string()],
        only_ended: false,
    };
    let many_workers = Value::List((0..10_001).map(|_| text(world.here.worker)).collect());
    let failed = pb::FailPrepareRequest {
        session_credential,
        container_handle,
        volume_handles: vec![volume_handle],
        reason: why.clone(),
    };
    let lost = pb::LostReplica {
        volume_handle: world.prepared.volumes[0].volume_handle.clone(),
        reason: "is missing".to_owned(),
    };
    let lose =
        pb::LoseReplicasRequest { session_credential: world.here.credential.clone(), replicas: vec![lost] };
    let measured = pb::VolumeDiskUsage {
        volume_handle: world.prepared.volumes[0].volume_handle.clone(),
        exclusive_bytes: 1,
        disk_bytes: 2,
    };
    let record = pb::RecordDiskUsageRequest {
        session_credential: world.here.credential.clone(),
        volumes: vec![measured],
    };
    let drop = pb::DropReplicaRequest {
        team: TEAM.to_owned(),
        artifact_id: world.sealed.to_string(),
        worker_id: world.here.worker.to_string(),
        reason: why,
        force: true,
    };
    let forget =
        pb::ForgetWorkerRequest { worker_id: world.here.worker.to_string(), force: true, dry_run: false };
    let unforced = || Expected::Refused(LastReplica, String::new());
    vec![
        Call::new(
            "Artifacts.Undelete",
            [undelete],
            [
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
                id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                seconds("keep", 10 * 366 * 24 * 3600),
            ],
        ),
        Call::new(
            "Inventory.Touch",
            [touch],
            [
                credential("session_credential", world.suite, &world.here),
                but("session_credential", "of another worker", &world.there.credential, ContainerNotFound),
                id("attempt_id"),
                but("attempt_id", "unknown", AttemptId::new(), ContainerNotFound),
                but("attempt_id", "of another worker", world.attempt_there, ContainerNotFound),
            ],
        ),
        Call::new(
            "Inventory.MarkContainer",
            [mark_container],
            [
                optional_credential("session_credential", world.suite, &world.here),
                but("session_credential", "of another worker", &world.there.credential, ContainerNotFound),
                id("container_handle"),
                but("container_handle", "unknown", WorkloadId::new(), ContainerNotFound),
                super::reason("reason"),
            ],
        ),
        Call::new(
            "Inventory.MarkVolume",
            [mark_volume],
            [
                optional_credential("session_credential", world.suite, &world.here),
                but("session_credential", "of another worker", &world.there.credential, VolumeNotFound),
                id("volume_handle"),
                but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound),
                super::reason("reason"),
            ],
        ),
        Call::new(
            "Inventory.MakeRoom",
            [make_room],
            [
                credential("session_credential", world.suite, &world.here),
                invalid("size_bytes", "zero", Value::U64(0), "size_bytes"),
                id("reliable_worker_ids"),
                invalid("reliable_worker_ids", "10001 of them", many_workers, "reliable_worker_ids"),
                change("only_ended", "asked for", Value::Bool(true), Expected::Taken),
            ],
        ),
        Call::new(
            "Inventory.FailPrepare",
            [failed],
            [
                credential("session_credential", world.suite, &world.here),
                nothing("session_credential", "of another worker", text(&world.there.credential)),
                optional_id("container_handle"),
                nothing("container_handle", "unknown", text(WorkloadId::new())),
                ids("volume_handles"),
                nothing("volume_handles", "unknown", text(WorkloadId::new())),
                super::reason("reason"),
            ],
        ),
        Call::new(
            "Inventory.LoseReplicas",
            [lose],
            [
                credential("session_credential", world.suite, &world.here),
                nothing("session_credential", "of another worker", text(&world.there.credential)),
                many("replicas", 1001),
                id("replicas.volume_handle"),
                nothing("replicas.volume_handle", "unknown", text(WorkloadId::new())),
                super::reason("replicas.reason"),
            ],
        ),
        Call::new(
            "Inventory.RecordDiskUsage",
            [record],
            [
                credential("session_credential", world.suite, &world.here),
                nothing("session_credential", "of another worker", text(&world.there.credential)),
                invalid("volumes", "none", Value::List(Vec::new()), "volumes"),
                many("volumes", 1001),
                id("volumes.volume_handle"),
                nothing("volumes.volume_handle", "unknown", text(WorkloadId::new())),
                invalid("volumes.exclusive_bytes", "absurd", Value::U64(1 << 63), "volumes.exclusive_bytes"),
                invalid("volumes.disk_bytes", "absurd", Value::U64(u64::MAX), "volumes.disk_bytes"),
            ],
        ),
        Call::new(
            "Replicas.DropReplica",
            [drop],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("artifact_id"),
                but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
                id("worker_id"),
                nothing("worker_id", "unknown", text(WorkerId::new())),
                super::reason("reason"),
                change("force", "missing", Value::Bool(false), unforced()),
            ],
        ),
        Call::new(
            "Inventory.ForgetWorker",
            [forget],
            [
                id("worker_id"),
                nothing("worker_id", "unknown", text(WorkerId::new())),
                change("force", "missing", Value::Bool(false), unforced()),
                nothing("dry_run", "asked for", Value::Bool(true)),
            ],
        ),
    ]
}
