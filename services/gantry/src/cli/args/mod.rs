//! The command line: what may be written, and how it is explained.
//!
//! Values are parsed by [`crate::cli::values`]; nothing here does anything.

mod cluster;
mod inventory;
mod run;
mod transfers;
mod workers;
mod workloads;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use self::cluster::{DownArgs, StatusArgs, UpArgs};
pub(crate) use self::inventory::{
    AdoptArgs, ClearCacheArgs, DeleteArgs, GcArgs, Kind, ListArgs, PurgeArgs, ShowArgs, UndeleteArgs,
};
pub(crate) use self::run::{NetworkArg, RunArgs};
pub(crate) use self::transfers::{CatArgs, DownloadArgs, ScanArgs, TakeArgs, UploadArgs};
pub(crate) use self::workers::{CordonArgs, PruneArgs, RetireArgs, UncordonArgs};
pub(crate) use self::workloads::{AttachArgs, CancelArgs, ExplainArgs, WatchArgs, WorkloadArgs};
use crate::cli::addresses;

/// Run a command in a container on a worker: your directories go there, what it made comes back.
#[derive(Debug, Parser)]
#[command(name = "gantry", version, max_term_width = 100, after_help = TOP_HELP)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const TOP_HELP: &str = "\
Examples:
  gantry run -- echo hello
  gantry run -i src=. -o report=./out -- sh -c 'make -C src >report/log'
  id=$(gantry run -d -- sleep 60); gantry show workload $id; gantry cancel $id
  gantry list workloads
  gantry help run

Without --server, the cluster on this machine is used, and started when none runs. It keeps its state in $XDG_STATE_HOME/gantry \
(~/.local/state/gantry) and ends by itself when it was idle for 10 minutes. `up` and `down` are always about that one.";

/// Options that every command has.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// The cluster: `unix:///path` or `http://host:port`; or `scheduler=ADDRESS,artifacts=ADDRESS,streamer=ADDRESS,proxy=ADDRESS`, each
    /// with its replicas behind it, and in front what stands for the services that are not named. `http://host:7110-7119` is whichever
    /// replicas there are at these ports. Default: the cluster on this machine
    #[arg(
        long,
        global = true,
        env = "GANTRY_SERVER",
        value_name = "ADDRESS",
        value_parser = addresses::server,
        help_heading = "Global options"
    )]
    pub(crate) server: Option<String>,
    /// Whether that was said on the command line, rather than by the environment.
    #[arg(skip)]
    pub(crate) server_given: bool,
    /// The proxy through which containers and volumes are reached: `unix:///path` or `http://host:port`. Default: each worker's gateway itself
    #[arg(
        long,
        global = true,
        env = "GANTRY_PROXY",
        value_name = "ADDRESS",
        help_heading = "Global options"
    )]
    pub(crate) proxy: Option<String>,
    /// The file that holds the token to present, as `gantry up --listen` made it. Default, for a --server on the loopback: that of services
    /// on this machine without --token-file
    #[arg(
        long,
        global = true,
        env = "GANTRY_TOKEN_FILE",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    pub(crate) token_file: Option<PathBuf>,
    /// On whose behalf
    #[arg(
        long,
        global = true,
        env = "GANTRY_TEAM",
        value_name = "TEAM",
        default_value = "main",
        help_heading = "Global options"
    )]
    pub(crate) team: String,
    /// Say nothing but answers, warnings and errors
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// Answer in JSON on standard output: one object, or with run, attach, logs, watch and list one a line
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command in a container, with inputs and outputs
    Run(Box<RunArgs>),
    /// Watch a workload: its output, and its end
    Attach(AttachArgs),
    /// Print the output of a workload and follow it to its end; also for a while after that
    Logs(WorkloadArgs),
    /// Print what happens to a workload, from its submission to its end: where it waits, why it is placed where, what is brought there
    Watch(WatchArgs),
    /// Say why a workload waits, worker by worker; or why anything else is there or went, and when
    Explain(ExplainArgs),
    /// Ask a workload to stop
    Cancel(CancelArgs),

    /// Upload a directory and print the artifact's id
    Upload(UploadArgs),
    /// Bring an artifact into a directory
    Download(DownloadArgs),
    /// Print one file of an artifact
    Cat(CatArgs),

    /// List workers, workloads, artifacts, volumes, containers, caches, base types or imports
    List(ListArgs),
    /// Show one worker, workload, artifact, volume, container or cache
    Show(ShowArgs),
    /// Delete caches, so that the next run finds nothing there
    ClearCache(ClearCacheArgs),
    /// Mark as garbage what nothing keeps any more
    Gc(GcArgs),
    /// Let go of artifacts, and of the inputs and outputs of workloads that have ended
    Delete(DeleteArgs),
    /// Bring a deleted artifact back while its bytes are still on a worker
    Undelete(UndeleteArgs),
    /// Make an orphaned volume a replica of its artifact again
    Adopt(AdoptArgs),
    /// Make garbage of orphans: volumes and containers that a restored store does not know
    Purge(PurgeArgs),

    /// Let a worker take no more work, and wait until what runs there has ended
    Cordon(CordonArgs),
    /// Let a worker take work again that is cordoned, retiring or quarantined, or was retired
    Uncordon(UncordonArgs),
    /// Take a worker out of service for good: as cordon, and then it is forgotten
    Retire(RetireArgs),
    /// Forget a worker that is not in contact and does not come back
    Prune(PruneArgs),

    /// Say what waits for what kind of worker, what workers there are, and which of them go with the least harm: of all teams
    Demand,

    /// Keep a cluster on this machine in the foreground
    Up(Box<UpArgs>),
    /// Stop the cluster on this machine
    Down(DownArgs),
    /// Show the cluster: services, workers, what runs and what waits, and why
    Status(StatusArgs),
    /// Print the version
    Version,
}
