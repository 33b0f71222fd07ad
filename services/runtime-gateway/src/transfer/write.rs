//! Writing the volumes of a worker.
//!
//! [`crate::api`] and [`super::pull`] use it. Invariant: a volume counts as complete only after its
//! manifest was validated, every extent has its digest, and the writer committed. Until then the
//! artifact store counts the volume as incomplete, and collects it when its transfer ends.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use domain::VolumeHandle;
use domain::worker::TicketClaims;
use runtime::{Contents, RuntimeError};
use tokio::sync::mpsc;
use tracing::Instrument;
use transfer::{
    ArchiveWriteError, ArchiveWriter, Manifest, OrdinalRanges, SealedTree, TreeWriter, Trust, Verified,
    WriteError, WriteOptions,
};

use super::blocking_pipe::Outlet;
use super::completion::{finish_volume, make_empty};
use super::disk_reservations::{self, DiskReservation};
use super::error::WriteVolumeError;
use super::growing::{GrowingVolume, Growth};
use super::local_dir::local_directory;
use super::manifests::ExtentLocation;
use super::remote::{self, SharedRemoteVolume};
use super::{Transfers, WriterPermit, peer_copy, room};
use crate::util::blocking::blocking;
use crate::util::mapped_ids::MappedIds;

/// Most batches of verified extents that wait for the writing thread. A batch has about 1 MiB.
const QUEUE: usize = 16;

/// A volume that is being filled.
pub(crate) struct VolumeWriter {
    volume: VolumeHandle,
    team: String,
    manifest: Arc<Manifest>,
    /// Extents that must be sent.
    pub(crate) missing: OrdinalRanges,
    /// Whether a file must be complete before the next one starts.
    whole_files: bool,
    /// Whether the worker of the source has sent all extents directly.
    pub(crate) by_peer: bool,
    /// Whether other workers can read the volume already.
    is_readable: bool,
    /// Disk space of the transfer. `None`: nothing is written here.
    reserved: Option<DiskReservation>,
    queue: mpsc::Sender<Step>,
    writer: tokio::task::JoinHandle<(WriterPermit, Result<(), WriteVolumeError>)>,
}

/// Most sources of links that are open at a time, and most trees that are searched for a path. An
/// open source has some open directories.
const MAX_OPEN_SOURCES: usize = 8;

enum Step {
    Put(Vec<Verified<Bytes>>),
    Commit,
}

impl VolumeWriter {
    /// Makes the volume, takes the contents that this worker has, and determines the missing ones.
    /// A partial volume of an earlier try is destroyed. If the volume is already complete, nothing
    /// is missing.
    ///
    /// A caller that is dropped does not interrupt it, because its blocking steps would continue
    /// beside the next writer.
    pub(crate) async fn begin(
        transfers: &Arc<Transfers>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
    ) -> Result<Self, WriteVolumeError> {
        Self::begin_with(transfers, ticket, manifest, None).await
    }

    /// Begins a volume that `peer` may fill. If `peer` does, nothing is missing.
    pub(crate) async fn begin_with(
        transfers: &Arc<Transfers>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::PeerSource>,
    ) -> Result<Self, WriteVolumeError> {
        let transfers = transfers.clone();
        let tasks = transfers.worker.tasks.clone();
        let begin = async move { Self::try_begin(&transfers, &ticket, manifest, peer).await };
        let begin_result = tasks.spawn(begin.in_current_span());
        begin_result.await.unwrap_or_else(|error| {
            Err(RuntimeError::Other(format!("cannot begin a transfer: its task failed: {error}")).into())
        })
    }

