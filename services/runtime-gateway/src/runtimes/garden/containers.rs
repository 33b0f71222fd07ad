//! Containers on a Garden worker.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use concourse::garden::{self, BindMount, Error, IpRange, Limits, NetOutRule};
use domain::workload::Network;
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use runtime::{ContainerDescription, ContainerSpec, Root, RuntimeError};

use crate::util::keyed_locks::lock;

use super::{Backend, Worker, errors, properties, volumes};

/// Number of attempts to create a container over the remains of an earlier one.
const CREATIONS: usize = 5;
const PAUSE: Duration = Duration::from_millis(50);
/// Pause between attempts to create a container on a full worker.
const FULL_PAUSE: Duration = Duration::from_millis(500);
/// Number of calls to destroy one container.
const DESTRUCTIONS: usize = 600;

/// Properties of a created container that later operations need.
#[derive(Debug, Clone)]
pub(super) struct ContainerProperties {
    pub(super) team: String,
    pub(super) directory: String,
    pub(super) user: Option<String>,
    pub(super) root: Option<VolumeHandle>,
    /// Whether the whole volume is the root file system.
    pub(super) whole: bool,
    pub(super) process: Option<ProcessId>,
}

impl ContainerProperties {
    /// `None`: the container was not created by Gantry, or has another handle.
    pub(super) fn read(handle: ContainerHandle, properties: &BTreeMap<String, String>) -> Option<Self> {
        if properties.get(properties::HANDLE) != Some(&handle.to_string()) {
            return None;
        }
        let property = |name: &str| properties.get(name).cloned();
        Some(Self {
            team: property(properties::TEAM).unwrap_or_default(),
            directory: property(properties::DIRECTORY).unwrap_or_else(|| "/".to_owned()),
            user: property(properties::USER),
            root: property(properties::ROOT).and_then(|root| root.parse().ok()),
            whole: properties.contains_key(properties::WHOLE),
            process: property(properties::PROCESS).and_then(|process| process.parse().ok()),
        })
    }
}

/// Checks a path: absolute, UTF-8, without `.`, `..` and double slashes.
fn path(path: &[u8]) -> Result<String, &'static str> {
    let text = std::str::from_utf8(path).map_err(|_| "a Garden worker supports only UTF-8 paths")?;
    let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
    match text.strip_prefix('/') {
        Some("") => Ok(text.to_owned()),
        Some(rest) if rest.split('/').all(plain) => Ok(text.to_owned()),
        Some(_) => Err("the path contains `.`, `..`, NUL or a double slash"),
        None => Err("the path is not absolute"),
    }
}

/// Checks a user: Garden supports a name, or numbers.
pub(super) fn user(user: &str) -> Result<String, RuntimeError> {
    match user.split_once(':') {
        Some((uid, gid)) if [uid, gid].iter().any(|id| id.parse::<u32>().is_err()) => {
            let message = format!("user {user:?}: a Garden worker supports a name or `uid:gid`");
            Err(RuntimeError::Unsupported(message))
        }
        _ => Ok(user.to_owned()),
    }
}

/// The validated parts of a specification.
struct ValidatedSpec {
    root: VolumeHandle,
    whole: bool,
    mounts: Vec<(VolumeHandle, String, bool)>,
    directory: String,
    user: Option<String>,
}

