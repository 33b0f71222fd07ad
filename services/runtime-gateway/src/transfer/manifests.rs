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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{Digest, VolumeHandle, chain};
use runtime::{Contents, Runtime, RuntimeError};
use transfer::{InvalidManifest, Limits, Manifest, Problem, ProblemKind, ScanError, ScanOptions};

use crate::transfer::local_dir::directory;
use crate::transfer::remote;
use crate::transfer::verify::{self, Rehashed};
use crate::util::blocking::blocking;

/// What the name of a manifest that is being written ends with.
const UNFINISHED: &str = "tmp";
/// What the name of the mark of a damaged volume ends with.
const DAMAGED: &str = "damaged";
/// What the name of the mark of a volume ends with that a transfer fills.
const FILLING: &str = "filling";

/// Most paths that a message about a volume names.
const NAMED: usize = 3;

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
pub(crate) struct Kept {
    team: String,
    manifest: Arc<Manifest>,
    /// Whether it was in this boot, so that the volume holds what it says.
    this_boot: bool,
}

impl Kept {
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

/// The bytes of a volume cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    /// They did not survive a crash of the machine.
    #[error("the volume {0} does not hold what it should any more")]
    Damaged(VolumeHandle),
    /// The worker failed.
    #[error(transparent)]
    Worker(#[from] RuntimeError),
}

/// A volume that was scanned.
pub(crate) struct Scanned {
    pub(crate) manifest: Arc<Manifest>,
    /// What of it was left out, with the first paths. `None`: nothing.
    pub(crate) left_out: Option<String>,
}

/// Where some content is.
pub(crate) struct Found {
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
        let Some(Kept { team, manifest, this_boot }) = self.kept_of(runtime, volume).await? else {
            return Ok(self.scan(runtime, volume, team).await?);
        };
        if this_boot {
            return Ok(manifest);
        }
        let root = directory(runtime, volume).await?;
        let expected = manifest.clone();
        match blocking(move || verify::compare(&root, &expected)).await? {
            Rehashed::Same => {
                self.insert(runtime, volume, &team, manifest.clone()).await;
                Ok(manifest)
            }
            Rehashed::Differs(path) => {
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
        written.map_err(|error| RuntimeError::io("marking a volume that is filled", error))?;
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
    ) -> Result<Scanned, RuntimeError> {
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
        Ok(Scanned { manifest, left_out })
    }

    /// Keeps the manifest of a volume that has its final bytes, and that can be scanned for it otherwise.
    async fn insert(&self, runtime: &dyn Runtime, volume: VolumeHandle, team: &str, manifest: Arc<Manifest>) {
        if let Err(error) = self.keep(runtime, volume, team, manifest.clone()).await {
            tracing::warn!(volume.handle = %volume, error = chain(&error), "a manifest has to be made again");
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
        let failed = |error| RuntimeError::io("keeping a manifest", error);
        let near = match runtime.contents(volume).await? {
            Contents::Directory(_) => {
                let (path, boot) = (self.path(volume), self.boot.clone());
                blocking(move || save(&path, &boot, &whose, &kept).map_err(failed)).await?;
                true
            }
            Contents::Remote(remote) => {
                // What happens to the machine of the worker, its marker says; there is no boot to compare.
                let file = blocking(move || encode("", &whose, &kept).map_err(failed)).await?;
                remote.keep_manifest(file).await?;
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
    ) -> Result<Option<Kept>, RuntimeError> {
        if let Some(kept) = self.kept(volume).await? {
            return Ok(Some(kept));
        }
        let remote = match runtime.contents(volume).await {
            Ok(Contents::Remote(remote)) => remote,
            Ok(Contents::Directory(_)) | Err(RuntimeError::VolumeNotFound(_)) => return Ok(None),
            // Whether there is one is not known, and what is taken for unfinished is thrown away.
            Err(error) => return Err(error),
        };
        let Some(file) = remote.kept_manifest().await? else { return Ok(None) };
        let decoded = blocking(move || match decode(&file) {
            Ok(decoded) => Ok(Some(decoded)),
            // What is taken for unfinished is thrown away.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                Err(RuntimeError::io("reading a manifest", error))
            }
            // One that makes no sense is as good as none.
            Err(_) => Ok(None),
        });
        let decoded = decoded.await?;
        let Some((_, team, manifest)) = decoded else { return Ok(None) };
        let manifest = Arc::new(manifest);
        let tree = Tree { team: team.clone(), manifest: manifest.clone(), near: false };
        self.state().insert(volume, tree);
        Ok(Some(Kept { team, manifest, this_boot: true }))
    }

    /// The manifest that was kept here of a volume.
    pub(crate) async fn kept(&self, volume: VolumeHandle) -> Result<Option<Kept>, RuntimeError> {
        if let Some(tree) = self.state().trees.get(&volume) {
            let (team, manifest) = (tree.team.clone(), tree.manifest.clone());
            return Ok(Some(Kept { team, manifest, this_boot: true }));
        }
        let path = self.path(volume);
        let loaded = blocking(move || match load(&path) {
            Ok(loaded) => Ok(Some(loaded)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                Ok(None)
            }
            // Whether there is one is not known, and what is taken for unfinished is thrown away.
            Err(error) => Err(RuntimeError::io("reading a manifest", error)),
        });
        let Some((boot, team, manifest)) = loaded.await? else { return Ok(None) };
        let (manifest, this_boot) = (Arc::new(manifest), boot == self.boot);
        if this_boot {
            let tree = Tree { team: team.clone(), manifest: manifest.clone(), near: true };
            self.state().insert(volume, tree);
        }
        Ok(Some(Kept { team, manifest, this_boot }))
    }

    /// Takes in, once, what earlier gateways kept in this boot, so that [`Self::find`] finds it: the youngest, as far as there is memory.
    pub(crate) async fn recall(&self) {
        let recall = || async {
            let (directory, boot) = (self.directory.clone(), self.boot.clone());
            let recalled = blocking(move || {
                recalled(&directory, &boot).map_err(|error| RuntimeError::io("reading manifests", error))
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
                Err(error) => tracing::warn!(error = chain(&error), "cannot look for what is here already"),
            }
        };
        self.recalled.get_or_init(recall).await;
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Reads everything in a volume. A volume that no manifest can describe is the fault of the process that wrote it.
pub(crate) fn scan(root: &Path) -> Result<transfer::Scan, RuntimeError> {
    let options = ScanOptions { limits: Limits::of_process(), ..ScanOptions::default() };
    let scanned = transfer::scan(root, &options, None).map_err(|error| match error {
        ScanError::Manifest(error) if !matches!(error, InvalidManifest::NoMemory) => {
            RuntimeError::InvalidOutput(error.to_string())
        }
        error => RuntimeError::Other(format!("cannot read a volume: {}", chain(&error))),
    })?;
    let (invalid, others) = scanned.problems.iter().partition::<Vec<_>, _>(|problem| cannot_travel(problem));
    let unreadable: Vec<_> = others.into_iter().filter(|problem| is_unread(problem)).collect();
    // Any of these is no less a part of the volume than what was read.
    if let Some(invalid) = named(&invalid) {
        return Err(RuntimeError::InvalidOutput(invalid));
    }
    if let Some(unreadable) = named(&unreadable) {
        return Err(RuntimeError::UnreadableOutput(unreadable));
    }
    Ok(scanned)
}

/// Whether no manifest can hold what is at a path.
fn cannot_travel(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::PathTooLong => true,
        // Attributes together are too large.
        ProblemKind::Unreadable(error) => error.kind() == io::ErrorKind::ArgumentListTooLong,
        // Overlays over the volume would act on it.
        ProblemKind::SkippedXattr(name) => name.starts_with("trusted.overlay."),
        ProblemKind::ChangedWhileRead | ProblemKind::SkippedSocket => false,
    }
}

/// Whether what is at a path could not be read as a whole.
fn is_unread(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::Unreadable(_) | ProblemKind::ChangedWhileRead => true,
        ProblemKind::PathTooLong | ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_) => false,
    }
}

/// The first problems, and how many more there are. `None`: there is none.
fn named(problems: &[&Problem]) -> Option<String> {
    let first: Vec<_> = problems.iter().take(NAMED).map(|problem| shortened(problem)).collect();
    let more = problems.len().saturating_sub(first.len());
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    (!first.is_empty()).then(|| first.join(", ") + &more)
}

/// What was left out of a manifest: sockets and extended attributes, with the first paths. `None`: nothing.
fn left_out(problems: &[Problem]) -> Option<String> {
    let is_left_out = |problem: &&Problem| {
        matches!(problem.what, ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_))
    };
    named(&problems.iter().filter(is_left_out).collect::<Vec<_>>())
}

/// A problem with the beginning of its path.
fn shortened(problem: &Problem) -> String {
    const SHOWN: usize = 200;
    let path = problem.path.to_string_lossy();
    let (shown, more) = match path.floor_char_boundary(SHOWN) {
        end if end < path.len() => (&path[..end], "…"),
        _ => (&*path, ""),
    };
    format!("{shown:?}{more} {}", chain(&problem.what))
}

/// The digest of the tree; the boot and the team, each with its length before it; the entries.
fn encode(boot: &str, team: &str, manifest: &Manifest) -> io::Result<Vec<u8>> {
    let length = |text: &str| u8::try_from(text.len()).map_err(io::Error::other);
    let (boot_length, team_length) = ([length(boot)?], [length(team)?]);
    let digest = manifest.tree_digest();
    let head = [digest.as_bytes(), &boot_length, boot.as_bytes(), &team_length, team.as_bytes()];
    Ok([&head.concat()[..], &manifest.encode()].concat())
}

fn save(path: &Path, boot: &str, team: &str, manifest: &Manifest) -> io::Result<()> {
    let temporary = path.with_extension(UNFINISHED);
    let file = encode(boot, team, manifest)?;
    let saved = std::fs::write(&temporary, file).and_then(|()| std::fs::rename(&temporary, path));
    if saved.is_err() {
        // Half of a manifest is of no use to anybody, least of all on a full disk.
        _ = std::fs::remove_file(&temporary);
    }
    saved
}

/// The manifests that were kept in this boot, the oldest first: the youngest that fit into [`MEMORY`].
fn recalled(directory: &Path, boot: &str) -> io::Result<Vec<(VolumeHandle, String, Manifest)>> {
    let mut kept = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let Some(volume) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that is gone meanwhile is not missed.
        let Ok(metadata) = entry.metadata() else { continue };
        kept.push((metadata.modified()?, metadata.len(), volume, entry.path()));
    }
    kept.sort_unstable_by(|a, b| b.cmp(a));
    let (mut recalled, mut bytes) = (Vec::new(), 0);
    for (_, length, volume, path) in kept {
        bytes += length;
        if bytes > MEMORY {
            break;
        }
        if let Ok((written_in, team, manifest)) = load(&path)
            && written_in == boot
        {
            recalled.push((volume, team, manifest));
        }
    }
    recalled.reverse();
    Ok(recalled)
}

fn load(path: &Path) -> io::Result<(String, String, Manifest)> {
    decode(&std::fs::read(path)?)
}

/// A text with its length before it, and what comes after it.
fn text(rest: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = rest.split_first()?;
    let (text, rest) = rest.split_at_checked(usize::from(*length))?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

/// The boot, the team and the manifest.
fn decode(file: &[u8]) -> io::Result<(String, String, Manifest)> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let (digest, rest) = file.split_at_checked(32).ok_or_else(malformed)?;
    let (boot, rest) = text(rest).ok_or_else(malformed)?;
    let (team, entries) = text(rest).ok_or_else(malformed)?;
    let manifest = Manifest::decode(entries, Limits::of_process()).map_err(|error| match error {
        // It is one, and there is no room for it now.
        InvalidManifest::NoMemory => io::Error::new(io::ErrorKind::OutOfMemory, error),
        _ => malformed(),
    })?;
    if manifest.tree_digest().as_bytes() != digest {
        return Err(malformed());
    }
    Ok((boot, team, manifest))
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
    async fn a_manifest_proves_only_in_the_boot_in_which_it_was_kept() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = testing::fake::FakeWorker::near();
        let worker = machine.runtime();
        let volume = machine.volume("contents").await;
        let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
        open("first").keep(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");

        let again = open("first").kept(volume).await.expect("read").expect("the manifest");
        assert_eq!((again.tree_digest(), again.this_boot), (manifest().tree_digest(), true));
        assert!(
            !open("second").kept(volume).await.expect("read").expect("the manifest").this_boot,
            "it must be hashed again"
        );

        let trees = open("first");
        trees.forget(volume).await;
        assert!(trees.kept(volume).await.expect("read").is_none());
    }

    #[test]
    fn volume_that_no_manifest_describes_is_an_invalid_output() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut descent = transfer::Descent::open(directory.path()).expect("opened");
        for _ in 0..3000 {
            rustix::fs::mkdirat(descent.directory(), "d", rustix::fs::Mode::RWXU).expect("made");
            descent.enter(b"d").expect("entered");
        }
        let refused = scan(directory.path()).expect_err("too deep");
        assert_eq!(refused.reason(), domain::workload::FailureReason::OutputInvalid);
        let said = refused.to_string();
        assert!(said.starts_with("it cannot be kept: \"d/d/") && said.len() < 400, "{said}");
        assert!(said.ends_with("has a path of more than 4096 bytes, which cannot travel"), "{said}");
        transfer::remove_tree(&directory.path().join("d")).expect("removed");
    }

