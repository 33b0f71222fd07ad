//! The volumes that are garbage, by their workers: what a gateway shall destroy, and what it was told to.
//!
//! A queue of its own, and no index of volumes: to mark a volume, or to forget one, writes to few pages, however many volumes there are.
//!
//! Invariant: a volume has a row here exactly while it is destroying or sweeping. Whoever changes that does both in one transaction, behind the lock
//! of the worker's row: shared, or alone to hand out.

use domain::WorkerId;
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, FromQueryResult, Statement, Value};
use uuid::Uuid;

use crate::ids;

/// Something that was marked.
#[derive(Debug, FromQueryResult)]
pub(crate) struct Marked {
    pub(crate) worker_id: Uuid,
    pub(crate) handle: Uuid,
}

/// Marks volumes by an UPDATE of theirs, and adds them.
///
/// `with`: the queries by which the UPDATE finds them, as they stand before it, or nothing.
pub(crate) async fn mark(
    txn: &DatabaseTransaction,
    with: &str,
    update: &str,
    values: impl IntoIterator<Item = Value>,
) -> Result<Vec<Marked>, DbErr> {
    let backend = txn.get_database_backend();
    let and = if with.is_empty() { "" } else { "," };
    let sql = match backend {
        DbBackend::Postgres => format!(
            "WITH {with}{and} marked AS ({update} RETURNING volumes.worker_id, volumes.handle),
                  added AS (INSERT INTO marks (worker_id, handle) SELECT worker_id, handle FROM marked)
             SELECT worker_id, handle FROM marked"
        ),
        _ => {
            let with = if with.is_empty() { String::new() } else { format!("WITH {with}") };
            format!("{with} {update} RETURNING worker_id, handle")
        }
    };
    let marked = Statement::from_sql_and_values(backend, sql, values);
    let marked = Marked::find_by_statement(marked).all(txn).await?;
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
    let volumes: Vec<_> = volumes.into_iter().collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let sql = format!(
        "INSERT INTO marks (worker_id, handle) SELECT worker_id, handle FROM volumes WHERE handle IN ({})",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, volumes)];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Takes out volumes of a worker, which are forgotten.
pub(crate) async fn remove(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let volumes: Vec<_> = volumes.into_iter().collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let sql = format!("DELETE FROM marks WHERE worker_id = $2 AND handle IN ({})", ids::query(backend, 1));
    let values = [ids::value(backend, volumes), worker.uuid().into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Takes out volumes whose marks are taken back.
pub(crate) async fn take_back(
    txn: &DatabaseTransaction,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let volumes: Vec<_> = volumes.into_iter().collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let sql = format!(
        "DELETE FROM marks WHERE (worker_id, handle) IN (SELECT worker_id, handle FROM volumes WHERE handle IN ({}))",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, volumes)];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Says of volumes of a worker that its gateway is told of them, or told again, under this number.
pub(crate) async fn tell(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    volumes: impl IntoIterator<Item = Uuid>,
    number: i64,
) -> Result<(), DbErr> {
    let volumes: Vec<_> = volumes.into_iter().collect();
    if volumes.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let sql = format!(
        "UPDATE marks SET number = $3 WHERE worker_id = $2 AND handle IN ({})",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, volumes), worker.uuid().into(), number.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}
