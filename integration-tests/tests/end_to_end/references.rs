//! References to workloads and artifacts: names, the beginnings of ids, and `last`.

use std::fs;
use std::process::Output;

use integration_tests::{Cluster, code, describe, id, may_run_containers, wait_for};

/// Runs `gantry`, and returns standard output.
fn text<const N: usize>(cluster: &Cluster, line: [&str; N]) -> String {
    String::from_utf8(cluster.succeed(line)).expect("text")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that commands find an object by the beginning of its id.
#[track_caller]
fn assert_shown(cluster: &Cluster, kind: &str, id: &str, short: &str) {
    for line in [&["show", kind, short][..], &["inspect", short], &["explain", short]] {
        let shown = String::from_utf8(cluster.succeed(line)).expect("text");
        assert!(shown.contains(id), "{line:?}: {shown}");
    }
}

#[test]
fn workload_is_found_by_name_and_short_id() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let sleep = |name: &str| id(cluster.succeed(["run", "-d", "--name", name, "--", "sleep", "600"]));
    let first = sleep("build");
    assert_eq!(id(cluster.succeed(["ps", "-q"])), first);
    let listed = text(&cluster, ["ps"]);
    assert!(listed.starts_with("ID        NAME   STATE"), "{listed}");
    assert!(listed.contains(&format!("\n{}  build  ", &first[..8])), "{listed}");
    for reference in ["build", "last", &first[..8], &first[..4]] {
        let shown = text(&cluster, ["show", "workload", reference]);
        assert!(shown.contains(&first), "{reference}: {shown}");
    }
    wait_for("a running workload", || {
        text(&cluster, ["ps", "--json"]).contains("\"state\":\"running\"").then_some(())
    });
    assert_eq!(text(&cluster, ["exec", "build", "--", "echo", "hi"]), "hi\n");
    let container = cluster.list("containers")[0]["container_handle"].as_str().expect("a handle").to_owned();
    assert_shown(&cluster, "container", &container, &container[..13]);

    let second = sleep("build");
    let ambiguous = cluster.output(["cancel", "build"]);
    assert_eq!(code(&ambiguous), 125, "{}", describe(&ambiguous));
    let why = stderr(&ambiguous);
    assert!(why.contains("it stands for 2 workloads; give one of these ids\nID        NAME"), "{why}");
    for one in [&first, &second] {
        assert!(why.contains(&one[..8]), "{why}");
    }
    assert_eq!(text(&cluster, ["ps", "-q"]), format!("{second}\n{first}\n"), "nothing was cancelled");

    let killed = cluster.output(["kill", &first[..8], &second]);
    assert_eq!(code(&killed), 0, "{}", describe(&killed));
    let waited = cluster.output(["wait", &first, "last"]);
    assert_eq!(
        (code(&waited), waited.stdout.as_slice()),
        (143, b"143\n143\n".as_slice()),
        "{}",
        describe(&waited)
    );
    assert_eq!(text(&cluster, ["ps", "-q"]), "");
    let ended = text(&cluster, ["inspect", "build"]);
    assert!(ended.contains(&second), "the newest that has ended: {ended}");

    let unknown = cluster.output(["logs", "no-such-name"]);
    assert_eq!(code(&unknown), 125, "{}", describe(&unknown));
    assert!(
        stderr(&unknown).contains("no workload with the name \"no-such-name\""),
        "{}",
        describe(&unknown)
    );
    cluster.succeed(["down", "--force"]);
}

#[test]
fn artifact_is_found_by_short_id() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("src")).expect("a directory");
    fs::write(cluster.path("src/file"), "content").expect("written");
    let artifact = id(cluster.succeed(["upload", "-q", "src"]));
    let short = artifact[..13].to_owned();
    assert!(text(&cluster, ["list", "artifacts"]).contains(&artifact[..8]));
    assert_eq!(text(&cluster, ["cat", &short, "file"]), "content");
    assert_shown(&cluster, "artifact", &artifact, &short);
    let volume = cluster.list("volumes")[0]["volume_handle"].as_str().expect("a handle").to_owned();
    assert_shown(&cluster, "volume", &volume, &volume[..13]);
    let unknown = cluster.output(["show", "volume", "ffff"]);
    assert!(stderr(&unknown).contains("no volume has an id that begins with"), "{}", describe(&unknown));
    cluster.succeed(["download", &short, "there"]);
    assert_eq!(fs::read_to_string(cluster.path("there/file")).expect("downloaded"), "content");
    assert!(text(&cluster, ["rm", &short]).starts_with("1 artifact deleted"));
    let gone = cluster.output(["cat", "ffff", "file"]);
    assert!(
        stderr(&gone).contains("no artifact of this team has an id that begins with"),
        "{}",
        describe(&gone)
    );
    cluster.succeed(["down", "--force"]);
}

#[test]
fn output_is_found_by_its_workload() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "mkdir report/d; echo text > report/d/log";
    cluster.succeed(["run", "-q", "--name", "build", "-o", "report", "--", "sh", "-c", script]);
    assert_eq!(text(&cluster, ["cat", "build:report", "d/log"]), "text\n");
    cluster.succeed(["cp", "last:report", "whole"]);
    assert_eq!(fs::read_to_string(cluster.path("whole/d/log")).expect("copied"), "text\n");
    cluster.succeed(["cp", "build:report/d/log", "one"]);
    cluster.succeed(["cp", "build:report/d/log", "whole"]);
    for copy in ["one", "whole/log"] {
        assert_eq!(fs::read_to_string(cluster.path(copy)).expect("copied"), "text\n");
    }
    for (source, why) in [
        ("build:other", "the workload has no such output; its outputs: report"),
        ("build:report/none", "cannot copy none of build:report to \"new\""),
        ("report", "write WORKLOAD:OUTPUT"),
    ] {
        let refused = cluster.output(["cp", source, "new"]);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert!(stderr(&refused).contains(why), "{}", describe(&refused));
    }
    let left: Vec<_> = fs::read_dir(cluster.path("")).expect("listed").flatten().collect();
    let left = left.iter().filter(|entry| entry.file_name().to_string_lossy().starts_with("new"));
    assert_eq!(left.count(), 0, "no part of a file is left");
    cluster.succeed(["down", "--force"]);
}

#[test]
fn variables_are_read_from_file() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::write(cluster.path("variables"), "# comment\nA=1\n\nB=2 3\n").expect("written");
    let line = ["run", "-q", "--rm", "--env-file", "variables", "-e", "A=4", "--", "sh", "-c", "echo $A $B"];
    assert_eq!(text(&cluster, line), "4 2 3\n");
    let mounted = cluster.output(["run", "-v", "/home/me/app:/app", "--", "true"]);
    assert_eq!(code(&mounted), 125, "{}", describe(&mounted));
    assert!(stderr(&mounted).contains("-i app=/home/me/app"), "{}", describe(&mounted));
    cluster.succeed(["down", "--force"]);
}
