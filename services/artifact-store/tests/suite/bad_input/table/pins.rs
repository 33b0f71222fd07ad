//! Invalid requests to `Pins`.

use domain::{ArtifactId, AttemptId, BuildId, CacheId, WorkloadId};
use prost_reflect::Value;
use rpc::Reason::*;
use rpc::pb::artifacts as pb;
use testing::bad_input::wrong::*;
use testing::bad_input::{Bad, Call, Expected, set};

use super::{OTHER, World};
use crate::{TEAM, digest};

pub(super) async fn pins(world: &World<'_>) -> Vec<Call> {
    let cache = async |team: &str| {
        let request = pb::FindOrCreateTaskCacheRequest {
            team: team.to_owned(),
            job: "pinned".to_owned(),
            step: "step".to_owned(),
            path: "/path".to_owned(),
            ttl: None,
        };
        let found = world.suite.caches().find_or_create_task_cache(request).await;
        found.expect("a cache").into_inner().cache_id
    };
    let (ours, foreign) = (cache(TEAM).await, cache(OTHER).await);

    let pin = pb::PinRequest {
        holder_id: WorkloadId::new().to_string(),
        team: TEAM.to_owned(),
        artifact_ids: vec![world.sealed.to_string()],
        build_id: world.build.to_string(),
        task_cache_ids: vec![ours],
    };
    let end = pb::EndAttemptRequest {
        holder_id: world.other_workload.to_string(),
        attempt_id: world.other_attempt.to_string(),
    };
    let settled = pb::SettledOutput {
        artifact_id: world.workload.output_artifact("out").to_string(),
        digest: digest(4).as_bytes().to_vec().into(),
        label: "out".to_owned(),
        owners: vec![pb::OutputOwner {
            owner: Some(pb::output_owner::Owner::BuildId(world.build.to_string())),
        }],
        for_owners_only: false,
    };
    let settle = pb::SettleRequest {
        holder_id: world.workload.to_string(),
        team: TEAM.to_owned(),
        attempt_id: world.attempt.to_string(),
        outputs: vec![settled],
        build_id: world.build.to_string(),
        status: pb::BuildStatus::Succeeded.into(),
    };
    vec![
        Call::new(
            "Pins.Pin",
            [pin],
            [
                id("holder_id"),
                invalid("holder_id", "of another team", text(world.foreign_workload), "team"),
                but("holder_id", "settled", world.settled, HolderSettled),
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                ids("artifact_ids"),
                but("artifact_ids", "unknown", ArtifactId::new(), InputUnavailable),
                but("artifact_ids", "of another team", world.foreign_artifact, InputUnavailable),
                but("artifact_ids", "not sealed", world.open, InputUnavailable),
                optional_id("build_id"),
                but("build_id", "unknown", BuildId::new(), OwnerEnded),
                but("build_id", "of another team", world.foreign_build, OwnerEnded),
                id("task_cache_ids"),
                many("task_cache_ids", 101),
                but("task_cache_ids", "unknown", CacheId::new(), InputUnavailable),
                but("task_cache_ids", "of another team", foreign, InputUnavailable),
            ],
        ),
        Call::new(
            "Pins.Settle",
            [settle],
            [
                id("holder_id"),
                invalid("holder_id", "of another team", text(world.foreign_workload), "team"),
                but("holder_id", "that does not have the attempt", WorkloadId::new(), CandidateMissing),
                team("team"),
                invalid("team", "that does not have it", text(OTHER), "team"),
                optional_id("attempt_id"),
                but("attempt_id", "unknown", AttemptId::new(), CandidateMissing),
                but("attempt_id", "of another workload", world.other_attempt, CandidateMissing),
                many("outputs", 1001),
                twice("outputs", "outputs.artifact_id"),
                id("outputs.artifact_id"),
                but("outputs.artifact_id", "unknown", ArtifactId::new(), CandidateMissing),
                but("outputs.artifact_id", "taken", world.sealed, CandidateMissing),
                but("outputs.artifact_id", "of another team", world.foreign_artifact, CandidateMissing),
                digests("outputs.digest"),
                change(
                    "outputs.digest",
                    "that no candidate has",
                    Value::Bytes(digest(99).as_bytes().to_vec().into()),
                    Expected::Refused(CandidateMissing, String::new()),
                ),
                label("outputs.label"),
                id("outputs.owners.build_id"),
                id("outputs.owners.task_cache_id"),
                id("outputs.owners.resource_cache_claim_id"),
                without_owners(),
                optional_id("build_id"),
                choice("status"),
            ],
        ),
        Call::new(
            "Pins.EndAttempt",
            [end],
            [
                id("holder_id"),
                invalid("holder_id", "that does not have it", text(WorkloadId::new()), "attempt_id"),
                id("attempt_id"),
                invalid("attempt_id", "of another workload", text(world.attempt_there), "attempt_id"),
            ],
        ),
    ]
}

/// Returns an output that is only for its owners, and has none.
fn without_owners() -> Vec<Bad> {
    let change = |messages: &mut Vec<prost_reflect::DynamicMessage>| {
        set(&mut messages[0], &["outputs", "owners"], None);
        set(&mut messages[0], &["outputs", "for_owners_only"], Some(&Value::Bool(true)));
    };
    let field = "outputs.for_owners_only";
    otherwise(field, "without owners", refused(field), change)
}
