//! Calls for driven leases: what is granted, who waits at which replica, and what is answered.

use std::collections::BTreeSet;

use domain::{LeaseId, WorkerId, WorkloadId};

use super::fixtures::{self, Asks};
use super::operations::{Call, Step};
use super::oracle::Came;
use super::state::{Lease, Minutes, State};
use crate::db::entity::lease::{EndedBy, Kind, State as LeaseState};

/// A call that waits in the queue of a replica, and nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) call: Call,
    pub(super) replica: usize,
    /// Where alone it may be, for the lease that it shall be near to was there when it was asked for.
    pub(super) only: Option<WorkerId>,
    /// Where the containers of the owner of its first were then.
    pub(super) kept_to: Option<WorkerId>,
    /// Who came later has a higher one. `None`: it came again when nobody can tell whether it waited still.
    pub(super) arrived: Option<usize>,
    /// Its caller has gone.
    has_gone: bool,
    /// Earlier calls for the same that wait still.
    earlier: BTreeSet<usize>,
    /// Its replica was killed in this step.
    pub(super) was_killed: bool,
}

impl Waiting {
    /// Whether everybody who asked for it has gone: it is in the queue until somebody looks.
    pub(super) fn is_left(&self) -> bool {
        self.has_gone && self.earlier.is_empty()
    }

    /// Those who hear what becomes of it.
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

/// What a lease asks for where its owner's containers are, or near to another.
fn asks_of(state: &State, id: LeaseId, kind: Kind, only: Option<WorkerId>) -> Asks {
    let asks = fixtures::asks_of_lease(id, kind);
    let only = only.or_else(|| state.home(asks.team, fixtures::owner_of_lease(id)));
    Asks { only, ..asks }
}

/// Another team's leases are refused for it.
fn cannot_be_pinned(id: LeaseId) -> bool {
    fixtures::lease_has_input(id) && fixtures::asks_of_lease(id, Kind::Task).team != fixtures::TEAM
}

impl State {
    /// What a lease of a call that waits asks for now.
    pub(super) fn asks_of_waiting(&self, waiting: &Waiting, (id, kind): (LeaseId, Kind)) -> Asks {
        match waiting.call.near {
            Some(_) => Asks { only: waiting.only, ..fixtures::asks_of_lease(id, kind) },
            None => asks_of(self, id, kind, None),
        }
    }

    /// The row that says where the containers of an owner are, whether or not that worker takes work.
    pub(super) fn row_of_home(&self, id: LeaseId) -> Option<WorkerId> {
        let key = (
            fixtures::asks_of_lease(id, Kind::Task).team.to_owned(),
            fixtures::owner_of_lease(id).to_owned(),
        );
        self.owners.get(&key).map(|(worker, _)| *worker)
    }

    /// Notes a driven lease that was granted, which must be one that its worker would grant.
    fn drive(&mut self, (id, kind): (LeaseId, Kind), call: &Call, asks: &Asks, after: &Self, now: Minutes) {
        assert!(!self.is_workload(id), "{id} is a workload's");
        let worker = self.grant(id, kind, asks, None, after, now);
        let owner = if call.near.is_some() { "" } else { fixtures::owner_of_lease(id) };
        if !owner.is_empty() {
            self.owners.insert((asks.team.to_owned(), owner.to_owned()), (worker, now));
        }
        self.leases.get_mut(&id).expect("it is there").owner = owner.to_owned();
        self.near.insert(id, call.near);
    }

    /// The same of all that a call asks for which waited.
    pub(super) fn drive_all(&mut self, waiting: &Waiting, after: &Self, now: Minutes) {
        for ask in &waiting.call.asks {
            let asks = self.asks_of_waiting(waiting, *ask);
            self.drive(*ask, &waiting.call, &asks, after, now);
        }
    }

    /// What cannot be pinned is given back, and with it what was asked for together with it. Answers whether something was.
    pub(super) fn give_back(
        &mut self,
        call: &Call,
        may_be_settled: bool,
        after: &Self,
        now: Minutes,
    ) -> bool {
        let mut some = false;
        for (id, _) in &call.asks {
            let has_input = match call.together {
                true => call.leases().any(fixtures::lease_has_input),
                false => fixtures::lease_has_input(*id),
            };
            let may_be_given_back = is_given_back_of(call, *id) || (may_be_settled && has_input);
            let is_live = self.leases.get(id).is_some_and(Lease::is_live);
            if is_live && may_be_given_back && !after.leases[id].is_live() {
                self.end_lease(*id, EndedBy::Reported, now);
                some = true;
            }
        }
        some
    }

