//! The user namespace of a gateway that an ordinary user runs.
//!
//! `main` calls [`enter`] before any thread exists. In the namespace, the user is root of the
//! worker's files and mounts, and everything else of the host runtime works as for root. Further
//! ids come from `/etc/subuid` and `/etc/subgid`, if `newuidmap` and `newgidmap` are installed.
//!
//! Supervisors keep the namespace alive after the gateway. The next gateway enters the namespace
//! of a living supervisor, because only processes of that namespace may enter its containers.
//!
//! Sources: user_namespaces(7), newuidmap(1), subuid(5); `include/uapi/linux/nsfs.h` for the inode
//! of the first user namespace.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, UnshareFlags};

use super::subordinate_ids::SubordinateIds;
use super::{filesystem, mounts, paths};
use crate::util::mapped_ids::MappedIds;

/// Inode of the machine's first user namespace.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFD;
/// The file in a state directory with the gateways that are in its namespace, one per line.
const MEMBERS: &str = "namespace";

/// The reason why an ordinary user cannot run containers, with the remedy.
#[derive(Debug, thiserror::Error)]
#[error("cannot run containers without root: {}{}", self.found(), appended(remedy.as_deref()))]
pub struct EnterError {
    doing: &'static str,
    cause: io::Error,
    remedy: Option<String>,
}

fn appended(remedy: Option<&str>) -> String {
    remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default()
}

impl EnterError {
    /// What failed.
    pub(super) fn found(&self) -> String {
        format!("cannot {}: {}", self.doing, self.cause)
    }

    /// What to change on the machine. `None`: unknown.
    pub(super) fn remedy(&self) -> Option<&str> {
        self.remedy.as_deref()
    }
}

fn failed<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> EnterError {
    move |error| {
        let cause = error.into();
        let remedy = remedy(&cause, &Machine::read());
        EnterError { doing, cause, remedy }
    }
}

/// Whether this process is in a user namespace of its own, and so is not root of the machine.
pub(super) fn is_active() -> bool {
    fs::metadata("/proc/self/ns/user").is_ok_and(|found| found.ino() != FIRST_NAMESPACE)
}

/// Enters the user namespace of the worker in `state_dir`, or a new one. Does nothing if this
/// process is root of the machine.
///
/// # Errors
///
/// The machine does not permit such namespaces. The message says what to change.
///
/// Must be called before any thread exists.
pub fn enter(state_dir: &Path) -> Result<(), EnterError> {
    if has_rights()? {
        return Ok(());
    }
    crate::make_private_directory(state_dir).map_err(failed("create the state directory"))?;
    // Locked until this process is a member, so that two gateways share one namespace.
    let path = state_dir.join(MEMBERS);
    let members = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut members = members.map_err(failed("open the list of members"))?;
    members.lock().map_err(failed("lock the list of members"))?;
    let mut text = String::new();
    members.read_to_string(&mut text).map_err(failed("read the list of members"))?;
    let gateways: Vec<_> = text.lines().filter_map(Member::parse).filter(Member::is_alive).collect();

    if !join(state_dir, &gateways)? {
        enter_new()?;
    }
    let alive = gateways.into_iter().chain(Member::this());
    let text: String = alive.map(|member| format!("{member}\n")).collect();
    let rewrite = |mut file: &File| {
        io::Seek::rewind(&mut file)?;
        file.write_all(text.as_bytes())?;
        file.set_len(text.len() as u64)
    };
    rewrite(&members).map_err(failed("write the list of members"))
}

/// Enters a new user namespace, as [`enter`] does if no process of the worker lives.
///
/// # Errors
///
/// As of [`enter`].
pub(super) fn enter_new() -> Result<(), EnterError> {
    if has_rights()? {
        return Ok(());
    }
    create()?;
    probe_proc()
}

/// Whether this process can run containers in its namespace.
fn has_rights() -> Result<bool, EnterError> {
    let held = rustix::thread::capabilities(None).map_err(failed("read the capabilities"))?;
    Ok(held.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// A gateway in the namespace of its state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Member {
    pid: u32,
    /// When the process started, as in `/proc/<pid>/stat`. Process ids are reused.
    started: u64,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.started)
    }
}

impl Member {
    fn parse(line: &str) -> Option<Self> {
        let (pid, started) = line.split_once(' ')?;
        Some(Self { pid: pid.parse().ok()?, started: started.parse().ok()? })
    }

    fn this() -> Option<Self> {
        Self::of(std::process::id())
    }

    fn of(pid: u32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The process name may contain any characters. The start time is the 20th field after it.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
        Some(Self { pid, started: started.parse().ok()? })
    }

    fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

/// Enters the namespace of a living gateway or supervisor. `false`: there is none.
fn join(state_dir: &Path, gateways: &[Member]) -> Result<bool, EnterError> {
    for gateway in gateways {
        let open = |kind| open_namespace(gateway.pid, kind).map_err(failed("open a namespace of the worker"));
        // A gateway that ends loses its mount namespace first.
        if let (Some(users), Some(mounts)) = (open("user")?, open("mnt")?) {
            enter_users(&users)?;
            // Both gateways must see the same mounts, because the other one may be frozen.
            rustix::thread::move_into_link_name_space(mounts.as_fd(), Some(LinkNameSpaceType::Mount))
                .map_err(failed("enter the mount namespace of the worker"))?;
            return Ok(true);
        }
    }
    for supervisor in supervisors(state_dir) {
        if let Some(users) =
            open_namespace(supervisor, "user").map_err(failed("open a namespace of the worker"))?
        {
            enter_users(&users)?;
            own_mounts().map_err(failed("create a mount namespace"))?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens a namespace of a process. `None`: the process has ended.
fn open_namespace(pid: u32, kind: &str) -> rustix::io::Result<Option<OwnedFd>> {
    use rustix::io::Errno;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match rustix::fs::openat(CWD, format!("/proc/{pid}/ns/{kind}"), flags, Mode::empty()) {
        Ok(opened) => Ok(Some(opened)),
        Err(Errno::NOENT | Errno::SRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

fn enter_users(users: &OwnedFd) -> Result<(), EnterError> {
    rustix::thread::move_into_link_name_space(users.as_fd(), Some(LinkNameSpaceType::User))
        .map_err(failed("enter the user namespace of the worker"))?;
    become_root();
    Ok(())
}

/// The living supervisors of a state directory. Each locks a file with its process id.
fn supervisors(state_dir: &Path) -> Vec<u32> {
    let entries = |path: PathBuf| {
        fs::read_dir(path).into_iter().flatten().filter_map(|entry| entry.ok().map(|entry| entry.path()))
    };
    let containers = entries(state_dir.join("containers"));
    let processes = containers.flat_map(|container| entries(container.join(paths::PROCESSES)));
    let alive = processes.filter_map(|process| {
        let mut file = File::open(process.join(paths::ALIVE)).ok()?;
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => {}
            Ok(()) | Err(fs::TryLockError::Error(_)) => return None,
        }
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        text.trim().parse().ok().filter(|pid| *pid > 1)
    });
    alive.collect()
}

/// Creates a user namespace and a mount namespace, and maps the user to their root.
fn create() -> Result<(), EnterError> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let ranges = [
        SubordinateIds::of("newuidmap", "/etc/subuid", uid, uid),
        SubordinateIds::of("newgidmap", "/etc/subgid", uid, gid),
    ];
    let pid = std::process::id();
    let (unshared, tell_unshared) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(failed("create a pipe"))?;
    let (mapped, tell_mapped) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(failed("create a pipe"))?;
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // Only a process outside of the namespace may map ids of others.
        drop((tell_unshared, mapped));
        if rustix::io::read(&unshared, &mut [0]) == Ok(1) {
            let done = ranges.map(|ids| u8::from(ids.is_some_and(|ids| ids.map(pid))));
            rustix::io::write(&tell_mapped, &done).ok();
        }
        // SAFETY: ends this process without running destructors or handlers of its parent.
        unsafe { libc::_exit(0) };
    }
    let Some(child) = Pid::from_raw(child) else {
        return Err(failed("create a process")(io::Error::last_os_error()));
    };
    drop((unshared, tell_mapped));
    // SAFETY: this process has one thread.
    let entered = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWNS) };
    let mut done = [0; 2];
    if entered.is_ok() && rustix::io::write(&tell_unshared, &[1]).is_ok() {
        // Without an answer, no further id was mapped.
        rustix::io::read(&mapped, &mut done).ok();
    }
    drop(tell_unshared);
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitpid(Some(child), WaitOptions::empty()) {}
    entered.map_err(failed("create a user namespace"))?;
    let [users, groups] = done.map(|done| done == 1);
    if !users {
        fs::write("/proc/self/uid_map", format!("0 {uid} 1")).map_err(failed("map the user"))?;
    }
    if !groups {
        fs::write("/proc/self/setgroups", "deny").map_err(failed("keep the groups of the user"))?;
        fs::write("/proc/self/gid_map", format!("0 {gid} 1")).map_err(failed("map the group"))?;
    }
    become_root();
    // AppArmor may grant a namespace without the capabilities in it.
    own_mounts().map_err(failed("change mounts"))
}

/// Assumes the root of the entered namespace, without groups.
fn become_root() {
    use rustix::process::{Gid, Uid};
    // These calls change nothing unless a program with further ids started this one.
    _ = rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT);
    _ = rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT);
    // With a single group, the kernel permits no change.
    _ = rustix::thread::set_thread_groups(&[]);
}

