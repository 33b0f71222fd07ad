//! A fake worker for tests of the code around a runtime. It is fast, needs no root, and behaves the
//! same on every machine.
//!
//! A [`FakeWorker`] is the worker with its volumes, containers and processes. Like a machine, it
//! outlives the [`Runtime`]s that use it. Volumes are subdirectories of a temporary directory.
//! Processes are tasks of the test process. They run only the programs of the conformance suite
//! ([`crate::conformance::programs`]), and see the files of their container. The fake does not
//! simulate the kernel: users, limits and privileges have no effect, and a network is only a set of
//! ports.
//!
//! The fake passes the conformance suite, with local and with remote volumes. Tests inject faults
//! by [`Faults`].

mod attach;
mod containers;
mod far;
mod faults;
mod process;
mod programs;
mod volumes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use domain::worker::{Marker, StoreMark};
use domain::{ArtifactId, ContainerHandle, MarkerId, ProcessId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerDescription, ContainerSpec, Contents, Disk, Ended, Holdings, Notes,
    Offsets, ProcessContainer, ProcessSpec, ProcessState, Runtime, RuntimeError, VolumeSource,
    WorkerProvidedPath,
};
use tempfile::TempDir;
use tokio::sync::watch;

pub use faults::{DestructionCounts, FaultGuard, Faults};

use containers::{Container, Ports};
use process::{Contact, Process};
use programs::{Program, System};
use volumes::Volume;

/// Output of one stream, in bytes, after which a process blocks or loses output.
pub const SPOOL_BYTES: u64 = 256 * 1024;

/// Default PATH of a process.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The feature that only workers with local volumes have.
const NEAR: &str = "replaceable-outputs";
const FEATURES: [&str; 15] = [
    "network-private",
    "network-container",
    "services",
    "stop-after",
    "terminal",
    "durable-output",
    "held-output",
    "complete-output",
    "durable-input",
    "binary-input",
    "signals",
    "exit-signals",
    "ends-whole",
    "image-checks",
    "exact-environment",
];

/// The contents of the worker.
struct State {
    boot: u32,
    store: Option<StoreMark>,
    volumes: BTreeMap<VolumeHandle, Volume>,
    containers: BTreeMap<ContainerHandle, Arc<Container>>,
    processes: BTreeMap<ProcessId, (ContainerHandle, Arc<Process>)>,
    free_bytes: u64,
}

/// A worker in memory and in a temporary directory.
pub struct FakeWorker {
    /// The injected faults.
    pub faults: Faults,
    directory: TempDir,
    is_far: bool,
    capabilities: Capabilities,
    marker: MarkerId,
    state: Mutex<State>,
    contact: watch::Sender<Contact>,
    contacts: Mutex<Vec<(Duration, Duration)>>,
}

impl FakeWorker {
    /// Creates a worker whose volumes are local directories.
    #[must_use]
    pub fn near() -> Arc<Self> {
        Self::new(false, Vec::new())
    }

    /// Creates a worker that provides these images and certificates.
    #[must_use]
    pub fn providing(worker_provided: Vec<WorkerProvidedPath>, is_far: bool) -> Arc<Self> {
        Self::new(is_far, worker_provided)
    }

    /// Creates a worker whose volumes are remote and are transferred by tar.
    #[must_use]
    pub fn far() -> Arc<Self> {
        Self::new(true, Vec::new())
    }

    fn new(is_far: bool, worker_provided: Vec<WorkerProvidedPath>) -> Arc<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for name in ["volumes", "kept", "new", "containers", "image/etc", "image/tmp", "gateway"] {
            fs::create_dir_all(directory.path().join(name)).expect("make a directory");
        }
        for (name, text) in [("passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("group", "root:x:0:\n")] {
            fs::write(directory.path().join("image/etc").join(name), text).expect("write a file");
        }
        let features = FEATURES.into_iter().chain((!is_far).then_some(NEAR));
        let capabilities = Capabilities {
            image_kinds: ["host", "artifact", "resource-type"].map(str::to_owned).to_vec(),
            features: features.map(str::to_owned).collect(),
            worker_provided,
            copy_on_write: "copy, because the worker is a fake".to_owned(),
            cpu_millis: None,
            memory_bytes: None,
        };
        let state = State {
            boot: 1,
            store: None,
            volumes: BTreeMap::new(),
            containers: BTreeMap::new(),
            processes: BTreeMap::new(),
            free_bytes: 50 << 30,
        };
        Arc::new(Self {
            faults: Faults::new(),
            directory,
            is_far,
            capabilities,
            marker: MarkerId::new(),
            state: Mutex::new(state),
            contact: watch::Sender::new(None),
            contacts: Mutex::default(),
        })
    }

