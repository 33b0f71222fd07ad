//! Everything that touches the shape of the wire: generated code, conversions to and from `domain`, error details, signed
//! tokens, and how a client reaches a service.
//!
//! Handlers parse with this crate, call a domain function, and answer with this crate; below them no protobuf type and no
//! `Status` is seen.

pub mod client;
mod convert;
pub mod owner;
pub mod page;
mod reason;
pub mod small_tree;
pub mod spec;
pub mod token;
pub mod trace;
pub mod tree;

pub use client::Peer;
pub use convert::*;
/// A message on the wire.
pub use prost::Message;
pub use reason::{Reason, Refusal, invalid_field, unavailable};

/// The descriptors of all our protos, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Generated from `proto/`, whose comments are its manual.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, rustdoc::all)]
pub mod pb {
    /// `gantry.scheduler.v1`
    pub mod scheduler {
        tonic::include_proto!("gantry.scheduler.v1");
    }
    /// `gantry.artifacts.v1`
    pub mod artifacts {
        tonic::include_proto!("gantry.artifacts.v1");
    }
    /// `gantry.runtime.v1`
    pub mod runtime {
        tonic::include_proto!("gantry.runtime.v1");
    }
    /// `gantry.streamer.v1`
    pub mod streamer {
        tonic::include_proto!("gantry.streamer.v1");
    }
    /// `gantry.capabilities.v1`
    pub mod capabilities {
        tonic::include_proto!("gantry.capabilities.v1");
    }
    /// `gantry.local.v1`
    pub mod local {
        tonic::include_proto!("gantry.local.v1");
    }
}
