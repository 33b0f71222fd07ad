//! What gateways are told on their streams, and what becomes of what they say there: messages may be late, doubled and out of order, and so may be
//! the generations that they echo.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::SessionClaims;
use domain::{LeaseId, WorkerId};
use rpc::pb::scheduler as pb;

use super::attempts::End;
use super::oracle::Came;
use super::state::{Lease, State};
use super::stream::Heartbeat;
use crate::db::entity::lease::{EndedBy, State as LeaseState};
use crate::db::entity::worker::State as Contact;
use crate::db::entity::workload::State as Progress;
use crate::workloads::Phase;

/// What a gateway shall do about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Run,
    /// With so many seconds of grace.
    Stop(i64),
}

/// What a gateway was told once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) generation: u64,
    pub(super) wishes: BTreeMap<LeaseId, Wish>,
}

/// What a gateway says of its leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Observed {
    /// The generation that it echoes.
    pub(super) echo: u64,
    pub(super) phases: BTreeMap<LeaseId, Phase>,
}

/// One stream, as its gateway knows it.
#[derive(Debug, Clone)]
pub(super) struct Attended {
    pub(super) replica: usize,
    pub(super) session: SessionClaims,
    /// What it was told, in this order.
    pub(super) told: Vec<Told>,
    /// What it has said.
    pub(super) said: Vec<Observed>,
}

/// `before`: what the stream said of the lease before, which holds where nothing is said.
fn wish(lease: &pb::DesiredLease, before: Option<Wish>) -> Wish {
    match &lease.wish {
        Some(pb::desired_lease::Wish::Run(_)) => {
            assert_eq!(before, None, "it is said once");
            Wish::Run
        }
        Some(pb::desired_lease::Wish::Stop(stop)) => {
            Wish::Stop(stop.grace.as_ref().map_or(0, |grace| grace.seconds))
        }
        None => before.expect("a wish"),
    }
}

impl Attended {
    /// Takes up what it is told.
    pub(super) fn hear(&mut self, heard: &Heartbeat) {
        for desired in &heard.desired {
            if desired.directive() == pb::Directive::RegisterAgain {
                continue;
            }
            let before = |id: &LeaseId| self.told.last().and_then(|told| told.wishes.get(id)).copied();
            let wishes = desired.leases.iter().map(|lease| {
                let id = lease.lease_id.parse().expect("an id");
                (id, wish(lease, before(&id)))
            });
            let wishes = wishes.collect();
            let told = Told { generation: desired.generation, wishes };
            assert!(self.newest() <= told.generation, "{told:?} is told after {:?}", self.told.last());
            self.told.push(told);
        }
    }

    /// The newest generation that it was told.
    pub(super) fn newest(&self) -> u64 {
        self.told.last().map_or(0, |told| told.generation)
    }

    /// Whether it has heard of a lease, as far as who hears its echo can tell.
    fn has_heard_of(&self, lease: LeaseId, echo: u64) -> bool {
        self.told.iter().any(|told| told.generation <= echo && told.wishes.contains_key(&lease))
    }
}

impl State {
    /// What a gateway shall do, if it speaks for its worker in this session.
    fn wishes(&self, session: &SessionClaims) -> BTreeMap<LeaseId, Wish> {
        let wish = |lease: &Lease| match lease.state {
            LeaseState::Ending => Wish::Stop(lease.grace.expect("it shall stop in some time")),
            _ => Wish::Run,
        };
        self.attempts_of(session).map(|(id, lease)| (id, wish(lease))).collect()
    }

