//! Runs blocking work on threads, outside of async tasks.

use runtime::RuntimeError;

/// Runs `work` on a blocking thread.
pub(crate) async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<RuntimeError> + Send + 'static,
{
    let span = tracing::Span::current();
    let done = tokio::task::spawn_blocking(move || span.in_scope(work)).await;
    done.unwrap_or_else(|error| Err(RuntimeError::Other(format!("a blocking task failed: {error}")).into()))
}
