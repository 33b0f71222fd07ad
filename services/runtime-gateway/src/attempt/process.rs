//! The process of an attempt: its start, the wait for its end, and its stop.

use std::convert::Infallible;
use std::time::Duration;

use domain::workload::{EnvironmentVariable, Usage};
use domain::{AttemptId, error_chain};
use runtime::{Ended, ProcessRole, ProcessSpec, ProcessState, RuntimeError};
use tokio::sync::watch;

use super::error::AttemptError;
use super::image::ProcessDefaults;
use crate::clients::scheduler_messages::{AttemptPhase, AttemptTask};
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::attempts::StopRequest;

/// Pause before a process is checked again when no file can be opened.
const FILES_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// First and longest pause between two checks of a process that is starting.
const START_POLL: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Number of checks with the first pause, in which most processes start.
const FAST_START_POLLS: usize = 25;

/// Reports the start to the scheduler and the preparation to the artifact store. The process must
/// not start before both are acknowledged.
pub(super) async fn announce_start(worker: &Worker, task: &AttemptTask) -> Result<(), AttemptError> {
    let session = worker.session.opened().await;
    let (scheduler, store) = (&worker.clients.scheduler, &worker.clients.store);
    let start = || scheduler.start_attempt(&task.token);
    let prepared = || store.mark_prepared(&session.credential, task.attempt);
    tokio::try_join!(
        until_answered("announce the start of a process", start),
        until_answered("report that an attempt is prepared", prepared),
    )?;
    Ok(())
}

/// Returns the process spec of an attempt whose image has these defaults.
pub(super) fn process_spec(
    task: &AttemptTask,
    defaults: &ProcessDefaults,
) -> Result<ProcessSpec, RuntimeError> {
    let command = defaults.command_of(&task.spec);
    if command.is_empty() {
        let message = "the spec has no command, and neither has its image";
        return Err(RuntimeError::InvalidImage(message.to_owned()));
    }
    let traceparent =
        rpc::trace::current().or_else(|| Some(task.traceparent.clone()).filter(|t| !t.is_empty()));
    // A variable of the workload takes precedence.
    let traceparent =
        traceparent.filter(|_| !task.spec.environment.iter().any(|variable| variable.name == b"TRACEPARENT"));
    let variable =
        |value: String| EnvironmentVariable { name: b"TRACEPARENT".to_vec(), value: value.into_bytes() };
    Ok(ProcessSpec {
        command,
        environment: traceparent.map(variable).into_iter().collect(),
        directory: None,
        user: None,
        role: ProcessRole::Main,
        stdin: task.spec.stdin.clone(),
        output: task.spec.output,
        terminal: task.spec.terminal,
    })
}

/// Sets the phase to `Running` once the command runs.
pub(super) async fn report_running(worker: &Worker, task: &AttemptTask) -> Infallible {
    wait_until_started(worker, task.attempt).await;
    worker.attempts.set_phase(task.lease, AttemptPhase::Running);
    std::future::pending().await
}

/// Resolves when the process runs. If the process has ended, it never resolves.
pub(super) async fn wait_until_started(worker: &Worker, process: AttemptId) {
    let mut pause = START_POLL.0;
    for poll in 0.. {
        match worker.runtime.process(process.into()).await {
            Ok(ProcessState::Started) => return,
            Ok(ProcessState::Ended(_)) => return std::future::pending().await,
            Ok(ProcessState::Starting | ProcessState::StartUnknown) | Err(_) => {
                tokio::time::sleep(pause).await;
                if poll >= FAST_START_POLLS {
                    pause = (pause * 2).min(START_POLL.1);
                }
            }
        }
    }
}

/// Stops a process as `stop` requests, and waits for its end. Returns whether it does not run.
pub(crate) async fn end(
    worker: &Worker,
    process: AttemptId,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> bool {
    match wait(worker, process, &mut stop.clone()).await {
        Ok(_) | Err(AttemptError::Worker(RuntimeError::ProcessNotFound(_))) => true,
        Err(error) => {
            tracing::warn!(process.id = %process, error = error_chain(&error), "cannot stop a process of a lease");
            false
        }
    }
}

/// Waits until the process has ended, and stops it when that is requested.
pub(crate) async fn wait(
    worker: &Worker,
    attempt: AttemptId,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<Ended, AttemptError> {
    loop {
        let request = stop.borrow_and_update().clone();
        if let Some(request) = request {
            match worker.runtime.stop(attempt.into(), request.grace).await {
                Err(error) if error.is_out_of_files() => {
                    stop.mark_changed();
                    tokio::time::sleep(FILES_RETRY_PAUSE).await;
                    continue;
                }
                stopped => stopped?,
            }
        }
        tokio::select! {
            ended = worker.runtime.wait(attempt.into()) => match ended {
                // The process continues, and so does the wait.
                Err(error) if error.is_out_of_files() => tokio::time::sleep(FILES_RETRY_PAUSE).await,
                ended => return Ok(ended?),
            },
            changed = stop.changed() => if changed.is_err() {
                return Err(AttemptError::GatewayStopping);
            },
            () = worker.stopping.cancelled() => return Err(AttemptError::GatewayStopping),
        }
    }
}

/// Resolves when the attempt must stop.
pub(crate) async fn stop_requested(stop: &mut watch::Receiver<Option<StopRequest>>) -> StopRequest {
    match stop.wait_for(Option::is_some).await.ok().and_then(|request| request.clone()) {
        Some(request) => request,
        None => std::future::pending().await,
    }
}

/// Returns the resource usage of a process that has ended. Unknown usage is not an error.
pub(super) async fn resource_usage(worker: &Worker, attempt: AttemptId) -> Usage {
    worker.runtime.usage(attempt.into()).await.unwrap_or_else(|error| {
        tracing::debug!(attempt.id = %attempt, error = error_chain(&error), "cannot read the usage of a process");
        Usage::default()
    })
}

/// Stops the process of an attempt that cannot continue. Returns whether no process runs. It is
/// false only if the gateway stops first.
pub(super) async fn stop_process(worker: &Worker, attempt: AttemptId) -> bool {
    loop {
        let stopped = async {
            // A process that another gateway handles must not be stopped.
            worker.session.wait_until_exclusive().await;
            worker.runtime.stop(attempt.into(), Duration::ZERO).await?;
            worker.runtime.wait(attempt.into()).await
        };
        let stopped = tokio::select! {
            stopped = stopped => stopped,
            () = worker.stopping.cancelled() => return false,
        };
        match stopped {
            Ok(_) | Err(RuntimeError::ProcessNotFound(_)) => return true,
            Err(error) => {
                tracing::warn!(attempt.id = %attempt, error = error_chain(&error), "cannot stop a process: trying again")
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
