//! The interface between a gateway and the runtime of one worker.
//!
//! A runtime creates and destroys volumes and containers under handles that the gateway chooses. It
//! starts processes, and keeps their output and the record of their exit. A runtime makes no
//! decisions: the gateway decides what to create, and the artifact store decides what is garbage.
//!
//! Every implementation keeps these rules. The conformance suite in `shared/testing` checks them.
//!
//! - Creation under an existing handle changes nothing and succeeds. Destruction of a missing
//!   handle succeeds. So every step can be repeated after a crash.
//! - [`Runtime::list`] names everything that occupies the worker, including incomplete containers
//!   and volumes.
//! - A process is started at most once per id. The intent to start is durable before the start. An
//!   intent without proof of a start is reported as [`ProcessState::StartUnknown`], and the process
//!   is never started again.
//! - Processes and the record of their exit survive the gateway that started them. With the
//!   capability `durable-output`, so does their output.
//! - With the capability `ends-whole`, every other process in the container is dead before the exit
//!   of its main process is reported.
//!
//! Features that not every worker has are named in [`Capabilities`].

mod contents;
mod error;
mod process;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use domain::worker::{Marker, ResourceType, StoreMark};
use domain::workload::{Bytes, EnvironmentVariable, Limits, Network, Usage};
use domain::{ArtifactId, ContainerHandle, GatewayInstance, ProcessId, VolumeHandle};

pub use contents::{Archive, Contents, Inlet, Layer, RemoteVolume};
pub use error::RuntimeError;
pub use process::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessRole, ProcessSpec,
    ProcessState, TerminalSize,
};

/// The features and resources of a runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Kinds of image that the runtime can run, such as `host`.
    pub image_kinds: Vec<String>,
    /// Names of optional features: `privileged`, `network-private`, `stop-after`, `terminal`, and
    ///
    /// - `network-container`: a container can join the network of another one
    ///   ([`ContainerSpec::network_of`]);
    /// - `services`: a container can have further names of its own address
    ///   ([`ContainerSpec::local_names`]), and its ports can be checked
    ///   ([`Runtime::accepts_connections`]);
    /// - `exec`: a container may have several processes at a time;
    /// - `exec-ended`: a process can look into a container whose main process has ended;
    /// - `limits-memory`, `limits-cpu`, `limits-pids`, `limits-disk`: this limit of
    ///   [`ContainerSpec::limits`] applies to all processes of a container;
    /// - `replaceable-outputs`: the runtime has [`Runtime::take_directory`], so outputs need not be
    ///   mounts;
    /// - `users`: processes can run as any user; without it only as root of the container;
    /// - `owned-mounts`: the user of a container becomes the owner of its writable mounts;
    /// - `durable-output`: no output is lost while no gateway is attached;
    /// - `held-output`: a process is blocked rather than that unacknowledged output is lost;
    /// - `complete-output`: output that a process writes just before its exit is not lost;
    /// - `binary-input`: standard input may be any bytes; without it only UTF-8 text;
    /// - `signals`: every signal can be sent; without it only TERM and KILL;
    /// - `durable-input`: standard input continues at its offset when another gateway takes over;
    /// - `exit-signals`: an exit by a signal or for lack of memory is reported as such; without it
    ///   as an exit code above 128;
    /// - `ends-whole`: when the main process has exited, no other process of its container runs;
    ///   without it others may run until the container is destroyed;
    /// - `image-checks`: users, directories and mount points are checked when a container is
    ///   created; without it when its process is started;
    /// - `exact-environment`: the runtime adds only PATH and HOME to the environment.
    pub features: Vec<String>,
    /// Images and certificates that the worker provides, without duplicates.
    pub worker_provided: Vec<WorkerProvidedPath>,
    /// How copy-on-write children are made, as text for people: `overlay` or `copy`, with the
    /// reason.
    pub copy_on_write: String,
    /// CPU capacity for all containers, in thousandths of a processor. `None`: the worker does not
    /// report it.
    pub cpu_millis: Option<u64>,
    /// Memory capacity for all containers, in bytes. `None`: the worker does not report it.
    pub memory_bytes: Option<u64>,
}

impl Capabilities {
    /// The resource types whose images the worker provides.
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

/// Contents that a worker can provide from its own disk.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkerProvided {
    /// The image of the resource type of this name. The tree is the root file system of a
    /// container.
    ResourceType(String),
    /// The certificates that the worker trusts.
    Certs,
}

/// Contents that a worker provides. They do not change while the version and the path stay the
/// same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerProvidedPath {
    /// The kind of contents.
    pub what: WorkerProvided,
    /// The version, as text for people.
    pub version: String,
    /// The path on the worker.
    pub path: String,
}

