//! Services beside the process of a workload.

use std::process::Output;
use std::time::Duration;

use integration_tests::{Cluster, code, describe, id, may_run_containers, wait_for};

/// Program of a service that answers each connection with its text, after a delay.
fn server(port: u16, text: &str, delay: Duration) -> String {
    let delay = delay.as_secs_f64();
    format!(
        "exec python3 -uc \"import socket, time; print('{text} starts'); time.sleep({delay})
s = socket.create_server(('127.0.0.1', {port}))
while True: c = s.accept()[0]; c.sendall(b'{text}'); c.close()\""
    )
}

/// Shell command that prints the answer of a server.
fn client(host: &str, port: u16) -> String {
    format!(
        "python3 -c \"import socket; print(socket.create_connection(('{host}', {port})).recv(99).decode())\""
    )
}

fn service(name: &str, options: &str, command: &str) -> String {
    format!("{name}=host{options},command={command}")
}

fn run(cluster: &Cluster, services: &[String], script: &str) -> Output {
    let mut arguments = vec!["run", "--no-stdin"];
    for service in services {
        arguments.extend(["--service", service]);
    }
    arguments.extend(["--", "sh", "-c", script]);
    cluster.output(arguments)
}

/// Submits a workload, and returns its id.
fn submit(cluster: &Cluster, services: &[String], script: &str) -> String {
    let mut arguments = vec!["run", "-d"];
    for service in services {
        arguments.extend(["--service", service]);
    }
    arguments.extend(["--", "sh", "-c", script]);
    id(cluster.succeed(arguments))
}

fn shown(cluster: &Cluster, workload: &str) -> serde_json::Value {
    let shown = cluster.succeed(["show", "workload", workload, "--json"]);
    serde_json::from_slice(shown.trim_ascii()).expect("JSON")
}

fn wait_until_running(cluster: &Cluster, workload: &str) {
    let state = || shown(cluster, workload)["state"].clone();
    wait_for("the start of the workload", || (state() == "running").then_some(()));
}

fn finished(cluster: &Cluster, workload: &str) -> serde_json::Value {
    wait_for("the end of the workload", || {
        Some(shown(cluster, workload)).filter(|workload| workload["state"] == "finished")
    })
}

#[test]
fn process_reaches_services_by_name_and_at_localhost() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let services = [
        service("db", ",port=5001", &server(5001, "db", Duration::from_millis(500))),
        // It starts only when the first one is ready, and reaches it, too.
        service(
            "front",
            ",ready=test -e /tmp/up",
            &format!("{} && touch /tmp/up && sleep 1000", client("db", 5001)),
        ),
    ];
    let script = format!("{}; {}; grep -cw db /etc/hosts", client("db", 5001), client("localhost", 5001));
    let output = run(&cluster, &services, &script);
    assert_eq!(code(&output), 0, "{}", describe(&output));
    assert_eq!(output.stdout, b"db\ndb\n1\n");

    // The network of such a workload may be one without other machines.
    let mut arguments =
        vec!["run", "--no-stdin", "--network", "none", "--service", &services[0], "--", "sh", "-c"];
    let script = client("db", 5001);
    arguments.push(&script);
    assert_eq!(cluster.succeed(arguments), b"db\n");
}

#[test]
fn output_of_services_is_kept() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let program = format!("echo kept > of-db; {}", server(5002, "db", Duration::ZERO));
    let services = [service("db", ",port=5002", &program)];
    let workload = submit(&cluster, &services, "echo main");
    let ended = finished(&cluster, &workload);
    assert_eq!(ended["outcome"], "succeeded", "{ended}");
    assert_eq!(
        (&ended["spec"]["services"][0]["name"], &ended["spec"]["services"][0]["image"]),
        (&"db".into(), &"host".into())
    );
    assert_eq!(cluster.succeed(["logs", "--service", "db", &workload]), b"db starts\n");
    assert_eq!(cluster.succeed(["logs", &workload]), b"main\n");
    let command = ["exec", "--service", "db", &workload, "--", "cat", "of-db"];
    assert_eq!(cluster.succeed(command), b"kept\n", "its files are kept, too");
    let output = cluster.output(["logs", "--service", "other", &workload]);
    assert_eq!(code(&output), 125, "{}", describe(&output));
    assert!(describe(&output).contains("its services: db"), "{}", describe(&output));
}

