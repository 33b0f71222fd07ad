//! Errors of the command line, most of them before it does anything.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use integration_tests::{Cluster, code, describe, may_run_containers};
use serde_json::Value;

fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails unless the command failed with `text`, and printed no answer.
fn refused(output: &Output, text: &str) {
    assert_eq!(code(output), 125, "{}", describe(output));
    assert!(stderr_text(output).contains(text), "{text:?} is missing: {}", describe(output));
    assert!(output.stdout.is_empty(), "{}", describe(output));
}

#[test]
fn invalid_arguments_are_rejected_before_cluster_start() {
    let cluster = Cluster::new();
    fs::write(cluster.path("file"), "").expect("write");
    fs::create_dir(cluster.path("d")).expect("directory");
    let cases: [(&[&str], &str); 13] = [
        (&["-i", "src=gone"], "cannot upload \"gone\": No such file or directory"),
        (&["-i", "src=file"], "not a directory"),
        (&["-i", "a=d", "-i", "a=d"], "two inputs have the name \"a\""),
        (&["-o", "a", "-o", "a"], "two outputs have the name \"a\""),
        (&["-o", "a=file"], "cannot download output \"a\" into \"file\": not a directory"),
        (&["-o", "a=file/x"], "is not a directory"),
        (&["-o", "a=x", "-o", "b=./x"], "have the same directory"),
        (&["-o", "a=x", "-o", "b=x/y"], "is inside \"x\""),
        (&["-d", "-o", "a=x"], "with --detach"),
        (&["--trace", "gone/trace"], "does not exist"),
        (&["--memory", "1K"], "a container needs 6.0 MiB to start"),
        (&["--cpu", "0"], "is not a number of cores"),
        (&["--cpu", "99999999"], "is more than the maximum of 10000 cores"),
    ];
    for (arguments, text) in cases {
        let line = ["run"].iter().chain(arguments).chain(&["--", "true"]);
        refused(&cluster.output(line), text);
    }
    refused(&cluster.output(["upload", "gone"]), "cannot upload \"gone\": No such file or directory");
    refused(&cluster.output(["show", "artifact", "zzz"]), "\"zzz\" is not the beginning of the id");
    refused(&cluster.output(["show", "workloads", "z/z"]), "\"z/z\" is neither a name nor the beginning");
    refused(&cluster.output(["logs", "z/z"]), "`gantry ps -a` lists workloads");
    let artifact = "0197c1a2-0000-7000-8000-000000000000";
    refused(&cluster.output(["download", artifact, "file"]), "cannot download into \"file\"");
    assert!(!cluster.state().join("cluster.log").exists(), "no cluster was started");
    let mut left: Vec<_> =
        fs::read_dir(cluster.path("")).expect("listed").flatten().map(|e| e.file_name()).collect();
    left.sort();
    assert_eq!(left, ["d", "file", "run"], "nothing was made");
}

#[test]
fn unreachable_cluster_is_named() {
    let cluster = Cluster::new();
    for address in ["there", "127.0.0.1:1", "https://127.0.0.1:1", "unix:relative", "http://"] {
        refused(&cluster.output(["--server", address, "list", "workers"]), "cannot parse service address");
    }
    for address in ["http://127.0.0.1:1", "unix:///nonexistent/gantry.sock"] {
        let output = cluster.output(["--patience", "1s", "--server", address, "list", "workers"]);
        refused(&output, &format!("the scheduler at {address} does not answer"));
        refused(&output, &format!("check that the cluster runs and that {address} is its address"));
    }
    let apart = "scheduler=http://127.0.0.1:1,artifacts=http://127.0.0.1:2,streamer=http://127.0.0.1:3,proxy=http://127.0.0.1:4";
    let output = cluster.output(["--patience", "1s", "--server", apart, "list", "artifacts"]);
    let silent = "the artifact store at http://127.0.0.1:2 does not answer: 127.0.0.1:2: Connection refused (UNAVAILABLE)";
    refused(&output, silent);
    refused(
        &cluster.output(["--token-file", "gone", "list", "workers"]),
        "cannot read the token file \"gone\"",
    );
    let server = ["--patience", "1s", "--server", "http://127.0.0.1:1"];
    let json = cluster.output(["--json"].iter().chain(&server).chain(&["list", "workers"]));
    let document: Value = serde_json::from_slice(&json.stdout).expect("one JSON document");
    assert_eq!((&document["failure"]["reason"], &document["status"]), (&"UNAVAILABLE".into(), &125.into()));
}

