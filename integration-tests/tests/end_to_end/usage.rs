//! Resource usage of a workload, as its worker counts it, also if the gateway was replaced.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{may_run_containers, wait_for};
use serde_json::Value;

const IN: usize = 100_000;
const OUT: usize = 12_345;
/// Uses about 0.3 s of CPU and 64 MiB of memory.
const WORK: &str =
    "until read -r _ _ _ _ _ _ _ _ _ _ _ _ _ used _ </proc/self/stat && [ $used -ge 30 ]; do :; done
    dd if=/dev/zero of=/dev/null bs=64M count=1 2>/dev/null";

fn finished(suite: &Suite, id: &str) -> Value {
    wait_for(&format!("the end of {id}"), || {
        let shown = suite.gantry(&["show", "workload", id, "--json"]).output().expect("gantry runs");
        let shown: Value = serde_json::from_slice(shown.stdout.trim_ascii()).ok()?;
        (shown["state"] == "finished").then_some(shown)
    })
}

#[test]
fn workload_reports_resource_usage() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
    suite.attend("gateway-a", "a", &[]);
    suite.attended("a", "gateway-a");
    fs::create_dir(suite.path("src")).expect("a directory");
    fs::write(suite.path("src/data"), vec![7; IN]).expect("a file");
    let artifact = suite.upload(&suite.path("src"));
    suite.attend("gateway-b", "b", &[("GANTRY_WORKER_TAGS", "b")]);
    suite.attended("b", "gateway-b");

    let input = format!("src=artifact:{artifact}");
    let script = format!("{WORK}; head -c {OUT} src/data >out/data");
    let run = ["run", "-d", "--tag", "b", "-i", &input, "-o", "out", "--", "bash", "-c", &script];
    let id = suite.succeed(&run);
    let shown = finished(&suite, id.trim());
    assert_eq!(shown["outcome"], "succeeded", "{shown}");
    let usage = &shown["usage"];
    assert_eq!((&usage["bytes_in"], &usage["bytes_out"]), (&IN.into(), &OUT.into()), "{usage}");
    counted(usage);
    let printed = suite.succeed(&["show", "workload", id.trim()]);
    for words in ["waited ", "prepared ", "ran ", " of CPU", " peak memory", "97.7 KiB of inputs copied"] {
        assert!(printed.contains(words), "{words:?} is missing: {printed}");
    }

    // The gateway dies while the workload runs. The next gateway did not see the copies of inputs.
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = gate.local_addr().expect("bound").port();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; echo here >&3; read -r _ <&3; {WORK}; exit 3");
    let id = suite.succeed(&["run", "-d", "--tag", "b", "--network", "host", "--", "bash", "-c", &script]);
    let (mut stream, _): (TcpStream, _) = gate.accept().expect("it begins");
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).expect("it says so");
    suite.kill("gateway-b");
    suite.spawn("gateway-b");
    stream.write_all(b"go\n").expect("it listens");
    let shown = finished(&suite, id.trim());
    assert_eq!((&shown["outcome"], &shown["exit"]["code"]), (&"failed".into(), &3.into()), "{shown}");
    assert_eq!(shown["usage"]["bytes_in"], Value::Null, "{shown}");
    counted(&shown["usage"]);

    // A workload that never ran has no usage.
    let id = suite.succeed(&["run", "-d", "--tag", "b", "--", "no-such-program"]);
    let shown = finished(&suite, id.trim());
    assert_eq!(shown["failure"]["reason"], "PROGRAM_NOT_FOUND", "{shown}");
    for unknown in ["running_ms", "cpu_ms", "peak_memory_bytes"] {
        assert_eq!(shown["usage"][unknown], Value::Null, "{shown}");
    }
}

/// Checks the usage of a process that executed [`WORK`].
fn counted(usage: &Value) {
    let number = |name: &str| usage[name].as_u64().unwrap_or_else(|| panic!("{name} is missing: {usage}"));
    for name in ["cpu_ms", "running_ms"] {
        assert!((250..60_000).contains(&number(name)), "{usage}");
    }
    assert!((64 << 20..1 << 30).contains(&number("peak_memory_bytes")), "{usage}");
    for name in ["queued_ms", "preparing_ms"] {
        assert!(number(name) < 60_000, "{usage}");
    }
}
