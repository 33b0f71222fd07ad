//! The gRPC services of the store. A handler parses, calls a domain function in a transaction, and
//! answers.

mod artifacts;
mod caches;
mod collector;
mod errors;
mod explain;
mod imports;
mod inventory;
mod inventory_messages;
mod make_room;
mod orphans;
mod owners;
mod pins;
mod replicas;

use std::sync::Arc;

use domain::worker::SessionClaims;
use rpc::pb::artifacts as pb;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::app::Store;
use crate::artifacts::{ArtifactLocator, LocatedArtifact, Replica};
use crate::db::entity::{ArtifactState, BuildStatus};
use crate::db::units;
use crate::marks::references::Keepers;
use crate::pins::Pins;
use crate::policy::garbage::Policy;
use crate::sessions::SessionError;

/// Name of this service in error details.
const SERVICE: &str = "gantry.artifacts";

/// Maximum number of artifacts in one call.
const MAX_ARTIFACTS: usize = 1000;

/// Maximum number of task caches of a workload.
const MAX_TASK_CACHES: usize = 100;

/// Maximum length of a reason for people, in bytes.
const MAX_REASON_BYTES: usize = 1000;

/// Maximum number of workers in one call.
const MAX_WORKERS: usize = 1000;

/// Handlers of all services of the store. Cheap to clone.
#[derive(Clone)]
struct Handlers {
    store: Arc<Store>,
    pins: Pins,
    locator: ArtifactLocator,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

pub(crate) fn add_services(store: &Arc<Store>, host: &mut server::Host) {
    let handlers = Handlers {
        store: store.clone(),
        pins: Pins::new(store.clone(), &host.tasks()),
        locator: ArtifactLocator::new(store.db.clone(), host.tasks()),
        tasks: host.tasks(),
        stopping: host.stopping(),
    };
    host.add_service(pb::artifacts_server::ArtifactsServer::new(handlers.clone()));
    host.add_service(pb::owners_server::OwnersServer::new(handlers.clone()));
    host.add_service(pb::caches_server::CachesServer::new(handlers.clone()));
    host.add_service(pb::pins_server::PinsServer::new(handlers.clone()));
    host.add_service(pb::replicas_server::ReplicasServer::new(handlers.clone()));
    host.add_service(pb::inventory_server::InventoryServer::new(handlers.clone()));
    host.add_service(pb::collector_server::CollectorServer::new(handlers));
}

impl Handlers {
    fn policy(&self) -> Policy {
        Policy {
            unowned_ttl: self.store.config.unowned_ttl,
            gc_grace: self.store.config.gc_grace,
            needs_space: false,
        }
    }

    /// Verifies a session credential, records its session, and returns its claims.
    async fn session(&self, credential: &str) -> Result<SessionClaims, Status> {
        let claims: SessionClaims = self.store.verify(credential).await.map_err(errors::verify)?;
        self.store.record(&claims).await?;
        Ok(claims)
    }

