//! The host runtime: real containers on this machine.
//!
//! Everything is kept below one state directory, which one runtime at a time may hold:
//!
//! ```text
//! lock  marker  store-mark
//! volumes/<handle>/contents            what is in it, or where it is mounted
//!                 /upper work parent   a copy-on-write child
//!                 /taken               its contents were a directory of another
//!                 /artifact            whose bytes it holds
//! containers/<handle>/container.json   what it is
//!                    /upper work       what it wrote to its root
//!                    /run              where its supervisor mounts
//!                    /processes/<id>/  alive  intent → started, or revoked  stdout  stderr  end  log
//! ```
//!
//! Who does what: this process makes and destroys directories, mounts volumes, and writes intents. A [`supervisor`] per
//! process does everything with the container itself, and outlives this process. They meet in the files above and over
//! [`control`].
//!
//! Supervisors are children of this process until it ends. A service manager that kills the whole group of a service would take
//! them along, and has to be told to stop only this process.
//!
//! Invariants:
//!
//! - Whatever is being made has a name that starts with a dot until it is complete.
//! - A process is started only by whoever renames its intent, and an intent is written once.
//! - What a container sees is mounted in namespaces that end with it. Only volumes are mounted where the machine sees them.
//! - A volume with several layers has one writable mount at a time: the machine's, or that of a container with a [`user_namespace`].

mod cgroups;
mod containers;
mod devices;
mod disk_guard;
mod filesystem;
mod host_image;
mod memory_guard;
mod mounts;
mod network;
mod paths;
mod persisted;
mod policy;
mod processes;
mod state_lock;
mod supervisor;
mod supervisor_protocol;
mod tree_copy;
mod user_namespace;
mod users;
mod volumes;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use domain::chain;
use domain::worker::{Marker, StoreMark};
use domain::workload::{Limits, Usage};
use domain::{ArtifactId, AttemptId, ContainerHandle, MarkerId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerSpec, Contents, Disk, Ended, Holdings, Notes, Offsets, ProcessSpec,
    ProcessState, Runtime, RuntimeError, VolumeSource,
};
use rustix::fs::{Mode, OFlags};

use crate::util::blocking::blocking;
use crate::util::keyed_locks::{Locks, held};

use cgroups::Cgroups;
use filesystem::at;
pub use network::{InvalidPool, Pool};
use persisted::Container;
pub use policy::{Permission, Policy};
use processes::Status;
use state_lock::Hold;
use supervisor_protocol::Sockets;
use user_namespace::Range;
use volumes::Volumes;

/// How long a process may go on before the first contact, and by default.
const STOP_AFTER: Duration = Duration::from_secs(600);
/// Pause between two looks whether the packet filter is there.
const FILTER_LOOK: Duration = Duration::from_secs(2);
/// How often is looked whether somebody has taken the state directory over.
const LOOK: Duration = Duration::from_millis(200);
/// Pause before names are served again after a failure.
const NAMES_PAUSE: Duration = Duration::from_secs(5);
const ALL_LIMITS: Limits = Limits { cpu_millis: Some(1), memory_bytes: Some(1), pids: Some(1) };

/// Where the host runtime keeps things, and how it starts supervisors.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Where everything is kept. Absolute, UTF-8, and on a file system that may hold the upper layer of an overlay.
    pub state_dir: PathBuf,
    /// Where short-lived sockets are. Absolute, UTF-8.
    pub runtime_dir: PathBuf,
    /// The program whose `main` calls [`supervise_if_asked`] first.
    pub supervisor: PathBuf,
    /// How much output of each stream is kept.
    pub spool_bytes: u64,
    /// Absolute paths that no container may see, beside the directories above.
    pub masked: Vec<PathBuf>,
    /// What workloads may ask of this machine.
    pub policy: Policy,
}

impl HostConfig {
    /// The defaults: this program is the supervisor, and 32 MiB of each output are kept.
    ///
    /// Errors: the path of this program is unknown.
    pub fn new(state_dir: impl Into<PathBuf>, runtime_dir: impl Into<PathBuf>) -> std::io::Result<Self> {
        Ok(Self {
            state_dir: state_dir.into(),
            runtime_dir: runtime_dir.into(),
            supervisor: std::env::current_exe()?,
            spool_bytes: 32 << 20,
            masked: Vec::new(),
            policy: Policy::default(),
        })
    }

