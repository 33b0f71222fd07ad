//! Commits of batches: many grants and releases in one transaction.
//!
//! A batch is decided on the worker cache ([`crate::scheduling`]). The commit locks the rows of its
//! workers and checks each grant again with [`placement::refusals`], in order. Limits therefore
//! hold regardless of concurrent replicas and outdated caches. Only the numbers of kept containers
//! and volumes come from the last heartbeat in the cache. A grant that no longer holds is omitted
//! and reported. The commit reads only the load counters of a row, and the rest if the cached
//! revision is outdated. Every other change of a row raises its revision
//! ([`crate::workers::revisions::changed`]).
//!
//! Lock order: workloads, leases, workers, owners of containers. Known rows precede new ones, and
//! each kind is locked by id.

mod owner_affinity;
#[cfg(test)]
mod plan_tests;
mod release;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use db::rows::{self, Column};
use domain::worker::Incarnation;
use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::{ActiveEnum, ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use serde::Serialize;
use uuid::Uuid;

use self::release::release_and_lock;
use crate::db::entity::lease::{self, State};
use crate::db::entity::{STATE_OF_NAMED, to_json, worker, workload};
use crate::db::writes::Writes;
use crate::leases;
use crate::outbox::Parcel;
use crate::placement::{self, DecidedBy, Demand};
use crate::workers;
use crate::workers::cache::{self, TransactionId};
use crate::workers::load_counters::{LoadChanges, LockedWorkers, known_rows, signed};
use crate::workloads;
use crate::workloads::events::{AttemptLocation, Event};

/// The content of one transaction.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Driven leases to release, with their workers.
    pub(crate) releases: Vec<(LeaseId, WorkerId)>,
    /// New workloads. A workload whose grant is rejected is not inserted.
    pub(crate) submitted: Vec<workload::Model>,
    /// Accepted workloads whose inputs are now pinned. A workload whose grant is rejected stays
    /// unchanged.
    pub(crate) pinned: Vec<PinnedWorkload>,
    /// Whether leases with these ids may exist already.
    pub(crate) leases_may_exist: bool,
    pub(crate) grants: Vec<Grant>,
}

/// A workload whose inputs are now pinned.
#[derive(Debug, Clone)]
pub(crate) struct PinnedWorkload {
    pub(crate) id: WorkloadId,
    /// JSON: the locations of the inputs.
    pub(crate) locations: String,
    /// Refusals of the workers, unless the workload is placed immediately.
    pub(crate) reasons: Vec<String>,
}

/// A lease to grant.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    /// Grants of one group are committed together or not at all. They are adjacent in the plan.
    pub(crate) group: Option<usize>,
    pub(crate) lease: LeaseId,
    pub(crate) demand: Arc<Demand>,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) holder: Holder,
    pub(crate) decided_by: DecidedBy,
}

/// The holder of a lease.
#[derive(Debug, Clone)]
pub(crate) enum Holder {
    /// The caller, who renews the lease until `expires_at`.
    Driven {
        expires_at: Timestamp,
        /// The encoded request, which distinguishes a repeat from another request.
        request: String,
        /// The owner of the containers under the lease. Empty: none.
        owner: String,
        /// Whether the artifact store will keep pins for the lease.
        settles: bool,
    },
    /// A workload that waits, or that this transaction inserts.
    Workload { id: WorkloadId, attempt: AttemptId, location: AttemptLocation, reason: String },
}

