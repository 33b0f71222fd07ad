//! The four services as separate processes on PostgreSQL. Each process has its own directories,
//! ports and log, and may be killed, terminated and restarted at any time.
//!
//! Scheduler and artifact store share a database. Each uses a separate user and schema, and cannot
//! read the schema of the other.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use testing::databases::Server;

use crate::machines::Machines;
use crate::{describe, gantry_binary, id, send, snapshot, wait_for};

const TOKEN: &str = "the-token-of-the-suite";
const INNER_TOKEN: &str = "the-token-of-its-gateways";

/// Number of processes of each kind.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Schedulers: `scheduler-0`, …
    pub schedulers: usize,
    /// Artifact stores: `artifact-store-0`, …
    pub stores: usize,
    /// Streamers: `streamer-0`, …
    pub streamers: usize,
    /// Gateways: `runtime-gateway-0`, …, each with its own host worker: `worker-0`, …
    pub gateways: usize,
    /// Proxies: `proxy-0`, …. If there is one, callers use it.
    pub proxies: usize,
}

impl Shape {
    /// One process of each kind, and no proxy.
    pub const ONE: Self = Self { schedulers: 1, stores: 1, streamers: 1, gateways: 1, proxies: 0 };
    /// One scheduler, artifact store and streamer. Gateways are added with [`Suite::attend`].
    pub const NO_WORKER: Self = Self { gateways: 0, ..Self::ONE };
}

/// Settings with short terms, so that another gateway may soon take over the worker of a silent
/// one.
pub const SHORT_TERMS: &[(&str, &str)] =
    &[("GANTRY_HEARTBEAT", "500ms"), ("GANTRY_WORKER_TTL", "5s"), ("GANTRY_POLL_INTERVAL", "200ms")];

/// Queries whose results a failed test prints, each with a title.
const STATE: &[(&str, &str)] = &[
    ("how workloads have ended", "SELECT outcome, count(*) FROM its_scheduler.workloads GROUP BY 1"),
    (
        "workloads that did not succeed",
        "SELECT id, outcome, ending, retried, failed_on, location FROM its_scheduler.workloads WHERE outcome <> 'succeeded' LIMIT 20",
    ),
    (
        "unfinished workloads",
        "SELECT w.state, w.retried, w.failed_on, l.state, l.phase, h.name, count(*), min(left(w.waiting_for, 200)),
             (extract(epoch FROM now()) - max(l.granted_at) / 1e6)::int AS last_granted, min(w.id::text)
         FROM its_scheduler.workloads w
             LEFT JOIN its_scheduler.leases l ON l.id = w.lease_id
             LEFT JOIN its_scheduler.workers h ON h.id = l.worker_id
         WHERE w.state <> 'finished' GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 6, 1, 5",
    ),
    (
        "workers",
        "SELECT w.name, w.desired, w.state, c.attended, (extract(epoch FROM now()) - c.last_contact_at / 1e6)::int AS silent,
             w.generation, w.incarnation, w.session, w.active_tasks, w.max_tasks, w.failures, w.quarantines, w.quarantined_until,
             w.leaving, w.endpoint, w.last_failure,
             (SELECT string_agg(l.state || ' ' || l.phase || ': ' || l.count, ', ') FROM
                 (SELECT state, phase, count(*) FROM its_scheduler.leases
                  WHERE worker_id = w.id AND state <> 'ended' GROUP BY 1, 2) l) AS leases
         FROM its_scheduler.workers w JOIN its_scheduler.heartbeats c ON c.worker_id = w.id ORDER BY w.name",
    ),
    ("outbox for the store", "SELECT count(*), max(tries), min(due_at) FROM its_scheduler.outbox"),
    (
        "waiting calls",
        "SELECT replica, beat, changed, left(calls, 300) FROM its_scheduler.peer_waiters",
    ),
    (
        "connections",
        "SELECT usename, state, wait_event_type, wait_event, pg_blocking_pids(pid), pid,
             (extract(epoch FROM clock_timestamp() - xact_start) * 1000)::int AS ms, left(query, 150)
         FROM pg_stat_activity WHERE usename IN ('scheduler', 'store') ORDER BY xact_start",
    ),
];

