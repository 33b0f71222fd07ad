//! Conversion between trees and tar archives, as streams and without a directory on disk.
//!
//! ```text
//! Manifest, extents by ordinal ──▶ ArchiveWriter ──▶ bytes ──▶ tar -x
//! tar -c ──▶ bytes ──▶ ArchiveReader::read    ──▶ Manifest, and all extents
//!                      ArchiveReader::extents ──▶ requested extents, verified
//!                      ArchiveReader::compare ──▶ whether the archive contains a known tree
//! ```
//!
//! # Written archives
//!
//! The writer writes POSIX archives (PAX) for GNU tar, with names `./`, `./a`, … and numeric
//! owners. PAX records contain values that do not fit into headers:
//!
//! - long paths and targets, large owners and sizes, nanoseconds;
//! - extended attributes (`SCHILY.xattr.…`);
//! - maps of files with holes (`GNU.sparse`, version 1.0).
//!
//! The bytes of paths are unchanged, even if they are invalid UTF-8. Equal manifests make equal
//! archives.
//!
//! # Read archives
//!
//! The reader accepts V7, POSIX and GNU archives, and files with holes in all formats of GNU tar
//! (old, 0.0, 0.1 and 1.0). Entries may come in any order. As with tar, a later entry replaces an
//! earlier one at the same path, and a slash at the start of a name has no meaning. The reader
//! keeps the extended attributes that manifests include. Missing directories get mode 0755 and
//! owner 0.
//!
//! The reader rejects:
//!
//! - paths with `..`, and paths through an entry that is not a directory;
//! - types that manifests do not have, such as sockets;
//! - archives without a proper end, and archives above the [`Limits`](crate::Limits).
//!
//! # Equal digests
//!
//! A tree may be written by an [`ArchiveWriter`], unpacked and packed by GNU tar, and read by an
//! [`ArchiveReader`]. It keeps its digest if tar runs with `--xattrs --xattrs-include='*'` both
//! times, and with `--sparse --format=posix` to pack. Without these options:
//!
//! - without `--format=posix`, modification times lose their nanoseconds;
//! - without `--xattrs`, extended attributes are lost;
//! - without `--sparse`, holes become extents of zeroes, because the reader cannot tell them from
//!   data.
//!
//! Two limits remain. The file system between rounds holes to its blocks, and holes that are no
//! multiples of 512 bytes are written with zeroes at their edges. GNU tar cannot unpack paths of
//! more than 4093 bytes, because it passes the whole path with `./` to the kernel.
//!
//! # Why this is not a library
//!
//! The `tar` crate (0.4) reads long names and PAX records of any declared size into memory. It does
//! not support the `GNU.sparse` maps of PAX, and returns holes as zeroes without the map. With
//! workarounds for all of this, only the parser of a single block would remain.
//!
//! Invariant: the limits of the manifest, [`MAX_EXTENSION_BYTES`] and [`MAX_REGIONS`] bound the
//! memory. The reader never allocates memory for declared bytes that have not arrived.

mod compare;
mod end;
mod header;
mod members;
mod names;
mod pax;
mod read;
mod tree;
mod write;

pub use end::{ArchiveEnd, NotAnArchive};
pub use members::{MAX_EXTENSION_BYTES, MAX_REGIONS};
pub use names::Nameless;
pub use read::{ArchiveError, ArchiveReader, ArchivedExtent};
pub use write::{ArchiveWriteError, ArchiveWriter};

/// Bytes of a block. Headers and padded contents are multiples of it.
const BLOCK_BYTES: usize = 512;

/// Returns the padding after `length` bytes up to the next block.
fn padding(length: u64) -> u64 {
    let block = BLOCK_BYTES as u64;
    (block - length % block) % block
}
