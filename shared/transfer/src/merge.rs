//! Bringing a tree that was written to where it is wanted.
//!
//! The command line downloads into a staging directory on the same file system, and then either [`replace`]s the
//! target as a whole or [`merge`]s into it. What the target has already need not be downloaded:
//!
//! ```text
//! local_matches(target) ──▶ Matches ── wanted() ──▶ download the rest
//!                              │ prepare(target, writer): leave out whole files, copy single extents
//!                              └──▶ merge(staged, target): rename new files, fix metadata of kept ones
//! ```
//!
//! Invariants:
//!
//! - A reader of the target sees each file as it was or as it is to be, never in between.
//! - No symbolic link in the target is followed: one that stands where a directory is needed is replaced.
//! - What the manifest does not name stays. A directory that is not empty is never removed to make room for a file;
//!   that is found out before anything is changed.

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
use crate::metadata::{LeftOut, Metadata, WrittenOwnership, caller};
use crate::replace::unused_name;
use crate::rights;
use crate::xattrs;

/// How to merge.
#[derive(Debug, Clone, Copy)]
pub struct MergeOptions<'a> {
    /// To whom kept files and directories belong: as it was for the writer.
    pub ownership: WrittenOwnership,
    /// Whether attributes that are not permitted are an error: as it was for the writer.
    pub strict: bool,
    /// Whether the target itself, if it is there already, keeps its mode, owner and times.
    pub keep_root: bool,
    /// What stands in a target that the tree was sent from: what was changed there since then stays. `None`: the tree
    /// takes the place of what stands at its paths.
    pub standing: Option<&'a Standing>,
}

/// A tree that was merged.
#[derive(Debug, Default)]
pub struct Merged {
    /// Files and others that were put in place.
    pub replaced: u64,
    /// Files that stayed.
    pub kept: u64,
    /// Of these, those whose metadata had to be put right.
    pub corrected: u64,
    /// Attributes that were left out.
    pub left_out: Vec<LeftOut>,
    /// Results that stand beside what was changed in the target.
    pub conflicts: Vec<Conflict>,
}

/// A tree cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// A directory that is not empty stands where something else belongs. Nothing was changed.
    #[error("a directory stands at {path:?}")]
    DirectoryInTheWay {
        /// The entry.
        path: PathBuf,
    },
    /// A file is neither staged nor kept, or a kept one has gone meanwhile.
    #[error("{path:?} is missing")]
    Missing {
        /// The entry.
        path: PathBuf,
    },
    /// A kept file was written to after it was compared. It is as it was written.
    #[error("{path:?} was changed at this moment by somebody else")]
    Changed {
        /// The entry.
        path: PathBuf,
    },
    /// Something is mounted where the tree has an entry. Nothing was changed.
    #[error("something is mounted at {path:?}")]
    Mounted {
        /// The entry.
        path: PathBuf,
    },
    /// The staging directory is not on the file system of the target.
    #[error("{path:?} is on another file system than the staged tree")]
    OtherFileSystem {
        /// The entry.
        path: PathBuf,
    },
    /// Something else failed. What was put in place stays; merging again is safe once the tree is staged again.
    #[error("cannot put {path:?} in place")]
    Io {
        /// The entry.
        path: PathBuf,
        /// Why.
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

/// Moves the tree that was written to `staged` into `target`.
///
/// Paths of the manifest are replaced, one by one, each atomically; others are kept. Files that `matches` says stay get
/// their metadata. What is left of `staged` is the caller's to remove. A target that is not there is made.
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
) -> Result<Merged, MergeError> {
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
        merged: Merged::default(),
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
    /// Where hard links point to, in the target.
    links: Cursor,
    metadata: Metadata,
    merged: Merged,
    standing: Option<&'a Standing>,
    /// The last entry that was put beside, with all that is in it.
    beside: Option<&'a [u8]>,
    /// All entries that were.
    put_beside: BTreeSet<usize>,
    /// Directories that stay as they are and had to be made writable, and their modes.
    modes: Vec<(&'a [u8], Mode)>,
}

impl<'a> Merger<'a> {
    /// Refuses to begin if a directory would have to be removed for something that is none, or something is mounted where
    /// something has to be renamed.
    fn check_obstacles(&mut self) -> Result<(), MergeError> {
        if let Some(path) = self.standing.and_then(Standing::mounted) {
            return Err(MergeError::Mounted { path: path.to_owned() });
        }
        for (index, entry) in self.manifest.entries().iter().enumerate().skip(1) {
            if self.matches.kept.contains_key(&index) {
                continue;
            }
            let (parent, name) = split(&entry.path);
            // What cannot be reached is not there, or its parent is going to be replaced.
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
                Ok(()) // The writer left it out.
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

    /// Removes a directory that is empty or, in a target that the tree was sent from, has only what was sent.
    fn clear_directory(&mut self, directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        if self.standing.is_none() {
            // It was empty, and still is, or this fails.
            return unlinkat(directory, name, AtFlags::REMOVEDIR);
        }
        // It goes with the staged tree.
        renameat(directory, name, self.staged.root(), unused_name())
    }

    /// Puts an entry with all that is in it beside what stands at its path.
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
                // The writer left it out.
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

    /// Remembers the mode of a directory that is made writable for as long as something is put into it.
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
            // A directory that has gone meanwhile needs no mode.
            _ = self.target.go(parent).map(|parent| chmod_no_follow(&parent, name, mode));
        }
    }

    fn is_kept(&self, path: &[u8]) -> bool {
        self.manifest.find(path).is_some_and(|index| self.matches.kept.contains_key(&index))
    }

    /// Puts right the metadata of a file that stays, if anything is wrong: as it is, the stat cache may know it. One that somebody has
    /// written to must not get the time of what it should be: it would be taken for that ever after.
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
            .and_then(|()| self.metadata.apply(entry, file, &mut self.merged.left_out));
        done.map_err(|error| MergeError::new(entry, error.into()))
    }
}

/// The name beside `name` for a result that cannot take its place.
fn conflict_name(name: &[u8], number: u32) -> Vec<u8> {
    let suffix = if number == 1 { ".gantry-result".to_owned() } else { format!(".gantry-result-{number}") };
    let kept = name.len().min(MAX_NAME_BYTES - suffix.len());
    [&name[..kept], suffix.as_bytes()].concat()
}

fn is_empty_directory(directory: &OwnedFd, name: &[u8]) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::empty()).and_then(|opened| is_empty(&opened)).unwrap_or(false)
}

/// Sees to it that a directory stands at a name, and can be worked in.
fn place_directory(directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match type_of(directory, name)? {
        Some(FileType::Directory) => return make_accessible(directory, name),
        Some(_) => unlinkat(directory, name, AtFlags::empty())?,
        None => {}
    }
    mkdirat(directory, name, Mode::RWXU)
}

/// Makes a hard link, in place of what stands there.
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
    // If it fails, or both are the same file, the new name is still there.
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
    fn linking_over_the_same_file_leaves_nothing_behind() {
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
