//! Task caches: lookup, uses by workloads, publication of versions, and deletion.
//!
//! A workload uses its mounted caches from when it is pinned until it is settled. Its version of a
//! cache is chosen when it is prepared ([`latest`]). The volume that starts with the version keeps
//! it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use domain::{ArtifactId, CacheId, Timestamp, WorkloadId};
use sea_orm::sea_query::{Expr, OnConflict};
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr,
    EntityTrait, IntoActiveModel, QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::{self, LocatedArtifact};
use crate::caches::{HandOverError, hand_over, release_artifacts, with_bytes};
use crate::db::entity::{ArtifactState, artifact, task_cache, task_cache_use};
use crate::db::ids;
use crate::db::units::micros;
use crate::marks::deletion_log::{self, LogEntry};
use crate::policy::retention::CacheEndReason;

/// Maximum number of caches deleted in one transaction.
pub(crate) const BATCH: u64 = 500;

/// Key of a task cache.
#[derive(Debug, Clone)]
pub(crate) struct TaskCacheKey {
    pub(crate) team: String,
    pub(crate) job: String,
    pub(crate) step: String,
    pub(crate) path: String,
}

/// Finds or creates a cache, which counts as a use, and returns its artifact if the bytes exist.
pub(crate) async fn find_or_create(
    txn: &DatabaseTransaction,
    key: &TaskCacheKey,
    ttl: Duration,
    now: Timestamp,
) -> Result<(CacheId, Option<LocatedArtifact>), DbErr> {
    let fresh = task_cache::Model {
        cache_id: CacheId::new().uuid(),
        team: key.team.clone(),
        job: key.job.clone(),
        step: key.step.clone(),
        path: key.path.clone(),
        artifact_id: None,
        ttl: micros(ttl),
        last_used: now.0,
        created_at: now.0,
        due_at: (now + ttl).0,
    };
    let of_key = [
        task_cache::Column::Team,
        task_cache::Column::Job,
        task_cache::Column::Step,
        task_cache::Column::Path,
    ];
    let used = [task_cache::Column::Ttl, task_cache::Column::LastUsed, task_cache::Column::DueAt];
    let row = task_cache::Entity::insert(fresh.into_active_model().reset_all())
        .on_conflict(OnConflict::columns(of_key).update_columns(used).to_owned())
        .exec_with_returning(txn)
        .await?;
    let located = with_bytes(txn, row.artifact_id).await?;
    Ok((CacheId::from_uuid(row.cache_id), located))
}

