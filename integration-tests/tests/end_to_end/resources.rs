//! A Concourse resource: its scripts check, in and out run as workloads with JSON on standard input
//! and standard output.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use integration_tests::{Cluster, code, describe, may_run_containers, write};
use serde_json::{Value, json};

/// The versions of the resource are the files in `remote`, whose names are numbers. Each script
/// finds its source in the request, as a resource must.
const COMMON: &str = r#"#!/bin/sh
set -e
request=$(cat)
printf %s "$request" | grep -q '"uri":"remote"'
ref=$(printf %s "$request" | sed -n 's/.*"version":{"ref":"\([0-9]*\)"}.*/\1/p')
answer() {
    printf '{"version":{"ref":"%s"},"metadata":[{"name":"size","value":"%s"}]}' "$1" "$(wc -c < "remote/$1")"
}
"#;

const CHECK: &str = r#"
versions=$(ls remote | sort -n | while read -r one; do
    [ "$one" -lt "${ref:-1}" ] || printf '{"ref":"%s"},' "$one"
done)
printf '[%s]' "${versions%,}"
"#;

const IN: &str = r#"
echo "fetching $ref" >&2
cp "remote/$ref" "$1/payload"
answer "$ref"
"#;

const OUT: &str = r#"
next=$(($(ls remote | sort -n | tail -n 1) + 1))
cp "$1/product/payload" "remote/$next"
answer "$next"
"#;

/// Decodes base64.
fn decoded(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut values = [0; 256];
    for (value, digit) in (0..).zip(DIGITS) {
        values[usize::from(*digit)] = value;
    }
    let mut bytes = Vec::new();
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = group.iter().fold(0_u32, |bits, digit| bits << 6 | values[usize::from(*digit)]);
        let bits = bits << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    bytes
}

/// Runs a script of the resource, and returns the last event of its workload with its decoded
/// result.
fn run(cluster: &Cluster, kind: &str, more: &[&str], request: &Value, command: &[&str]) -> (Value, Value) {
    write(&cluster.path("request"), request.to_string());
    let fixed = [
        "--json",
        "run",
        "--kind",
        kind,
        "-i",
        "opt=resource:ro",
        "--stdin-file",
        "request",
        "--keep-result",
    ];
    let output = cluster.output([&fixed[..], more, &["--"], command].concat());
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let printed = String::from_utf8(output.stdout).expect("text");
    let finished: Value = serde_json::from_str(printed.lines().last().expect("an event")).expect("JSON");
    let result = decoded(finished["result"].as_str().expect("a result"));
    (serde_json::from_slice(&result).expect("JSON"), finished)
}

#[test]
fn resource_checks_gets_and_puts_versions() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (name, script) in [("check", CHECK), ("in", IN), ("out", OUT)] {
        let path = cluster.path(&format!("resource/{name}"));
        write(&path, format!("{COMMON}{script}"));
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    for (version, contents) in [("1", &b"one"[..]), ("2", b"two"), ("10", b"\xff\0ten")] {
        write(&cluster.path(&format!("remote/{version}")), contents);
    }
    let source = json!({ "uri": "remote" });
    let with_remote = ["-i", "remote=remote"];

    let request = json!({ "source": source, "version": null });
    let (versions, finished) = run(&cluster, "check", &with_remote, &request, &["opt/check"]);
    assert_eq!(versions, json!([{ "ref": "1" }, { "ref": "2" }, { "ref": "10" }]));
    assert_eq!(finished["outcome"], "succeeded");

    let request = json!({ "source": source, "version": { "ref": "10" }, "params": {} });
    let options = ["-i", "remote=remote", "-o", "fetched=fetched"];
    let (answer, _) = run(&cluster, "get", &options, &request, &["opt/in", "fetched"]);
    let metadata = json!([{ "name": "size", "value": "5" }]);
    assert_eq!(answer, json!({ "version": { "ref": "10" }, "metadata": metadata }));
    assert_eq!(fs::read(cluster.path("fetched/payload")).expect("the bytes"), b"\xff\0ten");

    // A put reads the bytes of the get, and leaves a new version behind.
    let request = json!({ "source": source, "params": { "file": "product/payload" } });
    let options = ["-i", "product=fetched", "-i", "remote=remote", "-o", "remote=remote"];
    let (answer, _) = run(&cluster, "put", &options, &request, &["opt/out", "."]);
    assert_eq!(answer["version"], json!({ "ref": "11" }));
    let request = json!({ "source": source, "version": answer["version"] });
    let (versions, _) = run(&cluster, "check", &with_remote, &request, &["opt/check"]);
    assert_eq!(versions, json!([{ "ref": "11" }]));

    // A list has no results.
    let listed = cluster.list("workloads");
    let kinds: Vec<_> = listed.iter().rev().map(|workload| workload["spec"]["kind"].clone()).collect();
    assert_eq!(kinds, ["check", "get", "put", "check"]);
    assert!(listed.iter().all(|workload| workload["result"].is_null()));
    let last = listed[0]["workload_id"].as_str().expect("an id");
    let shown = cluster.succeed(["show", "workload", last, "--json"]);
    let shown: Value = serde_json::from_slice(&shown).expect("JSON");
    assert_eq!(decoded(shown["result"].as_str().expect("a result")), br#"[{"ref":"11"}]"#);
}

#[test]
fn result_larger_than_limit_fails_workload() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let mib = vec![0xff; 1 << 20];
    write(&cluster.path("input"), &mib);
    let run = |script: &str| {
        let options = ["--json", "run", "--stdin-file", "input", "--keep-result", "--", "sh", "-c", script];
        let output = cluster.output(options);
        let printed = String::from_utf8(output.stdout.clone()).expect("text");
        let finished: Value = serde_json::from_str(printed.lines().last().expect("an event")).expect("JSON");
        (code(&output), finished)
    };
    let (status, finished) = run("cat; exit 3");
    assert_eq!((status, &finished["outcome"]), (3, &json!("failed")));
    assert!(decoded(finished["result"].as_str().expect("a result")) == mib, "all bytes come back");
    // One byte more, after the input was read to its end and not at all.
    for script in ["cat; printf x", "head -c 1048577 /dev/zero"] {
        let (status, finished) = run(script);
        assert_eq!(status, 125, "{finished}");
        assert_eq!(finished["failure"]["reason"], "RESULT_TOO_LARGE", "{finished}");
        assert_eq!((&finished["exit"]["code"], &finished["result"]), (&json!(0), &Value::Null));
    }
}