/// The result of a commit.
#[derive(Debug, Default)]
pub(crate) struct CommitResult {
    /// The rows of the plan's workers after the commit, as far as they were locked.
    pub(crate) workers: Vec<worker::Model>,
    /// Workers of the plan that no longer exist.
    pub(crate) gone: HashSet<WorkerId>,
    /// Grants that the rows of their workers rejected.
    pub(crate) refused: HashSet<LeaseId>,
    /// Workloads that no longer wait, or whose id belonged to an object before their submission.
    /// The commit did not change them.
    pub(crate) settled: HashMap<WorkloadId, Option<KnownId>>,
    /// Settled workloads that still wait: an attempt failed on further workers since the decision.
    /// They must be decided again.
    pub(crate) outdated: HashSet<WorkloadId>,
    /// Leases that existed before.
    pub(crate) existing: HashMap<LeaseId, lease::Model>,
    /// Leases with pins whose id belongs to a workload.
    taken: HashSet<LeaseId>,
    /// Workers of owners that the decision did not respect.
    pub(crate) affine_workers: HashMap<LeaseId, WorkerId>,
    /// Workers on which released slots became free.
    pub(crate) freed: HashSet<WorkerId>,
    /// Workers with released leases that are in use, whose gateways must stop them.
    pub(crate) stopping: HashSet<WorkerId>,
    /// Calls to the artifact store that the transaction wrote to the outbox.
    pub(crate) parcels: Vec<Parcel>,
    /// Sort key and submission time of workloads that were accepted before.
    pub(crate) came: HashMap<WorkloadId, (Uuid, Timestamp)>,
    /// The committing transaction, if [`CommitResult::workers`] contains all that it changed.
    pub(crate) transaction: Option<TransactionId>,
    /// Workers of placed workloads, whose desired state has changed.
    placed: HashMap<LeaseId, WorkerId>,
}

/// The object to which the id of a submitted workload belongs already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KnownId {
    /// A workload, with the digest of its spec.
    Workload(Vec<u8>),
    Lease,
}

/// Commits `plan`. `facts`: cached rows and heartbeats of workers. `are_locked` is called once the
/// workers are locked.
pub(crate) async fn commit_plan(
    txn: &DatabaseTransaction,
    plan: &Plan,
    facts: &cache::SharedFacts,
    now: Timestamp,
    are_locked: &(dyn Fn() + Sync),
) -> Result<CommitResult, DbErr> {
    let mut done = CommitResult::default();
    known_ids(txn, plan, &mut done).await?;
    let waiting = lock_waiting(txn, plan, &mut done).await?;
    if plan.leases_may_exist {
        let leases: Vec<_> = plan.grants.iter().map(|grant| grant.lease).collect();
        done.existing = leases::find_all(txn, &leases).await?;
    }
    taken_ids(txn, plan, &mut done).await?;
    let mut grants = Vec::with_capacity(plan.grants.len());
    for together in plan.grants.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
        let (moot, others): (Vec<_>, Vec<_>) = together.iter().partition(|grant| done.is_moot(grant));
        if moot.is_empty() {
            grants.extend(others);
        } else {
            // The rest of a group is not granted alone.
            done.refused.extend(others.iter().map(|grant| grant.lease));
        }
    }
    let concerned = grants.iter().map(|grant| grant.worker.uuid());
    let (released, locked) = release_and_lock(txn, &plan.releases, concerned, now).await?;
    let (stopping, ended): (Vec<_>, Vec<_>) = released.into_iter().partition(|lease| lease.in_use);
    are_locked();
    let LockedWorkers { rows: mut locked, others, transaction } = known_rows(locked, facts);
    locked.extend(workers::find_all(txn, others).await?);
    let there: HashSet<_> = locked.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
    done.gone = grants.iter().map(|grant| grant.worker).filter(|id| !there.contains(id)).collect();
    done.transaction = transaction;
    let mut changes = LoadChanges::default();
    for lease in &ended {
        if lease.kind.takes_a_slot() {
            done.freed.insert(WorkerId::from_uuid(lease.worker_id));
        }
        changes.release(lease);
    }
    for lease in &stopping {
        changes.stop(lease.worker_id);
        done.stopping.insert(WorkerId::from_uuid(lease.worker_id));
    }
    for lease in ended.iter().chain(&stopping) {
        // A repeated request must not receive a lease that this plan releases.
        if let Some(known) = done.existing.get_mut(&LeaseId::from_uuid(lease.lease_id)) {
            known.state = if lease.in_use { State::Ending } else { State::Ended };
        }
    }
    done.parcels = leases::release_pins(txn, &ended, now).await?;
    let mut present = as_placed(&locked, &changes, facts)?;
    let mut granted: Vec<&Grant> = Vec::with_capacity(grants.len());
    for together in grants.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
        let mut taken = Vec::with_capacity(together.len());
        let all = together.iter().all(|grant| {
            let Some(worker) = present.get_mut(&grant.worker.uuid()) else { return false };
            let holds = worker.incarnation == grant.incarnation
                && placement::refusals(&grant.demand, worker).is_empty();
            if holds {
                taken.push((grant.worker.uuid(), worker.load));
                worker.load = worker.load.with(grant.demand.kind, &grant.demand.shape.requests);
            }
            holds
        });
        if all {
            granted.extend(together);
            continue;
        }
        for (worker, load) in taken.into_iter().rev() {
            present.entry(worker).and_modify(|worker| worker.load = load);
        }
        done.refused.extend(together.iter().map(|grant| grant.lease));
    }
    let granted = owner_affinity::enforce_affinity(txn, granted, &mut done, now).await?;
    for grant in &granted {
        let is_of_workload = matches!(grant.holder, Holder::Workload { .. });
        changes.grant(grant.worker, grant.demand.kind, &grant.demand.shape.requests, is_of_workload);
    }
    done.workers = locked;
    changes.note(&mut done.workers);

    let of_workloads = granted.iter().filter(|grant| matches!(grant.holder, Holder::Workload { .. }));
    done.placed = of_workloads.map(|grant| (grant.lease, grant.worker)).collect();
    let mut writes = Writes::new(txn.get_database_backend());
    changes.write(&mut writes)?;
    let mut events = submit(plan, &done, &granted, &mut writes)?;
    events.extend(assign(txn, plan, &waiting, &granted, &mut done).await?);
    insert_events(&events, now, &mut writes)?;
    insert_leases(&granted, &done.workers, now, &mut writes)?;
    writes.write(txn).await?;
    Ok(done)
}

