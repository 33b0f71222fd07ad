//! The model of calls for driven leases: grants, waiting calls and answers.

use std::collections::BTreeSet;

use domain::{LeaseId, WorkerId, WorkloadId};

use super::fixtures::{self, Requirements};
use super::operations::{Call, Step};
use super::oracle::StepResult;
use super::state::{Lease, Minutes, State};
use crate::db::entity::lease::{Kind, State as LeaseState};

/// A call that waits at one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WaitingCall {
    pub(super) call: Call,
    pub(super) replica: usize,
    /// The only allowed worker, because of `same_worker_as_lease_id` at the time of the call.
    pub(super) only: Option<WorkerId>,
    /// The worker of the first lease's owner at the time of the call.
    pub(super) owner_worker: Option<WorkerId>,
    /// Order of arrival. `None`: repeated when it was unknown whether the call still waited.
    pub(super) arrived: Option<usize>,
    /// Whether the caller has disconnected.
    has_gone: bool,
    /// Earlier waiting calls for the same leases.
    earlier: BTreeSet<usize>,
    /// Whether the replica was killed in this step.
    pub(super) was_killed: bool,
}

impl WaitingCall {
    /// Returns whether all callers have disconnected. The call stays in the queue until the next
    /// check.
    pub(super) fn is_abandoned(&self) -> bool {
        self.has_gone && self.earlier.is_empty()
    }

    /// Returns the callers that receive the answer.
    pub(super) fn callers(&self) -> BTreeSet<usize> {
        let latest = (!self.has_gone).then_some(self.call.number);
        self.earlier.iter().copied().chain(latest).collect()
    }

    fn is_there(&self, replica: usize) -> bool {
        self.replica == replica && !self.was_killed
    }

    fn shares_an_id(&self, call: &Call) -> bool {
        self.call.leases().any(|id| call.leases().any(|other| other == id))
    }

    pub(super) fn priority(&self) -> i64 {
        self.call.priority()
    }
}

/// Returns the requirements of a lease, with the worker of its owner or of
/// `same_worker_as_lease_id`.
fn requirements_of(state: &State, id: LeaseId, kind: Kind, only: Option<WorkerId>) -> Requirements {
    let requirements = fixtures::requirements_of_lease(id, kind);
    let only = only.or_else(|| state.worker_of_owner(requirements.team, fixtures::owner_of_lease(id)));
    Requirements { only, ..requirements }
}

/// Pins of another team's artifact are rejected.
fn cannot_be_pinned(id: LeaseId) -> bool {
    fixtures::lease_has_input(id) && fixtures::requirements_of_lease(id, Kind::Task).team != fixtures::TEAM
}

impl State {
    /// Returns the present requirements of a lease of a waiting call.
    pub(super) fn requirements_of_waiting(
        &self,
        waiting: &WaitingCall,
        (id, kind): (LeaseId, Kind),
    ) -> Requirements {
        match waiting.call.near {
            Some(_) => Requirements { only: waiting.only, ..fixtures::requirements_of_lease(id, kind) },
            None => requirements_of(self, id, kind, None),
        }
    }

    /// Returns the affinity row of an owner, whether or not that worker takes work.
    pub(super) fn row_of_home(&self, id: LeaseId) -> Option<WorkerId> {
        let key = (
            fixtures::requirements_of_lease(id, Kind::Task).team.to_owned(),
            fixtures::owner_of_lease(id).to_owned(),
        );
        self.owners.get(&key).map(|(worker, _)| *worker)
    }

    /// Records a granted driven lease, which its worker must allow.
    fn drive(
        &mut self,
        (id, kind): (LeaseId, Kind),
        call: &Call,
        requirements: &Requirements,
        after: &Self,
        now: Minutes,
    ) {
        assert!(!self.is_workload(id), "{id} belongs to a workload");
        let worker = self.grant(id, kind, requirements, None, after, now);
        let owner = if call.near.is_some() { "" } else { fixtures::owner_of_lease(id) };
        if !owner.is_empty() {
            self.owners.insert((requirements.team.to_owned(), owner.to_owned()), (worker, now));
        }
        self.leases.get_mut(&id).expect("an existing lease").owner = owner.to_owned();
        self.near.insert(id, call.near);
    }

    /// Records all leases of a granted waiting call.
    pub(super) fn drive_all(&mut self, waiting: &WaitingCall, after: &Self, now: Minutes) {
        for item in &waiting.call.items {
            let requirements = self.requirements_of_waiting(waiting, *item);
            self.drive(*item, &waiting.call, &requirements, after, now);
        }
    }

