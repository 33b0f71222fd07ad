//! The inputs of an attempt: their rows in the artifact store, and copies of those that are not on
//! the worker.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use domain::workload::Image;
use domain::{ArtifactId, ContainerHandle, Digest, VolumeHandle};
use rpc::{Reason, Refusal};
use runtime::{RuntimeError, WorkerProvided};

use super::context::AttemptContext;
use super::error::{AttemptError, may_succeed_elsewhere};
use super::spec_plan::{Plan, PlannedVolume, WorkerImports};
use crate::clients::scheduler_messages::{AttemptTask, InputProgress};
use crate::clients::store::PrepareAttempt;
use crate::clients::streamer::{CopyEvent, CopyProgress};
use crate::util::keyed_locks::lock;
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::base_types::BaseTypeImports;

/// Time without progress after which the attempt continues on another worker, because the gateway
/// of a source or of this worker cannot be reached. Gateways may restart meanwhile.
const SOURCE_RETRY_TIME: Duration = Duration::from_secs(60);
/// Time for which the pull of an image is tried again.
const PULL_RETRY_TIME: Duration = Duration::from_secs(120);
/// Time without progress after which a cache starts empty.
const CACHE_RETRY_TIME: Duration = Duration::from_secs(15);
/// First and longest pause between two attempts to pull an image.
const FIRST_PULL_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PULL_PAUSE: Duration = Duration::from_secs(5);
/// Feature of a runtime whose outputs need not be mounts.
const REPLACEABLE_OUTPUTS: &str = "replaceable-outputs";
/// Most rounds of copying inputs. Another round is necessary if a copied input is lost before it is
/// used.
const MAX_ROUNDS: usize = 8;

/// The handles of the container and the volumes of an attempt.
pub(crate) struct AttemptHandles {
    pub(crate) container: ContainerHandle,
    /// Volumes in the order of the plan, each with its parent and the digest of the parent's tree.
    pub(crate) volumes: Vec<(VolumeHandle, Option<(VolumeHandle, Digest)>)>,
    /// Bytes that were copied to the worker.
    pub(super) bytes_in: u64,
}

/// An artifact that is not on the worker.
pub(crate) struct MissingArtifact {
    artifact: ArtifactId,
    /// Name of the input in the spec.
    name: String,
    /// Whether only a cache starts with this artifact.
    is_cache: bool,
}

/// Receives the progress of the inputs that are copied, and `None` when all of them have arrived.
pub(crate) type Report<'r> = &'r (dyn Fn(Option<Vec<InputProgress>>) + Sync);

/// Whether the outputs of containers on the worker need not be mounts.
pub(crate) fn are_outputs_replaceable(worker: &Worker) -> bool {
    worker.runtime.capabilities().features.iter().any(|feature| feature == REPLACEABLE_OUTPUTS)
}

/// Returns the plan of an attempt and its handles, once all inputs are on the worker. Caches that
/// cannot be copied start empty.
pub(crate) async fn prepare(
    context: &AttemptContext,
    task: &AttemptTask,
    report: Report<'_>,
) -> Result<(Plan, AttemptHandles), AttemptError> {
    let AttemptContext { worker, imports, .. } = context;
    let mut unreachable = BTreeSet::new();
    let mut bytes_in = 0_u64;
    let pulled = pull_image(worker, task, report).await?;
    for _ in 0..MAX_ROUNDS {
        let unreachable_caches: Vec<_> = unreachable.iter().copied().collect();
        let mut provided = base_types(worker, imports, task).await?;
        provided.image = provided.image.or(pulled);
        let plan = Plan::new(&task.spec, task.namespace(), are_outputs_replaceable(worker), &provided);
        let (prepared, missing) =
            match request_volumes(worker, task, &plan.volumes, &unreachable_caches).await {
                Ok(answer) => answer,
                // The worker-provided image or the certificates have changed since the import.
                Err(AttemptError::Refused(refusal)) if is_about_base_type(imports, &provided, &refusal) => {
                    continue;
                }
                Err(stopped) => return Err(stopped),
            };
        if missing.is_empty() {
            return Ok((plan, AttemptHandles { bytes_in, ..prepared }));
        }
        // A worker-provided artifact is only on this worker, so it must be imported again instead
        // of copied.
        let (lost, missing): (Vec<_>, Vec<_>) =
            missing.into_iter().partition(|missing| is_base_type(imports, &provided, missing.artifact));
        if lost.is_empty() {
            let (unreachable_caches, bytes) = copy_missing(worker, task, missing, report).await?;
            unreachable.extend(unreachable_caches);
            bytes_in = bytes_in.saturating_add(bytes);
        }
    }
    Err(AttemptError::InvalidAnswer(
        "cannot prepare the inputs: the artifact store reports a missing input again after each copy"
            .to_owned(),
    ))
}

