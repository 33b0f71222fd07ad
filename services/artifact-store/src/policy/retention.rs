//! When owners let go of what they own: pure, and the only place that says so.
//!
//! | Owner | Lets go |
//! |---|---|
//! | nobody, ever | the artifact goes when it is old ([`crate::policy::garbage`]); one that ever had an owner goes when the last one lets go, though not before its time if it was found by its bytes ([`crate::artifacts::adopt_by_digest`]) |
//! | build that goes on | not before its end |
//! | build that succeeded or was aborted | at its end, and not before `keep` is over |
//! | build that failed or errored | the same, unless it is the latest build of its job: then when a later one is reported |
//! | resource cache that is being made | owns nothing; it goes when its claim runs out |
//! | resource cache | when it is deleted, which it is not while anybody uses it; by itself when nobody used it for `resource_cache_ttl` |
//! | task cache | when it is deleted, or given its next version; by itself when no workload uses it and it was unused for its TTL |
//! | base resource type | never; another version on the same worker takes its place, and a worker that is forgotten has none |
//! | resource certs | never; others of the same worker take their place, and a worker that is forgotten has none |

use std::fmt;
use std::time::Duration;

use domain::Timestamp;

use crate::db::entity::{BuildStatus, build, resource_cache, task_cache};

/// After how long an attempt is looked at again of which all that is left is marked, unless that is gone before ([`crate::inventory::report`],
/// [`crate::inventory::worker_removal`]): it can be forgotten then.
pub(crate) const FORGOTTEN_LATER: Duration = Duration::from_secs(10 * 60);

/// When an owner lets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LetsGo {
    /// Then.
    At(Timestamp),
    /// Not before something happens to it.
    NotYet,
}

impl LetsGo {
    /// As the column `kept_until` has it.
    pub(crate) fn column(self) -> Option<i64> {
        match self {
            Self::At(at) => Some(at.0),
            Self::NotYet => None,
        }
    }
}

/// What is known of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Build {
    /// How and when it ended. `None`: it goes on.
    pub(crate) ended: Option<(BuildStatus, Timestamp)>,
    /// Whether no later build of its job was reported. One without a job is never that.
    pub(crate) latest_of_its_job: bool,
    /// How long it keeps its artifacts after its end at least, in microseconds.
    pub(crate) keep: i64,
}

impl Build {
    pub(crate) fn lets_go(&self) -> LetsGo {
        use BuildStatus::{Aborted, Errored, Failed, Succeeded};
        match (self.ended, self.latest_of_its_job) {
            (None, _) | (Some((Failed | Errored, _)), true) => LetsGo::NotYet,
            (Some((Succeeded | Aborted, at)), _) | (Some((Failed | Errored, at)), false) => {
                LetsGo::At(Timestamp(at.0.saturating_add(self.keep)))
            }
        }
    }
}

/// How a resource cache is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Whether anybody uses it.
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
    pub(crate) fn lets_go(&self, ttl: Duration) -> LetsGo {
        match *self {
            Self::BeingMade { claimed_until } => LetsGo::At(claimed_until),
            Self::Ready { used: true, .. } => LetsGo::NotYet,
            Self::Ready { used: false, last_used } => LetsGo::At(last_used + ttl),
        }
    }
}

/// Why a cache went, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheWent {
    Deleted,
    Unused,
    NotMade,
}

impl fmt::Display for CacheWent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deleted => "somebody deleted it",
            Self::Unused => "nobody used it for long",
            Self::NotMade => "who made it stopped without an end",
        })
    }
}

