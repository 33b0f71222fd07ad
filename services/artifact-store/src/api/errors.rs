//! Conversion of typed errors to gRPC statuses. No other code of the store creates a status.

use domain::{ArtifactId, AttemptId, BuildId, CacheId, ContainerHandle, VolumeHandle};
use rpc::Reason;
use rpc::token::VerifyError;
use sea_orm::DbErr;
use tonic::Status;
use uuid::Uuid;

use crate::api::SERVICE;
use crate::artifacts::inline::ReadError;
use crate::artifacts::replicas::{AuthorizeError, PlanError, ProgressError, SealError};
use crate::artifacts::restore::UndeleteError;
use crate::artifacts::{AdoptError, CreateError};
use crate::builds::{DeleteBuildError, OwnError, OwnerEnded, PutBuildError};
use crate::caches::HandOverError;
use crate::caches::resource_caches::{ClaimError, DeleteError, FindError, UseError, UserError};
use crate::caches::task_caches::{self, PublishError};
use crate::holders::HolderError;
use crate::inventory::delete_requests::{DisposeError, DropError};
use crate::inventory::imports::{self, EndError};
use crate::inventory::losses::WatchError;
use crate::inventory::orphans::{AdoptionError, PurgeError};
use crate::inventory::report::ReportError;
use crate::inventory::worker_removal::ForgetError;
use crate::inventory::{CompleteError, PrepareError, PreparedError, TouchError};
use crate::pins::{EndAttemptError, PinError, SettleError};
use crate::sessions::SessionError;

pub(super) fn verify(error: VerifyError) -> Status {
    match &error {
        VerifyError::Invalid(_) => Reason::InvalidToken.status(SERVICE, error.to_string()),
        VerifyError::KeysUnavailable(_) => rpc::unavailable(SERVICE, "verify a session credential", &error),
    }
}

pub(super) fn database(doing: &str, error: &DbErr) -> Status {
    rpc::unavailable(SERVICE, doing, error)
}

fn artifact(reason: Reason, message: String, id: ArtifactId) -> Status {
    reason.status_about(SERVICE, message, [("artifact_id", id.to_string())])
}

fn attempt(message: String, id: AttemptId) -> Status {
    Reason::AttemptEnded.status_about(SERVICE, message, [("attempt_id", id.to_string())])
}

fn build(reason: Reason, message: String, id: BuildId) -> Status {
    reason.status_about(SERVICE, message, [("build_id", id.to_string())])
}

impl From<SessionError> for Status {
    fn from(error: SessionError) -> Self {
        let message = error.to_string();
        let (reason, claims) = match &error {
            SessionError::StaleIncarnation(claims) => (Reason::StaleIncarnation, claims),
            SessionError::StaleSession(claims) => (Reason::StaleSession, claims),
            SessionError::Unrecorded(claims) => (Reason::Unavailable, claims),
            SessionError::Database(source) => return database("read the session of a worker", source),
        };
        reason.status_about(SERVICE, message, [("worker_id", claims.worker.to_string())])
    }
}

impl From<OwnerEnded> for Status {
    fn from(error: OwnerEnded) -> Self {
        match &error {
            OwnerEnded::Ended(id) => build(Reason::OwnerEnded, error.to_string(), *id),
            OwnerEnded::Database(source) => database("read a build", source),
        }
    }
}

impl From<CreateError> for Status {
    fn from(error: CreateError) -> Self {
        match error {
            CreateError::Exists(id) => artifact(Reason::ArtifactExists, error.to_string(), id),
            CreateError::Owner(error) => error.into(),
            CreateError::Database(source) => database("create an artifact", &source),
        }
    }
}

impl From<AdoptError> for Status {
    fn from(error: AdoptError) -> Self {
        match error {
            AdoptError::Owner(error) => error.into(),
            AdoptError::Database(source) => database("find an artifact by its digest", &source),
        }
    }
}

