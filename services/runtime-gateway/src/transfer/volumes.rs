//! Bytes in and out of the worker's volumes.
//!
//! Invariant: a volume becomes known as complete only after its manifest was validated, every extent had the digest that the manifest
//! says, and the writer said `commit`. What arrives before that lies in a volume that the artifact store knows as unfinished, and collects
//! when its transfer ends.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use domain::VolumeHandle;
use domain::worker::TicketClaims;
use runtime::{Contents, RuntimeError, VolumeSource};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use tokio::sync::mpsc;
use tracing::Instrument;
use transfer::{
    ArchiveError, ArchiveWriteError, ArchiveWriter, ExtentData, Manifest, ReadOptions, Runs, TreeReader,
    TreeWriter, Trust, Verified, WriteError, WriteOptions,
};

use crate::attempt;
use crate::transfer::blocking_pipe::Outlet;
use crate::transfer::disk_reservations::{self, Declared, NoRoom};
use crate::transfer::local_dir::directory;
use crate::transfer::manifests::TreeError;
use crate::transfer::peer_copy;
use crate::transfer::remote::{self, Far};
use crate::util::blocking::blocking;
use crate::worker::Worker;
use crate::worker_set::NotAttended;
use rpc::Refusal;

/// Verified extents that wait for the thread that writes them, in batches of about 1 MiB.
const QUEUE: usize = 16;
/// Bytes of one message of a file.
const FILE_CHUNK: usize = 1 << 20;

/// A transfer failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    /// The ticket is forged, expired, or for something else.
    #[error("the ticket is not good for this")]
    Ticket,
    /// The scheduler's keys cannot be had.
    #[error("cannot verify the ticket")]
    Keys(#[source] Refusal),
    /// The ticket is for another worker.
    #[error(transparent)]
    NotAttended(#[from] NotAttended),
    /// The worker failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
    /// The bytes of the volume are not what they were.
    #[error("the volume {0} does not hold what it should any more")]
    Damaged(VolumeHandle),
    /// The tree cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The tree cannot be read.
    #[error("cannot read the volume")]
    Read(#[from] transfer::ReadError),
    /// What arrives is no archive of a tree.
    #[error(transparent)]
    Archive(ArchiveError),
    /// An archive cannot be made.
    #[error("cannot pack the volume")]
    Pack(#[source] ArchiveWriteError),
    /// The file is not there.
    #[error("there is no {0:?}")]
    PathNotFound(PathBuf),
    /// The path is something else than a regular file.
    #[error("{path:?} is {what}")]
    NotAFile {
        /// What was asked for.
        path: PathBuf,
        /// What it is.
        what: String,
    },
    /// The store refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The gateway runs the most transfers that it may.
    #[error("this gateway has as many transfers under way as it takes")]
    TooManyTransfers,
    /// Somebody fills the volume at this moment.
    #[error("volume {0} is being filled")]
    Busy(VolumeHandle),
    /// The volume has its final bytes.
    #[error("volume {0} was filled before")]
    Complete(VolumeHandle),
    /// The disk has no room for what the manifest declares.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The volume exists, and no transfer fills it: a container may use it.
    #[error("cannot fill volume {0}: it exists, and no transfer fills it")]
    InUse(VolumeHandle),
    /// The caller named another address for a source than the scheduler did.
    #[error(
        "the gateway of source {place} does not listen at {named:?}: use the address that came with its ticket"
    )]
    SourceAddress {
        /// The place of the source.
        place: usize,
        /// The address that the caller named.
        named: String,
    },
    /// The receiver is gone.
    #[error("the caller is gone")]
    CallerGone,
    /// The sender is gone, and has not committed.
    #[error("the transfer was broken off")]
    BrokenOff,
}

impl From<ArchiveError> for TransferError {
    fn from(error: ArchiveError) -> Self {
        match error {
            ArchiveError::Sink(source) => RuntimeError::io("unpacking an archive", source).into(),
            error => Self::Archive(error),
        }
    }
}

impl From<ArchiveWriteError> for TransferError {
    fn from(error: ArchiveWriteError) -> Self {
        match error {
            ArchiveWriteError::Io(_) => Self::CallerGone,
            error => Self::Pack(error),
        }
    }
}

impl From<rpc::token::VerifyError> for TransferError {
    fn from(error: rpc::token::VerifyError) -> Self {
        match error {
            rpc::token::VerifyError::Invalid(_) => Self::Ticket,
            rpc::token::VerifyError::KeysUnavailable(refusal) => Self::Keys(refusal),
        }
    }
}

impl From<TreeError> for TransferError {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::Damaged(volume) => Self::Damaged(volume),
            TreeError::Worker(error) => Self::Worker(error),
        }
    }
}

