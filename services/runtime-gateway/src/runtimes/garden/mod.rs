//! The Garden runtime: an unmodified Concourse worker, reached through its Garden and Baggageclaim
//! servers.
//!
//! ```text
//! volume handle     a Baggageclaim volume of that handle, with the property `gantry.kind=volume`
//!                   <handle>.manifest beside it, once its manifest is stored
//! container handle  a Garden container of that handle, root `raw://<path of a volume>/rootfs`
//! process           the one process of its container, under the attempt's id
//! gantry-marker     a volume whose properties identify the incarnation, and the life of its
//! artifact store
//! ```
//!
//! All durable state is on the worker, as properties of containers and volumes ([`properties`]).
//! Another gateway of the same worker knows everything except the output that this gateway has
//! read. This output is spooled in the state directory of this gateway. Output that was written
//! without an attached gateway is reported as lost ([`process`]), and so is output that another
//! gateway has read ([`output_offsets`]).
//!
//! Invariants:
//!
//! - A container has at most one process in its lifetime. So an exit that the worker reports for
//!   the container is the exit of that process. A containerd worker answers every attachment with
//!   the exit of the process that ended last.
//! - `Run` is sent at most once per container, after the intent is a property of the container and
//!   of the volume of its root. After a lost answer the gateway attaches, and never sends another
//!   `Run`. If a worker loses its containers and keeps its volumes, the intent is still found, and
//!   the end of the process is unknown.
//! - A creation is never sent for an existing volume, because some workers would empty it.
//!
//! The protocol has limits, for which the runtime claims no capability:
//!
//! - A `Run` in transit cannot be cancelled when its gateway is replaced.
//! - Processes continue while the scheduler is out of reach, without a time limit.
//! - Other processes in a container may run until the container is destroyed.
//! - The boot id in the marker never changes, because the worker does not report its boots. Each
//!   process is queried separately.

mod bulk_info;
mod config;
mod containers;
mod errors;
mod lifecycle;
mod output_offsets;
mod process;
mod properties;
mod tar_util;
mod volume_bytes;
mod volumes;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use concourse::{baggageclaim, garden};
use domain::worker::{Marker, StoreMark};
use domain::{ArtifactId, ContainerHandle, ProcessId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerDescription, ContainerSpec, Contents, CurrentUsage, Disk, Ended,
    Holdings, Notes, Offsets, ProcessContainer, ProcessSpec, ProcessState, Runtime, RuntimeError,
    VolumeSource, WorkerProvided, WorkerProvidedPath,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::util::blocking::blocking;
use crate::util::keyed_locks::{Locks, lock};

use containers::ContainerProperties;
use process::Process;

pub use config::{AdvertisedType, GardenArgs, GardenWorker};

/// Configuration of a Concourse worker.
#[derive(Debug, Clone)]
pub struct GardenConfig {
    /// Address of the Garden server: a host and a port.
    pub garden: String,
    /// Address of the Baggageclaim server: a host and a port.
    pub baggageclaim: String,
    /// Directory for the output of processes. If it is lost, the output is lost.
    pub state_dir: PathBuf,
    /// Output per stream, in bytes, that is kept for a process without an expected reader.
    pub spool_bytes: u64,
    /// Environment variables that are added to every process and override its own.
    pub environment: Vec<(String, String)>,
    /// Directory of the worker with certificates. `None`: there is none.
    pub certs_path: Option<String>,
    /// Images that the worker provides.
    pub resource_types: Vec<ProvidedImage>,
    /// Whether workers may write to each other's volumes directly. They must reach each other, and
    /// no other machine may reach them.
    pub peer_to_peer: bool,
    /// Compression of archives. `None`: the best that the worker supports.
    pub encoding: Option<baggageclaim::Encoding>,
    /// Time for which a process may be unknown to the worker after a `Run` with a lost answer.
    pub start_patience: Duration,
    /// Time for which the worker may report a process as ended without its exit, before the exit
    /// counts as unknown.
    pub exit_patience: Duration,
    /// Time for which the creation of a container waits on a full worker.
    pub full_patience: Duration,
    /// Timeouts of the Garden client.
    pub settings: garden::Settings,
    /// Timeouts of the Baggageclaim client.
    pub timeouts: baggageclaim::Timeouts,
}

/// The image that a worker provides for a resource type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProvidedImage {
    /// The name of the resource type, such as `git`.
    pub name: String,
    /// The version of the image.
    pub version: String,
    /// The path on the worker: a directory, or a gzip'ed tar archive of one.
    pub path: String,
}

