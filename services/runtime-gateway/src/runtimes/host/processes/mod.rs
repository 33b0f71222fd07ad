//! Processes: started, watched, stopped, attached to.
//!
//! How far a process is stands in its directory; see [`Host::status`] for what means what. Its supervisor is asked only to
//! learn of changes, and to change something.

mod attachment;
mod launch;

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use domain::workload::{FailureReason, Usage};
use domain::{AttemptId, ContainerHandle};
use runtime::{Ended, ProcessState, RuntimeError};
use uuid::Uuid;

use crate::util::blocking::blocking;

use super::filesystem::{self, at};
use super::supervisor_protocol::{Answer, Request};
use super::{Host, paths, supervisor};
use crate::runtimes::exit_record::End;
use crate::util::keyed_locks::lock;

/// Before a supervisor that could not be reached is tried again.
const PAUSE: Duration = Duration::from_millis(2);
/// How long a supervisor may take to answer a contact.
const CONTACT: Duration = Duration::from_secs(5);
/// Space set aside for an exit record.
const RESERVE: usize = 4096;

/// A process, and where its files are.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) id: AttemptId,
    pub(super) container: ContainerHandle,
    pub(super) dir: PathBuf,
}

/// How far a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    Starting,
    Started,
    Ended(End),
    StartUnknown,
}

impl Process {
    pub(super) fn new(host: &Host, container: ContainerHandle, id: AttemptId) -> Self {
        let dir = host.container(container).join(paths::PROCESSES).join(id.to_string());
        Self { id, container, dir }
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where its directory is while it is made or removed, which is nobody else's.
    fn unfinished(&self) -> PathBuf {
        self.dir.with_file_name(format!(".{}.{}", self.id, Uuid::new_v4()))
    }

    /// The name of its cgroups.
    pub(super) fn cgroup(&self) -> String {
        format!("gantry-{}", self.id)
    }

    /// Whether it has a supervisor.
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

    /// Kills its supervisor, and with it everything in the container.
    pub(super) fn kill_supervisor(&self) -> Result<(), RuntimeError> {
        let path = self.file(paths::ALIVE);
        let text = fs::read_to_string(&path).map_err(at("read", &path))?;
        let pid = text.trim().parse().ok().filter(|pid| *pid > 1);
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else { return Ok(()) };
        // Its id is nobody else's as long as it holds the lock.
        if self.is_alive()?
            && let Err(error) = rustix::process::kill_process(pid, rustix::process::Signal::KILL)
            && error != rustix::io::Errno::SRCH
        {
            return Err(RuntimeError::io("kill a supervisor", error.into()));
        }
        Ok(())
    }

    /// Whether there is no supervisor that could still do something. Unlike the lock, of which a frozen gateway may have a copy, this is
    /// about the process itself. One that is only coming finds no intent.
    pub(super) fn supervisor_ended(&self) -> Result<bool, RuntimeError> {
        let path = self.file(paths::ALIVE);
        let said = filesystem::read_if_there(&path).map_err(at("read", &path))?.unwrap_or_default();
        let Some(pid) = String::from_utf8(said).ok().and_then(|text| text.trim().parse::<u32>().ok()) else {
            return Ok(true);
        };
        // One that cannot be read is not there.
        let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        // The name in it may contain anything. A zombie is waited for by a gateway that may be frozen.
        Ok(stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])))
    }

    /// Sees to it that it is never started, if that is still to be had. `true`: it never will be.
    pub(super) fn revoke(&self) -> Result<bool, RuntimeError> {
        match filesystem::rename_exclusively(&self.file(paths::INTENT), &self.file(paths::REVOKED)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(at("revoke the intent in", &self.dir)(error)),
        }
    }

    fn exists(&self, name: &str) -> Result<bool, RuntimeError> {
        filesystem::exists(&self.file(name)).map_err(at("look at", &self.dir))
    }

    fn not_found(&self) -> RuntimeError {
        RuntimeError::ProcessNotFound(self.id)
    }

    /// The last that its supervisor said, for people.
    fn last_words(&self) -> String {
        let text = || {
            let mut file = File::open(self.file(paths::LOG))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(2000)))?;
            io::read_to_string(file)
        };
        // It is only for people, and there may be none.
        text().unwrap_or_default().trim().to_owned()
    }
}

