//! Upload of directories as artifacts.
//!
//! ```text
//! scan ──▶ Streamer.Upload{digest} ──▶ uploaded (the cluster has these bytes)
//!                                └──▶ endpoint: Volumes.Write of missing bytes ──▶ commit ──▶ uploaded
//! ```

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context, bail};
use domain::{ArtifactId, BuildId};
use images::ImageTree;
use rpc::Reason;
use rpc::compression::{ACCEPT_HEADER, SentBytes};
use rpc::pb::artifacts::{CreateArtifactRequest, SmallTree};
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::{WriteResponse, write_response::Message as ResponseMessage};
use rpc::pb::streamer::{
    TransferEndpoint, UploadCommit, UploadOpen, UploadRequest, UploadResponse, upload_request,
    upload_response,
};
use rpc::small_tree::NotSmall;
use serde_json::json;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use transfer::{
    Manifest, OrdinalRanges, Problem, ProblemKind, ReadOptions, ScanError, ScanOptions, TreeReader,
};

use crate::cli::args::ScanArgs;
use crate::client::connect::{Connection, Service};
use crate::cluster::Paths;
use crate::ending::error::{Refused, may_pass, refusal, refused, with_advice};
use crate::render::labels;
use crate::render::progress::{Bar, Progress};
use crate::render::table::{bytes, count, duration};
use crate::render::ui::Ui;
use crate::transfer::directories::inside;
use crate::transfer::download::gateway_of;
use crate::transfer::ignore::Rules;
use crate::transfer::send::{Answers, Content, FullWorkers, SendError, send_tree};
use crate::transfer::staging;
use crate::transfer::tree::{self, DirectoryCache, StopOnDrop, describe_moved};

/// Number of attempts to send a directory whose files change.
const TRIES: usize = 4;
/// Maximum number of problems that a message names.
const NAMED_LIMIT: usize = 10;

/// Returns whether a problem is an expected omission: a socket or an extended attribute.
fn is_left_out(problem: &Problem) -> bool {
    matches!(problem.what, ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_))
}

/// Uploader of directories.
pub(crate) struct Uploader<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    pub(crate) scan: &'a ScanArgs,
    /// Build that owns the uploaded artifacts.
    pub(crate) build: Option<BuildId>,
    pub(crate) progress: Progress,
}

/// Directory to upload, with a name for messages and labels.
pub(crate) struct Directory<'a> {
    pub(crate) name: &'a str,
    pub(crate) path: &'a Path,
    /// Paths that are left out, relative to the directory.
    pub(crate) left_out: Vec<PathBuf>,
}

