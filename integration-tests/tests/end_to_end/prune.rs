//! `gantry prune` without a worker.

use std::fs;

use integration_tests::terminal::Terminal;
use integration_tests::{Cluster, code, describe, may_run_containers};
use serde_json::Value;

#[test]
fn prune_deletes_unused_artifacts_after_question() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let upload = |name: &str| {
        fs::create_dir(cluster.path(name)).expect("a directory");
        fs::write(cluster.path(name).join("file"), name).expect("written");
        cluster.upload(cluster.path(name))
    };
    let (used, unused) = (upload("used"), upload("unused"));
    let exists = |artifact: &str| {
        code(&cluster.output(["show", "artifact", artifact, "--json"])) == 0 && {
            let shown = cluster.succeed(["show", "artifact", artifact, "--json"]);
            let shown: Value = serde_json::from_slice(shown.trim_ascii()).expect("JSON");
            shown["state"] == "sealed"
        }
    };
    let input = format!("in=artifact:{used}");
    cluster.succeed(["run", "-d", "-i", &input, "--", "sleep", "1000"]);

    let refused = cluster.output(["prune", "--force"]);
    assert!(describe(&refused).contains("<WORKER>"), "a worker was to be named: {}", describe(&refused));
    let refused = cluster.output(["prune"]);
    assert_eq!(code(&refused), 125, "{}", describe(&refused));
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("cannot delete 1 artifact of team main"), "{message}");
    assert!(message.contains("use --yes"), "{message}");

    let terminal = Terminal::run(&cluster.gantry(["prune"]), 24, 120);
    terminal.wait_for("Delete? [y/N] ");
    terminal.press("n\r");
    terminal.wait_for("nothing was deleted");
    terminal.ended(0);
    assert!(exists(&used) && exists(&unused));

    let prune = || {
        let pruned = cluster.succeed(["prune", "-y", "--json"]);
        serde_json::from_slice::<Value>(pruned.trim_ascii()).expect("JSON")["deleted"].clone()
    };
    assert_eq!(prune(), 1);
    assert!(exists(&used) && !exists(&unused));
    assert_eq!(prune(), 0);
}
