//! What people expect of a command line: contexts, formats of lists, checks of the machine, and
//! scripts for shells.

use integration_tests::{Cluster, code, describe, id, may_run_containers};
use serde_json::Value;

fn text<const N: usize>(cluster: &Cluster, line: [&str; N]) -> String {
    String::from_utf8(cluster.succeed(line)).expect("text")
}

#[test]
fn context_selects_cluster() {
    let cluster = Cluster::new();
    cluster.succeed(["config", "add", "far", "--server", "http://127.0.0.1:1", "--team", "builds"]);
    assert!(!text(&cluster, ["config"]).contains("far   *"), "adding does not select");
    cluster.succeed(["config", "use", "far"]);
    let listed = text(&cluster, ["config"]);
    assert!(
        listed.starts_with("NAME   CURRENT  SERVER              TEAM\nlocal           this machine\n"),
        "{listed}"
    );
    assert!(listed.contains("far    *        http://127.0.0.1:1  builds\n"), "{listed}");
    let status = cluster.output(["status"]);
    assert_eq!(code(&status), 1, "{}", describe(&status));
    let unknown = cluster.output(["--context", "near", "ps"]);
    assert_eq!(code(&unknown), 125, "{}", describe(&unknown));
    assert!(describe(&unknown).contains("the contexts are far, local"), "{}", describe(&unknown));
    let version = text(&cluster, ["version"]);
    assert!(version.starts_with("gantry "), "a command without a cluster needs no context: {version}");
    cluster.succeed(["config", "remove", "far"]);
    assert_eq!(text(&cluster, ["config"]), "NAME   CURRENT  SERVER\nlocal  *        this machine\n");
    assert!(!cluster.state().join("cluster.log").exists(), "no cluster was started");
}

#[test]
fn lists_have_formats_and_columns() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let first = id(cluster.succeed(["run", "-d", "--name", "one", "--", "true"]));
    cluster.succeed(["wait", "one"]);
    let filled = text(&cluster, ["ps", "-a", "--format", "{{.workload_id}}\\t{{spec.name}} {{outcome}}"]);
    assert_eq!(filled, format!("{first}\tone succeeded\n"));
    let columns = text(&cluster, ["list", "workloads", "--columns", "name,id", "--wide"]);
    let header = columns.lines().next().expect("a header");
    assert_eq!(header.split_whitespace().collect::<Vec<_>>(), ["NAME", "ID"]);
    assert!(columns.contains(&format!("one   {first}")), "{columns}");
    let document: Value =
        serde_json::from_str(&text(&cluster, ["ps", "-a", "--format", "json"])).expect("JSON");
    assert_eq!(document["workload_id"], first.as_str());
    for (line, why) in [
        (["ps", "-a", "--format", "{{nmae}}"], "the fields are "),
        (["ps", "-a", "--columns", "nmae"], "the columns are id, name, state"),
        (["ps", "-a", "--format", "{{"], "the template is invalid"),
        (["ps", "-a", "--format", "yaml"], "write table, wide, json"),
    ] {
        let refused = cluster.output(line);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert!(describe(&refused).contains(why), "{why}: {}", describe(&refused));
    }
    let overview = text(&cluster, ["list"]);
    assert!(overview.contains("local  running"), "{overview}");
    assert!(overview.contains("no workload waits or runs"), "{overview}");
    cluster.succeed(["down", "--force"]);
}

#[test]
fn doctor_agrees_with_worker() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "-q", "--", "true"]);
    let examined = cluster.output(["doctor", "--json"]);
    assert_eq!(code(&examined), 0, "{}", describe(&examined));
    let examined: Value = serde_json::from_slice(examined.stdout.trim_ascii()).expect("JSON");
    let result = |name: &str| {
        let checks = examined["checks"].as_array().expect("checks");
        let check = checks.iter().find(|check| check["name"] == name).expect(name);
        check["result"].as_str().expect("a word").to_owned()
    };
    let worker = text(&cluster, ["show", "worker", "local", "--json"]);
    for (check, capability) in
        [("user namespaces", "\"user-namespace\""), ("private networks", "\"network-private\"")]
    {
        assert_eq!(result(check) == "ok", worker.contains(capability), "{check}: {examined} {worker}");
    }
    assert_eq!(result("user"), "ok");
    cluster.succeed(["down", "--force"]);
}
