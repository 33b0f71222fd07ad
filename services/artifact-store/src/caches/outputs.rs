//! Outputs of settled workloads that caches own.
//!
//! The transaction that seals the outputs gives them to the caches, and ends the workload's uses of
//! caches.
//!
//! A maker with a lost claim publishes nothing, and neither does a workload whose task cache is
//! gone. Other owners of the output still get it.

use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, Timestamp, WorkloadId};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use crate::caches::{release_artifacts, resource_caches, task_caches};
use crate::db::entity::artifact;

/// An output, and its future owner.
pub(crate) type OwnedOutput = (OutputOwner, ArtifactId);

/// Gives caches of `team` their sealed outputs, and ends the maker's uses of task caches. Returns
/// the outputs whose caches are not available.
///
/// The caller gives outputs to builds.
///
/// To prevent deadlocks, rows of resource caches are locked before those of task caches, in the
/// order of claims and ids. Their previous artifacts are locked last.
pub(crate) async fn give(
    txn: &DatabaseTransaction,
    team: &str,
    maker: WorkloadId,
    owned: impl IntoIterator<Item = OwnedOutput>,
    now: Timestamp,
    ttl: Duration,
) -> Result<Vec<OwnedOutput>, DbErr> {
    let mut owned: Vec<_> = owned.into_iter().filter(|(owner, _)| owner.is_cache()).collect();
    owned.sort_unstable_by_key(|(owner, _)| {
        let is_task_cache = matches!(owner, OutputOwner::TaskCache(_));
        (is_task_cache, *owner)
    });
    let (mut given, mut before, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    let first_task_cache = owned.partition_point(|(owner, _)| !matches!(owner, OutputOwner::TaskCache(_)));
    let of_task_caches = owned.split_off(first_task_cache);
    for (owner, artifact) in owned {
        let OutputOwner::ResourceCache(claim) = owner else { continue };
        match resource_caches::lock_being_made(txn, team, claim, now).await? {
            Some(row) => {
                resource_caches::make_ready(txn, row.cache_id, artifact, now, ttl).await?;
                given.push(artifact.uuid());
            }
            None => missing.push((owner, artifact)),
        }
    }
    let used = task_caches::used_by(txn, maker).await?;
    let named = of_task_caches.iter().filter_map(|(owner, _)| match owner {
        OutputOwner::TaskCache(cache) => Some(cache.uuid()),
        _ => None,
    });
    let known = task_caches::lock_all(txn, team, named.chain(used.iter().copied()).collect()).await?;
    for (owner, artifact) in of_task_caches {
        let OutputOwner::TaskCache(cache) = owner else { continue };
        match known.get(&cache.uuid()) {
            Some(row) => {
                task_caches::set_version(txn, cache, artifact, now).await?;
                given.push(artifact.uuid());
                before.extend(row.artifact_id);
            }
            None => missing.push((owner, artifact)),
        }
    }
    task_caches::end_uses(txn, maker, &used, now).await?;
    record_owner(txn, given).await?;
    release_artifacts(txn, before, now).await?;
    Ok(missing)
}

async fn record_owner(txn: &DatabaseTransaction, artifacts: Vec<Uuid>) -> Result<(), DbErr> {
    if artifacts.is_empty() {
        return Ok(());
    }
    artifact::Entity::update_many()
        .col_expr(artifact::Column::HadOwner, Expr::value(true))
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .exec(txn)
        .await
        .map(drop)
}
