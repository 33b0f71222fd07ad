//! The state of the model, which the database must equal after each step.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::{LeaseClaims, SessionClaims};
use domain::workload::{FailureReason, Outcome};
use domain::{GatewayInstance, LeaseId, MarkerId, WorkerId, WorkloadId};
use uuid::Uuid;

use super::calls::WaitingCall;
use super::fixtures::{self, Amounts, Requirements};
use crate::db::entity::lease::{EndedBy, Kind, State as LeaseState, StopReason};
use crate::db::entity::removed_worker::WorkerEnd;
use crate::db::entity::worker::{Desired, State as Contact};
use crate::db::entity::workload::State as Progress;

/// Minutes since the start of a run, by the moved clock.
pub(super) type Minutes = i64;

/// The whole state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) workers: BTreeMap<String, Worker>,
    pub(super) removed_workers: BTreeMap<WorkerId, RemovedWorker>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) workloads: BTreeMap<WorkloadId, Workload>,
    /// Workers of the owners of each team, and the last grant.
    pub(super) owners: BTreeMap<(String, String), (WorkerId, Minutes)>,
    /// Pending calls to the artifact store: number by holder and kind.
    pub(super) outbox: BTreeMap<(Uuid, Parcel), usize>,
    /// Waiting calls, which the database does not contain.
    pub(super) waiting: Vec<WaitingCall>,
    /// Number of arrivals in the queue.
    pub(super) arrivals: usize,
    /// Order of arrival of workloads.
    pub(super) arrived: BTreeMap<WorkloadId, usize>,
    /// The value of `same_worker_as_lease_id` of driven leases.
    pub(super) near: BTreeMap<LeaseId, Option<LeaseId>>,
    /// The generation of each worker's desired state. Only the scheduler decides when it rises.
    pub(super) generations: BTreeMap<WorkerId, u64>,
    /// The first generation that contains each lease.
    pub(super) lease_generations: BTreeMap<LeaseId, u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) instance: GatewayInstance,
    pub(super) marker: MarkerId,
    /// The team of the worker's first registration.
    pub(super) team: Option<String>,
    pub(super) incarnation: u64,
    pub(super) session: u64,
    pub(super) desired: Desired,
    pub(super) contact: Contact,
    /// Whether the gateway supports no protocol version of the scheduler.
    pub(super) misfit: bool,
    pub(super) attended: bool,
    pub(super) heard_at: Minutes,
    pub(super) patient_since: Minutes,
    pub(super) interrupt_at: Option<Minutes>,
    pub(super) landed: bool,
    pub(super) forced: bool,
    pub(super) leaving: bool,
    pub(super) failures: i64,
    pub(super) quarantines: i64,
    pub(super) quarantined_until: Option<Minutes>,
    pub(super) failed_team: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemovedWorker {
    pub(super) name: String,
    pub(super) how: WorkerEnd,
    /// The marker that may not register again.
    pub(super) marker: Option<MarkerId>,
    pub(super) at: Minutes,
    /// Order of removals.
    pub(super) order: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lease {
    pub(super) worker: WorkerId,
    pub(super) incarnation: u64,
    pub(super) kind: Kind,
    pub(super) team: String,
    pub(super) amounts: Amounts,
    pub(super) workload: Option<WorkloadId>,
    pub(super) owner: String,
    pub(super) state: LeaseState,
    pub(super) phase: i64,
    pub(super) stop: Option<StopReason>,
    /// Grace period in seconds.
    pub(super) grace: Option<i64>,
    pub(super) ended_by: Option<EndedBy>,
    pub(super) granted_at: Minutes,
    pub(super) expires_at: Option<Minutes>,
    pub(super) ended_at: Option<Minutes>,
    /// Whether something may run under the lease.
    pub(super) in_use: bool,
    /// Whether the artifact store has pins or containers of the lease.
    pub(super) settles: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) state: Progress,
    pub(super) lease: Option<LeaseId>,
    pub(super) started: bool,
    pub(super) retried: i64,
    pub(super) failed_on: Vec<(WorkerId, FailureReason)>,
    pub(super) queue_deadline: Option<Minutes>,
    pub(super) run_deadline: Option<Minutes>,
    pub(super) finished_at: Option<Minutes>,
    pub(super) ending: Option<Ending>,
    /// Events. Consecutive `queued` events count once.
    pub(super) events: Vec<&'static str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) outcome: Outcome,
    pub(super) reason: Option<FailureReason>,
    /// Whether outputs were published.
    pub(super) has_outputs: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Parcel {
    EndAttempt,
    Settle,
}

/// The answer of a worker to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Yes,
    NotNow,
    Never,
}

impl Lease {
    pub(super) fn is_live(&self) -> bool {
        self.state != LeaseState::Ended
    }

    pub(super) fn is_granted(&self) -> bool {
        self.state == LeaseState::Granted
    }
}

