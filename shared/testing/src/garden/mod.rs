//! A simulated Garden server of a Concourse worker, on a free port.
//!
//! The server reproduces the wire format of the genuine one, and the error messages of the backend
//! selected by [`Manner`]. Containers are directories, and their processes run on this machine. If
//! the test is root and the root directory of a container exists, processes are confined to it and
//! its bind mounts. Except with houdini, they then run as the requested user ([`confine`]) and
//! within the limits of memory and processes ([`groups`]). Otherwise they run unconfined as the
//! user of the test. Operations that only guardian implements (files, networks, metrics) are
//! rejected or answered with zeros.
//!
//! [`Server::inject`], [`Server::break_attachments`], [`Server::hold_ended`], [`Server::lose`],
//! [`Server::forget_exits`] and [`Server::limit_containers`] inject failures.

mod attach;
mod backend;
mod confine;
mod groups;
mod http;
mod process;
mod routes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use backend::Container;
use process::Attachment;

/// The backend that the server simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// The default backend of Concourse.
    Containerd,
    /// The original backend of Garden.
    Guardian,
    /// The backend without isolation.
    Houdini,
}

/// An injected fault of a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection is closed without an answer.
    Drop,
    /// The connection is reset without an answer.
    Reset,
    /// The request is executed, and the connection is closed without an answer.
    LoseAnswer,
    /// The request is executed after a delay.
    Delay(Duration),
    /// The answer is this error without a type.
    Answer(String),
    /// The answer is an error of this type: `ServiceUnavailableError`, `UnrecoverableError`.
    AnswerAs(&'static str, String),
    /// The request is executed, and the answer is this error without a type. Simulates a container
    /// that was created and cannot be started.
    FailAfter(String),
    /// The answer is sent byte by byte.
    Dribble,
}

/// A failure of the main connection of an attachment.
#[derive(Clone, Copy, Debug)]
pub enum Break {
    /// The connection ends without an exit, as at a shutdown of the server.
    End,
    /// The connection is reset.
    Reset,
    /// The connection ends with this error instead of an exit.
    Fail(&'static str),
}

/// Timeouts of the server.
#[derive(Clone, Debug)]
pub struct Times {
    /// Time from SIGTERM to SIGKILL, and from SIGKILL until the stop fails.
    pub stop: Duration,
    /// Time for which a stream can be fetched after its end.
    pub stream_validity: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { stop: Duration::from_secs(10), stream_validity: Duration::from_mins(1) }
    }
}

/// Whether limits of containers can be enforced on this machine.
pub fn keeps_limits() -> bool {
    groups::can_be_made()
}

/// Processes that have ended.
#[derive(Default)]
struct EndedProcesses {
    /// Whether ended processes are held.
    hold: bool,
    /// Number of held processes.
    held: usize,
}

struct State {
    manner: Manner,
    port: u16,
    times: Times,
    directory: tempfile::TempDir,
    containers: Mutex<BTreeMap<String, Arc<Container>>>,
    being_destroyed: Mutex<BTreeSet<String>>,
    streams: Mutex<BTreeMap<u64, Arc<Attachment>>>,
    next: AtomicU64,
    faults: Mutex<Vec<(String, Fault)>>,
    requests: Mutex<Vec<String>>,
    sockets: Mutex<Vec<Weak<TcpStream>>>,
    ended: Mutex<EndedProcesses>,
    let_go: Condvar,
    /// Whether the server forgets the exits of processes.
    forgets_exits: AtomicBool,
    most_containers: AtomicUsize,
    stopping: AtomicBool,
}

