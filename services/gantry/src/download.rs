//! Artifacts become directories.
//!
//! What the target has already is not fetched. The rest is written into a staging directory beside it, verified, and only then merged
//! into the target or put in its place: nothing partial is ever seen there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use domain::ArtifactId;
use rpc::pb::runtime::{
    ExtentRunsEnd, ReadOpen, ReadRequest, ReadResponse, read_request::Message as Ask,
    read_response::Message as Answer,
};
use rpc::pb::streamer::{DownloadRequest, DownloadResponse, GoTo};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use transfer::{
    Allowed, Dropped, DroppedKind, Guarded, Limits, Manifest, ManifestBuilder, Matches, MergeError,
    MergeOptions, Runs, ScanError, ScanOptions, Subtree, TreeWriter, Trust, WriteOptions, WrittenOwnership,
};

use crate::args::TakeArgs;
use crate::check;
use crate::connect::{Connection, Pause, repeat};
use crate::error::{Refused, is_transient};
use crate::progress::Progress;
use crate::table::{bytes, count, duration, plain};
use crate::tree::{self, Remembered};
use crate::ui::Ui;
use crate::why;

/// How often a transfer is tried when calls break. A restart of the cluster fits into the pauses.
pub(crate) const TRIES: usize = 12;
/// Longest time that a worker may send nothing: it may have to scan the volume.
const SILENCE: Duration = Duration::from_secs(60 * 60);
/// How many paths that were not written are named.
const NAMED: usize = 5;
/// How many characters of each.
const SHOWN: usize = 200;
/// How many of them are listed for programs.
const LISTED: usize = 1000;

/// How artifacts are downloaded.
pub(crate) struct Downloader<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    /// Whether it takes the place of the target, rather than being merged into it.
    pub(crate) replace: bool,
    pub(crate) take: TakeArgs,
    pub(crate) progress: Progress,
}

