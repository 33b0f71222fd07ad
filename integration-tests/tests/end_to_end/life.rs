//! Life of a local cluster: started by the first command, kept through crashes, and ended when
//! idle.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Stdio};

use integration_tests::{Cluster, code, describe, may_run_containers, send, snapshot, started, wait_for};

#[test]
fn simultaneous_first_runs_share_one_cluster() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let start = || {
        let mut run = cluster.gantry(["run", "--", "echo", "hello"]);
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry")
    };
    let runs = [start(), start(), start()];
    for run in runs {
        let output = run.wait_with_output().expect("gantry ends");
        assert_eq!(code(&output), 0, "{}", describe(&output));
        assert_eq!(output.stdout, b"hello\n");
    }
    assert_eq!(cluster.list("workloads").len(), 3, "all on one cluster");
    let socket = wait_for("the socket", || find_socket(&cluster.path("run")));
    let mode = |path: &Path| fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(socket.parent().expect("a directory")), 0o700);
}

fn find_socket(directory: &Path) -> Option<std::path::PathBuf> {
    let entries = fs::read_dir(directory.join("gantry")).ok()?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()))
}

#[test]
fn run_survives_restart_of_cluster() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // The process runs on while there is no cluster, and ends after a while.
    let script = "echo begin; sleep 3; echo end; echo kept > out/file";
    let id = cluster.succeed(["run", "-d", "-o", "out", "--", "sh", "-c", script]);
    let id = String::from_utf8(id).expect("an id").trim().to_owned();
    let mut follower = cluster.gantry(["attach", &id]).stdout(Stdio::piped()).spawn().expect("gantry");
    let mut line = String::new();
    BufReader::new(follower.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "begin\n");
    cluster.kill();
    follower.kill().and_then(|()| follower.wait()).expect("the follower ends");

    let attached = cluster.output(["attach", &id]);
    assert_eq!(code(&attached), 0, "{}", describe(&attached));
    assert_eq!(attached.stdout, b"begin\nend\n");
    let show = cluster.succeed(["show", "workload", &id, "--json"]);
    let show: serde_json::Value = serde_json::from_slice(show.trim_ascii()).expect("JSON");
    assert_eq!(show["outcome"], "succeeded", "{show}");
    let artifact = show["outputs"][0]["artifact_id"].as_str().expect("an output").to_owned();
    assert_eq!(cluster.succeed(["cat", &artifact, "file"]), b"kept\n");
}

#[test]
fn cluster_inherits_nothing_of_first_command() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let run = cluster.gantry(["run", "--", "true"]);
    let mut first = std::process::Command::new("sh");
    let script = "umask 077; ulimit -S -c 100; ulimit -S -f 1000; ulimit -S -n 200; ulimit -S -t 20; \
        trap '' HUP TERM; exec 7< /; exec nice -n 5 taskset -c 0 \"$@\"";
    first.args(["-c", script, "sh"]).arg(run.get_program()).args(run.get_args());
    first.env_clear().envs(run.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = first.env("SECRET", "x").current_dir(cluster.path("run")).output().expect("gantry runs");
    assert_eq!(code(&output), 0, "{}", describe(&output));

    let pid = cluster.pid().expect("a running cluster");
    let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).expect("read");
    let (status, limits) = (of("status"), of("limits"));
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').split_whitespace().next().unwrap_or_default().to_owned()
    };
    let first_process = fs::read_to_string("/proc/1/status").expect("read");
    let processors = field(&first_process, "Cpus_allowed");
    assert_eq!(field(&status, "Umask"), "0022");
    assert_eq!(field(&status, "SigBlk"), "0000000000000000");
    let ignored = u64::from_str_radix(&field(&status, "SigIgn"), 16).expect("a number");
    assert_eq!(ignored & (1 << 14 | 1), 0, "neither TERM nor HUP");
    assert_eq!(field(&status, "Cpus_allowed"), processors);
    for name in ["Max file size", "Max cpu time"] {
        assert_eq!(field(&limits, name), "unlimited", "{name}");
    }
    assert_eq!(field(&limits, "Max core file size"), "0");
    let mut descriptors = limits.lines().find(|line| line.starts_with("Max open files")).expect("listed")
        ["Max open files".len()..]
        .split_whitespace();
    assert_eq!(descriptors.next(), descriptors.next(), "the soft limit is the hard one");
    assert!(!of("environ").contains("SECRET"));
    let link = |name: &str| fs::read_link(format!("/proc/{pid}/{name}"));
    assert_eq!(link("cwd").expect("a directory"), Path::new("/"));
    assert!(!link("fd/7").is_ok_and(|file| file == Path::new("/")));

    let script = "nice; stat -c %a /; ulimit -t; ulimit -f; grep Cpus_allowed: /proc/self/status | cut -f2";
    let printed = cluster.succeed(["run", "--user", "65534", "--", "sh", "-c", script]);
    let printed = String::from_utf8(printed).expect("text");
    assert_eq!(printed.lines().collect::<Vec<_>>(), ["0", "755", "unlimited", "unlimited", &processors]);
}

