//! The step of the deletion log: deletes expired entries.

use domain::Timestamp;
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};

use crate::db::entity::deletion;
use crate::db::ids;
use crate::gc::{Batch, NextCheck, Settings, lock_due, schedule_next};

pub(in crate::gc) async fn check_due(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let rows = lock_due(txn, deletion::Entity::find(), settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    // An entry that was added under a shorter retention stays for the current one.
    let over_at = |row: &deletion::Model| Timestamp(row.gone_at) + settings.tombstone;
    let (over, checks): (Vec<_>, Vec<_>) = rows.iter().partition(|row| over_at(row) <= settings.now);
    if !over.is_empty() {
        let over = over.iter().map(|row| row.id);
        deletion::Entity::delete_many()
            .filter(ids::among(txn.get_database_backend(), "id", over))
            .exec(txn)
            .await?;
    }
    let checks: Vec<_> = checks.iter().map(|row| (row.id, NextCheck::At(over_at(row)))).collect();
    schedule_next::<deletion::Entity>(txn, settings, &checks).await?;
    Ok(Batch { checked: true, ..Batch::default() })
}
