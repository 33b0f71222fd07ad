//! The gateway of another worker, which has a volume that is to be copied here.

use std::time::Duration;

use rpc::client::{AddressError, Outgoing};
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

/// A volume elsewhere that has the bytes.
///
/// Invariant: this gateway connects to the address that the scheduler signed, and to no address that a caller
/// named. [`Source::endpoint`] comes out of a verified ticket.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The gateway of its worker, as the scheduler knows it. `None`: the ticket is not good for reading.
    pub(crate) endpoint: Option<String>,
    /// Permits to read it. The cluster's token is never presented to a source.
    pub(crate) ticket: String,
}

/// A source cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SourceError {
    /// Its ticket is forged, expired, or for something else.
    #[error("its ticket is not good for this")]
    Ticket,
    /// The address cannot be used.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// It refused, or broke off.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It ended before everything was there.
    #[error("it broke off")]
    Truncated,
    /// Its manifest breaks a rule.
    #[error("its manifest is invalid")]
    Manifest(#[from] InvalidManifest),
    /// It has another tree.
    #[error("it does not hold what was asked for")]
    OtherBytes,
    /// A message came that the protocol does not allow.
    #[error("it said something that makes no sense")]
    Protocol,
}

impl SourceError {
    /// The error reason, by which a program tells failures apart.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Ticket => Reason::InvalidToken.as_str(),
            Self::Address(_) => Reason::InvalidField.as_str(),
            Self::Refused(refusal) if refusal.is_transient() => Reason::Unavailable.as_str(),
            Self::Refused(refusal) => refusal.reason.as_deref().unwrap_or(Reason::Unavailable.as_str()),
            Self::Truncated => Reason::Unavailable.as_str(),
            // The memory of this gateway, and no fault of the source.
            Self::Manifest(InvalidManifest::NoMemory) => Reason::Unavailable.as_str(),
            Self::Manifest(_) | Self::Protocol => Reason::InvalidManifest.as_str(),
            Self::OtherBytes => Reason::DigestMismatch.as_str(),
        }
    }
}

impl Source {
    fn client(&self) -> Result<VolumesClient<Peer>, SourceError> {
        let endpoint = self.endpoint.as_deref().ok_or(SourceError::Ticket)?;
        let outgoing = Outgoing::internal().with_ticket(&self.ticket);
        Ok(VolumesClient::new(rpc::client::peer(endpoint, outgoing)?))
    }

    /// Has the worker of the source send the volume to another worker, at `inlet`.
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

    /// Begins to read the volume. `pause` is the longest time that the source may send nothing.
    pub(crate) async fn read(&self, pause: Duration) -> Result<VolumeReader, SourceError> {
        let mut client = self.client()?;
        let (requests, queue) = mpsc::channel(4);
        let open = pb::ReadOpen { ticket: self.ticket.clone() };
        // The other end is the stream below.
        requests.send(pb::ReadRequest { message: Some(Request::Open(open)) }).await.ok();
        let answer = tokio::time::timeout(pause, client.read(ReceiverStream::new(queue))).await;
        let responses = answer.map_err(|_| SourceError::Truncated)?.map_err(Refusal::from)?.into_inner();
        Ok(VolumeReader { requests, responses, pause })
    }
}

/// A volume elsewhere that is being read.
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
                Response::ManifestEnd(_) => return Ok(builder.finish()?),
                Response::Chunk(_) | Response::Done(_) => return Err(SourceError::Protocol),
            }
        }
    }

    /// Asks for extents, which are `bytes` together.
    pub(crate) async fn request(&self, extents: &OrdinalRanges, bytes: u64) -> Result<(), SourceError> {
        let runs = rpc::tree::runs(extents).into_iter().map(Request::Want);
        for message in runs.chain([Request::WantEnd(pb::ExtentRunsEnd { bytes })]) {
            let request = pb::ReadRequest { message: Some(message) };
            self.requests.send(request).await.map_err(|_| SourceError::Truncated)?;
        }
        Ok(())
    }

    /// Receives some of the extents that were asked for. `None`: the source has sent all that it sends.
    pub(crate) async fn extents(&mut self) -> Result<Option<Vec<ExtentData>>, SourceError> {
        match self.next().await? {
            Response::Chunk(chunk) => {
                let extents = chunk.extents.into_iter();
                let extents = extents.map(|extent| ExtentData { ordinal: extent.ordinal, data: extent.data });
                Ok(Some(extents.collect()))
            }
            Response::Done(_) => Ok(None),
            Response::Manifest(_) | Response::ManifestEnd(_) => Err(SourceError::Protocol),
        }
    }
}