impl From<PutBuildError> for Status {
    fn from(error: PutBuildError) -> Self {
        match &error {
            PutBuildError::Ended(id) => build(Reason::BuildEnded, error.to_string(), *id),
            PutBuildError::Exists(id) => build(Reason::BuildExists, error.to_string(), *id),
            PutBuildError::NumberTaken(id, ..) => build(Reason::BuildExists, error.to_string(), *id),
            PutBuildError::Database(source) => database("put a build", source),
        }
    }
}

impl From<OwnError> for Status {
    fn from(error: OwnError) -> Self {
        match error {
            OwnError::ArtifactNotFound(id) => artifact_not_found(id),
            OwnError::Owner(error) => error.into(),
            OwnError::Database(source) => database("change the owners of an artifact", &source),
        }
    }
}

impl From<ReadError> for Status {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::NotFound(id) => artifact_not_found(id),
            ReadError::Database(source) => database("read a tree", &source),
        }
    }
}

impl From<UndeleteError> for Status {
    fn from(error: UndeleteError) -> Self {
        match error {
            UndeleteError::NotFound(id) => artifact_not_found(id),
            UndeleteError::Open(id) => artifact(Reason::ArtifactNotFound, error.to_string(), id),
            UndeleteError::BytesGone(id) => artifact(Reason::BytesGone, error.to_string(), id),
            UndeleteError::Owner(error) => error.into(),
            UndeleteError::Database(source) => database("restore an artifact", &source),
        }
    }
}

impl From<DeleteBuildError> for Status {
    fn from(error: DeleteBuildError) -> Self {
        match &error {
            DeleteBuildError::NotFound(id) => build(Reason::BuildNotFound, error.to_string(), *id),
            DeleteBuildError::Database(source) => database("delete a build", source),
        }
    }
}

fn cache(reason: Reason, message: String, id: CacheId) -> Status {
    reason.status_about(SERVICE, message, [("cache_id", id.to_string())])
}

impl From<FindError> for Status {
    fn from(error: FindError) -> Self {
        match error {
            FindError::ClaimTaken(_) => rpc::invalid_field("claim_id", error.to_string()),
            FindError::User(error) => error.into(),
            FindError::Database(source) => database("find a resource cache", &source),
        }
    }
}

impl From<UserError> for Status {
    fn from(error: UserError) -> Self {
        match error {
            UserError::Build(error) => error.into(),
            UserError::Workload(error) => error.into(),
            UserError::Settled(id) => Reason::HolderSettled.status_about(
                SERVICE,
                error.to_string(),
                [("holder_id", id.to_string())],
            ),
        }
    }
}

impl From<ClaimError> for Status {
    fn from(error: ClaimError) -> Self {
        match error {
            ClaimError::Lost(id) => {
                Reason::ClaimLost.status_about(SERVICE, error.to_string(), [("claim_id", id.to_string())])
            }
            ClaimError::Artifact(error) => error.into(),
            ClaimError::Database(source) => database("read a claim", &source),
        }
    }
}

impl From<HandOverError> for Status {
    fn from(error: HandOverError) -> Self {
        match &error {
            HandOverError::NotSealed(id) => artifact(Reason::ArtifactNotFound, error.to_string(), *id),
            HandOverError::Database(source) => database("give an artifact to a cache", source),
        }
    }
}

impl From<UseError> for Status {
    fn from(error: UseError) -> Self {
        match error {
            UseError::NotFound(id) => cache(Reason::CacheNotFound, error.to_string(), id),
            UseError::User(error) => error.into(),
            UseError::Database(source) => database("use a resource cache", &source),
        }
    }
}

impl From<DeleteError> for Status {
    fn from(error: DeleteError) -> Self {
        match &error {
            DeleteError::NotFound(id) => cache(Reason::CacheNotFound, error.to_string(), *id),
            DeleteError::InUse(id) => cache(Reason::CacheInUse, error.to_string(), *id),
            DeleteError::Database(source) => database("delete a resource cache", source),
        }
    }
}

impl From<PublishError> for Status {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::NotFound(id) => cache(Reason::CacheNotFound, error.to_string(), id),
            PublishError::Artifact(error) => error.into(),
            PublishError::Database(source) => database("publish a task cache", &source),
        }
    }
}

