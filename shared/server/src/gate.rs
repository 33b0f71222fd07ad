//! The services of a process, behind a gate that opens once they have started: a process answers that it is alive and not yet ready
//! from its first moment on, while it still waits for its database.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::service::Routes;
use tower_layer::Layer;
use tower_service::Service;

/// Opens once. Clones are the same gate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<OnceLock<Routes>>);

impl Gate {
    /// Lets calls in to `routes` from now on.
    pub(crate) fn open(&self, routes: Routes) {
        // It is opened by one caller, once.
        self.0.set(routes.prepare()).ok();
    }
}

/// What answers before the gate opens, and beside it afterwards.
fn is_always_open(path: &str) -> bool {
    path.starts_with("/grpc.health.")
        || path.starts_with("/grpc.reflection.")
        || path.starts_with("/gantry.capabilities.")
}

impl<S> Layer<S> for Gate {
    type Service = GatedService<S>;

    fn layer(&self, inner: S) -> GatedService<S> {
        GatedService { inner, gate: self.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct GatedService<S> {
    inner: S,
    gate: Gate,
}

impl<S> Service<Request<Body>> for GatedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if is_always_open(request.uri().path()) {
            return Box::pin(self.inner.call(request));
        }
        match self.gate.0.get() {
            Some(routes) => Box::pin(routes.clone().call(request)),
            None => {
                let starting = rpc::Reason::Unavailable.status("gantry", "the service is starting");
                Box::pin(std::future::ready(Ok(starting.into_http())))
            }
        }
    }
}
