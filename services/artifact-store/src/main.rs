//! The artifact store as a service of its own.

use std::time::Duration;

use artifact_store::{Config, KeySource};
use clap::Parser;
use server::Started;

/// The artifact store of Gantry: artifacts, their owners, the inventory of every worker, garbage.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(flatten)]
    listen: server::ListenArgs,
    /// Where the store keeps its rows: postgres://… or sqlite:///path.
    #[arg(long, env = "GANTRY_DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// The scheduler, whose keys verify session credentials: http://host:port or unix:///path.
    #[arg(long, env = "GANTRY_SCHEDULER")]
    scheduler: String,
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
    let Started { listener, token, telemetry: _telemetry } = arguments.listen.start("artifact-store").await?;
    artifact_store::serve(arguments.config(token), listener, server::shutdown_signal()).await
}

impl Arguments {
    fn config(self, token: Option<String>) -> Config {
        Config {
            token,
            unowned_ttl: Duration::from_secs(self.unowned_ttl),
            gc_grace: Duration::from_secs(self.gc_grace),
            default_keep: Duration::from_secs(self.default_keep),
            collect_interval: Duration::from_secs(self.collect_interval),
            restored: self.restored,
            ..Config::new(self.database_url, KeySource::Scheduler(self.scheduler))
        }
    }
}
