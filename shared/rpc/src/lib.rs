//! Everything that touches the shape of the wire.

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
}
