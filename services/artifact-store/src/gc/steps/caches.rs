//! The step of caches: deletes caches that were unused for their TTL, or never finished.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use domain::Timestamp;
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, Statement,
};
use uuid::Uuid;

use crate::caches::{resource_caches, task_caches};
use crate::db::entity::{artifact, resource_cache, task_cache};
use crate::db::ids;
use crate::gc::{Batch, NextCheck, RECHECK_INTERVAL, Settings, lock_due, schedule_next};
use crate::marks::cache_uses;
use crate::marks::deletion_log::{self, LogEntry};
use crate::policy::retention::{CacheEndReason, ReleaseTime, Uses};

pub(crate) async fn check_resource_caches(
    txn: &DatabaseTransaction,
    settings: &Settings,
) -> Result<Batch, DbErr> {
    let now = settings.now;
    let due = lock_due(txn, resource_cache::Entity::find(), settings).await?;
    if due.is_empty() {
        return Ok(Batch::default());
    }
    let ids: Vec<_> = due.iter().map(|row| row.cache_id).collect();
    let uses = cache_uses::uses(txn, &ids, now).await?;
    let mut checks = Vec::new();
    let mut over = Vec::new();
    for row in &due {
        let uses = uses.get(&row.cache_id).copied().unwrap_or_default();
        match row.facts(uses).release_time(settings.resource_cache_ttl) {
            // However soon the use ends, the TTL ends no earlier than that. An ended user is
            // remembered for longer.
            ReleaseTime::NotYet => {
                let next = Ord::min(settings.resource_cache_ttl, settings.remember / 2);
                checks.push((row.cache_id, NextCheck::At(now + Ord::max(next, RECHECK_INTERVAL))));
            }
            ReleaseTime::At(at) if at > now => checks.push((row.cache_id, NextCheck::At(at))),
            ReleaseTime::At(_) => over.push((row.cache_id, row.artifact_id)),
        }
    }
    let held_up = release(txn, &over, now).await?;
    checks.extend(held_up.iter().map(|cache| (*cache, NextCheck::Later)));
    let gone: Vec<_> =
        over.iter().map(|(cache, _)| *cache).filter(|cache| !held_up.contains(cache)).collect();
    if !gone.is_empty() {
        resource_caches::remove(txn, &gone).await?;
        let rows = due.iter().filter(|row| gone.contains(&row.cache_id));
        let entries: Vec<_> = rows.map(|row| LogEntry::of_resource_cache(row, row.end_reason())).collect();
        deletion_log::append(txn, &entries, now, settings.tombstone).await?;
    }
    note_ended_uses(txn, &due, &uses, now).await?;
    schedule_next::<resource_cache::Entity>(txn, settings, &checks).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}

/// Records the ends of uses, and deletes the uses.
async fn note_ended_uses(
    txn: &DatabaseTransaction,
    rows: &[resource_cache::Model],
    uses: &HashMap<Uuid, Uses>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let ended: Vec<(Uuid, Timestamp)> = rows
        .iter()
        .filter_map(|row| Some((row, uses.get(&row.cache_id)?.ended?)))
        .map(|(row, at)| (row.cache_id, Timestamp(Ord::max(row.last_used, at.0))))
        .collect();
    if ended.is_empty() {
        return Ok(());
    }
    let caches: Vec<_> = ended.iter().map(|(cache, _)| *cache).collect();
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE resource_caches SET last_used = ended.at FROM ({}) AS ended WHERE cache_id = ended.id",
        ids::pairs_query(backend, 1)
    );
    let ended = ids::pairs(ended.iter().map(|(cache, at)| (*cache, Some(at.0))));
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [ended])).await?;
    cache_uses::forget_ended_uses(txn, &caches, now).await
}

pub(crate) async fn check_task_caches(
    txn: &DatabaseTransaction,
    settings: &Settings,
) -> Result<Batch, DbErr> {
    let now = settings.now;
    let due = lock_due(txn, task_cache::Entity::find(), settings).await?;
    if due.is_empty() {
        return Ok(Batch::default());
    }
    let ids: Vec<_> = due.iter().map(|row| row.cache_id).collect();
    let in_use = task_caches::in_use(txn, &ids).await?;
    let mut checks = Vec::new();
    let mut over = Vec::new();
    for row in &due {
        match row.release_time(in_use.contains(&row.cache_id)) {
            // However soon the use ends, the TTL ends no earlier than that.
            ReleaseTime::NotYet => {
                let ttl = Duration::from_micros(u64::try_from(row.ttl).unwrap_or(0));
                checks.push((row.cache_id, NextCheck::At(now + Ord::max(ttl, RECHECK_INTERVAL))));
            }
            ReleaseTime::At(at) if at > now => checks.push((row.cache_id, NextCheck::At(at))),
            ReleaseTime::At(_) => over.push((row.cache_id, row.artifact_id)),
        }
    }
    let held_up = release(txn, &over, now).await?;
    checks.extend(held_up.iter().map(|cache| (*cache, NextCheck::Later)));
    let gone: HashSet<Uuid> =
        over.iter().map(|(cache, _)| *cache).filter(|cache| !held_up.contains(cache)).collect();
    task_caches::remove(txn, &gone.iter().copied().collect::<Vec<_>>()).await?;
    let rows = due.iter().filter(|row| gone.contains(&row.cache_id));
    let entries: Vec<_> = rows.map(|row| LogEntry::of_task_cache(row, CacheEndReason::Unused)).collect();
    deletion_log::append(txn, &entries, now, settings.tombstone).await?;
    schedule_next::<task_cache::Entity>(txn, settings, &checks).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}

/// Makes the artifacts of caches due that are about to be deleted. Returns the caches that must
/// wait, because their artifacts are locked.
async fn release(
    txn: &DatabaseTransaction,
    over: &[(Uuid, Option<Uuid>)],
    now: Timestamp,
) -> Result<HashSet<Uuid>, DbErr> {
    let owned: Vec<Uuid> = over.iter().filter_map(|(_, artifact)| *artifact).collect();
    if owned.is_empty() {
        return Ok(HashSet::new());
    }
    let backend = txn.get_database_backend();
    let locked: HashSet<Uuid> = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::ArtifactId)
        .filter(ids::among(backend, "artifact_id", owned))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .into_tuple::<Uuid>()
        .all(txn)
        .await?
        .into_iter()
        .collect();
    artifact::Entity::update_many()
        .col_expr(artifact::Column::DueAt, Expr::value(now.0))
        .filter(ids::among(backend, "artifact_id", locked.iter().copied()))
        .exec(txn)
        .await?;
    let waits = |artifact: &Option<Uuid>| artifact.is_some_and(|artifact| !locked.contains(&artifact));
    Ok(over.iter().filter(|(_, artifact)| waits(artifact)).map(|(cache, _)| *cache).collect())
}
