//! Manifests of complete volumes, and where on this worker an extent of content can be found.
//!
//! Both are caches, and a manifest is proof: a volume whose manifest was kept in this boot holds what it says. After a crash of the machine
//! that is no longer sure, for contents are not synced before they are called complete; so manifests of an earlier boot count for nothing,
//! and what is used again is hashed again ([`Trees::verify`]).
//!
//! They are caches. A manifest that is not here is made again by scanning the volume; an extent that is not found is sent again.
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
    /// The life of the machine.
    boot: String,
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
    /// The cache in `directory`, which is made. `boot` is the life of the machine.
    pub(crate) fn open(directory: &Path, boot: String) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        Ok(Self { directory: directory.to_owned(), boot, state: Mutex::default() })
    }

    /// Makes sure that a volume holds the tree with this digest, by reading it if nothing of this boot says so. Answers whether it does.
    pub(crate) async fn verify(
        &self,
        runtime: &dyn Runtime,
        volume: VolumeHandle,
        team: &str,
        digest: Digest,
    ) -> Result<bool, RuntimeError> {
        let manifest = match self.get(volume).await {
            Some(manifest) => manifest,
            None => self.scan(runtime, volume, team).await?,
        };
        Ok(manifest.tree_digest() == digest)
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
        let (path, team, boot) = (self.path(volume), team.to_owned(), self.boot.clone());
        let saved = blocking(move || save(&path, &boot, &team, &manifest)).await;
        if let Ok(Err(error)) = saved {
            tracing::warn!(volume.handle = %volume, %error, "cannot keep a manifest; it will be made again");
        }
    }

    /// The manifest of a volume. `None`: it has to be scanned.
    pub(crate) async fn get(&self, volume: VolumeHandle) -> Option<Arc<Manifest>> {
        if let Some(tree) = self.state().trees.get(&volume) {
            return Some(tree.manifest.clone());
        }
        let (path, boot) = (self.path(volume), self.boot.clone());
        let (team, manifest) = blocking(move || load(&path, &boot)).await.ok()?.ok()?;
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

/// The digest of the tree; the boot and the team, each with its length before it; the entries.
fn save(path: &Path, boot: &str, team: &str, manifest: &Manifest) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let length = |text: &str| u8::try_from(text.len()).map_err(io::Error::other);
    let (boot_length, team_length) = ([length(boot)?], [length(team)?]);
    let digest = manifest.tree_digest();
    let head = [digest.as_bytes(), &boot_length, boot.as_bytes(), &team_length, team.as_bytes()];
    let file = [&head.concat()[..], &manifest.encode()].concat();
    let saved = std::fs::write(&temporary, file).and_then(|()| std::fs::rename(&temporary, path));
    if saved.is_err() {
        // Half of a manifest is of no use to anybody, least of all on a full disk.
        _ = std::fs::remove_file(&temporary);
    }
    saved
}

/// The team and the manifest, if they were kept in this boot.
fn load(path: &Path, boot: &str) -> io::Result<(String, Manifest)> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let file = std::fs::read(path)?;
    let (digest, rest) = file.split_at_checked(32).ok_or_else(malformed)?;
    let text = |rest: &[u8]| {
        let (length, rest) = rest.split_first()?;
        let (text, rest) = rest.split_at_checked(usize::from(*length))?;
        Some((String::from_utf8(text.to_vec()).ok()?, rest.to_vec()))
    };
    let (kept_in, rest) = text(rest).ok_or_else(malformed)?;
    if kept_in != boot {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    let (team, entries) = text(&rest).ok_or_else(malformed)?;
    let manifest = Manifest::decode(&entries, Limits::default()).map_err(|_| malformed())?;
    if manifest.tree_digest().as_bytes() != digest {
        return Err(malformed());
    }
    Ok((team, manifest))
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind};

    use super::*;

    fn manifest() -> Manifest {
        let root = Entry {
            path: Vec::new(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::Directory,
        };
        Manifest::new([root], Limits::default()).expect("a valid manifest")
    }

    #[tokio::test]
    async fn a_manifest_counts_only_in_the_boot_in_which_it_was_kept() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let volume = VolumeHandle::new();
        let open = |boot: &str| Trees::open(directory.path(), boot.to_owned()).expect("open");
        open("first").insert(volume, "main", Arc::new(manifest())).await;

        let again = open("first").get(volume).await.map(|manifest| manifest.tree_digest());
        assert_eq!(again, Some(manifest().tree_digest()));
        assert!(open("second").get(volume).await.is_none(), "it must be hashed again");

        let trees = open("first");
        trees.forget(volume).await;
        assert!(trees.get(volume).await.is_none());
    }

    #[tokio::test]
    async fn a_kept_manifest_that_was_damaged_counts_for_nothing() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let (volume, trees) =
            (VolumeHandle::new(), || Trees::open(directory.path(), "boot".to_owned()).expect("open"));
        trees().insert(volume, "main", Arc::new(manifest())).await;
        let path = directory.path().join(volume.to_string());
        let whole = std::fs::read(&path).expect("the file");
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).expect("write");
            assert!(trees().get(volume).await.is_none(), "cut after {cut} bytes");
        }
    }
}
