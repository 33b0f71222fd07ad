//! What replicas tell each other of workers that are kept free: the table `kept_free`, which each reads with every poll.
//!
//! A row is of a worker and of whom it is kept free for; one whose worker is whom it is for says that nothing is kept free for that one for a
//! time, after others were tried. It belongs to the replica that chose, for a term which that one prolongs as long as whom it is for waits. No
//! other changes it until the term is over, so what a replica leaves that ends, ends as well.
//!
//! Invariant: of two replicas that chose for the same one, or the same worker for two, one gives way as soon as it reads the other's row. The row
//! of a worker is its first; where two chose for one before either could know, the replica with the lower id goes on.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use db::{Database, rows};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use serde::Serialize;
use uuid::Uuid;

use super::Effort;
use crate::entity::kept_free::Model;
use crate::queue::Queue;

/// For how long a worker is kept free unless the replica that chose it says so again.
const TERM: Duration = Duration::from_secs(30);

/// What others chose.
#[derive(Debug)]
pub(super) struct Told {
    /// What rows of this process are marked with.
    replica: Uuid,
    elsewhere: HashMap<Uuid, Chosen>,
}

/// The workers that another replica keeps free for one.
#[derive(Debug, Default)]
struct Chosen {
    workers: BTreeSet<WorkerId>,
    by: Option<Uuid>,
    /// Whether it waited here as well. Then it is known here when it waits no more.
    has_waited_here: bool,
    waits_here: bool,
}

impl Chosen {
    fn is_over(&self) -> bool {
        self.has_waited_here && !self.waits_here
    }
}

impl Told {
    pub(super) fn new(replica: Uuid) -> Self {
        Self { replica, elsewhere: HashMap::new() }
    }

    /// The workers that another replica keeps free for this one.
    pub(super) fn chosen_for(&self, id: Uuid) -> Option<&BTreeSet<WorkerId>> {
        self.elsewhere.get(&id).map(|chosen| &chosen.workers)
    }

    /// What other replicas keep free, and for whom, but for those that are known to wait no more.
    pub(super) fn all(&self) -> impl Iterator<Item = (WorkerId, Uuid)> {
        let others = self.elsewhere.iter().filter(|(_, chosen)| !chosen.is_over());
        others.flat_map(|(whom, chosen)| chosen.workers.iter().map(|worker| (*worker, *whom)))
    }

    /// Notes who of those for whom others chose waits here.
    pub(super) fn see_who_waits(&mut self, queue: &Queue) {
        for (whom, chosen) in &mut self.elsewhere {
            chosen.waits_here = queue.contains(*whom);
            chosen.has_waited_here |= chosen.waits_here;
        }
    }

    /// These are the `rows` of the table `now`. What was chosen `here` gives way where another's goes on.
    pub(super) fn hear(&mut self, rows: &[Model], here: &mut HashMap<Uuid, Effort>, now: Timestamp) {
        let live = rows.iter().filter(|row| Timestamp(row.expires_at) > now);
        let (own, others): (Vec<_>, Vec<_>) = live.partition(|row| self.is_own(row));
        let told: BTreeSet<_> = own.iter().map(|row| row.waits_as).collect();
        let mut before = std::mem::take(&mut self.elsewhere);
        for row in others {
            let (worker, whom) = (WorkerId::from_uuid(row.worker_id), row.waits_as);
            here.values_mut().for_each(|effort| _ = effort.workers.remove(&worker));
            // One of an older version says nobody, and does not give way.
            let goes_on = row.chosen_by.is_none_or(|other| other < self.replica);
            if told.contains(&whom) && here.contains_key(&whom) && !goes_on {
                continue;
            }
            here.remove(&whom);
            let chosen = self.elsewhere.entry(whom).or_insert_with(|| {
                let known = before.remove(&whom).unwrap_or_default();
                Chosen { workers: BTreeSet::new(), by: row.chosen_by, ..known }
            });
            // Of two others the one that goes on.
            if row.chosen_by < chosen.by {
                (chosen.workers, chosen.by) = (BTreeSet::new(), row.chosen_by);
            }
            if row.chosen_by == chosen.by && worker.uuid() != whom {
                chosen.workers.insert(worker);
            }
        }
    }