    async fn try_begin(
        transfers: &Transfers,
        ticket: &TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::PeerSource>,
    ) -> Result<Self, WriteVolumeError> {
        let permit = WriterPermit::acquire(&transfers.filling, ticket.volume)
            .ok_or(WriteVolumeError::Busy(ticket.volume))?;
        if let Some(stored) =
            transfers.manifests.stored(transfers.worker.runtime.as_ref(), ticket.volume).await?
        {
            if stored.tree_digest() != manifest.tree_digest() {
                return Err(WriteVolumeError::Complete(ticket.volume));
            }
            // An earlier report to the store may have been lost, so the volume is reported again.
            transfers.manifest(ticket).await?;
            return Ok(Self::filled(ticket, manifest, permit));
        }
        make_empty(transfers, ticket.volume).await?;
        let root = match transfers.worker.runtime.contents(ticket.volume).await? {
            Contents::Directory(root) => root,
            Contents::Remote(remote) => {
                let volume = ticket.volume;
                if let Some(peer) = peer
                    && peer.fill(transfers, volume, &remote, &manifest).await?
                {
                    return Ok(Self { by_peer: true, ..Self::filled(ticket, manifest, permit) });
                }
                return Ok(Self::remote(transfers, ticket, manifest, permit, remote));
            }
        };

        let contents = LocalContents::find(transfers, &ticket.team, &manifest, &root).await;
        let required = disk_reservations::required_bytes(&manifest).saturating_sub(contents.shared_bytes);
        let mut reserved = match room::reserve(transfers, required).await {
            Ok(reserved) => reserved,
            Err(error) => {
                permit.discard(transfers).await;
                return Err(error);
            }
        };
        let options = WriteOptions { devices: true, ..WriteOptions::default() };
        let (tree, to) = (manifest.clone(), root.clone());
        let begin_result = blocking(move || {
            MappedIds::of_this_process().check_owners(&tree)?;
            let mut writer = TreeWriter::new(&to, tree.clone(), options)?;
            contents.take(&mut writer)?;
            let (missing, copied) = (writer.missing(), writer.content_bytes());
            Ok::<_, WriteVolumeError>((writer, missing, copied))
        })
        .await;
        let (writer, missing, written) = match begin_result {
            Ok(begin_result) => begin_result,
            Err(error) => {
                permit.discard(transfers).await;
                return Err(error);
            }
        };

        reserved.record_written(written);
        let (growing, growth) = GrowingVolume::new(root, manifest.clone(), &missing);
        permit.publish(growing);
        let (queue, steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            // The thread holds the permit until its last write, even if its caller is dropped.
            (permit, write(writer, steps, &growth).map_err(WriteVolumeError::from))
        });
        Ok(Self {
            volume: ticket.volume,
            team: ticket.team.clone(),
            manifest,
            missing,
            whole_files: false,
            by_peer: false,
            is_readable: true,
            reserved: Some(reserved),
            queue,
            writer,
        })
    }

    /// Creates a writer for a volume on another machine. All extents must be sent.
    fn remote(
        transfers: &Transfers,
        ticket: &TicketClaims,
        manifest: Arc<Manifest>,
        permit: WriterPermit,
        remote: SharedRemoteVolume,
    ) -> Self {
        let (queue, steps) = mpsc::channel(QUEUE);
        let tree = manifest.clone();
        let writer = transfers.worker.tasks.spawn(async move {
            let packed = remote::write(&remote, move |out| pack(ArchiveWriter::new(out, tree), steps));
            // An aborted volume stays incomplete.
            (
                permit,
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
            is_readable: false,
            reserved: None,
            queue,
            writer,
        }
    }

    /// Creates a writer for a volume that is already filled.
    fn filled(ticket: &TicketClaims, manifest: Arc<Manifest>, permit: WriterPermit) -> Self {
        let (queue, mut steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            while let Some(Step::Put(_)) = steps.blocking_recv() {}
            (permit, Ok(()))
        });
        let missing = OrdinalRanges::new();
        Self {
            volume: ticket.volume,
            team: ticket.team.clone(),
            manifest,
            missing,
            whole_files: false,
            by_peer: false,
            is_readable: false,
            reserved: None,
            queue,
            writer,
        }
    }

    /// Whether other workers can read the volume already.
    pub(crate) fn is_readable(&self) -> bool {
        self.is_readable
    }

    /// Whether a partial file can only be sent again from its beginning.
    pub(crate) fn takes_whole_files(&self) -> bool {
        self.whole_files
    }

    /// Aborts the transfer, and waits until another writer may fill the volume.
    pub(crate) async fn abandon(self) {
        drop(self.queue);
        // The error of an aborted transfer is not relevant.
        self.writer.await.ok();
    }

    /// Returns the number of bytes that must be sent.
    pub(crate) fn missing_bytes(&self) -> u64 {
        self.manifest.bytes_of(&self.missing)
    }

    /// Writes some extents. Files come one after the other, and the extents of a file ascend. Waits
    /// if the disk is slower than the sender.
    pub(crate) async fn put(
        &mut self,
        transfers: &Transfers,
        extents: Vec<(u64, Bytes)>,
    ) -> Result<(), WriteVolumeError> {
        let verified: Result<Vec<_>, _> =
            extents.into_iter().map(|(ordinal, data)| self.manifest.verify(ordinal, data)).collect();
        self.put_verified(transfers, verified?).await
    }

    /// Writes some verified extents, in the order that [`Self::put`] requires.
    pub(crate) async fn put_verified(
        &mut self,
        transfers: &Transfers,
        extents: Vec<Verified<Bytes>>,
    ) -> Result<(), WriteVolumeError> {
        let bytes: usize = extents.iter().map(|extent| extent.data().len()).sum();
        if self.queue.send(Step::Put(extents)).await.is_err() {
            return Err(self.writer_failed(transfers).await);
        }
        if let Some(reserved) = &mut self.reserved {
            reserved.record_written(bytes as u64);
        }
        Ok(())
    }

    /// Completes the volume, and reports it to the artifact store.
    pub(crate) async fn commit(mut self, transfers: &Transfers) -> Result<Arc<Manifest>, WriteVolumeError> {
        if self.queue.send(Step::Commit).await.is_err() {
            return Err(self.writer_failed(transfers).await);
        }
        let (permit, written) = (&mut self.writer).await.map_err(|error| {
            RuntimeError::Other(format!("cannot fill a volume: its writer failed: {error}"))
        })?;
        if let Err(error) = written {
            permit.discard(transfers).await;
            return Err(error);
        }
        finish_volume(transfers, self.volume, &self.team, self.manifest, permit).await
    }

    async fn writer_failed(&mut self, transfers: &Transfers) -> WriteVolumeError {
        match (&mut self.writer).await {
            Ok((permit, Err(error))) => {
                permit.discard(transfers).await;
                error
            }
            Ok((_, Ok(()))) | Err(_) => {
                RuntimeError::Other("cannot fill a volume: its writer failed".to_owned()).into()
            }
        }
    }
}

