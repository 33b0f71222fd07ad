//! Imports of worker-provided images and certificates as artifacts.
//!
//! ```text
//! (prepare) ──▶ open, a volume claimed ──complete──▶ sealed, owned by the worker
//!                    │       ▲ another volume                 │
//!                    └───────┘ claim expired, failed,         └──▶ (prepare) another artifact:
//!                              another session                       version or path changed,
//!                                                                    replica lost, owner replaced
//! ```
//!
//! An imported artifact belongs to no team ([`ALL_TEAMS`]), so that no call of a team fills, owns
//! or seals it. Only [`complete`] seals it. No commit is needed, because the worker had the bytes
//! before and is their only source. The store trusts the gateway's session.
//!
//! Invariants:
//!
//! - Only the session for which a volume was minted can seal its artifact. A newer session marks
//!   unfinished imports ([`crate::sessions`]), and every step runs behind [`fence`].
//! - A provided image or certificate has one import at a time, which its row names. The row does
//!   not record success: the owner does, by naming the same artifact.
//!
//! Locks, in this order: the worker, the row of the import, the owner's row, artifacts, volumes.

use std::time::Duration;

use domain::worker::SessionClaims;
use domain::{ArtifactId, Timestamp, VolumeHandle, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts;
use crate::caches::HandOverError;
use crate::caches::base_types::{self, BaseType};
use crate::db::entity::{
    ALL_TEAMS, ArtifactState, Purpose, State, artifact, base_resource_type, import, resource_certs, volume,
};
use crate::db::volumes;
use crate::inventory::Bytes;
use crate::marks::{self, sweep_queue};
use crate::policy::garbage::MarkReason;
use crate::sessions::{SessionError, fence};

/// An image or certificates that a worker provides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProvidedItem {
    /// Resource type of the image. Empty: certificates.
    pub(crate) resource_type: String,
    pub(crate) version: String,
    pub(crate) path: String,
}

/// The artifact and volume of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreparedImport {
    pub(crate) artifact: ArtifactId,
    pub(crate) volume: VolumeHandle,
    /// Whether the import is complete.
    pub(crate) is_imported: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The worker has begun a new incarnation and has not reported yet.
    #[error(
        "artifact {0} is not confirmed on this worker yet: repeat the call after the worker's next report"
    )]
    Unconfirmed(ArtifactId),
    #[error("database failed while preparing an import")]
    Database(#[from] DbErr),
}

/// Finds the artifact of a provided item, or mints one with a volume that is claimed until `now +
/// term`.
///
/// Also returns the workers on which volumes were marked.
pub(crate) async fn prepare(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    provided: &ProvidedItem,
    now: Timestamp,
    term: Duration,
) -> Result<(PreparedImport, Vec<WorkerId>), PrepareError> {
    let worker = fence(txn, claims).await?;
    let row = find_or_create_import(txn, claims.worker, provided).await?;
    let is_same = row.version == provided.version && row.path == provided.path;
    let owned = lock_owner(txn, claims.worker, &provided.resource_type).await?;
    let artifact = artifact::Entity::find_by_id(row.artifact_id).lock_exclusive().one(txn).await?;
    let state = artifact.map(|artifact| artifact.state);
    let mut marked = Vec::new();
    let (artifact, volume) = match state {
        Some(ArtifactState::Sealed) if is_same && owned == Some(row.artifact_id) => {
            let artifact = ArtifactId::from_uuid(row.artifact_id);
            if let Some(replica) = replica(txn, claims.worker, artifact).await? {
                let volume = VolumeHandle::from_uuid(replica);
                return Ok((PreparedImport { artifact, volume, is_imported: true }, Vec::new()));
            }
            (new_artifact(txn, now).await?, None)
        }
        // The import has begun, and only it can seal the artifact.
        Some(ArtifactState::Open) => {
            let going_on = volume::Entity::find_by_id(row.volume)
                .filter(volume::Column::State.eq(State::Creating))
                .lock_exclusive()
                .one(txn)
                .await?
                .map(|volume| volume.handle);
            if let Some(old) = going_on.filter(|_| !is_same) {
                marked = marks::mark_volumes(txn, &[old], MarkReason::ImportReplaced, now).await?;
            }
            (ArtifactId::from_uuid(row.artifact_id), going_on.filter(|_| is_same))
        }
        _ => (new_artifact(txn, now).await?, None),
    };
    let volume = match volume {
        Some(handle) => {
            volume::Entity::update_many()
                .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
                .filter(volume::Column::Handle.eq(handle))
                .exec(txn)
                .await?;
            VolumeHandle::from_uuid(handle)
        }
        None => new_volume(txn, claims.worker, artifact, worker.sequence, now, term).await?,
    };
    if !is_same {
        forget_failure(txn, row.import_id).await?;
    }
    import::Entity::update_many()
        .col_expr(import::Column::Version, Expr::value(&*provided.version))
        .col_expr(import::Column::Path, Expr::value(&*provided.path))
        .col_expr(import::Column::ArtifactId, Expr::value(artifact.uuid()))
        .col_expr(import::Column::Volume, Expr::value(volume.uuid()))
        .filter(import::Column::ImportId.eq(row.import_id))
        .exec(txn)
        .await?;
    Ok((PreparedImport { artifact, volume, is_imported: false }, marked))
}