fn check(spec: &ContainerSpec, backend: Backend) -> Result<ValidatedSpec, RuntimeError> {
    let unsupported = |why: &str| RuntimeError::Unsupported(why.to_owned());
    let (root, whole) = match spec.root {
        Root::Volume(root) => (root, false),
        Root::WholeVolume(root) => (root, true),
        Root::Host => {
            return Err(unsupported("containers with the root file system of a Garden worker"));
        }
    };
    if spec.network_of.is_some() {
        return Err(unsupported("the network of another container"));
    }
    if !spec.local_names.is_empty() {
        return Err(unsupported("further names of its own address"));
    }
    match (spec.network, backend) {
        // Houdini has no isolation.
        (Network::Host, Backend::Houdini) => {}
        (Network::Private, Backend::Containerd | Backend::Guardian) => {}
        (Network::None, _) => return Err(unsupported("a private network with loopback only")),
        (Network::Host, _) => return Err(unsupported("the network of the worker")),
        (Network::Private, _) => return Err(unsupported("a private network")),
    }
    let mut mounts: Vec<(VolumeHandle, String, bool)> = Vec::new();
    for mount in &spec.mounts {
        let invalid = |why: &str| RuntimeError::InvalidMount {
            path: String::from_utf8_lossy(&mount.path).into_owned(),
            reason: why.to_owned(),
        };
        let at = path(&mount.path).map_err(invalid)?;
        if at == "/" {
            return Err(invalid("the path is the root directory"));
        }
        if mounts.iter().any(|(_, other, _)| *other == at) {
            return Err(invalid("another volume has this path"));
        }
        mounts.push((mount.volume, at, mount.read_only));
    }
    // Outer mounts first, because the worker mounts in this order.
    mounts.sort_by(|one, other| one.1.cmp(&other.1));
    let missing = |_| RuntimeError::DirectoryMissing(String::from_utf8_lossy(&spec.directory).into_owned());
    let directory = path(&spec.directory).map_err(missing)?;
    Ok(ValidatedSpec { root, whole, mounts, directory, user: spec.user.as_deref().map(user).transpose()? })
}

fn limits(limits: domain::workload::Limits) -> Limits {
    let mut on_the_wire = Limits::default();
    // Garden counts 1024 shares per processor.
    on_the_wire.cpu_limits.limit_in_shares =
        limits.cpu_millis.map_or(0, |millis| (millis.saturating_mul(1024) / 1000).max(2));
    on_the_wire.memory_limits.limit_in_bytes = limits.memory_bytes.unwrap_or(0);
    on_the_wire.pid_limits.max = limits.pids.unwrap_or(0);
    on_the_wire
}

impl Worker {
    /// Returns the path of each volume of a container on the worker. Writable volumes and the root
    /// get the privilege of the container.
    async fn directories(
        &self,
        checked: &ValidatedSpec,
        privileged: bool,
    ) -> Result<HashMap<VolumeHandle, String>, RuntimeError> {
        let writable: BTreeSet<_> = checked
            .mounts
            .iter()
            .filter(|(_, _, read_only)| !read_only)
            .map(|(volume, _, _)| *volume)
            .chain([checked.root])
            .collect();
        let all: BTreeSet<_> =
            checked.mounts.iter().map(|(volume, _, _)| *volume).chain(writable.clone()).collect();
        let found = all.into_iter().map(async |handle| {
            let fresh = lock(&self.fresh).remove(&handle);
            let volume = match fresh {
                Some(volume) => volume,
                None => self.volume(handle).await?,
            };
            if writable.contains(&handle) && volume.privileged != privileged {
                let changed =
                    self.volumes.set_privileged(&volumes::name(handle.to_string())?, privileged).await;
                changed.map_err(|error| errors::volume("change the owners of a volume", handle, error))?;
            }
            Ok::<_, RuntimeError>((handle, volume.path))
        });
        Ok(futures::future::try_join_all(found).await?.into_iter().collect())
    }

