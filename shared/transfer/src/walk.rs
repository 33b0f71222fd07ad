//! A walk through an untrusted tree of any depth and any width.
//!
//! [`crate::remove_tree`] and the gateway use it, for copies and for changes of owner. Containers
//! and callers create such trees, so their depth, width and names may be hostile.
//!
//! Invariants:
//!
//! - The walk is a loop, and keeps at most [`MAX_OPEN`] directories open. It opens a directory
//!   above these again through `..`, and compares the device and inode with those that it recorded
//!   on the way down.
//! - The kernel receives only single names, so the maximum path length does not limit the depth.
//! - [`MAX_HELD_NAMES`] bounds the names in memory.
//! - The walk never follows a symbolic link, and never enters a mount point.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, fstat, openat, openat2, seek};
use rustix::io::Errno;

use crate::entry::as_path;

/// Maximum number of directories that a walk keeps open.
const MAX_OPEN: usize = 32;
/// Maximum number of names that are read from a directory at a time.
const MAX_LISTED_NAMES: usize = 65_536;
/// Maximum number of names that a walk keeps for all its levels.
const MAX_HELD_NAMES: usize = 4 * MAX_LISTED_NAMES;
/// Maximum length of a path that a message shows completely, in bytes.
const MAX_SHOWN_BYTES: usize = 512;

/// A position in a tree that moves down and up, one directory at a time.
#[derive(Debug)]
pub struct Descent {
    /// Levels from the root, which has no name, to the current directory.
    levels: Vec<Level>,
    /// The innermost directories. The current directory is the last one.
    open: std::collections::VecDeque<OwnedFd>,
}

#[derive(Debug)]
struct Level {
    name: Box<[u8]>,
    /// Device and inode.
    id: (u64, u64),
}

impl Descent {
    /// Opens the root. Symbolic links in its path are followed, but the root must not be a symbolic
    /// link.
    ///
    /// # Errors
    ///
    /// Fails if the root cannot be opened or is not a directory.
    pub fn open(root: &Path) -> io::Result<Self> {
        Self::at(openat(CWD, root, directory_flags(), Mode::empty())?)
    }

    /// Opens the root by its name in a directory.
    pub(crate) fn open_at(parent: &OwnedFd, name: &[u8]) -> io::Result<Self> {
        Self::at(open_beside(parent.as_fd(), name)?)
    }

    fn at(root: OwnedFd) -> io::Result<Self> {
        let levels = vec![Level { name: Box::default(), id: id(&root)? }];
        Ok(Self { levels, open: [root].into() })
    }

    /// Returns the current directory.
    ///
    /// # Panics
    ///
    /// Never: the current directory is always open.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.open.back().expect("the current directory is open").as_fd()
    }

    /// Whether the current directory is the root.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.levels.len() == 1
    }

    /// Moves into a child of the current directory.
    ///
    /// # Errors
    ///
    /// Fails if the child cannot be opened, is not a directory, or is a mount point.
    pub fn enter(&mut self, name: &[u8]) -> io::Result<()> {
        let directory = open_beside(self.directory(), name)?;
        self.levels.push(Level { name: name.into(), id: id(&directory)? });
        self.open.push_back(directory);
        if self.open.len() > MAX_OPEN {
            self.open.pop_front();
        }
        Ok(())
    }

    /// Moves back to the parent, and returns the name of the previous directory. Returns `None` at
    /// the root.
    ///
    /// # Errors
    ///
    /// Fails if the parent cannot be opened, or is another directory than on the way down.
    pub fn leave(&mut self) -> io::Result<Option<Box<[u8]>>> {
        let [.., parent, _] = self.levels.as_slice() else { return Ok(None) };
        if self.open.len() == 1 {
            let above = open_beside(self.directory(), b"..")?;
            if id(&above)? != parent.id {
                return Err(io::Error::other("cannot leave a directory that was moved during the walk"));
            }
            self.open.push_front(above);
        }
        self.open.pop_back();
        Ok(self.levels.pop().map(|level| level.name))
    }

    /// Returns the path of a name in the current directory below the root, for messages. Omits the
    /// middle of a long path.
    #[must_use]
    pub fn shown(&self, name: &[u8]) -> PathBuf {
        let mut names = self.levels.iter().skip(1).map(|level| &*level.name).chain([name]);
        let mut shown = PathBuf::new();
        for part in names.by_ref().filter(|part| !part.is_empty()) {
            shown.push(as_path(part));
            if shown.as_os_str().as_bytes().len() > MAX_SHOWN_BYTES {
                if let Some(last) = names.last() {
                    shown.push("…");
                    shown.push(as_path(last));
                }
                break;
            }
        }
        shown
    }
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Opens a child of a directory by its name, or its parent by `..`. Never crosses a mount point.
fn open_beside(directory: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    match openat2(directory, name, directory_flags(), Mode::empty(), resolve) {
        // An old kernel, or a filter of system calls. The flags also prevent that links are
        // followed.
        Err(Errno::NOSYS | Errno::PERM) => Ok(openat(directory, name, directory_flags(), Mode::empty())?),
        opened => Ok(opened?),
    }
}

