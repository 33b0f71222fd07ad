//! Leaks: runs leave nothing behind, and the check would notice.

use std::fs;
use std::time::{Duration, Instant};

use integration_tests::holder::{Holder, Services, block_on, spec, uuid};
use integration_tests::snapshot::Snapshot;
use integration_tests::{Cluster, code, describe, may_run_containers, send, started, wait_for};
use rpc::pb::runtime as pb;

/// Runs with different endings, and the exit code of each.
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
    (
        &[
            "--service",
            "db=host,ready=test -e /tmp/up,command=touch /tmp/up; sleep 100 & sleep 100",
            "--",
            "true",
        ],
        0,
    ),
    (&["--service", "db=host,command=sleep 100", "--timeout", "100ms", "--", "sleep", "100"], 124),
    (
        &["--service", "a=host,command=sleep 100", "--service", "b=host,port=1,command=exit 1", "--", "true"],
        125,
    ),
    (&["--user", "nobody", "--network", "none", "-i", "src=src", "--", "sh", "-c", "echo y > src/y"], 0),
];

fn cluster() -> Cluster {
    // A killed client may have sealed its upload a moment before.
    let cluster = Cluster::new().with("GANTRY_GC_GRACE", "0s").with("GANTRY_ABANDONED_AFTER", "10s");
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::create_dir(cluster.path("large")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    cluster
}

fn run(arguments: &[&str]) -> Vec<String> {
    ["run", "--keep", "0s", "--no-stdin"].iter().chain(arguments).map(|word| (*word).to_owned()).collect()
}

/// Returns the id of the only running workload.
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

/// Runs workloads that are ended from outside. Returns the number of runs.
fn run_those_that_are_ended(cluster: &Cluster) -> usize {
    let endless = run(&["-o", "out=./out", "--", "sh", "-c", "echo ready; while :; do sleep 0.05; done"]);
    for (signal, expected) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let (child, _stdout) = started(cluster.gantry(&endless));
        send(&child, signal);
        let output = child.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), expected, "{}", describe(&output));
    }
    // Another caller cancels the workload.
    let (child, _stdout) = started(cluster.gantry(&endless));
    cluster.succeed(["cancel", "--grace", "100ms", &running(cluster)]);
    let output = child.wait_with_output().expect("gantry ends");
    assert_eq!(code(&output), 143, "{}", describe(&output));
    // The client is killed, and the workload runs on.
    let (mut child, _stdout) = started(cluster.gantry(&endless));
    child.kill().and_then(|()| child.wait()).expect("killed");
    cluster.succeed(["cancel", "--grace", "100ms", &running(cluster)]);
    // Standard output has no reader.
    let talks = run(&["--", "sh", "-c", "echo ready; while echo more; do sleep 0.01; done"]);
    let (child, stdout) = started(cluster.gantry(&talks));
    drop(stdout);
    let output = child.wait_with_output().expect("gantry ends");
    assert_eq!(code(&output), 141, "{}", describe(&output));
    // Detached runs, one of which is cancelled.
    let detached = cluster.succeed(run(&["-d", "--", "sleep", "100"]));
    cluster.succeed(["cancel", String::from_utf8(detached).expect("an id").trim()]);
    cluster.succeed(run(&["-d", "-o", "out", "--", "sh", "-c", "echo x > out/x"]));
    all_finished(cluster);
    // The client is killed during its upload.
    let mut child = cluster.gantry(run(&["-i", "large=large", "--", "true"]));
    let mut child = child.stderr(std::process::Stdio::null()).spawn().expect("gantry");
    wait_for("an upload", || {
        let open = cluster.list("artifacts").iter().any(|artifact| artifact["state"] == "open");
        (open || child.try_wait().expect("a state").is_some()).then_some(())
    });
    child.kill().and_then(|()| child.wait()).expect("killed");
    8
}

/// Runs all endings. Returns the number of runs.
fn run_all(cluster: &Cluster, round: usize) -> usize {
    // Each round has new content to upload.
    fs::write(cluster.path("src/round"), round.to_string()).expect("write");
    let noise: Vec<u8> = (0..8 << 20_u32).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let large = [round.to_string().into_bytes(), noise].concat();
    fs::write(cluster.path("large/file"), large).expect("write");
    for (arguments, expected) in ENDINGS {
        let output = cluster.output(run(arguments));
        assert_eq!(code(&output), *expected, "{arguments:?}: {}", describe(&output));
    }
    ENDINGS.len() + run_those_that_are_ended(cluster) + drive_all(cluster)
}

/// Process of a driven container that runs until it is killed.
const ENDLESS: &[&str] = &["sh", "-c", "trap '' TERM; echo ready; sleep 1000 & while :; do sleep 0.05; done"];
const WRITE: &[&str] = &["sh", "-c", "cat src/file >out/file"];

/// Leases the worker for a holder, whose containers read the artifact `input`.
async fn placed(cluster: &Cluster, input: &str) -> Holder {
    let scheduler = format!("unix://{}", cluster.path("run/gantry/gantry.sock").display());
    let services = Services { scheduler, proxy: None, token: None };
    Holder::place(&services, &uuid(), &[input]).await.expect("placed")
}

async fn created(holder: &Holder, key: &str, input: &str) -> String {
    holder.create(key, spec(input, None)).await.expect("created").container_id
}

