//! Containers and processes of a worker: a client of its Garden server.
//!
//! All three runtimes of a worker (`containerd`, `guardian`, `houdini`) answer through the same HTTP server, so routes and framing are the
//! same. What differs is how they fail; [`Error`] brings that together.
//!
//! Ordinary calls are HTTP, one connection each. Run and Attach take the connection over after an HTTP answer, for JSON messages in both
//! directions, and use two more connections for what the process writes: see [`Process`].

mod call;
mod client;
mod error;
mod json;
mod messages;
mod process;

pub use client::{Client, Settings};
pub use error::Error;
pub use messages::{
    BandwidthLimits, BindMount, Capacity, ContainerInfo, ContainerSpec, CpuLimits, CpuStat, DiskLimits,
    DiskStat, Image, IpRange, Limits, MappedPort, MemoryLimits, MemoryStat, Metrics, NetIn, NetOutRule,
    NetworkStat, PidLimits, PidStat, PortRange, ProcessLimits, ProcessSpec, Rlimits, Signal, Tty, WindowSize,
};
pub use process::{Control, ControlError, Exit, Output, Process, WaitError};
