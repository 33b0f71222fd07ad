//! `gantry up`: runs the four services in one process. They call each other over gRPC, as in
//! production.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use domain::Timestamp;
use rpc::client::{Outgoing, peer};
use rpc::pb::local::GetStatusRequest;
use rpc::pb::local::cluster_client::ClusterClient;
use rpc::pb::local::cluster_server::ClusterServer;
use serde_json::json;
use server::telemetry::{self, RecentSpans};
use server::{Host, Listener};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::lock::{Lock, Record, holder};
use super::service::{ClusterService, LocalCluster, stop_workloads};
use super::{ANOTHER_RUNS, Paths, idle, reach, removal, services, start};
use crate::cli::args::UpArgs;
use crate::ending::signals::Signals;
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;

/// Default time without use after which a detached cluster ends.
const IDLE_END: Duration = Duration::from_secs(10 * 60);
/// Default of `GANTRY_LOG`. The database layer would otherwise warn about each SQLite transaction.
const DEFAULT_LOG_FILTER: &str = "info,sea_orm=error,sea_orm_migration=warn,sqlx=error";
/// Time limit for the last cluster to end.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval of readiness checks. All services are in this process.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Time for a caller that connected before the socket was hidden to make its first call.
const FIRST_CALL_LIMIT: Duration = Duration::from_millis(300);

/// Runs a cluster until it is asked to end. Returns the exit code.
pub(crate) async fn up(args: &UpArgs, ui: &Ui, as_json: bool) -> anyhow::Result<u8> {
    let paths = Paths::find()?;
    paths.make()?;
    let Some(mut lock) = take_lock(&paths).await? else {
        if args.detached {
            return Ok(ANOTHER_RUNS);
        }
        let process = holder(&paths.lock())
            .map_or_else(String::new, |holder| format!(" (process {})", holder.process_id));
        bail!(
            "a cluster runs on this machine already{process}; see `gantry status`, or stop it with `gantry down`"
        );
    };
    // An error before the record is written leaves the record of the last cluster.
    let tcp = match &args.listen {
        Some(address) => Some(listen(address, args.insecure).await?),
        None => None,
    };
    let left_behind = lock.left_behind.take();
    lock.record(&Record { process_id: std::process::id(), socket: paths.socket() })?;
    let served = serve(args, ui, as_json, &paths, tcp, left_behind, &lock).await;
    lock.release()?;
    served?;
    if !args.detached {
        ui.note("the cluster has ended");
    }
    Ok(0)
}