#[test]
fn local_commands_reject_server_option() {
    let server = "http://127.0.0.1:1";
    let cluster = Cluster::new();
    for command in ["up", "down"] {
        let text = format!("`gantry {command}` acts only on the cluster on this machine; leave out --server");
        refused(&cluster.output(["--server", server, command]), &text);
        refused(&cluster.output([command, "--server", server]), &text);
    }
    let cluster = cluster.with("GANTRY_SERVER", server);
    let output = cluster.output(["down"]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert!(stderr_text(&output).contains("not on that of GANTRY_SERVER"), "{}", describe(&output));
}

#[test]
fn cluster_of_other_user_is_rejected() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let closed = cluster.path("closed");
    fs::create_dir(&closed).expect("directory");
    let socket = closed.join("gantry.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
    std::os::unix::fs::chown(&closed, Some(65_534), Some(65_534)).expect("chown");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("chmod");
    let server = format!("unix://{}", socket.display());
    let mut command = cluster.gantry(["--server", &server, "list", "workers"]);
    let output = unprivileged(&mut command).output().expect("gantry runs");
    refused(&output, "this user may not access the cluster: Permission denied (PERMISSION_DENIED)");
    refused(&output, "belongs to user 65534");
}

#[test]
fn second_cluster_is_rejected() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    refused(&cluster.output(["up", "--listen", "foo"]), "cannot listen on \"foo\": ");
    cluster.succeed(["run", "--", "true"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let output = cluster.output(["up", "--listen", &address]);
    refused(&output, "a cluster runs on this machine already (process ");
}

/// Removes the capabilities with which root ignores file modes.
fn unprivileged(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec this calls nothing but prctl, which takes no memory.
    unsafe {
        command.pre_exec(|| {
            // CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
            for capability in [1, 2] {
                if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        })
    }
}

#[test]
fn missing_or_wrong_token_is_named() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let mut up = cluster.gantry(["--json", "up", "--listen", "127.0.0.1:0"]);
    let mut up = up.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(up.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
    let up_says: Value = serde_json::from_str(&line).expect("one JSON document");
    let server = up_says["endpoints"][1].as_str().expect("the address").to_owned();
    let token_file = up_says["token_file"].as_str().expect("the file").to_owned();
    let list = |more: &[&str]| {
        let line = ["--server", &server, "list", "workers"];
        cluster.output(line.iter().chain(more))
    };
    fs::write(cluster.path("wrong"), "wrong").expect("write");
    fs::write(cluster.path("empty"), "\n").expect("write");
    refused(&list(&[]), "give the token file of the cluster with --token-file");
    refused(&list(&["--token-file", "wrong"]), "wrong does not hold the token of this cluster");
    refused(&list(&["--token-file", "empty"]), "the token file \"empty\" is empty");
    let right = list(&["--token-file", &token_file]);
    assert_eq!(code(&right), 0, "{}", describe(&right));
    let down = cluster.succeed(["--json", "down"]);
    let down: Value = serde_json::from_slice(&down).expect("one JSON document");
    assert_eq!((&down["was_running"], &down["cancelled"]), (&true.into(), &0.into()));
    assert_eq!(up.wait().expect("it ends").code(), Some(0));
}

#[test]
fn misspelt_setting_is_reported() {
    let cluster = Cluster::new();
    let output = cluster.gantry(["down"]).env("GANTRY_SERVRE", "http://there").output().expect("gantry");
    assert!(
        stderr_text(&output)
            .contains("GANTRY_SERVRE is not a setting of Gantry; did you mean GANTRY_SERVER?"),
        "{}",
        describe(&output)
    );
}

#[test]
fn reachable_address_is_reported() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    refused(&cluster.output(["up", "--listen", "0.0.0.0:0"]), "nothing is encrypted");
    for (address, insecure) in [("0.0.0.0:0", true), ("127.0.0.1:0", false)] {
        let mut up = cluster.gantry(["up", "--insecure", "--listen", address]);
        let mut up = up.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
        let mut printed = String::new();
        BufReader::new(up.stdout.take().expect("stdout")).read_line(&mut printed).expect("a line");
        cluster.succeed(["down"]);
        let output = up.wait_with_output().expect("it ends");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(printed.contains("INSECURE: nothing is encrypted on 0.0.0.0:"), insecure, "{printed}");
    }
}

#[test]
fn path_missing_in_container_is_explained() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = cluster.path("hello.sh");
    fs::write(&script, "#!/bin/sh\necho hello from $PWD\n").expect("write");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("chmod");
    // The directory of the test is below /tmp, unless TMPDIR is set.
    let below_tmp = script.starts_with("/tmp");
    let script = script.display().to_string();
    let by_path = cluster.output(["run", "--", &script]);
    let by_shell = cluster.output(["run", "--", "sh", "-c", &format!("exec {script}")]);
    for output in [&by_path, &by_shell] {
        assert_eq!(code(output), 127, "{}", describe(output));
        assert_eq!(
            stderr_text(output).contains("/tmp of the container is separate"),
            below_tmp,
            "{}",
            describe(output)
        );
    }
    let relative = cluster.output(["run", "--", "./hello.sh"]);
    assert_eq!(code(&relative), 127, "{}", describe(&relative));
    assert!(stderr_text(&relative).contains("upload it with -i"), "{}", describe(&relative));
    let nowhere = cluster.output(["run", "--", "/tmp/no-such-program"]);
    assert_eq!(code(&nowhere), 127, "{}", describe(&nowhere));
    assert!(
        !stderr_text(&nowhere).contains("is separate"),
        "it does not exist here either: {}",
        describe(&nowhere)
    );
    // The hint of the error works. The state of the cluster is in that directory, and is not
    // uploaded.
    let brought = ["run", "-i", "here=.", "--", "sh", "-c", "here/hello.sh; ls -A here here/state"];
    let brought = cluster.output(brought);
    assert_eq!(code(&brought), 0, "{}", describe(&brought));
    let listed = String::from_utf8_lossy(&brought.stdout).into_owned();
    assert_eq!(listed, "hello from /workspace\nhere:\nhello.sh\nrun\nstate\n\nhere/state:\n");
    assert!(stderr_text(&brought).contains("state/gantry is left out"), "{}", describe(&brought));
}

#[test]
fn relative_working_directory_is_in_workspace() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    let script = "pwd; [ -w . ] && echo ours; ls";
    let bare = cluster.succeed(["run", "--dir", "a/b", "--user", "nobody", "--", "sh", "-c", script]);
    assert_eq!(String::from_utf8_lossy(&bare), "/workspace/a/b\nours\n");
    let with = cluster.succeed(["run", "--dir", "a", "-i", "src=src", "-o", "out", "--", "sh", "-c", script]);
    assert_eq!(String::from_utf8_lossy(&with), "/workspace/a\nours\nout\nsrc\n");
    refused(&cluster.output(["run", "--dir", "../x", "--", "true"]), "must not contain ..");
}

