//! Layers: an archive, unpacked into a manifest and a file with its content.
//!
//! # Files
//!
//! `HEX.content` has each distinct extent once, in the order of the archive. `HEX.tree` has the
//! manifest, the directories that the archive does not describe, and the offsets of the extents.
//! `HEX` is the digest of the layer. A layer exists if its `HEX.tree` does, which is renamed into
//! place last.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use domain::Digest;
use sha2::{Digest as _, Sha256};
use transfer::{ArchiveError, ArchiveReader, Extent, Limits, Manifest};

use crate::ImageError;

/// Bytes after which unpacking checks the free space again.
const CHECK_INTERVAL_BYTES: u64 = 64 << 20;
/// Divisor of the disk size that gives the part that stays free, as for transfers of workers.
const RESERVE_PART: u64 = 100;
/// Most bytes of that part.
const MAX_RESERVE: u64 = 1 << 30;
/// Most bytes of content of a layer, so that a small archive cannot fill any disk.
const MAX_LAYER_BYTES: u64 = 256 << 30;
/// Start of a `HEX.tree`, with the version of its format.
const MAGIC: &[u8; 8] = b"gantryL1";

/// An unpacked layer.
#[derive(Debug)]
pub struct Layer {
    /// The entries of the archive, including whiteouts.
    pub(crate) manifest: Manifest,
    /// Directories that the archive does not describe, in ascending order.
    pub(crate) implied: Vec<Vec<u8>>,
    offsets: HashMap<Digest, u64>,
    content: File,
}

impl Layer {
    /// Whether the layer has the content of an extent.
    pub(crate) fn has(&self, extent: &Extent) -> bool {
        self.offsets.contains_key(&extent.digest)
    }

    /// Reads an extent of the layer.
    pub(crate) fn read(&self, extent: &Extent) -> io::Result<Vec<u8>> {
        let offset = self.offsets.get(&extent.digest).ok_or(io::ErrorKind::NotFound)?;
        let mut data = vec![0; extent.length as usize];
        self.content.read_exact_at(&mut data, *offset)?;
        Ok(data)
    }

