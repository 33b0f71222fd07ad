//! The expected effects and answers of each step.

use std::collections::BTreeSet;

use domain::{LeaseId, WorkerId, WorkloadId};

use super::KnownObjects;
use super::attempts::End;
use super::calls::WaitingCall;
use super::fixtures::{self, Amounts, Requirements, Uses};
use super::operations::{Answer, Step};
use super::state::{Lease, Minutes, State, Verdict};
use crate::db::entity::lease::{EndedBy, Kind, State as LeaseState, StopReason};
use crate::db::entity::worker::State as Contact;
use crate::db::entity::workload::State as Progress;

/// The result of a step.
pub(super) struct StepResult<'a> {
    /// `None` if the caller was killed and did not repeat the step.
    pub(super) answer: Option<&'a Answer>,
    /// The replicas that took the step. The first of two was killed.
    pub(super) by: &'a [usize],
    /// The state afterwards, from which choices of the scheduler are taken.
    pub(super) after: &'a State,
    pub(super) known: &'a KnownObjects,
    pub(super) now: Minutes,
}

impl StepResult<'_> {
    pub(super) fn was_killed(&self) -> bool {
        self.answer.is_none() || self.by.len() > 1
    }

    /// Returns the replica that completed the step.
    pub(super) fn replica(&self) -> usize {
        *self.by.last().expect("a replica")
    }
}

impl State {
    /// Applies `step` to the model, and checks its result.
    pub(super) fn expect(&mut self, step: &Step, step_result: &StepResult<'_>) {
        if step_result.was_killed() {
            // Leases that were granted before the kill stay live.
            let killed = |waiting: &&mut WaitingCall| waiting.replica == step_result.by[0];
            self.waiting.iter_mut().filter(killed).for_each(|waiting| waiting.was_killed = true);
        }
        let before = self.clone();
        self.expect_of(step, step_result);
        self.waiting.retain(|waiting| !waiting.was_killed);
        self.answer_waiting(step, &before, step_result);
    }

    fn expect_of(&mut self, step: &Step, step_result: &StepResult<'_>) {
        let StepResult { answer, after, known, now, .. } = *step_result;
        let mut expected = "Ok";
        match step {
            Step::Registration(registration) => {
                let session = answer.and_then(|answer| answer.session.as_ref());
                expected = self.register(registration, session, now);
            }
            Step::Attend { registration, .. } => {
                let session = answer.and_then(|answer| answer.session.as_ref());
                expected = self.register(registration, session, now);
                self.end_stranded_leases(now);
            }
            Step::SendReport { stream, report, is_fresh, .. } => {
                return self.observed(&known.streams[stream], report, *is_fresh, step_result);
            }
            Step::Misfit(registration) => expected = self.misfit(registration, after, now),
            Step::SignOff { session, is_last: true } => self.sign_off(session),
            Step::SignOff { is_last: false, .. } => {}
            Step::Heard(session) => expected = self.record_heartbeat(session, now),
            // The harness moves the clock.
            Step::Pass(_) => {}
            Step::ExtendTerms => self.extend_terms(now),
            Step::Expire => self.expire(now),
            Step::Down { name, down, interrupt_after } => {
                expected = self.withdraw_worker(name, *down, *interrupt_after, now);
            }
            Step::Run(name) => expected = self.run(name),
            Step::Prune(name) => expected = self.prune(name),
            Step::Depart => {
                let (last, before) =
                    (self.last_to_go(), self.removed_workers.keys().copied().collect::<BTreeSet<_>>());
                self.depart_if_due(now);
                // The order of several removals is arbitrary.
                for (id, removed) in self.removed_workers.iter_mut().filter(|(id, _)| !before.contains(id)) {
                    removed.order =
                        last + 1 + after.removed_workers.get(id).map_or(0, |removed| removed.order);
                }
            }
            Step::EndStranded => self.end_stranded_leases(now),
            Step::Submit { id, other, is_fresh } => {
                // An earlier holder with this id may be settled.
                let was_known =
                    known.submitted.contains(id) || known.is_driven(LeaseId::from_uuid(id.uuid()));
                return self.submit(
                    *id,
                    *other,
                    *is_fresh,
                    was_known || step_result.was_killed(),
                    step_result,
                );
            }
            Step::Place { call, is_fresh } => return self.place(call, *is_fresh, step_result),
            Step::Disconnect { call } => self.disconnect(*call),
            Step::EndWaits { looks, .. } => {
                if *looks {
                    self.drop_disconnected(step_result.replica());
                }
            }
            Step::Renew(lease) => expected = self.renew(*lease, now),
            Step::Use(lease) => expected = self.use_lease(*lease),
            Step::Release { lease, is_fresh } => self.release(*lease, *is_fresh, step_result),
            Step::Dispatch => {
                self.dispatch(step_result);
                self.drop_disconnected(step_result.replica());
            }
            Step::Start(claims) => {
                expected = self.live_workload(claims).map_or("LeaseLost", |id| self.start(id, now));
            }
            Step::Finish { claims, report } => match self.live_workload(claims) {
                Some(id) => self.report(id, *report, now),
                None if self.given_up_lease(claims.lease).is_some() => {
                    self.end_lease(claims.lease, EndedBy::Reported, now);
                }
                None => {
                    let ended = self.leases.get(&claims.lease).and_then(|lease| lease.ended_by);
                    expected = if ended == Some(EndedBy::Reported) { "Ok" } else { "LeaseLost" };
                }
            },
            Step::Observe { claims, phase } => {
                if let Some(id) = self.live_workload(claims) {
                    self.observe(id, *phase as i64, now);
                }
            }
            Step::Absent(claims) => match (self.live_workload(claims), self.given_up_lease(claims.lease)) {
                (Some(id), _) => self.end_attempt(id, End::Unknown, now),
                (None, Some(lease)) => self.end_lease(lease, EndedBy::Lost, now),
                (None, None) => {}
            },
            Step::Cancel { id, grace, team } => {
                let is_theirs = fixtures::requirements_of_workload(*id).team == *team;
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
                self.delete_old(now);
                self.deliver(|id| known.has_output(id), now);
                // Deliveries of the killed replica may let the repeat delete more.
                if step_result.was_killed()
                    && !self.workloads.keys().all(|id| after.workloads.contains_key(id))
                {
                    self.delete_old(now);
                }
            }
        }
        if let Some(answer) = answer {
            assert_eq!(answer.results, [expected], "the answer");
        }
    }

