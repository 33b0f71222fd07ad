//! `gantry delete`, `gantry prune` and `gantry gc`: deletion of artifacts and images, and garbage
//! collection.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::TryStreamExt;
use rpc::Reason;
use rpc::pb::artifacts::{
    Artifact, ArtifactState, CollectRequest, CollectResponse, Collected, DeleteArtifactsRequest, DryRun,
    ExplainResponse, ObjectKind, ResourceCache,
};
use rpc::pb::scheduler::{Capacity, Worker, WorkloadState};
use serde_json::json;

use crate::cli::args::{DeleteArgs, GcArgs, RmiArgs};
use crate::client::connect::{Connection, Service};
use crate::client::freed_space::{self, DiskParts, FreedSpace, disk_parts};
use crate::client::images::{self, Content, familiar, split};
use crate::client::queries;
use crate::client::references::known;
use crate::client::why;
use crate::ending::error;
use crate::render::confirm;
use crate::render::json as shown;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, count, duration, plain, render};
use crate::render::ui::Ui;

/// Number of artifacts that are explained at a time.
const CONCURRENT_CALLS: usize = 16;
/// Maximum number of artifacts in one call.
const CALL_LIMIT: usize = 1000;
/// Maximum number of workers that need disk space in one call.
const MAX_SHORT: usize = 10_000;
/// Divisor of the disk size. A disk with less free than size / 20 may be full.
const FULL_DIVISOR: u64 = 20;
/// Free bytes with which no disk is full, even a large one.
const NEVER_FULL_BYTES: u64 = 1 << 30;
/// Time for a new worker to report the free space of its disk.
const FIRST_REPORT_LIMIT: Duration = Duration::from_secs(2);
/// Divisor of the disk size. Artifacts with a time limit are deleted until size / 5 is free.
const TARGET_DIVISOR: u64 = 5;
/// Maximum of free bytes that are made on a full disk.
const MAX_TARGET_BYTES: u64 = 5 << 30;

/// Executes `gantry delete`.
pub(crate) async fn delete(
    connection: &Connection,
    ui: &Ui,
    args: &DeleteArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let (mut artifacts, mut images) = (Vec::new(), Vec::new());
    if args.all {
        let mut all = Box::pin(queries::artifacts(connection, ArtifactState::Sealed.into()));
        while let Some(artifact) = all.try_next().await? {
            artifacts.push(artifact);
        }
    }
    for id in &args.ids {
        match known(queries::workload(connection, "delete", id).await)? {
            Some(workload) if workload.state() != WorkloadState::Finished => {
                let id = workload.workload_id;
                bail!("workload {id} still runs or waits; stop it first with `gantry cancel {id}`")
            }
            Some(workload) => {
                let inputs = workload.spec.iter().flat_map(|spec| &spec.inputs);
                let inputs = inputs.map(|input| input.artifact_id.clone());
                let outputs = workload.outputs.iter().map(|output| output.artifact_id.clone());
                let mut known = Vec::new();
                for artifact in inputs.chain(outputs) {
                    match queries::artifact(connection, &artifact).await {
                        Ok(found) if found.state() == ArtifactState::Sealed => known.push(found),
                        Ok(_) => {}
                        Err(error) if is_for(&error, Reason::ArtifactNotFound) => {}
                        Err(error) => return Err(error),
                    }
                }
                if known.is_empty() {
                    ui.note(&format!("workload {} has no artifacts left", workload.workload_id));
                }
                artifacts.extend(known);
            }
            None => match images::content(connection, "delete", id).await? {
                Ok(Content::Artifact(id)) => {
                    let found = known(queries::artifact(connection, &id.to_string()).await)?;
                    // The store answers for an artifact that it does not show.
                    let artifact = found
                        .unwrap_or_else(|| Artifact { artifact_id: id.to_string(), ..Artifact::default() });
                    match artifact.state() {
                        ArtifactState::Deleting => ui.note(&format!("artifact {id} is deleted already")),
                        _ => artifacts.push(artifact),
                    }
                }
                Ok(Content::Images(found)) => images.extend(select_own(connection, ui, id, found)?),
                Err(none) => bail!(
                    "cannot delete {id}: no workload or image has this name, and no workload or artifact has an id that begins \
                     with it; {}",
                    none.advice("see `gantry list` and `gantry images`")
                ),
            },
        }
    }
    artifacts.sort_unstable_by(|one, other| one.artifact_id.cmp(&other.artifact_id));
    artifacts.dedup_by(|one, other| one.artifact_id == other.artifact_id);
    let parts = disk_parts(connection, freed_space::handles(&artifacts)).await?;
    delete_all(connection, ui, &artifacts, images, parts, as_json).await
}

