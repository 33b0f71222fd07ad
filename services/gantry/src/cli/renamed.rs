//! Names of commands and options that have changed: the old name is refused, and the error gives the new one.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::cli::args::Cli;

/// Old and new names, as they are written.
const RENAMED: [(&str, &str); 4] =
    [("land", "cordon"), ("unland", "uncordon"), ("--set-aside", "--orphans"), ("--door", "--proxy")];

/// The same error or, if it is about an old name, one that gives the new name.
pub(crate) fn explain(error: clap::Error) -> clap::Error {
    let kind = match error.kind() {
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        _ => return error,
    };
    let Some(ContextValue::String(given)) = error.get(kind) else { return error };
    match RENAMED.iter().find(|(old, _)| given == old) {
        Some((old, new)) => Cli::command().error(error.kind(), format!("{old:?} is called {new:?} now")),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn old_name_is_refused_with_the_new_one() {
        for (arguments, new) in [
            (&["gantry", "land", "local"][..], "\"land\" is called \"cordon\" now"),
            (&["gantry", "unland", "local"], "\"unland\" is called \"uncordon\" now"),
            (&["gantry", "list", "volumes", "--set-aside"], "\"--set-aside\" is called \"--orphans\" now"),
        ] {
            let error = explain(Cli::try_parse_from(arguments).expect_err("refused"));
            assert!(error.to_string().contains(new), "{error}");
        }
        let other = explain(Cli::try_parse_from(["gantry", "lift"]).expect_err("refused"));
        assert!(!other.to_string().contains("is called"), "{other}");
    }
}
