//! Volumes on the host: directories, and copy-on-write children of them.
//!
//! A child is an overlay over the contents of its parent. It is mounted on first use, also after a
//! reboot. The overlay of a grandchild names all layers below it, because overlays cannot be nested
//! deeply. If there are too many layers, or no overlays, the child is a copy.
//!
//! Overlays are mounted `volatile`: neither a sync in a container nor an unmount waits for the
//! worker's whole disk. So after a crash of the machine, all contents count as suspect.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use domain::{ArtifactId, VolumeHandle};
use runtime::{Layer, Notes, RuntimeError, VolumeSource};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::filesystem::{self, at};
use super::mounts::{self, MountEntry, Overlay, Upper};
use super::tree_copy::{copy_files, copy_tree};
use super::unprivileged;
use super::user_namespace::Range;
use crate::util::keyed_locks::lock;

/// Name prefixes of volumes in creation and in destruction.
const UNFINISHED: [&str; 2] = [".new-", ".gone-"];

/// The method for copy-on-write children.
#[derive(Debug)]
enum CopyOnWrite {
    Overlay {
        options: &'static [&'static str],
    },
    /// A copy, with the reason.
    Copy(String),
}

/// In the directory of a volume: its directories that became other volumes, one file for each.
const GIVEN: &str = "given";

/// In the directory of a volume: the bytes on the disk that were copied into its top layer when it
/// was created.
const COPIED: &str = "copied";

/// With these options, a change of owner does not copy the contents up.
const METACOPY: &[&str] = &["volatile", "index=off", "redirect_dir=on", "metacopy=on"];
/// Options in the user namespace of an ordinary user, who cannot write `trusted` attributes.
const UNPRIVILEGED: [&[&str]; 2] = [&["volatile", "index=off", "userxattr"], &["index=off", "userxattr"]];
/// Options for older kernels, and for still older ones.
const PLAIN: [&[&str]; 2] = [&["volatile", "index=off"], &["index=off"]];

#[derive(Debug)]
pub(super) struct Volumes {
    directory: PathBuf,
    copy_on_write: CopyOnWrite,
    /// The reason why containers cannot see mapped owners of volumes, if they cannot.
    fixed_owners_reason: Option<String>,
    /// For each volume that is a layer of others: the volumes directly above it.
    children: Mutex<HashMap<VolumeHandle, HashSet<VolumeHandle>>>,
}

impl Volumes {
    /// Detects the method for children, and removes incomplete volumes of a crash as far as
    /// possible.
    pub(super) fn open(state_dir: &Path, mounted: &[MountEntry]) -> Result<Self, RuntimeError> {
        let directory = state_dir.join("volumes");
        filesystem::make_directory(&directory).map_err(at("make", &directory))?;
        let mut left = Vec::new();
        for entry in fs::read_dir(&directory).map_err(at("list", &directory))? {
            let entry = entry.map_err(at("list", &directory))?;
            if entry.file_name().to_string_lossy().starts_with('.') {
                left.push(entry.path());
            }
        }
        let stale = mounted.iter().rev().map(|mount| &mount.at).filter(|at| at.starts_with(&directory));
        for path in stale {
            let volume = path.parent().filter(|volume| volume.parent() == Some(&directory));
            if volume.is_none_or(|volume| left.iter().any(|left| left == volume)) {
                mounts::unmount(path).map_err(at("unmount", path))?;
            }
        }
        left.iter().for_each(|path| filesystem::remove_or_leave(path));
        let copy_on_write = probe(&directory).map_err(at("test overlays in", &directory))?;
        let owners = if unprivileged::is_active() {
            Err(io::Error::other("the worker runs as an ordinary user"))
        } else {
            probe_owners(&directory, copy_on_write.options())
        };
        let fixed_owners_reason = owners.err().map(|error| error.to_string());
        let volumes = Self { directory, copy_on_write, fixed_owners_reason, children: Mutex::default() };
        for child in volumes.list()? {
            if let Some(parent) = volumes.parent(child)? {
                lock(&volumes.children).entry(parent).or_default().insert(child);
            }
        }
        Ok(volumes)
    }

