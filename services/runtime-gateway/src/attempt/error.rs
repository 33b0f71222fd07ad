//! Why an attempt went no further, and the failure that callers see for it.

use domain::workload::{Failure, FailureReason};
use domain::{ArtifactId, VolumeHandle, error_chain};
use rpc::{Reason, Refusal};
use runtime::RuntimeError;

use crate::util::retry::is_superseded;
use crate::worker::attempts::StopRequest;

/// Why an attempt went no further.
#[derive(Debug, thiserror::Error)]
pub(super) enum AttemptError {
    /// The worker could not do it.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The scheduler or the artifact store said no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It was asked to stop before its process was started.
    #[error("stopped before the process was started")]
    Wished(StopRequest),
    /// The bytes of an input did not survive a crash of the machine, or are not those that the artifact store says.
    #[error("the volume {0} does not hold what it should any more")]
    InputDamaged(VolumeHandle),
    /// An input cannot be brought to this worker.
    #[error("input {0:?} (artifact {1}) cannot be brought to this worker")]
    InputMissing(String, ArtifactId, #[source] Refusal),
    /// A peer's answer makes no sense.
    #[error("{0}")]
    Nonsense(String),
    /// Another gateway may have been let in since this one was heard last.
    #[error("this gateway was not heard for too long")]
    NotAlone,
    /// This gateway is stopping. The process goes on.
    #[error("the gateway is stopping")]
    GatewayStopping,
}

impl AttemptError {
    /// The same of a process that was not started: the workload waits if no file can be opened just now.
    pub(super) fn before_start(self) -> Self {
        match self {
            Self::Worker(error) if error.is_out_of_files() => {
                let why =
                    "its gateway has as many open files as it may have; raise its hard limit of open files";
                tracing::warn!(error = error_chain(&error), "cannot start a workload: too many open files");
                Self::Worker(RuntimeError::WorkerFull(why.to_owned()))
            }
            other => other,
        }
    }

    /// Whether it is another gateway's now that speaks for the worker.
    pub(super) fn is_superseded(&self) -> bool {
        match self {
            Self::Refused(refusal) => is_superseded(refusal),
            Self::Worker(RuntimeError::TakenOver(_)) => true,
            _ => false,
        }
    }
}

pub(super) fn failure(stopped: &AttemptError) -> Failure {
    match stopped {
        AttemptError::Worker(error) => error.failure(),
        AttemptError::Refused(refusal) => Failure { reason: refused(refusal), message: refusal.to_string() },
        AttemptError::Wished(wish) => Failure { reason: wish.reason, message: stopped.to_string() },
        AttemptError::InputMissing(_, _, refusal) => {
            let reason = if refusal.is(Reason::DiskFull) {
                FailureReason::DiskFull
            } else {
                FailureReason::InputUnavailable
            };
            Failure { reason, message: error_chain(stopped) }
        }
        AttemptError::InputDamaged(_) => {
            Failure { reason: FailureReason::InputDamaged, message: stopped.to_string() }
        }
        AttemptError::Nonsense(_) | AttemptError::NotAlone | AttemptError::GatewayStopping => {
            Failure { reason: FailureReason::WorkerFailed, message: stopped.to_string() }
        }
    }
}

/// What a refusal of scheduler or store means for an attempt whose process was not started.
fn refused(refusal: &Refusal) -> FailureReason {
    let reason = Reason::ALL.iter().find(|reason| refusal.is(**reason));
    match reason {
        Some(Reason::InputUnavailable) => FailureReason::InputUnavailable,
        Some(Reason::DiskFull) => FailureReason::DiskFull,
        // It is over for them, and nothing of it was started.
        Some(Reason::LeaseLost | Reason::AttemptEnded) => FailureReason::StoppedBeforeStart,
        // What they say is in the message.
        _ => FailureReason::WorkerFailed,
    }
}