/// Cluster of processes. Drop removes everything of it.
pub struct Suite {
    home: TempDir,
    /// Database server of the scheduler and the artifact store.
    pub postgres: Server,
    services: BTreeMap<String, Service>,
    /// Environment of every service.
    settings: Vec<(String, String)>,
    /// Whether gateways have a separate token.
    walled: bool,
    /// Simulated machines of the gateways, if they do not run on this machine.
    machines: Option<Machines>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Scheduler,
    Store,
    Streamer,
    Gateway,
    Proxy,
}

impl Kind {
    /// Returns the name of processes of this kind, without their number.
    fn word(self) -> &'static str {
        match self {
            Self::Proxy => "proxy",
            other => other.program(),
        }
    }

    fn program(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::Store => "artifact-store",
            Self::Streamer => "streamer",
            Self::Gateway | Self::Proxy => "runtime-gateway",
        }
    }

    /// Returns the settings for the addresses of other services.
    fn peers(self) -> &'static [(&'static str, Kind)] {
        const SCHEDULER: (&str, Kind) = ("GANTRY_SCHEDULER", Kind::Scheduler);
        const STORE: (&str, Kind) = ("GANTRY_ARTIFACT_STORE", Kind::Store);
        match self {
            Self::Scheduler => &[STORE],
            Self::Store | Self::Proxy => &[SCHEDULER],
            Self::Streamer => &[SCHEDULER, STORE],
            Self::Gateway => &[SCHEDULER, STORE, ("GANTRY_STREAMER", Kind::Streamer)],
        }
    }
}

/// Process of a service.
struct Service {
    kind: Kind,
    /// Listening address: a host and a port.
    address: String,
    endpoint: String,
    metrics: String,
    /// Environment of this process alone.
    environment: Vec<(String, String)>,
    machine: Option<usize>,
    child: Option<Child>,
}

impl Suite {
    /// Starts all processes, and waits until each is ready. `settings` are in the environment of
    /// every service.
    #[must_use]
    pub fn start(shape: Shape, settings: &[(&str, &str)]) -> Self {
        Self::new(shape, settings, false).begin()
    }

    /// Starts all processes, each gateway on a separate simulated machine.
    #[must_use]
    pub fn start_on_machines(shape: Shape, settings: &[(&str, &str)]) -> Self {
        Self::new(shape, settings, true).begin()
    }

    /// Starts all processes, with a token of the gateways that callers do not know. A caller then
    /// reaches workers only through a proxy. The other services require no token, because a gateway
    /// has only one to present.
    #[must_use]
    pub fn start_walled(shape: Shape, settings: &[(&str, &str)]) -> Self {
        let mut suite = Self::new(shape, settings, false);
        suite.walled = true;
        suite.begin()
    }

    fn new(shape: Shape, settings: &[(&str, &str)], on_machines: bool) -> Self {
        let home = tempfile::Builder::new().prefix("gantry-suite-").tempdir().expect("a directory");
        fs::write(home.path().join("token"), TOKEN).expect("a token");
        fs::write(home.path().join("inner-token"), INNER_TOKEN).expect("a token");
        let postgres = Server::new();
        for (user, schema) in [("scheduler", "its_scheduler"), ("store", "its_store")] {
            postgres.execute(&format!("CREATE ROLE {user} LOGIN"));
            postgres.execute(&format!("CREATE SCHEMA {schema} AUTHORIZATION {user}"));
        }
        let machines = on_machines.then(|| Machines::new(home.path(), shape.gateways));
        let settings = owned(settings);
        let mut suite = Self { home, postgres, services: BTreeMap::new(), settings, walled: false, machines };

        let mut ports = Ports::default();
        for (kind, count) in [
            (Kind::Scheduler, shape.schedulers),
            (Kind::Store, shape.stores),
            (Kind::Streamer, shape.streamers),
            (Kind::Proxy, shape.proxies),
        ] {
            for index in 0..count {
                suite.add(
                    &format!("{}-{index}", kind.word()),
                    kind,
                    suite.settings_of(kind),
                    None,
                    &mut ports,
                );
            }
        }
        for index in 0..shape.gateways {
            let name = format!("{}-{index}", Kind::Gateway.word());
            let own = suite.settings_of_gateway(&format!("worker-{index}"), &index.to_string());
            suite.add(&name, Kind::Gateway, own, on_machines.then_some(index), &mut ports);
        }
        suite
    }

