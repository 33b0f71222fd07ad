//! Admission of calls.
//!
//! The layer admits every call over a Unix socket. Over TCP it admits a call with the cluster
//! token, and a call with a ticket for a service that verifies tickets.

use std::future::{Ready, ready};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};

use futures::future::Either;
use http::{HeaderMap, Request, Response};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

use crate::caller::Caller;

#[derive(Debug, Clone)]
pub(crate) struct AdmissionLayer(Arc<Rules>);

#[derive(Debug)]
struct Rules {
    /// The token of callers over TCP. `None` admits every caller.
    token: Option<String>,
    ticketed: TicketServices,
}

/// Services that verify tickets, with the headers of the tickets. Services may be added while the
/// server runs. All clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct TicketServices(Arc<RwLock<Vec<TicketedService>>>);

type TicketedService = (&'static str, &'static [&'static str]);

impl TicketServices {
    pub(crate) fn add(&self, service: &'static str, headers: &'static [&'static str]) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).push((service, headers));
    }

    /// Whether the call has a header with a ticket that `service` verifies.
    fn verifies(&self, service: &str, headers: &HeaderMap) -> bool {
        let ticketed = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut names =
            ticketed.iter().filter(|(name, _)| *name == service).flat_map(|(_, headers)| *headers);
        names.any(|name| headers.contains_key(*name))
    }
}

impl AdmissionLayer {
    pub(crate) fn new(token: Option<String>, ticketed: TicketServices) -> Self {
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
        let caller = request.extensions().get::<Caller>();
        if caller.is_some_and(Caller::is_local) {
            return Ok(());
        }
        if self.token.as_deref().is_none_or(|token| presents(token, request.headers())) {
            if let Some(caller) = caller {
                caller.authenticated();
            }
            return Ok(());
        }
        // The service calls `Caller::authenticated` after it has verified the ticket.
        if self.verifies_ticket(request) {
            return Ok(());
        }
        let message = "cannot admit the call without a token: present the token of this cluster as `authorization: Bearer TOKEN`; each service logs the path of its token file";
        Err(rpc::Reason::Unauthenticated.status("gantry", message))
    }

    /// Whether the called service verifies the ticket of the call.
    fn verifies_ticket<B>(&self, request: &Request<B>) -> bool {
        let service = request.uri().path().strip_prefix('/').and_then(|path| path.split('/').next());
        service.is_some_and(|service| self.ticketed.verifies(service, request.headers()))
    }
}

/// Whether a call with these headers presents `token`.
pub(crate) fn presents(token: &str, headers: &HeaderMap) -> bool {
    let presented = headers.get("authorization").and_then(|value| value.to_str().ok());
    let presented = presented.and_then(|value| value.split_once(' '));
    presented.is_some_and(|(scheme, presented)| {
        scheme.eq_ignore_ascii_case("bearer") && same(presented.as_bytes(), token.as_bytes())
    })
}

/// Compares two texts of equal length in constant time.
fn same(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use rpc::client::{PROXY_TICKET_HEADER, TICKET_HEADER};

    use super::*;
    use crate::unauthenticated::{Limits, Probation, Unauthenticated};

    const VOLUMES: &str = "/gantry.runtime.v1.Volumes/Read";

    fn probation() -> Probation {
        Unauthenticated::new(Limits::default()).admit([192, 0, 2, 1].into()).0
    }

    fn admitted(path: &str, headers: &[(&'static str, &str)], caller: Caller) -> bool {
        let ticketed = TicketServices::default();
        ticketed.add("gantry.runtime.v1.Volumes", &[PROXY_TICKET_HEADER, TICKET_HEADER]);
        ticketed.add("gantry.runtime.v1.Containers", &[PROXY_TICKET_HEADER]);
        let rules = Rules { token: Some("secret".to_owned()), ticketed };
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        rules.admit(&request.extension(caller).body(()).expect("a request")).is_ok()
    }

    fn over_tcp(path: &str, headers: &[(&'static str, &str)]) -> bool {
        admitted(path, headers, Caller::over_tcp(probation()))
    }

    #[test]
    fn ticket_admits_only_to_verifying_services() {
        let ticket = [(PROXY_TICKET_HEADER, "anything")];
        assert!(over_tcp(VOLUMES, &ticket), "the service verifies it");
        for path in ["/gantry.scheduler.v1.Workers/GetWorker", "/gantry.runtime.v1.Volumes2/Read", "/"] {
            assert!(!over_tcp(path, &ticket), "{path}");
            assert!(over_tcp(path, &[("authorization", "Bearer secret")]), "{path}");
            assert!(admitted(path, &[], Caller::over_unix()), "{path}");
        }
        let transfer = [(TICKET_HEADER, "anything")];
        assert!(over_tcp(VOLUMES, &transfer));
        assert!(over_tcp("/gantry.runtime.v1.Containers/Attach", &ticket));
        assert!(!over_tcp("/gantry.runtime.v1.Containers/Attach", &transfer));
        assert!(!over_tcp(VOLUMES, &[]));
        assert!(!over_tcp(VOLUMES, &[("authorization", "Bearer secrey")]));
        assert!(!over_tcp(VOLUMES, &[("authorization", "secret")]));
        assert!(over_tcp("/", &[("authorization", "bearer secret")]), "the scheme is case-insensitive");
    }

    #[test]
    fn only_token_ends_probation() {
        let ended = |header: (&'static str, &str)| {
            let probation = probation();
            admitted(VOLUMES, &[header], Caller::over_tcp(probation.clone()));
            probation.has_ended()
        };
        assert!(ended(("authorization", "Bearer secret")));
        assert!(!ended(("authorization", "Bearer secrey")));
        assert!(!ended((TICKET_HEADER, "anything")), "the service has not verified the ticket yet");
    }
}
