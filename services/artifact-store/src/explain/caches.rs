//! Explanations of caches and base resource types.

use std::collections::HashMap;

use domain::Timestamp;
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use crate::db::entity::{ALL_TEAMS, base_resource_type, build, resource_cache, task_cache};
use crate::explain::{ExplainContext, Explanation, ItemKind, Keeper, MAX, Stage, holders};
use crate::marks::cache_uses;
use crate::marks::references;
use crate::policy::garbage::KeeperKind;
use crate::policy::retention::{CacheEndReason, ReleaseTime};

/// Explains a resource cache that is available to the team.
pub(super) async fn resource_cache(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &resource_cache::Model,
) -> Result<Option<Explanation>, DbErr> {
    if row.scope != context.team && row.scope != ALL_TEAMS {
        return Ok(None);
    }
    let state = if row.claimed_until.is_some() { Stage::Populating } else { Stage::Ready };
    let mut explanation = Explanation {
        label: row.name(),
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::ResourceCache, row.cache_id, state)
    };
    explanation.relate_one("owns", ItemKind::Artifact, row.artifact_id);
    let mut uses = cache_uses::uses(conn, &[row.cache_id], context.now).await?;
    let uses = uses.remove(&row.cache_id).unwrap_or_default();
    match (row.claimed_until.is_some(), row.facts(uses).release_time(context.resource_cache_ttl)) {
        (_, ReleaseTime::NotYet) => {
            users(conn, context, row.cache_id, &mut explanation).await?;
            explanation.expires_at = row.deletion_time(&uses, context.resource_cache_ttl);
            if explanation.expires_at.is_some() {
                explanation.why = CacheEndReason::Unused.to_string();
            }
        }
        (true, ReleaseTime::At(at)) => {
            explanation.set_end(context.now, at, "the claim of its maker", CacheEndReason::NotMade);
        }
        (false, ReleaseTime::At(at)) => {
            explanation.set_end(context.now, at, "its last use", CacheEndReason::Unused);
        }
    }
    Ok(Some(explanation))
}

/// Adds the users of a cache.
async fn users(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    cache: Uuid,
    explanation: &mut Explanation,
) -> Result<(), DbErr> {
    let users = cache_uses::users(conn, cache, context.now, MAX).await?;
    name_users(conn, context, users, explanation).await
}

async fn name_users(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    users: references::Keepers,
    explanation: &mut Explanation,
) -> Result<(), DbErr> {
    let builds = users.first.iter().filter_map(|user| match user.kind {
        KeeperKind::Build(build) => Some(build.uuid()),
        _ => None,
    });
    let builds = build::Entity::find().filter(build::Column::BuildId.is_in(builds)).all(conn).await?;
    let builds: HashMap<Uuid, build::Model> = builds.into_iter().map(|row| (row.build_id, row)).collect();
    for user in users.first {
        let (thing, text) = match user.kind {
            KeeperKind::Build(id) => {
                // A build of another team, which uses a shared cache, is named without details.
                let row = builds.get(&id.uuid()).filter(|row| row.team == context.team);
                let which = row.map(holders::which_build).unwrap_or_default();
                ((ItemKind::Build, id.uuid()), format!("build {id}{which}, which uses it"))
            }
            KeeperKind::Pin(id) => ((ItemKind::Workload, id.uuid()), format!("workload {id}, which uses it")),
            _ => continue,
        };
        explanation.kept_by.add(Keeper { thing: Some(thing), text, until: user.until });
    }
    explanation.kept_by.total = users.total;
    Ok(())
}

/// Explains a task cache of the team.
pub(super) async fn task_cache(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &task_cache::Model,
) -> Result<Option<Explanation>, DbErr> {
    if row.team != context.team {
        return Ok(None);
    }
    let state = if row.artifact_id.is_some() { Stage::Published } else { Stage::Empty };
    let mut explanation = Explanation {
        label: row.name(),
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::TaskCache, row.cache_id, state)
    };
    explanation.relate_one("owns", ItemKind::Artifact, row.artifact_id);
    let users = cache_uses::users_of_task_cache(conn, row.cache_id, MAX).await?;
    match row.release_time(users.total > 0) {
        ReleaseTime::NotYet => name_users(conn, context, users, &mut explanation).await?,
        ReleaseTime::At(at) => {
            explanation.set_end(context.now, at, "its last use", CacheEndReason::Unused);
        }
    }
    Ok(Some(explanation))
}

/// Describes a base resource type, as a suffix of its id.
pub(super) fn which_type(row: &base_resource_type::Model) -> String {
    let of = row.worker_id.map_or_else(|| "the cluster".to_owned(), |worker| format!("worker {worker}"));
    format!(" ({}), of {of}", name(row))
}

/// Returns the type and its version.
fn name(row: &base_resource_type::Model) -> String {
    format!("{} {}", row.resource_type, row.version).trim().to_owned()
}

/// Explains a base resource type, which is available to every team.
pub(super) fn base_resource_type(row: &base_resource_type::Model) -> Explanation {
    let mut explanation = Explanation {
        label: name(row),
        ..Explanation::of(ItemKind::BaseResourceType, row.base_type_id, Stage::Available)
    };
    explanation.relate_one("owns", ItemKind::Artifact, Some(row.artifact_id));
    explanation.relate_one("worker", ItemKind::Worker, row.worker_id);
    let text = "its worker or cluster, until another version replaces it".to_owned();
    explanation.kept_by.add(Keeper { thing: None, text, until: None });
    explanation
}

impl Explanation {
    /// Sets the time of an automatic deletion, and what keeps it until then.
    fn set_end(&mut self, now: Timestamp, at: Timestamp, kept_by: &str, why: CacheEndReason) {
        if at > now {
            self.kept_by.add(Keeper { thing: None, text: kept_by.to_owned(), until: Some(at) });
        }
        self.expires_at = Some(at);
        self.why = why.to_string();
    }
}
