//! Manifests of complete volumes, and where on this worker an extent of content can be found.
//!
//! Both are caches. A manifest that is not here is made again by scanning the volume; an extent that is not found is sent again.
//! The memory they take is bounded by [`MEMORY`]. Extents are found only for the team whose volume has them, so that nobody learns from
//! what need not be sent what others have.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{Digest, VolumeHandle};
use runtime::{Runtime, RuntimeError};
use transfer::{Limits, Manifest, ManifestBuilder, ScanOptions};

/// Most bytes of manifests, encoded, that are held in memory.
const MEMORY: u64 = 64 << 20;
/// Largest encoded entry that is read back.
const MAX_ENTRY: u64 = 64 << 20;

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

/// The team, then each entry, each with its length before it; then the digest of the tree.
fn save(path: &Path, team: &str, manifest: &Manifest) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = BufWriter::new(File::create(&temporary)?);
    write_framed(&mut file, team.as_bytes())?;
    for entry in manifest.entries() {
        write_framed(&mut file, &entry.encode())?;
    }
    write_framed(&mut file, b"")?;
    file.write_all(manifest.tree_digest().as_bytes())?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?;
    std::fs::rename(temporary, path)
}

fn load(path: &Path) -> io::Result<(String, Manifest)> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let mut file = BufReader::new(File::open(path)?);
    let team = String::from_utf8(read_framed(&mut file)?).map_err(|_| malformed())?;
    let mut builder = ManifestBuilder::new(Limits::default());
    loop {
        let entry = read_framed(&mut file)?;
        if entry.is_empty() {
            break;
        }
        builder.push_encoded(&entry).map_err(|_| malformed())?;
    }
    let mut digest = [0; 32];
    file.read_exact(&mut digest)?;
    let manifest = builder.finish().map_err(|_| malformed())?;
    if manifest.tree_digest() != Digest(digest) {
        return Err(malformed());
    }
    Ok((team, manifest))
}

fn write_framed(file: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    file.write_all(&u64::try_from(bytes.len()).unwrap_or(u64::MAX).to_le_bytes())?;
    file.write_all(bytes)
}

fn read_framed(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_ENTRY {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).ok() != Some(length) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}
