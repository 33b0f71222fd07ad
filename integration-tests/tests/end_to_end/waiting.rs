//! Reasons for waiting, and the events of a watched workload.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, id, may_run_containers, wait_for};
use serde_json::Value;

/// Time limit for any event.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two schedulers, and a worker with one slot.
fn start() -> Suite {
    let settings = [SHORT_TERMS, &[("GANTRY_WORKER_MAX_TASKS", "1")]].concat();
    let suite = Suite::start(Shape { schedulers: 2, ..Shape::ONE }, &settings);
    suite.attended("worker-0", "runtime-gateway-0");
    suite
}

fn detached(suite: &Suite, script: &str) -> String {
    id(suite.succeed(&["run", "--quiet", "-d", "--", "sh", "-c", script]))
}

fn running(suite: &Suite, workload: &str) {
    wait_for(&format!("{workload}, which runs,"), || {
        let shown = suite.succeed(&["show", "workload", workload, "--json"]);
        let shown: Value = serde_json::from_str(shown.trim()).expect("JSON");
        (shown["state"] == "running").then_some(())
    });
}

/// Reads the lines of a child process.
fn lines(of: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = sync_channel(1000);
    std::thread::spawn(move || {
        for line in BufReader::new(of).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Returns the first line that `pick` accepts.
fn until<T>(lines: &Receiver<String>, what: &str, pick: impl Fn(&str) -> Option<T>) -> T {
    let mut printed = Vec::new();
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => match pick(&line) {
                Some(found) => return found,
                None => printed.push(line),
            },
            Err(error) => panic!("{what}: {error} after {printed:?}"),
        }
    }
}

fn ended(mut child: Child) -> Option<i32> {
    child.wait().expect("it ends").code()
}

#[test]
fn waiting_is_explained_and_watch_survives_scheduler() {
    if !may_run_containers() {
        return;
    }
    let mut suite = start();
    let holds = detached(&suite, "sleep 600");
    running(&suite, &holds);

    let watched = detached(&suite, "exit 3");
    let mut watch = suite.gantry(&["watch", "--json", &watched]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("gantry runs");
    let events = lines(watch.stdout.take().expect("stdout"));
    let event = |name: &'static str| {
        until(&events, name, |line| {
            let event: Value = serde_json::from_str(line).expect("JSON");
            (event["event"] == name).then_some(event)
        })
    };
    let queued = event("queued");
    assert!(
        queued["reasons"][0].as_str().is_some_and(|why| why.contains("is full (1 of 1 tasks)")),
        "{queued}"
    );
    let waiting = event("waiting");
    assert_eq!(waiting["queue_position"], 1, "{waiting}");
    assert!(
        waiting["reason"].as_str().is_some_and(|why| why.contains("is full (1 of 1 tasks)")),
        "{waiting}"
    );

    let mut run = suite.gantry(&["run", "--no-stdin", "--", "true"]);
    let mut run = run.stderr(Stdio::piped()).spawn().expect("gantry runs");
    let printed = lines(run.stderr.take().expect("stderr"));
    let line = until(&printed, "why it waits", |line| line.contains("waiting, ").then(|| line.to_owned()));
    let expected =
        "waiting, 2nd in the queue: the only worker that could take it, worker-0, is full (1 of 1 tasks)";
    assert!(line.contains(expected), "{line}");

    let why = suite.succeed(&["explain", &watched]);
    assert!(
        why.starts_with("the workload waits at position 1 of the queue: the only worker that could take it"),
        "{why}"
    );
    assert!(why.contains("expected wait: "), "{why}");
    assert!(why.contains("worker-0: one of its tasks ends"), "{why}");
    let demand = suite.succeed(&["demand", "--json"]);
    let demand: Value = serde_json::from_str(demand.trim()).expect("JSON");
    assert_eq!(
        (&demand["waiting"], &demand["demand"][0]["waits_for"]),
        (&2.into(), &"FULL".into()),
        "{demand}"
    );
    assert_eq!(demand["removable"][0]["worker_name"], "worker-0", "{demand}");
    assert_eq!(demand["removable"][0]["would_lose"], false, "{demand}");
    assert!(suite.succeed(&["demand"]).starts_with("2 waiting for a worker, the oldest for "));

    // The watch survives the death of either scheduler.
    for scheduler in ["scheduler-0", "scheduler-1"] {
        suite.kill(scheduler);
        suite.spawn(scheduler);
        suite.wait_until_ready(scheduler);
    }
    suite.succeed(&["cancel", "--grace", "0s", &holds]);
    let placed = event("placed");
    assert_eq!(placed["location"]["worker_name"], "worker-0", "{placed}");
    event("running");
    let finished = event("finished");
    assert_eq!((&finished["outcome"], &finished["status"]), (&"failed".into(), &3.into()), "{finished}");
    assert_eq!(events.recv().ok(), None, "it is the last");
    assert_eq!(ended(watch), Some(3), "as the workload");
    assert_eq!(ended(run), Some(0));

    // A later watch starts at the first event.
    let output = suite.gantry(&["watch", &watched]).output().expect("gantry runs");
    assert_eq!(output.status.code(), Some(3), "{}", describe(&output));
    let told = String::from_utf8(output.stdout).expect("text");
    let mut from = 0;
    for words in
        ["waiting for a worker: worker-0: is full", "placed on worker-0: ", "running on worker-0", "failed"]
    {
        let at = told[from..].find(words).unwrap_or_else(|| panic!("no {words:?} after {from}: {told}"));
        from += at;
    }
    let unknown =
        suite.gantry(&["watch", "01980000-0000-7000-8000-00000000002a"]).output().expect("gantry runs");
    assert_eq!(unknown.status.code(), Some(125), "{}", describe(&unknown));
}
