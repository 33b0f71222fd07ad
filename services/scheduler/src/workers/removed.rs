//! Records of removed workers, kept for as long as finished workloads.

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, Condition, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
};
use uuid::Uuid;

use crate::db::entity::removed_worker::{self, WorkerEnd};
use crate::db::entity::worker_revision;

/// Returns the workers that were removed with a revision in `after..=last`.
pub(crate) async fn removed_since(
    db: &impl ConnectionTrait,
    after: i64,
    last: i64,
) -> Result<Vec<removed_worker::Model>, DbErr> {
    removed_worker::Entity::find()
        .filter(removed_worker::Column::Revision.gt(after))
        .filter(removed_worker::Column::Revision.lte(last))
        .order_by_asc(removed_worker::Column::Revision)
        .all(db)
        .await
}

/// Returns the removed worker with this name or id.
pub(crate) async fn find(
    db: &impl ConnectionTrait,
    worker: &str,
) -> Result<Option<removed_worker::Model>, DbErr> {
    let mut matches = Condition::any().add(removed_worker::Column::Name.eq(worker));
    if let Ok(id) = worker.parse::<WorkerId>() {
        matches = matches.add(removed_worker::Column::Id.eq(id.uuid()));
    }
    let newest =
        removed_worker::Entity::find().filter(matches).order_by_desc(removed_worker::Column::Revision);
    newest.one(db).await
}

/// Returns how the worker with this id was removed, if it was.
pub(crate) async fn end_of(db: &impl ConnectionTrait, worker: WorkerId) -> Result<Option<WorkerEnd>, DbErr> {
    Ok(removed_worker::Entity::find_by_id(worker.uuid()).one(db).await?.map(|gone| gone.how))
}

/// Returns whether the worker with this name and marker was retired, and may not register again.
pub(crate) async fn is_retired(db: &impl ConnectionTrait, name: &str, marker: Uuid) -> Result<bool, DbErr> {
    let row = removed_worker::Entity::find()
        .filter(removed_worker::Column::Name.eq(name))
        .filter(removed_worker::Column::MarkerId.eq(marker))
        .one(db)
        .await?;
    Ok(row.is_some())
}

/// Deletes the records of workers that were removed before `before`, if the artifact store has
/// forgotten them.
pub(crate) async fn forget(txn: &DatabaseTransaction, before: Timestamp) -> Result<(), DbErr> {
    let old = removed_worker::Entity::find()
        .filter(removed_worker::Column::RemovedAt.lt(before.0))
        .filter(removed_worker::Column::StoreTold.eq(true))
        .all(txn)
        .await?;
    let Some(newest) = old.iter().map(|gone| gone.revision).max() else { return Ok(()) };
    let ids = old.iter().map(|gone| gone.id);
    removed_worker::Entity::delete_many().filter(removed_worker::Column::Id.is_in(ids)).exec(txn).await?;
    worker_revision::Entity::update_many()
        .col_expr(worker_revision::Column::Forgotten, Expr::value(newest))
        .filter(worker_revision::Column::Forgotten.lt(newest))
        .exec(txn)
        .await
        .map(|_| ())
}
