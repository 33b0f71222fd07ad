//! A worker that behaves, for tests of what surrounds a runtime: fast, without root, and the same on every machine.
//!
//! A [`FakeWorker`] is the worker itself, with what it holds and runs; it outlives the [`Runtime`]s that attend it, as a machine does. Its
//! volumes are directories below a temporary one. Its processes run the programs of the conformance suite
//! ([`crate::conformance::programs`]) and nothing else, as tasks of this process, which see the files that a container would show them.
//! What it cannot do is what takes a kernel: users, limits, privileges and networks are not told apart.
//!
//! It passes the conformance suite, near and far. What a test wants to go wrong on it, it says by [`Faults`].

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
use std::time::Duration;

use async_trait::async_trait;
use domain::worker::{Marker, StoreMark};
use domain::{ArtifactId, AttemptId, ContainerHandle, MarkerId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerSpec, Contents, Disk, Ended, Holdings, Notes, Offsets, ProcessSpec,
    ProcessState, Runtime, RuntimeError, VolumeSource, WorkerProvidedPath,
};
use tempfile::TempDir;
use tokio::sync::watch;

pub use faults::{Destroys, Faults, Held};

use containers::Container;
use process::{Contact, Process};
use programs::{Program, System};
use volumes::Volume;

/// How much output of one stream a process may write before it is held back, or loses some.
pub const SPOOL_BYTES: u64 = 256 * 1024;

