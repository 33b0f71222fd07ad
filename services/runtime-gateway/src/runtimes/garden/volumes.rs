//! Volumes on a Garden worker.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use concourse::baggageclaim::{self, Client, Encoding, Error, Strategy, StreamIn, VolumeRequest};
use domain::worker::StoreMark;
use domain::{ArtifactId, MarkerId, VolumeHandle};
use runtime::{Notes, RuntimeError, VolumeSource, WorkerProvided};

use crate::util::keyed_locks::lock;

use super::{Worker, errors, properties, tar_util};

const MARKER_VOLUME: &str = "gantry-marker";
/// Suffix of the name of a sidecar.
const SIDECAR: &str = ".manifest";
/// Number of volumes that one call destroys.
pub(super) const DESTROYED_AT_ONCE: usize = 100;
/// The name of the file in a sidecar.
pub(super) const MANIFEST: &str = "manifest";

pub(super) fn name(name: impl Into<String>) -> Result<baggageclaim::Handle, RuntimeError> {
    baggageclaim::Handle::new(name).map_err(|error| RuntimeError::Other(error.to_string()))
}

/// The name of the volume that holds the manifest of another volume.
pub(super) fn sidecar(handle: VolumeHandle) -> Result<baggageclaim::Handle, RuntimeError> {
    name(format!("{handle}{SIDECAR}"))
}

