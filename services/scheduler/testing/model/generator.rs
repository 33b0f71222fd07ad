//! What is done next: mostly something that makes sense.

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
use super::gateways::{Attended, Observed};
use super::operations::{Call, Step};
use super::state::Minutes;
use crate::db::entity::lease::Kind;
use crate::lifecycle::departure::Withdrawal;
use crate::workloads::Phase;

/// For how many minutes a call waits.
const WAITS: [Minutes; 3] = [5, 25, 45];

/// One of two gateways.
pub(super) fn instance(number: u128) -> GatewayInstance {
    GatewayInstance::from_uuid(Uuid::from_u128(number))
}

#[derive(Debug, Clone, Copy)]
enum Draw {
    Hello,
    Attend,
    Say,
    Misfit,
    Goodbye,
    Heard,
    Pass,
    BePatient,
    Expire,
    Down,
    Run,
    Prune,
    SeeOff,
    EndOrphans,
    Submit,
    Place,
    PlaceAgain,
    GoAway,
    EndPatience,
    Renew,
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

/// Of what is drawn for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spell {
    Any,
    /// More is asked for than there is room for, and otherwise little changes.
    Busy,
    /// What is started mostly fails, and workers come and go.
    Failing,
    /// Gateways speak, and hear what they shall do.
    Spoken,
    /// Workers fall silent with what they run, and are lost.
    Lost,
}

/// Which comes after which.
pub(super) const SPELLS: [Spell; 5] = [Spell::Any, Spell::Busy, Spell::Spoken, Spell::Lost, Spell::Failing];

impl Spell {
    /// How many operations are killed.
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
    /// The next id, of which the same seed says the same: what is asked for under it is in its bytes.
    fn id(dice: &mut StdRng, made: &mut u64) -> Uuid {
        *made += 1;
        uuid::Builder::from_unix_timestamp_millis(*made, &dice.random()).into_uuid()
    }

    /// Mostly one of the last.
    fn some<T: Clone>(dice: &mut StdRng, of: &[T]) -> Option<T> {
        let recent = if dice.random_bool(0.8) { of.len().saturating_sub(6) } else { 0 };
        of[recent..].choose(dice).cloned()
    }

    /// Of an attempt, mostly of one that goes on.
    fn claims(&mut self) -> Option<LeaseClaims> {
        let held: Vec<_> =
            self.known.claims.iter().filter(|claims| self.model.held(claims).is_some()).cloned().collect();
        let of = if held.is_empty() || self.dice.random_bool(0.3) { &self.known.claims } else { &held };
        Self::some(&mut self.dice, of)
    }

    /// What a gateway says that took up what it was told, mostly last.
    /// `lacks`: how many of the leases it does not know.
    fn says(dice: &mut StdRng, stream: &Attended, claims: &[LeaseClaims], lacks: f64) -> Observed {
        let newest = stream.told.last().filter(|_| dice.random_bool(0.8));
        let told = newest.or_else(|| stream.told.choose(dice)).expect("who is let in is told something");
        let phases = [
            Phase::Preparing,
            Phase::Preparing,
            Phase::Running,
            Phase::Running,
            Phase::Publishing,
            Phase::Ended,
        ];
        let mut said = Observed { echo: told.generation, phases: BTreeMap::new() };
        for id in told.wishes.keys().copied() {
            if !dice.random_bool(lacks) {
                said.phases.insert(id, *phases.choose(dice).expect("some"));
            }
        }
        // It holds what is over.
        if let Some(claims) = Self::some(dice, claims).filter(|_| dice.random_bool(0.1)) {
            said.phases.insert(claims.lease, Phase::Running);
        }
        // It has taken up less than it was told.
        if dice.random_bool(0.15) {
            said.echo = stream.told.choose(dice).map_or(0, |told| told.generation);
        }
        said
    }

