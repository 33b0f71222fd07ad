//! Decisions of a round ([`super::pipeline`]), and the answers to its callers.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use domain::{AttemptId, LeaseId, Timestamp, WorkerId, WorkloadId};
use sea_orm::DbErr;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::waiters::{Call, LeaseGroup, Member, WaitState};
use super::{Dispatcher, GrantedLease, LeaseRequest, PlaceError, PlaceResult, Request, SubmitError};
use crate::commit::{CommitResult, Grant, Holder, KnownId, PinnedWorkload, Plan};
use crate::counters;
use crate::db::entity::workload::{self, State};
use crate::db::entity::{lease, to_json, worker};
use crate::leases;
use crate::notify::changes::Effects;
use crate::placement::{Choice, Demand, Location, OnlyWorker, Part, Placement};
use crate::queue::WaitingRequest;
use crate::workloads::events::AttemptLocation;
use crate::workloads::{self, Submission};

/// Maximum number of orders in which the leases of a group are tried.
const ORDERS: usize = 8;

/// A reply channel. The caller may have closed it.
type Answer<T> = oneshot::Sender<Result<T, SubmitError>>;

/// The unit of a decision: a workload, or a group of leases.
#[derive(Debug)]
pub(super) enum Unit {
    Workload(Box<SubmissionUnit>),
    Leases(LeaseGroup),
}

/// A submitted workload, or an accepted one whose inputs are now pinned.
#[derive(Debug)]
pub(super) struct SubmissionUnit {
    submission: Arc<Submission>,
    is_pinned: bool,
    row: workload::Model,
    demand: Arc<Demand>,
    locations: Arc<[Location]>,
    answer: Answer<()>,
    /// The planned lease. `None`: the workload waits.
    lease: Option<LeaseId>,
    /// Refusals of the workers while the workload waits.
    reasons: Arc<[String]>,
}

/// A unit that no worker takes.
#[derive(Debug)]
pub(super) struct UnplacedUnit {
    /// Whether no known worker could ever take it.
    is_never: bool,
    /// The demand that found no worker, one of several in a group.
    demand: Arc<Demand>,
}

/// Requests of a round that are not decided yet.
#[derive(Debug, Default)]
pub(super) struct OpenRequests {
    pub(super) units: VecDeque<Unit>,
    pub(super) releases: Vec<(LeaseId, WorkerId)>,
    released: Vec<oneshot::Sender<Result<(), DbErr>>>,
}

/// A lease of a group that found no worker.
#[derive(Debug)]
struct UnplacedMember {
    /// Number of leases planned before it.
    at: usize,
    /// The only worker that it may use, because the first lease of its owner is there.
    near: Option<WorkerId>,
    /// Its demand, restricted to that worker.
    demand: Arc<Demand>,
}

impl Dispatcher {
    /// Lets new calls replace waiting ones with the same leases. Returns whether there are any.
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

    /// Lets one call replace a waiting one. `Some(false)`: the call was rejected, because one of
    /// its ids waits in a different request.
    fn replace(&mut self, leases: &mut LeaseGroup) -> Option<bool> {
        match self.waiters.replace(leases) {
            WaitState::New => None,
            WaitState::Replaced(id) => {
                self.queue().remove(id);
                Some(true)
            }
            WaitState::Conflict => {
                leases.members.iter().for_each(|member| member.decide(Err(PlaceError::Exists)));
                Some(false)
            }
        }
    }

    /// Plans a unit completely or not at all. `is_last`: the unit is not decided again.
    pub(super) fn decide(
        &mut self,
        unit: &mut Unit,
        plan: &mut Plan,
        is_last: bool,
        now: Timestamp,
    ) -> Result<(), UnplacedUnit> {
        match unit {
            Unit::Workload(submitted) => self.decide_workload(submitted, plan, is_last, now),
            Unit::Leases(leases) => {
                // A waiting request with the same requirements has found no worker, and arrived
                // earlier.
                let is_behind = |member: &Member| {
                    let demand = &member.request.demand;
                    self.queue().is_behind(demand, leases.priority, leases.since, leases.sequence)
                };
                if let Some(member) = leases.members.iter().find(|member| is_behind(member)) {
                    return Err(UnplacedUnit { is_never: false, demand: member.request.demand.clone() });
                }
                self.decide_leases(leases, plan, now)
            }
        }
    }

