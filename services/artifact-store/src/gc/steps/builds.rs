//! The step of builds: ends overdue builds, lets ended builds go, and forgets them.

use std::collections::HashSet;

use domain::Timestamp;
use sea_orm::sea_query::{Expr, ExprTrait};
use sea_orm::{
    ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, EntityTrait, FromQueryResult, QueryFilter,
    Statement, Value,
};
use uuid::Uuid;

use crate::db::entity::{ArtifactState, BuildStatus, build, job};
use crate::db::ids;
use crate::gc::steps::artifacts;
use crate::gc::{Batch, NextCheck, Settings, lock_due, schedule_next};
use crate::marks::references::ArtifactRow;

pub(crate) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let now = settings.now;
    // Smaller batches, because the artifacts of the builds take the time.
    let some = Settings { batch: Ord::max(settings.batch / 8, 1), ..*settings };
    let due = lock_due(txn, build::Entity::find(), &some).await?;
    if due.is_empty() {
        return Ok(Batch::default());
    }
    let mut checks = Vec::new();
    let (mut overdue, mut released) = (Vec::new(), Vec::new());
    for row in &due {
        match (row.ended_at, row.kept_until.map(Timestamp)) {
            (None, _) => match row.term_ends_at.filter(|_| !row.bound).map(Timestamp) {
                Some(ends_at) if ends_at <= now => overdue.push(row.build_id),
                Some(ends_at) => checks.push((row.build_id, NextCheck::At(ends_at))),
                None => checks.push((row.build_id, NextCheck::OnEvent)),
            },
            (Some(_), None) => checks.push((row.build_id, NextCheck::OnEvent)),
            (Some(_), Some(until)) if until > now => checks.push((row.build_id, NextCheck::At(until))),
            (Some(_), Some(_)) => released.push(row),
        }
    }
    end(txn, &overdue, now).await?;
    let mut batch = Batch { checked: true, ..Batch::default() };
    checks.extend(release(txn, &released, settings, &mut batch).await?);
    schedule_next::<build::Entity>(txn, settings, &checks).await?;
    Ok(batch)
}

/// Ends builds whose term has expired. They stay due, because some let go at once.
async fn end(txn: &DatabaseTransaction, overdue: &[Uuid], now: Timestamp) -> Result<(), DbErr> {
    if overdue.is_empty() {
        return Ok(());
    }
    build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(BuildStatus::Aborted))
        .col_expr(build::Column::EndedAt, Expr::value(now.0))
        .col_expr(build::Column::KeptUntil, Expr::col(build::Column::Keep).add(now.0))
        .filter(ids::among(txn.get_database_backend(), "build_id", overdue.iter().copied()))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Removes a batch of artifacts from builds that have let go, and judges the artifacts. Returns the
/// next checks of the builds. A build that still owns artifacts stays due.
async fn release(
    txn: &DatabaseTransaction,
    released: &[&build::Model],
    settings: &Settings,
    batch: &mut Batch,
) -> Result<Vec<(Uuid, NextCheck)>, DbErr> {
    if released.is_empty() {
        return Ok(Vec::new());
    }
    let backend = txn.get_database_backend();
    let builds = ids::value(backend, released.iter().map(|row| row.build_id));
    let owned = lock_owned(txn, &builds, settings).await?;
    if !owned.is_empty() {
        disown(txn, &owned, settings).await?;
        let live = |row: &&ArtifactRow| row.state != ArtifactState::Deleting;
        let live: Vec<_> = owned.iter().filter(live).copied().collect();
        artifacts::judge(txn, settings, &live, batch).await?;
    }
    let sql = format!(
        "SELECT id FROM ({}) AS builds WHERE EXISTS (SELECT 1 FROM owners WHERE owners.build_id = builds.id)",
        ids::query(backend, 1)
    );
    let owning = txn.query_all_raw(Statement::from_sql_and_values(backend, sql, [builds])).await?;
    let owning: HashSet<Uuid> = owning.iter().map(|row| row.try_get("", "id")).collect::<Result<_, _>>()?;

    let mut checks = Vec::new();
    let mut forgotten = Vec::new();
    for row in released {
        let forget_at = Timestamp(row.ended_at.unwrap_or_default()) + settings.remember;
        if owning.contains(&row.build_id) {
            if owned.is_empty() {
                // Other transactions have locked its artifacts.
                checks.push((row.build_id, NextCheck::Later));
            }
        } else if forget_at > settings.now {
            checks.push((row.build_id, NextCheck::At(forget_at)));
        } else {
            forgotten.push(row.build_id);
        }
    }
    if !forgotten.is_empty() {
        build::Entity::delete_many()
            .filter(ids::among(backend, "build_id", forgotten.iter().copied()))
            .exec(txn)
            .await?;
        job::Entity::delete_many().filter(ids::among(backend, "latest_build", forgotten)).exec(txn).await?;
    }
    Ok(checks)
}

/// Locks artifacts of these builds, up to the batch size, and skips locked ones.
async fn lock_owned(
    txn: &DatabaseTransaction,
    builds: &Value,
    settings: &Settings,
) -> Result<Vec<ArtifactRow>, DbErr> {
    let backend = txn.get_database_backend();
    let builds_query = ids::query(backend, 1);
    let owned = match backend {
        // LATERAL makes PostgreSQL use the index for each build, however many artifacts it expects.
        DbBackend::Postgres => format!(
            "SELECT o.artifact_id FROM ({builds_query}) AS builds
             CROSS JOIN LATERAL (SELECT artifact_id FROM owners WHERE build_id = builds.id LIMIT $2) AS o LIMIT $2"
        ),
        _ => format!("SELECT artifact_id FROM owners WHERE build_id IN ({builds_query}) LIMIT $2"),
    };
    let sql = format!(
        "SELECT {} FROM artifacts WHERE artifact_id IN ({owned}){}",
        ArtifactRow::COLUMNS,
        ids::lock(backend, " FOR UPDATE SKIP LOCKED"),
    );
    let values = [builds.clone(), i64::try_from(settings.batch).unwrap_or(i64::MAX).into()];
    ArtifactRow::find_by_statement(Statement::from_sql_and_values(backend, sql, values)).all(txn).await
}

/// Removes locked artifacts from all builds that have let go, which may include builds outside the
/// batch.
async fn disown(
    txn: &DatabaseTransaction,
    artifacts: &[ArtifactRow],
    settings: &Settings,
) -> Result<(), DbErr> {
    let backend = txn.get_database_backend();
    let sql = format!(
        "DELETE FROM owners WHERE artifact_id IN ({})
         AND EXISTS (SELECT 1 FROM builds WHERE builds.build_id = owners.build_id AND builds.kept_until <= $2)",
        ids::query(backend, 1)
    );
    let artifacts = ids::value(backend, artifacts.iter().map(|row| row.artifact_id));
    let values = [artifacts, settings.now.0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, sql, values)).await.map(drop)
}
