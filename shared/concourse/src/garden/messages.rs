//! Bodies of requests and answers, named as they stand on the wire.
//!
//! A Go server writes `null` for a list or map that it does not have, and leaves zeros out; both read as empty here.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// `null` reads as the empty value.
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
    /// Names the container, and its host. A containerd worker insists on one: letters and digits, with single `-`, `_` or `.` between.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub handle: String,
    /// Nanoseconds without a call until the server destroys it; 0 is never. Only guardian heeds it.
    #[serde(skip_serializing_if = "is_zero")]
    pub grace_time: u64,
    /// `raw://` and an absolute path.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rootfs: String,
    /// An alternative to `rootfs` that Concourse does not use.
    pub image: Image,
    /// Directories of the host to show inside.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bind_mounts: Vec<BindMount>,
    /// A network to ask for, as a CIDR.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub network: String,
    /// A containerd worker loses those with an empty value.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub properties: BTreeMap<String, String>,
    /// `NAME=value` for every process.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Whether its root is root of the host.
    #[serde(skip_serializing_if = "is_zero")]
    pub privileged: bool,
    /// What it may use.
    pub limits: Limits,
    /// None at all means no network on a containerd worker; any means that there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub netout_rules: Vec<NetOutRule>,
    /// Ports of the host that lead inside.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub netin: Vec<NetIn>,
}

/// An image to fetch, for a container or a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Image {
    /// Where from.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uri: String,
    /// As whom.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub username: String,
    /// With which password.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub password: String,
}

/// A directory of the host that is seen inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BindMount {
    /// On the host.
    pub src_path: String,
    /// Inside.
    pub dst_path: String,
    /// 0 is read-only, 1 is read-write.
    #[serde(skip_serializing_if = "is_zero")]
    pub mode: u8,
    /// 0 is the host. A containerd worker refuses anything else.
    #[serde(skip_serializing_if = "is_zero")]
    pub origin: u8,
}

/// What a container may use; 0 is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Of the network.
    pub bandwidth_limits: BandwidthLimits,
    /// Of processors.
    pub cpu_limits: CpuLimits,
    /// Of its root file system.
    pub disk_limits: DiskLimits,
    /// Of memory.
    pub memory_limits: MemoryLimits,
    /// Of processes.
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
    /// Bytes per second.
    BandwidthLimits {
        /// Sustained.
        rate: u64,
        /// At most.
        burst: u64,
    }
    /// Shares of processors.
    CpuLimits {
        /// Wins over `limit_in_shares` when given.
        weight: u64,
        /// Shares of the cgroup.
        limit_in_shares: u64,
    }
    /// Inodes and bytes.
    DiskLimits {
        /// Inodes, soft.
        inode_soft: u64,
        /// Inodes, hard.
        inode_hard: u64,
        /// Bytes, soft.
        byte_soft: u64,
        /// Bytes, hard.
        byte_hard: u64,
        /// 0 counts the image, 1 does not.
        scope: u8,
    }
    /// Memory.
    MemoryLimits {
        /// Bytes.
        limit_in_bytes: u64,
    }
    /// Processes.
    PidLimits {
        /// At most as many.
        max: u64,
    }
    /// What a worker has. Only guardian knows: containerd does not implement it, houdini answers zeros.
    Capacity {
        /// Memory.
        memory_in_bytes: u64,
        /// Disk.
        disk_in_bytes: u64,
        /// Disk that may be promised.
        schedulable_disk_in_bytes: u64,
        /// Containers.
        max_containers: u64,
    }
}

/// A port of the host that leads inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetIn {
    /// Of the host; 0 lets the server choose.
    pub host_port: u32,
    /// Of the container; 0 is the same.
    pub container_port: u32,
}

/// Where a container may connect to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NetOutRule {
    /// 0 all, 1 TCP, 2 UDP, 3 ICMP, 4 ICMPv6.
    #[serde(skip_serializing_if = "is_zero")]
    pub protocol: u8,
    /// Addresses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<IpRange>,
    /// Ports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortRange>,
    /// Whether it is logged.
    #[serde(skip_serializing_if = "is_zero")]
    pub log: bool,
}

/// Addresses from the first to the last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IpRange {
    /// The first.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub start: String,
    /// The last.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub end: String,
}

/// Ports from the first to the last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortRange {
    /// The first.
    #[serde(skip_serializing_if = "is_zero")]
    pub start: u16,
    /// The last.
    #[serde(skip_serializing_if = "is_zero")]
    pub end: u16,
}

