//! Columns of `gantry list volumes`, and fields of each listed object.

use rpc::pb::artifacts::Volume;

use crate::commands::list::names::Names;
use crate::render::labels;
use crate::render::table::{bytes, plain};

pub(super) const VOLUMES: &[&str] =
    &["HANDLE", "WORKER", "STATE", "FOR", "SIZE", "EXCLUSIVE", "DISK", "AGE", "ARTIFACT", "PARENT"];

pub(super) fn volume_row(volume: &Volume, names: &Names) -> Vec<String> {
    vec![
        volume.volume_handle.clone(),
        names.of(&volume.worker_id),
        labels::inventory_state(volume.state()).to_owned(),
        labels::purpose(volume.purpose()),
        labels::size(volume.size_bytes),
        volume.exclusive_bytes.map(bytes).unwrap_or_default(),
        volume.disk_bytes.map(bytes).unwrap_or_default(),
        labels::ago(volume.created_at.as_ref()),
        volume.artifact_id.clone(),
        volume.parent_handle.clone(),
    ]
}

/// `loss_reason`: why the volume is lost. Empty: it is not, or the reason is unknown.
pub(super) fn volume_fields(volume: &Volume, loss_reason: &str) -> Vec<(&'static str, String)> {
    vec![
        ("handle", volume.volume_handle.clone()),
        ("worker", volume.worker_id.clone()),
        ("state", labels::inventory_state(volume.state()).to_owned()),
        ("for", labels::purpose(volume.purpose())),
        ("artifact", volume.artifact_id.clone()),
        ("parent", volume.parent_handle.clone()),
        ("attempt", volume.attempt_id.clone()),
        ("size", labels::size(volume.size_bytes)),
        ("on the disk", on_disk(volume)),
        ("created", volume.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost", volume.lost_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost because", plain(loss_reason, 1000)),
        ("garbage", plain(&volume.mark_reason, 1000)),
    ]
}

/// Says what a volume takes on the disk of its worker. Empty: not measured.
fn on_disk(volume: &Volume) -> String {
    match (volume.disk_bytes, volume.exclusive_bytes) {
        (Some(part), Some(exclusive)) if part > exclusive => {
            format!(
                "{} that only it uses, and {} as its part of files that it shares",
                bytes(exclusive),
                bytes(part - exclusive)
            )
        }
        (_, Some(exclusive)) => format!("{} that only it uses", bytes(exclusive)),
        (_, None) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_bytes_are_named() {
        let on_disk = |exclusive_bytes, disk_bytes| {
            on_disk(&Volume { exclusive_bytes, disk_bytes, ..Volume::default() })
        };
        assert_eq!(on_disk(None, None), "");
        assert_eq!(on_disk(Some(4096), Some(4096)), "4.0 KiB that only it uses");
        let shared = "0 B that only it uses, and 4.0 KiB as its part of files that it shares";
        assert_eq!(on_disk(Some(0), Some(4096)), shared);
    }
}