fn properties<const N: usize>(of: [(&str, String); N]) -> BTreeMap<String, String> {
    of.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn failed(operation: &str) -> impl Fn(Error) -> RuntimeError {
    let operation = operation.to_owned();
    move |error| match error {
        Error::Unreachable(_) | Error::Lost(_) => {
            RuntimeError::Io { operation: operation.clone(), source: std::io::Error::other(error) }
        }
        error => {
            RuntimeError::Other(format!("the worker cannot {operation}: {}", domain::error_chain(&error)))
        }
    }
}

/// Reads the marker of a worker, or creates one. Two gateways that create one at the same time
/// agree, because the stored one counts.
pub(super) async fn make_marker(client: &Client) -> Result<MarkerId, RuntimeError> {
    let volume = name(MARKER_VOLUME)?;
    let read = async || match client.get(&volume).await {
        Ok(volume) => Ok(Some(volume.properties.get(properties::MARKER_ID).and_then(|id| id.parse().ok()))),
        Err(Error::NotFound) => Ok(None),
        Err(error) => Err(failed("read its marker")(error)),
    };
    match read().await? {
        Some(Some(marker)) => return Ok(marker),
        // The creation was interrupted, or the volume belongs to another program. Gantry now sets
        // its marker.
        Some(None) => {
            let marker = MarkerId::new().to_string();
            let set = client.set_property(&volume, properties::MARKER_ID, &marker).await;
            set.map_err(failed("set its marker"))?;
        }
        None => {
            let mut request = VolumeRequest::new(volume.clone(), Strategy::Empty);
            let id = MarkerId::new().to_string();
            request.properties =
                properties([(properties::KIND, properties::MARKER.to_owned()), (properties::MARKER_ID, id)]);
            match client.create(&request).await {
                Ok(_) | Err(Error::AlreadyExists) => {}
                Err(error) => return Err(failed("create its marker")(error)),
            }
        }
    }
    let marker = read().await?.flatten();
    marker.ok_or_else(|| RuntimeError::Other("the worker does not keep its marker".to_owned()))
}

/// Reads the mark of the artifact store that owns the volumes.
pub(super) async fn store_mark(client: &Client) -> Result<Option<StoreMark>, RuntimeError> {
    match client.get(&name(MARKER_VOLUME)?).await {
        Ok(volume) => Ok(volume.properties.get(properties::STORE).and_then(|mark| mark.parse().ok())),
        Err(Error::NotFound) => Ok(None),
        Err(error) => Err(failed("read its marker")(error)),
    }
}

pub(super) async fn set_store_mark(client: &Client, mark: StoreMark) -> Result<(), RuntimeError> {
    let set = client.set_property(&name(MARKER_VOLUME)?, properties::STORE, &mark.to_string()).await;
    set.map_err(failed("set its marker"))
}

/// Selects the encoding of archives: the configured one, or the best that the worker supports. The
/// probe reads the empty marker volume.
pub(super) async fn encoding(client: &Client, chosen: Option<Encoding>) -> Result<Encoding, RuntimeError> {
    let volume = name(MARKER_VOLUME)?;
    // Raw is faster than compression if the network is faster than one core compresses, which is
    // usual for workers.
    let best = [Encoding::Raw, Encoding::Zstd, Encoding::Gzip];
    let choice = chosen.as_ref().map_or(&best[..], std::slice::from_ref);
    for encoding in choice {
        match client.stream_out(&volume, "", *encoding).await {
            Ok(_) => return Ok(*encoding),
            Err(Error::Refused { .. }) => {}
            Err(error) => return Err(failed("stream a volume out")(error)),
        }
    }
    let words: Vec<_> = choice.iter().map(|encoding| encoding.as_str()).collect();
    Err(RuntimeError::Unsupported(format!("the worker supports no archives in {}", words.join(", "))))
}

/// Converts a path below a volume for the protocol.
pub(super) fn text(path: &Path) -> Result<&str, RuntimeError> {
    path.to_str().ok_or_else(|| {
        RuntimeError::Unsupported(format!("a Garden worker supports only UTF-8 paths, not {path:?}"))
    })
}

impl Worker {
    pub(super) async fn volume(&self, handle: VolumeHandle) -> Result<baggageclaim::Volume, RuntimeError> {
        let found = self.volumes.get(&name(handle.to_string())?).await;
        found.map_err(|error| errors::volume("find a volume", handle, error))
    }

    pub(super) async fn create_volume(
        &self,
        handle: VolumeHandle,
        source: VolumeSource,
    ) -> Result<(), RuntimeError> {
        let mut own = properties([(properties::KIND, properties::VOLUME.to_owned())]);
        let (strategy, parent) = match source {
            VolumeSource::Empty => (Strategy::Empty, None),
            VolumeSource::WorkerProvided(what) => (self.import(&what)?, None),
            // The volume driver of the worker decides whether hard links stay intact.
            VolumeSource::CopyOnWrite { parent } | VolumeSource::CopyOnWriteLinked { parent, .. } => {
                own.insert(properties::PARENT.to_owned(), parent.to_string());
                (Strategy::Cow { volume: name(parent.to_string())? }, Some(parent))
            }
            VolumeSource::Copy { original } => {
                // The mounted path, which shows all layers.
                let path = self.volume(original).await?.path;
                (Strategy::Import { path, follow_symlinks: false }, None)
            }
        };
        let mut request = VolumeRequest::new(name(handle.to_string())?, strategy);
        request.properties = own;

        lock(&self.creating).insert(handle, parent);
        let created = self.volumes.create_with_outcome(&request).await;
        lock(&self.creating).remove(&handle);
        match (created, parent) {
            (Ok((volume, outcome)), _) => {
                // The call does not wait for the deletion of the outcome.
                let stopping = self.stopping.clone();
                self.tasks.spawn(async move {
                    tokio::select! {
                        () = outcome.delete() => {}
                        () = stopping.cancelled() => {}
                    }
                });
                lock(&self.fresh).insert(handle, volume);
                Ok(())
            }
            (Err(Error::AlreadyExists), _) => Ok(()),
            (Err(error @ Error::Refused { .. }), Some(parent)) => {
                self.volume(parent).await?;
                Err(errors::volume("create a volume", handle, error))
            }
            (Err(error), _) => Err(errors::volume("create a volume", handle, error)),
        }
    }

    /// The strategy by which the worker copies provided contents.
    fn import(&self, what: &WorkerProvided) -> Result<Strategy, RuntimeError> {
        let (path, follow_symlinks) = match what {
            WorkerProvided::ResourceType(name) => {
                let known = self.config.resource_types.iter().find(|known| known.name == *name);
                (known.map(|known| &known.path), false)
            }
            // Certificates are often links into the worker's system.
            WorkerProvided::Certs => (self.config.certs_path.as_ref(), true),
        };
        match path {
            Some(path) => Ok(Strategy::Import { path: path.clone(), follow_symlinks }),
            None => Err(RuntimeError::Unsupported(format!("the worker does not provide {what:?}"))),
        }
    }

    pub(super) async fn note_artifact(
        &self,
        handle: VolumeHandle,
        artifact: ArtifactId,
    ) -> Result<(), RuntimeError> {
        let (volume, artifact) = (name(handle.to_string())?, artifact.to_string());
        let set = self.volumes.set_property(&volume, properties::ARTIFACT, &artifact).await;
        set.map_err(|error| errors::volume("store the artifact of a volume", handle, error))
    }

    pub(super) async fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError> {
        let properties = self.volume(handle).await?.properties;
        let parent = properties.get(properties::PARENT).and_then(|parent| parent.parse().ok());
        let artifact = properties.get(properties::ARTIFACT).and_then(|artifact| artifact.parse().ok());
        Ok(Notes { parent, artifact })
    }

    /// Creates directories by unpacking an empty archive into each. Existing directories stay
    /// unchanged.
    pub(super) async fn make_directories(
        &self,
        handle: VolumeHandle,
        directories: &[PathBuf],
    ) -> Result<(), RuntimeError> {
        self.volume(handle).await?;
        let above = |path: &PathBuf| directories.iter().any(|other| other != path && other.starts_with(path));
        let mut made = HashSet::new();
        for directory in directories.iter().filter(|path| !above(path)) {
            if !made.insert(directory) {
                continue;
            }
            let mut how = StreamIn::new(self.encoding);
            text(directory)?.clone_into(&mut how.path);
            let archive = baggageclaim::Encoded::new(self.encoding, std::io::Cursor::new(tar_util::empty()))
                .map_err(|error| RuntimeError::io("encode an archive", error))?;
            let streamed = self.volumes.stream_in(&name(handle.to_string())?, &how, archive).await;
            streamed.map_err(|error| errors::volume("create directories", handle, error))?;
        }
        Ok(())
    }

    /// Destroys volumes and their manifests with as few calls as possible. One call destroys its
    /// volumes concurrently, so it must not name a child and its parent. If the worker destroyed a
    /// parent before its children, the children would become empty. Returns the volumes that were
    /// not destroyed, with the error of each.
    pub(super) async fn destroy_volumes(
        &self,
        handles: &[VolumeHandle],
    ) -> Vec<(VolumeHandle, RuntimeError)> {
        let mut left = Vec::new();
        let mut rest = handles;
        lock(&self.fresh).retain(|handle, _| !handles.contains(handle));
        while let Some(first) = rest.first() {
            let children = match self.children(rest).await {
                Ok(children) => children,
                Err(error) => {
                    left.push((*first, error));
                    rest = &rest[1..];
                    continue;
                }
            };
            let of = |handle| children.iter().filter(move |(parent, _)| *parent == handle);
            let before = |at: usize| of(rest[at]).any(|(_, child)| rest[..at].contains(child));
            let (these, others) = rest.split_at((1..rest.len()).find(|at| before(*at)).unwrap_or(rest.len()));
            let (parents, these): (Vec<_>, Vec<_>) =
                these.iter().partition(|handle| of(**handle).next().is_some());
            left.extend(parents.into_iter().map(|handle| (handle, RuntimeError::HasChildren(handle))));
            if let Err(error) = self.destroy_together(&these).await {
                tracing::debug!(
                    error = domain::error_chain(&error),
                    "the worker cannot destroy several volumes at once: volumes are destroyed one by one"
                );
                for handle in these {
                    if let Err(error) = self.destroy_alone(handle).await {
                        left.push((handle, error));
                    }
                }
            }
            rest = others;
        }
        left
    }

    /// Returns existing children and children in creation of these volumes, as pairs of parent and
    /// child.
    async fn children(
        &self,
        handles: &[VolumeHandle],
    ) -> Result<HashSet<(VolumeHandle, VolumeHandle)>, RuntimeError> {
        let making = lock(&self.creating).clone();
        let listed = match handles {
            [one] => self.volumes.list(&[(properties::PARENT, &one.to_string())]).await,
            _ => self.volumes.list(&[(properties::KIND, properties::VOLUME)]).await,
        };
        let listed = listed.map_err(failed("list children of volumes"))?;
        let pair = |volume: &baggageclaim::Volume| {
            let parent = volume.properties.get(properties::PARENT)?.parse().ok()?;
            Some((parent, volume.handle.parse().ok()?))
        };
        let making = making.into_iter().filter_map(|(child, parent)| Some((parent?, child)));
        let asked: HashSet<_> = handles.iter().copied().collect();
        let all = listed.iter().filter_map(pair).chain(making);
        Ok(all.filter(|(parent, _)| asked.contains(parent)).collect())
    }

    /// Destroys volumes with one call. After an error, some of them may be destroyed.
    async fn destroy_together(&self, handles: &[VolumeHandle]) -> Result<(), RuntimeError> {
        if handles.is_empty() {
            return Ok(());
        }
        let mut volumes = Vec::with_capacity(2 * handles.len());
        for handle in handles {
            volumes.extend([sidecar(*handle)?, name(handle.to_string())?]);
        }
        self.volumes.destroy_many(&volumes).await.map_err(failed("destroy volumes"))
    }

    async fn destroy_alone(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        for volume in [sidecar(handle)?, name(handle.to_string())?] {
            match self.volumes.destroy(&volume).await {
                Ok(()) | Err(Error::NotFound) => {}
                // The destruction may be complete or in progress. A volume that could not be
                // removed completely is unlisted.
                Err(_) => match self.volumes.destroy(&volume).await {
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => return Err(errors::volume("destroy a volume", handle, error)),
                },
            }
        }
        Ok(())
    }

    /// Lists all volumes of Gantry, including those in creation. Also destroys manifests without a
    /// volume.
    pub(super) async fn list_volumes(&self) -> Result<Vec<VolumeHandle>, RuntimeError> {
        let making: Vec<_> = lock(&self.creating).keys().copied().collect();
        let list = async |kind| {
            let listed = self.volumes.list(&[(properties::KIND, kind)]).await;
            listed.map_err(failed("list volumes"))
        };
        // This order is required, because a sidecar is created after its volume.
        let sidecars = list(properties::SIDECAR).await?;
        let volumes = list(properties::VOLUME).await?;
        let handles = volumes.iter().filter_map(|volume| volume.handle.parse().ok());
        let handles: HashSet<VolumeHandle> = handles.chain(making).collect();
        for orphan in sidecars {
            let volume = orphan.handle.strip_suffix(SIDECAR).and_then(|handle| handle.parse().ok());
            if volume.is_none_or(|volume| !handles.contains(&volume))
                && let Err(error) = self.volumes.destroy(&name(orphan.handle)?).await
            {
                tracing::warn!(
                    error = domain::error_chain(&error),
                    "cannot destroy the manifest of a destroyed volume"
                );
            }
        }
        let mut handles: Vec<_> = handles.into_iter().collect();
        handles.sort_unstable();
        Ok(handles)
    }
}
