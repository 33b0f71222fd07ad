//! Environment variables: those of `--env`, and those of other tools that `gantry` honors.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use anyhow::{Context, bail};
use bytes::Bytes;

use crate::cli::values::{self, EnvironmentArg};
use crate::render::ui::Ui;

/// Kind of terminal of a process if `gantry` does not know the kind of its own terminal.
const DEFAULT_TERM: &str = "xterm";

/// Returns whether spans are sent to a collector.
pub(crate) fn exports_spans() -> bool {
    std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some_and(|endpoint| !endpoint.is_empty())
}

/// Makes the environment of a process, as pairs of a name and a value. The last variable of a name
/// wins. A variable that cannot be copied is left out, with a message. A process with a terminal
/// has the TERM of `gantry`, unless it is given.
pub(crate) fn of_process(
    given: &[EnvironmentArg],
    has_terminal: bool,
    ui: &Ui,
) -> anyhow::Result<Vec<(Bytes, Bytes)>> {
    resolve(given, has_terminal, |name| std::env::var_os(name), ui)
}

/// Reads the variables of `--env-file`.
pub(crate) fn of_files(files: &[PathBuf]) -> anyhow::Result<Vec<EnvironmentArg>> {
    let mut variables = Vec::new();
    for file in files {
        let text = std::fs::read(file)
            .with_context(|| format!("cannot read environment variables from {}", file.display()))?;
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            match variable(line) {
                Some(Ok(variable)) => variables.push(variable),
                Some(Err(why)) => bail!("{} line {}: {why}", file.display(), number + 1),
                None => {}
            }
        }
    }
    Ok(variables)
}

/// Parses a line of `--env-file`. `None`: the line has no variable.
fn variable(line: &[u8]) -> Option<Result<EnvironmentArg, String>> {
    let line = line.strip_suffix(b"\r").unwrap_or(line).trim_ascii_start();
    (!line.is_empty() && !line.starts_with(b"#")).then(|| values::environment(OsStr::from_bytes(line)))
}

fn resolve(
    given: &[EnvironmentArg],
    has_terminal: bool,
    ours: impl Fn(&OsString) -> Option<OsString>,
    ui: &Ui,
) -> anyhow::Result<Vec<(Bytes, Bytes)>> {
    let mut set: Vec<(OsString, OsString)> = Vec::new();
    if has_terminal {
        let term = OsString::from("TERM");
        let kind = ours(&term).filter(|kind| !kind.is_empty()).unwrap_or_else(|| DEFAULT_TERM.into());
        set.push((term, kind));
    }
    for EnvironmentArg { name, value } in given {
        let value = match value {
            Some(value) => value.clone(),
            None => match ours(name) {
                Some(value) => value,
                None => {
                    ui.note(&format!(
                        "--env {}: left out, because your environment does not have it",
                        name.display()
                    ));
                    continue;
                }
            },
        };
        if name.as_bytes().contains(&0) || value.as_bytes().contains(&0) {
            bail!("--env {}: the name and the value must not contain a NUL byte", name.display());
        }
        set.retain(|(other, _)| other != name);
        set.push((name.clone(), value));
    }
    let bytes = |text: OsString| Bytes::from(text.into_vec());
    Ok(set.into_iter().map(|(name, value)| (bytes(name), bytes(value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(given: &[(&str, Option<&str>)], has_terminal: bool) -> Vec<(String, String)> {
        let given = given
            .iter()
            .map(|(name, value)| EnvironmentArg { name: name.into(), value: value.map(Into::into) });
        let ours = |name: &OsString| (name == "B" || name == "TERM").then(|| OsString::from("ours"));
        let set = resolve(&given.collect::<Vec<_>>(), has_terminal, ours, &Ui::new(true)).expect("valid");
        let text = |bytes: Bytes| String::from_utf8(bytes.into()).expect("text");
        set.into_iter().map(|(name, value)| (text(name), text(value))).collect()
    }

    fn pairs<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, String)> {
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    #[test]
    fn last_variable_wins_and_copies_are_local() {
        let given = [("A", Some("1")), ("B", None), ("A", Some("2")), ("C", None)];
        assert_eq!(resolved(&given, false), pairs([("B", "ours"), ("A", "2")]));
    }

    #[test]
    fn variables_are_read_from_lines() {
        let parse = |line: &str| variable(line.as_bytes()).map(|parsed| parsed.map(|it| (it.name, it.value)));
        let is = |name: &str, value: Option<&str>| Some(Ok((name.into(), value.map(Into::into))));
        assert_eq!(parse("A=b c=\"d\" "), is("A", Some("b c=\"d\" ")));
        assert_eq!(parse("  B\r"), is("B", None));
        assert_eq!(parse("C="), is("C", Some("")));
        for left_out in ["", "  ", "# A=b", "\r"] {
            assert_eq!(parse(left_out), None, "{left_out:?}");
        }
        assert!(parse("=x").expect("a line").is_err());
    }

    #[test]
    fn process_with_terminal_has_kind_of_terminal() {
        assert_eq!(resolved(&[], true), pairs([("TERM", "ours")]));
        assert_eq!(resolved(&[("TERM", Some("vt100"))], true), pairs([("TERM", "vt100")]));
    }
}
