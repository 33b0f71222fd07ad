//! Manifests and sets of extents on the wire.
//!
//! An entry's encoding is what the digest of a tree is made of, so entries cross here as the bytes they are: `transfer` and the
//! generated code agree on every one of them, which a test holds.

use bytes::Bytes;
use prost::Message;
use tonic::Status;
use transfer::{InvalidManifest, InvalidRun, Manifest, ManifestBuilder, Runs};

use crate::pb::runtime as pb;

/// Most encoded bytes of a part of a manifest.
const PART_BYTES: usize = 1 << 20;
/// Most runs in a message.
const RUNS: usize = 50_000;

/// A manifest, in parts that fit a message.
pub fn manifest_parts(manifest: &Manifest) -> impl Iterator<Item = pb::ManifestPart> {
    manifest.parts(PART_BYTES).map(|entries| pb::ManifestPart {
        // Both sides are encodings of the same message, so decoding cannot fail; the tests hold that.
        entries: entries
            .iter()
            .filter_map(|entry| pb::Entry::decode(Bytes::from(entry.encode())).ok())
            .collect(),
    })
}

/// The end of a manifest.
#[must_use]
pub fn manifest_end(manifest: &Manifest) -> pb::ManifestEnd {
    pb::ManifestEnd {
        digest: manifest.tree_digest().as_bytes().to_vec().into(),
        size_bytes: manifest.size_bytes(),
        entries: u64::try_from(manifest.entries().len()).unwrap_or(u64::MAX),
    }
}

/// Takes a part of a manifest.
pub fn push_part(builder: &mut ManifestBuilder, part: &pb::ManifestPart) -> Result<(), InvalidManifest> {
    part.entries.iter().try_for_each(|entry| builder.push_encoded(&entry.encode_to_vec()))
}

/// Ordinals, in messages that are not too large. At least one message.
pub fn runs(runs: &Runs) -> Vec<pb::ExtentRuns> {
    let all: Vec<_> =
        runs.runs().map(|run| pb::ExtentRun { first: run.start, count: run.end - run.start }).collect();
    all.chunks(RUNS).map(|runs| pb::ExtentRuns { runs: runs.to_vec() }).collect()
}

/// Takes some ordinals.
pub fn push_runs(runs: &mut Runs, part: &pb::ExtentRuns) -> Result<(), InvalidRun> {
    part.runs.iter().try_for_each(|run| runs.insert_run(run.first, run.count))
}

/// A manifest that breaks a rule, as `service` says it.
#[must_use]
pub fn invalid_manifest(service: &str, error: &InvalidManifest) -> Status {
    crate::Reason::InvalidManifest.status(service, domain::chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use transfer::{DeviceKind, Entry, EntryKind, Extent, Limits, Xattr};

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
    fn the_generated_code_and_transfer_encode_entries_alike() {
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
}
