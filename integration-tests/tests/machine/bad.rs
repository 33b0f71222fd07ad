//! Failures on the whole suite: each is reported correctly, leaves nothing, and the cluster
//! survives.

use std::fs;
use std::process::Stdio;

use integration_tests::snapshot::Snapshot;
use integration_tests::{Cluster, code, describe, may_run_containers, started, tree, wait_for};
use serde_json::Value;

use crate::alone;

fn run(arguments: &[&str]) -> Vec<String> {
    ["run", "--keep", "0s", "--no-stdin"].iter().chain(arguments).map(|word| (*word).to_owned()).collect()
}

/// Runs a command that must fail with this exit code and these words.
fn fail(cluster: &Cluster, arguments: &[&str], expected: i32, words: &[&str]) {
    let output = cluster.output(run(arguments));
    assert_eq!(code(&output), expected, "{arguments:?}: {}", describe(&output));
    let printed = String::from_utf8_lossy(&output.stderr);
    for word in words {
        assert!(printed.contains(word), "{arguments:?} does not say {word:?}: {}", describe(&output));
    }
}

/// Runs a command that needs disk space while the disk is full. If the scheduler knows that already,
/// the workload or its upload waits for the space.
fn fail_without_space(cluster: &Cluster, arguments: &[&str], words: &[&str]) {
    let output = cluster.output(run(&[&["--queue-timeout", "2s"], arguments].concat()));
    let printed = String::from_utf8_lossy(&output.stderr);
    let waited = printed.contains("QUEUE_TIMEOUT") && printed.contains("of its disk free")
        || printed.contains("ALL_WORKERS_BUSY");
    let is_told = waited || words.iter().all(|word| printed.contains(word));
    assert!(code(&output) == 125 && is_told, "{arguments:?}: {}", describe(&output));
}

/// Checks that a small workload with an input and an output works.
fn works(cluster: &Cluster) {
    fs::create_dir_all(cluster.path("small")).expect("a directory");
    fs::write(cluster.path("small/file"), "content").expect("write");
    let words = ["-i", "small=small", "-o", "out=./copied", "--", "cp", "small/file", "out/"];
    let output = cluster.output(run(&words));
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(fs::read(cluster.path("copied/file")).expect("read"), b"content");
}

/// Returns a snapshot once all garbage is collected.
fn collected(cluster: &Cluster) -> Snapshot {
    wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(cluster);
        now.rows.is_empty().then_some(now)
    })
}