    /// Releases leases that cannot be pinned, with their group. Returns whether there were any.
    pub(super) fn release_unpinned(
        &mut self,
        call: &Call,
        may_be_settled: bool,
        after: &Self,
        now: Minutes,
    ) -> bool {
        let mut some = false;
        for (id, _) in &call.items {
            let has_input = match call.together {
                true => call.leases().any(fixtures::lease_has_input),
                false => fixtures::lease_has_input(*id),
            };
            let may_be_released = is_released_again(call, *id) || (may_be_settled && has_input);
            let is_granted = self.leases.get(id).is_some_and(Lease::is_granted);
            if is_granted && may_be_released && !after.leases[id].is_granted() {
                self.release_driven(*id, now);
                some = true;
            }
        }
        some
    }

    /// Returns whether the lease is live and belongs to such a call.
    fn is_theirs(&self, (id, kind): (LeaseId, Kind), near: Option<LeaseId>) -> bool {
        self.leases.get(&id).is_some_and(|lease| {
            let is_live = lease.state == LeaseState::Granted && lease.workload.is_none();
            is_live && lease.kind == kind && self.near.get(&id).is_none_or(|granted| *granted == near)
        })
    }

    /// Returns whether only the queue and the workers decide the call.
    pub(super) fn is_plain(&self, waiting: &WaitingCall) -> bool {
        let id = waiting.call.items[0].0;
        // Another replica may have granted the lease, its id may be in use, or its owner may have
        // moved.
        waiting.call.items.len() == 1
            && waiting.arrived.is_some()
            && !self.leases.contains_key(&id)
            && !self.is_workload(id)
            && (waiting.call.near.is_some() || waiting.owner_worker == self.row_of_home(id))
    }

