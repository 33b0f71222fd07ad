//! Table `workloads`.

use sea_orm::entity::prelude::*;

#[derive(Clone, Debug, PartialEq, Eq, DeriveEntityModel)]
#[sea_orm(table_name = "workloads")]
pub(crate) struct Model {
    #[sea_orm(primary_key, auto_increment = false)]
    pub(crate) id: Uuid,
    pub(crate) sequence: Uuid,
    pub(crate) team: String,
    pub(crate) spec: Vec<u8>,
    pub(crate) spec_digest: Vec<u8>,
    pub(crate) traceparent: String,
    pub(crate) settles: bool,
    pub(crate) state: State,
    pub(crate) revision: i64,
    pub(crate) submitted_at: i64,
    pub(crate) started_at: Option<i64>,
    pub(crate) finished_at: Option<i64>,
    pub(crate) queue_deadline: Option<i64>,
    pub(crate) run_deadline: Option<i64>,
    pub(crate) lease_id: Option<Uuid>,
    pub(crate) attempt_id: Option<Uuid>,
    pub(crate) location: Option<String>,
    pub(crate) locations: String,
    pub(crate) waiting_for: String,
    pub(crate) ending: Option<String>,
    pub(crate) interruptible: bool,
    pub(crate) failed_on: String,
    pub(crate) priority: i64,
    pub(crate) start_timeout_us: Option<i64>,
    pub(crate) retried: i64,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) abridged: bool,
    pub(crate) name: String,
}

#[derive(Copy, Clone, Debug, EnumIter, DeriveRelation)]
pub(crate) enum Relation {}

impl ActiveModelBehavior for ActiveModel {}

/// The state of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum State {
    /// The workload is durable, and its inputs are being pinned.
    Accepted,
    /// The workload waits for a worker.
    Pending,
    /// A worker has a lease for the workload and prepares it.
    Assigned,
    /// The process counts as started.
    Starting,
    /// The process runs.
    Running,
    /// The process has ended, and its outputs are being settled.
    Settling,
    /// The workload has ended.
    Finished,
}

/// End of a workload: [`domain::workload::Outcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumIter, DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The process exited with 0.
    Succeeded,
    /// The process exited otherwise.
    Failed,
    /// The workload could not run, or its end is unknown.
    Errored,
    /// The workload was cancelled.
    Aborted,
}

impl From<domain::workload::Outcome> for Outcome {
    fn from(outcome: domain::workload::Outcome) -> Self {
        match outcome {
            domain::workload::Outcome::Succeeded => Self::Succeeded,
            domain::workload::Outcome::Failed => Self::Failed,
            domain::workload::Outcome::Errored => Self::Errored,
            domain::workload::Outcome::Aborted => Self::Aborted,
        }
    }
}
