//! Delete requests: what gateways and operators want to be destroyed, although what it belongs to goes on.
//!
//! Invariants: a replica goes only by [`drop_replica`], which refuses the last one of what is kept; a volume of an attempt does not go before
//! its container. What is marked is handed out as everything else is: children before their parents ([`crate::marks`]).

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
    #[error("no container {0}, or not on this worker")]
    ContainerNotFound(ContainerHandle),
    #[error("no volume {0}, or not on this worker")]
    VolumeNotFound(VolumeHandle),
    #[error("the container of the attempt of volume {0} is not garbage")]
    InUse(VolumeHandle),
    #[error("volume {0} is a replica, and no attempt's")]
    Replica(VolumeHandle),
    #[error("database failed while marking something")]
    Database(#[from] DbErr),
}

/// Marks what a gateway could not make for an attempt. Answers the workers on which something was marked.
pub(crate) async fn failed(
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
    sweep_queue::show(txn, &mut volumes).await?;
    volumes.retain(|row| !row.state.is_garbage());
    if let Some(replica) = volumes.iter().find(|row| row.purpose == Purpose::Replica) {
        return Err(DisposeError::Replica(VolumeHandle::from_uuid(replica.handle)));
    }
    let containers: Vec<_> = containers.iter().map(|row| row.handle).collect();
    let mut workers = marks::mark_containers(txn, &containers, why, now).await?;
    workers.extend(mark_volumes(txn, &volumes, why, now).await?);
    Ok(workers)
}

/// Marks volumes, and has what they were made from looked at.
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

/// Marks a container. `claims`: the gateway that wants it, of its own worker only.
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

/// Marks a volume of an attempt. `claims`: the gateway that wants it, of its own worker only.
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
    // Before the volume, as everybody does. The attempt gets no container, and its outputs are not settled, before this is committed.
    worker::Entity::find_by_id(seen.worker_id).lock_shared().one(txn).await?;
    if let Some(id) = seen.attempt_id {
        attempt::Entity::find_by_id(id).lock_exclusive().one(txn).await?;
    }
    let row = volume::Entity::find_by_id(handle.uuid()).lock_exclusive().one(txn).await?;
    let row = sweep_queue::shown(txn, row.ok_or(DisposeError::VolumeNotFound(handle))?).await?;
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

/// What shall be dropped, and why.
#[derive(Debug, Clone)]
pub(crate) struct Drop {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
    pub(crate) why: String,
    /// Even if it is the last of what is kept.
    pub(crate) force: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum DropError {
    #[error("no artifact {0} in this team")]
    ArtifactNotFound(ArtifactId),
    #[error("artifact {0} is kept, and no other replica of it is there for sure")]
    LastReplica(ArtifactId),
    #[error("database failed while dropping a replica")]
    Database(#[from] DbErr),
}

/// Marks the complete replicas of an artifact on a worker. Nothing is made from them any more; they are handed out after what was made before.
pub(crate) async fn drop_replica(
    txn: &DatabaseTransaction,
    drop: &Drop,
    now: Timestamp,
    policy: &Policy,
) -> Result<Vec<WorkerId>, DropError> {
    worker::Entity::find_by_id(drop.worker.uuid()).lock_shared().one(txn).await?;
    // A transaction that makes something from a replica, or drops another one, holds this row.
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
    let is_last = !artifact.in_store && !elsewhere.iter().any(|row| row.state == State::Created);
    if is_last && !drop.force && artifact.state == ArtifactState::Sealed {
        let facts = references::artifacts(txn, &[(&artifact).into()], now).await?;
        if facts.iter().any(|facts| matches!(garbage::artifact(facts, now, policy), Verdict::Keep(_))) {
            return Err(DropError::LastReplica(drop.artifact));
        }
    }
    Ok(mark_volumes(txn, &here, &drop.why, now).await?)
}
