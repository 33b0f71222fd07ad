//! Progress of a pull, shared between its tasks and its observers.

use std::sync::atomic::{AtomicU64, Ordering};

/// Progress of a pull.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    saved: AtomicU64,
}

impl Progress {
    /// Returns the bytes of all layers, as the registry stores them. 0: not known yet.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the bytes of layers that arrived or were stored already.
    #[must_use]
    pub fn done_bytes(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Returns the bytes of layers that were stored already.
    #[must_use]
    pub fn saved_bytes(&self) -> u64 {
        self.saved.load(Ordering::Relaxed)
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn save(&self, bytes: u64) {
        self.saved.fetch_add(bytes, Ordering::Relaxed);
        self.advance(bytes);
    }
}
