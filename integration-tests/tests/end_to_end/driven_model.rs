//! Random operations of holders of driven leases, compared with a model.
//!
//! The services are real and run in this process. The worker is the fake worker, which survives the
//! restarts of its gateway. Operations also use ended leases, and some are called twice at once. In
//! the end, the worker has no container, and the artifact store has only the settled artifacts.
//!
//! If the test fails, the seed and the operations are printed, and `GANTRY_SEED` repeats them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use integration_tests::holder::{Holder, Services, TEAM, block_on, spec, uuid};
use rpc::Reason::{self, ArtifactNotFound, ContainerExists, ContainerNotFound, LeaseLost, ProcessRunning};
use rpc::Refusal;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::{ArtifactState, GetArtifactRequest};
use rpc::pb::runtime as pb;
use rpc::pb::scheduler::EnvironmentVariable;
use sea_orm::ConnectionTrait;
use server::{Host, Listener};
use tempfile::TempDir;
use testing::conformance::programs;
use testing::fake::FakeWorker;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::thousand::RandomNumbers;

/// Default number of seeds, which `GANTRY_SEEDS` overrides.
const SEEDS: u64 = 20;
/// Number of seeds that run at a time.
const AT_ONCE: usize = 5;
const STEPS: usize = 50;
/// Time limit for a condition before the test fails.
const PATIENCE: Duration = Duration::from_secs(60);
const KEYS: [&str; 2] = ["one", "two"];

/// A server on one port, until it is stopped.
struct Served {
    /// A copy of the socket, which keeps the port while no server uses it.
    socket: std::net::TcpListener,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Served {
    /// Serves what `start` adds at the address of `socket`.
    #[expect(clippy::disallowed_methods, reason = "the test waits for it in `end`")]
    async fn start(socket: std::net::TcpListener, start: impl AsyncFnOnce(&mut Host, String)) -> Self {
        let listener = TcpListener::from_std(socket.try_clone().expect("a copy")).expect("a socket");
        let mut host = Host::new();
        start(&mut host, endpoint(&socket)).await;
        let (stop, stopped) = oneshot::channel();
        let served = host.serve([Listener::InsecureTcp(listener)], async {
            stopped.await.ok();
        });
        Self { socket, stop, served: tokio::spawn(served) }
    }

    /// Ends the server, and returns its socket.
    async fn end(self) -> std::net::TcpListener {
        self.stop.send(()).expect("it serves");
        self.served.await.expect("no panic").expect("an orderly end");
        self.socket
    }
}

/// A socket at any port.
fn socket() -> std::net::TcpListener {
    let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    socket.set_nonblocking(true).expect("set");
    socket
}

fn endpoint(socket: &std::net::TcpListener) -> String {
    format!("http://{}", socket.local_addr().expect("its address"))
}

/// The model of a container.
#[derive(Debug, Clone, PartialEq)]
struct Container {
    id: String,
    /// The specs of one key differ in this number.
    variant: usize,
    process: Process,
    published: Option<pb::Published>,
}

/// The model of a main process.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Process {
    Missing,
    /// It runs until it is stopped.
    Running,
    /// It has ended, and its output has this many bytes.
    Ended(u64),
}

struct Lease {
    holder: Holder,
    is_live: bool,
    containers: BTreeMap<&'static str, Container>,
    /// Keys of destroyed containers, which cannot be used again.
    destroyed: BTreeSet<&'static str>,
}

/// An operation of a holder.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Create {
        variant: usize,
    },
    /// Start a process that writes a line into its output and ends.
    Write,
    /// Start a process that runs until it is stopped.
    Run,
    Publish,
    Stop,
    Destroy,
    Release,
    LetGo,
    Expire,
    RestartGateway,
}

const OPERATIONS: &[(Operation, usize)] = &[
    (Operation::Create { variant: 0 }, 30),
    (Operation::Create { variant: 1 }, 5),
    (Operation::Write, 25),
    (Operation::Run, 15),
    (Operation::Publish, 25),
    (Operation::Stop, 15),
    (Operation::Destroy, 6),
    (Operation::Release, 3),
    (Operation::LetGo, 1),
    (Operation::Expire, 1),
    (Operation::RestartGateway, 6),
];

struct World {
    directory: TempDir,
    core: Served,
    gateway: Option<Served>,
    machine: Arc<FakeWorker>,
    services: Services,
    numbers: RandomNumbers,
    leases: Vec<Lease>,
    settled: Vec<pb::Published>,
    discarded: Vec<String>,
    history: History,
}

