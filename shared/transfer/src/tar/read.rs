//! Reading: from an archive to a manifest, and to content.

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

/// What an extent takes in an encoded entry: at least its digest.
const ENCODED_EXTENT_BYTES: usize = 32;

/// An archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The bytes of the archive cannot be read.
    #[error("cannot read the archive")]
    Source(#[source] io::Error),
    /// Content cannot be handed over.
    #[error("cannot hand over what the archive holds")]
    Sink(#[source] io::Error),
    /// It is cut off.
    #[error("the archive is cut off after {offset} bytes{}", colon(text))]
    Truncated {
        /// How many bytes there were.
        offset: u64,
        /// What its server says about that; may be empty.
        text: String,
    },
    /// Something comes after its end.
    #[error("something comes after the end of the archive{}", colon(text))]
    Trailing {
        /// The beginning of it.
        text: String,
    },
    /// There is something else where a header should be.
    #[error("there is no header at byte {offset}{}", colon(text))]
    NoHeader {
        /// Where it should be.
        offset: u64,
        /// The beginning of what is there.
        text: String,
    },
    /// The headers that come before that of an entry make no sense.
    #[error("{what}, before byte {offset}")]
    Extension {
        /// Where they end.
        offset: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// A path leads out of the archive, is empty or too long.
    #[error("path {path:?} is unsafe")]
    UnsafePath {
        /// The path.
        path: PathBuf,
    },
    /// An entry is of a type that no manifest has.
    #[error("entry {path:?} is of unknown type {kind:?}")]
    Type {
        /// Its path.
        path: PathBuf,
        /// The type.
        kind: char,
    },
    /// An entry makes no sense.
    #[error("entry {path:?} is malformed: {what}")]
    Malformed {
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// What the archive holds makes no manifest.
    #[error("the archive makes no manifest")]
    Manifest(#[from] InvalidManifest),
    /// The manifest has no extent with this ordinal.
    #[error("there is no extent {0}")]
    NoSuchExtent(u64),
    /// The archive has other content than the manifest.
    #[error("the content of {path:?} is not what the manifest says")]
    Changed {
        /// The first file of which something is missing.
        path: PathBuf,
    },
}

fn colon(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// Content that passes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchivedExtent<'a> {
    /// Where and what it is.
    pub extent: Extent,
    /// All of its bytes.
    pub data: &'a [u8],
}

/// Reads an archive, once.
#[derive(Debug)]
pub struct ArchiveReader<R: Read> {
    pub(super) members: Members<R>,
}

impl<R: Read> ArchiveReader<R> {
    /// A reader of the archive that `source` yields, to its end.
    pub fn new(source: R) -> Self {
        Self { members: Members::new(source) }
    }

    /// Learns what the archive holds. Each extent is handed to `sink` as it passes by, in the order of the archive,
    /// also those of files that are replaced later; which ordinal it has is known only in the end, so whoever keeps
    /// content keeps it by digest.
    ///
    /// # Errors
    ///
    /// It cannot be read, is refused, or does not end as archives end; or what `sink` says.
    pub fn read(
        mut self,
        limits: Limits,
        mut sink: impl FnMut(ArchivedExtent<'_>) -> io::Result<()>,
    ) -> Result<Manifest, ArchiveError> {
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

    /// Yields the extents of the first file in the archive to `sink`, whatever the archive calls it, each verified against `entry`.
    ///
    /// # Errors
    ///
    /// It cannot be read, is refused, or does not end as archives end; an extent is missing or has changed; or what
    /// `sink` says.
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

    /// Yields the `wanted` extents of a tree to `sink`, each once and verified, in the order of the archive: ordinals
    /// ascend only if its entries are in canonical order, which those of GNU tar are not.
    ///
    /// The manifest may be one of an archive or of a directory: an extent is found by its place in its file, wherever
    /// the archive has holes. A file that stands at several paths is found at each of them. What the archive holds
    /// besides is passed over; it may have changed. Where a path is repeated, whatever matches is
    /// taken; only a file that was replaced after it was linked to is not found at its old path.
    ///
    /// # Errors
    ///
    /// It cannot be read, is refused, or does not end as archives end; an extent is missing or has changed; or what
    /// `sink` says.
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

/// Index of the file that stands at a path, perhaps as a hard link.
pub(super) fn file_at(manifest: &Manifest, path: &[u8]) -> Option<usize> {
    let index = manifest.find(path)?;
    match &manifest.entries()[index].kind {
        EntryKind::File { .. } => Some(index),
        EntryKind::HardLink { to } => manifest.find(to),
        _ => None,
    }
}

/// Extents of a region of data: cut at multiples of 1 MiB, as the scanner does it.
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
