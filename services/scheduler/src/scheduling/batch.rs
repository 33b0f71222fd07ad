//! What is decided in a round ([`super::pipeline`]), and what whoever asked for it hears.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::DbErr;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::waiters::{Call, LeaseGroup, Member, Waits};
use super::{Dispatcher, GrantedLease, LeaseRequest, PlaceError, PlaceResult, Request, SubmitError};
use crate::commit::{CommitResult, Grant, Holder, KnownWorkload, PinnedWorkload, Plan};
use crate::counters;
use crate::db::entity::lease::Kind;
use crate::db::entity::workload::{self, State};
use crate::db::entity::{lease, to_json, worker};
use crate::leases;
use crate::notify::changes::Effects;
use crate::placement::{Choice, Demand, Location, Part, Placement};
use crate::queue::Waiting;
use crate::workloads::events::Whereabouts;
use crate::workloads::{self, Submission};

/// In how many orders a group is tried.
const ORDERS: usize = 8;

/// Whoever has gone needs no answer.
type Answer<T> = oneshot::Sender<Result<T, SubmitError>>;

/// What is decided together: one thing, or a group of leases.
#[derive(Debug)]
pub(super) enum Unit {
    Workload(Box<SubmissionUnit>),
    Leases(LeaseGroup),
}

/// A workload that is submitted, or was accepted and is pinned now.
#[derive(Debug)]
pub(super) struct SubmissionUnit {
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

/// Nobody takes it.
#[derive(Debug)]
pub(super) struct Unplaceable {
    /// Whether nobody ever could.
    is_never: bool,
    /// Of several that are asked for together: what one of them asks for.
    demand: Arc<Demand>,
}

/// What is asked for in a round, and not decided.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub(super) units: VecDeque<Unit>,
    pub(super) releases: Vec<(LeaseId, WorkerId)>,
    released: Vec<oneshot::Sender<Result<(), DbErr>>>,
}

/// Of several that are asked for together one finds nothing.
#[derive(Debug)]
struct Stuck {
    /// How many were planned before it.
    at: usize,
    /// Where alone it might be, for the first of its owner is there.
    near: Option<WorkerId>,
    /// What it asks for, there alone.
    demand: Arc<Demand>,
}

impl Dispatcher {
    /// What is asked for now takes the places of what waits by the same ids. Answers whether there is any.
    pub(super) fn replace_waiting(&mut self, units: &mut VecDeque<Unit>) -> bool {
        let mut some = false;
        units.retain_mut(|unit| match unit {
            Unit::Leases(leases) => {
                let waits = self.replace(leases);
                some |= waits.is_some();
                waits != Some(false)
            }
            Unit::Workload(_) => true,
        });
        some
    }

    /// The same of one call. `Some(false)`: it was refused, for one of its ids waits for something else.
    fn replace(&mut self, leases: &mut LeaseGroup) -> Option<bool> {
        match self.asking.replace(leases) {
            Waits::Not => None,
            Waits::Replaced(id) => {
                self.queue().remove(id);
                Some(true)
            }
            Waits::ForElse => {
                leases.members.iter().for_each(|member| member.decide(Err(PlaceError::Exists)));
                Some(false)
            }
        }
    }

    /// Plans what becomes of a unit, all of it or nothing. `is_last`: nothing is decided again after this.
    pub(super) fn decide(
        &mut self,
        unit: &mut Unit,
        plan: &mut Plan,
        is_last: bool,
        now: Timestamp,
    ) -> Result<(), Unplaceable> {
        match unit {
            Unit::Workload(submitted) => self.decide_workload(submitted, plan, is_last, now),
            Unit::Leases(leases) => {
                // One that waits and asks for the same has found nobody, and was here before.
                let is_behind = |member: &Member| {
                    let demand = &member.ask.demand;
                    self.queue().is_behind(demand, leases.priority, leases.since, leases.sequence)
                };
                if let Some(member) = leases.members.iter().find(|member| is_behind(member)) {
                    return Err(Unplaceable { is_never: false, demand: member.ask.demand.clone() });
                }
                self.decide_leases(leases, plan, now)
            }
        }
    }

