//! Options of the commands about the cluster on this machine.

use std::time::Duration;

use clap::Args;

use crate::cli::values;

/// `gantry up`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gantry up
  gantry up --listen 127.0.0.1:7400      # Callers over TCP present the token in the file that is named.")]
pub(crate) struct UpArgs {
    /// Listen on this TCP address, too. Callers need the token that is generated in the state directory
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// Where callers over TCP reach this cluster, if not at the address that --listen names: http://host:port
    #[arg(long, value_name = "ADDRESS", requires = "listen", value_parser = rpc::client::addresses)]
    pub(crate) endpoint: Option<String>,
    /// Allow --listen on an address that others can reach, although nothing is encrypted
    #[arg(long, requires = "listen")]
    pub(crate) insecure: bool,
    /// End after this long without a client, workload or kept container. Default: never
    #[arg(long, value_name = "DURATION", value_parser = values::duration, env = "GANTRY_IDLE_END")]
    pub(crate) idle_end: Option<Duration>,
    /// How long the container and the log of a workload are kept after its end
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = values::duration,
        default_value = "5m",
        env = "GANTRY_GC_GRACE"
    )]
    pub(crate) gc_grace: Duration,
    /// Destroy no container and no volume, so that what should go can be looked at. The disk only fills up
    #[arg(
        long,
        env = "GANTRY_HOLD_DESTRUCTION",
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub(crate) hold_destruction: bool,
    /// The database of the artifact store, artifact-store.db in the state directory, was restored from a backup: volumes and containers that it does not know are orphans
    #[arg(long)]
    pub(crate) restored: bool,
    #[command(flatten)]
    pub(crate) amounts: runtime_gateway::Amounts,
    #[command(flatten)]
    pub(crate) policy: runtime_gateway::host::Policy,
    #[command(flatten)]
    pub(crate) concourse: runtime_gateway::garden::GardenArgs,
    /// The name of the worker given by --garden, unique in the cluster
    #[arg(long, value_name = "NAME", requires = "garden", default_value = "garden")]
    pub(crate) garden_name: String,
    /// The platform of the worker given by --garden. Default: linux
    #[arg(long, value_name = "PLATFORM", requires = "garden")]
    pub(crate) garden_platform: Option<String>,
    /// A tag of the worker given by --garden, may be repeated. With some, it takes only workloads with tags
    #[arg(long = "garden-tag", value_name = "TAG", value_parser = values::tag, requires = "garden")]
    pub(crate) garden_tags: Vec<String>,
    /// The only team that may use the worker given by --garden. Default: every team
    #[arg(long, value_name = "TEAM", requires = "garden")]
    pub(crate) garden_team: Option<String>,
    /// Started by another command.
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

/// `gantry down`
#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    /// Kill what runs instead of asking it to end
    #[arg(long)]
    pub(crate) force: bool,
}

/// `gantry status`
#[derive(Debug, Args)]
#[command(after_help = "\
Exits 1 when no cluster runs on this machine, or when a service of the cluster that --server names is not ready.")]
pub(crate) struct StatusArgs {
    /// Show it again whenever something has changed, until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}
