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

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat, StatxAttributes, StatxFlags, fstat, linkat,
    mkdirat, openat, renameat, renameat_with, statat, statx, unlinkat,
};
use rustix::io::Errno;

use crate::cache::{Content, Fingerprint, StatCache};
use crate::dirs::{Cursor, chmod_no_follow, is_empty, make_workable, type_of};
use crate::in_place::{Conflict, Standing, Verdict};
use crate::manifest::{Entry, EntryKind, Extent, MAX_NAME_BYTES, Manifest, as_path, split};
use crate::ordinal_ranges::OrdinalRanges;
use crate::remove::{RemoveError, remove_tree};
use crate::rights;
use crate::scan::{Problem, ProblemKind, ScanError, ScanOptions, ScannedOwnership, scan};
use crate::write::{LeftOut, Metadata, TreeWriter, Trust, WriteError, WrittenOwnership, caller, has_times};
use crate::xattrs;

/// What a target has already of a tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matches {
    /// Files that may stay where they are, as indices of entries, as they were found: their content is right.
    kept: BTreeMap<usize, Fingerprint>,
    /// Of these, those whose extended attributes are right as well.
    attributes: BTreeSet<usize>,
    /// Extents of these.
    kept_extents: OrdinalRanges,
    /// Extents of other files that stand at the same place of the same path.
    local_extents: OrdinalRanges,
    files_read: u64,
}

impl Matches {
    /// Files that stay where they are, as indices of entries.
    pub fn kept(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.kept.keys().copied()
    }

    /// How many files had to be read to find out: the cache did not know them, and has learned of them as far as it may.
    #[must_use]
    pub fn files_read(&self) -> u64 {
        self.files_read
    }

    /// Extents that need not be downloaded, because their files stay.
    #[must_use]
    pub fn kept_extents(&self) -> &OrdinalRanges {
        &self.kept_extents
    }

    /// Extents that need not be downloaded, because they can be copied from the target.
    #[must_use]
    pub fn local_extents(&self) -> &OrdinalRanges {
        &self.local_extents
    }

    /// Extents that must be downloaded.
    #[must_use]
    pub fn wanted(&self, manifest: &Manifest) -> OrdinalRanges {
        self.kept_extents.union(&self.local_extents).complement(manifest.extent_count())
    }

    /// Tells a writer of the same manifest what stays where it is, and copies what can be copied from `target`.
    ///
    /// What is needed but has gone from the target meanwhile is not copied; [`TreeWriter::missing`] then names it.
    ///
    /// # Errors
    ///
    /// The staging directory cannot be written.
    pub fn prepare(&self, target: &Path, writer: &mut TreeWriter) -> Result<(), WriteError> {
        self.kept().for_each(|entry| writer.omit(entry));
        copy_extents(&self.local_extents, target, writer, Trust::Verify)
    }

