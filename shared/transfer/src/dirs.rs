//! Reaching directories below a root without ever following a symbolic link.
//!
//! Invariant: every descriptor that a [`Cursor`] gives out was reached from the root one component at a time with
//! `O_NOFOLLOW`, so nothing that stands in the tree, and nobody who changes it, can lead out of it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, chmodat, fstat, openat, statat};
use rustix::io::Errno;

/// How many directories stay open: enough for most trees, few enough for any limit on open files.
const KEPT_OPEN: usize = 32;
/// How many of these are the outermost. The others are the innermost, so that a step up from any depth is cheap.
const KEPT_OUTER: usize = 4;

/// A place in a tree that moves from directory to directory, cheaply when the next is near.
#[derive(Debug)]
pub(crate) struct Cursor {
    root: Arc<OwnedFd>,
    flags: OFlags,
    path: Vec<u8>,
    /// Ancestors of `path` and itself: how much of `path` they are, and the open directory.
    open: Vec<(usize, Arc<OwnedFd>)>,
}

impl Cursor {
    /// A cursor whose directories can be listed and changed. The path to `root` itself is the caller's and is followed.
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        Self::with_flags(root, OFlags::RDONLY)
    }

    /// A cursor for going through directories that need not be readable.
    pub(crate) fn through(root: &Path) -> io::Result<Self> {
        Self::with_flags(root, OFlags::PATH)
    }

    fn with_flags(root: &Path, flags: OFlags) -> io::Result<Self> {
        let root = openat(CWD, root, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { root: Arc::new(root), flags, path: Vec::new(), open: Vec::new() })
    }

    /// Another cursor in the same tree, at its root.
    pub(crate) fn fork(&self) -> Self {
        Self { root: self.root.clone(), flags: self.flags, path: Vec::new(), open: Vec::new() }
    }

    /// The root directory.
    pub(crate) fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    /// Goes to the directory at `path`, which is safe.
    pub(crate) fn go(&mut self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        while let Some((end, _)) = self.open.last()
            && !is_at_or_below(path, &self.path[..*end])
        {
            self.open.pop();
        }
        let mut reached = self.open.last().map_or(0, |(end, _)| *end);
        let mut directory = self.open.last().map_or(&self.root, |(_, directory)| directory).clone();
        self.path.truncate(reached);
        while reached < path.len() {
            let start = if reached == 0 { 0 } else { reached + 1 };
            let length = path[start..].iter().position(|byte| *byte == b'/').unwrap_or(path.len() - start);
            let name = &path[start..start + length];
            let flags = self.flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            directory = Arc::new(openat(&directory, name, flags, Mode::empty())?);
            reached = start + length;
            self.path.clear();
            self.path.extend_from_slice(&path[..reached]);
            self.open.push((reached, directory.clone()));
            if self.open.len() > KEPT_OPEN {
                self.open.remove(KEPT_OUTER);
            }
        }
        Ok(directory)
    }
}

fn is_at_or_below(path: &[u8], directory: &[u8]) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// The names in a directory, in no order, until `keep` refuses one. `buffer` is room to work in, and is best used again.
pub(crate) fn list(
    directory: &OwnedFd,
    buffer: &mut Vec<u8>,
    mut keep: impl FnMut(&[u8]) -> bool,
) -> Result<Vec<Vec<u8>>, Errno> {
    rustix::fs::seek(directory, rustix::fs::SeekFrom::Start(0))?;
    buffer.clear();
    buffer.reserve(32 << 10);
    let mut names = Vec::new();
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if !keep(name) {
            break;
        }
        names.push(name.to_vec());
    }
    Ok(names)
}

/// Whether a directory has no names.
pub(crate) fn is_empty(directory: &OwnedFd) -> Result<bool, Errno> {
    let mut empty = true;
    list(directory, &mut Vec::new(), |_| {
        empty = false;
        false
    })?;
    Ok(empty)
}

/// What stands at a name, if anything does.
pub(crate) fn type_of(directory: impl AsFd, name: &[u8]) -> Result<Option<FileType>, Errno> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sees to it that the owner may list, enter and change the directory at a name, as far as that can be done.
pub(crate) fn make_workable(directory: impl AsFd, name: &[u8]) -> Result<(), Errno> {
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mode = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory || mode.contains(Mode::RWXU) {
        return Ok(());
    }
    match chmod_no_follow(directory, name, mode | Mode::RWXU) {
        // Somebody else's: whether what follows is permitted will be seen.
        Err(Errno::PERM) => Ok(()),
        changed => changed,
    }
}

/// Changes the mode of what stands at a name, never of what it points to.
pub(crate) fn chmod_no_follow(directory: impl AsFd, name: &[u8], mode: Mode) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&node)?.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP);
    }
    // What is open as a path only has its mode changed through its name in /proc; that leads to this very node.
    chmodat(CWD, format!("/proc/self/fd/{}", node.as_raw_fd()), mode, AtFlags::empty())
}
