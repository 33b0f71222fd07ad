//! The four services as separate processes, on PostgreSQL.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use integration_tests::suite::{Shape, Suite};
use integration_tests::{code, describe, may_run_containers, send, started, wait_for};
use serde_json::Value;
use testing::databases::Server;

const TWO: Shape = Shape { schedulers: 2, stores: 2, streamers: 2, gateways: 1, proxies: 0 };

fn status(suite: &Suite) -> (i32, Value) {
    let output = suite.gantry(&["status", "--json"]).output().expect("gantry runs");
    let document = serde_json::from_slice(output.stdout.trim_ascii());
    (code(&output), document.unwrap_or_else(|error| panic!("{error}: {}", describe(&output))))
}

/// Uploads a directory, changes it in a container, and downloads it.
fn main_job(suite: &Suite, word: &str) {
    let source = suite.path("source");
    fs::create_dir_all(&source).expect("made");
    fs::write(source.join("file"), word).expect("written");
    let out = suite.path(&format!("out-{word}"));
    let script = format!("cat src/file src/file >report/twice; echo seen; echo {word} >&2; exit 7");
    let output = format!("report={}", out.display());
    let ran = suite.gantry(&["run", "-i", "src=source", "-o", &output, "--", "sh", "-c", &script]).output();
    let ran = ran.expect("gantry runs");
    assert_eq!(code(&ran), 7, "{}", describe(&ran));
    assert_eq!(ran.stdout, b"seen\n");
    assert_eq!(fs::read_to_string(out.join("twice")).expect("brought back"), format!("{word}{word}"));
}

#[test]
fn main_job_survives_loss_of_one_replica() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(TWO, &[]);
    main_job(&suite, "first");

    let (code, seen) = status(&suite);
    assert_eq!(code, 0, "{seen}");
    let services = seen["services"].as_array().expect("services");
    let names: Vec<_> = services.iter().filter_map(|service| service["service"].as_str()).collect();
    let expected = [
        "artifact-store",
        "artifact-store",
        "runtime-gateway",
        "scheduler",
        "scheduler",
        "streamer",
        "streamer",
    ];
    assert_eq!(names, expected, "{seen}");
    assert!(services.iter().all(|service| service["version"] == env!("CARGO_PKG_VERSION")), "{seen}");
    assert_eq!(seen["workers"][0]["name"], "worker-0", "{seen}");

    exported_metrics_are_documented(&suite);
    // A failed test prints this state.
    let state: BTreeMap<_, _> = suite.state().map(|(what, rows)| (what, rows.expect(what))).collect();
    assert!(
        matches!(&state["workers"][..], [worker] if worker.starts_with("worker-0|run|running|")),
        "{state:?}"
    );

    // Each client uses either replica, and the other one replaces it.
    for missing in ["0", "1"] {
        for program in ["scheduler", "artifact-store", "streamer"] {
            suite.kill(&format!("{program}-{missing}"));
        }
        main_job(&suite, &format!("without-{missing}"));
        let (code, seen) = status(&suite);
        let services = seen["services"].as_array().expect("services");
        let silent = services.iter().filter(|service| service["ready"] == false).count();
        assert_eq!((code, silent), (1, 3), "{seen}");
        for program in ["scheduler", "artifact-store", "streamer"] {
            suite.spawn(&format!("{program}-{missing}"));
            suite.wait_until_ready(&format!("{program}-{missing}"));
        }
    }
    // The gateway is killed, too. Its containers and volumes are still there.
    suite.kill("runtime-gateway-0");
    suite.spawn("runtime-gateway-0");
    suite.wait_until_ready("runtime-gateway-0");
    main_job(&suite, "last");
    for name in suite.names() {
        assert_eq!(suite.terminate(&name).code(), Some(0), "{name}");
    }
}

