//! The model of workloads and their attempts.

use domain::workload::{Exit, FailureReason, Outcome};
use domain::{LeaseId, WorkerId, WorkloadId};

use super::fixtures::{self, Uses, spec};
use super::state::{Ending, Minutes, Parcel, State, Workload};
use crate::db::entity::lease::{EndedBy, State as LeaseState, StopReason};
use crate::db::entity::workload::State as Progress;

/// A gateway's report of the end of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) exit: Option<Exit>,
    pub(super) failure: Option<FailureReason>,
    /// Whether the report names a published output.
    pub(super) has_outputs: bool,
}

/// End of an attempt.
#[derive(Debug, Clone, Copy)]
pub(super) enum End {
    Reported(Report),
    WorkerLost,
    /// The gateway does not know the attempt.
    Unknown,
}

fn errored(reason: FailureReason) -> Ending {
    Ending { outcome: Outcome::Errored, reason: Some(reason), has_outputs: false }
}

fn aborted() -> Ending {
    Ending { outcome: Outcome::Aborted, ..errored(FailureReason::Cancelled) }
}

fn minutes(duration: std::time::Duration) -> Minutes {
    i64::try_from(duration.as_secs() / 60).expect("few")
}

impl State {
    pub(super) fn workload_mut(&mut self, id: WorkloadId) -> &mut Workload {
        self.workloads.get_mut(&id).expect("known to the model")
    }

    fn spec(&self, id: WorkloadId) -> domain::workload::WorkloadSpec {
        spec(id, domain::ArtifactId::from_uuid(id.uuid()), false)
    }

    /// Adds a submitted workload.
    pub(super) fn accept(&mut self, id: WorkloadId, now: Minutes) {
        let workload = Workload {
            state: Progress::Accepted,
            lease: None,
            started: false,
            retried: 0,
            failed_on: vec![],
            queue_deadline: self.spec(id).queue_timeout.map(|timeout| now + minutes(timeout)),
            run_deadline: None,
            finished_at: None,
            ending: None,
            events: vec![],
        };
        self.workloads.insert(id, workload);
        self.arrivals += 1;
        self.arrived.insert(id, self.arrivals);
    }

    /// Adds a workload to the queue.
    pub(super) fn queue(&mut self, id: WorkloadId) {
        let workload = self.workload_mut(id);
        workload.state = Progress::Pending;
        workload.events.push("queued");
    }

    /// Requeues a workload after an attempt.
    fn requeue(&mut self, id: WorkloadId, now: Minutes) {
        self.add_parcel(id.uuid(), Parcel::EndAttempt);
        let timeout = self.spec(id).queue_timeout;
        let workload = self.workload_mut(id);
        workload.lease = None;
        workload.started = false;
        workload.run_deadline = None;
        workload.queue_deadline = timeout.map(|timeout| now + minutes(timeout));
        self.queue(id);
    }

    /// Ends a workload, after an attempt or without one.
    pub(super) fn conclude(&mut self, id: WorkloadId, ending: Ending, was_tried: bool, now: Minutes) {
        let uses = fixtures::uses(id);
        if uses != Uses::Nothing {
            self.add_parcel(id.uuid(), Parcel::Settle);
        } else if was_tried {
            self.add_parcel(id.uuid(), Parcel::EndAttempt);
        }
        let workload = self.workload_mut(id);
        workload.lease = None;
        workload.run_deadline = None;
        workload.ending = Some(ending);
        // Others may wait for its outputs or its build.
        if was_tried && matches!(uses, Uses::Build | Uses::Output) {
            workload.state = Progress::Settling;
        } else {
            self.finish(id, now);
        }
    }

    pub(super) fn finish(&mut self, id: WorkloadId, now: Minutes) {
        let workload = self.workload_mut(id);
        workload.state = Progress::Finished;
        workload.finished_at = Some(now);
        workload.events.push("finished");
    }

    pub(super) fn end_lease(&mut self, id: LeaseId, by: EndedBy, now: Minutes) {
        let lease = self.leases.get_mut(&id).expect("known to the model");
        lease.state = LeaseState::Ended;
        lease.ended_by = Some(by);
        lease.ended_at = Some(now);
        if lease.settles {
            self.add_parcel(id.uuid(), Parcel::Settle);
        }
    }

    /// Gives up a lease under which a lost worker may still run something.
    pub(super) fn give_up_lease(&mut self, id: LeaseId) {
        let lease = self.leases.get_mut(&id).expect("known to the model");
        (lease.state, lease.grace) = (LeaseState::Ending, Some(0));
        lease.stop = Some(StopReason::WorkerLost);
    }

