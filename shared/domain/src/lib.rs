//! The nouns of the suite and the rules that hold for them everywhere.
//!
//! What two services must agree on is here: typed ids, the spec of a workload, how a process ends, digests, instants,
//! and who may speak for a worker. Nothing here knows of tokio, tonic or SQL.

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
