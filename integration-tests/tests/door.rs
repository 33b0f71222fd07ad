//! A door before two workers, whose gateways let nobody in who has only the token of the callers.

mod processes;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use integration_tests::{describe, may_run_containers};

use processes::{Process, Suite, directory};

/// The token of the workers' gateways, which callers do not know.
fn inner(suite: &Suite) -> String {
    let file = suite.cluster.path("inner");
    fs::write(&file, "inner").expect("a file");
    file.to_str().expect("UTF-8").to_owned()
}

struct Scene {
    // Before the directories that they are in.
    workers: Vec<Process>,
    door: Process,
    inner: String,
    outer: String,
    suite: Suite,
}

impl Scene {
    fn start() -> Option<Self> {
        if !may_run_containers() {
            return None;
        }
        let suite = Suite::start();
        let inner = inner(&suite);
        let outer = suite.cluster.path("outer");
        fs::write(&outer, "outer").expect("a file");
        let outer = outer.to_str().expect("UTF-8").to_owned();
        let door = suite.process("door", &["--door", "--token-file", &outer]);
        let mut scene = Self { workers: Vec::new(), door, inner, outer, suite };
        scene.attend("one");
        Some(scene)
    }

    /// One more worker, with a tag of its name unless it is the first.
    fn attend(&mut self, name: &str) {
        let more: &[&str] = &["--token-file", &self.inner, "--tag", name];
        let gateway = self.suite.gateway(name, name, if name == "one" { &more[..2] } else { more });
        self.suite.attended(name, &gateway);
        self.workers.push(gateway);
    }

    /// The global options of who comes through the door.
    fn through<'a>(&'a self, door: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
        [&["--door", door, "--token-file", &self.outer], arguments].concat()
    }

    fn end(self) {
        let names = ["one", "two"].into_iter().take(self.workers.len());
        drop((self.workers, self.door));
        names.for_each(|name| self.suite.clean(name));
    }
}

#[test]
fn the_main_job_goes_through_the_door_to_either_worker() {
    let Some(mut scene) = Scene::start() else { return };
    let door = scene.door.endpoint();
    let source = scene.suite.cluster.path("source");
    // Several messages of content, with a digest each.
    let sent: String = (0..1 << 20).map(|line| format!("{line:07}\n")).collect();
    directory(&source, "file", &sent);
    let input = format!("src={}", source.display());
    let out = scene.suite.cluster.path("result");
    let output = format!("out={}", out.display());
    let script = "echo ready; read word; echo \"$word\"; cat src/file > out/file; cat src/file";
    let arguments = ["run", "-i", &input, "-o", &output, "--", "sh", "-c", script];
    let mut run = scene.suite.gantry(&scene.through(&door, &arguments));
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    run.stdin.take().expect("stdin").write_all(b"word\n").expect("it is read");
    let mut said = String::new();
    stdout.read_to_string(&mut said).expect("text");
    assert!(run.wait().expect("it ends").success());
    assert!(said == format!("word\n{sent}"), "{} bytes came out", said.len());
    assert!(fs::read_to_string(out.join("file")).expect("the output") == sent, "the output is what was sent");

    // The other one, in the background; its output is read by two, one after the other.
    scene.attend("two");
    let out = scene.suite.cluster.path("other");
    let script = "echo begin; echo made > out/file; sleep 1; echo end";
    let id = scene.through(&door, &["run", "-d", "--tag", "two", "-o", "out", "--", "sh", "-c", script]);
    let id = String::from_utf8(scene.suite.succeed(&id)).expect("an id").trim().to_owned();
    for _ in 0..2 {
        assert_eq!(scene.suite.succeed(&scene.through(&door, &["logs", &id])), b"begin\nend\n");
    }
    let show = scene.suite.succeed(&["show", "workload", &id, "--json"]);
    let show: serde_json::Value = serde_json::from_slice(show.trim_ascii()).expect("JSON");
    let artifact = show["outputs"][0]["artifact_id"].as_str().expect("an output").to_owned();
    assert_eq!(scene.suite.succeed(&scene.through(&door, &["cat", &artifact, "file"])), b"made\n");
    let to = out.to_str().expect("UTF-8");
    scene.suite.succeed(&scene.through(&door, &["download", &artifact, to]));
    assert_eq!(fs::read_to_string(out.join("file")).expect("the output"), "made\n");

    // Without the door, the gateways do not let this caller in.
    let mut direct = scene.suite.gantry(&["--token-file", &scene.outer, "cat", &artifact, "file"]);
    let direct = direct.output().expect("gantry runs");
    let said = String::from_utf8_lossy(&direct.stderr);
    assert!(!direct.status.success() && said.contains("token"), "{}", describe(&direct));
    scene.end();
}

#[test]
fn a_call_that_breaks_with_the_door_goes_on_at_the_next_one() {
    let Some(mut scene) = Scene::start() else { return };
    let door = scene.door.endpoint();
    let script = "while read word; do echo \"heard $word\"; done; echo end";
    let mut run = scene.suite.gantry(&scene.through(&door, &["run", "--", "sh", "-c", script]));
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdin = run.stdin.take().expect("stdin");
    let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
    let mut say = |word: &str| {
        writeln!(stdin, "{word}").expect("it is read");
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        assert_eq!(line, format!("heard {word}\n"));
    };
    say("one");
    // Killed in the middle, twice; each time another door stands at the same address.
    let address = door.trim_start_matches("http://");
    for (name, word) in [("second", "two"), ("third", "three")] {
        scene.door.child.kill().expect("a kill");
        scene.door.child.wait().expect("it ends");
        let more = ["--door", "--token-file", &scene.outer, "--listen", address];
        scene.door = scene.suite.process(name, &more);
        say(word);
    }
    drop(stdin);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "end\n", "nothing is missing, and nothing comes twice");
    assert!(run.wait().expect("it ends").success());
    scene.end();
}

#[test]
fn a_reader_who_stalls_holds_the_process_back_and_not_the_door() {
    let Some(scene) = Scene::start() else { return };
    let door = scene.door.endpoint();
    let script = "yes 0123456789abcdef | head -c 300000000";
    let mut run = scene.suite.gantry(&scene.through(&door, &["run", "--", "sh", "-c", script]));
    let mut run = run.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdout = run.stdout.take().expect("stdout");
    let mut piece = vec![0; 1 << 20];
    stdout.read_exact(&mut piece).expect("it begins");
    // Nobody reads, until nothing moves any more.
    let resident = || resident(scene.door.child.id());
    let mut before = resident();
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = resident();
        if now <= before {
            break;
        }
        before = now;
    }
    // A door that took everything would hold 300 MB.
    assert!(resident() < 120 << 20, "the door holds {} bytes", resident());
    let mut read = piece.len();
    while let Ok(more @ 1..) = stdout.read(&mut piece) {
        read += more;
    }
    assert_eq!(read, 300_000_000);
    assert!(run.wait().expect("it ends").success());
    assert!(resident() < 120 << 20, "the door holds {} bytes", resident());
    scene.end();
}

/// Bytes of memory that a process has.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}