/// A process to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessSpec {
    /// What to attach by. The server makes one up for an empty one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// The program, looked for in the container's `PATH` unless it has a slash.
    pub path: String,
    /// Without the program's name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// `NAME=value`, after the container's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Where it starts; made if missing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dir: String,
    /// A name, `uid`, or `uid:gid`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Ignored by containerd workers.
    pub rlimits: Rlimits,
    /// Of this process alone; guardian only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<ProcessLimits>,
    /// A terminal, if it shall have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tty: Option<Tty>,
    /// Of its own; guardian only.
    pub image: Image,
    /// Of its own; guardian only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bind_mounts: Vec<BindMount>,
}

/// Limits of a process alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessLimits {
    /// Of processors.
    pub cpu_limits: CpuLimits,
    /// Of memory.
    pub memory_limits: MemoryLimits,
}

/// What `setrlimit` takes; what is absent stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rlimits {
    /// By name, as in `nofile`.
    #[serde(flatten)]
    pub by_name: BTreeMap<String, u64>,
}

/// A terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tty {
    /// The server's choice if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_size: Option<WindowSize>,
}

/// Of a terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WindowSize {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

/// The signals that travel. Containerd workers ignore both: [`Client::stop`](super::Client::stop) works everywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// What is known of a container. Containerd workers do not implement it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ContainerInfo {
    /// `active` or `stopped`.
    pub state: String,
    /// Only `oom` is used.
    #[serde(deserialize_with = "nullable")]
    pub events: Vec<String>,
    /// Of the host, as the container sees it.
    #[serde(rename = "HostIP")]
    pub host_ip: String,
    /// Of the container.
    #[serde(rename = "ContainerIP")]
    pub container_ip: String,
    /// Of the container.
    #[serde(rename = "ContainerIPv6")]
    pub container_ipv6: String,
    /// Of the worker.
    #[serde(rename = "ExternalIP")]
    pub external_ip: String,
    /// Of its files.
    pub container_path: String,
    /// Of running processes.
    #[serde(rename = "ProcessIDs", deserialize_with = "nullable")]
    pub process_ids: Vec<String>,
    /// As set, and the server's own.
    #[serde(deserialize_with = "nullable")]
    pub properties: BTreeMap<String, String>,
    /// Ports of the host that lead inside.
    #[serde(deserialize_with = "nullable")]
    pub mapped_ports: Vec<MappedPort>,
}

/// A port of the host that leads inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct MappedPort {
    /// Of the host.
    pub host_port: u32,
    /// Of the container.
    pub container_port: u32,
}

/// What a container uses.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Metrics {
    /// Memory.
    #[serde(rename = "MemoryStat")]
    pub memory: MemoryStat,
    /// Processors.
    #[serde(rename = "CPUStat")]
    pub cpu: CpuStat,
    /// Disk.
    #[serde(rename = "DiskStat")]
    pub disk: DiskStat,
    /// Network.
    #[serde(rename = "NetworkStat")]
    pub network: Option<NetworkStat>,
    /// Processes.
    #[serde(rename = "PidStat", deserialize_with = "nullable")]
    pub pids: PidStat,
    /// Nanoseconds since it was created.
    #[serde(rename = "Age")]
    pub age: u64,
    /// Nanoseconds of processors that it is entitled to.
    #[serde(rename = "CPUEntitlement")]
    pub cpu_entitlement: u64,
}

/// Bytes of memory, of the many members those that the kernel's newer and older accounting share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MemoryStat {
    /// What counts toward the limit.
    #[serde(rename = "TotalUsageTowardLimit")]
    pub total_usage_toward_limit: u64,
    /// Resident.
    pub total_rss: u64,
    /// Of files.
    pub total_cache: u64,
    /// Swapped out.
    pub total_swap: u64,
    /// Resident, newer accounting.
    pub anon: u64,
    /// Of files, newer accounting.
    pub file: u64,
}

/// Nanoseconds of processors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct CpuStat {
    /// Both.
    pub usage: u64,
    /// Of programs.
    pub user: u64,
    /// Of the kernel.
    pub system: u64,
}

/// Of its root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct DiskStat {
    /// With the image.
    pub total_bytes_used: u64,
    /// With the image.
    pub total_inodes_used: u64,
    /// Without the image.
    pub exclusive_bytes_used: u64,
    /// Without the image.
    pub exclusive_inodes_used: u64,
}

/// Bytes of network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct NetworkStat {
    /// Received.
    pub rx_bytes: u64,
    /// Sent.
    pub tx_bytes: u64,
}

/// Processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct PidStat {
    /// Now.
    pub current: u64,
    /// Allowed.
    pub max: u64,
}
