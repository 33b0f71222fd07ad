//! Restore of the artifact store from a backup. Newer volumes and containers are orphans, survive,
//! and are adopted or purged.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};
use serde_json::Value;

fn json<const N: usize>(cluster: &Cluster, line: [&str; N]) -> Value {
    let printed = cluster.succeed(line.iter().chain(&["--json"]));
    serde_json::from_slice(printed.trim_ascii()).expect("JSON")
}

fn text<const N: usize>(cluster: &Cluster, line: [&str; N]) -> String {
    String::from_utf8(cluster.succeed(line)).expect("text")
}

/// Lists the orphans.
fn aside(cluster: &Cluster, kind: &str) -> Vec<Value> {
    let printed = cluster.succeed(["list", kind, "--orphans", "--json"]);
    let lines = printed.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).expect("JSON")).collect()
}

/// Runs a command that leaves the output `label`, and returns the id of its artifact.
fn make(cluster: &Cluster, label: &str) -> String {
    let script = format!("echo {label} > {label}/made");
    cluster.succeed(["run", "--keep", "1h", "-o", label, "--", "sh", "-c", &script]);
    let artifacts = cluster.list("artifacts");
    let made = artifacts.iter().find(|artifact| artifact["label"] == label).expect("the output");
    made["artifact_id"].as_str().expect("an id").to_owned()
}

/// Returns the path of the volume of an artifact.
fn volume(cluster: &Cluster, artifact: &str) -> String {
    let shown = json(cluster, ["show", "artifact", artifact]);
    shown["replicas"][0]["volume_handle"].as_str().expect("a replica").to_owned()
}

