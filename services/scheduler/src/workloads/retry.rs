//! Requeueing of workloads after an attempt that did not run, or that may be retried.

use std::time::Duration;

use domain::workload::{Failure, FailureReason};
use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{DatabaseTransaction, DbErr};
use uuid::Uuid;

use super::{Write, demand, location, lock, queue, remaining_retries, spec, stop};
use crate::config::Config;
use crate::db::entity::lease::{self, EndedBy, StopReason};
use crate::db::entity::workload::{Model, State};
use crate::db::entity::{from_json, to_json};
use crate::leases;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message};
use crate::outcome::{self, Ending, Report};
use crate::placement::{Choice, FailedWorker, Refusal};
use crate::workers::cache;
use crate::workers::quarantine;

/// Ends the attempt under `lease` without its workload, if a worker fault ended the attempt before
/// its process started and another worker could take the workload. Returns `false` otherwise.
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
    if outcome::counts_towards_quarantine(failure) {
        let why = format!("{} ({})", failure.message, failure.reason);
        quarantine::record_failure(txn, lease.worker_id, (&row.team, &why), config, now, effects).await?;
    }
    let Some(row) = exclude_worker(txn, row, lease.worker_id, failure, config).await? else {
        return Ok(false);
    };
    if leases::end(txn, LeaseId::from_uuid(lease.id), EndedBy::Reported, now, effects).await? {
        let name = location(&row)?.map(|there| there.worker_name).unwrap_or_default();
        let reasons = vec![format!("{name}: {}", Refusal::FailedWorker(failure.clone()))];
        requeue(txn, row, lease.attempt_id, reasons, now, effects).await?;
    }
    Ok(true)
}

/// Returns `row` with the worker of `lease` excluded, if the start timeout passed there, a retry
/// remains and another worker could take the workload.
pub(super) async fn after_start_timeout(
    txn: &DatabaseTransaction,
    row: Model,
    lease: &lease::Model,
    config: &Config,
) -> Result<Model, DbErr> {
    if lease.stop_reason != Some(StopReason::StartTimeout) || !remaining_retries(&row)?.once_more() {
        return Ok(row);
    }
    let failure = outcome::start_timeout();
    Ok(exclude_worker(txn, &row, lease.worker_id, &failure, config).await?.unwrap_or(row))
}

/// Returns the row with `worker` excluded, if another worker could take the workload.
async fn exclude_worker(
    txn: &DatabaseTransaction,
    row: &Model,
    worker: Uuid,
    failure: &Failure,
    config: &Config,
) -> Result<Option<Model>, DbErr> {
    let mut failed_on: Vec<FailedWorker> = from_json(&row.failed_on)?;
    failed_on.push(FailedWorker { worker: WorkerId::from_uuid(worker), failure: failure.clone() });
    let lasts = |failed: &FailedWorker| !outcome::is_temporary_fault(&failed.failure);
    let counts =
        |failed: &&FailedWorker| lasts(failed) && failed.failure.reason != FailureReason::StartTimeout;
    if failed_on.iter().filter(counts).count() >= outcome::MAX_FAULTS {
        return Ok(None);
    }
    let mut known = cache::index(txn, config).await?;
    let mut placeable = |failed_on: &[FailedWorker]| {
        let row = Model { failed_on: to_json(&failed_on)?, ..row.clone() };
        let never = known.choose(&demand(&row)?, &[]) == Choice::Never;
        Ok::<_, DbErr>((!never).then_some(row))
    };
    if let Some(row) = placeable(&failed_on)? {
        return Ok(Some(row));
    }
    // Workers that had no room may have room now, so they are not excluded.
    failed_on.retain(lasts);
    placeable(&failed_on)
}

/// Returns the end of a workload that no remaining worker could take, if attempts failed before.
pub(crate) fn last_failure(row: &Model) -> Result<Option<Ending>, DbErr> {
    let mut failed_on: Vec<FailedWorker> = from_json(&row.failed_on)?;
    let last = failed_on.pop();
    Ok(last.map(|FailedWorker { failure, .. }| Ending::errored(failure.reason, &failure.message)))
}

/// Returns a workload to the queue after an attempt that did not run, or that is retried.
pub(super) async fn requeue(
    txn: &DatabaseTransaction,
    mut row: Model,
    attempt: Option<Uuid>,
    reasons: Vec<String>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let spec = spec(&row)?;
    if let Some(attempt) = attempt.map(AttemptId::from_uuid) {
        let services = spec.services.iter().map(|service| attempt.service(&service.name));
        for attempt in services.chain([attempt]) {
            effects.parcels.push(outbox::put(txn, row.id, Message::EndAttempt { attempt }, now).await?);
        }
    }
    row.lease_id = None;
    row.attempt_id = None;
    row.run_deadline = None;
    row.started_at = None;
    row.queue_deadline = spec.queue_timeout.map(|timeout| (now + timeout).0);
    effects.queued.push(WorkloadId::from_uuid(row.id));
    queue(txn, row, Write::Update, reasons, now, effects).await
}

/// Interrupts the attempt under `lease` if its workload is interruptible, or if `all` is set.
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
