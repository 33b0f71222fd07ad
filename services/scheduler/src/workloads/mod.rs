//! Workloads: what was submitted, and how far it is.
//!
//! ```text
//! accepted ─pinned─▶ pending ─placed─▶ assigned ─start─▶ starting ─seen─▶ running ─ended─▶ settling ─settled─▶ finished
//!     └─refused─▶ (gone) ▲└─cancelled, waited too long─▶ finished  └────────ended────────────▲
//!                        └──its lease ended, nothing ran──┘
//! ```
//!
//! Every transition happens on a row that its transaction has locked ([`lock`]) or inserted, and raises the row's revision for each
//! event that it makes. One that has no outputs and ends no build goes to finished without settling: what the artifact store keeps for it,
//! the store is told to drop, and nobody waits for that.
//!
//! Invariants: `lease_id` names the live lease exactly while the state is assigned, starting or running, but for one that was given up, which no
//! workload holds any more ([`crate::leases`]); `ending` is set from settling on; `finished` is reached once, and is the last event.

use std::time::Duration;

use db::rows;
use domain::worker::LeaseClaims;
use domain::workload::{Image, Usage, WorkloadSpec};
use domain::{AttemptId, Digest, LeaseId, Timestamp, WorkloadId};
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
use crate::outcome::{self, Allowed, AttemptEnd, Ending, Next, Report};
use crate::placement::{Demand, FailedThere, Location};
use crate::workers;
use crate::workers::quarantine;
use crate::workloads::events::{Event, InputProgress, Whereabouts};

mod deadlines;
pub(crate) mod events;
pub(crate) mod operations;
mod pending;
mod retry;
#[cfg(test)]
pub(crate) mod test_support;
mod view;
pub(crate) mod watch_poll;

pub(crate) use deadlines::{next_deadline, overdue, time_out};
pub(crate) use pending::{Pending, pending};
use retry::again;
pub(crate) use retry::{interrupt, last_failure};
pub(crate) use view::{Workload, list, view};

// Written out, as in partial indexes of the table: for a parameter in its place PostgreSQL would not use them, and SQLite would plan the statement
// anew each time.
const ACCEPTED: &str = "state = 'accepted'";
const PENDING: &str = "state = 'pending'";
const FINISHED: &str = "state = 'finished'";

/// What a caller submitted.
#[derive(Debug, Clone)]
pub(crate) struct Submission {
    pub(crate) id: WorkloadId,
    pub(crate) spec: WorkloadSpec,
    encoded: Vec<u8>,
    /// Of the spec as it was asked for, by which a repeat is known.
    pub(crate) digest: Digest,
    traceparent: String,
}

/// A call about one workload cannot be answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    /// There is none in this team.
    #[error("workload {0} is unknown to this team")]
    NotFound(WorkloadId),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// A gateway's word about an attempt does not count.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    /// Its lease has ended, or shall end.
    #[error("the lease of this attempt is lost")]
    LeaseLost,
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

impl Submission {
    /// What `spec` says, as it will be kept.
    pub(crate) fn new(id: WorkloadId, spec: WorkloadSpec, traceparent: Option<String>) -> Self {
        let encoded = rpc::spec::encode(&spec);
        let digest = Digest(*blake3::hash(&encoded).as_bytes());
        Self { id, spec, encoded, digest, traceparent: traceparent.unwrap_or_default() }
    }

    /// The same, with this image in the place of what was asked for.
    pub(crate) fn with_image(self, image: Image) -> Self {
        let spec = WorkloadSpec { image, ..self.spec };
        Self { encoded: rpc::spec::encode(&spec), spec, ..self }
    }

    /// The same, as it was written down.
    pub(crate) fn as_kept(&self, row: &Model) -> Result<Self, DbErr> {
        Ok(Self { spec: spec(row)?, encoded: row.spec.clone(), ..self.clone() })
    }

    /// Bytes of the spec, as it will be kept.
    pub(crate) fn spec_bytes(&self) -> u64 {
        self.encoded.len() as u64
    }

