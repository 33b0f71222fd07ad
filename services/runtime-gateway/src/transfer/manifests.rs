//! Manifests of complete volumes, and where on this worker an extent of content can be found.
//!
//! A manifest is proof: a volume whose manifest was kept in this boot holds what it says. After a crash of the machine that is no longer
//! sure, for contents are not synced before they are called complete; so what a manifest of an earlier boot says is read again and
//! compared before anything is made from it or sent ([`Manifests::proven`]). A volume that holds something else is remembered as damaged:
//! nothing is made from it or read any more, and it is left out of what the worker reports, so that the artifact store counts it as lost.
//!
//! The manifest of a volume that is far is kept by its worker, beside it and for as long: any gateway finds it there, and what it says is
//! compared whenever content is read ([`crate::transfer::remote`]).
//!
//! Both are caches: a manifest that is not here is made again by scanning the volume; an extent that is not found is sent again. The memory
//! they take is bounded by [`MEMORY`]. Extents are found only for the team whose volume has them, so that nobody learns from what need
//! not be sent what others have.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use domain::{Digest, VolumeHandle, error_chain};
use runtime::{Contents, Runtime, RuntimeError};
use transfer::Manifest;

use super::error::ManifestError;
use super::local_dir::directory;
use super::manifest_file::{UNFINISHED, decode, encode, load, recalled, save};
use super::remote;
use super::scan::{left_out, scan};
use super::verify::{self, Comparison};
use crate::util::blocking::blocking;
use crate::util::keyed_locks::lock;
/// What the name of the mark of a damaged volume ends with.
const DAMAGED: &str = "damaged";
/// What the name of the mark of a volume ends with that a transfer fills.
const FILLING: &str = "filling";

/// Most bytes of manifests, encoded, that are held in memory.
const MEMORY: u64 = 64 << 20;

/// Manifests of complete volumes on this worker.
pub(crate) struct Manifests {
    directory: PathBuf,
    /// The life of the machine.
    boot: String,
    state: Mutex<State>,
    /// Whether what earlier gateways kept was looked through.
    recalled: tokio::sync::OnceCell<()>,
}

#[derive(Default)]
struct State {
    trees: HashMap<VolumeHandle, Tree>,
    /// In the order in which they came.
    order: VecDeque<VolumeHandle>,
    bytes: u64,
    extents: HashMap<Digest, (VolumeHandle, u64)>,
    damaged: BTreeSet<VolumeHandle>,
    /// Volumes that transfers began to fill and that have no final bytes yet.
    filling: BTreeSet<VolumeHandle>,
}

struct Tree {
    team: String,
    manifest: Arc<Manifest>,
    /// Whether its extents can be copied from here.
    near: bool,
}

/// A manifest that was kept.
pub(crate) struct StoredManifest {
    team: String,
    manifest: Arc<Manifest>,
    /// Whether it was in this boot, so that the volume holds what it says.
    this_boot: bool,
}

impl StoredManifest {
    /// Whose it is.
    pub(crate) fn team(&self) -> &str {
        &self.team
    }

    /// Bytes of its files.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.manifest.size_bytes()
    }

    /// What the volume held when it was complete.
    pub(crate) fn tree_digest(&self) -> Digest {
        self.manifest.tree_digest()
    }
}

/// A volume that was scanned.
pub(crate) struct ScanResult {
    pub(crate) manifest: Arc<Manifest>,
    /// What of it was left out, with the first paths. `None`: nothing.
    pub(crate) left_out: Option<String>,
}

/// Where some content is.
pub(crate) struct ExtentLocation {
    pub(crate) volume: VolumeHandle,
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
}

