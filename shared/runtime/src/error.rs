//! What can go wrong on a worker.

use std::io;

use domain::workload::Failure;
use domain::{AttemptId, ContainerHandle, VolumeHandle};

/// What went wrong on a worker. Each has a reason of `docs/errors.md`.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The worker has no such volume.
    #[error("no volume {0}")]
    VolumeNotFound(VolumeHandle),
    /// The worker has no such container.
    #[error("no container {0}")]
    ContainerNotFound(ContainerHandle),
    /// The worker has no such process.
    #[error("no process {0}")]
    ProcessNotFound(AttemptId),
    /// The image has no such user or group.
    #[error("no user or group {0:?} in the image")]
    UserNotFound(String),
    /// The working directory does not exist in the image, or is no directory.
    #[error("working directory {0:?} is missing, or is not a directory")]
    DirectoryMissing(String),
    /// A directory that shall become an output is not there, or is no directory.
    #[error("{0:?} is missing, or is not a directory")]
    OutputMissing(String),
    /// A mount cannot be made where it was asked for.
    #[error("cannot mount at {path:?}: {why}")]
    InvalidMount {
        /// Where.
        path: String,
        /// Why not.
        why: String,
    },
    /// The runtime cannot do this.
    #[error("this worker cannot do it: {0}")]
    Unsupported(String),
    /// A cgroup hierarchy that a limit needs is not there.
    #[error("no usable cgroup hierarchy for {0}")]
    CgroupUnavailable(String),
    /// The file system that holds the volumes is full.
    #[error("the worker's disk is full")]
    DiskFull(#[source] io::Error),
    /// An offset lies beyond what was written, or leaves a gap.
    #[error("offset {offset} is out of range, {limit} is the end")]
    OffsetOutOfRange {
        /// The offset given.
        offset: u64,
        /// The largest that would do.
        limit: u64,
    },
    /// The worker did not do what it should.
    #[error("{doing} failed on the worker")]
    Io {
        /// What was being done, to which path.
        doing: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Another failure of the worker.
    #[error("{0}")]
    Other(String),
}

impl RuntimeError {
    /// Wraps what the system said while `doing` something; a full disk becomes [`Self::DiskFull`].
    pub fn io(doing: impl Into<String>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull(source),
            _ => Self::Io { doing: doing.into(), source },
        }
    }

    /// Its reason in `docs/errors.md`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::VolumeNotFound(_) => "VOLUME_NOT_FOUND",
            Self::ContainerNotFound(_) => "CONTAINER_NOT_FOUND",
            Self::ProcessNotFound(_) => "PROCESS_NOT_FOUND",
            Self::UserNotFound(_) => "USER_NOT_FOUND",
            Self::DirectoryMissing(_) => "WORKING_DIRECTORY_MISSING",
            Self::OutputMissing(_) => "OUTPUT_MISSING",
            Self::InvalidMount { .. } => "INVALID_MOUNT",
            Self::Unsupported(_) => "UNSUPPORTED",
            Self::CgroupUnavailable(_) => "CGROUP_UNAVAILABLE",
            Self::DiskFull(_) => "DISK_FULL",
            Self::OffsetOutOfRange { .. } => "OFFSET_OUT_OF_RANGE",
            Self::Io { .. } | Self::Other(_) => "WORKER_FAILED",
        }
    }

    /// As the failure of a workload: the reason, and the whole chain of causes.
    #[must_use]
    pub fn failure(&self) -> Failure {
        Failure { reason: self.reason().to_owned(), message: domain::chain(self) }
    }
}
