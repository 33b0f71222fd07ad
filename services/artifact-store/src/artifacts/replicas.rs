//! Replicas that transfers make: planning, claims and sealing.
//!
//! ```text
//! (plan) ──▶ creating, claimed ──complete──▶ created, complete ──sealed──▶ a replica
//!                │    ▲ progress
//!                └──claim expired, abandoned──▶ destroying
//! ```
//!
//! A transfer holds a claim on its volume and must renew it. A volume whose claim has expired is
//! garbage. A transfer fills an open artifact (an upload), or copies a sealed artifact to another
//! worker.
//!
//! Invariants:
//!
//! - An artifact is sealed once, with the bytes of a complete volume. Volumes with other bytes are
//!   marked in the same transaction.
//! - A worker has at most one unfinished copy of a sealed artifact. A transaction that plans a copy
//!   has locked the artifact's row, and a unique index enforces it as well.

use std::time::Duration;

use domain::{ArtifactId, Digest, Timestamp, TransferId, VolumeHandle, WorkerId};
use sea_orm::sea_query::{Condition, Expr, ExprTrait};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QueryOrder, QuerySelect, QueryTrait, Select,
};
use uuid::Uuid;

use crate::artifacts::access;
use crate::artifacts::{self, LocatedArtifact};
use crate::db::entity::{ArtifactState, Purpose, State, artifact, pin, volume, worker};
use crate::db::{units, volumes};
use crate::marks::{self, tombstones};
use crate::policy::garbage::MarkReason;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("no artifact {0} in this team")]
    ArtifactNotFound(ArtifactId),
    /// The worker has begun a new incarnation and has not reported yet.
    #[error(
        "artifact {0} is not confirmed on this worker yet: repeat the call after the worker's next report"
    )]
    Unconfirmed(ArtifactId),
    #[error("worker {0} has no known session")]
    NotAttended(WorkerId),
    #[error("transfer {0} belongs to another artifact or worker")]
    TransferTaken(TransferId),
    #[error("database failed while planning a replica")]
    Database(#[from] DbErr),
}

/// Request for a volume that a transfer fills.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
    pub(crate) transfer: TransferId,
}

/// Volume of a transfer.
#[derive(Debug, Clone)]
pub(crate) struct PlannedReplica {
    pub(crate) handle: VolumeHandle,
    pub(crate) outcome: Outcome,
    /// Digest that it must have. `None` if the artifact is open.
    pub(crate) digest: Option<Vec<u8>>,
    /// Bytes of its files. 0 if the artifact is open.
    pub(crate) size_bytes: u64,
    /// Workers on which a copy with an expired claim was marked.
    pub(crate) marked: Vec<WorkerId>,
}

/// State of the planned volume, from the caller's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The calling transfer fills it.
    Created,
    /// Another transfer fills it.
    InProgress(TransferId),
    /// It is complete, and needs no transfer.
    Complete,
}

/// Condition of the partial indexes of volumes that transfers fill.
const NOT_GIVEN_UP: &str = "given_up = FALSE";

