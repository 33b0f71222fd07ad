//! Drift: where the leases here and what workers say of them disagree for longer than messages take. It must not be.
//!
//! What differs for a moment is how each side hears of the other, and is put right by [`crate::api`]'s Synchronize. What still differs
//! after the patience that a worker has is counted, for as long as its gateway says so on this replica.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::Timestamp;
use uuid::Uuid;

/// How many leases are disagreed about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// They live here, and their worker has heard of them and does not have them.
    pub(crate) missing: usize,
    /// They have ended here, and their worker says that they run.
    pub(crate) stray: usize,
}

/// What all gateways say that this replica hears. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Drift(Arc<Mutex<HashMap<Uuid, Count>>>);

impl Drift {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Count>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Over all gateways.
    pub(crate) fn total(&self) -> Count {
        self.lock().values().fold(Count::default(), |sum, one| Count {
            missing: sum.missing + one.missing,
            stray: sum.stray + one.stray,
        })
    }

    /// For one stream of a gateway.
    pub(crate) fn of_stream(&self) -> OfStream {
        OfStream {
            drift: self.clone(),
            stream: Uuid::now_v7(),
            missing: HashMap::new(),
            stray: HashMap::new(),
        }
    }
}

/// What the gateway of one stream says.
#[derive(Debug)]
pub(crate) struct OfStream {
    drift: Drift,
    stream: Uuid,
    /// Since when.
    missing: HashMap<Uuid, Timestamp>,
    stray: HashMap<Uuid, Timestamp>,
}

impl OfStream {
    /// These leases are disagreed about now. What is so for longer than `patience` counts.
    pub(crate) fn note(
        &mut self,
        missing: &HashSet<Uuid>,
        stray: &HashSet<Uuid>,
        patience: Duration,
        now: Timestamp,
    ) {
        let long = |since: &mut HashMap<Uuid, Timestamp>, present: &HashSet<Uuid>| {
            since.retain(|lease, _| present.contains(lease));
            present.iter().for_each(|lease| _ = since.entry(*lease).or_insert(now));
            since.values().filter(|since| now.since(**since) >= patience).count()
        };
        let count = Count { missing: long(&mut self.missing, missing), stray: long(&mut self.stray, stray) };
        let mut counts = self.drift.lock();
        let before = match count == Count::default() {
            true => counts.remove(&self.stream),
            false => counts.insert(self.stream, count),
        };
        drop(counts);
        if count != Count::default() && before != Some(count) {
            let Count { missing, stray } = count;
            tracing::error!(missing, stray, "leases and what their worker says of them do not agree");
        }
    }
}

impl Drop for OfStream {
    fn drop(&mut self) {
        self.drift.lock().remove(&self.stream);
    }
}

#[cfg(test)]
mod tests;
