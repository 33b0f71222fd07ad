//! The memory: what this replica remembers of the workers, so that it decides without asking the database.
//!
//! It is only ever behind: what is decided on it is judged again on the rows ([`crate::commit`]). It is read anew whole at the start and now
//! and then, and in between what has changed: what this process changed itself at once, what others did with the next look ([`WorkerCache::catch_up`]).

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

/// How often everything is read anew.
const WHOLE_EVERY: Duration = Duration::from_secs(60);

/// How many of our own transactions are remembered. What older ones wrote is read as what others did: more than between two looks there are only
/// where somebody keeps a transaction open.
const WROTE: usize = 5_000;

/// A transaction of PostgreSQL, as it stands beside the rows that it wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct TransactionId(u32);

impl TransactionId {
    /// `None`: it has no number.
    pub(crate) fn new(number: i64) -> Option<Self> {
        u32::try_from(number).ok().filter(|number| *number > 0).map(Self)
    }

    /// Whether it began before `other`, of two that are no more than two thousand millions apart: after the last number comes the first again.
    fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }
}

/// The workers, as every part of this replica sees them. Cheap to clone; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    index: Arc<Mutex<Index>>,
    /// Those whose gateways speak with this replica, who hear of what is noted here.
    pub(crate) desired: DesiredStates,
}

impl Workers {
    /// A look at them, during which nobody else sees or changes any.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps [`Workers`] near to what the database says. One part of a replica has it, so that what is read is noted in its order.
#[derive(Debug)]
pub(crate) struct WorkerCache {
    pub(crate) workers: Workers,
    facts: SharedFacts,
    /// The oldest transaction that was under way at the last look: what is older was seen.
    seen: Option<TransactionId>,
    /// Transactions of this replica since then, or before: what they made of rows was noted, and is not read again.
    wrote: VecDeque<TransactionId>,
    /// The revision of the last worker that had gone at the last look.
    went: i64,
    whole_at: Option<Timestamp>,
    /// Workers that are gone, until they are forgotten as well.
    gone: HashMap<WorkerId, Timestamp>,
}

/// [`Facts`] for whoever grants while the next is decided. Cheap to clone; clones share them.
#[derive(Debug, Clone)]
pub(crate) struct SharedFacts(Arc<Mutex<Facts>>);

impl SharedFacts {
    fn new(facts: Facts) -> Self {
        Self(Arc::new(Mutex::new(facts)))
    }

    /// A look at them, during which nothing new becomes known.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of workers.
#[derive(Debug)]
pub(crate) struct Facts {
    labels: HashMap<String, Arc<Labels>>,
    contacts: HashMap<Uuid, heartbeat::Model>,
    /// As they were read last.
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

    /// What belongs to one worker alone.
    pub(crate) fn of(config: &Config, contact: Option<heartbeat::Model>) -> Self {
        let mut facts = Self::new(config);
        facts.contacts.extend(contact.map(|contact| (contact.worker_id, contact)));
        facts
    }

    /// What its row said last.
    pub(crate) fn row(&self, id: Uuid) -> Option<&worker::Model> {
        self.rows.get(&id)
    }

    /// A worker whose row is `row`, as placement sees it.
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
            },
            reserved_for: None,
        })
    }

    /// Remembers what labels mean, for there are few different ones.
    fn learn(&mut self, row: &worker::Model) -> Result<(), DbErr> {
        if !self.labels.contains_key(&row.labels) {
            self.labels.insert(row.labels.clone(), Arc::new(from_json(&row.labels)?));
        }
        Ok(())
    }
}

/// All workers as they are, within a transaction. For what is rare: it reads them all.
pub(crate) async fn index(db: &impl ConnectionTrait, config: &Config) -> Result<Index, DbErr> {
    let mut facts = Facts::new(config);
    let contacts = heartbeat::Entity::find().all(db).await?;
    facts.contacts.extend(contacts.into_iter().map(|contact| (contact.worker_id, contact)));
    let mut index = Index::new(config.chains.clone(), config.keep_to_their_own.clone());
    for row in worker::Entity::find().all(db).await? {
        index.put(facts.as_placed(&row)?);
    }
    Ok(index)
}

