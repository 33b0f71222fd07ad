//! Explanations of volumes and containers.

use domain::Timestamp;
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter};
use uuid::Uuid;

use crate::db::entity::{OrphanKind, Purpose, State, artifact, attempt, container, orphan, volume};
use crate::db::units::size;
use crate::explain::{
    ExplainContext, Explanation, ItemKind, Keeper, Stage, artifacts, child, inventory_state, is_of_team,
    keep_periods, related,
};
use crate::marks::references;
use crate::policy::garbage::{self, ContainerFacts, KeeperKind, VolumeFacts, VolumeLifetime};

pub(super) async fn volume(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: volume::Model,
) -> Result<Option<Explanation>, DbErr> {
    let attempt = find_attempt(conn, row.attempt_id).await?;
    let holder = attempt.as_ref().map(|attempt| attempt.holder_id);
    if !is_of_team(conn, context, [row.artifact_id, row.from_artifact_id], holder).await? {
        return Ok(None);
    }
    let mut explanation = Explanation {
        label: label(&row),
        size_bytes: size(row.size_bytes),
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::Volume, row.handle, inventory_state(row.state))
    };
    let holds = if row.purpose == Purpose::Replica { "holds" } else { "may become" };
    explanation.relate_one(holds, ItemKind::Artifact, row.artifact_id);
    explanation.relate_one("made from", ItemKind::Artifact, row.from_artifact_id);
    explanation.relate_one("worker", ItemKind::Worker, Some(row.worker_id));
    explanation.relate_one("attempt", ItemKind::Attempt, row.attempt_id);
    explanation.relate_one("workload", ItemKind::Workload, holder);
    explanation.relate_one("transfer", ItemKind::Transfer, row.transfer_id);
    explanation.relate_one("parent", ItemKind::Volume, row.parent);
    let children = volume::Entity::find().filter(volume::Column::Parent.eq(row.handle));
    explanation.relate(related(conn, "children", ItemKind::Volume, children, volume::Column::Handle).await?);

    if row.state.is_garbage() {
        explanation.marked_at = row.marked_at.map(Timestamp);
        explanation.why = row.mark_reason.unwrap_or_default();
        return Ok(Some(explanation));
    }
    if row.state == State::Lost {
        explanation.lost_at = row.lost_at.map(Timestamp);
        explanation.loss_reason = row.loss_reason.clone().unwrap_or_default();
    }
    let Some(facts) = references::volumes(conn, &[(&row).into()]).await?.pop() else {
        return Ok(Some(explanation));
    };
    keep_for_children(conn, context, row.handle, &mut explanation).await?;
    let keeper = match facts.lifetime {
        VolumeLifetime::OfArtifact { artifact_marked: true, .. } => None,
        VolumeLifetime::OfArtifact { claimed_until: None, .. } => of_artifact(conn, context, &row).await?,
        VolumeLifetime::OfArtifact { claimed_until: Some(until), .. } => {
            let text = row.transfer_id.map_or_else(
                || "its gateway, which imports it and renews its claim".to_owned(),
                |id| format!("transfer {id}, which fills it and renews its claim"),
            );
            let thing = row.transfer_id.map(|id| (ItemKind::Transfer, id));
            (until > context.now).then_some(Keeper { thing, text, until: Some(until) })
        }
        VolumeLifetime::OfAttempt { ended_at: None, .. } => row.attempt_id.map(active_attempt),
        VolumeLifetime::OfAttempt { ended_at: Some(ended_at), .. } => {
            let until = keep_periods::volumes_until(conn, context, [row.handle]).await?;
            let until = until.get(&row.handle).copied();
            grace(context, until.unwrap_or(ended_at + context.policy.gc_grace))
        }
    };
    if let Some(keeper) = keeper {
        explanation.kept_by.add(keeper);
    }
    // The facts after the last reference has ended.
    let left = VolumeFacts {
        has_live_child: false,
        lifetime: match facts.lifetime {
            VolumeLifetime::OfArtifact { claimed_until: None, .. } => {
                VolumeLifetime::OfArtifact { artifact_marked: true, claimed_until: None }
            }
            VolumeLifetime::OfAttempt { ended_at, .. } => {
                VolumeLifetime::OfAttempt { ended_at, has_live_container: false }
            }
            claimed @ VolumeLifetime::OfArtifact { .. } => claimed,
        },
    };
    explanation.set_deletion_time(context.now, |at| garbage::volume(&left, at, &context.policy));
    Ok(Some(explanation))
}

