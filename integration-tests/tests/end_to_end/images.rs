//! Images that are artifacts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use integration_tests::{Cluster, code, describe, may_run_containers};

/// Programs of the image.
const PROGRAMS: [&str; 5] = ["sh", "cat", "ls", "id", "env"];

/// Makes a small root file system with programs of this machine and their libraries.
pub(crate) fn root_file_system(root: &Path) {
    for directory in ["bin", "etc", "home/ann"] {
        fs::create_dir_all(root.join(directory)).expect("directories");
    }
    for program in PROGRAMS {
        let path = ["/bin", "/usr/bin"].map(|directory| Path::new(directory).join(program));
        let path = path.iter().find(|path| path.exists()).expect("a program");
        fs::copy(path, root.join("bin").join(program)).expect("copy");
        let needed = Command::new("ldd").arg(path).output().expect("ldd");
        let needed = String::from_utf8(needed.stdout).expect("text");
        for library in needed.split_whitespace().filter(|word| word.starts_with('/')) {
            let to = root.join(library.trim_start_matches('/'));
            fs::create_dir_all(to.parent().expect("a directory")).expect("directories");
            fs::copy(library, to).expect("copy");
        }
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nann:x:4242:4243::/home/ann:/bin/sh\n")
        .expect("write");
    fs::write(root.join("etc/group"), "root:x:0:\nann:x:4243:\n").expect("write");
    fs::write(root.join("marker"), "of the image\n").expect("write");
    fs::set_permissions(root.join("marker"), fs::Permissions::from_mode(0o666)).expect("a mode");
}

fn upload(cluster: &Cluster, directory: &str) -> String {
    format!("artifact:{}", cluster.upload(directory))
}

#[test]
fn process_runs_in_image_of_artifact() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    root_file_system(&cluster.path("image/rootfs"));
    let metadata = r#"{"env": ["A=of the image", "B=of the image", "PATH=/bin"], "user": "ann", "more": {}}"#;
    fs::write(cluster.path("image/metadata.json"), metadata).expect("write");
    let image = upload(&cluster, "image");
    let run = |more: &[&str], script: &str| {
        let arguments = [&["run", "--image", &image][..], more, &["--", "sh", "-c", script]].concat();
        let output = cluster.output(arguments);
        assert_eq!(code(&output), 0, "{}", describe(&output));
        String::from_utf8(output.stdout).expect("text")
    };

    let printed =
        run(&[], r#"echo "$A, $B, $HOME"; id -u; id -g; cat /marker; echo changed > /marker; cat /marker"#);
    assert_eq!(printed, "of the image, of the image, /home/ann\n4242\n4243\nof the image\nchanged\n");
    let printed =
        run(&["--env", "B=mine", "--user", "root"], r#"echo "$A, $B"; id -u; cat /marker; echo x > /new"#);
    assert_eq!(printed, "of the image, mine\n0\nof the image\n", "the writes stayed in the container");

    // The process sees nothing of the worker except the directories that every container has.
    let printed = run(
        &[],
        "ls -a /; test -d /proc/self && test -c /dev/null && test -d /sys/class && echo fresh; ls /tmp /etc",
    );
    let mut expected: Vec<_> = fs::read_dir(cluster.path("image/rootfs"))
        .expect("list")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .chain([".", "..", "dev", "proc", "run", "sys", "tmp", "workspace"].map(str::to_owned))
        .collect();
    expected.sort_unstable();
    let (root, rest) = printed.split_once("fresh\n").expect("what every container has");
    let mut root: Vec<_> = root.lines().collect();
    root.sort_unstable();
    assert_eq!(root, expected);
    assert_eq!(rest, "/etc:\ngroup\nhosts\npasswd\nresolv.conf\n\n/tmp:\n");

    // The process may replace its inputs and outputs.
    fs::create_dir(cluster.path("src")).expect("directory");
    fs::write(cluster.path("src/file"), "content").expect("write");
    let arguments = ["run", "--image", &image, "-i", "src=src", "-o", "out=back", "--", "sh", "-c"];
    let output = cluster.output(arguments.into_iter().chain(["cat src/file > out/copy"]));
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(fs::read_to_string(cluster.path("back/copy")).expect("the result"), "content");
}

#[test]
fn cluster_wide_type_is_image_on_all_workers() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    root_file_system(&cluster.path("image/rootfs"));
    let run = |script: &str| {
        cluster.output([
            "run",
            "--image",
            "resource-type:tool",
            "--env",
            "PATH=/bin",
            "--",
            "sh",
            "-c",
            script,
        ])
    };
    let missing = run("true");
    assert_eq!(code(&missing), 125, "{}", describe(&missing));
    assert!(
        String::from_utf8_lossy(&missing.stderr).contains("resource type tool"),
        "{}",
        describe(&missing)
    );
    let no_image = cluster.output(["upload", "--resource-type", "tool", "image/rootfs"]);
    assert!(
        String::from_utf8_lossy(&no_image.stderr).contains("the directory has no rootfs/"),
        "{}",
        describe(&no_image)
    );

    let upload = ["upload", "-q", "--resource-type", "tool", "--type-version", "7", "image"];
    let uploaded = cluster.output(upload);
    assert_eq!(code(&uploaded), 0, "{}", describe(&uploaded));
    let artifact = String::from_utf8(uploaded.stdout).expect("text");
    let output = run("cat /marker");
    assert_eq!((code(&output), &output.stdout[..]), (0, &b"of the image\n"[..]), "{}", describe(&output));
    let known = cluster.list("base-types");
    let known: Vec<_> =
        known.iter().map(|known| (&known["type"], &known["version"], &known["artifact_id"])).collect();
    assert_eq!(known, [(&"tool".into(), &"7".into(), &artifact.trim().into())]);
}

#[test]
fn invalid_image_is_rejected() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let cases = [
        ("none", None, "has no directory `rootfs`"),
        ("list", Some("[]"), "`metadata.json` is malformed"),
        ("half", Some(r#"{"env": ["A"#), "`metadata.json` is malformed"),
        ("no-variable", Some(r#"{"env": ["A"]}"#), "\"A\" in `env` is not `K=V`"),
        ("large", Some(&*" ".repeat((1 << 20) + 1)), "at most 1048576 are allowed"),
    ];
    for (name, metadata, says) in cases {
        fs::create_dir(cluster.path(name)).expect("directory");
        fs::write(cluster.path(name).join("file"), name).expect("write");
        if let Some(metadata) = metadata {
            fs::create_dir(cluster.path(name).join("rootfs")).expect("directory");
            fs::write(cluster.path(name).join("metadata.json"), metadata).expect("write");
        }
        let image = upload(&cluster, name);
        let output = cluster.output(["run", "--image", &image, "--", "true"]);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(printed.contains("INVALID_IMAGE") && printed.contains(says), "{name}: {}", describe(&output));
    }
    // An empty root file system is valid, but contains no program.
    fs::create_dir_all(cluster.path("empty/rootfs")).expect("directories");
    let image = upload(&cluster, "empty");
    let output = cluster.output(["run", "--image", &image, "--", "true"]);
    assert_eq!(code(&output), 127, "{}", describe(&output));
    let output = cluster.output(["run", "--image", &image, "--user", "ann", "--", "true"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("USER_NOT_FOUND"), "{}", describe(&output));
    // An unknown image is an unavailable input.
    let none = "artifact:00000000-0000-4000-8000-000000000000";
    let output = cluster.output(["run", "--image", none, "--", "true"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("INPUT_UNAVAILABLE"), "{}", describe(&output));
}
