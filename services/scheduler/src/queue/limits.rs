//! Limits on the waiting workloads of a team.
//!
//! [`crate::app`] calls [`Admissions::admit`] before it accepts a workload. The count includes the
//! queue of this replica, with workloads that other replicas accepted, and the submissions in
//! progress on this replica. One replica therefore never exceeds a limit, without locking shared
//! rows. Several replicas together may exceed it by what the others accept within one poll
//! interval. A workload that is being placed does not count. A workload that returns to the queue
//! after a failed attempt needs no admission.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of workloads of a team, and the size of their specs.
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

    /// Subtracts `load` from that of `team`, and removes teams without workloads.
    pub(crate) fn take_from(loads: &mut HashMap<String, Self>, team: &str, load: Self) {
        let Some(left) = loads.get_mut(team) else { return };
        left.count = left.count.saturating_sub(load.count);
        left.bytes = left.bytes.saturating_sub(load.bytes);
        if left.count == 0 {
            loads.remove(team);
        }
    }
}

/// A team has reached its limit of waiting workloads.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot queue another workload of team {team}: {count} of {most_count} workloads wait, with {bytes} of {most_bytes} bytes of specs; retry later"
)]
pub(crate) struct TooManyWaiting {
    pub(crate) team: String,
    count: u64,
    bytes: u64,
    most_count: u64,
    most_bytes: u64,
}

/// Admission control of submissions.
#[derive(Debug)]
pub(crate) struct Admissions {
    most: Load,
    /// Submissions in progress on this replica, by team.
    under_way: Mutex<HashMap<String, Load>>,
}

impl Admissions {
    pub(crate) fn new(max_waiting_per_team: u64, max_waiting_bytes_per_team: u64) -> Arc<Self> {
        let most = Load { count: max_waiting_per_team, bytes: max_waiting_bytes_per_team };
        Arc::new(Self { most, under_way: Mutex::default() })
    }

    /// Admits a workload with a spec of `bytes`, if `team` is below its limits.
    pub(crate) fn admit(
        self: &Arc<Self>,
        waits: impl FnOnce() -> Load,
        team: &str,
        bytes: u64,
    ) -> Result<Admission, TooManyWaiting> {
        let mut under_way = self.under_way();
        // The queue is read under the lock, so that a submission that moves into the queue is
        // counted.
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
        Ok(Admission { of: self.clone(), team: team.to_owned(), load })
    }

    fn under_way(&self) -> MutexGuard<'_, HashMap<String, Load>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An admitted submission in progress. Dropping it ends the admission.
#[derive(Debug)]
pub(crate) struct Admission {
    of: Arc<Admissions>,
    team: String,
    load: Load,
}

impl Drop for Admission {
    fn drop(&mut self) {
        Load::take_from(&mut self.of.under_way(), &self.team, self.load);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submission_is_rejected_over_the_limits() {
        let admissions = Admissions::new(3, 100);
        let admit = |waits: Load, team: &str, bytes| admissions.admit(|| waits, team, bytes);
        let none = Load::default();
        let one = admit(none, "a", 40).expect("there is room");
        let two = admit(Load { count: 1, bytes: 20 }, "a", 40).expect("there is room");
        admit(Load { count: 1, bytes: 0 }, "a", 1).expect_err("three wait");
        admit(none, "a", 21).expect_err("101 bytes");
        admit(none, "b", 100).expect("another team");
        drop(one);
        admit(none, "a", 60).expect("there is room");
        drop(two);
        admit(none, "a", 101).expect_err("the spec alone is too large");
        assert!(admissions.under_way().is_empty());
    }
}