    /// Whether the file system supports the upper layer of an overlay.
    pub(super) fn overlays(&self) -> bool {
        matches!(self.copy_on_write, CopyOnWrite::Overlay { .. })
    }

    /// The mount options of overlays. `None`: overlays are not supported.
    pub(super) fn overlay_options(&self) -> Option<&'static [&'static str]> {
        self.copy_on_write.options()
    }

    /// The reason why containers cannot see mapped owners of volumes. `None`: they can.
    pub(super) fn fixed_owners_reason(&self) -> Option<&str> {
        self.fixed_owners_reason.as_deref()
    }

    /// The method for children, as text for people.
    pub(super) fn copy_on_write(&self) -> String {
        match &self.copy_on_write {
            CopyOnWrite::Overlay { options: METACOPY } => "overlay, with metacopy".to_owned(),
            CopyOnWrite::Overlay { .. } if unprivileged::is_active() => {
                "overlay of an ordinary user".to_owned()
            }
            CopyOnWrite::Overlay { .. } => "overlay; the kernel does not support metacopy".to_owned(),
            CopyOnWrite::Copy(why) => format!("copy: cannot use overlays: {why}"),
        }
    }

    fn volume(&self, handle: VolumeHandle) -> PathBuf {
        self.directory.join(handle.to_string())
    }

    fn unfinished(&self, handle: VolumeHandle) -> [PathBuf; 2] {
        UNFINISHED.map(|prefix| self.directory.join(format!("{prefix}{handle}")))
    }

    pub(super) fn list(&self) -> Result<Vec<VolumeHandle>, RuntimeError> {
        let mut handles = filesystem::handles_in(&self.directory, &UNFINISHED)?;
        handles.sort_unstable();
        handles.dedup();
        Ok(handles)
    }

    pub(super) fn create(&self, handle: VolumeHandle, source: &VolumeSource) -> Result<(), RuntimeError> {
        let volume = self.volume(handle);
        if filesystem::exists(&volume).map_err(at("check", &volume))? {
            return Ok(());
        }
        let [new, _] = self.unfinished(handle);
        let made = self
            .fill(handle, &new, source)
            .and_then(|()| fs::rename(&new, &volume).map_err(at("make", &volume)));
        if made.is_err() {
            // The error matters more than the incomplete volume, which the next attempt or opening
            // removes.
            if let Err(error) = filesystem::remove_tree(&new) {
                tracing::warn!(volume.handle = %handle, %error, "cannot remove an incomplete volume");
            }
            self.unregister_child(handle);
        }
        made
    }

    fn fill(&self, handle: VolumeHandle, new: &Path, source: &VolumeSource) -> Result<(), RuntimeError> {
        filesystem::remove_tree(new).map_err(at("remove", new))?;
        let make = |name: &str| {
            let path = new.join(name);
            fs::create_dir(&path).map_err(at("make", &path)).map(|()| path)
        };
        fs::create_dir(new).map_err(at("make", new))?;
        let contents = make("contents")?;
        let note_copied = |bytes: u64| {
            let path = new.join(COPIED);
            fs::write(&path, bytes.to_string()).map_err(at("write", &path))
        };
        let (parent, names) = match source {
            VolumeSource::Empty => return Ok(()),
            VolumeSource::CopyOnWrite { parent } => (*parent, &[][..]),
            VolumeSource::CopyOnWriteLinked { parent, names } => (*parent, &names[..]),
            VolumeSource::Copy { original } => {
                let from = self.directory(*original)?;
                return note_copied(copy_tree(&from, &contents).map_err(at("copy", &from))?);
            }
            VolumeSource::WorkerProvided(what) => {
                return Err(RuntimeError::Unsupported(format!("a host worker does not provide {what:?}")));
            }
        };
        let layers = layers(&self.directory, parent)?;
        let max_layers = mounts::max_layers().map_err(at("test overlays below", new))?;
        if !self.overlays() || layers.len() >= max_layers {
            let from = self.directory(parent)?;
            return note_copied(copy_tree(&from, &contents).map_err(at("copy", &from))?);
        }
        let (upper, _) = (make("upper")?, make("work")?);
        // The root of the topmost layer is the visible root.
        let top = layers.first().map_or(&contents, |layer| layer);
        copy_owner_and_mode(&upper, top).map_err(at("make", &upper))?;
        if !names.is_empty() {
            // An overlay copies a file up under one name, which breaks its hard links. A file that
            // is already in the top layer stays one file.
            let from = self.directory(parent)?;
            note_copied(copy_files(&from, &upper, names).map_err(at("copy", &from))?)?;
        }
        let path = new.join("parent");
        fs::write(&path, parent.to_string()).map_err(at("write", &path))?;
        lock(&self.children).entry(parent).or_default().insert(handle);
        Ok(())
    }

    /// Returns the bytes on the disk that were copied into the top layer of a volume when it was
    /// created.
    pub(super) fn copied(&self, handle: VolumeHandle) -> Result<u64, RuntimeError> {
        let path = self.volume(handle).join(COPIED);
        let text = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
        Ok(text.and_then(|text| String::from_utf8(text).ok()?.parse().ok()).unwrap_or(0))
    }

    /// Removes a destroyed volume from the children of its parent.
    fn unregister_child(&self, child: VolumeHandle) {
        lock(&self.children).retain(|_, children| {
            children.remove(&child);
            !children.is_empty()
        });
    }

    fn parent(&self, handle: VolumeHandle) -> Result<Option<VolumeHandle>, RuntimeError> {
        parent(&self.volume(handle))
    }

    /// Stores the artifact of a volume beside its contents.
    pub(super) fn note_artifact(
        &self,
        handle: VolumeHandle,
        artifact: ArtifactId,
    ) -> Result<(), RuntimeError> {
        let path = self.existing_path(handle)?.join("artifact");
        fs::write(&path, artifact.to_string()).map_err(at("write", &path))
    }

    pub(super) fn notes(&self, handle: VolumeHandle) -> Result<Notes, RuntimeError> {
        let path = self.existing_path(handle)?.join("artifact");
        let artifact = filesystem::read_if_exists(&path).map_err(at("read", &path))?;
        let artifact = artifact.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
        Ok(Notes { parent: self.parent(handle)?, artifact })
    }

    fn existing_path(&self, handle: VolumeHandle) -> Result<PathBuf, RuntimeError> {
        let volume = self.volume(handle);
        let exists = filesystem::exists(&volume).map_err(at("check", &volume))?;
        exists.then_some(volume).ok_or(RuntimeError::VolumeNotFound(handle))
    }

    /// The directory of a volume in the mount namespace of the machine.
    pub(super) fn directory(&self, handle: VolumeHandle) -> Result<PathBuf, RuntimeError> {
        self.view(handle, true)
    }

    /// The upper layer of a child that is an overlay.
    pub(super) fn layer(&self, handle: VolumeHandle) -> Result<Option<Layer>, RuntimeError> {
        let volume = self.existing_path(handle)?;
        let (Some(parent), CopyOnWrite::Overlay { options }) = (parent(&volume)?, &self.copy_on_write) else {
            return Ok(None);
        };
        let user_attributes = options.contains(&"userxattr");
        Ok(Some(Layer { parent, upper: volume.join("upper"), user_attributes }))
    }

    /// The directory of a volume that a container writes to. Later writes of the container may be
    /// visible there or not.
    pub(super) fn directory_while_written(&self, handle: VolumeHandle) -> Result<PathBuf, RuntimeError> {
        self.view(handle, false)
    }

    fn view(&self, handle: VolumeHandle, writable: bool) -> Result<PathBuf, RuntimeError> {
        let volume = self.volume(handle);
        let contents = volume.join("contents");
        if !filesystem::exists(&contents).map_err(at("check", &contents))? {
            return Err(RuntimeError::VolumeNotFound(handle));
        }
        if self.parent(handle)?.is_none() {
            return Ok(contents);
        }
        if mounts::is_mount_point(&contents).map_err(at("check", &contents))? {
            return Ok(contents);
        }
        let CopyOnWrite::Overlay { options } = &self.copy_on_write else {
            return Err(RuntimeError::Unsupported(format!("volume {handle}, which needs overlays")));
        };
        let layers = layers(&self.directory, handle)?;
        let mount = overlay(&layers, writable, options, mounts::CONFINED)
            .map_err(at("mount the layers of", &volume))?;
        mounts::attach_at(mount.as_fd(), &contents).map_err(at("mount at", &contents))?;
        Ok(contents)
    }

    /// Records that a directory of a volume became another volume, for processes that look into a
    /// container after its end. A full disk must not prevent the move.
    fn note_given(&self, from: VolumeHandle, path: &Path, into: VolumeHandle) {
        let notes = self.volume(from).join(GIVEN);
        let written = filesystem::make_directory(&notes)
            .and_then(|()| fs::write(notes.join(into.to_string()), path.as_os_str().as_bytes()));
        if let Err(error) = written {
            tracing::debug!(path = %notes.display(), %error, "cannot record that a directory became an output");
        }
    }

    /// Moves a directory of one volume into another, empty volume.
    ///
    /// The mark is written before the rename. So a repeated call after a crash can distinguish a
    /// moved directory from one that never existed.
    pub(super) fn take(
        &self,
        from: VolumeHandle,
        path: &Path,
        into: VolumeHandle,
    ) -> Result<(), RuntimeError> {
        let (source, target) = (self.directory(from)?, self.directory(into)?);
        let mark = self.volume(into).join("taken");
        let missing = || RuntimeError::OutputMissing(path.to_string_lossy().into_owned());
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(missing()) };

        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |directory: BorrowedFd<'_>, path: &Path| match openat2(
            directory,
            path,
            flags,
            Mode::empty(),
            resolve,
        ) {
            Ok(opened) => Ok(Some(opened)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
            Err(error) => Err(at("open", &source.join(path))(error.into())),
        };
        let root = rustix::fs::open(&source, flags, Mode::empty())
            .map_err(|error| at("open", &source)(error.into()))?;
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let parent = open(root.as_fd(), parent)?;
        let there = match &parent {
            Some(parent) => open(parent.as_fd(), Path::new(name))?,
            None => None,
        };
        let (Some(parent), Some(_)) = (parent, there) else {
            let taken = filesystem::exists(&mark).map_err(at("check", &mark))?;
            return if taken { Ok(()) } else { Err(missing()) };
        };
        fs::write(&mark, b"").map_err(at("write", &mark))?;
        self.note_given(from, path, into);
        match rustix::fs::renameat(&parent, name, rustix::fs::CWD, &target) {
            Ok(()) => Ok(()),
            // The volume has a separate mount.
            Err(Errno::XDEV) => {
                copy_tree(&source.join(path), &target).map(drop).map_err(at("copy", &source.join(path)))
            }
            Err(error) => Err(at("take", &source.join(path))(error.into())),
        }
    }

    /// Unmounts a volume from the namespace of the machine, because it changes elsewhere.
    pub(super) fn unmount(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        let contents = self.volume(handle).join("contents");
        mounts::unmount(&contents).map_err(at("unmount", &contents))
    }

    /// Unmounts all volumes except these.
    pub(super) fn unmount_all_but(&self, used: &HashSet<VolumeHandle>) -> Result<(), RuntimeError> {
        for handle in self.list()? {
            if !used.contains(&handle) {
                self.unmount(handle)?;
            }
        }
        Ok(())
    }

    pub(super) fn destroy(&self, handle: VolumeHandle) -> Result<(), RuntimeError> {
        if lock(&self.children).contains_key(&handle) {
            return Err(RuntimeError::HasChildren(handle));
        }
        let volume = self.volume(handle);
        let [new, gone] = self.unfinished(handle);
        if filesystem::exists(&volume).map_err(at("check", &volume))? {
            self.unmount(handle)?;
            filesystem::remove_tree(&gone).map_err(at("remove", &gone))?;
            fs::rename(&volume, &gone).map_err(at("remove", &volume))?;
        }
        for path in [gone, new] {
            filesystem::remove_tree(&path).map_err(at("remove", &path))?;
        }
        self.unregister_child(handle);
        Ok(())
    }
}

