//! Confinement of processes: root directory, mounts and user, in a mount namespace per process.
//!
//! Used only if the root of the container is a directory and the test is root. A top-level
//! directory that is empty and named like a directory of the machine shows that directory. So an
//! image of empty directories runs the programs of the machine.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Directories of the machine that an empty directory of an image shows.
const SHARED: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib64", "etc", "dev", "proc"];

struct Bind {
    from: CString,
    to: CString,
    read_only: bool,
}

/// User and groups of a process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Ids {
    user: u32,
    group: u32,
}

impl Ids {
    pub(super) const ROOT: Self = Self { user: 0, group: 0 };
}

/// Looks up `user` in the image: a name or number of a listed user, or two numbers. `None`: the
/// image has no such user.
pub(super) fn ids(root: Option<&Path>, user: &str) -> Option<Ids> {
    if user.is_empty() {
        return Some(Ids::ROOT);
    }
    let own = root.map(|root| root.join("etc/passwd")).filter(|path| path.exists());
    let users = std::fs::read_to_string(own.unwrap_or_else(|| "/etc/passwd".into())).unwrap_or_default();
    let (name, group) = user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
    let known =
        users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find_map(|line| match line[..] {
            [known, _, uid, gid, ..] if known == name || uid == name => {
                Some(Ids { user: uid.parse().ok()?, group: gid.parse().ok()? })
            }
            _ => None,
        });
    let found = known.or_else(|| Some(Ids { user: name.parse().ok()?, group: 0 }))?;
    match group {
        Some(group) => Some(Ids { group: group.parse().ok()?, ..found }),
        None => Some(found),
    }
}

/// The root, the mounts and the user of a process.
pub(super) struct Confined {
    root: CString,
    binds: Vec<Bind>,
    dir: CString,
    ids: Ids,
}

fn c(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// The root directory of a container, if its processes can be confined to it.
pub(super) fn root(spec: &Value) -> Option<PathBuf> {
    let root = PathBuf::from(spec["rootfs"].as_str()?.strip_prefix("raw://")?);
    (root.is_dir() && rustix::process::geteuid().is_root()).then_some(root)
}

impl Confined {
    /// Creates the mount points and `dir`.
    pub(super) fn new(root: &Path, mounts: &Value, dir: &str, ids: Ids) -> io::Result<Self> {
        let mut binds = Vec::new();
        for name in SHARED {
            let (shown, to) = (Path::new("/").join(name), root.join(name));
            let is_empty = std::fs::read_dir(&to).is_ok_and(|mut entries| entries.next().is_none());
            if is_empty && let Ok(shown) = shown.canonicalize() {
                binds.push(Bind { from: c(&shown)?, to: c(&to)?, read_only: false });
            }
        }
        let mut mounted: Vec<(PathBuf, PathBuf)> = Vec::new();
        // Maps a path of the container to the machine: to the nearest mount above it, or to the
        // root.
        let real = |mounted: &[(PathBuf, PathBuf)], inside: &Path| {
            let above =
                mounted.iter().rev().find_map(|(at, from)| Some(from.join(inside.strip_prefix(at).ok()?)));
            above.unwrap_or_else(|| root.join(inside.strip_prefix("/").unwrap_or(inside)))
        };
        for mount in mounts.as_array().into_iter().flatten() {
            let text = |name: &str| PathBuf::from(mount[name].as_str().unwrap_or_default());
            let (from, at) = (text("src_path"), text("dst_path"));
            std::fs::create_dir_all(real(&mounted, &at))?;
            let to = root.join(at.strip_prefix("/").unwrap_or(&at));
            let read_only = mount["mode"].as_u64() != Some(1);
            binds.push(Bind { from: c(&from)?, to: c(&to)?, read_only });
            mounted.push((at, from));
        }
        let dir = Path::new("/").join(dir);
        std::fs::create_dir_all(real(&mounted, &dir))?;
        Ok(Self { root: c(root)?, binds, dir: c(&dir)?, ids })
    }

    /// Must be called between fork and exec.
    pub(super) fn enter(&self) -> io::Result<()> {
        let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        let none = std::ptr::null();
        // SAFETY: all strings are NUL-terminated and outlive the calls. Each call is allowed
        // between fork and exec.
        unsafe {
            check(libc::unshare(libc::CLONE_NEWNS))?;
            check(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()))?;
            for Bind { from, to, read_only } in &self.binds {
                let flags = libc::MS_BIND | libc::MS_REC;
                check(libc::mount(from.as_ptr(), to.as_ptr(), none, flags, none.cast()))?;
                if *read_only {
                    let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
                    check(libc::mount(none, to.as_ptr(), none, flags, none.cast()))?;
                }
            }
            check(libc::chroot(self.root.as_ptr()))?;
            check(libc::chdir(self.dir.as_ptr()))?;
            if self.ids != Ids::ROOT {
                check(libc::setgroups(0, std::ptr::null()))?;
                check(libc::setgid(self.ids.group))?;
                check(libc::setuid(self.ids.user))?;
            }
        }
        Ok(())
    }
}
