//! Workers that are kept free, for those that have waited long for more than comes free at a time.
//!
//! Smaller ones take each part of a worker as it comes free, so one that asks for much would never find all of it free at once, nor a group all of
//! its leases. So when the first of a line finds nothing and has waited for `queue_aging`, a worker is kept free for it, a group has several:
//! what comes after it in rank gets nothing there until it has its own. Who waits and is before it in rank may still take what there is. No
//! further worker of a kind is kept free while one in ten of them are, unless one behind it in rank gives way.
//!
//! Which worker it is may have been a bad choice: what runs there may never end, or may wait itself for something that is refused there for this
//! one. So where nothing has ended for [`PATIENCE`] another is kept free instead, and so on, with more patience each time. Once all were
//! tried everybody has a time without, and it begins again.
//!
//! Of replicas where the same waits, one chooses for it, and tells the others by a table ([`told`]). It is advice: whoever does not know of it yet
//! places one more there, which delays the one that waits and breaks nothing.
//!
//! Invariant: after each look at those that wait, a worker is kept free only for one that waits here, and has not had its turn without asking
//! for it again, or for one of another replica.

#[cfg(test)]
mod tests;
mod told;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::PoisonError;
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use sea_orm::{DbErr, EntityTrait};
use uuid::Uuid;

use self::told::Told;
use super::Dispatcher;
use crate::entity::kept_free;
use crate::placement::{Index, Part};
use crate::queue::{Queue, Waiting};

/// For how long a worker is kept free on which nothing ends, at first. Each further one has twice as long, up to [`LONGEST`] times.
const PATIENCE: Duration = Duration::from_secs(600);

/// How many times as long it may come to be.
const LONGEST: u32 = 64;

/// After how long one for which there was no worker to be kept free is looked at again.
const AGAIN: Duration = Duration::from_secs(30);

/// For how many a worker is looked for with one look: each may mean a look at every worker.
const CHOICES: usize = 20;

/// The workers that are kept free, as this replica knows.
#[derive(Debug)]
pub(super) struct KeptFree {
    /// What was chosen here, by whom it is for.
    here: HashMap<Uuid, Effort>,
    /// What was chosen elsewhere.
    told: Told,
    /// When those that wait were looked at last.
    looked_at: Timestamp,
    /// For how many more a worker may be looked for with this look.
    choices: usize,
    /// Whether there were more than that.
    has_more: bool,
    /// Who had its turn with this look.
    turned: HashSet<Uuid>,
}

/// What is done for one that has waited long.
#[derive(Debug)]
struct Effort {
    /// The workers that are kept free for it.
    workers: BTreeSet<WorkerId>,
    /// The fewest tasks that were on them since.
    least: u32,
    /// When something ended there last, or they were chosen.
    since: Timestamp,
    /// Others, where too little ended.
    tried: HashSet<WorkerId>,
    /// How often something else was tried.
    moves: u32,
    /// Until then none is looked for.
    rests_until: Timestamp,
}

impl Effort {
    fn new() -> Self {
        let (since, rests_until) = (Timestamp(0), Timestamp(0));
        let (workers, tried) = (BTreeSet::new(), HashSet::new());
        Self { workers, least: 0, since, tried, moves: 0, rests_until }
    }

    fn patience(&self) -> Duration {
        PATIENCE * 2_u32.saturating_pow(self.moves).min(LONGEST)
    }

    /// When there may be something else to do.
    fn due_at(&self) -> Timestamp {
        match self.workers.is_empty() {
            true => self.rests_until,
            false => self.since + self.patience(),
        }
    }

    /// So many tasks are on its workers `now`. When nothing has ended there for long it does not count on them any more.
    fn see(&mut self, tasks: u32, now: Timestamp) {
        if tasks < self.least {
            (self.least, self.since) = (tasks, now);
        } else if !self.workers.is_empty() && self.due_at() <= now {
            self.tried.extend(std::mem::take(&mut self.workers));
            self.moves = self.moves.saturating_add(1);
        }
    }

