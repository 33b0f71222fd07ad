//! Pipeline on the whole suite: two replicas of each service, three workers on separate machines,
//! and a proxy for all callers. Each process is killed and started again, one worker is rebooted,
//! and one is removed for good.
//!
//! Each process connects to the test before anything else, and then waits for the test. So the test
//! decides which processes run when a service dies, and notices a process that runs twice.
//!
//! A process on the rebooted machine ends as `errored(WORKER_LOST)` and is not started again. All
//! others end with their own exit code, their complete output and the right bytes. Watchers follow
//! them through the proxy, across all failures.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::Duration;

use integration_tests::suite::{Shape, Suite};
use integration_tests::{code, describe, may_run_containers, wait_for};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::DeleteBuildRequest;
use rpc::pb::artifacts::owners_client::OwnersClient;
use serde_json::Value;

const SHAPE: Shape = Shape { schedulers: 2, stores: 2, streamers: 2, gateways: 3, proxies: 1 };

/// Number of tasks per worker. Artifacts that are made at the same time are made on different
/// workers.
const SETTINGS: &[(&str, &str)] = &[
    ("GANTRY_WORKER_MAX_TASKS", "1"),
    ("GANTRY_HEARTBEAT", "500ms"),
    ("GANTRY_WORKER_TTL", "5s"),
    ("GANTRY_STOP_AFTER", "20s"),
    ("GANTRY_LOST_AFTER", "25s"),
    // Long enough for a watcher to return for the output of a process that has ended.
    ("GANTRY_GC_GRACE", "20s"),
    ("GANTRY_COLLECT_INTERVAL", "1s"),
    ("GANTRY_REPORT_INTERVAL", "1s"),
];

/// Indexes of the two earlier workloads whose outputs each workload takes. The first three take two
/// of three uploads.
const TAKES: [(usize, usize); 10] =
    [(0, 1), (1, 2), (0, 2), (0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (7, 8)];

/// Processes that have started and wait for the test.
struct Gate {
    listener: TcpListener,
    waiting: BTreeMap<String, TcpStream>,
    begun: Vec<String>,
}

impl Gate {
    fn new(address: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).expect("a port");
        listener.set_nonblocking(true).expect("set");
        Self { listener, waiting: BTreeMap::new(), begun: Vec::new() }
    }

    /// Shell commands with which each process starts.
    fn script(&self, name: &str) -> String {
        let address = self.listener.local_addr().expect("bound");
        let (host, port) = (address.ip(), address.port());
        format!(
            "exec 3<>/dev/tcp/{host}/{port} || exit 99; echo {name} >&3; echo begin {name}; read -r word <&3; [ \"$word\" = go ] || exit 98; exec 3>&-; "
        )
    }

    fn let_in(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
            let mut name = String::new();
            BufReader::new(&stream).read_line(&mut name).expect("its name");
            self.begun.push(name.trim().to_owned());
            self.waiting.insert(name.trim().to_owned(), stream);
        }
    }

    fn wait_for(&mut self, name: &str) {
        wait_for(&format!("the process of {name}"), || {
            self.let_in();
            self.waiting.contains_key(name).then_some(())
        });
    }

    fn release(&mut self, name: &str) {
        let mut stream = self.waiting.remove(name).expect("it waits");
        stream.write_all(b"go\n").expect("it listens");
    }

    /// Returns all processes that have started, each of which did so once.
    fn once(&mut self) -> BTreeSet<String> {
        self.let_in();
        let begun: BTreeSet<_> = self.begun.iter().cloned().collect();
        assert_eq!(begun.len(), self.begun.len(), "one ran twice: {:?}", self.begun);
        begun
    }
}

/// Workload of the pipeline, with a watcher through the proxy.
struct WatchedWorkload {
    name: String,
    id: String,
    watcher: Child,
}

struct Scene {
    suite: Suite,
    gate: Gate,
    handles: BTreeSet<String>,
    /// Names of the services that have received calls.
    useful: BTreeSet<String>,
}

impl Scene {
    fn show(&self, kind: &str, id: &str) -> Value {
        // A call may fail while a service is being killed.
        wait_for(&format!("{kind} {id}"), || {
            let output = self.suite.gantry(&["show", kind, id, "--json"]).output().expect("gantry runs");
            serde_json::from_slice(output.stdout.trim_ascii()).ok()
        })
    }

