//! Table `reservations`.

use std::collections::HashMap;

use domain::{Timestamp, WorkerId};
use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "reservations")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    /// The reserved worker. Equal to `request_id` if the request gets no reservation for a time.
    pub(crate) worker_id: Uuid,
    pub(crate) request_id: Uuid,
    pub(crate) expires_at: i64,
    /// The process that made the reservation.
    pub(crate) replica: Uuid,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

/// Returns the reserved workers with their requests.
pub(crate) async fn all(db: &impl ConnectionTrait, now: Timestamp) -> Result<HashMap<WorkerId, Uuid>, DbErr> {
    let rows = Entity::find().filter(Column::ExpiresAt.gt(now.0)).all(db).await?;
    // Rows with `worker_id` = `request_id` mean that nothing is reserved.
    let rows = rows.iter().filter(|row| row.worker_id != row.request_id);
    Ok(rows.map(|row| (WorkerId::from_uuid(row.worker_id), row.request_id)).collect())
}
