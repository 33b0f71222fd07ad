//! Locks by handle, and locking of a mutex that ignores poisoning.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// Locks that serialize operations on the same handle.
#[derive(Debug)]
pub(crate) struct Locks([Arc<tokio::sync::Mutex<()>>; 64]);

impl Locks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Arc::default()))
    }

    /// Waits for the lock of `handle`. A caller holds at most one of these locks, so they cannot
    /// deadlock.
    pub(crate) async fn lock(&self, handle: Uuid) -> tokio::sync::OwnedMutexGuard<()> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(handle);
        let slot = usize::try_from(hash % self.0.len() as u64).unwrap_or(0);
        Arc::clone(&self.0[slot]).lock_owned().await
    }
}

/// Locks by id that may be held for long. Each id has its own lock.
#[derive(Debug, Default)]
pub(crate) struct IdLocks(Mutex<HashMap<Uuid, Arc<tokio::sync::Mutex<()>>>>);

impl IdLocks {
    /// Waits for the lock of `id`.
    pub(crate) async fn lock(&self, id: Uuid) -> tokio::sync::OwnedMutexGuard<()> {
        let of_id = {
            let mut locks = lock(&self.0);
            // A lock that no task holds or waits for has one owner.
            locks.retain(|_, other| Arc::strong_count(other) > 1);
            Arc::clone(locks.entry(id).or_default())
        };
        of_id.lock_owned().await
    }
}

/// Locks `mutex` even if it is poisoned, because no panic leaves its value half changed. The guard
/// must not be held across an await.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
