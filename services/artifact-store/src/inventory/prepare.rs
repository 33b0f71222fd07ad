//! Preparation of attempts: creation of the rows of a container and its volumes.
//!
//! A gateway calls it when it gets a lease, before it creates the container and volumes.
//!
//! Invariant: a handle is minted in the transaction that writes its row. An attempt has one
//! container and one volume of each name, which unique indexes enforce. Repeating the call returns
//! the same handles.

use std::collections::{HashMap, HashSet};

use domain::worker::SessionClaims;
use domain::{
    ArtifactId, AttemptId, CacheId, ContainerHandle, Timestamp, VolumeHandle, WorkerId, WorkloadId,
};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait,
    IntoActiveModel, QueryFilter, QueryOrder, QuerySelect, TryInsertResult,
};
use uuid::Uuid;

use crate::caches::task_caches;
use crate::db::entity::{Purpose, State, attempt, container, volume};
use crate::db::volumes;
use crate::holders::{self, HolderError};
use crate::pins;
use crate::sessions::{SessionError, fence};

/// Container and volumes that an attempt needs on its worker.
#[derive(Debug, Clone)]
pub(crate) struct AttemptNeeds {
    pub(crate) holder: WorkloadId,
    pub(crate) attempt: AttemptId,
    pub(crate) team: String,
    pub(crate) volumes: Vec<NeededVolume>,
    /// Versions of task caches that cannot be copied to the worker.
    pub(crate) unreachable: HashSet<ArtifactId>,
}

/// A volume that a container needs. Names are unique within an attempt.
#[derive(Debug, Clone)]
pub(crate) struct NeededVolume {
    pub(crate) name: String,
    pub(crate) purpose: Purpose,
    pub(crate) from: Option<VolumeSource>,
    /// Artifact that it may become.
    pub(crate) output: Option<ArtifactId>,
}

/// Initial contents of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeSource {
    /// Bytes of an artifact.
    Artifact(ArtifactId),
    /// Latest version of a task cache, if there is one.
    TaskCache(CacheId),
}

/// Handles of the container and volumes of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct PreparedAttempt {
    pub(crate) container: ContainerHandle,
    /// In the order of the request.
    pub(crate) volumes: Vec<PlannedVolume>,
}

/// Handle of a volume that a container needs.
#[derive(Debug, Clone)]
pub(crate) struct PlannedVolume {
    pub(crate) name: String,
    pub(crate) handle: VolumeHandle,
    pub(crate) parent: Option<VolumeHandle>,
    /// Digest of the parent.
    pub(crate) parent_digest: Option<Vec<u8>>,
    /// Artifact that must be copied to this worker first.
    pub(crate) missing: Option<ArtifactId>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Holder(#[from] HolderError),
    #[error("attempt {0} has ended")]
    AttemptEnded(AttemptId),
    #[error("artifact {0} is unknown to this team or not sealed")]
    InputUnavailable(ArtifactId),
    /// The worker has begun a new incarnation and has not reported yet.
    #[error(
        "artifact {0} is not confirmed on this worker yet: repeat the call after the worker's next report"
    )]
    Unconfirmed(ArtifactId),
    #[error("database failed while preparing an attempt")]
    Database(#[from] DbErr),
}