impl CopyOnWrite {
    fn options(&self) -> Option<&'static [&'static str]> {
        match self {
            Self::Overlay { options } => Some(options),
            Self::Copy(_) => None,
        }
    }
}

/// The directories of a volume in `directory` that became other volumes.
pub(super) fn given(directory: &Path, handle: VolumeHandle) -> io::Result<Vec<(PathBuf, VolumeHandle)>> {
    let notes = directory.join(handle.to_string()).join(GIVEN);
    let entries = match fs::read_dir(&notes) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut given = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Some(into) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        given.push((PathBuf::from(OsString::from_vec(fs::read(entry.path())?)), into));
    }
    Ok(given)
}

/// The layers of a volume in `directory`, topmost first.
pub(super) fn layers(directory: &Path, handle: VolumeHandle) -> Result<Vec<PathBuf>, RuntimeError> {
    let mut layers = Vec::new();
    let mut next = Some(handle);
    while let Some(handle) = next {
        let volume = directory.join(handle.to_string());
        if !filesystem::exists(&volume).map_err(at("check", &volume))? {
            return Err(RuntimeError::VolumeNotFound(handle));
        }
        next = parent(&volume)?;
        layers.push(volume.join(if next.is_some() { "upper" } else { "contents" }));
    }
    Ok(layers)
}

