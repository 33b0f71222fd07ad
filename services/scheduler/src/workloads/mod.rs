//! Workloads and their transitions.
//!
//! ```text
//! accepted ─pinned─▶ pending ─placed─▶ assigned ─start─▶ starting ─seen─▶ running ─ended─▶ settling ─settled─▶ finished
//!     └─rejected─▶ (deleted) ▲└─cancelled, queue timeout─▶ finished  └────────ended────────▲
//!                            └──its lease ended, nothing ran──┘
//! ```
//!
//! Every transition changes a row that its transaction has locked ([`lock`]) or inserted, and
//! raises the row's revision for each event. A workload without outputs and builds finishes without
//! settling. Its pins are released through the outbox, and its end does not depend on that.
//!
//! Invariants:
//! - `lease_id` is the live lease exactly while the state is assigned, starting or running. A lease
//!   that was given up belongs to no workload any more ([`crate::leases`]).
//! - `ending` is set from settling on.
//! - `finished` is reached once, and its event is the last one.

use std::time::Duration;

use db::rows;
use domain::worker::LeaseClaims;
use domain::workload::{Exit, Image, Usage, WorkloadSpec};
use domain::{AttemptId, Digest, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveEnum, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QuerySelect, Set, Statement,
};
use uuid::Uuid;

use crate::config::Config;
use crate::db::entity::lease::{EndedBy, StopReason};
use crate::db::entity::workload::{self, Model, State};
use crate::db::entity::{from_json, lease, to_json};
use crate::leases;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message, Parcel, Settlement};
use crate::outcome::{self, Allowed, AttemptEnd, Ending, NextStep, Report};
use crate::placement::{Demand, FailedWorker, Location};
use crate::workers;
use crate::workers::quarantine;
use crate::workloads::events::{AttemptLocation, Event, InputProgress};

mod deadlines;
pub(crate) mod events;

pub(crate) mod operations;
mod pending;
pub(crate) mod references;
pub(crate) mod results;
mod retry;
#[cfg(test)]
pub(crate) mod test_support;
mod view;
pub(crate) mod watch_poll;

pub(crate) use deadlines::{next_deadline, overdue, time_out};
pub(crate) use pending::{PendingWorkload, pending};
use retry::requeue;
pub(crate) use retry::{interrupt, last_failure};
pub(crate) use view::{Workload, list, view};

// These conditions equal those of the partial indexes of the table. With a parameter, PostgreSQL
// would not use the indexes and SQLite would plan the statement for each execution.
const ACCEPTED: &str = "state = 'accepted'";
const PENDING: &str = "state = 'pending'";
const FINISHED: &str = "state = 'finished'";
const UNFINISHED: &str = "state <> 'finished'";
const NAMED: &str = "name <> ''";

/// A workload that a caller submits.
#[derive(Debug, Clone)]
pub(crate) struct Submission {
    pub(crate) id: WorkloadId,
    pub(crate) spec: WorkloadSpec,
    encoded: Vec<u8>,
    /// Digest of the spec as submitted, which identifies a repeat.
    pub(crate) digest: Digest,
    traceparent: String,
}

/// Reason why a call about a workload fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    /// The team has no such workload.
    #[error("workload {0} is unknown to this team")]
    NotFound(WorkloadId),
    /// The team has no workload with this name, and none with an id that begins with it.
    #[error("this team has no workload with the name {0:?}, and none with an id that begins with it")]
    NoMatch(String),
    /// The database failed.
    #[error("cannot access the workload in the database")]
    Database(#[from] DbErr),
}

/// Reason why a gateway's call about an attempt is rejected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    /// The lease of the attempt has ended or must end.
    #[error("the lease of the attempt is lost")]
    LeaseLost,
    /// The database failed.
    #[error("cannot access the workload in the database")]
    Database(#[from] DbErr),
}

impl Submission {
    /// Creates a submission with the encoded spec.
    pub(crate) fn new(id: WorkloadId, spec: WorkloadSpec, traceparent: Option<String>) -> Self {
        let encoded = rpc::spec::encode(&spec);
        let digest = Digest(*blake3::hash(&encoded).as_bytes());
        Self { id, spec, encoded, digest, traceparent: traceparent.unwrap_or_default() }
    }