    /// Returns the settings of processes of a kind, without the addresses of other services.
    fn settings_of(&self, kind: Kind) -> Vec<(String, String)> {
        let database = |user: &str| {
            let (url, schema) = (self.postgres.url(user), format!("its_{user}"));
            owned(&[("GANTRY_DATABASE_URL", &url), ("GANTRY_DATABASE_SCHEMA", &schema)])
        };
        match kind {
            Kind::Scheduler => database("scheduler"),
            Kind::Store => database("store"),
            Kind::Streamer | Kind::Gateway => Vec::new(),
            Kind::Proxy => owned(&[("GANTRY_GATEWAY_PROXY", "true")]),
        }
    }

    /// Returns the settings of a gateway about its worker, whose state directory is
    /// `state-DIRECTORY`.
    fn settings_of_gateway(&self, worker: &str, directory: &str) -> Vec<(String, String)> {
        let directory = |kind: &str| self.path(&format!("{kind}-{directory}")).display().to_string();
        owned(&[
            // Some processes connect to the test over its loopback.
            ("GANTRY_WORKER_ALLOW", "host-image,host-network"),
            ("GANTRY_WORKER_NAME", worker),
            ("GANTRY_STATE_DIR", &directory("state")),
            ("GANTRY_RUNTIME_DIR", &directory("run")),
        ])
    }

    /// Adds a process without starting it.
    fn add(
        &mut self,
        name: &str,
        kind: Kind,
        environment: Vec<(String, String)>,
        machine: Option<usize>,
        ports: &mut Ports,
    ) {
        let host = match (&self.machines, machine) {
            (Some(machines), Some(index)) => machines.address(index),
            (Some(machines), None) => machines.own_address(),
            (None, _) => "127.0.0.1".to_owned(),
        };
        let address = format!("{host}:{}", ports.free());
        let (endpoint, metrics) = (format!("http://{address}"), format!("{host}:{}", ports.free()));
        let service = Service { kind, address, endpoint, metrics, environment, machine, child: None };
        assert!(self.services.insert(name.to_owned(), service).is_none(), "{name} exists already");
    }

    /// Starts another gateway for the host worker `worker`, unless `settings` select another one.
    /// Gateways of the same worker share its directories. Does not wait.
    pub fn attend(&mut self, name: &str, worker: &str, settings: &[(&str, &str)]) {
        let mut own = self.settings_of_gateway(worker, worker);
        own.extend(owned(settings));
        self.add(name, Kind::Gateway, own, None, &mut Ports::default());
        self.spawn(name);
    }

    fn begin(mut self) -> Self {
        for name in self.names() {
            self.spawn(&name);
        }
        for name in self.names() {
            self.wait_until_ready(&name);
        }
        self
    }

