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

/// A ticket for the first replica whose worker is in contact, and whose gateway is not to be avoided, if there is one.
///
/// A worker that is gone counts as in contact for a while: who could not read there must be able to read elsewhere meanwhile.
pub(crate) async fn locate(
    peers: &mut Peers,
    team: String,
    artifact: ArtifactId,
    avoid: &[String],
) -> Result<pb::DownloadResponse, DownloadError> {
    let locate = store::LocateRequest { team: team.clone(), artifact_ids: vec![artifact.to_string()] };
    let located = peers.artifacts.locate(locate).await.map_err(Refusal::from)?.into_inner();
    let location = located.locations.into_iter().next().ok_or(DownloadError::NotFound(artifact))?;
    if location.state() != store::ArtifactState::Sealed {
        return Err(DownloadError::NotFound(artifact));
    }

    let (mut unreachable, mut avoided) = (None, None);
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
                let avoids = avoid.contains(&ticket.gateway_endpoint);
                let go_to = pb::GoTo {
                    gateway_endpoint: ticket.gateway_endpoint,
                    ticket: ticket.ticket,
                    worker_name: String::new(),
                };
                let response = pb::DownloadResponse {
                    go_to: Some(go_to),
                    digest: location.digest.clone(),
                    size_bytes: location.size_bytes,
                };
                if !avoids {
                    return Ok(response);
                }
                avoided = Some(response);
            }
            Err(refusal) if refusal.is(Reason::WorkerUnreachable) || refusal.is(Reason::WorkerNotFound) => {
                unreachable = Some(refusal);
            }
            Err(refusal) => return Err(refusal.into()),
        }
    }
    if let Some(response) = avoided {
        return Ok(response);
    }
    Err(unreachable.map_or(DownloadError::NoReplica(artifact), DownloadError::Refused))
}
