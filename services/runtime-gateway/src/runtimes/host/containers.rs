//! Containers on the host: creation, list, destruction, and adoption from an earlier runtime.
//!
//! A container without a process is only a directory. All checks happen here, before anything is
//! created.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use domain::workload::{Bytes, Limits, Network};
use domain::{ContainerHandle, error_chain};
use runtime::{ContainerSpec, Root, RuntimeError};
use rustix::fs::{FileType, Mode, OFlags};
use tokio::time::Instant;

use super::tree_copy::own_tree;
use crate::util::blocking::blocking;

use super::filesystem::{self, at};
use super::host_image::Image;
use super::persisted::{Container, Intent};
use super::policy::Permission;
use super::processes::Process;
use super::supervisor::container_init;
use super::users::{User, Users};
use super::{Host, mounts, paths, user_namespace};
use crate::util::keyed_locks::lock;
use crate::util::mapped_ids::MappedIds;

/// Longest time until a killed process has ended.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before a killed process is checked again.
const KILL_PAUSE: Duration = Duration::from_millis(5);
/// Name prefixes of containers in creation and in destruction.
const UNFINISHED: [&str; 2] = [".new-", ".gone-"];
/// Paths where no volume may be mounted.
const RESERVED: [&str; 3] = ["/proc", "/sys", "/dev"];
/// Directories that are empty when a container starts, with the subdirectories that exist
/// nevertheless.
const FRESH: [(&str, &[&str]); 5] = [
    ("/proc", &["/proc"]),
    ("/sys", &["/sys"]),
    ("/dev", &["/dev", "/dev/shm", "/dev/pts"]),
    ("/tmp", &["/tmp"]),
    ("/run", &["/run", "/run/lock"]),
];
/// The directory of the root file system in the volume of an image.
pub(super) const ROOT: &str = "rootfs";
/// Limit of an account file, in bytes.
const MAX_ACCOUNTS: u64 = 16 << 20;
/// The working directory that is created if it is missing.
const WORKSPACE: &str = "/workspace";
/// Time for a supervisor to end after all processes of its container were killed.
const LAST: Duration = Duration::from_secs(15);

impl Host {
    fn containers(&self) -> PathBuf {
        self.config.state_dir.join("containers")
    }

    pub(super) fn container(&self, handle: ContainerHandle) -> PathBuf {
        self.containers().join(handle.to_string())
    }

    pub(super) fn list_containers(&self) -> Result<Vec<ContainerHandle>, RuntimeError> {
        let mut handles = filesystem::handles_in(&self.containers(), &UNFINISHED)?;
        handles.sort_unstable();
        handles.dedup();
        Ok(handles)
    }

    /// Adopts the state of an earlier runtime. Removes incomplete containers, registers processes,
    /// revokes abandoned intents, and ends containers without a supervisor.
    pub(super) fn adopt(&self) -> Result<(), RuntimeError> {
        let directory = self.containers();
        filesystem::make_directory(&directory).map_err(at("make", &directory))?;
        filesystem::remove_unfinished(&directory)?;
        for handle in filesystem::handles_in(&directory, &[])? {
            self.adopt_processes(handle)?;
        }
        self.remove_stale_sockets()
    }

    fn adopt_processes(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        let directory = self.container(container).join(paths::PROCESSES);
        filesystem::remove_unfinished(&directory)?;
        let record = self.read_container(container)?;
        let volumes: Vec<_> = record.iter().flat_map(Container::written).collect();
        let mut written = Vec::new();
        for id in filesystem::handles_in(&directory, &[])? {
            let process = Process::new(self, container, id);
            let mut known = false;
            for name in [paths::INTENT, paths::STARTED, paths::REVOKED, paths::END] {
                known |= filesystem::exists(&process.file(name)).map_err(at("check", &process.dir))?;
            }
            if known {
                lock(&self.processes).insert(id, container);
                // Other processes use the mounts of the main process, or copies.
                if Self::is_main(&process)? {
                    written.extend(volumes.iter().map(|volume| (*volume, id)));
                }
                // This also settles processes without a supervisor. A process that cannot be
                // settled now is settled at its next use.
                if let Err(error) = self.status(&process) {
                    tracing::warn!(process.id = %id, error = error_chain(&error), "cannot settle a process without a supervisor");
                }
            } else {
                filesystem::remove_or_leave(&process.dir);
            }
        }
        // Includes processes that have ended, because the mounts of the earlier gateway may show
        // old contents.
        lock(&self.written).extend(written);
        Ok(())
    }

