//! Reservations of disk space for transfers, made before the first byte.
//!
//! [`crate::transfer::write`] reserves the size of the manifest when a transfer begins. Each copy
//! of an extent counts, because each is written. Files that the volume will share with another one
//! do not count. A file that turns out to differ on the disk is copied without a reservation.
//!
//! Invariant: the reserved bytes that are not written yet fit into the free space minus the disk
//! reserve. The lock on the sum enforces it. Containers write without reservations, so a disk may
//! be full nevertheless.

use std::sync::{Arc, Mutex};

use runtime::Disk;
use transfer::Manifest;

use crate::util::disk_reserve::reserve;
use crate::util::keyed_locks::lock;

/// Bytes of an entry on the disk besides its contents: the inode, and the rest of the last block.
const ENTRY_BYTES: u64 = 4096;

/// Returns the bytes of a tree on a disk. Each copy of an extent counts, holes do not.
pub(crate) fn required_bytes(manifest: &Manifest) -> u64 {
    let entries = u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX);
    manifest.extent_bytes().saturating_add(entries.saturating_mul(ENTRY_BYTES))
}

/// The error of a transfer for which the disk has too little space.
#[derive(Debug, thiserror::Error)]
#[error("the transfer needs {} MiB, and the worker's disk has {} MiB for transfers", .required.div_ceil(1 << 20), .available >> 20)]
pub(crate) struct InsufficientDisk {
    required: u64,
    available: u64,
}

impl InsufficientDisk {
    /// Bytes that must become free before the transfer can begin.
    pub(crate) fn missing_bytes(&self) -> u64 {
        self.required.saturating_sub(self.available)
    }
}

/// Bytes that transfers have reserved and not written yet.
#[derive(Debug, Default)]
pub(crate) struct DiskReservations(Arc<Mutex<u64>>);

impl DiskReservations {
    /// Reserves space for a transfer. `disk` is `None` if the worker does not report its disk.
    pub(crate) fn reserve(
        &self,
        disk: Option<Disk>,
        required: u64,
    ) -> Result<DiskReservation, InsufficientDisk> {
        let mut reserved = lock(&self.0);
        if let Some(Disk { total_bytes, free_bytes }) = disk {
            let available = free_bytes.saturating_sub(reserve(total_bytes)).saturating_sub(*reserved);
            if required > available {
                return Err(InsufficientDisk { required, available });
            }
        }
        *reserved = reserved.saturating_add(required);
        Ok(DiskReservation { total: self.0.clone(), remaining: required })
    }
}

/// The reservation of one transfer. The unwritten rest is released on drop.
#[derive(Debug)]
pub(crate) struct DiskReservation {
    total: Arc<Mutex<u64>>,
    remaining: u64,
}

impl DiskReservation {
    /// Reduces the reservation by bytes that were written and now count as used space.
    pub(crate) fn record_written(&mut self, bytes: u64) {
        let bytes = bytes.min(self.remaining);
        self.remaining -= bytes;
        let mut reserved = lock(&self.total);
        *reserved = reserved.saturating_sub(bytes);
    }
}

impl Drop for DiskReservation {
    fn drop(&mut self) {
        self.record_written(self.remaining);
    }
}

#[cfg(test)]
mod tests {
    use transfer::{Entry, EntryKind, Extent, Limits};

    use super::*;

    fn disk(free_bytes: u64) -> Option<Disk> {
        Some(Disk { total_bytes: 10_000, free_bytes })
    }

    #[test]
    fn reservations_fit_the_free_space_minus_the_reserve() {
        let room = DiskReservations::default();
        let mut one = room.reserve(disk(1000), 500).expect("there is room");
        let refused = room.reserve(disk(1000), 401).expect_err("the reserve is 100");
        assert_eq!(refused.missing_bytes(), 1);
        let two = room.reserve(disk(1000), 400).expect("there is room");
        drop(two);
        one.record_written(300);
        room.reserve(disk(700), 401).expect_err("200 are to come");
        room.reserve(disk(700), 400).expect("there is room");
        drop(one);
        room.reserve(disk(700), 601).expect_err("the reserve is left free");
        room.reserve(None, u64::MAX).expect("the disk is unknown");
        assert_eq!(*lock(&room.0), 0);
    }

    #[test]
    fn each_copy_of_an_extent_counts() {
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
        let digest = domain::Digest([7; 32]);
        let extents = (0..1000).map(|at| Extent { offset: at << 20, length: 1 << 20, digest }).collect();
        let file = entry(b"file".to_vec(), EntryKind::File { size_bytes: 1 << 40, extents });
        let root = entry(Vec::new(), EntryKind::Directory);
        let manifest = Manifest::new([root, file], Limits::default()).expect("valid");
        assert_eq!(required_bytes(&manifest), (1000 << 20) + 2 * ENTRY_BYTES);
    }
}
