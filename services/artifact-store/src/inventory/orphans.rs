//! Orphans: volumes and containers on workers that are unknown to a restored store.
//!
//! ```text
//! unknown, of another store life ──report──▶ orphan ──adopt──▶ created, a replica
//!                                              │ └─────purge──▶ destroying
//!                                              └──────report──▶ (gone)
//! ```
//!
//! An unknown handle is normally garbage, because its row would have been written first. That holds
//! while the worker's volumes are of this database's store life ([`crate::store_life`]). If they
//! are of another life or none, the first judged report makes all unknown items orphans. From then
//! on, the worker's volumes are of this life, and unknown handles are garbage again.
//!
//! Invariants: a handle is either here or in a table of the inventory, because one transaction
//! moves it. An orphan is not garbage. A volume with an orphan child is not handed out
//! ([`crate::marks`]).

use std::collections::HashSet;
use std::fmt;

use domain::worker::SessionClaims;
use domain::{ArtifactId, Digest, Timestamp, VolumeHandle, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{ActiveModelTrait, ActiveValue::Set};
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel, QueryFilter,
    QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::replicas::{self, SealError};
use crate::artifacts::restore::{self, KeptBy, UndeleteError};
use crate::artifacts::{self, CreateError, NewArtifact};
use crate::builds::{self, OwnerEnded};
use crate::db::entity::{
    ArtifactState, OrphanKind, Purpose, State, artifact, container, deletion, orphan, volume, worker,
};
use crate::db::{ids, volumes};
use crate::marks::LockWait;
use crate::marks::deletion_log::LogEntry;
use crate::marks::sweep_queue;
use crate::sessions::{SessionError, fence};
use crate::{inventory, marks};

/// Reason of the mark of a purged orphan.
const PURGED: &str = "an operator purged it as an orphan of a restored backup";

/// Reason in the deletion log for an orphan that a report no longer names.
const VANISHED: &str = "it was an orphan of a restored backup, and its worker no longer has it";

/// Returns the orphans of a worker.
pub(crate) async fn of_worker(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
) -> Result<Vec<orphan::Model>, DbErr> {
    orphan::Entity::find().filter(orphan::Column::WorkerId.eq(worker.uuid())).all(conn).await
}

/// Adds unknown reported items as orphans. The caller has locked their worker's row.
pub(crate) async fn put(
    txn: &DatabaseTransaction,
    worker: &worker::Model,
    kind: OrphanKind,
    handles: &[Uuid],
    now: Timestamp,
) -> Result<(), DbErr> {
    if handles.is_empty() {
        return Ok(());
    }
    let rows = handles.iter().map(|handle| orphan::ActiveModel {
        handle: Set(*handle),
        kind: Set(kind),
        worker_id: Set(worker.worker_id),
        first_seen_at: Set(now.0),
        judged_after: Set(worker.sequence),
        described: Set(kind == OrphanKind::Container),
        parent: Set(None),
        team: Set(None),
        artifact_id: Set(None),
        digest: Set(None),
        size_bytes: Set(0),
    });
    orphan::Entity::insert_many(rows)
        .on_conflict_do_nothing_on([orphan::Column::Handle])
        .exec_without_returning(txn)
        .await
        .map(|_| ())
}

/// Deletes orphans that a report with the token `sequence` did not name, and returns their log
/// entries.
pub(crate) async fn forget(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    sequence: i64,
    now: Timestamp,
) -> Result<Vec<LogEntry>, DbErr> {
    if handles.is_empty() {
        return Ok(Vec::new());
    }
    let gone = orphan::Entity::delete_many()
        .filter(orphan::Column::Handle.is_in(handles.iter().copied()))
        .filter(orphan::Column::JudgedAfter.lt(sequence))
        .exec_with_returning(txn)
        .await?;
    let entry = |row: orphan::Model| {
        LogEntry::of(row.handle, row.kind.into(), Some(VANISHED.to_owned()), Some(now.0))
    };
    Ok(gone.into_iter().map(entry).collect())
}

/// Metadata of a volume, from its worker.
#[derive(Debug, Clone)]
pub(crate) struct Description {
    pub(crate) volume: VolumeHandle,
    pub(crate) parent: Option<VolumeHandle>,
    pub(crate) team: Option<String>,
    pub(crate) artifact: Option<ArtifactId>,
    pub(crate) digest: Option<Digest>,
    pub(crate) size_bytes: i64,
}

/// Records metadata of orphans.
pub(crate) async fn describe(
    txn: &DatabaseTransaction,
    claims: &SessionClaims,
    descriptions: &[Description],
) -> Result<(), SessionError> {
    fence(txn, claims).await?;
    for description in descriptions {
        orphan::Entity::update_many()
            .col_expr(orphan::Column::Described, Expr::value(true))
            .col_expr(orphan::Column::Parent, Expr::value(description.parent.map(VolumeHandle::uuid)))
            .col_expr(orphan::Column::Team, Expr::value(description.team.clone()))
            .col_expr(orphan::Column::ArtifactId, Expr::value(description.artifact.map(ArtifactId::uuid)))
            .col_expr(
                orphan::Column::Digest,
                Expr::value(description.digest.map(|digest| digest.as_bytes().to_vec())),
            )
            .col_expr(orphan::Column::SizeBytes, Expr::value(description.size_bytes))
            .filter(orphan::Column::Handle.eq(description.volume.uuid()))
            .filter(orphan::Column::WorkerId.eq(claims.worker.uuid()))
            .filter(orphan::Column::Kind.eq(OrphanKind::Volume))
            .exec(txn)
            .await?;
    }
    Ok(())
}

/// Returns a page of orphans, newest first.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    worker: Option<WorkerId>,
    page: rpc::page::Page,
) -> Result<Vec<orphan::Model>, DbErr> {
    let mut query = orphan::Entity::find().order_by_desc(orphan::Column::Handle).limit(page.size);
    if let Some(worker) = worker {
        query = query.filter(orphan::Column::WorkerId.eq(worker.uuid()));
    }
    if let Some(after) = page.after {
        query = query.filter(orphan::Column::Handle.lt(after));
    }
    query.all(conn).await
}