/// Compares the exported metrics with the table in docs/operations/monitoring.md.
fn exported_metrics_are_documented(suite: &Suite) {
    let mut exported = BTreeSet::new();
    for name in ["scheduler-0", "artifact-store-0", "streamer-0", "runtime-gateway-0"] {
        let (head, page) = suite.page(name, "/metrics");
        assert!(head.contains("200"), "{head}");
        let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        exported.extend(types.filter_map(|line| line.split(' ').next()).map(str::to_owned));
        assert!(page.contains("gantry_ready 1"), "{page}");
    }
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations/monitoring.md");
    let docs = fs::read_to_string(docs).expect("docs/operations/monitoring.md");
    let rows = docs.lines().filter_map(|line| line.strip_prefix("| `gantry_"));
    let documented: BTreeSet<_> =
        rows.filter_map(|row| row.split(['`', '{']).next()).map(|name| format!("gantry_{name}")).collect();
    assert_eq!(exported, documented);
    let (_, page) = suite.page("scheduler-0", "/metrics");
    let (_, other) = suite.page("scheduler-1", "/metrics");
    let counted = |page: &str| page.contains("gantry_rpc_calls_total{");
    assert!(counted(&page) || counted(&other), "a store was called: {page}");
    assert!(page.contains("gantry_scheduler_workers{state=\"running\"} 1"), "{page}");
    for nothing_drifts in [
        "counters_drift{counter=\"tasks\"} 0",
        "leases_drift{what=\"missing\"} 0",
        "leases_drift{what=\"stray\"} 0",
    ] {
        assert!(page.contains(&format!("gantry_scheduler_{nothing_drifts}\n")), "{nothing_drifts}: {page}");
    }
}

#[test]
fn readiness_follows_database() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::ONE, &[]);
    let kept = suite.succeed(&["run", "-d", "--", "sleep", "3600"]);
    let (databases, others) = (["scheduler-0", "artifact-store-0"], ["streamer-0", "runtime-gateway-0"]);
    let location = wait_for("it runs", || {
        let shown = suite.succeed(&["show", "workload", kept.trim(), "--json"]);
        let mut shown: Value = serde_json::from_str(&shown).expect("JSON");
        (shown["state"] == "running").then(|| shown["location"].take())
    });
    suite.postgres.stop();
    for name in databases {
        let why = suite.wait_until_not_ready(name);
        assert!(why.contains("database"), "{why}");
        let (head, body) = suite.page(name, "/readyz");
        assert!(head.contains("503") && body.contains("database"), "{head} {body}");
        assert!(suite.page(name, "/healthz").0.contains("200"), "it is alive");
        let alive = suite.health(name, "liveness");
        assert!(alive.status.success(), "{}", describe(&alive));
    }
    // A service that starts meanwhile waits, and is alive.
    suite.kill("scheduler-0");
    suite.spawn("scheduler-0");
    wait_for("it is alive", || suite.health("scheduler-0", "liveness").status.success().then_some(()));
    let why = suite.wait_until_not_ready("scheduler-0");
    assert!(why.contains("starting"), "{why}");

    suite.postgres.start();
    for name in databases.iter().chain(&others) {
        suite.wait_until_ready(name);
    }
    let (_, seen) = status(&suite);
    assert_eq!(seen["workloads"]["running"], 1, "{seen}");
    let ran = suite.succeed(&["show", "workload", kept.trim(), "--json"]);
    assert_eq!(
        serde_json::from_str::<Value>(&ran).expect("JSON")["location"],
        location,
        "it is the same attempt"
    );
    suite.succeed(&["cancel", "--grace", "0s", kept.trim()]);
    main_job(&suite, "after");
}

