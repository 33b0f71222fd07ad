//! `gantry explain`: why a workload waits, what a lease is for, and why other objects are kept or
//! were deleted.

mod lease;
mod store;
mod workload;

use anyhow::bail;
use rpc::Reason;
use rpc::pb::scheduler::WaitingWorkload;
use rpc::pb::scheduler::explain_request::Subject;

use crate::cli::args::ExplainArgs;
use crate::cli::values;
use crate::client::connect::Connection;
use crate::client::images::{self, Content};
use crate::client::placement::{self, WorkerChoice};
use crate::client::queries;
use crate::client::references::{self, known};
use crate::ending::error;
use crate::render::stdout::{print, print_json};
use crate::render::{explanation, json};

/// Executes `gantry explain`. The scheduler explains workloads and leases, and the artifact store
/// explains all other objects.
pub(crate) async fn explain(
    connection: &Connection,
    args: &ExplainArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let id = match values::any_id(&args.id) {
        Ok(id) => id,
        Err(_) => match known(queries::worker(connection, "explain", &args.id).await)? {
            Some(worker) => return store::explain(connection, &worker.worker_id, as_json).await,
            None => named(connection, &args.id).await?,
        },
    };
    let id = id.as_str();
    let workers = WorkerChoice { most: args.workers, only: args.only.clone() };
    let waiting = WaitingWorkload { team: connection.team.clone(), workload_id: id.to_owned() };
    match placement::explain(connection, Subject::Workload(waiting), &workers).await {
        Err(error) if is_for(&error, Reason::WorkloadNotFound) => {
            if lease::explain(connection, id, as_json).await? {
                return Ok(());
            }
            store::explain(connection, id, as_json).await
        }
        Err(error) if is_for(&error, Reason::WorkloadNotQueued) => {
            workload::show(connection, id, as_json).await
        }
        Ok(response) if as_json => print_json(&json::explanation(&response)),
        Ok(response) => print(&explanation::text(&response, true)),
        Err(error) => Err(error),
    }
}

/// Returns the id of the object that `reference` stands for. The object is not a worker.
async fn named(connection: &Connection, reference: &str) -> anyhow::Result<String> {
    let doing = "explain";
    if let Some(id) = known(references::workload_id(connection, doing, reference).await)? {
        return Ok(id);
    }
    let none = match images::content(connection, doing, reference).await? {
        Ok(Content::Artifact(id)) => return Ok(id.to_string()),
        Ok(Content::Images(mut images)) => return Ok(images.remove(0).cache_id),
        Err(none) => none,
    };
    if let Some(handle) = known(references::volume_handle(connection, doing, reference).await)? {
        return Ok(handle);
    }
    if let Some(handle) = known(references::container_handle(connection, doing, reference).await)? {
        return Ok(handle);
    }
    bail!(
        "cannot explain {reference}: no worker, workload, artifact, image, volume or container has this name, or an id that \
         begins with it; {}",
        none.advice("see `gantry list`")
    )
}

fn is_for(error: &anyhow::Error, reason: Reason) -> bool {
    error::refusal(error).is_some_and(|refusal| refusal.is(reason))
}
