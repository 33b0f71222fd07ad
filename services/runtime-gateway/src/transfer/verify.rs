//! The comparison of a volume with its manifest.
//!
//! The places of holes in a file may change without a write, because file systems allocate late or
//! in advance. So extents are compared by their contents, not by the extents of a new scan.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use runtime::RuntimeError;
use transfer::{Entry, EntryKind, Extent, Manifest, ReadError, ReadOptions, TreeReader};

use super::scan;

/// Bytes of one read.
const CHUNK_BYTES: usize = 1 << 16;

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// The volume holds the tree of the manifest.
    Same,
    /// This entry is missing, is not in the manifest, or differs.
    Differs(PathBuf),
}

/// Reads everything below `root`, and compares it with `expected`.
pub(crate) fn compare(root: &Path, expected: &Arc<Manifest>) -> Result<Comparison, RuntimeError> {
    let actual = scan::scan(root)?.manifest;
    if actual.tree_digest() == expected.tree_digest() {
        return Ok(Comparison::Same);
    }
    let mut reader: Option<TreeReader> = None;
    for index in 0..expected.entries().len().max(actual.entries().len()) {
        let (expected_entry, actual_entry) =
            match (expected.entries().get(index), actual.entries().get(index)) {
                (Some(expected), Some(actual)) => (expected, actual),
                (one, other) => {
                    let path = one.or(other).map(|entry| entry.path().to_owned());
                    return Ok(Comparison::Differs(path.unwrap_or_default()));
                }
            };
        if expected_entry == actual_entry {
            continue;
        }
        let differs = || Ok(Comparison::Differs(expected_entry.path().to_owned()));
        if without_extents(expected_entry) != without_extents(actual_entry) {
            return differs();
        }
        let reader = match &mut reader {
            Some(reader) => reader,
            none => {
                let options = ReadOptions { verify: true, ..ReadOptions::default() };
                none.insert(TreeReader::new(root, expected.clone(), options).map_err(failed)?)
            }
        };
        for ordinal in expected.ordinals_of(index) {
            match reader.read(ordinal) {
                Ok(_) => {}
                Err(ReadError::Changed { .. } | ReadError::Shrunk { .. }) => return differs(),
                Err(error) => return Err(failed(error)),
            }
        }
        for (from, to) in uncovered_ranges(actual_entry.extents(), expected_entry.extents()) {
            if !is_zero(reader, index, from, to).map_err(failed)? {
                return differs();
            }
        }
    }
    Ok(Comparison::Same)
}

