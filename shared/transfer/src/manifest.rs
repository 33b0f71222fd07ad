//! Manifests: the ordered list of a tree's entries, and the digest that names the tree.
//!
//! - **Order**: entries are sorted by path, compared component by component. A directory comes
//!   right before its contents.
//! - **Ordinals** number the extents of all files in this order, from 0.
//! - The **tree digest** is BLAKE3 over the length-delimited canonical encoding of all entries.
//!
//! Invariant: every [`Manifest`] is valid, so its users need not check paths again.
//! [`ManifestBuilder`] enforces it: it checks each entry, and nothing else creates manifests.

use std::cmp::Ordering;
use std::iter;
use std::ops::Range;
use std::path::PathBuf;

use domain::Digest;

use crate::budget::{Budget, BudgetError, ENTRY_MEMORY_BYTES, SharedReservation};
use crate::entry::{Entry, EntryFault, EntryKind, Extent, compare_paths, split};
use crate::ordinal_ranges::OrdinalRanges;

/// Entries do not form a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// The first entry is not the root directory.
    #[error("the first entry is not the root directory")]
    NoRoot,
    /// An entry violates a rule.
    #[error("entry {path:?} {fault}")]
    Entry {
        /// Path of the entry.
        path: PathBuf,
        /// The violated rule.
        fault: EntryFault,
    },
    /// The number of entries exceeds the limit.
    #[error("the tree has more than {0} entries")]
    TooManyEntries(u64),
    /// The encoded entries exceed the limit.
    #[error("the entries are larger than {0} bytes")]
    TooLarge(u64),
    /// Other manifests use the memory budget of the process.
    #[error("other manifests use the memory budget; try again later")]
    NoMemory,
    /// The encoded manifest ends within an entry.
    #[error("the manifest is truncated")]
    CutOff,
    /// The total size of the files exceeds 64 bits.
    #[error("the total size of the files exceeds 64 bits")]
    SizeOverflow,
}

/// Bytes of encoded entries that every manifest may have.
const ANY_BYTES: u64 = 64 << 20;
/// Bytes that each entry adds to the limit. The limit prevents that a tree of a few bytes on disk,
/// such as links with long targets, makes a large manifest.
const ENTRY_BYTES: u64 = 512;
/// Bytes that each extent adds to the limit.
const EXTENT_BYTES: u64 = 64;

/// Limits of a manifest.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of entries.
    pub entries: u64,
    /// Maximum bytes of all encoded entries. A second limit applies: 64 MiB, plus 512 bytes per
    /// entry and 64 per extent.
    pub encoded_bytes: u64,
    /// Memory budget that the manifest shares with others. `None` means no shared budget.
    pub budget: Option<&'static Budget>,
}

impl Limits {
    /// Returns the default limits with the memory budget of this process. They suit manifests from
    /// other processes.
    #[must_use]
    pub fn of_process() -> Self {
        Self { budget: Some(Budget::of_process()), ..Self::default() }
    }
}

impl From<BudgetError> for InvalidManifest {
    fn from(error: BudgetError) -> Self {
        match error {
            BudgetError::Exhausted => Self::NoMemory,
            BudgetError::TooLarge(bytes) => Self::TooLarge(bytes),
        }
    }
}

impl Default for Limits {
    /// Returns limits of 10 million entries and 1 GiB.
    fn default() -> Self {
        Self { entries: 10_000_000, encoded_bytes: 1 << 30, budget: None }
    }
}

/// The validated list of a tree's entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    entries: Vec<Entry>,
    /// Files with extents, each with its first ordinal. Both ascend.
    files: Vec<FirstOrdinal>,
    extent_count: u64,
    extent_bytes: u64,
    size_bytes: u64,
    encoded_bytes: u64,
    digest: Digest,
    reserved: SharedReservation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FirstOrdinal {
    ordinal: u64,
    entry: usize,
}

/// An extent with its position in a manifest.
#[derive(Debug, Clone, Copy)]
pub struct LocatedExtent<'a> {
    /// Ordinal of the extent.
    pub ordinal: u64,
    /// Index of the file among the entries.
    pub entry: usize,
    /// The extent.
    pub extent: &'a Extent,
}

