//! `gantry top`: the usage of running containers.

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::terminal::Terminal;
use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};
use serde_json::Value;

/// Holds 30 MB and uses a processor.
const WORK: &str = "x=$(head -c 30000000 /dev/zero | tr '\\0' x); while :; do :; done";

/// Takes one snapshot.
fn snapshot(suite: &Suite, options: &[&str]) -> Value {
    let output =
        suite.gantry(&[&["top", "--once", "--json"], options].concat()).output().expect("gantry runs");
    assert_eq!(code(&output), 0, "{}", describe(&output));
    serde_json::from_slice(output.stdout.trim_ascii()).expect("JSON")
}

/// Returns the container of a service, or of the command if `service` is null.
fn container<'s>(snapshot: &'s Value, workload: &str, service: &Value) -> Option<&'s Value> {
    let containers = snapshot["containers"].as_array().expect("a list");
    containers.iter().find(|one| one["workload_id"] == workload && one["service"] == *service)
}

#[test]
fn top_shows_containers_beside_frozen_streamer() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let run = ["--team", "other", "run", "-d", "--name", "busy", "--memory", "100M"];
    let service = ["--network", "none", "--service", "db=host,command=sleep 1000", "--", "sh", "-c", WORK];
    let printed = suite.succeed(&[&run[..], &service].concat());
    let workload = printed.trim();
    // The containers of all teams are shown.
    let (main, db) = wait_for("a container that is measured", || {
        let snapshot = snapshot(&suite, &[]);
        let main = container(&snapshot, workload, &Value::Null)?.clone();
        let db = container(&snapshot, workload, &"db".into())?.clone();
        let holds = main["memory_bytes"].as_u64() >= Some(30_000_000);
        (holds && main["cpu_percent"].as_f64() > Some(1.0)).then_some((main, db))
    });
    assert_eq!(
        (&main["name"], &main["team"], &main["state"]),
        (&"busy".into(), &"other".into(), &"running".into())
    );
    assert_eq!((&main["processes"], &main["memory_limit_bytes"]), (&1.into(), &(100 << 20).into()), "{main}");
    assert!(db["state"] == "running" && db["processes"].as_u64() > Some(0), "{db}");

    suite.signal("streamer-0", libc::SIGSTOP);
    let seen = snapshot(&suite, &[]);
    let busy = container(&seen, workload, &Value::Null).unwrap_or_else(|| panic!("{seen}"));
    assert!(busy["cpu_percent"].as_f64() > Some(1.0), "{busy}");
    let unseen = seen["unseen"].as_array().expect("a list");
    assert!(unseen.iter().any(|part| part["what"] == "transfers"), "{seen}");
    suite.signal("streamer-0", libc::SIGCONT);
}

#[test]
fn live_screen_follows_containers_and_is_restored() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let output = cluster.output(["top"]);
    assert_eq!(code(&output), 1, "{}", describe(&output));
    assert!(!cluster.state().join("artifact-store.db").exists(), "top starts no cluster");
    cluster.succeed(["run", "-d", "--name", "first", "--", "sleep", "1000"]);
    let mut top = cluster.gantry(["top", "--interval", "100ms"]);
    top.env("TERM", "xterm");
    let terminal = Terminal::run(&top, 24, 100);
    terminal.wait_for("first ");
    terminal.wait_for("0.0%");
    cluster.succeed(["run", "-d", "--name", "second", "--", "sleep", "1000"]);
    terminal.wait_for("second ");
    terminal.press("q");
    terminal.ended(0);
    let text = terminal.text();
    assert!(text.contains("\u{1b}[?1049h") && text.contains("\u{1b}[?1049l"), "{text:?}");
}
