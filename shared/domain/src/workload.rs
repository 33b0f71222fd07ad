//! Workloads: their specs, and how they end.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{ArtifactId, BuildId, CacheId, ClaimId, Digest};

/// A file path or another text of the operating system. It may be invalid UTF-8.
pub type Bytes = Vec<u8>;

/// The spec of a workload. It never changes after submission. `rpc::spec` validates it in the API
/// handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadSpec {
    /// The team of the workload.
    pub team: String,
    /// Kind, which selects the ranking of workers.
    pub kind: WorkloadKind,
    /// The root file system.
    pub image: Image,
    /// Words that replace the entrypoint and the command of the image. `None`: those of the image
    /// apply.
    pub entrypoint: Option<Vec<Bytes>>,
    /// The program and its arguments, or the arguments of the entrypoint. It may be empty for
    /// [`Image::Artifact`] and [`Image::Reference`].
    pub command: Vec<Bytes>,
    /// Environment variables, in addition to those of every process.
    pub environment: Vec<EnvironmentVariable>,
    /// Working directory, as an absolute path.
    pub directory: Bytes,
    /// Whether the working directory of the image takes precedence over `directory`.
    pub prefers_image_directory: bool,
    /// User of the process, as `name`, `uid`, `name:group` or `uid:gid`. `None` means the user of
    /// the image, or root.
    pub user: Option<String>,
    /// Source of standard input.
    pub stdin: Stdin,
    /// Handling of output that no client has read yet.
    pub output: OutputMode,
    /// Artifacts that the process sees as directories. Their paths are absolute.
    pub inputs: Vec<Input>,
    /// Directories that become artifacts. Their paths are absolute.
    pub outputs: Vec<Output>,
    /// Limits of the container.
    pub limits: Limits,
    /// Whether the process has the permissions of root on the worker.
    pub privileged: bool,
    /// Network of the process.
    pub network: Network,
    /// Tags that the worker must have.
    pub tags: Vec<String>,
    /// Platform that the worker must have.
    pub platform: String,
    /// Maximum time in the queue.
    pub queue_timeout: Option<Duration>,
    /// Maximum run time of the process.
    pub run_timeout: Option<Duration>,
    /// The build that will own the outputs.
    pub build: Option<BuildId>,
    /// Task caches that the process sees as directories, each at most once. Their paths are
    /// absolute.
    pub caches: Vec<CacheMount>,
    /// Whether an attempt may be interrupted and repeated on another worker when its worker is
    /// cordoned or retired.
    pub interruptible: bool,
    /// Priority. The scheduler places workloads of higher priority first.
    pub priority: i32,
    /// Amounts that are reserved on the worker.
    pub requests: ResourceRequests,
    /// Maximum time from the placement of an attempt to the start of its process.
    pub start_timeout: Option<Duration>,
    /// Maximum number of repeated attempts. Only two kinds of attempts count: lost attempts whose
    /// process may have run, and attempts that did not start in time.
    pub retries: u32,
    /// Capabilities that the worker must have, in addition to those that other fields imply.
    pub capabilities: Vec<String>,
    /// Name or id of the only worker that may run the workload. Empty: any worker.
    pub worker: String,
    /// Size of the terminal of the process. `None`: the process has no terminal.
    pub terminal: Option<TerminalSize>,
    /// Whether the outcome contains the standard output of the process.
    pub keep_result: bool,
    /// Services beside the process, in the order of their start.
    pub services: Vec<Service>,
    /// Name of the workload. Several workloads may have the same name. Empty: none.
    pub name: String,
}

/// Maximum size of the result of a workload, which is its standard output, in bytes.
pub const MAX_RESULT_BYTES: usize = 1 << 20;

/// Kind of a workload. It selects the ranking of workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkloadKind {
    /// A task.
    Task,
    /// Fetching one version of a resource.
    Get,
    /// Creating a version of a resource.
    Put,
    /// Checking for new versions of a resource.
    Check,
}

/// A container that runs beside the process of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Name, unique within the spec. It is a host name, too.
    pub name: String,
    /// The root file system. It is not [`Image::ResourceType`].
    pub image: Image,
    /// Entrypoint, as in [`WorkloadSpec::entrypoint`].
    pub entrypoint: Option<Vec<Bytes>>,
    /// Command, as in [`WorkloadSpec::command`].
    pub command: Vec<Bytes>,
    /// Environment variables, in addition to those of every process.
    pub environment: Vec<EnvironmentVariable>,
    /// Working directory, as an absolute path.
    pub directory: Bytes,
    /// Whether the working directory of the image takes precedence over `directory`.
    pub prefers_image_directory: bool,
    /// User, as in [`WorkloadSpec::user`].
    pub user: Option<String>,
    /// Limits of the container.
    pub limits: Limits,
    /// Condition under which the service is ready.
    pub readiness: Readiness,
    /// Whether the process cannot continue without the service.
    pub essential: bool,
}

