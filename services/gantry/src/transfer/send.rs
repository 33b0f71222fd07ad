//! Sender of the bytes of a directory or an image to a worker.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use images::ImageTree;
use rpc::Reason;
use rpc::compression::{Packer, RawOrZstd, SentBytes, pack_part};
use rpc::pb::runtime::{WriteCommit, WriteOpen, WriteRequest, write_request::Message as Write};
use rpc::pb::streamer::TransferEndpoint;
use tokio::sync::{mpsc, oneshot, watch};
use transfer::{ExtentData, Manifest, OrdinalRanges, ReadError, ReadOptions, TreeReader};

use crate::ending::error::Refused;
use crate::ending::error::refusal;

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

/// Longest wait for the start of the response, which says whether the gateway accepts compressed
/// messages. A proxy may hold it back until the first message.
const START_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers of the gateway that the sender waits for.
pub(super) struct Answers {
    /// Whether messages may be compressed. `None`: the response has not started.
    pub(super) may_compress: watch::Receiver<Option<bool>>,
    /// Extents that the gateway lacks.
    pub(super) missing: oneshot::Receiver<OrdinalRanges>,
}

impl Answers {
    /// Waits for the start of the response, and returns whether messages may be compressed.
    async fn may_compress(&mut self) -> bool {
        let started = self.may_compress.wait_for(Option::is_some);
        let started = tokio::time::timeout(START_TIMEOUT, started).await;
        started.is_ok_and(|started| started.is_ok_and(|may_compress| *may_compress == Some(true)))
    }
}

/// Sends all messages of a Write call in order. Returns the sizes of the sent contents.
pub(super) async fn send_tree(
    ticket: String,
    tree: Content,
    manifest: Arc<Manifest>,
    mut answers: Answers,
    requests: mpsc::Sender<WriteRequest>,
) -> Result<SentBytes, SendError> {
    let mut total = SentBytes::default();
    // A send fails only if the call has ended. Its response has the cause.
    let request = |message| WriteRequest { message: Some(message) };
    if requests.send(request(Write::Open(WriteOpen { ticket }))).await.is_err() {
        return Ok(total);
    }
    let mut may_compress = false;
    for (number, part) in rpc::tree::manifest_parts(&manifest).enumerate() {
        // The answer arrives while the first part is sent.
        if number == 1 {
            may_compress = answers.may_compress().await;
        }
        let part = if may_compress {
            let packing = tokio::task::spawn_blocking(|| pack_part(part));
            packing.await.context("cannot compress the list of entries: the task panicked")?
        } else {
            RawOrZstd::Raw(part)
        };
        if requests.send(request(part.into())).await.is_err() {
            return Ok(total);
        }
    }
    let end = rpc::tree::manifest_end(&manifest);
    if requests.send(request(Write::ManifestEnd(end))).await.is_err() {
        return Ok(total);
    }
    let Ok(missing) = answers.missing.await else { return Ok(total) };
    let content = requests.clone();
    let (end, ended) = oneshot::channel();
    let may_compress = *answers.may_compress.borrow() == Some(true);
    let read = move || {
        let mut packer = Packer::new(may_compress);
        tree.read(manifest, &missing, |extents| {
            let sent = packer.send(&content, rpc::tree::chunk(extents), |chunk| request(Write::from(chunk)));
            total += sent.unwrap_or_default();
            sent.is_some()
        })?;
        Ok::<_, SendError>(total)
    };
    // A separate thread reads, because an interrupted command must not wait for it.
    std::thread::spawn(move || {
        // A missing receiver means that the call has ended.
        _ = end.send(read());
    });
    let total = ended.await.context("the reader thread ended unexpectedly")??;
    _ = requests.send(request(Write::Commit(WriteCommit {}))).await;
    Ok(total)
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind, Limits};

    use super::*;

    /// Makes a tree whose manifest has several parts.
    fn wide_tree() -> Arc<Manifest> {
        let entry = |path: String| Entry {
            path: path.into(),
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::Directory,
        };
        let names = (0..30_000).map(|number| format!("directory-with-a-long-name-{number:060}"));
        let entries = [String::new()].into_iter().chain(names).map(entry);
        Arc::new(Manifest::new(entries, Limits::default()).expect("a valid tree"))
    }

    /// Sends the manifest of a wide tree. Returns for each part whether it was compressed.
    async fn parts(may_compress: Option<bool>) -> Vec<bool> {
        let (requests, mut queue) = mpsc::channel(100);
        let (_started, may_compress) = watch::channel(may_compress);
        // The gateway ends the call when it has the manifest.
        let (_, missing) = oneshot::channel();
        let answers = Answers { may_compress, missing };
        let tree = Content::Directory(PathBuf::new());
        let sent = send_tree("ticket".to_owned(), tree, wide_tree(), answers, requests).await;
        assert!(sent.is_ok_and(|sent| sent == SentBytes::default()));
        let mut parts = Vec::new();
        while let Some(request) = queue.recv().await {
            match request.message {
                Some(Write::Manifest(_)) => parts.push(false),
                Some(Write::ZstdManifest(_)) => parts.push(true),
                _ => {}
            }
        }
        parts
    }

    #[tokio::test(start_paused = true)]
    async fn manifest_is_compressed_only_if_gateway_accepts() {
        let [first, rest @ ..] = &parts(Some(true)).await[..] else { panic!("there are parts") };
        assert!(!first && !rest.is_empty() && rest.iter().all(|compressed| *compressed), "{rest:?}");
        assert!(!parts(Some(false)).await.contains(&true));
        assert!(!parts(None).await.contains(&true), "a proxy holds the answer back");
    }
}
