//! Settling of workloads: the end of a holder, with its outputs.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, AttemptId, BuildId, Digest, Timestamp, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, IntoActiveModel,
    QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::builds::{self, OwnerEnded};
use crate::caches::outputs::{self, OwnedOutput};
use crate::db::entity::{
    ArtifactState, BuildStatus, Purpose, State, artifact, attempt, build, holder, pin, task_cache_use, volume,
};
use crate::db::ids;
use crate::holders::{self, HolderError};
use crate::marks::schedule::make_due;

/// Request to settle a workload.
#[derive(Debug, Clone)]
pub(crate) struct Settlement {
    pub(crate) holder: WorkloadId,
    pub(crate) team: String,
    /// Attempt that has the outputs. `None`: any attempt of the holder that has not ended.
    pub(crate) attempt: Option<AttemptId>,
    /// Digest of the call, without the attempt.
    pub(crate) digest: Digest,
    pub(crate) outputs: Vec<SettledOutput>,
    pub(crate) build: Option<BuildId>,
    pub(crate) status: BuildStatus,
}

impl Settlement {
    /// Returns the outputs with owners of their own.
    fn owned(&self) -> impl Iterator<Item = OwnedOutput> {
        let of_output = |output: &SettledOutput| {
            output.owners.iter().map(|owner| (*owner, output.artifact)).collect::<Vec<_>>()
        };
        self.outputs.iter().flat_map(of_output)
    }
}

/// An output of a settlement.
#[derive(Debug, Clone)]
pub(crate) struct SettledOutput {
    pub(crate) artifact: ArtifactId,
    pub(crate) digest: Digest,
    pub(crate) label: String,
    /// Owners besides the build of the settlement.
    pub(crate) owners: Vec<OutputOwner>,
    /// Whether only `owners` get the output. If so, it is omitted when there is no candidate.
    pub(crate) for_owners_only: bool,
}

