//! The root file system of a container, in a mount namespace of the container and its supervisor.
//!
//! All mounts end with the supervisor, and none is visible to the worker. Paths of a container are
//! resolved with its root as the root, before any process of the container runs. So no link in an
//! image leads a mount elsewhere.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use domain::VolumeHandle;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;

use super::container_init::ContainerInit;
use super::oci_spec::hostname;
use super::{StartError, hosts};
use crate::runtimes::host::containers::ROOT;
use crate::runtimes::host::host_image::{self, Image};
use crate::runtimes::host::mounts::{self, MountEntry};
use crate::runtimes::host::network;
use crate::runtimes::host::network::slirp::{self, Uplink};
use crate::runtimes::host::persisted::{self, Container, Launch, OwnNetwork};
use crate::runtimes::host::unprivileged;
use crate::runtimes::host::user_namespace;
use crate::runtimes::host::volumes;

/// The supervisor's tmpfs in the directory of the container.
const PRIVATE: &str = "run";

/// In the tmpfs: the layer below the root layer of the container.
const LOWER: &str = "lower";

const RESOLVER: &str = "/etc/resolv.conf";

/// In the tmpfs: the worker's volumes and the container's directory, with mapped owners.
const VOLUMES: &str = "volumes";
const OWN: &str = "own";
/// In the tmpfs: volumes with several layers, each under its handle.
const MERGED: &str = "merged";
/// In the tmpfs: the layers of copies.
const COPIES: &str = "copies";

/// Directories of the supervisor.
pub(super) struct SupervisorDirs {
    /// The container's root.
    pub(super) root: PathBuf,
    /// libcontainer's configuration.
    pub(super) bundle: PathBuf,
    /// libcontainer's state.
    pub(super) state: PathBuf,
    /// The user namespace of the container. `None`: ids are those of the machine.
    pub(super) users: Option<OwnedFd>,
    /// The program that connects the network. `None`: no program is needed.
    pub(super) uplink: Option<Uplink>,
}

/// The directory for mounts of the supervisor.
pub(super) fn private(launch: &Launch) -> PathBuf {
    launch.container_dir.join(PRIVATE)
}

/// Unmounts everything below `private` if it contains volumes with several layers.
pub(super) fn release_volumes(private: &Path) -> io::Result<()> {
    let has_volumes = fs::read_dir(private.join(MERGED)).is_ok_and(|mut merged| merged.next().is_some());
    // Unmounting takes milliseconds, and no task waits for the other mounts.
    if has_volumes { mounts::unmount(private) } else { Ok(()) }
}

