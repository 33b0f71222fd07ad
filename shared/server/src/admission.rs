//! Who is let in: whoever may open the socket; over TCP, where a token was set, whoever presents it, or a ticket to a service that verifies it.

use std::future::{Ready, ready};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use futures::future::Either;
use http::{HeaderMap, Request, Response};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

use crate::PeerKind;

#[derive(Debug, Clone)]
pub(crate) struct AdmissionLayer(Arc<Rules>);

#[derive(Debug)]
struct Rules {
    /// What callers over TCP present. `None`: nothing.
    token: Option<String>,
    /// Services that verify tickets by themselves.
    ticketed: Ticketed,
}

/// Services that verify tickets by themselves, and the headers in which they look for one. They may be added while others are served already;
/// clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ticketed(Arc<RwLock<Vec<TicketedService>>>);

type TicketedService = (&'static str, &'static [&'static str]);

impl Ticketed {
    pub(crate) fn add(&self, service: &'static str, headers: &'static [&'static str]) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).push((service, headers));
    }

    /// Whether `service` looks for a ticket where there is one.
    fn verifies(&self, service: &str, headers: &HeaderMap) -> bool {
        let ticketed = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut its = ticketed.iter().filter(|(name, _)| *name == service).flat_map(|(_, headers)| *headers);
        its.any(|name| headers.contains_key(*name))
    }
}

impl AdmissionLayer {
    pub(crate) fn new(token: Option<String>, ticketed: Ticketed) -> Self {
        Self(Arc::new(Rules { token, ticketed }))
    }
}

impl<S> Layer<S> for AdmissionLayer {
    type Service = Admission<S>;

    fn layer(&self, inner: S) -> Admission<S> {
        Admission { inner, rules: self.0.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Admission<S> {
    inner: S,
    rules: Arc<Rules>,
}

impl<S> Service<Request<Body>> for Admission<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.rules.admit(&request) {
            Ok(()) => Either::Left(self.inner.call(request)),
            Err(status) => Either::Right(ready(Ok(status.into_http()))),
        }
    }
}

impl Rules {
    fn admit<B>(&self, request: &Request<B>) -> Result<(), Status> {
        let Some(token) = &self.token else { return Ok(()) };
        if request.extensions().get::<PeerKind>() == Some(&PeerKind::Unix) {
            return Ok(());
        }
        let presented = request.headers().get("authorization");
        let presented =
            presented.and_then(|value| value.to_str().ok()).and_then(|value| value.strip_prefix("Bearer "));
        let with_token = presented.is_some_and(|presented| same(presented.as_bytes(), token.as_bytes()));
        if with_token || self.verifies_ticket(request) {
            return Ok(());
        }
        let message = "present the token of this cluster as `authorization: Bearer TOKEN`; each service logs the path of its token file";
        Err(rpc::Reason::Unauthenticated.status("gantry", message))
    }

    /// Whether the service that is called looks at the ticket that the call has.
    fn verifies_ticket<B>(&self, request: &Request<B>) -> bool {
        let service = request.uri().path().strip_prefix('/').and_then(|path| path.split('/').next());
        service.is_some_and(|service| self.ticketed.verifies(service, request.headers()))
    }
}

/// Compares without telling by its duration where the first difference is.
fn same(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use rpc::client::{DOOR_TICKET_HEADER, TICKET_HEADER};

    use super::*;

    fn admitted(path: &str, headers: &[(&'static str, &str)], peer: PeerKind) -> bool {
        let ticketed = Ticketed::default();
        ticketed.add("gantry.runtime.v1.Volumes", &[DOOR_TICKET_HEADER, TICKET_HEADER]);
        ticketed.add("gantry.runtime.v1.Containers", &[DOOR_TICKET_HEADER]);
        let rules = Rules { token: Some("secret".to_owned()), ticketed };
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        rules.admit(&request.extension(peer).body(()).expect("a request")).is_ok()
    }

    #[test]
    fn a_ticket_opens_only_services_that_verify_it() {
        let volumes = "/gantry.runtime.v1.Volumes/Read";
        let ticket = [(DOOR_TICKET_HEADER, "anything")];
        assert!(admitted(volumes, &ticket, PeerKind::Tcp), "the service verifies it");
        for path in ["/gantry.scheduler.v1.Workers/GetWorker", "/gantry.runtime.v1.Volumes2/Read", "/"] {
            assert!(!admitted(path, &ticket, PeerKind::Tcp), "{path}");
            assert!(admitted(path, &[("authorization", "Bearer secret")], PeerKind::Tcp), "{path}");
            assert!(admitted(path, &[], PeerKind::Unix), "{path}");
        }
        let transfer = [(TICKET_HEADER, "anything")];
        assert!(admitted(volumes, &transfer, PeerKind::Tcp));
        assert!(admitted("/gantry.runtime.v1.Containers/Attach", &ticket, PeerKind::Tcp));
        assert!(!admitted("/gantry.runtime.v1.Containers/Attach", &transfer, PeerKind::Tcp));
        assert!(!admitted(volumes, &[], PeerKind::Tcp));
        assert!(!admitted(volumes, &[("authorization", "Bearer secrey")], PeerKind::Tcp));
        assert!(!admitted(volumes, &[("authorization", "secret")], PeerKind::Tcp));
    }
}
