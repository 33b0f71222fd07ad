//! Init of a running container, whose namespaces further processes and other containers join.
//!
//! Invariant: init belongs to a supervisor that lives. Its process id cannot be reused before this
//! supervisor has reaped it.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};

use crate::runtimes::host::{filesystem, paths};

/// Maximum time for a connection to a port of a container.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a TCP port at 127.0.0.1 accepts connections in the network of the container with this
/// main process.
pub(in crate::runtimes::host) fn accepts_connections(main: &Path, port: u16) -> io::Result<bool> {
    let init = ContainerInit::open(main)?;
    // A thread cannot return to its network reliably, so one of its own enters the container's.
    let probe = std::thread::Builder::new().name("port-probe".to_owned()).spawn(move || {
        init.enter_network()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Ok(TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).is_ok())
    })?;
    probe.join().unwrap_or_else(|_| Err(io::Error::other("the thread that probes a port panicked")))
}

/// Kills the container with this main process, if it runs. All its processes die with init.
pub(in crate::runtimes::host) fn kill(main: &Path) -> io::Result<()> {
    match ContainerInit::open(main) {
        Ok(init) => match rustix::process::pidfd_send_signal(&init.watch, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        },
        // A process that has joined a container has no init, and dies with that of the container.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Init of a running container.
pub(super) struct ContainerInit {
    pid: Pid,
    pub(super) watch: OwnedFd,
    pub(super) root: PathBuf,
}

impl ContainerInit {
    /// Opens the init of the container with this main process.
    pub(super) fn open(main: &Path) -> io::Result<Self> {
        let read = |name: &str| {
            let text = fs::read_to_string(main.join(name))?;
            let pid = text.trim().parse().ok().filter(|pid| *pid > 1).and_then(Pid::from_raw);
            pid.ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{name} is not a process id"))
            })
        };
        let (supervisor, pid) = (read(paths::ALIVE)?, read(paths::INIT)?);
        let watch = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let ended = || io::Error::new(io::ErrorKind::NotFound, "its main process has ended");
        if parent(pid)? != Some(supervisor) || filesystem::exists(&main.join(paths::END))? {
            return Err(ended());
        }
        Ok(Self { pid, watch, root: PathBuf::from(format!("/proc/{}/root", pid.as_raw_nonzero())) })
    }

    /// Its user namespace.
    pub(super) fn users(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/{}/ns/user", self.pid.as_raw_nonzero());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Opens the root of the container.
    pub(super) fn root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.root, flags, Mode::empty())?)
    }

    /// Whether the container has the network of this process. An ordinary user may not enter the
    /// network of the machine again.
    fn shares_network(&self) -> io::Result<bool> {
        let other = fs::metadata(format!("/proc/{}/ns/net", self.pid.as_raw_nonzero()))?;
        Ok(fs::metadata("/proc/self/ns/net")?.ino() == other.ino())
    }

    /// The namespaces that a further process of the container joins, except its user namespace.
    pub(super) fn namespaces(&self) -> io::Result<ThreadNameSpaceType> {
        use ThreadNameSpaceType as Kind;
        let all = Kind::MOUNT
            | Kind::CONTROL_GROUP
            | Kind::HOST_NAME_AND_NIS_DOMAIN_NAME
            | Kind::INTER_PROCESS_COMMUNICATION
            | Kind::PROCESS_ID;
        Ok(if self.shares_network()? { all } else { all | Kind::NETWORK })
    }

    /// Moves this process into the network of the container. Fails if init has ended.
    pub(super) fn enter_network(&self) -> io::Result<()> {
        if self.shares_network()? {
            return Ok(());
        }
        Ok(move_into_thread_name_spaces(self.watch.as_fd(), ThreadNameSpaceType::NETWORK)?)
    }
}

/// The parent of a process.
fn parent(pid: Pid) -> io::Result<Option<Pid>> {
    let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
    let stat = String::from_utf8_lossy(&stat);
    // The process name may contain any characters. The state follows it, then the parent.
    let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
    Ok(parent.and_then(|parent| parent.parse().ok()).and_then(Pid::from_raw))
}
