//! The command line as a caller writes it: commands, options and their values.

pub(crate) mod addresses;
pub(crate) mod args;
pub(crate) mod environment;
pub(crate) mod renamed;
pub(crate) mod values;
