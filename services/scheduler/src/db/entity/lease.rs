//! The table `leases`: one row for each lease. [`crate::leases`] owns it.

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
    pub(crate) in_use: bool,
    pub(crate) settles: bool,
    pub(crate) owner: String,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

impl Model {
    /// Returns whether the holder keeps the lease alive with renewals. Other leases depend on the
    /// contact of their worker.
    pub(crate) fn is_driven(&self) -> bool {
        self.workload_id.is_none()
    }

    /// Returns the part of the lease that is needed to release its resources.
    pub(crate) fn ended_part(&self) -> EndedLease {
        EndedLease {
            lease_id: self.id,
            worker_id: self.worker_id,
            kind: self.kind,
            team: self.team.clone(),
            cpu_millis: self.cpu_millis,
            memory_bytes: self.memory_bytes,
            disk_bytes: self.disk_bytes,
            in_use: self.in_use,
            settles: self.settles,
        }
    }
}

/// The part of an ended or released lease that is needed to release its resources and pins.
#[derive(Clone, Debug, FromQueryResult)]
pub(crate) struct EndedLease {
    pub(crate) lease_id: Uuid,
    pub(crate) worker_id: Uuid,
    pub(crate) kind: Kind,
    pub(crate) team: String,
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
    pub(crate) disk_bytes: i64,
    pub(crate) in_use: bool,
    pub(crate) settles: bool,
}

/// The columns of [`EndedLease`].
pub(crate) const ENDED_LEASE_COLUMNS: [&str; 9] = [
    "id AS lease_id",
    "worker_id",
    "kind",
    "team",
    "cpu_millis",
    "memory_bytes",
    "disk_bytes",
    "in_use",
    "settles",
];

/// The state of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum State {
    /// The holder may use the lease.
    Granted,
    /// The lease must stop. Its slot stays in use until then.
    Ending,
    /// Nothing runs under the lease any more.
    Ended,
}

/// End of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum EndedBy {
    /// The holder ended the lease.
    Reported,
    /// The scheduler ended the lease without its holder.
    Lost,
}

/// Returns the condition that a driven lease may expire. The text equals that of a partial index.
pub(crate) fn is_granted() -> Expr {
    Expr::cust("state = 'granted'")
}

/// Returns the condition that a lease has not ended. The text equals that of the partial indexes of
/// the table. With a parameter, PostgreSQL would not use the indexes and SQLite would plan the
/// statement for each execution.
pub(crate) fn is_live() -> Expr {
    Expr::cust("state <> 'ended'")
}
