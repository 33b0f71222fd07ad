//! Resource caches: lookup, claims, uses and deletion.

use std::time::Duration;

use domain::{ArtifactId, BuildId, CacheId, ClaimId, Digest, Timestamp, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr,
    EntityTrait, IntoActiveModel, QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::LocatedArtifact;
use crate::builds::{self, OwnerEnded};
use crate::caches::{HandOverError, hand_over, release_artifacts, with_bytes};
use crate::db::entity::{ALL_TEAMS, UserKind, cache_use, resource_cache};
use crate::db::ids;
use crate::holders::{self, HolderError};
use crate::marks::cache_uses;
use crate::marks::deletion_log::{self, LogEntry};
use crate::policy::retention::CacheEndReason;

/// User of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheUser {
    Build(BuildId),
    Workload(WorkloadId),
}

impl CacheUser {
    fn columns(self) -> (UserKind, Uuid) {
        match self {
            Self::Build(build) => (UserKind::Build, build.uuid()),
            Self::Workload(workload) => (UserKind::Workload, workload.uuid()),
        }
    }
}

/// A build or workload cannot use a cache.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UserError {
    #[error(transparent)]
    Build(#[from] OwnerEnded),
    #[error(transparent)]
    Workload(#[from] HolderError),
    #[error("workload {0} is already settled")]
    Settled(WorkloadId),
}

/// Locks a user that has not ended, so that it does not end before the caller commits.
async fn lock_user(
    txn: &DatabaseTransaction,
    user: CacheUser,
    team: &str,
    now: Timestamp,
) -> Result<(), UserError> {
    match user {
        CacheUser::Build(build) => {
            builds::lock_live(txn, build, team).await?;
        }
        CacheUser::Workload(workload) => {
            let holder = holders::lock(txn, workload, team, now).await?;
            if holder.settled_at.is_some() {
                return Err(UserError::Settled(workload));
            }
        }
    }
    Ok(())
}

/// Records that a locked user uses a locked cache.
async fn add_use(txn: &DatabaseTransaction, cache: Uuid, user: CacheUser) -> Result<(), DbErr> {
    let (user_kind, user_id) = user.columns();
    let row =
        cache_use::ActiveModel { cache_id: Set(cache), user_kind: Set(user_kind), user_id: Set(user_id) };
    cache_use::Entity::insert(row)
        .on_conflict_do_nothing_on([
            cache_use::Column::CacheId,
            cache_use::Column::UserKind,
            cache_use::Column::UserId,
        ])
        .exec_without_returning(txn)
        .await
        .map(drop)
}

/// Request for a cache.
#[derive(Debug, Clone)]
pub(crate) struct CacheRequest {
    pub(crate) team: String,
    /// Whether the cache is available to every team.
    pub(crate) shared: bool,
    pub(crate) key: Digest,
    pub(crate) claim: ClaimId,
    pub(crate) resource_type: String,
    pub(crate) version: String,
    pub(crate) params: String,
    pub(crate) user: Option<CacheUser>,
}

impl CacheRequest {
    fn scope(&self) -> &str {
        if self.shared { ALL_TEAMS } else { &self.team }
    }
}

/// Result of a request for a cache.
#[derive(Debug)]
pub(crate) enum CacheOutcome {
    /// The cache is ready.
    Ready(Box<LocatedArtifact>),
    /// The caller must make the artifact.
    Claimed,
    /// Another maker holds this claim.
    InProgress(ClaimId),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    #[error("claim {0} belongs to another cache")]
    ClaimTaken(ClaimId),
    #[error(transparent)]
    User(#[from] UserError),
    #[error("database failed while finding a resource cache")]
    Database(#[from] DbErr),
}

/// Finds a cache, or gives its claim to the caller. Of concurrent callers, one gets the claim.
pub(crate) async fn find_or_create(
    txn: &DatabaseTransaction,
    cache_request: &CacheRequest,
    now: Timestamp,
    term: Duration,
) -> Result<(CacheId, CacheOutcome), FindError> {
    if let Some(user) = cache_request.user {
        lock_user(txn, user, &cache_request.team, now).await?;
    }
    let row = lock(txn, cache_request, now, term).await?;
    let found = match with_bytes(txn, row.artifact_id).await? {
        Some(located) => {
            resource_cache::Entity::update_many()
                .col_expr(resource_cache::Column::LastUsed, Expr::value(now.0))
                .filter(resource_cache::Column::CacheId.eq(row.cache_id))
                .exec(txn)
                .await?;
            CacheOutcome::Ready(Box::new(located))
        }
        None => {
            let claim = ClaimId::from_uuid(row.claim_id);
            let goes_on = row.claimed_until.is_some_and(|until| until > now.0);
            if goes_on && claim != cache_request.claim {
                CacheOutcome::InProgress(claim)
            } else {
                take_claim(txn, &row, cache_request, now, term).await?;
                CacheOutcome::Claimed
            }
        }
    };
    if let Some(user) = cache_request.user {
        add_use(txn, row.cache_id, user).await?;
    }
    Ok((CacheId::from_uuid(row.cache_id), found))
}

/// Finds or creates the row of a cache, claimed by the caller, and locks it.
async fn lock(
    txn: &DatabaseTransaction,
    cache_request: &CacheRequest,
    now: Timestamp,
    term: Duration,
) -> Result<resource_cache::Model, FindError> {
    let claimed_until = (now + term).0;
    let fresh = resource_cache::Model {
        cache_id: CacheId::new().uuid(),
        scope: cache_request.scope().to_owned(),
        key_digest: cache_request.key.as_bytes().to_vec(),
        resource_type: cache_request.resource_type.clone(),
        version: cache_request.version.clone(),
        params: cache_request.params.clone(),
        team: cache_request.team.clone(),
        claim_id: cache_request.claim.uuid(),
        claimed_until: Some(claimed_until),
        artifact_id: None,
        last_used: now.0,
        created_at: now.0,
        due_at: claimed_until,
    };
    let by_claim = || {
        resource_cache::Entity::find().filter(resource_cache::Column::ClaimId.eq(cache_request.claim.uuid()))
    };
    let taken = |row: &resource_cache::Model| {
        row.scope != cache_request.scope() || row.key_digest != cache_request.key.as_bytes()
    };
    if by_claim().one(txn).await?.is_some_and(|row| taken(&row)) {
        return Err(FindError::ClaimTaken(cache_request.claim));
    }
    resource_cache::Entity::insert(fresh.into_active_model().reset_all())
        .on_conflict_do_nothing_on([resource_cache::Column::Scope, resource_cache::Column::KeyDigest])
        .exec_without_returning(txn)
        .await?;
    let row = resource_cache::Entity::find()
        .filter(resource_cache::Column::Scope.eq(cache_request.scope()))
        .filter(resource_cache::Column::KeyDigest.eq(cache_request.key.as_bytes()))
        .lock_exclusive()
        .one(txn)
        .await?;
    // The row may have been deleted meanwhile. The caller repeats the call and creates it.
    row.ok_or_else(|| DbErr::RecordNotFound("resource cache".to_owned()).into())
}

/// Gives the claim of a cache that is not ready to the caller. Its previous artifact has no bytes,
/// and the cache lets go of it.
async fn take_claim(
    txn: &DatabaseTransaction,
    row: &resource_cache::Model,
    cache_request: &CacheRequest,
    now: Timestamp,
    term: Duration,
) -> Result<(), DbErr> {
    if row.artifact_id.is_some() {
        release_artifacts(txn, row.artifact_id, now).await?;
    }
    let claimed_until = (now + term).0;
    resource_cache::Entity::update_many()
        .col_expr(resource_cache::Column::Team, Expr::value(&*cache_request.team))
        .col_expr(resource_cache::Column::ResourceType, Expr::value(&*cache_request.resource_type))
        .col_expr(resource_cache::Column::Version, Expr::value(&*cache_request.version))
        .col_expr(resource_cache::Column::Params, Expr::value(&*cache_request.params))
        .col_expr(resource_cache::Column::ClaimId, Expr::value(cache_request.claim.uuid()))
        .col_expr(resource_cache::Column::ClaimedUntil, Expr::value(claimed_until))
        .col_expr(resource_cache::Column::ArtifactId, Expr::value(None::<Uuid>))
        .col_expr(resource_cache::Column::DueAt, Expr::value(claimed_until))
        .filter(resource_cache::Column::CacheId.eq(row.cache_id))
        .exec(txn)
        .await
        .map(drop)
}

/// A claim is not valid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("claim {0} is lost")]
    Lost(ClaimId),
    #[error(transparent)]
    Artifact(#[from] HandOverError),
    #[error("database failed while reading a claim")]
    Database(#[from] DbErr),
}

/// Locks and returns the cache that is or was made under a claim of `team`.
async fn lock_claimed(
    txn: &DatabaseTransaction,
    team: &str,
    claim: ClaimId,
) -> Result<resource_cache::Model, ClaimError> {
    let row = resource_cache::Entity::find()
        .filter(resource_cache::Column::ClaimId.eq(claim.uuid()))
        .filter(resource_cache::Column::Team.eq(team))
        .lock_exclusive()
        .one(txn)
        .await?;
    row.ok_or(ClaimError::Lost(claim))
}

/// Returns whether the maker of a cache may still put an artifact.
fn is_being_made(row: &resource_cache::Model, now: Timestamp) -> bool {
    row.artifact_id.is_none() && row.claimed_until.is_some_and(|until| until > now.0)
}

/// Renews a claim. A claim whose cache is ready needs no renewal.
pub(crate) async fn renew(
    txn: &DatabaseTransaction,
    team: &str,
    claim: ClaimId,
    now: Timestamp,
    term: Duration,
) -> Result<(), ClaimError> {
    let row = lock_claimed(txn, team, claim).await?;
    match row.claimed_until {
        None => Ok(()),
        Some(until) if until <= now.0 => Err(ClaimError::Lost(claim)),
        Some(_) => {
            resource_cache::Entity::update_many()
                .col_expr(resource_cache::Column::ClaimedUntil, Expr::value((now + term).0))
                .filter(resource_cache::Column::CacheId.eq(row.cache_id))
                .exec(txn)
                .await?;
            Ok(())
        }
    }
}

/// Makes a cache ready, under a valid claim.
pub(crate) async fn put(
    txn: &DatabaseTransaction,
    team: &str,
    claim: ClaimId,
    id: ArtifactId,
    now: Timestamp,
    ttl: Duration,
) -> Result<CacheId, ClaimError> {
    let row = lock_claimed(txn, team, claim).await?;
    let cache = CacheId::from_uuid(row.cache_id);
    if row.artifact_id == Some(id.uuid()) {
        return Ok(cache);
    }
    if !is_being_made(&row, now) {
        return Err(ClaimError::Lost(claim));
    }
    hand_over(txn, team, id, None, now).await?;
    make_ready(txn, row.cache_id, id, now, ttl).await?;
    Ok(cache)
}

/// Locks and returns the cache that is being made under a valid claim of `team`.
pub(super) async fn lock_being_made(
    txn: &DatabaseTransaction,
    team: &str,
    claim: ClaimId,
    now: Timestamp,
) -> Result<Option<resource_cache::Model>, DbErr> {
    match lock_claimed(txn, team, claim).await {
        Ok(row) => Ok(Some(row).filter(|row| is_being_made(row, now))),
        Err(ClaimError::Lost(_) | ClaimError::Artifact(HandOverError::NotSealed(_))) => Ok(None),
        Err(ClaimError::Database(error) | ClaimError::Artifact(HandOverError::Database(error))) => Err(error),
    }
}

/// Makes a locked cache ready that is being made.
pub(super) async fn make_ready(
    txn: &DatabaseTransaction,
    cache: Uuid,
    artifact: ArtifactId,
    now: Timestamp,
    ttl: Duration,
) -> Result<(), DbErr> {
    resource_cache::Entity::update_many()
        .col_expr(resource_cache::Column::ArtifactId, Expr::value(artifact.uuid()))
        .col_expr(resource_cache::Column::ClaimedUntil, Expr::value(None::<i64>))
        .col_expr(resource_cache::Column::LastUsed, Expr::value(now.0))
        .col_expr(resource_cache::Column::DueAt, Expr::value((now + ttl).0))
        .filter(resource_cache::Column::CacheId.eq(cache))
        .exec(txn)
        .await
        .map(drop)
}

/// A cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UseError {
    #[error("resource cache {0} is not available to this team")]
    NotFound(CacheId),
    #[error(transparent)]
    User(#[from] UserError),
    #[error("database failed while using a resource cache")]
    Database(#[from] DbErr),
}

/// Locks a cache that is available to `team`.
async fn lock_for(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
) -> Result<Option<resource_cache::Model>, DbErr> {
    resource_cache::Entity::find_by_id(cache.uuid())
        .filter(resource_cache::Column::Scope.is_in([team, ALL_TEAMS]))
        .lock_exclusive()
        .one(txn)
        .await
}

/// Records that a user uses a cache.
pub(crate) async fn use_cache(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
    user: CacheUser,
    now: Timestamp,
) -> Result<(), UseError> {
    lock_user(txn, user, team, now).await?;
    let row = lock_for(txn, team, cache).await?.ok_or(UseError::NotFound(cache))?;
    add_use(txn, row.cache_id, user).await?;
    touch(txn, row.cache_id, now).await?;
    Ok(())
}

/// Ends a use of a cache.
pub(crate) async fn release(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
    user: CacheUser,
    now: Timestamp,
) -> Result<(), DbErr> {
    let Some(row) = lock_for(txn, team, cache).await? else { return Ok(()) };
    let (user_kind, user_id) = user.columns();
    let gone = cache_use::Entity::delete_by_id((row.cache_id, user_kind, user_id)).exec(txn).await?;
    if gone.rows_affected > 0 {
        touch(txn, row.cache_id, now).await?;
    }
    Ok(())
}

async fn touch(txn: &DatabaseTransaction, cache: Uuid, now: Timestamp) -> Result<(), DbErr> {
    resource_cache::Entity::update_many()
        .col_expr(resource_cache::Column::LastUsed, Expr::value(now.0))
        .filter(resource_cache::Column::CacheId.eq(cache))
        .exec(txn)
        .await
        .map(drop)
}

/// A cache cannot be deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteError {
    #[error("no resource cache {0} made by this team")]
    NotFound(CacheId),
    #[error("cannot delete resource cache {0}: a build or workload uses it")]
    InUse(CacheId),
    #[error("database failed while deleting a resource cache")]
    Database(#[from] DbErr),
}

/// Deletes a cache that `team` made and that is neither used nor being made.
pub(crate) async fn delete(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
    why: CacheEndReason,
    now: Timestamp,
    tombstone: Duration,
) -> Result<(), DeleteError> {
    let row = resource_cache::Entity::find_by_id(cache.uuid())
        .filter(resource_cache::Column::Team.eq(team))
        .lock_exclusive()
        .one(txn)
        .await?
        .ok_or(DeleteError::NotFound(cache))?;
    let uses = cache_uses::uses(txn, &[row.cache_id], now).await?;
    if uses.values().any(|uses| uses.used) {
        return Err(DeleteError::InUse(cache));
    }
    release_artifacts(txn, row.artifact_id, now).await?;
    remove(txn, &[row.cache_id]).await?;
    deletion_log::append(txn, &[LogEntry::of_resource_cache(&row, why)], now, tombstone).await?;
    Ok(())
}

/// Deletes the rows of locked caches.
pub(crate) async fn remove(txn: &DatabaseTransaction, caches: &[Uuid]) -> Result<(), DbErr> {
    let those = || ids::among(txn.get_database_backend(), "cache_id", caches.iter().copied());
    cache_use::Entity::delete_many().filter(those()).exec(txn).await?;
    resource_cache::Entity::delete_many().filter(those()).exec(txn).await.map(drop)
}

/// Extends all claims to at least `now + term`, because their makers may have been unable to renew
/// them.
pub(crate) async fn extend_terms(
    txn: &DatabaseTransaction,
    now: Timestamp,
    term: Duration,
) -> Result<(), DbErr> {
    resource_cache::Entity::update_many()
        .col_expr(resource_cache::Column::ClaimedUntil, Expr::value((now + term).0))
        .filter(resource_cache::Column::ClaimedUntil.lt((now + term).0))
        .exec(txn)
        .await
        .map(drop)
}

/// Returns a page of the caches that are available to `team`, oldest first.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    team: &str,
    page: rpc::page::Page,
) -> Result<Vec<resource_cache::Model>, DbErr> {
    resource_cache::Entity::find()
        .filter(resource_cache::Column::Scope.is_in([team, ALL_TEAMS]))
        .filter(resource_cache::Column::CacheId.gt(page.after.unwrap_or_default()))
        .order_by_asc(resource_cache::Column::CacheId)
        .limit(page.size)
        .all(conn)
        .await
}