impl Host {
    pub(super) fn find(&self, id: AttemptId) -> Result<Process, RuntimeError> {
        let container = lock(&self.processes).get(&id).copied();
        container.map(|container| Process::new(self, container, id)).ok_or(RuntimeError::ProcessNotFound(id))
    }

    /// What a process has used that has ended.
    pub(super) fn usage(&self, id: AttemptId) -> Result<Usage, RuntimeError> {
        let path = self.find(id)?.file(paths::USAGE);
        let text = filesystem::read_if_there(&path).map_err(at("read", &path))?;
        // What cannot be read is not known.
        Ok(text.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default())
    }

    /// How far a process is, from its files:
    ///
    /// | there is | with a supervisor | without |
    /// |---|---|---|
    /// | `end` | ended | ended |
    /// | `started` | started | its end is unknown |
    /// | `revoked` | will never be started | will never be started |
    /// | `intent` | starting | of this boot: will never be started. Of an earlier one: who knows |
    ///
    /// What is found without its supervisor is settled: written down, and what is left of it killed.
    pub(super) fn status(&self, process: &Process) -> Result<Status, RuntimeError> {
        let mut was_empty = false;
        loop {
            // Looked at first: what a dead supervisor left no longer changes.
            let alive = process.is_alive()?;
            let end = process.file(paths::END);
            if let Some(text) = filesystem::read_if_there(&end).map_err(at("read", &end))? {
                let unreadable =
                    |_| End::unknown(FailureReason::ExitUnknown, "the record of its end cannot be read");
                return Ok(Status::Ended(serde_json::from_slice(&text).unwrap_or_else(unreadable)));
            }
            if process.exists(paths::STARTED)? {
                if alive {
                    return Ok(Status::Started);
                }
                let mut message =
                    "its supervisor ended, or the machine did, before its end was written down".to_owned();
                let last = process.last_words();
                if !last.is_empty() {
                    message = format!("{message}; its last words: {last}");
                }
                return self
                    .settle(process, End::unknown(FailureReason::ExitUnknown, message))
                    .map(Status::Ended);
            }
            if process.exists(paths::REVOKED)? {
                let end = End::not_started(
                    FailureReason::StoppedBeforeStart,
                    "it was stopped before it was started",
                );
                return Ok(Status::Ended(end));
            }
            if process.exists(paths::INTENT)? {
                if alive {
                    return Ok(Status::Starting);
                }
                let Some(intent) = Self::intent(process)?.filter(|intent| intent.boot == self.boot) else {
                    // Revoked or taken in this moment, or of an earlier boot.
                    if process.exists(paths::INTENT)? {
                        return Ok(Status::StartUnknown);
                    }
                    continue;
                };
                if process.revoke()? {
                    let last = process.last_words();
                    let message = format!("supervisor of {} ended before the start {last}", intent.process);
                    return self
                        .settle(process, End::not_started(FailureReason::StartFailed, message.trim()))
                        .map(Status::Ended);
                }
                continue;
            }
            // What is taken or revoked in this moment is found when it is looked for again.
            if std::mem::replace(&mut was_empty, true) || !process.exists("")? {
                return Err(process.not_found());
            }
        }
    }

