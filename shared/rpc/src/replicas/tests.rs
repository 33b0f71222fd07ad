use std::convert::Infallible;
use std::sync::atomic::AtomicBool;

use tokio::io::copy_bidirectional;
use tokio::net::TcpListener;
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic_health::ServingStatus as Health;
use tonic_health::server::health_reporter;

use super::*;
use crate::client::{Peer, peer};
use crate::pb::capabilities::GetCapabilitiesRequest;
use crate::pb::capabilities::capabilities_client::CapabilitiesClient;

/// A replica that has a health service and rejects other calls, behind a proxy that can freeze.
struct Fake {
    address: String,
    rejects: Arc<AtomicBool>,
    frozen: Arc<AtomicBool>,
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

/// A service that rejects all calls, with `UNAVAILABLE` or with `UNIMPLEMENTED`.
#[derive(Clone)]
struct Rejecting(Arc<AtomicBool>);

impl NamedService for Rejecting {
    const NAME: &'static str = "gantry.capabilities.v1.Capabilities";
}

impl Service<http::Request<Body>> for Rejecting {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        let code = if self.0.load(Ordering::Relaxed) { Code::Unavailable } else { Code::Unimplemented };
        std::future::ready(Ok(Status::new(code, "rejected").into_http()))
    }
}

impl Fake {
    async fn start(status: ServingStatus) -> Self {
        let (health, service) = health_reporter();
        let is_ready = status == ServingStatus::Serving;
        let status = if is_ready { Health::Serving } else { Health::NotServing };
        health.set_service_status("", status).await;
        let (inner, outer) = (listen().await, listen().await);
        let (target, address) = (port(&inner), format!("http://{}", port(&outer)));
        let (rejects, frozen, accepted) = <(Arc<AtomicBool>, Arc<AtomicBool>, Arc<AtomicUsize>)>::default();
        let (mut tasks, rejecting) = (JoinSet::new(), Rejecting(rejects.clone()));
        let incoming = tonic::transport::server::TcpIncoming::from(inner);
        tasks.spawn(async move {
            let server = Server::builder().add_service(service).add_service(rejecting);
            server.serve_with_incoming(incoming).await.expect("served");
        });
        let (is_frozen, count) = (frozen.clone(), accepted.clone());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut client, _) = outer.accept().await.expect("a connection");
                count.fetch_add(1, Ordering::Relaxed);
                let is_frozen = is_frozen.clone();
                connections.spawn(async move {
                    let mut server = TcpStream::connect(target).await.expect("connected");
                    let forward = copy_bidirectional(&mut client, &mut server);
                    let freeze = async {
                        while !is_frozen.load(Ordering::Relaxed) {
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                    };
                    tokio::select! {
                        _ = forward => {}
                        () = freeze => std::future::pending().await,
                    }
                });
            }
        });
        Self { address, rejects, frozen, accepted, _tasks: tasks }
    }

    fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    fn connections(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }
}

async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.expect("a port")
}

fn port(listener: &TcpListener) -> std::net::SocketAddr {
    listener.local_addr().expect("bound")
}

fn client(replicas: &[&str]) -> Peer {
    peer(&replicas.join(","), Outgoing::internal()).expect("addresses")
}

/// Calls the service of the replica to which the client is connected.
async fn call(peer: &Peer, service: &str) -> Result<ServingStatus, Status> {
    let request = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(peer.clone()).check(request).await.map(|health| health.into_inner().status())
}

/// Returns the code of a call that the fake rejects in either case.
async fn get_capabilities(peer: &Peer) -> Code {
    let mut client = CapabilitiesClient::new(peer.clone());
    client.get_capabilities(GetCapabilitiesRequest {}).await.expect_err("no such service").code()
}

async fn refused() -> String {
    format!("http://{}", port(&listen().await))
}

#[tokio::test]
async fn client_skips_replicas_that_are_not_ready() {
    let (ready, starting) =
        (Fake::start(ServingStatus::Serving).await, Fake::start(ServingStatus::NotServing).await);
    let (frozen, refused) = (Fake::start(ServingStatus::Serving).await, refused().await);
    frozen.freeze();
    for _ in 0..8 {
        let begun = Instant::now();
        let peer = client(&[&starting.address, &refused, &ready.address, &frozen.address]);
        assert_eq!(call(&peer, "").await.expect("an answer"), ServingStatus::Serving);
        assert!(begun.elapsed() < NEXT_AFTER * 2, "the call took {:?}", begun.elapsed());
    }
    assert!(starting.connections() > 0 || frozen.connections() > 0, "every start is random");
}

#[tokio::test]
async fn client_uses_unready_replica_if_none_is_ready() {
    let (starting, refused) = (Fake::start(ServingStatus::NotServing).await, refused().await);
    let peer = client(&[&refused, &starting.address]);
    assert_eq!(call(&peer, "").await.expect("an answer"), ServingStatus::NotServing);
}

#[tokio::test]
async fn error_names_all_replicas() {
    let (one, other) = (refused().await, refused().await);
    let error = call(&client(&[&one, &other]), "").await.expect_err("no replica listens");
    assert_eq!(error.code(), Code::Unavailable);
    for address in [one, other] {
        let address = address.trim_start_matches("http://");
        assert!(error.message().contains(&format!("{address}: Connection refused")), "{error}");
    }
}

#[tokio::test]
async fn client_leaves_replica_that_rejects_calls() {
    let (one, other) = (Fake::start(ServingStatus::Serving).await, Fake::start(ServingStatus::Serving).await);
    one.rejects.store(true, Ordering::Relaxed);
    loop {
        let peer = client(&[&one.address, &other.address]);
        // The replica at which a client starts is random.
        match get_capabilities(&peer).await {
            Code::Unavailable => {
                assert_eq!(get_capabilities(&peer).await, Code::Unimplemented, "the other replica answers");
                return;
            }
            code => assert_eq!(code, Code::Unimplemented),
        }
    }
}

#[tokio::test]
async fn frozen_replica_fails_calls_within_seconds() {
    let (one, other) = (Fake::start(ServingStatus::Serving).await, Fake::start(ServingStatus::Serving).await);
    let peer = client(&[&one.address, &other.address]);
    call(&peer, "").await.expect("an answer");
    // The first connection is that of the check.
    let connected = [&one, &other].into_iter().find(|fake| fake.connections() == 2).expect("a connection");
    connected.freeze();
    let begun = Instant::now();
    let error = call(&peer, "").await.expect_err("the replica is frozen");
    assert!(begun.elapsed() < Duration::from_secs(8), "the call took {:?}", begun.elapsed());
    let address = connected.address.trim_start_matches("http://");
    assert!(error.message().contains(&format!("the service at {address}: ")), "{error}");
    call(&peer, "").await.expect("the other replica answers");
}
