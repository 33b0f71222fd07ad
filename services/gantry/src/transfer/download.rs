//! Download of artifacts into directories.
//!
//! Content that the target has already is not fetched. The rest is written into a staging directory
//! beside the target and verified. Only then it is merged into the target or replaces it, so the
//! target never has partial files.
//!
//! A result in place changes only the entries that the command changed: see [`transfer::changes`].
//! Downloads into the same target are serialized: see [`crate::transfer::staging`].

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use domain::ArtifactId;
use rpc::compression::{self, SentBytes};
use rpc::pb::runtime::{
    Chunk, ExtentRunsEnd, ReadFileRequest, ReadOpen, ReadResponse, VerifyRequest,
    read_request::Message as RequestMessage, read_response::Message as ResponseMessage,
};
use rpc::pb::streamer::{DownloadRequest, DownloadResponse, TransferEndpoint};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};
use transfer::{
    Allowed, Conflict, Dropped, DroppedKind, Gone, Guarded, Manifest, Matches, OrdinalRanges, ScanError,
    ScanOptions, Standing, Subtree, TreeWriter, Trust, WriteError, WriteOptions, WrittenOwnership,
};

use crate::cli::args::AllowArgs;
use crate::client::connect::{Connection, Service};
use crate::client::why;
use crate::ending::error::{Refused, may_be_read};
use crate::render::progress::{Bar, Progress};
use crate::render::table::{bytes, count, duration, plain};
use crate::render::ui::Ui;
use crate::transfer::directories::refuse_links;
use crate::transfer::ignore;
use crate::transfer::receive::{LIST_LIMIT, MergeReport, Mode, StagedTree, next, receive_manifest, request};
use crate::transfer::staging::{Staging, Target, TargetLock};
use crate::transfer::tree::{self, DirectoryCache, StopOnDrop, describe_moved};

/// Maximum number of paths that a message names.
const NAMED_LIMIT: usize = 5;
/// Maximum number of characters of a path in a message.
const PATH_LIMIT: usize = 200;

/// Downloader of artifacts.
pub(crate) struct Downloader<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    /// Whether the artifact replaces the target instead of being merged into it.
    pub(crate) replace: bool,
    pub(crate) allow: AllowArgs,
    pub(crate) progress: Progress,
}

