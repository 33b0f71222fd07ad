//! The channel of a client to a service with one or several replicas.
//!
//! [`crate::client::peer`] creates it. A client with several addresses connects only to a replica
//! that reports by `grpc.health.v1` that it is ready, unless no replica is. If a replica rejects a
//! call with `UNAVAILABLE`, the next call connects to another one. Calls in progress stay where
//! they are. A call is sent once: it moves to another replica only before it is sent.

use std::collections::hash_map::RandomState;
use std::error::Error;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use std::{fmt, io};

use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tower::{Service, ServiceExt};

use crate::outgoing::Outgoing;

/// Maximum time for a replica to accept a connection, and to answer the check of its health.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which the next replica is checked beside one that has not answered.
const NEXT_AFTER: Duration = Duration::from_secs(1);

/// Minimum time between two departures from replicas that reject calls. No replica may be ready.
const LEAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of keep-alives on a connection with calls to one of several replicas, and the time for
/// the reply. A frozen replica costs at most both times together.
const KEEP_ALIVE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(4)];

/// Interval of keep-alives on a connection to the only replica, and the time for the reply. No
/// other replica could take over, so a busy one has more time.
const KEEP_ALIVE_ONLY: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(20)];

/// One replica of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Replica {
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

/// Channel to the replicas of a service. Cheap to clone. Its errors name the service and the
/// replica.
#[derive(Debug, Clone)]
pub struct ReplicaChannel {
    /// The channel that [`Service::poll_ready`] has reserved. `None` before.
    ready: Option<Channel>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    replicas: Arc<Replicas>,
    /// Authority of requests.
    origin: Endpoint,
    current: Mutex<Current>,
}

#[derive(Debug)]
struct Current {
    channel: Channel,
    left_at: Option<Instant>,
}

impl ReplicaChannel {
    /// Creates a channel that connects at its first call. `origin` is the authority of requests.
    pub(crate) fn new(replicas: Vec<Replica>, origin: Endpoint, outgoing: Outgoing) -> Self {
        let replicas = Arc::new(Replicas::new(replicas, outgoing));
        let channel = connect_lazily(&origin, &replicas);
        let current = Mutex::new(Current { channel, left_at: None });
        Self { ready: None, shared: Arc::new(Shared { replicas, origin, current }) }
    }
}

impl Shared {
    fn channel(&self) -> Channel {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).channel.clone()
    }

    /// Lets the next calls connect to another replica, after this one rejected a call.
    fn leave(&self) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let may_leave = current.left_at.is_none_or(|left_at| left_at.elapsed() >= LEAVE_INTERVAL);
        if self.replicas.all.len() > 1 && may_leave {
            *current = Current {
                channel: connect_lazily(&self.origin, &self.replicas),
                left_at: Some(Instant::now()),
            };
        }
    }
}

type CallFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Status>> + Send>>;

impl Service<http::Request<Body>> for ReplicaChannel {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = CallFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        let shared = &self.shared;
        let ready = self.ready.get_or_insert_with(|| shared.channel()).poll_ready(cx);
        ready.map_err(|error| shared.replicas.describe("", error))
    }

    fn call(&mut self, request: http::Request<Body>) -> CallFuture {
        let shared = self.shared.clone();
        let ready = self.ready.take();
        let path = request.uri().path().to_owned();
        Box::pin(async move {
            let sent = match ready {
                Some(mut channel) => channel.call(request).await,
                None => shared.channel().oneshot(request).await,
            };
            let response = sent.map_err(|error| shared.replicas.describe(&path, error))?;
            let status = response.headers().get("grpc-status").map(http::HeaderValue::as_bytes);
            if status.is_some_and(|status| Code::from_bytes(status) == Code::Unavailable) {
                shared.leave();
            }
            let describe = move |error: Status| shared.replicas.describe(&path, error);
            Ok(response.map(|body| Body::new(body.map_err(describe))))
        })
    }
}

