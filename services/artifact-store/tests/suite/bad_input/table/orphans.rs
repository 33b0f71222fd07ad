//! Invalid requests about orphans.

use domain::VolumeHandle;

use super::*;

pub(super) async fn calls(world: &World<'_>) -> Vec<Call> {
    let suite = world.suite;
    // A worker whose volumes are of no store life.
    let mut gateway = suite.silent_gateway(WorkerId::new(), 2, 2);
    gateway.life = Some(String::new());
    let orphans = [(); 3].map(|()| VolumeHandle::new().to_string());
    gateway.report(&orphans, &[]).await.expect("reported");
    let [to_adopt, to_purge, undescribed] = orphans;
    let description = pb::VolumeDescription {
        volume_handle: to_adopt.clone(),
        parent_handle: to_purge.clone(),
        team: TEAM.to_owned(),
        artifact_id: ArtifactId::new().to_string(),
        digest: digest(6).as_bytes().to_vec().into(),
        size_bytes: (1 << 63) - 1,
    };
    let describe = pb::DescribeOrphansRequest {
        session_credential: gateway.credential.clone(),
        volumes: vec![description],
    };
    let list = pb::ListOrphansRequest { page_size: 1, ..Default::default() };
    let answer = suite.inventory().list_orphans(list.clone()).await.expect("a page");
    let page_token = answer.into_inner().next_page_token;
    let adopt = pb::AdoptRequest {
        team: TEAM.to_owned(),
        volume_handle: to_adopt,
        worker_id: gateway.worker.to_string(),
        artifact_id: ArtifactId::new().to_string(),
        kept_by: Some(pb::adopt_request::KeptBy::BuildId(world.build.to_string())),
    };
    let purge = pb::PurgeRequest { handles: vec![to_purge], worker_id: gateway.worker.to_string() };
    let known = &world.prepared.volumes[0].volume_handle;
    vec![
        Call::new(
            "Inventory.DescribeOrphans",
            [describe],
            [
                credential("session_credential", suite, &gateway),
                nothing("session_credential", "of another worker", text(&world.here.credential)),
                many("volumes", 1001),
                id("volumes.volume_handle"),
                nothing("volumes.volume_handle", "that is no orphan", text(known)),
                malformed("volumes.parent_handle"),
                invalid("volumes.team", "malformed", text("\n"), "volumes.team"),
                malformed("volumes.artifact_id"),
                invalid("volumes.digest", "short", Value::Bytes(vec![1; 31].into()), "volumes.digest"),
                invalid("volumes.size_bytes", "absurd", Value::U64(u64::MAX), "volumes.size_bytes"),
            ],
        ),
        Call::new(
            "Inventory.ListOrphans",
            [pb::ListOrphansRequest { page_token, ..list }],
            [
                malformed("worker_id"),
                but("worker_id", "that the token is not of", WorkerId::new(), InvalidPageToken),
                invalid("page_size", "absurd", Value::U32(1001), "page_size"),
                but("page_token", "malformed", "?", InvalidPageToken),
                but("page_token", "overlong", "A".repeat(100_000), InvalidPageToken),
                but("page_token", "of another list", token_of_volumes(suite).await, InvalidPageToken),
            ],
        ),
        Call::new(
            "Inventory.Adopt",
            [adopt],
            [
                team("team"),
                but("team", "that it is not of", OTHER, VolumeNotFound),
                id("volume_handle"),
                but("volume_handle", "unknown", WorkloadId::new(), VolumeNotFound),
                but("volume_handle", "on another worker", known, VolumeNotFound),
                but("volume_handle", "of which nothing is known", undescribed, NotAdoptable),
                malformed("worker_id"),
                but("worker_id", "another", world.here.worker, VolumeNotFound),
                malformed("artifact_id"),
                but("artifact_id", "of other bytes", world.sealed, ArtifactSealed),
                but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
                id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                seconds("keep", 10 * 366 * 24 * 3600),
            ],
        ),
        Call::new(
            "Inventory.Purge",
            [purge],
            [
                ids("handles"),
                but("handles", "unknown", WorkloadId::new(), UnknownId),
                but("handles", "on another worker", known, UnknownId),
                malformed("worker_id"),
                but("worker_id", "another", world.here.worker, UnknownId),
            ],
        ),
    ]
}
