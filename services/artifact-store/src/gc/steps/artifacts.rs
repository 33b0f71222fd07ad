//! The step of artifacts: marks artifacts without references, and their replicas.

use std::collections::BTreeMap;

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, FromQueryResult, Statement};
use uuid::Uuid;

use crate::db::entity::artifact;
use crate::db::ids;
use crate::db::units::size;
use crate::gc::steps::deleted::{self, Replicas};
use crate::gc::{Batch, CollectedItem, Kind, Settings, schedule_next};
use crate::marks::LockWait;
use crate::marks::references::{self, ArtifactRow};
use crate::marks::tombstones;
use crate::policy::garbage::{self, MarkReason, Verdict};

pub(crate) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "SELECT {} FROM artifacts WHERE due_at <= $1 AND state <> 'deleting' ORDER BY due_at LIMIT $2{}",
        ArtifactRow::COLUMNS,
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let most = i64::try_from(settings.batch).unwrap_or(i64::MAX);
    let due = Statement::from_sql_and_values(backend, sql, [settings.now.0.into(), most.into()]);
    let rows = ArtifactRow::find_by_statement(due).all(txn).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let mut batch = Batch { checked: true, ..Batch::default() };
    judge(txn, settings, &rows, &mut batch).await?;
    Ok(batch)
}

/// Judges locked, unmarked artifacts. Marks them with their replicas, or sets their next check.
pub(in crate::gc) async fn judge(
    txn: &DatabaseTransaction,
    settings: &Settings,
    rows: &[ArtifactRow],
    batch: &mut Batch,
) -> Result<(), DbErr> {
    let facts = references::artifacts(txn, rows, settings.now).await?;
    let mut checks = Vec::new();
    let mut marked = Vec::new();
    for (row, facts) in rows.iter().zip(&facts) {
        match garbage::artifact(facts, settings.now, &settings.policy) {
            Verdict::Keep(look) if settings.column(look) == row.due_at => {}
            Verdict::Keep(look) => checks.push((row.artifact_id, look)),
            Verdict::Mark(why) => {
                let (id, size_bytes) = (row.artifact_id, size(row.size_bytes));
                marked.push(CollectedItem { kind: Kind::Artifact, id, why, size_bytes });
            }
        }
    }
    schedule_next::<artifact::Entity>(txn, settings, &checks).await?;
    if marked.is_empty() {
        return Ok(());
    }
    batch.collected.extend(marked.iter().cloned());
    let ids: Vec<_> = marked.iter().map(|marked| marked.id).collect();
    // A transaction that has locked a worker may wait for one of these artifacts, so that locked
    // workers are skipped. The next step marks their replicas. It locks only marked artifacts.
    let Replicas { left, .. } =
        deleted::mark_replicas(txn, settings, &ids, LockWait::SkipLocked, batch).await?;
    let tombstone_over = settings.now + settings.tombstone;
    let mut alike: BTreeMap<_, Vec<Uuid>> = BTreeMap::new();
    for CollectedItem { id, why, .. } in &marked {
        let due_at = if left.contains(id) { settings.now } else { tombstone_over };
        alike.entry((*why, due_at)).or_default().push(*id);
    }
    for ((why, due_at), ids) in alike {
        write_marks(txn, settings, &ids, why).await?;
        tombstones::add(txn, ids, due_at.0).await?;
    }
    Ok(())
}

async fn write_marks(
    txn: &DatabaseTransaction,
    settings: &Settings,
    artifacts: &[Uuid],
    why: MarkReason,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE artifacts SET state = 'deleting', marked_at = $2, mark_reason = $3, due_at = NULL
         WHERE artifact_id IN ({})",
        ids::query(backend, 1)
    );
    let artifacts = ids::value(backend, artifacts.iter().copied());
    let values = [artifacts, settings.now.0.into(), why.to_string().into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}