impl Downloader<'_> {
    /// Brings an artifact into `directory`, which is made where it is missing. `name` is what it is called. Answers what was done,
    /// for programs.
    pub(crate) async fn download(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
    ) -> anyhow::Result<Value> {
        let (mut pause, mut avoid) = (Pause::default(), Vec::new());
        for attempt in 1.. {
            self.progress.doing("downloading", name);
            match self.attempt(artifact, name, directory, &mut avoid).await {
                Err(error) if is_transient(&error) && attempt < TRIES => {
                    pause.wait().await;
                    // Whether that helps shows in the next try.
                    _ = self.connection.revive(self.ui).await;
                }
                result => {
                    self.progress.done(name);
                    let result = why::or_why(self.connection, &artifact.to_string(), result).await;
                    return result.with_context(|| format!("cannot download {name} into {directory:?}"));
                }
            }
        }
        unreachable!("the loop returns")
    }

    /// Remembers in `avoid` where it was read, for the next time.
    async fn attempt(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        avoid: &mut Vec<String>,
    ) -> anyhow::Result<Value> {
        let started = Instant::now();
        let DownloadResponse { go_to, digest, .. } = locate(self.connection, artifact, avoid).await?;
        if !self.take.follow_links {
            check::refuse_links(directory)?;
        }
        let target = Target::find(directory, self.replace)?;
        let GoTo { gateway_endpoint, ticket, .. } = go_to.context("the streamer named no worker")?;
        avoid.push(gateway_endpoint.clone());
        let path = target.path.clone();
        // Meanwhile, as it takes about as long.
        let remembered = tokio::task::spawn_blocking(move || Remembered::load("download", &path));

        let (asks, queue) = mpsc::channel(4);
        // The queue is empty and its other end is there.
        _ = asks.send(ask(Ask::Open(ReadOpen { ticket }))).await;
        let mut volumes = self.connection.volumes_at(&gateway_endpoint).await?;
        let mut answers = volumes.read(ReceiverStream::new(queue)).await.map_err(Refused::from)?.into_inner();
        let manifest = receive_manifest(&mut answers).await?;
        if tree::digest(&digest)? != manifest.tree_digest() {
            bail!("the worker sent another tree than that of the artifact");
        }

        let Guarded { tree, dropped } = self.guard(&target, manifest).await?;
        if self.replace {
            check_losses(&dropped)?;
        }
        let (manifest, tree) = (tree.manifest().clone(), Arc::new(tree));
        let (staged, wanted) = self.stage(&target, &manifest, remembered).await?;
        let wanted_bytes = manifest.bytes_of(&wanted);
        self.progress.expect(wanted_bytes);
        for runs in rpc::tree::runs(&tree.origins(&wanted)) {
            // When sending fails the call has ended, and its answers say why.
            _ = asks.send(ask(Ask::Want(runs))).await;
        }
        _ = asks.send(ask(Ask::WantEnd(ExtentRunsEnd { bytes: wanted_bytes }))).await;
        let staged = self.receive_content(answers, staged, tree).await?;
        drop(asks);

        let (replace, progress) = (self.replace, manifest.clone());
        tokio::task::spawn_blocking(move || staged.put_in_place(&target, &progress, replace))
            .await
            .context("writing ended unexpectedly")??;
        let mut done = self.say(artifact, name, directory, &manifest, wanted_bytes, started);
        self.say_dropped(name, &dropped);
        done["not_written"] = not_written(&dropped);
        self.ui.event("downloaded", done.clone());
        Ok(done)
    }

    /// Leaves out what the target does not take.
    async fn guard(&self, target: &Target, manifest: Manifest) -> anyhow::Result<Guarded> {
        let allowed =
            Allowed { git_programs: self.take.allow_git_hooks, special: self.take.preserve_special };
        let path = target.path.clone();
        let guarded = tokio::task::spawn_blocking(move || transfer::guard(&path, &manifest, allowed));
        Ok(guarded.await.context("reading ended unexpectedly")??)
    }

    /// Names what was not written, and what writes it.
    fn say_dropped(&self, name: &str, dropped: &[Dropped]) {
        let is_git = |dropped: &&Dropped| dropped.what == DroppedKind::GitProgram;
        let git: Vec<_> = dropped.iter().filter(is_git).map(|dropped| dropped.path.as_path()).collect();
        if !git.is_empty() {
            let named = named(&git);
            self.ui.warn(&format!(
                "{name}: not written, for git, Mercurial or jj would run it: {named}; write it with --allow-git-hooks"
            ));
        }
        let is_rule = |dropped: &&Dropped| dropped.what == DroppedKind::IgnoreRules;
        let rules: Vec<_> = dropped.iter().filter(is_rule).map(|dropped| dropped.path.as_path()).collect();
        if !rules.is_empty() {
            let named = named(&rules);
            self.ui.warn(&format!(
                "{name}: not written, for it decides what later uploads leave out: {named}; write it with --preserve-special"
            ));
        }
        let special = dropped.iter().filter(|dropped| !is_git(dropped) && !is_rule(dropped));
        let mut special: Vec<_> = special.map(|dropped| dropped.path.as_path()).collect();
        special.dedup();
        if !special.is_empty() {
            let named = named(&special);
            self.ui.warn(&format!(
                "{name}: written without setuid, setgid, file capabilities and device nodes: {named}; keep them with --preserve-special"
            ));
        }
    }

    /// Finds out what the target has, and makes a writer for the rest. Answers what must be fetched, too.
    async fn stage(
        &self,
        target: &Target,
        manifest: &Arc<Manifest>,
        remembered: JoinHandle<Remembered>,
    ) -> anyhow::Result<(Staged, Runs)> {
        let mut remembered = remembered.await.context("reading ended unexpectedly")?;
        let (target, manifest, replace) = (target.clone(), manifest.clone(), self.replace);
        let staging = tokio::task::spawn_blocking(move || {
            let options = ScanOptions::default();
            let there =
                transfer::local_matches(&target.path, &manifest, &options, Some(&mut remembered.cache));
            let matches = match there {
                Ok(matches) => matches,
                // It cannot be read, but perhaps be written.
                Err(ScanError::Root(_)) => Matches::default(),
                Err(error) => return Err(error.into()),
            };
            let directory = Staging::make(&target.staging)?;
            let options = WriteOptions {
                ownership: WrittenOwnership::Caller,
                devices: rustix::process::geteuid().is_root(),
                strict: false,
                sync: false,
            };
            let mut writer = TreeWriter::new(&directory.0, manifest.clone(), options)?;
            if replace {
                matches.copy_from(&target.path, &mut writer, Trust::Verify)?;
            } else {
                matches.prepare(&target.path, &mut writer)?;
            }
            let wanted = writer.missing();
            Ok::<_, anyhow::Error>((Staged { writer, matches, directory, remembered }, wanted))
        });
        staging.await.context("writing ended unexpectedly")?
    }

    async fn receive_content(
        &self,
        mut answers: Streaming<ReadResponse>,
        staged: Staged,
        tree: Arc<Subtree>,
    ) -> anyhow::Result<Staged> {
        let (chunks, mut queue) = mpsc::channel::<rpc::pb::runtime::Chunk>(4);
        let progress = self.progress.clone();
        let writing = tokio::task::spawn_blocking(move || {
            let mut staged = staged;
            while let Some(chunk) = queue.blocking_recv() {
                for extent in chunk.extents {
                    let ordinal =
                        tree.ordinal(extent.ordinal).context("the worker sent what was not asked for")?;
                    staged.writer.put(ordinal, &extent.data)?;
                    progress.advance(extent.data.len() as u64);
                }
            }
            Ok::<_, anyhow::Error>(staged)
        });
        let received = async {
            while let Some(ReadResponse { message }) = next(&mut answers).await? {
                match message {
                    Some(Answer::Chunk(chunk)) => {
                        if chunks.send(chunk).await.is_err() {
                            // Writing has failed, and says why.
                            return Ok(());
                        }
                    }
                    Some(Answer::Done(_)) => return Ok(()),
                    Some(Answer::Manifest(_) | Answer::ManifestEnd(_)) | None => {}
                }
            }
            Err(anyhow::Error::from(Refused::cut()))
        };
        let received = received.await;
        drop(chunks);
        let staged = writing.await.context("writing ended unexpectedly")??;
        received.map(|()| staged)
    }

    fn say(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        manifest: &Manifest,
        fetched: u64,
        started: Instant,
    ) -> Value {
        let entries = manifest.entries().len() as u64 - 1;
        let took = duration(started.elapsed());
        let files = count(entries, "entry").replace("entrys", "entries");
        self.ui.note(&format!(
            "{name}: {files}, {} now in {}, {} fetched in {took}",
            bytes(manifest.size_bytes()),
            directory.display(),
            bytes(fetched)
        ));
        json!({
            "name": name,
            "artifact_id": artifact.to_string(),
            "directory": directory.to_string_lossy(),
            "entries": entries,
            "size_bytes": manifest.size_bytes(),
            "fetched_bytes": fetched,
        })
    }
}

