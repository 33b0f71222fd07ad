//! Artifacts become directories.
//!
//! What the target has already is not fetched. The rest is written into a staging directory beside it, verified, and only then merged
//! into the target or put in its place: nothing partial is ever seen there.
//!
//! A directory that was sent and comes back gets what the command changed and nothing else: see [`transfer::changes`]. One download at
//! a time goes into a target: see [`crate::transfer::staging`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use domain::ArtifactId;
use rpc::pb::runtime::{
    ExtentRunsEnd, ReadOpen, ReadResponse, read_request::Message as Ask, read_response::Message as Answer,
};
use rpc::pb::streamer::{DownloadRequest, DownloadResponse, GoTo};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use transfer::{
    Allowed, Conflict, Dropped, DroppedKind, Gone, Guarded, Manifest, Matches, OrdinalRanges, ScanError,
    ScanOptions, Standing, Subtree, TreeWriter, Trust, WriteOptions, WrittenOwnership,
};

use crate::cli::args::TakeArgs;
use crate::client::connect::{Connection, Pause, TRANSFER_TRIES, repeat};
use crate::client::why;
use crate::ending::error::{Refused, is_transient};
use crate::render::progress::Progress;
use crate::render::table::{bytes, count, duration, plain};
use crate::render::ui::Ui;
use crate::transfer::directories::refuse_links;
use crate::transfer::ignore;
use crate::transfer::receive::{LISTED, MergeReport, Mode, StagedTree, ask, next, receive_manifest};
use crate::transfer::staging::{Staging, Target, TargetLock};
use crate::transfer::tree::{self, DirectoryCache, StopOnDrop};

