//! Speaking for the worker: one stream to the scheduler, current state up, desired state down.
//!
//! Each message names all leases, so a stream that breaks costs only time. The scheduler says once on each stream what to run and what to
//! stop. An attempt is started once per lease, in a task that survives the stream, and that task is told to stop it.
//!
//! The worker is told of contact as [`crate::worker::heartbeat`] says: as of a message of ours that the scheduler says it heard.

use std::sync::Arc;
use std::time::Duration;

use domain::worker::{Incarnation, Marker, ResourceType, Session};
use domain::workload::FailureReason;
use domain::{AttemptId, GatewayInstance, LeaseId, WorkerId, chain};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::desired_lease::Wish;
use rpc::pb::scheduler::synchronize_request::Message as Up;
use rpc::pb::scheduler::synchronize_response::Message as Down;
use rpc::{Reason, Refusal};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use runtime::{Capabilities, Disk};

use crate::Config;
use crate::attempt;
use crate::attempt::context::AttemptContext;
use crate::util::clock::since_boot;
use crate::worker::Worker;
use crate::worker::attempts::{AttemptEntry, StopRequest};
use crate::worker::heartbeat::{Contact, NeverSent};
use crate::worker::session::OpenSession;
use crate::worker::usage::Usage;

/// Time of the second observation after a registration, if the heartbeat is longer: the scheduler lists none of the first second.
const LISTED: Duration = Duration::from_millis(1100);

/// The version of the protocol that this gateway speaks.
const PROTOCOL: u32 = 1;

