//! What each step has to do, and what has to be answered.

use std::collections::BTreeSet;

use domain::{LeaseId, WorkerId, WorkloadId};

use super::Known;
use super::attempts::End;
use super::cast::{self, Asks, Uses};
use super::state::{Lease, Minutes, Says, State};
use super::steps::{Answer, Step};
use crate::entity::lease::{EndedBy, Kind, State as LeaseState};
use crate::entity::workload::State as Progress;

impl State {
    /// Does `step`. `after`: what is known then, of which is taken what only the scheduler can choose. `answer`: none, if who asked was killed and
    /// did not ask again; `was_killed`: he was, or did.
    pub(super) fn expect(
        &mut self,
        step: &Step,
        answer: Option<&Answer>,
        was_killed: bool,
        after: &Self,
        known: &Known,
        now: Minutes,
    ) {
        let mut expected = "Ok";
        match step {
            Step::Hello(hello) => {
                let session = answer.and_then(|answer| answer.session.as_ref());
                expected = self.hello(hello, session, now);
            }
            Step::Misfit(hello) => expected = self.misfit(hello, after, now),
            Step::Goodbye { session, is_last: true } => self.goodbye(session),
            Step::Goodbye { is_last: false, .. } => {}
            Step::Heard(session) => expected = self.heard(session, now),
            // The clock is not the model's.
            Step::Pass(_) => {}
            Step::BePatient => self.be_patient(now),
            Step::Expire => self.expire(now),
            Step::Down { name, down, interrupt_after } => {
                expected = self.bring_down(name, *down, *interrupt_after, now);
            }
            Step::Run(name) => expected = self.run(name),
            Step::Prune(name) => expected = self.prune(name),
            Step::SeeOff => {
                let (last, before) = (self.last_to_go(), self.gone.keys().copied().collect::<BTreeSet<_>>());
                self.see_off(now);
                // Who of several goes first is as it happens.
                for (id, gone) in self.gone.iter_mut().filter(|(id, _)| !before.contains(id)) {
                    gone.order = last + 1 + after.gone.get(id).map_or(0, |gone| gone.order);
                }
            }
            Step::EndOrphans => self.end_orphans(now),
            Step::Submit { id, other, is_fresh } => {
                let said = answer.map(|answer| answer.said[0].as_str());
                // What had it before may be settled.
                let was_known =
                    known.submitted.contains(id) || known.is_driven(LeaseId::from_uuid(id.uuid()));
                return self.submit(*id, *other, *is_fresh, said, was_known || was_killed, after, now);
            }
            Step::Place { asks, together, near, is_fresh } => {
                let said = answer.map(|answer| &answer.said[..]);
                let was_known = asks.iter().any(|(id, _)| {
                    known.is_driven(*id) || known.submitted.contains(&WorkloadId::from_uuid(id.uuid()))
                });
                return self.place(
                    asks,
                    *together,
                    *near,
                    *is_fresh,
                    known,
                    said,
                    was_killed || was_known,
                    after,
                    now,
                );
            }
            Step::Renew(lease) => expected = self.renew(*lease, now),
            Step::Release(lease) => {
                let driven = self.leases.get(lease);
                if driven.is_some_and(|lease| lease.workload.is_none() && lease.is_live()) {
                    self.end_lease(*lease, EndedBy::Reported, now);
                }
                self.hand_on(after, now);
            }
            Step::Dispatch => self.dispatch(after, now),
            Step::Start(claims) => {
                expected = self.held(claims).map_or("LeaseLost", |id| self.start(id, now));
            }
            Step::Finish { claims, report } => match self.held(claims) {
                Some(id) => self.report(id, *report, now),
                None => {
                    let ended = self.leases.get(&claims.lease).and_then(|lease| lease.ended_by);
                    expected = if ended == Some(EndedBy::Reported) { "Ok" } else { "LeaseLost" };
                }
            },
            Step::Observe { claims, phase } => {
                if let Some(id) = self.held(claims) {
                    self.observe(id, *phase as i64, now);
                }
            }
            Step::Absent(claims) => {
                if let Some(id) = self.held(claims) {
                    self.end_attempt(id, End::Unknown, now);
                }
            }
            Step::Cancel { id, grace, team } => {
                let is_theirs = cast::asks_of_workload(*id).team == *team;
                if self.workloads.contains_key(id) && is_theirs {
                    self.cancel(*id, *grace, now);
                } else {
                    expected = "NotFound";
                }
            }
            Step::Deliver => self.deliver(|id| known.has_output(id), now),
            Step::Reconcile => {
                let accepted = |id: &WorkloadId| self.workloads[id].state == Progress::Accepted;
                for id in self.workloads.keys().copied().filter(accepted).collect::<Vec<_>>() {
                    self.give_up(id, now);
                }
                self.forget(now);
                self.deliver(|id| known.has_output(id), now);
            }
        }
        if let Some(answer) = answer {
            assert_eq!(answer.said, [expected], "the answer");
        }
    }

