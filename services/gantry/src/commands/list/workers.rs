//! Columns of `gantry list workers`, and fields of each listed object.

use rpc::pb::scheduler::{ResourceType, Worker, WorkerLabels};

use crate::render::labels;
use crate::render::table::{bytes, plain};

pub(super) const WORKERS: &[&str] =
    &["NAME", "STATE", "PLATFORM", "TAGS", "TASKS", "CONTAINERS", "VOLUMES", "FREE DISK", "LAST CONTACT"];

pub(super) fn worker_row(worker: &Worker) -> Vec<String> {
    let labels = worker.labels.clone().unwrap_or_default();
    let limit = worker.capacity.unwrap_or_default().max_tasks;
    vec![
        plain(&worker.name, 60),
        labels::standing(worker),
        plain(&labels.platform, 20),
        plain(&labels.tags.join(","), 40),
        if limit == 0 { worker.active_tasks.to_string() } else { format!("{}/{limit}", worker.active_tasks) },
        worker.containers.to_string(),
        worker.volumes.to_string(),
        labels::free_disk(worker),
        labels::ago(worker.last_contact_at.as_ref()),
    ]
}

/// Formats the resource types, each with its version if it has one.
fn resource_types(labels: &WorkerLabels) -> String {
    let word = |known: &ResourceType| match known.version.as_str() {
        "" => known.name.clone(),
        version => format!("{} {version}", known.name),
    };
    labels.resource_types.iter().map(word).collect::<Vec<_>>().join(", ")
}

fn failures(worker: &Worker) -> String {
    match worker.failures {
        0 => String::new(),
        failures => format!("{failures} in a row, the last: {}", plain(&worker.last_failure, 200)),
    }
}

pub(super) fn worker_fields(worker: &Worker) -> Vec<(&'static str, String)> {
    let labels = worker.labels.clone().unwrap_or_default();
    let (capacity, reserved) = (worker.capacity.unwrap_or_default(), worker.reserved.unwrap_or_default());
    let limited = |count: u64, limit: u32| match limit {
        0 => format!("{count}, no limit"),
        limit => format!("{count}, at most {limit}"),
    };
    vec![
        ("name", plain(&worker.name, 255)),
        ("id", worker.worker_id.clone()),
        ("state", labels::standing(worker)),
        ("desired", labels::desire(worker.desired())),
        ("gets no work", plain(&labels::no_work(worker), 1000)),
        ("drained", worker.drained_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("interrupts from", worker.interrupt_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("blocked by", plain(&worker.blocked_by, 1000)),
        ("failures", failures(worker)),
        ("quarantined until", worker.quarantined_until.as_ref().map(labels::instant).unwrap_or_default()),
        ("ephemeral", if labels.ephemeral { "yes".to_owned() } else { String::new() }),
        ("platform", plain(&labels.platform, 100)),
        ("tags", plain(&labels.tags.join(" "), 1000)),
        ("team", labels.team.clone()),
        ("zone", plain(&labels.zone, 1024)),
        ("images", labels.image_kinds.join(" ")),
        ("resource types", plain(&resource_types(&labels), 1000)),
        ("capabilities", labels.capabilities.join(" ")),
        ("tasks", limited(worker.active_tasks.into(), capacity.max_tasks)),
        ("leases", format!("{}, {} not interruptible", worker.leases, worker.uninterruptible_leases)),
        ("containers", limited(worker.containers, capacity.max_containers)),
        ("volumes", limited(worker.volumes, capacity.max_volumes)),
        ("cores", reserved_of(capacity.cpu_millis, reserved.cpu_millis, labels::cores)),
        ("memory", reserved_of(capacity.memory_bytes, reserved.memory_bytes, bytes)),
        ("disk", disk(worker)),
        ("gateway", worker.gateway_endpoint.clone()),
        ("incarnation", worker.incarnation.to_string()),
        ("session", worker.session.to_string()),
        ("contact", format!("{} ago", labels::ago(worker.last_contact_at.as_ref()))),
    ]
}

/// Formats a capacity, and the amount that leases reserve. 0: the capacity is unknown.
fn reserved_of(capacity: u64, reserved: u64, shown: fn(u64) -> String) -> String {
    match (capacity, reserved) {
        (0, 0) => String::new(),
        (0, reserved) => format!("{} reserved", shown(reserved)),
        (capacity, 0) => shown(capacity),
        (capacity, reserved) => format!("{}, {} reserved", shown(capacity), shown(reserved)),
    }
}

fn disk(worker: &Worker) -> String {
    let free = match worker.capacity.unwrap_or_default().disk_bytes {
        0 => labels::free_disk(worker),
        disk => format!("{} free of {}", labels::free_disk(worker), bytes(disk)),
    };
    match worker.reserved.unwrap_or_default().disk_bytes {
        0 => free,
        reserved => format!("{free}, {} reserved", bytes(reserved)),
    }
}
