//! Conversion of manifests and sets of extents to and from messages.
//!
//! The digest of a tree is computed over the encoded entries. The encodings of `transfer` and of
//! the generated code must therefore be identical, byte for byte. A test compares them.

use bytes::Bytes;
use prost::Message;
use tonic::Status;
use transfer::{
    Entry, EntryKind, Extent, InvalidManifest, InvalidRange, Manifest, ManifestBuilder, OrdinalRanges,
};

use crate::pb::runtime as pb;

/// Maximum size of a part of a manifest, in encoded bytes.
const PART_BYTES: usize = 1 << 20;
/// Maximum number of extents of a file in a message. Their encoding is smaller than [`PART_BYTES`].
const EXTENTS: usize = 16_000;
/// Maximum number of runs in a message.
const RUNS: usize = 50_000;

/// Splits a manifest into parts that fit a message.
pub fn manifest_parts(manifest: &Manifest) -> impl Iterator<Item = pb::ManifestPart> {
    manifest.parts(PART_BYTES).flat_map(|entries| match entries {
        [entry] if entry.extents().len() > EXTENTS => pieces(entry),
        entries => {
            vec![pb::ManifestPart { entries: entries.iter().filter_map(encode_entry).collect(), more: false }]
        }
    })
}

/// Splits a file with more extents than fit a message.
fn pieces(entry: &Entry) -> Vec<pb::ManifestPart> {
    let EntryKind::File { size_bytes, extents } = &entry.kind else { return Vec::new() };
    let last = extents.len().div_ceil(EXTENTS) - 1;
    let piece = |(number, extents): (usize, &[Extent])| {
        let kind = EntryKind::File { size_bytes: *size_bytes, extents: extents.to_vec() };
        let xattrs = if number == 0 { entry.xattrs.clone() } else { Vec::new() };
        let piece = Entry { path: entry.path.clone(), xattrs, kind, ..*entry };
        pb::ManifestPart { entries: encode_entry(&piece).into_iter().collect(), more: number < last }
    };
    extents.chunks(EXTENTS).enumerate().map(piece).collect()
}

fn encode_entry(entry: &Entry) -> Option<pb::Entry> {
    // Both types encode the same message, so decoding cannot fail. A test checks this.
    pb::Entry::decode(Bytes::from(entry.encode())).ok()
}

/// Returns the message that ends a manifest.
#[must_use]
pub fn manifest_end(manifest: &Manifest) -> pb::ManifestEnd {
    pb::ManifestEnd {
        digest: manifest.tree_digest().as_bytes().to_vec().into(),
        size_bytes: manifest.size_bytes(),
        entries: u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX),
    }
}

/// Adds a part to a manifest.
pub fn push_part(builder: &mut ManifestBuilder, part: &pb::ManifestPart) -> Result<(), InvalidManifest> {
    let (last, entries) = match part.entries.split_last() {
        Some((last, entries)) if part.more => (Some(last), entries),
        _ => (None, &part.entries[..]),
    };
    entries.iter().try_for_each(|entry| builder.push_encoded(&entry.encode_to_vec()))?;
    last.map_or(Ok(()), |entry| builder.begin_encoded(&entry.encode_to_vec()))
}

/// Makes a message of the contents of extents.
#[must_use]
pub fn chunk(extents: Vec<transfer::ExtentData>) -> pb::Chunk {
    let extents = extents.into_iter();
    let extents = extents.map(|extent| pb::ExtentData { ordinal: extent.ordinal, data: extent.data });
    pb::Chunk { extents: extents.collect() }
}

/// Splits ordinals into messages of limited size.
pub fn runs(runs: &OrdinalRanges) -> Vec<pb::ExtentRuns> {
    let all: Vec<_> =
        runs.runs().map(|run| pb::ExtentRun { first: run.start, count: run.end - run.start }).collect();
    all.chunks(RUNS).map(|runs| pb::ExtentRuns { runs: runs.to_vec() }).collect()
}

/// Adds the ordinals of a message.
pub fn push_runs(runs: &mut OrdinalRanges, part: &pb::ExtentRuns) -> Result<(), InvalidRange> {
    part.runs.iter().try_for_each(|run| runs.insert_run(run.first, run.count))
}

