//! Replicas that transfers make: planned, claimed, sealed.
//!
//! ```text
//! (plan) ──▶ creating, claimed ──complete──▶ created, complete ──sealed──▶ a replica
//!                │    ▲ progress
//!                └──claim ran out, abandoned──▶ destroying
//! ```
//!
//! A claim says how long a transfer may take until it says that it goes on; a volume whose claim ran out is garbage. Invariant: an artifact
//! is sealed once, with bytes that a complete volume of it holds; what holds other bytes is marked in the same transaction.

use std::time::Duration;

use domain::{ArtifactId, Digest, Timestamp, TransferId, VolumeHandle, WorkerId};
use sea_orm::sea_query::{Condition, Expr};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel, QueryFilter,
    QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::{self, Located};
use crate::entity::{ArtifactState, Purpose, State, artifact, pin, volume, worker};
use crate::inventory;
use crate::mark::Why;
use crate::sweep;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("no artifact {0} in this team")]
    ArtifactNotFound(ArtifactId),
    #[error("artifact {0} has its bytes already")]
    Sealed(ArtifactId),
    #[error("no session of worker {0} is known")]
    NotAttended(WorkerId),
    #[error("transfer {0} is of another artifact or worker")]
    TransferTaken(TransferId),
    #[error("database failed while planning a replica")]
    Database(#[from] DbErr),
}

/// What a transfer shall make.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
    pub(crate) transfer: TransferId,
}

