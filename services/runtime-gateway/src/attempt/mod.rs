//! One attempt at a workload, from its lease to its result.
//!
//! ```text
//! prepare (store) → inputs (streamer) → volumes → containers
//!   → StartAttempt ∥ Prepared → services → start → wait → stop services → publish → FinishAttempt
//! ```
//!
//! [`carry_out`] runs these steps in this order. Every step can be repeated, so a restarted gateway
//! runs the attempt from the top. Existing containers and volumes are reused. A process that was
//! started is not started again, because its id is that of the attempt. An attempt that was
//! rejected because of a newer session runs again when this gateway has a session again.
//!
//! Invariant: a process starts only after `StartAttempt` was acknowledged under this lease. Outputs
//! and caches are published only after the process has exited without being stopped. On a runtime
//! with `ends-whole`, all other processes of the container must have ended too. The result is
//! reported only when no process of the attempt runs.

pub(crate) mod caches;
pub(crate) mod context;
pub(crate) mod error;
pub(crate) mod image;
pub(crate) mod inputs;
mod kept_result;
pub(crate) mod make;
pub(crate) mod outputs;
pub(crate) mod process;
mod result;
mod services;
pub(crate) mod spec_plan;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::workload::{Exit, Failure, FailureReason};
use domain::{AttemptId, LeaseId, error_chain};
use futures::FutureExt;
use rpc::Reason;
use runtime::{Ended, RuntimeError};
use tokio::sync::watch;
use tracing::Instrument;

use crate::clients::scheduler::AttemptResult;
use crate::clients::scheduler_messages::{AttemptPhase, AttemptTask};
use crate::util::retry::is_superseded;
use crate::worker::Worker;
use crate::worker::attached_callers;
use crate::worker::attempts::StopRequest;
use context::AttemptContext;
use error::{AttemptError, failure};
use make::make;
use process::{
    announce_start, process_spec, report_running, resource_usage, stop_process, stop_requested, wait,
};
use result::{StopCause, ended_result, finish_attempt, is_interrupted};

/// Runs `work`, which handles the lease. If `work` panics, the attempt fails and its slot is freed.
pub(crate) async fn run_guarded(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: Option<AttemptId>,
    token: String,
    work: impl Future<Output = ()>,
) {
    let _entry = LeaseGuard { worker: &worker, lease };
    let Err(panic) = AssertUnwindSafe(work).catch_unwind().await else { return };
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the panic has no message");
    tracing::error!(lease.id = %lease, panic = text, "the task of an attempt panicked");
    if !stop_processes(&worker, lease, attempt).await {
        return;
    }
    let message = format!("the gateway failed while it ran the attempt: {text}");
    let failure = Failure { reason: FailureReason::WorkerFailed, message };
    finish_attempt(&worker, lease, &token, AttemptResult::failed(failure)).await;
}

/// The entry of a lease. If its task dies, the entry is removed, so that the scheduler sees an
/// unhandled lease.
struct LeaseGuard<'w> {
    worker: &'w Worker,
    lease: LeaseId,
}

impl Drop for LeaseGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(lease.id = %self.lease, "cannot end an attempt: its task died");
            self.worker.attempts.remove(self.lease);
        }
    }
}

/// Stops the process of an attempt that cannot continue, and its services. Returns whether nothing
/// runs. It is false only if the gateway stops first.
async fn stop_processes(worker: &Worker, lease: LeaseId, attempt: Option<AttemptId>) -> bool {
    if let Some(attempt) = attempt
        && !stop_process(worker, attempt).await
    {
        return false;
    }
    services::stop_all(worker, lease, services::STOP_GRACE).await
}

/// Ends an attempt that cannot be parsed. First stops a process that an earlier gateway may have
/// started.
pub(crate) async fn fail_invalid(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: Option<AttemptId>,
    token: String,
    why: String,
) {
    if !stop_processes(&worker, lease, attempt).await {
        return;
    }
    let message = format!("cannot parse the attempt: {why}");
    let failure = Failure { reason: FailureReason::Unsupported, message };
    finish_attempt(&worker, lease, &token, AttemptResult::failed(failure)).await;
}

