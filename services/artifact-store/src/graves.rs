//! Graves: of what was forgotten, when and why it went, for as long as tombstones of artifacts stay.

use std::time::Duration;

use domain::Timestamp;
use sea_orm::{ActiveValue::Set, DatabaseTransaction, DbErr, EntityTrait};
use uuid::Uuid;

use crate::entity::{GraveKind, grave};

/// How many graves are dug by one statement.
const BATCH: usize = 1000;

/// What is written of something that is gone.
#[derive(Debug, Clone)]
pub(crate) struct Epitaph {
    pub(crate) id: Uuid,
    pub(crate) kind: GraveKind,
    pub(crate) marked_why: Option<String>,
    pub(crate) marked_at: Option<i64>,
}

/// Remembers what is gone since `now` for `tombstone`.
pub(crate) async fn dig(
    txn: &DatabaseTransaction,
    gone: &[Epitaph],
    now: Timestamp,
    tombstone: Duration,
) -> Result<(), DbErr> {
    for some in gone.chunks(BATCH) {
        let rows = some.iter().map(|epitaph| grave::ActiveModel {
            id: Set(epitaph.id),
            kind: Set(epitaph.kind),
            marked_why: Set(epitaph.marked_why.clone()),
            marked_at: Set(epitaph.marked_at),
            gone_at: Set(now.0),
            look_at: Set((now + tombstone).0),
        });
        grave::Entity::insert_many(rows)
            .on_conflict_do_nothing_on([grave::Column::Id])
            .exec_without_returning(txn)
            .await?;
    }
    Ok(())
}
