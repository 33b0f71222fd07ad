//! Authentication of calls by a proxy ticket or a transfer ticket.
//!
//! Invariant: the ticket is verified before any other part of the call is read.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{HeaderValue, Request, Response};
use rpc::client::{PROXY_TICKET_HEADER, TICKET_HEADER};
use server::Caller;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use crate::worker_set::{OnlyFor, WorkerSet};

/// A service that answers a call with a ticket only if the ticket is valid.
#[derive(Clone)]
pub(crate) struct TicketAuth<S> {
    inner: S,
    gateway: WorkerSet,
}

impl<S> TicketAuth<S> {
    pub(crate) fn new(inner: S, gateway: WorkerSet) -> Self {
        Self { inner, gateway }
    }
}

impl<S: NamedService> NamedService for TicketAuth<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for TicketAuth<S>
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
        let headers = request.headers_mut();
        let tickets = (headers.remove(PROXY_TICKET_HEADER), headers.remove(TICKET_HEADER));
        let (gateway, mut inner) = (self.gateway.clone(), self.inner.clone());
        Box::pin(async move {
            let text = |ticket: &HeaderValue| ticket.to_str().unwrap_or_default().to_owned();
            let admitted = match tickets {
                (Some(proxy), _) => gateway.admit_proxy(&text(&proxy)).await,
                (None, Some(transfer)) => gateway.admit_transfer(&text(&transfer)).await,
                (None, None) => return inner.call(request).await,
            };
            match admitted {
                Ok(worker) => {
                    if let Some(caller) = request.extensions().get::<Caller>() {
                        caller.authenticated();
                    }
                    request.extensions_mut().insert(OnlyFor(worker));
                    inner.call(request).await
                }
                Err(error) => Ok(tonic::Status::from(error).into_http()),
            }
        })
    }
}

#[cfg(test)]
mod tests;
