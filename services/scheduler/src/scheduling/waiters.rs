//! Calls for leases, and those of them that wait.
//!
//! Who waits is held by this process alone: a caller that goes away, or whose replica ends, has asked for nothing. In the queue it stands
//! beside the workloads, so that neither passes the other over; other replicas are told of it ([`super::peer_waiters`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{LeaseId, Timestamp, WorkerId};
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::{GrantedLease, LeaseRequest, PlaceResult};
use crate::placement::Demand;
use crate::queue::Waiting;

/// How many calls wait at a replica. One that comes while so many wait hears at once that all are busy.
const MOST: usize = 10_000;

/// A call for leases, until all of them are decided.
#[derive(Debug)]
pub(super) struct Call(Mutex<Undecided>);

#[derive(Debug)]
struct Undecided {
    placed: Vec<Option<PlaceResult>>,
    left: usize,
    answer: Option<oneshot::Sender<Vec<PlaceResult>>>,
}

impl Call {
    pub(super) fn new(count: usize, answer: oneshot::Sender<Vec<PlaceResult>>) -> Arc<Self> {
        let undecided = Undecided { placed: vec![None; count], left: count, answer: Some(answer) };
        Arc::new(Self(Mutex::new(undecided)))
    }

    fn lock(&self) -> MutexGuard<'_, Undecided> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What became of one that was asked for. Once all are decided it is answered.
    fn decide(&self, item: usize, placed: PlaceResult) {
        let mut call = self.lock();
        let Some(open) = call.placed.get_mut(item).filter(|open| open.is_none()) else { return };
        *open = Some(placed);
        call.left -= 1;
        if call.left == 0
            && let Some(answer) = call.answer.take()
        {
            // Whoever has gone needs no answer.
            _ = answer.send(std::mem::take(&mut call.placed).into_iter().flatten().collect());
        }
    }

    fn has_gone(&self) -> bool {
        self.lock().answer.as_ref().is_none_or(oneshot::Sender::is_closed)
    }
}

/// One of several leases that a call asks for.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) ask: LeaseRequest,
    call: Arc<Call>,
    item: usize,
    /// Earlier calls for the same lease that wait still, and which of theirs it is.
    earlier: Vec<(Arc<Call>, usize)>,
    pub(super) granted: Option<GrantedLease>,
}

impl Member {
    pub(super) fn new(ask: LeaseRequest, call: Arc<Call>, item: usize) -> Self {
        Self { ask, call, item, earlier: Vec::new(), granted: None }
    }

    pub(super) fn decide(&self, placed: PlaceResult) {
        self.earlier.iter().for_each(|(call, item)| call.decide(*item, placed.clone()));
        self.call.decide(self.item, placed);
    }

    /// Those who asked for it before hear what becomes of it as well.
    fn take_over(&mut self, mut before: Self) {
        self.earlier.append(&mut before.earlier);
        self.earlier.push((before.call, before.item));
        self.earlier.retain(|(call, _)| !call.has_gone());
    }

    fn has_gone(&self) -> bool {
        self.call.has_gone() && self.earlier.iter().all(|(call, _)| call.has_gone())
    }

    /// What it asks for, where the containers of its owner are.
    fn demand(&self) -> Arc<Demand> {
        match self.ask.kept_to {
            Some(worker) => Arc::new(Demand { only: Some(worker), ..(*self.ask.demand).clone() }),
            None => self.ask.demand.clone(),
        }
    }
}

/// Leases that are granted together, or none of them.
#[derive(Debug)]
pub(super) struct LeaseGroup {
    pub(super) members: Vec<Member>,
    pub(super) priority: i64,
    pub(super) since: Timestamp,
    pub(super) sequence: Uuid,
    /// Until when somebody waits for them.
    until: Instant,
}

impl LeaseGroup {
    /// `None`: there are no members.
    pub(super) fn new(members: Vec<Member>, now: Timestamp) -> Option<Self> {
        let wait = members.iter().map(|member| member.ask.wait).max()?;
        let priority = members.iter().map(|member| member.ask.priority).max()?;
        let until = Instant::now() + wait;
        let mut leases = Self { members, priority, since: now, sequence: Uuid::nil(), until };
        leases.call(Uuid::now_v7());
        Some(leases)
    }

    /// What it is called from now on.
    fn call(&mut self, sequence: Uuid) {
        self.sequence = sequence;
        for member in &mut self.members {
            Arc::make_mut(&mut member.ask.demand).waits_as = sequence;
        }
    }

    /// What it is called while it waits. No workload has that id.
    pub(super) fn id(&self) -> Uuid {
        self.sequence
    }

    /// Whether `other` asks for the same leases.
    fn asks_like(&self, other: &Self) -> bool {
        self.members.len() == other.members.len()
            && self.members.iter().zip(&other.members).all(|(one, other)| {
                let (one, other) = (&one.ask, &other.ask);
                one.lease == other.lease
                    && one.kind == other.kind
                    && one.request == other.request
                    && one.demand.shape.team == other.demand.shape.team
            })
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.members.iter().map(|member| member.ask.lease)
    }

