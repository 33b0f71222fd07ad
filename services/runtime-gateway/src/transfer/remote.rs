//! Volumes on another machine, whose bytes a worker gives and takes as tar archives.
//!
//! Such archives do not hold all that a manifest says: parts of seconds, extended attributes, holes. Their files
//! come in the order in which the worker's tar finds them. So the manifest is kept beside the volume for as long
//! as the volume is there, and each extent that is read is compared with it. See
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
use crate::transfer::blocking_pipe::{self, Arriving, Inlet, Outlet, Piece, Tee};
use crate::util::blocking::blocking;

/// Pieces of an archive that wait for a worker, of 256 KiB at most.
const QUEUE: usize = 8;
/// About how many bytes of extents make a batch.
const BATCH: usize = 1 << 20;
/// Bytes of zeroes that are sent at once for a hole.
const HOLE: u64 = 1 << 20;

/// A volume that is far.
pub(crate) type SharedRemoteVolume = Arc<dyn RemoteVolume>;

fn failed(error: &ArchiveError) -> RuntimeError {
    RuntimeError::Other(format!("cannot read a volume of the worker: {}", error_chain(error)))
}

/// Learns what a volume holds by reading all of it.
pub(crate) async fn scan(volume: &SharedRemoteVolume) -> Result<Manifest, RuntimeError> {
    let archive = Arriving::new(volume.read(Path::new("")).await?);
    let read = move || ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()));
    // Whether the container or its worker made what is no tree cannot be told; of these, the container can.
    let failed = |error: ArchiveError| match error {
        ArchiveError::Manifest(transfer::InvalidManifest::NoMemory) => failed(&error),
        ArchiveError::Manifest(_) | ArchiveError::UnsafePath { .. } | ArchiveError::Type { .. } => {
            RuntimeError::InvalidOutput(error_chain(&error))
        }
        error => failed(&error),
    };
    blocking(move || read().map_err(failed)).await
}

/// Reads extents of a volume into `batches`, file by file, in the order of its worker's archive.
pub(crate) async fn read(
    volume: &SharedRemoteVolume,
    manifest: Arc<Manifest>,
    wanted: OrdinalRanges,
    batches: mpsc::Sender<Vec<ExtentData>>,
) -> Result<(), ReadVolumeError> {
    if wanted.is_empty() {
        return Ok(());
    }
    let archive = Arriving::of(&manifest, volume.read(Path::new("")).await?);
    blocking(move || {
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        let (mut batch, mut bytes) = (Vec::new(), 0);
        ArchiveReader::new(archive)
            .extents(&manifest, &wanted, |extent| {
                bytes += extent.data.len();
                batch.push(extent);
                if bytes < BATCH {
                    return Ok(());
                }
                bytes = 0;
                batches.blocking_send(std::mem::take(&mut batch)).map_err(gone)
            })
            .map_err(arriving)?;
        if !batch.is_empty() {
            batches.blocking_send(batch).map_err(|_| ReadVolumeError::CallerGone)?;
        }
        Ok(())
    })
    .await
}

/// What went wrong with an archive that a worker sends.
fn arriving(error: ArchiveError) -> ReadVolumeError {
    match error {
        ArchiveError::Sink(_) => ReadVolumeError::CallerGone,
        // The manifest of the volume is right, so what it holds is not.
        ArchiveError::Changed { .. } => ReadVolumeError::Archive(error),
        error => failed(&error).into(),
    }
}

/// Reads one regular file of a volume: its size with each piece of its bytes.
pub(crate) async fn read_file(
    volume: &SharedRemoteVolume,
    manifest: &Manifest,
    path: PathBuf,
    chunks: mpsc::Sender<(u64, Bytes)>,
) -> Result<(), ReadVolumeError> {
    let entry = file(manifest, &path)?.clone();
    let EntryKind::File { size_bytes: size, .. } = entry.kind else {
        return Err(ReadVolumeError::PathNotFound(path));
    };
    if entry.extents().is_empty() {
        return blocking(move || zeroes(&chunks, size, 0, size)).await;
    }
    let archive = Arriving::of(manifest, volume.read(&path).await?);
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
            .map_err(arriving)?;
        if at < size { zeroes(&chunks, size, at, size) } else { Ok(()) }
    })
    .await
}