/// Runs a process to its end.
async fn ran(holder: &Holder, container: &str, process: &str, command: &[&str]) {
    assert_eq!(holder.run(container, process, command, b"").await.expect("it runs").1, 0);
}

/// Drives containers under leases with different ends. Returns the number of leases.
fn drive_all(cluster: &Cluster) -> usize {
    let input = &*cluster.upload(cluster.path("src"));
    let settled = block_on(async {
        // All steps, with a second process during the first one.
        let holder = placed(cluster, input).await;
        let id = created(&holder, "one", input).await;
        let until_go = ["sh", "-c", "echo ready; until [ -e go ]; do sleep 0.01; done; cp src/file out"];
        holder.attach(&id, &id, &until_go, None).await.expect("it starts");
        ran(&holder, &id, &uuid(), &["touch", "go"]).await;
        ran(&holder, &id, &id, &until_go).await;
        let published = holder.publish(&id, "out").await.expect("published");
        // A container without a process, one whose creation fails, and one that is destroyed.
        created(&holder, "two", input).await;
        let stranger = pb::ContainerSpec { user: "no-such-user".to_owned(), ..spec(input, None) };
        holder.create("three", stranger).await.expect_err("there is no such user");
        let destroyed = created(&holder, "four", input).await;
        holder.attach(&destroyed, &destroyed, ENDLESS, None).await.expect("it starts");
        holder.destroy(&destroyed).await.expect("destroyed");
        holder.release(&[&published]).await.expect("released");

        // A release during processes, of which one has joined the network of the other, and after
        // a publication that is not settled.
        let holder = placed(cluster, input).await;
        let server = created(&holder, "server", input).await;
        holder.attach(&server, &server, ENDLESS, None).await.expect("it starts");
        let joined = pb::ContainerSpec { network_container_id: server.clone(), ..spec(input, None) };
        let client = holder.create("client", joined).await.expect("created").container_id;
        holder.attach(&client, &client, ENDLESS, None).await.expect("it starts");
        holder.attach(&server, &uuid(), ENDLESS, None).await.expect("it starts");
        let ended = created(&holder, "ended", input).await;
        ran(&holder, &ended, &ended, WRITE).await;
        holder.publish(&ended, "out").await.expect("published");
        holder.let_go().await.expect("released");
        published.artifact_id
    });
    cluster.succeed(["delete", input, &settled]);
    2
}

/// Drives containers under a lease that expires, because its holder dies.
fn drive_and_die(cluster: &Cluster) {
    let input = &*cluster.upload(cluster.path("src"));
    block_on(async {
        let holder = placed(cluster, input).await;
        let running = created(&holder, "running", input).await;
        holder.attach(&running, &running, ENDLESS, None).await.expect("it starts");
        holder.attach(&running, &uuid(), ENDLESS, None).await.expect("it starts");
        created(&holder, "created", input).await;
        let ended = created(&holder, "ended", input).await;
        ran(&holder, &ended, &ended, WRITE).await;
        holder.publish(&ended, "out").await.expect("published");
    });
    cluster.succeed(["delete", input]);
}

/// Returns what is on the machine beyond `before`, once that is empty or `patience` is over.
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
fn hundred_runs_with_all_endings_leave_nothing() {
    if !may_run_containers() {
        return;
    }
    let _alone = crate::alone();
    let cluster = cluster();
    // The first run of a cluster makes some files once.
    run_all(&cluster, 1_000_000);
    let before = wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        now.rows.is_empty().then_some(now)
    });
    drive_and_die(&cluster);
    let mut runs = 0;
    for round in 0..4 {
        runs += run_all(&cluster, round);
        cluster.succeed(["gc"]);
    }
    assert!(runs >= 100, "{runs} runs");
    let left = left(&cluster, &before, Duration::from_secs(120));
    assert!(left.is_empty(), "{left:#?}");
}

/// Negative control: with destruction disabled, the same check must fail and name leftovers of
/// every kind. Control groups and processes end with the process of a workload, without
/// destruction, so none of these is left.
#[test]
fn held_destruction_leaves_volumes_and_containers() {
    if !may_run_containers() {
        return;
    }
    let _alone = crate::alone();
    let mut cluster = cluster().with("GANTRY_HOLD_DESTRUCTION", "true");
    let started = cluster.output(["list", "workers"]);
    let printed = String::from_utf8_lossy(&started.stderr).into_owned();
    assert!(
        printed.contains("never destroys garbage (--hold-destruction)"),
        "the warning is missing: {printed}"
    );
    let before = Snapshot::of(&cluster);
    run_all(&cluster, 0);
    let kept = left(&cluster, &before, Duration::from_secs(3));
    for kind in ["mount", "file", "row volumes", "row containers"] {
        assert!(kept.iter().any(|item| item.starts_with(kind)), "no {kind} in {kept:#?}");
    }
    let status = String::from_utf8(cluster.succeed(["status"])).expect("text");
    assert!(status.contains("held: garbage is not destroyed"), "{status}");

    // The leftovers are destroyed by the first cluster that destroys garbage.
    cluster.succeed(["down"]);
    cluster.set("GANTRY_HOLD_DESTRUCTION", "false");
    wait_for("an empty cluster", || {
        cluster.succeed(["gc"]);
        let now = Snapshot::of(&cluster);
        let ours = cluster.path("").display().to_string();
        (now.rows.is_empty() && !now.mounts.iter().any(|mount| mount.contains(&ours))).then_some(())
    });
}
