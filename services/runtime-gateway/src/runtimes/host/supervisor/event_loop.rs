//! A process that runs: its streams, its signals, the gateways that ask about it, its end.
//!
//! One loop around `poll`. Nothing in it blocks but the disk.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{FailureReason, Usage};
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
use crate::runtimes::host::paths;
use crate::runtimes::host::persisted::{Intent, Launch};
use crate::runtimes::host::supervisor_protocol::{Answer, MAX_FRAME, Phase, Progress, Request};
use crate::runtimes::output_spool;

/// How long a process that is out of contact has between TERM and KILL, at most.
const LAST_GRACE: Duration = Duration::from_secs(10);

/// How often an output is emptied before the others are looked at.
const FILLS: usize = 4;
/// Pause after a connection for which no file could be opened. Without it the loop would spin.
const SHORT_OF_FILES: Duration = Duration::from_millis(20);

/// An output of the process.
struct Output {
    spool: output_spool::Writer,
    /// `None` when all of it has been taken.
    pipe: Option<OwnedFd>,
}

impl Output {
    /// Takes in what is there, as much as there is room for, in at most so many `fills`: others wait too.
    fn take(&mut self, held: bool, fills: usize) -> io::Result<()> {
        for _ in 0..fills {
            let Some(pipe) = &self.pipe else { break };
            let room = self.spool.room(held);
            if room == 0 {
                break;
            }
            match self.spool.fill(pipe.as_fd(), room, held) {
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

/// A gateway that is connected.
struct Client {
    socket: OwnedFd,
    received: Vec<u8>,
    /// What it waits to be answered.
    waiting: Option<Waiting>,
}

enum Waiting {
    News(Progress),
    End,
    Stdin { offset: u64, data: Bytes },
}

/// What ended a wait for events.
#[derive(Default)]
struct Ready {
    init_ended: bool,
    reported: bool,
    connecting: bool,
    clients: Vec<bool>,
}

/// A container in which something runs.
pub(super) struct Running {
    process_dir: PathBuf,
    /// Below this everything is mounted that the container sees.
    mounts: PathBuf,
    socket: PathBuf,
    cgroup: String,
    cgroups: Cgroups,
    init: Pid,
    /// When the process was about to be started.
    since: Duration,
    init_watch: OwnedFd,
    /// The connection to init.
    reports: OwnedFd,
    report: Option<Report>,
    outputs: [Output; 2],
    /// `None` when it is closed or was never open.
    stdin: Option<OwnedFd>,
    stdin_taken: u64,
    /// Whether closing it waits only for input that is being taken.
    close_stdin: bool,
    held_back: bool,
    init_has_ended: bool,
    phase: Phase,
    clients: Vec<Client>,
    timer: OwnedFd,
    contact: Duration,
    stop_after: Duration,
    /// When everything is killed, once somebody asked for it.
    kill_at: Option<Duration>,
    stopped: bool,
    /// Why everything was killed, if that was to keep the disk usable.
    ended_for_disk: Option<String>,
    /// Whether the memory guard ended it.
    ended_for_memory: bool,
}

impl Running {
    /// `streams`: our ends of standard output, standard error, and standard input if there is one.
    pub(super) fn new(
        launch: &Launch,
        intent: &Intent,
        init: Pid,
        reports: OwnedFd,
        streams: Vec<OwnedFd>,
        cgroups: Cgroups,
    ) -> io::Result<Self> {
        let mut streams = streams.into_iter();
        let mut output = |name| {
            let spool = output_spool::Writer::open(&launch.process_dir.join(name))?;
            Ok::<_, io::Error>(Output { spool, pipe: streams.next() })
        };
        let outputs = [output(paths::STDOUT)?, output(paths::STDERR)?];
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            process_dir: launch.process_dir.clone(),
            mounts: rootfs::private(launch),
            socket: launch.socket.clone(),
            cgroup: launch.cgroup.clone(),
            cgroups,
            init,
            since: since_boot(),
            init_watch: rustix::process::pidfd_open(init, PidfdFlags::empty())?,
            reports,
            report: None,
            outputs,
            stdin: streams.next(),
            stdin_taken: 0,
            close_stdin: false,
            held_back: intent.held_back,
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
        })
    }

    /// Serves until everything in the container is dead and written down, and then until nothing of it is left.
    pub(super) fn run(mut self, listener: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        self.set_timer()?;
        loop {
            let ready = self.wait(&listener)?;
            if ready.reported {
                self.take_report()?;
            }
            self.mind_the_time()?;
            let held = self.held_back;
            self.outputs.iter_mut().try_for_each(|output| output.take(held, FILLS))?;
            self.init_has_ended |= ready.init_ended;
            if ready.connecting {
                self.accept(&listener)?;
            }
            self.receive(&ready.clients)?;
            self.answer()?;
            // After what was asked for: a stop does not wait for a reader.
            if self.init_has_ended && !self.has_output_for_reader() {
                break;
            }
        }
        self.finish(&listener)
    }

    /// Whether the disk was full, and the last output waits for a reader to read what was before it.
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
        // Without init they are hung up, which is reported whatever is asked for.
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
        match rustix::event::poll(&mut polled, None) {
            Err(Errno::INTR) => return Ok(Ready::default()),
            result => result?,
        };
        let ready = |at: usize| !polled[at].revents().is_empty();
        Ok(Ready {
            init_ended: ready(0),
            connecting: ready(1),
            // Its hang-up comes with the end of init, which is looked at anyway.
            reported: !self.init_has_ended && polled[3].revents().contains(PollFlags::IN),
            clients: (fixed..fixed + self.clients.len()).map(ready).collect(),
        })
    }

    fn report_due(&self) -> bool {
        matches!(self.report, None | Some(Report::Started))
    }

    fn take_report(&mut self) -> io::Result<()> {
        let mut bytes = [0; REPORT];
        match rustix::net::recv(&self.reports, &mut bytes, rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, REPORT)) => {}
            Ok(_) | Err(Errno::AGAIN | Errno::CONNRESET) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        self.report = Report::decode(bytes);
        if self.report == Some(Report::Started) {
            self.phase = Phase::Started;
        }
        Ok(())
    }