    pub(super) async fn create_container(
        &self,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        if lock(&self.containers).contains_key(&handle) {
            return Ok(());
        }
        let checked = check(&spec, self.backend)?;
        let directories = self.directories(&checked, spec.privileged).await?;
        let directory = |volume: &VolumeHandle| directories.get(volume).cloned().unwrap_or_default();
        let bind_mounts = checked.mounts.iter().map(|(volume, path, read_only)| BindMount {
            src_path: directory(volume),
            dst_path: path.clone(),
            mode: u8::from(!read_only),
            origin: 0,
        });
        let mut properties = BTreeMap::from([
            (properties::KIND.to_owned(), properties::CONTAINER.to_owned()),
            (properties::HANDLE.to_owned(), handle.to_string()),
            (properties::TEAM.to_owned(), spec.team.clone()),
            (properties::DIRECTORY.to_owned(), checked.directory.clone()),
            (properties::ROOT.to_owned(), checked.root.to_string()),
        ]);
        if let Some(user) = &checked.user {
            properties.insert(properties::USER.to_owned(), user.clone());
        }
        if checked.whole {
            properties.insert(properties::WHOLE.to_owned(), properties::YES.to_owned());
        }
        if !spec.note.is_empty() {
            properties.insert(properties::NOTE.to_owned(), spec.note);
        }
        let made = ContainerProperties {
            team: spec.team,
            directory: checked.directory.clone(),
            user: checked.user.clone(),
            root: Some(checked.root),
            whole: checked.whole,
            process: None,
        };
        let environment = self.environment(&made, spec.environment).await?;
        let below = if checked.whole { "" } else { "/rootfs" };
        // On a containerd worker, a container with any rule has a network.
        let everywhere = IpRange { start: "0.0.0.0".to_owned(), end: "255.255.255.255".to_owned() };
        let request = garden::ContainerSpec {
            handle: handle.to_string(),
            rootfs: format!("raw://{}{below}", directory(&checked.root)),
            bind_mounts: bind_mounts.collect(),
            properties,
            env: environment,
            privileged: spec.privileged,
            limits: limits(spec.limits),
            netout_rules: vec![NetOutRule { networks: vec![everywhere], ..NetOutRule::default() }],
            ..garden::ContainerSpec::default()
        };
        let made = ContainerProperties { process: self.make(handle, &request).await?, ..made };
        lock(&self.containers).insert(handle, made);
        Ok(())
    }

    /// Creates a container, and returns its process. An existing container whose process was or may
    /// have been started stays as it is. Any other existing container is replaced, because its
    /// creation may have failed half-way.
    async fn make(
        &self,
        handle: ContainerHandle,
        request: &garden::ContainerSpec,
    ) -> Result<Option<ProcessId>, RuntimeError> {
        // Houdini would silently replace an existing container.
        let mut exists = self.backend == Backend::Houdini && self.exists(handle).await?;
        let begun = Instant::now();
        let mut left = CREATIONS;
        while left > 0 {
            left -= 1;
            if exists {
                if let Some(process) = self.properties(handle).await?.and_then(|made| made.process) {
                    return Ok(Some(process));
                }
                self.destroy_on_worker(handle).await?;
            }
            match self.garden.create(request).await {
                Ok(_) => return Ok(None),
                Err(Error::Exists(_)) => exists = true,
                // The container is incomplete, or it was created and the answer was lost.
                Err(Error::Connection { sent: true, .. }) => {
                    tokio::time::sleep(PAUSE).await;
                    exists = true;
                }
                // A container may be about to be destroyed.
                Err(Error::Full(_)) if begun.elapsed() < self.config.full_patience => {
                    tokio::time::sleep(FULL_PAUSE).await;
                    left += 1;
                }
                Err(error) => {
                    // Some workers keep a container that they cannot start.
                    self.destroy_on_worker(handle).await?;
                    return Err(errors::garden("create a container", error));
                }
            }
        }
        Err(RuntimeError::Other(
            "the worker cannot create a container: it always finds an existing one".to_owned(),
        ))
    }

    /// Whether the container exists on the worker. Only a list is reliable on every kind of worker.
    pub(super) async fn exists(&self, handle: ContainerHandle) -> Result<bool, RuntimeError> {
        let own = BTreeMap::from([(properties::HANDLE.to_owned(), handle.to_string())]);
        let listed = self.garden.list(&own).await;
        let listed = listed.map_err(|error| errors::garden("list containers", error))?;
        Ok(listed.contains(&handle.to_string()))
    }

