//! Bodies of Garden requests and responses, named as on the wire.
//!
//! A Go server writes `null` for a missing list or map, and omits zeros. Both are parsed as empty
//! values.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// Parses `null` as the empty value.
pub(super) fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A container to create.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ContainerSpec {
    /// The handle, which is also the hostname. Required by containerd workers: letters and digits,
    /// with single `-`, `_` or `.` between them.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub handle: String,
    /// Time without a call, in nanoseconds, after which the server destroys the container. 0:
    /// never. Only guardian implements this.
    #[serde(skip_serializing_if = "is_zero")]
    pub grace_time: u64,
    /// The root directory: `raw://` and an absolute path.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rootfs: String,
    /// An alternative to `rootfs` that Concourse does not use.
    pub image: Image,
    /// Directories of the host to mount in the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bind_mounts: Vec<BindMount>,
    /// The requested network, as a CIDR.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub network: String,
    /// Properties. A containerd worker drops those with an empty value.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, String>,
    /// Environment of every process, as `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Whether root of the container is root of the host.
    #[serde(skip_serializing_if = "is_zero")]
    pub privileged: bool,
    /// Resource limits.
    pub limits: Limits,
    /// Rules for outgoing connections. On a containerd worker, a container without rules has no
    /// network.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub netout_rules: Vec<NetOutRule>,
    /// Ports of the host that are forwarded to the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub netin: Vec<NetIn>,
}

/// An image to fetch, for a container or a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Image {
    /// The URI of the image.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uri: String,
    /// The user name for the registry.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub username: String,
    /// The password for the registry.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub password: String,
}

/// A directory of the host that is mounted in a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BindMount {
    /// The path on the host.
    pub src_path: String,
    /// The path in the container.
    pub dst_path: String,
    /// 0: read-only. 1: read-write.
    #[serde(skip_serializing_if = "is_zero")]
    pub mode: u8,
    /// 0: the path is on the host. A containerd worker rejects other values.
    #[serde(skip_serializing_if = "is_zero")]
    pub origin: u8,
}

/// Resource limits of a container. 0: no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Network limits.
    pub bandwidth_limits: BandwidthLimits,
    /// CPU limits.
    pub cpu_limits: CpuLimits,
    /// Disk limits of the root file system.
    pub disk_limits: DiskLimits,
    /// Memory limits.
    pub memory_limits: MemoryLimits,
    /// Process limits.
    pub pid_limits: PidLimits,
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $name {
            $($(#[$field_doc])* #[serde(skip_serializing_if = "is_zero")] pub $field: $type,)*
        }
    )*};
}

numbers! {
    /// Network limits, in bytes per second.
    BandwidthLimits {
        /// Sustained rate.
        rate: u64,
        /// Peak rate.
        burst: u64,
    }
    /// CPU limits, in shares.
    CpuLimits {
        /// CPU weight. Overrides `limit_in_shares`.
        weight: u64,
        /// Shares of the cgroup.
        limit_in_shares: u64,
    }
    /// Disk limits, in inodes and bytes.
    DiskLimits {
        /// Soft limit of inodes.
        inode_soft: u64,
        /// Hard limit of inodes.
        inode_hard: u64,
        /// Soft limit, in bytes.
        byte_soft: u64,
        /// Hard limit, in bytes.
        byte_hard: u64,
        /// 0: the image counts. 1: the image does not count.
        scope: u8,
    }
    /// Memory limits.
    MemoryLimits {
        /// Limit, in bytes.
        limit_in_bytes: u64,
    }
    /// Process limits.
    PidLimits {
        /// Maximum number of processes.
        max: u64,
    }
    /// The capacity of a worker. Only guardian reports it: containerd does not implement the call,
    /// and houdini reports zeros.
    Capacity {
        /// Memory, in bytes.
        memory_in_bytes: u64,
        /// Disk space, in bytes.
        disk_in_bytes: u64,
        /// Disk space that can be promised to containers, in bytes.
        schedulable_disk_in_bytes: u64,
        /// Maximum number of containers.
        max_containers: u64,
    }
}

/// A port of the host that is forwarded to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetIn {
    /// The port of the host. 0: the server chooses one.
    pub host_port: u32,
    /// The port of the container. 0: the same as that of the host.
    pub container_port: u32,
}

/// A rule for outgoing connections of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetOutRule {
    /// 0: all protocols, 1: TCP, 2: UDP, 3: ICMP, 4: ICMPv6.
    #[serde(skip_serializing_if = "is_zero")]
    pub protocol: u8,
    /// Permitted address ranges.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<IpRange>,
    /// Permitted port ranges.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortRange>,
    /// Whether connections are logged.
    #[serde(skip_serializing_if = "is_zero")]
    pub log: bool,
}

/// An inclusive range of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IpRange {
    /// The first address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub start: String,
    /// The last address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub end: String,
}

/// An inclusive range of ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortRange {
    /// The first port.
    #[serde(skip_serializing_if = "is_zero")]
    pub start: u16,
    /// The last port.
    #[serde(skip_serializing_if = "is_zero")]
    pub end: u16,
}

