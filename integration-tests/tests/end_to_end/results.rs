//! Entries of a result that may be written into the directory of the caller, and entries that may
//! not.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};

use integration_tests::{Cluster, code, describe, may_run_containers, started};
use serde_json::Value;

/// Plants entries that would run on the machine of the caller, or have more rights than the caller.
const PLANT: &str = "cd src && echo evil > .git/hooks/post-checkout && chmod 755 .git/hooks/post-checkout && \
    echo '[core] fsmonitor = evil' > .git/config && mkdir -p sub/.git/hooks .git/modules/m/hooks && \
    echo evil > sub/.git/hooks/post-merge && echo evil > .git/modules/m/hooks/post-merge && \
    mkdir -p away && echo 'gitdir: ../evil' > away/.git && echo changed > file && echo new > .git/HEAD && \
    cp file setuid && chmod 4755 setuid && mkdir group && chmod 2755 group && ln -s /etc link";

#[test]
fn planted_programs_and_rights_are_dropped() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("src/.git/hooks")).expect("directories");
    for (path, text) in [("file", "as it was"), (".git/config", "mine"), (".git/hooks/pre-commit", "mine")] {
        fs::write(cluster.path("src").join(path), text).expect("write");
    }
    // A directory of a group, which is unchanged by the round trip.
    fs::create_dir(cluster.path("src/shared")).expect("a directory");
    fs::set_permissions(cluster.path("src/shared"), fs::Permissions::from_mode(0o2775)).expect("a mode");
    let at = |path: &str| cluster.path("src").join(path);
    let read = |path: &str| fs::read_to_string(at(path)).ok();

    let run = |more: &[&str]| {
        let line =
            [&["run", "-i", "src=src", "-o", "src=src"][..], more, &["--", "sh", "-c", PLANT]].concat();
        let output = cluster.output(line);
        assert_eq!(code(&output), 0, "{}", describe(&output));
        output
    };
    let printed = String::from_utf8(run(&[]).stderr).expect("text");
    assert_eq!(read("file").as_deref(), Some("changed\n"), "{printed}");
    assert_eq!(read(".git/HEAD").as_deref(), Some("new\n"));
    assert_eq!(read(".git/config").as_deref(), Some("mine"));
    assert_eq!(read(".git/hooks/pre-commit").as_deref(), Some("mine"));
    for planted in [".git/hooks/post-checkout", "sub/.git/hooks", ".git/modules/m/hooks", "away/.git"] {
        assert!(at(planted).symlink_metadata().is_err(), "{planted}");
    }
    for (path, mode) in [("setuid", 0o755), ("group", 0o755), ("shared", 0o2775)] {
        assert_eq!(fs::metadata(at(path)).expect("there").mode() & 0o7777, mode, "{path}");
    }
    for text in [
        ".git/config, .git/hooks/post-checkout, .git/modules/m/hooks/post-merge, away/.git, sub/.git/hooks/post-merge",
        "--allow-git-hooks",
        "group, setuid; keep them with --preserve-special",
    ] {
        assert!(printed.contains(text), "{text:?} is not printed: {printed}");
    }
    assert!(
        !printed.contains("pre-commit") && !printed.contains("shared"),
        "what did not change is not named: {printed}"
    );

    // A link in a directory of the result does not lead a later result elsewhere.
    let out = cluster.output(["run", "-o", "x=./src/link/below", "--", "true"]);
    assert_eq!(code(&out), 125, "{}", describe(&out));
    let refused = String::from_utf8(out.stderr).expect("text");
    assert!(refused.contains("src/link\" is a symbolic link to \"/etc\""), "{refused}");
    for other in [["-i", "x=src/link/below"], ["--trace", "src/link/trace"]] {
        let out = cluster.output([&["run"][..], &other, &["--", "true"]].concat());
        assert_eq!(code(&out), 125, "{}", describe(&out));
        let refused = String::from_utf8(out.stderr).expect("text");
        assert!(refused.contains("src/link\" is a symbolic link to \"/etc\""), "{other:?}: {refused}");
    }
    symlink("src", cluster.path("own")).expect("a link");
    let out = cluster.output(["run", "-o", "x=./own/made", "--follow-links", "--", "touch", "x/made"]);
    assert_eq!(code(&out), 0, "{}", describe(&out));
    assert!(at("made/made").exists());

    // With the options, everything is written.
    fs::remove_dir_all(at("group")).expect("removed");
    let clean = "rm -rf src/setuid src/link; ".to_owned() + PLANT;
    let line =
        ["run", "--json", "-i", "src=src", "-o", "src=src", "--allow-git-hooks", "--preserve-special", "--"];
    let output = cluster.output([&line[..], &["sh", "-c", &clean]].concat());
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(read(".git/config").as_deref(), Some("[core] fsmonitor = evil\n"));
    assert_eq!(fs::metadata(at("setuid")).expect("there").mode() & 0o7777, 0o4755);
    let events = String::from_utf8(output.stdout).expect("text");
    let events: Vec<Value> = events.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let downloaded = events.iter().find(|event| event["event"] == "downloaded").expect("an event");
    assert_eq!(downloaded["not_written"]["count"], 0);
}

