//! Pins: what keeps artifacts while a workload uses or makes them; and how a workload is settled.
//!
//! ```text
//! holder:   (unknown) ──pin, prepare──▶ goes on ──settle──▶ settled ──a day later──▶ (gone)
//! attempt:  (unknown) ──prepare──▶ goes on ──settle, end attempt──▶ ended ──with its holder──▶ (gone)
//! ```
//!
//! Every change of a holder locks its row first, so pinning, preparing and settling never interleave for one workload. Invariants: a settled
//! holder has no pins and is never pinned again; an ended attempt makes and settles nothing. An attempt may end before anybody prepared
//! it: its row is made then, so that a late Prepare finds it ended.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, AttemptId, BuildId, CacheId, Digest, Timestamp, WorkloadId};
use sea_orm::sea_query::{Expr, Func, OnConflict};
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr,
    EntityTrait, FromQueryResult, IntoActiveModel, QueryFilter, QueryOrder, QuerySelect, Statement,
};
use uuid::Uuid;

use crate::artifacts::{self, Located};
use crate::caches::outputs::{self, Owned};
use crate::caches::task;
use crate::due::make_due;
use crate::entity::{
    ArtifactState, BuildStatus, Purpose, State, artifact, attempt, build, holder, pin, volume,
};
use crate::ids;
use crate::owners::{self, OwnerEnded};

/// A holder belongs to another team than the one that acts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HolderError {
    #[error("workload {0} belongs to another team")]
    OtherTeam(WorkloadId),
    #[error("database failed while looking for a workload")]
    Database(#[from] DbErr),
}

