//! Load counters: the columns of `workers` that leases change.
//!
//! Every other change of a row raises its revision ([`crate::workers::revisions::changed`]). A
//! cached row with the same revision is therefore current except for these counters, and a grant
//! reads only the counters. The model tests check this invariant.

use std::collections::{BTreeMap, HashSet};

use db::rows::{self, Column};
use domain::WorkerId;
use sea_orm::{
    ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, EntityTrait, FromQueryResult, Statement,
};
use serde::Serialize;
use uuid::Uuid;

use crate::db::entity::lease::{EndedLease, Kind};
use crate::db::entity::worker;
use crate::db::writes::Writes;
use crate::placement::{self, Resources};
use crate::workers::cache::{SharedFacts, TransactionId};

/// The columns of a worker that change without a new revision.
#[derive(Debug, Clone, Copy, FromQueryResult)]
pub(crate) struct Counts {
    id: Uuid,
    revision: i64,
    generation: i64,
    active_tasks: i64,
    active_checks: i64,
    reserved_cpu_millis: i64,
    reserved_memory_bytes: i64,
    reserved_disk_bytes: i64,
    ended_tasks: i64,
    /// Id of the reading transaction. 0 if the database has no transaction ids.
    reader: i64,
}

/// The columns of [`Counts`].
pub(crate) const COUNTS: [&str; 10] = [
    "id",
    "revision",
    "generation",
    "active_tasks",
    "active_checks",
    "reserved_cpu_millis",
    "reserved_memory_bytes",
    "reserved_disk_bytes",
    "ended_tasks",
    "reader",
];

/// Returns the SQL expressions of [`COUNTS`].
pub(crate) fn counts(backend: DbBackend) -> String {
    let reader = match backend {
        DbBackend::Postgres => "CAST(CAST(CAST(pg_current_xact_id() AS XID) AS TEXT) AS BIGINT) AS reader",
        _ => "0 AS reader",
    };
    COUNTS.map(|name| if name == "reader" { reader } else { name }).join(", ")
}

/// Rows of workers that the transaction has locked.
pub(crate) struct LockedWorkers {
    pub(crate) rows: Vec<worker::Model>,
    /// Workers whose cached rows are out of date.
    pub(crate) others: HashSet<WorkerId>,
    pub(crate) transaction: Option<TransactionId>,
}

impl Counts {
    /// Returns the row `known` with these counters, if its revision is current.
    fn applied_to(self, known: &worker::Model) -> Option<worker::Model> {
        let Self { id, revision, generation, active_tasks, active_checks, .. } = self;
        let Self { reserved_cpu_millis, reserved_memory_bytes, reserved_disk_bytes, ended_tasks, .. } = self;
        ((known.id, known.revision) == (id, revision)).then(|| worker::Model {
            generation,
            active_tasks,
            active_checks,
            reserved_cpu_millis,
            reserved_memory_bytes,
            reserved_disk_bytes,
            ended_tasks,
            ..known.clone()
        })
    }
}

/// Combines locked counters with cached rows. Workers with an outdated cached row are listed in
/// `others`.
pub(crate) fn known_rows(locked: Vec<Counts>, facts: &SharedFacts) -> LockedWorkers {
    let transaction = locked.first().and_then(|counts| TransactionId::new(counts.reader));
    let (mut rows, mut others) = (Vec::with_capacity(locked.len()), HashSet::new());
    let facts = facts.lock();
    for counts in locked {
        match facts.row(counts.id).and_then(|known| counts.applied_to(known)) {
            Some(row) => rows.push(row),
            None => _ = others.insert(WorkerId::from_uuid(counts.id)),
        }
    }
    LockedWorkers { rows, others, transaction }
}

/// Locks the rows of these workers in the order of their ids, and reads their counters.
pub(crate) async fn lock_counts(
    txn: &DatabaseTransaction,
    workers: HashSet<Uuid>,
) -> Result<Vec<Counts>, DbErr> {
    if workers.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let query = locking(backend, &counts(backend), 1);
    let statement = Statement::from_sql_and_values(backend, query, [rows::ids(workers)?]);
    Counts::find_by_statement(statement).all(txn).await
}

/// Locks the rows of these workers in the order of their ids, and returns them.
pub(crate) async fn lock_workers(
    txn: &DatabaseTransaction,
    workers: impl Iterator<Item = Uuid>,
) -> Result<Vec<worker::Model>, DbErr> {
    let workers: HashSet<_> = workers.collect();
    if workers.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let query = locking(backend, "*", 1);
    let statement = Statement::from_sql_and_values(backend, query, [rows::ids(workers)?]);
    worker::Entity::find().from_raw_sql(statement).all(txn).await
}

/// Returns the query that locks the workers in parameter `$n` in the order of their ids, and
/// selects `columns`.
pub(crate) fn locking(backend: DbBackend, columns: &str, n: usize) -> String {
    format!(
        "SELECT {columns} FROM workers WHERE id {} ORDER BY id {}",
        rows::among(backend, n),
        rows::lock(backend, "FOR NO KEY UPDATE"),
    )
}