    /// Reads the properties of a container. `None`: the container does not exist, or was not
    /// created by Gantry.
    pub(super) async fn properties(
        &self,
        handle: ContainerHandle,
    ) -> Result<Option<ContainerProperties>, RuntimeError> {
        Ok(self
            .raw_properties(handle)
            .await?
            .and_then(|properties| ContainerProperties::read(handle, &properties)))
    }

    pub(super) async fn raw_properties(
        &self,
        handle: ContainerHandle,
    ) -> Result<Option<BTreeMap<String, String>>, RuntimeError> {
        match self.garden.properties(&handle.to_string()).await {
            Ok(properties) => Ok(Some(properties)),
            Err(Error::ContainerNotFound(_)) => Ok(None),
            Err(error) => Err(errors::garden("read the properties of a container", error)),
        }
    }

    pub(super) async fn describe_container(
        &self,
        handle: ContainerHandle,
    ) -> Result<ContainerDescription, RuntimeError> {
        let found = self.raw_properties(handle).await?;
        let found = found.and_then(|found| Some((ContainerProperties::read(handle, &found)?, found)));
        let (made, properties) = found.ok_or(RuntimeError::ContainerNotFound(handle))?;
        Ok(ContainerDescription {
            team: made.team,
            note: properties.get(properties::NOTE).cloned().unwrap_or_default(),
            main: made.process,
            others: properties::further_processes(&properties).collect(),
        })
    }

    pub(super) async fn list_containers(&self) -> Result<Vec<ContainerHandle>, RuntimeError> {
        // Only one property, because a containerd worker lists the containers that have any of
        // several.
        let ours = BTreeMap::from([(properties::KIND.to_owned(), properties::CONTAINER.to_owned())]);
        let listed = self.garden.list(&ours).await;
        let listed = listed.map_err(|error| errors::garden("list containers", error))?;
        let mut handles: Vec<_> = listed.iter().filter_map(|handle| handle.parse().ok()).collect();
        handles.sort_unstable();
        Ok(handles)
    }

    pub(super) async fn destroy_container(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        let known = lock(&self.containers).get(&handle).cloned();
        let known = match known {
            Some(known) => Some(known),
            None => self.properties(handle).await?,
        };
        self.destroy_on_worker(handle).await?;
        // The intent is removed last. While it exists, the process is not started again.
        if let Some(root) = known.and_then(|made| made.process.and(made.root)) {
            let volume = volumes::name(root.to_string())?;
            match self.volumes.set_property(&volume, properties::PROCESS, properties::NO_PROCESS).await {
                Ok(()) | Err(concourse::baggageclaim::Error::NotFound) => {}
                Err(error) => return Err(errors::volume("remove an intent", root, error)),
            }
        }
        lock(&self.containers).remove(&handle);
        self.forget_bulk_info(handle).await;
        let gone: Vec<_> = {
            let mut processes = lock(&self.processes);
            let ids: Vec<_> = processes
                .iter()
                .filter(|(_, process)| process.container == handle)
                .map(|(id, _)| *id)
                .collect();
            ids.iter().filter_map(|id| processes.remove(id)).collect()
        };
        for process in gone {
            process.gone();
            crate::util::blocking::blocking(move || process.remove_spools()).await?;
        }
        Ok(())
    }

    /// Destroys a container, and returns when the worker no longer lists it.
    pub(super) async fn destroy_on_worker(&self, handle: ContainerHandle) -> Result<(), RuntimeError> {
        for _ in 0..DESTRUCTIONS {
            match self.garden.destroy(&handle.to_string()).await {
                Ok(()) | Err(Error::ContainerNotFound(_)) => return Ok(()),
                // Another client destroys the container, or an earlier call of this gateway whose
                // answer was lost.
                Err(Error::BeingDestroyed(_) | Error::Connection { sent: true, .. }) => {
                    if !self.exists(handle).await? {
                        return Ok(());
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(errors::garden("destroy a container", error)),
            }
        }
        Err(RuntimeError::Other("the worker does not complete the destruction of the container".to_owned()))
    }
}
