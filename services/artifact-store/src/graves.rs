//! Graves: of what was forgotten, when and why it went, for as long as tombstones of artifacts stay.

use std::time::Duration;

use domain::Timestamp;
use sea_orm::{ActiveValue::Set, DatabaseTransaction, DbErr, EntityTrait};
use uuid::Uuid;

use crate::entity::{ALL_TEAMS, GraveKind, grave, resource_cache, task_cache};
use crate::rules::CacheWent;

/// How many graves are dug by one statement.
const BATCH: usize = 1000;

/// What is written of something that is gone.
#[derive(Debug, Clone)]
pub(crate) struct Epitaph {
    pub(crate) id: Uuid,
    kind: GraveKind,
    /// Who may read it. `None`: everybody.
    team: Option<String>,
    /// What it was called, for people.
    label: String,
    marked_why: Option<String>,
    marked_at: Option<i64>,
}

impl Epitaph {
    /// Of a volume or container.
    pub(crate) fn of(id: Uuid, kind: GraveKind, marked_why: Option<String>, marked_at: Option<i64>) -> Self {
        Self { id, kind, team: None, label: String::new(), marked_why, marked_at }
    }

    /// Of a resource cache.
    pub(crate) fn of_resource_cache(row: &resource_cache::Model, why: CacheWent) -> Self {
        Self {
            id: row.cache_id,
            kind: GraveKind::ResourceCache,
            team: (row.scope != ALL_TEAMS).then(|| row.scope.clone()),
            label: row.name(),
            marked_why: Some(why.to_string()),
            marked_at: None,
        }
    }

    /// Of a task cache.
    pub(crate) fn of_task_cache(row: &task_cache::Model, why: CacheWent) -> Self {
        Self {
            id: row.cache_id,
            kind: GraveKind::TaskCache,
            team: Some(row.team.clone()),
            label: row.name(),
            marked_why: Some(why.to_string()),
            marked_at: None,
        }
    }
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
            team: Set(epitaph.team.clone()),
            label: Set(epitaph.label.clone()),
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
