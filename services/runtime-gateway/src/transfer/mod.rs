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
mod local_dir;
mod manifest_file;
pub(crate) mod manifests;
pub(crate) mod peer_copy;
pub(crate) mod pull;
pub(crate) mod read;
mod remote;
pub(crate) mod scan;
mod verify;
pub(crate) mod write;

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex};

use domain::worker::TicketClaims;
use domain::{VolumeHandle, error_chain};
use transfer::Manifest;

use crate::util::keyed_locks::lock;
use crate::worker::Worker;
use disk_reservations::DiskReservations;
use error::ManifestError;
use manifests::Manifests;

/// The volumes of one worker, for transfers.
pub(crate) struct Transfers {
    pub(crate) worker: Arc<Worker>,
    pub(crate) manifests: Manifests,
    /// Volumes that are being filled. Each has one writer.
    filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    /// Disk space that transfers have reserved.
    reservations: DiskReservations,
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
            worker,
        }))
    }

    /// Returns the manifest of a complete volume that certainly holds its tree.
    pub(crate) async fn manifest(&self, ticket: &TicketClaims) -> Result<Arc<Manifest>, ManifestError> {
        let proven =
            self.manifests.load_verified(self.worker.runtime.as_ref(), ticket.volume, &ticket.team).await;
        if let Err(ManifestError::Damaged(_)) = proven {
            self.worker.report_due.notify_one();
        }
        proven
    }
}

/// The permit to fill a volume. A volume has one writer at a time.
pub(crate) struct WriterPermit {
    filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    volume: VolumeHandle,
}

impl WriterPermit {
    pub(crate) fn acquire(filling: &Arc<Mutex<HashSet<VolumeHandle>>>, volume: VolumeHandle) -> Option<Self> {
        let is_free = lock(filling).insert(volume);
        is_free.then(|| Self { filling: filling.clone(), volume })
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
