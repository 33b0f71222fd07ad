//! Overview of the cluster on this machine, for `gantry status` without `--server`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use futures::TryStreamExt;
use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::{InventoryState, ListVolumesRequest, Volume, VolumePurpose};
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::local::{GetStatusRequest, GetStatusResponse};
use rpc::pb::scheduler::{Workload, WorkloadState};
use serde_json::json;
use tokio::time::Instant;
use tonic::Status;

use super::{ClusterView, Overview};
use crate::cli::addresses::Addresses;
use crate::client::queries::pages;
use crate::client::token::read_token;
use crate::cluster::{Paths, lock, start};
use crate::ending::error::refused;
use crate::render::labels;
use crate::render::table::{bytes, duration, fields};

/// Time limit for waiting for a cluster that starts or ends.
const PATIENCE: Duration = Duration::from_secs(2);
/// Interval between two polls of the cluster.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Time limit for the cluster to answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// Age of a cluster up to which the first report of its worker may be missing.
const FIRST_REPORT_AGE: Duration = Duration::from_secs(10);

/// Exit code if no cluster runs.
const NONE_RUNS: u8 = 1;

/// Reads the state of the cluster on this machine.
pub(crate) async fn status() -> anyhow::Result<ClusterView> {
    let paths = Paths::find()?;
    let Some(endpoint) = found(&paths).await else {
        if let Some(holder) = lock::holder(&paths.lock()) {
            bail!(
                "the cluster (process {}) does not answer on {}; if it does not end soon, kill it; the next cluster takes over \
                 its containers",
                holder.process_id,
                holder.socket.display()
            );
        }
        let text = "no cluster runs on this machine; `gantry run` starts one in the background, `gantry up` in the foreground\n";
        return Ok(ClusterView {
            text: text.to_owned(),
            document: json!({ "running": false }),
            code: NONE_RUNS,
        });
    };
    let peer = peer(&endpoint, Outgoing::internal())?;
    let mut cluster = ClusterClient::new(peer.clone());
    let Ok(response) = tokio::time::timeout(DEADLINE, cluster.get_status(GetStatusRequest {})).await else {
        let process = lock::holder(&paths.lock());
        let process = process.map_or_else(String::new, |holder| format!(" (process {})", holder.process_id));
        bail!(
            "the cluster{process} does not answer; see its log {}; `gantry down --force` kills it, and the next cluster takes over its containers",
            paths.log().display()
        );
    };
    let local = response.map_err(refused("cannot read the status of the cluster"))?.into_inner();
    let volumes = volumes(&peer).await.map_err(refused("cannot list volumes"))?;
    let used = DiskUsage::of(&volumes);
    // Gateways that joined over TCP require the token.
    let token = read_token(&paths.token()).ok();
    let outgoing = Outgoing::internal().with_token(token.as_deref());
    let age = local.started_at.as_ref().map_or(Duration::MAX, labels::since);
    let give_up = Instant::now() + PATIENCE;
    let overview = loop {
        let overview = Overview::of(&Addresses::one(&endpoint), &outgoing).await?;
        // The first report of a new worker arrives about a second after its registration.
        if age > FIRST_REPORT_AGE || !overview.awaits_report() || Instant::now() >= give_up {
            break overview;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    let mut document = as_document(&local, &used);
    overview.fill(&mut document);
    let text = format!("{}\n{}", overview.text(), fields(&as_fields(&local, &used)));
    Ok(ClusterView { text, document, code: 0 })
}

/// Finds the address of the cluster. Waits for a cluster that starts or ends, which holds the lock
/// but does not listen.
async fn found(paths: &Paths) -> Option<String> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let running = start::running(paths);
        if running.is_some() || lock::holder(&paths.lock()).is_none() || Instant::now() >= give_up {
            return running;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Counts unfinished workloads by state, in the order of the states.
pub(crate) fn states(workloads: &[Workload]) -> Vec<(&'static str, u64)> {
    let mut states = BTreeMap::new();
    for workload in workloads {
        *states.entry(workload.state).or_insert(0) += 1;
    }
    let word = |state| labels::workload_state(WorkloadState::try_from(state).unwrap_or_default());
    states.into_iter().map(|(state, count)| (word(state), count)).collect()
}

async fn volumes(peer: &Peer) -> Result<Vec<Volume>, Status> {
    let inventory = InventoryClient::new(peer.clone());
    pages(async |page_token| {
        let request = ListVolumesRequest { page_size: 1000, page_token, ..ListVolumesRequest::default() };
        let page = inventory.clone().list_volumes(request).await?.into_inner();
        Ok((page.volumes, page.next_page_token))
    })
    .try_collect()
    .await
}

/// Use of the disk, without lost volumes.
#[derive(Debug, Default, PartialEq, Eq)]
struct DiskUsage {
    artifacts: u64,
    artifact_bytes: u64,
    volumes: u64,
    /// Bytes that volumes share count for each volume.
    volume_bytes: u64,
    /// Bytes that the measured volumes take on the disk.
    disk_bytes: u64,
    /// Complete volumes that were not measured yet.
    unmeasured: u64,
}

impl DiskUsage {
    fn of(volumes: &[Volume]) -> Self {
        let volumes: Vec<_> =
            volumes.iter().filter(|volume| volume.state() != InventoryState::Lost).collect();
        let unmeasured = volumes.iter().filter(|volume| volume.size_bytes > 0 && volume.disk_bytes.is_none());
        let replicas = volumes.iter().filter(|volume| volume.purpose() == VolumePurpose::Replica);
        let artifacts: BTreeMap<_, _> =
            replicas.map(|replica| (&replica.artifact_id, replica.size_bytes)).collect();
        Self {
            artifacts: artifacts.len() as u64,
            artifact_bytes: artifacts.values().sum(),
            volumes: volumes.len() as u64,
            volume_bytes: volumes.iter().map(|volume| volume.size_bytes).sum(),
            disk_bytes: volumes.iter().filter_map(|volume| volume.disk_bytes).sum(),
            unmeasured: unmeasured.count() as u64,
        }
    }
}

impl DiskUsage {
    fn of_volumes(&self) -> String {
        let on_disk = match (bytes(self.disk_bytes), self.unmeasured) {
            (on_disk, 0) => format!("{on_disk} on the disk"),
            (on_disk, unmeasured) => {
                format!("at least {on_disk} on the disk ({unmeasured} not measured yet)")
            }
        };
        format!("{}, {}, {on_disk}", self.volumes, bytes(self.volume_bytes))
    }
}

/// Makes documents without and with optional fields, for the test of the schema.
#[cfg(test)]
pub(super) fn samples() -> Vec<serde_json::Value> {
    let status = GetStatusResponse {
        started_at: Some(prost_types::Timestamp::default()),
        endpoints: vec!["text".to_owned()],
        idle_for: Some(prost_types::Duration::default()),
        idle_end: Some(prost_types::Duration::default()),
        recovered: vec!["text".to_owned()],
        ..GetStatusResponse::default()
    };
    let used = &DiskUsage::default();
    vec![as_document(&GetStatusResponse::default(), used), as_document(&status, used)]
}

fn as_document(status: &GetStatusResponse, used: &DiskUsage) -> serde_json::Value {
    let seconds = |duration: &prost_types::Duration| duration.seconds;
    json!({
        "running": true,
        "version": status.version,
        "process_id": status.process_id,
        "started_at": status.started_at.as_ref().map(labels::instant),
        "state_directory": status.state_directory,
        "endpoints": status.endpoints,
        "idle_for_seconds": status.idle_for.as_ref().map(seconds),
        "idle_end_seconds": status.idle_end.as_ref().map(seconds),
        "recovered": status.recovered,
        "artifacts": { "count": used.artifacts, "size_bytes": used.artifact_bytes },
        "volumes": {
            "count": used.volumes,
            "size_bytes": used.volume_bytes,
            "disk_bytes": used.disk_bytes,
            "not_measured": used.unmeasured,
        },
        "holds_destruction": status.holds_destruction,
    })
}

fn as_fields(status: &GetStatusResponse, used: &DiskUsage) -> Vec<(&'static str, String)> {
    let time = |time: &Option<prost_types::Duration>| {
        time.and_then(|time| Duration::try_from(time).ok()).map(duration)
    };
    let idle = match (time(&status.idle_for), time(&status.idle_end)) {
        (Some(idle), Some(end)) => format!("{idle}; the cluster ends after {end} if it keeps no container"),
        (Some(idle), None) => idle,
        (None, _) => String::new(),
    };
    vec![
        ("version", status.version.clone()),
        ("process", status.process_id.to_string()),
        ("running for", labels::ago(status.started_at.as_ref())),
        ("listening on", status.endpoints.join("\n")),
        ("state directory", status.state_directory.clone()),
        ("artifacts", format!("{}, {}", used.artifacts, bytes(used.artifact_bytes))),
        ("volumes", used.of_volumes()),
        ("idle for", idle),
        ("recovered", status.recovered.join("\n")),
        (
            "destruction",
            if status.holds_destruction { "held: garbage is not destroyed" } else { "" }.to_owned(),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifact_with_many_replicas_counts_once() {
        let volume = |purpose: VolumePurpose, artifact: &str, size_bytes| Volume {
            purpose: purpose.into(),
            artifact_id: artifact.to_owned(),
            size_bytes,
            disk_bytes: (size_bytes > 1).then_some(1),
            ..Volume::default()
        };
        let volumes = [
            volume(VolumePurpose::Replica, "a", 5),
            volume(VolumePurpose::Replica, "a", 5),
            volume(VolumePurpose::Replica, "b", 2),
            volume(VolumePurpose::Scratch, "", 0),
        ];
        let used = DiskUsage {
            artifacts: 2,
            artifact_bytes: 7,
            volumes: 4,
            volume_bytes: 12,
            disk_bytes: 3,
            unmeasured: 0,
        };
        assert_eq!(DiskUsage::of(&volumes), used);
        assert_eq!(used.of_volumes(), "4, 12 B, 3 B on the disk");
        let unmeasured = [volumes[0].clone(), volume(VolumePurpose::Replica, "c", 1)];
        assert_eq!(
            DiskUsage::of(&unmeasured).of_volumes(),
            "2, 6 B, at least 1 B on the disk (1 not measured yet)"
        );
        let lost = Volume { state: InventoryState::Lost.into(), ..unmeasured[1].clone() };
        assert_eq!(DiskUsage::of(&[volumes[0].clone(), lost]).of_volumes(), "1, 5 B, 1 B on the disk");
    }

    #[test]
    fn states_are_counted_in_order() {
        let workload = |state: WorkloadState| Workload { state: state.into(), ..Workload::default() };
        let running = || workload(WorkloadState::Running);
        let workloads = [running(), workload(WorkloadState::Pending), running()];
        assert_eq!(states(&workloads), [("pending", 1), ("running", 2)]);
    }
}
