//! What there is, as far as callers, gateways and operators can tell: what the database has to say after each operation.

use std::collections::{BTreeMap, BTreeSet};

use domain::worker::{LeaseClaims, SessionClaims};
use domain::workload::{FailureReason, Outcome};
use domain::{GatewayInstance, LeaseId, MarkerId, WorkerId, WorkloadId};
use uuid::Uuid;

use super::calls::Waiting;
use super::fixtures::{self, Amounts, Asks};
use crate::db::entity::lease::{EndedBy, Kind, State as LeaseState, StopReason};
use crate::db::entity::removed_worker::WorkerEnd;
use crate::db::entity::worker::{Desired, State as Contact};
use crate::db::entity::workload::State as Progress;

/// Since the start of a run, as the clock was moved.
pub(super) type Minutes = i64;

/// Everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) workers: BTreeMap<String, Worker>,
    pub(super) gone: BTreeMap<WorkerId, Gone>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) workloads: BTreeMap<WorkloadId, Workload>,
    /// Where the containers of a team's owners are, and when the last lease was granted to them.
    pub(super) owners: BTreeMap<(String, String), (WorkerId, Minutes)>,
    /// What the artifact store has to be told: of whom, and of how many of its attempts and ends.
    pub(super) outbox: BTreeMap<(Uuid, Parcel), usize>,
    /// What only replicas and callers know, and the database does not say: the calls that wait,
    pub(super) waiting: Vec<Waiting>,
    /// how many have come to wait,
    pub(super) arrivals: usize,
    /// which of them workloads were,
    pub(super) arrived: BTreeMap<WorkloadId, usize>,
    /// and near to which other lease driven ones were granted.
    pub(super) near: BTreeMap<LeaseId, Option<LeaseId>>,
    /// The generation of what each worker shall do, of which only the scheduler can say when it rises.
    pub(super) generations: BTreeMap<WorkerId, u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Worker {
    pub(super) id: WorkerId,
    pub(super) instance: GatewayInstance,
    pub(super) marker: MarkerId,
    /// Whose it is alone, as it said when it was new.
    pub(super) team: Option<String>,
    pub(super) incarnation: u64,
    pub(super) session: u64,
    pub(super) desired: Desired,
    pub(super) contact: Contact,
    /// Nobody can speak with its gateway.
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
pub(super) struct Gone {
    pub(super) name: String,
    pub(super) how: WorkerEnd,
    /// What has this marker may not register again.
    pub(super) marker: Option<MarkerId>,
    pub(super) at: Minutes,
    /// Who went later has a higher one.
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
    /// In seconds.
    pub(super) grace: Option<i64>,
    pub(super) ended_by: Option<EndedBy>,
    pub(super) granted_at: Minutes,
    pub(super) expires_at: Option<Minutes>,
    pub(super) ended_at: Option<Minutes>,
    /// The artifact store holds something for it.
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
    /// What was told to who watches; what is told again and again while it waits counts once.
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

/// What a worker says to who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Says {
    Yes,
    NotNow,
    Never,
}

impl Lease {
    pub(super) fn is_live(&self) -> bool {
        self.state != LeaseState::Ended
    }
}

impl State {
    pub(super) fn worker_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.values_mut().find(|worker| worker.id == id)
    }

    pub(super) fn name(&self, id: WorkerId) -> Option<&str> {
        self.workers.iter().find(|(_, worker)| worker.id == id).map(|(name, _)| name.as_str())
    }

    /// Leases that have not ended.
    pub(super) fn live(&self, worker: WorkerId) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let live = self.leases.iter().map(|(id, lease)| (*id, lease));
        live.filter(move |(_, lease)| lease.worker == worker && lease.is_live())
    }

    /// What the workload asks of a worker now.
    pub(super) fn asks(&self, id: WorkloadId) -> Asks {
        let failed_on = self.workloads.get(&id).map(|workload| &workload.failed_on[..]).unwrap_or_default();
        let failed_on = failed_on.iter().map(|(worker, _)| *worker).collect();
        Asks { failed_on, ..fixtures::asks_of_workload(id) }
    }

    /// What the worker of this name says to who asks.
    pub(super) fn says(&self, name: &str, asks: &Asks, now: Minutes) -> Says {
        let (worker, traits) = (&self.workers[name], fixtures::traits(name));
        let lacks = |has: &[&str], wanted: &[&str]| wanted.iter().any(|word| !has.contains(word));
        // One that was pruned counts as lost, but may have been heard a moment ago.
        let was_heard_lately = now - worker.heard_at < 95;
        let never = (worker.contact == Contact::Lost && !was_heard_lately)
            || worker.desired == Desired::Retire
            || worker.misfit
            || traits.platform != asks.platform
            || worker.team.as_ref().is_some_and(|team| team != asks.team)
            || (asks.takes_a_slot && asks.tags.is_empty() && !traits.tags.is_empty())
            || lacks(traits.tags, asks.tags)
            || lacks(traits.capabilities, asks.capabilities)
            || !asks.amounts.fit(traits.has)
            || asks.failed_on.contains(&worker.id)
            || asks.only.is_some_and(|only| only != worker.id);
        if never {
            return Says::Never;
        }
        let slots: Vec<_> =
            self.live(worker.id).map(|(_, lease)| lease).filter(|lease| lease.kind.takes_a_slot()).collect();
        let taken = slots.iter().fold(Amounts::default(), |all, lease| all.and(lease.amounts));
        let failed = worker.failed_team.as_ref().is_none_or(|team| team == asks.team);
        let is_on_probation = worker.quarantines > 0 && failed;
        let is_full = traits.max_tasks.is_some_and(|max| slots.len() >= max as usize)
            || (is_on_probation && !slots.is_empty())
            || (worker.quarantined_until.is_some() && failed);
        let not_now = worker.contact != Contact::Running
            || worker.desired == Desired::Cordon
            || (asks.takes_a_slot && is_full)
            || !asks.amounts.fit_beside(taken, traits.has);
        if not_now { Says::NotNow } else { Says::Yes }
    }

    /// Where the containers of an owner are, as long as that worker takes work.
    pub(super) fn home(&self, team: &str, owner: &str) -> Option<WorkerId> {
        let (home, _) = self.owners.get(&(team.to_owned(), owner.to_owned()))?;
        let worker = &self.workers[self.name(*home)?];
        (worker.contact != Contact::Lost && worker.desired == Desired::Run).then_some(*home)
    }

    /// Where it may be placed: on the team's own workers, as long as one of those would do.
    pub(super) fn willing(&self, asks: &Asks, now: Minutes) -> BTreeSet<WorkerId> {
        let willing = self.workers.iter().filter(|(name, _)| self.says(name, asks, now) == Says::Yes);
        let (own, of_all): (BTreeMap<_, _>, BTreeMap<_, _>) =
            willing.partition(|(_, worker)| worker.team.is_some());
        let best = if own.is_empty() { of_all } else { own };
        best.values().map(|worker| worker.id).collect()
    }

    /// Whether no worker could ever take it, and there are some.
    pub(super) fn is_hopeless(&self, asks: &Asks, now: Minutes) -> bool {
        let never = |name: &String| self.says(name, asks, now) == Says::Never;
        !self.workers.is_empty() && self.workers.keys().all(never)
    }

    /// Why `session` does not speak for its worker any more.
    pub(super) fn judge(&self, session: &SessionClaims) -> Result<String, &'static str> {
        let speaks = |worker: &Worker| {
            worker.session == session.session.0 && worker.incarnation == session.incarnation.0
        };
        match self.name(session.worker) {
            Some(name) if self.workers[name].leaving => Err("Forgotten"),
            Some(name) if speaks(&self.workers[name]) => Ok(name.to_owned()),
            Some(_) => Err("Stale"),
            None => match self.gone.get(&session.worker).map(|gone| gone.how) {
                Some(WorkerEnd::Retired) => Err("Retired"),
                _ => Err("Forgotten"),
            },
        }
    }

    /// The workload that `claims` are about, while its lease lives.
    pub(super) fn held(&self, claims: &LeaseClaims) -> Option<WorkloadId> {
        let (workload, _) = claims.attempt?;
        let holds = self.workloads.get(&workload)?.lease == Some(claims.lease);
        (holds && self.leases.get(&claims.lease)?.is_live()).then_some(workload)
    }

    pub(super) fn owe(&mut self, holder: Uuid, parcel: Parcel) {
        *self.outbox.entry((holder, parcel)).or_default() += 1;
    }
}
