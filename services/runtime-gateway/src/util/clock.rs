//! The clock for contact with the scheduler. It includes the time that the machine was suspended.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the current time of `CLOCK_BOOTTIME`.
pub(crate) fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}
