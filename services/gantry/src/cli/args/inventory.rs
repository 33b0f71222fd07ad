//! Options of the commands that list, show, delete and restore the contents of a cluster.

use std::time::Duration;

use clap::{Args, ValueEnum};
use domain::{ArtifactId, BuildId};

use crate::cli::values;
use crate::render::listing::{Format, Listing};

/// Kind of object that a cluster has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// Machines that run workloads
    #[value(alias = "worker")]
    Workers,
    /// Commands that were submitted
    #[value(alias = "workload")]
    Workloads,
    /// Slots of workers that are in use or reserved
    #[value(alias = "lease")]
    Leases,
    /// Images that were pulled from registries
    #[value(alias = "image")]
    Images,
    /// File trees: inputs, outputs, uploads and caches
    #[value(alias = "artifact")]
    Artifacts,
    /// Directories on workers
    #[value(alias = "volume")]
    Volumes,
    /// Containers on workers
    #[value(alias = "container")]
    Containers,
    /// Directories that are kept between runs
    #[value(alias = "cache")]
    Caches,
    /// Images of resource types, of single workers or cluster-wide
    #[value(alias = "base-type")]
    BaseTypes,
    /// Worker-provided images and certificates, and whether they were imported
    #[value(alias = "import")]
    Imports,
}

/// Arguments of `gantry list`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gantry list workloads --state running
  gantry list workloads --filter state=failed --filter name=build
  gantry list workloads --columns id,age --wide
  gantry list artifacts --format '{{artifact_id}} {{label}}'
  gantry list artifacts --at-risk
  gantry list leases --worker local")]
pub(crate) struct ListArgs {
    /// Kind of objects, in the plural or the singular. Default: an overview of workers, and of the
    /// workloads that have not ended
    #[arg(value_name = "KIND")]
    pub(crate) kind: Option<Kind>,
    /// List only objects in this state, such as `running` or `deleting`. For workloads, artifacts,
    /// volumes and containers
    #[arg(long, value_name = "STATE")]
    pub(crate) state: Option<String>,
    /// List only the leases of this worker, by name or id
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Option<String>,
    /// Number of objects to list at most
    #[arg(long, value_name = "COUNT", default_value = "1000", value_parser = values::at_least_one())]
    pub(crate) limit: usize,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
    /// List only artifacts that are lost if all cordoned, retiring, stalled and lost workers
    /// disappear
    #[arg(long)]
    pub(crate) at_risk: bool,
    /// List only orphans, of all teams: volumes or containers that the restored artifact store does
    /// not know
    #[arg(long)]
    pub(crate) orphans: bool,
}

/// Options that say which objects of a list are printed, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct FormatArgs {
    /// List only objects with this value, such as `name=build`. Repeatable: all filters must hold
    ///
    /// The keys depend on the list, such as `state`, `name`, `worker`, `label` and `build`. An
    /// unknown key is rejected with the keys of the list. `name` and `label` take beginnings.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = values::filter)]
    pub(crate) filter: Vec<(String, String)>,
    /// Print a table, a table with whole ids and texts (`wide`), JSON (`json`), or a template for
    /// each object
    ///
    /// A template has the syntax of Jinja and the fields of the JSON document, such as
    /// `{{workload_id}} {{spec.name}}`.
    #[arg(long, value_name = "table|wide|json|TEMPLATE", value_parser = values::format, default_value = "table")]
    pub(crate) format: Format,
    /// The same as `--format wide`
    #[arg(long, alias = "no-trunc", conflicts_with = "format")]
    pub(crate) wide: bool,
    /// Columns of the table, by their headers, separated by commas, such as `id,age`
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',', conflicts_with = "json")]
    pub(crate) columns: Vec<String>,
}

impl FormatArgs {
    /// Returns the listing of at most `limit` objects.
    pub(crate) fn listing(&self, limit: usize, as_json: bool) -> Listing {
        let format = match (as_json, self.wide) {
            (true, _) => Format::Json,
            (false, true) => Format::Wide,
            (false, false) => self.format.clone(),
        };
        Listing::new(limit, format).with_columns(self.columns.clone())
    }
}

/// Arguments of `gantry ps`.
#[derive(Debug, Args)]
#[command(after_help = "\
The same as `gantry list workloads`, but without the workloads that have ended, unless --filter selects a state. With -q, only whole ids are \
printed.


Examples:
  gantry ps -a
  gantry ps --filter worker=local
  gantry cancel $(gantry ps -q)")]
pub(crate) struct PsArgs {
    /// Also list workloads that have ended
    #[arg(short, long)]
    pub(crate) all: bool,
    /// Number of workloads to list at most
    #[arg(short = 'n', long, value_name = "COUNT", default_value = "1000", value_parser = values::at_least_one())]
    pub(crate) limit: usize,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

/// Arguments of `gantry inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Names or ids of workloads or workers, ids of artifacts, references of images, handles of
    /// volumes or containers, beginnings of ids and handles, or `last` for the newest workload
    #[arg(value_name = "ID", required = true)]
    pub(crate) references: Vec<String>,
}