    /// Who has to stay in contact could perhaps not.
    fn be_patient(&mut self, now: Minutes) {
        self.workers.values_mut().for_each(|worker| worker.patient_since = now);
        let driven = self.leases.values_mut().filter(|lease| lease.is_live() && lease.workload.is_none());
        driven.for_each(|lease| lease.expires_at = lease.expires_at.max(Some(now + 45)));
    }

    fn renew(&mut self, lease: LeaseId, now: Minutes) -> &'static str {
        match self.leases.get_mut(&lease).filter(|lease| lease.state == LeaseState::Granted) {
            Some(lease) if lease.workload.is_none() => {
                lease.expires_at = lease.expires_at.max(Some(now + 45));
                "Ok"
            }
            _ => "Lost",
        }
    }

    /// Notes the lease that was granted to a workload, which must be one that its worker would grant.
    fn assign(&mut self, id: WorkloadId, after: &Self, now: Minutes) {
        let lease = after.workloads[&id].lease.expect("it is assigned");
        let asks = self.asks(id);
        self.grant(lease, Kind::Task, &asks, Some(id), after, now);
        let workload = self.workload_mut(id);
        workload.state = Progress::Assigned;
        workload.lease = Some(lease);
        workload.events.push("placed");
    }

    fn grant(
        &mut self,
        id: LeaseId,
        kind: Kind,
        asks: &Asks,
        workload: Option<WorkloadId>,
        after: &Self,
        now: Minutes,
    ) -> WorkerId {
        let worker = after.leases[&id].worker;
        let name = self.name(worker).expect("it is on a worker that is known").to_owned();
        let says = self.says(&name, asks, now);
        assert_eq!(says, Says::Yes, "{name} got what it does not take: {asks:?}");
        let lease = Lease {
            worker,
            incarnation: self.workers[&name].incarnation,
            kind,
            team: asks.team.to_owned(),
            memory_bytes: asks.memory_bytes,
            workload,
            owner: String::new(),
            state: LeaseState::Granted,
            phase: 0,
            stop: None,
            grace: None,
            ended_by: None,
            granted_at: now,
            expires_at: workload.is_none().then_some(now + 45),
            ended_at: None,
            settles: workload.is_none() && cast::lease_has_input(id),
        };
        assert!(self.leases.insert(id, lease).is_none(), "a lease is granted once");
        worker
    }

    /// Whether somebody waits who asks for the same, wherever it may be.
    fn is_awaited(&self, asks: &Asks, but: Option<WorkloadId>) -> bool {
        let anywhere = |asks: &Asks| Asks { failed_on: vec![], only: None, ..asks.clone() };
        let waits = self.workloads.iter().filter(|(_, workload)| workload.state == Progress::Pending);
        let mut others = waits.map(|(id, _)| *id).filter(|id| Some(*id) != but);
        others.any(|id| anywhere(&self.asks(id)) == anywhere(asks))
    }

    #[expect(clippy::too_many_arguments, reason = "all that is known of a submission")]
    fn submit(
        &mut self,
        id: WorkloadId,
        other: bool,
        is_fresh: bool,
        said: Option<&str>,
        may_be_settled: bool,
        after: &Self,
        now: Minutes,
    ) {
        let before = self.workloads.get(&id).map(|workload| workload.state);
        let says = |expected: &str| said.is_none_or(|said| said == expected);
        match before {
            Some(_) if other => return assert!(says("Exists"), "{said:?}"),
            Some(Progress::Accepted) | None => {}
            Some(_) => return assert!(says("Ok"), "{said:?}"),
        }
        let asks = cast::asks_of_workload(id);
        let Some(now_there) = after.workloads.get(&id) else {
            if said == Some("Exists") {
                assert!(self.is_lease(id), "{id} is free");
                return;
            }
            let is_refused = asks.team != cast::TEAM && cast::uses(id) == Uses::Input;
            let may_be_refused = may_be_settled && cast::uses(id) != Uses::Nothing;
            let is_hopeless = before.is_none() && self.is_hopeless(&asks, now);
            match said {
                Some("NoCompatibleWorker") => assert!(is_hopeless, "some worker could"),
                Some("NotPinned") => assert!(is_refused || may_be_refused, "its inputs are there"),
                Some(other) => panic!("it is not there, and was told {other}"),
                None => {}
            }
            self.workloads.remove(&id);
            return;
        };
        assert!(says("Ok"), "it is there, and was told {said:?}");
        let is_known = before.is_some();
        if !is_known {
            assert!(!self.is_lease(id), "{id} is a lease's");
            self.accept(id, now);
        }
        match now_there.state {
            Progress::Accepted => assert!(said.is_none(), "who was answered waits for a worker"),
            Progress::Assigned => {
                let willing = self.willing(&asks, now);
                self.assign(id, after, now);
                let worker = self.leases[&now_there.lease.expect("it is assigned")].worker;
                assert!(!is_fresh || willing.contains(&worker), "a team's own workers are first");
            }
            Progress::Pending => {
                let others_wait = self.is_awaited(&asks, Some(id));
                let is_hopeless = self.is_hopeless(&asks, now) && !is_known;
                assert!(!is_fresh || others_wait || !is_hopeless, "nobody could ever take it");
                let willing = self.willing(&asks, now);
                assert!(!is_fresh || others_wait || willing.is_empty(), "{willing:?} would take it");
                self.queue(id);
            }
            other => panic!("it was just submitted, and is {other:?}"),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "all that is known of a call")]
    fn place(
        &mut self,
        asked: &[(LeaseId, Kind)],
        together: bool,
        near: Option<LeaseId>,
        is_fresh: bool,
        known: &Known,
        said: Option<&[String]>,
        may_be_settled: bool,
        after: &Self,
        now: Minutes,
    ) {
        let is_new = |id: &LeaseId| !self.leases.contains_key(id);
        let granted: BTreeSet<_> = asked
            .iter()
            .map(|(id, _)| *id)
            .filter(|id| is_new(id) && after.leases.contains_key(id))
            .collect();
        assert!(
            !together || granted.is_empty() || granted.len() == asked.len(),
            "half of a group was granted"
        );
        let before = self.clone();
        let asks_of = |state: &Self, id: LeaseId, kind: Kind| {
            let asks = cast::asks_of_lease(id, kind);
            let only = match near {
                Some(near) => Some(before.leases[&near].worker),
                None => state.home(asks.team, cast::owner_of_lease(id)),
            };
            Asks { only, ..asks }
        };
        if let Some(near) = near {
            let team = cast::asks_of_lease(asked[0].0, asked[0].1).team;
            if before.leases.get(&near).is_none_or(|near| !near.is_live() || near.team != team) {
                assert!(granted.is_empty() && said.is_none_or(|said| said == ["NoSuchLease"]), "{said:?}");
                return;
            }
        }
        for (id, kind) in asked.iter().filter(|(id, _)| granted.contains(id)) {
            assert!(!self.is_workload(*id), "{id} is a workload's");
            let asks = asks_of(self, *id, *kind);
            let worker = self.grant(*id, *kind, &asks, None, after, now);
            let owner = if near.is_some() { "" } else { cast::owner_of_lease(*id) };
            if !owner.is_empty() {
                self.owners.insert((asks.team.to_owned(), owner.to_owned()), (worker, now));
            }
            self.leases.get_mut(id).expect("it is there").owner = owner.to_owned();
        }
        // While it was decided, all of them were there.
        let decided = self.clone();
        // What cannot be pinned is given back, and with it what was asked for together with it.
        let cannot_be_pinned = |id: &LeaseId| {
            cast::lease_has_input(*id) && cast::asks_of_lease(*id, Kind::Task).team != cast::TEAM
        };
        let is_live = |state: &Self, id| state.leases.get(id).is_some_and(Lease::is_live);
        let mut some_given_back = false;
        for (id, _) in asked {
            if !is_live(self, id) {
                continue;
            }
            let is_given_back =
                cannot_be_pinned(id) || (together && asked.iter().any(|(id, _)| cannot_be_pinned(id)));
            let may_be_given_back = is_given_back || (may_be_settled && cast::lease_has_input(*id));
            if may_be_given_back && !after.leases[id].is_live() {
                self.end_lease(*id, EndedBy::Reported, now);
                some_given_back = true;
            }
            let is_new = granted.contains(id);
            assert!(
                !is_new || !is_given_back || said.is_none() || !after.leases[id].is_live(),
                "it is not pinned"
            );
        }
        if some_given_back {
            self.hand_on(after, now);
        }
        let Some(said) = said else { return };
        for ((id, kind), said) in asked.iter().zip(said) {
            let asks = asks_of(&before, *id, *kind);
            let is_granted = granted.contains(id);
            let is_live = self.leases.get(id).is_some_and(|lease| lease.state == LeaseState::Granted);
            let is_same = before.leases.get(id).is_none_or(|lease| {
                lease.workload.is_none()
                    && lease.kind == *kind
                    && known.near.get(id).is_none_or(|asked| *asked == near)
            });
            match said.as_str() {
                "Ok" => assert!(is_live && is_same, "{id} is not theirs"),
                "Exists" if asked.iter().any(|(id, _)| self.is_workload(*id)) => {}
                "Exists" => {
                    let was_there = before.leases.contains_key(id) && !(is_live && is_same);
                    assert!(was_there || (may_be_settled && !is_live), "{id} is free");
                }
                "NotPinned" => assert!(!is_live, "{id} is pinned"),
                "AllWorkersBusy" => {
                    assert!(!is_granted && !before.leases.contains_key(id), "{id} was granted");
                    let willing = decided.willing(&asks_of(&decided, *id, *kind), now);
                    // Who waited is known as of the last look, before anything was given back.
                    let may_be =
                        together || !is_fresh || decided.is_awaited_by_lease(&asks) || willing.is_empty();
                    assert!(may_be, "{willing:?} would take {id}");
                }
                "NoCompatibleWorker" => {
                    let is_hopeless = |(id, kind): &(LeaseId, Kind)| {
                        // What was granted with it may have said where its owner's containers are.
                        [&before, &decided]
                            .iter()
                            .any(|state| state.is_hopeless(&asks_of(state, *id, *kind), now))
                    };
                    assert!(!is_granted, "{id} was granted");
                    let some =
                        if together { asked.iter().any(is_hopeless) } else { is_hopeless(&(*id, *kind)) };
                    assert!(some, "somebody could take {id}, {asks:?}: {:#?}", before.workers);
                }
                other => panic!("{id}: {other}"),
            }
        }
    }

    /// Whether the artifact store may hold something for a lease of this id, and would for the workload.
    fn is_lease(&self, id: WorkloadId) -> bool {
        self.leases.contains_key(&LeaseId::from_uuid(id.uuid())) && cast::uses(id) != Uses::Nothing
    }

    /// Whether the artifact store may hold something for a workload of this id, and would for the lease.
    fn is_workload(&self, id: LeaseId) -> bool {
        self.workloads.contains_key(&WorkloadId::from_uuid(id.uuid())) && cast::lease_has_input(id)
    }

    /// Whether a workload waits that asks for the same as a lease.
    fn is_awaited_by_lease(&self, asks: &Asks) -> bool {
        asks.takes_a_slot && self.is_awaited(asks, None)
    }

    /// Something was given back: those that are known to wait may have what is free.
    fn hand_on(&mut self, after: &Self, now: Minutes) {
        for id in self.waiting() {
            if after.workloads[&id].lease.is_some() {
                self.assign(id, after, now);
            }
        }
    }

    fn waiting(&self) -> Vec<WorkloadId> {
        let pending = self.workloads.iter().filter(|(_, one)| one.state == Progress::Pending);
        pending.map(|(id, _)| *id).collect()
    }

    /// Those that wait have their turns, until nobody is left whom a worker would take.
    fn dispatch(&mut self, after: &Self, now: Minutes) {
        self.give_up_hopeless(now);
        let before = self.waiting();
        let placed: Vec<_> =
            before.iter().copied().filter(|id| after.workloads[id].lease.is_some()).collect();
        for id in &placed {
            self.assign(*id, after, now);
        }
        for id in self.waiting() {
            let asks = self.asks(id);
            let willing = self.willing(&asks, now);
            assert!(willing.is_empty(), "{id} waits, and {willing:?} would take it: {asks:?}");
            // Of those that ask for the same and could be anywhere the more urgent come first.
            let priority =
                |id: WorkloadId| cast::spec(id, domain::ArtifactId::from_uuid(id.uuid()), false).priority;
            let passed = placed.iter().find(|other| {
                let others = Asks { failed_on: vec![], ..self.asks(**other) };
                asks.failed_on.is_empty() && others == asks && priority(**other) < priority(id)
            });
            assert_eq!(passed, None, "it was before {id}, which is more urgent");
        }
    }
}
