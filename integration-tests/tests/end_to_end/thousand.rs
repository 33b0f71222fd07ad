//! A thousand workloads on twenty workers with limits, while schedulers and gateways are killed. No
//! worker exceeds its limit, no workload runs twice or is lost, and in the end every slot is free.
//!
//! Each process records where and when it starts and ends. Its worker is the one whose directories
//! are mounted in its container. It records over a connection to the test, and then waits for the
//! test, so a waiting process certainly runs on its worker. The killed services and the moments are
//! random. The seed is printed, and `GANTRY_SEED` repeats it.
//!
//! The distribution of load is checked while only placement decides it: all workers run, no service
//! was killed, and no process has continued. When all slots are used, all workers run the same
//! number. The largest difference before that, when four of five slots were granted, is printed.
//! The wait that each workload reports gives the time of its placement. While workers are away,
//! their loads say nothing about placement.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{may_run_containers, wait_for};
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;

const SHAPE: Shape = Shape { schedulers: 2, gateways: WORKERS, ..Shape::ONE };
const WORKERS: usize = 20;
const SLOTS: usize = 15;
const WORKLOADS: usize = 1000;
/// Number of callers that submit at the same time.
const CALLERS: usize = 16;
/// Number of processes that continue together once services are killed.
const TOGETHER: usize = 120;

/// Random number generator.
pub(crate) struct RandomNumbers(u64);

impl RandomNumbers {
    fn new() -> Self {
        let seed = testing::seeds::seed();
        eprintln!("GANTRY_SEED={seed}");
        Self(seed)
    }

    pub(crate) fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number from 0 to `end`, exclusive.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).expect("small")
    }
}

/// Process that waits for the test.
struct WaitingProcess {
    name: usize,
    worker: usize,
    begun: u64,
    stream: BufReader<TcpStream>,
}

/// Record of a process about itself.
#[derive(Debug, Clone, Copy)]
struct ProcessRecord {
    name: usize,
    worker: usize,
    /// Times by the clock of the machine, in microseconds.
    begun: u64,
    ended: u64,
}

/// Server at which processes wait.
struct Gate {
    listener: TcpListener,
    waiting: Vec<WaitingProcess>,
    ran: Vec<ProcessRecord>,
}

impl Gate {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("set");
        Self { listener, waiting: Vec::new(), ran: Vec::new() }
    }

    fn script(&self, name: usize) -> String {
        let address = self.listener.local_addr().expect("bound");
        let (host, port) = (address.ip(), address.port());
        format!(
            "exec 3<>/dev/tcp/{host}/{port} || exit 99
             mounts=$(</proc/self/mountinfo)
             [[ $mounts =~ /state-([0-9]+)/ ]] || exit 97
             echo {name} ${{BASH_REMATCH[1]}} ${{EPOCHREALTIME/[.,]/}} >&3
             read -r word <&3; [ \"$word\" = go ] || exit 98
             echo ${{EPOCHREALTIME/[.,]/}} >&3"
        )
    }

    fn let_in(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line).expect("what it says");
            let words: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
            let &[name, worker, begun] = &words[..] else { panic!("a process says {line:?}") };
            let small = |number| usize::try_from(number).expect("small");
            self.waiting.push(WaitingProcess { name: small(name), worker: small(worker), begun, stream });
        }
        for (worker, count) in self.load().into_iter().enumerate() {
            assert!(count <= SLOTS, "worker-{worker} runs {count} at once");
        }
    }

    /// Counts the waiting processes of each worker.
    fn load(&self) -> Vec<usize> {
        let mut load = vec![0; WORKERS];
        self.waiting.iter().for_each(|waiting| load[waiting.worker] += 1);
        load
    }

    /// Waits until this many processes wait.
    fn wait_for(&mut self, count: usize) {
        wait_for(&format!("{count} processes at once"), || {
            self.let_in();
            (self.waiting.len() >= count).then_some(())
        });
    }

    /// Lets all waiting processes continue, and waits for their ends.
    fn release(&mut self) {
        for waiting in &mut self.waiting {
            waiting.stream.get_mut().write_all(b"go\n").expect("it listens");
        }
        for WaitingProcess { name, worker, begun, mut stream } in std::mem::take(&mut self.waiting) {
            let mut end = String::new();
            stream.read_to_string(&mut end).expect("what it says at its end");
            let ended = end.trim().parse().unwrap_or_else(|_| panic!("{name} ends with {end:?}"));
            self.ran.push(ProcessRecord { name, worker, begun, ended });
        }
    }
}

