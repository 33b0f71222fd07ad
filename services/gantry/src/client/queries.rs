//! Queries for objects of a cluster: one object by its id, or all objects page by page.

use anyhow::{Context, bail};
use domain::AttemptId;
use futures::stream::{self, Stream, TryStreamExt};
use rpc::Reason;
use rpc::pb::artifacts::{
    Artifact, CollectResponse, Container, GetArtifactRequest, GetContainerRequest, GetVolumeRequest,
    ListArtifactsRequest, ListAtRiskRequest, ListContainersRequest, ListOrphansRequest,
    ListResourceCachesRequest, ListVolumesRequest, ObjectKind, Orphan, ResourceCache, Volume,
};
use rpc::pb::scheduler::{
    DesiredWorkerState, GetRequest, GetWorkerRequest, ListRequest, ListWorkersRequest, Outcome, Worker,
    WorkerState, Workload, WorkloadState,
};

use crate::client::connect::{Connection, Service};
use crate::client::references;
use crate::ending::error::refusal;
use crate::render::labels;

/// Type of the resource caches of images.
const IMAGE_TYPE: &str = "image";

/// Returns the object, or an error that names the list of its kind.
pub(crate) fn found_or_error<T>(item: Option<T>, kind: &str, id: &str) -> anyhow::Result<T> {
    match item {
        Some(item) => Ok(item),
        None => bail!("there is no {kind} {id}; see `gantry list {kind}s`"),
    }
}

/// Streams all items of a list, page by page.
pub(crate) fn pages<T, E>(
    next: impl AsyncFn(String) -> Result<(Vec<T>, String), E>,
) -> impl Stream<Item = Result<T, E>> {
    stream::try_unfold((next, Some(String::new())), async |(next, token)| {
        let Some(token) = token else { return Ok(None) };
        let (items, token) = next(token).await?;
        let page = stream::iter(items.into_iter().map(Ok));
        Ok(Some((page, (next, (!token.is_empty()).then_some(token)))))
    })
    .try_flatten()
}

pub(crate) fn workers(connection: &Connection) -> impl Stream<Item = anyhow::Result<Worker>> {
    pages(async |page_token| {
        let request = ListWorkersRequest { page_size: 0, page_token };
        let client = connection.workers();
        let page = connection.repeat(Service::Scheduler, "cannot list workers", async || {
            client.clone().list_workers(request.clone()).await
        });
        page.await.map(|page| (page.workers, page.next_page_token))
    })
}

/// Selection of workloads. The default selects all workloads of the team.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkloadFilter {
    pub(crate) state: WorkloadState,
    pub(crate) outcome: Outcome,
    /// Only workloads that have not ended.
    pub(crate) unfinished: bool,
}

pub(crate) fn workloads(
    connection: &Connection,
    filter: WorkloadFilter,
) -> impl Stream<Item = anyhow::Result<Workload>> {
    pages(async move |page_token| {
        let request = ListRequest {
            team: connection.team.clone(),
            state: filter.state.into(),
            outcome: filter.outcome.into(),
            unfinished: filter.unfinished,
            page_size: 0,
            page_token,
        };
        let client = connection.workloads();
        let page = connection.repeat(Service::Scheduler, "cannot list workloads", async || {
            client.clone().list(request.clone()).await
        });
        page.await.map(|page| (page.workloads, page.next_page_token))
    })
}

pub(crate) fn artifacts(connection: &Connection, state: i32) -> impl Stream<Item = anyhow::Result<Artifact>> {
    pages(async move |page_token| {
        let team = connection.team.clone();
        let request = ListArtifactsRequest { team, state, page_token, ..ListArtifactsRequest::default() };
        let client = connection.artifacts();
        let page = connection.repeat(Service::ArtifactStore, "cannot list artifacts", async || {
            client.clone().list_artifacts(request.clone()).await
        });
        page.await.map(|page| (page.artifacts, page.next_page_token))
    })
}

/// Lists the ids of workers that are not in contact, cordoned or retiring.
pub(crate) async fn unreliable_workers(connection: &Connection) -> anyhow::Result<Vec<String>> {
    let others = workers(connection)
        .try_filter(|worker| std::future::ready(!is_reliable(worker)))
        .map_ok(|worker| worker.worker_id);
    others.try_collect().await
}

