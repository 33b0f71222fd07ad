//! The step of deleted artifacts: marks replicas, children first, and deletes expired tombstones.
//!
//! The row of an artifact is deleted when its tombstone has expired and no volume is left.

use std::collections::HashSet;

use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, FromQueryResult, Statement};
use uuid::Uuid;

use crate::db::entity::tombstone;
use crate::db::ids;
use crate::db::units::size;
use crate::gc::{Batch, CollectedItem, Kind, NextCheck, Settings, schedule_next};
use crate::marks::schedule::make_due;
use crate::marks::sweep_queue;
use crate::marks::{self, LockWait};
use crate::policy::garbage::MarkReason;

pub(in crate::gc) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let rows = lock_due(txn, settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let mut batch = Batch { checked: true, ..Batch::default() };
    let artifacts: Vec<_> = rows.iter().map(|row| row.artifact_id).collect();
    let replicas = mark_replicas(txn, settings, &artifacts, LockWait::Block, &mut batch).await?;

    let over_at = |row: &DeletedArtifact| Timestamp(row.marked_at.unwrap_or_default()) + settings.tombstone;
    let over = rows.iter().filter(|row| over_at(row) <= settings.now).map(|row| row.artifact_id);
    let there = with_volumes(txn, over).await?;
    let mut checks = Vec::new();
    let mut gone = Vec::new();
    for row in &rows {
        let look = match over_at(row) {
            // Parents may have lost their last child.
            _ if replicas.left.contains(&row.artifact_id) && replicas.progress => NextCheck::At(settings.now),
            _ if replicas.left.contains(&row.artifact_id) => NextCheck::Later,
            over_at if over_at > settings.now => NextCheck::At(over_at),
            _ if there.contains(&row.artifact_id) => NextCheck::Later,
            _ => {
                gone.push(row.artifact_id);
                continue;
            }
        };
        checks.push((row.artifact_id, look));
    }
    forget(txn, gone).await?;
    schedule_next::<tombstone::Entity>(txn, settings, &checks).await?;
    Ok(batch)
}

/// Columns of a deleted artifact.
#[derive(FromQueryResult)]
struct DeletedArtifact {
    artifact_id: Uuid,
    marked_at: Option<i64>,
}

/// Locks the deleted artifacts that are due longest, up to the batch size, and skips locked ones.
async fn lock_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Vec<DeletedArtifact>, DbErr> {
    let backend = txn.get_database_backend();
    let lock = ids::lock(backend, " FOR UPDATE SKIP LOCKED");
    // A separate query of the queue: PostgreSQL then finds artifacts by id, however many rows it
    // expects in the queue.
    let sql = format!(
        "WITH due AS (SELECT artifact_id FROM tombstones WHERE due_at <= $1 ORDER BY due_at LIMIT $2{lock})
         SELECT artifact_id, marked_at FROM artifacts
         WHERE artifact_id IN (SELECT artifact_id FROM due) AND state = 'deleting'{lock}"
    );
    let values = [settings.now.0.into(), i64::try_from(settings.batch).unwrap_or(i64::MAX).into()];
    DeletedArtifact::find_by_statement(Statement::from_sql_and_values(backend, sql, values)).all(txn).await
}

/// Returns the artifacts that still have replicas, marked or not.
async fn with_volumes(
    txn: &DatabaseTransaction,
    artifacts: impl Iterator<Item = Uuid>,
) -> Result<HashSet<Uuid>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "SELECT DISTINCT artifact_id FROM volumes WHERE artifact_id IN ({}) AND purpose = 'replica'",
        ids::query(backend, 1)
    );
    let there = Statement::from_sql_and_values(backend, sql, [ids::value(backend, artifacts)]);
    txn.query_all_raw(there).await?.iter().map(|row| row.try_get("", "artifact_id")).collect()
}

async fn forget(txn: &DatabaseTransaction, artifacts: Vec<Uuid>) -> Result<(), DbErr> {
    if artifacts.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let artifacts = ids::value(backend, artifacts);
    for table in ["owners", "trees", "tombstones", "artifacts"] {
        let sql = format!("DELETE FROM {table} WHERE artifact_id IN ({})", ids::query(backend, 1));
        txn.execute_raw(Statement::from_sql_and_values(backend, sql, [artifacts.clone()])).await?;
    }
    Ok(())
}

/// Result of marking the replicas of deleted artifacts.
#[derive(Debug, Default)]
pub(in crate::gc) struct Replicas {
    /// Whether a replica was marked.
    pub(in crate::gc) progress: bool,
    /// Artifacts with unmarked replicas.
    pub(in crate::gc) left: HashSet<Uuid>,
}