    /// The name of the worker that this state directory is: `given`, or else the one that it was first given, which is the host name then. A
    /// host name may change while what the worker holds stays the same.
    ///
    /// Errors: the state directory cannot be read or written.
    pub fn worker_name(&self, given: Option<String>) -> std::io::Result<String> {
        if let Some(given) = given {
            return Ok(given);
        }
        let path = self.state_dir.join("worker-name");
        match fs::read_to_string(&path) {
            Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
            // What a crash of the machine left of it.
            Ok(_) => fs::remove_file(&path)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        crate::make_private_directory(&self.state_dir)?;
        let temporary = self.state_dir.join(format!("worker-name.{}", std::process::id()));
        fs::write(&temporary, &name)?;
        // Of several that start at once one is first, and the others take its word.
        let first = fs::hard_link(&temporary, &path);
        fs::remove_file(&temporary)?;
        match first {
            Ok(()) => Ok(name),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Ok(fs::read_to_string(&path)?.trim().to_owned())
            }
            Err(error) => Err(error),
        }
    }
}

/// Runs a supervisor if that is what the arguments of this program ask for, and returns with which code to exit then.
///
/// Every binary that may be [`HostConfig::supervisor`] calls this first in `main`, before any other thread or runtime exists:
/// containers must not be made by a process with several threads.
#[must_use]
pub fn supervise_if_asked(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    supervisor::supervise_if_asked(arguments)
}

/// This machine as a worker.
#[derive(Debug)]
pub struct HostRuntime {
    host: Arc<Host>,
    capabilities: Capabilities,
}

/// What its operations share.
#[derive(Debug)]
struct Host {
    config: HostConfig,
    hold: Hold,
    boot: String,
    marker: MarkerId,
    volumes: Volumes,
    cgroups: Cgroups,
    sockets: Sockets,
    /// Whether writes to the root of a container are kept in memory.
    upper_in_memory: bool,
    /// The addresses of containers with a private network. `None`: there are no private networks here.
    network_pool: Option<Pool>,
    locks: Locks,
    /// The container of each process.
    processes: Mutex<HashMap<AttemptId, ContainerHandle>>,
    /// Volumes that a container writes to out of the machine's sight, with the process that does or did.
    written: Mutex<HashMap<VolumeHandle, AttemptId>>,
    /// Held by who writes down the end of a process that lost its supervisor.
    settling: Mutex<()>,
    /// The last contact, by `CLOCK_BOOTTIME`, and how long processes may go on from then.
    contact: Mutex<Option<(Duration, Duration)>>,
}

impl HostRuntime {
    /// Opens a state directory, with whatever is in it and runs in it, and removes what a crash left half-made.
    ///
    /// Blocks on the disk. Errors: another runtime holds the directory, or the machine cannot run containers at all.
    pub fn open(config: HostConfig) -> Result<Arc<Self>, RuntimeError> {
        let held = RuntimeError::Other(format!("another runtime holds {}", config.state_dir.display()));
        Self::open_if_free(config)?.ok_or(held)
    }

    /// The same. `None`: another runtime holds the directory, and nothing in it was touched.
    pub fn open_if_free(config: HostConfig) -> Result<Option<Arc<Self>>, RuntimeError> {
        let config = prepared(config)?;
        let Some(hold) = Hold::take(&config.state_dir)? else { return Ok(None) };
        Self::opened(Host::open(config, hold)?).map(Some)
    }

    /// The same, though another runtime may hold the directory, which does nothing from then on: what it was about to start is not
    /// started. Only for who has a session of this worker that is newer than that of the other.
    pub fn take_over(config: HostConfig) -> Result<Arc<Self>, RuntimeError> {
        let config = prepared(config)?;
        let hold = Hold::take_over(&config.state_dir)?;
        let host = Host::open(config, hold)?;
        host.revoke_unstarted()?;
        Self::opened(host)
    }

