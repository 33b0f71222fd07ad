//! Deadlines of workloads: queue, start and run timeouts.
//!
//! The start timeout counts from the grant of the lease until the process is about to start. If the
//! timeout passes first, the lease is stopped and the start is rejected, so a workload that exceeds
//! it has not run.

use std::time::Duration;

use domain::{LeaseId, Timestamp, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, ExprTrait, QueryFilter,
    QuerySelect, Statement,
};
use uuid::Uuid;

use super::{PENDING, Write, conclude, lock, save, stop};
use crate::db::entity::from_json;
use crate::db::entity::lease::{self, StopReason};
use crate::db::entity::workload::{self, State};
use crate::leases;
use crate::notify::changes::Effects;
use crate::outcome::Ending;

/// Assigned workloads with a start timeout, joined with their leases.
const STARTING: &str = "FROM workloads JOIN leases ON leases.id = workloads.lease_id
     WHERE workloads.state = 'assigned' AND workloads.start_timeout_us IS NOT NULL AND leases.state = 'granted'";

/// Returns workloads whose queue, start or run deadline has passed.
pub(crate) async fn overdue(db: &impl ConnectionTrait, now: Timestamp) -> Result<Vec<WorkloadId>, DbErr> {
    let waited = Expr::cust(PENDING)
        .and(workload::Column::QueueDeadline.is_not_null())
        .and(workload::Column::QueueDeadline.lte(now.0));
    let ran = workload::Column::RunDeadline.is_not_null().and(workload::Column::RunDeadline.lte(now.0));
    let mut overdue = Vec::new();
    for late in [waited, ran] {
        let ids = workload::Entity::find().select_only().column(workload::Column::Id).filter(late).limit(100);
        overdue.extend(ids.into_tuple::<Uuid>().all(db).await?.into_iter().map(WorkloadId::from_uuid));
    }
    let query = format!(
        "SELECT workloads.id {STARTING} AND leases.granted_at + workloads.start_timeout_us <= $1 LIMIT 100"
    );
    let late = Statement::from_sql_and_values(db.get_database_backend(), query, [now.0.into()]);
    for row in db.query_all_raw(late).await? {
        overdue.push(WorkloadId::from_uuid(row.try_get("", "id")?));
    }
    Ok(overdue)
}

/// Returns the earliest queue, start or run deadline.
pub(crate) async fn next_deadline(db: &impl ConnectionTrait) -> Result<Option<Timestamp>, DbErr> {
    let queue = workload::Entity::find()
        .select_only()
        .column_as(workload::Column::QueueDeadline.min(), "deadline")
        .filter(Expr::cust(PENDING))
        .filter(workload::Column::QueueDeadline.is_not_null());
    let run = workload::Entity::find()
        .select_only()
        .column_as(workload::Column::RunDeadline.min(), "deadline")
        .filter(workload::Column::RunDeadline.is_not_null());
    let mut next = None;
    for query in [queue, run] {
        let deadline = query.into_tuple::<Option<i64>>().one(db).await?.flatten();
        next = [next, deadline].into_iter().flatten().min();
    }
    let query = format!("SELECT MIN(leases.granted_at + workloads.start_timeout_us) AS deadline {STARTING}");
    let start = db.query_one_raw(Statement::from_string(db.get_database_backend(), query)).await?;
    let start: Option<i64> = start.map(|row| row.try_get("", "deadline")).transpose()?.flatten();
    Ok([next, start].into_iter().flatten().min().map(Timestamp))
}

/// Ends or stops a workload whose deadline has passed.
pub(crate) async fn time_out(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    grace: Duration,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(mut row) = lock(txn, id).await? else { return Ok(()) };
    let passed = |deadline: Option<i64>| deadline.is_some_and(|deadline| deadline <= now.0);
    if row.state == State::Pending && passed(row.queue_deadline) {
        let ending = Ending::queue_timeout(&from_json::<Vec<_>>(&row.waiting_for)?);
        return conclude(txn, row, ending, None, now, effects).await;
    }
    if row.state == State::Assigned
        && let Some(timeout) = row.start_timeout_us
        && let Some(lease) = row.lease_id
        && let Some(lease) = leases::find(txn, LeaseId::from_uuid(lease)).await?
        && lease.state == lease::State::Granted
        && passed(lease.granted_at.checked_add(timeout))
    {
        // No process runs, so there is no grace period.
        return leases::stop(txn, lease, StopReason::StartTimeout, Duration::ZERO, effects).await;
    }
    if passed(row.run_deadline) {
        stop(txn, &row, StopReason::RunTimeout, grace, effects).await?;
        // The lease carries the stop from here on.
        row.run_deadline = None;
        save(txn, row, Write::Update, None, now, effects).await?;
    }
    Ok(())
}