#[test]
fn workloads_wait_when_few_files_can_be_opened() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let mut up = cluster.up("ulimit -n 200");
    let runs: Vec<_> = (0..30)
        .map(|_| {
            let mut run = cluster.gantry(["run", "--", "sh", "-c", "sleep 1; echo hello"]);
            run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry")
        })
        .collect();
    for run in runs {
        let output = run.wait_with_output().expect("gantry ends");
        assert_eq!((code(&output), &*output.stdout), (0, &b"hello\n"[..]), "{}", describe(&output));
    }
    assert!(cluster.up_log().contains("hard limit of open files is low"), "{}", cluster.up_log());
    cluster.succeed(["down", "--force"]);
    up.wait().expect("the cluster ends");
}

#[test]
fn cluster_ends_when_its_state_is_removed() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "-d", "--", "sleep", "1000"]);
    let status = cluster.succeed(["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(status.trim_ascii()).expect("JSON");
    assert!(status["workers"][0]["disk_free_bytes"].as_u64().is_some_and(|free| free > 0), "{status}");
    wait_for("the process in the container", || {
        snapshot::processes(&cluster).values().any(|command| command.contains("sleep")).then_some(())
    });
    let old = cluster.pid().expect("a running cluster");
    fs::remove_dir_all(cluster.state()).expect("removed");
    let next = cluster.output(["run", "--", "echo", "again"]);
    assert_eq!((code(&next), &*next.stdout), (0, &b"again\n"[..]), "{}", describe(&next));
    let new = cluster.pid().expect("a running cluster");
    assert_ne!(old, new);
    wait_for("the end of what ran", || {
        let left = snapshot::processes(&cluster);
        let is_old = |(pid, command): (&i32, &String)| *pid == old || command.contains("sleep");
        (!left.iter().any(is_old)).then_some(())
    });
    assert_eq!(cluster.pid(), Some(new), "the old cluster has left the socket of the new one");
}

#[test]
fn hung_cluster_is_reported_and_killed() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    let pid = cluster.pid().expect("a running cluster");
    cluster.freeze();
    let status = cluster.output(["status"]);
    assert_eq!(code(&status), 125, "{}", describe(&status));
    let printed = String::from_utf8_lossy(&status.stderr).into_owned();
    assert!(printed.contains(&format!("the cluster (process {pid}) does not answer")), "{printed}");
    assert!(printed.contains("`gantry down --force` kills it"), "{printed}");
    let down = cluster.output(["down", "--force"]);
    assert_eq!(code(&down), 0, "{}", describe(&down));
    assert!(describe(&down).contains("killed the cluster, which did not answer"), "{}", describe(&down));
    assert_eq!(cluster.succeed(["run", "--", "echo", "again"]), b"again\n");
}

