//! Conversion of messages of `gantry.artifacts.v1.Inventory`.

use std::collections::HashSet;

use domain::worker::Receipt;
use domain::{ContainerHandle, Timestamp, VolumeHandle};
use rpc::pb::artifacts as pb;
use tokio_stream::StreamExt;
use tonic::{Status, Streaming};
use uuid::Uuid;

use crate::api::{MAX_TASK_CACHES, errors};
use crate::db::entity::{Purpose, State, container, volume};
use crate::db::units;
use crate::inventory::losses::LossNotice;
use crate::inventory::report::{Holdings, MAX_HANDLES};
use crate::inventory::sweep::Sweep;
use crate::inventory::{NeededVolume, VolumeSource};
use crate::store_life::receipts::Token;

/// Maximum number of handles in a request for a list of volumes: one page.
const MAX_LISTED: usize = 1000;

/// Maximum number of volumes of a container.
pub(super) const MAX_VOLUMES: usize = 1000;

/// Maximum length of a volume's name, in bytes. Gateways prefix the names of a spec.
const MAX_NAME_BYTES: usize = 512;

/// Maximum number of workers in a request for artifacts at risk.
pub(super) const MAX_AT_RISK: usize = 10_000;

/// Parses an optional receipt.
pub(super) fn parse_receipt(receipt: &[u8]) -> Result<Option<Receipt>, Status> {
    if receipt.is_empty() {
        return Ok(None);
    }
    let receipt = receipt.try_into().map_err(|_| rpc::invalid_field("receipt", "must be 32 bytes"))?;
    Ok(Some(Receipt(receipt)))
}

pub(super) fn parse_token(field: &str, token: &pb::ReportToken) -> Result<Token, Status> {
    let sequence = i64::try_from(token.sequence)
        .map_err(|_| rpc::invalid_field(format!("{field}.sequence"), "must be less than 2^63"))?;
    Ok(Token { sequence, life: rpc::parse_id(&format!("{field}.store_life"), &token.store_life)? })
}

pub(super) async fn next_message(
    messages: &mut Streaming<pb::ReportRequest>,
) -> Result<Option<pb::report_request::Message>, Status> {
    match messages.next().await {
        Some(Ok(request)) => rpc::required("message", request.message).map(Some),
        Some(Err(status)) => Err(errors::truncated(format!("the report was cut off: {}", status.message()))),
        None => Ok(None),
    }
}

/// Receives a report up to its commit, without which it has no effect.
pub(super) async fn receive_holdings(
    messages: &mut Streaming<pb::ReportRequest>,
) -> Result<Holdings, Status> {
    use pb::report_request::Message;
    let mut holdings = Holdings::default();
    loop {
        match next_message(messages).await? {
            Some(Message::Holdings(some)) => {
                for handle in &some.volume_handles {
                    let handle: VolumeHandle = rpc::parse_id("holdings.volume_handles", handle)?;
                    holdings.add_volume(handle);
                }
                for handle in &some.container_handles {
                    let handle: ContainerHandle = rpc::parse_id("holdings.container_handles", handle)?;
                    holdings.add_container(handle);
                }
                if holdings.len() > MAX_HANDLES {
                    return Err(rpc::invalid_field("holdings", format!("must be at most {MAX_HANDLES}")));
                }
            }
            Some(Message::Commit(commit)) => {
                let sent = holdings.len();
                if usize::try_from(commit.count) == Ok(sent) {
                    return Ok(holdings);
                }
                return Err(errors::truncated(format!(
                    "received {sent} handles, but the commit counts {}",
                    commit.count
                )));
            }
            Some(Message::Open(_)) => {
                return Err(rpc::invalid_field("message", "a report is opened once"));
            }
            None => return Err(errors::truncated("the report ended without a commit".to_owned())),
        }
    }
}

pub(super) fn parse_unreachable(ids: &[String]) -> Result<HashSet<domain::ArtifactId>, Status> {
    if ids.len() > MAX_TASK_CACHES {
        let description = format!("must be at most {MAX_TASK_CACHES}");
        return Err(rpc::invalid_field("unreachable_artifact_ids", description));
    }
    ids.iter().map(|id| rpc::parse_id("unreachable_artifact_ids", id)).collect()
}

pub(super) fn parse_volumes(volumes: Vec<pb::PrepareVolume>) -> Result<Vec<NeededVolume>, Status> {
    if volumes.len() > MAX_VOLUMES {
        return Err(rpc::invalid_field("volumes", format!("must be at most {MAX_VOLUMES}")));
    }
    let mut names = HashSet::new();
    volumes
        .into_iter()
        .map(|volume| {
            let purpose = match rpc::parse_enum("volumes.purpose", volume.purpose)? {
                pb::VolumePurpose::Input => Purpose::Input,
                pb::VolumePurpose::Output => Purpose::Output,
                pb::VolumePurpose::Scratch => Purpose::Scratch,
                pb::VolumePurpose::Replica | pb::VolumePurpose::Unspecified => {
                    return Err(rpc::invalid_field("volumes.purpose", "must be INPUT, OUTPUT or SCRATCH"));
                }
            };
            let output = rpc::parse_optional_id("volumes.output_artifact_id", &volume.output_artifact_id)?;
            if output.is_some() != (purpose == Purpose::Output) {
                let description = "is required for an OUTPUT, and only there";
                return Err(rpc::invalid_field("volumes.output_artifact_id", description));
            }
            if volume.name.is_empty() || volume.name.len() > MAX_NAME_BYTES || volume.name.contains('\0') {
                let description = format!("must be 1 to {MAX_NAME_BYTES} bytes, without NUL");
                return Err(rpc::invalid_field("volumes.name", description));
            }
            if !names.insert(volume.name.clone()) {
                return Err(rpc::invalid_field("volumes.name", "must be unique"));
            }
            let from = rpc::parse_optional_id("volumes.from_artifact_id", &volume.from_artifact_id)?;
            let cache = rpc::parse_optional_id("volumes.from_task_cache_id", &volume.from_task_cache_id)?;
            let from = match (from, cache) {
                (Some(_), Some(_)) => {
                    let description = "must be empty beside from_artifact_id";
                    return Err(rpc::invalid_field("volumes.from_task_cache_id", description));
                }
                (artifact, cache) => {
                    artifact.map(VolumeSource::Artifact).or(cache.map(VolumeSource::TaskCache))
                }
            };
            Ok(NeededVolume { name: volume.name, purpose, from, output })
        })
        .collect()
}