/// Mints the handle of the volume that a transfer fills, claimed until `now + term`.
///
/// Repeating the call returns the same handle. If the artifact is sealed, the call may return an
/// existing replica, or the volume of another transfer.
pub(crate) async fn plan(
    txn: &DatabaseTransaction,
    plan: &Plan,
    now: Timestamp,
    term: Duration,
) -> Result<PlannedReplica, PlanError> {
    let worker = worker::Entity::find_by_id(plan.worker.uuid()).lock_shared().one(txn).await?;
    let Some(worker) = worker else { return Err(PlanError::NotAttended(plan.worker)) };
    let live = |rows: Select<artifact::Entity>| {
        rows.filter(artifact::Column::State.ne(ArtifactState::Deleting)).lock_exclusive()
    };
    let artifact = artifacts::usable(txn, &plan.team, &[plan.artifact], live).await?.pop();
    let artifact = artifact.ok_or(PlanError::ArtifactNotFound(plan.artifact))?;
    let planned = |handle, outcome| PlannedReplica {
        handle: VolumeHandle::from_uuid(handle),
        outcome,
        digest: artifact.digest.clone(),
        size_bytes: units::size(artifact.size_bytes),
        marked: Vec::new(),
    };

    let mine = volume::Entity::find()
        .filter(volume::Column::TransferId.eq(plan.transfer.uuid()))
        .filter(Expr::cust(NOT_GIVEN_UP))
        .lock_exclusive()
        .one(txn)
        .await?;
    if let Some(mine) = mine {
        if mine.artifact_id != Some(plan.artifact.uuid()) || mine.worker_id != plan.worker.uuid() {
            return Err(PlanError::TransferTaken(plan.transfer));
        }
        if !(mine.complete && artifact.state == ArtifactState::Sealed) {
            volume::Entity::update_many()
                .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
                .filter(volume::Column::Handle.eq(mine.handle))
                .exec(txn)
                .await?;
            return Ok(planned(mine.handle, Outcome::Created));
        }
        // The replica of this transfer was lost, and a report may find it again. It becomes a
        // replica without a transfer, and this transfer makes another one.
        volume::Entity::update_many()
            .col_expr(volume::Column::TransferId, Expr::value(None::<Uuid>))
            .filter(volume::Column::Handle.eq(mine.handle))
            .filter(volume::Column::State.eq(State::Lost))
            .exec(txn)
            .await?;
    }

    let is_copy = artifact.state == ArtifactState::Sealed;
    let mut marked = Vec::new();
    if is_copy {
        match find_copy(txn, plan, now).await? {
            ExistingCopy::Complete(handle) => return Ok(planned(handle, Outcome::Complete)),
            ExistingCopy::InProgress(handle, transfer) => {
                return Ok(planned(handle, Outcome::InProgress(transfer)));
            }
            ExistingCopy::Nothing { given_up } => {
                marked = marks::mark_volumes(txn, &given_up, MarkReason::ClaimExpired, now).await?;
            }
        }
    }
    let handle = VolumeHandle::new();
    let row = volume::Model {
        artifact_id: Some(plan.artifact.uuid()),
        transfer_id: Some(plan.transfer.uuid()),
        claimed_until: Some((now + term).0),
        is_copy,
        ..volumes::new_volume(handle, plan.worker, Purpose::Replica, worker.sequence, now)
    };
    volume::Entity::insert(row.into_active_model().reset_all()).exec_without_returning(txn).await?;
    Ok(PlannedReplica { marked, ..planned(handle.uuid(), Outcome::Created) })
}

/// Volumes of a sealed artifact on a worker.
enum ExistingCopy {
    /// A complete replica.
    Complete(Uuid),
    /// An unfinished copy with a valid claim.
    InProgress(Uuid, TransferId),
    /// Neither. There may be copies with expired claims.
    Nothing { given_up: Vec<Uuid> },
}

/// Returns the volumes of the plan's artifact on the plan's worker. The caller has locked the
/// artifact.
async fn find_copy(
    txn: &DatabaseTransaction,
    plan: &Plan,
    now: Timestamp,
) -> Result<ExistingCopy, PlanError> {
    let replicas = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(plan.artifact.uuid()))
        .filter(volume::Column::WorkerId.eq(plan.worker.uuid()))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .order_by_desc(volume::Column::Verified)
        .order_by_asc(volume::Column::Handle)
        .all(txn)
        .await?;
    let complete = |state| move |row: &&volume::Model| row.complete && row.state == state;
    if let Some(row) = replicas.iter().find(complete(State::Created)) {
        return Ok(ExistingCopy::Complete(row.handle));
    }
    if replicas.iter().any(|row| complete(State::Unconfirmed)(&row)) {
        return Err(PlanError::Unconfirmed(plan.artifact));
    }
    let copies = || replicas.iter().filter(|row| row.is_copy && !row.complete);
    let goes_on = copies().find(|row| row.claimed_until.is_some_and(|until| until > now.0));
    if let Some((row, transfer)) = goes_on.and_then(|row| Some((row, row.transfer_id?))) {
        return Ok(ExistingCopy::InProgress(row.handle, TransferId::from_uuid(transfer)));
    }
    Ok(ExistingCopy::Nothing { given_up: copies().map(|row| row.handle).collect() })
}