    /// What the table, which holds these `rows`, shall say of what was chosen `here`.
    pub(super) fn news(&self, rows: &[Model], here: &HashMap<Uuid, Effort>, now: Timestamp) -> News {
        let chosen = here.iter().flat_map(|(whom, effort)| {
            let rests = effort.rests_from_trying().then(|| WorkerId::from_uuid(*whom));
            effort.workers.iter().copied().chain(rests).map(|id| (id, *whom))
        });
        let chosen: BTreeMap<_, _> = chosen.collect();
        let own = rows.iter().filter(|row| self.is_own(row));
        let own: BTreeMap<_, _> = own.map(|row| (WorkerId::from_uuid(row.worker_id), row)).collect();
        let is_said = |worker: &WorkerId, whom: Uuid| {
            own.get(worker)
                .is_some_and(|row| row.waits_as == whom && Timestamp(row.expires_at) > now + TERM / 2)
        };
        let is_over = |row: &&Model| {
            let worker = WorkerId::from_uuid(row.worker_id);
            !chosen.contains_key(&worker) && (self.is_own(row) || Timestamp(row.expires_at) <= now)
        };
        News {
            replica: self.replica,
            over: rows.iter().filter(is_over).map(|row| row.worker_id).collect(),
            tell: chosen
                .iter()
                .filter(|(id, whom)| !is_said(id, **whom))
                .map(|(id, of)| (*id, *of))
                .collect(),
        }
    }

    pub(super) fn is_own(&self, row: &Model) -> bool {
        row.chosen_by == Some(self.replica)
    }
}

/// In what the table and what was chosen here are different.
#[derive(Debug)]
pub(super) struct News {
    replica: Uuid,
    /// The workers of which it shall not say anything.
    over: Vec<Uuid>,
    /// What it shall say.
    tell: BTreeMap<WorkerId, Uuid>,
}

impl News {
    pub(super) async fn write(&self, db: &Database, now: Timestamp) -> Result<(), DbErr> {
        // What is new first: who reads in between must not think that nobody chooses. And each in a transaction of its own: replicas lock rows of
        // each other only one statement at a time.
        if !self.tell.is_empty() {
            db.write(async |txn| self.tell(&txn, now).await).await?;
        }
        if !self.over.is_empty() {
            db.write(async |txn| self.delete(&txn, now).await).await?;
        }
        Ok(())
    }

    async fn delete(&self, txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
        let backend = txn.get_database_backend();
        let query = format!(
            "DELETE FROM kept_free WHERE worker_id {} AND (chosen_by = $2 OR expires_at <= $3)",
            rows::among(backend, 1)
        );
        let values = [rows::ids(self.over.iter().copied())?, self.replica.into(), now.0.into()];
        txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
        Ok(())
    }

    /// What another replica said of a worker stays until its term is over.
    async fn tell(&self, txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
        #[derive(Serialize)]
        struct Row {
            worker_id: Uuid,
            waits_as: Uuid,
        }
        const ROW: [(&str, rows::Column); 2] =
            [("worker_id", rows::Column::Uuid), ("waits_as", rows::Column::Uuid)];
        let backend = txn.get_database_backend();
        let query = format!(
            "INSERT INTO kept_free (worker_id, waits_as, expires_at, chosen_by)
             SELECT worker_id, waits_as, $2, $3 FROM ({}) AS chosen WHERE TRUE ORDER BY worker_id
             ON CONFLICT (worker_id) DO UPDATE
             SET waits_as = excluded.waits_as, expires_at = excluded.expires_at, chosen_by = excluded.chosen_by
             WHERE kept_free.chosen_by = excluded.chosen_by OR kept_free.expires_at <= $4",
            rows::query(backend, 1, &ROW)
        );
        let told: Vec<_> =
            self.tell.iter().map(|(id, whom)| Row { worker_id: id.uuid(), waits_as: *whom }).collect();
        let values = [rows::value(&told)?, (now + TERM).0.into(), self.replica.into(), now.0.into()];
        txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
        Ok(())
    }
}
