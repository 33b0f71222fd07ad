//! Two gateways with the same state directory: one attends the worker, and the other takes over
//! when the first one dies or freezes.

mod concourse;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Stdio};

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, may_run_containers, write};
use serde_json::Value;

const WORKER: &str = "shared";

/// Two gateways, the first of which attends, an artifact on their worker, and a process that waits
/// for input.
struct Scene {
    suite: Suite,
    run: Child,
    stdout: BufReader<ChildStdout>,
    artifact: String,
}

impl Scene {
    fn start() -> Option<Self> {
        if !may_run_containers() {
            return None;
        }
        let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
        suite.attend("first", WORKER, &[]);
        suite.attended(WORKER, "first");
        stands_by(&mut suite, "second");

        let data = suite.path("data");
        write(&data.join("file"), "kept\n");
        let artifact = suite.upload(&data);
        let out = format!("out={}", suite.path("result").display());
        let script = "echo ready; read word; echo \"$word\"; cat in/file; echo \"$word\" > out/word; exit 7";
        let input = format!("in=artifact:{artifact}");
        let mut run = suite.gantry(&["run", "-i", &input, "-o", &out, "--", "sh", "-c", script]);
        let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
        let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n", "{}", suite.log("first"));
        Some(Self { suite, run, stdout, artifact })
    }

    /// Checks that the second gateway attends in a new session of the same incarnation, and that
    /// the process still runs.
    fn goes_on(mut self, before: &Value) -> Suite {
        let now = self.suite.attended(WORKER, "second");
        assert_eq!(now["incarnation"], before["incarnation"], "what it holds is the same");
        let session = |worker: &Value| worker["session"].as_u64().expect("a number");
        assert!(session(&now) > session(before), "{before} {now}");

        let mut stdin = self.run.stdin.take().expect("stdin");
        stdin.write_all(b"word\n").expect("it is read");
        drop(stdin);
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut self.stdout, &mut rest).expect("text");
        assert_eq!(rest, "word\nkept\n", "nothing is lost and nothing comes twice");
        let status = self.run.wait().expect("gantry ends");
        assert_eq!(status.code(), Some(7));
        let result = self.suite.path("result/word");
        assert_eq!(std::fs::read_to_string(result).expect("the output"), "word\n");
        assert_eq!(self.suite.succeed(&["cat", &self.artifact, "file"]), "kept\n");
        self.suite
    }
}

/// Adds a gateway that does not attend the worker.
fn stands_by(suite: &mut Suite, name: &str) {
    suite.attend(name, WORKER, &[]);
    suite.wait_for_log(name, "this gateway stands by");
}

#[test]
fn standby_replaces_killed_gateway() {
    let Some(mut scene) = Scene::start() else { return };
    let before = scene.suite.attended(WORKER, "first");
    scene.suite.kill("first");
    let mut suite = scene.goes_on(&before);
    // The first gateway returns, and is the standby.
    stands_by(&mut suite, "third");
    assert_eq!(suite.succeed(&["run", "--", "echo", "again"]), "again\n");
    suite.attended(WORKER, "second");
}

#[test]
fn standby_replaces_frozen_gateway() {
    let Some(scene) = Scene::start() else { return };
    let before = scene.suite.attended(WORKER, "first");
    scene.suite.signal("first", libc::SIGSTOP);
    let mut suite = scene.goes_on(&before);
    suite.wait_for_log("second", "taking over this worker");

    // A workload runs while the old gateway wakes up.
    let script = "echo ready; read word; echo \"$word\"";
    let mut run = suite.gantry(&["run", "--", "sh", "-c", script]);
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(run.stdout.as_mut().expect("stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n", "{}", suite.log("second"));
    let held = suite.path(&format!("state-{WORKER}"));
    let containers = || std::fs::read_dir(held.join("containers")).expect("containers").count();
    let before = containers();

    suite.signal("first", libc::SIGCONT);
    let status = suite.wait("first");
    let printed = suite.log("first");
    assert!(!status.success() && printed.contains("starts and destroys nothing more"), "{printed}");
    assert_eq!(containers(), before, "{printed}");
    let now = suite.attended(WORKER, "second");

    run.stdin.take().expect("stdin").write_all(b"still here\n").expect("it is read");
    let ended = run.wait_with_output().expect("gantry ends");
    assert!(ended.status.success(), "{}", describe(&ended));
    assert_eq!(ended.stdout, b"still here\n");
    // The restarted gateway is the standby, although it held the lock before.
    stands_by(&mut suite, "third");
    assert_eq!(suite.succeed(&["run", "--", "echo", "again"]), "again\n");
    assert_eq!(suite.attended(WORKER, "second")["session"], now["session"], "the session is unchanged");
}
