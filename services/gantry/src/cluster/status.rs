//! `gantry status`: whether a cluster runs on this machine, and what it does.

use std::time::Duration;

use anyhow::bail;
use rpc::client::{Outgoing, peer};
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::local::{GetStatusRequest, GetStatusResponse};
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{ListWorkersRequest, Worker};
use serde_json::json;

use super::{Paths, idle, lock, start};
use crate::error::refused;
use crate::json as shown;
use crate::stdout::{print, print_json};
use crate::table::{bytes, count, duration, fields};
use crate::words;

/// The exit code when none runs.
const NONE_RUNS: u8 = 1;

/// Shows the cluster. Answers the exit code.
pub(crate) async fn status(as_json: bool) -> anyhow::Result<u8> {
    let paths = Paths::find()?;
    let Some(endpoint) = start::running(&paths) else {
        if let Some(holder) = lock::holder(&paths.lock()) {
            bail!(
                "a cluster runs as process {} and does not answer on {}; if it does not end by itself, kill it, the next one adopts \
                 what it left",
                holder.process_id,
                holder.socket.display()
            );
        }
        if as_json {
            print_json(&json!({ "running": false }))?;
        } else {
            print(
                "no cluster runs on this machine; `gantry run` starts one, `gantry up` keeps one in the foreground\n",
            )?;
        }
        return Ok(NONE_RUNS);
    };
    let peer = peer(&endpoint, Outgoing::internal())?;
    let response = ClusterClient::new(peer.clone()).get_status(GetStatusRequest {}).await;
    let status = response.map_err(refused("cannot ask the cluster"))?.into_inner();
    let workers = WorkersClient::new(peer.clone()).list_workers(ListWorkersRequest::default()).await;
    let workers = workers.map_err(refused("cannot list workers"))?.into_inner().workers;
    let unfinished = idle::unfinished(&peer).await.map_err(refused("cannot list workloads"))?.len();
    if as_json {
        print_json(&as_document(&status, &workers, unfinished))?;
    } else {
        print(&fields(&as_fields(&status, &workers, unfinished)))?;
    }
    Ok(0)
}

fn as_document(status: &GetStatusResponse, workers: &[Worker], unfinished: usize) -> serde_json::Value {
    let seconds = |duration: &prost_types::Duration| duration.seconds;
    json!({
        "running": true,
        "version": status.version,
        "process_id": status.process_id,
        "started_at": status.started_at.as_ref().map(words::instant),
        "state_directory": status.state_directory,
        "endpoints": status.endpoints,
        "idle_for_seconds": status.idle_for.as_ref().map(seconds),
        "idle_end_seconds": status.idle_end.as_ref().map(seconds),
        "recovered": status.recovered,
        "holds_destruction": status.holds_destruction,
        "workloads": unfinished,
        "workers": workers.iter().map(shown::worker).collect::<Vec<_>>(),
    })
}

fn as_fields(
    status: &GetStatusResponse,
    workers: &[Worker],
    unfinished: usize,
) -> Vec<(&'static str, String)> {
    let time = |time: &Option<prost_types::Duration>| {
        time.and_then(|time| Duration::try_from(time).ok()).map(duration)
    };
    let worker = |worker: &Worker| {
        let state = words::worker_state(worker.state());
        let free = bytes(worker.disk_free_bytes);
        format!("{} {state}, {}, {free} free", worker.name, count(worker.active_tasks.into(), "task"))
    };
    let idle = match (time(&status.idle_for), time(&status.idle_end)) {
        (Some(idle), Some(end)) => format!("{idle}, ends after {end} if nothing is kept"),
        (Some(idle), None) => idle,
        (None, _) => String::new(),
    };
    vec![
        ("version", status.version.clone()),
        ("process", status.process_id.to_string()),
        ("running for", words::ago(status.started_at.as_ref())),
        ("listens on", status.endpoints.join("\n")),
        ("state in", status.state_directory.clone()),
        ("workers", workers.iter().map(worker).collect::<Vec<_>>().join("\n")),
        ("workloads", count(unfinished as u64, "unfinished workload")),
        ("idle for", idle),
        ("recovered", status.recovered.join("\n")),
        ("destruction", if status.holds_destruction { "held: what should go stays" } else { "" }.to_owned()),
    ]
}
