//! Who holds a state directory: one runtime at a time.
//!
//! Its file `lock` is locked by whoever holds the directory, and says a name that is made when the file is. A holder that dies leaves the
//! lock, and the next takes the directory with all that goes on in it. One that is frozen keeps its lock; who has opened a new session of
//! the worker takes the directory from it all the same, by putting a locked file with a name of its own in the place of that one.
//!
//! Invariant: whoever was started by a holder that lost the directory starts nothing. Before it takes its intent, a supervisor looks whether
//! the name is still the one that it was launched under; who takes the directory away changes the name first, and then revokes every intent
//! that is there. So an intent is either seen and revoked, or its supervisor sees the new name.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use runtime::RuntimeError;
use uuid::Uuid;

use super::filesystem::{self, at};

/// The right to a state directory.
#[derive(Debug)]
pub(super) struct StateLock {
    path: PathBuf,
    name: String,
    /// Locked as long as this lives.
    _file: File,
}

fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("lock")
}

impl StateLock {
    /// Takes a directory that nobody holds. `None`: somebody does.
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
            // Another file may have come into its place in between.
            if !is_at(&file, &path).map_err(at("look at", &path))? {
                continue;
            }
            let mut name = io::read_to_string(&file).map_err(at("read", &path))?;
            if name.is_empty() {
                name = Uuid::new_v4().to_string();
                file.write_all(name.as_bytes()).map_err(at("write", &path))?;
            }
            return Ok(Some(Self { path, name, _file: file }));
        }
    }

    /// Takes a directory, whoever holds it. Only for who may speak for the worker while the holder may not.
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
        Ok(Self { path, name, _file: file })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Whether nobody has taken the directory over.
    pub(super) fn is_ours(&self) -> Result<bool, RuntimeError> {
        is_named(&self.path, &self.name).map_err(at("read", &self.path))
    }

    /// Refuses what only the holder may do.
    pub(super) fn check(&self) -> Result<(), RuntimeError> {
        if self.is_ours()? {
            return Ok(());
        }
        Err(RuntimeError::TakenOver(self.path.display().to_string()))
    }
}

/// Whether the directory is held under this name, as far as can be seen. An empty one is that of a gateway that gave none.
pub(super) fn is_held_as(state_dir: &Path, name: &str) -> io::Result<bool> {
    if name.is_empty() { Ok(true) } else { is_named(&path(state_dir), name) }
}

fn is_named(path: &Path, name: &str) -> io::Result<bool> {
    // Who removes the directory takes it over for nobody.
    Ok(filesystem::read_if_there(path)?.is_none_or(|found| found == name.as_bytes()))
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
    fn one_holds_it_and_its_name_stays_when_it_dies() {
        let directory = tempfile::tempdir().expect("a directory");
        let first = StateLock::take(directory.path()).expect("taken").expect("nobody holds it");
        assert!(StateLock::take(directory.path()).expect("looked").is_none());
        let name = first.name().to_owned();
        drop(first);
        let second = StateLock::take(directory.path()).expect("taken").expect("nobody holds it");
        assert_eq!(second.name(), name, "what the first launched goes on");
        second.check().expect("it holds it");
    }

    #[test]
    fn who_takes_it_over_holds_it_though_the_other_keeps_its_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let frozen = StateLock::take(directory.path()).expect("taken").expect("nobody holds it");
        let next = StateLock::take_over(directory.path()).expect("taken over");
        frozen.check().expect_err("it does not hold it any more");
        next.check().expect("it holds it");
        assert!(!is_held_as(directory.path(), frozen.name()).expect("read"));
        assert!(StateLock::take(directory.path()).expect("looked").is_none());
        drop(frozen);
        assert!(
            StateLock::take(directory.path()).expect("looked").is_none(),
            "the end of the other frees nothing"
        );
        drop(next);
        assert!(StateLock::take(directory.path()).expect("looked").is_some());
    }
}
