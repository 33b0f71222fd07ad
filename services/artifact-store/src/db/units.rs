//! Conversions of durations and sizes to and from columns.

use std::time::Duration;

/// Returns a duration in microseconds.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Converts a size to a column.
pub(crate) fn size_column(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Converts a column to a size.
pub(crate) fn size(bytes: i64) -> u64 {
    u64::try_from(bytes).unwrap_or(0)
}
