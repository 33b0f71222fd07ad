//! Reservations: workers held free for large requests that have waited for long.
//!
//! Small requests take each free part of a worker, so a large request, or a group, would never find
//! room for all of it. The queue pass calls this module when the head of a line finds no worker and
//! has waited for `queue_aging`. A worker is then reserved for the request, or several for a group.
//! Requests with a lower rank get nothing there. Requests with a higher rank may still use the
//! present room. At most one in ten workers of a kind is reserved.
//!
//! A reservation lasts for [`RESERVATION_TIME`], because the attempts on the worker may never end,
//! or may depend on a request that the reservation blocks. After that, another worker is reserved.
//! When all were tried, the request gets no reservation for the same time.
//!
//! If several replicas queue the same request, one of them reserves and records that in a table
//! ([`table`]). Grants are not checked against the table. A replica with outdated knowledge may
//! place one more request on the worker, which costs time but breaks no limit.
//!
//! Invariant: after each queue pass, a worker is reserved only for a request of another replica, or
//! for a waiting request of this queue that did not give up its reservation in its turn.

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
use crate::queue::{Queue, WaitingRequest};

/// Time for which a worker is reserved, and time for which a request gets no reservation after all
/// workers were tried.
const RESERVATION_TIME: Duration = Duration::from_secs(3600);

/// Delay before the next choice for a request for which no worker could be reserved.
const RETRY_DELAY: Duration = Duration::from_secs(30);

/// Maximum number of new reservations in one pass. Each may check every worker.
const MAX_CHOICES: usize = 20;

/// The reservations that this replica knows.
#[derive(Debug)]
pub(super) struct Reservations {
    /// Identifies the rows of this process.
    replica: Uuid,
    /// The reservations of this replica, by request.
    own: HashMap<Uuid, Reservation>,
    /// The reservations of other replicas, by request.
    others: HashMap<Uuid, PeerReservation>,
    /// Start of the last pass.
    pass_at: Timestamp,
    choices_left: usize,
}

/// The workers that another replica reserved for a request. Empty: the request gets no reservation
/// for a time.
#[derive(Debug)]
struct PeerReservation {
    replica: Uuid,
    workers: BTreeSet<WorkerId>,
    /// Whether the request was in this queue, so that its end is noticed here.
    seen_here: bool,
}

/// The reservation for one request.
#[derive(Debug)]
struct Reservation {
    workers: BTreeSet<WorkerId>,
    /// End of the reservation. Without workers: time of the next choice.
    until: Timestamp,
    /// Workers that were reserved without success.
    tried: HashSet<WorkerId>,
    /// Whether the request has no workers because all were tried.
    rests: bool,
}

impl Reservation {
    fn new(now: Timestamp) -> Self {
        Self { workers: BTreeSet::new(), until: now, tried: HashSet::new(), rests: false }
    }

    /// Removes a worker that another replica reserved.
    fn lose(&mut self, worker: WorkerId, now: Timestamp) {
        if self.workers.remove(&worker) && self.workers.is_empty() {
            self.until = now;
        }
    }

