//! Mounts: the mount table, overlays and bind mounts.
//!
//! All mounts are attached through descriptors. So no path is resolved twice, and no path leaves
//! the tree in which it is resolved.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatVfsMountFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};

/// One line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MountEntry {
    pub(super) at: PathBuf,
    pub(super) kind: String,
    /// Options of the file system.
    pub(super) options: String,
    /// Whether the mount is read-only, independent of the file system.
    pub(super) read_only: bool,
}

/// All mounts in the namespace of this process, in mount order.
pub(super) fn mount_table() -> io::Result<Vec<MountEntry>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse_mounted).collect())
}

fn parse_mounted(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let at = unescape(fields.nth(4)?);
    let read_only = fields.next()?.split(|byte| *byte == b',').any(|option| option == b"ro");
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = String::from_utf8_lossy(rest.next()?).into_owned();
    let options = String::from_utf8_lossy(rest.nth(1)?).into_owned();
    Some(MountEntry { at, kind, options, read_only })
}

/// Decodes the mount table's three octal digits for spaces, tabs, line ends and backslashes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                path.push(byte);
                rest = &after[3..];
            }
            _ => {
                path.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(path).into()
}

/// Whether a path is a mount point.
pub(super) fn is_mount_point(path: &Path) -> io::Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let stat = rustix::fs::statx(CWD, path, flags, StatxFlags::TYPE)?;
    Ok(stat.stx_attributes.contains(rustix::fs::StatxAttributes::MOUNT_ROOT))
}

/// An overlay that is not attached.
pub(super) struct Overlay<'a> {
    /// Lower layers, topmost first.
    pub(super) lower: &'a [PathBuf],
    /// The writable layer. `None`: the overlay is read-only.
    pub(super) upper: Option<Upper<'a>>,
    /// Options: a name, or `name=value`.
    pub(super) options: &'a [&'a str],
    pub(super) attributes: MountAttrFlags,
}

/// The writable layer of an overlay. Both directories must be on one mount, and belong to one
/// overlay at a time.
#[derive(Clone, Copy)]
pub(super) struct Upper<'a> {
    pub(super) upper: &'a Path,
    pub(super) work: &'a Path,
}

impl Overlay<'_> {
    /// Creates the overlay without attaching it.
    pub(super) fn make(&self) -> io::Result<OwnedFd> {
        self.make_with(overlays_append()?)
    }

    fn make_with(&self, append: bool) -> io::Result<OwnedFd> {
        let mut opened = Vec::new();
        // The kernel removes backslashes from some paths and not from others, so a path with a
        // backslash is passed as a descriptor.
        let mut layer = |path: &Path| {
            if path.as_os_str().as_bytes().contains(&b'\\') {
                short_path(path, &mut opened)
            } else {
                Ok(path.to_owned())
            }
        };
        let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(&fs, "source", "gantry")?;
        if append {
            for lower in self.lower {
                rustix::mount::fsconfig_set_string(&fs, "lowerdir+", layer(lower)?)?;
            }
        } else {
            // The string has at most 255 bytes, so the paths must be short.
            let mut opened = Vec::new();
            let layers = self
                .lower
                .iter()
                .map(|lower| short_path(lower, &mut opened))
                .collect::<Result<Vec<_>, _>>()?;
            let layers: Vec<_> = layers.iter().map(|layer| layer.as_os_str()).collect();
            rustix::mount::fsconfig_set_string(&fs, "lowerdir", layers.join(OsStr::new(":")))?;
        }
        if let Some(Upper { upper, work }) = self.upper {
            rustix::mount::fsconfig_set_string(&fs, "upperdir", layer(upper)?)?;
            rustix::mount::fsconfig_set_string(&fs, "workdir", layer(work)?)?;
        }
        for option in self.options {
            match option.split_once('=') {
                Some((name, value)) => rustix::mount::fsconfig_set_string(&fs, name, value)?,
                None => rustix::mount::fsconfig_set_flag(&fs, *option)?,
            }
        }
        rustix::mount::fsconfig_create(&fs)?;
        let mount = rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, self.attributes)?;
        let read_only = rustix::fs::fstatvfs(&mount)?.f_flag.contains(StatVfsMountFlags::RDONLY);
        if read_only && self.upper.is_some() && !self.attributes.contains(MountAttrFlags::MOUNT_ATTR_RDONLY) {
            // The kernel reports this error if it cannot create a directory in `work`.
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(mount)
    }
}

