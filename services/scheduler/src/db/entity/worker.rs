//! Table `workers`.

use sea_orm::entity::prelude::*;

use super::removed_worker::WorkerEnd;
pub(crate) use crate::placement::{Desired, State};

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "workers")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub(crate) id: Uuid,
    pub(crate) name: String,
    pub(crate) desired: Desired,
    pub(crate) state: State,
    pub(crate) generation: i64,
    pub(crate) active_tasks: i64,
    pub(crate) max_tasks: Option<i64>,
    pub(crate) incarnation: i64,
    pub(crate) session: i64,
    pub(crate) gateway_instance: Uuid,
    pub(crate) marker_id: Uuid,
    pub(crate) boot_id: String,
    pub(crate) endpoint: String,
    pub(crate) labels: String,
    pub(crate) disk_bytes: i64,
    pub(crate) min_free_disk_bytes: i64,
    pub(crate) registered_at: i64,
    pub(crate) interrupt_at: Option<i64>,
    pub(crate) landed_at: Option<i64>,
    pub(crate) force_retire: bool,
    pub(crate) blocked_by: String,
    pub(crate) leaving: Option<WorkerEnd>,
    pub(crate) ephemeral: bool,
    pub(crate) unsupported_versions: String,
    pub(crate) failures: i64,
    pub(crate) last_failure: String,
    pub(crate) quarantines: i64,
    pub(crate) quarantined_until: Option<i64>,
    pub(crate) revision: i64,
    pub(crate) max_containers: Option<i64>,
    pub(crate) max_volumes: Option<i64>,
    pub(crate) cpu_millis: Option<i64>,
    pub(crate) memory_bytes: Option<i64>,
    pub(crate) active_checks: i64,
    pub(crate) reserved_cpu_millis: i64,
    pub(crate) reserved_memory_bytes: i64,
    pub(crate) reserved_disk_bytes: i64,
    pub(crate) ended_tasks: i64,
    pub(crate) failed_team: Option<String>,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {
    #[sea_orm(has_one = "super::heartbeat::Entity")]
    Contact,
}

impl Related<super::heartbeat::Entity> for Entity {
    fn to() -> RelationDef {
        Relation::Contact.def()
    }
}

impl ActiveModelBehavior for ActiveModel {}
