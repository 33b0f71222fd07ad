//! Events of workloads, in the order in which they became durable.
//!
//! Invariant: the revisions of a workload rise by one and become visible in order. Each revision is
//! assigned by an update of the workload's row ([`crate::workloads`]), whose lock is kept until the
//! commit.

use domain::{AttemptId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, Set};
use serde::{Deserialize, Serialize};

use crate::db::entity::{event, from_json, to_json};
use crate::outcome::Ending;

/// An event of a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// The workload waits for a worker.
    Queued { reasons: Vec<String> },
    /// The workload was placed on a worker.
    Placed { location: AttemptLocation, reason: String },
    /// The container is being created.
    Preparing,
    /// Inputs are being copied to the worker.
    Materializing { inputs: Vec<InputProgress> },
    /// The process runs.
    Running { location: AttemptLocation },
    /// The process has ended, and its outputs are being read.
    Publishing,
    /// The workload has ended. Always the last event.
    Finished { ending: Ending, location: Option<AttemptLocation> },
}

/// Progress of an input that is copied to a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputProgress {
    pub(crate) name: String,
    pub(crate) bytes_done: u64,
    /// Size in bytes. 0: not known yet.
    pub(crate) bytes_total: u64,
    /// Reason why the copy waits. Empty: the copy is in progress.
    #[serde(default)]
    pub(crate) waits_for: String,
    /// Whether the streamer carries the bytes.
    #[serde(default)]
    pub(crate) relayed: bool,
}

impl InputProgress {
    /// Returns the progress of all inputs together, in tenths. An event is emitted for each tenth.
    pub(crate) fn tenths(inputs: &[Self]) -> u64 {
        let of = |bytes: fn(&Self) -> u64| inputs.iter().map(bytes).fold(0, u64::saturating_add);
        of(|input| input.bytes_done).saturating_mul(10) / of(|input| input.bytes_total).max(1)
    }
}

/// The worker, gateway and id of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AttemptLocation {
    pub(crate) worker: WorkerId,
    pub(crate) worker_name: String,
    pub(crate) gateway_endpoint: String,
    pub(crate) attempt: AttemptId,
}

/// An event with its revision.
#[derive(Debug, Clone)]
pub(crate) struct Revision {
    pub(crate) revision: u64,
    pub(crate) at: Timestamp,
    pub(crate) event: Event,
}

/// Stores `event` under the revision that the caller assigned with its update of the workload's
/// row.
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

/// Returns up to `limit` events of `workload` after `revision`, in order.
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