    /// Revokes every start of the earlier gateway that is not proven, because that gateway may be
    /// frozen halfway. Started processes continue. A revoked process was never started, and may be
    /// started again.
    pub(super) fn revoke_unstarted(&self) -> Result<(), RuntimeError> {
        let all: Vec<_> = lock(&self.processes).iter().map(|(id, container)| (*id, *container)).collect();
        for (id, container) in all {
            let process = Process::new(self, container, id);
            if !process.revoke()? {
                continue;
            }
            tracing::info!(process.id = %id, "revoked the start of a process by another gateway");
            process.kill_supervisor()?;
            let deadline = std::time::Instant::now() + LAST;
            while process.is_alive()? && !process.supervisor_ended()? {
                if std::time::Instant::now() >= deadline {
                    return Err(RuntimeError::Other(format!("cannot end the supervisor of process {id}")));
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            self.cgroups
                .remove(&process.cgroup())
                .map_err(|error| RuntimeError::io("remove the cgroups of a container", error))?;
            self.undo_start(&process)?;
            lock(&self.processes).remove(&id);
        }
        Ok(())
    }

    pub(super) fn unmount_idle(&self) -> Result<(), RuntimeError> {
        let mut used = HashSet::new();
        for handle in self.list_containers()? {
            let mut alive = false;
            for process in self.processes_of(handle)? {
                alive |= process.is_alive()?;
            }
            let record = if alive { self.read_container(handle)? } else { None };
            used.extend(record.iter().flat_map(Container::volumes));
        }
        self.volumes.unmount_all_but(&used)
    }

    pub(super) fn kill_remaining(&self) -> Result<(), RuntimeError> {
        let mut killed = Vec::new();
        for handle in self.list_containers()? {
            let (mut main_is_alive, mut others) = (false, Vec::new());
            for process in self.processes_of(handle)? {
                match (process.is_alive()?, Self::is_main(&process)?) {
                    (true, true) => main_is_alive = true,
                    (true, false) => others.push(process),
                    (false, _) => {}
                }
            }
            if !main_is_alive {
                killed.append(&mut others);
            }
        }
        for process in &killed {
            self.kill_container(process)
                .map_err(|error| RuntimeError::io("kill the processes of a container", error))?;
        }
        let give_up = Instant::now() + KILL_TIMEOUT;
        for process in killed {
            // The supervisor records the end, and unmounts the container.
            while process.is_alive()? {
                if Instant::now() > give_up {
                    return Err(RuntimeError::Other(format!("process {} does not end", process.id)));
                }
                std::thread::sleep(KILL_PAUSE);
            }
        }
        Ok(())
    }

    /// Kills all processes in the container of a process.
    pub(super) fn kill_container(&self, process: &Process) -> io::Result<()> {
        self.cgroups.kill(&process.cgroup())?;
        // An ordinary user seldom has control groups.
        if self.unprivileged { container_init::kill(&process.dir) } else { Ok(()) }
    }

    pub(super) fn abandon(&self) {
        let processes: Vec<_> =
            lock(&self.processes).iter().map(|(id, container)| Process::new(self, *container, *id)).collect();
        for process in processes {
            // The supervisor ends with the last process of its container.
            if let Err(error) = self.kill_container(&process) {
                tracing::warn!(process.id = %process.id, %error, "cannot kill a container");
            }
        }
        let below = |mount: &mounts::MountEntry| mount.at.starts_with(&self.config.state_dir);
        let mounted = mounts::mount_table().unwrap_or_default();
        for mount in mounted.iter().rev().filter(|mount| below(mount)) {
            if let Err(error) = mounts::unmount(&mount.at) {
                tracing::warn!(path = %mount.at.display(), %error, "cannot unmount a volume");
            }
        }
    }

    /// Reads the specification of a container. `None`: the container does not exist.
    pub(super) fn read_container(&self, handle: ContainerHandle) -> Result<Option<Container>, RuntimeError> {
        let path = self.container(handle).join(paths::CONTAINER);
        let Some(record) = filesystem::read_if_exists(&path).map_err(at("read", &path))? else {
            return Ok(None);
        };
        let unreadable = |error| RuntimeError::Other(format!("{}: {error}", path.display()));
        serde_json::from_slice(&record).map(Some).map_err(unreadable)
    }

    fn remove_stale_sockets(&self) -> Result<(), RuntimeError> {
        for id in filesystem::handles_in(self.sockets.directory(), &[])? {
            let container = lock(&self.processes).get(&id).copied();
            let lives = match container {
                Some(container) => Process::new(self, container, id).is_alive()?,
                None => false,
            };
            if !lives {
                let socket = self.sockets.path(&id.to_string());
                filesystem::remove_file(&socket).map_err(at("remove", &socket))?;
            }
        }
        Ok(())
    }

    pub(super) async fn create_container(
        self: &Arc<Self>,
        handle: ContainerHandle,
        spec: ContainerSpec,
    ) -> Result<(), RuntimeError> {
        let (turn, host) = (self.locks.lock(handle.uuid()).await, Arc::clone(self));
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.create(handle, spec)
        })
        .await
    }

