//! Conversion of worker errors into [`RuntimeError`].

use std::io;

use concourse::{baggageclaim, garden};
use domain::VolumeHandle;
use domain::workload::FailureReason;
use runtime::RuntimeError;

use crate::runtimes::exit_record::End;

/// Converts an error of the Garden server. `operation` names the operation.
pub(super) fn garden(operation: &str, error: garden::Error) -> RuntimeError {
    match error {
        garden::Error::Connection { .. } => {
            RuntimeError::Io { operation: operation.to_owned(), source: io::Error::other(error) }
        }
        garden::Error::Full(message) => RuntimeError::WorkerFull(message),
        error => {
            RuntimeError::Other(format!("the worker cannot {operation}: {}", domain::error_chain(&error)))
        }
    }
}

/// Converts an error of the Baggageclaim server. `operation` names the operation on the volume.
pub(super) fn volume(operation: &str, handle: VolumeHandle, error: baggageclaim::Error) -> RuntimeError {
    use baggageclaim::Error;
    match error {
        Error::NotFound => RuntimeError::VolumeNotFound(handle),
        Error::Unreachable(_) | Error::Lost(_) | Error::Source(_) => {
            RuntimeError::Io { operation: operation.to_owned(), source: io::Error::other(error) }
        }
        Error::Invalid(why) => RuntimeError::Unsupported(why.to_owned()),
        error => {
            RuntimeError::Other(format!("the worker cannot {operation}: {}", domain::error_chain(&error)))
        }
    }
}

/// The reason why a program was not run. `None`: the program may have run.
pub(super) fn run(error: &garden::Error) -> Option<End> {
    let not_started = |reason| Some(End::not_started(reason, domain::error_chain(error)));
    match error {
        garden::Error::ExecutableNotFound(_) => not_started(FailureReason::ProgramNotFound),
        garden::Error::ContainerNotFound(_) => not_started(FailureReason::ContainerNotFound),
        garden::Error::Refused(_) => not_started(FailureReason::StartFailed),
        error if error.is_safe_to_repeat() => not_started(FailureReason::StartFailed),
        error => match reason(error) {
            FailureReason::StartFailed => None,
            reason => not_started(reason),
        },
    }
}

/// The failure reason of a program that was not run, if the message of the worker contains one.
pub(super) fn reason(error: &garden::Error) -> FailureReason {
    let garden::Error::Other { message, .. } = error else { return FailureReason::StartFailed };
    if message.contains("unable to find user") {
        FailureReason::UserNotFound
    } else if message.contains("permission denied") || message.contains("exec format error") {
        FailureReason::ProgramNotExecutable
    } else if message.contains("no such file or directory") || message.contains("executable file not found") {
        FailureReason::ProgramNotFound
    } else {
        FailureReason::StartFailed
    }
}