impl State {
    pub(super) fn worker_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.values_mut().find(|worker| worker.id == id)
    }

    pub(super) fn name(&self, id: WorkerId) -> Option<&str> {
        self.workers.iter().find(|(_, worker)| worker.id == id).map(|(name, _)| name.as_str())
    }

    /// Returns the live leases of a worker.
    pub(super) fn live(&self, worker: WorkerId) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let live = self.leases.iter().map(|(id, lease)| (*id, lease));
        live.filter(move |(_, lease)| lease.worker == worker && lease.is_live())
    }

    /// Returns the present requirements of a workload.
    pub(super) fn requirements(&self, id: WorkloadId) -> Requirements {
        let failed_on = self.workloads.get(&id).map(|workload| &workload.failed_on[..]).unwrap_or_default();
        let failed_on = failed_on.iter().map(|(worker, _)| *worker).collect();
        Requirements { failed_on, ..fixtures::requirements_of_workload(id) }
    }

    /// Returns the answer of the worker with this name.
    pub(super) fn verdict(&self, name: &str, requirements: &Requirements, now: Minutes) -> Verdict {
        let (worker, traits) = (&self.workers[name], fixtures::traits(name));
        let lacks = |has: &[&str], required: &[&str]| required.iter().any(|word| !has.contains(word));
        // A pruned worker counts as lost, but may have had contact a moment ago.
        let was_heard_lately = now - worker.heard_at < 95;
        let never = (worker.contact == Contact::Lost && !was_heard_lately)
            || worker.desired == Desired::Retire
            || worker.misfit
            || traits.platform != requirements.platform
            || worker.team.as_ref().is_some_and(|team| team != requirements.team)
            || (requirements.takes_a_slot && requirements.tags.is_empty() && !traits.tags.is_empty())
            || lacks(traits.tags, requirements.tags)
            || lacks(traits.capabilities, requirements.capabilities)
            || !requirements.amounts.fit(traits.has)
            || requirements.failed_on.contains(&worker.id)
            || requirements.only.is_some_and(|only| only != worker.id);
        if never {
            return Verdict::Never;
        }
        let slots: Vec<_> =
            self.live(worker.id).map(|(_, lease)| lease).filter(|lease| lease.kind.takes_a_slot()).collect();
        let taken = slots.iter().fold(Amounts::default(), |all, lease| all.and(lease.amounts));
        let failed = worker.failed_team.as_ref().is_none_or(|team| team == requirements.team);
        let is_on_probation = worker.quarantines > 0 && failed;
        let is_full = traits.max_tasks.is_some_and(|max| slots.len() >= max as usize)
            || (is_on_probation && !slots.is_empty())
            || (worker.quarantined_until.is_some() && failed);
        let not_now = worker.contact != Contact::Running
            || worker.desired == Desired::Cordon
            || (requirements.takes_a_slot && is_full)
            || !requirements.amounts.fit_beside(taken, traits.has);
        if not_now { Verdict::NotNow } else { Verdict::Yes }
    }

    /// Returns the worker of an owner, as long as it takes work.
    pub(super) fn worker_of_owner(&self, team: &str, owner: &str) -> Option<WorkerId> {
        let (worker_id, _) = self.owners.get(&(team.to_owned(), owner.to_owned()))?;
        let worker = &self.workers[self.name(*worker_id)?];
        (worker.contact != Contact::Lost && worker.desired == Desired::Run).then_some(*worker_id)
    }

    /// Returns the feasible workers: the team's own ones, if any of them is feasible.
    pub(super) fn willing(&self, requirements: &Requirements, now: Minutes) -> BTreeSet<WorkerId> {
        let willing =
            self.workers.iter().filter(|(name, _)| self.verdict(name, requirements, now) == Verdict::Yes);
        let (own, of_all): (BTreeMap<_, _>, BTreeMap<_, _>) =
            willing.partition(|(_, worker)| worker.team.is_some());
        let best = if own.is_empty() { of_all } else { own };
        best.values().map(|worker| worker.id).collect()
    }

    /// Returns whether workers exist and none could ever take the request.
    pub(super) fn is_hopeless(&self, requirements: &Requirements, now: Minutes) -> bool {
        let never = |name: &String| self.verdict(name, requirements, now) == Verdict::Never;
        !self.workers.is_empty() && self.workers.keys().all(never)
    }

    /// Returns the worker of `session`, or why the session has ended.
    pub(super) fn check_session(&self, session: &SessionClaims) -> Result<String, &'static str> {
        let speaks = |worker: &Worker| {
            worker.session == session.session.0 && worker.incarnation == session.incarnation.0
        };
        match self.name(session.worker) {
            Some(name) if self.workers[name].leaving => Err("Forgotten"),
            Some(name) if speaks(&self.workers[name]) => Ok(name.to_owned()),
            Some(_) => Err("Stale"),
            None => match self.removed_workers.get(&session.worker).map(|removed| removed.how) {
                Some(WorkerEnd::Retired) => Err("Retired"),
                _ => Err("Forgotten"),
            },
        }
    }

    /// Returns the workload of `claims` while its lease is live.
    pub(super) fn live_workload(&self, claims: &LeaseClaims) -> Option<WorkloadId> {
        let (workload, _) = claims.attempt?;
        let holds = self.workloads.get(&workload)?.lease == Some(claims.lease);
        (holds && self.leases.get(&claims.lease)?.is_live()).then_some(workload)
    }

    pub(super) fn add_parcel(&mut self, holder: Uuid, parcel: Parcel) {
        *self.outbox.entry((holder, parcel)).or_default() += 1;
    }
}
