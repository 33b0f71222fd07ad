//! The transfer rate of a copy.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time over which a rate is measured.
const WINDOW: Duration = Duration::from_secs(5);

/// The transfer rate of a copy over the last seconds.
#[derive(Debug, Default)]
pub(crate) struct Rate(VecDeque<(Instant, u64)>);

impl Rate {
    /// Returns the rate in bytes per second, after `bytes` were transferred in all.
    pub(crate) fn at(&mut self, now: Instant, bytes: u64) -> u64 {
        while self.0.len() > 1 && self.0.front().is_some_and(|(then, _)| now.duration_since(*then) > WINDOW) {
            self.0.pop_front();
        }
        // A few samples per second are sufficient.
        if self.0.back().is_none_or(|(last, _)| now.duration_since(*last) >= WINDOW / 50) {
            self.0.push_back((now, bytes));
        }
        let Some((then, before)) = self.0.front() else { return 0 };
        let millis = u64::try_from(now.duration_since(*then).as_millis()).unwrap_or(u64::MAX);
        bytes.saturating_sub(*before).saturating_mul(1000) / millis.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_that_of_the_last_few_seconds() {
        let start = Instant::now();
        let mut rate = Rate::default();
        let mut at = |seconds: u64, bytes| rate.at(start + Duration::from_secs(seconds), bytes);
        assert_eq!(at(0, 0), 0);
        assert_eq!(at(1, 1000), 1000);
        assert_eq!(at(4, 1000), 250);
        assert_eq!(at(60, 1000), 0);
        assert_eq!(at(61, 2000), 1000);
    }
}
