//! Events: what happened to a workload, in the order in which it became durable.
//!
//! Invariant: revisions of one workload rise by one and become visible in their order. Each is handed out by an update of the
//! workload's row ([`crate::workloads`]), whose lock is held until the commit.

use domain::{AttemptId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, Set};
use serde::{Deserialize, Serialize};

use crate::db::entity::{event, from_json, to_json};
use crate::outcome::Ending;

/// Something that happened to a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// It waits for a worker.
    Queued { reasons: Vec<String> },
    /// A worker was found.
    Placed { whereabouts: Whereabouts, reason: String },
    /// Its container is made.
    Preparing,
    /// Inputs that were not on its worker are brought there.
    Materializing { inputs: Vec<InputProgress> },
    /// Its process runs.
    Running { whereabouts: Whereabouts },
    /// Its process is gone, its outputs are read.
    Publishing,
    /// It has ended. The last event.
    Finished { ending: Ending, whereabouts: Option<Whereabouts> },
}

/// How far an input is that is brought to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputProgress {
    pub(crate) name: String,
    pub(crate) bytes_done: u64,
    /// 0: not known yet.
    pub(crate) bytes_total: u64,
    /// Why it cannot be brought just now. Empty: it is being brought.
    #[serde(default)]
    pub(crate) waits_for: String,
}

impl InputProgress {
    /// How far inputs are together, in tenths: as often as that somebody is told.
    pub(crate) fn tenths(inputs: &[Self]) -> u64 {
        let of = |bytes: fn(&Self) -> u64| inputs.iter().map(bytes).fold(0, u64::saturating_add);
        of(|input| input.bytes_done).saturating_mul(10) / of(|input| input.bytes_total).max(1)
    }
}

/// Where an attempt is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Whereabouts {
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) gateway_endpoint: String,
    pub(crate) attempt: AttemptId,
}

/// An event, with its place in the order.
#[derive(Debug, Clone)]
pub(crate) struct Revision {
    pub(crate) revision: u64,
    pub(crate) at: Timestamp,
    pub(crate) event: Event,
}

/// Keeps `event` as the `revision` that the caller's update of the workload's row handed out.
pub(crate) async fn append(
    txn: &impl ConnectionTrait,
    workload: WorkloadId,
    revision: i64,
    event: &Event,
    now: Timestamp,
) -> Result<(), DbErr> {
    let row = event::ActiveModel {
        workload_id: Set(workload.uuid()),
        revision: Set(revision),
        at: Set(now.0),
        event: Set(to_json(event)?),
    };
    event::Entity::insert(row).exec_without_returning(txn).await.map(|_| ())
}

/// Up to `limit` events of `workload` that came after `revision`, in order.
pub(crate) async fn after(
    db: &impl ConnectionTrait,
    workload: WorkloadId,
    revision: u64,
    limit: u64,
) -> Result<Vec<Revision>, DbErr> {
    let rows = event::Entity::find()
        .filter(event::Column::WorkloadId.eq(workload.uuid()))
        .filter(event::Column::Revision.gt(i64::try_from(revision).unwrap_or(i64::MAX)))
        .order_by_asc(event::Column::Revision)
        .limit(limit)
        .all(db)
        .await?;
    rows.into_iter()
        .map(|row| {
            Ok(Revision {
                revision: u64::try_from(row.revision).unwrap_or(0),
                at: Timestamp(row.at),
                event: from_json(&row.event)?,
            })
        })
        .collect()
}
