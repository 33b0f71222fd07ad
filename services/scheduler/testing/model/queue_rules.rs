//! The order of waiting requests: priority, then the team's slots relative to its weight, then age.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use domain::{LeaseId, WorkloadId};

use super::calls::WaitingCall;
use super::fixtures::{self, Requirements};
use super::oracle::StepResult;
use super::state::{Minutes, State, Verdict};
use crate::db::entity::lease::{Kind, State as LeaseState};
use crate::db::entity::workload::State as Progress;

/// A waiting request.
#[derive(Debug, Clone)]
enum WaitingRequest {
    Workload(WorkloadId),
    Call(Box<WaitingCall>),
}

/// Slots in use, by team.
pub(super) type SlotsInUse = BTreeMap<String, u64>;

impl State {
    pub(super) fn held_by_teams(&self) -> SlotsInUse {
        let mut slots = SlotsInUse::new();
        let live = self.leases.values().filter(|lease| lease.is_live() && lease.kind.takes_a_slot());
        live.for_each(|lease| *slots.entry(lease.team.clone()).or_default() += 1);
        slots
    }

    /// Returns the waiting workloads.
    pub(super) fn pending(&self) -> Vec<WorkloadId> {
        let pending = self.workloads.iter().filter(|(_, one)| one.state == Progress::Pending);
        pending.map(|(id, _)| *id).collect()
    }

    /// Returns the requests that wait at the replicas of the step, without those of disconnected
    /// callers.
    fn waiting_requests(&self, step_result: &StepResult<'_>) -> Vec<WaitingRequest> {
        let calls = self
            .waiting
            .iter()
            .filter(|known| step_result.by.contains(&known.replica) && !known.is_abandoned());
        let calls = calls.map(|known| WaitingRequest::Call(Box::new(known.clone())));
        self.pending().into_iter().map(WaitingRequest::Workload).chain(calls).collect()
    }

    fn is_granted(&self, request: &WaitingRequest, after: &Self) -> bool {
        match request {
            WaitingRequest::Workload(id) => after.workloads[id].lease.is_some(),
            WaitingRequest::Call(waiting) => {
                // Other calls with the same ids may wait at other replicas.
                let is_of_call = |(id, kind): &(LeaseId, Kind)| {
                    after.leases.get(id).is_some_and(|lease| lease.kind == *kind)
                        && after.near[id] == waiting.call.near
                };
                let is_new = |id| !self.leases.contains_key(&id);
                waiting.call.leases().all(is_new) && waiting.call.items.iter().all(is_of_call)
            }
        }
    }

    fn requirements_of_request(&self, request: &WaitingRequest) -> Vec<Requirements> {
        match request {
            WaitingRequest::Workload(id) => vec![self.requirements(*id)],
            WaitingRequest::Call(waiting) => {
                waiting.call.items.iter().map(|item| self.requirements_of_waiting(waiting, *item)).collect()
            }
        }
    }

    /// Records the grants of a request.
    fn take(&mut self, request: &WaitingRequest, after: &Self, now: Minutes) {
        match request {
            WaitingRequest::Workload(id) => self.assign(*id, after, now),
            WaitingRequest::Call(waiting) => self.drive_all(waiting, after, now),
        }
    }

    /// Returns whether only the queue and the workers decide the request.
    fn is_decided_by_queue(&self, request: &WaitingRequest) -> bool {
        match request {
            WaitingRequest::Workload(_) => true,
            WaitingRequest::Call(waiting) => !waiting.was_killed && self.is_plain(waiting),
        }
    }

    /// Returns whether a group found no worker for one of its leases.
    fn found_no_worker(&self, request: &WaitingRequest, step_result: &StepResult<'_>) -> bool {
        let WaitingRequest::Call(waiting) = request else { return false };
        let may_be_decided = |id: LeaseId| {
            let is_owned = waiting.call.near.is_none() && !fixtures::owner_of_lease(id).is_empty();
            !is_owned && !self.leases.contains_key(&id) && !self.is_workload(id)
        };
        waiting.call.together
            && !waiting.was_killed
            && waiting.call.leases().all(may_be_decided)
            && !self.is_granted(request, step_result.after)
    }

    /// Lower is earlier.
    fn rank(&self, request: &WaitingRequest, slots: &SlotsInUse) -> (Reverse<i64>, u64, usize) {
        let (priority, team, arrived) = match request {
            WaitingRequest::Workload(id) => (
                fixtures::priority_of_workload(*id),
                fixtures::requirements_of_workload(*id).team,
                self.arrived[id],
            ),
            WaitingRequest::Call(waiting) => {
                // For a group, the first lease counts.
                let (id, kind) = waiting.call.items[0];
                let arrived = waiting.arrived.unwrap_or_default();
                (waiting.priority(), fixtures::requirements_of_lease(id, kind).team, arrived)
            }
        };
        let slots = slots.get(team).copied().unwrap_or_default();
        (Reverse(priority), slots * 1_000_000 / u64::from(fixtures::weight(team)), arrived)
    }

