//! Transfers of volumes as tar archives.
//!
//! Invariant: as in [`super::write`], an archive counts only after the caller's `commit`, and only
//! if it is complete.

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

use super::completion::{finish_volume, make_empty};
use super::error::{ReadVolumeError, WriteVolumeError};
use super::{Transfers, WriterPermit};
use crate::transfer::blocking_pipe::{Inlet, Outlet, Piece};
use crate::transfer::remote;
use crate::util::blocking::blocking;
use crate::util::disk_reserve;
use crate::util::mapped_ids::MappedIds;

/// Most pieces of an archive that wait for the unpacking thread.
const QUEUE: usize = 4;
/// Name of the spool file for a moment, until it is unlinked.
const SPOOL_NAME: &str = ".gantry-spool";
/// Bytes after which unpacking checks the free space again.
const CHECK_INTERVAL_BYTES: u64 = 64 << 20;
/// Block size of file systems that share whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// An upload of an archive.
pub(crate) struct ArchiveUpload {
    pieces: mpsc::Sender<Piece>,
    /// The task that unpacks. It outlives the caller, so that it can destroy a partial volume
    /// before another writer starts.
    unpacked: JoinHandle<Result<Arc<Manifest>, WriteVolumeError>>,
}

impl ArchiveUpload {
    /// Makes the volume and starts to unpack. A partial volume of an earlier try is destroyed. If
    /// the volume is already complete, the archive is only compared.
    pub(crate) fn begin(transfers: &Arc<Transfers>, ticket: TicketClaims) -> Self {
        let (pieces, queue) = mpsc::channel(QUEUE);
        let tasks = transfers.worker.tasks.clone();
        let transfers = transfers.clone();
        let unpacked = async move { unpack(&transfers, &ticket, Inlet::new(queue)).await };
        Self { pieces, unpacked: tasks.spawn(unpacked.in_current_span()) }
    }

    /// Adds some bytes of the archive. Waits if the disk is slower than the sender.
    pub(crate) async fn data(&mut self, data: Bytes) -> Result<(), WriteVolumeError> {
        if self.pieces.send(Some(data)).await.is_err() {
            return self.ended().await.map(|_| ());
        }
        Ok(())
    }

    /// Completes the volume, and reports it to the artifact store.
    pub(crate) async fn commit(mut self) -> Result<Arc<Manifest>, WriteVolumeError> {
        // If the task has ended, its result has the cause.
        self.pieces.send(None).await.ok();
        self.ended().await
    }

    async fn ended(&mut self) -> Result<Arc<Manifest>, WriteVolumeError> {
        (&mut self.unpacked).await.unwrap_or_else(|error| {
            Err(RuntimeError::Other(format!("cannot unpack an archive: its task failed: {error}")).into())
        })
    }
}

async fn unpack(
    transfers: &Transfers,
    ticket: &TicketClaims,
    archive: Inlet,
) -> Result<Arc<Manifest>, WriteVolumeError> {
    let permit = WriterPermit::acquire(&transfers.filling, ticket.volume)
        .ok_or(WriteVolumeError::Busy(ticket.volume))?;
    if let Some(stored) = transfers.manifests.stored(transfers.worker.runtime.as_ref(), ticket.volume).await?
    {
        let received = blocking(move || {
            Ok::<_, WriteVolumeError>(ArchiveReader::new(archive).read(Limits::of_process(), |_| Ok(()))?)
        });
        if received.await?.tree_digest() != stored.tree_digest() {
            return Err(WriteVolumeError::Complete(ticket.volume));
        }
        // An earlier report to the store may have been lost, so the volume is reported again.
        let manifest = transfers.manifest(ticket).await?;
        return finish_volume(transfers, ticket.volume, &ticket.team, manifest, permit).await;
    }
    make_empty(transfers, ticket.volume).await?;
    let unpacked = async {
        match transfers.worker.runtime.contents(ticket.volume).await? {
            Contents::Directory(root) => blocking(move || unpack_into(&root, archive)).await,
            Contents::Remote(remote) => remote::unpack(&remote, archive).await.map(Arc::new),
        }
    };
    match unpacked.await {
        Ok(manifest) => finish_volume(transfers, ticket.volume, &ticket.team, manifest, permit).await,
        Err(error) => {
            permit.discard(transfers).await;
            Err(error)
        }
    }
}

/// Unpacks `archive` into the empty directory `root`.
///
/// Later entries of an archive replace earlier ones, so the tree is known only at the end. Until
/// then, the contents are kept in an unlinked spool file, each extent once. Then they are copied,
/// or shared if the file system supports that.
fn unpack_into(root: &Path, archive: impl Read) -> Result<Arc<Manifest>, WriteVolumeError> {
    let spool = spool(root).map_err(|error| RuntimeError::io("create a spool", error))?;
    let (mut places, mut end) = (HashMap::new(), 0_u64);
    let mut guard = ReserveGuard::new(&spool);
    let manifest = ArchiveReader::new(archive).read(Limits::of_process(), |passing| {
        if let Entry::Vacant(place) = places.entry(passing.extent.digest) {
            guard.check(passing.extent.length)?;
            spool.write_all_at(passing.data, end)?;
            place.insert(end);
            end = (end + u64::from(passing.extent.length)).next_multiple_of(BLOCK_BYTES);
        }
        Ok(())
    })?;
    let manifest = Arc::new(manifest);
    let options = WriteOptions { devices: true, ..WriteOptions::default() };
    MappedIds::of_this_process().check_owners(&manifest)?;
    let mut writer = TreeWriter::new(root, manifest.clone(), options)?;
    for located in manifest.extents() {
        let full = |error| RuntimeError::io("unpack an archive", error);
        guard.check(located.extent.length).map_err(full)?;
        let place = places.get(&located.extent.digest).copied().unwrap_or_default();
        writer.copy_extent(located.ordinal, &spool, place, Trust::Trusted)?;
    }
    writer.finish()?;
    Ok(manifest)
}

/// Keeps the disk reserve free while an archive of unknown size is unpacked.
struct ReserveGuard<'f> {
    on: &'f File,
    /// Bytes that may be written before the next check.
    remaining: u64,
}

impl<'f> ReserveGuard<'f> {
    fn new(on: &'f File) -> Self {
        Self { on, remaining: 0 }
    }

    fn check(&mut self, bytes: u32) -> io::Result<()> {
        let bytes = u64::from(bytes);
        if bytes > self.remaining {
            let status = rustix::fs::fstatvfs(self.on)?;
            let total = status.f_blocks.saturating_mul(status.f_frsize);
            let free = status.f_bavail.saturating_mul(status.f_frsize);
            if free < disk_reserve::reserve(total).saturating_add(bytes) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.remaining = CHECK_INTERVAL_BYTES;
        }
        self.remaining -= bytes.min(self.remaining);
        Ok(())
    }
}

fn spool(root: &Path) -> io::Result<File> {
    let path = root.join(SPOOL_NAME);
    let spool = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(spool)
}

/// Packs a volume or one directory of it. Returns the digest of the tree if the whole volume was
/// packed.
pub(crate) async fn pack(
    transfers: &Transfers,
    ticket: &TicketClaims,
    path: &[u8],
    pieces: mpsc::Sender<Piece>,
) -> Result<Option<Digest>, ReadVolumeError> {
    let manifest = transfers.read_manifest(ticket).await?;
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

/// Packs a local volume, or one directory of it.
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
