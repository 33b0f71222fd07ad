//! The life of workers, from registration to removal.
//!
//! Loops of every replica execute due steps, and operations carry out the calls of operators. Every
//! step is guarded by the rows and idempotent, so replicas may repeat each other's steps.

pub(crate) mod departure;
pub(crate) mod heartbeat_batches;
mod lost_leases;
mod operations;
pub(crate) mod registration;
pub(crate) mod timeouts;

use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use crate::context::Context;
use crate::store_client::Store;

/// Shared state of the loops and operations on workers. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Lifecycle {
    pub(crate) context: Context,
    pub(crate) store: Store,
    /// The revision of workers up to which all leases of lost workers and past incarnations were
    /// ended.
    stranded_ended: Arc<AtomicI64>,
}

impl Lifecycle {
    pub(crate) fn new(context: Context, store: Store) -> Self {
        Self { context, store, stranded_ended: Arc::default() }
    }
}
