//! A tree that is received beside its target, and then merged into it or put in its place.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rpc::pb::runtime::{
    ReadRequest, ReadResponse, read_request::Message as Ask, read_response::Message as Answer,
};
use serde_json::{Value, json};
use tonic::Streaming;
use transfer::{
    Conflict, Gone, Limits, Manifest, ManifestBuilder, Matches, MergeError, MergeOptions, ScanOptions,
    Standing, TreeWriter, WrittenOwnership,
};

use crate::ending::error::Refused;
use crate::transfer::staging::{Staging, Target, check_replace};
use crate::transfer::tree::{self, DirectoryCache};

/// How many paths are listed for programs.
pub(super) const LISTED: usize = 1000;

/// Longest time that a worker may send nothing: it may have to scan the volume.
const SILENCE: Duration = Duration::from_secs(60 * 60);

/// How a staged tree gets into the target.
pub(super) enum Mode {
    /// It takes the place of all that stands there.
    Replace,
    /// It takes the place of what stands at its paths.
    Merge,
    /// Changes take the place of what was sent, which is `base`.
    InPlace { standing: Box<Standing>, base: Arc<Manifest> },
}

/// What was done to a target.
#[derive(Default)]
pub(super) struct MergeReport {
    /// How many entries were put in place.
    pub(super) written: u64,
    pub(super) merged: Vec<Conflict>,
    pub(super) gone: Gone,
}

impl MergeReport {
    /// What was changed on both sides, for programs: the first of it, and how much it is.
    pub(super) fn conflicts(&self) -> Value {
        let changed = |Conflict { path, result }: &Conflict| json!({ "path": path.to_string_lossy(), "result": result.as_ref().map(|result| result.to_string_lossy()) });
        let removed = |path: &PathBuf| json!({ "path": path.to_string_lossy(), "result": null });
        let all = self.merged.iter().map(changed).chain(self.gone.changed.iter().map(removed));
        let first: Vec<_> = all.take(LISTED).collect();
        json!({ "count": self.merged.len() + self.gone.changed.len(), "first": first })
    }
}

/// Receives the worker's next message. Errors: the connection counts as cut after an hour of silence.
pub(super) async fn next(answers: &mut Streaming<ReadResponse>) -> anyhow::Result<Option<ReadResponse>> {
    let message = tokio::time::timeout(SILENCE, answers.message()).await;
    Ok(message.map_err(|_| Refused::cut())?.map_err(Refused::from)?)
}

pub(super) async fn receive_manifest(answers: &mut Streaming<ReadResponse>) -> anyhow::Result<Manifest> {
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

pub(super) fn ask(message: Ask) -> ReadRequest {
    ReadRequest { message: Some(message) }
}

/// A tree that is being written.
pub(super) struct StagedTree {
    pub(super) writer: TreeWriter,
    pub(super) matches: Matches,
    pub(super) directory: Staging,
    pub(super) remembered: DirectoryCache,
}

impl StagedTree {
    pub(super) fn put_in_place(
        self,
        target: &Target,
        manifest: &Manifest,
        mode: &Mode,
    ) -> anyhow::Result<MergeReport> {
        let Self { writer, matches, directory, mut remembered } = self;
        writer.finish()?;
        let mut placed = MergeReport::default();
        let standing = match mode {
            Mode::InPlace { standing, .. } => Some(standing.as_ref()),
            Mode::Merge | Mode::Replace => None,
        };
        let is_replaced = match mode {
            Mode::Replace => target.path.exists(),
            Mode::InPlace { standing, .. } => standing.replaces(),
            Mode::Merge => false,
        };
        if is_replaced {
            // What goes may be old and safe. After a power failure, what takes its place must not be empty.
            File::open(&directory.path)
                .and_then(|staged| Ok(rustix::fs::syncfs(staged)?))
                .context("cannot write to the disk")?;
        }
        let changed = if let Mode::Replace = mode {
            transfer::replace(&directory.path, &target.path)?;
            true
        } else {
            let options = MergeOptions {
                ownership: WrittenOwnership::Caller,
                strict: false,
                keep_root: true,
                standing,
            };
            let merged = transfer::merge(&directory.path, &target.path, manifest, &matches, options)
                .map_err(|error| in_the_way(error, &target.path))?;
            placed.merged = merged.conflicts;
            placed.written = merged.replaced + merged.corrected;
            merged.replaced + merged.corrected > 0
        };
        if let Mode::InPlace { standing, base } = mode {
            let gone = transfer::remove_gone(&target.path, base, standing, &placed.merged);
            placed.gone = gone.map_err(|(path, error)| {
                anyhow::Error::from(error).context(format!("cannot remove {path:?}, as the command did"))
            })?;
        }
        if changed {
            let settle = ScanOptions::default().settle;
            transfer::remember(&target.path, manifest, &mut remembered.cache, settle);
        }
        if changed || matches.files_read() > 0 {
            remembered.save();
        }
        Ok(placed)
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