    /// Extends the terms of workers and driven leases.
    fn extend_terms(&mut self, now: Minutes) {
        self.workers.values_mut().for_each(|worker| worker.patient_since = now);
        let is_driven = |lease: &&mut Lease| lease.state == LeaseState::Granted && lease.workload.is_none();
        let driven = self.leases.values_mut().filter(is_driven);
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

    /// From now on, something may run under a driven lease.
    fn use_lease(&mut self, id: LeaseId) -> &'static str {
        let has_workload = self.workloads.contains_key(&WorkloadId::from_uuid(id.uuid()));
        let Some(lease) = self.leases.get(&id) else { return "Lost" };
        let worker = &self.workers[self.name(lease.worker).expect("a known worker")];
        let is_lost = worker.contact == Contact::Lost || worker.incarnation != lease.incarnation;
        if lease.state != LeaseState::Granted || is_lost {
            return "Lost";
        }
        match lease.kind {
            _ if lease.in_use => return "Ok",
            Kind::Transfer => return "Transfer",
            _ if has_workload => return "WorkloadId",
            _ => {}
        }
        let lease = self.leases.get_mut(&id).expect("known to the model");
        (lease.in_use, lease.settles) = (true, true);
        "Ok"
    }

    /// Records the lease that was granted to a workload, which its worker must allow.
    pub(super) fn assign(&mut self, id: WorkloadId, after: &Self, now: Minutes) {
        let lease = after.workloads[&id].lease.expect("an assigned workload");
        let requirements = self.requirements(id);
        self.grant(lease, Kind::Task, &requirements, Some(id), after, now);
        let workload = self.workload_mut(id);
        workload.state = Progress::Assigned;
        workload.lease = Some(lease);
        workload.events.push("placed");
    }

    pub(super) fn grant(
        &mut self,
        id: LeaseId,
        kind: Kind,
        requirements: &Requirements,
        workload: Option<WorkloadId>,
        after: &Self,
        now: Minutes,
    ) -> WorkerId {
        let worker = after.leases[&id].worker;
        let name = self.name(worker).expect("a known worker").to_owned();
        let verdict = self.verdict(&name, requirements, now);
        assert_eq!(verdict, Verdict::Yes, "{name} got a lease that it refuses: {requirements:?}");
        let lease = Lease {
            worker,
            incarnation: self.workers[&name].incarnation,
            kind,
            team: requirements.team.to_owned(),
            amounts: requirements.amounts,
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
            in_use: workload.is_some(),
            settles: workload.is_none() && fixtures::lease_has_input(id),
        };
        assert!(self.leases.insert(id, lease).is_none(), "a lease is granted once");
        worker
    }

    /// Returns whether a request with the same requirements and at least the same priority waits at
    /// one of these replicas.
    fn is_awaited(
        &self,
        requirements: &Requirements,
        priority: i64,
        but: Option<WorkloadId>,
        replicas: &[usize],
    ) -> bool {
        let anywhere = |requirements: &Requirements| Requirements {
            failed_on: vec![],
            only: None,
            ..requirements.clone()
        };
        let is_same = |other: &Requirements| anywhere(other) == anywhere(requirements);
        let mut workloads = self.pending().into_iter().filter(|id| Some(*id) != but);
        let mut calls = self.waiting.iter().filter(|known| replicas.contains(&known.replica));
        workloads.any(|id| fixtures::priority_of_workload(id) >= priority && is_same(&self.requirements(id)))
            || calls.any(|known| {
                // A group has its own line.
                let (id, kind) = known.call.items[0];
                !known.call.together
                    && known.priority() >= priority
                    && is_same(&fixtures::requirements_of_lease(id, kind))
            })
    }

