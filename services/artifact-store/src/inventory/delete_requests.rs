//! Deletion of containers, volumes and replicas at the request of gateways and operators.
//!
//! Invariants: a replica is deleted only by [`drop_replica`], which rejects the last replica of a
//! kept artifact. A volume of an attempt is not deleted before its container.
//!
//! Marked items are handed out like all others, children before their parents ([`crate::marks`]).

use domain::worker::SessionClaims;
use domain::{ArtifactId, ContainerHandle, Timestamp, VolumeHandle, WorkerId};
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect};

use crate::db::entity::{ArtifactState, Purpose, State, artifact, attempt, container, volume, worker};
use crate::marks::schedule::make_due;
use crate::marks::{self, references, sweep_queue};
use crate::policy::garbage::{self, Policy, Verdict};
use crate::sessions::{SessionError, fence};

#[derive(Debug, thiserror::Error)]
pub(crate) enum DisposeError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("no container {0}, or it is on another worker")]
    ContainerNotFound(ContainerHandle),
    #[error("no volume {0}, or it is on another worker")]
    VolumeNotFound(VolumeHandle),
    #[error("cannot delete volume {0}: the container of its attempt exists")]
    InUse(VolumeHandle),
    #[error("cannot delete volume {0}: it is a replica and belongs to no attempt")]
    Replica(VolumeHandle),
    #[error("database failed while marking a container or volume")]
    Database(#[from] DbErr),
}