/// Marks the replicas of deleted, locked artifacts that have no live child, by the rule
/// [`crate::policy::garbage::volume`].
///
/// No replica gets a child or is completed meanwhile, because such a transaction must lock the
/// artifact.
pub(in crate::gc) async fn mark_replicas(
    txn: &DatabaseTransaction,
    settings: &Settings,
    artifacts: &[Uuid],
    wait: LockWait,
    batch: &mut Batch,
) -> Result<Replicas, DbErr> {
    let replicas = unmarked_replicas(txn, artifacts).await?;
    if replicas.is_empty() {
        return Ok(Replicas::default());
    }
    let backend = txn.get_database_backend();
    let workers: HashSet<_> = replicas.iter().map(|replica| replica.worker_id).collect();
    let workers = [ids::value(backend, workers)];
    let held = marks::lock_workers(txn, &ids::query(backend, 1), workers, wait).await?;

    let (why, now) = (MarkReason::ArtifactDeleted, settings.now);
    let (free, kept): (Vec<_>, Vec<_>) = replicas
        .into_iter()
        .partition(|replica| !replica.has_live_child && held.contains(&replica.worker_id));
    let left = kept.into_iter().map(|replica| replica.artifact_id).collect();
    let (complete, unfinished): (Vec<_>, Vec<_>) = free.into_iter().partition(|replica| replica.complete);
    sweep_queue::add_with_artifacts(txn, complete.iter().map(|replica| replica.handle), now).await?;
    let handles: Vec<_> = unfinished.iter().map(|replica| replica.handle).collect();
    let marked = marks::mark_volumes_returning(txn, &handles, why, now).await?;
    let marked: HashSet<_> = marked.into_iter().map(|row| row.handle).collect();

    let (mut progress, mut released, mut workers) = (false, HashSet::new(), HashSet::new());
    // Volumes that another transaction has marked are reported by that one.
    for replica in complete.into_iter().chain(unfinished.into_iter().filter(|it| marked.contains(&it.handle)))
    {
        let size_bytes = size(replica.size_bytes);
        batch.collected.push(CollectedItem { kind: Kind::Volume, id: replica.handle, why, size_bytes });
        released.extend(replica.from_artifact_id);
        workers.insert(replica.worker_id);
        progress = true;
    }
    batch.workers.extend(workers.into_iter().map(WorkerId::from_uuid));
    make_due(txn, released, now).await?;
    Ok(Replicas { progress, left })
}

/// Columns of a replica of a deleted artifact.
#[derive(FromQueryResult)]
struct Replica {
    handle: Uuid,
    worker_id: Uuid,
    artifact_id: Uuid,
    from_artifact_id: Option<Uuid>,
    size_bytes: i64,
    complete: bool,
    has_live_child: bool,
}

