//! The bytes of a volume, near or far.

use std::path::{Path, PathBuf};
use std::pin::Pin;

use async_trait::async_trait;
use domain::VolumeHandle;
use tokio::io::AsyncRead;

use crate::RuntimeError;

/// How the bytes of a volume are reached.
#[derive(Clone)]
pub enum Contents {
    /// As a directory of this machine, mounted when it has to be. Valid until the volume is destroyed.
    Directory(PathBuf),
    /// As archives, through its worker.
    Remote(std::sync::Arc<dyn RemoteVolume>),
}

/// A tar archive as it arrives. One that ends without an error is whole.
pub type Archive = Pin<Box<dyn AsyncRead + Send>>;

/// A volume that another worker of the same kind can fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inlet {
    /// Where its worker is reached: `http://host:port`.
    pub address: String,
    /// The volume.
    pub volume: VolumeHandle,
    /// How archives go in best, in the words of such workers.
    pub encoding: String,
}

/// A volume whose bytes are on another machine.
#[async_trait]
pub trait RemoteVolume: Send + Sync {
    /// Streams out the directory at `path` (relative; empty: the whole volume): its entries, with names relative to it. Of a regular
    /// file: one entry.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::PathNotFound`].
    async fn read(&self, path: &Path) -> Result<Archive, RuntimeError>;

    /// Unpacks `archive` in the directory at `path` (relative, made when it is missing; empty: the whole volume), over what is there.
    /// Returns when everything is there. An archive that ends with an error may leave a part of it.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::DiskFull`].
    async fn write(&self, path: &Path, archive: Archive) -> Result<(), RuntimeError>;

    /// Keeps `manifest`, which describes the final contents of the volume, on the worker for as long as the volume is there.
    async fn keep_manifest(&self, manifest: Vec<u8>) -> Result<(), RuntimeError>;

    /// What [`RemoteVolume::keep_manifest`] kept, whole. `None`: nothing.
    async fn kept_manifest(&self) -> Result<Option<Vec<u8>>, RuntimeError>;

    /// Where workers of the same kind reach this volume, to fill it with one of theirs. `None`: nowhere, or nobody said that they may.
    async fn inlet(&self) -> Result<Option<Inlet>, RuntimeError> {
        Ok(None)
    }

    /// Has the worker itself send the whole volume to `to`. Returns when everything is there. To drop this ends the call, but maybe not what
    /// the worker does.
    ///
    /// Errors: [`RuntimeError::NoPeers`] if nothing was sent; [`RuntimeError::Peer`] if something may have been, and nothing more comes; after
    /// any other, more may come.
    async fn send(&self, _to: &Inlet) -> Result<(), RuntimeError> {
        Err(RuntimeError::NoPeers("it is of no kind that does"))
    }
}
