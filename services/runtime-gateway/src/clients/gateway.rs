//! The gateway of another worker, from which a volume is copied.

use std::time::Duration;

use rpc::client::{AddressError, Outgoing};
use rpc::compression::{self, InvalidFrame};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::read_request::Message as Request;
use rpc::pb::runtime::read_response::Message as Response;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::{Peer, Reason, Refusal};
use runtime::Inlet;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use transfer::{ExtentData, InvalidManifest, Limits, Manifest, ManifestBuilder, OrdinalRanges};

use crate::util::transferred::{self, Direction};

/// Maximum time for another gateway to hash a volume.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// A volume on another worker that has the bytes.
///
/// Invariant: this gateway connects only to the address that the scheduler signed, never to an
/// address of the caller. [`Source::endpoint`] comes from a verified ticket.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// Address of the source's gateway, from the ticket. `None`: the ticket does not permit to
    /// read.
    pub(crate) endpoint: Option<String>,
    /// Ticket that permits to read the volume. A source never receives the cluster token.
    pub(crate) ticket: String,
}

/// The reason why a source cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    /// The ticket is forged, expired, or for another operation.
    #[error("the ticket of the source is invalid or expired")]
    Ticket,
    /// The address is malformed.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The source rejected the call, or failed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The source ended the stream too early.
    #[error("the source ended the stream too early")]
    Truncated,
    /// The manifest of the source is invalid.
    #[error("the manifest of the source is invalid")]
    Manifest(#[from] InvalidManifest),
    /// A compressed message of the source is malformed.
    #[error("a compressed message of the source is malformed")]
    Frame(#[from] InvalidFrame),
    /// The source has another tree.
    #[error("cannot use the source: its tree has another digest than the artifact")]
    OtherBytes,
    /// The source violated the protocol.
    #[error("the source violated the protocol")]
    Protocol,
}

impl SourceError {
    /// Returns the error reason, for programs.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Ticket => Reason::InvalidToken.as_str(),
            Self::Address(_) => Reason::InvalidField.as_str(),
            Self::Refused(refusal) if refusal.is_transient() => Reason::Unavailable.as_str(),
            Self::Refused(refusal) => refusal.reason.as_deref().unwrap_or(Reason::Unavailable.as_str()),
            Self::Truncated => Reason::Unavailable.as_str(),
            // This gateway has no memory, so the source is not at fault.
            Self::Manifest(InvalidManifest::NoMemory) => Reason::Unavailable.as_str(),
            Self::Manifest(_) | Self::Frame(_) | Self::Protocol => Reason::InvalidManifest.as_str(),
            Self::OtherBytes => Reason::DigestMismatch.as_str(),
        }
    }
}

impl SourceError {
    /// Whether the gateway of the source could not be reached, or the connection to it broke.
    pub(crate) fn is_from_transport(&self) -> bool {
        // An error with a reason comes from the gateway.
        matches!(self, Self::Refused(refusal) if refusal.reason.is_none() && refusal.is_transient())
    }
}

impl Source {
    fn client(&self) -> Result<VolumesClient<Peer>, SourceError> {
        let endpoint = self.endpoint.as_deref().ok_or(SourceError::Ticket)?;
        let outgoing = Outgoing::internal().with_ticket(&self.ticket);
        Ok(VolumesClient::new(rpc::client::peer(endpoint, outgoing)?))
    }

    /// Requests the gateway of the source to hash the volume, because it sent other bytes than its
    /// manifest declares. Returns the error of the gateway, which is expected if it is damaged.
    pub(crate) async fn verify(&self) -> Result<(), SourceError> {
        let mut request = tonic::Request::new(pb::VerifyRequest { ticket: self.ticket.clone() });
        request.set_timeout(VERIFY_TIMEOUT);
        self.client()?.verify(request).await.map_err(Refusal::from)?;
        Ok(())
    }