    /// The leases of attempts that live there in this life of the worker.
    fn attempts_of(&self, session: &SessionClaims) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let incarnation = session.incarnation.0;
        let live = self.live(session.worker);
        live.filter(move |(_, lease)| lease.workload.is_some() && lease.incarnation == incarnation)
    }

    /// Who was told the newest generation knows every lease that lives on its worker, how it shall go on, and none that has ended.
    pub(super) fn check_told(
        &self,
        streams: &BTreeMap<usize, Attended>,
        generations: &BTreeMap<WorkerId, u64>,
    ) {
        for stream in streams.values().filter(|stream| self.judge(&stream.session).is_ok()) {
            let newest = generations[&stream.session.worker];
            let told = stream.told.last().expect("who is let in is told something");
            assert!(told.generation <= newest, "{told:?} is told before there is more than {newest}");
            if told.generation == newest {
                let shall = self.wishes(&stream.session);
                assert_eq!(told.wishes, shall, "{stream:#?} was told the newest generation");
            }
        }
    }

    /// A gateway says what is. `looked`: to a replica that has just looked.
    pub(super) fn observed(&mut self, stream: &Attended, said: &Observed, looked: bool, came: &Came<'_>) {
        let judged = self.judge(&stream.session);
        let was_answered = came.answer.is_some();
        if let Some(answer) = came.answer {
            match judged {
                Ok(_) => assert_eq!(answer.said, ["Ok"], "it speaks for its worker"),
                // It may not be known there yet. Of one that has gone a look says nothing, if none has seen it while it was there.
                Err(_)
                    if answer.said == ["Ok"] && (!looked || self.name(stream.session.worker).is_none()) => {}
                Err(refused) => assert_eq!(answer.said, [refused], "it speaks for nobody any more"),
            }
        }
        let is_heard = judged.is_ok();
        let has_to_be = looked && was_answered && is_heard;
        if let Ok(name) = &judged
            && came.after.workers.get(name).is_some_and(|now| now.attended && now.contact == Contact::Running)
        {
            self.heard(&stream.session, came.now);
        }
        let live: BTreeSet<_> = self.attempts_of(&stream.session).map(|(id, _)| id).collect();
        for id in live {
            let (lease, now_there) = (self.leases[&id].clone(), &came.after.leases[&id]);
            let has_ended = !now_there.is_live();
            let is_given_up = self.given_up(id).is_some();
            match said.phases.get(&id) {
                None => {
                    let has_heard = stream.has_heard_of(id, said.echo);
                    if has_ended {
                        assert!(has_heard, "{id} ended, of which {stream:#?} had not heard with {said:?}");
                        assert!(is_heard, "{stream:#?} speaks for nobody, and has ended {id}");
                        self.is_unknown_there(id, came);
                    } else {
                        assert!(
                            !has_to_be || !has_heard,
                            "{id} is not there, and {stream:#?} had heard of it"
                        );
                    }
                }
                Some(Phase::Ended) if is_given_up => {
                    if has_ended {
                        assert!(is_heard, "{stream:#?} speaks for nobody, and has ended {id}");
                        self.is_unknown_there(id, came);
                    } else {
                        assert!(!has_to_be, "{id} was given up, and has stopped");
                    }
                }
                // How it has ended will be reported.
                Some(Phase::Ended) if lease.state != LeaseState::Ending => {
                    assert!(!has_ended, "nobody has said how {id} ended");
                }
                Some(phase) => {
                    let is_news = *phase as i64 > lease.phase && !is_given_up;
                    if has_ended || now_there.phase != lease.phase {
                        assert!(is_news || (*phase == Phase::Ended && has_ended), "{id} is as it was");
                        let workload = lease.workload.expect("it is an attempt's");
                        self.observe(workload, *phase as i64, came.now);
                    } else {
                        assert!(!has_to_be || !is_news, "{id} has come further: {phase:?}");
                    }
                }
            }
        }
    }

    /// The gateway does not know the attempt under a live lease any more.
    fn is_unknown_there(&mut self, id: LeaseId, came: &Came<'_>) {
        if self.given_up(id).is_some() {
            return self.end_lease(id, EndedBy::Lost, came.now);
        }
        let workload = self.leases[&id].workload.expect("it is an attempt's");
        assert_ne!(self.workloads[&workload].state, Progress::Finished, "what has finished holds nothing");
        self.end_attempt(workload, End::Unknown, came.now);
    }
}
