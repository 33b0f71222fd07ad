//! Access to directories below a root without following symbolic links.
//!
//! Invariant: a [`Cursor`] reaches every directory from the root, one component at a time, with
//! `O_NOFOLLOW`. Neither the contents of the tree nor a concurrent change can lead out of it. A
//! closed directory is opened again through `..` only if its device and inode are the same. A
//! process that can place another directory there can write to that directory anyway.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, chmodat, fstat, openat, statat};
use rustix::io::Errno;

/// Maximum number of open directories of a cursor. It suffices for most trees, and fits any limit
/// of open files.
const MAX_OPEN: usize = 32;
/// Number of open directories that are the outermost. The others are the innermost, so that a step
/// up is cheap at any depth.
const OUTER_OPEN: usize = 4;

/// A position in a tree that moves between directories. A move to a near directory is cheap.
#[derive(Debug)]
pub(crate) struct Cursor {
    root: Arc<OwnedFd>,
    flags: OFlags,
    path: Vec<u8>,
    /// Open ancestors of `path`, and `path`: the length of their prefix of `path`, and the
    /// directory.
    open: Vec<(usize, Arc<OwnedFd>)>,
    /// Closed ancestors of `path`: the length of their prefix of `path`, and their device and
    /// inode. Ascending.
    closed: Vec<(usize, (u64, u64))>,
    /// Number of opened directories.
    #[cfg(test)]
    opened: usize,
}

impl Cursor {
    /// Creates a cursor whose directories can be listed and changed. Symbolic links in the path of
    /// `root` are followed.
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        Self::with_flags(root, OFlags::RDONLY)
    }

    /// Creates a cursor whose directories need not be readable.
    pub(crate) fn through(root: &Path) -> io::Result<Self> {
        Self::with_flags(root, OFlags::PATH)
    }

    fn with_flags(root: &Path, flags: OFlags) -> io::Result<Self> {
        let root = openat(CWD, root, flags | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self::at(Arc::new(root), flags))
    }

    fn at(root: Arc<OwnedFd>, flags: OFlags) -> Self {
        Self {
            root,
            flags,
            path: Vec::new(),
            open: Vec::new(),
            closed: Vec::new(),
            #[cfg(test)]
            opened: 0,
        }
    }

    /// Creates another cursor in the same tree, at its root.
    pub(crate) fn fork(&self) -> Self {
        Self::at(self.root.clone(), self.flags)
    }

    /// Returns the root directory.
    pub(crate) fn root(&self) -> &Arc<OwnedFd> {
        &self.root
    }

    /// Moves to the directory at `path`, which must be a safe path.
    pub(crate) fn go(&mut self, path: &[u8]) -> io::Result<Arc<OwnedFd>> {
        let is_ancestor =
            |here: &[u8], end: usize| here.get(..end).is_some_and(|here| is_at_or_below(path, here));
        let mut below = None;
        while let Some((end, _)) = self.open.last()
            && !is_ancestor(&self.path, *end)
        {
            below = self.open.pop();
        }
        while let Some((end, _)) = self.closed.last()
            && !is_ancestor(&self.path, *end)
        {
            self.closed.pop();
        }
        if let Some((end, below)) = below
            && let Some(above) = self.step_up(path, end, &below)?
        {
            return Ok(above);
        }
        let mut reached = self.open.last().map_or(0, |(end, _)| *end);
        let mut directory = self.open.last().map_or(&self.root, |(_, directory)| directory).clone();
        self.path.truncate(reached);
        self.closed.truncate(self.closed.partition_point(|(end, _)| *end < reached));
        while reached < path.len() {
            let start = if reached == 0 { 0 } else { reached + 1 };
            let length = path[start..].iter().position(|byte| *byte == b'/').unwrap_or(path.len() - start);
            let name = &path[start..start + length];
            let flags = self.flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            directory = Arc::new(openat(&directory, name, flags, Mode::empty())?);
            #[cfg(test)]
            {
                self.opened += 1;
            }
            reached = start + length;
            self.path.clear();
            self.path.extend_from_slice(&path[..reached]);
            self.open.push((reached, directory.clone()));
            if self.open.len() > MAX_OPEN {
                let (end, closed) = self.open.remove(OUTER_OPEN);
                self.closed.push((end, id(&closed)?));
            }
        }
        Ok(directory)
    }

    /// Opens the directory at `path` again from its child `below`, whose path is the first `end`
    /// bytes of the current path. Returns `None` if it is not the last closed directory, or if
    /// another directory is there now.
    fn step_up(&mut self, path: &[u8], end: usize, below: &OwnedFd) -> io::Result<Option<Arc<OwnedFd>>> {
        let is_parent = self.path.get(path.len()..end).is_some_and(|rest| {
            rest.strip_prefix(b"/").is_some_and(|name| !name.is_empty() && !name.contains(&b'/'))
        });
        let Some((_, known)) = self.closed.pop_if(|(closed, _)| is_parent && *closed == path.len()) else {
            return Ok(None);
        };
        let flags = self.flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(above) = openat(below, "..", flags, Mode::empty()) else { return Ok(None) };
        #[cfg(test)]
        {
            self.opened += 1;
        }
        if id(&above)? != known {
            return Ok(None);
        }
        let above = Arc::new(above);
        self.path.truncate(path.len());
        self.open.push((path.len(), above.clone()));
        Ok(Some(above))
    }
}

