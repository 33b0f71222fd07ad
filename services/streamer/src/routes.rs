//! The pairs of workers whose gateways cannot reach each other.
//!
//! [`crate::copy`] finds such a pair by trying, and records it when the streamer can carry the
//! bytes instead. Later copies of the same pair then pass through the streamer at once. A record
//! expires, so that a network that was repaired is noticed.
//!
//! Invariant: the number of records and the number of relays at a time are limited.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use domain::WorkerId;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Time for which copies of a pair pass through the streamer, before one is tried directly again.
const TERM: Duration = Duration::from_secs(5 * 60);
/// Most pairs that are recorded.
const MAX_PAIRS: usize = 10_000;
/// Most copies at a time whose bytes pass through this streamer. Each has queues and HTTP/2 windows
/// in memory.
const MAX_RELAYS: usize = 16;

/// A source and a destination.
type Pair = (WorkerId, WorkerId);

/// A pair of workers whose copies pass through this streamer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RelayedPair {
    pub(crate) from: WorkerId,
    pub(crate) to: WorkerId,
    /// Address at which `to` cannot reach the gateway of `from`.
    pub(crate) endpoint: String,
    pub(crate) error: String,
    /// Time until a copy is tried directly again.
    pub(crate) remaining: Duration,
}

/// The routes between workers, as this streamer has found them. Clones share them.
#[derive(Clone)]
pub(crate) struct Routes(Arc<Shared>);

struct Shared {
    relayed: Mutex<HashMap<Pair, Record>>,
    relays: Semaphore,
}

struct Record {
    endpoint: String,
    error: String,
    until: Instant,
}

impl Default for Routes {
    fn default() -> Self {
        Self(Arc::new(Shared { relayed: Mutex::default(), relays: Semaphore::new(MAX_RELAYS) }))
    }
}

impl Routes {
    /// Whether copies between two workers pass through the streamer.
    pub(crate) fn is_relayed(&self, from: WorkerId, to: WorkerId) -> bool {
        self.records().get(&(from, to)).is_some_and(|record| record.until > Instant::now())
    }

    /// Records that `to` cannot reach the gateway of `from` at `endpoint`.
    pub(crate) fn record(&self, from: WorkerId, to: WorkerId, endpoint: String, error: String) {
        let now = Instant::now();
        let mut records = self.records();
        records.retain(|_, record| record.until > now);
        if records.len() < MAX_PAIRS {
            records.insert((from, to), Record { endpoint, error, until: now + TERM });
        }
    }

    /// Forgets a pair, so that its next copy is tried directly.
    pub(crate) fn forget(&self, from: WorkerId, to: WorkerId) {
        self.records().remove(&(from, to));
    }

    /// Returns the recorded pairs, those that expire first before the others.
    pub(crate) fn list(&self) -> Vec<RelayedPair> {
        let now = Instant::now();
        let records = self.records();
        let pairs = records.iter().filter(|(_, record)| record.until > now);
        let pairs = pairs.map(|((from, to), Record { endpoint, error, until })| RelayedPair {
            from: *from,
            to: *to,
            endpoint: endpoint.clone(),
            error: error.clone(),
            remaining: *until - now,
        });
        let mut pairs: Vec<_> = pairs.collect();
        pairs.sort_by_key(|pair| (pair.remaining, pair.from, pair.to));
        pairs
    }

    /// Waits until the bytes of one more copy may pass through this streamer.
    pub(crate) async fn admit_relay(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.0.relays.acquire().await.ok()
    }

    fn records(&self) -> MutexGuard<'_, HashMap<Pair, Record>> {
        self.0.relayed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_pair_is_relayed_in_one_direction() {
        let (routes, one, two) = (Routes::default(), WorkerId::new(), WorkerId::new());
        routes.record(one, two, "http://one".to_owned(), "refused".to_owned());
        assert!(routes.is_relayed(one, two) && !routes.is_relayed(two, one));
        let [pair] = &routes.list()[..] else { panic!("one pair") };
        assert_eq!((pair.from, pair.to, pair.endpoint.as_str()), (one, two, "http://one"));
        assert!(pair.remaining <= TERM);
        routes.forget(one, two);
        assert!(!routes.is_relayed(one, two) && routes.list().is_empty());
    }

    #[test]
    fn expired_pair_is_not_relayed() {
        let (routes, one, two) = (Routes::default(), WorkerId::new(), WorkerId::new());
        routes.record(one, two, String::new(), String::new());
        routes.records().values_mut().for_each(|record| record.until = Instant::now());
        assert!(!routes.is_relayed(one, two) && routes.list().is_empty());
    }
}
