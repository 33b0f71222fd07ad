//! What a worker refuses, in the words of the trait.

use std::io;

use concourse::{baggageclaim, garden};
use domain::VolumeHandle;
use domain::workload::FailureReason;
use runtime::RuntimeError;

use crate::runtimes::exit_record::End;

/// A failure of the Garden server while `doing` something.
pub(super) fn garden(doing: &str, error: garden::Error) -> RuntimeError {
    match error {
        garden::Error::Connection { .. } => {
            RuntimeError::Io { doing: doing.to_owned(), source: io::Error::other(error) }
        }
        garden::Error::Full(message) => RuntimeError::Full(message),
        error => {
            RuntimeError::Other(format!("the worker could not {doing}: {}", domain::error_chain(&error)))
        }
    }
}

/// A failure of the Baggageclaim server while `doing` something with a volume.
pub(super) fn volume(doing: &str, handle: VolumeHandle, error: baggageclaim::Error) -> RuntimeError {
    use baggageclaim::Error;
    match error {
        Error::NotFound => RuntimeError::VolumeNotFound(handle),
        Error::Unreachable(_) | Error::Lost(_) | Error::Source(_) => {
            RuntimeError::Io { doing: doing.to_owned(), source: io::Error::other(error) }
        }
        Error::Invalid(why) => RuntimeError::Unsupported(why.to_owned()),
        error => {
            RuntimeError::Other(format!("the worker could not {doing}: {}", domain::error_chain(&error)))
        }
    }
}

/// Why a program was not run. `None`: it is not sure that it was not.
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

/// What a worker says about why a program was not run, where its words tell.
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
