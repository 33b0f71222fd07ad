//! One attempt at a workload, from its lease to its end.
//!
//! ```text
//! prepare (store) → inputs (streamer) → volumes → container → StartAttempt ∥ Prepared → start → wait → publish → FinishAttempt
//! ```
//!
//! in that order, in one function, [`carry_out`]. Every step may be repeated, so a gateway that starts again simply begins at the top: what
//! exists is found, what runs is waited for, and a process that was started is not started again, for its id is the attempt's. So does one
//! that was refused because another session had begun, once it is let in again.
//!
//! Invariant: a process is started only after `StartAttempt` was acknowledged under this lease. Outputs and caches are published only after the
//! process has exited by itself and, where the runtime is one that `ends-whole`, everything in its container is dead.

use std::collections::HashSet;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::workload::{
    EnvironmentVariable, Exit, Failure, FailureReason, PublishedCache, PublishedOutput, Usage, WorkloadSpec,
};
use domain::{ArtifactId, AttemptId, Digest, LeaseId, VolumeHandle, WorkloadId, chain};
use futures::FutureExt;
use rpc::pb::artifacts as store;
use rpc::pb::scheduler as pb;
use rpc::{Reason, Refusal};
use runtime::{ContainerSpec, Ended, Mount, ProcessSpec, ProcessState, Root, RuntimeError, VolumeSource};
use tokio::sync::watch;
use tonic::Status;
use tracing::Instrument;
use transfer::{DeviceKind, EntryKind};

use self::image::Defaults;
use crate::attempt::spec_plan::{Plan, PlannedImage};
use crate::transfer::Transfers;
use crate::transfer::completion::complete;
use crate::transfer::manifests::{ManifestError, Scanned};
use crate::util::retry::{is_superseded, until_answered};
use crate::worker::Worker;
use crate::worker::attempts::StopRequest;
use crate::worker::attendance;

mod caches;
pub(crate) mod context;
pub(crate) mod image;
mod inputs;
pub(crate) mod spec_plan;

use context::AttemptContext;
use inputs::Prepared;

/// What the scheduler asked for.
pub(crate) struct Task {
    pub(crate) lease: LeaseId,
    pub(crate) attempt: AttemptId,
    pub(crate) spec: WorkloadSpec,
    token: String,
    workload: WorkloadId,
    traceparent: String,
}

impl Task {
    pub(crate) fn parse(lease: LeaseId, run: pb::RunAttempt) -> Result<Self, Status> {
        Ok(Self {
            lease,
            attempt: rpc::parse_id("attempt_id", &run.attempt_id)?,
            workload: rpc::parse_id("workload_id", &run.workload_id)?,
            spec: rpc::spec::accepted(rpc::required("spec", run.spec)?)?,
            token: run.lease_token,
            traceparent: run.traceparent,
        })
    }
}

/// How an attempt ended, as the scheduler is told.
#[derive(Debug, Default)]
struct Finish {
    exit: Option<Exit>,
    failure: Option<Failure>,
    outputs: Vec<PublishedOutput>,
    caches: Vec<PublishedCache>,
    /// What of outputs and caches was not kept, for people.
    notes: Vec<String>,
    started: Option<domain::Timestamp>,
    usage: Usage,
}

impl Finish {
    fn failed(failure: Failure) -> Self {
        Self { failure: Some(failure), ..Self::default() }
    }

    /// Takes note that an output cannot be published. The reason of the first one counts.
    fn fail(&mut self, failure: Failure) {
        match &mut self.failure {
            Some(known) => known.message += &format!("; {}", failure.message),
            none => *none = Some(failure),
        }
    }
}

/// Why an attempt went no further.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    /// The worker could not do it.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The scheduler or the artifact store said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It was asked to stop before its process was started.
    #[error("stopped before the process was started")]
    Wished(StopRequest),
    /// The bytes of an input did not survive a crash of the machine, or are not those that the artifact store says.
    #[error("the volume {0} does not hold what it should any more")]
    InputDamaged(VolumeHandle),
    /// An input cannot be brought to this worker.
    #[error("input {0:?} (artifact {1}) cannot be brought to this worker")]
    InputMissing(String, ArtifactId, #[source] Refusal),
    /// A peer's answer makes no sense.
    #[error("{0}")]
    Nonsense(String),
    /// Another gateway may have been let in since this one was heard last.
    #[error("this gateway was not heard for too long")]
    NotAlone,
    /// This gateway is stopping. The process goes on.
    #[error("the gateway is stopping")]
    GatewayStopping,
}

