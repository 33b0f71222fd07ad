//! A round: everything that was asked for meanwhile is decided together, and granted in one transaction.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use domain::{AttemptId, LeaseId, Timestamp, WorkloadId};
use sea_orm::DbErr;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Ask, DECISIONS, Dispatcher, Granted, PlaceError, Placed, Request, SubmitError, Taken};
use crate::effects::Effects;
use crate::entity::lease::Kind;
use crate::entity::workload::{self, State};
use crate::entity::{lease, to_json};
use crate::events::Whereabouts;
use crate::gauges;
use crate::grants::{Done, Grant, Holder, Known, Pinned, Plan};
use crate::leases;
use crate::placement::{Choice, Demand, Location, Placement, Refusals};
use crate::queue::Waiting;
use crate::service::is_duplicate;
use crate::workloads::{self, Submission};

/// Whoever has gone needs no answer.
type Answer<T> = oneshot::Sender<Result<T, SubmitError>>;

/// What is decided together: one thing, or a group of leases.
#[derive(Debug)]
enum Unit {
    Workload(Box<Submitted>),
    Leases(Vec<Member>),
}

/// A workload that is submitted, or was accepted and is pinned now.
#[derive(Debug)]
struct Submitted {
    submission: Arc<Submission>,
    is_pinned: bool,
    row: workload::Model,
    demand: Arc<Demand>,
    locations: Arc<[Location]>,
    answer: Answer<()>,
    /// Its grant. `None`: it waits.
    lease: Option<LeaseId>,
    /// Why it waits.
    reasons: Arc<[String]>,
}

/// One of several leases that a call asks for.
#[derive(Debug)]
struct Member {
    ask: Ask,
    call: usize,
    item: usize,
    granted: Option<Granted>,
}

/// A call for leases, until all of them are decided.
#[derive(Debug)]
struct Call {
    placed: Vec<Option<Placed>>,
    answer: oneshot::Sender<Vec<Placed>>,
}

/// Nobody takes it.
#[derive(Debug)]
enum Refused {
    NotNow(Refusals),
    Never(Refusals),
}

/// What is asked for in a round.
#[derive(Debug, Default)]
struct Open {
    units: VecDeque<Unit>,
    calls: Vec<Call>,
    releases: Vec<LeaseId>,
    released: Vec<oneshot::Sender<Result<(), DbErr>>>,
}

impl Dispatcher {
    /// Does all that is asked for, and answers.
    pub(crate) async fn round(&mut self, requests: Vec<Request>, now: Timestamp, effects: &mut Effects) {
        let mut open = Open::of(requests, now);
        let (mut leases_may_exist, mut caught_up) = (false, false);
        // What was done in this round, so that several with one id come after each other.
        let mut concluded = HashSet::new();
        for decision in 0..=DECISIONS {
            if open.units.is_empty() && open.releases.is_empty() {
                break;
            }
            let mut plan = Plan { releases: open.releases.clone(), leases_may_exist, ..Plan::default() };
            let (mut taken, mut planned, mut doubted) = (Taken::default(), Vec::new(), VecDeque::new());
            let (mut spans, mut ids, mut repeats) = (Vec::new(), HashSet::new(), VecDeque::new());
            while let Some(mut unit) = open.units.pop_front() {
                if unit.ids().any(|id| ids.contains(&id) && !concluded.contains(&id)) {
                    repeats.push_back(unit);
                    continue;
                }
                ids.extend(unit.ids());
                let is_last = decision == DECISIONS;
                match self.decide(&mut unit, &mut plan, &mut taken, is_last, now) {
                    Ok(()) => {
                        spans.extend(unit.span());
                        planned.push(unit);
                    }
                    // What is remembered may be out of date.
                    Err(_) if !caught_up => doubted.push_back(unit),
                    Err(refused) => self.refuse(unit, refused, &mut open.calls).await,
                }
            }
            if plan.is_empty() {
                taken.give_back(&self.memory.workers);
            } else {
                match self.carry_out(&plan, taken, now).await {
                    Ok(done) => {
                        open.releases.clear();
                        for unit in planned {
                            if unit.leases().any(|lease| done.refused.contains(&lease)) {
                                open.units.push_back(unit);
                            } else {
                                concluded.extend(unit.ids());
                                self.conclude(unit, &done, &mut open.calls, effects);
                            }
                        }
                    }
                    // Another call with the same id was faster. It is known now.
                    Err(error) if is_duplicate(&error) && decision < DECISIONS => {
                        leases_may_exist = true;
                        open.units.extend(planned);
                    }
                    Err(error) => {
                        open.units.extend(planned);
                        open.units.append(&mut doubted);
                        open.units.append(&mut repeats);
                        return open.fail(&error);
                    }
                }
            }
            leases_may_exist |= !repeats.is_empty();
            open.units.append(&mut repeats);
            if !doubted.is_empty() {
                caught_up = true;
                match self.memory.catch_up(&self.db).await {
                    Ok(better) => self.look |= better,
                    Err(error) => {
                        open.units.append(&mut doubted);
                        return open.fail(&error);
                    }
                }
                open.units.append(&mut doubted);
            }
        }
        open.answer();
    }

