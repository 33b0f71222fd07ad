//! Deadlines of calls. A call that exceeds its deadline is rejected with `DEADLINE_EXCEEDED` and
//! error details.
//!
//! tonic also enforces the deadline, but rejects with `CANCELLED` and without details. This layer
//! acts earlier.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use tokio::time::Instant;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// Time by which this layer acts before tonic, whose clock has this resolution.
const MARGIN: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy)]
pub(crate) struct DeadlineLayer;

impl<S> Layer<S> for DeadlineLayer {
    type Service = DeadlineService<S>;

    fn layer(&self, inner: S) -> DeadlineService<S> {
        DeadlineService(inner)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct DeadlineService<S>(S);

impl<S> Service<Request<Body>> for DeadlineService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let deadline = deadline(request.headers());
        let response = self.0.call(request);
        let Some(deadline) = deadline else { return Box::pin(response) };
        // The timer must be created before the first await, so that it fires before that of tonic.
        let late = tokio::time::sleep_until(deadline.checked_sub(MARGIN).unwrap_or(deadline));
        Box::pin(async move {
            tokio::select! {
                biased;
                response = response => response,
                () = late => {
                    let message = "cannot complete the call before its deadline";
                    Ok(rpc::Reason::DeadlineExceeded.status("gantry", message).into_http())
                }
            }
        })
    }
}

/// Returns the deadline of a call from its header `grpc-timeout`. `None` if the call has no
/// deadline.
#[must_use]
pub fn deadline(headers: &HeaderMap) -> Option<Instant> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok()?;
    let timeout = match unit {
        "H" => Duration::from_secs(number.checked_mul(3600)?),
        "M" => Duration::from_secs(number.checked_mul(60)?),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    };
    Instant::now().checked_add(timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the response to a call with the header `timeout`, which the service answers after
    /// `takes`.
    async fn called(timeout: Option<&str>, takes: Duration) -> Response<Body> {
        let inner = tower::service_fn(move |_: Request<Body>| async move {
            tokio::time::sleep(takes).await;
            Ok::<_, std::convert::Infallible>(Response::new(Body::empty()))
        });
        let mut request = Request::builder();
        if let Some(timeout) = timeout {
            request = request.header("grpc-timeout", timeout);
        }
        let mut service = DeadlineLayer.layer(inner);
        service.call(request.body(Body::empty()).expect("a request")).await.expect("answered")
    }

    #[tokio::test(start_paused = true)]
    async fn late_call_is_rejected_with_reason() {
        let began = Instant::now();
        let answer = called(Some("2S"), Duration::from_secs(60)).await;
        let status = tonic::Status::from_header_map(answer.headers()).expect("a status");
        let refusal = rpc::Refusal::from(status);
        assert!(refusal.is(rpc::Reason::DeadlineExceeded), "{refusal}");
        let took = began.elapsed();
        assert!(took < Duration::from_secs(2) && took > Duration::from_millis(1900), "{took:?}");
        for in_time in [Some("2S"), Some("2"), Some("x"), None] {
            let answer = called(in_time, Duration::from_secs(1)).await;
            assert!(answer.headers().is_empty(), "{in_time:?}: {answer:?}");
        }
    }
}
