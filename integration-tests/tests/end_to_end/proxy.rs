//! Proxy before two workers, whose gateways reject the token of the callers.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{describe, id, may_run_containers, started, write};
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as ResponseMessage;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::{AttachRequest, AttachResponse, CloseStdin, Resume, Signal, StdinData, exited};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

const PROXY: &str = "proxy-0";

fn start() -> Option<Suite> {
    if !may_run_containers() {
        return None;
    }
    let mut suite = Suite::start_walled(Shape { proxies: 1, ..Shape::NO_WORKER }, SHORT_TERMS);
    attend(&mut suite, "one", &[]);
    Some(suite)
}

/// Adds a worker.
fn attend(suite: &mut Suite, worker: &str, settings: &[(&str, &str)]) {
    suite.attend(worker, worker, settings);
    suite.attended(worker, worker);
}

#[test]
fn main_job_works_through_proxy() {
    let Some(mut suite) = start() else { return };
    let source = suite.path("source");
    // The content needs several messages, with one digest each.
    let sent: String = (0..1 << 20).map(|line| format!("{line:07}\n")).collect();
    write(&source.join("file"), &sent);
    let input = format!("src={}", source.display());
    let out = suite.path("result");
    let output = format!("out={}", out.display());
    let script = "echo ready; read word; echo \"$word\"; cat src/file > out/file; cat src/file";
    let arguments = ["run", "-i", &input, "-o", &output, "--", "sh", "-c", script];
    let mut run = suite.gantry(&arguments);
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdout = BufReader::new(run.stdout.take().expect("stdout"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    run.stdin.take().expect("stdin").write_all(b"word\n").expect("it is read");
    let mut printed = String::new();
    stdout.read_to_string(&mut printed).expect("text");
    assert!(run.wait().expect("it ends").success());
    assert!(printed == format!("word\n{sent}"), "{} bytes came out", printed.len());
    assert!(fs::read_to_string(out.join("file")).expect("the output") == sent, "the output is what was sent");

    // A background workload on the other worker, whose output is read twice in turn.
    attend(&mut suite, "two", &[("GANTRY_WORKER_TAGS", "two")]);
    let out = suite.path("other");
    let script = "echo begin; echo made > out/file; sleep 1; echo end";
    let workload = id(suite.succeed(&["run", "-d", "--tag", "two", "-o", "out", "--", "sh", "-c", script]));
    for _ in 0..2 {
        assert_eq!(suite.succeed(&["logs", "-f", &workload]), "begin\nend\n");
    }
    let show = suite.succeed(&["show", "workload", &workload, "--json"]);
    let show: serde_json::Value = serde_json::from_str(&show).expect("JSON");
    let artifact = show["outputs"][0]["artifact_id"].as_str().expect("an output").to_owned();
    assert_eq!(suite.succeed(&["cat", &artifact, "file"]), "made\n");
    let to = out.to_str().expect("UTF-8");
    suite.succeed(&["download", &artifact, to]);
    assert_eq!(fs::read_to_string(out.join("file")).expect("the output"), "made\n");

    // Without the proxy, the gateways reject this caller.
    let server = suite.server();
    let (past_the_proxy, _) = server.rsplit_once(",proxy=").expect("the proxy comes last");
    let mut direct = suite.gantry(&["cat", &artifact, "file"]);
    let direct = direct.env("GANTRY_SERVER", past_the_proxy).output().expect("gantry runs");
    let printed = String::from_utf8_lossy(&direct.stderr);
    assert!(!direct.status.success() && printed.contains("token"), "{}", describe(&direct));
}

#[test]
fn broken_call_resumes_at_next_proxy() {
    let Some(mut suite) = start() else { return };
    let script = "while read word; do echo \"heard $word\"; done; echo end";
    let mut run = suite.gantry(&["run", "--", "sh", "-c", script]);
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
    // The proxy is killed twice in the middle. Each time another proxy listens at the same address.
    for word in ["two", "three"] {
        suite.kill(PROXY);
        suite.spawn(PROXY);
        say(word);
    }
    drop(stdin);
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "end\n", "nothing is missing, and nothing comes twice");
    assert!(run.wait().expect("it ends").success());
}

/// Call to `Containers.Attach` at the proxy.
struct Attachment {
    say: mpsc::Sender<AttachRequest>,
    hear: Streaming<AttachResponse>,
    /// Standard output so far.
    output: Vec<u8>,
    /// Number of input bytes that the process has taken.
    taken: u64,
}

impl Attachment {
    /// Attaches to the process of a workload, with its output from `offset` on.
    async fn open(suite: &Suite, workload: &serde_json::Value, offset: u64) -> Self {
        let proxy = peer(suite.address(PROXY), Outgoing::internal().with_token(Some(suite.token())));
        let text = |name: &str| workload["location"][name].as_str().expect("a string").to_owned();
        let resume = Resume {
            team: "main".to_owned(),
            process_id: text("attempt_id"),
            stdout_offset: offset,
            worker_id: text("worker_id"),
            ..Resume::default()
        };
        let (say, printed) = mpsc::channel(8);
        say.send(AttachRequest { message: Some(Say::Resume(resume)) }).await.expect("sent");
        let call =
            ContainersClient::new(proxy.expect("an address")).attach(ReceiverStream::new(printed)).await;
        Self { say, hear: call.expect("attached").into_inner(), output: Vec::new(), taken: 0 }
    }

    async fn say(&self, message: Say) {
        self.say.send(AttachRequest { message: Some(message) }).await.expect("sent");
    }

    /// Receives until all of this output has arrived. Otherwise returns how the process ended.
    async fn until(&mut self, text: &str) -> Option<exited::Status> {
        let mut ended = None;
        loop {
            if self.output == text.as_bytes() {
                return None;
            }
            let response = self.hear.message().await.expect("it goes on").expect("it is not cut");
            match response.message.expect("a message") {
                ResponseMessage::Output(output) => self.output.extend(output.data),
                ResponseMessage::StdinAck(ack) => self.taken = ack.offset,
                ResponseMessage::Exited(exited) => ended = exited.status,
                ResponseMessage::Done(_) => return ended,
                ResponseMessage::Started(_) | ResponseMessage::Truncated(_) | ResponseMessage::Idle(_) => {}
            }
        }
    }
}

#[test]
fn proxy_forwards_signals_and_end_of_input() {
    let Some(suite) = start() else { return };
    let script = "trap 'echo caught; caught=1' USR1; echo ready; until [ \"$caught\" ]; do sleep 0.05; done; cat; echo end; exec sleep 1000";
    let mut command = suite.gantry(&["run", "--", "sh", "-c", script]);
    // The input stays open. The other caller ends the process.
    command.stdin(Stdio::piped());
    let (mut run, mut stdout) = started(command);
    let listed = suite.succeed(&["list", "workloads", "--json"]);
    let workload = serde_json::from_str(listed.lines().next().expect("one")).expect("JSON");

    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    let ended = tokio.block_on(async {
        let mut first = Attachment::open(&suite, &workload, 0).await;
        first.until("ready\n").await;
        first.say(Say::Signal(Signal { number: 10 })).await;
        first.until("ready\ncaught\n").await;
        // The caller leaves the call, and resumes it.
        drop(first);
        let mut second = Attachment::open(&suite, &workload, 6).await;
        second.say(Say::Stdin(StdinData { offset: 0, data: b"word\n".as_slice().into() })).await;
        second.until("caught\nword\n").await;
        second.say(Say::CloseStdin(CloseStdin {})).await;
        second.until("caught\nword\nend\n").await;
        assert_eq!(second.taken, 5, "the input is acknowledged");
        second.say(Say::Signal(Signal { number: 15 })).await;
        second.until("nothing more").await
    });
    assert_eq!(ended, Some(exited::Status::Signal(15)));
    // The other attached caller receives the same output.
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "caught\nword\nend\n");
    assert_eq!(run.wait().expect("it ends").code(), Some(128 + 15));
}

#[test]
fn stalled_reader_slows_process_not_proxy() {
    let Some(suite) = start() else { return };
    let script = "yes 0123456789abcdef | head -c 300000000";
    let mut run = suite.gantry(&["run", "--", "sh", "-c", script]);
    let mut run = run.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut stdout = run.stdout.take().expect("stdout");
    let mut piece = vec![0; 1 << 20];
    stdout.read_exact(&mut piece).expect("it begins");
    // The test reads nothing until the output stops.
    let resident = || resident(suite.pid(PROXY));
    let mut before = resident();
    loop {
        std::thread::sleep(Duration::from_secs(1));
        let now = resident();
        if now <= before {
            break;
        }
        before = now;
    }
    // A proxy without flow control would hold 300 MB.
    assert!(resident() < 120 << 20, "the proxy holds {} bytes", resident());
    let mut read = piece.len();
    while let Ok(more @ 1..) = stdout.read(&mut piece) {
        read += more;
    }
    assert_eq!(read, 300_000_000);
    assert!(run.wait().expect("it ends").success());
    assert!(resident() < 120 << 20, "the proxy holds {} bytes", resident());
}

/// Returns the memory of a process in bytes.
fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}