/// Returns the status for an invalid manifest in the domain `service`.
#[must_use]
pub fn invalid_manifest(service: &str, error: &InvalidManifest) -> Status {
    let reason = match error {
        InvalidManifest::NoMemory => crate::Reason::Unavailable,
        _ => crate::Reason::InvalidManifest,
    };
    reason.status(service, domain::error_chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use transfer::{DeviceKind, Limits, Xattr};

    fn entry(path: &str, kind: EntryKind) -> Entry {
        Entry {
            path: path.into(),
            mode: 0o1755,
            uid: 3,
            gid: 70_000,
            mtime_seconds: -5,
            mtime_nanos: 999_999_999,
            xattrs: vec![Xattr { name: b"user.x".to_vec(), value: vec![0, 255] }],
            kind,
        }
    }

    #[test]
    fn generated_code_and_transfer_encode_entries_equally() {
        let extent = Extent { offset: 4096, length: 10, digest: domain::Digest([7; 32]) };
        let bare = |path: &str, kind| Entry { xattrs: vec![], ..entry(path, kind) };
        let link = Entry {
            mode: 0,
            uid: 0,
            gid: 0,
            mtime_seconds: 0,
            mtime_nanos: 0,
            ..bare("h", EntryKind::HardLink { to: b"f".to_vec() })
        };
        let entries = vec![
            entry("", EntryKind::Directory),
            bare("d", EntryKind::Device { kind: DeviceKind::Block, major: 8, minor: 1 }),
            entry("f", EntryKind::File { size_bytes: 1 << 40, extents: vec![extent] }),
            link,
            bare("p", EntryKind::Fifo),
            Entry { mode: 0, ..bare("s", EntryKind::Symlink { target: b"../\xff".to_vec() }) },
        ];
        for entry in &entries {
            let generated = pb::Entry::decode(Bytes::from(entry.encode())).expect("the same message");
            assert_eq!(generated.encode_to_vec(), entry.encode(), "{entry:?}");
            assert_ne!(generated.kind, None);
        }
        let manifest = Manifest::new(entries, Limits::default()).expect("valid");
        let mut builder = ManifestBuilder::new(Limits::default());
        for part in manifest_parts(&manifest) {
            push_part(&mut builder, &part).expect("valid");
        }
        assert_eq!(builder.finish().expect("whole").tree_digest(), manifest.tree_digest());
    }

    #[test]
    fn file_with_many_extents_is_split() {
        let count = 2 * EXTENTS as u64 + 1;
        let extent =
            |at| Extent { offset: at << 20, length: 1 << 20, digest: domain::Digest([at as u8; 32]) };
        let extents: Vec<_> = (0..count).map(extent).collect();
        let entries = [
            entry("", EntryKind::Directory),
            entry("large", EntryKind::File { size_bytes: count << 20, extents }),
            entry("next", EntryKind::File { size_bytes: 0, extents: vec![] }),
        ];
        let manifest = Manifest::new(entries, Limits::default()).expect("valid");
        let parts: Vec<_> = manifest_parts(&manifest).collect();
        assert!(parts.iter().all(|part| part.encoded_len() < 2 << 20));
        assert_eq!(parts.iter().filter(|part| part.more).count(), 2);

        let receive = |parts: &[pb::ManifestPart]| {
            let mut builder = ManifestBuilder::new(Limits::default());
            parts.iter().try_for_each(|part| push_part(&mut builder, part))?;
            builder.finish()
        };
        assert_eq!(receive(&parts).expect("whole").tree_digest(), manifest.tree_digest());
        for missing in 0..parts.len() {
            let some: Vec<_> = parts.iter().enumerate().filter(|(at, _)| *at != missing).collect();
            let some: Vec<_> = some.into_iter().map(|(_, part)| part.clone()).collect();
            let received = receive(&some).map(|manifest| manifest.tree_digest());
            assert_ne!(received, Ok(manifest.tree_digest()), "without part {missing}");
        }
        let cut: Vec<_> = parts[..2].to_vec();
        assert!(receive(&cut).is_err_and(|error| error.to_string().contains("not finished")));
    }
}
