//! Calls of another team about items that are not its own.

use domain::{ArtifactId, AttemptId, ClaimId, TransferId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome as Answered;
use uuid::Uuid;

use super::World;
use crate::model::operations::Trespass;
use crate::model::state::{Outcome, State, artifact_id, build_id, claim_id, digest_of, worker_id};
use crate::{Answer, Callers, digest, input};

const OTHER: &str = "other";

/// Id of the other team's own items, one of each kind.
const OWN: Uuid = Uuid::from_u128(9 << 96 | 0x4000_8000_0000_0000_0000);

fn team() -> String {
    OTHER.to_owned()
}

/// Returns whether an answer contains items of another team.
fn nothing<T>(answer: Result<T, tonic::Status>) -> Answer<bool> {
    Ok(answer.map(|_| false)?)
}

impl World {
    /// Makes a call. Skips calls about builds or caches that were never created.
    pub(super) async fn trespass(&self, state: &State, tried: Trespass) -> Outcome {
        let answer = self.ask(|callers| Box::pin(self.attempt_to(callers, state, tried))).await;
        match answer {
            Ok(Some(learnt)) => Outcome::Passed { learnt },
            Ok(None) => Outcome::Skipped,
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    async fn attempt_to(&self, callers: Callers, state: &State, tried: Trespass) -> Answer<Option<bool>> {
        use Trespass as T;
        let answer = match tried {
            // Artifacts of workers are available to every team.
            T::Get(artifact)
            | T::Locate(artifact)
            | T::Pin(artifact)
            | T::Plan(artifact, _)
            | T::Prepare(artifact, _)
            | T::PutType(artifact)
                if state.held_by_workers().any(|(held, _)| held == artifact) =>
            {
                return Ok(None);
            }
            T::AdoptBytes(content)
                if state.held_by_workers().any(|(held, _)| state.sealed(held) == Some(content)) =>
            {
                return Ok(None);
            }
            T::Get(_)
            | T::Locate(_)
            | T::AdoptBytes(_)
            | T::Undelete(_)
            | T::Pin(_)
            | T::Plan(..)
            | T::Prepare(..)
            | T::Drop(..)
            | T::Seal(..)
            | T::PutType(_)
            | T::AddOwner(..)
            | T::RemoveOwner(..) => self.on_artifacts(callers, tried).await,
            T::EndBuild(build) | T::DeleteBuild(build) if state.build(build).is_none() => return Ok(None),
            T::EndBuild(build) => {
                let request = pb::PutBuildRequest {
                    build_id: build_id(build).to_string(),
                    team: team(),
                    status: pb::BuildStatus::Aborted.into(),
                    ..Default::default()
                };
                nothing(callers.owners().put_build(request).await)
            }
            T::DeleteBuild(build) => {
                let request = pb::DeleteBuildRequest { team: team(), build_id: build_id(build).to_string() };
                nothing(callers.owners().delete_build(request).await)
            }
            T::AskCache(_)
            | T::RenewClaim(_)
            | T::PutCache(..)
            | T::UseCache(_)
            | T::DeleteCache(_)
            | T::AskTask(_)
            | T::PublishTask(..)
            | T::DeleteTask(_) => return on_caches(callers, state, tried).await,
        };
        answer.map(Some)
    }

    async fn on_artifacts(&self, callers: Callers, tried: Trespass) -> Answer<bool> {
        use Trespass as T;
        let id = |artifact| -> String { artifact_id(artifact).to_string() };
        match tried {
            T::Get(artifact) => {
                let request = pb::GetArtifactRequest { team: team(), artifact_id: id(artifact) };
                nothing(callers.artifacts().get_artifact(request).await)
            }
            T::Locate(artifact) => {
                let request = pb::LocateRequest { team: team(), artifact_ids: vec![id(artifact)] };
                let located = callers.artifacts().locate(request).await?.into_inner();
                let listed = pb::ListArtifactsRequest { team: team(), ..Default::default() };
                let listed = callers.artifacts().list_artifacts(listed).await?.into_inner();
                Ok(!located.locations.is_empty() || !listed.artifacts.is_empty())
            }
            T::AdoptBytes(content) => {
                let request = pb::AdoptByDigestRequest {
                    team: team(),
                    digest: digest_of(content).as_bytes().to_vec().into(),
                    ..Default::default()
                };
                Ok(callers.artifacts().adopt_by_digest(request).await?.into_inner().artifact.is_some())
            }
            T::Undelete(artifact) => {
                let request =
                    pb::UndeleteRequest { team: team(), artifact_id: id(artifact), ..Default::default() };
                nothing(callers.artifacts().undelete(request).await)
            }
            T::Pin(artifact) => {
                let request = pb::PinRequest {
                    holder_id: WorkloadId::from_uuid(OWN).to_string(),
                    team: team(),
                    artifact_ids: vec![id(artifact)],
                    ..Default::default()
                };
                nothing(callers.pins().pin(request).await)
            }
            T::Plan(artifact, worker) => {
                let request = pb::PlanReplicaRequest {
                    team: team(),
                    artifact_id: id(artifact),
                    worker_id: worker_id(worker).to_string(),
                    transfer_id: TransferId::from_uuid(OWN).to_string(),
                };
                nothing(callers.replicas().plan_replica(request).await)
            }
            T::Prepare(artifact, worker) => {
                let artifact: ArtifactId = artifact_id(artifact);
                let request = pb::PrepareRequest {
                    session_credential: self.speaker(worker).gateway.credential,
                    holder_id: WorkloadId::from_uuid(OWN).to_string(),
                    attempt_id: AttemptId::from_uuid(OWN).to_string(),
                    team: team(),
                    volumes: vec![input("in", artifact)],
                    unreachable_artifact_ids: Vec::new(),
                };
                nothing(callers.inventory().prepare(request).await)
            }
            T::Drop(artifact, worker) => {
                let request = pb::DropReplicaRequest {
                    team: team(),
                    artifact_id: id(artifact),
                    worker_id: worker_id(worker).to_string(),
                    reason: "it is another's".to_owned(),
                    force: true,
                };
                nothing(callers.replicas().drop_replica(request).await)
            }
            T::Seal(artifact, content) => {
                let request = pb::SealUploadRequest {
                    team: team(),
                    artifact_id: id(artifact),
                    digest: digest_of(content).as_bytes().to_vec().into(),
                };
                nothing(callers.replicas().seal_upload(request).await)
            }
            T::PutType(artifact) => {
                let request = pb::PutBaseResourceTypeRequest {
                    team: team(),
                    r#type: "theirs".to_owned(),
                    artifact_id: id(artifact),
                    ..Default::default()
                };
                nothing(callers.caches().put_base_resource_type(request).await)
            }
            T::AddOwner(artifact, build) => {
                let (artifact_id, build_id) = (id(artifact), build_id(build).to_string());
                let request = pb::AddOwnerRequest { team: team(), artifact_id, build_id };
                nothing(callers.artifacts().add_owner(request).await)
            }
            T::RemoveOwner(artifact, build) => {
                let (artifact_id, build_id) = (id(artifact), build_id(build).to_string());
                let request = pb::RemoveOwnerRequest { team: team(), artifact_id, build_id };
                nothing(callers.artifacts().remove_owner(request).await)
            }
            _ => Ok(false),
        }
    }
}

async fn on_caches(callers: Callers, state: &State, tried: Trespass) -> Answer<Option<bool>> {
    use Trespass as T;
    let cache = match tried {
        T::UseCache(cache) | T::DeleteCache(cache) => state.resource_cache(cache),
        T::PublishTask(task, _) | T::DeleteTask(task) => state.task_cache(task),
        // These calls need no existing item.
        _ => Some(OWN),
    };
    let Some(cache_id) = cache.map(|cache| cache.to_string()) else { return Ok(None) };
    let answer: Answer<bool> = match tried {
        T::AskCache(cache) => {
            let request = pb::FindOrCreateResourceCacheRequest {
                team: team(),
                key_digest: digest(cache.into()).as_bytes().to_vec().into(),
                claim_id: ClaimId::from_uuid(Uuid::from_u128(OWN.as_u128() | u128::from(cache))).to_string(),
                ..Default::default()
            };
            let answer = callers.caches().find_or_create_resource_cache(request).await?.into_inner();
            let known = state.resource_cache(cache).is_some_and(|known| answer.cache_id == known.to_string());
            Ok(known || matches!(answer.outcome, Some(Answered::Ready(_))))
        }
        T::RenewClaim(claim) => {
            let request =
                pb::RenewResourceCacheRequest { team: team(), claim_id: claim_id(claim).to_string() };
            nothing(callers.caches().renew_resource_cache(request).await)
        }
        T::PutCache(claim, artifact) => {
            let request = pb::PutResourceCacheRequest {
                team: team(),
                claim_id: claim_id(claim).to_string(),
                artifact_id: artifact_id(artifact).to_string(),
            };
            nothing(callers.caches().put_resource_cache(request).await)
        }
        T::UseCache(_) => {
            let user = pb::cache_user::User::WorkloadId(WorkloadId::from_uuid(OWN).to_string());
            let user = Some(pb::CacheUser { user: Some(user) });
            let request = pb::UseResourceCacheRequest { team: team(), cache_id, user };
            nothing(callers.caches().use_resource_cache(request).await)
        }
        T::DeleteCache(_) => {
            let request = pb::DeleteResourceCacheRequest { team: team(), cache_id };
            nothing(callers.caches().delete_resource_cache(request).await)
        }
        T::AskTask(task) => {
            let (known, artifact) = super::caches::ask_task(callers, team(), task).await?;
            Ok(artifact.is_some() || state.task_cache(task) == Some(known))
        }
        T::PublishTask(_, artifact) => {
            let artifact_id = artifact_id(artifact).to_string();
            let request = pb::PublishTaskCacheRequest { team: team(), cache_id, artifact_id };
            nothing(callers.caches().publish_task_cache(request).await)
        }
        T::DeleteTask(_) => {
            let request = pb::DeleteTaskCachesRequest { team: team(), cache_id, ..Default::default() };
            Ok(callers.caches().delete_task_caches(request).await?.into_inner().deleted > 0)
        }
        _ => Ok(false),
    };
    answer.map(Some)
}