impl Uploader<'_> {
    /// Uploads a directory. Returns the artifact, which may have existed before, and its tree.
    pub(crate) async fn upload(
        &self,
        directory: &Directory<'_>,
    ) -> anyhow::Result<(ArtifactId, Arc<Manifest>)> {
        let Directory { name, path, .. } = directory;
        let started = Instant::now();
        let own = own_state(path);
        for state in &own {
            self.ui.note(&format!(
                "{name}: {} is left out, because the cluster keeps its state there",
                state.display()
            ));
        }
        let left_out = directory.left_out.iter().cloned().chain(own).collect();
        let directory = &Directory { left_out, ..*directory };
        let mut outage = self.connection.patience.of_call();
        let (mut changes, mut full) = (0, FullWorkers::default());
        let bar = self.progress.bar("scanning", name);
        loop {
            bar.doing("scanning");
            let scanned = self.scan(directory).await.with_context(|| format!("cannot upload {path:?}"))?;
            self.check(name, &scanned.problems)?;
            bar.doing("uploading");
            let content = Content::Directory(directory.path.to_owned());
            let sent = match self.send(name, &content, &scanned.manifest, &bar, &full).await {
                Err(SendError::Mismatch) => {
                    Err(SendError::Changed(self.changed(directory, &scanned.manifest).await))
                }
                sent => sent,
            };
            match sent {
                Ok(sent) => {
                    drop(bar);
                    self.say(name, &scanned.manifest, &sent, started);
                    return Ok((sent.artifact, scanned.manifest));
                }
                Err(SendError::Changed(message)) if !self.scan.allow_changed => {
                    bail!(
                        "cannot upload {path:?}: {message} during the upload; try again, or allow it with --allow-changed"
                    );
                }
                Err(SendError::Changed(message)) => {
                    changes += 1;
                    if changes >= TRIES {
                        bail!(
                            "cannot upload {path:?}: {message} during each of {TRIES} attempts; leave out files that always change with \
                             .gantryignore"
                        );
                    }
                    self.ui.warn(&format!("{name}: {message} during the upload; retrying"));
                }
                Err(SendError::DiskFull(endpoint, error)) => {
                    full.add(endpoint, error);
                }
                Err(SendError::Other(error)) => match may_pass(&error) {
                    Some(refused) if outage.goes_on(None) => {
                        self.connection.wait_out(&mut outage, refused).await;
                    }
                    _ => return Err(full.cause(error).context(format!("cannot upload {path:?}"))),
                },
                Err(SendError::Mismatch) => bail!("cannot upload {path:?}: its files changed"),
            }
        }
    }

    /// Uploads a small directory into the artifact store in one call, without a worker.
    pub(crate) async fn upload_inline(&self, directory: &Directory<'_>) -> anyhow::Result<ArtifactId> {
        let Directory { name, path, .. } = directory;
        let left_out = directory.left_out.iter().cloned().chain(own_state(path)).collect();
        let directory = &Directory { left_out, ..*directory };
        let doing = format!("cannot upload {path:?} with --inline");
        let scanned = self.scan(directory).await.with_context(|| doing.clone())?;
        self.check(name, &scanned.problems)?;
        let tree =
            small_tree(path.to_path_buf(), scanned.manifest.clone()).await.with_context(|| doing.clone())?;
        let artifact = ArtifactId::new();
        let request = CreateArtifactRequest {
            artifact_id: artifact.to_string(),
            team: self.connection.team.clone(),
            build_id: self.build.map(|build| build.to_string()).unwrap_or_default(),
            label: (*name).to_owned(),
            tree: Some(tree),
        };
        let client = self.connection.artifacts();
        self.connection
            .repeat(Service::ArtifactStore, &doing, async || {
                client.clone().create_artifact(request.clone()).await
            })
            .await?;
        let (entries, size) = (entries(&scanned.manifest), scanned.manifest.size_bytes());
        self.ui.step(&format!("{name}: {}, kept {}", amount(&scanned.manifest), labels::IN_STORE));
        self.uploaded(name, artifact, entries, size, size);
        Ok(artifact)
    }

    async fn scan(&self, directory: &Directory<'_>) -> anyhow::Result<ScanResult> {
        let stop = StopOnDrop(Arc::new(AtomicBool::new(false)));
        let (path, left_out) = (directory.path.to_owned(), directory.left_out.clone());
        let (gitignore, stopped) = (self.scan.gitignore, stop.0.clone());
        let scanned = tokio::task::spawn_blocking(move || {
            let root = path.canonicalize()?;
            let rules = Rules::new(&root, gitignore, left_out);
            let exclude = |path: &Path, is_directory| {
                path.file_name().is_some_and(staging::is_staging) || rules.exclude(path, is_directory)
            };
            let mut remembered = DirectoryCache::load("upload", &root);
            let options = ScanOptions {
                ownership: transfer::ScannedOwnership::Root,
                exclude: Some(&exclude),
                stop: Some(&stopped),
                ..ScanOptions::default()
            };
            let scan = transfer::scan(&root, &options, Some(&mut remembered.cache))?;
            rules.finish()?;
            remembered.save();
            Ok::<_, anyhow::Error>(ScanResult { manifest: Arc::new(scan.manifest), problems: scan.problems })
        });
        scanned.await.context("the scan ended unexpectedly")?.map_err(|error| {
            match error.downcast::<ScanError>() {
                // The caller adds the operation and the path.
                Ok(ScanError::Root(error)) => error.into(),
                Ok(error) => error.into(),
                Err(error) => error,
            }
        })
    }

    /// Fails if files cannot be read or have changed, or only warns if that is allowed.
    fn check(&self, name: &str, problems: &[Problem]) -> anyhow::Result<()> {
        let sockets =
            problems.iter().filter(|problem| matches!(problem.what, ProblemKind::SkippedSocket)).count();
        if sockets > 0 {
            self.ui.note(&format!("{name}: {} left out", count(sockets as u64, "socket")));
        }
        let wrong: Vec<_> = problems.iter().filter(|problem| !is_left_out(problem)).collect();
        let attributed: Vec<_> =
            problems.iter().filter(|problem| matches!(problem.what, ProblemKind::SkippedXattr(_))).collect();
        if let Some(first) = attributed.first() {
            let paths = count(attributed.len() as u64, "path");
            self.ui.note(&format!("{name}: extended attributes of {paths} left out; the first: {first}"));
        }
        if wrong.is_empty() {
            return Ok(());
        }
        let mut list = String::new();
        for problem in wrong.iter().take(NAMED_LIMIT) {
            // Writing to a string cannot fail.
            _ = write!(list, "\n  {problem}");
            if let ProblemKind::Unreadable(error) = &problem.what {
                _ = write!(list, ": {}", crate::ending::error::without_number(&error.to_string()));
            }
        }
        if wrong.len() > NAMED_LIMIT {
            _ = write!(list, "\n  and {} more", wrong.len() - NAMED_LIMIT);
        }
        if self.scan.allow_changed {
            self.ui.warn(&format!("{name}: uploaded despite these problems:{list}"));
            return Ok(());
        }
        bail!(
            "cannot upload {name}: {} cannot be read or changed; leave out unneeded files with .gantryignore, or \
             allow it with --allow-changed:{list}",
            count(wrong.len() as u64, "path")
        )
    }

    fn say(&self, name: &str, manifest: &Manifest, sent: &SendResult, started: Instant) {
        let what = format!("{name}: {}", amount(manifest));
        let took = duration(started.elapsed());
        self.ui.step(&match sent.bytes {
            None => format!("{what}, already in the cluster as artifact {}", sent.artifact),
            Some(sent) => format!("{what}, {} in {took}", describe_moved(sent, "sent")),
        });
        let sent_bytes = sent.bytes.unwrap_or_default().content;
        self.uploaded(name, sent.artifact, entries(manifest), manifest.size_bytes(), sent_bytes);
    }

    fn uploaded(&self, name: &str, artifact: ArtifactId, entries: u64, size_bytes: u64, sent_bytes: u64) {
        self.ui.event(
            "uploaded",
            json!({
                "name": name,
                "artifact_id": artifact.to_string(),
                "entries": entries,
                "size_bytes": size_bytes,
                "sent_bytes": sent_bytes,
            }),
        );
    }

    /// Uploads an image. Returns its artifact, which may have existed before.
    pub(crate) async fn upload_image(&self, name: &str, image: Arc<ImageTree>) -> anyhow::Result<ArtifactId> {
        let (started, manifest) = (Instant::now(), image.manifest().clone());
        let content = Content::Image(image);
        let mut outage = self.connection.patience.of_call();
        let mut full = FullWorkers::default();
        let bar = self.progress.bar("uploading", name);
        loop {
            bar.doing("uploading");
            match self.send(name, &content, &manifest, &bar, &full).await {
                Ok(sent) => {
                    drop(bar);
                    self.say(name, &manifest, &sent, started);
                    return Ok(sent.artifact);
                }
                Err(SendError::DiskFull(endpoint, error)) => {
                    full.add(endpoint, error);
                }
                Err(SendError::Other(error)) => match may_pass(&error) {
                    Some(refused) if outage.goes_on(None) => {
                        self.connection.wait_out(&mut outage, refused).await;
                    }
                    _ => return Err(full.cause(error).context(format!("cannot upload image {name}"))),
                },
                Err(SendError::Changed(_) | SendError::Mismatch) => {
                    bail!("cannot upload image {name}: its files changed; repeat the command")
                }
            }
        }
    }

    async fn send(
        &self,
        label: &str,
        content: &Content,
        manifest: &Arc<Manifest>,
        bar: &Bar,
        full: &FullWorkers,
    ) -> Result<SendResult, SendError> {
        let digest = manifest.tree_digest().as_bytes().to_vec();
        let (requests, queue) = mpsc::channel(2);
        let open = UploadOpen {
            team: self.connection.team.clone(),
            artifact_id: ArtifactId::new().to_string(),
            digest: digest.clone().into(),
            build_id: self.build.map(|build| build.to_string()).unwrap_or_default(),
            label: label.to_owned(),
            avoid_worker_ids: full.ids.clone(),
        };
        let request = |message| UploadRequest { message: Some(message) };
        let by_streamer = |status| self.connection.refused_by(Service::Streamer, status);
        // This cannot fail: the queue is empty and its receiver exists.
        _ = requests.send(request(upload_request::Message::Open(open))).await;
        let mut streamer = self.connection.streamer();
        // The streamer accepts the call at once, and works on it afterwards.
        let upload = streamer.upload(ReceiverStream::new(queue));
        let mut answers = self.connection.call(Service::Streamer, upload).await?;

        let mut sent = None;
        loop {
            let UploadResponse { message } =
                answers.message().await.map_err(by_streamer)?.ok_or_else(Refused::cut)?;
            match message {
                Some(upload_response::Message::Uploaded(uploaded)) => {
                    let artifact =
                        uploaded.artifact_id.parse().context("the streamer named an invalid artifact id")?;
                    return Ok(SendResult { artifact, bytes: sent });
                }
                Some(upload_response::Message::Endpoint(endpoint)) => {
                    // A message before all content was sent is an error.
                    let written = tokio::select! {
                        written = self.write(&endpoint, content, manifest, bar) => {
                            written.map_err(|error| error.on(&endpoint, full))?
                        }
                        early = answers.message() => {
                            return Err(early.err().map_or_else(Refused::cut, by_streamer).into());
                        }
                    };
                    sent = Some(written);
                    let commit = UploadCommit { digest: digest.clone().into() };
                    // If this fails, the response has the cause.
                    _ = requests.send(request(upload_request::Message::Commit(commit))).await;
                }
                None => {}
            }
        }
    }

    /// Fills the volume. Returns the sizes of the sent contents.
    async fn write(
        &self,
        endpoint: &TransferEndpoint,
        content: &Content,
        manifest: &Arc<Manifest>,
        bar: &Bar,
    ) -> Result<SentBytes, SendError> {
        let mut volumes: VolumesClient<_> = self.connection.volumes_at(&endpoint.gateway_endpoint).await?;
        let by_gateway = |status| Refused::from(status).by(gateway_of(endpoint));
        let (requests, queue) = mpsc::channel(4);
        let (missing_known, missing) = oneshot::channel();
        let crosses_network = self.connection.crosses_network(&endpoint.gateway_endpoint).await;
        let (started, may_compress) = watch::channel((!crosses_network).then_some(false));
        let (ticket, content) = (endpoint.ticket.clone(), content.clone());
        let answers = Answers { may_compress, missing };
        let sending = send_tree(ticket, content, manifest.clone(), answers, requests);
        let mut sender = JoinSet::new();
        sender.spawn(sending);

        let answers = async {
            let response = volumes.write(ReceiverStream::new(queue)).await.map_err(by_gateway)?;
            let accepts = response.metadata().contains_key(ACCEPT_HEADER);
            started.send_replace(Some(crosses_network && accepts));
            let mut answers = response.into_inner();
            let mut missing_known = Some(missing_known);
            let mut missing = OrdinalRanges::new();
            let mut wanted = 0;
            while let Some(WriteResponse { message }) = answers.message().await.map_err(by_gateway)? {
                match message {
                    Some(ResponseMessage::Missing(runs)) => {
                        let pushed = rpc::tree::push_runs(&mut missing, &runs);
                        pushed.context("the worker requested content that does not exist")?;
                    }
                    Some(ResponseMessage::MissingEnd(_)) => {
                        wanted = manifest.bytes_of(&missing);
                        bar.expect(wanted);
                        if let Some(known) = missing_known.take() {
                            // A missing receiver means that the sender has failed, and its result
                            // has the cause.
                            _ = known.send(std::mem::take(&mut missing));
                        }
                    }
                    Some(ResponseMessage::Progress(progress)) => {
                        bar.reach(progress.bytes);
                    }
                    Some(ResponseMessage::Committed(committed)) => {
                        bar.reach(wanted);
                        if tree::digest(&committed.digest)? != manifest.tree_digest() {
                            return Err(anyhow::anyhow!(
                                "the worker wrote another tree than the one that was sent"
                            )
                            .into());
                        }
                        return Ok(());
                    }
                    None => {}
                }
            }
            Err(Refused::cut().into())
        };
        let answered: Result<(), SendError> = answers.await;
        match answered {
            // The gateway committed, so the sender has ended without an error.
            Ok(()) => match sender.join_next().await {
                Some(Ok(sent)) => sent,
                Some(Err(_)) | None => Err(Refused::cut().into()),
            },
            Err(SendError::Other(error)) => {
                if refusal(&error).is_some_and(|refused| refused.is(Reason::DigestMismatch)) {
                    return Err(SendError::Mismatch);
                }
                // An error of the sender also broke the call.
                if let Some(Ok(Err(cause))) = sender.try_join_next() {
                    return Err(cause);
                }
                Err(SendError::Other(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Scans the directory again, and names the files that have changed.
    async fn changed(&self, directory: &Directory<'_>, manifest: &Manifest) -> String {
        let Ok(now) = self.scan(directory).await else { return "the directory changed".to_owned() };
        let before: HashMap<_, _> =
            manifest.entries().iter().map(|entry| (&entry.path, entry.extents())).collect();
        let mut changed = now
            .manifest
            .entries()
            .iter()
            .filter(|entry| before.get(&entry.path) != Some(&entry.extents()))
            .map(transfer::Entry::path);
        match (changed.next(), changed.count()) {
            (None, _) => "a file changed".to_owned(),
            (Some(path), 0) => format!("{path:?} changed"),
            (Some(path), more) => format!("{path:?} and {} changed", count(more as u64, "other file")),
        }
    }
}

struct ScanResult {
    manifest: Arc<Manifest>,
    problems: Vec<Problem>,
}

struct SendResult {
    artifact: ArtifactId,
    /// Sizes of the sent contents. `None`: the cluster had the bytes already.
    bytes: Option<SentBytes>,
}

/// Counts the files, directories and links of a tree.
fn entries(manifest: &Manifest) -> u64 {
    manifest.entries().len() as u64 - 1
}

/// Formats the size of a tree.
fn amount(manifest: &Manifest) -> String {
    let entries = count(entries(manifest), "entry").replace("entrys", "entries");
    format!("{entries}, {}", bytes(manifest.size_bytes()))
}

/// Remedy for a directory that is too large for `--inline`.
const INLINE_REMEDY: &str = "upload it without --inline";

/// Reads a small directory completely.
async fn small_tree(root: PathBuf, manifest: Arc<Manifest>) -> anyhow::Result<SmallTree> {
    let amount = amount(&manifest);
    let read = tokio::task::spawn_blocking(move || {
        let mut reader = TreeReader::new(&root, manifest.clone(), ReadOptions::default())?;
        rpc::small_tree::from_manifest(&manifest, |ordinal| Ok::<_, anyhow::Error>(reader.read(ordinal)?))
    });
    match read.await.context("reading ended unexpectedly")? {
        Err(error) => Err(match error.downcast_ref() {
            Some(NotSmall::Kind(..)) => {
                with_advice(error.context("--inline does not support this entry"), INLINE_REMEDY)
            }
            Some(NotSmall::Entries | NotSmall::Bytes) => with_advice(
                error.context(format!("the directory is too large for --inline ({amount})")),
                INLINE_REMEDY,
            ),
            None => error,
        }),
        read => read,
    }
}

/// Returns the state directories of the cluster on this machine that are inside of a directory.
/// They are secret and always change.
fn own_state(directory: &Path) -> Vec<PathBuf> {
    let Ok(Paths { state, runtime }) = Paths::find() else { return Vec::new() };
    inside(directory, [state.as_path(), runtime.as_path()].into_iter().filter(|path| path.is_dir()))
}

/// Renews a build until its inputs are uploaded. Returns only an error.
pub(crate) async fn renew(
    connection: &Connection,
    build: rpc::pb::artifacts::PutBuildRequest,
    every: std::time::Duration,
) -> anyhow::Error {
    loop {
        tokio::time::sleep(every).await;
        if let Err(status) = connection.owners().put_build(build.clone()).await
            && !Refused::from(status.clone()).is_transient()
        {
            return refused("cannot renew the build of this run")(status);
        }
    }
}