impl resource_cache::Model {
    /// What it is called, for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.resource_type, self.version).trim().to_owned()
    }

    /// Why it goes when it goes by itself.
    pub(crate) fn goes(&self) -> CacheWent {
        if self.claimed_until.is_some() { CacheWent::NotMade } else { CacheWent::Unused }
    }

    /// When it goes by itself though it is used, if all that uses it ends by itself.
    pub(crate) fn goes_at(&self, uses: &Uses, ttl: Duration) -> Option<Timestamp> {
        let last_use = uses.last_end.map_or(self.last_used, |end| Ord::max(self.last_used, end.0));
        (!uses.endless).then(|| Timestamp(last_use) + ttl)
    }

    /// What the rule needs to know of it.
    pub(crate) fn standing(&self, uses: Uses) -> ResourceCache {
        match self.claimed_until {
            Some(until) => ResourceCache::BeingMade { claimed_until: Timestamp(until) },
            None => {
                let ended = uses.ended.map_or(i64::MIN, |ended| ended.0);
                let last_used = Timestamp(Ord::max(self.last_used, ended));
                ResourceCache::Ready { used: uses.used, last_used }
            }
        }
    }
}

impl task_cache::Model {
    /// What it is called, for people.
    pub(crate) fn name(&self) -> String {
        format!("{} {} {}", self.job, self.step, self.path)
    }

    /// `used`: a workload that was not settled uses it.
    pub(crate) fn lets_go(&self, used: bool) -> LetsGo {
        if used {
            return LetsGo::NotYet;
        }
        LetsGo::At(Timestamp(self.last_used.saturating_add(self.ttl)))
    }
}

impl build::Model {
    /// What the rule needs to know of a build that ends so.
    pub(crate) fn ending(&self, status: BuildStatus, at: Timestamp, latest_of_its_job: bool) -> Build {
        Build { ended: Some((status, at)), latest_of_its_job, keep: self.keep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    /// The rule as people say it.
    fn in_words(status: Option<BuildStatus>, latest: bool) -> &'static str {
        match status {
            None => "not before its end",
            Some(BuildStatus::Succeeded | BuildStatus::Aborted) => "at its end",
            Some(BuildStatus::Failed | BuildStatus::Errored) if latest => "when a later build is reported",
            Some(BuildStatus::Failed | BuildStatus::Errored) => "at its end",
        }
    }

    #[test]
    fn a_build_lets_go_as_the_table_says() {
        use BuildStatus::{Aborted, Errored, Failed, Succeeded};
        let ended_at = Timestamp(1_000);
        for status in [None, Some(Succeeded), Some(Failed), Some(Errored), Some(Aborted)] {
            for latest_of_its_job in [false, true] {
                for keep in [0, 500] {
                    let ended = status.map(|status| (status, ended_at));
                    let expected = match in_words(status, latest_of_its_job) {
                        "at its end" => LetsGo::At(Timestamp(1_000 + keep)),
                        _ => LetsGo::NotYet,
                    };
                    let build = Build { ended, latest_of_its_job, keep };
                    assert_eq!(build.lets_go(), expected, "{build:?}");
                }
            }
        }
    }

    #[test]
    fn a_cache_lets_go_when_it_was_unused_for_long() {
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
            look_at: 0,
        };
        let ttl = Duration::from_secs(100);
        for (endless, last_end, expected) in [
            (false, None, Some(at(110))),
            (false, Some(at(5)), Some(at(110))),
            (false, Some(at(500)), Some(at(600))),
            (true, Some(at(500)), None),
        ] {
            let uses = Uses { used: true, ended: None, endless, last_end };
            assert_eq!(cache.goes_at(&uses, ttl), expected);
        }
        for (claimed_until, used, ended, expected) in [
            (None, false, None, LetsGo::At(at(110))),
            (None, false, Some(at(5)), LetsGo::At(at(110))),
            (None, false, Some(at(20)), LetsGo::At(at(120))),
            (None, true, Some(at(20)), LetsGo::NotYet),
            (Some(at(30).0), false, None, LetsGo::At(at(30))),
            // Who waits for it does not keep it from being made by somebody else.
            (Some(at(30).0), true, None, LetsGo::At(at(30))),
        ] {
            let cache = resource_cache::Model { claimed_until, ..cache.clone() };
            let uses = Uses { used, ended, ..Uses::default() };
            assert_eq!(cache.standing(uses).lets_go(ttl), expected);
        }
    }
}
