//! A simulated Baggageclaim server of a Concourse worker, with volumes in a temporary directory.
//!
//! The server reproduces the status codes, bodies, content types and quirks of the genuine one. A
//! client that works with it works with a worker. User ids are not mapped, as with
//! `--disable-user-namespaces`, unless the server is started [`with_ids`](Server::with_ids).
//! Archives are packed and unpacked while they are transferred. [`Faults`] inject failures.

mod archives;
mod owners;
mod routes;
mod volumes;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use volumes::Volumes;

/// The volume driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// Children are copies.
    Naive,
    /// Children are overlay mounts. Creation over an existing volume empties it, and so does the
    /// loss of its parent.
    Overlay,
}

/// Injected faults. Each fault stays until it is changed. Counts decrease with each failure.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Number of requests that are executed but closed without an answer. The text is the beginning
    /// of their method and path.
    pub lose_answers: Option<(String, usize)>,
    /// Close connections in the middle of an archive.
    pub cut_archives: bool,
    /// Append an error to archives.
    pub fail_archives: bool,
    /// Creations never finish.
    pub never_create: bool,
    /// There is no clean-up of orphans, as before Concourse 8.1.
    pub no_cleanup: bool,
    /// Encodings that the server supports, as an older worker. `None`: all.
    pub encodings: Option<Vec<String>>,
    /// Requests whose method and path begin with this text are never answered.
    pub stalls: Option<String>,
    /// Number of queries for a creation that report it as unfinished.
    pub slow_creations: usize,
    /// Volumes whose destruction fails.
    pub stuck: Vec<String>,
    /// Number of destructions that fail after the volume has been unlisted.
    pub half_destroyed: usize,
    /// Volumes can be destroyed only one by one.
    pub no_destroy_many: bool,
    /// Number of incoming archives that are rejected after a part has been unpacked.
    pub refuse_archives: usize,
    /// A path, and the number of times that the file there changes after an archive with it was
    /// unpacked.
    pub spoil_archives: Option<(String, usize)>,
    /// Transfers to other workers pause after their first bytes while this is set.
    pub hold_transfers: bool,
    /// A wrong answer for `/p2p-url`.
    pub p2p_url: Option<String>,
}

/// The name of the file with the id map for `tar`.
const OWNERS: &str = "owners";

struct State {
    root: tempfile::TempDir,
    address: SocketAddr,
    driver: Driver,
    /// Whether unprivileged volumes have mapped ids.
    ids: bool,
    volumes: Mutex<Volumes>,
    faults: Mutex<Faults>,
    requests: Mutex<Vec<String>>,
    /// The requests to create volumes.
    creations: Mutex<Vec<serde_json::Value>>,
    /// Transfers to other workers. They continue after their client has gone.
    transfers: Mutex<JoinSet<()>>,
}

/// A running server. Dropping it closes its connections and removes the volumes.
pub struct Server {
    state: Arc<State>,
    _serving: JoinSet<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Starts a server on a free port.
    pub async fn start(driver: Driver) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), driver).await
    }

    /// Starts a server whose unprivileged volumes have the ids of unprivileged containers, as by
    /// default. Needs root.
    pub async fn with_ids(driver: Driver) -> Self {
        Self::listen(Ipv4Addr::LOCALHOST.into(), driver, true).await
    }

    /// Starts a server at this address, where other machines may reach it.
    pub async fn start_at(address: IpAddr, driver: Driver) -> Self {
        Self::listen(address, driver, false).await
    }

    async fn listen(address: IpAddr, driver: Driver, ids: bool) -> Self {
        let listener = TcpListener::bind((address, 0)).await.expect("a port");
        let root = tempfile::tempdir().expect("a directory for volumes");
        for name in ["init", "live", "dead"] {
            std::fs::create_dir(root.path().join(name)).expect("a directory for volumes");
        }
        std::fs::write(root.path().join(OWNERS), owners::MAP).expect("a file beside the volumes");
        let state = Arc::new(State {
            root,
            address: listener.local_addr().expect("an address"),
            driver,
            ids,
            volumes: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            creations: Mutex::default(),
            transfers: Mutex::default(),
        });
        let mut serving = JoinSet::new();
        let accepting = state.clone();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let state = accepting.clone();
                let service = service_fn(move |request| routes::serve(state.clone(), request));
                connections.spawn(async move {
                    _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { state, _serving: serving }
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// The directory of a volume.
    pub fn path(&self, handle: &str) -> PathBuf {
        self.state.path(handle)
    }

    /// The handles of all volumes.
    pub fn handles(&self) -> Vec<String> {
        lock(&self.state.volumes).live.keys().cloned().collect()
    }

    /// Replaces the injected faults.
    pub fn set_faults(&self, faults: Faults) {
        *lock(&self.state.faults) = faults;
    }

    /// Method, path and query of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.state.requests).clone()
    }

    /// Bodies of all requests so far that create a volume.
    pub fn creations(&self) -> Vec<serde_json::Value> {
        lock(&self.state.creations).clone()
    }

    /// Forgets all creations, as after a restart.
    pub fn restart(&self) {
        lock(&self.state.volumes).futures.clear();
    }
}

impl Faults {
    fn supports(&self, encoding: &str) -> bool {
        let all = ["raw", "gzip", "zstd", "s2"].contains(&encoding);
        all && self.encodings.as_ref().is_none_or(|some| some.iter().any(|known| known == encoding))
    }
}

impl State {
    fn live(&self) -> PathBuf {
        self.root.path().join("live")
    }

    /// The directory of volumes that are being destroyed.
    fn dead(&self) -> PathBuf {
        self.root.path().join("dead")
    }

    fn path(&self, handle: &str) -> PathBuf {
        self.live().join(handle).join("volume")
    }

    /// The id map for archives of a volume. `None`: ids are those of the disk.
    fn owners(&self, privileged: bool) -> Option<PathBuf> {
        (self.ids && !privileged).then(|| self.root.path().join(OWNERS))
    }
}

/// Empties a directory, like an overlay mount that lost its layers.
fn empty(directory: &Path) {
    _ = std::fs::remove_dir_all(directory);
    std::fs::create_dir_all(directory).expect("a directory for a volume");
}
