//! What can go wrong on a worker.

use std::io;

use domain::workload::{Failure, FailureReason};
use domain::{AttemptId, ContainerHandle, VolumeHandle};

/// What went wrong on a worker.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The worker has no such volume.
    #[error("no volume {0}")]
    VolumeNotFound(VolumeHandle),
    /// A copy-on-write child of the volume exists.
    #[error("volume {0} has children")]
    HasChildren(VolumeHandle),
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
    /// An image is not laid out as one.
    #[error("the image cannot be used: {0}")]
    InvalidImage(String),
    /// The volume has nothing at this path.
    #[error("{0:?} is missing in the volume")]
    PathNotFound(String),
    /// A directory that shall become an output is not there, or is no directory.
    #[error("{0:?} is missing, or is not a directory")]
    OutputMissing(String),
    /// What a process left as an output, or in a cache, is nothing that can be kept.
    #[error("it cannot be kept: {0}")]
    InvalidOutput(String),
    /// Part of what a process left as an output, or in a cache, cannot be read.
    #[error("it cannot be read: {0}")]
    UnreadableOutput(String),
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
    /// The worker has as many containers as it takes.
    #[error("the worker has no room for another container: {0}")]
    Full(String),
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
    /// It does not send volumes to other workers, and has not begun.
    #[error("this worker does not send volumes to others: {0}")]
    NoPeers(&'static str),
    /// It has sent a volume to another worker, and not all arrived there. Nothing more comes.
    #[error("the other worker did not take it all: {0}")]
    Peer(String),
    /// Another gateway speaks for this worker now, and this one is not to touch it any more.
    #[error("another gateway has taken over {0}")]
    TakenOver(String),
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

    /// Whether this process, or the whole machine, has as many open files as it may have.
    #[must_use]
    pub fn is_out_of_files(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        // EMFILE and ENFILE.
        matches!(source.raw_os_error(), Some(24 | 23))
    }

    /// Its reason, where it is why a workload failed.
    #[must_use]
    pub fn reason(&self) -> FailureReason {
        match self {
            // Its processes go with it.
            Self::ContainerNotFound(_) | Self::ProcessNotFound(_) => FailureReason::ContainerNotFound,
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
            Self::Full(_) => FailureReason::WorkerFull,
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

    /// As the failure of a workload: the reason, and the whole chain of causes.
    #[must_use]
    pub fn failure(&self) -> Failure {
        Failure { reason: self.reason(), message: domain::error_chain(self) }
    }
}
