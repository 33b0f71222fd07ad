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

/// Free disk space before the first heartbeat.
pub(crate) const UNKNOWN_DISK: i64 = -1;

impl Model {
    /// Whether less of the disk of `worker` is free than it needs.
    pub(crate) fn is_short_of_disk(&self, worker: &super::worker::Model) -> bool {
        worker.disk_bytes > 0
            && self.disk_free_bytes != UNKNOWN_DISK
            && self.disk_free_bytes < worker.min_free_disk_bytes
    }
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