    pub(super) fn place(&mut self, call: &Call, is_fresh: bool, step_result: &StepResult<'_>) {
        let (after, now, known) = (step_result.after, step_result.now, step_result.known);
        let reply = step_result.answer.map(|answer| &answer.results[..]);
        let Call { items, together, near, .. } = call;
        let was_known = items.iter().any(|(id, _)| {
            known.is_driven(*id) || known.submitted.contains(&WorkloadId::from_uuid(id.uuid()))
        });
        let may_be_settled = was_known || step_result.was_killed();
        let is_new = |id: &LeaseId| !self.leases.contains_key(id) && after.leases.contains_key(id);
        let granted: BTreeSet<_> = call.leases().filter(is_new).collect();
        let is_whole = granted.is_empty() || granted.len() == items.len();
        assert!(!together || is_whole, "a group was granted partly");
        let before = self.clone();
        if let Some(near) = near {
            let team = fixtures::requirements_of_lease(items[0].0, items[0].1).team;
            if before.leases.get(near).is_none_or(|near| !near.is_live() || near.team != team) {
                assert!(
                    granted.is_empty() && reply.is_none_or(|reply| reply == ["NoSuchLease"]),
                    "{reply:?}"
                );
                return;
            }
        }
        let only = near.map(|near| before.leases[&near].worker);
        // A waiting call with one of the ids is replaced, or causes a conflict.
        let (mut replaced, mut in_its_way) = (None, BTreeSet::new());
        let units: Vec<_> = if *together { vec![&items[..]] } else { items.chunks(1).collect() };
        for unit in units.into_iter().filter(|_| reply.is_some()) {
            let unit = Call { items: unit.to_vec(), ..call.clone() };
            let there =
                |known: &WaitingCall| known.is_there(step_result.replica()) && known.shares_an_id(&unit);
            let Some(there) = self.waiting.iter().position(there) else { continue };
            let old = &self.waiting[there];
            let is_refused = || {
                let replies = items.iter().zip(reply.into_iter().flatten());
                replies
                    .filter(|((id, _), _)| unit.leases().any(|of_unit| of_unit == *id))
                    .all(|(_, reply)| reply == "Exists")
            };
            if old.call.requests_same_leases(&unit) {
                replaced = Some(self.waiting.remove(there));
            } else if is_refused() {
                in_its_way.extend(unit.leases());
            } else {
                // The disconnect of its caller may have been noticed.
                assert!(old.is_abandoned(), "{old:?} waits with one of the ids");
                self.waiting.remove(there);
            }
        }
        for item in items.iter().filter(|(id, _)| granted.contains(id)) {
            let requirements = requirements_of(self, item.0, item.1, only);
            self.drive(*item, call, &requirements, after, now);
        }
        if let (Some(best), false) =
            (step_result.answer.and_then(|answer| answer.best.as_ref()), step_result.was_killed())
        {
            for id in &granted {
                let worker = after.leases[id].worker;
                assert!(best.contains(&worker), "{id} got {worker}, and {best:?} are the best for {call:?}");
            }
        }
        // All leases existed during the decision.
        let decided = self.clone();
        let was_released = self.release_unpinned(call, may_be_settled, after, now);
        for id in granted.iter().filter(|id| is_released_again(call, **id)) {
            assert!(reply.is_none() || !after.leases[id].is_live(), "{id} is not pinned");
        }
        if was_released {
            self.grant_freed(step_result);
        }
        let Some(reply) = reply else { return };
        let is_hopeless = |(id, kind): &(LeaseId, Kind)| {
            // A granted lease of the call may have set the worker of an owner.
            [&before, &decided]
                .iter()
                .any(|state| state.is_hopeless(&requirements_of(state, *id, *kind, only), now))
        };
        // The queue of the replica is as of its last poll, before any release.
        let may_find_nobody = |(id, kind): &(LeaseId, Kind)| {
            let willing = decided.willing(&requirements_of(&decided, *id, *kind, only), now);
            let requirements = requirements_of(&before, *id, *kind, only);
            let is_behind =
                decided.is_awaited_by_lease(&requirements, fixtures::priority_of_lease(*id), step_result.by);
            assert!(*together || !is_fresh || is_behind || willing.is_empty(), "{willing:?} would take {id}");
        };
        if reply == ["Waits"] {
            assert!(call.wait > 0 && granted.is_empty(), "{call:?} must not wait");
            assert!(call.leases().all(|id| !before.leases.contains_key(&id)), "an existing lease");
            items.iter().for_each(may_find_nobody);
            let took_over = replaced.as_ref().map(|old| (old.arrived, old.is_abandoned()));
            self.arrivals += 1;
            let arrived = match took_over {
                Some((_, true)) => None,
                Some((arrived, false)) => arrived.or(Some(self.arrivals)),
                None => Some(self.arrivals),
            };
            let earlier = replaced.map(|old| old.callers()).unwrap_or_default();
            let owner_worker = self.row_of_home(items[0].0);
            let replica = step_result.replica();
            let call = call.clone();
            let (has_gone, was_killed) = (false, false);
            let waiting =
                WaitingCall { call, replica, only, owner_worker, arrived, has_gone, earlier, was_killed };
            self.waiting.push(waiting);
            return;
        }
        for (item, reply) in items.iter().zip(reply).filter(|((id, _), _)| !in_its_way.contains(id)) {
            let id = item.0;
            let is_theirs = self.is_theirs(*item, *near);
            match reply.as_str() {
                "Ok" => assert!(is_theirs, "{id} is not the lease of this call"),
                "Exists" if call.leases().any(|id| self.is_workload(id)) => {}
                "Exists" => {
                    // The rest of a group is not granted alone.
                    let of_group = *together && call.leases().any(|id| before.leases.contains_key(&id));
                    let was_there = (of_group || before.leases.contains_key(&id)) && !is_theirs;
                    let is_live =
                        self.leases.get(&id).is_some_and(|lease| lease.state == LeaseState::Granted);
                    assert!(was_there || (may_be_settled && !is_live), "{id} is free");
                }
                "NotPinned" => {
                    assert!(!self.leases.get(&id).is_some_and(Lease::is_granted), "{id} is pinned");
                }
                "AllWorkersBusy" => {
                    assert_eq!(call.wait, 0, "the call may wait");
                    assert!(!granted.contains(&id) && !before.leases.contains_key(&id), "{id} was granted");
                    may_find_nobody(item);
                }
                "NoCompatibleWorker" => {
                    assert!(!granted.contains(&id), "{id} was granted");
                    let some = if *together { items.iter().any(is_hopeless) } else { is_hopeless(item) };
                    assert!(some, "some worker could take {id}: {:#?}", before.workers);
                }
                // Without a poll, the worker may be unknown to the replica.
                "Undecided" => {
                    let driven = before.leases.get(&id).filter(|lease| lease.workload.is_none());
                    let is_live = driven.is_some_and(|lease| lease.state == LeaseState::Granted);
                    assert!(!is_fresh && is_live, "{id} can be decided");
                }
                other => panic!("{id}: {other}"),
            }
        }
    }

    /// Returns the replica at which a call waits.
    pub(super) fn replica_of(&self, number: usize) -> usize {
        let called = self.waiting.iter().find(|waiting| waiting.callers().contains(&number));
        called.expect("a waiting call").replica
    }

