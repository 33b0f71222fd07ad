//! The rules: when owners let go, and what is garbage. Pure: rows in, verdicts out.

pub(crate) mod garbage;
pub(crate) mod retention;
