//! Owners: what keeps artifacts alive. Today these are builds.
//!
//! A build ends when the workload it was made for is settled ([`crate::pins::settle`]), or, until that workload was bound to it, when its
//! term passes ([`end_overdue`]). It lets go of its artifacts a while after its end.
//!
//! Invariant: a build that ended stays ended, and lets go no later than it said then. Every UPDATE that ends one or prolongs it is guarded by
//! `ended_at IS NULL`, [`delete`] only lets go earlier, and whoever makes it own something has locked it first ([`lock_live`]).

use std::time::Duration;

use domain::{BuildId, Timestamp, WorkloadId};
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ActiveValue::Set, ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect,
};
use uuid::Uuid;

use crate::entity::{BuildStatus, artifact, build, holder, owner};
use crate::store::micros;

/// A build cannot own anything: the team has no such build, or it has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnerEnded {
    #[error("build {0} is unknown to this team or has ended")]
    Ended(BuildId),
    #[error("database failed while looking for a build")]
    Database(#[from] DbErr),
}

/// What a build shall be.
#[derive(Debug, Clone)]
pub(crate) struct NewBuild {
    pub(crate) id: BuildId,
    pub(crate) team: String,
    pub(crate) ends_with: WorkloadId,
    pub(crate) keep: Duration,
    pub(crate) term: Duration,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PutBuildError {
    #[error("build {0} has ended")]
    Ended(BuildId),
    #[error("build {0} exists already and is another")]
    Exists(BuildId),
    #[error("database failed while putting a build")]
    Database(#[from] DbErr),
}

/// Makes a build, or changes how long one that goes on keeps and lives.
pub(crate) async fn put_build(
    txn: &DatabaseTransaction,
    new: &NewBuild,
    now: Timestamp,
) -> Result<(), PutBuildError> {
    let id = new.id.uuid();
    let fresh = build::ActiveModel {
        build_id: Set(id),
        team: Set(new.team.clone()),
        ends_with: Set(new.ends_with.uuid()),
        keep: Set(micros(new.keep)),
        term: Set(micros(new.term)),
        term_ends_at: Set((now + new.term).0),
        bound: Set(false),
        status: Set(None),
        ended_at: Set(None),
        kept_until: Set(None),
        created_at: Set(now.0),
    };
    // A workload that is settled will never end it.
    let ends_with = holder::Entity::find_by_id(new.ends_with.uuid()).lock_shared().one(txn).await?;
    let settled = ends_with.is_some_and(|holder| holder.settled_at.is_some());
    if !settled {
        build::Entity::insert(fresh)
            .on_conflict_do_nothing_on([build::Column::BuildId])
            .exec_without_returning(txn)
            .await?;
    }
    let Some(row) = build::Entity::find_by_id(id).lock_exclusive().one(txn).await? else {
        return Err(PutBuildError::Ended(new.id));
    };
    if row.team != new.team || row.ends_with != new.ends_with.uuid() {
        return Err(PutBuildError::Exists(new.id));
    }
    if row.ended_at.is_some() {
        return Err(PutBuildError::Ended(new.id));
    }
    build::Entity::update_many()
        .col_expr(build::Column::Keep, Expr::value(micros(new.keep)))
        .col_expr(build::Column::Term, Expr::value(micros(new.term)))
        .col_expr(build::Column::TermEndsAt, Expr::value((now + new.term).0))
        .filter(build::Column::BuildId.eq(id))
        .filter(build::Column::EndedAt.is_null())
        .exec(txn)
        .await?;
    Ok(())
}

/// Locks a build that may own things of `team`, so that it does not end before the caller commits.
pub(crate) async fn lock_live(
    txn: &DatabaseTransaction,
    build: BuildId,
    team: &str,
) -> Result<build::Model, OwnerEnded> {
    let row = build::Entity::find_by_id(build.uuid()).lock_shared().one(txn).await?;
    match row {
        Some(row) if row.team == team && row.ended_at.is_none() => Ok(row),
        _ => Err(OwnerEnded::Ended(build)),
    }
}

/// There is no such build in the team.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteBuildError {
    #[error("no build {0} in this team")]
    NotFound(BuildId),
    #[error("database failed while deleting a build")]
    Database(#[from] DbErr),
}

/// Ends a build unless it has ended, and lets it go of its artifacts now. Its row stays, so that its id is not used again.
pub(crate) async fn delete(
    txn: &DatabaseTransaction,
    team: &str,
    build: BuildId,
    now: Timestamp,
) -> Result<(), DeleteBuildError> {
    let row = build::Entity::find_by_id(build.uuid()).lock_exclusive().one(txn).await?;
    let Some(row) = row.filter(|row| row.team == team) else {
        return Err(DeleteBuildError::NotFound(build));
    };
    if row.kept_until.is_some_and(|until| until <= now.0) {
        return Ok(());
    }
    build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(row.status.unwrap_or(BuildStatus::Aborted)))
        .col_expr(build::Column::EndedAt, Expr::value(row.ended_at.unwrap_or(now.0)))
        .col_expr(build::Column::KeptUntil, Expr::value(now.0))
        .filter(build::Column::BuildId.eq(build.uuid()))
        .exec(txn)
        .await?;
    Ok(())
}

/// Makes a build that was locked own artifacts that were locked.
pub(crate) async fn add(
    txn: &DatabaseTransaction,
    build: BuildId,
    artifacts: impl IntoIterator<Item = Uuid>,
) -> Result<(), DbErr> {
    let artifacts: Vec<_> = artifacts.into_iter().collect();
    if artifacts.is_empty() {
        return Ok(());
    }
    let rows = artifacts
        .iter()
        .map(|artifact| owner::ActiveModel { artifact_id: Set(*artifact), build_id: Set(build.uuid()) });
    owner::Entity::insert_many(rows)
        .on_conflict_do_nothing_on([owner::Column::ArtifactId, owner::Column::BuildId])
        .exec_without_returning(txn)
        .await?;
    artifact::Entity::update_many()
        .col_expr(artifact::Column::HadOwner, Expr::value(true))
        .filter(artifact::Column::ArtifactId.is_in(artifacts))
        .filter(artifact::Column::HadOwner.eq(false))
        .exec(txn)
        .await?;
    Ok(())
}

/// Ends the builds that `workload` ends.
pub(crate) async fn end_with(
    txn: &DatabaseTransaction,
    workload: WorkloadId,
    status: BuildStatus,
    now: Timestamp,
) -> Result<(), DbErr> {
    build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(status))
        .col_expr(build::Column::EndedAt, Expr::value(now.0))
        .col_expr(build::Column::KeptUntil, Expr::col(build::Column::Keep).add(now.0))
        .filter(build::Column::EndsWith.eq(workload.uuid()))
        .filter(build::Column::EndedAt.is_null())
        .exec(txn)
        .await?;
    Ok(())
}

/// Gives every build that its caller must renew at least a full term from `now`: the caller could perhaps not renew it.
pub(crate) async fn be_patient(txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
    let full = || Expr::col(build::Column::Term).add(now.0);
    build::Entity::update_many()
        .col_expr(build::Column::TermEndsAt, full())
        .filter(build::Column::EndedAt.is_null())
        .filter(build::Column::Bound.eq(false))
        .filter(Expr::col(build::Column::TermEndsAt).lt(full()))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Ends the builds whose term passed before a workload was bound to them, and answers how many.
pub(crate) async fn end_overdue(txn: &DatabaseTransaction, now: Timestamp) -> Result<u64, DbErr> {
    let ended = build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(BuildStatus::Aborted))
        .col_expr(build::Column::EndedAt, Expr::value(now.0))
        .col_expr(build::Column::KeptUntil, Expr::col(build::Column::Keep).add(now.0))
        .filter(build::Column::EndedAt.is_null())
        .filter(build::Column::Bound.eq(false))
        .filter(build::Column::TermEndsAt.lte(now.0))
        .exec(txn)
        .await?;
    Ok(ended.rows_affected)
}
