//! `gantry explain`: why a workload waits, what a lease is for, and why anything else is there or went.

pub(crate) mod lease;
pub(crate) mod store;
pub(crate) mod workload;