    #[test]
    fn sockets_are_named_and_left_out() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let bind = |name: &str| std::os::unix::net::UnixListener::bind(directory.path().join(name));
        let _sockets: Vec<_> =
            (0..5).map(|number| bind(&number.to_string())).collect::<Result<_, _>>().expect("bound");
        let scanned = scan(directory.path()).expect("scanned");
        assert_eq!(scanned.manifest.entries().len(), 1);
        let expected = "\"0\" is a socket, \"1\" is a socket, \"2\" is a socket, and 2 more";
        assert_eq!(left_out(&scanned.problems).as_deref(), Some(expected));
    }

    #[test]
    fn unread_files_fail_the_output() {
        let problem = |what| Problem { path: "a/b".into(), what };
        let unread =
            [ProblemKind::ChangedWhileRead, ProblemKind::Unreadable(io::ErrorKind::PermissionDenied.into())];
        assert!(
            unread.into_iter().map(problem).all(|problem| is_unread(&problem) && !cannot_travel(&problem))
        );
        let invalid =
            [ProblemKind::PathTooLong, ProblemKind::SkippedXattr("trusted.overlay.opaque".to_owned())];
        assert!(invalid.into_iter().map(problem).all(|problem| cannot_travel(&problem)));
        let left = problem(ProblemKind::SkippedXattr("trusted.own".to_owned()));
        assert!(!is_unread(&left) && !cannot_travel(&left));
    }

