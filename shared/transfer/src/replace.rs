//! Replacement of a directory as a whole by a staged tree.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat, renameat_with};
use rustix::io::Errno;

use crate::remove::{RemoveError, remove_tree};

/// Returns a name that is most likely unused.
pub(crate) fn unused_name() -> String {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    format!(".gantry-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// A directory cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The staging directory is not on the file system of the target. Nothing was changed.
    #[error("cannot replace the target: the staged tree is on another file system")]
    OtherFileSystem,
    /// The staged tree or the target cannot be renamed. Nothing was changed.
    #[error("cannot rename the staged tree")]
    Rename(#[source] io::Error),
    /// The target was replaced, but the old target cannot be removed.
    #[error("cannot remove the replaced directory")]
    OldRemains(#[from] RemoveError),
}

/// Replaces `target` with the tree in `staged`, and removes the old target.
///
/// The exchange is atomic if the file system supports that. `staged` should be in the parent
/// directory of `target`, because a move to another parent requires write permission for the moved
/// directory. If `target` is a symbolic link, the link is replaced.
///
/// # Errors
///
/// See [`ReplaceError`].
pub fn replace(staged: &Path, target: &Path) -> Result<(), ReplaceError> {
    let failed = |error: Errno| match error {
        Errno::XDEV => ReplaceError::OtherFileSystem,
        error => ReplaceError::Rename(error.into()),
    };
    match renameat_with(CWD, staged, CWD, target, RenameFlags::EXCHANGE) {
        Ok(()) => return Ok(remove_tree(staged)?),
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {}
        Err(error) => return Err(failed(error)),
    }
    replace_in_two_steps(staged, target).map_err(failed)?.map_or(Ok(()), |old| Ok(remove_tree(&old)?))
}

/// Renames the target, if it exists, and moves the staged tree into its place. Returns the new path
/// of the old target.
fn replace_in_two_steps(staged: &Path, target: &Path) -> Result<Option<PathBuf>, Errno> {
    let old = target.with_file_name(unused_name());
    let moved = match renameat(CWD, target, CWD, &old) {
        Ok(()) => true,
        Err(Errno::NOENT) => false,
        Err(error) => return Err(error),
    };
    if let Err(error) = renameat(CWD, staged, CWD, target) {
        if moved {
            renameat(CWD, &old, CWD, target)?;
        }
        return Err(error);
    }
    Ok(moved.then_some(old))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;

    /// Covers file systems without an atomic exchange.
    #[test]
    fn failed_replacement_in_two_steps_restores_target() {
        let dir = tempdir().unwrap();
        let (staged, target) = (dir.path().join("staged"), dir.path().join("target"));
        fs::create_dir(&staged).unwrap();

        assert_eq!(replace_in_two_steps(&staged, &target), Ok(None));
        fs::write(target.join("old"), "x").unwrap();

        assert_eq!(replace_in_two_steps(&staged, &target), Err(Errno::NOENT));
        assert!(target.join("old").exists());

        fs::create_dir(&staged).unwrap();
        let old = replace_in_two_steps(&staged, &target).unwrap().unwrap();
        assert!(old.join("old").exists());
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
    }
}
