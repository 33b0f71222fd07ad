//! Handlers of `gantry.artifacts.v1.Caches`.

use std::time::Duration;

use domain::Timestamp;
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::{Handlers, MAX_ARTIFACTS, SERVICE, errors, location};
use crate::caches;
use crate::caches::base_types::{self, BaseType};
use crate::caches::resource_caches::{self, CacheOutcome, CacheRequest, CacheUser};
use crate::caches::task_caches::{self, TaskCacheFilter, TaskCacheKey};
use crate::db::entity::{ALL_TEAMS, base_resource_type, resource_cache, task_cache};
use crate::policy::retention::CacheEndReason;

/// Maximum length of the name of a job, step or type, in bytes.
pub(super) const MAX_NAME: usize = 1024;

/// Maximum length of a path, in bytes.
pub(super) const MAX_PATH: usize = 4096;

/// Maximum length of a text for people, in bytes.
pub(super) const MAX_TEXT: usize = 65536;

/// Maximum TTL of a task cache: ten years.
const MAX_TTL: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

#[tonic::async_trait]
impl pb::caches_server::Caches for Handlers {
    async fn find_or_create_resource_cache(
        &self,
        request: Request<pb::FindOrCreateResourceCacheRequest>,
    ) -> Result<Response<pb::FindOrCreateResourceCacheResponse>, Status> {
        use pb::find_or_create_resource_cache_response::Outcome;
        let request = request.into_inner();
        let cache_request = &CacheRequest {
            team: rpc::parse_team("team", request.team)?,
            shared: parse_sharing(request.sharing)?,
            key: rpc::parse_digest("key_digest", &request.key_digest)?,
            claim: rpc::parse_id("claim_id", &request.claim_id)?,
            resource_type: limited_text("type", request.r#type, MAX_NAME)?,
            version: limited_text("version", request.version, MAX_TEXT)?,
            params: limited_text("params", request.params, MAX_TEXT)?,
            user: request.user.map(parse_user).transpose()?,
        };
        let (now, term) = (self.store.now(), self.store.config.claim_term);

        let (cache, found) = self
            .store
            .db
            .write(|txn| async move { resource_caches::find_or_create(&txn, cache_request, now, term).await })
            .await?;

        let claim = |claim: domain::ClaimId| pb::ResourceCacheClaim {
            claim_id: claim.to_string(),
            term: Some(rpc::duration(term)),
        };
        let outcome = match found {
            CacheOutcome::Ready(located) => Outcome::Ready(location(*located)),
            CacheOutcome::Claimed => Outcome::Claimed(claim(cache_request.claim)),
            CacheOutcome::InProgress(by) => Outcome::InProgress(claim(by)),
        };
        Ok(Response::new(pb::FindOrCreateResourceCacheResponse {
            cache_id: cache.to_string(),
            outcome: Some(outcome),
        }))
    }

    async fn renew_resource_cache(
        &self,
        request: Request<pb::RenewResourceCacheRequest>,
    ) -> Result<Response<pb::RenewResourceCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let claim = rpc::parse_id("claim_id", &request.claim_id)?;
        let (now, term) = (self.store.now(), self.store.config.claim_term);

        self.store
            .db
            .write(|txn| async move { resource_caches::renew(&txn, team, claim, now, term).await })
            .await?;

        Ok(Response::new(pb::RenewResourceCacheResponse {}))
    }

    async fn put_resource_cache(
        &self,
        request: Request<pb::PutResourceCacheRequest>,
    ) -> Result<Response<pb::PutResourceCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let claim = rpc::parse_id("claim_id", &request.claim_id)?;
        let artifact = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let (now, ttl) = (self.store.now(), self.store.config.resource_cache_ttl);

        let cache = self
            .store
            .db
            .write(|txn| async move { resource_caches::put(&txn, team, claim, artifact, now, ttl).await })
            .await?;