#[allow(clippy::unnecessary_cast)] // The fields differ from architecture to architecture.
fn id(directory: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = fstat(directory)?;
    Ok((stat.st_dev as u64, stat.st_ino as u64))
}

/// A walk through all names of a tree. The names of a directory come in the order of their bytes.
///
/// The caller requests the [next](TreeWalk::next_name) name, and [enters](TreeWalk::enter) the
/// entry if it is a directory. After the last name of a directory, the caller
/// [leaves](TreeWalk::leave) it, and may then remove it.
#[derive(Debug)]
pub struct TreeWalk {
    descent: Descent,
    /// The names of each level of the descent.
    lists: Vec<Names>,
    /// Number of names in all lists.
    held: usize,
    /// The first level whose list may have names.
    first_held: usize,
    limits: NameLimits,
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct NameLimits {
    listed: usize,
    held: usize,
}

/// The remaining names of a directory.
#[derive(Debug, Default)]
struct Names {
    /// Names in descending order.
    rest: Vec<Box<[u8]>>,
    /// The last visited name.
    visited: Option<Box<[u8]>>,
    /// Whether `rest` contains all names after `visited`.
    is_complete: bool,
}

impl TreeWalk {
    /// Starts at the root. Symbolic links in its path are followed, but the root must not be a
    /// symbolic link.
    ///
    /// # Errors
    ///
    /// Fails if the root cannot be opened or is not a directory.
    pub fn open(root: &Path) -> io::Result<Self> {
        Ok(Self::new(Descent::open(root)?))
    }

    /// Starts at a root, by its name in a directory.
    pub(crate) fn open_at(parent: &OwnedFd, name: &[u8]) -> io::Result<Self> {
        Ok(Self::new(Descent::open_at(parent, name)?))
    }

    fn new(descent: Descent) -> Self {
        Self {
            descent,
            lists: vec![Names::default()],
            held: 0,
            first_held: 0,
            limits: NameLimits { listed: MAX_LISTED_NAMES, held: MAX_HELD_NAMES },
            buffer: Vec::new(),
        }
    }

    /// Returns the current directory.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.descent.directory()
    }

    /// Returns the path of a name in the current directory below the root, for messages.
    #[must_use]
    pub fn shown(&self, name: &[u8]) -> PathBuf {
        self.descent.shown(name)
    }

    /// Returns the next name in the current directory, or `None` after the last name.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be listed.
    pub fn next_name(&mut self) -> io::Result<Option<Box<[u8]>>> {
        loop {
            let top = self.lists.len() - 1;
            let list = &mut self.lists[top];
            if let Some(name) = list.rest.pop() {
                if list.rest.is_empty() {
                    list.rest = Vec::new();
                }
                list.visited = Some(name.clone());
                self.held -= 1;
                return Ok(Some(name));
            }
            if list.is_complete {
                return Ok(None);
            }
            let after = list.visited.as_deref();
            let directory = self.descent.directory();
            let (rest, is_complete) = list_after(directory, after, self.limits.listed, &mut self.buffer)?;
            self.held += rest.len();
            (list.rest, list.is_complete) = (rest, is_complete);
            self.first_held = self.first_held.min(top);
            self.drop_names(top);
        }
    }

    /// Drops the names of outer levels while the walk keeps too many. These levels are listed again
    /// later.
    fn drop_names(&mut self, top: usize) {
        while self.held > self.limits.held && self.first_held < top {
            let list = &mut self.lists[self.first_held];
            if !list.rest.is_empty() {
                self.held -= list.rest.len();
                (list.rest, list.is_complete) = (Vec::new(), false);
            }
            self.first_held += 1;
        }
    }

    /// Moves into a child of the current directory.
    ///
    /// # Errors
    ///
    /// Fails if the child cannot be opened, is not a directory, or is a mount point.
    pub fn enter(&mut self, name: &[u8]) -> io::Result<()> {
        self.descent.enter(name)?;
        self.lists.push(Names::default());
        Ok(())
    }

    /// Moves back to the parent, and returns the name of the previous directory. Returns `None` at
    /// the root.
    ///
    /// # Errors
    ///
    /// Fails if the parent cannot be opened, or is another directory than on the way down.
    pub fn leave(&mut self) -> io::Result<Option<Box<[u8]>>> {
        let Some(name) = self.descent.leave()? else { return Ok(None) };
        if let Some(left) = self.lists.pop() {
            self.held -= left.rest.len();
        }
        self.first_held = self.first_held.min(self.lists.len() - 1);
        Ok(Some(name))
    }
}

