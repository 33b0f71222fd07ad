//! What tests of several crates share. It panics where a test would: a test that cannot be set up has failed.

pub mod bad_input;
pub mod baggageclaim;
pub mod conformance;
pub mod databases;
pub mod fake;
pub mod garden;
pub mod hostile;
pub mod seeds;
pub mod tables;
