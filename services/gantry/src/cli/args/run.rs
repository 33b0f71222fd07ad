//! Options of `gantry run`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::args::exec::DetachArgs;
use crate::cli::args::transfers::{AllowArgs, ScanArgs};
use crate::cli::values::{self, CacheArg, EnvironmentArg, ImageArg, InputArg, OutputArg, ServiceArg};

/// Arguments of `gantry run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES, after_long_help = format!("{RUN_DETAILS}\n\n{RUN_EXAMPLES}"))]
pub(crate) struct RunArgs {
    /// Program to run, and its arguments, or the arguments of the image's entrypoint. May be left
    /// out if the image has a command
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,

    /// Name of the workload, by which other commands find it
    ///
    /// The name stands for the workload that has not ended, or else for the newest one that has
    /// ended. If several have not ended, commands list them.
    #[arg(long, value_name = "NAME", value_parser = values::workload_name, help_heading = "Execution")]
    pub(crate) name: Option<String>,
    /// Accepted for users of other tools. Containers are always removed
    #[arg(long, hide = true)]
    pub(crate) rm: bool,
    /// Rejected with the option to use instead.
    #[arg(short = 'v', long = "volume", value_name = "HOST:CONTAINER", hide = true, value_parser = values::no_volume)]
    pub(crate) volumes: Vec<String>,
    /// Upload directory DIR, and give it to the command as ./NAME. Repeatable
    ///
    /// `NAME=artifact:UUID` takes an artifact that the cluster has already. `:ro` at the end makes
    /// the input read-only. Without `:ro`, the command writes into its own copy. If the name of the
    /// directory itself ends in `:ro`, add a slash: `-i src=odd:ro/`.
    #[arg(
        short,
        long = "input",
        value_name = "NAME=DIR[:ro]",
        value_parser = values::input_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) inputs: Vec<InputArg>,
    /// Keep the directory ./NAME after the run, and download it into DIR. Repeatable
    ///
    /// Without DIR, the output stays in the cluster as an artifact, and its id is printed on
    /// standard error. An output with the name of an input starts with the contents of that input.
    /// If DIR is the directory of that input, too, the run is in place: only the changes that the
    /// command made are written into DIR.
    #[arg(
        short,
        long = "output",
        value_name = "NAME[=DIR]",
        value_parser = values::output_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) outputs: Vec<OutputArg>,
    /// Keep the directory PATH of the container for the next run. Repeatable
    ///
    /// The command finds the current version of the cache NAME at PATH. The first run finds an
    /// empty directory. The directory that the command leaves becomes the current version when the
    /// command ends with an exit code. A cache is deleted after 7 days without use, unless the
    /// cluster is configured otherwise.
    #[arg(
        long = "cache",
        value_name = "NAME=PATH",
        value_parser = values::cache_parser(),
        help_heading = "Inputs and outputs"
    )]
    pub(crate) caches: Vec<CacheArg>,
    /// Replace the directories of outputs instead of merging into them
    ///
    /// Nothing is replaced if the command fails. The option has no effect on outputs in place.
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) allow: AllowArgs,
    /// Time for which inputs and outputs are kept in the cluster after the run
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "1h",
        value_parser = values::duration,
        help_heading = "Inputs and outputs"
    )]
    pub(crate) keep: Duration,
    /// Time for which uploads are kept if `gantry` is killed before it submits the workload: 1s to
    /// 24h
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

    /// Root file system of the container
    ///
    /// A reference such as `alpine:3.20` or `ghcr.io/team/app@sha256:…` is pulled from its
    /// registry, once for the whole cluster. Credentials come from your Docker configuration.
    /// `oci:DIR[:NAME]`, `oci-archive:FILE[:NAME]` and `docker-archive:FILE[:NAME]` are images on
    /// this machine. `host` is a view of the worker's own file system: its programs and libraries,
    /// read-only. `artifact:UUID` is the directory `rootfs` of an artifact. A file `metadata.json`
    /// beside `rootfs` may set defaults, such as the environment. `resource-type:NAME` is the image
    /// that the worker or the cluster has for a resource type.
    #[arg(long, value_name = "IMAGE", default_value = "host", value_parser = values::image, help_heading = "Container")]
    pub(crate) image: ImageArg,
    /// Replace the entrypoint of the image by this program. An empty text removes it
    ///
    /// COMMAND has the arguments of the entrypoint. Without COMMAND, the command of the image
    /// applies, unless --entrypoint is given.
    #[arg(long, value_name = "PROGRAM", help_heading = "Container")]
    pub(crate) entrypoint: Option<OsString>,
    /// Platform of the image, such as `linux/arm64`. Default: that of the streamer
    #[arg(long, value_name = "PLATFORM", value_parser = values::platform, help_heading = "Container")]
    pub(crate) platform: Option<images::Platform>,
    /// Set the environment variable K to V, or copy your own K. Repeatable
    ///
    /// The container inherits no other variable of yours.
    #[arg(
        short,
        long = "env",
        value_name = "K=V|K",
        value_parser = values::environment_parser(),
        help_heading = "Container"
    )]
    pub(crate) environment: Vec<EnvironmentArg>,
    /// Read environment variables from FILE, one K=V or K per line. Repeatable
    ///
    /// Empty lines and lines that begin with `#` are left out. Values are taken as they are,
    /// without quotes. -e wins over the files.
    #[arg(long = "env-file", value_name = "FILE", help_heading = "Container")]
    pub(crate) environment_files: Vec<PathBuf>,
    /// Working directory, absolute or relative to /workspace. Inputs and outputs are below it.
    /// Default: /workspace, or that of the image if there are no inputs, outputs and caches
    #[arg(
        short = 'w',
        long = "dir",
        visible_alias = "workdir",
        value_name = "PATH",
        default_value = "",
        hide_default_value = true,
        help_heading = "Container"
    )]
    pub(crate) directory: OsString,
    /// User that runs the command: a name or a uid, with an optional `:GROUP`. Default: the user of
    /// the image, or root
    #[arg(short, long, value_name = "USER", help_heading = "Container")]
    pub(crate) user: Option<String>,
    /// Network of the container. Default: `private`, or `none` if no worker has private networks
    #[arg(long, value_enum, value_name = "NETWORK", help_heading = "Container")]
    pub(crate) network: Option<NetworkArg>,
    /// Give the container no network, like `--network none`
    #[arg(long, conflicts_with = "network", help_heading = "Container")]
    pub(crate) hermetic: bool,
    /// Give the command all capabilities and devices, and no system call filter
    ///
    /// The command can then do everything that root can do on the worker. The operator of the
    /// worker must allow it.
    #[arg(long, help_heading = "Container")]
    pub(crate) privileged: bool,
    /// Do not forward standard input to the command
    #[arg(long, help_heading = "Container")]
    pub(crate) no_stdin: bool,
    /// Give the command the contents of FILE as standard input: at most 1 MiB. `-` reads the
    /// standard input of `gantry` to its end first
    ///
    /// The scheduler stores the contents with the workload, so the option also works with --detach
    /// and --retries.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["no_stdin", "tty"], help_heading = "Container")]
    pub(crate) stdin_file: Option<PathBuf>,
    /// Run a service, such as a database, beside the command. Repeatable
    ///
    /// IMAGE is as in --image. Without COMMAND, the command of the image runs. The service runs `sh
    /// -c COMMAND`, where COMMAND comes last and may contain commas. Services start in the given
    /// order, each when the one before it is ready. `port=N` waits until TCP port N accepts
    /// connections, and `ready=SH` until the shell command SH succeeds, each for at most
    /// `timeout=DURATION` (60s). The command reaches the service at NAME and at localhost. If a
    /// service with `essential` ends, the command is stopped. `gantry logs --service NAME` prints
    /// the output of a service.
    #[arg(
        long = "service",
        value_name = "NAME=IMAGE[,port=N|,ready=SH][,timeout=DURATION][,essential][,command=COMMAND]",
        value_parser = values::service,
        help_heading = "Container"
    )]
    pub(crate) services: Vec<ServiceArg>,

    /// CPU limit in cores, such as `0.5` or `2`. Default: no limit
    #[arg(long, value_name = "CORES", value_parser = values::cpu, help_heading = "Resources")]
    pub(crate) cpu: Option<u64>,
    /// Memory limit with page cache, such as `512M` or `2G`. At least 6M. Default: the limit of the
    /// worker
    #[arg(long, value_name = "SIZE", value_parser = values::memory, help_heading = "Resources")]
    pub(crate) memory: Option<u64>,
    /// Limit of what the command writes to disk, such as `512M` or `10G`. At least 1M. Default: no
    /// limit
    ///
    /// Outputs and caches count, and changed files of inputs and of the image with their whole
    /// size. The command is killed soon after it has written more. At its end it is measured again,
    /// and a command that has written more has no outputs.
    #[arg(long, value_name = "SIZE", value_parser = values::disk, help_heading = "Resources")]
    pub(crate) disk: Option<u64>,
    /// Reserve CPU on the worker, in cores such as `0.5` or `2`. Default: nothing
    ///
    /// The command runs only on a worker with that much unreserved. A reservation limits nothing:
    /// see --cpu.
    #[arg(long, value_name = "CORES", value_parser = values::cpu, help_heading = "Resources")]
    pub(crate) reserve_cpu: Option<u64>,
    /// Reserve memory on the worker, such as `512M` or `2G`. Default: nothing
    #[arg(long, value_name = "SIZE", value_parser = values::size, help_heading = "Resources")]
    pub(crate) reserve_memory: Option<u64>,
    /// Reserve disk space on the worker, such as `10G`. Default: nothing
    #[arg(long, value_name = "SIZE", value_parser = values::size, help_heading = "Resources")]
    pub(crate) reserve_disk: Option<u64>,

    /// Purpose of the command, which selects the ranking of the workers
    #[arg(long, value_enum, value_name = "KIND", default_value_t, help_heading = "Placement")]
    pub(crate) kind: KindArg,
    /// Run only on this worker, given by its name or id. Wait while it is full or out of contact
    ///
    /// `gantry list workers` lists the names.
    #[arg(long, value_name = "NAME", help_heading = "Placement")]
    pub(crate) worker: Option<String>,
    /// Run only on a worker with this tag. Repeatable
    #[arg(long = "tag", value_name = "TAG", value_parser = values::tag, help_heading = "Placement")]
    pub(crate) tags: Vec<String>,
    /// Run only on a worker whose runtime has this capability. Repeatable
    ///
    /// `gantry show worker NAME` lists the capabilities. Example: on a worker with `ends-whole`,
    /// background processes of the command end with it, so they cannot write into its outputs
    /// later.
    #[arg(long = "require", value_name = "CAPABILITY", help_heading = "Placement")]
    pub(crate) capabilities: Vec<String>,
    /// Priority in the queue, from -100 to 100. Higher priorities are placed first
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_hyphen_values = true,
        value_parser = clap::value_parser!(i32).range(-100..=100),
        help_heading = "Placement"
    )]
    pub(crate) priority: i32,
    /// Let the scheduler stop the workload when its worker is cordoned or retired, and start it on
    /// another worker. Requires --detach
    ///
    /// The command may then run more than once.
    #[arg(long, requires = "detach", help_heading = "Placement")]
    pub(crate) interruptible: bool,
    /// Print where the command would run, or why no worker can run it. Nothing is uploaded or run
    #[arg(long, conflicts_with_all = ["detach", "trace"], help_heading = "Placement")]
    pub(crate) explain: bool,

    /// Stop the command when it has run for this long, such as `90s`, and exit with 124. Default:
    /// no limit
    #[arg(long, value_name = "DURATION", value_parser = values::positive_duration, help_heading = "Timeouts and retries")]
    pub(crate) timeout: Option<Duration>,
    /// Give up when the workload has waited this long for a worker, such as `10m`. Default: no
    /// limit
    #[arg(long, value_name = "DURATION", value_parser = values::duration, help_heading = "Timeouts and retries")]
    pub(crate) queue_timeout: Option<Duration>,
    /// Give up when the command has not started this long after its placement, such as `5m`.
    /// Default: no limit
    ///
    /// This includes the time for copying inputs to the worker. With --retries, the workload is
    /// placed again instead.
    #[arg(long, value_name = "DURATION", value_parser = values::positive_duration, help_heading = "Timeouts and retries")]
    pub(crate) start_timeout: Option<Duration>,
    /// Retry at most N times when the worker is lost or the command does not start in time.
    /// Requires --detach
    ///
    /// The command may then run more than once, but never twice at the same time. An exit code of
    /// the command never causes a retry.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=i64::from(rpc::spec::MAX_RETRIES)),
        requires = "detach",
        help_heading = "Timeouts and retries"
    )]
    pub(crate) retries: u32,

    /// Print the id of the workload and exit. The workload runs in the background, without standard
    /// input. With -t, `gantry attach` gives it input
    #[arg(short, long, help_heading = "Execution")]
    pub(crate) detach: bool,
    /// Run the command in a terminal, whose size follows yours. Also written -it
    ///
    /// Standard input must be a terminal, unless --no-stdin or --detach is given. All keys go to
    /// the command except --detach-keys. Both outputs of the command arrive on standard output. The
    /// worker must have the capability `terminal`.
    #[arg(short, long, help_heading = "Execution")]
    pub(crate) tty: bool,
    #[command(flatten, next_help_heading = "Execution")]
    pub(crate) keys: DetachArgs,
    /// Keep the standard output of the command with the workload: at most 1 MiB. Larger output is a
    /// failure
    ///
    /// With --json, the last event has the output as `result`. `gantry show workload ID --json`
    /// prints it, too.
    #[arg(long, conflicts_with = "tty", help_heading = "Execution")]
    pub(crate) keep_result: bool,
    /// Write the trace of this run, with the spans of all services, into FILE as JSON
    #[arg(long, value_name = "FILE", help_heading = "Execution")]
    pub(crate) trace: Option<PathBuf>,
}

