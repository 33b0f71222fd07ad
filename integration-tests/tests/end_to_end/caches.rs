//! Caches between runs, on one worker or different kinds of workers.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, may_run_containers, wait_for};
use serde_json::Value;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

/// Settings with which ended workloads are collected at once.
const SOON: &[(&str, &str)] = &[("GANTRY_GC_GRACE", "0s"), ("GANTRY_COLLECT_INTERVAL", "1s")];

/// Services and workers. Each worker has its own gateway, and its name as its tag.
struct Scene {
    suite: Suite,
    pairs: Vec<ConcourseWorker>,
    image: String,
}

impl Scene {
    /// Starts the services with a host worker.
    fn start(more: &[(&str, &str)]) -> Self {
        let suite = Suite::start(Shape::NO_WORKER, &[SHORT_TERMS, SOON, more].concat());
        let mut scene = Self { suite, pairs: Vec::new(), image: "host".to_owned() };
        scene.attend("host", &[]);
        scene
    }

    fn attend(&mut self, worker: &str, settings: &[(&str, &str)]) {
        let own = [&[("GANTRY_WORKER_TAGS", worker)][..], settings].concat();
        self.suite.attend(worker, worker, &own);
        self.suite.attended(worker, worker);
    }

    fn concourse(&mut self, worker: &str, (manner, driver): (Manner, Driver)) {
        let pair = ConcourseWorker::start(manner, driver);
        let (garden, volumes) = (pair.garden_address(), pair.volumes_address());
        self.pairs.push(pair);
        self.attend(worker, &[("GANTRY_GARDEN", &garden), ("GANTRY_BAGGAGECLAIM", &volumes)]);
    }

    /// Makes a `gantry run` of a script on a worker, with the cache `name` at `/cache`.
    fn run(&self, worker: &str, name: &str, more: &[&str], script: &str) -> Command {
        let image = if worker == "host" { "host" } else { &self.image };
        let cache = format!("{name}=/cache");
        let run = ["run", "--quiet", "--tag", worker, "--image", image, "--cache", &cache];
        self.suite.gantry(&[&run[..], more, &["--", "sh", "-c", script]].concat())
    }

    /// Runs a script, and returns its exit code and output.
    fn ran(&self, worker: &str, name: &str, script: &str) -> (Option<i32>, String) {
        let output = self.run(worker, name, &[], script).output().expect("gantry runs");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.code() == Some(125) {
            panic!("{worker}: {}", describe(&output));
        }
        (output.status.code(), printed)
    }

    fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let listed = self.suite.succeed(&[arguments, &["--json"]].concat());
        listed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Returns the artifact of a cache.
    fn version(&self, name: &str) -> String {
        let caches = self.json(&["list", "caches"]);
        let cache = caches.iter().find(|cache| cache["name"] == name).expect("there is such a cache");
        cache["artifact_id"].as_str().expect("it has something").to_owned()
    }

    /// Waits until only the replicas of these artifacts are left, and none of them is the child of
    /// another volume.
    fn wait_for_nothing_but(&self, artifacts: &[String]) {
        wait_for("the end of everything else", || {
            self.suite.succeed(&["gc"]);
            let volumes = self.json(&["list", "volumes"]);
            let kept = |volume: &Value| {
                artifacts.iter().any(|artifact| volume["artifact_id"] == **artifact)
                    && volume["parent_handle"].as_str().is_none_or(str::is_empty)
            };
            let sealed = self.json(&["list", "artifacts", "--state", "sealed"]);
            let containers = self.json(&["list", "containers"]);
            (volumes.iter().all(kept) && sealed.len() == artifacts.len() && containers.is_empty())
                .then_some(())
        });
    }
}

#[test]
fn cache_moves_between_kinds_of_workers() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start(&[]);
    let image = scene.suite.path("image");
    make_image(&image);
    let uploaded = scene.suite.upload(&image);
    scene.image = format!("artifact:{uploaded}");
    scene.concourse("overlay", (Manner::Containerd, Driver::Overlay));
    scene.concourse("naive", (Manner::Guardian, Driver::Naive));

    let add = |name: &str| {
        format!(
            "cat /cache/log 2>/dev/null; echo {name} >> /cache/log; mkdir -p /cache/sub; touch /cache/sub/{name}"
        )
    };
    let mut expected = String::new();
    for (round, worker) in ["host", "overlay", "host", "naive", "overlay", "naive", "host"].iter().enumerate()
    {
        let name = format!("{worker}-{round}");
        assert_eq!(scene.ran(worker, "log", &add(&name)), (Some(0), expected.clone()), "{name}");
        expected.push_str(&format!("{name}\n"));
    }
    // A run that only reads, or that is stopped, leaves the version unchanged. A run that fails
    // leaves its changes.
    let version = scene.version("log");
    for worker in ["host", "overlay", "naive"] {
        assert_eq!(scene.ran(worker, "log", "cat /cache/log"), (Some(0), expected.clone()));
        assert_eq!(scene.version("log"), version, "{worker}");
    }
    let stopped =
        scene.run("host", "log", &["--timeout", "1s"], "echo stopped >> /cache/log; exec sleep 1000");
    assert_eq!({ stopped }.output().expect("gantry runs").status.code(), Some(124));
    assert_eq!(scene.version("log"), version);
    assert_eq!(scene.ran("host", "log", "echo interrupted >> /cache/log; kill -INT $$").0, Some(130));
    assert_eq!(scene.version("log"), version);
    for worker in ["host", "overlay", "naive"] {
        let script =
            format!("rm -r /cache/sub; echo failed-{worker} >> /cache/log; mkdir /cache/sub; exit 3");
        assert_eq!(scene.ran(worker, "log", &script).0, Some(3));
        expected.push_str(&format!("failed-{worker}\n"));
        assert_eq!(scene.ran(worker, "log", "cat /cache/log; ls /cache/sub"), (Some(0), expected.clone()));
    }
    scene.suite.succeed(&["upload", image.to_str().expect("UTF-8")]);
    let image = uploaded;
    wait_for("the end of superseded versions", || {
        scene.suite.succeed(&["gc"]);
        let volumes = scene.json(&["list", "volumes"]);
        let latest = scene.version("log");
        let of_caches: Vec<_> = volumes.iter().filter(|volume| volume["artifact_id"] != *image).collect();
        let only = |volume: &&Value| {
            volume["artifact_id"] == *latest && volume["parent_handle"].as_str().is_none_or(str::is_empty)
        };
        of_caches.iter().all(only).then_some(())
    });

    // A cache can be cleared by its name, and is then empty.
    assert!(scene.suite.succeed(&["clear-cache", "log"]).contains("1 cache"));
    let none = scene.suite.gantry(&["clear-cache", "log"]).output().expect("gantry runs");
    assert!(!none.status.success());
    assert_eq!(scene.ran("overlay", "log", "ls -A /cache"), (Some(0), String::new()));
}