    fn create(&self, handle: ContainerHandle, mut spec: ContainerSpec) -> Result<(), RuntimeError> {
        let container = self.container(handle);
        if filesystem::exists(&container).map_err(at("check", &container))? {
            return Ok(());
        }
        self.check_policy(&spec)?;
        self.check_joined_network(&spec)?;
        let root = self.open_root(&spec.root)?;
        if let Root::Volume(_) = spec.root {
            check_image(root.as_fd())?;
        }
        let mut user = find_user(root.as_fd(), spec.user.as_deref())?;
        if self.unprivileged {
            limit_ids(&mut user)?;
        }
        let mapped = !spec.privileged && self.volumes.fixed_owners_reason().is_none();
        if mapped && [user.uid, user.gid].iter().chain(&user.groups).any(|id| *id >= user_namespace::IDS) {
            let requested = spec.user.unwrap_or_default();
            return Err(RuntimeError::UserNotFound(format!(
                "{requested} (the largest id is {})",
                user_namespace::IDS - 1
            )));
        }
        if let Some(missing) = self.cgroups.first_missing(&spec.limits) {
            return Err(RuntimeError::CgroupUnavailable(missing.to_owned()));
        }
        // The kernel gives an ordinary user no access to devices.
        if !spec.privileged && !self.unprivileged && !self.cgroups.restricts_devices() {
            return Err(RuntimeError::CgroupUnavailable("devices".to_owned()));
        }
        let pids = Limits { pids: Some(self.config.policy.container_pids()), ..Limits::default() };
        if self.cgroups.first_missing(&pids).is_none() {
            // With a limit, a fork bomb fails alone and not the machine.
            spec.limits.pids = spec.limits.pids.or(pids.pids);
        }
        let memory = self.cgroups.memory_bytes().map(|bytes| self.config.policy.container_memory(bytes));
        let memory = Limits { memory_bytes: memory, ..Limits::default() };
        if self.cgroups.first_missing(&memory).is_none() {
            // With a limit, a memory leak ends before the machine is out of memory.
            spec.limits.memory_bytes = spec.limits.memory_bytes.or(memory.memory_bytes);
        }
        check_mounts(root.as_fd(), &spec, self.image())?;
        let mut volumes = Vec::new();
        for mount in &spec.mounts {
            volumes.push((mount, self.directory(mount.volume)?));
        }
        let make_directory = must_make(&spec);
        let directory = path(&spec.directory);
        if make_directory
            && spec.root != Root::Host
            && find_fresh(directory).is_none()
            && !spec.mounts.iter().any(|mount| directory.starts_with(path(&mount.path)))
            && let Some(why) = find_obstacle(root.as_fd(), directory)?
        {
            let directory = directory.display();
            return Err(RuntimeError::InvalidImage(format!("`{directory}` cannot be a directory: {why}")));
        }
        if !make_directory {
            check_directory(root.as_fd(), &spec, &volumes, self.image())?;
        }
        if user.uid != 0 {
            for (mount, path) in volumes.iter().filter(|(mount, _)| !mount.read_only) {
                own_tree(path, user.uid, user.gid).map_err(|error| owner_change_error(error, mount, path))?;
            }
        }
        let record = Container::new(handle, spec, user, make_directory);
        let new = self.containers().join(format!(".new-{handle}"));
        let made =
            fill(&new, &record).and_then(|()| fs::rename(&new, &container).map_err(at("make", &container)));
        if made.is_err() {
            // The error matters more than the incomplete container, which the next attempt or
            // opening removes.
            if let Err(error) = filesystem::remove_tree(&new) {
                tracing::warn!(container.handle = %handle, %error, "cannot remove an incomplete container");
            }
        }
        made
    }

