//! The tree of an image: its layers, applied to one another.
//!
//! As in other tools, a later layer hides what it names. An entry replaces the entry at its path. A
//! directory keeps the contents of the directory that it describes again. `.wh.NAME` removes `NAME`
//! of the layers below, and `.wh..wh..opq` all contents of its directory.
//!
//! Devices in `/dev` are left out.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Bound;
use std::sync::Arc;

use bytes::Bytes;
use domain::Digest;
use transfer::{
    Entry, EntryKind, Extent, Limits, MAX_EXTENT_BYTES, Manifest, ManifestBuilder, compare_paths,
};

use crate::{ImageError, Layer, Metadata};

const ROOT: &[u8] = b"rootfs";
const METADATA: &[u8] = b"metadata.json";
const WHITEOUT: &[u8] = b".wh.";
/// Start of the names that have a meaning for layers as a whole.
const SPECIAL: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Most symbolic links in the path of a directory.
const MAX_LINKS: usize = 40;

/// An image as workers know it: the directory `rootfs`, and `metadata.json` beside it.
#[derive(Debug)]
pub struct ImageTree {
    manifest: Arc<Manifest>,
    layers: Vec<Arc<Layer>>,
    metadata: Bytes,
}

impl ImageTree {
    /// Returns the manifest of the tree.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Reads the content of an extent. Blocks.
    ///
    /// # Errors
    ///
    /// Fails if there is no such extent, or if it cannot be read.
    pub fn read(&self, ordinal: u64) -> io::Result<Bytes> {
        let located = self.manifest.locate(ordinal).ok_or(io::ErrorKind::NotFound)?;
        if self.manifest.entries()[located.entry].path == METADATA {
            let start = usize::try_from(located.extent.offset).map_err(io::Error::other)?;
            return Ok(self.metadata.slice(start..start + located.extent.length as usize));
        }
        let holder = self.layers.iter().rev().find(|layer| layer.has(located.extent));
        Ok(holder.ok_or(io::ErrorKind::NotFound)?.read(located.extent)?.into())
    }
}

/// Applies layers, the lowest first, and adds the metadata. `image` names the image in errors.
///
/// # Errors
///
/// Fails if the layers do not make a tree that workers support.
pub fn assemble(image: &str, layers: Vec<Arc<Layer>>, metadata: &Metadata) -> Result<ImageTree, ImageError> {
    let invalid = |cause: String| ImageError::invalid(image, cause);
    let mut tree = Tree::default();
    for layer in &layers {
        tree.apply(layer).map_err(invalid)?;
    }
    tree.make_working_directory(&metadata.workdir).map_err(invalid)?;
    let metadata = serde_json::to_vec(metadata).map_err(|error| invalid(error.to_string()))?;
    let manifest = tree.manifest(&metadata).map_err(|error| invalid(error.to_string()))?;
    Ok(ImageTree { manifest: Arc::new(manifest), layers, metadata: metadata.into() })
}

/// A path, in the order of manifests: a directory comes right before its contents.
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

/// The tree that the layers have made so far.
#[derive(Debug, Default)]
struct Tree {
    /// Index of the object at each path. Paths of one file share their object.
    nodes: BTreeMap<Key, usize>,
    /// Entries without paths, including those that a later layer has replaced.
    objects: Vec<Entry>,
}

impl Tree {
    fn apply(&mut self, layer: &Layer) -> Result<(), String> {
        for entry in layer.manifest.entries() {
            let (parent, name) = split(&entry.path);
            let Some(removed) = name.strip_prefix(WHITEOUT) else { continue };
            if name == OPAQUE {
                self.remove_contents(parent);
            } else if !name.starts_with(SPECIAL) {
                self.remove(&join(parent, removed));
            }
        }
        let mut places = Places { implied: &layer.implied, found: HashMap::new() };
        for entry in layer.manifest.entries() {
            let (parent, name) = split(&entry.path);
            // A directory that the layer does not describe is made for its contents.
            if name.starts_with(WHITEOUT) || places.is_implied(&entry.path) {
                continue;
            }
            let path = match entry.path.is_empty() {
                true => Vec::new(),
                false => join(&places.of(self, parent)?, name),
            };
            self.place(&path, entry, &mut places)?;
            if entry.is_directory() && path != entry.path {
                places.found.insert(&entry.path, path);
            }
        }
        Ok(())
    }

