//! Columns of `gantry list volumes`, and fields of each listed object.

use rpc::pb::artifacts::Volume;

use crate::commands::list::names::Names;
use crate::render::labels;
use crate::render::table::plain;

pub(super) const VOLUMES: &[&str] =
    &["HANDLE", "WORKER", "STATE", "FOR", "SIZE", "AGE", "ARTIFACT", "PARENT"];

pub(super) fn volume_row(volume: &Volume, names: &Names) -> Vec<String> {
    vec![
        volume.volume_handle.clone(),
        names.of(&volume.worker_id),
        labels::inventory_state(volume.state()).to_owned(),
        labels::purpose(volume.purpose()),
        labels::size(volume.size_bytes),
        labels::ago(volume.created_at.as_ref()),
        volume.artifact_id.clone(),
        volume.parent_handle.clone(),
    ]
}

pub(super) fn volume_fields(volume: &Volume) -> Vec<(&'static str, String)> {
    vec![
        ("handle", volume.volume_handle.clone()),
        ("worker", volume.worker_id.clone()),
        ("state", labels::inventory_state(volume.state()).to_owned()),
        ("for", labels::purpose(volume.purpose())),
        ("artifact", volume.artifact_id.clone()),
        ("parent", volume.parent_handle.clone()),
        ("attempt", volume.attempt_id.clone()),
        ("size", labels::size(volume.size_bytes)),
        ("created", volume.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost", volume.lost_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("garbage", plain(&volume.mark_reason, 1000)),
    ]
}