        Ok(Response::new(pb::PutResourceCacheResponse { cache_id: cache.to_string() }))
    }

    async fn use_resource_cache(
        &self,
        request: Request<pb::UseResourceCacheRequest>,
    ) -> Result<Response<pb::UseResourceCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let cache = rpc::parse_id("cache_id", &request.cache_id)?;
        let user = parse_user(request.user.unwrap_or_default())?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { resource_caches::use_cache(&txn, team, cache, user, now).await })
            .await?;

        Ok(Response::new(pb::UseResourceCacheResponse {}))
    }

    async fn release_resource_cache(
        &self,
        request: Request<pb::ReleaseResourceCacheRequest>,
    ) -> Result<Response<pb::ReleaseResourceCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let cache = rpc::parse_id("cache_id", &request.cache_id)?;
        let user = parse_user(request.user.unwrap_or_default())?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { resource_caches::release(&txn, team, cache, user, now).await })
            .await
            .map_err(|error| errors::database("release a resource cache", &error))?;

        Ok(Response::new(pb::ReleaseResourceCacheResponse {}))
    }

    async fn delete_resource_cache(
        &self,
        request: Request<pb::DeleteResourceCacheRequest>,
    ) -> Result<Response<pb::DeleteResourceCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let cache = rpc::parse_id("cache_id", &request.cache_id)?;
        let now = self.store.now();

        let tombstone = self.store.config.tombstone;

        self.store
            .db
            .write(|txn| async move {
                resource_caches::delete(&txn, team, cache, CacheEndReason::Deleted, now, tombstone).await
            })
            .await?;

        Ok(Response::new(pb::DeleteResourceCacheResponse {}))
    }

    async fn list_resource_caches(
        &self,
        request: Request<pb::ListResourceCachesRequest>,
    ) -> Result<Response<pb::ListResourceCachesResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team.clone())?;
        let page = Page::of(SERVICE, &request)?;

        let rows = resource_caches::list(self.store.db.read(), team, page)
            .await
            .map_err(|error| errors::database("list resource caches", &error))?;

        let found = rows.into_iter().map(|row| (row.cache_id, resource_cache(row))).collect();
        let (caches, next_page_token) = super::end_page(page, found);
        Ok(Response::new(pb::ListResourceCachesResponse { caches, next_page_token }))
    }

    async fn find_or_create_task_cache(
        &self,
        request: Request<pb::FindOrCreateTaskCacheRequest>,
    ) -> Result<Response<pb::FindOrCreateTaskCacheResponse>, Status> {
        let request = request.into_inner();
        let key = &TaskCacheKey {
            team: rpc::parse_team("team", request.team)?,
            job: required_text("job", request.job, MAX_NAME)?,
            step: required_text("step", request.step, MAX_NAME)?,
            path: required_text("path", request.path, MAX_PATH)?,
        };
        let ttl = match rpc::parse_duration("ttl", request.ttl)?.unwrap_or(self.store.config.task_cache_ttl) {
            Duration::ZERO => return Err(rpc::invalid_field("ttl", "must not be zero")),
            ttl if ttl > MAX_TTL => return Err(rpc::invalid_field("ttl", "must be at most ten years")),
            ttl => ttl,
        };
        let now = self.store.now();

        let (cache, located) = self
            .store
            .db
            .write(|txn| async move { task_caches::find_or_create(&txn, key, ttl, now).await })
            .await
            .map_err(|error| errors::database("find a task cache", &error))?;

        Ok(Response::new(pb::FindOrCreateTaskCacheResponse {
            cache_id: cache.to_string(),
            location: located.map(location),
        }))
    }

    async fn publish_task_cache(
        &self,
        request: Request<pb::PublishTaskCacheRequest>,
    ) -> Result<Response<pb::PublishTaskCacheResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let cache = rpc::parse_id("cache_id", &request.cache_id)?;
        let artifact = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { task_caches::publish(&txn, team, cache, artifact, now).await })
            .await?;

        Ok(Response::new(pb::PublishTaskCacheResponse {}))
    }

    async fn delete_task_caches(
        &self,
        request: Request<pb::DeleteTaskCachesRequest>,
    ) -> Result<Response<pb::DeleteTaskCachesResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let some = |text: String| Some(text).filter(|text| !text.is_empty());
        let which = &match rpc::parse_optional_id("cache_id", &request.cache_id)? {
            Some(cache) => TaskCacheFilter::Cache(cache),
            None => TaskCacheFilter::Job {
                job: required_text("job", request.job, MAX_NAME)?,
                step: some(limited_text("step", request.step, MAX_NAME)?),
                path: some(limited_text("path", request.path, MAX_PATH)?),
            },
        };
        let now = self.store.now();

        let mut deleted = 0;
        let tombstone = self.store.config.tombstone;
        loop {
            let batch = self
                .store
                .db
                .write(|txn| async move {
                    task_caches::delete(&txn, team, which, CacheEndReason::Deleted, now, tombstone).await
                })
                .await
                .map_err(|error| errors::database("delete task caches", &error))?;
            deleted += batch;
            if batch < task_caches::BATCH {
                break;
            }
        }

        Ok(Response::new(pb::DeleteTaskCachesResponse { deleted }))
    }

    async fn list_task_caches(
        &self,
        request: Request<pb::ListTaskCachesRequest>,
    ) -> Result<Response<pb::ListTaskCachesResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team.clone())?;
        let job = limited_text("job", request.job.clone(), MAX_NAME)?;
        let page = Page::of(SERVICE, &request)?;
        let job = Some(&*job).filter(|job| !job.is_empty());

        let rows = task_caches::list(self.store.db.read(), team, job, page)
            .await
            .map_err(|error| errors::database("list task caches", &error))?;

        let found = rows.into_iter().map(|row| (row.cache_id, task_cache(row))).collect();
        let (caches, next_page_token) = super::end_page(page, found);
        Ok(Response::new(pb::ListTaskCachesResponse { caches, next_page_token }))
    }

    async fn locate_caches(
        &self,
        request: Request<pb::LocateCachesRequest>,
    ) -> Result<Response<pb::LocateCachesResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        if request.cache_ids.len() > MAX_ARTIFACTS {
            return Err(rpc::invalid_field("cache_ids", format!("must be at most {MAX_ARTIFACTS}")));
        }
        let ids: Vec<_> = request
            .cache_ids
            .iter()
            .map(|id| rpc::parse_id("cache_ids", id))
            .collect::<Result<_, Status>>()?;

        let located = caches::locate(self.store.db.read(), team, &ids)
            .await
            .map_err(|error| errors::database("locate caches", &error))?;

        let locations = located.located.into_iter().map(|(cache, located)| pb::CacheLocation {
            cache_id: cache.to_string(),
            location: Some(location(located)),
        });
        Ok(Response::new(pb::LocateCachesResponse {
            locations: locations.collect(),
            unknown_cache_ids: located.unknown.iter().map(ToString::to_string).collect(),
        }))
    }

    async fn put_base_resource_type(
        &self,
        request: Request<pb::PutBaseResourceTypeRequest>,
    ) -> Result<Response<pb::PutBaseResourceTypeResponse>, Status> {
        let request = request.into_inner();
        let new = &BaseType {
            team: rpc::parse_team("team", request.team)?,
            resource_type: required_text("type", request.r#type, MAX_NAME)?,
            version: limited_text("version", request.version, MAX_TEXT)?,
            worker: rpc::parse_optional_id("worker_id", &request.worker_id)?,
            artifact: rpc::parse_id("artifact_id", &request.artifact_id)?,
        };
        let now = self.store.now();

        self.store.db.write(|txn| async move { base_types::put_type(&txn, new, now).await }).await?;

        Ok(Response::new(pb::PutBaseResourceTypeResponse {}))
    }

    async fn list_base_resource_types(
        &self,
        request: Request<pb::ListBaseResourceTypesRequest>,
    ) -> Result<Response<pb::ListBaseResourceTypesResponse>, Status> {
        let request = request.into_inner();
        let resource_type = limited_text("type", request.r#type.clone(), MAX_NAME)?;
        let which = base_types::TypeFilter {
            resource_type: Some(resource_type).filter(|name| !name.is_empty()),
            cluster_wide: request.cluster_wide,
        };
        let page = Page::of(SERVICE, &request)?;

        let rows = base_types::list_types(self.store.db.read(), which, page)
            .await
            .map_err(|error| errors::database("list base resource types", &error))?;

        let found = rows.into_iter().map(|row| (row.base_type_id, base_resource_type(row))).collect();
        let (types, next_page_token) = super::end_page(page, found);
        Ok(Response::new(pb::ListBaseResourceTypesResponse { types, next_page_token }))
    }

    async fn put_resource_certs(
        &self,
        request: Request<pb::PutResourceCertsRequest>,
    ) -> Result<Response<pb::PutResourceCertsResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let worker = rpc::parse_id("worker_id", &request.worker_id)?;
        let artifact = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { base_types::put_certs(&txn, team, worker, artifact, now).await })
            .await?;

        Ok(Response::new(pb::PutResourceCertsResponse {}))
    }

    async fn list_resource_certs(
        &self,
        request: Request<pb::ListResourceCertsRequest>,
    ) -> Result<Response<pb::ListResourceCertsResponse>, Status> {
        let request = request.into_inner();
        let page = Page::of(SERVICE, &request)?;

        let rows = base_types::list_certs(self.store.db.read(), page)
            .await
            .map_err(|error| errors::database("list the certificates of workers", &error))?;

        let certs = rows.into_iter().map(|row| {
            let certs = pb::ResourceCerts {
                worker_id: row.worker_id.to_string(),
                artifact_id: row.artifact_id.to_string(),
            };
            (row.worker_id, certs)
        });
        let (certs, next_page_token) = super::end_page(page, certs.collect());
        Ok(Response::new(pb::ListResourceCertsResponse { certs, next_page_token }))
    }
}

