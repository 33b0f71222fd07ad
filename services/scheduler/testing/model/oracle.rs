//! What each step has to do, and what has to be answered.

use std::collections::BTreeSet;

use domain::{LeaseId, WorkerId, WorkloadId};

use super::Known;
use super::attempts::End;
use super::calls::Waiting;
use super::fixtures::{self, Amounts, Asks, Uses};
use super::operations::{Answer, Step};
use super::state::{Lease, Minutes, Says, State};
use crate::db::entity::lease::{EndedBy, Kind, State as LeaseState};
use crate::db::entity::workload::State as Progress;

/// What came of a step.
pub(super) struct Came<'a> {
    /// None, if who asked was killed and did not ask again.
    pub(super) answer: Option<&'a Answer>,
    /// Who did it. The first of two was killed.
    pub(super) by: &'a [usize],
    /// What there is then, of which is taken what only the scheduler can choose.
    pub(super) after: &'a State,
    pub(super) known: &'a Known,
    pub(super) now: Minutes,
}

impl Came<'_> {
    pub(super) fn was_killed(&self) -> bool {
        self.answer.is_none() || self.by.len() > 1
    }

    /// Who did it in the end.
    pub(super) fn replica(&self) -> usize {
        *self.by.last().expect("somebody did it")
    }
}

impl State {
    /// Does `step`, and judges what came of it.
    pub(super) fn expect(&mut self, step: &Step, came: &Came<'_>) {
        if came.was_killed() {
            // What it was granted before that is there.
            let killed = |waiting: &&mut Waiting| waiting.replica == came.by[0];
            self.waiting.iter_mut().filter(killed).for_each(|waiting| waiting.was_killed = true);
        }
        let before = self.clone();
        self.expect_of(step, came);
        self.waiting.retain(|waiting| !waiting.was_killed);
        self.answer_waiting(step, &before, came);
    }

