//! The Garden runtime: a Concourse worker, unmodified, reached through its Garden and Baggageclaim servers.
//!
//! ```text
//! volume handle     a Baggageclaim volume of that handle, with the mark `gantry.kind=volume`
//!                   <handle>.manifest beside it, once its manifest is kept
//! container handle  a Garden container of that handle, root `raw://<path of a volume>/rootfs`
//! process           the one process of its container, under the attempt's id
//! gantry-marker     a volume whose properties identify this life of what the worker holds, and that of its artifact store
//! ```
//!
//! What is durable is on the worker, as properties of containers and volumes ([`properties`]): another gateway that is given the same worker
//! knows everything that this one knew, but the output that this one had read. That is spooled in this gateway's state directory, and what
//! was written while no gateway was attached is told as gone ([`process`]), as is what another gateway has read ([`output_offsets`]).
//!
//! Invariants:
//!
//! - A container has at most one process ever. So an exit that the worker tells of it is that process's: a containerd worker answers an
//!   attachment with the exit of whichever process of the container ended last, whatever was asked for.
//! - `Run` is sent at most once per container, after the intent is a property of the container and of the volume of its root. An answer
//!   that was lost is followed by attachments, never by another `Run`. Should a worker lose its containers and keep its volumes, the
//!   intent is still found, and the process's end is unknown.
//! - A creation is never sent over what exists: on some workers that would empty it.
//!
//! What the protocol does not give, and no capability promises: a `Run` that is on its way when its gateway is given up cannot be called
//! back; processes go on however long the scheduler is out of reach; what a process leaves behind in its container may live until the
//! container is destroyed. The boot in the marker never changes: the worker does not tell its boots apart, and each process is asked
//! for by itself.

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
use std::time::Duration;

use async_trait::async_trait;
use concourse::{baggageclaim, garden};
use domain::worker::{Marker, StoreMark};
use domain::{ArtifactId, AttemptId, ContainerHandle, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerSpec, Contents, Disk, Ended, Holdings, Notes, Offsets, ProcessSpec,
    ProcessState, Runtime, RuntimeError, VolumeSource, WorkerProvided, WorkerProvidedPath,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::util::keyed_locks::{Locks, lock};

use containers::Made;
use process::Process;

pub use config::{AdvertisedType, GardenArgs, GardenWorker};

/// A Concourse worker, and how patient its gateway is.
#[derive(Debug, Clone)]
pub struct GardenConfig {
    /// Where its Garden server listens: a host and a port.
    pub garden: String,
    /// Where its Baggageclaim server listens: a host and a port.
    pub baggageclaim: String,
    /// Where output of processes is kept. It may be lost: then so is the output.
    pub state_dir: PathBuf,
    /// How much output of each stream is kept, where nobody is meant to read it.
    pub spool_bytes: u64,
    /// What every process gets in its environment, over what it was given.
    pub environment: Vec<(String, String)>,
    /// A directory on the worker with certificates. `None`: none.
    pub certs_path: Option<String>,
    /// Images that the worker brings along.
    pub resource_types: Vec<BroughtImage>,
    /// Whether workers may fill each other's volumes, past their gateways: they reach one another, and nobody else reaches them.
    pub peer_to_peer: bool,
    /// How archives travel. `None`: the best that the worker knows.
    pub encoding: Option<baggageclaim::Encoding>,
    /// How long a process may be unknown to the worker after a `Run` whose answer was lost.
    pub start_patience: Duration,
    /// How long the worker may know that a process has ended, and not how, before that counts as unknown.
    pub exit_patience: Duration,
    /// How long a container waits for room on a worker that has as many as it takes.
    pub full_patience: Duration,
    /// Of the Garden client.
    pub settings: garden::Settings,
    /// Of the Baggageclaim client.
    pub timeouts: baggageclaim::Timeouts,
}

/// The image that a worker brings along for a resource type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BroughtImage {
    /// Of the resource type, such as `git`.
    pub name: String,
    /// Of the image.
    pub version: String,
    /// Where on the worker it is: a directory, or a gzip'ed tar archive of one.
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

/// What kind of Garden server it is, as far as it makes a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend {
    /// Signals reach nothing, a process's end is known by the container, and much is not implemented.
    Containerd,
    /// Everything is there.
    Guardian,
    /// Containers are hardly more than directories, and a second creation replaces the first.
    Houdini,
}

/// A Concourse worker.
pub struct GardenRuntime {
    worker: Arc<Worker>,
    capabilities: Capabilities,
    /// Ends what follows processes. They go on.
    _stop: DropGuard,
}

