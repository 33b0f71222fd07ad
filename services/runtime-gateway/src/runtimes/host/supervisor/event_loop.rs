//! Event loop of a supervisor: streams, signals, connected gateways and the end of a running
//! process.
//!
//! One loop around `poll`. Only disk operations block.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{FailureReason, Usage};
use runtime::TerminalSize;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::util::clock::since_boot;

use super::init::{self, REPORT, Report, Step};
use super::rootfs;
use crate::runtimes::exit_record::End;
use crate::runtimes::host::cgroups::Cgroups;
use crate::runtimes::host::network::slirp::Uplink;
use crate::runtimes::host::paths;
use crate::runtimes::host::persisted::{Container, Intent, Launch};
use crate::runtimes::host::supervisor_protocol::{Answer, MAX_FRAME, Phase, Progress, Request};
use crate::runtimes::output_spool;

/// Longest grace period of a process out of contact.
const LAST_GRACE: Duration = Duration::from_secs(10);

/// Number of reads from one output before the other events are handled.
const FILLS: usize = 4;
/// Number of reads from one output after the end of a joined process. They empty a terminal, and a
/// pipe to which nothing writes any more.
const LAST_FILLS: usize = 64;
/// Pause after a connection that failed for lack of descriptors. Prevents a busy loop.
const SHORT_OF_FILES: Duration = Duration::from_millis(20);

/// An output of the process.
struct Output {
    spool: output_spool::Writer,
    /// `None` after the end of the output, or before the terminal arrives.
    pipe: Option<OwnedFd>,
    is_terminal: bool,
}

