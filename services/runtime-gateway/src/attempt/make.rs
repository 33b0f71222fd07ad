//! Making the volumes and the container of an attempt on the worker.

use std::collections::HashSet;
use std::sync::Arc;

use domain::workload::EnvironmentVariable;
use domain::{ContainerHandle, Digest, VolumeHandle, error_chain};
use runtime::{ContainerSpec, Mount, Root, VolumeSource};
use transfer::{DeviceKind, EntryKind};

use super::context::AttemptContext;
use super::error::AttemptError;
use super::image::ProcessDefaults;
use super::inputs::AttemptHandles;
use super::spec_plan::{Plan, PlannedImage};
use crate::clients::scheduler_messages::AttemptTask;
use crate::transfer::Transfers;
use crate::transfer::error::ManifestError;
use crate::worker::Worker;
use crate::worker::containers::KnownContainer;

/// Most bytes of a failure's cause that the artifact store keeps.
const MAX_CAUSE_BYTES: usize = 1000;

/// Makes the volumes and the container on the worker. The container joins the network of
/// `network_of`. Returns the defaults of its image.
pub(crate) async fn make(
    context: &AttemptContext,
    task: &AttemptTask,
    network_of: Option<ContainerHandle>,
    plan: &Plan,
    prepared: &AttemptHandles,
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
        worker.runtime.create_volume(*handle, source).await?;
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
        Ok((Root::Volume(volume), images.load(transfers, replica, manifest).await?))
    };
    // All of them run to their end, so that nothing is half made.
    let (made, image) = tokio::join!(futures::future::join_all(made), image);
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
pub(crate) async fn report_failed_container(
    worker: &Worker,
    prepared: &AttemptHandles,
    stopped: &AttemptError,
) {
    // The gateway with the new session continues the attempt.
    let Some(session) = worker.session.current().filter(|_| !stopped.is_superseded()) else { return };
    let mut cause = format!("cannot make the container or its volumes: {}", error_chain(stopped));
    cause.truncate(cause.floor_char_boundary(MAX_CAUSE_BYTES));
    let volumes: Vec<_> = prepared.volumes.iter().map(|(handle, _)| *handle).collect();
    let call = worker.clients.store.mark_failed(&session.credential, prepared.container, &volumes, cause);
    if let Err(refusal) = call.await {
        tracing::debug!(error = %refusal, "cannot report a container that cannot be made");
    }
}

/// Verifies the contents of a replica. A damaged replica is kept, and reported to the artifact
/// store as lost.
pub(super) async fn verify(
    transfers: &Transfers,
    replica: VolumeHandle,
    team: &str,
    digest: Digest,
) -> Result<Arc<transfer::Manifest>, AttemptError> {
    match transfers.manifests.verify(transfers.worker.runtime.as_ref(), replica, team, digest).await {
        Ok(manifest) => Ok(manifest),
        Err(ManifestError::Damaged(replica)) => {
            transfers.worker.report_due.notify_one();
            Err(AttemptError::InputDamaged(replica))
        }
        Err(ManifestError::Worker(error)) => Err(error.into()),
    }
}