    /// Ends the reservation if it has expired.
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
        Self { replica: Uuid::new_v4(), own, others, pass_at: now, choices_left: MAX_CHOICES }
    }

    fn begin_pass(&mut self, now: Timestamp) {
        (self.pass_at, self.choices_left) = (now, MAX_CHOICES);
    }

    /// Reserves workers for an aged request that found no worker.
    fn reserve(&mut self, id: Uuid, parts: &[Part], workers: &mut Index, now: Timestamp) {
        if !self.others.contains_key(&id) {
            let mut reservation = self.own.remove(&id).unwrap_or_else(|| Reservation::new(now));
            self.update(&mut reservation, parts, workers, now);
            self.own.insert(id, reservation);
        }
        self.apply_to_turn(id, workers);
    }

    /// Moves a reservation to the head of its line. Other requests of the line get no turn.
    fn inherit(&mut self, id: Uuid, queue: &Queue) {
        let is_behind = |other: &&Uuid| **other != id && queue.are_in_one_line(id, **other);
        let behind: Vec<_> = self.own.keys().filter(is_behind).copied().collect();
        for other in behind {
            let Some(reservation) = self.own.remove(&other) else { continue };
            self.own.entry(id).or_insert(reservation);
        }
    }

    fn update(&mut self, of: &mut Reservation, parts: &[Part], workers: &mut Index, now: Timestamp) {
        of.end_if_due(now);
        let kept = workers.choose_to_reserve(parts, &of.workers, None);
        if !kept.is_empty() {
            of.workers = kept;
            return;
        }
        // Workers that can no longer take the request are replaced, for the rest of the time.
        let before = std::mem::take(&mut of.workers);
        let until = if before.is_empty() { now + RESERVATION_TIME } else { of.until };
        if before.is_empty() && of.until > now {
            return;
        }
        let Some(left) = self.choices_left.checked_sub(1) else { return };
        self.choices_left = left;
        of.until = now + RETRY_DELAY;
        let mut taken: HashSet<_> = self.reserved().map(|(worker, _)| worker).collect();
        if workers.are_enough_reserved(parts, &taken) {
            return;
        }
        let could_be = workers.choose_to_reserve(parts, &before, Some(&taken));
        taken.extend(&of.tried);
        of.workers = workers.choose_to_reserve(parts, &before, Some(&taken));
        of.rests = of.workers.is_empty() && !could_be.is_empty();
        if of.rests {
            of.until = now + RESERVATION_TIME;
        } else if !of.workers.is_empty() {
            of.until = until;
        }
    }

    /// Applies the reservation of a request from its turn on.
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

    /// Applies all reservations to the index, and returns whether any changed. Requests that have
    /// ended or are being granted have none.
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

    /// Returns whether a pass would change a reservation.
    fn is_due(&self, now: Timestamp) -> bool {
        self.choices_left == 0 || self.own.values().any(|of| self.pass_at < of.until && of.until <= now)
    }
}

impl Dispatcher {
    /// Starts a queue pass. Requests of this queue have no reservation until their turn.
    pub(super) fn begin_reservations(&mut self, now: Timestamp) {
        self.reservations.begin_pass(now);
        let (queue, mut workers) = (self.queue(), self.cache.workers.lock());
        let here: Vec<_> = workers.reserved().filter(|(_, id)| queue.contains(*id)).collect();
        here.into_iter().for_each(|(worker, _)| workers.reserve(worker, None));
    }

    /// Handles the head of a line that found no worker for its `parts`.
    pub(super) fn reserve(&mut self, waiting: &WaitingRequest, parts: &[Part], now: Timestamp) {
        let (queue, mut workers) =
            (self.queue.lock().unwrap_or_else(PoisonError::into_inner), self.cache.workers.lock());
        self.reservations.inherit(waiting.id, &queue);
        let has_one = self.reservations.own.contains_key(&waiting.id);
        if has_one || queue.has_aged(waiting.since, now) {
            self.reservations.reserve(waiting.id, parts, &mut workers, now);
        } else {
            self.reservations.apply_to_turn(waiting.id, &mut workers);
        }
    }

    /// Cancels the reservation of a request that no known worker could ever take.
    pub(super) fn cancel_reservation(&mut self, waiting: &WaitingRequest) {
        self.reservations.own.remove(&waiting.id);
    }

    /// Ends a queue pass. Reservations of requests without a turn apply too.
    pub(super) fn end_reservations(&mut self) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.reservations.apply(&queue, &mut self.cache.workers.lock());
    }

    /// Returns whether this replica made the reservation.
    #[cfg(test)]
    pub(crate) fn reserved(&self, row: &reservation::Model) -> bool {
        row.replica == self.reservations.replica
    }

    /// Publishes the reservations of this replica, and reads those of others.
    pub(super) async fn exchange_reservations(&mut self, now: Timestamp) -> Result<(), DbErr> {
        let rows = reservation::Entity::find().all(self.db.read()).await?;
        let difference = {
            let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let reservations = &mut self.reservations;
            reservations.own.retain(|id, _| queue.contains(*id));
            reservations.read(&rows, now);
            self.pass_needed |= queue.some_aged(reservations.pass_at, now) || reservations.is_due(now);
            self.pass_needed |= reservations.apply(&queue, &mut self.cache.workers.lock());
            Difference::of(reservations, &rows, now)
        };
        difference.write(&self.db, now).await
    }
}
