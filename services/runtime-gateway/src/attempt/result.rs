//! The result of an attempt, and its report to the scheduler.

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

/// The cause of a stop that becomes the failure of the attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopCause {
    /// The worker was out of contact with the scheduler.
    ContactLost,
    /// The container was destroyed.
    ContainerDestroyed,
    /// The worker was cordoned with an interruption, or retired. The workload is retried if the
    /// process did not exit first.
    Interrupted,
}

/// Whether a process was stopped to interrupt it.
pub(super) fn is_interrupted(stop: &watch::Receiver<Option<StopRequest>>, ended: &Ended) -> bool {
    let stop_requested =
        stop.borrow().as_ref().is_some_and(|request| request.reason == FailureReason::Interrupted);
    stop_requested && matches!(ended, Ended::Exited { stopped: true, .. })
}

impl StopCause {
    fn failure(self) -> Failure {
        let (reason, message) = match self {
            Self::ContactLost => (
                FailureReason::ContactLost,
                "the process was stopped because its worker was out of contact for too long",
            ),
            Self::ContainerDestroyed => (
                FailureReason::ContainerNotFound,
                "the process ended because its container was destroyed from outside",
            ),
            Self::Interrupted => (
                FailureReason::Interrupted,
                "the process was stopped because its worker was cordoned or retired",
            ),
        };
        Failure { reason, message: message.to_owned() }
    }
}

pub(super) fn ended_result(
    ended: Ended,
    started: Option<domain::Timestamp>,
    stop_cause: Option<StopCause>,
) -> AttemptResult {
    match (ended, stop_cause) {
        (Ended::Exited { exit, stopped: true }, Some(stop_cause)) => {
            let failure = Some(stop_cause.failure());
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

/// Most tries to report a result that the scheduler rejects, and the pause between them.
const FINISH_RETRIES: (usize, Duration) = (12, Duration::from_secs(5));

/// Reports the result of an attempt until the scheduler accepts it.
pub(super) async fn finish_attempt(worker: &Worker, lease: LeaseId, token: &str, result: AttemptResult) {
    let scheduler = &worker.clients.scheduler;
    let call = || scheduler.finish_attempt(token, &result);
    tokio::select! {
        () = report_result(lease, FINISH_RETRIES, call) => {}
        // The next gateway finds the ended process, and reports it.
        () = worker.stopping.cancelled() => return,
    }
    worker.attempts.set_phase(lease, AttemptPhase::Ended);
}

/// Repeats `call` until the scheduler accepts the result, or the lease is lost.
pub(super) async fn report_result<F>(lease: LeaseId, (times, pause): (usize, Duration), call: impl Fn() -> F)
where
    F: Future<Output = Result<(), Refusal>>,
{
    for _ in 0..times {
        let Err(refusal) = until_answered("end an attempt", &call).await else { return };
        if refusal.is(Reason::LeaseLost) {
            // The attempt has already ended, and its outputs are garbage.
            tracing::info!(lease.id = %lease, error = %refusal, "scheduler rejected FinishAttempt: the lease is already lost");
            return;
        }
        // The slot stays occupied until the scheduler accepts the result.
        tracing::warn!(lease.id = %lease, error = %refusal, "cannot finish an attempt: trying again");
        tokio::time::sleep(pause).await;
    }
    tracing::error!(lease.id = %lease, "cannot finish an attempt: giving up, the scheduler must end it");
}
