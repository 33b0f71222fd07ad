//! A gate in front of the services of a process, which opens when the services have started.
//!
//! Health checks work from the beginning, for example while a service waits for its database.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::service::Routes;
use tower_layer::Layer;
use tower_service::Service;

/// A gate that opens once. All clones are the same gate.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<OnceLock<Routes>>);

impl Gate {
    /// Opens the gate to `routes`.
    pub(crate) fn open(&self, routes: Routes) {
        // The host opens the gate once, so this cannot fail.
        self.0.set(routes.prepare()).ok();
    }
}

/// Whether `path` belongs to a service that does not need the gate: health, reflection or
/// capabilities.
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
                let starting = rpc::Reason::Unavailable
                    .status("gantry", "cannot accept the call: the service is starting");
                Box::pin(std::future::ready(Ok(starting.into_http())))
            }
        }
    }
}
