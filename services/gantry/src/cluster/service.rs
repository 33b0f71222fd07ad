//! Service `gantry.local.v1.Cluster`: status, traces and shutdown of the cluster on this machine.

use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::Timestamp;
use rpc::pb::local::cluster_server::Cluster;
use rpc::pb::local::{
    Attribute, GetStatusRequest, GetStatusResponse, GetTraceRequest, GetTraceResponse, ShutdownRequest,
    ShutdownResponse, Span,
};
use rpc::pb::scheduler::CancelRequest;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::{Peer, Reason, invalid_field};
use server::Activity;
use server::telemetry::{RecentSpan, RecentSpans};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::idle::{containers, unfinished, unfinished_at};
use crate::render::table::count;

/// Time between SIGTERM and SIGKILL for processes at shutdown.
const GRACE: Duration = Duration::from_secs(10);
/// Time limit for the services of a new cluster to answer.
const STARTUP_LIMIT: Duration = Duration::from_secs(3);
/// Interval between two calls to a new cluster.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time limit of Shutdown for workloads to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// State of this cluster.
pub(crate) struct LocalCluster {
    pub(crate) started_at: Timestamp,
    pub(crate) state: String,
    pub(crate) endpoints: Vec<String>,
    pub(crate) idle_end: Option<Duration>,
    pub(crate) holds_destruction: bool,
    /// Process id of the last cluster, if it did not end normally.
    pub(crate) left_behind: Option<u32>,
    /// Messages about the workloads and containers that the last cluster left.
    pub(crate) recovered: OnceCell<Vec<String>>,
    pub(crate) activity: Activity,
    pub(crate) spans: RecentSpans,
    /// Connection to the services of this cluster.
    pub(crate) peer: Peer,
    /// Ends the process.
    pub(crate) shutdown: CancellationToken,
}

impl LocalCluster {
    /// Describes the workloads and containers of a last cluster that did not end normally.
    async fn recover(&self) -> Vec<String> {
        let Some(process) = self.left_behind else { return Vec::new() };
        let mut found =
            vec![format!("the last cluster (process {process}) did not end normally; this one takes over")];
        let workloads = count_patiently(|| unfinished_at(&self.peer, self.started_at)).await;
        let containers = count_patiently(|| containers(&self.peer)).await;
        if workloads > 0 {
            found.push(format!(
                "{} unfinished: those whose process still runs go on, the others end as lost",
                count(workloads, "workload")
            ));
        }
        if containers > 0 {
            found.push(format!(
                "{} taken over; destroyed when nothing needs {}",
                count(containers, "container"),
                if containers == 1 { "it" } else { "them" }
            ));
        }
        found.iter().for_each(|line| tracing::warn!("{line}"));
        found
    }
}

/// Repeats a count until the services answer. Returns 0 if they do not, because the caller only
/// reports the number.
async fn count_patiently<C: Future<Output = Result<u64, Status>>>(counting: impl Fn() -> C) -> u64 {
    let until = Instant::now() + STARTUP_LIMIT;
    loop {
        match counting().await {
            Ok(count) => return count,
            Err(error) if Instant::now() >= until => {
                tracing::warn!(error = error.message(), "cannot count what the last cluster left");
                return 0;
            }
            // The services have just started.
            Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// gRPC service of the cluster. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ClusterService(pub(crate) Arc<LocalCluster>);

#[tonic::async_trait]
impl Cluster for ClusterService {
    async fn get_status(&self, _: Request<GetStatusRequest>) -> Result<Response<GetStatusResponse>, Status> {
        let cluster = &self.0;
        Ok(Response::new(GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            process_id: std::process::id(),
            started_at: Some(rpc::timestamp(cluster.started_at)),
            state_directory: cluster.state.clone(),
            endpoints: cluster.endpoints.clone(),
            idle_for: Some(rpc::duration(cluster.activity.idle_for())),
            idle_end: cluster.idle_end.map(rpc::duration),
            holds_destruction: cluster.holds_destruction,
            recovered: cluster.recovered.get_or_init(|| cluster.recover()).await.clone(),
        }))
    }

    async fn get_trace(
        &self,
        request: Request<GetTraceRequest>,
    ) -> Result<Response<GetTraceResponse>, Status> {
        let GetTraceRequest { trace_id } = request.into_inner();
        if trace_id.len() != 32 || !trace_id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(invalid_field("trace_id", "must be 32 hex digits"));
        }
        let spans = self.0.spans.of_trace(&trace_id.to_ascii_lowercase());
        Ok(Response::new(GetTraceResponse { spans: spans.into_iter().map(span).collect() }))
    }

    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        let ShutdownRequest { force } = request.into_inner();
        let grace = if force { Duration::ZERO } else { GRACE };
        let (cancelled, unfinished) = stop_workloads(&self.0.peer, grace).await?;
        self.0.shutdown.cancel();
        Ok(Response::new(ShutdownResponse { cancelled, unfinished }))
    }
}

/// Cancels all unfinished workloads, and waits for their end. Returns how many there were, and how
/// many are left.
pub(crate) async fn stop_workloads(peer: &Peer, grace: Duration) -> Result<(u32, u32), Status> {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let unavailable = |status: Status| {
        if status.code() == tonic::Code::Unavailable {
            status
        } else {
            Reason::Unavailable.status("gantry.local", "cannot list the unfinished workloads now")
        }
    };
    let give_up = Instant::now() + PATIENCE;
    let mut workloads = unfinished(peer).await.map_err(unavailable)?;
    let cancelled = workloads.len();
    for workload in &workloads {
        let request = CancelRequest {
            team: workload.spec.as_ref().map(|spec| spec.team.clone()).unwrap_or_default(),
            workload_id: workload.workload_id.clone(),
            grace: Some(rpc::duration(grace)),
        };
        // A workload that cannot be cancelled counts as left.
        _ = WorkloadsClient::new(peer.clone()).cancel(request).await;
    }
    while !workloads.is_empty() && Instant::now() < give_up {
        tokio::time::sleep(Duration::from_millis(50)).await;
        workloads = unfinished(peer).await.map_err(unavailable)?;
    }
    Ok((number(cancelled), number(workloads.len())))
}

fn span(span: RecentSpan) -> Span {
    let attribute = |(name, value)| Attribute { name, value };
    Span {
        trace_id: span.trace_id,
        span_id: span.span_id,
        parent_span_id: span.parent_span_id.unwrap_or_default(),
        name: span.name,
        service: span.service,
        start_unix_nano: span.start_unix_nano,
        end_unix_nano: span.end_unix_nano,
        attributes: span.attributes.into_iter().map(attribute).collect(),
    }
}
