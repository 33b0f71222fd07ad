//! How an attempt ended, and how the scheduler is told.

use std::time::Duration;

use domain::LeaseId;
use domain::workload::{Failure, FailureReason};
use rpc::{Reason, Refusal};
use runtime::Ended;
use tokio::sync::watch;

use crate::clients::scheduler::AttemptResult;
use crate::clients::scheduler_messages::AttemptPhase;
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::attempts::StopRequest;

/// Why a process was stopped, where that has to be said beside how it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopCause {
    /// Nobody wanted that.
    ContactLost,
    /// Nor that.
    ContainerDestroyed,
    /// Its worker goes. Whether it was stopped, or was faster, decides whether it begins again.
    Interrupted,
}

/// Whether a process was stopped because its worker goes.
pub(super) fn is_interrupted(stop: &watch::Receiver<Option<StopRequest>>, ended: &Ended) -> bool {
    let wished = stop.borrow().as_ref().is_some_and(|wish| wish.reason == FailureReason::Interrupted);
    wished && matches!(ended, Ended::Exited { stopped: true, .. })
}

impl StopCause {
    fn failure(self) -> Failure {
        let (reason, message) = match self {
            Self::ContactLost => (
                FailureReason::ContactLost,
                "its worker was out of contact for so long that the process was ended",
            ),
            Self::ContainerDestroyed => (
                FailureReason::ContainerNotFound,
                "its container was destroyed from outside, and the process with it",
            ),
            Self::Interrupted => (
                FailureReason::Interrupted,
                "its worker was landed or retired, and the process was stopped for that",
            ),
        };
        Failure { reason, message: message.to_owned() }
    }
}

pub(super) fn ended_result(
    ended: Ended,
    started: Option<domain::Timestamp>,
    cut_short: Option<StopCause>,
) -> AttemptResult {
    match (ended, cut_short) {
        (Ended::Exited { exit, stopped: true }, Some(cut_short)) => {
            let failure = Some(cut_short.failure());
            AttemptResult { exit: Some(exit), failure, started, ..AttemptResult::default() }
        }
        (Ended::Exited { exit, .. }, _) => {
            AttemptResult { exit: Some(exit), started, ..AttemptResult::default() }
        }
        (Ended::NotStarted(failure), _) => AttemptResult::failed(failure),
        (Ended::Unknown(failure), _) => {
            AttemptResult { failure: Some(failure), started, ..AttemptResult::default() }
        }
    }
}

/// How often the scheduler is told of an end that it does not want to hear of, and the time in between.
const TELL: (usize, Duration) = (12, Duration::from_secs(5));

/// Tells the scheduler how the attempt ended, until it has heard.
pub(super) async fn finish_attempt(worker: &Worker, lease: LeaseId, token: &str, result: AttemptResult) {
    let scheduler = &worker.clients.scheduler;
    let call = || scheduler.finish_attempt(token, &result);
    tokio::select! {
        () = tell(lease, TELL, call) => {}
        // The next gateway finds the process ended, and tells.
        () = worker.stopping.cancelled() => return,
    }
    worker.attempts.set_phase(lease, AttemptPhase::Ended);
}

/// Repeats `call` until the scheduler has heard, or says that it has no use for it.
pub(super) async fn tell<F>(lease: LeaseId, (times, pause): (usize, Duration), call: impl Fn() -> F)
where
    F: Future<Output = Result<(), Refusal>>,
{
    for _ in 0..times {
        let Err(refusal) = until_answered("end an attempt", &call).await else { return };
        if refusal.is(Reason::LeaseLost) {
            // The attempt was ended without us; what it made is garbage already.
            tracing::info!(lease.id = %lease, error = %refusal, "the end of an attempt was not wanted");
            return;
        }
        // The slot stays taken until the scheduler has heard.
        tracing::warn!(lease.id = %lease, error = %refusal, "cannot end an attempt");
        tokio::time::sleep(pause).await;
    }
    tracing::error!(lease.id = %lease, "the scheduler does not take the end of an attempt: it is left to decide by itself");
}
