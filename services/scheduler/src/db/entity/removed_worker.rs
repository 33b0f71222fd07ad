//! Table `removed_workers`.

use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "removed_workers")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub(crate) id: Uuid,
    pub(crate) name: String,
    pub(crate) marker_id: Option<Uuid>,
    pub(crate) how: WorkerEnd,
    pub(crate) removed_at: i64,
    pub(crate) revision: i64,
    pub(crate) store_told: bool,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

/// Way in which a worker was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum WorkerEnd {
    /// An operator retired the worker.
    Retired,
    /// An operator pruned the worker while it was out of contact.
    Pruned,
    /// The worker was ephemeral and was lost.
    Expired,
}
