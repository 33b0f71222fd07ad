//! Every way in which a run can end, and the exit code that tells it.

use std::fs;
use std::io::Read;

use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for};

fn sh(script: &str) -> Vec<String> {
    ["run", "--", "sh", "-c", script].map(str::to_owned).to_vec()
}

#[test]
fn the_exit_code_is_that_of_the_process() {
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
    assert!(String::from_utf8_lossy(&missing.stderr).contains("PROGRAM_NOT_FOUND"), "{}", describe(&missing));
    let not_executable = cluster.output(["run", "--", "/etc/passwd"]);
    assert_eq!(code(&not_executable), 126, "{}", describe(&not_executable));
    let user = cluster.output(["run", "--user", "nobody-here", "--", "true"]);
    assert_eq!(code(&user), 125, "{}", describe(&user));
    assert!(String::from_utf8_lossy(&user.stderr).contains("USER_NOT_FOUND"), "{}", describe(&user));
    let directory = cluster.output(["run", "--dir", "/no/such/directory", "--", "true"]);
    assert_eq!(code(&directory), 125, "{}", describe(&directory));
    assert!(
        String::from_utf8_lossy(&directory.stderr).contains("WORKING_DIRECTORY_MISSING"),
        "{}",
        describe(&directory)
    );
}

#[test]
fn a_time_limit_ends_it_and_publishes_nothing() {
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
fn an_output_that_is_gone_is_said_and_an_empty_one_is_fine() {
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
        assert!(String::from_utf8_lossy(&output.stderr).contains("OUTPUT_MISSING"), "{}", describe(&output));
        assert!(!cluster.path("gone").exists());
    }
    // Replacing it by another directory is what build scripts do.
    let script = "mkdir build; echo x > build/x; rm -rf out; mv build out";
    let replaced = cluster.output(["run", "-o", "out=./replaced", "--", "sh", "-c", script]);
    assert_eq!(code(&replaced), 0, "{}", describe(&replaced));
    assert_eq!(fs::read_to_string(cluster.path("replaced/x")).expect("the file"), "x\n");
}

#[test]
fn an_interrupt_asks_the_process_to_stop() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let script = "trap 'echo stopping; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
        let (child, mut stdout) = started(cluster.gantry(sh(script)));
        send(&child, signal);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).expect("text");
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), expected, "{}", describe(&output));
        assert_eq!(rest, "stopping\n", "the process was asked, not killed");
    }
    // The process did not trap the signal, and its child would go on for ever.
    let (child, _stdout) = started(cluster.gantry(sh("sleep 1000 & echo ready; wait")));
    send(&child, libc::SIGINT);
    assert_eq!(code(&child.wait_with_output().expect("gantry ends")), 130);
}

#[test]
fn a_closed_standard_output_cancels() {
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
fn a_detached_run_can_be_followed_cancelled_and_read_afterwards() {
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
}