    fn expect_of(&mut self, step: &Step, came: &Came<'_>) {
        let Came { answer, after, known, now, .. } = *came;
        let mut expected = "Ok";
        match step {
            Step::Hello(hello) => {
                let session = answer.and_then(|answer| answer.session.as_ref());
                expected = self.hello(hello, session, now);
            }
            Step::Attend { hello, .. } => {
                let session = answer.and_then(|answer| answer.session.as_ref());
                expected = self.hello(hello, session, now);
                self.end_orphans(now);
            }
            Step::Say { stream, said, is_fresh, .. } => {
                return self.observed(&known.streams[stream], said, *is_fresh, came);
            }
            Step::Misfit(hello) => expected = self.misfit(hello, after, now),
            Step::Goodbye { session, is_last: true } => self.goodbye(session),
            Step::Goodbye { is_last: false, .. } => {}
            Step::Heard(session) => expected = self.heard(session, now),
            // The clock is not the model's.
            Step::Pass(_) => {}
            Step::BePatient => self.extend_terms(now),
            Step::Expire => self.expire(now),
            Step::Down { name, down, interrupt_after } => {
                expected = self.withdraw_worker(name, *down, *interrupt_after, now);
            }
            Step::Run(name) => expected = self.run(name),
            Step::Prune(name) => expected = self.prune(name),
            Step::SeeOff => {
                let (last, before) = (self.last_to_go(), self.gone.keys().copied().collect::<BTreeSet<_>>());
                self.depart_if_due(now);
                // Who of several goes first is as it happens.
                for (id, gone) in self.gone.iter_mut().filter(|(id, _)| !before.contains(id)) {
                    gone.order = last + 1 + after.gone.get(id).map_or(0, |gone| gone.order);
                }
            }
            Step::EndOrphans => self.end_orphans(now),
            Step::Submit { id, other, is_fresh } => {
                // What had it before may be settled.
                let was_known =
                    known.submitted.contains(id) || known.is_driven(LeaseId::from_uuid(id.uuid()));
                return self.submit(*id, *other, *is_fresh, was_known || came.was_killed(), came);
            }
            Step::Place { call, is_fresh } => return self.place(call, *is_fresh, came),
            Step::GoAway { call } => self.go_away(*call),
            Step::EndPatience { looks, .. } => {
                if *looks {
                    self.see_who_has_gone(came.replica());
                }
            }
            Step::Renew(lease) => expected = self.renew(*lease, now),
            Step::Release { lease, is_fresh } => self.release(*lease, *is_fresh, came),
            Step::Dispatch => {
                self.dispatch(came);
                self.see_who_has_gone(came.replica());
            }
            Step::Start(claims) => {
                expected = self.held(claims).map_or("LeaseLost", |id| self.start(id, now));
            }
            Step::Finish { claims, report } => match self.held(claims) {
                Some(id) => self.report(id, *report, now),
                None if self.given_up(claims.lease).is_some() => {
                    self.end_lease(claims.lease, EndedBy::Reported, now);
                }
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
            Step::Absent(claims) => match (self.held(claims), self.given_up(claims.lease)) {
                (Some(id), _) => self.end_attempt(id, End::Unknown, now),
                (None, Some(lease)) => self.end_lease(lease, EndedBy::Lost, now),
                (None, None) => {}
            },
            Step::Cancel { id, grace, team } => {
                let is_theirs = fixtures::asks_of_workload(*id).team == *team;
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
                // What was delivered by who was killed may be forgotten by who came after.
                if came.was_killed() && !self.workloads.keys().all(|id| after.workloads.contains_key(id)) {
                    self.forget(now);
                }
            }
        }
        if let Some(answer) = answer {
            assert_eq!(answer.said, [expected], "the answer");
        }
    }

    /// Who has to stay in contact could perhaps not.
    fn extend_terms(&mut self, now: Minutes) {
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
    pub(super) fn assign(&mut self, id: WorkloadId, after: &Self, now: Minutes) {
        let lease = after.workloads[&id].lease.expect("it is assigned");
        let asks = self.asks(id);
        self.grant(lease, Kind::Task, &asks, Some(id), after, now);
        let workload = self.workload_mut(id);
        workload.state = Progress::Assigned;
        workload.lease = Some(lease);
        workload.events.push("placed");
    }

    pub(super) fn grant(
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
            amounts: asks.amounts,
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
            settles: workload.is_none() && fixtures::lease_has_input(id),
        };
        assert!(self.leases.insert(id, lease).is_none(), "a lease is granted once");
        worker
    }

    /// Whether somebody waits at one of these replicas who asks for the same, wherever it may be, and is as urgent.
    fn is_awaited(&self, asks: &Asks, priority: i64, but: Option<WorkloadId>, replicas: &[usize]) -> bool {
        let anywhere = |asks: &Asks| Asks { failed_on: vec![], only: None, ..asks.clone() };
        let is_same = |other: &Asks| anywhere(other) == anywhere(asks);
        let mut workloads = self.pending().into_iter().filter(|id| Some(*id) != but);
        let mut calls = self.waiting.iter().filter(|known| replicas.contains(&known.replica));
        workloads.any(|id| fixtures::priority_of_workload(id) >= priority && is_same(&self.asks(id)))
            || calls.any(|known| {
                // Those that are asked for together have a line of their own.
                let (id, kind) = known.call.asks[0];
                !known.call.together
                    && known.priority() >= priority
                    && is_same(&fixtures::asks_of_lease(id, kind))
            })
    }

    fn submit(&mut self, id: WorkloadId, other: bool, is_fresh: bool, may_be_settled: bool, came: &Came<'_>) {
        let (after, now) = (came.after, came.now);
        let said = came.answer.map(|answer| answer.said[0].as_str());
        let before = self.workloads.get(&id).map(|workload| workload.state);
        let says = |expected: &str| said.is_none_or(|said| said == expected);
        match before {
            Some(_) if other => return assert!(says("Exists"), "{said:?}"),
            Some(Progress::Accepted) | None => {}
            Some(_) => return assert!(says("Ok"), "{said:?}"),
        }
        let asks = fixtures::asks_of_workload(id);
        let Some(now_there) = after.workloads.get(&id) else {
            if said == Some("Exists") {
                assert!(self.is_lease(id), "{id} is free");
                return;
            }
            let is_refused = asks.team != fixtures::TEAM && fixtures::uses(id) == Uses::Input;
            let may_be_refused = may_be_settled && fixtures::uses(id) != Uses::Nothing;
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
                let priority = fixtures::priority_of_workload(id);
                let others_wait = self.is_awaited(&asks, priority, Some(id), came.by);
                let is_hopeless = self.is_hopeless(&asks, now) && !is_known;
                assert!(!is_fresh || others_wait || !is_hopeless, "nobody could ever take it");
                let willing = self.willing(&asks, now);
                assert!(!is_fresh || others_wait || willing.is_empty(), "{willing:?} would take it");
                self.queue(id);
            }
            other => panic!("it was just submitted, and is {other:?}"),
        }
    }

    /// Whether the artifact store may hold something for a lease of this id, and would for the workload.
    fn is_lease(&self, id: WorkloadId) -> bool {
        self.leases.contains_key(&LeaseId::from_uuid(id.uuid())) && fixtures::uses(id) != Uses::Nothing
    }

    /// Whether the artifact store may hold something for a workload of this id, and would for the lease.
    pub(super) fn is_workload(&self, id: LeaseId) -> bool {
        self.workloads.contains_key(&WorkloadId::from_uuid(id.uuid())) && fixtures::lease_has_input(id)
    }

    /// Whether somebody waits at one of these replicas who asks for the same as a lease, and is as urgent.
    pub(super) fn is_awaited_by_lease(&self, asks: &Asks, priority: i64, replicas: &[usize]) -> bool {
        self.is_awaited(asks, priority, None, replicas)
    }

    fn release(&mut self, id: LeaseId, is_fresh: bool, came: &Came<'_>) {
        let held = self.held_by_teams();
        let lease = self.leases.get(&id).filter(|lease| lease.workload.is_none() && lease.is_live()).cloned();
        let Some(lease) = lease else {
            self.hand_on(came);
            _ = self.give_all_back(came);
            return;
        };
        let reserves = self.live(lease.worker).any(|(_, lease)| lease.amounts != Amounts::default());
        let can_be_told = is_fresh && lease.kind.takes_a_slot() && !came.was_killed();
        // Where amounts are reserved nobody knows before what comes free.
        if can_be_told && reserves {
            self.have_turns(held.clone(), came);
        }
        self.end_lease(id, EndedBy::Reported, came.now);
        if can_be_told && !reserves {
            self.have_turns(held, came);
        }
        self.give_all_back(came);
        self.hand_on(came);
    }
}
