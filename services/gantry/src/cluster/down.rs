//! `gantry down`: stops the workloads and the cluster on this machine, and waits for its end.

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, bail};
use rpc::client::{Outgoing, peer};
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::local::{GetStatusRequest, ShutdownRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::json;

use super::{Paths, lock, start};
use crate::cli::args::DownArgs;
use crate::ending::error::refused;
use crate::render::stdout::print_json;
use crate::render::table::count;
use crate::render::ui::Ui;

/// Time limit for the cluster to stop its workloads.
const DEADLINE: Duration = Duration::from_secs(60);
/// Time limit for the cluster to answer before `--force` kills its process.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the process to end after that.
const PATIENCE: Duration = Duration::from_secs(30);

/// Executes `gantry down`.
pub(crate) async fn down(args: &DownArgs, ui: &Ui, as_json: bool) -> anyhow::Result<()> {
    let paths = Paths::find()?;
    let Some(endpoint) = start::running(&paths) else {
        let Some(process) = Process::of(&paths)? else {
            ui.note("no cluster runs on this machine");
            return answer(as_json, false, 0, 0);
        };
        // The cluster is ending, or hangs.
        if process.ends_within(if args.force { Duration::from_secs(1) } else { PATIENCE }).await {
            return answer(as_json, true, 0, 0);
        }
        if !args.force {
            bail!("the cluster (process {}) does not answer; kill it with `gantry down --force`", process.id);
        }
        return kill(&process, ui, as_json).await;
    };

    let process = Process::of(&paths)?;
    let mut cluster = ClusterClient::new(peer(&endpoint, Outgoing::internal())?);
    if args.force
        && let Some(process) = &process
        && tokio::time::timeout(ANSWER_LIMIT, cluster.get_status(GetStatusRequest {})).await.is_err()
    {
        return kill(process, ui, as_json).await;
    }
    let asked = cluster.shutdown(ShutdownRequest { force: args.force });
    let response = match (tokio::time::timeout(DEADLINE, asked).await, process.as_ref()) {
        (Ok(response), _) => response.map_err(refused("cannot stop the cluster"))?.into_inner(),
        (Err(_), Some(process)) if args.force => return kill(process, ui, as_json).await,
        (Err(_), _) => {
            bail!("the workloads of the cluster do not stop; kill them with `gantry down --force`")
        }
    };
    if response.cancelled > 0 {
        ui.note(&format!("cancelled {}", count(response.cancelled.into(), "workload")));
    }
    if response.unfinished > 0 {
        ui.warn(&format!(
            "{} did not end in time; the next cluster takes over",
            count(response.unfinished.into(), "workload")
        ));
    }
    if let Some(process) = process
        && !process.ends_within(PATIENCE).await
    {
        bail!(
            "the cluster has stopped its workloads but does not end; see its log {}",
            paths.log().display()
        );
    }
    ui.note("the cluster has ended");
    answer(as_json, true, response.cancelled, response.unfinished)
}

async fn kill(process: &Process, ui: &Ui, as_json: bool) -> anyhow::Result<()> {
    process.kill()?;
    if !process.ends_within(PATIENCE).await {
        bail!("cannot kill the cluster (process {})", process.id);
    }
    ui.note("killed the cluster, which did not answer; the next cluster takes over its containers");
    answer(as_json, true, 0, 0)
}

/// Prints the result, if JSON is requested.
fn answer(as_json: bool, was_running: bool, cancelled: u32, unfinished: u32) -> anyhow::Result<()> {
    if !as_json {
        return Ok(());
    }
    print_json(&json!({ "was_running": was_running, "cancelled": cancelled, "unfinished": unfinished }))
}

/// Process of a cluster.
struct Process {
    id: u32,
    fd: OwnedFd,
}

impl Process {
    /// Opens the process that holds the lock. `None`: no process holds it.
    ///
    /// The holder is read again after the process is opened, so a new process with the same number
    /// is not mistaken for it.
    fn of(paths: &Paths) -> anyhow::Result<Option<Self>> {
        let Some(holder) = lock::holder(&paths.lock()) else { return Ok(None) };
        let id = holder.process_id;
        let pid = i32::try_from(id)
            .ok()
            .and_then(Pid::from_raw)
            .context("the lock file has no valid process id")?;
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot watch the cluster (process {id})"));
            }
        };
        Ok((lock::holder(&paths.lock()) == Some(holder)).then_some(Self { id, fd }))
    }

    /// Waits until the process ends, and returns whether it ended in time. The lock is released
    /// earlier, while other files are still open.
    async fn ends_within(&self, patience: Duration) -> bool {
        let ended = async {
            while !self.has_ended() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(patience, ended).await.is_ok()
    }

    fn has_ended(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // The descriptor is readable once the process has ended.
        matches!(poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&at_once)), Ok(1..))
    }

    fn kill(&self) -> anyhow::Result<()> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            // The process has ended already.
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot kill the cluster"),
        }
    }
}
