//! Commands in the container of a workload, and terminals.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use integration_tests::terminal::Terminal;
use integration_tests::{Cluster, code, describe, id, may_run_containers, send, snapshot, wait_for};

/// Keys that detach by default: Ctrl-P Ctrl-Q.
const DETACH: &str = "\u{10}\u{11}";

/// Starts a cluster with a running workload, and returns its id.
fn running() -> Option<(Cluster, String)> {
    if !may_run_containers() {
        return None;
    }
    let cluster = Cluster::new().with("TERM", "xterm");
    let workload = submit(&cluster, "sleep 1000");
    Some((cluster, workload))
}

fn submit(cluster: &Cluster, script: &str) -> String {
    let workload = id(cluster.succeed(["run", "-d", "-e", "OURS=container", "--", "sh", "-c", script]));
    wait_for("the start of the workload", || (state(cluster, &workload) == "running").then_some(()));
    workload
}

fn state(cluster: &Cluster, workload: &str) -> String {
    let shown = cluster.succeed(["show", "workload", workload, "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(shown.trim_ascii()).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

/// Starts a shell in the container, in a terminal of 31 rows and 97 columns.
fn shell(cluster: &Cluster, workload: &str) -> Terminal {
    let terminal = Terminal::run(&cluster.gantry(["exec", "-it", workload, "sh"]), 31, 97);
    terminal.wait_for("# ");
    terminal
}

#[test]
fn exec_prints_output_and_returns_exit_code() {
    let Some((cluster, workload)) = running() else { return };
    let script = "echo out; echo err >&2; exit 7";
    let output = cluster.output(["exec", &workload, "--", "sh", "-c", script]);
    assert_eq!(code(&output), 7, "{}", describe(&output));
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));

    let killed = cluster.output(["hijack", &workload, "sh", "-c", "kill -9 $$"]);
    assert_eq!(code(&killed), 137, "{}", describe(&killed));
    let printed = ["exec", "-e", "A=b=c", "-w", "/tmp", &workload, "sh", "-c", "echo $OURS $A; pwd; cat"];
    assert_eq!(cluster.succeed(printed), b"container b=c\n/tmp\n", "the input is empty");
    // Standard input is not read, so it need not be a terminal.
    let output = cluster.output(["exec", "-t", &workload, "sh", "-c", "tty -s && echo $TERM >&2"]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(output.stdout, b"xterm\r\n", "a terminal has one output");

    assert_eq!(cluster.succeed(["exec", &workload, "cat", "/proc/1/comm"]), b"gantry-init\n");

    let events = cluster.succeed(["--json", "exec", &workload, "--", "echo", "hi"]);
    let events = String::from_utf8(events).expect("text");
    let last: serde_json::Value =
        serde_json::from_str(events.lines().last().expect("an event")).expect("JSON");
    assert_eq!((&last["event"], &last["exit"]["code"]), (&"finished".into(), &0.into()), "{events}");
    assert_eq!(state(&cluster, &workload), "running");
}

#[test]
fn exec_explains_why_it_cannot_run() {
    let Some((cluster, workload)) = running() else { return };
    let unknown = "0197c1a2-0000-7000-8000-000000000000";
    for (arguments, expected, text) in [
        (vec!["exec", unknown, "true"], 125, "(WORKLOAD_NOT_FOUND)"),
        (vec!["exec", "-it", &workload, "sh"], 125, "the input device is not a terminal"),
        (vec!["exec", "-w", "tmp", &workload, "sh"], 125, "must be absolute"),
        (vec!["exec", &workload, "no-such-program"], 127, "(PROGRAM_NOT_FOUND)"),
        (vec!["exec", &workload, "/etc/passwd"], 126, "(PROGRAM_NOT_EXECUTABLE)"),
        (vec!["exec", "-u", "no-one-here", &workload, "true"], 125, "(USER_NOT_FOUND)"),
        (vec!["exec", "-w", "/no/such", &workload, "true"], 125, "(WORKING_DIRECTORY_MISSING)"),
        (vec!["run", "-it", "--", "sh"], 125, "the input device is not a terminal"),
    ] {
        let output = cluster.output(&arguments);
        assert_eq!(code(&output), expected, "{arguments:?}: {}", describe(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains(text), "{}", describe(&output));
    }
}

#[test]
fn ended_workload_can_be_looked_into() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "mkdir -p out; echo broken > out/report; echo note > /var/tmp/note; exit 3";
    let run = ["run", "-d", "-o", "out", "-e", "WHY=kept", "--", "sh", "-c", script];
    let ended = id(cluster.succeed(run));
    wait_for("the end", || (state(&cluster, &ended) == "finished").then_some(()));
    let look = "echo $WHY; pwd; cat out/report; echo changed > out/report; cat out/report; exit 5";
    for _ in 0..2 {
        let output = cluster.output(["exec", &ended, "sh", "-c", look]);
        assert_eq!(code(&output), 5, "{}", describe(&output));
        assert_eq!(output.stdout, b"kept\n/workspace\nbroken\nchanged\n", "{}", describe(&output));
    }
    // The published bytes are those of the workload.
    let shown = cluster.succeed(["show", "workload", &ended, "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(shown.trim_ascii()).expect("JSON");
    let artifact = shown["outputs"][0]["artifact_id"].as_str().expect("an artifact").to_owned();
    cluster.succeed(["download", &artifact, "result"]);
    let report = std::fs::read_to_string(cluster.path("result/report")).expect("the report");
    assert_eq!(report, "broken\n");
}

#[test]
fn end_of_cluster_ends_commands_in_ended_workloads() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let ended = id(cluster.succeed(["run", "-d", "--", "true"]));
    wait_for("the end", || (state(&cluster, &ended) == "finished").then_some(()));
    let mut exec = cluster.gantry(["exec", "-i", &ended, "sh", "-c", "echo up; exec sleep 1000"]);
    let mut exec = exec.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut line = [0; 3];
    exec.stdout.take().expect("stdout").read_exact(&mut line).expect("it runs");
    // A caller that lives would start another cluster.
    exec.kill().expect("killed");
    exec.wait().expect("ended");
    cluster.succeed(["down"]);
    assert_eq!(snapshot::processes(&cluster), BTreeMap::new());
    std::fs::remove_dir_all(cluster.path("state/gantry")).expect("nothing is mounted");
}

#[test]
fn exec_passes_binary_input() {
    let Some((cluster, workload)) = running() else { return };
    let sent: Vec<u8> = (0..1_u32 << 18).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut exec = cluster.gantry(["exec", "-i", &workload, "cat"]);
    let mut exec = exec.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdin = exec.stdin.take().expect("stdin");
    let input = sent.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&input).expect("all of it is taken"));
    let output = exec.wait_with_output().expect("gantry ends");
    writer.join().expect("no panic");
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert!(output.stdout == sent, "{} bytes came back of {}", output.stdout.len(), sent.len());
}

#[test]
fn shell_follows_window_and_leaves_workload_running() {
    let Some((cluster, workload)) = running() else { return };
    let terminal = shell(&cluster, &workload);
    assert!(!terminal.is_cooked());
    terminal.press("echo $TERM-$OURS; stty size\r");
    terminal.wait_for("xterm-container\r\n31 97\r\n");
    terminal.resize(40, 120);
    // The loop ends with the new size. The typed line does not contain the text that it prints.
    terminal.press("until [ \"$(stty size)\" = '40 120' ]; do :; done; echo re''sized\r");
    terminal.wait_for("resized\r\n");
    // Ctrl-C interrupts the command in the container, not gantry.
    terminal.press("echo wait''ing; cat\r");
    terminal.wait_for("waiting\r\n");
    terminal.press("\u{3}");
    terminal.wait_for("^C\r\n# ");
    terminal.press("echo not''ed\r");
    terminal.wait_for("noted\r\n");
    terminal.press("exit 3\r");
    terminal.ended(3);
    assert_eq!(state(&cluster, &workload), "running");
}

#[test]
fn detached_shell_runs_on_and_takes_input_again() {
    let Some((cluster, workload)) = running() else { return };
    let terminal = shell(&cluster, &workload);
    terminal.press("kept=here\r");
    // Another key follows the beginning of the sequence, so both keys are input.
    terminal.press("echo not''ed\u{10}\r");
    terminal.wait_for("noted\u{10}\r\n");
    terminal.press(&DETACH[..1]);
    terminal.press(&DETACH[1..]);
    terminal.wait_for("detached from process ");
    terminal.ended(0);
    let text = terminal.text();
    let (_, command) = text.split_once("attach again with \"gantry ").expect("a command");
    let (command, _) = command.split_once('"').expect("the end of the command");
    let again = Terminal::run(&cluster.gantry(command.split(' ')), 31, 97);
    again.wait_for("noted");
    again.press("echo it-$kept\r");
    again.wait_for("it-here\r\n");
    again.press("exit 5\r");
    again.ended(5);
    assert_eq!(state(&cluster, &workload), "running");
}

#[test]
fn idle_shell_is_ended_with_reason() {
    let Some((cluster, workload)) = running() else { return };
    let shell = [
        "exec",
        "-it",
        "--idle-timeout",
        "1s",
        &workload,
        "sh",
        "-c",
        "trap 'echo hung up; exit 6' HUP; read -r line",
    ];
    let terminal = Terminal::run(&cluster.gantry(shell), 31, 97);
    terminal.wait_for("nothing was typed or printed for 1.0 s");
    terminal.wait_for("hung up");
    terminal.ended(6);
    assert_eq!(state(&cluster, &workload), "running");
}

#[test]
fn exec_is_an_audit_event() {
    let Some((cluster, workload)) = running() else { return };
    let command = ["exec", "-e", "SECRET=hidden", &workload, "--", "sh", "-c", "exit 7"];
    assert_eq!(code(&cluster.output(command)), 7);
    let refused = cluster.output(["exec", "-u", "no-one-here", &workload, "--", "true"]);
    assert_eq!(code(&refused), 125, "{}", describe(&refused));
    let log = || std::fs::read_to_string(cluster.state().join("cluster.log")).unwrap_or_default();
    for (outcome, details) in [
        ("started", "command=\"sh -c exit 7\""),
        ("ended", "exit_code=7"),
        ("ended", "reason=\"USER_NOT_FOUND\""),
    ] {
        let event =
            format!("audit: further process {outcome} event=\"exec\" outcome=\"{outcome}\" caller=\"uid ");
        wait_for("an audit event", || {
            log().lines().any(|line| line.contains(&event) && line.contains(details)).then_some(())
        });
    }
    assert!(!log().contains("hidden"), "{}", log());
}

#[test]
fn mode_is_restored_when_gantry_is_stopped() {
    let Some((cluster, workload)) = running() else { return };
    for (signal, expected) in [(libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGINT, 130)] {
        let terminal = shell(&cluster, &workload);
        let pid = gantry_in(&terminal);
        // The first SIGINT interrupts the command.
        for _ in 0..if signal == libc::SIGINT { 2 } else { 1 } {
            // SAFETY: kill accesses no memory of this process.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
            if signal == libc::SIGINT {
                terminal.wait_for("again to leave");
            }
        }
        terminal.ended(expected);
    }
}

/// Returns the process id of the command in a terminal.
fn gantry_in(terminal: &Terminal) -> i32 {
    let shell = terminal.shell();
    let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).expect("children");
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a child")
}