/// Returns the first names of a directory after `after`, at most `limit` and in descending order,
/// and whether these are all names.
fn list_after(
    directory: BorrowedFd<'_>,
    after: Option<&[u8]>,
    limit: usize,
    buffer: &mut Vec<u8>,
) -> io::Result<(Vec<Box<[u8]>>, bool)> {
    seek(directory, SeekFrom::Start(0))?;
    buffer.clear();
    buffer.reserve(32 << 10);
    let (mut names, mut is_complete) = (Vec::<Box<[u8]>>::new(), true);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") || after.is_some_and(|after| name <= after) {
            continue;
        }
        names.push(name.into());
        if names.len() >= 2 * limit {
            names.select_nth_unstable(limit);
            names.truncate(limit);
            is_complete = false;
        }
    }
    names.sort_unstable();
    is_complete &= names.len() <= limit;
    names.truncate(limit);
    names.reverse();
    Ok((names, is_complete))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{AtFlags, mkdirat, renameat, statat};

    use super::*;

    /// Creates a chain of directories, each with a file.
    fn chain(root: &Path, depth: usize) {
        let mut descent = Descent::open(root).expect("the root");
        for _ in 0..depth {
            mkdirat(descent.directory(), "d", Mode::RWXU).expect("made");
            descent.enter(b"d").expect("entered");
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            openat(descent.directory(), "file", flags, Mode::RUSR).expect("made");
        }
    }

    fn open_descriptors() -> usize {
        fs::read_dir("/proc/self/fd").expect("listed").count()
    }

    /// Walks through the whole tree. Returns the number of names, and the maximum number of open
    /// descriptors.
    fn count(walk: &mut TreeWalk) -> (usize, usize) {
        let (mut names, mut most) = (0, 0);
        loop {
            match walk.next_name().expect("listed") {
                Some(name) => {
                    names += 1;
                    most = most.max(walk.descent.open.len());
                    let stat = statat(walk.directory(), &*name, AtFlags::SYMLINK_NOFOLLOW).expect("there");
                    if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                        walk.enter(&name).expect("entered");
                    }
                }
                None if walk.leave().expect("left").is_none() => return (names, most),
                None => {}
            }
        }
    }

    #[test]
    fn walk_and_removal_have_no_depth_limit() {
        const DEPTH: usize = 100_000;
        // A disk takes minutes, so the test prefers memory.
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        let tree = root.path().join("tree");
        fs::create_dir(&tree).expect("made");
        chain(&tree, DEPTH);
        // The stack of the thread is too small for a recursion over the levels.
        let walked = std::thread::Builder::new().stack_size(128 << 10).spawn(move || {
            let counted = count(&mut TreeWalk::open(&tree).expect("opened"));
            crate::remove_tree(&tree).expect("removed");
            (counted, tree.exists())
        });
        let ((names, most), is_there) = walked.expect("started").join().expect("no overflow");
        assert_eq!((names, is_there), (2 * DEPTH, false));
        assert_eq!(most, MAX_OPEN);
    }

    #[test]
    fn names_in_memory_are_bounded() {
        let root = tempfile::tempdir().expect("a directory");
        let mut expected = 0;
        for a in 0..20 {
            for b in 0..20 {
                let directory = root.path().join(format!("{a}/{b}"));
                fs::create_dir_all(&directory).expect("made");
                (0..5).for_each(|c| fs::write(directory.join(c.to_string()), "").expect("written"));
                expected += 6;
            }
            expected += 1;
        }
        let mut walk = TreeWalk::open(root.path()).expect("opened");
        walk.limits = NameLimits { listed: 7, held: 10 };
        assert_eq!(count(&mut walk).0, expected);
        assert_eq!(walk.held, 0);
    }

    #[test]
    fn names_come_in_parts_and_in_order() {
        let root = tempfile::tempdir().expect("a directory");
        (0..100).for_each(|n| fs::write(root.path().join(format!("{n:02}")), "").expect("written"));
        let mut walk = TreeWalk::open(root.path()).expect("opened");
        walk.limits = NameLimits { listed: 9, held: 9 };
        for n in 0..100 {
            let name = walk.next_name().expect("listed").expect("a name");
            assert_eq!(*name, *format!("{n:02}").as_bytes());
            assert!(walk.held <= 9);
        }
        assert!(walk.next_name().expect("listed").is_none());
    }

    #[test]
    fn moved_directory_stops_the_walk() {
        let root = tempfile::tempdir().expect("a directory");
        let tree = root.path().join("tree");
        fs::create_dir(&tree).expect("made");
        chain(&tree, 2 * MAX_OPEN);
        let mut descent = Descent::open(&tree).expect("opened");
        (0..2 * MAX_OPEN).for_each(|_| descent.enter(b"d").expect("entered"));
        let other = root.path().join("other");
        renameat(CWD, tree.join("d").join("d"), CWD, &other).expect("moved");
        let left = std::iter::repeat_with(|| descent.leave()).find(|left| !matches!(left, Ok(Some(_))));
        assert!(matches!(left, Some(Err(_))), "{left:?}");
    }

    #[test]
    fn long_paths_are_shown_without_their_middle() {
        let root = tempfile::tempdir().expect("a directory");
        chain(root.path(), 1000);
        let mut descent = Descent::open(root.path()).expect("opened");
        assert_eq!(descent.shown(b"x"), Path::new("x"));
        (0..1000).for_each(|_| descent.enter(b"d").expect("entered"));
        let shown = descent.shown(b"last").display().to_string();
        assert!(shown.len() < 600 && shown.starts_with("d/d/") && shown.ends_with("/…/last"), "{shown}");
        assert!(open_descriptors() < 200);
    }
}
