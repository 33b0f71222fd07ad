//! The sweep queue: the volumes that are garbage, by their workers, and which of them a gateway was
//! told to destroy.
//!
//! A queue of its own, and no index of volumes: to mark a volume, or to forget one, writes to few
//! pages, however many volumes there are.
//!
//! Invariant: a volume has a row here exactly while it is garbage. A change of that is made behind
//! the lock of the worker's row: shared, or alone to hand out.
//!
//! A volume that is marked for a reason of its own says so in its row, too: it is `destroying`, and
//! `sweeping` once its gateway was told. A complete replica whose artifact is deleted goes with it:
//! it has the row here, with `marked_at`, and its own row stays as it was until its gateway is
//! told, so that to mark it does not touch the page that it lies in. A transaction that takes a
//! reference to a replica has locked its artifact, and sees there that it is deleted. A reader of
//! volumes has the mark read into their rows ([`show`]), or asks for those without one
//! ([`without`]).
//!
//! Invariant: such a mark exists only while the artifact is deleted. A transaction that adds or
//! takes back one has locked the artifact.

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

/// Something that was marked.
#[derive(Debug, FromQueryResult)]
pub(crate) struct MarkedVolume {
    pub(crate) worker_id: Uuid,
    pub(crate) handle: Uuid,
}

/// Marks volumes by an UPDATE of theirs, and adds them.
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

/// Adds volumes that were just marked.
pub(crate) async fn add(
    txn: &DatabaseTransaction,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let sql = "INSERT INTO sweep_queue (worker_id, handle) SELECT worker_id, handle FROM volumes WHERE handle IN (IDS)";
    change(txn, sql, volumes, []).await
}

/// Marks complete replicas that go with their artifacts.
pub(crate) async fn add_with_artifacts(
    txn: &DatabaseTransaction,
    replicas: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let sql = "INSERT INTO sweep_queue (worker_id, handle, marked_at)
         SELECT worker_id, handle, $2 FROM volumes WHERE handle IN (IDS)";
    change(txn, sql, replicas, [now.0.into()]).await
}

/// Takes out volumes whose marks are taken back.
pub(crate) async fn take_back(
    txn: &DatabaseTransaction,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let sql = "DELETE FROM sweep_queue
         WHERE (worker_id, handle) IN (SELECT worker_id, handle FROM volumes WHERE handle IN (IDS))";
    change(txn, sql, volumes, []).await
}

/// Takes out all volumes of a worker that is gone for good.
pub(crate) async fn forget_worker(txn: &DatabaseTransaction, worker: WorkerId) -> Result<(), DbErr> {
    let sql = "DELETE FROM sweep_queue WHERE worker_id = $1";
    let values = [worker.uuid().into()];
    txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await.map(drop)
}

/// Says of volumes of a worker that its gateway is told of them, or told again, under this number.
pub(crate) async fn tell(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: impl IntoIterator<Item = Uuid>,
    number: i64,
) -> Result<(), DbErr> {
    let sql = "UPDATE sweep_queue SET number = $3 WHERE worker_id = $2 AND handle IN (IDS)";
    change(txn, sql, volumes, [worker.uuid().into(), number.into()]).await
}

/// Runs a statement whose value `$1` are volumes, as `IDS`, unless there are none.
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

/// The condition that `volume`, as a statement calls it, is no garbage.
pub(crate) fn without(volume: &str) -> String {
    format!(
        "NOT EXISTS (SELECT 1 FROM sweep_queue WHERE sweep_queue.worker_id = {volume}.worker_id AND sweep_queue.handle = {volume}.handle)"
    )
}

/// The condition that a row of `volumes` is in this state, with what its mark says.
pub(crate) fn is_shown_as(state: State) -> Condition {
    let is = Condition::all().add(volume::Column::State.eq(state));
    match state {
        State::Sweeping => is,
        State::Destroying => Condition::all()
            .add(Expr::cust("volumes.handle IN (SELECT handle FROM sweep_queue WHERE number IS NULL)")),
        _ => is.add(Expr::cust(without("volumes"))),
    }
}

/// The state of a row of `volumes`, with what its mark says.
pub(crate) fn shown_state() -> String {
    let unmarked = without("volumes");
    format!("CASE WHEN state IN ('destroying', 'sweeping') OR {unmarked} THEN state ELSE 'destroying' END")
}

/// Has rows of volumes say what their marks say.
pub(crate) async fn show(conn: &impl ConnectionTrait, rows: &mut [volume::Model]) -> Result<(), DbErr> {
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
            row.marked_why = Some(MarkReason::ArtifactDeleted.to_string());
        }
    }
    Ok(())
}

/// Which volumes of a worker behind `after`, up to `last`, are garbage though their rows do not say
/// so.
pub(crate) async fn beside_rows(
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

/// Has the row of one volume say so.
pub(crate) async fn shown(
    conn: &impl ConnectionTrait,
    mut row: volume::Model,
) -> Result<volume::Model, DbErr> {
    show(conn, std::slice::from_mut(&mut row)).await?;
    Ok(row)
}
