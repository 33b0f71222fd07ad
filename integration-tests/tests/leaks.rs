//! Nothing is left behind.

use std::collections::BTreeSet;
use std::fs;

use integration_tests::snapshot::Snapshot;
use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};

/// Runs of every kind of ending, with the exit code of each.
fn endings(cluster: &Cluster, round: usize) {
    fs::write(cluster.path("src/round"), round.to_string()).expect("write");
    let check = |arguments: &[&str], expected: i32| {
        let mut all = vec!["run", "--keep", "0s", "--no-stdin"];
        all.extend(arguments);
        let output = cluster.output(all);
        assert_eq!(code(&output), expected, "{arguments:?}: {}", describe(&output));
    };
    check(&["--", "true"], 0);
    check(&["-i", "src=src", "-o", "out=./out", "--", "sh", "-c", "cp -a src/. out/"], 0);
    check(&["-i", "src=src", "-o", "src=./same", "--", "sh", "-c", "echo x > src/x"], 0);
    check(&["-o", "out=./out", "--", "sh", "-c", "exit 9"], 9);
    check(&["--", "sh", "-c", "sleep 100 & kill -9 $$"], 137);
    check(&["--", "no-such-program"], 127);
    check(&["--user", "nobody-here", "--", "true"], 125);
    check(&["--timeout", "100ms", "-i", "src=src", "--", "sleep", "100"], 124);
    check(&["--memory", "64M", "--", "python3", "-c", "x = bytearray(1 << 28)"], 137);
    check(&["--user", "nobody", "--hermetic", "-i", "src=src", "--", "sh", "-c", "echo y > src/y"], 0);
}

fn collected(cluster: &Cluster, before: &Snapshot) -> Vec<String> {
    cluster.succeed(["gc"]);
    Snapshot::of(cluster).beyond(before)
}

#[test]
fn a_hundred_runs_of_every_kind_of_ending_leave_nothing() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    // What the first run of a cluster makes once.
    endings(&cluster, 1_000_000);
    let mut rows = BTreeSet::new();
    let before = wait_for("quiescence", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        if now.rows != rows {
            eprintln!("rows: {:#?}", now.rows);
            rows.clone_from(&now.rows);
        }
        now.rows.is_empty().then_some(now)
    });
    for round in 0..10 {
        endings(&cluster, round);
    }
    let mut left = Vec::new();
    wait_for("an empty machine", || {
        let now = collected(&cluster, &before);
        let clean = now.is_empty();
        if now != left {
            eprintln!("left: {now:#?}");
            left = now;
        }
        clean.then_some(())
    });
}
