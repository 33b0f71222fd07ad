//! Entries of trees.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use domain::Digest;

/// Longest path, in bytes.
pub const MAX_PATH_BYTES: usize = 4096;
/// Longest component of a path, in bytes.
pub const MAX_NAME_BYTES: usize = 255;
/// Longest target of a symbolic link, in bytes.
pub const MAX_SYMLINK_BYTES: usize = 4095;
/// Longest extent, in bytes.
pub const MAX_EXTENT_BYTES: u32 = 1 << 20;
/// Most bytes of names and values of the extended attributes of one entry.
pub const MAX_XATTRS_BYTES: usize = 512 << 10;
/// Longest value of an extended attribute, in bytes.
pub const MAX_XATTR_VALUE_BYTES: usize = 64 << 10;
/// Greatest size of a file: what a file offset can say.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// One entry of a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its path below the root, with slashes; empty for the root itself.
    pub path: Vec<u8>,
    /// Permission bits with setuid, setgid and sticky: 0 to 07777. 0 for symbolic and hard links.
    pub mode: u32,
    /// Owner. 0 for hard links.
    pub uid: u32,
    /// Group. 0 for hard links.
    pub gid: u32,
    /// When it was last modified: seconds since 1970. 0 for hard links.
    pub mtime_seconds: i64,
    /// When it was last modified: nanoseconds within the second. 0 for hard links.
    pub mtime_nanos: u32,
    /// Extended attributes in ascending order of their names. Only files and directories have some.
    pub xattrs: Vec<Xattr>,
    /// What it is.
    pub kind: EntryKind,
}

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xattr {
    /// Its name: `user.…` or `security.capability`.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A regular file; the first of its hard links.
    File {
        /// Its size. What no extent covers reads as zeroes and is a hole.
        size_bytes: u64,
        /// Its content, ascending, without overlap.
        extents: Vec<Extent>,
    },
    /// A symbolic link.
    Symlink {
        /// Where it points, kept as it is.
        target: Vec<u8>,
    },
    /// Another link to a file.
    HardLink {
        /// Path of the file, which comes earlier.
        to: Vec<u8>,
    },
    /// A named pipe.
    Fifo,
    /// A device.
    Device {
        /// Character or block.
        kind: DeviceKind,
        /// Its major number.
        major: u32,
        /// Its minor number.
        minor: u32,
    },
}

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Character device.
    Character,
    /// Block device.
    Block,
}

/// A piece of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Where it stands in the file.
    pub offset: u64,
    /// How long it is: 1 byte to [`MAX_EXTENT_BYTES`].
    pub length: u32,
    /// BLAKE3 of its bytes.
    pub digest: Digest,
}

/// A rule that an entry breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// It is no encoded entry.
    #[error("is malformed: {0}")]
    Malformed(String),
    /// It says not what it is.
    #[error("has no kind")]
    NoKind,
    /// Its path has an empty component, `.`, `..` or NUL, or is longer than a path may be.
    #[error("has an unsafe path")]
    Path,
    /// Its path does not come after that of the entry before.
    #[error("is out of order or repeated")]
    Order,
    /// The directory it is in is no entry, or is none of a directory.
    #[error("is in no directory of the manifest")]
    Parent,
    /// The mode has other bits than 07777, or the kind of entry has no mode.
    #[error("has an impossible mode")]
    Mode,
    /// Its owner or group is the id that means "leave it as it is" to the system.
    #[error("has an impossible owner")]
    Owner,
    /// Nanoseconds do not stay below a second.
    #[error("has an impossible modification time")]
    Mtime,
    /// A hard link has metadata of its own.
    #[error("is a hard link with metadata of its own")]
    HardLinkMetadata,
    /// A hard link points to something else than an earlier regular file.
    #[error("is a hard link to something else than an earlier regular file")]
    HardLinkTarget,
    /// The target of a symbolic link is empty, too long, or holds NUL.
    #[error("is a symbolic link with an impossible target")]
    SymlinkTarget,
    /// A name is repeated, out of order or none that may travel; a value is too long; or this kind of entry has none.
    #[error("has extended attributes that cannot travel")]
    Xattrs,
    /// A file is larger than a file can be.
    #[error("has an impossible size")]
    Size,
    /// It was begun, and what came then was not the rest of it.
    #[error("is not finished")]
    Unfinished,
    /// Extents overlap, are out of order, pass the end of the file, or have an impossible length.
    #[error("has impossible extents")]
    Extents,
    /// The digest of an extent has another length than 32 bytes.
    #[error("has an extent with an impossible digest")]
    ExtentDigest,
    /// A device is neither character nor block.
    #[error("is a device of no kind")]
    DeviceKind,
}

impl Entry {
    /// Its path below the root.
    #[must_use]
    pub fn path(&self) -> &Path {
        as_path(&self.path)
    }

    /// Its extents; none unless it is a file.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        match &self.kind {
            EntryKind::File { extents, .. } => extents,
            _ => &[],
        }
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.kind == EntryKind::Directory
    }

    /// Checks every rule that concerns it alone.
    ///
    /// # Errors
    ///
    /// The rule that it breaks.
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

/// Whether an extended attribute of this name belongs into a manifest.
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

/// Orders paths component by component. Neither holds NUL.
#[must_use]
pub fn compare_paths(a: &[u8], b: &[u8]) -> Ordering {
    // A slash sorts before all other bytes: a component that ends is less than one that goes on.
    let rank = |byte: &u8| if *byte == b'/' { 0 } else { *byte };
    a.iter().map(rank).cmp(b.iter().map(rank))
}

/// The directory that a path is in, and its name there. The root is in itself, without a name.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