    /// Whether something must be pinned in the artifact store before it may be queued.
    pub(crate) fn pins(&self) -> bool {
        !self.spec.artifacts().is_empty() || !self.spec.caches.is_empty() || self.spec.build.is_some()
    }

    /// Its row, which is in no database yet.
    pub(crate) fn row(&self, state: State, now: Timestamp) -> Model {
        Model {
            id: self.id.uuid(),
            sequence: Uuid::now_v7(),
            team: self.spec.team.clone(),
            spec: self.encoded.clone(),
            spec_digest: self.digest.as_bytes().to_vec(),
            traceparent: self.traceparent.clone(),
            settles: self.pins() || !self.spec.outputs.is_empty(),
            state,
            revision: 0,
            submitted_at: now.0,
            started_at: None,
            finished_at: None,
            queue_deadline: self.spec.queue_timeout.map(|timeout| (now + timeout).0),
            run_deadline: None,
            lease_id: None,
            attempt_id: None,
            whereabouts: None,
            locations: "[]".to_owned(),
            waiting_for: "[]".to_owned(),
            ending: None,
            priority: i64::from(self.spec.priority),
            interruptible: self.spec.interruptible,
            failed_on: "[]".to_owned(),
            // A sum with an instant is one still.
            start_timeout_us: self
                .spec
                .start_timeout
                .map(|timeout| Ord::min((Timestamp(0) + timeout).0, i64::MAX / 2)),
            retried: 0,
            outcome: None,
            abridged: false,
        }
    }

    /// Whether a workload with this digest of its spec is the same that was submitted before.
    pub(crate) fn repeats(&self, digest: &[u8]) -> Result<(), OtherSpec> {
        if digest == self.digest.as_bytes() { Ok(()) } else { Err(OtherSpec(self.id)) }
    }
}

/// An id names another workload.
#[derive(Debug, thiserror::Error)]
#[error("workload {0} exists, with another spec")]
pub(crate) struct OtherSpec(pub(crate) WorkloadId);

/// The spec that was kept.
pub(crate) fn spec(row: &Model) -> Result<WorkloadSpec, DbErr> {
    rpc::spec::decode(&row.spec).map_err(|error| DbErr::Type(error.message().to_owned()))
}

/// Whether `demand` could not be started there and nowhere else, as the row of its workload says.
pub(crate) fn has_failed_on(demand: &Demand, said: &str) -> Result<bool, DbErr> {
    // Of nearly all nothing is said.
    let said: Vec<FailedThere> = if said == "[]" { Vec::new() } else { from_json(said)? };
    Ok(demand.failed_on == said)
}

/// Where its inputs were when they were pinned.
pub(crate) fn locations(row: &Model) -> Result<Vec<Location>, DbErr> {
    from_json(&row.locations)
}

/// What the workload of `row` asks of its worker.
pub(crate) fn demand(row: &Model) -> Result<Demand, DbErr> {
    Ok(Demand::of(&spec(row)?, row.id).failed_on(from_json(&row.failed_on)?))
}

/// One row, as it was last committed.
pub(crate) async fn find(db: &impl ConnectionTrait, id: WorkloadId) -> Result<Option<Model>, DbErr> {
    workload::Entity::find_by_id(id.uuid()).one(db).await
}

/// One row, which nobody else changes until the end of the transaction.
pub(crate) async fn lock(txn: &DatabaseTransaction, id: WorkloadId) -> Result<Option<Model>, DbErr> {
    workload::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await
}

/// Whether `row` is in a database yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Write {
    /// It is not.
    Insert,
    /// It is, and this transaction has locked it.
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
            // What never changes is left out.
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
                whereabouts: Set(row.whereabouts),
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

/// Leaves a workload in the queue, and says why it waits where that is news.
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

/// Removes a workload whose inputs could not be pinned. `false`: it has gone on in the meantime, and stays.
pub(crate) async fn withdraw(txn: &DatabaseTransaction, id: WorkloadId) -> Result<bool, DbErr> {
    let removed = workload::Entity::delete_many()
        .filter(workload::Column::Id.eq(id.uuid()))
        .filter(Expr::cust(ACCEPTED))
        .exec(txn)
        .await?;
    Ok(removed.rows_affected > 0)
}