#[test]
fn terminated_service_hands_over_its_calls() {
    if !may_run_containers() {
        return;
    }
    let mut suite = Suite::start(Shape::ONE, &[("GANTRY_DRAIN_DELAY", "5s")]);
    let (mut run, _stdout) = started({
        let mut command = suite.gantry(&["run", "--", "sh", "-c", "echo ready; read line; exit 5"]);
        command.stdin(Stdio::piped());
        command
    });
    for name in suite.names() {
        let begun = Instant::now();
        suite.signal(&name, libc::SIGTERM);
        // A draining service reports that at once, although it is healthy, and still answers.
        wait_for("it says that it drains", || {
            let (head, body) = suite.page(&name, "/readyz");
            (head.contains("503") && body.contains("shutting down")).then_some(())
        });
        let health = suite.health(&name, "");
        assert!(
            describe(&health).contains("not serving: the process is shutting down"),
            "{}",
            describe(&health)
        );
        assert_eq!(suite.wait(&name).code(), Some(0), "{name}");
        assert!(begun.elapsed() < Duration::from_secs(14), "{name} was cut: a stream did not end");
        suite.spawn(&name);
        suite.wait_until_ready(&name);
    }
    drop(run.stdin.take());
    assert_eq!(run.wait().expect("ended").code(), Some(5));
}

#[test]
fn settings_are_checked_first() {
    let binary = |name: &str| integration_tests::gantry_binary().with_file_name(name);
    let needed = [
        ("scheduler", vec!["--database-url", "postgres://me:secret@h/d", "--artifact-store", "http://a:1"]),
        ("artifact-store", vec!["--database-url", "postgres://me:secret@h/d", "--scheduler", "http://s:1"]),
        ("streamer", vec!["--scheduler", "http://s:1", "--artifact-store", "http://a:1"]),
        (
            "runtime-gateway",
            vec!["--scheduler", "http://s:1", "--artifact-store", "http://a:1", "--streamer", "http://t:1"],
        ),
    ];
    for (name, needed) in needed {
        let run = |more: &[&str], variable: (&str, &str)| {
            let mut command = Command::new(binary(name));
            command.args(&needed).args(more).env_clear().env(variable.0, variable.1);
            command.output().expect("it runs")
        };
        let shown = run(&["--print-config", "--drain-timeout", "7s"], ("GANTRY_LISTEN", "127.0.0.1:7000"));
        assert!(shown.status.success(), "{}", describe(&shown));
        let text = String::from_utf8(shown.stdout).expect("text");
        let line = |flag: &str| {
            let line = text.lines().find(|line| line.split(' ').next() == Some(flag));
            line.unwrap_or_else(|| panic!("{flag} in {text}")).split_whitespace().skip(1).collect::<Vec<_>>()
        };
        assert_eq!(line("--listen"), ["GANTRY_LISTEN", "environment", "127.0.0.1:7000"]);
        assert_eq!(line("--drain-timeout"), ["GANTRY_DRAIN_TIMEOUT", "flag", "7s"]);
        assert_eq!(line("--probe-interval"), ["GANTRY_PROBE_INTERVAL", "default", "2s"]);
        assert!(!text.contains("secret"), "{text}");

        let refused = |more: &[&str], variable: (&str, &str), why: &str| {
            let output = run(more, variable);
            let printed = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && printed.contains(why), "{why:?}: {}", describe(&output));
        };
        let nothing = ("OTHER", "1");
        refused(&[], ("GANTRY_DRAIN_TIMEUOT", "1s"), "did you mean GANTRY_DRAIN_TIMEOUT?");
        refused(&["--drain-timeuot", "1s"], nothing, "--drain-timeuot");
        refused(&["--probe-interval", "0s"], nothing, "longer than 0");
        refused(&["--token-file", "/nonexistent/token"], nothing, "`token --token-file /nonexistent/token`");
        let help = run(&["--help"], nothing);
        let help = String::from_utf8(help.stdout).expect("text");
        for word in ["GANTRY_DRAIN_TIMEOUT", "GANTRY_METRICS_LISTEN", "health", "A DURATION is for example"] {
            assert!(help.contains(word), "{word} in {help}");
        }
    }
    let scheduler = |more: &[&str]| {
        let mut command = Command::new(binary("scheduler"));
        command.args(["--artifact-store", "http://a:1"]).args(more).env_clear();
        let output = command.output().expect("it runs");
        assert!(!output.status.success(), "{}", describe(&output));
        String::from_utf8(output.stderr).expect("text")
    };
    assert!(
        scheduler(&["--database-url", "sqlite:///x", "--stop-after", "20m"])
            .contains("--lost-after must be longer than --stop-after")
    );
    assert!(
        scheduler(&["--database-url", "sqlite:///x", "--database-schema", "its"])
            .contains("SQLite has no schemas")
    );
    assert!(scheduler(&["--database-url", "mysql://x"]).contains("postgres://"));
}

