//! Calls that are repeated until they are answered.

use std::future::Future;
use std::time::Duration;

use rpc::{Reason, Refusal};

/// Repeats `call` until it is answered or refused for a reason that repeating does not change.
///
/// Every call made through this may be repeated safely: the contracts say so.
pub(crate) async fn until_answered<T, F>(doing: &str, mut call: impl FnMut() -> F) -> Result<T, Refusal>
where
    F: Future<Output = Result<T, Refusal>>,
{
    let mut pause = Duration::from_millis(20);
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(refusal) if refusal.is_transient() => {
                tracing::debug!(error = %refusal, "cannot {doing} just now");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(2));
            }
            Err(refusal) => return Err(refusal),
        }
    }
}

/// Whether a call was refused because its session is not the worker's session any more.
pub(crate) fn is_superseded(refusal: &Refusal) -> bool {
    refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation)
}
