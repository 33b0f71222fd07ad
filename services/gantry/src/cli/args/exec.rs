//! Options of `gantry exec`, and of terminals.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use crate::cli::detach_keys::DetachKeys;
use crate::cli::values::{self, EnvironmentArg};

/// Arguments of `gantry exec`.
#[derive(Debug, Args)]
#[command(after_help = "\
The command joins the namespaces and the limits of the container. Its end does not end the workload, and the end of the workload ends it. \
After the end of the workload, the command sees the files as the workload left them, and changes only a copy. It has the environment, the working directory and the user of the container, unless options change them. The exit code is that of the \
command: see `gantry help run`.

Ctrl-C interrupts the command (SIGINT); a second Ctrl-C leaves it running. With -it, all keys go to the command except --detach-keys.

Examples:
  gantry exec $id -- ps aux
  gantry exec -it $id sh           # also after the workload has failed
  gantry exec -i $id -- tar -xf - < files.tar")]
pub(crate) struct ExecArgs {
    /// Name or id of the workload, the beginning of its id, or `last` for the newest one. It runs,
    /// or has ended in the last minutes
    #[arg(value_name = "WORKLOAD", value_parser = values::workload)]
    pub(crate) workload: String,
    /// Run the command in the container of this service
    #[arg(long, value_name = "NAME")]
    pub(crate) service: Option<String>,
    /// Program to run, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
    /// Forward standard input to the command
    #[arg(short = 'i', long = "stdin")]
    pub(crate) stdin: bool,
    /// Run the command in a terminal. With -i, standard input must be a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Set the environment variable NAME to VALUE, or copy your own NAME. Repeatable
    #[arg(
        short,
        long = "env",
        value_name = "NAME=VALUE|NAME",
        value_parser = values::environment_parser()
    )]
    pub(crate) environment: Vec<EnvironmentArg>,
    /// Working directory, absolute. Default: that of the container
    #[arg(short = 'w', long = "workdir", value_name = "DIR")]
    pub(crate) directory: Option<OsString>,
    /// User that runs the command: a name or a uid, with an optional `:GROUP`. Default: that of the
    /// container
    #[arg(short, long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// With -t, end the command when nothing was typed or printed for this long: 1s to 24h.
    /// Default: 1h
    #[arg(long, value_name = "DURATION", value_parser = values::term, requires = "tty")]
    pub(crate) idle_timeout: Option<Duration>,
    #[command(flatten)]
    pub(crate) detach: DetachArgs,
}

/// Option for processes with a terminal.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// Keys that detach you from a command with a terminal. The command runs on
    ///
    /// Write characters, or `ctrl-` and one of `@ a-z [ \\ ] ^ _`, separated by commas. An empty
    /// value turns the keys off.
    #[arg(long = "detach-keys", value_name = "KEYS", default_value = "ctrl-p,ctrl-q")]
    pub(crate) keys: DetachKeys,
}