/// Result of a settlement.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    /// Outputs with owners that are not available.
    pub(crate) missing: Vec<OwnedOutput>,
    /// Whether the settlement has outputs, and the holder was settled before with other ones.
    pub(crate) differs: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SettleError {
    #[error(transparent)]
    Holder(#[from] HolderError),
    #[error("cannot seal artifact {0}: no such attempt has a complete volume with that digest")]
    CandidateMissing(ArtifactId),
    #[error("artifact {0} already exists")]
    ArtifactTaken(ArtifactId),
    #[error("database failed while settling a workload")]
    Database(#[from] DbErr),
}

/// Settles a workload.
///
/// Seals its outputs, gives them their owners, deletes its pins, and ends its attempts and the
/// builds that end with it. The first call counts. A repeat changes nothing.
pub(crate) async fn settle(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
    now: Timestamp,
    resource_cache_ttl: Duration,
) -> Result<Settled, SettleError> {
    let holder = settlement.holder;
    let row = holders::lock(txn, holder, &settlement.team, now).await?;
    let digest = (!settlement.outputs.is_empty()).then(|| settlement.digest.as_bytes().to_vec());
    if row.settled_at.is_some() {
        return Ok(Settled { missing: Vec::new(), differs: digest.is_some() && row.settlement != digest });
    }
    let (mut missing, mut owned) = (Vec::new(), Vec::new());
    if !settlement.outputs.is_empty() {
        let left_out = seal_outputs(txn, settlement, now).await?;
        (missing, owned) = settlement.owned().partition(|(_, artifact)| left_out.contains(artifact));
        missing.extend(give_to_builds(txn, settlement, &owned).await?);
    }

    let released = release_holders(txn, &[holder.uuid()], now).await?;
    builds::end_with(txn, holder, settlement.status, now).await?;
    record_settled(txn, &[holder.uuid()], digest, now).await?;
    missing.extend(outputs::give(txn, &settlement.team, holder, owned, now, resource_cache_ttl).await?);
    // Last: a transaction that has locked one of these artifacts may wait for rows locked above.
    make_due(txn, released, now).await?;
    Ok(Settled { missing, differs: false })
}

/// Settles holders of one team without outputs, unless a build ends with them or they use task
/// caches.
///
/// Returns the other holders, which are unchanged: the rows that end with them have their own lock
/// order.
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
    let others = holders_with_other_ends(txn, &going_on).await?;
    going_on.retain(|id| !others.contains(id));
    let released = release_holders(txn, &going_on, now).await?;
    record_settled(txn, &going_on, None, now).await?;
    make_due(txn, released, now).await?;
    Ok(others.into_iter().map(WorkloadId::from_uuid).collect())
}

/// Returns the holders with which a build ends, or that use task caches.
async fn holders_with_other_ends(
    txn: &DatabaseTransaction,
    holders: &[Uuid],
) -> Result<HashSet<Uuid>, DbErr> {
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

/// Deletes the pins of locked holders, and ends their attempts. Returns the artifacts that were
/// pinned.
async fn release_holders(
    txn: &DatabaseTransaction,
    holders: &[Uuid],
    now: Timestamp,
) -> Result<BTreeSet<Uuid>, DbErr> {
    let among = || ids::among(txn.get_database_backend(), "holder_id", holders.iter().copied());
    let pinned = pin::Entity::delete_many().filter(among()).exec_with_returning(txn).await?;
    attempt::Entity::update_many()
        .col_expr(attempt::Column::EndedAt, Expr::value(now.0))
        .col_expr(attempt::Column::DueAt, Expr::value(now.0))
        .filter(among())
        .filter(attempt::Column::EndedAt.is_null())
        .exec(txn)
        .await?;
    Ok(pinned.into_iter().map(|pin| pin.artifact_id).collect())
}

/// Records that locked holders are settled. `digest`: of a settlement with outputs.
async fn record_settled(
    txn: &DatabaseTransaction,
    holders: &[Uuid],
    digest: Option<Vec<u8>>,
    now: Timestamp,
) -> Result<(), DbErr> {
    holder::Entity::update_many()
        .col_expr(holder::Column::Settlement, Expr::value(digest))
        .col_expr(holder::Column::SettledAt, Expr::value(now.0))
        .col_expr(holder::Column::DueAt, Expr::value(now.0))
        .filter(ids::among(txn.get_database_backend(), "holder_id", holders.iter().copied()))
        .exec(txn)
        .await
        .map(drop)
}

/// Creates each output's artifact, sealed, and makes its candidate a replica. Returns the omitted
/// outputs.
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
        let candidate = candidates.get(&(output.artifact.uuid(), output.digest.as_bytes().to_vec()));
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
            // If its owners are not available, they have let go of it.
            had_owner: output.for_owners_only,
            created_at: now.0,
            marked_at: None,
            mark_reason: None,
            kept_until: None,
            // Checked at once, unless an owner keeps it.
            due_at: Some(now.0),
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

/// Gives sealed outputs to builds. Returns the outputs whose builds have ended. An output without
/// an open build has no owner.
async fn give_to_builds(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
    owned: &[OwnedOutput],
) -> Result<Vec<OwnedOutput>, SettleError> {
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
                let artifacts: BTreeSet<_> = artifacts.into_iter().collect();
                missing.extend(artifacts.into_iter().map(|artifact| (OutputOwner::Build(build), artifact)));
            }
            Err(OwnerEnded::Database(error)) => return Err(error.into()),
        }
    }
    Ok(missing)
}

/// Locks the complete output volumes of the active attempt of a settlement, or of all active
/// attempts of its holder, by the artifacts that they may become and by their digests.
async fn lock_candidates(
    txn: &DatabaseTransaction,
    settlement: &Settlement,
) -> Result<HashMap<(Uuid, Vec<u8>), volume::Model>, DbErr> {
    let attempts = attempt::Entity::find().filter(attempt::Column::HolderId.eq(settlement.holder.uuid()));
    let attempts = match settlement.attempt {
        Some(id) => attempts.filter(attempt::Column::AttemptId.eq(id.uuid())),
        None => attempts.filter(attempt::Column::EndedAt.is_null()).order_by_asc(attempt::Column::AttemptId),
    };
    let mut attempts = attempts.lock_exclusive().all(txn).await?;
    attempts.retain(|attempt| attempt.ended_at.is_none());
    if attempts.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = volume::Entity::find()
        .filter(volume::Column::AttemptId.is_in(attempts.into_iter().map(|attempt| attempt.attempt_id)))
        .filter(volume::Column::Purpose.eq(Purpose::Output))
        .filter(volume::Column::Complete.eq(true))
        .filter(volume::Column::State.is_in(State::PRESENT))
        // In the same order as deletions of volumes. In another order, both could deadlock.
        .order_by_asc(volume::Column::Handle)
        .lock_exclusive()
        .all(txn)
        .await?;
    // Later rows win: the oldest of equal candidates.
    let oldest_last = rows.into_iter().rev();
    Ok(oldest_last.filter_map(|row| Some(((row.artifact_id?, row.digest.clone()?), row))).collect())
}
