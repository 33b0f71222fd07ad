//! Containers, and the differences between the three backends.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use super::confine::{self, Confined, Ids};
use super::groups::{self, Groups};
use super::process::{Attachment, Process, Start};
use super::{Break, Manner, State, lock};

/// Default limit of containers per worker.
pub(super) const MAX_CONTAINERS: usize = 250;
/// Maximum length of an identifier in containerd, in bytes.
const LONGEST_NAME: usize = 76;
/// Maximum length of a property name, which containerd stores as a label, in bytes.
const LONGEST_KEY: usize = 2048;

/// The error of a handler, as it appears on the wire.
#[derive(serde::Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Failure {
    #[serde(skip)]
    pub status: u16,
    r#type: &'static str,
    message: String,
    handle: String,
    #[serde(rename = "ProcessID")]
    process_id: String,
    binary: String,
}

impl Failure {
    pub(super) fn plain(message: impl Into<String>) -> Self {
        let (handle, process_id, binary) = Default::default();
        Self { status: 500, r#type: "", message: message.into(), handle, process_id, binary }
    }

    pub(super) fn of_type(r#type: &'static str, message: String) -> Self {
        Self { r#type, ..Self::plain(message) }
    }

    fn no_process(id: &str) -> Self {
        let plain = Self::plain(format!("unknown process: {id}"));
        Self { status: 404, r#type: "ProcessNotFoundError", process_id: id.to_owned(), ..plain }
    }

    fn no_program(message: String) -> Self {
        Self { r#type: "ExecutableNotFoundError", ..Self::plain(message) }
    }
}

/// Checks a container or process name as containerd does: letters and digits, with single `-`, `_`
/// or `.` between them.
fn identifier(name: &str, manner: Manner) -> Result<(), Failure> {
    if manner != Manner::Containerd {
        return Ok(());
    }
    if name.len() > LONGEST_NAME {
        let most = format!("identifier \"{name}\" greater than maximum length ({LONGEST_NAME} characters)");
        return Err(Failure::plain(format!("{most}: invalid argument")));
    }
    let plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if name.split(['-', '_', '.']).all(plain) {
        return Ok(());
    }
    Err(Failure::plain(format!("identifier \"{name}\" must match its pattern: invalid argument")))
}

/// Checks a property name as a containerd worker does.
pub(super) fn property_name(name: &str, manner: Manner) -> Result<(), Failure> {
    if manner == Manner::Containerd && name.len() > LONGEST_KEY {
        return Err(Failure::plain(format!("property name {:?} is too long", &name[..32])));
    }
    Ok(())
}

pub(super) struct Container {
    pub handle: String,
    pub properties: Mutex<BTreeMap<String, String>>,
    pub limits: Value,
    pub privileged: bool,
    /// Whether the container has network access. A containerd worker gives none to a container
    /// without rules.
    pub has_network: bool,
    env: Vec<String>,
    has_rootfs: bool,
    /// The root directory of confined processes.
    root: Option<PathBuf>,
    mounts: Value,
    pub groups: Groups,
    directory: PathBuf,
    processes: Mutex<BTreeMap<String, Arc<Process>>>,
    exits: Mutex<BTreeMap<String, i32>>,
    last_exit: Mutex<Option<i32>>,
    grace: Mutex<Duration>,
    calls: AtomicUsize,
    idle_since: Mutex<Instant>,
}

/// A call that names a container. The grace time of the container restarts at the end of the call.
pub(super) struct Call(Arc<Container>);

impl Drop for Call {
    fn drop(&mut self) {
        *lock(&self.0.idle_since) = Instant::now();
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(super) fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

impl Container {
    pub(super) fn call(self: &Arc<Self>) -> Call {
        self.calls.fetch_add(1, Ordering::SeqCst);
        Call(Arc::clone(self))
    }

    pub(super) fn kill(&self, signal: Signal) {
        for process in lock(&self.processes).values().filter(|process| lock(&process.exit).is_none()) {
            process.kill(signal);
        }
    }

    /// Kills the processes of the container. Their end is not reported.
    pub(super) fn abandon(&self) {
        for process in lock(&self.processes).values() {
            process.break_attachments(Break::End);
            process.kill(Signal::KILL);
        }
    }

    pub(super) fn running(&self) -> usize {
        lock(&self.processes).len()
    }

    fn is_still(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        while !lock(&self.processes).is_empty() {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        true
    }

    pub(super) fn stop(&self, kill: bool, patience: Duration) -> Result<(), Failure> {
        if !kill {
            self.kill(Signal::TERM);
            if self.is_still(patience) {
                return Ok(());
            }
        }
        self.kill(Signal::KILL);
        if self.is_still(patience) { Ok(()) } else { Err(Failure::plain("stop: grace period timeout")) }
    }

    fn ended(&self, process: &Process, exit: i32, manner: Manner) {
        lock(&self.exits).insert(process.id.clone(), exit);
        *lock(&self.last_exit) = Some(exit);
        if manner == Manner::Containerd {
            lock(&self.properties).insert("garden.process-exit-status".to_owned(), exit.to_string());
        }
        lock(&self.processes).remove(&process.id);
    }

    /// Starts the process of `spec`.
    pub(super) fn run(
        self: &Arc<Self>,
        state: &Arc<State>,
        spec: &Value,
        attachment: Arc<Attachment>,
    ) -> Result<Arc<Process>, Failure> {
        let text = |name: &str| spec[name].as_str().unwrap_or_default().to_owned();
        let mut id = text("id");
        if id.is_empty() {
            id = format!("made-up-{}", state.next.fetch_add(1, Ordering::SeqCst));
        }
        identifier(&id, state.manner)?;
        let user = text("user");
        let ids = match state.manner {
            Manner::Houdini => Some(Ids::ROOT),
            Manner::Containerd | Manner::Guardian => confine::ids(self.root.as_deref(), &user),
        };
        let ids = ids.ok_or_else(|| {
            Failure::plain(format!(
                "lookup user: unable to find user {user}: no matching entries in passwd file"
            ))
        })?;
        let mut processes = lock(&self.processes);
        if processes.contains_key(&id) && state.manner != Manner::Houdini {
            return Err(Failure::plain(match state.manner {
                Manner::Containerd => format!("task exec: id {id}: already exists"),
                _ => format!("process ID '{id}' already in use"),
            }));
        }
        let mut env = vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()];
        env.extend(self.env.iter().cloned());
        if !user.is_empty() {
            env.push(format!("USER={user}"));
        }
        env.extend(strings(&spec["env"]));
        let program = self.program(&text("path"), &env, state.manner)?;
        let dir = self.directory.join(text("dir").trim_start_matches('/'));
        std::fs::create_dir_all(&dir).map_err(|error| Failure::plain(error.to_string()))?;
        let confined = self.root.as_ref().map(|root| Confined::new(root, &self.mounts, &text("dir"), ids));
        let confined = confined.transpose().map_err(|error| Failure::plain(error.to_string()))?;
        let side = |name| spec["tty"]["window_size"][name].as_u64().and_then(|side| u16::try_from(side).ok());
        let start = Start {
            id: id.clone(),
            program: &program,
            args: strings(&spec["args"]),
            env,
            dir: &dir,
            confined,
            entrances: self.groups.entrances().map_err(|error| Failure::plain(error.to_string()))?,
            terminal: spec["tty"]
                .is_object()
                .then(|| (side("columns").unwrap_or(80), side("rows").unwrap_or(24))),
        };
        let (container, state, manner) = (Arc::clone(self), Arc::clone(state), state.manner);
        let process = Process::start(start, manner, attachment, move |process, exit| {
            state.wait_until_released();
            container.ended(process, exit, manner)
        });
        let process = process.map_err(|error| match error.kind() {
            // The error text of Go.
            std::io::ErrorKind::PermissionDenied => {
                Failure::plain(format!("fork/exec {}: permission denied", program.display()))
            }
            _ => Failure::plain(error.to_string()),
        })?;
        processes.insert(id, Arc::clone(&process));
        Ok(process)
    }

    fn program(&self, path: &str, env: &[String], manner: Manner) -> Result<PathBuf, Failure> {
        let is_there = |path: &PathBuf| {
            let inside = self.root.as_ref().map(|root| root.join(path.strip_prefix("/").unwrap_or(path)));
            path.is_file() || inside.is_some_and(|inside| inside.is_file())
        };
        let found = if path.contains('/') {
            Some(PathBuf::from(path)).filter(is_there)
        } else {
            let search = env.iter().rev().find_map(|pair| pair.strip_prefix("PATH=")).unwrap_or_default();
            search.split(':').map(|dir| Path::new(dir).join(path)).find(is_there)
        };
        found.ok_or_else(|| match manner {
            Manner::Containerd if path.contains('/') => Failure::plain(format!(
                "OCI runtime exec failed: exec failed: unable to start container process: exec: \"{path}\": stat {path}: no such file or directory: unknown"
            )),
            Manner::Containerd => Failure::plain(format!(
                "OCI runtime exec failed: exec failed: unable to start container process: exec: \"{path}\": executable file not found in $PATH: unknown"
            )),
            Manner::Houdini if path.contains('/') || !self.has_rootfs => {
                Failure::plain(format!("fork/exec {path}: no such file or directory"))
            }
            Manner::Guardian | Manner::Houdini => Failure::no_program(format!("executable not found: {path}")),
        })
    }

    /// Finds the process of an attachment to `id`, or its exit.
    pub(super) fn process(&self, id: &str, state: &State) -> Result<Result<Arc<Process>, i32>, Failure> {
        let manner = state.manner;
        let last_exit = *lock(&self.last_exit);
        // containerd reports the exit of the process that ended last, for any id.
        if let (Manner::Containerd, Some(exit), false) =
            (manner, last_exit, state.forgets_exits.load(Ordering::SeqCst))
        {
            return Ok(Err(exit));
        }
        if let Some(process) = lock(&self.processes).get(id) {
            if manner == Manner::Containerd && process.has_ended() && lock(&state.ended).hold {
                return Err(Failure::plain("proc not running: status = stopped"));
            }
            return Ok(Ok(Arc::clone(process)));
        }
        match (manner, lock(&self.exits).get(id)) {
            (Manner::Guardian, Some(exit)) => Ok(Err(*exit)),
            (Manner::Guardian, None) => Err(Failure::no_process(id)),
            (Manner::Houdini, _) => Err(Failure::plain(format!("unknown process: {id}"))),
            (Manner::Containerd, _) => Err(Failure::plain(format!(
                "load proc: no running process found: process does not exist {id}: not found"
            ))),
        }
    }

    pub(super) fn set_grace(&self, grace: Duration) {
        *lock(&self.grace) = grace;
    }
}

impl State {
    /// Waits while ended processes are held.
    fn wait_until_released(&self) {
        let mut ended = lock(&self.ended);
        ended.held += 1;
        let let_go = self.let_go.wait_while(ended, |ended| ended.hold);
        let_go.unwrap_or_else(|poisoned| poisoned.into_inner()).held -= 1;
    }

    pub(super) fn create(&self, spec: &Value) -> Result<String, Failure> {
        let text = |name: &str| spec[name].as_str().unwrap_or_default().to_owned();
        let (mut handle, rootfs) = (text("handle"), text("rootfs"));
        if handle.is_empty() {
            if self.manner == Manner::Containerd {
                return Err(Failure::plain("handle must be specified"));
            }
            handle = format!("made-up-{}", self.next.fetch_add(1, Ordering::SeqCst));
        }
        identifier(&handle, self.manner)?;
        for name in spec["properties"].as_object().into_iter().flatten().map(|(name, _)| name) {
            property_name(name, self.manner)?;
        }
        if self.manner == Manner::Containerd && rootfs.is_empty() {
            return Err(Failure::plain("new container spec: rootfs must not be empty"));
        }
        if !rootfs.is_empty() && !rootfs.starts_with("raw:///") {
            return Err(Failure::plain(format!("unsupported rootfs: {rootfs}")));
        }
        let mut containers = lock(&self.containers);
        if containers.contains_key(&handle) {
            match self.manner {
                Manner::Containerd => {
                    return Err(Failure::plain(format!("container \"{handle}\": already exists")));
                }
                Manner::Guardian => return Err(Failure::plain(format!("Handle '{handle}' already in use"))),
                Manner::Houdini => {}
            }
        }
        if self.manner != Manner::Houdini && containers.len() >= self.most_containers.load(Ordering::SeqCst) {
            return Err(Failure::plain("max containers reached"));
        }
        let directory = self.directory.path().join(self.next.fetch_add(1, Ordering::SeqCst).to_string());
        std::fs::create_dir(&directory).map_err(|error| Failure::plain(error.to_string()))?;
        let properties = spec["properties"].as_object().into_iter().flatten();
        let properties =
            properties.map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned()));
        let kept = self.manner != Manner::Houdini && groups::can_be_made();
        let name = format!("gantry-garden-{}-{handle}", self.port);
        let groups = kept.then(|| Groups::make(&name, &spec["limits"])).transpose();
        let groups = groups.map_err(|error| Failure::plain(error.to_string()))?.unwrap_or_default();
        let honoured = self.manner == Manner::Guardian;
        let grace = spec["grace_time"].as_u64().filter(|_| honoured).unwrap_or(0);
        let container = Container {
            handle: handle.clone(),
            properties: Mutex::new(properties.collect()),
            limits: spec["limits"].clone(),
            privileged: spec["privileged"] == true,
            has_network: self.manner != Manner::Containerd
                || spec["netout_rules"].as_array().is_some_and(|rules| !rules.is_empty()),
            env: strings(&spec["env"]),
            has_rootfs: !rootfs.is_empty(),
            root: confine::root(spec),
            mounts: spec["bind_mounts"].clone(),
            groups,
            directory,
            processes: Mutex::default(),
            exits: Mutex::default(),
            last_exit: Mutex::default(),
            grace: Mutex::new(Duration::from_nanos(grace)),
            calls: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
        };
        containers.insert(handle.clone(), Arc::new(container));
        Ok(handle)
    }

    pub(super) fn lookup(&self, handle: &str) -> Result<Arc<Container>, Failure> {
        lock(&self.containers).get(handle).cloned().ok_or_else(|| self.no_container(handle))
    }

    /// Finds a container. The error is that of guardian for a missing depot entry.
    pub(super) fn lookup_to_run(&self, handle: &str) -> Result<Arc<Container>, Failure> {
        self.lookup(handle).map_err(|error| match self.manner {
            Manner::Guardian => Failure::plain("does not exist"),
            Manner::Containerd | Manner::Houdini => error,
        })
    }

    fn no_container(&self, handle: &str) -> Failure {
        if self.manner == Manner::Containerd {
            let message =
                format!("get container: container \"{handle}\" in namespace \"concourse\": not found");
            return Failure::plain(message);
        }
        let plain = Failure::plain(format!("unknown handle: {handle}"));
        Failure { status: 404, r#type: "ContainerNotFoundError", handle: handle.to_owned(), ..plain }
    }

    pub(super) fn destroy(&self, handle: &str) -> Result<(), Failure> {
        let container = self.lookup(handle)?;
        if !lock(&self.being_destroyed).insert(handle.to_owned()) {
            return Err(Failure::plain("container already being destroyed"));
        }
        let stopped = container.stop(false, self.times.stop);
        if stopped.is_ok() {
            lock(&self.containers).remove(handle);
            let _ = std::fs::remove_dir_all(&container.directory);
        }
        lock(&self.being_destroyed).remove(handle);
        stopped
    }

    pub(super) fn list(&self, filter: &[(String, String)]) -> Result<Vec<String>, Failure> {
        if self.manner == Manner::Containerd && filter.iter().any(|(_, value)| value.is_empty()) {
            return Err(Failure::plain("list containers: property value must not be empty"));
        }
        let listed = |container: &Container| {
            let properties = lock(&container.properties);
            let mut matches = filter.iter().map(|(key, value)| properties.get(key) == Some(value));
            match self.manner {
                Manner::Containerd => filter.is_empty() || matches.any(|matches| matches),
                Manner::Guardian | Manner::Houdini => matches.all(|matches| matches),
            }
        };
        let containers = lock(&self.containers);
        Ok(containers.values().filter(|container| listed(container)).map(|c| c.handle.clone()).collect())
    }

    /// Destroys containers that no call has named for their grace time.
    pub(super) fn reap(&self) {
        while !self.stopping.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
            let expired = |container: &&Arc<Container>| {
                let grace = *lock(&container.grace);
                !grace.is_zero()
                    && container.calls.load(Ordering::SeqCst) == 0
                    && lock(&container.idle_since).elapsed() > grace
            };
            let expired: Vec<_> = lock(&self.containers).values().filter(expired).cloned().collect();
            for container in expired {
                let _ = self.destroy(&container.handle);
            }
        }
    }
}
