//! Nothing is left behind, and the test would notice.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use integration_tests::snapshot::Snapshot;
use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};

/// What is on the machine is looked at as a whole, so one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs of every kind of ending, with the exit code of each.
const ENDINGS: &[(&[&str], i32)] = &[
    (&["--", "true"], 0),
    (&["-i", "src=src", "-o", "out=./out", "--", "sh", "-c", "cp -a src/. out/"], 0),
    (&["-i", "src=src", "-o", "src=./same", "--", "sh", "-c", "echo x > src/x"], 0),
    (&["-o", "out=./out", "--", "sh", "-c", "exit 9"], 9),
    (&["--", "sh", "-c", "sleep 100 & kill -9 $$"], 137),
    (&["--", "no-such-program"], 127),
    (&["--user", "nobody-here", "--", "true"], 125),
    (&["-o", "out=./gone", "--", "rmdir", "out"], 125),
    (&["--timeout", "100ms", "-i", "src=src", "--", "sleep", "100"], 124),
    (&["--memory", "64M", "--", "python3", "-c", "x = bytearray(1 << 28)"], 137),
    (&["--user", "nobody", "--hermetic", "-i", "src=src", "--", "sh", "-c", "echo y > src/y"], 0),
];

fn cluster(gc_grace: &str) -> Cluster {
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", gc_grace);
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    cluster
}

fn run_all(cluster: &Cluster, round: usize) {
    // Something new to upload each time.
    fs::write(cluster.path("src/round"), round.to_string()).expect("write");
    for (arguments, expected) in ENDINGS {
        let output = cluster.output(["run", "--keep", "0s", "--no-stdin"].iter().chain(*arguments));
        assert_eq!(code(&output), *expected, "{arguments:?}: {}", describe(&output));
    }
    let detached = cluster.succeed(["run", "--keep", "0s", "-d", "--", "sleep", "100"]);
    let id = String::from_utf8(detached).expect("an id");
    cluster.succeed(["cancel", id.trim()]);
}

/// What is on the machine beyond `before`, once it is nothing, or when patience ends.
fn left(cluster: &Cluster, before: &Snapshot, patience: Duration) -> Vec<String> {
    let deadline = Instant::now() + patience;
    loop {
        cluster.succeed(["gc"]);
        let left = Snapshot::of(cluster).beyond(before);
        if left.is_empty() || Instant::now() > deadline {
            return left;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_hundred_runs_of_every_kind_of_ending_leave_nothing() {
    if !may_run_containers() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = cluster("0s");
    // What the first run of a cluster makes once.
    run_all(&cluster, 1_000_000);
    let before = wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        now.rows.is_empty().then_some(now)
    });
    for round in 0..10 {
        run_all(&cluster, round);
        cluster.succeed(["gc"]);
    }
    let left = left(&cluster, &before, Duration::from_secs(60));
    assert!(left.is_empty(), "{left:#?}");
}

/// The negative control: where nothing is destroyed for an hour, the same check must fail, and name what is left of every kind.
#[test]
fn what_is_not_destroyed_is_noticed() {
    if !may_run_containers() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = cluster("1h");
    run_all(&cluster, 1_000_000);
    let before = Snapshot::of(&cluster);
    run_all(&cluster, 0);
    let left = left(&cluster, &before, Duration::from_secs(3));
    for kind in ["mount", "file", "row"] {
        assert!(left.iter().any(|item| item.starts_with(kind)), "no {kind} in {left:#?}");
    }
}
