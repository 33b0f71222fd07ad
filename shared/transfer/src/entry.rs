//! Entries of trees, and the rules that each entry must obey.
//!
//! [`Entry::check`] enforces the rules of single entries. [`crate::ManifestBuilder`] enforces the
//! rules between entries.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use domain::Digest;

/// Maximum length of a path, in bytes.
pub const MAX_PATH_BYTES: usize = 4096;
/// Maximum length of a path component, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Maximum length of a symbolic link's target, in bytes.
pub const MAX_SYMLINK_BYTES: usize = 4095;
/// Maximum length of an extent, in bytes.
pub const MAX_EXTENT_BYTES: u32 = 1 << 20;
/// Maximum bytes of an entry's extended attributes, names and values together.
pub const MAX_XATTRS_BYTES: usize = 512 << 10;
/// Maximum length of an extended attribute's value, in bytes.
pub const MAX_XATTR_VALUE_BYTES: usize = 64 << 10;
/// Maximum size of a file, in bytes: the greatest file offset.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// An entry of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Path below the root, with slashes. Empty for the root.
    pub path: Vec<u8>,
    /// Permission bits with setuid, setgid and sticky: 0 to 07777. 0 for symbolic and hard links.
    pub mode: u32,
    /// User id of the owner. 0 for hard links.
    pub uid: u32,
    /// Group id. 0 for hard links.
    pub gid: u32,
    /// Modification time, in seconds since 1970. 0 for hard links.
    pub mtime_seconds: i64,
    /// Nanoseconds within the second of the modification time. 0 for hard links.
    pub mtime_nanos: u32,
    /// Extended attributes in ascending order of their names. Only files and directories have them.
    pub xattrs: Vec<Xattr>,
    /// Kind of the entry, with the data of that kind.
    pub kind: EntryKind,
}

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xattr {
    /// Name: `user.…` or `security.capability`.
    pub name: Vec<u8>,
    /// Value.
    pub value: Vec<u8>,
}

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A regular file, at the first of its hard links.
    File {
        /// Size of the file. A range without an extent is a hole, which reads as zeroes.
        size_bytes: u64,
        /// Content, in ascending order and without overlap.
        extents: Vec<Extent>,
    },
    /// A symbolic link.
    Symlink {
        /// Target, stored verbatim.
        target: Vec<u8>,
    },
    /// A further hard link to a file.
    HardLink {
        /// Path of the file. Its entry comes earlier.
        to: Vec<u8>,
    },
    /// A named pipe.
    Fifo,
    /// A device node.
    Device {
        /// Kind of the device.
        kind: DeviceKind,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
}

/// The kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Character device.
    Character,
    /// Block device.
    Block,
}

/// A part of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes: 1 to [`MAX_EXTENT_BYTES`].
    pub length: u32,
    /// BLAKE3 digest of the bytes.
    pub digest: Digest,
}

/// A rule that an entry violates. The text continues "entry PATH".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// The bytes are not an encoded entry.
    #[error("is malformed: {0}")]
    Malformed(String),
    /// The encoded entry has no kind.
    #[error("has no kind")]
    NoKind,
    /// The path is too long, or has an empty component, `.`, `..` or NUL.
    #[error("has an unsafe path")]
    Path,
    /// The path does not come after the path of the previous entry.
    #[error("is out of order or repeated")]
    Order,
    /// The parent is not an entry of a directory.
    #[error("is in no directory of the manifest")]
    Parent,
    /// The mode has bits outside of 07777, or the kind of entry has no mode.
    #[error("has an invalid mode")]
    Mode,
    /// The owner or group is the id that means "unchanged" in system calls.
    #[error("has an invalid owner")]
    Owner,
    /// The nanoseconds are a second or more.
    #[error("has an invalid modification time")]
    Mtime,
    /// A hard link has metadata.
    #[error("is a hard link with separate metadata")]
    HardLinkMetadata,
    /// The target of a hard link is not an earlier regular file.
    #[error("is a hard link to a path without an earlier regular file")]
    HardLinkTarget,
    /// The target of a symbolic link is empty, too long, or has NUL.
    #[error("is a symbolic link with an invalid target")]
    SymlinkTarget,
    /// A name is repeated, out of order or not portable; a value is too long; or this kind of entry
    /// has no attributes.
    #[error("has invalid extended attributes")]
    Xattrs,
    /// A file is larger than [`MAX_FILE_BYTES`].
    #[error("has an invalid size")]
    Size,
    /// The next message does not continue the extents of a started file.
    #[error("is not finished")]
    Unfinished,
    /// Extents overlap, are out of order, exceed the file, or have an invalid length.
    #[error("has invalid extents")]
    Extents,
    /// The digest of an extent does not have 32 bytes.
    #[error("has an extent with an invalid digest")]
    ExtentDigest,
    /// A device is neither a character device nor a block device.
    #[error("is a device of unknown kind")]
    DeviceKind,
}

