//! Bytes in and out of directories.
//!
//! A directory travels as a [`Manifest`], which lists its entries with the digest of each extent of content, followed
//! by only the extents that the receiver lacks. This crate turns directories into manifests and content, and back; how
//! both travel is the business of its callers, the gateways and the command line.
//!
//! ```text
//! sender                                          receiver
//! scan(root) ──▶ Manifest ── entries, digest ──▶ ManifestBuilder ──▶ Manifest
//!                                                     │ which extents are here already?
//! TreeReader ◀───────────── Runs of ordinals ─────────┘ (local_matches, or an index of extents)
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
//! | To | use |
//! |---|---|
//! | describe a directory | [`scan()`], with a [`StatCache`] if it is scanned again and again |
//! | send a manifest | [`Manifest::parts`] and [`Entry::encode`]; to keep it, [`Manifest::encode`] |
//! | receive one | [`ManifestBuilder::push_encoded`]; then compare [`Manifest::tree_digest`] |
//! | say which extents | [`OrdinalRanges`]; what a writer still lacks is [`TreeWriter::missing`] |
//! | tell what may come next, file by file | [`PendingExtents`] |
//! | send content | [`TreeReader::batches`] |
//! | receive it | [`TreeWriter::put`], or [`Manifest::verify`] in other threads and [`TreeWriter::put_verified`] |
//! | use what is here already | [`TreeWriter::copy_extent`], [`TreeWriter::copy_file`]; of a whole directory, [`local_matches`] and [`Matches::copy_from`] |
//! | download into a directory | [`local_matches`], [`Matches::prepare`], then [`merge()`] or [`replace`] |
//! | bring a tree back to where it was sent from | [`changes`], [`Standing`], [`remove_gone`] |
//! | keep out what runs with the caller's rights | [`guard()`], which drops it from the manifest |
//! | pack and unpack tar archives | [`ArchiveWriter`], [`ArchiveReader`] |
//! | pass one on, and know whether it was whole | [`ArchiveEnd`] |
//! | pass one on without names of users and groups | [`Nameless`] |
//! | pack a directory of a tree | [`Manifest::subtree`] |
//! | clean up | [`remove_tree`] |
//! | walk through a foreign tree | [`TreeWalk`], of any depth and width |
//!
//! Everything here blocks: async callers run it in threads of their own. Types that do work own what they need, so
//! they may move from one blocking call to the next.
//!
//! Invariant: nothing in a tree or a manifest, whoever made it, leads to a path outside of the directory that the
//! caller named. Manifests are validated before they exist ([`ManifestBuilder`]), and the file system is reached from the
//! root's descriptor only, one component at a time, never through a symbolic link.

mod budget;
mod cache;
mod dirs;
mod encoding;
mod entry;
mod guard;
mod in_place;
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
pub use manifest::{InvalidManifest, Limits, Located, Manifest, ManifestBuilder};
pub use matches::{Matches, local_matches, remember};
pub use merge::{MergeError, MergeOptions, Merged, merge};
pub use metadata::{LeftOut, LeftOutKind, WrittenOwnership};
pub use ordinal_ranges::{InvalidRange, OrdinalRanges};
pub use pending_extents::PendingExtents;
pub use read::{Batches, ExtentData, ReadError, ReadOptions, TreeReader};
pub use remove::{RemoveError, remove_tree};
pub use replace::{ReplaceError, replace};
pub use scan::{
    Exclude, OtherFileSystems, Problem, ProblemKind, Progress, Scan, ScanError, ScanOptions,
    ScannedOwnership, scan,
};
pub use subtree::Subtree;
pub use tar::{
    ArchiveEnd, ArchiveError, ArchiveReader, ArchiveWriteError, ArchiveWriter, ArchivedExtent,
    MAX_EXTENSION_BYTES, MAX_REGIONS, Nameless, NoArchive,
};
pub use walk::{Descent, TreeWalk};
pub use write::{TreeWriter, Trust, Verified, WriteError, WriteOptions, Written};
