//! Volumes of the fake worker: directories, whose children are copies.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use domain::{ArtifactId, VolumeHandle};
use runtime::{RuntimeError, VolumeSource, WorkerProvided};
use rustix::fs::OFlags;

use super::programs::open_in;
use super::{FakeWorker, State};

/// The state of a volume besides its directory.
pub(super) struct Volume {
    /// Whether the volume is complete. An incomplete volume occupies the worker, but no operation
    /// accepts it.
    pub(super) made: bool,
    pub(super) parent: Option<VolumeHandle>,
    pub(super) artifact: Option<ArtifactId>,
    /// Whether the contents were moved in from a directory of another volume.
    taken: bool,
}

fn io(operation: &str) -> impl FnOnce(io::Error) -> RuntimeError {
    let operation = operation.to_owned();
    move |error| RuntimeError::io(operation, error)
}

/// Copies a tree: directories, files and links, with permissions and the modification times of
/// files.
pub(super) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (kind, source, target) = (entry.file_type()?, entry.path(), to.join(entry.file_name()));
        if kind.is_dir() {
            copy(&source, &target)?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(&source)?, &target)?;
        } else {
            fs::copy(&source, &target)?;
            fs::File::options().append(true).open(&target)?.set_modified(entry.metadata()?.modified()?)?;
        }
    }
    fs::set_permissions(to, fs::metadata(from)?.permissions())
}

impl State {
    fn children(&self, parent: VolumeHandle) -> bool {
        self.volumes.values().any(|volume| volume.parent == Some(parent))
    }

    fn is_made(&self, handle: VolumeHandle) -> bool {
        self.volumes.get(&handle).is_some_and(|volume| volume.made)
    }
}

impl FakeWorker {
    /// Errors: the volume does not exist.
    pub(super) fn find_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        if self.state().is_made(handle) { Ok(()) } else { Err(RuntimeError::VolumeNotFound(handle)) }
    }

    pub(super) async fn make_volume(
        &self,
        handle: VolumeHandle,
        source: VolumeSource,
    ) -> Result<(), RuntimeError> {
        let (parent, copied, provided) = match source {
            VolumeSource::Empty => (None, None, None),
            VolumeSource::CopyOnWrite { parent } | VolumeSource::CopyOnWriteLinked { parent, .. } => {
                (Some(parent), Some(parent), None)
            }
            VolumeSource::Copy { original } => (None, Some(original), None),
            VolumeSource::WorkerProvided(what) => (None, None, Some(self.provided(&what)?)),
        };
        {
            let mut state = self.state();
            if state.is_made(handle) {
                return Ok(());
            }
            if let Some(missing) = copied.filter(|copied| !state.is_made(*copied)) {
                return Err(RuntimeError::VolumeNotFound(missing));
            }
            state.volumes.entry(handle).or_insert(Volume {
                made: false,
                parent,
                artifact: None,
                taken: false,
            });
        }
        self.faults.volumes.open().await;
        let (new, path) = (tempfile::tempdir_in(self.directory("new")), self.path(handle));
        let new = new.map_err(io("create a volume"))?;
        let filled = new.path().join("volume");
        let filling = match copied.map(|copied| self.path(copied)).or(provided) {
            None => fs::create_dir(&filled).map_err(io("create a volume")),
            Some(source) => copy(&source, &filled).map_err(io("copy a volume")),
        };
        if let Err(error) = filling {
            self.state().volumes.retain(|other, volume| *other != handle || volume.made);
            return Err(error);
        }
        let mut state = self.state();
        match state.volumes.get_mut(&handle) {
            Some(volume) if volume.made => Ok(()),
            Some(volume) => {
                fs::rename(filled, path).map_err(io("create a volume"))?;
                volume.made = true;
                Ok(())
            }
            None => Err(RuntimeError::Other(format!("volume {handle} was destroyed during its creation"))),
        }
    }

    /// The path of contents that the worker provides.
    fn provided(&self, what: &WorkerProvided) -> Result<PathBuf, RuntimeError> {
        let known = self.capabilities.worker_provided.iter().find(|known| known.what == *what);
        let known = known.map(|known| PathBuf::from(&known.path));
        known.ok_or_else(|| RuntimeError::Unsupported(format!("the fake worker does not provide {what:?}")))
    }

    pub(super) fn take(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        let mut state = self.state();
        for handle in [from, into] {
            if !state.is_made(handle) {
                return Err(RuntimeError::VolumeNotFound(handle));
            }
        }
        let missing = || RuntimeError::OutputMissing(path.display().to_string());
        let (source, target) = (self.path(from), self.path(into));
        if !path.components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(missing());
        }
        let found = open_in(&source, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW);
        let is_link =
            |path: &Path| fs::symlink_metadata(source.join(path)).is_ok_and(|found| found.is_symlink());
        let volume = state.volumes.get_mut(&into).expect("it was just found");
        if found.is_err() || path.ancestors().any(is_link) {
            return if volume.taken { Ok(()) } else { Err(missing()) };
        }
        volume.taken = true;
        fs::remove_dir(&target)
            .and_then(|()| fs::rename(source.join(path), target))
            .map_err(io("move a directory"))
    }

    pub(super) fn remove_volume(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        self.faults.destroy_volume(handle)?;
        let mut state = self.state();
        if state.children(handle) {
            return Err(RuntimeError::HasChildren(handle));
        }
        for (operation, removed) in [
            ("destroy a volume", fs::remove_dir_all(self.path(handle))),
            ("destroy a manifest", fs::remove_file(self.kept(handle))),
        ] {
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(RuntimeError::io(operation, error));
                }
                _ => {}
            }
        }
        state.volumes.remove(&handle);
        Ok(())
    }
}
