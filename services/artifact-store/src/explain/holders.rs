//! Explanations of builds, workloads, attempts, transfers and workers.

use domain::Timestamp;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, FromQueryResult, PaginatorTrait, QueryFilter, Statement,
};

use crate::db::entity::{
    BuildStatus, attempt, build, container, holder, orphan, owner, pin, resource_certs, volume, worker,
};
use crate::db::units::size;
use crate::explain::{ExplainContext, Explanation, ItemKind, Keeper, Stage, is_of_team, related};
use crate::policy::garbage::MarkReason;

pub(super) async fn build(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &build::Model,
) -> Result<Explanation, DbErr> {
    let label = match (&row.job, row.number) {
        (Some(job), Some(number)) => format!("{job} #{number}"),
        _ => String::new(),
    };
    let mut explanation = Explanation {
        label,
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::Build, row.build_id, status(row.status))
    };
    let owned = owner::Entity::find().filter(owner::Column::BuildId.eq(row.build_id));
    explanation.relate(related(conn, "owns", ItemKind::Artifact, owned, owner::Column::ArtifactId).await?);
    explanation.relate_one("ends with", ItemKind::Workload, row.ends_with);
    explanation.expires_at = row.kept_until.map(Timestamp);
    if row.kept_until.is_none_or(|until| until > context.now.0) {
        explanation.kept_by.add(keeps(row));
    } else {
        explanation.why = "it has ended, and its keep time has passed".to_owned();
    }
    Ok(explanation)
}

/// Returns why a build has not let go.
fn keeps(row: &build::Model) -> Keeper {
    let rule = |text: &str, until: Option<i64>| Keeper {
        thing: None,
        text: text.to_owned(),
        until: until.map(Timestamp),
    };
    match (row.ended_at, row.ends_with) {
        (Some(_), _) if row.kept_until.is_some() => rule("its keep time after its end", row.kept_until),
        (Some(_), _) => rule("it did not succeed, and is the latest build of its job", None),
        (None, Some(workload)) if row.bound => Keeper {
            thing: Some((ItemKind::Workload, workload)),
            text: format!("workload {workload}, which ends it"),
            until: None,
        },
        (None, _) if row.term_ends_at.is_some() => {
            rule("its term, unless its caller renews it or its workload is submitted", row.term_ends_at)
        }
        (None, _) => rule("its caller, which ends it", None),
    }
}

/// Describes a build that keeps something, as a suffix of its id.
pub(super) fn which_build(row: &build::Model) -> String {
    let job = match (&row.job, row.number) {
        (Some(job), Some(number)) => format!(" ({job} #{number})"),
        _ => String::new(),
    };
    let state = match row.status {
        None => "which is open",
        Some(BuildStatus::Succeeded) => "which has succeeded",
        Some(BuildStatus::Aborted) => "which was aborted",
        Some(BuildStatus::Failed) => "which has failed",
        Some(BuildStatus::Errored) => "which has errored",
    };
    let latest = match (row.ended_at, row.kept_until) {
        (Some(_), None) => " and is the latest of its job",
        _ => "",
    };
    format!("{job}, {state}{latest}")
}

fn status(status: Option<BuildStatus>) -> Stage {
    match status {
        None => Stage::Running,
        Some(BuildStatus::Succeeded) => Stage::Succeeded,
        Some(BuildStatus::Failed) => Stage::Failed,
        Some(BuildStatus::Errored) => Stage::Errored,
        Some(BuildStatus::Aborted) => Stage::Aborted,
    }
}

pub(super) async fn workload(conn: &impl ConnectionTrait, row: &holder::Model) -> Result<Explanation, DbErr> {
    let id = row.holder_id;
    let state = if row.settled_at.is_some() { Stage::Settled } else { Stage::Running };
    let mut explanation = Explanation {
        created_at: Some(Timestamp(row.created_at)),
        ..Explanation::of(ItemKind::Workload, id, state)
    };
    let pins = pin::Entity::find().filter(pin::Column::HolderId.eq(id));
    explanation.relate(related(conn, "pins", ItemKind::Artifact, pins, pin::Column::ArtifactId).await?);
    let attempts = attempt::Entity::find().filter(attempt::Column::HolderId.eq(id));
    explanation
        .relate(related(conn, "attempts", ItemKind::Attempt, attempts, attempt::Column::AttemptId).await?);
    let builds = build::Entity::find().filter(build::Column::EndsWith.eq(id));
    explanation.relate(related(conn, "ends", ItemKind::Build, builds, build::Column::BuildId).await?);
    Ok(explanation)
}

