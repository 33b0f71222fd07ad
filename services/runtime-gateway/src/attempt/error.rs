//! Errors of attempts, and the failures that callers see.

use domain::workload::{Failure, FailureReason};
use domain::{ArtifactId, error_chain};
use rpc::{Reason, Refusal};
use runtime::RuntimeError;

use crate::transfer::error::ReplicaLoss;
use crate::util::retry::is_superseded;
use crate::worker::attempts::StopRequest;

/// The reason why an attempt cannot continue.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttemptError {
    /// The runtime failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The scheduler or the artifact store rejected a call.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The scheduler requested a stop before the process was started.
    #[error("stopped before the process was started")]
    StopRequested(StopRequest),
    /// The replica of an input on this worker is missing or damaged.
    #[error(transparent)]
    InputDamaged(ReplicaLoss),
    /// The lost replicas of inputs cannot be replaced.
    #[error("{}", join_losses(.0))]
    NotReplaced(Vec<ReplicaLoss>, #[source] Box<AttemptError>),
    /// An input cannot be copied to this worker.
    #[error("cannot copy input {0:?} (artifact {1}) to this worker")]
    InputMissing(String, ArtifactId, #[source] Refusal),
    /// The image with this reference cannot be pulled.
    #[error("cannot pull the image {0}")]
    ImageUnavailable(String, #[source] Refusal),
    /// A step for the service of this name failed.
    #[error("service {0}")]
    Service(String, #[source] Box<AttemptError>),
    /// A service ended, or was not ready in time, before the process was started.
    #[error("{}", .0.message)]
    ServiceFailed(Failure),
    /// Another service gave an invalid answer.
    #[error("{0}")]
    InvalidAnswer(String),
    /// Another gateway may have a newer session.
    #[error("cannot start the process: the scheduler may have given the session to another gateway")]
    NotExclusive,
    /// This gateway is stopping. The process continues.
    #[error("the gateway is stopping")]
    GatewayStopping,
}

impl AttemptError {
    /// Converts an error from before the start. If no file can be opened, the workload waits
    /// instead of failing.
    pub(super) fn before_start(self) -> Self {
        match self {
            Self::Worker(error) if error.is_out_of_files() => {
                let why = "the gateway has too many open files; raise its hard limit of open files";
                tracing::warn!(error = error_chain(&error), "cannot start a workload: too many open files");
                Self::Worker(RuntimeError::WorkerFull(why.to_owned()))
            }
            other => other,
        }
    }

    /// Names the service whose step failed, unless the step can be repeated.
    pub(super) fn of_service(self, name: &str) -> Self {
        match self {
            Self::Worker(RuntimeError::TakenOver(_)) => self,
            Self::Worker(_)
            | Self::InputDamaged(_)
            | Self::NotReplaced(..)
            | Self::InputMissing(..)
            | Self::ImageUnavailable(..)
            | Self::InvalidAnswer(_) => Self::Service(name.to_owned(), Box::new(self)),
            other => other,
        }
    }

    /// Whether another gateway speaks for the worker now.
    pub(super) fn is_superseded(&self) -> bool {
        match self {
            Self::Refused(refusal) => is_superseded(refusal),
            Self::Worker(RuntimeError::TakenOver(_)) => true,
            _ => false,
        }
    }
}

/// Whether the bytes of an input exist, so that another worker may be able to copy them.
pub(super) fn may_succeed_elsewhere(refusal: &Refusal) -> bool {
    [Reason::SourceFailed, Reason::WorkerUnreachable, Reason::ClaimLost, Reason::NotAttended]
        .into_iter()
        .any(|reason| refusal.is(reason))
}

fn join_losses(losses: &[ReplicaLoss]) -> String {
    losses.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

pub(crate) fn failure(stopped: &AttemptError) -> Failure {
    match stopped {
        AttemptError::Worker(error) => error.failure(),
        AttemptError::Refused(refusal) => {
            Failure { reason: refusal_reason(refusal), message: refusal.to_string() }
        }
        AttemptError::StopRequested(request) => {
            Failure { reason: request.reason, message: stopped.to_string() }
        }
        AttemptError::InputMissing(_, _, refusal) => {
            let reason = if refusal.is(Reason::DiskFull) {
                FailureReason::DiskFull
            } else if refusal.is(Reason::WorkerUnreachable) && refusal.about.contains_key("worker") {
                // The error is about one worker, which is this one. Otherwise it is about all
                // workers with a replica.
                FailureReason::WorkerUnreachable
            } else if may_succeed_elsewhere(refusal) {
                FailureReason::InputUnreachable
            } else {
                FailureReason::InputUnavailable
            };
            Failure { reason, message: error_chain(stopped) }
        }
        AttemptError::ImageUnavailable(_, refusal) => {
            let reason = match Reason::ALL.iter().find(|reason| refusal.is(**reason)) {
                Some(Reason::DiskFull) => FailureReason::DiskFull,
                Some(Reason::InvalidImage | Reason::PlatformNotFound) => FailureReason::InvalidImage,
                _ => FailureReason::ImageUnavailable,
            };
            Failure { reason, message: error_chain(stopped) }
        }
        AttemptError::Service(name, error) => {
            let Failure { reason, message } = failure(error);
            Failure { reason, message: format!("service {name}: {message}") }
        }
        AttemptError::NotReplaced(_, error) => {
            Failure { reason: failure(error).reason, message: error_chain(stopped) }
        }
        AttemptError::ServiceFailed(failure) => failure.clone(),
        AttemptError::InputDamaged(_) => {
            Failure { reason: FailureReason::InputDamaged, message: stopped.to_string() }
        }
        AttemptError::InvalidAnswer(_) | AttemptError::NotExclusive | AttemptError::GatewayStopping => {
            Failure { reason: FailureReason::WorkerFailed, message: stopped.to_string() }
        }
    }
}

/// Returns the failure reason for a rejected call of an attempt whose process was not started.
fn refusal_reason(refusal: &Refusal) -> FailureReason {
    let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
    match reason {
        Some(Reason::InputUnavailable) => FailureReason::InputUnavailable,
        Some(Reason::DiskFull) => FailureReason::DiskFull,
        // The lease has already ended, and no process was started.
        Some(Reason::LeaseLost) => FailureReason::StoppedBeforeStart,
        // The artifact store remembers an end that the scheduler does not remember, because its
        // database was restored from a backup. The process may have run before.
        Some(Reason::AttemptEnded) => FailureReason::StartUnknown,
        // The message contains the reason.
        _ => FailureReason::WorkerFailed,
    }
}