/// Arguments of `gantry show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Kind of the object, in the singular or the plural
    #[arg(value_name = "KIND")]
    pub(crate) kind: Kind,
    /// Id of the object. Workloads, workers, images and caches also have names. The beginning of
    /// the id of a workload, artifact, volume or container is enough
    #[arg(value_name = "ID")]
    pub(crate) id: String,
}

/// Arguments of `gantry clear-cache`.
#[derive(Debug, Args)]
#[command(after_help = "\
`gantry list caches` shows the names. A workload that runs with the cache keeps the version that it started with, and leaves no new one. A \
cache that was not made by `gantry run` has no name: give its id.")]
pub(crate) struct ClearCacheArgs {
    /// Names of caches of `gantry run`, or ids of any caches
    #[arg(value_name = "CACHE", required = true)]
    pub(crate) caches: Vec<String>,
}

/// Arguments of `gantry delete`.
#[derive(Debug, Args)]
#[command(after_help = "\
Artifacts that a running workload, a build or a cache uses stay, and are named in a warning. `gantry undelete` restores a deleted artifact as \
long as a worker or the artifact store has its bytes. A deleted image is pulled again when it is needed. An output or an id of a \
workload or artifact comes before an image with the same name.

Examples:
  gantry rm build
  gantry rm build:report
  gantry rm alpine:3.20")]
pub(crate) struct DeleteArgs {
    /// Ids of artifacts, references of pulled images, or names or ids of finished workloads whose
    /// inputs and outputs are deleted. The beginning of an id is enough
    #[arg(value_name = "ID", required_unless_present = "all")]
    pub(crate) ids: Vec<String>,
    /// Delete all artifacts of the team that nothing uses
    #[arg(long, conflicts_with = "ids")]
    pub(crate) all: bool,
}

/// Arguments of `gantry rmi`.
#[derive(Debug, Args)]
pub(crate) struct RmiArgs {
    /// References or digests of pulled images
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<String>,
}

/// Arguments of `gantry undelete`.
#[derive(Debug, Args)]
#[command(after_help = "\
`gantry list artifacts --state deleting` lists deleted artifacts. `gantry explain ARTIFACT` says whether an artifact can be restored: that is \
possible until the store requests the destruction of the bytes, which happens soon. Artifacts of `gantry upload --inline` can be \
restored for a day.")]
pub(crate) struct UndeleteArgs {
    /// Id of the artifact, the beginning of its id, or `WORKLOAD:OUTPUT`
    #[arg(value_name = "ARTIFACT", value_parser = values::artifact)]
    pub(crate) artifact: String,
    /// Time for which the restored artifact is kept at least
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
    pub(crate) keep: Duration,
}

/// Arguments of `gantry gc`.
#[derive(Debug, Args)]
#[command(after_help = "\
If the disk of a worker is full, containers there that are kept after the end of their workloads are deleted at once. Then results and uploads \
there that nothing uses are deleted before their time, the oldest first. A disk is full \
if less than 5 % and less than 1 GiB of it is free. `gantry delete` deletes more.")]
pub(crate) struct GcArgs {
    /// Print the objects that would be marked, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Arguments of `gantry adopt`.
#[derive(Debug, Args)]
#[command(after_help = "\
After the artifact store was restored from a backup, volumes and containers that workers hold and the store does not know are orphans. \
`gantry list volumes --orphans` lists them. An orphan stays until it is adopted or purged.")]
pub(crate) struct AdoptArgs {
    /// Handle of the volume, or its first 4 digits or more
    #[arg(value_name = "VOLUME", value_parser = values::handle)]
    pub(crate) volume: String,
    /// Id of the artifact that the volume becomes a replica of. Default: its former artifact, or a
    /// new one if that is unknown
    #[arg(long, value_name = "ARTIFACT")]
    pub(crate) artifact: Option<ArtifactId>,
    /// Build that owns the artifact from now on
    #[arg(long, value_name = "BUILD", conflicts_with = "keep")]
    pub(crate) build: Option<BuildId>,
    /// Time for which the artifact is kept at least
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
    pub(crate) keep: Duration,
}

/// Arguments of `gantry purge`.
#[derive(Debug, Args)]
#[command(after_help = "\
After the artifact store was restored from a backup, volumes and containers that workers hold and the store does not know are orphans. \
`gantry list volumes --orphans` and `gantry list containers --orphans` list them, and `gantry explain HANDLE` describes one. Processes in a \
purged container are killed. The command acts on the orphans of all teams; --team has no effect.")]
pub(crate) struct PurgeArgs {
    /// Handles of orphaned volumes and containers. The first 4 digits or more are enough
    #[arg(value_name = "HANDLE", value_parser = values::handle)]
    pub(crate) handles: Vec<String>,
    /// Purge all orphans, of all teams
    #[arg(long, conflicts_with = "handles")]
    pub(crate) all: bool,
    /// Purge only orphans of this worker, by name or id
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Option<String>,
}