#[test]
fn services_warn_about_reachable_addresses() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    fs::write(path("token"), "a-token").expect("write");
    let database = format!("sqlite://{}", path("rows.db"));
    let store = format!("sqlite://{}", path("store.db"));
    let (state, run, token) = (path("state"), path("run"), path("token"));
    let listen = |host: &str| {
        let address = format!("{host}:0");
        ["--listen".to_owned(), address.clone(), "--metrics-listen".to_owned(), address]
    };
    let [s, a, t] = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"];
    let services = [
        ("scheduler", vec!["--database-url", &database, "--artifact-store", a]),
        ("artifact-store", vec!["--database-url", &store, "--scheduler", s]),
        ("streamer", vec!["--scheduler", s, "--artifact-store", a]),
        (
            "runtime-gateway",
            vec![
                "--scheduler",
                s,
                "--artifact-store",
                a,
                "--streamer",
                t,
                "--state-dir",
                &state,
                "--runtime-dir",
                &run,
            ],
        ),
        ("runtime-gateway", vec!["--proxy", "--scheduler", s]),
    ];
    let logged = |name: &str, own: &[&str], host: &str, who: &[&str], expected: &[[&str; 2]]| {
        let mut command = Command::new(integration_tests::gantry_binary().with_file_name(name));
        command.args(own).args(listen(host)).args(who).env_clear().stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("its log")).lines();
        for printed in expected {
            let is_it = |line: &String| printed.iter().all(|part| line.contains(part));
            let found = lines.by_ref().map_while(Result::ok).find(is_it);
            assert!(found.is_some(), "{name} {host} {who:?}: {printed:?} is not printed");
        }
        child.kill().expect("kill");
        child.wait().expect("it ends");
    };
    let file = ["must present the token of this file", &token];
    let metrics = ["INSECURE: ", "can read the metrics"];
    for (name, own) in services {
        for host in ["0.0.0.0", "127.0.0.1"] {
            let insecure = [&format!("INSECURE: {host}:"), "requires no token"];
            logged(name, &own, host, &["--insecure"], &[insecure, metrics]);
        }
        let overheard = ["INSECURE: connections to 0.0.0.0:", "are not encrypted"];
        logged(name, &own, "0.0.0.0", &["--token-file", &token], &[file, overheard, overheard]);
    }
}

