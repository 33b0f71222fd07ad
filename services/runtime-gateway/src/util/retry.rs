//! Calls that are repeated until the other service answers.

use std::future::Future;
use std::time::Duration;

use rpc::{Reason, Refusal};

/// Repeats `call` until it succeeds or is rejected with a permanent error. `call` must be
/// idempotent.
pub(crate) async fn until_answered<T, F>(doing: &str, mut call: impl FnMut() -> F) -> Result<T, Refusal>
where
    F: Future<Output = Result<T, Refusal>>,
{
    let mut pause = Duration::from_millis(20);
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(refusal) if refusal.is_transient() => {
                tracing::debug!(error = %refusal, "cannot {doing}: trying again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
            Err(refusal) => return Err(refusal),
        }
    }
}

/// Whether a call was rejected because another session has replaced this one.
pub(crate) fn is_superseded(refusal: &Refusal) -> bool {
    refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation)
}
