//! Table `heartbeats`.

use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "heartbeats")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub(crate) worker_id: Uuid,
    pub(crate) last_contact_at: i64,
    pub(crate) patient_since: i64,
    pub(crate) attended: bool,
    pub(crate) containers: i64,
    pub(crate) volumes: i64,
    pub(crate) disk_free_bytes: i64,
    pub(crate) kept_containers: i64,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {
    #[sea_orm(
        belongs_to = "super::worker::Entity",
        from = "Column::WorkerId",
        to = "super::worker::Column::Id"
    )]
    Worker,
}

impl Related<super::worker::Entity> for Entity {
    fn to() -> RelationDef {
        Relation::Worker.def()
    }
}

impl ActiveModelBehavior for ActiveModel {}
