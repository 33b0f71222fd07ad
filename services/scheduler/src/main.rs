//! The scheduler as a service of its own.

use std::time::Duration;

use clap::Parser;
use scheduler::Config;
use server::Started;

/// The scheduler of Gantry: workers, leases, workloads and their queue.
#[derive(Debug, Parser)]
#[command(name = "scheduler", version)]
struct Arguments {
    #[command(flatten)]
    listen: server::ListenArgs,
    /// Where everything is kept: postgres://…, or sqlite:///path for a scheduler alone.
    #[arg(long, env = "GANTRY_DATABASE_URL", hide_env_values = true)]
    database_url: String,
    /// Where the artifact store listens: http://host:port or unix:///path.
    #[arg(long, env = "GANTRY_ARTIFACT_STORE")]
    artifact_store: String,
    /// Seconds in which a gateway says at least once what its worker does.
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
    /// Seconds for which a driven lease lasts unless it is renewed.
    #[arg(long, env = "GANTRY_LEASE_TERM", default_value_t = 60)]
    lease_term: u64,
    /// Seconds for which a finished workload can be asked for.
    #[arg(long, env = "GANTRY_KEEP_FINISHED", default_value_t = 7 * 24 * 3600)]
    keep_finished: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let Started { listener, token, telemetry: _telemetry } = arguments.listen.start("scheduler").await?;
    scheduler::serve(arguments.config(token), listener, server::shutdown_signal()).await
}

impl Arguments {
    fn config(self, token: Option<String>) -> Config {
        Config {
            token,
            heartbeat: Duration::from_secs(self.heartbeat),
            worker_ttl: Duration::from_secs(self.worker_ttl),
            stop_after: Duration::from_secs(self.stop_after),
            lost_after: Duration::from_secs(self.lost_after),
            lease_term: Duration::from_secs(self.lease_term),
            keep_finished: Duration::from_secs(self.keep_finished),
            ..Config::new(self.database_url, self.artifact_store)
        }
    }
}