/// Converts locked rows into workers of placement, after the releases.
fn as_placed(
    locked: &[worker::Model],
    changes: &LoadChanges,
    facts: &cache::SharedFacts,
) -> Result<HashMap<Uuid, placement::Worker>, DbErr> {
    let facts = facts.lock();
    locked.iter().map(|row| Ok((row.id, changes.applied_to(facts.as_placed(row)?)))).collect()
}

impl Plan {
    /// Returns whether the plan changes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        let Self { releases, submitted, pinned, leases_may_exist: _, grants } = self;
        releases.is_empty() && submitted.is_empty() && pinned.is_empty() && grants.is_empty()
    }
}

impl CommitResult {
    /// Returns the worker of a placed workload.
    pub(crate) fn worker_of(&self, lease: Option<LeaseId>) -> Option<WorkerId> {
        self.placed.get(&lease?).copied()
    }

    /// Returns whether the id of a driven lease was in use before.
    pub(crate) fn exists(&self, lease: LeaseId) -> bool {
        self.existing.contains_key(&lease) || self.taken.contains(&lease)
    }

    /// Returns whether a grant was committed.
    pub(crate) fn is_committed(&self, grant: &Grant) -> bool {
        !self.is_moot(grant) && !self.refused.contains(&grant.lease)
    }

    /// Returns whether a grant failed only because the decision was outdated.
    pub(crate) fn is_outdated(&self, grant: &Grant) -> bool {
        let is_outdated = match &grant.holder {
            Holder::Workload { id, .. } => self.outdated.contains(id),
            Holder::Driven { .. } => false,
        };
        is_outdated || self.refused.contains(&grant.lease)
    }

    /// Returns whether a grant is pointless, regardless of its worker.
    fn is_moot(&self, grant: &Grant) -> bool {
        match &grant.holder {
            Holder::Driven { .. } => self.exists(grant.lease),
            Holder::Workload { id, .. } => self.settled.contains_key(id),
        }
    }
}

