//! Options of the commands that list, show and let go of what a cluster holds.

use std::time::Duration;

use clap::{Args, ValueEnum};
use domain::{ArtifactId, BuildId, VolumeHandle};

use crate::cli::values;

/// What can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Machines that run workloads
    #[value(alias = "worker")]
    Workers,
    /// What was submitted
    #[value(alias = "workload")]
    Workloads,
    /// What takes slots of workers, or keeps room free there
    #[value(alias = "lease")]
    Leases,
    /// Bytes that are kept
    #[value(alias = "artifact")]
    Artifacts,
    /// Directories on workers
    #[value(alias = "volume")]
    Volumes,
    /// Containers on workers
    #[value(alias = "container")]
    Containers,
    /// What runs leave to the next ones
    #[value(alias = "cache")]
    Caches,
    /// Images of the types of resources that workers have, or that are cluster-wide
    #[value(alias = "base-type")]
    BaseTypes,
    /// What workers bring along, and whether it could be imported
    #[value(alias = "import")]
    Imports,
}

/// `gantry list`
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// What to list, in the plural or the singular
    #[arg(value_name = "KIND")]
    pub(crate) kind: Kind,
    /// Only those in this state, in the words of the list: `--state deleting`, `--state failed`. Not of workers, leases, base types and imports
    #[arg(long, value_name = "STATE")]
    pub(crate) state: Option<String>,
    /// Only leases on this worker, by its name or id
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Option<String>,
    /// How many at most
    #[arg(long, value_name = "COUNT", default_value = "1000", value_parser = values::at_least_one())]
    pub(crate) limit: usize,
    /// Only artifacts that have no replica on a worker that is in contact and neither cordoned nor retiring: they would be lost with those others
    #[arg(long)]
    pub(crate) at_risk: bool,
    /// Only orphans, of all teams: volumes or containers that the artifact store does not know because it was restored from a backup
    #[arg(long)]
    pub(crate) orphans: bool,
}

/// `gantry show`
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// What it is, in the singular or the plural
    #[arg(value_name = "KIND")]
    pub(crate) kind: Kind,
    /// Its id or, for a worker, its name
    #[arg(value_name = "ID")]
    pub(crate) id: String,
}

/// `gantry clear-cache`
#[derive(Debug, Args)]
#[command(after_help = "\
`gantry list caches` shows their names. What runs with a cache goes on with what it found, and leaves nothing. A cache that something else than \
`gantry run` made is named by its id.")]
pub(crate) struct ClearCacheArgs {
    /// Names of caches of `gantry run`, or ids of any
    #[arg(value_name = "CACHE", required = true)]
    pub(crate) caches: Vec<String>,
}

/// `gantry delete`
#[derive(Debug, Args)]
#[command(after_help = "\
What something else uses or keeps stays, and is named: a workload that runs, a cache. `gantry undelete` brings an artifact back while its \
bytes are still on a worker.")]
pub(crate) struct DeleteArgs {
    /// Artifacts, or workloads of which all artifacts go
    #[arg(value_name = "ID", required_unless_present = "all", value_parser = values::any_id)]
    pub(crate) ids: Vec<String>,
    /// All artifacts of the team that nothing else uses
    #[arg(long, conflicts_with = "ids")]
    pub(crate) all: bool,
}

/// `gantry undelete`
#[derive(Debug, Args)]
#[command(after_help = "\
`gantry list artifacts --state deleting` shows what was deleted, and `gantry explain` whether it can come back: the bytes go when their \
worker's gateway was told to destroy them, which is soon. Those of `gantry upload --inline` stay as long as somebody remembers them, a day.")]
pub(crate) struct UndeleteArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT")]
    pub(crate) artifact: ArtifactId,
    /// How long it is kept then, unless something else keeps it for longer
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
    pub(crate) keep: Duration,
}

/// `gantry gc`
#[derive(Debug, Args)]
#[command(after_help = "\
Where the disk of a worker is full (less than a twentieth and less than 1 GiB is free), what is kept there only for a time goes as well, the \
oldest first: results and uploads that nothing uses any more. `gantry delete` lets go of more.")]
pub(crate) struct GcArgs {
    /// Say what would be marked, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `gantry adopt`
#[derive(Debug, Args)]
#[command(after_help = "\
After a backup of the artifact store was restored, a volume or container that workers hold and the store does not know is an orphan: `gantry \
list volumes --orphans` lists them. An orphan stays until it is adopted or purged.")]
pub(crate) struct AdoptArgs {
    /// The volume
    #[arg(value_name = "VOLUME")]
    pub(crate) volume: VolumeHandle,
    /// The artifact that it shall hold. Default: the one that it held, or where that is not known, a new one
    #[arg(long, value_name = "ARTIFACT")]
    pub(crate) artifact: Option<ArtifactId>,
    /// The build that owns the artifact from now on
    #[arg(long, value_name = "BUILD", conflicts_with = "keep")]
    pub(crate) build: Option<BuildId>,
    /// How long the artifact is kept, unless something else keeps it for longer
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
    pub(crate) keep: Duration,
}

/// `gantry purge`
#[derive(Debug, Args)]
#[command(after_help = "\
After a backup of the artifact store was restored, a volume or container that workers hold and the store does not know is an orphan: `gantry \
list volumes --orphans` and `gantry list containers --orphans` list them, and `gantry explain HANDLE` describes one. What runs in a container that is \
purged is killed. This is about all teams, whichever --team names.")]
pub(crate) struct PurgeArgs {
    /// Volumes and containers
    #[arg(value_name = "HANDLE", value_parser = values::any_id)]
    pub(crate) handles: Vec<String>,
    /// All orphans, of all teams
    #[arg(long, conflicts_with = "handles")]
    pub(crate) all: bool,
    /// Only on this worker, by its name or id
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Option<String>,
}