    fn list(&self, kind: &str) -> Vec<Value> {
        let listed = self.suite.succeed(&["list", kind, "--json"]);
        listed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Submits workload `number` of the pipeline under the name `name`.
    fn submit(&self, number: usize, name: &str, made: &[Option<String>]) -> WatchedWorkload {
        let (left, right) = TAKES[number];
        let input = |letter: &str, from: usize| match number {
            0..3 => format!("{letter}={}", self.suite.path(&format!("upload-{from}")).display()),
            _ => format!("{letter}=artifact:{}", made[from].as_ref().expect("it was made")),
        };
        let script = format!(
            "{}mkdir out/deep; {{ echo {number}; cat a/deep/data b/deep/data; }} >out/deep/data; echo end {name}; exit {number}",
            self.gate.script(name)
        );
        let (a, b) = (input("a", left), input("b", right));
        let id =
            self.suite.succeed(&["run", "-d", "-i", &a, "-i", &b, "-o", "out", "--", "bash", "-c", &script]);
        self.watch(name, id.trim())
    }

    /// Submits a workload that takes all of these artifacts.
    fn submit_copy(&self, name: &str, artifacts: &[String]) -> WatchedWorkload {
        let script = format!("{}echo end {name}", self.gate.script(name));
        let inputs = artifacts.iter().enumerate().map(|(n, id)| format!("in{n}=artifact:{id}"));
        let inputs: Vec<_> = inputs.flat_map(|input| ["-i".to_owned(), input]).collect();
        let mut run = vec!["run", "-d"];
        run.extend(inputs.iter().map(String::as_str));
        run.extend(["-o", "out", "--", "bash", "-c", &script]);
        let id = self.suite.succeed(&run);
        self.watch(name, id.trim())
    }

    fn watch(&self, name: &str, id: &str) -> WatchedWorkload {
        let mut watcher = self.suite.gantry(&["attach", id]);
        let watcher = watcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry runs");
        WatchedWorkload { name: name.to_owned(), id: id.to_owned(), watcher }
    }

    /// Submits some workloads of the pipeline, and returns when their processes have started.
    fn submit_all(&self, numbers: std::ops::Range<usize>, made: &[Option<String>]) -> Vec<WatchedWorkload> {
        numbers.map(|number| self.submit(number, &number.to_string(), made)).collect()
    }

    fn all_wait(&mut self, watched: &[WatchedWorkload]) {
        for one in watched {
            self.gate.wait_for(&one.name);
        }
        for index in 0..SHAPE.gateways {
            self.handles.extend(self.suite.machines().handles(index));
        }
    }

    /// Waits for the end, checks the output, and returns the artifact.
    fn end(&self, watched: WatchedWorkload) -> String {
        let finished = wait_for(&format!("the end of {}", watched.name), || {
            let shown = self.show("workload", &watched.id);
            (shown["state"] == "finished").then_some(shown)
        });
        let output = watched.watcher.wait_with_output().expect("it ends");
        let name = &watched.name;
        let number: i64 = name.split('-').next().and_then(|number| number.parse().ok()).expect("a number");
        assert_eq!(finished["exit"]["code"], number, "{finished} {}", describe(&output));
        assert_eq!(i64::from(code(&output)), number, "{}", describe(&output));
        // No output is lost or repeated, whichever service failed meanwhile.
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(printed, format!("begin {name}\nend {name}\n"), "{}", describe(&output));
        finished["outputs"][0]["artifact_id"].as_str().unwrap_or_else(|| panic!("{finished}")).to_owned()
    }

    fn end_all(&mut self, watched: Vec<WatchedWorkload>, made: &mut Vec<Option<String>>) {
        for one in &watched {
            self.gate.release(&one.name);
        }
        for one in watched {
            let artifact = self.end(one);
            made.push(Some(artifact));
        }
    }

    /// Returns the worker of a workload.
    fn worker_of(&self, watched: &WatchedWorkload) -> usize {
        let name = self.show("workload", &watched.id)["location"]["worker_name"].clone();
        let number = name.as_str().and_then(|name| name.strip_prefix("worker-")?.parse().ok());
        number.unwrap_or_else(|| panic!("{name} is no worker"))
    }

    /// Records whether a service received calls other than health checks.
    fn ask_what_it_did(&mut self, name: &str) {
        let (_, page) = self.suite.page(name, "/metrics");
        let calls = page.lines().filter(|line| {
            line.starts_with("gantry_rpc_calls_total{") || line.starts_with("gantry_rpc_in_flight{")
        });
        let called = |line: &str| {
            line.contains("service=\"gantry.")
                && !line.contains("gantry.capabilities.")
                && !line.ends_with(" 0")
        };
        if calls.into_iter().any(called) {
            self.useful.insert(name.to_owned());
        }
    }

    fn replace(&mut self, name: &str) {
        self.ask_what_it_did(name);
        self.suite.kill(name);
        self.suite.spawn(name);
    }

    fn ready(&self, names: &[&str]) {
        names.iter().for_each(|name| self.suite.wait_until_ready(name));
    }

    /// Returns, for each artifact, the ids of the workers with complete replicas.
    fn replicas(&self, artifact: &str) -> BTreeSet<String> {
        let shown = self.show("artifact", artifact);
        let replicas = shown["replicas"].as_array().expect("replicas");
        replicas.iter().map(|replica| replica["worker_id"].as_str().expect("an id").to_owned()).collect()
    }

    fn worker_id(&self, index: usize) -> String {
        self.show("worker", &format!("worker-{index}"))["worker_id"].as_str().expect("an id").to_owned()
    }

    /// Removes everything that keeps artifacts.
    fn let_go(&self) {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let outgoing = Outgoing::internal().with_token(Some(self.suite.token()));
            let store = peer(self.suite.address("artifact-store-0"), outgoing).expect("an address");
            for workload in self.list("workloads") {
                let build_id = workload["spec"]["build_id"].as_str().expect("a build").to_owned();
                let request = DeleteBuildRequest { team: "main".to_owned(), build_id };
                OwnersClient::new(store.clone()).delete_build(request).await.expect("it is let go");
            }
        });
    }
}

