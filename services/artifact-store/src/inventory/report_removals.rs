//! Deletion of marked rows that a report no longer names.
//!
//! The row and its mark are deleted, and the deletion log gets an entry. An attempt that only waits
//! for this deletion becomes due. The number of statements does not depend on the number of rows.

use std::time::Duration;

use domain::{Timestamp, WorkerId};
use sea_orm::{ActiveEnum, ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, Statement, Value};
use uuid::Uuid;

use crate::db::ids;
use crate::marks::Sweepable;
use crate::policy::garbage::MarkReason;
use crate::policy::retention::REMAINS_RECHECK_INTERVAL;
use crate::store_life::receipts::Token;

/// Time and retention of entries in the deletion log.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogTerms {
    pub(super) now: Timestamp,
    pub(super) tombstone: Duration,
}

/// Deletes rows of a worker that were marked before the token, and returns their number.
///
/// A transaction that removes a mark also changes the row, so that this token no longer judges it.
pub(super) async fn forget<E: Sweepable>(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    handles: &[Uuid],
    token: Token,
    memory: LogTerms,
) -> Result<u64, DbErr> {
    if handles.is_empty() {
        return Ok(0);
    }
    let backend = txn.get_database_backend();
    let handles = ids::value(backend, handles.iter().copied());
    let which = [handles, worker.uuid().into(), token.sequence.into()];
    let LogTerms { now, tombstone } = memory;
    let mut values = Vec::from(which.clone());
    values.extend([now.0.into(), (now + tombstone).0.into(), (now + REMAINS_RECHECK_INTERVAL).0.into()]);
    if E::HAS_QUEUE {
        values.push(MarkReason::ArtifactDeleted.to_string().into());
    }
    match backend {
        DbBackend::Postgres => forget_with_one_statement::<E>(txn, values).await,
        _ => forget_with_several_statements::<E>(txn, which, values).await,
    }
}

/// SQL fragments about the rows to delete.
///
/// Values: `$1` handles, `$2` worker, `$3` token, `$4` now, `$5` next check of the log entry, `$6`
/// latest next check of an attempt that only waits for this deletion.
struct RemovalSql {
    table: &'static str,
    /// Table with additional marks.
    mark_table: Option<&'static str>,
    /// Condition of the rows to delete.
    condition: String,
    /// Columns of the reason and time of the mark.
    marked: String,
}

impl RemovalSql {
    fn of<E: Sweepable>(backend: DbBackend) -> Self {
        let table = E::TABLE;
        let (mark_table, is_marked, marked) = if E::HAS_QUEUE {
            let is_marked =
                "sweep_queue.worker_id = volumes.worker_id AND sweep_queue.handle = volumes.handle";
            let why =
                "CASE WHEN sweep_queue.marked_at IS NULL THEN volumes.mark_reason ELSE $7 END AS mark_reason";
            let at = "COALESCE(sweep_queue.marked_at, volumes.marked_at) AS marked_at";
            (Some("sweep_queue"), is_marked.to_owned(), format!("{why}, {at}"))
        } else {
            let is_marked = format!("{table}.state IN ('destroying', 'sweeping')");
            (None, is_marked, "mark_reason, marked_at".to_owned())
        };
        let ids = ids::query(backend, 1);
        let condition = format!(
            "{is_marked} AND {table}.worker_id = $2 AND {table}.handle IN ({ids}) AND {table}.judged_after < $3"
        );
        Self { table, mark_table, condition, marked }
    }
}

const INSERT_ENTRIES: &str =
    "INSERT INTO deletion_log (id, kind, label, mark_reason, marked_at, gone_at, due_at)";

/// Query of attempts that only wait for deletions.
const WAITING: &str = "SELECT attempt_id FROM attempts WHERE due_at > $4 AND due_at <= $6";