/// The regular file at `path`, to which no link leads.
fn file<'m>(manifest: &'m Manifest, path: &Path) -> Result<&'m Entry, ReadVolumeError> {
    let not_found = || ReadVolumeError::PathNotFound(path.to_owned());
    let not_a_file = |what: String| Err(ReadVolumeError::NotAFile { path: path.to_owned(), what });
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
        EntryKind::Fifo | EntryKind::Device { .. } => not_a_file("no regular file".to_owned()),
    }
}

/// Sends what a hole reads as; of an empty file, its size.
fn zeroes(
    chunks: &mpsc::Sender<(u64, Bytes)>,
    size: u64,
    mut from: u64,
    to: u64,
) -> Result<(), ReadVolumeError> {
    loop {
        let length = (to - from).min(HOLE);
        let data = Bytes::from(vec![0; usize::try_from(length).unwrap_or_default()]);
        chunks.blocking_send((size, data)).map_err(|_| ReadVolumeError::CallerGone)?;
        from += length;
        if from == to {
            return Ok(());
        }
    }
}

/// Packs a volume, or the directory of it at `path`, as its manifest says that it is. Files come in the order of the worker.
pub(crate) async fn pack(
    volume: &SharedRemoteVolume,
    manifest: Arc<Manifest>,
    path: &Path,
    pieces: mpsc::Sender<Piece>,
) -> Result<(), ReadVolumeError> {
    let archive = Arriving::of(&manifest, volume.read(path).await?);
    blocking(move || {
        let mut writer = ArchiveWriter::new(Outlet::new(pieces), manifest.clone());
        let wanted = OrdinalRanges::all(manifest.extent_count());
        // What cannot be sent is told apart from what the worker sends.
        let mut refused = None;
        let packed = ArchiveReader::new(archive).extents(&manifest, &wanted, |extent| {
            writer.put(extent.ordinal, &extent.data).map_err(|error| {
                refused = Some(error);
                io::ErrorKind::Other.into()
            })
        });
        match refused {
            // The one before it was not what the manifest says, and so was passed over.
            Some(ArchiveWriteError::OutOfOrder(ordinal)) => {
                let file = manifest.locate(ordinal).map(|located| &manifest.entries()[located.entry]);
                let path = file.map(|file| file.path().to_owned()).unwrap_or_default();
                return Err(ArchiveError::Changed { path }.into());
            }
            Some(error) => return Err(error.into()),
            None => {}
        }
        packed.map_err(arriving)?;
        writer.finish()?.end().map_err(ArchiveWriteError::from)?;
        Ok(())
    })
    .await
}

/// Unpacks on the worker what `feed`, which may block, writes into the outlet that it is given.
///
/// What the worker says goes first: when it takes no more, the writer cannot know why.
pub(crate) async fn write<T: Send + 'static>(
    volume: &SharedRemoteVolume,
    feed: impl FnOnce(Outlet) -> Result<T, WriteVolumeError> + Send + 'static,
) -> Result<T, WriteVolumeError> {
    let (pieces, queue) = mpsc::channel(QUEUE);
    let feeding = blocking(move || feed(Outlet::new(pieces)));
    let (fed, taken) = tokio::join!(feeding, volume.write(Path::new(""), blocking_pipe::archive(queue)));
    match (fed, taken) {
        (Ok(fed), Ok(())) => Ok(fed),
        (Err(WriteVolumeError::CallerGone) | Ok(_), Err(error)) => Err(error.into()),
        (Err(error), _) => Err(error),
    }
}

/// Passes an archive on to the worker, and answers what it holds. Nothing is passed on that was not found to be safe before.
pub(crate) async fn unpack(
    volume: &SharedRemoteVolume,
    archive: Inlet,
) -> Result<Manifest, WriteVolumeError> {
    write(volume, move |out| {
        let mut tee = Tee::new(archive, out);
        let read = ArchiveReader::new(&mut tee).read(Limits::of_process(), |_| Ok(()));
        let manifest = read.map_err(|error| match error {
            // The worker takes no more.
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