impl Stopped {
    /// The same of a process that was not started: the workload waits if no file can be opened just now.
    fn before_start(self) -> Self {
        match self {
            Self::Worker(error) if error.is_out_of_files() => {
                let why =
                    "its gateway has as many open files as it may have; raise its hard limit of open files";
                tracing::warn!(error = chain(&error), "cannot start a workload: too many open files");
                Self::Worker(RuntimeError::Full(why.to_owned()))
            }
            other => other,
        }
    }

    /// Whether it is another gateway's now that speaks for the worker.
    fn is_superseded(&self) -> bool {
        match self {
            Self::Refused(refusal) => is_superseded(refusal),
            Self::Worker(RuntimeError::TakenOver(_)) => true,
            _ => false,
        }
    }
}

/// How long a reason may be that the artifact store keeps, in bytes.
const LONGEST_WHY: usize = 1000;

/// How often the scheduler is told of an end that it does not want to hear of, and the time in between.
const TELL: (usize, Duration) = (12, Duration::from_secs(5));

/// Pause before a process is looked at again if no file could be opened for that.
const OUT_OF_FILES: Duration = Duration::from_millis(200);
/// Pause between two looks at a process that is being started: at first, and at last.
const STARTING: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));
/// How often it is looked at with the first pause: most processes start within this time.
const STARTING_LOOKS: usize = 25;

/// Sees `work` through, which attends to the lease. One that panics ends as a failed attempt, and does not keep its slot.
pub(crate) async fn attended(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: Option<AttemptId>,
    token: String,
    work: impl Future<Output = ()>,
) {
    let _entry = Entry { worker: &worker, lease };
    let Err(panic) = AssertUnwindSafe(work).catch_unwind().await else { return };
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it did not say why");
    tracing::error!(lease.id = %lease, panic = text, "the task of an attempt panicked");
    if let Some(attempt) = attempt
        && !give_up(&worker, attempt).await
    {
        return;
    }
    let message = format!("the gateway broke off: {text}");
    let failure = Failure { reason: FailureReason::WorkerFailed, message };
    finish_attempt(&worker, lease, &token, Finish::failed(failure)).await;
}

/// A lease that a task attends to. When the task dies, the lease is forgotten, and so the scheduler told that nobody attends to it.
struct Entry<'w> {
    worker: &'w Worker,
    lease: LeaseId,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(lease.id = %self.lease, "an attempt could not be ended: its lease is forgotten");
            self.worker.attempts.remove(self.lease);
        }
    }
}

/// Ends an attempt that cannot be understood, after whatever an earlier gateway may have started of it.
pub(crate) async fn refuse(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: Option<AttemptId>,
    token: String,
    why: String,
) {
    if let Some(attempt) = attempt
        && !give_up(&worker, attempt).await
    {
        return;
    }
    let message = format!("this gateway cannot understand what it shall do: {why}");
    let failure = Failure { reason: FailureReason::Unsupported, message };
    finish_attempt(&worker, lease, &token, Finish::failed(failure)).await;
}

