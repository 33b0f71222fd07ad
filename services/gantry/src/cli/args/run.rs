//! Options of `gantry run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::args::transfers::{ScanArgs, TakeArgs};
use crate::cli::values::{self, CacheArg, EnvironmentArg, InputArg, OutputArg};

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
    pub(crate) environment: Vec<EnvironmentArg>,
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
    /// Let it be interrupted when its worker is cordoned or retired, and begin again on another. It may run more than once, then. Only with --detach
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
