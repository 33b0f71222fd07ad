//! The root file system of a container, made in a mount namespace that only its supervisor and it are in.
//!
//! Everything here is gone with the supervisor, however it ends: nothing is ever mounted where the worker could see it.
//! Paths of a container are resolved with its root as the root, before anything of the container runs, so that no link in
//! its image leads a mount elsewhere.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;

use super::Failed;
use crate::host::containers::ROOT;
use crate::host::image;
use crate::host::mounts::{self, Mounted, Overlay};
use crate::host::network;
use crate::host::record::{Container, Launch, OwnNetwork};
use crate::host::users::Users;

/// Where in the container's directory the supervisor's own file system of memory is.
const PRIVATE: &str = "run";

const RESOLVER: &str = "/etc/resolv.conf";

/// Directories of the supervisor.
pub(super) struct Places {
    /// The container's root.
    pub(super) root: PathBuf,
    /// libcontainer's configuration of it.
    pub(super) bundle: PathBuf,
    /// libcontainer's own state.
    pub(super) state: PathBuf,
}

/// Enters namespaces of its own, and makes the container's root there.
pub(super) fn make(launch: &Launch, container: &Container) -> Result<Places, Failed> {
    let at = |doing: &str, path: &Path| Failed::while_doing(format!("{doing} {}", path.display()));
    let mounted = mounts::mounted().map_err(Failed::while_doing("list what is mounted"))?;
    enter_namespaces(launch, container).map_err(Failed::while_doing("enter namespaces of its own"))?;

    let private = launch.container_dir.join(PRIVATE);
    make_private(&private).map_err(at("mount at", &private))?;
    let place = |name: &str| private.join(name);
    let places = Places { root: place("root"), bundle: place("bundle"), state: place("state") };

    let root = match container.root {
        None => worker_root(launch, container, &mounted, &private, &places)?,
        Some(image) => image_root(launch, container, image, &places)?,
    };
    if let Some(contents) = resolver(container) {
        write_resolver(root.as_fd(), contents.as_bytes())
            .map_err(Failed::while_doing("write /etc/resolv.conf"))?;
    }
    fresh_directories(root.as_fd()).map_err(Failed::while_doing("mount /tmp and /run"))?;

    let directory = container.directory.as_path();
    let make_directory = || {
        let (opened, made) = mounts::directory_in(root.as_fd(), directory).map_err(at("make", directory))?;
        if made { own(opened.as_fd(), container).map_err(at("own", directory)) } else { Ok(()) }
    };
    if container.make_directory {
        make_directory()?;
    }
    for mount in &container.mounts {
        let contents = volume(&launch.state_dir, &mount.volume);
        let path = mount.path.as_path();
        mounts::directory_in(root.as_fd(), path).map_err(at("make", path))?;
        bind(&contents, root.as_fd(), path, mount.read_only).map_err(at("mount a volume at", path))?;
    }
    if container.make_directory {
        // A volume may have been mounted over it.
        make_directory()?;
    }
    drop(root);
    forget_volumes(&mounted, &launch.state_dir).map_err(Failed::while_doing("unmount volumes"))?;
    Ok(places)
}

/// The root of an image: the container's own, to write to. Nothing of the worker is in it.
fn image_root(
    launch: &Launch,
    container: &Container,
    image: domain::VolumeHandle,
    places: &Places,
) -> Result<OwnedFd, Failed> {
    let contents = volume(&launch.state_dir, &image).join(ROOT);
    let at = |doing: &str, path: &Path| Failed::while_doing(format!("{doing} {}", path.display()));
    let root = mounts::clone_of(&contents, attributes(container)).map_err(at("mount", &contents))?;
    mounts::attach_at(root.as_fd(), &places.root).map_err(at("mount at", &places.root))?;
    Ok(root)
}

