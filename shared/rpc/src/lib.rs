//! The gRPC layer of all services: generated code, conversions to and from `domain`, error details,
//! signed tokens and clients.
//!
//! A handler parses its request with this crate, calls a domain function, and builds its response
//! with this crate. Code below the handlers uses neither protobuf types nor `Status`.

pub mod client;
pub mod compression;
mod convert;
mod outgoing;
pub mod owner;
pub mod page;
mod reason;
mod replicas;
pub mod small_tree;
pub mod spec;
pub mod token;
pub mod trace;
pub mod tree;

pub use client::Peer;
pub use convert::*;
/// Trait of all generated messages.
pub use prost::Message;
pub use reason::{Reason, Refusal, invalid_field, unavailable};
pub use replicas::ReplicaChannel;

/// Encoded descriptors of all protos, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Generated code. The comments in `proto/` document it.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, rustdoc::all)]
pub mod pb {
    /// Package `gantry.scheduler.v1`.
    pub mod scheduler {
        tonic::include_proto!("gantry.scheduler.v1");
    }
    /// Package `gantry.artifacts.v1`.
    pub mod artifacts {
        tonic::include_proto!("gantry.artifacts.v1");
    }
    /// Package `gantry.runtime.v1`.
    pub mod runtime {
        tonic::include_proto!("gantry.runtime.v1");
    }
    /// Package `gantry.streamer.v1`.
    pub mod streamer {
        tonic::include_proto!("gantry.streamer.v1");
    }
    /// Package `gantry.capabilities.v1`.
    pub mod capabilities {
        tonic::include_proto!("gantry.capabilities.v1");
    }
    /// Package `gantry.local.v1`.
    pub mod local {
        tonic::include_proto!("gantry.local.v1");
    }
}

/// The path by which generated code of other packages refers to `gantry.artifacts.v1`.
mod artifacts {
    pub(crate) mod v1 {
        pub(crate) use crate::pb::artifacts::*;
    }
}

/// The path by which generated code of other packages refers to `gantry.scheduler.v1`.
mod scheduler {
    pub(crate) mod v1 {
        pub(crate) use crate::pb::scheduler::*;
    }
}
