//! Outcomes: what an attempt's end means for its workload. Pure.

use domain::Timestamp;
use domain::workload::{Exit, Failure, FailureReason, Outcome, PublishedCache, PublishedOutput, Usage};
use serde::{Deserialize, Serialize};

/// Why an attempt shall stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// Its caller asked for it.
    Cancelled,
    /// Its process was not started in time.
    StartTimeout,
    /// It ran for too long.
    RunTimeout,
    /// Its worker lands or retires.
    Interrupted,
    /// Its worker was lost and may run it still. Its workload has ended without it, or will: nobody waits for this one.
    WorkerLost,
}

/// How a workload ended. Kept with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    /// What was left in task caches.
    #[serde(default)]
    pub(crate) caches: Vec<PublishedCache>,
    /// What its last attempt used, if it ended with one.
    #[serde(default)]
    pub(crate) usage: Option<Usage>,
    /// What of outputs and caches was not kept, for people.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
}

/// How an attempt ended.
#[derive(Debug, Clone)]
pub(crate) enum AttemptEnd {
    /// Its gateway said so.
    Reported(Box<Report>),
    /// Its worker is gone, or came back without it.
    WorkerLost,
    /// Its gateway was told of it and does not know it, or cannot say how it ended.
    Unknown,
}

/// What a gateway says at the end of an attempt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) caches: Vec<PublishedCache>,
    pub(crate) notes: Vec<String>,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) usage: Usage,
}

/// Whether a workload may begin again after an attempt that may have run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowed {
    /// When its worker goes, as often as that happens.
    pub(crate) interruptible: bool,
    /// When an attempt is lost or late, so many times.
    pub(crate) retries: u32,
    /// How often it has, of these times.
    pub(crate) retried: u32,
    /// Whether nothing of an attempt that was lost runs any more.
    pub(crate) ends_when_lost: bool,
}

impl Allowed {
    /// Whether it may once more.
    pub(crate) fn once_more(self) -> bool {
        self.retried < self.retries
    }
}

/// What becomes of the workload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing of it ran, or it may be interrupted: it waits for another worker.
    Again,
    /// Its attempt was lost or late for this reason, and it may begin again.
    Retry(Failure),
    /// It has ended.
    End(Ending),
}

impl Ending {
    /// It was cancelled.
    pub(crate) fn aborted() -> Self {
        Self { outcome: Outcome::Aborted, ..Self::errored(FailureReason::Cancelled, "it was cancelled") }
    }

    /// It could not be run.
    pub(crate) fn errored(reason: FailureReason, message: &str) -> Self {
        let failure = Failure { reason, message: message.to_owned() };
        Self {
            outcome: Outcome::Errored,
            exit: None,
            failure: Some(failure),
            outputs: vec![],
            caches: vec![],
            usage: None,
            notes: vec![],
        }
    }

    /// It waited for too long: last for this, one line a worker.
    pub(crate) fn queue_timeout(waited_for: &[String]) -> Self {
        let mut message = "no worker took it in time".to_owned();
        if !waited_for.is_empty() {
            message += &format!("; it waited for: {}", waited_for.join("; "));
        }
        Self::errored(FailureReason::QueueTimeout, &message)
    }

    /// It was accepted, and nobody came back to pin its inputs.
    pub(crate) fn not_pinned() -> Self {
        Self::errored(FailureReason::InputUnavailable, "its inputs were never pinned")
    }

    /// Its outputs could not be sealed.
    pub(crate) fn without_outputs(self) -> Self {
        let message = "the artifact store does not have the outputs that the worker published";
        Self { exit: self.exit, usage: self.usage, ..Self::errored(FailureReason::SettleFailed, message) }
    }
}