/// What a process has in its environment unless it is told otherwise.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a near one can do beside what a far one can.
const NEAR: &str = "replaceable-outputs";
const FEATURES: [&str; 13] = [
    "network-private",
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

/// What it holds.
struct State {
    boot: u32,
    store: Option<StoreMark>,
    volumes: BTreeMap<VolumeHandle, Volume>,
    containers: BTreeMap<ContainerHandle, Arc<Container>>,
    processes: BTreeMap<AttemptId, (ContainerHandle, Arc<Process>)>,
}

/// A worker in memory and a temporary directory.
pub struct FakeWorker {
    /// What goes wrong on it.
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
    /// One whose volumes are directories of this machine.
    #[must_use]
    pub fn near() -> Arc<Self> {
        Self::new(false, Vec::new())
    }

    /// One that brings these along.
    #[must_use]
    pub fn bringing(worker_provided: Vec<WorkerProvidedPath>, is_far: bool) -> Arc<Self> {
        Self::new(is_far, worker_provided)
    }

    /// One as on another machine, whose bytes go through tar.
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
            copy_on_write: "copy, as it is a fake".to_owned(),
            cpu_millis: None,
            memory_bytes: None,
        };
        let state = State {
            boot: 1,
            store: None,
            volumes: BTreeMap::new(),
            containers: BTreeMap::new(),
            processes: BTreeMap::new(),
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

    /// As a gateway attends it.
    #[must_use]
    pub fn runtime(self: &Arc<Self>) -> Arc<dyn Runtime> {
        Arc::new(FakeRuntime { worker: self.clone() })
    }

    /// Goes down and comes up again: processes are gone, what it holds is not.
    pub async fn reboot(&self) {
        let running: Vec<_> = self.state().processes.values().map(|(_, process)| process.clone()).collect();
        for process in running {
            process.lose().await;
        }
        self.contact.send_replace(None);
        self.state().boot += 1;
    }

    /// What it was told of contact: when each message was sent, and for how long processes may go on from then.
    #[must_use]
    pub fn contacts(&self) -> Vec<(Duration, Duration)> {
        self.contacts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    // Its disk, for tests that look at it or tamper with it.

    /// Where a volume is.
    #[must_use]
    pub fn path(&self, volume: VolumeHandle) -> PathBuf {
        self.directory("volumes").join(volume.to_string())
    }

    /// Whether a volume is there.
    #[must_use]
    pub fn has(&self, volume: VolumeHandle) -> bool {
        self.state().volumes.contains_key(&volume) || self.path(volume).exists()
    }

    /// Makes a volume with the file `file` in it.
    pub async fn volume(&self, text: &str) -> VolumeHandle {
        let volume = VolumeHandle::new();
        self.make_volume(volume, VolumeSource::Empty).await.expect("make a volume");
        fs::write(self.path(volume).join("file"), text).expect("write a file");
        volume
    }

    /// The file `file` in a volume.
    #[must_use]
    pub fn read(&self, volume: VolumeHandle) -> String {
        fs::read_to_string(self.path(volume).join("file")).expect("read a file")
    }

    /// Changes the file `file` in a volume, without a trace in its times.
    pub fn overwrite(&self, volume: VolumeHandle, text: &str) {
        let path = self.path(volume).join("file");
        let modified = fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("its time");
        fs::write(&path, text).expect("write a file");
        fs::File::options().write(true).open(&path).expect("open").set_modified(modified).expect("set it");
    }

    /// Where its gateways may keep what is theirs.
    #[must_use]
    pub fn gateway_directory(&self) -> PathBuf {
        self.directory("gateway")
    }

    fn directory(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Where the manifest of a volume that is far is kept.
    fn kept(&self, volume: VolumeHandle) -> PathBuf {
        self.directory("kept").join(volume.to_string())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, process: AttemptId) -> Result<Arc<Process>, RuntimeError> {
        let state = self.state();
        let found = state.processes.get(&process).map(|(_, process)| process.clone());
        found.ok_or(RuntimeError::ProcessNotFound(process))
    }

    fn start(&self, handle: ContainerHandle, id: AttemptId, spec: &ProcessSpec) -> Result<(), RuntimeError> {
        let mut state = self.state();
        if state.processes.contains_key(&id) {
            return Ok(());
        }
        let container =
            state.containers.get(&handle).cloned().ok_or(RuntimeError::ContainerNotFound(handle))?;
        let mut others = state.processes.values().filter(|(of, _)| *of == handle);
        if others.any(|(_, other)| other.look().ended().is_none()) {
            return Err(RuntimeError::Unsupported(format!("a second process in container {handle}")));
        }
        let process = Process::new(id, spec, SPOOL_BYTES);
        state.processes.insert(id, (handle, process.clone()));
        let mut environment: Vec<_> =
            spec.environment.iter().map(|one| (one.name.clone(), one.value.clone())).collect();
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
            reason = "it ends when the worker does, which nobody waits for"
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
                container.remove().map_err(|error| RuntimeError::io("destroying a container", error))
            }
            None => Ok(()),
        }
    }
}

impl Drop for FakeWorker {
    /// Nothing of it goes on.
    fn drop(&mut self) {
        for (_, process) in self.state().processes.values() {
            process.abandon();
        }
    }
}

/// A gateway's view of the worker.
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
        Ok(Some(Disk { total_bytes: 100 << 30, free_bytes: 50 << 30 }))
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
        Ok(Contents::Remote(Arc::new(far::Tarred { handle, path, kept })))
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
                .map_err(|error| RuntimeError::io("making a directory", error))?;
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
            return Err(RuntimeError::Unsupported("its outputs are mounts".to_owned()));
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
        let places = (&*self.worker.directory("image"), &*self.worker.directory("containers"));
        let volumes = &state.volumes;
        let made = Container::make(handle, spec, places, |volume| {
            let there = volumes.get(&volume).is_some_and(|found| found.made);
            if there { Ok(self.worker.path(volume)) } else { Err(RuntimeError::VolumeNotFound(volume)) }
        })?;
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
        process: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.start(container, process, &spec)
    }

    async fn process(&self, process: AttemptId) -> Result<ProcessState, RuntimeError> {
        self.worker.faults.reach()?;
        Ok(self.worker.find(process)?.look().state.clone())
    }

    async fn team(&self, process: AttemptId) -> Result<String, RuntimeError> {
        self.worker.faults.reach()?;
        let state = self.worker.state();
        let container = state.processes.get(&process).and_then(|(handle, _)| state.containers.get(handle));
        container.map(|container| container.spec.team.clone()).ok_or(RuntimeError::ProcessNotFound(process))
    }

    async fn wait(&self, process: AttemptId) -> Result<Ended, RuntimeError> {
        let process = self.worker.find(process)?;
        tokio::select! {
            biased;
            error = self.worker.faults.unreachable() => Err(error),
            ended = process.wait(|inner| inner.ended()) => Ok(ended),
        }
    }

    async fn stop(&self, process: AttemptId, grace: Duration) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.faults.stop()?;
        self.worker.find(process)?.stop(grace);
        Ok(())
    }

    async fn attach(&self, process: AttemptId, from: Offsets) -> Result<Attachment, RuntimeError> {
        self.worker.faults.reach()?;
        attach::attach(&self.worker, &self.worker.find(process)?, from)
    }

    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError> {
        self.worker.faults.reach()?;
        self.worker.contacts.lock().unwrap_or_else(PoisonError::into_inner).push((sent, stop_after));
        self.worker.contact.send_if_modified(|known| {
            // Messages may overtake each other.
            let newer = known.is_none_or(|(earlier, _)| earlier <= sent);
            if newer {
                *known = Some((sent, stop_after));
            }
            newer
        });
        Ok(())
    }
}
