//! Workloads that wait for a worker, as the queue stores them.

use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, FromQueryResult, QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use super::PENDING;
use crate::db::entity::workload;

/// The columns of a pending workload that the queue needs.
#[derive(Debug, FromQueryResult)]
pub(crate) struct PendingWorkload {
    pub(crate) id: Uuid,
    /// Sort key: the order of submission.
    pub(crate) sequence: Uuid,
    /// JSON: workers on which the workload could not be started.
    pub(crate) failed_on: String,
}

/// Returns up to `limit` pending workloads that were submitted after `after`, in the order of
/// submission.
pub(crate) async fn pending(
    db: &impl ConnectionTrait,
    after: Option<Uuid>,
    limit: u64,
) -> Result<Vec<PendingWorkload>, DbErr> {
    let mut query = workload::Entity::find()
        .select_only()
        .columns([workload::Column::Id, workload::Column::Sequence, workload::Column::FailedOn])
        .filter(Expr::cust(PENDING));
    if let Some(after) = after {
        query = query.filter(workload::Column::Sequence.gt(after));
    }
    query.order_by_asc(workload::Column::Sequence).limit(limit).into_model().all(db).await
}
