//! End of an idle cluster: no caller uses it, no workload runs, and no container is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use domain::Timestamp;
use rpc::Peer;
use rpc::pb::artifacts::ListContainersRequest;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::pb::scheduler::{ListRequest, ListWorkersRequest, Workload, WorkloadState};
use server::Activity;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Longest interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// Resolves when the cluster has been idle for `idle_end`. Never resolves once the cluster is
/// stopping.
pub(crate) async fn until_idle(
    idle_end: Duration,
    activity: Activity,
    peer: Peer,
    stopping: CancellationToken,
) {
    let mut last_busy = Instant::now();
    let pause = CHECK_INTERVAL.min(idle_end / 10).max(Duration::from_millis(50));
    loop {
        tokio::select! {
            () = stopping.cancelled() => return std::future::pending().await,
            () = tokio::time::sleep(pause) => {}
        }
        if activity.idle_for() < idle_end {
            continue;
        }
        // No caller uses the cluster. A service that does not answer counts as busy.
        if !matches!(holds_nothing(&peer).await, Ok(true)) {
            last_busy = Instant::now();
        }
        if last_busy.elapsed() >= idle_end {
            return;
        }
    }
}

/// Returns whether no workload is unfinished and no container is kept.
async fn holds_nothing(peer: &Peer) -> Result<bool, Status> {
    let workers = WorkersClient::new(peer.clone()).list_workers(ListWorkersRequest::default()).await?;
    if workers.into_inner().workers.iter().any(|worker| worker.active_tasks > 0) {
        return Ok(false);
    }
    if containers(peer).await? > 0 {
        return Ok(false);
    }
    Ok(unfinished(peer).await?.is_empty())
}

/// Counts the containers, up to one page.
pub(crate) async fn containers(peer: &Peer) -> Result<u64, Status> {
    let request = ListContainersRequest { page_size: 1000, ..ListContainersRequest::default() };
    let containers = InventoryClient::new(peer.clone()).list_containers(request).await?;
    Ok(containers.into_inner().containers.len() as u64)
}

/// Counts the workloads that were unfinished at `moment`. Of those that have ended since, at most
/// one page counts.
pub(crate) async fn unfinished_at(peer: &Peer, moment: Timestamp) -> Result<u64, Status> {
    let moment = Some(rpc::timestamp(moment));
    let request =
        ListRequest { state: WorkloadState::Finished.into(), page_size: 1000, ..ListRequest::default() };
    let after = |time: Option<prost_types::Timestamp>| {
        let parts = |time: Option<prost_types::Timestamp>| time.map(|time| (time.seconds, time.nanos));
        parts(time) >= parts(moment)
    };
    let mut found = unfinished(peer).await?;
    // A workload that ends between the two calls may be in both lists.
    let finished = WorkloadsClient::new(peer.clone()).list(request).await?.into_inner().workloads;
    found.extend(finished.into_iter().filter(|workload| after(workload.finished_at)));
    let there = found.into_iter().filter(|workload| !after(workload.submitted_at));
    Ok(there.map(|workload| workload.workload_id).collect::<BTreeSet<_>>().len() as u64)
}

/// Lists the unfinished workloads of all teams.
pub(crate) async fn unfinished(peer: &Peer) -> Result<Vec<Workload>, Status> {
    let mut unfinished = BTreeMap::new();
    for state in [
        // Listed twice, because a workload that loses its worker returns to the queue and could be
        // missed in both states.
        WorkloadState::Assigned,
        WorkloadState::Accepted,
        WorkloadState::Pending,
        WorkloadState::Assigned,
        WorkloadState::Starting,
        WorkloadState::Running,
        WorkloadState::Settling,
    ] {
        let mut request = ListRequest {
            // All teams.
            team: String::new(),
            state: state.into(),
            page_size: 1000,
            page_token: String::new(),
            ..ListRequest::default()
        };
        loop {
            let page = WorkloadsClient::new(peer.clone()).list(request.clone()).await?.into_inner();
            let listed = page.workloads.into_iter();
            unfinished.extend(listed.map(|workload| (workload.workload_id.clone(), workload)));
            if page.next_page_token.is_empty() {
                break;
            }
            request.page_token = page.next_page_token;
        }
    }
    Ok(unfinished.into_values().collect())
}