/// Ends the workload of a row that is locked, after `attempt` if there was one.
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
    let mut awaited = false;
    if row.settles {
        let spec = spec(&row)?;
        // Nobody waits for outputs of what never ran, nor for pins to be dropped. Who runs next finds what was left in a cache.
        awaited = attempt.is_some()
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
    if awaited {
        row.state = State::Settling;
        return save(txn, row, Write::Update, None, now, effects).await;
    }
    finish(txn, row, ending, now, effects).await
}

/// Ends a workload for good. Of a large spec little is kept from then on, for finished workloads are kept for long.
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
    if row.spec.len() > rpc::spec::MOST_FINISHED_BYTES {
        let kept = rpc::spec::encode(&rpc::spec::abridged(spec(&row)?));
        workload::Entity::update_many()
            .col_expr(workload::Column::Spec, Expr::value(kept))
            .col_expr(workload::Column::Abridged, Expr::value(true))
            .filter(workload::Column::Id.eq(row.id))
            .exec(txn)
            .await?;
    }
    let event = Event::Finished { ending, whereabouts: whereabouts(&row)? };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// Locks those of workloads that are being settled, in the order of their ids.
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

/// The artifact store has settled a workload. Does nothing unless it was being settled.
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

/// The artifact store lacks an output: the workload and its parcel go on without outputs, and leave nothing in caches.
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

/// Where the present or last attempt is.
pub(crate) fn whereabouts(row: &Model) -> Result<Option<Whereabouts>, DbErr> {
    row.whereabouts.as_deref().map(from_json).transpose()
}

