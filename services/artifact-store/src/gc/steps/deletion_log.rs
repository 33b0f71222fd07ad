//! The step of the deletion log: deletes expired entries.

use domain::Timestamp;
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};

use crate::db::entity::deletion;
use crate::db::ids;
use crate::gc::{Batch, NextLook, Settings, lock_due, look_next};

pub(in crate::gc) async fn look(txn: &DatabaseTransaction, settings: &Settings) -> Result<Batch, DbErr> {
    let rows = lock_due(txn, deletion::Entity::find(), settings).await?;
    if rows.is_empty() {
        return Ok(Batch::default());
    }
    // An entry that was added under a shorter retention stays for the current one.
    let over_at = |row: &deletion::Model| Timestamp(row.gone_at) + settings.tombstone;
    let (over, looks): (Vec<_>, Vec<_>) = rows.iter().partition(|row| over_at(row) <= settings.now);
    if !over.is_empty() {
        let over = over.iter().map(|row| row.id);
        deletion::Entity::delete_many()
            .filter(ids::among(txn.get_database_backend(), "id", over))
            .exec(txn)
            .await?;
    }
    let looks: Vec<_> = looks.iter().map(|row| (row.id, NextLook::At(over_at(row)))).collect();
    look_next::<deletion::Entity>(txn, settings, &looks).await?;
    Ok(Batch { looked: true, ..Batch::default() })
}
