//! Errors of reading and writing volumes, with a variant for each reaction of a caller.

use std::path::PathBuf;

use domain::VolumeHandle;
use rpc::Refusal;
use runtime::RuntimeError;
use transfer::{ArchiveError, ArchiveWriteError, ReadError, WriteError};

use super::disk_reservations::InsufficientDisk;

/// A replica that cannot be used: it is missing on the worker, or damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("volume {volume} {cause}")]
pub(crate) struct ReplicaLoss {
    pub(crate) volume: VolumeHandle,
    /// For people. It continues the volume.
    pub(crate) cause: String,
}

impl ReplicaLoss {
    /// The volume does not exist.
    pub(crate) fn missing(volume: VolumeHandle) -> Self {
        Self { volume, cause: "is missing on the worker".to_owned() }
    }

    /// The volume differs from its manifest.
    pub(crate) fn damaged(volume: VolumeHandle, how: &str) -> Self {
        Self { volume, cause: format!("is damaged: {how}") }
    }
}

/// The reason why a manifest cannot be read or is not valid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    /// The volume differs from its manifest.
    #[error(transparent)]
    Damaged(ReplicaLoss),
    /// The runtime failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
}

/// The reason why a volume cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadVolumeError {
    /// The runtime failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The bytes of the volume differ from its manifest.
    #[error(transparent)]
    Damaged(ReplicaLoss),
    /// The tree cannot be read.
    #[error("cannot read the volume")]
    Read(#[from] ReadError),
    /// The archive from the worker cannot be read.
    #[error(transparent)]
    Archive(ArchiveError),
    /// The archive for the caller cannot be written.
    #[error("cannot pack the volume")]
    Pack(#[source] ArchiveWriteError),
    /// The path does not exist.
    #[error("there is no {0:?}")]
    PathNotFound(PathBuf),
    /// The path is not a regular file.
    #[error("{path:?} is {kind}")]
    NotAFile {
        /// The path that the caller named.
        path: PathBuf,
        /// The type of the file at the path.
        kind: String,
    },
    /// The volume is incomplete.
    #[error("cannot read the volume: it is incomplete; read another replica")]
    Incomplete,
    /// The caller is gone.
    #[error("cannot read the volume: the caller is gone")]
    CallerGone,
}

/// The reason why a volume cannot be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteVolumeError {
    /// The runtime failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The bytes of the volume differ from its manifest.
    #[error(transparent)]
    Damaged(ReplicaLoss),
    /// The tree cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The archive from the caller is invalid.
    #[error(transparent)]
    Archive(ArchiveError),
    /// The archive for the worker cannot be written.
    #[error("cannot pack the volume")]
    Pack(#[source] ArchiveWriteError),
    /// The artifact store rejected a call.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another transfer is filling the volume.
    #[error("cannot fill volume {0}: another transfer is filling it; try again later")]
    Busy(VolumeHandle),
    /// The volume already has its final bytes.
    #[error("cannot fill volume {0}: it is already complete")]
    Complete(VolumeHandle),
    /// The disk has no space for the tree of the manifest.
    #[error(transparent)]
    InsufficientDisk(#[from] InsufficientDisk),
    /// The volume exists, and no transfer fills it. A container may use it.
    #[error("cannot fill volume {0}: it exists, and no transfer fills it")]
    InUse(VolumeHandle),
    /// The worker accepts no more bytes, or the caller is gone.
    #[error("cannot fill the volume: the receiver is gone")]
    CallerGone,
    /// The caller is gone, and has not committed.
    #[error("cannot fill the volume: the transfer ended without a commit")]
    BrokenOff,
}

impl From<ArchiveError> for ReadVolumeError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Sink(source) => RuntimeError::io("unpack an archive", source).into(),
            error => Self::Archive(error),
        }
    }
}

impl From<ArchiveError> for WriteVolumeError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Sink(source) => RuntimeError::io("unpack an archive", source).into(),
            error => Self::Archive(error),
        }
    }
}

impl From<ArchiveWriteError> for ReadVolumeError {
    fn from(error: ArchiveWriteError) -> Self {
        match error {
            ArchiveWriteError::Io(_) => Self::CallerGone,
            error => Self::Pack(error),
        }
    }
}

impl From<ArchiveWriteError> for WriteVolumeError {
    fn from(error: ArchiveWriteError) -> Self {
        match error {
            ArchiveWriteError::Io(_) => Self::CallerGone,
            error => Self::Pack(error),
        }
    }
}

impl From<ManifestError> for ReadVolumeError {
    fn from(error: ManifestError) -> Self {
        match error {
            ManifestError::Damaged(loss) => Self::Damaged(loss),
            ManifestError::Worker(error) => Self::Worker(error),
        }
    }
}

impl From<ManifestError> for WriteVolumeError {
    fn from(error: ManifestError) -> Self {
        match error {
            ManifestError::Damaged(loss) => Self::Damaged(loss),
            ManifestError::Worker(error) => Self::Worker(error),
        }
    }
}