    /// These are kept free for it from now on. None: nothing can be had now.
    fn choose(&mut self, chosen: BTreeSet<WorkerId>, workers: &Index, now: Timestamp) {
        if chosen.is_empty() {
            // There may have been enough but for those that were tried: others have their turns there before they are tried again.
            let rest = if std::mem::take(&mut self.tried).is_empty() { AGAIN } else { PATIENCE };
            self.rest(now + rest);
        } else if self.workers != chosen {
            (self.least, self.since) = (workers.tasks_on(&chosen), now);
            self.workers = chosen;
        }
    }

    /// Whether it has none because some were tried.
    fn rests_from_trying(&self) -> bool {
        self.workers.is_empty() && self.moves > 0
    }

    fn rest(&mut self, until: Timestamp) {
        self.workers.clear();
        self.rests_until = until;
    }
}

impl KeptFree {
    pub(super) fn new(now: Timestamp) -> Self {
        let told = Told::new(Uuid::new_v4());
        let (here, turned) = (HashMap::new(), HashSet::new());
        Self { here, told, looked_at: now, choices: CHOICES, has_more: false, turned }
    }

    /// Those that wait are looked at.
    fn begin(&mut self, now: Timestamp) {
        (self.looked_at, self.choices, self.has_more) = (now, CHOICES, false);
        self.turned.clear();
    }

    /// One has come before others in its line: what is kept free for one of them is so for it from now on.
    fn inherit(&mut self, id: Uuid, queue: &Queue) {
        let behind = |other: &Uuid| *other != id && queue.are_in_one_line(id, *other);
        let behind: Vec<_> = self.here.keys().filter(|other| behind(other)).copied().collect();
        for other in behind {
            let Some(effort) = self.here.remove(&other) else { continue };
            self.here.entry(id).or_insert(effort);
        }
    }

    /// Keeps workers free for one that has found nothing, if it has waited long, or has taken over what was kept free for one that had.
    fn keep(&mut self, id: Uuid, has_aged: bool, parts: &[Part], workers: &mut Index, now: Timestamp) {
        self.turned.insert(id);
        if let Some(chosen) = self.told.chosen_for(id) {
            chosen.iter().for_each(|worker| workers.keep_free(*worker, Some(id)));
            return;
        }
        if !has_aged && !self.here.contains_key(&id) {
            return;
        }
        let mut effort = self.here.remove(&id).unwrap_or_else(Effort::new);
        effort.see(workers.tasks_on(&effort.workers), now);
        let kept = workers.choose_to_keep_free(parts, &effort.workers, None);
        if !kept.is_empty() {
            effort.choose(kept, workers, now);
        } else if effort.rests_until <= now {
            // Of several the others stay for the time being.
            self.look_for(&mut effort, parts, workers, now);
        }
        effort.workers.iter().for_each(|worker| workers.keep_free(*worker, Some(id)));
        self.here.insert(id, effort);
    }

    /// What another replica keeps free for one is so from its turn on.
    pub(super) fn keep_as_told(&self, id: Uuid, workers: &mut Index) {
        let chosen = self.told.chosen_for(id).into_iter().flatten();
        chosen.for_each(|worker| workers.keep_free(*worker, Some(id)));
    }

    /// Looks for workers that might be kept free for one for which none, or not all that it needs, are.
    fn look_for(&mut self, effort: &mut Effort, parts: &[Part], workers: &mut Index, now: Timestamp) {
        let Some(left) = self.choices.checked_sub(1) else {
            self.has_more = true;
            return;
        };
        self.choices = left;
        let mut taken = self.taken();
        if effort.workers.is_empty() && workers.are_enough_kept_free(parts, &taken) {
            // Who has its turn later is behind it in rank, and gives way.
            let mut would_do = |other: &Effort| {
                let without = taken.difference(&other.workers.iter().copied().collect()).copied().collect();
                !workers.are_enough_kept_free(parts, &without)
            };
            let mut later = self.here.iter().filter(|(other, _)| !self.turned.contains(other));
            let Some(other) = later.find_map(|(other, of)| would_do(of).then_some(*other)) else {
                effort.rest(now + AGAIN);
                return;
            };
            self.here.remove(&other);
            taken = self.taken();
        }
        taken.extend(&effort.tried);
        let chosen = workers.choose_to_keep_free(parts, &effort.workers, Some(&taken));
        effort.choose(chosen, workers, now);
    }

