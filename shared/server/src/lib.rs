//! The server of all service binaries: settings, listeners, admission of calls, telemetry,
//! readiness and shutdown.
//!
//! A service implements [`Program`], and [`run`] runs it. The service adds its RPCs and background
//! tasks to a [`Host`]. The host serves them until its shutdown future resolves. `gantry up` adds
//! all four services to one host.
//!
//! Invariant: the host tracks every task, cancels its token at shutdown, and waits for its end.

mod activity;
mod admission;
mod arrival;
mod caller;
mod capabilities;
mod deadline;
mod gate;
mod health;
pub mod inherited;
mod listen_args;
mod listener;
mod operator_endpoints;
mod program;
mod readiness;
pub mod settings;
pub mod telemetry;
#[cfg(test)]
mod tests;
pub mod token;
mod unauthenticated;

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures::StreamExt;
use futures::future::BoxFuture;
use rpc::pb::capabilities::capabilities_server::CapabilitiesServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::RoutesBuilder;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

pub use activity::Activity;
pub use caller::Caller;
pub use capabilities::Service;
pub use deadline::deadline;
pub use listen_args::{ListenArgs, shutdown_signal};
pub use listener::{Listener, bind};
pub use program::{Program, StartContext, command, run};
pub use readiness::LIVENESS;

use crate::admission::{AdmissionLayer, TicketServices};
use crate::arrival::ArrivalLayer;
use crate::capabilities::CapabilitiesService;
use crate::deadline::DeadlineLayer;
use crate::gate::Gate;
use crate::operator_endpoints::{GaugeUpdates, Recorder};
use crate::readiness::Readiness;
use crate::unauthenticated::{Limits, Unauthenticated};

/// Maximum number of concurrent calls on one connection. A call takes memory even before its
/// admission.
const MAX_CALLS_PER_CONNECTION: u32 = 1024;

/// Maximum time of all cleanups together. They start after the drain.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time for the last responses of the operator endpoints, after the drain.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Timing of a shutdown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drain {
    /// Time for which the process still serves calls but reports that it is not ready.
    pub(crate) delay: Duration,
    /// Time for open calls to end after the delay. The host then cuts the remaining calls.
    pub(crate) timeout: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Self { delay: Duration::ZERO, timeout: Duration::from_secs(10) }
    }
}

/// The failure of a vital task, which ends the process.
#[derive(Debug, Clone, Default)]
struct Failure {
    signal: CancellationToken,
    error: Arc<Mutex<Option<anyhow::Error>>>,
}

impl Failure {
    fn take(&self) -> anyhow::Error {
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.unwrap_or_else(|| anyhow::anyhow!("a task failed"))
    }
}

/// The gRPC services of one process, with their background tasks.
pub struct Host {
    routes: RoutesBuilder,
    services: Vec<&'static str>,
    ticket_services: TicketServices,
    failure: Failure,
    tasks: TaskTracker,
    stopping: CancellationToken,
    activity: Activity,
    token: Option<String>,
    unauthenticated: Limits,
    readiness: Readiness,
    capabilities: CapabilitiesService,
    gauges: GaugeUpdates,
    /// Number of entries at the start of `services` that [`Host::describe`] has already described.
    described: usize,
    drain: Drain,
    probe_interval: Duration,
    metrics: Option<(TcpListener, Recorder)>,
    cleanups: Vec<BoxFuture<'static, ()>>,
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    /// Creates a host without services.
    #[must_use]
    pub fn new() -> Self {
        let readiness = Readiness::new();
        Self {
            capabilities: CapabilitiesService::new(readiness.clone()),
            readiness,
            gauges: GaugeUpdates::default(),
            described: 0,
            drain: Drain::default(),
            probe_interval: Duration::from_secs(2),
            metrics: None,
            cleanups: Vec::new(),
            routes: RoutesBuilder::default(),
            services: Vec::new(),
            ticket_services: TicketServices::default(),
            failure: Failure::default(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            activity: Activity::default(),
            token: None,
            unauthenticated: Limits::default(),
        }
    }

    /// Admits calls over TCP only with this bearer token. Without one, the host serves on no
    /// [`Listener::Tcp`].
    #[must_use]
    pub fn with_token(self, token: Option<String>) -> Self {
        Self { token, ..self }
    }

    /// Sets the interval of readiness checks.
    #[must_use]
    pub fn with_probe_interval(self, probe_interval: Duration) -> Self {
        Self { probe_interval, ..self }
    }

    /// Adds a gRPC service.
    pub fn add_service<S>(&mut self, service: S)
    where
        S: tower_service::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
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

    /// Adds a gRPC service that verifies the tickets in `headers`. A call with such a header needs
    /// no token.
    pub fn add_ticketed_service<S>(&mut self, service: S, headers: &'static [&'static str])
    where
        S: tower_service::Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send + 'static,
    {
        self.ticket_services.add(S::NAME, headers);
        self.add_service(service);
    }