impl GardenConfig {
    /// The defaults for a worker at these addresses.
    pub fn new(
        garden: impl Into<String>,
        baggageclaim: impl Into<String>,
        state_dir: impl Into<PathBuf>,
    ) -> Self {
        let seconds = Duration::from_secs;
        Self {
            garden: garden.into(),
            baggageclaim: baggageclaim.into(),
            state_dir: state_dir.into(),
            spool_bytes: 32 << 20,
            environment: Vec::new(),
            certs_path: None,
            resource_types: Vec::new(),
            peer_to_peer: false,
            encoding: None,
            start_patience: seconds(20),
            exit_patience: seconds(30),
            full_patience: seconds(10),
            settings: garden::Settings { retry_for: seconds(30), ..garden::Settings::default() },
            timeouts: baggageclaim::Timeouts::default(),
        }
    }
}

/// The kind of Garden server, as far as the kinds differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    /// Ignores signals, reports the end of a process per container, and does not implement many
    /// calls.
    Containerd,
    /// Implements every call.
    Guardian,
    /// Has almost no isolation. A second creation replaces the first.
    Houdini,
}

/// The runtime of a Concourse worker.
pub struct GardenRuntime {
    worker: Arc<Worker>,
    capabilities: Capabilities,
    /// Stops the tasks that follow processes. The processes continue.
    _stop: DropGuard,
}

