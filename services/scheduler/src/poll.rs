//! Ticks of the loops that poll the database.
//!
//! All loops of a replica share the ticks, so that an idle replica wakes up once per tick.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::Config;

/// Number of ticks between two polls of an idle replica that has its database to itself. Only this
/// process changes the database then, and it notifies its loops.
const IDLE_TICKS: u32 = 10;

/// Ticks at intervals of [`Config::poll`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PollTicks {
    start: Instant,
    interval: Duration,
    /// Whether no other replica uses the database.
    is_alone: bool,
}

impl PollTicks {
    /// Starts the ticks. `is_alone`: no other replica uses the database.
    pub(crate) fn start(config: &Config, is_alone: bool) -> Self {
        Self { start: Instant::now(), interval: config.poll, is_alone }
    }

    /// Returns whether no other replica uses the database.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Returns the first tick after `at`.
    pub(crate) fn after(&self, at: Instant) -> Instant {
        let passed = at.saturating_duration_since(self.start).as_nanos() / self.interval.as_nanos();
        let next = u32::try_from(passed).unwrap_or(u32::MAX).saturating_add(1);
        self.start + self.interval.saturating_mul(next)
    }

    /// Returns the tick after `at` for a loop that has nothing to do until it is notified.
    pub(crate) fn idle_after(&self, at: Instant) -> Instant {
        let after = self.after(at);
        if self.is_alone { after + self.interval * (IDLE_TICKS - 1) } else { after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(is_alone: bool) -> PollTicks {
        PollTicks { start: Instant::now(), interval: Duration::from_secs(1), is_alone }
    }

    #[test]
    fn loops_share_ticks() {
        let ticks = ticks(false);
        let at = |millis| ticks.start + Duration::from_millis(millis);
        assert_eq!(ticks.after(at(0)), at(1000));
        assert_eq!(ticks.after(at(2999)), at(3000));
        assert_eq!(ticks.after(at(3000)), at(4000));
    }

    #[test]
    fn only_replica_polls_rarely_when_idle() {
        let (alone, shared) = (ticks(true), ticks(false));
        assert_eq!(alone.idle_after(alone.start), alone.start + Duration::from_secs(10));
        assert_eq!(shared.idle_after(shared.start), shared.start + Duration::from_secs(1));
    }
}