    /// Opens a runtime for the worker, as a gateway does.
    #[must_use]
    pub fn runtime(self: &Arc<Self>) -> Arc<dyn Runtime> {
        Arc::new(FakeRuntime { worker: self.clone() })
    }

    /// Simulates a reboot. Processes are lost, and volumes and containers stay.
    pub async fn reboot(&self) {
        let running: Vec<_> = self.state().processes.values().map(|(_, process)| process.clone()).collect();
        for process in running {
            process.lose().await;
        }
        self.contact.send_replace(None);
        self.state().boot += 1;
    }

    /// The recorded contacts: the send time of each message, and for how long processes may
    /// continue from then on.
    #[must_use]
    pub fn contacts(&self) -> Vec<(Duration, Duration)> {
        self.contacts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    // Access to the disk, for tests that inspect or change it.

    /// Sets the free space that the worker reports. Its disk has 100 GiB.
    pub fn set_free_bytes(&self, free_bytes: u64) {
        self.state().free_bytes = free_bytes;
    }

    /// The path of a volume.
    #[must_use]
    pub fn path(&self, volume: VolumeHandle) -> PathBuf {
        self.directory("volumes").join(volume.to_string())
    }

    /// Whether a volume exists.
    #[must_use]
    pub fn has(&self, volume: VolumeHandle) -> bool {
        self.state().volumes.contains_key(&volume) || self.path(volume).exists()
    }

    /// Creates a volume that contains the file `file`.
    pub async fn volume(&self, text: &str) -> VolumeHandle {
        let volume = VolumeHandle::new();
        self.make_volume(volume, VolumeSource::Empty).await.expect("make a volume");
        fs::write(self.path(volume).join("file"), text).expect("write a file");
        volume
    }

    /// Reads the file `file` of a volume.
    #[must_use]
    pub fn read(&self, volume: VolumeHandle) -> String {
        fs::read_to_string(self.path(volume).join("file")).expect("read a file")
    }

    /// Changes the file `file` of a volume, and keeps its modification time.
    pub fn overwrite(&self, volume: VolumeHandle, text: &str) {
        let path = self.path(volume).join("file");
        let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("its time");
        fs::write(&path, text).expect("write a file");
        fs::File::options().write(true).open(&path).expect("open").set_modified(modified).expect("set it");
    }

    /// The directory for state of the gateways.
    #[must_use]
    pub fn gateway_directory(&self) -> PathBuf {
        self.directory("gateway")
    }

    fn directory(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The path of the stored manifest of a remote volume.
    fn kept(&self, volume: VolumeHandle) -> PathBuf {
        self.directory("kept").join(volume.to_string())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, process: ProcessId) -> Result<Arc<Process>, RuntimeError> {
        let state = self.state();
        let found = state.processes.get(&process).map(|(_, process)| process.clone());
        found.ok_or(RuntimeError::ProcessNotFound(process))
    }

    fn start(&self, handle: ContainerHandle, id: ProcessId, spec: &ProcessSpec) -> Result<(), RuntimeError> {
        let mut state = self.state();
        if state.processes.contains_key(&id) {
            return Ok(());
        }
        let container =
            state.containers.get(&handle).cloned().ok_or(RuntimeError::ContainerNotFound(handle))?;
        let is_running = |container| {
            let mut all = state.processes.values();
            all.any(|(of, process)| *of == container && process.lock().ended().is_none())
        };
        if is_running(handle) {
            return Err(RuntimeError::Unsupported(format!("a second process in container {handle}")));
        }
        if let Some(joined) = container.spec.network_of.filter(|joined| !is_running(*joined)) {
            return Err(RuntimeError::ContainerNotRunning(joined));
        }
        let process = Process::new(id, spec, SPOOL_BYTES);
        state.processes.insert(id, (handle, process.clone()));
        let of_container = container.spec.environment.iter();
        let of_container =
            of_container.filter(|one| !spec.environment.iter().any(|other| other.name == one.name));
        let all = of_container.chain(&spec.environment);
        let mut environment: Vec<_> = all.map(|one| (one.name.clone(), one.value.clone())).collect();
        for (name, value) in [("PATH", PATH), ("HOME", container.user.home.as_str())] {
            if !environment.iter().any(|(known, _)| known == name.as_bytes()) {
                environment.push((name.into(), value.into()));
            }
        }
        let program = Program::find(&spec.command, &container);
        let system = System { process: process.clone(), container, environment };
        let running = process.run(self.faults.starts.clone(), self.contact.subscribe(), program, system);
        #[expect(
            clippy::disallowed_methods,
            reason = "the task ends with the worker, and no caller waits for it"
        )]
        tokio::spawn(running);
        Ok(())
    }

