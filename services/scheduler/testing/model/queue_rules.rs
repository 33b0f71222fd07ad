//! Whose turn it is when there is room: the higher priority is first, then the team that holds the fewest slots for its weight, then who came first.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use domain::{LeaseId, WorkloadId};

use super::calls::Waiting;
use super::fixtures::{self, Asks};
use super::oracle::Came;
use super::state::{Minutes, Says, State};
use crate::db::entity::lease::State as LeaseState;
use crate::db::entity::workload::State as Progress;

/// Somebody who waits.
#[derive(Debug, Clone)]
enum Who {
    Workload(WorkloadId),
    Call(Box<Waiting>),
}

/// The slots that each team holds.
pub(super) type Held = BTreeMap<String, u64>;

impl State {
    pub(super) fn held_by_teams(&self) -> Held {
        let mut held = Held::new();
        let live = self.leases.values().filter(|lease| lease.is_live() && lease.kind.takes_a_slot());
        live.for_each(|lease| *held.entry(lease.team.clone()).or_default() += 1);
        held
    }

    /// Workloads that wait.
    pub(super) fn pending(&self) -> Vec<WorkloadId> {
        let pending = self.workloads.iter().filter(|(_, one)| one.state == Progress::Pending);
        pending.map(|(id, _)| *id).collect()
    }

    /// All those that wait where a step was done, but those whose callers have gone.
    fn all_that_wait(&self, came: &Came<'_>) -> Vec<Who> {
        let calls = self.waiting.iter().filter(|known| came.by.contains(&known.replica) && !known.is_left());
        let calls = calls.map(|known| Who::Call(Box::new(known.clone())));
        self.pending().into_iter().map(Who::Workload).chain(calls).collect()
    }

    fn is_granted(&self, who: &Who, after: &Self) -> bool {
        match who {
            Who::Workload(id) => after.workloads[id].lease.is_some(),
            Who::Call(waiting) => {
                let is_new = |id| !self.leases.contains_key(&id) && after.leases.contains_key(&id);
                waiting.call.leases().all(is_new)
            }
        }
    }

    fn asks_of_who(&self, who: &Who) -> Vec<Asks> {
        match who {
            Who::Workload(id) => vec![self.asks(*id)],
            Who::Call(waiting) => {
                waiting.call.asks.iter().map(|ask| self.asks_of_waiting(waiting, *ask)).collect()
            }
        }
    }

    /// Notes what was granted to who waited.
    fn take(&mut self, who: &Who, after: &Self, now: Minutes) {
        match who {
            Who::Workload(id) => self.assign(*id, after, now),
            Who::Call(waiting) => self.drive_all(waiting, after, now),
        }
    }

    /// Whether nothing but its turn and the workers decides what becomes of it.
    fn is_decided_by_turns(&self, who: &Who) -> bool {
        match who {
            Who::Workload(_) => true,
            Who::Call(waiting) => !waiting.was_killed && self.is_plain(waiting),
        }
    }

    /// Whether it was planned for nobody: of a group one found nothing.
    fn found_nothing(&self, who: &Who, came: &Came<'_>) -> bool {
        let Who::Call(waiting) = who else { return false };
        let may_be_decided = |id: LeaseId| {
            let is_owned = waiting.call.near.is_none() && !fixtures::owner_of_lease(id).is_empty();
            !is_owned && !self.leases.contains_key(&id) && !self.is_workload(id)
        };
        waiting.call.together
            && !waiting.was_killed
            && waiting.call.leases().all(may_be_decided)
            && !self.is_granted(who, came.after)
    }

    /// Lower is earlier.
    fn rank(&self, who: &Who, held: &Held) -> (Reverse<i64>, u64, usize) {
        let (priority, team, arrived) = match who {
            Who::Workload(id) => {
                (fixtures::priority_of_workload(*id), fixtures::asks_of_workload(*id).team, self.arrived[id])
            }
            Who::Call(waiting) => {
                // Of several that are asked for together the first one's counts.
                let (id, kind) = waiting.call.asks[0];
                let arrived = waiting.arrived.unwrap_or_default();
                (waiting.priority(), fixtures::asks_of_lease(id, kind).team, arrived)
            }
        };
        let held = held.get(team).copied().unwrap_or_default();
        (Reverse(priority), held * 1_000_000 / u64::from(fixtures::weight(team)), arrived)
    }