pub(super) async fn attempt(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &attempt::Model,
) -> Result<Option<Explanation>, DbErr> {
    if !is_of_team(conn, context, [None, None], Some(row.holder_id)).await? {
        return Ok(None);
    }
    let id = row.attempt_id;
    let state = if row.ended_at.is_some() { Stage::Ended } else { Stage::Running };
    let mut explanation = Explanation::of(ItemKind::Attempt, id, state);
    explanation.relate_one("workload", ItemKind::Workload, Some(row.holder_id));
    explanation.relate_one("worker", ItemKind::Worker, row.worker_id);
    let containers = container::Entity::find().filter(container::Column::AttemptId.eq(id));
    let containers =
        related(conn, "containers", ItemKind::Container, containers, container::Column::Handle).await?;
    explanation.relate(containers);
    let volumes = volume::Entity::find().filter(volume::Column::AttemptId.eq(id));
    explanation.relate(related(conn, "volumes", ItemKind::Volume, volumes, volume::Column::Handle).await?);
    Ok(Some(explanation))
}

/// Explains the transfer that fills or filled a volume.
pub(super) async fn transfer(
    conn: &impl ConnectionTrait,
    context: &ExplainContext<'_>,
    row: &volume::Model,
) -> Result<Option<Explanation>, DbErr> {
    let Some(id) = row.transfer_id else { return Ok(None) };
    if !is_of_team(conn, context, [row.artifact_id, row.from_artifact_id], None).await? {
        return Ok(None);
    }
    let claimed_until = row.claimed_until.filter(|_| !row.complete).map(Timestamp);
    let state = if claimed_until.is_some() { Stage::Running } else { Stage::Ended };
    let mut explanation = Explanation {
        created_at: Some(Timestamp(row.created_at)),
        size_bytes: size(row.size_bytes),
        ..Explanation::of(ItemKind::Transfer, id, state)
    };
    explanation.relate_one("brings", ItemKind::Artifact, row.artifact_id);
    explanation.relate_one("into", ItemKind::Volume, Some(row.handle));
    explanation.relate_one("worker", ItemKind::Worker, Some(row.worker_id));
    if let Some(until) = claimed_until {
        let text = "its claim, which it renews until it ends".to_owned();
        explanation.kept_by.add(Keeper { thing: None, text, until: Some(until) });
        explanation.expires_at = Some(until);
        explanation.why = MarkReason::ClaimExpired.to_string();
    }
    Ok(Some(explanation))
}

/// Explains a worker by its inventory.
pub(super) async fn worker(conn: &impl ConnectionTrait, row: &worker::Model) -> Result<Explanation, DbErr> {
    #[derive(FromQueryResult)]
    struct Volumes {
        number: i64,
        bytes: i64,
    }

    let id = row.worker_id;
    let volumes = "SELECT COUNT(*) AS number, CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT) AS bytes
                   FROM volumes WHERE worker_id = $1";
    let volumes = Statement::from_sql_and_values(conn.get_database_backend(), volumes, [id.into()]);
    let volumes = Volumes::find_by_statement(volumes).one(conn).await?;
    let (volumes, bytes) = volumes.map(|row| (size(row.number), size(row.bytes))).unwrap_or_default();
    let containers = container::Entity::find().filter(container::Column::WorkerId.eq(id)).count(conn).await?;
    let orphans = orphan::Entity::find().filter(orphan::Column::WorkerId.eq(id)).count(conn).await?;
    let mut label = format!("{} and {}", count(volumes, "volume"), count(containers, "container"));
    if orphans > 0 {
        label.push_str(&format!(", and {orphans} orphaned"));
    }
    let mut explanation =
        Explanation { label, size_bytes: bytes, ..Explanation::of(ItemKind::Worker, id, Stage::Known) };
    let certs = resource_certs::Entity::find_by_id(id).one(conn).await?;
    explanation.relate_one("certs", ItemKind::Artifact, certs.map(|row| row.artifact_id));
    Ok(explanation)
}

fn count(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}