/// State that the operations share.
struct Worker {
    config: GardenConfig,
    garden: garden::Client,
    volumes: baggageclaim::Client,
    backend: Backend,
    encoding: baggageclaim::Encoding,
    /// Locks of volumes and containers.
    locks: Locks,
    /// Locks of processes. A task may take one while it holds the lock of a container. A shared
    /// table could cause a deadlock.
    looking: Locks,
    /// Properties of containers that were created or queried.
    containers: Mutex<HashMap<ContainerHandle, ContainerProperties>>,
    /// Processes that were started or queried.
    processes: Mutex<HashMap<ProcessId, Arc<Process>>>,
    /// The current term. It ends when another gateway takes over, and with it the validity of all
    /// state of processes.
    term: Mutex<CancellationToken>,
    /// Containers that existed before this gateway took the worker over.
    bulk_info: tokio::sync::Mutex<bulk_info::BulkInfo>,
    /// Volumes in creation, each with its parent. The worker does not list them yet.
    creating: Mutex<HashMap<VolumeHandle, Option<VolumeHandle>>>,
    /// Volumes that were created here, until a container uses them. They need no query.
    fresh: Mutex<HashMap<VolumeHandle, baggageclaim::Volume>>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl GardenRuntime {
    /// Connects to a worker, and detects its kind.
    ///
    /// Errors: the worker is unreachable, is not a Concourse worker, or does not support the
    /// configured encoding.
    pub async fn open(config: GardenConfig) -> Result<Arc<Self>, RuntimeError> {
        let garden = garden::Client::new(&config.garden, config.settings.clone());
        let volumes = baggageclaim::Client::new(&config.baggageclaim, config.timeouts);
        // Only guardian reports its capacity. houdini reports zeros.
        let backend = match garden.capacity().await {
            Err(garden::Error::NotImplemented) => Backend::Containerd,
            Ok(capacity) if capacity == garden::Capacity::default() => Backend::Houdini,
            Ok(_) => Backend::Guardian,
            Err(error) => return Err(errors::garden("report its capacity", error)),
        };
        volumes::make_marker(&volumes).await?;
        let encoding = volumes::encoding(&volumes, config.encoding).await?;
        let (stopping, capabilities) = (CancellationToken::new(), capabilities(backend, &config));
        let worker = Worker {
            config,
            garden,
            volumes,
            backend,
            encoding,
            locks: Locks::new(),
            looking: Locks::new(),
            containers: Mutex::default(),
            processes: Mutex::default(),
            term: Mutex::default(),
            bulk_info: tokio::sync::Mutex::default(),
            creating: Mutex::default(),
            fresh: Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: stopping.clone(),
        };
        Ok(Arc::new(Self { worker: Arc::new(worker), capabilities, _stop: stopping.drop_guard() }))
    }
}

/// Capabilities of a kind of worker. `limits-cpu` is missing, because Garden's CPU limit is a share
/// and not a limit. `binary-input` and `signals` are missing, because the protocol has only text
/// input and two signals. `network-container` is missing, because Garden gives each container a
/// network.
fn capabilities(backend: Backend, config: &GardenConfig) -> Capabilities {
    let mut features = vec!["terminal"];
    if backend == Backend::Houdini {
        features.push("network-host");
    } else {
        features.extend([
            "network-private",
            "privileged",
            "complete-output",
            "limits-memory",
            "limits-pids",
            "exec",
        ]);
    }
    if config.peer_to_peer {
        features.push("peer-to-peer");
    }
    let mut image_kinds = vec!["artifact"];
    if !config.resource_types.is_empty() {
        image_kinds.push("resource-type");
    }
    let image = |known: &ProvidedImage| WorkerProvidedPath {
        what: WorkerProvided::ResourceType(known.name.clone()),
        version: known.version.clone(),
        path: known.path.clone(),
    };
    let certs = |path: &String| WorkerProvidedPath {
        what: WorkerProvided::Certs,
        version: String::new(),
        path: path.clone(),
    };
    Capabilities {
        image_kinds: image_kinds.into_iter().map(str::to_owned).collect(),
        features: features.into_iter().map(str::to_owned).collect(),
        worker_provided: config
            .resource_types
            .iter()
            .map(image)
            .chain(config.certs_path.iter().map(certs))
            .collect(),
        copy_on_write: "by the worker's Baggageclaim".to_owned(),
        cpu_millis: None,
        memory_bytes: None,
    }
}

#[async_trait]
impl Runtime for GardenRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn marker(&self) -> Result<Marker, RuntimeError> {
        let id = volumes::make_marker(&self.worker.volumes).await?;
        Ok(Marker { id, boot: format!("garden/{id}") })
    }

    async fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError> {
        volumes::store_mark(&self.worker.volumes).await
    }

    async fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError> {
        volumes::set_store_mark(&self.worker.volumes, mark).await
    }

    async fn disk(&self) -> Result<Option<Disk>, RuntimeError> {
        Ok(None)
    }

    async fn list(&self) -> Result<Holdings, RuntimeError> {
        let (containers, volumes) =
            tokio::try_join!(self.worker.list_containers(), self.worker.list_volumes())?;
        Ok(Holdings { containers, volumes })
    }