/// Creates the overlay of the layers of a child without attaching it. Only one such mount at a time
/// may be writable.
pub(super) fn overlay(
    layers: &[PathBuf],
    writable: bool,
    options: &[impl AsRef<str>],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let options: Vec<_> = options.iter().map(AsRef::as_ref).collect();
    let (Some((upper, lower)), true) = (layers.split_first(), writable) else {
        let options: Vec<_> = options.into_iter().filter(|option| *option != "volatile").collect();
        return Overlay { lower: layers, upper: None, options: &options, attributes }.make();
    };
    let work = upper.with_file_name("work");
    remove_volatile_mark(&work)?;
    let upper = Some(Upper { upper, work: &work });
    Overlay { lower, upper, options: &options, attributes }.make()
}

/// The parent of the volume in the directory `volume`.
fn parent(volume: &Path) -> Result<Option<VolumeHandle>, RuntimeError> {
    let path = volume.join("parent");
    let Some(text) = filesystem::read_if_exists(&path).map_err(at("read", &path))? else { return Ok(None) };
    let parent = String::from_utf8(text).ok().and_then(|text| text.parse().ok());
    // The file was written before the volume got its name, so only a crash of the machine can have
    // truncated it.
    parent
        .map(Some)
        .ok_or_else(|| RuntimeError::Other(format!("cannot parse {}: it names no volume", path.display())))
}

