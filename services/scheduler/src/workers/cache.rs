//! The worker cache: this replica's in-memory view of workers, on which it decides without a query.
//!
//! The cache may be behind the database but never ahead, so [`crate::commit`] checks each decision
//! again on the rows. All rows are read at the start and at a regular interval. In between, changes
//! of this process are noted immediately, and changes of other replicas with the next poll
//! ([`WorkerCache::catch_up`]).

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use db::Database;
use db::rows;
use domain::worker::{Capacity, Incarnation, Labels};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DbBackend, DbErr, EntityTrait, Statement};
use serde::Serialize;
use uuid::Uuid;

use crate::config::{Config, Limits};
use crate::db::entity::worker::{Desired, State};
use crate::db::entity::{from_json, heartbeat, worker};
use crate::notify::desired_state::DesiredStates;
use crate::placement::{Failing, Index, Load, Resources, Trust, Worker};
use crate::workers;
use crate::workers::removed;

/// Interval at which all rows are read again.
const FULL_READ_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum number of own transactions that are remembered. Rows of older ones are read like those
/// of other replicas. More than this happen between two polls only while some transaction stays
/// open.
const MAX_OWN_TRANSACTIONS: usize = 5_000;

/// The id of a PostgreSQL transaction, as stored in the rows that it wrote (`xmin`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct TransactionId(u32);

impl TransactionId {
    /// Returns `None` for 0, which stands for no id.
    pub(crate) fn new(number: i64) -> Option<Self> {
        u32::try_from(number).ok().filter(|number| *number > 0).map(Self)
    }

    /// Returns whether the transaction began before `other`. Ids wrap around, so the two must be
    /// less than 2^31 apart.
    fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }
}

/// The shared index of workers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    index: Arc<Mutex<Index>>,
    /// Desired states of the workers whose gateways are connected to this replica.
    pub(crate) desired: DesiredStates,
}

impl Workers {
    /// Locks the index.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writer of [`Workers`]. A replica has exactly one, so that rows are noted in the order in
/// which they were read.
#[derive(Debug)]
pub(crate) struct WorkerCache {
    pub(crate) workers: Workers,
    facts: SharedFacts,
    /// The oldest transaction that was in progress at the last poll. Older ones are visible in the
    /// cache.
    seen: Option<TransactionId>,
    /// Transactions of this replica whose rows were noted. The poll does not read these rows again.
    own_transactions: VecDeque<TransactionId>,
    /// The revision of the newest removed worker at the last poll.
    last_removal: i64,
    all_read_at: Option<Timestamp>,
    /// Removed workers that still count as ones that may return, with the time of removal.
    gone: HashMap<WorkerId, Timestamp>,
}

/// [`Facts`], shared with the commit that runs while the next batch is decided. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SharedFacts(Arc<Mutex<Facts>>);

impl SharedFacts {
    fn new(facts: Facts) -> Self {
        Self(Arc::new(Mutex::new(facts)))
    }

