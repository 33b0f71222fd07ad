//! The manifests of complete volumes, and the index of extents on this worker.
//!
//! [`super`] asks for the manifest before it reads a volume, and stores it when a volume is
//! complete. [`super::write`] looks up extents that need not be sent.
//!
//! Invariant: Gantry never changes a volume whose manifest was stored in this boot. After a machine
//! crash its contents are uncertain, because they are not synced before a volume is complete. So
//! [`Manifests::load_verified`] compares a volume from an earlier boot before it is used. People
//! and disks change volumes, too. So the metadata of each file is inspected before a use, and
//! [`super::scrub`] hashes the contents from time to time. A volume that differs is remembered as
//! damaged. It is no longer read, and the report omits it, so that the artifact store counts it as
//! lost.
//!
//! The manifest of a volume on another machine is stored by its worker beside the volume. Its
//! contents are compared whenever they are read ([`crate::transfer::remote`]).
//!
//! Manifests and extents are only caches, bounded by [`MAX_MANIFEST_BYTES`]. A missing manifest is
//! made again by a scan, and a missing extent is sent again. Extents are found only for the team of
//! their volume. Otherwise a team could detect the contents of another team by what it need not
//! send.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use domain::{Digest, VolumeHandle, error_chain};
use runtime::{Contents, Layer, Runtime, RuntimeError};
use transfer::Manifest;

use super::error::{ManifestError, ReplicaLoss};
use super::local_dir::local_directory;
use super::manifest_file::{PARTIAL_SUFFIX, decode, encode, load, load_recent, save};
use super::remote;
use super::scan::{omitted, scan_layer};
use super::scrub;
use super::verify::{self, Comparison};
use crate::util::blocking::blocking;
use crate::util::keyed_locks::lock;
/// Suffix of the file that marks a damaged volume.
const DAMAGED_SUFFIX: &str = "damaged";
/// Suffix of the file that marks a volume that a transfer fills.
const FILLING_SUFFIX: &str = "filling";

/// Most entries of a tree that is inspected before each use.
const MAX_ALWAYS_INSPECTED: usize = 1_000;

/// Time for which a larger tree is not inspected again.
const INSPECTION_TERM: Duration = Duration::from_secs(5 * 60);

/// Most bytes of encoded manifests in memory.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// The manifests of complete volumes on one worker.
pub(crate) struct Manifests {
    directory: PathBuf,
    /// The boot id of the machine.
    boot: String,
    state: Mutex<State>,
    /// Whether the manifests of earlier gateways were loaded.
    loaded_earlier: tokio::sync::OnceCell<()>,
}

#[derive(Default)]
struct State {
    trees: HashMap<VolumeHandle, Tree>,
    /// Volumes in the order of insertion.
    order: VecDeque<VolumeHandle>,
    bytes: u64,
    extents: HashMap<Digest, (VolumeHandle, u64)>,
    /// Damaged volumes, with the cause.
    damaged: BTreeMap<VolumeHandle, String>,
    /// When large volumes were inspected.
    inspected: HashMap<VolumeHandle, Instant>,
    /// Volumes that transfers fill and that are not complete.
    filling: BTreeSet<VolumeHandle>,
}

struct Tree {
    team: String,
    manifest: Arc<Manifest>,
    /// Whether the volume is local, so that its extents can be copied.
    is_local: bool,
}

/// A stored manifest.
pub(crate) struct StoredManifest {
    team: String,
    manifest: Arc<Manifest>,
    /// Whether the manifest was stored in this boot, so that no crash has changed the volume since.
    this_boot: bool,
    is_local: bool,
}

impl StoredManifest {
    /// Returns the manifest itself.
    pub(super) fn manifest(&self) -> Arc<Manifest> {
        self.manifest.clone()
    }

    /// Returns the team of the volume.
    pub(crate) fn team(&self) -> &str {
        &self.team
    }