/// Mints the handle of the volume that a transfer fills, claimed until `now + term`. The same transfer gets the same handle.
pub(crate) async fn plan(
    txn: &DatabaseTransaction,
    plan: &Plan,
    now: Timestamp,
    term: Duration,
) -> Result<VolumeHandle, PlanError> {
    let worker = worker::Entity::find_by_id(plan.worker.uuid()).lock_shared().one(txn).await?;
    let Some(worker) = worker else { return Err(PlanError::NotAttended(plan.worker)) };
    let artifact = artifact::Entity::find_by_id(plan.artifact.uuid()).lock_shared().one(txn).await?;
    match artifact.filter(|artifact| artifact.team == plan.team).map(|artifact| artifact.state) {
        None | Some(ArtifactState::Deleting) => return Err(PlanError::ArtifactNotFound(plan.artifact)),
        Some(ArtifactState::Sealed) => return Err(PlanError::Sealed(plan.artifact)),
        Some(ArtifactState::Open) => {}
    }

    let planned = volume::Entity::find()
        .filter(volume::Column::TransferId.eq(plan.transfer.uuid()))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .lock_exclusive()
        .one(txn)
        .await?;
    if let Some(planned) = planned {
        if planned.artifact_id != Some(plan.artifact.uuid()) || planned.worker_id != plan.worker.uuid() {
            return Err(PlanError::TransferTaken(plan.transfer));
        }
        volume::Entity::update_many()
            .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
            .filter(volume::Column::Handle.eq(planned.handle))
            .exec(txn)
            .await?;
        return Ok(VolumeHandle::from_uuid(planned.handle));
    }

    let handle = VolumeHandle::new();
    let row = volume::Model {
        artifact_id: Some(plan.artifact.uuid()),
        transfer_id: Some(plan.transfer.uuid()),
        claimed_until: Some((now + term).0),
        ..inventory::new_volume(handle, plan.worker, Purpose::Replica, worker.sequence, now)
    };
    volume::Entity::insert(row.into_active_model().reset_all()).exec_without_returning(txn).await?;
    Ok(handle)
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgressError {
    #[error("transfer {0} lost its claim")]
    ClaimLost(TransferId),
    #[error("database failed while renewing a claim")]
    Database(#[from] DbErr),
}

/// Renews the claim of a transfer that goes on.
pub(crate) async fn progress(
    txn: &DatabaseTransaction,
    transfer: TransferId,
    now: Timestamp,
    term: Duration,
) -> Result<(), ProgressError> {
    let holds = Condition::any()
        .add(volume::Column::ClaimedUntil.gt(now.0))
        // What arrived needs no claim any more.
        .add(volume::Column::Complete.eq(true));
    let renewed = volume::Entity::update_many()
        .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
        .filter(volume::Column::TransferId.eq(transfer.uuid()))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .filter(holds)
        .exec(txn)
        .await?;
    if renewed.rows_affected == 0 { Err(ProgressError::ClaimLost(transfer)) } else { Ok(()) }
}

/// Gives every transfer that has not arrived at least a full `term` from `now`: it could perhaps not say that it goes on. However often
/// this is done at one time, no claim gets more than that one term.
pub(crate) async fn be_patient(
    txn: &DatabaseTransaction,
    now: Timestamp,
    term: Duration,
) -> Result<(), DbErr> {
    volume::Entity::update_many()
        .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
        .filter(volume::Column::Complete.eq(false))
        .filter(volume::Column::ClaimedUntil.lt((now + term).0))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .exec(txn)
        .await
        .map(|_| ())
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SealError {
    #[error("no artifact {0} in this team")]
    ArtifactNotFound(ArtifactId),
    #[error("no complete volume of artifact {0} holds that digest")]
    CandidateMissing(ArtifactId),
    #[error("artifact {0} was sealed with other bytes")]
    OtherBytes(ArtifactId),
    #[error("database failed while sealing an artifact")]
    Database(#[from] DbErr),
}

/// Seals an open artifact with the bytes that a complete volume of it holds.
///
/// Answers the workers on which volumes with other bytes were marked, too.
pub(crate) async fn seal(
    txn: &DatabaseTransaction,
    team: &str,
    id: ArtifactId,
    digest: Digest,
) -> Result<(Located, Vec<WorkerId>), SealError> {
    let row = artifact::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await?;
    let Some(mut row) = row.filter(|row| row.team == team && row.state != ArtifactState::Deleting) else {
        return Err(SealError::ArtifactNotFound(id));
    };
    let mut marked = Vec::new();
    if row.state == ArtifactState::Sealed {
        if row.digest.as_deref() != Some(digest.as_bytes()) {
            return Err(SealError::OtherBytes(id));
        }
    } else {
        let volumes = volume::Entity::find()
            .filter(volume::Column::ArtifactId.eq(id.uuid()))
            .filter(volume::Column::Purpose.eq(Purpose::Replica))
            .filter(volume::Column::Complete.eq(true))
            .filter(volume::Column::State.is_not_in(State::GARBAGE))
            .all(txn)
            .await?;
        let (same, other): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.digest.as_deref() == Some(digest.as_bytes()));
        let Some(replica) = same.iter().find(|volume| volume.state.is_present()) else {
            return Err(SealError::CandidateMissing(id));
        };
        row.state = ArtifactState::Sealed;
        row.digest = Some(digest.as_bytes().to_vec());
        row.size_bytes = replica.size_bytes;
        artifact::Entity::update_many()
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Sealed))
            .col_expr(artifact::Column::Digest, Expr::value(row.digest.clone()))
            .col_expr(artifact::Column::SizeBytes, Expr::value(row.size_bytes))
            .filter(artifact::Column::ArtifactId.eq(id.uuid()))
            .filter(artifact::Column::State.eq(ArtifactState::Open))
            .exec(txn)
            .await?;
        let other: Vec<_> = other.iter().map(|volume| volume.handle).collect();
        marked = sweep::mark_volumes(txn, &other, Why::OtherBytesSealed).await?;
    }
    let located = artifacts::locate_rows(txn, vec![row]).await?.pop();
    Ok((located.ok_or(SealError::ArtifactNotFound(id))?, marked))
}

/// Abandons a transfer: its volume is garbage, and so is the artifact that was made for it. Answers the workers concerned.
pub(crate) async fn abandon(
    txn: &DatabaseTransaction,
    transfer: TransferId,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    let planned = volume::Entity::find()
        .filter(volume::Column::TransferId.eq(transfer.uuid()))
        .order_by_desc(volume::Column::Handle)
        .one(txn)
        .await?;
    let Some((planned, id)) = planned.and_then(|planned| planned.artifact_id.map(|id| (planned, id))) else {
        return Ok(Vec::new());
    };
    let artifact = artifact::Entity::find_by_id(id).lock_exclusive().one(txn).await?;
    if artifact.is_none_or(|artifact| artifact.state != ArtifactState::Open) {
        // Sealed: what arrived is its replica. Marked: so will be the volume.
        return Ok(Vec::new());
    }
    if !others_need(txn, id, planned.handle).await? {
        artifact::Entity::update_many()
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Deleting))
            .col_expr(artifact::Column::MarkedAt, Expr::value(now.0))
            .col_expr(artifact::Column::MarkedWhy, Expr::value(Why::TransferAbandoned.to_string()))
            .filter(artifact::Column::ArtifactId.eq(id))
            .filter(artifact::Column::State.eq(ArtifactState::Open))
            .exec(txn)
            .await?;
    }
    sweep::mark_volumes(txn, &[planned.handle], Why::TransferAbandoned).await
}

/// Whether somebody pinned an open artifact, or another transfer fills it.
async fn others_need(txn: &DatabaseTransaction, id: Uuid, beside: Uuid) -> Result<bool, DbErr> {
    let pin = pin::Entity::find().filter(pin::Column::ArtifactId.eq(id)).one(txn).await?;
    let other = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(id))
        .filter(volume::Column::Handle.ne(beside))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .one(txn)
        .await?;
    Ok(pin.is_some() || other.is_some())
}