/// Carries an attempt out and tells the scheduler how it ended. Returns early, and tells nothing, when the gateway stops.
pub(crate) async fn run(
    context: Arc<AttemptContext>,
    task: Task,
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
        let finish = loop {
            match carry_out(&context, &task, &mut stop).await {
                Ok(finish) => break finish,
                Err(Stopped::GatewayStopping) => return,
                Err(stopped) if stopped.is_superseded() => {
                    tracing::info!(lease.id = %task.lease, error = chain(&stopped), "this attempt waits until this gateway is let in again");
                    if !let_in_again(worker).await {
                        return;
                    }
                }
                // Nothing was started: it begins again once this gateway was heard, if it still speaks for the worker then.
                Err(Stopped::NotAlone) => tokio::select! {
                    () = worker.session.wait_until_exclusive() => {}
                    () = worker.stopping.cancelled() => return,
                },
                Err(stopped) => {
                    // Whatever went wrong: the slot is free only once nothing runs.
                    if !give_up(worker, task.attempt).await {
                        return;
                    }
                    let lost = matches!(&stopped, Stopped::Refused(refusal) if refusal.is(Reason::LeaseLost));
                    // Where the lease is ending, the scheduler waits to hear that nothing runs; where it has ended, it says so.
                    let wish = stop.borrow().clone().filter(|_| lost);
                    break Finish::failed(failure(&wish.map_or(stopped, Stopped::Wished)));
                }
            }
        };
        finish_attempt(worker, task.lease, &task.token, finish).await;
    }
    .instrument(span)
    .await;
}

/// Ends an attempt that shall stop and that this gateway did not start: an earlier one may have.
pub(crate) async fn stop_unknown(
    worker: Arc<Worker>,
    lease: LeaseId,
    attempt: AttemptId,
    token: String,
    mut stop: watch::Receiver<Option<StopRequest>>,
) {
    let waited = wait(&worker, attempt, &mut stop).await;
    let finish = match waited {
        Ok(ended) => {
            let interrupted = is_interrupted(&stop, &ended).then_some(CutShort::Interrupted);
            let usage = used(&worker, attempt).await;
            Finish { usage, ..ended_finish(ended, None, interrupted) }
        }
        Err(Stopped::GatewayStopping) => return,
        Err(Stopped::Worker(RuntimeError::ProcessNotFound(_))) => {
            let reason = stop.borrow().as_ref().map_or(FailureReason::StoppedBeforeStart, |wish| wish.reason);
            Finish::failed(Failure { reason, message: "stopped before its process was started".to_owned() })
        }
        Err(stopped) => {
            // The slot is free only once nothing runs.
            if !give_up(&worker, attempt).await {
                return;
            }
            Finish::failed(failure(&stopped))
        }
    };
    finish_attempt(&worker, lease, &token, finish).await;
}

