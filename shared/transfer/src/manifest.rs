//! Manifests: what a tree holds, entry by entry, and the digest that names it.
//!
//! Entries stand in the byte order of their paths compared component by component, so that a directory comes right
//! before what it holds. **Ordinals** number the extents of all files in that order, from 0. The **digest of a
//! tree** is BLAKE3 over the length-delimited canonical encoding of each entry in turn.
//!
//! Invariant: a [`Manifest`] is valid. The only way to one is a [`ManifestBuilder`], which checks each entry when it
//! is pushed, so whoever holds a manifest may apply it without asking again whether a path is safe.

use std::cmp::Ordering;
use std::iter;
use std::ops::Range;
use std::path::PathBuf;

use domain::Digest;

use crate::budget::{Budget, BudgetError, ENTRY_MEMORY_BYTES, SharedReservation};
use crate::entry::{Entry, EntryFault, EntryKind, Extent, compare_paths, split};
use crate::ordinal_ranges::OrdinalRanges;

/// Why entries make no manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// The first entry is not the root directory.
    #[error("the first entry is not the root directory")]
    NoRoot,
    /// An entry breaks a rule.
    #[error("entry {path:?} {fault}")]
    Entry {
        /// Its path.
        path: PathBuf,
        /// The rule.
        fault: EntryFault,
    },
    /// There are more entries than may be.
    #[error("there are more than {0} entries")]
    TooManyEntries(u64),
    /// The encoded entries are larger than may be.
    #[error("the entries are larger than {0} bytes")]
    TooLarge(u64),
    /// Other manifests take the memory that there is for all.
    #[error("other manifests take the memory that there is for all")]
    NoMemory,
    /// It ends in the midst of an entry.
    #[error("the manifest is cut off")]
    CutOff,
    /// The files together are larger than can be counted.
    #[error("the files are larger than can be counted")]
    SizeOverflow,
}

/// Bytes of encoded entries that any manifest may have.
const ANY_BYTES: u64 = 64 << 20;
/// Bytes that each entry adds to the limit. A few bytes on a disk, such as a link with a long target, make no large manifest.
const ENTRY_BYTES: u64 = 512;
/// Bytes that each extent adds to the limit.
const EXTENT_BYTES: u64 = 64;

/// How much a manifest may hold.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most entries.
    pub entries: u64,
    /// Most bytes of all entries, encoded. The limit is also at most 64 MiB plus 512 bytes for each entry and 64 for each extent.
    pub encoded_bytes: u64,
    /// What the manifest shares with others. `None`: nothing.
    pub budget: Option<&'static Budget>,
}

impl Limits {
    /// The default, within the budget of this process: for what others send.
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
    /// 10 million entries in 1 GiB.
    fn default() -> Self {
        Self { entries: 10_000_000, encoded_bytes: 1 << 30, budget: None }
    }
}

/// What a tree holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    entries: Vec<Entry>,
    /// Files that have extents, with the ordinal of their first: ascending in both.
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

/// One extent of a manifest, and where it belongs.
#[derive(Debug, Clone, Copy)]
pub struct Located<'a> {
    /// Its number.
    pub ordinal: u64,
    /// Index of its file among the entries.
    pub entry: usize,
    /// The extent.
    pub extent: &'a Extent,
}

impl Manifest {
    /// Makes a manifest of entries.
    ///
    /// # Errors
    ///
    /// They break a rule, or there are too many.
    pub fn new(entries: impl IntoIterator<Item = Entry>, limits: Limits) -> Result<Self, InvalidManifest> {
        let mut builder = ManifestBuilder::new(limits);
        entries.into_iter().try_for_each(|entry| builder.push(entry))?;
        builder.finish()
    }

    /// Its entries, the root first.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Digest of the tree.
    #[must_use]
    pub fn tree_digest(&self) -> Digest {
        self.digest
    }

    /// Bytes of its files, holes included; each hard-linked file counts once.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of its extents: what a receiver that has nothing must be sent.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// How many extents it has: ordinals are less than this.
    #[must_use]
    pub fn extent_count(&self) -> u64 {
        self.extent_count
    }