/// Has the image of a reference pulled, and returns its artifact. `None`: the spec names no
/// reference.
async fn pull_image(
    worker: &Worker,
    task: &AttemptTask,
    report: Report<'_>,
) -> Result<Option<ArtifactId>, AttemptError> {
    let Image::Reference(reference) = &task.spec.image else { return Ok(None) };
    let name = image_name(task);
    let progress = |bytes_done, bytes_total, waits_for: &str| {
        let (name, waits_for) = (name.clone(), waits_for.to_owned());
        report(Some(vec![InputProgress { name, bytes_done, bytes_total, waits_for, relayed: false }]));
    };
    let mut pause = FIRST_PULL_PAUSE;
    let mut failing_since = None;
    loop {
        let streamer = &worker.clients.streamer;
        let pull = streamer.pull(&task.spec.team, reference, task.workload, |done, total| {
            progress(done, total, "");
        });
        let refusal = match pull.await {
            Ok(artifact) => {
                report(None);
                return Ok(Some(artifact));
            }
            Err(refusal) => refusal,
        };
        let may_return = refusal.is(Reason::RegistryUnavailable) || refusal.is(Reason::AllWorkersBusy);
        if may_return || !refusal.is_transient() {
            let since = *failing_since.get_or_insert_with(Instant::now);
            if !may_return || since.elapsed() > PULL_RETRY_TIME {
                return Err(AttemptError::ImageUnavailable(reference.clone(), refusal));
            }
        }
        progress(0, 0, &refusal.message);
        tracing::info!(image = reference, error = %refusal, "cannot pull an image: trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PULL_PAUSE);
    }
}

/// Whether the store rejected a worker-provided artifact, which must be checked again.
fn is_about_base_type(imports: &BaseTypeImports, provided: &WorkerImports, refusal: &Refusal) -> bool {
    let artifact = refusal.about.get("artifact_id").and_then(|id| id.parse().ok());
    refusal.is(Reason::InputUnavailable)
        && artifact.is_some_and(|artifact| is_base_type(imports, provided, artifact))
}

/// Whether a missing artifact is worker-provided. A new import is requested, unless there was one
/// since.
fn is_base_type(imports: &BaseTypeImports, provided: &WorkerImports, artifact: ArtifactId) -> bool {
    imports.forget(artifact) || [provided.image, provided.certs].contains(&Some(artifact))
}

/// Returns the worker-provided artifacts for the container of an attempt. Waits for their imports,
/// unless the container already exists.
async fn base_types(
    worker: &Worker,
    imports: &BaseTypeImports,
    task: &AttemptTask,
) -> Result<WorkerImports, AttemptError> {
    let brings = |base_type: &WorkerProvided| {
        worker.runtime.capabilities().worker_provided.iter().any(|item| item.what == *base_type)
    };
    let image = match &task.spec.image {
        Image::ResourceType(name) => Some(WorkerProvided::ResourceType(name.clone())),
        Image::Host | Image::Artifact(_) | Image::Reference(_) => None,
    };
    if let Some(base_type) = image.as_ref().filter(|base_type| !brings(base_type)) {
        let message = format!("this worker does not provide {base_type:?}");
        return Err(RuntimeError::Unsupported(message).into());
    }
    let certs = Some(WorkerProvided::Certs).filter(brings);
    let is_imported = |base_type: &Option<WorkerProvided>| {
        base_type.as_ref().is_none_or(|base_type| imports.artifact_of(base_type).is_some())
    };
    let is_there = is_imported(&image) && is_imported(&certs)
        || !matches!(
            worker.runtime.process(task.attempt.into()).await,
            Err(RuntimeError::ProcessNotFound(_))
        );
    let artifact = async |base_type: Option<WorkerProvided>| match base_type {
        Some(base_type) if is_there => Ok(imports.artifact_of(&base_type)),
        Some(base_type) => imports.wait_until_imported(&base_type).await.map(Some),
        None => Ok(None),
    };
    let (image, certs) = tokio::join!(artifact(image), artifact(certs));
    let image = image.map_err(|why| {
        let message = format!("cannot import the worker-provided image: {why}");
        AttemptError::Worker(RuntimeError::Other(message))
    })?;
    let certs = certs.unwrap_or_else(|why| {
        tracing::warn!(attempt.id = %task.attempt, why, "cannot import the certificates of the worker: the container starts without them");
        None
    });
    Ok(WorkerImports { image, certs })
}

/// Requests handles for the volumes in `planned`. Returns also the artifacts that are not on the
/// worker. Caches do not start with artifacts in `unreachable`.
pub(crate) async fn request_volumes(
    worker: &Worker,
    task: &AttemptTask,
    planned: &[PlannedVolume],
    unreachable: &[ArtifactId],
) -> Result<(AttemptHandles, Vec<MissingArtifact>), AttemptError> {
    let session = worker.session.opened().await;
    let request = PrepareAttempt {
        workload: task.workload,
        attempt: task.attempt,
        team: task.spec.team.clone(),
        volumes: planned.iter().map(PlannedVolume::request).collect(),
        unreachable: unreachable.to_vec(),
    };
    let store = &worker.clients.store;
    let call = || store.prepare(&session.credential, &request);
    let answer = until_answered("prepare an attempt", call).await?;

    let mut missing: Vec<MissingArtifact> = Vec::new();
    for (volume, planned) in answer.volumes.iter().zip(planned) {
        let Some(artifact) = volume.missing else { continue };
        let is_cache = planned.from_cache.is_some();
        match missing.iter_mut().find(|entry| entry.artifact == artifact) {
            Some(entry) => entry.is_cache &= is_cache,
            None => missing.push(MissingArtifact {
                artifact,
                name: input_name(task, artifact, planned),
                is_cache,
            }),
        }
    }
    let volumes = answer.volumes.into_iter().map(|volume| (volume.handle, volume.parent));
    let prepared = AttemptHandles { container: answer.container, volumes: volumes.collect(), bytes_in: 0 };
    Ok((prepared, missing))
}

/// Copies artifacts to the worker concurrently, and reports the progress. Returns the caches that
/// cannot be copied, and the number of copied bytes.
async fn copy_missing(
    worker: &Worker,
    task: &AttemptTask,
    missing: Vec<MissingArtifact>,
    report: Report<'_>,
) -> Result<(Vec<ArtifactId>, u64), AttemptError> {
    let unknown = missing.iter().map(|missing| (missing.name.clone(), InputProgress::default()));
    let progress: Mutex<BTreeMap<String, InputProgress>> = Mutex::new(unknown.collect());
    let report_event = |name: &str, event: InputEvent<'_>| {
        let mut progress = lock(&progress);
        if let Some(input) = progress.get_mut(name) {
            apply_event(input, event);
        }
        let inputs =
            progress.iter().map(|(name, input)| InputProgress { name: name.clone(), ..input.clone() });
        report(Some(inputs.collect()));
    };
    let copies = missing.iter().map(async |MissingArtifact { artifact, name, is_cache }| {
        let patience = if *is_cache { CACHE_RETRY_TIME } else { SOURCE_RETRY_TIME };
        match materialize(worker, task, *artifact, patience, |event| report_event(name, event)).await {
            Ok(bytes) => Ok((None, bytes)),
            Err(refusal) if *is_cache => {
                let error = refusal.to_string();
                tracing::warn!(artifact.id = %artifact, error, "cannot copy a task cache: it starts empty");
                Ok((Some(*artifact), 0))
            }
            Err(refusal) => Err(AttemptError::InputMissing(name.clone(), *artifact, refusal)),
        }
    });
    let (unreachable, bytes): (Vec<_>, Vec<u64>) =
        futures::future::try_join_all(copies).await?.into_iter().unzip();
    report(None);
    Ok((unreachable.into_iter().flatten().collect(), bytes.into_iter().fold(0, u64::saturating_add)))
}

