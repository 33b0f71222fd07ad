//! Command-line syntax: commands, options and their values.

pub(crate) mod addresses;
pub(crate) mod args;
pub(crate) mod environment;
pub(crate) mod renamed;
pub(crate) mod values;