/// Finds submitted workloads whose id belongs to a workload or a lease. The artifact store
/// identifies holders by id, so a lease in use must not have the id of a workload.
async fn known_ids(txn: &DatabaseTransaction, plan: &Plan, done: &mut CommitResult) -> Result<(), DbErr> {
    if plan.submitted.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let among = rows::among(backend, 1);
    let query = format!(
        "SELECT id, spec_digest FROM workloads WHERE id {among}
         UNION ALL SELECT id, NULL FROM leases WHERE id {among}"
    );
    let ids = rows::ids(plan.submitted.iter().map(|row| row.id))?;
    for row in txn.query_all_raw(Statement::from_sql_and_values(backend, query, [ids])).await? {
        let id = WorkloadId::from_uuid(row.try_get("", "id")?);
        match row.try_get("", "spec_digest")? {
            Some(digest) => _ = done.settled.insert(id, Some(KnownId::Workload(digest))),
            // A known workload may be submitted again, even if a lease has its id.
            None => _ = done.settled.entry(id).or_insert(Some(KnownId::Lease)),
        }
    }
    Ok(())
}

/// Finds granted leases with pins whose id belongs to a workload, because the artifact store
/// identifies holders by id.
async fn taken_ids(txn: &DatabaseTransaction, plan: &Plan, done: &mut CommitResult) -> Result<(), DbErr> {
    let uses = |grant: &&Grant| matches!(grant.holder, Holder::Driven { settles: true, .. });
    let leases: Vec<_> = plan.grants.iter().filter(uses).map(|grant| grant.lease.uuid()).collect();
    if leases.is_empty() {
        return Ok(());
    }
    let backend = txn.get_database_backend();
    let query = format!("SELECT id FROM workloads WHERE id {}", rows::among(backend, 1));
    let statement = Statement::from_sql_and_values(backend, query, [rows::ids(leases)?]);
    for row in txn.query_all_raw(statement).await? {
        done.taken.insert(LeaseId::from_uuid(row.try_get("", "id")?));
    }
    Ok(())
}

/// Locks the workloads to assign or queue that are not new, and returns those that still wait.
async fn lock_waiting(
    txn: &DatabaseTransaction,
    plan: &Plan,
    done: &mut CommitResult,
) -> Result<HashSet<WorkloadId>, DbErr> {
    let submitted: HashSet<_> = plan.submitted.iter().map(|row| row.id).collect();
    let pinned: HashSet<_> = plan.pinned.iter().map(|pinned| pinned.id).collect();
    let placed = plan.grants.iter().filter_map(|grant| match &grant.holder {
        Holder::Workload { id, .. } if !submitted.contains(&id.uuid()) => Some((*id, &*grant.demand)),
        Holder::Workload { .. } | Holder::Driven { .. } => None,
    });
    let placed: HashMap<_, _> = placed.collect();
    let requested: HashSet<_> = placed.keys().chain(&pinned).copied().collect();
    if requested.is_empty() {
        return Ok(requested);
    }
    let backend = txn.get_database_backend();
    let query = format!(
        "SELECT id, state, failed_on FROM workloads WHERE id {} AND {STATE_OF_NAMED} IN ('accepted', 'pending') ORDER BY id {}",
        rows::among(backend, 1),
        rows::lock(backend, "FOR UPDATE")
    );
    let values = [rows::ids(requested.iter().map(|id| id.uuid()))?];
    let mut waiting = HashSet::with_capacity(requested.len());
    for row in txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await? {
        let (id, state): (Uuid, workload::State) = (row.try_get("", "id")?, row.try_get("", "state")?);
        let id = WorkloadId::from_uuid(id);
        let failed_on: String = row.try_get("", "failed_on")?;
        let is_as_decided = match placed.get(&id) {
            Some(demand) => workloads::has_failed_on(demand, &failed_on)?,
            None => true,
        };
        if pinned.contains(&id) != (state == workload::State::Accepted) {
            continue;
        }
        if is_as_decided {
            waiting.insert(id);
        } else {
            done.outdated.insert(id);
        }
    }
    done.settled.extend(requested.difference(&waiting).map(|id| (*id, None)));
    Ok(waiting)
}

#[derive(Serialize)]
struct NewWorkload<'r> {
    id: Uuid,
    sequence: Uuid,
    team: &'r str,
    spec: String,
    spec_digest: String,
    traceparent: &'r str,
    settles: bool,
    state: String,
    submitted_at: i64,
    queue_deadline: Option<i64>,
    lease_id: Option<Uuid>,
    attempt_id: Option<Uuid>,
    location: Option<String>,
    waiting_for: &'r str,
    priority: i64,
    interruptible: bool,
    start_timeout_us: Option<i64>,
    name: &'r str,
}

