//! Conversion of messages from and to types of this crate.

use domain::WorkerId;
use rpc::pb::artifacts::Artifact;
use rpc::pb::streamer as pb;
use rpc::pb::streamer::evacuate_worker_response::Message as EvacuateMessage;
use rpc::pb::streamer::materialize_response::Message as MaterializeMessage;
use rpc::pb::streamer::upload_response::Message as UploadMessage;
use rpc::{Reason, Refusal, parse_digest, parse_id, parse_optional_id, parse_team};
use tonic::Status;

use super::SERVICE;
use crate::download::{DownloadError, DownloadLocation};
use crate::evacuation::{self, FailedCopy};
use crate::in_flight::{CopyError, CopyInfo, CopyState, Progress, Route};
use crate::peers::{PeerError, Ticket};
use crate::routes::RelayedPair;
use crate::upload::{UploadError, UploadEvent, UploadRequest};

/// Most workers that an upload avoids.
const MAX_AVOIDED: usize = 1000;
/// Most artifacts at risk in the last message of an evacuation.
const MAX_AT_RISK: usize = 100;

pub(super) fn parse_open(open: pb::UploadOpen) -> Result<UploadRequest, Status> {
    Ok(UploadRequest {
        team: parse_team("open.team", open.team)?,
        artifact: parse_id("open.artifact_id", &open.artifact_id)?,
        digest: match open.digest.as_ref() {
            [] => None,
            digest => Some(parse_digest("open.digest", digest)?),
        },
        build: parse_optional_id("open.build_id", &open.build_id)?,
        label: rpc::parse_label("open.label", open.label)?,
        avoid: parse_avoided(&open.avoid_worker_ids)?,
    })
}

fn parse_avoided(ids: &[String]) -> Result<Vec<WorkerId>, Status> {
    const FIELD: &str = "open.avoid_worker_ids";
    if ids.len() > MAX_AVOIDED {
        return Err(rpc::invalid_field(FIELD, format!("must not name more than {MAX_AVOIDED} workers")));
    }
    ids.iter().map(|id| parse_id(FIELD, id)).collect()
}

pub(super) fn upload_event(event: UploadEvent) -> pb::UploadResponse {
    let message = match event {
        UploadEvent::Write { ticket, worker_name, worker } => {
            let worker_id = worker.to_string();
            UploadMessage::Endpoint(pb::TransferEndpoint { worker_name, worker_id, ..endpoint(ticket) })
        }
        UploadEvent::Uploaded { artifact_id } => UploadMessage::Uploaded(pb::Uploaded { artifact_id }),
    };
    pb::UploadResponse { message: Some(message) }
}

pub(super) fn readable(readable: DownloadLocation) -> pb::DownloadResponse {
    let DownloadLocation { ticket, digest, size_bytes } = readable;
    pb::DownloadResponse { endpoint: Some(endpoint(ticket)), digest, size_bytes }
}

fn endpoint(Ticket { ticket, gateway_endpoint, .. }: Ticket) -> pb::TransferEndpoint {
    pb::TransferEndpoint { gateway_endpoint, ticket, ..pb::TransferEndpoint::default() }
}

pub(super) fn copy_state(state: CopyState) -> Result<pb::MaterializeResponse, Status> {
    let message = match state {
        CopyState::Running(now) => MaterializeMessage::Progress(progress(now)),
        CopyState::Ended(ended) => {
            let copy = ended?;
            MaterializeMessage::Materialized(pb::Materialized {
                volume_handle: copy.volume.to_string(),
                progress: copy.progress.map(progress),
            })
        }
    };
    Ok(pb::MaterializeResponse { message: Some(message) })
}

pub(super) fn transfer(copy: CopyInfo) -> pb::Transfer {
    pb::Transfer {
        transfer_id: copy.transfer.to_string(),
        team: copy.request.team,
        artifact_id: copy.request.artifact.to_string(),
        to_worker_id: copy.request.worker.to_string(),
        progress: Some(progress(copy.progress)),
        started_at: Some(rpc::timestamp(copy.since)),
    }
}

pub(super) fn relayed_pair(pair: RelayedPair) -> pb::RelayedPair {
    pb::RelayedPair {
        from_worker_id: pair.from.to_string(),
        to_worker_id: pair.to.to_string(),
        gateway_endpoint: pair.endpoint,
        error: pair.error,
        remaining: prost_types::Duration::try_from(pair.remaining).ok(),
    }
}