    async fn remove_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        self.faults.destroy_container(handle)?;
        let processes: Vec<_> = {
            let state = self.state();
            let its = state.processes.iter().filter(|(_, (container, _))| *container == handle);
            its.map(|(id, (_, process))| (*id, process.clone())).collect()
        };
        for (_, process) in &processes {
            process.destroy().await;
        }
        let mut state = self.state();
        for (id, _) in processes {
            state.processes.remove(&id);
        }
        match state.containers.remove(&handle) {
            Some(container) => {
                container.remove().map_err(|error| RuntimeError::io("destroy a container", error))
            }
            None => Ok(()),
        }
    }
}

impl Drop for FakeWorker {
    /// Ends all processes.
    fn drop(&mut self) {
        for (_, process) in self.state().processes.values() {
            process.abandon();
        }
    }
}

/// The runtime of a gateway on the fake worker.
struct FakeRuntime {
    worker: Arc<FakeWorker>,
}

#[async_trait]
impl Runtime for FakeRuntime {
    fn capabilities(&self) -> &Capabilities {
        &self.worker.capabilities
    }

    async fn marker(&self) -> Result<Marker, RuntimeError> {
        self.worker.faults.reach()?;
        Ok(Marker { id: self.worker.marker, boot: format!("boot {}", self.worker.state().boot) })
    }

    async fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError> {
        self.worker.faults.reach()?;
        Ok(self.worker.state().store)
    }