/// Runs an attempt and reports its result to the scheduler. If the gateway stops, it returns
/// without a report.
pub(crate) async fn run(
    context: Arc<AttemptContext>,
    task: AttemptTask,
    mut stop: watch::Receiver<Option<StopRequest>>,
) {
    let worker = &*context.worker;
    let span = tracing::info_span!(
        target: "gantry",
        "attempt",
        service = "runtime-gateway",
        workload.id = %task.workload,
        attempt.id = %task.attempt,
        worker.name = worker.config.worker_name,
    );
    rpc::trace::continue_from(&span, &task.traceparent);
    async {
        let result = loop {
            match carry_out(&context, &task, &mut stop).await {
                Ok(result) => break result,
                Err(AttemptError::GatewayStopping) => return,
                Err(stopped) if stopped.is_superseded() => {
                    tracing::info!(lease.id = %task.lease, error = error_chain(&stopped), "cannot continue an attempt: waiting for a new session");
                    if !wait_for_session(worker).await {
                        return;
                    }
                }
                // No process was started. The attempt runs again once the session is exclusive.
                Err(AttemptError::NotExclusive) => tokio::select! {
                    () = worker.session.wait_until_exclusive() => {}
                    () = worker.stopping.cancelled() => return,
                },
                Err(stopped) => {
                    // The slot may be freed only when no process runs.
                    if !stop_process(worker, task.attempt).await || !services::stop(worker, &task, &stop).await {
                        return;
                    }
                    let lost = matches!(&stopped, AttemptError::Refused(refusal) if refusal.is(Reason::LeaseLost));
                    // For a lease that is ending, the scheduler waits for this result. For one that
                    // has ended, it rejects it.
                    let request = stop.borrow().clone().filter(|_| lost);
                    break AttemptResult::failed(failure(&request.map_or(stopped, AttemptError::StopRequested)));
                }
            }
        };
        finish_attempt(worker, task.lease, &task.token, result).await;
    }
    .instrument(span)
    .await;
}

/// Stops an attempt of an earlier gateway, and reports its result.
pub(crate) async fn stop_earlier_attempt(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: AttemptId,
    token: String,
    mut stop: watch::Receiver<Option<StopRequest>>,
) {
    let waited = wait(&worker, attempt, &mut stop).await;
    let result = match waited {
        Ok(ended) => {
            let interrupted = is_interrupted(&stop, &ended).then_some(StopCause::Interrupted);
            let usage = resource_usage(&worker, attempt).await;
            AttemptResult { usage, ..ended_result(ended, None, interrupted) }
        }
        Err(AttemptError::GatewayStopping) => return,
        Err(AttemptError::Worker(RuntimeError::ProcessNotFound(_))) => {
            let reason =
                stop.borrow().as_ref().map_or(FailureReason::StoppedBeforeStart, |request| request.reason);
            AttemptResult::failed(Failure {
                reason,
                message: "stopped before the process was started".to_owned(),
            })
        }
        Err(stopped) => {
            // The slot may be freed only when no process runs.
            if !stop_process(&worker, attempt).await {
                return;
            }
            AttemptResult::failed(failure(&stopped))
        }
    };
    if services::stop_within(&worker, lease, &stop).await {
        finish_attempt(&worker, lease, &token, result).await;
    }
}

/// Waits until this gateway has a session again, after a call was rejected because of a newer
/// session. Until then the other gateway handles the attempt. Returns false if the gateway stops.
async fn wait_for_session(worker: &Worker) -> bool {
    let let_in = async {
        // The session may already have ended without notice.
        tokio::time::sleep(Duration::from_secs(1)).await;
        worker.session.opened().await;
    };
    tokio::select! {
        () = let_in => true,
        () = worker.stopping.cancelled() => false,
    }
}