    /// Rejects requests that the operator does not allow. Placement checks the same. This check
    /// covers callers that bypass placement.
    fn check_policy(&self, spec: &ContainerSpec) -> Result<(), RuntimeError> {
        let asked = [
            (spec.privileged, Permission::Privileged, "a privileged container"),
            (spec.network == Network::Host, Permission::HostNetwork, "the network of the machine"),
            (spec.root == Root::Host, Permission::HostImage, "the image `host`"),
        ];
        if spec.privileged && self.unprivileged {
            let what = "a privileged container on a worker of an ordinary user";
            return Err(RuntimeError::Unsupported(what.to_owned()));
        }
        for (asked, permission, what) in asked {
            if asked && !self.config.policy.allows(permission) {
                return Err(RuntimeError::Unsupported(format!("the operator does not allow {what}")));
            }
        }
        if spec.network == Network::Private && self.network_pool.is_none() {
            return Err(RuntimeError::Unsupported("private networks: see the log of its gateway".to_owned()));
        }
        Ok(())
    }

    /// Checks the container whose network is joined. Its network passed [`Self::check_policy`].
    fn check_joined_network(&self, spec: &ContainerSpec) -> Result<(), RuntimeError> {
        let Some(joined) = spec.network_of else { return Ok(()) };
        let other = self.read_container(joined)?.filter(|other| other.team == spec.team);
        let other = other.ok_or(RuntimeError::ContainerNotFound(joined))?;
        if other.network != spec.network.into() {
            return Err(RuntimeError::Unsupported(format!(
                "a network of another kind than that of container {joined}, which is joined"
            )));
        }
        Ok(())
    }

