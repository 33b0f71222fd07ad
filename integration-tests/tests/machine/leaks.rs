//! Nothing is left behind, and the test would notice.

use std::fs;
use std::time::{Duration, Instant};

use integration_tests::snapshot::Snapshot;
use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for};

/// Runs of every kind of ending, with the exit code of each.
const ENDINGS: &[(&[&str], i32)] = &[
    (&["--", "true"], 0),
    (&["-i", "src=src", "-o", "out=./out", "--", "sh", "-c", "cp -a src/. out/"], 0),
    (&["-i", "src=src", "-o", "src=./same", "--", "sh", "-c", "echo x > src/x"], 0),
    (&["-o", "out=./out", "--", "sh", "-c", "exit 9"], 9),
    (&["--", "sh", "-c", "sleep 100 & kill -9 $$"], 137),
    (&["--", "no-such-program"], 127),
    (&["--", "/etc/passwd"], 126),
    (&["--user", "nobody-here", "--", "true"], 125),
    (&["--dir", "/no/such/directory", "--", "true"], 125),
    (&["-i", "src=no-such-directory", "--", "true"], 125),
    (&["-i", "src=artifact:0197c1a2-0000-7000-8000-000000000000", "--", "true"], 125),
    (&["--tag", "nowhere", "--", "true"], 125),
    (&["-o", "out=./gone", "--", "sh", "-c", "rmdir out; ln -s /etc out"], 125),
    (&["--", "sh", "-c", "sleep 100 & sleep 100 & exit 0"], 0),
    (&["-o", "out=./gone", "--", "rmdir", "out"], 125),
    (&["--timeout", "100ms", "-i", "src=src", "--", "sleep", "100"], 124),
    (&["--memory", "64M", "--", "python3", "-c", "x = bytearray(1 << 28)"], 137),
    (&["--user", "nobody", "--network", "none", "-i", "src=src", "--", "sh", "-c", "echo y > src/y"], 0),
];

fn cluster() -> Cluster {
    // A client that is killed may have sealed its upload a moment before.
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s").with("GANTRY_ABANDONED_AFTER", "10s");
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::create_dir(cluster.path("large")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    cluster
}

fn run(arguments: &[&str]) -> Vec<String> {
    ["run", "--keep", "0s", "--no-stdin"].iter().chain(arguments).map(|word| (*word).to_owned()).collect()
}

/// The one workload that runs at this moment.
fn running(cluster: &Cluster) -> String {
    wait_for("a running workload", || {
        let workloads = cluster.list("workloads");
        let running = workloads.iter().find(|workload| workload["state"] == "running")?;
        running["workload_id"].as_str().map(str::to_owned)
    })
}

fn all_finished(cluster: &Cluster) {
    wait_for("the end of every workload", || {
        cluster.list("workloads").iter().all(|workload| workload["state"] == "finished").then_some(())
    });
}

/// Ends that come from outside. Answers how many runs that were.
fn run_those_that_are_ended(cluster: &Cluster) -> usize {
    let endless = run(&["-o", "out=./out", "--", "sh", "-c", "echo ready; while :; do sleep 0.05; done"]);
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let (child, _stdout) = started(cluster.gantry(&endless));
        send(&child, signal);
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), expected, "{}", describe(&output));
    }
    // Cancelled by somebody else.
    let (child, _stdout) = started(cluster.gantry(&endless));
    cluster.succeed(["cancel", "--grace", "100ms", &running(cluster)]);
    let output = child.wait_with_output().expect("gantry ends");
    assert_eq!(code(&output), 143, "{}", describe(&output));
    // The client is killed, and the workload goes on.
    let (mut child, _stdout) = started(cluster.gantry(&endless));
    child.kill().and_then(|()| child.wait()).expect("killed");
    cluster.succeed(["cancel", "--grace", "100ms", &running(cluster)]);
    // Nobody reads what it says.
    let talks = run(&["--", "sh", "-c", "echo ready; while echo more; do sleep 0.01; done"]);
    let (child, stdout) = started(cluster.gantry(&talks));
    drop(stdout);
    let output = child.wait_with_output().expect("gantry ends");
    assert_eq!(code(&output), 141, "{}", describe(&output));
    // Left to itself, and cancelled then, or not.
    let detached = cluster.succeed(run(&["-d", "--", "sleep", "100"]));
    cluster.succeed(["cancel", String::from_utf8(detached).expect("an id").trim()]);
    cluster.succeed(run(&["-d", "-o", "out", "--", "sh", "-c", "echo x > out/x"]));
    all_finished(cluster);
    // The client is killed in the middle of its upload.
    let mut child = cluster.gantry(run(&["-i", "large=large", "--", "true"]));
    let mut child = child.stderr(std::process::Stdio::null()).spawn().expect("gantry");
    wait_for("an upload", || {
        let open = cluster.list("artifacts").iter().any(|artifact| artifact["state"] == "open");
        (open || child.try_wait().expect("a state").is_some()).then_some(())
    });
    child.kill().and_then(|()| child.wait()).expect("killed");
    8
}

/// Answers how many runs that were.
fn run_all(cluster: &Cluster, round: usize) -> usize {
    // Something new to upload each time.
    fs::write(cluster.path("src/round"), round.to_string()).expect("write");
    let noise: Vec<u8> = (0..8 << 20_u32).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let large = [round.to_string().into_bytes(), noise].concat();
    fs::write(cluster.path("large/file"), large).expect("write");
    for (arguments, expected) in ENDINGS {
        let output = cluster.output(run(arguments));
        assert_eq!(code(&output), *expected, "{arguments:?}: {}", describe(&output));
    }
    ENDINGS.len() + run_those_that_are_ended(cluster)
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
    let _alone = crate::alone();
    let cluster = cluster();
    // What the first run of a cluster makes once.
    run_all(&cluster, 1_000_000);
    let before = wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        now.rows.is_empty().then_some(now)
    });
    let mut runs = 0;
    for round in 0..4 {
        runs += run_all(&cluster, round);
        cluster.succeed(["gc"]);
    }
    assert!(runs >= 100, "{runs} runs");
    let left = left(&cluster, &before, Duration::from_secs(120));
    assert!(left.is_empty(), "{left:#?}");
}

/// The negative control: with destruction switched off the same check must fail, and name what is left of every kind. Control groups and
/// processes end with the process of a workload and not by destruction, so none of these is left here either.
#[test]
fn what_is_not_destroyed_is_noticed() {
    if !may_run_containers() {
        return;
    }
    let _alone = crate::alone();
    let mut cluster = cluster().with("GANTRY_HOLD_DESTRUCTION", "true");
    let started = cluster.output(["list", "workers"]);
    let said = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(said.contains("destroys nothing (--hold-destruction)"), "it is said aloud: {said}");
    let before = Snapshot::of(&cluster);
    run_all(&cluster, 0);
    let kept = left(&cluster, &before, Duration::from_secs(3));
    for kind in ["mount", "file", "row volumes", "row containers"] {
        assert!(kept.iter().any(|item| item.starts_with(kind)), "no {kind} in {kept:#?}");
    }
    let status = String::from_utf8(cluster.succeed(["status"])).expect("text");
    assert!(status.contains("held: what should go stays"), "{status}");

    // It goes with the first cluster that does not hold it.
    cluster.succeed(["down"]);
    cluster.set("GANTRY_HOLD_DESTRUCTION", "false");
    wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        let ours = cluster.path("").display().to_string();
        (now.rows.is_empty() && !now.mounts.iter().any(|mount| mount.contains(&ours))).then_some(())
    });
}
