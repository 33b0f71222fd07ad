//! Who may call a host, over connections as they really are.

use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rustix::thread::set_thread_res_uid;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::{Host, Listener};

/// What must happen in the end happens within this time, or the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

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