    /// Returns the submission with its resolved image.
    pub(crate) fn with_image(self, image: Image) -> Self {
        let spec = WorkloadSpec { image, ..self.spec.clone() };
        self.with_spec(spec)
    }

    /// Returns the submission with the spec that it resolves to.
    pub(crate) fn with_spec(self, spec: WorkloadSpec) -> Self {
        Self { encoded: rpc::spec::encode(&spec), spec, ..self }
    }

    /// Returns the submission with its resolved worker.
    pub(crate) fn with_worker(self, worker: WorkerId) -> Self {
        let spec = WorkloadSpec { worker: worker.to_string(), ..self.spec.clone() };
        self.with_spec(spec)
    }

    /// Returns the submission with the spec of the stored row.
    pub(crate) fn as_kept(&self, row: &Model) -> Result<Self, DbErr> {
        Ok(Self { spec: spec(row)?, encoded: row.spec.clone(), ..self.clone() })
    }

    /// Returns the size of the encoded spec, in bytes.
    pub(crate) fn spec_bytes(&self) -> u64 {
        self.encoded.len() as u64
    }

    /// Returns whether the artifact store must pin something before the workload may be queued.
    pub(crate) fn pins(&self) -> bool {
        !self.spec.artifacts().is_empty() || !self.spec.caches.is_empty() || self.spec.build.is_some()
    }

    /// Creates the row, without inserting it.
    pub(crate) fn row(&self, state: State, now: Timestamp) -> Model {
        Model {
            id: self.id.uuid(),
            sequence: Uuid::now_v7(),
            team: self.spec.team.clone(),
            spec: self.encoded.clone(),
            spec_digest: self.digest.as_bytes().to_vec(),
            traceparent: self.traceparent.clone(),
            // Its services are attempts of their own in the artifact store.
            settles: self.pins() || !self.spec.outputs.is_empty() || !self.spec.services.is_empty(),
            state,
            revision: 0,
            submitted_at: now.0,
            started_at: None,
            finished_at: None,
            queue_deadline: self.spec.queue_timeout.map(|timeout| (now + timeout).0),
            run_deadline: None,
            lease_id: None,
            attempt_id: None,
            location: None,
            locations: "[]".to_owned(),
            waiting_for: "[]".to_owned(),
            ending: None,
            priority: i64::from(self.spec.priority),
            interruptible: self.spec.interruptible,
            failed_on: "[]".to_owned(),
            // The bound keeps the sum with a time within the range.
            start_timeout_us: self
                .spec
                .start_timeout
                .map(|timeout| Ord::min((Timestamp(0) + timeout).0, i64::MAX / 2)),
            retried: 0,
            outcome: None,
            abridged: false,
            name: self.spec.name.clone(),
        }
    }

    /// Checks that the digest of a stored spec equals that of this submission.
    pub(crate) fn repeats(&self, digest: &[u8]) -> Result<(), OtherSpec> {
        if digest == self.digest.as_bytes() { Ok(()) } else { Err(OtherSpec(self.id)) }
    }
}

/// The id belongs to a workload with another spec.
#[derive(Debug, thiserror::Error)]
#[error("workload {0} exists, with another spec")]
pub(crate) struct OtherSpec(pub(crate) WorkloadId);

/// Decodes the stored spec.
pub(crate) fn spec(row: &Model) -> Result<WorkloadSpec, DbErr> {
    rpc::spec::decode(&row.spec).map_err(|error| DbErr::Type(error.message().to_owned()))
}

/// Returns whether the failed workers of `demand` equal those in the JSON column of its workload.
pub(crate) fn has_failed_on(demand: &Demand, stored: &str) -> Result<bool, DbErr> {
    // Most workloads have no failures, so the common case avoids parsing.
    let failed_on: Vec<FailedWorker> = if stored == "[]" { Vec::new() } else { from_json(stored)? };
    Ok(demand.failed_on == failed_on)
}

