//! When owners let go of what they own: pure, and the only place that says so.
//!
//! | Owner | Lets go |
//! |---|---|
//! | none, ever | the artifact goes when it is old ([`crate::policy::garbage`]); one that ever had an owner goes when the last one lets go, though not before its time if it was found by its bytes ([`crate::artifacts::adopt_by_digest`]) |
//! | build that goes on | not before its end |
//! | build that succeeded or was aborted | at its end, and not before `keep` is over |
//! | build that failed or errored | the same, unless it is the latest build of its job: then when a later one is reported |
//! | resource cache that is being made | owns nothing; it goes when its claim runs out |
//! | resource cache | when it is deleted, which it is not while it is used; by itself when it was unused for `resource_cache_ttl` |
//! | task cache | when it is deleted, or given its next version; by itself when no workload uses it and it was unused for its TTL |
//! | base resource type | never; another version on the same worker takes its place, and a worker that is forgotten has none |
//! | resource certs | never; others of the same worker take their place, and a worker that is forgotten has none |

use std::fmt;
use std::time::Duration;

use domain::Timestamp;

/// After how long an attempt is looked at again of which all that is left is marked, unless that is gone before ([`crate::inventory::report`],
/// [`crate::inventory::worker_removal`]): it can be forgotten then.
pub(crate) const FORGOTTEN_LATER: Duration = Duration::from_secs(10 * 60);

/// When an owner lets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReleaseTime {
    /// Then.
    At(Timestamp),
    /// Not before something happens to it.
    NotYet,
}

impl ReleaseTime {
    /// As the column `kept_until` has it.
    pub(crate) fn column(self) -> Option<i64> {
        match self {
            Self::At(at) => Some(at.0),
            Self::NotYet => None,
        }
    }
}

/// How a build ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuildEnd {
    /// It succeeded, or was aborted.
    Done,
    /// It failed or errored.
    Failed,
}

/// What is known of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Build {
    /// How and when it ended. `None`: it goes on.
    pub(crate) ended: Option<(BuildEnd, Timestamp)>,
    /// Whether no later build of its job was reported. One without a job is never that.
    pub(crate) latest_of_its_job: bool,
    /// How long it keeps its artifacts after its end at least, in microseconds.
    pub(crate) keep: i64,
}

impl Build {
    pub(crate) fn lets_go(&self) -> ReleaseTime {
        match (self.ended, self.latest_of_its_job) {
            (None, _) | (Some((BuildEnd::Failed, _)), true) => ReleaseTime::NotYet,
            (Some((BuildEnd::Done, at)), _) | (Some((BuildEnd::Failed, at)), false) => {
                ReleaseTime::At(Timestamp(at.0.saturating_add(self.keep)))
            }
        }
    }
}

/// How a resource cache is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Whether something uses it.
    pub(crate) used: bool,
    /// When the last of those uses ended that have ended and were not forgotten yet.
    pub(crate) ended: Option<Timestamp>,
    /// Whether something uses it that does not say until when.
    pub(crate) endless: bool,
    /// When the last of those uses ends, or ended, that say when.
    pub(crate) last_end: Option<Timestamp>,
}

/// What is known of a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResourceCache {
    /// Until then, unless its maker goes on.
    BeingMade { claimed_until: Timestamp },
    /// It owns an artifact.
    Ready {
        /// Whether a build that has not let go, or a workload that was not settled, uses it.
        used: bool,
        last_used: Timestamp,
    },
}

impl ResourceCache {
    pub(crate) fn lets_go(&self, ttl: Duration) -> ReleaseTime {
        match *self {
            Self::BeingMade { claimed_until } => ReleaseTime::At(claimed_until),
            Self::Ready { used: true, .. } => ReleaseTime::NotYet,
            Self::Ready { used: false, last_used } => ReleaseTime::At(last_used + ttl),
        }
    }
}

/// What is known of a task cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskCache {
    /// Whether a workload that was not settled uses it.
    pub(crate) used: bool,
    pub(crate) last_used: Timestamp,
    /// How long it is kept after its last use, in microseconds.
    pub(crate) ttl: i64,
}

impl TaskCache {
    pub(crate) fn lets_go(&self) -> ReleaseTime {
        if self.used {
            return ReleaseTime::NotYet;
        }
        ReleaseTime::At(Timestamp(self.last_used.0.saturating_add(self.ttl)))
    }
}

/// Why a cache went, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheEndReason {
    Deleted,
    Unused,
    NotMade,
}

impl fmt::Display for CacheEndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleted => "a caller deleted it",
            Self::Unused => "it was unused for long",
            Self::NotMade => "its maker stopped without an end",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_lets_go_as_the_table_says() {
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
                    assert_eq!(build.lets_go(), expected, "{build:?}");
                }
            }
        }
    }
}