/// A volume that is being filled.
pub(crate) struct Filling {
    volume: VolumeHandle,
    team: String,
    manifest: Arc<Manifest>,
    /// What has to be sent.
    pub(crate) missing: Runs,
    /// Whether a file must be whole before another begins.
    whole_files: bool,
    /// Whether the worker that has the bytes sent them all by itself.
    pub(crate) by_peer: bool,
    /// What it will write. `None`: it writes nothing, or its worker has another disk.
    declared: Option<Declared>,
    queue: mpsc::Sender<Step>,
    writer: tokio::task::JoinHandle<(Turn, Result<(), TransferError>)>,
}

enum Step {
    Put(Vec<Verified<Bytes>>),
    Commit,
}

impl Filling {
    /// Makes the volume, copies what this worker has already, and says what is missing. An earlier try at the same volume is thrown away,
    /// unless it got as far as that its bytes were final: then nothing is missing.
    ///
    /// A caller who goes away does not break this off: what destroys, makes or copies would go on in its thread, beside the next writer.
    pub(crate) async fn begin(
        worker: &Arc<Worker>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
    ) -> Result<Self, TransferError> {
        Self::begin_with(worker, ticket, manifest, None).await
    }

    /// The same of a volume that `peer` may fill, if both workers do such things: then nothing is missing.
    pub(crate) async fn begin_with(
        worker: &Arc<Worker>,
        ticket: TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::Sender>,
    ) -> Result<Self, TransferError> {
        let worker = worker.clone();
        let tasks = worker.tasks.clone();
        let begin = async move { Self::begin_whole(&worker, &ticket, manifest, peer).await };
        let begun = tasks.spawn(begin.in_current_span());
        begun.await.unwrap_or_else(|error| {
            Err(RuntimeError::Other(format!("the start of a transfer broke off: {error}")).into())
        })
    }