fn own_mounts() -> io::Result<()> {
    // SAFETY: this process has one thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    Ok(rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Tests whether a container can have a `/proc`. The kernel forbids this where parts of `/proc`
/// are hidden.
fn probe_proc() -> Result<(), EnterError> {
    let attempt = || {
        own_mounts()?;
        // SAFETY: this process has one thread.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID)? };
        // SAFETY: this process has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let error = mounts::new("proc", &[], MountAttrFlags::empty()).err();
            let code = error.map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
            // SAFETY: ends this process without running destructors or handlers of its parent.
            unsafe { libc::_exit(code) };
        }
        wait(child)
    };
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = attempt().unwrap_or_else(|error: io::Error| error.raw_os_error().unwrap_or(libc::EIO));
        // SAFETY: ends this process without running destructors or handlers of its parent.
        unsafe { libc::_exit(code) };
    }
    match wait(child).map_err(failed("create a process"))? {
        0 => Ok(()),
        code => Err(failed("mount /proc for a container")(io::Error::from_raw_os_error(code))),
    }
}

/// Waits for a child, and returns its exit code.
fn wait(child: i32) -> io::Result<i32> {
    let Some(child) = Pid::from_raw(child) else { return Err(io::Error::last_os_error()) };
    loop {
        match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
            Ok(Some((_, status))) => return Ok(status.exit_status().unwrap_or(libc::EIO)),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether containers can have other users than root.
pub(super) fn has_several_ids() -> bool {
    MappedIds::of_this_process().has(1, 1)
}

/// Settings of a machine that restrict user namespaces.
#[derive(Debug, Default)]
struct Machine {
    /// `kernel.unprivileged_userns_clone`, of Debian's kernels.
    clone: Option<String>,
    /// `user.max_user_namespaces`.
    most: Option<String>,
    /// `kernel.apparmor_restrict_unprivileged_userns`, of Ubuntu's kernels.
    apparmor: Option<String>,
    /// Whether this process is in a container of a container engine.
    in_container: bool,
}

impl Machine {
    fn read() -> Self {
        let value = |name: &str| {
            let text = fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?;
            Some(text.trim().to_owned())
        };
        let exists = |path: &str| filesystem::exists(Path::new(path)).unwrap_or(false);
        Self {
            clone: value("kernel/unprivileged_userns_clone"),
            most: value("user/max_user_namespaces"),
            apparmor: value("kernel/apparmor_restrict_unprivileged_userns"),
            in_container: exists("/.dockerenv") || exists("/run/.containerenv"),
        }
    }
}

/// What to change on the machine after an error. `None`: unknown.
fn remedy(cause: &io::Error, machine: &Machine) -> Option<String> {
    let setting = |name: &str, value: &str| {
        format!(
            "as root, run `sysctl -w {name}={value}`, and write `{name}={value}` to /etc/sysctl.d/90-gantry.conf; or run gantry as root"
        )
    };
    let is = |value: &Option<String>, wanted: &str| value.as_deref() == Some(wanted);
    match cause.raw_os_error()? {
        // Also the answer to too deep a nesting.
        libc::ENOSPC | libc::EUSERS => Some(setting("user.max_user_namespaces", "15000")),
        libc::ENOSYS | libc::EINVAL => {
            Some("the kernel needs CONFIG_USER_NS; run gantry as root".to_owned())
        }
        libc::EPERM | libc::EACCES if is(&machine.clone, "0") => {
            Some(setting("kernel.unprivileged_userns_clone", "1"))
        }
        libc::EPERM | libc::EACCES if is(&machine.apparmor, "1") => {
            Some(setting("kernel.apparmor_restrict_unprivileged_userns", "0"))
        }
        libc::EPERM | libc::EACCES if is(&machine.most, "0") => {
            Some(setting("user.max_user_namespaces", "15000"))
        }
        libc::EPERM | libc::EACCES if machine.in_container => Some(
            "start the surrounding container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined \
             --security-opt systempaths=unconfined`"
                .to_owned(),
        ),
        libc::EPERM | libc::EACCES => Some(
            "a security policy of this machine forbids it (seccomp, SELinux or AppArmor); run gantry as root".to_owned(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_names_the_setting() {
        let text = |code, machine: &Machine| {
            remedy(&io::Error::from_raw_os_error(code), machine).unwrap_or_default()
        };
        let of = |name: &str, value: &str| {
            let value = Some(value.to_owned());
            match name {
                "clone" => Machine { clone: value, ..Machine::default() },
                "apparmor" => Machine { apparmor: value, ..Machine::default() },
                _ => Machine { most: value, ..Machine::default() },
            }
        };
        assert!(text(libc::ENOSPC, &of("most", "0")).contains("user.max_user_namespaces=15000"));
        assert!(text(libc::EPERM, &of("clone", "0")).contains("kernel.unprivileged_userns_clone=1"));
        let ubuntu = of("apparmor", "1");
        assert!(text(libc::EACCES, &ubuntu).contains("kernel.apparmor_restrict_unprivileged_userns=0"));
        let inside = Machine { in_container: true, ..Machine::default() };
        assert!(text(libc::EPERM, &inside).contains("--security-opt seccomp=unconfined"));
        assert_eq!(text(libc::EIO, &inside), "");
    }

    #[test]
    fn member_is_alive_until_its_process_ends() {
        let this = Member::this().expect("this process");
        assert_eq!(Member::parse(&this.to_string()), Some(this));
        assert!(this.is_alive());
        assert!(!Member { started: this.started + 1, ..this }.is_alive(), "another process");
    }
}
