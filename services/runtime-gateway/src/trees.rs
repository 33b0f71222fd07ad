//! Manifests of complete volumes, and where on this worker an extent of content can be found.
//!
//! Both are caches. A manifest that is not here is made again by scanning the volume; an extent that is not found is sent again.
//! The memory they take is bounded by [`MEMORY`]. Extents are found only for the team whose volume has them, so that nobody learns from
//! what need not be sent what others have.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{Digest, VolumeHandle};
use runtime::{Runtime, RuntimeError};
use transfer::{Limits, Manifest, ScanOptions};

/// Most bytes of manifests, encoded, that are held in memory.
const MEMORY: u64 = 64 << 20;

/// Manifests of complete volumes on this worker.
pub(crate) struct Trees {
    directory: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    trees: HashMap<VolumeHandle, Tree>,
    /// In the order in which they came.
    order: VecDeque<VolumeHandle>,
    bytes: u64,
    extents: HashMap<Digest, (VolumeHandle, u64)>,
}

struct Tree {
    team: String,
    manifest: Arc<Manifest>,
}

/// Where some content is.
pub(crate) struct Found {
    pub(crate) volume: VolumeHandle,
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
}

impl Trees {
    /// The cache in `directory`, which is made.
    pub(crate) fn open(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        Ok(Self { directory: directory.to_owned(), state: Mutex::default() })
    }

    /// Scans a volume that has its final bytes, and keeps what was found.
    pub(crate) async fn scan(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
    ) -> Result<Arc<Manifest>, RuntimeError> {
        let root = runtime.volume_directory(volume).await?;
        let scanned = blocking(move || transfer::scan(&root, &ScanOptions::default(), None)).await?;
        let scanned =
            scanned.map_err(|error| RuntimeError::Other(format!("cannot read a volume: {error}")))?;
        for problem in &scanned.problems {
            tracing::info!(volume.handle = %volume, %problem, "left out of an output");
        }
        let manifest = Arc::new(scanned.manifest);
        self.insert(volume, team, manifest.clone()).await;
        Ok(manifest)
    }

    /// Keeps the manifest of a volume that has its final bytes.
    pub(crate) async fn insert(&self, volume: VolumeHandle, team: &str, manifest: Arc<Manifest>) {
        self.state().insert(volume, team, manifest.clone());
        let (path, team) = (self.path(volume), team.to_owned());
        let saved = blocking(move || save(&path, &team, &manifest)).await;
        if let Ok(Err(error)) = saved {
            tracing::warn!(volume.handle = %volume, %error, "cannot keep a manifest; it will be made again");
        }
    }

    /// The manifest of a volume. `None`: it has to be scanned.
    pub(crate) async fn get(&self, volume: VolumeHandle) -> Option<Arc<Manifest>> {
        if let Some(tree) = self.state().trees.get(&volume) {
            return Some(tree.manifest.clone());
        }
        let path = self.path(volume);
        let (team, manifest) = blocking(move || load(&path)).await.ok()?.ok()?;
        let manifest = Arc::new(manifest);
        self.state().insert(volume, &team, manifest.clone());
        Some(manifest)
    }

    /// Where a volume of `team` has the content with this digest.
    pub(crate) fn find(&self, team: &str, digest: &Digest) -> Option<Found> {
        let state = self.state();
        let (volume, ordinal) = state.extents.get(digest)?;
        let tree = state.trees.get(volume).filter(|tree| tree.team == team)?;
        let located = tree.manifest.locate(*ordinal)?;
        let path = tree.manifest.entries()[located.entry].path().to_owned();
        Some(Found { volume: *volume, path, offset: located.extent.offset })
    }

    /// Forgets a volume, before it is destroyed.
    pub(crate) async fn forget(&self, volume: VolumeHandle) {
        self.state().remove(volume);
        match tokio::fs::remove_file(self.path(volume)).await {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(volume.handle = %volume, %error, "cannot remove a manifest"),
        }
    }

    fn path(&self, volume: VolumeHandle) -> PathBuf {
        self.directory.join(volume.to_string())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn insert(&mut self, volume: VolumeHandle, team: &str, manifest: Arc<Manifest>) {
        self.remove(volume);
        if manifest.encoded_bytes() > MEMORY {
            return;
        }
        self.bytes += manifest.encoded_bytes();
        for located in manifest.extents() {
            self.extents.insert(located.extent.digest, (volume, located.ordinal));
        }
        self.order.push_back(volume);
        self.trees.insert(volume, Tree { team: team.to_owned(), manifest });
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

/// Runs something that blocks in a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RuntimeError> {
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work))
        .await
        .map_err(|error| RuntimeError::Other(format!("a thread died: {error}")))
}

/// The digest of the tree, the team with its length before it, then the entries.
fn save(path: &Path, team: &str, manifest: &Manifest) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let length = u8::try_from(team.len()).map_err(io::Error::other)?;
    let file = [manifest.tree_digest().as_bytes(), &[length], team.as_bytes(), &manifest.encode()].concat();
    std::fs::write(&temporary, file)?;
    std::fs::rename(temporary, path)
}

fn load(path: &Path) -> io::Result<(String, Manifest)> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let file = std::fs::read(path)?;
    let (digest, rest) = file.split_at_checked(32).ok_or_else(malformed)?;
    let (length, rest) = rest.split_first().ok_or_else(malformed)?;
    let (team, entries) = rest.split_at_checked(usize::from(*length)).ok_or_else(malformed)?;
    let team = String::from_utf8(team.to_vec()).map_err(|_| malformed())?;
    let manifest = Manifest::decode(entries, Limits::default()).map_err(|_| malformed())?;
    if manifest.tree_digest().as_bytes() != digest {
        return Err(malformed());
    }
    Ok((team, manifest))
}
