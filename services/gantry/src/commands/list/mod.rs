//! `gantry list`, `gantry show`: what is in a cluster, as tables or as JSON.

pub(crate) mod names;

use anyhow::bail;
use rpc::pb::artifacts::{Artifact, ArtifactState, Container, Replica, Volume};
use rpc::pb::scheduler::{
    Access, Outcome, ResourceType, StopReason, Usage, Worker, WorkerLabels, Workload, WorkloadSpec,
    WorkloadState,
};

use crate::cli::args::{Kind, ListArgs, ShowArgs};
use crate::client::connect::Connection;
use crate::client::queries::{
    artifact, artifacts, at_risk, container, containers, not_to_count_on, one, standing, table, volume,
    volumes, worker, workers, workload, workloads,
};
use crate::commands::caches;
use crate::commands::explain::lease;
use crate::commands::explain::store;
use crate::commands::imports;
use crate::commands::list::names::Names;
use crate::commands::orphans;
use crate::render::json;
use crate::render::labels;
use crate::render::table::{bytes, count, duration, plain};

/// `gantry list`
pub(crate) async fn list(connection: &Connection, args: &ListArgs, as_json: bool) -> anyhow::Result<()> {
    let (limit, wanted) = (args.limit, args.state.as_deref());
    match args.kind {
        Kind::Workers => {
            no_state("workers", wanted)?;
            table(workers(connection), limit, as_json, json::worker, WORKERS, worker_row).await
        }
        Kind::Workloads => {
            let workloads =
                workloads(connection, wanted.map(workload_state).transpose()?.unwrap_or_default());
            table(workloads, limit, as_json, json::workload, WORKLOADS, workload_row).await
        }
        Kind::Leases => {
            no_state("leases", wanted)?;
            lease::list(connection, args.worker.as_deref(), limit, as_json).await
        }
        Kind::BaseTypes => {
            no_state("base types", wanted)?;
            imports::list_types(connection, limit, as_json).await
        }
        Kind::Imports => {
            no_state("imports", wanted)?;
            imports::list(connection, limit, as_json).await
        }
        kind if args.set_aside => orphans::list(connection, kind, limit, as_json).await,
        Kind::Artifacts if args.at_risk => {
            let at_risk = at_risk(connection, not_to_count_on(connection).await?);
            table(at_risk, limit, as_json, json::artifact, ARTIFACTS, artifact_row).await
        }
        Kind::Artifacts => {
            let artifacts = artifacts(connection, state("artifacts", wanted, labels::artifact_state)?);
            table(artifacts, limit, as_json, json::artifact, ARTIFACTS, artifact_row).await
        }
        Kind::Volumes => {
            let volumes = volumes(connection, state("volumes", wanted, labels::inventory_state)?);
            let names = Names::ask(connection, as_json).await;
            let row = |volume: &Volume| volume_row(volume, &names);
            table(volumes, limit, as_json, json::volume, VOLUMES, row).await
        }
        Kind::Containers => {
            let containers = containers(connection, state("containers", wanted, labels::inventory_state)?);
            let names = Names::ask(connection, as_json).await;
            let row = |container: &Container| container_row(container, &names);
            table(containers, limit, as_json, json::container, CONTAINERS, row).await
        }
        Kind::Caches => {
            if wanted.is_some() {
                bail!("caches are not listed by their state");
            }
            caches::list(connection, limit, as_json).await
        }
    }
}

fn no_state(kind: &str, wanted: Option<&str>) -> anyhow::Result<()> {
    if wanted.is_some() {
        bail!("{kind} are not listed by their state");
    }
    Ok(())
}

