//! How a command ends: errors in one sentence, exit codes, and signals.
//!
//! Every other chapter uses it. It uses none of them.

pub(crate) mod error;
pub(crate) mod exit_code;
pub(crate) mod signals;
