//! Marks of volumes and containers as garbage.
//!
//! A mark sets the state `destroying`, or is only a row of the sweep queue ([`sweep_queue`]).
//! [`crate::inventory::sweep`] hands marked items to gateways for deletion.
//!
//! The collector calls it, and so do calls that delete something.
//!
//! Invariant: a transaction that marks has locked the worker's row ([`lock_workers`]), so that no
//! report begins between a mark and its commit.

pub(crate) mod cache_uses;
pub(crate) mod deletion_log;
pub(crate) mod references;
pub(crate) mod schedule;
pub(crate) mod sweep_queue;
pub(crate) mod tombstones;

use std::collections::HashSet;
use std::fmt;

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    Statement, Value,
};
use uuid::Uuid;

use crate::db::entity::{DeletionKind, State, container, volume};
use crate::db::ids;
use crate::marks::sweep_queue::MarkedVolume;

/// Query of the sequence of a volume's worker. Requires a lock on the worker's row.
const SEQUENCE: &str = "(SELECT workers.sequence FROM workers WHERE workers.worker_id = volumes.worker_id)";

/// Marks unmarked volumes, and returns their workers. Other volumes may then replace them.
pub(crate) async fn mark_volumes(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    Ok(workers_of(&mark_volumes_returning(txn, handles, why, now).await?))
}

/// Marks unmarked volumes, and returns the volumes that it marked. Other volumes may then replace
/// them.
pub(crate) async fn mark_volumes_returning(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<MarkedVolume>, DbErr> {
    lock_workers_of::<volume::Entity>(txn, handles).await?;
    let besides = ", marked_from = volumes.state, given_up = TRUE";
    mark_rows::<volume::Entity>(txn, handles, why, now, besides).await
}

fn workers_of(marked: &[MarkedVolume]) -> Vec<WorkerId> {
    let workers: HashSet<_> = marked.iter().map(|row| row.worker_id).collect();
    workers.into_iter().map(WorkerId::from_uuid).collect()
}

/// Marks unmarked volumes of ended attempts, and returns their workers. The caller has locked the
/// workers. No call replaces volumes of an ended attempt.
pub(crate) async fn mark_volumes_of_ended_attempts(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    let besides = ", marked_from = volumes.state";
    Ok(workers_of(&mark_rows::<volume::Entity>(txn, handles, why, now, besides).await?))
}

/// Marks unmarked containers, and returns their workers.
pub(crate) async fn mark_containers(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    lock_workers_of::<container::Entity>(txn, handles).await?;
    mark_containers_of_locked_workers(txn, handles, why, now).await
}

/// Marks unmarked containers whose workers the caller has locked, and returns their workers.
pub(crate) async fn mark_containers_of_locked_workers(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    Ok(workers_of(&mark_rows::<container::Entity>(txn, handles, why, now, "").await?))
}

/// Locks the workers of some rows, so that their sequences do not change.
async fn lock_workers_of<E: Sweepable>(txn: &DatabaseTransaction, handles: &[Uuid]) -> Result<(), DbErr> {
    if handles.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let of_rows = format!("SELECT worker_id FROM {} WHERE handle IN ({})", E::TABLE, ids::query(backend, 1));
    lock_workers(txn, &of_rows, [ids::value(backend, handles.iter().copied())], LockWait::Block)
        .await
        .map(drop)
}

/// Marks rows of a table whose workers are locked, and makes the additional assignments `besides`.
async fn mark_rows<E: Sweepable>(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    why: impl fmt::Display,
    now: Timestamp,
    besides: &str,
) -> Result<Vec<MarkedVolume>, DbErr> {
    if handles.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let table = E::TABLE;
    let of_handles = format!("{table}.handle IN ({})", ids::query(backend, 1));
    let handles = ids::value(backend, handles.iter().copied());
    // A join, because a subquery would run for each row.
    let update = format!(
        "UPDATE {table} SET state = 'destroying', judged_after = workers.sequence,
                            mark_reason = $2, marked_at = $3{besides}
         FROM workers
         WHERE workers.worker_id = {table}.worker_id AND {of_handles}
           AND {table}.state NOT IN ('destroying', 'sweeping')"
    );
    let values = [handles, why.to_string().into(), now.0.into()];
    if E::HAS_QUEUE {
        sweep_queue::mark(txn, &update, values).await
    } else {
        let update = format!("{update} RETURNING {table}.worker_id, {table}.handle");
        MarkedVolume::find_by_statement(Statement::from_sql_and_values(backend, update, values))
            .all(txn)
            .await
    }
}

/// Removes marks of volumes that were not handed out.
///
/// No earlier report judges them. The transfer of such a volume is over. If it is lost, the loss is
/// noticed again.
pub(crate) async fn unmark_volumes(txn: &DatabaseTransaction, handles: &[Uuid]) -> Result<(), DbErr> {
    if handles.is_empty() {
        return Ok(());
    }
    sweep_queue::remove(txn, handles.iter().copied()).await?;
    // A replica that was marked with its artifact still has its previous state.
    let before = "CASE WHEN state = 'destroying' THEN marked_from ELSE state END";
    volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::cust(before))
        .col_expr(volume::Column::GivenUp, Expr::value(false))
        .col_expr(volume::Column::JudgedAfter, Expr::cust(SEQUENCE))
        .col_expr(volume::Column::MarkReason, Expr::value(None::<String>))
        .col_expr(volume::Column::MarkedAt, Expr::value(None::<i64>))
        .col_expr(volume::Column::MarkedFrom, Expr::value(None::<String>))
        .col_expr(volume::Column::TransferId, Expr::value(None::<Uuid>))
        .col_expr(volume::Column::ClaimedUntil, Expr::value(None::<i64>))
        .col_expr(volume::Column::LossNoticed, Expr::value(false))
        .filter(ids::among(txn.get_database_backend(), "handle", handles.iter().copied()))
        .filter(volume::Column::State.ne(State::Sweeping))
        .exec(txn)
        .await
        .map(|_| ())
}

