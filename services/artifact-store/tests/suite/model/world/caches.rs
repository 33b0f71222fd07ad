//! Calls about caches.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use domain::ArtifactId;
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome as Answered;
use uuid::Uuid;

use super::{World, done};
use crate::model::operations::{Operation, User};
use crate::model::state::{
    CacheOutcome, Outcome, State, artifact_id, build_id, claim_id, task_cache_ttl, worker_id, workload_id,
};
use crate::{Answer, Callers, TEAM, digest};

fn user(user: User) -> pb::CacheUser {
    let user = match user {
        User::OfBuild(build) => pb::cache_user::User::BuildId(build_id(build).to_string()),
        User::OfWorkload(workload) => pb::cache_user::User::WorkloadId(workload_id(workload).to_string()),
    };
    pb::CacheUser { user: Some(user) }
}

fn team() -> String {
    TEAM.to_owned()
}

impl World {
    /// Applies one operation on caches.
    pub(super) async fn perform_on_caches(&self, state: &State, operation: &Operation) -> Outcome {
        use Operation as O;
        match *operation {
            O::AskCache { cache, claim, user: by } => {
                let answer = self.ask(|callers| ask_cache(callers, cache, claim, by)).await;
                answer.map_or_else(Outcome::Refused, |(cache, found)| Outcome::Asked { cache, found })
            }
            O::RenewClaim { claim } => {
                let request =
                    || pb::RenewResourceCacheRequest { team: team(), claim_id: claim_id(claim).to_string() };
                let renew = |callers: Callers| async move {
                    Ok(callers.caches().renew_resource_cache(request()).await.map(drop)?)
                };
                done(self.ask(renew).await)
            }
            O::PutCache { claim, artifact } => {
                let request = || pb::PutResourceCacheRequest {
                    team: team(),
                    claim_id: claim_id(claim).to_string(),
                    artifact_id: artifact_id(artifact).to_string(),
                };
                let put = |callers: Callers| async move {
                    Ok(callers.caches().put_resource_cache(request()).await.map(drop)?)
                };
                done(self.ask(put).await)
            }
            O::UseCache { cache, user: by } => {
                let Some(id) = state.resource_cache(cache) else { return Outcome::Skipped };
                let request = || pb::UseResourceCacheRequest {
                    team: team(),
                    cache_id: id.to_string(),
                    user: Some(user(by)),
                };
                let use_it = |callers: Callers| async move {
                    Ok(callers.caches().use_resource_cache(request()).await.map(drop)?)
                };
                done(self.ask(use_it).await)
            }
            O::ReleaseCache { cache, user: by } => {
                let Some(id) = state.resource_cache(cache) else { return Outcome::Skipped };
                let request = || pb::ReleaseResourceCacheRequest {
                    team: team(),
                    cache_id: id.to_string(),
                    user: Some(user(by)),
                };
                let release = |callers: Callers| async move {
                    Ok(callers.caches().release_resource_cache(request()).await.map(drop)?)
                };
                done(self.ask(release).await)
            }
            O::DeleteCache { cache } => {
                let Some(id) = state.resource_cache(cache) else { return Outcome::Skipped };
                let request = || pb::DeleteResourceCacheRequest { team: team(), cache_id: id.to_string() };
                let asked = AtomicUsize::new(0);
                let delete = |callers: Callers| {
                    asked.fetch_add(1, Ordering::Relaxed);
                    let request = request();
                    async move { Ok(callers.caches().delete_resource_cache(request).await.map(drop)?) }
                };
                match self.ask(delete).await {
                    // The first call had no answer, and deleted the cache.
                    Err(refusal)
                        if refusal.is(Reason::CacheNotFound) && asked.load(Ordering::Relaxed) > 1 =>
                    {
                        Outcome::Done
                    }
                    answer => done(answer),
                }
            }
            O::AskTask { task } => {
                let answer = self.ask(|callers| ask_task(callers, team(), task)).await;
                answer.map_or_else(Outcome::Refused, |(cache, artifact)| Outcome::Task { cache, artifact })
            }
            O::PublishTask { task, artifact } => {
                let Some(id) = state.task_cache(task) else { return Outcome::Skipped };
                let request = || pb::PublishTaskCacheRequest {
                    team: team(),
                    cache_id: id.to_string(),
                    artifact_id: artifact_id(artifact).to_string(),
                };
                let publish = |callers: Callers| async move {
                    Ok(callers.caches().publish_task_cache(request()).await.map(drop)?)
                };
                done(self.ask(publish).await)
            }
            O::DeleteTask { task } => {
                let Some(id) = state.task_cache(task) else { return Outcome::Skipped };
                let request = || pb::DeleteTaskCachesRequest {
                    team: team(),
                    cache_id: id.to_string(),
                    ..Default::default()
                };
                let delete = |callers: Callers| async move {
                    Ok(callers.caches().delete_task_caches(request()).await.map(drop)?)
                };
                done(self.ask(delete).await)
            }
            O::PutBase { worker, resource: Some(resource), artifact } => {
                let request = || pb::PutBaseResourceTypeRequest {
                    team: team(),
                    r#type: format!("type {resource}"),
                    version: "1".to_owned(),
                    worker_id: worker_id(worker).to_string(),
                    artifact_id: artifact_id(artifact).to_string(),
                };
                let put = |callers: Callers| async move {
                    Ok(callers.caches().put_base_resource_type(request()).await.map(drop)?)
                };
                done(self.ask(put).await)
            }
            O::PutBase { worker, resource: None, artifact } => {
                let request = || pb::PutResourceCertsRequest {
                    team: team(),
                    worker_id: worker_id(worker).to_string(),
                    artifact_id: artifact_id(artifact).to_string(),
                };
                let put = |callers: Callers| async move {
                    Ok(callers.caches().put_resource_certs(request()).await.map(drop)?)
                };
                done(self.ask(put).await)
            }
            O::UseTasks { workload, ref tasks } => {
                let caches = tasks.iter().map(|task| Some((*task, state.task_cache(*task)?)));
                let Some(caches) = caches.collect::<Option<Vec<_>>>() else { return Outcome::Skipped };
                let request = || pb::PinRequest {
                    holder_id: workload_id(workload).to_string(),
                    team: team(),
                    task_cache_ids: caches.iter().map(|(_, id)| id.to_string()).collect(),
                    ..Default::default()
                };
                let use_them = |callers: Callers| {
                    let request = request();
                    async move { Ok(callers.pins().pin(request).await.map(drop)?) }
                };
                let answer = self.ask(use_them).await;
                Outcome::Used { caches, answer }
            }
            _ => Outcome::Skipped,
        }
    }
}

