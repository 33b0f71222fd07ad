//! Volumes on another machine, which a worker sends and receives as tar archives.
//!
//! Such archives lack parts of a manifest: fractions of seconds, extended attributes and holes.
//! Their files are in the order of the worker's tar. So the manifest is stored beside the volume.
//!
//! Invariant: each extent that is read is compared with the manifest. See
//! `docs/decisions/0005-keep-manifests-beside-remote-volumes.md`.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use domain::error_chain;
use runtime::{RemoteVolume, RuntimeError};
use tokio::sync::mpsc;
use transfer::{
    ArchiveError, ArchiveReader, ArchiveWriteError, ArchiveWriter, Entry, EntryKind, ExtentData, Limits,
    Manifest, OrdinalRanges,
};

use super::error::{ReadVolumeError, WriteVolumeError};
use crate::transfer::blocking_pipe::{self, ArchiveSource, Inlet, Outlet, Piece, Tee};
use crate::util::blocking::blocking;

/// Most pieces of an archive that wait for a worker. A piece has at most 256 KiB.
const QUEUE_PIECES: usize = 8;
/// Bytes of extents that make a batch, approximately.
const BATCH_BYTES: usize = 1 << 20;
/// Most zero bytes that are sent at once for a hole.
const HOLE_BYTES: u64 = 1 << 20;

/// A volume on another machine.
pub(crate) type SharedRemoteVolume = Arc<dyn RemoteVolume>;

fn failed(error: &ArchiveError) -> RuntimeError {
    RuntimeError::Other(format!("cannot read a volume of the worker: {}", error_chain(error)))
}

/// Makes the manifest of a volume by reading all of it.
pub(crate) async fn scan(volume: &SharedRemoteVolume) -> Result<Manifest, RuntimeError> {
    let archive = ArchiveSource::new(volume.read(Path::new("")).await?);
    let read = move || ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()));
    // Whether the container or the worker caused an invalid tree is unknown. These errors count as
    // the container's.
    let failed = |error: ArchiveError| match error {
        ArchiveError::Manifest(transfer::InvalidManifest::NoMemory) => failed(&error),
        ArchiveError::Manifest(_) | ArchiveError::UnsafePath { .. } | ArchiveError::Type { .. } => {
            RuntimeError::InvalidOutput(error_chain(&error))
        }
        error => failed(&error),
    };
    blocking(move || read().map_err(failed)).await
}

/// Reads extents of a volume, and passes them to `send` on a blocking thread until it returns
/// false. They come file by file, in the order of the worker's archive.
pub(crate) async fn read(
    volume: &SharedRemoteVolume,
    manifest: Arc<Manifest>,
    extents_wanted: OrdinalRanges,
    mut send: impl FnMut(Vec<ExtentData>) -> bool + Send + 'static,
) -> Result<(), ReadVolumeError> {
    if extents_wanted.is_empty() {
        return Ok(());
    }
    let archive = ArchiveSource::of(&manifest, volume.read(Path::new("")).await?);
    blocking(move || {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        ArchiveReader::new(archive)
            .extents(&manifest, &extents_wanted, |extent| {
                bytes += extent.data.len();
                batch.push(extent);
                if bytes < BATCH_BYTES {
                    return Ok(());
                }
                bytes = 0;
                let is_sent = send(std::mem::take(&mut batch));
                if is_sent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
            })
            .map_err(read_error)?;
        if batch.is_empty() || send(batch) { Ok(()) } else { Err(ReadVolumeError::CallerGone) }
    })
    .await
}

/// Converts an error of an archive that a worker sends.
fn read_error(error: ArchiveError) -> ReadVolumeError {
    match error {
        ArchiveError::Sink(_) => ReadVolumeError::CallerGone,
        // The manifest is valid, so the contents are damaged.
        ArchiveError::Changed { .. } => ReadVolumeError::Archive(error),
        error => failed(&error).into(),
    }
}

/// Reads one regular file of a volume. Each piece comes with the size of the file.
pub(crate) async fn read_file(
    volume: &SharedRemoteVolume,
    manifest: &Manifest,
    path: PathBuf,
    chunks: mpsc::Sender<(u64, Bytes)>,
) -> Result<(), ReadVolumeError> {
    let entry = find_file(manifest, &path)?.clone();
    let EntryKind::File { size_bytes: size, .. } = entry.kind else {
        return Err(ReadVolumeError::PathNotFound(path));
    };
    if entry.extents().is_empty() {
        return blocking(move || zeroes(&chunks, size, 0, size)).await;
    }
    let archive = ArchiveSource::of(manifest, volume.read(&path).await?);
    blocking(move || {
        let mut at = 0;
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        ArchiveReader::new(archive)
            .file(&entry, |extent, data| {
                if at < extent.offset {
                    zeroes(&chunks, size, at, extent.offset).map_err(|_| gone(()))?;
                }
                at = extent.offset + u64::from(extent.length);
                chunks.blocking_send((size, data)).map_err(|_| gone(()))
            })
            .map_err(read_error)?;
        if at < size { zeroes(&chunks, size, at, size) } else { Ok(()) }
    })
    .await
}

