//! Two gateways for the same Concourse worker, each with its own state directory, as on two
//! machines. One attends the worker, and the other takes over when the first one dies or freezes.

use std::io::{BufReader, Read};
use std::process::{Child, ChildStdout};

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{code, describe, may_run_containers, started, wait_for};
use serde_json::Value;
use testing::baggageclaim::Driver;
use testing::garden::Manner;

const WORKER: &str = "shared";
/// Prints before, during and after a takeover.
const SCRIPT: &str =
    "echo ready; until [ -e /tmp/go ]; do sleep 0.05; done; echo over; echo made > out/file; exit 7";

/// Two gateways, the first of which attends, and a process on their worker that waits for a file.
struct Scene {
    suite: Suite,
    pair: ConcourseWorker,
    image: String,
    run: Child,
    stdout: BufReader<ChildStdout>,
}

/// Starts a gateway of the worker with its own state directory.
fn attend(suite: &mut Suite, pair: &ConcourseWorker, name: &str) {
    let directory = suite.path(&format!("state-of-{name}")).display().to_string();
    let (garden, volumes) = (pair.garden_address(), pair.volumes_address());
    let worker = [("GANTRY_GARDEN", &*garden), ("GANTRY_BAGGAGECLAIM", &*volumes)];
    let own = [("GANTRY_STATE_DIR", &*directory), ("GANTRY_RUNTIME_DIR", &*directory)];
    suite.attend(name, WORKER, &[worker, own].concat());
}

impl Scene {
    fn start(kind: (Manner, Driver)) -> Self {
        Self::with_terms(kind, SHORT_TERMS)
    }

    fn with_terms(kind: (Manner, Driver), terms: &[(&str, &str)]) -> Self {
        let mut suite = Suite::start(Shape::NO_WORKER, terms);
        let pair = ConcourseWorker::start(kind.0, kind.1);
        attend(&mut suite, &pair, "first");
        suite.attended(WORKER, "first");
        attend(&mut suite, &pair, "second");
        suite.wait_for_log("second", "this gateway stands by");
        make_image(&suite.path("image"));
        let image = format!("artifact:{}", suite.upload(&suite.path("image")));
        let out = format!("out={}", suite.path("result").display());
        let run = ["run", "--image", &image, "-o", &out, "--", "sh", "-c", SCRIPT];
        let (run, stdout) = started(suite.gantry(&run));
        Self { suite, pair, image, run, stdout }
    }

    /// Checks that the second gateway attends in a new session of the same incarnation, and that
    /// the process still runs.
    fn goes_on(&mut self, before: &Value) -> Value {
        let now = self.suite.attended(WORKER, "second");
        assert_eq!(now["incarnation"], before["incarnation"], "what it holds is the same");
        let session = |worker: &Value| worker["session"].as_u64().expect("a number");
        assert!(session(&now) > session(before), "{before} {now}");
        // The process must be there to be interrupted.
        wait_for("an attachment by the next gateway", || (self.attachments() > 0).then_some(()));
        now
    }

    /// Counts how often a gateway has attached to a process that already ran.
    fn attachments(&self) -> usize {
        let attaches = |line: &&String| {
            line.starts_with("GET ") && line.contains("/processes/") && !line.contains("/attaches/")
        };
        self.pair.garden.requests().iter().filter(attaches).count()
    }

    /// Ends the process, and checks its output and exit.
    fn ends_well(&mut self) {
        self.pair.touch("go");
        let mut printed = String::new();
        self.stdout.read_to_string(&mut printed).expect("text");
        let status = self.run.wait().expect("gantry ends");
        let mut log = String::new();
        self.run.stderr.take().expect("stderr").read_to_string(&mut log).expect("text");
        assert_eq!(status.code(), Some(7), "{printed:?} {log}");
        assert_eq!(printed, "over\n", "{log}");
        assert!(log.contains("some of stdout may be missing here"), "{log}");
        assert!(!log.contains("bytes of"), "the number of missing bytes is unknown: {log}");
        let result = self.suite.path("result/file");
        assert_eq!(std::fs::read_to_string(result).expect("the output"), "made\n");
        assert_eq!(self.pair.runs(), 1, "it ran twice");
    }