/// The state that a list shall be of, in the words in which it is shown. 0: any.
fn state<S: TryFrom<i32>>(
    kind: &str,
    wanted: Option<&str>,
    word: fn(S) -> &'static str,
) -> anyhow::Result<i32> {
    let Some(wanted) = wanted else { return Ok(0) };
    // Numbers begin at 1 and have no gaps.
    let states = (1..).map_while(|number| S::try_from(number).ok().map(|state| (number, word(state))));
    let states: Vec<_> = states.collect();
    match states.iter().find(|(_, word)| *word == wanted) {
        Some((number, _)) => Ok(*number),
        None => {
            let words: Vec<_> = states.iter().map(|(_, word)| *word).collect();
            bail!("{wanted:?} is no state of {kind}; they are {}", words.join(", "))
        }
    }
}

/// The state that workloads shall be in, or how they shall have ended, in the words in which they are shown.
fn workload_state(wanted: &str) -> anyhow::Result<(WorkloadState, Outcome)> {
    let states = (1..).map_while(|number| WorkloadState::try_from(number).ok());
    let outcomes = (1..).map_while(|number| Outcome::try_from(number).ok());
    let of_state = states.map(|state| (labels::workload_state(state), (state, Outcome::Unspecified)));
    let of_outcome = outcomes
        .filter_map(|outcome| Some((labels::outcome(outcome)?, (WorkloadState::Unspecified, outcome))));
    let all: Vec<_> = of_state.chain(of_outcome).collect();
    match all.iter().find(|(word, _)| *word == wanted) {
        Some((_, which)) => Ok(*which),
        None => {
            let words: Vec<_> = all.iter().map(|(word, _)| *word).collect();
            bail!("{wanted:?} is no state of workloads; they are {}", words.join(", "))
        }
    }
}

/// `gantry show`
pub(crate) async fn show(connection: &Connection, args: &ShowArgs, as_json: bool) -> anyhow::Result<()> {
    let id = &args.id;
    match args.kind {
        Kind::Workers => one(&worker(connection, "show", id).await?, as_json, json::worker, worker_fields),
        Kind::Workloads => {
            let workload = workload(connection, "show", id).await?;
            let standing = if as_json { String::new() } else { standing(connection, &workload).await? };
            one(&workload, as_json, json::workload, |workload| workload_fields(workload, &standing))
        }
        Kind::Artifacts => {
            let shown = store::or_why(connection, id, artifact(connection, id).await).await?;
            one(&shown, as_json, json::artifact, artifact_fields)
        }
        Kind::Volumes => {
            let shown = store::or_why(connection, id, volume(connection, id).await).await?;
            one(&shown, as_json, json::volume, volume_fields)
        }
        Kind::Containers => {
            let shown = store::or_why(connection, id, container(connection, id).await).await?;
            one(&shown, as_json, json::container, container_fields)
        }
        Kind::Caches => one(&caches::find(connection, id).await?, as_json, caches::json, caches::shown),
        Kind::BaseTypes | Kind::Imports | Kind::Leases => {
            bail!("there is no more of these than `gantry list` shows; see `gantry explain {id}`")
        }
    }
}

// What is shown of them.

const WORKERS: &[&str] =
    &["NAME", "STATE", "PLATFORM", "TAGS", "TASKS", "CONTAINERS", "VOLUMES", "FREE", "CONTACT"];

fn worker_row(worker: &Worker) -> Vec<String> {
    let labels = worker.labels.clone().unwrap_or_default();
    let limit = worker.capacity.unwrap_or_default().max_tasks;
    vec![
        plain(&worker.name, 60),
        labels::standing(worker),
        plain(&labels.platform, 20),
        plain(&labels.tags.join(","), 40),
        if limit == 0 { worker.active_tasks.to_string() } else { format!("{}/{limit}", worker.active_tasks) },
        worker.containers.to_string(),
        worker.volumes.to_string(),
        labels::free_disk(worker),
        labels::ago(worker.last_contact_at.as_ref()),
    ]
}

/// Each with its version, if the worker says it.
fn resource_types(labels: &WorkerLabels) -> String {
    let word = |known: &ResourceType| match known.version.as_str() {
        "" => known.name.clone(),
        version => format!("{} {version}", known.name),
    };
    labels.resource_types.iter().map(word).collect::<Vec<_>>().join(", ")
}

