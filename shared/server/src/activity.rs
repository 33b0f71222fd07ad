//! Activity of callers. A local cluster shuts down when no caller has used it for a while.
//!
//! A call counts from its first byte to the last byte of its response. Internal calls between
//! services do not count.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use rpc::client::INTERNAL_HEADER;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// A counter of calls in flight. Cheap to clone; all clones share the counter.
#[derive(Debug, Clone)]
pub struct Activity(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    calls: usize,
    last: Instant,
}

impl Default for Activity {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { calls: 0, last: Instant::now() })))
    }
}

impl Activity {
    /// Returns the time since the end of the last call, or zero while a call is in flight.
    #[must_use]
    pub fn idle_for(&self) -> Duration {
        let state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if state.calls > 0 { Duration::ZERO } else { state.last.elapsed() }
    }

    pub(crate) fn layer(&self) -> ActivityLayer {
        ActivityLayer(self.clone())
    }

    fn enter(&self) -> CallGuard {
        self.record(1);
        CallGuard(self.clone())
    }

    fn record(&self, by: isize) {
        let mut state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.calls = state.calls.saturating_add_signed(by);
        state.last = Instant::now();
    }
}

/// A call in flight. Its drop ends the call.
#[derive(Debug)]
struct CallGuard(Activity);

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.record(-1);
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ActivityLayer(Activity);

impl<S> Layer<S> for ActivityLayer {
    type Service = ActivityService<S>;

    fn layer(&self, inner: S) -> ActivityService<S> {
        ActivityService { inner, activity: self.0.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct ActivityService<S> {
    inner: S,
    activity: Activity,
}

impl<S> Service<Request<Body>> for ActivityService<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Send,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.headers().contains_key(INTERNAL_HEADER) {
            return Box::pin(self.inner.call(request));
        }
        let call = self.activity.enter();
        let response = self.inner.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| Body::new(ActivityBody { body, _call: call }))) })
    }
}

struct ActivityBody {
    body: Body,
    _call: CallGuard,
}

impl HttpBody for ActivityBody {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, tonic::Status>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
