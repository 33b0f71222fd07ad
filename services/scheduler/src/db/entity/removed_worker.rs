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

/// How a worker went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum WorkerEnd {
    /// It was told to go.
    Retired,
    /// It was not in contact, and an operator said that it is gone.
    Pruned,
    /// It was ephemeral, and lost.
    Expired,
}
