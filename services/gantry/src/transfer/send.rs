//! Sender of the bytes of a directory or an image to a worker.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use images::ImageTree;
use rpc::Reason;
use rpc::pb::runtime::{WriteCommit, WriteOpen, WriteRequest, write_request::Message as Write};
use rpc::pb::streamer::TransferEndpoint;
use tokio::sync::{mpsc, oneshot};
use transfer::{ExtentData, Manifest, OrdinalRanges, ReadError, ReadOptions, TreeReader};

use crate::ending::error::Refused;
use crate::ending::error::refusal;
use crate::transfer::tree::chunk;

/// Error of sending a directory.
pub(super) enum SendError {
    /// A file changed since the scan. The text names it.
    Changed(String),
    /// The bytes of an extent differ from its digest.
    Mismatch,
    /// The disk of this worker is full.
    DiskFull(TransferEndpoint, anyhow::Error),
    /// Any other error.
    Other(anyhow::Error),
}

impl SendError {
    /// Names the worker if its disk is full and another worker may take the upload. A streamer of
    /// an earlier version names no worker, and would choose it again.
    pub(super) fn on(self, endpoint: &TransferEndpoint, full: &FullWorkers) -> Self {
        let may_move = !endpoint.worker_id.is_empty() && !full.ids.contains(&endpoint.worker_id);
        let is_full = |error| refusal(error).is_some_and(|refused| refused.is(Reason::DiskFull));
        match self {
            Self::Other(error) if may_move && is_full(&error) => Self::DiskFull(endpoint.clone(), error),
            error => error,
        }
    }
}

/// Workers whose disks are full, and the first error.
#[derive(Default)]
pub(super) struct FullWorkers {
    pub(super) ids: Vec<String>,
    first: Option<(String, anyhow::Error)>,
}

impl FullWorkers {
    pub(super) fn add(&mut self, worker: TransferEndpoint, error: anyhow::Error) {
        self.ids.push(worker.worker_id);
        self.first.get_or_insert((worker.worker_name, error));
    }

    /// Returns the error of an upload that no worker takes: the first one, if a disk is full.
    pub(super) fn cause(self, last: anyhow::Error) -> anyhow::Error {
        let Some((worker, error)) = self.first else { return last };
        error.context(format!("the disk of worker {worker} is full, and no other worker takes the upload"))
    }
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

/// The place of the bytes of a tree.
#[derive(Clone)]
pub(super) enum Content {
    /// A directory.
    Directory(PathBuf),
    /// An image on this machine.
    Image(Arc<ImageTree>),
}

impl Content {
    /// Passes the content of extents to `send`, until it returns false.
    fn read(
        self,
        manifest: Arc<Manifest>,
        missing: &OrdinalRanges,
        mut send: impl FnMut(Vec<ExtentData>) -> bool,
    ) -> Result<(), SendError> {
        match self {
            Self::Directory(root) => {
                let mut reader = TreeReader::new(&root, manifest, ReadOptions::default())?;
                for batch in reader.batches(missing) {
                    if !send(batch?) {
                        return Ok(());
                    }
                }
            }
            Self::Image(image) => {
                for ordinal in missing.ordinals() {
                    let data = image.read(ordinal).context("cannot read a layer")?;
                    if !send(vec![ExtentData { ordinal, data }]) {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }
}

/// Sends all messages of a Write call in order.
pub(super) async fn send_tree(
    ticket: String,
    tree: Content,
    manifest: Arc<Manifest>,
    missing: oneshot::Receiver<OrdinalRanges>,
    requests: mpsc::Sender<WriteRequest>,
) -> Result<(), SendError> {
    // A send fails only if the call has ended. Its response has the cause.
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
        tree.read(manifest, &missing, |extents| {
            content.blocking_send(request(Write::Chunk(chunk(extents)))).is_ok()
        })
    };
    // A separate thread reads, because an interrupted command must not wait for it.
    std::thread::spawn(move || {
        // A missing receiver means that the call has ended.
        _ = end.send(read());
    });
    ended.await.context("the reader thread ended unexpectedly")??;
    _ = requests.send(request(Write::Commit(WriteCommit {}))).await;
    Ok(())
}