#[test]
fn cat_rejects_paths_that_are_not_files() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("d/sub")).expect("directory");
    fs::write(cluster.path("d/sub/file"), "content\n").expect("write");
    std::os::unix::fs::symlink("sub/file", cluster.path("d/link")).expect("link");
    std::os::unix::fs::symlink("sub", cluster.path("d/other")).expect("link");
    let artifact = &*cluster.upload("d");
    assert_eq!(cluster.succeed(["cat", artifact, "/sub/file"]), b"content\n");
    let json = cluster.succeed(["--json", "cat", artifact, "sub/file"]);
    let document: Value = serde_json::from_slice(&json).expect("one JSON document");
    assert_eq!((&document["size_bytes"], &document["data"]), (&8.into(), &"Y29udGVudAo=".into()));
    for (path, text) in [
        ("../x", "leave out .."),
        ("sub/../../x", "leave out .."),
        ("/", "name a file in it"),
        ("link", "\"link\" is a symbolic link to \"sub/file\", and links are not followed"),
        ("other/file", "is behind a symbolic link"),
        ("sub", "\"sub\" is a directory"),
        ("gone", "there is no \"gone\""),
        ("sub/file/x", "there is no \"sub/file/x\""),
    ] {
        refused(&cluster.output(["cat", artifact, path]), text);
    }
}

