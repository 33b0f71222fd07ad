//! The services of an attempt: containers that run beside its process.
//!
//! The container of a service is an attempt of its own in the artifact store, with an id that is
//! derived from that of the attempt, and with the same holder. So a restarted gateway finds the
//! services that run, and does not start them twice.
//!
//! [`super::carry_out`] makes the containers, starts the services in order, and stops them in
//! reverse order after the end of the process. All other ends of an attempt call [`stop_all`],
//! which finds the containers by their notes.
//!
//! Invariant: a service starts only after `StartAttempt` was acknowledged. The end of an attempt is
//! reported only when no service runs.

use std::cmp::Reverse;
use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use domain::workload::{
    Exit, Failure, FailureReason, Network, OutputMode, ReadinessCheck, Service, Stdin, WorkloadSpec,
};
use domain::{AttemptId, ContainerHandle, LeaseId, ProcessId, error_chain};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use runtime::{Ended, Offsets, ProcessEvent, ProcessRole, ProcessSpec, ProcessState, RuntimeError};
use tokio::sync::watch;

use super::context::AttemptContext;
use super::error::AttemptError;
use super::inputs;
use super::make::{MadeAttempt, make};
use super::process::{end, process_spec, stop_requested, wait_until_started};
use crate::clients::scheduler::AttemptResult;
use crate::clients::scheduler_messages::AttemptTask;
use crate::util::keyed_locks::lock;
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::attempts::StopRequest;
use crate::worker::containers::KnownContainer;

/// Longest time from TERM to KILL when a service is stopped, or a process that lost its service.
pub(super) const STOP_GRACE: Duration = Duration::from_secs(10);
/// First and longest pause between two commands that check whether a service is ready. Each
/// command leaves its spools on the worker until its container is destroyed.
const COMMAND_PAUSES: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));
/// Maximum duration of such a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two checks of a port.
const PORT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum time in which the end of a service is recorded.
const RECORD_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before a failed call of the runtime is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of a service's output in the message of its failure.
const TAIL_BYTES: usize = 2 << 10;
/// Longest time for reading this output.
const TAIL_TIMEOUT: Duration = Duration::from_secs(5);

/// The containers of the services and their processes, in their order.
pub(super) struct ServiceContainers(Vec<(ContainerHandle, ProcessSpec)>);

impl ServiceContainers {
    /// The container whose network the others join.
    pub(super) fn network_of(&self, task: &AttemptTask) -> Option<ContainerHandle> {
        let first = self.0.first().map(|(container, _)| *container);
        first.filter(|_| task.spec.network != Network::Host)
    }
}

/// The task that stands for a service.
fn task_of(task: &AttemptTask, index: usize, service: &Service) -> AttemptTask {
    let spec = WorkloadSpec {
        image: service.image.clone(),
        entrypoint: service.entrypoint.clone(),
        command: service.command.clone(),
        environment: service.environment.clone(),
        directory: service.directory.clone(),
        prefers_image_directory: service.prefers_image_directory,
        user: service.user.clone(),
        limits: service.limits,
        stdin: Stdin::None,
        output: OutputMode::Spooled,
        terminal: None,
        inputs: Vec::new(),
        outputs: Vec::new(),
        caches: Vec::new(),
        ..task.spec.clone()
    };
    AttemptTask {
        lease: task.lease,
        attempt: task.attempt.service(&service.name),
        spec,
        token: task.token.clone(),
        workload: task.workload,
        traceparent: task.traceparent.clone(),
        service: Some(index),
        driven: None,
    }
}

