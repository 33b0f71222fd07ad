//! Commands and options of `gantry`, with their help texts.
//!
//! `main` parses them with clap, and [`crate::commands`] executes them. [`crate::cli::values`]
//! parses the values of options.

mod cluster;
mod config;
mod exec;
mod inventory;
mod run;
mod transfers;
mod workers;
mod workloads;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

pub(crate) use self::cluster::{DownArgs, StatusArgs, TopArgs, UpArgs};
pub(crate) use self::config::{CompleteArgs, CompletionArgs, ConfigArgs, ConfigCommand, ManArgs, SchemaArgs};
pub(crate) use self::exec::ExecArgs;
pub(crate) use self::inventory::{
    AdoptArgs, ClearCacheArgs, DeleteArgs, GcArgs, InspectArgs, Kind, ListArgs, PsArgs, PurgeArgs, RmiArgs,
    ShowArgs, UndeleteArgs,
};
pub(crate) use self::run::{KindArg, NetworkArg, RunArgs};
pub(crate) use self::transfers::{AllowArgs, CatArgs, CpArgs, DownloadArgs, PullArgs, ScanArgs, UploadArgs};
pub(crate) use self::workers::{CordonArgs, PruneArgs, RetireArgs, UncordonArgs};
pub(crate) use self::workloads::{
    AttachArgs, CancelArgs, ExplainArgs, KillArgs, LogsArgs, WaitArgs, WatchArgs,
};
use crate::cli::{addresses, values};

/// Run commands in containers on workers: upload inputs, follow the output, download the results
#[derive(Debug, Parser)]
#[command(name = "gantry", version, max_term_width = 100, after_help = TOP_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const TOP_HELP: &str = "\
Without --server, commands use the cluster on this machine, and start it in the background if none runs. It keeps its state in \
$XDG_STATE_HOME/gantry (~/.local/state/gantry), and ends after 10 minutes without use. `up` and `down` always act on that cluster.

A DURATION is written 500ms, 30s, 10m, 12h or 2d; a number alone is seconds. A SIZE is written 512M or 2G, in powers of 1024.

Examples:
  gantry run -- echo hello
  gantry run -i src=. -o report=./out -- sh -c 'make -C src >report/log'
  gantry run -d --name nap -- sleep 60; gantry exec -it nap sh; gantry cancel nap
  gantry ps
  gantry help run";

const DOCTOR_HELP: &str = "\
Makes the tests that a worker makes when it starts, also while a cluster runs. Like a worker of root, it sets up forwarding and the packet \
filter of private networks. Like a worker of an ordinary user, it enters a user namespace. Exits with 1 if no container can run.";

/// Options that every command has.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Address of the cluster: `unix:///path` or `http://host:port`. Default: the cluster on this
    /// machine
    ///
    /// Services at different addresses are written
    /// `scheduler=ADDRESS,artifacts=ADDRESS,streamer=ADDRESS,proxy=ADDRESS`. Further replicas of a
    /// service follow its address, separated by commas. An address before all names is the default
    /// for services that are not named. `http://host:7110-7119` stands for the replicas at these
    /// ports.
    #[arg(
        long,
        global = true,
        env = "GANTRY_SERVER",
        value_name = "ADDRESS",
        value_parser = addresses::server,
        help_heading = "Global options"
    )]
    pub(crate) server: Option<String>,
    /// Cluster with this name in `gantry config`. `local`: the cluster on this machine
    #[arg(long, global = true, env = "GANTRY_CONTEXT", value_name = "NAME", help_heading = "Global options")]
    pub(crate) context: Option<String>,
    /// Whether --server was given on the command line, not by the environment.
    #[arg(skip)]
    pub(crate) server_given: bool,
    /// Address of a proxy that forwards calls to the gateways of workers. Default: gateways are
    /// called directly
    #[arg(
        long,
        global = true,
        env = "GANTRY_PROXY",
        value_name = "ADDRESS",
        help_heading = "Global options"
    )]
    pub(crate) proxy: Option<String>,
    /// File that holds the cluster token
    ///
    /// `gantry up --listen` prints the path of its token file. Default for a --server on the
    /// loopback: the token file of the services on this machine that run without --token-file.
    #[arg(
        long,
        global = true,
        env = "GANTRY_TOKEN_FILE",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    pub(crate) token_file: Option<PathBuf>,
    /// Longest outage of a service that the command waits out. Default: 60s, and 5m for the events
    /// and the output of a workload
    #[arg(
        long,
        global = true,
        env = "GANTRY_PATIENCE",
        value_name = "DURATION",
        value_parser = values::duration,
        help_heading = "Global options"
    )]
    pub(crate) patience: Option<Duration>,
    /// Team that owns the workloads and artifacts
    #[arg(
        long,
        global = true,
        env = "GANTRY_TEAM",
        value_name = "TEAM",
        default_value = "main",
        help_heading = "Global options"
    )]
    pub(crate) team: String,
    /// Print only answers, warnings and errors
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// Print JSON on standard output
    ///
    /// Most commands print one object. `run`, `attach`, `exec`, `logs`, `watch` and `list` print
    /// one object per line.
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
}

