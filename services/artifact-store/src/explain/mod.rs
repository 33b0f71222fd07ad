//! Explanations: why an item is kept, when it will be deleted, or why it was deleted.
//!
//! The time of the deletion comes from the garbage rules: [`crate::policy::garbage`] judges the
//! moment after the last reference ends.
//!
//! It only reads. The number of statements does not depend on the number of rows. Long lists are
//! cut off after the first few elements and have a total.

mod artifacts;
mod caches;
mod holders;
mod keep_periods;
mod volumes;

use std::time::Duration;

use domain::{Timestamp, VolumeHandle};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, PaginatorTrait, QueryFilter, QueryOrder, QuerySelect,
    Select,
};
use uuid::Uuid;

use crate::db::entity::{
    ALL_TEAMS, DeletionKind, State, artifact, attempt, base_resource_type, build, container, deletion,
    holder, orphan, resource_cache, task_cache, volume, worker,
};
use crate::inventory;
use crate::policy::garbage::{self, Policy, Verdict};
use keep_periods::KeepPeriod;

/// Maximum number of items in a list.
const MAX: u64 = 50;

/// Kind of an item that has an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ItemKind {
    Artifact,
    Volume,
    Container,
    Build,
    Workload,
    Attempt,
    Worker,
    Transfer,
    ResourceCache,
    TaskCache,
    BaseResourceType,
}

/// State of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Open,
    Sealed,
    Deleting,
    Creating,
    Created,
    Unconfirmed,
    Lost,
    Destroying,
    Sweeping,
    Gone,
    Running,
    Succeeded,
    Failed,
    Errored,
    Aborted,
    Settled,
    Ended,
    Known,
    Populating,
    Ready,
    Empty,
    Published,
    Available,
    Orphaned,
}

/// An item with its state, references and reasons.
#[derive(Debug, Clone)]
pub(crate) struct Explanation {
    pub(crate) thing: ItemKind,
    pub(crate) id: Uuid,
    pub(crate) state: Stage,
    pub(crate) label: String,
    pub(crate) size_bytes: u64,
    pub(crate) created_at: Option<Timestamp>,
    pub(crate) kept_by: Keepers,
    pub(crate) relations: Vec<Relation>,
    pub(crate) marked_at: Option<Timestamp>,
    pub(crate) gone_at: Option<Timestamp>,
    pub(crate) expires_at: Option<Timestamp>,
    pub(crate) why: String,
    pub(crate) remembered_until: Option<Timestamp>,
    pub(crate) can_be_undeleted: bool,
    /// Whether the bytes of a sealed artifact are neither on a worker nor in the store.
    pub(crate) bytes_lost: bool,
    /// Since when it is missing on its worker.
    pub(crate) lost_at: Option<Timestamp>,
    /// Why it, or the last lost replica of an artifact, is missing. Empty if unknown.
    pub(crate) loss_reason: String,
    /// Team of an orphan. Empty if unknown.
    pub(crate) team: String,
    /// Whether an orphan has a known digest.
    pub(crate) can_be_adopted: bool,
    /// Whether the store itself has its bytes.
    pub(crate) in_store: bool,
}

impl Explanation {
    fn of(thing: ItemKind, id: Uuid, state: Stage) -> Self {
        Self {
            thing,
            id,
            state,
            label: String::new(),
            size_bytes: 0,
            created_at: None,
            kept_by: Keepers::default(),
            relations: Vec::new(),
            marked_at: None,
            gone_at: None,
            expires_at: None,
            why: String::new(),
            remembered_until: None,
            can_be_undeleted: false,
            bytes_lost: false,
            lost_at: None,
            loss_reason: String::new(),
            team: String::new(),
            can_be_adopted: false,
            in_store: false,
        }
    }

    /// Adds a relation, unless it is empty.
    fn relate(&mut self, relation: Relation) {
        if relation.total > 0 {
            self.relations.push(relation);
        }
    }

    /// Adds a relation to one item, if there is one.
    fn relate_one(&mut self, relation: &'static str, thing: ItemKind, id: Option<Uuid>) {
        if let Some(id) = id {
            self.relate(Relation { relation, thing, ids: vec![id], total: 1 });
        }
    }

