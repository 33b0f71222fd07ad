//! Tombstones: the artifacts that are deleted, by when they are looked at next.
//!
//! A queue of its own, and no index of artifacts: to mark an artifact writes to few pages, however
//! many artifacts there are.
//!
//! Invariant: an artifact has a row here exactly while it is deleting. A change of that does both
//! in one transaction, behind the lock of the artifact's row. A transaction that waits for rows
//! here holds none that a holder of some waits for: they are locked last, or those that others have
//! locked are skipped.

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use uuid::Uuid;

use crate::db::ids;

/// Adds artifacts, which were just marked.
pub(crate) async fn add(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    look_at: i64,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "INSERT INTO tombstones (artifact_id, look_at) SELECT id, $2 FROM ({}) AS ids",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, artifacts), look_at.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Takes out an artifact that comes back.
pub(crate) async fn take_back(txn: &DatabaseTransaction, artifact: Uuid) -> Result<(), DbErr> {
    let sql = "DELETE FROM tombstones WHERE artifact_id = $1";
    let values = [artifact.into()];
    txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await.map(drop)
}
