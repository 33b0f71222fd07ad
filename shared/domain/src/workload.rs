//! What a caller wants run, and how it can end.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{ArtifactId, BuildId, CacheId, ClaimId, Digest};

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
    /// Who runs it, as `name`, `uid`, `name:group` or `uid:gid`. `None`: whom the image names, or root.
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
    /// Task caches that it finds as directories, each once; paths are absolute.
    pub caches: Vec<CacheMount>,
    /// Whether it may be interrupted when its worker goes, and run once more.
    pub interruptible: bool,
    /// Higher is placed first.
    pub priority: i32,
    /// What of the worker is reserved for it.
    pub requests: ResourceRequests,
    /// How long an attempt may take until its process is about to start.
    pub start_timeout: Option<Duration>,
    /// How often it may begin again after an attempt that was lost though its process may have run, or that did not start in time.
    pub retries: u32,
    /// Capabilities that the worker must have, besides those that follow from the rest.
    pub capabilities: Vec<String>,
}

/// Amounts of what a worker has. 0: none is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceRequests {
    /// Thousandths of a processor.
    pub cpu_millis: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of the file system that holds the worker's volumes.
    pub disk_bytes: u64,
}

impl WorkloadSpec {
    /// What comes to own single outputs of those that were published.
    #[must_use]
    pub fn owners_of(&self, published: &[PublishedOutput]) -> Vec<(ArtifactId, OutputOwner)> {
        let of_output = |output: &PublishedOutput| {
            let known = self.outputs.iter().find(|known| known.name == output.name);
            let owners = known.map(|known| known.owners.as_slice()).unwrap_or_default();
            owners.iter().map(|owner| (output.artifact, *owner)).collect::<Vec<_>>()
        };
        published.iter().flat_map(of_output).collect()
    }

    /// The artifacts that it uses, each once.
    #[must_use]
    pub fn artifacts(&self) -> BTreeSet<ArtifactId> {
        let image = match self.image {
            Image::Host | Image::ResourceType(_) => None,
            Image::Artifact(artifact) => Some(artifact),
        };
        self.inputs.iter().map(|input| input.artifact).chain(image).collect()
    }
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// The worker's own, read-only, with a layer for writes.
    Host,
    /// The directory `rootfs` of this artifact, with a layer for writes.
    Artifact(ArtifactId),
    /// The image that the worker brings along for the resource type of this name, with a layer for writes.
    ResourceType(String),
}

impl Image {
    /// The name by which workers say that they can run it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Artifact(_) => "artifact",
            Self::ResourceType(_) => "resource-type",
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
    /// What comes to own it, besides the build of the workload. No cache twice within a spec.
    pub owners: Vec<OutputOwner>,
}

/// A task cache that a workload finds as a directory, and leaves to the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMount {
    /// The cache.
    pub cache: CacheId,
    /// Where it appears, absolute.
    pub path: Bytes,
}

impl CacheMount {
    /// What it is called, for people.
    #[must_use]
    pub fn name(&self) -> String {
        format!("cache {}", String::from_utf8_lossy(&self.path))
    }
}

/// What comes to own an output, if it is there by then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputOwner {
    /// A build.
    Build(BuildId),
    /// A task cache, whose latest version the output is then.
    TaskCache(CacheId),
    /// The resource cache that is made under this claim, which is ready then.
    ResourceCache(ClaimId),
}

impl OutputOwner {
    /// Whether it may own one thing only.
    #[must_use]
    pub fn is_cache(self) -> bool {
        matches!(self, Self::TaskCache(_) | Self::ResourceCache(_))
    }
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
    /// Its own, with outgoing access.
    Private,
    /// A loopback device of its own.
    None,
    /// The worker's.
    Host,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with this code.
    Code(u8),
    /// This signal ended it.
    Signal(u8),
    /// It was killed for the container's memory limit, or because the machine had no memory left.
    OutOfMemory,
}

/// What went wrong outside the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs.
    pub reason: FailureReason,
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

/// What a process left in a task cache, whose bytes are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedCache {
    /// The cache.
    pub cache: CacheId,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Digest of its tree.
    pub digest: Digest,
}

/// What an attempt used. `None`: it did not come to that, or its worker does not know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// How long its workload waited until it was placed.
    pub queued: Option<Duration>,
    /// From there until its process was started.
    pub preparing: Option<Duration>,
    /// How long its process ran.
    pub running: Option<Duration>,
    /// Processor time of everything in its container.
    pub cpu_time: Option<Duration>,
    /// The most bytes of memory that its container held at a time.
    pub peak_memory_bytes: Option<u64>,
    /// Bytes that were brought to the worker for it.
    pub bytes_in: Option<u64>,
    /// Bytes of the files that it published.
    pub bytes_out: Option<u64>,
}

macro_rules! failure_reasons {
    ($($variant:ident = $text:literal;)+) => {
        /// Why a workload could not be run, or what went wrong outside of its process: a closed list.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "docs/errors.md describes each; a test holds the two together")]
        pub enum FailureReason { $($variant,)+ }

        impl FailureReason {
            /// All of them.
            pub const ALL: &'static [FailureReason] = &[$(FailureReason::$variant,)+];

            /// Its text, on the wire and on disk.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

failure_reasons! {
    Cancelled = "CANCELLED";
    QueueTimeout = "QUEUE_TIMEOUT";
    StartTimeout = "START_TIMEOUT";
    RunTimeout = "RUN_TIMEOUT";
    Interrupted = "INTERRUPTED";
    WorkerLost = "WORKER_LOST";
    StartUnknown = "START_UNKNOWN";
    ExitUnknown = "EXIT_UNKNOWN";
    ContactLost = "CONTACT_LOST";
    StoppedBeforeStart = "STOPPED_BEFORE_START";
    StartFailed = "START_FAILED";
    ProgramNotFound = "PROGRAM_NOT_FOUND";
    ProgramNotExecutable = "PROGRAM_NOT_EXECUTABLE";
    UserNotFound = "USER_NOT_FOUND";
    WorkingDirectoryMissing = "WORKING_DIRECTORY_MISSING";
    InvalidMount = "INVALID_MOUNT";
    Unsupported = "UNSUPPORTED";
    CgroupUnavailable = "CGROUP_UNAVAILABLE";
    OutputMissing = "OUTPUT_MISSING";
    OutputInvalid = "OUTPUT_INVALID";
    PublishFailed = "PUBLISH_FAILED";
    SettleFailed = "SETTLE_FAILED";
    InvalidImage = "INVALID_IMAGE";
    InputUnavailable = "INPUT_UNAVAILABLE";
    InputDamaged = "INPUT_DAMAGED";
    ContainerNotFound = "CONTAINER_NOT_FOUND";
    DiskFull = "DISK_FULL";
    WorkerFull = "WORKER_FULL";
    WorkerFailed = "WORKER_FAILED";
}

/// Text that is no [`FailureReason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a reason for the failure of a workload")]
pub struct ParseFailureReasonError;

impl FromStr for FailureReason {
    type Err = ParseFailureReasonError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().copied().find(|reason| reason.as_str() == text).ok_or(ParseFailureReasonError)
    }
}

impl fmt::Display for FailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for FailureReason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for FailureReason {
    /// One that a newer version wrote is a failure of the worker: the message says more.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(text.parse().unwrap_or(Self::WorkerFailed))
    }
}
