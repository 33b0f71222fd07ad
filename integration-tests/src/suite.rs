//! The four services as processes of their own, on a real PostgreSQL: each with directories, ports and a log of its own, and each may be
//! killed, told to end and started again at any moment.
//!
//! Scheduler and artifact store live in one database, each as a user that owns its own schema and may not look into the other's.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use testing::databases::Server;

use crate::machines::Machines;
use crate::{describe, gantry_binary, send, snapshot, wait_for};

const TOKEN: &str = "the-token-of-the-suite";

/// How many of each there are.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// `scheduler-0`, …
    pub schedulers: usize,
    /// `artifact-store-0`, …
    pub stores: usize,
    /// `streamer-0`, …
    pub streamers: usize,
    /// `runtime-gateway-0`, …, each with a host worker of its own: `worker-0`, …
    pub gateways: usize,
    /// `door-0`, …, through which callers go when there is one.
    pub doors: usize,
}

impl Shape {
    /// One of each, and no door.
    pub const ONE: Self = Self { schedulers: 1, stores: 1, streamers: 1, gateways: 1, doors: 0 };
}

/// A cluster of processes. Everything of it is gone when this is dropped.
pub struct Suite {
    home: TempDir,
    /// Where scheduler and store keep their rows.
    pub postgres: Server,
    services: BTreeMap<String, Service>,
    /// Where the gateways run, if not here.
    machines: Option<Machines>,
}

/// One process.
struct Service {
    program: PathBuf,
    address: String,
    metrics: String,
    environment: Vec<(String, String)>,
    machine: Option<usize>,
    child: Option<Child>,
}

impl Suite {
    /// Starts all of them, and waits until each is ready. `settings` are in the environment of every service.
    #[must_use]
    pub fn start(shape: Shape, settings: &[(&str, &str)]) -> Self {
        Self::new(shape, settings, false).begin()
    }

    /// The same, with a machine of its own for each gateway.
    #[must_use]
    pub fn start_on_machines(shape: Shape, settings: &[(&str, &str)]) -> Self {
        Self::new(shape, settings, true).begin()
    }

