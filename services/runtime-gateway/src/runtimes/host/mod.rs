//! The host runtime: containers on this machine.
//!
//! All state is below one state directory, which only one runtime may hold at a time:
//!
//! ```text
//! lock  marker  store-mark
//! volumes/<handle>/contents            the contents, or their mount point
//!                 /upper work parent   a copy-on-write child
//!                 /taken               the contents were moved from another volume
//!                 /artifact            the artifact that the volume holds
//! containers/<handle>/container.json   the specification
//!                    /upper work       the root layer of the container
//!                    /run              mounts of the supervisor
//!                    /processes/<id>/  alive  intent → started, or revoked  stdout  stderr  end  log
//! ```
//!
//! This process creates and destroys directories, mounts volumes, and writes intents. A
//! [`supervisor`] per process does everything with the container itself, and outlives this process.
//! Both communicate through the files above and by [`supervisor_protocol`].
//!
//! Supervisors are children of this process until it ends. A service manager must be configured to
//! stop only this process, because killing the whole process group would kill the supervisors.
//!
//! Invariants:
//!
//! - Until an object is complete, its name starts with a dot.
//! - The process that renames an intent starts the command. An intent is written once.
//! - Mounts for a container are in namespaces that end with it. Only volumes are mounted in the
//!   namespace of the machine.
//! - A volume with several layers has one writable mount at a time: that of the machine, or that of
//!   a container with a [`user_namespace`].

mod capabilities;
mod cgroups;
mod checks;
mod config;
mod containers;
mod current_usage;
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
mod state;
mod state_lock;
mod subordinate_ids;
mod supervisor;
mod supervisor_protocol;
mod tree_copy;
mod unprivileged;
mod user_namespace;
mod users;
mod volumes;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use domain::error_chain;
use domain::worker::{Marker, StoreMark};
use domain::workload::Usage;
use domain::{ArtifactId, ContainerHandle, GatewayInstance, ProcessId, VolumeHandle};
use runtime::{
    Attachment, Capabilities, ContainerDescription, ContainerSpec, Contents, CurrentUsage, Disk, Ended,
    Holdings, Layer, Notes, Offsets, ProcessContainer, ProcessSpec, ProcessState, Runtime, RuntimeError,
    VolumeSource,
};
use rustix::fs::{Mode, OFlags};

use crate::runtimes::output_spool::Reader;
use crate::util::blocking::blocking;
use crate::util::keyed_locks::lock;

use capabilities::{ALL_LIMITS, capabilities, private_network};
use cgroups::Cgroups;
pub use checks::{Check, Verdict, checks};
pub use config::HostConfig;
use config::prepared;
use filesystem::at;
pub use network::{InvalidPool, Pool};
pub use policy::{Permission, Policy};
use state::{Host, boot, disk, find_marker};
use state_lock::StateLock;
pub use unprivileged::{EnterError, enter as enter_user_namespace};

/// Time for which a process may run before the first contact.
const STOP_AFTER: Duration = Duration::from_secs(600);
/// Interval of the check whether the packet filter exists while a process runs.
const FILTER_LOOK: Duration = Duration::from_secs(2);
/// Interval of the check whether another gateway has taken the state directory over.
const LOOK: Duration = Duration::from_secs(1);
/// Pause before the name server is restarted after a failure.
const NAMES_PAUSE: Duration = Duration::from_secs(5);

/// Runs a supervisor if the arguments of this program request one, and returns its exit code.
///
/// Every binary that is used as [`HostConfig::supervisor`] must call this function first in `main`,
/// before it creates threads or a runtime. A process with several threads must not create
/// containers.
#[must_use]
pub fn supervise_if_asked(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    supervisor::supervise_if_asked(arguments)
}

/// The runtime of this machine.
#[derive(Debug)]
pub struct HostRuntime {
    host: Arc<Host>,
    capabilities: Capabilities,
}

impl HostRuntime {
    /// Opens a state directory with its running processes, and removes incomplete objects of a
    /// crash.
    ///
    /// Blocks on the disk. Errors: another runtime holds the directory, or the machine cannot run
    /// containers.
    pub fn open(config: HostConfig) -> Result<Arc<Self>, RuntimeError> {
        let held = RuntimeError::Other(format!(
            "cannot open {}: another runtime holds it",
            config.state_dir.display()
        ));
        Self::open_if_free(config)?.ok_or(held)
    }