impl From<HolderError> for Status {
    fn from(error: HolderError) -> Self {
        match &error {
            HolderError::OtherTeam(_) => rpc::invalid_field("team", error.to_string()),
            HolderError::Database(source) => database("lock a workload", source),
        }
    }
}

impl From<PinError> for Status {
    fn from(error: PinError) -> Self {
        match error {
            PinError::Holder(error) => error.into(),
            PinError::Owner(error) => error.into(),
            PinError::Cache(task_caches::UseError::NotFound(id)) => Reason::InputUnavailable.status_about(
                SERVICE,
                format!("task cache {id} is unknown to this team"),
                [("cache_id", id.to_string())],
            ),
            PinError::Cache(task_caches::UseError::Database(source)) => database("pin artifacts", &source),
            PinError::Settled(id) => Reason::HolderSettled.status_about(
                SERVICE,
                error.to_string(),
                [("holder_id", id.to_string())],
            ),
            PinError::Unavailable(id) => artifact(Reason::InputUnavailable, error.to_string(), id),
            PinError::Database(source) => database("pin artifacts", &source),
        }
    }
}

impl From<SettleError> for Status {
    fn from(error: SettleError) -> Self {
        match error {
            SettleError::Holder(error) => error.into(),
            SettleError::CandidateMissing(id) | SettleError::ArtifactTaken(id) => {
                artifact(Reason::CandidateMissing, error.to_string(), id)
            }
            SettleError::Database(source) => database("settle a workload", &source),
        }
    }
}

impl From<EndAttemptError> for Status {
    fn from(error: EndAttemptError) -> Self {
        match &error {
            EndAttemptError::OtherHolder(_) => rpc::invalid_field("attempt_id", error.to_string()),
            EndAttemptError::Database(source) => database("end an attempt", source),
        }
    }
}

impl From<PlanError> for Status {
    fn from(error: PlanError) -> Self {
        match &error {
            PlanError::ArtifactNotFound(id) => artifact(Reason::ArtifactNotFound, error.to_string(), *id),
            PlanError::Unconfirmed(id) => artifact(Reason::Unavailable, error.to_string(), *id),
            PlanError::NotAttended(id) => {
                Reason::NotAttended.status_about(SERVICE, error.to_string(), [("worker_id", id.to_string())])
            }
            PlanError::TransferTaken(_) => rpc::invalid_field("transfer_id", error.to_string()),
            PlanError::Database(source) => database("plan a replica", source),
        }
    }
}

impl From<AuthorizeError> for Status {
    fn from(error: AuthorizeError) -> Self {
        match &error {
            AuthorizeError::NotPlanned(handle) => {
                volume(Reason::TransferNotPlanned, error.to_string(), *handle)
            }
            AuthorizeError::Database(source) => database("read a transfer", source),
        }
    }
}

impl From<ProgressError> for Status {
    fn from(error: ProgressError) -> Self {
        match &error {
            ProgressError::ClaimLost(id) => {
                Reason::ClaimLost.status_about(SERVICE, error.to_string(), [("transfer_id", id.to_string())])
            }
            ProgressError::Database(source) => database("renew a claim", source),
        }
    }
}

impl From<SealError> for Status {
    fn from(error: SealError) -> Self {
        match &error {
            SealError::ArtifactNotFound(id) => artifact(Reason::ArtifactNotFound, error.to_string(), *id),
            SealError::CandidateMissing(id) => artifact(Reason::CandidateMissing, error.to_string(), *id),
            SealError::OtherBytes(id) => artifact(Reason::ArtifactSealed, error.to_string(), *id),
            SealError::Database(source) => database("seal an artifact", source),
        }
    }
}