    fn new(shape: Shape, settings: &[(&str, &str)], on_machines: bool) -> Self {
        let home = tempfile::Builder::new().prefix("gantry-suite-").tempdir().expect("a directory");
        fs::write(home.path().join("token"), TOKEN).expect("a token");
        let postgres = Server::new();
        postgres.execute("CREATE ROLE scheduler LOGIN");
        postgres.execute("CREATE ROLE store LOGIN");
        postgres.execute("CREATE SCHEMA its_scheduler AUTHORIZATION scheduler");
        postgres.execute("CREATE SCHEMA its_store AUTHORIZATION store");

        let machines = on_machines.then(|| Machines::new(home.path(), shape.gateways));
        let own = machines.as_ref().map_or_else(|| "127.0.0.1".to_owned(), Machines::own_address);
        let there = |index| machines.as_ref().map_or_else(|| own.clone(), |machines| machines.address(index));
        let mut ports = Ports::default();
        let mut addresses =
            |count: usize| -> Vec<String> { (0..count).map(|_| format!("{own}:{}", ports.free())).collect() };
        let schedulers = addresses(shape.schedulers);
        let stores = addresses(shape.stores);
        let streamers = addresses(shape.streamers);
        let doors = addresses(shape.doors);
        let gateways: Vec<_> =
            (0..shape.gateways).map(|index| format!("{}:{}", there(index), ports.free())).collect();
        let list = |addresses: &[String]| {
            addresses.iter().map(|address| format!("http://{address}")).collect::<Vec<_>>().join(",")
        };
        let scheduler = ("GANTRY_SCHEDULER", list(&schedulers));
        let store = ("GANTRY_ARTIFACT_STORE", list(&stores));
        let database = |user: &str| {
            let schema = format!("its_{user}");
            [("GANTRY_DATABASE_URL", postgres.url(user)), ("GANTRY_DATABASE_SCHEMA", schema)]
        };

        let mut services = BTreeMap::new();
        let mut add = |kind: &str,
                       addresses: &[String],
                       own: &dyn Fn(usize) -> Vec<(&'static str, String)>| {
            for (index, address) in addresses.iter().enumerate() {
                let (program, machine) = match kind {
                    "door" => ("runtime-gateway", None),
                    "runtime-gateway" => (kind, on_machines.then_some(index)),
                    other => (other, None),
                };
                let host = address.split(':').next().unwrap_or_default();
                let metrics = format!("{host}:{}", ports.free());
                let mut environment = vec![
                    ("GANTRY_LISTEN".to_owned(), address.clone()),
                    ("GANTRY_METRICS_LISTEN".to_owned(), metrics.clone()),
                    ("GANTRY_TOKEN_FILE".to_owned(), home.path().join("token").display().to_string()),
                    ("GANTRY_PROBE_INTERVAL".to_owned(), "200ms".to_owned()),
                ];
                environment.extend(own(index).into_iter().map(|(name, value)| (name.to_owned(), value)));
                environment
                    .extend(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
                let program = gantry_binary().with_file_name(program);
                let name = format!("{kind}-{index}");
                let address = format!("http://{address}");
                let service = Service { program, address, metrics, environment, machine, child: None };
                services.insert(name, service);
            }
        };
        add("scheduler", &schedulers, &|_| {
            database("scheduler").into_iter().chain([store.clone()]).collect()
        });
        add("artifact-store", &stores, &|_| {
            database("store").into_iter().chain([scheduler.clone()]).collect()
        });
        add("streamer", &streamers, &|_| vec![scheduler.clone(), store.clone()]);
        add("door", &doors, &|_| vec![scheduler.clone(), ("GANTRY_GATEWAY_DOOR", "true".to_owned())]);
        let streamer = ("GANTRY_STREAMER", list(&streamers));
        add("runtime-gateway", &gateways, &|index| {
            let directory = |kind: &str| home.path().join(format!("{kind}-{index}")).display().to_string();
            vec![
                scheduler.clone(),
                store.clone(),
                streamer.clone(),
                ("GANTRY_WORKER_NAME", format!("worker-{index}")),
                ("GANTRY_STATE_DIR", directory("state")),
                ("GANTRY_RUNTIME_DIR", directory("run")),
            ]
        });
        Self { home, postgres, services, machines }
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

    /// The processes, such as `scheduler-0`.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.services.keys().cloned().collect()
    }

    /// A file of the test's own.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where the gateways run.
    #[must_use]
    pub fn machines(&self) -> &Machines {
        self.machines.as_ref().expect("it was started on machines")
    }

    /// Reboots the machine of a gateway, which is started again and waited for.
    pub fn reboot(&mut self, index: usize) {
        self.machines.as_mut().expect("it was started on machines").reboot(index);
        let name = format!("runtime-gateway-{index}");
        self.kill(&name);
        self.spawn(&name);
        self.wait_until_ready(&name);
    }

    /// Takes away a gateway's machine, with all that it holds, for good.
    pub fn remove_machine(&mut self, index: usize) {
        self.machines.as_mut().expect("it was started on machines").remove(index);
        self.kill(&format!("runtime-gateway-{index}"));
    }

    /// An address at which a service listens.
    #[must_use]
    pub fn address(&self, name: &str) -> &str {
        &self.service(name).address
    }

    /// The token of everybody.
    #[must_use]
    pub fn token(&self) -> &'static str {
        TOKEN
    }

