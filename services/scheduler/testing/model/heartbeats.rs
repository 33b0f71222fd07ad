//! The model of workers.

use domain::worker::SessionClaims;
use domain::{LeaseId, WorkerId};

use super::attempts::End;
use super::fixtures;
use super::state::{Lease, Minutes, RemovedWorker, State, Worker};
use crate::db::entity::lease::{EndedBy, State as LeaseState, StopReason};
use crate::db::entity::removed_worker::WorkerEnd;
use crate::db::entity::worker::{Desired, State as Contact};
use crate::db::entity::workload::State as Progress;
use crate::lifecycle::departure::Withdrawal;
use crate::workers::Registration;

impl Worker {
    /// Ends the quarantine of the worker.
    pub(super) fn forgive(&mut self) {
        (self.failures, self.quarantines, self.quarantined_until) = (0, 0, None);
        self.failed_team = None;
    }
}

impl State {
    /// Returns whether the gateway may be responsible for its worker, in its session or a new one.
    fn may_speak(&self, registration: &Registration, now: Minutes) -> Result<(), &'static str> {
        let Some(known) = self.workers.get(&registration.name) else {
            let is_retired = |removed: &RemovedWorker| {
                removed.name == registration.name && removed.marker == Some(registration.marker.id)
            };
            return if self.removed_workers.values().any(is_retired) { Err("Retired") } else { Ok(()) };
        };
        if known.leaving {
            return Err("Leaving");
        }
        if known.team != registration.labels.team {
            return Err("OtherTeam");
        }
        if known.instance == registration.instance {
            return Ok(());
        }
        let was_superseded = |last: &SessionClaims| {
            last.instance == registration.instance
                && last.worker == known.id
                && last.session.0 < known.session
        };
        if registration.last.as_ref().is_some_and(was_superseded) {
            return Err("Stale");
        }
        if known.attended && now - known.heard_at < 35 { Err("AlreadyAttended") } else { Ok(()) }
    }

    /// Creates a worker, with the ids that the scheduler chose.
    fn fresh(
        registration: &Registration,
        id: WorkerId,
        incarnation: u64,
        session: u64,
        now: Minutes,
    ) -> Worker {
        Worker {
            id,
            instance: registration.instance,
            marker: registration.marker.id,
            team: registration.labels.team.clone(),
            incarnation,
            session,
            desired: Desired::Run,
            contact: Contact::Running,
            misfit: false,
            attended: true,
            heard_at: now,
            patient_since: now,
            interrupt_at: None,
            landed: false,
            forced: false,
            leaving: false,
            failures: 0,
            quarantines: 0,
            quarantined_until: None,
            failed_team: None,
        }
    }

    /// Registers a gateway. `session`: the returned session, with the numbers that the scheduler
    /// chose.
    pub(super) fn register(
        &mut self,
        registration: &Registration,
        opened: Option<&SessionClaims>,
        now: Minutes,
    ) -> &'static str {
        if let Err(refused) = self.may_speak(registration, now) {
            return refused;
        }
        let Some(claims) = opened else { return "Ok" };
        let (incarnation, session) = (claims.incarnation.0, claims.session.0);
        let newest = self
            .removed_workers
            .keys()
            .chain(self.workers.values().map(|worker| &worker.id))
            .all(|id| *id != claims.worker);
        let Some(known) = self.workers.get_mut(&registration.name) else {
            assert!(newest, "a new worker has a new id");
            let fresh = Self::fresh(registration, claims.worker, incarnation, session, now);
            self.workers.insert(registration.name.clone(), fresh);
            return "Ok";
        };
        assert_eq!(known.id, claims.worker, "the worker keeps its id");
        if known.instance == registration.instance {
            assert_eq!(known.session, session, "a reconnect keeps the session");
        } else {
            assert!(known.session < session, "sessions rise");
        }
        if known.marker == registration.marker.id {
            assert_eq!(known.incarnation, incarnation, "the contents are unchanged");
        } else {
            assert!(known.incarnation < incarnation, "incarnations rise");
            known.forgive();
        }
        known.instance = registration.instance;
        known.marker = registration.marker.id;
        (known.incarnation, known.session) = (incarnation, session);
        (known.contact, known.misfit, known.attended, known.heard_at) = (Contact::Running, false, true, now);
        "Ok"
    }

    /// Registers an incompatible gateway. `after`: the state afterwards.
    pub(super) fn misfit(&mut self, registration: &Registration, after: &Self, now: Minutes) -> &'static str {
        if let Err(refused) = self.may_speak(registration, now) {
            return refused;
        }
        if let Some(known) = self.workers.get_mut(&registration.name) {
            known.misfit = true;
        } else if let Some(Worker { id, incarnation, session, .. }) = after.workers.get(&registration.name) {
            let fresh = Self::fresh(registration, *id, *incarnation, *session, now);
            let fresh = Worker { contact: Contact::Stalled, attended: false, misfit: true, ..fresh };
            self.workers.insert(registration.name.clone(), fresh);
        }
        "Ok"
    }

    /// Ends the contact of `session`, after which nothing was received.
    pub(super) fn sign_off(&mut self, session: &SessionClaims) {
        let Ok(name) = self.check_session(session) else { return };
        let worker = self.workers.get_mut(&name).expect("a worker");
        (worker.attended, worker.contact) = (false, Contact::Stalled);
    }

    pub(super) fn record_heartbeat(&mut self, session: &SessionClaims, now: Minutes) -> &'static str {
        let name = match self.check_session(session) {
            Ok(name) => name,
            Err(refused) => return refused,
        };
        let worker = self.workers.get_mut(&name).expect("a worker");
        (worker.contact, worker.attended, worker.heard_at) = (Contact::Running, true, now);
        "Ok"
    }

    pub(super) fn withdraw_worker(
        &mut self,
        name: &str,
        down: Withdrawal,
        interrupt_after: Option<Minutes>,
        now: Minutes,
    ) -> &'static str {
        let Some(worker) = self.workers.get_mut(name).filter(|worker| !worker.leaving) else {
            let was_there = self.was_there(name);
            return if down != Withdrawal::Cordon && was_there { "Ok" } else { "NotFound" };
        };
        (worker.desired, worker.forced) = match down {
            Withdrawal::Cordon => (Desired::Cordon, false),
            Withdrawal::Retire { force } => (Desired::Retire, force),
        };
        worker.interrupt_at = interrupt_after.map(|after| now + after).or(worker.interrupt_at);
        "Ok"
    }

    fn was_there(&self, name: &str) -> bool {
        self.workers.contains_key(name) || self.removed_workers.values().any(|removed| removed.name == name)
    }

    pub(super) fn run(&mut self, name: &str) -> &'static str {
        if let Some(worker) = self.workers.get_mut(name).filter(|worker| !worker.leaving) {
            worker.desired = Desired::Run;
            (worker.forced, worker.interrupt_at, worker.landed) = (false, None, false);
            worker.forgive();
            return "Ok";
        }
        // Returns the last removed worker of that name.
        let last = self
            .removed_workers
            .values()
            .filter(|removed| removed.name == name)
            .max_by_key(|removed| removed.order);
        if last.is_none_or(|removed| removed.how != WorkerEnd::Retired) {
            return "NotFound";
        }
        self.removed_workers
            .values_mut()
            .filter(|removed| removed.name == name)
            .for_each(|removed| removed.marker = None);
        "Ok"
    }

    pub(super) fn prune(&mut self, name: &str) -> &'static str {
        let was_there = self.was_there(name);
        match self.workers.get_mut(name) {
            Some(worker) if worker.leaving => "Ok",
            Some(worker) if worker.contact == Contact::Running => "InContact",
            Some(worker) => {
                (worker.leaving, worker.contact) = (true, Contact::Lost);
                worker.session += 1;
                "Ok"
            }
            None if was_there => "Ok",
            None => "NotFound",
        }
    }

    /// Runs the departure loop until nothing changes.
    pub(super) fn depart_if_due(&mut self, now: Minutes) {
        loop {
            let before = self.clone();
            for name in before.workers.keys() {
                self.depart_one(name, now);
            }
            for worker in self.workers.values_mut() {
                if worker.quarantined_until.is_some_and(|until| until <= now) {
                    worker.quarantined_until = None;
                }
            }
            if *self == before {
                return;
            }
        }
    }

    /// Returns whether the attempt under a lease is interruptible.
    fn may_be_interrupted(&self, lease: LeaseId) -> bool {
        let workload = self.leases[&lease].workload;
        let spec = |id| fixtures::spec(id, domain::ArtifactId::from_uuid(id.uuid()), false);
        workload.is_some_and(|id| spec(id).interruptible)
    }

    fn depart_one(&mut self, name: &str, now: Minutes) {
        let worker = self.workers[name].clone();
        let live: Vec<_> = self.live(worker.id).map(|(id, _)| id).collect();
        if worker.leaving || (fixtures::traits(name).ephemeral && worker.contact == Contact::Lost) {
            let how = if worker.leaving { WorkerEnd::Pruned } else { WorkerEnd::Expired };
            if live.is_empty() {
                self.remove(name, how, now);
            }
            return;
        }
        if worker.desired == Desired::Run {
            return;
        }
        let is_due = worker.interrupt_at.is_some_and(|at| at <= now);
        let holds_up = live.iter().any(|lease| !self.may_be_interrupted(*lease));
        if is_due || !holds_up {
            for lease in &live {
                let known = &self.leases[lease];
                match known.workload {
                    _ if known.stop.is_some() => {}
                    None if is_due => self.stop_driven(*lease, StopReason::Interrupted, now),
                    None => {}
                    Some(_) if is_due || self.may_be_interrupted(*lease) => {
                        self.stop(*lease, StopReason::Interrupted, 10);
                    }
                    Some(_) => {}
                }
            }
        }
        let holds_up = self.live(worker.id).any(|(lease, _)| !self.may_be_interrupted(lease));
        let known = self.workers.get_mut(name).expect("a worker");
        known.landed |= !holds_up;
        if is_due {
            known.interrupt_at = None;
        }
        let is_settling = |id: &LeaseId| {
            let workload = self.leases[id].workload.and_then(|id| self.workloads.get(&id));
            workload.is_some_and(|workload| workload.state == Progress::Settling)
        };
        let of_it = self.leases.iter().filter(|(_, lease)| lease.worker == worker.id);
        let settles = of_it.map(|(id, _)| *id).any(|id| is_settling(&id));
        if worker.desired == Desired::Retire && live.is_empty() && !settles {
            self.remove(name, WorkerEnd::Retired, now);
        }
    }

    fn remove(&mut self, name: &str, how: WorkerEnd, now: Minutes) {
        let Some(worker) = self.workers.remove(name) else { return };
        self.leases.retain(|_, lease| lease.worker != worker.id);
        let marker = (how == WorkerEnd::Retired).then_some(worker.marker);
        let order = self.last_to_go() + 1;
        self.removed_workers
            .insert(worker.id, RemovedWorker { name: name.to_owned(), how, marker, at: now, order });
    }

    pub(super) fn last_to_go(&self) -> usize {
        self.removed_workers.values().map(|removed| removed.order).max().unwrap_or_default()
    }

    /// Applies all timeouts.
    pub(super) fn expire(&mut self, now: Minutes) {
        self.time_out(now);
        let is_late = |lease: &Lease| {
            lease.is_granted() && lease.workload.is_none() && lease.expires_at.is_some_and(|at| at <= now)
        };
        let late: Vec<_> =
            self.leases.iter().filter(|(_, lease)| is_late(lease)).map(|(id, _)| *id).collect();
        late.into_iter().for_each(|id| self.stop_driven(id, StopReason::Expired, now));
        for worker in self.workers.values_mut() {
            let silent = now - worker.heard_at;
            let may_be_ours = now - worker.patient_since <= 35;
            worker.contact = match worker.contact {
                Contact::Running if silent > 35 && !may_be_ours => Contact::Stalled,
                known => known,
            };
            if worker.contact == Contact::Stalled && silent > 95 && !may_be_ours {
                worker.contact = Contact::Lost;
            }
        }
        self.withdraw_attempt(now);
        self.end_stranded_leases(now);
    }

    /// Withdraws attempts that stalled workers have not started.
    fn withdraw_attempt(&mut self, now: Minutes) {
        let silent = self.workers.values().filter(|worker| {
            worker.contact == Contact::Stalled
                && now - worker.heard_at > 35
                && now - worker.patient_since > 35
        });
        for worker in silent.map(|worker| worker.id).collect::<Vec<_>>() {
            for id in self.tried_on(worker) {
                if self.workloads[&id].state == Progress::Assigned {
                    self.end_attempt(id, End::WorkerLost, now);
                }
            }
        }
    }

    /// Returns workloads with live leases on a worker.
    fn tried_on(&self, worker: WorkerId) -> Vec<domain::WorkloadId> {
        self.live(worker).filter_map(|(_, lease)| lease.workload).collect()
    }

    /// Ends or gives up the leases of lost workers and past incarnations.
    pub(super) fn end_stranded_leases(&mut self, now: Minutes) {
        for worker in self.workers.values().cloned().collect::<Vec<_>>() {
            let live: Vec<_> = self.live(worker.id).map(|(id, lease)| (id, lease.clone())).collect();
            for (id, lease) in live {
                if worker.contact != Contact::Lost && lease.incarnation >= worker.incarnation {
                    continue;
                }
                match lease.workload {
                    Some(workload) if self.given_up_lease(id).is_none() => {
                        self.end_attempt(workload, End::WorkerLost, now);
                    }
                    _ if lease.in_use && self.may_still_run(worker.id, lease.incarnation) => {
                        self.give_up_lease(id);
                    }
                    _ => self.end_lease(id, EndedBy::Lost, now),
                }
            }
        }
    }

    /// Deletes old records.
    pub(super) fn delete_old(&mut self, now: Minutes) {
        let is_old = |at: Option<Minutes>| at.is_some_and(|at| now - at > 995);
        let outbox = &self.outbox;
        let is_told = |id: uuid::Uuid| outbox.keys().all(|(holder, _)| *holder != id);
        let leases = &self.leases;
        let holds = |id: &domain::WorkloadId| {
            leases.values().any(|lease| lease.workload == Some(*id) && lease.is_live())
        };
        self.workloads.retain(|id, workload| {
            let is_old = workload.state == Progress::Finished && is_old(workload.finished_at);
            !(is_old && is_told(id.uuid()) && !holds(id))
        });
        let workloads = &self.workloads;
        self.leases.retain(|_, lease| match lease.workload {
            Some(workload) => workloads.contains_key(&workload),
            None => lease.state != LeaseState::Ended || !is_old(lease.ended_at),
        });
        self.removed_workers.retain(|_, removed| !is_old(Some(removed.at)));
        let leases = &self.leases;
        self.owners.retain(|(team, owner), (_, granted_at)| {
            let is_in_use = |lease: &Lease| lease.is_live() && (&lease.team, &lease.owner) == (team, owner);
            now - *granted_at < 60 || leases.values().any(is_in_use)
        });
    }
}
