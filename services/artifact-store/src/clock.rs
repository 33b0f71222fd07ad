//! The present: the system's clock, or one that a test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use domain::Timestamp;
use rand::RngExt;

/// Tells the present. Clones tell the same.
#[derive(Debug, Clone, Default)]
pub struct Clock(Option<Arc<AtomicI64>>);

impl Clock {
    /// The system's.
    #[must_use]
    pub fn system() -> Self {
        Self(None)
    }

    /// One that stands still at `start` until it is moved.
    #[must_use]
    pub fn movable(start: Timestamp) -> Self {
        Self(Some(Arc::new(AtomicI64::new(start.0))))
    }

    /// Moves a movable clock on. The system's clock stays as it is.
    pub fn advance(&self, by: Duration) {
        if let Some(clock) = &self.0 {
            let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
            clock.fetch_add(by, Ordering::SeqCst);
        }
    }

    /// The present.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.0.as_ref().map_or_else(Timestamp::now, |clock| Timestamp(clock.load(Ordering::SeqCst)))
    }
}

/// `interval`, give or take a fifth.
pub(crate) fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::rng().random_range(0.8..1.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_spread_by_a_fifth_and_no_more() {
        let interval = Duration::from_secs(10);
        let drawn: Vec<_> = (0..10_000).map(|_| jittered(interval)).collect();
        assert!(drawn.iter().all(|drawn| (Duration::from_secs(8)..Duration::from_secs(12)).contains(drawn)));
        // Over the whole of it: that none of 10,000 falls into a twentieth does not happen.
        assert!(drawn.iter().any(|drawn| *drawn < Duration::from_millis(8_200)));
        assert!(drawn.iter().any(|drawn| *drawn > Duration::from_millis(11_800)));
    }
}
