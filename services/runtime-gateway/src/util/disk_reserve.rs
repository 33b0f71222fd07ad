//! The reserve: the part of a disk that transfers and containers leave free.

/// The part of the disk that transfers leave free: one in so many bytes.
const RESERVE_PART: u64 = 100;
/// Most bytes of the disk that transfers leave free.
const MOST_RESERVE: u64 = 1 << 30;
/// Bytes that no transfer may take on a disk of this size.
pub(crate) fn reserve(total_bytes: u64) -> u64 {
    (total_bytes / RESERVE_PART).min(MOST_RESERVE)
}
