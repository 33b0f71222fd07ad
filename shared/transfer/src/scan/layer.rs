//! The upper layer of an overlay, which tells which entries a scan need not read.
//!
//! An entry of the overlay that the upper layer lacks is an entry of the tree below. It has the
//! same path there, unless a directory above it was renamed, which the kernel notes as a redirect.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;

use rustix::fs::{AtFlags, fgetxattr, statat};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::{Entry, EntryKind, MAX_PATH_BYTES};
use crate::manifest::Manifest;
use crate::subtree::is_at_or_below;

/// The upper layer of an overlay, above a tree with a known manifest. No process writes to the
/// overlay during the scan.
#[derive(Debug, Clone, Copy)]
pub struct Layer<'a> {
    /// The manifest of the tree below.
    pub below: &'a Manifest,
    /// The directory of the upper layer.
    pub upper: &'a Path,
    /// Whether the overlay is mounted with `userxattr`, so that the kernel makes no redirects.
    pub user_attributes: bool,
}

/// The upper layer during a walk through the overlay.
pub(super) struct Upper<'a> {
    layer: Layer<'a>,
    cursor: Cursor,
    /// Paths below with further hard links. In an overlay, their files are not linked.
    linked: HashSet<&'a [u8]>,
}

impl<'a> Upper<'a> {
    pub(super) fn open(layer: Layer<'a>) -> io::Result<Self> {
        let targets = layer.below.entries().iter().filter_map(|entry| match &entry.kind {
            EntryKind::HardLink { to } => Some(&to[..]),
            _ => None,
        });
        Ok(Self { layer, cursor: Cursor::new(layer.upper)?, linked: targets.collect() })
    }

    /// Returns the indices below of the entry `name` in `parent`, and of its contents, if all of
    /// them are as they are below. `below` is the path of `parent` below.
    pub(super) fn unchanged(&mut self, parent: &[u8], name: &[u8], below: &[u8]) -> Option<Range<usize>> {
        let is_changed = match self.cursor.go(parent) {
            Ok(directory) => {
                !matches!(statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT))
            }
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if is_changed {
            return None;
        }
        let old = join(below, name);
        let entries = self.layer.below.entries();
        let first = self.layer.below.find(&old)?;
        let contents = entries[first..].partition_point(|entry| is_at_or_below(&entry.path, &old));
        let found = first..first + contents;
        let growth = join(parent, name).len().saturating_sub(old.len());
        let is_same = |entry: &Entry| {
            !matches!(entry.kind, EntryKind::HardLink { .. })
                && !self.linked.contains(&entry.path[..])
                && entry.path.len() + growth <= MAX_PATH_BYTES
        };
        entries[found.clone()].iter().all(is_same).then_some(found)
    }

    /// Returns the entries at these indices below, whose first one is at `path` in the overlay.
    pub(super) fn entries(&self, found: Range<usize>, path: &[u8]) -> impl Iterator<Item = Entry> {
        let entries = &self.layer.below.entries()[found];
        let old = entries.first().map_or(0, |first| first.path.len());
        entries.iter().map(move |entry| Entry { path: [path, &entry.path[old..]].concat(), ..entry.clone() })
    }

    /// Returns the path below of the directory `name` in `parent`, which is at `below` there.
    /// `None`: it is not known.
    pub(super) fn below(&mut self, parent: &[u8], name: &[u8], below: &[u8]) -> Option<Vec<u8>> {
        let same = join(below, name);
        let directory = match self.cursor.go(&join(parent, name)) {
            Ok(directory) => directory,
            Err(error) => return (error.kind() == io::ErrorKind::NotFound).then_some(same),
        };
        if self.layer.user_attributes {
            return Some(same);
        }
        let mut redirect = vec![0; MAX_PATH_BYTES];
        match fgetxattr(&directory, "trusted.overlay.redirect", &mut redirect[..]) {
            Ok(length) => redirect.truncate(length),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Some(same),
            Err(_) => return None,
        }
        // The path from the root of the overlay, or another name in the same directory.
        Some(match redirect.strip_prefix(b"/") {
            Some(path) => path.to_vec(),
            None => join(below, &redirect),
        })
    }
}

/// Returns the path of a name in a directory.
pub(super) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}
