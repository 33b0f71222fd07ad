//! Containers of the fake worker: validation, and the files that a process sees.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use domain::workload::{Bytes, Limits, Network};
use domain::{ContainerHandle, VolumeHandle};
use runtime::{ContainerSpec, Root, RuntimeError};
use rustix::fs::OFlags;

use super::process::Process;
use super::programs::open_in;
use super::volumes::copy;

/// The working directory that is created if it is missing.
const WORKSPACE: &str = "/workspace";

/// The user of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) home: String,
}

/// The open ports of a network, each with the process that listens.
pub(super) type Ports = Arc<Mutex<BTreeMap<u16, Arc<Process>>>>;

/// A container, with the paths of its files on the host.
pub(super) struct Container {
    pub(super) spec: ContainerSpec,
    pub(super) user: User,
    pub(super) ports: Ports,
    root: PathBuf,
    /// Per volume: the path in the container, the path on the host, and whether the mount is
    /// read-only.
    mounts: Vec<(PathBuf, PathBuf, bool)>,
}

/// Converts bytes to text. Invalid UTF-8 is replaced.
pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn path(bytes: &Bytes) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

impl Container {
    /// Validates a container and creates its own files in `own`.
    ///
    /// `image` is the root file system of the worker.
    pub(super) fn make(
        handle: ContainerHandle,
        spec: ContainerSpec,
        (image, own): (&Path, &Path),
        volume: impl Fn(VolumeHandle) -> Result<PathBuf, RuntimeError>,
    ) -> Result<Self, RuntimeError> {
        let unsupported =
            |what: &str| Err(RuntimeError::Unsupported(format!("the fake worker does not support {what}")));
        if spec.privileged {
            return unsupported("privileged containers");
        }
        if spec.limits != Limits::default() {
            return unsupported("limits");
        }
        if spec.network != Network::Private {
            return unsupported("a choice of networks");
        }
        let seen = match spec.root {
            Root::Host => image.to_owned(),
            Root::Volume(root) => volume(root)?.join("rootfs"),
            Root::WholeVolume(root) => volume(root)?,
        };
        if !fs::symlink_metadata(&seen).is_ok_and(|found| found.is_dir()) {
            return Err(RuntimeError::InvalidImage("the volume has no directory `rootfs`".to_owned()));
        }
        let user = find_user(&seen, spec.user.as_deref())?;
        check_mounts(&seen, &spec)?;
        let mut mounts = Vec::new();
        for mount in &spec.mounts {
            mounts.push((path(&mount.path).to_owned(), volume(mount.volume)?, mount.read_only));
        }
        let must_make = must_make(&spec);
        let root = if spec.root == Root::Host { own.join(handle.to_string()) } else { seen.clone() };
        let made = Self { spec, user, ports: Ports::default(), root: seen, mounts };
        if !must_make && made.open(&made.directory(), OFlags::PATH | OFlags::DIRECTORY).is_err() {
            return Err(RuntimeError::DirectoryMissing(made.directory().display().to_string()));
        }
        let made = Self { root, ..made };
        made.fill(image, must_make).map_err(|error| RuntimeError::io("create a container", error))?;
        Ok(made)
    }

    fn fill(&self, image: &Path, must_make: bool) -> io::Result<()> {
        if self.spec.root == Root::Host {
            copy(image, &self.root)?;
        }
        let mut places: Vec<_> = self.mounts.iter().map(|(at, ..)| at.as_path()).collect();
        let directory = self.directory();
        if must_make {
            places.push(&directory);
        }
        for place in places {
            // Mount points that lie inside a volume are created in that volume.
            let (root, inside, read_only) = self.find(place, false);
            if read_only {
                continue;
            }
            let mut made = PathBuf::new();
            for part in inside.components() {
                made.push(part);
                if open_in(&root, &made, OFlags::PATH | OFlags::DIRECTORY).is_err() {
                    fs::create_dir(root.join(&made))?;
                }
            }
        }
        Ok(())
    }

    /// The working directory of the process.
    pub(super) fn directory(&self) -> PathBuf {
        path(&self.spec.directory).to_owned()
    }

