//! Conversion of errors to `Status`. No other module of the gateway chooses an error reason.

use domain::error_chain;
use rpc::{Reason, Refusal, invalid_field};
use runtime::RuntimeError;
use tonic::Status;
use transfer::{ArchiveError, ArchiveWriteError, InvalidManifest, WriteError};

use crate::SERVICE;
use crate::transfer::error::{ReadVolumeError, WriteVolumeError};
use crate::worker_set::{AdmitError, NotAttended};

/// The error of a stream that ended too early. An aborted call looks like a clean end, so the end
/// must be explicit.
pub(super) fn truncated() -> Status {
    Reason::TransferTruncated.status(SERVICE, "the stream ended before the transfer was complete")
}

impl From<AdmitError> for Status {
    fn from(error: AdmitError) -> Self {
        let reason = match &error {
            AdmitError::Ticket => Reason::InvalidToken,
            AdmitError::Keys(refusal) => return rpc::unavailable(SERVICE, "verify a ticket", refusal),
            AdmitError::NotAttended(error) => return error.clone().into(),
            AdmitError::TooManyTransfers => Reason::Unavailable,
        };
        reason.status(SERVICE, error_chain(&error))
    }
}

impl From<NotAttended> for Status {
    fn from(error: NotAttended) -> Self {
        let message = error.to_string();
        let mut about = vec![("worker_id", error.worker.to_string())];
        about.extend(error.endpoint.map(|endpoint| ("gateway_endpoint", endpoint)));
        Reason::NotAttended.status_about(SERVICE, message, about)
    }
}

impl From<ReadVolumeError> for Status {
    fn from(error: ReadVolumeError) -> Self {
        let reason = match error {
            ReadVolumeError::Worker(error) => return status(error),
            ReadVolumeError::CallerGone => return truncated(),
            ReadVolumeError::Archive(ref error) => match archive_reason(error) {
                Some(reason) => reason,
                None => return truncated(),
            },
            ReadVolumeError::Damaged(_) => Reason::DigestMismatch,
            ReadVolumeError::Read(_) => Reason::WorkerFailed,
            ReadVolumeError::Pack(ref error) => pack_reason(error),
            ReadVolumeError::PathNotFound(_) => Reason::PathNotFound,
            ReadVolumeError::NotAFile { .. } => Reason::NotAFile,
        };
        reason.status(SERVICE, error_chain(&error))
    }
}

impl From<WriteVolumeError> for Status {
    fn from(error: WriteVolumeError) -> Self {
        let reason = match error {
            WriteVolumeError::Worker(error) => return status(error),
            WriteVolumeError::CallerGone | WriteVolumeError::BrokenOff => return truncated(),
            WriteVolumeError::Archive(ref error) => match archive_reason(error) {
                Some(reason) => reason,
                None => return truncated(),
            },
            WriteVolumeError::Damaged(_) => Reason::DigestMismatch,
            WriteVolumeError::Write(WriteError::DiskFull { .. }) => Reason::DiskFull,
            WriteVolumeError::Write(WriteError::DigestMismatch { .. }) => Reason::DigestMismatch,
            WriteVolumeError::Write(WriteError::Missing { .. }) => Reason::TransferTruncated,
            WriteVolumeError::Write(WriteError::Impossible { .. }) => Reason::InvalidManifest,
            WriteVolumeError::Write(
                WriteError::OutOfOrder(_) | WriteError::NoSuchExtent(_) | WriteError::Unsafe { .. },
            ) => {
                return invalid_field("chunk.extents", error.to_string());
            }
            WriteVolumeError::Write(WriteError::Io { .. }) => Reason::WorkerFailed,
            WriteVolumeError::Pack(ref error) => pack_reason(error),
            WriteVolumeError::Refused(ref refusal) => return Refusal::pass_on(refusal, SERVICE),
            WriteVolumeError::Busy(_) => Reason::Unavailable,
            WriteVolumeError::Complete(_) => Reason::ClaimLost,
            WriteVolumeError::InUse(_) => Reason::VolumeInUse,
            WriteVolumeError::InsufficientDisk(_) => Reason::DiskFull,
        };
        reason.status(SERVICE, error_chain(&error))
    }
}

/// Returns the reason for an archive that cannot be read. `None`: it ended too early.
fn archive_reason(error: &ArchiveError) -> Option<Reason> {
    match error {
        ArchiveError::Source(_) => None,
        ArchiveError::Sink(_) => Some(Reason::WorkerFailed),
        ArchiveError::Changed { .. } => Some(Reason::DigestMismatch),
        ArchiveError::Manifest(InvalidManifest::NoMemory) => Some(Reason::Unavailable),
        _ => Some(Reason::InvalidArchive),
    }
}

fn pack_reason(error: &ArchiveWriteError) -> Reason {
    match error {
        ArchiveWriteError::Content(WriteError::DigestMismatch { .. }) => Reason::DigestMismatch,
        _ => Reason::WorkerFailed,
    }
}

/// Converts an error of the runtime.
pub(super) fn status(error: RuntimeError) -> Status {
    let reason = match &error {
        RuntimeError::VolumeNotFound(_) => Reason::VolumeNotFound,
        RuntimeError::ProcessNotFound(_) => Reason::ProcessNotFound,
        RuntimeError::ContainerNotRunning(_) => Reason::ContainerNotRunning,
        RuntimeError::OffsetOutOfRange { .. } => Reason::OffsetOutOfRange,
        RuntimeError::DiskFull(_) => Reason::DiskFull,
        RuntimeError::Unsupported(_) => Reason::Unsupported,
        // A repeated call finds the new gateway.
        RuntimeError::TakenOver(_) => Reason::Unavailable,
        RuntimeError::NoPeers(_) => Reason::NoPeers,
        RuntimeError::Peer(_) => Reason::PeerFailed,
        _ => {
            tracing::warn!(error = error_chain(&error), "cannot serve a call: the worker failed");
            Reason::WorkerFailed
        }
    };
    reason.status(SERVICE, error.to_string())
}
