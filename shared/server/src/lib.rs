//! What every service binary shares: where it listens, how its calls are traced, counted and let in, how it says that it is
//! healthy, and how it ends.
//!
//! A service adds its RPCs and its background tasks to a [`Host`]; the host serves them until it is told to stop. `gantry up` adds all
//! four services to one host. Every task is tracked, told to stop, and waited for.

mod activity;
mod admission;
mod listen_args;
mod listener;
pub mod telemetry;

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::RoutesBuilder;
use tonic::transport::Server;
use tower_service::Service;

use admission::AdmissionLayer;

pub use activity::Activity;
pub use listen_args::{ListenArgs, Started, shutdown_signal};
pub use listener::{Listener, PeerKind};

/// How long open calls may take to end once the server was told to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// Services that are served together, and the tasks that belong to them.
pub struct Host {
    routes: RoutesBuilder,
    services: Vec<&'static str>,
    ticketed: Vec<&'static str>,
    tasks: TaskTracker,
    stopping: CancellationToken,
    activity: Activity,
    token: Option<String>,
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// Serves nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            routes: RoutesBuilder::default(),
            services: Vec::new(),
            ticketed: Vec::new(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            activity: Activity::default(),
            token: None,
        }
    }

    /// Lets callers over TCP in only with this bearer token.
    #[must_use]
    pub fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    /// Adds a gRPC service.
    pub fn add_service<S>(&mut self, service: S)
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.services.push(S::NAME);
        self.routes.add_service(service);
    }

    /// Adds a gRPC service that verifies door tickets by itself: calls with one are let in without the token.
    pub fn add_ticketed_service<S>(&mut self, service: S)
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.ticketed.push(S::NAME);
        self.add_service(service);
    }

    /// Runs `task` until it ends; it must end soon after [`Host::stopping`].
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Tracks tasks that services spawn later, one for a call or a workload.
    #[must_use]
    pub fn tasks(&self) -> TaskTracker {
        self.tasks.clone()
    }

    /// Resolves when the server has been told to stop. Open streams and loops end then: they are calls in flight.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Who uses the services, and since when nobody does.
    #[must_use]
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }

    /// Serves on `listeners` until `shutdown` resolves, then lets work in flight finish.
    pub async fn serve(
        self,
        listeners: impl IntoIterator<Item = Listener>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> anyhow::Result<()> {
        let Self { mut routes, services, ticketed, tasks, stopping, activity, token } = self;
        let (health, health_service) = tonic_health::server::health_reporter();
        for service in &services {
            health.set_service_status(*service, tonic_health::ServingStatus::Serving).await;
        }
        routes.add_service(health_service);
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(rpc::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // The details of errors.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .context("the descriptors of our own protos are malformed")?;
        routes.add_service(reflection);

        let incoming =
            futures::stream::select_all(listeners.into_iter().map(|listener| listener.incoming().boxed()));
        let served = Server::builder()
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(32 << 20)
            .max_frame_size(1 << 20)
            .http2_keepalive_interval(Some(Duration::from_secs(20)))
            .http2_keepalive_timeout(Some(Duration::from_secs(20)))
            .trace_fn(telemetry::server_span)
            .layer(AdmissionLayer::new(token, ticketed))
            .layer(activity.layer())
            .add_routes(routes.routes())
            .serve_with_incoming_shutdown(incoming, stopping.clone().cancelled_owned());
        tokio::pin!(served);

        tokio::select! {
            result = &mut served => return result.context("the server failed"),
            () = shutdown => {}
        }
        for service in &services {
            health.set_service_status(*service, tonic_health::ServingStatus::NotServing).await;
        }
        stopping.cancel();
        tasks.close();
        if tokio::time::timeout(DRAIN, async { tokio::join!(served, tasks.wait()) }).await.is_err() {
            tracing::warn!("some calls did not end in time and are cut");
        }
        Ok(())
    }
}
