//! Manifests: what a tree holds, entry by entry, and the digest that names it.
//!
//! Entries stand in the byte order of their paths compared component by component, so that a directory comes right
//! before what it holds. **Ordinals** number the extents of all files in that order, from 0. The **digest of a
//! tree** is BLAKE3 over the length-delimited canonical encoding of each entry in turn.
//!
//! Invariant: a [`Manifest`] is valid. The only way to one is a [`ManifestBuilder`], which checks each entry when it
//! is pushed, so whoever holds a manifest may apply it without asking again whether a path is safe.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::iter;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use domain::Digest;

use crate::budget::{Budget, ENTRY_MEMORY_BYTES, NoRoom, Reserved};
use crate::ordinal_ranges::OrdinalRanges;

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

/// Why entries make no manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// The first entry is not the root directory.
    #[error("the first entry is not the root directory")]
    NoRoot,
    /// An entry breaks a rule.
    #[error("entry {path:?} {fault}")]
    Entry {
        /// Its path.
        path: PathBuf,
        /// The rule.
        fault: EntryFault,
    },
    /// There are more entries than may be.
    #[error("there are more than {0} entries")]
    TooManyEntries(u64),
    /// The encoded entries are larger than may be.
    #[error("the entries are larger than {0} bytes")]
    TooLarge(u64),
    /// Other manifests take the memory that there is for all.
    #[error("other manifests take the memory that there is for all")]
    NoMemory,
    /// It ends in the midst of an entry.
    #[error("the manifest is cut off")]
    CutOff,
    /// The files together are larger than can be counted.
    #[error("the files are larger than can be counted")]
    SizeOverflow,
}

/// Bytes of encoded entries that any manifest may have.
const ANY_BYTES: u64 = 64 << 20;
/// Bytes that each entry adds to the limit. A few bytes on a disk, such as a link with a long target, make no large manifest.
const ENTRY_BYTES: u64 = 512;
/// Bytes that each extent adds to the limit.
const EXTENT_BYTES: u64 = 64;

/// How much a manifest may hold.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most entries.
    pub entries: u64,
    /// Most bytes of all entries, encoded. The limit is also at most 64 MiB plus 512 bytes for each entry and 64 for each extent.
    pub encoded_bytes: u64,
    /// What the manifest shares with others. `None`: nothing.
    pub budget: Option<&'static Budget>,
}

impl Limits {
    /// The default, within the budget of this process: for what others send.
    #[must_use]
    pub fn of_process() -> Self {
        Self { budget: Some(Budget::of_process()), ..Self::default() }
    }
}

impl From<NoRoom> for InvalidManifest {
    fn from(error: NoRoom) -> Self {
        match error {
            NoRoom::Now => Self::NoMemory,
            NoRoom::Ever(bytes) => Self::TooLarge(bytes),
        }
    }
}

impl Default for Limits {
    /// 10 million entries in 1 GiB.
    fn default() -> Self {
        Self { entries: 10_000_000, encoded_bytes: 1 << 30, budget: None }
    }
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
        |xattr: &Xattr| may_travel(&xattr.name, is_file) && xattr.value.len() <= MAX_XATTR_VALUE_BYTES;
    let bytes: usize = xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len()).sum();
    let ok = (xattrs.is_empty() || is_file || *kind == EntryKind::Directory)
        && xattrs.iter().all(possible)
        && xattrs.is_sorted_by(|a, b| a.name < b.name)
        && bytes <= MAX_XATTRS_BYTES;
    ok.then_some(()).ok_or(EntryFault::Xattrs)
}

/// Whether an extended attribute of this name belongs into a manifest.
pub(crate) fn may_travel(name: &[u8], is_file: bool) -> bool {
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

/// What a tree holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    entries: Vec<Entry>,
    /// Files that have extents, with the ordinal of their first: ascending in both.
    files: Vec<FirstOrdinal>,
    extent_count: u64,
    extent_bytes: u64,
    size_bytes: u64,
    encoded_bytes: u64,
    digest: Digest,
    reserved: Reserved,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FirstOrdinal {
    ordinal: u64,
    entry: usize,
}

/// One extent of a manifest, and where it belongs.
#[derive(Debug, Clone, Copy)]
pub struct Located<'a> {
    /// Its number.
    pub ordinal: u64,
    /// Index of its file among the entries.
    pub entry: usize,
    /// The extent.
    pub extent: &'a Extent,
}

