//! Explanations of artifacts.

use std::collections::HashMap;

use domain::Timestamp;
use sea_orm::{
    ColumnTrait, Condition, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect,
};
use uuid::Uuid;

use crate::artifacts::restore;
use crate::db::entity::{
    ArtifactState, Purpose, State, artifact, base_resource_type, build, loss, orphan, volume,
};
use crate::db::units::size;
use crate::explain::{
    ExplainContext, Explanation, ItemKind, Keeper, Keepers, Stage, caches, child, holders, keep_periods,
    related,
};
use crate::marks::references;
use crate::policy::garbage::{self, KeeperKind};

pub(super) async fn artifact(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: artifact::Model,
) -> Result<Explanation, DbErr> {
    let state = match row.state {
        ArtifactState::Open => Stage::Open,
        ArtifactState::Sealed => Stage::Sealed,
        ArtifactState::Deleting => Stage::Deleting,
    };
    let replicas = || {
        volume::Entity::find()
            .filter(volume::Column::ArtifactId.eq(row.artifact_id))
            .filter(volume::Column::Purpose.eq(Purpose::Replica))
    };
    let lost = replicas().filter(volume::Column::State.eq(State::Lost));
    let last_loss = lost.clone().order_by_desc(volume::Column::LostAt).one(conn).await?;
    let lost = related(conn, "lost replicas", ItemKind::Volume, lost, volume::Column::Handle).await?;
    let left = replicas().filter(volume::Column::State.ne(State::Lost));
    let left = related(conn, "replicas", ItemKind::Volume, left, volume::Column::Handle).await?;
    let mut explanation = Explanation {
        size_bytes: size(row.size_bytes),
        created_at: Some(Timestamp(row.created_at)),
        in_store: row.in_store,
        loss_reason: last_loss.and_then(|row| row.loss_reason).unwrap_or_default(),
        ..Explanation::of(ItemKind::Artifact, row.artifact_id, state)
    };
    explanation.relate(left);
    explanation.relate(lost);
    if row.state == ArtifactState::Deleting {
        let restorable = restore::restorable(&row).one(conn).await?;
        explanation.can_be_undeleted = row.digest.is_some() && (row.in_store || restorable.is_some());
        explanation.marked_at = row.marked_at.map(Timestamp);
        explanation.remembered_until = explanation.marked_at.map(|at| at + context.tombstone);
        explanation.why = row.mark_reason.unwrap_or_default();
    } else {
        explanation.bytes_lost = row.state == ArtifactState::Sealed
            && !row.in_store
            && restore::restorable(&row).one(conn).await?.is_none();
        if explanation.bytes_lost {
            explanation.lost_at = lost_at(conn, row.artifact_id).await?;
        }
        explanation.kept_by = keepers(conn, context, &row).await?;
        let without_references = references::without_references(&(&row).into());
        explanation
            .set_deletion_time(context.now, |at| garbage::artifact(&without_references, at, &context.policy));
    }
    explanation.label = row.label;
    Ok(explanation)
}

/// Returns when the last lost replica of an artifact was lost. `None` if that is unknown or
/// forgotten.
async fn lost_at(conn: &impl ConnectionTrait, artifact: Uuid) -> Result<Option<Timestamp>, DbErr> {
    let lost = volume::Entity::find()
        .select_only()
        .column_as(volume::Column::LostAt.max(), "lost_at")
        .filter(volume::Column::ArtifactId.eq(artifact))
        .filter(volume::Column::Purpose.eq(Purpose::Replica));
    let known: Option<Option<i64>> = lost.into_tuple().one(conn).await?;
    if let Some(at) = known.flatten() {
        return Ok(Some(Timestamp(at)));
    }
    // The replica's worker was forgotten, with all of its volumes.
    let noticed = loss::Entity::find()
        .select_only()
        .column_as(loss::Column::LostAt.max(), "lost_at")
        .filter(loss::Column::ArtifactId.eq(artifact));
    let known: Option<Option<i64>> = noticed.into_tuple().one(conn).await?;
    Ok(known.flatten().map(Timestamp))
}

