//! Limits on the workloads of a team that wait.
//!
//! [`crate::app`] asks for admission before it accepts a workload. The queue of this replica says what waits, also of what other replicas
//! accepted, and submissions that this replica works on count as if they waited. So one replica never exceeds a limit, and no submission locks
//! a row that others need. Several replicas together may exceed it by what the others accept before this one reads it, which is within the
//! poll interval. What is being placed at this moment does not wait. A workload that waits again after a failed attempt needs no admission.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Workloads of one team, and what their specs take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

impl Load {
    pub(crate) fn add(&mut self, other: Self) {
        self.count = self.count.saturating_add(other.count);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }

    /// Subtracts `load` from that of `team`, and forgets a team that has none left.
    pub(crate) fn take_from(loads: &mut HashMap<String, Self>, team: &str, load: Self) {
        let Some(left) = loads.get_mut(team) else { return };
        left.count = left.count.saturating_sub(load.count);
        left.bytes = left.bytes.saturating_sub(load.bytes);
        if left.count == 0 {
            loads.remove(team);
        }
    }
}

/// A team has as much waiting as it may have.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot queue another workload of team {team}: {count} wait, with {bytes} bytes of specs; {most_count} and {most_bytes} may"
)]
pub(crate) struct TooManyWaiting {
    pub(crate) team: String,
    count: u64,
    bytes: u64,
    most_count: u64,
    most_bytes: u64,
}

/// Admits submissions.
#[derive(Debug)]
pub(crate) struct Admissions {
    most: Load,
    /// Submissions that this replica works on, by team.
    under_way: Mutex<HashMap<String, Load>>,
}

impl Admissions {
    pub(crate) fn new(most_waiting: u64, most_waiting_bytes: u64) -> Arc<Self> {
        let most = Load { count: most_waiting, bytes: most_waiting_bytes };
        Arc::new(Self { most, under_way: Mutex::default() })
    }

    /// Admits a workload with a spec of `bytes`, if `team` may have another one waiting.
    pub(crate) fn admit(
        self: &Arc<Self>,
        waits: impl FnOnce() -> Load,
        team: &str,
        bytes: u64,
    ) -> Result<Admitted, TooManyWaiting> {
        let mut under_way = self.under_way();
        // Under the lock, so that what goes from here into the queue is not missed.
        let mut load = waits();
        load.add(under_way.get(team).copied().unwrap_or_default());
        if load.count >= self.most.count || load.bytes.saturating_add(bytes) > self.most.bytes {
            let (Load { count, bytes }, most) = (load, self.most);
            let team = team.to_owned();
            return Err(TooManyWaiting {
                team,
                count,
                bytes,
                most_count: most.count,
                most_bytes: most.bytes,
            });
        }
        let load = Load { count: 1, bytes };
        under_way.entry(team.to_owned()).or_default().add(load);
        Ok(Admitted { of: self.clone(), team: team.to_owned(), load })
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<String, Load>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A submission under way, until this is dropped.
#[derive(Debug)]
pub(crate) struct Admitted {
    of: Arc<Admissions>,
    team: String,
    load: Load,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        Load::take_from(&mut self.of.under_way(), &self.team, self.load);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submission_is_refused_when_count_or_bytes_are_exceeded() {
        let admissions = Admissions::new(3, 100);
        let admit = |waits: Load, team: &str, bytes| admissions.admit(|| waits, team, bytes);
        let none = Load::default();
        let one = admit(none, "a", 40).expect("there is room");
        let two = admit(Load { count: 1, bytes: 20 }, "a", 40).expect("there is room");
        admit(Load { count: 1, bytes: 0 }, "a", 1).expect_err("three wait");
        admit(none, "a", 21).expect_err("101 bytes");
        admit(none, "b", 100).expect("it is another team");
        drop(one);
        admit(none, "a", 60).expect("there is room");
        drop(two);
        admit(none, "a", 101).expect_err("it alone is too large");
        assert!(admissions.under_way().is_empty());
    }
}