/// Finds or makes a holder, and locks it.
pub(crate) async fn lock_holder(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    team: &str,
    now: Timestamp,
) -> Result<holder::Model, HolderError> {
    let fresh = holder::ActiveModel {
        holder_id: Set(id.uuid()),
        team: Set(team.to_owned()),
        created_at: Set(now.0),
        settled_at: Set(None),
        look_at: Set(now.0),
    };
    // Changing nothing locks the row, and lets it be answered whether it was there or not.
    let row = holder::Entity::insert(fresh)
        .on_conflict(
            OnConflict::column(holder::Column::HolderId).update_column(holder::Column::HolderId).to_owned(),
        )
        .exec_with_returning(txn)
        .await?;
    if row.team == team { Ok(row) } else { Err(HolderError::OtherTeam(id)) }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PinError {
    #[error(transparent)]
    Holder(#[from] HolderError),
    #[error("workload {0} was settled before")]
    Settled(WorkloadId),
    #[error("artifact {0} is unknown to this team, not sealed, or its bytes are nowhere any more")]
    Unavailable(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error(transparent)]
    Cache(#[from] task::UseError),
    #[error("database failed while pinning")]
    Database(#[from] DbErr),
}

/// What a holder uses.
#[derive(Debug, Clone)]
pub(crate) struct Used {
    pub(crate) holder: WorkloadId,
    pub(crate) team: String,
    pub(crate) artifacts: Vec<ArtifactId>,
    /// The build that it is to end.
    pub(crate) build: Option<BuildId>,
    pub(crate) task_caches: Vec<CacheId>,
}

/// Where the bytes are of what a holder uses.
#[derive(Debug, Clone)]
pub(crate) struct Pinned {
    pub(crate) artifacts: Vec<Located>,
    /// The latest versions of task caches, of those that have bytes.
    pub(crate) task_caches: Vec<Located>,
}

/// Pins what a holder uses, all or none, and binds the holder to its build.
pub(crate) async fn pin(txn: &DatabaseTransaction, used: &Used, now: Timestamp) -> Result<Pinned, PinError> {
    let (id, team) = (used.holder, &*used.team);
    let holder = lock_holder(txn, id, team, now).await?;
    if holder.settled_at.is_some() {
        return Err(PinError::Settled(id));
    }
    if let Some(build) = used.build {
        bind(txn, build, id, team).await?;
    }
    let task_caches = task::use_them(txn, team, id, &used.task_caches, now).await?;
    let artifacts = pin_artifacts(txn, id, team, &used.artifacts, now).await?;
    Ok(Pinned { artifacts, task_caches })
}

async fn pin_artifacts(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    team: &str,
    artifacts: &[ArtifactId],
    now: Timestamp,
) -> Result<Vec<Located>, PinError> {
    if artifacts.is_empty() {
        return Ok(Vec::new());
    }

    let mut sealed = lock_sealed(txn, team, artifacts).await?;
    if let Some(missing) = artifacts.iter().find(|id| !sealed.contains_key(&id.uuid())) {
        return Err(PinError::Unavailable(*missing));
    }
    let holds: Vec<_> = sealed.keys().copied().collect();
    // Each once, in the order asked.
    let rows = artifacts.iter().filter_map(|id| sealed.remove(&id.uuid()));
    let located = artifacts::locate_rows(txn, rows.collect()).await?;
    if let Some(missing) = located.iter().find(|located| !located.has_bytes()) {
        return Err(PinError::Unavailable(ArtifactId::from_uuid(missing.artifact.artifact_id)));
    }
    let backend = txn.get_database_backend();
    // Without a condition SQLite would take the conflict for one of a join.
    let sql = format!(
        "INSERT INTO pins (holder_id, artifact_id, pinned_at) SELECT $2, id, $3 FROM ({}) AS pinned WHERE TRUE
         ON CONFLICT (holder_id, artifact_id) DO NOTHING",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, holds), id.uuid().into(), now.0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    Ok(located)
}

/// Binds the workload that ends a build: from now on the build does not end by its term.
async fn bind(
    txn: &DatabaseTransaction,
    build: BuildId,
    workload: WorkloadId,
    team: &str,
) -> Result<(), OwnerEnded> {
    let row = build::Entity::find_by_id(build.uuid()).lock_exclusive().one(txn).await?;
    let Some(row) = row.filter(|row| row.team == team && row.ended_at.is_none()) else {
        return Err(OwnerEnded::Ended(build));
    };
    if row.ends_with == Some(workload.uuid()) && !row.bound {
        build::Entity::update_many()
            .col_expr(build::Column::Bound, Expr::value(true))
            .filter(build::Column::BuildId.eq(build.uuid()))
            .exec(txn)
            .await?;
    }
    Ok(())
}

/// Locks sealed artifacts that `team` may use, so that they are not marked before the caller commits, and answers those that are such.
pub(crate) async fn lock_sealed(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
) -> Result<HashMap<Uuid, artifact::Model>, DbErr> {
    let rows = artifact::Entity::find()
        .filter(ids::among(txn.get_database_backend(), "artifact_id", artifacts.iter().map(|id| id.uuid())))
        .filter(artifacts::usable_by(team))
        .filter(Expr::cust("state = 'sealed'"))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_shared()
        .all(txn)
        .await?;
    Ok(rows.into_iter().map(|row| (row.artifact_id, row)).collect())
}

/// How a workload is settled.
#[derive(Debug, Clone)]
pub(crate) struct Settlement {
    pub(crate) holder: WorkloadId,
    pub(crate) team: String,
    pub(crate) attempt: Option<AttemptId>,
    pub(crate) outputs: Vec<SettledOutput>,
    pub(crate) build: Option<BuildId>,
    pub(crate) status: BuildStatus,
}

impl Settlement {
    /// What comes to own single outputs.
    fn owned(&self) -> impl Iterator<Item = Owned> {
        let of_output = |output: &SettledOutput| {
            output.owners.iter().map(|owner| (*owner, output.artifact)).collect::<Vec<_>>()
        };
        self.outputs.iter().flat_map(of_output)
    }
}

/// An output that is settled.
#[derive(Debug, Clone)]
pub(crate) struct SettledOutput {
    pub(crate) artifact: ArtifactId,
    pub(crate) digest: Digest,
    pub(crate) label: String,
    /// What comes to own it besides the build of the settlement.
    pub(crate) owners: Vec<OutputOwner>,
    /// Nothing else does, and where there is no candidate it is left out.
    pub(crate) for_owners_only: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SettleError {
    #[error(transparent)]
    Holder(#[from] HolderError),
    #[error("the attempt has no complete candidate for artifact {0} with that digest")]
    CandidateMissing(ArtifactId),
    #[error("artifact {0} is taken by another")]
    ArtifactTaken(ArtifactId),
    #[error("database failed while settling")]
    Database(#[from] DbErr),
}

/// Ends a holder for good: seals its outputs, gives them their owners, drops its pins, ends its attempts and the builds that end
/// with it. The first call counts; a repeat changes nothing. Answers the owners that are not to be had, each with its output.
pub(crate) async fn settle(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
    now: Timestamp,
    resource_cache_ttl: Duration,
) -> Result<Vec<Owned>, SettleError> {
    let holder = settlement.holder;
    let row = lock_holder(txn, holder, &settlement.team, now).await?;
    if row.settled_at.is_some() {
        return Ok(Vec::new());
    }
    let (mut missing, mut owned) = (Vec::new(), Vec::new());
    if !settlement.outputs.is_empty() {
        let left_out = seal_outputs(txn, settlement, now).await?;
        (missing, owned) = settlement.owned().partition(|(_, artifact)| left_out.contains(artifact));
        missing.extend(give_to_builds(txn, settlement, &owned).await?);
    }

    let pinned = pin::Entity::delete_many().filter(pin::Column::HolderId.eq(holder.uuid()));
    let pinned = pinned.exec_with_returning(txn).await?;
    attempt::Entity::update_many()
        .col_expr(attempt::Column::EndedAt, Expr::value(now.0))
        .col_expr(attempt::Column::LookAt, Expr::value(now.0))
        .filter(attempt::Column::HolderId.eq(holder.uuid()))
        .filter(attempt::Column::EndedAt.is_null())
        .exec(txn)
        .await?;
    owners::end_with(txn, holder, settlement.status, now).await?;
    holder::Entity::update_many()
        .col_expr(holder::Column::SettledAt, Expr::value(now.0))
        .col_expr(holder::Column::LookAt, Expr::value(now.0))
        .filter(holder::Column::HolderId.eq(holder.uuid()))
        .exec(txn)
        .await?;
    missing.extend(outputs::give(txn, &settlement.team, holder, owned, now, resource_cache_ttl).await?);
    // Last: whoever holds one of them may wait for what is locked above.
    make_due(txn, pinned.into_iter().map(|pin| pin.artifact_id), now).await?;
    Ok(missing)
}

/// Makes each output's artifact, sealed, and its candidate the replica. Answers those that are left out.
async fn seal_outputs(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
    now: Timestamp,
) -> Result<HashSet<ArtifactId>, SettleError> {
    let candidates = lock_candidates(txn, settlement).await?;
    let mut artifacts = Vec::with_capacity(settlement.outputs.len());
    let mut handles = Vec::with_capacity(settlement.outputs.len());
    let mut left_out = HashSet::new();
    for output in &settlement.outputs {
        let candidate = candidates
            .get(&output.artifact.uuid())
            .filter(|candidate| candidate.digest.as_deref() == Some(output.digest.as_bytes()));
        let candidate = match candidate {
            Some(candidate) => candidate,
            None if output.for_owners_only => {
                left_out.insert(output.artifact);
                continue;
            }
            None => return Err(SettleError::CandidateMissing(output.artifact)),
        };
        handles.push(candidate.handle);
        artifacts.push(artifact::Model {
            artifact_id: output.artifact.uuid(),
            ordinal: Uuid::now_v7(),
            team: settlement.team.clone(),
            label: output.label.clone(),
            state: ArtifactState::Sealed,
            digest: candidate.digest.clone(),
            size_bytes: candidate.size_bytes,
            // Those that it is for let go of it when they are not there.
            had_owner: output.for_owners_only,
            created_at: now.0,
            marked_at: None,
            marked_why: None,
            kept_until: None,
            // Until it is owned, below.
            look_at: Some(now.0),
            in_store: false,
        });
    }
    if artifacts.is_empty() {
        return Ok(left_out);
    }
    let ids: Vec<_> = artifacts.iter().map(|artifact| artifact.artifact_id).collect();
    if let Some(taken) =
        artifact::Entity::find().filter(artifact::Column::ArtifactId.is_in(ids.clone())).one(txn).await?
    {
        return Err(SettleError::ArtifactTaken(ArtifactId::from_uuid(taken.artifact_id)));
    }
    let rows = artifacts.into_iter().map(|artifact| artifact.into_active_model().reset_all());
    artifact::Entity::insert_many(rows).exec_without_returning(txn).await?;
    volume::Entity::update_many()
        .col_expr(volume::Column::Purpose, Expr::value(Purpose::Replica))
        .filter(volume::Column::Handle.is_in(handles))
        .exec(txn)
        .await?;
    Ok(left_out)
}

/// Gives builds the outputs that were sealed. Answers the owners of single outputs that have ended; nobody owns what comes too late.
async fn give_to_builds(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
    owned: &[Owned],
) -> Result<Vec<Owned>, SettleError> {
    let mut by_build: BTreeMap<BuildId, Vec<ArtifactId>> = BTreeMap::new();
    for (owner, artifact) in owned {
        if let OutputOwner::Build(build) = owner {
            by_build.entry(*build).or_default().push(*artifact);
        }
    }
    let all = settlement.outputs.iter().filter(|output| !output.for_owners_only);
    let all: Vec<_> = all.map(|output| output.artifact).collect();
    if let Some(build) = settlement.build.filter(|_| !all.is_empty()) {
        by_build.entry(build).or_default().extend(all);
    }
    let mut missing = Vec::new();
    for (build, artifacts) in by_build {
        match owners::lock_live(txn, build, &settlement.team).await {
            Ok(_) => {
                let artifacts: BTreeSet<_> = artifacts.into_iter().map(ArtifactId::uuid).collect();
                owners::add(txn, build, artifacts).await?;
            }
            Err(OwnerEnded::Ended(_)) => {
                let owner = OutputOwner::Build(build);
                missing.extend(owned.iter().filter(|(other, _)| *other == owner));
            }
            Err(OwnerEnded::Database(error)) => return Err(error.into()),
        }
    }
    Ok(missing)
}

/// The complete candidates of an attempt that goes on, by the artifact that they may become.
async fn lock_candidates(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
) -> Result<HashMap<Uuid, volume::Model>, DbErr> {
    let Some(id) = settlement.attempt else { return Ok(HashMap::new()) };
    let attempt = attempt::Entity::find_by_id(id.uuid()).lock_exclusive().one(txn).await?;
    let goes_on = attempt
        .is_some_and(|attempt| attempt.ended_at.is_none() && attempt.holder_id == settlement.holder.uuid());
    if !goes_on {
        return Ok(HashMap::new());
    }
    let rows = volume::Entity::find()
        .filter(volume::Column::AttemptId.eq(id.uuid()))
        .filter(volume::Column::Purpose.eq(Purpose::Output))
        .filter(volume::Column::Complete.eq(true))
        .filter(volume::Column::State.is_in(State::PRESENT))
        .lock_exclusive()
        .all(txn)
        .await?;
    Ok(rows.into_iter().filter_map(|row| Some((row.artifact_id?, row))).collect())
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum EndAttemptError {
    #[error("attempt {0} is of another workload")]
    OtherHolder(AttemptId),
    #[error("database failed while ending an attempt")]
    Database(#[from] DbErr),
}

/// Ends one attempt of a holder that goes on. One that is not known is remembered as ended.
pub(crate) async fn end_attempt(
    txn: &DatabaseTransaction,
    holder: WorkloadId,
    id: AttemptId,
    now: Timestamp,
) -> Result<(), EndAttemptError> {
    let ended = attempt::ActiveModel {
        attempt_id: Set(id.uuid()),
        holder_id: Set(holder.uuid()),
        worker_id: Set(None),
        ended_at: Set(Some(now.0)),
        look_at: Set(Some(now.0)),
    };
    let first_end =
        Func::coalesce([Expr::col((attempt::Entity, attempt::Column::EndedAt)), Expr::value(now.0)]);
    let row = attempt::Entity::insert(ended)
        .on_conflict(
            OnConflict::column(attempt::Column::AttemptId)
                .value(attempt::Column::EndedAt, Expr::from(first_end))
                .update_column(attempt::Column::LookAt)
                .to_owned(),
        )
        .exec_with_returning(txn)
        .await?;
    // The caller commits only what was its own.
    if row.holder_id == holder.uuid() { Ok(()) } else { Err(EndAttemptError::OtherHolder(id)) }
}

/// A holder for which something is kept: pins, caches that it uses, a build that only its settling ends, or an attempt that goes on.
#[derive(Debug, FromQueryResult)]
pub(crate) struct PinHolder {
    pub(crate) holder_id: Uuid,
    pub(crate) pinned_at: i64,
    pub(crate) team: String,
}

/// A page of the holders for which something is kept, by id.
pub(crate) async fn list(
    conn: &impl ConnectionTrait,
    page: rpc::page::Page,
) -> Result<Vec<PinHolder>, DbErr> {
    let limit = i64::try_from(page.size).unwrap_or(i64::MAX);
    let statement = Statement::from_sql_and_values(
        conn.get_database_backend(),
        "SELECT h.holder_id, h.created_at AS pinned_at, h.team FROM holders h
         WHERE h.settled_at IS NULL AND h.holder_id > $1
           AND (EXISTS (SELECT 1 FROM pins p WHERE p.holder_id = h.holder_id)
                OR EXISTS (SELECT 1 FROM cache_uses u
                           WHERE u.user_id = h.holder_id AND u.user_kind = 'workload')
                OR EXISTS (SELECT 1 FROM task_cache_uses u WHERE u.holder_id = h.holder_id)
                OR EXISTS (SELECT 1 FROM builds b
                           WHERE b.ends_with = h.holder_id AND b.bound = TRUE AND b.ended_at IS NULL)
                OR EXISTS (SELECT 1 FROM attempts a WHERE a.holder_id = h.holder_id AND a.ended_at IS NULL))
         ORDER BY h.holder_id LIMIT $2",
        [page.after.unwrap_or_default().into(), limit.into()],
    );
    PinHolder::find_by_statement(statement).all(conn).await
}
