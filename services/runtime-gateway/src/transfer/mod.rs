//! Transfers of bytes to and from the volumes of a worker.
//!
//! [`mod@write`] fills a volume and [`read`] reads one. [`pull`] fills a volume from other
//! gateways, and [`archives`] transfers tar archives. [`manifests`] stores the manifest of each
//! complete volume.
//!
//! Callers are the handlers of `Volumes`, and attempts, which verify inputs and publish outputs.

pub(crate) mod archives;
mod blocking_pipe;
pub(crate) mod completion;
pub(crate) mod disk_reservations;
pub(crate) mod error;
mod growing;
mod local_dir;
mod manifest_file;
pub(crate) mod manifests;
pub(crate) mod peer_copy;
pub(crate) mod pull;
pub(crate) mod read;
mod remote;
mod room;
pub(crate) mod scan;
pub(crate) mod scrub;
mod verify;
pub(crate) mod write;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex};

use domain::worker::TicketClaims;
use domain::{VolumeHandle, error_chain};
use rpc::Refusal;
use runtime::{Contents, RuntimeError};
use tokio::sync::Notify;
use transfer::Manifest;

use crate::util::keyed_locks::lock;
use crate::util::retry::until_answered;
use crate::worker::Worker;
use disk_reservations::DiskReservations;
use error::{ManifestError, ReadVolumeError, ReplicaLoss};
use growing::GrowingVolume;
use manifests::Manifests;

/// The volumes of one worker, for transfers.
pub(crate) struct Transfers {
    pub(crate) worker: Arc<Worker>,
    pub(crate) manifests: Manifests,
    /// Volumes that are being filled. Each has one writer.
    filling: Filling,
    /// Disk space that transfers have reserved.
    reservations: DiskReservations,
    /// Lost volumes that are being reported in the background.
    announcing: Arc<Mutex<HashSet<VolumeHandle>>>,
    /// Notified when a volume was completed or destroyed.
    pub(crate) volumes_changed: Notify,
    /// Held while a volume is hashed for a reader.
    verifying: tokio::sync::Mutex<()>,
}