const NEW_WORKLOAD: [(&str, Column); 18] = [
    ("id", Column::Uuid),
    ("sequence", Column::Uuid),
    ("team", Column::Text),
    ("spec", Column::Bytes),
    ("spec_digest", Column::Bytes),
    ("traceparent", Column::Text),
    ("settles", Column::Boolean),
    ("state", Column::Text),
    ("submitted_at", Column::Integer),
    ("queue_deadline", Column::Integer),
    ("lease_id", Column::Uuid),
    ("attempt_id", Column::Uuid),
    ("location", Column::Text),
    ("waiting_for", Column::Text),
    ("priority", Column::Integer),
    ("interruptible", Column::Boolean),
    ("start_timeout_us", Column::Integer),
    ("name", Column::Text),
];

/// Adds the insert of new workloads: placed ones as assigned, and those without a planned grant as
/// they are.
fn submit(
    plan: &Plan,
    done: &CommitResult,
    granted: &[&Grant],
    writes: &mut Writes,
) -> Result<Vec<NewEvent>, DbErr> {
    if plan.submitted.is_empty() {
        return Ok(Vec::new());
    }
    let planned = by_workload(&plan.grants.iter().collect::<Vec<_>>());
    let placed = by_workload(granted);
    let (mut fresh, mut events) = (Vec::new(), Vec::new());
    for row in &plan.submitted {
        let id = WorkloadId::from_uuid(row.id);
        let grant = placed.get(&id);
        if done.settled.contains_key(&id) || (grant.is_none() && planned.contains_key(&id)) {
            continue;
        }
        let holder = grant.map(|grant| &grant.holder);
        let (attempt_id, location, event) = match holder {
            Some(Holder::Workload { attempt, location, reason, .. }) => {
                let event = Event::Placed { location: location.clone(), reason: reason.clone() };
                (Some(attempt.uuid()), Some(to_json(location)?), event)
            }
            Some(Holder::Driven { .. }) | None => {
                (None, None, Event::Queued { reasons: crate::db::entity::from_json(&row.waiting_for)? })
            }
        };
        events.push(NewEvent { id: row.id, revision: 1, event: to_json(&event)? });
        let state = if grant.is_some() { workload::State::Assigned } else { row.state };
        fresh.push(NewWorkload {
            id: row.id,
            sequence: row.sequence,
            team: &row.team,
            spec: hex(&row.spec),
            spec_digest: hex(&row.spec_digest),
            traceparent: &row.traceparent,
            settles: row.settles,
            state: state.to_value(),
            submitted_at: row.submitted_at,
            queue_deadline: row.queue_deadline,
            lease_id: grant.map(|grant| grant.lease.uuid()),
            attempt_id,
            location,
            waiting_for: if grant.is_some() { "[]" } else { &row.waiting_for },
            priority: row.priority,
            interruptible: row.interruptible,
            start_timeout_us: row.start_timeout_us,
            name: &row.name,
        });
    }
    if fresh.is_empty() {
        return Ok(Vec::new());
    }
    writes.add([rows::value(&fresh)?], |backend, n| {
        format!(
            "INSERT INTO workloads (id, sequence, team, spec, spec_digest, traceparent, settles, state, revision, submitted_at,
             queue_deadline, lease_id, attempt_id, location, locations, waiting_for, priority, interruptible,
             start_timeout_us, name)
             SELECT id, sequence, team, spec, spec_digest, traceparent, settles, state, 1, submitted_at, queue_deadline, lease_id,
             attempt_id, location, '[]', waiting_for, priority, interruptible, start_timeout_us, name FROM ({}) AS given",
            rows::query(backend, n, &NEW_WORKLOAD)
        )
    });
    Ok(events)
}

fn by_workload<'g>(grants: &[&'g Grant]) -> HashMap<WorkloadId, &'g Grant> {
    let of_workload = |grant: &&'g Grant| match &grant.holder {
        Holder::Workload { id, .. } => Some((*id, *grant)),
        Holder::Driven { .. } => None,
    };
    grants.iter().filter_map(of_workload).collect()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        _ = write!(text, "{byte:02x}");
        text
    })
}