    /// Sets the time of the deletion if all references have scheduled ends. `judge` judges the item
    /// without references.
    fn set_deletion_time(&mut self, now: Timestamp, judge: impl Fn(Timestamp) -> Verdict) {
        if let Some((at, why)) = self.kept_by.last(now).and_then(|last| garbage::predict_mark(last, judge)) {
            self.expires_at = Some(at);
            self.why = why.to_string();
        }
    }
}

/// References that keep an item: the first few, and their number.
#[derive(Debug, Clone, Default)]
pub(crate) struct Keepers {
    pub(crate) first: Vec<Keeper>,
    pub(crate) total: u64,
    /// Whether a reference has no scheduled end.
    endless: bool,
    /// Last scheduled end.
    until: Option<Timestamp>,
}

impl Keepers {
    fn add(&mut self, keeper: Keeper) {
        self.total += 1;
        self.endless |= keeper.until.is_none();
        self.until = Ord::max(self.until, keeper.until);
        self.first.push(keeper);
    }

    /// Adds the first references of a list, and the total and ends of the whole list.
    fn add_all(&mut self, first: impl Iterator<Item = Keeper>, holds: &KeepPeriod) {
        self.total += holds.total;
        self.endless |= holds.endless;
        self.until = Ord::max(self.until, holds.until);
        self.first.extend(first);
    }

    /// Returns when the last reference ends, if all have scheduled ends.
    fn last(&self, now: Timestamp) -> Option<Timestamp> {
        (!self.endless).then(|| self.until.map_or(now, |until| Ord::max(until, now)))
    }
}

/// A reference that keeps an item.
#[derive(Debug, Clone)]
pub(crate) struct Keeper {
    /// The referring item. `None` for a rule.
    pub(crate) thing: Option<(ItemKind, Uuid)>,
    pub(crate) text: String,
    /// Scheduled end. `None` if it depends on an event.
    pub(crate) until: Option<Timestamp>,
}

/// Items related to an item: the first few, and their number.
#[derive(Debug, Clone)]
pub(crate) struct Relation {
    pub(crate) relation: &'static str,
    pub(crate) thing: ItemKind,
    pub(crate) ids: Vec<Uuid>,
    pub(crate) total: u64,
}

/// Context of an explanation: the calling team, the time, and the settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExplainContext<'a> {
    pub(crate) team: &'a str,
    pub(crate) now: Timestamp,
    pub(crate) policy: Policy,
    pub(crate) tombstone: Duration,
    pub(crate) resource_cache_ttl: Duration,
}

/// Explains the item with this id. `None` if it is unknown to the team or forgotten.
pub(crate) async fn explain(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    id: Uuid,
) -> Result<Option<Explanation>, DbErr> {
    let of_team = |team: &str| team == context.team || team == ALL_TEAMS;
    if let Some(row) = artifact::Entity::find_by_id(id).one(conn).await? {
        return if of_team(&row.team) {
            artifacts::artifact(conn, context, row).await.map(Some)
        } else {
            Ok(None)
        };
    }
    if let Some(row) = inventory::volume(conn, VolumeHandle::from_uuid(id)).await? {
        return volumes::volume(conn, context, row).await;
    }
    if let Some(row) = container::Entity::find_by_id(id).one(conn).await? {
        return volumes::container(conn, context, row).await;
    }
    if let Some(row) = orphan::Entity::find_by_id(id).one(conn).await? {
        return Ok(row.team.as_deref().is_none_or(of_team).then(|| volumes::orphan(&row)));
    }
    if let Some(row) = build::Entity::find_by_id(id).one(conn).await? {
        return if of_team(&row.team) {
            holders::build(conn, context, &row).await.map(Some)
        } else {
            Ok(None)
        };
    }
    if let Some(row) = holder::Entity::find_by_id(id).one(conn).await? {
        return if of_team(&row.team) { holders::workload(conn, &row).await.map(Some) } else { Ok(None) };
    }
    if let Some(row) = attempt::Entity::find_by_id(id).one(conn).await? {
        return holders::attempt(conn, context, &row).await;
    }
    if let Some(row) = resource_cache::Entity::find_by_id(id).one(conn).await? {
        return caches::resource_cache(conn, context, &row).await;
    }
    if let Some(row) = task_cache::Entity::find_by_id(id).one(conn).await? {
        return caches::task_cache(conn, context, &row).await;
    }
    if let Some(row) = base_resource_type::Entity::find_by_id(id).one(conn).await? {
        return Ok(Some(caches::base_resource_type(&row)));
    }
    // The index of transfers excludes garbage.
    let transfer = volume::Entity::find()
        .filter(volume::Column::TransferId.eq(id))
        .filter(Expr::cust("given_up = FALSE"));
    if let Some(row) = transfer.one(conn).await? {
        return holders::transfer(conn, context, &row).await;
    }
    if let Some(row) = worker::Entity::find_by_id(id).one(conn).await? {
        return holders::worker(conn, &row).await.map(Some);
    }
    if let Some(row) = deletion::Entity::find_by_id(id).one(conn).await? {
        return Ok(row.team.as_deref().is_none_or(of_team).then(|| from_log_entry(context, row)));
    }
    artifacts::orphan(conn, context, id).await
}

