//! The last lines of output that was written before a command began to read it.
//!
//! The output is counted in bytes, and no index of its lines exists. So all kept output is read,
//! and only its last lines are kept.

use bytes::{Bytes, BytesMut};

/// Maximum of the bytes that are kept. Longer lines lose their beginning.
const MAX_BYTES: usize = 16 << 20;
/// Bytes that may arrive before the kept bytes are cut again.
const SLACK: usize = 1 << 20;

/// Keeper of the last lines of old output.
#[derive(Debug)]
pub(crate) struct Tail {
    lines: usize,
    bytes: BytesMut,
    /// Number of kept bytes at which they are cut again.
    cut_at: usize,
    /// Number of bytes that are missing before the kept ones.
    missed: u64,
}

impl Tail {
    /// Makes a keeper of this number of lines.
    pub(crate) fn new(lines: usize) -> Self {
        Self { lines, bytes: BytesMut::new(), cut_at: SLACK, missed: 0 }
    }

    /// Adds output. `missed` is the number of bytes that are missing before it.
    pub(crate) fn push(&mut self, missed: u64, data: &[u8]) {
        if missed > 0 {
            self.bytes.clear();
            self.missed += missed;
        }
        self.bytes.extend_from_slice(data);
        if self.bytes.len() >= self.cut_at {
            self.cut();
            self.cut_at = self.bytes.len() + SLACK;
        }
    }

    fn cut(&mut self) {
        let start = start_of_last_lines(&self.bytes, self.lines);
        let start = start.max(self.bytes.len().saturating_sub(MAX_BYTES));
        if start > 0 {
            // Missing bytes matter only if they may belong to the last lines.
            self.missed = 0;
            // A copy, because the cut bytes would otherwise stay allocated.
            self.bytes = self.bytes[start..].into();
        }
    }

    /// Returns the last lines, and the number of bytes that may be missing in them.
    pub(crate) fn finish(mut self) -> (Bytes, u64) {
        self.cut();
        let missed = if self.lines == 0 { 0 } else { self.missed };
        (self.bytes.freeze(), missed)
    }
}

/// Returns the position of the last `lines` lines. The last line may have no end.
fn start_of_last_lines(bytes: &[u8], lines: usize) -> usize {
    if lines == 0 {
        return bytes.len();
    }
    let last = bytes.len().saturating_sub(1);
    // A line feed at the very end begins no line.
    let mut ends = (0..last).rev().filter(|at| bytes[*at] == b'\n');
    ends.nth(lines - 1).map_or(0, |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(lines: usize, pieces: &[&str]) -> String {
        let mut tail = Tail::new(lines);
        pieces.iter().for_each(|piece| tail.push(0, piece.as_bytes()));
        let (bytes, missed) = tail.finish();
        assert_eq!(missed, 0);
        String::from_utf8(bytes.to_vec()).expect("text")
    }

    #[test]
    fn last_lines_are_kept() {
        assert_eq!(last(2, &["a\nb\n", "c\nd", "\n"]), "c\nd\n");
        assert_eq!(last(2, &["a\nb\nc"]), "b\nc", "the last line has no end");
        assert_eq!(last(1, &["a\n\n"]), "\n", "the last line is empty");
        assert_eq!(last(5, &["a\nb"]), "a\nb");
        assert_eq!(last(0, &["a\nb"]), "");
        assert_eq!(last(3, &[]), "");
    }

    #[test]
    fn kept_bytes_are_bounded() {
        let piece = vec![b'x'; SLACK];
        let mut tail = Tail::new(1);
        for _ in 0..40 {
            tail.push(0, &piece);
            assert!(tail.bytes.len() <= MAX_BYTES + SLACK);
        }
        tail.push(0, b"y\n");
        let (bytes, _) = tail.finish();
        assert!(bytes.len() == MAX_BYTES && bytes.ends_with(b"xy\n"));
    }

    #[test]
    fn missing_bytes_count_within_last_lines() {
        let missed = |lines, later: &[u8]| {
            let mut tail = Tail::new(lines);
            tail.push(0, b"lost\n");
            tail.push(7, later);
            tail.finish()
        };
        assert_eq!(missed(2, b"a\nb\n"), (Bytes::from_static(b"a\nb\n"), 7));
        assert_eq!(missed(1, b"a\nb\n"), (Bytes::from_static(b"b\n"), 0));
        assert_eq!(missed(0, b"a\nb\n").1, 0);
    }
}
