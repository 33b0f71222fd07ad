//! Caches: owners beside builds, which keep artifacts that are likely to be needed again.
//!
//! ```text
//! resource cache:  (requested) ──claimed──▶ being made ──put──▶ ready ──deleted, unused──▶ (gone)
//!                                  │    ▲ another claim             │
//!                                  └────┴────────bytes lost─────────┘
//! task cache:      (requested) ──▶ empty ──published──▶ with version ──deleted, unused──▶ (gone)
//! ```
//!
//! The row of a cache names the artifact that it owns. A transaction that changes it locks the row,
//! and then the new and the previous artifact in the order of their ids ([`hand_over`]). Therefore
//! the collector either sees the new owner, or has marked the artifact before. The transaction also
//! schedules a check of the previous artifact. An output that a workload makes for a cache is owned
//! from the moment in which it is sealed ([`outputs`]).
//!
//! Invariants:
//!
//! - A resource cache has at most one valid claim. Only an artifact that is put under the valid
//!   claim counts.
//! - A use ends with its build or workload, even if no call ends it
//!   ([`crate::marks::cache_uses::uses`]).
//!
//! A cache is available to its own team. Resource caches with the scope [`ALL_TEAMS`], base
//! resource types and certificates are available to every team. Every team may locate, pin and copy
//! their artifacts ([`crate::artifacts::access::usable_by`]).

pub(crate) mod base_types;
pub(crate) mod outputs;
pub(crate) mod resource_caches;
pub(crate) mod task_caches;

use std::collections::HashMap;

use domain::{ArtifactId, CacheId, Timestamp};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder,
    QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::{self, LocatedArtifact};
use crate::db::entity::{ALL_TEAMS, ArtifactState, artifact, resource_cache, task_cache};
use crate::db::ids;

/// An artifact cannot be put into a cache.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandOverError {
    #[error("artifact {0} is unknown to this team or not sealed")]
    NotSealed(ArtifactId),
    #[error("database failed while giving an artifact to a cache")]
    Database(#[from] DbErr),
}

/// Locks the new and the previous artifact of a cache, so that the caller can change the owner.
/// Records that the new one had an owner, and schedules a check of the previous one.
async fn hand_over(
    txn: &DatabaseTransaction,
    team: &str,
    new: ArtifactId,
    before: Option<Uuid>,
    now: Timestamp,
) -> Result<(), HandOverError> {
    let rows = artifact::Entity::find()
        .filter(artifact::Column::ArtifactId.is_in([Some(new.uuid()), before].into_iter().flatten()))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_exclusive()
        .all(txn)
        .await?;
    let sealed = rows
        .iter()
        .any(|row| row.artifact_id == new.uuid() && row.team == team && row.state == ArtifactState::Sealed);
    if !sealed {
        return Err(HandOverError::NotSealed(new));
    }
    artifact::Entity::update_many()
        .col_expr(artifact::Column::HadOwner, Expr::value(true))
        .filter(artifact::Column::ArtifactId.eq(new.uuid()))
        .filter(artifact::Column::HadOwner.eq(false))
        .exec(txn)
        .await?;
    make_locked_due(txn, before.filter(|before| *before != new.uuid()), now).await?;
    Ok(())
}

/// Locks artifacts whose caches are about to be deleted, and schedules checks of them.
pub(crate) async fn release_artifacts(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let artifacts: Vec<_> = artifacts.into_iter().collect();
    if artifacts.is_empty() {
        return Ok(());
    }
    let locked: Vec<Uuid> = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::ArtifactId)
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_exclusive()
        .into_tuple()
        .all(txn)
        .await?;
    make_locked_due(txn, locked, now).await
}

/// Makes locked artifacts due, even if other owners keep them.
async fn make_locked_due(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let mut artifacts = artifacts.into_iter().peekable();
    if artifacts.peek().is_none() {
        return Ok(());
    }
    artifact::Entity::update_many()
        .col_expr(artifact::Column::DueAt, Expr::value(now.0))
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .exec(txn)
        .await
        .map(drop)
}

/// Returns a sealed artifact with its locations. `None` if there is none or its bytes are lost.
async fn with_bytes(
    conn: &impl ConnectionTrait,
    artifact: Option<Uuid>,
) -> Result<Option<LocatedArtifact>, DbErr> {
    let Some(id) = artifact else { return Ok(None) };
    let row = artifact::Entity::find_by_id(id)
        .filter(artifact::Column::State.eq(ArtifactState::Sealed))
        .one(conn)
        .await?;
    let located = artifacts::locate_rows(conn, row.into_iter().collect()).await?.pop();
    Ok(located.filter(LocatedArtifact::has_bytes))
}

/// Result of a lookup of caches.
#[derive(Default)]
pub(crate) struct LocatedCaches {
    /// Caches with bytes.
    pub(crate) located: Vec<(CacheId, LocatedArtifact)>,
    /// Ids of caches that are not available to the team.
    pub(crate) unknown: Vec<CacheId>,
}

/// Returns the caches among `ids` that are available to `team`, with their locations, in the order
/// of `ids`.
pub(crate) async fn locate(
    conn: &impl ConnectionTrait,
    team: &str,
    ids: &[CacheId],
) -> Result<LocatedCaches, DbErr> {
    if ids.is_empty() {
        return Ok(LocatedCaches::default());
    }
    let backend = conn.get_database_backend();
    let wanted = || ids::among(backend, "cache_id", ids.iter().map(|id| id.uuid()));
    let mut known: Vec<(Uuid, Option<Uuid>)> = resource_cache::Entity::find()
        .select_only()
        .column(resource_cache::Column::CacheId)
        .column(resource_cache::Column::ArtifactId)
        .filter(wanted())
        .filter(resource_cache::Column::Scope.is_in([team, ALL_TEAMS]))
        .into_tuple()
        .all(conn)
        .await?;
    let of_tasks: Vec<(Uuid, Option<Uuid>)> = task_cache::Entity::find()
        .select_only()
        .column(task_cache::Column::CacheId)
        .column(task_cache::Column::ArtifactId)
        .filter(wanted())
        .filter(task_cache::Column::Team.eq(team))
        .into_tuple()
        .all(conn)
        .await?;
    known.extend(of_tasks);
    let known: HashMap<_, _> = known.into_iter().collect();
    let rows = artifact::Entity::find()
        .filter(ids::among(backend, "artifact_id", known.values().copied().flatten()))
        .filter(Expr::cust("state = 'sealed'"))
        .all(conn)
        .await?;
    let located: HashMap<_, _> = artifacts::locate_rows(conn, rows)
        .await?
        .into_iter()
        .filter(LocatedArtifact::has_bytes)
        .map(|located| (located.artifact.artifact_id, located))
        .collect();
    // Two caches may own one artifact.
    let place = |id: &CacheId| Some((*id, located.get(known.get(&id.uuid())?.as_ref()?)?.clone()));
    Ok(LocatedCaches {
        located: ids.iter().filter_map(place).collect(),
        unknown: ids.iter().filter(|id| !known.contains_key(&id.uuid())).copied().collect(),
    })
}