/// Process that is killed on drop.
struct KillOnDrop(std::process::Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // The process may have ended already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn services_without_token_file_share_a_generated_token() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let url = |name: &str| format!("sqlite://{}", path(name).display());
    let (rows, objects) = (url("rows.db"), url("store.db"));
    let [s, a] = ["http://127.0.0.1:1", "http://127.0.0.1:2"];
    let services = [
        ("scheduler", vec!["--database-url", &rows, "--artifact-store", a]),
        ("artifact-store", vec!["--database-url", &objects, "--scheduler", s]),
        ("streamer", vec!["--scheduler", s, "--artifact-store", a]),
        ("runtime-gateway", vec!["--proxy", "--scheduler", s]),
    ];
    let command = |name: &str, state: &str| {
        let binary = integration_tests::gantry_binary();
        let mut command = Command::new(binary.with_file_name(name));
        command.env_clear().env("XDG_STATE_HOME", path(state)).env("HOME", path("home"));
        command
    };
    let log = |name: &str| path(&format!("{name}.log"));
    let printed = |name: &str| fs::read_to_string(log(name)).expect("its log");
    // All services start at the same time, and one of them makes the token.
    let processes: Vec<_> = services
        .iter()
        .map(|(name, own)| {
            let mut command = command(name, "state");
            command.args(own).args(["--log", "trace"]).stderr(fs::File::create(log(name)).expect("a log"));
            KillOnDrop(command.spawn().expect("it starts"))
        })
        .collect();
    let endpoint = |name: &str| {
        wait_for(&format!("the address of {name}"), || {
            let printed = printed(name);
            let (_, endpoint) = printed.split_once("listening endpoint=\"")?;
            Some(endpoint.split_once('"')?.0.to_owned())
        })
    };
    let endpoints: BTreeMap<_, _> = services.iter().map(|(name, _)| (*name, endpoint(name))).collect();

    let file = path("state/gantry-services/token");
    let token = fs::read_to_string(&file).expect("the token");
    let token = token.trim();
    assert_eq!(fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
    for (name, endpoint) in &endpoints {
        let ask = |state: &str| {
            let mut health = command(name, state);
            health.args(["health", "--service", "liveness", "--server", endpoint]);
            health.output().expect("it runs")
        };
        wait_for(&format!("{name}, which answers,"), || ask("state").status.success().then_some(()));
        let refused = ask("elsewhere");
        assert!(
            String::from_utf8_lossy(&refused.stderr).contains("present the token of this cluster"),
            "{name}: {}",
            describe(&refused)
        );
        assert!(!path("elsewhere").exists(), "who only asks makes no token");
    }

    // The command line finds the token, too.
    let list = |state: &str| {
        let server = ["--server", &endpoints["scheduler"], "list", "workers"];
        command("gantry", state).args(server).output().expect("gantry runs")
    };
    let listed = list("state");
    assert_eq!(code(&listed), 0, "{}", describe(&listed));
    let refused = list("elsewhere");
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(
        message.contains("UNAUTHENTICATED") && message.contains("with --token-file"),
        "{}",
        describe(&refused)
    );
    fs::create_dir_all(path("other/gantry-services")).expect("made");
    fs::write(path("other/gantry-services/token"), "another-token").expect("written");
    let refused = list("other");
    let message = String::from_utf8_lossy(&refused.stderr);
    assert!(message.contains("the default file "), "{}", describe(&refused));

    drop(processes);
    for (name, _) in services {
        let printed = printed(name);
        assert!(
            printed.contains(&file.display().to_string()),
            "{name} does not say where the token is: {printed}"
        );
        assert!(!printed.contains(token), "{name} logs the token");
    }
}

#[test]
fn schema_can_be_migrated_beforehand() {
    let directory = tempfile::tempdir().expect("a directory");
    let postgres = Server::new();
    for (program, peer, schema) in
        [("scheduler", "--artifact-store", "first"), ("artifact-store", "--scheduler", "second")]
    {
        let binary = integration_tests::gantry_binary().with_file_name(program);
        let file = format!("sqlite://{}/{program}.db", directory.path().display());
        let of_postgres = [
            ("GANTRY_DATABASE_URL", postgres.url("postgres")),
            ("GANTRY_DATABASE_SCHEMA", schema.to_owned()),
        ];
        let of_sqlite = [("GANTRY_DATABASE_URL", file)];
        for database in [&of_sqlite[..], &of_postgres] {
            let command = |arguments: &[&str]| {
                let mut command = Command::new(&binary);
                command.args(arguments).env_clear().envs(database.iter().cloned());
                command
            };
            let run = |arguments: &[&str]| command(arguments).output().expect("it runs");
            let serve = [peer, "http://127.0.0.1:1", "--insecure", "--no-migrate"];
            let refused = run(&serve);
            let printed = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && printed.contains("lacks the migrations"),
                "{}",
                describe(&refused)
            );
            let migrated = run(&["migrate"]);
            assert!(migrated.status.success(), "{}", describe(&migrated));

            let mut child = command(&serve).stderr(Stdio::piped()).spawn().expect("it starts");
            let mut lines = BufReader::new(child.stderr.take().expect("its log")).lines();
            let ready = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains(" ready")));
            assert!(ready.is_some(), "it ended instead");
            send(&child, libc::SIGTERM);
            assert_eq!(child.wait().expect("ended").code(), Some(0));
        }
    }
}