    async fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.state().store = Some(mark);
        Ok(())
    }

    async fn disk(&self) -> Result<Option<Disk>, RuntimeError> {
        self.worker.faults.reach()?;
        Ok(Some(Disk { total_bytes: 100 << 30, free_bytes: self.worker.state().free_bytes }))
    }

    async fn list(&self) -> Result<Holdings, RuntimeError> {
        self.worker.faults.reach()?;
        let state = self.worker.state();
        let (containers, volumes) = (state.containers.keys(), state.volumes.keys());
        Ok(Holdings { containers: containers.copied().collect(), volumes: volumes.copied().collect() })
    }

    async fn create_volume(&self, handle: VolumeHandle, source: VolumeSource) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.make_volume(handle, source).await
    }

    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.find_volume(handle)?;
        let (path, kept) = (self.worker.path(handle), self.worker.kept(handle));
        if !self.worker.is_far {
            return Ok(Contents::Directory(path));
        }
        Ok(Contents::Remote(Arc::new(far::TarVolume { handle, path, kept })))
    }

    async fn note_artifact(&self, handle: VolumeHandle, artifact: ArtifactId) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        let mut state = self.worker.state();
        let found = state.volumes.get_mut(&handle).filter(|volume| volume.made);
        found.ok_or(RuntimeError::VolumeNotFound(handle))?.artifact = Some(artifact);
        Ok(())
    }

    async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError> {
        self.worker.faults.read_notes(handle)?;
        let state = self.worker.state();
        let found = state.volumes.get(&handle).filter(|volume| volume.made);
        let found = found.ok_or(RuntimeError::VolumeNotFound(handle))?;
        Ok(Notes { parent: found.parent, artifact: found.artifact })
    }

    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.find_volume(handle)?;
        for directory in directories {
            fs::create_dir_all(self.worker.path(handle).join(directory))
                .map_err(|error| RuntimeError::io("create a directory", error))?;
        }
        Ok(())
    }

    async fn take_directory(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        if self.worker.is_far {
            return Err(RuntimeError::Unsupported("outputs of this worker are mounts".to_owned()));
        }
        self.worker.take(from, path, into)
    }

    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        let _counted = self.worker.faults.destroy().await;
        self.worker.remove_volume(handle)
    }

    async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        let mut state = self.worker.state();
        if state.containers.contains_key(&handle) {
            return Ok(());
        }
        let ports = match spec.network_of {
            None => Ports::default(),
            Some(joined) => {
                let other = state.containers.get(&joined).filter(|other| other.spec.team == spec.team);
                Arc::clone(&other.ok_or(RuntimeError::ContainerNotFound(joined))?.ports)
            }
        };
        let places = (&*self.worker.directory("image"), &*self.worker.directory("containers"));
        let volumes = &state.volumes;
        let mut made = Container::make(handle, spec, places, |volume| {
            let there = volumes.get(&volume).is_some_and(|found| found.made);
            if there { Ok(self.worker.path(volume)) } else { Err(RuntimeError::VolumeNotFound(volume)) }
        })?;
        made.ports = ports;
        state.containers.insert(handle, Arc::new(made));
        Ok(())
    }

    async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        let _counted = self.worker.faults.destroy().await;
        self.worker.remove_container(handle).await
    }

    async fn start(
        &self,
        container: ContainerHandle,
        process: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.start(container, process, &spec)
    }

    async fn process(&self, process: ProcessId) -> Result<ProcessState, RuntimeError> {
        self.worker.faults.reach()?;
        Ok(self.worker.find(process)?.lock().state.clone())
    }

    async fn describe_container(
        &self,
        handle: ContainerHandle,
    ) -> Result<ContainerDescription, RuntimeError> {
        self.worker.faults.reach()?;
        let state = self.worker.state();
        let spec = &state.containers.get(&handle).ok_or(RuntimeError::ContainerNotFound(handle))?.spec;
        let (team, note) = (spec.team.clone(), spec.note.clone());
        let main = state.processes.iter().find(|(_, (of, _))| *of == handle).map(|(id, _)| *id);
        Ok(ContainerDescription { team, note, main, others: Vec::new() })
    }

    async fn container_of(&self, process: ProcessId) -> Result<ProcessContainer, RuntimeError> {
        self.worker.faults.reach()?;
        let state = self.worker.state();
        let found = state.processes.get(&process).and_then(|(handle, _)| {
            let team = state.containers.get(handle)?.spec.team.clone();
            Some(ProcessContainer { handle: *handle, team, main: process })
        });
        found.ok_or(RuntimeError::ProcessNotFound(process))
    }

    async fn wait(&self, process: ProcessId) -> Result<Ended, RuntimeError> {
        let process = self.worker.find(process)?;
        tokio::select! {
            biased;
            error = self.worker.faults.unreachable() => Err(error),
            ended = process.wait(|inner| inner.ended()) => Ok(ended),
        }
    }

    async fn stop(&self, process: ProcessId, grace: Duration) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.faults.stop()?;
        let signal = {
            let state = self.worker.state();
            let container =
                state.processes.get(&process).and_then(|(container, _)| state.containers.get(container));
            container.and_then(|container| container.spec.stop_signal)
        };
        self.worker.find(process)?.stop(grace, signal.unwrap_or(process::TERM));
        Ok(())
    }

    async fn accepts_connections(&self, main: ProcessId, port: u16) -> Result<bool, RuntimeError> {
        self.worker.faults.reach()?;
        let state = self.worker.state();
        let (container, _) = state.processes.get(&main).ok_or(RuntimeError::ProcessNotFound(main))?;
        let container = state.containers.get(container).ok_or(RuntimeError::ProcessNotFound(main))?;
        Ok(container.ports.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&port))
    }

    async fn attach(&self, process: ProcessId, from: Offsets) -> Result<Attachment, RuntimeError> {
        self.worker.faults.reach()?;
        attach::attach(&self.worker, &self.worker.find(process)?, from)
    }

    async fn offsets_at(&self, process: ProcessId, since: SystemTime) -> Result<Offsets, RuntimeError> {
        self.worker.faults.reach()?;
        let process = self.worker.find(process)?;
        let [stdout, stderr] = [0, 1].map(|which: usize| process.lock().outputs[which].offset_at(since));
        Ok(Offsets { stdout, stderr })
    }

    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.contacts.lock().unwrap_or_else(PoisonError::into_inner).push((sent, stop_after));
        self.worker.contact.send_if_modified(|known| {
            // Messages may arrive out of order.
            let newer = known.is_none_or(|(earlier, _)| earlier <= sent);
            if newer {
                *known = Some((sent, stop_after));
            }
            newer
        });
        Ok(())
    }
}
