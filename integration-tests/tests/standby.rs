//! Two gateways with the same state directory: one attends the worker, and the other takes over when that one dies or freezes.

mod processes;
mod standby {
    mod concourse;
}

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use integration_tests::{describe, may_run_containers, send, wait_for};

use processes::{Process, Suite, directory};

const WORKER: &str = "shared";

/// Two gateways, the first of which attends, an artifact on their worker, and a process in it that waits for a word.
struct Scene {
    // Before the directories that they are in.
    first: Process,
    second: Process,
    suite: Suite,
    run: Child,
    stdout: BufReader<std::process::ChildStdout>,
    artifact: String,
}

impl Scene {
    fn start() -> Option<Self> {
        if !may_run_containers() {
            return None;
        }
        let suite = Suite::start();
        let first = suite.gateway("first", WORKER, &[]);
        suite.attended(WORKER, &first);
        let second = suite.gateway("second", WORKER, &[]);
        says(&second, "this one stands by");

        directory(&suite.cluster.path("data"), "file", "kept\n");
        let path = suite.cluster.path("data");
        let artifact = suite.succeed(&["upload", path.to_str().expect("UTF-8")]);
        let artifact = String::from_utf8(artifact).expect("an id").trim().to_owned();
        let out = format!("out={}", suite.cluster.path("result").display());
        let script = "echo ready; read word; echo \"$word\"; cat in/file; echo \"$word\" > out/word; exit 7";
        let input = format!("in=artifact:{artifact}");
        let mut run = suite.gantry(&["run", "-i", &input, "-o", &out, "--", "sh", "-c", script]);
        let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
        let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n", "{}", first.said());
        Some(Self { suite, first, second, run, stdout, artifact })
    }

    /// The second attends, in another session of the same life of the worker, and what was there goes on.
    fn goes_on(mut self, before: &serde_json::Value) -> (Suite, Process, Process) {
        let now = self.suite.attended(WORKER, &self.second);
        assert_eq!(now["incarnation"], before["incarnation"], "what it holds is the same");
        let session = |worker: &serde_json::Value| worker["session"].as_u64().expect("a number");
        assert!(session(&now) > session(before), "{before} {now}");

        let mut stdin = self.run.stdin.take().expect("stdin");
        stdin.write_all(b"word\n").expect("it is read");
        drop(stdin);
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut self.stdout, &mut rest).expect("text");
        assert_eq!(rest, "word\nkept\n", "nothing is lost and nothing comes twice");
        let status = self.run.wait().expect("gantry ends");
        assert_eq!(status.code(), Some(7));
        let result = self.suite.cluster.path("result/word");
        assert_eq!(std::fs::read_to_string(result).expect("the output"), "word\n");
        assert_eq!(self.suite.succeed(&["cat", &self.artifact, "file"]), b"kept\n");
        (self.suite, self.first, self.second)
    }
}

/// Waits until a gateway has said this.
fn says(gateway: &Process, text: &str) {
    wait_for(text, || gateway.said().contains(text).then_some(()));
}

#[test]
fn a_gateway_that_is_killed_is_succeeded_by_the_one_that_stands_by() {
    let Some(scene) = Scene::start() else { return };
    let before = scene.suite.attended(WORKER, &scene.first);
    send(&scene.first.child, libc::SIGKILL);
    let (suite, first, second) = scene.goes_on(&before);
    // It comes back, and stands by itself.
    drop(first);
    let third = suite.gateway("third", WORKER, &[]);
    says(&third, "this one stands by");
    assert_eq!(suite.succeed(&["run", "--", "echo", "again"]), b"again\n");
    suite.attended(WORKER, &second);
    drop((second, third));
    suite.clean(WORKER);
}

#[test]
fn a_gateway_that_freezes_is_taken_over_from_and_does_nothing_when_it_wakes_up() {
    let Some(scene) = Scene::start() else { return };
    let before = scene.suite.attended(WORKER, &scene.first);
    send(&scene.first.child, libc::SIGSTOP);
    let (suite, mut first, second) = scene.goes_on(&before);
    says(&second, "it is taken over");

    // One runs while the old one wakes up.
    let script = "echo ready; read word; echo \"$word\"";
    let mut run = suite.gantry(&["run", "--", "sh", "-c", script]);
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(run.stdout.as_mut().expect("stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n", "{}", second.said());
    let held = suite.cluster.path(&format!("{WORKER}-state"));
    let containers = || std::fs::read_dir(held.join("containers")).expect("containers").count();
    let before = containers();

    send(&first.child, libc::SIGCONT);
    let status = wait_for("the end of the old one", || first.child.try_wait().expect("asked"));
    assert!(!status.success(), "{}", first.said());
    says(&first, "starts and destroys nothing more");
    assert_eq!(containers(), before, "{}", first.said());
    let now = suite.attended(WORKER, &second);

    run.stdin.take().expect("stdin").write_all(b"still here\n").expect("it is read");
    let ended = run.wait_with_output().expect("gantry ends");
    assert!(ended.status.success(), "{}", describe(&ended));
    assert_eq!(ended.stdout, b"still here\n");
    // Started again, it stands by, though it held the lock before.
    drop(first);
    let third = suite.gateway("third", WORKER, &[]);
    says(&third, "this one stands by");
    assert_eq!(suite.succeed(&["run", "--", "echo", "again"]), b"again\n");
    assert_eq!(suite.attended(WORKER, &second)["session"], now["session"], "nobody disturbed it");
    drop((second, third));
    suite.clean(WORKER);
}
