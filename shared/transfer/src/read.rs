//! Reading of extents from a tree on disk.
//!
//! A [`TreeReader`] reads extents of a tree that was scanned or written before and should not
//! change. It never follows symbolic links, detects truncated files, and verifies digests if
//! requested.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use domain::Digest;
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

use crate::dirs::Cursor;
use crate::entry::split;
use crate::manifest::{LocatedExtent, Manifest};
use crate::ordinal_ranges::OrdinalRanges;

/// The content of an extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentData {
    /// Ordinal of the extent.
    pub ordinal: u64,
    /// All bytes of the extent.
    pub data: Bytes,
}

/// Options of a reader.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions {
    /// Whether the digest of each extent is verified.
    pub verify: bool,
    /// Approximate number of bytes per batch. An extent is never divided.
    pub batch_bytes: usize,
}

impl Default for ReadOptions {
    /// Returns options for batches of 1 MiB without verification, which is the task of the
    /// receiver.
    fn default() -> Self {
        Self { verify: false, batch_bytes: 1 << 20 }
    }
}

/// Extents cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The root is missing, is not a directory, or is not accessible.
    #[error("cannot open the directory")]
    Root(#[source] io::Error),
    /// The manifest has no extent with this ordinal.
    #[error("cannot read extent {0}: the manifest has no such extent")]
    NoSuchExtent(u64),
    /// The file is shorter than in the manifest.
    #[error("cannot read {path:?}: the file was truncated")]
    Shrunk {
        /// The file.
        path: PathBuf,
    },
    /// The content of the file differs from the manifest.
    #[error("cannot read {path:?}: the content has changed")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file is missing or cannot be read.
    #[error("cannot read {path:?}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Reads extents of a tree.
#[derive(Debug)]
pub struct TreeReader {
    manifest: Arc<Manifest>,
    options: ReadOptions,
    cursor: Cursor,
    /// The last file that was read.
    open: Option<(usize, OwnedFd)>,
}

impl TreeReader {
    /// Creates a reader of the tree at `root`, which `manifest` describes.
    ///
    /// # Errors
    ///
    /// Fails if the root cannot be opened.
    pub fn new(root: &Path, manifest: Arc<Manifest>, options: ReadOptions) -> Result<Self, ReadError> {
        let cursor = Cursor::through(root).map_err(ReadError::Root)?;
        Ok(Self { manifest, options, cursor, open: None })
    }

    /// Reads an extent.
    ///
    /// # Errors
    ///
    /// Fails if the ordinal does not exist, or if the file cannot be read or has changed.
    pub fn read(&mut self, ordinal: u64) -> Result<Bytes, ReadError> {
        let manifest = self.manifest.clone();
        let located = manifest.locate(ordinal).ok_or(ReadError::NoSuchExtent(ordinal))?;
        self.read_extent(located)
    }

    /// Reads the extents of `wanted` in ascending order, in batches of about
    /// [`ReadOptions::batch_bytes`].
    ///
    /// The iterator ends after an error.
    pub fn batches<'a>(&'a mut self, wanted: &'a OrdinalRanges) -> Batches<'a> {
        let mut runs = wanted.runs().collect::<Vec<_>>();
        runs.reverse();
        Batches { reader: self, runs }
    }

    /// Fills `buffer` from `offset` in the file at index `entry`. Returns the number of read bytes,
    /// which is smaller than the buffer at the end of the file.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read.
    pub fn read_file_at(&mut self, entry: usize, buffer: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        let manifest = self.manifest.clone();
        let path = manifest.entries()[entry].path();
        let file = self.file(&manifest, entry)?;
        fill(file, buffer, offset)
            .map_err(|error| ReadError::Io { path: path.to_owned(), source: error.into() })
    }

    /// Opens the file of an entry. It stays open until another file is read.
    fn file(&mut self, manifest: &Manifest, index: usize) -> Result<&OwnedFd, ReadError> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != index) {
            let entry = &manifest.entries()[index];
            let failed = |source: io::Error| ReadError::Io { path: entry.path().to_owned(), source };
            let (parent, name) = split(&entry.path);
            let directory = self.cursor.go(parent).map_err(failed)?;
            // Without blocking, because the file may have become a named pipe.
            let flags =
                OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            let file =
                openat(&directory, name, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
            self.open = Some((index, file));
        }
        let (_, file) = self.open.as_ref().ok_or(ReadError::Root(io::ErrorKind::NotFound.into()))?;
        Ok(file)
    }

    fn read_extent(&mut self, located: LocatedExtent<'_>) -> Result<Bytes, ReadError> {
        let (manifest, verify) = (self.manifest.clone(), self.options.verify);
        let entry = &manifest.entries()[located.entry];
        let path = || entry.path().to_owned();
        let failed = |source: io::Error| ReadError::Io { path: path(), source };
        let file = self.file(&manifest, located.entry)?;
        let length = located.extent.length as usize;
        let data = read_at(file, located.extent.offset, length).map_err(|error| failed(error.into()))?;
        if data.len() < length {
            return Err(ReadError::Shrunk { path: path() });
        }
        if verify && Digest(*blake3::hash(&data).as_bytes()) != located.extent.digest {
            return Err(ReadError::Changed { path: path() });
        }
        Ok(data.into())
    }
}

/// Batches of content, in the order of ordinals. See [`TreeReader::batches`].
#[derive(Debug)]
pub struct Batches<'a> {
    reader: &'a mut TreeReader,
    /// The remaining runs, the next one at the end.
    runs: Vec<std::ops::Range<u64>>,
}

impl Batches<'_> {
    fn read(&mut self) -> Result<Vec<ExtentData>, ReadError> {
        let manifest = self.reader.manifest.clone();
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(run) = self.runs.last_mut() {
            if run.end > manifest.extent_count() {
                return Err(ReadError::NoSuchExtent(manifest.extent_count().max(run.start)));
            }
            for located in manifest.extents_in(run.clone()) {
                let length = located.extent.length as usize;
                if bytes > 0 && bytes + length > self.reader.options.batch_bytes {
                    return Ok(batch);
                }
                bytes += length;
                let data = self.reader.read_extent(located)?;
                batch.push(ExtentData { ordinal: located.ordinal, data });
                run.start += 1;
            }
            self.runs.pop();
        }
        Ok(batch)
    }
}

impl Iterator for Batches<'_> {
    type Item = Result<Vec<ExtentData>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.runs.is_empty() {
            return None;
        }
        let batch = self.read();
        if batch.is_err() {
            self.runs.clear();
        }
        Some(batch)
    }
}

/// Reads `length` bytes, or fewer at the end of the file.
fn read_at(file: impl AsFd, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut data = Vec::with_capacity(length);
    while data.len() < length {
        let offset = offset + data.len() as u64;
        match rustix::io::pread(&file, rustix::buffer::spare_capacity(&mut data), offset) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    data.truncate(length); // The capacity may be larger.
    Ok(data)
}

/// Reads until `buffer` is full or the file ends. Returns the number of read bytes.
pub(crate) fn fill(file: impl AsFd, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut length = 0;
    while length < buffer.len() {
        match rustix::io::pread(&file, &mut buffer[length..], offset + length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}
