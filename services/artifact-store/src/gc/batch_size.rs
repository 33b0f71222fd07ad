//! The batch size of the collector, adapted to limit the time for which a batch holds locks.

use std::time::Duration;

use crate::app::Store;

/// Batch size of one step of a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchSize {
    /// Number of rows in the next batch.
    pub(super) rows: u64,
    /// Target duration of a batch.
    aim: Duration,
    /// Minimum number of rows, however slow the database is.
    fewest: u64,
}

/// Maximum number of rows in a batch.
const MAX: u64 = 10_000;

impl BatchSize {
    /// Returns the initial batch size.
    pub(super) fn of(store: &Store) -> Self {
        if store.db.is_sqlite() {
            // All writers wait for the whole batch.
            Self { rows: 100, aim: Duration::from_millis(10), fewest: 20 }
        } else {
            // Only transactions that need one of the batch's rows wait for it.
            Self { rows: 2000, aim: Duration::from_millis(80), fewest: 500 }
        }
    }

    /// Adapts the batch size after a batch that took `took`. It at most doubles.
    pub(super) fn adapt(&mut self, took: Duration) {
        let fits = self.aim.as_secs_f64() / took.as_secs_f64().max(1e-6);
        let rows = self.rows as f64 * fits.clamp(0.1, 2.0);
        self.rows = (rows as u64).clamp(self.fewest, MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_size_converges_to_target_duration() {
        let mut pace = BatchSize { rows: 500, aim: Duration::from_millis(40), fewest: 200 };
        let mut batches = Vec::new();
        for micros_a_row in [10, 100, 4] {
            for _ in 0..10 {
                pace.adapt(Duration::from_micros(pace.rows * micros_a_row));
            }
            batches.push(pace.rows);
        }
        assert_eq!(batches, [4000, 400, 10_000]);
        // A single slow batch reduces the size to at most a tenth.
        pace.adapt(Duration::from_secs(10));
        assert_eq!(pace.rows, 1000);
        for _ in 0..10 {
            pace.adapt(Duration::from_secs(10));
        }
        assert_eq!(pace.rows, 200);
    }
}
