//! Start of a further process in a running container.
//!
//! The supervisor of the process is not that of the container. Its child joins the control groups
//! of the container, and the namespaces of the container's init.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use domain::workload::FailureReason;
use rustix::process::Pid;

use super::container_init::ContainerInit;
use super::event_loop::RunningContainer;
use super::init::{self, Init};
use super::{
    StartError, Streams, held_capabilities, lower_oom_score, oci_spec, program, require_parts, write_end,
};
use crate::runtimes::exit_record::End;
use crate::runtimes::host::cgroups::Cgroups;
use crate::runtimes::host::containers::{find_user, limit_ids};
use crate::runtimes::host::persisted::{Container, Intent, Launch};
use crate::runtimes::host::user_namespace::Identity;
use crate::runtimes::host::users::User;
use crate::runtimes::host::{filesystem, mounts, paths, unprivileged};

/// Starts the process in the container of the main process `main`. `held` tells whether this launch
/// is not obsolete. `None`: the intent was revoked, and nothing was started.
pub(super) fn start(
    launch: &Launch,
    main: &Path,
    (container, intent): (&Container, &Intent),
    (alive, listener): (&OwnedFd, &OwnedFd),
    held: impl Fn() -> Result<bool, StartError>,
) -> Result<Option<RunningContainer>, StartError> {
    let joined = ContainerInit::open(main).map_err(StartError::while_doing("find the container"))?;
    let mounted = mounts::mount_table().map_err(StartError::while_doing("list the mounts"))?;
    let cgroups = Cgroups::find(&mounted);
    let user = user(&joined, container, intent)?;
    let streams =
        Streams::open(launch, &user, intent).map_err(StartError::while_doing("open the streams"))?;
    let (connection, init_end) =
        init::connection().map_err(StartError::while_doing("create a connection to init"))?;
    let mut program = program(container, &user, intent)?;
    require_parts(&joined.root, &user, &program)?;
    let users = launch
        .range
        .map(|_| joined.users())
        .transpose()
        .map_err(StartError::while_doing("open the user namespace"))?;
    let held_now = held_capabilities().map_err(StartError::while_doing("read its capabilities"))?;
    let User { uid, gid, groups, .. } = user;
    let capabilities = oci_spec::capabilities(container, held_now);
    let keeps_groups = unprivileged::is_active();
    let identity = Identity { uid, gid, groups, keeps_groups, capabilities };
    program.identity = Some((users.as_ref().map(AsRawFd::as_raw_fd), identity));
    let namespaces = joined.namespaces().map_err(StartError::while_doing("find the namespaces"))?;
    program.joined = Some((joined.watch.as_raw_fd(), namespaces));
    program.supervisor = init_end.as_raw_fd();
    program.close =
        streams.own.iter().chain([&connection, alive, listener]).map(AsRawFd::as_raw_fd).collect();

    if !held()? {
        return Ok(None);
    }
    let (intent_path, started) =
        (launch.process_dir.join(paths::INTENT), launch.process_dir.join(paths::STARTED));
    match filesystem::rename_exclusively(&intent_path, &started) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StartError::while_doing("take the intent")(error)),
    }
    let init = fork(&program, &streams, &cgroups, launch, container)
        .map_err(StartError::while_doing("start a process in the container"))?;
    drop((init_end, users));
    lower_oom_score();
    match RunningContainer::new(launch, (container, intent), init, connection, streams.own, cgroups) {
        Ok(running) => Ok(Some(running)),
        Err(error) => {
            // The program may have begun. It dies with its parent.
            rustix::process::kill_process(init, rustix::process::Signal::KILL).ok();
            let end = End::unknown(FailureReason::ExitUnknown, format!("cannot watch the process: {error}"));
            write_end(&launch.process_dir, &end).map_err(StartError::while_doing("write the end"))?;
            Ok(None)
        }
    }
}

/// The user of the process.
fn user(joined: &ContainerInit, container: &Container, intent: &Intent) -> Result<User, StartError> {
    let Some(requested) = &intent.user else { return Ok(container.user.clone()) };
    let root = joined.root().map_err(StartError::while_doing("open the root"))?;
    let found = find_user(root.as_fd(), Some(requested)).and_then(|mut user| {
        if unprivileged::is_active() {
            limit_ids(&mut user)?;
        }
        Ok(user)
    });
    found.map_err(|error| StartError {
        reason: error.reason(),
        operation: "start a process in the container".to_owned(),
        cause: error.to_string(),
    })
}

/// Starts the parent of the program.
fn fork(
    program: &Init,
    streams: &Streams,
    cgroups: &Cgroups,
    launch: &Launch,
    container: &Container,
) -> io::Result<Pid> {
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let Err(error) = become_init(program, streams, cgroups, launch, container);
        program.report_failure(&error);
        // SAFETY: ends this process without running destructors or handlers of the supervisor.
        unsafe { libc::_exit(1) };
    }
    Pid::from_raw(child).ok_or_else(io::Error::last_os_error)
}

/// Returns only on failure.
fn become_init(
    program: &Init,
    streams: &Streams,
    cgroups: &Cgroups,
    launch: &Launch,
    container: &Container,
) -> io::Result<std::convert::Infallible> {
    cgroups.add(&launch.cgroup, rustix::process::getpid())?;
    fs::write("/proc/self/oom_score_adj", oci_spec::OOM_SCORE.to_string())?;
    // Like init of the container, this process is not dumpable.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    if !container.privileged {
        rustix::thread::set_no_new_privs(true)?;
    }
    program.close_and_tie()?;
    rustix::stdio::dup2_stdin(&streams.stdin)?;
    rustix::stdio::dup2_stdout(&streams.stdout)?;
    rustix::stdio::dup2_stderr(&streams.stderr)?;
    program.run()
}