/// The seed and the steps so far, printed if the test fails.
struct History(Vec<String>);

impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|line| eprintln!("{line}"));
        }
    }
}

impl World {
    async fn start(seed: u64) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let database = |name: &str| format!("sqlite://{}/{name}.db", directory.path().display());
        let core = Served::start(socket(), async |host, endpoint| {
            let scheduler = scheduler::Config {
                poll: Duration::from_millis(50),
                ..scheduler::Config::new(database("scheduler"), endpoint.clone())
            };
            scheduler::start(scheduler, host).await.expect("a scheduler");
            let keys = artifact_store::KeySource::Scheduler(endpoint);
            let store = artifact_store::Config {
                gc_grace: Duration::ZERO,
                collect_interval: Duration::from_millis(100),
                sweep_interval: Duration::from_millis(100),
                ..artifact_store::Config::new(database("store"), keys)
            };
            artifact_store::start(store, host).await.expect("an artifact store");
        })
        .await;
        let scheduler = endpoint(&core.socket);
        let mut world = Self {
            directory,
            core,
            gateway: None,
            machine: FakeWorker::near(),
            services: Services { scheduler, proxy: None, token: None },
            numbers: RandomNumbers::seeded(seed),
            leases: Vec::new(),
            settled: Vec::new(),
            discarded: Vec::new(),
            history: History(vec![format!("GANTRY_SEED={seed}")]),
        };
        world.restart_gateway().await;
        world
    }

    /// Ends the gateway, if it runs, and starts one at the same address.
    async fn restart_gateway(&mut self) {
        let socket = match self.gateway.take() {
            Some(gateway) => gateway.end().await,
            None => socket(),
        };
        let (core, machine) = (&self.services.scheduler, &self.machine);
        let manifests = self.machine.gateway_directory().join("manifests");
        let gateway = Served::start(socket, async |host, endpoint| {
            let config =
                runtime_gateway::Config::for_worker("worker", &endpoint, core, core, core, manifests);
            runtime_gateway::start([(config, machine.runtime())], host).await.expect("a gateway");
        });
        self.gateway = Some(gateway.await);
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.numbers.below(of.len())]
    }

    /// Chooses an operation by its weight.
    fn operation(&mut self) -> Operation {
        let mut at = self.numbers.below(OPERATIONS.iter().map(|(_, weight)| weight).sum());
        let chosen = OPERATIONS.iter().find(|(_, weight)| {
            let is_here = at < *weight;
            at = at.saturating_sub(*weight);
            is_here
        });
        chosen.expect("one of them").0
    }

    async fn step(&mut self) {
        let live = self.leases.iter().filter(|lease| lease.is_live).count();
        if live == 0 || live < 3 && self.numbers.below(10) == 0 {
            let holder = Holder::place(&self.services, &uuid(), &[]).await.expect("placed");
            self.history.0.push(format!("{}: placed", self.leases.len()));
            let (containers, destroyed) = (BTreeMap::new(), BTreeSet::new());
            self.leases.push(Lease { holder, is_live: true, containers, destroyed });
        }
        // Some calls use a lease that has ended.
        let is_late = self.numbers.below(12) == 0;
        let candidates: Vec<_> =
            (0..self.leases.len()).filter(|&lease| is_late || self.leases[lease].is_live).collect();
        let lease = *self.pick(&candidates);
        let (operation, key) = (self.operation(), *self.pick(&KEYS));
        let is_twice = self.numbers.below(4) == 0;
        let often = if is_twice { " twice" } else { "" };
        self.history.0.push(format!("{lease} {key}: {operation:?}{often}"));
        match operation {
            Operation::RestartGateway => self.restart_gateway().await,
            Operation::Release | Operation::LetGo | Operation::Expire => self.end(lease, operation).await,
            _ => self.operate(lease, key, operation, is_twice).await,
        }
        self.check(lease).await;
    }

    /// Performs an operation on a container, and compares the answer with the model.
    async fn operate(&mut self, lease: usize, key: &'static str, operation: Operation, is_twice: bool) {
        let Lease { holder, is_live, containers, destroyed } = &mut self.leases[lease];
        let is_live = *is_live;
        let known = containers.get(key).cloned();
        let id = known.as_ref().map_or_else(uuid, |container| container.id.clone());
        let process = known.as_ref().map(|container| container.process);
        let exists = |otherwise| if known.is_some() { Ok(()) } else { Err(otherwise) };
        // Only a live lease has work, but the containers of an ended lease can be stopped.
        let works = if is_live { exists(ContainerNotFound) } else { Err(LeaseLost) };
        match operation {
            Operation::Create { variant } => {
                let expected = match &known {
                    _ if !is_live => Err(LeaseLost),
                    _ if destroyed.contains(key) => Err(ContainerExists),
                    Some(container) if container.variant != variant => Err(ContainerExists),
                    _ => Ok(()),
                };
                let spec = spec_of(variant);
                let created = called(is_twice, async || holder.create(key, spec.clone()).await).await;
                for created in created {
                    let Some(created) = agreed(created, expected) else { continue };
                    let container = containers.entry(key).or_insert_with(|| Container {
                        id: created.container_id.clone(),
                        variant,
                        process: Process::Missing,
                        published: None,
                    });
                    assert_eq!(created.container_id, container.id);
                }
            }
            Operation::Write | Operation::Run => {
                let command = match operation {
                    Operation::Write => programs::append("/workspace/out/lines"),
                    _ => programs::trap(),
                };
                let command: Vec<_> = command.iter().map(String::as_str).collect();
                let started = called(is_twice, async || holder.start(&id, &command).await).await;
                started.into_iter().for_each(|started| _ = agreed(started, works));
                if let (Ok(()), Some(container @ Container { process: Process::Missing, .. })) =
                    (works, containers.get_mut(key))
                {
                    container.process = match operation {
                        Operation::Write => Process::Ended("line\n".len() as u64),
                        _ => Process::Running,
                    };
                }
            }
            Operation::Publish => {
                let expected = works.and(match process {
                    Some(Process::Ended(bytes)) => Ok(bytes),
                    _ => Err(ProcessRunning),
                });
                let published = called(is_twice, async || holder.publish(&id, "out").await).await;
                for published in published {
                    let Some(published) = agreed(published, expected.map(|_| ())) else { continue };
                    assert_eq!(Ok(published.size_bytes), expected);
                    let container = containers.get_mut(key).expect("it exists");
                    let before = container.published.get_or_insert_with(|| published.clone());
                    assert_eq!(*before, published);
                }
            }
            Operation::Stop => {
                let expected = exists(ContainerNotFound);
                let stopped = called(is_twice, async || holder.stop(&id).await).await;
                stopped.into_iter().for_each(|stopped| _ = agreed(stopped, expected));
                if let Some(container @ Container { process: Process::Running, .. }) = containers.get_mut(key)
                {
                    container.process = Process::Ended(0);
                }
            }
            Operation::Destroy => {
                let gone = holder.destroy(&id).await;
                agreed(gone, Ok(()));
                if let Some(container) = containers.remove(key) {
                    destroyed.insert(key);
                    self.discarded.extend(container.published.map(|published| published.artifact_id));
                }
            }
            _ => unreachable!("not an operation on a container"),
        }
    }

    /// Ends a lease.
    async fn end(&mut self, number: usize, operation: Operation) {
        let lease = &mut self.leases[number];
        let published: Vec<_> =
            lease.containers.values().filter_map(|container| container.published.clone()).collect();
        let (kept, discarded): (Vec<_>, Vec<_>) =
            published.into_iter().partition(|_| self.numbers.below(3) > 0);
        match operation {
            _ if !lease.is_live => return,
            Operation::Release => {
                let kept: Vec<_> = kept.iter().collect();
                for _ in 0..2 {
                    lease.holder.release(&kept).await.expect("released");
                }
            }
            Operation::LetGo => lease.holder.let_go().await.expect("released"),
            _ => {
                let url = format!("sqlite://{}/scheduler.db", self.directory.path().display());
                let database = sea_orm::Database::connect(url).await.expect("the database");
                let id: domain::LeaseId = lease.holder.lease.parse().expect("an id");
                let statement = sea_orm::Statement::from_sql_and_values(
                    sea_orm::DbBackend::Sqlite,
                    "UPDATE leases SET expires_at = 1 WHERE id = $1",
                    [id.uuid().into()],
                );
                let changed = database.execute_raw(statement).await.expect("changed");
                assert_eq!(changed.rows_affected(), 1);
                database.close().await.expect("closed");
            }
        }
        lease.holder.ended().await;
        lease.is_live = false;
        // The store deletes the containers of an ended lease.
        lease.containers.clear();
        let discarded = discarded.into_iter().map(|published| published.artifact_id);
        self.discarded.extend(discarded);
        match operation {
            Operation::Release => self.settled.extend(kept),
            _ => self.discarded.extend(kept.into_iter().map(|published| published.artifact_id)),
        }
    }

    /// Waits until the containers of a lease are as in the model.
    async fn check(&self, number: usize) {
        let lease = &self.leases[number];
        for container in lease.containers.values() {
            until(&format!("{container:?}"), async || {
                let seen = lease.holder.container(&container.id).await.expect("it exists");
                let states: Vec<_> = seen.processes.iter().map(pb::Process::state).collect();
                let is_there = match container.process {
                    Process::Missing => states.is_empty(),
                    Process::Running => states == [pb::ProcessState::Running],
                    Process::Ended(_) => states == [pb::ProcessState::Ended],
                };
                is_there.then_some(()).ok_or(seen)
            })
            .await;
        }
    }

    /// Ends all leases, and checks that only settled artifacts stay.
    async fn finish(mut self) {
        for lease in 0..self.leases.len() {
            self.end(lease, Operation::Release).await;
        }
        let store = ArtifactsClient::new(self.services.connect(&self.services.scheduler));
        let get = async |artifact: &str| {
            let request = GetArtifactRequest { team: TEAM.to_owned(), artifact_id: artifact.to_owned() };
            Ok::<_, Refusal>(store.clone().get_artifact(request).await?.into_inner().artifact)
        };
        for settled in &self.settled {
            let artifact = get(&settled.artifact_id).await.expect("it is kept").expect("an artifact");
            assert_eq!((artifact.state(), artifact.digest), (ArtifactState::Sealed, settled.digest.clone()));
        }
        let kept = |id: &String| self.settled.iter().any(|settled| settled.artifact_id == *id);
        for discarded in self.discarded.iter().filter(|id| !kept(id)) {
            until("the deletion of an artifact", async || match get(discarded).await {
                Err(refusal) if refusal.is(ArtifactNotFound) => Ok(()),
                found => Err(found),
            })
            .await;
        }
        let runtime = self.machine.runtime();
        until("a worker without containers", async || {
            let held = runtime.list().await.expect("listed");
            if held.containers.is_empty() { Ok(()) } else { Err(held.containers) }
        })
        .await;
        self.gateway.expect("it runs").end().await;
        self.core.end().await;
    }
}

