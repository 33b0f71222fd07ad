//! Creation of a container in the user namespace of an ordinary user.
//!
//! libcontainer needs control groups and device nodes, which an ordinary user does not have. This
//! module creates the same container without them: namespaces, the mounts of [`oci_spec`], limits
//! of processes and the identity. Devices are those of the machine, bound one by one.
//!
//! The child waits until the supervisor has taken the intent. It dies with its supervisor.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::UnshareFlags;

use super::init::Init;
use super::{Streams, oci_spec};
use crate::runtimes::host::cgroups::Cgroups;
use crate::runtimes::host::mounts;
use crate::runtimes::host::persisted::{Container, OwnNetwork};
use crate::util::mapped_ids::MappedIds;

/// Devices of the machine that every container has.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Links in `/dev`.
const LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// Longest error of the child, in bytes.
const ERROR: usize = 4096;

const NO_PROGRAMS: MountAttrFlags = mounts::CONFINED.union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// What the container is made of.
pub(super) struct Parts<'a> {
    pub(super) container: &'a Container,
    pub(super) root: &'a Path,
    pub(super) cgroup: &'a str,
    pub(super) cgroups: &'a Cgroups,
    pub(super) streams: &'a Streams,
    pub(super) program: &'a Init,
}

/// A container whose init waits for the start.
pub(super) struct OwnContainer {
    pub(super) init: Pid,
    connection: OwnedFd,
}

impl OwnContainer {
    /// Creates the container. Its init waits for [`Self::start`].
    pub(super) fn create(parts: &Parts<'_>) -> io::Result<Self> {
        let (connection, theirs) = super::init::connection()?;
        let flags =
            libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::SIGCHLD;
        // SAFETY: without a new stack, the call behaves like `fork`. This process has one thread.
        let child = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
        if child == 0 {
            drop(connection);
            let Err(error) = become_init(parts, &theirs);
            let text = error.to_string();
            let shown = &text.as_bytes()[..text.len().min(ERROR)];
            // If the supervisor is dead, no process waits for the error.
            rustix::io::write(&theirs, shown).ok();
            // SAFETY: ends this process without running destructors or handlers of the supervisor.
            unsafe { libc::_exit(1) };
        }
        let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
        let Some(init) = pid else { return Err(io::Error::last_os_error()) };
        drop(theirs);
        let made = Self { init, connection };
        let limited = parts
            .cgroups
            .set_limits(parts.cgroup, &parts.container.limits())
            .and_then(|()| parts.cgroups.add(parts.cgroup, init));
        match limited.and_then(|()| made.finish()) {
            Ok(()) => Ok(made),
            Err(error) => {
                rustix::process::kill_process(init, Signal::KILL).ok();
                while let Err(Errno::INTR) = rustix::process::waitpid(Some(init), WaitOptions::empty()) {}
                Err(error)
            }
        }
    }

    /// Lets the child continue in its control group, and waits until the container is complete.
    fn finish(&self) -> io::Result<()> {
        rustix::io::write(&self.connection, &[1])?;
        let mut answer = [0; ERROR];
        let length = rustix::io::retry_on_intr(|| rustix::io::read(&self.connection, &mut answer))?;
        match &answer[..length] {
            [READY] => Ok(()),
            [] => Err(io::Error::other("init ended")),
            text => Err(io::Error::other(String::from_utf8_lossy(text).into_owned())),
        }
    }

    /// Starts the program.
    pub(super) fn start(&self) -> io::Result<()> {
        rustix::io::write(&self.connection, &[1])?;
        Ok(())
    }
}

/// The answer of a complete container. No error begins with it.
const READY: u8 = 0;

/// Returns only on failure.
fn become_init(parts: &Parts<'_>, supervisor: &OwnedFd) -> io::Result<Infallible> {
    let program = parts.program;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    await_supervisor(supervisor)?;
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP)? };
    rustix::process::setsid()?;
    at("set the OOM score", fs::write("/proc/self/oom_score_adj", oci_spec::OOM_SCORE.to_string()))?;
    rustix::system::sethostname(oci_spec::hostname(parts.container).as_bytes())?;
    mount_all(parts)?;
    at("enter the root", enter_root(parts.root))?;
    for path in oci_spec::MASKED {
        at(path, mask(Path::new(path)))?;
    }
    for path in oci_spec::READ_ONLY {
        at(path, make_read_only(Path::new(path)))?;
    }
    server::inherited::restrict_to_container_limits();
    rustix::thread::set_no_new_privs(true)?;
    rustix::stdio::dup2_stdin(&parts.streams.stdin)?;
    rustix::stdio::dup2_stdout(&parts.streams.stdout)?;
    rustix::stdio::dup2_stderr(&parts.streams.stderr)?;
    // No process of the container can inspect this one.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    program.close_and_tie()?;
    rustix::io::write(supervisor, &[READY])?;
    await_supervisor(supervisor)?;
    program.run()
}

fn at<T>(what: &str, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{what}: {error}")))
}

