//! The artifact store as a service of its own.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use artifact_store::{Config, KeySource};
use clap::Parser;
use server::Listener;

/// The artifact store of Gantry: artifacts, their owners, the inventory of every worker, garbage.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Where the store keeps its rows: postgres://… or sqlite:///path.
    #[arg(long, env = "GANTRY_DATABASE_URL")]
    database_url: String,
    /// Where to listen: host:port, or the path of a Unix socket.
    #[arg(long, env = "GANTRY_LISTEN", default_value = "127.0.0.1:7702")]
    listen: String,
    /// The scheduler, whose keys verify session credentials: http://host:port or unix:///path.
    #[arg(long, env = "GANTRY_SCHEDULER")]
    scheduler: String,
    /// A file with the token of this cluster, which callers over TCP present.
    #[arg(long, env = "GANTRY_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Seconds after which an artifact goes that nobody ever owned.
    #[arg(long, env = "GANTRY_UNOWNED_TTL", default_value_t = 12 * 3600)]
    unowned_ttl: u64,
    /// Seconds that containers and volumes stay after their attempt ended.
    #[arg(long, env = "GANTRY_GC_GRACE", default_value_t = 300)]
    gc_grace: u64,
    /// Seconds that a build keeps its artifacts after its end, unless its caller says otherwise.
    #[arg(long, env = "GANTRY_DEFAULT_KEEP", default_value_t = 300)]
    default_keep: u64,
    /// Seconds between two rounds of the collector.
    #[arg(long, env = "GANTRY_COLLECT_INTERVAL", default_value_t = 30)]
    collect_interval: u64,
    /// Begin a new store life: the database was restored from a backup. Say it once, at the first start after.
    #[arg(long)]
    restored: bool,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let _telemetry = server::telemetry::init("artifact-store", "info", None)?;
    let listener = bind(&arguments.listen).await?;
    artifact_store::serve(arguments.config()?, listener, shutdown()).await
}

impl Arguments {
    fn config(self) -> anyhow::Result<Config> {
        let token = match &self.token_file {
            Some(path) => {
                let token = std::fs::read_to_string(path);
                Some(token.with_context(|| format!("cannot read {}", path.display()))?.trim().to_owned())
            }
            None => None,
        };
        Ok(Config {
            token,
            unowned_ttl: Duration::from_secs(self.unowned_ttl),
            gc_grace: Duration::from_secs(self.gc_grace),
            default_keep: Duration::from_secs(self.default_keep),
            collect_interval: Duration::from_secs(self.collect_interval),
            restored: self.restored,
            ..Config::new(self.database_url, KeySource::Scheduler(self.scheduler))
        })
    }
}

async fn bind(address: &str) -> anyhow::Result<Listener> {
    let bound = if address.starts_with('/') {
        // One that nobody listens on any more is left from an earlier start.
        if tokio::net::UnixStream::connect(address).await.is_err() {
            std::fs::remove_file(address).ok();
        }
        tokio::net::UnixListener::bind(address).map(Listener::Unix)
    } else {
        tokio::net::TcpListener::bind(address).await.map(Listener::Tcp)
    };
    bound.with_context(|| format!("cannot listen on {address}"))
}

/// Resolves when the process was asked to end.
async fn shutdown() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