impl From<PrepareError> for Status {
    fn from(error: PrepareError) -> Self {
        match error {
            PrepareError::Session(error) => error.into(),
            PrepareError::Holder(error) => error.into(),
            PrepareError::AttemptEnded(id) => attempt(error.to_string(), id),
            PrepareError::InputUnavailable(id) => artifact(Reason::InputUnavailable, error.to_string(), id),
            PrepareError::Unconfirmed(id) => artifact(Reason::Unavailable, error.to_string(), id),
            PrepareError::Database(source) => database("prepare an attempt", &source),
        }
    }
}

impl From<PreparedError> for Status {
    fn from(error: PreparedError) -> Self {
        match error {
            PreparedError::Session(error) => error.into(),
            PreparedError::AttemptEnded(id) => attempt(error.to_string(), id),
            PreparedError::Database(source) => database("record a container", &source),
        }
    }
}

impl From<CompleteError> for Status {
    fn from(error: CompleteError) -> Self {
        let message = error.to_string();
        let (reason, handle) = match error {
            CompleteError::Session(error) => return error.into(),
            CompleteError::Input(_) | CompleteError::Import(_) => {
                return rpc::invalid_field("volume_handle", message);
            }
            CompleteError::OtherBytes(_) => return rpc::invalid_field("digest", message),
            CompleteError::Database(source) => return database("record a volume", &source),
            CompleteError::NotFound(handle) => (Reason::VolumeNotFound, handle),
            CompleteError::AttemptEnded(handle) => (Reason::AttemptEnded, handle),
            CompleteError::ClaimLost(handle) => (Reason::ClaimLost, handle),
        };
        volume(reason, message, handle)
    }
}

impl From<imports::PrepareError> for Status {
    fn from(error: imports::PrepareError) -> Self {
        match error {
            imports::PrepareError::Session(error) => error.into(),
            imports::PrepareError::Unconfirmed(id) => artifact(Reason::Unavailable, error.to_string(), id),
            imports::PrepareError::Database(source) => database("prepare an import", &source),
        }
    }
}

impl From<EndError> for Status {
    fn from(error: EndError) -> Self {
        let message = error.to_string();
        match error {
            EndError::Session(error) => error.into(),
            EndError::NoImport(_) => rpc::invalid_field("volume_handle", message),
            EndError::OtherBytes(_) => rpc::invalid_field("digest", message),
            EndError::NotFound(handle) => volume(Reason::VolumeNotFound, message, handle),
            EndError::ClaimLost(handle) => volume(Reason::ClaimLost, message, handle),
            EndError::HandOver(error) => error.into(),
            EndError::Database(source) => database("end an import", &source),
        }
    }
}

impl From<TouchError> for Status {
    fn from(error: TouchError) -> Self {
        match error {
            TouchError::Session(error) => error.into(),
            TouchError::ContainerNotFound(id) => Reason::ContainerNotFound.status_about(
                SERVICE,
                error.to_string(),
                [("attempt_id", id.to_string())],
            ),
            TouchError::Database(source) => database("record the use of a container", &source),
        }
    }
}

impl From<DisposeError> for Status {
    fn from(error: DisposeError) -> Self {
        let message = error.to_string();
        match error {
            DisposeError::Session(error) => error.into(),
            DisposeError::Replica(_) => rpc::invalid_field("volume_handle", message),
            DisposeError::ContainerNotFound(handle) => container_not_found(message, handle),
            DisposeError::VolumeNotFound(handle) => volume(Reason::VolumeNotFound, message, handle),
            DisposeError::InUse(handle) => volume(Reason::VolumeInUse, message, handle),
            DisposeError::Database(source) => database("mark a container or volume", &source),
        }
    }
}

impl From<DropError> for Status {
    fn from(error: DropError) -> Self {
        match error {
            DropError::ArtifactNotFound(id) => artifact(Reason::ArtifactNotFound, error.to_string(), id),
            DropError::LastReplica(id) => artifact(Reason::LastReplica, error.to_string(), id),
            DropError::Database(source) => database("drop a replica", &source),
        }
    }
}

