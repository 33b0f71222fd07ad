//! Conversion of errors to `Status`. No other module of the gateway chooses an error reason.

use domain::error_chain;
use domain::workload::{Failure, FailureReason};
use rpc::{Reason, Refusal, invalid_field};
use runtime::RuntimeError;
use tonic::Status;
use transfer::{ArchiveError, ArchiveWriteError, InvalidManifest, WriteError};

use crate::SERVICE;
use crate::attempt::error::{AttemptError, failure};
use crate::driven::DrivenError;
use crate::transfer::error::{ReadVolumeError, WriteVolumeError};
use crate::util::retry::is_superseded;
use crate::worker_set::{AdmitError, NotAttended};

/// The error of a stream that ended too early. An aborted call looks like a clean end, so the end
/// must be explicit.
pub(super) fn truncated() -> Status {
    Reason::TransferTruncated.status(SERVICE, "the stream ended before the transfer was complete")
}

impl From<AdmitError> for Status {
    fn from(error: AdmitError) -> Self {
        let reason = match &error {
            AdmitError::Ticket | AdmitError::LeaseToken => Reason::InvalidToken,
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
            ReadVolumeError::Incomplete => Reason::Unavailable,
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

impl From<DrivenError> for Status {
    fn from(error: DrivenError) -> Self {
        let reason = match &error {
            DrivenError::Step(error) => return step_status(error),
            DrivenError::Unpublishable(failure) => return failed(Reason::PublishFailed, failure),
            DrivenError::NoSource(_) => return invalid_field("source", error.to_string()),
            DrivenError::LeaseLost(_) => Reason::LeaseLost,
            DrivenError::NoContainer(..) | DrivenError::NoJoined(_) => Reason::ContainerNotFound,
            DrivenError::Exists(_) | DrivenError::Destroyed(_) => Reason::ContainerExists,
            DrivenError::Running(_) => Reason::ProcessRunning,
        };
        reason.status(SERVICE, error.to_string())
    }
}

/// Converts the error of a step that an attempt of a workload has, too.
fn step_status(error: &AttemptError) -> Status {
    let reason = match error {
        AttemptError::Refused(refusal) if is_superseded(refusal) => Reason::Unavailable,
        AttemptError::Refused(refusal) if refusal.is(Reason::AttemptEnded) => Reason::LeaseLost,
        AttemptError::Refused(refusal) => return refusal.pass_on(SERVICE),
        AttemptError::StopRequested(_) => Reason::LeaseLost,
        AttemptError::NotExclusive | AttemptError::GatewayStopping => Reason::Unavailable,
        AttemptError::Worker(RuntimeError::TakenOver(_)) => Reason::Unavailable,
        AttemptError::Worker(RuntimeError::ContainerNotFound(_)) => Reason::ContainerNotFound,
        AttemptError::Worker(RuntimeError::ContainerNotRunning(_)) => Reason::ContainerNotRunning,
        _ => {
            let failure = failure(error);
            match failure.reason {
                FailureReason::Unsupported => Reason::Unsupported,
                FailureReason::DiskFull => Reason::DiskFull,
                FailureReason::InputUnavailable | FailureReason::InputDamaged => Reason::InputUnavailable,
                FailureReason::WorkerFailed
                | FailureReason::WorkerFull
                | FailureReason::CgroupUnavailable => Reason::WorkerFailed,
                _ => return failed(Reason::ContainerFailed, &failure),
            }
        }
    };
    reason.status(SERVICE, error_chain(error))
}

/// Returns the status for a failure that an attempt would have.
fn failed(reason: Reason, failure: &Failure) -> Status {
    let about = [("failure_reason", failure.reason.as_str().to_owned())];
    reason.status_about(SERVICE, failure.message.clone(), about)
}

/// Converts an error of the runtime.
pub(super) fn status(error: RuntimeError) -> Status {
    let reason = match &error {
        RuntimeError::VolumeNotFound(_) => Reason::VolumeNotFound,
        RuntimeError::ProcessNotFound(_) => Reason::ProcessNotFound,
        RuntimeError::ContainerNotFound(_) => Reason::ContainerNotFound,
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
