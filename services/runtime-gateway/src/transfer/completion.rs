//! The start and the completion of a volume that a transfer fills.

use std::sync::Arc;

use domain::{VolumeHandle, error_chain};
use rpc::Refusal;
use runtime::{Contents, RuntimeError, VolumeSource};
use transfer::Manifest;

use super::error::WriteVolumeError;
use super::{Transfers, WriterPermit};
use crate::util::retry::{is_superseded, until_answered};

/// Makes an empty volume for a transfer. A partial volume of an earlier try is destroyed.
///
/// Errors: [`WriteVolumeError::InUse`] if the volume exists and no transfer fills it.
pub(crate) async fn make_empty(transfers: &Transfers, volume: VolumeHandle) -> Result<(), WriteVolumeError> {
    if transfers.manifests.is_filling(volume) {
        transfers.worker.runtime.destroy_volume(volume).await?;
    } else {
        match transfers.worker.runtime.contents(volume).await {
            Err(RuntimeError::VolumeNotFound(_)) => {}
            Ok(_) => return Err(WriteVolumeError::InUse(volume)),
            Err(error) => return Err(error.into()),
        }
        transfers.manifests.begin_filling(volume).await?;
    }
    Ok(transfers.worker.runtime.create_volume(volume, VolumeSource::Empty).await?)
}

/// Completes a volume: stores its manifest, and reports it to the artifact store.
pub(crate) async fn finish_volume(
    transfers: &Transfers,
    volume: VolumeHandle,
    team: &str,
    manifest: Arc<Manifest>,
    permit: WriterPermit,
) -> Result<Arc<Manifest>, WriteVolumeError> {
    // The manifest is stored first. Otherwise a volume that the store counts as complete could look
    // partial here.
    if let Err(error) =
        transfers.manifests.store(transfers.worker.runtime.as_ref(), volume, team, manifest.clone()).await
    {
        permit.discard(transfers).await;
        return Err(error.into());
    }
    transfers.manifests.end_filling(volume).await;
    if let Err(refusal) = report_complete(transfers, volume, &manifest).await {
        // The gateway with the newer session may have completed the volume.
        if !is_superseded(&refusal) {
            transfers.manifests.forget(volume).await;
            // A manifest on the worker is removed only together with its volume.
            if let Ok(Contents::Remote(_)) = transfers.worker.runtime.contents(volume).await {
                permit.discard(transfers).await;
            }
        }
        return Err(refusal.into());
    }
    Ok(manifest)
}

/// Reports to the artifact store that a volume has its final bytes. The artifact is noted with the
/// volume in the background.
pub(crate) async fn report_complete(
    transfers: &Transfers,
    volume: VolumeHandle,
    manifest: &transfer::Manifest,
) -> Result<(), Refusal> {
    let session = transfers.worker.session.opened().await;
    let (size_bytes, digest) = (manifest.size_bytes(), manifest.tree_digest());
    let store = &transfers.worker.clients.store;
    let call = || store.complete_volume(&session.credential, volume, size_bytes, digest);
    let artifact = until_answered("report that a volume is complete", call).await?;
    transfers.volumes_changed.notify_one();
    if let Some(artifact) = artifact {
        let runtime = transfers.worker.runtime.clone();
        transfers.worker.tasks.spawn(async move {
            if let Err(error) = runtime.note_artifact(volume, artifact).await {
                tracing::debug!(volume.handle = %volume, error = error_chain(&error), "cannot note the artifact of a volume");
            }
        });
    }
    Ok(())
}