/// Initial contents of a new volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeSource {
    /// No contents.
    Empty,
    /// The contents of `parent`. The parent must not be written to any more, and writes to the
    /// child never change it.
    CopyOnWrite {
        /// The parent volume.
        parent: VolumeHandle,
    },
    /// The contents of `parent`, as with [`VolumeSource::CopyOnWrite`]. Each hard link of `names`
    /// stays one file when it is written to under one of its names. A plain copy-on-write child
    /// could break such a link.
    CopyOnWriteLinked {
        /// The parent volume.
        parent: VolumeHandle,
        /// All names of the files that have several names, relative to the root, in the order of a
        /// manifest.
        names: Vec<PathBuf>,
    },
    /// A full copy of the present contents of `original`. No process may write to `original`
    /// meanwhile. The new volume depends on neither `original` nor its parents.
    Copy {
        /// The volume to copy.
        original: VolumeHandle,
    },
    /// A copy of contents that the worker provides. The copy is made on the worker.
    WorkerProvided(WorkerProvided),
}

/// A volume in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// The volume.
    pub volume: VolumeHandle,
    /// The absolute path in the container. A missing path is created.
    pub path: Bytes,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// The root file system of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// The file system of the worker, read-only, with a layer for writes.
    Host,
    /// The directory `rootfs` of this volume. The volume belongs to the container, which may write
    /// to it.
    Volume(VolumeHandle),
    /// The whole of this volume. The volume belongs to the container, which may write to it.
    WholeVolume(VolumeHandle),
}

/// The specification of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpec {
    /// The team that the container belongs to.
    pub team: String,
    /// The root file system.
    pub root: Root,
    /// The volumes, each at a different path. A mount below the path of another mount appears
    /// inside that mount.
    pub mounts: Vec<Mount>,
    /// The environment of every process in the container.
    pub environment: Vec<EnvironmentVariable>,
    /// The absolute working directory of the processes. A missing directory is created if it is
    /// `/workspace`, or if a mount lies at or below it. Otherwise the directory must exist.
    pub directory: Bytes,
    /// The user: `name`, `uid`, `name:group` or `uid:gid`, looked up in the image. `None`: root.
    /// The user becomes the owner of the writable mounts and their contents.
    pub user: Option<String>,
    /// Limits of the container.
    pub limits: Limits,
    /// Whether the container has the privileges of root on the worker.
    pub privileged: bool,
    /// The container whose network this container joins, with the capability `network-container`.
    /// `None`: the container has a network of its own.
    ///
    /// - The other container must exist, and have the same team and the same [`Self::network`]. Its
    ///   main process must run when that of this container starts.
    /// - Both have the same interfaces, addresses, ports, `localhost` and abstract sockets. Limits
    ///   of connections and of name queries apply to them together.
    /// - `/etc/hosts` and `/etc/resolv.conf` are copied from the other container when the main
    ///   process starts. The runtime adds the name of this container.
    /// - The network exists until the last process in it has ended, also if the other container has
    ///   ended or is destroyed. A later main process of the other container has a new network.
    /// - A process that looks into this container after its end has a network of its own.
    /// - Processes can send each other descriptors of open files. So the volumes of these
    ///   containers may change until the processes of all of them have ended.
    pub network_of: Option<ContainerHandle>,
    /// The network of the container.
    pub network: Network,
    /// Host names that stand for 127.0.0.1 in `/etc/hosts`, before all other lines. Only with the
    /// capability `services`.
    pub local_names: Vec<String>,
    /// The signal that asks the main process to end. `None`: TERM. Ignored without the capability
    /// `signals`.
    pub stop_signal: Option<u8>,
    /// Text of the gateway that is stored with the container. Empty: none.
    pub note: String,
}

/// A container with its processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerDescription {
    /// The team that the container belongs to.
    pub team: String,
    /// The text of [`ContainerSpec::note`].
    pub note: String,
    /// Its main process. `None`: none was started.
    pub main: Option<ProcessId>,
    /// All its other processes.
    pub others: Vec<ProcessId>,
}

/// The container of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessContainer {
    /// The container.
    pub handle: ContainerHandle,
    /// The team that it belongs to.
    pub team: String,
    /// Its main process.
    pub main: ProcessId,
}

/// The present resource usage of all processes in a container. Values that the worker does not know
/// are missing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CurrentUsage {
    /// Processor time since the start of the container. May decrease if the worker does not count
    /// processes that have ended.
    pub cpu_time: Option<Duration>,
    /// Memory that the kernel cannot reclaim, in bytes.
    pub memory_bytes: Option<u64>,
    /// Number of processes.
    pub processes: Option<u32>,
}

