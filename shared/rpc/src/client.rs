//! How a client reaches a service.
//!
//! Connections are made when they are first used and made again when they broke; what is sent carries the trace context of the
//! current span and, where one was given, a bearer token.

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

/// Marks calls that a service makes by itself, so that they do not count as somebody's use of the cluster.
pub const INTERNAL_HEADER: &str = "gantry-internal";

/// Carries the ticket with which a proxy passes somebody's call on to a worker's gateway.
pub const PROXY_TICKET_HEADER: &str = "gantry-proxy-ticket";

/// Carries the ticket of a transfer to a worker's gateway, which lets its holder in without the token of the cluster.
pub const TICKET_HEADER: &str = "gantry-ticket";

/// A service as its clients reach it. Cheap to clone.
pub type Peer = InterceptedService<Channel, Outgoing>;

/// The address of a service is malformed.
#[derive(Debug, thiserror::Error)]
#[error(
    "{address:?} is no address of a service: write unix:///path or http://host:port, with commas between replicas"
)]
pub struct AddressError {
    address: String,
}

/// What is added to every call.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    authorization: Option<MetadataValue<Ascii>>,
    ticket: Option<MetadataValue<Ascii>>,
    internal: bool,
}

impl Outgoing {
    /// Calls that a service makes by itself.
    #[must_use]
    pub fn internal() -> Self {
        Self { internal: true, ..Self::default() }
    }

    /// Presents this bearer token, if any. A token that cannot stand in a header is left out, and so refused.
    #[must_use]
    pub fn with_token(self, token: Option<&str>) -> Self {
        Self { authorization: token.and_then(|token| secret(&format!("Bearer {token}"))), ..self }
    }

    /// Presents the ticket of a transfer: what a gateway is told of which nothing is known but that it was named. One that cannot stand
    /// in a header is left out, and so refused.
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

/// The service at `address`: `unix:///path` or `http://host:port`, or several of them with commas between them, which are replicas of
/// one service. Connects when it is first used, and again when the connection broke.
///
/// Of several replicas one is connected to, which is chosen by chance, and when it does not answer or goes away the next one. So each gets
/// its share of the clients, one may be missing, and streams and calls of one client meet the same process for as long as that lives.
pub fn peer(address: &str, outgoing: Outgoing) -> Result<Peer, AddressError> {
    let replicas = Arc::new(Replicas::new(parse(address)?));
    let endpoint = match replicas.all.as_slice() {
        [Replica::Tcp(_)] => {
            Endpoint::from_shared(address.trim().to_owned()).map_err(|_| malformed(address))?
        }
        _ => Endpoint::from_static("http://replicas"),
    };
    // Each replica has its own time to answer.
    let patience = CONNECT_PATIENCE * u32::try_from(replicas.all.len()).unwrap_or(u32::MAX);
    let endpoint = endpoint
        .connect_timeout(patience)
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        // Without these, a channel whose peer disappeared without a word stays wedged.
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .keep_alive_while_idle(true);
    let channel = endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
        let replicas = replicas.clone();
        async move { replicas.connect().await.map(TokioIo::new) }
    }));
    Ok(InterceptedService::new(channel, outgoing))
}

/// Connects to the service at `address` once and hangs up. Of several replicas one must answer.
///
/// # Errors
///
/// The address is malformed, or no replica accepts a connection within 5 s.
pub async fn listens(address: &str) -> io::Result<()> {
    let replicas = parse(address).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    Replicas::new(replicas).connect().await.map(drop)
}

/// Refuses what [`peer`] would refuse, and answers it as it is. For settings.
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
        // A path would be ignored, and whoever wrote it meant something.
        let plain = scheme == "http" && uri.path() == "/" && uri.query().is_none();
        plain.then(|| Replica::Tcp(format!("{host}:{}", uri.port_u16().unwrap_or(80))))
    };
    addresses.split(',').map(|address| one(address.trim()).ok_or_else(|| malformed(address))).collect()
}

/// Replicas of a service, and which of them is tried next.
#[derive(Debug)]
struct Replicas {
    all: Vec<Replica>,
    next: AtomicUsize,
}

impl Replicas {
    fn new(all: Vec<Replica>) -> Self {
        // Good enough to give each its share.
        let chance = RandomState::new().build_hasher().finish() as usize;
        Self { all, next: AtomicUsize::new(chance) }
    }

    /// Connects to the first that answers, each in its turn. An error says of each why it did not.
    async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let (mut kind, mut failed) = (io::ErrorKind::AddrNotAvailable, Vec::with_capacity(self.all.len()));
        for _ in 0..self.all.len() {
            let replica = &self.all[self.next.fetch_add(1, Ordering::Relaxed) % self.all.len()];
            let connecting = tokio::time::timeout(CONNECT_PATIENCE, connect(replica)).await;
            match connecting.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(connection) => return Ok(connection),
                Err(error) => {
                    kind = error.kind();
                    // In words, so that who looks for the cause of an error finds this.
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

/// How long a service may take to accept a connection.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn addresses_are_plain() {
        let tcp = |address: &str| Replica::Tcp(address.to_owned());
        assert_eq!(parse("http://a:1").ok(), Some(vec![tcp("a:1")]));
        assert_eq!(parse("http://a:1, http://[::1]:2").ok(), Some(vec![tcp("a:1"), tcp("[::1]:2")]));
        assert_eq!(parse("unix:///x,http://a").ok(), Some(vec![Replica::Unix("/x".into()), tcp("a:80")]));
        for malformed in ["", "a:1", "http://a:1,", "https://a:1", "unix://x", "http://a:1/path", "http://"] {
            assert!(parse(malformed).is_err(), "{malformed:?}");
        }
    }

    #[tokio::test]
    async fn each_replica_has_its_turn_and_one_that_is_gone_is_passed_over() {
        let (first, second) = (listen().await, listen().await);
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("bound"));
        let gone = listen().await;
        let all = [address(&first), address(&gone), address(&second)].join(",");
        drop(gone);
        let replicas = Replicas::new(parse(&all).expect("addresses"));
        for _ in 0..3 {
            replicas.connect().await.expect("somebody answers");
        }
        for listener in [&first, &second] {
            listener.accept().await.expect("it had its turn");
        }

        let ports = [first, second].map(|listener| listener.local_addr().expect("bound"));
        let error = replicas.connect().await.err().expect("nobody listens any more");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        for port in ports {
            assert!(error.to_string().contains(&format!("{port}: Connection refused")), "{error}");
        }
    }

    async fn listen() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.expect("a port")
    }
}
