//! The step of losses: records items that are lost for longer than the grace period, and forgets
//! old losses.

use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};

use crate::db::entity::{State, container, loss, store, volume};
use crate::db::ids;
use crate::gc::{Batch, Settings};
use crate::inventory::losses::{self, NewLoss};
use crate::marks::sweep_queue;

/// Query of unrecorded losses since `$1` or before.
pub(in crate::gc) const NEW: &str = "
    SELECT due FROM (SELECT 1 AS due FROM volumes WHERE loss_noticed = FALSE AND lost_at <= $1 ORDER BY lost_at LIMIT 1) AS v
    UNION ALL
    SELECT due FROM (SELECT 1 AS due FROM containers WHERE state = 'lost' AND loss_noticed = FALSE AND lost_at <= $1 ORDER BY lost_at LIMIT 1) AS c";

/// Query of losses recorded at `$1` or before.
pub(in crate::gc) const OLD: &str =
    "SELECT 1 AS due FROM losses WHERE noticed_at <= $1 ORDER BY noticed_at LIMIT 1";

/// Records losses.
///
/// Volumes that are garbage by now are checked once as well, even if their rows say that they are
/// lost, and are not recorded. A transaction that removes a mark makes them due again
/// ([`crate::marks::unmark_volumes`]).
pub(in crate::gc) async fn notice(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let before = settings.now - settings.lost_grace;
    let mut volumes = volume::Entity::find()
        .filter(Expr::cust("loss_noticed = FALSE"))
        .filter(volume::Column::LostAt.lte(before.0))
        .order_by_asc(volume::Column::LostAt)
        .limit(settings.batch)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let containers = container::Entity::find()
        .filter(Expr::cust("state = 'lost' AND loss_noticed = FALSE"))
        .filter(container::Column::LostAt.lte(before.0))
        .order_by_asc(container::Column::LostAt)
        .limit(settings.batch)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    if volumes.is_empty() && containers.is_empty() {
        return Ok(Batch::default());
    }
    let backend = txn.get_database_backend();
    volume::Entity::update_many()
        .col_expr(volume::Column::LossNoticed, Expr::value(true))
        .filter(ids::among(backend, "handle", volumes.iter().map(|row| row.handle)))
        .exec(txn)
        .await?;
    container::Entity::update_many()
        .col_expr(container::Column::LossNoticed, Expr::value(true))
        .filter(ids::among(backend, "handle", containers.iter().map(|row| row.handle)))
        .exec(txn)
        .await?;
    // A transaction that removes a mark locks the row.
    sweep_queue::merge_marks(txn, &mut volumes).await?;
    volumes.retain(|row| row.state == State::Lost);
    let lost: Vec<_> =
        containers.iter().map(NewLoss::from).chain(volumes.iter().map(NewLoss::from)).collect();
    if !lost.is_empty() {
        tracing::warn!(
            containers = containers.len(),
            volumes = volumes.len(),
            "collector recorded lost containers and volumes"
        );
    }
    losses::append(txn, &lost, settings.now).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}

/// Deletes old losses, and records the last deleted revision.
pub(in crate::gc) async fn forget(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let before = settings.now - settings.remember;
    let old: Vec<i64> = loss::Entity::find()
        .select_only()
        .column(loss::Column::Revision)
        .filter(loss::Column::NoticedAt.lte(before.0))
        .order_by_asc(loss::Column::NoticedAt)
        .limit(settings.batch)
        .into_tuple()
        .all(txn)
        .await?;
    let Some(last) = old.into_iter().max() else { return Ok(Batch::default()) };
    store::Entity::update_many()
        .col_expr(store::Column::LossesForgotten, Expr::value(last))
        .filter(store::Column::LossesForgotten.lt(last))
        .exec(txn)
        .await?;
    loss::Entity::delete_many().filter(loss::Column::Revision.lte(last)).exec(txn).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}
