//! Settling: how a holder ends for good, with what it made.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, AttemptId, BuildId, Digest, Timestamp, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QuerySelect,
};
use uuid::Uuid;

use crate::builds::{self, OwnerEnded};
use crate::caches::outputs::{self, Owned};
use crate::db::entity::{
    ArtifactState, BuildStatus, Purpose, State, artifact, attempt, build, holder, pin, task_cache_use, volume,
};
use crate::db::ids;
use crate::holders::{self, HolderError};
use crate::marks::schedule::make_due;

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
    let row = holders::lock(txn, holder, &settlement.team, now).await?;
    if row.settled_at.is_some() {
        return Ok(Vec::new());
    }
    let (mut missing, mut owned) = (Vec::new(), Vec::new());
    if !settlement.outputs.is_empty() {
        let left_out = seal_outputs(txn, settlement, now).await?;
        (missing, owned) = settlement.owned().partition(|(_, artifact)| left_out.contains(artifact));
        missing.extend(give_to_builds(txn, settlement, &owned).await?);
    }

    let let_go = let_go_of_all(txn, &[holder.uuid()], now).await?;
    builds::end_with(txn, holder, settlement.status, now).await?;
    are_settled(txn, &[holder.uuid()], now).await?;
    missing.extend(outputs::give(txn, &settlement.team, holder, owned, now, resource_cache_ttl).await?);
    // Last: a transaction that holds one of them may wait for what is locked above.
    make_due(txn, let_go, now).await?;
    Ok(missing)
}

/// The same for several holders of one team that made nothing which is kept, of those with which nothing ends but their pins and attempts. Answers
/// the others, of which nothing was done: what ends with them is locked in an order of its own.
pub(super) async fn settle_plain(
    txn: &DatabaseTransaction,
    team: &str,
    holders: &[WorkloadId],
    now: Timestamp,
) -> Result<HashSet<WorkloadId>, SettleError> {
    let holders = holders::lock_all(txn, holders.iter().copied(), team, now).await?;
    let going_on = holders.into_iter().filter(|(_, row)| row.settled_at.is_none()).map(|(id, _)| id.uuid());
    let mut going_on: Vec<_> = going_on.collect();
    if going_on.is_empty() {
        return Ok(HashSet::new());
    }
    let others = others(txn, &going_on).await?;
    going_on.retain(|id| !others.contains(id));
    let let_go = let_go_of_all(txn, &going_on, now).await?;
    are_settled(txn, &going_on, now).await?;
    make_due(txn, let_go, now).await?;
    Ok(others.into_iter().map(WorkloadId::from_uuid).collect())
}

/// Those of holders that are to end a build, or use task caches.
async fn others(txn: &DatabaseTransaction, holders: &[Uuid]) -> Result<HashSet<Uuid>, DbErr> {
    let backend = txn.get_database_backend();
    let among = |column: &str| ids::among(backend, column, holders.iter().copied());
    let builds = build::Entity::find()
        .select_only()
        .column(build::Column::EndsWith)
        .filter(among("ends_with"))
        .filter(build::Column::EndedAt.is_null())
        .into_tuple();
    let caches = task_cache_use::Entity::find()
        .select_only()
        .column(task_cache_use::Column::HolderId)
        .filter(among("holder_id"))
        .into_tuple();
    let (builds, caches): (Vec<Uuid>, Vec<Uuid>) = (builds.all(txn).await?, caches.all(txn).await?);
    Ok(builds.into_iter().chain(caches).collect())
}

/// Drops the pins of holders that are locked, and ends their attempts. Answers what was pinned.
async fn let_go_of_all(
    txn: &DatabaseTransaction,
    holders: &[Uuid],
    now: Timestamp,
) -> Result<BTreeSet<Uuid>, DbErr> {
    let among = || ids::among(txn.get_database_backend(), "holder_id", holders.iter().copied());
    let pinned = pin::Entity::delete_many().filter(among()).exec_with_returning(txn).await?;
    attempt::Entity::update_many()
        .col_expr(attempt::Column::EndedAt, Expr::value(now.0))
        .col_expr(attempt::Column::LookAt, Expr::value(now.0))
        .filter(among())
        .filter(attempt::Column::EndedAt.is_null())
        .exec(txn)
        .await?;
    Ok(pinned.into_iter().map(|pin| pin.artifact_id).collect())
}

/// Notes of holders that are locked that they are settled.
async fn are_settled(txn: &DatabaseTransaction, holders: &[Uuid], now: Timestamp) -> Result<(), DbErr> {
    holder::Entity::update_many()
        .col_expr(holder::Column::SettledAt, Expr::value(now.0))
        .col_expr(holder::Column::LookAt, Expr::value(now.0))
        .filter(ids::among(txn.get_database_backend(), "holder_id", holders.iter().copied()))
        .exec(txn)
        .await
        .map(drop)
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

/// Gives builds the outputs that were sealed. Answers the owners of single outputs that have ended; what comes too late has no owner.
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
        match builds::lock_live(txn, build, &settlement.team).await {
            Ok(_) => {
                let artifacts: BTreeSet<_> = artifacts.into_iter().map(ArtifactId::uuid).collect();
                builds::add(txn, build, artifacts).await?;
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
