//! The lock of a state directory: one runtime holds it at a time.
//!
//! The holder locks the file `lock`, which contains a unique name. When a holder dies, the next
//! runtime takes the directory and its running processes over. A frozen holder keeps its lock. A
//! runtime with a newer session of the worker takes the directory nevertheless: it replaces the
//! file by a locked file with a new name.
//!
//! Invariant: a supervisor of a replaced holder starts nothing. Before a supervisor takes its
//! intent, it checks that the name is still that of its launch. A runtime that takes the directory
//! over changes the name first, and then revokes every intent. So an intent is either revoked, or
//! its supervisor sees the new name.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use runtime::RuntimeError;
use uuid::Uuid;

use super::filesystem::{self, at};

/// The right to use a state directory.
#[derive(Debug)]
pub(super) struct StateLock {
    path: PathBuf,
    name: String,
    /// Whether the earlier holder had released the directory, because it has ended.
    was_free: bool,
    /// Keeps the file locked while this value lives.
    _file: File,
}

fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("lock")
}

impl StateLock {
    /// Locks a directory. `None`: another runtime holds it.
    pub(super) fn take(state_dir: &Path) -> Result<Option<Self>, RuntimeError> {
        let path = path(state_dir);
        loop {
            let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
            let mut file = file.map_err(at("open", &path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => return Ok(None),
                Err(fs::TryLockError::Error(error)) => return Err(at("lock", &path)(error)),
            }
            // Another runtime may have replaced the file meanwhile.
            if !is_at(&file, &path).map_err(at("check", &path))? {
                continue;
            }
            let mut name = io::read_to_string(&file).map_err(at("read", &path))?;
            if name.is_empty() {
                name = Uuid::new_v4().to_string();
                file.write_all(name.as_bytes()).map_err(at("write", &path))?;
            }
            return Ok(Some(Self { path, name, was_free: true, _file: file }));
        }
    }

    /// Takes a directory over, even if another runtime holds it. The caller must have the right to
    /// speak for the worker, and the holder must not.
    pub(super) fn take_over(state_dir: &Path) -> Result<Self, RuntimeError> {
        let path = path(state_dir);
        let name = Uuid::new_v4().to_string();
        let new = state_dir.join(format!("lock.{name}"));
        let make = || {
            let mut file = File::create_new(&new)?;
            file.lock()?;
            file.write_all(name.as_bytes())?;
            fs::rename(&new, &path)?;
            Ok(file)
        };
        let file = make().map_err(at("take over", &path))?;
        Ok(Self { path, name, was_free: false, _file: file })
    }

    pub(super) fn was_free(&self) -> bool {
        self.was_free
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether no other runtime has taken the directory over.
    pub(super) fn is_ours(&self) -> Result<bool, RuntimeError> {
        is_named(&self.path, &self.name).map_err(at("read", &self.path))
    }

    /// Fails if another runtime has taken the directory over.
    pub(super) fn check(&self) -> Result<(), RuntimeError> {
        if self.is_ours()? {
            return Ok(());
        }
        Err(RuntimeError::TakenOver(self.path.display().to_string()))
    }
}

/// Whether the directory is held under this name. An empty name belongs to a gateway of a version
/// without names.
pub(super) fn is_held_as(state_dir: &Path, name: &str) -> io::Result<bool> {
    if name.is_empty() { Ok(true) } else { is_named(&path(state_dir), name) }
}

fn is_named(path: &Path, name: &str) -> io::Result<bool> {
    // A missing file means that the directory is being removed, and that no runtime has taken it
    // over.
    Ok(filesystem::read_if_exists(path)?.is_none_or(|found| found == name.as_bytes()))
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_name_survives_death_of_holder() {
        let directory = tempfile::tempdir().expect("a directory");
        let first = StateLock::take(directory.path()).expect("taken").expect("the directory is free");
        assert!(StateLock::take(directory.path()).expect("looked").is_none());
        let name = first.name().to_owned();
        drop(first);
        let second = StateLock::take(directory.path()).expect("taken").expect("the directory is free");
        assert_eq!(second.name(), name, "supervisors of the first holder continue");
        second.check().expect("it holds it");
    }

    #[test]
    fn takeover_succeeds_while_frozen_holder_keeps_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let frozen = StateLock::take(directory.path()).expect("taken").expect("the directory is free");
        let next = StateLock::take_over(directory.path()).expect("taken over");
        frozen.check().expect_err("the directory was taken over");
        next.check().expect("it holds it");
        assert!(!is_held_as(directory.path(), frozen.name()).expect("read"));
        assert!(StateLock::take(directory.path()).expect("looked").is_none());
        drop(frozen);
        assert!(
            StateLock::take(directory.path()).expect("looked").is_none(),
            "the end of the old holder does not release the directory"
        );
        drop(next);
        assert!(StateLock::take(directory.path()).expect("looked").is_some());
    }
}