impl Output {
    /// Reads available bytes up to the free room, with at most `fills` reads.
    fn take(&mut self, held: bool, fills: usize) -> io::Result<()> {
        for _ in 0..fills {
            let Some(pipe) = &self.pipe else { break };
            let room = self.spool.room(held);
            if room == 0 {
                break;
            }
            let filled = if self.is_terminal {
                self.spool.fill_from_terminal(pipe.as_fd(), room)
            } else {
                self.spool.fill(pipe.as_fd(), room, held)
            };
            match filled {
                Ok(0) => self.pipe = None,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A connected gateway.
struct Client {
    socket: OwnedFd,
    received: Vec<u8>,
    /// The pending request.
    waiting: Option<Waiting>,
}

enum Waiting {
    News(Progress),
    End,
    Stdin { offset: u64, data: Bytes },
}

/// The events that ended a `poll`.
#[derive(Default)]
struct Ready {
    init_ended: bool,
    reported: bool,
    connecting: bool,
    network_changed: bool,
    clients: Vec<bool>,
}

/// A container with a running process.
pub(super) struct RunningContainer {
    process_dir: PathBuf,
    /// The directory of all mounts of the container.
    mounts: PathBuf,
    socket: PathBuf,
    cgroup: String,
    cgroups: Cgroups,
    /// Whether the process has joined the container of another one.
    has_joined: bool,
    init: Pid,
    /// When the start of the process was requested.
    since: Duration,
    init_watch: OwnedFd,
    /// The connection to init.
    reports: OwnedFd,
    report: Option<Report>,
    outputs: [Output; 2],
    /// `None` if the process has no input, or its input is closed.
    stdin: Option<OwnedFd>,
    stdin_taken: u64,
    /// The terminal, when init has created it.
    terminal: Option<OwnedFd>,
    /// The size that was requested before the terminal existed.
    requested_size: Option<TerminalSize>,
    /// Whether standard input will be closed after pending input.
    close_stdin: bool,
    held_back: bool,
    /// Signal that asks the process to end.
    stop_signal: u8,
    init_has_ended: bool,
    phase: Phase,
    clients: Vec<Client>,
    timer: OwnedFd,
    contact: Duration,
    stop_after: Duration,
    /// When all processes will be killed, after a stop was requested.
    kill_at: Option<Duration>,
    stopped: bool,
    /// The reason of a kill by the disk guard.
    ended_for_disk: Option<(FailureReason, String)>,
    /// Whether the memory guard ended the container.
    ended_for_memory: bool,
    /// The program that connects the network of the container.
    uplink: Option<Uplink>,
}

impl RunningContainer {
    /// `streams`: the supervisor's ends of standard output, standard error, and standard input if
    /// the process has one.
    pub(super) fn new(
        launch: &Launch,
        (container, intent): (&Container, &Intent),
        init: Pid,
        reports: OwnedFd,
        streams: Vec<OwnedFd>,
        cgroups: Cgroups,
    ) -> io::Result<Self> {
        let mut streams = streams.into_iter();
        let mut output = |name| {
            let spool = output_spool::Writer::open(&launch.process_dir.join(name))?;
            Ok::<_, io::Error>(Output { spool, pipe: streams.next(), is_terminal: false })
        };
        let outputs = [output(paths::STDOUT)?, output(paths::STDERR)?];
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            process_dir: launch.process_dir.clone(),
            mounts: rootfs::private(launch),
            socket: launch.socket.clone(),
            cgroup: launch.cgroup.clone(),
            cgroups,
            has_joined: launch.joins.is_some(),
            init,
            since: since_boot(),
            init_watch: rustix::process::pidfd_open(init, PidfdFlags::empty())?,
            reports,
            report: None,
            outputs,
            stdin: streams.next(),
            stdin_taken: 0,
            terminal: None,
            requested_size: None,
            close_stdin: false,
            held_back: intent.held_back,
            stop_signal: container.stop_signal.filter(|_| launch.joins.is_none()).unwrap_or(15), // TERM
            init_has_ended: false,
            phase: Phase::Starting,
            clients: Vec::new(),
            timer: rustix::time::timerfd_create(TimerfdClockId::Boottime, flags)?,
            contact: Duration::from_nanos(launch.contact),
            stop_after: Duration::from_nanos(launch.stop_after),
            kill_at: None,
            stopped: false,
            ended_for_disk: None,
            ended_for_memory: false,
            uplink: None,
        })
    }

    /// Keeps the program that connects the network until the end of this supervisor.
    pub(super) fn set_uplink(&mut self, uplink: Option<Uplink>) {
        self.uplink = uplink;
    }

    /// Runs until all processes of the container are dead and the end is stored, and then until the
    /// container is removed.
    pub(super) fn run(mut self, listener: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        self.set_timer()?;
        loop {
            let ready = self.wait(&listener)?;
            if ready.reported {
                self.read_reports()?;
            }
            self.update_timer()?;
            let held = self.held_back;
            self.outputs.iter_mut().try_for_each(|output| output.take(held, FILLS))?;
            self.init_has_ended |= ready.init_ended;
            if ready.connecting {
                self.accept(&listener)?;
            }
            if ready.network_changed {
                self.follow_network();
            }
            self.receive(&ready.clients)?;
            self.answer()?;
            // Follows the requests, because a stop does not wait for a reader.
            if self.init_has_ended && !self.has_output_for_reader() {
                break;
            }
        }
        self.finish(&listener)
    }

    /// Whether the disk was full, and the last output waits for a reader.
    fn has_output_for_reader(&self) -> bool {
        let is_killed = self.kill_at == Some(Duration::ZERO);
        let waits = |output: &Output| output.pipe.is_some() && output.spool.was_disk_full();
        self.held_back && !is_killed && self.outputs.iter().any(waits)
    }

    fn wait(&self, listener: &OwnedFd) -> io::Result<Ready> {
        let ends = if self.init_has_ended { PollFlags::empty() } else { PollFlags::IN };
        let mut polled = vec![
            PollFd::new(&self.init_watch, ends),
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&self.timer, PollFlags::IN),
        ];
        // After the end of init, the hang-up would be reported in every poll.
        if !self.init_has_ended {
            let events = if self.report_due() { PollFlags::IN } else { PollFlags::empty() };
            polled.push(PollFd::new(&self.reports, events));
        }
        let fixed = polled.len();
        let events =
            |client: &Client| if client.waiting.is_none() { PollFlags::IN } else { PollFlags::empty() };
        polled.extend(self.clients.iter().map(|client| PollFd::new(&client.socket, events(client))));
        for output in &self.outputs {
            if let Some(pipe) = output.pipe.as_ref().filter(|_| output.spool.room(self.held_back) > 0) {
                polled.push(PollFd::new(pipe, PollFlags::IN));
            }
        }
        let writing = self.clients.iter().any(|client| matches!(client.waiting, Some(Waiting::Stdin { .. })));
        if let Some(stdin) = self.stdin.as_ref().filter(|_| writing) {
            polled.push(PollFd::new(stdin, PollFlags::OUT));
        }
        let changes = self.uplink.as_ref().map(Uplink::changes);
        polled.extend(changes.iter().map(|changes| PollFd::new(changes, PollFlags::IN)));
        match rustix::event::poll(&mut polled, None) {
            Err(Errno::INTR) => return Ok(Ready::default()),
            result => result?,
        };
        let ready = |at: usize| !polled[at].revents().is_empty();
        Ok(Ready {
            init_ended: ready(0),
            connecting: ready(1),
            // The hang-up of the connection comes with the end of init, which is polled separately.
            network_changed: changes.is_some() && ready(polled.len() - 1),
            reported: !self.init_has_ended && polled[3].revents().contains(PollFlags::IN),
            clients: (fixed..fixed + self.clients.len()).map(ready).collect(),
        })
    }

    /// Adapts the filter of the network, or disconnects the network if that fails.
    fn follow_network(&mut self) {
        let followed = self.uplink.as_mut().map_or(Ok(()), Uplink::follow_changes);
        if let Err(error) = followed {
            eprintln!(
                "supervisor: cannot filter the network of the container, so it is disconnected: {error}"
            );
            self.uplink = None;
        }
    }

    fn report_due(&self) -> bool {
        matches!(self.report, None | Some(Report::Started))
    }

    /// Reads all pending reports.
    fn read_reports(&mut self) -> io::Result<()> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
        while self.report_due() {
            let mut bytes = [0; REPORT];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let slices = &mut [io::IoSliceMut::new(&mut bytes)];
            match rustix::net::recvmsg(&self.reports, slices, &mut control, flags) {
                Ok(received) if received.bytes == REPORT => {}
                Ok(_) | Err(Errno::AGAIN | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            let descriptor = control.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
                _ => None,
            });
            match (Report::decode(bytes), descriptor) {
                (Some(Report::Terminal), Some(terminal)) => self.set_terminal(terminal)?,
                (report, _) => self.report = report,
            }
            if self.report == Some(Report::Started) {
                self.phase = Phase::Started;
            }
        }
        Ok(())
    }

