//! How a gateway comes to attend a worker.

pub(crate) mod machine;