pub(super) fn limited_text(field: &str, text: String, bytes: usize) -> Result<String, Status> {
    if text.len() > bytes {
        return Err(rpc::invalid_field(field, format!("must be at most {bytes} bytes")));
    }
    // PostgreSQL rejects texts with NUL.
    if text.contains('\0') {
        return Err(rpc::invalid_field(field, "must not contain NUL"));
    }
    Ok(text)
}

pub(super) fn required_text(field: &str, name: String, bytes: usize) -> Result<String, Status> {
    if name.is_empty() {
        return Err(rpc::invalid_field(field, "is required"));
    }
    limited_text(field, name, bytes)
}

fn parse_sharing(sharing: i32) -> Result<bool, Status> {
    match pb::Sharing::try_from(sharing) {
        Ok(pb::Sharing::Unspecified) => Ok(false),
        Ok(pb::Sharing::AllTeams) => Ok(true),
        Err(_) => Err(rpc::invalid_field("sharing", format!("{sharing} is not a value of this enum"))),
    }
}

fn parse_user(user: pb::CacheUser) -> Result<CacheUser, Status> {
    use pb::cache_user::User as Named;
    match user.user {
        Some(Named::BuildId(id)) => Ok(CacheUser::Build(rpc::parse_id("user.build_id", &id)?)),
        Some(Named::WorkloadId(id)) => Ok(CacheUser::Workload(rpc::parse_id("user.workload_id", &id)?)),
        None => Err(rpc::invalid_field("user", "is required")),
    }
}

