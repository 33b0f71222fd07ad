//! Reaching directories below a root without ever following a symbolic link.
//!
//! Invariant: every descriptor that a [`Cursor`] gives out was reached from the root one component at a time with
//! `O_NOFOLLOW`, so nothing that stands in the tree, and nobody who changes it, can lead out of it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};

/// How many directories stay open: enough for most trees, few enough for any limit on open files.
const KEPT_OPEN: usize = 32;

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
                self.open.remove(KEPT_OPEN - 2);
            }
        }
        Ok(directory)
    }
}

fn is_at_or_below(path: &[u8], directory: &[u8]) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}