/// Creates a channel that connects to a replica at its first call and after a broken connection.
fn connect_lazily(origin: &Endpoint, replicas: &Arc<Replicas>) -> Channel {
    let count = u32::try_from(replicas.all.len()).unwrap_or(u32::MAX);
    let [interval, timeout] = if count > 1 { KEEP_ALIVE } else { KEEP_ALIVE_ONLY };
    let endpoint = origin
        .clone()
        // Each replica has a separate timeout.
        .connect_timeout(CONNECT_TIMEOUT.saturating_mul(count.saturating_add(1)))
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        // Without keep-alives, a channel whose peer disappeared silently stays blocked.
        .http2_keep_alive_interval(interval)
        .keep_alive_timeout(timeout)
        .keep_alive_while_idle(count == 1);
    let replicas = replicas.clone();
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| {
        let replicas = replicas.clone();
        async move { replicas.connect().await.map(TokioIo::new) }
    }))
}

/// Replicas of a service, and the index of the next one to try.
#[derive(Debug)]
pub(crate) struct Replicas {
    all: Vec<Replica>,
    outgoing: Outgoing,
    next: AtomicUsize,
    /// Index of the replica to which the client connected last. Initially out of range.
    connected: AtomicUsize,
}

/// No replica accepted a connection. The text has the cause for each replica.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NoReplica(String);

impl Replicas {
    pub(crate) fn new(all: Vec<Replica>, outgoing: Outgoing) -> Self {
        // A hash of a random state is random enough for load balancing.
        let start = RandomState::new().build_hasher().finish() as usize % all.len().max(1);
        Self { all, outgoing, next: AtomicUsize::new(start), connected: AtomicUsize::new(usize::MAX) }
    }

    /// Connects to a replica. The error has the cause for each replica.
    async fn connect(&self) -> io::Result<Box<dyn Io>> {
        let index = if self.all.len() == 1 { 0 } else { self.find_ready().await? };
        self.next.store(index + 1, Ordering::Relaxed);
        let connection = connect_in_time(&self.all[index]).await.map_err(|error| {
            io::Error::new(error.kind(), NoReplica(format!("{}: {error}", self.all[index])))
        })?;
        self.connected.store(index, Ordering::Relaxed);
        Ok(connection)
    }

    /// Finds a replica that is ready, or else one that answers. Checks the replicas in turn, and
    /// the next one beside a replica that does not answer soon.
    async fn find_ready(&self) -> io::Result<usize> {
        let (count, start) = (self.all.len(), self.next.load(Ordering::Relaxed));
        let mut unchecked = (0..count).map(|offset| (start + offset) % count);
        let (mut checks, mut not_ready, mut failed) = (JoinSet::new(), None, Vec::with_capacity(count));
        let mut kind = io::ErrorKind::AddrNotAvailable;
        loop {
            if let Some(index) = unchecked.next() {
                let (replica, outgoing) = (self.all[index].clone(), self.outgoing.clone());
                checks.spawn(async move { (index, is_ready(&replica, outgoing).await) });
            }
            let limit = if unchecked.len() > 0 { NEXT_AFTER } else { CONNECT_TIMEOUT * 2 };
            let Ok(checked) = tokio::time::timeout(limit, checks.join_next()).await else { continue };
            match checked {
                Some(Ok((index, Ok(true)))) => return Ok(index),
                Some(Ok((index, Ok(false)))) => _ = not_ready.get_or_insert(index),
                Some(Ok((index, Err(error)))) => {
                    kind = error.kind();
                    failed.push(format!("{}: {error}", self.all[index]));
                }
                Some(Err(error)) => failed.push(error.to_string()),
                None => break,
            }
        }
        // Its calls fail with the reason why it is not ready.
        not_ready.ok_or_else(|| io::Error::new(kind, NoReplica(failed.join(", "))))
    }

