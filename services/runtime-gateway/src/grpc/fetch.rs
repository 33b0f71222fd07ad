//! The calls that fetch a volume.

use rpc::pb::runtime::fetch_response::Message as Answer;
use runtime::{Contents, Inlet};

use super::*;
use crate::fetch::{self, Destination, FetchError, Progress, Source};

/// How many sources a call may name.
const MOST_SOURCES: usize = 100;

pub(super) async fn fetch(
    gateway: Gateway,
    request: pb::FetchRequest,
    answers: Answers<pb::FetchResponse>,
) -> Result<(), Status> {
    let digest = rpc::parse_digest("digest", &request.digest)?;
    if !(1..=MOST_SOURCES).contains(&request.sources.len()) {
        return Err(invalid_field("sources", format!("must be 1 to {MOST_SOURCES}")));
    }
    let sources = request.sources.into_iter();
    let sources = sources.map(|source| Source { endpoint: source.gateway_endpoint, ticket: source.ticket });
    let (worker, ticket) = gateway.admit(&request.ticket, TicketOperation::Write).await?;
    let to = Destination { ticket, signed: request.ticket };

    // Progress is for people: when the caller does not read it, it is left out.
    let tell = |Progress { done, total, saved, source, by_peer }| {
        let progress = pb::FetchProgress {
            bytes_done: done,
            bytes_total: total,
            bytes_saved: saved,
            source: u32::try_from(source).unwrap_or(u32::MAX),
            peer_to_peer: by_peer,
        };
        answers.try_send(Ok(pb::FetchResponse { message: Some(Answer::Progress(progress)) })).ok();
    };
    let manifest = fetch::fetch(&worker, to, digest, sources.collect(), tell).await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    let committed = pb::Committed { digest, size_bytes: manifest.size_bytes() };
    send(&answers, pb::FetchResponse { message: Some(Answer::Committed(committed)) }).await
}

pub(super) async fn stream_to_peer(
    gateway: Gateway,
    request: pb::StreamToPeerRequest,
) -> Result<pb::StreamToPeerResponse, Status> {
    let (worker, from) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
    // Nobody sends to a volume by which nobody let them.
    let into = gateway.permitted(&request.destination_ticket, TicketOperation::Write).await?;
    let address = rpc::required("peer_url", Some(request.peer_url).filter(|url| !url.is_empty()))?;
    let to = Inlet { address, volume: into.volume, encoding: request.encoding };
    volumes::manifest(&worker, &from).await?;
    match worker.runtime.contents(from.volume).await.map_err(status)? {
        Contents::Remote(remote) => remote.send(&to).await.map_err(status)?,
        Contents::Directory(_) => return Err(status(RuntimeError::NoPeers("it is no Concourse worker"))),
    }
    Ok(pb::StreamToPeerResponse {})
}

impl From<FetchError> for Status {
    fn from(error: FetchError) -> Self {
        let message = error.to_string();
        match error {
            FetchError::Here(error) => error.into(),
            FetchError::Sources(errors) => {
                let about = errors.iter().enumerate();
                let about =
                    about.map(|(place, error)| (format!("source_{place}"), error.reason().to_owned()));
                Reason::SourceFailed.status_about(SERVICE, message, about)
            }
        }
    }
}