/// Returns the maximum number of simultaneous processes of each worker.
fn most_at_once(ran: &[ProcessRecord]) -> Vec<usize> {
    let most = |worker: usize| {
        let own = ran.iter().filter(|ran| ran.worker == worker);
        // At the same instant, ends come before starts.
        let mut changes: Vec<_> = own.flat_map(|ran| [(ran.begun, 1), (ran.ended, -1)]).collect();
        changes.sort_unstable();
        let mut now = 0_i64;
        let counts = changes.into_iter().map(|(_, change)| {
            now += change;
            usize::try_from(now).unwrap_or(0)
        });
        counts.max().unwrap_or(0)
    };
    (0..WORKERS).map(most).collect()
}

struct Scene {
    suite: Suite,
    gate: Gate,
    tokio: tokio::runtime::Runtime,
    /// Addresses of both schedulers.
    schedulers: String,
}

impl Scene {
    fn workloads(&self) -> WorkloadsClient<rpc::Peer> {
        // The client connects in the background.
        let _inside = self.tokio.enter();
        let outgoing = Outgoing::internal().with_token(Some(self.suite.token()));
        WorkloadsClient::new(peer(&self.schedulers, outgoing).expect("addresses"))
    }

    /// Submits all workloads, with several callers at the same time.
    fn submit(&self) {
        let mut callers = tokio::task::JoinSet::new();
        for caller in 0..CALLERS {
            let requests: Vec<_> = (caller..WORKLOADS)
                .step_by(CALLERS)
                .map(|name| pb::SubmitRequest {
                    workload_id: workload_id(name),
                    spec: Some(spec(self.gate.script(name))),
                })
                .collect();
            let mut client = self.workloads();
            let submit = async move {
                for request in requests {
                    client.submit(request).await.expect("it is accepted");
                }
            };
            callers.spawn_on(submit, self.tokio.handle());
        }
        self.tokio.block_on(callers.join_all());
    }

    /// Lists all workloads. `None`: no scheduler answers.
    fn all(&self) -> Option<Vec<pb::Workload>> {
        let mut client = self.workloads();
        let mut all = Vec::new();
        let mut request =
            pb::ListRequest { team: "main".to_owned(), page_size: 500, ..pb::ListRequest::default() };
        loop {
            let page = self.tokio.block_on(client.list(request.clone())).ok()?.into_inner();
            all.extend(page.workloads);
            if page.next_page_token.is_empty() {
                return Some(all);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// Waits until all workloads have finished and all slots are free.
    fn wait_until_finished(&self) {
        wait_for("the end of all", || {
            let listed = self.suite.gantry(&["list", "workers", "--json"]).output().expect("gantry runs");
            let listed = String::from_utf8(listed.stdout).expect("text");
            let workers: Vec<serde_json::Value> =
                listed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
            let free = |worker: &serde_json::Value| {
                worker["state"] == "running" && worker["active_tasks"] == 0 && worker["leases"] == 0
            };
            let free = workers.len() == WORKERS && workers.iter().all(free);
            let finished =
                || self.all().map_or(0, |all| all.iter().filter(|one| one.finished_at.is_some()).count());
            (free && finished() == WORKLOADS).then_some(())
        });
    }
}

/// Returns the time at which the last attempt of a workload was placed, in microseconds.
fn placed_at(workload: &pb::Workload) -> i64 {
    let submitted = rpc::from_timestamp(&workload.submitted_at.expect("it was submitted"));
    let queued = workload.usage.and_then(|usage| usage.queued).expect("it was placed");
    submitted.0 + queued.seconds * 1_000_000 + i64::from(queued.nanos / 1000)
}

fn workload_id(name: usize) -> String {
    format!("0197c1a2-0000-7000-8000-{name:012x}")
}

fn spec(script: String) -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None }),
        command: ["bash", "-c", &script].map(|word| word.as_bytes().to_vec().into()).to_vec(),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Host.into(),
        ..pb::WorkloadSpec::default()
    }
}

