//! Reading: from ordinals to the content of extents.
//!
//! A [`TreeReader`] serves extents of a tree that was scanned or written before and is not meant to change. It never
//! follows a symbolic link, notices files that have become shorter, and verifies digests when told to.

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
use crate::manifest::{Located, Manifest};
use crate::ordinal_ranges::OrdinalRanges;

/// Content of one extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentData {
    /// Its ordinal.
    pub ordinal: u64,
    /// All of its bytes.
    pub data: Bytes,
}

/// How to read.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions {
    /// Whether what was read must have the digest that the manifest says.
    pub verify: bool,
    /// About how many bytes make a batch. An extent is never divided.
    pub batch_bytes: usize,
}

impl Default for ReadOptions {
    /// Batches of 1 MiB, not verified: the receiver does that.
    fn default() -> Self {
        Self { verify: false, batch_bytes: 1 << 20 }
    }
}

/// Extents cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The root is missing, is no directory, or may not be entered.
    #[error("cannot open the directory")]
    Root(#[source] io::Error),
    /// The manifest has no extent with this ordinal.
    #[error("there is no extent {0}")]
    NoSuchExtent(u64),
    /// The file has become shorter than the manifest says.
    #[error("{path:?} has become shorter")]
    Shrunk {
        /// The file.
        path: PathBuf,
    },
    /// The file has other content than the manifest says.
    #[error("{path:?} has changed")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file is missing or cannot be read.
    #[error("cannot read {path:?}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
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
    /// The file that was read last.
    open: Option<(usize, OwnedFd)>,
}

impl TreeReader {
    /// A reader of the tree at `root`, which `manifest` describes.
    ///
    /// # Errors
    ///
    /// The root cannot be opened.
    pub fn new(root: &Path, manifest: Arc<Manifest>, options: ReadOptions) -> Result<Self, ReadError> {
        let cursor = Cursor::through(root).map_err(ReadError::Root)?;
        Ok(Self { manifest, options, cursor, open: None })
    }

    /// Reads one extent.
    ///
    /// # Errors
    ///
    /// There is none with this ordinal, or its file cannot be read or is no longer what the manifest says.
    pub fn read(&mut self, ordinal: u64) -> Result<Bytes, ReadError> {
        let manifest = self.manifest.clone();
        let located = manifest.locate(ordinal).ok_or(ReadError::NoSuchExtent(ordinal))?;
        self.read_extent(located)
    }

    /// Reads the extents of `wanted` in ascending order, in batches of about the size that the options say.
    ///
    /// After an error, the next batch is `None`.
    pub fn batches<'a>(&'a mut self, wanted: &'a OrdinalRanges) -> Batches<'a> {
        let mut runs = wanted.runs().collect::<Vec<_>>();
        runs.reverse();
        Batches { reader: self, runs }
    }

    /// Fills `buffer` from anywhere in the file of an entry, given by its index, as far as the file goes. Returns how many
    /// bytes were read.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn read_file_at(&mut self, entry: usize, buffer: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        let manifest = self.manifest.clone();
        let path = manifest.entries()[entry].path();
        let file = self.file(&manifest, entry)?;
        fill(file, buffer, offset)
            .map_err(|error| ReadError::Io { path: path.to_owned(), source: error.into() })
    }

    /// The file of an entry, which stays open until another one is read.
    fn file(&mut self, manifest: &Manifest, index: usize) -> Result<&OwnedFd, ReadError> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != index) {
            let entry = &manifest.entries()[index];
            let failed = |source: io::Error| ReadError::Io { path: entry.path().to_owned(), source };
            let (parent, name) = split(&entry.path);
            let directory = self.cursor.go(parent).map_err(failed)?;
            // Not blocking: if the tree has changed, it may be a fifo.
            let flags =
                OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
            let file =
                openat(&directory, name, flags, Mode::empty()).map_err(|error| failed(error.into()))?;
            self.open = Some((index, file));
        }
        let (_, file) = self.open.as_ref().ok_or(ReadError::Root(io::ErrorKind::NotFound.into()))?;
        Ok(file)
    }

    fn read_extent(&mut self, located: Located<'_>) -> Result<Bytes, ReadError> {
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
    /// What is still to be read, the next at the end.
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

/// Reads `length` bytes, or as many as there are.
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
    data.truncate(length); // TargetTree may have been room for more.
    Ok(data)
}

/// Reads until `buffer` is full or the file ends; says how many bytes were read.
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
