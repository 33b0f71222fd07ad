//! `gantry completion` and `gantry man`: scripts for shells and manual pages, from the definition
//! of the command line.

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::args::{Cli, CompletionArgs, ManArgs};
use crate::render::stdout::print;

/// Executes `gantry completion`.
pub(crate) fn completion(args: &CompletionArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "gantry", &mut script);
    print(&String::from_utf8(script).context("cannot write a script for the shell")?)
}

/// Executes `gantry man`.
pub(crate) fn manual(args: &ManArgs) -> anyhow::Result<()> {
    let failed = || format!("cannot write manual pages into {}", args.directory.display());
    std::fs::create_dir_all(&args.directory).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.directory).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_manual_page() {
        let directory = tempfile::tempdir().expect("a directory");
        manual(&ManArgs { directory: directory.path().join("man1") }).expect("written");
        for command in Cli::command().get_subcommands().map(clap::Command::get_name) {
            let page = directory.path().join(format!("man1/gantry-{command}.1"));
            let text = std::fs::read_to_string(&page).expect(command);
            let name = command.replace('-', "\\-");
            assert!(text.contains(&format!("gantry\\-{name}")), "{command}: {text}");
        }
    }

    #[test]
    fn scripts_complete_commands() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "gantry", &mut script);
            let script = String::from_utf8(script).expect("text");
            for word in ["inspect", "env-file", "workloads"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