async fn carry_out(
    context: &AttemptContext,
    task: &AttemptTask,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<AttemptResult, AttemptError> {
    let worker = &*context.worker;
    // The state of the process can be read concurrently. Only another gateway could start the
    // process meanwhile, and the runtime does not start it twice.
    let report = |inputs| worker.attempts.report_inputs(task.lease, inputs);
    let state = async {
        let prepared = inputs::prepare(context, task, &report);
        tokio::join!(prepared, worker.runtime.process(task.attempt.into()))
    };
    let (prepared, process_state) = tokio::select! {
        state = state => state,
        request = stop_requested(stop) => return Err(AttemptError::StopRequested(request)),
        () = worker.stopping.cancelled() => return Err(AttemptError::GatewayStopping),
    };
    let (mut plan, mut prepared) = prepared.map_err(AttemptError::before_start)?;
    let mut since = None;
    if let Err(RuntimeError::ProcessNotFound(_)) = process_state {
        let services = services::make_containers(context, task, stop).await?;
        let network = services.network_of(task);
        let made = make(context, task, network, (plan, prepared), &report, stop).await;
        let made = made.map_err(AttemptError::before_start)?;
        let process = process_spec(task, &made.defaults).map_err(AttemptError::from)?;
        (plan, prepared) = (made.plan, made.prepared);
        if let Some(request) = stop.borrow_and_update().clone() {
            return Err(AttemptError::StopRequested(request));
        }
        announce_start(worker, task).await?;
        services::start(worker, task, &services, stop).await?;
        if !worker.session.is_exclusive() {
            return Err(AttemptError::NotExclusive);
        }
        let started = worker.runtime.start(prepared.container, task.attempt.into(), process).await;
        if let Err(error) = started {
            services::check(worker, task, stop).await?;
            return Err(AttemptError::from(error).before_start());
        }
        since = Some(Instant::now());
    } else {
        process_state?;
    }
    let started = domain::Timestamp::now();
    let process = tracing::info_span!(target: "gantry", "process", service = "runtime-gateway");
    let ended = tokio::select! {
        ended = wait(worker, task.attempt, stop).instrument(process) => ended?,
        never = report_running(worker, task) => match never {},
        never = services::enforce_essential(worker, task) => match never {},
        never = attached_callers::enforce_term(&context.attendance, worker.runtime.as_ref(), task.attempt.into(), (&task.spec.stdin, task.spec.output)) => match never {},
    };
    if let Ended::NotStarted(failure) = &ended
        && matches!(failure.reason, FailureReason::StartFailed | FailureReason::StoppedBeforeStart)
        && stop.borrow().is_none()
    {
        services::check(worker, task, stop).await?;
    }
    let mut usage = resource_usage(worker, task.attempt).await;
    if let (Some(since), Ended::Exited { .. }) = (since, &ended) {
        usage.running.get_or_insert(since.elapsed());
        usage.bytes_in = Some(prepared.bytes_in);
    }

    let publishable = matches!(ended, Ended::Exited { stopped: false, .. });
    let has_succeeded = matches!(ended, Ended::Exited { stopped: false, exit: Exit::Code(0), .. });
    let ends = services::unexpected_ends(worker, task).await;
    if publishable && !task.spec.services.is_empty() {
        // The time for stopping the services does not count towards the run timeout.
        worker.attempts.set_phase(task.lease, AttemptPhase::Publishing);
    }
    // Until a service ends, it can write to the volumes through open files of the process.
    if !services::stop(worker, task, stop).await {
        return Err(AttemptError::GatewayStopping);
    }
    // A process that was ended by a signal may leave an incomplete cache or result.
    let has_exit_code = matches!(ended, Ended::Exited { stopped: false, exit: Exit::Code(_), .. });
    let stop_cause = match ended {
        Ended::Exited { stopped: true, .. } if stop.borrow().is_none() && !ends.is_failure() => {
            let destroyed = worker.was_destroyed(task.attempt.into()).await?;
            Some(if destroyed { StopCause::ContainerDestroyed } else { StopCause::ContactLost })
        }
        _ => is_interrupted(stop, &ended).then_some(StopCause::Interrupted),
    };
    let mut result = AttemptResult { usage, ..ended_result(ended, Some(started), stop_cause) };
    if has_exit_code && task.spec.keep_result {
        match kept_result::read(worker.runtime.as_ref(), task.attempt.into()).await? {
            Ok(kept) => result.result = Some(kept),
            Err(failure) => result.add_failure(failure),
        }
    }
    ends.report(&mut result, has_succeeded);
    if publishable && !(plan.outputs.is_empty() && plan.caches.is_empty()) {
        worker.attempts.set_phase(task.lease, AttemptPhase::Publishing);
        let publishing = tracing::info_span!(target: "gantry", "publish", service = "runtime-gateway");
        let published = outputs::publish(context, task, &plan, &prepared, &mut result)
            .instrument(publishing.clone())
            .await;
        match published {
            Ok(()) => {}
            // The exit of the process is reported nevertheless.
            Err(AttemptError::Worker(error)) => result.add_failure(error.failure()),
            Err(AttemptError::Refused(refusal)) if !is_superseded(&refusal) => {
                let message = format!("cannot publish an output: {refusal}");
                result.add_failure(Failure { reason: FailureReason::PublishFailed, message });
            }
            Err(stopped) => return Err(stopped),
        }
        if has_exit_code {
            let caches = caches::publish(context, task, &plan, &prepared).instrument(publishing).await?;
            result.caches = caches.published;
            result.notes.extend(caches.notes);
        } else if !plan.caches.is_empty() {
            result
                .notes
                .push("caches stay as they were before this run: a signal ended the process".to_owned());
        }
    }
    if publishable {
        let sizes = result.outputs.iter().map(|output| output.size_bytes);
        result.usage.bytes_out = Some(sizes.fold(0, u64::saturating_add));
    }
    Ok(result)
}

#[cfg(test)]
mod tests;
