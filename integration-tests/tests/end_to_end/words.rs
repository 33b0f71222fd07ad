//! Output of the command line: traces, events, ignored files and merged results.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::BufRead;

use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for};
use serde_json::Value;

#[test]
fn trace_has_spans_of_all_services() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    let run = [
        "run",
        "--trace",
        "trace.json",
        "-i",
        "src=src",
        "-o",
        "src=./out",
        "--",
        "sh",
        "-c",
        "echo $TRACEPARENT",
    ];
    let output = cluster.output(run);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let trace: Value =
        serde_json::from_slice(&fs::read(cluster.path("trace.json")).expect("the trace")).expect("JSON");
    let spans = trace["spans"].as_array().expect("spans");
    let text = |span: &Value, field: &str| span[field].as_str().map(str::to_owned);

    let traces: BTreeSet<_> = spans.iter().map(|span| text(span, "trace_id")).collect();
    assert_eq!(traces.len(), 1, "one trace");
    let services: BTreeSet<_> = spans.iter().filter_map(|span| text(span, "service")).collect();
    let expected = ["artifact-store", "gantry", "runtime-gateway", "scheduler", "streamer"];
    assert_eq!(services, expected.map(str::to_owned).into());
    let ids: BTreeSet<_> = spans.iter().filter_map(|span| text(span, "span_id")).collect();
    let orphans: Vec<_> = spans
        .iter()
        .filter(|span| text(span, "parent_span_id").is_some_and(|parent| !ids.contains(&parent)))
        .collect();
    assert!(orphans.is_empty(), "spans without their parents: {orphans:#?}");
    assert_eq!(spans.iter().filter(|span| span["parent_span_id"].is_null()).count(), 1, "one root");
    let in_container = String::from_utf8(output.stdout).expect("text");
    let id = in_container.split('-').nth(1).expect("a trace id");
    assert_eq!(traces.first().cloned().flatten().as_deref(), Some(id), "the process continues the trace");
}

#[test]
fn events_are_json_lines_and_last_has_outcome() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let output = cluster.output(["--json", "run", "--", "sh", "-c", "echo hi; echo err >&2; exit 4"]);
    assert_eq!(code(&output), 4, "{}", describe(&output));
    let text = String::from_utf8(output.stdout).expect("text");
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let printed = |stream: &str| {
        let ours = events.iter().filter(|event| event["event"] == "output" && event["stream"] == stream);
        ours.filter_map(|event| event["data"].as_str()).collect::<String>()
    };
    assert_eq!((printed("stdout").as_str(), printed("stderr").as_str()), ("aGkK", "ZXJyCg=="));
    let last = events.last().expect("an event");
    assert_eq!((&last["event"], &last["outcome"]), (&Value::from("finished"), &Value::from("failed")));
    assert_eq!((&last["exit"]["code"], &last["status"]), (&Value::from(4), &Value::from(4)));
}

#[test]
fn logs_tail_prints_last_lines() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "seq 5000; seq 6001 6003 >&2; exit 3";
    let output = cluster.output(["run", "--name", "ended", "--", "sh", "-c", script]);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    let output = cluster.output(["logs", "-n", "2", "ended"]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(output.stdout, b"4999\n5000\n");
    assert_eq!(output.stderr, b"6002\n6003\n");
    assert_eq!(cluster.succeed(["logs", "--tail", "0", "ended"]), b"");
    assert_eq!(
        cluster.succeed(["logs", "--tail", "5001", "ended"]).len(),
        5 * 4001 + 4 * 900 + 3 * 90 + 2 * 9
    );
    assert_eq!(cluster.succeed(["logs", "--since", "1h", "-n", "1", "ended"]), b"5000\n");
    assert_eq!(cluster.succeed(["logs", "--since", "2999-01-01T00:00:00Z", "ended"]), b"");

    // With `-f`, what is written later follows.
    let script = "seq 9; echo ready; touch /tmp/up; until [ -e /tmp/go ]; do sleep 0.05; done; echo later";
    cluster.succeed(["run", "-d", "--name", "runs", "--", "sh", "-c", script]);
    let is_up = ["exec", "runs", "test", "-e", "/tmp/up"];
    wait_for("the output", || cluster.output(is_up).status.success().then_some(()));
    assert_eq!(cluster.succeed(["logs", "-n", "1", "runs"]), b"ready\n", "the workload runs");
    let (child, mut lines) = started(cluster.gantry(["logs", "-f", "--tail", "1", "runs"]));
    cluster.let_go("runs");
    let mut line = String::new();
    lines.read_line(&mut line).expect("another line");
    assert_eq!(line, "later\n");
    assert!(child.wait_with_output().expect("it ends").status.success());
}

