//! Counts of the leases of workers, from the rows of the leases.

use std::collections::HashMap;

use sea_orm::{ConnectionTrait, DbErr, FromQueryResult, Statement};
use uuid::Uuid;

/// The live leases of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Number of leases that have not ended.
    pub(crate) leases: u32,
    /// Number of these leases that are not interruptible.
    pub(crate) uninterruptible: u32,
}

/// Maximum number of workers whose leases one statement counts.
pub(crate) const COUNTED_AT_ONCE: usize = 1000;

#[derive(FromQueryResult)]
struct LeaseCount {
    worker_id: Uuid,
    leases: i64,
    uninterruptible: i64,
}

/// Counts the live leases of workers.
pub(crate) async fn loads(db: &impl ConnectionTrait, workers: &[Uuid]) -> Result<HashMap<Uuid, Load>, DbErr> {
    if workers.is_empty() {
        return Ok(HashMap::new());
    }
    let places: Vec<_> = (1..=workers.len()).map(|number| format!("${number}")).collect();
    let sql = format!(
        "SELECT l.worker_id AS worker_id, COUNT(*) AS leases,
                CAST(SUM(CASE WHEN w.interruptible = TRUE THEN 0 ELSE 1 END) AS BIGINT) AS uninterruptible
         FROM leases l LEFT JOIN workloads w ON w.id = l.workload_id
         WHERE l.state <> 'ended' AND l.worker_id IN ({}) GROUP BY l.worker_id",
        places.join(", ")
    );
    let values = workers.iter().map(|worker| (*worker).into());
    let statement = Statement::from_sql_and_values(db.get_database_backend(), sql, values);
    let counted = LeaseCount::find_by_statement(statement).all(db).await?;
    let count = |number: i64| u32::try_from(number).unwrap_or(u32::MAX);
    let load =
        |row: &LeaseCount| Load { leases: count(row.leases), uninterruptible: count(row.uninterruptible) };
    Ok(counted.iter().map(|row| (row.worker_id, load(row))).collect())
}
