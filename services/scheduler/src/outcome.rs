//! Outcomes: the effect of an attempt's end on its workload. Pure.

use bytes::Bytes;
use domain::Timestamp;
use domain::workload::{Exit, Failure, FailureReason, Outcome, PublishedCache, PublishedOutput, Usage};
use serde::{Deserialize, Serialize};

/// Reason why an attempt or a driven lease in use must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// The caller cancelled the workload.
    Cancelled,
    /// The process did not start within the start timeout.
    StartTimeout,
    /// The process exceeded the run timeout.
    RunTimeout,
    /// The worker is cordoned or retired.
    Interrupted,
    /// The worker was lost and may still run the attempt. The workload does not wait for this
    /// attempt.
    WorkerLost,
    /// The holder of a driven lease in use released it.
    Released,
    /// The holder of a driven lease in use did not renew it in time.
    Expired,
}

/// End of a workload, as its row stores it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) outcome: Outcome,
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    /// New versions of task caches.
    #[serde(default)]
    pub(crate) caches: Vec<PublishedCache>,
    /// Usage of the last attempt, if the workload ended with an attempt.
    #[serde(default)]
    pub(crate) usage: Option<Usage>,
    /// Outputs and caches that were not kept, and why, for people.
    #[serde(default)]
    pub(crate) notes: Vec<String>,
    /// Whether the workload has a result ([`crate::workloads::results`]).
    #[serde(default)]
    pub(crate) has_result: bool,
}

/// End of an attempt.
#[derive(Debug, Clone)]
pub(crate) enum AttemptEnd {
    /// The gateway reported the end.
    Reported(Box<Report>),
    /// The worker is lost, or returned without the attempt.
    WorkerLost,
    /// The gateway does not know the attempt, or cannot say how it ended.
    Unknown,
}

/// A gateway's report of the end of an attempt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) caches: Vec<PublishedCache>,
    pub(crate) notes: Vec<String>,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) usage: Usage,
    pub(crate) result: Option<Bytes>,
}

/// The retries that remain for a workload after an attempt that may have run.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowed {
    /// Whether the workload is interruptible. An interruption may repeat any number of times.
    pub(crate) interruptible: bool,
    /// Number of retries after a lost or late attempt.
    pub(crate) retries: u32,
    /// Number of these retries used so far.
    pub(crate) retried: u32,
    /// Whether a lost attempt has certainly ended.
    pub(crate) ends_when_lost: bool,
}

impl Allowed {
    /// Returns whether another retry is allowed.
    pub(crate) fn once_more(self) -> bool {
        self.retried < self.retries
    }
}

/// The next step of the workload.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// The workload waits for another worker: its process did not run, or the workload is
    /// interruptible.
    Again,
    /// The attempt was lost or late for this reason, and the workload is retried.
    Retry(Failure),
    /// The workload has ended.
    End(Ending),
}

impl Ending {
    /// The workload was cancelled.
    pub(crate) fn aborted() -> Self {
        Self {
            outcome: Outcome::Aborted,
            ..Self::errored(FailureReason::Cancelled, "the workload was cancelled")
        }
    }

    /// The workload could not be run.
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
            has_result: false,
        }
    }

    /// The workload exceeded its queue timeout. `waited_for`: the last refusals, one line per
    /// worker.
    pub(crate) fn queue_timeout(waited_for: &[String]) -> Self {
        let mut message = "no worker took the workload in time".to_owned();
        if !waited_for.is_empty() {
            message += &format!("; the workload waited for: {}", waited_for.join("; "));
        }
        Self::errored(FailureReason::QueueTimeout, &message)
    }

    /// The workload was accepted, but its inputs were never pinned.
    pub(crate) fn not_pinned() -> Self {
        Self::errored(FailureReason::InputUnavailable, "the inputs of the workload were never pinned")
    }

    /// The outputs could not be sealed.
    pub(crate) fn without_outputs(self) -> Self {
        let message = "the artifact store does not have the outputs that the worker published";
        let Self { exit, usage, has_result, .. } = self;
        Self { exit, usage, has_result, ..Self::errored(FailureReason::SettleFailed, message) }
    }
}

/// Decides the effect of an attempt's end. `started`: the process may have started. `stop`: why the
/// attempt had to stop.
///
/// A stop reason decides the outcome even if the process ended first, because the caller was
/// already informed of the stop. An interruption is the exception: a process that ended first keeps
/// its own outcome.
///
/// A lost attempt that may have run is retried only as `allowed`. The exit of a process always ends
/// its workload.
pub(crate) fn decide(started: bool, allowed: Allowed, stop: Option<StopReason>, end: AttemptEnd) -> NextStep {
    let next = decide_once(started, allowed.interruptible, stop, end);
    match next {
        NextStep::End(Ending { outcome: Outcome::Errored, failure: Some(failure), .. })
            if allowed.once_more()
                && (was_stopped(failure.reason) || (allowed.ends_when_lost && was_lost(failure.reason))) =>
        {
            NextStep::Retry(failure)
        }
        next => next,
    }
}

