//! Clients of services.
//!
//! A client connects at its first call, and reconnects after a broken connection. Each call carries
//! the trace context of the current span and the credentials of [`Outgoing`].

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{fmt, io};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
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

/// Client connection to a service. Cheap to clone.
pub type Peer = InterceptedService<Channel, Outgoing>;

/// The address of a service is malformed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot parse service address {address:?}: use unix:///path or http://host:port, with commas between replicas"
)]
pub struct AddressError {
    address: String,
}

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

/// Returns a client of the service at `address`: `unix:///path` or `http://host:port`, or several
/// replicas separated by commas. The client connects at its first call, and reconnects after a
/// broken connection.
///
/// The client connects to a random replica. If that replica does not answer or disconnects, the
/// client connects to the next one. Replicas therefore share the clients, and all calls of one
/// client reach the same process while it lives.
pub fn peer(address: &str, outgoing: Outgoing) -> Result<Peer, AddressError> {
    let replicas = Arc::new(Replicas::new(parse(address)?));
    let endpoint = match replicas.all.as_slice() {
        [Replica::Tcp(_)] => {
            Endpoint::from_shared(address.trim().to_owned()).map_err(|_| malformed(address))?
        }
        _ => Endpoint::from_static("http://replicas"),
    };
    // Each replica has a separate timeout.
    let timeout = CONNECT_TIMEOUT * u32::try_from(replicas.all.len()).unwrap_or(u32::MAX);
    let endpoint = endpoint
        .connect_timeout(timeout)
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        // Without keep-alives, a channel whose peer disappeared silently stays blocked.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true);
    let channel = endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let replicas = replicas.clone();
        async move { replicas.connect().await.map(TokioIo::new) }
    }));
    Ok(InterceptedService::new(channel, outgoing))
}

/// Checks that a replica of the service at `address` accepts a connection.
///
/// # Errors
///
/// The address is malformed, or no replica accepts a connection within 5 s each.
pub async fn listens(address: &str) -> io::Result<()> {
    let replicas = parse(address).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Replicas::new(replicas).connect().await.map(drop)
}

/// Returns `text` unchanged if [`peer`] accepts it as an address. Used for settings.
pub fn addresses(text: &str) -> Result<String, AddressError> {
    parse(text).map(|_| text.to_owned())
}

fn malformed(address: &str) -> AddressError {
    AddressError { address: address.to_owned() }
}

/// One replica of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Replica {
    /// `host:port`.
    Tcp(String),
    Unix(PathBuf),
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

fn parse(addresses: &str) -> Result<Vec<Replica>, AddressError> {
    let one = |address: &str| {
        if let Some(path) = address.strip_prefix("unix://") {
            return path.starts_with('/').then(|| Replica::Unix(path.into()));
        }
        let uri: Uri = address.parse().ok()?;
        let (scheme, host) = (uri.scheme_str()?, uri.host()?);
        // Reject a path, because it would be silently ignored.
        let plain = scheme == "http" && uri.path() == "/" && uri.query().is_none();
        plain.then(|| Replica::Tcp(format!("{host}:{}", uri.port_u16().unwrap_or(80))))
    };
    addresses.split(',').map(|address| one(address.trim()).ok_or_else(|| malformed(address))).collect()
}

/// Replicas of a service, and the index of the next one to try.
#[derive(Debug)]
struct Replicas {
    all: Vec<Replica>,
    next: AtomicUsize,
}

impl Replicas {
    fn new(all: Vec<Replica>) -> Self {
        // A hash of a random state is random enough for load balancing.
        let start = RandomState::new().build_hasher().finish() as usize;
        Self { all, next: AtomicUsize::new(start) }
    }

    /// Connects to the first replica that answers. The error contains the cause for each replica.
    async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let (mut kind, mut failed) = (io::ErrorKind::AddrNotAvailable, Vec::with_capacity(self.all.len()));
        for _ in 0..self.all.len() {
            let replica = &self.all[self.next.fetch_add(1, Ordering::Relaxed) % self.all.len()];
            let connecting = tokio::time::timeout(CONNECT_TIMEOUT, connect(replica)).await;
            match connecting.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(connection) => return Ok(connection),
                Err(error) => {
                    kind = error.kind();
                    // The text is kept, because `io::Error` has only one source.
                    failed.push(format!("{replica}: {error}"));
                }
            }
        }
        Err(io::Error::new(kind, failed.join(", ")))
    }
}

async fn connect(replica: &Replica) -> io::Result<Box<dyn Io>> {
    Ok(match replica {
        Replica::Unix(path) => Box::new(UnixStream::connect(path).await?),
        Replica::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
    })
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Maximum time for a replica to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn address_with_path_or_tls_is_rejected() {
        let tcp = |address: &str| Replica::Tcp(address.to_owned());
        assert_eq!(parse("http://a:1").ok(), Some(vec![tcp("a:1")]));
        assert_eq!(parse("http://a:1, http://[::1]:2").ok(), Some(vec![tcp("a:1"), tcp("[::1]:2")]));
        assert_eq!(parse("unix:///x,http://a").ok(), Some(vec![Replica::Unix("/x".into()), tcp("a:80")]));
        for malformed in ["", "a:1", "http://a:1,", "https://a:1", "unix://x", "http://a:1/path", "http://"] {
            assert!(parse(malformed).is_err(), "{malformed:?}");
        }
    }

    #[tokio::test]
    async fn client_skips_unreachable_replica() {
        let (first, second) = (listen().await, listen().await);
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("bound"));
        let gone = listen().await;
        let all = [address(&first), address(&gone), address(&second)].join(",");
        drop(gone);
        let replicas = Replicas::new(parse(&all).expect("addresses"));
        for _ in 0..3 {
            replicas.connect().await.expect("a replica answers");
        }
        for listener in [&first, &second] {
            listener.accept().await.expect("a connection");
        }

        let ports = [first, second].map(|listener| listener.local_addr().expect("bound"));
        let error = replicas.connect().await.err().expect("no replica listens");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        for port in ports {
            assert!(error.to_string().contains(&format!("{port}: Connection refused")), "{error}");
        }
    }

    async fn listen() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.expect("a port")
    }
}
