//! Small trees: trees of files that fit one message.
//!
//! The artifact store parses them, and the command line creates them. A caller sends entries with
//! their contents; this module computes the manifest and the digest. Invariant: a [`SmallTree`] is
//! within its limits and has a valid manifest. [`parse`] enforces it.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use domain::Digest;
use prost::{DecodeError, Message};
use tonic::Status;
use transfer::{ArchiveWriteError, ArchiveWriter, Entry, EntryKind, Extent, Limits, Manifest, compare_paths};

use crate::invalid_field;
use crate::pb::artifacts as pb;
use crate::pb::artifacts::small_tree_entry::Content;

/// Maximum number of entries, including implied directories and without the root.
pub const MAX_ENTRIES: usize = 1000;
/// Maximum total size of paths, contents and link targets, in bytes.
pub const MAX_BYTES: usize = 1 << 20;

const DEFAULT_FILE_MODE: u32 = 0o644;
const DEFAULT_DIRECTORY_MODE: u32 = 0o755;

/// A tree with all of its contents.
#[derive(Debug, Clone)]
pub struct SmallTree {
    manifest: Arc<Manifest>,
    /// Content of each extent, by its ordinal.
    contents: Vec<Bytes>,
}

/// Reason why a directory is not a small tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotSmall {
    /// Too many entries.
    #[error("the tree has more than {MAX_ENTRIES} entries")]
    Entries,
    /// Too many bytes.
    #[error("the paths and contents have more than {MAX_BYTES} bytes")]
    Bytes,
    /// An entry of a kind that small trees do not support.
    #[error("{0:?} is {1}; use an upload instead")]
    Kind(std::path::PathBuf, &'static str),
}

/// Parses a tree. Errors name fields below `field`.
pub fn parse(field: &str, tree: &pb::SmallTree) -> Result<SmallTree, Status> {
    let of_entries = format!("{field}.entries");
    if tree.entries.iter().filter(|entry| !entry.path.is_empty()).count() > MAX_ENTRIES {
        return Err(invalid_field(of_entries, format!("must be at most {MAX_ENTRIES}; upload it instead")));
    }
    if tree.entries.iter().map(bytes_of).sum::<usize>() > MAX_BYTES {
        let message = format!("must have at most {MAX_BYTES} bytes in all; upload them instead");
        return Err(invalid_field(of_entries, message));
    }
    let mut entries = Vec::with_capacity(tree.entries.len() + 1);
    for (index, entry) in tree.entries.iter().enumerate() {
        entries.push(parse_entry(&format!("{of_entries}[{index}]"), entry)?);
    }
    entries.sort_by(|(one, _), (other, _)| compare_paths(&one.path, &other.path));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].0.path == pair[1].0.path) {
        let message = format!("{:?} must occur only once", pair[0].0.path());
        return Err(invalid_field(format!("{of_entries}.path"), message));
    }
    for path in implied(&entries).map_err(|error| invalid_field(&of_entries, error.to_string()))? {
        entries.push((directory(path), Bytes::new()));
    }
    entries.sort_by(|(one, _), (other, _)| compare_paths(&one.path, &other.path));

    let (entries, contents): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
    let manifest = Manifest::new(entries, Limits::default())
        .map_err(|error| invalid_field(format!("{of_entries}.path"), error.to_string()))?;
    // Each file has one extent, or none if it is empty.
    let contents = contents.into_iter().filter(|content| !content.is_empty()).collect();
    Ok(SmallTree { manifest: Arc::new(manifest), contents })
}

/// Returns the size of an entry that counts towards [`MAX_BYTES`].
fn bytes_of(entry: &pb::SmallTreeEntry) -> usize {
    let what = match &entry.content {
        Some(Content::File(bytes) | Content::Symlink(bytes)) => bytes.len(),
        Some(Content::Directory(_)) | None => 0,
    };
    entry.path.len() + what
}

fn parse_entry(field: &str, entry: &pb::SmallTreeEntry) -> Result<(Entry, Bytes), Status> {
    let of = |name: &str| format!("{field}.{name}");
    let Some(what) = &entry.content else { return Err(invalid_field(of("what"), "is required")) };
    let (kind, default_mode, content) = match what {
        Content::File(content) => {
            let size_bytes = content.len() as u64;
            // No content exceeds the maximum size of an extent.
            let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
            let digest = Digest(*blake3::hash(content).as_bytes());
            let extents = if length == 0 { Vec::new() } else { vec![Extent { offset: 0, length, digest }] };
            (EntryKind::File { size_bytes, extents }, DEFAULT_FILE_MODE, content.clone())
        }
        Content::Symlink(target) => (EntryKind::Symlink { target: target.to_vec() }, 0, Bytes::new()),
        Content::Directory(_) => (EntryKind::Directory, DEFAULT_DIRECTORY_MODE, Bytes::new()),
    };
    if entry.path.is_empty() && kind != EntryKind::Directory {
        return Err(invalid_field(of("path"), "is the root, which must be a directory"));
    }
    let at = entry.modified_at.unwrap_or_default();
    let parsed = Entry {
        path: entry.path.to_vec(),
        mode: entry.mode.unwrap_or(default_mode),
        uid: entry.uid,
        gid: entry.gid,
        mtime_seconds: at.seconds,
        mtime_nanos: u32::try_from(at.nanos)
            .map_err(|_| invalid_field(of("modified_at"), "must not have negative nanos"))?,
        xattrs: Vec::new(),
        kind,
    };
    parsed.check().map_err(|fault| {
        use transfer::EntryFault as Fault;
        let name = match fault {
            Fault::Mode => "mode",
            Fault::Mtime => "modified_at",
            Fault::SymlinkTarget => "symlink",
            _ => "path",
        };
        invalid_field(of(name), format!("the entry {fault}"))
    })?;
    Ok((parsed, content))
}

