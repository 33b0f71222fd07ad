//! The life of workers, and of what they run: from registration to removal.
//!
//! Loops of every replica do what is due; operations do what an operator asks for. Every step is
//! guarded by the rows and may be repeated, so replicas may do the same at once.

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

/// What loops and operations on workers share. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Lifecycle {
    pub(crate) context: Context,
    pub(crate) store: Store,
    /// The revision of workers up to which no lease is left of one that is lost, or of an
    /// incarnation that is over.
    orphans_ended: Arc<AtomicI64>,
}

impl Lifecycle {
    pub(crate) fn new(context: Context, store: Store) -> Self {
        Self { context, store, orphans_ended: Arc::default() }
    }
}
