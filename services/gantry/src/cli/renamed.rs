//! Renamed commands and options, and commands of other tools that have no counterpart. The error
//! says what to use.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::cli::args::Cli;

/// Pairs of an old and a new name.
const RENAMED: [(&str, &str); 4] =
    [("land", "cordon"), ("unland", "uncordon"), ("--set-aside", "--orphans"), ("--door", "--proxy")];

/// Commands of other tools, and what to use instead.
const ELSEWHERE: [(&str, &str); 25] = [
    ("restart", "a workload runs once: run its command again with `gantry run`"),
    ("start", "a workload starts when it is submitted: use `gantry run -d`"),
    ("create", "a workload starts when it is submitted: use `gantry run -d`"),
    (
        "build",
        "Gantry runs images, and other tools build them: `gantry run --image oci:DIR` runs what they make",
    ),
    ("-9", "`gantry kill` sends KILL at once"),
    ("container", "`gantry ps` lists workloads, and `gantry list containers` lists containers"),
    ("containers", "use `gantry list containers`"),
    ("artifact", "use `gantry list artifacts`"),
    ("artifacts", "use `gantry list artifacts`"),
    ("describe", "use `gantry inspect`, or `gantry explain`, which says why"),
    ("drain", "`gantry cordon` drains a worker"),
    ("get", "use `gantry list`, `gantry show` or `gantry inspect`"),
    ("image", "use `gantry images`, `gantry pull` or `gantry show image`"),
    ("info", "use `gantry status`, or `gantry doctor` for this machine"),
    ("job", "use `gantry ps` and `gantry run`"),
    ("login", "credentials for registries are those of Docker's config.json, which `docker login` writes"),
    ("node", "use `gantry list workers`"),
    ("nodes", "use `gantry list workers`"),
    ("system", "use `gantry status`, `gantry top` or `gantry prune`"),
    ("tag", "a tag is a name in a registry: `gantry run --image` and `gantry pull` use it"),
    ("volume", "use `gantry list volumes`"),
    ("volumes", "use `gantry list volumes`"),
    ("worker", "use `gantry list workers`"),
    ("workers", "use `gantry list workers`"),
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
        let what = if given.starts_with('-') { "option" } else { "command" };
        return Cli::command().error(error.kind(), format!("there is no {what} {given:?}: {instead}"));
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
        for (given, instead) in [("drain", "`gantry cordon`"), ("volumes", "`gantry list volumes`")] {
            let error = explain(Cli::try_parse_from(["gantry", given]).expect_err("refused")).to_string();
            assert!(error.contains(instead) && !error.contains("similar"), "{error}");
        }
        let other = explain(Cli::try_parse_from(["gantry", "lift"]).expect_err("refused"));
        assert!(!other.to_string().contains("was renamed"), "{other}");
    }
}