    /// Returns the names of the processes, such as `scheduler-0`.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.services.keys().cloned().collect()
    }

    /// Returns the path of a file of the test.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Returns the simulated machines of the gateways.
    #[must_use]
    pub fn machines(&self) -> &Machines {
        self.machines.as_ref().expect("it was started on machines")
    }

    /// Reboots the machine of a gateway, restarts the gateway, and waits until it is ready.
    pub fn reboot(&mut self, index: usize) {
        self.machines.as_mut().expect("it was started on machines").reboot(index);
        let name = format!("runtime-gateway-{index}");
        self.kill(&name);
        self.spawn(&name);
        self.wait_until_ready(&name);
    }

    /// Removes the machine of a gateway with all of its files.
    pub fn remove_machine(&mut self, index: usize) {
        self.machines.as_mut().expect("it was started on machines").remove(index);
        self.kill(&format!("runtime-gateway-{index}"));
    }

    /// Returns the address of a service.
    #[must_use]
    pub fn address(&self, name: &str) -> &str {
        &self.service(name).endpoint
    }

    /// Returns the token of callers.
    #[must_use]
    pub fn token(&self) -> &'static str {
        TOKEN
    }

    fn service(&self, name: &str) -> &Service {
        self.services.get(name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    fn addresses(&self, kind: Kind) -> String {
        let all = self.services.values().filter(|service| service.kind == kind);
        all.map(|service| service.endpoint.as_str()).collect::<Vec<_>>().join(",")
    }

    /// Makes a command of the binary of a service, with its settings in the environment.
    #[must_use]
    pub fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let service = self.service(name);
        let program = gantry_binary().with_file_name(service.kind.program());
        let prefix = service.machine.zip(self.machines.as_ref());
        let prefix = prefix.map(|(index, machines)| machines.prefix(index)).unwrap_or_default();
        let mut command = match prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&program);
                command
            }
            None => Command::new(&program),
        };
        command.args(arguments).env_clear().env("PATH", PATH).env("NO_COLOR", "1");
        command.env("GANTRY_LISTEN", &service.address).env("GANTRY_METRICS_LISTEN", &service.metrics);
        command.env("GANTRY_PROBE_INTERVAL", "200ms");
        command.envs(service.kind.peers().iter().map(|(name, kind)| (name, self.addresses(*kind))));
        let token = match service.kind {
            Kind::Proxy => Some("token"),
            Kind::Gateway if self.walled => Some("inner-token"),
            _ => (!self.walled).then_some("token"),
        };
        match token {
            Some(file) => command.env("GANTRY_TOKEN_FILE", self.path(file)),
            None => command.env("GANTRY_INSECURE", "true"),
        };
        let settings = service.environment.iter().chain(&self.settings);
        command.envs(settings.map(|(name, value)| (name, value)));
        command.current_dir(self.home.path()).stdin(Stdio::null());
        command
    }

    /// Starts a process that does not run.
    pub fn spawn(&mut self, name: &str) {
        let log = File::options().create(true).append(true).open(self.path(&format!("{name}.log")));
        let child = self.command(name, &[]).stdout(Stdio::null()).stderr(log.expect("a log")).spawn();
        let service = self.services.get_mut(name).expect("it is known");
        assert!(service.child.is_none(), "{name} runs already");
        service.child = Some(child.expect("it starts"));
    }

    /// Runs the `health` command of a service.
    #[must_use]
    pub fn health(&self, name: &str, service: &str) -> Output {
        self.command(name, &["health", "--service", service]).output().expect("it runs")
    }

    /// Waits until a process is ready.
    pub fn wait_until_ready(&self, name: &str) {
        wait_for(&format!("{name} is ready"), || self.health(name, "").status.success().then_some(()));
    }

    /// Waits until a process is not ready, and returns the reason.
    #[must_use]
    pub fn wait_until_not_ready(&self, name: &str) -> String {
        wait_for(&format!("{name} is not ready"), || {
            let health = self.health(name, "");
            (!health.status.success()).then(|| String::from_utf8_lossy(&health.stderr).into_owned())
        })
    }

    /// Kills a process.
    pub fn kill(&mut self, name: &str) {
        let mut child =
            self.services.get_mut(name).and_then(|service| service.child.take()).expect("it runs");
        child.kill().expect("killed");
        child.wait().expect("ended");
    }

    /// Terminates a process, and returns its exit status.
    pub fn terminate(&mut self, name: &str) -> ExitStatus {
        self.signal(name, libc::SIGTERM);
        self.wait(name)
    }

    /// Sends a signal to a process.
    pub fn signal(&self, name: &str, signal: i32) {
        send(self.service(name).child.as_ref().expect("it runs"), signal);
    }

    /// Returns the id of a running process.
    #[must_use]
    pub fn pid(&self, name: &str) -> u32 {
        self.service(name).child.as_ref().expect("it runs").id()
    }

    /// Waits for the end of a process, and returns its exit status.
    pub fn wait(&mut self, name: &str) -> ExitStatus {
        let mut child =
            self.services.get_mut(name).and_then(|service| service.child.take()).expect("it runs");
        wait_for(&format!("the end of {name}"), || child.try_wait().expect("asked"))
    }

    /// Reads a page of the metrics server of a process. Returns the status line and the body.
    #[must_use]
    pub fn page(&self, name: &str, path: &str) -> (String, String) {
        let service = self.service(name);
        let inner = self.walled && matches!(service.kind, Kind::Gateway);
        let token = if inner { INNER_TOKEN } else { TOKEN };
        let mut stream = TcpStream::connect(&service.metrics).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        .expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    /// Returns the log of a process.
    #[must_use]
    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default()
    }

    /// Waits until the log of a process contains `text`.
    pub fn wait_for_log(&self, name: &str, text: &str) {
        wait_for(text, || self.log(name).contains(text).then_some(()));
    }

    /// Waits until the gateway `by` attends `worker`, and returns the worker.
    pub fn attended(&self, worker: &str, by: &str) -> Value {
        wait_for(&format!("{by}, which attends {worker},"), || {
            let shown = self.gantry(&["show", "worker", worker, "--json"]).output().expect("gantry runs");
            let shown: Value = serde_json::from_slice(shown.stdout.trim_ascii()).ok()?;
            (shown["gateway_endpoint"] == self.address(by) && shown["state"] == "running").then_some(shown)
        })
    }

    /// Returns the addresses of all services, as `--server` takes them.
    #[must_use]
    pub fn server(&self) -> String {
        let words = [
            ("scheduler", Kind::Scheduler),
            ("artifacts", Kind::Store),
            ("streamer", Kind::Streamer),
            ("proxy", Kind::Proxy),
        ];
        let words = words.into_iter().map(|(word, kind)| (word, self.addresses(kind)));
        let words = words.filter(|(_, addresses)| !addresses.is_empty());
        words.map(|(word, addresses)| format!("{word}={addresses}")).collect::<Vec<_>>().join(",")
    }

    /// Makes a `gantry` command that calls this cluster.
    #[must_use]
    pub fn gantry(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(gantry_binary());
        command.args(arguments).env_clear().env("PATH", PATH).env("HOME", self.home.path());
        command.env("GANTRY_SERVER", self.server()).env("GANTRY_TOKEN_FILE", self.path("token"));
        command.current_dir(self.home.path()).stdin(Stdio::null());
        command
    }

    /// Uploads a directory, and returns the id of its artifact.
    #[must_use]
    pub fn upload(&self, directory: &Path) -> String {
        id(self.succeed(&["upload", directory.to_str().expect("UTF-8")]))
    }

    /// Runs the queries of `STATE`. Returns their titles and rows.
    pub fn state(&self) -> impl Iterator<Item = (&'static str, Result<Vec<String>, String>)> {
        STATE.iter().map(|(what, sql)| (*what, self.postgres.try_query(sql)))
    }

    /// Runs a `gantry` command that must succeed, and returns its standard output.
    pub fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.gantry(arguments).output().expect("gantry runs");
        assert!(output.status.success(), "{}", describe(&output));
        String::from_utf8(output.stdout).expect("text")
    }
}

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn owned(settings: &[(&str, &str)]) -> Vec<(String, String)> {
    settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Free ports. They stay bound until all are chosen, so that no port is chosen twice.
#[derive(Default)]
struct Ports(Vec<TcpListener>);

impl Ports {
    fn free(&mut self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        self.0.push(listener);
        port
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in self.names() {
                let log = self.log(&name);
                let from = log.len().saturating_sub(8_000);
                eprintln!("--- {name} ---\n{}", log.get(from..).unwrap_or(&log));
            }
            for (what, rows) in self.state() {
                // If the database does not answer, the error is printed.
                eprintln!("--- {what} ---\n{}", rows.unwrap_or_else(|why| vec![why]).join("\n"));
            }
        }
        for service in self.services.values_mut() {
            if let Some(mut child) = service.child.take() {
                child.kill().ok();
                child.wait().ok();
            }
        }
        clear(self.home.path());
        self.machines.take();
    }
}

