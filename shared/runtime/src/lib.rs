//! The edge to one worker: the one abstraction of the suite that has several real implementations.
//!
//! A runtime makes volumes and containers under handles that it is given, starts processes, keeps their output and the
//! record of their end, and destroys. It decides nothing: what to make, and what is garbage, it is told.
//!
//! Rules that every implementation keeps, and that the conformance suite in `shared/testing` holds it to:
//!
//! - Creating under a handle that exists changes nothing and succeeds; destroying what does not exist succeeds. So every
//!   step can be repeated after a crash.
//! - [`Runtime::list`] names everything that occupies the worker, half-made things included.
//! - A process is started at most once per id. The intent to start is durable before the start; an intent without proof of
//!   a start is answered as [`ProcessState::StartUnknown`], never started again.
//! - Processes and the record of their end survive the gateway that started them; so does their output, with the capability
//!   `durable-output`.
//! - When the process of a container has ended, every other process in that container is dead before the end is told, with the capability
//!   `ends-whole`.
//!
//! What not every kind of worker can do is a capability, by name: see [`Capabilities`].

mod contents;
mod error;
mod process;

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use domain::worker::{Marker, ResourceType, StoreMark};
use domain::workload::{Bytes, Limits, Network, Usage};
use domain::{ArtifactId, AttemptId, ContainerHandle, VolumeHandle};

pub use contents::{Archive, Contents, Inlet, RemoteVolume};
pub use error::RuntimeError;
pub use process::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessSpec, ProcessState, Window,
};

/// What a runtime can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Kinds of image that it can run, such as `host`.
    pub image_kinds: Vec<String>,
    /// What else it can do, by name: `privileged`, `network-private`, `stop-after`, `terminal`, and
    ///
    /// - `limits-memory`, `limits-cpu`, `limits-pids`: that limit of [`ContainerSpec::limits`] holds for everything in a container;
    /// - `replaceable-outputs`: [`Runtime::take_directory`], so that outputs need not be mounts;
    /// - `owned-mounts`: the user of a container comes to own its writable mounts;
    /// - `durable-output`: output is kept, and nothing of it lost, while no gateway is there;
    /// - `held-output`: a process is held back rather than lose output that nobody has acknowledged;
    /// - `complete-output`: nothing of what a process writes just before its end is lost;
    /// - `binary-input`: standard input may be any bytes; elsewhere only text in UTF-8;
    /// - `signals`: every signal can be sent; elsewhere TERM and KILL only;
    /// - `durable-input`: standard input goes on where it was when another gateway takes over;
    /// - `exit-signals`: an end by a signal, or for lack of memory, is told as that; elsewhere it may be a code above 128;
    /// - `ends-whole`: when a process has ended, nothing else in its container runs any more; elsewhere it may until the container is
    ///   destroyed;
    /// - `image-checks`: users, directories and mount points are looked up in the image when a container is made; elsewhere when its process
    ///   is started;
    /// - `exact-environment`: nothing is added to the environment but PATH and HOME.
    pub features: Vec<String>,
    /// What it brings along: each thing once.
    pub worker_provided: Vec<WorkerProvidedPath>,
    /// How it makes copy-on-write children, for people: `overlay` or `copy`, and why.
    pub copy_on_write: String,
    /// Thousandths of a processor that its containers can have in all. `None`: it does not say.
    pub cpu_millis: Option<u64>,
    /// Bytes of memory that its containers can have in all. `None`: it does not say.
    pub memory_bytes: Option<u64>,
}

impl Capabilities {
    /// The resource types whose images it brings along.
    pub fn resource_types(&self) -> Vec<ResourceType> {
        let of = |worker_provided: &WorkerProvidedPath| match &worker_provided.what {
            WorkerProvided::ResourceType(name) => {
                Some(ResourceType { name: name.clone(), version: worker_provided.version.clone() })
            }
            WorkerProvided::Certs => None,
        };
        self.worker_provided.iter().filter_map(of).collect()
    }
}

/// Something that a worker may bring along.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkerProvided {
    /// The image of the resource type of this name: the root file system of a container, as it is.
    ResourceType(String),
    /// The certificates that it trusts.
    Certs,
}

