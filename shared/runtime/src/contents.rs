//! Access to the bytes of a volume: a local directory, or archives through the worker.

use std::path::{Path, PathBuf};
use std::pin::Pin;

use async_trait::async_trait;
use domain::VolumeHandle;
use tokio::io::AsyncRead;

use crate::RuntimeError;

/// Access to the bytes of a volume.
#[derive(Clone)]
pub enum Contents {
    /// A directory of this machine, mounted if necessary. Valid until the volume is destroyed.
    Directory(PathBuf),
    /// Tar archives through the worker.
    Remote(std::sync::Arc<dyn RemoteVolume>),
}

/// The upper layer of a volume that is an overlay above another volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The volume below.
    pub parent: VolumeHandle,
    /// The directory of the upper layer on this machine.
    pub upper: PathBuf,
    /// Whether the overlay is mounted with `userxattr`.
    pub user_attributes: bool,
}

/// A stream of a tar archive. An archive that ends without an error is complete.
pub type Archive = Pin<Box<dyn AsyncRead + Send>>;

/// A volume on a worker that another worker of the same kind can write to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inlet {
    /// Address of the worker: `http://host:port`.
    pub address: String,
    /// The volume.
    pub volume: VolumeHandle,
    /// The preferred compression of archives, in the names of Baggageclaim.
    pub encoding: String,
}

/// A volume whose bytes are on another machine.
#[async_trait]
pub trait RemoteVolume: Send + Sync {
    /// Reads the directory at `path` (relative; empty: the whole volume) as an archive, with names
    /// relative to `path`. If `path` is a regular file, the archive has one entry.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::PathNotFound`].
    async fn read(&self, path: &Path) -> Result<Archive, RuntimeError>;

    /// Unpacks `archive` over the directory at `path` (relative; empty: the whole volume). A
    /// missing directory is created. The call returns when all bytes are on the worker. An archive
    /// that ends with an error may leave a part of its entries.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::DiskFull`].
    async fn write(&self, path: &Path, archive: Archive) -> Result<(), RuntimeError>;

    /// Stores `manifest`, which describes the final contents of the volume, on the worker. The
    /// worker keeps it until the volume is destroyed.
    async fn store_manifest(&self, manifest: Vec<u8>) -> Result<(), RuntimeError>;

    /// Returns the complete manifest of [`RemoteVolume::store_manifest`], or `None` if none is
    /// stored.
    async fn read_manifest(&self) -> Result<Option<Vec<u8>>, RuntimeError>;

    /// The address at which workers of the same kind can write to this volume. `None`: the worker
    /// has no such address, or its operator did not permit transfers between workers.
    async fn inlet(&self) -> Result<Option<Inlet>, RuntimeError> {
        Ok(None)
    }

    /// Requests that the worker sends the whole volume to `to`, and returns when the transfer is
    /// complete. Dropping the future ends the call; the worker may continue to send.
    ///
    /// Errors: [`RuntimeError::NoPeers`] if no byte was sent. [`RuntimeError::Peer`] if some bytes
    /// may have been sent and the transfer has ended. After any other error the worker may still be
    /// sending.
    async fn send(&self, _to: &Inlet) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoPeers("this kind of worker does not support it"))
    }
}
