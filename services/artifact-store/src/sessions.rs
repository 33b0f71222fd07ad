//! Sessions: which gateway may speak for a worker.
//!
//! For each worker, the scheduler issues two rising numbers and signs them into a session
//! credential. The incarnation is one life of the worker's contents. The session is the time for
//! which one gateway speaks for the worker. [`record`] stores the highest numbers that have been
//! presented. [`fence`] locks them for the length of a transaction.
//!
//! Invariant: a gateway of a lower incarnation or session changes nothing. Every change of the
//! inventory runs behind [`fence`]. Its shared lock on the worker's row prevents a higher session
//! from being recorded before the change is committed.
//!
//! Effects of a higher number, in the transaction that records it:
//!
//! | | higher session | higher incarnation |
//! |---|---|---|
//! | container or volume of an attempt, `creating` | marked, because a new handle is minted for it | marked |
//! | planned replica, `creating` | kept until its claim expires | marked |
//! | volume of an import, `creating` | marked, because a new handle is minted for it | marked |
//! | other container | | marked, because its processes are gone |
//! | volume, `created` | | unconfirmed until the first complete report |
//! | orphan | | must be described again before it can be adopted |

use domain::Timestamp;
use domain::worker::SessionClaims;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ActiveValue::Set, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect,
};

use crate::db::entity::{Purpose, State, container, orphan, volume, worker};
use crate::marks::sweep_queue;

/// A call of a gateway was rejected, or its session could not be checked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("a newer incarnation of worker {} is recorded", .0.worker)]
    StaleIncarnation(SessionClaims),
    #[error("a newer session of worker {} is recorded", .0.worker)]
    StaleSession(SessionClaims),
    /// The database has lower numbers than were recorded: it lost a write. Recording the session
    /// again repairs it.
    #[error("the session of worker {} is not recorded", .0.worker)]
    Unrecorded(SessionClaims),
    #[error("database failed while reading the session of a worker")]
    Database(#[from] DbErr),
}

/// Order of a credential's numbers relative to the recorded ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionOrder {
    StaleIncarnation,
    StaleSession,
    Current,
    NewSession,
    NewIncarnation,
}

fn compare_session(claims: &SessionClaims, row: &worker::Model) -> SessionOrder {
    use std::cmp::Ordering::{Equal, Greater, Less};
    match (column(claims.incarnation.0).cmp(&row.incarnation), column(claims.session.0).cmp(&row.session)) {
        (Less, _) => SessionOrder::StaleIncarnation,
        (Greater, _) => SessionOrder::NewIncarnation,
        (Equal, Less) => SessionOrder::StaleSession,
        (Equal, Equal) => SessionOrder::Current,
        (Equal, Greater) => SessionOrder::NewSession,
    }
}

fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Records the session of `claims`, and returns whether that marked anything.
///
/// The sequence of an unknown worker begins at `now`, in microseconds. That is above the sequence
/// of an earlier row of a worker that was forgotten and has returned. A report of that earlier time
/// therefore judges nothing of this one.
pub(crate) async fn record(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    now: Timestamp,
) -> Result<bool, SessionError> {
    let id = claims.worker.uuid();
    let first = worker::ActiveModel {
        worker_id: Set(id),
        incarnation: Set(column(claims.incarnation.0)),
        session: Set(column(claims.session.0)),
        sequence: Set(now.0),
        // A receipt from before the worker was forgotten must prove nothing.
        reported: Set(now.0),
    };
    worker::Entity::insert(first)
        .on_conflict_do_nothing_on([worker::Column::WorkerId])
        .exec_without_returning(txn)
        .await?;
    let row = worker::Entity::find_by_id(id).lock_exclusive().one(txn).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound(format!("worker {id}")))?;
    let order = compare_session(claims, &row);
    match order {
        SessionOrder::StaleIncarnation => return Err(SessionError::StaleIncarnation(claims.clone())),
        SessionOrder::StaleSession => return Err(SessionError::StaleSession(claims.clone())),
        SessionOrder::Current => return Ok(false),
        SessionOrder::NewSession | SessionOrder::NewIncarnation => {}
    }

    let sequence = row.sequence + 1;
    worker::Entity::update_many()
        .col_expr(worker::Column::Incarnation, Expr::value(column(claims.incarnation.0)))
        .col_expr(worker::Column::Session, Expr::value(column(claims.session.0)))
        .col_expr(worker::Column::Sequence, Expr::value(sequence))
        .filter(worker::Column::WorkerId.eq(id))
        .exec(txn)
        .await?;

    let new_incarnation = order == SessionOrder::NewIncarnation;
    let why = if new_incarnation { "its worker began a new incarnation" } else { "its gateway was replaced" };
    let mut containers = container::Entity::update_many()
        .col_expr(container::Column::State, Expr::value(State::Destroying))
        .col_expr(container::Column::JudgedAfter, Expr::value(sequence))
        .col_expr(container::Column::MarkReason, Expr::value(why))
        .col_expr(container::Column::MarkedAt, Expr::value(now.0))
        .filter(container::Column::WorkerId.eq(id))
        .filter(container::Column::State.is_not_in(State::GARBAGE));
    let mut creating = volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::value(State::Destroying))
        .col_expr(volume::Column::JudgedAfter, Expr::value(sequence))
        .col_expr(volume::Column::MarkReason, Expr::value(why))
        .col_expr(volume::Column::MarkedAt, Expr::value(now.0))
        .col_expr(volume::Column::MarkedFrom, Expr::value(State::Creating))
        .col_expr(volume::Column::GivenUp, Expr::value(true))
        .filter(volume::Column::WorkerId.eq(id))
        .filter(volume::Column::State.eq(State::Creating));
    if !new_incarnation {
        containers = containers.filter(container::Column::State.eq(State::Creating));
        // A transfer continues in a later session. An import does not.
        let is_planned =
            volume::Column::Purpose.eq(Purpose::Replica).and(volume::Column::TransferId.is_not_null());
        creating = creating.filter(is_planned.not());
    }
    let containers = containers.exec(txn).await?.rows_affected;
    let volumes = creating.exec_with_returning(txn).await?;
    sweep_queue::add(txn, volumes.iter().map(|row| row.handle)).await?;
    if new_incarnation {
        volume::Entity::update_many()
            .col_expr(volume::Column::State, Expr::value(State::Unconfirmed))
            .col_expr(volume::Column::JudgedAfter, Expr::value(sequence))
            .filter(volume::Column::WorkerId.eq(id))
            .filter(volume::Column::State.eq(State::Created))
            .exec(txn)
            .await?;
        // The contents of orphans are unknown as well: the gateway describes them again after the
        // next report.
        orphan::Entity::update_many()
            .col_expr(orphan::Column::Described, Expr::value(false))
            .col_expr(orphan::Column::Digest, Expr::value(None::<Vec<u8>>))
            .filter(orphan::Column::WorkerId.eq(id))
            .exec(txn)
            .await?;
        // A volume that is restored from its mark is as unconfirmed as an unmarked one.
        volume::Entity::update_many()
            .col_expr(volume::Column::MarkedFrom, Expr::value(State::Unconfirmed))
            .filter(volume::Column::WorkerId.eq(id))
            .filter(volume::Column::State.eq(State::Destroying))
            .filter(volume::Column::MarkedFrom.eq(State::Created))
            .exec(txn)
            .await?;
    }
    Ok(containers > 0 || !volumes.is_empty())
}

/// Locks the worker's row in shared mode and returns it, if the session of `claims` is current.
pub(crate) async fn fence(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
) -> Result<worker::Model, SessionError> {
    let row = worker::Entity::find_by_id(claims.worker.uuid()).lock_shared().one(txn).await?;
    judge(claims, row)
}

/// Locks the worker's row exclusively, raises its sequence, and returns the new row.
///
/// All rows written with one sequence number are committed together, after those with lower numbers
/// and before those with higher ones.
pub(crate) async fn advance(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
) -> Result<worker::Model, SessionError> {
    // An exclusive lock from the start: two transactions that upgrade a shared lock would deadlock.
    let row = worker::Entity::find_by_id(claims.worker.uuid()).lock_exclusive().one(txn).await?;
    let row = judge(claims, row)?;
    let sequence = row.sequence + 1;
    worker::Entity::update_many()
        .col_expr(worker::Column::Sequence, Expr::value(sequence))
        .filter(worker::Column::WorkerId.eq(row.worker_id))
        .exec(txn)
        .await?;
    Ok(worker::Model { sequence, ..row })
}

/// Returns the worker's row if the session of `claims` is current.
pub(crate) fn judge(
    claims: &SessionClaims,
    row: Option<worker::Model>,
) -> Result<worker::Model, SessionError> {
    let Some(row) = row else { return Err(SessionError::Unrecorded(claims.clone())) };
    match compare_session(claims, &row) {
        SessionOrder::Current => Ok(row),
        SessionOrder::StaleIncarnation => Err(SessionError::StaleIncarnation(claims.clone())),
        SessionOrder::StaleSession => Err(SessionError::StaleSession(claims.clone())),
        SessionOrder::NewSession | SessionOrder::NewIncarnation => {
            Err(SessionError::Unrecorded(claims.clone()))
        }
    }
}
