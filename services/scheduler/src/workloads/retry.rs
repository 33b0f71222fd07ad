//! Workloads that go back to the queue after an attempt, because nothing of it ran, or because they may run again.

use std::time::Duration;

use domain::workload::{Failure, FailureReason};
use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{DatabaseTransaction, DbErr};
use uuid::Uuid;

use super::{Write, allowed, demand, lock, queue, spec, stop, whereabouts};
use crate::config::Config;
use crate::db::entity::lease::{self, EndedBy, StopReason};
use crate::db::entity::workload::{Model, State};
use crate::db::entity::{from_json, to_json};
use crate::leases;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message};
use crate::outcome::{self, Ending, Report};
use crate::placement::{Choice, FailedThere, Refusal};
use crate::workers::cache;
use crate::workers::quarantine;

/// Lets the attempt under `lease`, which its gateway reports as `report`, end without ending its workload, if it ended through the fault of its
/// worker, before the process had started, and another worker could take it. `false`: it did not.
pub(super) async fn after_fault(
    txn: &DatabaseTransaction,
    row: &Model,
    lease: &lease::Model,
    report: &Report,
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<bool, DbErr> {
    let announced = row.state != State::Assigned;
    let Some(failure) = outcome::fault(announced, lease.stop_reason, report) else { return Ok(false) };
    if outcome::is_held_against(failure) {
        let why = format!("{} ({})", failure.message, failure.reason);
        quarantine::failed(txn, lease.worker_id, (&row.team, &why), config, now, effects).await?;
    }
    let Some(row) = elsewhere(txn, row, lease.worker_id, failure, config).await? else { return Ok(false) };
    if leases::end(txn, LeaseId::from_uuid(lease.id), EndedBy::Reported, now, effects).await? {
        let name = whereabouts(&row)?.map(|there| there.worker_name).unwrap_or_default();
        let reasons = vec![format!("{name}: {}", Refusal::FailedThere(failure.clone()))];
        again(txn, row, lease.attempt_id, reasons, now, effects).await?;
    }
    Ok(true)
}

/// `row`, which is not placed on the worker of `lease` again if its process was not started there in time, and another worker could take it.
pub(super) async fn after_start_timeout(
    txn: &DatabaseTransaction,
    row: Model,
    lease: &lease::Model,
    config: &Config,
) -> Result<Model, DbErr> {
    if lease.stop_reason != Some(StopReason::StartTimeout) || !allowed(&row)?.once_more() {
        return Ok(row);
    }
    let failure = outcome::start_timeout();
    Ok(elsewhere(txn, &row, lease.worker_id, &failure, config).await?.unwrap_or(row))
}

/// The row of a workload that `worker` could not start, if another worker could take it.
async fn elsewhere(
    txn: &DatabaseTransaction,
    row: &Model,
    worker: Uuid,
    failure: &Failure,
    config: &Config,
) -> Result<Option<Model>, DbErr> {
    let mut failed_on: Vec<FailedThere> = from_json(&row.failed_on)?;
    failed_on.push(FailedThere { worker: WorkerId::from_uuid(worker), failure: failure.clone() });
    let lasts = |failed: &FailedThere| !outcome::passes(&failed.failure);
    let counts =
        |failed: &&FailedThere| lasts(failed) && failed.failure.reason != FailureReason::StartTimeout;
    if failed_on.iter().filter(counts).count() >= outcome::MOST_FAULTS {
        return Ok(None);
    }
    let mut known = cache::index(txn, config).await?;
    let mut placeable = |failed_on: &[FailedThere]| {
        let row = Model { failed_on: to_json(&failed_on)?, ..row.clone() };
        let never = known.choose(&demand(&row)?, &[]) == Choice::Never;
        Ok::<_, DbErr>((!never).then_some(row))
    };
    if let Some(row) = placeable(&failed_on)? {
        return Ok(Some(row));
    }
    // Those that had no room then may have some now.
    failed_on.retain(lasts);
    placeable(&failed_on)
}

/// How the workload of `row` ends when no worker is left that could take it, if some could not start it.
pub(crate) fn last_failure(row: &Model) -> Result<Option<Ending>, DbErr> {
    let mut failed_on: Vec<FailedThere> = from_json(&row.failed_on)?;
    let last = failed_on.pop();
    Ok(last.map(|FailedThere { failure, .. }| Ending::errored(failure.reason, &failure.message)))
}

/// Leaves a workload in the queue, whose attempt has ended before anything of it ran, or which may run again.
pub(super) async fn again(
    txn: &DatabaseTransaction,
    mut row: Model,
    attempt: Option<Uuid>,
    reasons: Vec<String>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if let Some(attempt) = attempt.map(AttemptId::from_uuid) {
        let id = WorkloadId::from_uuid(row.id);
        effects.parcels.push(outbox::put(txn, id.uuid(), Message::EndAttempt { attempt }, now).await?);
    }
    row.lease_id = None;
    row.attempt_id = None;
    row.run_deadline = None;
    row.started_at = None;
    row.queue_deadline = spec(&row)?.queue_timeout.map(|timeout| (now + timeout).0);
    effects.queued.push(WorkloadId::from_uuid(row.id));
    queue(txn, row, Write::Update, reasons, now, effects).await
}

/// Lets the attempt under `lease` be interrupted, if it may be, or `all` shall: its worker goes.
pub(crate) async fn interrupt(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    lease: &lease::Model,
    all: bool,
    grace: Duration,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let row = lock(txn, id).await?.filter(|row| row.lease_id == Some(lease.id));
    match row {
        Some(row) if all || row.interruptible => {
            stop(txn, &row, StopReason::Interrupted, grace, effects).await
        }
        Some(_) | None => Ok(()),
    }
}