/// The worker's own root, with a layer for what is written, without what no container may see.
fn worker_root(
    launch: &Launch,
    container: &Container,
    mounted: &[Mounted],
    private: &Path,
    places: &Places,
) -> Result<OwnedFd, Failed> {
    let at = |doing: &str, path: &Path| Failed::while_doing(format!("{doing} {}", path.display()));
    let place = |name: &str| private.join(name);
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let hidden = image::hidden(&launch.hidden, &launch.homes, &Users { passwd: &passwd, group: "" });
    let mut mask = Mask::new(place("mask")).map_err(Failed::while_doing("look at the root"))?;
    let mut covered = Vec::new();
    for path in hidden {
        match mask.hide(&path) {
            Ok(true) => {}
            Ok(false) => covered.push(path),
            // Neither it nor the directory it would be in is there.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at("hide", &path)(error)),
        }
    }

    let lower = [mask.layer, PathBuf::from("/")];
    let root = mount_root(launch, &lower, private, attributes(container))
        .map_err(Failed::while_doing("mount the root"))?;
    mounts::attach_at(root.as_fd(), &places.root).map_err(at("mount at", &places.root))?;

    for path in image::below_root(mounted, &launch.hidden).bound {
        // A container has one of its own.
        if path == Path::new(RESOLVER) {
            continue;
        }
        // What cannot be bound is absent; the runtime has said so when it was opened.
        if bind(&path, root.as_fd(), &path, true).is_err() {
            continue;
        }
    }
    for path in &covered {
        cover(root.as_fd(), path).map_err(at("hide", path))?;
    }
    Ok(root)
}

/// How a container's root is mounted. Root of the machine may make devices on it; anybody else may not use them.
fn attributes(container: &Container) -> MountAttrFlags {
    if container.privileged { MountAttrFlags::empty() } else { mounts::CONFINED }
}

/// Where the contents of a volume are.
fn volume(state_dir: &Path, handle: &domain::VolumeHandle) -> PathBuf {
    state_dir.join("volumes").join(handle.to_string()).join("contents")
}

/// Enters namespaces of mounts and of the network, and connects the second as the container asks.
fn enter_namespaces(launch: &Launch, container: &Container) -> io::Result<()> {
    let own_network = container.network != OwnNetwork::Host;
    let machine = network::Machine::open()?;
    let mut namespaces = UnshareFlags::NEWNS;
    if own_network {
        namespaces |= UnshareFlags::NEWNET;
    }
    // SAFETY: this process has one thread, so none is left behind in another namespace.
    unsafe { rustix::thread::unshare_unsafe(namespaces)? };
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    match (container.network, launch.network_pool) {
        (OwnNetwork::Host, _) => Ok(()),
        (OwnNetwork::None, _) => network::only_loopback(),
        (OwnNetwork::Private, Some(pool)) => network::connect(&machine, pool, &launch.cgroup),
        (OwnNetwork::Private, None) => Err(io::Error::other("this machine has no private networks")),
    }
}

fn make_private(at: &Path) -> io::Result<()> {
    let memory = mounts::tmpfs(&[("mode", "0700")], MountAttrFlags::empty())?;
    mounts::attach_at(memory.as_fd(), at)?;
    for name in ["root", "bundle", "state", "mask", "upper", "work"] {
        // What is the container's `/` has the mode of one.
        let mode = if matches!(name, "mask" | "upper") { 0o755 } else { 0o700 };
        fs::DirBuilder::new().mode(mode).create(at.join(name))?;
    }
    Ok(())
}

/// A layer above the worker's root in which things are absent.
struct Mask {
    layer: PathBuf,
    /// The file system of the worker's root.
    device: u64,
    /// Directories that have been made in it: whether they are on that file system.
    made: HashMap<PathBuf, bool>,
}

impl Mask {
    fn new(layer: PathBuf) -> io::Result<Self> {
        Ok(Self {
            layer,
            device: fs::metadata("/")?.dev(),
            made: HashMap::from([(PathBuf::from("/"), true)]),
        })
    }

