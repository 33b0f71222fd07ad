//! The result of a workload: the standard output of its process, read after the end.

use bytes::{Bytes, BytesMut};
use domain::workload::{Failure, FailureReason, MAX_RESULT_BYTES};
use domain::{ProcessId, error_chain};
use futures::StreamExt;
use runtime::{Offsets, OutputStream, ProcessEvent, Runtime, RuntimeError};

/// Reads the complete standard output of an ended process. A failure replaces a result that is too
/// large or of which a part is lost.
///
/// Errors: only [`RuntimeError::TakenOver`], because another gateway then reports the attempt.
pub(super) async fn read(
    runtime: &dyn Runtime,
    process: ProcessId,
) -> Result<Result<Bytes, Failure>, RuntimeError> {
    match read_output(runtime, process).await {
        Err(error @ RuntimeError::TakenOver(_)) => Err(error),
        Err(error) => {
            Ok(Err(incomplete(&format!("standard output cannot be read: {}", error_chain(&error)))))
        }
        Ok(read) => Ok(read),
    }
}

async fn read_output(
    runtime: &dyn Runtime,
    process: ProcessId,
) -> Result<Result<Bytes, Failure>, RuntimeError> {
    let mut result = BytesMut::new();
    let mut events = runtime.attach(process, Offsets::default()).await?.events;
    while let Some(event) = events.next().await {
        match event? {
            ProcessEvent::Output { stream: OutputStream::Stdout, data, .. } => {
                result.extend_from_slice(&data);
            }
            ProcessEvent::Truncated { stream: OutputStream::Stdout, to, .. } => {
                return Ok(Err(if to > MAX_RESULT_BYTES as u64 {
                    too_large()
                } else {
                    incomplete("the worker has lost a part of standard output")
                }));
            }
            ProcessEvent::Done(_) => return Ok(Ok(result.freeze())),
            ProcessEvent::Output { .. }
            | ProcessEvent::Truncated { .. }
            | ProcessEvent::StdinAccepted(_)
            | ProcessEvent::Ended(_) => {}
        }
        if result.len() > MAX_RESULT_BYTES {
            return Ok(Err(too_large()));
        }
    }
    Ok(Err(incomplete("the worker did not send all of standard output")))
}

fn too_large() -> Failure {
    Failure {
        reason: FailureReason::ResultTooLarge,
        message: format!("standard output is larger than {MAX_RESULT_BYTES} bytes, so it is no result"),
    }
}

fn incomplete(message: &str) -> Failure {
    Failure { reason: FailureReason::ResultIncomplete, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use domain::workload::OutputMode;
    use testing::conformance::{RuntimeExt, container, process, programs};
    use testing::fake::FakeWorker;

    use super::*;

    #[tokio::test]
    async fn result_is_complete_or_replaced_by_failure() {
        let runtime = FakeWorker::near().runtime();
        let of_size = async |bytes: usize| {
            let container = runtime.made(container()).await;
            let spec = runtime::ProcessSpec {
                output: OutputMode::Spooled,
                ..process(&programs::count(bytes as u64))
            };
            let process = runtime.started(container, spec).await;
            runtime.ended(process).await;
            read(&*runtime, process).await.expect("read").map(|result| result.len())
        };
        for bytes in [0, 1, 100_000] {
            assert_eq!(of_size(bytes).await, Ok(bytes));
        }
        // The spool of the fake worker is smaller than the largest result.
        for (bytes, reason) in [
            (MAX_RESULT_BYTES, FailureReason::ResultIncomplete),
            (3 * MAX_RESULT_BYTES, FailureReason::ResultTooLarge),
        ] {
            assert_eq!(of_size(bytes).await.expect_err("a failure").reason, reason);
        }
    }
}
