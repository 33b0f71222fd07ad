//! Removal of workers: deletion of all rows of a worker that is gone for good.
//!
//! Invariant: unless forced, no kept artifact loses its last replica, and no orphan is deleted
//! without a decision.
//!
//! The transaction locks the worker's row, so that no session speaks for the worker meanwhile. It
//! also locks the artifacts with replicas there, so that no other call drops another replica or
//! forgets another worker because these replicas exist.

use std::fmt;

use domain::{ArtifactId, Timestamp, WorkerId};
use sea_orm::sea_query::{Condition, Expr, ExprTrait};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    QueryOrder, QuerySelect, Statement,
};
use uuid::Uuid;

use crate::caches;
use crate::db::entity::{State, artifact, container, orphan, volume, worker};
use crate::db::ids;
use crate::inventory::imports;
use crate::inventory::losses::{self, NewLoss};
use crate::marks::references::{self, ArtifactRow};
use crate::marks::sweep_queue;
use crate::policy::garbage::{self, Policy, Verdict};
use crate::policy::retention::REMAINS_RECHECK_INTERVAL;

/// Number of rows that one query reads.
const PAGE: u64 = 500;

/// Limit of the count of artifacts that would be lost.
const MAX_COUNTED: u64 = 1000;

/// Number of these artifacts that the error names.
const NAMED: usize = 5;

/// Numbers of deleted rows of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct RemovedRows {
    pub(crate) volumes: u64,
    pub(crate) containers: u64,
}

/// Kept artifacts whose bytes are on one worker only.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LastReplicas {
    /// Number of artifacts, at most [`MAX_COUNTED`].
    pub(crate) count: u64,
    /// The first few artifacts.
    pub(crate) some: Vec<ArtifactId>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ForgetError {
    #[error("the worker has the last replica of {0}")]
    LastReplica(LastReplicas),
    #[error("the worker has orphans. Adopt or purge them first")]
    HoldsOrphans,
    /// Result of a successful check. It is an error, so that the transaction is rolled back.
    #[error("worker {0} may be forgotten")]
    OnlyChecked(WorkerId),
    #[error("database failed while forgetting a worker")]
    Database(#[from] DbErr),
}

impl fmt::Display for LastReplicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => f.write_str("a kept artifact")?,
            MAX_COUNTED => write!(f, "{MAX_COUNTED} or more kept artifacts")?,
            count => write!(f, "{count} kept artifacts")?,
        }
        let some: Vec<_> = self.some.iter().map(ToString::to_string).collect();
        let more = if self.count > self.some.len() as u64 { " and others" } else { "" };
        write!(f, ": {}{more}", some.join(", "))
    }
}

/// Checks whether [`forget_worker`] would succeed. The transaction must not be committed.
pub(crate) async fn check(
    txn: &DatabaseTransaction,
    id: WorkerId,
    force: bool,
    now: Timestamp,
    policy: &Policy,
) -> Result<RemovedRows, ForgetError> {
    prepare_removal(txn, id, force, now, policy).await?;
    Err(ForgetError::OnlyChecked(id))
}

/// Forgets a worker and everything that it held.
pub(crate) async fn forget_worker(
    txn: &DatabaseTransaction,
    id: WorkerId,
    force: bool,
    now: Timestamp,
    policy: &Policy,
) -> Result<RemovedRows, ForgetError> {
    if !prepare_removal(txn, id, force, now, policy).await? {
        return Ok(RemovedRows::default());
    }
    lock_unrecorded_losses(txn, id).await?;
    record_losses(txn, id, now).await?;
    sweep_queue::forget_worker(txn, id).await?;
    let volumes =
        volume::Entity::delete_many().filter(volume::Column::WorkerId.eq(id.uuid())).exec(txn).await?;
    let containers =
        container::Entity::delete_many().filter(container::Column::WorkerId.eq(id.uuid())).exec(txn).await?;
    orphan::Entity::delete_many().filter(orphan::Column::WorkerId.eq(id.uuid())).exec(txn).await?;
    worker::Entity::delete_by_id(id.uuid()).exec(txn).await?;
    make_attempts_due(txn, id, now).await?;
    Ok(RemovedRows { volumes: volumes.rows_affected, containers: containers.rows_affected })
}

/// Makes attempts due that waited for the worker to delete their remains. Locked attempts are
/// skipped, and checked later.
async fn make_attempts_due(txn: &DatabaseTransaction, id: WorkerId, now: Timestamp) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "WITH waiting AS (SELECT attempt_id FROM attempts
                          WHERE due_at > $2 AND due_at <= $3 AND worker_id = $1{})
         UPDATE attempts SET due_at = $2 WHERE attempt_id IN (SELECT attempt_id FROM waiting)",
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let values = [id.uuid().into(), now.0.into(), (now + REMAINS_RECHECK_INTERVAL).0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}

/// Locks a worker and the artifacts with replicas there, deletes its imports, and rejects the
/// removal if an artifact or orphan would be lost. `false` if the worker is unknown.
async fn prepare_removal(
    txn: &DatabaseTransaction,
    id: WorkerId,
    force: bool,
    now: Timestamp,
    policy: &Policy,
) -> Result<bool, ForgetError> {
    if worker::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await?.is_none() {
        return Ok(false);
    }
    if !force && holds_orphans(txn, id).await? {
        return Err(ForgetError::HoldsOrphans);
    }
    // A check alone is rolled back.
    let released = imports::forget_worker(txn, id).await?;
    caches::release_artifacts(txn, released, now).await?;
    lock_artifacts(txn, id).await?;
    if !force {
        // Without the references of the worker's own imports, which are deleted by now.
        let alone = last_replicas(txn, id, now, policy).await?;
        if alone.count > 0 {
            return Err(ForgetError::LastReplica(alone));
        }
    }
    Ok(true)
}

