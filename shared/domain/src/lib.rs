//! Domain types of Gantry that all services share: ids, workloads, workers, digests and timestamps.
//!
//! Every service uses this crate. It does not depend on tokio, tonic or SQL.

pub mod digest;
mod error_chain;
pub mod ids;
pub mod time;
pub mod worker;
pub mod workload;

pub use digest::Digest;
pub use error_chain::error_chain;
pub use ids::*;
pub use time::Timestamp;
