//! Caches that come to own what a workload made, in the transaction that seals it.
//!
//! A maker that lost its claim, and who publishes to a task cache that is gone, publish nothing; whatever else owns the output is not concerned.

use std::time::Duration;

use domain::workload::OutputOwner;
use domain::{ArtifactId, Timestamp};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use super::{let_go, resource, task};
use crate::entity::artifact;

/// An output, and what shall own it.
pub(crate) type Owned = (OutputOwner, ArtifactId);

/// Gives caches of `team` their outputs, which the caller has just made, sealed. Answers those that are not to be had. Builds are the caller's
/// business.
///
/// The rows of caches are locked in the order of their ids, those of claims first; what they owned before, after all of them: so two who settle
/// with the same caches do not wait for one another.
pub(crate) async fn give(
    txn: &DatabaseTransaction,
    team: &str,
    owned: impl IntoIterator<Item = Owned>,
    now: Timestamp,
    ttl: Duration,
) -> Result<Vec<Owned>, DbErr> {
    let mut owned: Vec<_> = owned.into_iter().filter(|(owner, _)| owner.is_cache()).collect();
    owned.sort_unstable_by_key(|(owner, _)| {
        let is_task_cache = matches!(owner, OutputOwner::TaskCache(_));
        (is_task_cache, *owner)
    });
    let (mut given, mut before, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for (owner, artifact) in owned {
        let found = match owner {
            OutputOwner::Build(_) => continue,
            OutputOwner::ResourceCache(claim) => {
                match resource::lock_being_made(txn, team, claim, now).await? {
                    Some(row) => {
                        resource::make_ready(txn, row.cache_id, artifact, now, ttl).await?;
                        Some(None)
                    }
                    None => None,
                }
            }
            OutputOwner::TaskCache(cache) => match task::lock(txn, team, cache).await? {
                Some(row) => {
                    task::set_version(txn, cache, artifact, now).await?;
                    Some(row.artifact_id)
                }
                None => None,
            },
        };
        match found {
            Some(owned_before) => {
                given.push(artifact.uuid());
                before.extend(owned_before);
            }
            None => missing.push((owner, artifact)),
        }
    }
    had_owner(txn, given).await?;
    let_go(txn, before, now).await?;
    Ok(missing)
}

async fn had_owner(txn: &DatabaseTransaction, artifacts: Vec<Uuid>) -> Result<(), DbErr> {
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
