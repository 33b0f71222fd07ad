//! The stream to the scheduler, which carries the current state of a worker up and the desired
//! state down.
//!
//! Each message names all leases, so a broken stream loses no state. On each stream the scheduler
//! sends each request to run or stop an attempt once. An attempt starts once per lease, in a task
//! that outlives the stream.
//!
//! The runtime receives each proof of contact, as [`crate::worker::heartbeat`] defines it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use domain::workload::FailureReason;
use domain::{AttemptId, GatewayInstance, LeaseId, error_chain};
use rpc::Reason;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::attempt;
use crate::attempt::context::AttemptContext;
use crate::clients::scheduler_messages::{
    AttemptPhase, DesiredLease, DesiredState, Directive, LeaseRequest, LeaseState, Registration,
    SchedulerStream, StreamError, Welcome, WorkerState,
};
use crate::driven;
use crate::util::clock::since_boot;
use crate::worker::Worker;
use crate::worker::attempts::{AttemptEntry, StopRequest};
use crate::worker::heartbeat::{Heartbeats, NeverSent};
use crate::worker::session::OpenSession;
use crate::worker::usage::Usage;

/// Time of an extra state message after a registration, if the heartbeat is slower. The scheduler
/// ignores listings of the first second.
const FIRST_OBSERVATION: Duration = Duration::from_millis(1100);
/// Maximum time for the scheduler to record that a gateway has signed off.
const SIGN_OFF_TIME: Duration = Duration::from_secs(2);

/// The reason why a stream to the scheduler ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("cannot read the marker of the worker")]
    Runtime(#[from] runtime::RuntimeError),
    #[error("the scheduler acknowledged a message that was never sent")]
    NeverSent,
    #[error("the scheduler does not know this worker any more")]
    Forgotten,
    #[error("the gateway is stopping")]
    Stopping,
}