/// Changes of the counters, by worker.
#[derive(Debug, Default)]
pub(crate) struct LoadChanges(BTreeMap<Uuid, LoadChange>);

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct LoadChange {
    tasks: i64,
    checks: i64,
    cpu_millis: i64,
    memory_bytes: i64,
    disk_bytes: i64,
    ended: i64,
    /// Number of changes of the worker's desired state.
    generations: i64,
}

#[derive(Serialize)]
struct ChangeRow {
    id: Uuid,
    #[serde(flatten)]
    change: LoadChange,
}

const CHANGE_COLUMNS: [(&str, Column); 8] = [
    ("id", Column::Uuid),
    ("tasks", Column::Integer),
    ("checks", Column::Integer),
    ("cpu_millis", Column::Integer),
    ("memory_bytes", Column::Integer),
    ("disk_bytes", Column::Integer),
    ("ended", Column::Integer),
    ("generations", Column::Integer),
];

pub(crate) fn signed(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

impl LoadChanges {
    /// Subtracts an ended lease.
    pub(crate) fn release(&mut self, lease: &EndedLease) {
        if !lease.kind.takes_a_slot() {
            return;
        }
        let change = self.0.entry(lease.worker_id).or_default();
        change.tasks -= 1;
        change.checks -= i64::from(lease.kind == Kind::Check);
        change.cpu_millis -= lease.cpu_millis;
        change.memory_bytes -= lease.memory_bytes;
        change.disk_bytes -= lease.disk_bytes;
        change.ended += 1;
        change.generations |= i64::from(lease.in_use);
    }

    /// Records that a lease of `worker` must stop, which changes the worker's desired state.
    pub(crate) fn stop(&mut self, worker: Uuid) {
        self.0.entry(worker).or_default().generations |= 1;
    }

    /// Adds a granted lease. `is_of_workload`: the lease changes the worker's desired state.
    pub(crate) fn grant(
        &mut self,
        worker: WorkerId,
        kind: Kind,
        requested: &Resources,
        is_of_workload: bool,
    ) {
        let change = self.0.entry(worker.uuid()).or_default();
        change.generations |= i64::from(is_of_workload);
        if !kind.takes_a_slot() {
            return;
        }
        change.tasks += 1;
        change.checks += i64::from(kind == Kind::Check);
        change.cpu_millis += signed(requested.cpu_millis);
        change.memory_bytes += signed(requested.memory_bytes);
        change.disk_bytes += signed(requested.disk_bytes);
    }

    /// Returns the worker with these changes applied.
    pub(crate) fn applied_to(&self, mut worker: placement::Worker) -> placement::Worker {
        if let Some(change) = self.0.get(&worker.id.uuid()) {
            let load = &mut worker.load;
            let add = |count: u32, change: i64| u32::try_from(i64::from(count) + change).unwrap_or(0);
            load.tasks = add(load.tasks, change.tasks);
            load.checks = add(load.checks, change.checks);
            load.reserved.cpu_millis = load.reserved.cpu_millis.saturating_add_signed(change.cpu_millis);
            load.reserved.memory_bytes =
                load.reserved.memory_bytes.saturating_add_signed(change.memory_bytes);
            load.reserved.disk_bytes = load.reserved.disk_bytes.saturating_add_signed(change.disk_bytes);
        }
        worker
    }

    /// Adds the update of locked workers to `writes`.
    pub(crate) fn write(&self, writes: &mut Writes) -> Result<(), DbErr> {
        let changed = self.0.iter().map(|(id, change)| ChangeRow { id: *id, change: *change });
        let changed: Vec<_> = changed.collect();
        if changed.is_empty() {
            return Ok(());
        }
        writes.add([rows::value(&changed)?], |backend, n| {
            format!(
                "UPDATE workers SET active_tasks = active_tasks + given.tasks, active_checks = active_checks + given.checks,
                 reserved_cpu_millis = reserved_cpu_millis + given.cpu_millis,
                 reserved_memory_bytes = reserved_memory_bytes + given.memory_bytes,
                 reserved_disk_bytes = reserved_disk_bytes + given.disk_bytes, ended_tasks = ended_tasks + given.ended, generation = generation + given.generations
                 FROM ({}) AS given WHERE workers.id = given.id",
                rows::query(backend, n, &CHANGE_COLUMNS)
            )
        });
        Ok(())
    }

    /// Locks the workers and writes the changes. Returns the workers.
    pub(crate) async fn lock_and_write(&self, txn: &DatabaseTransaction) -> Result<Vec<WorkerId>, DbErr> {
        let locked = lock_counts(txn, self.0.keys().copied().collect()).await?;
        let mut writes = Writes::new(txn.get_database_backend());
        self.write(&mut writes)?;
        writes.write(txn).await?;
        Ok(locked.into_iter().map(|row| WorkerId::from_uuid(row.id)).collect())
    }

    /// Applies the changes to rows that were read before the write.
    pub(crate) fn note(&self, rows: &mut [worker::Model]) {
        for row in rows {
            let Some(change) = self.0.get(&row.id) else { continue };
            row.active_tasks += change.tasks;
            row.active_checks += change.checks;
            row.reserved_cpu_millis += change.cpu_millis;
            row.reserved_memory_bytes += change.memory_bytes;
            row.reserved_disk_bytes += change.disk_bytes;
            row.ended_tasks += change.ended;
            row.generation += change.generations;
        }
    }
}
