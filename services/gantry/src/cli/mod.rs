//! Command-line syntax: commands, options and their values.

pub(crate) mod addresses;
pub(crate) mod args;
pub(crate) mod contexts;
pub(crate) mod detach_keys;
pub(crate) mod environment;
pub(crate) mod interactive;
pub(crate) mod renamed;
pub(crate) mod values;
pub(crate) mod words;
