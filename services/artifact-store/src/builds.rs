//! Builds: owners that keep artifacts until some time after their end. [`crate::caches`] has the
//! other owners.
//!
//! A build ends when its workload is settled ([`crate::pins::settle`]), or when its caller says so.
//! Until that workload is bound to the build, the build also ends when its term expires
//! ([`crate::gc`]). [`crate::policy::retention`] says when an ended build lets go.
//!
//! Invariants:
//!
//! - An ended build stays ended, and its first end counts. It never keeps artifacts longer than
//!   that end allows. Every UPDATE that ends a build is guarded by `ended_at IS NULL`.
//! - A transaction that makes a build own something has locked the build first ([`lock_live`]).
//! - No build is open whose workload is settled. A transaction that creates a build prevents others
//!   from settling the workload meanwhile ([`is_settled`]).
//!
//! The *latest build of a job* is the one with the highest number that was ever reported, in any
//! order. A transaction that puts or ends a build of a job locks the job's row before any build.
//! Two builds therefore never both count as the latest.

use std::collections::HashSet;
use std::time::Duration;

use domain::{ArtifactId, BuildId, Timestamp, WorkloadId};
use sea_orm::sea_query::{CaseStatement, Expr, ExprTrait, OnConflict};
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
    QueryOrder, QuerySelect, Statement,
};
use uuid::Uuid;

use crate::db::entity::{BuildStatus, artifact, build, holder, job, owner};
use crate::db::ids;
use crate::db::units::micros;

/// A build cannot own anything, because it has ended or is unknown to the team.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnerEnded {
    #[error("build {0} is unknown to this team or has ended")]
    Ended(BuildId),
    #[error("database failed while reading a build")]
    Database(#[from] DbErr),
}

