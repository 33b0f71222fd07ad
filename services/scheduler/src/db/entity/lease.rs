//! Table `leases`.

use sea_orm::FromQueryResult;
use sea_orm::entity::prelude::*;
use sea_orm::sea_query::Expr;

pub(crate) use crate::outcome::StopReason;
pub(crate) use crate::placement::Kind;

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
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    pub(crate) disk_bytes: i64,
    pub(crate) settles: bool,
    pub(crate) owner: String,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

impl Model {
    /// Whether its holder keeps it by renewals; others are kept by the contact of their worker.
    pub(crate) fn is_driven(&self) -> bool {
        self.workload_id.is_none()
    }

    /// What it leaves, once it has ended.
    pub(crate) fn left(&self) -> Left {
        Left {
            lease_id: self.id,
            worker_id: self.worker_id,
            kind: self.kind,
            team: self.team.clone(),
            workload_id: self.workload_id,
            cpu_millis: self.cpu_millis,
            memory_bytes: self.memory_bytes,
            disk_bytes: self.disk_bytes,
            settles: self.settles,
        }
    }
}

/// What a lease that has ended leaves to do: what it took is its worker's again, and what was pinned for it is let go.
#[derive(Clone, Debug, FromQueryResult)]
pub(crate) struct Left {
    pub(crate) lease_id: Uuid,
    pub(crate) worker_id: Uuid,
    pub(crate) kind: Kind,
    pub(crate) team: String,
    pub(crate) workload_id: Option<Uuid>,
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    pub(crate) disk_bytes: i64,
    pub(crate) settles: bool,
}

/// What [`Left`] is read from.
pub(crate) const LEFT: [&str; 9] = [
    "id AS lease_id",
    "worker_id",
    "kind",
    "team",
    "workload_id",
    "cpu_millis",
    "memory_bytes",
    "disk_bytes",
    "settles",
];

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

/// Who ended a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum EndedBy {
    /// Its holder.
    Reported,
    /// We, without its holder.
    Lost,
}

/// Whether a lease has not ended. Written out, as in the partial indexes of the table: for a parameter in its place they would not be used, or
/// the statement be planned anew each time.
pub(crate) fn is_live() -> Expr {
    Expr::cust("state <> 'ended'")
}