/// What the end of an attempt means. `started`: it may have started; `stop`: somebody wanted it to stop.
///
/// A wish to stop decides the outcome even where the process was faster: whoever wished it was told that it holds.
/// Only one that was to be interrupted ends as it does where the process was faster.
///
/// An attempt that was lost though it may have run is made up for only as `allowed`, and only where it was lost: how a process ends by itself is the
/// workload's end.
pub(crate) fn decide(started: bool, allowed: Allowed, stop: Option<StopReason>, end: AttemptEnd) -> Next {
    let next = decide_once(started, allowed.interruptible, stop, end);
    match next {
        Next::End(Ending { outcome: Outcome::Errored, failure: Some(failure), .. })
            if allowed.once_more()
                && (was_stopped(failure.reason) || (allowed.ends_when_lost && was_lost(failure.reason))) =>
        {
            Next::Retry(failure)
        }
        next => next,
    }
}

/// Whether an attempt was lost, though its process may have run.
fn was_lost(reason: FailureReason) -> bool {
    matches!(
        reason,
        FailureReason::WorkerLost
            | FailureReason::ContactLost
            | FailureReason::StartUnknown
            | FailureReason::ExitUnknown
    )
}

/// Whether its gateway stopped it, for no fault of its own.
fn was_stopped(reason: FailureReason) -> bool {
    matches!(reason, FailureReason::Interrupted | FailureReason::StartTimeout)
}

/// Why an attempt is stopped whose process was not started in time.
pub(crate) fn start_timeout() -> Failure {
    Failure {
        reason: FailureReason::StartTimeout,
        message: "its process was not started within its start timeout".to_owned(),
    }
}

fn decide_once(started: bool, interruptible: bool, stop: Option<StopReason>, end: AttemptEnd) -> Next {
    let (report, without_word) = match end {
        AttemptEnd::Reported(report) => (*report, None),
        AttemptEnd::WorkerLost => {
            (Report::default(), Some((FailureReason::WorkerLost, "its worker was lost")))
        }
        AttemptEnd::Unknown => (
            Report::default(),
            Some((FailureReason::StartUnknown, "its worker does not know whether it started")),
        ),
    };
    let Report { exit, failure, outputs, caches, notes, started_at: _, usage: _ } = report;

    match stop {
        Some(StopReason::Cancelled) => return Next::End(Ending { exit, ..Ending::aborted() }),
        Some(StopReason::StartTimeout) => {
            let Failure { reason, message } = start_timeout();
            return Next::End(Ending { exit, ..Ending::errored(reason, &message) });
        }
        Some(StopReason::RunTimeout) => {
            let timed_out =
                Ending::errored(FailureReason::RunTimeout, "it ran for longer than its run timeout");
            return Next::End(Ending { exit, ..timed_out });
        }
        Some(StopReason::Interrupted) if !ended_by_itself(exit, failure.as_ref()) => {
            let message = "its worker was landed or retired, and the time that it had for that is over";
            let interrupted = Ending::errored(FailureReason::Interrupted, message);
            let again = !started || interruptible;
            return if again { Next::Again } else { Next::End(Ending { exit, ..interrupted }) };
        }
        Some(StopReason::Interrupted | StopReason::WorkerLost) | None => {}
    }
    if let Some((reason, message)) = without_word {
        return if started { Next::End(Ending::errored(reason, message)) } else { Next::Again };
    }
    let outcome = match (exit, &failure) {
        (Some(Exit::Code(0)), None) => Outcome::Succeeded,
        // It is not the process that failed.
        (
            Some(_),
            Some(Failure { reason: FailureReason::ContactLost | FailureReason::ContainerNotFound, .. }),
        ) => Outcome::Errored,
        // What should have been kept of a success was not.
        (Some(Exit::Code(0)), Some(_)) => Outcome::Errored,
        (Some(_), _) => Outcome::Failed,
        (None, Some(_)) => {
            let (outputs, caches) = (vec![], vec![]);
            return Next::End(Ending {
                outcome: Outcome::Errored,
                exit,
                failure,
                outputs,
                caches,
                usage: None,
                notes,
            });
        }
        (None, None) => {
            return Next::End(Ending::errored(
                FailureReason::ExitUnknown,
                "its worker does not say how it ended",
            ));
        }
    };
    Next::End(Ending { outcome, exit, failure, outputs, caches, usage: None, notes })
}