/// Executes `gantry rmi`.
pub(crate) async fn delete_images(
    connection: &Connection,
    ui: &Ui,
    args: &RmiArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let mut images = Vec::new();
    for named in &args.images {
        let found = images::find(connection, named).await?;
        let found = found.with_context(|| format!("cannot delete image {named}"))?;
        images.extend(select_own(connection, ui, named, found)?);
    }
    delete_all(connection, ui, &[], images, DiskParts::new(), as_json).await
}

/// Returns the images among `found` that the team may delete: those that it pulled. Notes name the
/// others.
fn select_own(
    connection: &Connection,
    ui: &Ui,
    named: &str,
    found: Vec<ResourceCache>,
) -> anyhow::Result<Vec<ResourceCache>> {
    if found.iter().any(|image| image.artifact_id.is_empty()) {
        bail!("cannot delete image {named}: the cluster is pulling it; repeat the command afterwards");
    }
    let (own, others): (Vec<_>, Vec<_>) = found.into_iter().partition(|image| image.team == connection.team);
    let stay = |image: &ResourceCache| {
        format!("team {} pulled it for all teams, and only that team can delete it", image.team)
    };
    match others.first() {
        Some(other) if own.is_empty() => bail!("cannot delete image {named}: {}", stay(other)),
        Some(other) => ui.note(&format!("another image {named} stays: {}", stay(other))),
        None => {}
    }
    Ok(own)
}

/// Deletes artifacts and images, collects garbage, and prints the result. `parts`: what the volumes
/// of the artifacts take on the disk.
async fn delete_all(
    connection: &Connection,
    ui: &Ui,
    artifacts: &[Artifact],
    mut images: Vec<ResourceCache>,
    mut parts: DiskParts,
    as_json: bool,
) -> anyhow::Result<()> {
    images.sort_by(|one, other| one.cache_id.cmp(&other.cache_id));
    images.dedup();
    for image in &images {
        let files = known(queries::artifact(connection, &image.artifact_id).await)?;
        parts.extend(disk_parts(connection, freed_space::handles(files.as_slice())).await?);
        images::delete(connection, image).await?;
    }
    let artifacts: Vec<_> = artifacts.iter().map(|artifact| artifact.artifact_id.clone()).collect();
    let collected = delete_and_collect(connection, &artifacts).await?;
    let mut kept = Vec::new();
    for id in &artifacts {
        let Some(explained) = explain_if_known(connection, id).await? else { continue };
        if let Some(keeper) = explained.kept_by.first() {
            let is_image = keeper.kind() == ObjectKind::ResourceCache;
            let advice = if is_image { "; `gantry rm IMAGE` deletes an image by its name" } else { "" };
            let left = keeper.until.as_ref().and_then(labels::from_now);
            let left = left.map_or_else(String::new, |left| format!(", for {}", duration(left)));
            ui.warn(&format!("artifact {id} is kept until nothing uses it: {}{left}{advice}", keeper.text));
            kept.push(id);
        }
    }
    for image in &images {
        let Some(explained) = explain_if_known(connection, &image.artifact_id).await? else { continue };
        if let Some(keeper) = explained.kept_by.first() {
            let (name, text) = (familiar(split(image).0), &keeper.text);
            ui.warn(&format!("the files of image {name} are kept until nothing uses them: {text}"));
        }
    }
    let mut freed = FreedSpace::default();
    freed.add_collected(&parts, &collected);
    if as_json {
        let names: Vec<_> = images.iter().map(|image| &image.version).collect();
        return print_json(&json!({
            "deleted": artifacts.len() - kept.len(), "images": names, "kept": kept,
            "size_bytes": queries::freed(&collected), "disk_bytes": freed.disk_bytes,
        }));
    }
    let of_artifacts = count((artifacts.len() - kept.len()) as u64, "artifact");
    let deleted = match images.len() as u64 {
        0 => of_artifacts,
        number if artifacts.is_empty() => count(number, "image"),
        number => format!("{} and {of_artifacts}", count(number, "image")),
    };
    print(&format!("{deleted} deleted{}\n", freed.text()))
}

