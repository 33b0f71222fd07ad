//! Who may call a host, over connections as they really are.

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
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::unauthenticated::Limits;
use crate::{Host, Listener};

const TOKEN: &str = "secret";
/// What must happen in the end happens within this time, or the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// A deadline that passes during no test.
const NO_DEADLINE: Duration = Duration::from_secs(3600);

/// The beginning of a connection, and a call without a token on it.
const CALL_WITHOUT_TOKEN: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\
    \0\0\0\x04\0\0\0\0\0\
    \0\0\x06\x01\x05\0\0\0\x01\x83\x86\x04\x02/x";

/// A host that serves health, and asks for [`TOKEN`].
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

    /// Whether the server speaks on a new connection, rather than to close it.
    async fn welcomes(&self) -> Option<TcpStream> {
        let mut stream = self.connect().await;
        // A server speaks first.
        (within(stream.read(&mut [0])).await.unwrap_or(0) == 1).then_some(stream)
    }

    async fn end(self) {
        self.stop.cancel();
        within(self.served).await.expect("no panic").expect("an orderly end");
    }
}

#[expect(clippy::disallowed_methods, reason = "the test waits for it")]
fn serve(host: Host, listener: Listener, stop: CancellationToken) -> JoinHandle<anyhow::Result<()>> {
    tokio::spawn(host.serve([listener], stop.cancelled_owned()))
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it happens in time")
}

fn about(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

#[tokio::test]
async fn host_without_token_serves_only_insecure_ports() {
    let bind = async || TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let refused = Host::new().serve([Listener::Tcp(bind().await)], std::future::pending());
    let refused = within(refused).await.expect_err("it must not serve");
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
    let mut said = Vec::new();
    // Reset or closed.
    _ = within(silent.read_to_end(&mut said)).await;
    said.clear();
    _ = within(refused.read_to_end(&mut said)).await;
    assert!(said.windows(7).any(|part| part == b"\0\0\0\x04\x01\0\0"), "the server has answered: {said:?}");

    // That connection is older than those that are closed.
    server.stop.cancel();
    while let Some(status) = within(watch.message()).await.expect("the connection lives") {
        assert!(status.status != 0, "{status:?}");
    }
    server.end().await;
}

#[tokio::test]
async fn unauthenticated_connections_of_an_address_are_limited() {
    let limits = Limits { deadline: NO_DEADLINE, per_address: 2, ..Limits::default() };
    let server = Server::start(limits).await;
    let mut client = server.client();
    client.check(about(crate::LIVENESS)).await.expect("admitted");

    let first = server.welcomes().await.expect("the first");
    let second = server.welcomes().await.expect("the second");
    assert!(server.welcomes().await.is_none(), "the third is one too many");
    let status = server.client().check(about(crate::LIVENESS)).await.expect_err("closed");
    assert_ne!(status.code(), Code::Unauthenticated, "{status}");
    client.check(about(crate::LIVENESS)).await.expect("a connection that authenticated is not counted");

    drop(first);
    let third = within(async {
        loop {
            if let Some(third) = server.welcomes().await {
                return third;
            }
        }
    });
    drop((third.await, second));
    server.end().await;
}

#[tokio::test]
async fn other_users_may_not_call_over_unix_socket() {
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
    assert!(speaks_to(socket.clone(), 0).await, "the service's own user");
    assert!(!speaks_to(socket.clone(), 65_534).await, "another user");
    assert!(speaks_to(socket, 0).await, "the service goes on");
    stop.cancel();
    within(served).await.expect("no panic").expect("an orderly end");
}

/// Whether the server at `socket` speaks to a caller who is the user `uid`, rather than to close the connection.
async fn speaks_to(socket: PathBuf, uid: u32) -> bool {
    // A user of a thread of its own, which ends with it.
    let (answer, answered) = tokio::sync::oneshot::channel();
    let call = move || {
        let uid = rustix::process::Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).expect("another user");
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("the socket is open to all");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let read = stream.read(&mut [0]);
        assert!(
            read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
                || read.is_ok(),
            "{read:?}"
        );
        answer.send(read.unwrap_or(0) == 1).expect("the test waits");
    };
    let thread = std::thread::spawn(call);
    let speaks = within(answered).await;
    thread.join().expect("no panic");
    speaks.expect("an answer")
}
