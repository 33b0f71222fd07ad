//! Calls about containers: those of the holders of driven leases, and lists.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use domain::workload::WorkloadSpec;
use domain::{AttemptId, LeaseId, ProcessId};
use futures::{StreamExt, TryStreamExt};
use rpc::page::Page;
use rpc::pb::runtime as pb;
use rpc::pb::scheduler as scheduler_pb;
use rpc::{
    Reason, invalid_field, parse_duration, parse_id, parse_name, parse_optional_id, parse_team, required,
};
use runtime::{CurrentUsage, ProcessEvent, ProcessState, RuntimeError};
use tokio::sync::watch;
use tonic::Status;
use uuid::Uuid;

use super::attach::attach_answer;
use super::errors::status;
use super::{Answers, check_team, worker_of};
use crate::SERVICE;
use crate::attempt::error::AttemptError;
use crate::clients::scheduler_messages::input_progress;
use crate::driven::create::NewContainer;
use crate::driven::publish::{Published, Source};
use crate::driven::{self, Held};
use crate::runtimes::container_note::{DrivenNote, NotedCache, NotedOutput};
use crate::worker::Worker;
use crate::worker::containers::{CONCURRENT_DESCRIPTIONS, KnownContainer};
use crate::worker_set::WorkerSet;

/// Maximum number of labels of a container.
const MAX_LABELS: usize = 32;
/// Time between TERM and KILL, unless the caller names it.
const DEFAULT_GRACE: Duration = Duration::from_secs(10);
/// Interval between two signs of progress of a publication.
const PROGRESS: Duration = Duration::from_secs(1);