async fn holds_orphans(txn: &DatabaseTransaction, id: WorkerId) -> Result<bool, DbErr> {
    let row = orphan::Entity::find().filter(orphan::Column::WorkerId.eq(id.uuid())).one(txn).await?;
    Ok(row.is_some())
}

/// Query of artifacts with a replica on worker `$1`.
const ARTIFACTS_HERE: &str = "SELECT v.artifact_id FROM volumes v
     WHERE v.worker_id = $1 AND v.purpose = 'replica' AND v.complete = TRUE AND v.state IN ('created', 'unconfirmed')";

#[derive(FromQueryResult)]
struct Id {
    artifact_id: Uuid,
}

/// Locks the artifacts that have a replica on a worker.
async fn lock_artifacts(txn: &DatabaseTransaction, id: WorkerId) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    if backend == sea_orm::DbBackend::Sqlite {
        // SQLite has one writer at a time.
        return Ok(());
    }
    let sql = format!(
        "SELECT artifact_id FROM artifacts
         WHERE state = 'sealed' AND artifact_id IN ({ARTIFACTS_HERE}) ORDER BY artifact_id FOR UPDATE"
    );
    let statement = Statement::from_sql_and_values(backend, sql, [id.uuid().into()]);
    Id::find_by_statement(statement).all(txn).await.map(|_| ())
}

/// Returns the kept artifacts whose bytes are neither in the store nor confirmed on another worker.
async fn last_replicas(
    txn: &DatabaseTransaction,
    id: WorkerId,
    now: Timestamp,
    policy: &Policy,
) -> Result<LastReplicas, DbErr> {
    let sql = format!(
        "SELECT a.artifact_id AS artifact_id FROM artifacts a
         WHERE a.artifact_id > $2 AND a.state = 'sealed' AND a.in_store = FALSE AND a.artifact_id IN ({ARTIFACTS_HERE})
           AND NOT EXISTS (SELECT 1 FROM volumes o WHERE o.artifact_id = a.artifact_id AND o.worker_id <> $1
                           AND o.purpose = 'replica' AND o.complete = TRUE AND o.state = 'created')
         ORDER BY a.artifact_id LIMIT {PAGE}"
    );
    let (mut alone, mut after) = (LastReplicas::default(), Uuid::nil());
    loop {
        let values = [id.uuid().into(), after.into()];
        let statement = Statement::from_sql_and_values(txn.get_database_backend(), &sql, values);
        let ids: Vec<_> =
            Id::find_by_statement(statement).all(txn).await?.into_iter().map(|id| id.artifact_id).collect();
        let Some(last) = ids.last().filter(|_| alone.count < MAX_COUNTED) else { return Ok(alone) };
        after = *last;
        let rows = artifact::Entity::find().filter(artifact::Column::ArtifactId.is_in(ids)).all(txn).await?;
        let rows: Vec<_> = rows.iter().map(ArtifactRow::from).collect();
        let facts = references::artifacts(txn, &rows, now).await?;
        for (row, facts) in rows.iter().zip(&facts) {
            if alone.count < MAX_COUNTED && matches!(garbage::artifact(facts, now, policy), Verdict::Keep(_))
            {
                alone.count += 1;
                if alone.some.len() < NAMED {
                    alone.some.push(ArtifactId::from_uuid(row.artifact_id));
                }
            }
        }
    }
}

/// Waits for a collector that records losses of the worker, and keeps others out, so that each loss
/// is recorded once.
async fn lock_unrecorded_losses(txn: &DatabaseTransaction, id: WorkerId) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    for table in ["volumes", "containers"] {
        let sql = format!(
            "SELECT handle FROM {table} WHERE worker_id = $1 AND state = 'lost' AND loss_noticed = FALSE{}",
            ids::lock(backend, " FOR UPDATE")
        );
        txn.query_all_raw(Statement::from_sql_and_values(backend, sql, [id.uuid().into()])).await?;
    }
    Ok(())
}

/// Records as lost the items that were present, and the lost items whose losses were not recorded
/// yet.
async fn record_losses(txn: &DatabaseTransaction, id: WorkerId, now: Timestamp) -> Result<(), DbErr> {
    let mut after = Uuid::nil();
    loop {
        let lost = Condition::any()
            .add(container::Column::State.eq(State::Created))
            .add(container::Column::State.eq(State::Lost).and(container::Column::LossNoticed.eq(false)));
        let rows = container::Entity::find()
            .filter(container::Column::WorkerId.eq(id.uuid()))
            .filter(container::Column::Handle.gt(after))
            .filter(lost)
            .order_by_asc(container::Column::Handle)
            .limit(PAGE)
            .all(txn)
            .await?;
        let Some(last) = rows.last() else { break };
        after = last.handle;
        losses::append(txn, &rows.iter().map(NewLoss::from).collect::<Vec<_>>(), now).await?;
    }
    let mut after = Uuid::nil();
    loop {
        let lost = Condition::any()
            .add(volume::Column::State.is_in(State::PRESENT))
            .add(volume::Column::State.eq(State::Lost).and(volume::Column::LossNoticed.eq(false)));
        let rows = volume::Entity::find()
            .filter(volume::Column::WorkerId.eq(id.uuid()))
            .filter(volume::Column::Handle.gt(after))
            .filter(lost)
            .filter(Expr::cust(sweep_queue::unmarked("volumes")))
            .order_by_asc(volume::Column::Handle)
            .limit(PAGE)
            .all(txn)
            .await?;
        let Some(last) = rows.last() else { return Ok(()) };
        after = last.handle;
        losses::append(txn, &rows.iter().map(NewLoss::from).collect::<Vec<_>>(), now).await?;
    }
}