#[derive(Serialize)]
struct NewEvent {
    id: Uuid,
    revision: i64,
    event: String,
}

const NEW_EVENT: [(&str, Column); 3] =
    [("id", Column::Uuid), ("revision", Column::Integer), ("event", Column::Text)];

fn insert_events(events: &[NewEvent], now: Timestamp, writes: &mut Writes) -> Result<(), DbErr> {
    if events.is_empty() {
        return Ok(());
    }
    writes.add([rows::value(events)?, now.0.into()], |backend, n| {
        format!(
            "INSERT INTO events (workload_id, revision, at, event) SELECT id, revision, ${}, event FROM ({}) AS given",
            n + 1,
            rows::query(backend, n, &NEW_EVENT)
        )
    });
    Ok(())
}

#[derive(Serialize)]
struct WorkloadChange {
    id: Uuid,
    state: String,
    lease_id: Option<Uuid>,
    attempt_id: Option<Uuid>,
    location: Option<String>,
    locations: Option<String>,
    waiting_for: String,
}

const WORKLOAD_CHANGE: [(&str, Column); 7] = [
    ("id", Column::Uuid),
    ("state", Column::Text),
    ("lease_id", Column::Uuid),
    ("attempt_id", Column::Uuid),
    ("location", Column::Text),
    ("locations", Column::Text),
    ("waiting_for", Column::Text),
];

/// Assigns locked workloads with committed grants, and queues pinned workloads without a planned
/// grant.
async fn assign(
    txn: &DatabaseTransaction,
    plan: &Plan,
    waiting: &HashSet<WorkloadId>,
    granted: &[&Grant],
    done: &mut CommitResult,
) -> Result<Vec<NewEvent>, DbErr> {
    let (mut moved, mut events) = (Vec::new(), HashMap::new());
    let mut pinned: HashMap<_, _> = plan.pinned.iter().map(|pinned| (pinned.id, pinned)).collect();
    let granted: HashSet<_> = granted.iter().map(|grant| grant.lease).collect();
    for grant in &plan.grants {
        let Holder::Workload { id, attempt, location, reason } = &grant.holder else { continue };
        let locations = pinned.remove(id).map(|pinned| pinned.locations.clone());
        if !waiting.contains(id) || !granted.contains(&grant.lease) {
            continue;
        }
        moved.push(WorkloadChange {
            id: id.uuid(),
            state: workload::State::Assigned.to_value(),
            lease_id: Some(grant.lease.uuid()),
            attempt_id: Some(attempt.uuid()),
            location: Some(to_json(location)?),
            locations,
            waiting_for: "[]".to_owned(),
        });
        let event = Event::Placed { location: location.clone(), reason: reason.clone() };
        events.insert(id.uuid(), to_json(&event)?);
    }
    for pinned in pinned.into_values().filter(|pinned| waiting.contains(&pinned.id)) {
        moved.push(WorkloadChange {
            id: pinned.id.uuid(),
            state: workload::State::Pending.to_value(),
            lease_id: None,
            attempt_id: None,
            location: None,
            locations: Some(pinned.locations.clone()),
            waiting_for: to_json(&pinned.reasons)?,
        });
        events.insert(pinned.id.uuid(), to_json(&Event::Queued { reasons: pinned.reasons.clone() })?);
    }
    if moved.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let query = format!(
        "UPDATE workloads SET state = given.state, revision = revision + 1, lease_id = given.lease_id,
         attempt_id = given.attempt_id, location = COALESCE(given.location, workloads.location),
         locations = COALESCE(given.locations, workloads.locations), waiting_for = given.waiting_for
         FROM ({}) AS given WHERE workloads.id = given.id
         RETURNING workloads.id, workloads.revision, workloads.sequence, workloads.submitted_at",
        rows::query(backend, 1, &WORKLOAD_CHANGE)
    );
    let statement = Statement::from_sql_and_values(backend, query, [rows::value(&moved)?]);
    let mut fresh = Vec::with_capacity(events.len());
    for row in txn.query_all_raw(statement).await? {
        let id: Uuid = row.try_get("", "id")?;
        let Some(event) = events.remove(&id) else { continue };
        fresh.push(NewEvent { id, revision: row.try_get("", "revision")?, event });
        let came = (row.try_get("", "sequence")?, Timestamp(row.try_get("", "submitted_at")?));
        done.came.insert(WorkloadId::from_uuid(id), came);
    }
    Ok(fresh)
}

