//! Archives in and out of the worker's volumes.
//!
//! The invariant of [`super::write`] holds: what arrives counts only after the caller's `commit`, and only if it is a whole archive.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use domain::Digest;
use domain::worker::TicketClaims;
use runtime::{Contents, RuntimeError};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::Instrument;
use transfer::{
    ArchiveError, ArchiveReader, ArchiveWriteError, ArchiveWriter, Limits, Manifest, OrdinalRanges,
    ReadOptions, Subtree, TreeReader, TreeWriter, Trust, WriteOptions,
};

use super::completion::{make_empty, settle};
use super::error::{ReadVolumeError, WriteVolumeError};
use super::{Transfers, WriterPermit};
use crate::transfer::blocking_pipe::{Inlet, Outlet, Piece};
use crate::transfer::remote;
use crate::util::blocking::blocking;
use crate::util::disk_reserve;

/// Pieces of an archive that wait for the thread that reads them.
const QUEUE: usize = 4;
/// The name under which a spool begins.
const SPOOL: &str = ".gantry-spool";
/// Bytes after which an archive that is unpacked looks at the free space again.
const LOOK_AFTER: u64 = 64 << 20;
/// File systems that share blocks share whole ones.
const BLOCK: u64 = 4096;

/// An archive that comes in.
pub(crate) struct ArchiveUpload {
    pieces: mpsc::Sender<Piece>,
    /// Goes on when the caller leaves: what was made is destroyed before another writer has its turn.
    unpacked: JoinHandle<Result<Arc<Manifest>, WriteVolumeError>>,
}

impl ArchiveUpload {
    /// Makes the volume, and unpacks what comes. An earlier try at the same volume is thrown away, unless its bytes were final: then what
    /// comes is only compared.
    pub(crate) fn begin(transfers: &Arc<Transfers>, ticket: TicketClaims) -> Self {
        let (pieces, queue) = mpsc::channel(QUEUE);
        let tasks = transfers.worker.tasks.clone();
        let transfers = transfers.clone();
        let unpacked = async move { unpack(&transfers, &ticket, Inlet::new(queue)).await };
        Self { pieces, unpacked: tasks.spawn(unpacked.in_current_span()) }
    }

    /// Takes some of the archive. Waits when the disk is slower than the sender.
    pub(crate) async fn data(&mut self, data: Bytes) -> Result<(), WriteVolumeError> {
        if self.pieces.send(Some(data)).await.is_err() {
            return self.ended().await.map(|_| ());
        }
        Ok(())
    }

    /// Ends the volume: everything is there, and known to the artifact store.
    pub(crate) async fn commit(mut self) -> Result<Arc<Manifest>, WriteVolumeError> {
        // Whoever does not take it says why.
        self.pieces.send(None).await.ok();
        self.ended().await
    }

    async fn ended(&mut self) -> Result<Arc<Manifest>, WriteVolumeError> {
        (&mut self.unpacked).await.unwrap_or_else(|error| {
            Err(RuntimeError::Other(format!("the unpacking of an archive broke off: {error}")).into())
        })
    }
}

async fn unpack(
    transfers: &Transfers,
    ticket: &TicketClaims,
    archive: Inlet,
) -> Result<Arc<Manifest>, WriteVolumeError> {
    let turn =
        WriterPermit::take(&transfers.filling, ticket.volume).ok_or(WriteVolumeError::Busy(ticket.volume))?;
    if let Some(kept) = transfers.manifests.kept_of(transfers.worker.runtime.as_ref(), ticket.volume).await? {
        let again = blocking(move || {
            Ok::<_, WriteVolumeError>(ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()))?)
        });
        if again.await?.tree_digest() != kept.tree_digest() {
            return Err(WriteVolumeError::Complete(ticket.volume));
        }
        // Whether the store knows was not heard, by the caller or by us. It is told again.
        let manifest = transfers.manifest(ticket).await?;
        return settle(transfers, ticket.volume, &ticket.team, manifest, turn).await;
    }
    make_empty(transfers, ticket.volume).await?;
    let unpacked = async {
        match transfers.worker.runtime.contents(ticket.volume).await? {
            Contents::Directory(root) => blocking(move || unpack_into(&root, archive)).await,
            Contents::Remote(remote) => remote::unpack(&remote, archive).await.map(Arc::new),
        }
    };
    match unpacked.await {
        Ok(manifest) => settle(transfers, ticket.volume, &ticket.team, manifest, turn).await,
        Err(error) => {
            turn.discard(transfers).await;
            Err(error)
        }
    }
}

