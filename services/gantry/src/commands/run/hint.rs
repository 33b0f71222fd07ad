//! Hints for a command that failed because a path of this machine is not in its container, or
//! because it is a shell command line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use domain::workload::Image;
use rpc::pb::scheduler::{Finished, exit::Status};

use crate::cli::args::RunArgs;
use crate::cli::values::ImageArg;

/// Directories that are separate in each container.
const OWN: [&str; 2] = ["/tmp", "/run"];
/// Characters that separate words of a shell script, well enough to find paths.
const SEPARATORS: &[u8] = b" \t\n;|&()<>\"'`=";
/// Exit code of a shell if a command does not exist.
const NOT_FOUND: u32 = 127;

/// Returns a hint for a finished run. `None`: the failure is not about a path of this machine.
pub(crate) fn hint(args: &RunArgs, finished: &Finished, is_here: impl Fn(&Path) -> bool) -> Option<String> {
    let reason = finished.failure.as_ref().map(|failure| failure.reason.as_str());
    let exit = finished.exit.as_ref().and_then(|exit| exit.status.as_ref());
    if let (Some("PROGRAM_NOT_FOUND"), [line]) = (reason, args.command.as_slice())
        && line.as_bytes().iter().any(u8::is_ascii_whitespace)
    {
        return Some(format!("to run a command line, use a shell: sh -c {}", quoted(line)));
    }
    if reason == Some("PROGRAM_NOT_FOUND")
        && args.image == ImageArg::Known(Image::Host)
        && let [program, ..] = args.command.as_slice()
        && program.as_bytes().iter().all(|byte| byte.is_ascii_alphanumeric() || b"._-:@".contains(byte))
    {
        let program = shell(program);
        return Some(format!("if {program} is an image, write `gantry run --image {program}`"));
    }
    let candidates: Vec<&OsStr> = match (reason, exit) {
        (Some("PROGRAM_NOT_FOUND"), _) => args
            .command
            .first()
            .filter(|program| program.as_bytes().contains(&b'/'))
            .map(OsString::as_os_str)
            .into_iter()
            .collect(),
        (Some("WORKING_DIRECTORY_MISSING"), _) => vec![args.directory()],
        (_, Some(Status::Code(NOT_FOUND))) => args.command.iter().flat_map(words).collect(),
        _ => return None,
    };
    candidates.into_iter().find_map(|path| missed(args, Path::new(path), &is_here))
}

/// Quotes a word for a shell if necessary.
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
        let brought = names().next().is_some() && path.starts_with(Path::new(args.directory()));
        return (!brought && is_here(path)).then(|| {
            format!("{shown} exists on this machine, but {own} of the container is separate; upload what the command needs with -i NAME=DIR")
        });
    }
    let is_directory = |name: &&str| Path::new(args.directory()).ends_with(name);
    if let Some(name) = names().find(is_directory)
        && is_here(path)
    {
        let path: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
        return Some(format!(
            "inputs are below the working directory {}, so write ./{name}/{}, or leave out --dir",
            args.directory().display(),
            path.display()
        ));
    }
    let first = path.components().find(|component| *component != Component::CurDir)?;
    let brought = names().any(|name| first.as_os_str() == name);
    (!brought && is_here(path)).then(|| {
        format!(
            "{shown} exists in your working directory, which the container does not see; upload it with -i NAME=DIR, and use it as ./NAME"
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rpc::pb::scheduler::{Exit, Failure};

    use super::*;
    use crate::cli::args::{Cli, Command};

    /// Returns the hint after a run that failed with `reason`, or exited with 127. All paths exist
    /// here except those that end in `gone`.
    fn hint_for(reason: Option<&str>, arguments: &[&str]) -> Option<String> {
        let line = ["gantry", "run"].iter().chain(arguments);
        let Command::Run(args) = Cli::try_parse_from(line).expect("parses").command else {
            panic!("it is a run")
        };
        let failure = reason.map(|reason| Failure { reason: reason.to_owned(), message: String::new() });
        let exit = reason.is_none().then_some(Exit { status: Some(Status::Code(NOT_FOUND)) });
        hint(&args, &Finished { failure, exit, ..Finished::default() }, |path| !path.ends_with("gone"))
    }

    fn own(path: &str) -> Option<String> {
        Some(format!(
            "{path} exists on this machine, but /tmp of the container is separate; upload what the command needs with -i NAME=DIR"
        ))
    }

    #[test]
    fn path_below_tmp_is_explained() {
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["/tmp/x"]), own("/tmp/x"));
        assert_eq!(hint_for(Some("WORKING_DIRECTORY_MISSING"), &["--dir", "/tmp/x", "true"]), own("/tmp/x"));
        assert_eq!(hint_for(None, &["sh", "-c", "cd /; PATH=/bin '/tmp/x y' && z"]), own("/tmp/x"));
        assert!(hint_for(None, &["sh", "-c", "./build.sh"]).expect("a hint").contains("working directory"));
    }

    #[test]
    fn input_below_working_directory_is_explained() {
        let hint = |program: &str| {
            let arguments = ["-i", "src=.", "--dir", "/workspace/src", program];
            hint_for(Some("PROGRAM_NOT_FOUND"), &arguments).unwrap_or_default()
        };
        assert!(hint("./build.sh").contains("write ./src/build.sh"), "{}", hint("./build.sh"));
        assert_eq!(hint("./gone"), "");
    }

    #[test]
    fn image_in_place_of_program_is_explained() {
        let hint = "if nginx:1 is an image, write `gantry run --image nginx:1`".to_owned();
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["nginx:1", "-v"]), Some(hint));
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["--image", "nginx", "nginx"]), None);
    }

    #[test]
    fn command_line_in_one_word_needs_shell() {
        let hint = |line: &str| hint_for(Some("PROGRAM_NOT_FOUND"), &[line]);
        let expected = r"to run a command line, use a shell: sh -c 'echo '\''hi'\'''";
        assert_eq!(hint("echo 'hi'").as_deref(), Some(expected));
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["an echo", "hi"]), None);
    }

    #[test]
    fn shell_words_are_quoted() {
        let shell = |text: &str| shell(OsStr::new(text));
        assert_eq!(shell("a/b-1.x"), "a/b-1.x");
        assert_eq!(shell("a b's"), r"'a b'\''s'");
        assert_eq!((shell(""), shell("-n")), ("''".to_owned(), "./-n".to_owned()));
    }

    #[test]
    fn other_failures_have_no_hint() {
        assert_eq!(
            hint_for(Some("PROGRAM_NOT_FOUND"), &["/tmp/gone"]),
            None,
            "it does not exist here either"
        );
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["/opt/x"]), None);
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["/tmpx/x"]), None);
        assert_eq!(hint_for(Some("PROGRAM_NOT_EXECUTABLE"), &["/tmp/x"]), None);
        assert_eq!(hint_for(Some("PROGRAM_NOT_FOUND"), &["-i", "src=.", "src/x"]), None, "it was uploaded");
        let below = ["--dir", "/tmp/w", "-i", "a=.", "sh", "-c", "/tmp/w/a/x"];
        assert_eq!(hint_for(None, &below), None, "inputs are in the container");
        assert_eq!(hint_for(None, &["sh", "-c", "no-such-program"]), None);
    }
}
