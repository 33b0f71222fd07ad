//! Workloads that wait for a worker, as the queue remembers them.

use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, FromQueryResult, QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use super::PENDING;
use crate::db::entity::workload;

/// A workload that waits for a worker.
#[derive(Debug, FromQueryResult)]
pub(crate) struct Pending {
    pub(crate) id: Uuid,
    /// What sorts it.
    pub(crate) sequence: Uuid,
    /// JSON: where it could not be started.
    pub(crate) failed_on: String,
}

/// Up to `limit` workloads that wait for a worker and were submitted after `after`, in the order of their submission.
pub(crate) async fn pending(
    db: &impl ConnectionTrait,
    after: Option<Uuid>,
    limit: u64,
) -> Result<Vec<Pending>, DbErr> {
    let mut query = workload::Entity::find()
        .select_only()
        .columns([workload::Column::Id, workload::Column::Sequence, workload::Column::FailedOn])
        .filter(Expr::cust(PENDING));
    if let Some(after) = after {
        query = query.filter(workload::Column::Sequence.gt(after));
    }
    query.order_by_asc(workload::Column::Sequence).limit(limit).into_model().all(db).await
}
