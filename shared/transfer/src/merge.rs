//! Merge of a staged tree into a target directory.
//!
//! The command line downloads into a staging directory on the same file system. It then merges the
//! staged tree into the target, or replaces the target ([`crate::replace()`]). Content that the
//! target already has is not downloaded:
//!
//! ```text
//! local_matches(target) ──▶ Matches ── wanted() ──▶ download the rest
//!                              │ prepare(target, writer): omit whole files, copy single extents
//!                              └──▶ merge(staged, target): rename new files, fix metadata of kept files
//! ```
//!
//! Invariants:
//!
//! - A reader of the target sees the old or the new version of each file, never a partial one.
//!   Renames enforce it.
//! - The merge follows no symbolic link in the target. A link at the path of a directory is
//!   replaced.
//! - Paths that the manifest does not name stay. The merge never removes a non-empty directory for
//!   another entry, and detects this case before the first change.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, StatxAttributes, StatxFlags, linkat, mkdirat, openat,
    renameat, renameat_with, statat, statx, unlinkat,
};
use rustix::io::Errno;

use crate::cache::Fingerprint;
use crate::dirs::{Cursor, chmod_no_follow, is_empty, make_accessible, type_of};
use crate::entry::{Entry, EntryKind, MAX_NAME_BYTES, as_path, split};
use crate::in_place::{Conflict, Standing, Verdict};
use crate::manifest::Manifest;
use crate::matches::{Matches, open_file, stat_at};
use crate::metadata::{Metadata, SkippedPart, WrittenOwnership, caller};
use crate::replace::unused_name;
use crate::rights;
use crate::xattrs;

/// Options of a merge.
#[derive(Debug, Clone, Copy)]
pub struct MergeOptions<'a> {
    /// Owner of kept files and directories. It must be the same as for the writer.
    pub ownership: WrittenOwnership,
    /// Whether attributes that are not permitted are an error. It must be the same as for the
    /// writer.
    pub strict: bool,
    /// Whether an existing target directory keeps its mode, owner and times.
    pub keep_root: bool,
    /// State of a target that the tree was sent from. Paths that changed there since then stay.
    /// With `None`, the tree replaces what the target has at its paths.
    pub standing: Option<&'a Standing>,
}

/// The outcome of a merge.
#[derive(Debug, Default)]
pub struct MergeSummary {
    /// Number of files and other entries that were put in place.
    pub replaced: u64,
    /// Number of files that stayed.
    pub kept: u64,
    /// Number of kept files whose metadata was corrected.
    pub corrected: u64,
    /// Attributes that were left out.
    pub skipped: Vec<SkippedPart>,
    /// Results that were placed beside changed entries of the target.
    pub conflicts: Vec<Conflict>,
}