    #[tokio::test]
    async fn what_an_earlier_gateway_kept_in_this_boot_is_found() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = testing::fake::FakeWorker::near();
        let worker = machine.runtime();
        let (here, gone) = (machine.volume("contents").await, machine.volume("others").await);
        let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
        let trees = open("first");
        let digest = async |volume| {
            let manifest = trees.proven(&*worker, volume, "main").await.expect("a manifest");
            manifest.extents().next().expect("content").extent.digest
        };
        let (content, others) = (digest(here).await, digest(gone).await);
        trees.forget(gone).await;

        let again = open("first");
        assert!(again.find("main", &content).is_none());
        again.recall().await;
        assert_eq!(again.find("main", &content).expect("found").volume, here);
        assert!(again.find("other", &content).is_none(), "it is nobody else's");
        assert!(again.find("main", &others).is_none());

        let later = open("second");
        later.recall().await;
        assert!(later.find("main", &content).is_none(), "it was not compared since");
    }

    #[tokio::test]
    async fn a_kept_manifest_that_was_damaged_counts_for_nothing() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = testing::fake::FakeWorker::near();
        let worker = machine.runtime();
        let (volume, trees) = (machine.volume("contents").await, || {
            Manifests::open(directory.path(), "boot".to_owned()).expect("open")
        });
        trees().keep(&*worker, volume, "main", Arc::new(manifest())).await.expect("room");
        let path = directory.path().join(volume.to_string());
        let whole = std::fs::read(&path).expect("the file");
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).expect("write");
            assert!(trees().kept(volume).await.expect("read").is_none(), "cut after {cut} bytes");
        }
    }

    #[tokio::test]
    async fn what_a_killed_gateway_was_writing_is_removed() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = testing::fake::FakeWorker::near();
        let worker = machine.runtime();
        let (half, whole) = (VolumeHandle::new(), machine.volume("contents").await);
        let open = || Manifests::open(directory.path(), "boot".to_owned()).expect("open");
        open().keep(&*worker, whole, "main", Arc::new(manifest())).await.expect("room");
        std::fs::write(directory.path().join(format!("{half}.tmp")), "half").expect("write");
        assert!(open().kept(whole).await.expect("read").is_some());
        let left: Vec<_> = std::fs::read_dir(directory.path()).expect("list").flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[tokio::test]
    async fn a_volume_that_did_not_survive_is_damaged_until_it_is_destroyed() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let machine = testing::fake::FakeWorker::near();
        let worker = machine.runtime();
        let (whole, lost) = (machine.volume("contents").await, machine.volume("contents").await);
        let open = |boot: &str| Manifests::open(directory.path(), boot.to_owned()).expect("open");
        let trees = open("first");
        for volume in [whole, lost] {
            trees.proven(&*worker, volume, "main").await.expect("a manifest");
        }
        machine.overwrite(lost, "contentS");
        trees.proven(&*worker, lost, "main").await.expect("in this boot nothing is lost");

        let trees = open("second");
        let digest = trees.proven(&*worker, whole, "main").await.expect("it is what it was").tree_digest();
        trees.verify(&*worker, whole, "main", digest).await.expect("it is what it was");
        let damaged = trees.verify(&*worker, lost, "main", digest).await;
        assert!(matches!(damaged, Err(ManifestError::Damaged(volume)) if volume == lost), "{damaged:?}");
        assert_eq!(trees.damaged(), BTreeSet::from([lost]));

        let trees = open("third");
        assert_eq!(trees.damaged(), BTreeSet::from([lost]), "it is remembered");
        assert!(matches!(trees.proven(&*worker, lost, "main").await, Err(ManifestError::Damaged(_))));
        trees.forget(lost).await;
        assert_eq!(trees.damaged(), BTreeSet::new());
        assert_eq!(open("third").damaged(), BTreeSet::new());
    }
}