    /// Plans leases, all of them or none. What finds nothing after others of its group had theirs is asked for before them, some times.
    pub(super) fn decide_leases(
        &self,
        leases: &mut LeaseGroup,
        plan: &mut Plan,
        now: Timestamp,
    ) -> Result<(), Unplaceable> {
        let group = (leases.members.len() > 1).then_some(plan.grants.len());
        let mut order: Vec<_> = (0..leases.members.len()).collect();
        let (mut avoid, mut first_stuck) = (BTreeSet::new(), None);
        for _ in 0..ORDERS {
            match self.decide_in_order(leases, &order, &avoid, group, now) {
                Ok(mut grants) => {
                    plan.grants.append(&mut grants);
                    return Ok(());
                }
                Err(Stuck { at, near, demand }) => {
                    first_stuck.get_or_insert(demand);
                    if at == 0 {
                        break;
                    }
                    // Where the first of an owner went, there is not room for all of them.
                    avoid.extend(near);
                    order[..=at].rotate_right(1);
                }
            }
        }
        let Some(demand) = first_stuck else { return Ok(()) };
        // Where one finds nothing because of where another is, that may change; what nobody could ever take does not.
        Err(match self.hopeless(leases) {
            Some(demand) => Unplaceable { is_never: true, demand },
            None => Unplaceable { is_never: false, demand },
        })
    }

    fn decide_in_order(
        &self,
        leases: &mut LeaseGroup,
        order: &[usize],
        avoid: &BTreeSet<WorkerId>,
        group: Option<usize>,
        now: Timestamp,
    ) -> Result<Vec<Grant>, Stuck> {
        let mut grants = Vec::with_capacity(order.len());
        let mut homes = HashMap::<(String, String), WorkerId>::new();
        for (at, number) in order.iter().enumerate() {
            let member = &mut leases.members[*number];
            let owner = (member.ask.demand.shape.team.clone(), member.ask.owner.clone());
            // What belongs together goes where the first of it goes.
            let near = homes.get(&owner).copied();
            match self.decide_lease(member, near, avoid, group, now) {
                Ok(grant) => {
                    if !owner.1.is_empty() {
                        homes.insert(owner, grant.worker);
                    }
                    grants.push(grant);
                }
                Err(demand) => {
                    self.give_back(&grants);
                    return Err(Stuck { at, near, demand });
                }
            }
        }
        Ok(grants)
    }

