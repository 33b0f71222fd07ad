//! The volumes and the container of an attempt, as they are made on the worker.

use std::collections::HashSet;
use std::sync::Arc;

use domain::{Digest, VolumeHandle, error_chain};
use runtime::{ContainerSpec, Mount, Root, VolumeSource};
use transfer::{DeviceKind, EntryKind};

use super::context::AttemptContext;
use super::error::AttemptError;
use super::image::Defaults;
use super::inputs::Prepared;
use super::spec_plan::{Plan, PlannedImage};
use crate::clients::scheduler_messages::AttemptTask;
use crate::transfer::Transfers;
use crate::transfer::error::ManifestError;
use crate::worker::Worker;

/// How long a reason may be that the artifact store keeps, in bytes.
const LONGEST_WHY: usize = 1000;

/// Makes the volumes and the container on the worker. Answers what the image says of its processes.
pub(super) async fn make(
    context: &AttemptContext,
    task: &AttemptTask,
    plan: &Plan,
    prepared: &Prepared,
) -> Result<Defaults, AttemptError> {
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
        Ok::<_, AttemptError>(())
    });
    // What the image says is read from its replica, which is there already.
    let image = async {
        let (PlannedImage::Artifact(index) | PlannedImage::WorkerProvided(index)) = plan.image else {
            return Ok((Root::Host, Defaults::default()));
        };
        let (volume, Some((replica, digest))) = prepared.volumes[index] else {
            return Err(AttemptError::Nonsense("the image has no replica".to_owned()));
        };
        if let PlannedImage::WorkerProvided(_) = plan.image {
            return Ok((Root::WholeVolume(volume), Defaults::default()));
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
pub(super) async fn could_not_make(worker: &Worker, prepared: &Prepared, stopped: &AttemptError) {
    // Whoever speaks for the worker now goes on with it.
    let Some(session) = worker.session.current().filter(|_| !stopped.is_superseded()) else { return };
    let mut why = format!("it could not be made: {}", error_chain(stopped));
    why.truncate(why.floor_char_boundary(LONGEST_WHY));
    let volumes: Vec<_> = prepared.volumes.iter().map(|(handle, _)| *handle).collect();
    let call = worker.clients.store.mark_failed(&session.credential, prepared.container, &volumes, why);
    if let Err(refusal) = call.await {
        tracing::debug!(error = %refusal, "cannot say that something could not be made");
    }
}

/// Makes sure that a replica holds what it should. One that does not is left where it is, and the artifact store hears that it is lost.
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