async fn forget_with_one_statement<E: Sweepable>(
    txn: &DatabaseTransaction,
    values: Vec<Value>,
) -> Result<u64, DbErr> {
    let backend = txn.get_database_backend();
    let RemovalSql { table, mark_table, condition, marked } = RemovalSql::of::<E>(backend);
    let using = mark_table.map(|mark_table| format!("USING {mark_table}")).unwrap_or_default();
    let unmarked = match mark_table {
        Some(marks) => format!(
            "unmarked AS (DELETE FROM {marks} WHERE worker_id = $2 AND handle IN (SELECT handle FROM gone)),"
        ),
        None => String::new(),
    };
    let kind = E::KIND.to_value();
    let sql = format!(
        "WITH gone AS (DELETE FROM {table} {using} WHERE {condition} RETURNING {table}.handle AS handle, {table}.attempt_id AS attempt_id, {marked}),
              {unmarked}
              waiting AS (SELECT a.attempt_id FROM (SELECT DISTINCT attempt_id FROM gone WHERE attempt_id IS NOT NULL) AS g
                          CROSS JOIN LATERAL ({WAITING} AND attempt_id = g.attempt_id LIMIT 1 FOR UPDATE SKIP LOCKED) AS a),
              due AS (UPDATE attempts SET due_at = $4 WHERE attempt_id IN (SELECT attempt_id FROM waiting)),
              logged AS ({INSERT_ENTRIES} SELECT handle, '{kind}', '', mark_reason, marked_at, $4, $5 FROM gone ON CONFLICT (id) DO NOTHING)
         SELECT COUNT(*) AS number FROM gone"
    );
    let row = txn.query_one_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    let number: i64 = row.map(|row| row.try_get("", "number")).transpose()?.unwrap_or(0);
    Ok(u64::try_from(number).unwrap_or(0))
}

/// Deletes rows with several statements, on SQLite, where a writer is alone.
async fn forget_with_several_statements<E: Sweepable>(
    txn: &DatabaseTransaction,
    which: [Value; 3],
    values: Vec<Value>,
) -> Result<u64, DbErr> {
    let backend = txn.get_database_backend();
    let RemovalSql { table, mark_table, condition, marked } = RemovalSql::of::<E>(backend);
    let from = mark_table.map(|mark_table| format!(", {mark_table}")).unwrap_or_default();
    let insert_entries = format!(
        "{INSERT_ENTRIES} SELECT handle, '{kind}', '', mark_reason, marked_at, $4, $5
         FROM (SELECT {table}.handle AS handle, {marked} FROM {table}{from} WHERE {condition}) AS gone WHERE TRUE
         ON CONFLICT (id) DO NOTHING",
        kind = E::KIND.to_value(),
    );
    let make_due = format!(
        "UPDATE attempts SET due_at = $4 WHERE attempt_id IN
             ({WAITING} AND attempt_id IN (SELECT {table}.attempt_id FROM {table}{from} WHERE {condition}))"
    );
    let due = values.iter().take(6).cloned();
    txn.execute_raw(Statement::from_sql_and_values(backend, make_due, due)).await?;
    txn.execute_raw(Statement::from_sql_and_values(backend, insert_entries, values)).await?;
    let condition = match mark_table {
        // A join, which uses the indexes.
        Some(mark_table) => {
            format!("handle IN (SELECT {table}.handle FROM {table}, {mark_table} WHERE {condition})")
        }
        None => condition,
    };
    let delete = format!("DELETE FROM {table} WHERE {condition}");
    let gone = txn.execute_raw(Statement::from_sql_and_values(backend, delete, which.clone())).await?;
    if let Some(marks) = mark_table {
        let [handles, worker, _] = which;
        let unmark = format!(
            "DELETE FROM {marks} WHERE worker_id = $2 AND handle IN ({})
             AND NOT EXISTS (SELECT 1 FROM {table} WHERE {table}.handle = {marks}.handle)",
            ids::query(backend, 1)
        );
        txn.execute_raw(Statement::from_sql_and_values(backend, unmark, [handles, worker])).await?;
    }
    Ok(gone.rows_affected())
}
