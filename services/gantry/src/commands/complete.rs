//! `gantry complete-words`: names and ids of a cluster for the scripts of `gantry completion`.
//!
//! The command prints one word per line. It never starts a cluster, and prints no errors: a shell
//! that waits for Tab has no place for them.

use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use futures::{StreamExt, TryStreamExt};
use rpc::pb::artifacts::{ArtifactState, ListArtifactsRequest};
use rpc::pb::scheduler::{ListRequest, ListWorkersRequest};
use tokio::time::timeout;
use tonic::Status;

use crate::cli::args::{Cli, CompleteArgs, Global};
use crate::cli::contexts::{self, Contexts, LOCAL, Sources};
use crate::cli::words::{self, Object, Unfinished};
use crate::client::connect::Connection;
use crate::client::images::{familiar, split};
use crate::client::queries;
use crate::render::stdout::print;

/// Time limit for a cluster to answer.
const PATIENCE: Duration = Duration::from_millis(900);
/// Maximum number of objects of one kind.
const LIMIT: u32 = 200;

/// Executes `gantry complete-words`.
pub(crate) async fn complete(args: &CompleteArgs) -> anyhow::Result<()> {
    let mut command = Cli::command();
    command.build();
    let line = match &args.line {
        Some(line) => words::of_line(line),
        None => args.words.clone(),
    };
    let Some(Unfinished { object, selecting }) = words::parse(&command, &line) else { return Ok(()) };
    let found = timeout(PATIENCE, find(object, selecting)).await;
    let mut words = found.ok().and_then(Result::ok).unwrap_or_default();
    let last = line.last().map_or("", String::as_str);
    // A shell inserts the words as they are.
    let is_harmless = |c: char| c.is_ascii_alphanumeric() || "._:@/+-".contains(c);
    words.retain(|word| word.starts_with(last) && word.chars().all(is_harmless));
    words.sort_unstable();
    words.dedup();
    print(&words.iter().map(|word| format!("{word}\n")).collect::<String>())
}

async fn find(object: Object, selecting: Vec<String>) -> anyhow::Result<Vec<String>> {
    let contexts = Contexts::read(&Contexts::path()?)?;
    if object == Object::Context {
        return Ok(contexts.contexts.into_keys().chain([LOCAL.to_owned()]).collect());
    }
    let Some(connection) = Connection::observe(&cluster(selecting, &contexts)?)? else {
        return Ok(Vec::new());
    };
    Ok(match object {
        Object::Workload => workloads(&connection, false).await?,
        Object::UnfinishedWorkload => workloads(&connection, true).await?,
        Object::Artifact => artifacts(&connection).await?,
        Object::Worker => workers(&connection).await?,
        Object::Context => Vec::new(),
        Object::Any => {
            let all =
                tokio::try_join!(workloads(&connection, false), artifacts(&connection), workers(&connection));
            let (workloads, artifacts, workers) = all?;
            let images = queries::images(&connection).take(LIMIT as usize);
            let images = images.map_ok(|image| familiar(split(&image).0).to_owned()).try_collect().await?;
            [workloads, artifacts, workers, images].concat()
        }
    })
}

/// Returns the options that the unfinished command line would have.
fn cluster(selecting: Vec<String>, contexts: &Contexts) -> anyhow::Result<Global> {
    let line = ["gantry".to_owned()].into_iter().chain(selecting).chain(["version".to_owned()]);
    let matches = Cli::command().try_get_matches_from(line)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    contexts::apply(&mut cli.global, Sources::of(&matches), contexts)?;
    Ok(cli.global)
}

/// Lists the newest workloads: names, and ids of those that have none.
async fn workloads(connection: &Connection, unfinished: bool) -> Result<Vec<String>, Status> {
    let request =
        ListRequest { team: connection.team.clone(), unfinished, page_size: LIMIT, ..ListRequest::default() };
    let listed = connection.workloads().list(request).await?.into_inner().workloads;
    let name = |workload: rpc::pb::scheduler::Workload| match workload.spec {
        Some(spec) if !spec.name.is_empty() => spec.name,
        _ => workload.workload_id,
    };
    Ok(listed.into_iter().map(name).collect())
}

async fn artifacts(connection: &Connection) -> Result<Vec<String>, Status> {
    let request = ListArtifactsRequest {
        team: connection.team.clone(),
        state: ArtifactState::Sealed.into(),
        page_size: LIMIT,
        ..ListArtifactsRequest::default()
    };
    let listed = connection.artifacts().list_artifacts(request).await?.into_inner().artifacts;
    Ok(listed.into_iter().map(|artifact| artifact.artifact_id).collect())
}

async fn workers(connection: &Connection) -> Result<Vec<String>, Status> {
    let request = ListWorkersRequest { page_size: LIMIT, page_token: String::new() };
    let listed = connection.workers().list_workers(request).await?.into_inner().workers;
    Ok(listed.into_iter().map(|worker| worker.name).collect())
}