/// Returns the locations of the inputs when they were pinned.
pub(crate) fn locations(row: &Model) -> Result<Vec<Location>, DbErr> {
    from_json(&row.locations)
}

/// Returns the requirements of the workload.
pub(crate) fn demand(row: &Model) -> Result<Demand, DbErr> {
    Ok(Demand::of(&spec(row)?, row.id).failed_on(from_json(&row.failed_on)?))
}

/// Reads the committed row of a workload.
pub(crate) async fn find(db: &impl ConnectionTrait, id: WorkloadId) -> Result<Option<Model>, DbErr> {
    workload::Entity::find_by_id(id.uuid()).one(db).await
}

/// Reads and locks the row of a workload until the end of the transaction.
pub(crate) async fn lock(txn: &DatabaseTransaction, id: WorkloadId) -> Result<Option<Model>, DbErr> {
    workload::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await
}

/// How a row is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    /// The row is new.
    Insert,
    /// The row exists, and this transaction has locked it.
    Update,
}

/// Writes `row`, with `event` as its next revision.
pub(crate) async fn save(
    txn: &DatabaseTransaction,
    mut row: Model,
    write: Write,
    event: Option<&Event>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let id = WorkloadId::from_uuid(row.id);
    if event.is_some() {
        row.revision += 1;
    }
    let revision = row.revision;
    match write {
        Write::Insert => {
            _ = workload::Entity::insert(row.into_active_model()).exec_without_returning(txn).await?
        }
        Write::Update => {
            // Columns that never change are omitted.
            let changes = workload::ActiveModel {
                id: sea_orm::Unchanged(row.id),
                state: Set(row.state),
                revision: Set(row.revision),
                started_at: Set(row.started_at),
                finished_at: Set(row.finished_at),
                queue_deadline: Set(row.queue_deadline),
                run_deadline: Set(row.run_deadline),
                lease_id: Set(row.lease_id),
                attempt_id: Set(row.attempt_id),
                location: Set(row.location),
                locations: Set(row.locations),
                waiting_for: Set(row.waiting_for),
                ending: Set(row.ending),
                failed_on: Set(row.failed_on),
                retried: Set(row.retried),
                outcome: Set(row.outcome),
                ..Default::default()
            };
            workload::Entity::update_many()
                .set(changes)
                .filter(workload::Column::Id.eq(row.id))
                .exec(txn)
                .await?;
        }
    }
    if let Some(event) = event {
        events::append(txn, id, revision, event, now).await?;
        effects.workloads.push(id);
    }
    Ok(())
}

/// Leaves a workload in the queue. Emits an event if the reasons are new.
pub(crate) async fn queue(
    txn: &DatabaseTransaction,
    mut row: Model,
    write: Write,
    reasons: Vec<String>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let waiting_for = to_json(&reasons)?;
    if row.state == State::Pending && write == Write::Update && row.waiting_for == waiting_for {
        return Ok(());
    }
    row.state = State::Pending;
    row.waiting_for = waiting_for;
    effects.deadline |= row.queue_deadline.is_some();
    save(txn, row, write, Some(&Event::Queued { reasons }), now, effects).await
}

/// Deletes a workload whose inputs could not be pinned. Returns `false` if the workload has left
/// the accepted state.
pub(crate) async fn withdraw(txn: &DatabaseTransaction, id: WorkloadId) -> Result<bool, DbErr> {
    let removed = workload::Entity::delete_many()
        .filter(workload::Column::Id.eq(id.uuid()))
        .filter(Expr::cust(ACCEPTED))
        .exec(txn)
        .await?;
    Ok(removed.rows_affected > 0)
}