/// An event of the copy of an input.
#[derive(Debug, Clone, Copy)]
enum InputEvent<'n> {
    Progress(CopyProgress),
    /// The copy waits, for this reason.
    Waiting(&'n str),
}

/// Applies an event to the progress of an input. The wait ends when there are more bytes than
/// before. Each try starts with the bytes that already exist.
fn apply_event(input: &mut InputProgress, event: InputEvent<'_>) {
    match event {
        InputEvent::Waiting(why) => why.clone_into(&mut input.waits_for),
        InputEvent::Progress(CopyProgress { done, .. })
            if !input.waits_for.is_empty() && done <= input.bytes_done => {}
        InputEvent::Progress(CopyProgress { done, total, relayed }) => {
            (input.bytes_done, input.bytes_total, input.relayed) = (done, total, relayed);
            input.waits_for.clear();
        }
    }
}

/// Returns the name of an artifact in the spec.
fn input_name(task: &AttemptTask, artifact: ArtifactId, volume: &PlannedVolume) -> String {
    let cache = task.spec.caches.iter().find(|mount| Some(mount.cache) == volume.from_cache);
    let input = task.spec.inputs.iter().find(|input| input.artifact == artifact);
    match (cache, input) {
        (Some(cache), _) => cache.name(),
        (None, Some(input)) => input.name.clone(),
        (None, None) => image_name(task),
    }
}

