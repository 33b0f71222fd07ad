//! Subtrees: a directory or a selection of a tree, as a separate manifest.

use std::collections::HashMap;
use std::sync::Arc;

use crate::entry::{Entry, EntryKind};
use crate::manifest::{InvalidManifest, Limits, Manifest};
use crate::ordinal_ranges::OrdinalRanges;

/// A part of a tree as a separate manifest, with a mapping between the ordinals.
///
/// If the first link of a file is outside of the part, the file is at its first link inside.
#[derive(Debug)]
pub struct Subtree {
    manifest: Arc<Manifest>,
    /// First ordinal of each file with content: in this tree, and in the whole tree. Ascending.
    files: Vec<(u64, u64)>,
    /// First ordinal of each file with content: in the whole tree, and in this tree. Ascending.
    back: Vec<(u64, u64)>,
}

pub(crate) fn is_at_or_below(path: &[u8], directory: &[u8]) -> bool {
    let rest = path.strip_prefix(directory);
    directory.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

impl Manifest {
    /// Returns the directory at `path` as a subtree, or `None` if there is no such directory.
    ///
    /// # Errors
    ///
    /// Fails only if the whole tree would violate a rule, too.
    pub fn subtree(&self, path: &[u8]) -> Result<Option<Subtree>, InvalidManifest> {
        let Some(root) = self.find(path).filter(|index| self.entries()[*index].is_directory()) else {
            return Ok(None);
        };
        let inside = |at: &[u8]| {
            let rest = if path.is_empty() { Some(at) } else { at.strip_prefix(path)?.strip_prefix(b"/") };
            rest.map(<[u8]>::to_vec)
        };
        let place = |entry: &Entry| {
            let at = if entry.path == path { Vec::new() } else { inside(&entry.path)? };
            Some(Entry { path: at, ..entry.clone() })
        };
        self.project(root, place).map(Some)
    }

    /// Returns the entries that `place` returns as a subtree. If it leaves a directory out, the
    /// contents are left out, too. If it leaves the first link of a file out, the file moves to the
    /// first remaining link.
    ///
    /// # Errors
    ///
    /// Fails if `place` returns entries that violate a rule.
    pub fn select(&self, place: impl Fn(&Entry) -> Option<Entry>) -> Result<Subtree, InvalidManifest> {
        self.project(0, place)
    }

    /// Returns the entry at index `root` and its contents as a subtree, as far as `place` returns
    /// them.
    fn project(
        &self,
        root: usize,
        place: impl Fn(&Entry) -> Option<Entry>,
    ) -> Result<Subtree, InvalidManifest> {
        let root_path = &self.entries()[root].path;
        let mut entries: Vec<Entry> = Vec::new();
        // Index of each entry in the whole tree.
        let mut indices: Vec<usize> = Vec::new();
        // New path of each moved file, by its index in the whole tree.
        let mut hoisted: HashMap<usize, Vec<u8>> = HashMap::new();
        // Index of the entry in the whole tree with the content of each entry.
        let mut origins = Vec::new();
        // The last directory that was left out.
        let mut left_out: Option<&[u8]> = None;
        for (index, entry) in self.entries().iter().enumerate().skip(root) {
            if !is_at_or_below(&entry.path, root_path) {
                break;
            }
            if left_out.is_some_and(|left_out| is_at_or_below(&entry.path, left_out)) {
                continue;
            }
            let Some(mut placed) = place(entry) else {
                if entry.is_directory() {
                    left_out = Some(&entry.path);
                }
                continue;
            };
            let mut origin = index;
            if let EntryKind::HardLink { to } = &entry.kind
                && let Some(target) = self.find(to)
            {
                let kept = indices.binary_search(&target).ok().map(|kept| entries[kept].path.clone());
                match kept.or_else(|| hoisted.get(&target).cloned()) {
                    Some(to) => placed.kind = EntryKind::HardLink { to },
                    None => {
                        let file = Entry { path: entry.path.clone(), ..self.entries()[target].clone() };
                        let Some(file) = place(&file) else { continue };
                        hoisted.insert(target, file.path.clone());
                        (placed, origin) = (file, target);
                    }
                }
            }
            entries.push(placed);
            indices.push(index);
            origins.push(origin);
        }
        let limits = Limits { entries: u64::MAX, encoded_bytes: u64::MAX, budget: None };
        let manifest = Manifest::new(entries, limits)?;
        let of = |index: usize| Some((manifest.ordinals_of(index), self.ordinals_of(*origins.get(index)?)));
        let files = (0..manifest.entries().len()).filter_map(of).filter(|(here, _)| !here.is_empty());
        let files: Vec<_> = files.map(|(here, there)| (here.start, there.start)).collect();
        let mut back: Vec<_> = files.iter().map(|(here, there)| (*there, *here)).collect();
        back.sort_unstable();
        Ok(Subtree { manifest: Arc::new(manifest), files, back })
    }
}

impl Subtree {
    /// Returns this tree as a part of the whole tree of `outer`. This tree must be a part of
    /// `outer`.
    #[must_use]
    pub fn within(self, outer: &Self) -> Self {
        let whole = |(here, there): (u64, u64)| Some((here, outer.origin(there)?));
        let files: Vec<_> = self.files.into_iter().filter_map(whole).collect();
        let mut back: Vec<_> = files.iter().map(|(here, there)| (*there, *here)).collect();
        back.sort_unstable();
        Self { manifest: self.manifest, files, back }
    }

    /// Returns the manifest.
    #[must_use]
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Returns the ordinal in the whole tree of an extent of this tree.
    #[must_use]
    pub fn origin(&self, ordinal: u64) -> Option<u64> {
        let file = self.files.partition_point(|(here, _)| *here <= ordinal).checked_sub(1)?;
        let (here, there) = self.files[file];
        (ordinal < self.manifest.extent_count()).then_some(there + (ordinal - here))
    }

    /// Returns the ordinal in this tree of an extent of the whole tree. `None` if the file was left
    /// out.
    #[must_use]
    pub fn ordinal(&self, origin: u64) -> Option<u64> {
        let file = self.back.partition_point(|(there, _)| *there <= origin).checked_sub(1)?;
        let (there, here) = self.back[file];
        let ordinal = here + (origin - there);
        (self.origin(ordinal) == Some(origin)).then_some(ordinal)
    }

    /// Returns the ordinals in the whole tree of extents of this tree.
    #[must_use]
    pub fn origins(&self, ordinals: &OrdinalRanges) -> OrdinalRanges {
        let mut origins: Vec<u64> =
            ordinals.runs().flatten().filter_map(|ordinal| self.origin(ordinal)).collect();
        origins.sort_unstable();
        let mut runs = OrdinalRanges::new();
        for origin in origins {
            // Ordinals ascend, so this cannot fail.
            _ = runs.insert(origin);
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use domain::Digest;

    use super::*;
    use crate::entry::Extent;

    fn entry(path: &str, kind: EntryKind) -> Entry {
        let (mode, mtime_seconds) =
            if matches!(kind, EntryKind::HardLink { .. }) { (0, 0) } else { (0o755, 7) };
        let path = path.as_bytes().to_vec();
        Entry { path, mode, uid: 0, gid: 0, mtime_seconds, mtime_nanos: 0, xattrs: Vec::new(), kind }
    }

    /// Creates a file with an extent for each byte of its name.
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
    fn subtree_includes_files_linked_from_outside() {
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
            assert_eq!(found.ordinal(origin.ordinal), Some(located.ordinal));
        }
        let known = (0..tree.extent_count()).filter_map(|origin| found.ordinal(origin));
        assert_eq!(known.count() as u64, found.manifest().extent_count());
        assert_eq!(found.origin(found.manifest().extent_count()), None);

        let whole = tree.subtree(b"").expect("valid").expect("a directory");
        assert_eq!(whole.manifest().tree_digest(), tree.tree_digest());
        for none in [&b"a"[..], b"d/b", b"x", b"d/", b"/d", b".."] {
            assert!(tree.subtree(none).expect("valid").is_none(), "{none:?}");
        }
    }
}