/// From the commit on, the process of this attempt counts as started.
pub(crate) async fn start_attempt(
    txn: &DatabaseTransaction,
    claims: &LeaseClaims,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), AttemptError> {
    let (mut row, lease) = hold(txn, claims).await?.ok_or(AttemptError::LeaseLost)?;
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

/// Ends an attempt as its gateway reports. The first report counts; repeating it is acknowledged.
///
/// One that ended through the fault of its worker, before its process had started, is not the end of its workload as long as another worker
/// could take that.
pub(crate) async fn finish_attempt(
    txn: &DatabaseTransaction,
    claims: &LeaseClaims,
    report: Report,
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), AttemptError> {
    if let Some((row, lease)) = hold(txn, claims).await? {
        if retry::after_fault(txn, &row, &lease, &report, config, now, effects).await? {
            return Ok(());
        }
        let row = retry::after_start_timeout(txn, row, &lease, config).await?;
        return Ok(end_attempt(txn, row, &lease, AttemptEnd::Reported(Box::new(report)), now, effects).await?);
    }
    // Of one that was given up nothing is wanted but that it has stopped.
    if end_given_up(txn, claims.lease, EndedBy::Reported, now, effects).await? {
        return Ok(());
    }
    match leases::find(txn, claims.lease).await? {
        Some(lease) if lease.ended_by == Some(EndedBy::Reported) => Ok(()),
        _ => Err(AttemptError::LeaseLost),
    }
}

/// Ends a lease that was given up: nothing of it runs any more. `false`: it was not, or has ended.
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

/// The workload and the live lease that `claims` are about, locked. `None`: the lease has ended.
async fn hold(
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

/// Ends the attempt under `lease` without a word of its gateway, because of `end`.
pub(crate) async fn lose_attempt(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    end: AttemptEnd,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if let Some((row, lease)) = hold(txn, &leases::claims(lease)).await? {
        return end_attempt(txn, row, &lease, end, now, effects).await;
    }
    // One that was given up is given up only once.
    if !matches!(end, AttemptEnd::WorkerLost) || !workers::may_run_still(txn, lease).await? {
        end_given_up(txn, LeaseId::from_uuid(lease.id), EndedBy::Lost, now, effects).await?;
    }
    Ok(())
}

/// Ends the attempt under `lease` unless its process counts as started: its worker is silent, and another can do it.
pub(crate) async fn take_back(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if let Some((row, lease)) = hold(txn, &leases::claims(lease)).await?
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
    let may_run_still = is_lost && started && workers::may_run_still(txn, lease).await?;
    let has_ended = match may_run_still {
        true => leases::give_up(txn, lease, effects).await?,
        false => leases::end(txn, LeaseId::from_uuid(lease.id), by, now, effects).await?,
    };
    if !has_ended {
        return Ok(());
    }
    let id = WorkloadId::from_uuid(row.id);
    let attempt = lease.attempt_id.map(AttemptId::from_uuid);
    let end = match end {
        AttemptEnd::Reported(mut report) => {
            if row.started_at.is_none() {
                row.started_at = report.started_at.map(|at| at.0);
            }
            let spec = spec(&row)?;
            report.outputs.retain(|output| {
                let known = spec.outputs.iter().any(|known| known.name == output.name)
                    && output.artifact == id.output_artifact(&output.name);
                if !known {
                    tracing::warn!(workload.id = %id, output = output.name, "dropping an output that was not asked for");
                }
                known
            });
            report.caches.retain(|left| {
                let known = spec.caches.iter().any(|mount| mount.cache == left.cache)
                    && left.artifact == id.cache_artifact(left.cache);
                if !known {
                    tracing::warn!(workload.id = %id, cache.id = %left.cache, "dropping what was left in a cache that it does not use");
                }
                known
            });
            AttemptEnd::Reported(report)
        }
        lost => lost,
    };

    if row.state == State::Starting && matches!(&end, AttemptEnd::Reported(report) if report.exit.is_some()) {
        ran(txn, &mut row, now, effects).await?;
    }
    let usage = usage(&row, lease, &end);
    // Never twice at a time.
    let mut allowed = if may_run_still { Allowed::default() } else { allowed(&row)? };
    allowed.ends_when_lost = allowed.once_more() && workers::sees_to_the_end(txn, lease).await?;
    match outcome::decide(started, allowed, lease.stop_reason, end) {
        Next::End(ending) => {
            let ending = Ending { usage: Some(usage), ..ending };
            conclude(txn, row, ending, attempt, now, effects).await
        }
        Next::Again => {
            let reasons = vec![began_again(lease.stop_reason)];
            again(txn, row, lease.attempt_id, reasons, now, effects).await
        }
        Next::Retry(failure) => {
            row.retried += 1;
            let reasons = vec![format!("begins again after {}: {}", failure.reason, failure.message)];
            again(txn, row, lease.attempt_id, reasons, now, effects).await
        }
    }
}

/// Why a workload waits again of which nothing ran, or which may be interrupted.
fn began_again(stop: Option<StopReason>) -> String {
    match stop {
        Some(StopReason::Interrupted) => "begins again, for its worker was landed or retired (INTERRUPTED)",
        _ => "begins again, for nothing of it ran before its worker was lost or forgot it",
    }
    .to_owned()
}

/// Whether the workload of `row` may begin again.
fn allowed(row: &Model) -> Result<Allowed, DbErr> {
    let retried = u32::try_from(row.retried).unwrap_or(u32::MAX);
    let (interruptible, retries) = (row.interruptible, spec(row)?.retries);
    Ok(Allowed { interruptible, retries, retried, ends_when_lost: false })
}

/// What the attempt of `row` under `lease` used.
fn usage(row: &Model, lease: &lease::Model, end: &AttemptEnd) -> Usage {
    let granted = Timestamp(lease.granted_at);
    let started = row.started_at.map(Timestamp);
    let told = match end {
        AttemptEnd::Reported(report) => report.usage.clone(),
        AttemptEnd::WorkerLost | AttemptEnd::Unknown => Usage::default(),
    };
    Usage {
        queued: Some(granted.since(Timestamp(row.submitted_at))),
        preparing: started.map(|started| started.since(granted)),
        ..told
    }
}

/// Says that the process of a workload runs, or has run: whoever watches attaches to it then. A process may be gone before its gateway
/// could say that it ran; this is said all the same, and first.
///
/// Changes `row`, which the caller saves.
async fn ran(
    txn: &DatabaseTransaction,
    row: &mut Model,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(whereabouts) = whereabouts(row)? else { return Ok(()) };
    let id = WorkloadId::from_uuid(row.id);
    quarantine::works(txn, whereabouts.worker.uuid(), effects).await?;
    row.state = State::Running;
    row.started_at.get_or_insert(now.0);
    row.revision += 1;
    events::append(txn, id, row.revision, &Event::Running { whereabouts }, now).await?;
    effects.workloads.push(id);
    Ok(())
}

/// How far a gateway is with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Its container is made.
    Preparing = 1,
    /// Its process runs.
    Running = 2,
    /// Its process is gone.
    Publishing = 3,
    /// Nothing of it runs.
    Ended = 4,
}

/// The gateway says how far it is with the attempt under `lease`.
pub(crate) async fn observe_phase(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    phase: Phase,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some((mut row, lease)) = hold(txn, &leases::claims(lease)).await? else { return Ok(()) };
    if phase == Phase::Ended && lease.state == lease::State::Ending && row.state == State::Assigned {
        // Its start was refused because it shall stop. Its gateway has nothing to report about it.
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
            let Some(whereabouts) = whereabouts(&row)? else { return Ok(()) };
            quarantine::works(txn, lease.worker_id, effects).await?;
            Event::Running { whereabouts }
        }
        (Phase::Publishing, State::Starting | State::Running) => {
            if row.state == State::Starting {
                ran(txn, &mut row, now, effects).await?;
            }
            // The limit is for the process, which has ended.
            row.run_deadline = None;
            Event::Publishing
        }
        _ => return Ok(()),
    };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// The gateway says how far it is with the inputs that it brings to the worker for the attempt under `lease`.
pub(crate) async fn observe_inputs(
    txn: &DatabaseTransaction,
    lease: &lease::Model,
    inputs: &[InputProgress],
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some((row, _)) = hold(txn, &leases::claims(lease)).await? else { return Ok(()) };
    if row.state != State::Assigned {
        return Ok(());
    }
    // As many as the workload can have, with its image and the certificates of the worker: a worker may say of any.
    let known = spec(&row)?;
    let most = known.inputs.len() + known.caches.len() + 2;
    let event = Event::Materializing { inputs: inputs.iter().take(most).cloned().collect() };
    save(txn, row, Write::Update, Some(&event), now, effects).await
}

/// Lets a workload stop. One that has ended, or is ending, goes on as it was.
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

/// Workloads that were accepted before `before` and whose pinning nobody came back to finish.
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

/// Ends a workload whose pinning nobody came back to finish.
pub(crate) async fn end_unpinned(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(row) = lock(txn, id).await?.filter(|row| row.state == State::Accepted) else { return Ok(()) };
    conclude(txn, row, Ending::not_pinned(), None, now, effects).await
}

/// Forgets up to 100 workloads that finished before `before`, with their events and leases, and of which the artifact store has heard all.
pub(crate) async fn forget(txn: &DatabaseTransaction, before: Timestamp) -> Result<u64, DbErr> {
    let old = workload::Entity::find()
        .select_only()
        .column(workload::Column::Id)
        .filter(Expr::cust(FINISHED))
        .filter(workload::Column::FinishedAt.lt(before.0))
        .filter(Expr::cust("NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.holder_id = workloads.id)"))
        // What may run still of one that was given up keeps its slot.
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

/// How a workload that the artifact store still holds pins for is settled: `None` where it must not be.
pub(crate) fn settlement_of_finished(row: &Model) -> Result<Option<Settlement>, DbErr> {
    if row.state != State::Finished {
        return Ok(None);
    }
    let ending = ending(row)?;
    let whereabouts = whereabouts(row)?;
    Ok(Some(Settlement {
        team: row.team.clone(),
        attempt: whereabouts.map(|whereabouts| whereabouts.attempt),
        outputs: vec![],
        build: spec(row)?.build,
        outcome: ending.outcome,
        owners: vec![],
        caches: vec![],
    }))
}

#[cfg(test)]
mod tests;
