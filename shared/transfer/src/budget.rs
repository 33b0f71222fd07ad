//! Memory budget for all manifests of a process.
//!
//! If the [`crate::Limits`] name a budget, a [`crate::ManifestBuilder`] and the archive reader
//! reserve memory before they store an entry. A manifest keeps its reservation until its last clone
//! is dropped, or until a caller of [`crate::Manifest::release_budget`] bounds the memory in
//! another way.
//!
//! Invariant: the sum of all reservations never exceeds the budget.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of memory of an entry, in addition to its encoded length.
pub(crate) const ENTRY_MEMORY_BYTES: u64 = 256;

/// Minimum budget of a process, in bytes.
const MIN_BYTES: u64 = 512 << 20;

/// A limit of the memory of all manifests together.
#[derive(Debug)]
pub struct Budget {
    total: u64,
    reserved: AtomicU64,
}

/// A reservation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BudgetError {
    /// Other reservations use the budget.
    Exhausted,
    /// The reservation alone exceeds the budget of this many bytes.
    TooLarge(u64),
}

impl Budget {
    /// Creates a budget of `total` bytes.
    #[must_use]
    pub const fn new(total: u64) -> Self {
        Self { total, reserved: AtomicU64::new(0) }
    }

    /// Returns the budget of this process: half of the memory that it may use, but at least 512
    /// MiB.
    pub fn of_process() -> &'static Self {
        static BUDGET: OnceLock<Budget> = OnceLock::new();
        BUDGET.get_or_init(|| {
            let memory = rustix::system::sysinfo();
            let machine = memory.totalram.saturating_mul(u64::from(memory.mem_unit.max(1)));
            let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            let limit = |file: String| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
            let limits = memory_limits(&groups).filter_map(limit);
            Self::new((limits.fold(machine, u64::min) / 2).max(MIN_BYTES))
        })
    }

    /// Returns the number of reserved bytes.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }
}

/// Returns the paths of files that may contain the memory limit of a process in these control
/// groups. These are the files of its groups, of all parent groups, and of the groups that a
/// container sees as the root.
fn memory_limits(groups: &str) -> impl Iterator<Item = String> {
    let own = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        Some(Path::new(path).ancestors().map(move |group| {
            Path::new(root).join(group.strip_prefix("/").unwrap_or(group)).join(file).display().to_string()
        }))
    });
    own.flatten()
}

/// The share of one manifest in a budget. Its drop releases the share.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: &'static Budget,
    bytes: AtomicU64,
}

impl Reservation {
    pub(crate) fn new(budget: &'static Budget) -> Self {
        Self { budget, bytes: AtomicU64::new(0) }
    }

    pub(crate) fn grow(&self, bytes: u64) -> Result<(), BudgetError> {
        let own = self.bytes.load(Ordering::Relaxed).saturating_add(bytes);
        if own > self.budget.total {
            return Err(BudgetError::TooLarge(self.budget.total));
        }
        let fits = |reserved: u64| reserved.checked_add(bytes).filter(|sum| *sum <= self.budget.total);
        let grown = self.budget.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        grown.map_err(|_| BudgetError::Exhausted)?;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn release(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        self.budget.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

/// The reservation of a manifest, shared by its clones. The comparison of manifests ignores it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedReservation(Option<Arc<Reservation>>);

impl SharedReservation {
    pub(crate) fn of(budget: Option<&'static Budget>) -> Self {
        Self(budget.map(|budget| Arc::new(Reservation::new(budget))))
    }

    pub(crate) fn grow(&self, bytes: u64) -> Result<(), BudgetError> {
        self.0.as_ref().map_or(Ok(()), |reservation| reservation.grow(bytes))
    }

    pub(crate) fn release(&self) {
        if let Some(reservation) = &self.0 {
            reservation.release();
        }
    }
}

impl PartialEq for SharedReservation {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for SharedReservation {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{Entry, EntryKind};
    use crate::manifest::{InvalidManifest, Limits, Manifest, ManifestBuilder};

    #[test]
    fn memory_limits_are_found_in_both_hierarchies() {
        let found = |groups| memory_limits(groups).collect::<Vec<_>>();
        assert_eq!(
            found("0::/a.slice/b\n"),
            [
                "/sys/fs/cgroup/a.slice/b/memory.max",
                "/sys/fs/cgroup/a.slice/memory.max",
                "/sys/fs/cgroup/memory.max"
            ]
        );
        let v1 =
            ["/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(found("5:cpu:/x\n4:cpuset,memory:/a\n"), v1);
        assert!(found("").is_empty());
    }

    fn entries(files: usize) -> Vec<Entry> {
        let entry = |path: Vec<u8>, kind| Entry {
            path,
            mode: 0o755,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            xattrs: Vec::new(),
            kind,
        };
        let file = |number| {
            let kind = EntryKind::File { size_bytes: 0, extents: Vec::new() };
            entry(format!("{number:06}").into_bytes(), kind)
        };
        std::iter::once(entry(Vec::new(), EntryKind::Directory)).chain((0..files).map(file)).collect()
    }

    #[test]
    fn manifests_share_the_budget() {
        static BUDGET: Budget = Budget::new(4096);
        let limits = Limits { budget: Some(&BUDGET), ..Limits::default() };
        let one = Manifest::new(entries(8), limits).expect("within the budget");
        assert_eq!(BUDGET.reserved(), one.encoded_bytes() + 9 * ENTRY_MEMORY_BYTES);
        assert_eq!(Manifest::new(entries(8), limits), Err(InvalidManifest::NoMemory));
        assert_eq!(Manifest::new(entries(100), Limits { budget: None, ..limits }).map(drop), Ok(()));
        let copy = one.clone();
        drop(one);
        assert_eq!(
            Manifest::new(entries(8), limits),
            Err(InvalidManifest::NoMemory),
            "a clone keeps the reservation"
        );
        copy.release_budget();
        assert_eq!(BUDGET.reserved(), 0);
        assert_eq!(Manifest::new(entries(100), limits), Err(InvalidManifest::TooLarge(4096)));
        let mut begun = ManifestBuilder::new(limits);
        entries(8).into_iter().try_for_each(|entry| begun.push(entry)).expect("within the budget");
        drop((begun, copy));
        assert_eq!(BUDGET.reserved(), 0, "an unfinished manifest releases its reservation");
    }

    #[test]
    fn archives_share_the_budget() {
        static BUDGET: Budget = Budget::new(8192);
        let mut archive = Vec::new();
        let manifest = Arc::new(Manifest::new(entries(100), Limits::default()).expect("valid"));
        crate::ArchiveWriter::new(&mut archive, manifest).finish().expect("packed");
        let limits = Limits { budget: Some(&BUDGET), ..Limits::default() };
        let read = crate::ArchiveReader::new(&archive[..]).read(limits, |_| Ok(()));
        let refused = crate::ArchiveError::from(InvalidManifest::TooLarge(8192)).to_string();
        assert_eq!(read.expect_err("the archive exceeds the budget").to_string(), refused);
        assert_eq!(BUDGET.reserved(), 0);
    }
}
