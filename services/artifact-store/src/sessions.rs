//! Sessions: which gateway may speak for a worker.
//!
//! The scheduler mints two rising numbers per worker and signs them into a session credential: the incarnation (one life of what
//! the worker holds) and the session (one life of its gateway). [`record`] keeps the highest that has spoken, and [`fence`] holds
//! it still for the length of a transaction.
//!
//! Invariant: a gateway of a lower incarnation or session changes nothing. Every change of the inventory runs behind [`fence`], whose
//! shared lock on the worker's row keeps a higher session from being recorded before the change is committed.
//!
//! What a higher number brings about, in the transaction that records it:
//!
//! | | higher session | higher incarnation |
//! |---|---|---|
//! | container or volume of an attempt, `creating` | marked: another handle is minted for it | marked |
//! | planned replica, `creating` | left to its claim | marked |
//! | volume of an import, `creating` | marked: another handle is minted for it | marked |
//! | container, otherwise | | marked: its processes are gone |
//! | volume, `created` | | unconfirmed until the first complete report |
//! | orphans | | described again before it can be adopted |

use domain::Timestamp;
use domain::worker::SessionClaims;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ActiveValue::Set, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect,
};

use crate::db::entity::{Purpose, State, container, orphan, volume, worker};
use crate::marks::sweep_queue;

/// A call of a gateway is refused, or could not be judged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("a newer incarnation of worker {} has spoken", .0.worker)]
    StaleIncarnation(SessionClaims),
    #[error("a newer session of worker {} has spoken", .0.worker)]
    StaleSession(SessionClaims),
    /// The row is behind what was recorded: the database lost something. Recording again mends it.
    #[error("the session of worker {} is not recorded", .0.worker)]
    Unrecorded(SessionClaims),
    #[error("database failed while looking for the session of a worker")]
    Database(#[from] DbErr),
}

/// How the numbers of a credential compare to those recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    StaleIncarnation,
    StaleSession,
    Current,
    NewSession,
    NewIncarnation,
}

fn standing(claims: &SessionClaims, row: &worker::Model) -> Standing {
    use std::cmp::Ordering::{Equal, Greater, Less};
    match (column(claims.incarnation.0).cmp(&row.incarnation), column(claims.session.0).cmp(&row.session)) {
        (Less, _) => Standing::StaleIncarnation,
        (Greater, _) => Standing::NewIncarnation,
        (Equal, Less) => Standing::StaleSession,
        (Equal, Equal) => Standing::Current,
        (Equal, Greater) => Standing::NewSession,
    }
}

fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Records the session of `claims`, and answers whether that marked anything.
///
/// The sequence of a worker that is not known begins at `now`, in microseconds: above that of an earlier row, should the worker have been forgotten
/// and come back, so that no report of that time judges anything of this.
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
        // What a worker remembers that was forgotten proves nothing.
        reported: Set(now.0),
    };
    worker::Entity::insert(first)
        .on_conflict_do_nothing_on([worker::Column::WorkerId])
        .exec_without_returning(txn)
        .await?;
    let row = worker::Entity::find_by_id(id).lock_exclusive().one(txn).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound(format!("worker {id}")))?;
    let standing = standing(claims, &row);
    match standing {
        Standing::StaleIncarnation => return Err(SessionError::StaleIncarnation(claims.clone())),
        Standing::StaleSession => return Err(SessionError::StaleSession(claims.clone())),
        Standing::Current => return Ok(false),
        Standing::NewSession | Standing::NewIncarnation => {}
    }

    let sequence = row.sequence + 1;
    worker::Entity::update_many()
        .col_expr(worker::Column::Incarnation, Expr::value(column(claims.incarnation.0)))
        .col_expr(worker::Column::Session, Expr::value(column(claims.session.0)))
        .col_expr(worker::Column::Sequence, Expr::value(sequence))
        .filter(worker::Column::WorkerId.eq(id))
        .exec(txn)
        .await?;

    let new_incarnation = standing == Standing::NewIncarnation;
    let why = if new_incarnation { "its worker began a new incarnation" } else { "its gateway was replaced" };
    let mut containers = container::Entity::update_many()
        .col_expr(container::Column::State, Expr::value(State::Destroying))
        .col_expr(container::Column::JudgedAfter, Expr::value(sequence))
        .col_expr(container::Column::MarkedWhy, Expr::value(why))
        .col_expr(container::Column::MarkedAt, Expr::value(now.0))
        .filter(container::Column::WorkerId.eq(id))
        .filter(container::Column::State.is_not_in(State::GARBAGE));
    let mut creating = volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::value(State::Destroying))
        .col_expr(volume::Column::JudgedAfter, Expr::value(sequence))
        .col_expr(volume::Column::MarkedWhy, Expr::value(why))
        .col_expr(volume::Column::MarkedAt, Expr::value(now.0))
        .col_expr(volume::Column::MarkedFrom, Expr::value(State::Creating))
        .col_expr(volume::Column::GivenUp, Expr::value(true))
        .filter(volume::Column::WorkerId.eq(id))
        .filter(volume::Column::State.eq(State::Creating));
    if !new_incarnation {
        containers = containers.filter(container::Column::State.eq(State::Creating));
        // A transfer goes on in a later session; an import does not.
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
        // Nor is it known what is left of orphans: its gateway says so again, after it was reported.
        orphan::Entity::update_many()
            .col_expr(orphan::Column::Described, Expr::value(false))
            .col_expr(orphan::Column::Digest, Expr::value(None::<Vec<u8>>))
            .filter(orphan::Column::WorkerId.eq(id))
            .exec(txn)
            .await?;
        // What comes back from its mark is no surer than what was not marked.
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

/// Holds the worker's row still, and answers it, if the session of `claims` is the one that may speak.
pub(crate) async fn fence(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
) -> Result<worker::Model, SessionError> {
    let row = worker::Entity::find_by_id(claims.worker.uuid()).lock_shared().one(txn).await?;
    judge(claims, row)
}

/// Holds the worker's row for this transaction alone, raises its sequence, and answers the row as it is then.
///
/// All that is written with that number is committed together, after all that has a lower one and before all that has a higher one.
pub(crate) async fn advance(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
) -> Result<worker::Model, SessionError> {
    // As a writer from the start: two that share the row and both want to raise it would wait for each other.
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

/// Answers the worker's row if the session of `claims` is the one that may speak.
pub(crate) fn judge(
    claims: &SessionClaims,
    row: Option<worker::Model>,
) -> Result<worker::Model, SessionError> {
    let Some(row) = row else { return Err(SessionError::Unrecorded(claims.clone())) };
    match standing(claims, &row) {
        Standing::Current => Ok(row),
        Standing::StaleIncarnation => Err(SessionError::StaleIncarnation(claims.clone())),
        Standing::StaleSession => Err(SessionError::StaleSession(claims.clone())),
        Standing::NewSession | Standing::NewIncarnation => Err(SessionError::Unrecorded(claims.clone())),
    }
}