/// Marks the container and volumes that a gateway could not create for an attempt. Returns the
/// affected workers.
pub(crate) async fn mark_failed(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    container: Option<ContainerHandle>,
    volumes: &[VolumeHandle],
    why: &str,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DisposeError> {
    fence(txn, claims).await?;
    let containers = container::Entity::find()
        .filter(container::Column::Handle.is_in(container.map(ContainerHandle::uuid)))
        .filter(container::Column::WorkerId.eq(claims.worker.uuid()))
        .all(txn)
        .await?;
    let mut volumes = volume::Entity::find()
        .filter(volume::Column::Handle.is_in(volumes.iter().map(|handle| handle.uuid())))
        .filter(volume::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .order_by_asc(volume::Column::Handle)
        .lock_exclusive()
        .all(txn)
        .await?;
    sweep_queue::merge_marks(txn, &mut volumes).await?;
    volumes.retain(|row| !row.state.is_garbage());
    if let Some(replica) = volumes.iter().find(|row| row.purpose == Purpose::Replica) {
        return Err(DisposeError::Replica(VolumeHandle::from_uuid(replica.handle)));
    }
    let containers: Vec<_> = containers.iter().map(|row| row.handle).collect();
    let mut workers = marks::mark_containers(txn, &containers, why, now).await?;
    workers.extend(mark_volumes(txn, &volumes, why, now).await?);
    Ok(workers)
}

/// Marks volumes, and makes the artifacts that they started with due.
async fn mark_volumes(
    txn: &DatabaseTransaction,
    rows: &[volume::Model],
    why: &str,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    let handles: Vec<_> = rows.iter().map(|row| row.handle).collect();
    let workers = marks::mark_volumes(txn, &handles, why, now).await?;
    make_due(txn, rows.iter().filter_map(|row| row.from_artifact_id), now).await?;
    Ok(workers)
}

/// Marks a container. A gateway passes its `claims`, and may mark only containers of its own
/// worker.
pub(crate) async fn mark_container(
    txn: &DatabaseTransaction,
    claims: Option<&SessionClaims>,
    handle: ContainerHandle,
    why: &str,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DisposeError> {
    if let Some(claims) = claims {
        fence(txn, claims).await?;
    }
    let row = container::Entity::find_by_id(handle.uuid()).one(txn).await?;
    row.filter(|row| claims.is_none_or(|claims| claims.worker.uuid() == row.worker_id))
        .ok_or(DisposeError::ContainerNotFound(handle))?;
    Ok(marks::mark_containers(txn, &[handle.uuid()], why, now).await?)
}

/// Marks a volume of an attempt. A gateway passes its `claims`, and may mark only volumes of its
/// own worker.
pub(crate) async fn mark_volume(
    txn: &DatabaseTransaction,
    claims: Option<&SessionClaims>,
    handle: VolumeHandle,
    why: &str,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DisposeError> {
    if let Some(claims) = claims {
        fence(txn, claims).await?;
    }
    let seen = volume::Entity::find_by_id(handle.uuid()).one(txn).await?;
    let seen = seen
        .filter(|row| claims.is_none_or(|claims| claims.worker.uuid() == row.worker_id))
        .ok_or(DisposeError::VolumeNotFound(handle))?;
    // Locked before the volume, as in all transactions. Until the commit, the attempt gets no
    // container, and its outputs are not settled.
    worker::Entity::find_by_id(seen.worker_id).lock_shared().one(txn).await?;
    if let Some(id) = seen.attempt_id {
        attempt::Entity::find_by_id(id).lock_exclusive().one(txn).await?;
    }
    let row = volume::Entity::find_by_id(handle.uuid()).lock_exclusive().one(txn).await?;
    let row = sweep_queue::merge_mark(txn, row.ok_or(DisposeError::VolumeNotFound(handle))?).await?;
    if row.state.is_garbage() {
        return Ok(Vec::new());
    }
    if row.purpose == Purpose::Replica {
        return Err(DisposeError::Replica(handle));
    }
    let container = container::Entity::find()
        .filter(container::Column::AttemptId.is_in(row.attempt_id))
        .filter(container::Column::State.is_not_in(State::GARBAGE))
        .one(txn)
        .await?;
    if container.is_some() {
        return Err(DisposeError::InUse(handle));
    }
    Ok(mark_volumes(txn, &[row], why, now).await?)
}

/// Request to drop the replicas of an artifact on a worker.
#[derive(Debug, Clone)]
pub(crate) struct Drop {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
    pub(crate) why: String,
    /// Workers whose replicas count as others. `None`: all workers.
    pub(crate) reliable: Option<Vec<WorkerId>>,
    /// Whether to drop the last replica of a kept artifact.
    pub(crate) force: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DropError {
    #[error("cannot drop a replica of artifact {0}: the team has no such artifact")]
    ArtifactNotFound(ArtifactId),
    #[error("cannot drop the replica of artifact {0}: it may be the last one of a kept artifact")]
    LastReplica(ArtifactId),
    #[error("database failed while dropping a replica")]
    Database(#[from] DbErr),
}

/// Marks the complete replicas of an artifact on a worker. They get no new children, and are handed
/// out after their existing children.
pub(crate) async fn drop_replica(
    txn: &DatabaseTransaction,
    drop: &Drop,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<WorkerId>, DropError> {
    worker::Entity::find_by_id(drop.worker.uuid()).lock_shared().one(txn).await?;
    // A transaction that creates a child of a replica, or drops another replica, locks this row.
    let artifact = artifact::Entity::find_by_id(drop.artifact.uuid()).lock_exclusive().one(txn).await?;
    let artifact = artifact
        .filter(|row| row.team == drop.team && row.state != ArtifactState::Deleting)
        .ok_or(DropError::ArtifactNotFound(drop.artifact))?;
    let replicas = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(artifact.artifact_id))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(volume::Column::Complete.eq(true))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .order_by_asc(volume::Column::Handle)
        .lock_exclusive()
        .all(txn)
        .await?;
    let (here, elsewhere): (Vec<_>, Vec<_>) =
        replicas.into_iter().partition(|row| row.worker_id == drop.worker.uuid());
    if here.is_empty() {
        return Ok(Vec::new());
    }
    let counts = |row: &volume::Model| {
        let worker = WorkerId::from_uuid(row.worker_id);
        let is_reliable = drop.reliable.as_ref().is_none_or(|reliable| reliable.contains(&worker));
        row.state == State::Created && is_reliable
    };
    let is_last = !artifact.in_store && !elsewhere.iter().any(counts);
    if is_last && !drop.force && artifact.state == ArtifactState::Sealed {
        let facts = references::artifacts(txn, &[(&artifact).into()], now).await?;
        if facts.iter().any(|facts| matches!(garbage::artifact(facts, now, policy), Verdict::Keep(_))) {
            return Err(DropError::LastReplica(drop.artifact));
        }
    }
    Ok(mark_volumes(txn, &here, &drop.why, now).await?)
}
