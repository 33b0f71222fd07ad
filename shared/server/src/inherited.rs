//! Process attributes that a program inherits from the program that starts it.
//!
//! Services and containers outlive the command that starts them. These functions replace inherited
//! attributes with documented ones. `main` calls them first, because a thread inherits from the
//! thread that creates it.
//!
//! - [`prepare_service`]: every service calls this. Limits, niceness and processors remain as an
//!   administrator set them.
//! - [`prepare_cluster`]: a cluster in the background calls this. No attribute of the command
//!   remains.
//! - [`set_limits`]: supervisors call this, so that containers have the same limits on every
//!   worker.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Maximum open files of a container's process. The kernel does not charge all memory of sockets,
/// so their number is bounded.
const CONTAINER_OPEN_FILES: u64 = 65_536;
/// Minimum hard limit of open files of a cluster, if the system allows that many.
const CLUSTER_OPEN_FILES: u64 = 524_288;
/// Open files below which a service logs a warning. About a hundred concurrent containers need this
/// many.
const FEW_OPEN_FILES: u64 = 4_096;
/// Maximum bytes of a stack: the default of the kernel.
const STACK_BYTES: u64 = 8 << 20;
/// Maximum bytes of locked memory: the default of the kernel.
const LOCKED_MEMORY_BYTES: u64 = 8 << 20;
/// Maximum bytes of POSIX message queues: the default of the kernel.
const MESSAGE_QUEUE_BYTES: u64 = 819_200;

/// A limit of a process (`RLIMIT_…`). [`UNLIMITED`] is the largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Name in an OCI configuration.
    pub name: &'static str,
    resource: u32,
    /// The limit that the kernel enforces.
    pub soft: u64,
    /// The maximum to which the process may raise the soft limit.
    pub hard: u64,
}

/// The value of a limit that bounds nothing.
pub const UNLIMITED: u64 = libc::RLIM_INFINITY;

/// Returns the limits of a container's processes. Except for open files, they are those of the
/// kernel's first process.
pub fn container_limits() -> Vec<Limit> {
    let threads = half_of_all_threads();
    let limit = |name, resource, soft, hard| Limit { name, resource, soft, hard };
    let same = |name, resource, value| limit(name, resource, value, value);
    vec![
        same("RLIMIT_AS", libc::RLIMIT_AS, UNLIMITED),
        limit("RLIMIT_CORE", libc::RLIMIT_CORE, 0, UNLIMITED),
        same("RLIMIT_CPU", libc::RLIMIT_CPU, UNLIMITED),
        same("RLIMIT_DATA", libc::RLIMIT_DATA, UNLIMITED),
        same("RLIMIT_FSIZE", libc::RLIMIT_FSIZE, UNLIMITED),
        same("RLIMIT_LOCKS", libc::RLIMIT_LOCKS, UNLIMITED),
        same("RLIMIT_MEMLOCK", libc::RLIMIT_MEMLOCK, LOCKED_MEMORY_BYTES),
        same("RLIMIT_MSGQUEUE", libc::RLIMIT_MSGQUEUE, MESSAGE_QUEUE_BYTES),
        same("RLIMIT_NICE", libc::RLIMIT_NICE, 0),
        same("RLIMIT_NOFILE", libc::RLIMIT_NOFILE, CONTAINER_OPEN_FILES),
        same("RLIMIT_NPROC", libc::RLIMIT_NPROC, threads),
        same("RLIMIT_RSS", libc::RLIMIT_RSS, UNLIMITED),
        same("RLIMIT_RTPRIO", libc::RLIMIT_RTPRIO, 0),
        same("RLIMIT_RTTIME", libc::RLIMIT_RTTIME, UNLIMITED),
        same("RLIMIT_SIGPENDING", libc::RLIMIT_SIGPENDING, threads),
        limit("RLIMIT_STACK", libc::RLIMIT_STACK, STACK_BYTES, UNLIMITED),
    ]
}

impl Limit {
    /// Returns the closest limit that this process can set without raising its hard limit.
    pub fn within_reach(self) -> io::Result<Self> {
        let hard = self.read()?.rlim_max.min(self.hard);
        Ok(Self { soft: self.soft.min(hard), hard, ..self })
    }