impl RunArgs {
    /// Returns the working directory that inputs and outputs are below.
    pub(crate) fn directory(&self) -> &OsStr {
        if self.directory.is_empty() { OsStr::new("/workspace") } else { &self.directory }
    }
}

const RUN_DETAILS: &str = "\
What the command sees:
  The command sees the root file system of the image, its inputs and outputs \
below the working directory, and an empty /tmp and /run. It sees nothing else of \
your machine. Only outputs and caches are kept after the run.

Outputs:
  Outputs are kept and downloaded when the command ends, with any exit code. \
A command that is stopped by --timeout or `gantry cancel` has no outputs. After \
Ctrl-C nothing is downloaded. In place, your own changes stay: if both you and \
the command changed an entry, the version of the command is written beside yours \
as NAME.gantry-result.

Not uploaded:
  Entries that a .gantryignore names, in the syntax of git, and output \
directories inside of an input. An ignore file that cannot be read or parsed \
fails the upload.

Values:
  A DURATION is written 500ms, 30s, 10m, 12h or 2d; a number alone is seconds. A \
SIZE is written 512M or 2G, in powers of 1024.

Exit codes:
  N      the exit code N of the command
  128+N  signal N ended the command; 137 also means out of memory
  124    the command ran for longer than --timeout
  125    Gantry failed, not the command
  126    the program cannot be executed
  127    the program was not found
  130    Ctrl-C: SIGINT, then SIGTERM after 5 s, then SIGKILL after 10 s
  141    standard output was closed, and the command was stopped
  143    SIGTERM, or the workload was cancelled";

const RUN_EXAMPLES: &str = "\
Examples:
  # Upload this directory as ./src, and download ./report into ./out:
  gantry run -i src=. -o report=./out -- sh -c 'ls src > report/files'

  # Use standard input and standard output:
  gantry run -- sort -u < words > sorted

  # Work in a shell:
  gantry run -it -i src=. -- sh

  # Run in the background, follow the output, and download the result:
  gantry run -d --name long -i src=. -o out -- src/long.sh
  gantry logs long
  gantry show workload long; gantry cp long:out ./out";

/// Purpose of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum KindArg {
    /// A task
    #[default]
    Task,
    /// Fetching a version of a resource
    Get,
    /// Creating a version of a resource
    Put,
    /// Checking for versions of a resource
    Check,
}

/// Network that a process sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NetworkArg {
    /// A separate network with outgoing access
    Private,
    /// A loopback device only
    None,
    /// The network of the worker, if its operator allows it
    Host,
}