pub(super) async fn create(
    gateway: WorkerSet,
    request: pb::CreateContainerRequest,
    answers: Answers<pb::CreateContainerResponse>,
) -> Result<(), Status> {
    let pb::CreateContainerRequest { lease_token, key, spec, labels } = request;
    let key = parse_name("key", key)?;
    check_labels(&labels)?;
    let (attended, claims) = gateway.admit_lease(&lease_token).await?;
    let spec = required("spec", spec)?;
    let network_of = parse_optional_id("spec.network_container_id", &spec.network_container_id)?;
    let (spec, note) = parse_spec(&claims.team, key, labels, spec)?;
    let (worker, context) = (attended.worker.clone(), attended.attempts.clone());
    let held = Held::begin(&context, claims, &lease_token, false).await?;
    let (progress, mut changes) = watch::channel(Vec::new());
    // A caller that leaves must not leave half a container behind.
    let creating = worker.tasks.spawn(async move {
        let new = NewContainer { spec, note, network_of, token: lease_token };
        let stopping = context.worker.stopping.clone();
        tokio::select! {
            created = driven::create::create(&context, held, new, |inputs| _ = progress.send(inputs)) => created,
            () = stopping.cancelled() => Err(AttemptError::GatewayStopping.into()),
        }
    });
    let report = async {
        while changes.changed().await.is_ok() {
            let inputs = changes.borrow_and_update().iter().cloned().map(input_progress).collect();
            let message = pb::create_container_response::Message::Progress(pb::CreateProgress { inputs });
            if answers.send(Ok(pb::CreateContainerResponse { message: Some(message) })).await.is_err() {
                break;
            }
        }
        std::future::pending::<()>().await;
    };
    let created = tokio::select! {
        created = creating => created,
        () = report => return Ok(()),
    };
    let created = created.map_err(|error| {
        Reason::WorkerFailed.status(SERVICE, format!("cannot create a container: {error}"))
    })??;
    let container = describe(&worker, &created).await?;
    let message = Some(pb::create_container_response::Message::Created(container));
    answers.send(Ok(pb::CreateContainerResponse { message })).await.ok();
    Ok(())
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Status> {
    if labels.len() > MAX_LABELS {
        return Err(invalid_field("labels", format!("must be at most {MAX_LABELS}")));
    }
    for (name, value) in labels {
        parse_name("labels", name.clone())?;
        if !value.is_empty() {
            parse_name(&format!("labels[{name}]"), value.clone())?;
        }
    }
    Ok(())
}

/// Parses the spec of a container. The parts that it shares with a workload have the same rules.
fn parse_spec(
    team: &str,
    key: String,
    labels: BTreeMap<String, String>,
    spec: pb::ContainerSpec,
) -> Result<(WorkloadSpec, DrivenNote), Status> {
    if let Some(index) = spec.outputs.iter().position(|output| !output.owners.is_empty()) {
        let message = "must be empty: the settlement names the owners";
        return Err(invalid_field(format!("spec.outputs[{index}].owners"), message));
    }
    let encoded = rpc::Message::encode_to_vec(&spec);
    let pb::ContainerSpec {
        image,
        environment,
        directory,
        user,
        inputs,
        outputs,
        caches,
        limits,
        privilege,
        network,
        network_container_id: _,
    } = spec;
    let spec = rpc::spec::parse(scheduler_pb::WorkloadSpec {
        team: team.to_owned(),
        image,
        environment,
        directory,
        user,
        inputs,
        outputs,
        caches,
        limits,
        privilege,
        network,
        ..driven::spec_without_process()
    })?;
    let path = |field: String, path: &[u8]| {
        String::from_utf8(path.to_vec()).map_err(|_| invalid_field(field, "must be UTF-8"))
    };
    let outputs = spec.outputs.iter().enumerate().map(|(index, output)| {
        let input = spec.inputs.iter().find(|input| input.path == output.path);
        Ok(NotedOutput {
            name: output.name.clone(),
            path: path(format!("spec.outputs[{index}].path"), &output.path)?,
            from: input.map(|input| input.artifact),
        })
    });
    let outputs = outputs.collect::<Result<_, Status>>()?;
    let caches = spec.caches.iter().enumerate().map(|(index, mount)| {
        let path = path(format!("spec.caches[{index}].path"), &mount.path)?;
        Ok(NotedCache { cache: mount.cache, path })
    });
    let caches = caches.collect::<Result<_, Status>>()?;
    let digest = Uuid::new_v5(&Uuid::nil(), &encoded);
    Ok((spec, DrivenNote { key, labels, spec: digest, outputs, caches }))
}

pub(super) async fn get(
    gateway: WorkerSet,
    request: pb::GetContainerRequest,
) -> Result<pb::GetContainerResponse, Status> {
    let team = parse_team("team", request.team)?;
    let id: AttemptId = parse_id("container_id", &request.container_id)?;
    let attended = worker_of(&gateway, "worker_id", &request.worker_id).await?;
    let is_it = |container: &KnownContainer| container.note.container == id && container.team == team;
    let found = attended.worker.containers(is_it).await.map_err(status)?.pop();
    let found = found.ok_or_else(|| no_container(id))?;
    let container = describe(&attended.worker, &found).await?;
    Ok(pb::GetContainerResponse { container: Some(container) })
}

fn no_container(id: AttemptId) -> Status {
    Reason::ContainerNotFound.status(SERVICE, format!("container {id} does not exist"))
}

pub(super) async fn list(
    gateway: WorkerSet,
    request: pb::ListContainersRequest,
) -> Result<pb::ListContainersResponse, Status> {
    let page = Page::of(SERVICE, &request)?;
    let team = parse_team("team", request.team)?;
    let lease: Option<LeaseId> = parse_optional_id("lease_id", &request.lease_id)?;
    let attended = worker_of(&gateway, "worker_id", &request.worker_id).await?;
    let worker = &attended.worker;
    let has_label =
        |note: &DrivenNote, (name, value): (&String, &String)| note.labels.get(name) == Some(value);
    let is_listed = |container: &KnownContainer| {
        let labels = &request.labels;
        container.team == team
            && lease.is_none_or(|lease| container.note.lease == lease)
            && page.after.is_none_or(|after| container.note.container.uuid() > after)
            && (labels.is_empty()
                || container
                    .note
                    .driven
                    .as_ref()
                    .is_some_and(|note| labels.iter().all(|label| has_label(note, label))))
    };
    let mut found = worker.containers(is_listed).await.map_err(status)?;
    let size = usize::try_from(page.size).unwrap_or(usize::MAX);
    let more = found.len() > size;
    found.truncate(size);
    let describe = async |container: &KnownContainer| match describe(worker, container).await {
        Ok(item) => Ok(Some((container.note.container.uuid(), item))),
        // It was destroyed meanwhile.
        Err(error) if error.code() == tonic::Code::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    let described: Vec<_> = futures::stream::iter(found.iter().map(describe))
        .buffered(CONCURRENT_DESCRIPTIONS)
        .try_collect()
        .await?;
    let (containers, mut next_page_token) = page.end(described.into_iter().flatten(), more);
    if let (true, true, Some(last)) = (more, containers.is_empty(), found.last()) {
        next_page_token = page.token(last.note.container.uuid());
    }
    Ok(pb::ListContainersResponse { containers, next_page_token })
}

/// Returns the present resource usage of the containers of a team.
pub(super) async fn usage(
    gateway: WorkerSet,
    request: pb::GetUsageRequest,
) -> Result<pb::GetUsageResponse, Status> {
    let team = parse_team("team", request.team)?;
    let attended = worker_of(&gateway, "worker_id", &request.worker_id).await?;
    let worker = &attended.worker;
    let known = worker.containers(|container| container.team == team).await.map_err(status)?;
    let handles: Vec<_> = known.iter().map(|container| container.handle).collect();
    let measured = worker.runtime.current_usage(&handles).await.map_err(status)?;
    let measured_at = Some(SystemTime::now().into());
    let usage = |container: KnownContainer| {
        let CurrentUsage { cpu_time, memory_bytes, processes } = *measured.get(&container.handle)?;
        Some(pb::ContainerUsage {
            container_id: container.note.container.to_string(),
            lease_id: container.note.lease.to_string(),
            key: container.note.driven.map(|note| note.key).unwrap_or_default(),
            cpu_time: cpu_time.map(rpc::duration),
            memory_bytes,
            processes,
        })
    };
    Ok(pb::GetUsageResponse { containers: known.into_iter().filter_map(usage).collect(), measured_at })
}

/// Returns a container with its processes.
async fn describe(worker: &Worker, known: &KnownContainer) -> Result<pb::Container, Status> {
    let KnownContainer { handle, team, note } = known;
    let found = match worker.runtime.describe_container(*handle).await {
        Err(RuntimeError::ContainerNotFound(_)) => return Err(no_container(note.container)),
        found => found.map_err(status)?,
    };
    let mut processes = Vec::new();
    for (id, main) in
        found.main.map(|id| (id, true)).into_iter().chain(found.others.into_iter().map(|id| (id, false)))
    {
        match worker.runtime.process(id).await {
            Ok(state) => processes.push(process(id, main, state)),
            Err(RuntimeError::ProcessNotFound(_)) => {}
            Err(error) => return Err(status(error)),
        }
    }
    let driven = note.driven.clone();
    Ok(pb::Container {
        container_id: note.container.to_string(),
        container_handle: handle.to_string(),
        team: team.clone(),
        lease_id: note.lease.to_string(),
        key: driven.as_ref().map(|note| note.key.clone()).unwrap_or_default(),
        labels: driven.map(|note| note.labels).unwrap_or_default(),
        processes,
    })
}

fn process(id: ProcessId, main: bool, state: ProcessState) -> pb::Process {
    let (state, exited) = match state {
        ProcessState::Starting => (pb::ProcessState::Starting, None),
        ProcessState::Started => (pb::ProcessState::Running, None),
        ProcessState::StartUnknown => (pb::ProcessState::Unknown, None),
        ProcessState::Ended(ended) => {
            let (message, _) = attach_answer(ProcessEvent::Ended(ended));
            let exited = match message {
                pb::attach_response::Message::Exited(exited) => Some(exited),
                _ => None,
            };
            (pb::ProcessState::Ended, exited)
        }
    };
    pb::Process { process_id: id.to_string(), main, state: state.into(), exited }
}

pub(super) async fn get_process(
    gateway: WorkerSet,
    request: pb::GetProcessRequest,
) -> Result<pb::GetProcessResponse, Status> {
    let team = parse_team("team", request.team)?;
    let id: ProcessId = parse_id("process_id", &request.process_id)?;
    let attended = worker_of(&gateway, "worker_id", &request.worker_id).await?;
    let main = check_team(&attended.worker, id, &team).await?;
    let state = attended.worker.runtime.process(id).await.map_err(status)?;
    Ok(pb::GetProcessResponse {
        process: Some(process(id, id == main, state)),
        container_id: main.to_string(),
    })
}

pub(super) async fn stop(
    gateway: WorkerSet,
    request: pb::StopContainerRequest,
) -> Result<pb::StopContainerResponse, Status> {
    let id: AttemptId = parse_id("container_id", &request.container_id)?;
    let grace = parse_duration("grace", request.grace)?.unwrap_or(DEFAULT_GRACE);
    let (attended, claims) = gateway.admit_lease(&request.lease_token).await?;
    driven::stop(&attended.worker, &claims, id, grace).await?;
    Ok(pb::StopContainerResponse {})
}

pub(super) async fn destroy(
    gateway: WorkerSet,
    request: pb::DestroyContainerRequest,
) -> Result<pb::DestroyContainerResponse, Status> {
    let id: AttemptId = parse_id("container_id", &request.container_id)?;
    let (attended, claims) = gateway.admit_lease(&request.lease_token).await?;
    driven::destroy(&attended.worker, &claims, id).await?;
    Ok(pb::DestroyContainerResponse {})
}

pub(super) async fn publish(
    gateway: WorkerSet,
    request: pb::PublishRequest,
    answers: Answers<pb::PublishResponse>,
) -> Result<(), Status> {
    let id: AttemptId = parse_id("container_id", &request.container_id)?;
    let source = match required("source", request.source)? {
        pb::publish_request::Source::Output(name) => Source::Output(parse_name("output", name)?),
        pb::publish_request::Source::TaskCacheId(cache) => Source::Cache(parse_id("task_cache_id", &cache)?),
    };
    let (attended, claims) = gateway.admit_lease(&request.lease_token).await?;
    let context: &Arc<_> = &attended.attempts;
    let held = Held::begin(context, claims, &request.lease_token, false).await?;
    let report = async {
        loop {
            tokio::time::sleep(PROGRESS).await;
            let message = Some(pb::publish_response::Message::Progress(pb::PublishProgress {}));
            if answers.send(Ok(pb::PublishResponse { message })).await.is_err() {
                return;
            }
        }
    };
    let published = tokio::select! {
        published = driven::publish::publish(context, held, id, source, request.lease_token) => published?,
        () = report => return Ok(()),
    };
    let published = match published {
        Published::Output(output, notes) => pb::Published {
            artifact_id: output.artifact.to_string(),
            digest: output.digest.as_bytes().to_vec().into(),
            size_bytes: output.size_bytes,
            entries: output.entries,
            notes,
        },
        Published::Cache(Some(cache), notes) => pb::Published {
            artifact_id: cache.artifact.to_string(),
            digest: cache.digest.as_bytes().to_vec().into(),
            notes,
            ..pb::Published::default()
        },
        Published::Cache(None, notes) => pb::Published { notes, ..pb::Published::default() },
    };
    let message = Some(pb::publish_response::Message::Published(published));
    answers.send(Ok(pb::PublishResponse { message })).await.ok();
    Ok(())
}