/// Explains an item by its entry in the deletion log.
fn from_log_entry(context: &ExplainContext<'_>, row: deletion::Model) -> Explanation {
    let thing = match row.kind {
        DeletionKind::Volume => ItemKind::Volume,
        DeletionKind::Container => ItemKind::Container,
        DeletionKind::ResourceCache => ItemKind::ResourceCache,
        DeletionKind::TaskCache => ItemKind::TaskCache,
    };
    Explanation {
        marked_at: row.marked_at.map(Timestamp),
        gone_at: Some(Timestamp(row.gone_at)),
        why: row.mark_reason.unwrap_or_default(),
        label: row.label,
        remembered_until: Some(Timestamp(row.gone_at) + context.tombstone),
        ..Explanation::of(thing, row.id, Stage::Gone)
    }
}

/// Returns whether the team may see an item of these artifacts and this holder. All of their rows
/// that still exist must belong to the team.
async fn is_of_team(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    artifacts: [Option<Uuid>; 2],
    holder: Option<Uuid>,
) -> Result<bool, DbErr> {
    let artifacts = artifact::Entity::find()
        .select_only()
        .column(artifact::Column::Team)
        .filter(artifact::Column::ArtifactId.is_in(artifacts.into_iter().flatten()));
    let mut teams: Vec<String> = artifacts.into_tuple().all(conn).await?;
    if let Some(holder) = holder {
        teams.extend(holder::Entity::find_by_id(holder).one(conn).await?.map(|row| row.team));
    }
    Ok(teams.iter().all(|team| team == context.team || team == ALL_TEAMS))
}

/// Returns the first items of a query, and their number.
async fn related<E>(
    conn: &impl ConnectionTrait,
    relation: &'static str,
    thing: ItemKind,
    query: Select<E>,
    column: E::Column,
) -> Result<Relation, DbErr>
where
    E: EntityTrait,
    E::Model: Send + Sync,
{
    let ids = query.clone().select_only().column(column).order_by_asc(column).limit(MAX);
    let ids: Vec<Uuid> = ids.into_tuple().all(conn).await?;
    let named = u64::try_from(ids.len()).unwrap_or(u64::MAX);
    let total = if named < MAX { named } else { query.count(conn).await? };
    Ok(Relation { relation, thing, ids, total })
}

fn inventory_state(state: State) -> Stage {
    match state {
        State::Creating => Stage::Creating,
        State::Created => Stage::Created,
        State::Unconfirmed => Stage::Unconfirmed,
        State::Lost => Stage::Lost,
        State::Destroying => Stage::Destroying,
        State::Sweeping => Stage::Sweeping,
    }
}

/// Describes a volume that keeps its parent.
fn child(id: Uuid, until: Option<Timestamp>) -> String {
    let ended = if until.is_some() { " for an attempt that has ended" } else { "" };
    format!("volume {id}, which is made from it{ended}")
}
