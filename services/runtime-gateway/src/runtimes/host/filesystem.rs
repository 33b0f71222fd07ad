//! File operations that are durable, atomic or idempotent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use runtime::RuntimeError;

/// Wraps an error of the operating system. `operation` names the operation on `path`.
pub(super) fn at(operation: &str, path: &Path) -> impl FnOnce(io::Error) -> RuntimeError {
    let operation = format!("{operation} {}", path.display());
    move |error| RuntimeError::io(operation, error)
}

/// Creates a directory. An existing directory is not an error.
pub(super) fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result,
    }
}

/// Removes a file. A missing file is not an error.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes a directory and its contents, of any depth. Does not follow links or enter mount points.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    transfer::remove_tree(path).map_err(|error| io::Error::new(error.source.kind(), error))
}

/// Removes unfinished entries of `directory`, whose names start with a dot. Entries that cannot be
/// removed stay for the next opening.
pub(super) fn remove_unfinished(directory: &Path) -> Result<(), RuntimeError> {
    for entry in fs::read_dir(directory).map_err(at("list", directory))? {
        let path = entry.map_err(at("list", directory))?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')) {
            remove_or_leave(&path);
        }
    }
    Ok(())
}

/// Removes a useless tree. A failure is only logged.
pub(super) fn remove_or_leave(path: &Path) {
    if let Err(error) = remove_tree(path) {
        tracing::warn!(
            path = %path.display(),
            error = domain::error_chain(&error),
            "cannot remove an unfinished directory: it stays until the next start of the gateway"
        );
    }
}

/// Makes changes of a directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Writes a new file durably. After a crash it may be missing or truncated.
pub(super) fn write_new(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

/// Writes a file durably and atomically.
pub(super) fn write_durably(path: &Path, contents: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    remove_file(&temporary)?;
    write_new(&temporary, contents)?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), sync_directory)
}

/// Reads a file. `None`: the file does not exist.
pub(super) fn read_if_exists(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(contents) => Ok(Some(contents)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a path exists, without following a symbolic link.
pub(super) fn exists(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Renames `from`, which must exist, to `to`, which must not exist. If several callers rename the
/// same `from`, one succeeds.
pub(super) fn rename_exclusively(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags};
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// The handles in the names of the entries of `directory`, with or without one of `prefixes`. Other
/// names are ignored.
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

/// Closes all descriptors of this process except `kept` and the standard streams. For processes
/// that never exec, so that close-on-exec has no effect. No code of this process may use a closed
/// descriptor again.
pub(super) fn close_all_but(kept: RawFd) -> io::Result<()> {
    let kept = kept.unsigned_abs();
    for (first, last) in [(3, kept - 1), (kept + 1, u32::MAX)] {
        // SAFETY: the caller ensures that the owners of these descriptors do not run again.
        if first <= last && unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
