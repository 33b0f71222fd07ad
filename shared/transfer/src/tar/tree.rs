//! What an archive says, path by path, until it makes a manifest.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Bound;

use super::members::{Member, MemberKind, malformed};
use super::read::ArchiveError;
use crate::budget::{ENTRY_MEMORY_BYTES, SharedReservation};
use crate::entry::{Entry, EntryKind, Extent, as_path, compare_paths, is_portable_xattr, split};
use crate::manifest::{InvalidManifest, Limits, Manifest, ManifestBuilder};

/// Most links from one to the next that are followed.
const MAX_CHAIN: usize = 64;

/// A path, in canonical order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key(Vec<u8>);

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        compare_paths(&self.0, &other.0)
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// What stands at a path.
#[derive(Debug, Clone)]
enum Node {
    /// One of the things, which may stand at other paths, too.
    Object(usize),
    /// A hard link to a path where nothing has stood yet.
    Link(Vec<u8>),
}

/// A tree that grows.
#[derive(Debug)]
pub(super) struct Tree {
    limits: Limits,
    nodes: BTreeMap<Key, Node>,
    /// Everything that stood somewhere: entries without paths.
    objects: Vec<Entry>,
    /// How many paths were taken in, and about how much they and what stands there takes. What was replaced counts.
    paths: u64,
    bytes: u64,
    /// What it takes of the budget until it is a manifest.
    reserved: SharedReservation,
}

impl Tree {
    pub(super) fn new(limits: Limits) -> Self {
        let reserved = SharedReservation::of(limits.budget);
        Self { limits, nodes: BTreeMap::new(), objects: Vec::new(), paths: 0, bytes: 0, reserved }
    }

