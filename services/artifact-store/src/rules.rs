//! When owners let go of what they own: pure, and the only place that says so.
//!
//! | Owner | Lets go |
//! |---|---|
//! | build that goes on | not before its end |
//! | build that succeeded or was aborted | at its end, and not before `keep` is over |
//! | build that failed or errored | the same, unless it is the latest build of its job: then when a later one is reported |
//!
//! An artifact that nobody ever owned has a rule of its own ([`crate::mark`]).

use domain::Timestamp;

use crate::entity::{BuildStatus, build};

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

impl build::Model {
    /// What the rule needs to know of a build that ends so.
    pub(crate) fn ending(&self, status: BuildStatus, at: Timestamp, latest_of_its_job: bool) -> Build {
        Build { ended: Some((status, at)), latest_of_its_job, keep: self.keep }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