/// Request to adopt an orphan.
#[derive(Debug, Clone)]
pub(crate) struct Adoption {
    pub(crate) team: String,
    pub(crate) volume: VolumeHandle,
    /// Worker that must hold the volume.
    pub(crate) worker: Option<WorkerId>,
    /// Artifact of the volume. `None`: the artifact that its metadata names, or a new one.
    pub(crate) artifact: Option<ArtifactId>,
    pub(crate) kept_by: KeptBy,
}

/// The place where an item was not found: any worker, or one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SearchScope(Option<WorkerId>);

impl fmt::Display for SearchScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |worker| write!(f, " on worker {worker}"))
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptionError {
    #[error("no orphaned volume {0} of this team{1}")]
    NotFound(VolumeHandle, SearchScope),
    #[error("volume {0} is not an orphan: it was adopted or purged, or was always known")]
    NotOrphaned(VolumeHandle),
    #[error("cannot adopt {0}: it is a container, or its digest is unknown")]
    NotAdoptable(VolumeHandle),
    #[error("artifact {0} belongs to another team")]
    ArtifactNotFound(ArtifactId),
    #[error("artifact {0} has other bytes")]
    OtherBytes(ArtifactId),
    #[error(transparent)]
    Undelete(#[from] UndeleteError),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while adopting a volume")]
    Database(#[from] DbErr),
}

/// Makes an orphan a replica of an artifact, and keeps the artifact. Returns the artifact, and the
/// workers on which volumes with other bytes were marked.
pub(crate) async fn adopt(
    txn: &DatabaseTransaction,
    adoption: &Adoption,
    now: Timestamp,
) -> Result<(ArtifactId, Vec<WorkerId>), AdoptionError> {
    let handle = adoption.volume;
    let Some(row) = orphan::Entity::find_by_id(handle.uuid()).one(txn).await? else {
        return repeat_adoption(txn, adoption, now).await;
    };
    let elsewhere = adoption.worker.is_some_and(|worker| worker.uuid() != row.worker_id);
    let of_others = row.team.as_ref().is_some_and(|team| *team != adoption.team);
    if elsewhere || (of_others && !holds_bytes_of_team(txn, &row, adoption).await?) {
        return Err(AdoptionError::NotFound(handle, SearchScope(adoption.worker)));
    }
    let Some(digest) = row.digest.as_deref().and_then(|digest| digest.try_into().ok()).map(Digest) else {
        return Err(AdoptionError::NotAdoptable(handle));
    };
    let noted = row.artifact_id.map(ArtifactId::from_uuid);
    let id = adoption.artifact.or(noted).unwrap_or_else(ArtifactId::new);

    let workers = "SELECT worker_id FROM volumes WHERE artifact_id = $1";
    marks::lock_workers(txn, workers, [id.uuid().into()], LockWait::Block).await?;
    let worker = worker::Entity::find_by_id(row.worker_id).lock_shared().one(txn).await?;
    let worker = worker.ok_or(AdoptionError::NotFound(handle, SearchScope(adoption.worker)))?;
    if let KeptBy::Build(build) = adoption.kept_by {
        builds::lock_live(txn, build, &adoption.team).await?;
    }
    let state = find_or_make(txn, adoption, id, digest, now).await?;
    if let Some(parent) = row.parent {
        volume::Entity::find_by_id(parent).lock_shared().one(txn).await?;
    }
    let taken = orphan::Entity::delete_by_id(handle.uuid()).exec(txn).await?;
    if taken.rows_affected == 0 {
        // Another operator decided about it meanwhile.
        return repeat_adoption(txn, adoption, now).await;
    }
    let replica = volume::Model {
        state: State::Created,
        artifact_id: Some(id.uuid()),
        parent: row.parent,
        complete: true,
        digest: row.digest,
        size_bytes: row.size_bytes,
        adopted_at: Some(now.0),
        ..volumes::new_volume(
            handle,
            WorkerId::from_uuid(row.worker_id),
            Purpose::Replica,
            worker.sequence,
            now,
        )
    };
    volume::Entity::insert(replica.into_active_model().reset_all()).exec_without_returning(txn).await?;
    let marked = match state {
        ArtifactState::Open => seal(txn, adoption, id, digest, now).await?,
        ArtifactState::Sealed | ArtifactState::Deleting => Vec::new(),
    };
    restore::undelete(txn, &adoption.team, id, adoption.kept_by, now).await?;
    Ok((id, marked))
}

/// Returns whether a volume that was created for another team holds bytes of an artifact of the
/// adopting team.
async fn holds_bytes_of_team(
    txn: &DatabaseTransaction,
    row: &orphan::Model,
    adoption: &Adoption,
) -> Result<bool, DbErr> {
    let Some(noted) = row.artifact_id else { return Ok(false) };
    let known = artifact::Entity::find_by_id(noted)
        .filter(artifact::Column::Team.eq(&adoption.team))
        .filter(artifact::Column::Digest.eq(row.digest.clone()))
        .one(txn)
        .await?;
    Ok(known.is_some() && adoption.artifact.is_none_or(|wanted| wanted.uuid() == noted))
}

/// Finds or creates the artifact of an adopted volume, locks it, and returns its state.
async fn find_or_make(
    txn: &DatabaseTransaction,
    adoption: &Adoption,
    id: ArtifactId,
    digest: Digest,
    now: Timestamp,
) -> Result<ArtifactState, AdoptionError> {
    let locked = || artifact::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn);
    let found = match locked().await? {
        Some(found) => Some(found),
        None => {
            let new = NewArtifact {
                id,
                team: adoption.team.clone(),
                label: String::new(),
                owner: None,
                tree: None,
            };
            match artifacts::create(txn, &new, now).await {
                // Another transaction created it.
                Ok(()) | Err(CreateError::Exists(_)) => {}
                Err(CreateError::Owner(error)) => return Err(error.into()),
                Err(CreateError::Database(error)) => return Err(error.into()),
            }
            locked().await?
        }
    };
    let found = found.filter(|row| row.team == adoption.team).ok_or(AdoptionError::ArtifactNotFound(id))?;
    let same = found.digest.as_deref() == Some(digest.as_bytes());
    match found.state {
        ArtifactState::Sealed if !same => Err(AdoptionError::OtherBytes(id)),
        ArtifactState::Deleting if !same => Err(UndeleteError::BytesGone(id).into()),
        state => Ok(state),
    }
}

/// Seals an open artifact with the bytes of an adopted volume. Returns the workers on which volumes
/// with other bytes were marked.
async fn seal(
    txn: &DatabaseTransaction,
    adoption: &Adoption,
    id: ArtifactId,
    digest: Digest,
    now: Timestamp,
) -> Result<Vec<WorkerId>, AdoptionError> {
    match replicas::seal(txn, &adoption.team, id, digest, now).await {
        Ok((_, marked)) => Ok(marked),
        Err(SealError::ArtifactNotFound(id)) => Err(AdoptionError::ArtifactNotFound(id)),
        Err(SealError::OtherBytes(id)) => Err(AdoptionError::OtherBytes(id)),
        Err(SealError::CandidateMissing(_)) => {
            Err(AdoptionError::NotFound(adoption.volume, SearchScope(adoption.worker)))
        }
        Err(SealError::Database(error)) => Err(error.into()),
    }
}

/// Handles a repeated call. If the volume was adopted, keeps its artifact as the new call says.
async fn repeat_adoption(
    txn: &DatabaseTransaction,
    adoption: &Adoption,
    now: Timestamp,
) -> Result<(ArtifactId, Vec<WorkerId>), AdoptionError> {
    let (handle, refused) = (adoption.volume.uuid(), AdoptionError::NotOrphaned(adoption.volume));
    let Some(row) = volume::Entity::find_by_id(handle).one(txn).await? else {
        let known = deletion::Entity::find_by_id(handle).one(txn).await?.is_some()
            || container::Entity::find_by_id(handle).one(txn).await?.is_some();
        return Err(if known {
            refused
        } else {
            AdoptionError::NotFound(adoption.volume, SearchScope(adoption.worker))
        });
    };
    if adoption.worker.is_some_and(|worker| worker.uuid() != row.worker_id) {
        return Err(AdoptionError::NotFound(adoption.volume, SearchScope(adoption.worker)));
    }
    let row = sweep_queue::merge_mark(txn, row).await?;
    let id = row.artifact_id.filter(|_| row.adopted_at.is_some() && !row.state.is_garbage());
    let id = id.filter(|id| adoption.artifact.is_none_or(|wanted| wanted.uuid() == *id));
    let id = ArtifactId::from_uuid(id.ok_or(refused)?);
    match restore::undelete(txn, &adoption.team, id, adoption.kept_by, now).await {
        Ok(()) => Ok((id, Vec::new())),
        Err(UndeleteError::NotFound(_) | UndeleteError::Open(_)) => {
            Err(AdoptionError::NotFound(adoption.volume, SearchScope(adoption.worker)))
        }
        Err(error) => Err(error.into()),
    }
}

/// Result of a purge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PurgeSummary {
    pub(crate) volumes: u64,
    pub(crate) containers: u64,
    pub(crate) workers: HashSet<WorkerId>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PurgeError {
    #[error("no volume or container {0}{1}")]
    NotFound(Uuid, SearchScope),
    #[error("{0} is not an orphan: it was adopted, or was always known")]
    NotOrphaned(Uuid),
    #[error("database failed while purging orphans")]
    Database(#[from] DbErr),
}

/// Marks orphans as garbage.
pub(crate) async fn purge(
    txn: &DatabaseTransaction,
    handles: &[Uuid],
    on: Option<WorkerId>,
    now: Timestamp,
) -> Result<PurgeSummary, PurgeError> {
    let of_handles = || orphan::Entity::find().filter(orphan::Column::Handle.is_in(handles.to_vec()));
    let backend = txn.get_database_backend();
    let workers = format!("SELECT worker_id FROM orphans WHERE handle IN ({})", ids::query(backend, 1));
    let values = [ids::value(backend, handles.iter().copied())];
    marks::lock_workers(txn, &workers, values, LockWait::Block).await?;
    let rows = of_handles().order_by_asc(orphan::Column::Handle).lock_exclusive().all(txn).await?;
    if let Some(row) = rows.iter().find(|row| on.is_some_and(|on| on.uuid() != row.worker_id)) {
        return Err(PurgeError::NotFound(row.handle, SearchScope(on)));
    }
    let found: HashSet<_> = rows.iter().map(|row| row.handle).collect();
    for other in handles.iter().filter(|handle| !found.contains(handle)) {
        must_be_garbage(txn, *other, on).await?;
    }
    let of_workers = worker::Column::WorkerId.is_in(rows.iter().map(|row| row.worker_id));
    let workers = worker::Entity::find().filter(of_workers).all(txn).await?;
    let sequence = |row: &orphan::Model| {
        workers.iter().find(|worker| worker.worker_id == row.worker_id).map_or(0, |worker| worker.sequence)
    };
    orphan::Entity::delete_many()
        .filter(orphan::Column::Handle.is_in(found.iter().copied()))
        .exec(txn)
        .await?;

    let mut purged = PurgeSummary::default();
    for row in &rows {
        purged.workers.insert(WorkerId::from_uuid(row.worker_id));
        match row.kind {
            OrphanKind::Volume => {
                purged.volumes += 1;
                let garbage = garbage_volume(row, sequence(row), now).into_active_model().reset_all();
                volume::Entity::insert(garbage).exec_without_returning(txn).await?;
                sweep_queue::add(txn, [row.handle]).await?;
            }
            OrphanKind::Container => {
                purged.containers += 1;
                let garbage = garbage_container(row, sequence(row), now).into_active_model().reset_all();
                container::Entity::insert(garbage).exec_without_returning(txn).await?;
            }
        }
    }
    Ok(purged)
}

/// Accepts a repeated purge of an item that is garbage or gone, and rejects all other known items.
async fn must_be_garbage(
    txn: &DatabaseTransaction,
    handle: Uuid,
    on: Option<WorkerId>,
) -> Result<(), PurgeError> {
    let volume = inventory::volume(txn, VolumeHandle::from_uuid(handle)).await?;
    let volume = volume.map(|row| (row.worker_id, row.state));
    let container =
        container::Entity::find_by_id(handle).one(txn).await?.map(|row| (row.worker_id, row.state));
    match volume.or(container) {
        Some((worker, _)) if on.is_some_and(|on| on.uuid() != worker) => {
            Err(PurgeError::NotFound(handle, SearchScope(on)))
        }
        Some((_, state)) if state.is_garbage() => Ok(()),
        Some(_) => Err(PurgeError::NotOrphaned(handle)),
        None if deletion::Entity::find_by_id(handle).one(txn).await?.is_some() => Ok(()),
        None => Err(PurgeError::NotFound(handle, SearchScope(on))),
    }
}

fn garbage_volume(row: &orphan::Model, sequence: i64, now: Timestamp) -> volume::Model {
    let (handle, worker) = (VolumeHandle::from_uuid(row.handle), WorkerId::from_uuid(row.worker_id));
    volume::Model {
        state: State::Destroying,
        parent: row.parent,
        size_bytes: row.size_bytes,
        mark_reason: Some(PURGED.to_owned()),
        marked_at: Some(now.0),
        given_up: true,
        ..volumes::new_volume(handle, worker, Purpose::Scratch, sequence, now)
    }
}

fn garbage_container(row: &orphan::Model, sequence: i64, now: Timestamp) -> container::Model {
    container::Model {
        handle: row.handle,
        worker_id: row.worker_id,
        state: State::Destroying,
        // The attempt and workload of an orphan are unknown.
        attempt_id: Uuid::nil(),
        holder_id: Uuid::nil(),
        created_at: now.0,
        judged_after: sequence,
        mark_reason: Some(PURGED.to_owned()),
        marked_at: Some(now.0),
        touched_at: None,
        lost_at: None,
        loss_noticed: false,
    }
}
