//! References to workloads and artifacts: the text by which a person names one.
//!
//! A whole id needs no call. The scheduler decides what any other reference to a workload stands
//! for, and the artifact store lists the artifacts whose ids begin with a text. A reference that
//! stands for several objects is rejected with their list.

use anyhow::bail;
use domain::{ArtifactId, WorkloadId};
use rpc::pb::artifacts::{Artifact, ListArtifactsRequest};
use rpc::pb::scheduler::{FindRequest, GetRequest, Workload, WorkloadState};

use crate::client::connect::{Connection, Service};
use crate::render::labels;
use crate::render::listing::{abbreviate, without_empty};
use crate::render::table::{bytes, plain};

/// Maximum number of artifacts in an error.
const LIST_LIMIT: u32 = 20;

/// No artifact has an id that begins with the reference.
#[derive(Debug, thiserror::Error)]
#[error("no artifact of this team has an id that begins with {0:?}; see `gantry list artifacts`")]
pub(crate) struct NoMatch(String);

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
    let failed = format!("cannot {doing} artifact {reference}");
    if rpc::spec::name::id_range(reference).is_none() {
        return Err(anyhow::Error::from(NoMatch(reference.to_owned())).context(failed));
    }
    let found = connection
        .repeat(Service::ArtifactStore, &failed, async || {
            client.clone().list_artifacts(request.clone()).await
        })
        .await?;
    match found.artifacts.as_slice() {
        [] => Err(anyhow::Error::from(NoMatch(reference.to_owned())).context(failed)),
        [one] => Ok(one.artifact_id.parse()?),
        several => bail!(
            "{failed}: {} artifacts have an id that begins with it; give one of these ids\n{}",
            number(several.len(), !found.next_page_token.is_empty()),
            list(&["ID", "STATE", "SIZE", "AGE", "LABEL"], several.iter().map(artifact_row).collect())
        ),
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
        bail!(
            "{failed}: the workload has not ended; `gantry exec {reference} -- cat PATH` reads a file of its container"
        );
    }
    let names: Vec<_> = workload.outputs.iter().map(|published| published.name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    bail!("{failed}: the workload has no such output; its outputs: {names}")
}

fn number(listed: usize, more: bool) -> String {
    if more { format!("more than {listed}") } else { listed.to_string() }
}

/// Formats the objects that a reference stands for.
fn list(headers: &[&str], mut rows: Vec<Vec<String>>) -> String {
    abbreviate(&mut rows);
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