    /// Copies everything that matches from `source`, the directory that was searched, for a tree that is to stand on
    /// its own: a new volume that is nearly the same as another. Blocks are shared where the file system can do that.
    ///
    /// What has gone or changed meanwhile is not copied; [`TreeWriter::missing`] then names it.
    ///
    /// # Errors
    ///
    /// The staging directory cannot be written.
    pub fn copy_from(&self, source: &Path, writer: &mut TreeWriter, trust: Trust) -> Result<(), WriteError> {
        let manifest = writer.manifest().clone();
        let Ok(mut cursor) = Cursor::through(source) else { return Ok(()) };
        for index in self.kept() {
            let Ok(file) = open_file(&mut cursor, &manifest.entries()[index].path) else { continue };
            match writer.copy_file(index, &file.into(), trust) {
                Ok(()) | Err(WriteError::DigestMismatch { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        copy_extents(&self.local_extents, source, writer, trust)
    }
}

/// Copies extents from the same places of the same paths below `source`, as far as they are there.
fn copy_extents(
    ordinals: &OrdinalRanges,
    source: &Path,
    writer: &mut TreeWriter,
    trust: Trust,
) -> Result<(), WriteError> {
    let manifest = writer.manifest().clone();
    let Ok(mut cursor) = Cursor::through(source) else { return Ok(()) };
    let mut open: Option<(usize, Option<File>)> = None;
    for located in ordinals.runs().flat_map(|run| manifest.extents_in(run)) {
        if open.as_ref().is_none_or(|(entry, _)| *entry != located.entry) {
            let opened = open_file(&mut cursor, &manifest.entries()[located.entry].path);
            open = Some((located.entry, opened.ok().map(File::from)));
        }
        let Some((_, Some(file))) = &open else { continue };
        match writer.copy_extent(located.ordinal, file, located.extent.offset, trust) {
            Ok(()) | Err(WriteError::DigestMismatch { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn open_file(cursor: &mut Cursor, path: &[u8]) -> io::Result<OwnedFd> {
    let (parent, name) = split(path);
    let directory = cursor.go(parent)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(&directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL.into());
    }
    Ok(file)
}

/// Finds out what of `manifest` stands at the same paths below `target` already.
///
/// Files are read, unless `cache` knows them. Of `options`, ownership and what to exclude are not regarded. A target
/// that does not exist has nothing.
///
/// # Errors
///
/// The target cannot be read, or the search was told to stop.
pub fn local_matches(
    target: &Path,
    manifest: &Manifest,
    options: &ScanOptions<'_>,
    mut cache: Option<&mut StatCache>,
) -> Result<Matches, ScanError> {
    let is_foreign = |path: &Path, _| {
        use std::os::unix::ffi::OsStrExt;
        manifest.find(path.as_os_str().as_bytes()).is_none()
    };
    let options = ScanOptions { ownership: ScannedOwnership::Keep, exclude: Some(&is_foreign), ..*options };
    let there = match scan(target, &options, cache.as_deref_mut()) {
        Ok(there) => there,
        Err(ScanError::Root(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Matches::default());
        }
        Err(error) => return Err(error),
    };
    let is_change = |problem: &&Problem| !matches!(problem.what, ProblemKind::SkippedXattr(_));
    let changed: BTreeSet<&Path> =
        there.problems.iter().filter(is_change).map(|problem| problem.path.as_path()).collect();
    let mut cursor = Cursor::through(target).map_err(ScanError::Root)?;

    let mut matches = Matches { files_read: there.files_read, ..Matches::default() };
    for (index, entry) in manifest.entries().iter().enumerate() {
        let EntryKind::File { size_bytes, extents } = &entry.kind else { continue };
        let Some(there_at) = there.manifest.find(&entry.path) else { continue };
        let entry_there = &there.manifest.entries()[there_at];
        let Some((size_there, extents_there)) = content_at(&there.manifest, &entry.path) else { continue };
        if changed.contains(entry.path()) {
            continue;
        }
        if size_there == *size_bytes
            && extents_there == extents
            && let Some(fingerprint) = may_stay(&mut cursor, entry_there, cache.as_deref())
        {
            matches.kept.insert(index, fingerprint);
            if entry_there.xattrs == entry.xattrs {
                matches.attributes.insert(index);
            }
            for ordinal in manifest.ordinals_of(index) {
                // Ascending, so it cannot be refused.
                _ = matches.kept_extents.insert(ordinal);
            }
            continue;
        }
        for (ordinal, extent) in manifest.ordinals_of(index).zip(extents) {
            let same = extents_there.binary_search_by_key(&extent.offset, |there| there.offset);
            if same.is_ok_and(|same| extents_there[same] == *extent) {
                // Ascending, so it cannot be refused.
                _ = matches.local_extents.insert(ordinal);
            }
        }
    }
    Ok(matches)
}

/// Size and extents of the file at a path, if there is one.
fn content_at<'a>(manifest: &'a Manifest, path: &[u8]) -> Option<(u64, &'a [Extent])> {
    match &manifest.entries()[manifest.find(path)?].kind {
        EntryKind::File { size_bytes, extents } => Some((*size_bytes, extents)),
        EntryKind::HardLink { to } => content_at(manifest, to),
        _ => None,
    }
}

/// The file at a path, if its metadata can be changed without changing another: it has one name, and is ours.
fn may_stay(cursor: &mut Cursor, there: &Entry, cache: Option<&StatCache>) -> Option<Fingerprint> {
    let (uid, _) = caller();
    if !uid.is_root() && there.uid != uid.as_raw() {
        return None;
    }
    // What the cache knows was looked at just now.
    let known = cache.and_then(|cache| cache.fingerprint(&there.path));
    let fingerprint = match known {
        Some(known) => known,
        None => {
            let stat = stat_at(cursor, &there.path)?;
            // Else it was written to since it was read.
            has_times(&stat, there).then(|| Fingerprint::of(&stat))?
        }
    };
    fingerprint.has_one_name().then_some(fingerprint)
}

/// The regular file at a path, if there is one.
fn stat_at(cursor: &mut Cursor, path: &[u8]) -> Option<Stat> {
    let (parent, name) = split(path);
    let directory = cursor.go(parent).ok()?;
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(stat)
}

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
    let mut merge = Merge {
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
    merge.look_for_obstacles()?;

    make_workable(merge.staged.root(), b".").map_err(|error| failed(error.into()))?;
    if made || !options.keep_root {
        make_workable(merge.target.root(), b".").map_err(|error| failed(error.into()))?;
    }
    for (index, entry) in manifest.entries().iter().enumerate().skip(1) {
        merge.place(index, entry)?;
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
    merge.give_modes_back();
    Ok(merge.merged)
}

struct Merge<'a> {
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

impl<'a> Merge<'a> {
    /// Refuses to begin if a directory would have to be removed for something that is none, or something is mounted where
    /// something has to be renamed.
    fn look_for_obstacles(&mut self) -> Result<(), MergeError> {
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

    fn place(&mut self, index: usize, entry: &'a Entry) -> Result<(), MergeError> {
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
                return self.keep(index, entry, *found);
            }
            match verdict {
                Verdict::Take => {}
                Verdict::Leave => return Ok(()),
                Verdict::PutBeside => {
                    self.beside = Some(&entry.path);
                    self.put_beside.insert(index);
                    return self.put_beside(entry, &staged, &directory).map_err(|error| failed(error.into()));
                }
            }
        }
        match &entry.kind {
            EntryKind::Directory => {
                if self.keeps_directory(index) {
                    self.note_mode(&directory, entry);
                }
                place_directory(&directory, name).map_err(|error| failed(error.into()))?;
                make_workable(&staged, name).map_err(|error| failed(error.into()))
            }
            EntryKind::File { .. } if let Some(found) = self.matches.kept.get(&index) => {
                self.keep(index, entry, *found)
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
                    self.make_way(&directory, name).map_err(|error| failed(error.into()))?;
                }
                if self.standing.is_some() {
                    rights::take_over(&directory, &staged, name);
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
    fn make_way(&mut self, directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        if self.standing.is_none() {
            // It was empty, and still is, or this fails.
            return unlinkat(directory, name, AtFlags::REMOVEDIR);
        }
        // It goes with the staged tree.
        renameat(directory, name, self.staged.root(), unused_name())
    }

    /// Puts an entry with all that is in it beside what stands at its path.
    fn put_beside(&mut self, entry: &Entry, staged: &OwnedFd, directory: &OwnedFd) -> Result<(), Errno> {
        let (parent, name) = split(&entry.path);
        for number in 1.. {
            let beside = name_beside(name, number);
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
    fn note_mode(&mut self, directory: &OwnedFd, entry: &'a Entry) {
        let Ok(stat) = statat(directory, split(&entry.path).1, AtFlags::SYMLINK_NOFOLLOW) else { return };
        let mode = Mode::from_raw_mode(stat.st_mode);
        if !mode.contains(Mode::RWXU) {
            self.modes.push((&entry.path, mode));
        }
    }

    fn give_modes_back(&mut self) {
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
    fn keep(&mut self, index: usize, entry: &Entry, found: Fingerprint) -> Result<(), MergeError> {
        let path = || entry.path().to_owned();
        let stat =
            stat_at(&mut self.target, &entry.path).ok_or_else(|| MergeError::Missing { path: path() })?;
        let now = Fingerprint::of(&stat);
        if !now.was_not_written_since(&found) {
            return Err(MergeError::Changed { path: path() });
        }
        if now == found && self.matches.attributes.contains(&index) && self.metadata.is_right(entry, &stat) {
            self.merged.kept += 1;
            return Ok(());
        }
        let file =
            open_file(&mut self.target, &entry.path).map_err(|_| MergeError::Missing { path: path() })?;
        self.merged.kept += 1;
        self.merged.corrected += 1;
        self.metadata.take_over(&file).map_err(|error| MergeError::new(entry, error.into()))?;
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

/// Tells a cache of the files that stand below `target` now that `manifest` was written there, so that the next
/// [`local_matches`] need not read them.
///
/// The writer gave each file its mtime after its last byte. So a file that still has it, and whose mtime is older than
/// `settle`, was not written to since, as that would have made it younger: its ctime, which is that of its renaming, need
/// not have settled. What is younger, or is otherwise than the manifest says, is not remembered.
pub fn remember(target: &Path, manifest: &Manifest, cache: &mut StatCache, settle: Duration) {
    let now = SystemTime::now();
    // What cannot be found is read the next time.
    let Ok(mut cursor) = Cursor::through(target) else { return };
    for entry in manifest.entries() {
        let EntryKind::File { size_bytes, extents } = &entry.kind else { continue };
        let Some(stat) = stat_at(&mut cursor, &entry.path) else { continue };
        let fingerprint = Fingerprint::of(&stat);
        if stat.st_size.cast_unsigned() == *size_bytes
            && has_times(&stat, entry)
            && fingerprint.was_written_before(now, settle)
        {
            let content = Content { xattrs: entry.xattrs.clone(), extents: extents.clone() };
            cache.insert(entry.path.clone(), fingerprint, content);
        }
    }
}

/// The name beside `name` for a result that cannot take its place.
fn name_beside(name: &[u8], number: u32) -> Vec<u8> {
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
        Some(FileType::Directory) => return make_workable(directory, name),
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

/// A name that nobody else uses, most likely.
fn unused_name() -> String {
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
