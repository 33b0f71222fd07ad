//! W3C trace context between processes.

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Name of the header with the trace context.
pub const TRACEPARENT: &str = "traceparent";

/// Returns the trace context of the current span. `None`: the span is not traced.
#[must_use]
pub fn current() -> Option<String> {
    let context = tracing::Span::current().context();
    let span = context.span().span_context().clone();
    span.is_valid()
        .then(|| format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8()))
}

/// Makes the span in `traceparent` the parent of `span`. A malformed `traceparent` is ignored, as
/// the standard requires.
pub fn continue_from(span: &tracing::Span, traceparent: &str) {
    let Some(remote) = parse(traceparent) else { return };
    let context = opentelemetry::Context::new().with_remote_span_context(remote);
    if let Err(error) = span.set_parent(context) {
        tracing::debug!(%error, "cannot set the parent of a span");
    }
}

fn parse(traceparent: &str) -> Option<SpanContext> {
    let mut parts = traceparent.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if version.len() != 2 || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        TraceState::NONE,
    );
    context.is_valid().then_some(context)
}