    fn image(&self) -> Image<'_> {
        Image { named: self.config.policy.host_paths() }
    }

    /// Opens the root file system of a container, before anything is mounted in it.
    fn open_root(&self, root: &Root) -> Result<OwnedFd, RuntimeError> {
        let (path, flags) = match root {
            Root::Host => (PathBuf::from("/"), OFlags::empty()),
            Root::Volume(volume) => (self.directory(*volume)?.join(ROOT), OFlags::NOFOLLOW),
            Root::WholeVolume(_) => {
                return Err(RuntimeError::Unsupported("a whole volume as a root".to_owned()));
            }
        };
        let flags = flags | OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(opened) => Ok(opened),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
                Err(RuntimeError::InvalidImage("the volume has no directory `rootfs`".to_owned()))
            }
            Err(error) => Err(at("open", &path)(error.into())),
        }
    }

    pub(super) async fn destroy_container(
        self: &Arc<Self>,
        handle: ContainerHandle,
    ) -> Result<(), RuntimeError> {
        let turn = self.locks.lock(handle.uuid()).await;
        let host = Arc::clone(self);
        let processes = blocking(move || {
            host.hold.check()?;
            host.processes_of(handle)
        })
        .await?;
        for process in &processes {
            self.end_supervisor(process).await?;
        }
        let host = Arc::clone(self);
        blocking(move || {
            let _turn = turn;
            host.hold.check()?;
            host.remove(handle, &processes)
        })
        .await
    }

    /// Lists the processes of a container, except those in creation.
    pub(super) fn processes_of(&self, container: ContainerHandle) -> Result<Vec<Process>, RuntimeError> {
        let directory = self.container(container).join(paths::PROCESSES);
        if !filesystem::exists(&directory).map_err(at("check", &directory))? {
            return Ok(Vec::new());
        }
        let ids = filesystem::handles_in(&directory, &[])?;
        Ok(ids.into_iter().map(|id| Process::new(self, container, id)).collect())
    }

    /// Kills all processes of a container, and waits until its supervisor has ended.
    async fn end_supervisor(&self, process: &Process) -> Result<(), RuntimeError> {
        process.revoke()?;
        let deadline = Instant::now() + LAST;
        let mut killed = false;
        while process.is_alive()? {
            let kill = async {
                let mut connection = self.sockets.connect(&process.id.to_string()).await?;
                connection.request(&super::supervisor_protocol::Request::Stop(Duration::ZERO)).await?;
                connection.closed().await;
                Ok::<_, io::Error>(())
            };
            match tokio::time::timeout_at(deadline, kill).await {
                Ok(Ok(())) => {}
                // The supervisor may be ending.
                Ok(Err(_)) => tokio::time::sleep(Duration::from_millis(2)).await,
                Err(_) => {}
            }
            if Instant::now() >= deadline {
                if killed && Instant::now() >= deadline + LAST {
                    return Err(RuntimeError::Other(format!(
                        "cannot end the supervisor of process {}",
                        process.id
                    )));
                }
                if !killed {
                    tracing::warn!(process.id = %process.id, "killing a supervisor that does not end");
                    process.kill_supervisor()?;
                    // Processes that the supervisor is still creating do not end with it.
                    let group = process.cgroup();
                    self.cgroups.kill(&group).map_err(|error| RuntimeError::io("kill a container", error))?;
                    killed = true;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    fn remove(&self, handle: ContainerHandle, processes: &[Process]) -> Result<(), RuntimeError> {
        for process in processes {
            self.cgroups
                .remove(&process.cgroup())
                .map_err(|error| RuntimeError::io("remove the cgroups of a container", error))?;
            let socket = self.sockets.path(&process.id.to_string());
            filesystem::remove_file(&socket).map_err(at("remove", &socket))?;
            lock(&self.processes).remove(&process.id);
        }
        let container = self.container(handle);
        let [new, gone] = UNFINISHED.map(|prefix| self.containers().join(format!("{prefix}{handle}")));
        if filesystem::exists(&container).map_err(at("check", &container))? {
            filesystem::remove_tree(&gone).map_err(at("remove", &gone))?;
            fs::rename(&container, &gone).map_err(at("remove", &container))?;
        }
        for path in [gone, new] {
            filesystem::remove_tree(&path).map_err(at("remove", &path))?;
        }
        Ok(())
    }
}

fn fill(new: &Path, record: &Container) -> Result<(), RuntimeError> {
    filesystem::remove_tree(new).map_err(at("remove", new))?;
    let make = |path: PathBuf, mode| DirBuilder::new().mode(mode).create(&path).map_err(at("make", &path));
    make(new.to_owned(), 0o700)?;
    // The mode of the upper layer is the mode of the container's root.
    for (name, mode) in [("upper", 0o755), ("work", 0o700), ("run", 0o700), (paths::PROCESSES, 0o700)] {
        make(new.join(name), mode)?;
    }
    let path = new.join(paths::CONTAINER);
    let text = serde_json::to_vec(record).map_err(|error| RuntimeError::Other(error.to_string()))?;
    fs::write(&path, text).map_err(at("write", &path))
}

/// Looks up a user in the image.
pub(super) fn find_user(root: BorrowedFd<'_>, requested: Option<&str>) -> Result<User, RuntimeError> {
    let read = |path: &str| {
        let path = Path::new(path);
        let contents = match mounts::open_in(root, path, OFlags::PATH) {
            Ok(found) => read_file(found.as_fd(), MAX_ACCOUNTS).map_err(at("read", path))?,
            // An image may have no account files.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Vec::new()
            }
            Err(error) if is_content_error(&error) => {
                return Err(RuntimeError::InvalidImage(format!("`{}`: {error}", path.display())));
            }
            Err(error) => return Err(at("read", path)(error)),
        };
        Ok::<_, RuntimeError>(String::from_utf8_lossy(&contents).into_owned())
    };
    let (passwd, group) = (read("/etc/passwd")?, read("/etc/group")?);
    let found = Users { passwd: &passwd, group: &group }.find(requested);
    found.ok_or_else(|| RuntimeError::UserNotFound(requested.unwrap_or_default().to_owned()))
}

/// Fails if an ordinary user cannot run processes as this user. Removes further groups that do not
/// exist for an ordinary user, because images have such groups for root.
pub(super) fn limit_ids(user: &mut User) -> Result<(), RuntimeError> {
    let User { uid, gid, groups, .. } = user;
    let ids = MappedIds::of_this_process();
    if !ids.has(*uid, *gid) {
        return Err(RuntimeError::Unsupported(format!(
            "the user {uid}:{gid} on a worker of an ordinary user: install `uidmap`, and grant ids in /etc/subuid and /etc/subgid, or run the command as root of the container (--user root)"
        )));
    }
    groups.retain(|group| ids.has_group(*group));
    Ok(())
}

/// Types of file systems of the kernel (`statfs`).
const PROC: rustix::fs::FsWord = 0x9fa0;
const SYSFS: rustix::fs::FsWord = 0x6265_6572;

/// Reads at most `limit` bytes of a file of a container, from a path descriptor. Returns nothing
/// unless it is a regular file, because opening a device may have side effects.
pub(super) fn read_file(found: BorrowedFd<'_>, limit: u64) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    // In a running container, the path may lead into `/proc`, where a read may wait or change the
    // machine.
    let is_of_kernel = matches!(rustix::fs::fstatfs(found)?.f_type, PROC | SYSFS);
    if FileType::from_raw_mode(rustix::fs::fstat(found)?.st_mode).is_file() && !is_of_kernel {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = format!("/proc/self/fd/{}", found.as_raw_fd());
        let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
        file.take(limit).read_to_end(&mut contents)?;
    }
    Ok(contents)
}

fn path(bytes: &Bytes) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// Whether a missing working directory is created.
fn must_make(spec: &ContainerSpec) -> bool {
    let directory = path(&spec.directory);
    let workspace = Path::new(WORKSPACE);
    // Paths inside an input belong to the input.
    let in_mount = |at: &Path| at != workspace && directory.starts_with(at);
    spec.mounts.iter().any(|mount| path(&mount.path).starts_with(directory))
        || (directory.starts_with(workspace) && !spec.mounts.iter().any(|mount| in_mount(path(&mount.path))))
}

/// Whether `path` is in a directory that is fresh in every container. The value tells whether
/// `path` exists there.
fn find_fresh(path: &Path) -> Option<bool> {
    let (_, there) = FRESH.iter().find(|(fresh, _)| path.starts_with(fresh))?;
    Some(there.iter().any(|there| path == Path::new(there)))
}

fn check_mounts(root: BorrowedFd<'_>, spec: &ContainerSpec, host: Image<'_>) -> Result<(), RuntimeError> {
    let refuse = |at: &Path, why: &str| {
        Err(RuntimeError::InvalidMount { path: at.to_string_lossy().into_owned(), reason: why.to_owned() })
    };
    for (index, mount) in spec.mounts.iter().enumerate() {
        let at = path(&mount.path);
        let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !at.is_absolute() || !at.components().all(plain) || mount.path.contains(&0) {
            return refuse(at, "the path is not absolute, or contains `.`, `..` or NUL");
        }
        if at.to_str().is_none() {
            // libcontainer reads the mount table as text.
            return refuse(at, "the path is not UTF-8");
        }
        if at == Path::new("/") || RESERVED.iter().any(|reserved| at.starts_with(reserved)) {
            return refuse(at, "the path is reserved");
        }
        let mut others = spec.mounts[..index].iter().map(|other| path(&other.path));
        if others.any(|other| at == other) {
            return refuse(at, "another volume is mounted at this path");
        }
        let why = match (find_fresh(at), &spec.root) {
            (Some(_), _) => None,
            (None, Root::Host) => host.find_obstacle(at),
            (None, Root::Volume(_) | Root::WholeVolume(_)) => find_obstacle(root, at)?,
        };
        if let Some(why) = why {
            return refuse(at, why);
        }
    }
    Ok(())
}

/// The reason why no directory can be created at `path` of the image.
fn find_obstacle(root: BorrowedFd<'_>, path: &Path) -> Result<Option<&'static str>, RuntimeError> {
    let mut parents: Vec<_> = path.ancestors().collect();
    parents.reverse();
    for parent in parents {
        match mounts::open_in(root, parent, OFlags::PATH | OFlags::DIRECTORY) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let link = mounts::open_in(root, parent, OFlags::PATH | OFlags::NOFOLLOW).is_ok();
                return Ok(link.then_some("a parent of the path is a dangling symbolic link"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Ok(Some("a parent of the path is not a directory"));
            }
            Err(error) if is_content_error(&error) => {
                return Ok(Some("the path is too long, or has a loop of symbolic links"));
            }
            Err(error) => return Err(at("check", parent)(error)),
        }
    }
    Ok(None)
}

/// Checks that an image has directories, or nothing, at the paths that every container needs.
/// Missing directories are created later.
fn check_image(root: BorrowedFd<'_>) -> Result<(), RuntimeError> {
    for (place, _) in FRESH {
        if let Some(why) = find_obstacle(root, Path::new(place))? {
            return Err(RuntimeError::InvalidImage(format!("`{place}` cannot be a directory: {why}")));
        }
    }
    for place in RESERVED.map(Path::new) {
        let link = mounts::open_in(root, place, OFlags::PATH | OFlags::NOFOLLOW);
        if link.is_ok_and(|link| rustix::fs::fstat(link).is_ok_and(|found| is_link(&found))) {
            return Err(RuntimeError::InvalidImage(format!("`{}` is a symbolic link", place.display())));
        }
    }
    let resolver = mounts::open_in(
        root,
        Path::new("/etc/resolv.conf"),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW,
    );
    if resolver.is_ok() {
        return Err(RuntimeError::InvalidImage("`/etc/resolv.conf` is a directory".to_owned()));
    }
    Ok(())
}

fn is_link(found: &rustix::fs::Stat) -> bool {
    FileType::from_raw_mode(found.st_mode).is_symlink()
}

/// Whether the contents of a tree caused an error of the operating system, and not the worker.
pub(super) fn is_content_error(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let of_content = [
        Errno::LOOP,
        Errno::NAMETOOLONG,
        Errno::NOTDIR,
        Errno::ISDIR,
        Errno::XDEV,
        Errno::PERM,
        Errno::ACCESS,
        Errno::MLINK,
        Errno::NXIO,
        Errno::NODEV,
    ];
    Errno::from_io_error(error).is_some_and(|error| of_content.contains(&error))
}

/// The error for a volume that cannot be given to the user of a container.
fn owner_change_error(error: io::Error, mount: &runtime::Mount, volume: &Path) -> RuntimeError {
    if is_content_error(&error) {
        let path = path(&mount.path).to_string_lossy().into_owned();
        return RuntimeError::InvalidMount {
            path,
            reason: format!("cannot change the owner of its files: {error}"),
        };
    }
    at("change the owner of", volume)(error)
}

/// Checks that a working directory that is not created exists in the image or in a volume.
fn check_directory(
    root: BorrowedFd<'_>,
    spec: &ContainerSpec,
    volumes: &[(&runtime::Mount, PathBuf)],
    host: Image<'_>,
) -> Result<(), RuntimeError> {
    let directory = path(&spec.directory);
    let within = volumes.iter().filter_map(|(mount, contents)| {
        Some((contents.as_path(), directory.strip_prefix(path(&mount.path)).ok()?))
    });
    // The innermost of nested mounts is visible.
    let within = within.min_by_key(|(_, inside)| inside.as_os_str().len());
    let there = match (within, find_fresh(directory)) {
        _ if !directory.is_absolute() => false,
        (None, Some(there)) => there,
        (None, None) if spec.root == Root::Host => host.has_directory(directory),
        (None, None) => mounts::open_in(root, directory, OFlags::PATH | OFlags::DIRECTORY).is_ok(),
        (Some((volume, inside)), _) => {
            let opened = rustix::fs::open(volume, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let opened = opened.map_err(|error| at("open", volume)(error.into()))?;
            mounts::open_in(opened.as_fd(), inside, OFlags::PATH | OFlags::DIRECTORY).is_ok()
        }
    };
    let missing = || RuntimeError::DirectoryMissing(directory.to_string_lossy().into_owned());
    if there { Ok(()) } else { Err(missing()) }
}

impl Host {
    /// Reads the intent of a process, if it is readable.
    pub(super) fn intent(process: &Process) -> Result<Option<Intent>, RuntimeError> {
        Self::read_intent(process, paths::INTENT)
    }

    /// Whether a process is or was to be the main process of its container.
    pub(super) fn is_main(process: &Process) -> Result<bool, RuntimeError> {
        for name in [paths::STARTED, paths::INTENT, paths::REVOKED] {
            if let Some(intent) = Self::read_intent(process, name)? {
                return Ok(intent.joins.is_none() && !intent.isolated);
            }
        }
        // Without a readable intent, nothing joined a container.
        Ok(true)
    }

    /// Reads the intent of a process that was started, if it is readable.
    pub(super) fn taken_intent(process: &Process) -> Result<Option<Intent>, RuntimeError> {
        Self::read_intent(process, paths::STARTED)
    }

    fn read_intent(process: &Process, name: &str) -> Result<Option<Intent>, RuntimeError> {
        let path = process.file(name);
        let contents = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
        Ok(contents.and_then(|contents| serde_json::from_slice(&contents).ok()))
    }
}
