//! The OCI configuration for libcontainer, as a function of the container and the supervisor's
//! limits.

use std::path::{Path, PathBuf};

use rustix::thread::CapabilitySet;
use serde_json::{Value, json};
use server::inherited::container_limits;

use crate::runtimes::host::cgroups::cpu_quota;
use crate::runtimes::host::persisted::Container;
use crate::runtimes::host::user_namespace::Range;

/// The default capabilities of common container engines, without those for devices (`MKNOD`), raw
/// packets (`NET_RAW`), file capabilities (`SETFCAP`) and the audit log (`AUDIT_WRITE`).
const CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FSETID",
    "CAP_FOWNER",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
    "CAP_KILL",
];

/// All capabilities, by number.
const ALL_CAPABILITIES: &[&str] = &[
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
];

/// Parts of /proc and /sys that reveal too much about the machine.
pub(super) const MASKED: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

/// Parts of /proc through which a container could change the machine.
pub(super) const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Size limit of `/dev/shm`, relative to the machine's memory. A memory limit of the container
/// includes it.
pub(super) const SHARED_MEMORY: &str = "size=10%";

/// OOM score adjustment of containers. The kernel kills their processes before others of the same
/// size.
pub(super) const OOM_SCORE: i32 = 500;

/// The group of terminals, by convention.
pub(super) const TERMINALS: u32 = 5;

/// Limit of pseudo-terminals per container. All containers share `kernel.pty.max`, usually 4,096.
pub(super) const TERMINALS_AT_MOST: &str = "max=512";

/// The directory in which containers expect their control groups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Facts about the worker that the configuration depends on.
pub(super) struct Worker<'a> {
    pub(super) root: &'a Path,
    pub(super) cgroup: &'a str,
    /// The capabilities of this process, which limit those of the container.
    pub(super) capabilities: u64,
    /// Whether the memory limit includes swap.
    pub(super) limits_swap: bool,
    /// Whether socket buffers have a separate limit.
    pub(super) limits_sockets: bool,
    /// The range of ids for the container's users, if they are mapped.
    pub(super) range: Option<Range>,
    /// Control groups of the container, with their paths in it.
    pub(super) cgroups: &'a [(PathBuf, String)],
}

/// The capabilities of an unprivileged container.
pub(super) fn default_capabilities() -> CapabilitySet {
    let known = ALL_CAPABILITIES.iter().enumerate();
    let requested = known.filter(|(_, name)| CAPABILITIES.contains(name));
    CapabilitySet::from_bits_retain(requested.map(|(number, _)| 1 << number).sum())
}

/// The capabilities of a container's processes, within those of this process.
pub(super) fn capabilities(container: &Container, held: u64) -> CapabilitySet {
    let requested = if container.privileged { CapabilitySet::all() } else { default_capabilities() };
    requested & CapabilitySet::from_bits_retain(held)
}

/// The host name of a container.
pub(super) fn hostname(container: &Container) -> String {
    container.handle.uuid().simple().to_string().chars().take(12).collect()
}

pub(super) fn configuration(container: &Container, worker: &Worker<'_>) -> Value {
    let requested = if container.privileged { ALL_CAPABILITIES } else { CAPABILITIES };
    let known = ALL_CAPABILITIES.iter().enumerate();
    let held = known.filter(|(number, _)| worker.capabilities & (1 << number) != 0).map(|(_, name)| *name);
    // Init enters the user namespace, which needs this capability. There it drops all capabilities
    // except the requested ones.
    let extra = worker.range.map(|_| "CAP_SYS_ADMIN");
    let capabilities: Vec<_> = held.filter(|name| requested.contains(name) || extra == Some(*name)).collect();
    let user = match worker.range {
        Some(_) => json!({ "uid": 0, "gid": 0, "additionalGids": [] }),
        None => json!({
            "uid": container.user.uid,
            "gid": container.user.gid,
            "additionalGids": container.user.groups,
        }),
    };
    let machine = |inside: u32| worker.range.and_then(|range| range.id(inside).ok()).unwrap_or(inside);
    let (uid, gid) = (format!("uid={}", machine(0)), format!("gid={}", machine(0)));
    let (uid, gid, terminals) = (uid.as_str(), gid.as_str(), format!("gid={}", machine(TERMINALS)));
    let (masked, read_only) = if container.privileged { (&[][..], &[][..]) } else { (MASKED, READ_ONLY) };
    let sys_options = if container.privileged {
        ["nosuid", "noexec", "nodev", "rw"]
    } else {
        ["nosuid", "noexec", "nodev", "ro"]
    };
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k", uid, gid]),
        mount(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", TERMINALS_AT_MOST, &terminals],
        ),
        mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", SHARED_MEMORY, uid, gid]),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &sys_options),
    ];
    if worker.cgroups.iter().any(|(_, path)| path != CGROUPS) {
        mounts.push(mount(CGROUPS, "tmpfs", &["nosuid", "noexec", "nodev", "mode=755", "size=64k"]));
    }
    for (group, path) in worker.cgroups {
        let options = ["bind", "ro", "nosuid", "noexec", "nodev"];
        mounts.push(json!({ "destination": path, "type": "bind", "source": group, "options": options }));
    }
    json!({
        "ociVersion": "1.0.2",
        "hostname": hostname(container),
        "root": { "path": worker.root, "readonly": false },
        "process": {
            "terminal": false,
            "cwd": "/",
            // Neither of these is used, because init knows the program and its environment. Without
            // HOME, libcontainer asks the C library for the home of the user. This would load code
            // that the image names, with root's rights on the machine.
            "args": ["init"],
            "env": ["HOME=/"],
            "noNewPrivileges": !container.privileged,
            "rlimits": limits_of_processes(),
            "oomScoreAdj": OOM_SCORE,
            "user": user,
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": [],
                "ambient": [],
            },
        },
        "mounts": mounts,
        "linux": {
            "cgroupsPath": format!("/{}", worker.cgroup),
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }, { "type": "cgroup" },
            ],
            "rootfsPropagation": "private",
            "resources": resources(container, worker),
            "maskedPaths": masked,
            "readonlyPaths": read_only,
        },
    })
}