    /// Plans a group of leases completely or not at all. A lease that finds no worker is tried
    /// before the others, a limited number of times.
    pub(super) fn decide_leases(
        &self,
        leases: &mut LeaseGroup,
        plan: &mut Plan,
        now: Timestamp,
    ) -> Result<(), UnplacedUnit> {
        let group = (leases.members.len() > 1).then_some(plan.grants.len());
        let mut order: Vec<_> = (0..leases.members.len()).collect();
        let (mut avoid, mut first_stuck) = (BTreeSet::new(), None);
        for _ in 0..ORDERS {
            match self.decide_in_order(leases, &order, &avoid, group, now) {
                Ok(mut grants) => {
                    plan.grants.append(&mut grants);
                    return Ok(());
                }
                Err(UnplacedMember { at, near, demand }) => {
                    first_stuck.get_or_insert(demand);
                    if at == 0 {
                        break;
                    }
                    // The worker of the owner's first lease has no room for all of its leases.
                    avoid.extend(near);
                    order[..=at].rotate_right(1);
                }
            }
        }
        let Some(demand) = first_stuck else { return Ok(()) };
        // A lease that only conflicts with others of its group may fit later. A lease that no
        // worker could ever take does not.
        Err(match self.unschedulable_demand(leases) {
            Some(demand) => UnplacedUnit { is_never: true, demand },
            None => UnplacedUnit { is_never: false, demand },
        })
    }

