//! The model of gateway streams. Reports and echoed generations may be late, repeated or out of
//! order.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::SessionClaims;
use domain::{LeaseId, WorkerId};
use rpc::pb::scheduler as pb;

use super::attempts::End;
use super::oracle::StepResult;
use super::state::{Lease, State};
use super::stream::StreamOutput;
use crate::db::entity::lease::{EndedBy, State as LeaseState};
use crate::db::entity::worker::State as Contact;
use crate::db::entity::workload::State as Progress;
use crate::workloads::Phase;

/// The desired state of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseAction {
    Run,
    /// Keep what runs under a driven lease.
    Hold,
    /// Stop, with this grace period in seconds.
    Stop(i64),
}

/// A desired state that a gateway received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReceivedState {
    pub(super) generation: u64,
    pub(super) actions: BTreeMap<LeaseId, LeaseAction>,
}

/// A gateway's report about its leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SentReport {
    /// The echoed generation.
    pub(super) echo: u64,
    pub(super) phases: BTreeMap<LeaseId, Phase>,
}

/// One stream, as its gateway knows it.
#[derive(Debug, Clone)]
pub(super) struct OpenStream {
    pub(super) replica: usize,
    pub(super) session: SessionClaims,
    /// The received desired states, in order.
    pub(super) received: Vec<ReceivedState>,
    /// The sent reports.
    pub(super) sent: Vec<SentReport>,
}

/// Decodes the action for a lease. `before`: the last action on this stream, which holds if there
/// is no new one.
fn action(lease: &pb::DesiredLease, before: Option<LeaseAction>) -> LeaseAction {
    match &lease.action {
        Some(pb::desired_lease::Action::Run(_)) => {
            assert_eq!(before, None, "an action is sent once");
            LeaseAction::Run
        }
        Some(pb::desired_lease::Action::Hold(_)) => {
            assert_eq!(before, None, "an action is sent once");
            LeaseAction::Hold
        }
        Some(pb::desired_lease::Action::Stop(stop)) => {
            LeaseAction::Stop(stop.grace.as_ref().map_or(0, |grace| grace.seconds))
        }
        None => before.expect("an action"),
    }
}

impl OpenStream {
    /// Processes received messages.
    pub(super) fn receive(&mut self, output: &StreamOutput) {
        for desired in &output.desired {
            if desired.directive() == pb::Directive::RegisterAgain {
                continue;
            }
            let before = |id: &LeaseId| self.received.last().and_then(|state| state.actions.get(id)).copied();
            let actions = desired.leases.iter().map(|lease| {
                let id = lease.lease_id.parse().expect("an id");
                (id, action(lease, before(&id)))
            });
            let actions = actions.collect();
            let state = ReceivedState { generation: desired.generation, actions };
            assert!(self.newest() <= state.generation, "{state:?} was sent after {:?}", self.received.last());
            self.received.push(state);
        }
    }

    /// Returns the newest received generation.
    pub(super) fn newest(&self) -> u64 {
        self.received.last().map_or(0, |state| state.generation)
    }

    /// Returns whether the gateway has received a lease, according to the echoed generation.
    /// `from`: the first generation that counts.
    fn has_received(&self, lease: LeaseId, from: u64, echo: u64) -> bool {
        let counts = |state: &&ReceivedState| (from..=echo).contains(&state.generation);
        self.received.iter().filter(counts).any(|state| state.actions.contains_key(&lease))
    }
}

impl State {
    /// Returns the desired state of the worker of this session.
    fn actions(&self, session: &SessionClaims) -> BTreeMap<LeaseId, LeaseAction> {
        let action = |lease: &Lease| match lease.state {
            LeaseState::Ending => LeaseAction::Stop(lease.grace.expect("a grace period")),
            _ if lease.workload.is_none() => LeaseAction::Hold,
            _ => LeaseAction::Run,
        };
        self.leases_in_use(session).map(|(id, lease)| (id, action(lease))).collect()
    }

