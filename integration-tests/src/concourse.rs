//! Fake Concourse workers. Their servers keep their addresses when they are replaced.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use testing::baggageclaim::{self, Driver};
use testing::garden::{Manner, Server};

/// Garden server and Baggageclaim server. Their addresses stay when they are restarted or replaced.
pub struct ConcourseWorker {
    /// Server of containers.
    pub garden: Server,
    /// Server of volumes.
    pub volumes: baggageclaim::Server,
    manner: Manner,
    driver: Driver,
    forwarders: [Forwarder; 2],
    tokio: tokio::runtime::Runtime,
}

impl ConcourseWorker {
    /// Starts both servers.
    #[must_use]
    pub fn start(manner: Manner, driver: Driver) -> Self {
        let tokio = tokio::runtime::Runtime::new().expect("a tokio runtime");
        let garden = Server::start(manner);
        let volumes = tokio.block_on(baggageclaim::Server::start(driver));
        let forwarders =
            [Forwarder::start(garden.address()), Forwarder::start(volumes.address().to_string())];
        Self { garden, volumes, manner, driver, forwarders, tokio }
    }

    /// Returns the address of the Garden server.
    #[must_use]
    pub fn garden_address(&self) -> String {
        self.forwarders[0].address.clone()
    }

    /// Returns the address of the Baggageclaim server.
    #[must_use]
    pub fn volumes_address(&self) -> String {
        self.forwarders[1].address.clone()
    }

    /// Simulates a restart of both servers with their contents: breaks all connections, and lets
    /// Baggageclaim forget unfinished operations.
    pub fn restart(&self) {
        self.volumes.restart();
        self.forwarders.iter().for_each(Forwarder::cut);
    }

    /// Replaces the servers by empty ones.
    pub fn replace(&mut self) {
        self.volumes = self.tokio.block_on(baggageclaim::Server::start(self.driver));
        self.garden = Server::start(self.manner);
        self.forwarders[0].lead_to(self.garden.address());
        self.forwarders[1].lead_to(self.volumes.address().to_string());
    }

    /// Returns the number of processes that were requested.
    #[must_use]
    pub fn runs(&self) -> usize {
        let ran = |line: &&String| line.starts_with("POST ") && line.ends_with("/processes");
        self.garden.requests().iter().filter(ran).count()
    }

    /// Makes the file `/tmp/NAME` in every running container.
    pub fn touch(&self, name: &str) {
        for volume in self.volumes.handles() {
            let tmp = self.volumes.path(&volume).join("rootfs/tmp");
            if tmp.is_dir() {
                fs::write(tmp.join(name), "").expect("write");
            }
        }
    }
}

/// Makes an image. The fake Garden server mounts directories of this machine over its empty
/// directories.
pub fn make_image(path: &Path) {
    let root = path.join("rootfs");
    for name in ["usr", "bin", "sbin", "lib", "lib64", "dev", "proc", "tmp", "etc"] {
        fs::create_dir_all(root.join(name)).expect("directories");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").expect("write");
    fs::write(path.join("metadata.json"), r#"{"env": ["OF=the image"]}"#).expect("write");
}

/// TCP forwarder with a fixed address and a changeable target.
struct Forwarder {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    leads_to: Mutex<String>,
    sockets: Mutex<Vec<Arc<TcpStream>>>,
    stopping: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Forwarder {
    fn start(leads_to: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let shared = Arc::new(Shared {
            leads_to: Mutex::new(leads_to),
            sockets: Mutex::default(),
            stopping: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                if accepting.stopping.load(Ordering::SeqCst) {
                    return;
                }
                accepting.connect(socket);
            }
        });
        Self { address, shared }
    }

    fn cut(&self) {
        for socket in lock(&self.shared.sockets).drain(..) {
            // The socket may already be closed.
            socket.shutdown(Shutdown::Both).ok();
        }
    }

    fn lead_to(&self, address: String) {
        *lock(&self.shared.leads_to) = address;
        self.cut();
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.cut();
        // The connection wakes the accepting thread.
        TcpStream::connect(&self.address).ok();
    }
}

impl Shared {
    fn connect(&self, near: TcpStream) {
        let Ok(far) = TcpStream::connect(&*lock(&self.leads_to)) else { return };
        let (near, far) = (Arc::new(near), Arc::new(far));
        let mut sockets = lock(&self.sockets);
        // Sockets without a copying thread are dropped.
        sockets.retain(|socket| Arc::strong_count(socket) > 1);
        for (from, to) in [(&near, &far), (&far, &near)] {
            from.set_nodelay(true).ok();
            sockets.push(Arc::clone(from));
            let (from, to) = (Arc::clone(from), Arc::clone(to));
            std::thread::spawn(move || {
                io::copy(&mut &*from, &mut &*to).ok();
                to.shutdown(Shutdown::Write).ok();
            });
        }
    }
}