    /// Bytes of its entries when encoded.
    #[must_use]
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes
    }

    /// Gives back what it takes of its budget: whoever keeps it bounds the memory in another way.
    pub fn release_budget(&self) {
        self.reserved.release();
    }

    /// Index of the entry at `path`.
    #[must_use]
    pub fn find(&self, path: &[u8]) -> Option<usize> {
        self.entries.binary_search_by(|entry| compare_paths(&entry.path, path)).ok()
    }

    /// All extents, ascending.
    pub fn extents(&self) -> impl Iterator<Item = Located<'_>> {
        self.extents_in(0..self.extent_count)
    }

    /// The extents with these ordinals, ascending. Ordinals that do not exist are passed over.
    pub fn extents_in(&self, ordinals: Range<u64>) -> impl Iterator<Item = Located<'_>> {
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
                    .map(|(ordinal, extent)| Located { ordinal, entry: file.entry, extent })
            })
    }

    /// The extent with this ordinal.
    #[must_use]
    pub fn locate(&self, ordinal: u64) -> Option<Located<'_>> {
        let file = self.files.partition_point(|file| file.ordinal <= ordinal).checked_sub(1)?;
        let FirstOrdinal { ordinal: first, entry } = self.files[file];
        let index = usize::try_from(ordinal - first).ok()?;
        let extent = self.entries[entry].extents().get(index)?;
        Some(Located { ordinal, entry, extent })
    }

    /// Ordinals of the extents of an entry, given by its index. Empty unless it is a file that has some.
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

    /// Bytes of the extents with these ordinals.
    #[must_use]
    pub fn bytes_of(&self, ordinals: &OrdinalRanges) -> u64 {
        let extents = ordinals.runs().flat_map(|run| self.extents_in(run));
        extents.map(|located| u64::from(located.extent.length)).sum()
    }

    /// Its entries in parts of at most `max_bytes` when encoded; an entry larger than that is a part of its own.
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

/// At least as many bytes as an entry takes in a message.
fn encoded_at_most(entry: &Entry) -> usize {
    // Tags, lengths and numbers of an extent are 2 + 11 + 7 bytes at most, and its digest 34.
    let xattrs: usize = entry.xattrs.iter().map(|xattr| xattr.name.len() + xattr.value.len() + 16).sum();
    let kind = match &entry.kind {
        EntryKind::File { extents, .. } => 32 + extents.len() * 56,
        EntryKind::Symlink { target } => target.len(),
        EntryKind::HardLink { to } => to.len(),
        EntryKind::Directory | EntryKind::Fifo | EntryKind::Device { .. } => 32,
    };
    64 + entry.path.len() + xattrs + kind
}

/// Receives the entries of a manifest one after the other, and refuses the first that breaks a rule.
#[derive(Debug)]
pub struct ManifestBuilder {
    limits: Limits,
    manifest: Manifest,
    /// Indices of the directories that the last entry is in, outermost first, and itself if it is one.
    open: Vec<usize>,
    /// A file whose extents have not all come.
    begun: Option<Entry>,
    hasher: blake3::Hasher,
}

impl ManifestBuilder {
    /// A builder that takes at most this much.
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

    /// How many entries it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.manifest.entries.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.manifest.entries.is_empty()
    }

    /// Adds an entry as it came over the wire; if one was begun, the rest of its extents.
    ///
    /// # Errors
    ///
    /// It is malformed, breaks a rule, or is one too many.
    pub fn push_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        self.push(entry)
    }

    /// Begins, or goes on with, a file that has more extents than fit a message: the next entry has the same path and
    /// size, and further extents. Only the metadata of the first counts.
    ///
    /// # Errors
    ///
    /// It is malformed, no file, or too large.
    pub fn begin_encoded(&mut self, bytes: &[u8]) -> Result<(), InvalidManifest> {
        let entry = self.take(bytes)?;
        if !matches!(entry.kind, EntryKind::File { .. }) {
            return Err(InvalidManifest::Entry { path: entry.path().to_owned(), fault: EntryFault::Extents });
        }
        // Until it is whole. When it is pushed, it counts once more.
        self.manifest.reserved.grow(bytes.len() as u64)?;
        self.begun = Some(entry);
        Ok(())
    }

    /// An entry that came over the wire, as far as it has come.
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
                // Each takes more than its digest.
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
    /// It breaks a rule, or is one too many. Nothing was added.
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

    /// How many of the open directories `entry` is in, if it may come next.
    fn place(&self, entry: &Entry) -> Result<usize, InvalidManifest> {
        let fault = |fault| InvalidManifest::Entry { path: entry.path().to_owned(), fault };
        let Some(last) = self.manifest.entries.last() else {
            let is_root = entry.path.is_empty() && entry.is_directory();
            return is_root.then_some(0).ok_or(InvalidManifest::NoRoot);
        };
        if compare_paths(&last.path, &entry.path) != Ordering::Less {
            return Err(fault(EntryFault::Order));
        }
        // In this order nothing can come between a directory and what it holds, so the parent is among the open ones.
        let parent = split(&entry.path).0;
        let depth = self.open.iter().rposition(|index| self.manifest.entries[*index].path == parent);
        depth.map(|depth| depth + 1).ok_or_else(|| fault(EntryFault::Parent))
    }

    /// The manifest.
    ///
    /// # Errors
    ///
    /// It has not even a root.
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
