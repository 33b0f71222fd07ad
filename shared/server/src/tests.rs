//! Who may call a host, over connections as they really are.

use std::time::Duration;

use rpc::client::{Outgoing, peer};
use tokio::net::TcpListener;
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