/// Performs a call, or the same call twice at once.
async fn called<T>(is_twice: bool, call: impl AsyncFn() -> T) -> Vec<T> {
    if is_twice {
        let (one, two) = tokio::join!(call(), call());
        vec![one, two]
    } else {
        vec![call().await]
    }
}

/// Compares an answer with that of the model. Returns the value of a call that succeeds.
#[track_caller]
fn agreed<T>(answer: Result<T, Refusal>, expected: Result<(), Reason>) -> Option<T> {
    match (answer, expected) {
        (Ok(value), Ok(())) => Some(value),
        (Err(refusal), Err(reason)) if refusal.is(reason) => None,
        (answer, expected) => panic!("{:?} instead of {expected:?}", answer.map(|_| ())),
    }
}

/// Waits until a condition holds.
async fn until<E: std::fmt::Debug>(what: &str, condition: impl AsyncFn() -> Result<(), E>) {
    let deadline = Instant::now() + PATIENCE;
    while let Err(seen) = condition().await {
        assert!(Instant::now() < deadline, "{what} did not come: {seen:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The specs of one key differ in their environment.
fn spec_of(variant: usize) -> pb::ContainerSpec {
    let variable = EnvironmentVariable { name: "VARIANT".into(), value: variant.to_string().into() };
    pb::ContainerSpec { inputs: Vec::new(), environment: vec![variable], ..spec("", None) }
}

#[test]
fn holders_see_what_the_model_says() {
    let count = testing::seeds::setting("GANTRY_SEEDS").unwrap_or(SEEDS);
    let seeds = testing::seeds::repeated()
        .map_or_else(|| (0..count).map(testing::seeds::nth).collect(), |seed| vec![seed]);
    let run = |seed| {
        block_on(async {
            let mut world = World::start(seed).await;
            for _ in 0..STEPS {
                world.step().await;
            }
            world.finish().await;
        });
    };
    std::thread::scope(|scope| {
        for seeds in seeds.chunks(seeds.len().div_ceil(AT_ONCE)) {
            scope.spawn(move || seeds.iter().copied().for_each(run));
        }
    });
}
