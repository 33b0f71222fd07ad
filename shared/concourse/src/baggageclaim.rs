//! Volumes of a worker.
//!
//! [`Client`] speaks to one Baggageclaim server: plain HTTP/1.1 without authentication, a new connection for each request. Archives are read
//! through [`Archive`], which knows whether the worker sent all of one: an answer's status does not tell.

mod archive;
mod client;
mod encoding;
mod error;
mod messages;

pub use archive::{Archive, ArchiveError};
pub use client::{Client, Remembered, Timeouts};
pub use encoding::{Encoded, Encoding, UnknownEncoding};
pub use error::Error;
pub use messages::{Handle, InvalidHandle, P2pUrl, Strategy, StreamIn, Volume, VolumeRequest};