/// Explains an artifact. `None`: the store has no record of it any more.
async fn explain_if_known(connection: &Connection, id: &str) -> anyhow::Result<Option<ExplainResponse>> {
    match why::explain(connection, id).await {
        Err(error) if error::refusal(&error).is_some_and(|refused| !refused.is_transient()) => Ok(None),
        explained => explained.map(Some),
    }
}

fn is_for(error: &anyhow::Error, reason: Reason) -> bool {
    error::refusal(error).is_some_and(|refusal| refusal.is(reason))
}

/// Removes the owners of artifacts, and collects garbage.
async fn delete_and_collect(
    connection: &Connection,
    artifacts: &[String],
) -> anyhow::Result<CollectResponse> {
    for ids in artifacts.chunks(CALL_LIMIT) {
        let request = DeleteArtifactsRequest { team: connection.team.clone(), artifact_ids: ids.to_vec() };
        let client = connection.artifacts();
        connection
            .repeat(Service::ArtifactStore, "cannot delete artifacts", async || {
                client.clone().delete_artifacts(request.clone()).await
            })
            .await?;
    }
    let collector = connection.collector();
    let request = CollectRequest { dry_run: DryRun::Off.into(), ..CollectRequest::default() };
    connection
        .repeat(Service::ArtifactStore, "cannot collect garbage", async || {
            collector.clone().collect(request.clone()).await
        })
        .await
}

/// Executes `gantry prune` without a worker: deletes the artifacts of the team that nothing uses,
/// after a person has agreed.
pub(crate) async fn prune(
    connection: &Connection,
    ui: &Ui,
    is_agreed: bool,
    as_json: bool,
) -> anyhow::Result<()> {
    let is_unused = async |artifact: Artifact| {
        let is_unused = is_kept_for_a_time(connection, &artifact.artifact_id).await?;
        Ok::<_, anyhow::Error>(is_unused.then_some(artifact))
    };
    let all = queries::artifacts(connection, ArtifactState::Sealed.into());
    let mut unused: Vec<_> = all
        .map_ok(is_unused)
        .try_buffered(CONCURRENT_CALLS)
        .try_filter_map(async |found| Ok(found))
        .try_collect()
        .await?;
    let collector = connection.collector();
    let request = CollectRequest { dry_run: DryRun::Only.into(), ..CollectRequest::default() };
    let mut garbage = connection
        .repeat(Service::ArtifactStore, "cannot find garbage", async || {
            collector.clone().collect(request.clone()).await
        })
        .await?;
    // An artifact that nothing keeps is in both lists.
    let listed: HashSet<_> = unused.iter().flat_map(ids_of).collect();
    garbage.collected.retain(|collected| !listed.contains(collected.id.as_str()));
    if unused.is_empty() && garbage.collected.is_empty() {
        if as_json {
            return print_json(&json!({ "deleted": 0, "kept": [], "size_bytes": 0, "disk_bytes": null }));
        }
        return print("nothing to delete\n");
    }
    let others = garbage.collected.iter().filter(|collected| collected.kind() == ObjectKind::Volume);
    let handles = freed_space::handles(&unused).chain(others.map(|volume| volume.id.as_str()));
    let parts = disk_parts(connection, handles).await?;
    if !is_agreed {
        let mut freed = FreedSpace::default();
        for replica in unused.iter().flat_map(|artifact| &artifact.replicas) {
            freed.add(&parts, &replica.volume_handle, replica.size_bytes);
        }
        freed.add_collected(&parts, &garbage);
        let least = if garbage.truncated { "at least " } else { "" };
        let artifacts = count(unused.len() as u64, "artifact");
        let (team, others) = (&connection.team, count(garbage.collected.len() as u64, "other object"));
        let question = format!(
            "{artifacts} of team {team} that nothing uses, and {least}{others} that nothing keeps{}",
            freed.text()
        );
        if !confirm::confirmed(&question).await? {
            ui.note("nothing was deleted");
            return Ok(());
        }
    }
    unused.sort_unstable_by(|one, other| one.artifact_id.cmp(&other.artifact_id));
    delete_all(connection, ui, &unused, Vec::new(), parts, as_json).await
}

