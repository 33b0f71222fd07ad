//! The tree of an archive, which is collected path by path and becomes a manifest.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::ops::Bound;

use super::members::{Member, MemberKind, malformed};
use super::read::ArchiveError;
use crate::budget::{ENTRY_MEMORY_BYTES, SharedReservation};
use crate::entry::{Entry, EntryKind, Extent, as_path, compare_paths, is_portable_xattr, split};
use crate::manifest::{InvalidManifest, Limits, Manifest, ManifestBuilder};

/// Maximum length of a chain of links.
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

/// The node at a path.
#[derive(Debug, Clone)]
enum Node {
    /// Index of an object, which may have other paths, too.
    Object(usize),
    /// A hard link to a path that did not exist yet.
    Link(Vec<u8>),
}

/// The tree of an archive, while it is read.
#[derive(Debug)]
pub(super) struct Tree {
    limits: Limits,
    nodes: BTreeMap<Key, Node>,
    /// All objects that were read, as entries without paths.
    objects: Vec<Entry>,
    /// Number of added paths, including replaced ones.
    paths: u64,
    /// Approximate bytes of added paths and objects, including replaced ones.
    bytes: u64,
    /// Directories that the archive has not described.
    implied: BTreeSet<Key>,
    /// Share of the budget until the tree is a manifest.
    reserved: SharedReservation,
}

impl Tree {
    pub(super) fn new(limits: Limits) -> Self {
        let reserved = SharedReservation::of(limits.budget);
        let (nodes, objects, implied) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        Self { limits, nodes, objects, paths: 0, bytes: 0, implied, reserved }
    }

    /// Reserves memory for data that will be stored.
    pub(super) fn count(&mut self, bytes: usize) -> Result<(), ArchiveError> {
        self.bytes += bytes as u64;
        if self.bytes > self.limits.encoded_bytes {
            return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes).into());
        }
        Ok(self.reserved.grow(bytes as u64).map_err(InvalidManifest::from)?)
    }

    /// Reserves memory for a path that will be added.
    fn count_path(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        self.count(path.len())?;
        self.reserved.grow(ENTRY_MEMORY_BYTES).map_err(InvalidManifest::from)?;
        self.paths += 1;
        if self.paths > self.limits.entries {
            return Err(InvalidManifest::TooManyEntries(self.limits.entries).into());
        }
        Ok(())
    }

    /// Adds a member. `extents` are those of a file.
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
                return Err(malformed(&path, "the entry is a hard link to a directory"));
            }
            Some(node) => node.clone(),
            None => Node::Link(to),
        };
        if let Node::Link(to) = &node {
            self.count(to.len())?;
        }
        self.place(path, node)
    }

    /// Puts a node at a path, and replaces an existing one.
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
                return Err(malformed(&key.0, "the entry would replace a directory that is not empty"));
            }
        }
        self.implied.remove(&key);
        self.nodes.insert(key, node);
        Ok(())
    }

    /// Ensures that there is a directory at a path, and creates missing directories.
    fn enter(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        let mut missing = Vec::new();
        let mut at = path;
        loop {
            match self.nodes.get(&Key(at.to_vec())) {
                Some(node) if self.is_directory(node) => break,
                Some(_) => return Err(malformed(at, "the entry contains others, but is not a directory")),
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

    /// Creates a directory that the archive has not described yet.
    fn make(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        self.objects.push(bare_entry(EntryKind::Directory, 0o755));
        self.count_path(path)?;
        self.nodes.insert(Key(path.to_vec()), Node::Object(self.objects.len() - 1));
        self.implied.insert(Key(path.to_vec()));
        Ok(())
    }

    fn is_directory(&self, node: &Node) -> bool {
        matches!(node, Node::Object(object) if self.objects[*object].is_directory())
    }

    /// Returns the manifest, and the directories that the archive has not described.
    pub(super) fn finish(mut self) -> Result<(Manifest, Vec<Vec<u8>>), ArchiveError> {
        self.enter(b"")?;
        // The manifest makes a separate reservation.
        self.reserved.release();
        let Self { limits, nodes, mut objects, implied, .. } = self;
        let mut builder = ManifestBuilder::new(limits);
        // The first path of each file.
        let mut first: HashMap<usize, &[u8]> = HashMap::new();
        for (Key(path), node) in &nodes {
            let object = resolve(&nodes, path, node)?;
            let is_link = matches!(node, Node::Link(_));
            let object_ref = &mut objects[object];
            let mut entry = match (&mut object_ref.kind, first.get(&object)) {
                (EntryKind::Directory, _) if is_link => {
                    return Err(malformed(path, "the entry is a hard link to a directory"));
                }
                (EntryKind::File { .. }, Some(to)) => Entry {
                    kind: EntryKind::HardLink { to: to.to_vec() },
                    ..bare_entry(EntryKind::Directory, 0)
                },
                // Each file is used once, so its extents, the largest part of its memory, are
                // moved.
                (EntryKind::File { size_bytes, extents }, None) => {
                    first.insert(object, path);
                    let kind = EntryKind::File { size_bytes: *size_bytes, extents: mem::take(extents) };
                    let xattrs = mem::take(&mut object_ref.xattrs);
                    Entry { kind, xattrs, ..object_ref.clone() }
                }
                // Manifests have hard links only to files. Other objects are copied for each path.
                _ => object_ref.clone(),
            };
            entry.path.clone_from(path);
            builder.push(entry)?;
        }
        Ok((builder.finish()?, implied.into_iter().map(|Key(path)| path).collect()))
    }
}

/// Creates an entry with default metadata.
fn bare_entry(kind: EntryKind, mode: u32) -> Entry {
    let (path, xattrs) = (Vec::new(), Vec::new());
    Entry { path, mode, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs, kind }
}

/// Returns the object of a node, through a chain of links.
fn resolve<'a>(
    nodes: &'a BTreeMap<Key, Node>,
    path: &[u8],
    mut node: &'a Node,
) -> Result<usize, ArchiveError> {
    // Links to existing paths were resolved before, so such a long chain is a cycle or is
    // malicious.
    for _ in 0..MAX_CHAIN {
        match node {
            Node::Object(object) => return Ok(*object),
            Node::Link(to) => {
                let next = nodes.get(&Key(to.clone()));
                node = next.ok_or_else(|| malformed(path, "the target of the hard link is missing"))?;
            }
        }
    }
    Err(malformed(path, "the hard link is part of a cycle"))
}
