//! Trees: copied whole, given to another owner.
//!
//! Both walk by descriptors and follow no link, for what they walk was written by somebody else and may change meanwhile.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn entries(directory: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if ![c".", c".."].contains(&entry.file_name()) {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

fn stat(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<Stat> {
    Ok(rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Gives a directory and everything in it to a user.
pub(super) fn own_tree(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let top = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
    own(top.as_fd(), uid, gid)
}

fn own(directory: BorrowedFd<'_>, uid: u32, gid: u32) -> io::Result<()> {
    let owner = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    for name in entries(directory)? {
        let found = stat(directory, &name)?;
        if FileType::from_raw_mode(found.st_mode).is_dir() {
            let below = rustix::fs::openat(directory, &name, DIRECTORY, Mode::empty())?;
            own(below.as_fd(), uid, gid)?;
        } else if (found.st_uid, found.st_gid) != (uid, gid) {
            rustix::fs::chownat(directory, &name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
    let found = rustix::fs::fstat(directory)?;
    if (found.st_uid, found.st_gid) != (uid, gid) {
        rustix::fs::fchown(directory, owner.0, owner.1)?;
    }
    Ok(())
}

/// Copies everything in `from` into the empty directory `to`, and gives that the owner, mode and times of `from`.
pub(super) fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    let source = rustix::fs::open(from, DIRECTORY, Mode::empty())?;
    let target = rustix::fs::open(to, DIRECTORY, Mode::empty())?;
    Copy { top: target.try_clone()?, links: HashMap::new() }.directory(
        source.as_fd(),
        target.as_fd(),
        Path::new(""),
    )
}

struct Copy {
    top: OwnedFd,
    /// Where in the copy the first name of each file with several is.
    links: HashMap<(u64, u64), std::path::PathBuf>,
}

impl Copy {
    fn directory(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
        use std::os::unix::ffi::OsStrExt;
        for name in entries(from)? {
            let found = stat(from, &name)?;
            let path = at.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
            if FileType::from_raw_mode(found.st_mode).is_dir() {
                rustix::fs::mkdirat(to, &name, Mode::RWXU)?;
                let source = rustix::fs::openat(from, &name, DIRECTORY, Mode::empty())?;
                let target = rustix::fs::openat(to, &name, DIRECTORY, Mode::empty())?;
                self.directory(source.as_fd(), target.as_fd(), &path)?;
            } else if let Some(first) =
                self.links.get(&(found.st_dev, found.st_ino)).filter(|_| found.st_nlink > 1)
            {
                rustix::fs::linkat(&self.top, first, to, &name, AtFlags::empty())?;
            } else {
                entry(from, to, &name, &found)?;
                self.links.insert((found.st_dev, found.st_ino), path);
            }
        }
        let found = rustix::fs::fstat(from)?;
        finish(from, to, &found)
    }
}

/// Copies what is no directory.
fn entry(from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &CStr, found: &Stat) -> io::Result<()> {
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => {
            // Should it have become a pipe meanwhile, nobody waits for its writer.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let target = rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?;
            let (mut source, mut target) = (File::from(source), File::from(target));
            // Shares the blocks where the file system can.
            if rustix::fs::ioctl_ficlone(&target, &source).is_err() {
                io::copy(&mut source, &mut target)?;
            }
            return finish(source.as_fd(), target.as_fd(), found);
        }
        FileType::Symlink => {
            let link = rustix::fs::readlinkat(from, name, Vec::new())?;
            rustix::fs::symlinkat(link, to, name)?;
        }
        kind => {
            let mode = Mode::from_raw_mode(found.st_mode);
            rustix::fs::mknodat(to, name, kind, mode, found.st_rdev)?;
        }
    }
    let owner = (Some(Uid::from_raw(found.st_uid)), Some(Gid::from_raw(found.st_gid)));
    rustix::fs::chownat(to, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(rustix::fs::utimensat(to, name, &times(found), AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Owner, then mode, which a change of owner may take back, then attributes and times.
fn finish(from: BorrowedFd<'_>, to: BorrowedFd<'_>, found: &Stat) -> io::Result<()> {
    rustix::fs::fchown(to, Some(Uid::from_raw(found.st_uid)), Some(Gid::from_raw(found.st_gid)))?;
    rustix::fs::fchmod(to, Mode::from_raw_mode(found.st_mode))?;
    attributes(from, to)?;
    Ok(rustix::fs::futimens(to, &times(found))?)
}

fn attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let mut names = vec![0; 65536];
    let length = match rustix::fs::flistxattr(from, &mut names[..]) {
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(()),
        result => result?,
    };
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 65536];
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        rustix::fs::fsetxattr(to, name, &value[..length], XattrFlags::empty())?;
    }
    Ok(())
}

fn times(found: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanoseconds).unwrap_or(0),
    };
    Timestamps {
        last_access: time(found.st_atime, found.st_atime_nsec),
        last_modification: time(found.st_mtime, found.st_mtime_nsec),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn a_copy_has_modes_links_and_times() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir_all(from.join("a/b"))?;
        fs::create_dir(&to)?;
        fs::write(from.join("a/file"), "contents")?;
        fs::set_permissions(from.join("a/file"), fs::Permissions::from_mode(0o751))?;
        fs::hard_link(from.join("a/file"), from.join("a/b/second"))?;
        symlink("../nowhere", from.join("a/b/link"))?;
        rustix::fs::mknodat(CWD, from.join("fifo"), FileType::Fifo, Mode::RUSR, 0)?;
        copy_tree(&from, &to)?;

        assert_eq!(fs::read_to_string(to.join("a/b/second"))?, "contents");
        let (first, second) = (fs::metadata(to.join("a/file"))?, fs::metadata(to.join("a/b/second"))?);
        assert_eq!(first.ino(), second.ino());
        assert_eq!(first.mode() & 0o7777, 0o751);
        assert_eq!(first.mtime_nsec(), fs::metadata(from.join("a/file"))?.mtime_nsec());
        assert_eq!(fs::read_link(to.join("a/b/link"))?, Path::new("../nowhere"));
        assert_eq!(fs::metadata(to.join("fifo"))?.mode() & libc::S_IFMT, libc::S_IFIFO);
        Ok(())
    }
}
