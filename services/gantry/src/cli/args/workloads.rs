//! Options of the commands that are about one workload.

use std::time::Duration;

use clap::Args;
use domain::WorkloadId;

use crate::cli::values;

/// `gantry attach`
#[derive(Debug, Args)]
#[command(after_help = "\
Prints the output from its start on, as far as it is still kept, forwards standard input where the workload was made for it (one that \
was started with --detach has none), and exits as `gantry run` would. Ctrl-C leaves the workload to itself; `gantry cancel` stops it.")]
pub(crate) struct AttachArgs {
    /// The workload
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: WorkloadId,
    /// Do not forward standard input
    #[arg(long)]
    pub(crate) no_stdin: bool,
}

/// `gantry logs`
#[derive(Debug, Args)]
#[command(after_help = "\
Follows the output until the workload has ended; Ctrl-C leaves the workload to itself. The output is kept for five minutes after the \
end, or for what --gc-grace of `gantry up` says.")]
pub(crate) struct WorkloadArgs {
    /// The workload
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: WorkloadId,
}

/// `gantry watch`
#[derive(Debug, Args)]
#[command(after_help = "\
Begins with what has happened before, and exits as `gantry run` would once the workload has ended. Ctrl-C leaves the workload to itself. \
With --json, each event is a line.")]
pub(crate) struct WatchArgs {
    /// The workload
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: WorkloadId,
}

/// `gantry explain`
#[derive(Debug, Args)]
#[command(after_help = "\
Of a workload that waits: what each worker says to it, and what would have it placed; of one that does not: where it runs and since when, or how \
it ended. Of an artifact, volume or container: everything \
that keeps it and until when, or the rule by which it went or will go, and when; for a day after it is gone, too. Of a build: what it owns, and \
when it lets go. Of an attempt: what was made for it. Of a cache or a base resource type: what it owns, who uses it, and when it goes. Of a \
transfer: what it brings where, and until when it has to say that it goes on. Of a lease: what it is for, on which worker, until when, and why it ended. \
Of a worker: its state, and what it holds.")]
pub(crate) struct ExplainArgs {
    /// The id of a workload, lease, artifact, volume, container, build, attempt, cache, base resource type, transfer or worker, or the name of a worker
    #[arg(value_name = "ID")]
    pub(crate) id: String,
    /// Of a workload that waits: how many workers are told one by one. Default: 20. All are told together with those that say the same
    #[arg(long, value_name = "COUNT", default_value = "0", hide_default_value = true)]
    pub(crate) workers: u32,
    /// Of a workload that waits: only what this worker says, by its name or id. May be repeated
    #[arg(long = "worker", value_name = "WORKER")]
    pub(crate) only: Vec<String>,
}

/// `gantry cancel`
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    /// The workload
    #[arg(value_name = "WORKLOAD")]
    pub(crate) workload: WorkloadId,
    /// How long the process has between TERM and KILL
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = values::duration)]
    pub(crate) grace: Duration,
}