/// Explains an orphan.
pub(super) fn orphan(row: &orphan::Model) -> Explanation {
    let thing = match row.kind {
        OrphanKind::Volume => ItemKind::Volume,
        OrphanKind::Container => ItemKind::Container,
    };
    let mut explanation = Explanation {
        size_bytes: size(row.size_bytes),
        ..Explanation::of(thing, row.handle, Stage::Orphaned)
    };
    explanation.team = row.team.clone().unwrap_or_default();
    explanation.can_be_adopted = row.digest.is_some();
    let text = "it is an orphan of a restored backup, which an operator must adopt or purge".to_owned();
    explanation.kept_by.add(Keeper { thing: None, text, until: None });
    explanation.relate_one("held", ItemKind::Artifact, row.artifact_id);
    explanation.relate_one("worker", ItemKind::Worker, Some(row.worker_id));
    explanation.relate_one("parent", ItemKind::Volume, row.parent);
    explanation
}

/// Returns the purpose of a volume, with its name.
fn label(row: &volume::Model) -> String {
    let purpose = match row.purpose {
        Purpose::Replica => "replica",
        Purpose::Input => "input",
        Purpose::Output => "output",
        Purpose::Scratch => "scratch",
    };
    match (&row.name, row.adopted_at) {
        (Some(name), _) => format!("{purpose} {name}"),
        (None, Some(_)) => format!("{purpose}, adopted as an orphan"),
        (None, None) => purpose.to_owned(),
    }
}

/// Adds the copy-on-write children that keep a volume.
async fn keep_for_children(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    parent: Uuid,
    explanation: &mut Explanation,
) -> Result<(), DbErr> {
    let children = keep_periods::of_volume(conn, context, parent).await?;
    let first = children.first.iter().filter_map(|keeper| match keeper.kind {
        KeeperKind::Volume(handle) => Some((handle.uuid(), keeper.until)),
        _ => None,
    });
    let first = first.map(|(id, until)| Keeper {
        thing: Some((ItemKind::Volume, id)),
        text: child(id, until),
        until,
    });
    explanation.kept_by.add_all(first, &children);
    Ok(())
}

/// Returns the artifact that keeps its replica.
async fn of_artifact(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &volume::Model,
) -> Result<Option<Keeper>, DbErr> {
    let Some(id) = row.artifact_id else { return Ok(None) };
    let Some(artifact) = artifact::Entity::find_by_id(id).one(conn).await? else { return Ok(None) };
    let until = artifacts::deletion_time(conn, context, &artifact).await?;
    let text = format!("artifact {id}, of which it is a replica");
    Ok(Some(Keeper { thing: Some((ItemKind::Artifact, id)), text, until }))
}

pub(super) async fn container(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: container::Model,
) -> Result<Option<Explanation>, DbErr> {
    if !is_of_team(conn, context, [None, None], Some(row.holder_id)).await? {
        return Ok(None);
    }
    let mut explanation = Explanation {
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::Container, row.handle, inventory_state(row.state))
    };
    explanation.relate_one("worker", ItemKind::Worker, Some(row.worker_id));
    // The attempt and workload of a purged orphan are unknown.
    let known = |id: Uuid| (!id.is_nil()).then_some(id);
    explanation.relate_one("attempt", ItemKind::Attempt, known(row.attempt_id));
    explanation.relate_one("workload", ItemKind::Workload, known(row.holder_id));
    if row.state.is_garbage() {
        explanation.marked_at = row.marked_at.map(Timestamp);
        explanation.why = row.mark_reason.unwrap_or_default();
        return Ok(Some(explanation));
    }
    explanation.lost_at = row.lost_at.filter(|_| row.state == State::Lost).map(Timestamp);
    let attempt = find_attempt(conn, Some(row.attempt_id)).await?;
    let attempt_ended_at = attempt.and_then(|attempt| attempt.ended_at).map(Timestamp);
    let touched_at = row.touched_at.map(Timestamp);
    let keeper = match attempt_ended_at {
        None => Some(active_attempt(row.attempt_id)),
        Some(ended_at) => grace(context, garbage::grace_ends(ended_at, touched_at, &context.policy)),
    };
    if let Some(keeper) = keeper {
        explanation.kept_by.add(keeper);
    }
    let facts = ContainerFacts { attempt_ended_at, touched_at };
    explanation.set_deletion_time(context.now, |at| garbage::container(&facts, at, &context.policy));
    Ok(Some(explanation))
}

async fn find_attempt(
    conn: &impl ConnectionTrait,
    id: Option<Uuid>,
) -> Result<Option<attempt::Model>, DbErr> {
    match id {
        Some(id) => attempt::Entity::find_by_id(id).one(conn).await,
        None => Ok(None),
    }
}

/// Returns the active attempt that keeps its containers and volumes.
fn active_attempt(attempt: Uuid) -> Keeper {
    let text = format!("attempt {attempt}, which is active");
    Keeper { thing: Some((ItemKind::Attempt, attempt)), text, until: None }
}

/// Returns the grace period that keeps containers and volumes of an ended attempt.
fn grace(context: &ExplainContext<'_>, until: Timestamp) -> Option<Keeper> {
    let text = "the grace period of its ended attempt, unless its worker needs disk space".to_owned();
    (until > context.now).then_some(Keeper { thing: None, text, until: Some(until) })
}