    /// Requests the worker of the source to send the volume to another worker, at `inlet`.
    pub(crate) async fn stream_to_peer(
        &self,
        destination_ticket: &str,
        inlet: Inlet,
    ) -> Result<(), SourceError> {
        let request = pb::StreamToPeerRequest {
            ticket: self.ticket.clone(),
            destination_ticket: destination_ticket.to_owned(),
            peer_url: inlet.address,
            encoding: inlet.encoding,
        };
        self.client()?.stream_to_peer(request).await.map_err(Refusal::from)?;
        Ok(())
    }

    /// Starts to read the volume. `pause` is the longest time that the source may send nothing.
    pub(crate) async fn read(&self, pause: Duration) -> Result<VolumeReader, SourceError> {
        let mut client = self.client()?;
        let (requests, queue) = mpsc::channel(4);
        let accept_zstd = self.endpoint.as_deref().is_some_and(rpc::client::crosses_network);
        let open = pb::ReadOpen { ticket: self.ticket.clone(), accept_zstd };
        // Cannot fail, because the receiver is the stream below.
        requests.send(pb::ReadRequest { message: Some(Request::Open(open)) }).await.ok();
        let answer = tokio::time::timeout(pause, client.read(ReceiverStream::new(queue))).await;
        let responses = answer.map_err(|_| SourceError::Truncated)?.map_err(Refusal::from)?.into_inner();
        Ok(VolumeReader { requests, responses, pause })
    }
}

/// A volume on another worker that is being read.
pub(crate) struct VolumeReader {
    requests: mpsc::Sender<pb::ReadRequest>,
    responses: Streaming<pb::ReadResponse>,
    /// Longest time that the source may send nothing.
    pause: Duration,
}

impl VolumeReader {
    async fn next(&mut self) -> Result<Response, SourceError> {
        // The source may have to scan the volume before it answers.
        let message = tokio::time::timeout(self.pause, self.responses.message()).await;
        let message = message.map_err(|_| SourceError::Truncated)?.map_err(Refusal::from)?;
        message.ok_or(SourceError::Truncated)?.message.ok_or(SourceError::Protocol)
    }

    /// Receives the manifest, which comes first.
    pub(crate) async fn manifest(&mut self) -> Result<Manifest, SourceError> {
        let mut builder = ManifestBuilder::new(Limits::of_process());
        loop {
            match self.next().await? {
                Response::Manifest(part) => rpc::tree::push_part(&mut builder, &part)?,
                Response::ZstdManifest(frame) => {
                    rpc::tree::push_part(&mut builder, &compression::decode(frame).await?)?;
                }
                Response::ManifestEnd(_) => return Ok(builder.finish()?),
                Response::Chunk(_) | Response::ZstdChunk(_) | Response::Done(_) => {
                    return Err(SourceError::Protocol);
                }
            }
        }
    }

    /// Requests extents. `bytes` is their total size.
    pub(crate) async fn request(&self, extents: &OrdinalRanges, bytes: u64) -> Result<(), SourceError> {
        let runs = rpc::tree::runs(extents).into_iter().map(Request::Want);
        for message in runs.chain([Request::WantEnd(pb::ExtentRunsEnd { bytes })]) {
            let request = pb::ReadRequest { message: Some(message) };
            self.requests.send(request).await.map_err(|_| SourceError::Truncated)?;
        }
        Ok(())
    }

    /// Receives some of the requested extents. `None`: the source has sent all of them.
    pub(crate) async fn extents(&mut self) -> Result<Option<Vec<ExtentData>>, SourceError> {
        let (chunk, wire): (pb::Chunk, _) = match self.next().await? {
            Response::Chunk(chunk) => (chunk, None),
            Response::ZstdChunk(frame) => {
                let wire = frame.len() as u64;
                (compression::decode(frame).await?, Some(wire))
            }
            Response::Done(_) => return Ok(None),
            Response::Manifest(_) | Response::ZstdManifest(_) | Response::ManifestEnd(_) => {
                return Err(SourceError::Protocol);
            }
        };
        let content = chunk.extents.iter().map(|extent| extent.data.len() as u64).sum();
        transferred::record(Direction::In, content, wire.unwrap_or(content));
        let extents = chunk.extents.into_iter();
        let extents = extents.map(|extent| ExtentData { ordinal: extent.ordinal, data: extent.data });
        Ok(Some(extents.collect()))
    }
}
