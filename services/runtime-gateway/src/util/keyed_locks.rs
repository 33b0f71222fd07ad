//! Locks of a runtime.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// Keeps operations on the same handle apart.
#[derive(Debug)]
pub(crate) struct Locks([Arc<tokio::sync::Mutex<()>>; 64]);

impl Locks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Arc::default()))
    }

    /// Waits for its turn. Nobody holds two, so nobody waits for each other.
    pub(crate) async fn lock(&self, handle: Uuid) -> tokio::sync::OwnedMutexGuard<()> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(handle);
        let slot = usize::try_from(hash % self.0.len() as u64).unwrap_or(0);
        Arc::clone(&self.0[slot]).lock_owned().await
    }
}

/// Locks `mutex`, which guards a value that no panic leaves half changed. Held for a moment, never across an await.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
