//! A copy whose bytes pass through the streamer.
//!
//! ```text
//! source (Volumes.Read)           streamer           destination (Volumes.Write)
//!   manifest ────────────────────────▶──────────────────────▶ manifest
//!   want ◀───────────────────────────◀────────────────────── missing
//!   chunk, done ─────────────────────▶──────────────────────▶ chunk, commit
//! ```
//!
//! [`crate::copy`] calls it if the destination cannot reach the source. The streamer passes
//! messages on, and stores none. Both queues are bounded, so the slower gateway sets the pace.
//!
//! Invariant: the gateway of the destination verifies the manifest and each extent, as in every
//! write. The streamer checks only the digest of the tree.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpc::client::Outgoing;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::read_request::Message as Read;
use rpc::pb::runtime::read_response::Message as Answer;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_request::Message as Write;
use rpc::pb::runtime::write_response::Message as Written;
use rpc::{Peer, Reason, Refusal};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::peers::{PeerError, Ticket};

/// Most messages that wait for each gateway. A message has about 1 MiB at most.
const QUEUE: usize = 4;
/// Longest wait for the destination to end a write whose source failed.
const END_WAIT: Duration = Duration::from_secs(5);

/// The bytes of content of a relay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayedBytes {
    pub(crate) done: u64,
    pub(crate) total: u64,
    /// Bytes that the destination already had.
    pub(crate) saved: u64,
}

/// The reason why a relay failed.
#[derive(Debug)]
pub(crate) enum RelayError {
    /// The source cannot be read. Another one may work.
    Source(SourceError),
    /// The destination rejected the call, or failed.
    Destination(Refusal),
    /// The destination ended the call without a result.
    Truncated,
    /// An address is malformed.
    Peer(PeerError),
}

/// The reason why a source cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the source ended the stream too early")]
    Truncated,
    #[error("the source sent nothing for {} s", .0.as_secs())]
    Silent(Duration),
    #[error("the source has a tree with another digest than the artifact")]
    OtherBytes,
    #[error("the source violated the protocol")]
    Protocol,
}

impl SourceError {
    /// Returns the error reason, for programs. The words are those of `Volumes.Fetch`.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Refused(refusal) if !refusal.is_transient() => {
                refusal.reason.as_deref().unwrap_or(Reason::Unavailable.as_str())
            }
            Self::Refused(_) | Self::Truncated | Self::Silent(_) => Reason::Unavailable.as_str(),
            Self::OtherBytes => Reason::DigestMismatch.as_str(),
            Self::Protocol => Reason::InvalidManifest.as_str(),
        }
    }
}

/// Copies a volume from the gateway of `source` to the gateway of `destination`. The tree must have
/// `digest`. `pause` is the longest time that the source may send nothing. Calls `reached` when the
/// source answers, and reports to `progress`. Returns the final progress.
///
/// Cancel safe: if it is dropped, both calls end, and the volume stays incomplete.
pub(crate) async fn relay(
    source: &Ticket,
    destination: &Ticket,
    digest: &[u8],
    pause: Duration,
    reached: impl FnOnce(),
    progress: impl FnMut(RelayedBytes),
) -> Result<RelayedBytes, RelayError> {
    let (mut from, mut to) = (gateway(source)?, gateway(destination)?);
    let (wants, queue) = mpsc::channel(QUEUE);
    let open = Read::Open(pb::ReadOpen { ticket: source.ticket.clone(), accept_zstd: false });
    // Cannot fail, because the receiver is the stream below.
    wants.send(pb::ReadRequest { message: Some(open) }).await.ok();
    let opened = tokio::time::timeout(pause, from.read(ReceiverStream::new(queue))).await;
    let opened = opened.map_err(|_| SourceError::Silent(pause))?.map_err(Refusal::from);
    let mut reader = Reader { answers: opened.map_err(SourceError::from)?.into_inner(), pause };
    // The destination waits for a caller only for a while, and the source may have to scan a large
    // volume first.
    let first = reader.next().await?;
    reached();

    let (requests, queue) = mpsc::channel(QUEUE);
    let open = Write::Open(pb::WriteOpen { ticket: destination.ticket.clone() });
    requests.send(pb::WriteRequest { message: Some(open) }).await.ok();
    let (total, wanted) = (AtomicU64::new(0), Notify::new());
    let mut writing = std::pin::pin!(async {
        let answers = to.write(ReceiverStream::new(queue)).await.map_err(Refusal::from);
        let answers = answers.map_err(RelayError::Destination)?.into_inner();
        pass_back(answers, wants, digest, &total, &wanted, progress).await
    });
    let failing = async {
        match pass_on(reader, first, requests, digest, &total, &wanted).await {
            Err(error) => error,
            // The destination has the result.
            Ok(()) => std::future::pending().await,
        }
    };
    let failed = tokio::select! {
        written = &mut writing => return written,
        failed = failing => failed,
    };
    // Another source may follow, and a volume has one writer at a time.
    tokio::time::timeout(END_WAIT, writing).await.ok();
    Err(failed.into())
}