/// Returns whether a worker is in contact and neither cordoned nor retiring.
pub(crate) fn is_reliable(worker: &Worker) -> bool {
    worker.state() == WorkerState::Running && worker.desired() == DesiredWorkerState::Run
}

/// Streams the artifacts of the team that have no replica on any worker other than these.
pub(crate) fn at_risk(
    connection: &Connection,
    workers: Vec<String>,
) -> impl Stream<Item = anyhow::Result<Artifact>> {
    pages(async move |page_token| {
        let request = ListAtRiskRequest {
            team: connection.team.clone(),
            worker_ids: workers.clone(),
            page_size: 0,
            page_token,
            all_teams: false,
        };
        let client = connection.inventory();
        let doing = "cannot list artifacts at risk";
        let page = connection.repeat(Service::ArtifactStore, doing, async || {
            client.clone().list_at_risk(request.clone()).await
        });
        page.await.map(|page| (page.artifacts, page.next_page_token))
    })
}

pub(crate) fn volumes(connection: &Connection, state: i32) -> impl Stream<Item = anyhow::Result<Volume>> {
    pages(async move |page_token| {
        let request = ListVolumesRequest { state, page_token, ..ListVolumesRequest::default() };
        let client = connection.inventory();
        let page = connection.repeat(Service::ArtifactStore, "cannot list volumes", async || {
            client.clone().list_volumes(request.clone()).await
        });
        page.await.map(|page| (page.volumes, page.next_page_token))
    })
}

pub(crate) fn containers(
    connection: &Connection,
    state: i32,
) -> impl Stream<Item = anyhow::Result<Container>> {
    pages(async move |page_token| {
        let request = ListContainersRequest { state, page_token, ..ListContainersRequest::default() };
        let client = connection.inventory();
        let page = connection.repeat(Service::ArtifactStore, "cannot list containers", async || {
            client.clone().list_containers(request.clone()).await
        });
        page.await.map(|page| (page.containers, page.next_page_token))
    })
}

/// Reads one worker. `doing` is the verb for the error text.
pub(crate) async fn worker(connection: &Connection, doing: &str, worker: &str) -> anyhow::Result<Worker> {
    let request = GetWorkerRequest { worker: worker.to_owned() };
    let client = connection.workers();
    let doing = format!("cannot {doing} worker {worker}");
    let response = connection
        .repeat(Service::Scheduler, &doing, async || client.clone().get_worker(request.clone()).await)
        .await?;
    found_or_error(response.worker, "worker", worker)
}