async fn ask_cache(
    callers: Callers,
    cache: u8,
    claim: u16,
    by: Option<User>,
) -> Answer<(Uuid, CacheOutcome)> {
    let request = pb::FindOrCreateResourceCacheRequest {
        team: team(),
        key_digest: digest(cache.into()).as_bytes().to_vec().into(),
        claim_id: claim_id(claim).to_string(),
        user: by.map(user),
        ..Default::default()
    };
    let answer = callers.caches().find_or_create_resource_cache(request).await?.into_inner();
    let found = match answer.outcome.expect("an outcome") {
        Answered::Ready(location) => CacheOutcome::Ready(location.artifact_id.parse().expect("an id")),
        Answered::Claimed(_) => CacheOutcome::Claimed,
        Answered::InProgress(claim) => CacheOutcome::InProgress(claim.claim_id.parse().expect("an id")),
    };
    Ok((answer.cache_id.parse().expect("an id"), found))
}

pub(super) async fn ask_task(callers: Callers, team: String, task: u8) -> Answer<(Uuid, Option<ArtifactId>)> {
    let request = pb::FindOrCreateTaskCacheRequest {
        team,
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: format!("path {task}"),
        ttl: Some(rpc::duration(Duration::from_secs(task_cache_ttl(task).unsigned_abs()))),
    };
    let answer = callers.caches().find_or_create_task_cache(request).await?.into_inner();
    let artifact = answer.location.map(|location| location.artifact_id.parse().expect("an id"));
    Ok((answer.cache_id.parse().expect("an id"), artifact))
}