/// A short path without special characters for a directory. It is valid while the descriptors in
/// `opened` are open.
fn short_path(directory: &Path, opened: &mut Vec<OwnedFd>) -> io::Result<PathBuf> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let descriptor = rustix::fs::open(directory, flags, Mode::empty())?;
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd()).into();
    opened.push(descriptor);
    Ok(path)
}

/// Whether layers can be added to an overlay one by one, as since Linux 6.5. Older kernels accept
/// one short string with all layers.
fn overlays_append() -> io::Result<bool> {
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    match rustix::mount::fsconfig_set_string(&fs, "lowerdir+", "/") {
        Ok(()) => Ok(true),
        Err(Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Maximum number of lower layers of an overlay on this kernel.
pub(super) fn max_layers() -> io::Result<usize> {
    Ok(if overlays_append()? { MAX_LAYERS } else { MAX_SHORT_LAYERS })
}

/// Maximum number of layers that are added one by one. Mounting more takes too long.
const MAX_LAYERS: usize = 100;
/// Maximum number of layers whose paths in `/proc/self/fd` fit into one string.
const MAX_SHORT_LAYERS: usize = 12;

/// No devices and no set-user-ID programs, for all file systems that containers write to.
pub(super) const CONFINED: MountAttrFlags =
    MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);

/// Creates a tmpfs without attaching it.
pub(super) fn tmpfs(options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    new("tmpfs", options, attributes)
}

/// Creates a file system of the kernel without attaching it. An option with an empty value is a
/// flag.
pub(super) fn new(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&fs, "source", kind)?;
    for (name, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(&fs, *name)?;
        } else {
            rustix::mount::fsconfig_set_string(&fs, *name, *value)?;
        }
    }
    rustix::mount::fsconfig_create(&fs)?;
    Ok(rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Clones the mount at `path`, without the mounts below it, and without attaching it. The clone has
/// `attributes` in addition.
pub(super) fn clone_of(path: &Path, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = rustix::mount::open_tree(CWD, path, flags)?;
    change_attributes(tree.as_fd(), attributes, MountAttrFlags::empty(), None)?;
    Ok(tree)
}

/// Clones the mount at `path` with the mounts below it, and without attaching it. All of them have
/// `attributes` in addition.
pub(super) fn clone_with_children(path: &Path, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = rustix::mount::open_tree(CWD, path, flags)?;
    let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
    set_attributes(tree.as_fd(), flags, attributes, MountAttrFlags::empty(), None)?;
    Ok(tree)
}

/// Maps the owners of an unattached mount by the user namespace `users`.
///
/// Errors: `EINVAL` if the file system does not support this, such as an overlay.
pub(super) fn map_owners(mount: BorrowedFd<'_>, users: BorrowedFd<'_>) -> io::Result<()> {
    change_attributes(mount, MountAttrFlags::empty(), MountAttrFlags::empty(), Some(users))
}

/// Makes the mount at `path` writable.
pub(super) fn make_writable(path: &Path) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mount = rustix::fs::open(path, flags, Mode::empty())?;
    change_attributes(mount.as_fd(), MountAttrFlags::empty(), MountAttrFlags::MOUNT_ATTR_RDONLY, None)
}

fn change_attributes(
    mount: BorrowedFd<'_>,
    set: MountAttrFlags,
    clear: MountAttrFlags,
    users: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    set_attributes(mount, libc::AT_EMPTY_PATH, set, clear, users)
}

fn set_attributes(
    mount: BorrowedFd<'_>,
    flags: libc::c_int,
    set: MountAttrFlags,
    clear: MountAttrFlags,
    users: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    #[repr(C)]
    struct Attributes {
        set: u64,
        clear: u64,
        propagation: u64,
        user_namespace: u64,
    }
    let [mut set, clear] = [set, clear].map(|flags| u64::from(flags.bits()));
    let user_namespace = users.map_or(0, |users| users.as_raw_fd().unsigned_abs().into());
    if users.is_some() {
        set |= libc::MOUNT_ATTR_IDMAP;
    }
    let attributes = Attributes { set, clear, propagation: 0, user_namespace };
    // SAFETY: the path is a C string, and `attributes` has the stated layout and size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attributes,
            size_of::<Attributes>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a mount at the directory that `target` refers to.
pub(super) fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, "", target, "", flags)?)
}

/// Attaches a mount at a path of the worker.
pub(super) fn attach_at(mount: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, "", CWD, path, flags)?)
}

