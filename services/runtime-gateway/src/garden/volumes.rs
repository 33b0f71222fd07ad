//! Volumes.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use concourse::baggageclaim::{self, Client, Encoding, Error, Strategy, StreamIn, VolumeRequest};
use domain::{MarkerId, VolumeHandle};
use runtime::{RuntimeError, VolumeSource};

use crate::locks::held;

use super::{Worker, archives, marks, refusals};

const MARKER_VOLUME: &str = "gantry-marker";
const CERTS_VOLUME: &str = "gantry-certs";
/// What a sidecar's name has more than its volume's.
const SIDECAR: &str = ".manifest";
/// The file in a sidecar.
pub(super) const MANIFEST: &str = "manifest";

pub(super) fn name(name: impl Into<String>) -> Result<baggageclaim::Handle, RuntimeError> {
    baggageclaim::Handle::new(name).map_err(|error| RuntimeError::Other(error.to_string()))
}

/// The name of the volume that has the manifest of another.
pub(super) fn sidecar(handle: VolumeHandle) -> Result<baggageclaim::Handle, RuntimeError> {
    name(format!("{handle}{SIDECAR}"))
}

fn properties<const N: usize>(of: [(&str, String); N]) -> BTreeMap<String, String> {
    of.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn failed(doing: &str) -> impl Fn(Error) -> RuntimeError {
    let doing = doing.to_owned();
    move |error| match error {
        Error::Unreachable(_) | Error::Lost(_) => {
            RuntimeError::Io { doing: doing.clone(), source: std::io::Error::other(error) }
        }
        error => RuntimeError::Other(format!("the worker could not {doing}: {}", domain::chain(&error))),
    }
}

/// Reads the marker of a worker, and makes it when there is none. Two that make it at a time agree: what the worker has counts.
pub(super) async fn make_marker(client: &Client) -> Result<MarkerId, RuntimeError> {
    let volume = name(MARKER_VOLUME)?;
    let read = async || match client.get(&volume).await {
        Ok(volume) => Ok(Some(volume.properties.get(marks::MARKER_ID).and_then(|id| id.parse().ok()))),
        Err(Error::NotFound) => Ok(None),
        Err(error) => Err(failed("read its marker")(error)),
    };
    match read().await? {
        Some(Some(marker)) => return Ok(marker),
        // It was cut short, or is somebody else's: from now on it is ours.
        Some(None) => {
            let marker = MarkerId::new().to_string();
            let set = client.set_property(&volume, marks::MARKER_ID, &marker).await;
            set.map_err(failed("set its marker"))?;
        }
        None => {
            let mut request = VolumeRequest::new(volume.clone(), Strategy::Empty);
            let id = MarkerId::new().to_string();
            request.properties =
                properties([(marks::KIND, marks::MARKER.to_owned()), (marks::MARKER_ID, id)]);
            match client.create(&request).await {
                Ok(_) | Err(Error::AlreadyExists) => {}
                Err(error) => return Err(failed("make its marker")(error)),
            }
        }
    }
    let marker = read().await?.flatten();
    marker.ok_or_else(|| RuntimeError::Other("the worker's marker does not stay".to_owned()))
}

/// Makes a volume of the certificates that are at `path` on the worker, unless there is one.
pub(super) async fn import_certs(client: &Client, path: &str) -> Result<(), RuntimeError> {
    let strategy = Strategy::Import { path: path.to_owned(), follow_symlinks: true };
    let mut request = VolumeRequest::new(name(CERTS_VOLUME)?, strategy);
    request.properties = properties([(marks::KIND, marks::CERTS.to_owned())]);
    match client.create(&request).await {
        Ok(_) | Err(Error::AlreadyExists) => Ok(()),
        Err(error) => Err(failed("import its certificates")(error)),
    }
}

/// Where the volume of the certificates is on the worker.
pub(super) async fn certs(client: &Client) -> Result<String, RuntimeError> {
    Ok(client.get(&name(CERTS_VOLUME)?).await.map_err(failed("find its certificates"))?.path)
}

/// The best way to move archives that the worker knows. It is asked for its marker, which is empty.
pub(super) async fn best_encoding(client: &Client) -> Result<Encoding, RuntimeError> {
    let volume = name(MARKER_VOLUME)?;
    // Raw beats what compresses wherever the network is faster than one core compresses, which is nearly everywhere a worker is.
    for encoding in [Encoding::Raw, Encoding::Zstd] {
        match client.stream_out(&volume, "", encoding).await {
            Ok(_) => return Ok(encoding),
            Err(Error::Refused { .. }) => {}
            Err(error) => return Err(failed("stream a volume out")(error)),
        }
    }
    Ok(Encoding::Gzip)
}

/// A path below a volume as it stands on the wire.
pub(super) fn text(path: &Path) -> Result<&str, RuntimeError> {
    path.to_str().ok_or_else(|| {
        RuntimeError::Unsupported(format!("a Garden worker takes only paths in UTF-8, not {path:?}"))
    })
}

impl Worker {
    pub(super) async fn volume(&self, handle: VolumeHandle) -> Result<baggageclaim::Volume, RuntimeError> {
        let found = self.volumes.get(&name(handle.to_string())?).await;
        found.map_err(|error| refusals::volume("find a volume", handle, error))
    }

    pub(super) async fn create_volume(
        &self,
        handle: VolumeHandle,
        source: VolumeSource,
    ) -> Result<(), RuntimeError> {
        let mut own = properties([(marks::KIND, marks::VOLUME.to_owned())]);
        let (strategy, parent) = match source {
            VolumeSource::Empty => (Strategy::Empty, None),
            VolumeSource::CopyOnWrite { parent } => {
                own.insert(marks::PARENT.to_owned(), parent.to_string());
                (Strategy::Cow { volume: name(parent.to_string())? }, Some(parent))
            }
        };
        let mut request = VolumeRequest::new(name(handle.to_string())?, strategy);
        request.properties = own;

        held(&self.creating).insert(handle);
        let created = self.volumes.create_remembered(&request).await;
        held(&self.creating).remove(&handle);
        match (created, parent) {
            (Ok((volume, remembered)), _) => {
                // Nobody waits for the worker to forget how it went.
                let stopping = self.stopping.clone();
                self.tasks.spawn(async move {
                    tokio::select! {
                        () = remembered.forget() => {}
                        () = stopping.cancelled() => {}
                    }
                });
                held(&self.fresh).insert(handle, volume);
                Ok(())
            }
            (Err(Error::AlreadyExists), _) => Ok(()),
            (Err(error @ Error::Refused { .. }), Some(parent)) => {
                self.volume(parent).await?;
                Err(refusals::volume("make a volume", handle, error))
            }
            (Err(error), _) => Err(refusals::volume("make a volume", handle, error)),
        }
    }

    /// Makes directories, without a change to those that are there: an empty archive is unpacked in each.
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
            // What does not compress needs no encoding, and gzip is what every worker knows.
            let mut how = StreamIn::new(self.encoding);
            text(directory)?.clone_into(&mut how.path);
            let archive = baggageclaim::Encoded::new(self.encoding, std::io::Cursor::new(archives::empty()))
                .map_err(|error| RuntimeError::io("encode an archive", error))?;
            let streamed = self.volumes.stream_in(&name(handle.to_string())?, &how, archive).await;
            streamed.map_err(|error| refusals::volume("make directories", handle, error))?;
        }
        Ok(())
    }

    /// Destroys a volume, the manifest beside it first. The worker would destroy a parent before its children, which then are empty.
    pub(super) async fn destroy_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        let children = self.volumes.list(&[(marks::PARENT, &handle.to_string())]).await;
        if !children.map_err(failed("list children of a volume"))?.is_empty() {
            return Err(RuntimeError::HasChildren(handle));
        }
        held(&self.fresh).remove(&handle);
        for volume in [sidecar(handle)?, name(handle.to_string())?] {
            match self.volumes.destroy(&volume).await {
                Ok(()) | Err(Error::NotFound) => {}
                // It may be done, or under way.
                Err(Error::Lost(_)) => match self.volumes.destroy(&volume).await {
                    Ok(()) | Err(Error::NotFound) => {}
                    Err(error) => return Err(refusals::volume("destroy a volume", handle, error)),
                },
                Err(error) => return Err(refusals::volume("destroy a volume", handle, error)),
            }
        }
        Ok(())
    }

    /// All volumes that have our mark, and those that are being made. A manifest whose volume is gone goes as well.
    pub(super) async fn list_volumes(&self) -> Result<Vec<VolumeHandle>, RuntimeError> {
        let making = held(&self.creating).clone();
        let list = async |kind| {
            let listed = self.volumes.list(&[(marks::KIND, kind)]).await;
            listed.map_err(failed("list volumes"))
        };
        // In this order: a sidecar is made after its volume.
        let sidecars = list(marks::SIDECAR).await?;
        let volumes = list(marks::VOLUME).await?;
        let handles = volumes.iter().filter_map(|volume| volume.handle.parse().ok());
        let handles: HashSet<VolumeHandle> = handles.chain(making).collect();
        for orphan in sidecars {
            let volume = orphan.handle.strip_suffix(SIDECAR).and_then(|handle| handle.parse().ok());
            if volume.is_none_or(|volume| !handles.contains(&volume))
                && let Err(error) = self.volumes.destroy(&name(orphan.handle)?).await
            {
                tracing::warn!(error = domain::chain(&error), "a manifest outlives its volume");
            }
        }
        let mut handles: Vec<_> = handles.into_iter().collect();
        handles.sort_unstable();
        Ok(handles)
    }
}
