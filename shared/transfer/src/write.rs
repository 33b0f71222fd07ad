//! Writing of a tree into a directory, from a manifest and content.
//!
//! ```text
//! new ──▶ put / copy_extent / copy_file / link_file … ──▶ finish
//!  │            │                               └ links, pipes, devices, then metadata of directories, deepest first
//!  │            └ files, each with its metadata as soon as it is complete
//!  └ directories
//! ```
//!
//! Invariants:
//!
//! - Content is written only after its digest was verified, unless the caller vouches for the
//!   content.
//! - The writer touches nothing outside of the staging directory. It reaches every path component
//!   by component from the directory's descriptor, never through a symbolic link. It creates files
//!   and never opens those of another process.
//! - [`TreeWriter::finish`] succeeds only if no extent is missing.
//!
//! The caller must remove the staging directory after a failure.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use domain::Digest;
use rustix::fs::{
    AtFlags, FileType, FsWord, Gid, Mode, OFlags, Stat, Uid, chownat, copy_file_range, fstat, fstatfs,
    ftruncate, ioctl_ficlone, linkat, mkdirat, mknodat, openat, symlinkat, syncfs, utimensat,
};
use rustix::io::Errno;

use crate::dirs::{Cursor, chmod_no_follow, is_empty};
use crate::entry::{DeviceKind, Entry, EntryKind, Extent, MAX_EXTENT_BYTES, split};
use crate::manifest::{LocatedExtent, Manifest};
use crate::metadata::{Metadata, SkippedPart, SkippedPartKind, WrittenOwnership, caller, times};
use crate::ordinal_ranges::OrdinalRanges;
use crate::read::fill;

/// The types of file systems in which a copy within the kernel can share blocks: XFS and Btrfs.
const SHARING: [FsWord; 2] = [0x5846_5342, 0x9123_683e];

/// Options of a writer.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// Owner of all entries.
    pub ownership: WrittenOwnership,
    /// Whether device nodes may be created. If not, a manifest with device nodes is
    /// [`WriteError::Unsafe`] with `strict`, and is written without them otherwise.
    pub devices: bool,
    /// Whether a missing permission or feature of the file system for attributes or devices is an
    /// error. If not, they are left out and reported.
    pub strict: bool,
    /// Whether `finish` flushes the tree to disk.
    pub sync: bool,
}

impl Default for WriteOptions {
    /// Returns options for an exact copy without devices and without a flush.
    fn default() -> Self {
        Self { ownership: WrittenOwnership::Manifest, devices: false, strict: true, sync: false }
    }
}

/// Whether copied content is verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// The writer verifies the digest.
    Verify,
    /// The caller vouches for the content.
    Trusted,
}

/// The outcome of writing a tree.
#[derive(Debug)]
pub struct WriteSummary {
    /// Bytes of content that were put or copied.
    pub content_bytes: u64,
    /// Parts that were left out, because they are not permitted or not supported.
    pub skipped: Vec<SkippedPart>,
}

