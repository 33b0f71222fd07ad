//! The loops that keep a worker in step with the scheduler and the artifact store.

pub(crate) mod base_type_import;
pub(crate) mod disk_space;
pub(crate) mod disk_usage;
pub(crate) mod inventory_sync;
pub(crate) mod scheduler_stream;