/// Enters new namespaces, and creates the container's root in them.
pub(super) fn make(launch: &Launch, container: &Container) -> Result<SupervisorDirs, StartError> {
    let at =
        |operation: &str, path: &Path| StartError::while_doing(format!("{operation} {}", path.display()));
    let mounted = mounts::mount_table().map_err(StartError::while_doing("list the mounts"))?;
    let joined = launch
        .network_of
        .as_deref()
        .map(ContainerInit::open)
        .transpose()
        .map_err(StartError::while_doing("find the container whose network is joined"))?;
    let names = match &joined {
        Some(joined) => Names::of(joined)
            .map_err(StartError::while_doing("read /etc of the container whose network is joined"))?,
        // Computed in the network of the machine, which decides which servers are reachable.
        None => Names { resolver: resolver(container, launch.network_pool), hosts: None },
    };
    let uplink = enter_namespaces(launch, container, joined.as_ref())
        .map_err(StartError::while_doing("enter new namespaces"))?;
    drop(joined);

    let users = launch
        .range
        .map(user_namespace::Range::namespace)
        .transpose()
        .map_err(StartError::while_doing("create a user namespace"))?;
    let private = private(launch);
    let _root_guard = launch
        .range
        .map(user_namespace::Range::act_as_root)
        .transpose()
        .map_err(StartError::while_doing("act as root"))?;
    make_private(&private).map_err(at("mount on", &private))?;
    let place = |name: &str| private.join(name);
    let sources = MountSources {
        volumes: users.as_ref().map_or(launch.state_dir.join("volumes"), |_| place(VOLUMES)),
        own: users.as_ref().map_or(launch.container_dir.clone(), |_| place(OWN)),
        merged: place(MERGED),
        overlay_options: launch.mounts_layers.then_some(&*launch.overlay_options),
        written: container.written().collect(),
        copies: launch.isolated.then(|| place(COPIES)),
    };
    if let Some(users) = &users {
        let mapped = [
            (launch.state_dir.join("volumes"), &sources.volumes),
            (launch.container_dir.clone(), &sources.own),
        ];
        for (from, to) in mapped {
            map(&from, to, users.as_fd()).map_err(at("map the owners of", &from))?;
        }
    }
    let places =
        SupervisorDirs { root: place("root"), bundle: place("bundle"), state: place("state"), users, uplink };

    let root = match container.root {
        None => worker_root(launch, container, &sources, &private, &places)?,
        Some(image) => image_root(container, image, &sources, &places)?,
    };
    if let Some(contents) = names.resolver {
        write_in_etc(root.as_fd(), "resolv.conf", &contents)
            .map_err(StartError::while_doing("write /etc/resolv.conf"))?;
    }
    let hosts = hosts::contents(root.as_fd(), &hostname(container), &container.local_names, names.hosts);
    if let Some(hosts) = hosts.map_err(StartError::while_doing("read /etc/hosts"))? {
        write_in_etc(root.as_fd(), "hosts", &hosts).map_err(StartError::while_doing("write /etc/hosts"))?;
    }
    fresh_directories(root.as_fd()).map_err(StartError::while_doing("mount /tmp and /run"))?;
    // libcontainer would create them as a user that the mount does not map, which fails.
    for path in ["/proc", "/sys", "/dev"].map(Path::new) {
        mounts::directory_in(root.as_fd(), path).map_err(at("make", path))?;
    }

    let directory = container.directory.as_path();
    let make_directory = || {
        let (opened, made) = mounts::directory_in(root.as_fd(), directory).map_err(at("make", directory))?;
        if made {
            give_to_user(opened.as_fd(), launch, container).map_err(at("own", directory))
        } else {
            Ok(())
        }
    };
    if container.make_directory {
        make_directory()?;
    }
    for mount in &container.mounts {
        let path = mount.path.as_path();
        let (target, _) = mounts::directory_in(root.as_fd(), path).map_err(at("make", path))?;
        let read_only =
            if mount.read_only { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
        let contents = sources.contents(mount.volume)?;
        let shown =
            mounts::clone_of(&contents, mounts::CONFINED | read_only).map_err(at("show", &contents))?;
        mounts::attach(shown.as_fd(), target.as_fd()).map_err(at("mount a volume on", path))?;
        if sources.copies.is_some() {
            show_given(mount, &sources, root.as_fd())?;
        }
    }
    if container.make_directory {
        // A volume may have been mounted over it.
        make_directory()?;
    }
    drop(root);
    detach_volumes(&mounted, &launch.state_dir).map_err(StartError::while_doing("unmount volumes"))?;
    Ok(places)
}

/// Mounts copies of the directories of a mounted volume that became outputs.
fn show_given(
    mount: &persisted::Mount,
    sources: &MountSources<'_>,
    root: BorrowedFd<'_>,
) -> Result<(), StartError> {
    if mount.read_only {
        return Ok(());
    }
    let given = volumes::given(&sources.volumes, mount.volume);
    for (path, output) in given.map_err(StartError::while_doing("list the outputs"))? {
        // A crash of the machine may have truncated the note.
        if path.as_os_str().is_empty() {
            continue;
        }
        let path = mount.path.as_path().join(path);
        let at = |path: &Path| StartError::while_doing(format!("show the output {}", path.display()));
        // The output may be deleted, now or before.
        let is_deleted = || !sources.volumes.join(output.to_string()).exists();
        let contents = match sources.contents(output) {
            Err(_) if is_deleted() => continue,
            contents => contents?,
        };
        let (target, _) = mounts::directory_in(root, &path).map_err(at(&path))?;
        let shown = mounts::clone_of(&contents, mounts::CONFINED).map_err(at(&path))?;
        mounts::attach(shown.as_fd(), target.as_fd()).map_err(at(&path))?;
    }
    Ok(())
}

/// Creates the root of an image, which the container may write to. No directory of the worker is
/// visible in it.
fn image_root(
    container: &Container,
    image: VolumeHandle,
    sources: &MountSources<'_>,
    places: &SupervisorDirs,
) -> Result<OwnedFd, StartError> {
    let contents = sources.contents(image)?.join(ROOT);
    let at =
        |operation: &str, path: &Path| StartError::while_doing(format!("{operation} {}", path.display()));
    let root = mounts::clone_of(&contents, attributes(container)).map_err(at("mount", &contents))?;
    mounts::attach_at(root.as_fd(), &places.root).map_err(at("mount on", &places.root))?;
    Ok(root)
}

/// Creates the root of the image `host`, which the container may write to. Visible parts of the
/// worker are bound read-only.
fn worker_root(
    launch: &Launch,
    container: &Container,
    sources: &MountSources<'_>,
    private: &Path,
    places: &SupervisorDirs,
) -> Result<OwnedFd, StartError> {
    let at =
        |operation: &str, path: &Path| StartError::while_doing(format!("{operation} {}", path.display()));
    let image = Image { named: &launch.host_paths };
    let own = private.join(LOWER);
    image.make_own(&own).map_err(StartError::while_doing("create the image `host`"))?;
    let layer = if launch.upper_in_memory { private } else { &sources.own };
    let layers = [layer.join("upper"), own];
    // A root layer never outlives the boot, so no sync must wait for the disk.
    let options: &[&str] = if unprivileged::is_active() { &["volatile", "userxattr"] } else { &["volatile"] };
    let root = match &sources.copies {
        Some(copies) => copy_of(&copies.join("root"), layers.to_vec(), options, attributes(container)),
        None => volumes::overlay(&layers, true, options, attributes(container)),
    };
    let root = root.map_err(StartError::while_doing("mount the root"))?;
    mounts::attach_at(root.as_fd(), &places.root).map_err(at("mount on", &places.root))?;

    // The rights of an ordinary user cover no other owners anyway.
    let unmapped = (!unprivileged::is_active())
        .then(user_namespace::without_owners)
        .transpose()
        .map_err(StartError::while_doing("create a user namespace"))?;
    let bound = image.bound_paths().map_err(StartError::while_doing("list the parts of the image `host`"))?;
    for path in bound {
        let attributes = mounts::CONFINED | MountAttrFlags::MOUNT_ATTR_RDONLY;
        let tree = match mounts::clone_of(&path, attributes) {
            // An ordinary user cannot see what is below a mount.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && unprivileged::is_active() => {
                mounts::clone_with_children(&path, attributes)
            }
            cloned => cloned,
        };
        let tree = tree.map_err(at("show", &path))?;
        let mapped = match unmapped.as_ref().map(|users| mounts::map_owners(tree.as_fd(), users.as_fd())) {
            Some(Ok(())) => true,
            // The worker runs in a container, whose image has no secrets of a machine.
            Some(Err(error)) if error.raw_os_error() == Some(libc::EINVAL) => false,
            Some(Err(error)) => return Err(at("show", &path)(error)),
            None => false,
        };
        let target = mounts::open_in(root.as_fd(), &path, OFlags::PATH).map_err(at("show", &path))?;
        mounts::attach(tree.as_fd(), target.as_fd()).map_err(at("show", &path))?;
        let closed = if mapped || !path.starts_with("/etc") {
            Vec::new()
        } else {
            host_image::unreadable(&path).map_err(at("check", &path))?
        };
        let ours =
            launch.hidden.iter().filter_map(|ours| Some(path.join(host_image::find_inside(&path, ours)?)));
        for hidden in closed.into_iter().chain(ours) {
            replace_with_empty(root.as_fd(), &hidden).map_err(at("hide", &hidden))?;
        }
    }
    Ok(root)
}