/// Properties of a build that a caller puts.
#[derive(Debug, Clone)]
pub(crate) struct NewBuild {
    pub(crate) id: BuildId,
    pub(crate) team: String,
    /// The job of the build, and the build's number in it.
    pub(crate) job: Option<(String, i64)>,
    /// The workload that ends the build when it is settled.
    pub(crate) ends_with: Option<WorkloadId>,
    pub(crate) keep: Duration,
    pub(crate) term: Option<Duration>,
    /// How the build ended, and when by its caller's clock. `None` if it is open.
    pub(crate) ended: Option<(BuildStatus, Option<Timestamp>)>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PutBuildError {
    #[error("build {0} has ended")]
    Ended(BuildId),
    #[error("build {0} already exists with another team, job, number or workload")]
    Exists(BuildId),
    #[error("cannot put build {0}: another build has number {2} of job {1:?}")]
    NumberTaken(BuildId, String, i64),
    #[error("database failed while putting a build")]
    Database(#[from] DbErr),
}

/// Creates a build, changes the keep time and term of an open one, or ends it.
pub(crate) async fn put_build(
    txn: &DatabaseTransaction,
    new: &NewBuild,
    now: Timestamp,
) -> Result<(), PutBuildError> {
    let id = new.id.uuid();
    // A settled workload never ends the build.
    let settled = match new.ends_with {
        Some(workload) => is_settled(txn, workload, &new.team, now).await?,
        None => false,
    };
    let latest = match &new.job {
        Some((job, number)) => {
            let row = lock_job(txn, new, job, *number).await?;
            let others = build::Entity::find()
                .filter(build::Column::Team.eq(&*new.team))
                .filter(build::Column::Job.eq(&**job))
                .filter(build::Column::Number.eq(*number))
                .filter(build::Column::BuildId.ne(id));
            if others.one(txn).await?.is_some() {
                return Err(PutBuildError::NumberTaken(new.id, job.clone(), *number));
            }
            Some(row)
        }
        None => None,
    };
    if !settled {
        build::Entity::insert(new_row(new, now))
            .on_conflict_do_nothing_on([build::Column::BuildId])
            .exec_without_returning(txn)
            .await?;
    }
    let Some(row) = build::Entity::find_by_id(id).lock_exclusive().one(txn).await? else {
        return Err(PutBuildError::Ended(new.id));
    };
    let job = row.job.clone().zip(row.number);
    if row.team != new.team
        || row.ends_with != new.ends_with.map(|workload| workload.uuid())
        || job != new.job
    {
        return Err(PutBuildError::Exists(new.id));
    }
    if row.ended_at.is_some() {
        // Repeating the same end is not an error.
        let same = new.ended.is_some_and(|(status, _)| row.status == Some(status));
        return if same { Ok(()) } else { Err(PutBuildError::Ended(new.id)) };
    }

    let is_latest = match (&latest, row.number) {
        (Some(latest), Some(number)) => number >= latest.latest_number,
        _ => false,
    };
    let term_ends_at = new.term.map(|term| (now + term).0);
    let mut put = build::Entity::update_many()
        .col_expr(build::Column::Keep, Expr::value(micros(new.keep)))
        .col_expr(build::Column::Term, Expr::value(new.term.map(micros)))
        .col_expr(build::Column::TermEndsAt, Expr::value(term_ends_at))
        .col_expr(build::Column::DueAt, Expr::value(new.ended.map_or(term_ends_at, |_| Some(now.0))));
    if let Some((status, at)) = new.ended {
        // A caller's clock may be ahead: no build ends in the future.
        let at = at.map_or(now, |at| Ord::min(at, now));
        let rule = build::Model { keep: micros(new.keep), ..row }.ending(status, at, is_latest);
        put = put
            .col_expr(build::Column::Status, Expr::value(status))
            .col_expr(build::Column::EndedAt, Expr::value(at.0))
            .col_expr(build::Column::KeptUntil, Expr::value(rule.release_time().column()));
    }
    put.filter(build::Column::BuildId.eq(id)).filter(build::Column::EndedAt.is_null()).exec(txn).await?;
    match latest {
        Some(latest) if is_latest && latest.latest_build != id => supersede(txn, &latest, new, now).await,
        _ => Ok(()),
    }
}

/// Returns whether a workload is settled.
///
/// Until this transaction ends, other transactions cannot accept or settle the workload. If the
/// workload is unknown, its row is inserted and deleted again, so that an insert with the same key
/// waits.
async fn is_settled(
    txn: &DatabaseTransaction,
    workload: WorkloadId,
    team: &str,
    now: Timestamp,
) -> Result<bool, DbErr> {
    let sql = "INSERT INTO holders (holder_id, team, created_at, due_at) VALUES ($1, $2, $3, $3) ON CONFLICT (holder_id) DO NOTHING";
    let values = [workload.uuid().into(), team.into(), now.0.into()];
    let made =
        txn.execute_raw(Statement::from_sql_and_values(txn.get_database_backend(), sql, values)).await?;
    if made.rows_affected() > 0 {
        holder::Entity::delete_by_id(workload.uuid()).exec(txn).await?;
        return Ok(false);
    }
    let holder = holder::Entity::find_by_id(workload.uuid()).lock_shared().one(txn).await?;
    Ok(holder.is_some_and(|holder| holder.settled_at.is_some()))
}

fn new_row(new: &NewBuild, now: Timestamp) -> build::ActiveModel {
    let (job, number) = new.job.clone().unzip();
    build::ActiveModel {
        build_id: Set(new.id.uuid()),
        team: Set(new.team.clone()),
        job: Set(job),
        number: Set(number),
        ends_with: Set(new.ends_with.map(|workload| workload.uuid())),
        keep: Set(micros(new.keep)),
        term: Set(new.term.map(micros)),
        term_ends_at: Set(new.term.map(|term| (now + term).0)),
        bound: Set(false),
        status: Set(None),
        ended_at: Set(None),
        kept_until: Set(None),
        created_at: Set(now.0),
        due_at: Set(None),
    }
}

/// Finds or creates the job of a build, and locks it.
async fn lock_job(
    txn: &DatabaseTransaction,
    new: &NewBuild,
    name: &str,
    number: i64,
) -> Result<job::Model, DbErr> {
    let first = job::ActiveModel {
        team: Set(new.team.clone()),
        job: Set(name.to_owned()),
        latest_number: Set(number),
        latest_build: Set(new.id.uuid()),
    };
    // The update without effect locks an existing row and returns it like a new one.
    job::Entity::insert(first)
        .on_conflict(
            OnConflict::columns([job::Column::Team, job::Column::Job])
                .update_column(job::Column::Team)
                .to_owned(),
        )
        .exec_with_returning(txn)
        .await
}

/// Makes a build the latest of its job. If the previous one was kept only as the latest, it lets
/// go.
async fn supersede(
    txn: &DatabaseTransaction,
    before: &job::Model,
    new: &NewBuild,
    now: Timestamp,
) -> Result<(), PutBuildError> {
    let Some((_, number)) = &new.job else { return Ok(()) };
    build::Entity::update_many()
        .col_expr(
            build::Column::KeptUntil,
            Expr::col(build::Column::EndedAt).add(Expr::col(build::Column::Keep)),
        )
        .col_expr(build::Column::DueAt, Expr::value(now.0))
        .filter(build::Column::BuildId.eq(before.latest_build))
        .filter(build::Column::EndedAt.is_not_null())
        .filter(build::Column::KeptUntil.is_null())
        .exec(txn)
        .await?;
    job::Entity::update_many()
        .col_expr(job::Column::LatestNumber, Expr::value(*number))
        .col_expr(job::Column::LatestBuild, Expr::value(new.id.uuid()))
        .filter(job::Column::Team.eq(&*before.team))
        .filter(job::Column::Job.eq(&*before.job))
        .exec(txn)
        .await?;
    Ok(())
}

/// Locks an open build of `team`, so that it cannot end before the caller commits.
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

/// A build cannot be deleted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteBuildError {
    #[error("no build {0} in this team")]
    NotFound(BuildId),
    #[error("database failed while deleting a build")]
    Database(#[from] DbErr),
}

/// Ends a build unless it has ended, and makes it let go of its artifacts now. Its row stays, so
/// that its id is not used again.
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
        .col_expr(build::Column::DueAt, Expr::value(now.0))
        .filter(build::Column::BuildId.eq(build.uuid()))
        .exec(txn)
        .await?;
    Ok(())
}

/// Adds locked artifacts to a locked build.
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

/// The owners of an artifact cannot be changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnError {
    #[error("no artifact {0} in this team")]
    ArtifactNotFound(ArtifactId),
    #[error(transparent)]
    Owner(#[from] OwnerEnded),
    #[error("database failed while changing the owners of an artifact")]
    Database(#[from] DbErr),
}

/// Adds artifacts to a build, all or none.
pub(crate) async fn own(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
    build: BuildId,
) -> Result<(), OwnError> {
    lock_live(txn, build, team).await?;
    lock_artifacts(txn, team, artifacts).await?;
    add(txn, build, artifacts.iter().map(|artifact| artifact.uuid())).await?;
    Ok(())
}

/// Removes artifacts from a build, all or none. Artifacts that nothing else keeps are collected.
pub(crate) async fn disown(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
    build: BuildId,
    now: Timestamp,
) -> Result<(), OwnError> {
    lock_artifacts(txn, team, artifacts).await?;
    let backend = txn.get_database_backend();
    let sql = format!(
        "DELETE FROM owners WHERE artifact_id IN ({}) AND build_id = $2 RETURNING artifact_id",
        ids::query(backend, 1)
    );
    let values = [ids::value(backend, artifacts.iter().map(|id| id.uuid())), build.uuid().into()];
    let owned = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    let released: Vec<Uuid> =
        owned.iter().map(|row| row.try_get("", "artifact_id")).collect::<Result<_, _>>()?;
    if released.is_empty() {
        return Ok(());
    }
    let sql = format!("UPDATE artifacts SET due_at = $2 WHERE artifact_id IN ({})", ids::query(backend, 1));
    let values = [ids::value(backend, released), now.0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    Ok(())
}

/// Removes artifacts from all ended builds, and ends their time without an owner. Artifacts that
/// nothing else keeps are collected. Deleted artifacts are accepted and stay as they are.
pub(crate) async fn release_from_ended_builds(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
    now: Timestamp,
) -> Result<(), OwnError> {
    let backend = txn.get_database_backend();
    let list = ids::query(backend, 1);
    let ids = || ids::value(backend, artifacts.iter().map(|id| id.uuid()));
    // A fixed order prevents a deadlock of two callers.
    let sql = format!(
        "SELECT artifact_id FROM artifacts WHERE artifact_id IN ({list}) AND team = $2 ORDER BY artifact_id{}",
        ids::lock(backend, " FOR UPDATE"),
    );
    let known = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, [ids(), team.into()])).await?;
    let known: HashSet<Uuid> =
        known.iter().map(|row| row.try_get("", "artifact_id")).collect::<Result<_, _>>()?;
    if let Some(missing) = artifacts.iter().find(|id| !known.contains(&id.uuid())) {
        return Err(OwnError::ArtifactNotFound(*missing));
    }
    let sql = format!(
        "DELETE FROM owners WHERE artifact_id IN ({list})
         AND build_id IN (SELECT build_id FROM builds WHERE ended_at IS NOT NULL)"
    );
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [ids()])).await?;
    let sql = format!(
        "UPDATE artifacts SET had_owner = true, kept_until = NULL, due_at = $2
         WHERE artifact_id IN ({list}) AND state <> 'deleting'"
    );
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, [ids(), now.0.into()])).await?;
    Ok(())
}