fn assert_nothing_left(cluster: &Cluster, before: &Snapshot) {
    let mut left = Vec::new();
    for _ in 0..100 {
        cluster.succeed(["gc"]);
        left = Snapshot::of(cluster).beyond(before);
        if left.is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("left behind: {left:#?}");
}

fn workload(cluster: &Cluster, id: &str) -> Value {
    let show = cluster.succeed(["show", "workload", id, "--json"]);
    serde_json::from_slice(show.trim_ascii()).expect("JSON")
}

#[test]
fn failed_start_is_explained_and_leaves_nothing() {
    if !may_run_containers() {
        return;
    }
    let _alone = alone();
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
    works(&cluster);
    let before = collected(&cluster);
    fail(&cluster, &["--", "no-such-program"], 127, &["PROGRAM_NOT_FOUND"]);
    fail(&cluster, &["--", "/no/such/program"], 127, &["PROGRAM_NOT_FOUND"]);
    fail(&cluster, &["--", "/etc/passwd"], 126, &["PROGRAM_NOT_EXECUTABLE"]);
    fail(&cluster, &["--user", "nobody-here", "--", "true"], 125, &["USER_NOT_FOUND"]);
    fail(&cluster, &["--user", "root:no-such-group", "--", "true"], 125, &["USER_NOT_FOUND"]);
    let directory = ["--dir", "/no/such/directory", "--", "true"];
    fail(&cluster, &directory, 125, &["WORKING_DIRECTORY_MISSING"]);
    fail(&cluster, &["-o", "out", "--", "rmdir", "out"], 125, &["OUTPUT_MISSING"]);
    fail(&cluster, &["-i", "src=no-such-directory", "--", "true"], 125, &["no-such-directory"]);
    let unknown = ["-i", "src=artifact:0197c1a2-0000-7000-8000-000000000000", "--", "true"];
    fail(&cluster, &unknown, 125, &["INPUT_UNAVAILABLE"]);
    works(&cluster);
    assert_nothing_left(&cluster, &before);
}

#[test]
fn full_disk_is_reported_and_cluster_survives() {
    if !may_run_containers() {
        return;
    }
    let _alone = alone();
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s").on_small_disk(64);

    // An upload that does not fit frees its space at once.
    fs::create_dir(cluster.path("large")).expect("a directory");
    let noise: Vec<u8> =
        (0..20 << 20_u32).flat_map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    fs::write(cluster.path("large/file"), noise).expect("write");
    fail(&cluster, &["-i", "large=large", "--", "true"], 125, &["DISK_FULL", "gantry gc"]);
    works(&cluster);
    // The scan results of the directories above are kept.
    let before = collected(&cluster);

    // A process that fills the disk with its output or elsewhere still ends with a known exit.
    // Until its files are collected, other workloads fail with a full disk.
    for place in ["out/fill", "/fill"] {
        let fill = format!("dd if=/dev/zero of={place} bs=1M count=200; code=$?; echo ended; exit $code");
        let output = cluster.output(run(&["-o", "out", "--", "sh", "-c", &fill]));
        // The output is kept only until the run ends.
        assert!([1, 125].contains(&code(&output)), "{place}: {}", describe(&output));
        cluster.succeed(["gc"]);
        assert_nothing_left(&cluster, &before);
        works(&cluster);
    }

    // A process fills the disk while other workloads run.
    let script = "dd if=/dev/zero of=/fill bs=1M count=200; read line; exit 5";
    let mut filler = cluster.gantry(["run", "--keep", "0s", "--", "sh", "-c", script]);
    let mut child = filler.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    wait_for("a full disk", || {
        let disk = rustix::fs::statvfs(cluster.state()).expect("the disk");
        (disk.f_bavail == 0).then_some(())
    });
    fail_without_space(&cluster, &["--", "true"], &["DISK_FULL", "gantry gc"]);
    fail_without_space(&cluster, &["-i", "large=large", "--", "true"], &["DISK_FULL"]);
    drop(child.stdin.take());
    let ended = child.wait_with_output().expect("gantry ends");
    // On a slow machine, the disk guard ends the process first.
    let by_guard = code(&ended) == 125 && describe(&ended).contains("DISK_FULL");
    assert!(code(&ended) == 5 || by_guard, "{}", describe(&ended));
    assert_nothing_left(&cluster, &before);
    works(&cluster);
    assert_nothing_left(&cluster, &before);

    // A result is kept for an hour. `gantry gc` deletes it because the disk is full.
    let fill = "dd if=/dev/zero of=out/fill bs=1M count=200";
    let output = cluster.output(["run", "-o", "out=brought", "--", "sh", "-c", fill]);
    assert_eq!(code(&output), 1, "{}", describe(&output));
    fail_without_space(&cluster, &["--", "true"], &["DISK_FULL", "gantry gc", "gantry delete"]);
    // The scheduler receives the disk usage with the next heartbeat.
    wait_for("that a result is let go", || {
        let printed = String::from_utf8(cluster.succeed(["gc"])).expect("text");
        printed.contains("the disk of local is full: 1 artifact of").then_some(())
    });
    works(&cluster);
}

#[test]
fn missing_cgroup_hierarchy_fails_limited_run() {
    if !may_run_containers() {
        return;
    }
    let _alone = alone();
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s");
    // Memory limits may have a separate hierarchy or the only one.
    let mut up = cluster.up("umount /sys/fs/cgroup/memory 2>/dev/null || umount /sys/fs/cgroup");
    works(&cluster);
    let before = collected(&cluster);
    fail(&cluster, &["--memory", "64M", "--", "true"], 125, &["NO_COMPATIBLE_WORKER", "lacks limits-memory"]);
    works(&cluster);
    assert_nothing_left(&cluster, &before);
    cluster.succeed(["down"]);
    assert!(up.wait().expect("the cluster ends").success());
}

/// Simulates a boot: another boot id.
fn boot(cluster: &Cluster, id: &str) -> String {
    let path = cluster.path("boot");
    fs::write(&path, format!("{id}\n")).expect("write");
    format!("mount --bind {} /proc/sys/kernel/random/boot_id", path.display())
}

#[test]
fn reboot_reaps_processes_and_keeps_bytes() {
    if !may_run_containers() {
        return;
    }
    let _alone = alone();
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "1h");
    let mut first = cluster.up(&boot(&cluster, "00000000-0000-4000-8000-000000000001"));
    tree::make_difficult(&cluster.path("src"));
    let artifact = cluster.upload("src");
    // A kept container with an output, and a running one, both on copies of the artifact.
    let input = format!("in=artifact:{artifact}");
    let kept = cluster.succeed([
        "run",
        "-d",
        "-i",
        &input,
        "-o",
        "out",
        "--",
        "sh",
        "-c",
        "cp -a in/. out/; echo kept",
    ]);
    let kept = String::from_utf8(kept).expect("an id").trim().to_owned();
    assert_eq!(code(&cluster.output(["attach", &kept])), 0);
    let output =
        workload(&cluster, &kept)["outputs"][0]["artifact_id"].as_str().expect("an output").to_owned();
    let runs = cluster.succeed([
        "run",
        "-d",
        "-i",
        &input,
        "--",
        "sh",
        "-c",
        "echo x > in/x; echo ready; sleep 1000",
    ]);
    let runs = String::from_utf8(runs).expect("an id").trim().to_owned();
    wait_for("a running workload", || (workload(&cluster, &runs)["state"] == "running").then_some(()));
    let (mut follower, _stdout) = started(cluster.gantry(["attach", &runs]));

    // Everything stops at once. Mounts and memory are lost, as in a boot.
    cluster.kill_everything();
    first.wait().expect("the cluster is dead");
    follower.wait().expect("it was killed, too");
    fs::remove_dir_all(cluster.path("run")).expect("remove");
    fs::create_dir(cluster.path("run")).expect("make");
    let mut second = cluster.up(&boot(&cluster, "00000000-0000-4000-8000-000000000002"));

    let finished = wait_for("the end of what ran", || {
        let workload = workload(&cluster, &runs);
        (workload["state"] == "finished").then_some(workload)
    });
    assert_eq!(finished["outcome"], "errored", "{finished}");
    let reason = finished["failure"]["reason"].as_str().expect("a reason");
    assert!(["WORKER_LOST", "EXIT_UNKNOWN"].contains(&reason), "{finished}");
    let attached = cluster.output(["attach", &runs]);
    assert_eq!(code(&attached), 125, "{}", describe(&attached));
    assert!(String::from_utf8_lossy(&attached.stderr).contains(reason), "{}", describe(&attached));
    wait_for("the report of the next cluster", || {
        let printed = cluster.up_log();
        (printed.contains("did not end normally; this one takes over")
            && printed.contains("1 workload unfinished: "))
        .then_some(())
    });
    let status = wait_for("a cluster that is ready", || {
        let status = cluster.output(["status"]);
        (code(&status) == 0).then(|| String::from_utf8(status.stdout).expect("text"))
    });
    assert!(status.contains("did not end normally"), "{status}");

    for (id, name) in [(&artifact, "back"), (&output, "made")] {
        cluster.succeed(["download", "--preserve-special", id, name]);
        tree::assert_same(&cluster.path("src"), &cluster.path(name));
    }
    // The next workload reads the bytes, too.
    let again = cluster.output(["run", "-i", &input, "--", "cat", "in/plain"]);
    assert_eq!((code(&again), again.stdout.as_slice()), (0, b"hello\n".as_slice()), "{}", describe(&again));

    // The leftovers of the containers are not needed.
    cluster.succeed(["down"]);
    second.wait().expect("the cluster ends");
    let mut cluster = cluster;
    cluster.set("GANTRY_GC_GRACE", "0s");
    wait_for("the end of every container", || {
        cluster.succeed(["gc"]);
        cluster.list("containers").is_empty().then_some(())
    });
    let containers = || fs::read_dir(cluster.state().join("worker/containers")).expect("a directory").count();
    wait_for("no container on the disk", || (containers() == 0).then_some(()));
}
