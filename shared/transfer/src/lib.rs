//! Transfer of directories: manifests, extents, and the reading and writing of trees.
//!
//! A directory is sent as a [`Manifest`], which lists its entries with the digest of each extent,
//! followed by the extents that the receiver lacks. This crate converts directories to manifests
//! and content, and back. Its callers, the gateways and the command line, send both over the
//! network.
//!
//! ```text
//! sender                                          receiver
//! scan(root) ──▶ Manifest ── entries, digest ──▶ ManifestBuilder ──▶ Manifest
//!                                                     │ which extents are local already?
//! TreeReader ◀──────────── ranges of ordinals ────────┘ (local_matches, or an index of extents)
//!     └──────────── (ordinal, content) … ───────▶ TreeWriter::put …, finish
//! ```
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//! use gantry_transfer::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let scan = scan(Path::new("from"), &ScanOptions::default(), None)?;
//! let manifest = Arc::new(scan.manifest);
//! let mut reader = TreeReader::new(Path::new("from"), manifest.clone(), ReadOptions::default())?;
//! let mut writer = TreeWriter::new(Path::new("to"), manifest.clone(), WriteOptions::default())?;
//! for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
//!     for extent in batch? {
//!         writer.put(extent.ordinal, &extent.data)?;
//!     }
//! }
//! writer.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! | Task | Items |
//! |---|---|
//! | Describe a directory | [`scan()`], with a [`StatCache`] for repeated scans |
//! | Describe an overlay above a known tree | [`scan()`] with a [`Layer`] |
//! | Send a manifest | [`Manifest::parts`] and [`Entry::encode`] |
//! | Store a manifest | [`Manifest::encode`] |
//! | Receive a manifest | [`ManifestBuilder::push_encoded`], then compare [`Manifest::tree_digest`] |
//! | Name extents | [`OrdinalRanges`]; [`TreeWriter::missing`] for those that a writer lacks |
//! | Check the order of received extents | [`PendingExtents`] |
//! | Send content | [`TreeReader::batches`] |
//! | Receive content | [`TreeWriter::put`], or [`Manifest::verify`] in other threads and [`TreeWriter::put_verified`] |
//! | Reuse local content | [`TreeWriter::copy_extent`], [`TreeWriter::copy_file`] |
//! | Find damage of a complete tree | [`inspect()`] |
//! | Share files with a complete tree | [`SealedTree`], [`TreeWriter::link_file`] |
//! | Reuse the content of a directory | [`local_matches`] and [`Matches::copy_from`] |
//! | Download into a directory | [`local_matches`], [`Matches::prepare`], then [`merge()`] or [`replace()`] |
//! | Return a tree to the directory that it was sent from | [`changes`], [`Standing`], [`remove_gone`] |
//! | Drop entries that would run with the caller's rights | [`guard()`] |
//! | Pack and unpack tar archives | [`ArchiveWriter`], [`ArchiveReader`] |
//! | Forward an archive and detect its end | [`ArchiveEnd`] |
//! | Forward an archive without names of users and groups | [`Nameless`] |
//! | Pack a directory of a tree | [`Manifest::subtree`] |
//! | Remove a tree | [`remove_tree`] |
//! | Walk through an untrusted tree of any depth and width | [`TreeWalk`] |
//!
//! All functions block. Async callers must run them in separate threads. Readers and writers own
//! their data, so a caller can move them between blocking calls.
//!
//! Invariant: no tree or manifest leads to a path outside of the directory that the caller names,
//! even if its creator is malicious. [`ManifestBuilder`] validates manifests. The file system is
//! reached from the descriptor of the root, one component at a time, never through a symbolic link.

mod budget;
mod cache;
mod dirs;
mod encoding;
mod entry;
mod guard;
mod in_place;
mod inspect;
mod link;
mod manifest;
mod matches;
mod merge;
mod metadata;
mod ordinal_ranges;
mod pending_extents;
mod read;
mod remove;
mod replace;
mod rights;
mod scan;
mod subtree;
mod tar;
mod target;
mod walk;
mod write;
mod xattrs;

pub use budget::Budget;
pub use cache::{CacheFault, LoadedCache, SaveError, StatCache};
pub use entry::{
    DeviceKind, Entry, EntryFault, EntryKind, Extent, MAX_EXTENT_BYTES, MAX_FILE_BYTES, MAX_NAME_BYTES,
    MAX_PATH_BYTES, MAX_SYMLINK_BYTES, MAX_XATTR_VALUE_BYTES, MAX_XATTRS_BYTES, Xattr, compare_paths,
};
pub use guard::{Allowed, Dropped, DroppedKind, Guarded, guard};
pub use in_place::{Conflict, Gone, Standing, changes, remove_gone};
pub use inspect::{Difference, inspect, is_media_error};
pub use link::SealedTree;
pub use manifest::{InvalidManifest, Limits, LocatedExtent, Manifest, ManifestBuilder};
pub use matches::{Matches, local_matches, remember};
pub use merge::{MergeError, MergeOptions, MergeSummary, merge};
pub use metadata::{SkippedPart, SkippedPartKind, WrittenOwnership};
pub use ordinal_ranges::{InvalidRange, OrdinalRanges};
pub use pending_extents::PendingExtents;
pub use read::{Batches, ExtentData, ReadError, ReadOptions, TreeReader};
pub use remove::{RemoveError, remove_tree};
pub use replace::{ReplaceError, replace};
pub use scan::{
    Exclude, Layer, OtherFileSystems, Problem, ProblemKind, Progress, Scan, ScanError, ScanOptions,
    ScannedOwnership, scan,
};
pub use subtree::Subtree;
pub use tar::{
    ArchiveEnd, ArchiveError, ArchiveReader, ArchiveWriteError, ArchiveWriter, ArchivedExtent,
    MAX_EXTENSION_BYTES, MAX_REGIONS, Nameless, NotAnArchive,
};
pub use walk::{Descent, TreeWalk};
pub use write::{TreeWriter, Trust, Verified, WriteError, WriteOptions, WriteSummary};