/// Mount attributes of a container's root. Only root of the machine may create and use devices on
/// it.
fn attributes(container: &Container) -> MountAttrFlags {
    if container.privileged { MountAttrFlags::empty() } else { mounts::CONFINED }
}

/// Source directories of the mounts of a container.
struct MountSources<'a> {
    /// The volumes.
    volumes: PathBuf,
    /// The container's directory.
    own: PathBuf,
    /// The directory for mounts of volumes with several layers.
    merged: PathBuf,
    /// Mount options of volumes with several layers. `None`: the worker has mounted them.
    overlay_options: Option<&'a [String]>,
    /// The volumes that the container may write to.
    written: Vec<VolumeHandle>,
    /// The directory for the layers of copies. `None`: the container writes to its volumes.
    copies: Option<PathBuf>,
}

impl MountSources<'_> {
    /// The directory of a volume's contents. Several layers are mounted once, even if the container
    /// mounts the volume several times.
    fn contents(&self, handle: VolumeHandle) -> Result<PathBuf, StartError> {
        let contents = self.volumes.join(handle.to_string()).join("contents");
        if let Some(copies) = &self.copies {
            return self.copy(copies, handle);
        }
        let Some(options) = self.overlay_options else { return Ok(contents) };
        let layers = volumes::layers(&self.volumes, handle)
            .map_err(StartError::while_doing(format!("list the layers of volume {handle}")))?;
        let merged = self.merged.join(handle.to_string());
        if layers.len() < 2 {
            return Ok(contents);
        }
        let mount = || {
            if merged.exists() {
                return Ok(());
            }
            fs::create_dir(&merged)?;
            let writable = self.written.contains(&handle);
            let overlay = volumes::overlay(&layers, writable, options, MountAttrFlags::empty())?;
            mounts::attach_at(overlay.as_fd(), &merged)
        };
        mount().map_err(StartError::while_doing(format!("mount the layers of volume {handle}")))?;
        Ok(merged)
    }
}

