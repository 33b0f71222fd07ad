//! Outage of a service: retries of a broken stream, and the time after which the command gives up.
//!
//! The time starts at the first failure, because a stream may carry nothing for hours before it
//! breaks, and a machine may sleep for hours.

use std::time::Duration;

use tokio::time::Instant;

use crate::client::connect::Pause;

/// Longest outage that a command waits out. The term of an attached process is equally long, so the
/// process runs on meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5 * 60);
/// Time for which a stream must have been open to prove that the service works again.
const STEADY: Duration = Duration::from_secs(2);
/// Duration of an outage before a message is printed.
const NOTICE_AFTER: Duration = Duration::from_secs(3);

/// The failures of one stream since it last worked.
#[derive(Default)]
pub(crate) struct Outage {
    since: Option<Instant>,
    pause: Pause,
    is_reported: bool,
}

impl Outage {
    /// Records that the service works.
    pub(crate) fn over(&mut self) {
        if self.since.is_some() {
            *self = Self::default();
        }
    }

    /// Records the failure of a stream that the service had opened at `opened`. Returns whether the
    /// command goes on trying.
    pub(crate) fn goes_on(&mut self, opened: Option<Instant>) -> bool {
        if opened.is_some_and(|opened| opened.elapsed() >= STEADY) {
            self.over();
        }
        let now = Instant::now();
        now.duration_since(*self.since.get_or_insert(now)) < PATIENCE
    }

    /// Returns whether a message must be printed now. True once per outage.
    pub(crate) fn is_news(&mut self) -> bool {
        let is_news = !self.is_reported && self.since.is_some_and(|since| since.elapsed() >= NOTICE_AFTER);
        self.is_reported |= is_news;
        is_news
    }

    /// Pauses before the next attempt, longer each time.
    pub(crate) async fn pause(&mut self) {
        self.pause.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn outage_starts_at_its_first_failure() {
        let mut outage = Outage::default();
        tokio::time::advance(PATIENCE * 10).await;
        assert!(outage.goes_on(None));
        tokio::time::advance(PATIENCE / 2).await;
        assert!(outage.goes_on(None));
        tokio::time::advance(PATIENCE / 2).await;
        assert!(!outage.goes_on(None));
    }

    #[tokio::test(start_paused = true)]
    async fn steady_stream_ends_outage() {
        let mut outage = Outage::default();
        assert!(outage.goes_on(None));
        let opened = Instant::now();
        tokio::time::advance(PATIENCE).await;
        assert!(outage.goes_on(Some(opened)));
        let opened = Instant::now();
        tokio::time::advance(PATIENCE - STEADY).await;
        tokio::time::advance(STEADY / 2).await;
        assert!(outage.goes_on(Some(opened)));
    }

    #[tokio::test(start_paused = true)]
    async fn outage_is_reported_once() {
        let mut outage = Outage::default();
        assert!(outage.goes_on(None));
        assert!(!outage.is_news());
        tokio::time::advance(NOTICE_AFTER).await;
        assert!(outage.is_news());
        assert!(!outage.is_news());
    }
}