/// All resource limits of a process, so that a container inherits none of the gateway's.
fn limits_of_processes() -> Value {
    let limits = container_limits().into_iter().filter_map(|limit| limit.within_reach().ok());
    limits.map(|limit| json!({ "type": limit.name, "soft": limit.soft, "hard": limit.hard })).collect()
}

fn mount(destination: &str, kind: &str, options: &[&str]) -> Value {
    json!({ "destination": destination, "type": kind, "source": kind, "options": options })
}

fn resources(container: &Container, worker: &Worker<'_>) -> Value {
    let devices = json!([{ "allow": container.privileged, "access": "rwm" }]);
    let mut resources = json!({ "devices": devices });
    if let Some(bytes) = container.memory_bytes {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        resources["memory"] = json!({ "limit": bytes });
        if worker.limits_swap {
            resources["memory"]["swap"] = json!(bytes);
        }
        if worker.limits_sockets {
            // Without this limit, socket buffers are not accounted.
            resources["memory"]["kernelTCP"] = json!(bytes);
        }
    }
    if let Some(millis) = container.cpu_millis {
        let (quota, period) = cpu_quota(millis);
        let quota = i64::try_from(quota).unwrap_or(i64::MAX);
        resources["cpu"] = json!({ "quota": quota, "period": period });
    }
    if let Some(pids) = container.pids {
        // One more, for init.
        resources["pids"] = json!({ "limit": i64::try_from(pids).unwrap_or(i64::MAX).saturating_add(1) });
    }
    resources
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtimes::host::persisted::Text;
    use crate::runtimes::host::users::User;

    fn container(privileged: bool) -> Container {
        Container {
            team: "main".to_owned(),
            handle: domain::ContainerHandle::new(),
            root: None,
            mounts: Vec::new(),
            environment: Vec::new(),
            directory: Text::Utf8("/".to_owned()),
            make_directory: false,
            user: User { uid: 1, gid: 2, groups: vec![3], home: "/".to_owned() },
            cpu_millis: Some(5),
            memory_bytes: Some(1 << 20),
            pids: Some(10),
            disk_bytes: None,
            privileged,
            network_of: None,
            local_names: Vec::new(),
            stop_signal: None,
            network: crate::runtimes::host::persisted::OwnNetwork::Private,
            note: String::new(),
        }
    }

    #[test]
    fn libcontainer_parses_the_configuration() -> Result<(), serde_json::Error> {
        let cgroups = [(PathBuf::from("/c/memory/g"), "/sys/fs/cgroup/memory".to_owned())];
        let worker = Worker {
            root: Path::new("/r"),
            cgroup: "g",
            capabilities: !(1 << 24),
            limits_swap: true,
            limits_sockets: true,
            range: None,
            cgroups: &cgroups,
        };
        for privileged in [false, true] {
            let value = configuration(&container(privileged), &worker);
            let count = value["process"]["capabilities"]["bounding"].as_array().map(Vec::len);
            assert_eq!(
                count,
                Some(if privileged { 40 } else { 10 }),
                "at most the capabilities of this process"
            );
            serde_json::from_value::<libcontainer::oci_spec::runtime::Spec>(value)?;
        }
        Ok(())
    }
}
