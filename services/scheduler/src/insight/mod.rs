//! Answers to *why*: explanations, the demand for capacity, and metrics. Nothing here changes a
//! row.

pub(crate) mod capacity;
pub(crate) mod explain;
pub(crate) mod metrics;