impl Manifests {
    /// The cache in `directory`, which is made. `boot` is the life of the machine.
    pub(crate) fn open(directory: &Path, boot: String) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut state = State::default();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let handle = || path.file_stem().and_then(|stem| stem.to_str()?.parse::<VolumeHandle>().ok());
            match path.extension().and_then(|extension| extension.to_str()) {
                // A gateway was killed while it wrote it.
                Some(UNFINISHED) => std::fs::remove_file(&path)?,
                Some(DAMAGED) => state.damaged.extend(handle()),
                // A gateway was killed after the volume had its final bytes.
                Some(FILLING) if path.with_extension("").exists() => std::fs::remove_file(&path)?,
                Some(FILLING) => state.filling.extend(handle()),
                _ => {}
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            boot,
            state: Mutex::new(state),
            recalled: tokio::sync::OnceCell::new(),
        })
    }

    /// The manifest of a volume that surely holds what it says, for which the volume is read if nothing of this boot says so.
    pub(crate) async fn proven(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Arc<Manifest>, ManifestError> {
        if self.state().damaged.contains(&volume) {
            return Err(ManifestError::Damaged(volume));
        }
        let Some(StoredManifest { team, manifest, this_boot }) = self.kept_of(runtime, volume).await? else {
            return Ok(self.scan(runtime, volume, team).await?);
        };
        if this_boot {
            return Ok(manifest);
        }
        let root = directory(runtime, volume).await?;
        let expected = manifest.clone();
        match blocking(move || verify::compare(&root, &expected)).await? {
            Comparison::Same => {
                self.insert(runtime, volume, &team, manifest.clone()).await;
                Ok(manifest)
            }
            Comparison::Differs(path) => {
                tracing::error!(
                    volume.handle = %volume,
                    path = %path.display(),
                    "a volume did not survive a crash of the machine; nothing is made from it"
                );
                self.mark_damaged(volume).await;
                Err(ManifestError::Damaged(volume))
            }
        }
    }

    /// Makes sure that a volume holds the tree with this digest.
    pub(crate) async fn verify(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
        digest: Digest,
    ) -> Result<Arc<Manifest>, ManifestError> {
        let manifest = self.proven(runtime, volume, team).await?;
        if manifest.tree_digest() == digest {
            return Ok(manifest);
        }
        tracing::error!(volume.handle = %volume, "a volume holds another tree than the artifact store says; nothing is made from it");
        self.mark_damaged(volume).await;
        Err(ManifestError::Damaged(volume))
    }

    /// The volumes that do not hold what they should.
    pub(crate) fn damaged(&self) -> BTreeSet<VolumeHandle> {
        self.state().damaged.clone()
    }

    /// Marks a volume that does not exist yet as one that a transfer fills. The mark is durable when this returns, as far as the manifests
    /// are.
    ///
    /// Only a volume with this mark is ever emptied for a transfer. So no ticket, however it was got, empties a volume that a container uses or
    /// an artifact has.
    pub(crate) async fn begin_filling(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        let path = self.path(volume).with_extension(FILLING);
        let written = tokio::fs::write(&path, b"").await;
        written.map_err(|error| RuntimeError::io("mark a volume that is being filled", error))?;
        self.state().filling.insert(volume);
        Ok(())
    }

    /// Whether a transfer fills the volume.
    pub(crate) fn is_filling(&self, volume: VolumeHandle) -> bool {
        self.state().filling.contains(&volume)
    }

    /// Removes the mark: the volume has its final bytes, or does not exist any more.
    pub(crate) async fn end_filling(&self, volume: VolumeHandle) {
        if !self.state().filling.remove(&volume) {
            return;
        }
        let path = self.path(volume).with_extension(FILLING);
        if let Err(error) = tokio::fs::remove_file(&path).await
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(volume.handle = %volume, %error, "cannot remove the mark of a volume that was filled");
        }
    }

    async fn mark_damaged(&self, volume: VolumeHandle) {
        {
            let mut state = self.state();
            state.remove(volume);
            state.damaged.insert(volume);
        }
        let path = self.path(volume).with_extension(DAMAGED);
        if let Err(error) = tokio::fs::write(&path, b"").await {
            // It is found out again.
            tracing::warn!(volume.handle = %volume, %error, "cannot remember that a volume is damaged");
        }
    }

    /// Scans a volume that has its final bytes, and keeps what was found.
    pub(crate) async fn scan(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Arc<Manifest>, RuntimeError> {
        self.scan_all(runtime, volume, team).await.map(|scanned| scanned.manifest)
    }

    /// Scans a volume as [`Self::scan`] does, and says what a manifest cannot hold of it.
    pub(crate) async fn scan_all(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<ScanResult, RuntimeError> {
        let (manifest, left_out) = match runtime.contents(volume).await? {
            Contents::Directory(root) => {
                let transfer::Scan { manifest, problems, .. } = blocking(move || scan(&root)).await?;
                (manifest, left_out(&problems))
            }
            Contents::Remote(remote) => (remote::scan(&remote).await?, None),
        };
        if let Some(left_out) = &left_out {
            tracing::info!(volume.handle = %volume, left_out, "a manifest does not hold all of a volume");
        }
        let manifest = Arc::new(manifest);
        self.insert(runtime, volume, team, manifest.clone()).await;
        Ok(ScanResult { manifest, left_out })
    }

    /// Keeps the manifest of a volume that has its final bytes, and that can be scanned for it otherwise.
    async fn insert(&self, runtime: &dyn Runtime, volume: VolumeHandle, team: &str, manifest: Arc<Manifest>) {
        if let Err(error) = self.keep(runtime, volume, team, manifest.clone()).await {
            tracing::warn!(volume.handle = %volume, error = error_chain(&error), "a manifest has to be made again");
            self.state().insert(volume, Tree { team: team.to_owned(), manifest, near: false });
        }
    }

    /// Keeps the manifest of a volume that has its final bytes, so that the next gateway finds it as well: beside the volume, where that is
    /// far.
    pub(crate) async fn keep(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
        manifest: Arc<Manifest>,
    ) -> Result<(), RuntimeError> {
        let (whose, kept) = (team.to_owned(), manifest.clone());
        let failed = |error| RuntimeError::io("store a manifest", error);
        let near = match runtime.contents(volume).await? {
            Contents::Directory(_) => {
                let (path, boot) = (self.path(volume), self.boot.clone());
                blocking(move || save(&path, &boot, &whose, &kept).map_err(failed)).await?;
                true
            }
            Contents::Remote(remote) => {
                // What happens to the machine of the worker, its marker says; there is no boot to compare.
                let file = blocking(move || encode("", &whose, &kept).map_err(failed)).await?;
                remote.store_manifest(file).await?;
                false
            }
        };
        self.state().insert(volume, Tree { team: team.to_owned(), manifest, near });
        Ok(())
    }

    /// The manifest that was kept of a volume, here or on its worker. `None`: it is not complete, or it has to be scanned.
    pub(crate) async fn kept_of(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
    ) -> Result<Option<StoredManifest>, RuntimeError> {
        if let Some(kept) = self.kept(volume).await? {
            return Ok(Some(kept));
        }
        let remote = match runtime.contents(volume).await {
            Ok(Contents::Remote(remote)) => remote,
            Ok(Contents::Directory(_)) | Err(RuntimeError::VolumeNotFound(_)) => return Ok(None),
            // Whether there is one is not known, and what is taken for unfinished is thrown away.
            Err(error) => return Err(error),
        };
        let Some(file) = remote.read_manifest().await? else { return Ok(None) };
        let decoded = blocking(move || match decode(&file) {
            Ok(decoded) => Ok(Some(decoded)),
            // What is taken for unfinished is thrown away.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                Err(RuntimeError::io("read a manifest", error))
            }
            // One that makes no sense is as good as none.
            Err(_) => Ok(None),
        });
        let decoded = decoded.await?;
        let Some((_, team, manifest)) = decoded else { return Ok(None) };
        let manifest = Arc::new(manifest);
        let tree = Tree { team: team.clone(), manifest: manifest.clone(), near: false };
        self.state().insert(volume, tree);
        Ok(Some(StoredManifest { team, manifest, this_boot: true }))
    }

    /// The manifest that was kept here of a volume.
    pub(crate) async fn kept(&self, volume: VolumeHandle) -> Result<Option<StoredManifest>, RuntimeError> {
        if let Some(tree) = self.state().trees.get(&volume) {
            let (team, manifest) = (tree.team.clone(), tree.manifest.clone());
            return Ok(Some(StoredManifest { team, manifest, this_boot: true }));
        }
        let path = self.path(volume);
        let loaded = blocking(move || match load(&path) {
            Ok(loaded) => Ok(Some(loaded)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                Ok(None)
            }
            // Whether there is one is not known, and what is taken for unfinished is thrown away.
            Err(error) => Err(RuntimeError::io("read a manifest", error)),
        });
        let Some((boot, team, manifest)) = loaded.await? else { return Ok(None) };
        let (manifest, this_boot) = (Arc::new(manifest), boot == self.boot);
        if this_boot {
            let tree = Tree { team: team.clone(), manifest: manifest.clone(), near: true };
            self.state().insert(volume, tree);
        }
        Ok(Some(StoredManifest { team, manifest, this_boot }))
    }

    /// Takes in, once, what earlier gateways kept in this boot, so that [`Self::find`] finds it: the youngest, as far as there is memory.
    pub(crate) async fn recall(&self) {
        let recall = || async {
            let (directory, boot) = (self.directory.clone(), self.boot.clone());
            let recalled = blocking(move || {
                recalled(&directory, &boot, MEMORY).map_err(|error| RuntimeError::io("read manifests", error))
            });
            match recalled.await {
                Ok(recalled) => recalled.into_iter().for_each(|(volume, team, manifest)| {
                    self.state().insert(volume, Tree { team, manifest: Arc::new(manifest), near: true });
                    // It may have been forgotten since it was read.
                    if !self.path(volume).exists() {
                        self.state().remove(volume);
                    }
                }),
                // What is not found is sent again.
                Err(error) => {
                    tracing::warn!(error = error_chain(&error), "cannot look for what is here already")
                }
            }
        };
        self.recalled.get_or_init(recall).await;
    }

    /// Where a volume of `team` has the content with this digest.
    pub(crate) fn find(&self, team: &str, digest: &Digest) -> Option<ExtentLocation> {
        let state = self.state();
        let (volume, ordinal) = state.extents.get(digest)?;
        let tree = state.trees.get(volume).filter(|tree| tree.team == team)?;
        let located = tree.manifest.locate(*ordinal)?;
        let path = tree.manifest.entries()[located.entry].path().to_owned();
        Some(ExtentLocation { volume: *volume, path, offset: located.extent.offset })
    }

    /// Forgets a volume that is destroyed: before it is, so that nothing more is made from it, and again after, for what had begun to read
    /// it may have kept it since.
    pub(crate) async fn forget(&self, volume: VolumeHandle) {
        {
            let mut state = self.state();
            state.remove(volume);
            state.damaged.remove(&volume);
        }
        self.end_filling(volume).await;
        let path = self.path(volume);
        for path in [path.with_extension(DAMAGED), path] {
            match tokio::fs::remove_file(path).await {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => tracing::warn!(volume.handle = %volume, %error, "cannot remove a manifest"),
            }
        }
    }

    fn path(&self, volume: VolumeHandle) -> PathBuf {
        self.directory.join(volume.to_string())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn insert(&mut self, volume: VolumeHandle, tree: Tree) {
        self.remove(volume);
        if tree.manifest.encoded_bytes() > MEMORY {
            return;
        }
        // From here on, `MEMORY` bounds it.
        tree.manifest.release_budget();
        self.bytes += tree.manifest.encoded_bytes();
        for located in tree.manifest.extents().filter(|_| tree.near) {
            self.extents.insert(located.extent.digest, (volume, located.ordinal));
        }
        self.order.push_back(volume);
        self.trees.insert(volume, tree);
        while self.bytes > MEMORY
            && let Some(oldest) = self.order.front().copied()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, volume: VolumeHandle) {
        let Some(tree) = self.trees.remove(&volume) else { return };
        self.bytes -= tree.manifest.encoded_bytes();
        self.order.retain(|kept| *kept != volume);
        for located in tree.manifest.extents() {
            if self.extents.get(&located.extent.digest).is_some_and(|(kept, _)| *kept == volume) {
                self.extents.remove(&located.extent.digest);
            }
        }
    }
}

#[cfg(test)]
mod tests;
