//! Options of `gantry config`, `completion`, `man` and `schema`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Arguments of `gantry config`.
#[derive(Debug, Args)]
#[command(after_help = "\
Contexts are kept in $XDG_CONFIG_HOME/gantry/contexts.json (~/.config/gantry/contexts.json). The file has the paths of token files, and no \
tokens. `local` is the cluster on this machine.

Examples:
  gantry config add ci --server http://ci.example:7400 --token-file ~/.ci-token
  gantry config use ci
  gantry --context local ps")]
pub(crate) struct ConfigArgs {
    /// What to do. Default: list the contexts
    #[command(subcommand)]
    pub(crate) command: Option<ConfigCommand>,
}

/// Change of the contexts.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Add or replace a context with the values of --server, --proxy, --token-file and --team
    Add {
        /// Name of the context
        name: String,
    },
    /// Select the context of commands that name none
    Use {
        /// Name of the context, or `local`
        name: String,
    },
    /// List the contexts
    List,
    /// Remove a context
    #[command(visible_alias = "rm")]
    Remove {
        /// Name of the context
        name: String,
    },
}

/// Arguments of `gantry completion`.
#[derive(Debug, Args)]
#[command(after_help = "\
The script completes commands, options and their values, and names and ids of the cluster that the command line selects: workloads, \
artifacts, workers and contexts. It starts no cluster, and waits at most a second for one.

Examples:
  gantry completion bash > ~/.local/share/bash-completion/completions/gantry
  gantry completion zsh > ~/.zfunc/_gantry      # with fpath+=~/.zfunc before compinit
  gantry completion fish > ~/.config/fish/completions/gantry.fish")]
pub(crate) struct CompletionArgs {
    /// Shell that reads the script
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,
}

/// Arguments of `gantry complete-words`.
#[derive(Debug, Args)]
pub(crate) struct CompleteArgs {
    /// The unfinished command line up to the cursor, instead of its words
    #[arg(long, value_name = "LINE", conflicts_with = "words", allow_hyphen_values = true)]
    pub(crate) line: Option<String>,
    /// Words of the unfinished command line after the program, up to the unfinished word
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

/// Arguments of `gantry man`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gantry man ~/.local/share/man/man1; man gantry-run")]
pub(crate) struct ManArgs {
    /// Directory to write into. It is created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
}

/// Arguments of `gantry schema`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gantry schema workload > workload.schema.json
  gantry schema event")]
pub(crate) struct SchemaArgs {
    /// Document, such as `workload`, `event` or `top`. Default: all documents, in `$defs`
    #[arg(value_name = "KIND")]
    pub(crate) document: Option<String>,
}