    /// Ends what a process left without a supervisor, and writes down how it ended.
    fn settle(&self, process: &Process, end: End) -> Result<End, RuntimeError> {
        let _turn = lock(&self.settling);
        let path = process.file(paths::END);
        if let Some(text) = filesystem::read_if_there(&path).map_err(at("read", &path))? {
            // Somebody else came first.
            return Ok(serde_json::from_slice(&text).unwrap_or(end));
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
            // What is found may be the work of who took over, and is not for this gateway to tell.
            host.hold.check()?;
            host.status(&process)
        })
        .await
    }

    /// Whose container it is in.
    pub(super) async fn team(self: &Arc<Self>, id: AttemptId) -> Result<String, RuntimeError> {
        let (process, host) = (self.find(id)?, Arc::clone(self));
        let container = blocking(move || host.read_container(process.container)).await?;
        container.map(|container| container.team).ok_or(RuntimeError::ProcessNotFound(id))
    }

    /// Takes back a start that failed before it was under way.
    pub(super) fn forget(&self, process: &Process) -> Result<(), RuntimeError> {
        process.revoke()?;
        let socket = self.sockets.path(&process.id.to_string());
        filesystem::remove_file(&socket).map_err(at("remove", &socket))?;
        // Who took over may have made it anew.
        self.hold.check()?;
        // Of what is removed halfway nobody could say how far it was.
        let unfinished = process.unfinished();
        match fs::rename(&process.dir, &unfinished) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed.map_err(at("remove", &process.dir))?,
        }
        filesystem::remove_tree(&unfinished).map_err(at("remove", &unfinished))
    }

    pub(super) async fn process(self: &Arc<Self>, id: AttemptId) -> Result<ProcessState, RuntimeError> {
        Ok(match self.status_of(&self.find(id)?).await? {
            Status::Starting => ProcessState::Starting,
            Status::Started => ProcessState::Started,
            Status::Ended(end) => ProcessState::Ended(end.into()),
            Status::StartUnknown => ProcessState::StartUnknown,
        })
    }

    pub(super) async fn wait(self: &Arc<Self>, id: AttemptId) -> Result<Ended, RuntimeError> {
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

    async fn watch_to_the_end(&self, process: &Process) -> io::Result<()> {
        let mut connection = self.sockets.connect(&process.id.to_string()).await?;
        connection.progress(&Request::AwaitEnd).await?;
        Ok(())
    }

    pub(super) async fn stop(self: &Arc<Self>, id: AttemptId, grace: Duration) -> Result<(), RuntimeError> {
        let process = self.find(id)?;
        let (host, revoked) = (Arc::clone(self), process.clone());
        let revoke = move || {
            host.hold.check()?;
            revoked.revoke()
        };
        if blocking(revoke).await? {
            return Ok(());
        }
        self.tell(&process, &Request::Stop(grace)).await.map(|_| ())
    }

    /// Tells the supervisor of a process something. `None`: it has ended.
    pub(super) async fn tell(
        self: &Arc<Self>,
        process: &Process,
        request: &Request,
    ) -> Result<Option<Answer>, RuntimeError> {
        loop {
            let answer = match self.sockets.connect(&process.id.to_string()).await {
                Ok(mut connection) => connection.ask(request).await,
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
        let told = processes.into_iter().map(|(id, container)| {
            let process = Process::new(self, container, id);
            let request = &request;
            async move {
                // Most have ended; those have no socket any more.
                let Ok(mut connection) = self.sockets.connect(&process.id.to_string()).await else { return };
                match tokio::time::timeout(CONTACT, connection.ask(request)).await {
                    Ok(Ok(_)) => {}
                    // It is ending.
                    Ok(Err(_)) => {}
                    Err(_) => tracing::warn!(process.id = %process.id, "a supervisor does not answer"),
                }
            }
        });
        futures::future::join_all(told).await;
        Ok(())
    }
}

fn ended(status: Status) -> Option<Ended> {
    match status {
        Status::Starting | Status::Started => None,
        Status::Ended(end) => Some(end.into()),
        Status::StartUnknown => {
            let message = "the machine was restarted between the intent to start it and any proof of a start";
            Some(End::unknown(FailureReason::StartUnknown, message).into())
        }
    }
}
