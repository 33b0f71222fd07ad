//! Why an artifact is there, or went.

use std::collections::HashMap;

use domain::Timestamp;
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use super::{Explanation, Keeper, Keepers, MOST, Question, Thing, caches, holders, related};
use crate::entity::{ArtifactState, Purpose, artifact, base_resource_type, build, volume};
use crate::facts;
use crate::mark::{self, Keeping};
use crate::undelete;
use crate::units::size;

pub(super) async fn artifact(
    conn: &impl ConnectionTrait,
    question: &Question<'_>,
    row: artifact::Model,
) -> Result<Explanation, DbErr> {
    let state = match row.state {
        ArtifactState::Open => "open",
        ArtifactState::Sealed => "sealed",
        ArtifactState::Deleting => "deleting",
    };
    let replicas = volume::Entity::find()
        .filter(volume::Column::ArtifactId.eq(row.artifact_id))
        .filter(volume::Column::Purpose.eq(Purpose::Replica));
    let replicas = related(conn, "replicas", Thing::Volume, replicas, volume::Column::Handle).await?;
    let mut explanation = Explanation {
        size_bytes: size(row.size_bytes),
        created_at: Some(Timestamp(row.created_at)),
        in_store: row.in_store,
        ..Explanation::of(Thing::Artifact, row.artifact_id, state)
    };
    explanation.relate(replicas);
    if row.state == ArtifactState::Deleting {
        let restorable = undelete::restorable(&row).one(conn).await?;
        explanation.can_be_undeleted = row.digest.is_some() && (row.in_store || restorable.is_some());
        explanation.marked_at = row.marked_at.map(Timestamp);
        explanation.remembered_until = explanation.marked_at.map(|at| at + question.tombstone);
        explanation.why = row.marked_why.unwrap_or_default();
    } else {
        explanation.kept_by = keepers(conn, question, &row).await?;
        let unheld = facts::unheld(&(&row).into());
        explanation.goes(question.now, |at| mark::artifact(&unheld, at, &question.policy));
    }
    explanation.label = row.label;
    Ok(explanation)
}

/// When an artifact goes that nothing keeps without end. `None`: something does.
pub(super) async fn goes_at(
    conn: &impl ConnectionTrait,
    question: &Question<'_>,
    row: &artifact::Model,
) -> Result<Option<Timestamp>, DbErr> {
    let holds = facts::holds_until(conn, row.artifact_id, question.now).await?;
    let unheld = facts::unheld(&row.into());
    let last =
        (!holds.endless).then(|| holds.until.map_or(question.now, |until| Ord::max(until, question.now)));
    let fate = last.and_then(|last| mark::fate(last, |at| mark::artifact(&unheld, at, &question.policy)));
    Ok(fate.map(|(at, _)| at))
}

async fn keepers(
    conn: &impl ConnectionTrait,
    question: &Question<'_>,
    row: &artifact::Model,
) -> Result<Keepers, DbErr> {
    let (id, now) = (row.artifact_id, question.now);
    let holds = facts::holds_until(conn, id, now).await?;
    let held = facts::keepers(conn, &[id], now, MOST).await?.remove(&id).unwrap_or_default();
    let builds = held.first.iter().filter_map(|keeper| match keeper.what {
        Keeping::Build(build) => Some(build.uuid()),
        _ => None,
    });
    let builds: HashMap<Uuid, build::Model> = build::Entity::find()
        .filter(build::Column::BuildId.is_in(builds))
        .all(conn)
        .await?
        .into_iter()
        .map(|row| (row.build_id, row))
        .collect();
    let types = held.first.iter().filter_map(|keeper| match keeper.what {
        Keeping::BaseResourceType(id) => Some(id),
        _ => None,
    });
    let types: HashMap<Uuid, base_resource_type::Model> = base_resource_type::Entity::find()
        .filter(base_resource_type::Column::BaseTypeId.is_in(types))
        .all(conn)
        .await?
        .into_iter()
        .map(|row| (row.base_type_id, row))
        .collect();
    let first = held.first.iter().map(|keeper| {
        let (thing, text) = match keeper.what {
            Keeping::Build(id) => {
                let which = builds.get(&id.uuid()).map(holders::which_build).unwrap_or_default();
                (Some((Thing::Build, id.uuid())), format!("build {id}{which}"))
            }
            Keeping::Pin(id) => {
                let text = format!("workload {id}, which pins it until it is settled");
                (Some((Thing::Workload, id.uuid())), text)
            }
            Keeping::Volume(id) => (Some((Thing::Volume, id.uuid())), keeper.what.to_string()),
            Keeping::Transfer(id) => (Some((Thing::Transfer, id.uuid())), keeper.what.to_string()),
            Keeping::Import(id) => (Some((Thing::Volume, id.uuid())), keeper.what.to_string()),
            Keeping::ResourceCache(id) => (Some((Thing::ResourceCache, id.uuid())), keeper.what.to_string()),
            Keeping::TaskCache(id) => (Some((Thing::TaskCache, id.uuid())), keeper.what.to_string()),
            Keeping::BaseResourceType(id) => {
                let which = types.get(&id).map(caches::which_type).unwrap_or_default();
                (Some((Thing::BaseResourceType, id)), format!("base resource type {id}{which}"))
            }
            Keeping::ResourceCerts(id) => (Some((Thing::Worker, id.uuid())), keeper.what.to_string()),
            Keeping::Youth | Keeping::Reprieve => (None, keeper.what.to_string()),
        };
        Keeper { thing, text, until: keeper.until }
    });
    let mut keepers =
        Keepers { first: first.collect(), total: held.total, endless: holds.endless, until: holds.until };
    if let Some(keeper) = mark::kept_by_nobody(&facts::unheld(&row.into()), now, &question.policy) {
        keepers.add(Keeper { thing: None, text: keeper.what.to_string(), until: keeper.until });
    }
    Ok(keepers)
}
