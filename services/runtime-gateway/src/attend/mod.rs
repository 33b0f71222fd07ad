//! How a gateway starts to attend a worker.

pub(crate) mod concourse;
pub(crate) mod machine;
