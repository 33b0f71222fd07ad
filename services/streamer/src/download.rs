//! Downloads: where a caller can read the bytes of an artifact.

use domain::ArtifactId;
use rpc::pb::artifacts as store;
use rpc::pb::scheduler;
use rpc::pb::streamer as pb;
use rpc::{Reason, Refusal};

use crate::upload::Peers;

/// No way to the bytes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The team has no such artifact, or its bytes are not final.
    #[error("no sealed artifact {0} in this team")]
    NotFound(ArtifactId),
    /// Every replica is gone.
    #[error("no replica of artifact {0} is left")]
    NoReplica(ArtifactId),
    /// A peer refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// A ticket for the first replica whose worker is in contact.
pub(crate) async fn locate(
    peers: &mut Peers,
    team: String,
    artifact: ArtifactId,
) -> Result<pb::DownloadResponse, DownloadError> {
    let locate = store::LocateRequest { team: team.clone(), artifact_ids: vec![artifact.to_string()] };
    let located = peers.artifacts.locate(locate).await.map_err(Refusal::from)?.into_inner();
    let location = located.locations.into_iter().next().ok_or(DownloadError::NotFound(artifact))?;
    if location.state() != store::ArtifactState::Sealed {
        return Err(DownloadError::NotFound(artifact));
    }

    let mut unreachable = None;
    for replica in location.replicas {
        let issue = scheduler::IssueTicketRequest {
            team: team.clone(),
            worker_id: replica.worker_id,
            volume_handle: replica.volume_handle,
            operation: scheduler::TicketOperation::Read.into(),
        };
        match peers.workers.issue_ticket(issue).await.map_err(Refusal::from) {
            Ok(ticket) => {
                let ticket = ticket.into_inner();
                let go_to = pb::GoTo {
                    gateway_endpoint: ticket.gateway_endpoint,
                    ticket: ticket.ticket,
                    worker_name: String::new(),
                };
                return Ok(pb::DownloadResponse {
                    go_to: Some(go_to),
                    digest: location.digest,
                    size_bytes: location.size_bytes,
                });
            }
            Err(refusal) if refusal.is(Reason::WorkerUnreachable) || refusal.is(Reason::WorkerNotFound) => {
                unreachable = Some(refusal);
            }
            Err(refusal) => return Err(refusal.into()),
        }
    }
    Err(unreachable.map_or(DownloadError::NoReplica(artifact), DownloadError::Refused))
}
