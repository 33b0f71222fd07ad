//! Caches, and the other owners beside builds: what keeps an artifact because it is likely to be wanted again.
//!
//! ```text
//! resource cache:  (asked for) ──claimed──▶ being made ──put──▶ ready ──deleted, or unused for long──▶ (gone)
//!                                  │    ▲ another claim             │
//!                                  └────┴────────bytes lost─────────┘
//! task cache:      (asked for) ──▶ empty ──published──▶ with its latest version ──deleted, or unused for long──▶ (gone)
//! ```
//!
//! What one of them owns stands in its row. A transaction that changes that holds the row, then locks the artifacts, the new one and the one before, in the order of
//! their ids ([`hand_over`]): so the collector either sees the owner, or has marked the artifact before it is owned, and what is let go of is
//! looked at again in the same transaction. What a workload made is owned from the moment in which it is sealed ([`outputs`]).
//!
//! Invariants: of a resource cache one claim is valid at a time, and only what is put under it counts. A use is worth as much as its user: it ends
//! with the build or the workload, even if no call says so ([`crate::marks::cache_uses::uses`]).
//!
//! A team's caches are answered to that team. To all teams are answered the resource caches whose scope is [`ALL_TEAMS`], base resource types and certs;
//! their artifacts every team may locate, pin and copy ([`crate::artifacts::access::usable_by`]).

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

use crate::artifacts::{self, Located};
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

/// Locks what a cache shall own and what it owned before, for the caller to write that down: the first has an owner from now on, the other is
/// looked at.
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
    look_at_locked(txn, before.filter(|before| *before != new.uuid()), now).await?;
    Ok(())
}

/// Locks what caches own that are about to go, and has it looked at.
pub(crate) async fn let_go(
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
    look_at_locked(txn, locked, now).await
}

/// Makes artifacts due whose rows the caller holds, even if others keep them besides.
async fn look_at_locked(
    txn: &DatabaseTransaction,
    artifacts: impl IntoIterator<Item = Uuid>,
    now: Timestamp,
) -> Result<(), DbErr> {
    let mut artifacts = artifacts.into_iter().peekable();
    if artifacts.peek().is_none() {
        return Ok(());
    }
    artifact::Entity::update_many()
        .col_expr(artifact::Column::LookAt, Expr::value(now.0))
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .filter(artifact::Column::State.ne(ArtifactState::Deleting))
        .exec(txn)
        .await
        .map(drop)
}

/// A sealed artifact with the bytes that are left of it. `None`: there is none, or they are lost.
async fn with_bytes(conn: &impl ConnectionTrait, artifact: Option<Uuid>) -> Result<Option<Located>, DbErr> {
    let Some(id) = artifact else { return Ok(None) };
    let row = artifact::Entity::find_by_id(id)
        .filter(artifact::Column::State.eq(ArtifactState::Sealed))
        .one(conn)
        .await?;
    let located = artifacts::locate_rows(conn, row.into_iter().collect()).await?.pop();
    Ok(located.filter(Located::has_bytes))
}

/// Where caches are.
#[derive(Default)]
pub(crate) struct LocatedCaches {
    /// Those that have bytes.
    pub(crate) located: Vec<(CacheId, Located)>,
    /// Those that are none of the team's.
    pub(crate) unknown: Vec<CacheId>,
}

/// Where the bytes of caches are that are answered to `team`, in the order asked.
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
        .filter(Located::has_bytes)
        .map(|located| (located.artifact.artifact_id, located))
        .collect();
    // Two caches may own one artifact.
    let place = |id: &CacheId| Some((*id, located.get(known.get(&id.uuid())?.as_ref()?)?.clone()));
    Ok(LocatedCaches {
        located: ids.iter().filter_map(place).collect(),
        unknown: ids.iter().filter(|id| !known.contains_key(&id.uuid())).copied().collect(),
    })
}
