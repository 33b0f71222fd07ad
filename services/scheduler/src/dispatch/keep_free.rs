//! Workers that are kept free, for those that have waited long for more than comes free at a time.
//!
//! Smaller ones take each part of a worker as it comes free, so one that asks for much would never find all of it free at once, nor a group all of
//! its leases. So when the first of a line finds nothing and has waited for `queue_aging`, a worker is kept free for it, a group has several:
//! what comes after it in rank gets nothing there until it has its own. Who is before it in rank may still take what there is. At most one in
//! ten of the workers that could take it are kept free at a time.
//!
//! Replicas tell each other by the table `kept_free`, which each reads with every poll. It is advice: whoever does not know of it yet places
//! one more there, which delays the one that waits and breaks nothing. An entry is for a term, which is prolonged by every replica where whom
//! it is for waits; so what a replica leaves that ends, ends as well.
//!
//! Invariant: after each look at those that wait, a worker is kept free only for one that waits here, or for one of another replica.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::PoisonError;
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use sea_orm::sea_query::OnConflict;
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, Set};
use uuid::Uuid;

use super::Dispatcher;
use crate::entity::kept_free;
use crate::placement::{Index, Part};
use crate::queue::{Queue, Waiting};

/// For how long a worker is kept free unless somebody says so again.
const TERM: Duration = Duration::from_secs(30);

/// What this replica knows of workers that are kept free for those that wait here.
#[derive(Debug)]
pub(super) struct KeptFree {
    /// For whom workers were kept free when those that wait were looked at last.
    whom: HashSet<Uuid>,
    /// What is over, which the table may not say yet.
    over: BTreeSet<(WorkerId, Uuid)>,
    /// When those that wait were looked at last.
    looked_at: Timestamp,
}

impl KeptFree {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { whom: HashSet::new(), over: BTreeSet::new(), looked_at: now }
    }
}

/// What is kept free while those that wait have their turns.
#[derive(Debug)]
pub(super) struct Keeping {
    /// What was kept free for those that did not have their turn yet.
    before: BTreeMap<WorkerId, Uuid>,
    /// What was kept free and is not any more.
    over: BTreeSet<(WorkerId, Uuid)>,
    /// For whom workers are kept free now.
    whom: HashSet<Uuid>,
    now: Timestamp,
}

impl Keeping {
    /// It waits no more.
    pub(super) fn placed(&mut self, id: Uuid) {
        _ = self.take(id);
    }

    /// The workers that were kept free for it.
    fn take(&mut self, id: Uuid) -> BTreeSet<WorkerId> {
        let taken: BTreeSet<_> =
            self.before.extract_if(.., |_, whom| *whom == id).map(|(id, _)| id).collect();
        self.over.extend(taken.iter().map(|worker| (*worker, id)));
        taken
    }
}

impl Dispatcher {
    /// Those that wait have their turns: nothing is kept free for them until each has had its own.
    pub(super) fn look_again_at_kept_free(&mut self, now: Timestamp) -> Keeping {
        self.kept_free.looked_at = now;
        let (queue, mut workers) = (self.queue(), self.memory.workers.lock());
        let is_here =
            |(_, whom): &(WorkerId, Uuid)| queue.contains(*whom) || self.kept_free.whom.contains(whom);
        let before: BTreeMap<_, _> = workers.kept_free().filter(is_here).collect();
        before.keys().for_each(|worker| workers.keep_free(*worker, None));
        Keeping { before, over: BTreeSet::new(), whom: HashSet::new(), now }
    }

    /// One that asks for all these `parts` has found nothing: workers are kept free for it, if it has waited long.
    pub(super) fn keep_free(&self, keeping: &mut Keeping, waiting: &Waiting, parts: &[Part]) {
        if !self.queue().has_aged(waiting.since, keeping.now) {
            return;
        }
        let kept = keeping.take(waiting.id);
        let mut workers = self.memory.workers.lock();
        for worker in workers.choose_to_keep_free(parts, &kept) {
            workers.keep_free(worker, Some(waiting.id));
            keeping.whom.insert(waiting.id);
            if let Some(other) = keeping.before.remove(&worker) {
                keeping.over.insert((worker, other));
            }
            keeping.over.remove(&(worker, waiting.id));
        }
    }