#[test]
fn idle_cluster_ends() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new().with("GANTRY_IDLE_END", "1s").with("GANTRY_GC_GRACE", "0s");
    cluster.succeed(["run", "--", "true"]);
    // `pid` is not used here, because its call would count as use.
    wait_for("the end of the cluster", || snapshot::processes(&cluster).is_empty().then_some(()));
    assert!(find_socket(&cluster.path("run")).is_none());
    let next = cluster.output(["run", "--", "echo", "again"]);
    assert_eq!(next.stdout, b"again\n", "{}", describe(&next));
}

#[test]
fn cluster_counts_workloads_of_all_teams() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "-d", "--team", "other", "--", "sleep", "600"]);
    let status = cluster.succeed(["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(status.trim_ascii()).expect("JSON");
    let by_state = status["workloads"].as_object().expect("workloads by state");
    assert_eq!(by_state.values().filter_map(serde_json::Value::as_u64).sum::<u64>(), 1, "{status}");
    let down = cluster.output(["down", "--force"]);
    assert_eq!(code(&down), 0, "{}", describe(&down));
    let printed = String::from_utf8_lossy(&down.stderr);
    assert!(printed.contains("cancelled 1 workload"), "{printed}");
}

/// Command whose standard output is read line by line.
fn lines(child: &mut Child) -> impl FnMut() -> String + use<> {
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
    move || {
        let mut line = String::new();
        stdout.read_line(&mut line).expect("a line");
        line
    }
}

#[test]
fn stale_socket_is_replaced() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    let before = cluster.pid().expect("a cluster");
    cluster.kill();
    assert!(find_socket(&cluster.path("run")).is_some(), "what was killed left its socket");
    assert!(cluster.pid().is_none(), "no cluster listens there");
    let output = cluster.output(["run", "--", "echo", "hello"]);
    assert_eq!(output.stdout, b"hello\n", "{}", describe(&output));
    assert_ne!(cluster.pid(), Some(before));
}

/// Server of another user of the machine, at the socket of the cluster.
struct ForeignServer(UnixListener);

impl ForeignServer {
    const USER: u32 = 65534;

    fn listen(cluster: &Cluster) -> Self {
        fs::set_permissions(cluster.path(""), fs::Permissions::from_mode(0o711)).expect("passable");
        let socket = cluster.path("run/gantry/gantry.sock");
        let listen = move || {
            // Only for this thread.
            let user = rustix::process::Uid::from_raw(Self::USER);
            rustix::thread::set_thread_res_uid(user, user, user).expect("another user");
            UnixListener::bind(socket).expect("a socket")
        };
        let listener = std::thread::spawn(listen).join().expect("a listener");
        listener.set_nonblocking(true).expect("a listener that does not wait");
        Self(listener)
    }

    /// Returns the received bytes. A connection alone sends none.
    fn received(&self) -> Vec<u8> {
        let mut received = Vec::new();
        while let Ok((mut caller, _)) = self.0.accept() {
            caller.read_to_end(&mut received).expect("the caller has closed");
        }
        received
    }
}

#[test]
fn open_runtime_directory_is_made_private() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let directory = cluster.path("run/gantry");
    fs::create_dir(&directory).expect("a directory");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).expect("opened");
    let stranger = ForeignServer::listen(&cluster);
    let output = cluster.output(["run", "--", "echo", "hello"]);
    assert_eq!(output.stdout, b"hello\n", "{}", describe(&output));
    assert_eq!(fs::metadata(&directory).expect("metadata").permissions().mode() & 0o777, 0o700);
    assert_eq!(stranger.received(), b"");
}