/// Explains an artifact that is unknown to the store and of which workers have orphans. `None` if
/// there are none, or they belong to another team.
pub(super) async fn orphan(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    id: Uuid,
) -> Result<Option<Explanation>, DbErr> {
    let held = orphan::Entity::find().filter(orphan::Column::ArtifactId.eq(id)).filter(
        Condition::any().add(orphan::Column::Team.is_null()).add(orphan::Column::Team.eq(context.team)),
    );
    let volumes = related(conn, "volumes", ItemKind::Volume, held.clone(), orphan::Column::Handle).await?;
    if volumes.total == 0 {
        return Ok(None);
    }
    let whole = held.filter(orphan::Column::Digest.is_not_null());
    let whole = whole.order_by_asc(orphan::Column::Handle).one(conn).await?;
    let mut explanation = Explanation {
        size_bytes: whole.as_ref().map(|row| size(row.size_bytes)).unwrap_or_default(),
        can_be_adopted: whole.is_some(),
        ..Explanation::of(ItemKind::Artifact, id, Stage::Orphaned)
    };
    explanation.relate(volumes);
    Ok(Some(explanation))
}

/// Returns when an artifact will be deleted. `None` if something keeps it indefinitely.
pub(super) async fn deletion_time(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &artifact::Model,
) -> Result<Option<Timestamp>, DbErr> {
    let holds = keep_periods::of_artifact(conn, context, row.artifact_id).await?;
    let without_references = references::without_references(&row.into());
    let last =
        (!holds.endless).then(|| holds.until.map_or(context.now, |until| Ord::max(until, context.now)));
    let fate = last.and_then(|last| {
        garbage::predict_mark(last, |at| garbage::artifact(&without_references, at, &context.policy))
    });
    Ok(fate.map(|(at, _)| at))
}

async fn keepers(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &artifact::Model,
) -> Result<Keepers, DbErr> {
    let (id, now) = (row.artifact_id, context.now);
    let held = keep_periods::of_artifact(conn, context, id).await?;
    let builds = held.first.iter().filter_map(|keeper| match keeper.kind {
        KeeperKind::Build(build) => Some(build.uuid()),
        _ => None,
    });
    let builds: HashMap<Uuid, build::Model> = build::Entity::find()
        .filter(build::Column::BuildId.is_in(builds))
        .all(conn)
        .await?
        .into_iter()
        .map(|row| (row.build_id, row))
        .collect();
    let types = held.first.iter().filter_map(|keeper| match keeper.kind {
        KeeperKind::BaseResourceType(id) => Some(id),
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
        let (thing, text) = match keeper.kind {
            KeeperKind::Build(id) => {
                let which = builds.get(&id.uuid()).map(holders::which_build).unwrap_or_default();
                (Some((ItemKind::Build, id.uuid())), format!("build {id}{which}"))
            }
            KeeperKind::Pin(id) => {
                let text = format!("workload or lease {id}, which pins it until it is settled");
                (Some((ItemKind::Workload, id.uuid())), text)
            }
            KeeperKind::Volume(id) => (Some((ItemKind::Volume, id.uuid())), child(id.uuid(), keeper.until)),
            KeeperKind::Transfer(id) => {
                let text = format!("transfer {id}, which fills it and renews its claim");
                (Some((ItemKind::Transfer, id.uuid())), text)
            }
            KeeperKind::Import(id) => (Some((ItemKind::Volume, id.uuid())), keeper.kind.to_string()),
            KeeperKind::ResourceCache(id) => {
                (Some((ItemKind::ResourceCache, id.uuid())), keeper.kind.to_string())
            }
            KeeperKind::TaskCache(id) => (Some((ItemKind::TaskCache, id.uuid())), keeper.kind.to_string()),
            KeeperKind::BaseResourceType(id) => {
                let which = types.get(&id).map(caches::which_type).unwrap_or_default();
                (Some((ItemKind::BaseResourceType, id)), format!("base resource type {id}{which}"))
            }
            KeeperKind::ResourceCerts(id) => (Some((ItemKind::Worker, id.uuid())), keeper.kind.to_string()),
            KeeperKind::Unowned | KeeperKind::Reprieve => (None, keeper.kind.to_string()),
        };
        Keeper { thing, text, until: keeper.until }
    });
    let mut keepers = Keepers::default();
    keepers.add_all(first, &held);
    if let Some(keeper) =
        garbage::unowned_keeper(&references::without_references(&row.into()), now, &context.policy)
    {
        keepers.add(Keeper { thing: None, text: keeper.kind.to_string(), until: keeper.until });
    }
    Ok(keepers)
}
