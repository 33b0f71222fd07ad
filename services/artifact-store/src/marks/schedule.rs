//! Looks at artifacts, asked for by each transaction that takes away what keeps one.
//!
//! It saves the time until the next look ([`crate::gc`]); nothing depends on it.

use domain::Timestamp;
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use uuid::Uuid;

use crate::db::ids;

/// Makes artifacts due of which something may just have let go. One that an owner keeps says nothing, and needs no look; what another
/// has locked is looked at a little later.
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
    // Deleted ones may have waited for the end of what was made from their replicas.
    for table in ["artifacts", "tombstones"] {
        let sql = format!(
            "WITH waiting AS (SELECT artifact_id FROM {table} WHERE artifact_id IN ({}) AND look_at > $2{})
             UPDATE {table} SET look_at = $2 WHERE artifact_id IN (SELECT artifact_id FROM waiting)",
            ids::query(backend, 1),
            ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
        );
        txn.execute_raw(Statement::from_sql_and_values(backend, sql, values.clone())).await?;
    }
    Ok(())
}