#[test]
fn watched_status_is_printed_on_change() {
    if !may_run_containers() {
        return;
    }
    let settings = [("GANTRY_WORKER_MAX_TASKS", "1"), ("GANTRY_REPORT_INTERVAL", "1s")];
    let mut suite = Suite::start(Shape::ONE, &settings);
    let mut watch = suite.gantry(&["status", "--watch", "--json"]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("gantry runs");
    let mut lines = BufReader::new(watch.stdout.take().expect("stdout")).lines();
    let mut until = |what: &str, is_it: &dyn Fn(&Value) -> bool| loop {
        let line = lines.next().unwrap_or_else(|| panic!("it ended before {what}")).expect("a line");
        let seen: Value = serde_json::from_str(&line).expect("one document a line");
        if is_it(&seen) {
            return seen;
        }
    };
    until("all is ready", &|seen| seen["workers"][0]["state"] == "running");
    let first = suite.succeed(&["run", "-d", "--", "sleep", "3600"]);
    until("one runs", &|seen| seen["workloads"]["running"] == 1);
    wait_for("a worker with its load", || {
        let text = suite.succeed(&["status"]);
        let mut lines = text.lines().map(cells);
        let shown: HashMap<_, _> = lines.next()?.into_iter().zip(lines.next()?).collect();
        let is = |column: &str, value: &str| shown.get(column) == Some(&value);
        let free = shown.get("FREE DISK").is_some_and(|free| !free.starts_with("0 B"));
        (is("TASKS", "1 of 1") && is("CONTAINERS", "1") && is("VOLUMES", "0") && free).then_some(())
    });
    let second = suite.succeed(&["run", "-d", "--", "true"]);
    let seen = until("one waits", &|seen| seen["queue"][0]["waiting_for"][0].is_string());
    assert_eq!(seen["queue"][0]["workload_id"], second.trim(), "{seen}");
    suite.succeed(&["cancel", "--grace", "0s", first.trim()]);
    until("nothing waits", &|seen| {
        seen["queue"] == Value::Array(Vec::new()) && seen["workloads"]["running"].is_null()
    });
    // A missing service is part of the status, beside the others.
    suite.kill("scheduler-0");
    let seen = until("the scheduler is missed", &|seen| seen["unseen"][0]["what"] == "workers");
    let ready = |name: &str| {
        let services = seen["services"].as_array().expect("services");
        services.iter().find(|service| service["service"] == name).expect(name)["ready"].clone()
    };
    assert_eq!(
        (ready("scheduler"), ready("artifact-store")),
        (Value::from(false), Value::from(true)),
        "{seen}"
    );
    let output = suite.gantry(&["status"]).output().expect("gantry runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(code(&output) == 1 && text.starts_with("cannot list workers: "), "{}", describe(&output));
    suite.spawn("scheduler-0");
    until("all is seen again", &|seen| seen["unseen"] == Value::Array(Vec::new()));
    send(&watch, libc::SIGINT);
    assert_eq!(watch.wait().expect("ended").code(), Some(130));
}

/// Splits a line into its columns.
fn cells(line: &str) -> Vec<&str> {
    line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}