/// Something that a worker brings along. It is what it was as long as version and path are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerProvidedPath {
    /// What it is.
    pub what: WorkerProvided,
    /// Its version, for people.
    pub version: String,
    /// Where on the worker it is.
    pub path: String,
}

/// Where a new volume's contents come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeSource {
    /// It is empty.
    Empty,
    /// It starts with the contents of `parent`, which must not be written to any more, and which it never changes.
    CopyOnWrite {
        /// The volume it is a child of.
        parent: VolumeHandle,
    },
    /// It starts as a copy-on-write child does. Each of these files has several names there, and stays one file when it
    /// is written to by one of them, where the worker's way of making children would break the link.
    CopyOnWriteLinked {
        /// The volume it is a child of.
        parent: VolumeHandle,
        /// All names of the files that have several, relative to the root, in the order of a manifest.
        names: Vec<PathBuf>,
    },
    /// It is a copy of all that is in `original` now, which nobody writes to meanwhile, and needs neither that nor its parents.
    Copy {
        /// The volume whose contents it has.
        original: VolumeHandle,
    },
    /// It starts with a copy of what the worker brings along, which is made where that is.
    WorkerProvided(WorkerProvided),
}

/// A volume in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The volume.
    pub volume: VolumeHandle,
    /// Where it appears: absolute. Made when it is missing.
    pub path: Bytes,
    /// Whether writing fails.
    pub read_only: bool,
}

/// The root file system of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// The worker's own, read-only, with a layer for writes.
    Host,
    /// The directory `rootfs` of this volume, which is the container's own: it may write there.
    Volume(VolumeHandle),
    /// This volume, all of it, which is the container's own: it may write there.
    Whole(VolumeHandle),
}

/// What a container is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Whose it is.
    pub team: String,
    /// Its root file system.
    pub root: Root,
    /// Volumes in it, each at a path of its own. One whose path lies below another's appears inside of it.
    pub mounts: Vec<Mount>,
    /// Where its process starts: absolute. Made when it is `/workspace`, or when a mount lies at or below it; otherwise it must exist.
    pub directory: Bytes,
    /// Who runs in it: `name`, `uid`, `name:group`, `uid:gid`, looked up in the image. `None`: root. Comes to own the writable
    /// mounts and what is in them.
    pub user: Option<String>,
    /// What it may use at most.
    pub limits: Limits,
    /// Whether it may do what root on the worker may do.
    pub privileged: bool,
    /// Which network it sees.
    pub network: Network,
}

/// Everything that occupies a worker, half-made things included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Containers.
    pub containers: Vec<ContainerHandle>,
    /// Volumes.
    pub volumes: Vec<VolumeHandle>,
}

/// What a worker keeps with a volume, so that it can be known again by whoever lost all else about it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Notes {
    /// The volume that it is a copy-on-write child of, and needs.
    pub parent: Option<VolumeHandle>,
    /// The artifact whose bytes it holds, as was noted.
    pub artifact: Option<ArtifactId>,
}

/// The file system that holds a worker's volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Its size.
    pub total_bytes: u64,
    /// What is free for volumes.
    pub free_bytes: u64,
}

