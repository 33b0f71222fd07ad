//! The sweep queue: volumes that are garbage, by worker, and whether they were handed out.
//!
//! It is a table instead of an index of `volumes`, so that marking or forgetting a volume writes
//! few pages, however many volumes there are.
//!
//! Invariant: a volume has a row here exactly while it is garbage. A transaction that adds or
//! removes rows has locked the worker's row, in shared mode for marks and exclusively for handing
//! out.
//!
//! There are two kinds of marks:
//!
//! - A volume that is marked for a reason of its own also shows it in its own row. Its state is
//!   `destroying`, and `sweeping` after it was handed out.
//! - A complete replica that is deleted with its artifact has only the row here, with `marked_at`.
//!   Its own row changes when it is handed out, so that the mark does not write the row's page.
//!
//! A transaction that adds a reference to a replica has locked the artifact and finds there that it
//! is deleted. Readers of volumes merge the marks into the rows ([`merge_marks`]), or exclude
//! marked rows ([`unmarked`]).
//!
//! Invariant: a mark of the second kind exists only while the artifact is deleted. A transaction
//! that adds or removes such a mark has locked the artifact.

use std::collections::{HashMap, HashSet};

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, Condition, ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, FromQueryResult,
    Statement, Value,
};
use uuid::Uuid;

use crate::db::entity::{Purpose, State, volume};
use crate::db::ids;
use crate::policy::garbage::MarkReason;

/// A volume or container that was marked.
#[derive(Debug, FromQueryResult)]
pub(crate) struct MarkedVolume {
    pub(crate) worker_id: Uuid,
    pub(crate) handle: Uuid,
}

/// Marks volumes with an UPDATE statement, and adds them to the queue.
pub(crate) async fn mark(
    txn: &DatabaseTransaction,
    update: &str,
    values: impl IntoIterator<Item = Value>,
) -> Result<Vec<MarkedVolume>, DbErr> {
    let backend = txn.get_database_backend();
    let sql = match backend {
        DbBackend::Postgres => format!(
            "WITH marked AS ({update} RETURNING volumes.worker_id, volumes.handle),
                  added AS (INSERT INTO sweep_queue (worker_id, handle) SELECT worker_id, handle FROM marked)
             SELECT worker_id, handle FROM marked"
        ),
        _ => format!("{update} RETURNING worker_id, handle"),
    };
    let marked = Statement::from_sql_and_values(backend, sql, values);
    let marked = MarkedVolume::find_by_statement(marked).all(txn).await?;
    if backend != DbBackend::Postgres {
        add(txn, marked.iter().map(|row| row.handle)).await?;
    }
    Ok(marked)
}

/// Adds volumes that were just marked in their own rows.
pub(crate) async fn add(
    txn: &DatabaseTransaction,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let sql = "INSERT INTO sweep_queue (worker_id, handle) SELECT worker_id, handle FROM volumes WHERE handle IN (IDS)";
    change(txn, sql, volumes, []).await
}

/// Marks complete replicas of deleted artifacts.
pub(crate) async fn add_with_artifacts(
    txn: &DatabaseTransaction,
    replicas: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let sql = "INSERT INTO sweep_queue (worker_id, handle, marked_at)
         SELECT worker_id, handle, $2 FROM volumes WHERE handle IN (IDS)";
    change(txn, sql, replicas, [now.0.into()]).await
}

/// Removes volumes whose marks are removed.
pub(crate) async fn remove(
    txn: &DatabaseTransaction,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let sql = "DELETE FROM sweep_queue
         WHERE (worker_id, handle) IN (SELECT worker_id, handle FROM volumes WHERE handle IN (IDS))";
    change(txn, sql, volumes, []).await
}

/// Removes all volumes of a worker that is forgotten.
pub(crate) async fn forget_worker(txn: &DatabaseTransaction, worker: WorkerId) -> Result<(), DbErr> {
    let sql = "DELETE FROM sweep_queue WHERE worker_id = $1";
    let values = [worker.uuid().into()];
    txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await.map(drop)
}

/// Records that volumes of a worker are handed out under this number. A repeat has a new number.
pub(crate) async fn record_handed_out(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: impl IntoIterator<Item = Uuid>,
    number: i64,
) -> Result<(), DbErr> {
    let sql = "UPDATE sweep_queue SET number = $3 WHERE worker_id = $2 AND handle IN (IDS)";
    change(txn, sql, volumes, [worker.uuid().into(), number.into()]).await
}

