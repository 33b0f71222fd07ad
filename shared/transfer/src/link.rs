//! Sharing of files between trees by hard links.
//!
//! A new tree takes a file from a tree that no process writes to any more. Both trees then have the
//! same file, which has the metadata of both. Each tree can be removed without the other.
//!
//! Invariant: two names of a new tree lead to one file only if they are hard links in its manifest.
//! So each file is linked at most once, even if several sources share it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, linkat, openat};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::{Entry, EntryKind, split};
use crate::manifest::Manifest;
use crate::write::{TreeWriter, WriteError};
use crate::xattrs;

/// Maximum number of names of a file that gets another one. File systems permit 65,000 or more, and
/// a tree may need many for its own hard links.
const MAX_NAMES: u64 = 10_000;

/// A complete tree whose files never change, as a source of links.
#[derive(Debug)]
pub struct SealedTree {
    manifest: Arc<Manifest>,
    cursor: Cursor,
}

impl SealedTree {
    /// Opens the tree of `manifest` in the directory `root`.
    ///
    /// # Errors
    ///
    /// Fails if `root` cannot be opened.
    pub fn open(root: &Path, manifest: Arc<Manifest>) -> io::Result<Self> {
        Ok(Self { manifest, cursor: Cursor::through(root)? })
    }
}

impl TreeWriter {
    /// Makes the file at index `entry` another name of the file at index `of` in `source`. Its
    /// content is not read. The size, owner, mode, time and attributes of the file must be those of
    /// both manifests.
    ///
    /// Returns `false` without any effect if the files differ, or if the file systems do not permit
    /// the link.
    ///
    /// # Errors
    ///
    /// Fails if a part of the file is written already, or if the disk is full or fails.
    pub fn link_file(
        &mut self,
        entry: usize,
        source: &mut SealedTree,
        of: usize,
    ) -> Result<bool, WriteError> {
        let (manifest, theirs) = (self.manifest().clone(), source.manifest.clone());
        if let Some(filled) = manifest.ordinals_of(entry).find(|ordinal| self.is_filled(*ordinal)) {
            return Err(WriteError::OutOfOrder(filled));
        }
        let (Some(new), Some(known)) = (manifest.entries().get(entry), theirs.entries().get(of)) else {
            return Ok(false);
        };
        if !self.writes_owners() || !new.is_same_file(known) {
            return Ok(false);
        }
        let (from, from_name) = split(&known.path);
        let Ok(from) = source.cursor.go(from) else { return Ok(false) };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let Ok(file) = openat(&from, from_name, flags, Mode::empty()) else { return Ok(false) };
        let Ok(stat) = fstat(&file) else { return Ok(false) };
        let is_linkable = self.has_metadata(new, &stat)
            && stat.st_nlink < MAX_NAMES
            && has_size_and_attributes(new, &file, &stat);
        let id = (stat.st_dev, stat.st_ino);
        if !is_linkable || self.linked.contains(&id) {
            return Ok(false);
        }
        let (to, to_name) = self.parent_of(new)?;
        match linkat(&from, from_name, &to, to_name, AtFlags::empty()) {
            Ok(()) => {}
            Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => {
                return Err(WriteError::new(new, error.into()));
            }
            // The file is on another file system, has too many names, or belongs to another user.
            Err(_) => return Ok(false),
        }
        self.linked.insert(id);
        self.mark_file_filled(entry);
        Ok(true)
    }
}

/// Whether a file has the size and the attributes of an entry, and none that a manifest would leave
/// out.
fn has_size_and_attributes(entry: &Entry, file: &OwnedFd, stat: &Stat) -> bool {
    let EntryKind::File { size_bytes, .. } = entry.kind else { return false };
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_size.cast_unsigned() == size_bytes
        && xattrs::find(file, true)
            .is_ok_and(|found| found.portable == entry.xattrs && found.skipped.is_empty())
}

impl Entry {
    /// Whether both entries are files that differ at most in their paths.
    #[must_use]
    pub fn is_same_file(&self, other: &Self) -> bool {
        let metadata =
            |entry: &Self| (entry.mode, entry.uid, entry.gid, entry.mtime_seconds, entry.mtime_nanos);
        matches!(self.kind, EntryKind::File { .. })
            && self.kind == other.kind
            && metadata(self) == metadata(other)
            && self.xattrs == other.xattrs
    }
}
