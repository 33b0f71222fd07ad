//! The nouns of the suite and the rules that hold for them everywhere.
//!
//! What two services must agree on is here: typed ids, the spec of a workload, how a process ends, digests, instants,
//! and who may speak for a worker. Nothing here knows of tokio, tonic or SQL.

mod chain;
pub mod digest;
pub mod ids;
pub mod time;
pub mod worker;
pub mod workload;

pub use chain::chain;
pub use digest::Digest;
pub use ids::*;
pub use time::Timestamp;
