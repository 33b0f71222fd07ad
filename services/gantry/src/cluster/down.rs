//! `gantry down`: asks the cluster on this machine to stop what runs and to end, and waits until it has.

use std::time::Duration;

use anyhow::{Context, bail};
use rpc::client::{Outgoing, peer};
use rpc::pb::local::ShutdownRequest;
use rpc::pb::local::cluster_client::ClusterClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::Instant;

use super::{Paths, lock, start};
use crate::args::DownArgs;
use crate::error::refused;
use crate::stdout::print_json;
use crate::table::count;
use crate::ui::Ui;

/// How long the cluster may take to stop what runs.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to end after that.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn down(args: &DownArgs, ui: &Ui, as_json: bool) -> anyhow::Result<()> {
    let paths = Paths::find()?;
    let Some(endpoint) = start::running(&paths) else {
        let Some(holder) = lock::holder(&paths.lock()) else {
            ui.note("no cluster runs on this machine");
            return answer(as_json, false, 0, 0);
        };
        // It is ending, or hangs.
        if wait(&paths, if args.force { Duration::from_secs(1) } else { PATIENCE }).await {
            return answer(as_json, true, 0, 0);
        }
        if !args.force {
            bail!(
                "the cluster, process {}, does not answer; kill it with `gantry down --force`",
                holder.process_id
            );
        }
        kill(holder.process_id)?;
        if wait(&paths, PATIENCE).await {
            ui.note("killed a cluster that did not answer; the next one adopts what it left");
            return answer(as_json, true, 0, 0);
        }
        bail!("the cluster, process {}, cannot be killed", holder.process_id);
    };

    let mut cluster = ClusterClient::new(peer(&endpoint, Outgoing::internal())?);
    let asked = cluster.shutdown(ShutdownRequest { force: args.force });
    let response = match tokio::time::timeout(DEADLINE, asked).await {
        Ok(response) => response.map_err(refused("cannot stop the cluster"))?.into_inner(),
        Err(_) => bail!("the cluster does not stop; `gantry down --force` kills what runs"),
    };
    if response.cancelled > 0 {
        ui.note(&format!("cancelled {}", count(response.cancelled.into(), "workload")));
    }
    if response.unfinished > 0 {
        ui.warn(&format!(
            "{} did not end in time; the next cluster goes on with that",
            count(response.unfinished.into(), "workload")
        ));
    }
    if !wait(&paths, PATIENCE).await {
        bail!("the cluster has stopped what ran and does not end; see {}", paths.log().display());
    }
    ui.note("the cluster has ended");
    answer(as_json, true, response.cancelled, response.unfinished)
}

/// Says it to programs, where they asked.
fn answer(as_json: bool, was_running: bool, cancelled: u32, unfinished: u32) -> anyhow::Result<()> {
    if !as_json {
        return Ok(());
    }
    print_json(&json!({ "was_running": was_running, "cancelled": cancelled, "unfinished": unfinished }))
}

/// Whether the process ended in time.
async fn wait(paths: &Paths, patience: Duration) -> bool {
    let give_up = Instant::now() + patience;
    while lock::is_held(&paths.lock()) {
        if Instant::now() >= give_up {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    true
}

/// Kills the holder of the lock. It holds it, so it is no other process of the same number.
fn kill(process: u32) -> anyhow::Result<()> {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw).context("the lock names no process")?;
    kill_process(process, Signal::KILL).context("cannot kill the cluster")
}