    // Time.

    /// When the process is asked to end for want of contact, and when it is killed for it.
    fn out_of_contact(&self) -> (Duration, Duration) {
        let kill = self.contact.saturating_add(self.stop_after);
        (kill.saturating_sub(LAST_GRACE.min(self.stop_after / 10)), kill)
    }

    fn mind_the_time(&mut self) -> io::Result<()> {
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
        // What was killed is not killed again.
        let next = match self.kill_at {
            Some(Duration::ZERO) => None,
            Some(at) => Some(at.min(kill)),
            None => Some(term),
        };
        // A timer that is set to zero is switched off.
        let next = next.map_or(Duration::ZERO, |next| next.max(Duration::from_nanos(1)));
        let value = Timespec {
            tv_sec: i64::try_from(next.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: next.subsec_nanos().into(),
        };
        let setting = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &setting)?;
        Ok(())
    }

    /// Asks the process to end, and sets when it must have.
    fn stop(&mut self, kill_at: Duration) -> io::Result<()> {
        if self.kill_at.is_none() {
            let term = u8::try_from(libc::SIGTERM).unwrap_or(15);
            init::signal(self.reports.as_fd(), term)?;
        }
        // What has ended before was not stopped.
        self.stopped |= !self.init_has_ended;
        self.kill_at = Some(self.kill_at.map_or(kill_at, |earlier| earlier.min(kill_at)));
        Ok(())
    }