    /// Returns the live leases in use in this incarnation.
    fn leases_in_use(&self, session: &SessionClaims) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let incarnation = session.incarnation.0;
        let live = self.live(session.worker);
        live.filter(move |(_, lease)| lease.in_use && lease.incarnation == incarnation)
    }

    /// Checks that a gateway with the newest generation knows exactly the live leases of its
    /// worker, with their desired state.
    pub(super) fn check_told(
        &self,
        streams: &BTreeMap<usize, OpenStream>,
        generations: &BTreeMap<WorkerId, u64>,
    ) {
        for stream in streams.values().filter(|stream| self.check_session(&stream.session).is_ok()) {
            let newest = generations[&stream.session.worker];
            let state = stream.received.last().expect("a registered gateway receives a desired state");
            assert!(state.generation <= newest, "{state:?} is newer than {newest}");
            if state.generation == newest {
                let desired = self.actions(&stream.session);
                assert_eq!(state.actions, desired, "{stream:#?} has the newest generation");
            }
        }
    }

    /// Processes a report. `was_polled`: the replica has just polled.
    pub(super) fn observed(
        &mut self,
        stream: &OpenStream,
        report: &SentReport,
        was_polled: bool,
        step_result: &StepResult<'_>,
    ) {
        let judged = self.check_session(&stream.session);
        let was_answered = step_result.answer.is_some();
        if let Some(answer) = step_result.answer {
            match judged {
                Ok(_) => assert_eq!(answer.results, ["Ok"], "the session is valid"),
                // The end of the session may be unknown to the replica. A poll does not show a
                // removed worker that no replica had in its cache.
                Err(_)
                    if answer.results == ["Ok"]
                        && (!was_polled || self.name(stream.session.worker).is_none()) => {}
                Err(refused) => assert_eq!(answer.results, [refused], "the session has ended"),
            }
        }
        let is_heard = judged.is_ok();
        let has_to_be = was_polled && was_answered && is_heard;
        if let Ok(name) = &judged
            && let Some(after) = step_result.after.workers.get(name).filter(|after| after.attended)
        {
            let worker = self.workers.get_mut(name).expect("a worker");
            (worker.attended, worker.heard_at) = (true, step_result.now);
            // A killed replica may have written only the heartbeat.
            if !step_result.was_killed() || after.contact == Contact::Running {
                worker.contact = Contact::Running;
            }
        }
        let live: BTreeSet<_> = self.leases_in_use(&stream.session).map(|(id, _)| id).collect();
        for id in live {
            let (lease, now_there) = (self.leases[&id].clone(), &step_result.after.leases[&id]);
            let has_ended = !now_there.is_live();
            let is_given_up = self.given_up_lease(id).is_some();
            let is_driven = lease.workload.is_none();
            match report.phases.get(&id) {
                None => {
                    let has_received = stream.has_received(id, 0, report.echo);
                    // A replica may send leases that are newer than the generation that it knows.
                    let first = step_result.after.lease_generations[&id];
                    let has_surely_received = stream.has_received(id, first, report.echo);
                    if has_ended {
                        assert!(
                            has_received,
                            "{id} ended, which {stream:#?} had not received with {report:?}"
                        );
                        assert!(is_heard, "the session of {stream:#?} has ended, and its report ended {id}");
                        self.lose_unknown_lease(id, step_result);
                    } else {
                        assert!(
                            !has_to_be || !has_surely_received,
                            "{id} is missing although {stream:#?} had received it"
                        );
                    }
                }
                Some(Phase::Ended) if is_given_up || is_driven => {
                    if has_ended {
                        assert!(is_heard, "the session of {stream:#?} has ended, and its report ended {id}");
                        self.lose_unknown_lease(id, step_result);
                    } else {
                        assert!(!has_to_be, "{id} was given up or is driven, and has stopped");
                    }
                }
                Some(_) if is_driven => assert!(!has_ended, "{id} ended, and its gateway knows it"),
                // FinishAttempt will report the end.
                Some(Phase::Ended) if lease.state != LeaseState::Ending => {
                    assert!(!has_ended, "{id} ended without FinishAttempt");
                }
                Some(phase) => {
                    let is_news = *phase as i64 > lease.phase && !is_given_up;
                    if has_ended || now_there.phase != lease.phase {
                        assert!(is_news || (*phase == Phase::Ended && has_ended), "{id} has not changed");
                        let workload = lease.workload.expect("a lease of an attempt");
                        self.observe(workload, *phase as i64, step_result.now);
                    } else {
                        assert!(!has_to_be || !is_news, "the phase of {id} was not raised: {phase:?}");
                    }
                }
            }
        }
    }

    /// Processes that the gateway runs nothing under a live lease.
    fn lose_unknown_lease(&mut self, id: LeaseId, step_result: &StepResult<'_>) {
        let workload = self.leases[&id].workload.filter(|_| self.given_up_lease(id).is_none());
        let Some(workload) = workload else {
            return self.end_lease(id, EndedBy::Lost, step_result.now);
        };
        assert_ne!(self.workloads[&workload].state, Progress::Finished, "a finished workload has no lease");
        self.end_attempt(workload, End::Unknown, step_result.now);
    }
}
