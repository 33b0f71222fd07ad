//! The runtime gateway: containers, volumes and processes of the workers it attends.
//!
//! [`host`] is the runtime for this machine. Every binary that may open it checks for its supervisor first:
//! see [`host::supervise`].

pub mod host;
