//! Metadata that clients add to their calls: credentials, and the trace context of the span.

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

use crate::trace;

/// Metadata key that marks the internal calls of services, which do not count as use of the
/// cluster.
pub const INTERNAL_HEADER: &str = "gantry-internal";

/// Metadata key of the ticket with which a proxy forwards a call to the gateway of a worker.
pub const PROXY_TICKET_HEADER: &str = "gantry-proxy-ticket";

/// Metadata key of the ticket of a transfer. The gateway of a worker accepts it in place of the
/// cluster token.
pub const TICKET_HEADER: &str = "gantry-ticket";

/// Metadata that a client adds to every call.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    authorization: Option<MetadataValue<Ascii>>,
    ticket: Option<MetadataValue<Ascii>>,
    internal: bool,
}

impl Outgoing {
    /// Metadata for the internal calls of a service.
    #[must_use]
    pub fn internal() -> Self {
        Self { internal: true, ..Self::default() }
    }

    /// Adds the bearer token, if any. A token that is not a valid header value is left out, so that
    /// the service rejects the call.
    #[must_use]
    pub fn with_token(self, token: Option<&str>) -> Self {
        Self { authorization: token.and_then(|token| secret(&format!("Bearer {token}"))), ..self }
    }

    /// Adds the ticket of a transfer. It is the only credential for a gateway whose address came
    /// from a request. A ticket that is not a valid header value is left out, so that the gateway
    /// rejects the call.
    #[must_use]
    pub fn with_ticket(self, ticket: &str) -> Self {
        Self { ticket: secret(ticket), ..self }
    }
}

fn secret(text: &str) -> Option<MetadataValue<Ascii>> {
    let mut value: MetadataValue<Ascii> = text.parse().ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl Interceptor for Outgoing {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        if let Some(authorization) = &self.authorization {
            metadata.insert("authorization", authorization.clone());
        }
        if let Some(ticket) = &self.ticket {
            metadata.insert(TICKET_HEADER, ticket.clone());
        }
        if self.internal {
            metadata.insert(INTERNAL_HEADER, MetadataValue::from_static("1"));
        }
        if let Some(context) = trace::current().and_then(|context| context.parse().ok()) {
            metadata.insert(trace::TRACEPARENT, context);
        }
        Ok(request)
    }
}
