//! A door before two workers, whose gateways let nobody in who has only the token of the callers.

mod processes;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use integration_tests::may_run_containers;

use processes::{Process, Suite, directory, ended};

/// The token of the workers' gateways, which callers do not know.
fn inner(suite: &Suite) -> String {
    let file = suite.cluster.path("inner");
    fs::write(&file, "inner").expect("a file");
    file.to_str().expect("UTF-8").to_owned()
}

struct Scene {
    suite: Suite,
    workers: [Process; 2],
    door: Process,
    outer: String,
}

impl Scene {
    fn start() -> Option<Self> {
        if !may_run_containers() {
            return None;
        }
        let suite = Suite::start();
        let inner = inner(&suite);
        let workers =
            ["one", "two"].map(|name| suite.gateway(name, name, &["--tag", name, "--token-file", &inner]));
        let outer = suite.cluster.path("outer");
        fs::write(&outer, "outer").expect("a file");
        let outer = outer.to_str().expect("UTF-8").to_owned();
        let door = suite.process("door", &["--door", "--token-file", &outer]);
        suite.attended("one", &workers[0]);
        suite.attended("two", &workers[1]);
        Some(Self { suite, workers, door, outer })
    }

    /// The global options of who comes through the door.
    fn through<'a>(&'a self, door: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
        [&["--door", door, "--token-file", &self.outer], arguments].concat()
    }

    fn end(self) {
        drop((self.workers, self.door));
        self.suite.clean("one");
        self.suite.clean("two");
    }
}

#[test]
fn the_main_job_goes_through_the_door_to_either_worker() {
    let Some(scene) = Scene::start() else { return };
    let door = scene.door.endpoint();
    let source = scene.suite.cluster.path("source");
    // Several messages of content.
    directory(&source, "file", &"0123456789abcdef".repeat(512 << 10));
    let input = format!("src={}", source.display());
    let script = "echo ready; read word; echo \"$word\"; trap 'echo stopped >&2; cat src/file > out/file; exit 3' INT; \
                  cat src/file > out/copy; echo waiting; while :; do sleep 0.1; done";
    for tag in ["one", "two"] {
        let out = scene.suite.cluster.path(&format!("result-{tag}"));
        let output = format!("out={}", out.display());
        let arguments =
            ["run", "--tag", tag, "-i", &input, "-o", &output, "--timeout", "5m", "--", "sh", "-c", script];
        let mut run = scene.suite.gantry(&scene.through(&door, &arguments));
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut run = run.spawn().expect("gantry");
        let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n", "{}", scene.door.said());
        run.stdin.take().expect("stdin").write_all(b"word\n").expect("it is read");
        for expected in ["word\n", "waiting\n"] {
            line.clear();
            stdout.read_line(&mut line).expect("a line");
            assert_eq!(line, expected);
        }
        run.kill().expect("killed");
        run.wait().expect("it ends");
    }
    let script = "cat src/file > out/file; cat src/file";
    for tag in ["one", "two"] {
        let out = scene.suite.cluster.path(&format!("result-{tag}"));
        let output = format!("out={}", out.display());
        let arguments = ["run", "--tag", tag, "-i", &input, "-o", &output, "--", "sh", "-c", script];
        let mut run = scene.suite.gantry(&scene.through(&door, &arguments));
        let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
        let said = ended(run).stdout;
        let sent = fs::read(source.join("file")).expect("what was sent");
        assert!(said == sent, "{} bytes of {} came out", said.len(), sent.len());
        assert!(fs::read(out.join("file")).expect("the output") == sent, "the output is what was sent");
    }
    // Without the door, the gateways do not let this caller in.
    let direct = scene.suite.gantry(&["--token-file", &scene.outer, "run", "--tag", "one", "--", "true"]);
    let direct = { direct }.output().expect("gantry runs");
    assert!(
        !direct.status.success() && String::from_utf8_lossy(&direct.stderr).contains("token"),
        "{direct:?}"
    );
    scene.end();
}