    fn service(&self, name: &str) -> &Service {
        self.services.get(name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    /// A command line of a service's own binary, with its settings in the environment.
    #[must_use]
    pub fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let service = self.service(name);
        let prefix = service.machine.zip(self.machines.as_ref());
        let prefix = prefix.map(|(index, machines)| machines.prefix(index)).unwrap_or_default();
        let mut command = match prefix.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&service.program);
                command
            }
            None => Command::new(&service.program),
        };
        command.args(arguments).env_clear().env("PATH", PATH);
        command.envs(service.environment.iter().map(|(name, value)| (name, value)));
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

    /// What `health` of the service says.
    #[must_use]
    pub fn health(&self, name: &str, service: &str) -> Output {
        self.command(name, &["health", "--service", service]).output().expect("it runs")
    }

    /// Waits until the process says that it is ready.
    pub fn wait_until_ready(&self, name: &str) {
        wait_for(&format!("{name} is ready"), || self.health(name, "").status.success().then_some(()));
    }

    /// Waits until the process says that it is not ready, and answers why.
    #[must_use]
    pub fn wait_until_not_ready(&self, name: &str) -> String {
        wait_for(&format!("{name} is not ready"), || {
            let health = self.health(name, "");
            (!health.status.success()).then(|| String::from_utf8_lossy(&health.stderr).into_owned())
        })
    }

    /// Kills a process without warning.
    pub fn kill(&mut self, name: &str) {
        let mut child =
            self.services.get_mut(name).and_then(|service| service.child.take()).expect("it runs");
        child.kill().expect("killed");
        child.wait().expect("ended");
    }

    /// Tells a process to end, and answers how it did.
    pub fn terminate(&mut self, name: &str) -> ExitStatus {
        self.signal(name, libc::SIGTERM);
        self.wait(name)
    }

    /// Sends a signal to a process.
    pub fn signal(&self, name: &str, signal: i32) {
        send(self.service(name).child.as_ref().expect("it runs"), signal);
    }

    /// Waits for the end of a process, and answers how it ended.
    pub fn wait(&mut self, name: &str) -> ExitStatus {
        let mut child =
            self.services.get_mut(name).and_then(|service| service.child.take()).expect("it runs");
        wait_for(&format!("the end of {name}"), || child.try_wait().expect("asked"))
    }

    /// What a process answers to operators at `path`: the status line and the body.
    #[must_use]
    pub fn page(&self, name: &str, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.service(name).metrics).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
    }

    /// Where all services are, as `--server` takes it.
    #[must_use]
    pub fn server(&self) -> String {
        let kind = |word: &str, program: &str| {
            let replicas = self.services.iter().filter(|(name, _)| name.starts_with(program));
            format!(
                "{word}={}",
                replicas.map(|(_, service)| service.address.as_str()).collect::<Vec<_>>().join(",")
            )
        };
        let mut kinds = vec![
            kind("scheduler", "scheduler-"),
            kind("artifacts", "artifact-store-"),
            kind("streamer", "streamer-"),
        ];
        if self.services.contains_key("door-0") {
            kinds.push(kind("door", "door-"));
        }
        kinds.join(",")
    }

    /// A command line of `gantry` that calls this cluster.
    #[must_use]
    pub fn gantry(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(gantry_binary());
        command.args(arguments).env_clear().env("PATH", PATH).env("HOME", self.home.path());
        command.env("GANTRY_SERVER", self.server()).env("GANTRY_TOKEN_FILE", self.path("token"));
        command.current_dir(self.home.path()).stdin(Stdio::null());
        command
    }

    /// Runs a command line that must succeed, and answers its standard output.
    pub fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.gantry(arguments).output().expect("gantry runs");
        assert!(output.status.success(), "{}", describe(&output));
        String::from_utf8(output.stdout).expect("text")
    }
}

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Ports that were free, kept until all are known, so that none is given twice.
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
                let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
                let from = log.len().saturating_sub(8_000);
                eprintln!("--- {name} ---\n{}", log.get(from..).unwrap_or(&log));
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

/// Removes everything from the machine that lives in the directory `home`: processes, their control groups, mounts.
fn clear(home: &Path) {
    for _ in 0..200 {
        let processes = snapshot::processes_of(home);
        if processes.is_empty() {
            break;
        }
        for pid in processes.keys() {
            // SAFETY: kill has no memory to be unsafe about.
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

/// Removes control groups that are named for one of `handles`.
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
