//! Errors of a worker's runtime.

use std::io;

use domain::workload::{Failure, FailureReason};
use domain::{ContainerHandle, ProcessId, VolumeHandle};

/// Error of an operation on a worker.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The worker has no such volume.
    #[error("volume {0} does not exist")]
    VolumeNotFound(VolumeHandle),
    /// The volume has a copy-on-write child.
    #[error("volume {0} has children")]
    HasChildren(VolumeHandle),
    /// The worker has no such container.
    #[error("container {0} does not exist")]
    ContainerNotFound(ContainerHandle),
    /// The main process of the container does not run yet, or has ended.
    #[error("the main process of container {0} does not run")]
    ContainerNotRunning(ContainerHandle),
    /// The worker has no such process.
    #[error("process {0} does not exist")]
    ProcessNotFound(ProcessId),
    /// The image has no such user or group.
    #[error("user or group {0:?} does not exist in the image")]
    UserNotFound(String),
    /// The working directory does not exist in the image, or is not a directory.
    #[error("working directory {0:?} is missing, or is not a directory")]
    DirectoryMissing(String),
    /// The volume does not have the layout of an image.
    #[error("cannot use the image: {0}")]
    InvalidImage(String),
    /// The volume has no entry at this path.
    #[error("{0:?} does not exist in the volume")]
    PathNotFound(String),
    /// The directory of an output is missing, or is not a directory.
    #[error("{0:?} is missing, or is not a directory")]
    OutputMissing(String),
    /// The directory of an output or a cache has entries that an artifact cannot store.
    #[error("cannot store the directory: {0}")]
    InvalidOutput(String),
    /// The directory of an output or a cache has entries that cannot be read.
    #[error("cannot read the directory: {0}")]
    UnreadableOutput(String),
    /// A mount cannot be made at its path.
    #[error("cannot mount at {path:?}: {reason}")]
    InvalidMount {
        /// The path of the mount.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The runtime does not support the request.
    #[error("the worker does not support the request: {0}")]
    Unsupported(String),
    /// The cgroup hierarchy that a limit needs does not exist.
    #[error("the worker has no usable cgroup hierarchy for {0}")]
    CgroupUnavailable(String),
    /// The file system of the volumes is full.
    #[error("the worker's disk is full")]
    DiskFull(#[source] io::Error),
    /// The worker has reached its number of containers.
    #[error("the worker cannot take another container: {0}")]
    WorkerFull(String),
    /// An offset is beyond the end of the output, or leaves a gap in the input.
    #[error("offset {offset} is out of range: the end is {limit}")]
    OffsetOutOfRange {
        /// The offset of the request.
        offset: u64,
        /// The largest valid offset.
        limit: u64,
    },
    /// A system call or a call to the worker failed.
    #[error("cannot {operation} on the worker")]
    Io {
        /// The operation, with the path that it works on.
        operation: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The worker does not send volumes to other workers. No byte was sent.
    #[error("the worker does not send volumes to other workers: {0}")]
    NoPeers(&'static str),
    /// A transfer to another worker ended before all bytes arrived.
    #[error("the other worker did not receive the whole volume: {0}")]
    Peer(String),
    /// Another gateway speaks for this worker. This gateway must not change the worker any more.
    #[error("another gateway has taken over {0}")]
    TakenOver(String),
    /// Another failure of the worker.
    #[error("{0}")]
    Other(String),
}

impl RuntimeError {
    /// Wraps an error of the operating system during the operation `operation`. A full disk becomes
    /// [`Self::DiskFull`].
    pub fn io(operation: impl Into<String>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull(source),
            _ => Self::Io { operation: operation.into(), source },
        }
    }

    /// Whether this process or the machine has reached its limit of open files.
    #[must_use]
    pub fn is_out_of_files(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        // EMFILE and ENFILE.
        matches!(source.raw_os_error(), Some(24 | 23))
    }

    /// The failure reason of a workload that ends with this error.
    #[must_use]
    pub fn reason(&self) -> FailureReason {
        match self {
            // A destroyed container has no processes.
            Self::ContainerNotFound(_) | Self::ContainerNotRunning(_) | Self::ProcessNotFound(_) => {
                FailureReason::ContainerNotFound
            }
            Self::UserNotFound(_) => FailureReason::UserNotFound,
            Self::DirectoryMissing(_) => FailureReason::WorkingDirectoryMissing,
            Self::InvalidImage(_) => FailureReason::InvalidImage,
            Self::OutputMissing(_) => FailureReason::OutputMissing,
            Self::InvalidOutput(_) => FailureReason::OutputInvalid,
            Self::UnreadableOutput(_) => FailureReason::PublishFailed,
            Self::InvalidMount { .. } => FailureReason::InvalidMount,
            Self::Unsupported(_) => FailureReason::Unsupported,
            Self::CgroupUnavailable(_) => FailureReason::CgroupUnavailable,
            Self::DiskFull(_) => FailureReason::DiskFull,
            Self::WorkerFull(_) => FailureReason::WorkerFull,
            Self::VolumeNotFound(_)
            | Self::PathNotFound(_)
            | Self::HasChildren(_)
            | Self::OffsetOutOfRange { .. }
            | Self::Io { .. }
            | Self::NoPeers(_)
            | Self::Peer(_)
            | Self::TakenOver(_)
            | Self::Other(_) => FailureReason::WorkerFailed,
        }
    }

    /// The failure of a workload that ends with this error. The message contains the whole chain of
    /// causes.
    #[must_use]
    pub fn failure(&self) -> Failure {
        Failure { reason: self.reason(), message: domain::error_chain(self) }
    }
}
