//! What to do when a command named something that is on this machine and not in its container, or a line of a shell.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rpc::pb::scheduler::{Finished, exit::How};

use crate::cli::args::RunArgs;

/// What every container has of its own.
const OWN: [&str; 2] = ["/tmp", "/run"];
/// What separates words, as far as one need know it to find a path in a script.
const SEPARATORS: &[u8] = b" \t\n;|&()<>\"'`=";
/// What shells answer when a command is not there.
const NOT_FOUND: u32 = 127;

/// What to do about a run that ended like this. `None`: it had nothing to do with paths, as far as can be told.
pub(crate) fn hint(args: &RunArgs, finished: &Finished, is_here: impl Fn(&Path) -> bool) -> Option<String> {
    let reason = finished.failure.as_ref().map(|failure| failure.reason.as_str());
    let exit = finished.exit.as_ref().and_then(|exit| exit.how.as_ref());
    if let (Some("PROGRAM_NOT_FOUND"), [line]) = (reason, args.command.as_slice())
        && line.as_bytes().iter().any(u8::is_ascii_whitespace)
    {
        return Some(format!("a command line is for a shell: sh -c {}", quoted(line)));
    }
    let candidates: Vec<&OsStr> = match (reason, exit) {
        (Some("PROGRAM_NOT_FOUND"), _) => args
            .command
            .first()
            .filter(|program| program.as_bytes().contains(&b'/'))
            .map(OsString::as_os_str)
            .into_iter()
            .collect(),
        (Some("WORKING_DIRECTORY_MISSING"), _) => vec![&args.directory],
        (_, Some(How::Code(NOT_FOUND))) => args.command.iter().flat_map(words).collect(),
        _ => return None,
    };
    candidates.into_iter().find_map(|path| missed(args, Path::new(path), &is_here))
}

/// As one writes it in a shell: in quotes, where it needs some.
pub(crate) fn shell(text: &OsStr) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-./,:=@%+".contains(byte);
    let text = match text.as_bytes() {
        [b'-', ..] => Path::new(".").join(text).into_os_string(),
        _ => text.to_owned(),
    };
    if !text.is_empty() && text.as_bytes().iter().all(is_plain) {
        return text.to_string_lossy().into_owned();
    }
    quoted(&text)
}

fn quoted(text: &OsStr) -> String {
    format!("'{}'", text.to_string_lossy().replace('\'', r"'\''"))
}

fn words(argument: &OsString) -> impl Iterator<Item = &OsStr> {
    let words = argument.as_bytes().split(|byte| SEPARATORS.contains(byte));
    words.filter(|word| word.contains(&b'/')).map(OsStr::from_bytes)
}

fn missed(args: &RunArgs, path: &Path, is_here: impl Fn(&Path) -> bool) -> Option<String> {
    let shown = path.display();
    let names = || {
        let inputs = args.inputs.iter().map(|input| input.name.as_str());
        inputs.chain(args.outputs.iter().map(|output| output.name.as_str()))
    };
    if path.is_absolute() {
        let own = OWN.into_iter().find(|own| path != Path::new(own) && path.starts_with(own))?;
        let brought = names().next().is_some() && path.starts_with(Path::new(&args.directory));
        return (!brought && is_here(path)).then(|| {
            format!("{shown} is on this machine; {own} in the container is its own. Bring what the command needs with -i NAME=DIR")
        });
    }
    let first = path.components().find(|component| *component != Component::CurDir)?;
    let brought = names().any(|name| first.as_os_str() == name);
    (!brought && is_here(path)).then(|| {
        format!(
            "{shown} is in our working directory, of which the container has nothing; bring it with -i NAME=DIR, and it is ./NAME there"
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rpc::pb::scheduler::{Exit, Failure};

    use super::*;
    use crate::cli::args::{Cli, Command};

    /// What is said after a run that failed with `reason`, or exited with 127, when everything that is asked for is here.
    fn said(reason: Option<&str>, arguments: &[&str]) -> Option<String> {
        let line = ["gantry", "run"].iter().chain(arguments);
        let Command::Run(args) = Cli::try_parse_from(line).expect("parses").command else {
            panic!("it is a run")
        };
        let failure = reason.map(|reason| Failure { reason: reason.to_owned(), message: String::new() });
        let exit = reason.is_none().then_some(Exit { how: Some(How::Code(NOT_FOUND)) });
        hint(&args, &Finished { failure, exit, ..Finished::default() }, |path| !path.ends_with("gone"))
    }

    fn own(path: &str) -> Option<String> {
        Some(format!(
            "{path} is on this machine; /tmp in the container is its own. Bring what the command needs with -i NAME=DIR"
        ))
    }

    #[test]
    fn what_lies_below_tmp_here_is_not_there() {
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["/tmp/x"]), own("/tmp/x"));
        assert_eq!(said(Some("WORKING_DIRECTORY_MISSING"), &["--dir", "/tmp/x", "true"]), own("/tmp/x"));
        assert_eq!(said(None, &["sh", "-c", "cd /; PATH=/bin '/tmp/x y' && z"]), own("/tmp/x"));
        assert!(said(None, &["sh", "-c", "./build.sh"]).expect("said").contains("working directory"));
    }

    #[test]
    fn a_command_line_in_one_word_is_for_a_shell() {
        let hint = |line: &str| said(Some("PROGRAM_NOT_FOUND"), &[line]);
        let expected = r"a command line is for a shell: sh -c 'echo '\''hi'\'''";
        assert_eq!(hint("echo 'hi'").as_deref(), Some(expected));
        assert_eq!(hint("echo"), None);
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["an echo", "hi"]), None);
    }

    #[test]
    fn words_of_a_shell_are_quoted_where_they_need_it() {
        let shell = |text: &str| shell(OsStr::new(text));
        assert_eq!(shell("a/b-1.x"), "a/b-1.x");
        assert_eq!(shell("a b's"), r"'a b'\''s'");
        assert_eq!((shell(""), shell("-n")), ("''".to_owned(), "./-n".to_owned()));
    }

    #[test]
    fn nothing_is_said_where_that_is_not_the_reason() {
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["no-such-program", "/tmp/x"]), None);
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["/tmp/gone"]), None, "it is not here either");
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["/opt/x"]), None);
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["/tmpx/x"]), None);
        assert_eq!(said(Some("PROGRAM_NOT_EXECUTABLE"), &["/tmp/x"]), None);
        assert_eq!(said(Some("PROGRAM_NOT_FOUND"), &["-i", "src=.", "src/x"]), None, "it was brought");
        let below = ["--dir", "/tmp/w", "-i", "a=.", "sh", "-c", "/tmp/w/a/x"];
        assert_eq!(said(None, &below), None, "inputs are there");
        assert_eq!(said(None, &["sh", "-c", "no-such-program"]), None);
    }
}
