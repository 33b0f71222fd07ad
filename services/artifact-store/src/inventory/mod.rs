//! Inventory: the volumes and containers of every worker.
//!
//! ```text
//! creating ──prepared, complete──▶ created ──new incarnation──▶ unconfirmed ──report──▶ created
//!    │                                │                              │
//!    │                                └──────────report─────────────▶ lost ──report──▶ created
//!    └──────── marked, from every state ────────▶ destroying ──handed out──▶ sweeping ──report──▶ (gone)
//! ```
//!
//! [`crate::marks`] and [`crate::inventory::report`] implement the second half of the diagram.
//!
//! Invariants:
//!
//! - A handle is minted here, in the transaction that writes its row, and never reused. The primary
//!   key and random UUIDs enforce it.
//! - Apart from garbage, an attempt has one container and one volume of each name. Unique indexes
//!   enforce it.
//! - Only the current session of a worker changes its rows ([`crate::sessions::fence`]).

pub(crate) mod delete_requests;
pub(crate) mod disk_usage;
pub(crate) mod imports;
pub(crate) mod losses;
pub(crate) mod make_room;
pub(crate) mod orphans;
mod prepare;
pub(crate) mod report;
mod report_removals;
mod report_rows;
pub(crate) mod sweep;
pub(crate) mod worker_removal;

use domain::worker::SessionClaims;
use domain::{ArtifactId, AttemptId, ContainerHandle, Digest, Timestamp, VolumeHandle, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::db::entity::{ArtifactState, Purpose, State, artifact, container, volume};
pub(crate) use crate::inventory::prepare::{AttemptNeeds, NeededVolume, PrepareError, VolumeSource, prepare};
use crate::inventory::prepare::{live_container, lock_attempt};
use crate::marks::sweep_queue;
use crate::sessions::{SessionError, fence};

#[derive(Debug, thiserror::Error)]
pub(crate) enum PreparedError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("attempt {0} has ended")]
    AttemptEnded(AttemptId),
    #[error("database failed while recording a container")]
    Database(#[from] DbErr),
}

/// Records that the container of an attempt and its volumes exist.
pub(crate) async fn record_prepared(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    id: AttemptId,
) -> Result<(), PreparedError> {
    let worker = fence(txn, claims).await?;
    if lock_attempt(txn, id, claims.worker).await?.is_none() {
        return Err(PreparedError::AttemptEnded(id));
    }
    let made = container::Entity::update_many()
        .col_expr(container::Column::State, Expr::value(State::Created))
        .col_expr(container::Column::JudgedAfter, Expr::value(worker.sequence))
        .filter(container::Column::AttemptId.eq(id.uuid()))
        // A literal, because partial indexes use it. With a parameter, SQLite would plan the
        // statement on each execution.
        .filter(Expr::cust("state = 'creating'"))
        .exec(txn)
        .await?;
    if made.rows_affected == 0 {
        // A repeated call finds the container created. If a new session has marked it, the attempt
        // counts as ended.
        let live = live_container(txn, id).await?;
        return live.map(|_| ()).ok_or(PreparedError::AttemptEnded(id));
    }
    volume::Entity::update_many()
        .col_expr(volume::Column::State, Expr::value(State::Created))
        .col_expr(volume::Column::JudgedAfter, Expr::value(worker.sequence))
        .filter(volume::Column::AttemptId.eq(id.uuid()))
        .filter(volume::Column::State.eq(State::Creating))
        .exec(txn)
        .await?;
    Ok(())
}

/// Digest and size of a complete volume.
#[derive(Debug, Clone)]
pub(crate) struct Bytes {
    pub(crate) digest: Digest,
    pub(crate) size_bytes: i64,
    /// Whether the digest was computed from the bytes on the worker.
    pub(crate) verified: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CompleteError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("no volume {0} on this worker")]
    NotFound(VolumeHandle),
    #[error("cannot complete volume {0}: it is an input")]
    Input(VolumeHandle),
    #[error("cannot complete volume {0}: use CompleteImport for it")]
    Import(VolumeHandle),
    #[error("volume {0} was completed with other bytes")]
    OtherBytes(VolumeHandle),
    #[error("the attempt of volume {0} has ended")]
    AttemptEnded(VolumeHandle),
    #[error("the transfer into volume {0} lost its claim")]
    ClaimLost(VolumeHandle),
    #[error("database failed while recording a volume")]
    Database(#[from] DbErr),
}