    /// Returns the replica at which a call with one of these ids waits.
    pub(super) fn where_it_waits(&self, call: &Call) -> Option<usize> {
        self.waiting.iter().find(|waiting| waiting.shares_an_id(call)).map(|waiting| waiting.replica)
    }

    /// Returns the replica at which a call waits whose lease another replica has granted.
    pub(super) fn waits_for_what_is_there(&self) -> Option<usize> {
        let is_there = |waiting: &&WaitingCall| waiting.call.leases().any(|id| self.leases.contains_key(&id));
        self.waiting.iter().find(is_there).map(|waiting| waiting.replica)
    }

    /// Disconnects a caller.
    pub(super) fn disconnect(&mut self, number: usize) {
        // Does nothing if the replica was killed before.
        for called in &mut self.waiting {
            called.has_gone |= called.call.number == number;
            called.earlier.remove(&number);
        }
    }

    /// Removes calls of disconnected callers from the queue of a replica.
    pub(super) fn drop_disconnected(&mut self, replica: usize) {
        self.waiting.retain(|waiting| !(waiting.is_abandoned() && waiting.is_there(replica)));
    }

    /// Checks the answers to waiting calls of the replica that took `step`.
    pub(super) fn answer_waiting(&mut self, step: &Step, before: &Self, step_result: &StepResult<'_>) {
        let Some(answer) = step_result.answer else { return };
        for (number, reply) in &answer.others {
            let by_number = |known: &&WaitingCall| known.callers().contains(number);
            // A replaced call no longer waits.
            let waiting = before.waiting.iter().find(by_number).expect("a waiting call").clone();
            self.waiting.retain(|known| !known.callers().contains(number));
            let may_be_settled = waiting.call.leases().any(fixtures::lease_has_input);
            let asks_again = |call: &Call| {
                let same = waiting.call.items.iter().all(|item| call.items.contains(item));
                same && call.near == waiting.call.near && call.number != *number
            };
            let replaces = matches!(step, Step::Place { call, .. } if asks_again(call));
            let is_over = matches!(step, Step::EndWaits { minutes, .. } if waiting.call.wait <= *minutes);
            for (item, reply) in waiting.call.items.iter().zip(reply) {
                let id = item.0;
                let is_theirs = self.is_theirs(*item, waiting.call.near);
                let is_there = |id| self.leases.contains_key(&id) || self.is_workload(id);
                match reply.as_str() {
                    "Ok" => assert!(is_theirs, "{id} is not the lease of this call"),
                    "Exists" => {
                        let some_are_there = waiting.call.leases().any(is_there) && !is_theirs;
                        assert!(some_are_there || may_be_settled, "{id} is free");
                    }
                    "NotPinned" => assert!(may_be_settled && !is_theirs, "{id} is pinned"),
                    // A repeat may have a shorter waiting time.
                    "AllWorkersBusy" => assert!(is_over || replaces, "{id} may still wait"),
                    "NoCompatibleWorker" => {
                        let could = waiting.call.items.iter().all(|item| {
                            !self.is_hopeless(&self.requirements_of_waiting(&waiting, *item), step_result.now)
                        });
                        assert!(is_over || !could || !self.is_plain(&waiting), "some worker could take {id}");
                    }
                    "Undecided" => assert!(replaces || is_theirs, "{id} was requested once"),
                    other => panic!("{id}: {other}"),
                }
            }
        }
        let there = self.waiting.iter().filter(|known| known.is_there(step_result.replica()));
        let numbers: BTreeSet<_> = there.clone().flat_map(WaitingCall::callers).collect();
        assert_eq!(answer.waiting, numbers, "waiting calls: {there:#?}", there = there.collect::<Vec<_>>());
        for waiting in self.waiting.iter().filter(|known| known.is_there(step_result.replica())) {
            if let Step::EndWaits { minutes, .. } = step {
                assert!(
                    waiting.is_abandoned() || waiting.call.wait > *minutes,
                    "the waiting time of {waiting:?} is over"
                );
            }
            if matches!(step, Step::Dispatch) && self.is_plain(waiting) {
                let is_hopeless = |item: &(LeaseId, Kind)| {
                    self.is_hopeless(&self.requirements_of_waiting(waiting, *item), step_result.now)
                };
                assert!(!waiting.call.items.iter().any(is_hopeless), "no worker could take {waiting:?}");
            }
        }
    }
}

/// Returns whether a lease of this call is released again.
fn is_released_again(call: &Call, id: LeaseId) -> bool {
    cannot_be_pinned(id) || (call.together && call.leases().any(cannot_be_pinned))
}