/// Returns the name of the image in the progress of inputs.
fn image_name(task: &AttemptTask) -> String {
    match task.service.and_then(|index| task.spec.services.get(index)) {
        Some(service) => format!("image of service {}", service.name),
        None => "image".to_owned(),
    }
}

/// Copies one artifact to the worker, and returns the number of copied bytes. If gateways cannot be
/// reached, it gives up after `patience` without progress.
async fn materialize(
    worker: &Worker,
    task: &AttemptTask,
    artifact: ArtifactId,
    patience: Duration,
    report: impl Fn(InputEvent<'_>),
) -> Result<u64, Refusal> {
    let first_pause = Duration::from_millis(20);
    let (mut pause, mut failing_since) = (first_pause, None);
    let (most_done, has_progressed) = (AtomicU64::new(0), AtomicBool::new(false));
    let watched = |event: InputEvent<'_>| {
        if let InputEvent::Progress(CopyProgress { done, .. }) = event
            && done > most_done.fetch_max(done, Ordering::Relaxed)
        {
            has_progressed.store(true, Ordering::Relaxed);
        }
        report(event);
    };
    loop {
        let refusal = match materialize_once(worker, task, artifact, &watched).await {
            Ok(bytes) => return Ok(bytes),
            Err(refusal) => refusal,
        };
        if has_progressed.swap(false, Ordering::Relaxed) {
            (pause, failing_since) = (first_pause, None);
        }
        if may_succeed_elsewhere(&refusal) {
            let since = *failing_since.get_or_insert_with(Instant::now);
            if since.elapsed() > patience {
                return Err(refusal);
            }
        } else if !refusal.is_transient() {
            return Err(refusal);
        }
        report(InputEvent::Waiting(&refusal.message));
        tracing::info!(artifact.id = %artifact, error = %refusal, "cannot copy an input: trying again");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(2));
    }
}

async fn materialize_once(
    worker: &Worker,
    task: &AttemptTask,
    artifact: ArtifactId,
    report: impl Fn(InputEvent<'_>),
) -> Result<u64, Refusal> {
    let session = worker.session.opened().await;
    let streamer = &worker.clients.streamer;
    let mut copy = streamer.materialize(&task.spec.team, artifact, session.worker, &task.token).await?;
    loop {
        match copy.next().await? {
            CopyEvent::Progress(progress) => report(InputEvent::Progress(progress)),
            CopyEvent::Done(moved) => return Ok(moved),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