#[test]
fn runtime_directory_of_other_user_is_rejected() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let directory = cluster.path("run/gantry");
    fs::create_dir(&directory).expect("a directory");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).expect("opened");
    let stranger = ForeignServer::listen(&cluster);
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).expect("closed");
    chown(&directory, Some(ForeignServer::USER), None).expect("given away");
    for command in [&["run", "--", "true"][..], &["up"], &["list", "workloads"]] {
        let output = cluster.output(command);
        assert_eq!(code(&output), 125, "{}", describe(&output));
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(
            printed.contains("belongs to another user; set XDG_STATE_HOME or XDG_RUNTIME_DIR"),
            "{printed}"
        );
    }
    assert_eq!(stranger.received(), b"");

    // Environment after `su`: everything belongs to another user, and the state directory is used.
    chown(cluster.path("run"), Some(ForeignServer::USER), None).expect("given away");
    cluster.succeed(["run", "--", "true"]);
    let socket = cluster.state().join("run/gantry.sock");
    assert!(fs::metadata(&socket).is_ok_and(|metadata| metadata.file_type().is_socket()), "{socket:?}");
}

#[test]
fn foreground_cluster_prints_addresses_and_token_file() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let mut up = cluster.gantry(["up", "--listen", "127.0.0.1:0"]);
    let mut up = up.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    let mut line = lines(&mut up);
    let mut after = |words: &str| {
        let line = line();
        line.strip_prefix(words).unwrap_or_else(|| panic!("{line:?}")).trim_end().to_owned()
    };
    let unix = after("listening on ");
    assert_eq!(unix, format!("unix://{}", cluster.path("run/gantry/gantry.sock").display()));
    let tcp = after("listening on ");
    assert!(tcp.starts_with("http://127.0.0.1:") && !tcp.ends_with(":0"), "{tcp}");
    let token = after("the token for TCP is in ");
    assert_eq!(fs::metadata(&token).expect("the token").permissions().mode() & 0o777, 0o600);

    // A caller with other directories has only the address and a copy of the token.
    let elsewhere = Cluster::new();
    fs::copy(&token, elsewhere.path("token")).expect("a copy");
    let say = ["run", "--", "echo", "hello"];
    let with = |options: &[&str]| elsewhere.output([&["--server", &tcp], options, &say].concat());
    let run = with(&["--token-file", "token"]);
    assert_eq!(run.stdout, b"hello\n", "{}", describe(&run));
    assert_eq!(cluster.list("workloads").len(), 1, "it ran here");
    fs::write(elsewhere.path("wrong"), "0".repeat(64)).expect("written");
    for refused in [with(&[]), with(&["--token-file", "wrong"])] {
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("token"), "{}", describe(&refused));
    }
    assert_eq!(cluster.list("workloads").len(), 1, "nothing without the token");

    send(&up, libc::SIGTERM);
    let ended = up.wait_with_output().expect("gantry ends");
    assert_eq!(code(&ended), 0, "{}", describe(&ended));
    assert!(find_socket(&cluster.path("run")).is_none());
}

#[test]
fn down_stops_workloads_and_force_kills_them() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let script = "trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.1; done";
    for (down, expected) in [(&["down"][..], "told\n"), (&["down", "--force"], "")] {
        let (follower, mut stdout) = started(cluster.gantry(["run", "--", "sh", "-c", script]));
        let down = cluster.output(down);
        assert_eq!(code(&down), 0, "{}", describe(&down));
        let printed = String::from_utf8_lossy(&down.stderr);
        assert!(printed.contains("cancelled 1 workload") && printed.contains("has ended"), "{printed}");
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).expect("text");
        assert_eq!(rest, expected, "{}", describe(&down));
        let followed = follower.wait_with_output().expect("the follower ends");
        assert_ne!(code(&followed), 0, "{}", describe(&followed));
        let left = snapshot::processes(&cluster);
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn down_ends_when_next_cluster_has_started() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    let down = cluster.gantry(["down"]).stderr(Stdio::piped()).spawn().expect("gantry");
    wait_for("the socket to go", || find_socket(&cluster.path("run")).is_none().then_some(()));
    // The next cluster waits for the lock, and takes it as soon as it is free.
    assert_eq!(cluster.succeed(["run", "--", "echo", "again"]), b"again\n");
    let down = down.wait_with_output().expect("gantry ends");
    assert_eq!(code(&down), 0, "{}", describe(&down));
    assert!(cluster.pid().is_some(), "the next one runs");
}
