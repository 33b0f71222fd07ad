//! State of the host runtime: open resources, and the contents of the state directory.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use domain::worker::StoreMark;
use domain::{ContainerHandle, GatewayInstance, MarkerId, ProcessId, VolumeHandle};
use runtime::{Disk, RuntimeError};
use tokio::sync::watch;

use super::capabilities::private_network;
use super::cgroups::Cgroups;
use super::config::HostConfig;
use super::filesystem::{self, at};
use super::mounts;
use super::network::Pool;
use super::persisted::Container;
use super::processes::Status;
use super::state_lock::StateLock;
use super::supervisor_protocol::Sockets;
use super::unprivileged;
use super::user_namespace::Range;
use super::volumes::Volumes;
use crate::util::keyed_locks::{Locks, lock};

/// State that the operations share.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) config: HostConfig,
    pub(super) hold: StateLock,
    /// The gateway instance that registered this worker before. `None`: it may still run.
    pub(super) ended_gateway: Option<GatewayInstance>,
    pub(super) boot: String,
    pub(super) marker: MarkerId,
    pub(super) volumes: Volumes,
    pub(super) cgroups: Cgroups,
    /// Whether this process is in the user namespace of an ordinary user.
    pub(super) unprivileged: bool,
    pub(super) sockets: Sockets,
    /// Whether the root layers of containers are in memory.
    pub(super) upper_in_memory: bool,
    /// The address pool of private networks. `None`: the worker has no private networks.
    pub(super) network_pool: Option<Pool>,
    pub(super) locks: Locks,
    /// The container of each process.
    pub(super) processes: Mutex<HashMap<ProcessId, ContainerHandle>>,
    /// Changes when a process is added.
    pub(super) process_added: watch::Sender<()>,
    /// Volumes that a container writes to through a separate mount, with their process, which may
    /// have ended.
    pub(super) written: Mutex<HashMap<VolumeHandle, ProcessId>>,
    /// Held while the end of a process without a supervisor is stored.
    pub(super) settling: Mutex<()>,
    /// The last contact, by `CLOCK_BOOTTIME`, and for how long processes may continue from then on.
    pub(super) contact: Mutex<Option<(Duration, Duration)>>,
}

impl Host {
    pub(super) fn open(config: HostConfig, hold: StateLock) -> Result<Self, RuntimeError> {
        let boot = boot()?;
        let marker = marker(&config.state_dir)?;
        let mounted = mounts::mount_table().map_err(|error| RuntimeError::io("list the mounts", error))?;
        let volumes = Volumes::open(&config.state_dir, &mounted)?;
        let upper_in_memory = !volumes.overlays();
        // Workers of one machine may share the runtime directory.
        let socket_dir = config.runtime_dir.join(marker.to_string());
        crate::make_private_directory(&socket_dir).map_err(at("make", &socket_dir))?;
        let sockets = Sockets::open(&socket_dir).map_err(at("open", &socket_dir))?;
        let cgroups = Cgroups::find(&mounted);
        cgroups.prepare(&mounted);
        let ended_gateway = hold.was_free().then(|| recorded_gateway(&config.state_dir)).flatten();
        let host = Self {
            hold,
            ended_gateway,
            boot,
            marker,
            volumes,
            cgroups,
            unprivileged: unprivileged::is_active(),
            sockets,
            upper_in_memory,
            network_pool: private_network(&config.policy),
            locks: Locks::new(),
            processes: Mutex::default(),
            process_added: watch::Sender::default(),
            written: Mutex::default(),
            settling: Mutex::default(),
            contact: Mutex::default(),
            config,
        };
        host.adopt()?;
        Ok(host)
    }

    /// The addresses of containers, if this machine has interfaces to them. Networks of an ordinary
    /// user are connected by a program.
    pub(super) fn pool_of_machine(&self) -> Option<Pool> {
        self.network_pool.filter(|_| !self.unprivileged)
    }

    /// The range of ids for a container. `None`: ids are those of the machine, because the
    /// container is privileged or the worker cannot map owners.
    pub(super) fn range(&self, container: &Container) -> Option<Range> {
        let confined = !container.privileged && self.volumes.fixed_owners_reason().is_none();
        confined.then(|| Range::of(container.handle))
    }

    /// Whether a container has mounts of its own for volumes with several layers. Otherwise it
    /// shows those of the machine.
    ///
    /// The mounts of an ordinary user's gateway end with the gateway, and a second writable mount
    /// of the next gateway would damage the volume.
    pub(super) fn mounts_layers(&self, range: Option<Range>) -> bool {
        self.unprivileged || range.is_some()
    }

