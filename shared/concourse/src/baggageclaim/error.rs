//! Errors of requests to a Baggageclaim server.

use std::io;

use http::StatusCode;

use crate::exchange::Failure;

/// Error of a request. The status decides the variant. The message of the worker is for people
/// only.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The worker was not reached. It executed nothing, and the request may be repeated.
    #[error("the worker is unreachable")]
    Unreachable(#[source] io::Error),
    /// The connection broke, or the answer timed out. The worker may have executed the request.
    #[error("the answer of the worker was lost")]
    Lost(#[source] io::Error),
    /// The source of the archive failed. The bytes that were sent may stay in the volume.
    #[error("cannot read the archive to send")]
    Source(#[source] io::Error),
    /// The volume does not exist.
    #[error("the volume does not exist")]
    NotFound,
    /// The path does not exist in the volume.
    #[error("the path does not exist in the volume")]
    NoSuchPath,
    /// A volume of this handle exists. Nothing was sent, because creation over the volume could
    /// destroy it.
    #[error("a volume with this handle already exists")]
    AlreadyExists,
    /// The encoded archive is larger than the limit. The bytes that were unpacked stay.
    #[error("the archive exceeds the limit: {0}")]
    LimitExceeded(String),
    /// The worker rejected the request. A repetition would be rejected too.
    #[error("the worker rejected the request ({status}): {message}")]
    Refused {
        /// A status of the range 4xx.
        status: StatusCode,
        /// The message of the worker, possibly empty.
        message: String,
    },
    /// The worker could not execute the request.
    #[error("the worker failed ({status}): {message}")]
    Failed {
        /// Any other status.
        status: StatusCode,
        /// The message of the worker, possibly empty.
        message: String,
    },
    /// A transfer from worker to worker failed. Part of the archive may stay in the destination.
    #[error("the transfer between workers failed: {0}")]
    Transfer(String),
    /// The answer does not follow the protocol of Baggageclaim.
    #[error("the answer of the worker is invalid: {0}")]
    Protocol(String),
    /// The request must not be sent, and nothing was sent.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Lost(error) => Self::Lost(error),
            Failure::Source(error) => Self::Source(error),
            Failure::Malformed(text) => Self::Protocol(text),
            Failure::Address => Self::Invalid("the address of the worker is not a host and a port"),
        }
    }
}
