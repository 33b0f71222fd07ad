//! Examples of the help texts, of README and of the book, as they are printed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use integration_tests::{Cluster, describe, gantry_binary, may_run_containers, write};

/// Splits a block into commands. Comments are dropped, and continued lines are joined.
fn commands(block: &str) -> Vec<String> {
    let mut commands = vec![String::new()];
    for line in block.lines().map(str::trim) {
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let last = commands.last_mut().expect("a command");
        match line.strip_suffix('\\') {
            Some(part) => last.push_str(part),
            None => {
                last.push_str(line);
                commands.push(String::new());
            }
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

/// Returns the indented block after the line `Examples:`.
fn examples_of_help(text: &str) -> String {
    let (_, rest) = text.split_once("Examples:\n").expect("there are examples");
    rest.lines().take_while(|line| line.is_empty() || line.starts_with(' ')).collect::<Vec<_>>().join("\n")
}

/// Returns the block of the section "Examples" of docs/cli.md.
fn examples_of_cli_document() -> String {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");
    let document = fs::read_to_string(document).expect("docs/cli.md");
    let (_, section) = document.split_once("## Examples\n").expect("a section with examples");
    let block = section.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next());
    block.expect("examples").to_owned()
}

/// Makes a directory with the tools that examples take from a home directory. Containers cannot see
/// directories below `/tmp` of the host.
fn tools() -> tempfile::TempDir {
    let tools = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let cargo = tools.path().join("cargo");
    fs::write(&cargo, "#!/bin/sh\nmkdir -p target && echo built >> target/log\n").expect("written");
    for path in [tools.path(), &cargo] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    tools
}

/// Runs the commands in order, in a directory with the files that they use.
fn run(cluster: &Cluster, tools: &Path, commands: &[String]) {
    let home = cluster.path(".");
    for (path, text) in [
        ("here/words", "b\na\nb\n"),
        ("here/long.sh", "#!/bin/sh\necho long > out/result\n"),
        ("here/Cargo.toml", ""),
        ("here/README.md", "text\n"),
        ("here/docs/a.md", "text\n"),
    ] {
        write(&home.join(path), text);
    }
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(home.join("here/long.sh"), executable).expect("a mode");
    let gantry = gantry_binary();
    let ready = format!(
        "set -eu; PATH={}:$PATH; gantry() {{ {} \"$@\"; }}; gantry run -q -- true; artifact=$(gantry upload -q docs)",
        tools.display(),
        gantry.display()
    );
    for (number, command) in commands.iter().enumerate() {
        let command = command
            .replace("sleep 60", "sleep 1")
            .replace("artifact:0197c1a2-0000-7000-8000-000000000000:ro", "artifact:$words:ro")
            .replace("data/file", "data/words");
        let script = format!(
            "{ready}; words=$(mkdir -p w && cp words w && gantry upload -q w)
             [ -f ../id ] && id=$(cat ../id)
             {command}
             [ -z \"${{id:-}}\" ] || echo \"$id\" > ../id"
        );
        let output = cluster
            .gantry(["version"])
            .get_envs()
            .fold(Command::new("bash"), |mut bash, (name, value)| {
                bash.env(name, value.unwrap_or_default());
                bash
            })
            .args(["-c", &script])
            .current_dir(home.join("here"))
            .stdin(Stdio::null())
            .output()
            .expect("bash runs");
        assert!(output.status.success(), "example {number}, {command}: {}", describe(&output));
    }
}

#[test]
fn examples_of_run_and_cli_document_work() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let tools = tools();
    let mut up = cluster.gantry(["up", "--host-path"]);
    let mut up = up.arg(tools.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("gantry");
    integration_tests::wait_for("a cluster", || cluster.pid());
    let help = String::from_utf8(cluster.succeed(["help", "run"])).expect("text");
    let mut commands = commands(&examples_of_help(&help));
    commands.extend(self::commands(&examples_of_cli_document()));
    // A person would have to type into the terminal.
    commands.retain(|command| !command.contains(" -it "));
    assert!(commands.len() >= 8, "{commands:?}");
    run(&cluster, tools.path(), &commands);
    assert_eq!(fs::read_to_string(cluster.path("here/sorted")).expect("made"), "a\nb\n");
    assert_eq!(fs::read_to_string(cluster.path("here/out/result")).expect("brought"), "long\n");
    cluster.succeed(["down", "--force"]);
    up.wait().expect("it ends");
}

/// Commands of a document: each line of a `console` block that begins with `$ `.
fn console_commands(document: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(document);
    let text = fs::read_to_string(path).expect("the document is there");
    let blocks = text.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = blocks.flat_map(str::lines);
    lines.filter_map(|line| line.strip_prefix("$ ")).map(str::to_owned).collect()
}

/// Runs the commands of a document, except those that need an image, another cluster or a person.
fn run_examples(document: &str, least: usize) {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let left_out = ["IMAGE", "resource-type:", "--watch", "GANTRY_SERVER"];
    let mut commands = console_commands(document);
    commands.retain(|command| !left_out.iter().any(|word| command.contains(word)));
    assert!(commands.len() >= least, "{commands:?}");
    run(&cluster, Path::new("/nowhere"), &commands);
}

#[test]
fn examples_of_readme_work() {
    run_examples("README.md", 3);
}

#[test]
fn examples_of_getting_started_work() {
    run_examples("docs/getting-started.md", 12);
}
