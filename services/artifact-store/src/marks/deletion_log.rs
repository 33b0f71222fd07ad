//! The deletion log: when and why volumes, containers and caches were deleted.
//!
//! Entries are kept as long as tombstones of artifacts.

use std::time::Duration;

use db::rows::Column;
use domain::Timestamp;
use sea_orm::{ActiveEnum, ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use serde::Serialize;
use uuid::Uuid;

use crate::db::entity::{ALL_TEAMS, DeletionKind, resource_cache, task_cache};
use crate::policy::retention::CacheEndReason;

/// An entry of the deletion log.
#[derive(Debug, Clone)]
pub(crate) struct LogEntry {
    pub(crate) id: Uuid,
    kind: DeletionKind,
    /// Team that may read the entry. `None`: every team.
    team: Option<String>,
    /// Name for people.
    label: String,
    mark_reason: Option<String>,
    marked_at: Option<i64>,
}

impl LogEntry {
    /// Returns the entry of a volume or container.
    pub(crate) fn of(
        id: Uuid,
        kind: DeletionKind,
        mark_reason: Option<String>,
        marked_at: Option<i64>,
    ) -> Self {
        Self { id, kind, team: None, label: String::new(), mark_reason, marked_at }
    }

    /// Returns the entry of a resource cache.
    pub(crate) fn of_resource_cache(row: &resource_cache::Model, why: CacheEndReason) -> Self {
        Self {
            id: row.cache_id,
            kind: DeletionKind::ResourceCache,
            team: (row.scope != ALL_TEAMS).then(|| row.scope.clone()),
            label: row.name(),
            mark_reason: Some(why.to_string()),
            marked_at: None,
        }
    }

    /// Returns the entry of a task cache.
    pub(crate) fn of_task_cache(row: &task_cache::Model, why: CacheEndReason) -> Self {
        Self {
            id: row.cache_id,
            kind: DeletionKind::TaskCache,
            team: Some(row.team.clone()),
            label: row.name(),
            mark_reason: Some(why.to_string()),
            marked_at: None,
        }
    }
}

/// Adds entries for deletions at `now`, which are kept for `tombstone`.
pub(crate) async fn append(
    txn: &DatabaseTransaction,
    gone: &[LogEntry],
    now: Timestamp,
    tombstone: Duration,
) -> Result<(), DbErr> {
    if gone.is_empty() {
        return Ok(());
    }
    let rows = gone.iter().map(|entry| Row {
        id: entry.id,
        kind: entry.kind.to_value(),
        team: entry.team.as_deref(),
        label: &entry.label,
        mark_reason: entry.mark_reason.as_deref(),
        marked_at: entry.marked_at,
    });
    let rows = db::rows::value(&rows.collect::<Vec<_>>())?;
    let backend = txn.get_database_backend();
    // Without a condition, SQLite would parse ON CONFLICT as a part of the query.
    let sql = format!(
        "INSERT INTO deletion_log (id, kind, team, label, mark_reason, marked_at, gone_at, due_at)
         SELECT id, kind, team, label, mark_reason, marked_at, $2, $3 FROM ({}) AS gone WHERE TRUE
         ON CONFLICT (id) DO NOTHING",
        db::rows::query(backend, 1, &ROW)
    );
    let values = [rows, now.0.into(), (now + tombstone).0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// A row to insert.
#[derive(Serialize)]
struct Row<'a> {
    id: Uuid,
    kind: String,
    team: Option<&'a str>,
    label: &'a str,
    mark_reason: Option<&'a str>,
    marked_at: Option<i64>,
}

const ROW: [(&str, Column); 6] = [
    ("id", Column::Uuid),
    ("kind", Column::Text),
    ("team", Column::Text),
    ("label", Column::Text),
    ("mark_reason", Column::Text),
    ("marked_at", Column::Integer),
];