/// How many paths that were not written are named.
const NAMED: usize = 5;
/// How many characters of each.
const SHOWN: usize = 200;

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
    ///
    /// `base` is the tree that was sent from this directory, if it was: only what differs from it is written, and with `replace` removed.
    pub(crate) async fn download(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        base: Option<&Arc<Manifest>>,
    ) -> anyhow::Result<DownloadResult> {
        let (mut pause, mut avoid) = (Pause::default(), Vec::new());
        for attempt in 1.. {
            self.progress.doing("downloading", name);
            match self.attempt(artifact, name, directory, base, &mut avoid).await {
                Err(error) if is_transient(&error) && attempt < TRANSFER_TRIES => {
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
        base: Option<&Arc<Manifest>>,
        avoid: &mut Vec<String>,
    ) -> anyhow::Result<DownloadResult> {
        let started = Instant::now();
        if !self.take.follow_links {
            refuse_links(directory)?;
        }
        let replaces = self.replace && base.is_none();
        let target = Target::find(directory, replaces)?;
        let lock = TargetLock::take(&target.path, self.ui).await;
        // The download before it may have made or replaced the directory.
        let target = Target::find(directory, replaces)?;
        if replaces {
            let path = target.path.clone();
            tokio::task::spawn_blocking(move || ignore::refuse_unsent(&path))
                .await
                .context("reading ended unexpectedly")??;
        }
        // Only now: a ticket may expire while the download waits for another one.
        let DownloadResponse { go_to, digest, .. } = locate(self.connection, artifact, avoid).await?;
        let GoTo { gateway_endpoint, ticket, .. } = go_to.context("the streamer named no worker")?;
        avoid.push(gateway_endpoint.clone());
        let path = target.path.clone();
        // Meanwhile, as it takes about as long.
        let remembered = tokio::task::spawn_blocking(move || DirectoryCache::load("download", &path));

        let (asks, queue) = mpsc::channel(4);
        // The queue is empty and its other end is there.
        _ = asks.send(ask(Ask::Open(ReadOpen { ticket }))).await;
        let mut volumes = self.connection.volumes_at(&gateway_endpoint).await?;
        let mut answers = volumes.read(ReceiverStream::new(queue)).await.map_err(Refused::from)?.into_inner();
        let manifest = receive_manifest(&mut answers).await?;
        if tree::digest(&digest)? != manifest.tree_digest() {
            bail!("the worker sent another tree than that of the artifact");
        }

        let whole = Arc::new(manifest);
        let Comparison { tree, dropped, standing } = self.compare(&target, &whole, base).await?;
        if replaces {
            check_losses(&dropped)?;
        }
        let (manifest, tree) = (tree.manifest().clone(), Arc::new(tree));
        let (staged, wanted) = self.stage(&target, &manifest, replaces, remembered).await?;
        let wanted_bytes = manifest.bytes_of(&wanted);
        self.progress.expect(wanted_bytes);
        for runs in rpc::tree::runs(&tree.origins(&wanted)) {
            // When sending fails the call has ended, and its answers say why.
            _ = asks.send(ask(Ask::Want(runs))).await;
        }
        _ = asks.send(ask(Ask::WantEnd(ExtentRunsEnd { bytes: wanted_bytes }))).await;
        let staged = self.receive_content(answers, staged, tree).await?;
        drop(asks);

        let mode = match base {
            None if self.replace => Mode::Replace,
            None => Mode::Merge,
            Some(base) => {
                Mode::InPlace { standing: Box::new(standing.unwrap_or_default()), base: base.clone() }
            }
        };
        let progress = manifest.clone();
        let placed = tokio::task::spawn_blocking(move || {
            // The lock is held until all is written, also if the command is interrupted.
            let _lock = lock;
            staged.put_in_place(&target, &progress, &mode)
        });
        let placed = placed.await.context("writing ended unexpectedly")??;
        let fetched = format!("{} fetched in {}", bytes(wanted_bytes), duration(started.elapsed()));
        let mut details = match base {
            Some(_) => self.say_changed(artifact, name, directory, &placed, &whole, &fetched),
            None => self.say(artifact, name, directory, &manifest, &fetched),
        };
        details["fetched_bytes"] = wanted_bytes.into();
        self.say_dropped(artifact, name, &dropped);
        self.say_placed(name, directory, &placed);
        details["not_written"] = not_written(&dropped);
        details["conflicts"] = placed.conflicts();
        details["removed_entries"] = placed.gone.removed.into();
        self.ui.event("downloaded", details.clone());
        let has_conflicts = !placed.merged.is_empty() || !placed.gone.changed.is_empty();
        Ok(DownloadResult { details, has_conflicts })
    }

    /// Leaves out what the target does not take and, of what was sent from it, what the command left alone.
    async fn compare(
        &self,
        target: &Target,
        manifest: &Arc<Manifest>,
        base: Option<&Arc<Manifest>>,
    ) -> anyhow::Result<Comparison> {
        let allowed =
            Allowed { git_programs: self.take.allow_git_hooks, special: self.take.preserve_special };
        let (path, manifest, base) = (target.path.clone(), manifest.clone(), base.cloned());
        let compared = tokio::task::spawn_blocking(move || {
            let Some(base) = base else {
                let Guarded { tree, dropped } = transfer::guard(&path, &manifest, allowed)?;
                return Ok(Comparison { tree, dropped, standing: None });
            };
            let changes = transfer::changes(&base, &manifest)?;
            let Guarded { tree, dropped } = transfer::guard(&path, changes.manifest(), allowed)?;
            let standing = Standing::of(&path, &base, tree.manifest(), &manifest, &dropped, allowed);
            Ok::<_, anyhow::Error>(Comparison {
                tree: tree.within(&changes),
                dropped,
                standing: Some(standing),
            })
        });
        compared.await.context("reading ended unexpectedly")?
    }

    /// Names what was changed on both sides.
    fn say_placed(&self, name: &str, directory: &Path, placed: &MergeReport) {
        let at = |path: &Path| plain(&directory.join(path).display().to_string(), SHOWN);
        for Conflict { path, result } in placed.merged.iter().take(NAMED) {
            let path = at(path);
            self.ui.warn(&match result {
                Some(result) => format!(
                    "{name}: {path} was changed here while the command ran, and stays; the version of the command is {}",
                    at(result)
                ),
                None => format!("{name}: {path} was changed here while the command ran, and stays"),
            });
        }
        if let Some(more) = placed.merged.len().checked_sub(NAMED).filter(|more| *more > 0) {
            self.ui.warn(&format!(
                "{name}: and {more} more, each beside what was changed, with `.gantry-result`"
            ));
        }
        let of = |paths: &[PathBuf]| named(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        let Gone { changed, protected, .. } = &placed.gone;
        if !changed.is_empty() {
            let paths = of(changed);
            self.ui.warn(&format!(
                "{name}: kept although the command removed it, for it or what belongs to it was changed here meanwhile: {paths}"
            ));
        }
        if !protected.is_empty() {
            let paths = of(protected);
            self.ui.warn(&format!(
                "{name}: kept although the command removed or moved it: {paths}; let it go with --allow-git-hooks and --preserve-special"
            ));
        }
    }

    /// Names what was not written, and what writes it.
    fn say_dropped(&self, artifact: ArtifactId, name: &str, dropped: &[Dropped]) {
        let is_git = |dropped: &&Dropped| dropped.what == DroppedKind::GitProgram;
        let git: Vec<_> = dropped.iter().filter(is_git).map(|dropped| dropped.path.as_path()).collect();
        if !git.is_empty() {
            let named = named(&git);
            self.ui.warn(&format!(
                "{name}: not written, for git, Mercurial or jj would run it: {named}; write it with --allow-git-hooks, or see artifact {artifact}"
            ));
        }
        let is_rule = |dropped: &&Dropped| dropped.what == DroppedKind::IgnoreRules;
        let rules: Vec<_> = dropped.iter().filter(is_rule).map(|dropped| dropped.path.as_path()).collect();
        if !rules.is_empty() {
            let named = named(&rules);
            self.ui.warn(&format!(
                "{name}: not written, for it decides what later uploads leave out: {named}; write it with --preserve-special, or see artifact {artifact}"
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
        replace: bool,
        remembered: JoinHandle<DirectoryCache>,
    ) -> anyhow::Result<(StagedTree, OrdinalRanges)> {
        let mut remembered = remembered.await.context("reading ended unexpectedly")?;
        let (target, manifest) = (target.clone(), manifest.clone());
        let stop = StopOnDrop(Arc::default());
        let stopped = stop.0.clone();
        let staging = tokio::task::spawn_blocking(move || {
            let options = ScanOptions { stop: Some(&stopped), ..ScanOptions::default() };
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
            let mut writer = TreeWriter::new(&directory.path, manifest.clone(), options)?;
            if replace {
                matches.copy_from(&target.path, &mut writer, Trust::Verify)?;
            } else {
                matches.prepare(&target.path, &mut writer)?;
            }
            let wanted = writer.missing();
            Ok::<_, anyhow::Error>((StagedTree { writer, matches, directory, remembered }, wanted))
        });
        staging.await.context("writing ended unexpectedly")?
    }

    async fn receive_content(
        &self,
        mut answers: Streaming<ReadResponse>,
        staged: StagedTree,
        tree: Arc<Subtree>,
    ) -> anyhow::Result<StagedTree> {
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
        fetched: &str,
    ) -> Value {
        let (entries, size) = (manifest.entries().len() as u64 - 1, bytes(manifest.size_bytes()));
        let directory = directory.display();
        self.ui.note(&format!("{name}: {}, {size} now in {directory}, {fetched}", counted(entries)));
        details(artifact, name, &directory.to_string(), manifest)
    }

    /// Says what was changed in a directory that was sent.
    fn say_changed(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        placed: &MergeReport,
        manifest: &Manifest,
        fetched: &str,
    ) -> Value {
        let removed = placed.gone.removed;
        let removed = if removed > 0 { format!(", {} removed", counted(removed)) } else { String::new() };
        let (written, directory) = (counted(placed.written), directory.display());
        self.ui.note(&format!("{name}: {written} written{removed} in {directory}, {fetched}"));
        details(artifact, name, &directory.to_string(), manifest)
    }
}

/// A number of entries, for people.
fn counted(entries: u64) -> String {
    count(entries, "entry").replace("entrys", "entries")
}

/// What came, for programs.
fn details(artifact: ArtifactId, name: &str, directory: &str, manifest: &Manifest) -> Value {
    json!({
        "name": name,
        "artifact_id": artifact.to_string(),
        "directory": directory,
        "entries": manifest.entries().len() - 1,
        "size_bytes": manifest.size_bytes(),
    })
}

/// An artifact that was brought.
pub(crate) struct DownloadResult {
    /// What was done, for programs.
    pub(crate) details: Value,
    /// Whether something was changed in the directory and by the command.
    pub(crate) has_conflicts: bool,
}

/// A tree that came, compared with the directory that it goes into.
struct Comparison {
    /// What may be written.
    tree: Subtree,
    dropped: Vec<Dropped>,
    /// For a directory that was sent.
    standing: Option<Standing>,
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
