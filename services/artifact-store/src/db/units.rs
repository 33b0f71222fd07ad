//! Durations and sizes, as columns have them.

use std::time::Duration;

/// A duration, in microseconds.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// A size, for a column.
pub(crate) fn size_column(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A size from a column.
pub(crate) fn size(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or(0)
}
