//! Init, the first process in a container.
//!
//! libcontainer runs it instead of the program, when the container is complete. Init changes to the
//! container's user, unless libcontainer has done so. It starts the program as a child, because the
//! kernel withholds signals from process 1 and gives it all orphans. Init forwards signals and
//! reaps processes. When the program has ended, init reports its exit to the supervisor and exits.
//! The kernel then kills all other processes of the container.
//!
//! Init never execs, so it runs the code of the supervisor. It is not dumpable, so no process of
//! the container can inspect it. It dies with its supervisor.
//!
//! A further process of the container has such a parent, too. This one joins the namespaces of the
//! first init, but not its PID namespace, which only the program enters. So no process of the
//! container sees it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libcontainer::oci_spec::runtime::Spec;
use libcontainer::workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError};
use rustix::event::{PollFd, PollFlags};
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::{LinkNameSpaceType, ThreadNameSpaceType};
use seccompiler::BpfProgram;

use runtime::TerminalSize;

use crate::runtimes::host::filesystem;
use crate::runtimes::host::user_namespace::Identity;

/// A report of init to its supervisor, of five bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The program runs.
    Started,
    /// The program was not started: the failed step, and the error.
    Failed(Step, i32),
    /// The terminal of the program, whose descriptor comes with the report.
    Terminal,
    Code(u8),
    Signal(u8),
}

/// A step between the container and the program that may fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Changing to a user of the container.
    User,
    Fork,
    Directory,
    Seccomp,
    /// Finding the program.
    Find,
    Exec,
    /// Joining the namespaces of a container.
    Join,
    /// Creating a terminal.
    Terminal,
}

/// Size of a report, in bytes.
pub(super) const REPORT: usize = 5;

impl Report {
    fn encode(self) -> [u8; REPORT] {
        let (kind, value) = match self {
            Self::Started => (0, 0),
            Self::Code(code) => (1, i32::from(code)),
            Self::Signal(signal) => (2, i32::from(signal)),
            Self::Terminal => (3, 0),
            Self::Failed(step, errno) => (10 + step as u8, errno),
        };
        let [a, b, c, d] = value.to_le_bytes();
        [kind, a, b, c, d]
    }

    pub(super) fn decode([kind, a, b, c, d]: [u8; REPORT]) -> Option<Self> {
        let value = i32::from_le_bytes([a, b, c, d]);
        let byte = u8::try_from(value).unwrap_or(u8::MAX);
        let step = |step| Some(Self::Failed(step, value));
        match kind {
            0 => Some(Self::Started),
            1 => Some(Self::Code(byte)),
            2 => Some(Self::Signal(byte)),
            3 => Some(Self::Terminal),
            10 => step(Step::User),
            11 => step(Step::Fork),
            12 => step(Step::Directory),
            13 => step(Step::Seccomp),
            14 => step(Step::Find),
            15 => step(Step::Exec),
            16 => step(Step::Join),
            17 => step(Step::Terminal),
            _ => None,
        }
    }
}

/// The program, prepared for system calls.
#[derive(Clone)]
pub(super) struct Init {
    /// Paths to try, in this order.
    pub(super) candidates: Vec<CString>,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    pub(super) directory: CString,
    pub(super) filters: Vec<BpfProgram>,
    /// A pidfd of the init whose namespaces are joined, and which of them. `None`: the namespaces
    /// are new.
    pub(super) joined: Option<(RawFd, ThreadNameSpaceType)>,
    /// The identity to assume, and the user namespace to enter before. `None`: libcontainer has set
    /// the identity.
    pub(super) identity: Option<(Option<RawFd>, Identity)>,
    /// The size of the terminal. `None`: the program has no terminal.
    pub(super) terminal: Option<TerminalSize>,
    /// Init's end of the connection to the supervisor.
    pub(super) supervisor: RawFd,
    /// Descriptors of the supervisor that must not stay open in a container.
    pub(super) close: Vec<RawFd>,
}

