//! Processes of the host runtime: start, state, stop and attachment.
//!
//! The files in the directory of a process tell its state: see [`Host::status`]. Supervisors are
//! used only to wait for changes and to control a process.

mod attachment;
mod launch;

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use domain::workload::{FailureReason, Usage};
use domain::{ContainerHandle, ProcessId};
use runtime::{ContainerDescription, Ended, ProcessContainer, ProcessState, RuntimeError};
use uuid::Uuid;

use crate::util::blocking::blocking;

use super::filesystem::{self, at};
use super::supervisor_protocol::{Answer, Request};
use super::{Host, paths, supervisor};
use crate::runtimes::exit_record::End;
use crate::util::keyed_locks::lock;

/// Pause before an unreachable supervisor is tried again.
const PAUSE: Duration = Duration::from_millis(2);
/// Timeout of a supervisor's answer to a contact.
const CONTACT: Duration = Duration::from_secs(5);
/// Longest time until init has ended after its supervisor.
const INIT_END: Duration = Duration::from_secs(5);
/// Reserved space of an exit record, in bytes.
const RESERVE: usize = 4096;

/// A process and its directory.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) id: ProcessId,
    pub(super) container: ContainerHandle,
    pub(super) dir: PathBuf,
}

/// The namespaces in which a process runs.
#[derive(Clone, Copy)]
pub(super) enum Place<'p> {
    /// New namespaces with the volumes of the container: the process is the main process. It joins
    /// the network of the process `network_of`.
    New { network_of: Option<&'p Process> },
    /// The namespaces of this process.
    Joined(&'p Process),
    /// New namespaces with a copy of what the container left behind. It ends with the process.
    Isolated,
}

/// State of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    Starting,
    Started,
    Ended(End),
    StartUnknown,
}

impl Process {
    pub(super) fn new(host: &Host, container: ContainerHandle, id: ProcessId) -> Self {
        let dir = host.container(container).join(paths::PROCESSES).join(id.to_string());
        Self { id, container, dir }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The directory of the process during its creation or removal. No other process uses this
    /// name.
    fn unfinished(&self) -> PathBuf {
        self.dir.with_file_name(format!(".{}.{}", self.id, Uuid::new_v4()))
    }

    /// The name of its control groups.
    pub(super) fn cgroup(&self) -> String {
        format!("gantry-{}", self.id)
    }

    /// Whether the process has a supervisor.
    pub(super) fn is_alive(&self) -> Result<bool, RuntimeError> {
        let path = self.file(paths::ALIVE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(at("open", &path)(error)),
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(fs::TryLockError::WouldBlock) => Ok(true),
            Err(fs::TryLockError::Error(error)) => Err(at("lock", &path)(error)),
        }
    }

    /// Kills the supervisor, and with it all processes of the container.
    pub(super) fn kill_supervisor(&self) -> Result<(), RuntimeError> {
        let path = self.file(paths::ALIVE);
        let text = fs::read_to_string(&path).map_err(at("read", &path))?;
        let pid = text.trim().parse().ok().filter(|pid| *pid > 1);
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else { return Ok(()) };
        // The process id is valid while its process holds the lock.
        if self.is_alive()?
            && let Err(error) = rustix::process::kill_process(pid, rustix::process::Signal::KILL)
            && error != rustix::io::Errno::SRCH
        {
            return Err(RuntimeError::io("kill a supervisor", error.into()));
        }
        Ok(())
    }

    /// Whether no supervisor can act for the process. The lock is not enough, because a frozen
    /// gateway may have a copy of it. A supervisor that is still starting finds no intent.
    pub(super) fn supervisor_ended(&self) -> Result<bool, RuntimeError> {
        let path = self.file(paths::ALIVE);
        let text = filesystem::read_if_exists(&path).map_err(at("read", &path))?.unwrap_or_default();
        let Some(pid) = String::from_utf8(text).ok().and_then(|text| text.trim().parse::<u32>().ok()) else {
            return Ok(true);
        };
        // A process without a readable `stat` does not exist.
        let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        // The process name may contain any characters. A zombie counts as ended, because the
        // gateway that must reap it may be frozen.
        Ok(stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])))
    }

    /// Waits until init is dead, and with it its container. The kernel kills init with its
    /// supervisor.
    fn await_end_of_init(&self) {
        let Ok(text) = fs::read_to_string(self.file(paths::INIT)) else { return };
        let stat = PathBuf::from(format!("/proc/{}/stat", text.trim()));
        let deadline = std::time::Instant::now() + INIT_END;
        let is_init = || {
            let stat = fs::read(&stat).unwrap_or_default();
            // The name is followed by the state. Another process may have the number meanwhile.
            let name = stat.iter().position(|byte| *byte == b'(').map(|at| &stat[at..]);
            name.is_some_and(|name| name.starts_with(b"(gantry-init) ") && name.get(14) != Some(&b'Z'))
        };
        while is_init() && std::time::Instant::now() < deadline {
            std::thread::sleep(PAUSE);
        }
    }

    /// Prevents the start, if this is still possible. `true`: the process will never start.
    pub(super) fn revoke(&self) -> Result<bool, RuntimeError> {
        match filesystem::rename_exclusively(&self.file(paths::INTENT), &self.file(paths::REVOKED)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(at("revoke the intent in", &self.dir)(error)),
        }
    }

    pub(super) fn is_revoked(&self) -> Result<bool, RuntimeError> {
        self.exists(paths::REVOKED)
    }

    fn exists(&self, name: &str) -> Result<bool, RuntimeError> {
        filesystem::exists(&self.file(name)).map_err(at("check", &self.dir))
    }

    fn not_found(&self) -> RuntimeError {
        RuntimeError::ProcessNotFound(self.id)
    }

    /// The end of the supervisor's log, for people.
    fn log_tail(&self) -> String {
        let text = || {
            let mut file = File::open(self.file(paths::LOG))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(2000)))?;
            io::read_to_string(file)
        };
        // The text is only for people, and may be missing.
        text().unwrap_or_default().trim().to_owned()
    }
}

