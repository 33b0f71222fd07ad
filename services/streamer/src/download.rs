//! Downloads: where a caller can read the bytes of an artifact.
//!
//! What the artifact store has itself, and no worker that can be read, is brought to one first.

use domain::ArtifactId;
use rpc::Refusal;
use rpc::pb::artifacts as store;
use rpc::pb::scheduler;
use rpc::pb::streamer as pb;

use crate::materialize::{Copied, CopyError, is_of_no_use};
use crate::transfers::{self, State, Waiting};
use crate::upload::{Peers, place, release};

/// No way to the bytes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DownloadError {
    /// The team has no such artifact, or its bytes are not final.
    #[error("no sealed artifact {0} in this team")]
    NotFound(ArtifactId),
    /// Every replica is gone.
    #[error("no replica of artifact {0} is left")]
    NoReplica(ArtifactId),
    /// What the store has could not be brought to a worker.
    #[error(transparent)]
    NotBrought(#[from] CopyError),
    /// A peer's answer makes no sense.
    #[error("the scheduler answered a malformed {0}")]
    Nonsense(&'static str),
    /// A peer refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What a caller wants to read.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// Gateways that were answered before and did not work.
    pub(crate) avoid: Vec<String>,
}

/// A ticket for the first replica whose worker is in contact, and whose gateway is not to be avoided, if there is one. `bring` begins a copy.
///
/// A worker that is gone counts as in contact for a while: who could not read there must be able to read elsewhere meanwhile.
pub(crate) async fn locate(
    peers: &mut Peers,
    wanted: Wanted,
    bring: impl FnOnce(transfers::Wanted) -> Waiting,
) -> Result<pb::DownloadResponse, DownloadError> {
    let Wanted { team, artifact, avoid } = wanted;
    let locate = store::LocateRequest { team: team.clone(), artifact_ids: vec![artifact.to_string()] };
    let located = peers.artifacts.locate(locate).await.map_err(Refusal::from)?.into_inner();
    let mut location = located.locations.into_iter().next().ok_or(DownloadError::NotFound(artifact))?;
    if location.state() != store::ArtifactState::Sealed {
        return Err(DownloadError::NotFound(artifact));
    }

    let (mut unreachable, mut avoided) = (None, None);
    for replica in std::mem::take(&mut location.replicas) {
        match at(peers, &team, &location, replica.worker_id, replica.volume_handle).await {
            Ok(response) if !avoid.contains(&endpoint(&response)) => return Ok(response),
            Ok(response) => avoided = Some(response),
            Err(refusal) if is_of_no_use(&refusal) => {
                unreachable = Some(refusal);
            }
            Err(refusal) => return Err(refusal.into()),
        }
    }
    let brought = match location.in_store {
        true => from_store(peers, &team, artifact, &location, bring).await,
        false => Err(unreachable.map_or(DownloadError::NoReplica(artifact), DownloadError::Refused)),
    };
    // One that did not work may work now.
    brought.or_else(|error| avoided.ok_or(error))
}

/// Brings what the store has to a worker, and answers where it is then.
async fn from_store(
    peers: &mut Peers,
    team: &str,
    artifact: ArtifactId,
    location: &store::Location,
    bring: impl FnOnce(transfers::Wanted) -> Waiting,
) -> Result<pb::DownloadResponse, DownloadError> {
    let lease = place(peers, team).await?;
    let worker = lease.worker_id.parse().map_err(|_| DownloadError::Nonsense("worker"))?;
    let brought = ended(bring(transfers::Wanted { team: team.to_owned(), artifact, worker })).await;
    release(peers, lease.lease_token).await;
    let volume = brought?.volume.to_string();
    Ok(at(peers, team, location, lease.worker_id, volume).await?)
}

/// What comes of a copy.
async fn ended(mut waiting: Waiting) -> Result<Copied, CopyError> {
    // A task that fails to tell has died.
    match waiting.states.wait_for(|state| matches!(state, State::Done(_))).await.as_deref() {
        Ok(State::Done(result)) => result.clone(),
        Ok(State::Going(_)) | Err(_) => Err(CopyError::Left),
    }
}

/// A ticket for one volume.
async fn at(
    peers: &mut Peers,
    team: &str,
    location: &store::Location,
    worker_id: String,
    volume_handle: String,
) -> Result<pb::DownloadResponse, Refusal> {
    let issue = scheduler::IssueTicketRequest {
        team: team.to_owned(),
        worker_id,
        volume_handle,
        operation: scheduler::TicketOperation::Read.into(),
    };
    let ticket = peers.workers.issue_ticket(issue).await?.into_inner();
    let go_to = pb::GoTo {
        gateway_endpoint: ticket.gateway_endpoint,
        ticket: ticket.ticket,
        worker_name: String::new(),
    };
    Ok(pb::DownloadResponse {
        go_to: Some(go_to),
        digest: location.digest.clone(),
        size_bytes: location.size_bytes,
    })
}

fn endpoint(response: &pb::DownloadResponse) -> String {
    response.go_to.as_ref().map(|go_to| go_to.gateway_endpoint.clone()).unwrap_or_default()
}