/// Makes the containers of the services, unless the attempt must stop.
pub(super) async fn make_containers(
    context: &AttemptContext,
    task: &AttemptTask,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<ServiceContainers, AttemptError> {
    let worker = &*context.worker;
    let mut containers = ServiceContainers(Vec::new());
    let report = |inputs| worker.attempts.report_inputs(task.lease, inputs);
    for (index, service) in task.spec.services.iter().enumerate() {
        let task = task_of(task, index, service);
        let prepared = tokio::select! {
            prepared = inputs::prepare(context, &task, &report) => prepared,
            request = stop_requested(stop) => return Err(AttemptError::StopRequested(request)),
            () = worker.stopping.cancelled() => return Err(AttemptError::GatewayStopping),
        };
        let of_service = |error: AttemptError| error.before_start().of_service(&service.name);
        let network = containers.network_of(&task);
        let made = make(context, &task, network, prepared.map_err(of_service)?, &report, stop).await;
        let MadeAttempt { prepared, defaults, .. } = made.map_err(of_service)?;
        let process = process_spec(&task, &defaults).map_err(|error| of_service(error.into()))?;
        let session = worker.session.opened().await;
        let call = || worker.clients.store.mark_prepared(&session.credential, task.attempt);
        until_answered("report that a service is prepared", call).await?;
        containers.0.push((prepared.container, process));
    }
    Ok(containers)
}

/// Starts the services in order, each when the one before it is ready. Running services are found.
pub(super) async fn start(
    worker: &Worker,
    task: &AttemptTask,
    containers: &ServiceContainers,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<(), AttemptError> {
    let services = task.spec.services.iter().zip(&containers.0);
    for (index, (service, (container, process))) in services.enumerate() {
        if !worker.session.is_exclusive() {
            return Err(AttemptError::NotExclusive);
        }
        let of_service =
            |error: RuntimeError| AttemptError::from(error).before_start().of_service(&service.name);
        let id = task.attempt.service(&service.name);
        if let Err(error) = worker.runtime.start(*container, id.into(), process.clone()).await {
            check(worker, task, stop).await?;
            return Err(of_service(error));
        }
        let timeout = service.readiness.timeout;
        let last_check = Mutex::new("its process has not started".to_owned());
        tokio::select! {
            biased;
            ready = wait_until_ready(worker, service, *container, id, &last_check) => ready.map_err(of_service)?,
            () = first_end(worker, task, &task.spec.services[..=index]) => {
                check(worker, task, stop).await?;
                return Err(failed(worker, task, service, FailureReason::ServiceFailed, "lost its container", stop).await);
            }
            request = stop_requested(stop) => return Err(AttemptError::StopRequested(request)),
            () = worker.stopping.cancelled() => return Err(AttemptError::GatewayStopping),
            () = tokio::time::sleep(timeout) => {
                let how = format!("was not ready within {timeout:?}: {}", *lock(&last_check));
                return Err(failed(worker, task, service, FailureReason::ServiceFailed, &how, stop).await);
            }
        }
        tracing::info!(process.id = %id, service.name = service.name, "service is ready");
    }
    Ok(())
}

/// Resolves when a service is ready.
async fn wait_until_ready(
    worker: &Worker,
    service: &Service,
    container: ContainerHandle,
    id: AttemptId,
    last_check: &Mutex<String>,
) -> Result<(), RuntimeError> {
    wait_until_started(worker, id).await;
    let (mut command_pause, longest) = COMMAND_PAUSES;
    loop {
        let (checked, pause) = match &service.readiness.check {
            ReadinessCheck::Started => return Ok(()),
            ReadinessCheck::TcpPort(port) => {
                *lock(last_check) = format!("nothing accepts connections at 127.0.0.1:{port}");
                (worker.runtime.accepts_connections(id.into(), *port).await, PORT_PAUSE)
            }
            ReadinessCheck::Command(command) => {
                let pause = command_pause;
                command_pause = (pause * 2).min(longest);
                (run_probe(worker, container, command.clone(), last_check).await, pause)
            }
        };
        match checked {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error @ (RuntimeError::Unsupported(_) | RuntimeError::TakenOver(_))) => return Err(error),
            Err(error) => {
                tracing::debug!(process.id = %id, error = error_chain(&error), "cannot check whether a service is ready");
            }
        }
        tokio::time::sleep(pause).await;
    }
}

/// Runs the command that checks whether a service is ready.
async fn run_probe(
    worker: &Worker,
    container: ContainerHandle,
    command: Vec<Vec<u8>>,
    last_check: &Mutex<String>,
) -> Result<bool, RuntimeError> {
    let spec = ProcessSpec {
        command,
        environment: Vec::new(),
        directory: None,
        user: None,
        role: ProcessRole::Exec,
        stdin: Stdin::None,
        output: OutputMode::Spooled,
        terminal: None,
    };
    let probe = ProcessId::new();
    *lock(last_check) = "its readiness command has not ended".to_owned();
    worker.runtime.start(container, probe, spec).await?;
    let Ok(ended) = tokio::time::timeout(COMMAND_TIMEOUT, worker.runtime.wait(probe)).await else {
        worker.runtime.stop(probe, Duration::ZERO).await?;
        *lock(last_check) = format!("its readiness command ran for {COMMAND_TIMEOUT:?}");
        return Ok(false);
    };
    let ended = ended?;
    *lock(last_check) = format!("its readiness command {}", describe(&ended));
    Ok(matches!(ended, Ended::Exited { exit: Exit::Code(0), .. }))
}

/// Resolves when the process of a service has ended.
async fn end_of(worker: &Worker, id: AttemptId) {
    while let Err(error) = worker.runtime.wait(id.into()).await {
        if let RuntimeError::ProcessNotFound(_) = error {
            return;
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Resolves when one of `services` has ended. Without services, it never resolves.
async fn first_end(worker: &Worker, task: &AttemptTask, services: &[Service]) {
    let ends = services.iter().map(|service| end_of(worker, task.attempt.service(&service.name)));
    if ends.collect::<FuturesUnordered<_>>().next().await.is_none() {
        std::future::pending().await
    }
}

/// Fails if a service has ended that was not stopped.
pub(super) async fn check(
    worker: &Worker,
    task: &AttemptTask,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> Result<(), AttemptError> {
    let mut end = first_unexpected_end(worker, task).await;
    if let (None | Some((_, Ended::NotStarted(_))), Some(first)) = (&end, task.spec.services.first()) {
        // A container cannot start after the one whose network it joins has ended, and that end may
        // not be recorded yet.
        _ = tokio::time::timeout(RECORD_TIMEOUT, end_of(worker, task.attempt.service(&first.name))).await;
        end = first_unexpected_end(worker, task).await;
    }
    let Some((service, ended)) = end else { return Ok(()) };
    let (reason, how) = match &ended {
        // The worker may have caused it.
        Ended::NotStarted(failure) => (failure.reason, describe(&ended)),
        Ended::Exited { .. } | Ended::Unknown(_) => {
            (FailureReason::ServiceFailed, format!("{} before the process was started", describe(&ended)))
        }
    };
    Err(failed(worker, task, service, reason, &how, stop).await)
}

/// Returns the first service that has ended and was not stopped, preferably one that was started.
async fn first_unexpected_end<'a>(worker: &Worker, task: &'a AttemptTask) -> Option<(&'a Service, Ended)> {
    let mut not_started = None;
    for service in &task.spec.services {
        let state = worker.runtime.process(task.attempt.service(&service.name).into()).await;
        match state {
            Ok(ProcessState::Ended(ended)) if is_stopped(&ended) => {}
            Ok(ProcessState::Ended(ended @ Ended::NotStarted(_))) => {
                not_started.get_or_insert((service, ended));
            }
            Ok(ProcessState::Ended(ended)) => return Some((service, ended)),
            Ok(ProcessState::Starting | ProcessState::Started | ProcessState::StartUnknown) | Err(_) => {}
        }
    }
    not_started
}

/// Whether the gateway caused this end.
fn is_stopped(ended: &Ended) -> bool {
    match ended {
        Ended::Exited { stopped, .. } => *stopped,
        Ended::NotStarted(failure) => failure.reason == FailureReason::StoppedBeforeStart,
        Ended::Unknown(_) => false,
    }
}

/// Stops all services, and returns the failure of one of them with the end of its output.
async fn failed(
    worker: &Worker,
    task: &AttemptTask,
    service: &Service,
    reason: FailureReason,
    how: &str,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> AttemptError {
    // Another gateway may handle the attempt, and may find the service ready.
    if !worker.session.is_exclusive() {
        return AttemptError::NotExclusive;
    }
    if !self::stop(worker, task, stop).await {
        return AttemptError::GatewayStopping;
    }
    let mut message = format!("service {} {how}", service.name);
    let id = task.attempt.service(&service.name);
    let tail = tokio::time::timeout(TAIL_TIMEOUT, output_tail(worker, id)).await;
    match tail.as_ref().map(|tail| tail.as_deref().map(str::trim)) {
        Ok(Ok("")) => message.push_str("; it has no output"),
        Ok(Ok(tail)) => message.push_str(&format!("; the end of its output: {tail}")),
        Ok(Err(error)) => message.push_str(&format!("; cannot read its output: {}", error_chain(error))),
        Err(_) => message.push_str("; its output cannot be read in time"),
    }
    AttemptError::ServiceFailed(Failure { reason, message })
}

/// Returns the end of the output of a process that has ended.
async fn output_tail(worker: &Worker, id: AttemptId) -> Result<String, RuntimeError> {
    let mut attachment = worker.runtime.attach(id.into(), Offsets::default()).await?;
    let mut tail = Vec::new();
    while let Some(event) = attachment.events.next().await {
        match event? {
            ProcessEvent::Output { data, .. } => {
                tail.extend_from_slice(&data);
                tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
            }
            ProcessEvent::Done(_) => break,
            ProcessEvent::StdinAccepted(_) | ProcessEvent::Truncated { .. } | ProcessEvent::Ended(_) => {}
        }
    }
    Ok(String::from_utf8_lossy(&tail).into_owned())
}

/// Describes an end, for people.
fn describe(ended: &Ended) -> String {
    match ended {
        Ended::Exited { exit: Exit::Code(code), .. } => format!("ended with exit code {code}"),
        Ended::Exited { exit: Exit::Signal(signal), .. } => format!("ended by signal {signal}"),
        Ended::Exited { exit: Exit::OutOfMemory, .. } => "ended because it was out of memory".to_owned(),
        Ended::NotStarted(failure) => format!("was not started ({}: {})", failure.reason, failure.message),
        Ended::Unknown(failure) => {
            format!("ended in an unknown way ({}: {})", failure.reason, failure.message)
        }
    }
}

/// Stops the process of the attempt when an essential service has ended.
pub(super) async fn enforce_essential(worker: &Worker, task: &AttemptTask) -> Infallible {
    let services = task.spec.services.iter().filter(|service| service.essential);
    let ends = services.map(async |service| {
        end_of(worker, task.attempt.service(&service.name)).await;
        service
    });
    let mut ends: FuturesUnordered<_> = ends.collect();
    while let Some(service) = ends.next().await {
        if !unexpected_ends(worker, task).await.is_failure() {
            continue;
        }
        tracing::info!(attempt.id = %task.attempt, service.name = service.name, "stopping a process whose service has ended");
        while let Err(error) = worker.runtime.stop(task.attempt.into(), STOP_GRACE).await {
            tracing::warn!(attempt.id = %task.attempt, error = error_chain(&error), "cannot stop a process whose service has ended: trying again");
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        break;
    }
    std::future::pending().await
}

/// Ends of services that were not stopped.
#[derive(Debug, Default)]
pub(super) struct UnexpectedEnds {
    notes: Vec<String>,
    failures: Vec<String>,
}

impl UnexpectedEnds {
    /// Whether an essential service has ended.
    pub(super) fn is_failure(&self) -> bool {
        !self.failures.is_empty()
    }

    /// Adds the ends to the result of the attempt. They are only notes if the process has
    /// succeeded.
    pub(super) fn report(self, result: &mut AttemptResult, has_succeeded: bool) {
        result.notes.extend(self.notes);
        if has_succeeded {
            result.notes.extend(self.failures);
            return;
        }
        for message in self.failures {
            result.add_failure(Failure { reason: FailureReason::ServiceFailed, message });
        }
    }
}

/// Returns the ends of services that were not stopped, after all were started.
pub(super) async fn unexpected_ends(worker: &Worker, task: &AttemptTask) -> UnexpectedEnds {
    let mut ends = UnexpectedEnds::default();
    for service in &task.spec.services {
        let id = task.attempt.service(&service.name);
        let how = match until_read(worker, id).await {
            Ok(ProcessState::Ended(ended)) if is_stopped(&ended) => continue,
            Ok(ProcessState::Ended(ended)) => format!("{} too early", describe(&ended)),
            Ok(ProcessState::Starting | ProcessState::Started | ProcessState::StartUnknown) => continue,
            Err(_) => "lost its container".to_owned(),
        };
        let text = format!("service {} {how}", service.name);
        if service.essential { ends.failures.push(text) } else { ends.notes.push(text) }
    }
    ends
}

/// Returns the state of a process. The only error is [`RuntimeError::ProcessNotFound`].
async fn until_read(worker: &Worker, id: AttemptId) -> Result<ProcessState, RuntimeError> {
    loop {
        match worker.runtime.process(id.into()).await {
            Err(error) if !matches!(error, RuntimeError::ProcessNotFound(_)) => {
                tracing::warn!(process.id = %id, error = error_chain(&error), "cannot read the state of a service: trying again");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            state => return state,
        }
    }
}

/// Returns the time for which services may end after TERM.
fn grace(stop: &watch::Receiver<Option<StopRequest>>) -> Duration {
    stop.borrow().as_ref().map_or(STOP_GRACE, |request| request.grace.min(STOP_GRACE))
}

/// Stops the services of an attempt, if it has any. Returns whether none runs.
pub(super) async fn stop(
    worker: &Worker,
    task: &AttemptTask,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> bool {
    task.spec.services.is_empty() || stop_within(worker, task.lease, stop).await
}

/// Stops the services of a lease, as [`stop_all`] does. A request to stop shortens their time.
pub(super) async fn stop_within(
    worker: &Worker,
    lease: LeaseId,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> bool {
    let mut requested = stop.clone();
    loop {
        let now = grace(stop);
        tokio::select! {
            stopped = stop_all(worker, lease, now) => return stopped,
            Ok(_) = requested.wait_for(|request| request.as_ref().is_some_and(|request| request.grace < now)) => {}
        }
    }
}

/// Stops the services of a lease one after the other in reverse order, and waits for their ends.
/// Returns whether none runs. It is false only if the gateway stops first.
pub(super) async fn stop_all(worker: &Worker, lease: LeaseId, grace: Duration) -> bool {
    let request = StopRequest { grace, reason: FailureReason::StoppedBeforeStart };
    let (_requested, stop) = watch::channel(Some(request));
    loop {
        let stopped = tokio::select! {
            stopped = stop_in_order(worker, lease, &stop) => stopped,
            () = worker.stopping.cancelled() => return false,
        };
        match stopped {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(lease.id = %lease, error = error_chain(&error), "cannot list the services of a lease: trying again");
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn stop_in_order(
    worker: &Worker,
    lease: LeaseId,
    stop: &watch::Receiver<Option<StopRequest>>,
) -> Result<bool, RuntimeError> {
    // Without a session, the containers of an earlier gateway are not listed.
    worker.session.opened().await;
    let is_service = |known: &KnownContainer| known.note.lease == lease && known.note.service.is_some();
    let mut services = worker.containers(is_service).await?;
    if services.is_empty() {
        return Ok(true);
    }
    // A process that another gateway handles must not be stopped.
    worker.session.wait_until_exclusive().await;
    services.sort_by_key(|container| Reverse(container.note.service));
    for service in services {
        if !end(worker, service.note.container, stop).await {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