#[test]
fn ignored_files_and_output_directories_are_not_uploaded() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let files = [
        ("src/.gantryignore", "*.tmp\n!keep.tmp\n"),
        ("src/.gitignore", "built\n"),
        ("src/a", "a"),
        ("src/x.tmp", "x"),
        ("src/keep.tmp", "k"),
        ("src/built", "b"),
        ("src/out/old", "o"),
    ];
    fs::create_dir_all(cluster.path("src/out")).expect("directories");
    for (path, content) in files {
        fs::write(cluster.path(path), content).expect("write");
    }
    let list = |more: &[&str]| {
        let mut arguments = vec!["run", "-i", "src=src", "-o", "out=src/out"];
        arguments.extend(more);
        arguments.extend(["--", "sh", "-c", "find src -type f | sort"]);
        let output = cluster.output(arguments);
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("left out"),
            "the message is missing: {}",
            describe(&output)
        );
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(list(&[]), "src/.gantryignore\nsrc/.gitignore\nsrc/a\nsrc/built\nsrc/keep.tmp\n");
    assert_eq!(list(&["--gitignore"]), "src/.gantryignore\nsrc/.gitignore\nsrc/a\nsrc/keep.tmp\n");
    fs::create_dir(cluster.path("src/below")).expect("directory");
    fs::write(cluster.path("src/below/.gantryignore"), "*.o\nsecret[\n").expect("write");
    let output = cluster.output(["run", "-i", "src=src", "--allow-changed", "--", "true"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(code(&output) == 125 && printed.contains("src/below/.gantryignore:2"), "{}", describe(&output));
}

#[test]
fn result_is_merged_or_replaces_directory() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("out/sub")).expect("directories");
    fs::create_dir(cluster.path("elsewhere")).expect("directory");
    for (path, content) in [("out/mine", "mine"), ("out/shared", "old"), ("elsewhere/safe", "safe")] {
        fs::write(cluster.path(path), content).expect("write");
    }
    std::os::unix::fs::symlink("../elsewhere", cluster.path("out/link")).expect("link");
    let script = "echo new > out/shared; mkdir out/link; echo theirs > out/link/safe";
    let run = |more: &[&str]| {
        let mut arguments = vec!["run", "-o", "out=./out"];
        arguments.extend(more);
        arguments.extend(["--", "sh", "-c", script]);
        let output = cluster.output(arguments);
        assert_eq!(code(&output), 0, "{}", describe(&output));
    };
    let names = || -> BTreeMap<String, bool> {
        let entries = fs::read_dir(cluster.path("out")).expect("a directory").flatten();
        entries
            .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path().is_dir()))
            .collect()
    };
    run(&[]);
    assert_eq!(fs::read_to_string(cluster.path("out/shared")).expect("read"), "new\n");
    assert_eq!(
        fs::read_to_string(cluster.path("elsewhere/safe")).expect("read"),
        "safe",
        "no link is followed"
    );
    assert_eq!(names().into_keys().collect::<Vec<_>>(), ["link", "mine", "shared", "sub"]);
    run(&["--replace"]);
    assert_eq!(names().into_keys().collect::<Vec<_>>(), ["link", "shared"]);
}

fn stderr_text(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn known_bytes_keep_their_label() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("d")).expect("directory");
    fs::write(cluster.path("d/file"), "content").expect("write");
    let first = cluster.output(["upload", "--label", "first", "d"]);
    assert!(!stderr_text(&first).contains("which stays"), "{}", describe(&first));
    let artifact = String::from_utf8(first.stdout).expect("an id");
    let second = cluster.output(["upload", "--label", "second", "d"]);
    assert_eq!(code(&second), 0, "{}", describe(&second));
    assert_eq!(String::from_utf8_lossy(&second.stdout), artifact);
    let known = format!("already in the cluster as artifact {artifact}");
    assert!(stderr_text(&second).contains(&known), "{}", describe(&second));
    assert!(stderr_text(&second).contains("with the label \"first\", which stays"), "{}", describe(&second));
}

#[test]
fn collected_output_is_reported_with_outcome() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0");
    let id = cluster.succeed(["run", "-d", "--", "sh", "-c", "echo out; exit 3"]);
    let id = String::from_utf8(id).expect("an id");
    let id = id.trim();
    let output = wait_for("that its output is collected", || {
        cluster.succeed(["gc"]);
        let output = cluster.output(["logs", id]);
        (code(&output) != 0).then_some(output)
    });
    assert_eq!(code(&output), 125, "{}", describe(&output));
    let gone = format!("gantry: the output of workload {id} is deleted: output is kept for 5 minutes");
    assert!(stderr_text(&output).contains(&gone), "{}", describe(&output));
    let ended = format!("the workload failed (exit 3); see `gantry show workload {id}`");
    assert!(stderr_text(&output).contains(&ended), "{}", describe(&output));
}

#[test]
fn directory_in_way_of_result_stays() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("m/x")).expect("directories");
    fs::write(cluster.path("m/x/mine"), "mine").expect("write");
    let output = cluster.output(["run", "-o", "o=m", "--", "sh", "-c", "echo theirs > o/x"]);
    assert_eq!(code(&output), 125, "{}", describe(&output));
    let text = stderr_text(&output);
    let kept = text.lines().find_map(|line| line.strip_prefix("gantry: o: kept as artifact ")).expect(&text);
    let (artifact, how) = kept.split_once("; ").expect(&text);
    assert_eq!(how, format!("download it with `gantry download {artifact} m`"));
    assert!(
        text.contains("cannot download o into \"m\": the result cannot replace the directory \"x\"")
            && text.contains("--replace"),
        "{text}"
    );
    assert_eq!(fs::read_to_string(cluster.path("m/x/mine")).expect("read"), "mine");
    cluster.succeed(["download", "--replace", artifact, "m"]);
    assert_eq!(fs::read_to_string(cluster.path("m/x")).expect("read"), "theirs\n");
}

#[test]
fn foreground_cluster_reports_its_end() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let mut up = cluster.up("");
    send(&up, libc::SIGINT);
    assert_eq!(up.wait().expect("it ends").code(), Some(0));
    let printed = cluster.up_log();
    assert!(printed.contains("gantry: no workload runs; the cluster ends\n"), "{printed}");
    assert!(printed.ends_with("gantry: the cluster has ended\n"), "{printed}");
    assert!(!printed.contains("stopping the workloads"), "{printed}");
}
