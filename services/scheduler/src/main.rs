//! The scheduler as a process of its own.

use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use scheduler::Config;
use server::{Host, Listener, telemetry};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

/// Registers workers, places workloads on them, and keeps their queue.
#[derive(Debug, Parser)]
#[command(name = "scheduler", version)]
struct Arguments {
    /// Where everything is kept: postgres://…, or sqlite:///path for a scheduler alone.
    #[arg(long, env = "GANTRY_DATABASE_URL", hide_env_values = true)]
    database_url: String,

    /// Where to listen: host:port, or unix:///path.
    #[arg(long, env = "GANTRY_LISTEN", default_value = "127.0.0.1:7801")]
    listen: String,

    /// Where the artifact store listens: http://host:port, or unix:///path.
    #[arg(long, env = "GANTRY_ARTIFACT_STORE", default_value = "http://127.0.0.1:7802")]
    artifact_store: String,

    /// The bearer token of this cluster: asked of callers over TCP, and presented to the artifact store.
    #[arg(long, env = "GANTRY_TOKEN", hide_env_values = true)]
    token: Option<String>,

    /// Seconds in which a gateway says at least once what its workers do.
    #[arg(long, env = "GANTRY_HEARTBEAT", default_value_t = 5)]
    heartbeat: u64,

    /// Seconds of silence after which a worker is stalled.
    #[arg(long, env = "GANTRY_WORKER_TTL", default_value_t = 30)]
    worker_ttl: u64,

    /// Seconds without contact after which a worker ends its processes by itself.
    #[arg(long, env = "GANTRY_STOP_AFTER", default_value_t = 600)]
    stop_after: u64,

    /// Seconds of silence after which a worker is lost, and what it ran is given up. More than --stop-after.
    #[arg(long, env = "GANTRY_LOST_AFTER", default_value_t = 900)]
    lost_after: u64,

    /// Seconds for which a finished workload can be asked for.
    #[arg(long, env = "GANTRY_KEEP_FINISHED", default_value_t = 7 * 24 * 3600)]
    keep_finished: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let _telemetry = telemetry::init("scheduler", "info", None)?;
    let config = Config {
        token: arguments.token.clone(),
        heartbeat: Duration::from_secs(arguments.heartbeat),
        worker_ttl: Duration::from_secs(arguments.worker_ttl),
        stop_after: Duration::from_secs(arguments.stop_after),
        lost_after: Duration::from_secs(arguments.lost_after),
        keep_finished: Duration::from_secs(arguments.keep_finished),
        ..Config::new(arguments.database_url, arguments.artifact_store)
    };
    let listener = match arguments.listen.strip_prefix("unix://") {
        Some(path) => {
            Listener::Unix(UnixListener::bind(path).with_context(|| format!("cannot listen on {path}"))?)
        }
        None => {
            let address = &arguments.listen;
            Listener::Tcp(
                TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?,
            )
        }
    };
    tracing::info!(endpoint = listener.endpoint()?, "the scheduler listens");

    let mut terminate = signal(SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    let mut host = Host::new().with_token(arguments.token);
    scheduler::start(config, &mut host).await?;
    host.serve([listener], shutdown).await
}
