//! The disk reserve: the part of a disk that transfers and containers leave free.

/// Divisor of the disk size that gives the reserve.
const RESERVE_PART: u64 = 100;
/// Most bytes of the reserve.
const MAX_RESERVE: u64 = 1 << 30;
/// Returns the bytes that no transfer may use on a disk of this size.
pub(crate) fn reserve(total_bytes: u64) -> u64 {
    (total_bytes / RESERVE_PART).min(MAX_RESERVE)
}
