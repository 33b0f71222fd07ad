//! Completion of names of a cluster in a shell.

use std::path::Path;
use std::process::Command;

use integration_tests::terminal::Terminal;
use integration_tests::{Cluster, code, describe, gantry_binary, id, may_run_containers, wait_for};

#[test]
fn bash_completes_names_of_cluster() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let complete = |words: &[&str]| {
        let output = cluster.output([&["complete-words", "--"], words].concat());
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert!(output.stderr.is_empty(), "{}", describe(&output));
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(complete(&["logs", ""]), "", "no cluster runs");
    assert!(!cluster.state().join("artifact-store.db").exists(), "completion starts no cluster");
    cluster.succeed(["run", "-d", "--name", "build-all", "--", "sleep", "1000"]);
    let unnamed = id(cluster.succeed(["run", "--detach", "--", "true"]));
    // The first answer of a busy machine may take longer than completion waits.
    wait_for("a name", || (complete(&["logs", "bui"]) == "build-all\n").then_some(()));
    assert_eq!(complete(&["--team", "other", "logs", ""]), "");
    assert!(complete(&["wait", "build-all", ""]).contains(&unnamed));
    assert_eq!(complete(&["run", "--worker", ""]), "local\n");
    assert_eq!(complete(&["--context", "lo"]), "local\n");

    let gantry = cluster.gantry(["version"]);
    let mut bash = Command::new("bash");
    bash.args(["--norc", "--noprofile", "-i"]);
    bash.env_clear().envs(gantry.get_envs().filter_map(|(name, value)| Some((name, value?))));
    bash.current_dir(gantry.get_current_dir().unwrap_or(Path::new("/")));
    let binary = gantry_binary();
    let directory = binary.parent().expect("a directory").display();
    bash.env("PATH", format!("{directory}:/usr/bin:/bin")).env("PS1", "prompt> ").env("TERM", "dumb");
    let terminal = Terminal::run(&bash, 24, 200);
    terminal.wait_for("prompt> ");
    terminal.press("source <(gantry completion bash); echo sour''ced\r");
    terminal.wait_for("sourced");
    terminal.press("gantry --context=local logs bui\t");
    terminal.wait_for("gantry --context=local logs build-all");
}
