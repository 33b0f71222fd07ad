//! The rules of retention and garbage, as pure functions from facts to verdicts.

pub(crate) mod garbage;
pub(crate) mod retention;