    /// Locks the facts.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rows and heartbeats as they were last read, with the settings that placement needs.
#[derive(Debug)]
pub(crate) struct Facts {
    labels: HashMap<String, Arc<Labels>>,
    contacts: HashMap<Uuid, heartbeat::Model>,
    /// Rows as they were last read.
    rows: HashMap<Uuid, worker::Model>,
    limits: Limits,
    lost_after: Duration,
    remember: Duration,
    now: Timestamp,
}

fn failing(row: &worker::Model) -> Failing {
    Failing { why: row.last_failure.clone(), team: row.failed_team.clone() }
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

fn count(value: i64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

impl Facts {
    fn new(config: &Config) -> Self {
        Self {
            labels: HashMap::new(),
            contacts: HashMap::new(),
            rows: HashMap::new(),
            limits: config.limits,
            lost_after: config.lost_after,
            remember: config.remember_lost,
            now: Timestamp::now(),
        }
    }

    /// Creates the facts for a single worker.
    pub(crate) fn of(config: &Config, contact: Option<heartbeat::Model>) -> Self {
        let mut facts = Self::new(config);
        facts.contacts.extend(contact.map(|contact| (contact.worker_id, contact)));
        facts
    }

    /// Returns the row as it was last read.
    pub(crate) fn row(&self, id: Uuid) -> Option<&worker::Model> {
        self.rows.get(&id)
    }

    /// Converts a row into the worker that placement uses.
    pub(crate) fn as_placed(&self, row: &worker::Model) -> Result<Worker, DbErr> {
        let contact = self.contacts.get(&row.id);
        let last_contact = contact.map_or(row.registered_at, |contact| contact.last_contact_at);
        let silent = self.now.since(Timestamp(last_contact));
        let just_lost = row.state == State::Lost && silent < self.lost_after + self.remember;
        let limit = |own: Option<i64>, common: Option<u32>| own.map(count).or(common);
        Ok(Worker {
            id: WorkerId::from_uuid(row.id),
            name: row.name.clone(),
            endpoint: row.endpoint.clone(),
            incarnation: Incarnation(unsigned(row.incarnation)),
            desired: row.desired,
            state: row.state,
            awaited: contact.is_some_and(|contact| contact.last_contact_at < contact.patient_since),
            just_lost,
            gone: just_lost && (row.ephemeral || row.leaving.is_some()),
            unsupported_versions: from_json(&row.unsupported_versions)?,
            trust: match row.quarantined_until {
                Some(_) => Trust::Quarantined(failing(row)),
                None if row.quarantines > 0 => Trust::OnProbation(failing(row)),
                None => Trust::Full,
            },
            labels: match self.labels.get(&row.labels) {
                Some(labels) => labels.clone(),
                None => Arc::new(from_json(&row.labels)?),
            },
            capacity: Capacity {
                max_tasks: limit(row.max_tasks, self.limits.tasks),
                max_containers: limit(row.max_containers, self.limits.containers),
                max_volumes: limit(row.max_volumes, self.limits.volumes),
                cpu_millis: row.cpu_millis.map(unsigned),
                memory_bytes: row.memory_bytes.map(unsigned),
                disk_bytes: unsigned(row.disk_bytes),
                min_free_disk_bytes: unsigned(row.min_free_disk_bytes),
            },
            load: Load {
                tasks: count(row.active_tasks),
                checks: count(row.active_checks),
                reserved: Resources {
                    cpu_millis: unsigned(row.reserved_cpu_millis),
                    memory_bytes: unsigned(row.reserved_memory_bytes),
                    disk_bytes: unsigned(row.reserved_disk_bytes),
                },
                kept_containers: contact.map_or(0, |contact| unsigned(contact.kept_containers)),
                kept_volumes: contact.map_or(0, |contact| unsigned(contact.volumes)),
                short_of_disk: contact.is_some_and(|contact| contact.is_short_of_disk(row)),
            },
            reserved_for: None,
        })
    }

    /// Caches parsed labels. Most workers share few different labels.
    fn learn(&mut self, row: &worker::Model) -> Result<(), DbErr> {
        if !self.labels.contains_key(&row.labels) {
            self.labels.insert(row.labels.clone(), Arc::new(from_json(&row.labels)?));
        }
        Ok(())
    }
}

/// Builds an index of all workers within a transaction. Reads every row, so callers must use it
/// rarely.
pub(crate) async fn index(db: &impl ConnectionTrait, config: &Config) -> Result<Index, DbErr> {
    let mut facts = Facts::new(config);
    let contacts = heartbeat::Entity::find().all(db).await?;
    facts.contacts.extend(contacts.into_iter().map(|contact| (contact.worker_id, contact)));
    let mut index = Index::new(config.chains.clone(), config.exclusive_teams.clone());
    for row in worker::Entity::find().all(db).await? {
        index.put(facts.as_placed(&row)?);
    }
    Ok(index)
}

impl WorkerCache {
    pub(crate) fn new(config: &Config) -> Self {
        let index = Index::new(config.chains.clone(), config.exclusive_teams.clone());
        Self {
            workers: Workers { index: Arc::new(Mutex::new(index)), desired: DesiredStates::default() },
            facts: SharedFacts::new(Facts::new(config)),
            seen: None,
            own_transactions: VecDeque::new(),
            last_removal: 0,
            all_read_at: None,
            gone: HashMap::new(),
        }
    }

    /// Returns the shared facts.
    pub(crate) fn facts(&self) -> SharedFacts {
        self.facts.clone()
    }

    /// Notes rows that were just read or written. Returns whether a worker may have become able to
    /// take more.
    pub(crate) fn note(&mut self, rows: Vec<worker::Model>) -> Result<bool, DbErr> {
        self.workers.desired.note(&rows, Instant::now());
        let mut facts = self.facts.lock();
        let mut better = false;
        for row in rows {
            facts.learn(&row)?;
            let (worker, ended_tasks) = (facts.as_placed(&row)?, unsigned(row.ended_tasks));
            facts.rows.insert(row.id, row);
            self.gone.remove(&worker.id);
            let mut index = self.workers.lock();
            if index.get(worker.id).is_none() {
                // A removed worker returned with a new id, so its old entry is deleted.
                let is_namesake = |id: &WorkerId| index.get(*id).is_some_and(|gone| gone.name == worker.name);
                let namesakes: Vec<_> = self.gone.keys().copied().filter(is_namesake).collect();
                for id in namesakes {
                    self.gone.remove(&id);
                    index.remove(id);
                }
            }
            let before = index.seen(worker.id);
            better |= index.get(worker.id).is_none_or(|known| is_better(known, before, &worker));
            index.observe(worker, ended_tasks, facts.now);
        }
        Ok(better)
    }

    /// Records a transaction of this replica whose rows were all noted.
    pub(crate) fn wrote(&mut self, transaction: Option<TransactionId>) {
        self.own_transactions.extend(transaction);
        self.own_transactions.drain(..self.own_transactions.len().saturating_sub(MAX_OWN_TRANSACTIONS));
    }

    /// Marks removed workers. They count as just lost for a while.
    pub(crate) fn forget(&mut self, ids: impl IntoIterator<Item = WorkerId>) {
        let ids: Vec<_> = ids.into_iter().collect();
        self.workers.desired.forget(ids.iter().copied());
        let (mut facts, mut index) = (self.facts.lock(), self.workers.lock());
        for id in ids {
            let Some(known) = index.get(id).cloned() else { continue };
            facts.contacts.remove(&id.uuid());
            facts.rows.remove(&id.uuid());
            if facts.remember.is_zero() {
                index.remove(id);
            } else {
                self.gone.entry(id).or_insert(facts.now);
                // Load, trust and desired state of a removed worker no longer apply.
                let (desired, trust, load) = (Desired::Run, Trust::Full, Load::default());
                let state = State::Lost;
                index.put(Worker { state, just_lost: true, gone: true, desired, trust, load, ..known });
            }
        }
    }

    /// Reads the rows of these workers.
    pub(crate) async fn read(&mut self, db: &Database, ids: &HashSet<WorkerId>) -> Result<bool, DbErr> {
        if ids.is_empty() {
            return Ok(false);
        }
        let given = rows::ids(ids.iter().map(|id| id.uuid()))?;
        let (db, backend) = (db.read(), db.read().get_database_backend());
        let among = rows::among(backend, 1);
        let query = format!("SELECT * FROM heartbeats WHERE worker_id {among}");
        let contacts = Statement::from_sql_and_values(backend, query, [given]);
        let contacts = heartbeat::Entity::find().from_raw_sql(contacts).all(db).await?;
        let found = workers::find_all(db, ids.iter().copied()).await?;

        self.facts.lock().now = Timestamp::now();
        let there: HashSet<_> = found.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
        let gone: Vec<_> = ids.difference(&there).copied().collect();
        let some_removed = !gone.is_empty();
        self.forget(gone);
        self.note_contacts(contacts);
        // Requests that waited for a removed worker must be decided again.
        Ok(self.note(found)? || some_removed)
    }

    fn note_contacts(&mut self, contacts: Vec<heartbeat::Model>) {
        self.facts.lock().contacts.extend(contacts.into_iter().map(|contact| (contact.worker_id, contact)));
    }

    /// Reads what other replicas changed since the last poll. Returns whether a worker may have
    /// become able to take more.
    pub(crate) async fn catch_up(&mut self, db: &Database) -> Result<bool, DbErr> {
        let now = Timestamp::now();
        let is_due = self.all_read_at.is_none_or(|at| now.since(at) >= FULL_READ_INTERVAL);
        let read = db.read();
        if read.get_database_backend() != DbBackend::Postgres {
            return self.read_all(db, now).await;
        }
        // The snapshot is read first. Transactions in progress now are read with the next poll.
        let oldest = Statement::from_string(
            DbBackend::Postgres,
            "SELECT CAST(CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS XID) AS TEXT) AS BIGINT) AS oldest,
             COALESCE((SELECT MAX(revision) FROM removed_workers), 0) AS last_removal",
        );
        let row = read.query_one_raw(oldest).await?;
        let oldest = row.as_ref().map(|row| row.try_get::<i64>("", "oldest")).transpose()?;
        let oldest = oldest.and_then(TransactionId::new);
        let last_removal: i64 =
            row.map(|row| row.try_get("", "last_removal")).transpose()?.unwrap_or_default();
        let (Some(seen), false) = (self.seen, is_due) else {
            let better = self.read_all(db, now).await?;
            (self.seen, self.last_removal) = (oldest, last_removal);
            return Ok(better);
        };
        self.own_transactions.retain(|transaction| !transaction.is_before(seen));
        let wrote = rows::value(self.own_transactions.make_contiguous())?;
        // `xmin` is the transaction that last wrote a row. The query selects the rows that other
        // replicas wrote since the last poll.
        let since = |table: &str| {
            let query = format!(
                "SELECT * FROM {table} WHERE age({table}.xmin) <= age(CAST(CAST($1 AS TEXT) AS XID))
                 AND {table}.xmin NOT IN (SELECT CAST(value AS XID) FROM json_array_elements_text(CAST(CAST($2 AS TEXT) AS JSON)))"
            );
            let values = [seen.0.to_string().into(), wrote.clone()];
            Statement::from_sql_and_values(DbBackend::Postgres, query, values)
        };
        let (contacts, rows) = tokio::try_join!(
            heartbeat::Entity::find().from_raw_sql(since("heartbeats")).all(read),
            worker::Entity::find().from_raw_sql(since("workers")).all(read),
        )?;
        let mut changed: HashSet<_> = contacts.iter().map(|contact| contact.worker_id).collect();
        self.facts.lock().now = now;
        changed.retain(|id| self.changes_placement(&contacts, *id));
        rows.iter().for_each(|row| _ = changed.remove(&row.id));
        self.note_contacts(contacts);
        let mut better = self.note(rows)?;
        let changed = changed.into_iter().map(WorkerId::from_uuid).collect();
        better |= self.read(db, &changed).await?;
        if last_removal > self.last_removal {
            // Last, because a worker in these rows may have been removed since.
            let gone = removed::removed_since(read, self.last_removal, i64::MAX).await?;
            self.forget(gone.iter().map(|gone| WorkerId::from_uuid(gone.id)));
            // Requests that waited for a removed worker must be decided again.
            better = true;
        }
        (self.seen, self.last_removal) = (oldest, last_removal);
        Ok(self.stop_remembering(now)? || better)
    }

    /// Returns whether a heartbeat changes a fact that placement uses.
    fn changes_placement(&self, contacts: &[heartbeat::Model], id: Uuid) -> bool {
        let Some(new) = contacts.iter().find(|contact| contact.worker_id == id) else { return false };
        let awaited = |contact: &heartbeat::Model| contact.last_contact_at < contact.patient_since;
        let facts = self.facts.lock();
        let is_short =
            |contact: &heartbeat::Model| facts.row(id).is_some_and(|worker| contact.is_short_of_disk(worker));
        facts.contacts.get(&id).is_none_or(|known| {
            awaited(known) != awaited(new)
                || known.kept_containers != new.kept_containers
                || known.volumes != new.volumes
                || is_short(known) != is_short(new)
        })
    }

    async fn read_all(&mut self, db: &Database, now: Timestamp) -> Result<bool, DbErr> {
        let contacts = heartbeat::Entity::find().all(db.read()).await?;
        let rows = worker::Entity::find().all(db.read()).await?;
        self.facts.lock().now = now;
        let in_use: HashSet<_> = rows.iter().map(|row| &row.labels).collect();
        self.facts.lock().labels.retain(|text, _| in_use.contains(text));
        self.note_contacts(contacts);
        let there: HashSet<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
        let better = self.note(rows)?;
        let known: Vec<_> = self.workers.lock().workers().map(|worker| worker.id).collect();
        let gone: Vec<_> = known.into_iter().filter(|id| !there.contains(id)).collect();
        // Requests that waited for a removed worker must be decided again.
        let some_removed = gone.iter().any(|id| !self.gone.contains_key(id));
        self.forget(gone);
        self.all_read_at = Some(now);
        Ok(self.stop_remembering(now)? || better || some_removed)
    }

    /// Ends the time for which lost and removed workers count as ones that may return. Returns
    /// whether it ended for any. Requests that waited for these workers must be decided again.
    fn stop_remembering(&mut self, now: Timestamp) -> Result<bool, DbErr> {
        let (facts, mut workers) = (self.facts.lock(), self.workers.lock());
        let is_over = |(_, since): &(&WorkerId, &Timestamp)| now.since(**since) >= facts.remember;
        let gone: Vec<_> = self.gone.iter().filter(is_over).map(|(id, _)| *id).collect();
        let just_lost =
            workers.workers().filter(|worker| worker.just_lost && !self.gone.contains_key(&worker.id));
        let lost = just_lost.filter_map(|worker| facts.row(worker.id.uuid()).map(|row| facts.as_placed(row)));
        let lost = lost.collect::<Result<Vec<_>, DbErr>>()?;
        let lost: Vec<_> = lost.into_iter().filter(|worker| !worker.just_lost).collect();
        let some = !gone.is_empty() || !lost.is_empty();
        lost.into_iter().for_each(|worker| workers.put(worker));
        for id in gone {
            self.gone.remove(&id);
            workers.remove(id);
        }
        Ok(some)
    }
}

/// Returns whether a worker may take something that it could not take with the load `before`.
fn is_better(known: &Worker, before: Load, now: &Worker) -> bool {
    let after = &now.load;
    let freed = after.tasks < before.tasks
        || after.kept_containers < before.kept_containers
        || after.kept_volumes < before.kept_volumes
        || !after.short_of_disk && before.short_of_disk
        || after.reserved.cpu_millis < before.reserved.cpu_millis
        || after.reserved.memory_bytes < before.reserved.memory_bytes
        || after.reserved.disk_bytes < before.reserved.disk_bytes;
    freed || !known.is_as(now)
}

#[cfg(test)]
mod tests {
    use testing::databases;

    use super::*;
    use crate::db::entity::lease::Kind;
    use crate::notify::changes::Effects;
    use crate::workers::test_support::registration;

    async fn assert_removal_is_reported_once(remember_lost: Duration) {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config { remember_lost, ..Config::new("", "") };
        let (one, now) = (registration("one"), Timestamp::now());
        db.write(async |txn| workers::register(&txn, &[&one], &config, now, &mut Effects::default()).await)
            .await
            .expect("registered");
        let mut cache = WorkerCache::new(&config);
        cache.catch_up(&db).await.expect("read");
        assert!(!cache.catch_up(&db).await.expect("read"), "nothing has changed");
        db.write(async |txn| worker::Entity::delete_many().exec(&*txn).await).await.expect("removed");
        assert!(
            cache.catch_up(&db).await.expect("read"),
            "requests that waited for the worker are decided again"
        );
        assert!(!cache.catch_up(&db).await.expect("read"), "the removal was noted before");
    }

    #[tokio::test]
    async fn worker_removal_is_reported_once() {
        assert_removal_is_reported_once(Duration::ZERO).await;
        assert_removal_is_reported_once(Duration::from_secs(3600)).await;
    }

    #[tokio::test]
    async fn planned_grant_takes_no_slot_until_committed() {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new("", "");
        let gateways = ["one", "two"].map(registration);
        let (registrations, now) = (gateways.iter().collect::<Vec<_>>(), Timestamp::now());
        db.write(async |txn| {
            workers::register(&txn, &registrations, &config, now, &mut Effects::default()).await
        })
        .await
        .expect("registered");
        let mut cache = WorkerCache::new(&config);
        cache.catch_up(&db).await.expect("read");
        let mut rows = worker::Entity::find().all(db.read()).await.expect("rows");
        let idle_since = |cache: &WorkerCache, row: &worker::Model| {
            let workers = cache.workers.lock();
            let mut all = workers.workers_and_idleness();
            all.find(|(worker, _)| worker.id.uuid() == row.id).expect("a known worker").1
        };
        let since = idle_since(&cache, &rows[0]).expect("an idle worker");

        let slot = (Kind::Task, Resources::default());
        let ids: Vec<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
        ids.iter().for_each(|id| cache.workers.lock().plan(*id, slot.0, &slot.1));
        rows[1].active_tasks = 1;
        cache.facts.lock().now = since + Duration::from_secs(60);
        ids.iter().for_each(|id| cache.workers.lock().unplan(*id, slot.0, &slot.1));
        assert!(!cache.note(rows.clone()).expect("noted"), "no worker may take more than before");
        assert_eq!(idle_since(&cache, &rows[0]), Some(since), "its grant was refused");
        assert_eq!(idle_since(&cache, &rows[1]), None, "its grant held");
        rows[1].active_tasks = 0;
        cache.facts.lock().now = since + Duration::from_secs(90);
        assert!(cache.note(rows.clone()).expect("noted"), "a slot came free");
        assert_eq!(idle_since(&cache, &rows[1]), Some(since + Duration::from_secs(90)));
    }

    #[tokio::test]
    async fn own_writes_are_skipped_until_others_write() {
        let database = databases::postgres().await;
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let (config, now) = (Config::new("", ""), Timestamp::now());
        let gateways = ["one", "two"].map(registration);
        let registrations = gateways.iter().collect::<Vec<_>>();
        db.write(async |txn| {
            workers::register(&txn, &registrations, &config, now, &mut Effects::default()).await
        })
        .await
        .expect("registered");
        let mut cache = WorkerCache::new(&config);
        cache.catch_up(&db).await.expect("read");
        // Returns the transaction that wrote the row.
        let take = async |name: &str| {
            let taken = db.write(async |txn| {
                let query = format!(
                    "UPDATE workers SET active_tasks = active_tasks + 1 WHERE name = '{name}'
                     RETURNING CAST(CAST(xmin AS TEXT) AS BIGINT) AS writer"
                );
                let row = txn.query_one_raw(Statement::from_string(DbBackend::Postgres, query)).await?;
                row.expect("a worker").try_get::<i64>("", "writer")
            });
            TransactionId::new(taken.await.expect("taken")).expect("a number")
        };
        let tasks = |cache: &WorkerCache| {
            let workers = cache.workers.lock();
            let mut tasks: Vec<_> =
                workers.workers().map(|known| (known.name.clone(), known.load.tasks)).collect();
            tasks.sort();
            tasks.into_iter().map(|(_, tasks)| tasks).collect::<Vec<_>>()
        };

        let ours = take("one").await;
        take("two").await;
        cache.wrote(Some(ours));
        cache.catch_up(&db).await.expect("read");
        assert_eq!(tasks(&cache), [0, 1], "own writes are not read again, and this test does not note them");
        take("one").await;
        cache.catch_up(&db).await.expect("read");
        assert_eq!(tasks(&cache), [2, 1]);
    }

    #[tokio::test]
    async fn lost_worker_counts_as_returning_until_forgotten() {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let (config, registered_at) = (Config::new("", ""), Timestamp::now());
        let gateways = ["lost", "removed"].map(registration);
        let registrations = gateways.iter().collect::<Vec<_>>();
        db.write(async |txn| {
            workers::register(&txn, &registrations, &config, registered_at, &mut Effects::default()).await
        })
        .await
        .expect("registered");
        let mut cache = WorkerCache::new(&config);
        cache.catch_up(&db).await.expect("read");
        let rows = worker::Entity::find().all(db.read()).await.expect("rows");
        let row = |name: &str| rows.iter().find(|row| row.name == name).expect("a row").clone();
        let [lost, removed] = ["lost", "removed"].map(|name| WorkerId::from_uuid(row(name).id));
        // Returns whether the worker counts as one that may return. `None`: the worker is unknown.
        let may_come_back = |cache: &WorkerCache, id: WorkerId| {
            let workers = cache.workers.lock();
            workers.get(id).map(|known| {
                assert_eq!(known.state, State::Lost);
                known.just_lost
            })
        };

        let lost_at = registered_at + config.lost_after;
        cache.facts.lock().now = lost_at;
        cache.note(vec![worker::Model { state: State::Lost, ..row("lost") }]).expect("noted");
        cache.forget([removed]);
        let over = lost_at + config.remember_lost;
        for (now, is_over) in [(lost_at, false), (over - Duration::from_micros(1), false), (over, true)] {
            cache.facts.lock().now = now;
            assert_eq!(
                cache.stop_remembering(now).expect("checked"),
                is_over,
                "waiting requests are decided again"
            );
            assert_eq!(may_come_back(&cache, lost), Some(!is_over));
            assert_eq!(may_come_back(&cache, removed), Some(true).filter(|_| !is_over));
        }
        assert!(!cache.stop_remembering(over).expect("checked"), "nothing is left to report");
    }

    #[test]
    fn transaction_ids_wrap_around() {
        let [last, first] =
            [i64::from(u32::MAX), 3].map(|number| TransactionId::new(number).expect("a number"));
        assert!(last.is_before(first) && !first.is_before(last) && !last.is_before(last));
        assert_eq!(TransactionId::new(0), None);
    }
}