impl Manifest {
    /// Creates a manifest from entries.
    ///
    /// # Errors
    ///
    /// Fails if the entries violate a rule or exceed the limits.
    pub fn new(entries: impl IntoIterator<Item = Entry>, limits: Limits) -> Result<Self, InvalidManifest> {
        let mut builder = ManifestBuilder::new(limits);
        entries.into_iter().try_for_each(|entry| builder.push(entry))?;
        builder.finish()
    }

    /// Returns the entries, the root first.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the digest of the tree.
    #[must_use]
    pub fn tree_digest(&self) -> Digest {
        self.digest
    }

    /// Returns the total size of the files in bytes, holes included. A file with several links
    /// counts once.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the total length of the extents in bytes: the content for a receiver without any of
    /// it.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// Returns the number of extents. All ordinals are below this number.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        self.extent_count
    }

    /// Returns the total length of the encoded entries, in bytes.
    #[must_use]
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes
    }

    /// Releases the manifest's share of its budget. The caller must bound the memory of the
    /// manifest in another way.
    pub fn release_budget(&self) {
        self.reserved.release();
    }

    /// Returns the index of the entry at `path`.
    #[must_use]
    pub fn find(&self, path: &[u8]) -> Option<usize> {
        self.entries.binary_search_by(|entry| compare_paths(&entry.path, path)).ok()
    }

    /// Returns all extents in ascending order.
    pub fn extents(&self) -> impl Iterator<Item = LocatedExtent<'_>> {
        self.extents_in(0..self.extent_count)
    }

    /// Returns the extents with `ordinals`, in ascending order. Skips ordinals that do not exist.
    pub fn extents_in(&self, ordinals: Range<u64>) -> impl Iterator<Item = LocatedExtent<'_>> {
        let first_file = self.files.partition_point(|file| file.ordinal <= ordinals.start).saturating_sub(1);
        self.files[first_file.min(self.files.len())..]
            .iter()
            .take_while(move |file| file.ordinal < ordinals.end)
            .flat_map(move |file| {
                let extents = self.entries[file.entry].extents();
                let skip = usize::try_from(ordinals.start.saturating_sub(file.ordinal)).unwrap_or(usize::MAX);
                let end = ordinals.end;
                (file.ordinal..)
                    .zip(extents)
                    .skip(skip)
                    .take_while(move |(ordinal, _)| *ordinal < end)
                    .map(|(ordinal, extent)| LocatedExtent { ordinal, entry: file.entry, extent })
            })
    }

    /// Returns the extent with `ordinal`.
    #[must_use]
    pub fn locate(&self, ordinal: u64) -> Option<LocatedExtent<'_>> {
        let file = self.files.partition_point(|file| file.ordinal <= ordinal).checked_sub(1)?;
        let FirstOrdinal { ordinal: first, entry } = self.files[file];
        let index = usize::try_from(ordinal - first).ok()?;
        let extent = self.entries[entry].extents().get(index)?;
        Some(LocatedExtent { ordinal, entry, extent })
    }

    /// Returns the ordinals of the extents of the entry at index `entry`. Empty if it has no
    /// extents.
    #[must_use]
    pub fn ordinals_of(&self, entry: usize) -> Range<u64> {
        match self.files.binary_search_by_key(&entry, |file| file.entry) {
            Ok(found) => {
                let first = self.files[found].ordinal;
                first..self.files.get(found + 1).map_or(self.extent_count, |next| next.ordinal)
            }
            Err(_) => 0..0,
        }
    }

    /// Returns the total length of the extents with `ordinals`, in bytes.
    #[must_use]
    pub fn bytes_of(&self, ordinals: &OrdinalRanges) -> u64 {
        let extents = ordinals.runs().flat_map(|run| self.extents_in(run));
        extents.map(|located| u64::from(located.extent.length)).sum()
    }

    /// Splits the entries into parts of at most `max_bytes` encoded bytes. A larger entry is a part
    /// alone.
    pub fn parts(&self, max_bytes: usize) -> impl Iterator<Item = &[Entry]> {
        let mut rest = &self.entries[..];
        iter::from_fn(move || {
            let mut bytes = 0;
            let fit = |entry: &&Entry| {
                bytes += encoded_at_most(entry);
                bytes <= max_bytes
            };
            let count = rest.iter().take_while(fit).count().max(1).min(rest.len());
            let (part, after) = rest.split_at(count);
            rest = after;
            (!part.is_empty()).then_some(part)
        })
    }
}

