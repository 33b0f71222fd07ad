//! Options of the commands about the cluster on this machine.

use std::time::Duration;

use clap::Args;

use crate::cli::values;

/// Arguments of `gantry up`.
#[derive(Debug, Args)]
#[command(after_help = "\
Runs until Ctrl-C or `gantry down`. State is kept in $XDG_STATE_HOME/gantry (~/.local/state/gantry). Other commands start such a cluster in \
the background when they need one; `gantry up` keeps one in the foreground, with options of your choice.

Examples:
  gantry up
  gantry up --listen 127.0.0.1:7400      # callers over TCP need the token file that is printed
  gantry up --host-path ~/.cargo/bin,~/.rustup")]
pub(crate) struct UpArgs {
    /// Listen on this TCP address, too. Callers need the token that is generated in the state
    /// directory
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: Option<String>,
    /// Address at which callers over TCP reach this cluster, such as `http://host:port`. Default:
    /// the address of --listen
    #[arg(long, value_name = "ADDRESS", requires = "listen", value_parser = rpc::client::addresses)]
    pub(crate) endpoint: Option<String>,
    /// Allow --listen on an address that other machines can reach, although the traffic is not
    /// encrypted
    #[arg(long, requires = "listen")]
    pub(crate) insecure: bool,
    /// End the cluster after this long without a client, workload or kept container, such as `1h`.
    /// Default: never
    #[arg(long, value_name = "DURATION", value_parser = values::duration, env = "GANTRY_IDLE_END")]
    pub(crate) idle_end: Option<Duration>,
    /// Time for which the container and the log of a workload are kept after its end
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = values::duration,
        default_value = "5m",
        env = "GANTRY_GC_GRACE"
    )]
    pub(crate) gc_grace: Duration,
    /// Never destroy a container or volume, so that garbage can be inspected or undeleted. The disk
    /// fills up
    #[arg(
        long,
        env = "GANTRY_HOLD_DESTRUCTION",
        value_parser = clap::builder::BoolishValueParser::new()
    )]
    pub(crate) hold_destruction: bool,
    /// Bytes of volumes on this machine that are hashed in one second while no work runs, so that
    /// damage is found. 0: none are hashed
    #[arg(
        long,
        value_name = "SIZE",
        value_parser = server::settings::size_or_zero,
        default_value = "8MiB",
        env = "GANTRY_SCRUB_RATE"
    )]
    pub(crate) scrub_rate: u64,
    /// Treat unknown volumes and containers as orphans, because artifact-store.db was restored from
    /// a backup
    ///
    /// artifact-store.db in the state directory is the database of the artifact store. Orphans stay
    /// until `gantry adopt` or `gantry purge`.
    #[arg(long)]
    pub(crate) restored: bool,
    #[command(flatten, next_help_heading = "Worker on this machine")]
    pub(crate) amounts: runtime_gateway::Amounts,
    #[command(flatten, next_help_heading = "Worker on this machine")]
    pub(crate) policy: runtime_gateway::host::Policy,
    #[command(flatten, next_help_heading = "Concourse workers")]
    pub(crate) concourse: runtime_gateway::garden::GardenArgs,
    /// Name of the worker given by --garden, unique in the cluster
    #[arg(
        long,
        value_name = "NAME",
        requires = "garden",
        default_value = "garden",
        help_heading = "Concourse workers"
    )]
    pub(crate) garden_name: String,
    /// Platform of the worker given by --garden. Default: linux
    #[arg(long, value_name = "PLATFORM", requires = "garden", help_heading = "Concourse workers")]
    pub(crate) garden_platform: Option<String>,
    /// Tag of the worker given by --garden. Repeatable. A worker with tags takes only workloads
    /// with tags
    #[arg(long = "garden-tag", value_name = "TAG", value_parser = values::tag, requires = "garden", help_heading = "Concourse workers")]
    pub(crate) garden_tags: Vec<String>,
    /// Team that alone may use the worker given by --garden. Default: all teams
    #[arg(long, value_name = "TEAM", requires = "garden", help_heading = "Concourse workers")]
    pub(crate) garden_team: Option<String>,
    #[command(flatten, next_help_heading = "Images")]
    pub(crate) images: streamer::ImageArgs,
    /// The cluster was started in the background by another command.
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

/// Arguments of `gantry down`.
#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    /// Kill running commands instead of giving them 10 s to end
    #[arg(long)]
    pub(crate) force: bool,
}

/// Arguments of `gantry status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes:
  0  the cluster runs, and all services are ready
  1  no cluster runs on this machine, or a service of --server is not ready")]
pub(crate) struct StatusArgs {
    /// Print the status again when it changes, until Ctrl-C. The status is checked every second
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Arguments of `gantry top`.
#[derive(Debug, Args)]
#[command(after_help = "\
On a terminal, the screen is painted again until `q` or Ctrl-C. Otherwise, and with --json, one snapshot is printed. The containers of all \
teams are shown, those that use the most processor time first. CPU is 100% for each processor that is fully used. MEMORY is what the kernel \
cannot reclaim. LIMIT is that of --memory. Empty cells are not known.

Exit codes:
  0  the command was ended, or the snapshots were printed
  1  no cluster runs on this machine, or the scheduler of --server does not answer

Examples:
  gantry top
  gantry top --once
  gantry top --json -n 5 --interval 10s")]
pub(crate) struct TopArgs {
    /// Time between two snapshots
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = values::positive_duration)]
    pub(crate) interval: Duration,
    /// Print this many snapshots one after another, instead of painting the screen
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Print one snapshot
    #[arg(long, conflicts_with = "count")]
    pub(crate) once: bool,
}
