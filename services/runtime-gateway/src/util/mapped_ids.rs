//! The users and groups that exist in the user namespace of this process.
//!
//! Source: user_namespaces(7).

use std::fs;
use std::ops::RangeInclusive;

use runtime::RuntimeError;
use transfer::Manifest;

/// Ranges of ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MappedIds {
    users: Vec<RangeInclusive<u32>>,
    groups: Vec<RangeInclusive<u32>>,
}

impl MappedIds {
    /// Returns those of this process.
    pub(crate) fn of_this_process() -> Self {
        let read = |file| fs::read_to_string(file).unwrap_or_default();
        Self { users: ranges(&read("/proc/self/uid_map")), groups: ranges(&read("/proc/self/gid_map")) }
    }

    pub(crate) fn has(&self, user: u32, group: u32) -> bool {
        has(&self.users, user) && self.has_group(group)
    }

    pub(crate) fn has_group(&self, group: u32) -> bool {
        has(&self.groups, group)
    }

    /// Returns the highest group. 0: there is none.
    pub(crate) fn last_group(&self) -> u32 {
        self.groups.iter().map(|range| *range.end()).max().unwrap_or(0)
    }

    /// Checks whether all owners of files in a tree exist.
    ///
    /// # Errors
    ///
    /// [`RuntimeError::Unsupported`], which names the first file whose owner does not exist.
    pub(crate) fn check_owners(&self, manifest: &Manifest) -> Result<(), RuntimeError> {
        let Some(foreign) = manifest.entries().iter().find(|entry| !self.has(entry.uid, entry.gid)) else {
            return Ok(());
        };
        Err(RuntimeError::Unsupported(format!(
            "{:?} belongs to user {} and group {}, which do not exist for a worker without root; install newuidmap (package \
             uidmap or shadow-utils) and restart the cluster (`gantry doctor`)",
            foreign.path(),
            foreign.uid,
            foreign.gid
        )))
    }
}

fn has(ranges: &[RangeInclusive<u32>], id: u32) -> bool {
    ranges.iter().any(|range| range.contains(&id))
}

/// Parses a file such as `/proc/self/uid_map`: first id, id outside, and number of ids.
fn ranges(text: &str) -> Vec<RangeInclusive<u32>> {
    let range = |line: &str| {
        let mut fields = line.split_whitespace().map(|field| field.parse::<u32>().ok());
        let (first, _, count) = (fields.next()??, fields.next()??, fields.next()??);
        Some(first..=first.checked_add(count.checked_sub(1)?)?)
    };
    text.lines().filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind, Limits};

    use super::*;

    #[test]
    fn ids_are_in_ranges() {
        let ids = MappedIds { users: ranges("0 1000 1\n1 100000 65536\n"), groups: ranges("0 1000 1\n") };
        assert!(ids.has(0, 0) && ids.has(65536, 0) && !ids.has(65537, 0) && !ids.has(1, 1));
        assert_eq!(ids.last_group(), 0);
        let whole = MappedIds { users: ranges("0 0 4294967295"), groups: ranges("0 0 4294967295") };
        assert!(whole.has(4_294_967_294, 70_000));
        assert!(ranges("0 0 0\nx\n1 2").is_empty());
    }

    #[test]
    fn foreign_owner_is_named() {
        let entry = |path: &str, gid| Entry {
            path: path.into(),
            mode: 0o755,
            uid: 0,
            gid,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind: EntryKind::Directory,
        };
        let manifest = |gid| {
            Manifest::new([entry("", 0), entry("etc", gid)], Limits::default()).expect("a valid manifest")
        };
        let ids = MappedIds { users: ranges("0 1000 1"), groups: ranges("0 1000 1") };
        ids.check_owners(&manifest(0)).expect("its own");
        let refused = ids.check_owners(&manifest(42)).expect_err("foreign").to_string();
        assert!(refused.contains("\"etc\" belongs to user 0 and group 42"), "{refused}");
    }
}
