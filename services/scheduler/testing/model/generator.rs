//! The generator of random steps, most of which make sense in the present state.

use std::collections::BTreeMap;

use domain::worker::LeaseClaims;
use domain::workload::{Exit, FailureReason};
use domain::{GatewayInstance, LeaseId, MarkerId, WorkloadId};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use uuid::Uuid;

use super::World;
use super::attempts::Report;
use super::fixtures::{self, Uses, WORKERS};
use super::gateways::{OpenStream, SentReport};
use super::operations::{Call, Step};
use super::state::Minutes;
use crate::db::entity::lease::Kind;
use crate::lifecycle::departure::Withdrawal;
use crate::workloads::Phase;

/// Waiting times of calls, in minutes.
const WAITS: [Minutes; 3] = [5, 25, 45];

/// Returns the id of one of two gateways.
pub(super) fn instance(number: u128) -> GatewayInstance {
    GatewayInstance::from_uuid(Uuid::from_u128(number))
}

#[derive(Debug, Clone, Copy)]
enum StepKind {
    Registration,
    Attend,
    SendReport,
    Misfit,
    SignOff,
    Heard,
    Pass,
    ExtendTerms,
    Expire,
    Down,
    Run,
    Prune,
    Depart,
    EndStranded,
    Submit,
    Place,
    PlaceAgain,
    Disconnect,
    EndWaits,
    Renew,
    Use,
    Release,
    Dispatch,
    Start,
    Finish,
    Observe,
    Absent,
    Cancel,
    Deliver,
    Reconcile,
}

/// The mix of steps during a part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mix {
    Any,
    /// More requests than room, and few other changes.
    Busy,
    /// Most attempts fail, and workers change.
    Failing,
    /// Gateways report and receive desired states.
    Spoken,
    /// Workers with running attempts fall silent and are lost.
    Lost,
}

/// The order of mixes.
pub(super) const MIXES: [Mix; 5] = [Mix::Any, Mix::Busy, Mix::Spoken, Mix::Lost, Mix::Failing];

impl Mix {
    /// Returns the share of operations that are killed.
    pub(super) fn kills(self) -> f64 {
        match self {
            Self::Any => 0.25,
            Self::Busy | Self::Spoken => 0.05,
            Self::Lost => 0.1,
            Self::Failing => 0.15,
        }
    }
}

impl World {
    /// Returns the next id, reproducible from the seed. The bytes of the id determine its
    /// requirements.
    fn id(dice: &mut StdRng, made: &mut u64) -> Uuid {
        *made += 1;
        uuid::Builder::from_unix_timestamp_millis(*made, &dice.random()).into_uuid()
    }

    /// Returns an element, mostly a recent one.
    fn some<T: Clone>(dice: &mut StdRng, of: &[T]) -> Option<T> {
        let recent = if dice.random_bool(0.8) { of.len().saturating_sub(6) } else { 0 };
        of[recent..].choose(dice).cloned()
    }

    /// Returns the claims of an attempt, mostly of a live one.
    fn claims(&mut self) -> Option<LeaseClaims> {
        let live: Vec<_> = self
            .known
            .claims
            .iter()
            .filter(|claims| self.model.live_workload(claims).is_some())
            .cloned()
            .collect();
        let of = if live.is_empty() || self.dice.random_bool(0.3) { &self.known.claims } else { &live };
        Self::some(&mut self.dice, of)
    }

    /// Creates a report about the received desired states, mostly the last one. `lacks`:
    /// probability that a lease is missing.
    fn report(dice: &mut StdRng, stream: &OpenStream, claims: &[LeaseClaims], lacks: f64) -> SentReport {
        let newest = stream.received.last().filter(|_| dice.random_bool(0.8));
        let state = newest
            .or_else(|| stream.received.choose(dice))
            .expect("a registered gateway has a desired state");
        let phases = [
            Phase::Preparing,
            Phase::Preparing,
            Phase::Running,
            Phase::Running,
            Phase::Publishing,
            Phase::Ended,
        ];
        let mut report = SentReport { echo: state.generation, phases: BTreeMap::new() };
        for id in state.actions.keys().copied() {
            if !dice.random_bool(lacks) {
                report.phases.insert(id, *phases.choose(dice).expect("some"));
            }
        }
        // A lease that has ended.
        if let Some(claims) = Self::some(dice, claims).filter(|_| dice.random_bool(0.1)) {
            report.phases.insert(claims.lease, Phase::Running);
        }
        // A gateway that has not processed everything.
        if dice.random_bool(0.15) {
            report.echo = stream.received.choose(dice).map_or(0, |state| state.generation);
        }
        report
    }

