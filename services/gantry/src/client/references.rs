//! References to workloads, artifacts, volumes and containers: the text by which a person names
//! one.
//!
//! A whole id needs no call. The scheduler decides what any other reference to a workload stands
//! for, and the artifact store lists the other objects whose ids begin with a text. A reference
//! that stands for several objects is rejected with their list.

use anyhow::bail;
use domain::{ArtifactId, ContainerHandle, VolumeHandle, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts::{
    Artifact, Container, ListArtifactsRequest, ListContainersRequest, ListVolumesRequest, Volume,
};
use rpc::pb::scheduler::{FindRequest, GetRequest, Workload, WorkloadState};

use crate::client::connect::{Connection, Service};
use crate::ending::error::refusal;
use crate::render::labels;
use crate::render::listing::{abbreviate, without_empty};
use crate::render::table::{bytes, plain};

/// Maximum number of objects in an error.
const LIST_LIMIT: u32 = 20;

/// No object has an id that begins with the reference.
#[derive(Debug, thiserror::Error)]
#[error("no {} has an id that begins with {reference:?}; see `gantry list {}`", words(kind).0, words(kind).1)]
pub(crate) struct NoMatch {
    kind: &'static str,
    reference: String,
}

/// Returns words for the objects of a kind, and for their list.
fn words(kind: &str) -> (&'static str, &'static str) {
    match kind {
        "artifact" => ("artifact of this team", "artifacts"),
        "volume" => ("volume", "volumes"),
        "container" => ("container", "containers"),
        _ => ("orphan", "volumes --orphans"),
    }
}

/// The workload exists, but has no such output.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoOutput(String);

/// Returns what was looked up. `None`: there is no such object, or the text cannot be a reference
/// to one.
pub(crate) fn known<T>(looked_up: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    const UNKNOWN: [Reason; 6] = [
        Reason::WorkloadNotFound,
        Reason::ArtifactNotFound,
        Reason::WorkerNotFound,
        Reason::VolumeNotFound,
        Reason::ContainerNotFound,
        Reason::InvalidField,
    ];
    match looked_up {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is::<NoMatch>() => Ok(None),
        Err(error) if refusal(&error).is_some_and(|refused| UNKNOWN.iter().any(|why| refused.is(*why))) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Returns the id of the workload that a reference stands for. `doing` is the verb for the error
/// text.
pub(crate) async fn workload_id(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<String> {
    if let Ok(id) = reference.parse::<WorkloadId>() {
        return Ok(id.to_string());
    }
    let request = FindRequest { team: connection.team.clone(), reference: reference.to_owned() };
    let client = connection.workloads();
    let failed = format!("cannot {doing} workload {reference}");
    let found = connection
        .repeat(Service::Scheduler, &failed, async || client.clone().find(request.clone()).await)
        .await?;
    match found.workloads.as_slice() {
        [one] => Ok(one.workload_id.clone()),
        several => bail!(
            "{failed}: it stands for {} workloads; give one of these ids\n{}",
            number(several.len(), found.more),
            list(&["ID", "NAME", "STATE", "AGE", "COMMAND"], several.iter().map(workload_row).collect())
        ),
    }
}

/// Returns the id of the artifact whose id begins with `reference`, or of the output
/// `WORKLOAD:OUTPUT`. `doing` is the verb for the error text.
pub(crate) async fn artifact_id(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<ArtifactId> {
    if let Ok(id) = reference.parse() {
        return Ok(id);
    }
    if let Some((workload, output)) = reference.split_once(':') {
        return output_of(connection, doing, workload, output).await;
    }
    let request = ListArtifactsRequest {
        team: connection.team.clone(),
        id_prefix: reference.to_owned(),
        page_size: LIST_LIMIT,
        ..ListArtifactsRequest::default()
    };
    let client = connection.artifacts();
    let wanted = Wanted { doing, kind: "artifact", reference };
    let id = wanted.only(["ID", "STATE", "SIZE", "AGE", "LABEL"], artifact_row, async |failed| {
        let calls = async || client.clone().list_artifacts(request.clone()).await;
        let page = connection.repeat(Service::ArtifactStore, failed, calls).await?;
        Ok((page.artifacts, page.next_page_token))
    });
    Ok(id.await?.parse()?)
}

/// Returns the handle of the volume whose handle begins with `reference`. `doing` is the verb for
/// the error text.
pub(crate) async fn volume_handle(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<String> {
    if let Ok(handle) = reference.parse::<VolumeHandle>() {
        return Ok(handle.to_string());
    }
    let request = ListVolumesRequest {
        id_prefix: reference.to_owned(),
        page_size: LIST_LIMIT,
        ..ListVolumesRequest::default()
    };
    let client = connection.inventory();
    let wanted = Wanted { doing, kind: "volume", reference };
    let handle = wanted.only(["HANDLE", "STATE", "FOR", "SIZE", "AGE"], volume_row, async |failed| {
        let calls = async || client.clone().list_volumes(request.clone()).await;
        let page = connection.repeat(Service::ArtifactStore, failed, calls).await?;
        Ok((page.volumes, page.next_page_token))
    });
    handle.await
}

/// Returns the handle of the container whose handle begins with `reference`. `doing` is the verb
/// for the error text.
pub(crate) async fn container_handle(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<String> {
    if let Ok(handle) = reference.parse::<ContainerHandle>() {
        return Ok(handle.to_string());
    }
    let request = ListContainersRequest {
        id_prefix: reference.to_owned(),
        page_size: LIST_LIMIT,
        ..ListContainersRequest::default()
    };
    let client = connection.inventory();
    let wanted = Wanted { doing, kind: "container", reference };
    let handle = wanted.only(["HANDLE", "STATE", "AGE", "WORKLOAD"], container_row, async |failed| {
        let calls = async || client.clone().list_containers(request.clone()).await;
        let page = connection.repeat(Service::ArtifactStore, failed, calls).await?;
        Ok((page.containers, page.next_page_token))
    });
    handle.await
}

/// Reference to an object of the artifact store, with the words for errors.
pub(crate) struct Wanted<'a> {
    /// Verb.
    pub(crate) doing: &'a str,
    /// Kind of object, in the singular.
    pub(crate) kind: &'static str,
    pub(crate) reference: &'a str,
}

impl Wanted<'_> {
    /// Returns the id of the only object whose id begins with the reference. `list` takes the text
    /// for errors, and returns the first page of these objects. The first column of `row` is the
    /// id.
    pub(crate) async fn only<T, const N: usize>(
        &self,
        headers: [&str; N],
        row: fn(&T) -> Vec<String>,
        list: impl AsyncFnOnce(&str) -> anyhow::Result<(Vec<T>, String)>,
    ) -> anyhow::Result<String> {
        let Self { doing, kind, reference } = self;
        let failed = format!("cannot {doing} {kind} {reference}");
        let is_prefix = rpc::spec::name::id_range(reference).is_some();
        let (found, next) = if is_prefix { list(&failed).await? } else { (Vec::new(), String::new()) };
        let mut rows: Vec<_> = found.iter().map(row).collect();
        match rows.len() {
            0 => {
                let none = NoMatch { kind, reference: (*reference).to_owned() };
                Err(anyhow::Error::from(none).context(failed))
            }
            1 => Ok(rows.remove(0).remove(0)),
            several => bail!(
                "{failed}: {} {kind}s have an id that begins with it; give one of these ids\n{}",
                number(several, !next.is_empty()),
                self::list(&headers, rows)
            ),
        }
    }
}

/// Returns the id of the artifact of an output.
async fn output_of(
    connection: &Connection,
    doing: &str,
    reference: &str,
    output: &str,
) -> anyhow::Result<ArtifactId> {
    let failed = format!("cannot {doing} output {output:?} of workload {reference}");
    let workload_id = workload_id(connection, &format!("{doing} an output of"), reference).await?;
    let request = GetRequest { team: connection.team.clone(), workload_id };
    let client = connection.workloads();
    let found = connection
        .repeat(Service::Scheduler, &failed, async || client.clone().get(request.clone()).await)
        .await?;
    let workload = found.workload.unwrap_or_default();
    let published = workload.outputs.iter().find(|published| published.name == output);
    if let Some(published) = published {
        return Ok(published.artifact_id.parse()?);
    }
    if workload.state() != WorkloadState::Finished {
        let none = NoOutput(format!(
            "the workload has not ended; `gantry exec {reference} -- cat PATH` reads a file of its container"
        ));
        return Err(anyhow::Error::from(none).context(failed));
    }
    let names: Vec<_> = workload.outputs.iter().map(|published| published.name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let none = NoOutput(format!("the workload has no such output; its outputs: {names}"));
    Err(anyhow::Error::from(none).context(failed))
}

fn number(listed: usize, more: bool) -> String {
    if more { format!("more than {listed}") } else { listed.to_string() }
}

/// Formats the objects that a reference stands for.
fn list(headers: &[&str], mut rows: Vec<Vec<String>>) -> String {
    abbreviate(&mut rows, 0);
    without_empty(headers, rows).trim_end().to_owned()
}

fn workload_row(workload: &Workload) -> Vec<String> {
    vec![
        workload.workload_id.clone(),
        workload.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default(),
        labels::outcome(workload.outcome()).unwrap_or(labels::workload_state(workload.state())).to_owned(),
        labels::ago(workload.submitted_at.as_ref()),
        plain(&labels::command(workload.spec.as_ref()), 40),
    ]
}

fn artifact_row(artifact: &Artifact) -> Vec<String> {
    vec![
        artifact.artifact_id.clone(),
        labels::artifact_state(artifact.state()).to_owned(),
        bytes(artifact.size_bytes),
        labels::ago(artifact.created_at.as_ref()),
        plain(&artifact.label, 30),
    ]
}

fn volume_row(volume: &Volume) -> Vec<String> {
    vec![
        volume.volume_handle.clone(),
        labels::inventory_state(volume.state()).to_owned(),
        labels::purpose(volume.purpose()),
        labels::size(volume.size_bytes),
        labels::ago(volume.created_at.as_ref()),
    ]
}

fn container_row(container: &Container) -> Vec<String> {
    vec![
        container.container_handle.clone(),
        labels::inventory_state(container.state()).to_owned(),
        labels::ago(container.created_at.as_ref()),
        container.workload_id.clone(),
    ]
}