    /// Whether nobody waits for it any more.
    pub(super) fn has_gone(&self) -> bool {
        self.members.iter().all(Member::has_gone)
    }

    /// Comes in the place of another that asked for the same.
    fn take_over(&mut self, other: Self) {
        self.since = other.since;
        self.call(other.sequence);
        self.members.iter_mut().zip(other.members).for_each(|(member, before)| member.take_over(before));
    }

    /// The containers of an owner are on this worker.
    pub(super) fn keep_to(&mut self, kept: &HashMap<LeaseId, WorkerId>) {
        for member in &mut self.members {
            if let Some(worker) = kept.get(&member.ask.lease) {
                member.ask.kept_to = Some(*worker);
            }
        }
    }

    /// As it stands in the queue.
    pub(super) fn waiting(&self) -> Option<Waiting> {
        let (first, others) = self.members.split_first()?;
        Some(Waiting {
            id: self.id(),
            is_elsewhere: false,
            others: others.iter().map(Member::demand).collect(),
            sequence: self.sequence,
            priority: self.priority,
            since: self.since,
            demand: first.demand(),
            locations: first.ask.locations.clone(),
            must_start: false,
            told: Arc::default(),
            traceparent: String::new(),
            spec_bytes: None,
        })
    }
}

/// The calls that wait, by what they are called in the queue.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: HashMap<Uuid, LeaseGroup>,
    /// By what each lease waits.
    by_lease: HashMap<LeaseId, Uuid>,
    ends: BTreeSet<(Instant, Uuid)>,
    /// Those of which other replicas know.
    told: HashSet<Uuid>,
    /// Those of them that may not wait any more.
    taken: Vec<Uuid>,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The call that waits by this id.
    pub(super) fn get(&self, id: Uuid) -> Option<&LeaseGroup> {
        self.waiting.get(&id)
    }

    /// Whether something waits by this id.
    pub(super) fn contains(&self, id: Uuid) -> bool {
        self.waiting.contains_key(&id)
    }

    /// Whether a call waits that asks for this lease.
    #[cfg(test)]
    pub(super) fn waits(&self, lease: LeaseId) -> bool {
        self.by_lease.contains_key(&lease)
    }

    /// Lets it wait, unless nobody waits for it, or too many wait: then it is given back.
    pub(super) fn put(&mut self, leases: LeaseGroup) -> Result<(), LeaseGroup> {
        if leases.until <= Instant::now() || leases.has_gone() || self.waiting.len() >= MOST {
            return Err(leases);
        }
        self.ends.insert((leases.until, leases.id()));
        self.by_lease.extend(leases.leases().map(|lease| (lease, leases.id())));
        self.waiting.insert(leases.id(), leases);
        Ok(())
    }

    pub(super) fn take(&mut self, id: Uuid) -> Option<LeaseGroup> {
        let leases = self.waiting.remove(&id)?;
        if self.told.contains(&id) {
            self.taken.push(id);
        }
        self.ends.remove(&(leases.until, id));
        for lease in leases.leases() {
            self.by_lease.remove(&lease);
        }
        Some(leases)
    }

    /// What the calls that wait are called.
    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.waiting.keys().copied()
    }

    /// Other replicas know which calls wait here now.
    pub(super) fn are_told(&mut self) {
        self.told = self.waiting.keys().copied().collect();
    }

    /// Those of which other replicas know, and that do not wait any more.
    pub(super) fn told_in_vain(&mut self) -> Vec<Uuid> {
        let mut over = std::mem::take(&mut self.taken);
        over.retain(|id| !self.waiting.contains_key(id) && self.told.remove(id));
        over
    }

    /// When somebody has waited long enough next.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(at, _)| *at)
    }

    /// Those who have waited long enough.
    pub(super) fn take_ended(&mut self, now: Instant) -> Vec<LeaseGroup> {
        let mut ended = Vec::new();
        while let Some((_, id)) = self.ends.first().copied().filter(|(at, _)| *at <= now) {
            let Some(leases) = self.take(id) else { break };
            ended.push(leases);
        }
        ended
    }

    /// Those for whom nobody waits any more.
    pub(super) fn gone(&self) -> Vec<Uuid> {
        self.waiting.iter().filter(|(_, leases)| leases.has_gone()).map(|(id, _)| *id).collect()
    }

    /// `leases` is asked for: it takes the place of one that waits for the same. [`Waits::ForElse`]: one of its ids waits for something else.
    pub(super) fn replace(&mut self, leases: &mut LeaseGroup) -> Waits {
        let Some(id) = leases.leases().find_map(|lease| self.by_lease.get(&lease).copied()) else {
            return Waits::Not;
        };
        match self.take(id) {
            Some(old) if old.asks_like(leases) => {
                let id = old.id();
                leases.take_over(old);
                Waits::Replaced(id)
            }
            Some(old) => {
                // It was there a moment ago.
                _ = self.put(old);
                Waits::ForElse
            }
            None => Waits::Not,
        }
    }
}

/// Whether what is asked for waits already.
#[derive(Debug)]
pub(super) enum Waits {
    Not,
    /// It was called so in the queue.
    Replaced(Uuid),
    ForElse,
}