    /// What the worker of a state directory that another runtime may hold is like. Touches nothing of it. `None`: there is none yet.
    pub fn look(config: HostConfig) -> Result<Option<Look>, RuntimeError> {
        let config = prepared(config)?;
        let Some(marker) = find_marker(&config.state_dir)? else { return Ok(None) };
        let mounted = mounts::mounted().map_err(|error| RuntimeError::io("list what is mounted", error))?;
        Ok(Some(Look {
            marker: Marker { id: marker, boot: boot()? },
            disk: disk(&config.state_dir)?,
            capabilities: capabilities(
                &config.policy,
                private_network(&config.policy),
                &Cgroups::find(&mounted),
                String::new(),
            ),
        }))
    }

    /// Resolves when another gateway has taken the directory over. Then this one does nothing any more.
    pub async fn superseded(&self) {
        loop {
            let host = Arc::clone(&self.host);
            match blocking(move || host.hold.is_ours()).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "cannot see who holds the state directory"),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Does what running containers need of this process. Ends only by being dropped.
    pub async fn look_after_containers(self: Arc<Self>) {
        tokio::join!(
            self.clone().serve_names(),
            self.clone().keep_filter(),
            self.clone().guard_memory(),
            self.guard_disk()
        );
    }

    /// Makes the packet filter of private networks again when another program has removed it. Ends only by being dropped.
    async fn keep_filter(self: Arc<Self>) {
        let mut known = network::uplinks();
        while let Some(pool) = self.host.network_pool {
            let looked = blocking(move || {
                let kept = network::keep_filter(pool, &mut known);
                Ok::<_, RuntimeError>((kept, known))
            });
            match looked.await {
                Ok((kept, now)) => {
                    known = now;
                    if let Err(error) = kept {
                        tracing::warn!(%error, "cannot look after the packet filter of private networks");
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "cannot look after the packet filter of private networks"
                    );
                    known = network::uplinks();
                }
            }
            tokio::time::sleep(FILTER_LOOK).await;
        }
    }

    /// Answers questions for names of containers with a private network. Ends only by being dropped.
    async fn serve_names(self: Arc<Self>) {
        while let Some(pool) = self.host.network_pool {
            if let Err(error) = network::resolver::serve(pool).await {
                tracing::warn!(%error, "cannot answer questions for names of containers; trying again");
            }
            tokio::time::sleep(NAMES_PAUSE).await;
        }
    }

    fn opened(host: Host) -> Result<Arc<Self>, RuntimeError> {
        if let Some(missing) = host.cgroups.missing(&ALL_LIMITS) {
            tracing::warn!(missing, "containers cannot be limited in everything");
        }
        for (limit, value) in server::inherited::limits_out_of_reach() {
            tracing::warn!(
                limit,
                value,
                "processes of containers have a lower limit than usual: this process has it and may not raise it"
            );
        }
        let mut capabilities =
            capabilities(&host.config.policy, host.network_pool, &host.cgroups, host.volumes.copy_on_write());
        match host.volumes.owners_fixed() {
            None => capabilities.features.push("user-namespace".to_owned()),
            Some(why) => {
                tracing::warn!(why, "no user namespaces: root of a container is root of this machine")
            }
        }
        Ok(Arc::new(Self { host: Arc::new(host), capabilities }))
    }
}

impl HostRuntime {
    /// Unmounts the volumes that no running container uses, as is fit before this machine is left alone: for a program that
    /// ends for good, and for one whose state directory is to be removed. They are mounted again when they are asked for.
    ///
    /// Directories that were told before are no longer valid. Blocks on the disk.
    pub fn unmount_idle(&self) -> Result<(), RuntimeError> {
        self.host.unmount_idle()
    }