    /// Plans what becomes of a unit, all of it or nothing. `is_last`: nothing is decided again after this.
    fn decide(
        &mut self,
        unit: &mut Unit,
        plan: &mut Plan,
        taken: &mut Taken,
        is_last: bool,
        now: Timestamp,
    ) -> Result<(), Refused> {
        match unit {
            Unit::Workload(submitted) => self.decide_workload(submitted, plan, taken, is_last, now),
            Unit::Leases(members) => {
                let (mut grants, mut mine) = (Vec::with_capacity(members.len()), Taken::default());
                let group = (members.len() > 1).then_some(plan.grants.len());
                for member in members {
                    match self.decide_lease(member, group, &mut mine, now) {
                        Ok(grant) => grants.push(grant),
                        Err(refused) => {
                            mine.give_back(&self.memory.workers);
                            return Err(refused);
                        }
                    }
                }
                plan.grants.append(&mut grants);
                taken.append(mine);
                Ok(())
            }
        }
    }

    fn decide_workload(
        &mut self,
        submitted: &mut Submitted,
        plan: &mut Plan,
        taken: &mut Taken,
        is_last: bool,
        now: Timestamp,
    ) -> Result<(), Refused> {
        let Submitted { demand, locations, row, .. } = &*submitted;
        // One that waits and asks for the same has found nobody, and was here before.
        let choice = match is_last || self.queue().is_before(demand, row.priority, now) {
            true => Choice::NotNow,
            false => self.memory.workers.lock().choose(demand, locations),
        };
        let (reasons, grant): (Arc<[String]>, _) = match choice {
            Choice::Never if !submitted.is_pinned => return Err(self.refused(demand, Refused::Never)),
            // It was accepted when somebody could, and may wait for somebody like that.
            Choice::NotNow | Choice::Never => (self.reasons(demand), None),
            Choice::Placed(placement) => {
                let grant = self.grant_to_workload(submitted.submission.id, demand, placement, taken);
                (Arc::default(), grant)
            }
        };
        submitted.lease = grant.as_ref().map(|grant| grant.lease);
        submitted.row.waiting_for = to_json(&&*reasons).unwrap_or_default();
        submitted.reasons = reasons.clone();
        if submitted.is_pinned {
            let (id, locations) = (submitted.submission.id, submitted.row.locations.clone());
            plan.pinned.push(Pinned { id, locations, reasons: reasons.to_vec() });
        } else {
            plan.submitted.push(submitted.row.clone());
        }
        plan.grants.extend(grant);
        Ok(())
    }

    /// Grants `placement` to a workload. `None`: its worker has gone in this moment.
    pub(super) fn grant_to_workload(
        &self,
        id: WorkloadId,
        demand: &Arc<Demand>,
        placement: Placement,
        taken: &mut Taken,
    ) -> Option<Grant> {
        self.take(&placement, Kind::Task, &demand.shape.requests, taken);
        let workers = self.memory.workers.lock();
        let worker = workers.get(placement.worker)?;
        let attempt = AttemptId::new();
        let whereabouts = Whereabouts {
            worker: worker.id,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
            attempt,
        };
        Some(Grant {
            group: None,
            lease: LeaseId::new(),
            kind: Kind::Task,
            demand: demand.clone(),
            worker: placement.worker,
            incarnation: placement.incarnation,
            holder: Holder::Workload { id, attempt, whereabouts, reason: placement.reason },
        })
    }