    /// Unpacks the archive of a layer, which may be compressed with gzip or zstd. `digest` is the
    /// SHA-256 of the bytes of `archive`, in hexadecimal.
    pub(crate) fn unpack(directory: &Path, digest: &str, archive: impl Read) -> Result<Self, ImageError> {
        let content = tempfile::NamedTempFile::new_in(directory).map_err(ImageError::Store)?;
        let mut hashing = Hashing { source: archive, hasher: Sha256::new() };
        let mut sink = Sink::new(content.reopen().map_err(ImageError::Store)?);
        let read = read_archive(&mut hashing, &mut sink);
        let (manifest, implied) = match read {
            Ok(read) => read,
            Err(ArchiveError::Sink(error)) => return Err(ImageError::Store(error)),
            Err(ArchiveError::Source(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {
                return Err(ImageError::Registry { registry: String::new(), cause: error.to_string() });
            }
            Err(error) => return Err(ImageError::invalid(digest, domain::error_chain(&error))),
        };
        // Registries may store padding after the end of a compressed archive.
        io::copy(&mut hashing, &mut io::sink()).map_err(|error| ImageError::invalid(digest, error))?;
        let found = hex::encode(hashing.hasher.finalize());
        if found != digest {
            return Err(ImageError::invalid(digest, format!("its bytes have the digest sha256:{found}")));
        }
        let Sink { written, offsets, .. } = sink;
        let file = written.into_inner().map_err(|error| ImageError::Store(error.into_error()))?;
        let layer = || {
            file.sync_data()?;
            content.persist(directory.join(format!("{digest}.content")))?;
            let layer = Self { manifest, implied, offsets, content: file };
            let mut tree = tempfile::NamedTempFile::new_in(directory)?;
            tree.write_all(&layer.encode())?;
            tree.as_file().sync_data()?;
            tree.persist(directory.join(format!("{digest}.tree")))?;
            Ok(layer)
        };
        layer().map_err(ImageError::Store)
    }

    /// Opens a layer that was unpacked before. `None`: there is none, or it is damaged.
    pub(crate) fn open(directory: &Path, digest: &str) -> Option<Self> {
        let tree = std::fs::read(directory.join(format!("{digest}.tree"))).ok()?;
        let content = File::open(directory.join(format!("{digest}.content"))).ok()?;
        Self::decode(&tree, content)
    }

    fn encode(&self) -> Vec<u8> {
        let mut tree = MAGIC.to_vec();
        let length = |length: usize| (length as u64).to_le_bytes();
        tree.extend(length(self.implied.len()));
        for path in &self.implied {
            tree.extend(length(path.len()));
            tree.extend(path);
        }
        tree.extend(length(self.offsets.len()));
        for (digest, offset) in &self.offsets {
            tree.extend(digest.as_bytes());
            tree.extend(offset.to_le_bytes());
        }
        tree.extend(self.manifest.encode());
        tree
    }

    fn decode(tree: &[u8], content: File) -> Option<Self> {
        let mut rest = tree.strip_prefix(MAGIC)?;
        let mut take = |length: u64| {
            let (taken, after) = rest.split_at_checked(usize::try_from(length).ok()?)?;
            rest = after;
            Some(taken)
        };
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
        let implied = (0..number(take(8)?)?).map(|_| {
            let length = number(take(8)?)?;
            Some(take(length)?.to_vec())
        });
        let implied = implied.collect::<Option<Vec<_>>>()?;
        let offsets = (0..number(take(8)?)?).map(|_| {
            let digest = Digest::try_from(take(32)?).ok()?;
            Some((digest, number(take(8)?)?))
        });
        let offsets = offsets.collect::<Option<HashMap<_, _>>>()?;
        let manifest = Manifest::decode(rest, Limits::of_process()).ok()?;
        Some(Self { manifest, implied, offsets, content })
    }
}

/// Reads the archive of a layer through the decompression that its first bytes require.
fn read_archive(archive: impl Read, sink: &mut Sink) -> Result<(Manifest, Vec<Vec<u8>>), ArchiveError> {
    let mut archive = BufReader::with_capacity(1 << 18, archive);
    let start = archive.fill_buf().map_err(ArchiveError::Source)?;
    let (is_gzip, is_zstd) = (start.starts_with(&[0x1f, 0x8b]), start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]));
    let limits = Limits::of_process();
    let put = |passing: transfer::ArchivedExtent<'_>| sink.put(&passing);
    if is_gzip {
        let mut gzip = flate2::bufread::MultiGzDecoder::new(archive);
        ArchiveReader::new(&mut gzip).read_layer(limits, put)
    } else if is_zstd {
        let zstd = zstd::Decoder::with_buffer(archive).map_err(ArchiveError::Source)?;
        ArchiveReader::new(zstd).read_layer(limits, put)
    } else {
        ArchiveReader::new(archive).read_layer(limits, put)
    }
}

/// The content file of a layer while it is written.
struct Sink {
    written: BufWriter<File>,
    offsets: HashMap<Digest, u64>,
    end: u64,
    /// Bytes that may be written before the next check of the free space.
    unchecked: u64,
}

impl Sink {
    fn new(file: File) -> Self {
        let written = BufWriter::with_capacity(1 << 20, file);
        Self { written, offsets: HashMap::new(), end: 0, unchecked: 0 }
    }

    fn put(&mut self, passing: &transfer::ArchivedExtent<'_>) -> io::Result<()> {
        let length = u64::from(passing.extent.length);
        if let Entry::Vacant(place) = self.offsets.entry(passing.extent.digest) {
            place.insert(self.end);
            self.end += length;
            if self.end > MAX_LAYER_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            self.check(length)?;
            self.written.write_all(passing.data)?;
        }
        Ok(())
    }

    fn check(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.unchecked {
            let status = rustix::fs::fstatvfs(self.written.get_ref())?;
            let total = status.f_blocks.saturating_mul(status.f_frsize);
            let free = status.f_bavail.saturating_mul(status.f_frsize);
            if free < (total / RESERVE_PART).min(MAX_RESERVE).saturating_add(bytes) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.unchecked = CHECK_INTERVAL_BYTES;
        }
        self.unchecked -= bytes.min(self.unchecked);
        Ok(())
    }
}

/// A reader that computes the digest of what it has read.
struct Hashing<R> {
    source: R,
    hasher: Sha256,
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.source.read(buffer)?;
        self.hasher.update(&buffer[..length]);
        Ok(length)
    }
}
