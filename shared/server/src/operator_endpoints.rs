//! Endpoints for operators over plain HTTP on a separate address: `/metrics`, `/healthz` and
//! `/readyz`.
//!
//! If the process has a token, `/metrics` requires it. The two probes require no token. Connections
//! without a token are limited in number and time ([`crate::unauthenticated`]).
//!
//! [`RpcLayer`] counts and times every incoming call by service, method and code. Unknown services
//! and methods share one series. Services add gauges, which are updated when the metrics are read.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, LazyLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, State};
use axum::http::StatusCode;
use axum::http::header::WWW_AUTHENTICATE;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::serve::IncomingStream;
use bytes::Bytes;
use futures::future::join_all;
use http::{HeaderMap, Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use prost::Message;
use prost_types::FileDescriptorSet;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tower_layer::Layer;
use tower_service::Service;

use crate::admission::presents;
use crate::caller::Caller;
use crate::listener::Tcp;
use crate::readiness::Readiness;
use crate::unauthenticated::{Limits, Unauthenticated};

/// Upper bounds of duration buckets, in seconds.
const DURATION_BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0];
/// Minimum interval of gauge updates, so that readers of metrics cause little load.
const GAUGE_UPDATE_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time of a gauge update. Gauges that take longer keep their old values.
const GAUGE_UPDATE_TIMEOUT: Duration = Duration::from_secs(5);
/// Limits of connections without a token. Their deadline is several times the gauge update timeout,
/// because it also applies to probes and, without a token, to readers of metrics.
const CONNECTION_LIMITS: Limits = Limits { deadline: Duration::from_secs(30), per_address: 128, total: 512 };

type GaugeFuture = Pin<Box<dyn Future<Output = ()> + Send>>;
type GaugeUpdate = Arc<dyn Fn() -> GaugeFuture + Send + Sync>;

/// The functions that update the gauges of services. All clones share the list.
#[derive(Clone, Default)]
pub(crate) struct GaugeUpdates(Arc<std::sync::Mutex<Vec<GaugeUpdate>>>);

impl GaugeUpdates {
    pub(crate) fn add<F>(&self, gather: impl Fn() -> F + Send + Sync + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let gather: GaugeUpdate = Arc::new(move || Box::pin(gather()));
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(gather);
    }

    async fn update(&self) {
        let gauges = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let updates = join_all(gauges.iter().map(|gather| gather()));
        if tokio::time::timeout(GAUGE_UPDATE_TIMEOUT, updates).await.is_err() {
            tracing::warn!("cannot update all metrics in time: some values are old");
        }
    }
}

/// The metrics recorder of this process.
#[derive(Clone)]
pub(crate) struct Recorder(PrometheusHandle);

impl Recorder {
    /// Installs the recorder. Metrics are recorded from then on.
    pub(crate) fn install() -> anyhow::Result<Self> {
        let builder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &DURATION_BUCKETS)
            .context("cannot set the buckets of metrics")?;
        let handle = builder.install_recorder().context("cannot install the metrics recorder")?;
        describe();
        Ok(Self(handle))
    }

    /// Creates a recorder without installing it.
    #[cfg(test)]
    pub(crate) fn for_test() -> Self {
        Self(PrometheusBuilder::new().build_recorder().handle())
    }
}

fn describe() {
    metrics::describe_counter!(
        "gantry_rpc_calls_total",
        "Number of completed calls, by service, method and code."
    );
    metrics::describe_histogram!(
        "gantry_rpc_duration_seconds",
        "Duration of completed calls, by service, method and code."
    );
    metrics::describe_gauge!("gantry_rpc_in_flight", "Number of calls in flight, by service and method.");
    metrics::describe_gauge!("gantry_ready", "1 if the process is ready, otherwise 0.");
    metrics::describe_gauge!(
        "gantry_check",
        "1 if the last run of the readiness check succeeded, otherwise 0."
    );
    metrics::describe_gauge!("gantry_service", "1 for each service of this process, with its version.");
}

/// State of the endpoints.
#[derive(Clone)]
pub(crate) struct Page {
    recorder: Recorder,
    /// Token of readers of metrics. `None` admits every reader.
    token: Option<Arc<str>>,
    readiness: Readiness,
    gauges: GaugeUpdates,
    updated_at: Arc<Mutex<Option<Instant>>>,
}

impl Page {
    pub(crate) fn new(
        recorder: Recorder,
        token: Option<String>,
        readiness: Readiness,
        gauges: GaugeUpdates,
    ) -> Self {
        Self { recorder, token: token.map(Into::into), readiness, gauges, updated_at: Arc::default() }
    }

    async fn metrics(&self) -> String {
        let mut updated_at = self.updated_at.lock().await;
        if updated_at.is_none_or(|at| at.elapsed() >= GAUGE_UPDATE_INTERVAL) {
            self.gauges.update().await;
            *updated_at = Some(Instant::now());
        }
        drop(updated_at);
        self.recorder.0.run_upkeep();
        self.recorder.0.render()
    }
}

