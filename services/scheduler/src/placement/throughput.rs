//! Throughput: how long slots are held, and so how fast they come free, as far as this replica saw.
//!
//! For each worker two numbers are kept: how many of its slots came free, and for how long slots of it were held. Both count for half after
//! [`HALF_LIFE`]. So what was long ago is forgotten, and a worker that had nothing to do meanwhile says nothing wrong. How many came free is
//! counted in the worker's row, so those that went on to somebody else at once are seen, at whichever replica that was.

use std::time::Duration;

use domain::Timestamp;

/// After how long what was seen counts for half.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// Below how many slots that came free nothing is concluded.
const ENOUGH: f64 = 0.5;

/// What was seen of the slots of one worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turnover {
    freed: f64,
    held_seconds: f64,
    /// How many slots had come free since the worker registered.
    ended: u64,
    /// As of when.
    at: Timestamp,
}

impl Turnover {
    /// Of a worker that is seen for the first time, on which so many slots came free before.
    pub(crate) fn new(ended: u64, at: Timestamp) -> Self {
        Self { freed: 0.0, held_seconds: 0.0, ended, at }
    }

    /// The same when `tasks` slots are held, after `before` were, and `ended` have come free so far.
    pub(crate) fn observed(self, before: u32, tasks: u32, ended: u64, now: Timestamp) -> Self {
        let freed = ended.saturating_sub(self.ended);
        match before == tasks && freed == 0 {
            true => self,
            false => Self { ended: self.ended.max(ended), ..self.passed(before, now).freed(freed) },
        }
    }

    /// The same now. `tasks`: how many slots were held meanwhile.
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

    /// When slots were last taken or came free, or it was seen for the first time.
    pub(crate) fn at(self) -> Timestamp {
        self.at
    }

    /// So many slots came free just now.
    fn freed(self, slots: u64) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "it is a guess")]
        let slots = slots as f64;
        Self { freed: self.freed + slots, ..self }
    }
}

/// The same of several workers together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Pace {
    freed: f64,
    held_seconds: f64,
    tasks: f64,
    pub(crate) workers: usize,
}

impl Pace {
    /// One worker more, on which `tasks` slots are held now.
    pub(crate) fn add(&mut self, turnover: Turnover, tasks: u32) {
        self.freed += turnover.freed;
        self.held_seconds += turnover.held_seconds;
        self.tasks += f64::from(tasks);
        self.workers += 1;
    }

    /// For how long a slot is held. `None`: too few came free to say.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        let is_known = self.freed >= ENOUGH;
        is_known.then(|| Duration::try_from_secs_f64(self.held_seconds / self.freed).ok()).flatten()
    }

    /// After how long so many slots have come free. `None`: that cannot be said.
    pub(crate) fn until_freed(&self, slots: u64) -> Option<Duration> {
        #[expect(clippy::cast_precision_loss, reason = "it is a guess")]
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
    fn slots_come_free_as_fast_as_they_did_while_they_were_held() {
        // Two slots, each held for 20 s, for 200 s; then nothing for an hour; then the same again.
        let mut turnover = Turnover::new(7, at(0));
        let ended = |second: i64| 7 + u64::try_from(second).expect("positive") / 10;
        for second in (10..=200).step_by(10) {
            // One comes free, and goes on to somebody else in the same moment.
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
        assert_eq!(pace(Turnover::new(7, at(0)).passed(2, at(100))).until_freed(1), None, "none came free");
        let mut idle = Pace::default();
        idle.add(turnover, 0);
        assert_eq!(idle.until_freed(1), None, "none is held");
    }
}