/// Returns the regular file at `path`, without following symbolic links.
fn find_file<'m>(manifest: &'m Manifest, path: &Path) -> Result<&'m Entry, ReadVolumeError> {
    let not_found = || ReadVolumeError::PathNotFound(path.to_owned());
    let not_a_file = |kind: String| Err(ReadVolumeError::NotAFile { path: path.to_owned(), kind });
    let bytes = path.as_os_str().as_bytes();
    let Some(index) = manifest.find(bytes) else {
        let behind = path.ancestors().skip(1).filter_map(|above| manifest.find(above.as_os_str().as_bytes()));
        let is_link = |index: usize| matches!(manifest.entries()[index].kind, EntryKind::Symlink { .. });
        if behind.into_iter().any(is_link) {
            return not_a_file("behind a symbolic link, and links are not followed".to_owned());
        }
        return Err(not_found());
    };
    match &manifest.entries()[index].kind {
        EntryKind::File { .. } => Ok(&manifest.entries()[index]),
        EntryKind::HardLink { to } => {
            manifest.find(to).map(|index| &manifest.entries()[index]).ok_or_else(not_found)
        }
        EntryKind::Symlink { target } => {
            let target = String::from_utf8_lossy(target);
            not_a_file(format!("a symbolic link to {target:?}, and links are not followed"))
        }
        EntryKind::Directory => not_a_file("a directory".to_owned()),
        EntryKind::Fifo | EntryKind::Device { .. } => not_a_file("not a regular file".to_owned()),
    }
}

/// Sends the zeroes of a hole. For an empty file, it sends only the size.
fn zeroes(
    chunks: &mpsc::Sender<(u64, Bytes)>,
    size: u64,
    mut from: u64,
    to: u64,
) -> Result<(), ReadVolumeError> {
    loop {
        let length = (to - from).min(HOLE_BYTES);
        let data = Bytes::from(vec![0; usize::try_from(length).unwrap_or_default()]);
        chunks.blocking_send((size, data)).map_err(|_| ReadVolumeError::CallerGone)?;
        from += length;
        if from == to {
            return Ok(());
        }
    }
}

/// Packs a volume, or its directory at `path`, with the metadata of its manifest. Files are in the
/// order of the worker.
pub(crate) async fn pack(
    volume: &SharedRemoteVolume,
    manifest: Arc<Manifest>,
    path: &Path,
    pieces: mpsc::Sender<Piece>,
) -> Result<(), ReadVolumeError> {
    let archive = ArchiveSource::of(&manifest, volume.read(path).await?);
    blocking(move || {
        let mut writer = ArchiveWriter::new(Outlet::new(pieces), manifest.clone());
        let extents_wanted = OrdinalRanges::all(manifest.extent_count());
        // Errors of sending are kept apart from errors of the worker's archive.
        let mut refused = None;
        let packed = ArchiveReader::new(archive).extents(&manifest, &extents_wanted, |extent| {
            writer.put(extent.ordinal, &extent.data).map_err(|error| {
                refused = Some(error);
                io::ErrorKind::Other.into()
            })
        });
        match refused {
            // The previous extent differed from the manifest, and was skipped.
            Some(ArchiveWriteError::OutOfOrder(ordinal)) => {
                let file = manifest.locate(ordinal).map(|located| &manifest.entries()[located.entry]);
                let path = file.map(|file| file.path().to_owned()).unwrap_or_default();
                return Err(ArchiveError::Changed { path }.into());
            }
            Some(error) => return Err(error.into()),
            None => {}
        }
        packed.map_err(read_error)?;
        writer.finish()?.end().map_err(ArchiveWriteError::from)?;
        Ok(())
    })
    .await
}

/// Unpacks on the worker what `feed` writes. `feed` may block.
///
/// An error of the worker takes precedence, because the writer only sees a closed pipe.
pub(crate) async fn write<T: Send + 'static>(
    volume: &SharedRemoteVolume,
    feed: impl FnOnce(Outlet) -> Result<T, WriteVolumeError> + Send + 'static,
) -> Result<T, WriteVolumeError> {
    let (pieces, queue) = mpsc::channel(QUEUE_PIECES);
    let feeding = blocking(move || feed(Outlet::new(pieces)));
    let (fed, written) = tokio::join!(feeding, volume.write(Path::new(""), blocking_pipe::archive(queue)));
    match (fed, written) {
        (Ok(fed), Ok(())) => Ok(fed),
        (Err(WriteVolumeError::CallerGone) | Ok(_), Err(error)) => Err(error.into()),
        (Err(error), _) => Err(error),
    }
}

/// Forwards an archive to the worker, and returns its manifest. Each piece is checked before it is
/// forwarded.
pub(crate) async fn unpack(
    volume: &SharedRemoteVolume,
    archive: Inlet,
) -> Result<Manifest, WriteVolumeError> {
    write(volume, move |out| {
        let mut tee = Tee::new(archive, out);
        let read = ArchiveReader::new(&mut tee).read(Limits::of_process(), |_| Ok(()));
        let manifest = read.map_err(|error| match error {
            // The worker accepts no more bytes.
            ArchiveError::Source(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                WriteVolumeError::CallerGone
            }
            error => error.into(),
        })?;
        tee.end().map_err(|_| WriteVolumeError::CallerGone)?;
        Ok(manifest)
    })
    .await
}

#[cfg(test)]
mod tests;