    /// Kills everything in the container: with init, its namespace of processes ends.
    fn kill(&self) -> io::Result<()> {
        self.cgroups.lift_quota(&self.cgroup);
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
                // The connection stays in the queue: poll reports it again at once.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    std::thread::sleep(SHORT_OF_FILES);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes requests of those that are ready; the new ones, beyond the end of `ready`, are asked too.
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

    /// Does what needs no waiting for.
    fn carry_out(&mut self, request: &Request) -> io::Result<()> {
        match request {
            Request::Watch(_) | Request::AwaitEnd | Request::Stdin { .. } | Request::Look => {}
            Request::CloseStdin => self.close_stdin = true,
            Request::Signal(number) => init::signal(self.reports.as_fd(), *number)?,
            Request::Acknowledge { stdout, stderr } => {
                for (output, up_to) in self.outputs.iter_mut().zip([stdout, stderr]) {
                    output.spool.acknowledge(*up_to);
                }
            }
            Request::Detach => self.held_back = false,
            Request::Stop(grace) => {
                self.stop(since_boot().saturating_add(*grace))?;
                self.mind_the_time()?;
            }
            Request::EndForDisk(why) => {
                self.ended_for_disk = Some(why.clone());
                self.stop(Duration::ZERO)?;
                self.mind_the_time()?;
            }
            Request::EndForMemory => {
                self.ended_for_memory = true;
                self.stop(Duration::ZERO)?;
                self.mind_the_time()?;
            }
            Request::Contact { sent, stop_after } => {
                // Messages may overtake each other.
                if *sent >= self.contact {
                    (self.contact, self.stop_after) = (*sent, *stop_after);
                }
                self.mind_the_time()?;
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

    /// Answers everybody whom something can be said to.
    fn answer(&mut self) -> io::Result<()> {
        let mut clients = std::mem::take(&mut self.clients);
        let mut writing = false;
        for client in &mut clients {
            if let Some(Waiting::Stdin { offset, data }) = &mut client.waiting {
                let gap = *offset > self.stdin_taken;
                if gap || self.take_stdin(*offset, data)? {
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
        if self.close_stdin && !writing {
            self.stdin = None;
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

    /// Passes on input, as much as the process takes. `true`: all of it was taken.
    fn take_stdin(&mut self, offset: u64, data: &Bytes) -> io::Result<bool> {
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
                // It no longer reads: what comes is thrown away.
                Err(Errno::PIPE) => self.stdin = None,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    // The end.

    /// Everything in the container is dying: waits for it, keeps its last output, and writes down how it ended.
    fn finish(mut self, listener: &OwnedFd) -> io::Result<()> {
        if self.report_due() {
            self.take_report()?;
        }
        // Two reports may be there: that it was started, and how it ended.
        if self.report_due() {
            self.take_report()?;
        }
        let init_signal = self.reap()?;
        // All writers are dead, so this ends; there is room for what a pipe holds beyond what was held back.
        self.outputs.iter_mut().try_for_each(|output| output.take(false, usize::MAX))?;
        let end = self.end(init_signal);
        if !matches!(end, End::NotStarted { .. } | End::Unknown { .. })
            && let Err(error) = self.write_usage()
        {
            eprintln!("supervisor: cannot write what was used: {error}");
        }
        // Once the end is known the worker mounts volumes for writing, and two such mounts of one volume must not be.
        if let Err(error) = rootfs::release_volumes(&self.mounts) {
            eprintln!("supervisor: cannot unmount what the container saw: {error}");
        }
        super::write_end(&self.process_dir, &end)?;
        self.phase = Phase::Ended;
        self.stdin = None;
        self.accept(listener)?;
        let everybody = vec![true; self.clients.len()];
        self.receive(&everybody)?;
        self.answer()?;
        self.cgroups.remove(&self.cgroup)?;
        crate::runtimes::host::filesystem::remove_file(&self.socket)
    }

    /// Waits until init is dead, and with it everything in its namespace. Returns the signal that killed it.
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
        if let Some(why) = &self.ended_for_disk {
            return End::unknown(FailureReason::DiskFull, why);
        }
        let out_of_memory = || self.ended_for_memory || self.cgroups.out_of_memory_kills(&self.cgroup) > 0;
        match self.report {
            // A shell says so of the program that it ran.
            Some(Report::Code(code)) if code == 128 + killed && out_of_memory() => {
                End::OutOfMemory { stopped }
            }
            Some(Report::Signal(signal)) if signal == killed && out_of_memory() => {
                End::OutOfMemory { stopped }
            }
            Some(Report::Code(code)) => End::Code { code, stopped },
            Some(Report::Signal(signal)) => End::Signal { signal, stopped },
            Some(Report::Failed(step, errno)) => not_started(step, &io::Error::from_raw_os_error(errno)),
            // Init itself was killed: by us, or for want of memory.
            Some(Report::Started) | None => {
                if out_of_memory() {
                    End::OutOfMemory { stopped }
                } else {
                    End::Signal { signal: init_signal.unwrap_or(killed), stopped }
                }
            }
        }
    }

    /// Ends a container in which nothing was started.
    pub(super) fn destroy(&mut self) -> io::Result<()> {
        self.kill()?;
        self.reap()?;
        self.cgroups.remove(&self.cgroup)?;
        crate::runtimes::host::filesystem::remove_file(&self.socket)
    }
}

fn not_started(step: Step, error: &io::Error) -> End {
    match step {
        Step::Find => End::not_started(FailureReason::ProgramNotFound, "no such program in the image"),
        Step::Exec => End::not_started(
            FailureReason::ProgramNotExecutable,
            format!("the program cannot be executed: {error}"),
        ),
        Step::Directory => End::not_started(
            FailureReason::WorkingDirectoryMissing,
            format!("the working directory cannot be entered: {error}"),
        ),
        Step::Seccomp => {
            End::not_started(FailureReason::StartFailed, format!("cannot filter system calls: {error}"))
        }
        Step::User => {
            End::not_started(FailureReason::StartFailed, format!("cannot become its user: {error}"))
        }
        Step::Fork => End::not_started(FailureReason::StartFailed, format!("cannot fork: {error}")),
    }
}

impl Client {
    /// Takes what has arrived. `false`: it is gone, or sends what is no request.
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
            // Answered at once: no progress is like this one.
            _ => Waiting::News(Progress { stdin_taken: u64::MAX, ..Progress::default() }),
        });
        requests.push(request);
        true
    }

    /// An answer that cannot be sent at once is to somebody who is gone: each has asked for just one.
    fn answer(&mut self, answer: Answer) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if rustix::net::send(&self.socket, &answer.encode(), flags).is_err() {
            // The next look at it says so.
            self.received.clear();
        }
    }
}