impl Downloader<'_> {
    /// Downloads an artifact into `directory`, which is created if necessary. `name` is used in
    /// messages.
    ///
    /// `base` is the tree that was uploaded from this directory, for a result in place. Then only
    /// entries that differ from it are written or removed.
    pub(crate) async fn download(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        base: Option<&Arc<Manifest>>,
    ) -> anyhow::Result<DownloadResult> {
        let (mut outage, mut avoid) = (self.connection.patience.of_call(), Vec::new());
        let bar = self.progress.bar("downloading", name);
        loop {
            bar.doing("downloading");
            let result = self.attempt(artifact, name, directory, base, &mut avoid, &bar).await;
            if let Some(refused) = result.as_ref().err().and_then(may_be_read)
                && outage.goes_on(None)
            {
                self.connection.wait_out(&mut outage, refused).await;
                continue;
            }
            let result = why::or_why(self.connection, &artifact.to_string(), result).await;
            return result.with_context(|| format!("cannot download {name} into {directory:?}"));
        }
    }

    /// Downloads once. Adds the gateway to `avoid`, for the next attempt.
    async fn attempt(
        &self,
        artifact: ArtifactId,
        name: &str,
        directory: &Path,
        base: Option<&Arc<Manifest>>,
        avoid: &mut Vec<String>,
        bar: &Bar,
    ) -> anyhow::Result<DownloadResult> {
        let started = Instant::now();
        if !self.allow.follow_links {
            refuse_links(directory)?;
        }
        let replaces = self.replace && base.is_none();
        let target = Target::find(directory, replaces)?;
        let lock = TargetLock::take(&target.path, self.ui).await;
        // An earlier download may have made or replaced the directory.
        let target = Target::find(directory, replaces)?;
        if replaces {
            let path = target.path.clone();
            tokio::task::spawn_blocking(move || ignore::refuse_unsent(&path))
                .await
                .context("the reader thread ended unexpectedly")??;
        }
        // The ticket is requested after the lock, because it may expire during the wait.
        let DownloadResponse { endpoint, digest, .. } = locate(self.connection, artifact, avoid).await?;
        let endpoint = endpoint.context("the streamer did not name a worker")?;
        let by_gateway = |status| Refused::from(status).by(gateway_of(&endpoint));
        let TransferEndpoint { gateway_endpoint, ticket, .. } = endpoint.clone();
        avoid.push(gateway_endpoint.clone());
        let path = target.path.clone();
        // This runs in parallel, because it takes about as long as the calls.
        let remembered = tokio::task::spawn_blocking(move || DirectoryCache::load("download", &path));

        let (requests, queue) = mpsc::channel(4);
        // This cannot fail: the queue is empty and its receiver exists.
        let accept_zstd = self.connection.crosses_network(&gateway_endpoint).await;
        _ = requests.send(request(RequestMessage::Open(ReadOpen { ticket, accept_zstd }))).await;
        let mut volumes = self.connection.volumes_at(&gateway_endpoint).await?;
        let mut responses = volumes.read(ReceiverStream::new(queue)).await.map_err(by_gateway)?.into_inner();
        let manifest = receive_manifest(&mut responses).await?;
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
        bar.expect(wanted_bytes);
        for runs in rpc::tree::runs(&tree.origins(&wanted)) {
            // A send fails only if the call has ended. Its response has the cause.
            _ = requests.send(request(RequestMessage::Want(runs))).await;
        }
        _ = requests.send(request(RequestMessage::WantEnd(ExtentRunsEnd { bytes: wanted_bytes }))).await;
        let received = receive_content(responses, staged, tree, bar.clone()).await;
        let (staged, wire) = match received {
            Err(error) if is_damage(&error) => {
                bar.doing("checking the stored copy");
                let request = VerifyRequest { ticket: endpoint.ticket.clone() };
                // A gateway of an earlier version does not have the call.
                return match volumes.verify(request).await {
                    Err(status) if status.code() != Code::Unimplemented => Err(by_gateway(status).into()),
                    _ => Err(error),
                };
            }
            received => received?,
        };
        drop(requests);

        let mode = match base {
            None if self.replace => Mode::Replace,
            None => Mode::Merge,
            Some(base) => {
                Mode::InPlace { standing: Box::new(standing.unwrap_or_default()), base: base.clone() }
            }
        };
        let progress = manifest.clone();
        let placed = tokio::task::spawn_blocking(move || {
            // The lock is held until everything is written, even if the command is interrupted.
            let _lock = lock;
            staged.put_in_place(&target, &progress, &mode)
        });
        let placed = placed.await.context("the writer thread ended unexpectedly")??;
        let fetched = describe_moved(SentBytes { content: wanted_bytes, wire }, "fetched");
        let fetched = format!("{fetched} in {}", duration(started.elapsed()));
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

    /// Selects the entries to write: those that the target may receive and, in place, those that
    /// the command changed.
    async fn compare(
        &self,
        target: &Target,
        manifest: &Arc<Manifest>,
        base: Option<&Arc<Manifest>>,
    ) -> anyhow::Result<Comparison> {
        let allowed =
            Allowed { git_programs: self.allow.allow_git_hooks, special: self.allow.preserve_special };
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
        compared.await.context("cannot compare the download with its directory: the task panicked")?
    }

    /// Prints the conflicts.
    fn say_placed(&self, name: &str, directory: &Path, placed: &MergeReport) {
        let at = |path: &Path| plain(&directory.join(path).display().to_string(), PATH_LIMIT);
        for Conflict { path, result } in placed.merged.iter().take(NAMED_LIMIT) {
            let path = at(path);
            self.ui.warn(&match result {
                Some(result) => format!(
                    "{name}: conflict: your changed {path} stays; the version of the command is {}",
                    at(result)
                ),
                None => format!("{name}: conflict: your changed {path} stays"),
            });
        }
        if let Some(more) = placed.merged.len().checked_sub(NAMED_LIMIT).filter(|more| *more > 0) {
            self.ui.warn(&format!(
                "{name}: {more} more conflicts; the versions of the command have names with `.gantry-result`"
            ));
        }
        let of = |paths: &[PathBuf]| named(&paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        let Gone { changed, protected, .. } = &placed.gone;
        if !changed.is_empty() {
            let paths = of(changed);
            self.ui.warn(&format!(
                "{name}: not removed as the command did, because you changed these entries or related ones: {paths}"
            ));
        }
        if !protected.is_empty() {
            let paths = of(protected);
            self.ui.warn(&format!(
                "{name}: not removed or moved as the command did: {paths}; allow it with --allow-git-hooks and --preserve-special"
            ));
        }
    }

    /// Prints the entries that were left out, and the options that write them.
    fn say_dropped(&self, artifact: ArtifactId, name: &str, dropped: &[Dropped]) {
        let is_git = |dropped: &&Dropped| dropped.what == DroppedKind::GitProgram;
        let git: Vec<_> = dropped.iter().filter(is_git).map(|dropped| dropped.path.as_path()).collect();
        if !git.is_empty() {
            let named = named(&git);
            self.ui.warn(&format!(
                "{name}: not written, because git, Mercurial or jj would run it: {named}; write it with --allow-git-hooks, or see artifact {artifact}"
            ));
        }
        let is_rule = |dropped: &&Dropped| dropped.what == DroppedKind::IgnoreRules;
        let rules: Vec<_> = dropped.iter().filter(is_rule).map(|dropped| dropped.path.as_path()).collect();
        if !rules.is_empty() {
            let named = named(&rules);
            self.ui.warn(&format!(
                "{name}: not written, because it controls what later uploads leave out: {named}; write it with --preserve-special, or see artifact {artifact}"
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

    /// Compares the target with the tree, and makes a writer for the rest. Also returns the extents
    /// to fetch.
    async fn stage(
        &self,
        target: &Target,
        manifest: &Arc<Manifest>,
        replace: bool,
        remembered: JoinHandle<DirectoryCache>,
    ) -> anyhow::Result<(StagedTree, OrdinalRanges)> {
        let mut remembered = remembered.await.context("the reader thread ended unexpectedly")?;
        let (target, manifest) = (target.clone(), manifest.clone());
        let stop = StopOnDrop(Arc::default());
        let stopped = stop.0.clone();
        let staging = tokio::task::spawn_blocking(move || {
            let options = ScanOptions { stop: Some(&stopped), ..ScanOptions::default() };
            let there =
                transfer::local_matches(&target.path, &manifest, &options, Some(&mut remembered.cache));
            let matches = match there {
                Ok(matches) => matches,
                // The target may be writable although it is not readable.
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
        staging.await.context("the writer thread ended unexpectedly")?
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
        self.ui.note(&format!("{name}: {}, {size} in {directory}, {fetched}", count_entries(entries)));
        details(artifact, name, &directory.to_string(), manifest)
    }

    /// Prints the changes of a result in place.
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
        let removed =
            if removed > 0 { format!(", {} removed", count_entries(removed)) } else { String::new() };
        let (written, directory) = (count_entries(placed.written), directory.display());
        self.ui.note(&format!("{name}: {written} written{removed} in {directory}, {fetched}"));
        details(artifact, name, &directory.to_string(), manifest)
    }
}

/// Formats a number of entries.
fn count_entries(entries: u64) -> String {
    count(entries, "entry").replace("entrys", "entries")
}

/// Makes the document about a download, for programs.
fn details(artifact: ArtifactId, name: &str, directory: &str, manifest: &Manifest) -> Value {
    json!({
        "name": name,
        "artifact_id": artifact.to_string(),
        "directory": directory,
        "entries": manifest.entries().len() - 1,
        "size_bytes": manifest.size_bytes(),
    })
}

/// Result of a download.
pub(crate) struct DownloadResult {
    /// Document for programs.
    pub(crate) details: Value,
    /// Whether an entry was changed both locally and by the command.
    pub(crate) has_conflicts: bool,
}

/// Received tree, compared with the target.
struct Comparison {
    /// Entries that may be written.
    tree: Subtree,
    dropped: Vec<Dropped>,
    /// State of the target, for a result in place.
    standing: Option<Standing>,
}

/// Formats the first paths, and the number of further ones.
fn named(paths: &[&Path]) -> String {
    let shown: Vec<_> =
        paths.iter().take(NAMED_LIMIT).map(|path| plain(&path.display().to_string(), PATH_LIMIT)).collect();
    let more = paths.len().saturating_sub(NAMED_LIMIT);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

/// Makes the document about entries that were left out, for programs.
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
    let first: Vec<_> = dropped.iter().take(LIST_LIMIT).map(entry).collect();
    json!({ "count": dropped.len(), "first": first })
}

/// Rejects a replacement that would lose an entry of the directory whose new version may not be
/// written.
fn check_losses(dropped: &[Dropped]) -> anyhow::Result<()> {
    for (what, option) in
        [(DroppedKind::GitProgram, "--allow-git-hooks"), (DroppedKind::IgnoreRules, "--preserve-special")]
    {
        if let Some(Dropped { path, .. }) =
            dropped.iter().find(|dropped| dropped.is_other_there && dropped.what == what)
        {
            bail!(
                "the result has another version of {path:?}, and --replace would leave neither; leave out --replace, or write the version \
                 of the result with {option}"
            );
        }
    }
    Ok(())
}

/// Names the gateway of a transfer for messages.
pub(crate) fn gateway_of(endpoint: &TransferEndpoint) -> String {
    format!("the gateway at {}", endpoint.gateway_endpoint)
}

/// Asks the streamer for a gateway with the bytes of an artifact, preferably none of `avoid`.
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
    let mut streamer = connection.streamer();
    // The caller repeats the whole transfer.
    let located = connection.call(Service::Streamer, streamer.download(request)).await;
    located.context("cannot locate the artifact")
}

/// Reads a file of an artifact with at most `limit` bytes.
pub(crate) async fn read_file(
    connection: &Connection,
    artifact: ArtifactId,
    path: &'static str,
    limit: u64,
) -> anyhow::Result<Vec<u8>> {
    let DownloadResponse { endpoint, .. } = locate(connection, artifact, &[]).await?;
    let endpoint = endpoint.context("the streamer did not name a worker")?;
    let by_gateway = |status| Refused::from(status).by(gateway_of(&endpoint));
    let request = ReadFileRequest { ticket: endpoint.ticket.clone(), path: path.into() };
    let mut volumes = connection.volumes_at(&endpoint.gateway_endpoint).await?;
    let mut pieces = volumes.read_file(request).await.map_err(by_gateway)?.into_inner();
    let (mut contents, mut size_bytes) = (Vec::new(), 0);
    while let Some(piece) = pieces.message().await.map_err(by_gateway)? {
        contents.extend_from_slice(&piece.data);
        size_bytes = size_bytes.max(piece.size_bytes);
        if size_bytes.max(contents.len() as u64) > limit {
            bail!("the file {path} has more than {}", bytes(limit));
        }
    }
    if (contents.len() as u64) < size_bytes {
        return Err(Refused::cut().into());
    }
    Ok(contents)
}

/// Receives the requested contents. Also returns the bytes that they took on the network.
/// Whether the worker sent other content than the manifest declares.
fn is_damage(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(WriteError::DigestMismatch { .. }))
}

async fn receive_content(
    mut responses: Streaming<ReadResponse>,
    staged: StagedTree,
    tree: Arc<Subtree>,
    bar: Bar,
) -> anyhow::Result<(StagedTree, u64)> {
    let (chunks, mut queue) = mpsc::channel::<Chunk>(4);
    let writing = tokio::task::spawn_blocking(move || {
        let mut staged = staged;
        while let Some(chunk) = queue.blocking_recv() {
            for extent in chunk.extents {
                let ordinal =
                    tree.ordinal(extent.ordinal).context("the worker sent content that was not requested")?;
                staged.writer.put(ordinal, &extent.data)?;
                bar.advance(extent.data.len() as u64);
            }
        }
        Ok::<_, anyhow::Error>(staged)
    });
    let received = async {
        let mut wire = 0;
        while let Some(ReadResponse { message }) = next(&mut responses).await? {
            let chunk: Chunk = match message {
                Some(ResponseMessage::Chunk(chunk)) => {
                    wire += chunk.extents.iter().map(|extent| extent.data.len() as u64).sum::<u64>();
                    chunk
                }
                Some(ResponseMessage::ZstdChunk(frame)) => {
                    wire += frame.len() as u64;
                    compression::decode(frame).await?
                }
                Some(ResponseMessage::Done(_)) => return Ok(wire),
                Some(
                    ResponseMessage::Manifest(_)
                    | ResponseMessage::ZstdManifest(_)
                    | ResponseMessage::ManifestEnd(_),
                )
                | None => continue,
            };
            if chunks.send(chunk).await.is_err() {
                // The writer has failed, and its result has the cause.
                return Ok(wire);
            }
        }
        Err(anyhow::Error::from(Refused::cut()))
    };
    let received = received.await;
    drop(chunks);
    let staged = writing.await.context("the writer thread ended unexpectedly")??;
    received.map(|wire| (staged, wire))
}
