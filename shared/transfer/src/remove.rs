//! Removal of untrusted trees of any depth.
//!
//! Invariants: symbolic links are removed and never followed. Mount points are never entered.
//! Unlike the standard library, the removal supports directories that their owner may not change,
//! and any depth ([`crate::walk`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use crate::dirs::make_accessible;
use crate::walk::TreeWalk;

/// A tree, or a part of it, cannot be removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot remove {path:?}")]
pub struct RemoveError {
    /// The path that could not be removed.
    pub path: PathBuf,
    /// The error of the operating system.
    #[source]
    pub source: io::Error,
}

/// Removes the entry at `path`: a file, a symbolic link, or a directory with all its contents.
/// Succeeds if `path` does not exist.
///
/// # Errors
///
/// Returns the first part that cannot be removed. All other parts are removed, unless the walk
/// failed.
pub fn remove_tree(path: &Path) -> Result<(), RemoveError> {
    let failed = |source: io::Error| RemoveError { path: path.to_owned(), source };
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput.into()).map_err(failed)?.as_bytes();
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = match openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(failed(error.into())),
    };
    if remove_plain(parent.as_fd(), name).map_err(|error| failed(error.into()))? {
        return Ok(());
    }
    make_accessible(&parent, name).map_err(|error| failed(error.into()))?;
    let mut walk = match TreeWalk::open_at(&parent, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        walk => walk.map_err(failed)?,
    };
    let kept = empty(&mut walk, path)?;
    drop(walk);
    match (kept, remove_directory(parent.as_fd(), name)) {
        (Some(kept), _) => Err(kept),
        (None, removed) => removed.map_err(|error| failed(error.into())),
    }
}

/// Removes the contents of the walk's root. Returns the first part that cannot be removed.
fn empty(walk: &mut TreeWalk, root: &Path) -> Result<Option<RemoveError>, RemoveError> {
    let failed =
        |walk: &TreeWalk, name: &[u8], source| RemoveError { path: root.join(walk.shown(name)), source };
    let mut kept = None;
    loop {
        let Some(name) = walk.next_name().map_err(|error| failed(walk, b"", error))? else {
            let Some(name) = walk.leave().map_err(|error| failed(walk, b"", error))? else { return Ok(kept) };
            if let Err(error) = remove_directory(walk.directory(), &name) {
                kept.get_or_insert_with(|| failed(walk, &name, error.into()));
            }
            continue;
        };
        let directory = walk.directory();
        let entered = match remove_plain(directory, &name) {
            Ok(true) => continue,
            Ok(false) => make_accessible(directory, &name).map_err(io::Error::from),
            Err(error) => Err(error.into()),
        };
        match entered.and_then(|()| walk.enter(&name)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => _ = kept.get_or_insert_with(|| failed(walk, &name, error)),
        }
    }
}

fn remove_directory(parent: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}

/// Removes the entry at a name, unless it is a directory. Returns whether the name is free.
fn remove_plain(directory: BorrowedFd<'_>, name: &[u8]) -> Result<bool, Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        // POSIX specifies this error for directories.
        Err(Errno::PERM)
            if crate::dirs::type_of(directory, name)? == Some(rustix::fs::FileType::Directory) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
