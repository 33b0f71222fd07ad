//! Received tree in a staging directory, which is then merged into the target or replaces it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rpc::compression;
use rpc::pb::runtime::{
    ReadRequest, ReadResponse, read_request::Message as RequestMessage,
    read_response::Message as ResponseMessage,
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

/// Maximum number of paths in a list for programs.
pub(super) const LIST_LIMIT: usize = 1000;

/// Longest time without a message of the worker, which may have to scan the volume.
const SILENCE: Duration = Duration::from_secs(60 * 60);

/// Way in which a staged tree gets into the target.
pub(super) enum Mode {
    /// The tree replaces the target.
    Replace,
    /// The tree replaces the entries of the target at its own paths.
    Merge,
    /// Changes of the command replace the entries that were sent, which are `base`.
    InPlace { standing: Box<Standing>, base: Arc<Manifest> },
}

/// Changes that were made to a target.
#[derive(Default)]
pub(super) struct MergeReport {
    /// Number of written entries.
    pub(super) written: u64,
    pub(super) merged: Vec<Conflict>,
    pub(super) gone: Gone,
}

impl MergeReport {
    /// Returns the number of conflicts and the first of them, for programs.
    pub(super) fn conflicts(&self) -> Value {
        let changed = |Conflict { path, result }: &Conflict| json!({ "path": path.to_string_lossy(), "result": result.as_ref().map(|result| result.to_string_lossy()) });
        let removed = |path: &PathBuf| json!({ "path": path.to_string_lossy(), "result": null });
        let all = self.merged.iter().map(changed).chain(self.gone.changed.iter().map(removed));
        let first: Vec<_> = all.take(LIST_LIMIT).collect();
        json!({ "count": self.merged.len() + self.gone.changed.len(), "first": first })
    }
}

/// Receives the next message of the worker. After an hour without a message, the connection counts
/// as broken.
pub(super) async fn next(responses: &mut Streaming<ReadResponse>) -> anyhow::Result<Option<ReadResponse>> {
    let message = tokio::time::timeout(SILENCE, responses.message()).await;
    Ok(message.map_err(|_| Refused::cut())?.map_err(Refused::from)?)
}

pub(super) async fn receive_manifest(responses: &mut Streaming<ReadResponse>) -> anyhow::Result<Manifest> {
    let mut builder = ManifestBuilder::new(Limits::default());
    while let Some(ReadResponse { message }) = next(responses).await? {
        match message {
            Some(ResponseMessage::Manifest(part)) => {
                rpc::tree::push_part(&mut builder, &part)?;
            }
            Some(ResponseMessage::ZstdManifest(frame)) => {
                rpc::tree::push_part(&mut builder, &compression::decode(frame).await?)?;
            }
            Some(ResponseMessage::ManifestEnd(end)) => {
                let manifest = builder.finish()?;
                if tree::digest(&end.digest)? != manifest.tree_digest() {
                    bail!("the list of entries of the artifact arrived damaged");
                }
                return Ok(manifest);
            }
            Some(ResponseMessage::Chunk(_) | ResponseMessage::ZstdChunk(_) | ResponseMessage::Done(_)) => {
                bail!("the worker sent content before it was asked for any")
            }
            None => {}
        }
    }
    Err(Refused::cut().into())
}

pub(super) fn request(message: RequestMessage) -> ReadRequest {
    ReadRequest { message: Some(message) }
}

/// Tree that is being written into a staging directory.
pub(super) struct StagedTree {
    pub(super) writer: TreeWriter,
    pub(super) matches: Matches,
    pub(super) directory: Staging,
    pub(super) remembered: DirectoryCache,
}

impl StagedTree {
    /// Merges the tree into the target, or replaces the target with it.
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
            // The replaced files may be old and safe on disk. After a power failure, their
            // replacements must not be empty.
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
                anyhow::Error::from(error)
                    .context(format!("cannot remove {path:?}, which the command removed"))
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

/// Adds a remedy to the error about a directory that a merge cannot replace.
fn in_the_way(error: MergeError, target: &Path) -> anyhow::Error {
    let MergeError::DirectoryInTheWay { path } = &error else { return error.into() };
    let replaceable = target.metadata().is_ok_and(|metadata| check_replace(target, &metadata).is_ok());
    let or = if replaceable { ", or replace the whole target with --replace" } else { "" };
    anyhow!(
        "the result cannot replace the directory {path:?}, which is not empty; move the directory away{or}"
    )
}