#[test]
fn shell_survives_restart_of_cluster() {
    let Some((cluster, workload)) = running() else { return };
    let terminal = shell(&cluster, &workload);
    terminal.press("kept=here\r");
    cluster.kill();
    // The command starts the cluster again, and attaches to the same shell.
    terminal.press("echo it-$kept\r");
    terminal.wait_for("it-here\r\n");
    terminal.press("exit\r");
    terminal.ended(0);
}

#[test]
fn mode_is_restored_when_server_is_killed() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("TERM", "xterm");
    let mut up = cluster.up(":");
    let workload = submit(&cluster, "sleep 1000");
    let socket = cluster.path("run/gantry/gantry.sock");
    let mut exec = cluster.gantry(["exec", "-it", &workload, "sh"]);
    exec.env("GANTRY_SERVER", format!("unix://{}", socket.display()));
    let shell = |command: &Command| {
        let terminal = Terminal::run(command, 24, 80);
        terminal.wait_for("# ");
        terminal
    };
    let (first, second) = (shell(&exec), shell(&exec));
    send(&up, libc::SIGKILL);
    up.wait().expect("it ends");
    // The command does not start a cluster that it was told to use, and waits for it.
    first.wait_for("leave with ctrl-p,ctrl-q");
    first.press(DETACH);
    first.ended(0);
    // SAFETY: kill accesses no memory of this process.
    assert_eq!(unsafe { libc::kill(gantry_in(&second), libc::SIGTERM) }, 0);
    second.ended(143);
}

#[test]
fn run_has_terminal() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("TERM", "xterm");
    let terminal = Terminal::run(&cluster.gantry(["run", "-it", "--", "sh"]), 31, 97);
    terminal.wait_for("# ");
    terminal.press("echo $TERM; stty size\r");
    terminal.wait_for("xterm\r\n31 97\r\n");
    terminal.press(DETACH);
    terminal.wait_for("detached from workload ");
    terminal.ended(0);

    let workloads = cluster.list("workloads");
    let workload = workloads[0]["workload_id"].as_str().expect("an id");
    let again = Terminal::run(&cluster.gantry(["attach", workload]), 40, 120);
    again.wait_for("31 97");
    again.press("until [ \"$(stty size)\" = '40 120' ]; do :; done; echo re''sized\r");
    again.wait_for("resized\r\n");
    again.press("exit 4\r");
    again.ended(4);
}