    /// Returns the total size of the files, in bytes.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.manifest.size_bytes()
    }

    /// Returns the digest of the tree.
    pub(crate) fn tree_digest(&self) -> Digest {
        self.manifest.tree_digest()
    }
}

/// The result of a scan.
pub(crate) struct ScanResult {
    pub(crate) manifest: Arc<Manifest>,
    /// Omitted entries, with the first paths. `None`: nothing was omitted.
    pub(crate) omitted: Option<String>,
}

/// The location of an extent.
pub(crate) struct ExtentLocation {
    pub(crate) volume: VolumeHandle,
    /// Tree of the volume.
    pub(crate) manifest: Arc<Manifest>,
    /// Index of the entry with the extent.
    pub(crate) entry: usize,
    pub(crate) offset: u64,
}

impl Manifests {
    /// Opens the manifests in `directory`, which is created. `boot` is the boot id of the machine.
    pub(crate) fn open(directory: &Path, boot: String) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let mut state = State::default();
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            let handle = || path.file_stem().and_then(|stem| stem.to_str()?.parse::<VolumeHandle>().ok());
            match path.extension().and_then(|extension| extension.to_str()) {
                // A gateway was killed while it wrote this file.
                Some(PARTIAL_SUFFIX) => std::fs::remove_file(&path)?,
                Some(DAMAGED_SUFFIX) => {
                    let cause = std::fs::read(&path).unwrap_or_default();
                    let cause = String::from_utf8_lossy(&cause).into_owned();
                    state.damaged.extend(handle().map(|handle| (handle, cause)));
                }
                // A gateway was killed after the volume was complete.
                Some(FILLING_SUFFIX) if path.with_extension("").exists() => std::fs::remove_file(&path)?,
                Some(FILLING_SUFFIX) => state.filling.extend(handle()),
                _ => {}
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            boot,
            state: Mutex::new(state),
            loaded_earlier: tokio::sync::OnceCell::new(),
        })
    }

    /// Returns the manifest of a volume that holds its tree. The volume is read if no manifest of
    /// this boot exists. Otherwise only the metadata of its entries is compared, unless that was
    /// done a short time ago.
    pub(crate) async fn load_verified(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Arc<Manifest>, ManifestError> {
        if let Some(cause) = self.state().damaged.get(&volume) {
            return Err(ManifestError::Damaged(ReplicaLoss { volume, cause: cause.clone() }));
        }
        let Some(stored) = self.stored(runtime, volume).await? else {
            return Ok(self.scan(runtime, volume, team).await?);
        };
        let StoredManifest { team, manifest, this_boot, is_local } = stored;
        // The contents of a volume on another machine are compared when they are read.
        if !is_local {
            return Ok(manifest);
        }
        let root = local_directory(runtime, volume).await?;
        if !this_boot {
            let expected = manifest.clone();
            return match blocking(move || verify::compare(&root, &expected)).await? {
                Comparison::Same => {
                    self.insert(runtime, volume, &team, manifest.clone()).await;
                    Ok(manifest)
                }
                Comparison::Differs(path) => {
                    let how = format!("{path:?} differs from its manifest");
                    Err(self.mark_damaged(volume, &how).await)
                }
            };
        }
        if self.state().is_inspected(volume, &manifest) {
            return Ok(manifest);
        }
        let expected = manifest.clone();
        let inspect = move || {
            transfer::inspect(&root, &expected).map_err(|error| RuntimeError::io("inspect a volume", error))
        };
        if let Some(difference) = blocking(inspect).await? {
            // It may have been destroyed meanwhile.
            local_directory(runtime, volume).await?;
            return Err(self.mark_damaged(volume, &difference.to_string()).await);
        }
        self.state().set_inspected(volume, &manifest);
        Ok(manifest)
    }

    /// Verifies that a volume holds the tree with this digest.
    pub(crate) async fn verify(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
        digest: Digest,
    ) -> Result<Arc<Manifest>, ManifestError> {
        let manifest = self.load_verified(runtime, volume, team).await?;
        if manifest.tree_digest() == digest {
            return Ok(manifest);
        }
        Err(self.mark_damaged(volume, "it has another tree than its artifact").await)
    }

    /// Returns the damaged volumes.
    pub(crate) fn damaged(&self) -> BTreeSet<VolumeHandle> {
        self.state().damaged.keys().copied().collect()
    }

    /// Returns the volumes whose manifest is stored.
    pub(crate) async fn complete(&self) -> Result<Vec<VolumeHandle>, RuntimeError> {
        self.list(SystemTime::now()).await
    }

    /// Returns the volumes whose manifest was stored before `before`, ascending.
    async fn list(&self, before: SystemTime) -> Result<Vec<VolumeHandle>, RuntimeError> {
        let directory = self.directory.clone();
        let listed = blocking(move || {
            scrub::volumes_stored_before(&directory, before)
                .map_err(|error| RuntimeError::io("list manifests", error))
        });
        listed.await
    }

    /// Returns the first volume after `last` whose manifest is older than `age`.
    pub(super) async fn next_to_scrub(
        &self,
        last: VolumeHandle,
        age: Duration,
    ) -> Result<Option<VolumeHandle>, RuntimeError> {
        let volumes = self.list(SystemTime::now() - age).await?;
        let damaged = self.damaged();
        Ok(volumes.into_iter().find(|volume| *volume > last && !damaged.contains(volume)))
    }

    /// Returns other volumes whose trees share the file at `path` of `volume` by a hard link or as
    /// layers of an overlay, as far as their manifests are in memory.
    pub(super) async fn sharing(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        manifest: &Manifest,
        path: &Path,
    ) -> Vec<VolumeHandle> {
        let Some(index) = manifest.find(path.as_os_str().as_bytes()) else { return Vec::new() };
        let Ok(file) = local_directory(runtime, volume).await.map(|root| root.join(path)) else {
            return Vec::new();
        };
        let candidates: Vec<_> = {
            let state = self.state();
            let others = state.trees.iter().filter(|(other, tree)| **other != volume && tree.is_local);
            let same = others.filter_map(|(other, tree)| {
                let same = scrub::same_file_in(&tree.manifest, manifest, index)?;
                Some((*other, tree.manifest.entries()[same].path().to_owned()))
            });
            same.collect()
        };
        let below = volumes_below(runtime, volume).await;
        let mut sharing = Vec::new();
        for (other, path) in candidates {
            if below.contains(&other) || volumes_below(runtime, other).await.contains(&volume) {
                sharing.push(other);
            } else if let Ok(root) = local_directory(runtime, other).await
                && scrub::is_one_file(&file, &root.join(path))
            {
                sharing.push(other);
            }
        }
        sharing
    }

    /// Forgets that a volume exists, because it is missing on the worker. Its extents are not found
    /// any more.
    pub(crate) fn forget_missing(&self, volume: VolumeHandle) {
        self.state().remove(volume);
    }

    /// Marks a new volume as one that a transfer fills. The mark is as durable as the manifests.
    ///
    /// Only a volume with this mark is emptied for a transfer. So no ticket can empty a volume that
    /// a container or an artifact uses.
    pub(crate) async fn begin_filling(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        let path = self.path(volume).with_extension(FILLING_SUFFIX);
        let written = tokio::fs::write(&path, b"").await;
        written.map_err(|error| RuntimeError::io("mark a volume that is being filled", error))?;
        self.state().filling.insert(volume);
        Ok(())
    }

    /// Whether a transfer fills the volume.
    pub(crate) fn is_filling(&self, volume: VolumeHandle) -> bool {
        self.state().filling.contains(&volume)
    }

    /// Removes the mark of a volume that is complete or destroyed.
    pub(crate) async fn end_filling(&self, volume: VolumeHandle) {
        if !self.state().filling.remove(&volume) {
            return;
        }
        let path = self.path(volume).with_extension(FILLING_SUFFIX);
        if let Err(error) = tokio::fs::remove_file(&path).await
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(volume.handle = %volume, %error, "cannot remove the mark of a filled volume");
        }
    }

    /// Remembers that a volume differs from its manifest, so that it is no longer used. Other trees
    /// may share its files, so all are inspected before their next use.
    pub(super) async fn mark_damaged(&self, volume: VolumeHandle, how: &str) -> ManifestError {
        let loss = ReplicaLoss::damaged(volume, how);
        {
            let mut state = self.state();
            state.remove(volume);
            state.inspected.clear();
            state.damaged.insert(volume, loss.cause.clone());
        }
        let path = self.path(volume).with_extension(DAMAGED_SUFFIX);
        if let Err(error) = tokio::fs::write(&path, &loss.cause).await {
            // The damage is detected again at the next use.
            tracing::warn!(volume.handle = %volume, %error, "cannot mark a damaged volume");
        }
        ManifestError::Damaged(loss)
    }

    /// Scans a complete volume, and stores its manifest.
    pub(crate) async fn scan(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Arc<Manifest>, RuntimeError> {
        self.scan_all(runtime, volume, team).await.map(|scanned| scanned.manifest)
    }

    /// Scans a complete volume, stores its manifest, and returns also the omitted entries.
    pub(crate) async fn scan_all(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<ScanResult, RuntimeError> {
        let (manifest, omitted) = match runtime.contents(volume).await? {
            Contents::Directory(root) => {
                let known = self.layer(runtime, volume, team).await?;
                let scanned = blocking(move || {
                    let layer = known.as_ref().map(|(layer, below)| transfer::Layer {
                        below,
                        upper: &layer.upper,
                        user_attributes: layer.user_attributes,
                    });
                    scan_layer(&root, layer)
                });
                let transfer::Scan { manifest, problems, .. } = scanned.await?;
                (manifest, omitted(&problems))
            }
            Contents::Remote(remote) => (remote::scan(&remote).await?, None),
        };
        if let Some(omitted) = &omitted {
            tracing::info!(volume.handle = %volume, omitted, "a manifest omits some entries of a volume");
        }
        let manifest = Arc::new(manifest);
        self.insert(runtime, volume, team, manifest.clone()).await;
        Ok(ScanResult { manifest, omitted })
    }

    /// Returns the upper layer of a volume, and the manifest of the volume below. `None`: there are
    /// no layers here, or it is not certain what is below.
    pub(crate) async fn layer(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Option<(Layer, Arc<Manifest>)>, RuntimeError> {
        let Some(layer) = runtime.layer(volume).await? else { return Ok(None) };
        let below = self.stored_here(layer.parent).await?;
        let is_damaged = self.state().damaged.contains_key(&layer.parent);
        let below = below.filter(|below| below.this_boot && below.team == team && !is_damaged);
        Ok(below.map(|below| (layer, below.manifest)))
    }

    /// Stores the manifest of a complete volume. If that fails, a later gateway scans the volume
    /// again.
    async fn insert(&self, runtime: &dyn Runtime, volume: VolumeHandle, team: &str, manifest: Arc<Manifest>) {
        if let Err(error) = self.store(runtime, volume, team, manifest.clone()).await {
            tracing::warn!(volume.handle = %volume, error = error_chain(&error), "cannot store a manifest: the volume will be scanned again");
            self.state().insert(volume, Tree { team: team.to_owned(), manifest, is_local: false });
        }
    }

    /// Stores the manifest of a complete volume for later gateways. If the volume is on another
    /// machine, so is the manifest.
    pub(crate) async fn store(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
        manifest: Arc<Manifest>,
    ) -> Result<(), RuntimeError> {
        let (owner_team, stored) = (team.to_owned(), manifest.clone());
        let failed = |error| RuntimeError::io("store a manifest", error);
        let is_local = match runtime.contents(volume).await? {
            Contents::Directory(_) => {
                let (path, boot) = (self.path(volume), self.boot.clone());
                blocking(move || save(&path, &boot, &owner_team, &stored).map_err(failed)).await?;
                true
            }
            Contents::Remote(remote) => {
                // The marker of the worker covers crashes of its machine, so there is no boot to
                // compare.
                let file = blocking(move || encode("", &owner_team, &stored).map_err(failed)).await?;
                remote.store_manifest(file).await?;
                false
            }
        };
        let mut state = self.state();
        state.insert(volume, Tree { team: team.to_owned(), manifest: manifest.clone(), is_local });
        state.set_inspected(volume, &manifest);
        Ok(())
    }

    /// Returns the stored manifest of a volume, from here or from its worker. `None`: the volume is
    /// not complete, or must be scanned.
    pub(crate) async fn stored(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
    ) -> Result<Option<StoredManifest>, RuntimeError> {
        if let Some(stored) = self.stored_here(volume).await? {
            return Ok(Some(stored));
        }
        let remote = match runtime.contents(volume).await {
            Ok(Contents::Remote(remote)) => remote,
            Ok(Contents::Directory(_)) | Err(RuntimeError::VolumeNotFound(_)) => return Ok(None),
            // An error must not look like a missing manifest, because a volume without one is
            // destroyed.
            Err(error) => return Err(error),
        };
        let Some(file) = remote.read_manifest().await? else { return Ok(None) };
        let decoded = blocking(move || match decode(&file) {
            Ok(decoded) => Ok(Some(decoded)),
            // An error must not look like a missing manifest, because a volume without one is
            // destroyed.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                Err(RuntimeError::io("read a manifest", error))
            }
            // An invalid file counts as missing.
            Err(_) => Ok(None),
        });
        let decoded = decoded.await?;
        let Some((_, team, manifest)) = decoded else { return Ok(None) };
        let manifest = Arc::new(manifest);
        let tree = Tree { team: team.clone(), manifest: manifest.clone(), is_local: false };
        self.state().insert(volume, tree);
        Ok(Some(StoredManifest { team, manifest, this_boot: true, is_local: false }))
    }

    /// Returns the manifest of a volume that is stored on this machine.
    pub(crate) async fn stored_here(
        &self,
        volume: VolumeHandle,
    ) -> Result<Option<StoredManifest>, RuntimeError> {
        if let Some(tree) = self.state().trees.get(&volume) {
            let (team, manifest, is_local) = (tree.team.clone(), tree.manifest.clone(), tree.is_local);
            return Ok(Some(StoredManifest { team, manifest, this_boot: true, is_local }));
        }
        let path = self.path(volume);
        let loaded = blocking(move || match load(&path) {
            Ok(loaded) => Ok(Some(loaded)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                Ok(None)
            }
            // An error must not look like a missing manifest, because a volume without one is
            // destroyed.
            Err(error) => Err(RuntimeError::io("read a manifest", error)),
        });
        let Some((boot, team, manifest)) = loaded.await? else { return Ok(None) };
        let (manifest, this_boot) = (Arc::new(manifest), boot == self.boot);
        if this_boot {
            let tree = Tree { team: team.clone(), manifest: manifest.clone(), is_local: true };
            self.state().insert(volume, tree);
        }
        Ok(Some(StoredManifest { team, manifest, this_boot, is_local: true }))
    }

    /// Loads the newest manifests of earlier gateways from this boot, once, so that [`Self::find`]
    /// finds their extents.
    pub(crate) async fn load_earlier(&self) {
        let load = || async {
            let (directory, boot) = (self.directory.clone(), self.boot.clone());
            let recalled = blocking(move || {
                load_recent(&directory, &boot, MAX_MANIFEST_BYTES)
                    .map_err(|error| RuntimeError::io("read manifests", error))
            });
            match recalled.await {
                Ok(recalled) => recalled.into_iter().for_each(|(volume, team, manifest)| {
                    self.state().insert(volume, Tree { team, manifest: Arc::new(manifest), is_local: true });
                    // The manifest may have been removed since it was read.
                    if !self.path(volume).exists() {
                        self.state().remove(volume);
                    }
                }),
                // An extent that is not found is sent again.
                Err(error) => {
                    tracing::warn!(
                        error = error_chain(&error),
                        "cannot load the manifests of earlier gateways"
                    )
                }
            }
        };
        self.loaded_earlier.get_or_init(load).await;
    }

    /// Returns the location of the extent with this digest in a volume of `team`.
    pub(crate) fn find(&self, team: &str, digest: &Digest) -> Option<ExtentLocation> {
        let state = self.state();
        let (volume, ordinal) = state.extents.get(digest)?;
        let tree = state.trees.get(volume).filter(|tree| tree.team == team)?;
        let located = tree.manifest.locate(*ordinal)?;
        let (entry, offset) = (located.entry, located.extent.offset);
        Some(ExtentLocation { volume: *volume, manifest: tree.manifest.clone(), entry, offset })
    }

    /// Removes the manifest of a volume that is being destroyed.
    ///
    /// It must be called before the destruction, so that the volume is no longer used. It must be
    /// called again afterwards, because a concurrent reader may have stored the manifest meanwhile.
    pub(crate) async fn forget(&self, volume: VolumeHandle) {
        {
            let mut state = self.state();
            state.remove(volume);
            state.damaged.remove(&volume);
        }
        self.end_filling(volume).await;
        let path = self.path(volume);
        for path in [path.with_extension(DAMAGED_SUFFIX), path] {
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

/// Returns the volumes of which a volume is an overlay.
async fn volumes_below(runtime: &dyn Runtime, volume: VolumeHandle) -> Vec<VolumeHandle> {
    let (mut below, mut next) = (Vec::new(), volume);
    while let Ok(Some(layer)) = runtime.layer(next).await {
        below.push(layer.parent);
        next = layer.parent;
    }
    below
}

impl State {
    /// Whether a volume need not be inspected now.
    fn is_inspected(&self, volume: VolumeHandle, manifest: &Manifest) -> bool {
        let is_recent = |at: &Instant| at.elapsed() < INSPECTION_TERM;
        manifest.entries().len() > MAX_ALWAYS_INSPECTED && self.inspected.get(&volume).is_some_and(is_recent)
    }

    /// Remembers that a large volume was just inspected.
    fn set_inspected(&mut self, volume: VolumeHandle, manifest: &Manifest) {
        if manifest.entries().len() > MAX_ALWAYS_INSPECTED {
            self.inspected.retain(|_, at| at.elapsed() < INSPECTION_TERM);
            self.inspected.insert(volume, Instant::now());
        }
    }

    fn insert(&mut self, volume: VolumeHandle, tree: Tree) {
        self.remove(volume);
        if tree.manifest.encoded_bytes() > MAX_MANIFEST_BYTES {
            return;
        }
        // From here on, `MAX_MANIFEST_BYTES` bounds the manifest instead of the budget.
        tree.manifest.release_budget();
        self.bytes += tree.manifest.encoded_bytes();
        for located in tree.manifest.extents().filter(|_| tree.is_local) {
            self.extents.insert(located.extent.digest, (volume, located.ordinal));
        }
        self.order.push_back(volume);
        self.trees.insert(volume, tree);
        while self.bytes > MAX_MANIFEST_BYTES
            && let Some(oldest) = self.order.front().copied()
        {
            self.remove(oldest);
        }
    }

    fn remove(&mut self, volume: VolumeHandle) {
        self.inspected.remove(&volume);
        let Some(tree) = self.trees.remove(&volume) else { return };
        self.bytes -= tree.manifest.encoded_bytes();
        self.order.retain(|stored| *stored != volume);
        for located in tree.manifest.extents() {
            if self.extents.get(&located.extent.digest).is_some_and(|(stored, _)| *stored == volume) {
                self.extents.remove(&located.extent.digest);
            }
        }
    }
}

#[cfg(test)]
mod tests;
