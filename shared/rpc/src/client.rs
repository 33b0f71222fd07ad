//! How a client reaches a service.
//!
//! Connections are made when they are first used and made again when they broke; what is sent carries the trace context of the
//! current span and, where one was given, a bearer token.

use std::time::Duration;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::trace;

/// Marks calls that a service makes by itself, so that they do not count as somebody's use of the cluster.
pub const INTERNAL_HEADER: &str = "gantry-internal";

/// Carries the ticket with which a door passes somebody's call on to a worker's gateway.
pub const DOOR_TICKET_HEADER: &str = "gantry-door-ticket";

/// A service as its clients reach it. Cheap to clone.
pub type Peer = InterceptedService<Channel, Outgoing>;

/// The address of a service is malformed.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is no address of a service: write unix:///path or http://host:port")]
pub struct AddressError {
    address: String,
}

/// What is added to every call.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    authorization: Option<MetadataValue<Ascii>>,
    internal: bool,
}

impl Outgoing {
    /// Calls that a service makes by itself.
    #[must_use]
    pub fn internal() -> Self {
        Self { authorization: None, internal: true }
    }

    /// Presents this bearer token, if any. A token that cannot stand in a header is left out, and so refused.
    #[must_use]
    pub fn with_token(self, token: Option<&str>) -> Self {
        let authorization = token.and_then(|token| {
            let mut value: MetadataValue<Ascii> = format!("Bearer {token}").parse().ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self { authorization, ..self }
    }
}

impl Interceptor for Outgoing {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let metadata = request.metadata_mut();
        if let Some(authorization) = &self.authorization {
            metadata.insert("authorization", authorization.clone());
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

/// The service at `address`: `unix:///path` or `http://host:port`. Connects when it is first used.
pub fn peer(address: &str, outgoing: Outgoing) -> Result<Peer, AddressError> {
    let malformed = || AddressError { address: address.to_owned() };
    if !address.starts_with("unix:///") && !address.starts_with("http://") {
        return Err(malformed());
    }
    let endpoint = Endpoint::from_shared(address.to_owned()).map_err(|_| malformed())?;
    let channel = endpoint
        .connect_timeout(Duration::from_secs(5))
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        // Without these, a channel whose peer disappeared without a word stays wedged.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true)
        .tcp_nodelay(true)
        .connect_lazy();
    Ok(InterceptedService::new(channel, outgoing))
}
