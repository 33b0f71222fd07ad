//! Pins: marks that keep artifacts while a workload uses or makes them.
//!
//! It also ends attempts and settles workloads ([`mod@settle`]). Concurrent calls are batched
//! ([`batch`]).
//!
//! ```text
//! holder:   (unknown) ──pin, prepare──▶ active ──settle──▶ settled ──a day later──▶ (gone)
//! attempt:  (unknown) ──prepare──▶ active ──settle, end attempt──▶ ended ──with holder──▶ (gone)
//! ```
//!
//! Every change of a holder locks its row first, so that pinning, preparing and settling of one
//! workload never interleave.
//!
//! Invariants: a settled holder has no pins and is never pinned again. An ended attempt makes and
//! settles nothing.
//!
//! If an attempt ends before a gateway prepares it, its row is created as ended, so that a late
//! Prepare is rejected.

mod batch;
mod settle;

use std::collections::{BTreeSet, HashMap, HashSet};

use db::rows::{self, Column};
use domain::{ArtifactId, AttemptId, BuildId, CacheId, Timestamp, WorkloadId};
use sea_orm::sea_query::{Expr, Func, OnConflict};
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, FromQueryResult,
    QueryFilter, QueryOrder, QuerySelect, Select, Statement,
};
use serde::Serialize;
use uuid::Uuid;

pub(crate) use self::batch::Pins;
pub(crate) use self::settle::{SettleError, Settled, SettledOutput, Settlement, settle};
use crate::artifacts::{self, LocatedArtifact};
use crate::builds::OwnerEnded;
use crate::caches::task_caches;
use crate::db::entity::{artifact, attempt, build};
use crate::holders::{self, HolderError};

