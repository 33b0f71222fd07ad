//! The life of a local cluster: started by whoever comes first, kept through crashes, ended when it is idle.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;

use integration_tests::{Cluster, code, describe, may_run_containers, wait_for};

#[test]
fn two_first_runs_at_the_same_moment_share_one_cluster() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let start = || {
        let mut run = cluster.gantry(["run", "--", "echo", "hello"]);
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry")
    };
    let runs = [start(), start(), start()];
    for run in runs {
        let output = run.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert_eq!(output.stdout, b"hello\n");
    }
    assert_eq!(cluster.list("workloads").len(), 3, "all on one cluster");
    let socket = wait_for("the socket", || find_socket(&cluster.path("run")));
    let mode = |path: &Path| fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(socket.parent().expect("a directory")), 0o700);
}

fn find_socket(directory: &Path) -> Option<std::path::PathBuf> {
    use std::os::unix::fs::FileTypeExt;
    let entries = fs::read_dir(directory.join("gantry")).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()))
}

#[test]
fn a_run_goes_on_when_its_cluster_is_killed_and_started_again() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // The process goes on by itself while there is no cluster, and ends after a while.
    let script = "echo begin; sleep 3; echo end; echo kept > out/file";
    let id = cluster.succeed(["run", "-d", "-o", "out", "--", "sh", "-c", script]);
    let id = String::from_utf8(id).expect("an id").trim().to_owned();
    let mut follower = cluster.gantry(["attach", &id]).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(follower.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "begin\n");
    cluster.kill();
    follower.kill().and_then(|()| follower.wait()).expect("the follower ends");

    let attached = cluster.output(["attach", &id]);
    assert_eq!(code(&attached), 0, "{}", describe(&attached));
    assert_eq!(attached.stdout, b"begin\nend\n");
    let show = cluster.succeed(["show", "workload", &id, "--json"]);
    let show: serde_json::Value = serde_json::from_slice(show.trim_ascii()).expect("JSON");
    assert_eq!(show["outcome"], "succeeded", "{show}");
    let artifact = show["outputs"][0]["artifact_id"].as_str().expect("an output").to_owned();
    assert_eq!(cluster.succeed(["cat", &artifact, "file"]), b"kept\n");
}

#[test]
fn an_idle_cluster_ends_by_itself() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("GANTRY_IDLE_END", "1s").with("GANTRY_GC_GRACE", "0s");
    cluster.succeed(["run", "--", "true"]);
    wait_for("the end of the cluster", || find_socket(&cluster.path("run")).is_none().then_some(()));
}

#[test]
fn a_cluster_knows_the_workloads_of_every_team() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "-d", "--team", "other", "--", "sleep", "600"]);
    let status = cluster.succeed(["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(status.trim_ascii()).expect("JSON");
    let by_state = status["workloads"].as_object().expect("workloads by state");
    assert_eq!(by_state.values().filter_map(serde_json::Value::as_u64).sum::<u64>(), 1, "{status}");
    let down = cluster.output(["down", "--force"]);
    assert_eq!(code(&down), 0, "{}", describe(&down));
    let said = String::from_utf8_lossy(&down.stderr);
    assert!(said.contains("cancelled 1 workload"), "{said}");
}