/// What its operations share.
struct Worker {
    config: GardenConfig,
    garden: garden::Client,
    volumes: baggageclaim::Client,
    backend: Backend,
    encoding: baggageclaim::Encoding,
    /// Of volumes and containers.
    locks: Locks,
    /// Of processes, taken by who may hold that of a container: in one table the two might be one.
    looking: Locks,
    /// Containers that were made, or asked about, and what is needed of them.
    containers: Mutex<HashMap<ContainerHandle, Made>>,
    /// Processes that were started, or asked about.
    processes: Mutex<HashMap<AttemptId, Arc<Process>>>,
    /// Ends when another gateway takes over, and with it all that is known of processes until then.
    term: Mutex<CancellationToken>,
    /// What was there when this gateway took the worker on.
    found: tokio::sync::Mutex<bulk_info::Found>,
    /// Volumes that are being made, each with its parent: the worker does not list them yet.
    creating: Mutex<HashMap<VolumeHandle, Option<VolumeHandle>>>,
    /// Volumes that were made here, as the worker told of them then, until a container is made with them: it is not asked again.
    fresh: Mutex<HashMap<VolumeHandle, baggageclaim::Volume>>,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl GardenRuntime {
    /// Reaches a worker, and learns what kind it is.
    ///
    /// Errors: it cannot be reached, is none, or does not know the encoding that was chosen.
    pub async fn open(config: GardenConfig) -> Result<Arc<Self>, RuntimeError> {
        let garden = garden::Client::new(&config.garden, config.settings.clone());
        let volumes = baggageclaim::Client::new(&config.baggageclaim, config.timeouts);
        // Guardian alone knows what it has; houdini says that it has nothing.
        let backend = match garden.capacity().await {
            Err(garden::Error::NotImplemented) => Backend::Containerd,
            Ok(capacity) if capacity == garden::Capacity::default() => Backend::Houdini,
            Ok(_) => Backend::Guardian,
            Err(error) => return Err(errors::garden("ask what the worker has", error)),
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
            found: tokio::sync::Mutex::default(),
            creating: Mutex::default(),
            fresh: Mutex::default(),
            tasks: TaskTracker::new(),
            stopping: stopping.clone(),
        };
        Ok(Arc::new(Self { worker: Arc::new(worker), capabilities, _stop: stopping.drop_guard() }))
    }
}

/// What holds for every worker of a kind. `limits-cpu` stays away: what Garden takes for processors is a share and no limit. So do
/// `binary-input` and `signals`: input is text on its wire, and of signals it knows two.
fn capabilities(backend: Backend, config: &GardenConfig) -> Capabilities {
    let mut features = vec!["terminal"];
    if backend == Backend::Houdini {
        features.push("network-host");
    } else {
        features.extend(["network-private", "privileged", "complete-output", "limits-memory", "limits-pids"]);
    }
    if config.peer_to_peer {
        features.push("peer-to-peer");
    }
    let mut image_kinds = vec!["artifact"];
    if !config.resource_types.is_empty() {
        image_kinds.push("resource-type");
    }
    let image = |known: &BroughtImage| WorkerProvidedPath {
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
        Err(RuntimeError::Unsupported("its volumes cannot be taken apart".to_owned()))
    }

    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(handle.uuid()).await;
        match self.worker.destroy_volumes(&[handle]).await.pop() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    fn destroyed_at_once(&self) -> usize {
        volumes::DESTROYED_AT_ONCE
    }

    async fn destroy_volumes(&self, handles: &[VolumeHandle]) -> Vec<(VolumeHandle, RuntimeError)> {
        // What is under way with one of them ends first. To hold so many turns would hold up everything else.
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
        process: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        let _turn = self.worker.locks.lock(container.uuid()).await;
        self.worker.start(container, process, spec).await
    }

    async fn process(&self, process: AttemptId) -> Result<ProcessState, RuntimeError> {
        self.worker.find(process).await?.state()
    }

    async fn team(&self, process: AttemptId) -> Result<String, RuntimeError> {
        Ok(self.worker.find(process).await?.team.clone())
    }

    async fn wait(&self, process: AttemptId) -> Result<Ended, RuntimeError> {
        self.worker.find(process).await?.wait().await
    }

    async fn stop(&self, process: AttemptId, grace: Duration) -> Result<(), RuntimeError> {
        let found = self.worker.find(process).await?;
        self.worker.stop(&found, grace).await
    }

    async fn attach(&self, process: AttemptId, from: Offsets) -> Result<Attachment, RuntimeError> {
        let found = self.worker.find(process).await?;
        process::attach(&self.worker, found, from)
    }

    /// A Garden server enforces nothing.
    async fn contact(&self, _sent: Duration, _stop_after: Duration) -> Result<(), RuntimeError> {
        Ok(())
    }

    /// Whoever follows processes lets go of them: to attach again would take their output from the gateway that reads it now.
    async fn taken_over(&self) {
        std::mem::take(&mut *lock(&self.worker.term)).cancel();
        lock(&self.worker.containers).clear();
        lock(&self.worker.processes).clear();
        lock(&self.worker.fresh).clear();
    }
}

impl Worker {
    /// The process of this id, if it is known already.
    fn known(&self, id: AttemptId) -> Option<Arc<Process>> {
        // One may come into the table just after it was cleared.
        lock(&self.processes).get(&id).filter(|process| !process.term.is_cancelled()).cloned()
    }

    /// Until when what is learned of processes holds.
    fn term(&self) -> CancellationToken {
        lock(&self.term).clone()
    }
}
