//! Facts about owners, for the retention rules.
//!
//! The collector, explanations and the modules of these owners call it.
//! [`crate::policy::retention`] has the rules.

use std::time::Duration;

use domain::Timestamp;

use super::entity::{BuildStatus, build, resource_cache, task_cache};
use crate::policy::retention::{
    Build, BuildEnd, CacheEndReason, ReleaseTime, ResourceCache, TaskCache, Uses,
};

impl resource_cache::Model {
    /// Returns the cache's name for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.resource_type, self.version).trim().to_owned()
    }

    /// Returns the reason for the cache's automatic deletion.
    pub(crate) fn end_reason(&self) -> CacheEndReason {
        if self.claimed_until.is_some() { CacheEndReason::NotMade } else { CacheEndReason::Unused }
    }

    /// Returns the time of the cache's automatic deletion if all of its uses end as scheduled.
    /// `None` if a use has no scheduled end.
    pub(crate) fn deletion_time(&self, uses: &Uses, ttl: Duration) -> Option<Timestamp> {
        let last_use = uses.last_end.map_or(self.last_used, |end| Ord::max(self.last_used, end.0));
        (!uses.endless).then(|| Timestamp(last_use) + ttl)
    }

    /// Returns the facts for the retention rule.
    pub(crate) fn facts(&self, uses: Uses) -> ResourceCache {
        match self.claimed_until {
            Some(until) => ResourceCache::InProgress { claimed_until: Timestamp(until) },
            None => {
                let ended = uses.ended.map_or(i64::MIN, |ended| ended.0);
                let last_used = Timestamp(Ord::max(self.last_used, ended));
                ResourceCache::Ready { used: uses.used, last_used }
            }
        }
    }
}

impl task_cache::Model {
    /// Returns the cache's name for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {} {}", self.job, self.step, self.path)
    }

    /// Returns when the cache lets go. `used`: whether a workload that is not settled uses it.
    pub(crate) fn release_time(&self, used: bool) -> ReleaseTime {
        TaskCache { used, last_used: Timestamp(self.last_used), ttl: self.ttl }.release_time()
    }
}

impl build::Model {
    /// Returns the facts for the retention rule if the build ends at `at` with `status`.
    pub(crate) fn ending(&self, status: BuildStatus, at: Timestamp, latest_of_its_job: bool) -> Build {
        let end = match status {
            BuildStatus::Succeeded | BuildStatus::Aborted => BuildEnd::Done,
            BuildStatus::Failed | BuildStatus::Errored => BuildEnd::Failed,
        };
        Build { ended: Some((end, at)), latest_of_its_job, keep: self.keep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    #[test]
    fn unused_cache_lets_go_after_its_ttl() {
        let cache = resource_cache::Model {
            cache_id: uuid::Uuid::now_v7(),
            scope: String::new(),
            key_digest: vec![0; 32],
            resource_type: String::new(),
            version: String::new(),
            params: String::new(),
            team: "main".to_owned(),
            claim_id: uuid::Uuid::now_v7(),
            claimed_until: None,
            artifact_id: Some(uuid::Uuid::now_v7()),
            last_used: at(10).0,
            created_at: 0,
            due_at: 0,
        };
        let ttl = Duration::from_secs(100);
        for (endless, last_end, expected) in [
            (false, None, Some(at(110))),
            (false, Some(at(5)), Some(at(110))),
            (false, Some(at(500)), Some(at(600))),
            (true, Some(at(500)), None),
        ] {
            let uses = Uses { used: true, ended: None, endless, last_end };
            assert_eq!(cache.deletion_time(&uses, ttl), expected);
        }
        for (claimed_until, used, ended, expected) in [
            (None, false, None, ReleaseTime::At(at(110))),
            (None, false, Some(at(5)), ReleaseTime::At(at(110))),
            (None, false, Some(at(20)), ReleaseTime::At(at(120))),
            (None, true, Some(at(20)), ReleaseTime::NotYet),
            (Some(at(30).0), false, None, ReleaseTime::At(at(30))),
            // A waiting user does not extend the claim.
            (Some(at(30).0), true, None, ReleaseTime::At(at(30))),
        ] {
            let cache = resource_cache::Model { claimed_until, ..cache.clone() };
            let uses = Uses { used, ended, ..Uses::default() };
            assert_eq!(cache.facts(uses).release_time(ttl), expected);
        }
    }
}
