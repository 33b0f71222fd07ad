//! A worker with directories and nothing else, for tests of what surrounds a runtime.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use domain::worker::Marker;
use domain::{AttemptId, ContainerHandle, MarkerId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerSpec, Contents, Disk, Ended, Holdings, Offsets, ProcessEvent,
    ProcessInput, ProcessSpec, ProcessState, Runtime, RuntimeError, VolumeSource,
};
use tempfile::TempDir;
use tokio::sync::RwLock;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::worker::Worker;
use crate::{Config, Gateway};

mod far;
pub(crate) mod schedule;
pub(crate) mod store;

/// How long is waited for what must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// An address where nobody listens.
pub(crate) const NOBODY: &str = "http://127.0.0.1:9";

pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what} did not come"))
}

/// Its volumes are directories; its processes do nothing, and it panics when it is asked to stop one while `panics` is set.
pub(crate) struct Directories {
    directory: TempDir,
    capabilities: Capabilities,
    pub(crate) panics: Mutex<bool>,
    /// How often stopping a process fails from now on.
    pub(crate) unstoppable: Mutex<usize>,
    /// Destroying these fails.
    pub(crate) stuck: Mutex<Vec<VolumeHandle>>,
    /// No volume is made while somebody holds this.
    pub(crate) making: RwLock<()>,
    /// Its processes, each with its team.
    pub(crate) processes: Mutex<HashMap<AttemptId, String>>,
    /// Whether it stands for a worker on another machine.
    pub(crate) is_far: bool,
    /// What it was told of contact.
    pub(crate) contacts: Mutex<Vec<(Duration, Duration)>>,
}

impl Default for Directories {
    fn default() -> Self {
        let capabilities =
            Capabilities { image_kinds: Vec::new(), features: Vec::new(), copy_on_write: String::new() };
        Self {
            directory: tempfile::tempdir().expect("a temporary directory"),
            capabilities,
            panics: Mutex::new(false),
            unstoppable: Mutex::new(0),
            stuck: Mutex::default(),
            making: RwLock::default(),
            processes: Mutex::default(),
            contacts: Mutex::default(),
            is_far: false,
        }
    }
}

impl Directories {
    /// As a worker on another machine, whose bytes go through tar.
    pub(crate) fn far() -> Self {
        Self { is_far: true, ..Self::default() }
    }

    pub(crate) fn path(&self, volume: VolumeHandle) -> PathBuf {
        self.directory.path().join("volumes").join(volume.to_string())
    }

    /// Makes a volume with a file in it.
    pub(crate) fn volume(&self, text: &str) -> VolumeHandle {
        let volume = VolumeHandle::new();
        std::fs::create_dir_all(self.path(volume)).expect("make");
        std::fs::write(self.path(volume).join("file"), text).expect("write");
        volume
    }

    /// Changes the file in a volume, without a trace in its times.
    pub(crate) fn overwrite(&self, volume: VolumeHandle, text: &str) {
        let path = self.path(volume).join("file");
        let modified = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("its time");
        std::fs::write(&path, text).expect("write");
        std::fs::File::options()
            .write(true)
            .open(&path)
            .expect("open")
            .set_modified(modified)
            .expect("set it");
    }

    pub(crate) fn has(&self, volume: VolumeHandle) -> bool {
        self.path(volume).exists()
    }

    /// The file in a volume.
    pub(crate) fn read(&self, volume: VolumeHandle) -> String {
        std::fs::read_to_string(self.path(volume).join("file")).expect("read")
    }

    /// A gateway's view of it, with peers at these addresses.
    pub(crate) fn attended(self: &Arc<Self>, scheduler: &str, artifact_store: &str) -> Arc<Worker> {
        self.configured(scheduler, artifact_store, NOBODY, false)
    }

    /// The view of a gateway whose operator holds destruction.
    pub(crate) fn holding(self: &Arc<Self>, scheduler: &str, artifact_store: &str) -> Arc<Worker> {
        self.configured(scheduler, artifact_store, NOBODY, true)
    }

    /// The view of a gateway to which a streamer brings inputs.
    pub(crate) fn brought_to(
        self: &Arc<Self>,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
    ) -> Arc<Worker> {
        self.configured(scheduler, artifact_store, streamer, false)
    }

    fn configured(
        self: &Arc<Self>,
        scheduler: &str,
        artifact_store: &str,
        streamer: &str,
        hold_destruction: bool,
    ) -> Arc<Worker> {
        let config = Config {
            worker_name: "test".to_owned(),
            platform: "linux".to_owned(),
            tags: Vec::new(),
            team: None,
            max_tasks: None,
            endpoint: "http://127.0.0.1:9".to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: artifact_store.to_owned(),
            streamer: streamer.to_owned(),
            token: None,
            manifest_dir: self.directory.path().join("manifests"),
            report_interval: Duration::from_secs(60),
            destroy_concurrency: 1,
            hold_destruction,
        };
        let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
        Worker::new(config, self.clone(), "boot".to_owned(), tasks, stopping).expect("a worker")
    }
}