/// Direction of a transfer, from the view of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Write,
    Read,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthorizeError {
    #[error("no transfer of volume {0} is planned for this team")]
    NotPlanned(VolumeHandle),
    #[error("database failed while reading a transfer")]
    Database(#[from] DbErr),
}

/// Checks that `team` may transfer `volume` in `direction`.
///
/// To write, a transfer with a valid claim must fill the volume. To read, the volume must be a
/// replica that the team may use, or such a transfer must fill it. Volumes of containers are never
/// permitted.
pub(crate) async fn authorize(
    conn: &impl ConnectionTrait,
    team: &str,
    worker: WorkerId,
    volume: VolumeHandle,
    direction: Direction,
    now: Timestamp,
) -> Result<(), AuthorizeError> {
    let row = volume::Entity::find_by_id(volume.uuid()).one(conn).await?;
    let is_filled = |row: &volume::Model| {
        !row.complete
            && !row.state.is_garbage()
            && !row.given_up
            && row.transfer_id.is_some()
            && row.claimed_until.is_some_and(|until| until > now.0)
    };
    let planned = |row: &volume::Model| {
        row.worker_id == worker.uuid()
            && row.purpose == Purpose::Replica
            && match direction {
                Direction::Write => is_filled(row),
                Direction::Read => row.complete && row.state.is_present() || is_filled(row),
            }
    };
    let artifact = row.filter(planned).and_then(|row| row.artifact_id).map(ArtifactId::from_uuid);
    let Some(artifact) = artifact else { return Err(AuthorizeError::NotPlanned(volume)) };
    let live = |rows: Select<artifact::Entity>| rows.filter(Expr::cust("state <> 'deleting'"));
    let artifact = artifacts::usable(conn, team, &[artifact], live).await?.pop();
    let is_usable = |artifact: &artifact::Model| match direction {
        Direction::Write => artifact.state == ArtifactState::Sealed || artifact.team == team,
        Direction::Read => artifact.state == ArtifactState::Sealed,
    };
    if artifact.is_some_and(|artifact| is_usable(&artifact)) {
        Ok(())
    } else {
        Err(AuthorizeError::NotPlanned(volume))
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ProgressError {
    #[error("transfer {0} lost its claim")]
    ClaimLost(TransferId),
    #[error("database failed while renewing a claim")]
    Database(#[from] DbErr),
}

/// Renews the claim of a transfer of an artifact that `team` may use.
pub(crate) async fn progress(
    txn: &DatabaseTransaction,
    team: &str,
    transfer: TransferId,
    now: Timestamp,
    term: Duration,
) -> Result<(), ProgressError> {
    let its_artifact = Expr::col((artifact::Entity, artifact::Column::ArtifactId))
        .equals((volume::Entity, volume::Column::ArtifactId));
    let usable = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::ArtifactId)
        .filter(its_artifact)
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .filter(access::usable_by(team))
        .into_query();
    let holds = Condition::any()
        .add(volume::Column::ClaimedUntil.gt(now.0))
        // A complete volume needs no claim.
        .add(volume::Column::Complete.eq(true));
    let renewed = volume::Entity::update_many()
        .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
        .filter(volume::Column::TransferId.eq(transfer.uuid()))
        .filter(Expr::cust(NOT_GIVEN_UP))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .filter(Expr::exists(usable))
        .filter(holds)
        .exec(txn)
        .await?;
    if renewed.rows_affected == 0 { Err(ProgressError::ClaimLost(transfer)) } else { Ok(()) }
}

/// Extends the claims of all unfinished transfers to at least `now + term`, because they may have
/// been unable to renew. Repeating the call at the same time extends nothing further.
pub(crate) async fn extend_terms(
    txn: &DatabaseTransaction,
    now: Timestamp,
    term: Duration,
) -> Result<(), DbErr> {
    volume::Entity::update_many()
        .col_expr(volume::Column::ClaimedUntil, Expr::value((now + term).0))
        .filter(volume::Column::Complete.eq(false))
        .filter(volume::Column::ClaimedUntil.lt((now + term).0))
        .filter(Expr::cust(NOT_GIVEN_UP))
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

/// Seals an open artifact with the bytes of a complete volume.
///
/// Also returns the workers on which volumes with other bytes were marked.
pub(crate) async fn seal(
    txn: &DatabaseTransaction,
    team: &str,
    id: ArtifactId,
    digest: Digest,
    now: Timestamp,
) -> Result<(LocatedArtifact, Vec<WorkerId>), SealError> {
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
        marked = marks::mark_volumes(txn, &other, MarkReason::OtherBytesSealed, now).await?;
    }
    let located = artifacts::locate_rows(txn, vec![row]).await?.pop();
    Ok((located.ok_or(SealError::ArtifactNotFound(id))?, marked))
}

/// Abandons a transfer of an artifact that `team` may use, and returns the affected workers.
///
/// Marks the transfer's volume unless it is a replica. Also marks the artifact that was created for
/// the transfer, if it belongs to `team`.
pub(crate) async fn abandon(
    txn: &DatabaseTransaction,
    team: &str,
    transfer: TransferId,
    now: Timestamp,
) -> Result<Vec<WorkerId>, DbErr> {
    let of_transfer = || volume::Entity::find().filter(volume::Column::TransferId.eq(transfer.uuid()));
    // The index of transfers excludes given-up volumes.
    let planned = match of_transfer().filter(Expr::cust("given_up = FALSE")).one(txn).await? {
        Some(planned) => Some(planned),
        None => of_transfer().order_by_desc(volume::Column::Handle).one(txn).await?,
    };
    let Some((planned, id)) = planned.and_then(|planned| planned.artifact_id.map(|id| (planned, id))) else {
        return Ok(Vec::new());
    };
    let artifact =
        artifact::Entity::find_by_id(id).filter(access::usable_by(team)).lock_exclusive().one(txn).await?;
    match artifact.map(|artifact| (artifact.state, artifact.team == team)) {
        Some((ArtifactState::Open, true)) => {}
        Some((ArtifactState::Sealed, _)) => {
            // A complete volume is a replica. A transaction that completes a volume has locked the
            // artifact's row, so that this cannot change now.
            let unfinished = volume::Entity::find_by_id(planned.handle)
                .filter(volume::Column::Complete.eq(false))
                .one(txn)
                .await?;
            let unfinished: Vec<_> = unfinished.into_iter().map(|row| row.handle).collect();
            return marks::mark_volumes(txn, &unfinished, MarkReason::TransferAbandoned, now).await;
        }
        // A deleted artifact takes its volume along. An open artifact of another team must not be
        // changed.
        Some((ArtifactState::Deleting | ArtifactState::Open, _)) | None => return Ok(Vec::new()),
    }
    if !is_needed_by_others(txn, id, planned.handle).await? {
        artifact::Entity::update_many()
            .col_expr(artifact::Column::State, Expr::value(ArtifactState::Deleting))
            .col_expr(artifact::Column::MarkedAt, Expr::value(now.0))
            .col_expr(artifact::Column::DueAt, Expr::value(None::<i64>))
            .col_expr(artifact::Column::MarkReason, Expr::value(MarkReason::TransferAbandoned.to_string()))
            .filter(artifact::Column::ArtifactId.eq(id))
            .filter(artifact::Column::State.eq(ArtifactState::Open))
            .exec(txn)
            .await?;
        tombstones::add(txn, [id], now.0).await?;
    }
    marks::mark_volumes(txn, &[planned.handle], MarkReason::TransferAbandoned, now).await
}

/// Returns whether a workload pins an open artifact, or another transfer fills it.
async fn is_needed_by_others(txn: &DatabaseTransaction, id: Uuid, beside: Uuid) -> Result<bool, DbErr> {
    let pin = pin::Entity::find().filter(pin::Column::ArtifactId.eq(id)).one(txn).await?;
    let other = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(id))
        .filter(volume::Column::Handle.ne(beside))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .one(txn)
        .await?;
    Ok(pin.is_some() || other.is_some())
}
