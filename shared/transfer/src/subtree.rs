//! A directory of a tree, as a tree of its own.

use std::collections::HashMap;

use crate::manifest::{Entry, EntryKind, InvalidManifest, Limits, Manifest};

/// A directory of a tree, as a tree of its own.
///
/// A file of which the first link lies outside of the directory stands at its first link inside.
#[derive(Debug)]
pub struct Subtree {
    manifest: Manifest,
    /// For each file with content: the first of its ordinals, and the first that it has in the whole tree. Ascending.
    files: Vec<(u64, u64)>,
}

impl Manifest {
    /// The directory at `path`. `None`: there is none.
    ///
    /// # Errors
    ///
    /// None that the whole tree would not have had.
    pub fn subtree(&self, path: &[u8]) -> Result<Option<Subtree>, InvalidManifest> {
        let Some(root) = self.find(path).filter(|index| self.entries()[*index].is_directory()) else {
            return Ok(None);
        };
        let inside = |at: &[u8]| {
            let rest = if path.is_empty() { Some(at) } else { at.strip_prefix(path)?.strip_prefix(b"/") };
            rest.map(<[u8]>::to_vec)
        };
        let mut entries = vec![Entry { path: Vec::new(), ..self.entries()[root].clone() }];
        // By its index in the whole tree, where a file from outside stands inside.
        let mut hoisted: HashMap<usize, Vec<u8>> = HashMap::new();
        // The index of each entry in the whole tree, of which it has the content.
        let mut origins = vec![root];
        for (index, entry) in self.entries().iter().enumerate().skip(root + 1) {
            let Some(path) = inside(&entry.path) else { break };
            let (mut entry, mut origin) = (Entry { path, ..entry.clone() }, index);
            if let EntryKind::HardLink { to } = &mut entry.kind {
                match (inside(to), self.find(to)) {
                    (Some(target), _) => *to = target,
                    (None, Some(target)) => match hoisted.get(&target) {
                        Some(first) => to.clone_from(first),
                        None => {
                            hoisted.insert(target, entry.path.clone());
                            entry = Entry { path: entry.path, ..self.entries()[target].clone() };
                            origin = target;
                        }
                    },
                    // A manifest has no link to what is not there.
                    (None, None) => {}
                }
            }
            entries.push(entry);
            origins.push(origin);
        }
        let limits = Limits { entries: u64::MAX, encoded_bytes: u64::MAX };
        let manifest = Manifest::new(entries, limits)?;
        let of = |index: usize| Some((manifest.ordinals_of(index), self.ordinals_of(*origins.get(index)?)));
        let files = (0..manifest.entries().len()).filter_map(of).filter(|(here, _)| !here.is_empty());
        let files = files.map(|(here, there)| (here.start, there.start)).collect();
        Ok(Some(Subtree { manifest, files }))
    }
}

impl Subtree {
    /// What it holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The ordinal in the whole tree of an extent of this one.
    #[must_use]
    pub fn origin(&self, ordinal: u64) -> Option<u64> {
        let file = self.files.partition_point(|(here, _)| *here <= ordinal).checked_sub(1)?;
        let (here, there) = self.files[file];
        (ordinal < self.manifest.extent_count()).then_some(there + (ordinal - here))
    }
}

#[cfg(test)]
mod tests {
    use domain::Digest;

    use super::*;
    use crate::manifest::Extent;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let (mode, mtime_seconds) =
            if matches!(kind, EntryKind::HardLink { .. }) { (0, 0) } else { (0o755, 7) };
        let path = path.as_bytes().to_vec();
        Entry { path, mode, uid: 0, gid: 0, mtime_seconds, mtime_nanos: 0, xattrs: Vec::new(), kind }
    }

    /// With as many extents as the name is long, the bytes of which are that length.
    fn file(path: &str) -> Entry {
        let digest = Digest(*blake3::hash(path.as_bytes()).as_bytes());
        let extent = |at| Extent { offset: at, length: 1, digest };
        let size = path.len() as u64;
        entry(path, EntryKind::File { size_bytes: size, extents: (0..size).map(extent).collect() })
    }

    fn link(path: &str, to: &str) -> Entry {
        entry(path, EntryKind::HardLink { to: to.as_bytes().to_vec() })
    }

    #[test]
    fn a_directory_is_a_tree_of_its_own_with_files_that_are_linked_from_outside() {
        let tree = [
            entry("", EntryKind::Directory),
            file("a"),
            entry("d", EntryKind::Directory),
            link("d/b", "a"),
            file("d/c"),
            entry("d/e", EntryKind::Directory),
            link("d/e/f", "a"),
            link("d/e/g", "d/c"),
            file("d-"),
        ];
        let tree = Manifest::new(tree, Limits::default()).expect("valid");
        let found = tree.subtree(b"d").expect("valid").expect("a directory");
        let listed: Vec<_> =
            found.manifest().entries().iter().map(|entry| (&entry.path[..], &entry.kind)).collect();
        let of = |path: &[u8]| &tree.entries()[tree.find(path).expect("there")].kind;
        let to = |path: &[u8]| EntryKind::HardLink { to: path.to_vec() };
        let expected: [(&[u8], &EntryKind); 6] = [
            (b"", &EntryKind::Directory),
            (b"b", of(b"a")),
            (b"c", of(b"d/c")),
            (b"e", &EntryKind::Directory),
            (b"e/f", &to(b"b")),
            (b"e/g", &to(b"c")),
        ];
        assert_eq!(listed, expected);
        for located in found.manifest().extents() {
            let origin =
                found.origin(located.ordinal).and_then(|ordinal| tree.locate(ordinal)).expect("an extent");
            assert_eq!(origin.extent, located.extent);
        }
        assert_eq!(found.origin(found.manifest().extent_count()), None);

        let whole = tree.subtree(b"").expect("valid").expect("a directory");
        assert_eq!(whole.manifest().tree_digest(), tree.tree_digest());
        for none in [&b"a"[..], b"d/b", b"x", b"d/", b"/d", b".."] {
            assert!(tree.subtree(none).expect("valid").is_none(), "{none:?}");
        }
    }
}