/// Finds or creates the row of a provided item, and locks it. A new row names no artifact yet.
async fn find_or_create_import(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    provided: &ProvidedItem,
) -> Result<import::Model, DbErr> {
    let key = (worker.uuid(), provided.resource_type.clone());
    if let Some(row) = import::Entity::find_by_id(key.clone()).lock_exclusive().one(txn).await? {
        return Ok(row);
    }
    let row = import::Model {
        worker_id: worker.uuid(),
        resource_type: provided.resource_type.clone(),
        import_id: Uuid::now_v7(),
        version: provided.version.clone(),
        path: provided.path.clone(),
        artifact_id: Uuid::nil(),
        volume: Uuid::nil(),
        failed_at: None,
        failure_reason: None,
    };
    import::Entity::insert(row.into_active_model().reset_all())
        .on_conflict_do_nothing_on([import::Column::WorkerId, import::Column::ResourceType])
        .exec_without_returning(txn)
        .await?;
    // Another transaction may have inserted the row.
    let row = import::Entity::find_by_id(key).lock_exclusive().one(txn).await?;
    row.ok_or_else(|| DbErr::RecordNotFound(format!("import of worker {worker}")))
}

/// Locks the owner that a provided item is imported for, and returns its artifact.
async fn lock_owner(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    resource_type: &str,
) -> Result<Option<Uuid>, DbErr> {
    if resource_type.is_empty() {
        let row = resource_certs::Entity::find_by_id(worker.uuid()).lock_exclusive().one(txn).await?;
        return Ok(row.map(|row| row.artifact_id));
    }
    let row = base_resource_type::Entity::find()
        .filter(base_resource_type::Column::ResourceType.eq(resource_type))
        .filter(base_resource_type::Column::WorkerId.eq(worker.uuid()))
        .lock_exclusive()
        .one(txn)
        .await?;
    Ok(row.map(|row| row.artifact_id))
}

/// Returns a complete replica of an artifact on a worker. `None` if it was lost.
async fn replica(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    id: ArtifactId,
) -> Result<Option<Uuid>, PrepareError> {
    let replicas = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(id.uuid()))
        .filter(volume::Column::WorkerId.eq(worker.uuid()))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(volume::Column::Complete.eq(true))
        .filter(volume::Column::State.is_in(State::PRESENT))
        .order_by_asc(volume::Column::Handle)
        .all(txn)
        .await?;
    match replicas.iter().find(|row| row.state == State::Created) {
        Some(row) => Ok(Some(row.handle)),
        None if replicas.is_empty() => Ok(None),
        None => Err(PrepareError::Unconfirmed(id)),
    }
}

/// Creates an open artifact that belongs to no team and has no owner.
async fn new_artifact(txn: &DatabaseTransaction, now: Timestamp) -> Result<ArtifactId, DbErr> {
    let id = ArtifactId::new();
    let row = artifacts::unowned(id, ALL_TEAMS, now);
    artifact::Entity::insert(row.into_active_model().reset_all()).exec_without_returning(txn).await?;
    Ok(id)
}

