//! Sharing of files between trees by hard links.
//!
//! A new tree takes a file from a tree that no process writes to any more. Both trees then have the
//! same file, which has the metadata of both. Each tree can be removed without the other.
//!
//! Invariant: two names of a new tree lead to one file only if they are hard links in its manifest.
//! So each file of a source is linked at most once.

use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, linkat, statat};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::{Entry, EntryKind, split};
use crate::manifest::Manifest;
use crate::write::{TreeWriter, WriteError};

/// A complete tree whose files never change, as a source of links.
#[derive(Debug)]
pub struct SealedTree {
    manifest: Arc<Manifest>,
    cursor: Cursor,
    /// Files that were linked.
    used: HashSet<usize>,
    /// Whether the tree is on another file system than the new one.
    is_far: bool,
}

impl SealedTree {
    /// Opens the tree of `manifest` in the directory `root`.
    ///
    /// # Errors
    ///
    /// Fails if `root` cannot be opened.
    pub fn open(root: &Path, manifest: Arc<Manifest>) -> io::Result<Self> {
        Ok(Self { manifest, cursor: Cursor::through(root)?, used: HashSet::new(), is_far: false })
    }

    /// Returns the manifest.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }
}

impl TreeWriter {
    /// Makes the file at index `entry` another name of the file at index `of` in `source`. Its
    /// content is not read. The size, owner, mode and times of the file must be those of both
    /// manifests.
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
        let may_link = self.writes_owners() && new.is_same_file(known);
        if !may_link || source.is_far || source.used.contains(&of) {
            return Ok(false);
        }
        let (from, from_name) = split(&known.path);
        let Ok(from) = source.cursor.go(from) else { return Ok(false) };
        let Ok(stat) = statat(&from, from_name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(false) };
        let EntryKind::File { size_bytes, .. } = new.kind else { return Ok(false) };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_file || stat.st_size.cast_unsigned() != size_bytes || !self.has_metadata(new, &stat) {
            return Ok(false);
        }
        let (to, to_name) = self.parent_of(new)?;
        match linkat(&from, from_name, &to, to_name, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::XDEV) => {
                source.is_far = true;
                return Ok(false);
            }
            // Too many links, or the file belongs to another user.
            Err(Errno::MLINK | Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOENT) => {
                return Ok(false);
            }
            Err(error) => return Err(WriteError::new(new, error.into())),
        }
        source.used.insert(of);
        self.mark_file_filled(entry);
        Ok(true)
    }
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
