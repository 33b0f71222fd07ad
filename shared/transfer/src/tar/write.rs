//! Writing of archives from a manifest and content.

use std::collections::BTreeSet;
use std::io::{self, BufWriter, IntoInnerError, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::header::{self, Block};
use super::{BLOCK_BYTES, padding, pax};
use crate::entry::{DeviceKind, Entry, EntryKind, Extent, split};
use crate::manifest::Manifest;
use crate::write::{Verified, WriteError};

/// Bytes of a record. The length of an archive is a multiple of it, as with tar.
const RECORD_BYTES: u64 = 10_240;
const ZEROES: [u8; 16 << 10] = [0; 16 << 10];

/// An archive cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveWriteError {
    /// The bytes of the archive cannot be written.
    #[error("cannot write the archive")]
    Io(#[from] io::Error),
    /// An extent is repeated, does not continue its file, or starts a file before another one is
    /// complete.
    #[error("cannot write extent {0}: it is repeated or out of order")]
    OutOfOrder(u64),
    /// Content does not match the manifest.
    #[error(transparent)]
    Content(#[from] WriteError),
    /// An extent was never put.
    #[error("cannot complete {path:?}: content is missing")]
    Missing {
        /// The first incomplete file.
        path: PathBuf,
    },
}

/// A writer of a tree as an archive.
///
/// The archive is complete only after [`ArchiveWriter::finish`], which writes the end that readers
/// expect. After [`ArchiveWriteError::Io`] the archive is useless.
///
/// Files may come in any order, but each must be complete, with its extents in ascending order. If
/// files come in the order of the manifest, the entries have that order, so that equal manifests
/// make equal archives.
#[derive(Debug)]
pub struct ArchiveWriter<W: Write> {
    manifest: Arc<Manifest>,
    out: CountingWriter<W>,
    /// Index of the next entry in order. All entries before it are written, except `absent` and
    /// `waiting`.
    next_entry: usize,
    /// Earlier files whose content has not come yet.
    absent: BTreeSet<usize>,
    /// Earlier hard links to such files.
    waiting: Vec<usize>,
    /// Whether an entry was written after its directory was left.
    rearranged: bool,
    file: Option<OpenFile>,
}

/// The file that is being written.
#[derive(Debug)]
struct OpenFile {
    /// The remaining regions of the file.
    regions: std::vec::IntoIter<Range<u64>>,
    /// The rest of the current region.
    rest: Range<u64>,
    /// Ordinals of the missing extents.
    ordinals: Range<u64>,
}

impl<W: Write> ArchiveWriter<W> {
    /// Creates a writer of the tree that `manifest` describes. Does not write yet.
    pub fn new(out: W, manifest: Arc<Manifest>) -> Self {
        let out = CountingWriter { out: BufWriter::with_capacity(64 << 10, out), bytes: 0 };
        Self {
            manifest,
            out,
            next_entry: 0,
            absent: BTreeSet::new(),
            waiting: Vec::new(),
            rearranged: false,
            file: None,
        }
    }

    /// Verifies and writes the next extent of a file, after all entries before it.
    ///
    /// # Errors
    ///
    /// Fails if the extent is not the next one, does not match the manifest, or cannot be written.
    pub fn put(&mut self, ordinal: u64, data: &[u8]) -> Result<(), ArchiveWriteError> {
        let verified = self.manifest.verify(ordinal, data)?;
        self.put_verified(&verified)
    }

    /// Writes the next extent of a file, which was verified against the same manifest.
    ///
    /// # Errors
    ///
    /// Fails if the extent is not the next one, or cannot be written.
    pub fn put_verified<T: AsRef<[u8]>>(&mut self, verified: &Verified<T>) -> Result<(), ArchiveWriteError> {
        let ordinal = verified.ordinal;
        let manifest = self.manifest.clone();
        let located = manifest.locate(ordinal).ok_or(WriteError::NoSuchExtent(ordinal))?;
        if verified.tree != manifest.tree_digest() {
            let path = manifest.entries()[located.entry].path().to_owned();
            return Err(WriteError::DigestMismatch { path }.into());
        }
        if self.file.as_ref().is_none_or(|file| file.ordinals.is_empty()) {
            self.begin(&manifest, located.entry, ordinal)?;
        }
        match &mut self.file {
            Some(file) if file.ordinals.start == ordinal => {
                file.put(&mut self.out, located.extent.offset, verified.data.as_ref())?;
                file.ordinals.start = ordinal + 1;
                Ok(())
            }
            _ => Err(ArchiveWriteError::OutOfOrder(ordinal)),
        }
    }

    /// Writes the remaining entries and the end of the archive.
    ///
    /// # Errors
    ///
    /// Fails if an extent is missing, or if the archive cannot be written.
    pub fn finish(mut self) -> Result<W, ArchiveWriteError> {
        let manifest = self.manifest.clone();
        self.end_file()?;
        self.write_until(&manifest, manifest.entries().len())?;
        if let Some(absent) = self.absent.first() {
            return Err(ArchiveWriteError::Missing { path: manifest.entries()[*absent].path().to_owned() });
        }
        for link in std::mem::take(&mut self.waiting) {
            write_header(&mut self.out, &manifest.entries()[link])?;
        }
        // Tar sets the mtime of a directory when it leaves it. Entries that it unpacks later change
        // the mtime, so the directories are repeated.
        if self.rearranged {
            for directory in manifest.entries().iter().filter(|entry| entry.is_directory()) {
                write_header(&mut self.out, directory)?;
            }
        }
        self.out.zeroes(2 * BLOCK_BYTES as u64)?;
        let record = (RECORD_BYTES - self.out.bytes % RECORD_BYTES) % RECORD_BYTES;
        self.out.zeroes(record)?;
        Ok(self.out.out.into_inner().map_err(IntoInnerError::into_error)?)
    }

    /// Starts a file with its first extent.
    fn begin(&mut self, manifest: &Manifest, index: usize, first: u64) -> Result<(), ArchiveWriteError> {
        let ordinals = manifest.ordinals_of(index);
        if ordinals.start != first {
            return Err(ArchiveWriteError::OutOfOrder(first));
        }
        self.end_file()?;
        self.write_until(manifest, index)?;
        if index == self.next_entry {
            self.next_entry += 1;
        } else if self.absent.remove(&index) {
            self.rearranged = true;
        } else {
            return Err(ArchiveWriteError::OutOfOrder(first));
        }
        let regions = write_header(&mut self.out, &manifest.entries()[index])?;
        self.file = Some(OpenFile { regions: regions.into_iter(), rest: 0..0, ordinals });
        Ok(())
    }

    /// Writes the entries before `end`, except files with content and links to missing files.
    fn write_until(&mut self, manifest: &Manifest, end: usize) -> io::Result<()> {
        while self.next_entry < end {
            let index = self.next_entry;
            self.next_entry += 1;
            let entry = &manifest.entries()[index];
            match &entry.kind {
                EntryKind::File { extents, .. } if !extents.is_empty() => {
                    self.absent.insert(index);
                }
                EntryKind::HardLink { to }
                    if manifest.find(to).is_some_and(|to| self.absent.contains(&to)) =>
                {
                    self.waiting.push(index);
                }
                _ => {
                    let regions = write_header(&mut self.out, entry)?;
                    // A file without content is a single hole.
                    debug_assert!(regions.is_empty());
                }
            }
        }
        Ok(())
    }

    fn end_file(&mut self) -> io::Result<()> {
        match self.file.take() {
            Some(mut file) => file.zeroes_until(&mut self.out, u64::MAX),
            None => Ok(()),
        }
    }
}

impl OpenFile {
    fn put<W: Write>(&mut self, out: &mut CountingWriter<W>, offset: u64, data: &[u8]) -> io::Result<()> {
        self.zeroes_until(out, offset)?;
        out.write(data)?;
        self.rest.start += data.len() as u64;
        Ok(())
    }

    /// Writes zeroes up to `offset`, for all regions before it and a part of its region.
    fn zeroes_until<W: Write>(&mut self, out: &mut CountingWriter<W>, offset: u64) -> io::Result<()> {
        loop {
            let to = self.rest.end.min(offset.max(self.rest.start));
            out.zeroes(to - self.rest.start)?;
            self.rest.start = to;
            if to < self.rest.end {
                return Ok(());
            }
            // Only a region at the end of the file needs padding.
            out.zeroes(padding(self.rest.end))?;
            let Some(next) = self.regions.next() else {
                self.rest = 0..0;
                return Ok(());
            };
            self.rest = next;
        }
    }
}

/// Returns the data regions of a file: its extents, extended to whole blocks. Readers disagree
/// about the padding of other regions.
fn regions(size_bytes: u64, extents: &[Extent]) -> Vec<Range<u64>> {
    let block = BLOCK_BYTES as u64;
    let mut regions: Vec<Range<u64>> = Vec::new();
    for extent in extents {
        let end = extent.offset + u64::from(extent.length);
        let region = extent.offset / block * block..(end + padding(end)).min(size_bytes);
        match regions.last_mut() {
            Some(last) if region.start <= last.end => last.end = region.end,
            _ => regions.push(region),
        }
    }
    regions
}

/// Writes the headers of an entry. Returns the data regions of its content.
fn write_header<W: Write>(out: &mut CountingWriter<W>, entry: &Entry) -> io::Result<Vec<Range<u64>>> {
    let mut path = [b"./", &entry.path[..]].concat();
    let mut records = Vec::new();
    let mut written = Vec::new();
    let mut map = Vec::new();
    let mut size = 0;
    let kind = match &entry.kind {
        EntryKind::Directory => {
            if !path.ends_with(b"/") {
                path.push(b'/');
            }
            b'5'
        }
        EntryKind::File { size_bytes, extents } => {
            written = regions(*size_bytes, extents);
            if *size_bytes > 0 && written.as_slice() != std::slice::from_ref(&(0..*size_bytes)) {
                map = write_map(*size_bytes, &written);
                pax::put(&mut records, b"GNU.sparse.major", b"1");
                pax::put(&mut records, b"GNU.sparse.minor", b"0");
                pax::put(&mut records, b"GNU.sparse.name", &path);
                pax::put(&mut records, b"GNU.sparse.realsize", size_bytes.to_string().as_bytes());
                // The name for readers without support for holes, as in GNU tar.
                path = [b"./GNUSparseFile.0/", split(&entry.path).1].concat();
                path.truncate(header::NAME.len());
            }
            size = map.len() as u64 + written.iter().map(|region| region.end - region.start).sum::<u64>();
            b'0'
        }
        EntryKind::Symlink { .. } => b'2',
        EntryKind::HardLink { .. } => b'1',
        EntryKind::Fifo => b'6',
        EntryKind::Device { kind: DeviceKind::Character, .. } => b'3',
        EntryKind::Device { kind: DeviceKind::Block, .. } => b'4',
    };
    let mut block = header::new(kind, &path);
    if path.len() > header::NAME.len() {
        pax::put(&mut records, b"path", &path);
    }
    let link = match &entry.kind {
        EntryKind::Symlink { target } => target.clone(),
        EntryKind::HardLink { to } => [b"./", &to[..]].concat(),
        _ => Vec::new(),
    };
    header::put_text(&mut block[header::LINK], &link);
    if link.len() > header::LINK.len() {
        pax::put(&mut records, b"linkpath", &link);
    }
    let mode = if matches!(entry.kind, EntryKind::Symlink { .. }) { 0o777 } else { entry.mode };
    header::put_number(&mut block[header::MODE], mode.into());
    for (field, key, id) in [(header::UID, b"uid", entry.uid), (header::GID, b"gid", entry.gid)] {
        header::put_number(&mut block[field], id.into());
        if id > 0o7_777_777 {
            pax::put(&mut records, key, id.to_string().as_bytes());
        }
    }
    // The content is at most the greatest offset, and a map is shorter than the holes that it
    // describes.
    header::put_number(&mut block[header::SIZE], size.cast_signed());
    if size > 0o77_777_777_777 {
        pax::put(&mut records, b"size", size.to_string().as_bytes());
    }
    header::put_number(&mut block[header::MTIME], entry.mtime_seconds);
    if entry.mtime_nanos > 0 || !(0..=0o77_777_777_777).contains(&entry.mtime_seconds) {
        pax::put_time(&mut records, entry.mtime_seconds, entry.mtime_nanos);
    }
    if let EntryKind::Device { major, minor, .. } = entry.kind {
        header::put_number(&mut block[header::MAJOR], major.into());
        header::put_number(&mut block[header::MINOR], minor.into());
    }
    for xattr in &entry.xattrs {
        pax::put_xattr(&mut records, xattr);
    }

    if !records.is_empty() {
        write_records(out, &entry.path, &records)?;
    }
    out.header(&mut block)?;
    out.write(&map)?;
    Ok(written)
}

fn write_records<W: Write>(out: &mut CountingWriter<W>, path: &[u8], records: &[u8]) -> io::Result<()> {
    let mut block = header::new(b'x', &[b"./PaxHeaders/", split(path).1].concat());
    header::put_number(&mut block[header::MODE], 0o644);
    header::put_number(&mut block[header::SIZE], records.len() as i64); // A few hundred KiB at most.
    out.header(&mut block)?;
    out.write(records)?;
    out.zeroes(padding(records.len() as u64))
}

/// Encodes the map of a file with holes in format 1.0. An empty region at the end marks a hole at
/// the end.
fn write_map(size_bytes: u64, regions: &[Range<u64>]) -> Vec<u8> {
    let end = regions.last().is_none_or(|last| last.end < size_bytes).then_some(size_bytes..size_bytes);
    let mut map = format!("{}\n", regions.len() + usize::from(end.is_some())).into_bytes();
    for region in regions.iter().chain(&end) {
        map.extend_from_slice(format!("{}\n{}\n", region.start, region.end - region.start).as_bytes());
    }
    map.resize(map.len() + padding(map.len() as u64) as usize, 0);
    map
}

#[derive(Debug)]
struct CountingWriter<W: Write> {
    out: BufWriter<W>,
    bytes: u64,
}

impl<W: Write> CountingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn header(&mut self, block: &mut Block) -> io::Result<()> {
        header::seal(block);
        self.write(block)
    }

    fn zeroes(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let step = count.min(ZEROES.len() as u64);
            self.write(&ZEROES[..step as usize])?;
            count -= step;
        }
        Ok(())
    }
}