impl WorkerCache {
    pub(crate) fn new(config: &Config) -> Self {
        let index = Index::new(config.chains.clone(), config.keep_to_their_own.clone());
        Self {
            workers: Workers { index: Arc::new(Mutex::new(index)), desired: DesiredStates::default() },
            facts: SharedFacts::new(Facts::new(config)),
            seen: None,
            wrote: VecDeque::new(),
            went: 0,
            whole_at: None,
            gone: HashMap::new(),
        }
    }

    /// What is known of the workers.
    pub(crate) fn facts(&self) -> SharedFacts {
        self.facts.clone()
    }

    /// Notes what rows say that were read or written just now. Answers whether any worker may take more than before.
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
                // One that has gone is back as another, and is not waited for any more.
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

    /// All rows that this transaction wrote were noted.
    pub(crate) fn wrote(&mut self, transaction: Option<TransactionId>) {
        self.wrote.extend(transaction);
        self.wrote.drain(..self.wrote.len().saturating_sub(WROTE));
    }

    /// These workers are not there any more. They count as such that went just now for a while.
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
                // What was on it, and what was thought and wanted of it when it was there, is done with.
                let (desired, trust, load) = (Desired::Run, Trust::Full, Load::default());
                let state = State::Lost;
                index.put(Worker { state, just_lost: true, gone: true, desired, trust, load, ..known });
            }
        }
    }

    /// Reads the workers that `ids` names.
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
        let some_went = !gone.is_empty();
        self.forget(gone);
        self.heard_of(contacts);
        // Who waited for one that has gone may have to be told so.
        Ok(self.note(found)? || some_went)
    }

    fn heard_of(&mut self, contacts: Vec<heartbeat::Model>) {
        self.facts.lock().contacts.extend(contacts.into_iter().map(|contact| (contact.worker_id, contact)));
    }

    /// Sees what others changed since the last look. Answers whether any worker may take more than before.
    pub(crate) async fn catch_up(&mut self, db: &Database) -> Result<bool, DbErr> {
        let now = Timestamp::now();
        let is_due = self.whole_at.is_none_or(|at| now.since(at) >= WHOLE_EVERY);
        let read = db.read();
        if read.get_database_backend() != DbBackend::Postgres {
            return self.read_whole(db, now).await;
        }
        // Asked first: what is under way now is looked at again the next time.
        let oldest = Statement::from_string(
            DbBackend::Postgres,
            "SELECT CAST(CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS XID) AS TEXT) AS BIGINT) AS oldest,
             COALESCE((SELECT MAX(revision) FROM removed_workers), 0) AS went",
        );
        let row = read.query_one_raw(oldest).await?;
        let oldest = row.as_ref().map(|row| row.try_get::<i64>("", "oldest")).transpose()?;
        let oldest = oldest.and_then(TransactionId::new);
        let went: i64 = row.map(|row| row.try_get("", "went")).transpose()?.unwrap_or_default();
        let (Some(seen), false) = (self.seen, is_due) else {
            let better = self.read_whole(db, now).await?;
            (self.seen, self.went) = (oldest, went);
            return Ok(better);
        };
        self.wrote.retain(|transaction| !transaction.is_before(seen));
        let wrote = rows::value(self.wrote.make_contiguous())?;
        // Who wrote a row last stands beside it: rows that were written since then by others, and no more.
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
        changed.retain(|id| self.says_something_new(&contacts, *id));
        rows.iter().for_each(|row| _ = changed.remove(&row.id));
        self.heard_of(contacts);
        let mut better = self.note(rows)?;
        let changed = changed.into_iter().map(WorkerId::from_uuid).collect();
        better |= self.read(db, &changed).await?;
        if went > self.went {
            // At last: whoever was read may have gone after that.
            let gone = removed::gone_since(read, self.went, i64::MAX).await?;
            self.forget(gone.iter().map(|gone| WorkerId::from_uuid(gone.id)));
            // Who waited for one that has gone may have to be told so.
            better = true;
        }
        (self.seen, self.went) = (oldest, went);
        Ok(self.stop_remembering(now)? || better)
    }

    /// Whether a contact changes what placement knows of its worker.
    fn says_something_new(&self, contacts: &[heartbeat::Model], id: Uuid) -> bool {
        let Some(new) = contacts.iter().find(|contact| contact.worker_id == id) else { return false };
        let awaited = |contact: &heartbeat::Model| contact.last_contact_at < contact.patient_since;
        self.facts.lock().contacts.get(&id).is_none_or(|known| {
            awaited(known) != awaited(new)
                || known.kept_containers != new.kept_containers
                || known.volumes != new.volumes
        })
    }

    async fn read_whole(&mut self, db: &Database, now: Timestamp) -> Result<bool, DbErr> {
        let contacts = heartbeat::Entity::find().all(db.read()).await?;
        let rows = worker::Entity::find().all(db.read()).await?;
        self.facts.lock().now = now;
        let in_use: HashSet<_> = rows.iter().map(|row| &row.labels).collect();
        self.facts.lock().labels.retain(|text, _| in_use.contains(text));
        self.heard_of(contacts);
        let there: HashSet<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
        let better = self.note(rows)?;
        let known: Vec<_> = self.workers.lock().workers().map(|worker| worker.id).collect();
        let gone: Vec<_> = known.into_iter().filter(|id| !there.contains(id)).collect();
        // Who waited for one that has gone may have to be told so.
        let some_went = gone.iter().any(|id| !self.gone.contains_key(id));
        self.forget(gone);
        self.whole_at = Some(now);
        Ok(self.stop_remembering(now)? || better || some_went)
    }

    /// Those that were lost, or went, long enough ago count no more. Answers whether there are any: who waited for them alone has to be told so.
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

