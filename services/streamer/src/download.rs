//! Downloads: where a caller can read the bytes of an artifact.
//!
//! What the artifact store has itself, and no worker that can be read, is copied to a worker first.

use bytes::Bytes;
use domain::ArtifactId;

use crate::in_flight::{CompleteCopy, CopyError, CopyRequest, CopyState, Waiter};
use crate::peers::{Operation, PeerError, Peers, Ticket};

/// No way to the bytes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The team has no such artifact, or its bytes are not final.
    #[error("no sealed artifact {0} in this team")]
    NotFound(ArtifactId),
    /// Every replica is gone.
    #[error("no replica of artifact {0} is left")]
    NoReplica(ArtifactId),
    /// What the store has could not be copied to a worker.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
}

/// What a caller wants to read.
#[derive(Debug, Clone)]
pub(crate) struct DownloadRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// Gateways that were answered before and did not work.
    pub(crate) avoid: Vec<String>,
}

/// Where the bytes can be read.
#[derive(Debug, Clone)]
pub(crate) struct Readable {
    pub(crate) ticket: Ticket,
    pub(crate) digest: Bytes,
    pub(crate) size_bytes: u64,
}

/// A ticket for the first replica whose worker is in contact, and whose gateway is not to be avoided, if there is one. `copy` begins a copy.
///
/// A worker that is gone counts as in contact for a while: a caller that cannot read there must be able to read elsewhere meanwhile.
pub(crate) async fn locate(
    peers: &mut Peers,
    request: DownloadRequest,
    copy: impl FnOnce(CopyRequest) -> Waiter,
) -> Result<Readable, DownloadError> {
    let DownloadRequest { team, artifact, avoid } = request;
    let location = peers.locate(&team, artifact).await?.ok_or(DownloadError::NotFound(artifact))?;
    if !location.is_sealed {
        return Err(DownloadError::NotFound(artifact));
    }
    let (digest, size_bytes) = (location.digest, location.size_bytes);
    let readable = |ticket| Readable { ticket, digest: digest.clone(), size_bytes };

    let (mut unreadable, mut avoided) = (None, None);
    for replica in location.replicas {
        match peers.issue_ticket(&team, replica.worker, replica.volume, Operation::Read).await {
            Ok(ticket) if !avoid.contains(&ticket.gateway_endpoint) => return Ok(readable(ticket)),
            Ok(ticket) => avoided = Some(ticket),
            Err(error) if error.is_unreadable_replica() => unreadable = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    let copied = match location.is_in_store {
        true => copy_from_store(peers, &team, artifact, copy).await,
        false => Err(unreadable.map_or(DownloadError::NoReplica(artifact), DownloadError::Peer)),
    };
    // A gateway that did not work may work now.
    copied.or_else(|error| avoided.ok_or(error)).map(readable)
}

/// Copies what the store has to a worker, and answers a ticket to read it there.
async fn copy_from_store(
    peers: &mut Peers,
    team: &str,
    artifact: ArtifactId,
    copy: impl FnOnce(CopyRequest) -> Waiter,
) -> Result<Ticket, DownloadError> {
    let lease = peers.place(team).await?;
    let copied = end_of(copy(CopyRequest { team: team.to_owned(), artifact, worker: lease.worker })).await;
    peers.release_lease(lease.token).await;
    Ok(peers.issue_ticket(team, lease.worker, copied?.volume, Operation::Read).await?)
}

/// How a copy ends.
async fn end_of(mut waiter: Waiter) -> Result<CompleteCopy, CopyError> {
    // A task that does not publish its end has died.
    match waiter.states.wait_for(|state| matches!(state, CopyState::Ended(_))).await.as_deref() {
        Ok(CopyState::Ended(result)) => result.clone(),
        Ok(CopyState::Running(_)) | Err(_) => Err(CopyError::Abandoned),
    }
}