    /// Kills everything in containers and unmounts all volumes, without a look at the state directory: for a program that has lost it.
    ///
    /// Blocks on the kernel. What cannot be killed is logged.
    pub fn abandon(&self) {
        self.host.abandon();
    }
}

/// What a worker is like, to who does not attend it.
#[derive(Debug, Clone)]
pub struct Look {
    /// What identifies this life of it.
    pub marker: Marker,
    /// Its disk.
    pub disk: Disk,
    /// What it can do. How copies are made is known only to who attends it.
    pub capabilities: Capabilities,
}

/// Makes the machine ready for private networks. `None`, with the reason in the log: it cannot have any.
fn private_network(policy: &Policy) -> Option<Pool> {
    let pool = policy.network_pool();
    match network::prepare(pool) {
        Ok(()) => Some(pool),
        Err(error) => {
            tracing::warn!(
                error = chain(&error),
                "containers get no private network: workloads that ask for one are not placed here"
            );
            None
        }
    }
}

fn capabilities(
    policy: &Policy,
    network_pool: Option<Pool>,
    cgroups: &Cgroups,
    copy_on_write: String,
) -> Capabilities {
    let mut features = vec![
        "network-none",
        "stop-after",
        "replaceable-outputs",
        "owned-mounts",
        "durable-output",
        "durable-input",
        "binary-input",
        "signals",
        "held-output",
        "complete-output",
        "exit-signals",
        "ends-whole",
        "image-checks",
        "exact-environment",
    ];
    let optional = [
        ("network-private", network_pool.is_some()),
        ("network-host", policy.allows(Permission::HostNetwork)),
        ("privileged", policy.allows(Permission::Privileged)),
    ];
    features.extend(optional.into_iter().filter(|(_, has)| *has).map(|(name, _)| name));
    let mut image_kinds = vec!["artifact".to_owned()];
    if policy.allows(Permission::HostImage) {
        image_kinds.push("host".to_owned());
    }
    let none = Limits::default();
    let limits = [
        ("limits-memory", Limits { memory_bytes: ALL_LIMITS.memory_bytes, ..none }),
        ("limits-cpu", Limits { cpu_millis: ALL_LIMITS.cpu_millis, ..none }),
        ("limits-pids", Limits { pids: ALL_LIMITS.pids, ..none }),
    ];
    features
        .extend(limits.iter().filter(|(_, limit)| cgroups.missing(limit).is_none()).map(|(name, _)| *name));
    Capabilities {
        image_kinds,
        features: features.into_iter().map(str::to_owned).collect(),
        brought: Vec::new(),
        copy_on_write,
        cpu_millis: cgroups.cpu_millis(),
        memory_bytes: cgroups.memory_bytes(),
    }
}

/// Checks the paths, and makes the directories.
fn prepared(config: HostConfig) -> Result<HostConfig, RuntimeError> {
    for path in [&config.state_dir, &config.runtime_dir, &config.supervisor] {
        if !path.is_absolute() || path.to_str().is_none() {
            return Err(RuntimeError::Other(format!("{path:?} is not an absolute path in UTF-8")));
        }
    }
    if !rustix::process::geteuid().is_root() {
        return Err(RuntimeError::Unsupported("containers on this machine need root".to_owned()));
    }
    for path in [&config.state_dir, &config.runtime_dir] {
        crate::make_private_directory(path).map_err(at("make", path))?;
    }
    // Mounts are listed under their real paths.
    let real = |path: &Path| fs::canonicalize(path).map_err(at("find", path));
    Ok(HostConfig {
        state_dir: real(&config.state_dir)?,
        runtime_dir: real(&config.runtime_dir)?,
        supervisor: real(&config.supervisor)?,
        ..config
    })
}

impl Host {
    fn open(config: HostConfig, hold: Hold) -> Result<Self, RuntimeError> {
        let boot = boot()?;
        let marker = marker(&config.state_dir)?;
        let mounted = mounts::mounted().map_err(|error| RuntimeError::io("list what is mounted", error))?;
        let volumes = Volumes::open(&config.state_dir, &mounted)?;
        let upper_in_memory = !volumes.overlays();
        let sockets = Sockets::open(&config.runtime_dir).map_err(at("open", &config.runtime_dir))?;
        let cgroups = Cgroups::find(&mounted);
        cgroups.prepare(&mounted);
        let host = Self {
            hold,
            boot,
            marker,
            volumes,
            cgroups,
            sockets,
            upper_in_memory,
            network_pool: private_network(&config.policy),
            locks: Locks::new(),
            processes: Mutex::default(),
            written: Mutex::default(),
            settling: Mutex::default(),
            contact: Mutex::default(),
            config,
        };
        host.adopt()?;
        Ok(host)
    }

