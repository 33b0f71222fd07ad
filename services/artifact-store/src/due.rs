//! Asking for a look at artifacts: who takes away what keeps one asks for it in the same transaction.
//!
//! It saves the time until the next look ([`crate::collect`]); nothing depends on it.

use domain::Timestamp;
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect};
use uuid::Uuid;

use crate::entity::artifact;

/// Makes artifacts due of which something may just have let go. One that an owner keeps says nothing, and needs no look; what somebody
/// has locked is looked at a little later.
pub(crate) async fn make_due(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let artifacts: Vec<_> = artifacts.into_iter().collect();
    if artifacts.is_empty() {
        return Ok(());
    }
    let waiting: Vec<Uuid> = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::ArtifactId)
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .filter(artifact::Column::LookAt.gt(now.0))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .into_tuple()
        .all(txn)
        .await?;
    if waiting.is_empty() {
        return Ok(());
    }
    artifact::Entity::update_many()
        .col_expr(artifact::Column::LookAt, Expr::value(now.0))
        .filter(artifact::Column::ArtifactId.is_in(waiting))
        .exec(txn)
        .await
        .map(|_| ())
}