pub(super) fn parse_handles(handles: &[String]) -> Result<Vec<VolumeHandle>, Status> {
    if handles.len() > MAX_LISTED {
        return Err(rpc::invalid_field("volume_handles", format!("must be at most {MAX_LISTED}")));
    }
    handles.iter().map(|handle| rpc::parse_id("volume_handles", handle)).collect()
}

pub(super) fn parse_state(field: &str, value: i32) -> Result<Option<State>, Status> {
    if value == 0 {
        return Ok(None);
    }
    Ok(match rpc::parse_enum(field, value)? {
        pb::InventoryState::Unspecified => None,
        pb::InventoryState::Creating => Some(State::Creating),
        pb::InventoryState::Created => Some(State::Created),
        pb::InventoryState::Unconfirmed => Some(State::Unconfirmed),
        pb::InventoryState::Lost => Some(State::Lost),
        pb::InventoryState::Destroying => Some(State::Destroying),
        pb::InventoryState::Sweeping => Some(State::Sweeping),
    })
}

pub(super) fn state(state: State) -> pb::InventoryState {
    match state {
        State::Creating => pb::InventoryState::Creating,
        State::Created => pb::InventoryState::Created,
        State::Unconfirmed => pb::InventoryState::Unconfirmed,
        State::Lost => pb::InventoryState::Lost,
        State::Destroying => pb::InventoryState::Destroying,
        State::Sweeping => pb::InventoryState::Sweeping,
    }
}

pub(super) fn sweep_message(sweep: &Sweep) -> pb::WatchDestroyingResponse {
    pb::WatchDestroyingResponse {
        container_handles: texts(&sweep.containers),
        volume_handles: texts(&sweep.volumes),
    }
}

pub(super) fn listed_volume(row: volume::Model) -> pb::Volume {
    let purpose = match row.purpose {
        Purpose::Replica => pb::VolumePurpose::Replica,
        Purpose::Input => pb::VolumePurpose::Input,
        Purpose::Output => pb::VolumePurpose::Output,
        Purpose::Scratch => pb::VolumePurpose::Scratch,
    };
    pb::Volume {
        volume_handle: row.handle.to_string(),
        worker_id: row.worker_id.to_string(),
        state: state(row.state).into(),
        purpose: purpose.into(),
        // An input has the artifact that it was created from. An output has the one that it may
        // become.
        artifact_id: text(row.artifact_id.or(row.from_artifact_id.filter(|_| row.purpose == Purpose::Input))),
        parent_handle: text(row.parent),
        attempt_id: text(row.attempt_id),
        size_bytes: units::size(row.size_bytes),
        created_at: Some(rpc::timestamp(Timestamp(row.created_at))),
        lost_at: lost_since(row.state, row.lost_at).map(rpc::timestamp),
        mark_reason: row.mark_reason.unwrap_or_default(),
        exclusive_bytes: row.exclusive_bytes.map(units::size),
        disk_bytes: row.disk_bytes.map(units::size),
    }
}

/// Returns since when an item is lost, if it is.
fn lost_since(state: State, lost_at: Option<i64>) -> Option<Timestamp> {
    lost_at.filter(|_| state == State::Lost).map(Timestamp)
}

pub(super) fn loss_message(notice: LossNotice) -> pb::WatchLostResponse {
    pb::WatchLostResponse {
        revision: notice.revision,
        worker_id: notice.worker.to_string(),
        volume_handle: text(notice.volume),
        container_handle: text(notice.container),
        artifact_id: text(notice.artifact),
        attempt_id: text(notice.attempt),
        lost_at: Some(rpc::timestamp(notice.lost_at)),
        kept_by: super::kept_by(&notice.keepers),
        workload_ids: texts(&notice.workloads),
        build_ids: texts(&notice.builds),
        replicas: notice.replicas.iter().map(super::replica).collect(),
        in_store: notice.in_store,
    }
}

pub(super) fn listed_container(row: container::Model) -> pb::Container {
    pb::Container {
        container_handle: row.handle.to_string(),
        worker_id: row.worker_id.to_string(),
        state: state(row.state).into(),
        attempt_id: text(known(row.attempt_id)),
        workload_id: text(known(row.holder_id)),
        created_at: Some(rpc::timestamp(Timestamp(row.created_at))),
        lost_at: lost_since(row.state, row.lost_at).map(rpc::timestamp),
        touched_at: row.touched_at.map(|at| rpc::timestamp(Timestamp(at))),
        mark_reason: row.mark_reason.unwrap_or_default(),
    }
}

/// Returns the attempt or workload of a container, which is unknown for a purged orphan.
fn known(id: Uuid) -> Option<Uuid> {
    (!id.is_nil()).then_some(id)
}

/// Returns the text of an optional id, which is empty if absent.
pub(super) fn text(id: Option<impl ToString>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

pub(super) fn texts(ids: &[impl ToString]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}