impl Manifest {
    /// Makes a manifest of entries.
    ///
    /// # Errors
    ///
    /// They break a rule, or there are too many.
    pub fn new(entries: impl IntoIterator<Item = Entry>, limits: Limits) -> Result<Self, InvalidManifest> {
        let mut builder = ManifestBuilder::new(limits);
        entries.into_iter().try_for_each(|entry| builder.push(entry))?;
        builder.finish()
    }

    /// Its entries, the root first.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Digest of the tree.
    #[must_use]
    pub fn tree_digest(&self) -> Digest {
        self.digest
    }

    /// Bytes of its files, holes included; each hard-linked file counts once.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of its extents: what a receiver that has nothing must be sent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// How many extents it has: ordinals are less than this.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        self.extent_count
    }

    /// Bytes of its entries when encoded.
    #[must_use]
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes
    }

    /// Gives back what it takes of its budget: whoever keeps it bounds the memory in another way.
    pub fn release_budget(&self) {
        self.reserved.release();
    }

    /// Index of the entry at `path`.
    #[must_use]
    pub fn find(&self, path: &[u8]) -> Option<usize> {
        self.entries.binary_search_by(|entry| compare_paths(&entry.path, path)).ok()
    }

    /// All extents, ascending.
    pub fn extents(&self) -> impl Iterator<Item = Located<'_>> {
        self.extents_in(0..self.extent_count)
    }

    /// The extents with these ordinals, ascending. Ordinals that do not exist are passed over.
    pub fn extents_in(&self, ordinals: Range<u64>) -> impl Iterator<Item = Located<'_>> {
        let first_file = self.files.partition_point(|file| file.ordinal <= ordinals.start).saturating_sub(1);
        self.files[first_file.min(self.files.len())..]
            .iter()
            .take_while(move |file| file.ordinal < ordinals.end)
            .flat_map(move |file| {
                let extents = self.entries[file.entry].extents();
                let skip = usize::try_from(ordinals.start.saturating_sub(file.ordinal)).unwrap_or(usize::MAX);
                let end = ordinals.end;
                (file.ordinal..)
                    .zip(extents)
                    .skip(skip)
                    .take_while(move |(ordinal, _)| *ordinal < end)
                    .map(|(ordinal, extent)| Located { ordinal, entry: file.entry, extent })
            })
    }

    /// The extent with this ordinal.
    #[must_use]
    pub fn locate(&self, ordinal: u64) -> Option<Located<'_>> {
        let file = self.files.partition_point(|file| file.ordinal <= ordinal).checked_sub(1)?;
        let FirstOrdinal { ordinal: first, entry } = self.files[file];
        let index = usize::try_from(ordinal - first).ok()?;
        let extent = self.entries[entry].extents().get(index)?;
        Some(Located { ordinal, entry, extent })
    }

    /// Ordinals of the extents of an entry, given by its index. Empty unless it is a file that has some.
    #[must_use]
    pub fn ordinals_of(&self, entry: usize) -> Range<u64> {
        match self.files.binary_search_by_key(&entry, |file| file.entry) {
            Ok(found) => {
                let first = self.files[found].ordinal;
                first..self.files.get(found + 1).map_or(self.extent_count, |next| next.ordinal)
            }
            Err(_) => 0..0,
        }
    }

    /// Bytes of the extents with these ordinals.
    #[must_use]
    pub fn bytes_of(&self, ordinals: &OrdinalRanges) -> u64 {
        let extents = ordinals.runs().flat_map(|run| self.extents_in(run));
        extents.map(|located| u64::from(located.extent.length)).sum()
    }

    /// Its entries in parts of at most `max_bytes` when encoded; an entry larger than that is a part of its own.
    pub fn parts(&self, max_bytes: usize) -> impl Iterator<Item = &[Entry]> {
        let mut rest = &self.entries[..];
        iter::from_fn(move || {
            let mut bytes = 0;
            let fit = |entry: &&Entry| {
                bytes += encoded_at_most(entry);
                bytes <= max_bytes
            };
            let count = rest.iter().take_while(fit).count().max(1).min(rest.len());
            let (part, after) = rest.split_at(count);
            rest = after;
            (!part.is_empty()).then_some(part)
        })
    }
}

