//! Making the volumes and the container of an attempt on the worker, and replacing the replicas
//! that turn out to be missing or damaged.

use std::collections::HashSet;
use std::sync::Arc;

use domain::workload::EnvironmentVariable;
use domain::{ContainerHandle, Digest, VolumeHandle, error_chain};
use rpc::Refusal;
use runtime::{ContainerSpec, Mount, Root, RuntimeError, VolumeSource};
use tokio::sync::watch;
use transfer::{DeviceKind, EntryKind};

use super::context::AttemptContext;
use super::error::AttemptError;
use super::image::ProcessDefaults;
use super::inputs::{self, AttemptHandles, Report};
use super::process::stop_requested;
use super::spec_plan::{Plan, PlannedImage};
use crate::clients::scheduler_messages::AttemptTask;
use crate::transfer::Transfers;
use crate::transfer::error::{ManifestError, ReplicaLoss};
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::attempts::StopRequest;
use crate::worker::containers::KnownContainer;

/// Most times that the inputs of an attempt are made again because replicas are missing or damaged.
const MAX_REPLACEMENTS: u32 = 5;
/// Most bytes of a failure's cause that the artifact store keeps.
const MAX_CAUSE_BYTES: usize = 1000;

/// An attempt whose container is made.
pub(crate) struct MadeAttempt {
    pub(crate) plan: Plan,
    pub(crate) prepared: AttemptHandles,
    /// Defaults of the image.
    pub(crate) defaults: ProcessDefaults,
}

/// Makes the volumes and the container on the worker. The container joins the network of
/// `network_of`.
///
/// Replicas that turn out to be missing or damaged are reported to the artifact store. Then the
/// inputs are prepared again, so that other replicas are copied here. A failure is reported, too.
pub(crate) async fn make(
    context: &AttemptContext,
    task: &AttemptTask,
    network_of: Option<ContainerHandle>,
    (mut plan, mut prepared): (Plan, AttemptHandles),
    report_inputs: Report<'_>,
    stop: &mut watch::Receiver<Option<StopRequest>>,
) -> Result<MadeAttempt, AttemptError> {
    let worker = &*context.worker;
    let mut bytes_in = 0_u64;
    let mut all_losses = Vec::new();
    let mut replacements = 0;
    loop {
        let mut losses = Vec::new();
        let error = match try_make(context, task, network_of, &plan, &prepared, &mut losses).await {
            Ok(defaults) => {
                prepared.bytes_in = prepared.bytes_in.saturating_add(bytes_in);
                return Ok(MadeAttempt { plan, prepared, defaults });
            }
            Err(error) => error,
        };
        if losses.is_empty() || replacements == MAX_REPLACEMENTS {
            if let Err(refusal) = report_failed_container(worker, &prepared, &error).await {
                tracing::debug!(error = %refusal, "cannot report a container that cannot be made");
            }
            return Err(error);
        }
        replacements += 1;
        bytes_in = bytes_in.saturating_add(prepared.bytes_in);
        let replace = async {
            context.transfers.report_losses(&losses).await?;
            // Volumes that were made from lost replicas must not be used, so all get new handles.
            let report = || report_failed_container(worker, &prepared, &error);
            until_answered("report a container that cannot be made", report).await?;
            inputs::prepare(context, task, report_inputs).await
        };
        let replaced = tokio::select! {
            replaced = replace => replaced,
            request = stop_requested(stop) => return Err(AttemptError::StopRequested(request)),
            () = worker.stopping.cancelled() => return Err(AttemptError::GatewayStopping),
        };
        all_losses.extend(losses);
        (plan, prepared) = match replaced {
            Ok(replaced) => replaced,
            Err(error @ (AttemptError::InputMissing(..) | AttemptError::ImageUnavailable(..))) => {
                return Err(AttemptError::NotReplaced(all_losses, Box::new(error)));
            }
            Err(error) => return Err(error),
        };
    }
}

