//! The supervisor: a small process beside each process in a container.
//!
//! The supervisor creates the container by libcontainer, which must not be called from a process
//! with several threads. It stores output, serves gateways that connect, and writes the exit
//! record. It outlives the gateway that started it.
//!
//! Invariants:
//!
//! - The last step before the start is an exclusive rename of the intent. The first process to
//!   rename it decides: this process, or a gateway that revokes the intent. Without the rename
//!   nothing is started. Right before it, the supervisor checks the holder of the state directory:
//!   see [`super::state_lock`].
//! - The exit record is written when every process of the container is dead and all their output is
//!   in the spools.
//! - The container and its mounts end with this process, because they are in separate namespaces.

pub(super) mod container_init;
mod event_loop;
mod hosts;
mod init;
mod join;
mod oci_spec;
mod own_container;
mod program;
mod rootfs;
mod seccomp;

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io::{self, IoSliceMut, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use domain::error_chain;
use domain::workload::FailureReason;
use libcontainer::container::Container as Libcontainer;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::syscall::syscall::SyscallType;
use rustix::fs::{Mode, OFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, Signal};

use super::cgroups::Cgroups;
use super::network::slirp::Uplink;
use super::persisted::{Container, Intent, Launch, Text};
use super::user_namespace::Identity;
use super::users::User;
use super::{filesystem, mounts, paths, state_lock, unprivileged};
use crate::runtimes::exit_record::End;
use crate::runtimes::output_spool;
use init::Init;
use own_container::OwnContainer;
use program::Lookup;

/// The argument that makes a program run as a supervisor.
pub(super) const ARGUMENT: &str = "__supervise";

/// Default PATH of a process.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Whether a full disk caused an error.
fn is_full(error: &(dyn std::error::Error + 'static)) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    is_caused_by(error, |cause| matches!(cause.kind(), StorageFull | QuotaExceeded))
}

/// Whether the machine has reached its limit of open files. The workload then waits for room.
fn is_out_of_files(error: &(dyn std::error::Error + 'static)) -> bool {
    is_caused_by(error, |cause| matches!(cause.raw_os_error(), Some(libc::ENFILE | libc::EMFILE)))
}

fn is_caused_by(error: &(dyn std::error::Error + 'static), is_cause: impl Fn(&io::Error) -> bool) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| cause.downcast_ref().is_some_and(&is_cause))
}

/// The reason why a process was not started.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation}: {cause}")]
struct StartError {
    reason: FailureReason,
    operation: String,
    cause: String,
}

impl StartError {
    fn while_doing<E: std::error::Error + 'static>(operation: impl Into<String>) -> impl FnOnce(E) -> Self {
        let operation = operation.into();
        move |error| {
            let reason = match () {
                () if is_full(&error) => FailureReason::DiskFull,
                () if is_out_of_files(&error) => FailureReason::WorkerFull,
                () => FailureReason::StartFailed,
            };
            Self { reason, operation, cause: error_chain(&error) }
        }
    }

    fn without_cgroup<E: std::error::Error + 'static>(operation: &str) -> impl FnOnce(E) -> Self {
        let operation = operation.to_owned();
        move |error| Self { reason: FailureReason::CgroupUnavailable, operation, cause: error_chain(&error) }
    }
}

/// The `main` function of a supervisor. Must be called before any other thread exists.
///
/// The launch message arrives on the socket that is standard input.
pub(super) fn supervise() -> ExitCode {
    match supervise_one() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("supervisor: {}", error_chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn supervise_one() -> io::Result<()> {
    let (launch, alive, listener) = receive()?;
    detach(&alive)?;
    match start(&launch, &alive, &listener) {
        Ok(Some(running)) => running.run(listener),
        // The intent was revoked. Its new name is the record of that.
        Ok(None) => Ok(()),
        Err(failed) => {
            eprintln!("supervisor: {failed}");
            write_end(&launch.process_dir, &End::not_started(failed.reason, failed.to_string()))
        }
    }
}

/// Receives the launch message, the lock that proves that this process lives, and the control
/// socket.
fn receive() -> io::Result<(Launch, OwnedFd, OwnedFd)> {
    let mut message = vec![0; 1 << 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let length = rustix::net::recvmsg(
        rustix::stdio::stdin(),
        &mut [IoSliceMut::new(&mut message)],
        &mut control,
        flags,
    )?
    .bytes;
    let mut descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let (Some(alive), Some(listener)) = (descriptors.next(), descriptors.next()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the supervisor must be started by a gateway",
        ));
    };
    Ok((serde_json::from_slice(&message[..length])?, alive, listener))
}

/// Sends the launch message to a supervisor; see [`receive`].
pub(super) fn send(to: &OwnedFd, launch: &Launch, alive: &File, listener: &OwnedFd) -> io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::os::fd::AsFd;
    let message = serde_json::to_vec(launch)?;
    let descriptors = [alive.as_fd(), listener.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let slices = [io::IoSlice::new(&message)];
    let sent = rustix::net::sendmsg(to, &slices, &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Detaches from the gateway: session, directory, groups and standard streams. Writes the process
/// id to the locked file.
fn detach(alive: &OwnedFd) -> io::Result<()> {
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    File::from(alive.try_clone()?).write_all_at(pid.as_bytes(), 0)?;
    rustix::process::setsid()?;
    for signal in
        [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::PIPE, Signal::USR1, Signal::USR2]
    {
        // SAFETY: an ignored signal runs no code.
        unsafe { libc::signal(signal.as_raw(), libc::SIG_IGN) };
    }
    rustix::process::chdir("/")?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // The limits of the gateway must not be inherited. A hard limit that cannot be raised applies
    // to the container, too.
    server::inherited::set_limits();
    // libcontainer keeps the groups of this process if the container has none.
    match rustix::thread::set_thread_groups(&[]) {
        // The kernel forbids it to an ordinary user with a single group.
        Err(rustix::io::Errno::PERM) if unprivileged::is_active() => {}
        result => result?,
    }
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(())
}

/// Creates the container and starts the process. `None`: the intent was revoked, and nothing was
/// started.
fn start(
    launch: &Launch,
    alive: &OwnedFd,
    listener: &OwnedFd,
) -> Result<Option<event_loop::RunningContainer>, StartError> {
    let held = || {
        state_lock::is_held_as(&launch.state_dir, &launch.holder)
            .map_err(StartError::while_doing("check the holder of the state directory"))
    };
    // The resources created below have the same names in a start by another gateway. A gateway that
    // takes over first ends all supervisors whose process id is stored. This supervisor has stored
    // its id before this check.
    if !held()? {
        return Ok(None);
    }
    let read = |path: PathBuf| {
        let contents = fs::read(&path).map_err(StartError::while_doing(format!("read {}", path.display())));
        contents.map(|contents| (path, contents))
    };
    let (path, contents) = read(launch.container_dir.join(paths::CONTAINER))?;
    let container: Container = serde_json::from_slice(&contents)
        .map_err(StartError::while_doing(format!("parse {}", path.display())))?;
    let intent_path = launch.process_dir.join(paths::INTENT);
    if !filesystem::exists(&intent_path).map_err(StartError::while_doing("check the intent"))? {
        return Ok(None);
    }
    let (_, contents) = read(intent_path.clone())?;
    let intent: Intent =
        serde_json::from_slice(&contents).map_err(StartError::while_doing("parse the intent"))?;
    if let Some(main) = &launch.joins {
        return join::start(launch, main, (&container, &intent), (alive, listener), held);
    }
    let mounted = mounts::mount_table().map_err(StartError::while_doing("list the mounts"))?;
    let cgroups = Cgroups::find(&mounted);

    let mut places = rootfs::make(launch, &container)?;
    let seen = cgroups.create_visible(&launch.cgroup).map_err(StartError::while_doing("create cgroups"))?;
    let own = unprivileged::is_active();
    if !container.privileged && !own {
        cgroups
            .restrict_devices(&launch.cgroup)
            .map_err(StartError::without_cgroup("install the device policy"))?;
    }
    let held_now = held_capabilities().map_err(StartError::while_doing("read its capabilities"))?;
    let worker = oci_spec::Worker {
        root: &places.root,
        cgroup: &launch.cgroup,
        capabilities: held_now,
        limits_swap: cgroups.limits_swap(),
        limits_sockets: cgroups.limits_sockets(),
        range: launch.range,
        cgroups: &seen,
    };
    if !own {
        let configuration = oci_spec::configuration(&container, &worker).to_string();
        fs::write(places.bundle.join("config.json"), configuration)
            .map_err(StartError::while_doing("write the configuration"))?;
    }

    let streams = Streams::open(launch, &container.user, &intent)
        .map_err(StartError::while_doing("open the streams"))?;
    let (connection, init_end) =
        init::connection().map_err(StartError::while_doing("create a connection to init"))?;
    let mut program = program(&container, &container.user, &intent)?;
    require_parts(&places.root, &container.user, &program)?;
    program.supervisor = init_end.as_raw_fd();
    let User { uid, gid, groups, .. } = container.user.clone();
    let capabilities = oci_spec::default_capabilities();
    let identity = Identity { uid, gid, groups, keeps_groups: own, capabilities };
    program.identity = match &places.users {
        Some(users) => Some((Some(users.as_raw_fd()), identity)),
        None => own.then_some((None, identity)),
    };
    program.close =
        streams.own.iter().chain([&connection, alive, listener]).map(AsRawFd::as_raw_fd).collect();

    let parts = own_container::Parts {
        container: &container,
        root: &places.root,
        cgroup: &launch.cgroup,
        cgroups: &cgroups,
        streams: &streams,
        program: &program,
    };
    // The program connects the network while the root is made.
    let connected = places.uplink.as_mut().map_or(Ok(()), Uplink::await_ready);
    connected.map_err(StartError::while_doing("connect the network of the container"))?;
    let made = if own {
        OwnContainer::create(&parts).map(Made::Own).map_err(|error| error_chain(&error))
    } else {
        by_libcontainer(launch, &places, &streams, program).map_err(|error| error_chain(&error))
    };
    drop((streams.stdin, streams.stdout, streams.stderr));
    let mut made = match made {
        Ok(made) => made,
        Err(cause) => {
            // libcontainer removes what it can after a failure.
            if let Err(error) = cgroups.remove(&launch.cgroup) {
                eprintln!("supervisor: cannot remove the cgroups: {error}");
            }
            let reason = if cgroups.first_missing(&container.limits()).is_some() {
                FailureReason::CgroupUnavailable
            } else {
                FailureReason::StartFailed
            };
            return Err(StartError { reason, operation: "create the container".to_owned(), cause });
        }
    };
    drop(init_end);
    let Some(init) = made.init() else {
        return Err(StartError {
            reason: FailureReason::StartFailed,
            operation: "create the container".to_owned(),
            cause: "the container has no first process".to_owned(),
        });
    };
    lower_oom_score();
    let restricted = container.privileged
        || own
        || cgroups
            .are_devices_restricted(&launch.cgroup)
            .map_err(StartError::without_cgroup("read the device policy"))?;

    let mut running = event_loop::RunningContainer::new(
        launch,
        (&container, &intent),
        init,
        connection,
        streams.own,
        cgroups,
    )
    .map_err(StartError::while_doing("watch the container"))?;
    running.set_uplink(places.uplink.take());
    fs::write(launch.process_dir.join(paths::INIT), init.as_raw_nonzero().to_string())
        .map_err(StartError::while_doing("store the process id of init"))?;
    let started = launch.process_dir.join(paths::STARTED);
    if !restricted {
        if let Err(error) = running.destroy() {
            eprintln!("supervisor: cannot destroy the container: {error}");
        }
        return Err(StartError {
            reason: FailureReason::CgroupUnavailable,
            operation: "install the device policy".to_owned(),
            cause: "the control group still allows block devices".to_owned(),
        });
    }
    let taken = match held()?.then(|| filesystem::rename_exclusively(&intent_path, &started)) {
        // Another gateway has taken over, so this launch is obsolete.
        None => Ok(false),
        Some(Ok(())) => made.start().map(|()| true),
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Some(Err(error)) => Err(StartError::while_doing("take the intent")(error)),
    };
    match taken {
        Ok(true) => Ok(Some(running)),
        not_started => {
            if let Err(error) = running.destroy() {
                eprintln!("supervisor: cannot destroy the container: {error}");
            }
            not_started.map(|_| None)
        }
    }
}

/// A container whose init waits for the start.
enum Made {
    Libcontainer(Box<Libcontainer>),
    Own(OwnContainer),
}

impl Made {
    /// The first process of the container.
    fn init(&self) -> Option<Pid> {
        match self {
            Self::Libcontainer(made) => made.pid().and_then(|pid| Pid::from_raw(pid.as_raw())),
            Self::Own(made) => Some(made.init),
        }
    }

    fn start(&mut self) -> Result<(), StartError> {
        match self {
            Self::Libcontainer(made) => made.start().map_err(StartError::while_doing("start the container")),
            Self::Own(made) => made.start().map_err(StartError::while_doing("start the container")),
        }
    }
}

fn by_libcontainer(
    launch: &Launch,
    places: &rootfs::SupervisorDirs,
    streams: &Streams,
    program: Init,
) -> Result<Made, LibcontainerError> {
    let copy = |stream: &OwnedFd| stream.try_clone().map_err(LibcontainerError::OtherIO);
    let (stdin, stdout, stderr) = (copy(&streams.stdin)?, copy(&streams.stdout)?, copy(&streams.stderr)?);
    let made = ContainerBuilder::new(launch.cgroup.clone(), SyscallType::default())
        .with_executor(program)
        .with_root_path(&places.state)?
        .with_stdin(stdin)
        .with_stdout(stdout)
        .with_stderr(stderr)
        .as_init(&places.bundle)
        .with_systemd(false)
        .with_detach(true)
        .build()?;
    Ok(Made::Libcontainer(Box::new(made)))
}

/// The streams of a process.
struct Streams {
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
    /// The supervisor's ends: standard output, standard error, and standard input if the process
    /// has one.
    own: Vec<OwnedFd>,
}

impl Streams {
    fn open(launch: &Launch, user: &User, intent: &Intent) -> io::Result<Self> {
        use rustix::fs::{Gid, Mode, OFlags, Uid};
        use rustix::pipe::PipeFlags;
        // So that a program can open its end again, as /dev/stdin or /dev/stdout.
        let (uid, gid) = (Uid::from_raw(launch.id(user.uid)?), Gid::from_raw(launch.id(user.gid)?));
        let output = || {
            let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fchown(&write, Some(uid), Some(gid))?;
            // Only the supervisor's end, because programs do not expect a write to fail.
            rustix::fs::fcntl_setfl(&read, OFlags::NONBLOCK)?;
            // A larger pipe is faster. The system may reject the size.
            let size = usize::try_from(output_spool::PIPE).unwrap_or(65536);
            if let Err(error) = rustix::pipe::fcntl_setpipe_size(&read, size) {
                eprintln!("supervisor: {}: cannot enlarge the pipes: {error}", launch.cgroup);
            }
            Ok::<_, io::Error>((read, write))
        };
        if intent.terminal.is_some() {
            // Init replaces them by the terminal.
            let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            let (stdout, stderr) = (null.try_clone()?, null.try_clone()?);
            return Ok(Self { stdin: null, stdout, stderr, own: Vec::new() });
        }
        let ((own_stdout, stdout), (own_stderr, stderr)) = (output()?, output()?);
        let mut own = vec![own_stdout, own_stderr];
        let stdin = if intent.stdin {
            let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            rustix::fs::fchown(&read, Some(uid), Some(gid))?;
            rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK)?;
            own.push(write);
            read
        } else if intent.inline_stdin {
            inline_stdin(&launch.process_dir.join(paths::STDIN))?
        } else {
            rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?
        };
        Ok(Self { stdin, stdout, stderr, own })
    }
}

/// Returns the contents of a file, as a file in memory that nothing can change. A program cannot
/// reach the worker's file through it, and may open it again as /dev/stdin.
fn inline_stdin(path: &Path) -> io::Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("stdin", flags)?);
    file.write_all(&fs::read(path)?)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    file.rewind()?;
    Ok(file.into())
}

/// The program that init will start.
fn program(container: &Container, user: &User, intent: &Intent) -> Result<Init, StartError> {
    let string = |text: &[u8]| CString::new(text).map_err(StartError::while_doing("pass text with a NUL"));
    let arguments: Vec<_> =
        intent.command.iter().map(|text| string(text.as_bytes())).collect::<Result<_, _>>()?;
    let Some(name) = intent.command.first().map(Text::as_bytes) else {
        return Err(StartError {
            reason: FailureReason::StartFailed,
            operation: "start the program".to_owned(),
            cause: "the command is empty".to_owned(),
        });
    };
    let mut environment = container.environment.clone();
    environment.retain(|(name, _)| !intent.environment.iter().any(|(other, _)| other == name));
    environment.extend(intent.environment.iter().cloned());
    for (missing, value) in [("PATH", PATH), ("HOME", user.home.as_str())] {
        if !environment.iter().any(|(name, _)| name.as_bytes() == missing.as_bytes()) {
            environment.push((Text::Utf8(missing.to_owned()), Text::Utf8(value.to_owned())));
        }
    }
    let path = environment.iter().find(|(name, _)| name.as_bytes() == b"PATH");
    let path = path.map_or(b"".as_slice(), |(_, value)| value.as_bytes());
    let candidates = if name.contains(&b'/') {
        vec![string(name)?]
    } else {
        // An empty part of PATH is the working directory.
        let part = |part: &[u8]| [if part.is_empty() { b"." } else { part }, name].join(&b'/');
        path.split(|byte| *byte == b':').map(|at| string(&part(at))).collect::<Result<_, _>>()?
    };
    let variables = environment.iter().map(|(name, value)| [name.as_bytes(), value.as_bytes()].join(&b'='));
    let filters = if container.privileged {
        Vec::new()
    } else {
        seccomp::filters().map_err(StartError::while_doing("compile the filters of system calls"))?
    };
    Ok(Init {
        candidates,
        arguments,
        environment: variables.map(|variable| string(&variable)).collect::<Result<_, _>>()?,
        directory: string(intent.directory.as_ref().unwrap_or(&container.directory).as_bytes())?,
        filters,
        joined: None,
        identity: None,
        terminal: intent.terminal(),
        supervisor: -1,
        close: Vec::new(),
    })
}

/// Fails if the interpreter or loader of the program is missing, because the error of the kernel
/// would not name it.
fn require_parts(root: &Path, user: &User, program: &Init) -> Result<(), StartError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, flags, Mode::empty())
        .map_err(|error| StartError::while_doing("open the root")(io::Error::from(error)))?;
    let as_root = user.uid == 0;
    let directory = Path::new(std::ffi::OsStr::from_bytes(program.directory.as_bytes()));
    let lookup = Lookup { root: root.as_fd(), directory, as_root };
    match lookup.missing_part(&program.candidates) {
        None => Ok(()),
        Some(cause) => Err(StartError {
            reason: FailureReason::ProgramNotExecutable,
            operation: "execute the program".to_owned(),
            cause,
        }),
    }
}

/// The capabilities of this process, as a bit set.
fn held_capabilities() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, "cannot parse /proc/self/status: it has no capabilities")
    })
}

/// Lowers the OOM score of this process. Must follow the creation of the container, which would
/// inherit it.
fn lower_oom_score() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-900") {
        // Only some processes may do this. Without it, the supervisor has the score of an ordinary
        // process.
        eprintln!("supervisor: cannot lower the OOM score: {error}");
    }
}

/// Writes the exit record into space that was reserved at the start of the process.
pub(super) fn write_end(process_dir: &Path, end: &End) -> io::Result<()> {
    let reserve = process_dir.join(paths::RESERVE);
    let record = serde_json::to_vec(end)?;
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&reserve)?;
    file.write_all(&record)?;
    file.set_len(record.len() as u64)?;
    file.sync_data()?;
    fs::rename(reserve, process_dir.join(paths::END))
}

/// Runs a supervisor if the arguments request one.
pub(super) fn supervise_if_asked(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    (arguments.into_iter().nth(1)? == ARGUMENT).then(supervise)
}