/// Returns the device and inode of a directory.
#[allow(clippy::unnecessary_cast)] // The fields differ from architecture to architecture.
fn id(directory: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = fstat(directory)?;
    Ok((stat.st_dev as u64, stat.st_ino as u64))
}

fn is_at_or_below(path: &[u8], directory: &[u8]) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Returns the names in a directory, unordered, until `keep` rejects a name. Callers should reuse
/// `buffer`.
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

/// Returns the file type of the entry at a name, if it exists.
pub(crate) fn type_of(directory: impl AsFd, name: &[u8]) -> Result<Option<FileType>, Errno> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(FileType::from_raw_mode(stat.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives the owner permission to list, enter and change the directory at a name, if possible.
pub(crate) fn make_accessible(directory: impl AsFd, name: &[u8]) -> Result<(), Errno> {
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let mode = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory || mode.contains(Mode::RWXU) {
        return Ok(());
    }
    match chmod_no_follow(directory, name, mode | Mode::RWXU) {
        // The directory belongs to another user. A later operation fails if it is not permitted.
        Err(Errno::PERM) => Ok(()),
        changed => changed,
    }
}

/// Changes the mode of the entry at a name. Never follows a symbolic link.
pub(crate) fn chmod_no_follow(directory: impl AsFd, name: &[u8], mode: Mode) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&node)?.st_mode) == FileType::Symlink {
        return Err(Errno::LOOP);
    }
    // The mode of a path descriptor can be changed only through its name in /proc, which leads to
    // the same inode.
    chmodat(CWD, format!("/proc/self/fd/{}", node.as_raw_fd()), mode, AtFlags::empty())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{mkdirat, renameat};

    use super::*;

    const DEPTH: usize = 2_000;

    /// Returns a path of `depth` directories with the name `d`.
    fn path(depth: usize) -> Vec<u8> {
        vec!["d"; depth].join("/").into_bytes()
    }

    fn chain(root: &Path, depth: usize) -> Cursor {
        let mut cursor = Cursor::new(root).expect("a cursor");
        for level in 0..depth {
            let directory = cursor.go(&path(level)).expect("entered");
            mkdirat(&directory, "d", Mode::RWXU).expect("made");
        }
        cursor
    }

    #[test]
    fn deep_chain_is_left_in_linear_time() {
        let root = tempfile::tempdir().expect("a directory");
        let mut cursor = chain(root.path(), DEPTH);
        for level in (0..=DEPTH).rev() {
            let directory = cursor.go(&path(level)).expect("reached");
            assert_eq!(is_empty(&directory), Ok(level == DEPTH));
            assert!(cursor.open.len() <= MAX_OPEN);
        }
        assert!(cursor.opened < 3 * DEPTH, "{} directories were opened", cursor.opened);
        // Moves between distant levels.
        for level in [7, 1999, 40, 39, 1000, 999, 998, 2000, 3] {
            let directory = cursor.go(&path(level)).expect("reached");
            let mut again = cursor.fork();
            assert_eq!(
                id(&directory).expect("known"),
                id(&again.go(&path(level)).expect("reached")).expect("known")
            );
        }
        // The standard library would keep a descriptor for each level.
        crate::remove_tree(&root.path().join("d")).expect("removed");
    }

    #[test]
    fn moved_directory_is_not_left_upwards() {
        let (root, elsewhere) = (tempfile::tempdir().expect("made"), tempfile::tempdir().expect("made"));
        let mut cursor = chain(root.path(), 100);
        cursor.go(&path(100)).expect("reached");
        // The directory from which the cursor steps up, when all directories above are closed.
        let begin = 100 - (MAX_OPEN - OUTER_OPEN) + 1;
        for level in (begin..100).rev() {
            cursor.go(&path(level)).expect("reached");
        }
        let above = cursor.fork().go(&path(begin - 1)).expect("reached");
        fs::create_dir(elsewhere.path().join("other")).expect("made");
        let other = Cursor::new(&elsewhere.path().join("other")).expect("a cursor");
        renameat(&above, "d", other.root(), "d").expect("moved");
        let reached = cursor.go(&path(begin - 1)).expect("reached from the root");
        assert_eq!(id(&reached).expect("known"), id(&above).expect("known"));
        assert!(cursor.go(&path(begin)).is_err(), "the directory was moved");
        crate::remove_tree(&root.path().join("d")).expect("removed");
    }
}