    /// Returns `None` if the drawn step is impossible now.
    pub(super) fn next(&mut self) -> Option<Step> {
        if let Some(step) = self.up_next.take() {
            return Some(step);
        }
        let (is_busy, is_failing) = (self.mix == Mix::Busy, self.mix == Mix::Failing);
        let claims = self.claims();
        let dice = &mut self.dice;
        let weights = [
            (StepKind::Registration, 3),
            (StepKind::Attend, 4),
            (StepKind::SendReport, 10),
            (StepKind::Misfit, 1),
            (StepKind::SignOff, 2),
            (StepKind::Heard, 10),
            (StepKind::Pass, 5),
            (StepKind::ExtendTerms, 1),
            (StepKind::Expire, 7),
            (StepKind::Down, 3),
            (StepKind::Run, 5),
            (StepKind::Prune, 1),
            (StepKind::Depart, 5),
            (StepKind::EndStranded, 3),
            (StepKind::Submit, 20),
            (StepKind::Place, 10),
            (StepKind::PlaceAgain, 3),
            (StepKind::Disconnect, 1),
            (StepKind::EndWaits, 2),
            (StepKind::Renew, 3),
            (StepKind::Use, 4),
            (StepKind::Release, 6),
            (StepKind::Dispatch, 10),
            (StepKind::Start, 14),
            (StepKind::Finish, 16),
            (StepKind::Observe, 10),
            (StepKind::Absent, 2),
            (StepKind::Cancel, 4),
            (StepKind::Deliver, 5),
            (StepKind::Reconcile, 3),
        ];
        let when_failing = [
            (StepKind::Registration, 8),
            (StepKind::Attend, 4),
            (StepKind::SendReport, 4),
            (StepKind::Heard, 14),
            (StepKind::Pass, 8),
            (StepKind::Expire, 2),
            (StepKind::Down, 5),
            (StepKind::Run, 2),
            (StepKind::Depart, 14),
            (StepKind::Submit, 18),
            (StepKind::Place, 3),
            (StepKind::Dispatch, 16),
            (StepKind::Start, 5),
            (StepKind::Finish, 26),
            (StepKind::Observe, 2),
        ];
        let when_busy = [
            (StepKind::Registration, 5),
            (StepKind::Heard, 4),
            (StepKind::Run, 4),
            (StepKind::Submit, 14),
            (StepKind::Place, 22),
            (StepKind::PlaceAgain, 18),
            (StepKind::Disconnect, 1),
            (StepKind::EndWaits, 1),
            (StepKind::Release, 16),
            (StepKind::Dispatch, 16),
            (StepKind::Start, 4),
            (StepKind::Finish, 16),
            (StepKind::Cancel, 5),
        ];
        let when_spoken = [
            (StepKind::Registration, 6),
            (StepKind::Attend, 10),
            (StepKind::SendReport, 60),
            (StepKind::SignOff, 9),
            (StepKind::Heard, 3),
            (StepKind::Expire, 1),
            (StepKind::Down, 3),
            (StepKind::Run, 5),
            (StepKind::Depart, 3),
            (StepKind::Submit, 26),
            (StepKind::Place, 20),
            (StepKind::Use, 20),
            (StepKind::Release, 20),
            (StepKind::Dispatch, 20),
            (StepKind::Start, 8),
            (StepKind::Finish, 5),
            (StepKind::Cancel, 8),
        ];
        let when_lost = [
            (StepKind::Registration, 8),
            (StepKind::Attend, 4),
            (StepKind::SendReport, 4),
            (StepKind::Heard, 3),
            (StepKind::Pass, 7),
            (StepKind::Expire, 14),
            (StepKind::Prune, 2),
            (StepKind::Depart, 8),
            (StepKind::EndStranded, 3),
            (StepKind::Submit, 20),
            (StepKind::Place, 6),
            (StepKind::Use, 8),
            (StepKind::Dispatch, 14),
            (StepKind::Start, 34),
            (StepKind::Finish, 6),
            (StepKind::Absent, 2),
            (StepKind::Cancel, 2),
        ];
        let weights = match self.mix {
            Mix::Any => &weights[..],
            Mix::Busy => &when_busy,
            Mix::Failing => &when_failing,
            Mix::Spoken => &when_spoken,
            Mix::Lost => &when_lost,
        };
        // A superseded session whose replica does not know yet.
        let is_over = |stream: &&OpenStream| self.model.check_session(&stream.session).is_err();
        let over: Vec<_> = self.known.streams.iter().filter(|(_, stream)| is_over(stream)).collect();
        if let Some((number, stream)) = over.choose(dice)
            && dice.random_bool(0.6)
        {
            let report = Self::report(dice, stream, &self.known.claims, 0.5);
            return Some(Step::SendReport { stream: **number, report, is_fresh: dice.random_bool(0.2) });
        }
        let (draw, _) = weights.choose_weighted(dice, |(_, weight)| *weight).expect("some weights");
        let name = *WORKERS.choose(dice).expect("some");
        let known = &mut self.known;
        Some(match draw {
            StepKind::Registration | StepKind::Misfit | StepKind::Attend => {
                // One of two gateways, mostly with the present contents of the worker.
                let instance = instance(dice.random_range(1..=2));
                let markers = known.markers.entry(name).or_default();
                if markers.is_empty() || dice.random_bool(0.2) {
                    markers.push(MarkerId::new());
                }
                let marker = if dice.random_bool(0.9) { markers.last() } else { markers.choose(dice) };
                let marker = *marker.expect("a marker");
                let last = Self::some(dice, &known.sessions).filter(|_| dice.random_bool(0.3));
                let mut registration = fixtures::registration(name, instance, marker, last);
                if dice.random_bool(0.05) {
                    registration.labels.team = Some("third".to_owned());
                }
                let registration = Box::new(registration);
                match draw {
                    StepKind::Registration => Step::Registration(registration),
                    StepKind::Misfit => Step::Misfit(registration),
                    _ => {
                        self.opened += 1;
                        Step::Attend { stream: self.opened, registration }
                    }
                }
            }
            StepKind::SendReport => {
                let numbers: Vec<_> = known.streams.keys().copied().collect();
                let has_some = |number: &usize| {
                    known.streams[number].received.last().is_some_and(|state| !state.actions.is_empty())
                };
                let of_some: Vec<_> = numbers.iter().copied().filter(has_some).collect();
                let of_some = Self::some(dice, &of_some).filter(|_| dice.random_bool(0.8));
                let number = of_some.or_else(|| Self::some(dice, &numbers))?;
                let stream = &known.streams[&number];
                let again = stream.sent.choose(dice).filter(|_| dice.random_bool(0.2)).cloned();
                let report = again.unwrap_or_else(|| Self::report(dice, stream, &known.claims, 0.15));
                Step::SendReport { stream: number, report, is_fresh: dice.random_bool(0.7) }
            }
            StepKind::SignOff if self.mix == Mix::Spoken => {
                let streams = known.streams.values();
                let present = |stream: &&OpenStream| self.model.check_session(&stream.session).is_ok();
                let present: Vec<_> = streams.filter(present).map(|stream| stream.session.clone()).collect();
                let session = present.choose(dice)?.clone();
                // Another gateway takes over, which the first stream has not noticed.
                let name = WORKERS.into_iter().find(|name| self.model.name(session.worker) == Some(*name))?;
                let marker = self.model.workers[name].marker;
                let other = if session.instance == instance(1) { instance(2) } else { instance(1) };
                let last = Some(session.clone()).filter(|_| dice.random_bool(0.5));
                let registration = Box::new(fixtures::registration(name, other, marker, last));
                self.up_next = dice.random_bool(0.8).then_some(Step::Registration(registration));
                Step::SignOff { session, is_last: true }
            }
            StepKind::SignOff => {
                let session = Self::some(dice, &known.sessions)?;
                // A late disconnect follows other messages.
                let is_last = self.model.check_session(&session).is_ok() && dice.random_bool(0.7);
                Step::SignOff { session, is_last }
            }
            StepKind::Heard => Step::Heard(Self::some(dice, &known.sessions)?),
            StepKind::Pass if self.mix == Mix::Lost => Step::Pass(*[40, 100].choose(dice).expect("some")),
            StepKind::Pass if is_failing => Step::Pass(*[10, 20, 30].choose(dice).expect("some")),
            StepKind::Pass => Step::Pass(*[10, 10, 20, 30, 40, 100, 1000].choose(dice).expect("some")),
            StepKind::ExtendTerms => Step::ExtendTerms,
            StepKind::Expire => Step::Expire,
            StepKind::Down => {
                let retire = Withdrawal::Retire { force: dice.random_bool(0.5) };
                let down = if dice.random_bool(0.8) { Withdrawal::Cordon } else { retire };
                let interrupt_after = dice.random_bool(0.6).then(|| dice.random_range(0..3) * 10 + 5);
                Step::Down { name, down, interrupt_after }
            }
            StepKind::Run => Step::Run(name),
            StepKind::Prune => Step::Prune(name),
            StepKind::Depart => Step::Depart,
            StepKind::EndStranded => Step::EndStranded,
            StepKind::Submit => {
                let there: Vec<_> = self.model.workloads.keys().copied().collect();
                let again = Self::some(dice, &there).filter(|_| dice.random_bool(0.2));
                let taken = Self::some(dice, &known.driven).filter(|_| dice.random_bool(0.1));
                let taken = taken.map(|(id, _)| WorkloadId::from_uuid(id.uuid()));
                // After the scheduler has deleted an id, the artifact store treats a settlement of
                // the same id as a repeat.
                let taken = taken.filter(|id| fixtures::uses(*id) != Uses::Output);
                let new = WorkloadId::from_uuid(Self::id(dice, &mut self.ids));
                let id = again.or(taken).unwrap_or(new);
                let other = again.is_some() && dice.random_bool(0.3);
                Step::Submit { id, other, is_fresh: dice.random_bool(0.7) }
            }
            StepKind::Place => {
                let kinds = [Kind::Task, Kind::Service, Kind::Check, Kind::Transfer];
                let kinds = if is_busy { &kinds[..3] } else { &kinds };
                let (is_several, is_near, has_time) =
                    if is_busy { (0.05, 0.05, 0.9) } else { (0.3, 0.3, 0.7) };
                let mut new = || {
                    let id = LeaseId::from_uuid(Self::id(dice, &mut self.ids));
                    (id, *kinds.choose(dice).expect("some"))
                };
                let (mut one, other) = (new(), new());
                let there: Vec<_> = self.model.workloads.keys().copied().collect();
                let taken = Self::some(dice, &there).filter(|_| dice.random_bool(0.15));
                one.0 = taken.map_or(one.0, |id| LeaseId::from_uuid(id.uuid()));
                let again = Self::some(dice, &known.driven).filter(|_| dice.random_bool(0.2));
                let together = again.is_none() && dice.random_bool(if is_busy { 0.15 } else { 0.4 });
                let items = match again {
                    Some((id, _)) if dice.random_bool(0.2) => vec![(id, one.1)],
                    Some(again) => vec![again],
                    None if together || dice.random_bool(is_several) => vec![one, other],
                    None => vec![one],
                };
                let live: Vec<_> = self.model.leases.keys().copied().collect();
                let near = match again {
                    Some((id, _)) if dice.random_bool(0.9) => known.near.get(&id).copied().flatten(),
                    _ if items.len() == 1 && dice.random_bool(is_near) => Self::some(dice, &live),
                    _ => None,
                };
                // A call with several groups must not wait, because granted leases could expire.
                let may_wait = (together || items.len() == 1) && dice.random_bool(has_time);
                let wait = if may_wait { *WAITS.choose(dice).expect("some") } else { 0 };
                self.calls += 1;
                let call = Call { number: self.calls, items, together, near, wait };
                Step::Place { call, is_fresh: dice.random_bool(0.5) }
            }
            StepKind::PlaceAgain => {
                let waiting = self.model.waiting.choose(dice).filter(|_| dice.random_bool(0.8));
                let waiting = waiting.map(|waiting| waiting.call.clone());
                let mut call = waiting.or_else(|| Self::some(dice, &known.patient))?;
                self.calls += 1;
                call.number = self.calls;
                call.wait = *WAITS.choose(dice).expect("some");
                if dice.random_bool(0.1) {
                    call.items[0].1 = Kind::Service;
                }
                Step::Place { call, is_fresh: dice.random_bool(0.5) }
            }
            StepKind::Disconnect => {
                let callers: Vec<_> = self.model.waiting.iter().flat_map(|known| known.callers()).collect();
                Step::Disconnect { call: *callers.choose(dice)? }
            }
            StepKind::EndWaits => {
                let minutes = *[0, 10, 30].choose(dice).expect("some");
                Step::EndWaits { minutes, looks: dice.random_bool(0.5) }
            }
            StepKind::Renew => Step::Renew(Self::some(dice, &known.driven)?.0),
            StepKind::Use | StepKind::Release => {
                let driven =
                    self.model.leases.iter().filter(|(_, lease)| lease.workload.is_none() && lease.is_live());
                let driven: Vec<_> = driven.map(|(id, _)| *id).collect();
                let live = driven.choose(dice).copied().filter(|_| dice.random_bool(0.6));
                let lease = live.or_else(|| Some(Self::some(dice, &known.driven)?.0))?;
                match draw {
                    StepKind::Use => Step::Use(lease),
                    _ => Step::Release { lease, is_fresh: dice.random_bool(0.5) },
                }
            }
            StepKind::Dispatch => Step::Dispatch,
            StepKind::Start => Step::Start(claims?),
            StepKind::Finish => {
                let code = Some(Exit::Code(dice.random_range(0..2)));
                let (exit, failure) = match dice.random_range(0..19) {
                    _ if is_failing && dice.random_bool(0.7) => (None, Some(FailureReason::StartFailed)),
                    0 | 1 | 9 => (None, Some(FailureReason::StartFailed)),
                    10 => (None, Some(FailureReason::WorkerUnreachable)),
                    11 => (None, Some(FailureReason::InputDamaged)),
                    12 => (None, Some(FailureReason::InputUnreachable)),
                    2 => (None, Some(FailureReason::WorkerFull)),
                    3 => (None, Some(FailureReason::DiskFull)),
                    4 => (None, Some(FailureReason::ExitUnknown)),
                    5 => (Some(Exit::Signal(15)), Some(FailureReason::ContactLost)),
                    6 | 7 => (Some(Exit::Signal(15)), Some(FailureReason::Interrupted)),
                    8 => (None, None),
                    _ => (code, None),
                };
                let claims = claims?;
                let makes = claims.attempt.is_some_and(|(id, _)| fixtures::uses(id) == Uses::Output);
                let has_outputs = makes && exit.is_some() && dice.random_bool(0.8);
                Step::Finish { claims, report: Report { exit, failure, has_outputs } }
            }
            StepKind::Observe => {
                let phases = [Phase::Preparing, Phase::Running, Phase::Publishing, Phase::Ended];
                let phase = *phases.choose(dice).expect("some");
                Step::Observe { claims: claims?, phase }
            }
            StepKind::Absent => Step::Absent(claims?),
            StepKind::Cancel => {
                let there: Vec<_> = known.submitted.iter().copied().collect();
                let id = Self::some(dice, &there)?;
                let theirs = fixtures::requirements_of_workload(id).team;
                let team = if dice.random_bool(0.9) { theirs } else { "third" };
                Step::Cancel { id, grace: dice.random_range(0..20), team }
            }
            StepKind::Deliver => Step::Deliver,
            StepKind::Reconcile => Step::Reconcile,
        })
    }
}