/// Returns the ids of an artifact and of its replicas.
fn ids_of(artifact: &Artifact) -> impl Iterator<Item = &str> {
    let replicas = artifact.replicas.iter().map(|replica| replica.volume_handle.as_str());
    std::iter::once(artifact.artifact_id.as_str()).chain(replicas)
}

/// Artifacts that were deleted because disks are full.
pub(crate) struct FreedArtifacts {
    /// The workers whose disks are full.
    pub(crate) workers: Vec<String>,
    /// The artifacts.
    pub(crate) artifacts: Vec<Artifact>,
    pub(crate) collected: CollectResponse,
}

impl FreedArtifacts {
    pub(crate) fn json(&self) -> serde_json::Value {
        let artifacts: Vec<_> = self.artifacts.iter().map(shown::artifact).collect();
        json!({ "workers": self.workers, "artifacts": artifacts })
    }
}

/// Deletes artifacts with a time limit, the oldest first, on workers with a full disk. `None`: no
/// disk is full. Without `changes`, nothing is deleted.
pub(crate) async fn free_full_disks(
    connection: &Connection,
    changes: bool,
) -> anyhow::Result<Option<FreedArtifacts>> {
    let mut full = full_workers(connection).await?;
    if full.is_empty() {
        return Ok(None);
    }
    // A newly registered worker has not reported its disk yet.
    tokio::time::sleep(FIRST_REPORT_LIMIT).await;
    let mut still = full_workers(connection).await?;
    still.retain(|(worker, _)| full.iter().any(|(other, _)| other.worker_id == worker.worker_id));
    full = still;
    if full.is_empty() {
        return Ok(None);
    }
    let all = queries::artifacts(connection, ArtifactState::Sealed.into());
    let mut all: Vec<Artifact> = Box::pin(all).try_collect().await?;
    all.sort_by_key(|artifact| artifact.created_at.map(|at| (at.seconds, at.nanos)));
    let mut artifacts = Vec::new();
    for artifact in all {
        let on =
            |worker: &Worker| artifact.replicas.iter().find(|replica| replica.worker_id == worker.worker_id);
        if full.iter().any(|(worker, to_free)| *to_free > 0 && on(worker).is_some())
            && is_kept_for_a_time(connection, &artifact.artifact_id).await?
        {
            for (worker, to_free) in &mut full {
                *to_free = to_free.saturating_sub(on(worker).map_or(0, |replica| replica.size_bytes));
            }
            artifacts.push(artifact);
        }
    }
    let ids: Vec<_> = artifacts.iter().map(|artifact| artifact.artifact_id.clone()).collect();
    let collected = if changes && !ids.is_empty() {
        delete_and_collect(connection, &ids).await?
    } else {
        CollectResponse::default()
    };
    let workers = full.into_iter().map(|(worker, _)| worker.name).collect();
    Ok(Some(FreedArtifacts { workers, artifacts, collected }))
}

