//! What a caller wants run, and how it can end.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{ArtifactId, BuildId, Digest};

/// A file path or other text of the system below, which need not be UTF-8.
pub type Bytes = Vec<u8>;

/// What a caller wants run. Immutable once submitted; validated by `rpc::spec` where it enters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadSpec {
    /// Whose it is.
    pub team: String,
    /// The root file system.
    pub image: Image,
    /// Program and arguments: at least one.
    pub command: Vec<Bytes>,
    /// Environment, beside what every process gets.
    pub environment: Vec<EnvironmentVariable>,
    /// Working directory, absolute.
    pub directory: Bytes,
    /// Who runs it, as `name`, `uid`, `name:group` or `uid:gid`. `None`: root.
    pub user: Option<String>,
    /// Where standard input comes from.
    pub stdin: Stdin,
    /// Whether a reader is meant to keep up with the output.
    pub output: OutputMode,
    /// Artifacts that it sees as directories; paths are absolute.
    pub inputs: Vec<Input>,
    /// Directories that become artifacts; paths are absolute.
    pub outputs: Vec<Output>,
    /// What it may use at most.
    pub limits: Limits,
    /// Whether it may do what root on the worker may do.
    pub privileged: bool,
    /// Which network it sees.
    pub network: Network,
    /// Tags that the worker must have.
    pub tags: Vec<String>,
    /// The worker's platform.
    pub platform: String,
    /// How long it may wait for a worker.
    pub queue_timeout: Option<Duration>,
    /// How long its process may run.
    pub run_timeout: Option<Duration>,
    /// The build that comes to own its outputs.
    pub build: Option<BuildId>,
}

/// One environment variable. Its value never appears in logs: `Debug` leaves it out.
#[derive(Clone, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Not empty; no `=`, no NUL.
    pub name: Bytes,
    /// No NUL.
    pub value: Bytes,
}

impl fmt::Debug for EnvironmentVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=…", String::from_utf8_lossy(&self.name))
    }
}

/// The root file system of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Image {
    /// The worker's own, read-only, with a layer for writes.
    Host,
}

impl Image {
    /// The name by which workers say that they can run it.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Host => "host",
        }
    }
}

/// Where standard input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stdin {
    /// It is empty.
    None,
    /// From whoever attaches.
    Attached,
}

/// Whether a reader is meant to keep up with the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputMode {
    /// The process is held back rather than lose output.
    Attached,
    /// The oldest output is dropped beyond a limit.
    Spooled,
}

/// An artifact that a workload sees as a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// For people, and unique within the spec.
    pub name: String,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Where it appears, absolute.
    pub path: Bytes,
    /// Whether writing fails.
    pub read_only: bool,
}

/// A directory that becomes an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// For people, and unique within the spec.
    pub name: String,
    /// Where it is, absolute.
    pub path: Bytes,
}

/// What a workload may use at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Thousandths of a core.
    pub cpu_millis: Option<u64>,
    /// Memory with page cache.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
}

/// Which network a process sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// The worker's.
    Host,
    /// A loopback device of its own.
    Loopback,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with this code.
    Code(u8),
    /// This signal ended it.
    Signal(u8),
    /// The kernel killed it for the container's memory limit.
    OutOfMemory,
}

/// What went wrong outside the process, with one of the reasons of `docs/errors.md`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// How a workload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Its process exited with 0.
    Succeeded,
    /// Its process exited otherwise.
    Failed,
    /// It could not be run, or its end is unknown.
    Errored,
    /// It was cancelled.
    Aborted,
}

/// An output whose bytes are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedOutput {
    /// Its name in the spec.
    pub name: String,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Bytes of its files.
    pub size_bytes: u64,
    /// Digest of its tree.
    pub digest: Digest,
    /// Entries, the root not counted.
    pub entries: u64,
}

/// The reasons of failures of workloads. `docs/errors.md` describes each; a test holds the two together.
pub const FAILURES: &[&str] = &[
    "CANCELLED",
    "QUEUE_TIMEOUT",
    "RUN_TIMEOUT",
    "WORKER_LOST",
    "START_UNKNOWN",
    "EXIT_UNKNOWN",
    "CONTACT_LOST",
    "STOPPED_BEFORE_START",
    "START_FAILED",
    "PROGRAM_NOT_FOUND",
    "PROGRAM_NOT_EXECUTABLE",
    "USER_NOT_FOUND",
    "WORKING_DIRECTORY_MISSING",
    "INVALID_MOUNT",
    "UNSUPPORTED",
    "CGROUP_UNAVAILABLE",
    "OUTPUT_MISSING",
    "PUBLISH_FAILED",
    "SETTLE_FAILED",
    "INPUT_UNAVAILABLE",
    "CONTAINER_NOT_FOUND",
    "DISK_FULL",
    "WORKER_FAILED",
];