    fn decide_lease(
        &self,
        member: &mut Member,
        group: Option<usize>,
        taken: &mut Taken,
        now: Timestamp,
    ) -> Result<Grant, Refused> {
        let Ask { lease, kind, demand, locations, .. } = &member.ask;
        let choice = self.memory.workers.lock().choose(demand, locations);
        let placement = match choice {
            Choice::Placed(placement) => placement,
            Choice::NotNow => return Err(self.refused(demand, Refused::NotNow)),
            Choice::Never => return Err(self.refused(demand, Refused::Never)),
        };
        self.take(&placement, *kind, &demand.shape.requests, taken);
        let claims = leases::driven_claims(*lease, &placement, &demand.shape.team);
        member.granted = self.memory.workers.lock().get(placement.worker).map(|worker| Granted {
            claims,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
        });
        Ok(Grant {
            group,
            lease: *lease,
            kind: *kind,
            demand: demand.clone(),
            worker: placement.worker,
            incarnation: placement.incarnation,
            holder: Holder::Driven {
                expires_at: now + self.config.lease_term,
                request: member.ask.request.clone(),
            },
        })
    }

    fn refused(&self, demand: &Demand, refused: fn(Refusals) -> Refused) -> Refused {
        refused(self.memory.workers.lock().refusals(demand))
    }

    /// Nobody takes a unit, and what is remembered is true.
    async fn refuse(&self, unit: Unit, refused: Refused, calls: &mut [Call]) {
        let (Refused::Never(said) | Refused::NotNow(said)) = &refused;
        gauges::refused(said.codes());
        match unit {
            Unit::Workload(submitted) => {
                let (Refused::Never(refusals) | Refused::NotNow(refusals)) = refused;
                // A repeat is no news, whatever has become of the workers.
                let known = workloads::find(self.db.read(), submitted.submission.id).await;
                _ = submitted.answer.send(match known {
                    Ok(Some(row)) => submitted.submission.repeats(&row.spec_digest),
                    Ok(None) => Err(SubmitError::NoCompatibleWorker(refusals)),
                    Err(error) => Err(error.into()),
                });
            }
            Unit::Leases(members) => {
                let error = match refused {
                    Refused::NotNow(refusals) => PlaceError::AllWorkersBusy(refusals),
                    Refused::Never(refusals) => PlaceError::NoCompatibleWorker(refusals),
                };
                for member in members {
                    let known = leases::find(self.db.read(), member.ask.lease).await;
                    calls[member.call].placed[member.item] = Some(match known {
                        Ok(Some(lease)) => self.existing(&member.ask, &lease),
                        Ok(None) => Err(error.clone()),
                        Err(error) => Err(error.into()),
                    });
                }
            }
        }
    }

    /// Answers what was done about a unit.
    fn conclude(&mut self, unit: Unit, done: &Done, calls: &mut [Call], effects: &mut Effects) {
        match unit {
            Unit::Workload(submitted) => {
                let id = submitted.submission.id;
                let answer = match done.settled.get(&id) {
                    // It was pinned by another call, or cancelled.
                    Some(None) => Ok(()),
                    Some(Some(Known { spec_digest, .. })) => submitted.submission.repeats(spec_digest),
                    None => {
                        effects.workloads.push(id);
                        match submitted.lease {
                            Some(_) => {
                                effects.workers.extend(done.worker_of(submitted.lease));
                                self.queue().took(&submitted.demand.shape.team);
                            }
                            None => {
                                effects.deadline |= submitted.row.queue_deadline.is_some();
                                let waiting = submitted.waiting(done.came.get(&id).copied());
                                self.queue().put(waiting);
                                // Somebody may have made room after it was decided.
                                self.look = true;
                            }
                        }
                        Ok(())
                    }
                };
                _ = submitted.answer.send(answer);
            }
            Unit::Leases(members) => {
                for member in members {
                    let placed = match done.existing.get(&member.ask.lease) {
                        Some(lease) => self.existing(&member.ask, lease),
                        // Its worker was there when it was granted.
                        None => member.granted.ok_or_else(|| PlaceError::AllWorkersBusy(Refusals::default())),
                    };
                    calls[member.call].placed[member.item] = Some(placed);
                }
            }
        }
    }

    /// Answers the lease that an id names, if it is live and was granted for the same.
    fn existing(&self, ask: &Ask, lease: &lease::Model) -> Placed {
        let is_live = lease.state == lease::State::Granted && lease.is_driven();
        let workers = self.memory.workers.lock();
        let claims = leases::claims(lease);
        match workers.get(claims.worker) {
            Some(worker) if is_live && lease.kind == ask.kind && lease.request == ask.request => {
                Ok(Granted {
                    claims,
                    worker_name: worker.name.clone(),
                    gateway_endpoint: worker.endpoint.clone(),
                })
            }
            _ => Err(PlaceError::Exists),
        }
    }
}

