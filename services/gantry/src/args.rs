//! The command line: what may be written, and how it is explained.
//!
//! Values are parsed by [`crate::values`]; nothing here does anything.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use domain::{ArtifactId, BuildId, VolumeHandle, WorkloadId};

use crate::addresses;
use crate::values::{self, CacheArg, Copied, InputArg, OutputArg};

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
    /// Make a volume that is set aside a replica of its artifact again
    Adopt(AdoptArgs),
    /// Make garbage of volumes and containers that are set aside
    Purge(PurgeArgs),

    /// Let a worker take no more work, and wait until what runs there has ended
    Land(LandArgs),
    /// Let a worker take work again that was landed, is retiring, was retired, or is set aside
    Unland(UnlandArgs),
    /// Take a worker out of service for good: as land, and then it is forgotten
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

/// `gantry run`
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,

    /// Show a directory to the command as ./NAME: upload DIR, or take the artifact of `NAME=artifact:UUID`. With `:ro` at
    /// the end it is read-only
    #[arg(
        short,
        long = "input",
        value_name = "NAME=DIR[:ro]",
        value_parser = values::input_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) inputs: Vec<InputArg>,
    /// Keep the directory ./NAME that the command fills, and bring it back into DIR if one is given
    #[arg(
        short,
        long = "output",
        value_name = "NAME[=DIR]",
        value_parser = values::output_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) outputs: Vec<OutputArg>,
    /// Let the command find at PATH what the last run with a cache of this NAME left there: nothing the first time. What it leaves there is found by
    /// the next, unless a signal ends it. The cache goes when it was unused for 7 days, or what the cluster says
    #[arg(
        long = "cache",
        value_name = "NAME=PATH",
        value_parser = values::cache_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) caches: Vec<CacheArg>,
    /// Outputs take the place of their directories, rather than being merged into them. Ignored in place, and if the command fails
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) take: TakeArgs,
    /// How long inputs and outputs are kept in the cluster after the end
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1h",
        value_parser = values::duration,
        help_heading = "Inputs and outputs"
    )]
    pub(crate) keep: Duration,
    /// How long what was uploaded is kept when we are killed before the command is submitted
    #[arg(
        long,
        value_name = "DURATION",
        env = "GANTRY_ABANDONED_AFTER",
        default_value = "10m",
        value_parser = values::term,
        help_heading = "Inputs and outputs"
    )]
    pub(crate) abandoned_after: Duration,
    #[command(flatten)]
    pub(crate) scan: ScanArgs,

    /// The root file system that the command sees: the worker's own; the directory `rootfs` of an artifact, which may say
    /// in a `metadata.json` beside it what env and user are by default; or the image that the worker brings along for a resource type
    #[arg(long, value_name = "host|artifact:UUID|resource-type:NAME", default_value = "host", value_parser = values::image, help_heading = "The process")]
    pub(crate) image: domain::workload::Image,
    /// Set a variable (K=V), or copy one of ours (K). Nothing else of our environment is inherited
    #[arg(
        short,
        long = "env",
        value_name = "K=V|K",
        value_parser = values::environment_parser(),
        help_heading = "The process"
    )]
    pub(crate) environment: Vec<Copied>,
    /// Working directory, absolute or as seen from /workspace; inputs and outputs are below it
    #[arg(long = "dir", value_name = "PATH", default_value = "/workspace", help_heading = "The process")]
    pub(crate) directory: OsString,
    /// Who runs the command: a name or uid, with `:group` if you like. Root, unless the image says otherwise
    #[arg(long, value_name = "USER", help_heading = "The process")]
    pub(crate) user: Option<String>,
    /// Processor time, in cores: `0.5`, `2`
    #[arg(long, value_name = "CORES", value_parser = values::cpu, help_heading = "The process")]
    pub(crate) cpu: Option<u64>,
    /// Memory, with page cache: `512M`, `2G`; 6M at the least
    #[arg(long, value_name = "SIZE", value_parser = values::memory, help_heading = "The process")]
    pub(crate) memory: Option<u64>,
    /// All capabilities and devices, no filter: as good as root on the worker
    #[arg(long, help_heading = "The process")]
    pub(crate) privileged: bool,
    /// Which network the process sees
    #[arg(long, value_enum, value_name = "NETWORK", default_value_t, help_heading = "The process")]
    pub(crate) network: NetworkArg,
    /// No network: the same as `--network none`
    #[arg(long, conflicts_with = "network", help_heading = "The process")]
    pub(crate) hermetic: bool,
    /// Do not forward standard input
    #[arg(long, help_heading = "The process")]
    pub(crate) no_stdin: bool,

    /// Only on a worker with this tag. May be repeated
    #[arg(long = "tag", value_name = "TAG", value_parser = values::tag, help_heading = "When and where")]
    pub(crate) tags: Vec<String>,
    /// Stop the command after this long, and exit 124
    #[arg(long, value_name = "DURATION", value_parser = values::some_time, help_heading = "When and where")]
    pub(crate) timeout: Option<Duration>,
    /// Give up when no worker was free for this long
    #[arg(long, value_name = "DURATION", value_parser = values::duration, help_heading = "When and where")]
    pub(crate) queue_timeout: Option<Duration>,
    /// Give up when the command was not started this long after a worker was found, or with --retries try once more
    #[arg(long, value_name = "DURATION", value_parser = values::some_time, help_heading = "When and where")]
    pub(crate) start_timeout: Option<Duration>,
    /// Begin again so many times when the worker is lost, or the command does not start in time. It may run more than once, then, though never twice
    /// at a time. How it ends by itself is no reason. Only with --detach
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=i64::from(rpc::spec::MOST_RETRIES)),
        requires = "detach",
        help_heading = "When and where"
    )]
    pub(crate) retries: u32,
    /// Be placed before those that wait with a lower one: -100 to 100
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_hyphen_values = true,
        value_parser = clap::value_parser!(i32).range(-100..=100),
        help_heading = "When and where"
    )]
    pub(crate) priority: i32,
    /// Only where so much processor time is not reserved by others, and reserve it, whatever is used of it: `0.5`, `2`
    #[arg(long, value_name = "CORES", value_parser = values::cpu, help_heading = "When and where")]
    pub(crate) reserve_cpu: Option<u64>,
    /// The same of memory
    #[arg(long, value_name = "SIZE", value_parser = values::size, help_heading = "When and where")]
    pub(crate) reserve_memory: Option<u64>,
    /// The same of disk
    #[arg(long, value_name = "SIZE", value_parser = values::size, help_heading = "When and where")]
    pub(crate) reserve_disk: Option<u64>,
    /// Only on a worker whose runtime has this capability (`gantry show worker` lists them), such as `ends-whole`: nothing that the command leaves in
    /// the background runs on, or writes into its outputs, once it has ended. May be repeated
    #[arg(long = "require", value_name = "CAPABILITY", help_heading = "When and where")]
    pub(crate) capabilities: Vec<String>,
    /// Let it be interrupted when its worker lands or is retired, and begin again on another. It may run more than once, then. Only with --detach
    #[arg(long, requires = "detach", help_heading = "When and where")]
    pub(crate) interruptible: bool,
    /// Print the workload's id and leave it to itself
    #[arg(short, long, help_heading = "When and where")]
    pub(crate) detach: bool,
    /// Say where it would run, or why nowhere, and do nothing
    #[arg(long, conflicts_with_all = ["detach", "trace"], help_heading = "When and where")]
    pub(crate) explain: bool,
    /// Write the trace of this run, with the spans of all services, as JSON
    #[arg(long, value_name = "FILE", help_heading = "When and where")]
    pub(crate) trace: Option<PathBuf>,
}

