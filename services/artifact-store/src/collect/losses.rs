//! What is lost for longer than a grace, and losses that nobody need hear of any more.

use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect};

use super::{Batch, Settings};
use crate::entity::{container, loss, store, volume};
use crate::losses::{self, Lost};
use crate::marks;

/// What is lost and was not noticed, since `$1` or before.
pub(super) fn new() -> String {
    format!(
        "SELECT 1 AS due
         WHERE EXISTS (SELECT 1 FROM volumes WHERE {UNNOTICED} AND lost_at <= $1 AND {})
            OR EXISTS (SELECT 1 FROM containers WHERE {UNNOTICED} AND lost_at <= $1)",
        marks::without("volumes")
    )
}

/// Losses that were noticed at `$1` or before.
pub(super) const OLD: &str = "SELECT 1 AS due FROM losses WHERE noticed_at <= $1 ORDER BY noticed_at LIMIT 1";

/// As the indexes of what is newly lost have it.
const UNNOTICED: &str = "state = 'lost' AND loss_noticed = FALSE";

/// Notes what was lost.
pub(super) async fn notice(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let before = settings.now - settings.lost_grace;
    let volumes = volume::Entity::find()
        .filter(Expr::cust(UNNOTICED))
        .filter(Expr::cust(marks::without("volumes")))
        .filter(volume::Column::LostAt.lte(before.0))
        .order_by_asc(volume::Column::LostAt)
        .limit(settings.batch)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    let containers = container::Entity::find()
        .filter(Expr::cust(UNNOTICED))
        .filter(container::Column::LostAt.lte(before.0))
        .order_by_asc(container::Column::LostAt)
        .limit(settings.batch)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .all(txn)
        .await?;
    if volumes.is_empty() && containers.is_empty() {
        return Ok(Batch::default());
    }
    volume::Entity::update_many()
        .col_expr(volume::Column::LossNoticed, Expr::value(true))
        .filter(volume::Column::Handle.is_in(volumes.iter().map(|row| row.handle)))
        .exec(txn)
        .await?;
    container::Entity::update_many()
        .col_expr(container::Column::LossNoticed, Expr::value(true))
        .filter(container::Column::Handle.is_in(containers.iter().map(|row| row.handle)))
        .exec(txn)
        .await?;
    let lost: Vec<_> = containers.iter().map(Lost::from).chain(volumes.iter().map(Lost::from)).collect();
    tracing::warn!(containers = containers.len(), volumes = volumes.len(), "lost");
    losses::append(txn, &lost, settings.now).await?;
    Ok(Batch { looked: true, ..Batch::default() })
}

/// Forgets old losses, and up to which revision.
pub(super) async fn forget(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
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
    Ok(Batch { looked: true, ..Batch::default() })
}