    /// Puts an entry at a path.
    fn place<'l>(&mut self, path: &[u8], entry: &'l Entry, places: &mut Places<'l>) -> Result<(), String> {
        let object = if let EntryKind::HardLink { to } = &entry.kind {
            let (parent, name) = split(to);
            let to = join(&places.of(self, parent)?, name);
            let object = self.nodes.get(&Key(to)).copied();
            object.ok_or_else(|| format!("the target of the hard link {:?} is missing", entry.path()))?
        } else {
            self.objects.push(Entry { path: Vec::new(), ..entry.clone() });
            self.objects.len() - 1
        };
        let keeps_contents = entry.is_directory() && self.is_directory(path);
        if !keeps_contents {
            self.remove(path);
        }
        self.nodes.insert(Key(path.to_vec()), object);
        Ok(())
    }

    /// Ensures that there is a directory at a path, and returns its path without symbolic links.
    fn enter(&mut self, path: Vec<u8>) -> Result<Vec<u8>, String> {
        match self.nodes.get(&Key(path.clone())).map(|object| &self.objects[*object].kind) {
            Some(EntryKind::Directory) => Ok(path),
            Some(EntryKind::Symlink { .. }) => self.resolve(&path),
            _ => {
                self.remove(&path);
                self.make_directory(&path);
                Ok(path)
            }
        }
    }

    /// Follows the symbolic links of a path within the root, and creates missing directories.
    fn resolve(&mut self, path: &[u8]) -> Result<Vec<u8>, String> {
        let mut links = 0;
        let mut rest: Vec<Vec<u8>> = path.split(|byte| *byte == b'/').rev().map(Into::into).collect();
        let mut at = Vec::new();
        while let Some(name) = rest.pop() {
            match &name[..] {
                b"" | b"." => continue,
                b".." => at = split(&at).0.to_vec(),
                name => {
                    let next = join(&at, name);
                    match self.nodes.get(&Key(next.clone())).map(|object| self.objects[*object].kind.clone())
                    {
                        Some(EntryKind::Directory) => at = next,
                        Some(EntryKind::Symlink { target }) => {
                            links += 1;
                            if links > MAX_LINKS {
                                return Err(format!(
                                    "too many symbolic links in the path {:?}",
                                    String::from_utf8_lossy(path)
                                ));
                            }
                            if target.starts_with(b"/") {
                                at.clear();
                            }
                            rest.extend(target.split(|byte| *byte == b'/').rev().map(Into::into));
                        }
                        _ => {
                            self.remove(&next);
                            self.make_directory(&next);
                            at = next;
                        }
                    }
                }
            }
        }
        Ok(at)
    }

    /// Makes the working directory of an image if it is missing, as container engines do.
    fn make_working_directory(&mut self, path: &str) -> Result<(), String> {
        let path = path.trim_matches('/').as_bytes();
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        let kinds = ends.chain([path.len()]).filter_map(|end| self.nodes.get(&Key(path[..end].to_vec())));
        let may_be_entered = |object: &usize| {
            matches!(self.objects[*object].kind, EntryKind::Directory | EntryKind::Symlink { .. })
        };
        // A file in its place is an error of the image, which the worker reports.
        if kinds.copied().all(|object| may_be_entered(&object)) {
            self.resolve(path)?;
        }
        Ok(())
    }

    fn is_directory(&self, path: &[u8]) -> bool {
        self.nodes.get(&Key(path.to_vec())).is_some_and(|object| self.objects[*object].is_directory())
    }

    fn make_directory(&mut self, path: &[u8]) {
        self.objects.push(directory());
        self.nodes.insert(Key(path.to_vec()), self.objects.len() - 1);
    }

    fn remove(&mut self, path: &[u8]) {
        self.remove_contents(path);
        self.nodes.remove(&Key(path.to_vec()));
    }

    fn remove_contents(&mut self, path: &[u8]) {
        let after = (Bound::Excluded(Key(path.to_vec())), Bound::Unbounded);
        let is_inside = |key: &Key| {
            let rest = key.0.strip_prefix(path);
            rest.is_some_and(|rest| path.is_empty() || rest.starts_with(b"/"))
        };
        let inside = self.nodes.range(after).map(|(key, _)| key).take_while(|key| is_inside(key));
        for key in inside.cloned().collect::<Vec<_>>() {
            self.nodes.remove(&key);
        }
    }

    fn manifest(mut self, metadata: &[u8]) -> Result<Manifest, transfer::InvalidManifest> {
        let mut builder = ManifestBuilder::new(Limits::of_process());
        builder.push(directory())?;
        builder.push(metadata_entry(metadata))?;
        self.nodes.entry(Key(Vec::new())).or_insert_with(|| {
            self.objects.push(directory());
            self.objects.len() - 1
        });
        let mut first: HashMap<usize, Vec<u8>> = HashMap::new();
        for (Key(path), object) in &self.nodes {
            // A worker without root cannot make devices, and every container has a `/dev` of its
            // own.
            let is_device = matches!(self.objects[*object].kind, EntryKind::Device { .. });
            if is_device && path.starts_with(b"dev/") {
                continue;
            }
            let path = if path.is_empty() { ROOT.to_vec() } else { join(ROOT, path) };
            let entry = &self.objects[*object];
            let entry = match (&entry.kind, first.get(object)) {
                (EntryKind::File { .. }, Some(to)) => {
                    Entry { path, mode: 0, kind: EntryKind::HardLink { to: to.clone() }, ..directory() }
                }
                (EntryKind::File { .. }, None) => {
                    first.insert(*object, path.clone());
                    Entry { path, ..entry.clone() }
                }
                _ => Entry { path, ..entry.clone() },
            };
            builder.push(entry)?;
        }
        builder.finish()
    }
}