/// Keeps a stream to the scheduler open until the gateway stops.
pub(crate) async fn synchronize_forever(context: Arc<AttemptContext>, mut instance: GatewayInstance) {
    let worker = &context.worker;
    let mut pause = Duration::from_millis(20);
    let (mut standing_by, mut retired) = (false, false);
    loop {
        let ended = run_stream(&context, instance, &mut pause).await;
        match &ended {
            StreamEnd::Stopping => return,
            StreamEnd::Stream(StreamError::Refused(refusal)) if refusal.is(Reason::StaleSession) => {
                tracing::warn!(
                    worker.name = worker.config.worker_name,
                    "another gateway has taken over this worker"
                );
                worker.session.set(None);
                worker.runtime.taken_over().await;
                instance = GatewayInstance::new();
            }
            StreamEnd::Forgotten => {
                tracing::warn!(
                    worker.name = worker.config.worker_name,
                    "the scheduler does not know this worker any more: registering again"
                );
                worker.session.set(None);
            }
            StreamEnd::Stream(StreamError::Refused(refusal)) if refusal.is(Reason::WorkerRetired) => {
                if !std::mem::replace(&mut retired, true) {
                    tracing::warn!(
                        worker.name = worker.config.worker_name,
                        "this worker was retired: the gateway starts and destroys nothing until an operator starts the worker again"
                    );
                }
                worker.session.set(None);
            }
            StreamEnd::Stream(StreamError::Refused(refusal)) if refusal.is_transient() => {
                tracing::debug!(error = %refusal, "the scheduler does not answer: trying again");
            }
            StreamEnd::Stream(StreamError::Refused(refusal)) if refusal.is(Reason::AlreadyAttended) => {
                if !std::mem::replace(&mut standing_by, true) {
                    tracing::info!(
                        worker.name = worker.config.worker_name,
                        "another gateway attends this worker: this gateway stands by"
                    );
                }
            }
            ended => tracing::warn!(error = %error_chain(ended), "cannot keep a session: registering again"),
        }
        standing_by &= worker.session.current().is_none();
        retired &= worker.session.current().is_none();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = worker.stopping.cancelled() => return,
        }
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

/// Registers, and exchanges messages until the stream ends. Signs off if the gateway stops.
async fn run_stream(
    context: &Arc<AttemptContext>,
    instance: GatewayInstance,
    pause: &mut Duration,
) -> StreamEnd {
    let worker = &context.worker;
    let opened = tokio::select! {
        opened = open_stream(worker, instance) => opened,
        () = worker.stopping.cancelled() => return StreamEnd::Stopping,
    };
    let (mut stream, welcome, registered_at) = match opened {
        Ok(opened) => opened,
        Err(ended) => return ended,
    };
    tokio::select! {
        exchanged = exchange(context, &mut stream, welcome, registered_at, pause) => match exchanged {
            Ok(never) => match never {},
            Err(ended) => return ended,
        },
        () = worker.stopping.cancelled() => {}
    }
    // Another gateway may start and destroy something as soon as this one has signed off.
    worker.session.end_exclusive();
    if tokio::time::timeout(SIGN_OFF_TIME, stream.sign_off()).await.is_err() {
        tracing::warn!(
            worker.name = worker.config.worker_name,
            "cannot sign off: the scheduler does not answer"
        );
    }
    StreamEnd::Stopping
}

/// Registers. Returns also the time before the registration, by `CLOCK_BOOTTIME`.
async fn open_stream(
    worker: &Worker,
    instance: GatewayInstance,
) -> Result<(SchedulerStream, Welcome, Duration), StreamEnd> {
    let registration = registration(worker, instance).await?;
    let registered_at = since_boot();
    let (stream, welcome) = SchedulerStream::open(&worker.clients.scheduler, registration).await?;
    Ok((stream, welcome, registered_at))
}

/// Exchanges messages in a new session until the stream ends.
async fn exchange(
    context: &Arc<AttemptContext>,
    stream: &mut SchedulerStream,
    welcome: Welcome,
    registered_at: Duration,
    pause: &mut Duration,
) -> Result<Infallible, StreamEnd> {
    let worker = &context.worker;
    let mut heartbeats = Heartbeats::new(registered_at);
    let session = OpenSession {
        credential: welcome.credential,
        worker: welcome.worker,
        incarnation: welcome.incarnation,
        session: welcome.session,
    };
    tracing::info!(
        worker.id = %session.worker,
        worker.name = worker.config.worker_name,
        incarnation = session.incarnation.0,
        session = session.session.0,
        "session opened"
    );
    worker.session.extend_exclusive(registered_at + welcome.worker_ttl);
    worker.session.set(Some(session.clone()));
    worker.attempts.expect_all_named();
    *pause = Duration::from_millis(20);

    let (mut applied, mut directive) = (0, Directive::Run);
    let first_observation = Instant::now() + FIRST_OBSERVATION;
    loop {
        let mut state = worker_state(worker, &session, applied).await?;
        state.number = heartbeats.record_sent(since_boot());
        stream.send(state).await?;
        let due = welcome.heartbeat / 2;
        let until_first_observation = first_observation.saturating_duration_since(Instant::now());
        let due = if until_first_observation.is_zero() { due } else { due.min(until_first_observation) };
        let due = tokio::time::sleep(due);
        tokio::pin!(due);
        loop {
            tokio::select! {
                desired = stream.receive() => {
                    let desired = desired?;
                    let contact = heartbeats
                        .acknowledge(desired.received, welcome.heartbeat)
                        .map_err(|NeverSent| StreamEnd::NeverSent)?;
                    if let Some(sent) = contact {
                        worker.session.extend_exclusive(sent + welcome.worker_ttl);
                        // Spawned, because a supervisor that does not answer must not delay the
                        // stream.
                        worker.tasks.spawn(report_contact(worker.clone(), sent, welcome.stop_after));
                    }
                    let before = std::mem::replace(&mut applied, desired.generation);
                    let directive_now = desired.directive;
                    if std::mem::replace(&mut directive, directive_now) != directive_now {
                        log_directive(worker, directive_now);
                    }
                    let changed = apply(context, desired);
                    if directive_now == Directive::RegisterAgain {
                        return Err(StreamEnd::Forgotten);
                    }
                    if changed || applied != before {
                        break;
                    }
                }
                () = worker.attempts.changed() => break,
                () = &mut due => break,
            }
        }
    }
}

/// Logs a change of the worker's directive. Nothing else is necessary, because the scheduler grants
/// no leases meanwhile.
fn log_directive(worker: &Worker, directive: Directive) {
    let name = &worker.config.worker_name;
    match directive {
        Directive::Run => tracing::info!(worker.name = name, "this worker takes work"),
        Directive::Cordon => {
            tracing::info!(worker.name = name, "this worker is cordoned: it gets no more work")
        }
        Directive::Retire => {
            tracing::info!(worker.name = name, "this worker is being retired: it gets no more work");
        }
        Directive::RegisterAgain => {}
    }
}

async fn registration(worker: &Worker, instance: GatewayInstance) -> Result<Registration, StreamEnd> {
    let ended = worker.runtime.record_gateway(instance).await?;
    let marker = worker.runtime.marker().await?;
    let disk = worker.runtime.disk().await?;
    let credential = worker.session.current().map(|session| session.credential).unwrap_or_default();
    let capabilities = worker.runtime.capabilities();
    Ok(Registration::new(&worker.config, instance, ended, marker, disk, capabilities, credential))
}

async fn worker_state(
    worker: &Worker,
    session: &OpenSession,
    applied: u64,
) -> Result<WorkerState, StreamEnd> {
    let disk = worker.runtime.disk().await?;
    let attempts = worker.attempts.lock();
    let leases = attempts.iter().map(|(lease, attempt)| LeaseState {
        lease: *lease,
        phase: attempt.phase,
        inputs: attempt.inputs.clone(),
    });
    let Usage { containers, volumes } = worker.usage.now();
    Ok(WorkerState {
        credential: session.credential.clone(),
        applied_generation: applied,
        leases: leases.collect(),
        containers,
        volumes,
        disk_free_bytes: disk.map_or(0, |disk| disk.free_bytes),
        number: 0,
    })
}

/// Applies the desired state. Returns whether the current state changed.
fn apply(context: &Arc<AttemptContext>, desired: DesiredState) -> bool {
    let worker = &context.worker;
    let generation = desired.generation;
    let mut named = Vec::with_capacity(desired.leases.len());
    let mut changed = false;
    for DesiredLease { lease, request } in desired.leases {
        named.push(lease);
        if let Some(request) = request {
            changed |= apply_request(context, lease, request);
        }
    }
    let mut attempts = worker.attempts.lock();
    attempts.retain(|lease, attempt| {
        if named.contains(lease) {
            attempt.named_from = attempt.named_from.min(generation);
            return true;
        }
        if generation < attempt.named_from {
            return true;
        }
        // The scheduler no longer knows the lease, so the attempt must stop. Its task reports the
        // end.
        if attempt.phase != AttemptPhase::Ended {
            let request = StopRequest { grace: Duration::ZERO, reason: FailureReason::StoppedBeforeStart };
            attempt.stop.send_if_modified(|now| now.replace(request.clone()) != Some(request));
            return true;
        }
        changed = true;
        false
    });
    changed
}

/// Starts the task that handles a lease.
fn start_task<F>(
    context: &Arc<AttemptContext>,
    lease: LeaseId,
    request: Option<StopRequest>,
    (attempt, token): (Option<AttemptId>, String),
    work: impl FnOnce(watch::Receiver<Option<StopRequest>>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let worker = &context.worker;
    let (stop, stopped) = watch::channel(request);
    worker.attempts.lock().insert(lease, AttemptEntry::new(stop));
    worker.tasks.spawn(attempt::run_guarded(worker.clone(), lease, attempt, token, work(stopped)));
}

fn apply_request(context: &Arc<AttemptContext>, lease: LeaseId, request: LeaseRequest) -> bool {
    let worker = &context.worker;
    match request {
        LeaseRequest::Stop { attempt, token, grace, reason } => {
            stop(context, lease, (attempt, token), StopRequest { grace, reason })
        }
        LeaseRequest::Run(_) | LeaseRequest::Invalid { .. }
            if worker.attempts.lock().contains_key(&lease) =>
        {
            false
        }
        LeaseRequest::Run(task) => {
            let target = (Some(task.attempt), task.token.clone());
            start_task(context, lease, None, target, |stopped| attempt::run(context.clone(), *task, stopped));
            true
        }
        LeaseRequest::Hold => {
            let (is_new, changed) = worker.attempts.add_held(lease, None);
            if is_new {
                worker.tasks.spawn(driven::resume(context.clone(), lease));
            }
            changed
        }
        LeaseRequest::StopHeld { grace, reason } => {
            let (is_new, changed) = worker.attempts.add_held(lease, Some(StopRequest { grace, reason }));
            if is_new {
                worker.tasks.spawn(driven::hold(context.clone(), lease));
            }
            changed
        }
        LeaseRequest::Invalid { attempt, token, why } => {
            tracing::error!(lease.id = %lease, error = why, "cannot parse an attempt");
            start_task(context, lease, None, (attempt, token.clone()), |_| {
                attempt::fail_invalid(worker.clone(), lease, attempt, token, why)
            });
            true
        }
    }
}

/// Requests the task of an attempt to stop. If there is no task, an earlier gateway may have
/// started the process.
fn stop(
    context: &Arc<AttemptContext>,
    lease: LeaseId,
    (attempt, token): (Option<AttemptId>, String),
    request: StopRequest,
) -> bool {
    let worker = &context.worker;
    if let Some(attempt) = worker.attempts.lock().get(&lease) {
        return attempt.stop.send_if_modified(|now| now.replace(request.clone()) != Some(request));
    }
    let target = (attempt, token.clone());
    match attempt {
        Some(attempt) => start_task(context, lease, Some(request), target, |stopped| {
            attempt::stop_earlier_attempt(worker.clone(), lease, attempt, token, stopped)
        }),
        None => {
            tracing::error!(lease.id = %lease, "cannot parse the id of an attempt that must stop");
            let why = "attempt_id: must be a UUID".to_owned();
            start_task(context, lease, Some(request), target, |_| {
                attempt::fail_invalid(worker.clone(), lease, None, token, why)
            });
        }
    }
    true
}

async fn report_contact(worker: Arc<Worker>, sent: Duration, stop_after: Duration) {
    if let Err(error) = worker.runtime.contact(sent, stop_after).await {
        tracing::warn!(error = %error_chain(&error), "cannot report contact to the supervisors");
    }
}

#[cfg(test)]
mod tests;
