//! Table `leases`.

use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "leases")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub(crate) id: Uuid,
    pub(crate) worker_id: Uuid,
    pub(crate) incarnation: i64,
    pub(crate) kind: Kind,
    pub(crate) team: String,
    pub(crate) state: State,
    pub(crate) generation: i64,
    pub(crate) workload_id: Option<Uuid>,
    pub(crate) attempt_id: Option<Uuid>,
    pub(crate) phase: i64,
    pub(crate) stop_reason: Option<StopReason>,
    pub(crate) stop_grace_us: Option<i64>,
    pub(crate) request: String,
    pub(crate) expires_at: Option<i64>,
    pub(crate) granted_at: i64,
    pub(crate) ended_at: Option<i64>,
    pub(crate) ended_by: Option<EndedBy>,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

/// What a lease is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum Kind {
    /// An attempt at a workload: takes a slot.
    Task,
    /// Moving bytes, driven by its holder: takes none.
    Transfer,
}

/// Where a lease is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum State {
    /// Its holder may use it.
    Granted,
    /// It shall stop; its slot stays taken until it did.
    Ending,
    /// Nothing of it runs any more.
    Ended,
}

/// Why an attempt shall stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum StopReason {
    /// Its caller asked for it.
    Cancelled,
    /// It ran for too long.
    RunTimeout,
    /// Its worker lands or retires.
    Interrupted,
}

/// Who ended a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum EndedBy {
    /// Its holder.
    Reported,
    /// We, without its holder.
    Lost,
}