/// Returns whether the attempt was lost although its process may have run.
fn was_lost(reason: FailureReason) -> bool {
    matches!(
        reason,
        FailureReason::WorkerLost
            | FailureReason::ContactLost
            | FailureReason::StartUnknown
            | FailureReason::ExitUnknown
    )
}

/// Returns whether the gateway stopped the attempt for a reason outside the workload.
fn was_stopped(reason: FailureReason) -> bool {
    matches!(reason, FailureReason::Interrupted | FailureReason::StartTimeout)
}

/// The failure of an attempt that exceeded its start timeout.
pub(crate) fn start_timeout() -> Failure {
    Failure {
        reason: FailureReason::StartTimeout,
        message: "the process did not start within its start timeout".to_owned(),
    }
}

fn decide_once(started: bool, interruptible: bool, stop: Option<StopReason>, end: AttemptEnd) -> NextStep {
    let (report, assumed_end) = match end {
        AttemptEnd::Reported(report) => (*report, None),
        AttemptEnd::WorkerLost => {
            (Report::default(), Some((FailureReason::WorkerLost, "the worker was lost")))
        }
        AttemptEnd::Unknown => (
            Report::default(),
            Some((FailureReason::StartUnknown, "the worker does not know whether the process started")),
        ),
    };
    let Report { exit, failure, outputs, caches, notes, started_at: _, usage: _, result: _ } = report;

    match stop {
        Some(StopReason::Cancelled) => return NextStep::End(Ending { exit, ..Ending::aborted() }),
        Some(StopReason::StartTimeout) => {
            let Failure { reason, message } = start_timeout();
            return NextStep::End(Ending { exit, ..Ending::errored(reason, &message) });
        }
        Some(StopReason::RunTimeout) => {
            let message = match exit {
                Some(_) => "the process ran for longer than its run timeout",
                None => "the run timeout passed before the process ran, or its end is unknown",
            };
            let timed_out = Ending::errored(FailureReason::RunTimeout, message);
            return NextStep::End(Ending { exit, ..timed_out });
        }
        Some(StopReason::Interrupted) if !exited_before_interruption(exit, failure.as_ref()) => {
            let message = "the worker was cordoned or retired, and the deadline for that has passed";
            let interrupted = Ending::errored(FailureReason::Interrupted, message);
            let again = !started || interruptible;
            return if again { NextStep::Again } else { NextStep::End(Ending { exit, ..interrupted }) };
        }
        // Driven leases have no workload, so only their reasons do not occur here.
        Some(
            StopReason::Interrupted | StopReason::WorkerLost | StopReason::Released | StopReason::Expired,
        )
        | None => {}
    }
    if let Some((reason, message)) = assumed_end {
        return if started { NextStep::End(Ending::errored(reason, message)) } else { NextStep::Again };
    }
    let outcome = match (exit, &failure) {
        (Some(Exit::Code(0)), None) => Outcome::Succeeded,
        // The failure is not that of the process.
        (
            Some(_),
            Some(Failure {
                reason:
                    FailureReason::ContactLost
                    | FailureReason::ContainerNotFound
                    | FailureReason::ResultTooLarge
                    | FailureReason::ResultIncomplete
                    | FailureReason::ServiceFailed,
                ..
            }),
        ) => Outcome::Errored,
        // The process succeeded, but its outputs could not be kept.
        (Some(Exit::Code(0)), Some(_)) => Outcome::Errored,
        (Some(_), _) => Outcome::Failed,
        (None, Some(_)) => {
            let (outputs, caches) = (vec![], vec![]);
            return NextStep::End(Ending {
                outcome: Outcome::Errored,
                exit,
                failure,
                outputs,
                caches,
                usage: None,
                notes,
                has_result: false,
            });
        }
        (None, None) => {
            return NextStep::End(Ending::errored(
                FailureReason::ExitUnknown,
                "the worker does not report how the process ended",
            ));
        }
    };
    NextStep::End(Ending { outcome, exit, failure, outputs, caches, usage: None, notes, has_result: false })
}

/// Returns whether a process exited before its interruption.
fn exited_before_interruption(exit: Option<Exit>, failure: Option<&Failure>) -> bool {
    exit.is_some() && failure.is_none_or(|failure| failure.reason != FailureReason::Interrupted)
}

/// Maximum number of attempts at one workload that may end through the fault of a worker. The last
/// one ends the workload.
pub(crate) const MAX_FAULTS: usize = 10;