/// At least as many bytes as an entry takes in a message.
fn encoded_at_most(entry: &Entry) -> usize {
    // Tags, lengths and numbers of an extent are 2 + 11 + 7 bytes at most, and its digest 34.
    let xattrs: usize = entry.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len() + 16).sum();
    let kind = match &entry.kind {
        EntryKind::File { extents, .. } => 32 + extents.len() * 56,
        EntryKind::Symlink { target } => target.len(),
        EntryKind::HardLink { to } => to.len(),
        EntryKind::Directory | EntryKind::Fifo | EntryKind::Device { .. } => 32,
    };
    64 + entry.path.len() + xattrs + kind
}

/// Receives the entries of a manifest one after the other, and refuses the first that breaks a rule.
#[derive(Debug)]
pub struct ManifestBuilder {
    limits: Limits,
    manifest: Manifest,
    /// Indices of the directories that the last entry is in, outermost first, and itself if it is one.
    open: Vec<usize>,
    /// A file whose extents have not all come.
    begun: Option<Entry>,
    hasher: blake3::Hasher,
}

impl ManifestBuilder {
    /// A builder that takes at most this much.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let manifest = Manifest {
            entries: Vec::new(),
            files: Vec::new(),
            extent_count: 0,
            extent_bytes: 0,
            size_bytes: 0,
            encoded_bytes: 0,
            digest: Digest([0; 32]),
            reserved: Reserved::of(limits.budget),
        };
        Self { limits, manifest, open: Vec::new(), begun: None, hasher: blake3::Hasher::new() }
    }

    /// How many entries it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.manifest.entries.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.manifest.entries.is_empty()
    }

    /// Adds an entry as it came over the wire; if one was begun, the rest of its extents.
    ///
    /// # Errors
    ///
    /// It is malformed, breaks a rule, or is one too many.
    pub fn push_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        self.push(entry)
    }

    /// Begins, or goes on with, a file that has more extents than fit a message: the next entry has the same path and
    /// size, and further extents. Only the metadata of the first counts.
    ///
    /// # Errors
    ///
    /// It is malformed, no file, or too large.
    pub fn begin_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        if !matches!(entry.kind, EntryKind::File { .. }) {
            return Err(InvalidManifest::Entry { path: entry.path().to_owned(), fault: EntryFault::Extents });
        }
        // Until it is whole. When it is pushed, it counts once more.
        self.manifest.reserved.grow(bytes.len() as u64)?;
        self.begun = Some(entry);
        Ok(())
    }

    /// An entry that came over the wire, as far as it has come.
    fn take(&mut self, bytes: &[u8]) -> Result<Entry, InvalidManifest> {
        if bytes.len() as u64 > self.limits.encoded_bytes {
            return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes));
        }
        let entry =
            Entry::decode_named(bytes).map_err(|(path, fault)| InvalidManifest::Entry { path, fault })?;
        let Some(mut begun) = self.begun.take() else { return Ok(entry) };
        let path = begun.path().to_owned();
        match (&mut begun.kind, entry.kind) {
            (
                EntryKind::File { size_bytes, extents },
                EntryKind::File { size_bytes: same, extents: more },
            ) if begun.path == entry.path && *size_bytes == same => {
                extents.extend(more);
                // Each takes more than its digest.
                if (extents.len() * size_of::<Digest>()) as u64 > self.limits.encoded_bytes {
                    return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes));
                }
                Ok(begun)
            }
            _ => Err(InvalidManifest::Entry { path, fault: EntryFault::Unfinished }),
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    ///
    /// It breaks a rule, or is one too many. Nothing was added.
    pub fn push(&mut self, entry: Entry) -> Result<(), InvalidManifest> {
        let fault = |fault| InvalidManifest::Entry { path: entry.path().to_owned(), fault };
        if let Some(begun) = &self.begun {
            return Err(InvalidManifest::Entry {
                path: begun.path().to_owned(),
                fault: EntryFault::Unfinished,
            });
        }
        if self.len() as u64 >= self.limits.entries {
            return Err(InvalidManifest::TooManyEntries(self.limits.entries));
        }
        entry.check().map_err(fault)?;
        let depth = self.place(&entry)?;
        if let EntryKind::HardLink { to } = &entry.kind {
            let target = self.manifest.find(to).map(|index| &self.manifest.entries[index].kind);
            if !matches!(target, Some(EntryKind::File { .. })) {
                return Err(fault(EntryFault::HardLinkTarget));
            }
        }
        let encoded = entry.encode_length_delimited();
        let encoded_bytes = self.manifest.encoded_bytes + encoded.len() as u64;
        let extents = self.manifest.extent_count + entry.extents().len() as u64;
        let most = ANY_BYTES + ENTRY_BYTES * (self.len() as u64 + 1) + EXTENT_BYTES * extents;
        let most = most.min(self.limits.encoded_bytes);
        if encoded_bytes > most {
            return Err(InvalidManifest::TooLarge(most));
        }
        self.manifest.reserved.grow(encoded.len() as u64 + ENTRY_MEMORY_BYTES)?;
        let size = if let EntryKind::File { size_bytes, .. } = entry.kind { size_bytes } else { 0 };
        let size_bytes = self.manifest.size_bytes.checked_add(size).ok_or(InvalidManifest::SizeOverflow)?;

        let index = self.len();
        let extents = entry.extents();
        if !extents.is_empty() {
            self.manifest.files.push(FirstOrdinal { ordinal: self.manifest.extent_count, entry: index });
            self.manifest.extent_count += extents.len() as u64;
            self.manifest.extent_bytes += extents.iter().map(|extent| u64::from(extent.length)).sum::<u64>();
        }
        self.manifest.size_bytes = size_bytes;
        self.manifest.encoded_bytes = encoded_bytes;
        self.hasher.update(&encoded);
        self.open.truncate(depth);
        if entry.is_directory() {
            self.open.push(index);
        }
        self.manifest.entries.push(entry);
        Ok(())
    }

    /// How many of the open directories `entry` is in, if it may come next.
    fn place(&self, entry: &Entry) -> Result<usize, InvalidManifest> {
        let fault = |fault| InvalidManifest::Entry { path: entry.path().to_owned(), fault };
        let Some(last) = self.manifest.entries.last() else {
            let is_root = entry.path.is_empty() && entry.is_directory();
            return is_root.then_some(0).ok_or(InvalidManifest::NoRoot);
        };
        if compare_paths(&last.path, &entry.path) != Ordering::Less {
            return Err(fault(EntryFault::Order));
        }
        // In this order nothing can come between a directory and what it holds, so the parent is among the open ones.
        let parent = split(&entry.path).0;
        let depth = self.open.iter().rposition(|index| self.manifest.entries[*index].path == parent);
        depth.map(|depth| depth + 1).ok_or_else(|| fault(EntryFault::Parent))
    }

    /// The manifest.
    ///
    /// # Errors
    ///
    /// It has not even a root.
    pub fn finish(mut self) -> Result<Manifest, InvalidManifest> {
        if let Some(begun) = self.begun {
            let path = begun.path().to_owned();
            return Err(InvalidManifest::Entry { path, fault: EntryFault::Unfinished });
        }
        if self.is_empty() {
            return Err(InvalidManifest::NoRoot);
        }
        self.manifest.digest = Digest(*self.hasher.finalize().as_bytes());
        Ok(self.manifest)
    }
}