/// Removes the processes, control groups and mounts of the directory `home` from the machine.
fn clear(home: &Path) {
    for _ in 0..200 {
        let processes = snapshot::processes_of(home);
        if processes.is_empty() {
            break;
        }
        for pid in processes.keys() {
            // SAFETY: kill accesses no memory of this process.
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let below = mounts
        .lines()
        .rev()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|at| Path::new(at).starts_with(home));
    for at in below {
        rustix::mount::unmount(at, rustix::mount::UnmountFlags::DETACH).ok();
    }
    let states = fs::read_dir(home).into_iter().flatten().flatten();
    let containers = states
        .flat_map(|state| fs::read_dir(state.path().join("containers")).into_iter().flatten().flatten());
    let handles: Vec<_> =
        containers.map(|container| container.file_name().to_string_lossy().into_owned()).collect();
    remove_groups(Path::new("/sys/fs/cgroup"), &handles);
}

/// Removes control groups whose names contain one of `handles`.
pub(crate) fn remove_groups(below: &Path, handles: &[String]) {
    for entry in fs::read_dir(below).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_groups(&entry.path(), handles);
            let name = entry.file_name().to_string_lossy().into_owned();
            if handles.iter().any(|handle| handle.len() > 8 && name.contains(handle.as_str())) {
                fs::remove_dir(entry.path()).ok();
            }
        }
    }
}