/// Lists the workers with a full disk, each with the number of bytes to free.
async fn full_workers(connection: &Connection) -> anyhow::Result<Vec<(Worker, u64)>> {
    let mut full = Vec::new();
    let mut workers = Box::pin(queries::workers(connection));
    while let Some(worker) = workers.try_next().await? {
        if let Some(to_free) = to_free(&worker) {
            full.push((worker, to_free));
        }
    }
    Ok(full)
}

/// Returns the number of bytes to free on a worker. `None`: its disk is not full, or its size is
/// unknown.
fn to_free(worker: &Worker) -> Option<u64> {
    let Capacity { disk_bytes, min_free_disk_bytes, .. } = worker.capacity.unwrap_or_default();
    bytes_to_free(disk_bytes, min_free_disk_bytes, worker.disk_free_bytes)
}

fn bytes_to_free(capacity: u64, min_free: u64, free: u64) -> Option<u64> {
    let is_full = capacity > 0 && free < (capacity / FULL_DIVISOR).min(NEVER_FULL_BYTES).max(min_free);
    is_full.then(|| (capacity / TARGET_DIVISOR).min(MAX_TARGET_BYTES).saturating_sub(free))
}

/// Returns whether an artifact is only kept by ended builds and rules, all with a time limit.
async fn is_kept_for_a_time(connection: &Connection, id: &str) -> anyhow::Result<bool> {
    // Retention may have deleted it meanwhile.
    let Some(explained) = explain_if_known(connection, id).await? else { return Ok(false) };
    let ends = |thing: ObjectKind| matches!(thing, ObjectKind::Build | ObjectKind::Unspecified);
    Ok(explained.kept_by_total == explained.kept_by.len() as u64
        && explained.kept_by.iter().all(|keeper| keeper.until.is_some() && ends(keeper.kind())))
}

/// Executes `gantry gc`.
pub(crate) async fn gc(connection: &Connection, args: &GcArgs, as_json: bool) -> anyhow::Result<()> {
    let dry_run = if args.dry_run { DryRun::Only } else { DryRun::Off };
    let collector = connection.collector();
    // What is left of ended workloads goes before artifacts with a time limit.
    let short = full_workers(connection).await?;
    let short_worker_ids = short.into_iter().map(|(worker, _)| worker.worker_id).take(MAX_SHORT).collect();
    let request = CollectRequest { dry_run: dry_run.into(), short_worker_ids };
    let mut response = connection
        .repeat(Service::ArtifactStore, "cannot collect garbage", async || {
            collector.clone().collect(request.clone()).await
        })
        .await?;
    let freed_for_room = free_full_disks(connection, !args.dry_run).await?;
    if let Some(freed) = &freed_for_room {
        response.collected.extend(freed.collected.collected.iter().cloned());
    }
    if as_json {
        let collected: Vec<_> = response.collected.iter().map(shown::collected).collect();
        return print_json(&serde_json::json!({
            "dry_run": args.dry_run,
            "collected": collected,
            "truncated": response.truncated,
            "size_bytes": queries::freed(&response),
            "full_disks": freed_for_room.as_ref().map(FreedArtifacts::json),
            "kept_containers": response.kept_containers.as_ref().map(|kept| json!({
                "containers": kept.containers,
                "until": kept.until.as_ref().map(labels::instant),
            })),
        }));
    }
    let mut text = match response.collected.is_empty() {
        true => format!("no garbage{}\n", kept_text(&response)),
        false => {
            let rows: Vec<_> = response.collected.iter().map(collected_row).collect();
            let table = render(&["KIND", "ID", "SIZE", "REASON"], &rows);
            format!("{table}\n{}\n", summary(&response, args.dry_run))
        }
    };
    if let Some(freed) = freed_for_room {
        let (workers, artifacts) =
            (freed.workers.join(", "), count(freed.artifacts.len() as u64, "artifact"));
        let size: u64 = freed.artifacts.iter().map(|artifact| artifact.size_bytes).sum();
        let verb = match freed.artifacts.len() {
            _ if args.dry_run => "would be deleted",
            1 => "was deleted",
            _ => "were deleted",
        };
        text.push_str(&match freed.artifacts.len() {
            0 => format!(
                "the disk of {workers} is full, and no artifact there has a time limit; see `gantry list artifacts` and \
                 `gantry delete`\n"
            ),
            _ => format!(
                "the disk of {workers} is full: {artifacts} of {} with a time limit {verb}\n",
                bytes(size)
            ),
        });
    }
    print(&text)
}

