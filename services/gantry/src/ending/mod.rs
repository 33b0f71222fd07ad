//! End of a command: error messages, exit codes and signals.
//!
//! All other modules use this one. It uses no other module.

pub(crate) mod error;
pub(crate) mod exit_code;
pub(crate) mod signals;
