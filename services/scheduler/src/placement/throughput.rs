//! Throughput: how long slots are in use, and how fast they become free, as seen by this replica.
//!
//! Two numbers are kept for each worker: how many slots became free, and for how long slots were in
//! use. Both decay with [`HALF_LIFE`], so old data is forgotten and idle times do not distort the
//! estimate. The number of freed slots comes from the worker's row. It includes slots that were
//! granted again immediately, by any replica.

use std::time::Duration;

use domain::Timestamp;

/// Half-life of observations.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// Least number of freed slots for an estimate.
const ENOUGH: f64 = 0.5;

/// Observations of one worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turnover {
    freed: f64,
    held_seconds: f64,
    /// Number of slots that became free since the worker registered.
    ended: u64,
    /// Time of the observation.
    at: Timestamp,
}

impl Turnover {
    /// Starts observing a worker on which `ended` slots became free before.
    pub(crate) fn new(ended: u64, at: Timestamp) -> Self {
        Self { freed: 0.0, held_seconds: 0.0, ended, at }
    }

    /// Adds an observation: `tasks` slots in use, after `before`, and `ended` freed so far.
    pub(crate) fn observed(self, before: u32, tasks: u32, ended: u64, now: Timestamp) -> Self {
        let freed = ended.saturating_sub(self.ended);
        match before == tasks && freed == 0 {
            true => self,
            false => Self { ended: self.ended.max(ended), ..self.passed(before, now).freed(freed) },
        }
    }

    /// Advances the observation to `now`. `tasks`: number of slots in use since.
    pub(crate) fn passed(self, tasks: u32, now: Timestamp) -> Self {
        let (passed, half_life) = (now.since(self.at).as_secs_f64(), HALF_LIFE.as_secs_f64());
        let left = (-passed / half_life).exp2();
        let held = f64::from(tasks) * (1.0 - left) * half_life / std::f64::consts::LN_2;
        Self {
            freed: self.freed * left,
            held_seconds: self.held_seconds * left + held,
            at: now.max(self.at),
            ..self
        }
    }

    /// Returns the time of the last change, or of the first observation.
    pub(crate) fn at(self) -> Timestamp {
        self.at
    }

    /// Adds slots that just became free.
    fn freed(self, slots: u64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "an estimate needs no exact value")]
        let slots = slots as f64;
        Self { freed: self.freed + slots, ..self }
    }
}

/// The sum of the observations of several workers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Pace {
    freed: f64,
    held_seconds: f64,
    tasks: f64,
    pub(crate) workers: usize,
}

impl Pace {
    /// Adds a worker on which `tasks` slots are in use.
    pub(crate) fn add(&mut self, turnover: Turnover, tasks: u32) {
        self.freed += turnover.freed;
        self.held_seconds += turnover.held_seconds;
        self.tasks += f64::from(tasks);
        self.workers += 1;
    }

    /// Returns the average time for which a slot is in use. `None`: too few observations.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        let is_known = self.freed >= ENOUGH;
        is_known.then(|| Duration::try_from_secs_f64(self.held_seconds / self.freed).ok()).flatten()
    }

    /// Estimates the time until `slots` slots have become free. `None`: unknown.
    pub(crate) fn until_freed(&self, slots: u64) -> Option<Duration> {
        #[expect(clippy::cast_precision_loss, reason = "an estimate needs no exact value")]
        let slots = slots as f64;
        let held_for = self.held_for()?;
        if self.tasks < 1.0 {
            return None;
        }
        Duration::try_from_secs_f64(slots * held_for.as_secs_f64() / self.tasks).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    #[test]
    fn estimate_follows_observed_turnover() {
        // Two slots, each in use for 20 s, for 200 s. Then an idle hour. Then the same again.
        let mut turnover = Turnover::new(7, at(0));
        let ended = |second: i64| 7 + u64::try_from(second).expect("positive") / 10;
        for second in (10..=200).step_by(10) {
            // One slot becomes free and is granted again at the same moment.
            turnover = turnover.observed(2, 2, ended(second), at(second));
        }
        let first = turnover.passed(0, at(3800));
        let mut second = first;
        for seconds in (3810..=4000).step_by(10) {
            second = second.observed(2, 2, ended(seconds - 3600), at(seconds));
        }
        let pace = |turnover: Turnover| {
            let mut pace = Pace::default();
            pace.add(turnover, 2);
            pace
        };
        for pace in [pace(turnover), pace(second)] {
            let held_for = pace.held_for().expect("known").as_secs_f64();
            assert!((18.0..22.0).contains(&held_for), "{held_for}");
            let third = pace.until_freed(3).expect("known").as_secs_f64();
            assert!((27.0..33.0).contains(&third), "{third}");
        }
        assert_eq!(pace(turnover.passed(0, at(7200))).until_freed(1), None, "too long ago");
        assert_eq!(
            pace(Turnover::new(7, at(0)).passed(2, at(100))).until_freed(1),
            None,
            "no slot became free"
        );
        let mut idle = Pace::default();
        idle.add(turnover, 0);
        assert_eq!(idle.until_freed(1), None, "no slot is in use");
    }
}