impl Executor for Init {
    fn exec(&self, _: &Spec) -> Result<(), ExecutorError> {
        match self.run() {
            Ok(never) => match never {},
            Err(error) => Err(ExecutorError::Other(error.to_string())),
        }
    }

    /// The environment of the program is set at its start. This environment is not used.
    fn setup_envs(&self, _: HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }

    /// The last callback before the start. It must follow the last change of credentials, which
    /// resets the parent-death signal.
    fn validate(&self, _: &Spec) -> Result<(), ExecutorValidationError> {
        self.close_and_tie().map_err(|error| ExecutorValidationError::ArgValidationError(error.to_string()))
    }
}

impl Init {
    pub(super) fn close_and_tie(&self) -> io::Result<()> {
        for descriptor in &self.close {
            // SAFETY: this process is a copy of the supervisor, and never uses these descriptors
            // again.
            unsafe { rustix::io::close(*descriptor) };
        }
        self.tie_to_supervisor()
    }

    /// Reports that this process cannot enter the container.
    pub(super) fn report_failure(&self, error: &io::Error) {
        // SAFETY: the descriptor was inherited from the supervisor, and stays open while this
        // process lives.
        let supervisor = unsafe { BorrowedFd::borrow_raw(self.supervisor) };
        let report = Report::Failed(Step::Join, error.raw_os_error().unwrap_or(libc::EIO));
        // If the supervisor is dead, no process waits for the report.
        rustix::io::write(supervisor, &report.encode()).ok();
    }

    /// Makes the kernel kill this process when its supervisor dies. Every change of credentials
    /// resets this.
    fn tie_to_supervisor(&self) -> io::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The supervisor may have died before the first line. Its end of the connection is then
        // closed.
        // SAFETY: the descriptor was inherited from the supervisor, and stays open while this
        // process lives.
        let supervisor = unsafe { BorrowedFd::borrow_raw(self.supervisor) };
        let mut poll = [PollFd::from_borrowed_fd(supervisor, PollFlags::IN)];
        rustix::event::poll(&mut poll, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        if poll[0].revents().contains(PollFlags::HUP) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    }