    /// Runs another workload on the worker.
    fn runs_another(&self) {
        let output = self.suite.gantry(&["run", "--image", &self.image, "--", "echo", "again"]).output();
        let output = output.expect("gantry runs");
        assert_eq!((code(&output), &*output.stdout), (0, &b"again\n"[..]), "{}", describe(&output));
    }
}

#[test]
fn standby_replaces_killed_gateway() {
    if !may_run_containers() {
        return;
    }
    for kind in [(Manner::Containerd, Driver::Overlay), (Manner::Guardian, Driver::Naive)] {
        let mut scene = Scene::start(kind);
        let before = scene.suite.attended(WORKER, "first");
        scene.suite.kill("first");
        scene.goes_on(&before);
        scene.ends_well();
        // A third gateway with the state directory of the first one is the standby, and takes over
        // the recorded state.
        attend(&mut scene.suite, &scene.pair, "third");
        scene.suite.wait_for_log("third", "this gateway stands by");
        scene.runs_another();
    }
}

#[test]
fn standby_replaces_ended_gateway_at_once() {
    if !may_run_containers() {
        return;
    }
    let terms = [("GANTRY_WORKER_TTL", "1h"), ("GANTRY_STOP_AFTER", "2h"), ("GANTRY_LOST_AFTER", "3h")];
    let mut scene = Scene::with_terms((Manner::Containerd, Driver::Overlay), &terms);
    let before = scene.suite.attended(WORKER, "first");
    assert!(scene.suite.terminate("first").success());
    scene.goes_on(&before);
    scene.ends_well();
}

#[test]
fn thawed_gateway_does_nothing() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, "first");
    scene.suite.signal("first", libc::SIGSTOP);
    let now = scene.goes_on(&before);

    let held = || (scene.pair.garden.handles(), scene.pair.volumes.handles());
    let there = held();
    scene.suite.signal("first", libc::SIGCONT);
    scene.suite.wait_for_log("first", "another gateway has taken over this worker");
    assert_eq!(held(), there, "{}", scene.suite.log("first"));
    scene.ends_well();
    scene.runs_another();
    assert_eq!(scene.suite.attended(WORKER, "second")["session"], now["session"], "the session is unchanged");
    assert_eq!(scene.pair.runs(), 2, "each once");
}

#[test]
fn returning_gateway_does_not_reuse_output_offsets() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, "first");
    scene.suite.signal("first", libc::SIGSTOP);
    let between = scene.goes_on(&before);
    scene.suite.signal("first", libc::SIGCONT);
    scene.suite.wait_for_log("first", "another gateway has taken over this worker");
    let attached = scene.attachments();
    scene.suite.kill("second");

    let again = scene.suite.attended(WORKER, "first");
    let session = |worker: &Value| worker["session"].as_u64().expect("a number");
    assert!(session(&again) > session(&between), "{between} {again}");
    wait_for("another attachment by the first", || (scene.attachments() > attached).then_some(()));
    scene.ends_well();
    scene.runs_another();
}

#[test]
fn empty_worker_has_new_incarnation() {
    if !may_run_containers() {
        return;
    }
    let mut scene = Scene::start((Manner::Containerd, Driver::Overlay));
    let before = scene.suite.attended(WORKER, "first");
    scene.pair.replace();
    scene.suite.kill("first");
    let now = scene.suite.attended(WORKER, "second");
    let life = |worker: &Value| worker["incarnation"].as_u64().expect("a number");
    assert!(life(&now) > life(&before), "{before} {now}");

    // The process there is lost. The workload reports that and is not retried.
    let mut printed = String::new();
    scene.stdout.read_to_string(&mut printed).expect("text");
    assert!(!scene.run.wait().expect("gantry ends").success(), "{printed}");
    assert_eq!(printed, "");
    assert_eq!(scene.pair.runs(), 0, "nothing is started twice");
    // The image was lost with the worker, so another one is used.
    scene.image = format!("artifact:{}", scene.suite.upload(&scene.suite.path("image")));
    scene.runs_another();
}