/// Mints the handle of a volume for an import.
async fn new_volume(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    artifact: ArtifactId,
    sequence: i64,
    now: Timestamp,
    term: Duration,
) -> Result<VolumeHandle, DbErr> {
    let handle = VolumeHandle::new();
    let row = volume::Model {
        artifact_id: Some(artifact.uuid()),
        claimed_until: Some((now + term).0),
        ..volumes::new_volume(handle, worker, Purpose::Replica, sequence, now)
    };
    volume::Entity::insert(row.into_active_model().reset_all()).exec_without_returning(txn).await?;
    Ok(handle)
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum EndError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("cannot end the import: the worker has no volume {0}; begin the import again")]
    NotFound(VolumeHandle),
    #[error("volume {0} is not an unfinished import")]
    NoImport(VolumeHandle),
    #[error("volume {0} was completed with other bytes")]
    OtherBytes(VolumeHandle),
    #[error("the import into volume {0} lost its claim")]
    ClaimLost(VolumeHandle),
    #[error(transparent)]
    HandOver(#[from] HandOverError),
    #[error("database failed while ending an import")]
    Database(#[from] DbErr),
}

/// Returns a volume of an import, and the locked row of the import if it still names the volume.
async fn find(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handle: VolumeHandle,
) -> Result<(volume::Model, Option<import::Model>), EndError> {
    let seen = volume::Entity::find_by_id(handle.uuid())
        .filter(volume::Column::WorkerId.eq(claims.worker.uuid()))
        .one(txn)
        .await?
        .ok_or(EndError::NotFound(handle))?;
    if !seen.is_import() {
        return Err(EndError::NoImport(handle));
    }
    let row = import::Entity::find()
        .filter(import::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(import::Column::Volume.eq(handle.uuid()))
        .lock_exclusive()
        .one(txn)
        .await?;
    Ok((seen, row))
}

/// Completes an import: seals its artifact with the volume's bytes, and replaces the worker's
/// previous version.
pub(crate) async fn complete(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handle: VolumeHandle,
    bytes: &Bytes,
    now: Timestamp,
) -> Result<ArtifactId, EndError> {
    let worker = fence(txn, claims).await?;
    let (seen, row) = find(txn, claims, handle).await?;
    let Some(row) = row.filter(|row| seen.artifact_id == Some(row.artifact_id)) else {
        return Err(EndError::ClaimLost(handle));
    };
    let id = ArtifactId::from_uuid(row.artifact_id);
    let before = lock_owner(txn, claims.worker, &row.resource_type).await?;
    let artifacts = artifact::Entity::find()
        .filter(artifact::Column::ArtifactId.is_in([Some(row.artifact_id), before].into_iter().flatten()))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_exclusive()
        .all(txn)
        .await?;
    let state = artifacts.iter().find(|artifact| artifact.artifact_id == row.artifact_id);
    let state = state.map(|artifact| artifact.state);
    let Some(volume) = volume::Entity::find_by_id(handle.uuid()).lock_exclusive().one(txn).await? else {
        return Err(EndError::ClaimLost(handle));
    };
    let volume = sweep_queue::merge_mark(txn, volume).await?;
    if volume.state.is_garbage() {
        return Err(EndError::ClaimLost(handle));
    }
    if volume.complete {
        let same = volume.digest.as_deref() == Some(bytes.digest.as_bytes());
        return if same { Ok(id) } else { Err(EndError::OtherBytes(handle)) };
    }
    let is_claimed = volume.claimed_until.is_some_and(|until| until > now.0);
    if !is_claimed || state != Some(ArtifactState::Open) {
        return Err(EndError::ClaimLost(handle));
    }
    volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::value(State::Created))
        .col_expr(volume::Column::JudgedAfter, Expr::value(worker.sequence))
        .col_expr(volume::Column::Complete, Expr::value(true))
        .col_expr(volume::Column::Digest, Expr::value(bytes.digest.as_bytes().to_vec()))
        .col_expr(volume::Column::SizeBytes, Expr::value(bytes.size_bytes))
        .col_expr(volume::Column::Verified, Expr::value(bytes.verified))
        .filter(volume::Column::Handle.eq(handle.uuid()))
        .exec(txn)
        .await?;
    artifact::Entity::update_many()
        .col_expr(artifact::Column::State, Expr::value(ArtifactState::Sealed))
        .col_expr(artifact::Column::Digest, Expr::value(bytes.digest.as_bytes().to_vec()))
        .col_expr(artifact::Column::SizeBytes, Expr::value(bytes.size_bytes))
        .col_expr(artifact::Column::Label, Expr::value(label(&row)))
        .filter(artifact::Column::ArtifactId.eq(row.artifact_id))
        .filter(artifact::Column::State.eq(ArtifactState::Open))
        .exec(txn)
        .await?;
    forget_failure(txn, row.import_id).await?;
    if row.resource_type.is_empty() {
        base_types::put_certs(txn, ALL_TEAMS, claims.worker, id, now).await?;
    } else {
        let base_type = BaseType {
            team: ALL_TEAMS.to_owned(),
            resource_type: row.resource_type,
            version: row.version,
            worker: Some(claims.worker),
            artifact: id,
        };
        base_types::put_type(txn, &base_type, now).await?;
    }
    Ok(id)
}

async fn forget_failure(txn: &DatabaseTransaction, import: Uuid) -> Result<(), DbErr> {
    import::Entity::update_many()
        .col_expr(import::Column::FailedAt, Expr::value(None::<i64>))
        .col_expr(import::Column::FailureReason, Expr::value(None::<String>))
        .filter(import::Column::ImportId.eq(import))
        .exec(txn)
        .await
        .map(drop)
}

/// Returns the label of an imported artifact.
fn label(row: &import::Model) -> String {
    if row.resource_type.is_empty() {
        return "certs".to_owned();
    }
    format!("{} {}", row.resource_type, row.version).trim().to_owned()
}

/// Marks the volume of a failed import, and stores the reason. Returns the affected workers.
pub(crate) async fn fail(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handle: VolumeHandle,
    why: &str,
    now: Timestamp,
) -> Result<Vec<WorkerId>, EndError> {
    fence(txn, claims).await?;
    let (_, row) = find(txn, claims, handle).await?;
    let volume = volume::Entity::find_by_id(handle.uuid()).lock_exclusive().one(txn).await?;
    if volume.is_some_and(|volume| volume.complete) {
        return Err(EndError::NoImport(handle));
    }
    if let Some(row) = row {
        import::Entity::update_many()
            .col_expr(import::Column::FailedAt, Expr::value(now.0))
            .col_expr(import::Column::FailureReason, Expr::value(why))
            .filter(import::Column::ImportId.eq(row.import_id))
            .exec(txn)
            .await?;
    }
    Ok(marks::mark_volumes(txn, &[handle.uuid()], why, now).await?)
}

/// Deletes the base resource types, certificates and imports of a worker that is forgotten. Returns
/// their artifacts, which the caller locks and makes due.
pub(crate) async fn forget_worker(txn: &DatabaseTransaction, worker: WorkerId) -> Result<Vec<Uuid>, DbErr> {
    let of_worker = base_resource_type::Column::WorkerId.eq(worker.uuid());
    let types =
        base_resource_type::Entity::find().filter(of_worker.clone()).lock_exclusive().all(txn).await?;
    let certs = resource_certs::Entity::find_by_id(worker.uuid()).lock_exclusive().one(txn).await?;
    base_resource_type::Entity::delete_many().filter(of_worker).exec(txn).await?;
    resource_certs::Entity::delete_by_id(worker.uuid()).exec(txn).await?;
    import::Entity::delete_many().filter(import::Column::WorkerId.eq(worker.uuid())).exec(txn).await?;
    let types = types.into_iter().map(|row| row.artifact_id);
    Ok(types.chain(certs.map(|row| row.artifact_id)).collect())
}

/// State of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    Importing,
    Imported,
    Failed,
}