/// Reads one workload, by a reference to it. `doing` is the verb for the error text.
pub(crate) async fn workload(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<Workload> {
    let id = &references::workload_id(connection, doing, reference).await?;
    let request = GetRequest { team: connection.team.clone(), workload_id: id.clone() };
    let client = connection.workloads();
    let doing = format!("cannot {doing} workload {id}");
    let response = connection
        .repeat(Service::Scheduler, &doing, async || client.clone().get(request.clone()).await)
        .await?;
    found_or_error(response.workload, "workload", id)
}

pub(crate) async fn artifact(connection: &Connection, id: &str) -> anyhow::Result<Artifact> {
    let request = GetArtifactRequest { team: connection.team.clone(), artifact_id: id.to_owned() };
    let client = connection.artifacts();
    let doing = format!("cannot show artifact {id}");
    let response = connection
        .repeat(Service::ArtifactStore, &doing, async || client.clone().get_artifact(request.clone()).await)
        .await?;
    found_or_error(response.artifact, "artifact", id)
}

/// Describes the worker of a workload. Empty: the worker runs normally, or the workload has none.
pub(crate) async fn standing(connection: &Connection, of: &Workload) -> anyhow::Result<String> {
    let Some(there) = of.location.as_ref().filter(|_| labels::holds_lease(of.state())) else {
        return Ok(String::new());
    };
    let worker = match worker(connection, "show", &there.worker_id).await {
        Ok(worker) => worker,
        // The worker was removed a moment ago, and the workload runs elsewhere.
        Err(error) if refusal(&error).is_some_and(|refusal| refusal.is(Reason::WorkerNotFound)) => {
            return Ok(String::new());
        }
        Err(error) => return Err(error),
    };
    Ok(match worker.state() {
        WorkerState::Running if worker.desired() == DesiredWorkerState::Run => String::new(),
        WorkerState::Running => labels::standing(&worker),
        _ => labels::silent(&worker),
    })
}

pub(crate) async fn volume(connection: &Connection, handle: &str) -> anyhow::Result<Volume> {
    let request = GetVolumeRequest { volume_handle: handle.to_owned() };
    let client = connection.inventory();
    let doing = format!("cannot show volume {handle}");
    let response = connection
        .repeat(Service::ArtifactStore, &doing, async || client.clone().get_volume(request.clone()).await)
        .await?;
    found_or_error(response.volume, "volume", handle)
}

pub(crate) async fn container(connection: &Connection, handle: &str) -> anyhow::Result<Container> {
    let request = GetContainerRequest { container_handle: handle.to_owned() };
    let client = connection.inventory();
    let doing = format!("cannot show container {handle}");
    let response = connection
        .repeat(Service::ArtifactStore, &doing, async || client.clone().get_container(request.clone()).await)
        .await?;
    found_or_error(response.container, "container", handle)
}

/// Returns the number of bytes that collected volumes free. Artifacts have no bytes besides those
/// of their volumes.
pub(crate) fn freed(response: &CollectResponse) -> u64 {
    let volumes = response.collected.iter().filter(|collected| collected.kind() == ObjectKind::Volume);
    volumes.map(|volume| volume.size_bytes).sum()
}

/// Streams the images of the cluster that the team may use, with those that are being pulled.
pub(crate) fn images(connection: &Connection) -> impl Stream<Item = anyhow::Result<ResourceCache>> {
    let caches = pages(async move |page_token| {
        let request = ListResourceCachesRequest { team: connection.team.clone(), page_size: 0, page_token };
        let client = connection.caches();
        let page = connection.repeat(Service::ArtifactStore, "cannot list images", async || {
            client.clone().list_resource_caches(request.clone()).await
        });
        page.await.map(|page| (page.caches, page.next_page_token))
    });
    caches.try_filter(|cache| std::future::ready(cache.r#type == IMAGE_TYPE))
}

/// Streams the orphans on one worker. An empty id means all workers.
pub(crate) fn orphans(
    connection: &Connection,
    worker_id: String,
) -> impl Stream<Item = anyhow::Result<Orphan>> {
    pages(async move |page_token| {
        let request = ListOrphansRequest { worker_id: worker_id.clone(), page_size: 0, page_token };
        let client = connection.inventory();
        let doing = "cannot list orphans";
        let page = connection.repeat(Service::ArtifactStore, doing, async || {
            client.clone().list_orphans(request.clone()).await
        });
        page.await.map(|page| (page.orphans, page.next_page_token))
    })
}

/// Returns the id of the container of a service, and of its main process.
pub(crate) fn container_of_service(
    workload: &Workload,
    attempt: &str,
    service: &str,
) -> anyhow::Result<AttemptId> {
    let id = &workload.workload_id;
    let services = workload.spec.iter().flat_map(|spec| &spec.services);
    let names: Vec<_> = services.map(|service| service.name.as_str()).collect();
    // The spec of a finished workload may be abridged.
    let is_complete = !workload.abridged || !names.is_empty();
    if is_complete && !names.contains(&service) {
        let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        bail!("workload {id} has no service {service:?}; its services: {names}");
    }
    let attempt: AttemptId = attempt.parse().context("the scheduler named an attempt with an invalid id")?;
    Ok(attempt.service(service))
}

/// Returns the handle of an orphan.
pub(crate) fn orphan_handle(one: &Orphan) -> &str {
    if one.volume_handle.is_empty() { &one.container_handle } else { &one.volume_handle }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_pages_are_streamed() {
        let all = pages(async |token: String| {
            anyhow::Ok(match token.as_str() {
                "" => (vec![1, 2], "more".to_owned()),
                "more" => (vec![], "last".to_owned()),
                _ => (vec![3], String::new()),
            })
        });
        assert_eq!(all.try_collect::<Vec<i32>>().await.expect("listed"), [1, 2, 3]);
    }
}