#[test]
#[ignore = "slow: make full"]
fn thousand_workloads_respect_limits_of_workers() {
    if !may_run_containers() {
        return;
    }
    let mut dice = RandomNumbers::new();
    let slots = SLOTS.to_string();
    let settings: Vec<_> =
        SHORT_TERMS.iter().copied().chain([("GANTRY_WORKER_MAX_TASKS", slots.as_str())]).collect();
    let suite = Suite::start(SHAPE, &settings);
    let schedulers = format!("{},{}", suite.address("scheduler-0"), suite.address("scheduler-1"));
    let tokio = tokio::runtime::Runtime::new().expect("a runtime");
    let mut scene = Scene { suite, gate: Gate::new(), tokio, schedulers };

    // Every slot is used, and each workload has only one.
    scene.submit();
    scene.gate.wait_for(WORKERS * SLOTS);
    assert_eq!(scene.gate.load(), [SLOTS; WORKERS]);
    let first: BTreeMap<_, _> =
        scene.gate.waiting.iter().map(|one| (workload_id(one.name), one.worker)).collect();
    scene.gate.release();

    let mut down: Vec<String> = Vec::new();
    let mut killed: BTreeMap<String, usize> = BTreeMap::new();
    while scene.gate.ran.len() < WORKLOADS {
        // A worker without a gateway returns later. The others run on meanwhile.
        let left = WORKLOADS - scene.gate.ran.len();
        let enough = TOGETHER.min(left);
        down.drain(..).for_each(|name| scene.suite.spawn(&name));
        // At this point, some workloads run, some start and some wait.
        scene.gate.wait_for(1 + dice.below(enough));
        let gateways: BTreeSet<_> = (0..=dice.below(3)).map(|_| dice.below(WORKERS)).collect();
        let gateways = gateways.into_iter().map(|index| format!("runtime-gateway-{index}"));
        let scheduler = format!("scheduler-{}", dice.below(2));
        for name in gateways.chain([scheduler]) {
            scene.suite.kill(&name);
            *killed.entry(name.clone()).or_default() += 1;
            // Some services are away for a while.
            if dice.below(2) == 0 { down.push(name) } else { scene.suite.spawn(&name) }
        }
        // A workload that was about to start on a worker without a gateway starts when the gateway
        // is back.
        if left < TOGETHER + 4 * SLOTS {
            down.drain(..).for_each(|name| scene.suite.spawn(&name));
        }
        scene.gate.wait_for(enough);
        scene.gate.release();
    }
    down.drain(..).for_each(|name| scene.suite.spawn(&name));
    eprintln!("killed: {killed:?}");
    scene.wait_until_finished();

    let began: BTreeSet<_> = scene.gate.ran.iter().map(|ran| ran.name).collect();
    assert_eq!(began.len(), scene.gate.ran.len(), "one ran twice");
    assert_eq!(began, (0..WORKLOADS).collect());
    let most = most_at_once(&scene.gate.ran);
    eprintln!("at once: {most:?}");
    assert_eq!(most, [SLOTS; WORKERS], "each worker was full, and none more than that");
    let all = scene.all().expect("all");
    for workload in &all {
        assert_eq!(workload.outcome(), pb::Outcome::Succeeded, "{workload:?}");
    }
    let mut placed: Vec<_> =
        all.iter().filter_map(|one| Some((placed_at(one), *first.get(&one.workload_id)?))).collect();
    placed.sort_unstable();
    let mut load = [0; WORKERS];
    placed[..WORKERS * SLOTS * 4 / 5].iter().for_each(|(_, worker)| load[*worker] += 1);
    let (least, most) = (load.iter().min().expect("workers"), load.iter().max().expect("workers"));
    eprintln!("with four of five slots given: {least} to {most}");
    assert!(most * 10 <= least * 15, "load is spread within 1.5: {load:?}");
    for name in ["scheduler-0", "scheduler-1"] {
        scene.suite.wait_until_ready(name);
        wait_for(&format!("the ledger of {name}"), || {
            let (_, page) = scene.suite.page(name, "/metrics");
            let drift: Vec<_> = page
                .lines()
                .filter(|line| line.starts_with("gantry_scheduler_") && line.contains("_drift{"))
                .collect();
            (drift.len() == 7 && drift.iter().all(|line| line.ends_with(" 0"))).then_some(())
        });
    }
}