/// Serves until the cluster is asked to end.
async fn serve(
    args: &UpArgs,
    ui: &Ui,
    as_json: bool,
    paths: &Paths,
    tcp: Option<TcpListener>,
    left_behind: Option<Record>,
    lock: &Lock,
) -> anyhow::Result<()> {
    let spans = RecentSpans::default();
    let _telemetry = telemetry::init("gantry", DEFAULT_LOG_FILTER, Some(spans.clone()))?;
    server::inherited::warn_of_few_open_files();
    let mut listeners = vec![bind(paths)?];
    let socket = Identity::of(&paths.socket()).context("cannot read the metadata of the socket")?;
    let mut endpoints = vec![paths.endpoint()];
    let (mut token, mut open) = (None, None);
    if let Some(tcp) = tcp {
        open = Some(tcp.local_addr()?).filter(|address| !address.ip().is_loopback());
        let tcp = Listener::Tcp(tcp);
        endpoints.push(args.endpoint.clone().map_or_else(|| tcp.endpoint(), Ok)?);
        listeners.push(tcp);
        token = Some(server::token::replace(&paths.token())?);
    }

    let mut host = Host::new().with_token(token).with_probe_interval(PROBE_INTERVAL);
    let peer = peer(&paths.endpoint(), Outgoing::internal())?;
    let shutdown = CancellationToken::new();
    let was_left_behind = left_behind.is_some();
    let idle_end = args.idle_end.or(args.detached.then_some(IDLE_END)).filter(|idle_end| !idle_end.is_zero());
    // Callers over TCP may be on another machine. Callers over the socket recognize both addresses.
    let callers = endpoints.last().cloned().unwrap_or_default();
    let machine = services::start(args, paths, &callers, &mut host).await?;
    host.add_service(ClusterServer::new(ClusterService(Arc::new(LocalCluster {
        started_at: Timestamp::now(),
        state: paths.state.display().to_string(),
        endpoints: endpoints.clone(),
        idle_end,
        holds_destruction: args.hold_destruction,
        left_behind: left_behind.map(|record| record.process_id),
        recovered: OnceCell::new(),
        activity: host.activity(),
        spans,
        peer: peer.clone(),
        shutdown: shutdown.clone(),
    }))));
    if was_left_behind {
        let mut cluster = ClusterClient::new(peer.clone());
        // The call is answered once this host serves, and logs the state of the last cluster.
        host.spawn(async move { _ = cluster.get_status(GetStatusRequest {}).await });
    }
    // Signals are caught before the address is printed, because the cluster may be stopped at once.
    let mut signals = Signals::catch()?;
    if args.detached {
        tracing::info!(process.id = std::process::id(), "cluster starts");
    } else {
        announce(&endpoints, paths, as_json)?;
        if let Some(address) = open {
            ui.warn(&format!(
                "INSECURE: nothing is encrypted on {address}; anyone on the network path can read the token"
            ));
        }
        if args.hold_destruction {
            ui.warn(super::HOLDS_DESTRUCTION);
        }
    }

    let (activity, stopping) = (host.activity(), host.stopping());
    let mut is_lost = false;
    let end = async {
        let idle = async {
            match idle_end {
                Some(idle_end) => end_when_idle(idle_end, paths, &activity, &peer, &stopping).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop_on_signal(&mut signals, &peer, ui) => {}
            () = shutdown.cancelled() => {}
            () = idle => tracing::info!("cluster ends: it was idle"),
            () = removal::state_is_lost(paths, lock) => {
                is_lost = true;
                tracing::error!(path = %paths.state.display(), "cluster ends: its state directory was removed");
            }
        }
        // The next command starts another cluster, which waits for the lock and may have made its
        // socket already.
        if Identity::of(&paths.socket()).is_ok_and(|found| found == socket) {
            _ = std::fs::remove_file(paths.socket());
        }
        if is_lost {
            let machine = machine.clone();
            // Containers that cannot be killed now end after a time without contact.
            _ = tokio::task::spawn_blocking(move || machine.abandon()).await;
        }
    };
    host.serve(listeners, end).await?;
    if is_lost {
        bail!(
            "the state directory {} was removed or renamed; the cluster and its workloads have ended",
            paths.state.display()
        );
    }
    let end = move || {
        // Callers may have left shells in containers that have ended.
        let killed = machine.kill_remaining().context("cannot end the commands in containers");
        // Mounted volumes would prevent the removal of the state directory.
        machine.unmount_idle().context("cannot unmount volumes")?;
        killed
    };
    tokio::task::spawn_blocking(end).await?
}

/// Identity of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(path: &Path) -> std::io::Result<Self> {
        let found = path.symlink_metadata()?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

/// Takes the lock, and waits for a cluster that is ending. `None`: another cluster runs.
async fn take_lock(paths: &Paths) -> anyhow::Result<Option<Lock>> {
    let give_up = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(lock) = Lock::take(&paths.lock())? {
            return Ok(Some(lock));
        }
        if start::running(paths).is_some() || tokio::time::Instant::now() >= give_up {
            return Ok(None);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Binds the socket. An existing socket file is stale, because this process holds the lock.
fn bind(paths: &Paths) -> anyhow::Result<Listener> {
    let socket = paths.socket();
    let failed = || format!("cannot listen on {}", socket.display());
    if let Err(error) = std::fs::remove_file(&socket)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error).with_context(failed);
    }
    let listener = UnixListener::bind(&socket).with_context(failed)?;
    // No other user can enter the directory, so the socket is never open to others.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o600)).with_context(failed)?;
    Ok(Listener::Unix(listener))
}

async fn listen(address: &str, insecure: bool) -> anyhow::Result<TcpListener> {
    let addresses: Vec<_> = tokio::net::lookup_host(address)
        .await
        .map_err(|error| {
            anyhow!("cannot listen on {address:?}: {error}; write an address such as 127.0.0.1:7400")
        })?
        .collect();
    for address in &addresses {
        reach::check(*address, insecure)?;
    }
    let mut bound = Err(std::io::ErrorKind::AddrNotAvailable.into());
    for one in addresses {
        bound = server::bind(one);
        if bound.is_ok() {
            break;
        }
    }
    bound.with_context(|| format!("cannot listen on {address}"))
}

fn announce(endpoints: &[String], paths: &Paths, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let token_file = (endpoints.len() > 1).then(|| paths.token().display().to_string());
        let process = std::process::id();
        return print_json(
            &json!({ "process_id": process, "endpoints": endpoints, "token_file": token_file }),
        );
    }
    let mut text = String::new();
    for endpoint in endpoints {
        text.push_str(&format!("listening on {endpoint}\n"));
    }
    if endpoints.len() > 1 {
        text.push_str(&format!("the token for TCP is in {}\n", paths.token().display()));
    }
    print(&text)
}

/// Resolves after Ctrl-C or SIGTERM, once all workloads have ended. A second signal kills them.
async fn stop_on_signal(signals: &mut Signals, peer: &rpc::Peer, ui: &Ui) {
    signals.next().await;
    // Workloads are also stopped if the list cannot be read.
    if let Ok([]) = idle::unfinished(peer).await.as_deref() {
        ui.note("no workload runs; the cluster ends");
    } else {
        ui.note("stopping the workloads, which have 10 s; repeat the signal to kill them");
    }
    let stopped = tokio::select! {
        stopped = stop_workloads(peer, Duration::from_secs(10)) => stopped,
        _ = signals.next() => stop_workloads(peer, Duration::ZERO).await,
    };
    if let Err(error) = stopped {
        tracing::warn!(error = error.message(), "cannot stop workloads");
    }
}

/// Resolves when the cluster is idle and no caller came while the socket was hidden.
async fn end_when_idle(
    idle_end: Duration,
    paths: &Paths,
    activity: &server::Activity,
    peer: &rpc::Peer,
    stopping: &CancellationToken,
) {
    let (socket, hidden) = (paths.socket(), paths.socket().with_extension("hidden"));
    loop {
        idle::until_idle(idle_end, activity.clone(), peer.clone(), stopping.clone()).await;
        // A caller may have connected a moment ago, and may be about to call.
        if std::fs::rename(&socket, &hidden).is_err() {
            return;
        }
        tokio::time::sleep(FIRST_CALL_LIMIT).await;
        if activity.idle_for() >= idle_end {
            _ = std::fs::remove_file(&hidden);
            return;
        }
        if std::fs::rename(&hidden, &socket).is_err() {
            return;
        }
    }
}
