//! A Garden server, as a Concourse worker has it, on a port of its own.
//!
//! It speaks the bytes of the real one, and fails in the words of the backend whose [`Manner`] it has. Its containers are directories and
//! their processes run on this machine: where the test is root and the container has a root that exists, in that root with its bind mounts
//! and, but for houdini, as the user that was asked for ([`confine`]) and within the limits of memory and processes ([`groups`]); else unconfined and as the test's user. What only guardian implements
//! for real (files, networks, metrics) is refused, or answered with zeros.
//!
//! [`Server::inject`], [`Server::break_attachments`], [`Server::hold_ended`], [`Server::lose`], [`Server::forget_exits`] and
//! [`Server::take_no_more`] make it fail.

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

/// Which backend it behaves like, where they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Concourse's default.
    Containerd,
    /// The oldest.
    Guardian,
    /// The one without isolation.
    Houdini,
}

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection is closed in place of an answer.
    Drop,
    /// The connection is reset in place of an answer.
    Reset,
    /// The request is carried out, and the connection closed in place of an answer.
    LoseAnswer,
    /// The request is carried out later.
    Delay(Duration),
    /// The answer is this error, with no type.
    Answer(String),
    /// The answer is an error of this type: `ServiceUnavailableError`, `UnrecoverableError`.
    AnswerAs(&'static str, String),
    /// The request is carried out, and the answer is this error, with no type: a container that was created and could not be started.
    FailAfter(String),
    /// The answer comes byte for byte.
    Dribble,
}

/// What happens to the main connection of an attachment.
#[derive(Clone, Copy, Debug)]
pub enum Break {
    /// It ends without an exit, as when the server goes.
    End,
    /// It is reset.
    Reset,
    /// It ends with this error in place of an exit.
    Fail(&'static str),
}

/// The times of a real server, or a test's.
#[derive(Clone, Debug)]
pub struct Times {
    /// From SIGTERM to SIGKILL, and from there until a stop is given up.
    pub stop: Duration,
    /// How long a stream can be fetched after its end.
    pub stream_validity: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { stop: Duration::from_secs(10), stream_validity: Duration::from_mins(1) }
    }
}

/// Whether its containers are kept to their limits here.
pub fn keeps_limits() -> bool {
    groups::can_be_made()
}

/// Processes that have ended.
#[derive(Default)]
struct Ended {
    /// Whether they stay as they are.
    hold: bool,
    /// How many do.
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
    ended: Mutex<Ended>,
    let_go: Condvar,
    /// Of whichever process ended.
    forgets_exits: AtomicBool,
    most_containers: AtomicUsize,
    stopping: AtomicBool,
}

/// A thread that panicked has failed its test already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A running server. Dropping it ends its processes, and closes its connections as a shutdown does.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Starts one that takes its time as a real one does.
    pub fn start(manner: Manner) -> Self {
        Self::with_times(manner, Times::default())
    }

    /// Starts one at this address of the machine, where others may reach it.
    pub fn start_at(address: IpAddr, manner: Manner) -> Self {
        Self::listen(address, manner, Times::default())
    }

    /// Starts one with other times.
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
            most_containers: AtomicUsize::new(backend::MOST_CONTAINERS),
            stopping: AtomicBool::new(false),
        });
        let (accepting, reaping) = (Arc::clone(&state), Arc::clone(&state));
        let threads = vec![
            std::thread::spawn(move || accept(&listener, &accepting)),
            std::thread::spawn(move || reaping.reap()),
        ];
        Self { address, state, threads }
    }

    /// Where it listens, as a host and a port.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Has the next request fail whose method and target contain `pattern`. A request takes one fault at a time, in order.
    pub fn inject(&self, pattern: &str, fault: Fault) {
        lock(&self.state.faults).push((pattern.to_owned(), fault));
    }

    /// Breaks the main connection of everyone attached to anything.
    pub fn break_attachments(&self, how: Break) {
        for attachment in lock(&self.state.streams).values() {
            *lock(&attachment.broken) = Some(how);
        }
    }

    /// Has processes that end from now on stay as they are, known as ended and not reaped, or lets go of those that are held. Nobody is told
    /// how one ended that is held, a stop waits for it in vain, and a containerd worker attaches nobody to it.
    pub fn hold_ended(&self, hold: bool) {
        lock(&self.state.ended).hold = hold;
        self.state.let_go.notify_all();
    }

    /// How many processes are held.
    pub fn held(&self) -> usize {
        lock(&self.state.ended).held
    }

    /// Loses a container with what runs in it, and tells nobody how that ended.
    pub fn lose(&self, handle: &str) {
        let lost = lock(&self.state.containers).remove(handle);
        if let Some(container) = lost {
            container.abandon();
        }
    }

    /// Has it keep no exits, as one of before Concourse 8.0 with containerd: it attaches nobody to what has ended.
    pub fn forget_exits(&self) {
        self.state.forgets_exits.store(true, Ordering::SeqCst);
    }

    /// How many processes run, or have ended and are held.
    pub fn running(&self) -> usize {
        lock(&self.state.containers).values().map(|container| container.running()).sum()
    }

    /// Has it take no more containers than this, those that it has included.
    pub fn take_no_more(&self, containers: usize) {
        self.state.most_containers.store(containers, Ordering::SeqCst);
    }

    /// Methods and targets of the requests so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.state.requests).clone()
    }

    /// Whether a container that is there reaches anybody.
    pub fn has_network(&self, handle: &str) -> bool {
        lock(&self.state.containers).get(handle).is_some_and(|container| container.has_network)
    }

    /// Whether a container that is there was made as a privileged one.
    pub fn is_privileged(&self, handle: &str) -> bool {
        lock(&self.state.containers).get(handle).is_some_and(|container| container.privileged)
    }

    /// Handles of the containers that there are.
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
        // Wakes the one that accepts.
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
