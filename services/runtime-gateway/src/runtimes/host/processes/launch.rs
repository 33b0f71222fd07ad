//! Start of a process: writes its intent and starts its supervisor.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use domain::workload::{InlineStdin, Stdin};
use domain::{ContainerHandle, ProcessId};
use runtime::{ProcessRole, ProcessSpec, RuntimeError};
use rustix::mount::MountAttrFlags;

use super::{PAUSE, Place, Process, RESERVE, Status};
use crate::runtimes::host::filesystem::{self, at};
use crate::runtimes::host::persisted::{Intent, Launch};
use crate::runtimes::host::user_namespace::Range;
use crate::runtimes::host::{Host, STOP_AFTER, mounts, paths, supervisor};
use crate::runtimes::output_spool;
use crate::util::blocking::blocking;
use crate::util::clock::since_boot;
use crate::util::keyed_locks::lock;

/// Time for which a start waits for another process that is starting or ending, in the container
/// or in the container whose network is joined.
const CHANGE: Duration = Duration::from_secs(5);

/// The outcome of a request to start a process.
enum StartOutcome {
    /// The start is in progress, or was before.
    Started,
    /// A process of this container is starting or ending.
    Changing(ContainerHandle),
}

/// The state of a container, as far as a start depends on it.
enum ContainerState {
    /// No process was started.
    New,
    /// The main process runs.
    Running(Process),
    /// The main process has ended.
    Ended,
    /// The main process has ended, and this process runs on a copy of its files.
    Copied(Process),
}