const RUN_HELP: &str = "\
Examples:
  # Your directory as ./src, and what is left in ./report back into ./out:
  gantry run -i src=. -o report=./out -- sh -c 'ls src > report/files'

  # An output with the name of an input starts with its contents; in place:
  gantry run -i src=. -o src=. -- touch src/made

  # Bytes in, bytes out:
  gantry run -- sort -u < words > sorted

  # What an earlier run made, limits, a variable, no network:
  gantry run -i data=artifact:0197c1a2-0000-7000-8000-000000000000:ro \\
      --memory 1G --cpu 2 -e LANG=C --network none -- sha256sum -b data/file

  # What is downloaded or built once is there the next time. Your cargo is shown
  # if the cluster runs with `gantry up --host-path ~/.cargo/bin,~/.rustup`:
  gantry run -i src=. -e PATH -e CARGO_HOME=/cargo \\
      --cache cargo=/cargo --cache target=/workspace/src/target -- \\
      sh -c 'cd src && cargo test'

  # In the background:
  id=$(gantry run -d -i src=. -o out -- src/long.sh)
  gantry logs $id                        # until it has ended
  gantry show workload $id; gantry download ARTIFACT ./out

What the command sees: the file system of the worker, with a layer of its own for what it writes; its inputs and outputs below the \
working directory; a fresh /tmp and /run of its own. Of your working directory, and of your /tmp, it sees what you bring with -i.