    fn submit(
        &mut self,
        id: WorkloadId,
        other: bool,
        is_fresh: bool,
        may_be_settled: bool,
        step_result: &StepResult<'_>,
    ) {
        let (after, now) = (step_result.after, step_result.now);
        let reply = step_result.answer.map(|answer| answer.results[0].as_str());
        let before = self.workloads.get(&id).map(|workload| workload.state);
        let is_reply = |expected: &str| reply.is_none_or(|reply| reply == expected);
        match before {
            Some(_) if other => return assert!(is_reply("Exists"), "{reply:?}"),
            Some(Progress::Accepted) | None => {}
            Some(_) => return assert!(is_reply("Ok"), "{reply:?}"),
        }
        let requirements = fixtures::requirements_of_workload(id);
        let Some(now_there) = after.workloads.get(&id) else {
            if reply == Some("LeaseId") {
                assert!(self.is_lease(id), "{id} is free");
                return;
            }
            let is_refused = requirements.team != fixtures::TEAM && fixtures::uses(id) == Uses::Input;
            let may_be_refused = may_be_settled && fixtures::uses(id) != Uses::Nothing;
            let is_hopeless = before.is_none() && self.is_hopeless(&requirements, now);
            match reply {
                Some("NoCompatibleWorker") => assert!(is_hopeless, "some worker could take it"),
                Some("NotPinned") => assert!(is_refused || may_be_refused, "the inputs can be pinned"),
                Some(other) => panic!("the workload does not exist, and the answer is {other}"),
                None => {}
            }
            self.workloads.remove(&id);
            return;
        };
        assert!(is_reply("Ok"), "the workload exists, and the answer is {reply:?}");
        let is_known = before.is_some();
        if !is_known {
            assert!(!self.is_lease(id), "{id} belongs to a lease");
            self.accept(id, now);
        }
        match now_there.state {
            Progress::Accepted => assert!(reply.is_none(), "an answered submission is pinned"),
            Progress::Assigned => {
                let willing = self.willing(&requirements, now);
                self.assign(id, after, now);
                let worker = self.leases[&now_there.lease.expect("an assigned workload")].worker;
                assert!(!is_fresh || willing.contains(&worker), "a team's own workers are first");
            }
            Progress::Pending => {
                let priority = fixtures::priority_of_workload(id);
                let others_wait = self.is_awaited(&requirements, priority, Some(id), step_result.by);
                let is_hopeless = self.is_hopeless(&requirements, now) && !is_known;
                assert!(!is_fresh || others_wait || !is_hopeless, "no worker could ever take it");
                let willing = self.willing(&requirements, now);
                assert!(!is_fresh || others_wait || willing.is_empty(), "{willing:?} would take it");
                self.queue(id);
            }
            other => panic!("a new workload is {other:?}"),
        }
    }

    /// Returns whether a lease with this id exists.
    fn is_lease(&self, id: WorkloadId) -> bool {
        self.leases.contains_key(&LeaseId::from_uuid(id.uuid()))
    }

    /// Returns whether a workload with this id exists and pins could conflict.
    pub(super) fn is_workload(&self, id: LeaseId) -> bool {
        self.workloads.contains_key(&WorkloadId::from_uuid(id.uuid())) && fixtures::lease_has_input(id)
    }

    /// Returns whether a request with the requirements of a lease and at least its priority waits
    /// at one of these replicas.
    pub(super) fn is_awaited_by_lease(
        &self,
        requirements: &Requirements,
        priority: i64,
        replicas: &[usize],
    ) -> bool {
        self.is_awaited(requirements, priority, None, replicas)
    }

    /// The holder releases a granted lease.
    pub(super) fn release_driven(&mut self, id: LeaseId, now: Minutes) {
        match self.leases[&id].in_use {
            true => self.stop(id, StopReason::Released, 10),
            false => self.end_lease(id, EndedBy::Reported, now),
        }
    }

    fn release(&mut self, id: LeaseId, is_fresh: bool, step_result: &StepResult<'_>) {
        let slots = self.held_by_teams();
        let lease = self.leases.get(&id).filter(|lease| lease.workload.is_none());
        let is_granted = lease.is_some_and(Lease::is_granted);
        // A lease in use frees nothing before it has stopped.
        let freed = lease.filter(|lease| lease.is_granted() && !lease.in_use);
        let reserves = freed.is_some_and(|freed| {
            self.live(freed.worker).any(|(_, lease)| lease.amounts != Amounts::default())
        });
        let can_be_told =
            is_fresh && freed.is_some_and(|freed| freed.kind.takes_a_slot()) && !step_result.was_killed();
        // With reserved amounts, the freed room is unknown in advance.
        if can_be_told && reserves {
            self.serve_queue(slots.clone(), step_result);
        }
        if is_granted {
            self.release_driven(id, step_result.now);
        }
        if can_be_told && !reserves {
            self.serve_queue(slots, step_result);
        }
        // A waiting call may learn that another replica has granted its lease, and release it.
        self.release_all_unpinned(step_result);
        self.grant_freed(step_result);
    }
}