#[derive(Debug, thiserror::Error)]
pub(crate) enum PinError {
    #[error(transparent)]
    Holder(#[from] HolderError),
    #[error("workload {0} is already settled")]
    Settled(WorkloadId),
    #[error("artifact {0} is unknown to this team, not sealed, or without bytes")]
    Unavailable(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error(transparent)]
    Cache(#[from] task_caches::UseError),
    #[error("database failed while pinning artifacts")]
    Database(#[from] DbErr),
}

/// Request to pin what a holder uses.
#[derive(Debug, Clone)]
pub(crate) struct PinRequest {
    pub(crate) holder: WorkloadId,
    pub(crate) team: String,
    pub(crate) artifacts: Vec<ArtifactId>,
    /// Build that ends with the holder.
    pub(crate) build: Option<BuildId>,
    pub(crate) task_caches: Vec<CacheId>,
}

/// Locations of what a holder pinned.
#[derive(Debug, Clone)]
pub(crate) struct PinAnswer {
    pub(crate) artifacts: Vec<LocatedArtifact>,
    /// Latest versions of the task caches, if they have bytes.
    pub(crate) task_caches: Vec<LocatedArtifact>,
}

/// Pins what a holder uses, all or none, and binds the holder to its build.
pub(crate) async fn pin(
    txn: &DatabaseTransaction,
    used: &PinRequest,
    now: Timestamp,
) -> Result<PinAnswer, PinError> {
    let pinned = pin_all(txn, &used.team, std::slice::from_ref(used), now).await?.pop();
    Ok(pinned.ok_or_else(|| DbErr::RecordNotFound("pinned holder".to_owned()))?)
}

/// Pins what several holders of one team use, all or none, and binds the holders to their builds.
///
/// If there are several requests, none may have task caches, whose locks have their own order. An
/// error is that of one request. The caller then commits nothing.
async fn pin_all(
    txn: &DatabaseTransaction,
    team: &str,
    uses: &[PinRequest],
    now: Timestamp,
) -> Result<Vec<PinAnswer>, PinError> {
    let holders = holders::lock_all(txn, uses.iter().map(|used| used.holder), team, now).await?;
    if let Some(settled) = holders.values().find(|holder| holder.settled_at.is_some()) {
        return Err(PinError::Settled(WorkloadId::from_uuid(settled.holder_id)));
    }
    let builds: BTreeSet<_> =
        uses.iter().filter_map(|used| used.build.map(|build| (build, used.holder))).collect();
    for (build, holder) in builds {
        bind(txn, build, holder, team).await?;
    }
    let mut of_caches = Vec::with_capacity(uses.len());
    for used in uses {
        of_caches.push(task_caches::use_caches(txn, team, used.holder, &used.task_caches, now).await?);
    }
    let artifacts = pin_artifacts(txn, team, uses, now).await?;
    let pinned = artifacts.into_iter().zip(of_caches);
    Ok(pinned.map(|(artifacts, task_caches)| PinAnswer { artifacts, task_caches }).collect())
}

#[derive(Serialize)]
struct NewPin {
    holder_id: Uuid,
    artifact_id: Uuid,
}

const NEW_PIN: [(&str, Column); 2] = [("holder_id", Column::Uuid), ("artifact_id", Column::Uuid)];

/// Pins the artifacts of locked holders. Returns for each request the locations of its artifacts,
/// each once, in the order of the request.
async fn pin_artifacts(
    txn: &DatabaseTransaction,
    team: &str,
    uses: &[PinRequest],
    now: Timestamp,
) -> Result<Vec<Vec<LocatedArtifact>>, PinError> {
    let all: BTreeSet<_> = uses.iter().flat_map(|used| used.artifacts.iter().copied()).collect();
    if all.is_empty() {
        return Ok(vec![Vec::new(); uses.len()]);
    }
    let all: Vec<_> = all.into_iter().collect();
    let sealed = lock_sealed(txn, team, &all).await?;
    let located = artifacts::locate_rows(txn, sealed.into_values().collect()).await?;
    let found: HashMap<_, _> = located
        .into_iter()
        .filter(LocatedArtifact::has_bytes)
        .map(|located| (ArtifactId::from_uuid(located.artifact.artifact_id), located))
        .collect();
    let of_each = uses.iter().map(|used| {
        let mut seen = HashSet::new();
        let artifacts = used.artifacts.iter().filter(|id| seen.insert(**id));
        let located = artifacts.map(|id| found.get(id).cloned().ok_or(PinError::Unavailable(*id)));
        located.collect::<Result<Vec<_>, _>>()
    });
    let of_each = of_each.collect::<Result<Vec<_>, _>>()?;
    let pins = uses.iter().zip(&of_each).flat_map(|(used, located)| {
        let holder_id = used.holder.uuid();
        located.iter().map(move |one| NewPin { holder_id, artifact_id: one.artifact.artifact_id })
    });
    let pins: Vec<_> = pins.collect();
    let backend = txn.get_database_backend();
    // Without a condition, SQLite would parse ON CONFLICT as a join condition.
    let sql = format!(
        "INSERT INTO pins (holder_id, artifact_id, pinned_at) SELECT holder_id, artifact_id, $2 FROM ({}) AS pinned WHERE TRUE
         ON CONFLICT (holder_id, artifact_id) DO NOTHING",
        rows::query(backend, 1, &NEW_PIN)
    );
    let values = [rows::value(&pins)?, now.0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    Ok(of_each)
}

/// Binds a build to the workload that ends it. From then on the build does not end by its term.
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

/// Locks sealed artifacts that `team` may use, so that they are not marked before the caller
/// commits. Omits all others.
pub(crate) async fn lock_sealed(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
) -> Result<HashMap<Uuid, artifact::Model>, DbErr> {
    let sealed = |rows: Select<artifact::Entity>| {
        rows.filter(Expr::cust("state = 'sealed'")).order_by_asc(artifact::Column::ArtifactId).lock_shared()
    };
    let rows = artifacts::lock_usable(txn, team, artifacts, sealed).await?;
    Ok(rows.into_iter().map(|row| (row.artifact_id, row)).collect())
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum EndAttemptError {
    #[error("attempt {0} belongs to another workload")]
    OtherHolder(AttemptId),
    #[error("database failed while ending an attempt")]
    Database(#[from] DbErr),
}

/// Ends an attempt of an active holder. An unknown attempt is recorded as ended.
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
        due_at: Set(Some(now.0)),
    };
    let first_end =
        Func::coalesce([Expr::col((attempt::Entity, attempt::Column::EndedAt)), Expr::value(now.0)]);
    let row = attempt::Entity::insert(ended)
        .on_conflict(
            OnConflict::column(attempt::Column::AttemptId)
                .value(attempt::Column::EndedAt, Expr::from(first_end))
                .update_column(attempt::Column::DueAt)
                .to_owned(),
        )
        .exec_with_returning(txn)
        .await?;
    // On an error the caller rolls back.
    if row.holder_id == holder.uuid() { Ok(()) } else { Err(EndAttemptError::OtherHolder(id)) }
}

/// A holder that keeps something: pins, used caches, a build that ends with it, or an active
/// attempt.
#[derive(Debug, FromQueryResult)]
pub(crate) struct PinHolder {
    pub(crate) holder_id: Uuid,
    pub(crate) pinned_at: i64,
    pub(crate) team: String,
}

/// Returns a page of the holders that keep something, by id.
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
