//! Inspection: a cheap comparison of a tree on disk with its manifest.
//!
//! Only the metadata of entries is read, never their content. So a change of content is found if
//! the program that made it has not restored the modification time.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Stat, fstat, statat};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::{DeviceKind, Entry, EntryKind, split};
use crate::manifest::Manifest;

/// An entry that differs from its manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Path of the entry. Empty: the root.
    pub path: PathBuf,
    /// The difference, for people. It continues the path.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_os_str().is_empty() {
            true => write!(formatter, "its root directory {}", self.what),
            false => write!(formatter, "{:?} {}", self.path, self.what),
        }
    }
}

/// Compares the kind, size, mode and modification time of each entry below `root` with `manifest`.
/// Returns the first difference.
///
/// An additional entry changes the modification time of its directory.
///
/// # Errors
///
/// Fails if the metadata cannot be read, or if `root` does not exist.
pub fn inspect(root: &Path, manifest: &Manifest) -> io::Result<Option<Difference>> {
    let mut cursor = Cursor::through(root)?;
    for entry in manifest.entries() {
        let what = match stat(&mut cursor, &entry.path) {
            Ok(stat) => difference(entry, &stat),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Some("is missing".to_owned()),
                _ if is_media_error(&error) => Some(format!("cannot be read: {error}")),
                _ => return Err(error),
            },
        };
        if let Some(what) = what {
            return Ok(Some(Difference { path: entry.path().to_owned(), what }));
        }
    }
    Ok(None)
}

fn stat(cursor: &mut Cursor, path: &[u8]) -> io::Result<Stat> {
    if path.is_empty() {
        return Ok(fstat(cursor.root().as_fd())?);
    }
    let (parent, name) = split(path);
    let directory = cursor.go(parent)?;
    Ok(statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Whether an error shows that the disk or the file system is damaged.
#[must_use]
pub fn is_media_error(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::IO | Errno::UCLEAN | Errno::BADMSG))
}

/// Describes how an entry differs. `None`: it does not.
fn difference(entry: &Entry, stat: &Stat) -> Option<String> {
    let kind = match &entry.kind {
        EntryKind::Directory => FileType::Directory,
        EntryKind::File { .. } | EntryKind::HardLink { .. } => FileType::RegularFile,
        EntryKind::Symlink { .. } => FileType::Symlink,
        EntryKind::Fifo => FileType::Fifo,
        EntryKind::Device { kind: DeviceKind::Character, .. } => FileType::CharacterDevice,
        EntryKind::Device { kind: DeviceKind::Block, .. } => FileType::BlockDevice,
    };
    if FileType::from_raw_mode(stat.st_mode) != kind {
        return Some("has another type".to_owned());
    }
    match &entry.kind {
        // The first name of the file has its metadata.
        EntryKind::HardLink { .. } => return None,
        EntryKind::File { size_bytes, .. } if stat.st_size.cast_unsigned() != *size_bytes => {
            return Some(format!("has {} bytes instead of {size_bytes}", stat.st_size));
        }
        _ => {}
    }
    let mode = stat.st_mode & 0o7777;
    if kind != FileType::Symlink && mode != entry.mode {
        return Some(format!("has mode {mode:04o} instead of {:04o}", entry.mode));
    }
    (!has_stored_time(entry, stat)).then(|| "was changed after it was written".to_owned())
}

/// Whether the modification time is that of the entry, as far as file systems store it: some only
/// store multiples of a unit, and no times before 1902 or after 2037.
#[allow(clippy::unnecessary_cast)] // The fields differ from architecture to architecture.
fn has_stored_time(entry: &Entry, stat: &Stat) -> bool {
    let (seconds, nanos) = (stat.st_mtime as i64, stat.st_mtime_nsec as u32);
    if i32::try_from(entry.mtime_seconds).is_err() {
        return true;
    }
    let is_truncated = || {
        let units = [100, 1_000, 1_000_000, 1_000_000_000];
        units.iter().any(|unit| nanos == entry.mtime_nanos / unit * unit)
    };
    seconds == entry.mtime_seconds && (nanos == entry.mtime_nanos || is_truncated())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::scan::{ScanOptions, scan};

    /// Returns the difference after `change` of a tree.
    fn inspected(change: impl FnOnce(&Path)) -> Option<String> {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        fs::create_dir(root.join("d")).expect("make");
        fs::write(root.join("d/file"), "content").expect("write");
        fs::hard_link(root.join("d/file"), root.join("link")).expect("link");
        symlink("d", root.join("symlink")).expect("link");
        for path in ["d/file", "d", "."] {
            let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_000_000_123);
            File::open(root.join(path)).and_then(|file| file.set_modified(time)).expect("set the time");
        }
        let manifest = scan(root, &ScanOptions::default(), None).expect("scanned").manifest;
        change(root);
        inspect(root, &manifest).expect("read").map(|difference| difference.to_string())
    }

    #[test]
    fn every_change_of_metadata_is_found() {
        assert_eq!(inspected(|_| {}), None);
        let is = |expected: &str, found: Option<String>| assert_eq!(found.as_deref(), Some(expected));
        let written = "\"d/file\" was changed after it was written";
        is(
            written,
            inspected(|root| {
                let file = File::options().write(true).open(root.join("d/file")).expect("open");
                file.write_all_at(b"XXXX", 1).expect("write");
            }),
        );
        is(
            "\"d/file\" has 3 bytes instead of 7",
            inspected(|root| {
                fs::write(root.join("d/file"), "new").expect("write");
            }),
        );
        is(
            "\"d/file\" has mode 0600 instead of 0644",
            inspected(|root| {
                fs::set_permissions(root.join("d/file"), fs::Permissions::from_mode(0o600)).expect("set");
            }),
        );
        is(
            "\"d\" was changed after it was written",
            inspected(|root| {
                fs::remove_file(root.join("d/file")).expect("remove");
            }),
        );
        is(
            "its root directory was changed after it was written",
            inspected(|root| {
                fs::write(root.join("more"), "").expect("write");
            }),
        );
        is(
            "\"d\" has another type",
            inspected(|root| {
                let time = fs::metadata(root).and_then(|found| found.modified()).expect("a time");
                fs::remove_dir_all(root.join("d")).expect("remove");
                fs::write(root.join("d"), "").expect("write");
                File::open(root).and_then(|file| file.set_modified(time)).expect("set the time");
            }),
        );
        is(
            "\"link\" is missing",
            inspected(|root| {
                let time = fs::metadata(root).and_then(|found| found.modified()).expect("a time");
                fs::remove_file(root.join("link")).expect("remove");
                File::open(root).and_then(|file| file.set_modified(time)).expect("set the time");
            }),
        );
    }

    #[test]
    fn times_that_are_not_stored_are_ignored() {
        // The file system stores multiples of 100 ns.
        assert_eq!(
            inspected(|root| {
                let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_000_000_100);
                File::open(root.join("d/file"))
                    .and_then(|file| file.set_modified(time))
                    .expect("set the time");
            }),
            None
        );
    }
}