/// Starts the cluster in the foreground with `--restored`.
fn up_restored(cluster: &Cluster) -> Child {
    let mut command = cluster.gantry(["up", "--restored"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("gantry");
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
    stdout.read_line(&mut line).expect("a line");
    assert!(line.starts_with("listening on "), "{line:?}");
    child.stdout = Some(stdout.into_inner());
    child
}

#[test]
fn objects_newer_than_backup_are_orphans() {
    if !may_run_containers() {
        return;
    }
    // One cluster gets --restored, and the other one detects the restore.
    for told in [true, false] {
        let cluster = Cluster::new();
        let state = cluster.state();
        let before = make(&cluster, "before");
        cluster.succeed(["down"]);
        // That file has the whole state of an ended cluster.
        let copy = |from: &std::path::Path, to: &std::path::Path| {
            for directory in [from, to] {
                assert!(!directory.join("artifact-store.db-wal").exists(), "in {}", directory.display());
            }
            fs::copy(from.join("artifact-store.db"), to.join("artifact-store.db")).expect("copy a database");
        };
        let backup = cluster.path("backup");
        fs::create_dir(&backup).expect("a directory");
        copy(&state, &backup);
        let mark = || fs::read_to_string(state.join("worker/store-mark")).expect("the worker's mark");
        let at_backup = mark();

        let (wanted, unwanted) = (make(&cluster, "wanted"), make(&cluster, "unwanted"));
        let (good, bad) = (volume(&cluster, &wanted), volume(&cluster, &unwanted));
        let path = |volume: &str| state.join("worker/volumes").join(volume);
        // The description of a volume is written in the background.
        wait_for("the notes of the outputs", || {
            [&good, &bad].iter().all(|volume| path(volume).join("artifact").exists()).then_some(())
        });
        wait_for("another report", || (mark() != at_backup).then_some(()));
        cluster.succeed(["down"]);
        copy(&backup, &state);
        let up = told.then(|| up_restored(&cluster));

        let listed = wait_for("orphans, described", || {
            let listed = aside(&cluster, "volumes");
            let described = |wanted: &String| {
                listed.iter().any(|one| one["volume_handle"] == **wanted && one["digest"].is_string())
            };
            [&good, &bad].into_iter().all(described).then_some(listed)
        });
        let of = |volume: &str| listed.iter().find(|one| one["volume_handle"] == volume).expect("listed");
        assert_eq!(of(&good)["artifact_id"], *wanted);
        assert_eq!(of(&good)["team"], "main");
        let containers = aside(&cluster, "containers");
        assert_eq!(containers.len(), 2, "{containers:?}");
        let listed = text(&cluster, ["list", "containers", "--orphans"]);
        assert!(listed.starts_with("HANDLE") && !listed.contains("ADOPTABLE"), "{listed}");
        // Commands about an orphan name it, and the remedies.
        let adopt = format!("`gantry adopt {good}`");
        let explained = text(&cluster, ["explain", &good]);
        assert!(
            explained.contains(&adopt) && explained.contains("team:") && explained.contains("main"),
            "{explained}"
        );
        assert!(text(&cluster, ["explain", &wanted]).contains(&adopt));
        let lines =
            [["show", "artifact", &wanted], ["show", "volume", &good], ["adopt", "--keep=1h", &wanted]];
        for line in lines {
            let refused = cluster.output(line);
            assert_eq!(code(&refused), 125, "{}", describe(&refused));
            assert!(String::from_utf8_lossy(&refused.stderr).contains(&adopt), "{}", describe(&refused));
        }
        let unknown = cluster.output(["adopt", "01980000-0000-7000-8000-00000000002a"]);
        assert!(
            String::from_utf8_lossy(&unknown.stderr).contains("list volumes --orphans`"),
            "{}",
            describe(&unknown)
        );
        let nowhere = cluster.output(["purge", "--worker", "nowhere", "--all"]);
        assert!(String::from_utf8_lossy(&nowhere.stderr).contains("cannot purge"), "{}", describe(&nowhere));
        let status = text(&cluster, ["status"]);
        assert!(
            status.contains("orphans since a backup was restored: ") && status.contains("2 containers"),
            "{status}"
        );
        assert!(text(&cluster, ["list", "volumes", "--orphans"]).contains(&good));
        let refused = cluster.output(["download", &wanted, "out"]);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert_eq!(json(&cluster, ["explain", &good])["state"], "orphaned");

        // Another workload is run, collected and swept meanwhile, so that rounds of collection and
        // reports take place.
        for _ in 0..3 {
            cluster.succeed(["run", "--keep", "0s", "-o", "out", "--", "sh", "-c", "echo > out/x"]);
            cluster.succeed(["gc"]);
        }
        wait_for("a sweep", || {
            let volumes = cluster.list("volumes");
            volumes.iter().all(|volume| volume["state"] == "created").then_some(())
        });
        assert!([&good, &bad].iter().all(|volume| path(volume).exists()), "nothing was swept");

        let printed = text(&cluster, ["adopt", &good[..35], "--keep", "2h"]);
        assert_eq!(
            printed,
            format!("volume {good} is a replica of artifact {wanted}: 7 B, kept for at least 2 h\n")
        );
        cluster.succeed(["adopt", &good]);
        cluster.succeed(["download", &wanted, "out"]);
        assert_eq!(fs::read_to_string(cluster.path("out/made")).expect("a file"), "wanted\n");
        cluster.succeed(["download", &before, "earlier"]);

        assert_eq!(text(&cluster, ["purge", &bad[..35]]), "1 volume and 0 containers marked as garbage\n");
        wait_for("the end of what was purged", || (!path(&bad).exists()).then_some(()));
        let explained = wait_for("its grave", || {
            let explained = json(&cluster, ["explain", &bad]);
            (explained["state"] == "gone").then_some(explained)
        });
        assert!(explained["reason"].as_str().is_some_and(|why| why.contains("purged")), "{explained}");
        let refused = cluster.output(["adopt", &bad]);
        assert!(String::from_utf8_lossy(&refused.stderr).contains("NOT_ORPHANED"), "{}", describe(&refused));
        cluster.succeed(["purge", "--all"]);
        for kind in ["volumes", "containers"] {
            assert_eq!(aside(&cluster, kind), Vec::<Value>::new(), "of {kind}");
        }
        cluster.succeed(["down"]);
        if let Some(mut up) = up {
            assert!(up.wait().expect("it ends").success());
        }
    }
}
