//! Columns of `gantry list containers`, and fields of each listed object.

use rpc::pb::artifacts::Container;

use crate::commands::list::names::Names;
use crate::render::labels;
use crate::render::table::plain;

pub(super) const CONTAINERS: &[&str] = &["HANDLE", "WORKER", "STATE", "AGE", "WORKLOAD", "ATTEMPT"];

pub(super) fn container_row(container: &Container, names: &Names) -> Vec<String> {
    vec![
        container.container_handle.clone(),
        names.of(&container.worker_id),
        labels::inventory_state(container.state()).to_owned(),
        labels::ago(container.created_at.as_ref()),
        container.workload_id.clone(),
        container.attempt_id.clone(),
    ]
}

pub(super) fn container_fields(container: &Container) -> Vec<(&'static str, String)> {
    vec![
        ("handle", container.container_handle.clone()),
        ("worker", container.worker_id.clone()),
        ("state", labels::inventory_state(container.state()).to_owned()),
        ("workload", container.workload_id.clone()),
        ("attempt", container.attempt_id.clone()),
        ("created", container.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("used", container.touched_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost", container.lost_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("garbage", plain(&container.mark_reason, 1000)),
    ]
}
