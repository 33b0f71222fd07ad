//! Standard output that is closed or cannot be written. Commands end normally, and never panic.

use std::fs::{self, File};
use std::io::Read;
use std::process::{Command, Stdio};

use integration_tests::{Cluster, describe, may_run_containers};

/// Exit code of a shell for SIGPIPE.
const PIPE: i32 = 141;

/// Runs `command` with its standard output closed at the other end. Returns the exit code and
/// standard error.
fn unread(mut command: Command) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    ended(command.stdout(writer))
}

fn ended(command: &mut Command) -> (Option<i32>, String) {
    let mut child = command.stderr(Stdio::piped()).spawn().expect("gantry");
    let mut printed = String::new();
    child.stderr.take().expect("stderr").read_to_string(&mut printed).expect("text");
    assert!(!printed.contains("panicked"), "{command:?}: {printed}");
    (child.wait().expect("it ends").code(), printed)
}

#[test]
fn commands_without_reader_end_as_by_sigpipe() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("d")).expect("directory");
    fs::write(cluster.path("d/file"), vec![7; 1 << 20]).expect("write");
    let uploaded = cluster.output(["upload", "d"]);
    assert!(uploaded.status.success(), "{}", describe(&uploaded));
    let artifact = String::from_utf8(uploaded.stdout).expect("an id").trim().to_owned();
    let id = String::from_utf8(cluster.succeed(["run", "-d", "--", "echo", "hi"])).expect("an id");
    let id = id.trim().to_owned();
    cluster.succeed(["logs", "-f", &id]);
    let commands: [&[&str]; 16] = [
        &["version"],
        &["status"],
        &["status", "--watch"],
        &["list", "workers"],
        &["list", "artifacts"],
        &["show", "workload", &id],
        &["show", "artifact", &artifact],
        &["cat", &artifact, "file"],
        &["logs", &id],
        &["watch", &id],
        &["demand"],
        &["upload", "d"],
        &["gc", "--dry-run"],
        &["run", "--", "echo", "hi"],
        &["run", "-d", "--", "true"],
        &["run", "--explain", "--", "true"],
    ];
    for arguments in commands {
        for json in [false, true] {
            let more: &[&str] = if json { &["--json"] } else { &[] };
            let words = [more, arguments].concat();
            // A command without output does not fail: `--json gc` without garbage, and events of a
            // workload without output.
            let nothing = ["gc", "-d"].iter().any(|word| json && words.contains(word));
            let (code, printed) = unread(cluster.gantry(&words));
            assert!(
                code == Some(PIPE) || nothing && code == Some(0),
                "{words:?} ended with {code:?}: {printed}"
            );

            let full = File::options().write(true).open("/dev/full").expect("a full file");
            let (code, printed) = ended(cluster.gantry(&words).stdout(full));
            if nothing {
                assert!(
                    code.is_some_and(|code| code == 0 || code == 125),
                    "{words:?} ended with {code:?}: {printed}"
                );
            } else {
                assert_eq!(code, Some(125), "{words:?}: {printed}");
                assert!(
                    printed.contains("cannot write to standard output: No space left"),
                    "{words:?}: {printed}"
                );
            }
        }
    }
    // `help` succeeds even if its output is closed.
    for arguments in [["--help"].as_slice(), &["help", "run"], &["--version"]] {
        let (code, printed) = unread(cluster.gantry(arguments));
        assert_eq!(code, Some(0), "{arguments:?}: {printed}");
    }
}

#[test]
fn command_works_without_stdout() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for arguments in [["list", "workers"].as_slice(), &["status"], &["run", "--", "echo", "hi"]] {
        let gantry = cluster.gantry(arguments);
        let mut closed = Command::new("sh");
        closed.args(["-c", "exec \"$0\" \"$@\" >&-"]).arg(gantry.get_program()).args(gantry.get_args());
        closed.env_clear().envs(gantry.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let (code, printed) = ended(closed.current_dir(cluster.path("")).stdin(Stdio::null()));
        assert_eq!(code, Some(0), "{arguments:?}: {printed}");
    }
}