    fn read(self) -> io::Result<libc::rlimit> {
        let mut current = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel writes one record.
        check(unsafe { libc::getrlimit(self.resource, &raw mut current) })?;
        Ok(current)
    }

    fn write(self, soft: u64, hard: u64) -> io::Result<()> {
        let value = libc::rlimit { rlim_cur: soft, rlim_max: hard };
        // SAFETY: the kernel reads one record.
        check(unsafe { libc::setrlimit(self.resource, &raw const value) })
    }

    /// Sets the soft limit, and raises the hard limit if it is lower. Never lowers the hard limit,
    /// because that is irreversible.
    fn set(self) {
        let Ok(current) = self.read() else { return };
        if self.write(self.soft, current.rlim_max.max(self.hard)).is_err() {
            // The process may not raise the hard limit. A soft limit within the hard limit is
            // always allowed.
            _ = self.write(self.soft.min(current.rlim_max), current.rlim_max);
        }
    }
}

/// A process attribute could not be set.
#[derive(Debug)]
pub struct AttributeError {
    what: &'static str,
    cause: io::Error,
}

impl fmt::Display for AttributeError {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "cannot set {} of this process: {}", self.what, self.cause)
    }
}

/// Sets the umask to 022, unblocks all signals, and raises the soft limit of open files to the hard
/// limit. All other attributes remain as an administrator set them.
pub fn prepare_service() {
    set_umask();
    unblock_signals();
    raise_open_files();
}

/// Replaces all attributes that a cluster in the background inherits from its command. Returns the
/// attributes that could not be set.
pub fn prepare_cluster() -> Vec<AttributeError> {
    set_umask();
    default_signals();
    set_limits();
    let allowed = read_number("/proc/sys/fs/nr_open").unwrap_or(CLUSTER_OPEN_FILES);
    let target = CLUSTER_OPEN_FILES.min(allowed);
    Limit { soft: target, hard: target, ..open_files() }.set();
    raise_open_files();
    set_scheduling().filter_map(|(what, set)| Some(AttributeError { what, cause: set.err()? })).collect()
}

/// Sets every limit of this process to that of containers, as far as the system allows. Higher hard
/// limits remain.
pub fn set_limits() {
    container_limits().into_iter().for_each(Limit::set);
}

/// Sets every limit of this process to that of containers, or to the closest one that the system
/// allows. Lowers hard limits, which is irreversible.
pub fn restrict_to_container_limits() {
    for limit in container_limits() {
        // A limit within reach is always allowed.
        _ = limit.within_reach().and_then(|reached| reached.write(reached.soft, reached.hard));
    }
}

/// Returns the names of the limits that containers of this process cannot have, with the values
/// that they get instead.
pub fn limits_out_of_reach() -> Vec<(&'static str, u64)> {
    let raises = rustix::thread::capabilities(None)
        .is_ok_and(|held| held.permitted.contains(rustix::thread::CapabilitySet::SYS_RESOURCE));
    let limits = container_limits().into_iter().filter(|_| !raises);
    let reached = limits.filter_map(|limit| Some((limit, limit.within_reach().ok()?)));
    reached
        .filter(|(limit, reached)| reached.hard < limit.hard)
        .map(|(limit, reached)| (limit.name, reached.hard))
        .collect()
}

/// Returns the hard limit of open files if it is too low for a service.
pub fn few_open_files() -> Option<u64> {
    let hard = open_files().read().ok()?.rlim_max;
    (hard < FEW_OPEN_FILES).then_some(hard)
}

/// Logs a warning if this process may have few open files.
pub fn warn_of_few_open_files() {
    if let Some(limit) = few_open_files() {
        tracing::warn!(
            limit,
            "the hard limit of open files is low: connections may wait; raise the limit to {FEW_OPEN_FILES}"
        );
    }
}

/// Whether less than a quarter of the file descriptors of this process are free. `open` is any open
/// descriptor.
pub(crate) fn are_files_scarce(open: BorrowedFd<'_>) -> bool {
    let limit = open_files().read().map_or(UNLIMITED, |current| current.rlim_cur);
    // A new descriptor gets the lowest free number.
    rustix::io::fcntl_dupfd_cloexec(open, 0)
        .map_or_else(|_| true, |lowest| is_scarce(lowest.as_raw_fd().unsigned_abs().into(), limit))
}