/// Ends the workload of a locked row, after `attempt` if there was one.
pub(crate) async fn conclude(
    txn: &DatabaseTransaction,
    mut row: Model,
    ending: Ending,
    attempt: Option<AttemptId>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let id = WorkloadId::from_uuid(row.id);
    if row.state == State::Pending {
        effects.queued.push(id);
    }
    row.lease_id = None;
    row.attempt_id = None;
    row.run_deadline = None;
    row.waiting_for = "[]".to_owned();
    row.ending = Some(to_json(&ending)?);
    let mut must_settle_first = false;
    if row.settles {
        let spec = spec(&row)?;
        // Settling matters to others only after an attempt with outputs, a build or changed caches.
        must_settle_first = attempt.is_some()
            && (!spec.outputs.is_empty() || spec.build.is_some() || !ending.caches.is_empty());
        let settlement = Settlement {
            team: row.team.clone(),
            attempt,
            outputs: ending.outputs.clone(),
            build: spec.build,
            outcome: ending.outcome,
            owners: spec.owners_of(&ending.outputs),
            caches: ending.caches.clone(),
        };
        effects.parcels.push(outbox::put(txn, id.uuid(), Message::Settle(settlement), now).await?);
    } else if let Some(attempt) = attempt {
        effects.parcels.push(outbox::put(txn, id.uuid(), Message::EndAttempt { attempt }, now).await?);
    }
    if must_settle_first {
        row.state = State::Settling;
        return save(txn, row, Write::Update, None, now, effects).await;
    }
    finish(txn, row, ending, now, effects).await
}