/// Returns the unmarked replicas of artifacts.
async fn unmarked_replicas(txn: &DatabaseTransaction, artifacts: &[Uuid]) -> Result<Vec<Replica>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "SELECT v.handle, v.worker_id, v.artifact_id, v.from_artifact_id, v.size_bytes, v.complete,
                EXISTS (SELECT 1 FROM volumes c WHERE c.parent = v.handle AND {}) AS has_live_child
         FROM volumes v WHERE v.artifact_id IN ({}) AND v.purpose = 'replica' AND {}",
        sweep_queue::unmarked("c"),
        ids::query(backend, 1),
        sweep_queue::unmarked("v"),
    );
    let artifacts = [ids::value(backend, artifacts.iter().copied())];
    Replica::find_by_statement(Statement::from_sql_and_values(backend, sql, artifacts)).all(txn).await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use db::Database;
    use domain::VolumeHandle;
    use sea_orm::{ActiveModelTrait, ActiveValue::Set, EntityTrait, IntoActiveModel, Iterable};
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::db::entity::{Purpose, State, volume, worker};
    use crate::db::migrations::Schema;
    use crate::db::volumes::new_volume;
    use crate::marks::references;
    use crate::marks::references::VolumeRow;
    use crate::policy::garbage;
    use crate::policy::garbage::{Policy, Verdict};

    const NOW: Timestamp = Timestamp(1_000_000_000);
    const SEQUENCE: i64 = 7;

    #[tokio::test(flavor = "multi_thread")]
    async fn marked_replicas_follow_garbage_rule_on_sqlite() {
        marked_replicas_follow_garbage_rule(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn marked_replicas_follow_garbage_rule_on_postgres() {
        marked_replicas_follow_garbage_rule(databases::postgres().await).await;
    }

    /// Returns replicas of deleted artifacts in every state, complete or claimed, without a child
    /// or with a child in every state.
    fn every_replica(worker: WorkerId) -> (Vec<volume::Model>, Vec<volume::Model>) {
        let (mut replicas, mut children) = (Vec::new(), Vec::new());
        let new = |purpose| new_volume(VolumeHandle::new(), worker, purpose, 0, NOW);
        for state in State::iter() {
            for claimed_until in [None, Some(NOW.0), Some(NOW.0 + 1)] {
                for child in std::iter::once(None).chain(State::iter().map(Some)) {
                    let replica = volume::Model {
                        state,
                        artifact_id: Some(Uuid::now_v7()),
                        claimed_until,
                        complete: claimed_until.is_none(),
                        digest: claimed_until.is_none().then(|| vec![0; 32]),
                        ..new(Purpose::Replica)
                    };
                    children.extend(child.map(|state| volume::Model {
                        state,
                        parent: Some(replica.handle),
                        attempt_id: Some(Uuid::now_v7()),
                        ..new(Purpose::Input)
                    }));
                    replicas.push(replica);
                }
            }
        }
        (replicas, children)
    }

    async fn marked_replicas_follow_garbage_rule(database: TestDatabase) {
        let db = Database::connect::<Schema>(&database.url).await.expect("a database");
        let forever = Duration::MAX;
        let policy = Policy { unowned_ttl: forever, gc_grace: Duration::ZERO, needs_space: false };
        let settings = &Settings {
            now: NOW,
            policy,
            tombstone: forever,
            remember: forever,
            resource_cache_ttl: forever,
            lost_grace: forever,
            batch: 1,
        };
        let worker = WorkerId::new();
        let (replicas, children) = &every_replica(worker);
        let judge = |txn: db::Transaction| async move {
            let row = worker::ActiveModel {
                worker_id: Set(worker.uuid()),
                incarnation: Set(1),
                session: Set(1),
                sequence: Set(SEQUENCE),
                reported: Set(0),
            };
            worker::Entity::insert(row).exec_without_returning(&*txn).await?;
            let rows = replicas.iter().chain(children).map(|row| row.clone().into_active_model().reset_all());
            volume::Entity::insert_many(rows).exec_without_returning(&*txn).await?;
            let garbage = replicas.iter().chain(children).filter(|row| row.state.is_garbage());
            sweep_queue::add(&txn, garbage.map(|row| row.handle)).await?;

            let judged: Vec<_> = replicas.iter().map(VolumeRow::from).collect();
            let facts = references::volumes(&*txn, &judged).await?;
            let artifacts: Vec<_> = replicas.iter().filter_map(|row| row.artifact_id).collect();
            let mut batch = Batch::default();
            let marked = mark_replicas(&txn, settings, &artifacts, LockWait::SkipLocked, &mut batch).await?;
            let after = volume::Entity::find().all(&*txn).await?;
            let mut shown = after.clone();
            sweep_queue::merge_marks(&*txn, &mut shown).await?;
            Ok::<_, DbErr>((facts, marked, batch, after, shown))
        };
        let (facts, marked, batch, after, shown) = db.write(judge).await.expect("judged");

        let (mut expected, mut left) = (HashSet::new(), HashSet::new());
        for (row, facts) in replicas.iter().zip(&facts) {
            if row.state.is_garbage() {
                continue;
            }
            match garbage::volume(facts, NOW, &policy) {
                Verdict::Mark(why) => {
                    assert_eq!(why, MarkReason::ArtifactDeleted);
                    expected.insert(row.handle);
                }
                Verdict::Keep(_) => _ = left.insert(row.artifact_id.expect("a replica")),
            }
        }
        assert!(!expected.is_empty() && !left.is_empty());
        assert_eq!((marked.progress, marked.left), (true, left));
        assert_eq!(batch.collected.iter().map(|marked| marked.id).collect::<HashSet<_>>(), expected);
        assert_eq!(batch.workers, [worker]);
        for (row, shown) in after.into_iter().zip(shown) {
            let before = replicas.iter().chain(children).find(|before| before.handle == row.handle);
            let before = before.expect("no other").clone();
            if !expected.contains(&row.handle) {
                assert_eq!((&row, &shown), (&before, &before));
                continue;
            }
            let marked = volume::Model {
                state: State::Destroying,
                mark_reason: Some(MarkReason::ArtifactDeleted.to_string()),
                marked_at: Some(NOW.0),
                marked_from: Some(before.state),
                ..before.clone()
            };
            if before.complete {
                // Only the mark in the queue shows it.
                assert_eq!((row, shown), (before, marked));
            } else {
                let expected = volume::Model { judged_after: SEQUENCE, given_up: true, ..marked };
                assert_eq!((&row, &shown), (&expected, &expected));
            }
        }
    }
}
