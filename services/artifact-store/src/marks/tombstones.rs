//! Tombstones: deleted artifacts that can be restored, by the time of their next check.
//!
//! It is a table instead of an index of `artifacts`, so that marking an artifact writes few pages,
//! however many artifacts there are.
//!
//! Invariant: an artifact has a row here exactly while its state is `deleting`. One transaction
//! changes both, with the artifact's row locked.
//!
//! To prevent deadlocks, a transaction locks rows here last, or skips locked ones.

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use uuid::Uuid;

use crate::db::ids;

/// Adds artifacts that were just marked.
pub(crate) async fn add(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    due_at: i64,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "INSERT INTO tombstones (artifact_id, due_at) SELECT id, $2 FROM ({}) AS ids",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, artifacts), due_at.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Removes the tombstone of a restored artifact.
pub(crate) async fn remove(txn: &DatabaseTransaction, artifact: Uuid) -> Result<(), DbErr> {
    let sql = "DELETE FROM tombstones WHERE artifact_id = $1";
    let values = [artifact.into()];
    txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await.map(drop)
}