/// Gives a directory the owner and the mode of another.
pub(super) fn copy_owner_and_mode(directory: &Path, model: &Path) -> io::Result<()> {
    let model = fs::metadata(model)?;
    std::os::unix::fs::chown(directory, Some(model.uid()), Some(model.gid()))?;
    fs::set_permissions(directory, model.permissions())
}

/// Removes the mark of a `volatile` mount, which prevents another mount. The callers decide whether
/// the contents are valid after a crash.
pub(super) fn remove_volatile_mark(work: &Path) -> io::Result<()> {
    filesystem::remove_tree(&work.join("work/incompat"))
}

/// Tests which kind of overlay works: creates a child and reads through it.
fn probe(directory: &Path) -> io::Result<CopyOnWrite> {
    let place = directory.join(".probe");
    filesystem::remove_tree(&place)?;
    let names = ["lower", "upper", "work", "merged"];
    fs::create_dir(&place)?;
    let [lower, upper, work, merged] = names.map(|name| place.join(name));
    for path in [&lower, &upper, &work, &merged] {
        fs::create_dir(path)?;
    }
    fs::write(lower.join("file"), "below")?;
    let attempt = |options: &'static [&'static str]| {
        remove_volatile_mark(&work)?;
        let (lower, attributes) = (std::slice::from_ref(&lower), mounts::CONFINED);
        let upper = Some(Upper { upper: &upper, work: &work });
        let mount = Overlay { lower, upper, options, attributes }.make()?;
        mounts::attach_at(mount.as_fd(), &merged)?;
        drop(mount);
        let works = fs::write(merged.join("file"), "above").and_then(|()| fs::read(merged.join("file")));
        mounts::unmount(&merged)?;
        works.map(|_| CopyOnWrite::Overlay { options })
    };
    if unprivileged::is_active() {
        let found = attempt(UNPRIVILEGED[0]).or_else(|_| attempt(UNPRIVILEGED[1]));
        filesystem::remove_tree(&place)?;
        return Ok(found.unwrap_or_else(|error| CopyOnWrite::Copy(error.to_string())));
    }
    let found = attempt(METACOPY).or_else(|_| attempt(PLAIN[0])).or_else(|_| attempt(PLAIN[1]));
    filesystem::remove_tree(&place)?;
    Ok(found.unwrap_or_else(|error| CopyOnWrite::Copy(error.to_string())))
}