    fn decide_workload(
        &mut self,
        submitted: &mut SubmissionUnit,
        plan: &mut Plan,
        is_last: bool,
        now: Timestamp,
    ) -> Result<(), Unplaceable> {
        let SubmissionUnit { demand, locations, row, .. } = &*submitted;
        // One that waits and asks for the same has found nobody, and was here before.
        let choice = match is_last || self.queue().is_before(demand, row.priority, now) {
            true => Choice::NotNow,
            false => self.memory.workers.lock().choose(demand, locations),
        };
        let (reasons, grant): (Arc<[String]>, _) = match choice {
            Choice::Never if !submitted.is_pinned => {
                return Err(Unplaceable { is_never: true, demand: demand.clone() });
            }
            // It was accepted when somebody could, and may wait for somebody like that.
            Choice::NotNow | Choice::Never => (self.reasons(demand), None),
            Choice::Placed(placement) => {
                let grant = self.grant_to_workload(submitted.submission.id, demand, placement);
                (Arc::default(), grant)
            }
        };
        submitted.lease = grant.as_ref().map(|grant| grant.lease);
        submitted.row.waiting_for = to_json(&&*reasons).unwrap_or_default();
        submitted.reasons = reasons.clone();
        if submitted.is_pinned {
            let (id, locations) = (submitted.submission.id, submitted.row.locations.clone());
            plan.pinned.push(PinnedWorkload { id, locations, reasons: reasons.to_vec() });
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
    ) -> Option<Grant> {
        let mut workers = self.memory.workers.lock();
        let worker = workers.get(placement.worker)?;
        let attempt = AttemptId::new();
        let whereabouts = Whereabouts {
            worker: worker.id,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
            attempt,
        };
        workers.plan(placement.worker, Kind::Task, &demand.shape.requests);
        Some(Grant {
            group: None,
            lease: LeaseId::new(),
            kind: Kind::Task,
            demand: demand.clone(),
            worker: placement.worker,
            incarnation: placement.incarnation,
            holder: Holder::Workload { id, attempt, whereabouts, reason: placement.reason },
            decided_by: placement.decided_by,
        })
    }

    /// `near`: where another is for the same owner. `avoid`: where there is not room for all of an owner. Refused is what was asked for in the end.
    fn decide_lease(
        &self,
        member: &mut Member,
        near: Option<WorkerId>,
        avoid: &BTreeSet<WorkerId>,
        group: Option<usize>,
        now: Timestamp,
    ) -> Result<Grant, Arc<Demand>> {
        let LeaseRequest { lease, kind, demand, locations, owner, inputs, .. } = &member.ask;
        let is_new = !owner.is_empty() && near.is_none() && member.ask.kept_to.is_none();
        let demand = &match is_new && !avoid.is_empty() {
            true => {
                let avoid = demand.avoid.union(avoid).copied().collect();
                Arc::new(Demand { avoid, ..(**demand).clone() })
            }
            false => self.demand_near(demand, near.or(member.ask.kept_to)),
        };
        let choice = self.memory.workers.lock().choose(demand, locations);
        let Choice::Placed(placement) = choice else { return Err(demand.clone()) };
        let claims = leases::driven_claims(*lease, &placement, &demand.shape.team);
        let mut workers = self.memory.workers.lock();
        let worker = workers.get(placement.worker);
        member.granted = worker.map(|worker| GrantedLease {
            claims,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
        });
        workers.plan(placement.worker, *kind, &demand.shape.requests);
        drop(workers);
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
                owner: owner.clone(),
                settles: !inputs.is_empty(),
            },
            decided_by: placement.decided_by,
        })
    }

    /// What is asked for where the containers of its owner are, as long as that worker takes work.
    fn demand_near(&self, demand: &Arc<Demand>, near: Option<WorkerId>) -> Arc<Demand> {
        match near.filter(|worker| self.takes_work(*worker)) {
            Some(worker) => Arc::new(Demand { only: Some(worker), ..(**demand).clone() }),
            None => demand.clone(),
        }
    }

    /// All that is asked for at once.
    pub(super) fn parts(&self, leases: &LeaseGroup) -> Vec<Part> {
        let part = |LeaseRequest { demand, kept_to, owner, .. }: &LeaseRequest| Part {
            demand: self.demand_near(demand, *kept_to),
            owner: owner.clone(),
        };
        leases.members.iter().map(|member| part(&member.ask)).collect()
    }

    /// Whether the containers of an owner that are on a worker keep it there.
    fn takes_work(&self, worker: WorkerId) -> bool {
        let workers = self.memory.workers.lock();
        let worker = workers.get(worker);
        worker.is_some_and(|worker| {
            worker.state != worker::State::Lost && worker.desired == worker::Desired::Run
        })
    }

    /// What whoever asked hears.
    fn error(&self, refused: &Unplaceable) -> PlaceError {
        let refusals = self.memory.workers.lock().refusals(&refused.demand);
        counters::refused(refusals.codes());
        match refused.is_never {
            true => PlaceError::NoCompatibleWorker(refusals),
            false => PlaceError::AllWorkersBusy(refusals),
        }
    }

    /// No worker could ever take this. What is about certain workers no other one helps.
    fn is_refused_for_good(&self, demand: &Demand) {
        if demand.only.is_none() && demand.avoid.is_empty() && demand.failed_on.is_empty() {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).note(demand, Timestamp::now());
        }
    }

    /// Nobody takes these, and what is remembered is true: they wait, or are refused.
    pub(super) async fn refuse(&mut self, refused: Vec<(Unit, Unplaceable)>) {
        let leases: Vec<_> = refused.iter().flat_map(|(unit, _)| unit.leases()).collect();
        if refused.is_empty() {
            return;
        }
        // A repeat is no news, whatever has become of the workers.
        let known = leases::find_all(self.db.read(), &leases).await;
        for (unit, why) in refused {
            match unit {
                Unit::Workload(submitted) => {
                    let refusals = self.memory.workers.lock().refusals(&why.demand);
                    counters::refused(refusals.codes());
                    let known = workloads::find(self.db.read(), submitted.submission.id).await;
                    _ = submitted.answer.send(match known {
                        Ok(Some(row)) => submitted.submission.repeats(&row.spec_digest).map_err(Into::into),
                        Ok(None) => {
                            self.is_refused_for_good(&why.demand);
                            Err(SubmitError::NoCompatibleWorker(refusals))
                        }
                        Err(error) => Err(error.into()),
                    });
                }
                Unit::Leases(leases) => match &known {
                    Ok(known) => self.wait_or_refuse(leases, why, known),
                    Err(error) => {
                        leases.members.iter().for_each(|member| member.decide(Err(error.clone().into())));
                    }
                },
            }
        }
    }

    /// `known`: leases that are there already.
    fn wait_or_refuse(
        &mut self,
        mut leases: LeaseGroup,
        why: Unplaceable,
        known: &HashMap<LeaseId, lease::Model>,
    ) {
        let is_known = leases.leases().any(|lease| known.contains_key(&lease));
        // Another call of this round may wait by the same ids.
        if self.replace(&mut leases) == Some(false) {
            return;
        }
        let leases = match leases.waiting() {
            Some(waiting) if !is_known && !why.is_never => match self.asking.put(leases) {
                Ok(()) => {
                    self.queue().put(waiting);
                    // Somebody may have made room after it was decided.
                    self.look = true;
                    return;
                }
                Err(leases) => leases,
            },
            _ => leases,
        };
        if !is_known && why.is_never {
            self.is_refused_for_good(&why.demand);
        }
        let error = if is_known { PlaceError::Exists } else { self.error(&why) };
        for member in &leases.members {
            member.decide(match known.get(&member.ask.lease) {
                Some(lease) => self.existing(&member.ask, lease),
                None => Err(error.clone()),
            });
        }
    }

    /// Answers those who have waited for long enough. `is_due`: looks for those who have gone away, too.
    pub(crate) fn end_patience(&mut self, now: Instant, is_due: bool) {
        for leases in self.asking.take_ended(now) {
            self.queue().remove(leases.id());
            self.asked_in_vain(&leases);
        }
        if is_due {
            for gone in self.asking.gone() {
                self.asking.take(gone);
                self.queue().remove(gone);
            }
        }
    }

    /// Whoever asked for these has waited for long enough, or has gone.
    pub(super) fn asked_in_vain(&self, leases: &LeaseGroup) {
        for member in &leases.members {
            let LeaseRequest { demand, locations, kept_to, .. } = &member.ask;
            let demand = self.demand_near(demand, *kept_to);
            let is_never = self.memory.workers.lock().choose(&demand, locations) == Choice::Never;
            member.decide(Err(self.error(&Unplaceable { is_never, demand })));
        }
    }

    /// Answers those who wait for leases that nobody could ever take any more. What is remembered is true.
    pub(crate) fn refuse_hopeless(&mut self) {
        if self.asking.is_empty() {
            return;
        }
        let lines: Vec<_> = self.queue().lines().map(|(first, _)| (first.id, first.demands())).collect();
        for (first, demands) in lines {
            // All in a line ask for the same.
            if !demands.iter().any(|demand| self.memory.workers.lock().is_hopeless(demand)) {
                continue;
            }
            let calls: Vec<_> = self.queue().line_of(first).filter(|id| self.asking.contains(*id)).collect();
            for id in calls {
                let Some(demand) = self.asking.get(id).and_then(|leases| self.hopeless(leases)) else {
                    continue;
                };
                let Some(leases) = self.asking.take(id) else { continue };
                self.queue().remove(id);
                let error = self.error(&Unplaceable { is_never: true, demand });
                leases.members.iter().for_each(|member| member.decide(Err(error.clone())));
            }
        }
    }

    /// What is asked for among these that nobody could ever take. What is asked for near to others may be had elsewhere once their worker
    /// takes no work any more.
    fn hopeless(&self, leases: &LeaseGroup) -> Option<Arc<Demand>> {
        leases.members.iter().find_map(|member| {
            let demand = self.demand_near(&member.ask.demand, member.ask.kept_to);
            let is_hopeless = self.memory.workers.lock().is_hopeless(&demand);
            is_hopeless.then_some(demand)
        })
    }

    /// Answers what was done about a unit.
    pub(super) fn conclude(&mut self, unit: Unit, done: &CommitResult, effects: &mut Effects) {
        match unit {
            Unit::Workload(submitted) => {
                let id = submitted.submission.id;
                let answer = match done.settled.get(&id) {
                    // It was pinned by another call, or cancelled.
                    Some(None) => Ok(()),
                    Some(Some(KnownWorkload { spec_digest, .. })) => {
                        submitted.submission.repeats(spec_digest)
                    }
                    None => {
                        effects.workloads.push(id);
                        match submitted.lease {
                            Some(_) => {
                                effects.deadline |= submitted.row.start_timeout_us.is_some();
                                effects.workers.extend(done.worker_of(submitted.lease));
                                self.queue().took(&submitted.demand.shape.team);
                            }
                            None => {
                                effects.deadline |= submitted.row.queue_deadline.is_some();
                                effects.queued.push(id);
                                let waiting = submitted.waiting(done.came.get(&id).copied());
                                self.queue().put(waiting);
                                // Somebody may have made room after it was decided.
                                self.look = true;
                            }
                        }
                        Ok(())
                    }
                };
                _ = submitted.answer.send(answer.map_err(Into::into));
            }
            Unit::Leases(leases) => {
                for member in leases.members.iter().filter(|member| member.ask.kind.takes_a_slot()) {
                    self.queue().took(&member.ask.demand.shape.team);
                }
                self.conclude_leases(leases, done);
            }
        }
    }

    /// Answers what was done about leases.
    pub(super) fn conclude_leases(&self, leases: LeaseGroup, done: &CommitResult) {
        for mut member in leases.members {
            let placed = match (done.existing.get(&member.ask.lease), member.granted.take()) {
                (Some(lease), _) => self.existing(&member.ask, lease),
                // It is a workload's.
                (None, _) if done.exists(member.ask.lease) => Err(PlaceError::Exists),
                // Others of its group were there before it was asked for.
                (None, _) if done.refused.contains(&member.ask.lease) => Err(PlaceError::Exists),
                (None, Some(granted)) => Ok(granted),
                // Its worker went while it was decided.
                (None, None) => Err(PlaceError::Undecided),
            };
            member.decide(placed);
        }
    }

    /// Answers the lease that an id names, if it is live and was granted for the same.
    fn existing(&self, ask: &LeaseRequest, lease: &lease::Model) -> PlaceResult {
        let is_live = lease.state == lease::State::Granted && lease.is_driven();
        let workers = self.memory.workers.lock();
        let claims = leases::claims(lease);
        match workers.get(claims.worker) {
            Some(worker) if is_live && lease.kind == ask.kind && lease.request == ask.request => {
                Ok(GrantedLease {
                    claims,
                    worker_name: worker.name.clone(),
                    gateway_endpoint: worker.endpoint.clone(),
                })
            }
            // It came a moment ago, and is known here soon.
            None if is_live => Err(PlaceError::Undecided),
            _ => Err(PlaceError::Exists),
        }
    }
}

