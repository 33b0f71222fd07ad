//! Release of driven leases and locking of workers, in one round trip on PostgreSQL.

use std::collections::HashSet;

use db::rows;
use domain::{LeaseId, Timestamp, WorkerId};
use sea_orm::{
    ActiveEnum, ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, FromQueryResult, Statement,
};
use uuid::Uuid;

use crate::db::entity::STATE_OF_NAMED;
use crate::db::entity::lease::{ENDED_LEASE_COLUMNS, EndedBy, EndedLease};
use crate::workers::load_counters::{COUNTS, Counts, counts, lock_counts, locking};

/// Ends these driven leases, and locks the rows of their workers and of `others`. Leases are locked
/// before workers, each in the order of their ids. Returns the leases that had not ended before,
/// and the counters of the workers.
pub(super) async fn end_and_lock(
    txn: &DatabaseTransaction,
    releases: &[(LeaseId, WorkerId)],
    others: impl Iterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(Vec<EndedLease>, Vec<Counts>), DbErr> {
    let workers: HashSet<_> = others.chain(releases.iter().map(|(_, worker)| worker.uuid())).collect();
    if releases.is_empty() {
        return Ok((Vec::new(), lock_counts(txn, workers).await?));
    }
    let backend = txn.get_database_backend();
    let leases = rows::ids(releases.iter().map(|(lease, _)| lease.uuid()))?;
    let values = [leases, now.0.into(), EndedBy::Reported.to_value().into()];
    if backend != DbBackend::Postgres {
        let ending = Statement::from_sql_and_values(backend, ending(backend), values);
        let ended = EndedLease::find_by_statement(ending).all(txn).await?;
        return Ok((ended, lock_counts(txn, workers).await?));
    }
    // The first part of the UNION is executed completely before the second. Otherwise two
    // transactions could deadlock.
    let query = format!(
        "WITH ended AS ({}), locked AS ({})
         SELECT ended.*, {} FROM ended UNION ALL SELECT {}, locked.* FROM locked",
        ending(backend),
        locking(backend, &counts(backend), values.len() + 1),
        COUNTS.map(|name| format!("NULL AS {name}")).join(", "),
        ENDED_LEASE_COLUMNS.map(|_| "NULL").join(", "),
    );
    let values = values.into_iter().chain([rows::ids(workers)?]);
    let (mut ended, mut locked) = (Vec::with_capacity(releases.len()), Vec::new());
    for row in txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await? {
        match row.try_get::<Option<Uuid>>("", "lease_id")? {
            Some(_) => ended.push(EndedLease::from_query_result(&row, "")?),
            None => locked.push(Counts::from_query_result(&row, "")?),
        }
    }
    Ok((ended, locked))
}

/// Returns the statement that ends the live driven leases among the ids `$1`.
fn ending(backend: DbBackend) -> String {
    format!(
        "UPDATE leases SET state = 'ended', ended_at = $2, ended_by = $3
         WHERE id IN (SELECT id FROM leases WHERE id {} AND {STATE_OF_NAMED} <> 'ended' AND workload_id IS NULL ORDER BY id {})
         RETURNING {}",
        rows::among(backend, 1),
        rows::lock(backend, "FOR UPDATE"),
        ENDED_LEASE_COLUMNS.join(", ")
    )
}
