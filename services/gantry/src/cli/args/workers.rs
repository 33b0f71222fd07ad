//! Options of the commands that take workers out of service and put them back.

use std::time::Duration;

use clap::Args;

use crate::cli::values;

/// Time limits for draining a worker.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Interrupt the workloads that still run after this long, such as `30m`. Default: never
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub(crate) deadline: Option<Duration>,
    /// Return at once instead of waiting until the worker is drained
    #[arg(long, conflicts_with = "evacuate")]
    pub(crate) no_wait: bool,
    /// Copy artifacts whose only replicas are on the worker to other workers
    ///
    /// Artifacts that workloads and builds use are copied first, then caches, then others; small
    /// ones before large ones. The command ends with "safe to stop" and exit code 0, or lists what
    /// is at risk and exits with 125. After --deadline, it ends without further copies.
    #[arg(long)]
    pub(crate) evacuate: bool,
}

/// Arguments of `gantry cordon`.
#[derive(Debug, Args)]
#[command(after_help = "\
The worker stays cordoned until `gantry uncordon`, also if it restarts. Ctrl-C ends the waiting only.

Workloads started with --interruptible do not delay the drain: once all others have ended, they are stopped and start again on another \
worker. After --deadline, workloads that have not started yet also move to another worker. Running workloads that are not interruptible end \
as errored (INTERRUPTED).")]
pub(crate) struct CordonArgs {
    /// Names or ids of the workers
    #[arg(value_name = "WORKER", required = true)]
    pub(crate) workers: Vec<String>,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Arguments of `gantry uncordon`.
#[derive(Debug, Args)]
pub(crate) struct UncordonArgs {
    /// Names or ids of the workers
    #[arg(value_name = "WORKER", required = true)]
    pub(crate) workers: Vec<String>,
}

/// Arguments of `gantry retire`.
#[derive(Debug, Args)]
#[command(after_help = "\
The worker is drained as with `gantry cordon`, and then forgotten. If it has the only replica of an artifact that is still kept, it stays \
and the command fails: copy such artifacts to other workers with --evacuate, or give them up with --force.

Volumes stay on the worker's disk. They are destroyed if the machine becomes a worker again. The gateway of a retired worker keeps trying to \
register and is rejected: stop it, or admit it as a new worker with `gantry uncordon`.")]
pub(crate) struct RetireArgs {
    /// Name or id of the worker
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    /// Retire the worker even if the last replica of a kept artifact, or orphans, are lost
    #[arg(long, conflicts_with = "evacuate")]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// Arguments of `gantry prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without a worker, deletes the artifacts of the team that no workload, build or cache uses, and what nothing keeps any more. These are also \
results and uploads before their time (--keep). The command says what it deletes, and asks first. `gantry undelete` restores an artifact \
while its bytes exist.

With a worker, forgets a lost worker for good. Workloads of the worker are given up at once. Prune a worker only if its machine is gone: a \
machine that still runs may execute a workload beside its replacement. If the machine comes back, it is a new, empty worker.")]
pub(crate) struct PruneArgs {
    /// Name or id of the worker to forget. Default: delete what nothing uses
    #[arg(value_name = "WORKER")]
    pub(crate) worker: Option<String>,
    /// Forget the worker even if the last replica of a kept artifact, or orphans, are lost
    #[arg(long, requires = "worker")]
    pub(crate) force: bool,
    /// Delete what nothing uses without a question
    #[arg(short, long, conflicts_with = "worker")]
    pub(crate) yes: bool,
}