    /// Turns an error of the transport into a status that names the service and the replica. The
    /// source of the status is the cause.
    fn describe(&self, path: &str, error: impl Error + Send + Sync + 'static) -> Status {
        let status = Status::from_error(Box::new(error));
        let (mut cause, mut kind) = (status.message().to_owned(), io::ErrorKind::Other);
        let (mut source, mut names_replica) = (status.source(), false);
        while let Some(error) = source {
            cause = error.to_string();
            if let Some(error) = error.downcast_ref::<io::Error>() {
                kind = error.kind();
                names_replica |= error.get_ref().is_some_and(|inner| inner.is::<NoReplica>());
            }
            source = error.source();
        }
        let service = service_of(path);
        // The only replica is the one that the caller knows.
        let is_only = self.all.len() == 1;
        let connected = self.all.get(if is_only { 0 } else { self.connected.load(Ordering::Relaxed) });
        let named = match connected {
            Some(replica) if !names_replica => format!("{replica}: {cause}"),
            _ => cause.clone(),
        };
        let mut status = Status::new(status.code(), format!("cannot reach the {service} at {named}"));
        status.set_source(Arc::new(io::Error::new(kind, if is_only { cause } else { named })));
        status
    }
}

/// Returns the name of the service that has the call `path`.
fn service_of(path: &str) -> &str {
    match path.trim_start_matches("/gantry.").split('.').next() {
        Some("artifacts") => "artifact-store",
        Some("runtime") => "runtime-gateway",
        Some(name @ ("scheduler" | "streamer")) => name,
        _ => "service",
    }
}

/// Whether a replica reports that it is ready. A replica that rejects the question is ready: it
/// rejects the calls of this client, too, and says why.
async fn is_ready(replica: &Replica, outgoing: Outgoing) -> io::Result<bool> {
    let checking = async {
        let mut connection = Some(TokioIo::new(connect(replica).await?));
        let once = tower::service_fn(move |_: http::Uri| {
            let connection = connection.take().ok_or(io::ErrorKind::NotConnected);
            async move { connection.map_err(io::Error::from) }
        });
        let endpoint = Endpoint::from_static("http://replicas");
        let channel = endpoint.connect_with_connector(once).await.map_err(io::Error::other)?;
        let mut health = HealthClient::with_interceptor(channel, outgoing);
        match health.check(HealthCheckRequest::default()).await {
            Ok(health) => Ok(health.into_inner().status() == ServingStatus::Serving),
            Err(status) if is_from_transport(&status) => {
                let mut cause = (status.message().to_owned(), status.source());
                while let Some(error) = cause.1 {
                    cause = (error.to_string(), error.source());
                }
                Err(io::Error::other(cause.0))
            }
            Err(_) => Ok(true),
        }
    };
    let timeout = || {
        let text = format!("accepts connections and did not answer within {CONNECT_TIMEOUT:?}");
        io::Error::new(io::ErrorKind::TimedOut, text)
    };
    tokio::time::timeout(CONNECT_TIMEOUT, checking).await.unwrap_or_else(|_| Err(timeout()))
}

fn is_from_transport(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled)
}

/// Connects to one of `replicas`, and drops the connection.
pub(crate) async fn try_connect(replicas: &[Replica]) -> io::Result<()> {
    let (mut kind, mut failed) = (io::ErrorKind::AddrNotAvailable, Vec::with_capacity(replicas.len()));
    for replica in replicas {
        match connect_in_time(replica).await {
            Ok(_) => return Ok(()),
            Err(error) => {
                kind = error.kind();
                // The text is kept, because `io::Error` has only one source.
                failed.push(format!("{replica}: {error}"));
            }
        }
    }
    Err(io::Error::new(kind, failed.join(", ")))
}

async fn connect_in_time(replica: &Replica) -> io::Result<Box<dyn Io>> {
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, connect(replica)).await;
    connecting.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
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

#[cfg(test)]
mod tests;