/// Finds or creates the rows of an attempt's container and volumes.
///
/// A volume that starts with an artifact is a child of a complete replica on this worker, which the
/// child's row keeps. If there is no such replica, the artifact is missing. After it has been
/// copied here, a repeated call finds the replica.
pub(crate) async fn prepare(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    needs: &AttemptNeeds,
    now: Timestamp,
) -> Result<PreparedAttempt, PrepareError> {
    let worker = fence(txn, claims).await?;
    let holder = holders::lock(txn, needs.holder, &needs.team, now).await?;
    if holder.settled_at.is_some() {
        return Err(PrepareError::AttemptEnded(needs.attempt));
    }
    let (mut container, existing) = find_or_create_attempt(txn, claims.worker, needs).await?;
    let mut existing: HashMap<_, _> =
        existing.into_iter().filter_map(|row| Some((row.name.clone()?, row))).collect();
    let from = decide_sources(txn, needs, &existing).await?;
    let sources = lock_sources(txn, claims.worker, &needs.team, &from).await?;

    let mut planned: Vec<PlannedVolume> = Vec::with_capacity(needs.volumes.len());
    let mut made = Vec::new();
    for (need, from) in needs.volumes.iter().zip(from) {
        let source = from.and_then(|from| sources.get(&from.uuid())).map(|replica| replica.handle);
        let from = from.map(ArtifactId::uuid);
        let row = match existing.remove(&need.name) {
            Some(row)
                if row.state == State::Creating
                    && need.from.is_some()
                    && (row.parent != source || row.from_artifact_id != from) =>
            {
                // The replica arrived after the first call, or was lost, or cannot be copied here.
                // A worker-provided image may be another artifact by now.
                volume::Entity::update_many()
                    .col_expr(volume::Column::Parent, Expr::value(source))
                    .col_expr(volume::Column::FromArtifactId, Expr::value(from))
                    .filter(volume::Column::Handle.eq(row.handle))
                    .exec(txn)
                    .await?;
                volume::Model { parent: source, from_artifact_id: from, ..row }
            }
            Some(row) => row,
            None => {
                let handle = VolumeHandle::new();
                let row = volume::Model {
                    name: Some(need.name.clone()),
                    artifact_id: need.output.map(ArtifactId::uuid),
                    from_artifact_id: from,
                    parent: source,
                    attempt_id: Some(needs.attempt.uuid()),
                    ..volumes::new_volume(handle, claims.worker, need.purpose, worker.sequence, now)
                };
                made.push(row.clone());
                row
            }
        };
        planned.push(PlannedVolume {
            name: need.name.clone(),
            handle: VolumeHandle::from_uuid(row.handle),
            parent: row.parent.map(VolumeHandle::from_uuid),
            parent_digest: None,
            missing: row
                .from_artifact_id
                .filter(|_| row.parent.is_none() && row.state == State::Creating)
                .map(ArtifactId::from_uuid),
        });
    }
    let digests =
        digests_of(txn, sources.into_values(), planned.iter().filter_map(|volume| volume.parent)).await?;
    for volume in &mut planned {
        volume.parent_digest = volume.parent.and_then(|parent| digests.get(&parent.uuid()).cloned());
    }
    if !made.is_empty() {
        let rows = made.into_iter().map(|row| row.into_active_model().reset_all());
        volume::Entity::insert_many(rows).exec_without_returning(txn).await?;
    }
    let container = match container.take() {
        Some(container) => ContainerHandle::from_uuid(container.handle),
        None => make_container(txn, claims.worker, needs, worker.sequence, now).await?,
    };
    Ok(PreparedAttempt { container, volumes: planned })
}

/// Starts an attempt, or returns the rows of an earlier call.
async fn find_or_create_attempt(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    needs: &AttemptNeeds,
) -> Result<(Option<container::Model>, Vec<volume::Model>), PrepareError> {
    let id = needs.attempt.uuid();
    let fresh = attempt::ActiveModel {
        attempt_id: Set(id),
        holder_id: Set(needs.holder.uuid()),
        worker_id: Set(Some(worker.uuid())),
        ended_at: Set(None),
        due_at: Set(None),
    };
    let inserted = attempt::Entity::insert(fresh)
        .on_conflict_do_nothing_on([attempt::Column::AttemptId])
        .exec_without_returning(txn)
        .await?;
    if matches!(inserted, TryInsertResult::Inserted(1)) {
        return Ok((None, Vec::new()));
    }
    let attempt = lock_attempt(txn, needs.attempt, worker).await?;
    if attempt.is_none_or(|attempt| attempt.holder_id != needs.holder.uuid()) {
        return Err(PrepareError::AttemptEnded(needs.attempt));
    }
    let container = live_container(txn, needs.attempt).await?;
    let volumes = volume::Entity::find()
        .filter(volume::Column::AttemptId.eq(id))
        .filter(volume::Column::State.is_not_in(State::GARBAGE))
        .all(txn)
        .await?;
    Ok((container, volumes))
}

/// Locks an active attempt of `worker` in shared mode. `None` if it has ended or belongs to another
/// worker.
pub(super) async fn lock_attempt(
    txn: &DatabaseTransaction,
    id: AttemptId,
    worker: WorkerId,
) -> Result<Option<attempt::Model>, DbErr> {
    let row = attempt::Entity::find_by_id(id.uuid()).lock_shared().one(txn).await?;
    Ok(row.filter(|row| row.ended_at.is_none() && row.worker_id == Some(worker.uuid())))
}

pub(super) async fn live_container(
    txn: &DatabaseTransaction,
    attempt: AttemptId,
) -> Result<Option<container::Model>, DbErr> {
    container::Entity::find()
        .filter(container::Column::AttemptId.eq(attempt.uuid()))
        .filter(container::Column::State.is_not_in(State::GARBAGE))
        .one(txn)
        .await
}

