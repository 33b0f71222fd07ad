//! Release of driven leases and locking of workers, in one round trip on PostgreSQL.

use std::collections::HashSet;
use std::time::Duration;

use db::rows;
use domain::{LeaseId, Timestamp, WorkerId};
use sea_orm::{
    ActiveEnum, ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, FromQueryResult, Statement,
};
use uuid::Uuid;

use crate::db::entity::STATE_OF_NAMED;
use crate::db::entity::lease::{ENDED_LEASE_COLUMNS, EndedBy, EndedLease, StopReason};
use crate::workers::load_counters::{COUNTS, Counts, counts, lock_counts, locking};

/// Time between TERM and KILL of processes that run under a released lease.
const RELEASE_GRACE: Duration = Duration::from_secs(10);

/// Releases these driven leases, and locks the rows of their workers and of `others`. A lease that
/// is in use must stop first, and any other ends. Leases are locked before workers, each in the
/// order of their ids. Returns the leases that were granted before, and the counters of the
/// workers.
pub(super) async fn release_and_lock(
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
    let grace = i64::try_from(RELEASE_GRACE.as_micros()).unwrap_or(i64::MAX);
    let ended_by = EndedBy::Reported.to_value().into();
    let values = [leases, now.0.into(), ended_by, StopReason::Released.into(), grace.into()];
    if backend != DbBackend::Postgres {
        let releasing = Statement::from_sql_and_values(backend, releasing(backend), values);
        let released = EndedLease::find_by_statement(releasing).all(txn).await?;
        return Ok((released, lock_counts(txn, workers).await?));
    }
    // The first part of the UNION is executed completely before the second. Otherwise two
    // transactions could deadlock.
    let query = format!(
        "WITH released AS ({}), locked AS ({})
         SELECT released.*, {} FROM released UNION ALL SELECT {}, locked.* FROM locked",
        releasing(backend),
        locking(backend, &counts(backend), values.len() + 1),
        COUNTS.map(|name| format!("NULL AS {name}")).join(", "),
        ENDED_LEASE_COLUMNS.map(|_| "NULL").join(", "),
    );
    let values = values.into_iter().chain([rows::ids(workers)?]);
    let (mut released, mut locked) = (Vec::with_capacity(releases.len()), Vec::new());
    for row in txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await? {
        match row.try_get::<Option<Uuid>>("", "lease_id")? {
            Some(_) => released.push(EndedLease::from_query_result(&row, "")?),
            None => locked.push(Counts::from_query_result(&row, "")?),
        }
    }
    Ok((released, locked))
}

/// Returns the statement that releases the granted driven leases among the ids `$1`.
fn releasing(backend: DbBackend) -> String {
    format!(
        "UPDATE leases SET state = CASE WHEN in_use THEN 'ending' ELSE 'ended' END,
         ended_at = CASE WHEN in_use THEN ended_at ELSE $2 END, ended_by = CASE WHEN in_use THEN ended_by ELSE $3 END,
         stop_reason = CASE WHEN in_use THEN $4 ELSE stop_reason END,
         stop_grace_us = CASE WHEN in_use THEN $5 ELSE stop_grace_us END
         WHERE id IN (SELECT id FROM leases WHERE id {} AND {STATE_OF_NAMED} = 'granted' AND workload_id IS NULL ORDER BY id {})
         RETURNING {}",
        rows::among(backend, 1),
        rows::lock(backend, "FOR UPDATE"),
        ENDED_LEASE_COLUMNS.join(", ")
    )
}