/// All containers and volumes on a worker, including incomplete ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holdings {
    /// The containers.
    pub containers: Vec<ContainerHandle>,
    /// The volumes.
    pub volumes: Vec<VolumeHandle>,
}

/// Facts that a worker stores with a volume. An artifact store that was restored from a backup
/// identifies the volume by them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Notes {
    /// The copy-on-write parent, which the volume needs.
    pub parent: Option<VolumeHandle>,
    /// The artifact whose bytes the volume holds, as stored by [`Runtime::note_artifact`].
    pub artifact: Option<ArtifactId>,
}

/// Capacity of the file system of a worker's volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Total size.
    pub total_bytes: u64,
    /// Space that is available to volumes.
    pub free_bytes: u64,
}

/// The interface to one worker.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The features and resources of the worker.
    fn capabilities(&self) -> &Capabilities;

    /// The marker of the worker's incarnation. If none exists, the runtime creates one durably.
    async fn marker(&self) -> Result<Marker, RuntimeError>;

    /// The mark of the artifact store that owns the volumes, which is stored with the marker.
    /// `None`: no mark is stored, or it cannot be parsed.
    async fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError>;

    /// Stores the mark of the artifact store durably, for the lifetime of the marker.
    async fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError>;

    /// The capacity of the file system of the volumes. `None`: the worker does not report it.
    async fn disk(&self) -> Result<Option<Disk>, RuntimeError>;

    /// Lists all containers and volumes on the worker.
    async fn list(&self) -> Result<Holdings, RuntimeError>;

    /// Creates a volume.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`] if the parent or the original does not exist.
    /// [`RuntimeError::Unsupported`] if the worker does not provide the contents.
    /// [`RuntimeError::DiskFull`]. If provided contents cannot be read, no volume remains.
    async fn create_volume(&self, handle: VolumeHandle, source: VolumeSource) -> Result<(), RuntimeError>;

    /// Returns access to the bytes of a volume.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError>;

    /// Returns the upper layer of a volume. `None`: the volume is not an overlay, or its layers are
    /// not on this machine.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn layer(&self, _handle: VolumeHandle) -> Result<Option<Layer>, RuntimeError> {
        Ok(None)
    }

    /// Stores with a volume which artifact it holds. A crash of the machine may lose this note.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn note_artifact(&self, handle: VolumeHandle, artifact: ArtifactId) -> Result<(), RuntimeError>;

    /// Returns the facts that are stored with a volume.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`].
    async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError>;

    /// Creates directories (relative paths) and their parents in a volume. Existing directories
    /// stay.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::DiskFull`].
    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError>;

    /// Moves the directory at `path` (relative) of the volume `from` into the empty volume `into`.
    /// No process may use `from` any more. A repeated call changes nothing.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`]. [`RuntimeError::OutputMissing`] if `path` is not a
    /// directory, or has a symbolic link in it. [`RuntimeError::Unsupported`] without the
    /// capability `replaceable-outputs`.
    async fn take_directory(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError>;

    /// Destroys a volume.
    ///
    /// Errors: [`RuntimeError::HasChildren`] while a copy-on-write child exists.
    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError>;

    /// Number of volumes that a sweep should pass to one call of [`Runtime::destroy_volumes`]. More
    /// than 1 if each call to the worker is a network round trip.
    fn destroy_batch_size(&self) -> usize {
        1
    }

    /// Destroys volumes. Children must precede their parents in `handles`. Returns the volumes that
    /// were not destroyed, with the error of each.
    async fn destroy_volumes(&self, handles: &[VolumeHandle]) -> Vec<(VolumeHandle, RuntimeError)> {
        let mut left = Vec::new();
        for handle in handles {
            if let Err(error) = self.destroy_volume(*handle).await {
                left.push((*handle, error));
            }
        }
        left
    }

    /// Creates a container without a process. Its volumes must exist.
    ///
    /// Errors: [`RuntimeError::VolumeNotFound`], [`RuntimeError::InvalidImage`],
    /// [`RuntimeError::UserNotFound`], [`RuntimeError::DirectoryMissing`],
    /// [`RuntimeError::InvalidMount`], [`RuntimeError::Unsupported`], [`RuntimeError::DiskFull`].
    /// [`RuntimeError::ContainerNotFound`] if the team has no container
    /// [`ContainerSpec::network_of`].
    async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError>;

    /// Describes a container that was created completely.
    ///
    /// Errors: [`RuntimeError::ContainerNotFound`].
    async fn describe_container(&self, handle: ContainerHandle)
    -> Result<ContainerDescription, RuntimeError>;

    /// Destroys a container. The runtime kills all its processes, and the call returns when nothing
    /// of the container is left.
    async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError>;

    /// Starts a process in a container. The call returns when the intent is durable and the start
    /// is in progress. [`Runtime::wait`] reports the result of the start. Starting an existing id
    /// does nothing and succeeds.
    ///
    /// A process that starts while another process of the container runs joins the namespaces and
    /// limits of the container. The first process is the main process: when it ends, all others
    /// end, unless the worker lacks the capability `ends-whole`.
    ///
    /// With the capability `exec-ended`, a process with [`ProcessRole::Exec`] may start after the
    /// end of the main process. It sees the files as the main process left them, and what it writes
    /// is discarded at its end.
    ///
    /// Errors: [`RuntimeError::ContainerNotFound`]. [`RuntimeError::ContainerNotRunning`], also for
    /// the container whose network is joined. [`RuntimeError::Unsupported`] for a further process
    /// without the capability `exec`.
    async fn start(
        &self,
        container: ContainerHandle,
        process: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError>;

    /// Returns the state of a process.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`] if [`Runtime::start`] was never called for it, or
    /// its container is destroyed.
    async fn process(&self, process: ProcessId) -> Result<ProcessState, RuntimeError>;

    /// Returns the container of a process, and its team.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn container_of(&self, process: ProcessId) -> Result<ProcessContainer, RuntimeError>;

    /// Waits until a process has exited and its output is complete. With the capability
    /// `ends-whole`, all other processes in its container are dead too.
    ///
    /// Cancel safe. Errors: [`RuntimeError::ProcessNotFound`].
    async fn wait(&self, process: ProcessId) -> Result<Ended, RuntimeError>;

    /// Returns the resource usage of an exited process and of all other processes in its container:
    /// run time, processor time, memory. Values that the worker does not know are missing.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn usage(&self, process: ProcessId) -> Result<Usage, RuntimeError> {
        self.process(process).await.map(|_| Usage::default())
    }

    /// Measures the present resource usage of these containers. Containers whose main process does
    /// not run are missing, and so are containers that the worker cannot measure.
    async fn current_usage(
        &self,
        _containers: &[ContainerHandle],
    ) -> Result<HashMap<ContainerHandle, CurrentUsage>, RuntimeError> {
        Ok(HashMap::new())
    }

    /// Stops a process: sends TERM, or to a main process [`ContainerSpec::stop_signal`], and after
    /// `grace` kills all processes in the container. A process that has not started yet will never
    /// start. The call returns when the stop is in progress. A later call can only shorten the
    /// grace period.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn stop(&self, process: ProcessId, grace: Duration) -> Result<(), RuntimeError>;

    /// Whether a TCP port at 127.0.0.1 accepts connections in the network of the container with
    /// this running main process.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`]. [`RuntimeError::Unsupported`] without the
    /// capability `services`.
    async fn accepts_connections(&self, main: ProcessId, port: u16) -> Result<bool, RuntimeError> {
        let what = format!("a check of port {port} of process {main}");
        Err(RuntimeError::Unsupported(what))
    }

    /// Attaches to the output and input of a process, starting at these offsets.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`], [`RuntimeError::OffsetOutOfRange`].
    async fn attach(&self, process: ProcessId, from: Offsets) -> Result<Attachment, RuntimeError>;

    /// Returns offsets at or below the first bytes that the process wrote at this time or later.
    /// They are exact to a second for recent output, and less exact for older output.
    ///
    /// Errors: [`RuntimeError::ProcessNotFound`].
    async fn offsets_at(&self, process: ProcessId, since: SystemTime) -> Result<Offsets, RuntimeError>;

    /// Records the gateway instance that is about to register this worker. Returns the instance
    /// that did so before, if it has certainly ended.
    ///
    /// Errors: [`RuntimeError::TakenOver`].
    async fn record_gateway(
        &self,
        _instance: GatewayInstance,
    ) -> Result<Option<GatewayInstance>, RuntimeError> {
        Ok(None)
    }

    /// Records a contact between the gateway and the scheduler. Processes may continue for
    /// `stop_after` from `sent` on. `sent` is the `CLOCK_BOOTTIME` at which the gateway sent the
    /// message that the scheduler answered.
    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError>;

    /// Discards the state of processes, because another gateway now speaks for the worker. That
    /// gateway may read, stop and destroy the processes before this gateway speaks for the worker
    /// again. Pending calls of [`Runtime::wait`] fail with [`RuntimeError::TakenOver`]. No process
    /// ends.
    async fn taken_over(&self) {}
}