/// The TCP port of the endpoints.
struct Port {
    listener: TcpListener,
    unauthenticated: Unauthenticated,
}

impl axum::serve::Listener for Port {
    type Io = Tcp;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Tcp, SocketAddr) {
        loop {
            // axum waits before a retry when no descriptor is free.
            let (stream, peer) = axum::serve::Listener::accept(&mut self.listener).await;
            if let Some(tcp) = Tcp::new(stream, peer, &self.unauthenticated) {
                return (tcp, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl Connected<IncomingStream<'_, Port>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Port>) -> Self {
        stream.io().caller()
    }
}

/// Serves `/metrics`, `/healthz` and `/readyz` until `ended` is cancelled.
pub(crate) async fn serve(listener: TcpListener, page: Page, ended: CancellationToken) {
    let port = Port { listener, unauthenticated: Unauthenticated::new(CONNECTION_LIMITS) };
    let router = Router::new()
        .route("/metrics", get(metrics_page))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .with_state(page)
        .into_make_service_with_connect_info::<Caller>();
    let served = axum::serve(port, router).with_graceful_shutdown(ended.cancelled_owned()).await;
    if let Err(error) = served {
        tracing::error!(%error, "cannot serve the operator endpoints any longer");
    }
}

async fn metrics_page(
    State(page): State<Page>,
    ConnectInfo(caller): ConnectInfo<Caller>,
    headers: HeaderMap,
) -> axum::response::Response {
    if let Some(token) = &page.token {
        if !presents(token, &headers) {
            let message = "present the token of this cluster as `authorization: Bearer TOKEN`\n";
            return (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], message).into_response();
        }
        caller.authenticated();
    }
    page.metrics().await.into_response()
}

async fn readyz(State(page): State<Page>) -> (StatusCode, String) {
    let reasons = page.readiness.not_ready_reasons();
    if reasons.is_empty() {
        return (StatusCode::OK, "ready\n".to_owned());
    }
    (StatusCode::SERVICE_UNAVAILABLE, reasons.iter().map(|reason| format!("{reason}\n")).collect())
}

/// A layer that counts and times calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct RpcLayer;

impl<S> Layer<S> for RpcLayer {
    type Service = RpcService<S>;

    fn layer(&self, inner: S) -> RpcService<S> {
        RpcService(inner)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct RpcService<S>(S);

impl<S, B, R> Service<Request<B>> for RpcService<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: HttpBody<Data = Bytes> + Send + Unpin + 'static,
{
    type Response = Response<CountedBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut call = Call::start(request.uri().path());
        let response = self.0.call(request);
        Box::pin(async move {
            let response = response.await?;
            call.record_status(response.headers());
            Ok(response.map(|body| CountedBody { body, call }))
        })
    }
}

/// All known methods, as `package.Service` and `Method`.
static METHODS: LazyLock<HashSet<(String, String)>> = LazyLock::new(|| {
    let files = FileDescriptorSet::decode(rpc::DESCRIPTORS).unwrap_or_default().file;
    let mut methods = HashSet::new();
    for file in files {
        for service in &file.service {
            let name = format!("{}.{}", file.package(), service.name());
            methods.extend(service.method.iter().map(|method| (name.clone(), method.name().to_owned())));
        }
    }
    for method in ["Check", "Watch"] {
        methods.insert(("grpc.health.v1.Health".to_owned(), method.to_owned()));
    }
    methods
});

/// A call in flight. Its drop records the metrics of the call.
#[derive(Debug)]
struct Call {
    service: &'static str,
    method: &'static str,
    code: &'static str,
    started_at: Instant,
}

impl Call {
    fn start(path: &str) -> Self {
        let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
        let known = METHODS.get(&(service.to_owned(), method.to_owned()));
        let (service, method) =
            known.map_or(("other", "other"), |(service, method)| (service.as_str(), method.as_str()));
        metrics::gauge!("gantry_rpc_in_flight", "service" => service, "method" => method).increment(1.0);
        // A call that is dropped before its status is known was cancelled.
        Self { service, method, code: "CANCELLED", started_at: Instant::now() }
    }

    fn record_status(&mut self, headers: &HeaderMap) {
        if let Some(code) = headers.get("grpc-status") {
            self.code = code_name(code.to_str().unwrap_or_default());
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Self { service, method, code, started_at } = *self;
        metrics::gauge!("gantry_rpc_in_flight", "service" => service, "method" => method).decrement(1.0);
        metrics::counter!("gantry_rpc_calls_total", "service" => service, "method" => method, "code" => code)
            .increment(1);
        metrics::histogram!("gantry_rpc_duration_seconds", "service" => service, "method" => method, "code" => code)
            .record(started_at.elapsed());
    }
}

fn code_name(code: &str) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    code.parse::<usize>().ok().and_then(|code| NAMES.get(code).copied()).unwrap_or("UNKNOWN")
}

/// The body of a response. The call ends when the body is dropped.
#[derive(Debug)]
pub(crate) struct CountedBody<B> {
    body: B,
    call: Call,
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for CountedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            this.call.record_status(trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
