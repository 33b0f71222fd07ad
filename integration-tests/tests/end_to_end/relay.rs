//! Inputs on a worker that another worker cannot reach, so that the streamer carries the bytes.

use std::process::Command;

use integration_tests::may_run_containers;
use integration_tests::suite::{Shape, Suite};
use serde_json::Value;

const SHAPE: Shape = Shape { gateways: 2, ..Shape::ONE };

/// Removes the way from a machine to another one.
fn cut_off(suite: &Suite, machine: usize, from: usize) {
    let prefix = suite.machines().prefix(machine);
    let (first, rest) = prefix.split_first().expect("a command");
    let address = suite.machines().address(from);
    let route = ["ip", "route", "add", "unreachable", &address];
    let made = Command::new(first).args(rest).args(route).status().expect("it runs");
    assert!(made.success());
}

fn json(suite: &Suite, arguments: &[&str]) -> Value {
    let printed = suite.succeed(&[arguments, &["--json"]].concat());
    serde_json::from_str(printed.lines().next().expect("a document")).expect("JSON")
}

#[test]
fn workload_runs_without_connection_to_its_input() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start_on_machines(SHAPE, &[]);
    if suite.machines().address(0) == suite.machines().address(1) {
        return;
    }
    cut_off(&suite, 1, 0);
    let script = "printf 'more than eight bytes' > out/file";
    suite.succeed(&["run", "--quiet", "--worker", "worker-0", "-o", "out", "--", "sh", "-c", script]);
    let artifact = json(&suite, &["list", "artifacts"])["artifact_id"].clone();
    let input = format!("in=artifact:{}", artifact.as_str().expect("an id"));
    let line = ["run", "--quiet", "--worker", "worker-1", "-i", &input, "--", "cat", "in/file"];
    assert_eq!(suite.succeed(&line), "more than eight bytes");

    let worker = |name: &str| json(&suite, &["show", "worker", name])["worker_id"].clone();
    let status = json(&suite, &["status"]);
    let [pair] = &status["relayed_pairs"].as_array().expect("pairs")[..] else { panic!("{status}") };
    assert_eq!((&pair["from_worker_id"], &pair["to_worker_id"]), (&worker("worker-0"), &worker("worker-1")));
    assert_eq!(pair["gateway_endpoint"], suite.address("runtime-gateway-0"));
    let shown = suite.succeed(&["status"]);
    let expected = "worker-0 → worker-1: bytes go through the streamer for ";
    assert!(shown.contains(expected), "{shown}");
}