/// Tests whether a container can see mapped owners, as a supervisor does: changes a file through
/// layers with mapped owners.
fn probe_owners(directory: &Path, options: Option<&[&str]>) -> io::Result<()> {
    let place = directory.join(".probe");
    filesystem::remove_tree(&place)?;
    let names = ["volumes", "volumes/lower", "volumes/upper", "volumes/work", "mapped", "merged"];
    fs::create_dir(&place)?;
    names.iter().try_for_each(|name| fs::create_dir(place.join(name)))?;
    fs::write(place.join("volumes/lower/file"), "below")?;
    let range = Range::of(domain::ContainerHandle::new());
    let (mapped, merged) = (place.join("mapped"), place.join("merged"));
    let changed = (|| {
        let mount = mounts::clone_of(&place.join("volumes"), mounts::CONFINED)?;
        mounts::map_owners(mount.as_fd(), range.namespace()?.as_fd())?;
        mounts::attach_at(mount.as_fd(), &mapped)?;
        let _root_guard = range.act_as_root()?;
        let Some(options) = options else { return fs::write(mapped.join("lower/new"), "") };
        let (lower, attributes) = (&[mapped.join("lower")], mounts::CONFINED);
        let upper = Some(Upper { upper: &mapped.join("upper"), work: &mapped.join("work") });
        let overlay = Overlay { lower, upper, options, attributes }.make()?;
        mounts::attach_at(overlay.as_fd(), &merged)?;
        fs::write(merged.join("file"), "above")?;
        fs::write(merged.join("new"), "")?;
        let owners = [merged.join("file"), place.join("volumes/upper/file"), place.join("volumes/upper/new")]
            .map(|path| fs::metadata(path).map(|found| found.uid()));
        match owners {
            [Ok(seen), Ok(0), Ok(0)] if Ok(seen) == range.id(0).map_err(|_| ()) => Ok(()),
            _ => Err(io::Error::other("an overlay of layers with mapped owners shows wrong owners")),
        }
    })();
    mounts::unmount(&merged)?;
    mounts::unmount(&mapped)?;
    filesystem::remove_tree(&place)?;
    changed
}