The working directory is made when it has inputs or outputs below it, or is in /workspace and not in one of them; any other must \
be there.

Outputs are kept and brought back when the command ended by itself, whatever its exit code. After --timeout and `gantry cancel` there \
are none. After Ctrl-C nothing is brought back; if the command ended before it was killed, its outputs are kept and named.

In place, only what the command made, changed or removed changes. What you changed meanwhile stays, and the version of the command \
stands beside it as NAME.gantry-result.

Without --detach, output and standard input are yours; a detached command has no standard input.

Of a result, these are not written unless they are asked for, or there already: what makes git run programs (--allow-git-hooks), \
setuid and setgid bits, file capabilities, device nodes and .gantryignore files (--preserve-special). What was not written is named. A symbolic link in the \
path of DIR is refused unless --follow-links is given: an earlier result may have made it.

A directory whose bytes the cluster has already becomes no second artifact: the one that is there is used, under its own label.

Left out of uploads: what .gantryignore files name in the syntax of git, and the directories of outputs that lie inside of an input. \
With --gitignore, what .gitignore, .git/info/exclude and the core.excludesFile of git name is left out, too, unless git tracks it or a \
.gantryignore brings it back. An ignore file that cannot be read, is a link, or has a line that is no pattern fails the upload.

A directory whose own name ends in :ro is written with a slash behind it, as in -i src=odd:ro/.

Exit codes:
  N      that of the command
  128+N  signal N ended it; 137 also when it ran out of memory
  124    it ran for longer than --timeout
  125    something else than the command failed
  126    the program cannot be executed
  127    the program was not found
  130    Ctrl-C: the command gets SIGINT, and has 10 s to end; a second one does not wait
  141    our standard output was closed, and the command asked to end
  143    SIGTERM, or somebody else cancelled it";

/// How directories are scanned.
#[derive(Debug, Clone, Args)]
pub(crate) struct ScanArgs {
    /// Leave out what git ignores, too: by .gitignore, .git/info/exclude and core.excludesFile
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) gitignore: bool,
    /// Go on when files cannot be read (they are left out) or change while they are uploaded
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_changed: bool,
}

/// What of a result is written into a directory of the caller.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct TakeArgs {
    /// Write what makes git run programs, too: .git/hooks, .git/config and the like
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_git_hooks: bool,
    /// Keep setuid and setgid bits, file capabilities, device nodes, and changes of .gantryignore
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) preserve_special: bool,
    /// Follow symbolic links in the paths of results, and in relative ones of inputs and of the trace
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) follow_links: bool,
}

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