/// Waits until an attempt may be begun again at the top after a call was refused as of an old session: what runs, and what is to be said
/// of it, is that gateway's which speaks for the worker now, and that may come to be this one again. Answers whether it has.
async fn let_in_again(worker: &Worker) -> bool {
    let let_in = async {
        // The session may be an old one, and this gateway not have heard.
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
    task: &Task,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<Finish, Stopped> {
    let worker = &*context.worker;
    // Whether its process was started already does not depend on what the store says: only another gateway could start it meanwhile, and
    // the worker does not start it again.
    let asked = async { tokio::join!(inputs::prepare(context, task), worker.runtime.process(task.attempt)) };
    let (prepared, known) = tokio::select! {
        asked = asked => asked,
        wish = wished(stop) => return Err(Stopped::Wished(wish)),
        () = worker.stopping.cancelled() => return Err(Stopped::GatewayStopping),
    };
    let (plan, prepared) = prepared.map_err(Stopped::before_start)?;
    let mut since = None;
    if let Err(RuntimeError::ProcessNotFound(_)) = known {
        let made = make(context, task, &plan, &prepared).await.map_err(Stopped::before_start);
        let defaults = match made {
            Ok(defaults) => defaults,
            Err(stopped) => {
                could_not_make(worker, &prepared, &stopped).await;
                return Err(stopped);
            }
        };
        if let Some(wish) = stop.borrow_and_update().clone() {
            return Err(Stopped::Wished(wish));
        }
        announce_start(worker, task).await?;
        if !worker.session.is_exclusive() {
            return Err(Stopped::NotAlone);
        }
        worker
            .runtime
            .start(prepared.container, task.attempt, process_spec(task, defaults.environment))
            .await
            .map_err(|error| Stopped::from(error).before_start())?;
        since = Some(Instant::now());
    } else {
        known?;
    }
    let started = domain::Timestamp::now();
    let process = tracing::info_span!(target: "gantry", "process", service = "runtime-gateway");
    let ended = tokio::select! {
        ended = wait(worker, task.attempt, stop).instrument(process) => ended?,
        never = report_running(worker, task) => match never {},
        never = attendance::mind(&context.attendance, worker.runtime.as_ref(), task.attempt, (task.spec.stdin, task.spec.output)) => match never {},
    };
    let mut usage = used(worker, task.attempt).await;
    if let (Some(since), Ended::Exited { .. }) = (since, &ended) {
        usage.running.get_or_insert(since.elapsed());
        usage.bytes_in = Some(prepared.bytes_in);
    }

    let publishable = matches!(ended, Ended::Exited { stopped: false, .. });
    // What a signal ended was in the midst of something: no state for the next run.
    let keeps_caches = matches!(ended, Ended::Exited { stopped: false, exit: Exit::Code(_), .. });
    let cut_short = match ended {
        Ended::Exited { stopped: true, .. } if stop.borrow().is_none() => {
            let destroyed = worker.was_destroyed(task.attempt).await?;
            Some(if destroyed { CutShort::ContainerDestroyed } else { CutShort::ContactLost })
        }
        _ => is_interrupted(stop, &ended).then_some(CutShort::Interrupted),
    };
    let mut finish = Finish { usage, ..ended_finish(ended, Some(started), cut_short) };
    if publishable && !(plan.outputs.is_empty() && plan.caches.is_empty()) {
        worker.attempts.set_phase(task.lease, pb::LeasePhase::Publishing);
        let publishing = tracing::info_span!(target: "gantry", "publish", service = "runtime-gateway");
        let published =
            publish(context, task, &plan, &prepared, &mut finish).instrument(publishing.clone()).await;
        match published {
            Ok(()) => {}
            // How the process ended is known all the same.
            Err(Stopped::Worker(error)) => finish.fail(error.failure()),
            Err(Stopped::Refused(refusal)) if !is_superseded(&refusal) => {
                let message = format!("the artifact store does not take an output: {refusal}");
                finish.fail(Failure { reason: FailureReason::PublishFailed, message });
            }
            Err(stopped) => return Err(stopped),
        }
        if keeps_caches {
            let left = caches::publish(context, task, &plan, &prepared).instrument(publishing).await?;
            finish.caches = left.published;
            finish.notes.extend(left.notes);
        } else if !plan.caches.is_empty() {
            finish.notes.push("caches stay as they were: a signal ended the process".to_owned());
        }
    }
    if publishable {
        let sizes = finish.outputs.iter().map(|output| output.size_bytes);
        finish.usage.bytes_out = Some(sizes.fold(0, u64::saturating_add));
    }
    Ok(finish)
}

/// What a process that has ended has used. That it is not known is no failure.
async fn used(worker: &Worker, attempt: AttemptId) -> Usage {
    worker.runtime.usage(attempt).await.unwrap_or_else(|error| {
        tracing::debug!(attempt.id = %attempt, error = chain(&error), "cannot say what a process has used");
        Usage::default()
    })
}

/// Makes the volumes and the container on the worker. Answers what the image says of its processes.
async fn make(
    context: &AttemptContext,
    task: &Task,
    plan: &Plan,
    prepared: &Prepared,
) -> Result<Defaults, Stopped> {
    let AttemptContext { worker, transfers, images, .. } = context;
    let made = plan.volumes.iter().zip(&prepared.volumes).map(async |(volume, (handle, parent))| {
        let source = match *parent {
            Some((parent, digest)) => {
                let manifest = verify(transfers, parent, &task.spec.team, digest).await?;
                // Images have many links that nothing writes to.
                child(parent, &manifest, matches!(volume.mount, Some((_, false))))
            }
            None => VolumeSource::Empty,
        };
        worker.runtime.create_volume(*handle, source).await?;
        worker.usage.made_volume(*handle);
        if !volume.directories.is_empty() {
            worker.runtime.make_directories(*handle, &volume.directories).await?;
        }
        Ok::<_, Stopped>(())
    });
    // What the image says is read from its replica, which is there already.
    let image = async {
        let (PlannedImage::Artifact(index) | PlannedImage::Brought(index)) = plan.image else {
            return Ok((Root::Host, Defaults::default()));
        };
        let (volume, Some((replica, digest))) = prepared.volumes[index] else {
            return Err(Stopped::Nonsense("the image has no replica".to_owned()));
        };
        if let PlannedImage::Brought(_) = plan.image {
            return Ok((Root::Whole(volume), Defaults::default()));
        }
        let manifest = verify(transfers, replica, &task.spec.team, digest).await?;
        Ok((Root::Volume(volume), images.of(transfers, replica, manifest).await?))
    };
    // Each to its end: nothing is left half made.
    let (made, image) = tokio::join!(futures::future::join_all(made), image);
    made.into_iter().collect::<Result<(), _>>()?;
    let (root, defaults) = image?;
    let mounts = plan.volumes.iter().zip(&prepared.volumes).filter_map(|(volume, (handle, _))| {
        let (path, read_only) = volume.mount.clone()?;
        Some(Mount { volume: *handle, path, read_only })
    });
    let spec = ContainerSpec {
        team: task.spec.team.clone(),
        root,
        mounts: mounts.collect(),
        directory: task.spec.directory.clone(),
        user: task.spec.user.clone().or_else(|| defaults.user.clone()),
        limits: task.spec.limits,
        privileged: task.spec.privileged,
        network: task.spec.network,
    };
    worker.runtime.create_container(prepared.container, spec).await?;
    worker.usage.made_container(prepared.container);
    Ok(defaults)
}

/// How a child of a volume with this manifest is made, so that its container sees all of it.
fn child(parent: VolumeHandle, manifest: &transfer::Manifest, keeps_links: bool) -> VolumeSource {
    // In a layer below an overlay, such a device says that there is nothing.
    let is_whiteout = |entry: &transfer::Entry| {
        entry.kind == EntryKind::Device { kind: DeviceKind::Character, major: 0, minor: 0 }
    };
    if manifest.entries().iter().any(is_whiteout) {
        return VolumeSource::Copy { original: parent };
    }
    let targets: HashSet<&[u8]> =
        if keeps_links { manifest.entries().iter().filter_map(linked_to).collect() } else { HashSet::new() };
    if targets.is_empty() {
        return VolumeSource::CopyOnWrite { parent };
    }
    let names = manifest
        .entries()
        .iter()
        .filter(|entry| linked_to(entry).is_some() || targets.contains(&entry.path[..]))
        .map(|entry| entry.path().to_owned());
    VolumeSource::CopyOnWriteLinked { parent, names: names.collect() }
}

/// The first name of a file, of which this entry is another.
fn linked_to(entry: &transfer::Entry) -> Option<&[u8]> {
    match &entry.kind {
        EntryKind::HardLink { to } => Some(to),
        _ => None,
    }
}

/// Tells the artifact store what could not be made, so that what there is of it goes at once. If that is not heard, it goes with the attempt.
async fn could_not_make(worker: &Worker, prepared: &Prepared, stopped: &Stopped) {
    // Whoever speaks for the worker now goes on with it.
    let Some(session) = worker.session.current().filter(|_| !stopped.is_superseded()) else { return };
    let mut why = format!("it could not be made: {}", chain(stopped));
    why.truncate(why.floor_char_boundary(LONGEST_WHY));
    let request = store::FailedRequest {
        session_credential: session.credential,
        container_handle: prepared.container.to_string(),
        volume_handles: prepared.volumes.iter().map(|(handle, _)| handle.to_string()).collect(),
        why,
    };
    if let Err(status) = worker.inventory.clone().failed(request).await {
        tracing::debug!(error = %Refusal::from(status), "cannot say that something could not be made");
    }
}

/// Makes sure that a replica holds what it should. One that does not is left where it is, and the artifact store hears that it is lost.
async fn verify(
    transfers: &Transfers,
    replica: VolumeHandle,
    team: &str,
    digest: Digest,
) -> Result<Arc<transfer::Manifest>, Stopped> {
    match transfers.manifests.verify(transfers.worker.runtime.as_ref(), replica, team, digest).await {
        Ok(manifest) => Ok(manifest),
        Err(ManifestError::Damaged(replica)) => {
            transfers.worker.report_due.notify_one();
            Err(Stopped::InputDamaged(replica))
        }
        Err(ManifestError::Worker(error)) => Err(error.into()),
    }
}

/// Tells the scheduler that the process is about to start, and the store that everything for it is there. Only after both may it start.
async fn announce_start(worker: &Worker, task: &Task) -> Result<(), Stopped> {
    let session = worker.session.opened().await;
    let start = || {
        let mut workloads = worker.workloads.clone();
        let request = pb::StartAttemptRequest { lease_token: task.token.clone() };
        async move { workloads.start_attempt(request).await }
    };
    let prepared = || {
        let mut inventory = worker.inventory.clone();
        let request = store::PreparedRequest {
            session_credential: session.credential.clone(),
            attempt_id: task.attempt.to_string(),
        };
        async move { inventory.prepared(request).await }
    };
    tokio::try_join!(
        until_answered("announce the start of a process", start),
        until_answered("say that an attempt is prepared", prepared),
    )?;
    Ok(())
}

/// What a spec says of a variable goes before what its image says.
fn process_spec(task: &Task, defaults: Vec<EnvironmentVariable>) -> ProcessSpec {
    let mut environment = defaults;
    let said = |variable: &EnvironmentVariable| task.spec.environment.iter().any(|s| s.name == variable.name);
    environment.retain(|variable| !said(variable));
    environment.extend(task.spec.environment.iter().cloned());
    let traceparent =
        rpc::trace::current().or_else(|| Some(task.traceparent.clone()).filter(|t| !t.is_empty()));
    if let Some(traceparent) = traceparent
        && !environment.iter().any(|variable| variable.name == b"TRACEPARENT")
    {
        let value = traceparent.into_bytes();
        environment.push(EnvironmentVariable { name: b"TRACEPARENT".to_vec(), value });
    }
    ProcessSpec {
        command: task.spec.command.clone(),
        environment,
        stdin: task.spec.stdin,
        output: task.spec.output,
        terminal: None,
    }
}

/// Says that the attempt runs, once its command does. An attempt whose process never comes to run does not run.
async fn report_running(worker: &Worker, task: &Task) -> Infallible {
    let mut pause = STARTING.0;
    for look in 0.. {
        match worker.runtime.process(task.attempt).await {
            Ok(ProcessState::Started) => {
                worker.attempts.set_phase(task.lease, pb::LeasePhase::Running);
                return std::future::pending().await;
            }
            Ok(ProcessState::Ended(_)) => return std::future::pending().await,
            Ok(ProcessState::Starting | ProcessState::StartUnknown) | Err(_) => {
                tokio::time::sleep(pause).await;
                if look >= STARTING_LOOKS {
                    pause = (pause * 2).min(STARTING.1);
                }
            }
        }
    }
    std::future::pending().await
}

/// Waits until the process has ended, and asks it to stop when that is wished.
async fn wait(
    worker: &Worker,
    attempt: AttemptId,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<Ended, Stopped> {
    loop {
        let wish = stop.borrow_and_update().clone();
        if let Some(wish) = wish {
            match worker.runtime.stop(attempt, wish.grace).await {
                Err(error) if error.is_out_of_files() => {
                    stop.mark_changed();
                    tokio::time::sleep(OUT_OF_FILES).await;
                    continue;
                }
                stopped => stopped?,
            }
        }
        tokio::select! {
            ended = worker.runtime.wait(attempt) => match ended {
                // The process goes on, and so does the wait.
                Err(error) if error.is_out_of_files() => tokio::time::sleep(OUT_OF_FILES).await,
                ended => return Ok(ended?),
            },
            changed = stop.changed() => if changed.is_err() {
                return Err(Stopped::GatewayStopping);
            },
            () = worker.stopping.cancelled() => return Err(Stopped::GatewayStopping),
        }
    }
}

/// Resolves when the attempt shall stop.
async fn wished(stop: &mut watch::Receiver<Option<StopRequest>>) -> StopRequest {
    match stop.wait_for(Option::is_some).await.ok().and_then(|wish| wish.clone()) {
        Some(wish) => wish,
        None => std::future::pending().await,
    }
}

/// Reads the outputs, and makes them known to the artifact store as candidates of this attempt.
async fn publish(
    context: &AttemptContext,
    task: &Task,
    plan: &Plan,
    prepared: &Prepared,
    finish: &mut Finish,
) -> Result<(), Stopped> {
    let AttemptContext { worker, transfers, .. } = context;
    for output in &plan.outputs {
        let (handle, _) = prepared.volumes[output.volume];
        if let Some((scratch, directory)) = &output.taken_from {
            let from = prepared.volumes[*scratch].0;
            match worker.runtime.take_directory(from, directory, handle).await {
                Ok(()) => {}
                Err(error @ RuntimeError::OutputMissing(_)) => {
                    let message = if directory == Path::new(&output.name) {
                        format!("output {error}")
                    } else {
                        format!("output {:?}: {error}", output.name)
                    };
                    finish.fail(Failure { reason: error.reason(), message });
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let scanned = transfers.manifests.scan_all(worker.runtime.as_ref(), handle, &task.spec.team).await;
        let Scanned { manifest, left_out } = match scanned {
            Ok(scanned) => scanned,
            Err(error @ (RuntimeError::InvalidOutput(_) | RuntimeError::UnreadableOutput(_))) => {
                let message = format!("output {:?}: {error}", output.name);
                finish.fail(Failure { reason: error.reason(), message });
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        finish.notes.extend(left_out.map(|what| format!("output {:?}: left out: {what}", output.name)));
        complete(transfers, handle, &manifest).await?;
        finish.outputs.push(PublishedOutput {
            name: output.name.clone(),
            artifact: output.artifact,
            size_bytes: manifest.size_bytes(),
            digest: manifest.tree_digest(),
            entries: u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX).saturating_sub(1),
        });
    }
    Ok(())
}

/// Why a process was stopped, where that has to be said beside how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutShort {
    /// Nobody wanted that.
    ContactLost,
    /// Nor that.
    ContainerDestroyed,
    /// Its worker goes. Whether it was stopped, or was faster, decides whether it begins again.
    Interrupted,
}

/// Whether a process was stopped because its worker goes.
fn is_interrupted(stop: &watch::Receiver<Option<StopRequest>>, ended: &Ended) -> bool {
    let wished = stop.borrow().as_ref().is_some_and(|wish| wish.reason == FailureReason::Interrupted);
    wished && matches!(ended, Ended::Exited { stopped: true, .. })
}

impl CutShort {
    fn failure(self) -> Failure {
        let (reason, message) = match self {
            Self::ContactLost => (
                FailureReason::ContactLost,
                "its worker was out of contact for so long that the process was ended",
            ),
            Self::ContainerDestroyed => (
                FailureReason::ContainerNotFound,
                "its container was destroyed from outside, and the process with it",
            ),
            Self::Interrupted => (
                FailureReason::Interrupted,
                "its worker was landed or retired, and the process was stopped for that",
            ),
        };
        Failure { reason, message: message.to_owned() }
    }
}

fn ended_finish(ended: Ended, started: Option<domain::Timestamp>, cut_short: Option<CutShort>) -> Finish {
    match (ended, cut_short) {
        (Ended::Exited { exit, stopped: true }, Some(cut_short)) => {
            let failure = Some(cut_short.failure());
            Finish { exit: Some(exit), failure, started, ..Finish::default() }
        }
        (Ended::Exited { exit, .. }, _) => Finish { exit: Some(exit), started, ..Finish::default() },
        (Ended::NotStarted(failure), _) => Finish::failed(failure),
        (Ended::Unknown(failure), _) => Finish { failure: Some(failure), started, ..Finish::default() },
    }
}

/// Tells the scheduler how the attempt ended, until it has heard.
async fn finish_attempt(worker: &Worker, lease: LeaseId, token: &str, finish: Finish) {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        exit: finish.exit.map(rpc::exit),
        failure: finish.failure.as_ref().map(rpc::failure),
        outputs: finish.outputs.iter().map(rpc::published_output).collect(),
        started_at: finish.started.map(rpc::timestamp),
        caches: finish.caches.iter().map(rpc::published_cache).collect(),
        notes: finish.notes,
        usage: Some(rpc::usage(&finish.usage)),
    };
    let call = || {
        let (mut workloads, request) = (worker.workloads.clone(), request.clone());
        async move { workloads.finish_attempt(request).await }
    };
    tokio::select! {
        () = tell(lease, TELL, call) => {}
        // The next gateway finds the process ended, and tells.
        () = worker.stopping.cancelled() => return,
    }
    worker.attempts.set_phase(lease, pb::LeasePhase::Ended);
}

/// Repeats `call` until the scheduler has heard, or says that it has no use for it.
async fn tell<F>(lease: LeaseId, (times, pause): (usize, Duration), call: impl Fn() -> F)
where
    F: Future<Output = Result<tonic::Response<pb::FinishAttemptResponse>, Status>>,
{
    for _ in 0..times {
        let Err(refusal) = until_answered("end an attempt", &call).await else { return };
        if refusal.is(Reason::LeaseLost) {
            // The attempt was ended without us; what it made is garbage already.
            tracing::info!(lease.id = %lease, error = %refusal, "the end of an attempt was not wanted");
            return;
        }
        // The slot stays taken until the scheduler has heard.
        tracing::warn!(lease.id = %lease, error = %refusal, "cannot end an attempt");
        tokio::time::sleep(pause).await;
    }
    tracing::error!(lease.id = %lease, "the scheduler does not take the end of an attempt: it is left to decide by itself");
}

/// Ends whatever runs of an attempt that goes no further. Answers whether nothing of it runs; not so only when the gateway stops before
/// that is sure.
async fn give_up(worker: &Worker, attempt: AttemptId) -> bool {
    loop {
        let stopped = async {
            // What another gateway attends to is not ours to stop.
            worker.session.wait_until_exclusive().await;
            worker.runtime.stop(attempt, Duration::ZERO).await?;
            worker.runtime.wait(attempt).await
        };
        let stopped = tokio::select! {
            stopped = stopped => stopped,
            () = worker.stopping.cancelled() => return false,
        };
        match stopped {
            Ok(_) | Err(RuntimeError::ProcessNotFound(_)) => return true,
            Err(error) => tracing::warn!(attempt.id = %attempt, %error, "cannot stop a process yet"),
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn failure(stopped: &Stopped) -> Failure {
    match stopped {
        Stopped::Worker(error) => error.failure(),
        Stopped::Refused(refusal) => Failure { reason: refused(refusal), message: refusal.to_string() },
        Stopped::Wished(wish) => Failure { reason: wish.reason, message: stopped.to_string() },
        Stopped::InputMissing(_, _, refusal) => {
            let reason = if refusal.is(Reason::DiskFull) {
                FailureReason::DiskFull
            } else {
                FailureReason::InputUnavailable
            };
            Failure { reason, message: chain(stopped) }
        }
        Stopped::InputDamaged(_) => {
            Failure { reason: FailureReason::InputDamaged, message: stopped.to_string() }
        }
        Stopped::Nonsense(_) | Stopped::NotAlone | Stopped::GatewayStopping => {
            Failure { reason: FailureReason::WorkerFailed, message: stopped.to_string() }
        }
    }
}

/// What a refusal of scheduler or store means for an attempt whose process was not started.
fn refused(refusal: &Refusal) -> FailureReason {
    let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
    match reason {
        Some(Reason::InputUnavailable) => FailureReason::InputUnavailable,
        Some(Reason::DiskFull) => FailureReason::DiskFull,
        // It is over for them, and nothing of it was started.
        Some(Reason::LeaseLost | Reason::AttemptEnded) => FailureReason::StoppedBeforeStart,
        // What they say is in the message.
        _ => FailureReason::WorkerFailed,
    }
}

#[cfg(test)]
mod tests;
