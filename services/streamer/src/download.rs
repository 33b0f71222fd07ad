//! Downloads: the lookup of a gateway from which a caller can read an artifact.
//!
//! A small tree without a readable replica is first copied to a worker.

use bytes::Bytes;
use domain::ArtifactId;

use crate::in_flight::{CopyError, CopyRequest, Waiter};
use crate::peers::{Operation, PeerError, Peers, Ticket};

/// The reason why an artifact cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The team has no such artifact, or it is not sealed.
    #[error("team has no sealed artifact {0}")]
    NotFound(ArtifactId),
    /// All replicas are lost.
    #[error("cannot read artifact {0}: every replica is lost; make or upload it again")]
    NoReplica(ArtifactId),
    /// The small tree cannot be copied to a worker.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
}

/// The artifact that a caller wants to read.
#[derive(Debug, Clone)]
pub(crate) struct DownloadRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// Gateways from earlier answers that did not work.
    pub(crate) avoid: Vec<String>,
}

/// The gateway and the ticket to read an artifact.
#[derive(Debug, Clone)]
pub(crate) struct DownloadLocation {
    pub(crate) ticket: Ticket,
    pub(crate) digest: Bytes,
    pub(crate) size_bytes: u64,
}

/// Returns a ticket for the first replica whose worker is in contact. Gateways in `avoid` are used
/// only if there is no other replica. `copy` starts a copy.
///
/// The scheduler counts a dead worker as in contact for a while. With `avoid`, a caller can read
/// from another worker meanwhile.
pub(crate) async fn locate(
    peers: &mut Peers,
    request: DownloadRequest,
    copy: impl FnOnce(CopyRequest) -> Waiter,
) -> Result<DownloadLocation, DownloadError> {
    let DownloadRequest { team, artifact, avoid } = request;
    let location = peers.locate(&team, artifact).await?.ok_or(DownloadError::NotFound(artifact))?;
    if !location.is_sealed {
        return Err(DownloadError::NotFound(artifact));
    }
    let (digest, size_bytes) = (location.digest, location.size_bytes);
    let readable = |ticket| DownloadLocation { ticket, digest: digest.clone(), size_bytes };

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
    // An avoided gateway may work again.
    copied.or_else(|error| avoided.ok_or(error)).map(readable)
}

/// Copies a small tree to a worker, and returns a ticket to read it there.
async fn copy_from_store(
    peers: &mut Peers,
    team: &str,
    artifact: ArtifactId,
    copy: impl FnOnce(CopyRequest) -> Waiter,
) -> Result<Ticket, DownloadError> {
    let lease = peers.place(team, &[]).await?;
    let copied = copy(CopyRequest { team: team.to_owned(), artifact, worker: lease.worker }).ended().await;
    peers.release_lease(lease.token).await;
    Ok(peers.issue_ticket(team, lease.worker, copied?.volume, Operation::Read).await?)
}