    /// Stops a driven lease.
    pub(super) fn stop_driven(&mut self, id: LeaseId, reason: StopReason, now: Minutes) {
        match self.leases[&id].in_use {
            true => self.stop(id, reason, 10),
            false => self.end_lease(id, EndedBy::Lost, now),
        }
    }

    /// Stops an attempt or a driven lease. A repeat may only shorten the grace period, and the
    /// first reason stays.
    pub(super) fn stop(&mut self, id: LeaseId, reason: StopReason, grace: i64) {
        let lease = self.leases.get_mut(&id).expect("known to the model");
        if lease.is_live() && lease.grace.is_none_or(|present| grace < present) {
            lease.state = LeaseState::Ending;
            lease.stop.get_or_insert(reason);
            lease.grace = Some(grace);
        }
    }

    pub(super) fn cancel(&mut self, id: WorkloadId, grace: i64, now: Minutes) {
        let workload = &self.workloads[&id];
        match (workload.state, workload.lease) {
            (Progress::Accepted | Progress::Pending, _) => self.conclude(id, aborted(), false, now),
            (_, Some(lease)) => self.stop(lease, StopReason::Cancelled, grace),
            _ => {}
        }
    }

    /// The process of the workload runs or ran, so its worker is trusted again.
    fn set_running(&mut self, id: WorkloadId) {
        let workload = self.workload_mut(id);
        workload.state = Progress::Running;
        workload.started = true;
        workload.events.push("running");
        let worker = workload.lease.map(|lease| self.leases[&lease].worker);
        if let Some(worker) = worker.and_then(|worker| self.worker_mut(worker))
            && worker.failures > 0
        {
            worker.forgive();
        }
    }

    /// Records a phase that the gateway reported.
    pub(super) fn observe(&mut self, id: WorkloadId, phase: i64, now: Minutes) {
        let lease_id = self.workloads[&id].lease.expect("a live lease");
        let (lease, state) = (self.leases[&lease_id].clone(), self.workloads[&id].state);
        let is_over = phase == 4;
        if is_over && lease.state == LeaseState::Ending && state == Progress::Assigned {
            return self.end_attempt(id, End::Unknown, now);
        }
        if phase <= lease.phase {
            return;
        }
        self.leases.get_mut(&lease_id).expect("a lease").phase = phase;
        match (phase, state) {
            (1, Progress::Assigned | Progress::Starting) => self.workload_mut(id).events.push("preparing"),
            (2, Progress::Starting) => self.set_running(id),
            (3, Progress::Starting | Progress::Running) => {
                if state == Progress::Starting {
                    self.set_running(id);
                }
                let workload = self.workload_mut(id);
                workload.run_deadline = None;
                workload.events.push("publishing");
            }
            _ => {}
        }
    }