/// Why a stream to the scheduler ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the scheduler refused or broke off")]
    Refused(#[from] Refusal),
    #[error("the worker cannot say who it is")]
    Runtime(#[from] runtime::RuntimeError),
    #[error("the scheduler sent something that makes no sense: {0}")]
    Nonsense(&'static str),
    #[error("the scheduler ended the stream")]
    Closed,
    #[error("the scheduler has forgotten this worker")]
    Forgotten,
}

/// Keeps a stream to the scheduler open until the gateway stops.
pub(crate) async fn forever(context: Arc<AttemptContext>, mut instance: GatewayInstance) {
    let worker = &context.worker;
    let mut pause = Duration::from_millis(20);
    let (mut standing_by, mut retired) = (false, false);
    loop {
        let ended = tokio::select! {
            ended = speak(&context, instance, &mut pause) => ended,
            () = worker.stopping.cancelled() => return,
        };
        match &ended {
            Ended::Refused(refusal) if refusal.is(Reason::StaleSession) => {
                tracing::warn!(
                    worker.name = worker.config.worker_name,
                    "another gateway has taken over this worker"
                );
                worker.session.set(None);
                worker.runtime.taken_over().await;
                instance = GatewayInstance::new();
            }
            Ended::Forgotten => {
                tracing::warn!(
                    worker.name = worker.config.worker_name,
                    "this worker was forgotten: it registers anew"
                );
                worker.session.set(None);
            }
            Ended::Refused(refusal) if refusal.is(Reason::WorkerRetired) => {
                if !std::mem::replace(&mut retired, true) {
                    tracing::warn!(
                        worker.name = worker.config.worker_name,
                        "this worker was retired: it starts and destroys nothing any more, unless it is told to run again"
                    );
                }
                worker.session.set(None);
            }
            Ended::Refused(refusal) if refusal.is_transient() => {
                tracing::debug!(error = %refusal, "the scheduler does not answer");
            }
            Ended::Refused(refusal) if refusal.is(Reason::AlreadyAttended) => {
                if !std::mem::replace(&mut standing_by, true) {
                    tracing::info!(
                        worker.name = worker.config.worker_name,
                        "another gateway attends this worker: this one stands by"
                    );
                }
            }
            ended => tracing::warn!(error = %chain(ended), "cannot speak for the worker"),
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

/// One stream, from hello to its end.
async fn speak(context: &Arc<AttemptContext>, instance: GatewayInstance, pause: &mut Duration) -> Ended {
    match try_speak(context, instance, pause).await {
        Ok(()) => Ended::Closed,
        Err(ended) => ended,
    }
}

async fn try_speak(
    context: &Arc<AttemptContext>,
    instance: GatewayInstance,
    pause: &mut Duration,
) -> Result<(), Ended> {
    let worker = &context.worker;
    let (up, requests) = mpsc::channel(4);
    let hello = hello(worker, instance).await?;
    let said_hello = since_boot();
    let mut contact = Contact::new(said_hello);
    // The other end of the channel is the stream below, which is alive.
    up.send(pb::SynchronizeRequest { message: Some(Up::Hello(hello)) }).await.ok();
    let mut client = worker.workers.clone();
    let mut down =
        client.synchronize(ReceiverStream::new(requests)).await.map_err(Refusal::from)?.into_inner();

    let welcome = match down.message().await.map_err(Refusal::from)?.and_then(|response| response.message) {
        Some(Down::Welcome(welcome)) => welcome,
        Some(Down::Desired(_)) => return Err(Ended::Nonsense("the first message is not `welcome`")),
        None => return Err(Ended::Closed),
    };
    let session = open_session(&welcome)?;
    tracing::info!(
        worker.id = %session.worker,
        worker.name = worker.config.worker_name,
        incarnation = session.incarnation.0,
        session = session.session.0,
        "speaking for the worker"
    );
    let ttl = seconds(welcome.worker_ttl, Duration::from_secs(30));
    worker.session.extend_exclusive(said_hello + ttl);
    worker.session.set(Some(session.clone()));
    *pause = Duration::from_millis(20);

    let heartbeat = seconds(welcome.heartbeat, Duration::from_secs(5));
    let stop_after = seconds(welcome.stop_after, Duration::from_secs(600));
    let (mut applied, mut directive) = (0, pb::Directive::Run);
    let listed = Instant::now() + LISTED;
    loop {
        let mut observed = observe(worker, &session, applied).await?;
        observed.number = contact.sending(since_boot());
        if up.send(pb::SynchronizeRequest { message: Some(Up::Observed(observed)) }).await.is_err() {
            return Err(Ended::Closed);
        }
        let due = heartbeat / 2;
        let until_listed = listed.saturating_duration_since(Instant::now());
        let due = if until_listed.is_zero() { due } else { due.min(until_listed) };
        let due = tokio::time::sleep(due);
        tokio::pin!(due);
        loop {
            tokio::select! {
                message = down.message() => {
                    match message.map_err(Refusal::from)?.and_then(|response| response.message) {
                        Some(Down::Desired(desired)) => {
                            let heard = contact.heard(desired.heard, heartbeat).map_err(|NeverSent| {
                                Ended::Nonsense("it heard what was never sent")
                            })?;
                            if let Some(sent) = heard {
                                worker.session.extend_exclusive(sent + ttl);
                                // A supervisor that does not answer must not delay others.
                                worker.tasks.spawn(tell_contact(worker.clone(), sent, stop_after));
                            }
                            let before = applied;
                            applied = desired.generation;
                            let told = desired.directive();
                            if std::mem::replace(&mut directive, told) != told {
                                say(worker, told);
                            }
                            let changed = apply(context, desired);
                            if told == pb::Directive::RegisterAgain {
                                return Err(Ended::Forgotten);
                            }
                            if changed || applied != before {
                                break;
                            }
                        }
                        Some(Down::Welcome(_)) => return Err(Ended::Nonsense("a second `welcome`")),
                        None => return Err(Ended::Closed),
                    }
                }
                () = worker.attempts.changed() => break,
                () = &mut due => break,
            }
        }
    }
}

/// What the worker as a whole shall do has changed. The scheduler gives it no work, so there is nothing to do about it here.
fn say(worker: &Worker, directive: pb::Directive) {
    let name = &worker.config.worker_name;
    match directive {
        pb::Directive::Run | pb::Directive::Unspecified => {
            tracing::info!(worker.name = name, "this worker may take work");
        }
        pb::Directive::Land => tracing::info!(worker.name = name, "this worker lands: it gets no more work"),
        pb::Directive::Retire => {
            tracing::info!(worker.name = name, "this worker is being retired: it gets no more work");
        }
        pb::Directive::RegisterAgain => {}
    }
}

async fn hello(worker: &Worker, instance: GatewayInstance) -> Result<pb::Hello, Ended> {
    let marker = worker.runtime.marker().await?;
    let disk = worker.runtime.disk().await?;
    let credential = worker.session.current().map(|session| session.credential).unwrap_or_default();
    Ok(introduce(&worker.config, instance, marker, disk, worker.runtime.capabilities(), credential))
}

/// Who wants to speak for which worker. `credential`: of the last session of this instance, if it had one.
pub(crate) fn introduce(
    config: &Config,
    instance: GatewayInstance,
    marker: Marker,
    disk: Option<Disk>,
    capabilities: &Capabilities,
    credential: String,
) -> pb::Hello {
    let labels = config.labels(capabilities);
    let capacity = config.amounts.capacity(capabilities, disk);
    pb::Hello {
        worker_name: config.worker_name.clone(),
        gateway_instance: instance.to_string(),
        session_credential: credential,
        marker: Some(pb::Marker { marker_id: marker.id.to_string(), boot_id: marker.boot }),
        endpoint: config.endpoint.clone(),
        labels: Some(pb::WorkerLabels {
            platform: labels.platform,
            tags: labels.tags,
            team: labels.team.unwrap_or_default(),
            image_kinds: labels.image_kinds,
            capabilities: labels.capabilities,
            resource_types: labels
                .resource_types
                .into_iter()
                .map(|ResourceType { name, version }| pb::ResourceType { name, version })
                .collect(),
            ephemeral: config.ephemeral,
        }),
        capacity: Some(pb::Capacity {
            max_tasks: capacity.max_tasks.unwrap_or(0),
            disk_bytes: capacity.disk_bytes,
            max_containers: capacity.max_containers.unwrap_or(0),
            max_volumes: capacity.max_volumes.unwrap_or(0),
            cpu_millis: capacity.cpu_millis.unwrap_or(0),
            memory_bytes: capacity.memory_bytes.unwrap_or(0),
        }),
        protocol_versions: vec![PROTOCOL],
    }
}

fn open_session(welcome: &pb::Welcome) -> Result<OpenSession, Ended> {
    let worker: WorkerId = welcome.worker_id.parse().map_err(|_| Ended::Nonsense("worker_id is no UUID"))?;
    Ok(OpenSession {
        credential: welcome.session_credential.clone(),
        worker,
        incarnation: Incarnation(welcome.incarnation),
        session: Session(welcome.session),
    })
}

async fn observe(worker: &Worker, session: &OpenSession, applied: u64) -> Result<pb::Observed, Ended> {
    let disk = worker.runtime.disk().await?;
    let leases = worker
        .attempts
        .lock()
        .iter()
        .map(|(lease, attempt)| pb::ObservedLease {
            lease_id: lease.to_string(),
            phase: attempt.phase.into(),
            inputs: attempt.inputs.clone(),
        })
        .collect();
    let Usage { containers, volumes } = worker.usage.now();
    Ok(pb::Observed {
        session_credential: session.credential.clone(),
        applied_generation: applied,
        leases,
        containers,
        volumes,
        disk_free_bytes: disk.map_or(0, |disk| disk.free_bytes),
        number: 0,
    })
}

/// Takes up what the scheduler wishes. Answers whether that changed anything here.
///
/// What cannot be understood of one lease ends that lease, and nothing else.
fn apply(context: &Arc<AttemptContext>, desired: pb::Desired) -> bool {
    let worker = &context.worker;
    let mut wished = Vec::with_capacity(desired.leases.len());
    let mut changed = false;
    for lease in desired.leases {
        let Ok(id) = lease.lease_id.parse::<LeaseId>() else {
            tracing::error!(
                lease.id = lease.lease_id,
                "the scheduler names a lease that is no UUID: it is left alone"
            );
            continue;
        };
        wished.push(id);
        match lease.wish {
            Some(Wish::Run(run)) => changed |= start(context, id, run),
            Some(Wish::Stop(stop)) => changed |= self::stop(context, id, stop),
            // It was said before on this stream, or follows.
            None => {}
        }
    }
    let mut attempts = worker.attempts.lock();
    attempts.retain(|lease, attempt| {
        if wished.contains(lease) {
            return true;
        }
        // Over without us: whatever still runs of it has to end. The task tells when it has.
        if attempt.phase != pb::LeasePhase::Ended {
            let wish = StopRequest { grace: Duration::ZERO, reason: FailureReason::StoppedBeforeStart };
            attempt.stop.send_if_modified(|now| now.replace(wish.clone()) != Some(wish));
            return true;
        }
        changed = true;
        false
    });
    changed
}

/// Takes a lease up, in a task of its own that `attend` makes.
fn attend<F>(
    context: &Arc<AttemptContext>,
    lease: LeaseId,
    wish: Option<StopRequest>,
    (attempt, token): (Option<AttemptId>, String),
    attend: impl FnOnce(watch::Receiver<Option<StopRequest>>) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let worker = &context.worker;
    let (stop, stopped) = watch::channel(wish);
    let attempting = AttemptEntry { phase: pb::LeasePhase::Preparing, inputs: Vec::new(), stop };
    worker.attempts.lock().insert(lease, attempting);
    worker.tasks.spawn(attempt::attended(worker.clone(), lease, attempt, token, attend(stopped)));
}

fn start(context: &Arc<AttemptContext>, lease: LeaseId, run: pb::RunAttempt) -> bool {
    let worker = &context.worker;
    if worker.attempts.lock().contains_key(&lease) {
        return false;
    }
    let (attempt, token) = (run.attempt_id.parse().ok(), run.lease_token.clone());
    let whose = (attempt, token.clone());
    match attempt::Task::parse(lease, run) {
        Ok(task) => {
            attend(context, lease, None, whose, |stopped| attempt::run(context.clone(), task, stopped));
        }
        Err(unreadable) => {
            tracing::error!(lease.id = %lease, error = %unreadable, "an attempt cannot be understood");
            let why = unreadable.message().to_owned();
            attend(context, lease, None, whose, |_| {
                attempt::refuse(worker.clone(), lease, attempt, token, why)
            });
        }
    }
    true
}

fn stop(context: &Arc<AttemptContext>, lease: LeaseId, stop: pb::StopAttempt) -> bool {
    let worker = &context.worker;
    let grace = stop.grace.and_then(|grace| grace.try_into().ok()).unwrap_or(Duration::ZERO);
    let reason = stop.reason.parse().unwrap_or(FailureReason::StoppedBeforeStart);
    let wish = StopRequest { grace, reason };
    if let Some(attempt) = worker.attempts.lock().get(&lease) {
        return attempt.stop.send_if_modified(|now| now.replace(wish.clone()) != Some(wish));
    }
    let (attempt, token) = (stop.attempt_id.parse().ok(), stop.lease_token);
    let whose = (attempt, token.clone());
    match attempt {
        Some(attempt) => attend(context, lease, Some(wish), whose, |stopped| {
            attempt::stop_unknown(worker.clone(), lease, attempt, token, stopped)
        }),
        None => {
            tracing::error!(lease.id = %lease, "the attempt that shall stop is no UUID");
            let why = "attempt_id: is no UUID".to_owned();
            attend(context, lease, Some(wish), whose, |_| {
                attempt::refuse(worker.clone(), lease, None, token, why)
            });
        }
    }
    true
}

async fn tell_contact(worker: Arc<Worker>, sent: Duration, stop_after: Duration) {
    if let Err(error) = worker.runtime.contact(sent, stop_after).await {
        tracing::warn!(error = %chain(&error), "cannot tell the worker's processes that they may go on");
    }
}

fn seconds(duration: Option<impl TryInto<Duration>>, default: Duration) -> Duration {
    duration.and_then(|duration| duration.try_into().ok()).unwrap_or(default)
}

#[cfg(test)]
mod tests;
