//! Builds: ended by their terms, letting go, forgotten.

use std::collections::HashSet;

use domain::Timestamp;
use sea_orm::sea_query::{Expr, ExprTrait, LockBehavior, LockType};
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect};
use uuid::Uuid;

use super::{BATCH, Batch, Look, Settings, lock_due, look_next};
use crate::entity::{BuildStatus, artifact, build, job, owner};

pub(super) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let now = settings.now;
    let due = lock_due(txn, build::Entity::find(), settings).await?;
    if due.is_empty() {
        return Ok(Batch::default());
    }
    let mut looks = Vec::new();
    let (mut overdue, mut let_go) = (Vec::new(), Vec::new());
    for row in &due {
        match (row.ended_at, row.kept_until.map(Timestamp)) {
            (None, _) => match row.term_ends_at.filter(|_| !row.bound).map(Timestamp) {
                Some(ends_at) if ends_at <= now => overdue.push(row.build_id),
                Some(ends_at) => looks.push((row.build_id, Look::At(ends_at))),
                None => looks.push((row.build_id, Look::WhenTold)),
            },
            (Some(_), None) => looks.push((row.build_id, Look::WhenTold)),
            (Some(_), Some(until)) if until > now => looks.push((row.build_id, Look::At(until))),
            (Some(_), Some(_)) => let_go.push(row),
        }
    }
    end(txn, &overdue, now).await?;
    looks.extend(release(txn, &let_go, settings).await?);
    look_next::<build::Entity>(txn, settings, &looks).await?;
    Ok(Batch { looked: true, ..Batch::default() })
}

/// Ends builds whose term is over. They stay due: some let go at once.
async fn end(txn: &DatabaseTransaction, overdue: &[Uuid], now: Timestamp) -> Result<(), DbErr> {
    if overdue.is_empty() {
        return Ok(());
    }
    build::Entity::update_many()
        .col_expr(build::Column::Status, Expr::value(BuildStatus::Aborted))
        .col_expr(build::Column::EndedAt, Expr::value(now.0))
        .col_expr(build::Column::KeptUntil, Expr::col(build::Column::Keep).add(now.0))
        .filter(build::Column::BuildId.is_in(overdue.iter().copied()))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Takes from builds that have let go what they own, or a batch of it, and makes that due. Answers when to look at which build again; one
/// that still owns something stays due.
async fn release(
    txn: &DatabaseTransaction,
    let_go: &[&build::Model],
    settings: &Settings,
) -> Result<Vec<(Uuid, Look)>, DbErr> {
    if let_go.is_empty() {
        return Ok(Vec::new());
    }
    let ids = || let_go.iter().map(|row| row.build_id);
    let owned: Vec<(Uuid, Uuid)> = owner::Entity::find()
        .select_only()
        .column(owner::Column::ArtifactId)
        .column(owner::Column::BuildId)
        .filter(owner::Column::BuildId.is_in(ids()))
        .order_by_asc(owner::Column::BuildId)
        .order_by_asc(owner::Column::ArtifactId)
        .limit(BATCH)
        .into_tuple()
        .all(txn)
        .await?;
    let all = u64::try_from(owned.len()).is_ok_and(|len| len < BATCH);
    let locked: HashSet<Uuid> = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::ArtifactId)
        .filter(artifact::Column::ArtifactId.is_in(owned.iter().map(|(artifact, _)| *artifact)))
        .order_by_asc(artifact::Column::ArtifactId)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .into_tuple::<Uuid>()
        .all(txn)
        .await?
        .into_iter()
        .collect();
    let held_up: HashSet<Uuid> =
        owned.iter().filter(|(artifact, _)| !locked.contains(artifact)).map(|(_, build)| *build).collect();
    if !locked.is_empty() {
        artifact::Entity::update_many()
            .col_expr(artifact::Column::LookAt, Expr::value(settings.now.0))
            .filter(artifact::Column::ArtifactId.is_in(locked.iter().copied()))
            .exec(txn)
            .await?;
        owner::Entity::delete_many()
            .filter(owner::Column::BuildId.is_in(ids()))
            .filter(owner::Column::ArtifactId.is_in(locked))
            .exec(txn)
            .await?;
    }

    let mut looks = Vec::new();
    let mut forgotten = Vec::new();
    for row in let_go {
        let forget_at = Timestamp(row.ended_at.unwrap_or_default()) + settings.remember;
        if held_up.contains(&row.build_id) {
            looks.push((row.build_id, Look::Later));
        } else if !all {
            // Some of it may be in the next batch.
        } else if forget_at > settings.now {
            looks.push((row.build_id, Look::At(forget_at)));
        } else {
            forgotten.push(row.build_id);
        }
    }
    if !forgotten.is_empty() {
        build::Entity::delete_many()
            .filter(build::Column::BuildId.is_in(forgotten.iter().copied()))
            .exec(txn)
            .await?;
        job::Entity::delete_many().filter(job::Column::LatestBuild.is_in(forgotten)).exec(txn).await?;
    }
    Ok(looks)
}
