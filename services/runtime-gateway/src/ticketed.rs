//! Calls that a door passes on: its ticket is verified before anything else is looked at.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use domain::WorkerId;
use http::{Request, Response};
use rpc::client::DOOR_TICKET_HEADER;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use crate::gateway::Gateway;

/// In the extensions of a call that came through a door: the worker that it may be for, and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ThroughDoor(pub(crate) WorkerId);

/// A service of which no call with a ticket is answered unless the ticket is good.
#[derive(Clone)]
pub(crate) struct Ticketed<S> {
    inner: S,
    gateway: Gateway,
}

impl<S> Ticketed<S> {
    pub(crate) fn new(inner: S, gateway: Gateway) -> Self {
        Self { inner, gateway }
    }
}

impl<S: NamedService> NamedService for Ticketed<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Ticketed<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let Some(ticket) = request.headers_mut().remove(DOOR_TICKET_HEADER) else {
            return Box::pin(self.inner.call(request));
        };
        let (gateway, mut inner) = (self.gateway.clone(), self.inner.clone());
        Box::pin(async move {
            match gateway.admit_door(ticket.to_str().unwrap_or_default()).await {
                Ok(claims) => {
                    request.extensions_mut().insert(ThroughDoor(claims.worker));
                    inner.call(request).await
                }
                Err(error) => Ok(tonic::Status::from(error).into_http()),
            }
        })
    }
}
