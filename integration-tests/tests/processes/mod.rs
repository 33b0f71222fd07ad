//! Gateways as processes of their own, with the services that they need in the process of the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use integration_tests::{Cluster, describe, gantry_binary, wait_for};
use runtime::{Runtime as _, RuntimeError};
use runtime_gateway::host::{HostConfig, HostRuntime};
use serde_json::Value;
use server::{Host, Listener};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Scheduler, artifact store and streamer, and where everything else is.
pub(crate) struct Suite {
    pub(crate) cluster: Cluster,
    pub(crate) endpoint: String,
    runtime: Runtime,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Suite {
    /// With a short term after which a silent worker may be taken over.
    pub(crate) fn start() -> Self {
        let cluster = Cluster::new();
        let runtime = Runtime::new().expect("a runtime");
        let database = |name: &str| format!("sqlite://{}", cluster.path(name).display());
        let (scheduler, store) = (database("scheduler.db"), database("store.db"));
        let (stop, stopped) = oneshot::channel();
        let (endpoint, served) = runtime.block_on(async {
            let listener = Listener::Tcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"));
            let endpoint = listener.endpoint().expect("its address");
            let mut host = Host::new();
            let scheduler = scheduler::Config {
                heartbeat: Duration::from_millis(500),
                worker_ttl: Duration::from_secs(5),
                poll: Duration::from_millis(200),
                ..scheduler::Config::new(scheduler, endpoint.clone())
            };
            scheduler::start(scheduler, &mut host).await.expect("a scheduler");
            let keys = artifact_store::KeySource::Scheduler(endpoint.clone());
            let store = artifact_store::Config::new(store, keys);
            artifact_store::start(store, &mut host).await.expect("an artifact store");
            let streamer = streamer::Config {
                scheduler: endpoint.clone(),
                artifact_store: endpoint.clone(),
                token: None,
            };
            streamer::start(&streamer, &mut host).expect("a streamer");
            let shutdown = async {
                stopped.await.ok();
            };
            #[expect(clippy::disallowed_methods, reason = "waited for when the suite is dropped")]
            (endpoint, tokio::spawn(host.serve([listener], shutdown)))
        });
        Self { cluster, endpoint, runtime, stop: Some(stop), served: Some(served) }
    }

    /// A command of ours, which writes what it says into a file of this name.
    pub(crate) fn process(&self, name: &str, arguments: &[&str]) -> Process {
        let binary = gantry_binary().with_file_name("runtime-gateway");
        assert!(binary.exists(), "{} is missing: build the workspace's binaries first", binary.display());
        let log = self.cluster.path(&format!("{name}.log"));
        let mut command = Command::new(binary);
        command
            .args(["--scheduler", &self.endpoint])
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(File::create(&log).expect("a log"))
            .stderr(File::options().append(true).open(&log).expect("the log"));
        Process { child: command.spawn().expect("a gateway"), log }
    }

    /// A gateway that is given the state directory of `worker`.
    pub(crate) fn gateway(&self, name: &str, worker: &str, more: &[&str]) -> Process {
        let (state, run) = (self.state(worker), self.cluster.path(&format!("{worker}-run")));
        let (state, run) = (state.to_str().expect("UTF-8"), run.to_str().expect("UTF-8"));
        let mut arguments = vec!["--artifact-store", &self.endpoint, "--streamer", &self.endpoint];
        arguments.extend(["--name", worker]);
        arguments.extend(["--state-dir", state, "--runtime-dir", run]);
        arguments.extend(more);
        self.process(name, &arguments)
    }

    fn state(&self, worker: &str) -> PathBuf {
        self.cluster.path(&format!("{worker}-state"))
    }

    /// The command line, at these services.
    pub(crate) fn gantry(&self, arguments: &[&str]) -> Command {
        self.cluster.gantry([&["--server", &self.endpoint], arguments].concat())
    }

    /// The same, which must succeed. Answers what it wrote to standard output.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> Vec<u8> {
        let output = self.gantry(arguments).output().expect("gantry runs");
        assert!(output.status.success(), "{}", describe(&output));
        output.stdout
    }

    /// Waits until `worker` is attended by a gateway that said this about itself, and answers it.
    pub(crate) fn attended(&self, worker: &str, by: &Process) -> Value {
        let endpoint = by.endpoint();
        wait_for("a gateway that attends the worker", || {
            let shown = self.gantry(&["show", "worker", worker, "--json"]).output().expect("gantry runs");
            let shown: Value = serde_json::from_slice(shown.stdout.trim_ascii()).ok()?;
            let there = shown["gateway_endpoint"] == *endpoint && shown["state"] == "running";
            there.then_some(shown)
        })
    }

    /// Destroys what a worker that nobody attends any more holds.
    pub(crate) fn clean(&self, worker: &str) {
        let config = HostConfig {
            supervisor: gantry_binary().with_file_name("runtime-gateway"),
            ..HostConfig::new(self.state(worker), self.cluster.path(&format!("{worker}-run")))
                .expect("a path")
        };
        self.runtime.block_on(async {
            let machine = HostRuntime::open(config).expect("nobody holds it");
            let held = machine.list().await.expect("list");
            for container in held.containers {
                machine.destroy_container(container).await.expect("destroy a container");
            }
            // Children go before their parents, and whose child is whose is not listed.
            let mut volumes = held.volumes;
            while !volumes.is_empty() {
                let mut parents = Vec::new();
                for volume in volumes.iter().rev() {
                    match machine.destroy_volume(*volume).await {
                        Ok(()) => {}
                        Err(RuntimeError::HasChildren(_)) => parents.push(*volume),
                        Err(error) => panic!("destroy a volume: {error:?}"),
                    }
                }
                assert!(parents.len() < volumes.len(), "{parents:?} have children that are not listed");
                volumes = parents;
            }
        });
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        self.stop.take().into_iter().for_each(|stop| _ = stop.send(()));
        let served = self.served.take().expect("it was not waited for");
        let ended = self.runtime.block_on(served);
        if !std::thread::panicking() {
            ended.expect("no panic").expect("it ends well");
        }
    }
}

/// A gateway, killed when this is dropped.
pub(crate) struct Process {
    pub(crate) child: Child,
    log: PathBuf,
}

impl Process {
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).expect("its log")
    }

    /// Where it listens.
    pub(crate) fn endpoint(&self) -> String {
        wait_for("the address of a gateway", || {
            let said = self.said();
            let (_, rest) = said.split_once("endpoint=")?;
            let rest = rest.trim_start_matches('"');
            Some(rest.split(['"', ' ', '\n']).next()?.to_owned())
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "--- {} ---\n{}",
                self.log.display(),
                fs::read_to_string(&self.log).unwrap_or_default()
            );
        }
        // It may be gone already, or frozen: a kill is heard all the same.
        self.child.kill().ok();
        self.child.wait().expect("it ends");
    }
}

/// A file in a directory of its own.
pub(crate) fn directory(path: &Path, file: &str, text: &str) {
    fs::create_dir_all(path).expect("a directory");
    fs::write(path.join(file), text).expect("a file");
}
