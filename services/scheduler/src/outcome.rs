//! Outcomes: what an attempt's end means for its workload. Pure.

use domain::Timestamp;
use domain::workload::{Exit, Failure, Outcome, PublishedOutput};
use serde::{Deserialize, Serialize};

use crate::entity::lease::StopReason;

/// How a workload ended. Kept with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub(crate) enum AttemptEnd {
    /// Its gateway said so.
    Reported(Report),
    /// Its worker is gone, or came back without it.
    WorkerLost,
    /// Its gateway was told of it and does not know it.
    Unknown,
}

/// What a gateway says at the end of an attempt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) started_at: Option<Timestamp>,
}

/// What becomes of the workload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing of it ran: it waits for another worker.
    Again,
    /// It has ended.
    End(Ending),
}

impl Ending {
    /// It was cancelled.
    pub(crate) fn aborted() -> Self {
        Self { outcome: Outcome::Aborted, ..Self::errored("CANCELLED", "it was cancelled") }
    }

    /// It could not be run.
    pub(crate) fn errored(reason: &str, message: &str) -> Self {
        let failure = Failure { reason: reason.to_owned(), message: message.to_owned() };
        Self { outcome: Outcome::Errored, exit: None, failure: Some(failure), outputs: vec![] }
    }

    /// It waited for too long.
    pub(crate) fn queue_timeout() -> Self {
        Self::errored("QUEUE_TIMEOUT", "no worker took it in time")
    }

    /// It was accepted, and nobody came back to pin its inputs.
    pub(crate) fn not_pinned() -> Self {
        Self::errored("INPUT_UNAVAILABLE", "its inputs were never pinned")
    }

    /// Its outputs could not be sealed.
    pub(crate) fn without_outputs(self) -> Self {
        let message = "the artifact store does not have the outputs that the worker published";
        Self { exit: self.exit, ..Self::errored("SETTLE_FAILED", message) }
    }
}

/// What the end of an attempt means. `started`: it may have started; `stop`: somebody wanted it to stop.
///
/// A wish to stop decides the outcome even where the process was faster: whoever wished it was told that it holds.
pub(crate) fn decide(started: bool, stop: Option<StopReason>, end: AttemptEnd) -> Next {
    let (report, without_word) = match end {
        AttemptEnd::Reported(report) => (report, None),
        AttemptEnd::WorkerLost => (Report::default(), Some(("WORKER_LOST", "its worker was lost"))),
        AttemptEnd::Unknown => {
            (Report::default(), Some(("START_UNKNOWN", "its worker does not know whether it started")))
        }
    };
    let Report { exit, failure, outputs, started_at: _ } = report;

    match stop {
        Some(StopReason::Cancelled) => return Next::End(Ending { exit, ..Ending::aborted() }),
        Some(StopReason::RunTimeout) => {
            let timed_out = Ending::errored("RUN_TIMEOUT", "it ran for longer than its run timeout");
            return Next::End(Ending { exit, ..timed_out });
        }
        None => {}
    }
    if let Some((reason, message)) = without_word {
        return if started { Next::End(Ending::errored(reason, message)) } else { Next::Again };
    }
    let outcome = match (exit, &failure) {
        (Some(Exit::Code(0)), None) => Outcome::Succeeded,
        // What should have been kept of a success was not.
        (Some(Exit::Code(0)), Some(_)) => Outcome::Errored,
        (Some(_), _) => Outcome::Failed,
        (None, Some(_)) => {
            return Next::End(Ending { outcome: Outcome::Errored, exit, failure, outputs: vec![] });
        }
        (None, None) => {
            return Next::End(Ending::errored("EXIT_UNKNOWN", "its worker does not say how it ended"));
        }
    };
    Next::End(Ending { outcome, exit, failure, outputs })
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::workload::FAILURES;
    use domain::{Digest, WorkloadId};

    fn report(exit: Option<Exit>, failure: Option<&str>) -> AttemptEnd {
        let output = PublishedOutput {
            name: "out".to_owned(),
            artifact: WorkloadId::new().output_artifact("out"),
            size_bytes: 1,
            digest: Digest([0; 32]),
            entries: 1,
        };
        AttemptEnd::Reported(Report {
            exit,
            failure: failure.map(|reason| Failure { reason: reason.to_owned(), message: String::new() }),
            outputs: vec![output],
            started_at: None,
        })
    }

    fn outcome(started: bool, stop: Option<StopReason>, end: AttemptEnd) -> (Option<Outcome>, String, usize) {
        match decide(started, stop, end) {
            Next::Again => (None, String::new(), 0),
            Next::End(ending) => {
                let reason = ending.failure.map(|failure| failure.reason).unwrap_or_default();
                (Some(ending.outcome), reason, ending.outputs.len())
            }
        }
    }

    #[test]
    fn each_failure_of_ours_is_documented() {
        let endings = [
            Ending::aborted(),
            Ending::queue_timeout(),
            Ending::not_pinned(),
            Ending::aborted().without_outputs(),
        ];
        let reasons = endings.map(|ending| ending.failure.map(|failure| failure.reason).unwrap_or_default());
        assert!(reasons.iter().all(|reason| FAILURES.contains(&reason.as_str())), "{reasons:?}");
    }

    #[test]
    fn each_end_has_its_outcome() {
        use Outcome::{Aborted, Errored, Failed, Succeeded};
        use StopReason::{Cancelled, RunTimeout};
        let code = |code| Some(Exit::Code(code));
        let cases = [
            (true, None, report(code(0), None), Some(Succeeded), "", 1),
            (true, None, report(code(0), Some("DISK_FULL")), Some(Errored), "DISK_FULL", 1),
            (true, None, report(code(3), None), Some(Failed), "", 1),
            (true, None, report(Some(Exit::Signal(9)), None), Some(Failed), "", 1),
            (true, None, report(Some(Exit::OutOfMemory), None), Some(Failed), "", 1),
            (false, None, report(None, Some("DISK_FULL")), Some(Errored), "DISK_FULL", 0),
            (true, None, report(None, None), Some(Errored), "EXIT_UNKNOWN", 0),
            (true, Some(Cancelled), report(code(0), None), Some(Aborted), "CANCELLED", 0),
            (
                false,
                Some(Cancelled),
                report(None, Some("STOPPED_BEFORE_START")),
                Some(Aborted),
                "CANCELLED",
                0,
            ),
            (true, Some(RunTimeout), report(Some(Exit::Signal(15)), None), Some(Errored), "RUN_TIMEOUT", 0),
            (false, None, AttemptEnd::WorkerLost, None, "", 0),
            (true, None, AttemptEnd::WorkerLost, Some(Errored), "WORKER_LOST", 0),
            (false, None, AttemptEnd::Unknown, None, "", 0),
            (true, None, AttemptEnd::Unknown, Some(Errored), "START_UNKNOWN", 0),
            (false, Some(Cancelled), AttemptEnd::WorkerLost, Some(Aborted), "CANCELLED", 0),
            (true, Some(RunTimeout), AttemptEnd::Unknown, Some(Errored), "RUN_TIMEOUT", 0),
        ];
        for (started, stop, end, expected, reason, outputs) in cases {
            let shown = format!("{started} {stop:?} {end:?}");
            assert_eq!(outcome(started, stop, end), (expected, reason.to_owned(), outputs), "{shown}");
            assert!(reason.is_empty() || FAILURES.contains(&reason), "{reason}");
        }
    }
}