    pub(super) fn start(&mut self, id: WorkloadId, now: Minutes) -> &'static str {
        let timeout = self.spec(id).run_timeout;
        let lease = self.workloads[&id].lease.expect("a live lease");
        if self.leases[&lease].state != LeaseState::Granted {
            return "LeaseLost";
        }
        let workload = self.workload_mut(id);
        if workload.state == Progress::Assigned {
            workload.state = Progress::Starting;
            workload.run_deadline = timeout.map(|timeout| now + minutes(timeout));
        }
        "Ok"
    }

    /// Ends an attempt with the report of its gateway.
    pub(super) fn report(&mut self, id: WorkloadId, report: Report, now: Minutes) {
        let lease_id = self.workloads[&id].lease.expect("a live lease");
        let lease = self.leases[&lease_id].clone();
        let is_before_start = self.workloads[&id].state == Progress::Assigned;
        // After a worker fault before the start, another worker may take the workload.
        let fault = report.failure.filter(|_| report.exit.is_none() && lease.stop.is_none());
        let fault = fault.filter(|reason| match reason {
            FailureReason::StartFailed | FailureReason::WorkerUnreachable | FailureReason::WorkerFull => true,
            FailureReason::InputDamaged | FailureReason::InputUnreachable => true,
            FailureReason::DiskFull => is_before_start,
            _ => false,
        });
        if let Some(reason) = fault {
            use FailureReason::{InputDamaged, InputUnreachable, WorkerFull};
            if !matches!(reason, WorkerFull | InputDamaged | InputUnreachable) {
                self.fail(lease.worker, self.requirements(id).team, now);
            }
            if self.may_go_elsewhere(id, lease.worker, reason, now) {
                self.end_lease(lease_id, EndedBy::Reported, now);
                return self.requeue(id, now);
            }
        }
        if lease.stop == Some(StopReason::StartTimeout) && self.may_retry(id) {
            self.may_go_elsewhere(id, lease.worker, FailureReason::StartTimeout, now);
        }
        self.end_attempt(id, End::Reported(report), now);
    }

    fn may_retry(&self, id: WorkloadId) -> bool {
        self.workloads[&id].retried < i64::from(self.spec(id).retries)
    }

    /// Excludes `worker`, if another worker could take the workload.
    fn may_go_elsewhere(
        &mut self,
        id: WorkloadId,
        worker: WorkerId,
        reason: FailureReason,
        now: Minutes,
    ) -> bool {
        let before = self.workloads[&id].failed_on.clone();
        let mut failed_on = before.clone();
        failed_on.push((worker, reason));
        // Workers that had no room may have room now.
        let lasting: Vec<_> =
            failed_on.iter().copied().filter(|(_, reason)| *reason != FailureReason::WorkerFull).collect();
        if lasting.len() < 10 {
            for failed_on in [failed_on, lasting] {
                self.workload_mut(id).failed_on = failed_on;
                if !self.is_hopeless(&self.requirements(id), now) {
                    return true;
                }
            }
        }
        self.workload_mut(id).failed_on = before;
        false
    }

    /// Records a failure of `worker`.
    fn fail(&mut self, worker: WorkerId, team: &str, now: Minutes) {
        let Some(worker) = self.worker_mut(worker) else { return };
        if worker.failures == 0 {
            worker.failed_team = Some(team.to_owned());
        } else if worker.failed_team.take_if(|before| before != team).is_some() {
            (worker.failures, worker.quarantines, worker.quarantined_until) = (0, 0, None);
        }
        worker.failures += 1;
        if worker.quarantined_until.is_none() && (worker.quarantines > 0 || worker.failures >= 2) {
            let term = (0..worker.quarantines).fold(25, |term, _| (term * 2).min(105));
            worker.quarantines += 1;
            worker.quarantined_until = Some(now + term);
        }
    }

    pub(super) fn end_attempt(&mut self, id: WorkloadId, end: End, now: Minutes) {
        let lease_id = self.workloads[&id].lease.expect("a live lease");
        let lease = self.leases[&lease_id].clone();
        let by = if matches!(end, End::Reported(_)) { EndedBy::Reported } else { EndedBy::Lost };
        let may_have_run = self.workloads[&id].state != Progress::Assigned;
        let may_still_run = matches!(end, End::WorkerLost)
            && may_have_run
            && self.may_still_run(lease.worker, lease.incarnation);
        if may_still_run {
            self.give_up_lease(lease_id);
        } else {
            self.end_lease(lease_id, by, now);
        }
        if self.workloads[&id].state == Progress::Starting
            && matches!(end, End::Reported(Report { exit: Some(_), .. }))
        {
            self.set_running(id);
        }
        let may_be_interrupted = !may_still_run && self.spec(id).interruptible;
        let ending = match ending(may_have_run, may_be_interrupted, lease.stop, end) {
            Some(ending) => ending,
            None => return self.requeue(id, now),
        };
        let reason = ending.reason.filter(|_| ending.outcome == Outcome::Errored);
        let may_begin_again = match reason {
            Some(FailureReason::Interrupted | FailureReason::StartTimeout) => true,
            Some(
                FailureReason::WorkerLost
                | FailureReason::ContactLost
                | FailureReason::StartUnknown
                | FailureReason::ExitUnknown,
            ) => self.is_surely_stopped(lease.worker, lease.incarnation),
            _ => false,
        };
        if may_begin_again && !may_still_run && self.may_retry(id) {
            self.workload_mut(id).retried += 1;
            return self.requeue(id, now);
        }
        self.conclude(id, ending, true, now);
    }

    /// Returns whether the worker has a new incarnation, or enforces `stop_after`.
    fn is_surely_stopped(&self, worker: WorkerId, incarnation: u64) -> bool {
        let Some(name) = self.name(worker) else { return false };
        let known = &self.workers[name];
        incarnation < known.incarnation
            || (fixtures::traits(name).capabilities.contains(&"stop-after") && !known.leaving)
    }

    /// Returns whether an attempt may still run although its worker is lost.
    pub(super) fn may_still_run(&self, worker: WorkerId, incarnation: u64) -> bool {
        let Some(name) = self.name(worker) else { return false };
        let known = &self.workers[name];
        incarnation == known.incarnation
            && !known.leaving
            && !fixtures::traits(name).capabilities.contains(&"stop-after")
    }

    /// Returns the lease of these claims if it was given up.
    pub(super) fn given_up_lease(&self, lease: LeaseId) -> Option<LeaseId> {
        let known = self.leases.get(&lease)?;
        (known.is_live() && known.stop == Some(StopReason::WorkerLost)).then_some(lease)
    }

    /// Delivers all calls to the artifact store. `sealed`: whether the store has the output.
    pub(super) fn deliver(&mut self, sealed: impl Fn(WorkloadId) -> bool, now: Minutes) {
        for (holder, parcel) in std::mem::take(&mut self.outbox).into_keys() {
            let id = WorkloadId::from_uuid(holder);
            if parcel != Parcel::Settle
                || self.workloads.get(&id).is_none_or(|workload| workload.state != Progress::Settling)
            {
                continue;
            }
            let ending = self.workload_mut(id).ending.as_mut().expect("an ending");
            if ending.has_outputs && !sealed(id) {
                *ending = errored(FailureReason::SettleFailed);
            }
            self.finish(id, now);
        }
    }

    /// Applies the deadlines of workloads.
    pub(super) fn time_out(&mut self, now: Minutes) {
        let passed = |deadline: Option<Minutes>| deadline.is_some_and(|deadline| deadline <= now);
        for id in self.workloads.keys().copied().collect::<Vec<_>>() {
            let (workload, spec) = (self.workloads[&id].clone(), self.spec(id));
            match (workload.state, workload.lease) {
                (Progress::Pending, _) if passed(workload.queue_deadline) => {
                    self.conclude(id, errored(FailureReason::QueueTimeout), false, now);
                }
                (Progress::Assigned, Some(lease)) => {
                    let granted = &self.leases[&lease];
                    let due = spec.start_timeout.map(|timeout| granted.granted_at + minutes(timeout));
                    if granted.state == LeaseState::Granted && passed(due) {
                        self.stop(lease, StopReason::StartTimeout, 0);
                    }
                }
                (_, Some(lease)) if passed(workload.run_deadline) => {
                    self.stop(lease, StopReason::RunTimeout, 10);
                    self.workload_mut(id).run_deadline = None;
                }
                _ => {}
            }
        }
    }

    /// Ends a workload that was never pinned.
    pub(super) fn give_up(&mut self, id: WorkloadId, now: Minutes) {
        self.conclude(id, errored(FailureReason::InputUnavailable), false, now);
    }

    /// Ends workloads with failed attempts that no worker could ever take.
    pub(super) fn give_up_hopeless(&mut self, now: Minutes) {
        for id in self.workloads.keys().copied().collect::<Vec<_>>() {
            let workload = &self.workloads[&id];
            if let (Progress::Pending, Some((_, reason))) =
                (workload.state, workload.failed_on.last().copied())
                && self.is_hopeless(&self.requirements(id), now)
            {
                self.conclude(id, errored(reason), false, now);
            }
        }
    }
}

