//! Reservations: workers held free for requests that have waited long for more than comes free at
//! a time.
//!
//! Small requests take each part of a worker as it comes free, so a large request would never find
//! its room, nor a group all of its leases. The queue pass calls this module: when the first of a
//! line finds nothing and has waited for `queue_aging`, a worker is reserved for it, for a group
//! several. What comes after it in rank gets nothing there. What comes before it in rank may still
//! take what there is. No further worker of a kind is reserved while one in ten of them are.
//!
//! A reservation lasts for [`HELD`]: what runs on the worker may never end, or may wait for
//! something that is refused there because of the reservation. Then another worker is reserved,
//! and once all were tried none is for that time.
//!
//! Of the replicas where the same request waits, one reserves and says so in a table
//! ([`table`]). A grant is not checked against it: a replica that has not read it yet may place one
//! more request there, which costs time and breaks no rule.
//!
//! Invariant: after each queue pass a worker is reserved only for a request that waits here and did
//! not have its turn without asking for it, or for a request of another replica.

mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::PoisonError;
use std::time::Duration;

use domain::{Timestamp, WorkerId};
use sea_orm::{DbErr, EntityTrait};
use uuid::Uuid;

use self::table::Difference;
use super::Dispatcher;
use crate::db::entity::reservation;
use crate::placement::{Index, Part};
use crate::queue::{Queue, Waiting};

/// How long a worker is reserved, and how long a request has none after all workers were tried.
const HELD: Duration = Duration::from_secs(3600);

/// How long until a request for which no worker could be reserved is looked at again.
const AGAIN: Duration = Duration::from_secs(30);

/// How many requests get a reservation in one pass: each may mean a look at every worker.
const CHOICES: usize = 20;

/// The reservations that this replica knows of.
#[derive(Debug)]
pub(super) struct Reservations {
    /// What rows of this process are marked with.
    replica: Uuid,
    /// The reservations that this replica made, by the request that they are for.
    own: HashMap<Uuid, Reservation>,
    /// What other replicas reserved, by the request.
    others: HashMap<Uuid, Other>,
    /// When the last pass began.
    pass_at: Timestamp,
    choices_left: usize,
}

/// The workers that another replica reserved for one request. None: it has none for a time.
#[derive(Debug)]
struct Other {
    replica: Uuid,
    workers: BTreeSet<WorkerId>,
    /// Whether the request was seen in this queue: then it is known here when it waits no more.
    seen_here: bool,
}

/// The workers that are reserved for one request.
#[derive(Debug)]
struct Reservation {
    workers: BTreeSet<WorkerId>,
    /// When they are given up. Without workers: when some are looked for again.
    until: Timestamp,
    /// Workers that were reserved for it in vain.
    tried: HashSet<WorkerId>,
    /// Whether it has no workers because all were tried.
    rests: bool,
}

impl Reservation {
    fn new(now: Timestamp) -> Self {
        Self { workers: BTreeSet::new(), until: now, tried: HashSet::new(), rests: false }
    }

    /// Another replica reserved this worker.
    fn lose(&mut self, worker: WorkerId, now: Timestamp) {
        if self.workers.remove(&worker) && self.workers.is_empty() {
            self.until = now;
        }
    }

    /// Its time is over: what it had was in vain.
    fn end_if_due(&mut self, now: Timestamp) {
        if self.until > now {
            return;
        }
        if std::mem::take(&mut self.rests) {
            self.tried.clear();
        }
        self.tried.extend(std::mem::take(&mut self.workers));
    }
}

impl Reservations {
    pub(super) fn new(now: Timestamp) -> Self {
        let (own, others) = (HashMap::new(), HashMap::new());
        Self { replica: Uuid::new_v4(), own, others, pass_at: now, choices_left: CHOICES }
    }

    fn begin_pass(&mut self, now: Timestamp) {
        (self.pass_at, self.choices_left) = (now, CHOICES);
    }

    /// Reserves workers for an aged request that has found nothing.
    fn reserve(&mut self, id: Uuid, parts: &[Part], workers: &mut Index, now: Timestamp) {
        if !self.others.contains_key(&id) {
            let mut reservation = self.own.remove(&id).unwrap_or_else(|| Reservation::new(now));
            self.renew(&mut reservation, parts, workers, now);
            self.own.insert(id, reservation);
        }
        self.apply_to_turn(id, workers);
    }

    /// The first of a line takes over what is reserved for another of that line, which has no turn.
    fn inherit(&mut self, id: Uuid, queue: &Queue) {
        let is_behind = |other: &&Uuid| **other != id && queue.are_in_one_line(id, **other);
        let behind: Vec<_> = self.own.keys().filter(is_behind).copied().collect();
        for other in behind {
            let Some(reservation) = self.own.remove(&other) else { continue };
            self.own.entry(id).or_insert(reservation);
        }
    }