fn is_scarce(used: u64, limit: u64) -> bool {
    used >= limit - limit / 4
}

fn set_umask() {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
}

/// Unblocks all signals. A service with a blocked TERM could not be stopped.
fn unblock_signals() {
    // SAFETY: the set is filled before it is used, and the mask is that of this thread.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Gives every signal its default action, including signals that the command ignored. PIPE stays
/// ignored, as in every Rust program.
fn default_signals() {
    let signals = (1..=libc::SIGRTMAX()).filter(|signal| *signal != libc::SIGPIPE);
    for signal in signals {
        // SAFETY: a default action runs no code of this program. The kernel rejects the change for
        // KILL and STOP.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    unblock_signals();
}

fn open_files() -> Limit {
    Limit { name: "RLIMIT_NOFILE", resource: libc::RLIMIT_NOFILE, soft: 0, hard: 0 }
}

fn raise_open_files() {
    let limit = open_files();
    if let Ok(current) = limit.read() {
        // A soft limit may always be raised to the hard limit. A failure changes nothing.
        _ = limit.write(current.rlim_max, current.rlim_max);
    }
}

/// Sets scheduling policy, niceness, I/O priority, processors, memory policy, execution domain and
/// OOM score to the values of the machine's first process.
fn set_scheduling() -> impl Iterator<Item = (&'static str, io::Result<()>)> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // All processors. The kernel ignores processors that do not exist or that a cpuset excludes.
    let processors = [u8::MAX; 1024];
    // SAFETY: all arguments are numbers, or point to records that outlive the calls.
    let set = unsafe {
        [
            (
                "the scheduling policy",
                call(libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const parameters)),
            ),
            ("the niceness", call(libc::setpriority(libc::PRIO_PROCESS, 0, 0))),
            ("the I/O priority", call(libc::syscall(libc::SYS_ioprio_set, 1, 0, 0))),
            (
                "the processors",
                call(libc::syscall(libc::SYS_sched_setaffinity, 0, processors.len(), processors.as_ptr())),
            ),
            (
                "the memory policy",
                match call(libc::syscall(libc::SYS_set_mempolicy, 0, std::ptr::null::<u8>(), 0)) {
                    // A kernel without NUMA has no memory policies.
                    Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
                    set => set,
                },
            ),
            ("the execution domain", call(libc::personality(0))),
        ]
    };
    set.into_iter().chain([("the OOM score", std::fs::write("/proc/self/oom_score_adj", "0"))])
}

fn call(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn check(result: libc::c_int) -> io::Result<()> {
    call(result)
}

/// Returns the kernel's default for a user's processes and pending signals.
fn half_of_all_threads() -> u64 {
    read_number("/proc/sys/kernel/threads-max").map_or(UNLIMITED, |threads| threads / 2)
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_keeps_higher_hard_limit() -> io::Result<()> {
        let cores = container_limits().into_iter().find(|limit| limit.name == "RLIMIT_CORE").expect("listed");
        let before = cores.read()?;
        Limit { soft: 0, hard: 0, ..cores }.set();
        let after = cores.read()?;
        assert_eq!((after.rlim_cur, after.rlim_max), (0, before.rlim_max));
        cores.write(before.rlim_cur, before.rlim_max)
    }

    #[test]
    fn files_are_scarce_below_free_quarter() {
        assert!(!is_scarce(74, 100) && is_scarce(75, 100) && is_scarce(100, 100));
        assert!(!is_scarce(1 << 20, UNLIMITED));
    }

    #[test]
    fn limit_within_reach_respects_hard_limit() -> io::Result<()> {
        let hard = open_files().read()?.rlim_max;
        let reached = Limit { soft: UNLIMITED, hard: UNLIMITED, ..open_files() }.within_reach()?;
        assert_eq!((reached.soft, reached.hard), (hard, hard));
        let lower = Limit { soft: 5, hard: 7, ..open_files() }.within_reach()?;
        assert_eq!((lower.soft, lower.hard), (5, 7));
        Ok(())
    }
}