/// Returns an upper bound of the bytes that an entry takes in a message.
fn encoded_at_most(entry: &Entry) -> usize {
    // An extent takes at most 2 + 11 + 7 bytes for tags, lengths and numbers, and 34 for its
    // digest.
    let xattrs: usize = entry.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len() + 16).sum();
    let kind = match &entry.kind {
        EntryKind::File { extents, .. } => 32 + extents.len() * 56,
        EntryKind::Symlink { target } => target.len(),
        EntryKind::HardLink { to } => to.len(),
        EntryKind::Directory | EntryKind::Fifo | EntryKind::Device { .. } => 32,
    };
    64 + entry.path.len() + xattrs + kind
}

/// Builds a manifest entry by entry, and rejects the first entry that violates a rule.
#[derive(Debug)]
pub struct ManifestBuilder {
    limits: Limits,
    manifest: Manifest,
    /// Indices of the directories around the last entry, outermost first, including the entry if it
    /// is a directory.
    open: Vec<usize>,
    /// A file that lacks a part of its extents.
    begun: Option<Entry>,
    hasher: blake3::Hasher,
}

impl ManifestBuilder {
    /// Creates a builder with `limits`.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let manifest = Manifest {
            entries: Vec::new(),
            files: Vec::new(),
            extent_count: 0,
            extent_bytes: 0,
            size_bytes: 0,
            encoded_bytes: 0,
            digest: Digest([0; 32]),
            reserved: SharedReservation::of(limits.budget),
        };
        Self { limits, manifest, open: Vec::new(), begun: None, hasher: blake3::Hasher::new() }
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.manifest.entries.len()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.manifest.entries.is_empty()
    }

    /// Adds an encoded entry. If a file was started, `bytes` must have the rest of its extents.
    ///
    /// # Errors
    ///
    /// Fails if the entry is malformed, violates a rule or exceeds the limits.
    pub fn push_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        self.push(entry)
    }

    /// Starts or continues a file with more extents than fit into a message. The next entry must
    /// have the same path and size, and further extents. Only the metadata of the first part
    /// counts.
    ///
    /// # Errors
    ///
    /// Fails if the entry is malformed, is not a file, or exceeds the limits.
    pub fn begin_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        if !matches!(entry.kind, EntryKind::File { .. }) {
            return Err(InvalidManifest::Entry { path: entry.path().to_owned(), fault: EntryFault::Extents });
        }
        // This share is for the incomplete file. The complete file is counted once more when it is
        // pushed.
        self.manifest.reserved.grow(bytes.len() as u64)?;
        self.begun = Some(entry);
        Ok(())
    }

    /// Decodes an entry, and joins it with the file that was started before.
    fn take(&mut self, bytes: &[u8]) -> Result<Entry, InvalidManifest> {
        if bytes.len() as u64 > self.limits.encoded_bytes {
            return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes));
        }
        let entry =
            Entry::decode_named(bytes).map_err(|(path, fault)| InvalidManifest::Entry { path, fault })?;
        let Some(mut begun) = self.begun.take() else { return Ok(entry) };
        let path = begun.path().to_owned();
        match (&mut begun.kind, entry.kind) {
            (
                EntryKind::File { size_bytes, extents },
                EntryKind::File { size_bytes: same, extents: more },
            ) if begun.path == entry.path && *size_bytes == same => {
                extents.extend(more);
                // An encoded extent is longer than its digest.
                if (extents.len() * size_of::<Digest>()) as u64 > self.limits.encoded_bytes {
                    return Err(InvalidManifest::TooLarge(self.limits.encoded_bytes));
                }
                Ok(begun)
            }
            _ => Err(InvalidManifest::Entry { path, fault: EntryFault::Unfinished }),
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    ///
    /// Fails if the entry violates a rule or exceeds the limits. The builder is then unchanged.
    pub fn push(&mut self, entry: Entry) -> Result<(), InvalidManifest> {
        let fault = |fault| InvalidManifest::Entry { path: entry.path().to_owned(), fault };
        if let Some(begun) = &self.begun {
            return Err(InvalidManifest::Entry {
                path: begun.path().to_owned(),
                fault: EntryFault::Unfinished,
            });
        }
        if self.len() as u64 >= self.limits.entries {
            return Err(InvalidManifest::TooManyEntries(self.limits.entries));
        }
        entry.check().map_err(fault)?;
        let depth = self.place(&entry)?;
        if let EntryKind::HardLink { to } = &entry.kind {
            let target = self.manifest.find(to).map(|index| &self.manifest.entries[index].kind);
            if !matches!(target, Some(EntryKind::File { .. })) {
                return Err(fault(EntryFault::HardLinkTarget));
            }
        }
        let encoded = entry.encode_length_delimited();
        let encoded_bytes = self.manifest.encoded_bytes + encoded.len() as u64;
        let extents = self.manifest.extent_count + entry.extents().len() as u64;
        let most = ANY_BYTES + ENTRY_BYTES * (self.len() as u64 + 1) + EXTENT_BYTES * extents;
        let most = most.min(self.limits.encoded_bytes);
        if encoded_bytes > most {
            return Err(InvalidManifest::TooLarge(most));
        }
        self.manifest.reserved.grow(encoded.len() as u64 + ENTRY_MEMORY_BYTES)?;
        let size = if let EntryKind::File { size_bytes, .. } = entry.kind { size_bytes } else { 0 };
        let size_bytes = self.manifest.size_bytes.checked_add(size).ok_or(InvalidManifest::SizeOverflow)?;

        let index = self.len();
        let extents = entry.extents();
        if !extents.is_empty() {
            self.manifest.files.push(FirstOrdinal { ordinal: self.manifest.extent_count, entry: index });
            self.manifest.extent_count += extents.len() as u64;
            self.manifest.extent_bytes += extents.iter().map(|extent| u64::from(extent.length)).sum::<u64>();
        }
        self.manifest.size_bytes = size_bytes;
        self.manifest.encoded_bytes = encoded_bytes;
        self.hasher.update(&encoded);
        self.open.truncate(depth);
        if entry.is_directory() {
            self.open.push(index);
        }
        self.manifest.entries.push(entry);
        Ok(())
    }

    /// Checks the position of `entry`, and returns the number of open directories around it.
    fn place(&self, entry: &Entry) -> Result<usize, InvalidManifest> {
        let fault = |fault| InvalidManifest::Entry { path: entry.path().to_owned(), fault };
        let Some(last) = self.manifest.entries.last() else {
            let is_root = entry.path.is_empty() && entry.is_directory();
            return is_root.then_some(0).ok_or(InvalidManifest::NoRoot);
        };
        if compare_paths(&last.path, &entry.path) != Ordering::Less {
            return Err(fault(EntryFault::Order));
        }
        // In this order, a directory is followed directly by its contents, so the parent is among
        // the open directories.
        let parent = split(&entry.path).0;
        let depth = self.open.iter().rposition(|index| self.manifest.entries[*index].path == parent);
        depth.map(|depth| depth + 1).ok_or_else(|| fault(EntryFault::Parent))
    }

    /// Returns the manifest.
    ///
    /// # Errors
    ///
    /// Fails if there is no root, or if a file was started and not finished.
    pub fn finish(mut self) -> Result<Manifest, InvalidManifest> {
        if let Some(begun) = self.begun {
            let path = begun.path().to_owned();
            return Err(InvalidManifest::Entry { path, fault: EntryFault::Unfinished });
        }
        if self.is_empty() {
            return Err(InvalidManifest::NoRoot);
        }
        self.manifest.digest = Digest(*self.hasher.finalize().as_bytes());
        Ok(self.manifest)
    }
}