    /// What was kept free for those that did not have their turn is still.
    pub(super) fn keep_free_as_before(&mut self, mut keeping: Keeping) {
        let (queue, mut workers) = (self.queue(), self.memory.workers.lock());
        for (worker, whom) in std::mem::take(&mut keeping.before) {
            if queue.contains(whom) {
                workers.keep_free(worker, Some(whom));
                keeping.whom.insert(whom);
            } else {
                keeping.over.insert((worker, whom));
            }
        }
        drop((queue, workers));
        let KeptFree { whom, over, .. } = &mut self.kept_free;
        *whom = keeping.whom;
        over.retain(|(_, of)| !whom.contains(of));
        over.append(&mut keeping.over);
    }

    /// Tells other replicas what is kept free for those that wait here, and hears what is for theirs.
    pub(super) async fn tend_kept_free(&mut self, now: Timestamp) -> Result<(), DbErr> {
        // Somebody has waited long by now, and was not looked at since.
        let aged = self.queue().some_aged(self.kept_free.looked_at, now);
        let rows = kept_free::Entity::find().all(self.db.read()).await?;
        let news = {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            self.kept_free.compare(&rows, &queue, &mut self.memory.workers.lock(), now)
        };
        self.look |= aged || news.look;
        if !news.tell.is_empty() || !news.over.is_empty() {
            self.db.write(async |txn| write(&txn, &news, now).await).await?;
        }
        self.kept_free.over.clear();
        Ok(())
    }
}

/// In what the table `kept_free` and what is remembered are different.
#[derive(Debug, Default)]
struct News {
    /// What the table shall say.
    tell: BTreeMap<WorkerId, Uuid>,
    /// What it shall not say any more.
    over: BTreeSet<(WorkerId, Uuid)>,
    /// Whether those that wait may find something that they did not find before, or must be looked at.
    look: bool,
}

impl KeptFree {
    /// Compares what the table says, which are these `rows`, with what is remembered, and remembers what others said.
    fn compare(
        &mut self,
        rows: &[kept_free::Model],
        queue: &Queue,
        workers: &mut Index,
        now: Timestamp,
    ) -> News {
        let mut news = News::default();
        let said: BTreeMap<_, _> = rows.iter().map(|row| (WorkerId::from_uuid(row.worker_id), row)).collect();
        let holds = |worker: WorkerId, whom: Uuid, at: Timestamp| {
            said.get(&worker).is_some_and(|row| row.waits_as == whom && Timestamp(row.expires_at) > at)
        };
        for (worker, whom) in workers.kept_free().collect::<Vec<_>>() {
            if queue.contains(whom) {
                if !holds(worker, whom, now + TERM / 2) {
                    news.tell.insert(worker, whom);
                }
            } else if self.whom.contains(&whom) || !holds(worker, whom, now) {
                workers.keep_free(worker, None);
                self.over.insert((worker, whom));
                news.look = true;
            }
        }
        let kept: BTreeMap<_, _> = workers.kept_free().collect();
        for (worker, row) in &said {
            let entry = (*worker, row.waits_as);
            if Timestamp(row.expires_at) <= now || self.over.contains(&entry) {
                news.over.insert(entry);
                continue;
            }
            let is_known = kept.get(worker) == Some(&row.waits_as);
            // Who of those that wait here is before others their turns have said. Those of other replicas were first.
            let is_decided_here = kept.contains_key(worker) && queue.contains(row.waits_as);
            if !is_known && !is_decided_here {
                workers.keep_free(*worker, Some(row.waits_as));
                news.tell.remove(worker);
                news.look = true;
            }
        }
        news
    }
}

async fn write(txn: &DatabaseTransaction, news: &News, now: Timestamp) -> Result<(), DbErr> {
    for (worker, whom) in &news.over {
        let row = kept_free::Entity::delete_many().filter(kept_free::Column::WorkerId.eq(worker.uuid()));
        row.filter(kept_free::Column::WaitsAs.eq(*whom)).exec(txn).await?;
    }
    if news.tell.is_empty() {
        return Ok(());
    }
    let rows = news.tell.iter().map(|(worker, whom)| kept_free::ActiveModel {
        worker_id: Set(worker.uuid()),
        waits_as: Set(*whom),
        expires_at: Set((now + TERM).0),
    });
    let again = OnConflict::column(kept_free::Column::WorkerId)
        .update_columns([kept_free::Column::WaitsAs, kept_free::Column::ExpiresAt])
        .to_owned();
    kept_free::Entity::insert_many(rows).on_conflict(again).exec_without_returning(txn).await?;
    Ok(())
}
