//! The clock that everything about contact is told by: it counts the time that the machine was asleep, too.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The present by `CLOCK_BOOTTIME`.
pub(crate) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
