//! The proxy: a gateway without a worker, which forwards calls from outside by one hop.
//!
//! It serves `Containers` and `Volumes` for every worker of the cluster. It decodes the first
//! message of a call, which names the worker ([`route`]). Then it looks up the gateway of that
//! worker ([`directory`]), and forwards the bytes of the call ([`forward`]).
//!
//! Invariant: the gateway receives a proxy ticket for that worker, and never the caller's
//! credentials.
//!
//! A proxy keeps no state except cached gateways, so any number of proxies may run.

mod directory;
mod forward;
mod route;

use std::convert::Infallible;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use rpc::client::Outgoing;
use rpc::pb::runtime::containers_server;
use rpc::pb::runtime::volumes_server;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::token::Keys;
use server::{Host, Listener};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use directory::Directory;

/// The state that all calls of a proxy share.
struct Proxy {
    directory: Directory,
    keys: Keys,
    stopping: CancellationToken,
}

/// Adds a proxy to `host`, which authenticates callers. The proxy presents `token` to the
/// scheduler.
///
/// # Errors
///
/// The address of the scheduler is malformed.
pub fn start_proxy(scheduler: &str, token: Option<&str>, host: &mut Host) -> anyhow::Result<()> {
    let scheduler = rpc::client::peer(scheduler, Outgoing::internal().with_token(token))?;
    let proxy = Arc::new(Proxy {
        directory: Directory::new(WorkersClient::new(scheduler.clone())),
        keys: Keys::new(scheduler),
        stopping: host.stopping(),
    });
    host.add_service(ForwardedService::<Containers>::new(proxy.clone()));
    host.add_service(ForwardedService::<Volumes>::new(proxy));
    host.describe(server::Service {
        name: "proxy",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: Vec::new(),
    });
    Ok(())
}

/// Serves a proxy on `listener` until `shutdown` resolves. Callers over TCP must present `token`.
///
/// # Errors
///
/// The address of the scheduler is malformed, or the server failed.
pub async fn serve_proxy(
    scheduler: &str,
    token: Option<String>,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(token.clone());
    start_proxy(scheduler, token.as_deref(), &mut host)?;
    host.serve([listener], shutdown).await
}

struct Containers;
struct Volumes;

impl NamedService for Containers {
    const NAME: &'static str = containers_server::SERVICE_NAME;
}

impl NamedService for Volumes {
    const NAME: &'static str = volumes_server::SERVICE_NAME;
}

/// A service whose calls are forwarded.
struct ForwardedService<N> {
    proxy: Arc<Proxy>,
    name: PhantomData<fn() -> N>,
}

impl<N> ForwardedService<N> {
    fn new(proxy: Arc<Proxy>) -> Self {
        Self { proxy, name: PhantomData }
    }
}

impl<N> Clone for ForwardedService<N> {
    fn clone(&self) -> Self {
        Self::new(self.proxy.clone())
    }
}

impl<N: NamedService> NamedService for ForwardedService<N> {
    const NAME: &'static str = N::NAME;
}

impl<N> Service<Request<Body>> for ForwardedService<N> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let proxy = self.proxy.clone();
        Box::pin(async move {
            let answer = forward::forward(proxy, request).await;
            Ok(answer.unwrap_or_else(|status| status.into_http()))
        })
    }
}

#[cfg(test)]
mod tests;
