//! Sets of ordinals, stored as runs. They name extents, for example those that a receiver lacks.
//!
//! Invariant: runs ascend, are not empty, and neither overlap nor touch. Ordinals can be added only
//! in ascending order. The memory of a set depends on the number of runs, not on the number of
//! ordinals.

use std::ops::Range;

/// A set of ordinals.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OrdinalRanges {
    runs: Vec<Range<u64>>,
    count: u64,
}

/// A run cannot be added to a set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRange {
    /// The run does not come after the previous runs.
    #[error("cannot add the run at {first}: it does not come after the previous runs")]
    OutOfOrder {
        /// First ordinal of the run.
        first: u64,
    },
    /// The run is empty, or exceeds the greatest ordinal.
    #[error("cannot add the run at {first}: its length {count} is invalid")]
    Count {
        /// First ordinal of the run.
        first: u64,
        /// Number of ordinals of the run.
        count: u64,
    },
}

impl OrdinalRanges {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the set of all ordinals below `count`.
    #[must_use]
    pub fn all(count: u64) -> Self {
        Self::new().complement(count)
    }

    /// Adds an ordinal, which must be greater than all ordinals of the set.
    ///
    /// # Errors
    ///
    /// Fails if the ordinal is not greater.
    pub fn insert(&mut self, ordinal: u64) -> Result<(), InvalidRange> {
        self.insert_run(ordinal, 1)
    }

    /// Adds `count` ordinals from `first`, which must be greater than all ordinals of the set.
    ///
    /// # Errors
    ///
    /// Fails if the ordinals are not greater, or if the run is empty or exceeds the greatest
    /// ordinal.
    pub fn insert_run(&mut self, first: u64, count: u64) -> Result<(), InvalidRange> {
        let end =
            first.checked_add(count).filter(|_| count > 0).ok_or(InvalidRange::Count { first, count })?;
        match self.runs.last_mut() {
            Some(last) if first < last.end => return Err(InvalidRange::OutOfOrder { first }),
            Some(last) if first == last.end => last.end = end,
            _ => self.runs.push(first..end),
        }
        self.count += count; // Cannot overflow: the runs are disjoint.
        Ok(())
    }

    /// Returns the number of ordinals.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether the set contains `ordinal`.
    #[must_use]
    pub fn contains(&self, ordinal: u64) -> bool {
        let after = self.runs.partition_point(|run| run.start <= ordinal);
        after.checked_sub(1).is_some_and(|index| self.runs[index].contains(&ordinal))
    }

    /// Returns the greatest ordinal.
    #[must_use]
    pub fn last(&self) -> Option<u64> {
        self.runs.last().map(|run| run.end - 1)
    }

    /// Returns the runs in ascending order.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = Range<u64>> + '_ {
        self.runs.iter().cloned()
    }

    /// Returns the ordinals in ascending order.
    pub fn ordinals(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().cloned().flatten()
    }

    /// Returns the union with another set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut both = self.runs.iter().chain(&other.runs).cloned().collect::<Vec<_>>();
        both.sort_unstable_by_key(|run| run.start);
        let mut union = Self::new();
        for run in both {
            let start = union.runs.last().map_or(run.start, |last| run.start.max(last.end));
            if start < run.end {
                // The run ascends and is not empty, so this cannot fail.
                _ = union.insert_run(start, run.end - start);
            }
        }
        union
    }

    /// Returns the ordinals below `count` that are not in this set.
    #[must_use]
    pub fn complement(&self, count: u64) -> Self {
        let mut rest = Self::new();
        let mut from = 0;
        let mut add = |range: Range<u64>| {
            if !range.is_empty() {
                rest.count += range.end - range.start;
                rest.runs.push(range);
            }
        };
        for run in &self.runs {
            add(from.min(count)..run.start.min(count));
            from = run.end;
        }
        add(from.min(count)..count);
        rest
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::btree_set;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn adjacent_runs_are_joined() {
        let mut runs = OrdinalRanges::new();
        for ordinal in [1, 2, 3, 7] {
            runs.insert(ordinal).unwrap();
        }
        runs.insert_run(8, 2).unwrap();

        assert_eq!(runs.runs().collect::<Vec<_>>(), [1..4, 7..10]);
        assert_eq!(runs.count(), 6);
        assert_eq!(runs.last(), Some(9));
    }

    #[test]
    fn unordered_run_is_rejected() {
        let mut runs = OrdinalRanges::new();
        runs.insert_run(5, 5).unwrap();

        assert_eq!(runs.insert(9), Err(InvalidRange::OutOfOrder { first: 9 }));
        assert_eq!(runs.insert(0), Err(InvalidRange::OutOfOrder { first: 0 }));
        assert_eq!(runs.insert_run(20, 0), Err(InvalidRange::Count { first: 20, count: 0 }));
        assert_eq!(runs.insert_run(20, u64::MAX), Err(InvalidRange::Count { first: 20, count: u64::MAX }));
        assert_eq!(runs.count(), 5);
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(members in btree_set(0_u64..60, 0..40), others in btree_set(0_u64..60, 0..40), count in 0_u64..70) {
            let runs_of = |members: &BTreeSet<u64>| {
                let mut runs = OrdinalRanges::new();
                members.iter().for_each(|member| runs.insert(*member).unwrap());
                runs
            };
            let runs = runs_of(&members);
            let union: BTreeSet<u64> = members.union(&others).copied().collect();
            prop_assert_eq!(runs.union(&runs_of(&others)), runs_of(&union));
            prop_assert_eq!(runs.ordinals().collect::<BTreeSet<_>>(), members.clone());
            prop_assert_eq!(runs.count(), members.len() as u64);
            for ordinal in 0..70 {
                prop_assert_eq!(runs.contains(ordinal), members.contains(&ordinal));
            }
            let rest = runs.complement(count);
            let expected: BTreeSet<_> = (0..count).filter(|ordinal| !members.contains(ordinal)).collect();
            prop_assert_eq!(rest.count(), expected.len() as u64);
            prop_assert_eq!(rest.ordinals().collect::<BTreeSet<_>>(), expected);
        }
    }
}