async fn lock_artifacts(
    txn: &DatabaseTransaction,
    team: &str,
    artifacts: &[ArtifactId],
) -> Result<(), OwnError> {
    let backend = txn.get_database_backend();
    // A fixed order prevents a deadlock of two transactions.
    let sql = format!(
        "SELECT artifact_id FROM artifacts WHERE artifact_id IN ({}) AND team = $2 AND state <> 'deleting'
         ORDER BY artifact_id{}",
        ids::query(backend, 1),
        ids::lock(backend, " FOR UPDATE"),
    );
    let values = [ids::value(backend, artifacts.iter().map(|id| id.uuid())), team.into()];
    let locked = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, values)).await?;
    let locked: HashSet<Uuid> =
        locked.iter().map(|row| row.try_get("", "artifact_id")).collect::<Result<_, _>>()?;
    match artifacts.iter().find(|id| !locked.contains(&id.uuid())) {
        Some(missing) => Err(OwnError::ArtifactNotFound(*missing)),
        None => Ok(()),
    }
}

/// Ends the builds that end with `workload`.
pub(crate) async fn end_with(
    txn: &DatabaseTransaction,
    workload: WorkloadId,
    status: BuildStatus,
    now: Timestamp,
) -> Result<(), DbErr> {
    let of_workload = || {
        build::Entity::find()
            .filter(build::Column::EndsWith.eq(workload.uuid()))
            .filter(build::Column::EndedAt.is_null())
    };
    // The job of a build never changes, so that jobs can be locked before builds.
    let jobs = of_workload().order_by_asc(build::Column::Job).all(txn).await?;
    if jobs.is_empty() {
        return Ok(());
    }
    let mut latest = Vec::new();
    for build in &jobs {
        let Some(name) = &build.job else { continue };
        let job =
            job::Entity::find_by_id((build.team.clone(), name.clone())).lock_exclusive().one(txn).await?;
        latest.extend(job.map(|job| job.latest_build));
    }
    let rows = of_workload().order_by_asc(build::Column::BuildId).lock_exclusive().all(txn).await?;
    if rows.is_empty() {
        return Ok(());
    }
    let kept_until = rows.iter().fold(CaseStatement::new(), |case, row| {
        let rule = row.ending(status, now, latest.contains(&row.build_id));
        case.case(build::Column::BuildId.eq(row.build_id), Expr::value(rule.release_time().column()))
    });
    build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(status))
        .col_expr(build::Column::EndedAt, Expr::value(now.0))
        .col_expr(build::Column::KeptUntil, kept_until.into())
        .col_expr(build::Column::DueAt, Expr::value(now.0))
        .filter(build::Column::BuildId.is_in(rows.iter().map(|row| row.build_id)))
        .exec(txn)
        .await?;
    Ok(())
}

/// Extends each build with a term to at least a full term from `now`, because its caller may have
/// been unable to renew it.
pub(crate) async fn extend_terms(txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
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
