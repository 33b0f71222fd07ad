//! The present: the system's clock, or one that a test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use domain::Timestamp;

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
