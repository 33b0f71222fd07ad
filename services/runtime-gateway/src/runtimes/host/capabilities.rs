//! Capabilities of this machine, detected when the runtime opens.

use domain::error_chain;
use domain::workload::Limits;
use runtime::Capabilities;

use super::cgroups::Cgroups;
use super::network::{self, Pool};
use super::policy::{Permission, Policy};
use super::unprivileged;

/// The limits that control groups enforce.
pub(super) const ALL_LIMITS: Limits =
    Limits { cpu_millis: Some(1), memory_bytes: Some(1), pids: Some(1), disk_bytes: None };

/// Prepares the machine for private networks. `None`, with the reason in the log: the machine
/// cannot have any.
pub(super) fn private_network(policy: &Policy) -> Option<Pool> {
    let pool = policy.network_pool();
    match network::prepare(pool) {
        Ok(()) => Some(pool),
        Err(error) => {
            tracing::warn!(
                error = error_chain(&error),
                "cannot set up private networks: workloads with a private network are not placed on this worker"
            );
            None
        }
    }
}

pub(super) fn capabilities(
    policy: &Policy,
    network_pool: Option<Pool>,
    cgroups: &Cgroups,
    copy_on_write: String,
) -> Capabilities {
    let mut features = vec![
        "network-none",
        "stop-after",
        "replaceable-outputs",
        "durable-output",
        "durable-input",
        "binary-input",
        "signals",
        "held-output",
        "complete-output",
        "exit-signals",
        "ends-whole",
        "image-checks",
        "exact-environment",
        "exec",
        "exec-ended",
        "terminal",
        "services",
        "limits-disk",
    ];
    let has_users = !unprivileged::is_active() || unprivileged::has_several_ids();
    let optional = [
        ("network-private", network_pool.is_some()),
        ("network-container", network_pool.is_some() || unprivileged::is_active()),
        ("network-host", policy.allows(Permission::HostNetwork)),
        ("privileged", policy.allows(Permission::Privileged) && !unprivileged::is_active()),
        ("owned-mounts", has_users),
        ("users", has_users),
    ];
    features.extend(optional.into_iter().filter(|(_, has)| *has).map(|(name, _)| name));
    let mut image_kinds = vec!["artifact".to_owned()];
    if policy.allows(Permission::HostImage) {
        image_kinds.push("host".to_owned());
    }
    let none = Limits::default();
    let limits = [
        ("limits-memory", Limits { memory_bytes: ALL_LIMITS.memory_bytes, ..none }),
        ("limits-cpu", Limits { cpu_millis: ALL_LIMITS.cpu_millis, ..none }),
        ("limits-pids", Limits { pids: ALL_LIMITS.pids, ..none }),
    ];
    features.extend(
        limits.iter().filter(|(_, limit)| cgroups.first_missing(limit).is_none()).map(|(name, _)| *name),
    );
    Capabilities {
        image_kinds,
        features: features.into_iter().map(str::to_owned).collect(),
        worker_provided: Vec::new(),
        copy_on_write,
        cpu_millis: cgroups.cpu_millis(),
        memory_bytes: cgroups.memory_bytes(),
    }
}