/// A version cannot be published.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    #[error("no task cache {0} in this team")]
    NotFound(CacheId),
    #[error(transparent)]
    Artifact(#[from] HandOverError),
    #[error("database failed while publishing a task cache")]
    Database(#[from] DbErr),
}

/// Publishes the next version of a cache, which lets go of the previous one.
pub(crate) async fn publish(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
    artifact: ArtifactId,
    now: Timestamp,
) -> Result<(), PublishError> {
    let row = lock(txn, team, cache).await?.ok_or(PublishError::NotFound(cache))?;
    hand_over(txn, team, artifact, row.artifact_id, now).await?;
    set_version(txn, cache, artifact, now).await?;
    Ok(())
}

/// Locks and returns a cache of `team`.
pub(super) async fn lock(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
) -> Result<Option<task_cache::Model>, DbErr> {
    task_cache::Entity::find_by_id(cache.uuid())
        .filter(task_cache::Column::Team.eq(team))
        .lock_exclusive()
        .one(txn)
        .await
}

/// Sets the version of a locked cache.
pub(super) async fn set_version(
    txn: &DatabaseTransaction,
    cache: CacheId,
    artifact: ArtifactId,
    now: Timestamp,
) -> Result<(), DbErr> {
    task_cache::Entity::update_many()
        .col_expr(task_cache::Column::ArtifactId, Expr::value(artifact.uuid()))
        .col_expr(task_cache::Column::LastUsed, Expr::value(now.0))
        .filter(task_cache::Column::CacheId.eq(cache.uuid()))
        .exec(txn)
        .await
        .map(drop)
}

/// Locks and returns caches of `team`, in the order of their ids.
pub(super) async fn lock_all(
    txn: &DatabaseTransaction,
    team: &str,
    caches: BTreeSet<Uuid>,
) -> Result<BTreeMap<Uuid, task_cache::Model>, DbErr> {
    if caches.is_empty() {
        return Ok(BTreeMap::new());
    }
    let rows = task_cache::Entity::find()
        .filter(task_cache::Column::CacheId.is_in(caches))
        .filter(task_cache::Column::Team.eq(team))
        .order_by_asc(task_cache::Column::CacheId)
        .lock_exclusive()
        .all(txn)
        .await?;
    Ok(rows.into_iter().map(|row| (row.cache_id, row)).collect())
}

/// A cache cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UseError {
    #[error("no task cache {0} in this team")]
    NotFound(CacheId),
    #[error("database failed while using a task cache")]
    Database(#[from] DbErr),
}

/// Records that a workload, whose holder is locked, uses caches, all or none. Returns the locations
/// of their latest versions.
pub(crate) async fn use_caches(
    txn: &DatabaseTransaction,
    team: &str,
    holder: WorkloadId,
    caches: &[CacheId],
    now: Timestamp,
) -> Result<Vec<LocatedArtifact>, UseError> {
    if caches.is_empty() {
        return Ok(Vec::new());
    }
    let rows = lock_all(txn, team, caches.iter().map(|cache| cache.uuid()).collect()).await?;
    if let Some(unknown) = caches.iter().find(|cache| !rows.contains_key(&cache.uuid())) {
        return Err(UseError::NotFound(*unknown));
    }
    let uses = rows
        .keys()
        .map(|cache| task_cache_use::ActiveModel { cache_id: Set(*cache), holder_id: Set(holder.uuid()) });
    task_cache_use::Entity::insert_many(uses)
        .on_conflict_do_nothing_on([task_cache_use::Column::CacheId, task_cache_use::Column::HolderId])
        .exec_without_returning(txn)
        .await?;
    touch(txn, rows.keys().copied(), now).await?;
    let versions = rows.values().filter_map(|row| row.artifact_id);
    Ok(sealed_with_bytes(txn, versions).await?)
}

/// Returns the artifacts that are sealed and whose bytes exist.
async fn sealed_with_bytes(
    txn: &DatabaseTransaction,
    artifacts: impl Iterator<Item = Uuid>,
) -> Result<Vec<LocatedArtifact>, DbErr> {
    let artifacts: Vec<_> = artifacts.collect();
    if artifacts.is_empty() {
        return Ok(Vec::new());
    }
    let rows = artifact::Entity::find()
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .filter(artifact::Column::State.eq(ArtifactState::Sealed))
        .all(txn)
        .await?;
    let located = artifacts::locate_rows(txn, rows).await?;
    Ok(located.into_iter().filter(LocatedArtifact::has_bytes).collect())
}

async fn touch(
    txn: &DatabaseTransaction,
    caches: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    task_cache::Entity::update_many()
        .col_expr(task_cache::Column::LastUsed, Expr::value(now.0))
        .filter(task_cache::Column::CacheId.is_in(caches))
        .exec(txn)
        .await
        .map(drop)
}

/// Returns the caches that a workload uses.
pub(crate) async fn used_by(txn: &DatabaseTransaction, holder: WorkloadId) -> Result<Vec<Uuid>, DbErr> {
    task_cache_use::Entity::find()
        .select_only()
        .column(task_cache_use::Column::CacheId)
        .filter(task_cache_use::Column::HolderId.eq(holder.uuid()))
        .into_tuple()
        .all(txn)
        .await
}

/// Ends the uses of a workload. The caller has locked the caches.
pub(super) async fn end_uses(
    txn: &DatabaseTransaction,
    holder: WorkloadId,
    caches: &[Uuid],
    now: Timestamp,
) -> Result<(), DbErr> {
    if caches.is_empty() {
        return Ok(());
    }
    touch(txn, caches.iter().copied(), now).await?;
    task_cache_use::Entity::delete_many()
        .filter(task_cache_use::Column::HolderId.eq(holder.uuid()))
        .exec(txn)
        .await
        .map(drop)
}

/// Returns the caches that workloads use, among `caches`.
pub(crate) async fn in_use(conn: &impl ConnectionTrait, caches: &[Uuid]) -> Result<HashSet<Uuid>, DbErr> {
    if caches.is_empty() {
        return Ok(HashSet::new());
    }
    let used: Vec<Uuid> = task_cache_use::Entity::find()
        .select_only()
        .column(task_cache_use::Column::CacheId)
        .distinct()
        .filter(ids::among(conn.get_database_backend(), "cache_id", caches.iter().copied()))
        .into_tuple()
        .all(conn)
        .await?;
    Ok(used.into_iter().collect())
}

/// Returns the latest versions of caches of `team` whose bytes exist. The versions do not change
/// before the caller commits.
pub(crate) async fn latest(
    txn: &DatabaseTransaction,
    team: &str,
    caches: &[CacheId],
) -> Result<HashMap<CacheId, ArtifactId>, DbErr> {
    if caches.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = task_cache::Entity::find()
        .filter(task_cache::Column::CacheId.is_in(caches.iter().map(|cache| cache.uuid())))
        .filter(task_cache::Column::Team.eq(team))
        .order_by_asc(task_cache::Column::CacheId)
        .lock_shared()
        .all(txn)
        .await?;
    let located = sealed_with_bytes(txn, rows.iter().filter_map(|row| row.artifact_id)).await?;
    let there: HashSet<_> = located.iter().map(|located| located.artifact.artifact_id).collect();
    let version = |row: &task_cache::Model| {
        let version = row.artifact_id.filter(|version| there.contains(version))?;
        Some((CacheId::from_uuid(row.cache_id), ArtifactId::from_uuid(version)))
    };
    Ok(rows.iter().filter_map(version).collect())
}

/// Filter of task caches of a team.
#[derive(Debug, Clone)]
pub(crate) enum TaskCacheFilter {
    Cache(CacheId),
    /// All caches of a job, or of one step, or of one path.
    Job {
        job: String,
        step: Option<String>,
        path: Option<String>,
    },
}

/// Deletes at most [`BATCH`] caches, and returns their number.
pub(crate) async fn delete(
    txn: &DatabaseTransaction,
    team: &str,
    which: &TaskCacheFilter,
    why: CacheEndReason,
    now: Timestamp,
    tombstone: Duration,
) -> Result<u64, DbErr> {
    let mut query = task_cache::Entity::find().filter(task_cache::Column::Team.eq(team));
    query = match which {
        TaskCacheFilter::Cache(cache) => query.filter(task_cache::Column::CacheId.eq(cache.uuid())),
        TaskCacheFilter::Job { job, step, path } => {
            query = query.filter(task_cache::Column::Job.eq(&**job));
            if let Some(step) = step {
                query = query.filter(task_cache::Column::Step.eq(&**step));
            }
            if let Some(path) = path {
                query = query.filter(task_cache::Column::Path.eq(&**path));
            }
            query
        }
    };
    let rows = query.order_by_asc(task_cache::Column::CacheId).limit(BATCH).lock_exclusive().all(txn).await?;
    if rows.is_empty() {
        return Ok(0);
    }
    release_artifacts(txn, rows.iter().filter_map(|row| row.artifact_id), now).await?;
    let gone = remove(txn, &rows.iter().map(|row| row.cache_id).collect::<Vec<_>>()).await?;
    let entries: Vec<_> = rows.iter().map(|row| LogEntry::of_task_cache(row, why)).collect();
    deletion_log::append(txn, &entries, now, tombstone).await?;
    Ok(gone)
}

/// Deletes a cache that no workload uses, because its worker needs disk space. Returns whether it
/// did.
pub(crate) async fn delete_unused(
    txn: &DatabaseTransaction,
    team: &str,
    cache: CacheId,
    now: Timestamp,
    tombstone: Duration,
) -> Result<bool, DbErr> {
    let which = TaskCacheFilter::Cache(cache);
    // A use of the cache waits for this lock.
    task_cache::Entity::find_by_id(cache.uuid()).lock_exclusive().one(txn).await?;
    if !in_use(txn, &[cache.uuid()]).await?.is_empty() {
        return Ok(false);
    }
    Ok(delete(txn, team, &which, CacheEndReason::DiskSpace, now, tombstone).await? > 0)
}

/// Deletes the rows of locked caches, used or not, and returns their number.
pub(crate) async fn remove(txn: &DatabaseTransaction, caches: &[Uuid]) -> Result<u64, DbErr> {
    if caches.is_empty() {
        return Ok(0);
    }
    let those = || ids::among(txn.get_database_backend(), "cache_id", caches.iter().copied());
    task_cache_use::Entity::delete_many().filter(those()).exec(txn).await?;
    let gone = task_cache::Entity::delete_many().filter(those()).exec(txn).await?;
    Ok(gone.rows_affected)
}

/// Returns a page of the caches of `team`, or of one of its jobs, oldest first.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    team: &str,
    job: Option<&str>,
    page: rpc::page::Page,
) -> Result<Vec<task_cache::Model>, DbErr> {
    let mut query = task_cache::Entity::find()
        .filter(task_cache::Column::Team.eq(team))
        .filter(task_cache::Column::CacheId.gt(page.after.unwrap_or_default()))
        .order_by_asc(task_cache::Column::CacheId)
        .limit(page.size);
    if let Some(job) = job {
        query = query.filter(task_cache::Column::Job.eq(job));
    }
    query.all(conn).await
}