    /// Runs `task` in the background. The task must end soon after [`Host::stopping`] is cancelled.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Runs `task` until it ends, or until shutdown. If the task fails, the process ends at once
    /// with that error and without a drain.
    pub fn spawn_vital(&self, task: impl Future<Output = anyhow::Result<()>> + Send + 'static) {
        let (failure, stopping) = (self.failure.clone(), self.stopping.clone());
        self.tasks.spawn(async move {
            let ended = tokio::select! {
                ended = task => ended,
                () = stopping.cancelled() => Ok(()),
            };
            if let Err(error) = ended {
                *failure.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                failure.signal.cancel();
            }
        });
    }

    /// Returns the tracker for tasks that services spawn later, for example per call or per
    /// workload.
    #[must_use]
    pub fn tasks(&self) -> TaskTracker {
        self.tasks.clone()
    }

    /// Returns the token that is cancelled at shutdown. Open streams and loops must end then.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Returns the activity of callers.
    #[must_use]
    pub fn activity(&self) -> Activity {
        self.activity.clone()
    }

    /// Describes the gRPC services that were added since the last call of this function as one
    /// `service`.
    pub fn describe(&mut self, service: Service) {
        self.capabilities.add(service, &self.services[self.described..]);
        self.described = self.services.len();
    }

    /// Runs `cleanup` after the drain, for at most a few seconds. Calls and tasks have ended by
    /// then, or were cut.
    pub fn add_cleanup(&mut self, cleanup: impl Future<Output = ()> + Send + 'static) {
        self.cleanups.push(Box::pin(cleanup));
    }

    /// Adds a readiness check. The process is ready only while `check` succeeds within three
    /// seconds. Operators see its error.
    pub fn add_check<F>(&self, name: &'static str, check: impl Fn() -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        self.readiness.add(name, check);
    }

    /// Adds `gather`, which sets gauges when the metrics are read.
    pub fn add_gauges<F>(&self, gather: impl Fn() -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.gauges.add(gather);
    }

    /// Serves on `listeners` until `shutdown` resolves, and then drains.
    pub async fn serve(
        self,
        listeners: impl IntoIterator<Item = Listener>,
        shutdown: impl Future<Output = ()> + Send,
    ) -> anyhow::Result<()> {
        self.serve_from_start(listeners, shutdown, |_| Box::pin(async { Ok(()) })).await
    }

