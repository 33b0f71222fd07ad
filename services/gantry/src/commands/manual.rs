//! `gantry completion` and `gantry man`: scripts for shells and manual pages, from the definition
//! of the command line.

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::args::{Cli, CompletionArgs, ManArgs};
use crate::render::stdout::print;

/// Adds names and ids of the cluster to what the script of clap completes.
const BASH_WORDS: &str = r#"
_gantry_with_words() {
    _gantry "$@"
    local word
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <(gantry complete-words --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
}
complete -F _gantry_with_words -o bashdefault -o default gantry
"#;
/// Call of the script of clap for zsh, which [`ZSH_WORDS`] precedes.
const ZSH_END: &str = r#"
if [ "$funcstack[1]" = "_gantry" ]; then
    _gantry "$@"
"#;
/// As [`BASH_WORDS`], and the call.
const ZSH_WORDS: &str = r#"
functions[_gantry_of_clap]=$functions[_gantry]
_gantry() {
    local -a found
    found=(${(f)"$(gantry complete-words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#found )) && compadd -a found
    _gantry_of_clap "$@"
}

if [ "$funcstack[1]" = "_gantry" ]; then
    _gantry "$@"
"#;
/// As [`BASH_WORDS`].
const FISH_WORDS: &str = "
complete -c gantry -a '(gantry complete-words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
";

/// Executes `gantry completion`.
pub(crate) fn completion(args: &CompletionArgs) -> anyhow::Result<()> {
    print(&script(args.shell)?)
}

fn script(shell: Shell) -> anyhow::Result<String> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gantry", &mut script);
    let script = String::from_utf8(script).context("cannot write a script for the shell")?;
    Ok(match shell {
        Shell::Bash => script + BASH_WORDS,
        Shell::Zsh => script.replace(ZSH_END, ZSH_WORDS),
        Shell::Fish => script + FISH_WORDS,
        _ => script,
    })
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
        let shown = Cli::command();
        let shown = shown.get_subcommands().filter(|command| !command.is_hide_set());
        for command in shown.map(clap::Command::get_name) {
            let page = directory.path().join(format!("man1/gantry-{command}.1"));
            let text = std::fs::read_to_string(&page).expect(command);
            let name = command.replace('-', "\\-");
            assert!(text.contains(&format!("gantry\\-{name}")), "{command}: {text}");
        }
    }

    #[test]
    fn scripts_complete_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell).expect("text");
            for word in ["inspect", "env-file", "workloads", "complete-words --"] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }
}