#[test]
fn changed_and_unreadable_files_need_permission() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]); // Starts a cluster, which must keep its capabilities.
    fs::create_dir(cluster.path("d")).expect("directory");
    fs::write(cluster.path("d/fine"), "fine").expect("write");
    fs::write(cluster.path("d/secret"), "secret").expect("write");
    fs::set_permissions(cluster.path("d/secret"), fs::Permissions::from_mode(0o000)).expect("chmod");
    let upload = |more: &[&str]| {
        let mut command = cluster.gantry(["upload", "d"].iter().chain(more));
        unprivileged(&mut command).output().expect("gantry runs")
    };
    let files = |output: &Output| {
        let artifact = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let into = cluster.path(&artifact);
        cluster.succeed(["download".as_ref(), artifact.as_ref(), into.as_os_str()]);
        let mut names: Vec<_> =
            fs::read_dir(into).expect("listed").flatten().map(|e| e.file_name()).collect();
        names.sort();
        names
    };
    refused(&upload(&[]), "\"secret\" cannot be read: Permission denied");
    let allowed = upload(&["--allow-changed"]);
    assert_eq!(code(&allowed), 0, "{}", describe(&allowed));
    assert!(stderr_text(&allowed).contains("\"secret\" cannot be read"), "{}", describe(&allowed));
    assert_eq!(files(&allowed), ["fine"], "what cannot be read is left out");

    fs::remove_file(cluster.path("d/secret")).expect("removed");
    // The file is large enough to grow while it is read.
    let growing = fs::File::create(cluster.path("d/growing")).expect("created");
    std::io::Write::write_all(&mut &growing, &vec![7; 64 << 20]).expect("written");
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !enough.load(Ordering::Relaxed) {
                std::io::Write::write_all(&mut &growing, b"more").expect("written");
                std::thread::yield_now();
            }
        });
        let stopped = upload(&[]);
        let allowed = upload(&["--allow-changed"]);
        enough.store(true, Ordering::Relaxed);
        refused(&stopped, "\"growing\" changed");
        assert_eq!(code(&allowed), 0, "{}", describe(&allowed));
        assert!(stderr_text(&allowed).contains("\"growing\" changed"), "{}", describe(&allowed));
        assert_eq!(files(&allowed), ["fine", "growing"]);
    });
}

#[test]
fn explain_runs_nothing() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let explain = |arguments: &[&str]| {
        let line = ["--json", "run", "--explain"].iter().chain(arguments).chain(&["--", "true"]);
        serde_json::from_slice::<Value>(&cluster.succeed(line)).expect("one object")
    };
    // A new cluster has no worker yet.
    integration_tests::wait_for("a worker", || (explain(&[])["verdict"] == "placed").then_some(()));
    let never = explain(&["--tag", "gpu"]);
    assert_eq!(never["verdict"], "never", "{never}");
    assert_eq!(never["workers"][0]["refusals"][0]["reason"], "MISSING_TAGS", "{never}");
    let printed = cluster.succeed(["run", "--explain", "--tag", "gpu", "--", "true"]);
    let printed = String::from_utf8(printed).expect("text");
    assert!(
        printed.starts_with("no known worker can ever run the workload; submitting it now would fail\n"),
        "{printed}"
    );
    assert!(printed.contains("lacks the tag gpu") && printed.contains("it has the tag gpu"), "{printed}");
    assert!(cluster.list("workloads").is_empty(), "nothing was submitted");

    let id = String::from_utf8(cluster.succeed(["run", "-d", "--", "true"])).expect("an id");
    let ended = integration_tests::wait_for("it has ended", || {
        let printed = String::from_utf8(cluster.succeed(["explain", id.trim()])).expect("text");
        printed.starts_with("the workload has ended").then_some(printed)
    });
    assert!(ended.contains(": succeeded\n") && ended.contains("exit 0"), "{ended}");
    assert!(ended.contains("attempt") && ended.contains("started"), "{ended}");
}