impl Transfers {
    /// Opens the transfers of a worker. `boot` is the boot id of the machine.
    ///
    /// # Errors
    ///
    /// The directory of manifests cannot be read.
    pub(crate) fn open(worker: Arc<Worker>, boot: String) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            manifests: Manifests::open(&worker.config.manifest_dir, boot)?,
            filling: Arc::default(),
            reservations: DiskReservations::default(),
            announcing: Arc::default(),
            volumes_changed: Notify::default(),
            verifying: tokio::sync::Mutex::default(),
            worker,
        }))
    }

    /// Returns a volume that is being filled, if its manifest is known.
    pub(crate) fn find_growing(&self, volume: VolumeHandle) -> Option<GrowingVolume> {
        lock(&self.filling).get(&volume).cloned().flatten()
    }

    /// Returns the manifest of a complete volume that certainly holds its tree.
    pub(crate) async fn manifest(&self, ticket: &TicketClaims) -> Result<Arc<Manifest>, ManifestError> {
        let verified =
            self.manifests.load_verified(self.worker.runtime.as_ref(), ticket.volume, &ticket.team).await;
        match &verified {
            Err(ManifestError::Damaged(loss)) => self.announce_loss(loss.clone()),
            Err(ManifestError::Worker(RuntimeError::VolumeNotFound(volume))) if *volume == ticket.volume => {
                self.announce_loss(ReplicaLoss::missing(*volume));
            }
            Ok(_) | Err(_) => {}
        }
        verified
    }

    /// Returns the manifest of a volume that a caller reads.
    ///
    /// Errors: [`ReadVolumeError::Incomplete`] if the volume is incomplete. A scan would take its
    /// partial tree for the whole one.
    pub(crate) async fn read_manifest(
        &self,
        ticket: &TicketClaims,
    ) -> Result<Arc<Manifest>, ReadVolumeError> {
        let runtime = self.worker.runtime.as_ref();
        if self.manifests.is_filling(ticket.volume)
            && self.manifests.stored(runtime, ticket.volume).await?.is_none()
        {
            return Err(ReadVolumeError::Incomplete);
        }
        Ok(self.manifest(ticket).await?)
    }

    /// Hashes a volume for a reader that received other bytes than its manifest declares. If the
    /// volume is damaged, the artifact store knows that before the error is returned.
    pub(crate) async fn verify_contents(&self, ticket: &TicketClaims) -> Result<(), ReadVolumeError> {
        let _turn = self.verifying.lock().await;
        self.read_manifest(ticket).await?;
        match scrub::hash(self, ticket.volume, |_| true).await {
            Ok(_) => Ok(()),
            Err(ManifestError::Damaged(loss)) => {
                if let Err(refusal) = self.report_losses(std::slice::from_ref(&loss)).await {
                    tracing::warn!(error = %refusal, "cannot report a lost replica: the next report omits it");
                }
                Err(ReadVolumeError::Damaged(loss))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Returns access to the bytes of a replica that is read.
    async fn contents(&self, volume: VolumeHandle) -> Result<Contents, RuntimeError> {
        let contents = self.worker.runtime.contents(volume).await;
        if let Err(RuntimeError::VolumeNotFound(_)) = contents {
            self.announce_loss(ReplicaLoss::missing(volume));
        }
        contents
    }

    /// Tells the artifact store that replicas are missing or damaged, so that it names others.
    pub(crate) async fn report_losses(&self, losses: &[ReplicaLoss]) -> Result<(), Refusal> {
        losses.iter().for_each(|loss| self.record_loss(loss));
        report_losses(&self.worker, losses).await
    }

    /// Tells the artifact store in the background that a replica is missing or damaged.
    pub(crate) fn announce_loss(&self, loss: ReplicaLoss) {
        if !lock(&self.announcing).insert(loss.volume) {
            return;
        }
        self.record_loss(&loss);
        let (worker, announcing) = (self.worker.clone(), self.announcing.clone());
        self.worker.tasks.spawn(async move {
            let volume = loss.volume;
            let losses = [loss];
            tokio::select! {
                reported = report_losses(&worker, &losses) => if let Err(refusal) = reported {
                    tracing::warn!(error = %refusal, "cannot report a lost replica: the next report omits it");
                },
                () = worker.stopping.cancelled() => {}
            }
            lock(&announcing).remove(&volume);
            worker.report_due.notify_one();
        });
    }

    fn record_loss(&self, loss: &ReplicaLoss) {
        tracing::error!(volume.handle = %loss.volume, error = %loss, "replica is lost: it is no longer used");
        metrics::counter!("gantry_gateway_lost_replicas_total").increment(1);
        self.manifests.forget_missing(loss.volume);
    }
}

async fn report_losses(worker: &Worker, losses: &[ReplicaLoss]) -> Result<(), Refusal> {
    let session = worker.session.opened().await;
    let losses: Vec<_> = losses.iter().map(|loss| (loss.volume, loss.cause.clone())).collect();
    let call = || worker.clients.store.lose_replicas(&session.credential, &losses);
    until_answered("report lost replicas", call).await
}

/// The volumes that are being filled. Those that can be read meanwhile have a value.
type Filling = Arc<Mutex<HashMap<VolumeHandle, Option<GrowingVolume>>>>;

/// The permit to fill a volume. A volume has one writer at a time.
pub(crate) struct WriterPermit {
    filling: Filling,
    volume: VolumeHandle,
}

impl WriterPermit {
    pub(crate) fn acquire(filling: &Filling, volume: VolumeHandle) -> Option<Self> {
        match lock(filling).entry(volume) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                vacant.insert(None);
                Some(Self { filling: filling.clone(), volume })
            }
        }
    }

    /// Lets other workers read the volume until the permit is dropped.
    pub(crate) fn publish(&self, growing: GrowingVolume) {
        lock(&self.filling).insert(self.volume, Some(growing));
    }

    /// Destroys a volume that was not filled completely, to free its space at once. The artifact
    /// store would collect it too, but on a full disk the store may need that space first.
    pub(crate) async fn discard(self, transfers: &Transfers) {
        match transfers.worker.runtime.destroy_volume(self.volume).await {
            Ok(()) => transfers.manifests.end_filling(self.volume).await,
            Err(error) => {
                tracing::warn!(volume.handle = %self.volume, error = error_chain(&error), "cannot destroy a partial volume");
            }
        }
    }
}

impl Drop for WriterPermit {
    fn drop(&mut self) {
        lock(&self.filling).remove(&self.volume);
    }
}
