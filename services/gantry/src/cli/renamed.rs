//! Renamed commands and options, and commands of other tools that have no counterpart. The error
//! says what to use.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::cli::args::Cli;

/// Pairs of an old and a new name.
const RENAMED: [(&str, &str); 4] =
    [("land", "cordon"), ("unland", "uncordon"), ("--set-aside", "--orphans"), ("--door", "--proxy")];

/// Commands of other tools, and what to use instead.
const ELSEWHERE: [(&str, &str); 5] = [
    ("restart", "a workload runs once: run its command again with `gantry run`"),
    ("start", "a workload starts when it is submitted: use `gantry run -d`"),
    ("create", "a workload starts when it is submitted: use `gantry run -d`"),
    (
        "build",
        "Gantry runs images, and other tools build them: `gantry run --image oci:DIR` runs what they make",
    ),
    ("push", "Gantry pushes no images: `gantry download` brings an artifact to this machine"),
];

/// Returns `error`, or an error with the new name if `error` is about an old name.
pub(crate) fn explain(error: clap::Error) -> clap::Error {
    let kind = match error.kind() {
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        _ => return error,
    };
    let Some(ContextValue::String(given)) = error.get(kind) else { return error };
    if let Some((_, instead)) = ELSEWHERE.iter().find(|(name, _)| given == name) {
        return Cli::command().error(error.kind(), format!("there is no command {given:?}: {instead}"));
    }
    match RENAMED.iter().find(|(old, _)| given == old) {
        Some((old, new)) => Cli::command().error(error.kind(), format!("{old:?} was renamed: use {new:?}")),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn old_name_is_rejected_with_new_one() {
        for (arguments, new) in [
            (&["gantry", "land", "local"][..], "\"land\" was renamed: use \"cordon\""),
            (&["gantry", "unland", "local"], "\"unland\" was renamed: use \"uncordon\""),
            (&["gantry", "list", "volumes", "--set-aside"], "\"--set-aside\" was renamed: use \"--orphans\""),
        ] {
            let error = explain(Cli::try_parse_from(arguments).expect_err("refused"));
            assert!(error.to_string().contains(new), "{error}");
        }
        let error = explain(Cli::try_parse_from(["gantry", "restart", "local"]).expect_err("refused"));
        assert!(error.to_string().contains("a workload runs once") && !error.to_string().contains("retire"));
        let other = explain(Cli::try_parse_from(["gantry", "lift"]).expect_err("refused"));
        assert!(!other.to_string().contains("was renamed"), "{other}");
    }
}