/// A tree cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Content has another digest or length than its extent.
    #[error("cannot write {path:?}: the content does not match the digest in the manifest")]
    DigestMismatch {
        /// The file.
        path: PathBuf,
    },
    /// An extent was never put.
    #[error("cannot complete {path:?}: content is missing")]
    Missing {
        /// The first incomplete file.
        path: PathBuf,
        /// The first missing extent of that file.
        ordinal: u64,
    },
    /// An extent was put twice.
    #[error("cannot write extent {0}: it is repeated or out of order")]
    OutOfOrder(u64),
    /// The manifest has no extent with this ordinal.
    #[error("cannot write extent {0}: the manifest has no such extent")]
    NoSuchExtent(u64),
    /// The disk or the quota is full.
    #[error("the disk is full")]
    DiskFull(#[source] io::Error),
    /// The staging directory is not empty, or the manifest has a device node that may not be
    /// created.
    #[error("cannot write {path:?}: the directory is not empty, or the entry is a device")]
    Unsafe {
        /// The entry.
        path: PathBuf,
    },
    /// The file system cannot hold the entry, for example because a file is too large.
    #[error("cannot write {path:?}: the file system of this worker does not support it")]
    Impossible {
        /// The entry.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Another operation failed.
    #[error("cannot write {path:?}")]
    Io {
        /// The entry.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

impl WriteError {
    pub(crate) fn new(entry: &Entry, source: io::Error) -> Self {
        match Errno::from_io_error(&source) {
            Some(Errno::NOSPC | Errno::DQUOT) => Self::DiskFull(source),
            Some(Errno::FBIG | Errno::NAMETOOLONG | Errno::TOOBIG | Errno::RANGE) => {
                Self::Impossible { path: entry.path().to_owned(), source }
            }
            // The kernel validates the value of this attribute.
            Some(Errno::INVAL) if entry.xattrs.iter().any(|xattr| xattr.name == b"security.capability") => {
                Self::Impossible { path: entry.path().to_owned(), source }
            }
            _ => Self::Io { path: entry.path().to_owned(), source },
        }
    }
}

/// Content with a verified digest.
///
/// Hashing is the main cost of [`TreeWriter::put`]. A caller can verify content in other threads
/// instead.
#[derive(Debug)]
pub struct Verified<T> {
    /// Digest of the tree.
    pub(crate) tree: Digest,
    pub(crate) ordinal: u64,
    pub(crate) data: T,
}

impl<T> Verified<T> {
    /// Returns the ordinal of the extent.
    pub fn ordinal(&self) -> u64 {
        self.ordinal
    }

    /// Returns the content.
    pub fn data(&self) -> &T {
        &self.data
    }
}

impl Manifest {
    /// Verifies content against the digest of its extent.
    ///
    /// # Errors
    ///
    /// [`WriteError::NoSuchExtent`] or [`WriteError::DigestMismatch`].
    pub fn verify<T: AsRef<[u8]>>(&self, ordinal: u64, data: T) -> Result<Verified<T>, WriteError> {
        let LocatedExtent { entry, extent, .. } =
            self.locate(ordinal).ok_or(WriteError::NoSuchExtent(ordinal))?;
        if !matches(extent, data.as_ref()) {
            return Err(WriteError::DigestMismatch { path: self.entries()[entry].path().to_owned() });
        }
        Ok(Verified { tree: self.tree_digest(), ordinal, data })
    }
}

fn matches(extent: &Extent, data: &[u8]) -> bool {
    data.len() == extent.length as usize && Digest(*blake3::hash(data).as_bytes()) == extent.digest
}

/// Writes a tree into an empty directory.
#[derive(Debug)]
pub struct TreeWriter {
    manifest: Arc<Manifest>,
    options: WriteOptions,
    metadata: Metadata,
    cursor: Cursor,
    /// A bit for each extent: whether it is written or omitted.
    filled: Vec<u64>,
    /// Number of missing extents of each started file.
    started: HashMap<usize, u64>,
    open: Option<(usize, OwnedFd)>,
    /// Files that are not written.
    omitted: HashSet<usize>,
    may_clone: bool,
    /// Whether a copy within the kernel shares blocks with its source.
    shares_ranges: bool,
    /// Device and inode of the files that other trees have, too.
    pub(crate) linked: HashSet<(u64, u64)>,
    written: WriteSummary,
}

impl TreeWriter {
    /// Starts to write `manifest` into the empty directory `staging`, and creates all directories.
    ///
    /// # Errors
    ///
    /// Fails if `staging` cannot be opened or is not empty, or if a directory cannot be created.
    pub fn new(staging: &Path, manifest: Arc<Manifest>, options: WriteOptions) -> Result<Self, WriteError> {
        let words = usize::try_from(manifest.extent_count().div_ceil(64)).unwrap_or(usize::MAX);
        let root = &manifest.entries()[0];
        let cursor = Cursor::new(staging).map_err(|error| WriteError::new(root, error))?;
        if !is_empty(cursor.root()).map_err(|error| WriteError::new(root, error.into()))? {
            return Err(WriteError::Unsafe { path: PathBuf::new() });
        }
        let caller = caller();
        // A new file gets the group of the process or, on some file systems, of the directory. If
        // both are equal, new files surely belong to the caller.
        let stat = fstat(cursor.root()).map_err(|error| WriteError::new(root, error.into()))?;
        let is_callers = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)) == caller;
        let metadata = Metadata { ownership: options.ownership, strict: options.strict, caller, is_callers };
        let devices = |entry: &&Entry| matches!(entry.kind, EntryKind::Device { .. });
        if let Some(device) = manifest.entries().iter().find(devices)
            && options.strict
            && !options.devices
        {
            return Err(WriteError::Unsafe { path: device.path().to_owned() });
        }

        let shares_ranges = fstatfs(cursor.root()).is_ok_and(|found| SHARING.contains(&found.f_type));
        let mut writer = Self {
            options,
            metadata,
            cursor,
            filled: vec![0; words],
            started: HashMap::new(),
            open: None,
            omitted: HashSet::new(),
            may_clone: true,
            shares_ranges,
            linked: HashSet::new(),
            written: WriteSummary { content_bytes: 0, skipped: Vec::new() },
            manifest,
        };
        writer.make_directories()?;
        Ok(writer)
    }

    fn make_directories(&mut self) -> Result<(), WriteError> {
        let manifest = self.manifest.clone();
        for entry in manifest.entries()[1..].iter().filter(|entry| entry.is_directory()) {
            let (directory, name) = self.parent_of(entry)?;
            mkdirat(&directory, name, Mode::RWXU).map_err(|error| WriteError::new(entry, error.into()))?;
        }
        Ok(())
    }

    /// Returns the parent directory of an entry, and its name there.
    pub(crate) fn parent_of<'e>(&mut self, entry: &'e Entry) -> Result<(Arc<OwnedFd>, &'e [u8]), WriteError> {
        let (parent, name) = split(&entry.path);
        let directory = self.cursor.go(parent).map_err(|error| WriteError::new(entry, error))?;
        Ok((directory, name))
    }

    /// Returns the manifest.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Returns the extents that are neither written nor omitted.
    #[must_use]
    pub fn missing(&self) -> OrdinalRanges {
        let mut missing = OrdinalRanges::new();
        for ordinal in (0..self.manifest.extent_count()).filter(|ordinal| !self.is_filled(*ordinal)) {
            // Ordinals ascend, so this cannot fail.
            _ = missing.insert(ordinal);
        }
        missing
    }

    /// Returns the bytes of content that were put or copied so far.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        self.written.content_bytes
    }

    /// Whether entries get the owners of the manifest.
    pub(crate) fn writes_owners(&self) -> bool {
        self.options.ownership == WrittenOwnership::Manifest
    }

    /// Whether a file has the owner, mode and times of an entry.
    pub(crate) fn has_metadata(&self, entry: &Entry, stat: &Stat) -> bool {
        self.metadata.matches(entry, stat)
    }

    /// Marks all extents of a file as written.
    pub(crate) fn mark_file_filled(&mut self, entry: usize) {
        for ordinal in self.manifest.ordinals_of(entry) {
            self.mark_filled(ordinal);
        }
    }

    /// Omits the file at index `entry`, and the hard links to it. No extent of it may have been
    /// written.
    pub fn omit(&mut self, entry: usize) {
        self.mark_file_filled(entry);
        self.omitted.insert(entry);
    }

    /// Verifies and writes an extent. Extents may come in any order, but the order of files is the
    /// fastest.
    ///
    /// # Errors
    ///
    /// Fails if the digest is wrong, the extent is written already, or the disk is full or fails.
    pub fn put(&mut self, ordinal: u64, data: &[u8]) -> Result<(), WriteError> {
        let verified = self.manifest.verify(ordinal, data)?;
        self.put_verified(&verified)
    }

    /// Writes an extent that was verified against the same manifest. Extents may come in any order,
    /// but the order of files is the fastest.
    ///
    /// # Errors
    ///
    /// Fails if the extent is written already, or the disk is full or fails.
    pub fn put_verified<T: AsRef<[u8]>>(&mut self, verified: &Verified<T>) -> Result<(), WriteError> {
        let ordinal = verified.ordinal;
        if self.is_filled(ordinal) {
            return Err(WriteError::OutOfOrder(ordinal));
        }
        let manifest = self.manifest.clone();
        let located = manifest.locate(ordinal).ok_or(WriteError::NoSuchExtent(ordinal))?;
        if verified.tree != manifest.tree_digest() {
            let path = manifest.entries()[located.entry].path().to_owned();
            return Err(WriteError::DigestMismatch { path });
        }
        self.write(&manifest, located, verified.data.as_ref())
    }

    /// Copies an extent from any offset of a local file. Extents may come in any order.
    ///
    /// # Errors
    ///
    /// Fails if the digest is wrong, the extent is written already, or the disk is full or fails.
    pub fn copy_extent(
        &mut self,
        ordinal: u64,
        source: &File,
        source_offset: u64,
        trust: Trust,
    ) -> Result<(), WriteError> {
        let manifest = self.manifest.clone();
        let located = manifest.locate(ordinal).ok_or(WriteError::NoSuchExtent(ordinal))?;
        if self.is_filled(ordinal) {
            return Err(WriteError::OutOfOrder(ordinal));
        }
        let entry = &manifest.entries()[located.entry];
        let length = located.extent.length as usize;
        if trust == Trust::Trusted && self.copy_within_kernel(&manifest, located, source, source_offset)? {
            return Ok(());
        }
        let mut data = vec![0; length];
        let read =
            fill(source, &mut data, source_offset).map_err(|error| WriteError::new(entry, error.into()))?;
        if read < length || (trust == Trust::Verify && !matches(located.extent, &data)) {
            return Err(WriteError::DigestMismatch { path: entry.path().to_owned() });
        }
        // Nothing of Gantry writes to a file of a complete tree. Damage between this check and the
        // copy is found like any later damage.
        if self.shares_ranges && self.copy_within_kernel(&manifest, located, source, source_offset)? {
            return Ok(());
        }
        self.write(&manifest, located, &data)
    }

    /// Copies an extent within the kernel. Returns false if that is not supported.
    fn copy_within_kernel(
        &mut self,
        manifest: &Manifest,
        located: LocatedExtent<'_>,
        source: &File,
        source_offset: u64,
    ) -> Result<bool, WriteError> {
        self.open(manifest, located.entry)?;
        let Some((_, file)) = &self.open else { return Ok(false) };
        let entry = &manifest.entries()[located.entry];
        let length = located.extent.length as usize;
        let is_copied = copy_range(source, source_offset, file, located.extent.offset, length)
            .map_err(|error| WriteError::new(entry, error.into()))?;
        if is_copied {
            self.extent_written(manifest, located)?;
        }
        Ok(is_copied)
    }

    /// Copies the file at index `entry` from a local file with the same content. The new file is
    /// independent, but shares blocks if the file system supports that.
    ///
    /// # Errors
    ///
    /// Fails if a digest is wrong, a part of the file is written already, or the disk is full or
    /// fails.
    pub fn copy_file(&mut self, entry: usize, source: &File, trust: Trust) -> Result<(), WriteError> {
        let manifest = self.manifest.clone();
        let ordinals = manifest.ordinals_of(entry);
        if let Some(filled) = ordinals.clone().find(|ordinal| self.is_filled(*ordinal)) {
            return Err(WriteError::OutOfOrder(filled));
        }
        if !ordinals.is_empty() && self.try_clone(&manifest, entry, source, trust)? {
            return Ok(());
        }
        let mut extents = manifest.extents_in(ordinals);
        extents
            .try_for_each(|located| self.copy_extent(located.ordinal, source, located.extent.offset, trust))
    }

    /// Clones `source`, if it has the same size, the file has no holes, and the file system
    /// supports clones.
    fn try_clone(
        &mut self,
        manifest: &Manifest,
        index: usize,
        source: &File,
        trust: Trust,
    ) -> Result<bool, WriteError> {
        let entry = &manifest.entries()[index];
        let EntryKind::File { size_bytes, extents } = &entry.kind else { return Ok(false) };
        let failed = |error: Errno| WriteError::new(entry, error.into());
        let size = fstat(source).map_err(failed)?.st_size.cast_unsigned();
        let dense = extents.iter().map(|extent| u64::from(extent.length)).sum::<u64>() == *size_bytes;
        if !self.may_clone || !dense || size != *size_bytes {
            return Ok(false);
        }
        self.open(manifest, index)?;
        let Some((_, file)) = &self.open else { return Ok(false) };
        if ioctl_ficlone(file, source).is_err() {
            self.may_clone = false;
            return Ok(false);
        }
        // No other process has the new file open, so the verified content is the written content.
        if trust == Trust::Verify {
            let mut buffer = vec![0; MAX_EXTENT_BYTES as usize];
            for extent in extents {
                let data = &mut buffer[..extent.length as usize];
                let read = fill(file, data, extent.offset).map_err(failed)?;
                if read < data.len() || !matches(extent, data) {
                    return Err(WriteError::DigestMismatch { path: entry.path().to_owned() });
                }
            }
        }
        for located in manifest.extents_in(manifest.ordinals_of(index)) {
            self.extent_written(manifest, located)?;
        }
        Ok(true)
    }

    /// Whether an extent is written or omitted.
    #[must_use]
    pub fn is_filled(&self, ordinal: u64) -> bool {
        let word = usize::try_from(ordinal / 64).ok().and_then(|word| self.filled.get(word));
        word.is_some_and(|word| word >> (ordinal % 64) & 1 == 1)
    }

    fn mark_filled(&mut self, ordinal: u64) {
        let word = usize::try_from(ordinal / 64).ok().and_then(|word| self.filled.get_mut(word));
        if let Some(word) = word {
            *word |= 1 << (ordinal % 64);
        }
    }

    fn write(
        &mut self,
        manifest: &Manifest,
        located: LocatedExtent<'_>,
        data: &[u8],
    ) -> Result<(), WriteError> {
        self.open(manifest, located.entry)?;
        if let Some((_, file)) = &self.open {
            let entry = &manifest.entries()[located.entry];
            write_all(file, data, located.extent.offset)
                .map_err(|error| WriteError::new(entry, error.into()))?;
        }
        self.extent_written(manifest, located)
    }

    /// Opens or creates the file of an entry, unless it is the open file.
    fn open(&mut self, manifest: &Manifest, index: usize) -> Result<(), WriteError> {
        if self.open.as_ref().is_some_and(|(open, _)| *open == index) {
            return Ok(());
        }
        self.open = None;
        let entry = &manifest.entries()[index];
        let ordinals = manifest.ordinals_of(index);
        let created = !self.started.contains_key(&index);
        self.started.entry(index).or_insert(ordinals.end - ordinals.start);

        let (directory, name) = self.parent_of(entry)?;
        let how = if created { OFlags::CREATE | OFlags::EXCL } else { OFlags::empty() };
        let flags = how | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&directory, name, flags, Mode::RUSR | Mode::WUSR);
        self.open = Some((index, file.map_err(|error| WriteError::new(entry, error.into()))?));
        Ok(())
    }

    /// Marks an extent of the open file as written. After the last extent, applies the metadata of
    /// the file.
    fn extent_written(&mut self, manifest: &Manifest, located: LocatedExtent<'_>) -> Result<(), WriteError> {
        self.mark_filled(located.ordinal);
        self.written.content_bytes += u64::from(located.extent.length);
        let Some(missing) = self.started.get_mut(&located.entry) else { return Ok(()) };
        *missing -= 1;
        if *missing > 0 {
            return Ok(());
        }
        self.started.remove(&located.entry);
        match self.open.take() {
            Some((_, file)) => self.complete(&manifest.entries()[located.entry], &file),
            None => Ok(()),
        }
    }

    /// Sets the size and the metadata of a file or directory.
    fn complete(&mut self, entry: &Entry, file: &OwnedFd) -> Result<(), WriteError> {
        let failed = |error: Errno| WriteError::new(entry, error.into());
        if let EntryKind::File { size_bytes, extents } = &entry.kind {
            let end = extents.last().map_or(0, |extent| extent.offset + u64::from(extent.length));
            if end < *size_bytes {
                ftruncate(file, *size_bytes).map_err(failed)?;
            }
        }
        self.metadata.apply(entry, file, &mut self.written.skipped).map_err(failed)
    }

    /// Writes all entries without content, and then the metadata of directories.
    ///
    /// # Errors
    ///
    /// Fails if content is missing, or if the disk is full or fails.
    pub fn finish(mut self) -> Result<WriteSummary, WriteError> {
        let manifest = self.manifest.clone();
        if let Some(missing) = manifest.extents().find(|located| !self.is_filled(located.ordinal)) {
            let path = manifest.entries()[missing.entry].path().to_owned();
            return Err(WriteError::Missing { path, ordinal: missing.ordinal });
        }
        let mut targets = self.cursor.fork();
        for (index, entry) in manifest.entries().iter().enumerate() {
            match &entry.kind {
                EntryKind::Directory => {}
                EntryKind::File { extents, .. } => {
                    if extents.is_empty() && !self.omitted.contains(&index) {
                        self.write_without_content(&manifest, index)?;
                    }
                }
                EntryKind::HardLink { to } => {
                    let omitted = manifest.find(to).is_some_and(|target| self.omitted.contains(&target));
                    if !omitted {
                        let (parent, target) = split(to);
                        let from = targets.go(parent).map_err(|error| WriteError::new(entry, error))?;
                        let (directory, name) = self.parent_of(entry)?;
                        linkat(&from, target, &directory, name, AtFlags::empty())
                            .map_err(|error| WriteError::new(entry, error.into()))?;
                    }
                }
                EntryKind::Symlink { target } => {
                    let (directory, name) = self.parent_of(entry)?;
                    symlinkat(&target[..], &directory, name)
                        .map_err(|error| WriteError::new(entry, error.into()))?;
                    self.complete_by_name(entry, &directory, name)?;
                }
                EntryKind::Fifo => self.write_node(entry, FileType::Fifo, 0)?,
                EntryKind::Device { kind, major, minor } => {
                    let file_type = match kind {
                        DeviceKind::Character => FileType::CharacterDevice,
                        DeviceKind::Block => FileType::BlockDevice,
                    };
                    self.write_node(entry, file_type, rustix::fs::makedev(*major, *minor))?;
                }
            }
        }
        // The deepest directories come first: a write into a directory changes its mtime, and its
        // mode may forbid access.
        for entry in manifest.entries().iter().rev().filter(|entry| entry.is_directory()) {
            let directory = self.cursor.go(&entry.path).map_err(|error| WriteError::new(entry, error))?;
            self.complete(entry, &directory)?;
        }
        if self.options.sync {
            let root = &manifest.entries()[0];
            syncfs(self.cursor.root()).map_err(|error| WriteError::new(root, error.into()))?;
        }
        Ok(self.written)
    }

    fn write_without_content(&mut self, manifest: &Manifest, index: usize) -> Result<(), WriteError> {
        self.open(manifest, index)?;
        self.started.remove(&index);
        match self.open.take() {
            Some((_, file)) => self.complete(&manifest.entries()[index], &file),
            None => Ok(()),
        }
    }

    fn write_node(&mut self, entry: &Entry, file_type: FileType, device: u64) -> Result<(), WriteError> {
        let skipped = SkippedPart { path: entry.path().to_owned(), what: SkippedPartKind::Device };
        let is_device = file_type != FileType::Fifo;
        if is_device && !self.options.devices {
            self.written.skipped.push(skipped);
            return Ok(());
        }
        let (directory, name) = self.parent_of(entry)?;
        match mknodat(&directory, name, file_type, Mode::RUSR | Mode::WUSR, device) {
            Ok(()) => self.complete_by_name(entry, &directory, name),
            Err(Errno::PERM | Errno::ACCESS) if is_device && !self.options.strict => {
                self.written.skipped.push(skipped);
                Ok(())
            }
            Err(error) => Err(WriteError::new(entry, error.into())),
        }
    }

    /// Applies the metadata of an entry that cannot be opened.
    fn complete_by_name(&self, entry: &Entry, directory: &OwnedFd, name: &[u8]) -> Result<(), WriteError> {
        let failed = |error: Errno| WriteError::new(entry, error.into());
        if let Some((uid, gid)) = self.metadata.owner(entry) {
            chownat(directory, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        }
        if !matches!(entry.kind, EntryKind::Symlink { .. }) {
            chmod_no_follow(directory, name, self.metadata.mode(entry)).map_err(failed)?;
        }
        utimensat(directory, name, &times(entry), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)
    }
}

fn write_all(file: &OwnedFd, mut data: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !data.is_empty() {
        match rustix::io::pwrite(file, data, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                data = &data[written..];
                offset += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Copies a range within the kernel. Returns `false` if that is not supported, or if the source is
/// too short. The copied part then does not count.
fn copy_range(
    source: impl AsFd,
    mut from: u64,
    file: &OwnedFd,
    mut to: u64,
    mut length: usize,
) -> Result<bool, Errno> {
    while length > 0 {
        match copy_file_range(&source, Some(&mut from), file, Some(&mut to), length) {
            Ok(0) => return Ok(false),
            Ok(copied) => length -= copied,
            Err(Errno::INTR) => {}
            Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => return Err(error),
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_and_impossible_entry_are_recognized() {
        let entry = Entry {
            path: b"a".to_vec(),
            mode: 0,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::Directory,
        };
        for error in [Errno::NOSPC, Errno::DQUOT] {
            assert!(matches!(WriteError::new(&entry, error.into()), WriteError::DiskFull(_)));
        }
        assert!(matches!(WriteError::new(&entry, Errno::FBIG.into()), WriteError::Impossible { .. }));
        assert!(matches!(WriteError::new(&entry, Errno::IO.into()), WriteError::Io { .. }));
    }
}
