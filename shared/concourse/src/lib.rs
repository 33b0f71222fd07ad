//! Clients for the two servers of an unmodified Concourse worker: Garden, which runs containers,
//! and Baggageclaim, which stores volumes.
//!
//! The crate has the messages of both protocols and a client for each. It makes no decisions. The
//! `garden` runtime of the gateway uses it.

pub mod baggageclaim;
mod exchange;
pub mod garden;
