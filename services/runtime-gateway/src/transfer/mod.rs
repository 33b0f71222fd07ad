//! Bytes in and out of the volumes of a worker.
//!
//! [`mod@write`] fills a volume and [`read`] reads one; [`pull`] fills one from other gateways, and [`archives`]
//! does both with tar archives. The manifest of each complete volume is kept by [`manifests`].
//!
//! Callers are the handlers of `Volumes`, and attempts, which read and publish volumes.

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

use domain::VolumeHandle;
use domain::worker::TicketClaims;
use transfer::Manifest;

use crate::util::keyed_locks::lock;
use crate::worker::Worker;
use disk_reservations::DiskReservations;
use error::ManifestError;
use manifests::Manifests;

/// The volumes of one worker, as transfers read and write them.
pub(crate) struct Transfers {
    pub(crate) worker: Arc<Worker>,
    pub(crate) manifests: Manifests,
    /// Volumes that are being filled, by one writer each.
    filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    /// Bytes that transfers have declared and not written yet.
    reservations: DiskReservations,
}

impl Transfers {
    /// `boot` is the life of the machine.
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

    /// The manifest of a complete volume, whose bytes are those that it says.
    pub(crate) async fn manifest(&self, ticket: &TicketClaims) -> Result<Arc<Manifest>, ManifestError> {
        let proven = self.manifests.proven(self.worker.runtime.as_ref(), ticket.volume, &ticket.team).await;
        if let Err(ManifestError::Damaged(_)) = proven {
            self.worker.report_due.notify_one();
        }
        proven
    }
}

/// The right to fill a volume: one writer at a time.
pub(crate) struct WriterPermit {
    filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    volume: VolumeHandle,
}

impl WriterPermit {
    pub(crate) fn take(filling: &Arc<Mutex<HashSet<VolumeHandle>>>, volume: VolumeHandle) -> Option<Self> {
        let mine = lock(filling).insert(volume);
        mine.then(|| Self { filling: filling.clone(), volume })
    }

    /// Frees what could not be written as a whole. The artifact store knows the volume as unfinished and has it destroyed in the end; on a
    /// full disk, though, it may have no room to write that down, and needs this room first.
    pub(crate) async fn discard(self, transfers: &Transfers) {
        match transfers.worker.runtime.destroy_volume(self.volume).await {
            Ok(()) => transfers.manifests.end_filling(self.volume).await,
            Err(error) => {
                tracing::warn!(volume.handle = %self.volume, %error, "cannot destroy a volume that could not be filled");
            }
        }
    }
}

impl Drop for WriterPermit {
    fn drop(&mut self) {
        lock(&self.filling).remove(&self.volume);
    }
}
