//! Two gateways with the same Concourse worker, each with a state directory of its own, as on two machines: one attends the worker, and the
//! other takes over when that one dies or freezes.

use std::io::{BufReader, Read};
use std::process::{Child, ChildStdout};

use integration_tests::concourse::{Pair, make_image};
use integration_tests::{code, describe, may_run_containers, send, started, wait_for};
use serde_json::Value;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

use crate::processes::{Process, Suite};
use crate::says;

const WORKER: &str = "shared";
/// Says something before, during and after a take-over.
const SCRIPT: &str =
    "echo ready; until [ -e /tmp/go ]; do sleep 0.05; done; echo over; echo made > out/file; exit 7";

/// Two gateways, the first of which attends, and a process on their worker that waits for a file.
struct Scene {
    // Before the directories that they are in.
    first: Process,
    second: Process,
    suite: Suite,
    pair: Pair,
    image: String,
    run: Child,
    stdout: BufReader<ChildStdout>,
}

/// A gateway of the worker, with a state directory of its own.
fn gateway(suite: &Suite, pair: &Pair, name: &str) -> Process {
    let directory = suite.cluster.path(&format!("{name}-state"));
    let own = directory.to_str().expect("UTF-8");
    let (garden, volumes) = (pair.garden_address(), pair.volumes_address());
    let services = ["--artifact-store", &suite.endpoint, "--streamer", &suite.endpoint];
    let worker = ["--name", WORKER, "--garden", &garden, "--baggageclaim", &volumes];
    let where_ = ["--state-dir", own, "--runtime-dir", own];
    suite.process(name, &[&services[..], &worker, &where_].concat())
}

impl Scene {
    fn start(kind: (Manner, Driver)) -> Self {
        let suite = Suite::start();
        let pair = Pair::start(kind.0, kind.1);
        let first = gateway(&suite, &pair, "first");
        suite.attended(WORKER, &first);
        let second = gateway(&suite, &pair, "second");
        says(&second, "this one stands by");
        let path = suite.cluster.path("image");
        make_image(&path);
        let image = suite.succeed(&["upload", path.to_str().expect("UTF-8")]);
        let image = format!("artifact:{}", String::from_utf8(image).expect("an id").trim());
        let out = format!("out={}", suite.cluster.path("result").display());
        let run = ["run", "--image", &image, "-o", &out, "--", "sh", "-c", SCRIPT];
        let (run, stdout) = started(suite.gantry(&run));
        Self { first, second, suite, pair, image, run, stdout }
    }

    /// The second attends, in another session of the same life of the worker, and what was there goes on.
    fn goes_on(&mut self, before: &Value) -> Value {
        let now = self.suite.attended(WORKER, &self.second);
        assert_eq!(now["incarnation"], before["incarnation"], "what it holds is the same");
        let session = |worker: &Value| worker["session"].as_u64().expect("a number");
        assert!(session(&now) > session(before), "{before} {now}");
        // It has to be there to hear it.
        wait_for("an attachment by the next gateway", || (self.attachments() > 0).then_some(()));
        now
    }

    /// How often a gateway has attached to a process that ran already.
    fn attachments(&self) -> usize {
        let attaches = |line: &&String| {
            line.starts_with("GET ") && line.contains("/processes/") && !line.contains("/attaches/")
        };
        self.pair.garden.requests().iter().filter(attaches).count()
    }

    /// The process ends, and all that is told of it is true.
    fn ends_well(&mut self) {
        self.pair.touch("go");
        let mut said = String::new();
        self.stdout.read_to_string(&mut said).expect("text");
        let status = self.run.wait().expect("gantry ends");
        let mut log = String::new();
        self.run.stderr.take().expect("stderr").read_to_string(&mut log).expect("text");
        assert_eq!(status.code(), Some(7), "{said:?} {log}");
        assert_eq!(said, "over\n", "{log}");
        assert!(log.contains("some of stdout may be missing here"), "{log}");
        assert!(!log.contains("bytes of"), "nobody knows how much is missing: {log}");
        let result = self.suite.cluster.path("result/file");
        assert_eq!(std::fs::read_to_string(result).expect("the output"), "made\n");
        assert_eq!(self.pair.runs(), 1, "it ran twice");
    }

