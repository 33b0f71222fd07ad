//! The life of workers and of what runs on them: loops and operations from registration to removal.

pub(crate) mod departure;
pub(crate) mod heartbeats;
pub(crate) mod registration;
pub(crate) mod timeouts;