impl MountSources<'_> {
    /// A copy-on-write copy of a volume, which ends with the supervisor.
    fn copy(&self, copies: &Path, handle: VolumeHandle) -> Result<PathBuf, StartError> {
        let merged = self.merged.join(handle.to_string());
        if merged.exists() {
            return Ok(merged);
        }
        let below = match self.overlay_options {
            Some(_) => volumes::layers(&self.volumes, handle)
                .map_err(StartError::while_doing(format!("list the layers of volume {handle}")))?,
            None => vec![self.volumes.join(handle.to_string()).join("contents")],
        };
        let mount = || {
            fs::create_dir(&merged)?;
            let options = self.overlay_options.unwrap_or_default();
            let own = copies.join(handle.to_string());
            let overlay = copy_of(&own, below, options, MountAttrFlags::empty())?;
            mounts::attach_at(overlay.as_fd(), &merged)
        };
        mount().map_err(StartError::while_doing(format!("copy volume {handle}")))?;
        Ok(merged)
    }
}

/// An overlay whose upper layer is in the new directory `own`, with the owner and the mode of the
/// topmost layer below it.
fn copy_of(
    own: &Path,
    below: Vec<PathBuf>,
    options: &[impl AsRef<str>],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let upper = own.join("upper");
    fs::create_dir(own)?;
    fs::create_dir(&upper)?;
    fs::create_dir(own.join("work"))?;
    if let Some(model) = below.first() {
        volumes::copy_owner_and_mode(&upper, model)?;
    }
    let layers: Vec<_> = std::iter::once(upper).chain(below).collect();
    volumes::overlay(&layers, true, options, attributes)
}

/// Binds `from` to `to` with mapped owners.
fn map(from: &Path, to: &Path, users: BorrowedFd<'_>) -> io::Result<()> {
    let tree = mounts::clone_of(from, MountAttrFlags::empty())?;
    mounts::map_owners(tree.as_fd(), users)?;
    mounts::attach_at(tree.as_fd(), to)
}

/// Enters a new mount namespace, and the network of `joined` or a new one as the container
/// requests. Returns the program that connects the network, if one is needed.
fn enter_namespaces(
    launch: &Launch,
    container: &Container,
    joined: Option<&ContainerInit>,
) -> io::Result<Option<Uplink>> {
    let by_program = container.network == OwnNetwork::Private && unprivileged::is_active();
    let own_network = container.network != OwnNetwork::Host && joined.is_none();
    let machine = network::Machine::open()?;
    let mut namespaces = UnshareFlags::NEWNS;
    if own_network && !by_program {
        namespaces |= UnshareFlags::NEWNET;
    }
    // SAFETY: this process has one thread, so no thread stays in another namespace.
    unsafe { rustix::thread::unshare_unsafe(namespaces)? };
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    if let Some(joined) = joined {
        joined.enter_network()?;
        return Ok(None);
    }
    let mut uplink = None;
    match (container.network, launch.network_pool) {
        (OwnNetwork::Host, _) => return Ok(None),
        (OwnNetwork::None, _) => network::only_loopback()?,
        (OwnNetwork::Private, Some(pool)) if by_program => uplink = Some(slirp::connect(pool)?),
        (OwnNetwork::Private, Some(pool)) => network::connect(&machine, pool, &launch.cgroup)?,
        (OwnNetwork::Private, None) => return Err(io::Error::other("this worker has no private networks")),
    }
    network::open_low_ports();
    Ok(uplink)
}