    /// Runs something else on the worker.
    fn runs_another(&self) {
        let output = self.suite.gantry(&["run", "--image", &self.image, "--", "echo", "again"]).output();
        let output = output.expect("gantry runs");
        assert_eq!((code(&output), &*output.stdout), (0, &b"again\n"[..]), "{}", describe(&output));
    }
}

#[test]
fn a_gateway_that_is_killed_is_succeeded_by_the_one_that_stands_by() {
    if !may_run_containers() {
        return;
    }
    for kind in [(Manner::Containerd, Driver::Overlay), (Manner::Guardian, Driver::Naive)] {
        let mut scene = Scene::start(kind);
        let before = scene.suite.attended(WORKER, &scene.first);
        send(&scene.first.child, libc::SIGKILL);
        scene.goes_on(&before);
        scene.ends_well();
        // Another with the state directory of the first stands by itself, and takes over what it knew before.
        let third = gateway(&scene.suite, &scene.pair, "third");
        says(&third, "this one stands by");
        scene.runs_another();
    }
}

#[test]
fn a_gateway_that_freezes_does_nothing_when_it_wakes_up() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, &scene.first);
    send(&scene.first.child, libc::SIGSTOP);
    let now = scene.goes_on(&before);

    let held = || (scene.pair.garden.handles(), scene.pair.volumes.handles());
    let there = held();
    send(&scene.first.child, libc::SIGCONT);
    says(&scene.first, "another gateway has taken over this worker");
    assert_eq!(held(), there, "{}", scene.first.said());
    scene.ends_well();
    scene.runs_another();
    assert_eq!(scene.suite.attended(WORKER, &scene.second)["session"], now["session"], "nobody disturbed it");
    assert_eq!(scene.pair.runs(), 2, "each once");
}

#[test]
fn a_gateway_that_attends_again_does_not_count_on_from_what_it_knew() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, &scene.first);
    send(&scene.first.child, libc::SIGSTOP);
    let between = scene.goes_on(&before);
    send(&scene.first.child, libc::SIGCONT);
    says(&scene.first, "another gateway has taken over this worker");
    let attached = scene.attachments();
    send(&scene.second.child, libc::SIGKILL);

    let again = scene.suite.attended(WORKER, &scene.first);
    let session = |worker: &Value| worker["session"].as_u64().expect("a number");
    assert!(session(&again) > session(&between), "{between} {again}");
    wait_for("another attachment by the first", || (scene.attachments() > attached).then_some(()));
    scene.ends_well();
    scene.runs_another();
}

#[test]
fn a_worker_that_comes_back_empty_begins_another_life() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, &scene.first);
    scene.pair.replace();
    send(&scene.first.child, libc::SIGKILL);
    let now = scene.suite.attended(WORKER, &scene.second);
    let life = |worker: &Value| worker["incarnation"].as_u64().expect("a number");
    assert!(life(&now) > life(&before), "{before} {now}");

    // What ran there is lost, which is said and not made up for.
    let mut said = String::new();
    scene.stdout.read_to_string(&mut said).expect("text");
    assert!(!scene.run.wait().expect("gantry ends").success(), "{said}");
    assert_eq!(said, "");
    assert_eq!(scene.pair.runs(), 0, "nothing is started twice");
    // The image went with it; the worker takes another.
    let path = scene.suite.cluster.path("image");
    let image = scene.suite.succeed(&["upload", path.to_str().expect("UTF-8")]);
    scene.image = format!("artifact:{}", String::from_utf8(image).expect("an id").trim());
    scene.runs_another();
}