    /// Enters the user namespace of the container, if it has one, and assumes the identity.
    fn become_user(&self, namespace: Option<RawFd>, identity: &Identity) -> io::Result<()> {
        if let Some(namespace) = namespace {
            // SAFETY: the descriptor was inherited from the supervisor, and is open until
            // `close_all_but` is called.
            let namespace = unsafe { BorrowedFd::borrow_raw(namespace) };
            rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::User))?;
        }
        identity.assume()?;
        self.tie_to_supervisor()
    }

    pub(super) fn run(&self) -> io::Result<Infallible> {
        // SAFETY: no other value in this process owns the descriptor.
        let supervisor = unsafe { OwnedFd::from_raw_fd(self.supervisor) };
        let report = |report: Report| rustix::io::write(&supervisor, &report.encode());
        let fail = |step, error: &io::Error| {
            report(Report::Failed(step, error.raw_os_error().unwrap_or(libc::EIO)))?;
            exit()
        };
        if let Some((container, namespaces)) = self.joined
            && let Err(error) = join(container, namespaces)
        {
            return fail(Step::Join, &error);
        }
        if let Some((namespace, identity)) = &self.identity
            && let Err(error) = self.become_user(*namespace, identity)
        {
            return fail(Step::User, &error);
        }
        // No code in this process uses the other descriptors again.
        filesystem::close_all_but(self.supervisor)?;
        // libcontainer or the supervisor has named this process. The name is only for people.
        rustix::thread::set_name(c"gantry-init").ok();
        let signals = block_signals()?;
        let terminal = match self.terminal.map(|size| create_terminal(size, supervisor.as_fd())).transpose() {
            Ok(terminal) => terminal,
            Err(error) => return fail(Step::Terminal, &error),
        };
        let (failure, failed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // SAFETY: this process has one thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let (step, error) = self.become_program(terminal.as_ref());
            let report = Report::Failed(step, error.raw_os_error().unwrap_or(libc::EIO)).encode();
            let reported = rustix::io::write(&failed, &report).is_ok();
            // SAFETY: ends this process without running destructors or handlers of the supervisor.
            unsafe { libc::_exit(if reported { 127 } else { 126 }) };
        }
        let Some(child) = Pid::from_raw(child) else {
            return fail(Step::Fork, &io::Error::last_os_error());
        };
        drop((failed, terminal));
        // Init must not hold the program's streams open, so that their end is the end of the
        // program's output.
        let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
        for standard in 0..3 {
            // SAFETY: both are open descriptors of this process.
            if unsafe { libc::dup2(null.as_raw_fd(), standard) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let mut bytes = [0; REPORT];
        if rustix::io::read(&failure, &mut bytes)? == REPORT {
            rustix::io::write(&supervisor, &bytes)?;
            exit();
        }
        report(Report::Started)?;
        loop {
            let mut poll = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&supervisor, PollFlags::IN)];
            match rustix::event::poll(&mut poll, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if !poll[1].revents().is_empty() {
                let mut signal = [0];
                if rustix::io::read(&supervisor, &mut signal)? == 0 {
                    exit();
                }
                self.send(child, i32::from(signal[0]));
            }
            if !poll[0].revents().is_empty() {
                // SAFETY: all zeros is a valid value of this plain struct.
                let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
                let size = size_of_val(&info);
                // SAFETY: the kernel writes at most `size` bytes into the buffer.
                let read = unsafe { libc::read(signals.as_raw_fd(), (&raw mut info).cast(), size) };
                let signal = i32::try_from(info.ssi_signo).unwrap_or(0);
                if read == isize::try_from(size).unwrap_or(0) && signal != libc::SIGCHLD {
                    self.send(child, signal);
                }
                if let Some(end) = reap(child)? {
                    report(end)?;
                    exit();
                }
            }
        }
    }

    /// Sends a signal to the program. An ended program is ignored.
    fn send(&self, child: Pid, signal: i32) {
        let pid = child.as_raw_nonzero().get();
        // The namespace does not end with this process, so the group is killed, too.
        if self.joined.is_some() && signal == libc::SIGKILL {
            // SAFETY: the call accesses no memory.
            unsafe { libc::kill(-pid, signal) };
        }
        // SAFETY: the call accesses no memory.
        unsafe { libc::kill(pid, signal) };
    }

    /// Returns only on failure.
    fn become_program(&self, terminal: Option<&OwnedFd>) -> (Step, io::Error) {
        reset_signals();
        if let Some(terminal) = terminal
            && let Err(error) = take_terminal(terminal)
        {
            return (Step::Terminal, error);
        }
        if self.joined.is_some()
            && let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        {
            return (Step::Join, error.into());
        }
        // SAFETY: the path is a C string.
        if unsafe { libc::chdir(self.directory.as_ptr()) } < 0 {
            return (Step::Directory, io::Error::last_os_error());
        }
        let pointers = |strings: &[CString]| {
            let mut pointers: Vec<_> = strings.iter().map(|string| string.as_ptr()).collect();
            pointers.push(std::ptr::null());
            pointers
        };
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        for filter in &self.filters {
            if let Err(error) = seccompiler::apply_filter(filter) {
                return (Step::Seccomp, io::Error::other(error));
            }
        }
        let mut failure = (Step::Find, io::Error::from_raw_os_error(libc::ENOENT));
        for candidate in &self.candidates {
            // SAFETY: all arguments are C strings, or arrays of C strings that end with a null
            // pointer.
            unsafe { libc::execve(candidate.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
            let error = io::Error::last_os_error();
            // SAFETY: the path is a C string.
            let exists = unsafe { libc::access(candidate.as_ptr(), libc::F_OK) } == 0;
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) if !exists => {}
                // Like a shell: a directory of PATH that cannot be searched does not hide the next
                // ones.
                Some(libc::EACCES) => failure = (Step::Exec, error),
                _ => return (Step::Exec, error),
            }
        }
        failure
    }
}