    async fn create_volume(&self, handle: VolumeHandle, source: VolumeSource) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        self.worker.create_volume(handle, source).await
    }

    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError> {
        self.worker.volume(handle).await?;
        Ok(Contents::Remote(Arc::new(volume_bytes::Volume::new(Arc::clone(&self.worker), handle))))
    }

    async fn note_artifact(&self, handle: VolumeHandle, artifact: ArtifactId) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        self.worker.note_artifact(handle, artifact).await
    }

    async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError> {
        self.worker.notes(handle).await
    }

    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        self.worker.make_directories(handle, directories).await
    }

    async fn take_directory(
        &self,
        _from: VolumeHandle,
        _path: &Path,
        _into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        Err(RuntimeError::Unsupported("a Garden worker cannot move directories between volumes".to_owned()))
    }

    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        match self.worker.destroy_volumes(&[handle]).await.pop() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    fn destroy_batch_size(&self) -> usize {
        volumes::DESTROYED_AT_ONCE
    }

    async fn destroy_volumes(&self, handles: &[VolumeHandle]) -> Vec<(VolumeHandle, RuntimeError)> {
        // Operations on each volume end first. Locking all volumes at once would block all other
        // operations.
        for handle in handles {
            drop(self.worker.locks.lock(handle.uuid()).await);
        }
        self.worker.destroy_volumes(handles).await
    }

    async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        self.worker.create_container(handle, spec).await
    }

    async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        self.worker.destroy_container(handle).await
    }

    async fn start(
        &self,
        container: ContainerHandle,
        process: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(container.uuid()).await;
        self.worker.start(container, process, spec).await
    }

    async fn current_usage(
        &self,
        containers: &[ContainerHandle],
    ) -> Result<HashMap<ContainerHandle, CurrentUsage>, RuntimeError> {
        self.worker.current_usage(containers).await
    }

    async fn process(&self, process: ProcessId) -> Result<ProcessState, RuntimeError> {
        self.worker.find(process).await?.state()
    }

    async fn describe_container(
        &self,
        handle: ContainerHandle,
    ) -> Result<ContainerDescription, RuntimeError> {
        self.worker.describe_container(handle).await
    }

    async fn container_of(&self, process: ProcessId) -> Result<ProcessContainer, RuntimeError> {
        let process = self.worker.find(process).await?;
        let handle = process.container;
        let main = if process.is_further { self.worker.main_of(handle).await? } else { None };
        Ok(ProcessContainer { handle, team: process.team.clone(), main: main.unwrap_or(process.id) })
    }

    async fn wait(&self, process: ProcessId) -> Result<Ended, RuntimeError> {
        self.worker.find(process).await?.wait().await
    }

    async fn stop(&self, process: ProcessId, grace: Duration) -> Result<(), RuntimeError> {
        let found = self.worker.find(process).await?;
        self.worker.stop(&found, grace).await
    }

    async fn attach(&self, process: ProcessId, from: Offsets) -> Result<Attachment, RuntimeError> {
        let found = self.worker.find(process).await?;
        process::attach(&self.worker, found, from)
    }

    async fn offsets_at(&self, process: ProcessId, since: SystemTime) -> Result<Offsets, RuntimeError> {
        let spools = self.worker.find(process).await?.spools.clone();
        let [stdout, stderr] = spools.map(|spool| move || spool.offset_at(since));
        let offsets = move || Ok(Offsets { stdout: stdout()?, stderr: stderr()? });
        blocking(move || offsets().map_err(|error| RuntimeError::io("read a spool", error))).await
    }

    /// A Garden server does not enforce contact.
    async fn contact(&self, _sent: Duration, _stop_after: Duration) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Stops all tasks that follow processes. Another attachment would take the output from the
    /// gateway that reads it now.
    async fn taken_over(&self) {
        std::mem::take(&mut *lock(&self.worker.term)).cancel();
        lock(&self.worker.containers).clear();
        lock(&self.worker.processes).clear();
        lock(&self.worker.fresh).clear();
    }
}

impl Worker {
    /// Returns the process of this id, if it is in memory.
    fn cached_process(&self, id: ProcessId) -> Option<Arc<Process>> {
        // A process may be added just after the table was cleared.
        lock(&self.processes).get(&id).filter(|process| !process.term.is_cancelled()).cloned()
    }

    /// The term in which the present state of processes is valid.
    fn term(&self) -> CancellationToken {
        lock(&self.term).clone()
    }
}