impl Entry {
    /// Returns the path below the root.
    #[must_use]
    pub fn path(&self) -> &Path {
        as_path(&self.path)
    }

    /// Returns the extents of a file, or nothing for other kinds.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        match &self.kind {
            EntryKind::File { extents, .. } => extents,
            _ => &[],
        }
    }

    /// Whether the entry is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.kind == EntryKind::Directory
    }

    /// Checks all rules that concern only this entry.
    ///
    /// # Errors
    ///
    /// Returns the first violated rule.
    pub fn check(&self) -> Result<(), EntryFault> {
        if !is_safe_path(&self.path) {
            return Err(EntryFault::Path);
        }
        if self.mode > 0o7777 || (self.mode != 0 && matches!(self.kind, EntryKind::Symlink { .. })) {
            return Err(EntryFault::Mode);
        }
        if self.mtime_nanos >= 1_000_000_000 {
            return Err(EntryFault::Mtime);
        }
        if self.uid == u32::MAX || self.gid == u32::MAX {
            return Err(EntryFault::Owner);
        }
        check_xattrs(&self.xattrs, &self.kind)?;
        match &self.kind {
            EntryKind::File { size_bytes, extents } => check_extents(*size_bytes, extents),
            EntryKind::Symlink { target } => {
                let possible =
                    !target.is_empty() && target.len() <= MAX_SYMLINK_BYTES && !target.contains(&0);
                possible.then_some(()).ok_or(EntryFault::SymlinkTarget)
            }
            EntryKind::HardLink { to } => {
                let plain = (self.mode, self.uid, self.gid, self.mtime_seconds, self.mtime_nanos);
                if plain != (0, 0, 0, 0, 0) {
                    return Err(EntryFault::HardLinkMetadata);
                }
                (!to.is_empty() && is_safe_path(to)).then_some(()).ok_or(EntryFault::HardLinkTarget)
            }
            EntryKind::Directory | EntryKind::Fifo | EntryKind::Device { .. } => Ok(()),
        }
    }
}

fn check_xattrs(xattrs: &[Xattr], kind: &EntryKind) -> Result<(), EntryFault> {
    let is_file = matches!(kind, EntryKind::File { .. });
    let possible =
        |xattr: &Xattr| is_portable_xattr(&xattr.name, is_file) && xattr.value.len() <= MAX_XATTR_VALUE_BYTES;
    let bytes: usize = xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len()).sum();
    let ok = (xattrs.is_empty() || is_file || *kind == EntryKind::Directory)
        && xattrs.iter().all(possible)
        && xattrs.is_sorted_by(|a, b| a.name < b.name)
        && bytes <= MAX_XATTRS_BYTES;
    ok.then_some(()).ok_or(EntryFault::Xattrs)
}

/// Whether manifests include the extended attribute `name`.
pub(crate) fn is_portable_xattr(name: &[u8], is_file: bool) -> bool {
    let user = name.strip_prefix(b"user.").is_some_and(|rest| !rest.is_empty());
    (user && name.len() <= MAX_NAME_BYTES && !name.contains(&0))
        || (is_file && name == b"security.capability")
}

fn check_extents(size_bytes: u64, extents: &[Extent]) -> Result<(), EntryFault> {
    if size_bytes > MAX_FILE_BYTES {
        return Err(EntryFault::Size);
    }
    let mut end = 0;
    for extent in extents {
        if extent.offset < end || !(1..=MAX_EXTENT_BYTES).contains(&extent.length) {
            return Err(EntryFault::Extents);
        }
        end = extent.offset.checked_add(extent.length.into()).ok_or(EntryFault::Extents)?;
    }
    (end <= size_bytes).then_some(()).ok_or(EntryFault::Extents)
}

pub(crate) fn is_safe_path(path: &[u8]) -> bool {
    let safe = |name: &[u8]| {
        !name.is_empty()
            && name != b"."
            && name != b".."
            && name.len() <= MAX_NAME_BYTES
            && !name.contains(&0)
    };
    path.is_empty() || (path.len() <= MAX_PATH_BYTES && path.split(|byte| *byte == b'/').all(safe))
}

/// Compares two paths component by component. The paths must not contain NUL.
#[must_use]
pub fn compare_paths(a: &[u8], b: &[u8]) -> Ordering {
    // A slash sorts before all other bytes, so that a component sorts before its extensions.
    let rank = |byte: &u8| if *byte == b'/' { 0 } else { *byte };
    a.iter().map(rank).cmp(b.iter().map(rank))
}

/// Splits a path into the path of its parent and its name. The root is its own parent and has an
/// empty name.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