    /// Whether it is the live lease of such a call.
    fn is_theirs(&self, (id, kind): (LeaseId, Kind), near: Option<LeaseId>) -> bool {
        self.leases.get(&id).is_some_and(|lease| {
            let is_live = lease.state == LeaseState::Granted && lease.workload.is_none();
            is_live && lease.kind == kind && self.near.get(&id).is_none_or(|granted| *granted == near)
        })
    }

    /// Whether nothing but its turn and the workers decides what becomes of it.
    pub(super) fn is_plain(&self, waiting: &Waiting) -> bool {
        let id = waiting.call.asks[0].0;
        // It may have been granted by another replica, or its id may be another's, or its owner's containers may be elsewhere by now.
        waiting.call.asks.len() == 1
            && waiting.arrived.is_some()
            && !self.leases.contains_key(&id)
            && !self.is_workload(id)
            && (waiting.call.near.is_some() || waiting.kept_to == self.row_of_home(id))
    }

    pub(super) fn place(&mut self, call: &Call, is_fresh: bool, came: &Came<'_>) {
        let (after, now, known) = (came.after, came.now, came.known);
        let said = came.answer.map(|answer| &answer.said[..]);
        let Call { asks: asked, together, near, .. } = call;
        let was_known = asked.iter().any(|(id, _)| {
            known.is_driven(*id) || known.submitted.contains(&WorkloadId::from_uuid(id.uuid()))
        });
        let may_be_settled = was_known || came.was_killed();
        let is_new = |id: &LeaseId| !self.leases.contains_key(id) && after.leases.contains_key(id);
        let granted: BTreeSet<_> = call.leases().filter(is_new).collect();
        let is_whole = granted.is_empty() || granted.len() == asked.len();
        assert!(!together || is_whole, "half of a group was granted");
        let before = self.clone();
        if let Some(near) = near {
            let team = fixtures::asks_of_lease(asked[0].0, asked[0].1).team;
            if before.leases.get(near).is_none_or(|near| !near.is_live() || near.team != team) {
                assert!(granted.is_empty() && said.is_none_or(|said| said == ["NoSuchLease"]), "{said:?}");
                return;
            }
        }
        let only = near.map(|near| before.leases[&near].worker);
        // What waits there by one of its ids makes way for it, or is in its way.
        let (mut replaced, mut in_its_way) = (None, BTreeSet::new());
        let units: Vec<_> = if *together { vec![&asked[..]] } else { asked.chunks(1).collect() };
        for unit in units.into_iter().filter(|_| said.is_some()) {
            let unit = Call { asks: unit.to_vec(), ..call.clone() };
            let there = |known: &Waiting| known.is_there(came.replica()) && known.shares_an_id(&unit);
            let Some(there) = self.waiting.iter().position(there) else { continue };
            let old = &self.waiting[there];
            let is_refused = || {
                let said = asked.iter().zip(said.into_iter().flatten());
                said.filter(|((id, _), _)| unit.leases().any(|of_unit| of_unit == *id))
                    .all(|(_, said)| said == "Exists")
            };
            if old.call.asks_like(&unit) {
                replaced = Some(self.waiting.remove(there));
            } else if is_refused() {
                in_its_way.extend(unit.leases());
            } else {
                // Somebody may have seen that its caller has gone.
                assert!(old.is_left(), "{old:?} waits by one of its ids");
                self.waiting.remove(there);
            }
        }
        for ask in asked.iter().filter(|(id, _)| granted.contains(id)) {
            let asks = asks_of(self, ask.0, ask.1, only);
            self.drive(*ask, call, &asks, after, now);
        }
        if let (Some(best), false) = (came.answer.and_then(|answer| answer.best.as_ref()), came.was_killed())
        {
            for id in &granted {
                let worker = after.leases[id].worker;
                assert!(best.contains(&worker), "{id} got {worker}, and {best:?} are the best for {call:?}");
            }
        }
        // While it was decided, all of them were there.
        let decided = self.clone();
        let is_given_back = self.give_back(call, may_be_settled, after, now);
        for id in granted.iter().filter(|id| is_given_back_of(call, **id)) {
            assert!(said.is_none() || !after.leases[id].is_live(), "{id} is not pinned");
        }
        if is_given_back {
            self.hand_on(came);
        }
        let Some(said) = said else { return };
        let is_hopeless = |(id, kind): &(LeaseId, Kind)| {
            // What was granted with it may have said where its owner's containers are.
            [&before, &decided].iter().any(|state| state.is_hopeless(&asks_of(state, *id, *kind, only), now))
        };
        // Who waited is known as of the last look, before anything was given back.
        let may_find_nobody = |(id, kind): &(LeaseId, Kind)| {
            let willing = decided.willing(&asks_of(&decided, *id, *kind, only), now);
            let asks = asks_of(&before, *id, *kind, only);
            let is_behind = decided.is_awaited_by_lease(&asks, fixtures::priority_of_lease(*id), came.by);
            assert!(*together || !is_fresh || is_behind || willing.is_empty(), "{willing:?} would take {id}");
        };
        if said == ["Waits"] {
            assert!(call.wait > 0 && granted.is_empty(), "{call:?} waits for nothing");
            assert!(call.leases().all(|id| !before.leases.contains_key(&id)), "it is there");
            asked.iter().for_each(may_find_nobody);
            let took_over = replaced.as_ref().map(|old| (old.arrived, old.is_left()));
            self.arrivals += 1;
            let arrived = match took_over {
                Some((_, true)) => None,
                Some((arrived, false)) => arrived.or(Some(self.arrivals)),
                None => Some(self.arrivals),
            };
            let earlier = replaced.map(|old| old.callers()).unwrap_or_default();
            let kept_to = self.row_of_home(asked[0].0);
            let replica = came.replica();
            let call = call.clone();
            let (has_gone, was_killed) = (false, false);
            let waiting = Waiting { call, replica, only, kept_to, arrived, has_gone, earlier, was_killed };
            self.waiting.push(waiting);
            return;
        }
        for (ask, said) in asked.iter().zip(said).filter(|((id, _), _)| !in_its_way.contains(id)) {
            let id = ask.0;
            let is_theirs = self.is_theirs(*ask, *near);
            match said.as_str() {
                "Ok" => assert!(is_theirs, "{id} is not theirs"),
                "Exists" if call.leases().any(|id| self.is_workload(id)) => {}
                "Exists" => {
                    // What is left of a group is not granted alone.
                    let of_group = *together && call.leases().any(|id| before.leases.contains_key(&id));
                    let was_there = (of_group || before.leases.contains_key(&id)) && !is_theirs;
                    let is_live =
                        self.leases.get(&id).is_some_and(|lease| lease.state == LeaseState::Granted);
                    assert!(was_there || (may_be_settled && !is_live), "{id} is free");
                }
                "NotPinned" => assert!(!self.leases.get(&id).is_some_and(Lease::is_live), "{id} is pinned"),
                "AllWorkersBusy" => {
                    assert_eq!(call.wait, 0, "it has time");
                    assert!(!granted.contains(&id) && !before.leases.contains_key(&id), "{id} was granted");
                    may_find_nobody(ask);
                }
                "NoCompatibleWorker" => {
                    assert!(!granted.contains(&id), "{id} was granted");
                    let some = if *together { asked.iter().any(is_hopeless) } else { is_hopeless(ask) };
                    assert!(some, "somebody could take {id}: {:#?}", before.workers);
                }
                // Its worker is not known yet where nobody has looked.
                "Undecided" => {
                    let driven = before.leases.get(&id).filter(|lease| lease.workload.is_none());
                    let is_live = driven.is_some_and(|lease| lease.state == LeaseState::Granted);
                    assert!(!is_fresh && is_live, "{id} can be decided");
                }
                other => panic!("{id}: {other}"),
            }
        }
    }