/// Returns the parent directories that `entries` does not contain. Fails if the total exceeds
/// [`MAX_ENTRIES`].
fn implied(entries: &[(Entry, Bytes)]) -> Result<BTreeSet<Vec<u8>>, NotSmall> {
    let named: BTreeSet<&[u8]> = entries.iter().map(|(entry, _)| &entry.path[..]).collect();
    let mut implied = BTreeSet::new();
    if !named.contains(&b""[..]) {
        implied.insert(Vec::new());
    }
    for (entry, _) in entries {
        let mut at = &entry.path[..];
        while let Some(slash) = at.iter().rposition(|byte| *byte == b'/') {
            at = &at[..slash];
            if named.contains(at) || !implied.insert(at.to_vec()) {
                break;
            }
            // The root does not count.
            if entries.len() + implied.len() > MAX_ENTRIES + 1 {
                return Err(NotSmall::Entries);
            }
        }
    }
    Ok(implied)
}

fn directory(path: Vec<u8>) -> Entry {
    Entry {
        path,
        mode: DEFAULT_DIRECTORY_MODE,
        uid: 0,
        gid: 0,
        mtime_seconds: 0,
        mtime_nanos: 0,
        xattrs: Vec::new(),
        kind: EntryKind::Directory,
    }
}

/// Creates a tree from a manifest. `read` returns the content of an extent by its ordinal.
pub fn from_manifest<E: From<NotSmall>>(
    manifest: &Manifest,
    mut read: impl FnMut(u64) -> Result<Bytes, E>,
) -> Result<pb::SmallTree, E> {
    // The root does not count.
    if manifest.entries().len() > MAX_ENTRIES + 1 {
        return Err(NotSmall::Entries.into());
    }
    if manifest.size_bytes() > MAX_BYTES as u64 {
        return Err(NotSmall::Bytes.into());
    }
    let mut entries = Vec::with_capacity(manifest.entries().len());
    for (index, entry) in manifest.entries().iter().enumerate() {
        let not = |what| NotSmall::Kind(entry.path().to_owned(), what);
        if !entry.xattrs.is_empty() {
            return Err(not("an entry with extended attributes").into());
        }
        let what = match &entry.kind {
            EntryKind::Directory => Content::Directory(pb::SmallTreeDirectory {}),
            EntryKind::Symlink { target } => Content::Symlink(Bytes::copy_from_slice(target)),
            EntryKind::File { size_bytes, extents } => {
                // No file is larger than the whole tree.
                let mut content = vec![0; usize::try_from(*size_bytes).unwrap_or(MAX_BYTES)];
                for (ordinal, extent) in manifest.ordinals_of(index).zip(extents) {
                    let start = usize::try_from(extent.offset).unwrap_or(usize::MAX);
                    let data = read(ordinal)?;
                    if let Some(place) = content.get_mut(start..start.saturating_add(data.len())) {
                        place.copy_from_slice(&data);
                    }
                }
                Content::File(content.into())
            }
            EntryKind::HardLink { .. } => return Err(not("a hard link").into()),
            EntryKind::Fifo => return Err(not("a named pipe").into()),
            EntryKind::Device { .. } => return Err(not("a device").into()),
        };
        let nanos = i32::try_from(entry.mtime_nanos).unwrap_or(0);
        entries.push(pb::SmallTreeEntry {
            path: Bytes::copy_from_slice(&entry.path),
            mode: (!matches!(what, Content::Symlink(_))).then_some(entry.mode),
            uid: entry.uid,
            gid: entry.gid,
            modified_at: Some(prost_types::Timestamp { seconds: entry.mtime_seconds, nanos }),
            content: Some(what),
        });
    }
    if entries.iter().map(bytes_of).sum::<usize>() > MAX_BYTES {
        return Err(NotSmall::Bytes.into());
    }
    Ok(pb::SmallTree { entries })
}

/// Encodes a tree for storage.
#[must_use]
pub fn encode(tree: &pb::SmallTree) -> Vec<u8> {
    tree.encode_to_vec()
}

/// Decodes a stored tree.
pub fn decode(bytes: Vec<u8>) -> Result<pb::SmallTree, DecodeError> {
    pb::SmallTree::decode(Bytes::from(bytes))
}

impl SmallTree {
    /// Digest of the tree.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.manifest.tree_digest()
    }

    /// Size of all files, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.manifest.size_bytes()
    }

    /// The tree as a tar archive.
    pub fn archive(&self) -> Result<Vec<u8>, ArchiveWriteError> {
        let mut writer = ArchiveWriter::new(Vec::new(), self.manifest.clone());
        for (ordinal, content) in (0..).zip(&self.contents) {
            writer.put(ordinal, content)?;
        }
        writer.finish()
    }
}

#[cfg(test)]
mod tests;
