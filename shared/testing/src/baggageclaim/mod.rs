//! A Baggageclaim server for tests: what a Concourse worker answers, quirks included, over volumes in a temporary directory.
//!
//! It keeps to the statuses, bodies and content types of the genuine one, so that a client that gets on with it gets on with a worker. Ids are
//! left alone, as with `--disable-user-namespaces`, unless it was started [`with_ids`](Server::with_ids). Archives are packed and unpacked as
//! they pass by. [`Faults`] make it fail on request.

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

/// How volumes behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A child is a copy.
    Naive,
    /// As with overlay mounts: creation over a volume empties it, and so does the loss of its parent.
    Overlay,
}

/// What goes wrong, until it is set otherwise. Counts go down with each time that it did.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Do as asked, and close the connection instead of answering: for this many requests whose method and path begin with the text.
    pub lose_answers: Option<(String, usize)>,
    /// Close the connection in the middle of an archive.
    pub cut_archives: bool,
    /// Append an error to archives.
    pub fail_archives: bool,
    /// Creations do not end.
    pub never_create: bool,
    /// As before 8.1, there is no clean-up.
    pub no_cleanup: bool,
    /// As an older worker, it knows only these encodings. None: all.
    pub encodings: Option<Vec<String>>,
    /// Requests whose method and path begin with this are never answered.
    pub stalls: Option<String>,
    /// Creations are said to go on when they are asked about, for this many times.
    pub slow_creations: usize,
    /// These volumes cannot be destroyed.
    pub stuck: Vec<String>,
    /// So many destructions fail when the volume is out of sight already.
    pub half_destroyed: usize,
    /// Volumes are destroyed one by one only.
    pub no_destroy_many: bool,
    /// Archives that come in are refused once they have begun, this many of them, and a part of them stays.
    pub refuse_archives: usize,
    /// The file at this path changes as soon as an archive with it was unpacked: so often.
    pub spoil_archives: Option<(String, usize)>,
    /// Transfers to other workers stop when they have begun, and go on when this is no more.
    pub hold_transfers: bool,
    /// What `/p2p-url` says instead of the truth.
    pub p2p_url: Option<String>,
}

/// A file beside the volumes, for `tar`.
const OWNERS: &str = "owners";

struct State {
    root: tempfile::TempDir,
    address: SocketAddr,
    driver: Driver,
    /// Whether unprivileged volumes have ids of their own.
    ids: bool,
    volumes: Mutex<Volumes>,
    faults: Mutex<Faults>,
    requests: Mutex<Vec<String>>,
    /// What volumes were asked for.
    creations: Mutex<Vec<serde_json::Value>>,
    /// Transfers to other workers: they go on when nobody waits for them any more.
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
    /// Starts one on a port of its own.
    pub async fn start(driver: Driver) -> Self {
        Self::start_at(Ipv4Addr::LOCALHOST.into(), driver).await
    }

    /// Starts one whose unprivileged volumes have the ids of unprivileged containers, as by default. Only root can.
    pub async fn with_ids(driver: Driver) -> Self {
        Self::listen(Ipv4Addr::LOCALHOST.into(), driver, true).await
    }

    /// Starts one at this address of the machine, where others may reach it.
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// Where the files of a volume are.
    pub fn path(&self, handle: &str) -> PathBuf {
        self.state.path(handle)
    }

    /// Handles of the volumes that there are.
    pub fn handles(&self) -> Vec<String> {
        lock(&self.state.volumes).live.keys().cloned().collect()
    }

    /// Sets what goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        *lock(&self.state.faults) = faults;
    }

    /// Method and path, with its query, of each request so far.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.state.requests).clone()
    }

    /// The bodies of all requests so far to make a volume.
    pub fn creations(&self) -> Vec<serde_json::Value> {
        lock(&self.state.creations).clone()
    }

    /// Forgets all creations, as a restarted server has.
    pub fn restart(&self) {
        lock(&self.state.volumes).futures.clear();
    }
}

impl Faults {
    fn knows(&self, encoding: &str) -> bool {
        let all = ["raw", "gzip", "zstd", "s2"].contains(&encoding);
        all && self.encodings.as_ref().is_none_or(|some| some.iter().any(|known| known == encoding))
    }
}

impl State {
    fn live(&self) -> PathBuf {
        self.root.path().join("live")
    }

    /// Where volumes are while they are being removed.
    fn dead(&self) -> PathBuf {
        self.root.path().join("dead")
    }

    fn path(&self, handle: &str) -> PathBuf {
        self.live().join(handle).join("volume")
    }

    /// What says whose files are whose in archives of a volume. None: they are those of the disk.
    fn owners(&self, privileged: bool) -> Option<PathBuf> {
        (self.ids && !privileged).then(|| self.root.path().join(OWNERS))
    }
}

/// Empties a directory, as an overlay mount whose layers are gone.
fn empty(directory: &Path) {
    _ = std::fs::remove_dir_all(directory);
    std::fs::create_dir_all(directory).expect("a directory for a volume");
}
