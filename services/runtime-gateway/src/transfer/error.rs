//! Why a volume cannot be read or written, with a variant for each thing that a caller may do about it.

use std::path::PathBuf;

use domain::VolumeHandle;
use rpc::Refusal;
use runtime::RuntimeError;
use transfer::{ArchiveError, ArchiveWriteError, ReadError, WriteError};

use super::disk_reservations::InsufficientDisk;

/// The bytes of a volume cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    /// They did not survive a crash of the machine.
    #[error("the volume {0} does not hold what it should any more")]
    Damaged(VolumeHandle),
    /// The worker failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
}

/// A volume cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadVolumeError {
    /// The worker failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The bytes of the volume are not those that its manifest says.
    #[error("the volume {0} does not hold what it should any more")]
    Damaged(VolumeHandle),
    /// The tree cannot be read.
    #[error("cannot read the volume")]
    Read(#[from] ReadError),
    /// The archive that the worker sends cannot be read.
    #[error(transparent)]
    Archive(ArchiveError),
    /// An archive cannot be made.
    #[error("cannot pack the volume")]
    Pack(#[source] ArchiveWriteError),
    /// The file is not there.
    #[error("there is no {0:?}")]
    PathNotFound(PathBuf),
    /// The path is something else than a regular file.
    #[error("{path:?} is {what}")]
    NotAFile {
        /// The path that the caller named.
        path: PathBuf,
        /// The type of the file at the path.
        what: String,
    },
    /// The receiver is gone.
    #[error("the caller is gone")]
    CallerGone,
}

/// A volume cannot be written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteVolumeError {
    /// The worker failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The bytes of the volume are not those that its manifest says.
    #[error("the volume {0} does not hold what it should any more")]
    Damaged(VolumeHandle),
    /// The tree cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The archive that arrives is no archive of a tree.
    #[error(transparent)]
    Archive(ArchiveError),
    /// An archive for the worker cannot be made.
    #[error("cannot pack the volume")]
    Pack(#[source] ArchiveWriteError),
    /// The store refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another transfer fills the volume at this moment.
    #[error("volume {0} is being filled")]
    Busy(VolumeHandle),
    /// The volume has its final bytes.
    #[error("volume {0} was filled before")]
    Complete(VolumeHandle),
    /// The disk has no room for what the manifest declares.
    #[error(transparent)]
    InsufficientDisk(#[from] InsufficientDisk),
    /// The volume exists, and no transfer fills it: a container may use it.
    #[error("cannot fill volume {0}: it exists, and no transfer fills it")]
    InUse(VolumeHandle),
    /// The worker takes no more, or no caller wants the volume any more.
    #[error("the caller is gone")]
    CallerGone,
    /// The sender is gone, and has not committed.
    #[error("the transfer was broken off")]
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
            ManifestError::Damaged(volume) => Self::Damaged(volume),
            ManifestError::Worker(error) => Self::Worker(error),
        }
    }
}

impl From<ManifestError> for WriteVolumeError {
    fn from(error: ManifestError) -> Self {
        match error {
            ManifestError::Damaged(volume) => Self::Damaged(volume),
            ManifestError::Worker(error) => Self::Worker(error),
        }
    }
}