/// A table of items on workers that gateways delete: volumes or containers.
pub(crate) trait Sweepable: EntityTrait {
    const HANDLE: Self::Column;
    const WORKER_ID: Self::Column;
    const STATE: Self::Column;
    const JUDGED_AFTER: Self::Column;
    /// Whether marked rows are also in the queue [`sweep_queue`].
    const HAS_QUEUE: bool;
    const LOST_AT: Self::Column;
    const LOSS_NOTICED: Self::Column;
    /// Why it is lost, if a gateway may report that.
    const LOSS_REASON: Option<Self::Column>;

    const TABLE: &str;
    const KIND: DeletionKind;

    fn handle(row: &Self::Model) -> Uuid;
}

macro_rules! sweepable {
    ($($table:ident: $name:literal, $kind:ident, $has_queue:literal, $loss_reason:expr;)+) => {$(
        impl Sweepable for $table::Entity {
            const HANDLE: Self::Column = $table::Column::Handle;
            const WORKER_ID: Self::Column = $table::Column::WorkerId;
            const STATE: Self::Column = $table::Column::State;
            const JUDGED_AFTER: Self::Column = $table::Column::JudgedAfter;
            const HAS_QUEUE: bool = $has_queue;
            const LOST_AT: Self::Column = $table::Column::LostAt;
            const LOSS_NOTICED: Self::Column = $table::Column::LossNoticed;
            const LOSS_REASON: Option<Self::Column> = $loss_reason;

            const TABLE: &str = $name;
            const KIND: DeletionKind = DeletionKind::$kind;

            fn handle(row: &Self::Model) -> Uuid {
                row.handle
            }
        }
    )+};
}

sweepable! {
    volume: "volumes", Volume, true, Some(volume::Column::LossReason);
    container: "containers", Container, false, None;
}

/// Whether a query waits for rows that another transaction has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockWait {
    Block,
    SkipLocked,
}

/// Locks workers in shared mode, so that no report begins between a mark and its commit.
///
/// `workers` is a query of worker ids. Returns the locked workers.
pub(crate) async fn lock_workers(
    txn: &DatabaseTransaction,
    workers: &str,
    values: impl IntoIterator<Item = Value>,
    wait: LockWait,
) -> Result<HashSet<Uuid>, DbErr> {
    let backend = txn.get_database_backend();
    let lock = match wait {
        LockWait::Block => " FOR SHARE",
        LockWait::SkipLocked => " FOR SHARE SKIP LOCKED",
    };
    let lock = ids::lock(backend, lock);
    let sql = format!("SELECT worker_id FROM workers WHERE worker_id IN ({workers}){lock}");
    let locked = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    locked.iter().map(|row| row.try_get("", "worker_id")).collect()
}