/// One worker, as its gateway reaches it.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// What it can do.
    fn capabilities(&self) -> &Capabilities;

    /// What identifies this life of what the worker holds. Made, durably, when it is missing.
    async fn marker(&self) -> Result<Marker, RuntimeError>;

    /// What is kept beside the marker of the artifact store that the volumes belong to. `None`: nothing, or nothing that makes sense.
    async fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError>;

    /// Keeps that, durably and for as long as the marker.
    async fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError>;

    /// The file system that holds the volumes. `None`: the worker does not say.
    async fn disk(&self) -> Result<Option<Disk>, RuntimeError>;

    /// Everything that occupies the worker.
    async fn list(&self) -> Result<Holdings, RuntimeError>;

    /// Makes a volume.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`] when the parent or the original does not exist, [`RuntimeError::Unsupported`] when nothing of the
    /// kind is brought along, [`RuntimeError::DiskFull`]. What is brought along and cannot be read leaves no volume.
    async fn create_volume(&self, handle: VolumeHandle, source: VolumeSource) -> Result<(), RuntimeError>;

    /// How the bytes of a volume are reached.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError>;

    /// Notes whose bytes a volume holds. It is kept with the volume; a crash of the machine may lose it.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn note_artifact(&self, handle: VolumeHandle, artifact: ArtifactId) -> Result<(), RuntimeError>;

    /// What is kept with a volume.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError>;

    /// Makes these directories (relative, with those above them) in a volume. What exists stays.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::DiskFull`].
    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError>;

    /// Makes the directory at `path` (relative) in the volume `from` the contents of the empty volume `into`. Nothing of `from` is in use
    /// any more. Done twice, the second time changes nothing.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`]; [`RuntimeError::OutputMissing`] when there is no directory at `path`, or a symbolic link
    /// leads to it; [`RuntimeError::Unsupported`] without the capability `replaceable-outputs`.
    async fn take_directory(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError>;

    /// Destroys a volume.
    ///
    /// Errors: [`RuntimeError::HasChildren`] as long as a copy-on-write child of it exists.
    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError>;

    /// How many volumes a sweep should give to [`Runtime::destroy_volumes`] at a time: several, where each call to the worker is a journey.
    fn destroyed_at_once(&self) -> usize {
        1
    }

    /// Destroys volumes, of which children stand before their parents. Answers those that are still there, and why.
    async fn destroy_volumes(&self, handles: &[VolumeHandle]) -> Vec<(VolumeHandle, RuntimeError)> {
        let mut left = Vec::new();
        for handle in handles {
            if let Err(error) = self.destroy_volume(*handle).await {
                left.push((*handle, error));
            }
        }
        left
    }

    /// Makes a container, in which nothing runs yet. Its volumes must exist.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::InvalidImage`], [`RuntimeError::UserNotFound`],
    /// [`RuntimeError::DirectoryMissing`], [`RuntimeError::InvalidMount`], [`RuntimeError::Unsupported`], [`RuntimeError::DiskFull`].
    async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError>;

    /// Destroys a container: kills everything in it, and returns when nothing of it is left.
    async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError>;

    /// Starts the process of a container. Returns when the intent is durable and the start is under way; how it went is told by
    /// [`Runtime::wait`]. Starting an id that exists does nothing and succeeds.
    ///
    /// Errors: [`RuntimeError::ContainerNotFound`].
    async fn start(
        &self,
        container: ContainerHandle,
        process: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError>;

    /// How far a process is.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`] when it was never asked for, or its container is gone.
    async fn process(&self, process: AttemptId) -> Result<ProcessState, RuntimeError>;

    /// Whose container a process is in.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn team(&self, process: AttemptId) -> Result<String, RuntimeError>;

    /// Waits until a process has ended, everything in its container is dead (with the capability `ends-whole`), and its output is complete.
    ///
    /// Cancel safe. Errors: [`RuntimeError::ProcessNotFound`].
    async fn wait(&self, process: AttemptId) -> Result<Ended, RuntimeError>;

    /// What a process that has ended has used, with everything in its container: how long it ran, processor time, memory. What the worker does
    /// not know is missing.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn usage(&self, process: AttemptId) -> Result<Usage, RuntimeError> {
        self.process(process).await.map(|_| Usage::default())
    }

    /// Asks a process to end: TERM, after `grace` KILL with everything in the container. A process that was not started yet never will
    /// be. Returns when the request is under way. A later call can only shorten the grace.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn stop(&self, process: AttemptId, grace: Duration) -> Result<(), RuntimeError>;

    /// Attaches to the output and input of a process, from these offsets on.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`], [`RuntimeError::OffsetOutOfRange`].
    async fn attach(&self, process: AttemptId, from: Offsets) -> Result<Attachment, RuntimeError>;

    /// Tells the worker that its gateway was in contact with the scheduler: processes may go on for `stop_after`, counted from `sent`,
    /// which is when the answered message was sent (by `CLOCK_BOOTTIME`).
    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError>;

    /// Another gateway speaks for the worker from now on. What is remembered of its processes is forgotten, for when this one speaks again
    /// they may have been read, stopped and destroyed by others; whoever waits for one is told so ([`RuntimeError::TakenOver`]). Nothing ends
    /// by it.
    async fn taken_over(&self) {}
}