/// Whether a process that was to be interrupted had ended before it was.
fn ended_by_itself(exit: Option<Exit>, failure: Option<&Failure>) -> bool {
    exit.is_some() && failure.is_none_or(|failure| failure.reason != FailureReason::Interrupted)
}

/// How many attempts at one workload may end through the fault of their worker before the last one counts.
pub(crate) const MOST_FAULTS: usize = 10;

/// What a worker did wrong, if an attempt that its gateway reports as `report` ended through its fault before the process was started; then
/// another worker may try. `announced`: the process was about to start, so only a failure that says that it was not counts.
pub(crate) fn fault(announced: bool, stop: Option<StopReason>, report: &Report) -> Option<&Failure> {
    let failure = report.failure.as_ref().filter(|_| report.exit.is_none() && stop.is_none())?;
    let of_the_worker = match failure.reason {
        FailureReason::StartFailed
        | FailureReason::CgroupUnavailable
        | FailureReason::Unsupported
        | FailureReason::InputDamaged
        | FailureReason::WorkerFull => true,
        FailureReason::DiskFull | FailureReason::WorkerFailed => !announced && report.started_at.is_none(),
        _ => false,
    };
    of_the_worker.then_some(failure)
}

/// Whether a fault speaks against the worker itself, and not only against giving it this workload.
pub(crate) fn is_held_against(failure: &Failure) -> bool {
    use FailureReason::{InputDamaged, Unsupported, WorkerFull};
    !matches!(failure.reason, Unsupported | WorkerFull | InputDamaged)
}