/// Run that prints `ready`, and continues on request.
struct WaitingProcess {
    child: Child,
}

impl WaitingProcess {
    fn start(scene: &Scene, worker: &str, name: &str, script: &str) -> Self {
        let script = format!("echo ready; read line; {script}");
        let mut run = scene.run(worker, name, &[], &script);
        let mut child = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry runs");
        let mut printed = String::new();
        BufReader::new(child.stdout.as_mut().expect("it is piped")).read_line(&mut printed).expect("read");
        assert_eq!(printed, "ready\n");
        Self { child }
    }

    fn go_on(mut self) {
        self.child.stdin.take().expect("it is piped").write_all(b"go on\n").expect("written");
        assert!(self.child.wait().expect("it ends").success());
    }
}

#[test]
fn superseded_cache_version_survives_while_used() {
    if !may_run_containers() {
        return;
    }
    let scene = Scene::start(&[]);
    assert_eq!(scene.ran("host", "c", "echo first > /cache/first").0, Some(0));
    let first = scene.version("c");
    let slow = WaitingProcess::start(&scene, "host", "c", "cat /cache/first > /cache/slow");
    assert_eq!(scene.ran("host", "c", "rm /cache/first; echo second > /cache/second").0, Some(0));
    let second = scene.version("c");
    assert_ne!(first, second);
    scene.suite.succeed(&["gc"]);
    let shown = scene.json(&["show", "artifact", &first]);
    assert_eq!(shown[0]["state"], "sealed", "{shown:?}");
    assert_eq!(scene.ran("host", "c", "ls /cache"), (Some(0), "second\n".to_owned()));
    slow.go_on();
    let found = scene.ran("host", "c", "cd /cache; grep . *");
    assert_eq!(found, (Some(0), "first:first\nslow:first\n".to_owned()), "the last to end wins");
    scene.wait_for_nothing_but(&[scene.version("c")]);
}

#[test]
fn killed_gateway_loses_no_cache_content() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start(&[]);
    assert_eq!(scene.ran("host", "c", "seq 1000 | while read n; do echo $n > /cache/$n; done").0, Some(0));
    let script = "sleep 1; seq 1001 4000 | while read n; do echo $n > /cache/$n; done; rm /cache/1";
    let run = scene.run("host", "c", &["-d"], script).output().expect("gantry runs");
    assert!(run.status.success(), "{}", describe(&run));
    let id = String::from_utf8(run.stdout).expect("text").trim().to_owned();
    let state =
        |scene: &Scene| scene.json(&["show", "workload", &id])[0]["state"].as_str().map(str::to_owned);
    wait_for("its start", || (state(&scene)? == "running").then_some(()));
    for pause in [100, 900, 400, 150, 700] {
        std::thread::sleep(std::time::Duration::from_millis(pause));
        scene.suite.kill("host");
        scene.suite.spawn("host");
    }
    wait_for("its end", || (state(&scene)? == "finished").then_some(()));
    let shown = scene.json(&["show", "workload", &id]);
    assert_eq!(shown[0]["outcome"], "succeeded", "{shown:?}");
    scene.suite.attended("host", "host");
    let counted = scene.ran("host", "c", "cd /cache; ls | wc -l; cat 2 4000; ls 1");
    assert_eq!(counted, (Some(2), "3999\n2\n4000\n".to_owned()));
    scene.wait_for_nothing_but(&[scene.version("c")]);
}

#[test]
fn unused_cache_is_deleted_after_ttl() {
    if !may_run_containers() {
        return;
    }
    let scene = Scene::start(&[("GANTRY_TASK_CACHE_TTL", "3s")]);
    // A cache that is used for longer than its TTL stays.
    assert_eq!(scene.ran("host", "c", "echo kept > /cache/file; sleep 6").0, Some(0));
    wait_for("the end of the cache", || {
        scene.suite.succeed(&["gc"]);
        scene.json(&["list", "caches"]).is_empty().then_some(())
    });
    scene.wait_for_nothing_but(&[]);
    assert_eq!(scene.ran("host", "c", "ls -A /cache"), (Some(0), String::new()));
}
