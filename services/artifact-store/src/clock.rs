//! The clock: the system's clock, or a clock that a test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use domain::Timestamp;
use rand::RngExt;

/// Source of the current time. Clones share the same time.
#[derive(Debug, Clone, Default)]
pub struct Clock(Option<Arc<AtomicI64>>);

impl Clock {
    /// Returns the system's clock.
    #[must_use]
    pub fn system() -> Self {
        Self(None)
    }

    /// Returns a clock that stands at `start` until it is advanced.
    #[must_use]
    pub fn movable(start: Timestamp) -> Self {
        Self(Some(Arc::new(AtomicI64::new(start.0))))
    }

    /// Advances a movable clock. Has no effect on the system's clock.
    pub fn advance(&self, by: Duration) {
        if let Some(clock) = &self.0 {
            let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
            clock.fetch_add(by, Ordering::SeqCst);
        }
    }

    /// Returns the current time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.0.as_ref().map_or_else(Timestamp::now, |clock| Timestamp(clock.load(Ordering::SeqCst)))
    }
}

/// Returns `interval`, varied at random by up to a fifth.
pub(crate) fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::rng().random_range(0.8..1.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_varies_interval_by_a_fifth() {
        let interval = Duration::from_secs(10);
        let drawn: Vec<_> = (0..10_000).map(|_| jittered(interval)).collect();
        assert!(drawn.iter().all(|drawn| (Duration::from_secs(8)..Duration::from_secs(12)).contains(drawn)));
        // Both ends of the range occur: 10,000 draws miss a twentieth of it with negligible
        // probability.
        assert!(drawn.iter().any(|drawn| *drawn < Duration::from_millis(8_200)));
        assert!(drawn.iter().any(|drawn| *drawn > Duration::from_millis(11_800)));
    }
}
