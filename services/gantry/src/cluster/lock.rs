//! Lock of a state directory. The cluster that uses the directory holds it.
//!
//! The lock file records the process of the holder. A cluster that ends normally leaves the file
//! empty, so a record without a holder means that a cluster crashed or was killed.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Record of the cluster that holds the lock, or held it last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) process_id: u32,
    pub(crate) socket: PathBuf,
}

/// Held lock.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    /// Record of the last holder, if it did not end normally.
    pub(crate) left_behind: Option<Record>,
}

impl Lock {
    /// Takes the lock. `None`: another process holds it.
    pub(crate) fn take(path: &Path) -> anyhow::Result<Option<Self>> {
        let mut file = open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot lock {}", path.display())),
        }
        let left_behind = read(&mut file);
        Ok(Some(Self { file, left_behind }))
    }

    /// Records the holder.
    pub(crate) fn record(&mut self, record: &Record) -> anyhow::Result<()> {
        let text = serde_json::to_vec(record)?;
        self.write(&text).context("cannot write the lock file")
    }

    /// Returns whether the file at `path` is still the locked one. It is not if the state directory
    /// was removed or renamed.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let (held, found) = (self.file.metadata().map(identity), path.metadata().map(identity));
        match (held, found) {
            (Ok(held), Ok(found)) => held == found,
            (_, Err(error)) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
            (Err(_), _) => true,
        }
    }

    /// Records that the holder ended normally, and releases the lock.
    pub(crate) fn release(mut self) -> anyhow::Result<()> {
        self.write(b"").context("cannot write the lock file")
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(text)
    }
}

/// Returns the record of the current holder. `None`: no process holds the lock.
pub(crate) fn holder(path: &Path) -> Option<Record> {
    let mut file = File::open(path).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => read(&mut file),
        // No process holds the lock. The shared lock is released with the file.
        _ => None,
    }
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

fn read(file: &mut File) -> Option<Record> {
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record { process_id: 7, socket: PathBuf::from("/x/gantry.sock") }
    }

    #[test]
    fn lock_has_one_visible_holder() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("lock");
        assert_eq!(holder(&path), None);
        let mut lock = Lock::take(&path).expect("usable").expect("free");
        assert!(lock.left_behind.is_none());
        lock.record(&record()).expect("written");
        assert!(Lock::take(&path).expect("usable").is_none());
        assert_eq!(holder(&path), Some(record()));
        lock.release().expect("written");
        assert_eq!(holder(&path), None);
    }

    #[test]
    fn lock_detects_removed_file() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("lock");
        let lock = Lock::take(&path).expect("usable").expect("free");
        assert!(lock.is_at(&path));
        std::fs::remove_file(&path).expect("removed");
        assert!(!lock.is_at(&path));
        std::fs::write(&path, "").expect("written");
        assert!(!lock.is_at(&path), "another file");
    }

    #[test]
    fn next_holder_sees_crashed_one() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("lock");
        let mut lock = Lock::take(&path).expect("usable").expect("free");
        lock.record(&record()).expect("written");
        drop(lock);
        assert_eq!(holder(&path), None);
        let lock = Lock::take(&path).expect("usable").expect("free");
        assert_eq!(lock.left_behind, Some(record()));
        lock.release().expect("written");
        assert!(Lock::take(&path).expect("usable").expect("free").left_behind.is_none());
    }
}