/// Waits for the next byte of the supervisor. Fails if the supervisor has ended.
fn await_supervisor(supervisor: &OwnedFd) -> io::Result<()> {
    match rustix::io::retry_on_intr(|| rustix::io::read(supervisor, &mut [0]))? {
        0 => Err(io::ErrorKind::BrokenPipe.into()),
        _ => Ok(()),
    }
}

/// Mounts the file systems of the kernel and `/dev`.
fn mount_all(parts: &Parts<'_>) -> io::Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(parts.root, flags, Mode::empty())?;
    let root = root.as_fd();
    let mount = |path: &str, kind: &str, options: &[(&str, &str)], attributes| {
        let made = mounts::new(kind, options, attributes).and_then(|made| attach(root, path, made.as_fd()));
        at(&format!("mount {path}"), made)
    };
    mount("/proc", "proc", &[], NO_PROGRAMS)?;
    mount_sys(parts, root)?;
    let dev = mounts::tmpfs(&[("mode", "0755"), ("size", "64m")], MountAttrFlags::MOUNT_ATTR_NOSUID)?;
    at("mount /dev", fill_dev(dev.as_fd()).and_then(|()| attach(root, "/dev", dev.as_fd())))?;
    for name in DEVICES {
        let path = format!("/dev/{name}");
        let device = mounts::clone_of(Path::new(&path), MountAttrFlags::MOUNT_ATTR_NOSUID);
        at(&path, device.and_then(|device| attach(root, &path, device.as_fd())))?;
    }
    let terminals = oci_spec::TERMINALS.to_string();
    let (name, most) = oci_spec::TERMINALS_AT_MOST.split_once('=').unwrap_or_default();
    let mut options = vec![("newinstance", ""), ("ptmxmode", "0666"), ("mode", "0620"), (name, most)];
    if MappedIds::of_this_process().has_group(oci_spec::TERMINALS) {
        options.push(("gid", &terminals));
    }
    let no_programs = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    mount("/dev/pts", "devpts", &options, no_programs)?;
    let (name, size) = oci_spec::SHARED_MEMORY.split_once('=').unwrap_or_default();
    mount("/dev/shm", "tmpfs", &[("mode", "1777"), (name, size)], NO_PROGRAMS)?;
    mount("/dev/mqueue", "mqueue", &[], NO_PROGRAMS)
}

/// Mounts `/sys`, and the control groups of the container in it. In the network of the machine, the
/// kernel permits only a view of the machine's.
fn mount_sys(parts: &Parts<'_>, root: BorrowedFd<'_>) -> io::Result<()> {
    let read_only = NO_PROGRAMS | MountAttrFlags::MOUNT_ATTR_RDONLY;
    let sys = match parts.container.network {
        OwnNetwork::Host => mounts::clone_with_children(Path::new("/sys"), read_only),
        OwnNetwork::Private | OwnNetwork::None => mounts::new("sysfs", &[], read_only),
    };
    at("mount /sys", sys.and_then(|sys| attach(root, "/sys", sys.as_fd())))?;
    for (group, path) in parts.cgroups.visible(parts.cgroup) {
        let shown = mounts::clone_of(&group, read_only).and_then(|shown| attach(root, &path, shown.as_fd()));
        at(&format!("mount {path}"), shown)?;
    }
    Ok(())
}

fn attach(root: BorrowedFd<'_>, path: &str, mount: BorrowedFd<'_>) -> io::Result<()> {
    let target = mounts::open_in(root, Path::new(path), OFlags::PATH)?;
    mounts::attach(mount, target.as_fd())
}

/// Creates the mount points and links of `/dev`.
fn fill_dev(dev: BorrowedFd<'_>) -> io::Result<()> {
    for name in DEVICES {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::openat(dev, name, flags, Mode::from_raw_mode(0o666))?;
    }
    for (name, target) in LINKS {
        rustix::fs::symlinkat(target, dev, name)?;
    }
    ["pts", "shm", "mqueue"].into_iter().try_for_each(|name| {
        rustix::fs::mkdirat(dev, name, Mode::from_raw_mode(0o755)).map_err(io::Error::from)
    })
}

/// Makes a mount the root of this process, and unmounts everything else.
fn enter_root(root: &Path) -> io::Result<()> {
    rustix::process::chdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}

/// Hides a path of the kernel, if it exists.
fn mask(path: &Path) -> io::Result<()> {
    let Some(target) = existing(path)? else { return Ok(()) };
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&target)?.st_mode);
    let attributes = NO_PROGRAMS | MountAttrFlags::MOUNT_ATTR_RDONLY;
    let empty = if kind.is_dir() {
        mounts::tmpfs(&[("size", "4k"), ("mode", "0755")], attributes)?
    } else {
        mounts::clone_of(Path::new("/dev/null"), MountAttrFlags::MOUNT_ATTR_NOSUID)?
    };
    mounts::attach(empty.as_fd(), target.as_fd())
}

fn make_read_only(path: &Path) -> io::Result<()> {
    let Some(target) = existing(path)? else { return Ok(()) };
    let shown = mounts::clone_of(path, NO_PROGRAMS | MountAttrFlags::MOUNT_ATTR_RDONLY)?;
    mounts::attach(shown.as_fd(), target.as_fd())
}

fn existing(path: &Path) -> io::Result<Option<OwnedFd>> {
    match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
