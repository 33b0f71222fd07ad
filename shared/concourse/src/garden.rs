//! Client of a Garden server, which runs the containers and processes of a worker.
//!
//! All three runtimes of a worker (`containerd`, `guardian`, `houdini`) use the same HTTP server,
//! with the same routes and framing. Their error messages differ. [`Error`] unifies them.
//!
//! Ordinary calls are HTTP requests, one connection each. Run and Attach hijack the connection
//! after an HTTP response, for JSON messages in both directions. Two more connections carry the
//! output of the process: see [`Process`].

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