/// Condition under which a service is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Check that is repeated until it succeeds.
    pub check: ReadinessCheck,
    /// Maximum time from the start of the service until it is ready.
    pub timeout: Duration,
}

/// Check whether a service is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadinessCheck {
    /// The process of the service has started.
    Started,
    /// This TCP port of the container accepts connections.
    TcpPort(u16),
    /// This command exits with code 0 in the container.
    Command(Vec<Bytes>),
}

/// Size of a terminal in characters, at least 1 each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// Height.
    pub rows: u16,
    /// Width.
    pub columns: u16,
}

/// Amounts of a worker's resources. 0 requests nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResourceRequests {
    /// Processor time, in thousandths of a core.
    pub cpu_millis: u64,
    /// Memory, in bytes.
    pub memory_bytes: u64,
    /// Space in the volumes' file system, in bytes.
    pub disk_bytes: u64,
}

impl WorkloadSpec {
    /// Returns each published output with each owner that the spec declares for it.
    #[must_use]
    pub fn owners_of(&self, published: &[PublishedOutput]) -> Vec<(ArtifactId, OutputOwner)> {
        let owners_of_output = |output: &PublishedOutput| {
            let declared = self.outputs.iter().find(|declared| declared.name == output.name);
            let owners = declared.map(|declared| declared.owners.as_slice()).unwrap_or_default();
            owners.iter().map(|owner| (output.artifact, *owner)).collect::<Vec<_>>()
        };
        published.iter().flat_map(owners_of_output).collect()
    }

    /// Returns the artifacts of the inputs and of all images, each once.
    #[must_use]
    pub fn artifacts(&self) -> BTreeSet<ArtifactId> {
        let images = self.services.iter().map(|service| &service.image).chain([&self.image]);
        let images = images.filter_map(|image| match image {
            Image::Host | Image::ResourceType(_) | Image::Reference(_) => None,
            Image::Artifact(artifact) => Some(*artifact),
        });
        self.inputs.iter().map(|input| input.artifact).chain(images).collect()
    }
}

/// An environment variable. `Debug` omits its value, so that it never appears in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Name. It is not empty, and has no `=` and no NUL.
    pub name: Bytes,
    /// Value. It has no NUL.
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
    /// The worker's root file system, read-only, with a layer for writes.
    Host,
    /// The directory `rootfs` of this artifact, with a layer for writes.
    Artifact(ArtifactId),
    /// The worker-provided image of the resource type of this name, with a layer for writes.
    ResourceType(String),
    /// The image with this reference in a registry, which becomes an artifact. An accepted spec has
    /// a reference with a digest.
    Reference(String),
}

impl Image {
    /// Returns the kind of the image, as in
    /// [`Labels::image_kinds`](crate::worker::Labels::image_kinds).
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Artifact(_) | Self::Reference(_) => "artifact",
            Self::ResourceType(_) => "resource-type",
        }
    }
}

/// Source of standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stdin {
    /// Standard input is empty.
    None,
    /// An attached client sends standard input.
    Attached,
    /// Standard input is these bytes. Input of attached clients is discarded.
    Inline(InlineStdin),
}

/// Bytes of standard input. `Debug` omits them, so that they never appear in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct InlineStdin(pub Bytes);

impl fmt::Debug for InlineStdin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// Handling of output that no client has read yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputMode {
    /// The process blocks until a client has read its output. No output is lost.
    Attached,
    /// The oldest output beyond a limit is dropped.
    Spooled,
}

/// An artifact that a workload sees as a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Name for messages, unique within the spec.
    pub name: String,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Path of the directory, absolute.
    pub path: Bytes,
    /// Whether the process cannot write to the directory.
    pub read_only: bool,
}

/// A directory that becomes an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Name for messages, unique within the spec.
    pub name: String,
    /// Path of the directory, absolute.
    pub path: Bytes,
    /// Owners of the artifact, in addition to the build of the workload. A spec names a cache at
    /// most once.
    pub owners: Vec<OutputOwner>,
}

/// A task cache that a workload sees as a directory. The directory becomes the next version of the
/// cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMount {
    /// The cache.
    pub cache: CacheId,
    /// Path of the directory, absolute.
    pub path: Bytes,
}

impl CacheMount {
    /// Returns the name of the mount for messages.
    #[must_use]
    pub fn name(&self) -> String {
        format!("cache {}", String::from_utf8_lossy(&self.path))
    }
}