    /// `None`: what was drawn cannot be done now.
    pub(super) fn next(&mut self) -> Option<Step> {
        if let Some(step) = self.up_next.take() {
            return Some(step);
        }
        let (is_busy, is_failing) = (self.spell == Spell::Busy, self.spell == Spell::Failing);
        let claims = self.claims();
        let dice = &mut self.dice;
        let weights = [
            (Draw::Hello, 3),
            (Draw::Attend, 4),
            (Draw::Say, 10),
            (Draw::Misfit, 1),
            (Draw::Goodbye, 2),
            (Draw::Heard, 10),
            (Draw::Pass, 5),
            (Draw::BePatient, 1),
            (Draw::Expire, 7),
            (Draw::Down, 3),
            (Draw::Run, 5),
            (Draw::Prune, 1),
            (Draw::SeeOff, 5),
            (Draw::EndOrphans, 3),
            (Draw::Submit, 20),
            (Draw::Place, 10),
            (Draw::PlaceAgain, 3),
            (Draw::GoAway, 1),
            (Draw::EndPatience, 2),
            (Draw::Renew, 3),
            (Draw::Release, 6),
            (Draw::Dispatch, 10),
            (Draw::Start, 14),
            (Draw::Finish, 16),
            (Draw::Observe, 10),
            (Draw::Absent, 2),
            (Draw::Cancel, 4),
            (Draw::Deliver, 5),
            (Draw::Reconcile, 3),
        ];
        let when_failing = [
            (Draw::Hello, 8),
            (Draw::Attend, 4),
            (Draw::Say, 4),
            (Draw::Heard, 14),
            (Draw::Pass, 8),
            (Draw::Expire, 2),
            (Draw::Down, 5),
            (Draw::Run, 2),
            (Draw::SeeOff, 14),
            (Draw::Submit, 18),
            (Draw::Place, 3),
            (Draw::Dispatch, 16),
            (Draw::Start, 5),
            (Draw::Finish, 26),
            (Draw::Observe, 2),
        ];
        let when_busy = [
            (Draw::Hello, 5),
            (Draw::Heard, 4),
            (Draw::Run, 4),
            (Draw::Submit, 14),
            (Draw::Place, 22),
            (Draw::PlaceAgain, 18),
            (Draw::GoAway, 1),
            (Draw::EndPatience, 1),
            (Draw::Release, 16),
            (Draw::Dispatch, 16),
            (Draw::Start, 4),
            (Draw::Finish, 16),
            (Draw::Cancel, 5),
        ];
        let when_spoken = [
            (Draw::Hello, 6),
            (Draw::Attend, 10),
            (Draw::Say, 60),
            (Draw::Goodbye, 9),
            (Draw::Heard, 3),
            (Draw::Expire, 1),
            (Draw::Down, 3),
            (Draw::Run, 5),
            (Draw::SeeOff, 3),
            (Draw::Submit, 26),
            (Draw::Place, 20),
            (Draw::Release, 20),
            (Draw::Dispatch, 20),
            (Draw::Start, 8),
            (Draw::Finish, 5),
            (Draw::Cancel, 8),
        ];
        let when_lost = [
            (Draw::Hello, 8),
            (Draw::Attend, 4),
            (Draw::Say, 4),
            (Draw::Heard, 3),
            (Draw::Pass, 7),
            (Draw::Expire, 14),
            (Draw::Prune, 2),
            (Draw::SeeOff, 8),
            (Draw::EndOrphans, 3),
            (Draw::Submit, 20),
            (Draw::Dispatch, 14),
            (Draw::Start, 34),
            (Draw::Finish, 6),
            (Draw::Absent, 2),
            (Draw::Cancel, 2),
        ];
        let weights = match self.spell {
            Spell::Any => &weights[..],
            Spell::Busy => &when_busy,
            Spell::Failing => &when_failing,
            Spell::Spoken => &when_spoken,
            Spell::Lost => &when_lost,
        };
        // It was taken over, and nobody knows that where it speaks.
        let is_over = |stream: &&Attended| self.model.judge(&stream.session).is_err();
        let over: Vec<_> = self.known.streams.iter().filter(|(_, stream)| is_over(stream)).collect();
        if let Some((number, stream)) = over.choose(dice)
            && dice.random_bool(0.6)
        {
            let said = Self::says(dice, stream, &self.known.claims, 0.5);
            return Some(Step::Say { stream: **number, said, is_fresh: dice.random_bool(0.2) });
        }
        let (draw, _) = weights.choose_weighted(dice, |(_, weight)| *weight).expect("some weights");
        let name = *WORKERS.choose(dice).expect("some");
        let known = &mut self.known;
        Some(match draw {
            Draw::Hello | Draw::Misfit | Draw::Attend => {
                // One of two gateways, which mostly finds what it left, or another did.
                let instance = instance(dice.random_range(1..=2));
                let markers = known.markers.entry(name).or_default();
                if markers.is_empty() || dice.random_bool(0.2) {
                    markers.push(MarkerId::new());
                }
                let marker = if dice.random_bool(0.9) { markers.last() } else { markers.choose(dice) };
                let marker = *marker.expect("there is one");
                let last = Self::some(dice, &known.sessions).filter(|_| dice.random_bool(0.3));
                let mut hello = fixtures::hello(name, instance, marker, last);
                if dice.random_bool(0.05) {
                    hello.labels.team = Some("third".to_owned());
                }
                let hello = Box::new(hello);
                match draw {
                    Draw::Hello => Step::Hello(hello),
                    Draw::Misfit => Step::Misfit(hello),
                    _ => {
                        self.opened += 1;
                        Step::Attend { stream: self.opened, hello }
                    }
                }
            }
            Draw::Say => {
                let numbers: Vec<_> = known.streams.keys().copied().collect();
                let has_some = |number: &usize| {
                    known.streams[number].told.last().is_some_and(|told| !told.wishes.is_empty())
                };
                let of_some: Vec<_> = numbers.iter().copied().filter(has_some).collect();
                let of_some = Self::some(dice, &of_some).filter(|_| dice.random_bool(0.8));
                let number = of_some.or_else(|| Self::some(dice, &numbers))?;
                let stream = &known.streams[&number];
                let again = stream.said.choose(dice).filter(|_| dice.random_bool(0.2)).cloned();
                let said = again.unwrap_or_else(|| Self::says(dice, stream, &known.claims, 0.15));
                Step::Say { stream: number, said, is_fresh: dice.random_bool(0.7) }
            }
            Draw::Goodbye if self.spell == Spell::Spoken => {
                let streams = known.streams.values();
                let present = |stream: &&Attended| self.model.judge(&stream.session).is_ok();
                let present: Vec<_> = streams.filter(present).map(|stream| stream.session.clone()).collect();
                let session = present.choose(dice)?.clone();
                // Another takes over, of which the first stream has not heard.
                let name = WORKERS.into_iter().find(|name| self.model.name(session.worker) == Some(*name))?;
                let marker = self.model.workers[name].marker;
                let other = if session.instance == instance(1) { instance(2) } else { instance(1) };
                let last = Some(session.clone()).filter(|_| dice.random_bool(0.5));
                let hello = Box::new(fixtures::hello(name, other, marker, last));
                self.up_next = dice.random_bool(0.8).then_some(Step::Hello(hello));
                Step::Goodbye { session, is_last: true }
            }
            Draw::Goodbye => {
                let session = Self::some(dice, &known.sessions)?;
                // What is said late comes after something else was heard.
                let is_last = self.model.judge(&session).is_ok() && dice.random_bool(0.7);
                Step::Goodbye { session, is_last }
            }
            Draw::Heard => Step::Heard(Self::some(dice, &known.sessions)?),
            Draw::Pass if self.spell == Spell::Lost => Step::Pass(*[40, 100].choose(dice).expect("some")),
            Draw::Pass if is_failing => Step::Pass(*[10, 20, 30].choose(dice).expect("some")),
            Draw::Pass => Step::Pass(*[10, 10, 20, 30, 40, 100, 1000].choose(dice).expect("some")),
            Draw::BePatient => Step::BePatient,
            Draw::Expire => Step::Expire,
            Draw::Down => {
                let retire = Withdrawal::Retire { force: dice.random_bool(0.5) };
                let down = if dice.random_bool(0.8) { Withdrawal::Cordon } else { retire };
                let interrupt_after = dice.random_bool(0.6).then(|| dice.random_range(0..3) * 10 + 5);
                Step::Down { name, down, interrupt_after }
            }
            Draw::Run => Step::Run(name),
            Draw::Prune => Step::Prune(name),
            Draw::SeeOff => Step::SeeOff,
            Draw::EndOrphans => Step::EndOrphans,
            Draw::Submit => {
                let there: Vec<_> = self.model.workloads.keys().copied().collect();
                let again = Self::some(dice, &there).filter(|_| dice.random_bool(0.2));
                let taken = Self::some(dice, &known.driven).filter(|_| dice.random_bool(0.1));
                let taken = taken.map(|(id, _)| WorkloadId::from_uuid(id.uuid()));
                // Of an id that was used, forgotten here, and used again the artifact store takes what is settled for a repeat.
                let taken = taken.filter(|id| fixtures::uses(*id) != Uses::Output);
                let new = WorkloadId::from_uuid(Self::id(dice, &mut self.ids));
                let id = again.or(taken).unwrap_or(new);
                let other = again.is_some() && dice.random_bool(0.3);
                Step::Submit { id, other, is_fresh: dice.random_bool(0.7) }
            }
            Draw::Place => {
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
                let asks = match again {
                    Some((id, _)) if dice.random_bool(0.2) => vec![(id, one.1)],
                    Some(again) => vec![again],
                    None if together || dice.random_bool(is_several) => vec![one, other],
                    None => vec![one],
                };
                let live: Vec<_> = self.model.leases.keys().copied().collect();
                let near = match again {
                    Some((id, _)) if dice.random_bool(0.9) => known.near.get(&id).copied().flatten(),
                    _ if asks.len() == 1 && dice.random_bool(is_near) => Self::some(dice, &live),
                    _ => None,
                };
                // Nobody waits for one of several while another is granted and may run out.
                let may_wait = (together || asks.len() == 1) && dice.random_bool(has_time);
                let wait = if may_wait { *WAITS.choose(dice).expect("some") } else { 0 };
                self.calls += 1;
                let call = Call { number: self.calls, asks, together, near, wait };
                Step::Place { call, is_fresh: dice.random_bool(0.5) }
            }
            Draw::PlaceAgain => {
                let waiting = self.model.waiting.choose(dice).filter(|_| dice.random_bool(0.8));
                let waiting = waiting.map(|waiting| waiting.call.clone());
                let mut call = waiting.or_else(|| Self::some(dice, &known.patient))?;
                self.calls += 1;
                call.number = self.calls;
                call.wait = *WAITS.choose(dice).expect("some");
                if dice.random_bool(0.1) {
                    call.asks[0].1 = Kind::Service;
                }
                Step::Place { call, is_fresh: dice.random_bool(0.5) }
            }
            Draw::GoAway => {
                let callers: Vec<_> = self.model.waiting.iter().flat_map(|known| known.callers()).collect();
                Step::GoAway { call: *callers.choose(dice)? }
            }
            Draw::EndPatience => {
                let minutes = *[0, 10, 30].choose(dice).expect("some");
                Step::EndPatience { minutes, looks: dice.random_bool(0.5) }
            }
            Draw::Renew => Step::Renew(Self::some(dice, &known.driven)?.0),
            Draw::Release => {
                let driven =
                    self.model.leases.iter().filter(|(_, lease)| lease.workload.is_none() && lease.is_live());
                let driven: Vec<_> = driven.map(|(id, _)| *id).collect();
                let live = driven.choose(dice).copied().filter(|_| dice.random_bool(0.6));
                let lease = live.or_else(|| Some(Self::some(dice, &known.driven)?.0))?;
                Step::Release { lease, is_fresh: dice.random_bool(0.5) }
            }
            Draw::Dispatch => Step::Dispatch,
            Draw::Start => Step::Start(claims?),
            Draw::Finish => {
                let code = Some(Exit::Code(dice.random_range(0..2)));
                let (exit, failure) = match dice.random_range(0..19) {
                    _ if is_failing && dice.random_bool(0.7) => (None, Some(FailureReason::StartFailed)),
                    0 | 1 | 9 | 10 => (None, Some(FailureReason::StartFailed)),
                    11 => (None, Some(FailureReason::InputDamaged)),
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
            Draw::Observe => {
                let phases = [Phase::Preparing, Phase::Running, Phase::Publishing, Phase::Ended];
                let phase = *phases.choose(dice).expect("some");
                Step::Observe { claims: claims?, phase }
            }
            Draw::Absent => Step::Absent(claims?),
            Draw::Cancel => {
                let there: Vec<_> = known.submitted.iter().copied().collect();
                let id = Self::some(dice, &there)?;
                let theirs = fixtures::asks_of_workload(id).team;
                let team = if dice.random_bool(0.9) { theirs } else { "third" };
                Step::Cancel { id, grace: dice.random_range(0..20), team }
            }
            Draw::Deliver => Step::Deliver,
            Draw::Reconcile => Step::Reconcile,
        })
    }
}
