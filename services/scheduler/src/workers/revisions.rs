//! Revisions of workers, with which watchers detect changes.
//!
//! Invariant: revisions become visible in their order. A transaction takes its revision at its end,
//! from a row whose lock it keeps until the commit ([`changed`]).

use domain::WorkerId;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use crate::db::entity::{worker, worker_revision};
use crate::notify::changes::Effects;

/// The range of known revisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Revisions {
    /// The newest revision.
    pub(crate) last: i64,
    /// The revision up to which the records of removed workers were deleted.
    pub(crate) forgotten: i64,
}

/// Gives changed workers a new revision. Callers do this at the end of their transaction, because
/// other transactions wait for the lock.
pub(crate) async fn changed(
    txn: &DatabaseTransaction,
    workers: &[Uuid],
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if workers.is_empty() {
        return Ok(());
    }
    let revision = next_revision(txn).await?;
    worker::Entity::update_many()
        .col_expr(worker::Column::Revision, Expr::value(revision))
        .filter(worker::Column::Id.is_in(workers.iter().copied()))
        .exec(txn)
        .await?;
    effects.registry = true;
    effects.workers.extend(workers.iter().copied().map(WorkerId::from_uuid));
    Ok(())
}

pub(crate) async fn next_revision(txn: &DatabaseTransaction) -> Result<i64, DbErr> {
    let row = worker_revision::Entity::update_many()
        .col_expr(worker_revision::Column::Last, Expr::col(worker_revision::Column::Last).add(1))
        .filter(worker_revision::Column::Id.eq(1))
        .exec_with_returning(txn)
        .await?;
    let row = row.first().ok_or_else(|| DbErr::RecordNotFound("the revision of workers".to_owned()))?;
    Ok(row.last)
}

/// Reads the range of revisions.
pub(crate) async fn revisions(db: &impl ConnectionTrait) -> Result<Revisions, DbErr> {
    let row = worker_revision::Entity::find_by_id(1).one(db).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound("the revision of workers".to_owned()))?;
    Ok(Revisions { last: row.last, forgotten: row.forgotten })
}
