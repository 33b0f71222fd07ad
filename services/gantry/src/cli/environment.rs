//! Variables of other tools that the command line follows.

/// Whether spans are sent to a collector.
pub(crate) fn exports_spans() -> bool {
    std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty())
}
