//! Start of the cluster on this machine when a command needs it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use rpc::client::{Outgoing, peer};
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::local::{GetStatusRequest, GetStatusResponse};
use rpc::pb::scheduler::ListWorkersRequest;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rustix::net::sockopt::socket_peercred;
use tokio::time::Instant;

use super::{ANOTHER_RUNS, HOLDS_DESTRUCTION, Paths, lock, paths, paths::endpoint};
use crate::render::ui::Ui;

/// Time limit for a cluster to answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for which commands wait for the worker of a new cluster.
const WORKER_PATIENCE: Duration = Duration::from_secs(2);
/// Interval between two polls of a new cluster.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Size in bytes above which the log is rotated before a start.
const MAX_LOG_BYTES: u64 = 8 << 20;
/// Number of log lines that are shown when a start fails.
const SHOWN_LINES: usize = 15;

/// Returns the address of the cluster on this machine, and starts it if it does not run.
pub(crate) async fn ensure(paths: &Paths, ui: &Ui) -> anyhow::Result<String> {
    if let Some(endpoint) = running(paths) {
        if !lost_its_state(paths, &endpoint).await {
            return Ok(endpoint);
        }
        ui.note("the state directory of the cluster was removed; waiting until that cluster ends");
        let give_up = Instant::now() + PATIENCE;
        while running(paths).is_some() && Instant::now() < give_up {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    start(paths, ui).await.context("cannot start a cluster on this machine")
}

/// Returns whether the state directory of the cluster at `endpoint` was removed. The cluster
/// notices that and ends.
async fn lost_its_state(paths: &Paths, endpoint: &str) -> bool {
    if lock::holder(&paths.lock()).is_some() {
        return false;
    }
    let Ok(peer) = peer(endpoint, Outgoing::internal()) else { return false };
    let mut cluster = ClusterClient::new(peer);
    // The next call reports a cluster that hangs.
    let status = tokio::time::timeout(PATIENCE, cluster.get_status(GetStatusRequest {})).await;
    let status = status.ok().and_then(Result::ok);
    status.is_some_and(|status| status.into_inner().state_directory == paths.state.display().to_string())
}

/// Returns the address of the cluster on this machine, if one listens.
pub(crate) fn running(paths: &Paths) -> Option<String> {
    if listens(&paths.socket()) {
        return Some(paths.endpoint());
    }
    // The cluster may have been started with another runtime directory.
    let socket = lock::holder(&paths.lock())?.socket;
    listens(&socket).then(|| endpoint(&socket))
}

/// Returns whether a cluster of this user listens on a socket.
///
/// The socket file of a killed process may still exist. A socket in a directory that other users
/// can write may belong to them, so it is not used.
pub(crate) fn listens(socket: &Path) -> bool {
    let is_ours = |stream: UnixStream| {
        socket_peercred(&stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
    };
    socket.parent().is_some_and(paths::only_we_write) && UnixStream::connect(socket).is_ok_and(is_ours)
}

async fn start(paths: &Paths, ui: &Ui) -> anyhow::Result<String> {
    paths.make()?;
    ui.note(&format!("starting a cluster on this machine; its log is {}", paths.log().display()));
    let give_up = Instant::now() + PATIENCE;
    loop {
        let mut child = Starting::spawn(paths)?;
        loop {
            if let Some(endpoint) = running(paths)
                && let Some(status) = child.answers(&endpoint).await?
            {
                for line in &status.recovered {
                    ui.note(line);
                }
                if status.holds_destruction {
                    ui.warn(HOLDS_DESTRUCTION);
                }
                await_worker(&endpoint).await?;
                return Ok(endpoint);
            }
            match child.exit_code()? {
                None => {}
                // Another command was faster, or the last cluster has not ended yet.
                Some(code) if code == i32::from(ANOTHER_RUNS) => break,
                Some(_) => bail!("the cluster ended at once{}", child.log_end()),
            }
            if Instant::now() >= give_up {
                bail!("the cluster does not answer after {} s{}", PATIENCE.as_secs(), child.log_end());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        if Instant::now() >= give_up {
            bail!("another cluster holds the lock and does not answer; see `gantry status`");
        }
    }
}

/// Returns whether a variable is a setting of the cluster. Other variables may hold secrets, or
/// name temporary directories.
fn is_for_cluster(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let named = ["HOME", "PATH", "TZ"].contains(&&*name);
    let prefixed = ["GANTRY_", "OTEL_", "RUST_", "XDG_"].iter().any(|prefix| name.starts_with(prefix));
    (named || prefixed) && name != "GANTRY_SERVER"
}

/// Waits a moment for the worker of the cluster. Without a worker, the scheduler cannot reject a
/// command as unschedulable.
async fn await_worker(endpoint: &str) -> anyhow::Result<()> {
    let mut workers = WorkersClient::new(peer(endpoint, Outgoing::internal())?);
    let give_up = Instant::now() + WORKER_PATIENCE;
    while Instant::now() < give_up {
        let listed = workers.list_workers(ListWorkersRequest { page_size: 1, ..Default::default() }).await;
        if listed.is_ok_and(|listed| !listed.into_inner().workers.is_empty()) {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

/// Cluster process that does not answer yet.
struct Starting {
    child: Child,
    log: File,
    /// Length of the log before the start, in bytes.
    from: u64,
}

impl Starting {
    fn spawn(paths: &Paths) -> anyhow::Result<Self> {
        let path = paths.log();
        if path.metadata().is_ok_and(|metadata| metadata.len() > MAX_LOG_BYTES) {
            // If the rename fails, the log keeps growing.
            _ = std::fs::rename(&path, path.with_extension("log.1"));
        }
        let mut log = File::options()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        let from = log.seek(SeekFrom::End(0))?;
        let program = std::env::current_exe().context("cannot find the path of this program")?;
        let child = Command::new(program)
            .args(["up", "--detached"])
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| is_for_cluster(name)))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log.try_clone()?)
            .spawn()
            .context("cannot start this program again")?;
        Ok(Self { child, log, from })
    }

    fn exit_code(&mut self) -> anyhow::Result<Option<i32>> {
        Ok(self.child.try_wait()?.map(|status| status.code().unwrap_or(-1)))
    }

    /// Returns the status of the cluster if it answers. The cluster may still be starting, or may
    /// be the last one that is ending.
    async fn answers(&mut self, endpoint: &str) -> anyhow::Result<Option<GetStatusResponse>> {
        let mut cluster = ClusterClient::new(peer(endpoint, Outgoing::internal())?);
        let asked = tokio::time::timeout(PATIENCE, cluster.get_status(GetStatusRequest {}));
        let mut asked = std::pin::pin!(asked);
        loop {
            tokio::select! {
                answer = &mut asked => return Ok(answer.ok().and_then(Result::ok).map(tonic::Response::into_inner)),
                () = tokio::time::sleep(Duration::from_millis(50)) => {
                    // The log says why the process ended. If another cluster holds the lock, that
                    // one may still answer.
                    if self.exit_code()?.is_some_and(|code| code != i32::from(ANOTHER_RUNS)) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Returns the last lines of the log, for the end of a sentence.
    fn log_end(&mut self) -> String {
        let mut text = Vec::new();
        if self.log.seek(SeekFrom::Start(self.from)).is_ok() {
            // An unreadable log is shown as empty.
            _ = self.log.read_to_end(&mut text);
        }
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let end = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
        if end.is_empty() { String::new() } else { format!("; its log ends with\n  {}", end.join("\n  ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_inherits_only_settings() {
        for name in ["HOME", "PATH", "XDG_STATE_HOME", "GANTRY_LOG", "OTEL_SERVICE_NAME", "RUST_BACKTRACE"] {
            assert!(is_for_cluster(OsStr::new(name)), "{name}");
        }
        for name in ["GANTRY_SERVER", "TMPDIR", "LD_PRELOAD", "AWS_SECRET_ACCESS_KEY", "PATHS"] {
            assert!(!is_for_cluster(OsStr::new(name)), "{name}");
        }
    }
}
