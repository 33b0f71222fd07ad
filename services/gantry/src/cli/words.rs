//! What the last word of an unfinished command line stands for, for completion in shells.
//!
//! The name of a value in the definition of the command line, such as `WORKLOAD`, says what the
//! word is.

use clap::{Arg, Command};

/// Options that select a cluster and a team.
const SELECTING: [&str; 5] = ["server", "context", "proxy", "token-file", "team"];

/// What a word stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Object {
    Workload,
    /// A workload that has not ended.
    UnfinishedWorkload,
    Artifact,
    Worker,
    Context,
    /// A workload, an artifact, a worker or an image.
    Any,
}

/// An unfinished command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unfinished {
    pub(crate) object: Object,
    /// Options of the command line that select the cluster, with their values.
    pub(crate) selecting: Vec<String>,
}

/// Splits an unfinished command line into the words after the program. Bash itself would also split
/// at `=` and `:`.
pub(crate) fn of_line(line: &str) -> Vec<String> {
    let mut words: Vec<_> = line.split_whitespace().skip(1).map(str::to_owned).collect();
    if line.ends_with(char::is_whitespace) {
        words.push(String::new());
    }
    words
}

/// Parses the words after the program. The last one is unfinished. `None`: it stands for something
/// that no cluster lists.
pub(crate) fn parse(command: &Command, words: &[String]) -> Option<Unfinished> {
    let (last, before) = words.split_last()?;
    let (mut command, mut path) = (command, Vec::new());
    let (mut value_of, mut positionals, mut selecting) = (None::<&Arg>, 0, Vec::new());
    for word in before {
        if let Some(option) = value_of.take() {
            if let Some(name) = option.get_long().filter(|name| SELECTING.contains(name)) {
                selecting.extend([format!("--{name}"), word.clone()]);
            }
        } else if word == "--" {
            // The command of the container follows.
            return None;
        } else if let Some(option) = find_option(command, word) {
            value_of = Some(option).filter(|option| takes_value(option));
        } else if word.starts_with('-') {
            let given = word.strip_prefix("--").and_then(|word| word.split_once('='));
            if given.is_some_and(|(name, _)| SELECTING.contains(&name)) {
                selecting.push(word.clone());
            }
        } else if let Some(found) = command.find_subcommand(word).filter(|_| positionals == 0) {
            command = found;
            path.push(found.get_name());
        } else {
            positionals += 1;
        }
    }
    let arg = match value_of {
        Some(option) => option,
        None if last.starts_with('-') => return None,
        None => {
            let of_command: Vec<_> = command.get_positionals().collect();
            of_command.get(positionals).or(of_command.last().filter(|arg| is_repeated(arg))).copied()?
        }
    };
    Some(Unfinished { object: object(&path, arg)?, selecting })
}

fn find_option<'c>(command: &'c Command, word: &str) -> Option<&'c Arg> {
    let mut options = command.get_arguments();
    match (word.strip_prefix("--"), word.strip_prefix('-')) {
        (Some(long), _) => options.find(|arg| arg.get_long() == Some(long)),
        // The last letter of several may take a value.
        (None, Some(letters)) => {
            options.find(|arg| arg.get_short().is_some() && arg.get_short() == letters.chars().last())
        }
        (None, None) => None,
    }
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

fn is_repeated(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|number| number.max_values() > 1)
        || matches!(arg.get_action(), clap::ArgAction::Append)
}

/// Returns what the value of an argument stands for. `path` names the command.
fn object(path: &[&str], arg: &Arg) -> Option<Object> {
    let name = arg.get_value_names().and_then(|names| names.first());
    match (path, name.map(clap::builder::Str::as_str)?) {
        (["cancel" | "kill"], "WORKLOAD") => Some(Object::UnfinishedWorkload),
        (_, "WORKLOAD") => Some(Object::Workload),
        (_, "ARTIFACT") => Some(Object::Artifact),
        (_, "WORKER") => Some(Object::Worker),
        (["explain" | "inspect" | "show" | "delete"], "ID") => Some(Object::Any),
        (["config", "use" | "remove"], _) => Some(Object::Context),
        _ if arg.get_long() == Some("context") => Some(Object::Context),
        _ if arg.get_long() == Some("worker") => Some(Object::Worker),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::args::Cli;

    fn parsed(line: &str) -> Option<Unfinished> {
        let mut command = Cli::command();
        command.build();
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        parse(&command, &words)
    }

    #[test]
    fn last_word_is_recognized() {
        for (line, object) in [
            ("logs ", Some(Object::Workload)),
            ("logs bu", Some(Object::Workload)),
            ("logs -n 5 bu", Some(Object::Workload)),
            ("logs -n ", None),
            ("logs --", None),
            ("logs build ", None),
            ("exec -it bu", Some(Object::Workload)),
            ("exec build -- l", None),
            ("stop a b", Some(Object::UnfinishedWorkload)),
            ("cordon ", Some(Object::Worker)),
            ("run --worker lo", Some(Object::Worker)),
            ("run tr", None),
            ("download ", Some(Object::Artifact)),
            ("inspect a b", Some(Object::Any)),
            ("--context ", Some(Object::Context)),
            ("logs --context ", Some(Object::Context)),
            ("config use ", Some(Object::Context)),
            ("lo", None),
        ] {
            assert_eq!(parsed(line).map(|found| found.object), object, "{line:?}");
        }
    }

    #[test]
    fn line_has_words_after_program() {
        assert_eq!(of_line("gantry --server=http://a:1 logs "), ["--server=http://a:1", "logs", ""]);
        assert_eq!(of_line("gantry lo"), ["lo"]);
        assert_eq!(of_line(""), [""; 0]);
    }

    #[test]
    fn selected_cluster_is_kept() {
        let found = parsed("--context ci logs --team=other -q bu").expect("a workload");
        assert_eq!(found.selecting, ["--context", "ci", "--team=other"]);
    }
}
