//! The extents that a receiver still waits for. Files may come in any order.

use std::ops::Range;

use crate::manifest::Manifest;
use crate::ordinal_ranges::OrdinalRanges;

/// A set of ordinals from which ordinals are removed.
///
/// Its memory depends on the distance between the first and the last ordinal.
#[derive(Debug, Clone)]
pub struct PendingExtents {
    first: u64,
    bits: Vec<u64>,
    count: u64,
    /// The current file, and the ordinals of it that may follow.
    file: Option<(usize, Range<u64>)>,
}

impl PendingExtents {
    /// Creates a set with the ordinals of `wanted`.
    #[must_use]
    pub fn new(wanted: &OrdinalRanges) -> Self {
        let first = wanted.runs().next().map_or(0, |run| run.start);
        let length = wanted.last().map_or(0, |last| (last - first) / 64 + 1);
        let bits = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
        let mut all = Self { first, bits, count: wanted.count(), file: None };
        for ordinal in wanted.ordinals() {
            if let Some((word, bit)) = all.place(ordinal) {
                all.bits[word] |= bit;
            }
        }
        all
    }

    /// Whether no extent is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the extent with `ordinal` is pending.
    #[must_use]
    pub fn contains(&self, ordinal: u64) -> bool {
        self.place(ordinal).is_some_and(|(word, bit)| self.bits[word] & bit != 0)
    }

    /// Removes an ordinal. Returns whether it was pending.
    pub fn remove(&mut self, ordinal: u64) -> bool {
        let Some((word, bit)) = self.place(ordinal).filter(|(word, bit)| self.bits[*word] & bit != 0) else {
            return false;
        };
        self.bits[word] &= !bit;
        self.count -= 1;
        true
    }

    /// Removes an ordinal if its extent is the next one. Files may come in any order, but each must
    /// be complete, and its extents must ascend. Returns `false` if the extent is not pending or
    /// not the next one.
    pub fn take(&mut self, manifest: &Manifest, ordinal: u64) -> bool {
        let Some(located) = manifest.locate(ordinal) else { return false };
        let mut rest = match &self.file {
            Some((entry, rest)) if *entry == located.entry => rest.clone(),
            Some((_, rest)) if rest.clone().any(|ordinal| self.contains(ordinal)) => return false,
            _ => manifest.ordinals_of(located.entry),
        };
        if rest.find(|ordinal| self.contains(*ordinal)) != Some(ordinal) {
            return false;
        }
        self.file = Some((located.entry, rest));
        self.remove(ordinal)
    }

    /// Returns the pending ordinals.
    #[must_use]
    pub fn runs(&self) -> OrdinalRanges {
        let mut runs = OrdinalRanges::new();
        for (word, bits) in (0..).step_by(64).zip(&self.bits) {
            for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                // Ordinals ascend, so this cannot fail.
                _ = runs.insert(self.first + word + bit);
            }
        }
        runs
    }

    fn place(&self, ordinal: u64) -> Option<(usize, u64)> {
        let distance = ordinal.checked_sub(self.first)?;
        let word = usize::try_from(distance / 64).ok().filter(|word| *word < self.bits.len())?;
        Some((word, 1 << (distance % 64)))
    }
}

#[cfg(test)]
mod tests {
    use domain::Digest;

    use super::*;
    use crate::entry::{Entry, EntryKind, Extent};
    use crate::manifest::Limits;

    /// Creates a tree with a file for each number of extents.
    fn tree(extents: &[u64]) -> Manifest {
        let entry = |path: String, kind| Entry {
            path: path.into_bytes(),
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind,
        };
        let extent = |offset| Extent { offset, length: 1, digest: Digest([0; 32]) };
        let files = extents.iter().enumerate().map(|(number, count)| {
            let kind = EntryKind::File { size_bytes: *count, extents: (0..*count).map(extent).collect() };
            entry(format!("{number}"), kind)
        });
        let root = entry(String::new(), EntryKind::Directory);
        Manifest::new(std::iter::once(root).chain(files), Limits::default()).expect("valid")
    }

    fn runs(ordinals: &[u64]) -> OrdinalRanges {
        let mut runs = OrdinalRanges::new();
        ordinals.iter().for_each(|ordinal| runs.insert(*ordinal).expect("ascending"));
        runs
    }

    /// Takes the ordinals in `came`. Returns the results, and the pending ordinals.
    fn taken(wanted: &[u64], came: &[u64]) -> (Vec<bool>, Vec<u64>) {
        let manifest = tree(&[3, 1, 2]);
        let mut outstanding = PendingExtents::new(&runs(wanted));
        let taken = came.iter().map(|ordinal| outstanding.take(&manifest, *ordinal)).collect();
        assert_eq!(outstanding.is_empty(), outstanding.runs().is_empty());
        (taken, outstanding.runs().ordinals().collect())
    }

    #[test]
    fn files_must_be_complete_and_ascending() {
        assert_eq!(taken(&[0, 1, 2, 3, 4, 5], &[4, 5, 0, 1, 2, 3]), (vec![true; 6], vec![]));
        assert_eq!(
            taken(&[0, 2, 5], &[5, 0, 2]),
            (vec![true; 3], vec![]),
            "ordinals that are not pending may be missing"
        );
        assert_eq!(
            taken(&[0, 1, 4], &[0, 4]),
            (vec![true, false], vec![1, 4]),
            "the first file is incomplete"
        );
        assert_eq!(taken(&[0, 1, 2], &[1]), (vec![false], vec![0, 1, 2]), "the file starts in the middle");
        assert_eq!(taken(&[0, 1], &[0, 0]), (vec![true, false], vec![1]), "an extent is repeated");
        assert_eq!(
            taken(&[3], &[4, 9]),
            (vec![false, false], vec![3]),
            "an extent is not pending, or does not exist"
        );
    }

    #[test]
    fn pending_ordinals_are_returned_as_runs() {
        let mut outstanding = PendingExtents::new(&runs(&[70, 71, 200, 1000]));
        assert!(outstanding.remove(200) && !outstanding.remove(200) && !outstanding.remove(1));
        assert_eq!(outstanding.runs(), runs(&[70, 71, 1000]));
        assert!(outstanding.contains(1000) && !outstanding.contains(1001) && !outstanding.contains(69));
        assert!(PendingExtents::new(&OrdinalRanges::new()).is_empty());
    }
}
