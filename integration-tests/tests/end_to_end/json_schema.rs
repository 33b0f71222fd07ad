//! JSON Schema of the documents that `--json` prints: a validator in Python accepts them.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use integration_tests::registry::{Access, Registry};
use integration_tests::{Cluster, code, describe, may_run_containers};
use serde_json::{Value, json};

use crate::registries::app;

/// Prints a line for each error in the documents, which are lines with a name and a document.
const VALIDATOR: &str = "
import json, sys
from jsonschema import Draft202012Validator
schema = json.load(open(sys.argv[1]))
Draft202012Validator.check_schema(schema)
for name, document in map(json.loads, sys.stdin):
    schema['$ref'] = '#/$defs/' + name
    for error in Draft202012Validator(schema).iter_errors(document):
        print(name, error.json_path, error.message)
";

/// Returns the errors in documents of one kind.
fn errors(cluster: &Cluster, name: &str, documents: &[Value]) -> String {
    let mut command = Command::new("python3");
    command.args(["-c", VALIDATOR]).arg(cluster.path("schema.json"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut validator = command.spawn().expect("python3 runs");
    let lines: String = documents.iter().map(|document| format!("{}\n", json!([name, document]))).collect();
    let mut stdin = validator.stdin.take().expect("piped");
    // A validator that ends early closes its input.
    _ = stdin.write_all(lines.as_bytes());
    drop(stdin);
    let output = validator.wait_with_output().expect("it ends");
    assert_eq!(code(&output), 0, "{}", describe(&output));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn documents_satisfy_schema() {
    if !may_run_containers() {
        return;
    }
    let (registry, layout) = (Registry::start(Access::Open), app());
    registry.push(&layout, "app", "team/app:1");
    let image = registry.reference("team/app:1");
    let cluster = Cluster::new();
    fs::write(cluster.path("schema.json"), cluster.succeed(["schema"])).expect("written");
    fs::create_dir(cluster.path("src")).expect("a directory");
    fs::write(cluster.path("src/file"), "content").expect("written");
    let lines = |arguments: &[&str]| -> Vec<Value> {
        let output = cluster.output([&["--json"], arguments].concat());
        let lines = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let documents: Vec<_> = lines.map(|line| serde_json::from_slice(line).expect("JSON")).collect();
        assert!(!documents.is_empty(), "{arguments:?}: {}", describe(&output));
        documents
    };

    let run = ["run", "--name", "copy", "-i", "src=src", "-o", "src=./out", "--cache", "c=/cache"];
    let mut events = lines(&[&run[..], &["--", "sh", "-c", "echo text; date >src/date"]].concat());
    events.extend(lines(&["watch", "copy"]));
    events.extend(lines(&["run", "--no-stdin", "--image", &image]));
    events.extend(lines(&["run", "--tag", "none", "--", "true"]));
    cluster.succeed(["run", "-d", "--name", "busy", "--", "sleep", "1000"]);
    events.extend(lines(&["exec", "busy", "--", "echo", "text"]));
    let workers = lines(&["list", "workers"]);
    let name = |document: &Value, field: &str| document[field].as_str().expect("text").to_owned();
    let (volumes, containers) = (lines(&["list", "volumes"]), lines(&["list", "containers"]));
    let (volume, container) = (name(&volumes[0], "volume_handle"), name(&containers[0], "container_handle"));
    let printed = [
        ("event", events),
        ("worker", workers.clone()),
        ("worker", lines(&["show", "worker", &name(&workers[0], "name")])),
        ("worker", lines(&["inspect", &name(&workers[0], "name")])),
        ("workload", lines(&["list", "workloads"])),
        ("workload", lines(&["ps"])),
        ("workload", lines(&["show", "workload", "copy"])),
        ("workload", lines(&["inspect", "copy", "busy"])),
        ("lease", lines(&["list", "leases"])),
        ("artifact", lines(&["list", "artifacts"])),
        ("artifact", lines(&["show", "artifact", "copy:src"])),
        ("cache", lines(&["list", "caches"])),
        ("cache", lines(&["show", "cache", "c"])),
        ("image", lines(&["images"])),
        ("image", lines(&["show", "image", &image])),
        ("volume", volumes),
        ("volume", lines(&["show", "volume", &volume])),
        ("container", containers),
        ("container", lines(&["show", "container", &container])),
        ("overview", lines(&["list"])),
        ("top", lines(&["top"])),
        ("status", lines(&["status"])),
    ];
    for (name, documents) in &printed {
        assert_eq!(errors(&cluster, name, documents), "", "{documents:#?}");
    }

    // Each of these documents has one wrong type, or lacks a field.
    let first = |name: &str| printed.iter().find(|(of, _)| *of == name).expect("printed").1[0].clone();
    let mut workload = first("workload");
    workload["usage"]["running_ms"] = "1 s".into();
    let mut worker = first("worker");
    worker.as_object_mut().expect("an object").remove("name");
    let mut top = first("top");
    top["workers"][0]["labels"]["tags"] = "a".into();
    let output = json!({ "event": "output", "stream": "stdout", "offset": "0", "data": "" });
    let wrong = [("workload", workload), ("worker", worker), ("top", top), ("event", output)];
    for (name, document) in wrong {
        let errors = errors(&cluster, name, std::slice::from_ref(&document));
        assert_ne!(errors, "", "{name}: {document:#}");
    }
}
