//! The wire of an unmodified Concourse worker: a Garden server, which runs containers, and a Baggageclaim server, which keeps volumes.
//!
//! What is here are their messages, as they stand on the wire, and a client of each. It decides nothing; the gateway's `garden` runtime makes a
//! worker of it.

pub mod baggageclaim;
mod exchange;
pub mod garden;
