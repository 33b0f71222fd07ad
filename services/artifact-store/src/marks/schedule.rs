//! Scheduling of checks of artifacts.
//!
//! Each transaction that removes a reference to an artifact makes the artifact due. This only
//! shortens the time until the next check ([`crate::gc`]). Nothing depends on it.

use domain::Timestamp;
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use uuid::Uuid;

use crate::db::ids;

/// Makes artifacts due whose references may have ended.
///
/// An artifact with a live owner has no scheduled check and needs none. A locked artifact is
/// skipped, and checked a little later.
pub(crate) async fn make_due(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let artifacts: Vec<_> = artifacts.into_iter().collect();
    if artifacts.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let values = [ids::value(backend, artifacts), now.0.into()];
    // A deleted artifact may have waited for the deletion of children of its replicas.
    for table in ["artifacts", "tombstones"] {
        let sql = format!(
            "WITH waiting AS (SELECT artifact_id FROM {table} WHERE artifact_id IN ({}) AND due_at > $2{})
             UPDATE {table} SET due_at = $2 WHERE artifact_id IN (SELECT artifact_id FROM waiting)",
            ids::query(backend, 1),
            ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
        );
        txn.execute_raw(Statement::from_sql_and_values(backend, sql, values.clone())).await?;
    }
    Ok(())
}

/// Makes open artifacts due whose upload may have been given up. Unlike others, they are checked
/// although they have a live owner. A locked artifact is skipped, and stays until its owner lets
/// go.
pub(crate) async fn make_open_due(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let artifacts: Vec<_> = artifacts.into_iter().collect();
    if artifacts.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let sql = format!(
        "WITH open AS (SELECT artifact_id FROM artifacts WHERE artifact_id IN ({}) AND state = 'open'{})
         UPDATE artifacts SET due_at = $2 WHERE artifact_id IN (SELECT artifact_id FROM open)",
        ids::query(backend, 1),
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let values = [ids::value(backend, artifacts), now.0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}
