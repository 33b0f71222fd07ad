//! `gantry run -it`, as it is spelled for other container tools.
//!
//! `-i` is an input in `gantry run`, so `-it` is the input `t`. No input has that form, because
//! `=DIR` is missing. So exactly this rejected input means a terminal.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Returns the arguments with `-t` in the place of the first `-it`, if that input is the cause of
/// `error`.
pub(crate) fn with_terminal(error: &clap::Error, arguments: &[OsString]) -> Option<Vec<OsString>> {
    let is_input = |argument: &str| argument.starts_with("--input ");
    if error.kind() != ErrorKind::ValueValidation
        || !matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(argument)) if is_input(argument))
        || error.get(ContextKind::InvalidValue) != Some(&ContextValue::String("t".to_owned()))
    {
        return None;
    }
    let options = arguments.iter().take_while(|argument| *argument != "--");
    let at = options.into_iter().position(|argument| argument == "-it")?;
    let mut arguments = arguments.to_vec();
    arguments[at] = "-t".into();
    Some(arguments)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::{Cli, Command};

    /// Parses a line of words. `None`: the arguments are invalid.
    fn parse(line: &str) -> Option<(bool, usize, Vec<OsString>)> {
        let line: Vec<OsString> = line.split(' ').map(Into::into).collect();
        let parsed = Cli::try_parse_from(&line).or_else(|error| {
            let corrected = with_terminal(&error, &line).ok_or(error)?;
            Cli::try_parse_from(corrected)
        });
        match parsed.ok()?.command {
            Command::Run(args) => Some((args.tty, args.inputs.len(), args.command)),
            _ => None,
        }
    }

    #[test]
    fn terminal_and_inputs_are_told_apart() {
        let sh = |tty, inputs| Some((tty, inputs, vec![OsString::from("sh")]));
        assert_eq!(parse("gantry run -it sh"), sh(true, 0));
        assert_eq!(parse("gantry run -it -- sh"), sh(true, 0));
        assert_eq!(parse("gantry run -it -i src=. sh"), sh(true, 1));
        assert_eq!(parse("gantry run -ti src=. sh"), sh(true, 1));
        assert_eq!(parse("gantry run -it=. sh"), sh(false, 1));
        assert_eq!(parse("gantry run -t sh"), sh(true, 0));
        assert_eq!(parse("gantry run -i t sh"), None);
        assert_eq!(parse("gantry run -i t -- sh -it"), None);
        assert_eq!(parse("gantry run -i t sh -it"), None);
        assert_eq!(parse("gantry run -it -i x sh"), None);
    }
}