fn make_private(at: &Path) -> io::Result<()> {
    let memory = mounts::tmpfs(&[("mode", "0700")], MountAttrFlags::empty())?;
    mounts::attach_at(memory.as_fd(), at)?;
    for name in ["root", "bundle", "state", LOWER, "upper", "work", VOLUMES, OWN, MERGED, COPIES] {
        // The container's `/` has the mode of this directory.
        let mode = if matches!(name, LOWER | "upper") { 0o755 } else { 0o700 };
        fs::DirBuilder::new().mode(mode).create(at.join(name))?;
    }
    Ok(())
}

/// Replaces the entry at `path` by an empty file or directory, if it exists.
fn replace_with_empty(root: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let target = match mounts::open_in(root, path, OFlags::PATH) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        result => result?,
    };
    let stat = rustix::fs::fstat(&target)?;
    let attributes = mounts::CONFINED | MountAttrFlags::MOUNT_ATTR_RDONLY;
    let empty = if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
        mounts::tmpfs(&[("size", "4k"), ("mode", "0755")], attributes)?
    } else {
        mounts::clone_of(Path::new("/dev/null"), attributes)?
    };
    mounts::attach(empty.as_fd(), target.as_fd())
}

fn fresh_directories(root: BorrowedFd<'_>) -> io::Result<()> {
    // Relative to the machine's memory. A memory limit of the container includes it.
    for (path, mode, size) in [("/tmp", "1777", "25%"), ("/run", "0755", "5%")] {
        let (target, _) = mounts::directory_in(root, Path::new(path))?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let memory = mounts::tmpfs(&[("mode", mode), ("size", size)], attributes)?;
        mounts::attach(memory.as_fd(), target.as_fd())?;
        if path == "/run" {
            rustix::fs::mkdirat(&memory, "lock", Mode::from_raw_mode(0o1777))?;
            rustix::fs::chmodat(&memory, "lock", Mode::from_raw_mode(0o1777), AtFlags::empty())?;
        }
    }
    Ok(())
}

/// Files for name resolution that replace those of the image.
struct Names {
    resolver: Option<Vec<u8>>,
    hosts: Option<Vec<u8>>,
}

impl Names {
    /// The files of a running container. Its processes may have changed them.
    fn of(joined: &ContainerInit) -> io::Result<Self> {
        let root = joined.root()?;
        Ok(Self {
            resolver: hosts::read(root.as_fd(), RESOLVER)?,
            hosts: hosts::read(root.as_fd(), hosts::HOSTS)?,
        })
    }
}

/// The `resolv.conf` of a container. `None`: the container has no DNS, or the machine has no such
/// file.
fn resolver(container: &Container, pool: Option<network::Pool>) -> Option<Vec<u8>> {
    match container.network {
        OwnNetwork::Private => pool.map(|pool| network::resolver::configuration(pool).into_bytes()),
        OwnNetwork::Host => fs::read(RESOLVER).ok(),
        OwnNetwork::None => None,
    }
}

fn write_in_etc(root: BorrowedFd<'_>, name: &str, contents: &[u8]) -> io::Result<()> {
    // An image whose path is not a directory gets no DNS.
    let Ok((etc, _)) = mounts::directory_in(root, Path::new("/etc")) else { return Ok(()) };
    match rustix::fs::unlinkat(&etc, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&etc, name, flags, Mode::from_raw_mode(0o644))?;
    io::Write::write_all(&mut fs::File::from(file), contents)
}

/// Gives a directory to the container's user.
fn give_to_user(directory: BorrowedFd<'_>, launch: &Launch, container: &Container) -> io::Result<()> {
    let (uid, gid) =
        (Uid::from_raw(launch.id(container.user.uid)?), Gid::from_raw(launch.id(container.user.gid)?));
    Ok(rustix::fs::chownat(directory, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

/// Unmounts this namespace's copies of volume mounts, so that volumes can be destroyed while this
/// process lives.
fn detach_volumes(mounted: &[MountEntry], state_dir: &Path) -> io::Result<()> {
    let volumes = mounted.iter().rev().filter(|mount| mount.at.starts_with(state_dir.join("volumes")));
    volumes.map(|mount| mount.at.as_path()).try_for_each(mounts::unmount)
}
