//! Calls for leases, and the waiting ones among them.
//!
//! Only this process holds a waiting call. If its caller disconnects or its replica ends, the call
//! has no effect. Calls wait in the same queue as workloads, so neither overtakes the other. Other
//! replicas learn of waiting calls through [`super::peer_waiters`].

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{LeaseId, Timestamp, WorkerId};
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::{GrantedLease, LeaseRequest, PlaceResult};
use crate::placement::{Demand, OnlyWorker};
use crate::queue::WaitingRequest;

/// Maximum number of waiting calls of a replica. Further calls are rejected immediately, as if all
/// workers were busy.
const MAX_CALLS: usize = 10_000;

/// A call for leases, until all of them are decided.
#[derive(Debug)]
pub(super) struct Call(Mutex<CallState>);

#[derive(Debug)]
struct CallState {
    placed: Vec<Option<PlaceResult>>,
    left: usize,
    answer: Option<oneshot::Sender<Vec<PlaceResult>>>,
}

impl Call {
    pub(super) fn new(count: usize, answer: oneshot::Sender<Vec<PlaceResult>>) -> Arc<Self> {
        let state = CallState { placed: vec![None; count], left: count, answer: Some(answer) };
        Arc::new(Self(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, CallState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the result of one lease. The call is answered once all leases have a result.
    fn decide(&self, item: usize, placed: PlaceResult) {
        let mut call = self.lock();
        let Some(open) = call.placed.get_mut(item).filter(|open| open.is_none()) else { return };
        *open = Some(placed);
        call.left -= 1;
        if call.left == 0
            && let Some(answer) = call.answer.take()
        {
            // The caller may have disconnected.
            _ = answer.send(std::mem::take(&mut call.placed).into_iter().flatten().collect());
        }
    }

    fn is_disconnected(&self) -> bool {
        self.lock().answer.as_ref().is_none_or(oneshot::Sender::is_closed)
    }
}

/// One of several leases of a call.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) request: LeaseRequest,
    call: Arc<Call>,
    item: usize,
    /// Earlier waiting calls for the same lease, with its position in each.
    earlier: Vec<(Arc<Call>, usize)>,
    pub(super) granted: Option<GrantedLease>,
}

impl Member {
    pub(super) fn new(request: LeaseRequest, call: Arc<Call>, item: usize) -> Self {
        Self { request, call, item, earlier: Vec::new(), granted: None }
    }

    pub(super) fn decide(&self, placed: PlaceResult) {
        self.earlier.iter().for_each(|(call, item)| call.decide(*item, placed.clone()));
        self.call.decide(self.item, placed);
    }

    /// Takes over earlier calls for the same lease, which receive the same result.
    fn take_over(&mut self, mut before: Self) {
        self.earlier.append(&mut before.earlier);
        self.earlier.push((before.call, before.item));
        self.earlier.retain(|(call, _)| !call.is_disconnected());
    }

    fn is_disconnected(&self) -> bool {
        self.call.is_disconnected() && self.earlier.iter().all(|(call, _)| call.is_disconnected())
    }

    /// Returns the demand, restricted to the worker of its owner.
    fn demand(&self) -> Arc<Demand> {
        match self.request.owner_worker {
            Some(worker) => {
                Arc::new(Demand { only: Some(OnlyWorker::tied(worker)), ..(*self.request.demand).clone() })
            }
            None => self.request.demand.clone(),
        }
    }
}

/// Leases that are granted together or not at all.
#[derive(Debug)]
pub(super) struct LeaseGroup {
    pub(super) members: Vec<Member>,
    pub(super) priority: i64,
    pub(super) since: Timestamp,
    pub(super) sequence: Uuid,
    /// End of the waiting time.
    until: Instant,
}

impl LeaseGroup {
    /// Returns `None` if there are no members.
    pub(super) fn new(members: Vec<Member>, now: Timestamp) -> Option<Self> {
        let wait = members.iter().map(|member| member.request.wait).max()?;
        let priority = members.iter().map(|member| member.request.priority).max()?;
        let until = Instant::now() + wait;
        let mut leases = Self { members, priority, since: now, sequence: Uuid::nil(), until };
        leases.call(Uuid::now_v7());
        Some(leases)
    }

    /// Sets the id of the group in the queue.
    fn call(&mut self, sequence: Uuid) {
        self.sequence = sequence;
        for member in &mut self.members {
            Arc::make_mut(&mut member.request.demand).waits_as = sequence;
        }
    }

    /// Returns the id in the queue. No workload has this id.
    pub(super) fn id(&self) -> Uuid {
        self.sequence
    }

    /// Returns whether `other` requests the same leases.
    fn requests_same(&self, other: &Self) -> bool {
        self.members.len() == other.members.len()
            && self.members.iter().zip(&other.members).all(|(one, other)| {
                let (one, other) = (&one.request, &other.request);
                one.lease == other.lease
                    && one.demand.kind == other.demand.kind
                    && one.request == other.request
                    && one.demand.shape.team == other.demand.shape.team
            })
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.members.iter().map(|member| member.request.lease)
    }

    /// Returns whether all callers have disconnected.
    pub(super) fn is_disconnected(&self) -> bool {
        self.members.iter().all(Member::is_disconnected)
    }

    /// Replaces another group that requests the same leases.
    fn take_over(&mut self, other: Self) {
        self.since = other.since;
        self.call(other.sequence);
        self.members.iter_mut().zip(other.members).for_each(|(member, before)| member.take_over(before));
    }

    /// Sets the workers of owners.
    pub(super) fn set_owner_workers(&mut self, kept: &HashMap<LeaseId, WorkerId>) {
        for member in &mut self.members {
            if let Some(worker) = kept.get(&member.request.lease) {
                member.request.owner_worker = Some(*worker);
            }
        }
    }

    /// Converts the group to a queue entry.
    pub(super) fn waiting(&self) -> Option<WaitingRequest> {
        let (first, others) = self.members.split_first()?;
        Some(WaitingRequest {
            id: self.id(),
            is_elsewhere: false,
            others: others.iter().map(Member::demand).collect(),
            sequence: self.sequence,
            priority: self.priority,
            since: self.since,
            demand: first.demand(),
            locations: first.request.locations.clone(),
            must_start: false,
            reported: Arc::default(),
            traceparent: String::new(),
            spec_bytes: None,
        })
    }
}

/// The waiting calls, by their id in the queue.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: HashMap<Uuid, LeaseGroup>,
    /// The waiting call of each lease.
    by_lease: HashMap<LeaseId, Uuid>,
    ends: BTreeSet<(Instant, Uuid)>,
    /// Calls that other replicas know.
    published: HashSet<Uuid>,
    /// Known calls that may have ended.
    taken: Vec<Uuid>,
}

impl Waiters {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the waiting call with this id.
    pub(super) fn get(&self, id: Uuid) -> Option<&LeaseGroup> {
        self.waiting.get(&id)
    }

