//! Logs and traces of a process.
//!
//! Logs go to standard error, filtered by `GANTRY_LOG` (default `info`). Spans go to a collector if
//! `OTEL_EXPORTER_OTLP_ENDPOINT` is set. The local cluster also keeps [`RecentSpans`], so that
//! `--trace` needs no collector.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider;
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanProcessor};
use serde::Serialize;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

/// Maximum number of ended spans in [`RecentSpans`].
const MAX_SPANS: usize = 20_000;

/// Logs and traces of this process. Its drop flushes the remaining spans.
pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.provider.as_ref().map(SdkTracerProvider::shutdown) {
            tracing::debug!(%error, "cannot flush spans");
        }
    }
}

/// Sets up logs and traces of the service `service`. `default_filter` applies if `GANTRY_LOG` is
/// not set.
pub fn init(
    service: &'static str,
    default_filter: &str,
    recent: Option<RecentSpans>,
) -> anyhow::Result<Telemetry> {
    match std::env::var("GANTRY_LOG") {
        Ok(filter) => init_filtered(service, &filter, recent),
        Err(_) => init_filtered(service, default_filter, recent),
    }
}

/// Sets up logs and traces of the service `service`, with the log filter `filter`.
pub(crate) fn init_filtered(
    service: &'static str,
    filter: &str,
    recent: Option<RecentSpans>,
) -> anyhow::Result<Telemetry> {
    let filter =
        EnvFilter::try_new(filter).with_context(|| format!("cannot parse the log filter {filter:?}"))?;
    let logs =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(filter);

    let otlp = std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty());
    if recent.is_none() && !otlp {
        tracing_subscriber::registry().with(logs).try_init().context("cannot set up logs twice")?;
        return Ok(Telemetry { provider: None });
    }
    let mut provider =
        SdkTracerProvider::builder().with_resource(Resource::builder().with_service_name(service).build());
    if let Some(recent) = recent {
        provider = provider.with_span_processor(recent);
    }
    if otlp {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .build()
            .context("cannot export spans to OTEL_EXPORTER_OTLP_ENDPOINT")?;
        provider = provider.with_batch_exporter(exporter);
    }
    let provider = provider.build();
    let traces = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("gantry"))
        .with_location(false)
        .with_threads(false)
        .with_filter(EnvFilter::new("off,gantry=info"));
    tracing_subscriber::registry().with(logs).with(traces).try_init().context("cannot set up logs twice")?;
    Ok(Telemetry { provider: Some(provider) })
}

/// Returns the span of an incoming call. Its target is `gantry`, the target of all traced spans.
pub(crate) fn server_span(request: &http::Request<()>) -> tracing::Span {
    let mut path = request.uri().path().trim_start_matches('/').splitn(2, '/');
    let (service, method) = (path.next().unwrap_or_default(), path.next().unwrap_or_default());
    let part = match service.split('.').nth(1) {
        Some("scheduler") => "scheduler",
        Some("artifacts") => "artifact-store",
        Some("runtime") => "runtime-gateway",
        Some("streamer") => "streamer",
        _ => return tracing::Span::none(),
    };
    // These streams are open for the whole life of a gateway, and belong to no trace.
    if matches!(method, "Synchronize" | "WatchDestroying") {
        return tracing::Span::none();
    }
    let span = tracing::info_span!(
        target: "gantry",
        "rpc",
        otel.name = format!("{service}/{method}"),
        otel.kind = "server",
        service = part,
        rpc.service = service,
        rpc.method = method,
    );
    if let Some(traceparent) =
        request.headers().get(rpc::trace::TRACEPARENT).and_then(|value| value.to_str().ok())
    {
        rpc::trace::continue_from(&span, traceparent);
    }
    span
}

/// The most recent ended spans of this process. Cheap to clone; all clones share the spans.
#[derive(Debug, Clone, Default)]
pub struct RecentSpans(Arc<Mutex<VecDeque<RecentSpan>>>);

/// A span that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecentSpan {
    /// Id of the trace: 32 hex digits.
    pub trace_id: String,
    /// Id of the span: 16 hex digits.
    pub span_id: String,
    /// Id of the parent span: 16 hex digits. `None` for the root of a trace.
    pub parent_span_id: Option<String>,
    /// Name of the operation.
    pub name: String,
    /// Service that ran the operation.
    pub service: String,
    /// Start, in nanoseconds since 1970.
    pub start_unix_nano: u64,
    /// End, in nanoseconds since 1970.
    pub end_unix_nano: u64,
    /// Attributes, by name.
    pub attributes: Vec<(String, String)>,
}

impl RecentSpans {
    /// Returns the spans of one trace, in the order of their ends. Old spans may be missing.
    #[must_use]
    pub fn of_trace(&self, trace_id: &str) -> Vec<RecentSpan> {
        let spans = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        spans.iter().filter(|span| span.trace_id == trace_id).cloned().collect()
    }
}

impl SpanProcessor for RecentSpans {
    fn on_start(&self, _span: &mut Span, _context: &Context) {}

    fn on_end(&self, span: SpanData) {
        let nanos = |at: SystemTime| {
            u64::try_from(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
        };
        let parent = span.parent_span_id;
        let attribute = |attribute: &KeyValue| (attribute.key.to_string(), attribute.value.to_string());
        let attributes: Vec<_> = span.attributes.iter().map(attribute).collect();
        let service = attributes.iter().find(|(name, _)| name == "service").map_or("", |(_, value)| value);
        let recent = RecentSpan {
            trace_id: span.span_context.trace_id().to_string(),
            span_id: span.span_context.span_id().to_string(),
            parent_span_id: (parent != opentelemetry::trace::SpanId::INVALID).then(|| parent.to_string()),
            name: span.name.to_string(),
            service: service.to_owned(),
            start_unix_nano: nanos(span.start_time),
            end_unix_nano: nanos(span.end_time),
            attributes: attributes.clone(),
        };
        let mut spans = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if spans.len() == MAX_SPANS {
            spans.pop_front();
        }
        spans.push_back(recent);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}