/// A poisoned lock is ignored, because the test has failed already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A running server. Dropping it ends its processes and closes its connections, as at a shutdown.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Starts a server with the timeouts of a genuine one.
    pub fn start(manner: Manner) -> Self {
        Self::with_times(manner, Times::default())
    }

    /// Starts a server at this address, where other machines may reach it.
    pub fn start_at(address: IpAddr, manner: Manner) -> Self {
        Self::listen(address, manner, Times::default())
    }

    /// Starts a server with other timeouts.
    pub fn with_times(manner: Manner, times: Times) -> Self {
        Self::listen(Ipv4Addr::LOCALHOST.into(), manner, times)
    }

    fn listen(address: IpAddr, manner: Manner, times: Times) -> Self {
        let listener = TcpListener::bind((address, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            manner,
            port: address.port(),
            times,
            directory: tempfile::tempdir().expect("a directory"),
            containers: Mutex::default(),
            being_destroyed: Mutex::default(),
            streams: Mutex::default(),
            next: AtomicU64::new(1),
            faults: Mutex::default(),
            requests: Mutex::default(),
            sockets: Mutex::default(),
            ended: Mutex::default(),
            let_go: Condvar::new(),
            forgets_exits: AtomicBool::new(false),
            most_containers: AtomicUsize::new(backend::MAX_CONTAINERS),
            stopping: AtomicBool::new(false),
        });
        let (accepting, reaping) = (Arc::clone(&state), Arc::clone(&state));
        let threads = vec![
            std::thread::spawn(move || accept(&listener, &accepting)),
            std::thread::spawn(move || reaping.reap()),
        ];
        Self { address, state, threads }
    }

    /// The host and port of the server.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Makes the next request fail whose method and target contain `pattern`. A request consumes
    /// one fault, in the order of injection.
    pub fn inject(&self, pattern: &str, fault: Fault) {
        lock(&self.state.faults).push((pattern.to_owned(), fault));
    }

    /// Breaks the main connections of all attachments.
    pub fn break_attachments(&self, how: Break) {
        for attachment in lock(&self.state.streams).values() {
            *lock(&attachment.broken) = Some(how);
        }
    }

    /// Holds processes that end from now on in the state ended but not reaped, or releases all held
    /// processes. The exit of a held process is not reported, a stop waits for it in vain, and
    /// containerd rejects attachments to it.
    pub fn hold_ended(&self, hold: bool) {
        lock(&self.state.ended).hold = hold;
        self.state.let_go.notify_all();
    }

    /// Number of held processes.
    pub fn held(&self) -> usize {
        lock(&self.state.ended).held
    }

    /// Loses a container and its processes. The end of the processes is not reported.
    pub fn lose(&self, handle: &str) {
        let lost = lock(&self.state.containers).remove(handle);
        if let Some(container) = lost {
            container.abandon();
        }
    }

    /// Makes the server keep no exits, like containerd before Concourse 8.0. Attachments to ended
    /// processes are then rejected.
    pub fn forget_exits(&self) {
        self.state.forgets_exits.store(true, Ordering::SeqCst);
    }

    /// Number of processes that run, or that have ended and are held.
    pub fn running(&self) -> usize {
        lock(&self.state.containers).values().map(|container| container.running()).sum()
    }

    /// Limits the number of containers, including the existing ones.
    pub fn limit_containers(&self, containers: usize) {
        self.state.most_containers.store(containers, Ordering::SeqCst);
    }

    /// Methods and targets of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.state.requests).clone()
    }

    /// Whether an existing container has network access.
    pub fn has_network(&self, handle: &str) -> bool {
        lock(&self.state.containers).get(handle).is_some_and(|container| container.has_network)
    }

    /// Whether an existing container is privileged.
    pub fn is_privileged(&self, handle: &str) -> bool {
        lock(&self.state.containers).get(handle).is_some_and(|container| container.privileged)
    }

    /// The handles of all containers.
    pub fn handles(&self) -> Vec<String> {
        lock(&self.state.containers).keys().cloned().collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        self.hold_ended(false);
        let containers: Vec<_> = lock(&self.state.containers).values().cloned().collect();
        for container in containers {
            container.kill(rustix::process::Signal::KILL);
        }
        for attachment in lock(&self.state.streams).values() {
            attachment.close();
        }
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        for socket in lock(&self.state.sockets).iter().filter_map(Weak::upgrade) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    for socket in listener.incoming() {
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(socket) = socket else { continue };
        let _ = socket.set_nodelay(true);
        let socket = Arc::new(socket);
        {
            let mut sockets = lock(&state.sockets);
            sockets.retain(|socket| socket.strong_count() > 0);
            sockets.push(Arc::downgrade(&socket));
        }
        let state = Arc::clone(state);
        std::thread::spawn(move || routes::serve(&state, http::Connection::new(socket)));
    }
}