/// Returns how an attempt ends its workload. `None`: the workload waits for another attempt.
fn ending(
    may_have_run: bool,
    may_be_interrupted: bool,
    stop: Option<StopReason>,
    end: End,
) -> Option<Ending> {
    let report = match end {
        End::Reported(report) => Some(report),
        End::WorkerLost | End::Unknown => None,
    };
    let exited = report.and_then(|report| report.exit);
    let was_interrupted = report.is_some_and(|report| report.failure == Some(FailureReason::Interrupted));
    match stop {
        Some(StopReason::Cancelled) => return Some(aborted()),
        Some(StopReason::StartTimeout) => return Some(errored(FailureReason::StartTimeout)),
        Some(StopReason::RunTimeout) => return Some(errored(FailureReason::RunTimeout)),
        Some(StopReason::Interrupted) if exited.is_none() || was_interrupted => {
            let goes_on = !may_have_run || may_be_interrupted;
            return (!goes_on).then(|| errored(FailureReason::Interrupted));
        }
        Some(StopReason::Released | StopReason::Expired) => panic!("{stop:?} stops only driven leases"),
        Some(StopReason::Interrupted | StopReason::WorkerLost) | None => {}
    }
    let Some(report) = report else {
        let lost = if matches!(end, End::WorkerLost) {
            FailureReason::WorkerLost
        } else {
            FailureReason::StartUnknown
        };
        return may_have_run.then(|| errored(lost));
    };
    let has_outputs = report.has_outputs && report.exit.is_some();
    let outcome = match (report.exit, report.failure) {
        (None, None) => return Some(errored(FailureReason::ExitUnknown)),
        (None, Some(_)) | (Some(_), Some(FailureReason::ContactLost)) => Outcome::Errored,
        (Some(Exit::Code(0)), None) => Outcome::Succeeded,
        (Some(Exit::Code(0)), Some(_)) => Outcome::Errored,
        (Some(_), _) => Outcome::Failed,
    };
    Some(Ending { outcome, reason: report.failure, has_outputs })
}
