//! Bytes into the volumes of a worker.
//!
//! Invariant: a volume becomes known as complete only after its manifest was validated, every extent had the
//! digest that the manifest says, and the writer said `commit`. Bytes that arrive before that lie in a volume
//! that the artifact store knows as unfinished, and collects when its transfer ends.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use domain::VolumeHandle;
use domain::worker::TicketClaims;
use runtime::{Contents, RuntimeError};
use tokio::sync::mpsc;
use tracing::Instrument;
use transfer::{
    ArchiveWriteError, ArchiveWriter, Manifest, OrdinalRanges, TreeWriter, Trust, Verified, WriteError,
    WriteOptions,
};

use super::blocking_pipe::Outlet;
use super::completion::{make_empty, settle};
use super::disk_reservations::{self, DiskReservation};
use super::error::WriteVolumeError;
use super::local_dir::directory;
use super::remote::{self, SharedRemoteVolume};
use super::{Transfers, WriterPermit, peer_copy};
use crate::util::blocking::blocking;

/// Verified extents that wait for the thread that writes them, in batches of about 1 MiB.
const QUEUE: usize = 16;

/// A volume that is being filled.
pub(crate) struct VolumeWriter {
    volume: VolumeHandle,
    team: String,
    manifest: Arc<Manifest>,
    /// What has to be sent.
    pub(crate) missing: OrdinalRanges,
    /// Whether a file must be whole before another begins.
    whole_files: bool,
    /// Whether the worker that has the bytes sent them all by itself.
    pub(crate) by_peer: bool,
    /// What it will write. `None`: it writes nothing, or its worker has another disk.
    declared: Option<DiskReservation>,
    queue: mpsc::Sender<Step>,
    writer: tokio::task::JoinHandle<(WriterPermit, Result<(), WriteVolumeError>)>,
}

enum Step {
    Put(Vec<Verified<Bytes>>),
    Commit,
}

impl VolumeWriter {
    /// Makes the volume, copies what this worker has already, and says what is missing. An earlier try at the same volume is thrown away,
    /// unless it got as far as that its bytes were final: then nothing is missing.
    ///
    /// A caller who goes away does not break this off: what destroys, makes or copies would go on in its thread, beside the next writer.
    pub(crate) async fn begin(
        transfers: &Arc<Transfers>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
    ) -> Result<Self, WriteVolumeError> {
        Self::begin_with(transfers, ticket, manifest, None).await
    }

    /// The same of a volume that `peer` may fill, if both workers do such things: then nothing is missing.
    pub(crate) async fn begin_with(
        transfers: &Arc<Transfers>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::Sender>,
    ) -> Result<Self, WriteVolumeError> {
        let transfers = transfers.clone();
        let tasks = transfers.worker.tasks.clone();
        let begin = async move { Self::begin_whole(&transfers, &ticket, manifest, peer).await };
        let begun = tasks.spawn(begin.in_current_span());
        begun.await.unwrap_or_else(|error| {
            Err(RuntimeError::Other(format!("the start of a transfer broke off: {error}")).into())
        })
    }