impl From<SourceError> for RelayError {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

fn gateway(ticket: &Ticket) -> Result<VolumesClient<Peer>, RelayError> {
    let outgoing = Outgoing::internal().with_ticket(&ticket.ticket);
    let malformed = |_| RelayError::Peer(PeerError::Malformed("address of a gateway"));
    Ok(VolumesClient::new(rpc::client::peer(&ticket.gateway_endpoint, outgoing).map_err(malformed)?))
}

/// A volume that is being read.
struct Reader {
    answers: Streaming<pb::ReadResponse>,
    /// Longest time that the source may send nothing.
    pause: Duration,
}

impl Reader {
    async fn next(&mut self) -> Result<Answer, SourceError> {
        let answer = tokio::time::timeout(self.pause, self.answers.message()).await;
        let answer = answer.map_err(|_| SourceError::Silent(self.pause))?.map_err(Refusal::from)?;
        answer.ok_or(SourceError::Truncated)?.message.ok_or(SourceError::Protocol)
    }
}

/// Passes the manifest and the extents of the source on to the destination, and then commits. Adds
/// the bytes of content to `total`. `wanted` is notified when the source knows what to send.
/// Returns early if the destination has ended the call.
async fn pass_on(
    mut reader: Reader,
    first: Answer,
    requests: mpsc::Sender<pb::WriteRequest>,
    digest: &[u8],
    total: &AtomicU64,
    wanted: &Notify,
) -> Result<(), SourceError> {
    let mut answer = first;
    let mut is_manifest_complete = false;
    loop {
        let message = match answer {
            Answer::Manifest(part) if !is_manifest_complete => {
                total.fetch_add(content_bytes(&part), Ordering::Relaxed);
                Write::Manifest(part)
            }
            Answer::ManifestEnd(end) if !is_manifest_complete => {
                if end.digest != digest {
                    return Err(SourceError::OtherBytes);
                }
                is_manifest_complete = true;
                let message = Some(Write::ManifestEnd(end));
                if requests.send(pb::WriteRequest { message }).await.is_err() {
                    return Ok(());
                }
                // The source sends nothing until it knows what the destination lacks. That takes as
                // long as the destination needs to link and copy what it has.
                tokio::select! {
                    () = wanted.notified() => {}
                    () = requests.closed() => return Ok(()),
                }
                answer = reader.next().await?;
                continue;
            }
            Answer::Chunk(chunk) if is_manifest_complete => {
                let bytes: usize = chunk.extents.iter().map(|extent| extent.data.len()).sum();
                metrics::counter!("gantry_streamer_relayed_bytes_total").increment(bytes as u64);
                Write::Chunk(chunk)
            }
            Answer::Done(_) if is_manifest_complete => {
                // If sending fails, the answer of the destination has the cause.
                let commit = Write::Commit(pb::WriteCommit {});
                requests.send(pb::WriteRequest { message: Some(commit) }).await.ok();
                return Ok(());
            }
            _ => return Err(SourceError::Protocol),
        };
        if requests.send(pb::WriteRequest { message: Some(message) }).await.is_err() {
            return Ok(());
        }
        answer = tokio::select! {
            answer = reader.next() => answer?,
            () = requests.closed() => return Ok(()),
        };
    }
}

/// Returns the bytes of content of a part of a manifest.
fn content_bytes(part: &pb::ManifestPart) -> u64 {
    let extents = part.entries.iter().filter_map(|entry| match &entry.kind {
        Some(pb::entry::Kind::File(file)) => Some(&file.extents),
        _ => None,
    });
    extents.flatten().map(|extent| u64::from(extent.length)).fold(0, u64::saturating_add)
}

/// Requests what the destination lacks from the source, until the destination has the tree.
async fn pass_back(
    mut answers: Streaming<pb::WriteResponse>,
    wants: mpsc::Sender<pb::ReadRequest>,
    digest: &[u8],
    total: &AtomicU64,
    wanted: &Notify,
    mut progress: impl FnMut(RelayedBytes),
) -> Result<RelayedBytes, RelayError> {
    let want = async |message| {
        // If sending fails, the source has ended the call, and its answer has the cause.
        wants.send(pb::ReadRequest { message: Some(message) }).await.ok();
    };
    let mut saved = 0;
    loop {
        let answer = answers.message().await.map_err(|status| RelayError::Destination(status.into()))?;
        let total = total.load(Ordering::Relaxed);
        match answer.and_then(|answer| answer.message) {
            Some(Written::Missing(runs)) => want(Read::Want(runs)).await,
            Some(Written::MissingEnd(end)) => {
                saved = total.saturating_sub(end.bytes);
                want(Read::WantEnd(end)).await;
                wanted.notify_one();
                progress(RelayedBytes { done: saved, total, saved });
            }
            Some(Written::Progress(now)) => {
                progress(RelayedBytes { done: saved.saturating_add(now.bytes), total, saved });
            }
            Some(Written::Committed(committed)) if committed.digest == digest => {
                return Ok(RelayedBytes { done: total, total, saved });
            }
            Some(Written::Committed(_)) | None => return Err(RelayError::Truncated),
        }
    }
}
