//! Table `kept_free`.

use std::collections::HashMap;

use domain::{Timestamp, WorkerId};
use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "kept_free")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    /// The same as `waits_as`: nothing is kept free for that one for a time, and nobody else chooses.
    pub(crate) worker_id: Uuid,
    pub(crate) waits_as: Uuid,
    pub(crate) expires_at: i64,
    /// The process that chose the worker. `None`: one of an older version.
    pub(crate) chosen_by: Option<Uuid>,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

/// For whom workers are kept free.
pub(crate) async fn all(db: &impl ConnectionTrait, now: Timestamp) -> Result<HashMap<WorkerId, Uuid>, DbErr> {
    let rows = Entity::find().filter(Column::ExpiresAt.gt(now.0)).all(db).await?;
    // Others say that nothing is kept free.
    let rows = rows.iter().filter(|row| row.worker_id != row.waits_as);
    Ok(rows.map(|row| (WorkerId::from_uuid(row.worker_id), row.waits_as)).collect())
}