fn failures(worker: &Worker) -> String {
    match worker.failures {
        0 => String::new(),
        failures => format!("{failures} in a row, the last: {}", plain(&worker.last_failure, 200)),
    }
}

fn worker_fields(worker: &Worker) -> Vec<(&'static str, String)> {
    let labels = worker.labels.clone().unwrap_or_default();
    let (capacity, reserved) = (worker.capacity.unwrap_or_default(), worker.reserved.unwrap_or_default());
    let limited = |count: u64, limit: u32| match limit {
        0 => format!("{count}, no limit"),
        limit => format!("{count}, at most {limit}"),
    };
    vec![
        ("name", plain(&worker.name, 255)),
        ("id", worker.worker_id.clone()),
        ("state", labels::standing(worker)),
        ("shall", labels::desire(worker.desired()).to_owned()),
        ("gets no work", plain(&labels::no_work(worker), 1000)),
        ("drained", worker.drained_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("interrupted at", worker.interrupt_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("held up", plain(&worker.held_up_by, 1000)),
        ("failures", failures(worker)),
        ("quarantined until", worker.quarantined_until.as_ref().map(labels::instant).unwrap_or_default()),
        ("ephemeral", if labels.ephemeral { "yes".to_owned() } else { String::new() }),
        ("platform", plain(&labels.platform, 100)),
        ("tags", plain(&labels.tags.join(" "), 1000)),
        ("team", labels.team.clone()),
        ("images", labels.image_kinds.join(" ")),
        ("resource types", plain(&resource_types(&labels), 1000)),
        ("can", labels.capabilities.join(" ")),
        ("tasks", limited(worker.active_tasks.into(), capacity.max_tasks)),
        ("leases", format!("{}, {} may not be interrupted", worker.leases, worker.uninterruptible_leases)),
        ("containers", limited(worker.containers, capacity.max_containers)),
        ("volumes", limited(worker.volumes, capacity.max_volumes)),
        ("cores", reserved_of(capacity.cpu_millis, reserved.cpu_millis, labels::cores)),
        ("memory", reserved_of(capacity.memory_bytes, reserved.memory_bytes, bytes)),
        ("disk", disk(worker)),
        ("gateway", worker.gateway_endpoint.clone()),
        ("incarnation", worker.incarnation.to_string()),
        ("session", worker.session.to_string()),
        ("contact", format!("{} ago", labels::ago(worker.last_contact_at.as_ref()))),
    ]
}

/// What there is of something, and how much of that leases keep free. 0: the worker does not say how much it has.
fn reserved_of(capacity: u64, reserved: u64, shown: fn(u64) -> String) -> String {
    match (capacity, reserved) {
        (0, 0) => String::new(),
        (0, reserved) => format!("{} reserved", shown(reserved)),
        (capacity, 0) => shown(capacity),
        (capacity, reserved) => format!("{}, {} reserved", shown(capacity), shown(reserved)),
    }
}

fn disk(worker: &Worker) -> String {
    let free = match worker.capacity.unwrap_or_default().disk_bytes {
        0 => labels::free_disk(worker),
        disk => format!("{} free of {}", labels::free_disk(worker), bytes(disk)),
    };
    match worker.reserved.unwrap_or_default().disk_bytes {
        0 => free,
        reserved => format!("{free}, {} reserved", bytes(reserved)),
    }
}

const WORKLOADS: &[&str] = &["ID", "STATE", "END", "WORKER", "AGE", "COMMAND"];

fn workload_row(workload: &Workload) -> Vec<String> {
    let mut state =
        labels::outcome(workload.outcome()).unwrap_or(labels::workload_state(workload.state())).to_owned();
    if workload.stopping() != StopReason::Unspecified {
        state += ", stopping";
    }
    vec![
        workload.workload_id.clone(),
        state,
        labels::end(workload),
        workload.whereabouts.as_ref().map(|there| plain(&there.worker_name, 40)).unwrap_or_default(),
        labels::ago(workload.submitted_at.as_ref()),
        plain(&labels::command(workload.spec.as_ref()), 60),
    ]
}

/// Shown for a workload whose spec is abridged.
const ABRIDGED: &str = "larger than 8 KiB: its arguments, environment, inputs, outputs, caches, tags and capabilities are not kept";

/// `standing`: how it is with its worker, where that is not as it should be.
fn workload_fields(workload: &Workload, standing: &str) -> Vec<(&'static str, String)> {
    let spec = workload.spec.clone().unwrap_or_default();
    let instant = |at: &Option<prost_types::Timestamp>| at.as_ref().map(labels::instant).unwrap_or_default();
    let input = |input: &rpc::pb::scheduler::Input| {
        let read_only = if input.access() == Access::ReadOnly { ", read-only" } else { "" };
        format!("{}: artifact {}{read_only}", plain(&input.name, 255), input.artifact_id)
    };
    let published = |output: &rpc::pb::scheduler::PublishedOutput| {
        format!("{}: artifact {}, {}", plain(&output.name, 255), output.artifact_id, bytes(output.size_bytes))
    };
    let cache = |mount: &rpc::pb::scheduler::CacheMount| {
        let path = String::from_utf8_lossy(&mount.path);
        format!("{}: cache {}", plain(&path, 255), mount.task_cache_id)
    };
    let failure = workload.failure.as_ref();
    let mut worker = workload.whereabouts.as_ref().map(|there| there.worker_name.clone()).unwrap_or_default();
    if !standing.is_empty() {
        worker += &format!(" ({standing})");
    }
    vec![
        ("id", workload.workload_id.clone()),
        ("state", labels::workload_state(workload.state()).to_owned()),
        ("shall stop", labels::stop_reason(workload.stopping()).to_owned()),
        ("waits for", workload.waiting_for.join("\n")),
        ("outcome", labels::outcome(workload.outcome()).unwrap_or_default().to_owned()),
        ("end", labels::end(workload)),
        ("failure", failure.map(|failure| plain(&failure.message, 1000)).unwrap_or_default()),
        ("command", plain(&labels::command(Some(&spec)), 1000)),
        ("spec", if workload.abridged { ABRIDGED.to_owned() } else { String::new() }),
        ("platform", plain(&spec.platform, 100)),
        ("tags", plain(&spec.tags.join(" "), 1000)),
        ("reserves", spec.requests.as_ref().map(lease::amounts).unwrap_or_default()),
        ("priority", if spec.priority == 0 { String::new() } else { spec.priority.to_string() }),
        ("at most", time_limits(&spec)),
        ("interruptible", if spec.interruptible { "yes".to_owned() } else { String::new() }),
        ("inputs", spec.inputs.iter().map(input).collect::<Vec<_>>().join("\n")),
        ("caches", spec.caches.iter().map(cache).collect::<Vec<_>>().join("\n")),
        ("outputs", workload.outputs.iter().map(published).collect::<Vec<_>>().join("\n")),
        ("worker", worker),
        ("attempt", workload.whereabouts.as_ref().map(|there| there.attempt_id.clone()).unwrap_or_default()),
        ("build", spec.build_id),
        ("submitted", instant(&workload.submitted_at)),
        ("started", instant(&workload.started_at)),
        ("finished", instant(&workload.finished_at)),
        ("begun again", retries(workload.retried, spec.retries)),
        ("times", workload.usage.as_ref().map(usage_times).unwrap_or_default()),
        ("used", workload.usage.as_ref().map(used).unwrap_or_default()),
    ]
}

/// How long it may wait, prepare and run, as far as that is limited.
fn time_limits(spec: &WorkloadSpec) -> String {
    let limits = [
        ("in the queue", spec.queue_timeout),
        ("until it starts", spec.start_timeout),
        ("running", spec.run_timeout),
    ];
    let limited = limits.into_iter().filter_map(|(what, time)| Some(format!("{} {what}", self::time(time?))));
    limited.collect::<Vec<_>>().join(", ")
}

/// How often it has begun again, and how often it may.
fn retries(retried: u32, retries: u32) -> String {
    match (retried, retries) {
        (0, 0) => String::new(),
        (retried, 0) => count(retried.into(), "time"),
        (retried, retries) => format!("{}, at most {retries}", count(retried.into(), "time")),
    }
}

/// How long the last attempt took, as far as that is known.
fn usage_times(usage: &Usage) -> String {
    let known = [("waited", usage.queued), ("prepared", usage.preparing), ("ran", usage.running)];
    let known = known.into_iter().filter_map(|(what, time)| Some(format!("{what} {}", self::time(time?))));
    known.collect::<Vec<_>>().join(", ")
}

/// What the last attempt used, as far as its worker knows.
fn used(usage: &Usage) -> String {
    let known = [
        usage.cpu_time.map(|used| format!("{} of processors", time(used))),
        usage.peak_memory_bytes.map(|most| format!("{} of memory at most", bytes(most))),
        usage.bytes_in.map(|brought| format!("{} brought", bytes(brought))),
        usage.bytes_out.map(|published| format!("{} published", bytes(published))),
    ];
    known.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn time(time: prost_types::Duration) -> String {
    duration(time.try_into().unwrap_or_default())
}

const ARTIFACTS: &[&str] = &["ID", "STATE", "SIZE", "AGE", "REPLICAS", "LABEL", "KEPT BY"];

fn artifact_row(artifact: &Artifact) -> Vec<String> {
    vec![
        artifact.artifact_id.clone(),
        labels::artifact_state(artifact.state()).to_owned(),
        bytes(artifact.size_bytes),
        labels::ago(artifact.created_at.as_ref()),
        if artifact.in_store {
            format!("{} + store", artifact.replicas.len())
        } else {
            artifact.replicas.len().to_string()
        },
        plain(&artifact.label, 30),
        match artifact.marked_at {
            Some(at) => {
                format!("deleted {} ago: {}", labels::ago(Some(&at)), plain(&artifact.marked_why, 80))
            }
            None => plain(&artifact.kept_by.join(", "), 80),
        },
    ]
}

fn artifact_fields(artifact: &Artifact) -> Vec<(&'static str, String)> {
    let of_replica =
        |replica: &Replica| format!("volume {} on worker {}", replica.volume_handle, replica.worker_id);
    let in_store = artifact.in_store.then(|| labels::IN_STORE.to_owned());
    let mut bytes_are: Vec<_> =
        in_store.into_iter().chain(artifact.replicas.iter().map(of_replica)).collect();
    if bytes_are.is_empty() && artifact.state() == ArtifactState::Sealed {
        bytes_are.push(format!("lost: it must be made again; see `gantry explain {}`", artifact.artifact_id));
    }
    vec![
        ("id", artifact.artifact_id.clone()),
        ("label", plain(&artifact.label, 255)),
        ("state", labels::artifact_state(artifact.state()).to_owned()),
        ("size", bytes(artifact.size_bytes)),
        ("digest", labels::hex(&artifact.digest)),
        ("created", artifact.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("kept by", artifact.kept_by.join("\n")),
        ("deleted", artifact.marked_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("why", plain(&artifact.marked_why, 255)),
        ("bytes", bytes_are.join("\n")),
    ]
}

const VOLUMES: &[&str] = &["HANDLE", "WORKER", "STATE", "FOR", "SIZE", "AGE", "ARTIFACT", "PARENT"];

fn volume_row(volume: &Volume, names: &Names) -> Vec<String> {
    vec![
        volume.volume_handle.clone(),
        names.of(&volume.worker_id),
        labels::inventory_state(volume.state()).to_owned(),
        labels::purpose(volume.purpose()).to_owned(),
        labels::size(volume.size_bytes),
        labels::ago(volume.created_at.as_ref()),
        volume.artifact_id.clone(),
        volume.parent_handle.clone(),
    ]
}

fn volume_fields(volume: &Volume) -> Vec<(&'static str, String)> {
    vec![
        ("handle", volume.volume_handle.clone()),
        ("worker", volume.worker_id.clone()),
        ("state", labels::inventory_state(volume.state()).to_owned()),
        ("for", labels::purpose(volume.purpose()).to_owned()),
        ("artifact", volume.artifact_id.clone()),
        ("parent", volume.parent_handle.clone()),
        ("attempt", volume.attempt_id.clone()),
        ("size", labels::size(volume.size_bytes)),
        ("created", volume.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost", volume.lost_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("garbage", plain(&volume.marked_why, 1000)),
    ]
}

const CONTAINERS: &[&str] = &["HANDLE", "WORKER", "STATE", "AGE", "WORKLOAD", "ATTEMPT"];

fn container_row(container: &Container, names: &Names) -> Vec<String> {
    vec![
        container.container_handle.clone(),
        names.of(&container.worker_id),
        labels::inventory_state(container.state()).to_owned(),
        labels::ago(container.created_at.as_ref()),
        container.workload_id.clone(),
        container.attempt_id.clone(),
    ]
}

fn container_fields(container: &Container) -> Vec<(&'static str, String)> {
    vec![
        ("handle", container.container_handle.clone()),
        ("worker", container.worker_id.clone()),
        ("state", labels::inventory_state(container.state()).to_owned()),
        ("workload", container.workload_id.clone()),
        ("attempt", container.attempt_id.clone()),
        ("created", container.created_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("used", container.touched_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("lost", container.lost_at.as_ref().map(labels::instant).unwrap_or_default()),
        ("garbage", plain(&container.marked_why, 1000)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_asked_for_by_the_words_that_lists_show() {
        let of = |wanted| state("artifacts", wanted, labels::artifact_state);
        assert_eq!(of(None).expect("any"), 0);
        assert_eq!(of(Some("deleting")).expect("a state"), 3);
        let refused = of(Some("unknown")).expect_err("none");
        assert_eq!(
            refused.to_string(),
            "\"unknown\" is no state of artifacts; they are open, sealed, deleting"
        );
    }

    #[test]
    fn a_sealed_artifact_without_bytes_says_that_they_are_lost() {
        let bytes = |artifact: &Artifact| {
            artifact_fields(artifact).into_iter().find(|(name, _)| *name == "bytes").expect("the field").1
        };
        let mut artifact = Artifact { state: ArtifactState::Sealed.into(), ..Artifact::default() };
        assert!(bytes(&artifact).starts_with("lost: it must be made again"), "{}", bytes(&artifact));
        artifact.in_store = true;
        assert_eq!(bytes(&artifact), labels::IN_STORE);
        artifact = Artifact { state: ArtifactState::Open.into(), ..Artifact::default() };
        assert_eq!(bytes(&artifact), "");
    }

    #[test]
    fn every_row_has_the_columns_of_its_table() {
        assert_eq!(worker_row(&Worker::default()).len(), WORKERS.len());
        assert_eq!(workload_row(&Workload::default()).len(), WORKLOADS.len());
        assert_eq!(artifact_row(&Artifact::default()).len(), ARTIFACTS.len());
        let names = Names::default();
        assert_eq!(volume_row(&Volume::default(), &names).len(), VOLUMES.len());
        assert_eq!(container_row(&Container::default(), &names).len(), CONTAINERS.len());
    }

    #[test]
    fn what_is_on_a_worker_says_on_which() {
        let names = Names::from([("id-1", "one")]);
        let volume = |id: &str| Volume { worker_id: id.to_owned(), ..Volume::default() };
        let container = Container { worker_id: "id-1".to_owned(), ..Container::default() };
        let at = VOLUMES.iter().position(|header| *header == "WORKER").expect("a column");
        assert_eq!(volume_row(&volume("id-1"), &names)[at], "one");
        assert_eq!(volume_row(&volume("id-2"), &names)[at], "id-2", "it has gone");
        let at = CONTAINERS.iter().position(|header| *header == "WORKER").expect("a column");
        assert_eq!(container_row(&container, &names)[at], "one");
    }
}