impl From<ForgetError> for Status {
    fn from(error: ForgetError) -> Self {
        match error {
            ForgetError::LastReplica(ref alone) => {
                let named = (1..).zip(&alone.some).map(|(number, artifact)| {
                    let key =
                        if number == 1 { "artifact_id".to_owned() } else { format!("artifact_id_{number}") };
                    (key, artifact.to_string())
                });
                let about = named.chain([("artifacts".to_owned(), alone.count.to_string())]);
                Reason::LastReplica.status_about(SERVICE, error.to_string(), about.collect::<Vec<_>>())
            }
            // The handler answers a successful check with success.
            ForgetError::OnlyChecked(_) => Reason::Unavailable.status(SERVICE, error.to_string()),
            ForgetError::HoldsOrphans => Reason::HoldsOrphans.status(SERVICE, error.to_string()),
            ForgetError::Database(source) => database("forget a worker", &source),
        }
    }
}

impl From<WatchError> for Status {
    fn from(error: WatchError) -> Self {
        match error {
            WatchError::Compacted { .. } => Reason::Compacted.status(SERVICE, error.to_string()),
            WatchError::Database(source) => database("read losses", &source),
        }
    }
}

impl From<AdoptionError> for Status {
    fn from(error: AdoptionError) -> Self {
        let message = error.to_string();
        match error {
            AdoptionError::NotFound(handle, _) => volume(Reason::VolumeNotFound, message, handle),
            AdoptionError::NotOrphaned(handle) => volume(Reason::NotOrphaned, message, handle),
            AdoptionError::NotAdoptable(handle) => volume(Reason::NotAdoptable, message, handle),
            AdoptionError::ArtifactNotFound(id) => artifact(Reason::ArtifactNotFound, message, id),
            AdoptionError::OtherBytes(id) => artifact(Reason::ArtifactSealed, message, id),
            AdoptionError::Undelete(error) => error.into(),
            AdoptionError::Owner(error) => error.into(),
            AdoptionError::Database(source) => database("adopt a volume", &source),
        }
    }
}

impl From<PurgeError> for Status {
    fn from(error: PurgeError) -> Self {
        let about = |reason: Reason, id: Uuid| {
            reason.status_about(SERVICE, error.to_string(), [("id", id.to_string())])
        };
        match &error {
            PurgeError::NotFound(id, _) => about(Reason::UnknownId, *id),
            PurgeError::NotOrphaned(id) => about(Reason::NotOrphaned, *id),
            PurgeError::Database(source) => database("purge orphans", source),
        }
    }
}

fn volume(reason: Reason, message: String, handle: VolumeHandle) -> Status {
    reason.status_about(SERVICE, message, [("volume_handle", handle.to_string())])
}

pub(super) fn volume_not_found(handle: VolumeHandle) -> Status {
    volume(Reason::VolumeNotFound, format!("no volume {handle}"), handle)
}

fn container_not_found(message: String, handle: ContainerHandle) -> Status {
    Reason::ContainerNotFound.status_about(SERVICE, message, [("container_handle", handle.to_string())])
}

pub(super) fn no_container(handle: ContainerHandle) -> Status {
    container_not_found(format!("no container {handle}"), handle)
}

impl From<ReportError> for Status {
    fn from(error: ReportError) -> Self {
        match error {
            ReportError::Session(error) => error.into(),
            ReportError::Stale => Reason::StaleReport.status(SERVICE, error.to_string()),
            ReportError::Database(source) => database("judge a report", &source),
        }
    }
}

pub(super) fn artifact_not_found(id: ArtifactId) -> Status {
    artifact(Reason::ArtifactNotFound, format!("no artifact {id} in this team"), id)
}

/// Returns the status for an id that is unknown to the team.
pub(super) fn unknown_id(id: Uuid) -> Status {
    let message =
        format!("no item with the id {id} in this team: it is unknown, or was deleted too long ago");
    Reason::UnknownId.status_about(SERVICE, message, [("id", id.to_string())])
}

/// Returns the status for a report that ended without a commit, or has a wrong count.
pub(super) fn truncated(message: String) -> Status {
    Reason::ReportTruncated.status(SERVICE, message)
}