/// A tree cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The target has a non-empty directory at the path of another kind of entry. Nothing was
    /// changed.
    #[error("cannot replace {path:?}: it is a directory that is not empty")]
    DirectoryInTheWay {
        /// The entry.
        path: PathBuf,
    },
    /// A file is neither staged nor kept, or a kept file is gone.
    #[error("cannot merge {path:?}: the file is missing")]
    Missing {
        /// The entry.
        path: PathBuf,
    },
    /// A kept file was written after the comparison. It is unchanged by the merge.
    #[error("cannot merge {path:?}: another process has changed it during the merge")]
    Changed {
        /// The entry.
        path: PathBuf,
    },
    /// A file system is mounted at the path of an entry. Nothing was changed.
    #[error("cannot replace {path:?}: it is a mount point")]
    Mounted {
        /// The entry.
        path: PathBuf,
    },
    /// The staging directory is not on the file system of the target.
    #[error("cannot merge {path:?}: it is on another file system than the staged tree")]
    OtherFileSystem {
        /// The entry.
        path: PathBuf,
    },
    /// Another operation failed. Entries that are in place stay. A new merge is safe after the tree
    /// is staged again.
    #[error("cannot put {path:?} in place")]
    Io {
        /// The entry.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

impl MergeError {
    fn new(entry: &Entry, source: io::Error) -> Self {
        let path = entry.path().to_owned();
        match Errno::from_io_error(&source) {
            Some(Errno::XDEV) => Self::OtherFileSystem { path },
            Some(Errno::NOTEMPTY | Errno::EXIST) => Self::DirectoryInTheWay { path },
            _ => Self::Io { path, source },
        }
    }
}

/// Moves the tree in `staged` into `target`. Creates a missing target.
///
/// Each path of the manifest is replaced atomically. Other paths are kept. Files that stay
/// according to `matches` get the metadata of the manifest. The caller must remove the rest of
/// `staged`.
///
/// # Errors
///
/// See [`MergeError`].
pub fn merge(
    staged: &Path,
    target: &Path,
    manifest: &Manifest,
    matches: &Matches,
    options: MergeOptions<'_>,
) -> Result<MergeSummary, MergeError> {
    let root = &manifest.entries()[0];
    let failed = |error: io::Error| MergeError::new(root, error);
    let made = match mkdirat(CWD, target, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => return Err(failed(error.into())),
    };
    let metadata = Metadata {
        ownership: options.ownership,
        strict: options.strict,
        caller: caller(),
        is_callers: false,
    };
    let mut merge = Merger {
        manifest,
        matches,
        staged: Cursor::through(staged).map_err(failed)?,
        target: Cursor::through(target).map_err(failed)?,
        links: Cursor::through(target).map_err(failed)?,
        metadata,
        merged: MergeSummary::default(),
        standing: options.standing.filter(|_| !made),
        beside: None,
        put_beside: BTreeSet::new(),
        modes: Vec::new(),
    };
    merge.check_obstacles()?;

    make_accessible(merge.staged.root(), b".").map_err(|error| failed(error.into()))?;
    if made || !options.keep_root {
        make_accessible(merge.target.root(), b".").map_err(|error| failed(error.into()))?;
    }
    for (index, entry) in manifest.entries().iter().enumerate().skip(1) {
        merge.place_entry(index, entry)?;
    }
    let directories = manifest.entries().iter().enumerate().rev().filter(|(_, entry)| entry.is_directory());
    for (index, entry) in
        directories.filter(|(_, entry)| made || !options.keep_root || !entry.path.is_empty())
    {
        if !merge.keeps_directory(index) && !merge.stays_removed(index) && !merge.put_beside.contains(&index)
        {
            merge.complete_directory(entry)?;
        }
    }
    merge.restore_modes();
    Ok(merge.merged)
}

struct Merger<'a> {
    manifest: &'a Manifest,
    matches: &'a Matches,
    staged: Cursor,
    target: Cursor,
    /// Cursor in the target for the files of hard links.
    links: Cursor,
    metadata: Metadata,
    merged: MergeSummary,
    standing: Option<&'a Standing>,
    /// The last entry that was placed beside a changed one, with its contents.
    beside: Option<&'a [u8]>,
    /// All entries that were placed beside changed ones.
    put_beside: BTreeSet<usize>,
    /// Modes of kept directories that are temporarily writable.
    modes: Vec<(&'a [u8], Mode)>,
}

impl<'a> Merger<'a> {
    /// Checks that no non-empty directory and no mount point is in the way of an entry.
    fn check_obstacles(&mut self) -> Result<(), MergeError> {
        if let Some(path) = self.standing.and_then(Standing::mounted) {
            return Err(MergeError::Mounted { path: path.to_owned() });
        }
        for (index, entry) in self.manifest.entries().iter().enumerate().skip(1) {
            if self.matches.kept.contains_key(&index) {
                continue;
            }
            let (parent, name) = split(&entry.path);
            // An unreachable path does not exist, or its parent is going to be replaced.
            let Ok(directory) = self.target.go(parent) else { continue };
            let Ok(found) = statx(&directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE) else {
                continue;
            };
            if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
                return Err(MergeError::Mounted { path: entry.path().to_owned() });
            }
            let is_directory = FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory;
            if self.standing.is_none()
                && is_directory
                && !entry.is_directory()
                && !is_empty_directory(&directory, name)
            {
                return Err(MergeError::DirectoryInTheWay { path: entry.path().to_owned() });
            }
        }
        Ok(())
    }

    fn place_entry(&mut self, index: usize, entry: &'a Entry) -> Result<(), MergeError> {
        if self.stays_removed(index) {
            return Ok(());
        }
        if self.is_beside(&entry.path) {
            self.put_beside.insert(index);
            return Ok(());
        }
        let failed = |error: io::Error| MergeError::new(entry, error);
        let (parent, name) = split(&entry.path);
        let directory = self.target.go(parent).map_err(failed)?;
        let staged = self.staged.go(parent).map_err(failed)?;
        if let Some(standing) = self.standing {
            let now = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok();
            let mut verdict = standing.verdict(index, now.as_ref());
            let gives_way = !entry.is_directory()
                && now
                    .as_ref()
                    .is_some_and(|now| FileType::from_raw_mode(now.st_mode) == FileType::Directory);
            if verdict == Verdict::Take && gives_way && !standing.has_same_contents(index, &entry.path) {
                verdict = Verdict::PutBeside;
            }
            if let Some(found) = self.matches.kept.get(&index) {
                let is_written = !now.is_some_and(|now| Fingerprint::of(&now).was_not_written_since(found));
                if is_written || verdict == Verdict::PutBeside {
                    self.merged.conflicts.push(Conflict { path: entry.path().to_owned(), result: None });
                    return Ok(());
                }
                return self.keep_file(index, entry, *found);
            }
            match verdict {
                Verdict::Take => {}
                Verdict::Leave => return Ok(()),
                Verdict::PutBeside => {
                    self.beside = Some(&entry.path);
                    self.put_beside.insert(index);
                    return self
                        .place_beside(entry, &staged, &directory)
                        .map_err(|error| failed(error.into()));
                }
            }
        }
        match &entry.kind {
            EntryKind::Directory => {
                if self.keeps_directory(index) {
                    self.save_mode(&directory, entry);
                }
                place_directory(&directory, name).map_err(|error| failed(error.into()))?;
                make_accessible(&staged, name).map_err(|error| failed(error.into()))
            }
            EntryKind::File { .. } if let Some(found) = self.matches.kept.get(&index) => {
                self.keep_file(index, entry, *found)
            }
            EntryKind::HardLink { to } if self.is_kept(to) => {
                let (parent, target) = split(to);
                let from = self.links.go(parent).map_err(failed)?;
                self.merged.replaced += 1;
                link_over(&from, target, &directory, name).map_err(|error| failed(error.into()))
            }
            EntryKind::Device { .. } if type_of(&staged, name).is_ok_and(|there| there.is_none()) => {
                Ok(()) // The writer has left the device out.
            }
            _ => {
                if type_of(&directory, name).map_err(|error| failed(error.into()))?
                    == Some(FileType::Directory)
                {
                    self.clear_directory(&directory, name).map_err(|error| failed(error.into()))?;
                }
                if self.standing.is_some() {
                    rights::copy_rights(&directory, &staged, name);
                }
                match renameat(&staged, name, &directory, name) {
                    Ok(()) => self.merged.replaced += 1,
                    Err(Errno::NOENT) => return Err(MergeError::Missing { path: entry.path().to_owned() }),
                    Err(error) => return Err(failed(error.into())),
                }
                Ok(())
            }
        }
    }

    /// Removes a directory that is empty. In a target that the tree was sent from, it may contain
    /// what was sent.
    fn clear_directory(&mut self, directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        if self.standing.is_none() {
            // This fails if the directory is not empty any more.
            return unlinkat(directory, name, AtFlags::REMOVEDIR);
        }
        // The caller removes the directory with the staged tree.
        renameat(directory, name, self.staged.root(), unused_name())
    }

    /// Places an entry with its contents beside the changed entry at its path.
    fn place_beside(&mut self, entry: &Entry, staged: &OwnedFd, directory: &OwnedFd) -> Result<(), Errno> {
        let (parent, name) = split(&entry.path);
        for number in 1.. {
            let beside = conflict_name(name, number);
            let put = match &entry.kind {
                EntryKind::HardLink { to } if self.is_kept(to) => {
                    let (parent, target) = split(to);
                    let from = self.links.go(parent).map_err(|_| Errno::NOENT)?;
                    linkat(&from, target, directory, &beside, AtFlags::empty())
                }
                _ => renameat_with(staged, name, directory, &beside, RenameFlags::NOREPLACE),
            };
            match put {
                Ok(()) => {
                    let beside = [parent, &beside].join(&b'/');
                    let result = as_path(beside.strip_prefix(b"/").unwrap_or(&beside)).to_owned();
                    self.merged
                        .conflicts
                        .push(Conflict { path: entry.path().to_owned(), result: Some(result) });
                    return Ok(());
                }
                Err(Errno::EXIST) => {}
                // The writer has left the device out.
                Err(Errno::NOENT) if matches!(entry.kind, EntryKind::Device { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(Errno::EXIST)
    }

    fn is_beside(&self, path: &[u8]) -> bool {
        let rest = self.beside.and_then(|beside| path.strip_prefix(beside));
        rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    }

    fn stays_removed(&self, index: usize) -> bool {
        self.standing.is_some_and(|standing| standing.stays_removed(index))
    }

    fn keeps_directory(&self, index: usize) -> bool {
        self.standing.is_some_and(|standing| standing.keeps_directory(index))
    }

    /// Saves the mode of a directory that will be temporarily writable.
    fn save_mode(&mut self, directory: &OwnedFd, entry: &'a Entry) {
        let Ok(stat) = statat(directory, split(&entry.path).1, AtFlags::SYMLINK_NOFOLLOW) else { return };
        let mode = Mode::from_raw_mode(stat.st_mode);
        if !mode.contains(Mode::RWXU) {
            self.modes.push((&entry.path, mode));
        }
    }

    fn restore_modes(&mut self) {
        for (path, mode) in std::mem::take(&mut self.modes).into_iter().rev() {
            let (parent, name) = split(path);
            // The directory may be gone.
            _ = self.target.go(parent).map(|parent| chmod_no_follow(&parent, name, mode));
        }
    }

    fn is_kept(&self, path: &[u8]) -> bool {
        self.manifest.find(path).is_some_and(|index| self.matches.kept.contains_key(&index))
    }

    /// Corrects the metadata of a file that stays, if necessary. A file with the right metadata is
    /// unchanged, so that its entry in the stat cache stays valid.
    ///
    /// A file that was written meanwhile must not get the mtime of the manifest, because later
    /// comparisons would trust it.
    fn keep_file(&mut self, index: usize, entry: &Entry, found: Fingerprint) -> Result<(), MergeError> {
        let path = || entry.path().to_owned();
        let stat =
            stat_at(&mut self.target, &entry.path).ok_or_else(|| MergeError::Missing { path: path() })?;
        let now = Fingerprint::of(&stat);
        if !now.was_not_written_since(&found) {
            return Err(MergeError::Changed { path: path() });
        }
        if now == found && self.matches.attributes.contains(&index) && self.metadata.matches(entry, &stat) {
            self.merged.kept += 1;
            return Ok(());
        }
        let file =
            open_file(&mut self.target, &entry.path).map_err(|_| MergeError::Missing { path: path() })?;
        self.merged.kept += 1;
        self.merged.corrected += 1;
        self.metadata.claim(&file).map_err(|error| MergeError::new(entry, error.into()))?;
        self.complete(entry, &file)
    }

    fn complete_directory(&mut self, entry: &Entry) -> Result<(), MergeError> {
        let directory = self.target.go(&entry.path).map_err(|error| MergeError::new(entry, error))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(&directory, ".", flags, Mode::empty());
        self.complete(entry, &directory.map_err(|error| MergeError::new(entry, error.into()))?)
    }

    fn complete(&mut self, entry: &Entry, file: &OwnedFd) -> Result<(), MergeError> {
        let done = xattrs::remove_others(file, !entry.is_directory(), &entry.xattrs)
            .and_then(|()| self.metadata.apply(entry, file, &mut self.merged.skipped));
        done.map_err(|error| MergeError::new(entry, error.into()))
    }
}

/// Returns the name for a result that is placed beside `name`.
fn conflict_name(name: &[u8], number: u32) -> Vec<u8> {
    let suffix = if number == 1 { ".gantry-result".to_owned() } else { format!(".gantry-result-{number}") };
    let kept = name.len().min(MAX_NAME_BYTES - suffix.len());
    [&name[..kept], suffix.as_bytes()].concat()
}

fn is_empty_directory(directory: &OwnedFd, name: &[u8]) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::empty()).and_then(|opened| is_empty(&opened)).unwrap_or(false)
}

/// Ensures that there is an accessible directory at a name.
fn place_directory(directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match type_of(directory, name)? {
        Some(FileType::Directory) => return make_accessible(directory, name),
        Some(_) => unlinkat(directory, name, AtFlags::empty())?,
        None => {}
    }
    mkdirat(directory, name, Mode::RWXU)
}

/// Creates a hard link, and replaces an existing entry.
fn link_over(from: &OwnedFd, target: &[u8], directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    if type_of(directory, name)? == Some(FileType::Directory) {
        unlinkat(directory, name, AtFlags::REMOVEDIR)?;
    }
    let new = loop {
        let new = unused_name();
        match linkat(from, target, directory, &new, AtFlags::empty()) {
            Ok(()) => break new,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    };
    let renamed = renameat(directory, &new, directory, name);
    // If the rename failed, or both names are links to the same file, the new name still exists.
    match unlinkat(directory, &new, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => renamed,
        Err(error) => renamed.and(Err(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn link_over_same_file_leaves_no_temporary_name() {
        let dir = tempdir().unwrap();
        fs::write(dir.path().join("a"), "x").unwrap();
        let cursor = Cursor::through(dir.path()).unwrap();
        for _ in 0..2 {
            link_over(cursor.root(), b"a", cursor.root(), b"b").unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        }
        assert!(link_over(cursor.root(), b"missing", cursor.root(), b"b").is_err());
        assert_eq!(fs::read(dir.path().join("b")).unwrap(), b"x");
    }
}
