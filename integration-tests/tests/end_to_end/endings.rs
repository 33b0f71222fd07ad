//! Ends of a run, and their exit codes.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for};

fn sh(script: &str) -> Vec<String> {
    ["run", "--", "sh", "-c", script].map(str::to_owned).to_vec()
}

#[test]
fn exit_code_is_that_of_process() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (script, expected) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)] {
        let output = cluster.output(sh(script));
        assert_eq!(code(&output), expected, "{script}: {}", describe(&output));
    }
    let missing = cluster.output(["run", "--", "no-such-program"]);
    assert_eq!(code(&missing), 127, "{}", describe(&missing));
    assert!(
        String::from_utf8_lossy(&missing.stderr)
            .contains("no-such-program: no such program in the image (PROGRAM_NOT_FOUND)"),
        "{}",
        describe(&missing)
    );
    let not_executable = cluster.output(["run", "--", "/etc/passwd"]);
    assert_eq!(code(&not_executable), 126, "{}", describe(&not_executable));
    let user = cluster.output(["run", "--user", "nobody-here", "--", "true"]);
    assert_eq!(code(&user), 125, "{}", describe(&user));
    assert!(
        String::from_utf8_lossy(&user.stderr)
            .contains("(USER_NOT_FOUND); check the name, or give a number to --user"),
        "{}",
        describe(&user)
    );
    let directory = cluster.output(["run", "--dir", "/no/such/directory", "--", "true"]);
    assert_eq!(code(&directory), 125, "{}", describe(&directory));
    assert!(
        String::from_utf8_lossy(&directory.stderr)
            .contains("(WORKING_DIRECTORY_MISSING); check the path of --dir"),
        "{}",
        describe(&directory)
    );
}

#[test]
fn timeout_stops_command_without_outputs() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "echo x > out/x; sleep 100";
    let output = cluster.output(["run", "--timeout", "500ms", "-o", "out=./out", "--", "sh", "-c", script]);
    assert_eq!(code(&output), 124, "{}", describe(&output));
    assert!(!cluster.path("out").exists(), "nothing was downloaded");
}

#[test]
fn timeout_stops_all_processes() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // A number of seconds that no other process sleeps.
    let mark = format!("{}", 1_000_000 + std::process::id());
    let script = format!("setsid sleep {mark} & (sleep {mark} &); echo ready; exec sleep {mark}");
    let (child, _stdout) = started(cluster.gantry(["run", "--timeout", "1s", "--", "sh", "-c", &script]));
    let output = child.wait_with_output().expect("gantry ends");
    assert_eq!(code(&output), 124, "{}", describe(&output));
    let sleepers = || {
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
        lines.filter(|line| *line == format!("sleep\0{mark}\0").as_bytes()).count()
    };
    assert_eq!(sleepers(), 0, "a process outlived its workload");
}

#[test]
fn missing_output_fails_and_empty_one_does_not() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let empty = cluster.output(["run", "-o", "out=./empty", "--", "true"]);
    assert_eq!(code(&empty), 0, "{}", describe(&empty));
    assert_eq!(fs::read_dir(cluster.path("empty")).expect("a directory").count(), 0);
    for script in ["rmdir out", "rmdir out; echo x > out", "rmdir out; ln -s /etc out"] {
        let output = cluster.output(["run", "-o", "out=./gone", "--", "sh", "-c", script]);
        assert_eq!(code(&output), 125, "{script}: {}", describe(&output));
        assert!(
            String::from_utf8_lossy(&output.stderr)
                .contains("gantry: output \"out\" is missing, or is not a directory (OUTPUT_MISSING)"),
            "{}",
            describe(&output)
        );
        assert!(!cluster.path("gone").exists());
    }
    // Build scripts replace the output directory by another one.
    let script = "mkdir build; echo x > build/x; rm -rf out; mv build out";
    let replaced = cluster.output(["run", "-o", "out=./replaced", "--", "sh", "-c", script]);
    assert_eq!(code(&replaced), 0, "{}", describe(&replaced));
    assert_eq!(fs::read_to_string(cluster.path("replaced/x")).expect("the file"), "x\n");
}

#[test]
fn interrupt_reaches_process() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (signal, name, expected) in [(libc::SIGINT, "INT", 130), (libc::SIGTERM, "TERM", 143)] {
        let script = format!("trap 'echo stopping; exit 0' {name}; echo ready; while :; do sleep 0.05; done");
        let (child, mut stdout) = started(cluster.gantry(sh(&script)));
        send(&child, signal);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).expect("text");
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), expected, "{}", describe(&output));
        assert_eq!(rest, "stopping\n", "the process was asked, not killed");
    }
    // The process does not trap the signal, and its child would run forever.
    let (child, _stdout) = started(cluster.gantry(sh("sleep 1000 & echo ready; wait")));
    send(&child, libc::SIGINT);
    assert_eq!(code(&child.wait_with_output().expect("gantry ends")), 130);
}

#[test]
fn signals_ignored_at_start_stay_ignored() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for signal in [libc::SIGINT, libc::SIGHUP] {
        let mut command = cluster.gantry(["run", "--", "sh", "-c", "echo ready; read end; exit 7"]);
        command.stdin(Stdio::piped());
        // SAFETY: ignoring a signal runs no code.
        unsafe {
            command.pre_exec(move || {
                libc::signal(signal, libc::SIG_IGN);
                Ok(())
            });
        }
        let (mut child, _stdout) = started(command);
        send(&child, signal);
        drop(child.stdin.take());
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), 7, "{}", describe(&output));
    }
}

