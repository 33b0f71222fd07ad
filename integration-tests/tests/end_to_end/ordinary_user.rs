//! The main job as an ordinary user, in a user namespace.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::Path;

use integration_tests::{
    Cluster, ORDINARY_USER, code, describe, id, may_run_containers_as_ordinary_user, wait_for, write,
};

/// Starts no cluster yet. The directory `src` has one file.
fn cluster() -> Option<Cluster> {
    if !may_run_containers_as_ordinary_user() {
        return None;
    }
    let cluster = Cluster::of_ordinary_user();
    write(&cluster.path("src/file"), "input");
    for path in ["src", "src/file"] {
        chown(cluster.path(path), Some(ORDINARY_USER), Some(ORDINARY_USER)).expect("chown");
    }
    Some(cluster)
}

#[test]
fn ordinary_user_runs_command_with_inputs_and_outputs() {
    let Some(cluster) = cluster() else { return };
    let script =
        "id -u; ls /sys/class/net; cat src/file > out/copy; echo changed > src/file; mkdir out/d; exit 3";
    let run = ["run", "-i", "src=src", "-o", "out=out", "--", "sh", "-c", script];
    let output = cluster.output(run);
    assert_eq!(code(&output), 3, "{}", describe(&output));
    assert_eq!(output.stdout, b"0\neth0\nlo\n", "the user is root of the container, which has a network");
    assert_eq!(fs::read(cluster.path("out/copy")).expect("an output"), b"input");
    assert_eq!(fs::metadata(cluster.path("out/copy")).expect("an output").uid(), ORDINARY_USER);
    assert_eq!(fs::read(cluster.path("src/file")).expect("the input"), b"input");

    let killed = cluster.output(["run", "--", "sh", "-c", "kill -TERM $$"]);
    assert_eq!(code(&killed), 143, "{}", describe(&killed));
    let isolated = "ls /sys/class/net; ls /dev; cat /proc/1/comm; mount -t tmpfs x /mnt || echo refused";
    let inside = cluster.succeed(["run", "--network", "none", "--", "sh", "-c", isolated]);
    let inside = String::from_utf8(inside).expect("text");
    assert!(inside.starts_with("lo\nfd\nfull\n") && inside.contains("gantry-init\nrefused"), "{inside}");
}

/// Runs a command with options that no worker has the capability for.
fn assert_rejected(cluster: &Cluster, options: [&str; 2], capability: &str) {
    let output = cluster.output(["run"].into_iter().chain(options).chain(["--", "true"]));
    assert_eq!(code(&output), 125, "{}", describe(&output));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(printed.contains(capability) && printed.contains("NO_COMPATIBLE_WORKER"), "{printed}");
}

/// Runs `gantry doctor`. Returns the result and the remedy of each check.
fn doctor(cluster: &Cluster) -> impl Fn(&str) -> (String, String) {
    let examined = cluster.output(["doctor", "--json"]);
    assert_eq!(code(&examined), 0, "{}", describe(&examined));
    let examined: serde_json::Value = serde_json::from_slice(examined.stdout.trim_ascii()).expect("JSON");
    move |name| {
        let checks = examined["checks"].as_array().expect("checks");
        let check = checks.iter().find(|check| check["name"] == name).expect(name);
        let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
        (text("result"), text("remedy"))
    }
}

#[test]
fn missing_rights_of_ordinary_user_are_refused() {
    let Some(cluster) = cluster() else { return };
    assert_rejected(&cluster, ["--memory", "64M"], "limits-memory");
    let check = doctor(&cluster);
    assert_eq!((check("user").0, check("private networks").0), ("ok".to_owned(), "ok".to_owned()));
    assert!(check("further users").1.contains("newuidmap"));
    assert!(check("control groups").1.contains("Delegate=yes"));
}

#[test]
fn ordinary_user_without_slirp4netns_has_no_network() {
    let Some(cluster) = cluster() else { return };
    let programs = cluster.path("bin");
    fs::create_dir(&programs).expect("a directory");
    for name in ["mknod", "mount", "setpriv", "sh", "unshare"] {
        symlink(Path::new("/usr/bin").join(name), programs.join(name)).expect("a link");
    }
    let cluster = cluster.with("PATH", programs.to_str().expect("text"));
    let output = cluster.output(["run", "--", "ls", "/sys/class/net"]);
    assert_eq!(output.stdout, b"lo\n", "{}", describe(&output));
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["runs without a network", "gantry doctor"] {
        assert!(printed.contains(part), "{printed}");
    }
    assert_rejected(&cluster, ["--network", "private"], "network-private");
    let (result, remedy) = doctor(&cluster)("private networks");
    assert!(result == "limited" && remedy.contains("needs the package slirp4netns"), "{result}: {remedy}");
}

#[test]
fn command_of_ordinary_user_survives_restart_of_cluster() {
    let Some(cluster) = cluster() else { return };
    let script = "until [ -e /tmp/go ]; do sleep 0.05; done; cat src/file > out/copy; exit 5";
    let run = ["run", "-d", "-i", "src=src", "-o", "out", "--", "sh", "-c", script];
    let workload = id(cluster.succeed(run));
    wait_for("the start of the workload", || {
        let shown = cluster.succeed(["show", "workload", &workload, "--json"]);
        let shown: serde_json::Value = serde_json::from_slice(shown.trim_ascii()).expect("JSON");
        (shown["state"] == "running").then_some(())
    });
    cluster.kill();
    // The next cluster enters the namespace of the container.
    cluster.let_go(&workload);
    let attached = cluster.output(["attach", &workload]);
    assert_eq!(code(&attached), 5, "{}", describe(&attached));
    let artifact = cluster.succeed(["show", "workload", &workload, "--json"]);
    let shown: serde_json::Value = serde_json::from_slice(artifact.trim_ascii()).expect("JSON");
    let artifact = shown["outputs"][0]["artifact_id"].as_str().expect("an artifact").to_owned();
    cluster.succeed(["download", &artifact, "got"]);
    assert_eq!(fs::read(cluster.path("got/copy")).expect("an output"), b"input");
}