impl SubmissionUnit {
    /// `came`: where it was accepted before, what sorts it, and when that was.
    fn waiting(&self, came: Option<(Uuid, Timestamp)>) -> Waiting {
        let (sequence, since) = came.unwrap_or((self.row.sequence, Timestamp(self.row.submitted_at)));
        Waiting {
            id: self.row.id,
            is_elsewhere: false,
            others: vec![],
            sequence,
            priority: self.row.priority,
            since,
            demand: self.demand.clone(),
            locations: self.locations.clone(),
            must_start: self.row.start_timeout_us.is_some(),
            told: self.reasons.clone(),
            traceparent: self.row.traceparent.clone(),
            spec_bytes: Some(self.row.spec.len() as u64),
        }
    }
}

impl Unit {
    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        let (workload, members): (_, &[Member]) = match self {
            Self::Workload(submitted) => (submitted.lease, &[]),
            Self::Leases(leases) => (None, &leases.members),
        };
        workload.into_iter().chain(members.iter().map(|member| member.ask.lease))
    }

    /// Of workloads and leases that may be there only once.
    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        let (workload, members): (_, &[Member]) = match self {
            Self::Workload(submitted) => (Some(submitted.row.id), &[]),
            Self::Leases(leases) => (None, &leases.members),
        };
        workload.into_iter().chain(members.iter().map(|member| member.ask.lease.uuid()))
    }

    /// Whether nobody waits for it any more.
    pub(super) fn has_gone(&self) -> bool {
        match self {
            // It is durable once it was asked for.
            Self::Workload(_) => false,
            Self::Leases(leases) => leases.has_gone(),
        }
    }

    /// The containers of owners are on these workers.
    pub(super) fn keep_to(&mut self, kept: &HashMap<LeaseId, WorkerId>) {
        if let Self::Leases(leases) = self {
            leases.keep_to(kept);
        }
    }

    /// A span for the time until it is placed, in the trace of who submitted it.
    pub(super) fn span(&self) -> Option<tracing::Span> {
        match self {
            Self::Workload(submitted) if submitted.lease.is_some() => {
                Some(super::span(submitted.submission.id, &submitted.row.traceparent))
            }
            Self::Workload(_) | Self::Leases(_) => None,
        }
    }
}

