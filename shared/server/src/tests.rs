//! Tests of admission to a host over real connections.

use std::fs::Permissions;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rustix::thread::set_thread_res_uid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::operator_endpoints::{self, GaugeUpdates, Page, Recorder};
use crate::readiness::Readiness;
use crate::unauthenticated::Limits;
use crate::{Host, Listener};

const TOKEN: &str = "secret";
/// Maximum time of each awaited event.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A deadline that is longer than any test.
const NO_DEADLINE: Duration = Duration::from_secs(3600);

/// The start of an HTTP/2 connection, with a call without a token.
const CALL_WITHOUT_TOKEN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\
    \0\0\0\x04\0\0\0\0\0\
    \0\0\x06\x01\x05\0\0\0\x01\x83\x86\x04\x02/x";

/// A host with the health service that requires [`TOKEN`].
struct Server {
    address: SocketAddr,
    stop: CancellationToken,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Server {
    async fn start(limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let host = Host { unauthenticated: limits, ..Host::new().with_token(Some(TOKEN.to_owned())) };
        let stop = CancellationToken::new();
        let served = serve(host, Listener::Tcp(listener), stop.clone());
        Self { address, stop, served }
    }

    fn client(&self) -> HealthClient<rpc::Peer> {
        let outgoing = Outgoing::default().with_token(Some(TOKEN));
        HealthClient::new(peer(&format!("http://{}", self.address), outgoing).expect("an address"))
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }

    /// Connects to the server. Returns `None` if the server closes the connection.
    async fn accepted_connection(&self) -> Option<TcpStream> {
        let mut stream = self.connect().await;
        // An HTTP/2 server sends its settings first.
        (within(stream.read(&mut [0])).await.unwrap_or(0) == 1).then_some(stream)
    }

    async fn end(self) {
        self.stop.cancel();
        within(self.served).await.expect("no panic").expect("an orderly end");
    }
}

#[expect(clippy::disallowed_methods, reason = "the test waits for the task")]
fn serve(host: Host, listener: Listener, stop: CancellationToken) -> JoinHandle<anyhow::Result<()>> {
    tokio::spawn(host.serve([listener], stop.cancelled_owned()))
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("the event happens in time")
}

fn about(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

#[tokio::test]
async fn host_without_token_serves_only_insecure_ports() {
    let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let refused = Host::new().serve([Listener::Tcp(bind().await)], std::future::pending());
    let refused = within(refused).await.expect_err("a port with a token needs one");
    assert!(refused.to_string().contains("no token"), "{refused}");

    let listener = Listener::InsecureTcp(bind().await);
    let endpoint = listener.endpoint().expect("its address");
    let stop = CancellationToken::new();
    let served = serve(Host::new(), listener, stop.clone());
    let mut client = HealthClient::new(peer(&endpoint, Outgoing::default()).expect("an address"));
    within(client.check(about(crate::LIVENESS))).await.expect("an answer");
    stop.cancel();
    within(served).await.expect("no panic").expect("an orderly end");
}

#[tokio::test]
async fn connection_without_admitted_call_is_closed_after_deadline() {
    let server = Server::start(Limits { deadline: Duration::from_millis(300), ..Limits::default() }).await;
    let mut watch = server.client().watch(about("")).await.expect("admitted").into_inner();
    watch.message().await.expect("a status").expect("a status");

    let mut silent = server.connect().await;
    let mut refused = server.connect().await;
    refused.write_all(CALL_WITHOUT_TOKEN).await.expect("written");
    let mut bytes = Vec::new();
    // The server resets or closes the connection.
    _ = within(silent.read_to_end(&mut bytes)).await;
    bytes.clear();
    _ = within(refused.read_to_end(&mut bytes)).await;
    assert!(
        bytes.windows(7).any(|part| part == b"\0\0\0\x04\x01\0\0"),
        "the server has acknowledged the settings: {bytes:?}"
    );

    // The authenticated connection stays open, although it is older.
    server.stop.cancel();
    while let Some(status) = within(watch.message()).await.expect("the connection lives") {
        assert!(status.status != 0, "{status:?}");
    }
    server.end().await;
}

#[tokio::test]
async fn stranger_at_limits_locks_out_no_caller() {
    let unlimited = Limits { deadline: NO_DEADLINE, per_address: usize::MAX, total: usize::MAX };
    for limits in [Limits { per_address: 4, ..unlimited }, Limits { total: 4, ..unlimited }] {
        let server = Server::start(limits).await;
        let mut client = server.client();
        client.check(about(crate::LIVENESS)).await.expect("admitted");

        let mut held = Vec::new();
        for _ in 0..3 {
            for _ in 0..6 {
                held.push(server.accepted_connection().await.expect("accepted"));
            }
            server.client().check(about(crate::LIVENESS)).await.expect("a caller on a new connection");
        }
        // Three connections remain in addition to that of the last caller.
        for stream in &mut held[..15] {
            // The server resets or closes the connection.
            _ = within(stream.read_to_end(&mut Vec::new())).await;
        }
        client.check(about(crate::LIVENESS)).await.expect("an authenticated connection makes no room");
        drop(held);
        server.end().await;
    }
}

/// RFC 9113, section 6.5: a frame has a header of 9 bytes. Each setting has 6 bytes, of which the
/// first two are its id.
#[tokio::test]
async fn concurrent_calls_per_connection_are_bounded() {
    let server = Server::start(Limits { deadline: NO_DEADLINE, per_address: 4, total: 4 }).await;
    let mut stream = server.connect().await;
    let mut header = [0; 9];
    within(stream.read_exact(&mut header)).await.expect("a frame");
    assert_eq!(header[3], 4, "the first frame of a server contains its settings");
    let mut settings = vec![0; usize::from(header[2])];
    within(stream.read_exact(&mut settings)).await.expect("settings");
    let mut calls = settings.chunks(6).filter(|setting| setting[..2] == [0, 3]);
    assert_eq!(calls.next().map(|setting| &setting[2..]), Some(&1024_u32.to_be_bytes()[..]));
    drop(stream);
    server.end().await;
}

/// A port with the operator endpoints.
struct Port {
    address: SocketAddr,
    _stop: tokio_util::sync::DropGuard,
}

impl Port {
    #[expect(clippy::disallowed_methods, reason = "the task ends with the test")]
    async fn start(token: Option<&str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let page = Page::new(
            Recorder::for_test(),
            token.map(str::to_owned),
            Readiness::new(),
            GaugeUpdates::default(),
        );
        let stop = CancellationToken::new();
        tokio::spawn(operator_endpoints::serve(listener, page, stop.clone()));
        Self { address, _stop: stop.drop_guard() }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("connected")
    }

    /// Returns the status of the response at `path`.
    async fn get(&self, path: &str, header: &str) -> u16 {
        let mut stream = self.connect().await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: gantry\r\nConnection: close\r\n{header}\r\n");
        stream.write_all(request.as_bytes()).await.expect("written");
        let mut response = String::new();
        within(stream.read_to_string(&mut response)).await.expect("a response");
        let status = response.split(' ').nth(1).expect("a status");
        status.parse().expect("a number")
    }
}

#[tokio::test]
async fn metrics_require_token() {
    let with = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let port = Port::start(Some(TOKEN)).await;
    assert_eq!(port.get("/metrics", "").await, 401);
    assert_eq!(port.get("/metrics", &with("another")).await, 401);
    assert_eq!(port.get("/metrics", &with(TOKEN)).await, 200);
    assert_eq!(port.get("/healthz", "").await, 200, "probes present no token");
    assert_eq!(port.get("/readyz", "").await, 503);
    let port = Port::start(None).await;
    assert_eq!(port.get("/metrics", "").await, 200);
}

#[tokio::test]
async fn stranger_locks_out_no_metrics_reader() {
    let port = Port::start(Some(TOKEN)).await;
    let mut held = Vec::new();
    for _ in 0..140 {
        held.push(port.connect().await);
    }
    assert_eq!(port.get("/metrics", &format!("Authorization: Bearer {TOKEN}\r\n")).await, 200);
    for stream in &mut held[..13] {
        // The server resets or closes the connection.
        _ = within(stream.read_to_end(&mut Vec::new())).await;
    }
}

// The paused clock advances at once when all tasks are idle.
#[tokio::test(start_paused = true)]
async fn operator_port_closes_connections_without_token() {
    let port = Port::start(Some(TOKEN)).await;
    for request in ["", "GET /metrics HT", "GET /healthz HTTP/1.1\r\nHost: gantry\r\n\r\n"] {
        let mut stream = port.connect().await;
        stream.write_all(request.as_bytes()).await.expect("written");
        let mut response = Vec::new();
        let end = stream.read_to_end(&mut response);
        // The server resets or closes the connection.
        _ = tokio::time::timeout(NO_DEADLINE, end).await.expect("the connection is closed");
    }
}

#[tokio::test]
async fn unix_socket_rejects_other_users() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("socket");
    let listener = Listener::Unix(UnixListener::bind(&socket).expect("bound"));
    for (path, mode) in [(directory.path(), 0o755), (socket.as_path(), 0o777)] {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("opened");
    }
    let stop = CancellationToken::new();
    let served = serve(Host::new(), listener, stop.clone());
    assert!(admits_user(socket.clone(), 0).await, "the service's own user");
    assert!(!admits_user(socket.clone(), 65_534).await, "another user");
    assert!(admits_user(socket, 0).await, "the service still admits its own user");
    stop.cancel();
    within(served).await.expect("no panic").expect("an orderly end");
}

/// Whether the server at `socket` admits a caller with the user id `uid`, rather than closing the
/// connection.
async fn admits_user(socket: PathBuf, uid: u32) -> bool {
    // A separate thread, because the change of the user applies to one thread.
    let (sender, admitted) = tokio::sync::oneshot::channel();
    let call = move || {
        let uid = rustix::process::Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).expect("another user");
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("the socket is open to all");
        stream.set_read_timeout(Some(TIMEOUT)).expect("set");
        let read = stream.read(&mut [0]);
        assert!(
            read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
                || read.is_ok(),
            "{read:?}"
        );
        sender.send(read.unwrap_or(0) == 1).expect("the test waits");
    };
    let thread = std::thread::spawn(call);
    let admitted = within(admitted).await;
    thread.join().expect("no panic");
    admitted.expect("a result")
}