/// Returns the failure of a report if the worker caused it before the process started. Then another
/// worker may try. `announced`: the process was about to start, so only a failure that excludes a
/// start counts.
pub(crate) fn fault(announced: bool, stop: Option<StopReason>, report: &Report) -> Option<&Failure> {
    let failure = report.failure.as_ref().filter(|_| report.exit.is_none() && stop.is_none())?;
    let is_fault_of_worker = match failure.reason {
        FailureReason::StartFailed
        | FailureReason::CgroupUnavailable
        | FailureReason::Unsupported
        | FailureReason::InputDamaged
        | FailureReason::InputUnreachable
        | FailureReason::WorkerUnreachable
        | FailureReason::WorkerFull => true,
        FailureReason::DiskFull | FailureReason::WorkerFailed => !announced && report.started_at.is_none(),
        _ => false,
    };
    is_fault_of_worker.then_some(failure)
}

/// Returns whether a fault counts towards quarantine. Other faults only exclude this worker for
/// this workload.
pub(crate) fn counts_towards_quarantine(failure: &Failure) -> bool {
    use FailureReason::{InputDamaged, InputUnreachable, Unsupported, WorkerFull};
    !matches!(failure.reason, Unsupported | WorkerFull | InputDamaged | InputUnreachable)
}

/// Returns whether the same worker may take the workload later.
pub(crate) fn is_temporary_fault(failure: &Failure) -> bool {
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
            NextStep::Again => (None, None, 0),
            NextStep::Retry(failure) => panic!("no retry is allowed: {failure:?}"),
            NextStep::End(ending) => {
                let reason = ending.failure.map(|failure| failure.reason);
                assert_eq!(ending.outputs.len(), ending.caches.len(), "caches are kept like outputs");
                (Some(ending.outcome), reason, ending.outputs.len())
            }
        }
    }

    #[test]
    fn attempt_end_decides_outcome() {
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
            // The caller misses the result, with any exit code.
            (
                true,
                None,
                report(code(3), Some(FailureReason::ResultTooLarge)),
                Some(Errored),
                Some(FailureReason::ResultTooLarge),
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
            // The process exited first.
            (true, Some(interrupted), report(code(0), None), Some(Succeeded), None, 1),
        ]);
        for (started, stop, end, expected, reason, outputs) in cases {
            let shown = format!("{started} {stop:?} {end:?}");
            assert_eq!(outcome(started, stop, end), (expected, reason, outputs), "{shown}");
        }
    }

    #[test]
    fn lost_attempt_is_retried_as_often_as_allowed() {
        let once = |retried| Allowed { retries: 1, retried, ends_when_lost: true, ..Allowed::default() };
        let retried = |started: bool, stop: Option<StopReason>, end: AttemptEnd| {
            assert!(
                matches!(decide(started, once(1), stop, end.clone()), NextStep::End(_) | NextStep::Again),
                "{end:?}: no more retries are allowed"
            );
            matches!(decide(started, once(0), stop, end), NextStep::Retry(_))
        };
        let signal = Some(Exit::Signal(15));
        let (late, interrupted) = (Some(StopReason::StartTimeout), Some(StopReason::Interrupted));
        assert!(retried(true, None, AttemptEnd::WorkerLost));
        let unproven = Allowed { ends_when_lost: false, ..once(0) };
        for end in [AttemptEnd::WorkerLost, report(None, Some(FailureReason::ExitUnknown))] {
            let next = decide(true, unproven, None, end);
            assert!(matches!(next, NextStep::End(_)), "the attempt may still run: {next:?}");
        }
        assert!(retried(true, None, AttemptEnd::Unknown));
        assert!(retried(true, None, report(signal, Some(FailureReason::ContactLost))));
        assert!(retried(true, None, report(None, Some(FailureReason::StartUnknown))));
        assert!(retried(true, None, report(None, Some(FailureReason::ExitUnknown))));
        assert!(retried(true, interrupted, report(signal, Some(FailureReason::Interrupted))));
        assert!(retried(false, late, report(None, Some(FailureReason::StartTimeout))));
        // Nothing ran, so no retry is used.
        assert_eq!(decide(false, once(0), None, AttemptEnd::WorkerLost), NextStep::Again);
        // The process exited, or the stop was requested.
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
    fn interruptible_workload_is_requeued_unless_process_exited_first() {
        let interruptible = Allowed { interruptible: true, ..Allowed::default() };
        let stop = Some(StopReason::Interrupted);
        let stopped = report(Some(Exit::Signal(15)), Some(FailureReason::Interrupted));
        assert_eq!(decide(true, interruptible, stop, stopped), NextStep::Again);
        assert_eq!(decide(true, interruptible, stop, AttemptEnd::WorkerLost), NextStep::Again);
        let faster = report(Some(Exit::Code(3)), None);
        assert!(matches!(decide(true, interruptible, stop, faster), NextStep::End(_)));
        // An interruptible workload is not retried after a loss.
        assert!(matches!(decide(true, interruptible, None, AttemptEnd::WorkerLost), NextStep::End(_)));
    }

    #[test]
    fn attempt_is_tried_elsewhere_only_before_start() {
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
            FailureReason::InputUnreachable,
            FailureReason::WorkerUnreachable,
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
