//! Removing trees, whatever is in them.
//!
//! Invariant: symbolic links are removed, never followed. Unlike the standard library's, this removal copes with
//! directories that their owner may not change, which trees of build outputs are full of.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use crate::dirs::{Cursor, list, make_workable};
use crate::manifest::{as_path, split};

/// A tree cannot be removed, or not all of it.
#[derive(Debug, thiserror::Error)]
#[error("cannot remove {path:?}")]
pub struct RemoveError {
    /// What could not be removed.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Removes what stands at `path`: a file, a symbolic link, or a directory with all that is in it. Nothing there is
/// fine.
///
/// # Errors
///
/// Something in it cannot be removed. The rest may be gone.
pub fn remove_tree(path: &Path) -> Result<(), RemoveError> {
    let failed = |at: &Path| {
        let path = at.to_owned();
        move |source: io::Error| RemoveError { path, source }
    };
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput.into()).map_err(failed(path))?.as_bytes();
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = match openat(CWD, parent, flags, Mode::empty()) {
        Ok(parent) => parent,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(failed(path)(error.into())),
    };
    if remove_plain(&parent, name).map_err(|error| failed(path)(error.into()))? {
        return Ok(());
    }

    // A directory: go down, and remove each after what is in it.
    make_workable(&parent, name).map_err(|error| failed(path)(error.into()))?;
    let mut cursor = Cursor::new_no_follow(&parent, name).map_err(failed(path))?;
    let mut buffer = Vec::new();
    let names = list(cursor.root(), &mut buffer).map_err(|error| failed(path)(error.into()))?;
    let mut levels = vec![(Vec::new(), names)];
    while let Some((directory_path, names)) = levels.last_mut() {
        let Some(name) = names.pop() else {
            let (directory_path, _) = levels.pop().unwrap_or_default();
            let removed = if directory_path.is_empty() {
                unlinkat(&parent, name, AtFlags::REMOVEDIR)
            } else {
                let (above, name) = split(&directory_path);
                let above = cursor.go(above).map_err(failed(&path.join(as_path(&directory_path))))?;
                unlinkat(&above, name, AtFlags::REMOVEDIR)
            };
            removed.map_err(|error| failed(&path.join(as_path(&directory_path)))(error.into()))?;
            continue;
        };
        let mut child = directory_path.clone();
        if !child.is_empty() {
            child.push(b'/');
        }
        child.extend_from_slice(&name);
        let at = || failed(&path.join(as_path(&child)));
        let directory = cursor.go(directory_path).map_err(at())?;
        if remove_plain(&directory, &name).map_err(|error| at()(error.into()))? {
            continue;
        }
        make_workable(&directory, &name).map_err(|error| at()(error.into()))?;
        let directory = cursor.go(&child).map_err(at())?;
        let names = list(&directory, &mut buffer).map_err(|error| at()(error.into()))?;
        levels.push((child, names));
    }
    Ok(())
}

/// Removes what stands at a name unless it is a directory, and says whether nothing is there any more.
fn remove_plain(directory: &OwnedFd, name: &[u8]) -> Result<bool, Errno> {
    match unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        // What POSIX says of directories.
        Err(Errno::PERM)
            if crate::dirs::type_of(directory, name)? == Some(rustix::fs::FileType::Directory) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
