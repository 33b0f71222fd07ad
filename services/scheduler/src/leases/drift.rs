//! Drift: lasting disagreement between the scheduler's leases and the leases that workers report.
//!
//! Short disagreement is normal while messages are in transit, and [`crate::api`]'s Synchronize
//! resolves it. Disagreement that outlasts the given patience is counted, as long as the gateway
//! reports it to this replica. A count other than 0 is a defect.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::Timestamp;
use uuid::Uuid;

/// Number of leases in disagreement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    /// Live leases that the worker has received and does not report.
    pub(crate) missing: usize,
    /// Ended leases that the worker reports as running.
    pub(crate) stray: usize,
}

/// The counts of all gateway streams of this replica. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Drift(Arc<Mutex<HashMap<Uuid, Count>>>);

impl Drift {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Count>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sum over all streams.
    pub(crate) fn total(&self) -> Count {
        self.lock().values().fold(Count::default(), |sum, one| Count {
            missing: sum.missing + one.missing,
            stray: sum.stray + one.stray,
        })
    }

    /// Starts counting for one stream of a gateway.
    pub(crate) fn of_stream(&self) -> StreamDrift {
        StreamDrift {
            drift: self.clone(),
            stream: Uuid::now_v7(),
            missing: HashMap::new(),
            stray: HashMap::new(),
        }
    }
}

/// The disagreement with the gateway of one stream.
#[derive(Debug)]
pub(crate) struct StreamDrift {
    drift: Drift,
    stream: Uuid,
    /// Missing and stray leases, with the time since when.
    missing: HashMap<Uuid, Timestamp>,
    stray: HashMap<Uuid, Timestamp>,
}

impl StreamDrift {
    /// Records the leases in disagreement now. Those in disagreement for longer than `patience`
    /// count.
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
            tracing::error!(missing, stray, "scheduler and worker disagree on leases");
        }
    }
}

impl Drop for StreamDrift {
    fn drop(&mut self) {
        self.drift.lock().remove(&self.stream);
    }
}

#[cfg(test)]
mod tests;