    /// Serves waiting requests, as far as the result is predictable. `slots`: slots in use before.
    /// Returns whether everything was predictable.
    pub(super) fn serve_queue(&mut self, mut slots: SlotsInUse, step_result: &StepResult<'_>) -> bool {
        let mut waiting = self.waiting_requests(step_result);
        while let Some(next) = (0..waiting.len()).min_by_key(|at| self.rank(&waiting[*at], &slots)) {
            let request = waiting.swap_remove(next);
            if self.found_no_worker(&request, step_result) {
                continue;
            }
            if !self.is_decided_by_queue(&request) {
                return false;
            }
            let requirements = self.requirements_of_request(&request).remove(0);
            let willing = self.willing(&requirements, step_result.now);
            if willing.is_empty() {
                continue;
            }
            let is_granted = |request: &&WaitingRequest| self.is_granted(request, step_result.after);
            assert!(
                is_granted(&&request),
                "{request:?} {:?} is next and {willing:?} would take it, but these were granted: {:#?}; slots in use: {slots:?}",
                self.rank(&request, &slots),
                waiting
                    .iter()
                    .filter(is_granted)
                    .map(|request| (self.rank(request, &slots), request))
                    .collect::<Vec<_>>()
            );
            let id = match &request {
                WaitingRequest::Workload(id) => {
                    step_result.after.workloads[id].lease.expect("an assigned workload")
                }
                WaitingRequest::Call(waiting) => waiting.call.items[0].0,
            };
            let worker = step_result.after.leases[&id].worker;
            assert!(willing.contains(&worker), "{request:?} got none of {willing:?}");
            if requirements.takes_a_slot {
                *slots.entry(requirements.team.to_owned()).or_default() += 1;
            }
            self.take(&request, step_result.after, step_result.now);
        }
        true
    }

    /// Serves waiting requests until no worker takes another.
    pub(super) fn dispatch(&mut self, step_result: &StepResult<'_>) {
        let now = step_result.now;
        self.give_up_hopeless(now);
        let before = self.pending();
        let is_sure = !step_result.was_killed() && self.serve_queue(self.held_by_teams(), step_result);
        let mut some_released = self.release_all_unpinned(step_result);
        if some_released || !is_sure {
            some_released |= self.grant_freed(step_result);
        }
        if some_released {
            return;
        }
        let placed: Vec<_> =
            before.iter().copied().filter(|id| step_result.after.workloads[id].lease.is_some()).collect();
        for request in self.waiting_requests(step_result) {
            let requirements = self.requirements_of_request(&request).remove(0);
            if self.is_decided_by_queue(&request) {
                let willing = self.willing(&requirements, now);
                assert!(
                    willing.is_empty(),
                    "{request:?} waits although {willing:?} would take it: {requirements:?}"
                );
            }
            let WaitingRequest::Workload(id) = request else { continue };
            // Of requests with the same requirements, the more urgent are placed first.
            let passed = placed.iter().find(|other| {
                let others = Requirements { failed_on: vec![], ..self.requirements(**other) };
                requirements.failed_on.is_empty()
                    && others == requirements
                    && fixtures::priority_of_workload(**other) < fixtures::priority_of_workload(id)
            });
            assert_eq!(passed, None, "placed before {id}, which is more urgent");
        }
    }

    /// Releases leases of granted waiting calls that cannot be pinned.
    pub(super) fn release_all_unpinned(&mut self, step_result: &StepResult<'_>) -> bool {
        let mut some = false;
        for waiting in self.waiting.clone().iter().filter(|known| step_result.by.contains(&known.replica)) {
            some |= self.release_unpinned(&waiting.call, true, step_result.after, step_result.now);
        }
        some
    }

    /// After a release, known waiting requests may use the free room. Leases that cannot be pinned
    /// are released in turn. Returns whether there were any.
    pub(super) fn grant_freed(&mut self, step_result: &StepResult<'_>) -> bool {
        let (after, now) = (step_result.after, step_result.now);
        let mut some_released = false;
        loop {
            let mut granted: Vec<_> = self
                .waiting_requests(step_result)
                .into_iter()
                .filter(|request| self.is_granted(request, after))
                .collect();
            // Leases that continue come first.
            granted.sort_by_key(|request| match request {
                WaitingRequest::Workload(_) => true,
                WaitingRequest::Call(waiting) => {
                    waiting.call.leases().all(|id| after.leases[&id].state != LeaseState::Ended)
                }
            });
            let fits = |request: &&WaitingRequest| {
                let takes = |requirements: &Requirements, id| {
                    let name = self.name(after.leases[&id].worker);
                    name.is_some_and(|name| self.verdict(name, requirements, now) == Verdict::Yes)
                };
                let requirements = self.requirements_of_request(request);
                match request {
                    WaitingRequest::Workload(id) => {
                        after.workloads[id].lease.is_some_and(|id| takes(&requirements[0], id))
                    }
                    WaitingRequest::Call(waiting) => waiting
                        .call
                        .leases()
                        .zip(&requirements)
                        .next()
                        .is_some_and(|(id, requirements)| takes(requirements, id)),
                }
            };
            let Some(request) = granted.iter().find(fits).or(granted.first()).cloned() else {
                return some_released;
            };
            self.take(&request, after, now);
            if let WaitingRequest::Call(waiting) = &request {
                some_released |= self.release_unpinned(&waiting.call, true, after, now);
            }
        }
    }
}