/// A process to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessSpec {
    /// The id for attachments. If empty, the server chooses one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// The program. Without a slash, the server looks it up in the container's `PATH`.
    pub path: String,
    /// The arguments, without the name of the program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment as `NAME=value`, in addition to that of the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// The working directory, created if missing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dir: String,
    /// The user: a name, `uid`, or `uid:gid`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Resource limits of the process. Ignored by containerd workers.
    pub rlimits: Rlimits,
    /// Cgroup limits of this process. Only guardian implements them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
    /// The terminal, if the process has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tty: Option<Tty>,
    /// A separate image. Only guardian implements it.
    pub image: Image,
    /// Separate mounts. Only guardian implements them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bind_mounts: Vec<BindMount>,
}

/// Cgroup limits of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessLimits {
    /// CPU limits.
    pub cpu_limits: CpuLimits,
    /// Memory limits.
    pub memory_limits: MemoryLimits,
}

/// Limits for `setrlimit`. Missing limits stay unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rlimits {
    /// Limits by name, as in `nofile`.
    #[serde(flatten)]
    pub by_name: BTreeMap<String, u64>,
}

/// A terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tty {
    /// The size. If missing, the server chooses one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_size: Option<WindowSize>,
}

/// The size of a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WindowSize {
    /// Characters per line.
    pub columns: u16,
    /// Number of lines.
    pub rows: u16,
}

/// Signals of the protocol. Containerd workers ignore both. [`Client::stop`](super::Client::stop)
/// works with every kind of worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// Information about a container. Containerd workers do not implement it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ContainerInfo {
    /// `active` or `stopped`.
    pub state: String,
    /// Events. Only `oom` is used.
    #[serde(deserialize_with = "nullable")]
    pub events: Vec<String>,
    /// Address of the host, as seen from the container.
    #[serde(rename = "HostIP")]
    pub host_ip: String,
    /// Address of the container.
    #[serde(rename = "ContainerIP")]
    pub container_ip: String,
    /// IPv6 address of the container.
    #[serde(rename = "ContainerIPv6")]
    pub container_ipv6: String,
    /// Address of the worker.
    #[serde(rename = "ExternalIP")]
    pub external_ip: String,
    /// Path of the container's files.
    pub container_path: String,
    /// Ids of the running processes.
    #[serde(rename = "ProcessIDs", deserialize_with = "nullable")]
    pub process_ids: Vec<String>,
    /// Properties, including those of the server.
    #[serde(deserialize_with = "nullable")]
    pub properties: BTreeMap<String, String>,
    /// Ports of the host that are forwarded to the container.
    #[serde(deserialize_with = "nullable")]
    pub mapped_ports: Vec<MappedPort>,
}

/// A port of the host that is forwarded to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct MappedPort {
    /// The port of the host.
    pub host_port: u32,
    /// The port of the container.
    pub container_port: u32,
}

/// Resource usage of a container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// Memory usage.
    #[serde(rename = "MemoryStat")]
    pub memory: MemoryStat,
    /// CPU usage.
    #[serde(rename = "CPUStat")]
    pub cpu: CpuStat,
    /// Disk usage.
    #[serde(rename = "DiskStat")]
    pub disk: DiskStat,
    /// Network usage.
    #[serde(rename = "NetworkStat")]
    pub network: Option<NetworkStat>,
    /// Number of processes.
    #[serde(rename = "PidStat", deserialize_with = "nullable")]
    pub pids: PidStat,
    /// Time since the creation of the container, in nanoseconds.
    #[serde(rename = "Age")]
    pub age: u64,
    /// CPU time that the container is entitled to, in nanoseconds.
    #[serde(rename = "CPUEntitlement")]
    pub cpu_entitlement: u64,
}

/// Memory usage, in bytes: a selection of the fields of cgroup versions 1 and 2.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MemoryStat {
    /// Memory that counts toward the limit.
    #[serde(rename = "TotalUsageTowardLimit")]
    pub total_usage_toward_limit: u64,
    /// Resident memory (version 1).
    pub total_rss: u64,
    /// Page cache (version 1).
    pub total_cache: u64,
    /// Swapped memory.
    pub total_swap: u64,
    /// Resident memory (version 2).
    pub anon: u64,
    /// Page cache (version 2).
    pub file: u64,
}

/// CPU usage, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct CpuStat {
    /// User and system time together.
    pub usage: u64,
    /// User time.
    pub user: u64,
    /// System time.
    pub system: u64,
}

/// Disk usage of the root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct DiskStat {
    /// Bytes, including the image.
    pub total_bytes_used: u64,
    /// Inodes, including the image.
    pub total_inodes_used: u64,
    /// Bytes, without the image.
    pub exclusive_bytes_used: u64,
    /// Inodes, without the image.
    pub exclusive_inodes_used: u64,
}

/// Network usage, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct NetworkStat {
    /// Received bytes.
    pub rx_bytes: u64,
    /// Sent bytes.
    pub tx_bytes: u64,
}

/// Number of processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct PidStat {
    /// The present number.
    pub current: u64,
    /// The limit.
    pub max: u64,
}
