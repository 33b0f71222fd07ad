//! Replacement of a directory as a whole.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat, renameat_with};
use rustix::io::Errno;

use crate::remove::{RemoveError, remove_tree};

/// A name that nobody else uses, most likely.
pub(crate) fn unused_name() -> String {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    format!(".gantry-{}-{}", std::process::id(), NAMES.fetch_add(1, Ordering::Relaxed))
}

/// A directory cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum ReplaceError {
    /// The staging directory is not on the file system of the target. Nothing was changed.
    #[error("the staged tree is on another file system than the target")]
    OtherFileSystem,
    /// It cannot be renamed. Nothing was changed.
    #[error("cannot rename the staged tree")]
    Rename(#[source] io::Error),
    /// It was replaced, but what was there before cannot be removed.
    #[error("cannot remove what was replaced")]
    OldRemains(#[from] RemoveError),
}

/// Puts the tree that was written to `staged` in the place of whatever stands at `target`, which is then removed.
///
/// Where the file system can do it, there is no moment without a target. Staged best right next to it: moving a
/// directory elsewhere takes the right to change it. If `target` is a symbolic link, the link is replaced.
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

/// Moves the target aside, if there is one, and the staged tree into its place. Returns where the old one is.
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

    /// What happens on file systems that cannot exchange.
    #[test]
    fn replacing_in_two_steps_gives_the_old_one_back_if_it_fails() {
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