/// Returns the bytes that each workload makes.
fn expected(uploads: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut made: Vec<Vec<u8>> = Vec::new();
    for (number, (left, right)) in TAKES.into_iter().enumerate() {
        let from = if number < 3 { uploads } else { &made };
        made.push([format!("{number}\n").as_bytes(), &from[left], &from[right]].concat());
    }
    made
}

#[test]
#[ignore = "slow: make full"]
fn pipeline_survives_death_of_each_process() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start_on_machines(SHAPE, SETTINGS);
    let gate = Gate::new(&suite.machines().own_address());
    let mut scene = Scene { suite, gate, handles: BTreeSet::new(), useful: BTreeSet::new() };
    let uploads: Vec<Vec<u8>> = (0..3_u32)
        .map(|seed| (0..300_000_u32).map(|n| ((n ^ seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect())
        .collect();
    for (index, bytes) in uploads.iter().enumerate() {
        let directory = scene.suite.path(&format!("upload-{index}/deep"));
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("data"), bytes).expect("a file");
    }
    main_job(&scene);
    let mut made = Vec::new();

    // The first three run while each scheduler and the proxy die in turn.
    let first = scene.submit_all(0..3, &made);
    scene.all_wait(&first);
    let workers: BTreeSet<_> = first.iter().map(|one| scene.worker_of(one)).collect();
    assert_eq!(workers.len(), SHAPE.gateways, "each has one");
    for name in ["scheduler-0", "scheduler-1", "proxy-0"] {
        scene.replace(name);
        scene.ready(&[name]);
    }
    scene.end_all(first, &mut made);

    // The next three take outputs of two workers each, while stores and streamers die.
    let next = scene.submit_all(3..6, &made);
    for name in ["streamer-0", "artifact-store-0"] {
        scene.replace(name);
    }
    scene.ready(&["streamer-0", "artifact-store-0"]);
    for name in ["streamer-1", "artifact-store-1"] {
        scene.replace(name);
    }
    scene.all_wait(&next);
    scene.ready(&["streamer-1", "artifact-store-1"]);
    let crossed = made.iter().flatten().filter(|artifact| scene.replicas(artifact).len() > 1).count();
    assert_eq!(crossed, 3, "each of the first outputs is needed by two workers, at the same time");

    // One of them loses its machine. Its process has run, so it is not retried: it ends as lost,
    // and is submitted again.
    let [third, mut fourth, fifth] = <[WatchedWorkload; 3]>::try_from(next).map_err(|_| ()).expect("three");
    scene.suite.reboot(scene.worker_of(&fourth));
    let lost = wait_for("the end of what ran on the machine", || {
        let shown = scene.show("workload", &fourth.id);
        (shown["state"] == "finished").then_some(shown)
    });
    assert_eq!(
        (&lost["outcome"], &lost["failure"]["reason"]),
        (&"errored".into(), &"WORKER_LOST".into()),
        "{lost}"
    );
    let output = fourth.watcher.wait_with_output().expect("it ends");
    assert_eq!(code(&output), 125, "{}", describe(&output));
    fourth = scene.submit(4, "4-again", &made);
    let next = vec![third, fourth, fifth];
    scene.all_wait(&next);
    scene.end_all(next, &mut made);

    // One of the next three ends while no gateway runs.
    let last = scene.submit_all(6..9, &made);
    scene.all_wait(&last);
    let doomed = scene.worker_of(&last[2]);
    for index in 0..SHAPE.gateways {
        scene.suite.kill(&format!("runtime-gateway-{index}"));
    }
    scene.gate.release(&last[0].name);
    for index in 0..SHAPE.gateways {
        scene.suite.spawn(&format!("runtime-gateway-{index}"));
    }
    for one in &last[1..] {
        scene.gate.release(&one.name);
    }
    for one in last {
        let artifact = scene.end(one);
        made.push(Some(artifact));
    }
    scene.ready(&["runtime-gateway-0", "runtime-gateway-1", "runtime-gateway-2"]);

    // An artifact of a single worker becomes an input on every worker, and so is copied. Then that
    // worker is removed for good.
    let gone = scene.worker_id(doomed);
    let only_there = |artifact: &&String| scene.replicas(artifact) == BTreeSet::from([gone.clone()]);
    let only: Vec<_> = made.iter().flatten().filter(only_there).cloned().collect();
    assert!(!only.is_empty(), "it has at least what it made last");
    let copies: Vec<_> =
        (0..SHAPE.gateways).map(|copy| scene.submit_copy(&format!("0-copy-{copy}"), &only)).collect();
    scene.all_wait(&copies);
    for copy in copies {
        scene.gate.release(&copy.name);
        scene.end(copy);
    }
    scene.suite.remove_machine(doomed);
    let tenth = scene.submit_all(9..10, &made);
    scene.all_wait(&tenth);
    scene.end_all(tenth, &mut made);

    for (number, bytes) in expected(&uploads).iter().enumerate() {
        let artifact = made[number].as_ref().expect("it was made");
        let to = scene.suite.path(&format!("out-{number}"));
        scene.suite.succeed(&["download", artifact, to.to_str().expect("UTF-8")]);
        let there = fs::read(to.join("deep/data")).expect("the output");
        assert!(there == *bytes, "{number} has {} bytes instead of {}", there.len(), bytes.len());
    }
    let begun = scene.gate.once();
    let all = (0..10).map(|number| number.to_string()).chain(["4-again".to_owned()]);
    let all: BTreeSet<_> = all.chain((0..SHAPE.gateways).map(|copy| format!("0-copy-{copy}"))).collect();
    assert_eq!(begun, all);
    nothing_is_left(&scene, doomed);
    // Neither of two artifacts had its only replica there.
    let own = format!("runtime-gateway-{doomed}");
    for name in scene.suite.names().into_iter().filter(|name| *name != own) {
        scene.ask_what_it_did(&name);
        assert!(scene.useful.contains(&name), "{name} did nothing: {:?}", scene.useful);
    }
}

fn main_job(scene: &Scene) {
    let (upload, out) = (scene.suite.path("upload-0"), scene.suite.path("main"));
    let (input, output) = (format!("src={}", upload.display()), format!("out={}", out.display()));
    let script = "cat src/deep/data src/deep/data >out/twice; echo seen; exit 7";
    let command = ["run", "-i", &input, "-o", &output, "--", "sh", "-c", script];
    let ran = scene.suite.gantry(&command).output().expect("gantry runs");
    assert_eq!((code(&ran), ran.stdout.as_slice()), (7, b"seen\n".as_slice()), "{}", describe(&ran));
    let bytes = fs::read(upload.join("deep/data")).expect("a file");
    assert!(fs::read(out.join("twice")).expect("brought back") == [bytes.as_slice(), &bytes].concat());
}

/// Checks that nothing is left once all artifacts are released and the worker `gone` is pruned: no
/// row, lease, pin, file, mount, process or control group.
fn nothing_is_left(scene: &Scene, gone: usize) {
    scene.let_go();
    // No --force is needed, because no kept artifact had its only replica there.
    wait_for("the worker that is gone is forgotten", || {
        let pruned = scene.suite.gantry(&["prune", &format!("worker-{gone}")]).output().expect("gantry runs");
        pruned.status.success().then_some(())
    });
    let held = || {
        let rows = [
            ("leases", "SELECT id || ' ' || state FROM its_scheduler.leases WHERE state <> 'ended'"),
            ("pins", "SELECT holder_id || ' ' || artifact_id FROM its_store.pins"),
        ];
        let held = rows.map(|(what, sql)| {
            let rows = scene.suite.postgres.query(sql);
            rows.into_iter().map(move |row| format!("{what} {row}"))
        });
        held.into_iter().flatten()
    };
    let mut left = Vec::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    loop {
        left.clear();
        for kind in ["artifacts", "volumes", "containers"] {
            // A tombstone records why an artifact was deleted, and expires later.
            let live = |row: &Value| kind != "artifacts" || row["state"] != "deleting";
            left.extend(scene.list(kind).into_iter().filter(live).map(|row| format!("{kind} {row}")));
        }
        for index in (0..SHAPE.gateways).filter(|index| *index != gone) {
            left.extend(scene.suite.machines().held(index));
        }
        let groups = integration_tests::snapshot::cgroups();
        let ours = |group: &String| scene.handles.iter().any(|handle| group.contains(handle));
        left.extend(groups.into_iter().filter(ours).map(|group| format!("cgroup {group}")));
        left.extend(held());
        if left.is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{left:#?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
