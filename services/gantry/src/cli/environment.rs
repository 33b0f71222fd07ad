//! Environment variables of other tools that `gantry` honors.

/// Returns whether spans are sent to a collector.
pub(crate) fn exports_spans() -> bool {
    std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty())
}