/// Returns the digests of complete volumes. The rows in `known` are not read again.
async fn digests_of(
    txn: &DatabaseTransaction,
    known: impl Iterator<Item = volume::Model>,
    volumes: impl Iterator<Item = VolumeHandle>,
) -> Result<HashMap<Uuid, Vec<u8>>, DbErr> {
    let digest = |row: volume::Model| Some((row.handle, row.digest?));
    let mut digests: HashMap<_, _> = known.filter_map(digest).collect();
    let unknown: Vec<_> =
        volumes.map(VolumeHandle::uuid).filter(|handle| !digests.contains_key(handle)).collect();
    if !unknown.is_empty() {
        let rows = volume::Entity::find().filter(volume::Column::Handle.is_in(unknown)).all(txn).await?;
        digests.extend(rows.into_iter().filter_map(digest));
    }
    Ok(digests)
}

/// Returns the artifact with which each volume starts, in order. The version of a task cache was
/// chosen when the volume's row was created, and does not change.
async fn decide_sources(
    txn: &DatabaseTransaction,
    needs: &AttemptNeeds,
    existing: &HashMap<String, volume::Model>,
) -> Result<Vec<Option<ArtifactId>>, DbErr> {
    let undecided = needs.volumes.iter().filter(|need| !existing.contains_key(&need.name));
    let caches = undecided.filter_map(|need| match need.from {
        Some(VolumeSource::TaskCache(cache)) => Some(cache),
        _ => None,
    });
    let latest = task_caches::latest(txn, &needs.team, &caches.collect::<Vec<_>>()).await?;
    let decide = |need: &NeededVolume| match need.from? {
        VolumeSource::Artifact(artifact) => Some(artifact),
        VolumeSource::TaskCache(cache) => {
            let (version, made) = match existing.get(&need.name) {
                Some(row) => (row.from_artifact_id.map(ArtifactId::from_uuid), row.state != State::Creating),
                None => (latest.get(&cache).copied(), false),
            };
            version.filter(|version| made || !needs.unreachable.contains(version))
        }
    };
    Ok(needs.volumes.iter().map(decide).collect())
}

/// Locks the artifacts that volumes start with, and returns a locked replica of each on this
/// worker, which becomes a parent.
async fn lock_sources(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    team: &str,
    from: &[Option<ArtifactId>],
) -> Result<HashMap<Uuid, volume::Model>, PrepareError> {
    let from: HashSet<_> = from.iter().copied().flatten().collect();
    if from.is_empty() {
        return Ok(HashMap::new());
    }
    let from: Vec<_> = from.into_iter().collect();
    let sealed = pins::lock_sealed(txn, team, &from).await?;
    if let Some(missing) = from.iter().find(|id| !sealed.contains_key(&id.uuid())) {
        return Err(PrepareError::InputUnavailable(*missing));
    }
    let replicas = volume::Entity::find()
        .filter(volume::Column::ArtifactId.is_in(sealed.into_keys()))
        .filter(volume::Column::WorkerId.eq(worker.uuid()))
        .filter(volume::Column::Purpose.eq(Purpose::Replica))
        .filter(Expr::cust(volumes::COMPLETE))
        .filter(volume::Column::State.is_in([State::Created, State::Unconfirmed]))
        // Later rows win: verified replicas before others, then the oldest.
        .order_by_asc(volume::Column::Verified)
        .order_by_desc(volume::Column::Handle)
        .lock_shared()
        .all(txn)
        .await?;
    let (confirmed, unconfirmed): (Vec<_>, Vec<_>) =
        replicas.into_iter().partition(|row| row.state == State::Created);
    let sources: HashMap<_, _> =
        confirmed.into_iter().filter_map(|row| Some((row.artifact_id?, row))).collect();
    let unconfirmed =
        unconfirmed.iter().filter_map(|row| row.artifact_id).find(|id| !sources.contains_key(id));
    match unconfirmed {
        Some(id) => Err(PrepareError::Unconfirmed(ArtifactId::from_uuid(id))),
        None => Ok(sources),
    }
}

async fn make_container(
    txn: &DatabaseTransaction,
    worker: WorkerId,
    needs: &AttemptNeeds,
    sequence: i64,
    now: Timestamp,
) -> Result<ContainerHandle, DbErr> {
    let handle = ContainerHandle::new();
    let row = container::ActiveModel {
        handle: Set(handle.uuid()),
        worker_id: Set(worker.uuid()),
        state: Set(State::Creating),
        attempt_id: Set(needs.attempt.uuid()),
        holder_id: Set(needs.holder.uuid()),
        created_at: Set(now.0),
        judged_after: Set(sequence),
        mark_reason: Set(None),
        marked_at: Set(None),
        touched_at: Set(None),
        lost_at: Set(None),
        loss_noticed: Set(false),
    };
    container::Entity::insert(row).exec_without_returning(txn).await?;
    Ok(handle)
}