    /// Returns `error`. If the database has lost a session, makes the next call record it again.
    fn forget_lost_session<E: AsSession>(&self, error: E) -> E {
        if let Some(SessionError::Unrecorded(claims)) = error.session() {
            self.store.unrecord(claims.worker);
        }
        error
    }
}

/// An error that may contain a session error.
trait AsSession {
    fn session(&self) -> Option<&SessionError>;
}

impl AsSession for SessionError {
    fn session(&self) -> Option<&SessionError> {
        Some(self)
    }
}

macro_rules! as_session {
    ($($error:ty),+) => {$(
        impl AsSession for $error {
            fn session(&self) -> Option<&SessionError> {
                match self {
                    Self::Session(error) => Some(error),
                    _ => None,
                }
            }
        }
    )+};
}

as_session!(
    crate::inventory::PrepareError,
    crate::inventory::PreparedError,
    crate::inventory::CompleteError,
    crate::inventory::imports::PrepareError,
    crate::inventory::imports::EndError,
    crate::inventory::TouchError,
    crate::inventory::delete_requests::DisposeError,
    crate::inventory::report::ReportError
);

fn artifact(located: LocatedArtifact, keepers: &Keepers) -> pb::Artifact {
    let LocatedArtifact { artifact, replicas } = located;
    pb::Artifact {
        artifact_id: artifact.artifact_id.to_string(),
        state: state(artifact.state).into(),
        size_bytes: units::size(artifact.size_bytes),
        digest: artifact.digest.unwrap_or_default().into(),
        created_at: Some(rpc::timestamp(domain::Timestamp(artifact.created_at))),
        kept_by: kept_by(keepers),
        replicas: replicas.iter().map(replica).collect(),
        marked_at: artifact.marked_at.map(|at| rpc::timestamp(domain::Timestamp(at))),
        mark_reason: artifact.mark_reason.unwrap_or_default(),
        in_store: artifact.in_store,
        team: artifact.team,
        label: artifact.label,
    }
}

/// Describes the references that keep an artifact, for people.
fn kept_by(keepers: &Keepers) -> Vec<String> {
    let mut lines: Vec<_> = keepers.first.iter().map(|keeper| keeper.kind.to_string()).collect();
    let left_out = keepers.total.saturating_sub(u64::try_from(lines.len()).unwrap_or(u64::MAX));
    if left_out > 0 {
        lines.push(format!("and {left_out} more"));
    }
    lines
}

fn location(located: LocatedArtifact) -> pb::Location {
    let LocatedArtifact { artifact, replicas } = located;
    pb::Location {
        artifact_id: artifact.artifact_id.to_string(),
        state: state(artifact.state).into(),
        size_bytes: units::size(artifact.size_bytes),
        digest: artifact.digest.unwrap_or_default().into(),
        replicas: replicas.iter().map(replica).collect(),
        in_store: artifact.in_store,
    }
}

fn replica(replica: &Replica) -> pb::Replica {
    let verification = if replica.verified { pb::Verification::Verified } else { pb::Verification::Reported };
    pb::Replica {
        volume_handle: replica.handle.to_string(),
        worker_id: replica.worker.to_string(),
        size_bytes: replica.size_bytes,
        verification: verification.into(),
    }
}

fn state(state: ArtifactState) -> pb::ArtifactState {
    match state {
        ArtifactState::Open => pb::ArtifactState::Open,
        ArtifactState::Sealed => pb::ArtifactState::Sealed,
        ArtifactState::Deleting => pb::ArtifactState::Deleting,
    }
}

fn parse_state(field: &str, value: i32) -> Result<Option<ArtifactState>, Status> {
    if value == 0 {
        return Ok(None);
    }
    Ok(match rpc::parse_enum(field, value)? {
        pb::ArtifactState::Unspecified => None,
        pb::ArtifactState::Open => Some(ArtifactState::Open),
        pb::ArtifactState::Sealed => Some(ArtifactState::Sealed),
        pb::ArtifactState::Deleting => Some(ArtifactState::Deleting),
    })
}

fn parse_build_status(field: &str, value: i32) -> Result<BuildStatus, Status> {
    match rpc::parse_enum(field, value)? {
        pb::BuildStatus::Unspecified => Err(rpc::invalid_field(field, "is required")),
        pb::BuildStatus::Succeeded => Ok(BuildStatus::Succeeded),
        pb::BuildStatus::Failed => Ok(BuildStatus::Failed),
        pb::BuildStatus::Errored => Ok(BuildStatus::Errored),
        pb::BuildStatus::Aborted => Ok(BuildStatus::Aborted),
    }
}

fn parse_artifacts(field: &str, ids: &[String]) -> Result<Vec<domain::ArtifactId>, Status> {
    if ids.len() > MAX_ARTIFACTS {
        return Err(rpc::invalid_field(field, format!("must be at most {MAX_ARTIFACTS}")));
    }
    ids.iter().map(|id| rpc::parse_id(field, id)).collect()
}

fn parse_workers(field: &str, ids: &[String]) -> Result<Vec<domain::WorkerId>, Status> {
    if ids.len() > MAX_WORKERS {
        return Err(rpc::invalid_field(field, format!("must be at most {MAX_WORKERS}")));
    }
    ids.iter().map(|id| rpc::parse_id(field, id)).collect()
}

/// Parses a reason for people, which is required and limited.
fn parse_reason(field: &str, reason: String) -> Result<String, Status> {
    match reason.len() {
        0 => Err(rpc::invalid_field(field, "is required")),
        length if length > MAX_REASON_BYTES => {
            Err(rpc::invalid_field(field, format!("must be at most {MAX_REASON_BYTES} bytes")))
        }
        // PostgreSQL rejects texts with NUL.
        _ if reason.contains('\0') => Err(rpc::invalid_field(field, "must not contain NUL")),
        _ => Ok(reason),
    }
}

/// Returns the elements of a page that fit into a message, and the token of the next page. The
/// token is empty after the last page.
fn end_page<M: rpc::Message>(page: rpc::page::Page, found: Vec<(uuid::Uuid, M)>) -> (Vec<M>, String) {
    let full = u64::try_from(found.len()).is_ok_and(|len| len == page.size);
    page.end(found, full)
}