    /// Those that wait have their turns, as far as it can be told who gets what. `held`: as it was counted before. Answers whether it could.
    pub(super) fn have_turns(&mut self, mut held: Held, came: &Came<'_>) -> bool {
        let mut waiting = self.all_that_wait(came);
        while let Some(next) = (0..waiting.len()).min_by_key(|at| self.rank(&waiting[*at], &held)) {
            let who = waiting.swap_remove(next);
            if self.found_nothing(&who, came) {
                continue;
            }
            if !self.is_decided_by_turns(&who) {
                return false;
            }
            let asks = self.asks_of_who(&who).remove(0);
            let willing = self.willing(&asks, came.now);
            if willing.is_empty() {
                continue;
            }
            let is_granted = |who: &&Who| self.is_granted(who, came.after);
            assert!(
                is_granted(&&who),
                "it is the turn of {who:?} {:?}, and {willing:?} would take it, before that of {:#?}, where teams hold {held:?}",
                self.rank(&who, &held),
                waiting.iter().filter(is_granted).map(|who| (self.rank(who, &held), who)).collect::<Vec<_>>()
            );
            let id = match &who {
                Who::Workload(id) => came.after.workloads[id].lease.expect("it is assigned"),
                Who::Call(waiting) => waiting.call.asks[0].0,
            };
            let worker = came.after.leases[&id].worker;
            assert!(willing.contains(&worker), "of {willing:?} {who:?} got none");
            if asks.takes_a_slot {
                *held.entry(asks.team.to_owned()).or_default() += 1;
            }
            self.take(&who, came.after, came.now);
        }
        true
    }

    /// Those that wait have their turns, until nobody is left whom a worker would take.
    pub(super) fn dispatch(&mut self, came: &Came<'_>) {
        let now = came.now;
        self.give_up_hopeless(now);
        let before = self.pending();
        let is_sure = !came.was_killed() && self.have_turns(self.held_by_teams(), came);
        let mut some_given_back = self.give_all_back(came);
        if some_given_back || !is_sure {
            some_given_back |= self.hand_on(came);
        }
        if some_given_back {
            return;
        }
        let placed: Vec<_> =
            before.iter().copied().filter(|id| came.after.workloads[id].lease.is_some()).collect();
        for who in self.all_that_wait(came) {
            let asks = self.asks_of_who(&who).remove(0);
            if self.is_decided_by_turns(&who) {
                let willing = self.willing(&asks, now);
                assert!(willing.is_empty(), "{who:?} waits, and {willing:?} would take it: {asks:?}");
            }
            let Who::Workload(id) = who else { continue };
            // Of those that ask for the same and could be anywhere the more urgent come first.
            let passed = placed.iter().find(|other| {
                let others = Asks { failed_on: vec![], ..self.asks(**other) };
                asks.failed_on.is_empty()
                    && others == asks
                    && fixtures::priority_of_workload(**other) < fixtures::priority_of_workload(id)
            });
            assert_eq!(passed, None, "it was before {id}, which is more urgent");
        }
    }

    /// Of those that waited and were granted something, what cannot be pinned is given back.
    pub(super) fn give_all_back(&mut self, came: &Came<'_>) -> bool {
        let mut some = false;
        for waiting in self.waiting.clone().iter().filter(|known| came.by.contains(&known.replica)) {
            some |= self.give_back(&waiting.call, true, came.after, came.now);
        }
        some
    }

    /// Something was given back: those that are known to wait may have what is free. What of that cannot be pinned is given back in turn. Answers
    /// whether something was.
    pub(super) fn hand_on(&mut self, came: &Came<'_>) -> bool {
        let (after, now) = (came.after, came.now);
        let mut some_given_back = false;
        loop {
            let mut granted: Vec<_> =
                self.all_that_wait(came).into_iter().filter(|who| self.is_granted(who, after)).collect();
            // What goes on at once is first.
            granted.sort_by_key(|who| match who {
                Who::Workload(_) => true,
                Who::Call(waiting) => {
                    waiting.call.leases().all(|id| after.leases[&id].state != LeaseState::Ended)
                }
            });
            let fits = |who: &&Who| {
                let says = |asks: &Asks, id| {
                    let name = self.name(after.leases[&id].worker);
                    name.is_some_and(|name| self.says(name, asks, now) == Says::Yes)
                };
                let asks = self.asks_of_who(who);
                match who {
                    Who::Workload(id) => after.workloads[id].lease.is_some_and(|id| says(&asks[0], id)),
                    Who::Call(waiting) => {
                        waiting.call.leases().zip(&asks).next().is_some_and(|(id, asks)| says(asks, id))
                    }
                }
            };
            let Some(who) = granted.iter().find(fits).or(granted.first()).cloned() else {
                return some_given_back;
            };
            self.take(&who, after, now);
            if let Who::Call(waiting) = &who {
                some_given_back |= self.give_back(&waiting.call, true, after, now);
            }
        }
    }
}