    /// Where a call waits.
    pub(super) fn replica_of(&self, number: usize) -> usize {
        let called = self.waiting.iter().find(|waiting| waiting.callers().contains(&number));
        called.expect("it waits").replica
    }

    /// Where somebody waits by one of the ids of a call.
    pub(super) fn where_it_waits(&self, call: &Call) -> Option<usize> {
        self.waiting.iter().find(|waiting| waiting.shares_an_id(call)).map(|waiting| waiting.replica)
    }

    /// Where a call waits whose lease was granted elsewhere meanwhile.
    pub(super) fn waits_for_what_is_there(&self) -> Option<usize> {
        let is_there = |waiting: &&Waiting| waiting.call.leases().any(|id| self.leases.contains_key(&id));
        self.waiting.iter().find(is_there).map(|waiting| waiting.replica)
    }

    /// The caller has gone.
    pub(super) fn go_away(&mut self, number: usize) {
        // Unless his replica was killed before.
        for called in &mut self.waiting {
            called.has_gone |= called.call.number == number;
            called.earlier.remove(&number);
        }
    }

    /// A replica looks for those whose callers have gone.
    pub(super) fn see_who_has_gone(&mut self, replica: usize) {
        self.waiting.retain(|waiting| !(waiting.is_left() && waiting.is_there(replica)));
    }