    async fn begin_whole(
        worker: &Worker,
        ticket: &TicketClaims,
        manifest: Arc<Manifest>,
        peer: Option<peer_copy::Sender>,
    ) -> Result<Self, TransferError> {
        let turn = Turn::take(&worker.filling, ticket.volume).ok_or(TransferError::Busy(ticket.volume))?;
        if let Some(kept) = worker.trees.kept_of(worker.runtime.as_ref(), ticket.volume).await? {
            if kept.tree_digest() != manifest.tree_digest() {
                return Err(TransferError::Complete(ticket.volume));
            }
            // Whether the store knows was not heard, by the caller or by us. It is told again.
            self::manifest(worker, ticket).await?;
            return Ok(Self::whole(ticket, manifest, turn));
        }
        make_empty(worker, ticket.volume).await?;
        let root = match worker.runtime.contents(ticket.volume).await? {
            Contents::Directory(root) => root,
            Contents::Remote(remote) => {
                let volume = ticket.volume;
                if let Some(peer) = peer
                    && peer.fill(worker, volume, &remote, &manifest).await?
                {
                    return Ok(Self { by_peer: true, ..Self::whole(ticket, manifest, turn) });
                }
                return Ok(Self::far(worker, ticket, manifest, turn, remote));
            }
        };

        let declared = match worker.runtime.disk().await {
            Ok(disk) => {
                worker.room.declare(disk, disk_reservations::needs(&manifest)).map_err(TransferError::from)
            }
            Err(error) => Err(error.into()),
        };
        let mut declared = match declared {
            Ok(declared) => declared,
            Err(error) => {
                turn.discard(worker).await;
                return Err(error);
            }
        };
        let sources = Sources::find(worker, &ticket.team, &manifest).await?;
        let options = WriteOptions { devices: true, ..WriteOptions::default() };
        let tree = manifest.clone();
        let begun = blocking(move || {
            let mut writer = TreeWriter::new(&root, tree.clone(), options)?;
            let missing = sources.copy(&mut writer, &tree)?;
            Ok::<_, TransferError>((writer, missing))
        })
        .await;
        let (writer, missing) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                turn.discard(worker).await;
                return Err(error);
            }
        };

        declared.wrote(manifest.extent_bytes().saturating_sub(manifest.bytes_of(&missing)));
        let (queue, steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            // The turn is kept until the last byte that this writer may write, and by who waits for it longer than that.
            (turn, write(writer, steps).map_err(TransferError::from))
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
    fn far(worker: &Worker, ticket: &TicketClaims, manifest: Arc<Manifest>, turn: Turn, remote: Far) -> Self {
        let (queue, steps) = mpsc::channel(QUEUE);
        let tree = manifest.clone();
        let writer = worker.tasks.spawn(async move {
            let packed = remote::write(&remote, move |out| pack(ArchiveWriter::new(out, tree), steps));
            // One that was broken off is left unfinished.
            (
                turn,
                packed.await.or_else(|error| {
                    if matches!(error, TransferError::BrokenOff) { Ok(()) } else { Err(error) }
                }),
            )
        });
        let missing = Runs::all(manifest.extent_count());
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
    fn whole(ticket: &TicketClaims, manifest: Arc<Manifest>, turn: Turn) -> Self {
        let (queue, mut steps) = mpsc::channel(QUEUE);
        let writer = tokio::task::spawn_blocking(move || {
            while let Some(Step::Put(_)) = steps.blocking_recv() {}
            (turn, Ok(()))
        });
        let missing = Runs::new();
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
        worker: &Worker,
        extents: Vec<(u64, Bytes)>,
    ) -> Result<(), TransferError> {
        let bytes: usize = extents.iter().map(|(_, data)| data.len()).sum();
        metrics::counter!("gantry_gateway_transferred_bytes_total", "direction" => "in")
            .increment(bytes as u64);
        let verified: Result<Vec<_>, _> =
            extents.into_iter().map(|(ordinal, data)| self.manifest.verify(ordinal, data)).collect();
        self.put_verified(worker, verified?).await
    }

    /// Takes some extents, as [`Self::put`] does.
    pub(crate) async fn put_verified(
        &mut self,
        worker: &Worker,
        extents: Vec<Verified<Bytes>>,
    ) -> Result<(), TransferError> {
        let bytes: usize = extents.iter().map(|extent| extent.data().len()).sum();
        if self.queue.send(Step::Put(extents)).await.is_err() {
            return Err(self.writer_failed(worker).await);
        }
        if let Some(declared) = &mut self.declared {
            declared.wrote(bytes as u64);
        }
        Ok(())
    }

    /// Ends the volume: everything is there, verified, and known to the artifact store.
    pub(crate) async fn commit(mut self, worker: &Worker) -> Result<Arc<Manifest>, TransferError> {
        if self.queue.send(Step::Commit).await.is_err() {
            return Err(self.writer_failed(worker).await);
        }
        let (turn, written) = (&mut self.writer)
            .await
            .map_err(|error| RuntimeError::Other(format!("a thread died: {error}")))?;
        if let Err(error) = written {
            turn.discard(worker).await;
            return Err(error);
        }
        settle(worker, self.volume, &self.team, self.manifest, turn).await
    }

    async fn writer_failed(&mut self, worker: &Worker) -> TransferError {
        match (&mut self.writer).await {
            Ok((turn, Err(error))) => {
                turn.discard(worker).await;
                error
            }
            Ok((_, Ok(()))) | Err(_) => RuntimeError::Other("the writing thread died".to_owned()).into(),
        }
    }
}

/// Makes the volume of a transfer, empty. What an earlier try left in it is thrown away.
///
/// Refused where the volume exists and no transfer fills it.
pub(crate) async fn make_empty(worker: &Worker, volume: VolumeHandle) -> Result<(), TransferError> {
    if worker.trees.is_filling(volume) {
        worker.runtime.destroy_volume(volume).await?;
    } else {
        match worker.runtime.contents(volume).await {
            Err(RuntimeError::VolumeNotFound(_)) => {}
            Ok(_) => return Err(TransferError::InUse(volume)),
            Err(error) => return Err(error.into()),
        }
        worker.trees.begin_filling(volume).await?;
    }
    Ok(worker.runtime.create_volume(volume, VolumeSource::Empty).await?)
}

/// Ends a volume that has its final bytes: its manifest is kept, and the artifact store told.
pub(crate) async fn settle(
    worker: &Worker,
    volume: VolumeHandle,
    team: &str,
    manifest: Arc<Manifest>,
    turn: Turn,
) -> Result<Arc<Manifest>, TransferError> {
    // Kept before the store is told: what it knows as complete must never be taken for a half-written volume here.
    if let Err(error) = worker.trees.keep(worker.runtime.as_ref(), volume, team, manifest.clone()).await {
        turn.discard(worker).await;
        return Err(error.into());
    }
    worker.trees.end_filling(volume).await;
    if let Err(refusal) = attempt::complete(worker, volume, &manifest).await {
        // To the gateway that speaks for this worker now, it may be complete.
        if !attempt::is_superseded(&refusal) {
            worker.trees.forget(volume).await;
            // What is kept beside a volume goes with it only.
            if let Ok(Contents::Remote(_)) = worker.runtime.contents(volume).await {
                turn.discard(worker).await;
            }
        }
        return Err(refusal.into());
    }
    Ok(manifest)
}

/// The right to fill a volume: one writer at a time.
pub(crate) struct Turn {
    filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    volume: VolumeHandle,
}

impl Turn {
    pub(crate) fn take(filling: &Arc<Mutex<HashSet<VolumeHandle>>>, volume: VolumeHandle) -> Option<Self> {
        let mine = filling.lock().unwrap_or_else(PoisonError::into_inner).insert(volume);
        mine.then(|| Self { filling: filling.clone(), volume })
    }

    /// Frees what could not be written as a whole. The artifact store knows the volume as unfinished and has it destroyed in the end; on a
    /// full disk, though, it may have no room to write that down, and needs this room first.
    pub(crate) async fn discard(self, worker: &Worker) {
        match worker.runtime.destroy_volume(self.volume).await {
            Ok(()) => worker.trees.end_filling(self.volume).await,
            Err(error) => {
                tracing::warn!(volume.handle = %self.volume, %error, "cannot destroy a volume that could not be filled");
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.volume);
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
fn pack(mut writer: ArchiveWriter<Outlet>, mut steps: mpsc::Receiver<Step>) -> Result<(), TransferError> {
    while let Some(step) = steps.blocking_recv() {
        match step {
            Step::Put(extents) => extents.iter().try_for_each(|extent| writer.put_verified(extent))?,
            Step::Commit => {
                writer.finish()?.end().map_err(ArchiveWriteError::from)?;
                return Ok(());
            }
        }
    }
    Err(TransferError::BrokenOff)
}

/// Files of this worker that have some of the content that is wanted.
struct Sources {
    /// For each ordinal that can be copied: the file's index, and where in it.
    extents: Vec<(u64, usize, u64)>,
    files: Vec<PathBuf>,
}

impl Sources {
    async fn find(worker: &Worker, team: &str, manifest: &Manifest) -> Result<Self, RuntimeError> {
        worker.trees.recall().await;
        let mut sources = Self { extents: Vec::new(), files: Vec::new() };
        let mut roots = std::collections::HashMap::new();
        let mut known = std::collections::HashMap::new();
        for located in manifest.extents() {
            let Some(found) = worker.trees.find(team, &located.extent.digest) else { continue };
            let root = match roots.entry(found.volume) {
                std::collections::hash_map::Entry::Occupied(root) => root.into_mut(),
                std::collections::hash_map::Entry::Vacant(vacant) => {
                    let Ok(root) = directory(worker.runtime.as_ref(), found.volume).await else { continue };
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
    fn copy(self, writer: &mut TreeWriter, manifest: &Manifest) -> Result<Runs, WriteError> {
        let mut copied = Runs::new();
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

/// The manifest of a complete volume, which surely holds what it says.
pub(crate) async fn manifest(worker: &Worker, ticket: &TicketClaims) -> Result<Arc<Manifest>, TransferError> {
    let proven = worker.trees.proven(worker.runtime.as_ref(), ticket.volume, &ticket.team).await;
    if let Err(TreeError::Damaged(_)) = proven {
        worker.report_due.notify_one();
    }
    Ok(proven?)
}

/// Reads extents of a volume into `batches`, which holds the reader back when it is full.
pub(crate) async fn read(
    worker: &Worker,
    volume: VolumeHandle,
    manifest: Arc<Manifest>,
    wanted: Runs,
    batches: mpsc::Sender<Vec<ExtentData>>,
) -> Result<(), TransferError> {
    let root = match worker.runtime.contents(volume).await? {
        Contents::Directory(root) => root,
        Contents::Remote(remote) => return remote::read(&remote, manifest, wanted, batches).await,
    };
    blocking(move || {
        let mut reader = TreeReader::new(&root, manifest, ReadOptions::default())?;
        for batch in reader.batches(&wanted) {
            let batch = batch?;
            let bytes: usize = batch.iter().map(|extent| extent.data.len()).sum();
            batches.blocking_send(batch).map_err(|_| TransferError::CallerGone)?;
            metrics::counter!("gantry_gateway_transferred_bytes_total", "direction" => "out")
                .increment(bytes as u64);
        }
        Ok(())
    })
    .await
}

/// Reads one regular file of a volume: its size first, then its bytes.
pub(crate) async fn read_file(
    worker: &Worker,
    volume: VolumeHandle,
    manifest: Arc<Manifest>,
    path: PathBuf,
    chunks: mpsc::Sender<(u64, Bytes)>,
) -> Result<(), TransferError> {
    let root = match worker.runtime.contents(volume).await? {
        Contents::Directory(root) => root,
        Contents::Remote(remote) => return remote::read_file(&remote, &manifest, path, chunks).await,
    };
    blocking(move || {
        let failed = |source| RuntimeError::io(format!("reading {}", path.display()), source);
        let root = File::open(&root).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = match openat2(&root, &path, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {
                return Err(TransferError::PathNotFound(path));
            }
            Err(rustix::io::Errno::LOOP) => {
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let link = openat2(&root, &path, flags, Mode::empty(), resolve);
                let what = match link.and_then(|link| rustix::fs::readlinkat(link, "", Vec::new())) {
                    Ok(to) => format!("a symbolic link to {to:?}, and links are not followed"),
                    Err(_) => "behind a symbolic link, and links are not followed".to_owned(),
                };
                return Err(TransferError::NotAFile { path, what });
            }
            Err(rustix::io::Errno::XDEV) => {
                return Err(TransferError::NotAFile { path, what: "outside of the volume".to_owned() });
            }
            Err(rustix::io::Errno::NXIO) => {
                return Err(TransferError::NotAFile { path, what: "no regular file".to_owned() });
            }
            Err(error) => return Err(failed(error.into()).into()),
        };
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() { "a directory" } else { "no regular file" };
            return Err(TransferError::NotAFile { path, what: what.to_owned() });
        }
        let size = metadata.len();
        let mut offset = 0;
        loop {
            let length = usize::try_from(size - offset).unwrap_or(usize::MAX).min(FILE_CHUNK);
            let mut data = vec![0; length];
            file.read_exact_at(&mut data, offset).map_err(failed)?;
            chunks.blocking_send((size, data.into())).map_err(|_| TransferError::CallerGone)?;
            offset += u64::try_from(length).unwrap_or(u64::MAX);
            if offset == size {
                return Ok(());
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests;
