//! The results of attempts that cannot be carried out.

use super::result::report_result;
use super::*;
use crate::test_support::FakeGateways;
use crate::worker::attempts::AttemptEntry;
use rpc::Refusal;
use testing::fake::FakeWorker;

#[test]
fn every_refusal_has_a_documented_failure_reason() {
    for reason in Reason::ALL {
        let refusal = Refusal::from(reason.status("gantry.test", "no"));
        let failure = failure(&AttemptError::Refused(refusal));
        assert!(FailureReason::ALL.contains(&failure.reason));
        assert!(failure.message.contains(reason.as_str()), "what was said is kept: {}", failure.message);
    }
    let lost = Refusal::from(Reason::LeaseLost.status("gantry.test", "no"));
    assert_eq!(failure(&AttemptError::Refused(lost)).reason, FailureReason::StoppedBeforeStart);
}

#[test]
fn attempt_ended_before_restore_may_have_run() {
    let ended = Refusal::from(Reason::AttemptEnded.status("gantry.test", "no"));
    assert_eq!(failure(&AttemptError::Refused(ended)).reason, FailureReason::StartUnknown);
}

#[test]
fn unrequested_stop_has_a_failure_reason() {
    let ended = || Ended::Exited { exit: Exit::Signal(15), stopped: true };
    let reason = |stop_cause| ended_result(ended(), None, stop_cause).failure.map(|failure| failure.reason);
    assert_eq!(reason(Some(StopCause::ContactLost)), Some(FailureReason::ContactLost));
    assert_eq!(reason(Some(StopCause::ContainerDestroyed)), Some(FailureReason::ContainerNotFound));
    assert_eq!(reason(None), None);
}

fn entry() -> AttemptEntry {
    let (stop, _) = watch::channel(None);
    AttemptEntry::new(stop)
}

#[tokio::test]
async fn rejected_result_is_reported_a_few_times() {
    let refused: [(&[Reason], usize); 4] = [
        (&[Reason::InvalidField; 9], 5),
        (&[Reason::LeaseLost], 1),
        (&[Reason::InvalidField, Reason::LeaseLost], 2),
        // A transient error does not count as a try.
        (&[Reason::Unavailable, Reason::InvalidField], 3),
    ];
    for (reasons, expected) in refused {
        let calls = std::cell::Cell::new(0);
        let call = || {
            let answer = reasons.get(calls.replace(calls.get() + 1));
            let answer = answer.map(|reason| Err(Refusal::from(reason.status("gantry.test", "no"))));
            async { answer.unwrap_or(Ok(())) }
        };
        report_result(LeaseId::new(), (5, Duration::ZERO), call).await;
        assert_eq!(calls.get(), expected, "{reasons:?}");
    }
}

#[tokio::test]
#[expect(clippy::disallowed_methods, reason = "the test waits for it")]
async fn dead_task_removes_its_lease() {
    let worker = FakeWorker::near().gateway("http://127.0.0.1:9", "http://127.0.0.1:9");
    let lease = LeaseId::new();
    worker.attempts.lock().insert(lease, entry());
    let dying = worker.clone();
    // The task that ends the attempt panics, not the attempt.
    let died = tokio::spawn(async move {
        let _entry = LeaseGuard { worker: &dying, lease };
        panic!("as the test asked for");
    });
    assert!(died.await.is_err_and(|error| error.is_panic()));
    assert!(worker.attempts.lock().is_empty());
}
