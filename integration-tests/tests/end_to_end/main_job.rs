//! Main job: uploads a directory, runs a container, follows its output, and downloads the result.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use integration_tests::{Cluster, code, describe, may_run_containers, tree};

#[test]
fn input_is_uploaded_and_output_downloaded() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("src/sub")).expect("directories");
    for name in ["a", "b", "sub/c"] {
        fs::write(cluster.path("src").join(name), name).expect("write");
    }
    let job = [
        "run",
        "-i",
        "src=src",
        "-o",
        "report=./out",
        "--",
        "sh",
        "-c",
        "find src -type f | wc -l > report/files; pwd; echo oops >&2; exit 3",
    ];
    let first = cluster.output(job);
    assert_eq!(code(&first), 3, "{}", describe(&first));
    assert_eq!(first.stdout, b"/workspace\n", "{}", describe(&first));
    let printed = String::from_utf8_lossy(&first.stderr);
    assert!(printed.contains("oops"), "{printed}");
    assert!(printed.contains("placed"), "it says where it was placed: {printed}");
    assert_eq!(fs::read_to_string(cluster.path("out/files")).expect("the result").trim(), "3");

    // The second upload sends nothing, and other files in the target are kept.
    fs::write(cluster.path("out/mine"), "kept").expect("write");
    let second = cluster.output(job);
    assert_eq!(code(&second), 3, "{}", describe(&second));
    assert_eq!(fs::read_to_string(cluster.path("out/mine")).expect("kept"), "kept");
    assert_eq!(cluster.list("artifacts").iter().filter(|artifact| artifact["label"] == "src").count(), 1);
}

#[test]
fn difficult_tree_survives_round_trip() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    tree::make_difficult(&cluster.path("src"));
    // An output with the name of an input starts with its contents. Another output is filled by a
    // copy.
    let run = cluster.output([
        "run",
        "--preserve-special",
        "-i",
        "src=src",
        "-o",
        "src=back",
        "-o",
        "copy=copied",
        "--",
        "cp",
        "-a",
        "src/.",
        "copy/",
    ]);
    assert_eq!(code(&run), 0, "{}", describe(&run));
    tree::assert_same(&cluster.path("src"), &cluster.path("back"));
    tree::assert_same(&cluster.path("src"), &cluster.path("copied"));
}

#[test]
fn input_is_copy_on_write_by_default() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "before").expect("write");
    let script = "echo after > a/file; cat a/file b/file; echo no > b/file";
    let run = cluster.output(["run", "-i", "a=src", "-i", "b=src:ro", "--", "sh", "-c", script]);
    assert_ne!(code(&run), 0, "{}", describe(&run));
    assert_eq!(run.stdout, b"after\nbefore", "{}", describe(&run));
    assert!(String::from_utf8_lossy(&run.stderr).to_lowercase().contains("read-only"), "{}", describe(&run));
    // The artifact itself is unchanged.
    let id = cluster.upload("src");
    assert_eq!(cluster.succeed(["cat", &id, "file"]), b"before");
}

#[test]
fn stdin_and_stdout_are_binary_clean() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let bytes: Vec<u8> =
        (0..3_000_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut run = cluster.gantry(["run", "--", "cat"]);
    let mut run =
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    let mut stdin = run.stdin.take().expect("stdin");
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).expect("all of it is taken"));
    let output = run.wait_with_output().expect("gantry ends");
    writer.join().expect("no panic");
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == bytes, "{} bytes came back of {}", output.stdout.len(), bytes.len());
}

#[test]
fn parallel_short_runs_lose_no_output() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for round in 0..4 {
        let start = |number: usize| {
            let text = format!("{round} {number}");
            let mut run = cluster.gantry(["run", "--", "echo", &text]);
            (text, run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry"))
        };
        let runs: Vec<_> = (0..16).map(start).collect();
        for (text, run) in runs {
            let output = run.wait_with_output().expect("gantry ends");
            assert_eq!(code(&output), 0, "{}", describe(&output));
            assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{text}\n"), "{}", describe(&output));
        }
    }
}

#[test]
fn environment_of_caller_is_not_inherited() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("MINE", "mine").with("OTHER", "other");
    let output = cluster.succeed(["run", "--env", "MINE", "--env", "SET=here", "--", "env"]);
    let output = String::from_utf8(output).expect("text");
    let names: Vec<_> = output.lines().filter_map(|line| line.split_once('=')).collect();
    let value = |name: &str| names.iter().find(|(found, _)| *found == name).map(|(_, value)| *value);
    assert_eq!(value("MINE"), Some("mine"));
    assert_eq!(value("SET"), Some("here"));
    assert_eq!(value("OTHER"), None);
    assert_eq!(value("HOME"), Some("/root"));
    assert!(value("PATH").is_some_and(|path| path.contains("/usr/bin")));
    assert!(value("TRACEPARENT").is_some_and(|context| context.len() == 55), "{output}");
}

#[test]
fn program_is_built_and_run_in_container() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(
        cluster.path("src/main.c"),
        "int answer(void);\n#include <stdio.h>\nint main(void) { printf(\"%d\\n\", answer()); return 0; }\n",
    )
    .expect("write");
    fs::write(cluster.path("src/answer.c"), "int answer(void) { return 42; }\n").expect("write");
    let built = cluster.output([
        "run",
        "-i",
        "src=src:ro",
        "-o",
        "bin=./bin",
        "--",
        "cc",
        "-o",
        "bin/answer",
        "src/main.c",
        "src/answer.c",
    ]);
    assert_eq!(code(&built), 0, "{}", describe(&built));
    let ran = std::process::Command::new(cluster.path("bin/answer")).output().expect("the program runs");
    assert_eq!(ran.stdout, b"42\n");
}
