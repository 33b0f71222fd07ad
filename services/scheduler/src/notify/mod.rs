//! Notifications: a hint that something changed, for tasks of this replica and for other replicas.
//!
//! Any of them may be lost. Each task that waits for one also polls the database.

pub(crate) mod changes;
pub(crate) mod cluster;
pub(crate) mod local;
pub(crate) mod request;