/// Says until when containers of ended workloads hold space. Empty: there are none.
fn kept_text(response: &CollectResponse) -> String {
    let Some(kept) = response.kept_containers else { return String::new() };
    let number = count(kept.containers, "container");
    let left = kept.until.as_ref().and_then(labels::from_now);
    let left = left.map_or_else(|| "some seconds".to_owned(), duration);
    format!(
        "; the space of {number} of ended workloads is held for {left} (`--gc-grace`), or until a transfer or a low disk \
         needs it"
    )
}

fn summary(response: &CollectResponse, dry_run: bool) -> String {
    let number = |thing: ObjectKind| {
        let number = response.collected.iter().filter(|collected| collected.kind() == thing).count();
        let number = u64::try_from(number).unwrap_or(u64::MAX);
        (number > 0).then(|| count(number, labels::thing(thing)))
    };
    let things: Vec<_> = [ObjectKind::Artifact, ObjectKind::Volume, ObjectKind::Container]
        .into_iter()
        .filter_map(number)
        .collect();
    let verb = if dry_run { "would be marked" } else { "marked" };
    let mut text = format!("{} {verb}, {} on workers", things.join(", "), bytes(queries::freed(response)));
    if response.truncated {
        text.push_str("; there is more garbage than listed");
    }
    text
}

fn collected_row(collected: &Collected) -> Vec<String> {
    vec![
        labels::thing(collected.kind()).to_owned(),
        collected.id.clone(),
        labels::size(collected.size_bytes),
        plain(&collected.reason, 100),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_disk_is_full_below_one_gib() {
        let gib = 1 << 30;
        for (capacity, min_free, free, to_free) in [
            // A Concourse worker does not report its disk.
            (0, 0, 0, None),
            (60 << 20, 0, 4 << 20, None),
            (60 << 20, 0, 2 << 20, Some(10 << 20)),
            (250 * gib, 0, 10 * gib, None),
            (250 * gib, 0, gib, None),
            (250 * gib, 2 * gib, gib, Some(4 * gib)),
            (250 * gib, 0, gib / 2, Some(5 * gib - gib / 2)),
        ] {
            assert_eq!(bytes_to_free(capacity, min_free, free), to_free, "{free} of {capacity}");
        }
    }

    #[test]
    fn garbage_is_summarized() {
        let collected =
            |thing: ObjectKind| Collected { kind: thing.into(), size_bytes: 512, ..Default::default() };
        let mut response = CollectResponse {
            collected: [ObjectKind::Artifact, ObjectKind::Volume, ObjectKind::Volume].map(collected).to_vec(),
            truncated: false,
            kept_containers: None,
        };
        assert_eq!(summary(&response, true), "1 artifact, 2 volumes would be marked, 1.0 KiB on workers");
        response.truncated = true;
        let printed = summary(&response, false);
        assert_eq!(
            printed,
            "1 artifact, 2 volumes marked, 1.0 KiB on workers; there is more garbage than listed"
        );
    }
}