/// Whether a worker may take something that it could not take before, when `before` was on it.
fn is_better(known: &Worker, before: Load, now: &Worker) -> bool {
    let after = &now.load;
    let freed = after.tasks < before.tasks
        || after.kept_containers < before.kept_containers
        || after.kept_volumes < before.kept_volumes
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
    use crate::workers::test_support::hello;

    async fn that_a_worker_has_gone_is_news_once(remember_lost: Duration) {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config { remember_lost, ..Config::new("", "") };
        let (one, now) = (hello("one"), Timestamp::now());
        db.write(async |txn| workers::register(&txn, &[&one], &config, now, &mut Effects::default()).await)
            .await
            .expect("let in");
        let mut memory = WorkerCache::new(&config);
        memory.catch_up(&db).await.expect("read");
        assert!(!memory.catch_up(&db).await.expect("read"), "nothing has changed");
        db.write(async |txn| worker::Entity::delete_many().exec(&*txn).await).await.expect("removed");
        assert!(memory.catch_up(&db).await.expect("read"), "who waits for it may have to be told so");
        assert!(!memory.catch_up(&db).await.expect("read"), "that was known");
    }

    #[tokio::test]
    async fn that_a_worker_has_gone_is_news_to_who_waits() {
        that_a_worker_has_gone_is_news_once(Duration::ZERO).await;
        that_a_worker_has_gone_is_news_once(Duration::from_secs(3600)).await;
    }

    #[tokio::test]
    async fn what_was_planned_and_not_granted_never_held_a_slot() {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new("", "");
        let gateways = ["one", "two"].map(hello);
        let (hellos, now) = (gateways.iter().collect::<Vec<_>>(), Timestamp::now());
        db.write(async |txn| workers::register(&txn, &hellos, &config, now, &mut Effects::default()).await)
            .await
            .expect("let in");
        let mut memory = WorkerCache::new(&config);
        memory.catch_up(&db).await.expect("read");
        let mut rows = worker::Entity::find().all(db.read()).await.expect("rows");
        let idle_since = |memory: &WorkerCache, row: &worker::Model| {
            let workers = memory.workers.lock();
            let mut all = workers.workers_and_idleness();
            all.find(|(worker, _)| worker.id.uuid() == row.id).expect("it is known").1
        };
        let since = idle_since(&memory, &rows[0]).expect("nothing is on it");

        let slot = (Kind::Task, Resources::default());
        let ids: Vec<_> = rows.iter().map(|row| WorkerId::from_uuid(row.id)).collect();
        ids.iter().for_each(|id| memory.workers.lock().plan(*id, slot.0, &slot.1));
        rows[1].active_tasks = 1;
        memory.facts.lock().now = since + Duration::from_secs(60);
        ids.iter().for_each(|id| memory.workers.lock().unplan(*id, slot.0, &slot.1));
        assert!(!memory.note(rows.clone()).expect("noted"), "nobody may take more than before");
        assert_eq!(idle_since(&memory, &rows[0]), Some(since), "its grant was refused");
        assert_eq!(idle_since(&memory, &rows[1]), None, "its grant held");
        rows[1].active_tasks = 0;
        memory.facts.lock().now = since + Duration::from_secs(90);
        assert!(memory.note(rows.clone()).expect("noted"), "a slot came free");
        assert_eq!(idle_since(&memory, &rows[1]), Some(since + Duration::from_secs(90)));
    }

    #[tokio::test]
    async fn what_this_replica_wrote_is_not_read_again_until_others_write_it() {
        let database = databases::postgres().await;
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let (config, now) = (Config::new("", ""), Timestamp::now());
        let gateways = ["one", "two"].map(hello);
        let hellos = gateways.iter().collect::<Vec<_>>();
        db.write(async |txn| workers::register(&txn, &hellos, &config, now, &mut Effects::default()).await)
            .await
            .expect("let in");
        let mut memory = WorkerCache::new(&config);
        memory.catch_up(&db).await.expect("read");
        // Answers who did it.
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
        let tasks = |memory: &WorkerCache| {
            let workers = memory.workers.lock();
            let mut tasks: Vec<_> =
                workers.workers().map(|known| (known.name.clone(), known.load.tasks)).collect();
            tasks.sort();
            tasks.into_iter().map(|(_, tasks)| tasks).collect::<Vec<_>>()
        };

        let ours = take("one").await;
        take("two").await;
        memory.wrote(Some(ours));
        memory.catch_up(&db).await.expect("read");
        assert_eq!(tasks(&memory), [0, 1], "what it wrote it has noted, which was left out here");
        take("one").await;
        memory.catch_up(&db).await.expect("read");
        assert_eq!(tasks(&memory), [2, 1]);
    }

    #[tokio::test]
    async fn who_was_lost_or_removed_may_come_back_for_as_long_as_is_said() {
        let database = databases::sqlite();
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let (config, heard) = (Config::new("", ""), Timestamp::now());
        let gateways = ["lost", "removed"].map(hello);
        let hellos = gateways.iter().collect::<Vec<_>>();
        db.write(async |txn| workers::register(&txn, &hellos, &config, heard, &mut Effects::default()).await)
            .await
            .expect("let in");
        let mut memory = WorkerCache::new(&config);
        memory.catch_up(&db).await.expect("read");
        let rows = worker::Entity::find().all(db.read()).await.expect("rows");
        let row = |name: &str| rows.iter().find(|row| row.name == name).expect("it is there").clone();
        let [lost, removed] = ["lost", "removed"].map(|name| WorkerId::from_uuid(row(name).id));
        // Whether it counts as one that may come back. `None`: nothing is known of it.
        let may_come_back = |memory: &WorkerCache, id: WorkerId| {
            let workers = memory.workers.lock();
            workers.get(id).map(|known| {
                assert_eq!(known.state, State::Lost);
                known.just_lost
            })
        };

        let went = heard + config.lost_after;
        memory.facts.lock().now = went;
        memory.note(vec![worker::Model { state: State::Lost, ..row("lost") }]).expect("noted");
        memory.forget([removed]);
        let over = went + config.remember_lost;
        for (now, is_over) in [(went, false), (over - Duration::from_micros(1), false), (over, true)] {
            memory.facts.lock().now = now;
            assert_eq!(memory.stop_remembering(now).expect("looked"), is_over, "who waits is told");
            assert_eq!(may_come_back(&memory, lost), Some(!is_over));
            assert_eq!(may_come_back(&memory, removed), Some(true).filter(|_| !is_over));
        }
        assert!(!memory.stop_remembering(over).expect("looked"), "nothing is left to tell");
    }

    #[test]
    fn after_the_last_number_of_a_transaction_comes_the_first() {
        let [last, first] =
            [i64::from(u32::MAX), 3].map(|number| TransactionId::new(number).expect("a number"));
        assert!(last.is_before(first) && !first.is_before(last) && !last.is_before(last));
        assert_eq!(TransactionId::new(0), None);
    }
}