impl Submitted {
    /// `came`: where it was accepted before, what sorts it, and when that was.
    fn waiting(&self, came: Option<(Uuid, Timestamp)>) -> Waiting {
        let (sequence, since) = came.unwrap_or((self.row.sequence, Timestamp(self.row.submitted_at)));
        Waiting {
            id: self.row.id,
            sequence,
            priority: self.row.priority,
            since,
            demand: self.demand.clone(),
            locations: self.locations.clone(),
            told: self.reasons.clone(),
            traceparent: self.row.traceparent.clone(),
        }
    }
}

impl Unit {
    fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let (workload, members): (_, &[Member]) = match self {
            Self::Workload(submitted) => (submitted.lease, &[]),
            Self::Leases(members) => (None, members),
        };
        workload.into_iter().chain(members.iter().map(|member| member.ask.lease))
    }

    /// Of workloads and leases that may be there only once.
    fn ids(&self) -> impl Iterator<Item = Uuid> {
        let (workload, members): (_, &[Member]) = match self {
            Self::Workload(submitted) => (Some(submitted.row.id), &[]),
            Self::Leases(members) => (None, members),
        };
        workload.into_iter().chain(members.iter().map(|member| member.ask.lease.uuid()))
    }

    /// A span for the time until it is placed, in the trace of who submitted it.
    fn span(&self) -> Option<tracing::Span> {
        match self {
            Self::Workload(submitted) if submitted.lease.is_some() => {
                Some(super::span(submitted.submission.id, &submitted.row.traceparent))
            }
            Self::Workload(_) | Self::Leases(_) => None,
        }
    }
}

impl Open {
    fn of(requests: Vec<Request>, now: Timestamp) -> Self {
        let mut open = Self::default();
        for request in requests {
            match request {
                Request::Submit(submission, answer) => {
                    open.units.push_back(workload(submission, None, answer, now));
                }
                Request::Pinned(submission, locations, answer) => {
                    open.units.push_back(workload(submission, Some(locations), answer, now));
                }
                Request::Place(asks, answer) => {
                    let call = open.calls.len();
                    open.calls.push(Call { placed: vec![None; asks.len()], answer });
                    let mut members: Vec<_> = asks
                        .into_iter()
                        .enumerate()
                        .map(|(item, ask)| Member { ask, call, item, granted: None })
                        .collect();
                    members.sort_by_key(|member| member.ask.group);
                    while let Some(member) = members.pop() {
                        let group = member.ask.group;
                        let mut unit = vec![member];
                        while group.is_some() && members.last().is_some_and(|last| last.ask.group == group) {
                            unit.extend(members.pop());
                        }
                        open.units.push_back(Unit::Leases(unit));
                    }
                }
                // It was done before the round.
                Request::CatchUp(answer) => _ = answer.send(()),
                Request::Release(leases, answer) => {
                    open.releases.extend(leases);
                    open.released.push(answer);
                }
            }
        }
        open
    }

    /// The database does not answer.
    fn fail(self, error: &DbErr) {
        let Self { units, mut calls, released, .. } = self;
        for unit in units {
            match unit {
                Unit::Workload(submitted) => _ = submitted.answer.send(Err(error.clone().into())),
                Unit::Leases(members) => {
                    for member in members {
                        calls[member.call].placed[member.item] = Some(Err(error.clone().into()));
                    }
                }
            }
        }
        released.into_iter().for_each(|answer| _ = answer.send(Err(error.clone())));
        answer_calls(calls);
    }

    fn answer(self) {
        self.released.into_iter().for_each(|answer| _ = answer.send(Ok(())));
        answer_calls(self.calls);
    }
}

fn answer_calls(calls: Vec<Call>) {
    for Call { placed, answer } in calls {
        let undecided = || Err(PlaceError::AllWorkersBusy(Refusals::default()));
        _ = answer.send(placed.into_iter().map(|placed| placed.unwrap_or_else(undecided)).collect());
    }
}

/// A workload that is submitted, or, with `locations`, pinned.
fn workload(
    submission: Arc<Submission>,
    locations: Option<Arc<[Location]>>,
    answer: Answer<()>,
    now: Timestamp,
) -> Unit {
    let (is_pinned, locations) = (locations.is_some(), locations.unwrap_or_default());
    let mut row = submission.row(State::Pending, now);
    row.locations = to_json(&&*locations).unwrap_or_default();
    let demand = Arc::new(Demand::of(&submission.spec, submission.id.uuid()));
    Unit::Workload(Box::new(Submitted {
        submission,
        is_pinned,
        row,
        demand,
        locations,
        answer,
        lease: None,
        reasons: Arc::default(),
    }))
}
