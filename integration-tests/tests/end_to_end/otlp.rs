//! Spans that a collector receives over OTLP, from the command line and from the cluster.

use std::collections::BTreeSet;
use std::fs;
use std::sync::{Arc, Mutex};

use integration_tests::{Cluster, code, describe, may_run_containers};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Span with the process that sent it, as its resource names it.
#[derive(Debug, Clone)]
struct ReceivedSpan {
    sender: String,
    span: Span,
}

impl ReceivedSpan {
    /// Service that made the span, or the command line.
    fn service(&self) -> String {
        text(&self.span.attributes, "service").unwrap_or_default()
    }
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.key == key)?;
    match attribute.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Collector that keeps all spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ReceivedSpan>>>);

impl Collector {
    /// Serves on a free port until `runtime` is dropped. Returns the address.
    fn serve(&self, runtime: &Runtime) -> String {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(self.clone()));
        runtime.spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        format!("http://{address}")
    }

    fn received(&self) -> Vec<ReceivedSpan> {
        self.0.lock().expect("not poisoned").clone()
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().expect("not poisoned");
        for resource in request.into_inner().resource_spans {
            let attributes = resource.resource.map(|resource| resource.attributes).unwrap_or_default();
            let sender = text(&attributes, "service.name").unwrap_or_default();
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            kept.extend(spans.map(|span| ReceivedSpan { sender: sender.clone(), span }));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Returns the spans whose parent is missing.
fn orphans(spans: &[ReceivedSpan]) -> Vec<&ReceivedSpan> {
    let ids: BTreeSet<_> = spans.iter().map(|received| &received.span.span_id).collect();
    let parents = |received: &&ReceivedSpan| {
        let parent = &received.span.parent_span_id;
        !parent.is_empty() && !ids.contains(parent)
    };
    spans.iter().filter(parents).collect()
}

#[test]
fn collector_receives_spans_of_all_services() {
    if !may_run_containers() {
        return;
    }
    let runtime = Runtime::new().expect("a runtime");
    let collector = Collector::default();
    let endpoint = collector.serve(&runtime);
    let cluster = Cluster::new()
        .with("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)
        // With this interval, spans are sent only at the end of a process.
        .with("OTEL_BSP_SCHEDULE_DELAY", "3600000");
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    let script = "echo $TRACEPARENT; cp src/file out/file";
    let output = cluster.output(["run", "-i", "src=src", "-o", "out=./out", "--", "sh", "-c", script]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let in_container = String::from_utf8(output.stdout.clone()).expect("text");
    let trace = in_container.split('-').nth(1).expect("a trace id").to_owned();
    let of_trace = || {
        let mut received = collector.received();
        received.retain(|received| hex(&received.span.trace_id) == trace);
        received
    };

    let ours: Vec<_> = of_trace().into_iter().filter(|received| received.service() == "gantry").collect();
    let roots = ours.iter().filter(|received| received.span.parent_span_id.is_empty());
    let names: Vec<_> = roots.map(|received| received.span.name.as_str()).collect();
    assert_eq!(names, ["gantry run"], "sent before the command ends: {}", describe(&output));

    cluster.succeed(["down"]);
    let spans = of_trace();
    let services: BTreeSet<_> = spans.iter().map(ReceivedSpan::service).collect();
    let expected = ["artifact-store", "gantry", "runtime-gateway", "scheduler", "streamer"];
    assert_eq!(services, expected.map(str::to_owned).into(), "sent before the cluster ends");
    assert!(orphans(&spans).is_empty(), "spans without their parents: {:#?}", orphans(&spans));
    let roots = spans.iter().filter(|received| received.span.parent_span_id.is_empty());
    assert_eq!(roots.count(), 1, "one root");
    let senders: BTreeSet<_> = spans.iter().map(|received| received.sender.as_str()).collect();
    assert_eq!(senders, ["gantry"].into(), "the resource names the program");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn missing_collector_is_harmless() {
    if !may_run_containers() {
        return;
    }
    // A port on which no process listens.
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port");
    let cluster = Cluster::new().with("OTEL_EXPORTER_OTLP_ENDPOINT", &format!("http://{nowhere}"));
    let output = cluster.output(["run", "-q", "--", "sh", "-c", "echo text; exit 3"]);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    assert_eq!(output.stdout, b"text\n");
    cluster.succeed(["down"]);
}
