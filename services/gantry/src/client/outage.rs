//! Outages of services: how long a command retries, when it says so, and when it gives up.
//!
//! Calls, transfers and streams all use [`Outage`]. The time starts at the first failure, because a
//! stream may carry nothing for hours before it breaks, and a machine may sleep for hours.

use std::time::Duration;

use tokio::time::Instant;

use crate::render::table::duration;

/// Longest outage that calls and transfers wait out, if `--patience` is not given.
const CALLS: Duration = Duration::from_secs(60);
/// Longest outage that the stream of a workload waits out, if `--patience` is not given. The term
/// of an attached process is equally long, so the process runs on meanwhile.
const STREAMS: Duration = Duration::from_secs(5 * 60);
/// Time for which a stream must have been open to prove that the service works again.
const STEADY: Duration = Duration::from_secs(2);
/// Duration of an outage before a message is printed.
const NOTICE_AFTER: Duration = Duration::from_secs(3);
/// First pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Longest outages that a command waits out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    calls: Duration,
    streams: Duration,
}

impl Patience {
    /// Returns the patience of `--patience`, or the defaults.
    pub(crate) fn new(given: Option<Duration>) -> Self {
        Self { calls: given.unwrap_or(CALLS), streams: given.unwrap_or(STREAMS) }
    }

    /// Makes an outage of a call or transfer, which has not begun.
    pub(crate) fn of_call(self) -> Outage {
        Outage::new(self.calls)
    }

    /// Makes an outage of the stream of a workload, which has not begun.
    pub(crate) fn of_stream(self) -> Outage {
        Outage::new(self.streams)
    }
}

/// The failures of one operation since it last worked.
pub(crate) struct Outage {
    patience: Duration,
    since: Option<Instant>,
    pause: Duration,
    is_reported: bool,
}

impl Outage {
    fn new(patience: Duration) -> Self {
        Self { patience, since: None, pause: FIRST_PAUSE, is_reported: false }
    }

    /// Records that the service works.
    pub(crate) fn over(&mut self) {
        if self.since.is_some() {
            *self = Self::new(self.patience);
        }
    }

    /// Records the failure of an attempt. `opened`: the time at which the service opened the
    /// stream of the attempt. Returns whether the command goes on trying.
    pub(crate) fn goes_on(&mut self, opened: Option<Instant>) -> bool {
        if opened.is_some_and(|opened| opened.elapsed() >= STEADY) {
            self.over();
        }
        let now = Instant::now();
        now.duration_since(*self.since.get_or_insert(now)) < self.patience
    }

    /// Returns the patience as text if a message must be printed now. This happens once per outage.
    pub(crate) fn news(&mut self) -> Option<String> {
        let is_news = !self.is_reported && self.since.is_some_and(|since| since.elapsed() >= NOTICE_AFTER);
        self.is_reported |= is_news;
        is_news.then(|| duration(self.patience))
    }

    /// Pauses before the next attempt, longer each time.
    pub(crate) async fn pause(&mut self) {
        let left = self.since.map_or(self.pause, |since| self.patience.saturating_sub(since.elapsed()));
        // The last attempt is made when the patience ends.
        tokio::time::sleep(self.pause.min(left)).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outage() -> Outage {
        Patience::new(None).of_stream()
    }

    #[tokio::test(start_paused = true)]
    async fn outage_starts_at_its_first_failure() {
        let mut outage = outage();
        tokio::time::advance(STREAMS * 10).await;
        assert!(outage.goes_on(None));
        tokio::time::advance(STREAMS / 2).await;
        assert!(outage.goes_on(None));
        tokio::time::advance(STREAMS / 2).await;
        assert!(!outage.goes_on(None));
    }

    #[tokio::test(start_paused = true)]
    async fn steady_stream_ends_outage() {
        let mut outage = outage();
        assert!(outage.goes_on(None));
        let opened = Instant::now();
        tokio::time::advance(STREAMS).await;
        assert!(outage.goes_on(Some(opened)));
        let opened = Instant::now();
        tokio::time::advance(STREAMS - STEADY).await;
        tokio::time::advance(STEADY / 2).await;
        assert!(outage.goes_on(Some(opened)));
    }

    #[tokio::test(start_paused = true)]
    async fn outage_is_reported_once() {
        let mut outage = outage();
        assert!(outage.goes_on(None));
        assert_eq!(outage.news(), None);
        tokio::time::advance(NOTICE_AFTER).await;
        assert_eq!(outage.news().as_deref(), Some("5 min"));
        assert_eq!(outage.news(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn last_attempt_is_made_when_patience_ends() {
        let mut outage = Patience::new(Some(Duration::from_secs(9))).of_call();
        let began = Instant::now();
        while outage.goes_on(None) {
            outage.pause().await;
        }
        assert_eq!(began.elapsed(), Duration::from_secs(9));
        assert!(!Patience::new(Some(Duration::ZERO)).of_call().goes_on(None));
    }
}