/// Whether the worker may well take the workload later.
pub(crate) fn passes(failure: &Failure) -> bool {
    failure.reason == FailureReason::WorkerFull
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::{CacheId, Digest, WorkloadId};

    fn report(exit: Option<Exit>, failure: Option<FailureReason>) -> AttemptEnd {
        let output = PublishedOutput {
            name: "out".to_owned(),
            artifact: WorkloadId::new().output_artifact("out"),
            size_bytes: 1,
            digest: Digest([0; 32]),
            entries: 1,
        };
        let cache =
            PublishedCache { cache: CacheId::new(), artifact: output.artifact, digest: output.digest };
        AttemptEnd::Reported(Box::new(Report {
            exit,
            failure: failure.map(|reason| Failure { reason, message: String::new() }),
            outputs: vec![output],
            caches: vec![cache],
            ..Report::default()
        }))
    }

    fn outcome(
        started: bool,
        stop: Option<StopReason>,
        end: AttemptEnd,
    ) -> (Option<Outcome>, Option<FailureReason>, usize) {
        match decide(started, Allowed::default(), stop, end) {
            Next::Again => (None, None, 0),
            Next::Retry(failure) => panic!("nothing allows it: {failure:?}"),
            Next::End(ending) => {
                let reason = ending.failure.map(|failure| failure.reason);
                assert_eq!(ending.outputs.len(), ending.caches.len(), "caches are kept as outputs are");
                (Some(ending.outcome), reason, ending.outputs.len())
            }
        }
    }

    #[test]
    fn each_end_has_its_outcome() {
        use Outcome::{Aborted, Errored, Failed, Succeeded};
        use StopReason::{Cancelled, RunTimeout, StartTimeout};
        let code = |code| Some(Exit::Code(code));
        let cases = [
            (true, None, report(code(0), None), Some(Succeeded), None, 1),
            (
                true,
                None,
                report(code(0), Some(FailureReason::DiskFull)),
                Some(Errored),
                Some(FailureReason::DiskFull),
                1,
            ),
            (true, None, report(code(3), None), Some(Failed), None, 1),
            (true, None, report(Some(Exit::Signal(9)), None), Some(Failed), None, 1),
            (true, None, report(Some(Exit::OutOfMemory), None), Some(Failed), None, 1),
            (
                true,
                None,
                report(Some(Exit::Signal(9)), Some(FailureReason::ContainerNotFound)),
                Some(Errored),
                Some(FailureReason::ContainerNotFound),
                1,
            ),
            (
                true,
                None,
                report(Some(Exit::Signal(15)), Some(FailureReason::ContactLost)),
                Some(Errored),
                Some(FailureReason::ContactLost),
                1,
            ),
            (
                false,
                None,
                report(None, Some(FailureReason::DiskFull)),
                Some(Errored),
                Some(FailureReason::DiskFull),
                0,
            ),
            (true, None, report(None, None), Some(Errored), Some(FailureReason::ExitUnknown), 0),
            (true, Some(Cancelled), report(code(0), None), Some(Aborted), Some(FailureReason::Cancelled), 0),
            (
                false,
                Some(Cancelled),
                report(None, Some(FailureReason::StoppedBeforeStart)),
                Some(Aborted),
                Some(FailureReason::Cancelled),
                0,
            ),
            (
                true,
                Some(RunTimeout),
                report(Some(Exit::Signal(15)), None),
                Some(Errored),
                Some(FailureReason::RunTimeout),
                0,
            ),
            (
                false,
                Some(StartTimeout),
                report(None, Some(FailureReason::StartTimeout)),
                Some(Errored),
                Some(FailureReason::StartTimeout),
                0,
            ),
            (
                false,
                Some(StartTimeout),
                AttemptEnd::WorkerLost,
                Some(Errored),
                Some(FailureReason::StartTimeout),
                0,
            ),
            (false, None, AttemptEnd::WorkerLost, None, None, 0),
            (true, None, AttemptEnd::WorkerLost, Some(Errored), Some(FailureReason::WorkerLost), 0),
            (false, None, AttemptEnd::Unknown, None, None, 0),
            (true, None, AttemptEnd::Unknown, Some(Errored), Some(FailureReason::StartUnknown), 0),
            (
                false,
                Some(Cancelled),
                AttemptEnd::WorkerLost,
                Some(Aborted),
                Some(FailureReason::Cancelled),
                0,
            ),
            (true, Some(RunTimeout), AttemptEnd::Unknown, Some(Errored), Some(FailureReason::RunTimeout), 0),
        ];
        let interrupted = StopReason::Interrupted;
        let cases = cases.into_iter().chain([
            (false, Some(interrupted), AttemptEnd::Unknown, None, None, 0),
            (
                true,
                Some(interrupted),
                AttemptEnd::WorkerLost,
                Some(Errored),
                Some(FailureReason::Interrupted),
                0,
            ),
            (
                true,
                Some(interrupted),
                report(Some(Exit::Signal(15)), Some(FailureReason::Interrupted)),
                Some(Errored),
                Some(FailureReason::Interrupted),
                0,
            ),
            // It was faster.
            (true, Some(interrupted), report(code(0), None), Some(Succeeded), None, 1),
        ]);
        for (started, stop, end, expected, reason, outputs) in cases {
            let shown = format!("{started} {stop:?} {end:?}");
            assert_eq!(outcome(started, stop, end), (expected, reason, outputs), "{shown}");
        }
    }

    #[test]
    fn what_was_lost_begins_again_as_often_as_allowed() {
        let once = |retried| Allowed { retries: 1, retried, ends_when_lost: true, ..Allowed::default() };
        let retried = |started: bool, stop: Option<StopReason>, end: AttemptEnd| {
            assert!(
                matches!(decide(started, once(1), stop, end.clone()), Next::End(_) | Next::Again),
                "{end:?}: no more are allowed"
            );
            matches!(decide(started, once(0), stop, end), Next::Retry(_))
        };
        let signal = Some(Exit::Signal(15));
        let (late, interrupted) = (Some(StopReason::StartTimeout), Some(StopReason::Interrupted));
        assert!(retried(true, None, AttemptEnd::WorkerLost));
        let unproven = Allowed { ends_when_lost: false, ..once(0) };
        for end in [AttemptEnd::WorkerLost, report(None, Some(FailureReason::ExitUnknown))] {
            let next = decide(true, unproven, None, end);
            assert!(matches!(next, Next::End(_)), "it may run still: {next:?}");
        }
        assert!(retried(true, None, AttemptEnd::Unknown));
        assert!(retried(true, None, report(signal, Some(FailureReason::ContactLost))));
        assert!(retried(true, None, report(None, Some(FailureReason::StartUnknown))));
        assert!(retried(true, None, report(None, Some(FailureReason::ExitUnknown))));
        assert!(retried(true, interrupted, report(signal, Some(FailureReason::Interrupted))));
        assert!(retried(false, late, report(None, Some(FailureReason::StartTimeout))));
        // Nothing ran: that takes none of them.
        assert_eq!(decide(false, once(0), None, AttemptEnd::WorkerLost), Next::Again);
        // It ended by itself, or somebody wanted that.
        for exit in [Exit::Code(0), Exit::Code(1), Exit::Signal(9), Exit::OutOfMemory] {
            assert!(!retried(true, None, report(Some(exit), None)), "{exit:?}");
        }
        assert!(!retried(true, None, report(Some(Exit::Code(0)), Some(FailureReason::DiskFull))));
        assert!(!retried(true, None, report(signal, Some(FailureReason::ContainerNotFound))));
        assert!(!retried(false, None, report(None, Some(FailureReason::ProgramNotFound))));
        for stop in [StopReason::Cancelled, StopReason::RunTimeout] {
            assert!(!retried(true, Some(stop), AttemptEnd::WorkerLost), "{stop:?}");
        }
    }

    #[test]
    fn what_may_be_interrupted_begins_again_unless_it_was_faster() {
        let interruptible = Allowed { interruptible: true, ..Allowed::default() };
        let stop = Some(StopReason::Interrupted);
        let stopped = report(Some(Exit::Signal(15)), Some(FailureReason::Interrupted));
        assert_eq!(decide(true, interruptible, stop, stopped), Next::Again);
        assert_eq!(decide(true, interruptible, stop, AttemptEnd::WorkerLost), Next::Again);
        let faster = report(Some(Exit::Code(3)), None);
        assert!(matches!(decide(true, interruptible, stop, faster), Next::End(_)));
        // That it may be interrupted does not mean that it may be lost.
        assert!(matches!(decide(true, interruptible, None, AttemptEnd::WorkerLost), Next::End(_)));
    }

    #[test]
    fn only_what_surely_did_not_start_is_tried_elsewhere() {
        let of = |exit: Option<Exit>, reason: FailureReason| match report(exit, Some(reason)) {
            AttemptEnd::Reported(report) => *report,
            lost => panic!("{lost:?}"),
        };
        let is_fault =
            |announced: bool, stop: Option<StopReason>, exit: Option<Exit>, reason: FailureReason| {
                fault(announced, stop, &of(exit, reason)).is_some()
            };
        let surely = [
            FailureReason::StartFailed,
            FailureReason::CgroupUnavailable,
            FailureReason::Unsupported,
            FailureReason::InputDamaged,
            FailureReason::WorkerFull,
        ];
        for reason in surely {
            assert!(is_fault(false, None, None, reason) && is_fault(true, None, None, reason), "{reason}");
        }
        for reason in [FailureReason::WorkerFailed, FailureReason::DiskFull] {
            assert!(is_fault(false, None, None, reason) && !is_fault(true, None, None, reason), "{reason}");
        }
        let callers = [
            FailureReason::ProgramNotFound,
            FailureReason::InvalidImage,
            FailureReason::InvalidMount,
            FailureReason::InputUnavailable,
            FailureReason::OutputInvalid,
        ];
        for reason in callers {
            assert!(!is_fault(false, None, None, reason), "{reason}");
        }
        assert!(!is_fault(false, Some(StopReason::Cancelled), None, FailureReason::StartFailed));
        assert!(!is_fault(true, None, Some(Exit::Code(1)), FailureReason::StartFailed));
    }
}
