//! The durable record of the end of a process.

use domain::workload::{Exit, Failure, FailureReason};
use runtime::Ended;
use serde::{Deserialize, Serialize};

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Code { code: u8, stopped: bool },
    Signal { signal: u8, stopped: bool },
    OutOfMemory { stopped: bool },
    NotStarted { reason: FailureReason, message: String },
    Unknown { reason: FailureReason, message: String },
}

impl End {
    pub(crate) fn not_started(reason: FailureReason, message: impl Into<String>) -> Self {
        Self::NotStarted { reason, message: message.into() }
    }

    pub(crate) fn unknown(reason: FailureReason, message: impl Into<String>) -> Self {
        Self::Unknown { reason, message: message.into() }
    }
}

impl From<End> for Ended {
    fn from(end: End) -> Self {
        match end {
            End::Code { code, stopped } => Self::Exited { exit: Exit::Code(code), stopped },
            End::Signal { signal, stopped } => Self::Exited { exit: Exit::Signal(signal), stopped },
            End::OutOfMemory { stopped } => Self::Exited { exit: Exit::OutOfMemory, stopped },
            End::NotStarted { reason, message } => Self::NotStarted(Failure { reason, message }),
            End::Unknown { reason, message } => Self::Unknown(Failure { reason, message }),
        }
    }
}