/// The first of some paths, and how many more there are.
fn named(paths: &[&Path]) -> String {
    let shown: Vec<_> =
        paths.iter().take(NAMED).map(|path| plain(&path.display().to_string(), SHOWN)).collect();
    let more = paths.len().saturating_sub(NAMED);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

/// What was not written, for programs: the first of it, and how much it is.
fn not_written(dropped: &[Dropped]) -> Value {
    let entry = |dropped: &Dropped| {
        let what = match dropped.what {
            DroppedKind::GitProgram => "git-program",
            DroppedKind::IgnoreRules => "ignore-rules",
            DroppedKind::Device => "device",
            DroppedKind::SetId => "setid",
            DroppedKind::Capability => "capability",
        };
        json!({ "path": dropped.path.to_string_lossy(), "what": what })
    };
    let first: Vec<_> = dropped.iter().take(LISTED).map(entry).collect();
    json!({ "count": dropped.len(), "first": first })
}

/// Refuses to replace a directory that would lose what a result may not bring.
fn check_losses(dropped: &[Dropped]) -> anyhow::Result<()> {
    for (what, option) in
        [(DroppedKind::GitProgram, "--allow-git-hooks"), (DroppedKind::IgnoreRules, "--preserve-special")]
    {
        if let Some(Dropped { path, .. }) =
            dropped.iter().find(|dropped| dropped.is_other_there && dropped.what == what)
        {
            bail!(
                "the result has another {path:?} than the directory, and neither would be left; leave out --replace, or take that \
                 of the result with {option}"
            );
        }
    }
    Ok(())
}

/// Where the bytes of an artifact are; elsewhere than at the gateways in `avoid`, if possible.
pub(crate) async fn locate(
    connection: &Connection,
    artifact: ArtifactId,
    avoid: &[String],
) -> anyhow::Result<DownloadResponse> {
    let request = DownloadRequest {
        team: connection.team.clone(),
        artifact_id: artifact.to_string(),
        avoid_gateway_endpoints: avoid.to_vec(),
    };
    let streamer = connection.streamer();
    repeat("the artifact cannot be found", async || streamer.clone().download(request.clone()).await).await
}

/// Receives the worker's next message. Errors: the connection counts as cut after an hour of silence.
async fn next(answers: &mut Streaming<ReadResponse>) -> anyhow::Result<Option<ReadResponse>> {
    let message = tokio::time::timeout(SILENCE, answers.message()).await;
    Ok(message.map_err(|_| Refused::cut())?.map_err(Refused::from)?)
}

async fn receive_manifest(answers: &mut Streaming<ReadResponse>) -> anyhow::Result<Manifest> {
    let mut builder = ManifestBuilder::new(Limits::default());
    while let Some(ReadResponse { message }) = next(answers).await? {
        match message {
            Some(Answer::Manifest(part)) => {
                rpc::tree::push_part(&mut builder, &part)?;
            }
            Some(Answer::ManifestEnd(end)) => {
                let manifest = builder.finish()?;
                if tree::digest(&end.digest)? != manifest.tree_digest() {
                    bail!("what the artifact holds arrived damaged");
                }
                return Ok(manifest);
            }
            Some(Answer::Chunk(_) | Answer::Done(_)) => {
                bail!("the worker sent content before it was asked for any")
            }
            None => {}
        }
    }
    Err(Refused::cut().into())
}

fn ask(message: Ask) -> ReadRequest {
    ReadRequest { message: Some(message) }
}

/// Where an artifact goes.
#[derive(Debug, Clone)]
struct Target {
    path: PathBuf,
    /// Where the staging directory is made: beside the target, or within it when that is a file system of its own.
    staging: PathBuf,
}

impl Target {
    fn find(directory: &Path, replace: bool) -> anyhow::Result<Self> {
        let metadata = match directory.metadata() {
            Ok(metadata) if !metadata.is_dir() => bail!("it is no directory"),
            Ok(metadata) => Some(metadata),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error.into()),
        };
        let Some(metadata) = metadata else {
            let path = std::path::absolute(directory)?;
            let parent = path.parent().ok_or_else(|| anyhow!("it has no parent"))?;
            std::fs::create_dir_all(parent).with_context(|| format!("cannot make {parent:?}"))?;
            let parent = parent.canonicalize()?;
            let name = path.file_name().ok_or_else(|| anyhow!("it has no name"))?;
            return Ok(Self { path: parent.join(name), staging: parent });
        };
        let path = directory.canonicalize()?;
        if replace {
            check_replace(&path, &metadata)?;
        }
        let beside = beside(&path, &metadata);
        let staging = beside.unwrap_or(&path).to_owned();
        Ok(Self { path, staging })
    }
}