#[derive(Serialize)]
struct NewLease<'g> {
    id: Uuid,
    worker_id: Uuid,
    incarnation: i64,
    kind: String,
    team: &'g str,
    generation: i64,
    workload_id: Option<Uuid>,
    attempt_id: Option<Uuid>,
    request: &'g str,
    expires_at: Option<i64>,
    cpu_millis: i64,
    memory_bytes: i64,
    disk_bytes: i64,
    settles: bool,
    owner: &'g str,
}

const NEW_LEASE: [(&str, Column); 15] = [
    ("id", Column::Uuid),
    ("worker_id", Column::Uuid),
    ("incarnation", Column::Integer),
    ("kind", Column::Text),
    ("team", Column::Text),
    ("generation", Column::Integer),
    ("workload_id", Column::Uuid),
    ("attempt_id", Column::Uuid),
    ("request", Column::Text),
    ("expires_at", Column::Integer),
    ("cpu_millis", Column::Integer),
    ("memory_bytes", Column::Integer),
    ("disk_bytes", Column::Integer),
    ("settles", Column::Boolean),
    ("owner", Column::Text),
];

/// Builds the rows of committed leases. `generations`: the generations of their workers.
fn new_leases<'g>(granted: &[&'g Grant], generations: &HashMap<Uuid, i64>) -> Vec<NewLease<'g>> {
    let fresh = granted.iter().map(|grant| {
        let (workload_id, attempt_id, request, expires_at, settles) = match &grant.holder {
            Holder::Driven { expires_at, request, settles, .. } => {
                (None, None, request.as_str(), Some(expires_at.0), *settles)
            }
            Holder::Workload { id, attempt, .. } => (Some(id.uuid()), Some(attempt.uuid()), "", None, false),
        };
        let requests = &grant.demand.shape.requests;
        NewLease {
            id: grant.lease.uuid(),
            worker_id: grant.worker.uuid(),
            incarnation: signed(grant.incarnation.0),
            kind: grant.demand.kind.text().to_owned(),
            team: &grant.demand.shape.team,
            generation: generations.get(&grant.worker.uuid()).copied().unwrap_or(0),
            workload_id,
            attempt_id,
            request,
            expires_at,
            cpu_millis: signed(requests.cpu_millis),
            memory_bytes: signed(requests.memory_bytes),
            disk_bytes: signed(requests.disk_bytes),
            settles,
            owner: grant.owner().map_or("", |(_, owner)| owner),
        }
    });
    fresh.collect()
}

fn insert_leases(
    granted: &[&Grant],
    workers: &[worker::Model],
    now: Timestamp,
    writes: &mut Writes,
) -> Result<(), DbErr> {
    if granted.is_empty() {
        return Ok(());
    }
    let generations = workers.iter().map(|row| (row.id, row.generation)).collect();
    let fresh = new_leases(granted, &generations);
    let values = [rows::value(&fresh)?, State::Granted.to_value().into(), now.0.into()];
    writes.add(values, |backend, n| {
        format!(
            "INSERT INTO leases (id, worker_id, incarnation, kind, team, state, generation, workload_id, attempt_id, phase, request,
             expires_at, granted_at, cpu_millis, memory_bytes, disk_bytes, in_use, settles, owner)
             SELECT id, worker_id, incarnation, kind, team, ${}, generation, workload_id, attempt_id, 0, request, expires_at, ${},
             cpu_millis, memory_bytes, disk_bytes, workload_id IS NOT NULL, settles, owner FROM ({}) AS given",
            n + 1,
            n + 2,
            rows::query(backend, n, &NEW_LEASE)
        )
    });
    Ok(())
}