#[test]
fn download_and_replacement_drop_programs_too() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("tree/.git/hooks")).expect("directories");
    for path in ["tree/file", "tree/.git/HEAD", "tree/.git/config", "tree/.git/hooks/post-merge"] {
        fs::write(cluster.path(path), "evil").expect("write");
    }
    let artifact = cluster.upload("tree");
    let download = |more: &[&str]| {
        let output = cluster.output([&["--json", "download", &artifact][..], more].concat());
        (
            code(&output),
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default(),
            describe(&output),
        )
    };
    let (ended, done, printed) = download(&["out"]);
    assert_eq!((ended, &done["not_written"]["count"]), (0, &Value::from(2)), "{printed}");
    assert_eq!(done["not_written"]["first"][0]["path"], ".git/config");
    assert!(cluster.path("out/.git/HEAD").exists() && !cluster.path("out/.git/config").exists());
    assert!(!cluster.path("out/.git/hooks").exists());

    // A replacement never loses a configuration.
    fs::write(cluster.path("out/.git/config"), "mine").expect("write");
    let (ended, _, printed) = download(&["--replace", "out"]);
    assert_eq!(ended, 125, "{printed}");
    assert!(printed.contains("leave out --replace"), "{printed}");
    assert_eq!(fs::read_to_string(cluster.path("out/.git/config")).expect("kept"), "mine");
    let (ended, done, printed) = download(&["--replace", "--allow-git-hooks", "out"]);
    assert_eq!((ended, &done["not_written"]["count"]), (0, &Value::from(0)), "{printed}");
    assert_eq!(fs::read_to_string(cluster.path("out/.git/config")).expect("replaced"), "evil");
}

#[test]
fn result_in_place_leaves_edits_alone() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let at = |path: &str| cluster.path("src").join(path);
    for (path, text) in [
        (".gantryignore", ".env\n"),
        (".env", "secret"),
        ("edited", "old"),
        ("both", "old"),
        ("removed", "old"),
        ("removed-edited", "old"),
    ] {
        integration_tests::write(&at(path), text);
    }
    let script =
        "echo ready; read go; cd src; echo theirs > both; echo made > made; rm removed removed-edited";
    let mut run = cluster.gantry(["run", "-i", "src=src", "-o", "src=src", "--", "sh", "-c", script]);
    run.stdin(Stdio::piped()).stderr(Stdio::piped());
    let (mut run, _stdout) = started(run);
    for path in ["edited", "both", "removed-edited", "new"] {
        fs::write(at(path), "mine").expect("write");
    }
    run.stdin.take().expect("piped").write_all(b"\n").expect("the command reads");
    let output = run.wait_with_output().expect("it ends");
    assert_eq!(code(&output), 125, "{}", describe(&output));

    let read = |path: &str| fs::read_to_string(at(path)).ok();
    for (path, text) in [
        (".env", "secret"),
        ("edited", "mine"),
        ("both", "mine"),
        ("both.gantry-result", "theirs\n"),
        ("made", "made\n"),
        ("removed-edited", "mine"),
        ("new", "mine"),
    ] {
        assert_eq!(read(path).as_deref(), Some(text), "{path}: {}", describe(&output));
    }
    assert_eq!(read("removed"), None);
    let printed = String::from_utf8(output.stderr).expect("text");
    for text in [
        "conflict: your changed src/both stays; the version of the command is src/both.gantry-result",
        "not removed as the command did, because you changed these entries or related ones: removed-edited",
    ] {
        assert!(printed.contains(text), "{text:?} is not printed: {printed}");
    }
}

#[test]
fn runs_in_place_store_what_changed() {
    if !may_run_containers() {
        return;
    }
    const LARGE: u64 = 4 << 20;
    let cluster = Cluster::new();
    let content = Command::new("head").args(["-c", &LARGE.to_string(), "/dev/urandom"]).output();
    let content = content.expect("head runs").stdout;
    for name in ["a/one", "a/same", "b/same"] {
        integration_tests::write(&cluster.path("src").join(name), &content);
    }
    let used = || {
        let output = Command::new("du").args(["-sx", "--block-size=1"]).arg(cluster.state()).output();
        let output = String::from_utf8(output.expect("du runs").stdout).expect("text");
        output.split_whitespace().next().and_then(|used| used.parse::<u64>().ok()).expect("a number")
    };
    let script = "cd src; head -c 4096 /dev/urandom > b/new; mv a c; mv c a";
    let run = ["run", "-i", "src=src", "-o", "src=src", "--", "sh", "-c", script];
    cluster.succeed(run);
    let before = used();
    cluster.succeed(run);
    let more = used().saturating_sub(before);
    assert!(more < LARGE, "{more} bytes more");
}