/// The future owner of an output. An owner that does not exist when the workload settles is
/// skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputOwner {
    /// A build.
    Build(BuildId),
    /// A task cache. The output becomes its latest version.
    TaskCache(CacheId),
    /// The resource cache of this claim. The output makes the cache ready.
    ResourceCache(ClaimId),
}

impl OutputOwner {
    /// Whether the owner is a cache, which owns at most one artifact.
    #[must_use]
    pub fn is_cache(self) -> bool {
        matches!(self, Self::TaskCache(_) | Self::ResourceCache(_))
    }
}

/// Limits of a workload's container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Maximum processor time, in thousandths of a core.
    pub cpu_millis: Option<u64>,
    /// Maximum memory including page cache, in bytes.
    pub memory_bytes: Option<u64>,
    /// Maximum number of processes and threads.
    pub pids: Option<u64>,
    /// Maximum size of everything that the container writes to its disk, in bytes.
    pub disk_bytes: Option<u64>,
}

/// Network of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// A separate network with outgoing access.
    Private,
    /// Only a loopback device.
    None,
    /// The network of the worker.
    Host,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// The process exited with this code.
    Code(u8),
    /// This signal ended the process.
    Signal(u8),
    /// The process was killed because of the container's memory limit, or because the machine had
    /// no memory left.
    OutOfMemory,
}

/// A failure outside of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Machine-readable reason.
    pub reason: FailureReason,
    /// Human-readable message.
    pub message: String,
}

/// How a workload ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The process exited with code 0.
    Succeeded,
    /// The process ended in another way.
    Failed,
    /// The workload could not run, or its end is unknown.
    Errored,
    /// The workload was cancelled.
    Aborted,
}

/// An output whose bytes are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedOutput {
    /// Name of the output in the spec.
    pub name: String,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Total size of the files, in bytes.
    pub size_bytes: u64,
    /// Digest of the tree.
    pub digest: Digest,
    /// Number of entries, without the root.
    pub entries: u64,
}

/// A new version of a task cache whose bytes are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublishedCache {
    /// The cache.
    pub cache: CacheId,
    /// The artifact.
    pub artifact: ArtifactId,
    /// Digest of the tree.
    pub digest: Digest,
}

/// Resource usage of an attempt. `None` if the attempt did not reach that stage, or the worker
/// cannot measure the value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time that the workload waited for its placement.
    pub queued: Option<Duration>,
    /// Time from the placement to the start of the process.
    pub preparing: Option<Duration>,
    /// Run time of the process.
    pub running: Option<Duration>,
    /// Processor time of all processes in the container.
    pub cpu_time: Option<Duration>,
    /// Peak memory of the container, in bytes.
    pub peak_memory_bytes: Option<u64>,
    /// Bytes that were copied to the worker for the attempt.
    pub bytes_in: Option<u64>,
    /// Size of the published files, in bytes.
    pub bytes_out: Option<u64>,
}

macro_rules! failure_reasons {
    ($($variant:ident = $text:literal;)+) => {
        /// Reason of a failure outside of the process. The list is closed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "docs/errors.md describes each reason; a test compares the two lists")]
        pub enum FailureReason { $($variant,)+ }

        impl FailureReason {
            /// All reasons.
            pub const ALL: &'static [FailureReason] = &[$(FailureReason::$variant,)+];

            /// Returns the text of the reason, on the wire and on disk.
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
    ServiceFailed = "SERVICE_FAILED";
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
    ResultTooLarge = "RESULT_TOO_LARGE";
    ResultIncomplete = "RESULT_INCOMPLETE";
    SettleFailed = "SETTLE_FAILED";
    InvalidImage = "INVALID_IMAGE";
    ImageUnavailable = "IMAGE_UNAVAILABLE";
    InputUnavailable = "INPUT_UNAVAILABLE";
    InputDamaged = "INPUT_DAMAGED";
    InputUnreachable = "INPUT_UNREACHABLE";
    WorkerUnreachable = "WORKER_UNREACHABLE";
    ContainerNotFound = "CONTAINER_NOT_FOUND";
    DiskFull = "DISK_FULL";
    DiskLimitExceeded = "DISK_LIMIT_EXCEEDED";
    WorkerFull = "WORKER_FULL";
    WorkerFailed = "WORKER_FAILED";
}

/// A text is not a [`FailureReason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the text is not a known failure reason of workloads")]
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
    /// Reads an unknown reason, which a newer version has written, as
    /// [`FailureReason::WorkerFailed`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(text.parse().unwrap_or(Self::WorkerFailed))
    }
}
