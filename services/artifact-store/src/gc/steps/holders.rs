//! The step of holders: forgets workloads after the longest delay of a call.

use std::collections::HashSet;

use domain::Timestamp;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect,
};
use uuid::Uuid;

use crate::db::entity::{UserKind, attempt, build, cache_use, holder, pin, task_cache_use};
use crate::db::ids;
use crate::gc::{Batch, NextCheck, RECHECK_INTERVAL, Settings, lock_due, schedule_next};

pub(in crate::gc) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let rows = lock_due(txn, holder::Entity::find(), settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    let backend = txn.get_database_backend();
    let of_holders = |column| ids::among(backend, column, rows.iter().map(|row| row.holder_id));
    let pinning: Vec<Uuid> = pin::Entity::find()
        .select_only()
        .column(pin::Column::HolderId)
        .distinct()
        .filter(of_holders("holder_id"))
        .into_tuple()
        .all(txn)
        .await?;
    let trying: Vec<Uuid> = attempt::Entity::find()
        .select_only()
        .column(attempt::Column::HolderId)
        .distinct()
        .filter(of_holders("holder_id"))
        .into_tuple()
        .all(txn)
        .await?;
    let unsettled = rows.iter().filter(|row| row.settled_at.is_none()).map(|row| row.holder_id);
    let using: Vec<Uuid> = cache_use::Entity::find()
        .select_only()
        .column(cache_use::Column::UserId)
        .distinct()
        .filter(cache_use::Column::UserKind.eq(UserKind::Workload))
        .filter(ids::among(backend, "user_id", unsettled))
        .into_tuple()
        .all(txn)
        .await?;
    let using_task_caches: Vec<Uuid> = task_cache_use::Entity::find()
        .select_only()
        .column(task_cache_use::Column::HolderId)
        .distinct()
        .filter(of_holders("holder_id"))
        .into_tuple()
        .all(txn)
        .await?;
    let ending: Vec<Uuid> = build::Entity::find()
        .select_only()
        .column(build::Column::EndsWith)
        .distinct()
        .filter(of_holders("ends_with"))
        .filter(build::Column::Bound.eq(true))
        .filter(build::Column::EndedAt.is_null())
        .into_tuple()
        .all(txn)
        .await?;
    let using = using.into_iter().chain(using_task_caches);
    let needed: HashSet<_> = pinning.into_iter().chain(trying).chain(using).chain(ending).collect();

    let mut checks = Vec::new();
    let mut gone = Vec::new();
    for row in &rows {
        // An unsettled workload without pins has no state that its next call would not create
        // again.
        let forget_at = Timestamp(row.settled_at.unwrap_or(row.created_at)) + settings.remember;
        if forget_at > settings.now {
            checks.push((row.holder_id, NextCheck::At(forget_at)));
        } else if needed.contains(&row.holder_id) {
            let next = if row.settled_at.is_none() { settings.remember } else { RECHECK_INTERVAL };
            checks.push((row.holder_id, NextCheck::At(settings.now + Ord::max(next, RECHECK_INTERVAL))));
        } else {
            gone.push(row.holder_id);
        }
    }
    if !gone.is_empty() {
        holder::Entity::delete_many().filter(ids::among(backend, "holder_id", gone)).exec(txn).await?;
    }
    schedule_next::<holder::Entity>(txn, settings, &checks).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}