fn resource_cache(row: resource_cache::Model) -> pb::ResourceCache {
    let shared = row.scope == ALL_TEAMS;
    let sharing = if shared { pb::Sharing::AllTeams } else { pb::Sharing::Unspecified };
    pb::ResourceCache {
        cache_id: row.cache_id.to_string(),
        team: row.team,
        sharing: sharing.into(),
        key_digest: row.key_digest.into(),
        r#type: row.resource_type,
        version: row.version,
        params: row.params,
        artifact_id: text(row.artifact_id),
        claim_id: row.claim_id.to_string(),
        last_used_at: Some(rpc::timestamp(Timestamp(row.last_used))),
    }
}

fn task_cache(row: task_cache::Model) -> pb::TaskCache {
    let ttl = Duration::from_micros(u64::try_from(row.ttl).unwrap_or(0));
    pb::TaskCache {
        cache_id: row.cache_id.to_string(),
        team: row.team,
        job: row.job,
        step: row.step,
        path: row.path,
        artifact_id: text(row.artifact_id),
        last_used_at: Some(rpc::timestamp(Timestamp(row.last_used))),
        ttl: Some(rpc::duration(ttl)),
    }
}

fn base_resource_type(row: base_resource_type::Model) -> pb::BaseResourceType {
    pb::BaseResourceType {
        base_type_id: row.base_type_id.to_string(),
        r#type: row.resource_type,
        version: row.version,
        worker_id: text(row.worker_id),
        artifact_id: row.artifact_id.to_string(),
    }
}

/// Returns the text of an optional id.
fn text(id: Option<Uuid>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}