/// Finishes a workload. Abridges a large spec, because finished workloads are kept for long.
async fn finish(
    txn: &DatabaseTransaction,
    mut row: Model,
    ending: Ending,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    row.state = State::Finished;
    row.finished_at = Some(now.0);
    row.outcome = Some(ending.outcome.into());
    if row.spec.len() > rpc::spec::MAX_FINISHED_BYTES {
        let kept = rpc::spec::encode(&rpc::spec::abridged(spec(&row)?));
        workload::Entity::update_many()
            .col_expr(workload::Column::Spec, Expr::value(kept))
            .col_expr(workload::Column::Abridged, Expr::value(true))
            .filter(workload::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
    }
    let event = Event::Finished { ending, location: location(&row)? };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// Locks those of the workloads that are being settled, in the order of their ids.
pub(crate) async fn settling(
    txn: &DatabaseTransaction,
    ids: impl Iterator<Item = WorkloadId>,
) -> Result<Vec<WorkloadId>, DbErr> {
    let backend = txn.get_database_backend();
    let query = format!(
        "SELECT id FROM workloads WHERE id {} AND state = $2 ORDER BY id {}",
        rows::among(backend, 1),
        rows::lock(backend, "FOR UPDATE")
    );
    let values = [rows::ids(ids.map(WorkloadId::uuid))?, State::Settling.to_value().into()];
    let found = txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await?;
    found.iter().map(|row| row.try_get("", "id").map(WorkloadId::from_uuid)).collect()
}

/// Finishes a workload that the artifact store has settled. Does nothing in other states.
pub(crate) async fn settled(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(row) = lock(txn, id).await?.filter(|row| row.state == State::Settling) else { return Ok(()) };
    let ending = ending(&row)?;
    finish(txn, row, ending, now, effects).await
}

/// Removes outputs and caches from a workload and its parcel, because the artifact store lacks an
/// output.
pub(crate) async fn lose_outputs(txn: &DatabaseTransaction, parcel: &Parcel) -> Result<(), DbErr> {
    outbox::replace(txn, parcel.id, &parcel.message).await?;
    let row = lock(txn, parcel.workload()).await?.filter(|row| row.state == State::Settling);
    let Some(mut row) = row else { return Ok(()) };
    row.ending = Some(to_json(&ending(&row)?.without_outputs())?);
    save(txn, row, Write::Update, None, Timestamp(0), &mut Effects::default()).await
}

fn ending(row: &Model) -> Result<Ending, DbErr> {
    from_json(row.ending.as_deref().unwrap_or("null"))
}

/// Returns the worker, gateway and id of the present or last attempt.
pub(crate) fn location(row: &Model) -> Result<Option<AttemptLocation>, DbErr> {
    row.location.as_deref().map(from_json).transpose()
}

/// Marks the process of an attempt as about to start. From the commit on, the attempt counts as
/// started.
pub(crate) async fn start_attempt(
    txn: &DatabaseTransaction,
    claims: &LeaseClaims,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), AttemptError> {
    let (mut row, lease) = lock_attempt(txn, claims).await?.ok_or(AttemptError::LeaseLost)?;
    if lease.state != lease::State::Granted {
        return Err(AttemptError::LeaseLost);
    }
    match row.state {
        State::Assigned => {}
        State::Starting | State::Running => return Ok(()),
        _ => return Err(AttemptError::LeaseLost),
    }
    row.state = State::Starting;
    row.run_deadline = spec(&row)?.run_timeout.map(|timeout| (now + timeout).0);
    effects.deadline |= row.run_deadline.is_some();
    Ok(save(txn, row, Write::Update, None, now, effects).await?)
}

/// Ends an attempt with the report of its gateway. The first report counts, and repeats are
/// acknowledged.
///
/// An attempt that ended before its process started, through the fault of its worker, does not end
/// the workload while another worker could take it.
pub(crate) async fn finish_attempt(
    txn: &DatabaseTransaction,
    claims: &LeaseClaims,
    report: Report,
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), AttemptError> {
    if let Some((row, lease)) = lock_attempt(txn, claims).await? {
        if retry::after_fault(txn, &row, &lease, &report, config, now, effects).await? {
            return Ok(());
        }
        let row = retry::after_start_timeout(txn, row, &lease, config).await?;
        return Ok(end_attempt(txn, row, &lease, AttemptEnd::Reported(Box::new(report)), now, effects).await?);
    }
    // For a lease that was given up, the report only confirms that the attempt has stopped.
    if end_given_up(txn, claims.lease, EndedBy::Reported, now, effects).await? {
        return Ok(());
    }
    match leases::find(txn, claims.lease).await? {
        Some(lease) if lease.ended_by == Some(EndedBy::Reported) => Ok(()),
        _ => Err(AttemptError::LeaseLost),
    }
}

/// Ends a lease that was given up, because nothing runs under it any more. Returns `false` if the
/// lease was not given up or has ended.
async fn end_given_up(
    txn: &DatabaseTransaction,
    lease: LeaseId,
    by: EndedBy,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<bool, DbErr> {
    let found = leases::find(txn, lease).await?;
    if found.is_none_or(|lease| lease.stop_reason != Some(StopReason::WorkerLost)) {
        return Ok(false);
    }
    leases::end(txn, lease, by, now, effects).await
}

/// Locks the workload of `claims` and returns it with its live lease. Returns `None` if the lease
/// has ended.
async fn lock_attempt(
    txn: &DatabaseTransaction,
    claims: &LeaseClaims,
) -> Result<Option<(Model, lease::Model)>, DbErr> {
    let Some((workload, _)) = claims.attempt else { return Ok(None) };
    let Some(row) = lock(txn, workload).await? else { return Ok(None) };
    if row.lease_id != Some(claims.lease.uuid()) {
        return Ok(None);
    }
    let lease = leases::find(txn, claims.lease).await?;
    Ok(lease.filter(|lease| lease.state != lease::State::Ended).map(|lease| (row, lease)))
}

/// Ends the attempt under `lease` without a report of its gateway. For a driven lease: ends it,
/// because nothing runs under it any more, or gives it up.
pub(crate) async fn lose_attempt(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    end: AttemptEnd,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if let Some((row, lease)) = lock_attempt(txn, &leases::claims(lease)).await? {
        return end_attempt(txn, row, &lease, end, now, effects).await;
    }
    let id = LeaseId::from_uuid(lease.id);
    // The lease may have come into use since it was read.
    let Some(lease) = leases::lock(txn, id).await? else { return Ok(()) };
    let is_lost = matches!(end, AttemptEnd::WorkerLost);
    let may_still_run = is_lost && lease.in_use && workers::may_still_run(txn, &lease).await?;
    // A lease is given up only once.
    let is_given_up = lease.stop_reason == Some(StopReason::WorkerLost);
    match may_still_run {
        true if lease.is_driven() && !is_given_up => leases::give_up(txn, &lease, effects).await.map(drop),
        false if lease.is_driven() || is_given_up => {
            leases::end(txn, id, EndedBy::Lost, now, effects).await.map(drop)
        }
        true | false => Ok(()),
    }
}

/// Ends the attempt under the lease of a stalled worker, unless its process counts as started.
/// Another worker can take the workload.
pub(crate) async fn withdraw_attempt(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if let Some((row, lease)) = lock_attempt(txn, &leases::claims(lease)).await?
        && row.state == State::Assigned
    {
        end_attempt(txn, row, &lease, AttemptEnd::WorkerLost, now, effects).await?;
    }
    Ok(())
}

async fn end_attempt(
    txn: &DatabaseTransaction,
    mut row: Model,
    lease: &lease::Model,
    end: AttemptEnd,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let started = matches!(row.state, State::Starting | State::Running);
    let by = if matches!(end, AttemptEnd::Reported(_)) { EndedBy::Reported } else { EndedBy::Lost };
    let is_lost = matches!(end, AttemptEnd::WorkerLost);
    let may_still_run = is_lost && started && workers::may_still_run(txn, lease).await?;
    let has_ended = match may_still_run {
        true => leases::give_up(txn, lease, effects).await?,
        false => leases::end(txn, LeaseId::from_uuid(lease.id), by, now, effects).await?,
    };
    if !has_ended {
        return Ok(());
    }
    let id = WorkloadId::from_uuid(row.id);
    let attempt = lease.attempt_id.map(AttemptId::from_uuid);
    let mut end = match end {
        AttemptEnd::Reported(mut report) => {
            if row.started_at.is_none() {
                row.started_at = report.started_at.map(|at| at.0);
            }
            let spec = spec(&row)?;
            report.outputs.retain(|output| {
                let known = spec.outputs.iter().any(|known| known.name == output.name)
                    && output.artifact == id.output_artifact(&output.name);
                if !known {
                    tracing::warn!(workload.id = %id, output = output.name, "scheduler dropped an output that the spec does not declare");
                }
                known
            });
            report.caches.retain(|left| {
                let known = spec.caches.iter().any(|mount| mount.cache == left.cache)
                    && left.artifact == id.cache_artifact(left.cache);
                if !known {
                    tracing::warn!(workload.id = %id, cache.id = %left.cache, "scheduler dropped a task cache that the spec does not declare");
                }
                known
            });
            report.result = report.result.filter(|_| spec.keep_result);
            AttemptEnd::Reported(report)
        }
        lost => lost,
    };

    if row.state == State::Starting && matches!(&end, AttemptEnd::Reported(report) if report.exit.is_some()) {
        emit_running(txn, &mut row, now, effects).await?;
    }
    let usage = usage(&row, lease, &end);
    let result = match &mut end {
        AttemptEnd::Reported(report) => report.result.take(),
        AttemptEnd::WorkerLost | AttemptEnd::Unknown => None,
    };
    // If the attempt may still run, a retry would run the workload twice at a time.
    let mut allowed = if may_still_run { Allowed::default() } else { remaining_retries(&row)? };
    allowed.ends_when_lost = allowed.once_more() && workers::is_surely_stopped(txn, lease).await?;
    match outcome::decide(started, allowed, lease.stop_reason, end) {
        NextStep::End(ending) => {
            let result = result.filter(|_| matches!(ending.exit, Some(Exit::Code(_))));
            if let Some(result) = &result {
                results::insert(txn, id, result).await?;
            }
            let ending = Ending { usage: Some(usage), has_result: result.is_some(), ..ending };
            conclude(txn, row, ending, attempt, now, effects).await
        }
        NextStep::Again => {
            let reasons = vec![requeue_reason(lease.stop_reason)];
            requeue(txn, row, lease.attempt_id, reasons, now, effects).await
        }
        NextStep::Retry(failure) => {
            row.retried += 1;
            let reasons = vec![format!("retried after {}: {}", failure.reason, failure.message)];
            requeue(txn, row, lease.attempt_id, reasons, now, effects).await
        }
    }
}

/// Describes why a workload waits again after an attempt that did not run, or that was interrupted.
fn requeue_reason(stop: Option<StopReason>) -> String {
    match stop {
        Some(StopReason::Interrupted) => "waiting again: its worker was cordoned or retired (INTERRUPTED)",
        _ => "waiting again: its worker was lost, out of contact, or did not know the attempt",
    }
    .to_owned()
}

/// Returns the remaining retries of the workload.
fn remaining_retries(row: &Model) -> Result<Allowed, DbErr> {
    let retried = u32::try_from(row.retried).unwrap_or(u32::MAX);
    let (interruptible, retries) = (row.interruptible, spec(row)?.retries);
    Ok(Allowed { interruptible, retries, retried, ends_when_lost: false })
}

/// Returns the usage of the attempt.
fn usage(row: &Model, lease: &lease::Model, end: &AttemptEnd) -> Usage {
    let granted = Timestamp(lease.granted_at);
    let started = row.started_at.map(Timestamp);
    let reported = match end {
        AttemptEnd::Reported(report) => report.usage.clone(),
        AttemptEnd::WorkerLost | AttemptEnd::Unknown => Usage::default(),
    };
    Usage {
        queued: Some(granted.since(Timestamp(row.submitted_at))),
        preparing: started.map(|started| started.since(granted)),
        ..reported
    }
}

/// Emits the `Running` event, on which watchers attach to the process. A process may end before its
/// gateway could report that it ran. The event is emitted nevertheless, before the end.
///
/// Changes `row`, which the caller saves.
async fn emit_running(
    txn: &DatabaseTransaction,
    row: &mut Model,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(location) = location(row)? else { return Ok(()) };
    let id = WorkloadId::from_uuid(row.id);
    quarantine::record_success(txn, location.worker.uuid(), effects).await?;
    row.state = State::Running;
    row.started_at.get_or_insert(now.0);
    row.revision += 1;
    events::append(txn, id, row.revision, &Event::Running { location }, now).await?;
    effects.workloads.push(id);
    Ok(())
}

/// The phase of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// The container is being created.
    Preparing = 1,
    /// The process runs.
    Running = 2,
    /// The process has ended.
    Publishing = 3,
    /// Nothing of the attempt runs any more.
    Ended = 4,
}

/// Records the phase of the attempt under `lease`.
pub(crate) async fn observe_phase(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    phase: Phase,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some((mut row, lease)) = lock_attempt(txn, &leases::claims(lease)).await? else { return Ok(()) };
    if phase == Phase::Ended && lease.state == lease::State::Ending && row.state == State::Assigned {
        // The start was rejected because the attempt must stop, so the gateway will not report an
        // end.
        return end_attempt(txn, row, &lease, AttemptEnd::Unknown, now, effects).await;
    }
    if !leases::raise_phase(txn, LeaseId::from_uuid(lease.id), phase as i64).await? {
        return Ok(());
    }
    let event = match (phase, row.state) {
        (Phase::Preparing, State::Assigned | State::Starting) => {
            effects.deadline |= row.start_timeout_us.is_some();
            Event::Preparing
        }
        (Phase::Running, State::Starting) => {
            row.state = State::Running;
            row.started_at = Some(now.0);
            let Some(location) = location(&row)? else { return Ok(()) };
            quarantine::record_success(txn, lease.worker_id, effects).await?;
            Event::Running { location }
        }
        (Phase::Publishing, State::Starting | State::Running) => {
            if row.state == State::Starting {
                emit_running(txn, &mut row, now, effects).await?;
            }
            // The run timeout applies to the process, which has ended.
            row.run_deadline = None;
            Event::Publishing
        }
        _ => return Ok(()),
    };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// Records the progress of the inputs of the attempt under `lease`.
pub(crate) async fn observe_inputs(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    inputs: &[InputProgress],
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some((row, _)) = lock_attempt(txn, &leases::claims(lease)).await? else { return Ok(()) };
    if row.state != State::Assigned {
        return Ok(());
    }
    // The bound is the number of inputs that the workload can have, including its image and the
    // worker's certificates. A worker could report any number.
    let known = spec(&row)?;
    let most = known.inputs.len() + known.caches.len() + 2;
    let event = Event::Materializing { inputs: inputs.iter().take(most).cloned().collect() };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// Cancels a workload. A workload that has ended or is being settled stays as it is.
pub(crate) async fn cancel(
    txn: &DatabaseTransaction,
    team: &str,
    id: WorkloadId,
    grace: Duration,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), WorkloadError> {
    let row = lock(txn, id).await?.filter(|row| row.team == team).ok_or(WorkloadError::NotFound(id))?;
    match row.state {
        State::Accepted | State::Pending => conclude(txn, row, Ending::aborted(), None, now, effects).await?,
        State::Assigned | State::Starting | State::Running => {
            stop(txn, &row, StopReason::Cancelled, grace, effects).await?;
        }
        State::Settling | State::Finished => {}
    }
    Ok(())
}

async fn stop(
    txn: &DatabaseTransaction,
    row: &Model,
    reason: StopReason,
    grace: Duration,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(lease) = row.lease_id else { return Ok(()) };
    match leases::find(txn, LeaseId::from_uuid(lease)).await? {
        Some(lease) => leases::stop(txn, lease, reason, grace, effects).await,
        None => Ok(()),
    }
}

/// Returns workloads that were accepted before `before` and whose inputs were never pinned.
pub(crate) async fn forgotten(
    db: &impl ConnectionTrait,
    before: Timestamp,
) -> Result<Vec<WorkloadId>, DbErr> {
    let ids = workload::Entity::find()
        .select_only()
        .column(workload::Column::Id)
        .filter(Expr::cust(ACCEPTED))
        .filter(workload::Column::SubmittedAt.lt(before.0))
        .limit(100)
        .into_tuple::<Uuid>()
        .all(db)
        .await?;
    Ok(ids.into_iter().map(WorkloadId::from_uuid).collect())
}

/// Ends a workload whose inputs were never pinned.
pub(crate) async fn end_unpinned(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(row) = lock(txn, id).await?.filter(|row| row.state == State::Accepted) else { return Ok(()) };
    conclude(txn, row, Ending::not_pinned(), None, now, effects).await
}

/// Deletes up to 100 workloads that finished before `before`, with their events and leases, if the
/// artifact store has acknowledged all calls about them.
pub(crate) async fn forget(txn: &DatabaseTransaction, before: Timestamp) -> Result<u64, DbErr> {
    let old = workload::Entity::find()
        .select_only()
        .column(workload::Column::Id)
        .filter(Expr::cust(FINISHED))
        .filter(workload::Column::FinishedAt.lt(before.0))
        .filter(Expr::cust("NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.holder_id = workloads.id)"))
        // A lease that was given up and may still run keeps its slot.
        .filter(Expr::cust(
            "NOT EXISTS (SELECT 1 FROM leases WHERE leases.workload_id = workloads.id AND leases.state <> 'ended')",
        ))
        .limit(100)
        .into_tuple::<Uuid>()
        .all(txn)
        .await?;
    let mut forgotten = 0;
    for id in old {
        forgotten += workload::Entity::delete_by_id(id).exec(txn).await?.rows_affected;
    }
    Ok(forgotten)
}

/// Returns the settlement of a finished workload that the artifact store still has pins for.
/// Returns `None` if the workload has not finished.
pub(crate) fn settlement_of_finished(row: &Model) -> Result<Option<Settlement>, DbErr> {
    if row.state != State::Finished {
        return Ok(None);
    }
    let ending = ending(row)?;
    let location = location(row)?;
    Ok(Some(Settlement {
        team: row.team.clone(),
        attempt: location.map(|location| location.attempt),
        outputs: vec![],
        build: spec(row)?.build,
        outcome: ending.outcome,
        owners: vec![],
        caches: vec![],
    }))
}

#[cfg(test)]
mod tests;