/// Unmounts all mounts at `path`. Succeeds if there is none. A mount in use ends with its users.
pub(super) fn unmount(path: &Path) -> io::Result<()> {
    loop {
        let flags = UnmountFlags::NOFOLLOW;
        match rustix::mount::unmount(path, flags) {
            Ok(()) => {}
            Err(Errno::BUSY) => rustix::mount::unmount(path, flags | UnmountFlags::DETACH)?,
            // The path is not a mount point, or does not exist.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Opens `path` as seen with `root` as the root directory. No symbolic link leads out of `root`.
pub(super) fn open_in(root: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    loop {
        let flags = flags | OFlags::CLOEXEC;
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            // A concurrent rename disturbed the lookup.
            Err(Errno::AGAIN) => {}
            result => return Ok(result?),
        }
    }
}

/// Opens or creates a directory within `root`, with its parents. Returns also whether it was
/// created.
pub(super) fn directory_in(root: BorrowedFd<'_>, path: &Path) -> io::Result<(OwnedFd, bool)> {
    match open_in(root, path, OFlags::PATH | OFlags::DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => return Ok((result?, false)),
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let (parent, _) = directory_in(root, parent)?;
    rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok((rustix::fs::openat(&parent, name, flags, Mode::empty())?, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_table_line_is_parsed() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mounted = MountEntry {
            at: "/mnt 2".into(),
            kind: "ext3".into(),
            options: "rw,errors=continue".into(),
            read_only: false,
        };
        assert_eq!(parse_mounted(line), Some(mounted));
        let line = br"36 35 98:0 /mnt1 /mnt2 ro,noatime - ext3 /dev/root rw";
        assert!(parse_mounted(line).is_some_and(|mounted| mounted.read_only));
        assert_eq!(parse_mounted(b""), None);
        assert_eq!(parse_mounted(b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 -"), None);
    }

    /// Tests the string that kernels before 6.5 require.
    #[test]
    fn overlay_takes_all_layers_in_one_string() -> io::Result<()> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return Ok(());
        }
        let directory = tempfile::Builder::new().prefix(&"long-".repeat(20)).tempdir()?;
        let layers: Vec<_> = (0..MAX_SHORT_LAYERS).map(|n| directory.path().join(n.to_string())).collect();
        for layer in &layers {
            fs::create_dir(layer)?;
            fs::write(layer.join(layer.file_name().unwrap_or_default()), "")?;
        }
        let overlay = Overlay { lower: &layers, upper: None, options: &[], attributes: CONFINED };
        for append in [true, false] {
            let mount = overlay.make_with(append)?;
            let merged = format!("/proc/self/fd/{}", mount.as_raw_fd());
            assert_eq!(fs::read_dir(merged)?.count(), layers.len());
        }
        assert_eq!(max_layers()?, MAX_LAYERS, "the kernel of this test is newer");
        Ok(())
    }

    #[test]
    fn overlay_takes_paths_of_any_name() -> io::Result<()> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return Ok(());
        }
        let directory = tempfile::tempdir()?;
        for name in ["back\\slash", "octal\\040", "com,ma", "co:lon", "two words", "line\nend", "equals=x"] {
            let place = directory.path().join(name);
            let [lower, upper, work] = ["lower", "upper", "work"].map(|layer| place.join(layer));
            [&lower, &upper, &work].into_iter().try_for_each(fs::create_dir_all)?;
            fs::write(lower.join("below"), "")?;
            fs::write(upper.join("above"), "")?;
            for append in [true, false] {
                let (lower, upper) =
                    (std::slice::from_ref(&lower), Some(Upper { upper: &upper, work: &work }));
                let overlay = Overlay { lower, upper, options: &[], attributes: CONFINED };
                let mount = overlay.make_with(append)?;
                let merged = format!("/proc/self/fd/{}", mount.as_raw_fd());
                assert_eq!(fs::read_dir(merged)?.count(), 2, "{name}");
            }
        }
        Ok(())
    }

    #[test]
    fn links_stay_inside_the_root() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        std::os::unix::fs::symlink("/etc", directory.path().join("out"))?;
        std::os::unix::fs::symlink("../../..", directory.path().join("up"))?;
        let root = rustix::fs::open(directory.path(), OFlags::PATH, Mode::empty())?;
        let found = directory_in(root.as_fd(), Path::new("/out/passwd")).map(|_| ());
        assert!(found.is_err(), "the target of the link is outside the root");
        assert!(directory_in(root.as_fd(), Path::new("/up/new"))?.1);
        assert!(directory.path().join("new").is_dir());
        assert!(directory_in(root.as_fd(), Path::new("a/b/c"))?.1);
        assert!(!directory_in(root.as_fd(), Path::new("/a/b"))?.1);
        Ok(())
    }
}