    /// Returns whether a call with this id waits.
    pub(super) fn contains(&self, id: Uuid) -> bool {
        self.waiting.contains_key(&id)
    }

    /// Returns whether a call for this lease waits.
    #[cfg(test)]
    pub(super) fn waits(&self, lease: LeaseId) -> bool {
        self.by_lease.contains_key(&lease)
    }

    /// Adds a waiting call. Returns it if its callers have disconnected, its time is over, or too
    /// many calls wait.
    pub(super) fn put(&mut self, leases: LeaseGroup) -> Result<(), LeaseGroup> {
        if leases.until <= Instant::now() || leases.is_disconnected() || self.waiting.len() >= MAX_CALLS {
            return Err(leases);
        }
        self.ends.insert((leases.until, leases.id()));
        self.by_lease.extend(leases.leases().map(|lease| (lease, leases.id())));
        self.waiting.insert(leases.id(), leases);
        Ok(())
    }

    pub(super) fn take(&mut self, id: Uuid) -> Option<LeaseGroup> {
        let leases = self.waiting.remove(&id)?;
        if self.published.contains(&id) {
            self.taken.push(id);
        }
        self.ends.remove(&(leases.until, id));
        for lease in leases.leases() {
            self.by_lease.remove(&lease);
        }
        Some(leases)
    }

    /// Returns the ids of waiting calls.
    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.waiting.keys().copied()
    }

    /// Marks all waiting calls as known to other replicas.
    pub(super) fn mark_published(&mut self) {
        self.published = self.waiting.keys().copied().collect();
    }

    /// Takes the calls that other replicas know and that no longer wait.
    pub(super) fn take_withdrawn(&mut self) -> Vec<Uuid> {
        let mut over = std::mem::take(&mut self.taken);
        over.retain(|id| !self.waiting.contains_key(id) && self.published.remove(id));
        over
    }

    /// Returns the next end of a waiting time.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.first().map(|(at, _)| *at)
    }

    /// Takes the calls whose waiting time is over.
    pub(super) fn take_ended(&mut self, now: Instant) -> Vec<LeaseGroup> {
        let mut ended = Vec::new();
        while let Some((_, id)) = self.ends.first().copied().filter(|(at, _)| *at <= now) {
            let Some(leases) = self.take(id) else { break };
            ended.push(leases);
        }
        ended
    }

    /// Returns the calls whose callers have disconnected.
    pub(super) fn disconnected(&self) -> Vec<Uuid> {
        self.waiting.iter().filter(|(_, leases)| leases.is_disconnected()).map(|(id, _)| *id).collect()
    }

    /// Lets `leases` replace a waiting call for the same leases. [`WaitState::Conflict`]: one of
    /// the ids waits in a different call.
    pub(super) fn replace(&mut self, leases: &mut LeaseGroup) -> WaitState {
        let Some(id) = leases.leases().find_map(|lease| self.by_lease.get(&lease).copied()) else {
            return WaitState::New;
        };
        match self.take(id) {
            Some(old) if old.requests_same(leases) => {
                let id = old.id();
                leases.take_over(old);
                WaitState::Replaced(id)
            }
            Some(old) => {
                // The call waited a moment ago, so there is room for it.
                _ = self.put(old);
                WaitState::Conflict
            }
            None => WaitState::New,
        }
    }
}

/// Whether requested leases wait already.
#[derive(Debug)]
pub(super) enum WaitState {
    New,
    /// The id of the replaced call in the queue.
    Replaced(Uuid),
    Conflict,
}