#[test]
fn second_interrupt_ends_command_at_once() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // The process ignores the request to end, so the command has something to wait for.
    let script = "trap '' INT TERM; echo ready; while :; do sleep 0.05; done";
    let (mut child, _stdout) = started(cluster.gantry(sh(script)));
    let mut stderr = BufReader::new(child.stderr.take().expect("stderr"));
    send(&child, libc::SIGINT);
    let mut line = String::new();
    while !line.contains("again to leave at once") {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).expect("a line"), 0, "it ended at the first interrupt");
    }
    send(&child, libc::SIGINT);
    assert_eq!(child.wait().expect("gantry ends").code(), Some(130));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    assert!(rest.contains(" is cancelled"), "{rest:?}");
    let workload = || cluster.list("workloads").pop().expect("the workload");
    assert_ne!(workload()["state"], "finished", "gantry did not wait for the end");
    let ended = wait_for("the end of the workload", || {
        let workload = workload();
        (workload["state"] == "finished").then_some(workload)
    });
    assert_eq!(ended["outcome"], "aborted", "{ended}");
}

#[test]
fn ended_workload_is_not_reported_as_running() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let submit = |script: &str| {
        let id = cluster.succeed(["run", "-d", "--", "sh", "-c", script]);
        String::from_utf8(id).expect("an id").trim().to_owned()
    };
    let ended = submit("yes | head -c 3000000; exit 3");
    assert_eq!(code(&cluster.output(["attach", &ended])), 3);
    let cancelled = cluster.output(["cancel", &ended]);
    assert_eq!(code(&cancelled), 0, "{}", describe(&cancelled));
    let printed = String::from_utf8_lossy(&cancelled.stderr).into_owned();
    assert!(printed.contains("the workload has already ended: failed (exit 3)"), "{}", describe(&cancelled));
    let json = cluster.succeed(["--json", "cancel", &ended]);
    let json: serde_json::Value = serde_json::from_slice(&json).expect("one JSON document");
    assert_eq!((&json["asked"], &json["outcome"]), (&false.into(), &"failed".into()));

    let running = submit("yes");
    for (command, id, goes_on) in [
        (&["logs"][..], &ended, false),
        (&["attach"], &ended, false),
        (&["logs", "-f"], &running, false),
        (&["attach"], &running, true),
    ] {
        let mut gantry = cluster.gantry(command.iter().copied().chain([&**id]));
        let mut child = gantry.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
        let mut first = [0; 1];
        child.stdout.take().expect("stdout").read_exact(&mut first).expect("a byte");
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), 141, "{command:?}: {}", describe(&output));
        let printed = String::from_utf8_lossy(&output.stderr).contains("runs on; stop it with");
        assert_eq!(printed, goes_on, "{command:?}: {}", describe(&output));
    }
    let show = cluster.succeed(["show", "workload", &running, "--json"]);
    let show: serde_json::Value = serde_json::from_slice(&show).expect("JSON");
    assert_eq!(show["state"], "running", "no signal stopped it: {show}");
}

#[test]
fn closed_stdout_cancels_workload() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let (child, stdout) = started(cluster.gantry(sh("echo ready; while echo more; do sleep 0.01; done")));
    drop(stdout);
    assert_eq!(code(&child.wait_with_output().expect("gantry ends")), 141);
    wait_for("the end of the workload", || {
        cluster.list("workloads").iter().all(|workload| workload["state"] == "finished").then_some(())
    });
}

#[test]
fn detached_run_can_be_followed_and_cancelled() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let id = |script: &str| {
        let printed = cluster.succeed(["run", "-d", "--", "sh", "-c", script]);
        String::from_utf8(printed).expect("an id").trim().to_owned()
    };
    let done = id("echo one; echo two >&2; exit 5");
    let attached = cluster.output(["attach", &done]);
    assert_eq!(code(&attached), 5, "{}", describe(&attached));
    let logs = cluster.output(["logs", &done]);
    assert_eq!(logs.stdout, b"one\n", "{}", describe(&logs));
    assert!(String::from_utf8_lossy(&logs.stderr).contains("two"), "{}", describe(&logs));

    let endless = id("sleep 1000");
    cluster.succeed(["cancel", &endless]);
    let ended = wait_for("the end of the workload", || {
        let show = cluster.succeed(["show", "workload", &endless, "--json"]);
        let show: serde_json::Value = serde_json::from_slice(show.trim_ascii()).expect("JSON");
        (show["state"] == "finished").then_some(show)
    });
    assert_eq!(ended["outcome"], "aborted", "{ended}");
    let logs = cluster.output(["logs", &endless]);
    assert_eq!(code(&logs), 0, "{}", describe(&logs));
    let printed = String::from_utf8_lossy(&logs.stderr).to_lowercase();
    assert!(printed.contains("cancelled"), "{}", describe(&logs));
}

#[test]
fn output_is_complete_on_full_disk() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().on_small_disk(64);
    cluster.succeed(["run", "--", "true"]);
    let mut filler = File::create(cluster.state().join("filler")).expect("a file");
    // Fills the disk, except for the space that a run needs beside its output.
    let free = || {
        let disk = rustix::fs::statvfs(cluster.state()).expect("the disk");
        disk.f_bavail * disk.f_frsize
    };
    while free() > 400 << 10 {
        filler.write_all(&[0; 4096]).expect("room");
    }
    let output = cluster.output(["run", "--", "sh", "-c", "seq 1 200000; echo problem >&2"]);
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let expected: String = (1..=200_000).map(|number| format!("{number}\n")).collect();
    assert!(output.stdout == expected.as_bytes(), "{} of {} bytes", output.stdout.len(), expected.len());
    assert!(String::from_utf8_lossy(&output.stderr).contains("problem"), "{}", describe(&output));
}