    /// Uses a terminal for input and output. The second output stays empty.
    fn set_terminal(&mut self, terminal: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&terminal, true)?;
        if let Some(size) = self.requested_size {
            init::set_size(terminal.as_fd(), size)?;
        }
        let [output, _] = &mut self.outputs;
        (output.pipe, output.is_terminal) = (Some(terminal.try_clone()?), true);
        self.stdin = Some(terminal.try_clone()?);
        self.terminal = Some(terminal);
        Ok(())
    }

    // Deadlines.

    /// When the process is stopped for lack of contact, and when it is killed.
    fn out_of_contact(&self) -> (Duration, Duration) {
        let kill = self.contact.saturating_add(self.stop_after);
        (kill.saturating_sub(LAST_GRACE.min(self.stop_after / 10)), kill)
    }

    fn update_timer(&mut self) -> io::Result<()> {
        let now = since_boot();
        let (term, kill) = self.out_of_contact();
        if self.kill_at.is_some_and(|at| at <= now) || kill <= now {
            self.stopped = true;
            self.kill_at = Some(Duration::ZERO);
            self.kill()?;
        } else if term <= now && self.kill_at.is_none() {
            self.stop(kill)?;
        } else {
            return self.set_timer();
        }
        self.set_timer()
    }

    fn set_timer(&self) -> io::Result<()> {
        let (term, kill) = self.out_of_contact();
        // A killed process is not killed again.
        let next = match self.kill_at {
            Some(Duration::ZERO) => None,
            Some(at) => Some(at.min(kill)),
            None => Some(term),
        };
        // A timer of zero would be disabled.
        let next = next.map_or(Duration::ZERO, |next| next.max(Duration::from_nanos(1)));
        let value = Timespec {
            tv_sec: i64::try_from(next.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: next.subsec_nanos().into(),
        };
        let setting = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &setting)?;
        Ok(())
    }

    /// Stops the process, and sets the time of the kill. Zero: it is killed at once, and gets no
    /// other signal, which could be the one that ends it.
    fn stop(&mut self, kill_at: Duration) -> io::Result<()> {
        if self.kill_at.is_none() && !kill_at.is_zero() {
            init::signal(self.reports.as_fd(), self.stop_signal)?;
        }
        // A process that has already ended does not count as stopped.
        self.stopped |= !self.init_has_ended;
        self.kill_at = Some(self.kill_at.map_or(kill_at, |earlier| earlier.min(kill_at)));
        Ok(())
    }

    /// Kills all processes of the container: its PID namespace ends with init. Of a process that
    /// has joined, only its group is killed.
    fn kill(&self) -> io::Result<()> {
        self.cgroups.lift_quota(&self.cgroup);
        // Before the program runs, its parent does not receive signals for it, but takes it along.
        if self.has_joined && self.phase != Phase::Starting {
            let kill = u8::try_from(libc::SIGKILL).unwrap_or(9);
            return init::signal(self.reports.as_fd(), kill);
        }
        match rustix::process::pidfd_send_signal(&self.init_watch, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    // Gateways.

    fn accept(&mut self, listener: &OwnedFd) -> io::Result<()> {
        use rustix::net::SocketFlags;
        loop {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    self.clients.push(Client { socket, received: Vec::new(), waiting: None });
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // The connection stays in the queue, and poll reports it again at once.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    std::thread::sleep(SHORT_OF_FILES);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads requests of ready clients. Clients beyond the end of `ready` are new, and are read
    /// too.
    fn receive(&mut self, ready: &[bool]) -> io::Result<()> {
        let mut requests = Vec::new();
        let mut index = 0;
        self.clients.retain_mut(|client| {
            let ready = ready.get(index).is_none_or(|ready| *ready);
            index += 1;
            !ready || client.receive(&mut requests)
        });
        requests.into_iter().try_for_each(|request| self.carry_out(&request))
    }

    /// Executes the requests that need no waiting.
    fn carry_out(&mut self, request: &Request) -> io::Result<()> {
        match request {
            Request::Watch(_) | Request::AwaitEnd | Request::Stdin { .. } | Request::GetProgress => {}
            Request::CloseStdin => self.close_stdin = true,
            Request::Signal(number) => init::signal(self.reports.as_fd(), *number)?,
            Request::Acknowledge { stdout, stderr } => {
                for (output, up_to) in self.outputs.iter_mut().zip([stdout, stderr]) {
                    output.spool.acknowledge(*up_to);
                }
            }
            Request::Detach => self.held_back = false,
            Request::Resize(size) => match &self.terminal {
                Some(terminal) => init::set_size(terminal.as_fd(), *size)?,
                None => self.requested_size = Some(*size),
            },
            Request::Stop(grace) => {
                self.stop(since_boot().saturating_add(*grace))?;
                self.update_timer()?;
            }
            Request::EndForDisk(why) | Request::EndForDiskLimit(why) => {
                let reason = match request {
                    Request::EndForDiskLimit(_) => FailureReason::DiskLimitExceeded,
                    _ => FailureReason::DiskFull,
                };
                self.ended_for_disk = Some((reason, why.clone()));
                self.stop(Duration::ZERO)?;
                self.update_timer()?;
            }
            Request::EndForMemory => {
                self.ended_for_memory = true;
                self.stop(Duration::ZERO)?;
                self.update_timer()?;
            }
            Request::Contact { sent, stop_after } => {
                // Messages may arrive out of order.
                if *sent >= self.contact {
                    (self.contact, self.stop_after) = (*sent, *stop_after);
                }
                self.update_timer()?;
            }
        }
        Ok(())
    }

    fn progress(&self) -> Progress {
        let [stdout, stderr] = &self.outputs;
        Progress {
            stdout: stdout.spool.head(),
            stderr: stderr.spool.head(),
            stdin_taken: self.stdin_taken,
            phase: self.phase,
        }
    }

    /// Answers all pending requests that can be answered.
    fn answer(&mut self) -> io::Result<()> {
        let mut clients = std::mem::take(&mut self.clients);
        let mut writing = false;
        for client in &mut clients {
            if let Some(Waiting::Stdin { offset, data }) = &mut client.waiting {
                let gap = *offset > self.stdin_taken;
                if gap || self.write_stdin(*offset, data)? {
                    client.waiting = None;
                    let taken = self.stdin_taken;
                    client.answer(if gap {
                        Answer::StdinGap(taken)
                    } else {
                        Answer::Progress(self.progress())
                    });
                } else {
                    writing = true;
                }
            }
        }
        if self.close_stdin && !writing && self.stdin.take().is_some() {
            self.end_terminal_input();
        }
        let progress = self.progress();
        for client in &mut clients {
            let due = match &client.waiting {
                Some(Waiting::News(seen)) => *seen != progress,
                Some(Waiting::End) => progress.phase == Phase::Ended,
                Some(Waiting::Stdin { .. }) | None => false,
            };
            if due {
                client.waiting = None;
                client.answer(Answer::Progress(progress));
            }
        }
        self.clients = clients;
        Ok(())
    }

    /// Writes input, as much as the process accepts. `true`: all of it was accepted.
    fn write_stdin(&mut self, offset: u64, data: &Bytes) -> io::Result<bool> {
        let end = offset + data.len() as u64;
        while self.stdin_taken < end {
            let Some(stdin) = &self.stdin else {
                self.stdin_taken = end;
                break;
            };
            let from = usize::try_from(self.stdin_taken - offset).unwrap_or(usize::MAX);
            match rustix::io::write(stdin, &data[from.min(data.len())..]) {
                Ok(written) => self.stdin_taken += written as u64,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                // The process no longer reads, so its input is discarded.
                Err(Errno::PIPE | Errno::IO) => self.stdin = None,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    /// Sends a terminal the character for the end of input. Programs may read more after it, so a
    /// full terminal may miss it.
    fn end_terminal_input(&self) {
        const END_OF_INPUT: u8 = 4;
        if let Some(terminal) = &self.terminal {
            rustix::io::write(terminal, &[END_OF_INPUT]).ok();
        }
    }

    // End of the process.

    /// Waits until all processes of the container are dead, stores the last output, and writes the
    /// exit record.
    fn finish(mut self, listener: &OwnedFd) -> io::Result<()> {
        self.read_reports()?;
        let init_signal = self.reap()?;
        // Processes that have joined died with the namespace, but not the parents of those.
        if !self.has_joined
            && let Err(error) = self.cgroups.kill_and_wait(&self.cgroup)
        {
            eprintln!("supervisor: cannot end all processes of the container: {error}");
        }
        // All writers are dead, so this ends. The spool has extra room for the contents of the
        // pipe. Processes that a joined process left behind may write on, so the reads are counted.
        let fills = if self.has_joined { LAST_FILLS } else { usize::MAX };
        self.outputs.iter_mut().try_for_each(|output| output.take(false, fills))?;
        let end = self.end(init_signal);
        if !self.has_joined
            && !matches!(end, End::NotStarted { .. } | End::Unknown { .. })
            && let Err(error) = self.write_usage()
        {
            eprintln!("supervisor: cannot write the resource usage: {error}");
        }
        // After the end is known, the worker mounts volumes for writing. Two writable mounts of one
        // volume must not exist.
        if !self.has_joined
            && let Err(error) = rootfs::release_volumes(&self.mounts)
        {
            eprintln!("supervisor: cannot unmount the volumes of the container: {error}");
        }
        super::write_end(&self.process_dir, &end)?;
        self.phase = Phase::Ended;
        self.stdin = None;
        self.accept(listener)?;
        let all = vec![true; self.clients.len()];
        self.receive(&all)?;
        self.answer()?;
        self.remove_groups()?;
        crate::runtimes::host::filesystem::remove_file(&self.socket)
    }

    /// Waits until init is dead, and with it its namespace. Returns the signal that killed it.
    fn reap(&self) -> io::Result<Option<u8>> {
        loop {
            match rustix::process::waitpid(Some(self.init), WaitOptions::empty()) {
                Ok(Some((_, status))) => {
                    let signal = status.terminating_signal();
                    return Ok(signal.map(|signal| u8::try_from(signal).unwrap_or(u8::MAX)));
                }
                Ok(None) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn write_usage(&self) -> io::Result<()> {
        let usage = Usage {
            running: Some(since_boot().saturating_sub(self.since)),
            cpu_time: self.cgroups.cpu_time(&self.cgroup),
            peak_memory_bytes: self.cgroups.peak_memory(&self.cgroup),
            ..Usage::default()
        };
        std::fs::write(self.process_dir.join(paths::USAGE), serde_json::to_vec(&usage)?)
    }

    fn end(&self, init_signal: Option<u8>) -> End {
        let stopped = self.stopped && !self.ended_for_memory;
        let killed = u8::try_from(libc::SIGKILL).unwrap_or(9);
        if let Some((reason, why)) = &self.ended_for_disk {
            return End::unknown(*reason, why);
        }
        let out_of_memory = || {
            self.ended_for_memory || !self.has_joined && self.cgroups.out_of_memory_kills(&self.cgroup) > 0
        };
        match self.report {
            // A shell reports the killed program in this way.
            Some(Report::Code(code)) if code == 128 + killed && out_of_memory() => {
                End::OutOfMemory { stopped }
            }
            Some(Report::Signal(signal)) if signal == killed && out_of_memory() => {
                End::OutOfMemory { stopped }
            }
            Some(Report::Code(code)) => End::Code { code, stopped },
            Some(Report::Signal(signal)) => End::Signal { signal, stopped },
            Some(Report::Failed(step, errno)) => not_started(step, &io::Error::from_raw_os_error(errno)),
            // Init was killed, by the supervisor or for lack of memory.
            Some(Report::Started | Report::Terminal) | None => {
                if out_of_memory() {
                    End::OutOfMemory { stopped }
                } else {
                    End::Signal { signal: init_signal.unwrap_or(killed), stopped }
                }
            }
        }
    }

    /// Removes a container in which no process was started.
    pub(super) fn destroy(&mut self) -> io::Result<()> {
        self.kill()?;
        self.reap()?;
        self.remove_groups()?;
        crate::runtimes::host::filesystem::remove_file(&self.socket)
    }

    /// Removes the control groups, which belong to the main process.
    fn remove_groups(&self) -> io::Result<()> {
        if self.has_joined { Ok(()) } else { self.cgroups.remove(&self.cgroup) }
    }
}

fn not_started(step: Step, error: &io::Error) -> End {
    match step {
        Step::Find => End::not_started(FailureReason::ProgramNotFound, "no such program in the image"),
        Step::Exec => End::not_started(
            FailureReason::ProgramNotExecutable,
            format!("cannot execute the program: {error}"),
        ),
        Step::Directory => End::not_started(
            FailureReason::WorkingDirectoryMissing,
            format!("cannot enter the working directory: {error}"),
        ),
        Step::Seccomp => {
            End::not_started(FailureReason::StartFailed, format!("cannot filter system calls: {error}"))
        }
        Step::User => {
            End::not_started(FailureReason::StartFailed, format!("cannot change to the user: {error}"))
        }
        Step::Join => End::not_started(
            FailureReason::StartFailed,
            format!("cannot enter the namespaces of the container: {error}"),
        ),
        Step::Terminal => {
            End::not_started(FailureReason::StartFailed, format!("cannot create a terminal: {error}"))
        }
        Step::Fork => End::not_started(FailureReason::StartFailed, format!("cannot fork: {error}")),
    }
}

impl Client {
    /// Reads requests. `false`: the client is gone, or has sent an invalid request.
    fn receive(&mut self, requests: &mut Vec<Request>) -> bool {
        let mut buffer = [MaybeUninit::uninit(); 65536];
        loop {
            let flags = rustix::net::RecvFlags::DONTWAIT;
            match rustix::net::recv(&self.socket, &mut buffer, flags) {
                Ok((filled, _)) if !filled.0.is_empty() => self.received.extend_from_slice(filled.0),
                Ok(_) => return false,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(_) => return false,
            }
            if self.received.len() > MAX_FRAME + 4 {
                return false;
            }
        }
        let Some((length, rest)) = self.received.split_first_chunk::<4>() else { return true };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > MAX_FRAME || self.waiting.is_some() {
            return false;
        }
        let Some(message) = rest.get(..length) else { return true };
        let Some(request) = Request::decode(message) else { return false };
        self.received.drain(..4 + length);
        self.waiting = Some(match &request {
            Request::Watch(seen) => Waiting::News(*seen),
            Request::AwaitEnd => Waiting::End,
            Request::Stdin { offset, data } => Waiting::Stdin { offset: *offset, data: data.clone() },
            // Answered at once, because no real progress equals this one.
            _ => Waiting::News(Progress { stdin_taken: u64::MAX, ..Progress::default() }),
        });
        requests.push(request);
        true
    }

    /// Each client has only one pending request. So an answer that cannot be sent at once is for a
    /// client that is gone.
    fn answer(&mut self, answer: Answer) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if rustix::net::send(&self.socket, &answer.encode(), flags).is_err() {
            // The next read of the client detects this.
            self.received.clear();
        }
    }
}