/// Returns a page of the imports of workers, oldest first, with their states.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    worker: Option<WorkerId>,
    page: rpc::page::Page,
) -> Result<Vec<(import::Model, Progress)>, DbErr> {
    let mut query = import::Entity::find()
        .filter(import::Column::ImportId.gt(page.after.unwrap_or_default()))
        .order_by_asc(import::Column::ImportId)
        .limit(page.size);
    if let Some(worker) = worker {
        query = query.filter(import::Column::WorkerId.eq(worker.uuid()));
    }
    let rows = query.all(conn).await?;
    let artifacts = || rows.iter().map(|row| row.artifact_id);
    let types = base_resource_type::Entity::find()
        .filter(base_resource_type::Column::ArtifactId.is_in(artifacts()))
        .all(conn)
        .await?;
    let certs = resource_certs::Entity::find()
        .filter(resource_certs::Column::ArtifactId.is_in(artifacts()))
        .all(conn)
        .await?;
    let is_owned = |row: &import::Model| {
        types.iter().any(|owner| {
            (owner.worker_id, &owner.resource_type, owner.artifact_id)
                == (Some(row.worker_id), &row.resource_type, row.artifact_id)
        }) || row.resource_type.is_empty()
            && certs
                .iter()
                .any(|owner| (owner.worker_id, owner.artifact_id) == (row.worker_id, row.artifact_id))
    };
    let progress = |row: &import::Model| match (is_owned(row), &row.failure_reason) {
        (_, Some(_)) => Progress::Failed,
        (true, None) => Progress::Imported,
        (false, None) => Progress::Importing,
    };
    let progress: Vec<_> = rows.iter().map(progress).collect();
    Ok(rows.into_iter().zip(progress).collect())
}

impl volume::Model {
    /// Returns whether the volume was minted for an import. Other replicas have a transfer until
    /// they are complete.
    pub(crate) fn is_import(&self) -> bool {
        self.purpose == Purpose::Replica && self.transfer_id.is_none() && self.claimed_until.is_some()
    }
}