/// Blocks all signals, and returns a descriptor that receives them.
fn block_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized before its use, and the descriptor is new.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
        match libc::signalfd(-1, &raw const all, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            -1 => Err(io::Error::last_os_error()),
            descriptor => Ok(OwnedFd::from_raw_fd(descriptor)),
        }
    }
}

/// Gives the program the signal dispositions of a login, and a new session.
fn reset_signals() {
    // SAFETY: changes only dispositions and the mask of this process, which has one thread.
    // Failures leave a disposition unchanged.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::setsid();
    }
}

/// Enters `namespaces` of the container with this first process. Children of this process enter its
/// PID namespace.
fn join(first: RawFd, namespaces: ThreadNameSpaceType) -> io::Result<()> {
    // SAFETY: the descriptor was inherited from the supervisor, and is open until `close_all_but`
    // is called.
    let first = unsafe { BorrowedFd::borrow_raw(first) };
    Ok(rustix::thread::move_into_thread_name_spaces(first, namespaces)?)
}

/// Creates a terminal in the container, and sends the supervisor its end. Returns the end of the
/// program.
fn create_terminal(size: TerminalSize, supervisor: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use rustix::pty::OpenptFlags;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    set_size(ours.as_fd(), size)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [ours.as_fd()];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let report = Report::Terminal.encode();
    rustix::net::sendmsg(supervisor, &[io::IoSlice::new(&report)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(theirs)
}

/// Makes the terminal the controlling terminal and the standard streams of this process, which must
/// have just become the leader of its session.
fn take_terminal(terminal: &OwnedFd) -> io::Result<()> {
    rustix::process::ioctl_tiocsctty(terminal)?;
    rustix::stdio::dup2_stdin(terminal)?;
    rustix::stdio::dup2_stdout(terminal)?;
    Ok(rustix::stdio::dup2_stderr(terminal)?)
}

/// Sets the size of a terminal. The kernel notifies its foreground processes.
pub(super) fn set_size(terminal: BorrowedFd<'_>, size: TerminalSize) -> io::Result<()> {
    let TerminalSize { columns, rows } = size;
    let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

/// Reaps all ended processes. Returns the report of the program if it was among them.
fn reap(child: Pid) -> io::Result<Option<Report>> {
    let mut end = None;
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == child => {
                let byte = |value: i32| u8::try_from(value).unwrap_or(u8::MAX);
                end = match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => Some(Report::Code(byte(code))),
                    (_, Some(signal)) => Some(Report::Signal(byte(signal))),
                    _ => end,
                };
            }
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(end),
            Err(error) => return Err(error.into()),
        }
    }
}

fn exit() -> ! {
    // SAFETY: ends this process without running destructors or handlers of the supervisor.
    unsafe { libc::_exit(0) }
}

/// A connection between a supervisor and its init. The supervisor's end is first.
pub(super) fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let kind = SocketType::SEQPACKET;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?)
}

/// Requests that init sends a signal to the program. An ended init is ignored.
pub(super) fn signal(init: BorrowedFd<'_>, number: u8) -> io::Result<()> {
    match rustix::io::write(init.as_fd(), &[number]) {
        Ok(_) | Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_encoding_round_trips() {
        let steps = [
            Step::User,
            Step::Fork,
            Step::Directory,
            Step::Seccomp,
            Step::Find,
            Step::Exec,
            Step::Join,
            Step::Terminal,
        ];
        let failed = steps.map(|step| Report::Failed(step, 13));
        let others = [Report::Started, Report::Code(3), Report::Signal(15), Report::Terminal];
        for report in failed.into_iter().chain(others) {
            assert_eq!(Report::decode(report.encode()), Some(report));
        }
        assert_eq!(Report::decode([99, 0, 0, 0, 0]), None);
    }
}