    async fn begin_whole(
        transfers: &Transfers,
        ticket: &TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::Sender>,
    ) -> Result<Self, WriteVolumeError> {
        let turn = WriterPermit::take(&transfers.filling, ticket.volume)
            .ok_or(WriteVolumeError::Busy(ticket.volume))?;
        if let Some(kept) =
            transfers.manifests.kept_of(transfers.worker.runtime.as_ref(), ticket.volume).await?
        {
            if kept.tree_digest() != manifest.tree_digest() {
                return Err(WriteVolumeError::Complete(ticket.volume));
            }
            // Whether the store knows was not heard, by the caller or by us. It is told again.
            transfers.manifest(ticket).await?;
            return Ok(Self::whole(ticket, manifest, turn));
        }
        make_empty(transfers, ticket.volume).await?;
        let root = match transfers.worker.runtime.contents(ticket.volume).await? {
            Contents::Directory(root) => root,
            Contents::Remote(remote) => {
                let volume = ticket.volume;
                if let Some(peer) = peer
                    && peer.fill(transfers, volume, &remote, &manifest).await?
                {
                    return Ok(Self { by_peer: true, ..Self::whole(ticket, manifest, turn) });
                }
                return Ok(Self::far(transfers, ticket, manifest, turn, remote));
            }
        };

        let declared = match transfers.worker.runtime.disk().await {
            Ok(disk) => transfers
                .reservations
                .declare(disk, disk_reservations::needs(&manifest))
                .map_err(WriteVolumeError::from),
            Err(error) => Err(error.into()),
        };
        let mut declared = match declared {
            Ok(declared) => declared,
            Err(error) => {
                turn.discard(transfers).await;
                return Err(error);
            }
        };
        let sources = Sources::find(transfers, &ticket.team, &manifest).await?;
        let options = WriteOptions { devices: true, ..WriteOptions::default() };
        let tree = manifest.clone();
        let begun = blocking(move || {
            let mut writer = TreeWriter::new(&root, tree.clone(), options)?;
            let missing = sources.copy(&mut writer, &tree)?;
            Ok::<_, WriteVolumeError>((writer, missing))
        })
        .await;
        let (writer, missing) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                turn.discard(transfers).await;
                return Err(error);
            }
        };

        declared.wrote(manifest.extent_bytes().saturating_sub(manifest.bytes_of(&missing)));
        let (queue, steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            // The turn is kept until the last byte that this writer may write, and by who waits for it longer than that.
            (turn, write(writer, steps).map_err(WriteVolumeError::from))
        });
        Ok(Self {
            volume: ticket.volume,
            team: ticket.team.clone(),
            manifest,
            missing,
            whole_files: false,
            by_peer: false,
            declared: Some(declared),
            queue,
            writer,
        })
    }

    /// A volume on another machine, to which everything is sent.
    fn far(
        transfers: &Transfers,
        ticket: &TicketClaims,
        manifest: Arc<Manifest>,
        turn: WriterPermit,
        remote: SharedRemoteVolume,
    ) -> Self {
        let (queue, steps) = mpsc::channel(QUEUE);
        let tree = manifest.clone();
        let writer = transfers.worker.tasks.spawn(async move {
            let packed = remote::write(&remote, move |out| pack(ArchiveWriter::new(out, tree), steps));
            // One that was broken off is left unfinished.
            (
                turn,
                packed.await.or_else(|error| {
                    if matches!(error, WriteVolumeError::BrokenOff) { Ok(()) } else { Err(error) }
                }),
            )
        });
        let missing = OrdinalRanges::all(manifest.extent_count());
        Self {
            volume: ticket.volume,
            team: ticket.team.clone(),
            manifest,
            missing,
            whole_files: true,
            by_peer: false,
            declared: None,
            queue,
            writer,
        }
    }

    /// A volume that has all of its bytes.
    fn whole(ticket: &TicketClaims, manifest: Arc<Manifest>, turn: WriterPermit) -> Self {
        let (queue, mut steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            while let Some(Step::Put(_)) = steps.blocking_recv() {}
            (turn, Ok(()))
        });
        let missing = OrdinalRanges::new();
        Self {
            volume: ticket.volume,
            team: ticket.team.clone(),
            manifest,
            missing,
            whole_files: false,
            by_peer: false,
            declared: None,
            queue,
            writer,
        }
    }

    /// Whether what was broken off within a file can only be begun again.
    pub(crate) fn takes_whole_files(&self) -> bool {
        self.whole_files
    }

    /// Gives up what arrived, and waits until somebody else may fill the volume.
    pub(crate) async fn abandon(self) {
        drop(self.queue);
        // What it fails with does not matter any more.
        self.writer.await.ok();
    }

    /// Bytes that have to be sent.
    pub(crate) fn missing_bytes(&self) -> u64 {
        self.manifest.bytes_of(&self.missing)
    }

    /// Takes some extents: file by file, those of a file in ascending order. Waits when the disk is slower than the sender.
    pub(crate) async fn put(
        &mut self,
        transfers: &Transfers,
        extents: Vec<(u64, Bytes)>,
    ) -> Result<(), WriteVolumeError> {
        let bytes: usize = extents.iter().map(|(_, data)| data.len()).sum();
        metrics::counter!("gantry_gateway_transferred_bytes_total", "direction" => "in")
            .increment(bytes as u64);
        let verified: Result<Vec<_>, _> =
            extents.into_iter().map(|(ordinal, data)| self.manifest.verify(ordinal, data)).collect();
        self.put_verified(transfers, verified?).await
    }

    /// Takes some extents, as [`Self::put`] does.
    pub(crate) async fn put_verified(
        &mut self,
        transfers: &Transfers,
        extents: Vec<Verified<Bytes>>,
    ) -> Result<(), WriteVolumeError> {
        let bytes: usize = extents.iter().map(|extent| extent.data().len()).sum();
        if self.queue.send(Step::Put(extents)).await.is_err() {
            return Err(self.writer_failed(transfers).await);
        }
        if let Some(declared) = &mut self.declared {
            declared.wrote(bytes as u64);
        }
        Ok(())
    }

    /// Ends the volume: everything is there, verified, and known to the artifact store.
    pub(crate) async fn commit(mut self, transfers: &Transfers) -> Result<Arc<Manifest>, WriteVolumeError> {
        if self.queue.send(Step::Commit).await.is_err() {
            return Err(self.writer_failed(transfers).await);
        }
        let (turn, written) = (&mut self.writer)
            .await
            .map_err(|error| RuntimeError::Other(format!("a thread died: {error}")))?;
        if let Err(error) = written {
            turn.discard(transfers).await;
            return Err(error);
        }
        settle(transfers, self.volume, &self.team, self.manifest, turn).await
    }

    async fn writer_failed(&mut self, transfers: &Transfers) -> WriteVolumeError {
        match (&mut self.writer).await {
            Ok((turn, Err(error))) => {
                turn.discard(transfers).await;
                error
            }
            Ok((_, Ok(()))) | Err(_) => RuntimeError::Other("the writing thread died".to_owned()).into(),
        }
    }
}

