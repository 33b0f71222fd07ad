//! Who speaks for a state directory: the process that holds the lock on a file in it.
//!
//! The file also says who that is, or was: a cluster that ended in order leaves it empty, so that what one that did not left
//! behind is known for what it is.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What is known of the cluster that holds the lock, or held it last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) process_id: u32,
    pub(crate) socket: PathBuf,
}

/// The lock, held.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
    /// Who held it last and did not end in order.
    pub(crate) left_behind: Option<Record>,
}

impl Lock {
    /// Takes the lock. `None`: somebody else holds it.
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

    /// Says who holds it.
    pub(crate) fn record(&mut self, record: &Record) -> anyhow::Result<()> {
        let text = serde_json::to_vec(record)?;
        self.write(&text).context("cannot write into the lock file")
    }

    /// Whether the file at `path` is still the one that is locked. It is not if the state directory was removed or renamed.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let (held, found) = (self.file.metadata().map(identity), path.metadata().map(identity));
        match (held, found) {
            (Ok(held), Ok(found)) => held == found,
            (_, Err(error)) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
            (Err(_), _) => true,
        }
    }

    /// Says that its holder ended in order, and lets go of it.
    pub(crate) fn release(mut self) -> anyhow::Result<()> {
        self.write(b"").context("cannot write into the lock file")
    }

    fn write(&mut self, text: &[u8]) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(text)
    }
}

/// Who holds the lock now. `None`: nobody.
pub(crate) fn holder(path: &Path) -> Option<Record> {
    let mut file = File::open(path).ok()?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => read(&mut file),
        // Nobody does; our own lock goes with the file.
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
    fn one_holds_it_and_everybody_can_see_who() {
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
    fn lock_knows_whether_its_file_is_there() {
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
    fn who_did_not_end_in_order_is_known_to_the_next() {
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