    /// Who of those that waited where `step` was done was answered, and what.
    pub(super) fn answer_waiting(&mut self, step: &Step, before: &Self, came: &Came<'_>) {
        let Some(answer) = came.answer else { return };
        for (number, said) in &answer.others {
            let by_number = |known: &&Waiting| known.callers().contains(number);
            // What was replaced is there no more.
            let waiting = before.waiting.iter().find(by_number).expect("it waited").clone();
            self.waiting.retain(|known| !known.callers().contains(number));
            let may_be_settled = waiting.call.leases().any(fixtures::lease_has_input);
            let asks_again = |call: &Call| {
                let same = waiting.call.asks.iter().all(|ask| call.asks.contains(ask));
                same && call.near == waiting.call.near && call.number != *number
            };
            let replaces = matches!(step, Step::Place { call, .. } if asks_again(call));
            let is_over = matches!(step, Step::EndPatience { minutes, .. } if waiting.call.wait <= *minutes);
            for (ask, said) in waiting.call.asks.iter().zip(said) {
                let id = ask.0;
                let is_theirs = self.is_theirs(*ask, waiting.call.near);
                let is_there = |id| self.leases.contains_key(&id) || self.is_workload(id);
                match said.as_str() {
                    "Ok" => assert!(is_theirs, "{id} is not theirs"),
                    "Exists" => {
                        let some_are_there = waiting.call.leases().any(is_there) && !is_theirs;
                        assert!(some_are_there || may_be_settled, "{id} is free");
                    }
                    "NotPinned" => assert!(may_be_settled && !is_theirs, "{id} is pinned"),
                    // Who asked for it last has less patience.
                    "AllWorkersBusy" => assert!(is_over || replaces, "{id} has time"),
                    "NoCompatibleWorker" => {
                        let could =
                            waiting.call.asks.iter().all(|ask| {
                                !self.is_hopeless(&self.asks_of_waiting(&waiting, *ask), came.now)
                            });
                        assert!(is_over || !could || !self.is_plain(&waiting), "somebody could take {id}");
                    }
                    "Undecided" => assert!(replaces || is_theirs, "{id} was asked for once"),
                    other => panic!("{id}: {other}"),
                }
            }
        }
        let there = self.waiting.iter().filter(|known| known.is_there(came.replica()));
        let numbers: BTreeSet<_> = there.clone().flat_map(Waiting::callers).collect();
        assert_eq!(answer.waiting, numbers, "those that wait: {there:#?}", there = there.collect::<Vec<_>>());
        for waiting in self.waiting.iter().filter(|known| known.is_there(came.replica())) {
            if let Step::EndPatience { minutes, .. } = step {
                assert!(waiting.is_left() || waiting.call.wait > *minutes, "{waiting:?} has waited enough");
            }
            if matches!(step, Step::Dispatch) && self.is_plain(waiting) {
                let is_hopeless =
                    |ask: &(LeaseId, Kind)| self.is_hopeless(&self.asks_of_waiting(waiting, *ask), came.now);
                assert!(!waiting.call.asks.iter().any(is_hopeless), "nobody could take {waiting:?}");
            }
        }
    }
}

/// Whether a lease of this call cannot be kept.
fn is_given_back_of(call: &Call, id: LeaseId) -> bool {
    cannot_be_pinned(id) || (call.together && call.leases().any(cannot_be_pinned))
}
