//! How a gateway comes to attend a worker: this machine, or a Concourse worker.

pub(crate) mod concourse;
pub(crate) mod machine;