pub(super) fn evacuation(now: &evacuation::Progress) -> pb::EvacuateWorkerResponse {
    pb::EvacuateWorkerResponse { message: Some(EvacuateMessage::Progress(evacuation_progress(now))) }
}

pub(super) fn evacuated(
    (mut at_risk, now): (Vec<Artifact>, evacuation::Progress),
) -> pb::EvacuateWorkerResponse {
    let nothing_at_risk = at_risk.is_empty();
    at_risk.truncate(MAX_AT_RISK);
    let evacuated = pb::Evacuated { nothing_at_risk, progress: Some(evacuation_progress(&now)), at_risk };
    pb::EvacuateWorkerResponse { message: Some(EvacuateMessage::Evacuated(evacuated)) }
}

fn evacuation_progress(now: &evacuation::Progress) -> pb::EvacuationProgress {
    pb::EvacuationProgress {
        artifacts_copied: now.copied,
        bytes_copied: now.copied_bytes,
        artifacts_at_risk: now.at_risk,
        bytes_at_risk: now.at_risk_bytes,
        failures: now.failures.iter().cloned().map(failed_copy).collect(),
    }
}

fn failed_copy(FailedCopy { team, artifact, error }: FailedCopy) -> pb::FailedCopy {
    let no_room = || Reason::AllWorkersBusy.status(SERVICE, "no other reliable worker has room for it");
    let refusal = Refusal::from(error.map_or_else(no_room, Status::from));
    let (artifact_id, reason) = (artifact.to_string(), refusal.reason.unwrap_or_default());
    pb::FailedCopy { artifact_id, team, reason, message: refusal.message }
}

fn progress(now: Progress) -> pb::TransferProgress {
    let route = match now.route {
        Route::Unknown => pb::Route::Unspecified,
        Route::Peer => pb::Route::Peer,
        Route::Workers => pb::Route::Workers,
        Route::Store => pb::Route::Store,
        Route::Relay => pb::Route::Relay,
        Route::Elsewhere => pb::Route::OtherStreamer,
    };
    pb::TransferProgress {
        bytes_done: now.done,
        bytes_total: now.total,
        bytes_saved: now.saved,
        bytes_per_second: now.per_second,
        route: route.into(),
        from_worker_id: now.from.map(|worker| worker.to_string()).unwrap_or_default(),
    }
}

impl From<PeerError> for Status {
    fn from(error: PeerError) -> Self {
        match error {
            PeerError::Refused(refusal) => Refusal::pass_on(&refusal, SERVICE),
            PeerError::Malformed(_) => Reason::Unavailable.status(SERVICE, error.to_string()),
        }
    }
}

impl From<CopyError> for Status {
    fn from(error: CopyError) -> Self {
        let reason = match &error {
            CopyError::NotFound(_) => Reason::ArtifactNotFound,
            CopyError::NoReplica(_) => Reason::NoReplica,
            CopyError::Peer(error) => return error.clone().into(),
            CopyError::Sources { about, .. } => {
                return Reason::SourceFailed.status_about(SERVICE, error.to_string(), about.clone());
            }
            CopyError::Unreachable { worker, .. } => {
                let about = [("worker", worker.to_string())];
                return Reason::WorkerUnreachable.status_about(SERVICE, error.to_string(), about);
            }
            CopyError::Silent(_) => Reason::WorkerUnreachable,
            CopyError::Cancelled => Reason::TransferCancelled,
            CopyError::Truncated(_)
            | CopyError::OtherBytes(_)
            | CopyError::Abandoned
            | CopyError::Stopping => Reason::Unavailable,
        };
        reason.status(SERVICE, error.to_string())
    }
}

impl From<UploadError> for Status {
    fn from(error: UploadError) -> Self {
        match error {
            UploadError::Peer(error) => error.into(),
            UploadError::Exists(_) => Reason::ArtifactExists.status(SERVICE, error.to_string()),
            UploadError::CallerGone => Reason::TransferTruncated.status(SERVICE, error.to_string()),
        }
    }
}

impl From<DownloadError> for Status {
    fn from(error: DownloadError) -> Self {
        let reason = match &error {
            DownloadError::NotFound(_) => Reason::ArtifactNotFound,
            DownloadError::NoReplica(_) => Reason::NoReplica,
            DownloadError::Copy(error) => return error.clone().into(),
            DownloadError::Peer(error) => return error.clone().into(),
        };
        reason.status(SERVICE, error.to_string())
    }
}
