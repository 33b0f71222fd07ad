//! End of a command: error messages, exit codes and signals.
//!
//! All other chapters use this one. It uses no other chapter.

pub(crate) mod error;
pub(crate) mod exit_code;
pub(crate) mod signals;