/// The directories of a layer in the tree. The path of a directory that the layer does not describe
/// may lead through symbolic links of lower layers.
struct Places<'l> {
    /// Directories that the layer does not describe, in ascending order.
    implied: &'l [Vec<u8>],
    /// Directories whose place was looked up or differs from their path.
    found: HashMap<&'l [u8], Vec<u8>>,
}

impl<'l> Places<'l> {
    fn is_implied(&self, path: &[u8]) -> bool {
        self.implied.binary_search_by(|implied| compare_paths(implied, path)).is_ok()
    }

    /// Returns the path of a directory of the layer in the tree, and makes it if it is missing.
    fn of(&mut self, tree: &mut Tree, path: &'l [u8]) -> Result<Vec<u8>, String> {
        if let Some(place) = self.found.get(path) {
            return Ok(place.clone());
        }
        if path.is_empty() || !self.is_implied(path) {
            return Ok(path.to_vec());
        }
        let (parent, name) = split(path);
        let parent = self.of(tree, parent)?;
        let place = tree.enter(join(&parent, name))?;
        self.found.insert(path, place.clone());
        Ok(place)
    }
}

/// Returns a directory of root without a path.
fn directory() -> Entry {
    let (path, xattrs) = (Vec::new(), Vec::new());
    let kind = EntryKind::Directory;
    Entry { path, mode: 0o755, uid: 0, gid: 0, mtime_seconds: 0, mtime_nanos: 0, xattrs, kind }
}

fn metadata_entry(metadata: &[u8]) -> Entry {
    let step = MAX_EXTENT_BYTES as usize;
    let extents = metadata.chunks(step).enumerate().map(|(number, piece)| Extent {
        offset: (number * step) as u64,
        length: piece.len() as u32, // At most one step.
        digest: Digest(*blake3::hash(piece).as_bytes()),
    });
    let kind = EntryKind::File { size_bytes: metadata.len() as u64, extents: extents.collect() };
    Entry { path: METADATA.to_vec(), mode: 0o644, kind, ..directory() }
}

/// Splits a path into its directory and its name.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}