    /// The directory of a volume in the mount namespace of the machine.
    pub(super) fn directory(&self, handle: VolumeHandle) -> Result<PathBuf, RuntimeError> {
        if self.refresh(handle)? {
            self.volumes.directory_while_written(handle)
        } else {
            self.volumes.directory(handle)
        }
    }

    /// Removes the gateway's mount of a volume that a container wrote to through another mount,
    /// because its view may be outdated. `true`: the container still writes, or may still mount the
    /// volume.
    pub(super) fn refresh(&self, handle: VolumeHandle) -> Result<bool, RuntimeError> {
        let mut written = lock(&self.written);
        let Some(process) = written.get(&handle).copied() else { return Ok(false) };
        let running = self.is_running(process)?;
        self.volumes.unmount(handle)?;
        if !running {
            written.remove(&handle);
        }
        Ok(running)
    }

    pub(super) fn is_running(&self, process: ProcessId) -> Result<bool, RuntimeError> {
        match self.find(process) {
            // A revoked process counts as ended, but its supervisor may still mount volumes.
            Ok(process) => Ok(!matches!(self.status(&process)?, Status::Ended(_))
                || process.is_revoked()? && process.is_alive()?),
            Err(_) => Ok(false),
        }
    }

    /// Records the gateway instance that registers this worker. Returns the one before, if it has
    /// ended.
    pub(super) fn record_gateway(&self, instance: GatewayInstance) -> Option<GatewayInstance> {
        let path = self.config.state_dir.join(GATEWAY);
        // The disk may be full, and the gateway must register nevertheless to free it.
        if let Err(error) = fs::write(&path, instance.to_string()) {
            tracing::warn!(%error, path = %path.display(), "cannot record the gateway: the next one waits for the TTL");
        }
        self.ended_gateway.filter(|ended| *ended != instance)
    }

    /// Reads the mark of the artifact store, which is stored with the marker.
    pub(super) fn store_mark(&self) -> Result<Option<StoreMark>, RuntimeError> {
        let path = self.config.state_dir.join(STORE_MARK);
        let found = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
        Ok(found.and_then(|text| String::from_utf8(text).ok()?.parse().ok()))
    }

    pub(super) fn set_store_mark(&self, mark: StoreMark) -> Result<(), RuntimeError> {
        let path = self.config.state_dir.join(STORE_MARK);
        filesystem::write_durably(&path, format!("{mark}\n").as_bytes()).map_err(at("write", &path))
    }

    /// Paths that are hidden from containers: those of Gantry, and those of the operator.
    pub(super) fn hidden(&self) -> Vec<PathBuf> {
        let own = [&self.config.state_dir, &self.config.runtime_dir];
        own.into_iter().chain(&self.config.masked).cloned().collect()
    }
}

/// An id of the boot of the machine, or of the start of the surrounding container.
pub(super) fn boot() -> Result<String, RuntimeError> {
    let read = |path: &Path| fs::read_to_string(path).map_err(at("read", path));
    let kernel = read(Path::new("/proc/sys/kernel/random/boot_id"))?;
    let first = read(Path::new("/proc/1/stat"))?;
    // The process name may contain any characters. The start time is the 20th field after it.
    let started = first.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    let started = started
        .ok_or_else(|| RuntimeError::Other("cannot parse /proc/1/stat: it has no start time".to_owned()))?;
    Ok(format!("{}/{started}", kernel.trim()))
}

/// Capacity of the file system of a directory.
pub(super) fn disk(path: &Path) -> Result<Disk, RuntimeError> {
    let found = rustix::fs::statvfs(path).map_err(|error| at("measure", path)(error.into()))?;
    Ok(Disk {
        total_bytes: found.f_blocks.saturating_mul(found.f_frsize),
        free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
    })
}

/// The file with the mark of the artifact store.
const STORE_MARK: &str = "store-mark";
/// File with the gateway instance that registered this worker last.
const GATEWAY: &str = "gateway";

fn recorded_gateway(state_dir: &Path) -> Option<GatewayInstance> {
    fs::read_to_string(state_dir.join(GATEWAY)).ok()?.parse().ok()
}

/// Reads the marker of the state directory, if there is one.
pub(super) fn find_marker(state_dir: &Path) -> Result<Option<MarkerId>, RuntimeError> {
    let path = state_dir.join("marker");
    let found = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
    Ok(found.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok()))
}

/// Reads or creates the marker of the state directory.
pub(super) fn marker(state_dir: &Path) -> Result<MarkerId, RuntimeError> {
    if let Some(marker) = find_marker(state_dir)? {
        return Ok(marker);
    }
    let path = state_dir.join("marker");
    let marker = MarkerId::new();
    filesystem::write_durably(&path, format!("{marker}\n").as_bytes()).map_err(at("write", &path))?;
    Ok(marker)
}
