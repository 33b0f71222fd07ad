//! The calls that copy a volume from another worker.

use rpc::client::Outgoing;
use rpc::pb::runtime::fetch_response::Message as Answer;
use rpc::pb::runtime::volumes_client::VolumesClient;
use runtime::{Contents, Inlet};

use std::time::Duration;

use domain::worker::{TicketClaims, TicketOperation};
use rpc::pb::runtime as pb;
use rpc::{Reason, Refusal, invalid_field};
use runtime::RuntimeError;
use tonic::{Request, Status};

use super::Answers;
use super::errors::status;
use super::volumes::send;
use crate::SERVICE;
use crate::clients::gateway::Source;
use crate::transfer::pull::{self, Destination, FetchError, Progress};
use crate::worker_set::{AdmitError, WorkerSet};

/// Most sources of one call.
const MAX_SOURCES: usize = 100;
/// Most sources whose errors are described one by one, and longest description in bytes.
const MAX_DESCRIBED: usize = 5;
const MAX_ERROR_BYTES: usize = 300;
/// Timeout of the query for the destination's peer address.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn fetch(
    gateway: WorkerSet,
    request: pb::FetchRequest,
    answers: Answers<pb::FetchResponse>,
) -> Result<(), Status> {
    let digest = rpc::parse_digest("digest", &request.digest)?;
    if !(1..=MAX_SOURCES).contains(&request.sources.len()) {
        return Err(invalid_field("sources", format!("must be 1 to {MAX_SOURCES}")));
    }
    let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Write).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Write).await?;
    let mut sources = Vec::with_capacity(request.sources.len());
    for (index, source) in request.sources.into_iter().enumerate() {
        let pb::FetchSource { gateway_endpoint, ticket } = source;
        sources.push(verify_source(&gateway, index, gateway_endpoint, ticket).await?);
    }
    let to = Destination { ticket, signed: request.ticket };

    // Progress is only informative, so it is dropped if the caller does not read it.
    let report = |Progress { done, total, saved, source, by_peer, readable }| {
        let progress = pb::FetchProgress {
            bytes_done: done,
            bytes_total: total,
            bytes_saved: saved,
            source: u32::try_from(source).unwrap_or(u32::MAX),
            peer_to_peer: by_peer,
            readable,
        };
        answers.try_send(Ok(pb::FetchResponse { message: Some(Answer::Progress(progress)) })).ok();
    };
    let manifest = pull::fetch(&attended.transfers, to, digest, sources, report).await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    let committed = pb::Committed { digest, size_bytes: manifest.size_bytes() };
    send(&answers, pb::FetchResponse { message: Some(Answer::Committed(committed)) }).await
}

/// Returns the source that `ticket` permits to read. Its address is the one that the scheduler
/// signed into the ticket. It must equal `named`, the address that the caller sent.
async fn verify_source(
    gateway: &WorkerSet,
    index: usize,
    named: String,
    ticket: String,
) -> Result<Source, Status> {
    match gateway.verify_ticket(&ticket, TicketOperation::Read).await {
        Ok(claims) if !claims.endpoint.is_empty() && claims.endpoint == named => {
            Ok(Source { endpoint: Some(named), ticket })
        }
        Ok(_) => Err(invalid_field(
            "sources.gateway_endpoint",
            format!(
                "the gateway of source {index} is not at {named:?}; use the address that came with its ticket"
            ),
        )),
        // Another source may work.
        Err(AdmitError::Ticket) => Ok(Source { endpoint: None, ticket }),
        Err(error) => Err(error.into()),
    }
}

pub(super) async fn stream_to_peer(
    gateway: WorkerSet,
    request: pb::StreamToPeerRequest,
) -> Result<pb::StreamToPeerResponse, Status> {
    let (attended, from) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
    // Both tickets are required, so a caller can write only to a volume that it may fill.
    let into = gateway.verify_ticket(&request.destination_ticket, TicketOperation::Write).await?;
    let address = rpc::required("peer_url", Some(request.peer_url).filter(|url| !url.is_empty()))?;
    let to = Inlet { address, volume: into.volume, encoding: request.encoding };
    attended.transfers.read_manifest(&from).await?;
    confirm(&to, &into, &request.destination_ticket).await?;
    match attended.worker.runtime.contents(from.volume).await.map_err(status)? {
        Contents::Remote(remote) => remote.send(&to).await.map_err(status)?,
        Contents::Directory(_) => {
            return Err(status(RuntimeError::NoPeers("the source is not a Concourse worker")));
        }
    }
    Ok(pb::StreamToPeerResponse {})
}

/// Checks that `to` is the peer address of the destination, as its gateway reports it. That gateway
/// is called at the address that the scheduler signed. So a caller cannot make a worker connect to
/// an address of its choice.
async fn confirm(to: &Inlet, into: &TicketClaims, signed: &str) -> Result<(), Status> {
    let unknown = |why: String| {
        Reason::NoPeers.status(SERVICE, format!("cannot confirm the peer address of the other worker: {why}"))
    };
    let outgoing = Outgoing::internal().with_ticket(signed);
    let peer = rpc::client::peer(&into.endpoint, outgoing).map_err(|error| unknown(error.to_string()))?;
    let mut request = Request::new(pb::GetPeerAddressRequest { ticket: signed.to_owned() });
    request.set_timeout(CONFIRM_TIMEOUT);
    let answer = VolumesClient::new(peer).get_peer_address(request).await;
    let answer = answer.map_err(|status| unknown(Refusal::from(status).to_string()))?.into_inner();
    if answer.peer_url == to.address {
        Ok(())
    } else {
        Err(invalid_field(
            "peer_url",
            "differs from the address that the gateway of the other worker reports",
        ))
    }
}

/// Returns the peer address of the worker whose volume is to be filled.
pub(super) async fn peer_address(
    gateway: WorkerSet,
    request: pb::GetPeerAddressRequest,
) -> Result<pb::GetPeerAddressResponse, Status> {
    let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Write).await?;
    let inlet = match attended.worker.runtime.contents(ticket.volume).await.map_err(status)? {
        Contents::Remote(remote) => remote.inlet().await.map_err(status)?,
        Contents::Directory(_) => None,
    };
    let none = || status(RuntimeError::NoPeers("the worker has no peer address"));
    Ok(pb::GetPeerAddressResponse { peer_url: inlet.ok_or_else(none)?.address })
}

impl From<FetchError> for Status {
    fn from(error: FetchError) -> Self {
        let message = error.to_string();
        match error {
            FetchError::Local(error) => error.into(),
            FetchError::Sources(errors) => {
                let errors = errors.iter().enumerate();
                let reasons = errors
                    .clone()
                    .map(|(index, error)| (format!("source_{index}"), error.reason().to_owned()));
                let unreached = errors
                    .clone()
                    .filter(|(_, error)| error.is_from_transport())
                    .map(|(index, _)| (format!("source_{index}_unreachable"), "true".to_owned()));
                let texts = errors.take(MAX_DESCRIBED).map(|(index, error)| {
                    let text = domain::error_chain(error);
                    (format!("source_{index}_error"), rpc::clipped(&text, MAX_ERROR_BYTES).into_owned())
                });
                Reason::SourceFailed.status_about(SERVICE, message, reasons.chain(unreached).chain(texts))
            }
        }
    }
}
