//! Matches of a target with a manifest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, openat, statat};
use rustix::io::Errno;

use crate::cache::{Content, Fingerprint, StatCache};
use crate::dirs::Cursor;
use crate::entry::{Entry, EntryKind, Extent, split};
use crate::manifest::Manifest;
use crate::metadata::{caller, has_times};
use crate::ordinal_ranges::OrdinalRanges;
use crate::scan::{Problem, ProblemKind, ScanError, ScanOptions, ScannedOwnership, scan};
use crate::write::{TreeWriter, Trust, WriteError};

/// What a target has already of a tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matches {
    /// Files that may stay where they are, as indices of entries, as they were found: their content is right.
    pub(crate) kept: BTreeMap<usize, Fingerprint>,
    /// Of these, those whose extended attributes are right as well.
    pub(crate) attributes: BTreeSet<usize>,
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

pub(crate) fn open_file(cursor: &mut Cursor, path: &[u8]) -> io::Result<OwnedFd> {
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
            && let Some(fingerprint) = reusable_file(&mut cursor, entry_there, cache.as_deref())
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
fn reusable_file(cursor: &mut Cursor, there: &Entry, cache: Option<&StatCache>) -> Option<Fingerprint> {
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
pub(crate) fn stat_at(cursor: &mut Cursor, path: &[u8]) -> Option<Stat> {
    let (parent, name) = split(path);
    let directory = cursor.go(parent).ok()?;
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(stat)
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