    /// What is kept free for those for whom nothing is chosen just now.
    fn taken(&self) -> HashSet<WorkerId> {
        let here = self.here.values().flat_map(|effort| effort.workers.iter().copied());
        here.chain(self.told.all().map(|(worker, _)| worker)).collect()
    }

    /// Nothing is kept free for this one any more, unless another replica says so.
    fn let_go(&mut self, id: Uuid) {
        self.here.remove(&id);
    }

    /// Brings what is known to the workers; answers whether anything changed.
    fn apply(&mut self, queue: &Queue, workers: &mut Index) -> bool {
        let before: BTreeMap<_, _> = workers.kept_free().collect();
        self.told.see_who_waits(queue);
        let here = self.here.iter().filter(|(whom, _)| queue.contains(**whom));
        let here = here.flat_map(|(whom, effort)| effort.workers.iter().map(|worker| (*worker, *whom)));
        let after: BTreeMap<_, _> = self.told.all().chain(here).collect();
        before
            .keys()
            .filter(|worker| !after.contains_key(worker))
            .for_each(|id| workers.keep_free(*id, None));
        after.iter().for_each(|(worker, whom)| workers.keep_free(*worker, Some(*whom)));
        before != after
    }

    /// Whether there has come to be something to do since the last look.
    fn is_due(&self, now: Timestamp) -> bool {
        let mut due = self.here.values().map(Effort::due_at);
        self.has_more || due.any(|at| self.looked_at < at && at <= now)
    }
}

impl Dispatcher {
    /// Those that wait have their turns: nothing is kept free for them until each has had its own.
    pub(super) fn look_again_at_kept_free(&mut self, now: Timestamp) {
        self.kept_free.begin(now);
        let (queue, mut workers) = (self.queue(), self.memory.workers.lock());
        let here: Vec<_> = workers.kept_free().filter(|(_, whom)| queue.contains(*whom)).collect();
        here.into_iter().for_each(|(worker, _)| workers.keep_free(worker, None));
    }

    /// One that asks for all these `parts`, and is the first of its line, has found nothing.
    pub(super) fn keep_free(&mut self, waiting: &Waiting, parts: &[Part], now: Timestamp) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let has_aged = queue.has_aged(waiting.since, now);
        self.kept_free.inherit(waiting.id, &queue);
        drop(queue);
        self.kept_free.keep(waiting.id, has_aged, parts, &mut self.memory.workers.lock(), now);
    }

    /// One that waits can never be placed, as far as one can see.
    pub(super) fn keep_nothing_free(&mut self, waiting: &Waiting) {
        self.kept_free.let_go(waiting.id);
    }

    /// What was kept free for those that did not have their turn is still.
    pub(super) fn keep_free_as_before(&mut self) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.kept_free.apply(&queue, &mut self.memory.workers.lock());
    }

    /// Whether this replica keeps the worker of this row free.
    #[cfg(test)]
    pub(crate) fn chose(&self, row: &kept_free::Model) -> bool {
        self.kept_free.told.is_own(row)
    }

    /// Tells other replicas what is kept free for those that wait here, and hears what is for theirs.
    pub(super) async fn tend_kept_free(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let rows = kept_free::Entity::find().all(self.db.read()).await?;
        let news = {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let KeptFree { here, told, looked_at, .. } = &mut self.kept_free;
            here.retain(|whom, _| queue.contains(*whom));
            told.hear(&rows, here, now);
            let news = told.news(&rows, here, now);
            // Somebody has waited long by now, and was not looked at since.
            self.look |= queue.some_aged(*looked_at, now) || self.kept_free.is_due(now);
            self.look |= self.kept_free.apply(&queue, &mut self.memory.workers.lock());
            news
        };
        news.write(&self.db, now).await
    }
}
