//! Times for which references keep an item, if they end automatically.
//!
//! The explanations call it. The rows come from [`crate::marks::references`].
//! [`crate::policy::retention`] and [`crate::policy::garbage`] have the rules.

use std::collections::HashMap;

use domain::Timestamp;
use sea_orm::{ConnectionTrait, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use crate::caches::task_caches;
use crate::db::entity::{resource_cache, task_cache};
use crate::db::ids;
use crate::explain::{ExplainContext, MAX};
use crate::marks::cache_uses;
use crate::marks::references::{self, Keepers};
use crate::policy::garbage::{self, Keeper, KeeperKind};
use crate::policy::retention::ReleaseTime;

/// Maximum number of references that are judged. If there are more, the time of the deletion is
/// unknown.
const MAX_JUDGED: u64 = 10_000;

/// References that keep an item, and until when.
#[derive(Debug, Clone, Default)]
pub(super) struct KeepPeriod {
    /// The first few references.
    pub(super) first: Vec<Keeper>,
    pub(super) total: u64,
    /// Whether a reference has no scheduled end.
    pub(super) endless: bool,
    /// Last scheduled end. `None` if there is none.
    pub(super) until: Option<Timestamp>,
}

/// Returns the references that keep an artifact.
pub(super) async fn of_artifact(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    artifact: Uuid,
) -> Result<KeepPeriod, DbErr> {
    let mut found = references::keepers(conn, &[artifact], context.now, MAX_JUDGED).await?;
    with_ends(conn, context, found.remove(&artifact).unwrap_or_default()).await
}

/// Returns the volumes that were created from a volume.
pub(super) async fn of_volume(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    parent: Uuid,
) -> Result<KeepPeriod, DbErr> {
    with_ends(conn, context, references::children(conn, parent, MAX_JUDGED).await?).await
}

/// Returns until when volumes of ended attempts are kept. Omits volumes with children, and volumes
/// of active attempts.
pub(super) async fn volumes_until(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    volumes: impl IntoIterator<Item = Uuid>,
) -> Result<HashMap<Uuid, Timestamp>, DbErr> {
    let left = references::volumes_of_ended_attempts(conn, volumes).await?;
    let alone = left.into_iter().filter(|volume| !volume.has_live_child);
    let until = alone.map(|volume| {
        let touched_at = volume.touched_at.map(Timestamp);
        (volume.handle, garbage::grace_ends(Timestamp(volume.ended_at), touched_at, &context.policy))
    });
    Ok(until.collect())
}

/// Adds the end of each reference.
async fn with_ends(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    keepers: Keepers,
) -> Result<KeepPeriod, DbErr> {
    let Keepers { mut first, total } = keepers;
    let (mut resource_caches, mut task_caches, mut volumes) = (Vec::new(), Vec::new(), Vec::new());
    for keeper in &first {
        match keeper.kind {
            KeeperKind::ResourceCache(id) => resource_caches.push(id.uuid()),
            KeeperKind::TaskCache(id) => task_caches.push(id.uuid()),
            KeeperKind::Volume(handle) => volumes.push(handle.uuid()),
            _ => {}
        }
    }
    let mut known = resource_caches_until(conn, context, &resource_caches).await?;
    known.extend(task_caches_until(conn, &task_caches).await?);
    known.extend(volumes_until(conn, context, volumes).await?);
    for keeper in &mut first {
        match keeper.kind {
            KeeperKind::ResourceCache(id) | KeeperKind::TaskCache(id) => {
                keeper.until = known.get(&id.uuid()).copied();
            }
            KeeperKind::Volume(handle) => keeper.until = known.get(&handle.uuid()).copied(),
            _ => {}
        }
    }
    let endless = total > MAX_JUDGED || first.iter().any(|keeper| keeper.until.is_none());
    let until = first.iter().filter_map(|keeper| keeper.until).max();
    first.truncate(usize::try_from(MAX).unwrap_or(usize::MAX));
    Ok(KeepPeriod { first, total, endless, until })
}

/// Returns when resource caches will be deleted. Omits caches with a use that has no scheduled end.
async fn resource_caches_until(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    caches: &[Uuid],
) -> Result<HashMap<Uuid, Timestamp>, DbErr> {
    if caches.is_empty() {
        return Ok(HashMap::new());
    }
    let uses = cache_uses::uses(conn, caches, context.now).await?;
    let among = ids::among(conn.get_database_backend(), "cache_id", caches.iter().copied());
    let rows = resource_cache::Entity::find().filter(among).all(conn).await?;
    let until = rows.into_iter().filter_map(|row| {
        let uses = uses.get(&row.cache_id).copied().unwrap_or_default();
        Some((row.cache_id, row.deletion_time(&uses, context.resource_cache_ttl)?))
    });
    Ok(until.collect())
}

/// Returns when unused task caches will be deleted.
async fn task_caches_until(
    conn: &impl ConnectionTrait,
    caches: &[Uuid],
) -> Result<HashMap<Uuid, Timestamp>, DbErr> {
    if caches.is_empty() {
        return Ok(HashMap::new());
    }
    let in_use = task_caches::in_use(conn, caches).await?;
    let among = ids::among(conn.get_database_backend(), "cache_id", caches.iter().copied());
    let rows = task_cache::Entity::find().filter(among).all(conn).await?;
    let until = rows.into_iter().filter_map(|row| match row.release_time(in_use.contains(&row.cache_id)) {
        ReleaseTime::At(at) => Some((row.cache_id, at)),
        ReleaseTime::NotYet => None,
    });
    Ok(until.collect())
}
