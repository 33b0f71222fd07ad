//! What a call may end in.

use std::io;

use http::StatusCode;

use crate::exchange::Failure;

/// Why a call failed. Statuses decide; the worker's sentence, where it sent one, is only for people.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The worker was not reached: nothing has happened there, and the call may be repeated.
    #[error("the worker cannot be reached")]
    Unreachable(#[source] io::Error),
    /// The connection broke, or no answer came in time: what was asked may have been done.
    #[error("the worker's answer was lost")]
    Lost(#[source] io::Error),
    /// The archive to be sent could not be read. What had been sent may stay in the volume.
    #[error("the archive to be sent cannot be read")]
    Source(#[source] io::Error),
    /// There is no such volume.
    #[error("no such volume")]
    NotFound,
    /// The volume has no such path.
    #[error("no such path in the volume")]
    NoSuchPath,
    /// A volume of this handle exists already. Nothing was asked of the worker: creation over it could destroy it.
    #[error("a volume of this handle exists already")]
    AlreadyExists,
    /// The archive is larger, as encoded, than the limit. What had been unpacked stays.
    #[error("the archive is over the limit: {0}")]
    LimitExceeded(String),
    /// The worker will not do this, however often it is asked.
    #[error("the worker refused ({status}): {message}")]
    Refused {
        /// A status of the four hundreds.
        status: StatusCode,
        /// What the worker said, maybe nothing.
        message: String,
    },
    /// The worker could not do it.
    #[error("the worker failed ({status}): {message}")]
    Failed {
        /// Any other status.
        status: StatusCode,
        /// What the worker said, maybe nothing.
        message: String,
    },
    /// A transfer from worker to worker failed. Part of the archive may stay in the destination.
    #[error("the transfer between workers failed: {0}")]
    Transfer(String),
    /// The answer is none of Baggageclaim.
    #[error("the worker's answer makes no sense: {0}")]
    Protocol(String),
    /// The worker was not asked: this must not be sent.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Lost(error) => Self::Lost(error),
            Failure::Source(error) => Self::Source(error),
            Failure::Nonsense(text) => Self::Protocol(text),
            Failure::Address => Self::Invalid("the worker's address is no authority"),
        }
    }
}