/// The directory around `path`, when something that is made there can be put in its place.
fn beside<'a>(path: &'a Path, metadata: &std::fs::Metadata) -> Option<&'a Path> {
    use std::os::unix::fs::MetadataExt;
    path.parent().filter(|parent| {
        parent.metadata().is_ok_and(|parent| parent.dev() == metadata.dev())
            && rustix::fs::access(*parent, rustix::fs::Access::WRITE_OK).is_ok()
    })
}

/// Whether something else can be put in the place of the directory `path`, which has no links in it.
pub(crate) fn check_replace(path: &Path, metadata: &std::fs::Metadata) -> anyhow::Result<()> {
    let here = std::env::current_dir()?;
    if here.starts_with(path) {
        bail!("we are in it, it cannot be replaced; run this elsewhere, or without --replace");
    }
    if beside(path, metadata).is_none() {
        bail!("it is a file system of its own, or its parent cannot be written; leave out --replace");
    }
    Ok(())
}

/// A directory of ours that goes with us, with what is left in it.
struct Staging(PathBuf);

impl Staging {
    fn make(parent: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let path = parent.join(format!(".gantry-{}", ArtifactId::new()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make a directory in {parent:?}"))?;
        Ok(Self(path))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = transfer::remove_tree(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "cannot remove a staging directory");
        }
    }
}

/// A tree that is being written.
struct Staged {
    writer: TreeWriter,
    matches: Matches,
    directory: Staging,
    remembered: Remembered,
}

impl Staged {
    fn put_in_place(self, target: &Target, manifest: &Manifest, replace: bool) -> anyhow::Result<()> {
        let Self { writer, matches, directory, mut remembered } = self;
        writer.finish()?;
        let changed = if replace {
            transfer::replace(&directory.0, &target.path)?;
            true
        } else {
            let options =
                MergeOptions { ownership: WrittenOwnership::Caller, strict: false, keep_root: true };
            let merged = transfer::merge(&directory.0, &target.path, manifest, &matches, options)
                .map_err(|error| in_the_way(error, &target.path))?;
            merged.replaced + merged.corrected > 0
        };
        if changed {
            let settle = ScanOptions::default().settle;
            transfer::remember(&target.path, manifest, &mut remembered.cache, settle);
        }
        if changed || matches.files_read() > 0 {
            remembered.save();
        }
        Ok(())
    }
}

/// What to do about a directory that keeps its place when results are merged.
fn in_the_way(error: MergeError, target: &Path) -> anyhow::Error {
    let MergeError::DirectoryInTheWay { path } = &error else { return error.into() };
    let replaceable = target.metadata().is_ok_and(|metadata| check_replace(target, &metadata).is_ok());
    let or = if replaceable { ", or put the result in the place of everything with --replace" } else { "" };
    anyhow!(
        "the result has something else where the directory {path:?} stands, which is not empty; move it away{or}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_is_beside_the_target() {
        let root = tempfile::tempdir().expect("a directory");
        let root = root.path().canonicalize().expect("there");
        let target = Target::find(&root.join("a/new"), false).expect("usable");
        assert_eq!((target.path, target.staging), (root.join("a/new"), root.join("a")));
        std::os::unix::fs::symlink("a", root.join("link")).expect("made");
        let target = Target::find(&root.join("link"), false).expect("usable");
        assert_eq!((target.path, target.staging), (root.join("a"), root.clone()));
        std::fs::write(root.join("file"), "").expect("written");
        assert!(Target::find(&root.join("file"), false).is_err());
    }

    #[test]
    fn we_are_never_replaced_from_within() {
        let here = std::env::current_dir().expect("somewhere");
        assert!(Target::find(&here, true).is_err());
        assert!(Target::find(Path::new("/"), true).is_err());
    }
}