/// Unpacks `archive` in the empty directory `root`.
///
/// What an entry is, is sure only when the archive has ended: later entries replace earlier ones. So content waits in a file without a name,
/// each extent once, and is copied from there, or shared where the file system can do that.
fn unpack_into(root: &Path, archive: impl Read) -> Result<Arc<Manifest>, WriteVolumeError> {
    let spool = spool(root).map_err(|error| RuntimeError::io("create a spool", error))?;
    let (mut places, mut end) = (HashMap::new(), 0_u64);
    let mut guard = Guard::new(&spool);
    let manifest = ArchiveReader::new(archive).read(Limits::of_process(), |passing| {
        if let Entry::Vacant(place) = places.entry(passing.extent.digest) {
            guard.before(passing.extent.length)?;
            spool.write_all_at(passing.data, end)?;
            place.insert(end);
            end = (end + u64::from(passing.extent.length)).next_multiple_of(BLOCK);
        }
        Ok(())
    })?;
    let manifest = Arc::new(manifest);
    let options = WriteOptions { devices: true, ..WriteOptions::default() };
    let mut writer = TreeWriter::new(root, manifest.clone(), options)?;
    for located in manifest.extents() {
        let full = |error| RuntimeError::io("unpack an archive", error);
        guard.before(located.extent.length).map_err(full)?;
        let place = places.get(&located.extent.digest).copied().unwrap_or_default();
        writer.copy_extent(located.ordinal, &spool, place, Trust::Trusted)?;
    }
    writer.finish()?;
    Ok(manifest)
}

/// Keeps an archive, which does not say before how much it holds, from the reserve of the disk.
struct Guard<'f> {
    on: &'f File,
    /// Bytes that may be written before the disk is looked at again.
    left: u64,
}

impl<'f> Guard<'f> {
    fn new(on: &'f File) -> Self {
        Self { on, left: 0 }
    }

    fn before(&mut self, bytes: u32) -> io::Result<()> {
        let bytes = u64::from(bytes);
        if bytes > self.left {
            let found = rustix::fs::fstatvfs(self.on)?;
            let total = found.f_blocks.saturating_mul(found.f_frsize);
            let free = found.f_bavail.saturating_mul(found.f_frsize);
            if free < disk_reserve::reserve(total).saturating_add(bytes) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.left = LOOK_AFTER;
        }
        self.left -= bytes.min(self.left);
        Ok(())
    }
}

fn spool(root: &Path) -> io::Result<File> {
    let path = root.join(SPOOL);
    let spool = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(spool)
}

/// Packs a volume, or the directory of it at `path`. Answers the digest of the tree if it was the whole.
pub(crate) async fn pack(
    transfers: &Transfers,
    ticket: &TicketClaims,
    path: &[u8],
    pieces: mpsc::Sender<Piece>,
) -> Result<Option<Digest>, ReadVolumeError> {
    let manifest = transfers.manifest(ticket).await?;
    let subtree = if path.is_empty() {
        None
    } else {
        let not_found = || ReadVolumeError::PathNotFound(OsString::from_vec(path.to_vec()).into());
        Some(manifest.subtree(path).map_err(ArchiveError::from)?.ok_or_else(not_found)?)
    };
    let digest = subtree.is_none().then(|| manifest.tree_digest());
    match transfers.worker.runtime.contents(ticket.volume).await? {
        Contents::Directory(root) => blocking(move || pack_from(&root, manifest, subtree, pieces)).await?,
        Contents::Remote(remote) => {
            let wanted = subtree.map_or(manifest, |subtree| subtree.manifest().clone());
            remote::pack(&remote, wanted, Path::new(OsStr::from_bytes(path)), pieces).await?;
        }
    }
    Ok(digest)
}

/// Packs a directory, or that directory of it.
fn pack_from(
    root: &Path,
    manifest: Arc<Manifest>,
    subtree: Option<Subtree>,
    pieces: mpsc::Sender<Piece>,
) -> Result<(), ReadVolumeError> {
    let out = Outlet::new(pieces);
    let mut reader = TreeReader::new(root, manifest.clone(), ReadOptions::default())?;
    let Some(subtree) = subtree else {
        let mut writer = ArchiveWriter::new(out, manifest.clone());
        for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
            batch?.iter().try_for_each(|extent| writer.put(extent.ordinal, &extent.data))?;
        }
        return finish(writer);
    };
    let mut writer = ArchiveWriter::new(out, subtree.manifest().clone());
    for ordinal in 0..subtree.manifest().extent_count() {
        let origin = subtree.origin(ordinal).unwrap_or(u64::MAX);
        writer.put(ordinal, &reader.read(origin)?)?;
    }
    finish(writer)
}

fn finish(writer: ArchiveWriter<Outlet>) -> Result<(), ReadVolumeError> {
    writer.finish()?.end().map_err(ArchiveWriteError::from)?;
    Ok(())
}