#[test]
fn command_that_fails_replaces_nothing() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("dist")).expect("a directory");
    fs::write(cluster.path("dist/old"), "works").expect("write");
    let run = |into: &str, script: &str| {
        let output = format!("dist={into}");
        cluster.output(["run", "--replace", "-o", &output, "--", "sh", "-c", script])
    };
    let failed = run("dist", "exit 3");
    assert_eq!(code(&failed), 3, "{}", describe(&failed));
    assert_eq!(fs::read_to_string(cluster.path("dist/old")).expect("it stays"), "works");
    assert!(
        describe(&failed)
            .contains("dist is not replaced, because the command failed; download it with `gantry download")
    );
    // Without an existing directory, nothing can be lost.
    assert_eq!(code(&run("report", "echo why > dist/log; exit 3")), 3);
    assert_eq!(fs::read_to_string(cluster.path("report/log")).expect("brought"), "why\n");
    assert_eq!(code(&run("dist", "echo new > dist/new")), 0);
    assert!(!cluster.path("dist/old").exists() && cluster.path("dist/new").exists());
}

#[test]
fn results_are_written_into_mounts() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["list", "workers"]);
    for directory in ["real", "bound"] {
        fs::create_dir(cluster.path(directory)).expect("a directory");
    }
    // The mount is in a separate mount namespace, and ends with the command.
    let unshared = |line: &[&str]| {
        let gantry = cluster.gantry(line);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind real bound && exec \"$0\" \"$@\""]);
        command.arg(gantry.get_program()).args(gantry.get_args());
        command.env_clear().envs(gantry.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.current_dir(cluster.path("")).output().expect("unshare runs")
    };
    let run = ["run", "-o", "out=bound", "--", "sh", "-c", "echo made > out/file"];
    let output = unshared(&run);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(fs::read_to_string(cluster.path("real/file")).expect("brought"), "made\n");
    // A replacement is rejected before the command runs.
    let replaced = unshared(&[&["run", "--replace"], &run[1..]].concat());
    assert_eq!(code(&replaced), 125, "{}", describe(&replaced));
    assert!(describe(&replaced).contains("a file system is mounted there"), "{}", describe(&replaced));
}

#[test]
fn abandoned_staging_is_removed_and_never_sent() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let abandoned = cluster.path("src/.gantry-0190a3f0-0000-7000-8000-000000000000");
    integration_tests::write(&abandoned.join("part"), "of a result");
    let output = cluster.output(["run", "-i", "src=src", "-o", "r=src/out", "--", "ls", "-A", "src"]);
    assert_eq!((code(&output), output.stdout.as_slice()), (0, &b""[..]), "{}", describe(&output));
    assert!(!abandoned.exists());
}

#[test]
fn too_deep_output_is_error_of_caller() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "chdir 'deep' or die; for (1..5000) { mkdir 'd' or die; chdir 'd' or die }";
    let output = cluster.output([
        "--json",
        "run",
        "-o",
        "deep=./deep",
        "-o",
        "good=./good",
        "--",
        "perl",
        "-e",
        script,
    ]);
    let printed = describe(&output);
    assert!(printed.contains("OUTPUT_INVALID"), "{printed}");
    assert!(printed.contains("a path of more than 4096 bytes"), "{printed}");
    // The worker takes the next workload.
    let next = cluster.output(["run", "--", "true"]);
    assert_eq!(code(&next), 0, "{}", describe(&next));
}

/// Makes nested directories until their path has more than 4,096 bytes.
const TOO_LONG: &str = "for (1..60) { my $name = 'c' x 99; mkdir $name or die; chdir $name or die }";

#[test]
fn exit_code_is_reported_when_output_fails() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (exit, expected) in [("0", 125), ("7", 7)] {
        let script = format!("chdir 'bad' or die; {TOO_LONG}; exit {exit}");
        let output = cluster.output(["run", "-o", "bad=bad", "-o", "good=good", "--", "perl", "-e", &script]);
        let printed = describe(&output);
        assert_eq!(code(&output), expected, "{printed}");
        assert!(printed.contains("output \"bad\": cannot store the directory: \"ccc"), "{printed}");
        assert!(printed.contains(&format!("the command itself ended with exit code {exit}")), "{printed}");
    }
}

