//! Load counters: what leases change of the rows of workers.
//!
//! Everything else that changes a row gives it a new revision ([`crate::workers::revisions::changed`]), so that what is remembered of a row holds as long as
//! its revision is the same; the random operations check that. So to grant is to read some numbers.

use std::collections::{BTreeMap, HashSet};

use db::rows::{self, Column};
use domain::WorkerId;
use sea_orm::{
    ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, EntityTrait, FromQueryResult, Statement,
};
use serde::Serialize;
use uuid::Uuid;

use crate::db::entity::lease::{Kind, Left};
use crate::db::entity::worker;
use crate::db::writes::Writes;
use crate::placement::{self, Resources};
use crate::workers::cache::{SharedFacts, TransactionId};

/// What of a worker's row changes without a new revision of it.
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
    /// Which transaction reads it. 0, where they have no numbers.
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

/// What [`COUNTS`] are of a row.
pub(crate) fn counts(backend: DbBackend) -> String {
    let reader = match backend {
        DbBackend::Postgres => "CAST(CAST(CAST(pg_current_xact_id() AS XID) AS TEXT) AS BIGINT) AS reader",
        _ => "0 AS reader",
    };
    COUNTS.map(|name| if name == "reader" { reader } else { name }).join(", ")
}

/// Rows of workers that a transaction has locked.
pub(crate) struct Locked {
    pub(crate) rows: Vec<worker::Model>,
    /// Whose rows are not what is known of them.
    pub(crate) others: HashSet<WorkerId>,
    pub(crate) transaction: Option<TransactionId>,
}

impl Counts {
    /// The row that is `known`, if nothing but these has changed since.
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

/// The rows whose counts these are, as far as they are what is known of them but for these.
pub(crate) fn known_rows(locked: Vec<Counts>, facts: &SharedFacts) -> Locked {
    let transaction = locked.first().and_then(|counts| TransactionId::new(counts.reader));
    let (mut rows, mut others) = (Vec::with_capacity(locked.len()), HashSet::new());
    let facts = facts.lock();
    for counts in locked {
        match facts.row(counts.id).and_then(|known| counts.applied_to(known)) {
            Some(row) => rows.push(row),
            None => _ = others.insert(WorkerId::from_uuid(counts.id)),
        }
    }
    Locked { rows, others, transaction }
}

/// Locks the rows of these workers, in their order, and reads of them what leases change.
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

/// Locks the rows of these workers, in their order, and answers them.
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

/// Locks the rows of the workers whose ids are `$n`, in their order, and answers these columns of them.
pub(crate) fn locking(backend: DbBackend, columns: &str, n: usize) -> String {
    format!(
        "SELECT {columns} FROM workers WHERE id {} ORDER BY id {}",
        rows::among(backend, n),
        rows::lock(backend, "FOR NO KEY UPDATE"),
    )
}

/// By how much what is on workers changes.
#[derive(Debug, Default)]
pub(crate) struct Changes(BTreeMap<Uuid, Change>);

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Change {
    tasks: i64,
    checks: i64,
    cpu_millis: i64,
    memory_bytes: i64,
    disk_bytes: i64,
    ended: i64,
    /// Whether what its gateway shall do changes.
    generations: i64,
}

#[derive(Serialize)]
struct Changed {
    id: Uuid,
    #[serde(flatten)]
    change: Change,
}

const CHANGED: [(&str, Column); 8] = [
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

impl Changes {
    /// A lease has ended.
    pub(crate) fn give_back(&mut self, lease: &Left) {
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
        change.generations |= i64::from(lease.workload_id.is_some());
    }

    /// A lease is granted. `is_of_workload`: what its worker shall do changes with it.
    pub(crate) fn take(&mut self, worker: WorkerId, kind: Kind, asked: &Resources, is_of_workload: bool) {
        let change = self.0.entry(worker.uuid()).or_default();
        change.generations |= i64::from(is_of_workload);
        if !kind.takes_a_slot() {
            return;
        }
        change.tasks += 1;
        change.checks += i64::from(kind == Kind::Check);
        change.cpu_millis += signed(asked.cpu_millis);
        change.memory_bytes += signed(asked.memory_bytes);
        change.disk_bytes += signed(asked.disk_bytes);
    }

    /// A worker as it is with them.
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

    /// Writes them, of workers that are locked.
    pub(crate) fn write(&self, writes: &mut Writes) -> Result<(), DbErr> {
        let changed = self.0.iter().map(|(id, change)| Changed { id: *id, change: *change });
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
                rows::query(backend, n, &CHANGED)
            )
        });
        Ok(())
    }

    /// Locks the workers whose leases have ended, and writes what is freed. Answers which.
    pub(crate) async fn lock_and_write(&self, txn: &DatabaseTransaction) -> Result<Vec<WorkerId>, DbErr> {
        let locked = lock_counts(txn, self.0.keys().copied().collect()).await?;
        let mut writes = Writes::new(txn.get_database_backend());
        self.write(&mut writes)?;
        writes.write(txn).await?;
        Ok(locked.into_iter().map(|row| WorkerId::from_uuid(row.id)).collect())
    }

    /// Notes them in rows that were read before they were written.
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