/// Writes until it is told to commit. A queue that ends before that leaves the volume unfinished.
fn write(mut writer: TreeWriter, mut steps: mpsc::Receiver<Step>) -> Result<(), WriteError> {
    while let Some(step) = steps.blocking_recv() {
        match step {
            Step::Put(extents) => extents.iter().try_for_each(|extent| writer.put_verified(extent))?,
            Step::Commit => return writer.finish().map(|_| ()),
        }
    }
    Ok(())
}

/// Packs for another machine until it is told to commit.
fn pack(mut writer: ArchiveWriter<Outlet>, mut steps: mpsc::Receiver<Step>) -> Result<(), WriteVolumeError> {
    while let Some(step) = steps.blocking_recv() {
        match step {
            Step::Put(extents) => extents.iter().try_for_each(|extent| writer.put_verified(extent))?,
            Step::Commit => {
                writer.finish()?.end().map_err(ArchiveWriteError::from)?;
                return Ok(());
            }
        }
    }
    Err(WriteVolumeError::BrokenOff)
}

/// Files of this worker that have some of the content that is wanted.
struct Sources {
    /// For each ordinal that can be copied: the file's index, and where in it.
    extents: Vec<(u64, usize, u64)>,
    files: Vec<PathBuf>,
}

impl Sources {
    async fn find(transfers: &Transfers, team: &str, manifest: &Manifest) -> Result<Self, RuntimeError> {
        transfers.manifests.recall().await;
        let mut sources = Self { extents: Vec::new(), files: Vec::new() };
        let mut roots = std::collections::HashMap::new();
        let mut known = std::collections::HashMap::new();
        for located in manifest.extents() {
            let Some(found) = transfers.manifests.find(team, &located.extent.digest) else { continue };
            let root = match roots.entry(found.volume) {
                std::collections::hash_map::Entry::Occupied(root) => root.into_mut(),
                std::collections::hash_map::Entry::Vacant(vacant) => {
                    let Ok(root) = directory(transfers.worker.runtime.as_ref(), found.volume).await else {
                        continue;
                    };
                    vacant.insert(root)
                }
            };
            let path = root.join(&found.path);
            let next = sources.files.len();
            let file = *known.entry(path.clone()).or_insert(next);
            if file == next {
                sources.files.push(path);
            }
            sources.extents.push((located.ordinal, file, found.offset));
        }
        Ok(sources)
    }

    /// Copies what can be copied, verifying it: the source may be going at this moment. Answers what is missing.
    fn copy(self, writer: &mut TreeWriter, manifest: &Manifest) -> Result<OrdinalRanges, WriteError> {
        let mut copied = OrdinalRanges::new();
        let mut open: Option<(usize, File)> = None;
        for (ordinal, index, offset) in self.extents {
            if open.as_ref().is_none_or(|(opened, _)| *opened != index) {
                open = File::open(&self.files[index]).ok().map(|file| (index, file));
            }
            let Some((_, file)) = &open else { continue };
            match writer.copy_extent(ordinal, file, offset, Trust::Verify) {
                // Ordinals ascend, so this cannot be refused.
                Ok(()) => copied.insert(ordinal).unwrap_or_default(),
                Err(WriteError::DigestMismatch { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(copied.complement(manifest.extent_count()))
    }
}

#[cfg(test)]
mod tests;
