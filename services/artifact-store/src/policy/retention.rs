//! Retention rules: when owners let go of their artifacts.
//!
//! All rules are pure functions. No other code of the store decides when an owner lets go.
//!
//! | Owner | Lets go |
//! |---|---|
//! | none, ever | the artifact is deleted after `unowned_ttl` ([`crate::policy::garbage`]) |
//! | none any more | the artifact is deleted when its last owner lets go, but not before `kept_until`, which is set if it was found by its digest ([`crate::artifacts::adopt_by_digest`]) |
//! | open build | not before its end |
//! | succeeded or aborted build | `keep` after its end |
//! | failed or errored build | `keep` after its end, or, if it is the latest build of its job, when a later one is reported, but not before `keep` after its end |
//! | resource cache that is being made | owns nothing; the cache is deleted when its claim expires |
//! | resource cache | when it is deleted, which requires that it is not used, or after `resource_cache_ttl` without use |
//! | task cache | when it is deleted or gets its next version, or after its TTL without use by a workload |
//! | base resource type | when another version of the same worker replaces it, or its worker is forgotten |
//! | resource certificates | when other certificates of the same worker replace them, or their worker is forgotten |
//!
//! An open artifact whose upload was given up is deleted although its owners have not let go
//! ([`crate::policy::garbage`]).
//!
//! A cache that nothing uses is deleted earlier if its worker needs disk space
//! ([`crate::inventory::make_room`]).

use std::fmt;
use std::time::Duration;

use domain::Timestamp;

/// Time after which an ended attempt whose remains are all marked is checked again. If its remains
/// are gone earlier, it is checked then ([`crate::inventory::report`],
/// [`crate::inventory::worker_removal`]).
pub(crate) const REMAINS_RECHECK_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// When an owner lets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleaseTime {
    /// At this time.
    At(Timestamp),
    /// Not before an event.
    NotYet,
}

impl ReleaseTime {
    /// Returns the value of the column `kept_until`.
    pub(crate) fn column(self) -> Option<i64> {
        match self {
            Self::At(at) => Some(at.0),
            Self::NotYet => None,
        }
    }
}

/// Kinds of build ends that retention distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuildEnd {
    /// It succeeded or was aborted.
    Done,
    /// It failed or errored.
    Failed,
}

/// Facts about a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Build {
    /// How and when it ended. `None` if it is open.
    pub(crate) ended: Option<(BuildEnd, Timestamp)>,
    /// Whether no later build of its job was reported. Always false without a job.
    pub(crate) latest_of_its_job: bool,
    /// Minimum time for which it keeps its artifacts after its end, in microseconds.
    pub(crate) keep: i64,
}

impl Build {
    pub(crate) fn release_time(&self) -> ReleaseTime {
        match (self.ended, self.latest_of_its_job) {
            (None, _) | (Some((BuildEnd::Failed, _)), true) => ReleaseTime::NotYet,
            (Some((BuildEnd::Done, at)), _) | (Some((BuildEnd::Failed, at)), false) => {
                ReleaseTime::At(Timestamp(at.0.saturating_add(self.keep)))
            }
        }
    }
}

/// Facts about the uses of a resource cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Whether a user has not ended.
    pub(crate) used: bool,
    /// End of the last ended use that is not forgotten.
    pub(crate) ended: Option<Timestamp>,
    /// Whether a use has no scheduled end.
    pub(crate) endless: bool,
    /// Last end, past or scheduled, of the uses that have one.
    pub(crate) last_end: Option<Timestamp>,
}

/// Facts about a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResourceCache {
    /// Its maker holds a claim until this time, and may renew it.
    InProgress { claimed_until: Timestamp },
    /// It owns an artifact.
    Ready {
        /// Whether a build that has not let go, or a workload that is not settled, uses it.
        used: bool,
        last_used: Timestamp,
    },
}

impl ResourceCache {
    pub(crate) fn release_time(&self, ttl: Duration) -> ReleaseTime {
        match *self {
            Self::InProgress { claimed_until } => ReleaseTime::At(claimed_until),
            Self::Ready { used: true, .. } => ReleaseTime::NotYet,
            Self::Ready { used: false, last_used } => ReleaseTime::At(last_used + ttl),
        }
    }
}

/// Facts about a task cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskCache {
    /// Whether a workload that is not settled uses it.
    pub(crate) used: bool,
    pub(crate) last_used: Timestamp,
    /// Time for which it is kept after its last use, in microseconds.
    pub(crate) ttl: i64,
}

impl TaskCache {
    pub(crate) fn release_time(&self) -> ReleaseTime {
        if self.used {
            return ReleaseTime::NotYet;
        }
        ReleaseTime::At(Timestamp(self.last_used.0.saturating_add(self.ttl)))
    }
}

/// Reason of the deletion of a cache, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheEndReason {
    Deleted,
    Unused,
    NotMade,
    DiskSpace,
}

impl fmt::Display for CacheEndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleted => "a caller deleted it",
            Self::Unused => "it was not used for its TTL",
            Self::NotMade => "the claim of its maker expired",
            Self::DiskSpace => "nothing used it, and its worker needed disk space",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_lets_go_as_table_says() {
        for ended in [None, Some(BuildEnd::Done), Some(BuildEnd::Failed)] {
            for latest_of_its_job in [false, true] {
                for keep in [0, 500] {
                    let build =
                        Build { ended: ended.map(|end| (end, Timestamp(1_000))), latest_of_its_job, keep };
                    let expected = match (ended, latest_of_its_job) {
                        (None, _) | (Some(BuildEnd::Failed), true) => ReleaseTime::NotYet,
                        (Some(BuildEnd::Done), _) | (Some(BuildEnd::Failed), false) => {
                            ReleaseTime::At(Timestamp(1_000 + keep))
                        }
                    };
                    assert_eq!(build.release_time(), expected, "{build:?}");
                }
            }
        }
    }
}
