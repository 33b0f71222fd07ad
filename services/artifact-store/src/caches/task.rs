//! Task caches: found or made, given their next version, deleted.

use std::time::Duration;

use domain::{ArtifactId, CacheId, Timestamp};
use sea_orm::sea_query::{Expr, OnConflict};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QueryOrder, QuerySelect,
};

use super::{HandOverError, hand_over, let_go, with_bytes};
use crate::artifacts::Located;
use crate::entity::task_cache;
use crate::graves::{self, Epitaph};
use crate::rules::CacheWent;
use crate::units::micros;

/// How many are deleted in one transaction.
pub(crate) const BATCH: u64 = 500;

/// What a task cache is of.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    pub(crate) team: String,
    pub(crate) job: String,
    pub(crate) step: String,
    pub(crate) path: String,
}

/// Finds or makes a cache, which counts as use, and answers what it owns, if the bytes are left.
pub(crate) async fn find_or_create(
    txn: &DatabaseTransaction,
    key: &Key,
    ttl: Duration,
    now: Timestamp,
) -> Result<(CacheId, Option<Located>), DbErr> {
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
        look_at: (now + ttl).0,
    };
    let of_key = [
        task_cache::Column::Team,
        task_cache::Column::Job,
        task_cache::Column::Step,
        task_cache::Column::Path,
    ];
    let used = [task_cache::Column::Ttl, task_cache::Column::LastUsed, task_cache::Column::LookAt];
    let row = task_cache::Entity::insert(fresh.into_active_model().reset_all())
        .on_conflict(OnConflict::columns(of_key).update_columns(used).to_owned())
        .exec_with_returning(txn)
        .await?;
    let located = with_bytes(txn, row.artifact_id).await?;
    Ok((CacheId::from_uuid(row.cache_id), located))
}

/// A cache cannot be given a version.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PublishError {
    #[error("no task cache {0} in this team")]
    NotFound(CacheId),
    #[error(transparent)]
    Artifact(#[from] HandOverError),
    #[error("database failed while publishing a task cache")]
    Database(#[from] DbErr),
}

/// Gives a cache its next version, and lets go of the one before.
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

/// A cache of `team`, locked.
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

/// Writes down the next version of a cache that is locked.
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

/// Which caches of a team are meant.
#[derive(Debug, Clone)]
pub(crate) enum Which {
    One(CacheId),
    /// Those of a job; of a step, and of a path.
    Of {
        job: String,
        step: Option<String>,
        path: Option<String>,
    },
}

/// Deletes caches, a batch at most. Answers how many.
pub(crate) async fn delete(
    txn: &DatabaseTransaction,
    team: &str,
    which: &Which,
    now: Timestamp,
    tombstone: Duration,
) -> Result<u64, DbErr> {
    let mut query = task_cache::Entity::find().filter(task_cache::Column::Team.eq(team));
    query = match which {
        Which::One(cache) => query.filter(task_cache::Column::CacheId.eq(cache.uuid())),
        Which::Of { job, step, path } => {
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
    let_go(txn, rows.iter().filter_map(|row| row.artifact_id), now).await?;
    let gone = task_cache::Entity::delete_many()
        .filter(task_cache::Column::CacheId.is_in(rows.iter().map(|row| row.cache_id)))
        .exec(txn)
        .await?;
    let epitaphs: Vec<_> = rows.iter().map(|row| Epitaph::of_task_cache(row, CacheWent::Deleted)).collect();
    graves::dig(txn, &epitaphs, now, tombstone).await?;
    Ok(gone.rows_affected)
}

/// A page of the caches of `team`, or of one job of it, the oldest first.
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
