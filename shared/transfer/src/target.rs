//! Checks of a receiving directory against a manifest, entry by entry.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use domain::Digest;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, StatxAttributes, StatxFlags, fstat, openat, readlinkat,
    statat, statx,
};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::{DeviceKind, Entry, EntryKind, MAX_EXTENT_BYTES, Xattr, split};
use crate::manifest::Manifest;
use crate::read::fill;
use crate::xattrs;

/// Name of the extended attribute with the capabilities of a file.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";
pub(crate) const SETID: u32 = 0o6000;

/// A target directory that is compared with a manifest.
pub(crate) struct TargetTree<'a> {
    cursor: Option<Cursor>,
    manifest: &'a Manifest,
}

impl<'a> TargetTree<'a> {
    /// Compares the root of `cursor` with `manifest`. With `None`, the directory does not exist.
    pub(crate) fn new(cursor: Option<Cursor>, manifest: &'a Manifest) -> Self {
        Self { cursor, manifest }
    }

    pub(crate) fn exists(&mut self, path: &[u8]) -> bool {
        self.stat(path).is_some()
    }

    /// Opens the directory at `path`.
    pub(crate) fn directory(&mut self, path: &[u8]) -> Option<Arc<OwnedFd>> {
        self.cursor.as_mut()?.go(path).ok()
    }

    pub(crate) fn stat(&mut self, path: &[u8]) -> Option<Stat> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        let name = if name.is_empty() { b"." } else { name };
        statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()
    }

    /// Whether a path is a mount point.
    pub(crate) fn is_mounted(&mut self, path: &[u8]) -> bool {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut().and_then(|cursor| cursor.go(parent).ok());
        directory.is_some_and(|directory| {
            let found = statx(&directory, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE);
            found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
        })
    }

    /// Whether the target has the same kind, mode and content at the path of an entry. For
    /// directories, only the setuid and setgid bits are compared.
    pub(crate) fn has_entry(&mut self, entry: &Entry) -> bool {
        self.compare(entry).unwrap_or(false)
    }

    /// Whether the target has the entry of the manifest at `path`.
    pub(crate) fn has_path(&mut self, path: &[u8]) -> bool {
        let manifest = self.manifest;
        manifest.find(path).is_some_and(|index| self.has_entry(&manifest.entries()[index]))
    }

    fn compare(&mut self, entry: &Entry) -> Option<bool> {
        let stat = self.stat(&entry.path)?;
        let mode = Mode::from_raw_mode(stat.st_mode).as_raw_mode();
        let found = FileType::from_raw_mode(stat.st_mode);
        // A hard link is compared as its file.
        let file = match &entry.kind {
            EntryKind::HardLink { to } => &self.manifest.entries()[self.manifest.find(to)?],
            _ => entry,
        };
        Some(match &file.kind {
            EntryKind::Directory => found == FileType::Directory && mode & SETID == file.mode & SETID,
            EntryKind::File { .. } => {
                found == FileType::RegularFile && mode == file.mode && self.has_content(&entry.path, file)?
            }
            EntryKind::Symlink { target } => {
                found == FileType::Symlink && self.link_at(&entry.path)?.as_slice() == &target[..]
            }
            EntryKind::Device { kind, major, minor } => {
                let node = match kind {
                    DeviceKind::Character => FileType::CharacterDevice,
                    DeviceKind::Block => FileType::BlockDevice,
                };
                found == node && stat.st_rdev == rustix::fs::makedev(*major, *minor)
            }
            EntryKind::Fifo => found == FileType::Fifo,
            EntryKind::HardLink { .. } => false,
        })
    }

    fn link_at(&mut self, path: &[u8]) -> Option<Vec<u8>> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        Some(readlinkat(&directory, name, Vec::new()).ok()?.into_bytes())
    }

    fn has_content(&mut self, path: &[u8], file: &Entry) -> Option<bool> {
        let (parent, name) = split(path);
        let directory = self.cursor.as_mut()?.go(parent).ok()?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = openat(&directory, name, flags, Mode::empty()).ok()?;
        let EntryKind::File { size_bytes, .. } = &file.kind else { return None };
        if fstat(&opened).ok()?.st_size.cast_unsigned() != *size_bytes {
            return Some(false);
        }
        let capability = |xattrs: &[Xattr]| {
            xattrs.iter().find(|xattr| xattr.name == CAPABILITY).map(|xattr| xattr.value.clone())
        };
        if capability(&xattrs::read(&opened, true).ok()?) != capability(&file.xattrs) {
            return Some(false);
        }
        Some(is_content(&opened, *size_bytes, file))
    }
}

/// Whether a file has the extents of an entry, and zeroes in all other ranges.
fn is_content(opened: &OwnedFd, size_bytes: u64, file: &Entry) -> bool {
    let mut buffer = vec![0; MAX_EXTENT_BYTES as usize];
    let mut at = 0;
    let mut zeroes = vec![0; 64 << 10];
    let mut is_zero_until = |end: u64, at: &mut u64| {
        while *at < end {
            // A hole may be too large to read.
            match rustix::fs::seek(opened, SeekFrom::Data(*at)) {
                Ok(data) => *at = data,
                Err(Errno::NXIO) => return true,
                Err(_) => return false,
            }
            if *at >= end {
                return true;
            }
            let length = usize::try_from(end - *at).unwrap_or(usize::MAX).min(zeroes.len());
            let piece = &mut zeroes[..length];
            if !fill(opened, piece, *at).is_ok_and(|read| read == length)
                || piece.iter().any(|byte| *byte != 0)
            {
                return false;
            }
            *at += length as u64;
        }
        true
    };
    for extent in file.extents() {
        let data = &mut buffer[..extent.length as usize];
        let is_same = is_zero_until(extent.offset, &mut at)
            && fill(opened, data, extent.offset).is_ok_and(|read| read == data.len())
            && Digest(*blake3::hash(data).as_bytes()) == extent.digest;
        if !is_same {
            return false;
        }
        at = extent.offset + u64::from(extent.length);
    }
    is_zero_until(size_bytes, &mut at)
}