impl Host {
    pub(in crate::runtimes::host) async fn start(
        self: &Arc<Self>,
        container: ContainerHandle,
        id: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        let begin = Instant::now();
        loop {
            let (guard, host) = (self.locks.lock(container.uuid()).await, Arc::clone(self));
            let spec = spec.clone();
            let started = blocking(move || {
                let _guard = guard;
                host.hold.check()?;
                host.start_process(container, id, spec)
            });
            match started.await? {
                StartOutcome::Started => return Ok(()),
                StartOutcome::Changing(container) if begin.elapsed() > CHANGE => {
                    return Err(RuntimeError::ContainerNotRunning(container));
                }
                StartOutcome::Changing(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn start_process(
        &self,
        handle: ContainerHandle,
        id: ProcessId,
        spec: ProcessSpec,
    ) -> Result<StartOutcome, RuntimeError> {
        let existing = lock(&self.processes).get(&id).copied();
        match existing {
            Some(container) if container == handle => return Ok(StartOutcome::Started),
            Some(_) => return Err(RuntimeError::ProcessNotFound(id)),
            None => {}
        }
        let Some(container) = self.read_container(handle)? else {
            return Err(RuntimeError::ContainerNotFound(handle));
        };
        let process = Process::new(self, handle, id);
        let range = self.range(&container);
        let Some(state) = self.container_state(handle)? else { return Ok(StartOutcome::Changing(handle)) };
        let network_of;
        let place = match (&state, spec.role) {
            (ContainerState::Running(main), _) => Place::Joined(main),
            (ContainerState::Ended | ContainerState::Copied(_), ProcessRole::Exec) => Place::Isolated,
            (ContainerState::New | ContainerState::Ended, ProcessRole::Main) => {
                network_of = match container.network_of {
                    None => None,
                    Some(joined) => match self.container_state(joined)? {
                        Some(ContainerState::Running(main)) => Some(main),
                        Some(_) => return Err(RuntimeError::ContainerNotRunning(joined)),
                        None => return Ok(StartOutcome::Changing(joined)),
                    },
                };
                Place::New { network_of: network_of.as_ref() }
            }
            (ContainerState::New, ProcessRole::Exec) => {
                return Err(RuntimeError::ContainerNotRunning(handle));
            }
            (ContainerState::Copied(other), ProcessRole::Main) => {
                let what = format!("a main process in container {handle} while {} looks into it", other.id);
                return Err(RuntimeError::Unsupported(what));
            }
        };
        if let Place::Joined(_) | Place::Isolated = place {
            self.launch_or_undo(&process, place, spec, range)?;
            return Ok(StartOutcome::Started);
        }
        let mut written = Vec::new();
        if self.mounts_layers(range) {
            for volume in container.written() {
                // The supervisor mounts the volume separately, and only one mount at a time may be
                // writable.
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
                // A reboot may have unmounted the volumes.
                self.directory(volume)?;
            }
        }
        self.launch_or_undo(&process, place, spec, range)?;
        lock(&self.written).extend(written.into_iter().map(|volume| (volume, id)));
        Ok(StartOutcome::Started)
    }

    /// Returns the state of a container. `None`: a process is starting or ending, so that it can be
    /// neither joined nor replaced.
    fn container_state(&self, container: ContainerHandle) -> Result<Option<ContainerState>, RuntimeError> {
        let mut state = ContainerState::New;
        for process in self.processes_of(container)? {
            let status = self.status(&process)?;
            let is_main = Self::is_main(&process)?;
            if matches!(status, Status::Ended(_)) && !process.is_alive()? {
                let has_run = is_main && Self::taken_intent(&process)?.is_some();
                if has_run && matches!(state, ContainerState::New) {
                    state = ContainerState::Ended;
                }
            } else if is_main {
                if status != Status::Started {
                    return Ok(None);
                }
                return Ok(Some(ContainerState::Running(process)));
            } else if Self::taken_intent(&process)?.is_some_and(|intent| intent.isolated) {
                state = ContainerState::Copied(process);
            }
        }
        Ok(Some(state))
    }

    fn launch_or_undo(
        &self,
        process: &Process,
        place: Place<'_>,
        spec: ProcessSpec,
        range: Option<Range>,
    ) -> Result<(), RuntimeError> {
        let launched = self.launch(process, place, spec, range);
        match &launched {
            Ok(()) => {
                lock(&self.processes).insert(process.id, process.container);
                self.process_added.send_replace(());
            }
            // A gateway that took over may have replaced the files of the process.
            Err(_) if !self.hold.is_ours()? => {}
            Err(_) => self.undo_start(process)?,
        }
        launched
    }

    fn launch(
        &self,
        process: &Process,
        place: Place<'_>,
        spec: ProcessSpec,
        range: Option<Range>,
    ) -> Result<(), RuntimeError> {
        let (alive, log) = self.intend(process, place, spec)?;
        let (joined, network_of) = match place {
            Place::Joined(main) => (Some(main), None),
            Place::New { network_of } => (None, network_of),
            Place::Isolated => (None, None),
        };
        self.hold.check()?;
        let name = process.id.to_string();
        let socket = self.sockets.path(&name);
        let listener = OwnedFd::from(self.sockets.listen(&name).map_err(at("listen on", &socket))?);

        let (contact, stop_after) = lock(&self.contact).unwrap_or((since_boot(), STOP_AFTER));
        let nanoseconds = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let launch = Launch {
            state_dir: self.config.state_dir.clone(),
            container_dir: self.container(process.container),
            process_dir: process.dir.clone(),
            socket,
            cgroup: joined.unwrap_or(process).cgroup(),
            joins: joined.map(|main| main.dir.clone()),
            isolated: matches!(place, Place::Isolated),
            upper_in_memory: self.upper_in_memory,
            hidden: self.hidden(),
            host_paths: self.config.policy.host_paths().to_owned(),
            range,
            mounts_layers: self.mounts_layers(range),
            overlay_options: self
                .volumes
                .overlay_options()
                .into_iter()
                .flatten()
                .map(|&o| o.to_owned())
                .collect(),
            network_pool: self.network_pool,
            network_of: network_of.map(|main| main.dir.clone()),
            contact: nanoseconds(contact),
            stop_after: nanoseconds(stop_after),
            holder: self.hold.name().to_owned(),
        };
        self.spawn(&launch, &alive, &listener, log)
            .map_err(|error| RuntimeError::io("start a supervisor", error))
    }

    /// Creates the directory of a process with the intent to start it, atomically and durably. With
    /// a truncated intent, no gateway could tell whether the process was started. Returns the lock
    /// and the log of the supervisor.
    fn intend(
        &self,
        process: &Process,
        place: Place<'_>,
        spec: ProcessSpec,
    ) -> Result<(File, File), RuntimeError> {
        let (dir, unfinished) = (&process.dir, process.unfinished());
        let stdin = spec.stdin.clone();
        let intent = Intent::new(process.id, self.boot.clone(), place, spec);
        let made = self.fill(&unfinished, &intent, &stdin).and_then(|made| {
            self.hold.check()?;
            filesystem::rename_exclusively(&unfinished, dir).map_err(at("make", dir))?;
            Ok(made)
        });
        if made.is_err()
            && let Err(error) = filesystem::remove_tree(&unfinished)
        {
            // The next gateway that opens the state directory removes it.
            tracing::warn!(%error, path = %unfinished.display(), "cannot remove the directory of a failed start");
        }
        let made = made?;
        filesystem::sync_directory(dir).map_err(at("sync", dir))?;
        dir.parent().map_or(Ok(()), filesystem::sync_directory).map_err(at("sync the parent of", dir))?;
        Ok(made)
    }

    fn fill(&self, dir: &Path, intent: &Intent, stdin: &Stdin) -> Result<(File, File), RuntimeError> {
        fs::create_dir(dir).map_err(at("make", dir))?;
        let path = dir.join(paths::ALIVE);
        let alive =
            File::create_new(&path).and_then(|file| file.lock().map(|()| file)).map_err(at("lock", &path))?;
        for name in [paths::STDOUT, paths::STDERR] {
            let path = dir.join(name);
            output_spool::create(&path, self.config.spool_bytes).map_err(at("make", &path))?;
        }
        if let Stdin::Inline(InlineStdin(input)) = stdin {
            let path = dir.join(paths::STDIN);
            filesystem::write_new(&path, input).map_err(at("write", &path))?;
        }
        let path = dir.join(paths::RESERVE);
        fs::write(&path, [b' '; RESERVE]).map_err(at("write", &path))?;
        let path = dir.join(paths::LOG);
        let log = File::create_new(&path).map_err(at("make", &path))?;
        let intent = serde_json::to_vec(intent).map_err(|error| RuntimeError::Other(error.to_string()))?;
        let path = dir.join(paths::INTENT);
        filesystem::write_new(&path, &intent).map_err(at("write", &path))?;
        Ok((alive, log))
    }

    fn spawn(&self, launch: &Launch, alive: &File, listener: &OwnedFd, log: File) -> io::Result<()> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType};
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
        // Init is a fork of the supervisor, so the command `/proc/self/exe` opens this program.
        // Through a read-only mount, neither its contents nor its mode, owner and attributes can be
        // changed.
        let program = mounts::clone_of(&self.config.supervisor, MountAttrFlags::MOUNT_ATTR_RDONLY)?;
        // The supervisor inherits the descriptor, because the program may be a script.
        rustix::io::fcntl_setfd(&program, rustix::io::FdFlags::empty())?;
        let child = tokio::process::Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
            // Containers see the name of their init, but not the path of its program on the worker.
            .arg0("gantry-supervisor")
            .arg(supervisor::ARGUMENT)
            .env_clear()
            // The supervisor of an ordinary user starts a program for the network.
            .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        // Not awaited: the supervisor outlives this process, and is reaped if it ends earlier.
        drop(child);
        supervisor::send(&ours, launch, alive, listener)
    }
}
