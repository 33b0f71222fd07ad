//! Options of the commands that take workers out of service and put them back.

use std::time::Duration;

use clap::Args;

use crate::cli::values;

/// How long a worker may take that goes.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Interrupt what is left after this long. Default: never
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    pub(crate) deadline: Option<Duration>,
    /// Say what shall be, and do not wait for it
    #[arg(long)]
    pub(crate) no_wait: bool,
}

/// `gantry cordon`
#[derive(Debug, Args)]
#[command(after_help = "\
It stays so, whatever the worker does, until `gantry uncordon`. What is marked as interruptible (`gantry run --interruptible`) does not hold it up: it \
is stopped once everything else has ended, and begins again on another worker. With --deadline, so is then what was not started yet; what \
was started and is not interruptible ends as errored (INTERRUPTED). Ctrl-C ends the waiting, and nothing else.")]
pub(crate) struct CordonArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// `gantry uncordon`
#[derive(Debug, Args)]
pub(crate) struct UncordonArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
}

/// `gantry retire`
#[derive(Debug, Args)]
#[command(after_help = "\
It goes once nothing runs there, as with `gantry cordon`, and only if no artifact that something keeps has its bytes nowhere else. What it \
holds is nobody's from then on: it stays on its disk, and is destroyed if the machine becomes a worker again. Its gateway goes on asking and is not let in: \
stop it, or let it in again, as a new worker, with `gantry uncordon`.")]
pub(crate) struct RetireArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    /// Even if that loses the last replica of something that is kept, or orphans
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// `gantry prune`
#[derive(Debug, Args)]
#[command(after_help = "\
What it ran is given up at once: only say so of a worker that is really gone, or it may run on beside what takes its place. Were it to come \
back, it would be a new worker that holds nothing.")]
pub(crate) struct PruneArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    /// Even if that loses the last replica of something that is kept, or orphans
    #[arg(long)]
    pub(crate) force: bool,
}