    fn decide_in_order(
        &self,
        leases: &mut LeaseGroup,
        order: &[usize],
        avoid: &BTreeSet<WorkerId>,
        group: Option<usize>,
        now: Timestamp,
    ) -> Result<Vec<Grant>, UnplacedMember> {
        let mut grants = Vec::with_capacity(order.len());
        let mut homes = HashMap::<(String, String), WorkerId>::new();
        for (at, number) in order.iter().enumerate() {
            let member = &mut leases.members[*number];
            let owner = (member.request.demand.shape.team.clone(), member.request.owner.clone());
            // All leases of an owner use the worker of the first one.
            let near = homes.get(&owner).copied();
            match self.decide_lease(member, near, avoid, group, now) {
                Ok(grant) => {
                    if !owner.1.is_empty() {
                        homes.insert(owner, grant.worker);
                    }
                    grants.push(grant);
                }
                Err(demand) => {
                    self.unplan(&grants);
                    return Err(UnplacedMember { at, near, demand });
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
    ) -> Result<(), UnplacedUnit> {
        let SubmissionUnit { demand, locations, row, .. } = &*submitted;
        // A waiting request with the same requirements has found no worker, and arrived earlier.
        let choice = match is_last || self.queue().is_before(demand, row.priority, now) {
            true => Choice::NotNow,
            false => self.cache.workers.lock().choose(demand, locations),
        };
        let (reasons, grant): (Arc<[String]>, _) = match choice {
            Choice::Never if !submitted.is_pinned => {
                return Err(UnplacedUnit { is_never: true, demand: demand.clone() });
            }
            // The workload was accepted when some worker could take it, and may wait for another
            // such worker.
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

    /// Plans `placement` for a workload. Returns `None` if the worker was just removed.
    pub(super) fn grant_to_workload(
        &self,
        id: WorkloadId,
        demand: &Arc<Demand>,
        placement: Placement,
    ) -> Option<Grant> {
        let mut workers = self.cache.workers.lock();
        let worker = workers.get(placement.worker)?;
        let attempt = AttemptId::new();
        let location = AttemptLocation {
            worker: worker.id,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
            attempt,
        };
        workers.plan(placement.worker, demand.kind, &demand.shape.requests);
        Some(Grant {
            group: None,
            lease: LeaseId::new(),
            demand: demand.clone(),
            worker: placement.worker,
            incarnation: placement.incarnation,
            holder: Holder::Workload { id, attempt, location, reason: placement.reason },
            decided_by: placement.decided_by,
        })
    }

    /// `near`: the worker of another lease of the same owner. `avoid`: workers without room for all
    /// leases of an owner. The error is the demand as it was tried.
    fn decide_lease(
        &self,
        member: &mut Member,
        near: Option<WorkerId>,
        avoid: &BTreeSet<WorkerId>,
        group: Option<usize>,
        now: Timestamp,
    ) -> Result<Grant, Arc<Demand>> {
        let LeaseRequest { lease, demand, locations, owner, inputs, .. } = &member.request;
        let is_new = !owner.is_empty() && near.is_none() && member.request.owner_worker.is_none();
        let demand = &match is_new && !avoid.is_empty() {
            true => {
                let avoid = demand.avoid.union(avoid).copied().collect();
                Arc::new(Demand { avoid, ..(**demand).clone() })
            }
            false => self.demand_near(demand, near.or(member.request.owner_worker)),
        };
        let choice = self.cache.workers.lock().choose(demand, locations);
        let Choice::Placed(placement) = choice else { return Err(demand.clone()) };
        let claims = leases::driven_claims(*lease, &placement, &demand.shape.team);
        let mut workers = self.cache.workers.lock();
        let worker = workers.get(placement.worker);
        member.granted = worker.map(|worker| GrantedLease {
            claims,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
        });
        workers.plan(placement.worker, demand.kind, &demand.shape.requests);
        drop(workers);
        Ok(Grant {
            group,
            lease: *lease,
            demand: demand.clone(),
            worker: placement.worker,
            incarnation: placement.incarnation,
            holder: Holder::Driven {
                expires_at: now + self.config.lease_term,
                request: member.request.request.clone(),
                owner: owner.clone(),
                settles: !inputs.is_empty(),
            },
            decided_by: placement.decided_by,
        })
    }

    /// Restricts a demand to the worker of its owner, as long as that worker takes work.
    fn demand_near(&self, demand: &Arc<Demand>, near: Option<WorkerId>) -> Arc<Demand> {
        match near.filter(|worker| self.takes_work(*worker)) {
            Some(worker) => Arc::new(Demand { only: Some(OnlyWorker::tied(worker)), ..(**demand).clone() }),
            None => demand.clone(),
        }
    }

    /// Returns all parts of a request.
    pub(super) fn parts(&self, leases: &LeaseGroup) -> Vec<Part> {
        let part = |LeaseRequest { demand, owner_worker, owner, .. }: &LeaseRequest| Part {
            demand: self.demand_near(demand, *owner_worker),
            owner: owner.clone(),
        };
        leases.members.iter().map(|member| part(&member.request)).collect()
    }

    /// Returns whether the owner's affinity to a worker still holds.
    fn takes_work(&self, worker: WorkerId) -> bool {
        let workers = self.cache.workers.lock();
        let worker = workers.get(worker);
        worker.is_some_and(|worker| {
            worker.state != worker::State::Lost && worker.desired == worker::Desired::Run
        })
    }

    /// Builds the error of a rejected request.
    fn error(&self, refused: &UnplacedUnit) -> PlaceError {
        let refusals = self.cache.workers.lock().refusals(&refused.demand);
        counters::refused(refusals.codes());
        match refused.is_never {
            true => PlaceError::NoCompatibleWorker(refusals),
            false => PlaceError::AllWorkersBusy(refusals),
        }
    }

    /// Records a demand that no worker could ever take. Demands tied to particular workers do not
    /// help autoscalers, so they are omitted.
    fn record_unschedulable(&self, demand: &Demand) {
        if demand.only.is_none() && demand.avoid.is_empty() && demand.failed_on.is_empty() {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).note(demand, Timestamp::now());
        }
    }

    /// Queues or rejects units that no worker takes. The worker cache must be current.
    pub(super) async fn refuse(&mut self, refused: Vec<(Unit, UnplacedUnit)>) {
        let leases: Vec<_> = refused.iter().flat_map(|(unit, _)| unit.leases()).collect();
        if refused.is_empty() {
            return;
        }
        // A repeat is accepted even if the workers have changed.
        let known = leases::find_all(self.db.read(), &leases).await;
        for (unit, why) in refused {
            match unit {
                Unit::Workload(submitted) => {
                    let refusals = self.cache.workers.lock().refusals(&why.demand);
                    counters::refused(refusals.codes());
                    let known = workloads::find(self.db.read(), submitted.submission.id).await;
                    _ = submitted.answer.send(match known {
                        Ok(Some(row)) => submitted.submission.repeats(&row.spec_digest).map_err(Into::into),
                        Ok(None) => {
                            self.record_unschedulable(&why.demand);
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

    /// `known`: existing leases.
    fn wait_or_refuse(
        &mut self,
        mut leases: LeaseGroup,
        why: UnplacedUnit,
        known: &HashMap<LeaseId, lease::Model>,
    ) {
        let is_known = leases.leases().any(|lease| known.contains_key(&lease));
        // Another call of this round may wait with the same ids.
        if self.replace(&mut leases) == Some(false) {
            return;
        }
        let leases = match leases.waiting() {
            Some(waiting) if !is_known && !why.is_never => match self.waiters.put(leases) {
                Ok(()) => {
                    self.queue().put(waiting);
                    // A worker may have gained room since the decision.
                    self.pass_needed = true;
                    return;
                }
                Err(leases) => leases,
            },
            _ => leases,
        };
        if !is_known && why.is_never {
            self.record_unschedulable(&why.demand);
        }
        let error = if is_known { PlaceError::Exists } else { self.error(&why) };
        for member in &leases.members {
            member.decide(match known.get(&member.request.lease) {
                Some(lease) => self.existing(&member.request, lease),
                None => Err(error.clone()),
            });
        }
    }

    /// Answers calls whose waiting time is over. `is_due`: also removes calls whose callers have
    /// disconnected.
    pub(crate) fn end_waits(&mut self, now: Instant, is_due: bool) {
        for leases in self.waiters.take_ended(now) {
            self.queue().remove(leases.id());
            self.reject_timed_out(&leases);
        }
        if is_due {
            for gone in self.waiters.disconnected() {
                self.waiters.take(gone);
                self.queue().remove(gone);
            }
        }
    }

    /// Answers a call that found no worker in its waiting time.
    pub(super) fn reject_timed_out(&self, leases: &LeaseGroup) {
        for member in &leases.members {
            let LeaseRequest { demand, locations, owner_worker, .. } = &member.request;
            let demand = self.demand_near(demand, *owner_worker);
            let is_never = self.cache.workers.lock().choose(&demand, locations) == Choice::Never;
            member.decide(Err(self.error(&UnplacedUnit { is_never, demand })));
        }
    }

    /// Rejects waiting calls that no worker could ever take. The worker cache must be current.
    pub(crate) fn refuse_hopeless(&mut self) {
        if self.waiters.is_empty() {
            return;
        }
        let lines: Vec<_> = self.queue().lines().map(|(first, _)| (first.id, first.demands())).collect();
        for (first, demands) in lines {
            // All requests of a line have the same requirements.
            if !demands.iter().any(|demand| self.cache.workers.lock().is_hopeless(demand)) {
                continue;
            }
            let calls: Vec<_> = self.queue().line_of(first).filter(|id| self.waiters.contains(*id)).collect();
            for id in calls {
                let Some(demand) = self.waiters.get(id).and_then(|leases| self.unschedulable_demand(leases))
                else {
                    continue;
                };
                let Some(leases) = self.waiters.take(id) else { continue };
                self.queue().remove(id);
                let error = self.error(&UnplacedUnit { is_never: true, demand });
                leases.members.iter().for_each(|member| member.decide(Err(error.clone())));
            }
        }
    }

    /// Returns a demand of the group that no worker could ever take. The affinity of an owner ends
    /// when its worker takes no more work.
    fn unschedulable_demand(&self, leases: &LeaseGroup) -> Option<Arc<Demand>> {
        leases.members.iter().find_map(|member| {
            let demand = self.demand_near(&member.request.demand, member.request.owner_worker);
            let is_hopeless = self.cache.workers.lock().is_hopeless(&demand);
            is_hopeless.then_some(demand)
        })
    }

    /// Answers a unit after the commit.
    pub(super) fn conclude(&mut self, unit: Unit, done: &CommitResult, effects: &mut Effects) {
        match unit {
            Unit::Workload(submitted) => {
                let id = submitted.submission.id;
                let answer = match done.settled.get(&id) {
                    // Another call pinned the workload, or it was cancelled.
                    Some(None) => Ok(()),
                    Some(Some(KnownId::Workload(spec_digest))) => {
                        submitted.submission.repeats(spec_digest).map_err(Into::into)
                    }
                    Some(Some(KnownId::Lease)) => Err(SubmitError::LeaseId(id)),
                    None => {
                        effects.workloads.push(id);
                        match submitted.lease {
                            Some(_) => {
                                effects.deadline |= submitted.row.start_timeout_us.is_some();
                                effects.workers.extend(done.worker_of(submitted.lease));
                                self.queue().add_slot(&submitted.demand.shape.team);
                            }
                            None => {
                                effects.deadline |= submitted.row.queue_deadline.is_some();
                                effects.queued.push(id);
                                let waiting = submitted.waiting(done.came.get(&id).copied());
                                self.queue().put(waiting);
                                // A worker may have gained room since the decision.
                                self.pass_needed = true;
                            }
                        }
                        Ok(())
                    }
                };
                _ = submitted.answer.send(answer);
            }
            Unit::Leases(leases) => {
                for member in leases.members.iter().filter(|member| member.request.demand.kind.takes_a_slot())
                {
                    self.queue().add_slot(&member.request.demand.shape.team);
                }
                self.conclude_leases(leases, done);
            }
        }
    }

    /// Answers a group of leases after the commit.
    pub(super) fn conclude_leases(&self, leases: LeaseGroup, done: &CommitResult) {
        for mut member in leases.members {
            let placed = match (done.existing.get(&member.request.lease), member.granted.take()) {
                (Some(lease), _) => self.existing(&member.request, lease),
                // The id belongs to a workload.
                (None, _) if done.exists(member.request.lease) => Err(PlaceError::Exists),
                // Other leases of the group existed before.
                (None, _) if done.refused.contains(&member.request.lease) => Err(PlaceError::Exists),
                (None, Some(granted)) => Ok(granted),
                // The worker was removed during the decision.
                (None, None) => Err(PlaceError::Undecided),
            };
            member.decide(placed);
        }
    }

    /// Returns the existing lease if it is live and has the same request.
    fn existing(&self, request: &LeaseRequest, lease: &lease::Model) -> PlaceResult {
        let is_live = lease.state == lease::State::Granted && lease.is_driven();
        let workers = self.cache.workers.lock();
        let claims = leases::claims(lease);
        match workers.get(claims.worker) {
            Some(worker)
                if is_live && lease.kind == request.demand.kind && lease.request == request.request =>
            {
                Ok(GrantedLease {
                    claims,
                    worker_name: worker.name.clone(),
                    gateway_endpoint: worker.endpoint.clone(),
                })
            }
            // The worker registered a moment ago, and enters the cache soon.
            None if is_live => Err(PlaceError::Undecided),
            _ => Err(PlaceError::Exists),
        }
    }
}

impl SubmissionUnit {
    /// `came`: sort key and submission time of a workload that was accepted before.
    fn waiting(&self, came: Option<(Uuid, Timestamp)>) -> WaitingRequest {
        let (sequence, since) = came.unwrap_or((self.row.sequence, Timestamp(self.row.submitted_at)));
        WaitingRequest {
            id: self.row.id,
            is_elsewhere: false,
            others: vec![],
            sequence,
            priority: self.row.priority,
            since,
            demand: self.demand.clone(),
            locations: self.locations.clone(),
            must_start: self.row.start_timeout_us.is_some(),
            reported: self.reasons.clone(),
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
        workload.into_iter().chain(members.iter().map(|member| member.request.lease))
    }

    /// Ids of workloads and leases that must be unique within a step.
    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        let (workload, members): (_, &[Member]) = match self {
            Self::Workload(submitted) => (Some(submitted.row.id), &[]),
            Self::Leases(leases) => (None, &leases.members),
        };
        workload.into_iter().chain(members.iter().map(|member| member.request.lease.uuid()))
    }

    /// Returns whether no caller waits for the unit any more.
    pub(super) fn is_disconnected(&self) -> bool {
        match self {
            // A submitted workload is durable, whether or not its caller waits.
            Self::Workload(_) => false,
            Self::Leases(leases) => leases.is_disconnected(),
        }
    }

    /// Sets the workers of owners.
    pub(super) fn set_owner_workers(&mut self, kept: &HashMap<LeaseId, WorkerId>) {
        if let Self::Leases(leases) = self {
            leases.set_owner_workers(kept);
        }
    }

    /// Returns the span of the placement, in the trace of the submission.
    pub(super) fn span(&self) -> Option<tracing::Span> {
        match self {
            Self::Workload(submitted) if submitted.lease.is_some() => {
                Some(super::span(submitted.submission.id, &submitted.row.traceparent))
            }
            Self::Workload(_) | Self::Leases(_) => None,
        }
    }
}

/// Answers requests with a database error.
pub(super) fn fail(requests: Vec<Request>, error: &DbErr) {
    let mut open = OpenRequests::default();
    open.add(requests, Timestamp::now());
    open.fail(error);
}

/// Groups the leases of a call. Groups with a higher priority come first, then the order of the
/// call counts.
fn into_groups(members: Vec<Member>, now: Timestamp) -> Vec<LeaseGroup> {
    let (mut units, mut of_group) = (Vec::<Vec<Member>>::new(), HashMap::new());
    for member in members {
        let next = units.len();
        let at = member.request.group.map_or(next, |group| *of_group.entry(group).or_insert(next));
        match units.get_mut(at) {
            Some(unit) => unit.push(member),
            None => units.push(vec![member]),
        }
    }
    let mut units: Vec<_> = units.into_iter().filter_map(|unit| LeaseGroup::new(unit, now)).collect();
    units.sort_by_key(|unit| Reverse(unit.priority));
    units
}

impl OpenRequests {
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
                Request::Place(requests, answer) => {
                    let call = Call::new(requests.len(), answer);
                    let member = |(item, request)| Member::new(request, call.clone(), item);
                    let members = requests.into_iter().enumerate().map(member).collect();
                    open.units.extend(into_groups(members, now).into_iter().map(Unit::Leases));
                }
                // Handled before the round.
                Request::CatchUp(answer) => _ = answer.send(()),
                Request::Release(leases, answer) => {
                    open.releases.extend(leases);
                    open.released.push(answer);
                }
            }
        }
    }

    /// Answers all requests with a database error.
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

/// Creates the unit of a submitted workload, or of a pinned one with `locations`.
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
