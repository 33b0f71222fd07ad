//! The bytes of a directory on their way to a worker, and what may stop them.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use rpc::pb::runtime::{WriteCommit, WriteOpen, WriteRequest, write_request::Message as Write};
use tokio::sync::{mpsc, oneshot};
use transfer::{Manifest, OrdinalRanges, ReadError, ReadOptions, TreeReader};

use crate::ending::error::Refused;
use crate::transfer::tree;

pub(super) enum SendError {
    /// Something is not as it was when it was scanned, and what.
    Changed(String),
    Other(anyhow::Error),
}

impl From<anyhow::Error> for SendError {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl From<Refused> for SendError {
    fn from(refused: Refused) -> Self {
        Self::Other(refused.into())
    }
}

impl From<ReadError> for SendError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Shrunk { path } | ReadError::Changed { path } => {
                Self::Changed(format!("{path:?} changed"))
            }
            ReadError::Io { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
                Self::Changed(format!("{path:?} vanished"))
            }
            error => Self::Other(error.into()),
        }
    }
}

/// Says everything that a writer says, in its order.
pub(super) async fn send_tree(
    ticket: String,
    root: PathBuf,
    manifest: Arc<Manifest>,
    missing: oneshot::Receiver<OrdinalRanges>,
    requests: mpsc::Sender<WriteRequest>,
) -> Result<(), SendError> {
    // When sending fails the call has ended, and its answers say why.
    let request = |message| WriteRequest { message: Some(message) };
    if requests.send(request(Write::Open(WriteOpen { ticket }))).await.is_err() {
        return Ok(());
    }
    for part in rpc::tree::manifest_parts(&manifest) {
        if requests.send(request(Write::Manifest(part))).await.is_err() {
            return Ok(());
        }
    }
    let end = rpc::tree::manifest_end(&manifest);
    if requests.send(request(Write::ManifestEnd(end))).await.is_err() {
        return Ok(());
    }
    let Ok(missing) = missing.await else { return Ok(()) };
    let content = requests.clone();
    let (end, ended) = oneshot::channel();
    let read = move || {
        let mut reader = TreeReader::new(&root, manifest, ReadOptions::default())?;
        for batch in reader.batches(&missing) {
            if content.blocking_send(request(Write::Chunk(tree::chunk(batch?)))).is_err() {
                return Ok(());
            }
        }
        Ok::<_, SendError>(())
    };
    // A thread of its own, for the command does not wait for it when it is interrupted.
    std::thread::spawn(move || {
        // Without a receiver the call has ended.
        _ = end.send(read());
    });
    ended.await.context("reading ended unexpectedly")??;
    _ = requests.send(request(Write::Commit(WriteCommit {}))).await;
    Ok(())
}