impl Host {
    pub(super) fn find(&self, id: ProcessId) -> Result<Process, RuntimeError> {
        let container = lock(&self.processes).get(&id).copied();
        container.map(|container| Process::new(self, container, id)).ok_or(RuntimeError::ProcessNotFound(id))
    }

    /// Returns the resource usage of an ended process.
    pub(super) fn usage(&self, id: ProcessId) -> Result<Usage, RuntimeError> {
        let path = self.find(id)?.file(paths::USAGE);
        let text = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
        // Unreadable values are reported as unknown.
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default())
    }

    /// Returns the state of a process, from its files:
    ///
    /// | file | with a supervisor | without |
    /// |---|---|---|
    /// | `end` | ended | ended |
    /// | `started` | started | its end is unknown |
    /// | `revoked` | will never start | will never start |
    /// | `intent` | starting | of this boot: will never start. Of an earlier boot: unknown |
    ///
    /// A process without a supervisor is settled: its end is stored, and its remaining processes
    /// are killed.
    pub(super) fn status(&self, process: &Process) -> Result<Status, RuntimeError> {
        let mut was_empty = false;
        loop {
            // Checked first: after the death of a supervisor, its files no longer change.
            let alive = process.is_alive()?;
            let end = process.file(paths::END);
            if let Some(text) = filesystem::read_if_exists(&end).map_err(at("read", &end))? {
                let unreadable = |_| End::unknown(FailureReason::ExitUnknown, "cannot read the exit record");
                return Ok(Status::Ended(serde_json::from_slice(&text).unwrap_or_else(unreadable)));
            }
            if process.exists(paths::STARTED)? {
                if alive {
                    return Ok(Status::Started);
                }
                let mut message =
                    "the supervisor or the machine ended before the exit record was written".to_owned();
                let last = process.log_tail();
                if !last.is_empty() {
                    message = format!("{message}; log of the supervisor: {last}");
                }
                return self
                    .settle(process, End::unknown(FailureReason::ExitUnknown, message))
                    .map(Status::Ended);
            }
            if process.is_revoked()? {
                let end = End::not_started(
                    FailureReason::StoppedBeforeStart,
                    "the process was stopped before it was started",
                );
                return Ok(Status::Ended(end));
            }
            if process.exists(paths::INTENT)? {
                if alive {
                    return Ok(Status::Starting);
                }
                let Some(intent) = Self::intent(process)?.filter(|intent| intent.boot == self.boot) else {
                    // The intent was revoked or taken just now, or is of an earlier boot.
                    if process.exists(paths::INTENT)? {
                        return Ok(Status::StartUnknown);
                    }
                    continue;
                };
                if process.revoke()? {
                    let last = process.log_tail();
                    let message =
                        format!("the supervisor of process {} ended before the start {last}", intent.process);
                    return self
                        .settle(process, End::not_started(FailureReason::StartFailed, message.trim()))
                        .map(Status::Ended);
                }
                continue;
            }
            // An intent that is taken or revoked just now is found by the next check.
            if std::mem::replace(&mut was_empty, true) || !process.exists("")? {
                return Err(process.not_found());
            }
        }
    }

    /// Kills the remaining processes of a container without a supervisor, and stores the end of its
    /// process.
    fn settle(&self, process: &Process, end: End) -> Result<End, RuntimeError> {
        let _turn = lock(&self.settling);
        let path = process.file(paths::END);
        if let Some(text) = filesystem::read_if_exists(&path).map_err(at("read", &path))? {
            // Another task has stored the end.
            return Ok(serde_json::from_slice(&text).unwrap_or(end));
        }
        if self.unprivileged {
            process.await_end_of_init();
        }
        self.cgroups
            .remove(&process.cgroup())
            .map_err(|error| RuntimeError::io("remove the cgroups of a container", error))?;
        supervisor::write_end(&process.dir, &end).map_err(at("write the end in", &process.dir))?;
        Ok(end)
    }

    async fn status_of(self: &Arc<Self>, process: &Process) -> Result<Status, RuntimeError> {
        let (host, process) = (Arc::clone(self), process.clone());
        blocking(move || {
            // The state may come from a gateway that took over. This gateway must not report it.
            host.hold.check()?;
            host.status(&process)
        })
        .await
    }

    /// Returns the container of a process, and its team.
    pub(super) async fn container_of(
        self: &Arc<Self>,
        id: ProcessId,
    ) -> Result<ProcessContainer, RuntimeError> {
        let (process, host) = (self.find(id)?, Arc::clone(self));
        let handle = process.container;
        blocking(move || {
            let container = host.read_container(handle)?.ok_or(RuntimeError::ProcessNotFound(id))?;
            Ok(ProcessContainer { handle, team: container.team, main: host.main_of(&process)? })
        })
        .await
    }

    pub(super) async fn describe_container(
        self: &Arc<Self>,
        handle: ContainerHandle,
    ) -> Result<ContainerDescription, RuntimeError> {
        let host = Arc::clone(self);
        blocking(move || {
            let container = host.read_container(handle)?.ok_or(RuntimeError::ContainerNotFound(handle))?;
            let (mut main, mut others) = (None, Vec::new());
            for process in host.processes_of(handle)? {
                if Self::is_main(&process)? {
                    main = Some(process.id);
                } else {
                    others.push(process.id);
                }
            }
            Ok(ContainerDescription { team: container.team, note: container.note, main, others })
        })
        .await
    }

    /// Returns the main process of the container of a process.
    fn main_of(&self, process: &Process) -> Result<ProcessId, RuntimeError> {
        for other in std::iter::once(process.clone()).chain(self.processes_of(process.container)?) {
            if Self::is_main(&other)? {
                return Ok(other.id);
            }
        }
        Ok(process.id)
    }

    /// Undoes a start that failed before it was in progress.
    pub(super) fn undo_start(&self, process: &Process) -> Result<(), RuntimeError> {
        process.revoke()?;
        let socket = self.sockets.path(&process.id.to_string());
        filesystem::remove_file(&socket).map_err(at("remove", &socket))?;
        // A gateway that took over may have created the process again.
        self.hold.check()?;
        // The state of a partly removed directory would be ambiguous, so it is renamed first.
        let unfinished = process.unfinished();
        match fs::rename(&process.dir, &unfinished) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(at("remove", &process.dir))?,
        }
        filesystem::remove_tree(&unfinished).map_err(at("remove", &unfinished))
    }

    pub(super) async fn process(self: &Arc<Self>, id: ProcessId) -> Result<ProcessState, RuntimeError> {
        Ok(match self.status_of(&self.find(id)?).await? {
            Status::Starting => ProcessState::Starting,
            Status::Started => ProcessState::Started,
            Status::Ended(end) => ProcessState::Ended(end.into()),
            Status::StartUnknown => ProcessState::StartUnknown,
        })
    }

    pub(super) async fn wait(self: &Arc<Self>, id: ProcessId) -> Result<Ended, RuntimeError> {
        let process = self.find(id)?;
        loop {
            if let Some(ended) = ended(self.status_of(&process).await?) {
                return Ok(ended);
            }
            if self.watch_to_the_end(&process).await.is_err() {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Resolves when a process may be running: at once, or when one is started.
    ///
    /// Loops that protect running containers wait for it, so that an idle worker does not wake up.
    pub(super) async fn until_any_runs(self: &Arc<Self>) {
        let mut added = self.process_added.subscribe();
        loop {
            added.mark_unchanged();
            let host = Arc::clone(self);
            if blocking(move || Ok::<_, RuntimeError>(host.may_any_run())).await.unwrap_or(true) {
                return;
            }
            // The host keeps the sender.
            _ = added.changed().await;
        }
    }

    /// Whether a process has no record of its end. A process whose supervisor was killed has none
    /// until it is settled.
    fn may_any_run(&self) -> bool {
        let all = lock(&self.processes).clone();
        all.into_iter().any(|(id, container)| {
            let process = Process::new(self, container, id);
            let has_ended = [paths::END, paths::REVOKED].map(|name| process.exists(name).unwrap_or(false));
            has_ended == [false, false]
        })
    }

    async fn watch_to_the_end(&self, process: &Process) -> io::Result<()> {
        let mut connection = self.sockets.connect(&process.id.to_string()).await?;
        connection.progress(&Request::AwaitEnd).await?;
        Ok(())
    }

    pub(super) async fn stop(self: &Arc<Self>, id: ProcessId, grace: Duration) -> Result<(), RuntimeError> {
        let process = self.find(id)?;
        let (host, revoked) = (Arc::clone(self), process.clone());
        let revoke = move || {
            host.hold.check()?;
            revoked.revoke()
        };
        if blocking(revoke).await? {
            return Ok(());
        }
        self.send_request(&process, &Request::Stop(grace)).await.map(|_| ())
    }

    /// Sends a request to the supervisor of a process. `None`: the process has ended.
    pub(super) async fn send_request(
        self: &Arc<Self>,
        process: &Process,
        request: &Request,
    ) -> Result<Option<Answer>, RuntimeError> {
        loop {
            let answer = match self.sockets.connect(&process.id.to_string()).await {
                Ok(mut connection) => connection.request(request).await,
                Err(error) => Err(error),
            };
            if let Ok(answer) = answer {
                return Ok(Some(answer));
            }
            if ended(self.status_of(process).await?).is_some() {
                return Ok(None);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    pub(super) async fn contact(
        self: &Arc<Self>,
        sent: Duration,
        stop_after: Duration,
    ) -> Result<(), RuntimeError> {
        {
            let mut contact = lock(&self.contact);
            if contact.is_some_and(|(earlier, _)| earlier > sent) {
                return Ok(());
            }
            *contact = Some((sent, stop_after));
        }
        let processes: Vec<_> =
            lock(&self.processes).iter().map(|(id, container)| (*id, *container)).collect();
        let request = Request::Contact { sent, stop_after };
        let requests = processes.into_iter().map(|(id, container)| {
            let process = Process::new(self, container, id);
            let request = &request;
            async move {
                // Most processes have ended, and have no socket any more.
                let Ok(mut connection) = self.sockets.connect(&process.id.to_string()).await else { return };
                match tokio::time::timeout(CONTACT, connection.request(request)).await {
                    Ok(Ok(_)) => {}
                    // The supervisor is ending.
                    Ok(Err(_)) => {}
                    Err(_) => tracing::warn!(process.id = %process.id, "a supervisor does not answer"),
                }
            }
        });
        futures::future::join_all(requests).await;
        Ok(())
    }
}

fn ended(status: Status) -> Option<Ended> {
    match status {
        Status::Starting | Status::Started => None,
        Status::Ended(end) => Some(end.into()),
        Status::StartUnknown => {
            let message = "the machine was restarted after the intent to start the process and before a proof of the start";
            Some(End::unknown(FailureReason::StartUnknown, message).into())
        }
    }
}
