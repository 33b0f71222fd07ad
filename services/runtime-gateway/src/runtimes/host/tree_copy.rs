//! Copies of untrusted trees, and changes of their owner.
//!
//! Volumes and containers use this module. A container may have written a tree of any depth and
//! width. Therefore both operations use [`transfer::TreeWalk`], which bounds descriptors and
//! memory, follows no links and enters no mount points.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use transfer::{Descent, TreeWalk};

fn stat(directory: BorrowedFd<'_>, name: &[u8]) -> io::Result<Stat> {
    Ok(rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Changes the owner of a directory and all its contents. A directory is changed before its
/// contents, so that an overlay copies a lower layer up level by level.
pub(super) fn own_tree(path: &Path, uid: u32, gid: u32) -> io::Result<()> {
    let owner = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    let is_owned = |found: &Stat| (found.st_uid, found.st_gid) == (uid, gid);
    let own_directory = |directory: BorrowedFd<'_>| match rustix::fs::fstat(directory)? {
        found if is_owned(&found) => Ok::<_, io::Error>(()),
        _ => Ok(rustix::fs::fchown(directory, owner.0, owner.1)?),
    };
    let mut walk = TreeWalk::open(path)?;
    own_directory(walk.directory())?;
    loop {
        let Some(name) = walk.next_name()? else {
            if walk.leave()?.is_none() {
                return Ok(());
            }
            continue;
        };
        let found = stat(walk.directory(), &name)?;
        if FileType::from_raw_mode(found.st_mode).is_dir() {
            walk.enter(&name)?;
            own_directory(walk.directory())?;
        } else if !is_owned(&found) {
            rustix::fs::chownat(walk.directory(), &*name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)?;
        }
    }
}

/// Copies the contents of `from` into the empty directory `to`, which gets the owner, mode and
/// times of `from`. Returns the bytes on the disk of the copied files.
pub(super) fn copy_tree(from: &Path, to: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    let (mut source, mut target) = (TreeWalk::open(from)?, Descent::open(to)?);
    let mut links = Links::new(target.directory().try_clone_to_owned()?);
    loop {
        let Some(name) = source.next_name()? else {
            if target.is_root() {
                links.clear()?;
            }
            let found = rustix::fs::fstat(source.directory())?;
            finish(source.directory(), target.directory(), &found)?;
            if source.leave()?.is_none() {
                return Ok(bytes);
            }
            target.leave()?;
            continue;
        };
        let (directory, found) = (source.directory(), stat(source.directory(), &name)?);
        if FileType::from_raw_mode(found.st_mode).is_dir() {
            rustix::fs::mkdirat(target.directory(), &*name, Mode::RWXU)?;
            source.enter(&name)?;
            target.enter(&name)?;
        } else if found.st_nlink < 2 {
            bytes += entry(directory, target.directory(), &name, &found)?;
        } else if !links.link(target.directory(), &name, &found)? {
            bytes += entry(directory, target.directory(), &name, &found)?;
            links.remember(target.directory(), &name, &found)?;
        }
    }
}

/// Copies the files at `names` in `from`, with their directories, into `to`. Hard links in `names`
/// stay hard links. `names` must be in the order of a manifest, so that each directory is entered
/// once. Returns the bytes on the disk of the copied files.
pub(super) fn copy_files(from: &Path, to: &Path, names: &[PathBuf]) -> io::Result<u64> {
    let mut bytes = 0;
    let (mut source, mut target) = (Descent::open(from)?, Descent::open(to)?);
    let mut links = Links::new(target.directory().try_clone_to_owned()?);
    let mut current: Vec<&OsStr> = Vec::new();
    for path in names {
        let Some(name) = path.file_name() else { continue };
        let parent: Vec<_> = path.parent().unwrap_or(path).iter().collect();
        let common = current.iter().zip(&parent).take_while(|(here, there)| here == there).count();
        leave(&mut source, &mut target, current.len() - common)?;
        for directory in &parent[common..] {
            rustix::fs::mkdirat(target.directory(), *directory, Mode::RWXU)?;
            source.enter(directory.as_bytes())?;
            target.enter(directory.as_bytes())?;
        }
        current = parent;
        let (name, found) = (name.as_bytes(), stat(source.directory(), name.as_bytes())?);
        if found.st_nlink < 2 {
            bytes += entry(source.directory(), target.directory(), name, &found)?;
        } else if !links.link(target.directory(), name, &found)? {
            bytes += entry(source.directory(), target.directory(), name, &found)?;
            links.remember(target.directory(), name, &found)?;
        }
    }
    leave(&mut source, &mut target, current.len())?;
    links.clear()?;
    Ok(bytes)
}

/// Leaves directories whose copies are complete.
fn leave(source: &mut Descent, target: &mut Descent, levels: usize) -> io::Result<()> {
    for _ in 0..levels {
        let found = rustix::fs::fstat(source.directory())?;
        finish(source.directory(), target.directory(), &found)?;
        source.leave()?;
        target.leave()?;
    }
    Ok(())
}

/// Copied files with further names. Each has an extra name in a directory at the top of the copy.
/// The path of its first name may exceed the limit of the kernel.
struct Links {
    top: OwnedFd,
    /// Created for the first such file.
    directory: Option<(String, OwnedFd)>,
    /// For each file, its name in the directory, and the number of its names that are not yet
    /// copied.
    known: HashMap<(u64, u64), (u64, u64)>,
    next: u64,
}

impl Links {
    fn new(top: OwnedFd) -> Self {
        Self { top, directory: None, known: HashMap::new(), next: 0 }
    }

    /// Links another name of a copied file. `false`: the file was not copied yet.
    fn link(&mut self, to: BorrowedFd<'_>, name: &[u8], found: &Stat) -> io::Result<bool> {
        let file = (found.st_dev, found.st_ino);
        let (Some((_, directory)), Some((known, left))) = (&self.directory, self.known.get_mut(&file)) else {
            return Ok(false);
        };
        let known = known.to_string();
        if *left > 1 {
            *left -= 1;
            rustix::fs::linkat(directory, &*known, to, name, AtFlags::empty())?;
        } else {
            // This is the last name. Removing the extra name first keeps the link count within the
            // limit, which the original may use fully.
            self.known.remove(&file);
            rustix::fs::renameat(directory, &*known, to, name)?;
        }
        Ok(true)
    }

    /// Registers a file whose first name was copied.
    fn remember(&mut self, to: BorrowedFd<'_>, name: &[u8], found: &Stat) -> io::Result<()> {
        let directory = match &self.directory {
            Some((_, directory)) => directory,
            None => &self.directory.insert(self.make_directory()?).1,
        };
        rustix::fs::linkat(to, name, directory, self.next.to_string(), AtFlags::empty())?;
        #[allow(clippy::unnecessary_cast)] // The types of the fields depend on the architecture.
        let left = (found.st_nlink as u64).saturating_sub(1);
        self.known.insert((found.st_dev, found.st_ino), (self.next, left));
        self.next += 1;
        Ok(())
    }

    fn make_directory(&self) -> io::Result<(String, OwnedFd)> {
        // A name that does not occur in the copied tree.
        let name = format!(".gantry-links-{}", domain::VolumeHandle::new());
        rustix::fs::mkdirat(&self.top, &*name, Mode::RWXU)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(&self.top, &*name, flags, Mode::empty())?;
        Ok((name, directory))
    }

    /// Removes the extra names.
    fn clear(&mut self) -> io::Result<()> {
        let Some((name, directory)) = self.directory.take() else { return Ok(()) };
        for (_, (known, _)) in self.known.drain() {
            rustix::fs::unlinkat(&directory, known.to_string(), AtFlags::empty())?;
        }
        Ok(rustix::fs::unlinkat(&self.top, name, AtFlags::REMOVEDIR)?)
    }
}

/// Copies an entry that is not a directory. Returns its bytes on the disk.
fn entry(from: BorrowedFd<'_>, to: BorrowedFd<'_>, name: &[u8], found: &Stat) -> io::Result<u64> {
    let bytes = u64::try_from(found.st_blocks).unwrap_or(0) * 512;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => {
            // Without O_NONBLOCK, opening a file that was replaced by a pipe would block.
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let source = rustix::fs::openat(from, name, flags, Mode::empty())?;
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let target = rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?;
            let (mut source, mut target) = (File::from(source), File::from(target));
            // Shares blocks if the file system supports it.
            if rustix::fs::ioctl_ficlone(&target, &source).is_err() {
                contents(&mut source, &mut target)?;
            }
            finish(source.as_fd(), target.as_fd(), found)?;
            return Ok(bytes);
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
    rustix::fs::utimensat(to, name, &times(found), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(bytes)
}

/// Copies the data of a file and keeps its holes.
fn contents(source: &mut File, target: &mut File) -> io::Result<()> {
    let size = source.metadata()?.len();
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(&*source, SeekFrom::Data(at)) {
            Ok(data) => data,
            // The rest of the file is a hole.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(&*source, SeekFrom::Hole(data))?;
        for file in [&*source, &*target] {
            rustix::fs::seek(file, SeekFrom::Start(data))?;
        }
        io::copy(&mut Read::by_ref(source).take(at - data), target)?;
    }
    target.set_len(size)
}

/// Sets the owner, then the mode, which a change of owner may reset, then attributes and times.
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
    // Overlay attributes of one overlay are wrong for another one.
    let copied = |name: &&[u8]| !name.is_empty() && !name.starts_with(b"trusted.overlay.");
    for name in names[..length].split(|byte| *byte == 0).filter(copied) {
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

    /// Creates a chain of directories with a file at each level, and a hard link between both ends.
    fn chain(root: &Path, depth: usize) -> io::Result<()> {
        let mut descent = Descent::open(root)?;
        fs::write(root.join("top"), "linked")?;
        let top = descent.directory().try_clone_to_owned()?;
        for _ in 0..depth {
            rustix::fs::mkdirat(descent.directory(), "d", Mode::RWXU)?;
            descent.enter(b"d")?;
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            rustix::fs::openat(descent.directory(), "file", flags, Mode::RUSR)?;
        }
        Ok(rustix::fs::linkat(&top, "top", descent.directory(), "bottom", AtFlags::empty())?)
    }

    #[test]
    fn deep_tree_is_copied_and_changes_owner() -> io::Result<()> {
        const DEPTH: usize = 10_000;
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())?;
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir(&from)?;
        fs::create_dir(&to)?;
        chain(&from, DEPTH)?;
        copy_tree(&from, &to)?;
        let is_root = rustix::process::geteuid().is_root();
        let user = if is_root { 4711 } else { rustix::process::geteuid().as_raw() };
        own_tree(&to, user, user)?;

        let mut walk = TreeWalk::open(&to)?;
        let (mut directories, mut files) = (0, 0);
        loop {
            let Some(name) = walk.next_name()? else {
                if walk.leave()?.is_none() {
                    break;
                }
                continue;
            };
            let found = stat(walk.directory(), &name)?;
            assert_eq!((found.st_uid, found.st_gid), (user, user));
            if FileType::from_raw_mode(found.st_mode).is_dir() {
                directories += 1;
                walk.enter(&name)?;
            } else {
                files += 1;
                assert_eq!(found.st_nlink, if *name == *b"file" { 1 } else { 2 });
            }
        }
        assert_eq!((directories, files), (DEPTH, DEPTH + 2));
        transfer::remove_tree(&from).and_then(|()| transfer::remove_tree(&to)).map_err(io::Error::other)
    }

    #[test]
    fn file_with_most_names_is_copied() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir(&from)?;
        fs::create_dir(&to)?;
        fs::write(from.join("0"), "contents")?;
        (1..5).try_for_each(|n| fs::hard_link(from.join("0"), from.join(n.to_string())))?;
        fs::hard_link(from.join("0"), directory.path().join("outside"))?;
        copy_tree(&from, &to)?;
        assert_eq!(fs::read_dir(&to)?.count(), 5);
        assert_eq!(fs::metadata(to.join("3"))?.nlink(), 5);
        Ok(())
    }

    #[test]
    fn files_are_copied_with_their_directories() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir_all(from.join("a/b"))?;
        fs::create_dir_all(from.join("c"))?;
        fs::create_dir(&to)?;
        for file in ["a/b/one", "a/alone", "c/only", "other"] {
            fs::write(from.join(file), file)?;
        }
        fs::hard_link(from.join("a/b/one"), from.join("a/two"))?;
        fs::hard_link(from.join("a/b/one"), from.join("c/three"))?;
        fs::set_permissions(from.join("a"), fs::Permissions::from_mode(0o710))?;
        let names = ["a/b/one", "a/two", "c/only", "c/three"].map(PathBuf::from);
        copy_files(&from, &to, &names)?;
        for name in ["a/b/one", "a/two", "c/three"] {
            let found = fs::metadata(to.join(name))?;
            assert_eq!((fs::read_to_string(to.join(name))?.as_str(), found.nlink()), ("a/b/one", 3));
        }
        assert_eq!(fs::read_to_string(to.join("c/only"))?, "c/only");
        assert!(!to.join("a/alone").exists() && !to.join("other").exists());
        for name in ["a", "a/b", "c"] {
            let [before, after] = [&from, &to].map(|root| fs::metadata(root.join(name)));
            let (before, after) = (before?, after?);
            assert_eq!((before.mode(), before.mtime()), (after.mode(), after.mtime()), "{name}");
            assert_eq!(before.mtime_nsec(), after.mtime_nsec(), "{name}");
        }
        assert_eq!(fs::read_dir(&to)?.count(), 2, "no extra entry remains");
        Ok(())
    }

    #[test]
    fn copy_keeps_holes_of_source() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        fs::create_dir(&from)?;
        fs::create_dir(&to)?;
        let file = File::create(from.join("sparse"))?;
        file.set_len(1 << 40)?;
        for (offset, text) in [(0, "first"), (1 << 30, "second"), ((1 << 40) - 4, "last")] {
            std::os::unix::fs::FileExt::write_all_at(&file, text.as_bytes(), offset)?;
        }
        fs::write(from.join("dense"), vec![7; 100_000])?;
        copy_tree(&from, &to)?;
        let copy = File::open(to.join("sparse"))?;
        let found = copy.metadata()?;
        assert_eq!((found.len(), found.blocks() < 100), (1 << 40, true), "{} blocks", found.blocks());
        for (offset, text) in [(0, "first"), (1 << 30, "second"), ((1 << 40) - 4, "last")] {
            let mut read = vec![0; text.len()];
            std::os::unix::fs::FileExt::read_exact_at(&copy, &mut read, offset)?;
            assert_eq!(read, text.as_bytes());
        }
        assert_eq!(fs::read(to.join("dense"))?, vec![7; 100_000]);
        Ok(())
    }

    #[test]
    fn copy_keeps_modes_links_and_times() -> io::Result<()> {
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