    /// The ids of the machine for the users of a container. `None`: they have the same ids on the machine, because the container is
    /// privileged or the worker cannot map owners.
    fn range(&self, container: &Container) -> Option<Range> {
        let confined = !container.privileged && self.volumes.owners_fixed().is_none();
        confined.then(|| Range::of(container.handle))
    }

    /// Where the machine sees a volume.
    fn directory(&self, handle: VolumeHandle) -> Result<PathBuf, RuntimeError> {
        if self.refresh(handle)? {
            self.volumes.directory_while_written(handle)
        } else {
            self.volumes.directory(handle)
        }
    }

    /// Removes the gateway's mount of a volume that a container wrote to through another mount, because its view may be old. `true`: the
    /// container still writes.
    fn refresh(&self, handle: VolumeHandle) -> Result<bool, RuntimeError> {
        let mut written = held(&self.written);
        let Some(process) = written.get(&handle).copied() else { return Ok(false) };
        let running = self.is_running(process)?;
        self.volumes.unmount(handle)?;
        if !running {
            written.remove(&handle);
        }
        Ok(running)
    }

    fn is_running(&self, process: AttemptId) -> Result<bool, RuntimeError> {
        match self.find(process) {
            Ok(process) => Ok(!matches!(self.status(&process)?, Status::Ended(_))),
            Err(_) => Ok(false),
        }
    }

    /// Of which life of the artifact store the volumes are, as it stands beside the marker.
    fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError> {
        let path = self.config.state_dir.join(STORE_MARK);
        let found = filesystem::read_if_there(&path).map_err(at("read", &path))?;
        Ok(found.and_then(|text| String::from_utf8(text).ok()?.parse().ok()))
    }

    fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError> {
        let path = self.config.state_dir.join(STORE_MARK);
        filesystem::write_durably(&path, format!("{mark}\n").as_bytes()).map_err(at("write", &path))
    }

    /// What is hidden from containers because it is ours, or because the operator says so.
    fn hidden(&self) -> Vec<PathBuf> {
        let own = [&self.config.state_dir, &self.config.runtime_dir];
        own.into_iter().chain(&self.config.masked).cloned().collect()
    }
}

/// The life of the machine, or of the container that this process is in.
fn boot() -> Result<String, RuntimeError> {
    let read = |path: &Path| fs::read_to_string(path).map_err(at("read", path));
    let kernel = read(Path::new("/proc/sys/kernel/random/boot_id"))?;
    let first = read(Path::new("/proc/1/stat"))?;
    // The name in it may contain anything; the start time is the 20th field after it.
    let started = first.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    let started = started.ok_or_else(|| RuntimeError::Other("/proc/1/stat has no start time".to_owned()))?;
    Ok(format!("{}/{started}", kernel.trim()))
}

/// The file system of a directory.
fn disk(path: &Path) -> Result<Disk, RuntimeError> {
    let found = rustix::fs::statvfs(path).map_err(|error| at("measure", path)(error.into()))?;
    Ok(Disk {
        total_bytes: found.f_blocks.saturating_mul(found.f_frsize),
        free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
    })
}

/// What stands beside the marker of the state directory.
const STORE_MARK: &str = "store-mark";

/// The marker of the state directory.
fn find_marker(state_dir: &Path) -> Result<Option<MarkerId>, RuntimeError> {
    let path = state_dir.join("marker");
    let found = filesystem::read_if_there(&path).map_err(at("read", &path))?;
    Ok(found.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok()))
}

/// The same, made when there is none.
fn marker(state_dir: &Path) -> Result<MarkerId, RuntimeError> {
    if let Some(marker) = find_marker(state_dir)? {
        return Ok(marker);
    }
    let path = state_dir.join("marker");
    let marker = MarkerId::new();
    filesystem::write_durably(&path, format!("{marker}\n").as_bytes()).map_err(at("write", &path))?;
    Ok(marker)
}