/// A gateway that attends these workers.
pub(crate) fn gateway_of(workers: &[Arc<Worker>], scheduler: &str) -> Gateway {
    let (tasks, stopping) = (TaskTracker::new(), CancellationToken::new());
    Gateway::of(workers.to_vec(), scheduler, None, tasks, stopping).expect("an address")
}

/// What was put into `mutex`.
pub(crate) fn noted<T: Clone>(mutex: &Mutex<T>) -> T {
    mutex.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn unsupported<T>() -> Result<T, RuntimeError> {
    Err(RuntimeError::Unsupported("it has directories and nothing else".to_owned()))
}

#[async_trait]
impl Runtime for Directories {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    async fn marker(&self) -> Result<Marker, RuntimeError> {
        Ok(Marker { id: MarkerId::new(), boot: "boot".to_owned() })
    }

    async fn disk(&self) -> Result<Option<Disk>, RuntimeError> {
        Ok(Some(Disk { total_bytes: 1, free_bytes: 1 }))
    }

    async fn list(&self) -> Result<Holdings, RuntimeError> {
        let names = std::fs::read_dir(self.directory.path().join("volumes")).into_iter().flatten().flatten();
        let volumes = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        Ok(Holdings { containers: Vec::new(), volumes })
    }

    async fn create_volume(&self, handle: VolumeHandle, _source: VolumeSource) -> Result<(), RuntimeError> {
        let _making = self.making.read().await;
        let path = self.path(handle);
        std::fs::create_dir_all(&path).map_err(|error| RuntimeError::io("making a volume", error))
    }

    async fn contents(&self, handle: VolumeHandle) -> Result<Contents, RuntimeError> {
        let path = self.path(handle);
        if !path.exists() {
            return Err(RuntimeError::VolumeNotFound(handle));
        }
        if !self.is_far {
            return Ok(Contents::Directory(path));
        }
        let kept = self.directory.path().join(format!("{handle}.kept"));
        Ok(Contents::Remote(Arc::new(far::Tarred { handle, path, kept })))
    }

    async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError> {
        for directory in directories {
            std::fs::create_dir_all(self.path(handle).join(directory))
                .map_err(|error| RuntimeError::io("making a directory", error))?;
        }
        Ok(())
    }

    async fn take_directory(
        &self,
        _from: VolumeHandle,
        _path: &std::path::Path,
        _into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        if noted(&self.stuck).contains(&handle) {
            return Err(RuntimeError::HasChildren(handle));
        }
        _ = std::fs::remove_file(self.directory.path().join(format!("{handle}.kept")));
        match std::fs::remove_dir_all(self.path(handle)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(RuntimeError::io("destroying a volume", error))
            }
            _ => Ok(()),
        }
    }

    async fn create_container(
        &self,
        _handle: ContainerHandle,
        _spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn destroy_container(&self, _handle: ContainerHandle) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn start(
        &self,
        container: ContainerHandle,
        _process: AttemptId,
        _spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        Err(RuntimeError::ContainerNotFound(container))
    }

    async fn process(&self, process: AttemptId) -> Result<ProcessState, RuntimeError> {
        Err(RuntimeError::ProcessNotFound(process))
    }

    async fn team(&self, process: AttemptId) -> Result<String, RuntimeError> {
        noted(&self.processes).get(&process).cloned().ok_or(RuntimeError::ProcessNotFound(process))
    }

    async fn wait(&self, process: AttemptId) -> Result<Ended, RuntimeError> {
        Err(RuntimeError::ProcessNotFound(process))
    }

    async fn stop(&self, process: AttemptId, _grace: Duration) -> Result<(), RuntimeError> {
        let panics = std::mem::take(&mut *self.panics.lock().unwrap_or_else(PoisonError::into_inner));
        assert!(!panics, "as the test asked for");
        let mut unstoppable = self.unstoppable.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(less) = unstoppable.checked_sub(1) {
            *unstoppable = less;
            return Err(RuntimeError::Other("it cannot be stopped now".to_owned()));
        }
        Err(RuntimeError::ProcessNotFound(process))
    }

    async fn attach(&self, process: AttemptId, _from: Offsets) -> Result<Attachment, RuntimeError> {
        if !noted(&self.processes).contains_key(&process) {
            return Err(RuntimeError::ProcessNotFound(process));
        }
        let events = Box::pin(futures::stream::iter([Ok(ProcessEvent::Done(Offsets::default()))]));
        Ok(Attachment { stdin_offset: 0, events, input: Arc::new(NoInput) })
    }

    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError> {
        self.contacts.lock().unwrap_or_else(PoisonError::into_inner).push((sent, stop_after));
        Ok(())
    }
}

/// Of a process that takes nothing.
struct NoInput;

#[async_trait]
impl ProcessInput for NoInput {
    async fn stdin(&self, _offset: u64, _data: Bytes) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn close_stdin(&self) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn signal(&self, _number: u8) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn acknowledge(&self, _up_to: Offsets) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn resize(&self, _window: runtime::Window) -> Result<(), RuntimeError> {
        unsupported()
    }

    async fn detach(&self) -> Result<(), RuntimeError> {
        unsupported()
    }
}
