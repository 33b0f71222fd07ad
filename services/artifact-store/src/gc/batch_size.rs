//! The size of a batch: as many rows as are done in a time that others may wait for them.

use std::time::Duration;

use crate::app::Store;

/// The pace of one step of a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchSize {
    /// How many rows the next batch has.
    pub(super) rows: u64,
    /// How long a batch shall take.
    aim: Duration,
    /// As many rows it has at least, however slow the database is.
    fewest: u64,
}

/// As many rows a batch has at most.
const MOST: u64 = 10_000;

impl BatchSize {
    /// The pace to begin with.
    pub(super) fn of(store: &Store) -> Self {
        if store.db.is_sqlite() {
            // A writer waits for the whole batch.
            Self { rows: 100, aim: Duration::from_millis(10), fewest: 20 }
        } else {
            // A transaction that needs one of its rows does.
            Self { rows: 2000, aim: Duration::from_millis(80), fewest: 500 }
        }
    }

    /// A batch took so long. The next one is at most twice as large.
    pub(super) fn took(&mut self, took: Duration) {
        let fits = self.aim.as_secs_f64() / took.as_secs_f64().max(1e-6);
        let rows = self.rows as f64 * fits.clamp(0.1, 2.0);
        self.rows = (rows as u64).clamp(self.fewest, MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_come_to_take_what_they_shall() {
        let mut pace = BatchSize { rows: 500, aim: Duration::from_millis(40), fewest: 200 };
        let mut batches = Vec::new();
        for micros_a_row in [10, 100, 4] {
            for _ in 0..10 {
                pace.took(Duration::from_micros(pace.rows * micros_a_row));
            }
            batches.push(pace.rows);
        }
        assert_eq!(batches, [4000, 400, 10_000]);
        // One that was held up by others does not make the next ones tiny.
        pace.took(Duration::from_secs(10));
        assert_eq!(pace.rows, 1000);
        for _ in 0..10 {
            pace.took(Duration::from_secs(10));
        }
        assert_eq!(pace.rows, 200);
    }
}