/// Writes extents until the commit. If the queue ends earlier, the volume stays incomplete.
fn write(mut writer: TreeWriter, mut steps: mpsc::Receiver<Step>, growth: &Growth) -> Result<(), WriteError> {
    while let Some(step) = steps.blocking_recv() {
        match step {
            Step::Put(extents) => {
                extents.iter().try_for_each(|extent| writer.put_verified(extent))?;
                growth.add(&extents);
            }
            Step::Commit => return writer.finish().map(|_| ()),
        }
    }
    Ok(())
}

/// Packs extents for another machine until the commit.
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

/// A complete tree on this worker.
struct LocalTree {
    root: PathBuf,
    manifest: Arc<Manifest>,
    /// Directories on the file system of the new tree that hold files of this tree, each with the
    /// manifest that describes those files: the layers of an overlay, topmost first.
    layers: Vec<(PathBuf, Arc<Manifest>)>,
}

impl LocalTree {
    /// Finds the tree of a volume. Only layers in `team` and on `device` are sources of links.
    async fn find(
        transfers: &Transfers,
        team: &str,
        location: &ExtentLocation,
        device: Option<u64>,
    ) -> Result<Self, RuntimeError> {
        let runtime = transfers.worker.runtime.as_ref();
        let root = local_directory(runtime, location.volume).await?;
        let (mut layers, mut volume, mut manifest) = (Vec::new(), location.volume, location.manifest.clone());
        while let Some((layer, below)) = transfers.manifests.layer(runtime, volume, team).await? {
            layers.push((layer.upper, manifest));
            (volume, manifest) = (layer.parent, below);
        }
        if runtime.layer(volume).await?.is_none() {
            layers.push((local_directory(runtime, volume).await?, manifest));
        }
        layers.retain(|(path, _)| device.is_some() && device_of(path) == device);
        Ok(Self { root, manifest: location.manifest.clone(), layers })
    }

    /// Returns where the layers have the file at index `entry`, as indices of the layer and of the
    /// entry in its manifest. The upper layer of an overlay may lack the file.
    fn sources(&self, entry: usize) -> impl Iterator<Item = (usize, usize)> {
        let file = &self.manifest.entries()[entry];
        self.layers.iter().enumerate().filter_map(move |(layer, (_, manifest))| {
            let found = manifest.find(&file.path)?;
            manifest.entries()[found].is_same_file(file).then_some((layer, found))
        })
    }
}

