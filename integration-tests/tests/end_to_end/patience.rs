//! Commands that wait for services that were killed or are frozen, up to `--patience`.

use std::fs::{self, File};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use integration_tests::suite::{Shape, Suite};
use integration_tests::{code, describe, may_run_containers, wait_for};

const ONE: Shape = Shape { schedulers: 1, stores: 1, streamers: 1, gateways: 1, proxies: 0 };

/// A cluster with an artifact and a finished workload with output.
struct Scene {
    suite: Suite,
    artifact: String,
    workload: String,
}

impl Scene {
    fn start() -> Self {
        let suite = Suite::start(ONE, &[]);
        fs::create_dir_all(suite.path("source")).expect("made");
        fs::write(suite.path("source/file"), "content").expect("written");
        let mut scene = Self { suite, artifact: String::new(), workload: String::new() };
        scene.artifact = scene.answer(&["upload", "-q", "source"]);
        scene.workload = scene.answer(&["run", "-d", "-q", "--", "sh", "-c", "echo said; sleep 600"]);
        wait_for("output of the workload", || {
            let arguments = ["exec", &scene.workload, "--", "true"];
            scene.suite.gantry(&arguments).output().expect("gantry runs").status.success().then_some(())
        });
        scene
    }

    fn answer(&self, arguments: &[&str]) -> String {
        let output = self.suite.gantry(arguments).output().expect("gantry runs");
        assert!(output.status.success(), "{}", describe(&output));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    }

    /// Starts a command. Its messages are in the file `messages`.
    fn spawn(&self, arguments: &[&str]) -> Child {
        let messages = File::create(self.suite.path("messages")).expect("a file");
        let mut command = self.suite.gantry(arguments);
        command.stderr(messages).stdout(std::process::Stdio::piped()).spawn().expect("gantry runs")
    }

    fn messages(&self) -> String {
        fs::read_to_string(self.suite.path("messages")).unwrap_or_default()
    }

    /// Runs a command while `service` is away, until it waits for the service, and then to its end.
    fn waiting_for(&mut self, service: &str, arguments: &[&str]) -> Output {
        self.suite.kill(service);
        let child = self.spawn(arguments);
        wait_for(&format!("{arguments:?} that waits for {service}"), || {
            self.messages().contains("retrying for").then_some(())
        });
        self.suite.spawn(service);
        let output = child.wait_with_output().expect("it ends");
        self.suite.wait_until_ready(service);
        output
    }
}

#[test]
fn commands_wait_for_killed_services() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let (artifact, workload) = (scene.artifact.clone(), scene.workload.clone());
    let run = ["run", "--", "echo", "done"];
    // A killed gateway speaks for its worker again after the TTL of the worker, so few cases kill it.
    let cases: [(&str, &[&str], &str); 10] = [
        ("scheduler-0", &["list", "workers"], "worker-0"),
        ("artifact-store-0", &["list", "artifacts", "--wide"], &artifact),
        ("scheduler-0", &run, "done"),
        ("artifact-store-0", &["run", "-i", "a=source", "--", "cat", "a/file"], "content"),
        ("streamer-0", &["upload", "source"], "-"),
        ("scheduler-0", &["upload", "changed"], "-"),
        ("streamer-0", &["download", &artifact, "out-1"], ""),
        ("runtime-gateway-0", &["download", &artifact, "out-2"], ""),
        ("runtime-gateway-0", &["exec", &workload, "--", "echo", "inside"], "inside"),
        ("scheduler-0", &["cancel", &workload], ""),
    ];
    for (index, (service, arguments, expected)) in cases.into_iter().enumerate() {
        fs::create_dir_all(scene.suite.path("changed")).expect("made");
        fs::write(scene.suite.path("changed/file"), format!("content {index}")).expect("written");
        let output = scene.waiting_for(service, arguments);
        let messages = scene.messages();
        assert_eq!(code(&output), 0, "{arguments:?} without {service}: {messages}");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.contains(expected), "{arguments:?} without {service}: {printed}{messages}");
    }
    for out in ["out-1", "out-2"] {
        assert_eq!(fs::read_to_string(scene.suite.path(out).join("file")).expect("fetched"), "content");
    }
}

#[test]
fn upload_waits_for_frozen_streamer() {
    if !may_run_containers() {
        return;
    }
    let scene = Scene::start();
    scene.suite.signal("streamer-0", libc::SIGSTOP);
    let child = scene.spawn(&["upload", "source"]);
    wait_for("an upload that waits", || scene.messages().contains("retrying for").then_some(()));
    scene.suite.signal("streamer-0", libc::SIGCONT);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(code(&output), 0, "{}", scene.messages());
}

#[test]
fn command_out_of_patience_names_service() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start();
    let artifact = scene.artifact.clone();
    let cases: [(&str, &str, &[&str]); 5] = [
        ("scheduler-0", "the scheduler", &["list", "workers"]),
        ("artifact-store-0", "the artifact store", &["show", "artifact", &artifact]),
        ("streamer-0", "the streamer", &["upload", "source"]),
        ("streamer-0", "the streamer", &["download", &artifact, "out"]),
        ("runtime-gateway-0", "the gateway", &["download", &artifact, "out"]),
    ];
    for (service, name, arguments) in cases {
        scene.suite.kill(service);
        for (patience, least) in [("0s", Duration::ZERO), ("1s", Duration::from_secs(1))] {
            let began = Instant::now();
            let arguments = [&["--patience", patience], arguments].concat();
            let output = scene.suite.gantry(&arguments).output().expect("gantry runs");
            assert_eq!(code(&output), 125, "{}", describe(&output));
            assert!(began.elapsed() >= least, "{arguments:?} gave up early");
            let printed = String::from_utf8_lossy(&output.stderr);
            let expected = format!("{name} at {} does not answer: ", scene.suite.address(service));
            assert!(printed.contains(&expected), "{arguments:?}: {printed}");
        }
        scene.suite.spawn(service);
        scene.suite.wait_until_ready(service);
    }
}

#[test]
fn frozen_replica_costs_new_connections_seconds() {
    let two = Shape { schedulers: 2, stores: 2, streamers: 2, gateways: 1, proxies: 0 };
    let suite = Suite::start(two, &[]);
    let frozen = ["scheduler-0", "artifact-store-0", "streamer-0"];
    for name in frozen {
        suite.signal(name, libc::SIGSTOP);
    }
    // The replica to which a command connects first is random.
    for _ in 0..6 {
        for arguments in [["list", "workers"], ["list", "artifacts"], ["list", "images"]] {
            let began = Instant::now();
            let output = suite.gantry(&arguments).output().expect("gantry runs");
            assert_eq!(code(&output), 0, "{arguments:?}: {}", describe(&output));
            let took = began.elapsed();
            assert!(took < Duration::from_secs(5), "{arguments:?} took {took:?}");
        }
    }
    let status = suite.gantry(&["status"]).output().expect("gantry runs");
    let printed = String::from_utf8_lossy(&status.stdout);
    assert_eq!(printed.matches("no answer  ").count(), frozen.len(), "{printed}");
    for name in frozen {
        suite.signal(name, libc::SIGCONT);
    }
}