/// Runs a statement whose value `$1` is a list of volumes. `IDS` in `sql` stands for the query of
/// them. Does nothing for an empty list.
async fn change<const N: usize>(
    txn: &DatabaseTransaction,
    sql: &str,
    volumes: impl IntoIterator<Item = Uuid>,
    values: [Value; N],
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let volumes: Vec<_> = volumes.into_iter().collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let sql = sql.replace("IDS", &ids::query(backend, 1));
    let values = std::iter::once(ids::value(backend, volumes)).chain(values);
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Returns the condition that a volume, with the alias `volume`, is not garbage.
pub(crate) fn unmarked(volume: &str) -> String {
    format!(
        "NOT EXISTS (SELECT 1 FROM sweep_queue WHERE sweep_queue.worker_id = {volume}.worker_id AND sweep_queue.handle = {volume}.handle)"
    )
}

/// Returns the condition that a row of `volumes` has this state after its mark is merged.
pub(crate) fn has_merged_state(state: State) -> Condition {
    let is = Condition::all().add(volume::Column::State.eq(state));
    match state {
        State::Sweeping => is,
        State::Destroying => Condition::all()
            .add(Expr::cust("volumes.handle IN (SELECT handle FROM sweep_queue WHERE number IS NULL)")),
        _ => is.add(Expr::cust(unmarked("volumes"))),
    }
}

/// Returns the expression of the state of a row of `volumes` after its mark is merged.
pub(crate) fn merged_state() -> String {
    let unmarked = unmarked("volumes");
    format!("CASE WHEN state IN ('destroying', 'sweeping') OR {unmarked} THEN state ELSE 'destroying' END")
}

/// Merges the marks of volumes into their rows.
pub(crate) async fn merge_marks(
    conn: &impl ConnectionTrait,
    rows: &mut [volume::Model],
) -> Result<(), DbErr> {
    #[derive(FromQueryResult)]
    struct Mark {
        handle: Uuid,
        marked_at: i64,
    }

    let may_be =
        |row: &&volume::Model| row.purpose == Purpose::Replica && row.complete && !row.state.is_garbage();
    let replicas: Vec<_> = rows.iter().filter(may_be).map(|row| row.handle).collect();
    if replicas.is_empty() {
        return Ok(());
    }
    let backend = conn.get_database_backend();
    let sql = format!(
        "SELECT sweep_queue.handle AS handle, sweep_queue.marked_at AS marked_at FROM volumes
         JOIN sweep_queue ON sweep_queue.worker_id = volumes.worker_id AND sweep_queue.handle = volumes.handle
         WHERE volumes.handle IN ({}) AND sweep_queue.marked_at IS NOT NULL",
        ids::query(backend, 1)
    );
    let marks = Statement::from_sql_and_values(backend, sql, [ids::value(backend, replicas)]);
    let marks = Mark::find_by_statement(marks).all(conn).await?;
    let marked: HashMap<_, _> = marks.iter().map(|mark| (mark.handle, mark.marked_at)).collect();
    for row in rows {
        if let Some(at) = marked.get(&row.handle).filter(|_| !row.state.is_garbage()) {
            row.marked_from = Some(row.state);
            row.state = State::Destroying;
            row.marked_at = Some(*at);
            row.mark_reason = Some(MarkReason::ArtifactDeleted.to_string());
        }
    }
    Ok(())
}

/// Returns the volumes of a worker, after `after` and up to `last`, whose marks are only in the
/// queue.
pub(crate) async fn queue_only_marks(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    after: Uuid,
    last: Uuid,
) -> Result<HashSet<Uuid>, DbErr> {
    let statement = Statement::from_sql_and_values(
        conn.get_database_backend(),
        "SELECT handle FROM sweep_queue
         WHERE worker_id = $1 AND handle > $2 AND handle <= $3 AND number IS NULL AND marked_at IS NOT NULL",
        [worker.uuid().into(), after.into(), last.into()],
    );
    conn.query_all_raw(statement).await?.iter().map(|row| row.try_get("", "handle")).collect()
}

/// Merges the mark of one volume into its row.
pub(crate) async fn merge_mark(
    conn: &impl ConnectionTrait,
    mut row: volume::Model,
) -> Result<volume::Model, DbErr> {
    merge_marks(conn, std::slice::from_mut(&mut row)).await?;
    Ok(row)
}
