//! Writing of an image's tree to a worker.

use std::sync::Arc;

use domain::Digest;
use images::ImageTree;
use rpc::Refusal;
use rpc::client::Outgoing;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::write_request::Message as Write;
use rpc::pb::runtime::write_response::Message as Written;
use rpc::pb::runtime::{Chunk, ExtentData, WriteCommit, WriteOpen, WriteRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use transfer::OrdinalRanges;

use crate::peers::{PeerError, Ticket};
use crate::upload::UploadError;

/// Bytes of content that one message has at least, unless it is the last one.
const CHUNK_BYTES: usize = 512 << 10;

/// The tree cannot be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("cannot read a layer")]
    Read(#[source] std::io::Error),
    #[error("the gateway ended the transfer early; repeat the call")]
    Truncated,
}

impl From<tonic::Status> for WriteError {
    fn from(status: tonic::Status) -> Self {
        Self::Peer(Refusal::from(status).into())
    }
}

/// Writes a tree under a ticket, and returns its digest. Calls `progress` with the bytes that are
/// done, and with their total.
pub(super) async fn write(
    ticket: Ticket,
    tree: Arc<ImageTree>,
    progress: impl Fn(u64, u64),
) -> Result<Digest, WriteError> {
    let Ticket { ticket, gateway_endpoint, .. } = ticket;
    let malformed = |_| PeerError::Malformed("address of a gateway");
    let outgoing = Outgoing::internal().with_ticket(&ticket);
    let mut gateway = VolumesClient::new(rpc::client::peer(&gateway_endpoint, outgoing).map_err(malformed)?);

    let (requests, queue) = mpsc::channel(4);
    let request = |message| WriteRequest { message: Some(message) };
    let manifest = tree.manifest().clone();
    let introduction = async {
        // If sending fails, the call has ended, and its answer has the cause.
        _ = requests.send(request(Write::Open(WriteOpen { ticket }))).await;
        for part in rpc::tree::manifest_parts(&manifest) {
            _ = requests.send(request(Write::Manifest(part))).await;
        }
        _ = requests.send(request(Write::ManifestEnd(rpc::tree::manifest_end(&manifest)))).await;
    };
    let (answers, ()) = tokio::join!(gateway.write(ReceiverStream::new(queue)), introduction);
    let mut answers = answers?.into_inner();

    let mut reading = None;
    let answered = async {
        let (mut missing, mut total, mut requests) = (OrdinalRanges::new(), 0, Some(requests));
        while let Some(answer) = answers.message().await? {
            match answer.message {
                Some(Written::Missing(runs)) => {
                    rpc::tree::push_runs(&mut missing, &runs)
                        .map_err(|_| PeerError::Malformed("ordinals"))?;
                }
                Some(Written::MissingEnd(_)) => {
                    total = manifest.bytes_of(&missing);
                    progress(0, total);
                    let (tree, missing) = (tree.clone(), std::mem::take(&mut missing));
                    reading = requests.take().map(|requests| {
                        tokio::task::spawn_blocking(move || send_content(&tree, &missing, &requests))
                    });
                }
                Some(Written::Progress(now)) => progress(now.bytes, total),
                Some(Written::Committed(_)) => return Ok(manifest.tree_digest()),
                None => {}
            }
        }
        Err(WriteError::Truncated)
    };
    let answered = answered.await;
    // A failure to read also ends the call, so its cause comes first.
    if answered.is_err()
        && let Some(reading) = reading
        && let Ok(Err(error)) = reading.await
    {
        return Err(WriteError::Read(error));
    }
    answered
}

/// Sends the content of extents in ascending order, then the commit. Blocks.
fn send_content(
    tree: &ImageTree,
    missing: &OrdinalRanges,
    requests: &mpsc::Sender<WriteRequest>,
) -> std::io::Result<()> {
    let send = |message| requests.blocking_send(WriteRequest { message: Some(message) }).is_ok();
    let (mut extents, mut bytes) = (Vec::new(), 0);
    for ordinal in missing.ordinals() {
        let data = tree.read(ordinal)?;
        bytes += data.len();
        extents.push(ExtentData { ordinal, data });
        if bytes >= CHUNK_BYTES {
            bytes = 0;
            if !send(Write::Chunk(Chunk { extents: std::mem::take(&mut extents) })) {
                return Ok(());
            }
        }
    }
    if !extents.is_empty() && !send(Write::Chunk(Chunk { extents })) {
        return Ok(());
    }
    send(Write::Commit(WriteCommit {}));
    Ok(())
}
