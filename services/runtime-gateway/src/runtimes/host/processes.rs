//! Processes: started, watched, stopped, attached to.
//!
//! How far a process is stands in its directory; see [`Host::status`] for what means what. Its supervisor is asked only to
//! learn of changes, and to change something.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use domain::workload::{FailureReason, Usage};
use domain::{AttemptId, ContainerHandle};
use futures::stream;
use runtime::{
    Attachment, Ended, Offsets, OutputStream, ProcessEvent, ProcessInput, ProcessSpec, ProcessState,
    RuntimeError, Window,
};
use rustix::mount::MountAttrFlags;
use uuid::Uuid;

use crate::util::blocking::blocking;
use crate::util::clock::since_boot;

use super::filesystem::{self, at};
use super::persisted::{Intent, Launch};
use super::supervisor_protocol::{Answer, Connection, MAX_STDIN, Phase, Progress, Request};
use super::user_namespace::Range;
use super::{Host, STOP_AFTER, mounts, paths, supervisor};
use crate::runtimes::exit_record::End;
use crate::runtimes::output_spool::{self, Found, Reader};
use crate::util::keyed_locks::held;

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
        let container = held(&self.processes).get(&id).copied();
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
        let _turn = held(&self.settling);
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

    pub(super) async fn start(
        self: &Arc<Self>,
        container: ContainerHandle,
        id: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        let (turn, host) = (self.locks.lock(container.uuid()).await, Arc::clone(self));
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.start_process(container, id, spec)
        })
        .await
    }

    fn start_process(
        &self,
        handle: ContainerHandle,
        id: AttemptId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        if held(&self.processes).contains_key(&id) {
            return Ok(());
        }
        let Some(container) = self.read_container(handle)? else {
            return Err(RuntimeError::ContainerNotFound(handle));
        };
        for other in self.processes_of(handle)? {
            if !matches!(self.status(&other)?, Status::Ended(_)) || other.is_alive()? {
                let what = format!("a second process in container {handle} while {} runs", other.id);
                return Err(RuntimeError::Unsupported(what));
            }
        }
        let range = self.range(&container);
        let mut written = Vec::new();
        if range.is_some() {
            for volume in container.written() {
                // The supervisor mounts it in another way. Only one mount at a time may be written to.
                if self.volumes.notes(volume)?.parent.is_some() {
                    if self.refresh(volume)? {
                        let what = format!("a second container that writes to volume {volume}");
                        return Err(RuntimeError::Unsupported(what));
                    }
                    self.volumes.unmount(volume)?;
                    written.push(volume);
                }
            }
        } else {
            for volume in container.volumes() {
                // They may have been unmounted since, by a reboot.
                self.directory(volume)?;
            }
        }
        let process = Process::new(self, handle, id);
        let launched = self.launch(&process, spec, range);
        match &launched {
            Ok(()) => {
                held(&self.processes).insert(id, handle);
                held(&self.written).extend(written.into_iter().map(|volume| (volume, id)));
            }
            // Who took over may have taken its files away, and made them anew.
            Err(_) if !self.hold.is_ours()? => {}
            Err(_) => self.forget(&process)?,
        }
        launched
    }

    fn launch(&self, process: &Process, spec: ProcessSpec, range: Option<Range>) -> Result<(), RuntimeError> {
        let (alive, log) = self.intend(process, spec)?;
        self.hold.check()?;
        let name = process.id.to_string();
        let socket = self.sockets.path(&name);
        let listener = OwnedFd::from(self.sockets.listen(&name).map_err(at("listen at", &socket))?);

        let (contact, stop_after) = held(&self.contact).unwrap_or((since_boot(), STOP_AFTER));
        let nanoseconds = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let launch = Launch {
            state_dir: self.config.state_dir.clone(),
            container_dir: self.container(process.container),
            process_dir: process.dir.clone(),
            socket,
            cgroup: process.cgroup(),
            upper_in_memory: self.upper_in_memory,
            hidden: self.hidden(),
            host_paths: self.config.policy.host_paths().to_owned(),
            range,
            overlay_options: self
                .volumes
                .overlay_options()
                .into_iter()
                .flatten()
                .map(|&o| o.to_owned())
                .collect(),
            network_pool: self.network_pool,
            contact: nanoseconds(contact),
            stop_after: nanoseconds(stop_after),
            holder: self.hold.name().to_owned(),
        };
        self.spawn(&launch, &alive, &listener, log)
            .map_err(|error| RuntimeError::io("start a supervisor", error))
    }

    /// Makes the directory of a process, and with it the intent to start it. Both are there in one moment, durably: of an intent that was cut
    /// short nobody could say whether it was carried out. Answers what its supervisor holds: its lock, and where it says what it has to say.
    fn intend(&self, process: &Process, spec: ProcessSpec) -> Result<(File, File), RuntimeError> {
        let (dir, unfinished) = (&process.dir, process.unfinished());
        let made = self.fill(&unfinished, process.id, spec).and_then(|made| {
            self.hold.check()?;
            filesystem::rename_exclusively(&unfinished, dir).map_err(at("make", dir))?;
            Ok(made)
        });
        if made.is_err()
            && let Err(error) = filesystem::remove_tree(&unfinished)
        {
            // Whoever opens the state directory next removes it.
            tracing::warn!(%error, path = %unfinished.display(), "cannot remove what is left of a start");
        }
        let made = made?;
        filesystem::sync_directory(dir).map_err(at("sync", dir))?;
        dir.parent().map_or(Ok(()), filesystem::sync_directory).map_err(at("sync what is above", dir))?;
        Ok(made)
    }

    fn fill(&self, dir: &Path, id: AttemptId, spec: ProcessSpec) -> Result<(File, File), RuntimeError> {
        fs::create_dir(dir).map_err(at("make", dir))?;
        let path = dir.join(paths::ALIVE);
        let alive =
            File::create_new(&path).and_then(|file| file.lock().map(|()| file)).map_err(at("lock", &path))?;
        for name in [paths::STDOUT, paths::STDERR] {
            let path = dir.join(name);
            output_spool::create(&path, self.config.spool_bytes).map_err(at("make", &path))?;
        }
        let path = dir.join(paths::RESERVE);
        fs::write(&path, [b' '; RESERVE]).map_err(at("write", &path))?;
        let path = dir.join(paths::LOG);
        let log = File::create_new(&path).map_err(at("make", &path))?;
        let intent = Intent::new(id, self.boot.clone(), spec);
        let intent = serde_json::to_vec(&intent).map_err(|error| RuntimeError::Other(error.to_string()))?;
        let path = dir.join(paths::INTENT);
        filesystem::write_new(&path, &intent).map_err(at("write", &path))?;
        Ok((alive, log))
    }

    fn spawn(&self, launch: &Launch, alive: &File, listener: &OwnedFd, log: File) -> io::Result<()> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType};
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        // Init is a fork of the supervisor, so a command `/proc/self/exe` opens this program. By way of a mount that is read-only for good,
        // neither its contents nor its mode, owner and attributes can be changed.
        let program = mounts::clone_of(&self.config.supervisor, MountAttrFlags::MOUNT_ATTR_RDONLY)?;
        // Open for the supervisor too, for its program may be a script.
        rustix::io::fcntl_setfd(&program, rustix::io::FdFlags::empty())?;
        let child = tokio::process::Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
            // Containers see the name of their init, and need not see where on the worker its program is.
            .arg0("gantry-supervisor")
            .arg(supervisor::ARGUMENT)
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        // Nobody waits for it: it outlives this process, and is reaped when it ends before.
        drop(child);
        supervisor::send(&ours, launch, alive, listener)
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
            let mut contact = held(&self.contact);
            if contact.is_some_and(|(earlier, _)| earlier > sent) {
                return Ok(());
            }
            *contact = Some((sent, stop_after));
        }
        let processes: Vec<_> =
            held(&self.processes).iter().map(|(id, container)| (*id, *container)).collect();
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

    pub(super) async fn attach(
        self: &Arc<Self>,
        id: AttemptId,
        from: Offsets,
    ) -> Result<Attachment, RuntimeError> {
        let process = self.find(id)?;
        let opened = process.clone();
        let spools = blocking(move || {
            let open = |name| {
                let path = opened.file(name);
                Reader::open(&path).map(Arc::new).map_err(at("open", &path))
            };
            Ok([open(paths::STDOUT)?, open(paths::STDERR)?])
        })
        .await?;
        for (spool, offset) in spools.iter().zip([from.stdout, from.stderr]) {
            let head = spool.marks().map_err(|error| RuntimeError::io("read a spool", error))?.head;
            if offset > head {
                return Err(RuntimeError::OffsetOutOfRange { offset, limit: head });
            }
        }
        let mut events = Events::new(Arc::clone(self), process.clone(), spools, from);
        events.catch_up().await?;
        let stdin_offset = events.seen.stdin_taken;
        events.stdin_said = stdin_offset;
        let events = stream::unfold(Some(events), |events| async move {
            let mut events = events?;
            match events.next().await {
                Ok(Some(event)) => Some((Ok(event), Some(events))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        });
        let input = Input { host: Arc::clone(self), process, connection: tokio::sync::Mutex::default() };
        Ok(Attachment { stdin_offset, events: Box::pin(events), input: Arc::new(input) })
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

/// What is said to a reader.
struct Events {
    host: Arc<Host>,
    process: Process,
    spools: [Arc<Reader>; 2],
    /// How far it has read.
    at: [u64; 2],
    /// What there is, as far as is known.
    seen: Progress,
    stdin_said: u64,
    connection: Option<Connection>,
    /// Which output is looked at first, so that neither waits for the other.
    turn: usize,
    ended: Option<Ended>,
    said: Said,
}

#[derive(PartialEq, Eq)]
enum Said {
    Output,
    Ended,
    Done,
}

impl Events {
    fn new(host: Arc<Host>, process: Process, spools: [Arc<Reader>; 2], from: Offsets) -> Self {
        Self {
            host,
            process,
            spools,
            at: [from.stdout, from.stderr],
            seen: Progress::default(),
            stdin_said: 0,
            connection: None,
            turn: 0,
            ended: None,
            said: Said::Output,
        }
    }

    async fn next(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        loop {
            if self.said == Said::Done {
                return Ok(None);
            }
            if self.seen.stdin_taken != self.stdin_said {
                self.stdin_said = self.seen.stdin_taken;
                return Ok(Some(ProcessEvent::StdinTaken(self.stdin_said)));
            }
            if let Some(event) = self.output().await? {
                return Ok(Some(event));
            }
            match &self.ended {
                Some(ended) if self.said == Said::Output => {
                    self.said = Said::Ended;
                    return Ok(Some(ProcessEvent::Ended(ended.clone())));
                }
                Some(_) => {
                    self.said = Said::Done;
                    let [stdout, stderr] = self.at;
                    return Ok(Some(ProcessEvent::Done(Offsets { stdout, stderr })));
                }
                None => self.news().await?,
            }
        }
    }

    /// Some output that was not said yet.
    async fn output(&mut self) -> Result<Option<ProcessEvent>, RuntimeError> {
        for which in [self.turn, 1 - self.turn] {
            let heads = [self.seen.stdout, self.seen.stderr];
            let offset = self.at[which];
            if offset >= heads[which] {
                continue;
            }
            let spool = Arc::clone(&self.spools[which]);
            let read = move || spool.read(offset).map_err(|error| RuntimeError::io("read a spool", error));
            let found = blocking(read).await?;
            self.turn = 1 - which;
            let stream = [OutputStream::Stdout, OutputStream::Stderr][which];
            match found {
                Found::Data(data) => {
                    self.at[which] += data.len() as u64;
                    return Ok(Some(ProcessEvent::Output { stream, offset, data }));
                }
                Found::Gone(to) => {
                    self.at[which] = to;
                    return Ok(Some(ProcessEvent::Truncated { stream, from: offset, to }));
                }
                Found::Nothing => {
                    return Err(RuntimeError::Other(
                        "a spool holds less than its supervisor says".to_owned(),
                    ));
                }
            }
        }
        Ok(None)
    }

    /// Waits until something differs from what was seen.
    async fn news(&mut self) -> Result<(), RuntimeError> {
        let Some(connection) = &mut self.connection else { return self.catch_up().await };
        match connection.progress(&Request::Watch(self.seen)).await {
            Ok(seen) if seen.phase != Phase::Ended => self.seen = seen,
            _ => self.connection = None,
        }
        Ok(())
    }

    /// Learns how far it is, from its supervisor while it has one.
    async fn catch_up(&mut self) -> Result<(), RuntimeError> {
        loop {
            if let Some(ended) = ended(self.host.status_of(&self.process).await?) {
                for (spool, head) in self.spools.iter().zip([&mut self.seen.stdout, &mut self.seen.stderr]) {
                    *head = spool.marks().map_err(|error| RuntimeError::io("read a spool", error))?.head;
                }
                self.ended = Some(ended);
                return Ok(());
            }
            if let Ok(mut connection) = self.host.sockets.connect(&self.process.id.to_string()).await
                && let Ok(seen) = connection.progress(&Request::Look).await
                && seen.phase != Phase::Ended
            {
                self.seen = seen;
                self.connection = Some(connection);
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// What is said to a process.
struct Input {
    host: Arc<Host>,
    process: Process,
    /// Taken out while it is used, so that what was dropped halfway is not used again.
    connection: tokio::sync::Mutex<Option<Connection>>,
}

impl Input {
    /// `None`: it has ended.
    async fn tell(&self, request: &Request) -> Result<Option<Answer>, RuntimeError> {
        let mut kept = self.connection.lock().await;
        if let Some(mut connection) = kept.take()
            && let Ok(answer) = connection.ask(request).await
        {
            *kept = Some(connection);
            return Ok(Some(answer));
        }
        loop {
            if let Ok(mut connection) = self.host.sockets.connect(&self.process.id.to_string()).await
                && let Ok(answer) = connection.ask(request).await
            {
                *kept = Some(connection);
                return Ok(Some(answer));
            }
            if ended(self.host.status_of(&self.process).await?).is_some() {
                return Ok(None);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

#[async_trait]
impl ProcessInput for Input {
    async fn stdin(&self, offset: u64, data: bytes::Bytes) -> Result<(), RuntimeError> {
        let mut at = offset;
        let mut rest = data;
        loop {
            let part = rest.split_to(rest.len().min(MAX_STDIN));
            let length = part.len() as u64;
            let answer = self.tell(&Request::Stdin { offset: at, data: part }).await?;
            if let Some(Answer::StdinGap(limit)) = answer {
                return Err(RuntimeError::OffsetOutOfRange { offset: at, limit });
            }
            at += length;
            if rest.is_empty() || answer.is_none() {
                return Ok(());
            }
        }
    }

    async fn close_stdin(&self) -> Result<(), RuntimeError> {
        self.tell(&Request::CloseStdin).await.map(|_| ())
    }

    async fn signal(&self, number: u8) -> Result<(), RuntimeError> {
        self.tell(&Request::Signal(number)).await.map(|_| ())
    }

    async fn acknowledge(&self, up_to: Offsets) -> Result<(), RuntimeError> {
        let Offsets { stdout, stderr } = up_to;
        self.tell(&Request::Acknowledge { stdout, stderr }).await.map(|_| ())
    }

    async fn resize(&self, _window: Window) -> Result<(), RuntimeError> {
        Err(RuntimeError::Unsupported("processes on this worker have no terminal".to_owned()))
    }

    async fn detach(&self) -> Result<(), RuntimeError> {
        self.tell(&Request::Detach).await.map(|_| ())
    }
}
