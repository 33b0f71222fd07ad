//! Options of the commands about a single workload.

use std::time::{Duration, SystemTime};

use clap::Args;
use domain::ProcessId;

use crate::cli::args::exec::DetachArgs;
use crate::cli::values::{self, StopSignal};

/// Arguments of `gantry attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints the output from its start, as far as it is still kept, and exits with the code that `gantry run` would have. Standard input is \
forwarded if the workload accepts it; a workload started with --detach does not. Ctrl-C detaches; the workload runs on. \
If the command has a terminal, all keys go to the command except --detach-keys. `gantry cancel` stops the workload.")]
pub(crate) struct AttachArgs {
    /// Name or id of the workload, the beginning of its id, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", value_parser = values::workload)]
    pub(crate) workload: String,
    /// Do not forward standard input
    #[arg(long)]
    pub(crate) no_stdin: bool,
    /// Attach to a process that `gantry exec` started, instead of the main process
    #[arg(long, value_name = "UUID")]
    pub(crate) process: Option<ProcessId>,
    #[command(flatten)]
    pub(crate) detach: DetachArgs,
}

/// Arguments of `gantry logs`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints the output so far. With -f, the output is followed until the workload ends. Ctrl-C ends the command; the workload runs on. Output \
is kept for 5 minutes after the end of the workload, or for the --gc-grace of the cluster.

--tail reads all kept output, and prints at most the last 16 MiB of standard output and of standard error.

Examples:
  gantry logs build
  gantry logs -f --tail 20 build
  gantry logs --since 10m build")]
pub(crate) struct LogsArgs {
    /// Name or id of the workload, the beginning of its id, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", value_parser = values::workload)]
    pub(crate) workload: String,
    /// Print the output of this service instead of that of the command
    #[arg(long, value_name = "NAME")]
    pub(crate) service: Option<String>,
    /// Follow the output until the command ends. Without this option, the output so far is printed
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Start with the last lines of the output: this many of standard output, and this many of
    /// standard error. Default: all kept output
    #[arg(short = 'n', long, value_name = "LINES")]
    pub(crate) tail: Option<usize>,
    /// Leave out output from before this time: how long ago, such as 10m, or an instant, such as
    /// 2026-01-31T12:00:00Z. Old output may begin too early
    #[arg(long, value_name = "TIME", value_parser = values::time)]
    pub(crate) since: Option<SystemTime>,
}

/// Arguments of `gantry watch`.
#[derive(Debug, Args)]
#[command(after_help = "\
Starts with the first event, and exits with the code that `gantry run` would have when the workload ends. Ctrl-C ends the command; the \
workload runs on. With --json, each event is one line.")]
pub(crate) struct WatchArgs {
    /// Name or id of the workload, the beginning of its id, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", value_parser = values::workload)]
    pub(crate) workload: String,
}

/// Arguments of `gantry explain`.
#[derive(Debug, Args)]
#[command(after_help = "\
What is explained:
  workload          why each worker refuses it, and the events that would place
                    it; or where it runs, or how it ended
  lease             its purpose, worker and expiry, or why it ended
  artifact, volume, container
                    everything that keeps it, and until when; or why and when it
                    was deleted (for a day after the deletion)
  build             the artifacts that it owns, and when it releases them
  attempt           the containers and volumes that were made for it
  cache, image, base resource type
                    its artifacts, its users, and its expiry
  transfer          its artifact and its target worker, and when its term ends
  worker            its state, and its containers and volumes")]
pub(crate) struct ExplainArgs {
    /// Id of a workload, lease, artifact, volume, container, build, attempt, cache, base resource
    /// type, transfer or worker; or the name of a worker or workload, the reference of an image, or
    /// the beginning of the id of a workload, artifact, volume or container
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// For a waiting workload: number of workers to list one by one. Default: 20
    ///
    /// All other workers are summarized, grouped by the reasons for which they refuse the workload.
    #[arg(long, value_name = "COUNT", default_value = "0", hide_default_value = true)]
    pub(crate) workers: u32,
    /// For a waiting workload: list only this worker, by name or id. Repeatable
    #[arg(long = "worker", value_name = "WORKER")]
    pub(crate) only: Vec<String>,
}

/// Arguments of `gantry cancel`.
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    /// Names or ids of the workloads, beginnings of ids, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", required = true, value_parser = values::workload)]
    pub(crate) workloads: Vec<String>,
    /// Time between SIGTERM and SIGKILL
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = values::duration)]
    pub(crate) grace: Duration,
}

/// Arguments of `gantry kill`.
#[derive(Debug, Args)]
#[command(after_help = "\
With KILL, all processes of the workload are killed at once, and its outputs are not kept. `gantry cancel` lets the command end before \
that. TERM is the same as `gantry cancel`.")]
pub(crate) struct KillArgs {
    /// Names or ids of the workloads, beginnings of ids, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", required = true, value_parser = values::workload)]
    pub(crate) workloads: Vec<String>,
    /// Signal: KILL, or TERM, which is followed by KILL 10 s later
    #[arg(short, long, value_name = "SIGNAL", default_value = "KILL", value_parser = values::stop_signal)]
    pub(crate) signal: StopSignal,
}

/// Arguments of `gantry wait`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints the exit code that `gantry run` would have, one line for each workload, and exits with the first code that is not 0. Ctrl-C ends the \
command; the workloads run on.

Examples:
  gantry run -d --name build -- make; gantry wait build")]
pub(crate) struct WaitArgs {
    /// Names or ids of the workloads, beginnings of ids, or `last` for the newest one
    #[arg(value_name = "WORKLOAD", required = true, value_parser = values::workload)]
    pub(crate) workloads: Vec<String>,
}