/// Returns the file system of a path.
fn device_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|found| found.dev())
}

/// Contents of this worker that a new tree needs.
#[derive(Default)]
struct LocalContents {
    trees: Vec<LocalTree>,
    /// For each file that can probably be linked: its entry, the index of the tree, and the entry
    /// there.
    files: Vec<(usize, usize, usize)>,
    /// For each extent: its ordinal, the index of the tree, the entry there, and the offset in that
    /// file.
    extents: Vec<(u64, usize, usize, u64)>,
    /// Content of the files that can probably be linked, in bytes.
    shared_bytes: u64,
}

impl LocalContents {
    async fn find(transfers: &Transfers, team: &str, manifest: &Manifest, to: &Path) -> Self {
        let here = device_of(to);
        transfers.manifests.load_earlier().await;
        let (mut found, mut indexes) = (Self::default(), HashMap::new());
        for located in manifest.extents() {
            let Some(location) = transfers.manifests.find(team, &located.extent.digest) else { continue };
            let tree = match indexes.entry(location.volume) {
                Entry::Occupied(tree) => *tree.get(),
                Entry::Vacant(vacant) => {
                    let tree = LocalTree::find(transfers, team, &location, here).await;
                    let Ok(tree) = tree else { continue };
                    found.trees.push(tree);
                    *vacant.insert(found.trees.len() - 1)
                }
            };
            found.extents.push((located.ordinal, tree, location.entry, location.offset));
        }
        found.find_files(manifest);
        found
    }

    /// Finds the files that can probably be linked. A tree with the same file at the same path is
    /// preferred, because each file is linked once, even if others have the same content.
    fn find_files(&mut self, manifest: &Manifest) {
        let mut used = HashSet::new();
        let mut last = None;
        for (ordinal, tree, entry, _) in &self.extents {
            let Some(located) = manifest.locate(*ordinal) else { continue };
            if last.replace(located.entry) == Some(located.entry) {
                continue;
            }
            let file = &manifest.entries()[located.entry];
            let same_path = (0..self.trees.len())
                .filter_map(|tree| self.trees[tree].manifest.find(&file.path).map(|entry| (tree, entry)));
            let is_source = |(tree, entry): &(usize, usize)| {
                let source = &self.trees[*tree];
                file.is_same_file(&source.manifest.entries()[*entry])
                    && source.sources(*entry).next().is_some()
            };
            let Some((tree, entry)) = same_path.chain([(*tree, *entry)]).find(is_source) else { continue };
            self.files.push((located.entry, tree, entry));
            if used.insert((tree, entry)) {
                self.shared_bytes +=
                    file.extents().iter().map(|extent| u64::from(extent.length)).sum::<u64>();
            }
        }
    }

    /// Links files that did not change, and copies other extents. Copies are verified, because a
    /// file may be deleted meanwhile.
    fn take(self, writer: &mut TreeWriter) -> Result<(), WriteError> {
        let mut sealed: HashMap<(usize, usize), Option<SealedTree>> = HashMap::new();
        for (file, tree, entry) in self.files {
            let source = &self.trees[tree];
            for (layer, of) in source.sources(entry) {
                let (root, theirs) = &source.layers[layer];
                if sealed.len() >= MAX_OPEN_SOURCES {
                    sealed.clear();
                }
                let opened = sealed
                    .entry((tree, layer))
                    .or_insert_with(|| SealedTree::open(root, theirs.clone()).ok());
                if let Some(opened) = opened
                    && writer.link_file(file, opened, of)?
                {
                    break;
                }
            }
        }
        let mut open: Option<(PathBuf, File)> = None;
        for (ordinal, tree, entry, offset) in self.extents {
            if writer.is_filled(ordinal) {
                continue;
            }
            let source = &self.trees[tree];
            let path = source.root.join(source.manifest.entries()[entry].path());
            if open.as_ref().is_none_or(|(opened, _)| *opened != path) {
                open = File::open(&path).ok().map(|file| (path, file));
            }
            let Some((_, file)) = &open else { continue };
            match writer.copy_extent(ordinal, file, offset, Trust::Verify) {
                Ok(()) | Err(WriteError::DigestMismatch { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