/// The database does not answer those who asked for these.
pub(super) fn fail(requests: Vec<Request>, error: &DbErr) {
    let mut open = Open::default();
    open.add(requests, Timestamp::now());
    open.fail(error);
}

/// What a call asks for, each group together: those of a higher priority first, and then as they are named.
fn in_turn(members: Vec<Member>, now: Timestamp) -> Vec<LeaseGroup> {
    let (mut units, mut of_group) = (Vec::<Vec<Member>>::new(), HashMap::new());
    for member in members {
        let next = units.len();
        let at = member.ask.group.map_or(next, |group| *of_group.entry(group).or_insert(next));
        match units.get_mut(at) {
            Some(unit) => unit.push(member),
            None => units.push(vec![member]),
        }
    }
    let mut units: Vec<_> = units.into_iter().filter_map(|unit| LeaseGroup::new(unit, now)).collect();
    units.sort_by_key(|unit| Reverse(unit.priority));
    units
}

impl Open {
    pub(super) fn add(&mut self, requests: Vec<Request>, now: Timestamp) {
        let open = self;
        for request in requests {
            match request {
                Request::Submit(submission, answer) => {
                    open.units.push_back(workload(submission, None, answer, now));
                }
                Request::Pinned(submission, locations, answer) => {
                    open.units.push_back(workload(submission, Some(locations), answer, now));
                }
                Request::Place(asks, answer) => {
                    let call = Call::new(asks.len(), answer);
                    let member = |(item, ask)| Member::new(ask, call.clone(), item);
                    let members = asks.into_iter().enumerate().map(member).collect();
                    open.units.extend(in_turn(members, now).into_iter().map(Unit::Leases));
                }
                // It was done before the round.
                Request::CatchUp(answer) => _ = answer.send(()),
                Request::Release(leases, answer) => {
                    open.releases.extend(leases);
                    open.released.push(answer);
                }
            }
        }
    }

    /// The database does not answer.
    pub(super) fn fail(self, error: &DbErr) {
        for unit in self.units {
            match unit {
                Unit::Workload(submitted) => _ = submitted.answer.send(Err(error.clone().into())),
                Unit::Leases(leases) => {
                    leases.members.iter().for_each(|member| member.decide(Err(error.clone().into())));
                }
            }
        }
        self.released.into_iter().for_each(|answer| _ = answer.send(Err(error.clone())));
    }

    pub(super) fn answer(self) {
        self.released.into_iter().for_each(|answer| _ = answer.send(Ok(())));
        for unit in self.units {
            match unit {
                Unit::Workload(submitted) => _ = submitted.answer.send(Err(SubmitError::Undecided)),
                Unit::Leases(leases) => {
                    leases.members.iter().for_each(|member| member.decide(Err(PlaceError::Undecided)));
                }
            }
        }
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
    Unit::Workload(Box::new(SubmissionUnit {
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

#[cfg(test)]
mod tests;