    /// Makes `path` absent. `false`: it is on another file system, which this layer is not above.
    fn hide(&mut self, path: &Path) -> io::Result<bool> {
        let (Some(parent), Ok(relative)) = (path.parent(), path.strip_prefix("/")) else { return Ok(true) };
        let within = self.directory(parent)?;
        if !within || fs::symlink_metadata(path).is_ok_and(|found| found.dev() != self.device) {
            return Ok(false);
        }
        let absent = self.layer.join(relative);
        let kind = rustix::fs::FileType::CharacterDevice;
        let whiteout =
            || rustix::fs::mknodat(rustix::fs::CWD, &absent, kind, Mode::empty(), rustix::fs::makedev(0, 0));
        match whiteout() {
            // A directory there holds what is absent below it; all of it is absent now.
            Err(rustix::io::Errno::EXIST) if fs::symlink_metadata(&absent)?.is_dir() => {
                fs::remove_dir_all(&absent)?;
                whiteout()?;
            }
            // Something above it is absent already, and it with it.
            Ok(()) | Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    }

    /// Makes a directory of this layer, which looks like the worker's own, for it stands before that.
    fn directory(&mut self, path: &Path) -> io::Result<bool> {
        if let Some(within) = self.made.get(path) {
            return Ok(*within);
        }
        let (Some(parent), Ok(relative)) = (path.parent(), path.strip_prefix("/")) else { return Ok(true) };
        let original = fs::symlink_metadata(path)?;
        let within = self.directory(parent)? && original.dev() == self.device;
        if within {
            let copy = self.layer.join(relative);
            match fs::DirBuilder::new().mode(0o700).create(&copy) {
                Ok(()) => {
                    std::os::unix::fs::chown(&copy, Some(original.uid()), Some(original.gid()))?;
                    fs::set_permissions(&copy, original.permissions())?;
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        self.made.insert(path.to_owned(), within);
        Ok(within)
    }
}

fn mount_root(
    launch: &Launch,
    lower: &[PathBuf],
    private: &Path,
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let layer = if launch.upper_in_memory { private } else { launch.container_dir.as_path() };
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    // What is written to a container's root never outlives the machine, so nobody waits for the disk because of it.
    crate::host::volumes::forget_volatile(&work)?;
    Overlay { lower, upper: &upper, work: &work, options: &["volatile"], attributes }.make()
}

/// Shows `from`, of the worker, at `path` of the container.
fn bind(from: &Path, root: BorrowedFd<'_>, path: &Path, read_only: bool) -> io::Result<()> {
    let target = mounts::open_in(root, path, OFlags::PATH)?;
    let read_only = if read_only { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
    let attributes = mounts::CONFINED | read_only;
    mounts::attach(mounts::clone_of(from, attributes)?.as_fd(), target.as_fd())
}

/// Puts something empty in the place of what is at `path`, if anything is.
fn cover(root: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let target = match mounts::open_in(root, path, OFlags::PATH) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        result => result?,
    };
    let stat = rustix::fs::fstat(&target)?;
    let empty = if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
        mounts::tmpfs(&[("size", "4k"), ("mode", "0755")], MountAttrFlags::MOUNT_ATTR_RDONLY)?
    } else {
        mounts::clone_of(Path::new("/dev/null"), MountAttrFlags::MOUNT_ATTR_RDONLY)?
    };
    mounts::attach(empty.as_fd(), target.as_fd())
}

fn fresh_directories(root: BorrowedFd<'_>) -> io::Result<()> {
    // Of the machine's memory. A memory limit of the container counts it too.
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

/// The `resolv.conf` of a container. `None`: it resolves no names, or the machine itself has none.
fn resolver(container: &Container) -> Option<String> {
    match container.network {
        OwnNetwork::Private => Some(network::resolver::configuration()),
        OwnNetwork::Host => fs::read_to_string(RESOLVER).ok(),
        OwnNetwork::None => None,
    }
}

fn write_resolver(root: BorrowedFd<'_>, contents: &[u8]) -> io::Result<()> {
    // An image in which this is no directory resolves no names.
    let Ok((etc, _)) = mounts::directory_in(root, Path::new("/etc")) else { return Ok(()) };
    match rustix::fs::unlinkat(&etc, "resolv.conf", AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&etc, "resolv.conf", flags, Mode::from_raw_mode(0o644))?;
    io::Write::write_all(&mut fs::File::from(file), contents)
}

/// Gives a directory to the container's user.
fn own(directory: BorrowedFd<'_>, container: &Container) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(container.user.uid), Gid::from_raw(container.user.gid));
    Ok(rustix::fs::chownat(directory, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

/// Lets go of the volumes' mounts that this namespace has copies of, so that they can be destroyed while this process lives.
fn forget_volumes(mounted: &[Mounted], state_dir: &Path) -> io::Result<()> {
    let volumes = mounted.iter().rev().filter(|mount| mount.at.starts_with(state_dir.join("volumes")));
    volumes.map(|mount| mount.at.as_path()).try_for_each(mounts::unmount)
}