    fn renew(&mut self, of: &mut Reservation, parts: &[Part], workers: &mut Index, now: Timestamp) {
        of.end_if_due(now);
        let kept = workers.choose_to_reserve(parts, &of.workers, None);
        if !kept.is_empty() {
            of.workers = kept;
            return;
        }
        // Workers that could not take it any more are replaced, for what is left of the time.
        let before = std::mem::take(&mut of.workers);
        let until = if before.is_empty() { now + HELD } else { of.until };
        if before.is_empty() && of.until > now {
            return;
        }
        let Some(left) = self.choices_left.checked_sub(1) else { return };
        self.choices_left = left;
        of.until = now + AGAIN;
        let mut taken: HashSet<_> = self.reserved().map(|(worker, _)| worker).collect();
        if workers.are_enough_reserved(parts, &taken) {
            return;
        }
        let could_be = workers.choose_to_reserve(parts, &before, Some(&taken));
        taken.extend(&of.tried);
        of.workers = workers.choose_to_reserve(parts, &before, Some(&taken));
        of.rests = of.workers.is_empty() && !could_be.is_empty();
        if of.rests {
            of.until = now + HELD;
        } else if !of.workers.is_empty() {
            of.until = until;
        }
    }

    /// From the turn of a request on, its workers take nothing else.
    pub(super) fn apply_to_turn(&self, id: Uuid, workers: &mut Index) {
        let own = self.own.get(&id).map(|reservation| &reservation.workers);
        let reserved = own.or_else(|| self.others.get(&id).map(|other| &other.workers));
        reserved.into_iter().flatten().for_each(|worker| workers.reserve(*worker, Some(id)));
    }

    fn reserved(&self) -> impl Iterator<Item = (WorkerId, Uuid)> {
        let own = self.own.iter().map(|(id, reservation)| (id, &reservation.workers));
        let others = self.others.iter().map(|(id, other)| (id, &other.workers));
        own.chain(others).flat_map(|(id, workers)| workers.iter().map(|worker| (*worker, *id)))
    }

    /// Tells the workers of all reservations; answers whether anything changed. A request that is
    /// known to wait no more, or is being granted, has none.
    fn apply(&mut self, queue: &Queue, workers: &mut Index) -> bool {
        self.others.iter_mut().for_each(|(id, other)| other.seen_here |= queue.contains(*id));
        let is_known_to_be_over =
            |id: &Uuid| !queue.contains(*id) && self.others.get(id).is_none_or(|other| other.seen_here);
        let before: BTreeMap<_, _> = workers.reserved().collect();
        let after: BTreeMap<_, _> = self.reserved().filter(|(_, id)| !is_known_to_be_over(id)).collect();
        let over = before.keys().filter(|worker| !after.contains_key(worker));
        over.for_each(|worker| workers.reserve(*worker, None));
        after.iter().for_each(|(worker, request)| workers.reserve(*worker, Some(*request)));
        before != after
    }

    /// Whether a pass would change a reservation.
    fn is_due(&self, now: Timestamp) -> bool {
        self.choices_left == 0 || self.own.values().any(|of| self.pass_at < of.until && of.until <= now)
    }
}

impl Dispatcher {
    /// Begins a queue pass: nothing is reserved for a request of this queue until its turn.
    pub(super) fn begin_reservations(&mut self, now: Timestamp) {
        self.reservations.begin_pass(now);
        let (queue, mut workers) = (self.queue(), self.memory.workers.lock());
        let here: Vec<_> = workers.reserved().filter(|(_, id)| queue.contains(*id)).collect();
        here.into_iter().for_each(|(worker, _)| workers.reserve(worker, None));
    }

    /// The first of a line, which asks for all these `parts`, has found nothing.
    pub(super) fn reserve(&mut self, waiting: &Waiting, parts: &[Part], now: Timestamp) {
        let (queue, mut workers) =
            (self.queue.lock().unwrap_or_else(PoisonError::into_inner), self.memory.workers.lock());
        self.reservations.inherit(waiting.id, &queue);
        let has_one = self.reservations.own.contains_key(&waiting.id);
        if has_one || queue.has_aged(waiting.since, now) {
            self.reservations.reserve(waiting.id, parts, &mut workers, now);
        } else {
            self.reservations.apply_to_turn(waiting.id, &mut workers);
        }
    }

    /// A request that waits can never be placed, as far as is known.
    pub(super) fn cancel_reservation(&mut self, waiting: &Waiting) {
        self.reservations.own.remove(&waiting.id);
    }

    /// Ends a queue pass: the reservations of requests that had no turn hold as well.
    pub(super) fn end_reservations(&mut self) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.reservations.apply(&queue, &mut self.memory.workers.lock());
    }

    /// Whether this replica made the reservation of this row.
    #[cfg(test)]
    pub(crate) fn reserved(&self, row: &reservation::Model) -> bool {
        row.replica == self.reservations.replica
    }

    /// Tells other replicas what is reserved here, and reads what is reserved there.
    pub(super) async fn exchange_reservations(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let rows = reservation::Entity::find().all(self.db.read()).await?;
        let difference = {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let reservations = &mut self.reservations;
            reservations.own.retain(|id, _| queue.contains(*id));
            reservations.read(&rows, now);
            self.look |= queue.some_aged(reservations.pass_at, now) || reservations.is_due(now);
            self.look |= reservations.apply(&queue, &mut self.memory.workers.lock());
            Difference::of(reservations, &rows, now)
        };
        difference.write(&self.db, now).await
    }
}
