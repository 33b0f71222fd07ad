//! Matches: the content of a tree that a target directory already has.
//!
//! A download compares its manifest with the target, and fetches only the rest. Files whose content
//! is right stay. Other extents are copied from files at the same paths.

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

/// The content of a tree that a target already has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Matches {
    /// Files with the right content, which may stay, by index of their entry.
    pub(crate) kept: BTreeMap<usize, Fingerprint>,
    /// Kept files whose extended attributes are right, too.
    pub(crate) attributes: BTreeSet<usize>,
    /// Extents of kept files.
    kept_extents: OrdinalRanges,
    /// Extents of other files that the target has at the same path and offset.
    local_extents: OrdinalRanges,
    files_read: u64,
}

impl Matches {
    /// Returns the indices of the files that stay.
    pub fn kept(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.kept.keys().copied()
    }

    /// Returns the number of files that were read because the cache did not contain them.
    #[must_use]
    pub fn files_read(&self) -> u64 {
        self.files_read
    }

    /// Returns the extents of the files that stay. They need no download.
    #[must_use]
    pub fn kept_extents(&self) -> &OrdinalRanges {
        &self.kept_extents
    }

    /// Returns the extents that can be copied from the target. They need no download.
    #[must_use]
    pub fn local_extents(&self) -> &OrdinalRanges {
        &self.local_extents
    }

    /// Returns the extents that must be downloaded.
    #[must_use]
    pub fn wanted(&self, manifest: &Manifest) -> OrdinalRanges {
        self.kept_extents.union(&self.local_extents).complement(manifest.extent_count())
    }

    /// Omits the files that stay from a writer of the same manifest, and copies the local extents
    /// from `target`.
    ///
    /// Extents that the target has lost meanwhile are not copied. [`TreeWriter::missing`] then
    /// contains them.
    ///
    /// # Errors
    ///
    /// Fails if the staging directory cannot be written.
    pub fn prepare(&self, target: &Path, writer: &mut TreeWriter) -> Result<(), WriteError> {
        self.kept().for_each(|entry| writer.omit(entry));
        copy_extents(&self.local_extents, target, writer, Trust::Verify)
    }

    /// Copies all matches from `source`, the directory that was compared, into an independent tree.
    /// A new volume that is similar to another one is made in this way. The copies share blocks if
    /// the file system supports that.
    ///
    /// Content that is gone or changed meanwhile is not copied. [`TreeWriter::missing`] then
    /// contains it.
    ///
    /// # Errors
    ///
    /// Fails if the staging directory cannot be written.
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

/// Copies extents from the same paths and offsets below `source`. Skips those that are gone.
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

/// Finds the content of `manifest` that `target` already has at the same paths.
///
/// Reads the files that `cache` does not contain. Ignores ownership and exclusions of `options`. A
/// missing target has no matches.
///
/// # Errors
///
/// Fails if the target cannot be read, or if the scan was stopped.
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
    let target_scan = match scan(target, &options, cache.as_deref_mut()) {
        Ok(scan) => scan,
        Err(ScanError::Root(error)) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Matches::default());
        }
        Err(error) => return Err(error),
    };
    let is_change = |problem: &&Problem| !matches!(problem.what, ProblemKind::SkippedXattr(_));
    let changed: BTreeSet<&Path> =
        target_scan.problems.iter().filter(is_change).map(|problem| problem.path.as_path()).collect();
    let mut cursor = Cursor::through(target).map_err(ScanError::Root)?;

    let mut matches = Matches { files_read: target_scan.files_read, ..Matches::default() };
    for (index, entry) in manifest.entries().iter().enumerate() {
        let EntryKind::File { size_bytes, extents } = &entry.kind else { continue };
        let Some(target_index) = target_scan.manifest.find(&entry.path) else { continue };
        let target_entry = &target_scan.manifest.entries()[target_index];
        let Some((target_size, target_extents)) = content_at(&target_scan.manifest, &entry.path) else {
            continue;
        };
        if changed.contains(entry.path()) {
            continue;
        }
        if target_size == *size_bytes
            && target_extents == extents
            && let Some(fingerprint) = reusable_file(&mut cursor, target_entry, cache.as_deref())
        {
            matches.kept.insert(index, fingerprint);
            if target_entry.xattrs == entry.xattrs {
                matches.attributes.insert(index);
            }
            for ordinal in manifest.ordinals_of(index) {
                // Ordinals ascend, so this cannot fail.
                _ = matches.kept_extents.insert(ordinal);
            }
            continue;
        }
        for (ordinal, extent) in manifest.ordinals_of(index).zip(extents) {
            let same = target_extents.binary_search_by_key(&extent.offset, |extent| extent.offset);
            if same.is_ok_and(|same| target_extents[same] == *extent) {
                // Ordinals ascend, so this cannot fail.
                _ = matches.local_extents.insert(ordinal);
            }
        }
    }
    Ok(matches)
}

/// Returns the size and the extents of the file at a path.
fn content_at<'a>(manifest: &'a Manifest, path: &[u8]) -> Option<(u64, &'a [Extent])> {
    match &manifest.entries()[manifest.find(path)?].kind {
        EntryKind::File { size_bytes, extents } => Some((*size_bytes, extents)),
        EntryKind::HardLink { to } => content_at(manifest, to),
        _ => None,
    }
}

/// Returns the fingerprint of a file that may stay: it has a single link, and its owner is the
/// caller.
fn reusable_file(cursor: &mut Cursor, entry: &Entry, cache: Option<&StatCache>) -> Option<Fingerprint> {
    let (uid, _) = caller();
    if !uid.is_root() && entry.uid != uid.as_raw() {
        return None;
    }
    // The scan has just checked the files in the cache.
    let cached = cache.and_then(|cache| cache.fingerprint(&entry.path));
    let fingerprint = match cached {
        Some(cached) => cached,
        None => {
            let stat = stat_at(cursor, &entry.path)?;
            // With other times, the file was written after the scan has read it.
            has_times(&stat, entry).then(|| Fingerprint::of(&stat))?
        }
    };
    fingerprint.has_one_name().then_some(fingerprint)
}

/// Returns the stat of the regular file at a path.
pub(crate) fn stat_at(cursor: &mut Cursor, path: &[u8]) -> Option<Stat> {
    let (parent, name) = split(path);
    let directory = cursor.go(parent).ok()?;
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(stat)
}

/// Adds the files below `target` to `cache` after `manifest` was written there. The next
/// [`local_matches`] then need not read them.
///
/// The writer has set the mtime of each file after its last byte. A file with that mtime, if it is
/// older than `settle`, was not written since, because a write would have changed the mtime. Its
/// ctime is that of its rename, and need not be settled. Younger files, and files that differ from
/// the manifest, are not added.
pub fn remember(target: &Path, manifest: &Manifest, cache: &mut StatCache, settle: Duration) {
    let now = SystemTime::now();
    // Files that are not added are read the next time.
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