/// Hashes the contents of each file in `expected`, after a comparison of the metadata. Passes the
/// bytes of each read to `may_continue`. `None`: that returned false.
pub(crate) fn hash(
    root: &Path,
    expected: &Arc<Manifest>,
    mut may_continue: impl FnMut(u64) -> bool,
) -> Result<Option<Comparison>, RuntimeError> {
    let inspected = transfer::inspect(root, expected);
    if let Some(difference) = inspected.map_err(|error| RuntimeError::io("inspect a volume", error))? {
        return Ok(Some(Comparison::Differs(difference.path)));
    }
    let options = ReadOptions { verify: true, ..ReadOptions::default() };
    let mut reader = TreeReader::new(root, expected.clone(), options).map_err(failed)?;
    for ordinal in 0..expected.extent_count() {
        match reader.read(ordinal) {
            Ok(data) if may_continue(data.len() as u64) => {}
            Ok(_) => return Ok(None),
            Err(ReadError::Changed { path } | ReadError::Shrunk { path }) => {
                return Ok(Some(Comparison::Differs(path)));
            }
            Err(ReadError::Io { path, source }) if transfer::is_media_error(&source) => {
                return Ok(Some(Comparison::Differs(path)));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(Some(Comparison::Same))
}

fn failed(error: ReadError) -> RuntimeError {
    RuntimeError::Other(format!("cannot read a volume: {}", domain::error_chain(&error)))
}

/// Returns an entry without its extents.
fn without_extents(entry: &Entry) -> Entry {
    let mut entry = entry.clone();
    if let EntryKind::File { extents, .. } = &mut entry.kind {
        extents.clear();
    }
    entry
}

/// Returns the ranges in `extents` that no extent in `others` covers. Both lists ascend.
fn uncovered_ranges(extents: &[Extent], others: &[Extent]) -> Vec<(u64, u64)> {
    let end = |extent: &Extent| extent.offset + u64::from(extent.length);
    let mut ranges = Vec::new();
    for extent in extents {
        let mut at = extent.offset;
        let first = others.partition_point(|other| end(other) <= at);
        for other in others[first..].iter().take_while(|other| other.offset < end(extent)) {
            if other.offset > at {
                ranges.push((at, other.offset));
            }
            at = at.max(end(other));
        }
        if at < end(extent) {
            ranges.push((at, end(extent)));
        }
    }
    ranges
}

/// Whether a range of a file contains only zeroes.
fn is_zero(reader: &mut TreeReader, entry: usize, from: u64, to: u64) -> Result<bool, ReadError> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = from;
    while at < to {
        let length = usize::try_from(to - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let read = reader.read_file_at(entry, &mut buffer[..length], at)?;
        if read < length || buffer[..length].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += length as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::time::SystemTime;

    use super::*;

    const SIZE: u64 = 4 << 20;

    /// Creates a tree with a file that is `whole` or has holes. Bytes and times are the same in
    /// both cases.
    fn tree(root: &Path, whole: bool, change: impl FnOnce(&File)) {
        fs::create_dir_all(root.join("directory")).expect("make");
        fs::write(root.join("directory/small"), "small").expect("write");
        let path = root.join("sparse");
        let file = File::create(&path).expect("make");
        if whole {
            file.write_all_at(&vec![0; usize::try_from(SIZE).expect("a size")], 0).expect("write");
        }
        file.write_all_at(b"in the middle", SIZE / 2).expect("write");
        file.set_len(SIZE).expect("resize");
        change(&file);
        for path in ["directory/small", "sparse", "directory", "."] {
            // One of these files may have been removed.
            if let Ok(file) = File::open(root.join(path)) {
                file.set_modified(SystemTime::UNIX_EPOCH).expect("set the time");
            }
        }
    }

    fn compared(change: impl FnOnce(&Path, &File)) -> Comparison {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path().join("tree");
        tree(&root, false, |_| {});
        let expected = Arc::new(scan::scan(&root).expect("scanned").manifest);
        tree(&root, true, |file| change(&root, file));
        let now = scan::scan(&root).expect("scanned").manifest;
        assert_ne!(now.tree_digest(), expected.tree_digest(), "another scan finds other extents");
        compare(&root, &expected).expect("compared")
    }

    #[test]
    fn places_of_holes_are_ignored() {
        assert_eq!(compared(|_, _| {}), Comparison::Same);
    }

    #[test]
    fn every_change_is_detected() {
        let sparse = Comparison::Differs("sparse".into());
        let write = |at: u64| compared(|_, file| file.write_all_at(b"x", at).expect("write"));
        for at in [0, SIZE / 2, SIZE / 2 + 5, SIZE - 1] {
            assert_eq!(write(at), sparse, "a byte at {at}");
        }
        assert_eq!(compared(|_, file| file.set_len(SIZE - 1).expect("resize")), sparse);
        let small = compared(|root, _| fs::write(root.join("directory/small"), "Small").expect("write"));
        assert_eq!(small, Comparison::Differs("directory/small".into()));
        let more = compared(|root, _| fs::write(root.join("more"), "").expect("write"));
        assert_eq!(more, Comparison::Differs("sparse".into()), "the first that is not where it should be");
        let less = compared(|root, _| fs::remove_file(root.join("sparse")).expect("remove"));
        assert!(matches!(less, Comparison::Differs(_)), "{less:?}");
    }
}