    /// Counts what is about to be kept.
    pub(super) fn count(&mut self, bytes: usize) -> Result<(), ArchiveError> {
        self.bytes += bytes as u64;
        if self.bytes > self.limits.encoded_bytes {
            return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes).into());
        }
        Ok(self.reserved.grow(bytes as u64).map_err(InvalidManifest::from)?)
    }

    /// Counts a path that is about to be taken in.
    fn count_path(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        self.count(path.len())?;
        self.reserved.grow(ENTRY_MEMORY_BYTES).map_err(InvalidManifest::from)?;
        self.paths += 1;
        if self.paths > self.limits.entries {
            return Err(InvalidManifest::TooManyEntries(self.limits.entries).into());
        }
        Ok(())
    }

    /// Takes in a member; `extents` are those of a file.
    pub(super) fn add(&mut self, member: Member, extents: Vec<Extent>) -> Result<(), ArchiveError> {
        let Member { path, mode, uid, gid, mtime, mut xattrs, kind } = member;
        let kind = match kind {
            MemberKind::HardLink(to) => return self.link(path, to),
            MemberKind::Directory => EntryKind::Directory,
            MemberKind::File { size_bytes } => EntryKind::File { size_bytes, extents },
            MemberKind::Symlink(target) => EntryKind::Symlink { target },
            MemberKind::Fifo => EntryKind::Fifo,
            MemberKind::Device { kind, major, minor } => EntryKind::Device { kind, major, minor },
        };
        let is_file = matches!(kind, EntryKind::File { .. });
        xattrs.retain(|xattr| {
            (is_file || kind == EntryKind::Directory) && is_portable_xattr(&xattr.name, is_file)
        });
        xattrs.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mode = if matches!(kind, EntryKind::Symlink { .. }) { 0 } else { mode };
        let (mtime_seconds, mtime_nanos) = mtime;
        let object = Entry { path: Vec::new(), mode, uid, gid, mtime_seconds, mtime_nanos, xattrs, kind };
        if let Err(fault) = object.check() {
            return Err(InvalidManifest::Entry { path: as_path(&path).to_owned(), fault }.into());
        }
        let target_bytes = if let EntryKind::Symlink { target } = &object.kind { target.len() } else { 0 };
        let xattr_bytes: usize = object.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len()).sum();
        self.count(target_bytes + xattr_bytes)?;
        self.objects.push(object);
        self.place(path, Node::Object(self.objects.len() - 1))
    }

    fn link(&mut self, path: Vec<u8>, to: Vec<u8>) -> Result<(), ArchiveError> {
        let node = match self.nodes.get(&Key(to.clone())) {
            Some(Node::Object(object)) if self.objects[*object].is_directory() => {
                return Err(malformed(&path, "it is a hard link to a directory"));
            }
            Some(node) => node.clone(),
            None => Node::Link(to),
        };
        if let Node::Link(to) = &node {
            self.count(to.len())?;
        }
        self.place(path, node)
    }

    /// Puts something at a path, in place of what stands there.
    fn place(&mut self, path: Vec<u8>, node: Node) -> Result<(), ArchiveError> {
        if !path.is_empty() {
            self.enter(split(&path).0)?;
        }
        self.count_path(&path)?;
        let key = Key(path);
        if !self.is_directory(&node) {
            let after = (Bound::Excluded(&key), Bound::Unbounded);
            let next = self.nodes.range::<Key, _>(after).next();
            let is_inside = |inside: &Key| {
                inside
                    .0
                    .strip_prefix(&key.0[..])
                    .is_some_and(|rest| key.0.is_empty() || rest.starts_with(b"/"))
            };
            if key.0.is_empty() || next.is_some_and(|(next, _)| is_inside(next)) {
                return Err(malformed(&key.0, "it takes the place of a directory that holds something"));
            }
        }
        self.nodes.insert(key, node);
        Ok(())
    }

    /// Makes sure that a path is one of a directory.
    fn enter(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        let mut missing = Vec::new();
        let mut at = path;
        loop {
            match self.nodes.get(&Key(at.to_vec())) {
                Some(node) if self.is_directory(node) => break,
                Some(_) => return Err(malformed(at, "it is no directory, but holds something")),
                None => missing.push(at),
            }
            if at.is_empty() {
                break;
            }
            at = split(at).0;
        }
        for path in missing.into_iter().rev() {
            self.make(path)?;
        }
        Ok(())
    }

    /// Makes a directory of which the archive has not said anything yet.
    fn make(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        self.objects.push(bare_entry(EntryKind::Directory, 0o755));
        self.count_path(path)?;
        self.nodes.insert(Key(path.to_vec()), Node::Object(self.objects.len() - 1));
        Ok(())
    }

    fn is_directory(&self, node: &Node) -> bool {
        matches!(node, Node::Object(object) if self.objects[*object].is_directory())
    }

    pub(super) fn finish(mut self) -> Result<Manifest, ArchiveError> {
        self.enter(b"")?;
        // What becomes the manifest counts there.
        self.reserved.release();
        let Self { limits, nodes, mut objects, .. } = self;
        let mut builder = ManifestBuilder::new(limits);
        // The path at which each file stands first.
        let mut first: HashMap<usize, &[u8]> = HashMap::new();
        for (Key(path), node) in &nodes {
            let object = resolve(&nodes, path, node)?;
            let is_link = matches!(node, Node::Link(_));
            let object_ref = &mut objects[object];
            let mut entry = match (&mut object_ref.kind, first.get(&object)) {
                (EntryKind::Directory, _) if is_link => {
                    return Err(malformed(path, "it is a hard link to a directory"));
                }
                (EntryKind::File { .. }, Some(to)) => Entry {
                    kind: EntryKind::HardLink { to: to.to_vec() },
                    ..bare_entry(EntryKind::Directory, 0)
                },
                // Each file is needed once. Extents are most of what a tree of large files takes.
                (EntryKind::File { size_bytes, extents }, None) => {
                    first.insert(object, path);
                    let kind = EntryKind::File { size_bytes: *size_bytes, extents: mem::take(extents) };
                    let xattrs = mem::take(&mut object_ref.xattrs);
                    Entry { kind, xattrs, ..object_ref.clone() }
                }
                // Of other things than files, manifests know no links: each is one of its own.
                _ => object_ref.clone(),
            };
            entry.path.clone_from(path);
            builder.push(entry)?;
        }
        Ok(builder.finish()?)
    }
}

/// Something of which nothing is known but what it is.
fn bare_entry(kind: EntryKind, mode: u32) -> Entry {
    let (path, xattrs) = (Vec::new(), Vec::new());
    Entry { path, mode, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs, kind }
}

/// What a node leads to, perhaps through other links.
fn resolve<'a>(
    nodes: &'a BTreeMap<Key, Node>,
    path: &[u8],
    mut node: &'a Node,
) -> Result<usize, ArchiveError> {
    // Links to what was there already are none any more, so that a chain this long goes round in circles, or was made
    // to be one.
    for _ in 0..MAX_CHAIN {
        match node {
            Node::Object(object) => return Ok(*object),
            Node::Link(to) => {
                let next = nodes.get(&Key(to.clone()));
                node =
                    next.ok_or_else(|| malformed(path, "it is a hard link to something that is missing"))?;
            }
        }
    }
    Err(malformed(path, "it is a hard link to itself"))
}
