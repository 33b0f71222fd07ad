//! Trees as tar archives, as streams, without a directory in between.
//!
//! ```text
//! Manifest, extents by ordinal ──▶ ArchiveWriter ──▶ bytes ──▶ tar -x
//! tar -c ──▶ bytes ──▶ ArchiveReader::read    ──▶ Manifest, and each extent as it passes by
//!                      ArchiveReader::extents ──▶ the extents that are wanted, verified
//!                      ArchiveReader::compare ──▶ whether it is the tree that it should be
//! ```
//!
//! # What is written
//!
//! POSIX archives (PAX) as GNU tar reads them: names `./`, `./a`, …, numeric owners. Records hold what headers cannot:
//! long paths and targets, owners and sizes beyond octal digits, nanoseconds, extended attributes
//! (`SCHILY.xattr.…`), and maps of files with holes (`GNU.sparse`, version 1.0). The bytes of paths stay what they
//! are, UTF-8 or not. Equal manifests make equal archives.
//!
//! # What is read
//!
//! V7, POSIX and GNU archives, and files with holes in each of GNU tar's formats (old, 0.0, 0.1 and 1.0). Entries may
//! come in any order, and what comes later replaces what came before at the same path, as with tar. Of extended
//! attributes those stay that may travel. Directories that are missing get mode 0755 and owner 0. A slash that a name
//! begins with means nothing, as to tar.
//!
//! Refused: paths with `..`, paths through something that is no directory, sockets and other types that are
//! none of a manifest, what does not end properly, and what is larger than the [`Limits`](crate::Limits).
//!
//! # When digests are equal
//!
//! A tree that goes out through an [`ArchiveWriter`], is unpacked by GNU tar, packed again and comes back through an
//! [`ArchiveReader`], has the digest that it had if tar was run with `--xattrs --xattrs-include='*'` both times, and
//! with `--sparse --format=posix` to pack. Without:
//!
//! - no `--format=posix`: modification times lose their nanoseconds;
//! - no `--xattrs`: extended attributes are lost;
//! - no `--sparse`: holes come back as zeroes. Data is data: extents of zeroes are kept as extents, since nothing tells
//!   which of them was a hole.
//!
//! Even with these, holes are what the file system between makes of them: they begin and end at its blocks, and holes
//! that are no multiples of 512 bytes are written as zeroes at their edges. And tar cannot unpack paths of more than 4093
//! bytes, since it hands them to the kernel whole, with `./`.
//!
//! # Why not a library
//!
//! The `tar` crate (0.4) reads long names and PAX records into memory whole, as large as they say they are; it does not
//! read the `GNU.sparse` maps of PAX; and it hands out holes as zeroes, without the map. Each would have to be done
//! around it, and what would be left is the parsing of one block.
//!
//! Invariant: memory is bounded by the limits of the manifest, [`MAX_EXTENSION_BYTES`] and [`MAX_REGIONS`], whatever an
//! archive says about itself: nothing is allocated for bytes that have not come.

mod compare;
mod end;
mod header;
mod members;
mod names;
mod pax;
mod read;
mod tree;
mod write;

pub use end::{ArchiveEnd, NoArchive};
pub use members::{MAX_EXTENSION_BYTES, MAX_REGIONS};
pub use names::Nameless;
pub use read::{ArchiveError, ArchiveReader, ArchivedExtent};
pub use write::{ArchiveWriteError, ArchiveWriter};

/// What everything in an archive is a multiple of.
const BLOCK_BYTES: usize = 512;

/// What is added to a length so that it is a multiple of blocks.
fn padding(length: u64) -> u64 {
    let block = BLOCK_BYTES as u64;
    (block - length % block) % block
}