/// `gantry adopt`
#[derive(Debug, Args)]
#[command(after_help = "\
After a backup of the artifact store was restored, what workers hold and the store does not know is set aside: `gantry list volumes \
--set-aside` lists it. Nothing becomes of it before it is adopted or purged.")]
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
After a backup of the artifact store was restored, what workers hold and the store does not know is set aside: `gantry list volumes \
--set-aside` and `gantry list containers --set-aside` list it, and `gantry explain HANDLE` says what it is. What runs in a container that is \
purged is killed. This is about all teams, whichever --team names.")]
pub(crate) struct PurgeArgs {
    /// Volumes and containers
    #[arg(value_name = "HANDLE", value_parser = values::any_id)]
    pub(crate) handles: Vec<String>,
    /// All that is set aside, instead: of all teams
    #[arg(long, conflicts_with = "handles")]
    pub(crate) all: bool,
    /// Only on this worker, by its name or id
    #[arg(long, value_name = "WORKER")]
    pub(crate) worker: Option<String>,
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

/// `gantry upload`
#[derive(Debug, Args)]
pub(crate) struct UploadArgs {
    /// The directory. What is uploaded is kept for 12 hours (as the artifact store is set), and longer while something owns it
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// A name, for people. Default: that of the directory. Bytes that the cluster has already keep theirs, except with --inline, which makes
    /// another artifact each time
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// Have the cluster keep the bytes in its database: no worker is needed until somebody uses them, and none is lost with them. At most 1 MiB,
    /// and 1000 files, directories and symbolic links
    #[arg(long)]
    pub(crate) inline: bool,
    /// Make it the image of a resource type, on all workers and for all teams: `gantry run --image resource-type:NAME` runs in its rootfs/ from
    /// then on, whatever workers bring along, and it is kept until another one takes its place
    #[arg(long, value_name = "NAME")]
    pub(crate) resource_type: Option<String>,
    /// Its version, for people
    #[arg(
        long,
        value_name = "TEXT",
        requires = "resource_type",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) type_version: String,
    #[command(flatten)]
    pub(crate) scan: ScanArgs,
}

/// `gantry download`
#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT")]
    pub(crate) artifact: ArtifactId,
    /// Where to; made where it is missing
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Take the place of the directory, rather than being merged into it
    #[arg(long)]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) take: TakeArgs,
}

/// `gantry cat`
#[derive(Debug, Args)]
pub(crate) struct CatArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT")]
    pub(crate) artifact: ArtifactId,
    /// The file, as seen from the root of the artifact. Symbolic links are not followed
    #[arg(value_name = "PATH")]
    pub(crate) path: OsString,
}

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
    /// Images of the types of resources that come with workers, or with the centre
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
    /// Only artifacts that have no replica on a worker that is in contact and not landing or retiring: they would be lost with those others
    #[arg(long)]
    pub(crate) at_risk: bool,
    /// Only volumes or containers that are set aside, of all teams: the artifact store came out of a backup, and does not know them
    #[arg(long)]
    pub(crate) set_aside: bool,
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

/// `gantry land`
#[derive(Debug, Args)]
#[command(after_help = "\
It stays so, whatever the worker does, until `gantry unland`. What is marked as interruptible (`gantry run --interruptible`) does not hold it up: it \
is stopped once everything else has ended, and begins again on another worker. With --deadline, so is then what was not started yet; what \
was started and is not interruptible ends as errored (INTERRUPTED). Ctrl-C ends the waiting, and nothing else.")]
pub(crate) struct LandArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
}

/// `gantry unland`
#[derive(Debug, Args)]
pub(crate) struct UnlandArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
}

/// `gantry retire`
#[derive(Debug, Args)]
#[command(after_help = "\
It goes once nothing runs there, as with `gantry land`, and only if no artifact that something keeps has its bytes nowhere else. What it \
holds is nobody's from then on: it stays on its disk, and is destroyed if the machine becomes a worker again. Its gateway goes on asking and is not let in: \
stop it, or let it in again, as a new worker, with `gantry unland`.")]
pub(crate) struct RetireArgs {
    /// The worker's name or its id
    #[arg(value_name = "WORKER")]
    pub(crate) worker: String,
    /// Even if that loses the last replica of something that is kept, or what is set aside there
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
    /// Even if that loses the last replica of something that is kept, or what is set aside there
    #[arg(long)]
    pub(crate) force: bool,
}

/// Which network a process sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum NetworkArg {
    /// Its own, with outgoing access
    #[default]
    Private,
    /// Its own, with a loopback device and nothing else
    None,
    /// The worker's; only where its operator allows it
    Host,
}

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
    /// The database of the artifact store, artifact-store.db in the state directory, was restored from a backup: what it does not know is set aside
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
