//! Test support that several crates share. The helpers panic on failure, because a test whose setup
//! fails has failed.

pub mod bad_input;
pub mod baggageclaim;
pub mod conformance;
pub mod databases;
pub mod fake;
pub mod garden;
pub mod hostile;
pub mod seeds;
pub mod tables;
pub mod terminal;
