//! Logs and traces.
//!
//! Logs go to standard error, filtered by `GANTRY_LOG` (default `info`). Spans go to a collector when
//! `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and to a [`RecentSpans`] where one is kept: the local cluster keeps one, so that
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

/// How many ended spans are kept.
const MAX_SPANS: usize = 20_000;

/// Logs and traces of this process. Flushes what is left when dropped.
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

/// Sets up logs and traces for this process, as `service`. `default_filter` is used where `GANTRY_LOG` is not set.
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

/// Sets up logs and traces for this process, as `service`, which logs what `filter` says.
pub(crate) fn init_filtered(
    service: &'static str,
    filter: &str,
    recent: Option<RecentSpans>,
) -> anyhow::Result<Telemetry> {
    let filter = EnvFilter::try_new(filter).with_context(|| format!("GANTRY_LOG={filter:?} is no filter"))?;
    let logs =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_filter(filter);

    let otlp = std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty());
    if recent.is_none() && !otlp {
        tracing_subscriber::registry().with(logs).try_init().context("logs were set up before")?;
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
            .context("OTEL_EXPORTER_OTLP_ENDPOINT cannot be used")?;
        provider = provider.with_batch_exporter(exporter);
    }
    let provider = provider.build();
    let traces = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("gantry"))
        .with_location(false)
        .with_threads(false)
        .with_filter(EnvFilter::new("off,gantry=info"));
    tracing_subscriber::registry().with(logs).with(traces).try_init().context("logs were set up before")?;
    Ok(Telemetry { provider: Some(provider) })
}

/// The span of a call that came in. Its target is `gantry`, which is what traces follow.
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
    // These stay open for as long as a gateway lives, and belong to nobody's trace.
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

/// The spans that ended last in this process. Cheap to clone; clones share them.
#[derive(Debug, Clone, Default)]
pub struct RecentSpans(Arc<Mutex<VecDeque<RecentSpan>>>);

/// A span that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecentSpan {
    /// 32 hex digits.
    pub trace_id: String,
    /// 16 hex digits.
    pub span_id: String,
    /// 16 hex digits. `None`: the root of its trace.
    pub parent_span_id: Option<String>,
    /// What was done.
    pub name: String,
    /// Who did it.
    pub service: String,
    /// Nanoseconds since 1970.
    pub start_unix_nano: u64,
    /// Nanoseconds since 1970.
    pub end_unix_nano: u64,
    /// What it was about.
    pub attributes: Vec<(String, String)>,
}

impl RecentSpans {
    /// Those of one trace that are still kept, oldest first.
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