    /// Serves on `listeners` until `shutdown` resolves, and then drains. Runs `start`, which adds
    /// the services. Meanwhile, health checks already report that the process is alive and not
    /// ready.
    pub(crate) async fn serve_from_start(
        mut self,
        listeners: impl IntoIterator<Item = Listener>,
        shutdown: impl Future<Output = ()> + Send,
        start: impl for<'a> FnOnce(&'a mut Self) -> BoxFuture<'a, anyhow::Result<()>> + Send,
    ) -> anyhow::Result<()> {
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_service_status("", ServingStatus::NotServing).await;
        health.set_service_status(LIVENESS, ServingStatus::Serving).await;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(rpc::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // Descriptors of error details.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .context("cannot build the reflection service: the descriptors of the protos are malformed")?;
        let mut always = RoutesBuilder::default();
        always.add_service(health_service);
        always.add_service(reflection);
        always.add_service(CapabilitiesServer::new(self.capabilities.clone()));

        let (gate, stopping, token) = (Gate::default(), self.stopping.clone(), self.token.take());
        // Without a token, callers cannot authenticate, so limits of unauthenticated connections
        // would limit callers.
        let limits = match token {
            Some(_) => self.unauthenticated,
            None => Limits { per_address: usize::MAX, total: usize::MAX, ..self.unauthenticated },
        };
        let unauthenticated = Unauthenticated::new(limits);
        let listeners = listeners.into_iter().map(|listener| {
            anyhow::ensure!(
                token.is_some() || !listener.needs_token(),
                "cannot serve on {}: the host has no token for callers",
                listener.endpoint()?
            );
            Ok(listener.incoming(unauthenticated.clone()).boxed())
        });
        let incoming = futures::stream::select_all(listeners.collect::<anyhow::Result<Vec<_>>>()?);
        let served = Server::builder()
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(32 << 20)
            .max_frame_size(1 << 20)
            .max_concurrent_streams(MAX_CALLS_PER_CONNECTION)
            .http2_keepalive_interval(Some(Duration::from_secs(20)))
            .http2_keepalive_timeout(Some(Duration::from_secs(20)))
            .trace_fn(telemetry::server_span)
            .layer(operator_endpoints::RpcLayer)
            .layer(DeadlineLayer)
            .layer(AdmissionLayer::new(token.clone(), self.ticket_services.clone()))
            .layer(ArrivalLayer)
            .layer(self.activity.layer())
            .layer(gate.clone())
            .add_routes(always.routes())
            .serve_with_incoming_shutdown(incoming, stopping.clone().cancelled_owned());
        tokio::pin!(served, shutdown);

        let ended = CancellationToken::new();
        let pages = TaskTracker::new();
        if let Some((listener, recorder)) = self.metrics.take() {
            let (readiness, gauges) = (self.readiness.clone(), self.gauges.clone());
            let page = operator_endpoints::Page::new(recorder, token, readiness, gauges);
            pages.spawn(operator_endpoints::serve(listener, page, ended.clone()));
        }
        let _ended = ended.drop_guard_ref();

        let started = async move {
            start(&mut self).await?;
            Ok::<_, anyhow::Error>(self)
        };
        let started = tokio::select! {
            // A start that completes at once must win against the server, so that no caller sees a
            // starting process.
            biased;
            started = started => Some(started?),
            result = &mut served => return result.context("the server failed"),
            () = &mut shutdown => None,
        };
        let Some(Self {
            routes, services, tasks, readiness, probe_interval, drain, failure, cleanups, ..
        }) = started
        else {
            tracing::info!("shutdown requested before the start completed");
            return Ok(());
        };
        gate.open(routes.routes());
        for service in &services {
            health.set_service_status(*service, ServingStatus::NotServing).await;
        }
        tasks.spawn(readiness.clone().run_checks(probe_interval, stopping.clone()));
        let reporting = readiness.clone().report_changes(health.clone(), services.clone());
        tokio::pin!(reporting);

        tokio::select! {
            result = &mut served => return result.context("the server failed"),
            () = failure.signal.cancelled() => return Err(failure.take()),
            () = &mut reporting => {}
            () = &mut shutdown => {}
        }
        tracing::info!("shutting down");
        readiness.drain();
        set_status(&health, &services, ServingStatus::NotServing).await;
        let rest = async {
            tokio::time::sleep(drain.delay).await;
            stopping.cancel();
            clear_status(health, &services).await;
            tasks.close();
            tasks.wait().await;
        };
        let drained = async { tokio::join!(served, rest) };
        if tokio::time::timeout(drain.delay + drain.timeout, drained).await.is_err() {
            tracing::warn!("cutting calls that did not end within the drain timeout");
        }
        // Until here, the operator endpoints have reported that the process is shutting down.
        ended.cancel();
        pages.close();
        tokio::time::timeout(LAST_RESPONSE_TIMEOUT, pages.wait()).await.ok();
        if tokio::time::timeout(CLEANUP_TIMEOUT, futures::future::join_all(cleanups)).await.is_err() {
            tracing::warn!("cannot complete all cleanups in time");
        }
        Ok(())
    }
}

/// Sets the health status of the process and of its `services`.
pub(crate) async fn set_status(health: &HealthReporter, services: &[&'static str], status: ServingStatus) {
    for service in [""].iter().chain(services) {
        health.set_service_status(service, status).await;
    }
}

/// Ends all health watch streams. [`set_status`] must have sent the last status before.
async fn clear_status(mut health: HealthReporter, services: &[&'static str]) {
    for service in ["", LIVENESS].iter().chain(services) {
        health.clear_service_status(service).await;
    }
}
