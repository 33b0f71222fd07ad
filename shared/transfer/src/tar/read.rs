//! Reading of archives into manifests and content.

use std::io::{self, Read};
use std::ops::Range;
use std::path::PathBuf;

use bytes::Bytes;
use domain::Digest;

use super::members::{MemberKind, Members};
use super::tree::Tree;
use crate::entry::{Entry, EntryKind, Extent, MAX_EXTENT_BYTES};
use crate::manifest::{InvalidManifest, Limits, Manifest};
use crate::ordinal_ranges::OrdinalRanges;
use crate::pending_extents::PendingExtents;
use crate::read::ExtentData;

/// Minimum bytes of an extent in an encoded entry: those of its digest.
const ENCODED_EXTENT_BYTES: usize = 32;

/// An archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The bytes of the archive cannot be read.
    #[error("cannot read the archive")]
    Source(#[source] io::Error),
    /// The receiver of the content failed.
    #[error("cannot deliver the content of the archive")]
    Sink(#[source] io::Error),
    /// The archive is truncated.
    #[error("cannot read the archive: it is truncated after {offset} bytes{}", colon(text))]
    Truncated {
        /// Number of received bytes.
        offset: u64,
        /// Error message of the server at the end of the archive. May be empty.
        text: String,
    },
    /// Other bytes follow the end of the archive.
    #[error("cannot read the archive: other bytes follow its end{}", colon(text))]
    Trailing {
        /// The first of these bytes.
        text: String,
    },
    /// A block is not a header.
    #[error("cannot read the archive: there is no header at byte {offset}{}", colon(text))]
    NoHeader {
        /// Offset of the block.
        offset: u64,
        /// The first bytes of the block.
        text: String,
    },
    /// The extension headers before an entry are malformed.
    #[error("cannot read the archive before byte {offset}: {what}")]
    Extension {
        /// Offset after the headers.
        offset: u64,
        /// The fault.
        what: &'static str,
    },
    /// A path leads out of the archive, is empty or is too long.
    #[error("cannot unpack {path:?}: the path is unsafe")]
    UnsafePath {
        /// The path.
        path: PathBuf,
    },
    /// The type of an entry is not supported.
    #[error("cannot unpack {path:?}: the type {kind:?} is not supported")]
    Type {
        /// Path of the entry.
        path: PathBuf,
        /// The type.
        kind: char,
    },
    /// An entry is malformed.
    #[error("cannot unpack {path:?}: malformed entry: {what}")]
    Malformed {
        /// Path of the entry.
        path: PathBuf,
        /// The fault.
        what: &'static str,
    },
    /// The entries of the archive do not form a manifest.
    #[error("cannot make a manifest of the archive")]
    Manifest(#[from] InvalidManifest),
    /// The manifest has no extent with this ordinal.
    #[error("cannot read extent {0}: the manifest has no such extent")]
    NoSuchExtent(u64),
    /// The content of the archive differs from the manifest.
    #[error("cannot use the archive: the content of {path:?} differs from the manifest")]
    Changed {
        /// The first file with a difference.
        path: PathBuf,
    },
}

fn colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// An extent with its content in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchivedExtent<'a> {
    /// The extent.
    pub extent: Extent,
    /// All bytes of the extent.
    pub data: &'a [u8],
}

/// A reader of an archive. Each method consumes it.
#[derive(Debug)]
pub struct ArchiveReader<R: Read> {
    pub(super) members: Members<R>,
}

impl<R: Read> ArchiveReader<R> {
    /// Creates a reader. The archive must end with the end of `source`.
    pub fn new(source: R) -> Self {
        Self { members: Members::new(source) }
    }

    /// Reads the archive into a manifest. Passes each extent to `sink` in the order of the archive,
    /// including extents of files that a later entry replaces. The ordinals are known only at the
    /// end, so `sink` must store content by digest.
    ///
    /// # Errors
    ///
    /// Fails if the archive cannot be read, is rejected or is truncated, or if `sink` fails.
    pub fn read(
        self,
        limits: Limits,
        sink: impl FnMut(ArchivedExtent<'_>) -> io::Result<()>,
    ) -> Result<Manifest, ArchiveError> {
        Ok(self.read_with_implied(limits, sink)?.0)
    }

    /// Reads the archive of a layer of an image like [`read`](Self::read). Also returns the paths
    /// of the directories that the archive does not describe, in ascending order. Such a directory
    /// leaves the one of the layers below as it is.
    ///
    /// The zero blocks at the end may be missing, as in layers that `umoci insert --opaque` writes.
    /// The digest of a layer proves that it is complete.
    ///
    /// # Errors
    ///
    /// Fails as [`read`](Self::read) does.
    pub fn read_layer(
        mut self,
        limits: Limits,
        sink: impl FnMut(ArchivedExtent<'_>) -> io::Result<()>,
    ) -> Result<(Manifest, Vec<Vec<u8>>), ArchiveError> {
        self.members.accept_missing_end();
        self.read_with_implied(limits, sink)
    }

    fn read_with_implied(
        mut self,
        limits: Limits,
        mut sink: impl FnMut(ArchivedExtent<'_>) -> io::Result<()>,
    ) -> Result<(Manifest, Vec<Vec<u8>>), ArchiveError> {
        let mut tree = Tree::new(limits);
        let mut buffer = vec![0; MAX_EXTENT_BYTES as usize];
        while let Some(member) = self.members.next()? {
            let mut extents = Vec::new();
            if let MemberKind::File { .. } = member.kind {
                for (offset, length) in self.members.data().into_iter().flat_map(cut) {
                    tree.count(ENCODED_EXTENT_BYTES)?;
                    let data = &mut buffer[..length as usize];
                    self.members.read(offset, data)?;
                    let digest = Digest(*blake3::hash(data).as_bytes());
                    let extent = Extent { offset, length, digest };
                    sink(ArchivedExtent { extent, data }).map_err(ArchiveError::Sink)?;
                    extents.push(extent);
                }
            }
            tree.add(member, extents)?;
        }
        tree.finish()
    }

    /// Verifies the first file of the archive against `entry`, and passes its extents to `sink`.
    /// The name of the file in the archive is ignored.
    ///
    /// # Errors
    ///
    /// Fails if the archive cannot be read, is rejected or is truncated, if an extent is missing or
    /// differs, or if `sink` fails.
    pub fn file(
        mut self,
        entry: &Entry,
        mut sink: impl FnMut(&Extent, Bytes) -> io::Result<()>,
    ) -> Result<(), ArchiveError> {
        let mut found = false;
        while let Some(member) = self.members.next()? {
            let MemberKind::File { .. } = member.kind else { continue };
            if std::mem::replace(&mut found, true) {
                continue;
            }
            for extent in entry.extents() {
                let mut data = vec![0; extent.length as usize];
                self.members.read(extent.offset, &mut data)?;
                if Digest(*blake3::hash(&data).as_bytes()) != extent.digest {
                    return Err(ArchiveError::Changed { path: entry.path().to_owned() });
                }
                sink(extent, data.into()).map_err(ArchiveError::Sink)?;
            }
        }
        if found { Ok(()) } else { Err(ArchiveError::Changed { path: entry.path().to_owned() }) }
    }

    /// Verifies the `wanted` extents of a tree, and passes each once to `sink`, in the order of the
    /// archive. Ordinals ascend only if the entries are in canonical order, unlike those of GNU
    /// tar.
    ///
    /// The manifest may come from an archive or from a directory. An extent is found by its offset
    /// in its file, independent of the holes of the archive. A file with several paths is found at
    /// each path. Other content of the archive is ignored, and may have changed. If a path is
    /// repeated, any matching content is used. A file that was replaced after a link to it is not
    /// found at its old path.
    ///
    /// # Errors
    ///
    /// Fails if the archive cannot be read, is rejected or is truncated, if an extent is missing or
    /// differs, or if `sink` fails.
    pub fn extents(
        mut self,
        manifest: &Manifest,
        wanted: &OrdinalRanges,
        mut sink: impl FnMut(ExtentData) -> io::Result<()>,
    ) -> Result<(), ArchiveError> {
        if let Some(last) = wanted.last().filter(|last| *last >= manifest.extent_count()) {
            return Err(ArchiveError::NoSuchExtent(last));
        }
        let mut missing = PendingExtents::new(wanted);
        while let Some(member) = self.members.next()? {
            let MemberKind::File { .. } = member.kind else { continue };
            let Some(index) = file_at(manifest, &member.path) else { continue };
            for located in manifest.extents_in(manifest.ordinals_of(index)) {
                if !missing.contains(located.ordinal) {
                    continue;
                }
                let Extent { offset, length, digest } = *located.extent;
                let mut data = vec![0; length as usize];
                self.members.read(offset, &mut data)?;
                if Digest(*blake3::hash(&data).as_bytes()) == digest {
                    missing.remove(located.ordinal);
                    let data = Bytes::from(data);
                    sink(ExtentData { ordinal: located.ordinal, data }).map_err(ArchiveError::Sink)?;
                }
            }
        }
        let lacking = wanted.ordinals().find(|ordinal| missing.contains(*ordinal));
        match lacking.and_then(|ordinal| manifest.locate(ordinal)) {
            Some(located) => {
                let path = manifest.entries()[located.entry].path().to_owned();
                Err(ArchiveError::Changed { path })
            }
            None => Ok(()),
        }
    }
}

/// Returns the index of the file at a path. A hard link leads to its file.
pub(super) fn file_at(manifest: &Manifest, path: &[u8]) -> Option<usize> {
    let index = manifest.find(path)?;
    match &manifest.entries()[index].kind {
        EntryKind::File { .. } => Some(index),
        EntryKind::HardLink { to } => manifest.find(to),
        _ => None,
    }
}

/// Divides a region of data into extents at multiples of 1 MiB, like the scan.
fn cut(region: Range<u64>) -> impl Iterator<Item = (u64, u32)> {
    let step = u64::from(MAX_EXTENT_BYTES);
    let mut offset = region.start;
    std::iter::from_fn(move || {
        let end = region.end.min((offset / step + 1) * step);
        let length = (end - offset) as u32; // At most one step.
        let start = std::mem::replace(&mut offset, end);
        (length > 0).then_some((start, length))
    })
}