/// Makes the volumes and the container. Adds replicas that are missing or damaged to `losses`.
async fn try_make(
    context: &AttemptContext,
    task: &AttemptTask,
    network_of: Option<ContainerHandle>,
    plan: &Plan,
    prepared: &AttemptHandles,
    losses: &mut Vec<ReplicaLoss>,
) -> Result<ProcessDefaults, AttemptError> {
    let AttemptContext { worker, transfers, images, .. } = context;
    let made = plan.volumes.iter().zip(&prepared.volumes).map(async |(volume, (handle, parent))| {
        let source = match *parent {
            Some((parent, digest)) => {
                let manifest = verify(transfers, parent, &task.spec.team, digest).await?;
                // The links of images are not kept, because nothing writes to them.
                child_source(parent, &manifest, matches!(volume.mount, Some((_, false))))
            }
            None => VolumeSource::Empty,
        };
        let created = worker.runtime.create_volume(*handle, source).await;
        created.map_err(|error| of_replica(error.into(), parent.map(|(parent, _)| parent)))?;
        worker.usage.add_volume(*handle);
        if !volume.directories.is_empty() {
            worker.runtime.make_directories(*handle, &volume.directories).await?;
        }
        Ok::<_, AttemptError>(())
    });
    // The metadata is read from the replica of the image, which already exists.
    let image = async {
        let (PlannedImage::Artifact(index) | PlannedImage::WorkerProvided(index)) = plan.image else {
            return Ok((Root::Host, ProcessDefaults::default()));
        };
        let (volume, Some((replica, digest))) = prepared.volumes[index] else {
            return Err(AttemptError::InvalidAnswer(
                "cannot make the container: its image has no replica".to_owned(),
            ));
        };
        if let PlannedImage::WorkerProvided(_) = plan.image {
            return Ok((Root::WholeVolume(volume), ProcessDefaults::default()));
        }
        let manifest = verify(transfers, replica, &task.spec.team, digest).await?;
        let loaded = images.load(transfers, replica, manifest).await;
        Ok((Root::Volume(volume), loaded.map_err(|error| of_replica(error.into(), Some(replica)))?))
    };
    // All of them run to their end, so that nothing is half made.
    let (made, image) = tokio::join!(futures::future::join_all(made), image);
    for error in made.iter().filter_map(|made| made.as_ref().err()).chain(image.as_ref().err()) {
        if let AttemptError::InputDamaged(loss) = error
            && !losses.iter().any(|known| known.volume == loss.volume)
        {
            losses.push(loss.clone());
        }
    }
    made.into_iter().collect::<Result<(), _>>()?;
    let (root, defaults) = image?;
    let mounts = plan.volumes.iter().zip(&prepared.volumes).filter_map(|(volume, (handle, _))| {
        let (path, read_only) = volume.mount.clone()?;
        Some(Mount { volume: *handle, path, read_only })
    });
    let known = KnownContainer::of(task, prepared.container);
    let spec = ContainerSpec {
        team: task.spec.team.clone(),
        root,
        mounts: mounts.collect(),
        environment: environment(defaults.environment.clone(), &task.spec.environment),
        directory: defaults.directory_of(&task.spec),
        user: task.spec.user.clone().or_else(|| defaults.user.clone()),
        limits: task.spec.limits,
        privileged: task.spec.privileged,
        network_of,
        network: task.spec.network,
        local_names: task.spec.services.iter().map(|service| service.name.clone()).collect(),
        stop_signal: defaults.stop_signal,
        note: known.note_text(),
    };
    worker.runtime.create_container(prepared.container, spec).await?;
    worker.usage.add_container(prepared.container);
    worker.index.add(known).await;
    Ok(defaults)
}

/// Merges the variables of the image and those of the workload, which take precedence.
fn environment(
    image: Vec<EnvironmentVariable>,
    workload: &[EnvironmentVariable],
) -> Vec<EnvironmentVariable> {
    let mut merged = image;
    merged.retain(|variable| !workload.iter().any(|other| other.name == variable.name));
    merged.extend(workload.iter().cloned());
    merged
}

/// Returns how to make a child of a volume with this manifest, so that its container sees all of
/// it.
fn child_source(parent: VolumeHandle, manifest: &transfer::Manifest, keeps_links: bool) -> VolumeSource {
    // In the lower layer of an overlay, this device hides a file.
    let is_whiteout = |entry: &transfer::Entry| {
        entry.kind == EntryKind::Device { kind: DeviceKind::Character, major: 0, minor: 0 }
    };
    if manifest.entries().iter().any(is_whiteout) {
        return VolumeSource::Copy { original: parent };
    }
    let targets: HashSet<&[u8]> = if keeps_links {
        manifest.entries().iter().filter_map(link_target).collect()
    } else {
        HashSet::new()
    };
    if targets.is_empty() {
        return VolumeSource::CopyOnWrite { parent };
    }
    let names = manifest
        .entries()
        .iter()
        .filter(|entry| link_target(entry).is_some() || targets.contains(&entry.path[..]))
        .map(|entry| entry.path().to_owned());
    VolumeSource::CopyOnWriteLinked { parent, names: names.collect() }
}

/// Returns the target of a hard link.
fn link_target(entry: &transfer::Entry) -> Option<&[u8]> {
    match &entry.kind {
        EntryKind::HardLink { to } => Some(to),
        _ => None,
    }
}

/// Reports to the artifact store what cannot be made, so that it is collected at once. If the
/// report is lost, it is collected with the attempt.
async fn report_failed_container(
    worker: &Worker,
    prepared: &AttemptHandles,
    stopped: &AttemptError,
) -> Result<(), Refusal> {
    // The gateway with the new session continues the attempt.
    let Some(session) = worker.session.current().filter(|_| !stopped.is_superseded()) else { return Ok(()) };
    let mut cause = format!("cannot make the container or its volumes: {}", error_chain(stopped));
    cause.truncate(cause.floor_char_boundary(MAX_CAUSE_BYTES));
    let volumes: Vec<_> = prepared.volumes.iter().map(|(handle, _)| *handle).collect();
    worker.clients.store.mark_failed(&session.credential, prepared.container, &volumes, cause).await
}

/// Verifies the contents of a replica. It may be missing or damaged.
pub(super) async fn verify(
    transfers: &Transfers,
    replica: VolumeHandle,
    team: &str,
    digest: Digest,
) -> Result<Arc<transfer::Manifest>, AttemptError> {
    match transfers.manifests.verify(transfers.worker.runtime.as_ref(), replica, team, digest).await {
        Ok(manifest) => Ok(manifest),
        Err(ManifestError::Damaged(loss)) => Err(AttemptError::InputDamaged(loss)),
        Err(ManifestError::Worker(error)) => Err(of_replica(error.into(), Some(replica))),
    }
}

/// Names the replica that an operation cannot use because it or a volume below it is missing.
fn of_replica(error: AttemptError, replica: Option<VolumeHandle>) -> AttemptError {
    match (error, replica) {
        (AttemptError::Worker(RuntimeError::VolumeNotFound(missing)), Some(volume)) => {
            AttemptError::InputDamaged(match missing == volume {
                true => ReplicaLoss::missing(volume),
                false => ReplicaLoss::damaged(volume, &format!("volume {missing} below it is missing")),
            })
        }
        (error, _) => error,
    }
}