#[test]
fn service_that_is_not_ready_fails_workload() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    for (service, text) in [
        (service("db", ",port=5003", "echo no disk >&2; exit 4"), "service db ended with exit code 4 before"),
        // It may end while the process is being started.
        (service("db", ",essential", "echo no disk; exit 4"), "service db ended with exit code 4 before"),
        (
            service("db", ",port=5003,timeout=1s", "echo no disk; exec sleep 1000"),
            "service db was not ready within 1s: nothing accepts connections at 127.0.0.1:5003",
        ),
        (
            service("db", ",ready=false,timeout=5s", "echo no disk; exec sleep 1000"),
            "its readiness command ended with exit code 1",
        ),
    ] {
        let output = run(&cluster, &[service], "sleep 1000");
        assert_eq!(code(&output), 125, "{}", describe(&output));
        let described = describe(&output);
        assert!(described.contains("SERVICE_FAILED") && described.contains(text), "{described}");
        let is_stopped = described.contains("too early");
        assert!(is_stopped || described.contains("the end of its output: no disk"), "{described}");
    }
    let workers = cluster.succeed(["list", "workers", "--json"]);
    let worker: serde_json::Value = serde_json::from_slice(workers.trim_ascii()).expect("JSON");
    assert_eq!(worker["failures"], 0, "{worker}");
}

#[test]
fn services_stop_in_reverse_order_outside_of_run_timeout() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // The second service ends at KILL, 10 s after TERM, which is later than the run timeout.
    let services = [
        service("first", "", "trap 'date +%s; exit 0' TERM; while :; do sleep 0.05; done"),
        service("second", "", "date +%s; trap '' TERM; while :; do sleep 0.05; done"),
    ];
    let mut arguments = vec!["run", "-d", "--timeout", "8s"];
    for service in &services {
        arguments.extend(["--service", service]);
    }
    arguments.extend(["--", "true"]);
    let workload = id(cluster.succeed(arguments));
    let ended = finished(&cluster, &workload);
    assert_eq!(ended["outcome"], "succeeded", "{ended}");
    let [first, second] = ["first", "second"].map(|name| {
        let output = cluster.succeed(["logs", "--service", name, &workload]);
        String::from_utf8_lossy(output.trim_ascii()).parse::<u64>().expect("a time in seconds")
    });
    assert!(first >= second + 9, "the first is stopped {} s after the start of the second", first - second);
}

#[test]
fn end_of_service_fails_workload_only_if_essential() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    // The command lets the service end.
    let serves = |port: u16, options: &str| {
        let program = format!(
            "exec python3 -c \"import socket, sys; socket.create_server(('127.0.0.1', {port})).accept(); sys.exit(3)\""
        );
        service("db", options, &format!("touch /tmp/up; {program}"))
    };
    let end = |port: u16| {
        let connect = format!(
            "import socket, time
while True:
    try: socket.create_connection(('db', {port})); break
    except ConnectionRefusedError: time.sleep(0.05)"
        );
        format!("python3 -c \"{connect}\"")
    };
    let script = format!("{}; while ! test -e /tmp/go; do sleep 0.1; done", end(5004));
    let workload = submit(&cluster, &[serves(5004, ",ready=test -e /tmp/up")], &script);
    wait_until_running(&cluster, &workload);
    cluster.succeed(["logs", "-f", "--service", "db", &workload]);
    cluster.let_go(&workload);
    let ended = finished(&cluster, &workload);
    assert_eq!(ended["outcome"], "succeeded", "{ended}");
    assert!(ended.to_string().contains("service db ended with exit code 3 too early"), "{ended}");

    let essential = serves(5005, ",ready=test -e /tmp/up,essential");
    let workload = submit(&cluster, &[essential], &format!("{}; sleep 1000", end(5005)));
    let ended = finished(&cluster, &workload);
    assert_eq!(
        (&ended["outcome"], &ended["failure"]["reason"]),
        (&"errored".into(), &"SERVICE_FAILED".into())
    );
}

#[test]
fn gateway_that_dies_while_services_start_starts_each_once() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let services = [
        service("db", ",port=5007", &server(5007, "db", Duration::ZERO)),
        service("slow", ",ready=test -e /tmp/up", "echo starts; sleep 3; touch /tmp/up; sleep 1000"),
    ];
    let workload = submit(&cluster, &services, &client("db", 5007));
    wait_for("the start of the services", || {
        (shown(&cluster, &workload)["state"] == "starting").then_some(())
    });
    cluster.kill();
    let ended = finished(&cluster, &workload);
    assert_eq!(ended["outcome"], "succeeded", "{ended}");
    assert_eq!(cluster.succeed(["logs", &workload]), b"db\n");
    assert_eq!(cluster.succeed(["logs", "--service", "slow", &workload]), b"starts\n", "it started once");
}

#[test]
fn services_survive_the_death_of_their_gateway() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    let services = [service("db", ",port=5006", &server(5006, "db", Duration::ZERO))];
    let script = format!("{0}; while ! test -e /tmp/go; do sleep 0.1; done; {0}", client("db", 5006));
    let workload = submit(&cluster, &services, &script);
    wait_until_running(&cluster, &workload);
    cluster.kill();
    cluster.let_go(&workload);
    let ended = finished(&cluster, &workload);
    assert_eq!(ended["outcome"], "succeeded", "{ended}");
    assert_eq!(cluster.succeed(["logs", &workload]), b"db\ndb\n");
    assert_eq!(cluster.succeed(["logs", "--service", "db", &workload]), b"db starts\n", "it started once");
}