/// Command of `gantry`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a container, with inputs and outputs
    Run(Box<RunArgs>),
    /// Attach to a workload: its output, its standard input and its exit code
    Attach(AttachArgs),
    /// Run a command in the container of a workload
    #[command(visible_alias = "hijack")]
    Exec(ExecArgs),
    /// Print the output of a workload, and follow it until the workload ends
    Logs(LogsArgs),
    /// Print the events of a workload, from its submission to its end
    #[command(visible_alias = "events")]
    Watch(WatchArgs),
    /// Explain why a workload waits, or why any other object is kept or was deleted
    Explain(ExplainArgs),
    /// Wait until workloads have ended, and print their exit codes
    Wait(WaitArgs),
    /// Stop workloads
    #[command(visible_alias = "stop")]
    Cancel(CancelArgs),
    /// Kill workloads at once
    Kill(KillArgs),

    /// Pull an image from a registry into the cluster, and print the id of its artifact
    Pull(PullArgs),
    /// List the images that were pulled. The same as `list images`
    Images,
    /// Upload a directory, and print the id of the artifact
    Upload(UploadArgs),
    /// Download an artifact into a directory
    Download(DownloadArgs),
    /// Print one file of an artifact
    Cat(CatArgs),
    /// Copy an output of a workload, or one of its files, to this machine
    Cp(CpArgs),

    /// List the workloads that wait or run
    Ps(PsArgs),
    /// List workers, workloads, leases, images, artifacts, volumes, containers, caches, base types
    /// or imports
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show one worker, workload, image, artifact, volume, container or cache
    Show(ShowArgs),
    /// Print workloads, artifacts, images, workers, volumes or containers as JSON
    Inspect(InspectArgs),
    /// Delete caches, so that the next run starts with an empty directory
    ClearCache(ClearCacheArgs),
    /// Mark everything as garbage that nothing keeps any more
    Gc(GcArgs),
    /// Delete artifacts, images, or the inputs and outputs of finished workloads
    #[command(visible_alias = "rm")]
    Delete(DeleteArgs),
    /// Delete images by their names
    Rmi(RmiArgs),
    /// Restore a deleted artifact while its bytes still exist
    Undelete(UndeleteArgs),
    /// Make an orphaned volume a replica of its artifact again
    Adopt(AdoptArgs),
    /// Mark orphans as garbage: volumes and containers that a restored store does not know
    Purge(PurgeArgs),

    /// Give no new work to a worker, and wait until its workloads have ended
    Cordon(CordonArgs),
    /// Give new work to a worker that is cordoned, retiring, quarantined or retired
    Uncordon(UncordonArgs),
    /// Drain a worker, and forget it once it is empty
    Retire(RetireArgs),
    /// Delete artifacts that nothing uses, or forget a lost worker for good
    Prune(PruneArgs),

    /// Show the demand for workers of all teams, the workers, and which of them can be removed with
    /// the least harm
    Demand,

    /// Run a cluster on this machine in the foreground
    Up(Box<UpArgs>),
    /// Stop the cluster on this machine
    Down(DownArgs),
    /// Show the services, workers, workloads, queue and transfers of the cluster
    Status(StatusArgs),
    /// Show the running containers, with the processor time and memory that they use
    #[command(visible_alias = "stats")]
    Top(TopArgs),
    /// Check what this machine allows for a cluster on it, and say what to change
    #[command(after_help = DOCTOR_HELP)]
    Doctor,
    /// Name clusters, and select one
    Config(ConfigArgs),
    /// Print a script that completes commands, options, names and ids in a shell
    Completion(CompletionArgs),
    /// Print the names and ids that may complete a command line
    #[command(hide = true)]
    CompleteWords(CompleteArgs),
    /// Write the manual pages of all commands into a directory
    Man(ManArgs),
    /// Print the JSON Schema of the documents that --json prints
    Schema(SchemaArgs),
    /// Print the version
    Version,
}