    /// Opens a state directory as [`Self::open`] does. `None`: another runtime holds the directory,
    /// and nothing was changed.
    pub fn open_if_free(config: HostConfig) -> Result<Option<Arc<Self>>, RuntimeError> {
        let config = prepared(config)?;
        let Some(hold) = StateLock::take(&config.state_dir)? else { return Ok(None) };
        Self::opened(Host::open(config, hold)?).map(Some)
    }

    /// Opens a state directory that another runtime may hold. The other runtime then stops all
    /// operations, and its pending starts are revoked. The caller must have a newer session of this
    /// worker than the other runtime.
    pub fn take_over(config: HostConfig) -> Result<Arc<Self>, RuntimeError> {
        let config = prepared(config)?;
        let hold = StateLock::take_over(&config.state_dir)?;
        let host = Host::open(config, hold)?;
        host.revoke_unstarted()?;
        Self::opened(host)
    }

    /// Describes the worker of a state directory that another runtime may hold. Changes nothing.
    /// `None`: there is no worker yet.
    pub fn look(config: HostConfig) -> Result<Option<Look>, RuntimeError> {
        let config = prepared(config)?;
        let Some(marker) = find_marker(&config.state_dir)? else { return Ok(None) };
        let mounted = mounts::mount_table().map_err(|error| RuntimeError::io("list the mounts", error))?;
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

    /// Resolves when another gateway has taken the directory over. This runtime has then stopped
    /// all operations.
    pub async fn superseded(&self) {
        loop {
            let host = Arc::clone(&self.host);
            match blocking(move || host.hold.is_ours()).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::warn!(
                    error = error_chain(&error),
                    "cannot check the holder of the state directory"
                ),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Runs the background tasks that running containers need. The future never completes.
    pub async fn look_after_containers(self: Arc<Self>) {
        tokio::join!(
            self.clone().serve_names(),
            self.clone().keep_filter(),
            self.clone().guard_memory(),
            self.guard_disk()
        );
    }

    /// Restores the packet filter of private networks when another program has removed it while a
    /// process runs. The start of a container restores it too. Completes only if the machine has no
    /// filter.
    async fn keep_filter(self: Arc<Self>) {
        let mut known = network::uplinks();
        while let Some(pool) = self.host.pool_of_machine() {
            self.host.until_any_runs().await;
            let looked = blocking(move || {
                let kept = network::keep_filter(pool, &mut known);
                Ok::<_, RuntimeError>((kept, known))
            });
            match looked.await {
                Ok((kept, now)) => {
                    known = now;
                    if let Err(error) = kept {
                        tracing::warn!(%error, "cannot maintain the packet filter of private networks");
                    }
                }
                Err(error) => {
                    tracing::warn!(
                        error = error_chain(&error),
                        "cannot maintain the packet filter of private networks"
                    );
                    known = network::uplinks();
                }
            }
            tokio::time::sleep(FILTER_LOOK).await;
        }
    }

    /// Serves DNS queries of containers with a private network. Completes only if the machine has
    /// no interfaces to containers.
    async fn serve_names(self: Arc<Self>) {
        while let Some(pool) = self.host.pool_of_machine() {
            if let Err(error) = network::resolver::serve(pool).await {
                tracing::warn!(%error, "cannot answer DNS queries of containers: retrying");
            }
            tokio::time::sleep(NAMES_PAUSE).await;
        }
    }

    fn opened(host: Host) -> Result<Arc<Self>, RuntimeError> {
        if let Some(missing) = host.cgroups.first_missing(&ALL_LIMITS) {
            // An ordinary user seldom has control groups.
            if host.unprivileged {
                tracing::info!(missing, "this user has no control groups: containers have no limits");
            } else {
                tracing::warn!(missing, "cannot enforce all limits of containers");
            }
        }
        for (limit, value) in server::inherited::limits_out_of_reach() {
            tracing::warn!(
                limit,
                value,
                "cannot raise a limit of this process: processes of containers have a lower limit than usual"
            );
        }
        let mut capabilities =
            capabilities(&host.config.policy, host.network_pool, &host.cgroups, host.volumes.copy_on_write());
        match host.volumes.fixed_owners_reason() {
            _ if host.unprivileged => capabilities.features.push("user-namespace".to_owned()),
            None => capabilities.features.push("user-namespace".to_owned()),
            Some(why) => {
                tracing::warn!(why, "cannot use user namespaces: root of a container is root of this machine")
            }
        }
        Ok(Arc::new(Self { host: Arc::new(host), capabilities }))
    }
}

impl HostRuntime {
    /// Unmounts the volumes that no running container uses, for a program that ends for good or
    /// whose state directory will be removed. The volumes are mounted again when they are used.
    ///
    /// Directories that were returned before are no longer valid. Blocks on the disk.
    pub fn unmount_idle(&self) -> Result<(), RuntimeError> {
        self.host.unmount_idle()
    }

    /// Kills the further processes of containers whose main process has ended, for a program after
    /// which nothing may run.
    ///
    /// # Errors
    ///
    /// A state file cannot be read, or a process does not end within 10 s.
    ///
    /// Blocks on the kernel.
    pub fn kill_remaining(&self) -> Result<(), RuntimeError> {
        self.host.kill_remaining()
    }

    /// Kills all containers and unmounts all volumes, without reading the state directory, for a
    /// program that has lost it.
    ///
    /// Blocks on the kernel. Failures are logged.
    pub fn abandon(&self) {
        self.host.abandon();
    }
}

/// Description of a worker for a gateway that does not hold it.
#[derive(Debug, Clone)]
pub struct Look {
    /// The marker of the worker's incarnation.
    pub marker: Marker,
    /// The capacity of its disk.
    pub disk: Disk,
    /// Its capabilities. How copies are made is known only to the gateway that holds the worker.
    pub capabilities: Capabilities,
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

    async fn layer(&self, handle: VolumeHandle) -> Result<Option<Layer>, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || host.volumes.layer(handle)).await
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
                // A symbolic link in an input cannot leave the input.
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
            lock(&host.written).remove(&handle);
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
        process: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        Host::start(&self.host, container, process, spec).await
    }

    async fn process(&self, process: ProcessId) -> Result<ProcessState, RuntimeError> {
        Host::process(&self.host, process).await
    }

    async fn describe_container(
        &self,
        handle: ContainerHandle,
    ) -> Result<ContainerDescription, RuntimeError> {
        Host::describe_container(&self.host, handle).await
    }

    async fn container_of(&self, process: ProcessId) -> Result<ProcessContainer, RuntimeError> {
        Host::container_of(&self.host, process).await
    }

    async fn wait(&self, process: ProcessId) -> Result<Ended, RuntimeError> {
        let ended = Host::wait(&self.host, process).await?;
        if !matches!(ended, Ended::Exited { .. }) {
            return Ok(ended);
        }
        let host = Arc::clone(&self.host);
        let exceeded = blocking(move || host.exceeded_limit(process)).await?;
        Ok(exceeded.map_or(ended, Ended::Unknown))
    }

    async fn usage(&self, process: ProcessId) -> Result<Usage, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || host.usage(process)).await
    }

    async fn current_usage(
        &self,
        containers: &[ContainerHandle],
    ) -> Result<HashMap<ContainerHandle, CurrentUsage>, RuntimeError> {
        let (host, containers) = (Arc::clone(&self.host), containers.to_vec());
        blocking(move || host.current_usage(&containers)).await
    }

    async fn stop(&self, process: ProcessId, grace: Duration) -> Result<(), RuntimeError> {
        Host::stop(&self.host, process, grace).await
    }

    async fn accepts_connections(&self, main: ProcessId, port: u16) -> Result<bool, RuntimeError> {
        let process = self.host.find(main)?;
        let probe = move || supervisor::container_init::accepts_connections(&process.dir, port);
        blocking(move || probe().map_err(|error| RuntimeError::io("check a port of a container", error)))
            .await
    }

    async fn attach(&self, process: ProcessId, from: Offsets) -> Result<Attachment, RuntimeError> {
        Host::attach(&self.host, process, from).await
    }

    async fn offsets_at(&self, process: ProcessId, since: SystemTime) -> Result<Offsets, RuntimeError> {
        let process = self.host.find(process)?;
        let offset = move |name| {
            let path = process.file(name);
            Reader::open(&path).and_then(|spool| spool.offset_at(since)).map_err(at("read", &path))
        };
        blocking(move || Ok(Offsets { stdout: offset(paths::STDOUT)?, stderr: offset(paths::STDERR)? })).await
    }

    async fn record_gateway(
        &self,
        instance: GatewayInstance,
    ) -> Result<Option<GatewayInstance>, RuntimeError> {
        let host = Arc::clone(&self.host);
        blocking(move || {
            host.hold.check()?;
            Ok(host.record_gateway(instance))
        })
        .await
    }

    async fn contact(&self, sent: Duration, stop_after: Duration) -> Result<(), RuntimeError> {
        self.host.contact(sent, stop_after).await
    }
}
