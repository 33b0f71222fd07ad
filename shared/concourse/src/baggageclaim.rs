//! Client of a Baggageclaim server, which stores the volumes of a worker.
//!
//! [`Client`] uses plain HTTP/1.1 without authentication, with a new connection for each request.
//! The HTTP status does not tell whether an archive is complete. [`Archive`] detects an incomplete
//! one.

mod archive;
mod client;
mod encoding;
mod error;
mod messages;

pub use archive::{Archive, ArchiveError};
pub use client::{Client, CreationOutcome, Timeouts};
pub use encoding::{Encoded, Encoding, UnknownEncoding};
pub use error::Error;
pub use messages::{Handle, InvalidHandle, P2pUrl, Strategy, StreamIn, Volume, VolumeRequest};