/// Records that a replica or an output volume is complete. Returns the artifact that it belongs to.
pub(crate) async fn complete_volume(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    handle: VolumeHandle,
    bytes: &Bytes,
    now: Timestamp,
) -> Result<Option<ArtifactId>, CompleteError> {
    let worker = fence(txn, claims).await?;
    let of_worker = || {
        volume::Entity::find_by_id(handle.uuid()).filter(volume::Column::WorkerId.eq(claims.worker.uuid()))
    };
    // The attempt or artifact is locked before the volume, as in all transactions.
    let Some(seen) = of_worker().one(txn).await? else { return Err(CompleteError::NotFound(handle)) };
    if seen.is_import() && !seen.complete {
        return Err(CompleteError::Import(handle));
    }
    let (is_expected, refusal) = match seen.purpose {
        Purpose::Input | Purpose::Scratch => return Err(CompleteError::Input(handle)),
        Purpose::Output => {
            (is_attempt_active(txn, &seen, claims.worker).await?, CompleteError::AttemptEnded(handle))
        }
        Purpose::Replica => (artifact_accepts(txn, &seen, bytes).await?, CompleteError::ClaimLost(handle)),
    };
    let Some(row) = of_worker().lock_exclusive().one(txn).await? else {
        return Err(CompleteError::NotFound(handle));
    };
    let row = sweep_queue::merge_mark(txn, row).await?;
    if row.state.is_garbage() {
        return Err(refusal);
    }
    let artifact = row.artifact_id.map(ArtifactId::from_uuid);
    if row.complete {
        let same = row.digest.as_deref() == Some(bytes.digest.as_bytes());
        return if same { Ok(artifact) } else { Err(CompleteError::OtherBytes(handle)) };
    }
    let claim_held = row.purpose == Purpose::Output || row.claimed_until.is_some_and(|until| until > now.0);
    if !is_expected || !claim_held {
        return Err(refusal);
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
    Ok(artifact)
}

/// Returns whether the attempt of an output is active, and locks it in shared mode.
async fn is_attempt_active(
    txn: &DatabaseTransaction,
    row: &volume::Model,
    worker: WorkerId,
) -> Result<bool, DbErr> {
    let Some(id) = row.attempt_id else { return Ok(false) };
    Ok(lock_attempt(txn, AttemptId::from_uuid(id), worker).await?.is_some())
}

/// Returns whether an artifact accepts these bytes, and locks it in shared mode.
async fn artifact_accepts(
    txn: &DatabaseTransaction,
    row: &volume::Model,
    bytes: &Bytes,
) -> Result<bool, DbErr> {
    let Some(id) = row.artifact_id else { return Ok(false) };
    let artifact = artifact::Entity::find_by_id(id).lock_shared().one(txn).await?;
    Ok(artifact.is_some_and(|artifact| match artifact.state {
        ArtifactState::Open => true,
        ArtifactState::Sealed => artifact.digest.as_deref() == Some(bytes.digest.as_bytes()),
        ArtifactState::Deleting => false,
    }))
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TouchError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error("attempt {0} has no container on this worker")]
    ContainerNotFound(AttemptId),
    #[error("database failed while recording the use of a container")]
    Database(#[from] DbErr),
}

/// Records an interactive use of the container of an attempt.
pub(crate) async fn touch(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    attempt: AttemptId,
    now: Timestamp,
) -> Result<(), TouchError> {
    fence(txn, claims).await?;
    let touched = container::Entity::update_many()
        .col_expr(container::Column::TouchedAt, Expr::value(now.0))
        .filter(container::Column::AttemptId.eq(attempt.uuid()))
        .filter(container::Column::WorkerId.eq(claims.worker.uuid()))
        .filter(container::Column::State.is_not_in(State::GARBAGE))
        .exec(txn)
        .await?;
    if touched.rows_affected == 0 { Err(TouchError::ContainerNotFound(attempt)) } else { Ok(()) }
}

/// Returns a volume, with its mark merged into the row.
pub(crate) async fn volume(
    conn: &impl ConnectionTrait,
    handle: VolumeHandle,
) -> Result<Option<volume::Model>, DbErr> {
    match volume::Entity::find_by_id(handle.uuid()).one(conn).await? {
        Some(row) => sweep_queue::merge_mark(conn, row).await.map(Some),
        None => Ok(None),
    }
}

/// Returns a container.
pub(crate) async fn container(
    conn: &impl ConnectionTrait,
    handle: ContainerHandle,
) -> Result<Option<container::Model>, DbErr> {
    container::Entity::find_by_id(handle.uuid()).one(conn).await
}

/// Returns a page of volumes, newest first. If `only` is not empty, only these volumes. `ids` are
/// the first and the last handle.
pub(crate) async fn list_volumes(
    conn: &impl ConnectionTrait,
    worker: Option<WorkerId>,
    state: Option<State>,
    only: &[VolumeHandle],
    ids: Option<(Uuid, Uuid)>,
    page: rpc::page::Page,
) -> Result<Vec<volume::Model>, DbErr> {
    let mut query = volume::Entity::find().order_by_desc(volume::Column::Handle).limit(page.size);
    if let Some(worker) = worker {
        query = query.filter(volume::Column::WorkerId.eq(worker.uuid()));
    }
    if let Some(state) = state {
        query = query.filter(sweep_queue::has_merged_state(state));
    }
    if !only.is_empty() {
        query = query.filter(volume::Column::Handle.is_in(only.iter().map(|handle| handle.uuid())));
    }
    if let Some((first, last)) = ids {
        query = query.filter(volume::Column::Handle.between(first, last));
    }
    if let Some(after) = page.after {
        query = query.filter(volume::Column::Handle.lt(after));
    }
    let mut rows = query.all(conn).await?;
    sweep_queue::merge_marks(conn, &mut rows).await?;
    Ok(rows)
}

/// Returns a page of containers, newest first. `ids` are the first and the last handle.
pub(crate) async fn list_containers(
    conn: &impl ConnectionTrait,
    worker: Option<WorkerId>,
    state: Option<State>,
    ids: Option<(Uuid, Uuid)>,
    page: rpc::page::Page,
) -> Result<Vec<container::Model>, DbErr> {
    let mut query = container::Entity::find().order_by_desc(container::Column::Handle).limit(page.size);
    if let Some(worker) = worker {
        query = query.filter(container::Column::WorkerId.eq(worker.uuid()));
    }
    if let Some(state) = state {
        query = query.filter(container::Column::State.eq(state));
    }
    if let Some((first, last)) = ids {
        query = query.filter(container::Column::Handle.between(first, last));
    }
    if let Some(after) = page.after {
        query = query.filter(container::Column::Handle.lt(after));
    }
    query.all(conn).await
}
