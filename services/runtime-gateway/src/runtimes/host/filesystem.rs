//! Files and directories: written whole or not at all, removed whether they are there or not.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use runtime::RuntimeError;

/// Wraps what the system says while `doing` something to `path`.
pub(super) fn at(doing: &str, path: &Path) -> impl FnOnce(io::Error) -> RuntimeError {
    let doing = format!("{doing} {}", path.display());
    move |error| RuntimeError::io(doing, error)
}

/// Makes a directory that may be there already.
pub(super) fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Removes a file that may be gone already.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes a directory with all that is in it, however deep. No link is followed, and no mount point entered.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    transfer::remove_tree(path).map_err(|error| io::Error::new(error.source.kind(), error))
}

/// Removes what was not finished in `directory`: what has a name that starts with a dot. What cannot be removed is left
/// for the next opening.
pub(super) fn remove_unfinished(directory: &Path) -> Result<(), RuntimeError> {
    for entry in fs::read_dir(directory).map_err(at("list", directory))? {
        let path = entry.map_err(at("list", directory))?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
            remove_or_leave(&path);
        }
    }
    Ok(())
}

/// Removes a tree that is of no use. If it cannot be removed, the runtime goes on without that.
pub(super) fn remove_or_leave(path: &Path) {
    if let Err(error) = remove_tree(path) {
        tracing::warn!(
            path = %path.display(),
            error = domain::error_chain(&error),
            "cannot remove an unfinished directory; it is left for the next start of the gateway"
        );
    }
}

/// Makes what happened in a directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a new file, durably. A crash leaves it absent, or cut short.
pub(super) fn write_new(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

/// Writes a file, or leaves the one that is there, durably.
pub(super) fn write_durably(path: &Path, contents: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    remove_file(&temporary)?;
    write_new(&temporary, contents)?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Reads a file that may not be there.
pub(super) fn read_if_there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether something is there, without following a link.
pub(super) fn exists(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Renames `from`, which must exist, to `to`, which must not. Of several that try with the same `from`, one succeeds.
pub(super) fn rename_exclusively(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags};
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// The handles that things in `directory` are named for, with or without one of `prefixes`; other names are nobody's.
pub(super) fn handles_in<H: std::str::FromStr>(
    directory: &Path,
    prefixes: &[&str],
) -> Result<Vec<H>, RuntimeError> {
    let mut handles = Vec::new();
    for entry in fs::read_dir(directory).map_err(at("list", directory))? {
        let name = entry.map_err(at("list", directory))?.file_name();
        let name = name.to_string_lossy();
        let handle = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(&name);
        handles.extend(handle.parse::<H>().ok());
    }
    Ok(handles)
}

/// Closes every descriptor of this process but one and the standard streams. For processes that never exec, which close nothing by
/// themselves. Nothing in this process may use any of them again.
pub(super) fn close_all_but(kept: RawFd) -> io::Result<()> {
    let kept = kept.unsigned_abs();
    for (first, last) in [(3, kept - 1), (kept + 1, u32::MAX)] {
        // SAFETY: whose they were is not run any more, as is asked above.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