#[test]
fn sockets_of_an_output_are_named() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "use IO::Socket::UNIX; for (1..5) { IO::Socket::UNIX->new(Local => \"o/s$_\", Listen => 1) or die } \
        open F, '>', 'o/file' or die";
    let output = cluster.output(["--json", "run", "-o", "o=o", "--", "perl", "-e", script]);
    let printed = describe(&output);
    assert_eq!(code(&output), 0, "{printed}");
    let note =
        "output \"o\": left out: \"s1\" is a socket, \"s2\" is a socket, \"s3\" is a socket, and 2 more";
    assert!(printed.contains(note), "{printed}");
    let events = String::from_utf8(output.stdout).expect("text");
    let last: Value = serde_json::from_str(events.lines().last().expect("an event")).expect("JSON");
    assert_eq!(last["notes"], serde_json::json!([note]));
    assert!(cluster.path("o/file").exists() && !cluster.path("o/s1").exists());
}

#[test]
fn invalid_cache_version_is_discarded() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let run = |script: &str| {
        let output = cluster.output(["run", "--cache", "kept=/cache", "--", "perl", "-e", script]);
        (code(&output), describe(&output))
    };
    let (ended, printed) = run("open F, '>', '/cache/first' or die");
    assert_eq!(ended, 0, "{printed}");
    let (ended, printed) = run(&format!("unlink '/cache/first'; chdir '/cache' or die; {TOO_LONG}"));
    assert_eq!(ended, 0, "{printed}");
    assert!(
        printed.contains("cache /cache stays as it was before this run: cannot store the directory: \"ccc"),
        "{printed}"
    );
    let (ended, printed) = run("exit(join(' ', glob '/cache/*') ne '/cache/first')");
    assert_eq!(ended, 0, "{printed}");
}

#[test]
fn hard_links_of_input_are_kept() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir_all(cluster.path("in/a/b")).expect("directories");
    fs::write(cluster.path("in/one"), "1\n").expect("write");
    fs::write(cluster.path("in/a/alone"), "alone").expect("write");
    fs::set_permissions(cluster.path("in/a"), fs::Permissions::from_mode(0o750)).expect("a mode");
    for name in ["in/a/b/two", "in/z"] {
        fs::hard_link(cluster.path("in/one"), cluster.path(name)).expect("a link");
    }
    let script = "echo 2 >> in/a/b/two && cat in/one in/z in/a/alone && stat -c %h in/one && stat -c %a in/a";
    for _ in 0..2 {
        let output = cluster.output(["run", "-i", "in=in", "--", "sh", "-c", script]);
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n2\n1\n2\nalone3\n750\n");
    }
    // A run in place, and another one with its output.
    let change = "echo 2 >> in/a/b/two && ln in/one in/a/more && rm in/z";
    let output = cluster.output(["run", "-i", "in=in", "-o", "in", "--", "sh", "-c", change]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let printed = describe(&output);
    let artifact = printed.split("kept as artifact ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let input = format!("in=artifact:{}", artifact.expect("an artifact"));
    let script = "echo 3 >> in/a/more && cat in/one in/a/b/two && stat -c %h in/one && ls in";
    let output = cluster.output(["run", "-i", &input, "--", "sh", "-c", script]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n2\n3\n1\n2\n3\n3\na\none\n");
}

#[test]
fn device_zero_is_not_whiteout() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // A container makes the file in an output and in a cache.
    let make = "mknod o/w c 0 0 && echo x > o/x && mknod /cache/w c 0 0";
    let output = cluster.output(["run", "-o", "o", "--cache", "c=/cache", "--", "sh", "-c", make]);
    let printed = describe(&output);
    assert_eq!(code(&output), 0, "{printed}");
    let artifact = printed.split("kept as artifact ").nth(1).and_then(|rest| rest.split_whitespace().next());
    let input = format!("o=artifact:{}", artifact.expect("an artifact"));
    let look = "ls o /cache && stat -c %F o/w && rm o/w && echo y >> o/x && ls o";
    let output = cluster.output(["run", "-i", &input, "--cache", "c=/cache", "--", "sh", "-c", look]);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    let listed = "/cache:\nw\n\no:\nw\nx\ncharacter special file\nx\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), listed);
}

#[test]
fn invalid_input_is_rejected() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    fs::create_dir(cluster.path("deep")).expect("a directory");
    let script = format!("chdir $ARGV[0] or die; {TOO_LONG}");
    let made = std::process::Command::new("perl").args(["-e", &script]).arg(cluster.path("deep")).status();
    assert!(made.expect("perl runs").success());
    let output = cluster.output(["run", "-i", "deep=deep", "--", "true"]);
    let printed = describe(&output);
    assert_eq!(code(&output), 125, "{printed}");
    assert!(printed.contains("has a path of more than 4096 bytes"), "{printed}");
}