    /// Finds the host directory that holds `path`, the path inside it, and whether it is read-only.
    /// With `itself`, a volume that is mounted at `path` counts.
    fn find(&self, path: &Path, itself: bool) -> (PathBuf, PathBuf, bool) {
        let path = self.directory().join(path);
        let within = self.mounts.iter().filter_map(|(at, volume, read_only)| {
            let inside =
                path.strip_prefix(at).ok().filter(|inside| itself || !inside.as_os_str().is_empty())?;
            Some((volume.clone(), inside.to_owned(), *read_only))
        });
        // The innermost of nested mounts is visible.
        let innermost = within.min_by_key(|(_, inside, _)| inside.as_os_str().len());
        innermost
            .unwrap_or_else(|| (self.root.clone(), path.strip_prefix("/").unwrap_or(&path).to_owned(), false))
    }

    /// Opens the file that the process sees at `path`.
    pub(super) fn open(&self, path: &Path, flags: OFlags) -> io::Result<File> {
        let (root, inside, read_only) = self.find(path, true);
        if read_only && flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        open_in(&root, &inside, flags)
    }

    /// Opens a port of the container's network.
    pub(super) fn listen(&self, port: u16, process: &Arc<Process>) {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner).insert(port, process.clone());
    }

    /// Whether a running process listens on a port of the container's network.
    pub(super) fn connect(&self, port: u16) -> bool {
        let ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        ports.get(&port).is_some_and(|process| process.lock().ended().is_none())
    }

    /// Removes the container's own files.
    pub(super) fn remove(&self) -> io::Result<()> {
        if self.spec.root == Root::Host { fs::remove_dir_all(&self.root) } else { Ok(()) }
    }
}

/// Whether a missing working directory is created.
fn must_make(spec: &ContainerSpec) -> bool {
    let directory = path(&spec.directory);
    directory == Path::new(WORKSPACE)
        || spec.mounts.iter().any(|mount| path(&mount.path).starts_with(directory))
}

fn check_mounts(root: &Path, spec: &ContainerSpec) -> Result<(), RuntimeError> {
    for (index, mount) in spec.mounts.iter().enumerate() {
        let at = path(&mount.path);
        let refuse = |why: &str| {
            Err(RuntimeError::InvalidMount { path: at.display().to_string(), reason: why.to_owned() })
        };
        let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !at.is_absolute() || !at.components().all(plain) || mount.path.contains(&0) {
            return refuse("the path is not absolute, or contains `.`, `..` or NUL");
        }
        if at == Path::new("/") {
            return refuse("the root cannot be a mount point");
        }
        if spec.mounts[..index].iter().any(|other| at == path(&other.path)) {
            return refuse("another volume is mounted at this path");
        }
        for parent in at.ancestors() {
            let inside = parent.strip_prefix("/").unwrap_or(parent);
            match open_in(root, inside, OFlags::PATH | OFlags::DIRECTORY) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    return refuse("a parent of the path is not a directory");
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Looks up `name`, `uid`, `name:group` or `uid:gid` in the image. `None` is root. A numeric id
/// that the image does not list is used as it is.
fn find_user(root: &Path, wanted: Option<&str>) -> Result<User, RuntimeError> {
    // An image may have no account files.
    let accounts = |file: &str| {
        let opened = open_in(root, Path::new(file), OFlags::RDONLY);
        opened.and_then(io::read_to_string).unwrap_or_default()
    };
    let (passwd, group) = (accounts("etc/passwd"), accounts("etc/group"));
    let line = |text: &str, key: &str| -> Option<Vec<String>> {
        let mut lines = text.lines().map(|line| line.split(':').map(str::to_owned).collect::<Vec<_>>());
        lines.find(|fields| fields.len() > 2 && (fields[0] == key || fields[2] == key))
    };
    let unknown = || RuntimeError::UserNotFound(wanted.unwrap_or_default().to_owned());
    let id = |fields: &Option<Vec<String>>, at: usize, key: &str| -> Result<u32, RuntimeError> {
        let known = fields.as_ref().and_then(|fields| fields.get(at)?.parse().ok());
        known.or_else(|| key.parse().ok()).ok_or_else(unknown)
    };
    let (name, own_group) = match wanted.unwrap_or("0").split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (wanted.unwrap_or("0"), None),
    };
    let account = line(&passwd, name);
    let gid = match own_group {
        Some(key) => id(&line(&group, key), 2, key)?,
        None => id(&account, 3, "0")?,
    };
    let home = account.as_ref().and_then(|fields| fields.get(5)).map_or("/", String::as_str).to_owned();
    Ok(User { uid: id(&account, 2, name)?, gid, home })
}