#[async_trait]
impl Runtime for HostRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn marker(&self) -> Result<Marker, RuntimeError> {
        Ok(Marker { id: self.host.marker, boot: self.host.boot.clone() })
    }

    async fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || host.store_mark()).await
    }

    async fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || {
            host.hold.check()?;
            host.set_store_mark(mark)
        })
        .await
    }

    async fn disk(&self) -> Result<Option<Disk>, RuntimeError> {
        let path = &self.host.config.state_dir;
        disk(path).map(Some)
    }

    async fn list(&self) -> Result<Holdings, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || Ok(Holdings { containers: host.list_containers()?, volumes: host.volumes.list()? }))
            .await
    }

    async fn create_volume(&self, handle: VolumeHandle, source: VolumeSource) -> Result<(), RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            if let VolumeSource::CopyOnWrite { parent: below }
            | VolumeSource::CopyOnWriteLinked { parent: below, .. }
            | VolumeSource::Copy { original: below } = source
            {
                host.refresh(below)?;
            }
            host.volumes.create(handle, &source)
        })
        .await
    }

    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        blocking(move || {
            let _turn = turn;
            host.directory(handle).map(Contents::Directory)
        })
        .await
    }

    async fn note_artifact(&self, handle: VolumeHandle, artifact: ArtifactId) -> Result<(), RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.volumes.note_artifact(handle, artifact)
        })
        .await
    }

    async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        blocking(move || {
            let _turn = turn;
            host.volumes.notes(handle)
        })
        .await
    }

    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        let directories = directories.to_vec();
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            let root = host.directory(handle)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = rustix::fs::open(&root, flags, Mode::empty())
                .map_err(|error| at("open", &root)(error.into()))?;
            for directory in directories {
                // A link in an input leads nowhere else.
                mounts::directory_in(opened.as_fd(), &directory)
                    .map_err(at("make", &root.join(&directory)))?;
            }
            Ok(())
        })
        .await
    }

    async fn take_directory(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        let (turn, host) = (self.host.locks.lock(into.uuid()).await, Arc::clone(&self.host));
        let path = path.to_owned();
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.directory(from)?;
            host.volumes.take(from, &path, into)
        })
        .await
    }

    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        let (turn, host) = (self.host.locks.lock(handle.uuid()).await, Arc::clone(&self.host));
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.volumes.destroy(handle)?;
            held(&host.written).remove(&handle);
            Ok(())
        })
        .await
    }

    async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        self.host.create_container(handle, spec).await
    }

    async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        Host::destroy_container(&self.host, handle).await
    }

    async fn start(
        &self,
        container: ContainerHandle,
        process: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        Host::start(&self.host, container, process, spec).await
    }

    async fn process(&self, process: AttemptId) -> Result<ProcessState, RuntimeError> {
        Host::process(&self.host, process).await
    }

    async fn team(&self, process: AttemptId) -> Result<String, RuntimeError> {
        Host::team(&self.host, process).await
    }

    async fn wait(&self, process: AttemptId) -> Result<Ended, RuntimeError> {
        Host::wait(&self.host, process).await
    }

    async fn usage(&self, process: AttemptId) -> Result<Usage, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || host.usage(process)).await
    }

    async fn stop(&self, process: AttemptId, grace: Duration) -> Result<(), RuntimeError> {
        Host::stop(&self.host, process, grace).await
    }

    async fn attach(&self, process: AttemptId, from: Offsets) -> Result<Attachment, RuntimeError> {
        Host::attach(&self.host, process, from).await
    }

    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError> {
        self.host.contact(sent, stop_after).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_keeps_the_name_that_its_state_directory_was_given_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let config =
            HostConfig::new(directory.path().join("state"), directory.path().join("run")).expect("a path");
        assert_eq!(config.worker_name(Some("given".to_owned())).expect("a name"), "given");
        let first = config.worker_name(None).expect("a name");
        assert_eq!(first, rustix::system::uname().nodename().to_string_lossy());

        let kept = config.state_dir.join("worker-name");
        fs::write(&kept, "another\n").expect("write");
        assert_eq!(config.worker_name(None).expect("a name"), "another", "whatever the host is called now");
        fs::write(&kept, "").expect("write");
        assert_eq!(config.worker_name(None).expect("a name"), first, "nothing is no name");
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&config.state_dir).expect("there"));
        assert_eq!(mode & 0o777, 0o700);
        let left = fs::read_dir(&config.state_dir).expect("list").count();
        assert_eq!(left, 1, "the name alone");
    }
}
